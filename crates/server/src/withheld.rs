//! Tells clients which of their calls wait for a limit, so that they wait on beyond the time in which a server must answer.
//!
//! All servers whose scheduling may withhold calls have one [`Teller`]. It tells only of calls that a rule withholds, here or at
//! a server behind this one: a call that waits for a device or a server that hangs is told to nobody, and fails in time.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use impresario_base::lock::{Condvar, Mutex};
use impresario_sched::ConnId;
use impresario_wire::{Answer, Fault};
use rustc_hash::FxHashMap;

use crate::connection::{Connection, Reply};

/// How often clients are told, at the longest.
const TELL_EVERY_MAX: Duration = Duration::from_millis(500);
/// So soon after the first call that may wait, if none did before: until then its client may send as much as it likes.
const TELL_FIRST_AFTER: Duration = Duration::from_millis(50);
/// How often they are told while a call without an answer has not failed yet.
const TOLD_IN_TIMEOUT: u32 = 8;

/// A call by its connection and its number there.
pub(crate) type CallKey = (Arc<Connection>, u64);

/// The calls that wait, by connection.
#[derive(Default)]
pub(crate) struct Waiting(FxHashMap<ConnId, (Arc<Connection>, Vec<u64>)>);

impl Waiting {
    /// The call that is owed this reply waits.
    pub(crate) fn add(&mut self, reply: &Reply) {
        reply.call().into_iter().for_each(|(connection, number)| self.add_call(connection, number));
    }

    pub(crate) fn add_call(&mut self, connection: &Arc<Connection>, number: u64) {
        self.0.entry(connection.id()).or_insert_with(|| (connection.clone(), Vec::new())).1.push(number);
    }

    /// Tells the clients; whether there are any. `before`: those that were told last time.
    fn tell(self, before: &mut Vec<Weak<Connection>>) -> bool {
        let are_any = !self.0.is_empty();
        before.retain(|told| {
            let told = told.upgrade().filter(|told| !told.has_ended());
            let stays = told.as_ref().is_some_and(|told| self.0.contains_key(&told.id()));
            told.iter().filter(|_| !stays).for_each(|told| _ = told.note_withheld(false));
            stays
        });
        for (connection, mut calls) in self.0.into_values() {
            if !connection.note_withheld(true) {
                before.push(Arc::downgrade(&connection));
            }
            // A call that was divided waits in several parts.
            calls.sort_unstable();
            calls.dedup();
            let unread_from = connection.unread_from();
            connection.outbox.send_if_free(&Answer::Withheld { calls, unread_from });
        }
        are_any
    }
}

/// Calls of a connection that its client gives up.
pub(crate) struct GivenUp {
    pub(crate) conn: ConnId,
    pub(crate) calls: Vec<u64>,
}

impl GivenUp {
    /// The call that is owed this reply is one of them.
    pub(crate) fn has(&self, reply: &Reply) -> bool {
        reply.call().is_some_and(|(connection, number)| self.has_call(connection, number))
    }

    pub(crate) fn has_call(&self, connection: &Connection, number: u64) -> bool {
        connection.id() == self.conn && self.calls.contains(&number)
    }

    /// What is answered to them.
    pub(crate) fn fault() -> Fault {
        Fault { errno: Fault::GIVEN_UP, message: "the call was given up while it waited for a limit".into() }
    }
}

/// A thread that tells clients. It sleeps while no call can wait for a limit.
pub(crate) struct Teller {
    bell: Bell,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Wakes the thread.
#[derive(Clone, Default)]
pub(crate) struct Bell(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// A call may wait that the thread has not seen.
    is_asked: AtomicBool,
    stopping: Mutex<bool>,
    changed: Condvar,
}

impl Teller {
    /// Tells of the calls that `find` adds, so often that no client waits in vain for `timeout`, after which a call without an answer
    /// fails.
    pub(crate) fn start(
        bell: Bell,
        timeout: Duration,
        find: impl Fn(&mut Waiting) + Send + 'static,
    ) -> Result<Teller, String> {
        let every = (timeout / TOLD_IN_TIMEOUT).min(TELL_EVERY_MAX);
        let thread = std::thread::Builder::new().name("limits".into()).stack_size(256 << 10).spawn({
            let shared = bell.0.clone();
            move || shared.run(every, find)
        });
        let thread = thread.map_err(|error| format!("the system starts no thread: {error}"))?;
        Ok(Teller { bell, thread: Mutex::new(Some(thread)) })
    }

    /// A call may wait for a limit.
    pub(crate) fn ask(&self) {
        self.bell.ring();
    }

    pub(crate) fn stop(&self) {
        let Bell(shared) = &self.bell;
        *shared.stopping.lock() = true;
        shared.changed.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

impl Bell {
    /// A call may wait for a limit.
    pub(crate) fn ring(&self) {
        // Read first: under a rule this is asked for every request.
        if !self.0.is_asked.load(Relaxed) && !self.0.is_asked.swap(true, Relaxed) {
            // Under the lock: the thread is either before its look at it, or waits.
            drop(self.0.stopping.lock());
            self.0.changed.notify_all();
        }
    }
}

impl Shared {
    fn run(&self, every: Duration, find: impl Fn(&mut Waiting)) {
        let (mut told, mut pause) = (Vec::new(), every);
        let mut stopping = self.stopping.lock();
        while !*stopping {
            if !self.is_asked.load(Relaxed) {
                pause = every.min(TELL_FIRST_AFTER);
                stopping = self.changed.wait(stopping);
                continue;
            }
            stopping = self.changed.wait_timeout_while(stopping, pause, |stopping| !*stopping).0;
            pause = every;
            drop(stopping);
            // Before the look: a call that comes after it asks anew.
            self.is_asked.store(false, Relaxed);
            let mut waiting = Waiting::default();
            find(&mut waiting);
            if waiting.tell(&mut told) {
                self.is_asked.store(true, Relaxed);
            }
            stopping = self.stopping.lock();
        }
    }
}
