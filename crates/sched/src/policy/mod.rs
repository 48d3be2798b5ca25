//! The policies: which request is served next. One file a policy; the list is [`POLICIES`].
//!
//! A policy sees requests that nothing older conflicts with, and lanes with or without room. It decides
//! order, aggregation and waiting; the core does the rest (conflicts, barriers, limits, counting).

mod agios;
pub mod auto;
mod crr;
mod deadline;
mod fifo;
mod hbrr;
mod lowest_yield_first;
mod mclock;
mod mlf;
mod none;
mod orr;
pub mod params;
pub(crate) mod parts;
mod scan;
mod set10;
mod sjf;
mod srtf;
mod sstf;
mod stream;
mod sw;
mod tbf;
mod to;
mod twins;
mod wfq;
mod wscan;

use std::any::Any;
use std::sync::Arc;

use impresario_foresight::PredictedQueues;
use rustc_hash::FxHashSet;

use crate::contract::Linked;
use crate::cost::CostModel;
use crate::names::{Names, Who};
use crate::occupied::{Occupied, Round};
use crate::spec::PolicySpec;
use crate::table::{Slot, Table};
use crate::types::{ConnId, LaneId, Nanos, Op};
pub use auto::Chosen;
pub use params::{ParamInfo, Params, PolicyError};

/// Why nothing is dispatched now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitReason {
    /// Nothing is queued.
    Empty,
    /// What is queued is for lanes without room (or blocked behind what is in flight there).
    LanesBusy,
    /// A lane is held for a request that is expected.
    Hold,
    /// The time window belongs to another server.
    Window,
    /// No quantum is large enough before the pass ends.
    Quantum,
    /// A rule's rate allows nothing yet.
    Rate,
    /// The connection whose turn it is can take nothing.
    Connection,
}

/// What a policy decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// Dispatch what was put into the batch.
    Serve,
    /// Dispatch the next `len_bytes` of the one request that was put into the batch. While some of it is left the
    /// request stays queued, and begins so much later. All of it goes where the driver takes no pieces.
    ServePiece {
        /// Bytes, not 0.
        len_bytes: u64,
    },
    /// Dispatch the reads that were put into the batch with the holes between them (sieving: 2002, 2.1).
    ServeThrough,
    /// Nothing before `until`, unless an event comes first.
    Wait {
        /// When to ask again; [`Nanos::MAX`]: only after an event.
        until: Nanos,
        /// Why.
        reason: WaitReason,
    },
}

impl Choice {
    /// Waiting for an event, not for time.
    pub(crate) const fn until_event(reason: WaitReason) -> Choice {
        Choice::Wait { until: Nanos::MAX, reason }
    }

    /// Of a wait and a dispatch the dispatch. Of two waits the one that ends first; of equally long ones the one with more to say than that lanes are busy.
    pub(crate) fn sooner(self, other: Choice) -> Choice {
        let says = |reason| match reason {
            WaitReason::Empty => 0,
            WaitReason::LanesBusy => 1,
            _ => 2,
        };
        match (self, other) {
            (Choice::Wait { until: a, reason: x }, Choice::Wait { until: b, reason: y })
                if a < b || (a == b && says(x) >= says(y)) =>
            {
                self
            }
            (serve, Choice::Wait { .. }) if !matches!(serve, Choice::Wait { .. }) => serve,
            _ => other,
        }
    }
}

/// A lane as policies see it.
#[derive(Clone, Debug)]
pub struct Lane {
    pub(crate) limit_requests: u32,
    pub(crate) limit_bytes: u64,
    pub(crate) in_flight_requests: u32,
    pub(crate) in_flight_bytes: u64,
    /// Batches in flight that its limit and the core's do without: they wait for a device that hangs.
    pub(crate) stuck_requests: u32,
    /// Requests that the policy has.
    pub(crate) queued: u32,
    pub(crate) hold_until: Nanos,
}

impl Lane {
    /// One more batch may go into flight as far as the limits say.
    pub(crate) fn has_room(&self) -> bool {
        // At most as many as the limit are left out, so that a lane never has more than twice that in flight.
        let counted = self.in_flight_requests - self.stuck().min(self.limit_requests);
        counted < self.limit_requests && self.in_flight_bytes < self.limit_bytes
    }

    /// Batches in flight that are stuck.
    pub(crate) fn stuck(&self) -> u32 {
        self.stuck_requests.min(self.in_flight_requests)
    }
}

/// What a policy may look at when it decides.
pub struct View<'a> {
    /// The present.
    pub now: Nanos,
    /// The present on the clock that the nodes share.
    pub shared_now: Nanos,
    /// The outstanding requests.
    pub table: &'a Table,
    /// The cost model.
    pub cost: &'a CostModel,
    /// The stable keys of the identities.
    pub names: &'a Names,
    /// Requests may be dispatched piece by piece.
    pub pieces: bool,
    pub(crate) lanes: &'a [Lane],
    pub(crate) startable: &'a Occupied,
    pub(crate) not_ready: &'a FxHashSet<ConnId>,
    pub(crate) total_open: bool,
    pub(crate) shared_space: bool,
}

impl View<'_> {
    /// Room for one more batch on the lane, and no hold.
    pub fn open(&self, lane: LaneId) -> bool {
        let l = &self.lanes[lane.index()];
        self.total_open && l.has_room() && l.hold_until <= self.now
    }

    /// The connection can take data.
    pub fn ready(&self, conn: ConnId) -> bool {
        !self.not_ready.contains(&conn)
    }

    /// Whose request it is, by stable keys.
    pub fn who(&self, slot: Slot) -> Who {
        let (t, n) = (self.table, self.names);
        Who {
            job: n.job(t.job(slot)),
            user: n.user(t.user(slot)),
            client: n.client(t.client(slot)),
            file: n.file(t.file(slot)),
            op: t.op(slot),
        }
    }

    /// Groups of lanes over which a policy without interest in lanes keeps its queues apart: one per lane
    /// where lanes have spaces of their own, one in all where requests are not split at lanes.
    pub fn groups(&self) -> usize {
        if self.shared_space { 1 } else { self.lanes.len() }
    }

    /// The groups for which the policy has requests and the lanes have room, round from one of them. Others are not
    /// asked: what is chosen before it can go is chosen without those who come meanwhile.
    pub(crate) fn startable_groups(&self, first: usize) -> Round<'_> {
        match (self.shared_space, self.total_open && !self.startable.is_empty()) {
            (_, false) => Round::of_none(),
            (true, true) => Round::of_one(),
            (false, true) => self.startable.round_from(first),
        }
    }

    /// The lanes that have queued requests and room, and are not held, round from one of them.
    pub(crate) fn open_lanes(&self, first: usize) -> impl Iterator<Item = usize> {
        let round = if self.total_open { self.startable.round_from(first) } else { Round::of_none() };
        round.filter(|lane| self.lanes[*lane].hold_until <= self.now)
    }

    /// The group of a request.
    pub fn group(&self, slot: Slot) -> usize {
        if self.shared_space { 0 } else { self.table.lane(slot).index() }
    }
}

/// How long a request may wait, as far as the policy decides it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitBound {
    /// Batches of its lane dispatched before it at most, whatever arrives meanwhile.
    pub batches: u64,
    /// Time that the policy lets its lane idle before it at most; [`Nanos::MAX`]: any time.
    pub idle: Nanos,
    /// A rule may withhold it ([`Policy::is_withheld`]): batches count only while none does.
    pub by_rule: bool,
}

impl WaitBound {
    /// Of a request for which no rule idles its lane.
    pub(crate) const fn of_batches(batches: u64) -> WaitBound {
        WaitBound { batches, idle: Nanos::ZERO, by_rule: false }
    }
}

/// A batch that ended, as policies are told.
pub struct Done<'a> {
    /// Its requests. They are still in the table; of one served piece by piece this may not be the last.
    pub slots: &'a [Slot],
    /// Its operation.
    pub op: Op,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Where it ended in the lane's space.
    pub end: u64,
    /// 0, or a Linux errno.
    pub errno: i32,
    /// What the device took.
    pub service: Nanos,
}

/// A scheduling policy.
pub trait Policy: Any + Send {
    /// Its name and all its parameters, as they are in force.
    fn spec(&self) -> PolicySpec;

    /// Takes a request that became eligible. Called once per request, in order of arrival for those that nothing blocked.
    fn enqueue(&mut self, view: &View<'_>, slot: Slot);

    /// Forgets a queued request (it was cancelled).
    fn dequeue(&mut self, view: &View<'_>, slot: Slot);

    /// Decides. For `Serve`, MUST have put into `batch` at least one queued request, all of one file,
    /// operation and lane group, touching, in offset order, the first on an open lane; and must have forgotten them.
    /// For `ServePiece`, one, forgotten only if the piece is the rest of it; for `ServeThrough`, as for `Serve` but
    /// reads that need not touch.
    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice;

    /// Serves an open lane, whose oldest queued request is shown. Asked where requests are not split at lanes and
    /// [`select`](Policy::select) waits for a busy lane only. MUST decide as `select` does, but may wait for its own
    /// reasons only; the batch begins on that lane.
    ///
    /// Unless the policy says otherwise, the request goes alone and outside its accounts: no other could use the lane.
    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        self.dequeue(view, oldest);
        batch.push(oldest);
        Choice::Serve
    }

    /// May put another policy into its place, which then has the queued requests; asked before each decision. True: it did,
    /// and limits are looked up again.
    fn reconsider(&mut self, _view: &View<'_>) -> bool {
        false
    }

    /// The policy that decides at present: itself, unless it chooses among others.
    fn acting(&self) -> PolicySpec {
        self.spec()
    }

    /// What it chose and why, where it chooses among others.
    fn chosen(&self) -> Option<Chosen> {
        None
    }

    /// Reads that nobody asked for may be started beside its requests.
    fn speculates(&self) -> bool {
        speculates(&self.spec())
    }

    /// It is about who gets how much: every request counts, also one that needs no device.
    fn shares(&self) -> bool {
        info(&self.spec().name).is_none_or(|info| info.conduct.shares)
    }

    /// The worst-case wait of a queued request from now.
    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound;

    /// A rule (a rate, a limit) keeps a queued request from going at present, whatever else is queued.
    fn is_withheld(&self, _view: &View<'_>, _slot: Slot) -> bool {
        false
    }

    /// It hands everything over at once: limits of batches in flight do not apply.
    fn unlimited(&self) -> bool {
        info(&self.spec().name).is_some_and(|info| info.conduct.unlimited)
    }

    /// Batches in flight at a lane at most, where the policy wants fewer than are configured.
    fn lane_requests(&self) -> Option<u32> {
        None
    }

    /// A batch ended.
    fn completed(&mut self, _view: &View<'_>, _done: &Done<'_>) {}

    /// A connection became ready, or ceased to be; the view knows.
    fn readiness(&mut self, _view: &View<'_>, _conn: ConnId) {}

    /// What it does with such a request at present, in words; `None` where that does not depend on who asks.
    fn explain(&self, _who: &Who, _now: Nanos) -> Option<String> {
        None
    }

    /// What a recorded run foretells, or nothing any more. Requests that are queued already need not profit.
    fn foresee(&mut self, _queues: Option<Arc<PredictedQueues>>) {}

    /// How many requests were those of the recorded run; `None`: the policy does not go by any.
    fn linked(&self) -> Option<Linked> {
        None
    }

    /// Goes on with what the policy before it learnt (tokens, shares, quanta, histories), where that is of its kind:
    /// after a change of parameters. Called before it receives the queued requests in order of arrival.
    fn take_over(&mut self, _view: &View<'_>, _old: Box<dyn Any>) {}
}

/// What a policy is built for.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Lanes below the scheduler.
    pub lanes: u16,
    /// Requests are not split at lanes; see [`CoreConfig::shared_space`](crate::CoreConfig::shared_space).
    pub shared_space: bool,
    /// Position of this node among its like, from 0.
    pub node_rank: u32,
    /// Most requests outstanding.
    pub capacity: u32,
    /// What is below sorts by itself; see [`CoreConfig::sorted_below`](crate::CoreConfig::sorted_below).
    pub sorted_below: bool,
}

/// What is told of a policy before it is built.
pub struct PolicyInfo {
    /// Its name.
    pub name: &'static str,
    /// One sentence.
    pub summary: &'static str,
    /// Paper and section, or other source.
    pub source: &'static str,
    /// What it may do with lanes and connections, and how long a request may wait.
    pub conduct: Conduct,
    /// Its parameters.
    pub params: &'static [ParamInfo],
    build: Build,
}

/// What drivers and the laws must know of a policy.
#[derive(Clone, Copy)]
pub struct Conduct {
    /// It hands everything over at once: limits of batches in flight do not apply.
    pub unlimited: bool,
    /// Reads that nobody asked for may be started beside its requests.
    pub speculates: bool,
    /// With these parameters it may let a lane idle though requests for it are queued; it says until when.
    pub idles: fn(&Params) -> bool,
    /// It asks whether connections can take data, and serves only those that can (2002: `select()`).
    pub minds_connections: bool,
    /// With these parameters only the first access of a connection may go, in order of arrival.
    pub in_order: fn(&Params) -> bool,
    /// It is about who gets how much: every request counts, also one that needs no device.
    pub shares: bool,
    /// The worst-case wait of a request, in words; [`Policy::wait_bound`] computes it.
    pub wait: &'static str,
}

impl Conduct {
    /// Of a policy that never lets a lane idle.
    pub const fn conserving(wait: &'static str) -> Conduct {
        Conduct {
            unlimited: false,
            speculates: true,
            idles: |_| false,
            minds_connections: false,
            in_order: |_| false,
            shares: false,
            wait,
        }
    }
}

type Build = fn(&Params, &Setup) -> Result<Box<dyn Policy>, PolicyError>;

/// All policies, by name.
pub const POLICIES: &[PolicyInfo] = &[
    auto::INFO,
    none::INFO,
    fifo::INFO,
    hbrr::INFO,
    mlf::INFO,
    mlf::AIOLI,
    agios::INFO,
    agios::CAUSAL,
    to::INFO,
    to::AGGREGATING,
    sjf::INFO,
    srtf::INFO,
    sw::INFO,
    wfq::INFO,
    twins::INFO,
    stream::INFO,
    scan::INFO,
    wscan::INFO,
    sstf::INFO,
    crr::INFO,
    orr::INFO,
    tbf::INFO,
    mclock::INFO,
    deadline::INFO,
    set10::INFO,
    lowest_yield_first::INFO,
];

/// True for policies that ask whether connections can take data (2002: `select()`).
pub fn minds_connections(spec: &PolicySpec) -> bool {
    info(&spec.name).is_some_and(|info| info.conduct.minds_connections)
}

/// True for policies beside which reads that nobody asked for may be started.
pub fn speculates(spec: &PolicySpec) -> bool {
    info(&spec.name).is_none_or(|info| info.conduct.speculates)
}

/// What is told of a policy, by its name.
pub fn info(name: &str) -> Option<&'static PolicyInfo> {
    POLICIES.iter().find(|p| p.name == name)
}

/// Builds a policy, or says in one line what is wrong with its name or a parameter.
pub fn build(spec: &PolicySpec, setup: &Setup) -> Result<Box<dyn Policy>, PolicyError> {
    let Some(info) = info(&spec.name) else {
        return Err(PolicyError::Unknown {
            name: spec.name.clone(),
            known: POLICIES.iter().map(|p| p.name).collect::<Vec<_>>().join(", "),
        });
    };
    let params = Params::new(info.name, info.params, &spec.params)?;
    (info.build)(&params, setup)
}

/// Checks a policy for a server with `lanes` lanes without keeping it.
pub fn check(spec: &PolicySpec, lanes: u16) -> Result<(), PolicyError> {
    build(spec, &Setup { lanes, shared_space: false, node_rank: 0, capacity: 1, sorted_below: false }).map(|_| ())
}
