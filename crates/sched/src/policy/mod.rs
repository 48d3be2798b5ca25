//! The policies, which decide which request is served next. One file per policy; [`POLICIES`] lists them.
//!
//! A policy sees only requests without an older conflicting one. It decides order, aggregation and waiting; the core
//! does the rest (conflicts, barriers, limits, accounting).

mod agios;
mod aioli;
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
use crate::device_time::DeviceTime;
use crate::limited::{Limited, Portions};
use crate::members::Members;
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
    /// Queued requests are for lanes without room (or blocked behind requests in flight there).
    LanesBusy,
    /// A lane is held for an expected request.
    Hold,
    /// The time window belongs to another server.
    Window,
    /// No quantum is large enough before the pass ends.
    Quantum,
    /// A rule's rate allows nothing yet.
    Rate,
    /// The connection whose turn it is cannot take data.
    Connection,
}

/// A policy's decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// Dispatch the requests in the batch.
    Serve,
    /// Dispatch the next `len_bytes` of the one request in the batch. The rest of the request stays queued and begins
    /// that much later. If the driver takes no pieces the whole request goes.
    ServePiece {
        /// Bytes, above 0.
        len_bytes: u64,
    },
    /// Dispatch the reads in the batch together with the holes between them (sieving: 2002, 2.1).
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
    /// Wait for an event, not for time.
    pub(crate) const fn until_event(reason: WaitReason) -> Choice {
        Choice::Wait { until: Nanos::MAX, reason }
    }

    /// Prefers a dispatch to a wait, then the wait that ends first, then the more specific reason.
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
    /// Syncs in flight that have a limit of their own, and are not among the others.
    pub(crate) in_flight_syncs: u32,
    /// Batches in flight that wait for a device that hangs; they do not count against the limits.
    pub(crate) stuck_requests: u32,
    /// Requests queued at the policy.
    pub(crate) queued: u32,
    pub(crate) hold_until: Nanos,
    /// When its last batch ended.
    pub(crate) ended: Nanos,
    /// What its batches are charged for.
    pub(crate) device_time: DeviceTime,
}

impl Lane {
    /// The limits allow one more batch in flight.
    pub(crate) fn has_room(&self) -> bool {
        // At most as many as the limit are left out, so that a lane never has more than twice that in flight.
        let counted = self.in_flight_requests - self.stuck().min(self.limit_requests);
        counted < self.limit_requests && self.in_flight_bytes < self.limit_bytes
    }

    /// A batch ended. Returns the time for which it had the lane to itself, without waiting behind others below the scheduler: what a
    /// batch costs a device that serves one after the other. Where batches overlap it says less than they took.
    pub(crate) fn end(&mut self, started: Nanos, finished: Nanos) -> Nanos {
        let device_time = finished.since(started.max(self.ended));
        self.ended = self.ended.max(finished);
        device_time
    }

    /// Batches in flight that are stuck.
    pub(crate) fn stuck(&self) -> u32 {
        self.stuck_requests.min(self.in_flight_requests)
    }
}

/// What a policy can read when it decides.
pub struct View<'a> {
    /// The present.
    pub now: Nanos,
    /// The present on the shared clock.
    pub shared_now: Nanos,
    /// The outstanding requests.
    pub table: &'a Table,
    /// The cost model.
    pub cost: &'a CostModel,
    /// The stable keys of the identities.
    pub names: &'a Names,
    /// Requests may be dispatched in pieces.
    pub pieces: bool,
    pub(crate) lanes: &'a [Lane],
    pub(crate) startable: &'a Occupied,
    pub(crate) not_ready: &'a FxHashSet<ConnId>,
    pub(crate) total_open: bool,
    pub(crate) shared_space: bool,
}

impl View<'_> {
    /// The lane has room for a batch and is not held.
    pub fn open(&self, lane: LaneId) -> bool {
        let l = &self.lanes[lane.index()];
        self.total_open && l.has_room() && l.hold_until <= self.now
    }

    /// The connection can take data.
    pub fn ready(&self, conn: ConnId) -> bool {
        !self.not_ready.contains(&conn)
    }

    /// The identities of a request, by stable keys.
    pub fn who(&self, slot: Slot) -> Who {
        let (t, n) = (self.table, self.names);
        Who {
            job: n.job(t.job(slot)),
            user: n.user(t.user(slot)),
            client: n.client(t.client(slot)),
            file: n.file(t.file(slot)),
            op: t.op(slot),
            naming: t.naming(slot),
        }
    }

    /// Groups of lanes for which a policy that ignores lanes keeps separate queues: one per lane if lanes have separate
    /// spaces, a single one if requests are not split at lanes.
    pub fn groups(&self) -> usize {
        if self.shared_space { 1 } else { self.lanes.len() }
    }

    /// The groups with queued requests and room, cyclically from `first`. Other groups are not asked: a choice made
    /// before it can be dispatched would miss later arrivals.
    pub(crate) fn startable_groups(&self, first: usize) -> Round<'_> {
        match (self.shared_space, self.total_open && !self.startable.is_empty()) {
            (_, false) => Round::of_none(),
            (true, true) => Round::of_one(),
            (false, true) => self.startable.round_from(first),
        }
    }

    /// The lanes with queued requests and room that are not held, cyclically from `first`.
    pub(crate) fn open_lanes(&self, first: usize) -> impl Iterator<Item = usize> {
        let round = if self.total_open { self.startable.round_from(first) } else { Round::of_none() };
        round.filter(|lane| self.lanes[*lane].hold_until <= self.now)
    }

    /// The group of a request.
    pub fn group(&self, slot: Slot) -> usize {
        if self.shared_space { 0 } else { self.table.lane(slot).index() }
    }
}

/// The worst-case wait of a request, as far as the policy determines it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitBound {
    /// Maximum batches of its lane dispatched before it, whatever arrives meanwhile.
    pub batches: u64,
    /// Maximum time that the policy idles its lane before it; [`Nanos::MAX`]: unbounded. It counts from when a barrier or
    /// a speculation last filled the lane or a hold ended: a turn may have passed meanwhile.
    pub idle: Nanos,
    /// A rule may withhold it ([`Policy::is_withheld`]); batches count only while none does.
    pub by_rule: bool,
}

impl WaitBound {
    /// For a request whose lane no rule idles.
    pub(crate) const fn of_batches(batches: u64) -> WaitBound {
        WaitBound { batches, idle: Nanos::ZERO, by_rule: false }
    }
}

/// A completed batch, as reported to policies.
pub struct Done<'a> {
    /// Its requests, still in the table; of a request served in pieces this may not be the last piece.
    pub slots: &'a [Slot],
    /// Its operation.
    pub op: Op,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Its end in the lane's space.
    pub end: u64,
    /// 0, or a Linux errno.
    pub errno: i32,
    /// From its start to its end below the scheduler, including any wait there.
    pub service: Nanos,
    /// Its share of the time for which the lane was busy: the shares of all batches add up to that. Only for policies that
    /// [read](Policy::reads_device_time) it.
    pub device_time: Nanos,
}

/// A scheduling policy.
pub trait Policy: Any + Send {
    /// Its name and all its parameters as in force.
    fn spec(&self) -> PolicySpec;

    /// Adds a request that became eligible. Called once per request; unblocked requests come in order of arrival.
    fn enqueue(&mut self, view: &View<'_>, slot: Slot);

    /// Removes a queued request (it was cancelled).
    fn dequeue(&mut self, view: &View<'_>, slot: Slot);

    /// Decides. For `Serve`, MUST have put at least one queued request into `batch`: all of one file, operation and
    /// lane group, touching, in offset order, the first on an open lane; and MUST have removed them from its queues.
    /// For `ServePiece`: one request, removed only if the piece is the rest of it. For `ServeThrough`: as for `Serve`,
    /// but reads that need not touch.
    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice;

    /// Serves an open lane, given its oldest queued request. Called if requests are not split at lanes and
    /// [`select`](Policy::select) waits only for a busy lane. MUST decide as `select` does, but may wait only for its
    /// own reasons; the batch begins on that lane.
    ///
    /// By default the request goes alone and is not accounted for: no other request could use the lane.
    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        self.dequeue(view, oldest);
        batch.push(oldest);
        Choice::Serve
    }

    /// Serves a queued request for which a change has waited long enough, or that change, whether its connection takes data or
    /// not; or what must go before it. MUST decide as `select` does, or wait if the lane is not open. Only for policies that
    /// [mind connections](Conduct::minds_connections).
    fn serve_pressing(&mut self, _view: &View<'_>, _slot: Slot, _batch: &mut Vec<Slot>) -> Choice {
        Choice::until_event(WaitReason::Connection)
    }

    /// May hand its queued requests to another policy that replaces it; called before each decision. True if it did:
    /// the core then reloads the limits.
    fn reconsider(&mut self, _view: &View<'_>) -> bool {
        false
    }

    /// The policy that currently decides: itself, unless it chooses among others.
    fn acting(&self) -> PolicySpec {
        self.spec()
    }

    /// Its choice and the reason, if it chooses among others.
    fn chosen(&self) -> Option<Chosen> {
        None
    }

    /// Speculative reads may be started beside its requests.
    fn speculates(&self) -> bool {
        speculates(&self.spec())
    }

    /// It shares the device between parties, so it accounts for every request, even one that needs no device.
    fn shares(&self) -> bool {
        info(&self.spec().name).is_none_or(|info| info.conduct.shares)
    }

    /// The worst-case wait of a queued request from now.
    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound;

    /// Whether a rule (a rate, a limit) currently withholds a queued request, whatever else is queued.
    fn is_withheld(&self, _view: &View<'_>, _slot: Slot) -> bool {
        false
    }

    /// It has rules that may [withhold](Policy::is_withheld) requests.
    fn may_withhold(&self) -> bool {
        false
    }

    /// It hands over everything at once: in-flight limits do not apply.
    fn unlimited(&self) -> bool {
        info(&self.spec().name).is_some_and(|info| info.conduct.unlimited)
    }

    /// Maximum batches in flight per lane, if the policy wants fewer than configured.
    fn lane_requests(&self) -> Option<u32> {
        None
    }

    /// The number of the time window that it now serves requests in, from 1; 0: it has none.
    fn window(&self, _view: &View<'_>) -> u64 {
        0
    }

    /// A batch ended.
    fn completed(&mut self, _view: &View<'_>, _done: &Done<'_>) {}

    /// It reads [`Done::device_time`], which costs two divisions a batch and is zero otherwise.
    fn reads_device_time(&self) -> bool {
        false
    }

    /// A connection became ready or unready; the view is up to date.
    fn readiness(&mut self, _view: &View<'_>, _conn: ConnId) {}

    /// How it currently treats such a request, in words; `None` if all are treated alike.
    fn explain(&self, _who: &Who, _now: Nanos) -> Option<String> {
        None
    }

    /// The classes of requests with limits that cannot be borrowed beyond, as far as they are in use.
    fn limited(&self, _now: Nanos) -> Vec<Limited> {
        Vec::new()
    }

    /// Sets the portions of limits over all servers that this one may grant.
    fn set_portions(&mut self, _view: &View<'_>, _portions: &Portions) {}

    /// Nodes or lanes have come or gone, from an instant on: it holds, with what was in force before, until the next call.
    fn members(&mut self, _view: &View<'_>, _members: &Members) {}

    /// Sets or clears the prediction from a recorded run. Requests already queued need not benefit.
    fn foresee(&mut self, _queues: Option<Arc<PredictedQueues>>) {}

    /// How many requests matched the recorded run; `None` if the policy does not use one.
    fn linked(&self) -> Option<Linked> {
        None
    }

    /// Imports the state of the previous policy (tokens, shares, quanta, histories) if that is of the same kind:
    /// parameters changed. Called before the queued requests are enqueued in order of arrival.
    fn take_over(&mut self, _view: &View<'_>, _old: Box<dyn Any>) {}
}

/// The environment that a policy is built for.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Lanes below the scheduler.
    pub lanes: u16,
    /// Requests are not split at lanes; see [`CoreConfig::shared_space`](crate::CoreConfig::shared_space).
    pub shared_space: bool,
    /// Rank of this node among nodes of its kind, from 0.
    pub node_rank: u32,
    /// When the node started; see [`CoreConfig::started`](crate::CoreConfig::started).
    pub started: Nanos,
    /// Maximum outstanding requests.
    pub capacity: u32,
    /// The layer below sorts; see [`CoreConfig::sorted_below`](crate::CoreConfig::sorted_below).
    pub sorted_below: bool,
    /// The layer below has an order of its own; see [`CoreConfig::scheduled_below`](crate::CoreConfig::scheduled_below).
    pub scheduled_below: bool,
}

impl Setup {
    /// The first node of its kind, with nothing below that sorts.
    pub(crate) fn of(lanes: u16, capacity: u32) -> Setup {
        Setup {
            lanes,
            shared_space: false,
            node_rank: 0,
            started: Nanos::ZERO,
            capacity,
            sorted_below: false,
            scheduled_below: false,
        }
    }
}

/// The description of a policy.
pub struct PolicyInfo {
    /// Its name.
    pub name: &'static str,
    /// One sentence for help texts.
    pub summary: &'static str,
    /// Paper and section, or other source.
    pub source: &'static str,
    /// Its use of lanes and connections, and its worst-case wait.
    pub conduct: Conduct,
    /// Its parameters.
    pub params: &'static [ParamInfo],
    build: Build,
}

/// What drivers and the laws must know about a policy.
#[derive(Clone, Copy)]
pub struct Conduct {
    /// It hands over everything at once: in-flight limits do not apply.
    pub unlimited: bool,
    /// Speculative reads may be started beside its requests.
    pub speculates: bool,
    /// With these parameters it may idle a lane that has queued requests; it says until when.
    pub idles: fn(&Params) -> bool,
    /// It serves reads only of connections that can take data (2002: `select()`), unless a change has waited for one, or for
    /// a lane that idles, for half a second.
    pub minds_connections: bool,
    /// With these parameters only a connection's first read and its first write, by arrival, may be served.
    pub in_order: fn(&Params) -> bool,
    /// It shares the device between parties, so it accounts for every request, even one that needs no device.
    pub shares: bool,
    /// It follows an administrator's rules or observes by itself: a decision table of `auto` may not name it.
    pub is_chosen_by_hand: bool,
    /// The worst-case wait of a request, in words; [`Policy::wait_bound`] computes it.
    pub wait: &'static str,
}

impl Conduct {
    /// For a policy that never idles a lane.
    pub const fn conserving(wait: &'static str) -> Conduct {
        Conduct {
            unlimited: false,
            speculates: true,
            idles: |_| false,
            minds_connections: false,
            in_order: |_| false,
            shares: false,
            is_chosen_by_hand: false,
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
    aioli::INFO,
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

/// True for policies that check whether connections can take data (2002: `select()`).
pub fn minds_connections(spec: &PolicySpec) -> bool {
    info(&spec.name).is_some_and(|info| info.conduct.minds_connections)
}

/// True for policies beside which speculative reads may be started.
pub fn speculates(spec: &PolicySpec) -> bool {
    info(&spec.name).is_none_or(|info| info.conduct.speculates)
}

/// True for policies that put requests in another order than that of arrival.
pub fn orders(spec: &PolicySpec) -> bool {
    !["none", "fifo", "to"].contains(&spec.name.as_str())
}

/// The description of a policy, by name.
pub fn info(name: &str) -> Option<&'static PolicyInfo> {
    POLICIES.iter().find(|p| p.name == name)
}

/// Builds a policy; the error says in one line what is wrong with its name or a parameter.
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
    build(spec, &Setup::of(lanes, 1)).map(|_| ())
}

/// The policy of a server that limits nothing.
pub fn unlimited() -> PolicySpec {
    PolicySpec::named(none::INFO.name)
}

/// Checks a policy for a server of calls on names, without keeping it. They use no device, so that only how many go in a
/// second can be limited: by `tbf` with hard limits in `requests_per_s`; `none` limits nothing.
pub fn check_for_names(spec: &PolicySpec) -> Result<(), PolicyError> {
    check(spec, 1)?;
    let unsuitable = |why| Err(PolicyError::Unsuitable { policy: tbf::INFO.name, why });
    let limits = match spec {
        spec if *spec == unlimited() => return Ok(()),
        spec if spec.name == tbf::INFO.name => spec.params.get("rules").map_or("", String::as_str),
        _ => return unsuitable("the metadata server takes tbf and none only".into()),
    };
    let rules = parts::rules::parse(limits).unwrap_or_default();
    let other =
        |rule: &&parts::rules::Rule| !rule.settings.contains_key("requests_per_s") || !parts::limits::is_hard(rule);
    match rules.iter().find(other) {
        Some(rule) => unsuitable(format!(
            "rule {} must have requests_per_s and not borrow=on: calls on names have no bytes and use no device",
            rule.name
        )),
        None if rules.is_empty() => {
            unsuitable("give it rules= with requests_per_s; policy none ends all limits".into())
        }
        None => Ok(()),
    }
}
