//! Removing requests before they are served: cancelling and draining.

use super::{Core, left_queue};
use crate::contract::{Cancelled, Event};
use crate::table::{Slot, State};
use crate::types::{ConnId, Nanos, Request, RequestId};

impl Core {
    /// Cancels a request. If a piece of it is in flight it counts as in flight; its remaining pieces are not started.
    pub fn cancel(&mut self, now: Nanos, id: RequestId) -> Cancelled {
        let Some(slot) = self.shared.table.find(id) else { return Cancelled::Unknown };
        match self.shared.table.state(slot) {
            State::InFlight | State::Passing => Cancelled::InFlight,
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
            self.held.remove(slot);
        } else {
            self.queued -= 1;
            if self.shared.table.op(slot).is_data() {
                left_queue(&mut self.shared, &mut self.stranded, &[slot]);
                self.policy.dequeue(&self.shared.view(now), slot);
            } else {
                self.barriers.retain(|s| *s != slot);
                self.syncs.retain(|s| *s != slot);
            }
        }
        if self.pieced.get(&slot).is_some_and(|p| p.in_flight > 0) {
            self.shared.table.set_state(slot, State::InFlight);
            return Cancelled::InFlight;
        }
        self.forget_pieces(slot);
        if let Some(watch) = &mut self.watch {
            watch.forget(slot);
        }
        self.retire(now, slot, 0);
        Cancelled::Removed
    }

    /// Cancels the queued requests of a connection and returns their identities. Requests in flight stay.
    pub fn cancel_connection(&mut self, now: Nanos, conn: ConnId) -> Vec<RequestId> {
        // A closed connection must not be waited for.
        self.event(now, Event::Ready { connection: conn, ready: true });
        self.cancel_queued(now, |core, slot| core.shared.table.conn(slot) == conn)
    }

    /// Cancels the queued requests that `wanted` accepts, and returns their identities.
    pub fn cancel_where(&mut self, now: Nanos, mut wanted: impl FnMut(RequestId) -> bool) -> Vec<RequestId> {
        self.cancel_queued(now, |core, slot| wanted(core.shared.table.id(slot)))
    }

    fn cancel_queued(&mut self, now: Nanos, mut wanted: impl FnMut(&Core, Slot) -> bool) -> Vec<RequestId> {
        let slots = self.shared.table.in_state(|s| matches!(s, State::Queued | State::Blocked));
        // Youngest first, so that no request blocked by a cancelled one is admitted in between.
        let wanted: Vec<Slot> = slots.into_iter().rev().filter(|slot| wanted(self, *slot)).collect();
        let cancelled = wanted.into_iter().map(|slot| {
            let id = self.shared.table.id(slot);
            self.cancel(now, id);
            id
        });
        cancelled.collect()
    }

    /// Removes everything that is not in flight, in order of arrival; of a partly dispatched request, the rest.
    pub fn drain(&mut self, now: Nanos) -> Vec<Request> {
        self.speculations.give_up_all(&mut self.shared.table);
        let slots = self.shared.table.in_state(|s| matches!(s, State::Queued | State::Blocked));
        let mut requests = Vec::with_capacity(slots.len());
        for slot in slots.into_iter().rev() {
            let (request, state) = (self.shared.table.request(slot), self.shared.table.state(slot));
            self.count(|s| &mut s.cancelled);
            self.withdraw(now, slot, state);
            requests.push(request);
        }
        requests.reverse();
        requests
    }
}
