//! Who sends: one thread at a time on a connection, which sends for the others too.
//!
//! A small frame is put into a queue; when a thread is sending already, that thread sends it next, together
//! with whatever else has come meanwhile. A frame with a payload waits for its turn.

use std::time::Instant;

// The model of this file has other locks in this place.
use super::lock::{Condvar, Mutex, MutexGuard};

/// Small frames are not queued beyond this many bytes: then they wait for their turn, too.
const QUEUE_MAX_BYTES: usize = 256 << 10;
/// Buffers kept for the next turn are at most so large, bytes.
const KEPT_MAX_BYTES: usize = 16 << 10;

/// What is to be sent.
#[derive(Default)]
pub(crate) struct Outgoing {
    state: Mutex<State>,
    free: Condvar,
}

#[derive(Default)]
struct State {
    taken: bool,
    waiting: u32,
    queue: Vec<u8>,
    spare: Vec<u8>,
}

/// The turn of a thread that must send `batch`, and then what was queued meanwhile ([`next`](Turn::next)). Dropped before that, it drops the
/// queue: the connection is broken.
pub(crate) struct Turn<'a> {
    outgoing: &'a Outgoing,
    /// Frames to be sent now.
    pub(crate) batch: Vec<u8>,
    has_ended: bool,
}

impl Outgoing {
    /// Queues a small frame. The caller is to send it if it gets the turn.
    pub(crate) fn put(&self, frame: &[u8], deadline: Instant) -> Put<'_> {
        let mut state = self.state.lock();
        if state.taken && state.queue.len() <= QUEUE_MAX_BYTES {
            state.queue.extend_from_slice(frame);
            return Put::Queued;
        }
        drop(state);
        let Some(mut turn) = self.take(deadline) else { return Put::Late };
        turn.batch.extend_from_slice(frame);
        Put::Turn(turn)
    }

    /// Queues a small frame that leaves with [`Outgoing::take_queued`], or earlier; false when there is no room for it.
    pub(crate) fn queue(&self, frame: &[u8]) -> bool {
        let mut state = self.state.lock();
        let has_room = state.queue.len() <= QUEUE_MAX_BYTES;
        if has_room {
            state.queue.extend_from_slice(frame);
        }
        has_room
    }

    /// The turn to send what is queued; `None` when nothing is, or when another thread has the turn and sends it.
    pub(crate) fn take_queued(&self) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        if state.taken || state.queue.is_empty() {
            return None;
        }
        state.taken = true;
        let spare = std::mem::take(&mut state.spare);
        let batch = std::mem::replace(&mut state.queue, spare);
        Some(Turn { outgoing: self, batch, has_ended: false })
    }

    /// Takes the turn; `None` when it did not become free until the deadline.
    pub(crate) fn take(&self, deadline: Instant) -> Option<Turn<'_>> {
        let mut state = self.state.lock();
        while state.taken {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state.waiting += 1;
            state = self.free.wait_timeout(state, left).0;
            state.waiting -= 1;
        }
        state.taken = true;
        let batch = std::mem::take(&mut state.spare);
        Some(Turn { outgoing: self, batch, has_ended: false })
    }
}

/// What became of a small frame.
pub(crate) enum Put<'a> {
    /// Another thread sends it.
    Queued,
    /// The caller is to send it.
    Turn(Turn<'a>),
    /// Too much is waiting to be sent, and the deadline has come.
    Late,
}

impl Turn<'_> {
    /// After `batch` was sent: takes what was queued meanwhile, or ends the turn.
    pub(crate) fn next(&mut self) -> bool {
        self.batch.clear();
        self.batch.shrink_to(KEPT_MAX_BYTES);
        let mut state = self.outgoing.state.lock();
        if !state.queue.is_empty() {
            std::mem::swap(&mut state.queue, &mut self.batch);
            return true;
        }
        state.spare = std::mem::take(&mut self.batch);
        self.end(state);
        false
    }

    fn end(&mut self, mut state: MutexGuard<'_, State>) {
        self.has_ended = true;
        state.taken = false;
        let wake = state.waiting > 0;
        drop(state);
        if wake {
            self.outgoing.free.notify_one();
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let outgoing = self.outgoing;
            let mut state = outgoing.state.lock();
            state.queue.clear();
            self.end(state);
        }
    }
}
