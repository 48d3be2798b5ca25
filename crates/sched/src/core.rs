//! The core: one policy, its queues, conflicts, lanes, holds and statistics, as one pure state machine.
//!
//! It has no thread, no clock and no I/O; time is an argument. A driver (threads or virtual time) pushes
//! requests, asks for the next dispatch, and reports completions:
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

use crate::conflicts::Conflicts;
use crate::cost::CostModel;
use crate::policy::{self, Choice, Lane, Policy, PolicyError, Setup, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::stats::{Report, Statistics};
use crate::table::{Slot, State, Table};
use crate::types::{Batch, BatchId, ConnId, Extent, JobId, LaneId, Nanos, Op, Part, Request, RequestId};

/// What a core is made for.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Lanes below the scheduler: 1 to 65,535.
    pub lanes: u16,
    /// Lanes address one space: requests are not split at lane boundaries, `lane_offset` is the file offset, and
    /// conflicts are judged across lanes.
    pub shared_space: bool,
    /// Batches in flight per lane at most (the hand-off depth); `unlimited` policies ignore it.
    pub lane_requests: u32,
    /// Bytes in flight per lane at which no further batch goes there.
    pub lane_bytes: u64,
    /// Batches in flight in all at most.
    pub total_requests: u32,
    /// Position of this node among its like, from 0.
    pub node_rank: u32,
    /// Requests outstanding at most, 1 to [`Table::CAPACITY_MAX`].
    pub capacity: u32,
    /// Time to process, by operation and size.
    pub cost: CostModel,
}

impl CoreConfig {
    /// One lane that takes one batch at a time.
    pub fn single_lane(capacity: u32) -> CoreConfig {
        CoreConfig {
            lanes: 1,
            shared_space: false,
            lane_requests: 1,
            lane_bytes: u64::MAX,
            total_requests: u32::MAX,
            node_rank: 0,
            capacity,
            cost: CostModel::default(),
        }
    }
}

/// The answer of [`Core::next`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// To be started now, and reported by [`Event::Completed`].
    Dispatch(Batch),
    /// Nothing before `until`, unless a push or an event comes first.
    Wait {
        /// When to ask again; [`Nanos::MAX`]: only after a push or an event.
        until: Nanos,
        /// Why.
        reason: WaitReason,
    },
}

/// How a batch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The batch.
    pub batch: BatchId,
    /// 0, or a Linux errno.
    pub errno: i32,
    /// Bytes moved, from the start of the batch.
    pub bytes_done: u64,
    /// When the device took it up.
    pub started: Nanos,
    /// When the device was done.
    pub finished: Nanos,
}

impl Completion {
    /// The full success of a batch.
    pub fn of(batch: &Batch, started: Nanos, finished: Nanos) -> Completion {
        Completion { batch: batch.id, errno: 0, bytes_done: batch.extent.len, started, finished }
    }
}

/// What happens outside and matters to scheduling.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A batch ended.
    Completed(Completion),
    /// A connection can, or can no longer, take data.
    Ready {
        /// Which.
        connection: ConnId,
        /// Can it.
        ready: bool,
    },
    /// The clock that the nodes share is local time plus `offset_ns`, give or take `error_ns`.
    SharedClock {
        /// Nanoseconds to add.
        offset_ns: i64,
        /// Bound of the error, nanoseconds.
        error_ns: u64,
    },
    /// What other nodes granted to an application, in device time.
    PeerShares {
        /// The application.
        job: JobId,
        /// Device time granted elsewhere since the last such event.
        granted: Nanos,
    },
    /// Nodes came or went: this node's position among its like.
    Members {
        /// Position from 0.
        node_rank: u32,
    },
}

/// What became of a cancellation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cancelled {
    /// It was queued and is gone.
    Removed,
    /// It is in flight: drop the reply; the slot frees at completion.
    InFlight,
    /// There is no such request any more.
    Unknown,
}

/// Why a push was refused: the queue is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the queue is full")]
pub struct Full;

struct InFlight {
    lane: LaneId,
    op: Op,
    bytes: u64,
    generation: u32,
    slots: Vec<Slot>,
}

/// The scheduling state machine.
pub struct Core {
    config: CoreConfig,
    table: Table,
    conflicts: Conflicts,
    lanes: Vec<Lane>,
    policy: Box<dyn Policy>,
    /// Barriers that nothing blocks any more; they pass the policy by.
    barriers: std::collections::VecDeque<Slot>,
    flights: Vec<InFlight>,
    free_flights: Vec<u32>,
    in_flight_batches: u32,
    queued: u32,
    blocked: u32,
    shared_offset_ns: i64,
    statistics: Statistics,
    selected: Vec<Slot>,
    released: Vec<Slot>,
}

impl Core {
    /// A core with a policy; refused when the policy does not exist, has bad parameters or does not suit the lanes.
    pub fn new(config: CoreConfig, spec: &PolicySpec) -> Result<Core, PolicyError> {
        let table = Table::new(config.capacity);
        let setup = Setup { lanes: config.lanes.max(1), node_rank: config.node_rank, capacity: table.capacity() };
        let policy = policy::build(spec, &setup)?;
        let lane = Lane {
            limit_requests: config.lane_requests.max(1),
            limit_bytes: config.lane_bytes.max(1),
            in_flight_requests: 0,
            in_flight_bytes: 0,
            hold_until: Nanos::ZERO,
        };
        let mut core = Core {
            conflicts: Conflicts::new(config.shared_space),
            lanes: vec![lane; usize::from(setup.lanes)],
            table,
            policy,
            config,
            barriers: Default::default(),
            flights: Vec::new(),
            free_flights: Vec::new(),
            in_flight_batches: 0,
            queued: 0,
            blocked: 0,
            shared_offset_ns: 0,
            statistics: Statistics::default(),
            selected: Vec::new(),
            released: Vec::new(),
        };
        core.apply_limits();
        Ok(core)
    }

    fn setup(&self) -> Setup {
        Setup { lanes: self.lanes.len() as u16, node_rank: self.config.node_rank, capacity: self.table.capacity() }
    }

    fn apply_limits(&mut self) {
        let unlimited = self.policy.unlimited();
        for lane in &mut self.lanes {
            lane.limit_requests = if unlimited { u32::MAX } else { self.config.lane_requests.max(1) };
            lane.limit_bytes = if unlimited { u64::MAX } else { self.config.lane_bytes.max(1) };
        }
    }

    fn total_open(&self) -> bool {
        self.policy.unlimited() || self.in_flight_batches < self.config.total_requests.max(1)
    }

    fn view<'a>(
        now: Nanos,
        config: &'a CoreConfig,
        table: &'a Table,
        lanes: &'a [Lane],
        total_open: bool,
        offset_ns: i64,
    ) -> View<'a> {
        View {
            now,
            shared_now: Nanos(now.0.saturating_add_signed(offset_ns)),
            table,
            cost: &config.cost,
            lanes,
            total_open,
            shared_space: config.shared_space,
        }
    }

    /// Takes a request in; its identity is given by the core (`request.id` is not looked at).
    ///
    /// # Panics
    /// When the request's lane is not one of this core's.
    pub fn push(&mut self, now: Nanos, request: &Request) -> Result<RequestId, Full> {
        assert!(request.extent.lane.index() < self.lanes.len(), "lane {:?} does not exist", request.extent.lane);
        if self.table.is_worn() {
            let spec = self.policy.spec();
            let _ = self.reconfigure(now, &spec); // the same policy anew, without old sequence numbers
            self.table.renew();
        }
        let slot = self.table.insert(request).ok_or(Full)?;
        self.statistics.arrived(now, if request.op.is_data() { request.extent.len } else { 0 });
        if self.conflicts.enter(&self.table, slot) {
            self.table.set_state(slot, State::Blocked);
            self.blocked += 1;
            self.statistics.blocked += 1;
        } else {
            self.admit(now, slot);
        }
        Ok(self.table.id(slot))
    }

    /// Gives a request that nothing blocks to the policy, or a barrier to the lane's turn.
    fn admit(&mut self, now: Nanos, slot: Slot) {
        self.table.set_state(slot, State::Queued);
        self.queued += 1;
        if self.table.op(slot).is_data() {
            let view =
                Self::view(now, &self.config, &self.table, &self.lanes, self.total_open(), self.shared_offset_ns);
            self.policy.enqueue(&view, slot);
        } else {
            self.barriers.push_back(slot);
        }
    }

    /// The next batch to start, or how long there is none.
    pub fn next(&mut self, now: Nanos) -> Next {
        if self.queued == 0 {
            let reason = if self.blocked > 0 { WaitReason::LanesBusy } else { WaitReason::Empty };
            return Next::Wait { until: Nanos::MAX, reason };
        }
        let view = Self::view(now, &self.config, &self.table, &self.lanes, self.total_open(), self.shared_offset_ns);
        // Barriers are few; those of lanes without room wait for their turn in order.
        if let Some(at) = self.barriers.iter().position(|s| view.open(view.table.lane(*s)))
            && let Some(slot) = self.barriers.remove(at)
        {
            self.selected.clear();
            self.selected.push(slot);
            return Next::Dispatch(self.dispatch(now));
        }
        self.selected.clear();
        let mut selected = std::mem::take(&mut self.selected);
        let choice = self.policy.select(&view, &mut selected);
        self.selected = selected;
        match choice {
            Choice::Serve => Next::Dispatch(self.dispatch(now)),
            Choice::Wait { until, reason } => {
                // A hold that ends is an end of waiting too.
                let held = self.lanes.iter().map(|l| l.hold_until).filter(|h| *h > now).min();
                let reason = if reason == WaitReason::Empty { WaitReason::LanesBusy } else { reason };
                Next::Wait { until: held.map_or(until, |h| until.min(h)), reason }
            }
        }
    }

    fn dispatch(&mut self, now: Nanos) -> Batch {
        assert!(!self.selected.is_empty(), "a policy served nothing");
        let head = self.selected[0];
        let (mut extent, op) = (self.table.extent(head), self.table.op(head));
        let mut parts = Vec::with_capacity(self.selected.len());
        let mut end = extent.lane_offset;
        for &slot in &self.selected {
            debug_assert_eq!(self.table.state(slot), State::Queued);
            debug_assert!(self.table.file(slot) == extent.file && self.table.op(slot) == op);
            debug_assert!(self.table.start(slot) <= end || parts.is_empty(), "parts touch");
            self.table.set_state(slot, State::InFlight);
            self.statistics.queue_ns.record(now.since(self.table.arrival(slot)).0);
            let (lane_offset, len) = (self.table.start(slot), self.table.len_bytes(slot));
            parts.push(Part { id: self.table.id(slot), from: 0, len, lane_offset });
            end = end.max(self.table.end(slot));
        }
        extent.len = if op.is_data() { end - extent.lane_offset } else { extent.len };
        let bytes = if op.is_data() { extent.len } else { 0 };
        if op.is_data() {
            self.statistics.dispatched(extent.file, extent.file_offset, parts.len(), bytes);
        }
        self.queued -= parts.len() as u32;
        self.in_flight_batches += 1;
        let lane = &mut self.lanes[extent.lane.index()];
        lane.in_flight_requests += 1;
        lane.in_flight_bytes = lane.in_flight_bytes.saturating_add(bytes);
        let f = self.free_flights.pop().unwrap_or_else(|| {
            self.flights.push(InFlight { lane: extent.lane, op, bytes: 0, generation: 0, slots: Vec::new() });
            self.flights.len() as u32 - 1
        });
        let flight = &mut self.flights[f as usize];
        (flight.lane, flight.op, flight.bytes) = (extent.lane, op, bytes);
        flight.generation = flight.generation.wrapping_add(1);
        flight.slots.extend_from_slice(&self.selected);
        Batch { id: BatchId(u64::from(flight.generation) << 32 | u64::from(f)), extent, op, parts }
    }

    /// Tells of something that happened. An unknown batch is ignored: its completion was reported before.
    pub fn event(&mut self, now: Nanos, event: Event) {
        match event {
            Event::Completed(completion) => self.completed(now, &completion),
            Event::SharedClock { offset_ns, .. } => self.shared_offset_ns = offset_ns,
            Event::Members { node_rank } => {
                self.config.node_rank = node_rank;
                // The policy in force stays in force with its new rank; it was accepted for these lanes before.
                let spec = self.policy.spec();
                let _ = self.reconfigure(now, &spec);
            }
            // For policies that depend on connections or on other nodes; none of the present ones does.
            Event::Ready { .. } | Event::PeerShares { .. } => {}
        }
    }

    fn completed(&mut self, now: Nanos, completion: &Completion) {
        let f = completion.batch.0 as u32;
        let Some(flight) = self.flights.get_mut(f as usize) else { return };
        if flight.slots.is_empty() || u64::from(flight.generation) != completion.batch.0 >> 32 {
            return;
        }
        let mut slots = std::mem::take(&mut flight.slots);
        let (op, bytes) = (flight.op, flight.bytes);
        let lane = &mut self.lanes[flight.lane.index()];
        lane.in_flight_requests -= 1;
        lane.in_flight_bytes = lane.in_flight_bytes.saturating_sub(bytes);
        self.in_flight_batches -= 1;
        self.statistics.service_ns.record(completion.finished.since(completion.started).0);
        self.statistics.completed += slots.len() as u64;
        if completion.errno != 0 {
            self.statistics.failed += slots.len() as u64;
        }
        match op {
            Op::Read => self.statistics.read_bytes += completion.bytes_done,
            Op::Write => self.statistics.write_bytes += completion.bytes_done,
            _ => {}
        }
        for &slot in &slots {
            self.retire(now, slot);
        }
        slots.clear();
        self.flights[f as usize].slots = slots; // keeps its capacity for the next
        self.free_flights.push(f);
    }

    /// Frees a slot and admits what it blocked.
    fn retire(&mut self, now: Nanos, slot: Slot) {
        let mut released = std::mem::take(&mut self.released);
        self.conflicts.leave(&self.table, slot, &mut released);
        self.table.remove(slot);
        self.blocked -= released.len() as u32;
        for freed in released.drain(..) {
            self.admit(now, freed);
        }
        self.released = released;
    }

    /// Withdraws a request.
    pub fn cancel(&mut self, now: Nanos, id: RequestId) -> Cancelled {
        let Some(slot) = self.table.find(id) else { return Cancelled::Unknown };
        match self.table.state(slot) {
            State::InFlight => Cancelled::InFlight,
            State::Free => Cancelled::Unknown,
            state => {
                self.withdraw(now, slot, state);
                self.statistics.cancelled += 1;
                Cancelled::Removed
            }
        }
    }

    fn withdraw(&mut self, now: Nanos, slot: Slot, state: State) {
        if state == State::Blocked {
            self.blocked -= 1;
        } else {
            self.queued -= 1;
            if self.table.op(slot).is_data() {
                let view =
                    Self::view(now, &self.config, &self.table, &self.lanes, self.total_open(), self.shared_offset_ns);
                self.policy.dequeue(&view, slot);
            } else {
                self.barriers.retain(|s| *s != slot);
            }
        }
        self.retire(now, slot);
    }

    /// Cancels what a connection has queued; returns the identities. In-flight requests stay.
    pub fn cancel_connection(&mut self, now: Nanos, conn: ConnId) -> Vec<RequestId> {
        let slots = self.table.in_state(|s| matches!(s, State::Queued | State::Blocked));
        // From the youngest: what a cancelled request blocked is gone before it could be admitted.
        let mine = slots.into_iter().rev().filter(|s| self.table.conn(*s) == conn).collect::<Vec<_>>();
        mine.into_iter()
            .map(|slot| {
                let id = self.table.id(slot);
                self.cancel(now, id);
                id
            })
            .collect()
    }

    /// Takes everything out that is not in flight, in order of arrival.
    pub fn drain(&mut self, now: Nanos) -> Vec<Request> {
        let slots = self.table.in_state(|s| matches!(s, State::Queued | State::Blocked));
        let requests = slots.iter().map(|s| self.table.request(*s)).collect();
        for slot in slots.into_iter().rev() {
            let state = self.table.state(slot);
            self.withdraw(now, slot, state);
            self.statistics.cancelled += 1;
        }
        requests
    }

    /// Switches the policy. The new one receives all queued requests with their arrival times; what is in flight stays
    /// counted. A refusal changes nothing.
    pub fn reconfigure(&mut self, now: Nanos, spec: &PolicySpec) -> Result<(), PolicyError> {
        self.policy = policy::build(spec, &self.setup())?;
        self.apply_limits();
        for slot in self.table.in_state(|s| s == State::Queued) {
            if self.table.op(slot).is_data() {
                let view =
                    Self::view(now, &self.config, &self.table, &self.lanes, self.total_open(), self.shared_offset_ns);
                self.policy.enqueue(&view, slot);
            }
        }
        Ok(())
    }

    /// Idles one lane until an instant. A hold ends by itself; a later call replaces it.
    pub fn hold(&mut self, lane: LaneId, until: Nanos) {
        if let Some(lane) = self.lanes.get_mut(lane.index()) {
            lane.hold_until = until;
        }
    }

    /// The worst-case wait of a queued request from now; `None` when it is blocked, in flight or gone.
    pub fn wait_bound(&self, now: Nanos, id: RequestId) -> Option<WaitBound> {
        let slot = self.table.find(id)?;
        if self.table.state(slot) != State::Queued || !self.table.op(slot).is_data() {
            return None;
        }
        let view = Self::view(now, &self.config, &self.table, &self.lanes, self.total_open(), self.shared_offset_ns);
        Some(self.policy.wait_bound(&view, slot))
    }

    /// The whole of an outstanding request.
    pub fn request(&self, id: RequestId) -> Option<Request> {
        self.table.find(id).map(|slot| self.table.request(slot))
    }

    /// Nothing is queued, blocked or in flight.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Requests queued, those blocked by others included.
    pub fn queued(&self) -> u32 {
        self.queued + self.blocked
    }

    /// Room for further requests.
    pub fn room(&self) -> usize {
        self.table.capacity() as usize - self.table.len()
    }

    /// Zeroes the statistics.
    pub fn reset_statistics(&mut self) {
        self.statistics = Statistics::default();
    }

    /// Policy, queues and statistics.
    pub fn status(&self) -> Status {
        Status {
            policy: self.policy.spec(),
            capacity: self.table.capacity(),
            queued: self.queued,
            blocked: self.blocked,
            in_flight_batches: self.in_flight_batches,
            lanes: self
                .lanes
                .iter()
                .map(|l| LaneStatus {
                    in_flight_batches: l.in_flight_requests,
                    in_flight_bytes: l.in_flight_bytes,
                    limit_batches: (l.limit_requests != u32::MAX).then_some(l.limit_requests),
                })
                .collect(),
            statistics: self.statistics.report(),
        }
    }
}

/// What is told of a core.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct Status {
    /// The policy in force with all its parameters.
    pub policy: PolicySpec,
    /// Requests outstanding at most.
    pub capacity: u32,
    /// Requests that the policy has.
    pub queued: u32,
    /// Requests that wait for an older one that conflicts.
    pub blocked: u32,
    /// Batches in flight.
    pub in_flight_batches: u32,
    /// The lanes.
    pub lanes: Vec<LaneStatus>,
    /// What was done since the start or the last reset.
    pub statistics: Report,
}

/// What is told of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct LaneStatus {
    /// Batches in flight.
    pub in_flight_batches: u32,
    /// Bytes in flight.
    pub in_flight_bytes: u64,
    /// The limit of batches; absent when the policy knows none.
    pub limit_batches: Option<u32>,
}

impl Request {
    /// A request from nobody in particular, arriving at zero.
    pub fn new(op: Op, extent: Extent) -> Request {
        Request {
            id: RequestId(0),
            extent,
            arrival: Nanos::ZERO,
            client: Default::default(),
            conn: Default::default(),
            job: Default::default(),
            user: Default::default(),
            op,
        }
    }
}
