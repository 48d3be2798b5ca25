//! Reads and writes that need no device and pass scheduling by: outstanding like others, so that what conflicts with them
//! waits.

use super::{Core, Pieced};
use crate::table::{Slot, State};
use crate::types::{Nanos, Op, Request, RequestId};

impl Core {
    /// Whether any request may currently pass scheduling by; see [`Core::pass`].
    pub fn lets_pass(&self) -> bool {
        !self.shared.unlimited && !self.shared.shares
    }

    /// Accepts a read or write that is served at once, without being scheduled; a read may turn out to need a device after all.
    /// Until [`Core::passed`], what conflicts with it waits for it. `None`: it would have to wait for an outstanding request
    /// itself, it reads and its connection takes no data, there is no room, or the policy schedules shares rather than devices,
    /// or hands over everything at once.
    ///
    /// # Panics
    /// When its lane is not one of this core's.
    pub fn pass(&mut self, request: &Request) -> Option<RequestId> {
        let shared = &mut self.shared;
        let extent = &request.extent;
        assert!(extent.lane.index() < shared.lanes.len(), "lane {:?} does not exist", extent.lane);
        let range = extent.lane_offset..extent.end();
        if !request.op.is_data()
            || !self.lets_pass()
            || self.shared.table.is_worn()
            || (request.op == Op::Read && self.shared.not_ready.contains(&request.conn))
            || self.conflicts.hold_up(&self.shared.table, request.op, (extent.file, extent.lane), range)
        {
            return None;
        }
        let slot = self.shared.table.insert(request)?;
        self.drop_changed(request);
        let is_blocked = self.conflicts.enter(&self.shared.table, slot);
        debug_assert!(!is_blocked, "nothing holds it up");
        self.shared.table.set_state(slot, State::Passing);
        Some(self.shared.table.id(slot))
    }

    /// What passed scheduling by has ended: `served`, or not, and then it is forgotten. True if that lets others start.
    ///
    /// A write that was served counts as completed, too: its bytes reach the device later, and whose they are is to be known.
    pub fn passed(&mut self, now: Nanos, id: RequestId, served: bool) -> bool {
        let Some(slot) = self.passing(id) else { return false };
        if served {
            self.count(|s| &mut s.passed);
            self.count_written(now, slot);
        }
        let waiting = self.blocked;
        self.leave(now, slot);
        self.blocked < waiting
    }

    /// Of a read that passed scheduling by, the first `served_bytes` were served; the rest is scheduled, as a request of its
    /// place in the order of arrival. False if there is no such read, or nothing is left of it.
    pub fn schedule_rest(&mut self, now: Nanos, id: RequestId, served_bytes: u64) -> bool {
        let rest = |slot: &Slot| (1..self.shared.table.len_bytes(*slot)).contains(&served_bytes);
        let Some(slot) = self.passing(id).filter(rest) else { return false };
        let (whole, job) = (self.shared.table.extent(slot), self.shared.table.job(slot));
        if let Some(statistics) = &mut self.statistics {
            statistics.arrived(now, Some(whole.len));
            statistics.throughputs.arrived(now, job);
        }
        self.pieced.insert(slot, Pieced { whole, in_flight: 0 });
        self.shared.table.advance(slot, served_bytes);
        self.admit(now, slot);
        true
    }

    fn count_written(&mut self, now: Nanos, slot: Slot) {
        let (table, names) = (&self.shared.table, &self.shared.names);
        if let (Op::Write, Some(statistics)) = (table.op(slot), &mut self.statistics) {
            let who = (names.job(table.job(slot)), names.user(table.user(slot)));
            let (arrival, len) = (table.arrival(slot), table.len_bytes(slot));
            statistics.arrived(arrival, Some(len));
            statistics.write_bytes = statistics.write_bytes.saturating_add(len);
            statistics.completed(now, who, Op::Write, len, now.since(arrival));
        }
    }

    /// What passes scheduling by under that identity.
    fn passing(&self, id: RequestId) -> Option<Slot> {
        let slot = self.shared.table.find(id)?;
        (self.shared.table.state(slot) == State::Passing).then_some(slot)
    }

    /// Forgets an outstanding request and admits those that it blocked.
    pub(super) fn leave(&mut self, now: Nanos, slot: Slot) {
        let mut released = std::mem::take(&mut self.released);
        self.conflicts.leave(&self.shared.table, slot, &mut released);
        self.shared.table.remove(slot);
        self.blocked -= released.len() as u32;
        for freed in released.drain(..) {
            self.admit(now, freed);
        }
        self.released = released;
    }
}
