//! The core: one policy with its queues, conflicts, lanes, holds and statistics, as one pure state machine.
//!
//! It has no thread, no clock and no I/O; time is an argument. A driver (threads or virtual time) pushes requests, asks
//! for the next dispatch and reports completions:
//!
//! ```
//! use impresario_sched::{Completion, Core, CoreConfig, Event, Extent, Next, Nanos, Op, PolicySpec, Request};
//! # use impresario_sched::{ClientId, ConnId, FileId, JobId, LaneId, RequestId, UserId};
//! let mut core = Core::new(CoreConfig::single_lane(100), &PolicySpec::named("mlf")).unwrap();
//! let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 4096 };
//! let id = core.push(Nanos(0), &Request::new(Op::Read, extent)).unwrap();
//! let Next::Dispatch(batch) = core.next(Nanos(10)) else { panic!("a lone request goes at once") };
//! assert_eq!(batch.parts[0].id, id);
//! core.event(Nanos(20), Event::Completed(Completion::of(&batch, Nanos(10), Nanos(20))));
//! assert!(core.is_empty());
//! ```

mod held;
mod passing;
mod pressing;
mod removal;
mod shared;
mod status;
mod withheld;

use std::collections::VecDeque;
use std::sync::Arc;

use impresario_foresight::PredictedQueues;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};

use crate::conflicts::Conflicts;
use crate::contract::{Completion, CoreConfig, Event, Full, Next};
use crate::correction::Corrector;
use crate::device_time::{DeviceTime, Sharer};
use crate::ended::{Ended, Watch};
use crate::limited::Portions;
use crate::members::Agreed;
use crate::names::Names;
use crate::occupied::Occupied;
use crate::policy::{self, Choice, Done, Lane, Policy, PolicyError, Setup, WaitReason};
use crate::spec::PolicySpec;
use crate::speculation::Speculations;
use crate::stats::Statistics;
use crate::stranded::Stranded;
use crate::table::{Slot, State, Table};
use crate::types::{Batch, BatchId, Extent, LaneId, Nanos, Op, Part, Parts, Request, RequestId};
use held::Held;
use impresario_base::prefetch::fetch;
pub(crate) use pressing::PRESSING_AFTER;
use pressing::Pressing;
use shared::SharedState;

struct InFlight {
    extent: Extent,
    op: Op,
    generation: u32,
    /// Usually one or a few.
    slots: SmallVec<[Slot; 4]>,
    /// The speculation that this batch also reads, after the extent; alone if `slots` is empty.
    along: Slot,
    /// Its number among the reads that speculations give way to; 0: none.
    read: u64,
    sharer: Sharer,
}

/// A request that is dispatched piece by piece.
struct Pieced {
    whole: Extent,
    in_flight: u32,
}

/// Removes requests from the queue counts once the policy no longer holds them.
fn left_queue(shared: &mut SharedState, stranded: &mut Option<Stranded>, mut slots: &[Slot]) {
    if let Some(stranded) = stranded {
        stranded.remove(&shared.table, slots);
    }
    while let Some(first) = slots.first() {
        let lane = shared.table.lane(*first);
        let same = slots.iter().take_while(|slot| shared.table.lane(**slot) == lane).count();
        shared.queued(lane, -(same as i32));
        slots = &slots[same..];
    }
}

/// The scheduling state machine.
pub struct Core {
    shared: SharedState,
    conflicts: Conflicts,
    policy: Box<dyn Policy>,
    /// Requests with at least one piece dispatched; few.
    pieced: FxHashMap<Slot, Pieced>,
    /// Barriers that nothing blocks any more; the policy never sees them.
    barriers: VecDeque<Slot>,
    /// Of them, syncs with a limit of their own: there may be thousands that wait for a slow device.
    syncs: VecDeque<Slot>,
    /// One of those may have room.
    looks_for_syncs: bool,
    /// Only if several lanes share one space.
    stranded: Option<Stranded>,
    speculations: Speculations,
    /// Reads that wait with the speculations of their file, and how long at most.
    held: Held,
    /// Changes that wait for connections which take no data.
    pressing: Pressing,
    flights: Vec<InFlight>,
    free_flights: Vec<u32>,
    corrector: Corrector,
    queued: u32,
    blocked: u32,
    /// The latest end of any hold; no lane is held beyond it.
    held_to: Nanos,
    /// How often the policy replaced itself with another.
    own_switches: u64,
    /// `None` if the driver does not want statistics.
    statistics: Option<Box<Statistics>>,
    /// Present while the driver collects completed requests.
    watch: Option<Box<Watch>>,
    /// The prediction from a recorded run, kept for this policy and later ones.
    foreseen: Option<Arc<PredictedQueues>>,
    /// Kept for this policy and later ones.
    portions: Portions,
    /// Kept for this policy and later ones.
    members: Agreed,
    selected: Vec<Slot>,
    released: Vec<Slot>,
}

impl Core {
    /// A core with a policy; refused when the policy does not exist, has bad parameters or does not suit the lanes.
    pub fn new(config: CoreConfig, spec: &PolicySpec) -> Result<Core, PolicyError> {
        let table = Table::new(config.capacity);
        let setup = Setup {
            lanes: config.lanes.max(1),
            shared_space: config.shared_space,
            node_rank: config.node_rank,
            started: config.started,
            capacity: table.capacity(),
            sorted_below: config.sorted_below,
            scheduled_below: config.scheduled_below,
        };
        let policy = policy::build(spec, &setup)?;
        let lane = Lane {
            limit_requests: config.lane_requests.max(1),
            limit_bytes: config.lane_bytes.max(1),
            in_flight_requests: 0,
            stuck_requests: 0,
            in_flight_bytes: 0,
            in_flight_syncs: 0,
            queued: 0,
            hold_until: Nanos::ZERO,
            ended: Nanos::ZERO,
            device_time: DeviceTime::default(),
        };
        let mut shared = SharedState {
            lanes: vec![lane; usize::from(setup.lanes)],
            startable: Occupied::new(setup.lanes.into()),
            table,
            names: Names::default(),
            not_ready: FxHashSet::default(),
            in_flight_batches: 0,
            stuck_batches: 0,
            shared_offset_ns: 0,
            unlimited: false,
            speculates: false,
            shares: true,
            minds_connections: false,
            config,
        };
        shared.apply_limits(&*policy);
        let statistics = shared.config.statistics.then(Box::default);
        Ok(Core {
            conflicts: Conflicts::new(shared.config.shared_space),
            corrector: Corrector::new(shared.config.cost.clone()),
            stranded: (shared.config.shared_space && shared.lanes.len() > 1).then(Stranded::default),
            speculations: Speculations::new(shared.lanes.len(), shared.config.lane_speculations),
            shared,
            policy,
            held: Held::default(),
            pressing: Pressing::default(),
            pieced: FxHashMap::default(),
            barriers: VecDeque::new(),
            syncs: VecDeque::new(),
            looks_for_syncs: false,
            flights: Vec::new(),
            free_flights: Vec::new(),
            queued: 0,
            blocked: 0,
            held_to: Nanos::ZERO,
            own_switches: 0,
            statistics,
            watch: None,
            foreseen: None,
            portions: Portions::default(),
            members: Agreed::default(),
            selected: Vec::new(),
            released: Vec::new(),
        })
    }

    /// Installs a policy that is not in `POLICIES`, before any request arrives.
    #[cfg(test)]
    pub(crate) fn install(&mut self, policy: Box<dyn Policy>) {
        assert!(self.is_empty(), "there are requests");
        self.policy = policy;
        self.shared.apply_limits(&*self.policy);
    }

    /// Accepts a request and assigns its identity (`request.id` is ignored).
    ///
    /// # Panics
    /// When the request's lane is not one of this core's.
    pub fn push(&mut self, now: Nanos, request: &Request) -> Result<RequestId, Full> {
        assert!(request.extent.lane.index() < self.shared.lanes.len(), "lane {:?} does not exist", request.extent.lane);
        if self.shared.table.is_worn() {
            let spec = self.policy.spec();
            let _ = self.reconfigure(now, &spec); // restart the same policy without old sequence numbers
            self.shared.table.renew();
        }
        let slot = self.shared.table.insert(request).ok_or(Full)?;
        if let Some(statistics) = &mut self.statistics {
            statistics.arrived(now, request.op.is_data().then_some(request.extent.len));
            statistics.throughputs.arrived(now, request.job);
        }
        self.drop_changed(request);
        if self.conflicts.enter(&self.shared.table, slot) {
            self.shared.table.set_state(slot, State::Blocked);
            self.blocked += 1;
            self.count(|s| &mut s.blocked);
        } else {
            self.admit(now, slot);
        }
        self.may_press(now, slot);
        Ok(self.shared.table.id(slot))
    }

    /// Drops speculations of what a request changes.
    fn drop_changed(&mut self, request: &Request) {
        if self.speculations.is_empty() || !matches!(request.op, Op::Write | Op::Truncate | Op::Unlink) {
            return;
        }
        let Extent { lane, file, lane_offset, .. } = request.extent;
        // Lanes that share one space address the same bytes.
        let all = 0..self.shared.lanes.len() as u16;
        let lanes = if self.shared.config.shared_space { all } else { lane.0..lane.0 + 1 };
        for lane in lanes.map(LaneId) {
            self.speculations.changed(&mut self.shared.table, lane, file, lane_offset, request.extent.end());
        }
        self.held.look();
    }

    /// Accepts a speculative read (see the class in `doc/POLICIES.md`). Returns `None` if speculation is off, if the
    /// read overlaps a queued speculation, or if no more than a quarter of the queue is free: that is kept for
    /// requests.
    ///
    /// # Panics
    /// When its lane is not one of this core's.
    pub fn speculate(&mut self, request: &Request) -> Option<RequestId> {
        assert!(request.extent.lane.index() < self.shared.lanes.len(), "lane {:?} does not exist", request.extent.lane);
        let full = self.room() <= self.shared.table.capacity() as usize / 4;
        if !self.speculations.enabled()
            || !self.shared.speculates
            || full
            || request.op != Op::Read
            || request.extent.len == 0
        {
            return None;
        }
        let slot = self.shared.table.insert(request)?;
        if !self.speculations.insert(&mut self.shared.table, slot) {
            self.shared.table.remove(slot);
            return None;
        }
        Some(self.shared.table.id(slot))
    }

    /// Returns a speculation that was dropped before it started, or `None`.
    pub fn take_given_up(&mut self) -> Option<RequestId> {
        self.speculations.take_given_up()
    }

    /// Starts a speculation on a lane that has room and no queued requests.
    fn speculate_alone(&mut self, now: Nanos) -> Option<Batch> {
        if self.speculations.is_empty() {
            return None;
        }
        let mut lanes = (0..self.shared.lanes.len()).map(|lane| LaneId(lane as u16));
        let slot = lanes.find_map(|lane| {
            // Requests that a rule holds back get an idle lane when the rule releases them.
            let open = self.shared.lanes[lane.index()].queued == 0 && self.shared.view(now).open(lane);
            let shared = &mut self.shared;
            open.then(|| self.speculations.alone(&mut shared.table, &shared.names, lane, now)).flatten()
        })?;
        let (extent, id) = (self.shared.table.extent(slot), self.shared.table.id(slot));
        self.selected.clear();
        let part = Part { id, from: 0, len: extent.len, lane_offset: extent.lane_offset };
        Some(self.fly(now, extent, Op::Read, smallvec![part], slot))
    }

    /// Passes an unblocked request to the policy, or queues a barrier; a read may wait with the speculations of its file.
    fn admit(&mut self, now: Nanos, slot: Slot) {
        if !self.hold_back(now, slot) {
            self.admit_now(now, slot);
        }
    }

    fn admit_now(&mut self, now: Nanos, slot: Slot) {
        self.shared.table.set_state(slot, State::Queued);
        self.queued += 1;
        if self.shared.table.op(slot).is_data() {
            self.shared.queued(self.shared.table.lane(slot), 1);
            if let Some(stranded) = &mut self.stranded {
                stranded.insert(&self.shared.table, slot);
            }
            self.policy.enqueue(&self.shared.view(now), slot);
        } else if self.shared.is_apart(self.shared.table.op(slot)) {
            self.syncs.push_back(slot);
            self.looks_for_syncs = true;
        } else {
            self.barriers.push_back(slot);
        }
    }

    /// The next batch to start, or how long to wait for one.
    pub fn next(&mut self, now: Nanos) -> Next {
        self.release_held(now);
        self.speculations.search();
        if self.queued == 0 {
            if let Some(batch) = self.speculate_alone(now) {
                return Next::Dispatch(batch);
            }
            let reason = if self.blocked > 0 { WaitReason::LanesBusy } else { WaitReason::Empty };
            let until = if self.speculations.is_empty() { Nanos::MAX } else { self.hold_end(now) };
            return Next::Wait { until: until.min(self.bar_end()), reason };
        }
        if self.policy.reconsider(&self.shared.view(now)) {
            self.own_switches += 1;
            self.limits_changed(now);
        }
        let view = self.shared.view(now);
        // Other barriers are few; those for lanes without room wait in order.
        let barrier = self.barriers.iter().position(|s| view.open(view.table.lane(*s)));
        let mut barrier = barrier.and_then(|at| self.barriers.remove(at));
        if barrier.is_none() && self.looks_for_syncs {
            let sync = self.syncs.iter().position(|s| self.shared.has_room_for_sync(&view, *s));
            barrier = sync.and_then(|at| self.syncs.remove(at));
            // A hold that ends makes room, too.
            self.looks_for_syncs = barrier.is_some() || self.held_to > now;
        }
        if let Some(slot) = barrier {
            self.selected.clear();
            self.selected.push(slot);
            return Next::Dispatch(self.dispatch(now));
        }
        self.selected.clear();
        let pressing = self.press(now, false);
        let view = self.shared.view(now);
        let mut choice = pressing.unwrap_or_else(|| self.policy.select(&view, &mut self.selected));
        if let (Choice::Wait { until: Nanos::MAX, reason: WaitReason::LanesBusy }, Some(stranded)) =
            (choice, &mut self.stranded)
        {
            choice = stranded.serve(&view, &mut *self.policy, &mut self.selected).sooner(choice);
        }
        if let Choice::Wait { reason: WaitReason::Connection, .. } = choice {
            choice = self.press(now, true).unwrap_or(choice);
        }
        match choice {
            Choice::Serve | Choice::ServeThrough => Next::Dispatch(self.dispatch(now)),
            Choice::ServePiece { len_bytes } => Next::Dispatch(self.dispatch_piece(now, len_bytes)),
            Choice::Wait { until, reason } => {
                if matches!(reason, WaitReason::Empty | WaitReason::LanesBusy)
                    && let Some(batch) = self.speculate_alone(now)
                {
                    return Next::Dispatch(batch);
                }
                let reason = if reason == WaitReason::Empty { WaitReason::LanesBusy } else { reason };
                let until = until.min(self.hold_end(now)).min(self.bar_end()).min(self.next_press(now, reason));
                Next::Wait { until, reason }
            }
        }
    }

    /// When the first hold of a lane ends, which also ends a wait. Holds are rare, and there may be thousands of lanes.
    fn hold_end(&self, now: Nanos) -> Nanos {
        let ends = || self.shared.lanes.iter().map(|l| l.hold_until).filter(|h| *h > now).min();
        (self.held_to > now).then(ends).flatten().unwrap_or(Nanos::MAX)
    }

    fn dispatch(&mut self, now: Nanos) -> Batch {
        assert!(!self.selected.is_empty(), "a policy served nothing");
        let head = self.selected[0];
        let (mut extent, op) = (self.shared.table.extent(head), self.shared.table.op(head));
        let mut parts = Parts::with_capacity(self.selected.len());
        let mut end = extent.lane_offset;
        for &slot in &self.selected {
            debug_assert_eq!(self.shared.table.state(slot), State::Queued);
            self.shared.table.set_state(slot, State::InFlight);
            let table = &self.shared.table;
            debug_assert!(table.file(slot) == extent.file && table.op(slot) == op);
            let (lane_offset, len) = (table.start(slot), table.len_bytes(slot));
            let mut from = 0;
            match self.pieced.get_mut(&slot) {
                Some(pieced) => {
                    pieced.in_flight += 1;
                    from = lane_offset - pieced.whole.lane_offset;
                }
                None => {
                    if let Some(statistics) = &mut self.statistics {
                        statistics.queue_ns.record(now.since(table.arrival(slot)).0);
                    }
                }
            }
            parts.push(Part { id: table.id(slot), from, len, lane_offset });
            end = end.max(table.end(slot));
        }
        if op.is_data() {
            extent.len = end - extent.lane_offset;
            left_queue(&mut self.shared, &mut self.stranded, &self.selected);
        }
        self.queued -= parts.len() as u32;
        let mut along = Slot::NONE;
        if op == Op::Read && !self.speculations.is_empty() {
            let SharedState { table, names, .. } = &mut self.shared;
            let place = (extent.lane, extent.file, extent.lane_offset);
            if let Some(slot) = self.speculations.continues(table, names, place, end, now) {
                parts.push(Part { id: table.id(slot), from: 0, len: table.len_bytes(slot), lane_offset: end });
                along = slot;
            }
        }
        self.fly(now, extent, op, parts, along)
    }

    /// Dispatches the next bytes of the selected request; the rest stays queued.
    fn dispatch_piece(&mut self, now: Nanos, len: u64) -> Batch {
        assert!(self.selected.len() == 1 && len > 0, "a piece is of one request and not empty");
        let slot = self.selected[0];
        let table = &mut self.shared.table;
        if !self.shared.config.pieces || len >= table.len_bytes(slot) {
            return self.dispatch(now);
        }
        let (mut extent, op) = (table.extent(slot), table.op(slot));
        let pieced = self.pieced.entry(slot).or_insert_with(|| {
            if let Some(statistics) = &mut self.statistics {
                statistics.queue_ns.record(now.since(table.arrival(slot)).0);
            }
            Pieced { whole: extent, in_flight: 0 }
        });
        pieced.in_flight += 1;
        let from = extent.lane_offset - pieced.whole.lane_offset;
        table.advance(slot, len);
        extent.len = len;
        let part = Part { id: table.id(slot), from, len, lane_offset: extent.lane_offset };
        self.fly(now, extent, op, smallvec![part], Slot::NONE)
    }

    /// Counts the selected requests as a batch in flight. `extent` covers them; the speculation `along` follows it, or
    /// is the whole batch.
    fn fly(&mut self, now: Nanos, mut extent: Extent, op: Op, parts: Parts, along: Slot) -> Batch {
        let requests = self.selected.len();
        if let Some(statistics) = self.statistics.as_mut().filter(|_| op.is_data() && requests > 0) {
            statistics.dispatched(extent.file, extent.file_offset, requests, extent.len);
        }
        if let Some(slot) = along.some() {
            extent.len = self.shared.table.end(slot) - extent.lane_offset;
        }
        let bytes = if op.is_data() { extent.len } else { 0 };
        self.shared.in_flight(extent.lane, op, true, bytes);
        let read = match op {
            Op::Read if requests > 0 => {
                self.speculations.read_started(&self.shared.names, extent.lane, extent.file, now)
            }
            _ => 0,
        };
        // Syncs with a limit of their own run beside the rest, which the lane's other batches are charged for.
        let has_share = self.policy.reads_device_time() && !self.shared.is_apart(op);
        let cost = has_share.then(|| self.shared.config.cost.ttp(op, bytes));
        let sharer = self.shared.lanes[extent.lane.index()].device_time.start(now, cost);
        let f = self.free_flights.pop().unwrap_or_else(|| {
            let slots = SmallVec::new();
            self.flights.push(InFlight { extent, op, generation: 0, slots, along, read, sharer });
            self.flights.len() as u32 - 1
        });
        let flight = &mut self.flights[f as usize];
        (flight.extent, flight.op, flight.along, flight.read, flight.sharer) = (extent, op, along, read, sharer);
        flight.generation = flight.generation.wrapping_add(1);
        flight.slots.extend_from_slice(&self.selected);
        let id = BatchId(u64::from(flight.generation) << 32 | u64::from(f));
        Batch { id, extent, op, parts, window: self.policy.window(&self.shared.view(now)) }
    }

    /// Handles an event. Completions of unknown batches are ignored: they were reported before.
    pub fn event(&mut self, now: Nanos, event: Event) {
        match event {
            Event::Completed(completion) => self.completed(now, &completion),
            Event::SharedClock { offset_ns } => self.shared.shared_offset_ns = offset_ns,
            Event::Members(members) => {
                let view = self.shared.view(now);
                self.policy.members(&view, &members);
                self.members.add(view.shared_now, members);
            }
            Event::Ready { connection, ready } => {
                let shared = &mut self.shared;
                let changed =
                    if ready { shared.not_ready.remove(&connection) } else { shared.not_ready.insert(connection) };
                if changed {
                    self.policy.readiness(&self.shared.view(now), connection);
                }
            }
        }
    }

    fn completed(&mut self, now: Nanos, completion: &Completion) {
        let f = completion.batch.0 as u32;
        let Some(flight) = self.flights.get_mut(f as usize) else { return };
        let along = flight.along.some();
        if (flight.slots.is_empty() && along.is_none()) || u64::from(flight.generation) != completion.batch.0 >> 32 {
            return;
        }
        let mut slots = std::mem::take(&mut flight.slots);
        flight.along = Slot::NONE;
        let (extent, op, read, sharer) = (flight.extent, flight.op, flight.read, flight.sharer);
        let bytes = if op.is_data() { extent.len } else { 0 };
        self.shared.in_flight(extent.lane, op, false, bytes);
        self.looks_for_syncs |= op == Op::Sync;
        // Clamp to the present: a driver with inconsistent clocks must not distort the cost model.
        let (started, finished) = (completion.started, completion.finished.min(now));
        let is_apart = self.shared.is_apart(op);
        let lane = &mut self.shared.lanes[extent.lane.index()];
        // What runs beside the lane's other batches takes none of their time.
        let alone = if is_apart { Nanos::ZERO } else { lane.end(started, finished) };
        let device_time = lane.device_time.end(sharer, started, finished);
        self.speculations.read_ended(extent.lane, read);
        self.held.look();
        let mut asked_bytes = bytes;
        if let Some(slot) = along {
            asked_bytes = self.shared.table.start(slot) - extent.lane_offset;
            self.shared.table.remove(slot);
        }
        if slots.is_empty() {
            self.speculations.ended(extent.lane);
            self.free_flights.push(f);
            return;
        }
        let service = finished.since(started);
        if let Some(statistics) = &mut self.statistics {
            statistics.ended(op, service, completion.bytes_done);
        }
        if completion.errno == 0
            && completion.bytes_done == bytes
            && along.is_none()
            && service > Nanos::ZERO
            && let Some(cost) = self.corrector.observe(op, bytes, alone)
        {
            self.shared.config.cost = cost;
        }
        if op.is_data() {
            let (end, errno) = (extent.lane_offset.saturating_add(asked_bytes), completion.errno);
            let done = Done { slots: &slots, op, len_bytes: asked_bytes, end, errno, service, device_time };
            self.policy.completed(&self.shared.view(now), &done);
        }
        if let Some(watch) = &mut self.watch {
            let pieced = |slot| self.pieced.contains_key(&slot);
            watch.batch(&self.shared.table, &slots, (&extent, completion), pieced);
        }
        for (at, &slot) in slots.iter().enumerate() {
            if completion.errno != 0 {
                self.count(|s| &mut s.failed);
            }
            if self.is_whole(slot) {
                if let Some(watch) = &mut self.watch {
                    watch.whole(&self.shared.table, &self.shared.names, (at, slot), finished);
                }
                let table = &self.shared.table;
                let got = if op.is_data() && completion.errno == 0 { table.len_bytes(slot) } else { 0 };
                if let Some(statistics) = &mut self.statistics {
                    let names = &self.shared.names;
                    let who = (names.job(table.job(slot)), names.user(table.user(slot)));
                    statistics.completed(now, who, op, got, now.since(table.arrival(slot)));
                }
                self.retire(now, slot, got);
            }
        }
        slots.clear();
        self.flights[f as usize].slots = slots; // keep the capacity
        self.free_flights.push(f);
    }

    /// Accounts for one completed part of a request; true if no part is in flight or queued any more.
    fn is_whole(&mut self, slot: Slot) -> bool {
        let Some(pieced) = self.pieced.get_mut(&slot) else { return true };
        pieced.in_flight -= 1;
        let whole = pieced.in_flight == 0 && self.shared.table.state(slot) == State::InFlight;
        if whole {
            self.forget_pieces(slot);
        }
        whole
    }

    /// Restores the request's whole extent, under which the conflict index knows it.
    fn forget_pieces(&mut self, slot: Slot) {
        if let Some(pieced) = self.pieced.remove(&slot) {
            self.shared.table.restore(slot, &pieced.whole);
        }
    }

    /// Frees the slot of a request that moved `got_bytes`, and admits the requests it blocked.
    fn retire(&mut self, now: Nanos, slot: Slot, got_bytes: u64) {
        if let Some(statistics) = &mut self.statistics {
            statistics.throughputs.ended(now, self.shared.table.job(slot), got_bytes);
        }
        self.leave(now, slot);
    }

    /// Switches the policy. The new policy receives all queued requests with their arrival times; batches in flight
    /// stay counted. An error changes nothing.
    pub fn reconfigure(&mut self, now: Nanos, spec: &PolicySpec) -> Result<(), PolicyError> {
        let policy = policy::build(spec, &self.shared.setup())?;
        let old = std::mem::replace(&mut self.policy, policy);
        // Before it takes over: what is owed is a span at the portion of the rate.
        self.policy.set_portions(&self.shared.view(now), &self.portions);
        self.policy.take_over(&self.shared.view(now), old);
        self.members.iter().for_each(|members| self.policy.members(&self.shared.view(now), members));
        self.policy.foresee(self.foreseen.clone());
        self.limits_changed(now);
        for slot in self.shared.table.in_state(|s| s == State::Queued) {
            if self.shared.table.op(slot).is_data() {
                self.policy.enqueue(&self.shared.view(now), slot);
            }
        }
        Ok(())
    }

    /// Applies the limits of a policy that has just taken over.
    fn limits_changed(&mut self, now: Nanos) {
        self.stranded.iter_mut().for_each(Stranded::forget);
        self.shared.apply_limits(&*self.policy);
        self.press_anew(now);
        self.held.look();
        if !self.shared.speculates {
            self.speculations.give_up_all(&mut self.shared.table);
        }
    }

    /// Idles one lane until `until`. A later call replaces the hold.
    pub fn hold(&mut self, lane: LaneId, until: Nanos) {
        if let Some(lane) = self.shared.lanes.get_mut(lane.index()) {
            lane.hold_until = until;
            self.held_to = self.held_to.max(until);
        }
    }

    /// Tells how many of the batches in flight on a lane wait for a device that hangs. Until the next call they do not
    /// count against the limit over all lanes, nor, up to the lane's limit of batches, against that.
    pub fn set_stuck(&mut self, lane: LaneId, batches: u32) {
        self.shared.stuck(lane, batches);
    }

    /// Changes the limits of batches and bytes in flight per lane; 0 keeps a limit. Batches already in flight stay.
    pub fn set_depth(&mut self, lane_requests: u32, lane_bytes: u64) {
        if lane_requests > 0 {
            self.shared.config.lane_requests = lane_requests;
        }
        if lane_bytes > 0 {
            self.shared.config.lane_bytes = lane_bytes;
        }
        self.shared.apply_limits(&*self.policy);
    }

    /// Sets the prediction from a recorded run for policies that use one; `None` clears it. It survives policy
    /// switches. Returns the previous one.
    pub fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) -> Option<Arc<PredictedQueues>> {
        self.policy.foresee(queues.clone());
        std::mem::replace(&mut self.foreseen, queues)
    }

    /// Sets the portions of limits over all servers that this one may grant. They survive policy switches.
    pub fn set_portions(&mut self, now: Nanos, portions: Portions) {
        self.policy.set_portions(&self.shared.view(now), &portions);
        self.portions = portions;
    }

    /// Turns collection for [`Core::take_ended`] on or off. Cancelled requests are not collected.
    pub fn watch(&mut self, on: bool) {
        match (on, &self.watch) {
            (true, None) => self.watch = Some(Box::default()),
            (false, _) => self.watch = None,
            _ => {}
        }
    }

    /// The requests that ended since the last call, in order of completion. Call it after every event, so that the list
    /// stays short.
    pub fn take_ended(&mut self) -> impl Iterator<Item = Ended> + '_ {
        self.watch.iter_mut().flat_map(|watch| watch.ended.drain(..))
    }

    /// Zeroes the statistics.
    pub fn reset_statistics(&mut self) {
        if let Some(statistics) = &mut self.statistics {
            statistics.reset();
        }
    }

    /// Prefetches the table entry of an outstanding request into the CPU cache.
    pub fn fetch(&self, id: RequestId) {
        self.shared.table.fetch(Slot(id.0 as u32));
    }

    /// Prefetches the record of a batch in flight.
    pub fn fetch_batch(&self, id: BatchId) {
        self.flights.get(id.0 as u32 as usize).inspect(|flight| fetch(*flight));
    }

    /// The stable keys of identities, for policies that use them.
    pub fn names_mut(&mut self) -> &mut Names {
        &mut self.shared.names
    }

    fn count(&mut self, of: impl FnOnce(&mut Statistics) -> &mut u64) {
        if let Some(statistics) = &mut self.statistics {
            *of(statistics) += 1;
        }
    }
}
