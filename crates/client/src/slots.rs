//! The calls under way on one connection: what is known of each, and who waits.

use std::sync::Arc;
use std::thread::Thread;
use std::time::Instant;

use impresario_wire::Answer;
use rustc_hash::FxHashMap;

use crate::landing::Landing;

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
    pub(crate) started: Instant,
    /// Where the payload goes; lent to the receiving thread while `lent`.
    pub(crate) landing: Option<Landing>,
    /// The receiving thread is writing into the landing, outside the lock: its owner must wait.
    pub(crate) lent: bool,
    /// The payload, when it came before anybody lent buffers for it.
    pub(crate) spill: Vec<u8>,
    /// The answer and the length of its payload.
    pub(crate) done: Option<(Answer, u32)>,
    pub(crate) waiter: Option<Thread>,
    /// The caller has given up; the answer is thrown away.
    pub(crate) abandoned: bool,
    /// The caller would give up, but its buffers are lent.
    pub(crate) leaving: bool,
}

impl Slot {
    pub(crate) fn new(want_bytes: u32, landing: Option<Landing>) -> Slot {
        Slot {
            want_bytes,
            started: Instant::now(),
            landing,
            lent: false,
            spill: Vec::new(),
            done: None,
            waiter: None,
            abandoned: false,
            leaving: false,
        }
    }
}

/// The state of a connection.
pub(crate) struct Slots<R> {
    pub(crate) slots: FxHashMap<u64, Slot>,
    /// The receiving end, while nobody receives. Who takes it is the leader.
    pub(crate) reader: Option<R>,
    pub(crate) broken: Option<Breakage>,
    pub(crate) last_heard: Instant,
    /// A sign of life was asked for since.
    pub(crate) pinged: bool,
    pub(crate) abandoned: u32,
    /// Threads parked until their answer comes or they are asked to receive.
    followers: Vec<(u64, Thread)>,
}

impl<R> Slots<R> {
    pub(crate) fn new(reader: R) -> Slots<R> {
        Slots {
            slots: FxHashMap::default(),
            reader: Some(reader),
            broken: None,
            last_heard: Instant::now(),
            pinged: false,
            abandoned: 0,
            followers: Vec::new(),
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

    /// A parked thread to be asked to receive, when nobody does. To be woken, after the lock was released, by whoever
    /// stops receiving or waiting.
    pub(crate) fn successor(&self) -> Option<Thread> {
        self.reader.as_ref()?;
        self.followers.last().map(|(_, thread)| thread.clone())
    }

    /// Wakes every parked thread.
    pub(crate) fn wake_all(&self) {
        self.followers.iter().for_each(|(_, thread)| thread.unpark());
    }

    /// Calls without an answer.
    pub(crate) fn unanswered(&self) -> usize {
        self.slots.values().filter(|slot| slot.done.is_none()).count()
    }
}
