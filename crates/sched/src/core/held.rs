//! Reads that wait with the speculations of their file.
//!
//! While a file gives way to reads of others (`overtaking.rs`), what of it is queued to be read ahead does not start. A
//! policy that hands over everything at once leaves the order to the layer below, which may serve this file's own reads of
//! these bytes before the others, one after the other. They wait here instead: like those that conflict with an older
//! request, unseen by the policy, and for half a second at most.

use super::Core;
use crate::table::{Slot, State};
use crate::types::{Nanos, Op, RequestId};

/// The reads that wait.
pub(super) struct Held {
    slots: Vec<Slot>,
    /// The first of them goes then at the latest; `MAX`: there is none.
    until: Nanos,
    /// A batch has ended: some may go sooner.
    look: bool,
}

impl Default for Held {
    fn default() -> Held {
        Held { slots: Vec::new(), until: Nanos::MAX, look: false }
    }
}

impl Held {
    /// What they wait for may be over.
    pub(super) fn look(&mut self) {
        self.look = true;
    }

    /// Forgets a request that is withdrawn.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.slots.retain(|held| *held != slot);
    }
}

impl Core {
    /// Whether a request waits with the speculations of its file; then until when at most.
    fn held_until(&self, now: Nanos, slot: Slot) -> Option<Nanos> {
        let shared = &self.shared;
        let table = &shared.table;
        if self.speculations.is_empty() || !shared.unlimited || table.op(slot) != Op::Read {
            return None;
        }
        let place = (table.lane(slot), table.file(slot), table.start(slot));
        self.speculations.holds(table, &shared.names, place, table.end(slot), now)
    }

    /// Lets a request wait, if it should; whether it does.
    pub(super) fn hold_back(&mut self, now: Nanos, slot: Slot) -> bool {
        let Some(until) = self.held_until(now, slot) else { return false };
        self.shared.table.set_state(slot, State::Blocked);
        self.blocked += 1;
        self.held.slots.push(slot);
        self.held.until = self.held.until.min(until);
        true
    }

    /// Admits the reads whose wait is over, those of a file in the order of their places.
    pub(super) fn release_held(&mut self, now: Nanos) {
        if self.held.slots.is_empty() || !self.held.look && now < self.held.until {
            return;
        }
        (self.held.look, self.held.until) = (false, Nanos::MAX);
        let mut slots = std::mem::take(&mut self.held.slots);
        slots.sort_unstable_by_key(|slot| (self.shared.table.file(*slot), self.shared.table.start(*slot)));
        slots.retain(|slot| {
            let Some(until) = self.held_until(now, *slot) else {
                self.blocked -= 1;
                self.admit_now(now, *slot);
                return false;
            };
            self.held.until = self.held.until.min(until);
            true
        });
        self.held.slots = slots;
    }

    /// When the first of what gives way may start, if nothing ends before; `MAX`: nothing gives way.
    pub(super) fn bar_end(&self) -> Nanos {
        self.held.until.min(self.speculations.barred_until())
    }

    /// The reads that wait with the speculations of their files.
    pub fn held_back(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.held.slots.iter().map(|slot| self.shared.table.id(*slot))
    }
}
