//! Flows: the queued requests of one party (client, application, rule) for one group of lanes, in order of arrival.
//!
//! The policy decides which flow sends; the flow's oldest request goes, with the requests that touch it if the policy
//! aggregates. The guard is for policies that favour some flows: the oldest request of a group goes next after
//! `guard_batches` batches passed it over.

use std::hash::Hash;

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::arrivals::Guards;
use super::backlog::Backlog;
use crate::policy::{Done, Params, Setup, View};
use crate::sorted::SortedSet;
use crate::table::{BySlot, Slot, State};

const NOBODY: u32 = u32::MAX;

/// In [`Flows::of_slot`]: the row of a batch in flight instead of a flow.
const IN_FLIGHT: u32 = 1 << 31;

struct Flow<P, D> {
    party: P,
    group: u32,
    queued: u32,
    /// Its neighbours in the list of its party's flows, if those are listed.
    next: u32,
    previous: u32,
    guarded: bool,
    data: D,
}

/// The flows of a policy by lane group and party, each with policy data `D`; batches in flight have a note `F`. A flow
/// exists while it has requests; its number is small and reused.
pub(in crate::policy) struct Flows<P, D, F> {
    by_key: FxHashMap<(u32, P), u32>,
    flows: Rows<Flow<P, D>>,
    /// One flow of each party, the head of a list; present if flows are listed and there are several lanes.
    by_party: Option<FxHashMap<P, u32>>,
    /// The flow of each queued request, or the row of the batch in flight that it begins.
    of_slot: BySlot<u32>,
    flights: Rows<F>,
    backlog: Backlog,
    /// Groups are lanes although the lanes share one space.
    by_lane: bool,
    /// By group; holds the guarded requests.
    guards: Guards,
}

impl<P: Copy + Eq + Hash, D: Default, F: Copy> Flows<P, D, F> {
    /// Aggregates as `merge`, `batch_requests` and `batch_bytes` say; `guard_batches` 0: no guard.
    pub fn new(params: &Params, setup: &Setup, guard_batches: u64) -> Self {
        Flows {
            by_key: FxHashMap::default(),
            flows: Rows::default(),
            by_party: None,
            of_slot: BySlot::new(NOBODY),
            flights: Rows::default(),
            backlog: Backlog::new(0, params.on("merge"), params),
            by_lane: false,
            guards: Guards::new(guard_batches, setup.lanes.into()),
        }
    }

    /// Separates the flows of lanes that share one space, so that a request withheld on one lane does not delay the
    /// others.
    pub fn by_lane(mut self) -> Self {
        self.by_lane = true;
        self
    }

    fn group(&self, view: &View<'_>, slot: Slot) -> usize {
        if self.by_lane { view.table.lane(slot).index() } else { view.group(slot) }
    }

    /// Enables [`of_party`](Flows::of_party); call before there are any flows.
    pub fn list_parties(&mut self, setup: &Setup) {
        self.by_party = (setup.lanes > 1).then(FxHashMap::default);
    }

    /// Queues a request, guarded or not (the same for all requests of a flow); returns its flow, and whether that is
    /// new.
    pub fn push(&mut self, view: &View<'_>, party: P, slot: Slot, guarded: bool) -> (u32, bool) {
        let group = self.group(view, slot);
        let key = (group as u32, party);
        let known = self.by_key.get(&key).copied();
        let flow = known.unwrap_or_else(|| self.open(key, guarded));
        self.of_slot.set(slot, flow);
        self.flows[flow].queued += 1;
        self.backlog.insert(view, flow as usize, slot);
        if guarded {
            self.guards.insert(view.table, group, slot);
        }
        (flow, known.is_none())
    }

    fn open(&mut self, (group, party): (u32, P), guarded: bool) -> u32 {
        let fresh = Flow { party, group, queued: 0, next: NOBODY, previous: NOBODY, guarded, data: D::default() };
        let known = self.flows.capacity();
        let flow = self.flows.insert(fresh);
        if self.flows.capacity() > known {
            self.backlog.add_queue();
        }
        self.by_key.insert((group, party), flow);
        if let Some(before) = self.by_party.as_mut().and_then(|p| p.insert(party, flow)) {
            self.flows[flow].next = before;
            self.flows[before].previous = flow;
        }
        flow
    }

    /// The flow of a queued request.
    pub fn of(&self, slot: Slot) -> Option<u32> {
        Some(self.of_slot.get(slot)).filter(|f| *f < IN_FLIGHT)
    }

    /// The flows of a party in all groups; requires [`list_parties`](Flows::list_parties).
    pub fn of_party(&self, party: P) -> SmallVec<[u32; 8]> {
        let first = match &self.by_party {
            Some(by_party) => by_party.get(&party),
            None => self.by_key.get(&(0, party)),
        };
        let next = |flow: &u32| Some(self.flows[*flow].next).filter(|f| *f != NOBODY);
        std::iter::successors(first.copied(), next).collect()
    }

    /// The lane group and party of a flow.
    pub fn key(&self, flow: u32) -> (usize, P) {
        let flow = &self.flows[flow];
        (flow.group as usize, flow.party)
    }

    /// Attaches a note to the batch in flight whose first request is `first`.
    pub fn depart(&mut self, first: Slot, note: F) {
        self.of_slot[first] = IN_FLIGHT | self.flights.insert(note);
    }

    /// Takes the note of a completed batch.
    pub fn returned(&mut self, done: &Done<'_>) -> Option<F> {
        let first = *done.slots.first()?;
        let row = Some(self.of_slot.get(first)).filter(|row| *row >= IN_FLIGHT && *row != NOBODY)? & !IN_FLIGHT;
        self.of_slot[first] = NOBODY;
        self.flights.release(row);
        Some(self.flights[row])
    }

    /// The policy's data of a flow.
    pub fn data(&mut self, flow: u32) -> &mut D {
        &mut self.flows[flow].data
    }

    /// True if the flow is empty and must be closed.
    pub fn is_empty(&self, flow: u32) -> bool {
        self.flows[flow].queued == 0
    }

    /// The flow's oldest request.
    pub fn oldest(&self, view: &View<'_>, flow: u32) -> Option<Slot> {
        self.backlog.oldest(view, flow as usize)
    }

    /// The first request of the flow's next batch.
    pub fn first(&mut self, view: &View<'_>, flow: u32) -> Option<Slot> {
        self.backlog.first(view, flow as usize)
    }

    /// Bytes of that batch, at least 1.
    pub fn len_bytes(&self, view: &View<'_>, first: Slot) -> u64 {
        self.backlog.len_bytes(view, first)
    }

    /// The flow of a group's oldest request, if the guard requires it to go now.
    pub fn due(&self, view: &View<'_>, group: usize) -> Option<u32> {
        // A flow sends its oldest request first, so that request goes.
        self.guards.due(view.table, group).and_then(|oldest| self.of(oldest))
    }

    /// Moves the batch that begins at [`first`](Flows::first) out of its flow; returns the flow.
    pub fn take(&mut self, view: &View<'_>, first: Slot, batch: &mut Vec<Slot>) -> u32 {
        let flow = self.of_slot[first];
        self.backlog.take(view, flow as usize, first, batch);
        self.flows[flow].queued -= batch.len() as u32;
        let group = self.flows[flow].group as usize;
        match self.flows[flow].guarded {
            true => self.guards.sent(view.table, group, batch),
            false => self.guards.passed(group),
        }
        for slot in &*batch {
            self.of_slot[*slot] = NOBODY;
        }
        flow
    }

    /// Removes a cancelled request; returns its flow.
    pub fn remove(&mut self, view: &View<'_>, slot: Slot) -> Option<u32> {
        let flow = self.of(slot)?;
        self.backlog.remove(view, flow as usize, slot);
        self.flows[flow].queued -= 1;
        self.of_slot[slot] = NOBODY;
        if self.flows[flow].guarded {
            self.guards.remove(view.table, self.flows[flow].group as usize, slot);
        }
        Some(flow)
    }

    /// Closes an empty flow.
    pub fn close(&mut self, flow: u32) {
        let Flow { group, party, next, previous, .. } = self.flows[flow];
        self.by_key.remove(&(group, party));
        if let Some(by_party) = &mut self.by_party {
            match (self.flows.get(previous).is_some(), next) {
                (true, next) => self.flows[previous].next = next,
                (false, NOBODY) => drop(by_party.remove(&party)),
                (false, next) => drop(by_party.insert(party, next)),
            }
            if let Some(next) = self.flows.get_mut(next) {
                next.previous = previous;
            }
        }
        self.flows.release(flow);
    }

    /// Requests of its party in all groups that are, or may be, older than a request. Walks the table.
    pub fn older_of_party(&self, view: &View<'_>, slot: Slot) -> u64 {
        let party = |s| self.of(s).map(|f| self.flows[f].party);
        let mine = party(slot);
        let older = view.table.in_state(State::may_go).into_iter();
        // The party of a blocked request is not known yet.
        let may_be = |s: &Slot| view.table.state(*s) != State::Queued || party(*s) == mine;
        older.take_while(|s| *s != slot).filter(may_be).count() as u64
    }

    /// Maximum batches of its lane before a guarded request.
    pub fn guarded_wait(&self, view: &View<'_>, slot: Slot) -> u64 {
        self.guards.wait(view.table.older_than(slot, view.groups() == 1 && !self.by_lane))
    }
}

/// Bytes from the start to the end of a batch in offset order.
pub(in crate::policy) fn hull_bytes(view: &View<'_>, batch: &[Slot]) -> u64 {
    let end = batch.iter().map(|s| view.table.end(*s)).max().unwrap_or(0);
    end - batch.first().map_or(end, |s| view.table.start(*s))
}

/// Moves a flow within an order; `None` is no position.
#[inline]
pub(in crate::policy) fn refile<T: Ord + Copy>(order: &mut SortedSet<(T, u32)>, flow: u32, from: T, to: T, nowhere: T) {
    let there = |at: T| (at != nowhere).then_some((at, flow));
    if from != to {
        order.replace(there(from), there(to));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::params::{BATCH_BYTES, BATCH_REQUESTS, MERGE_OFF};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Flows open and close in any order: each party's list equals a plain list.
        #[test]
        fn parties_are_listed(steps in proptest::collection::vec((0u32..4, 0u64..5), 0..200), lanes in 1u16..4) {
            let params = Params::new("test", &[MERGE_OFF, BATCH_REQUESTS, BATCH_BYTES], &Default::default()).unwrap();
            let setup = Setup::of(lanes, 16);
            let mut flows: Flows<u64, (), ()> = Flows::new(&params, &setup, 0);
            flows.list_parties(&setup);
            let mut open: Vec<((u32, u64), u32)> = Vec::new();
            for (group, party) in steps {
                let key = (group % u32::from(lanes), party);
                match open.iter().position(|o| o.0 == key) {
                    Some(at) => flows.close(open.swap_remove(at).1),
                    None => open.push((key, flows.open(key, false))),
                }
                for party in 0..5 {
                    let mut listed = flows.of_party(party).to_vec();
                    let mut there: Vec<u32> = open.iter().filter(|o| o.0.1 == party).map(|o| o.1).collect();
                    listed.sort_unstable();
                    there.sort_unstable();
                    prop_assert_eq!(listed, there);
                }
            }
        }
    }
}
