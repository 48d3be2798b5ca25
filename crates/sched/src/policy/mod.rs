//! The policies: which request is served next. One file a policy; the list is [`POLICIES`].
//!
//! A policy sees requests that nothing older conflicts with, and lanes with or without room. It decides
//! order, aggregation and waiting; the core does the rest (conflicts, barriers, limits, counting).

mod fifo;
mod hbrr;
mod mlf;
mod none;
pub mod params;
mod runs;
mod twins;

use crate::cost::CostModel;
use crate::spec::PolicySpec;
use crate::table::{Slot, Table};
use crate::types::{LaneId, Nanos};
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
}

/// What a policy decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// Dispatch what was put into the batch.
    Serve,
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

    /// Of two waits the one that ends first; having nothing gives way to any other reason.
    pub(crate) fn sooner(self, other: Choice) -> Choice {
        match (self, other) {
            (Choice::Wait { until: a, reason }, Choice::Wait { until: b, .. })
                if a < b || (a == b && reason != WaitReason::Empty) =>
            {
                self
            }
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
    pub(crate) hold_until: Nanos,
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
    pub(crate) lanes: &'a [Lane],
    pub(crate) total_open: bool,
    pub(crate) shared_space: bool,
}

impl View<'_> {
    /// Room for one more batch on the lane, and no hold.
    pub fn open(&self, lane: LaneId) -> bool {
        let l = &self.lanes[lane.index()];
        self.total_open
            && l.in_flight_requests < l.limit_requests
            && l.in_flight_bytes < l.limit_bytes
            && l.hold_until <= self.now
    }

    /// Groups of lanes over which a policy without interest in lanes keeps its queues apart: one per lane
    /// where lanes have spaces of their own, one in all where requests are not split at lanes.
    pub fn groups(&self) -> usize {
        if self.shared_space { 1 } else { self.lanes.len() }
    }

    /// The group of a request.
    pub fn group(&self, slot: Slot) -> usize {
        if self.shared_space { 0 } else { self.table.lane(slot).index() }
    }
}

/// How long a request may wait, as far as the policy decides it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitBound {
    /// Batches of its lane (or node) dispatched before it at most, whatever arrives meanwhile.
    pub batches: u64,
    /// Time that the policy lets its lane idle before it at most.
    pub idle: Nanos,
}

/// A scheduling policy.
pub trait Policy: Send {
    /// Its name and all its parameters, as they are in force.
    fn spec(&self) -> PolicySpec;

    /// Takes a request that became eligible. Called once per request, in order of arrival for those that nothing blocked.
    fn enqueue(&mut self, view: &View<'_>, slot: Slot);

    /// Forgets a queued request (it was cancelled).
    fn dequeue(&mut self, view: &View<'_>, slot: Slot);

    /// Decides. For `Serve`, MUST have put into `batch` at least one queued request, all of one file,
    /// operation and lane group, touching, in offset order, the first on an open lane; and must have forgotten them.
    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice;

    /// The worst-case wait of a queued request from now.
    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound;

    /// True for a policy that hands everything over at once: lane limits do not apply.
    fn unlimited(&self) -> bool {
        false
    }
}

/// What a policy is built for.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Lanes below the scheduler.
    pub lanes: u16,
    /// Position of this node among its like, from 0.
    pub node_rank: u32,
    /// Most requests outstanding.
    pub capacity: u32,
}

/// What is told of a policy before it is built.
pub struct PolicyInfo {
    /// Its name.
    pub name: &'static str,
    /// One sentence.
    pub summary: &'static str,
    /// Paper and section, or other source.
    pub source: &'static str,
    /// Its parameters.
    pub params: &'static [ParamInfo],
    build: Build,
}

type Build = fn(&Params, &Setup) -> Result<Box<dyn Policy>, PolicyError>;

/// All policies, by name.
pub const POLICIES: &[PolicyInfo] = &[none::INFO, fifo::INFO, hbrr::INFO, mlf::INFO, twins::INFO];

/// Builds a policy, or says in one line what is wrong with its name or a parameter.
pub fn build(spec: &PolicySpec, setup: &Setup) -> Result<Box<dyn Policy>, PolicyError> {
    let Some(info) = POLICIES.iter().find(|p| p.name == spec.name) else {
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
    build(spec, &Setup { lanes, node_rank: 0, capacity: 1 }).map(|_| ())
}
