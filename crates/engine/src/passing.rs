//! Reads and writes that are served without being scheduled, where nothing that conflicts with them is under way.

use std::sync::atomic::Ordering;

use impresario_sched::{Ended, Nanos, RequestId};

use crate::Engine;
use crate::interface::{Refused, Submission};
use crate::now;
use crate::state::{Held, Names};

/// A request that passes scheduling by. What conflicts with it waits until this is dropped, or said to be served.
pub struct Passing<'a, T: Send + 'static> {
    engine: &'a Engine<T>,
    request: Submission,
    arrival: Nanos,
    id: RequestId,
    names: Names,
    has_ended: bool,
}

impl<T: Send + 'static> Engine<T> {
    /// Whether [`pass`](Engine::pass) may let any request pass at present.
    pub fn lets_pass(&self) -> bool {
        self.shared.lets_pass.load(Ordering::Relaxed)
    }

    /// Lets a read or write be served at once, without being submitted, if that may be; see [`impresario_sched::Core::pass`].
    pub fn pass(&self, request: &Submission) -> Option<Passing<'_, T>> {
        if !self.lets_pass() {
            return None;
        }
        let mut state = self.shared.lock();
        if state.closed {
            return None;
        }
        let arrival = now();
        let (names, of_core) = state.request(arrival, request);
        let Some(id) = state.core.pass(&of_core) else {
            state.release(names);
            return None;
        };
        // Speculations of what it changes.
        state.forget_given_up(&*self.shared.executor);
        Some(Passing { engine: self, request: *request, arrival, id, names, has_ended: false })
    }
}

impl<T: Send + 'static> Passing<'_, T> {
    /// It was served as a whole: so many bytes were there.
    pub fn served(mut self, moved_bytes: u64) {
        self.end(Some(moved_bytes));
    }

    /// Its first `served_bytes` were served, and the rest, not nothing, needs a device: it is scheduled with `context`, of which
    /// the executor makes a [piece](crate::Executor::piece), and with speculations. Gives what is refused.
    pub fn schedule_rest(
        mut self,
        served_bytes: u64,
        context: T,
        ahead: impl IntoIterator<Item = (Submission, T)>,
    ) -> Option<Refused<T>> {
        let shared = &self.engine.shared;
        let mut state = shared.lock();
        let at = now();
        if state.closed || !state.core.schedule_rest(at, self.id, served_bytes) {
            drop(state);
            return Some(Refused::Closed(context));
        }
        self.has_ended = true;
        state.hold(self.id, Held { context, names: self.names });
        state.take_in_ahead(at, ahead, &*shared.executor);
        shared.pump(state, at);
        None
    }

    fn end(&mut self, moved_bytes: Option<u64>) {
        self.has_ended = true;
        let shared = &self.engine.shared;
        let mut state = shared.lock();
        let at = now();
        let lets_start = state.core.passed(at, self.id, moved_bytes.is_some());
        state.release(self.names);
        shared.make_room(&state);
        if let (Some(moved_bytes), Some(observer)) = (moved_bytes, &state.observer) {
            let of = &self.request;
            observer.ended(&Ended {
                arrival: self.arrival,
                finished: at,
                file: of.file,
                client: of.client,
                job: of.job,
                offset: of.lane_offset,
                len: of.len,
                moved_bytes,
                user: of.user,
                errno: 0,
                lane: of.lane,
                op: of.op,
            });
        }
        if lets_start {
            shared.pump(state, at);
        }
    }
}

impl<T: Send + 'static> Drop for Passing<'_, T> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.end(None);
        }
    }
}
