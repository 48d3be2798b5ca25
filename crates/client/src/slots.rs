//! The calls under way on one connection: what is known of each, and which thread waits.

use std::sync::Arc;
use std::thread::Thread;

use impresario_node::pieces::Gathering;
use impresario_node::session::Silence;
use impresario_sched::Nanos;
use impresario_wire::Answer;
use rustc_hash::FxHashMap;

use crate::landing::Landing;
use crate::unattended::Unattended;

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
        }
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
}

impl<R> Slots<R> {
    pub(crate) fn new(reader: R, now: Nanos) -> Slots<R> {
        Slots {
            slots: FxHashMap::default(),
            reader: Some(reader),
            broken: None,
            silence: Silence::new(now),
            abandoned: 0,
            followers: Vec::new(),
            unattended: Unattended::default(),
        }
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
