//! Requests that leave the core without having been served.

use super::{Core, left_queue};
use crate::contract::{Cancelled, Event};
use crate::table::{Slot, State};
use crate::types::{ConnId, Nanos, Request, RequestId};

impl Core {
    /// Withdraws a request. One of which a piece is in flight counts as in flight; its other pieces are not started.
    pub fn cancel(&mut self, now: Nanos, id: RequestId) -> Cancelled {
        let Some(slot) = self.ground.table.find(id) else { return Cancelled::Unknown };
        match self.ground.table.state(slot) {
            State::InFlight => Cancelled::InFlight,
            State::Free | State::Speculative => Cancelled::Unknown,
            state => {
                self.count(|s| &mut s.cancelled);
                self.withdraw(now, slot, state)
            }
        }
    }

    fn withdraw(&mut self, now: Nanos, slot: Slot, state: State) -> Cancelled {
        if state == State::Blocked {
            self.blocked -= 1;
        } else {
            self.queued -= 1;
            if self.ground.table.op(slot).is_data() {
                left_queue(&mut self.ground, &mut self.stranded, &[slot]);
                self.policy.dequeue(&self.ground.view(now), slot);
            } else {
                self.barriers.retain(|s| *s != slot);
            }
        }
        if self.pieced.get(&slot).is_some_and(|p| p.in_flight > 0) {
            self.ground.table.set_state(slot, State::InFlight);
            return Cancelled::InFlight;
        }
        self.forget_pieces(slot);
        if let Some(watch) = &mut self.watch {
            watch.forget(slot);
        }
        self.retire(now, slot, 0);
        Cancelled::Removed
    }

    /// Cancels what a connection has queued; returns the identities. What is in flight stays.
    pub fn cancel_connection(&mut self, now: Nanos, conn: ConnId) -> Vec<RequestId> {
        let slots = self.ground.table.in_state(|s| matches!(s, State::Queued | State::Blocked));
        // From the youngest: what a cancelled request blocked is gone before it could be admitted.
        let mine = slots.into_iter().rev().filter(|s| self.ground.table.conn(*s) == conn).collect::<Vec<_>>();
        // A connection that is gone can be waited for no more.
        self.event(now, Event::Ready { connection: conn, ready: true });
        let mut gone = Vec::with_capacity(mine.len());
        for slot in mine {
            let id = self.ground.table.id(slot);
            self.cancel(now, id);
            gone.push(id);
        }
        gone
    }

    /// Takes everything out that is not in flight, in order of arrival; of a request that is served piece by piece, what
    /// is left.
    pub fn drain(&mut self, now: Nanos) -> Vec<Request> {
        self.speculations.give_up_all(&mut self.ground.table);
        let slots = self.ground.table.in_state(|s| matches!(s, State::Queued | State::Blocked));
        let mut requests = Vec::with_capacity(slots.len());
        for slot in slots.into_iter().rev() {
            let (request, state) = (self.ground.table.request(slot), self.ground.table.state(slot));
            self.count(|s| &mut s.cancelled);
            self.withdraw(now, slot, state);
            requests.push(request);
        }
        requests.reverse();
        requests
    }
}
