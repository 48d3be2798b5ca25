//! The calls under way on one connection: what is known of each, and which thread waits.

use std::sync::Arc;
use std::thread::Thread;
use std::time::Instant;

use impresario_node::pieces::Gathering;
use impresario_node::session::Silence;
use impresario_sched::Nanos;
use impresario_wire::Answer;
use rustc_hash::FxHashMap;

use crate::landing::Landing;
use crate::unattended::Unattended;
use crate::watch::{self, Watch};

/// Most calls whose callers have given up and whose answers may still come; more, and the connection goes.
pub(crate) const ABANDONED_MAX: u32 = 1024;

/// Why a connection ended.
#[derive(Clone, Debug)]
pub(crate) struct Breakage {
    pub(crate) cause: Arc<str>,
    /// The peer broke the protocol: trying again would not help.
    pub(crate) protocol: bool,
}

/// A call under way.
pub(crate) struct Slot {
    /// Longest payload that the answer may have, bytes.
    pub(crate) want_bytes: u32,
    pub(crate) sent: Nanos,
    /// Where the payload goes; lent to the receiving thread while `lent`.
    pub(crate) landing: Option<Landing>,
    /// The receiving thread is writing into the landing, outside the lock: its owner must wait.
    pub(crate) lent: bool,
    /// The payload, when it came before the caller lent buffers for it.
    pub(crate) spill: Vec<u8>,
    /// What has come of an answer in pieces.
    pub(crate) gathering: Gathering,
    /// The answer and the length of its payload.
    pub(crate) done: Option<(Answer, u32)>,
    pub(crate) waiter: Option<Thread>,
    /// The caller has given up; the answer is thrown away.
    pub(crate) abandoned: bool,
    /// The caller would give up, but its buffers are lent.
    pub(crate) leaving: bool,
    /// When it is given up, if no thread waits for it.
    pub(crate) until: Option<Nanos>,
    /// The server has said that a limit withholds it: it is not given up before this.
    pub(crate) withheld_until: Option<Instant>,
    /// Who hears of that, and may give the call up.
    pub(crate) watch: Option<Arc<Watch>>,
    /// The server was asked to forget it.
    pub(crate) is_revoked: bool,
}

impl Slot {
    pub(crate) fn new(want_bytes: u32, landing: Option<Landing>, now: Nanos) -> Slot {
        Slot {
            want_bytes,
            sent: now,
            landing,
            lent: false,
            spill: Vec::new(),
            gathering: Gathering::new(want_bytes.into()),
            done: None,
            waiter: None,
            abandoned: false,
            leaving: false,
            until: None,
            withheld_until: None,
            watch: watch::present(),
            is_revoked: false,
        }
    }

    /// A limit withholds it, and the server's word of that counts until then.
    pub(crate) fn withhold(&mut self, until: Instant) {
        self.withheld_until = Some(until);
        self.watch.iter().for_each(|watch| watch.tell_withheld(until));
    }

    /// A limit withholds it, as far as is known.
    pub(crate) fn is_withheld(&self) -> bool {
        self.done.is_none() && self.withheld_until.is_some_and(|until| until > Instant::now())
    }

    /// It was given up while a limit withheld it, and the server does not know that yet.
    fn is_to_be_revoked(&self) -> bool {
        let is_given_up = self.watch.as_ref().is_some_and(|watch| watch.is_given_up());
        is_given_up && !self.is_revoked && self.withheld_until.is_some() && self.done.is_none()
    }

    /// Notes that the server is told of that now; true if it is to be.
    pub(crate) fn revoke(&mut self) -> bool {
        let is_due = self.is_to_be_revoked();
        self.is_revoked |= is_due;
        is_due
    }

    /// Takes in `len` bytes that the object does not have: zeros at `at` in the answer.
    pub(crate) fn zero(&mut self, at: usize, len: usize) {
        if len == 0 || self.abandoned {
            return;
        }
        match &mut self.landing {
            Some(landing) => landing.zero(at, len),
            // What is not kept yet is zero.
            None => self.spill.resize(self.spill.len().max(at + len), 0),
        }
    }

    /// Keeps payload that belongs `at` bytes into the answer until buffers are lent for it.
    pub(crate) fn keep(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        self.spill.resize(self.spill.len().max(end), 0);
        if let Some(place) = self.spill.get_mut(at..end) {
            place.copy_from_slice(bytes);
        }
    }
}

/// The state of a connection.
pub(crate) struct Slots<R> {
    pub(crate) slots: FxHashMap<u64, Slot>,
    /// The receiving end, while no thread receives. The thread that takes it is the leader.
    pub(crate) reader: Option<R>,
    pub(crate) broken: Option<Breakage>,
    pub(crate) silence: Silence,
    pub(crate) abandoned: u32,
    /// Threads parked until their answer comes or they are asked to receive.
    followers: Vec<(u64, Thread)>,
    /// What no thread waits for.
    pub(crate) unattended: Unattended,
    /// The server has said that limits withhold some of the calls; its word counts until then.
    pub(crate) withheld_until: Option<Instant>,
    /// Also calls that nobody watches wait on then.
    pub(crate) waits_for_limits: bool,
}

impl<R> Slots<R> {
    pub(crate) fn new(reader: R, now: Nanos, waits_for_limits: bool) -> Slots<R> {
        Slots {
            slots: FxHashMap::default(),
            reader: Some(reader),
            broken: None,
            silence: Silence::new(now),
            abandoned: 0,
            followers: Vec::new(),
            unattended: Unattended::default(),
            withheld_until: None,
            waits_for_limits,
        }
    }

    /// The server says that limits withhold these calls, and that it has not read those from that number on; its word counts `until`
    /// then. True if one of them was given up, which the server is to be told.
    pub(crate) fn withhold(&mut self, calls: &[u64], unread_from: Option<u64>, until: Instant) -> bool {
        self.withheld_until = Some(until);
        let (mut is_given_up, waits) = (false, self.waits_for_limits);
        let mut withhold = |slot: &mut Slot| {
            if !waits && slot.watch.is_none() {
                return;
            }
            slot.withhold(until);
            if slot.is_to_be_revoked() {
                is_given_up = true;
                slot.waiter.iter().for_each(Thread::unpark);
            }
        };
        calls.iter().filter_map(|call| self.slots.get_mut(call).map(&mut withhold)).count();
        if let Some(from) = unread_from {
            self.slots.iter_mut().filter(|(id, _)| **id >= from).for_each(|(_, slot)| withhold(slot));
        }
        is_given_up
    }

    /// Notes that a thread is about to park for call `id`.
    pub(crate) fn park(&mut self, id: u64) {
        let thread = std::thread::current();
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.waiter = Some(thread.clone());
        }
        self.followers.push((id, thread));
    }

    /// Notes that it is awake again.
    pub(crate) fn unpark(&mut self, id: u64) {
        if let Some(at) = self.followers.iter().position(|(parked, _)| *parked == id) {
            self.followers.swap_remove(at);
        }
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.waiter = None;
        }
    }

    /// A parked thread to be asked to receive, when no thread does. The thread that stops receiving or
    /// waiting wakes it after releasing the lock.
    pub(crate) fn successor(&self) -> Option<Thread> {
        self.reader.as_ref()?;
        // The keeper may rest among no followers: a call that began while another thread received did not wake it.
        self.followers.last().map(|(_, thread)| thread.clone()).or_else(|| self.unattended.waiting_keeper())
    }

    /// Threads are parked.
    pub(crate) fn has_followers(&self) -> bool {
        !self.followers.is_empty()
    }

    /// Wakes every parked thread that waits for something.
    pub(crate) fn wake_all(&self) {
        self.followers.iter().for_each(|(_, thread)| thread.unpark());
        self.unattended.waiting_keeper().inspect(Thread::unpark);
    }

    /// Calls without an answer.
    pub(crate) fn unanswered(&self) -> usize {
        self.slots.values().filter(|slot| slot.done.is_none()).count()
    }
}
