//! Checks the laws of the core's contract (architecture, *The core's contract*) while a core is driven, by random
//! scripts (the tests beside this file) or by the simulator.
//!
//! The checker sees only the core's inputs and outputs. Every accepted byte is dispatched exactly once; conflicting
//! requests keep their order; no wait exceeds the policy's bound; no lane idles while it has work, except for waits
//! that the policy may state ([`Conduct`]); connections that cannot take data are left alone. A speculation starts at
//! most once, only as a read, and either behind the read that it continues or alone while no request could start and
//! few other speculations are in flight; never after a change covered it. A read waits with the speculations of its file
//! for a bounded time, and so does a change for a connection that takes no data. Checking costs about as much as the core itself, more if many requests of one file conflict.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use crate::core::PRESSING_AFTER;
use crate::overtaking::PATIENCE;
use crate::policy::{self, Conduct, Params};
use crate::{
    Batch, BatchId, Core, CoreConfig, Extent, FileId, LaneId, LaneStatus, Nanos, Next, Op, Part, PolicySpec, Request,
    RequestId, WaitBound, WaitReason,
};

#[cfg(test)]
mod script;
#[cfg(test)]
mod tests;

/// Maximum violations kept.
pub const VIOLATIONS_MAX: usize = 20;
/// A wait may exceed its bound by this much, ns.
const TOLERANCE_NS: u64 = 1_000;

struct Known {
    request: Request,
    order: u64,
    /// When it came, or the policy was switched.
    since: u64,
    sent: u64,
    flying: u32,
    cancelled: bool,
    /// The policy's promise, and the lane's batch count and idle time when it was given.
    bound: Option<WaitBound>,
    batches_before: u64,
    idle_before: u64,
    /// A policy that chooses among others has moved the request.
    moved: bool,
    /// Batches of its own, and other batches while a rule withheld it.
    own: u64,
    withheld: u64,
}

/// A speculation that has not started.
struct Ahead {
    extent: Extent,
    /// A later write, truncate or unlink covers part of it.
    covered: bool,
}

impl Known {
    fn waits(&self) -> bool {
        !self.cancelled && self.sent < self.request.extent.len
    }
}

#[derive(Clone, Default)]
struct Lane {
    limit: Option<u32>,
    in_flight: u32,
    /// Batches dispatched and time idled since the start.
    batches: u64,
    idle: u64,
    /// Idle time before this point no longer counts.
    idle_floor: u64,
    hold_until: u64,
    /// Speculations in flight on their own.
    alone: u32,
    /// Barriers in flight.
    barriers: u32,
    /// Syncs in flight that have a limit of their own and are not among the batches above.
    syncs: u32,
}

/// Checks one core.
pub struct Laws {
    policy: String,
    shared_space: bool,
    total_limit: u32,
    lane_syncs: u32,
    pieces: bool,
    /// The policy is unlimited: lane limits do not apply.
    unlimited: bool,
    /// How often the policy had replaced itself.
    own_switches: u64,
    conduct: Conduct,
    may_idle: bool,
    in_order: bool,
    not_ready: BTreeSet<u32>,
    known: BTreeMap<RequestId, Known>,
    ahead: BTreeMap<RequestId, Ahead>,
    alone_limit: u32,
    /// Reads that wait with the speculations of their files, and since when.
    held: BTreeMap<RequestId, u64>,
    /// Waiting requests that a rule may withhold.
    withheld: BTreeSet<RequestId>,
    /// Outstanding requests by file, lane (0 if all share one space) and offset, and the longest so far.
    places: BTreeSet<(FileId, u16, u64, RequestId)>,
    longest: u64,
    /// Outstanding writes per file.
    writes: FxHashMap<FileId, u32>,
    flying: BTreeMap<BatchId, Batch>,
    lanes: Vec<Lane>,
    order: u64,
    looked: u64,
    /// When the core asked to be called again.
    due: u64,
    /// When other nodes and lanes will count as there.
    changes: Vec<u64>,
    violations: Vec<String>,
}

/// Whether the younger one must wait for the older one.
fn conflict(older: &Request, younger: &Request, shared_space: bool) -> bool {
    let (a, b) = (older.extent, younger.extent);
    let same = a.file == b.file && (shared_space || a.lane == b.lane);
    let overlap = a.lane_offset < b.end() && b.lane_offset < a.end();
    let harmless = |op: Op| matches!(op, Op::Read | Op::Sync);
    let changes = !(harmless(older.op) && harmless(younger.op));
    // A write after a sync need not be durable with it.
    same && overlap && changes && !(older.op == Op::Sync && younger.op == Op::Write)
}

/// What a policy may do; whether it may idle with these parameters; whether it serves a connection's accesses in order.
///
/// # Panics
/// For a policy that no core accepts.
fn conduct(spec: &PolicySpec) -> (Conduct, bool, bool) {
    let info = policy::info(&spec.name).unwrap_or_else(|| panic!("there is no policy {}", spec.name));
    let params = Params::new(info.name, info.params, &spec.params).unwrap_or_else(|e| panic!("{e}"));
    (info.conduct, (info.conduct.idles)(&params), (info.conduct.in_order)(&params))
}

impl Laws {
    /// A checker for a core without requests.
    pub fn new(config: &CoreConfig, core: &Core) -> Laws {
        let mut laws = Laws {
            policy: String::new(),
            shared_space: config.shared_space,
            total_limit: config.total_requests.max(1),
            lane_syncs: config.lane_syncs,
            pieces: config.pieces,
            unlimited: false,
            own_switches: 0,
            conduct: Conduct::conserving(""),
            may_idle: false,
            in_order: false,
            not_ready: BTreeSet::new(),
            known: BTreeMap::new(),
            ahead: BTreeMap::new(),
            alone_limit: config.lane_speculations,
            held: BTreeMap::new(),
            withheld: BTreeSet::new(),
            places: BTreeSet::new(),
            longest: 0,
            writes: FxHashMap::default(),
            flying: BTreeMap::new(),
            lanes: vec![Lane::default(); usize::from(config.lanes.max(1))],
            order: 0,
            looked: 0,
            due: u64::MAX,
            changes: Vec::new(),
            violations: Vec::new(),
        };
        laws.switched(0, core);
        laws
    }

    /// A new policy or new parameters are in force: earlier promises no longer hold.
    pub fn switched(&mut self, now: u64, core: &Core) {
        self.refresh_conduct(core);
        self.known.values_mut().for_each(|k| (k.bound, k.moved, k.since) = (None, false, now));
        self.withheld.clear();
    }

    /// Reads what the acting policy may do.
    fn refresh_conduct(&mut self, core: &Core) {
        let (status, (acting, own_switches)) = (core.status(), core.acting());
        (self.conduct, self.may_idle, self.in_order) = conduct(&acting);
        let limit = |l: &LaneStatus| l.limit_batches;
        self.lanes.iter_mut().zip(&status.lanes).for_each(|(lane, l)| lane.limit = limit(l));
        self.unlimited = self.conduct.unlimited;
        self.own_switches = own_switches;
        self.policy = match status.policy.name == acting.name {
            true => acting.to_string(),
            false => format!("{} as {acting}", status.policy.name),
        };
    }

    /// A choosing policy moved the waiting requests to another policy, which makes new promises; each request moves at
    /// most once.
    fn moved(&mut self, now: u64, core: &Core) {
        let mut twice = Vec::new();
        for (id, k) in self.known.iter_mut().filter(|(_, k)| k.waits()) {
            k.since = now;
            let lane = &self.lanes[k.request.extent.lane.index()];
            // Blocked requests and pieces in flight are not the policy's.
            let Some(bound) = core.wait_bound(Nanos(now), *id) else { continue };
            let minds = self.conduct.minds_connections && k.request.op == Op::Read;
            let ready = !minds || !self.not_ready.contains(&k.request.conn.0);
            k.bound = ready.then_some(bound);
            (k.batches_before, k.idle_before, k.own, k.withheld) = (lane.batches, lane.idle, 0, 0);
            if std::mem::replace(&mut k.moved, true) {
                twice.push(format!("law 3: a request was moved twice: {:?}", k.request));
            }
        }
        twice.into_iter().for_each(|what| self.violated(now, what));
    }

    /// The driver holds a lane.
    pub fn held(&mut self, now: Nanos, lane: LaneId, until: Nanos) {
        self.pass_time(now.0);
        self.lanes[lane.index()].hold_until = until.0;
    }

    /// From an instant of the local clock on other nodes or lanes are there: whoever takes turns may then begin a new round.
    pub fn members(&mut self, now: u64, from: u64) {
        self.pass_time(now);
        self.lanes.iter_mut().filter(|_| from <= now).for_each(|lane| lane.idle_floor = lane.idle);
        self.changes.extend((from > now).then_some(from));
    }

    fn violated(&mut self, now: u64, what: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(format!("{:.9} s, {}: {what}", now as f64 / 1e9, self.policy));
        }
    }

    /// The violations found since the last call, in words.
    pub fn take_violations(&mut self) -> Vec<String> {
        std::mem::take(&mut self.violations)
    }

    fn is_blocked(&self, k: &Known) -> bool {
        if !self.writes.contains_key(&k.request.extent.file) {
            return false;
        }
        let (file, lane, start, _) = self.place(RequestId(0), &k.request);
        let from = (file, lane, start.saturating_sub(self.longest), RequestId(0));
        let near = self.places.range(from..(file, lane, k.request.extent.end(), RequestId(0)));
        let older = |o: &&Known| o.order < k.order && (o.waits() || o.flying > 0);
        let mut conflicts = near.filter_map(|place| self.known.get(&place.3)).filter(older);
        conflicts.any(|o| conflict(&o.request, &k.request, self.shared_space))
    }

    /// A change that an older request may block, from when on it presses; it has not started.
    fn presses(&self, k: &Known, now: u64) -> bool {
        let changes = !matches!(k.request.op, Op::Read | Op::Sync);
        changes && k.waits() && k.sent == 0 && k.flying == 0 && now >= k.since.saturating_add(PRESSING_AFTER.0)
    }

    /// What is outstanding, older and in conflict with a request.
    fn blockers<'a>(&'a self, k: &'a Known) -> impl Iterator<Item = (&'a RequestId, &'a Known)> {
        let older = |o: &Known| o.order < k.order && (o.waits() || o.flying > 0);
        self.known.iter().filter(move |(_, o)| older(o) && conflict(&o.request, &k.request, self.shared_space))
    }

    /// A change has waited for so long for this read, or another one of its connection, that it goes though that takes no data.
    fn is_pressed(&self, read: &Known, now: u64) -> bool {
        let is_sibling = |o: &Known| o.request.op == Op::Read && o.request.conn == read.request.conn;
        let changes = self.known.values().filter(|k| self.presses(k, now));
        changes.flat_map(|k| self.blockers(k)).any(|(_, o)| is_sibling(o))
    }

    /// A read that a pressing change waits for, all of whose blockers are reads that could go, but for their connections.
    fn left_alone(&self, now: u64) -> Option<&Known> {
        let could_go = |id: &RequestId, o: &Known| {
            let lane = o.request.extent.lane.index();
            let waits = o.request.op == Op::Read && o.waits() && o.flying == 0 && !self.is_ready(&o.request);
            let is_open = self.has_room(Op::Read, lane) && self.lanes[lane].hold_until <= now;
            waits && is_open && !self.held.contains_key(id) && !self.is_blocked(o) && !self.has_older_sibling(o)
        };
        let late = now.saturating_sub(TOLERANCE_NS);
        let stuck = |k: &&Known| self.presses(k, late) && self.blockers(k).all(|(id, o)| could_go(id, o));
        self.known.values().filter(stuck).flat_map(|k| self.blockers(k)).map(|(_, o)| o).next()
    }

    fn place(&self, id: RequestId, request: &Request) -> (FileId, u16, u64, RequestId) {
        let lane = if self.shared_space { 0 } else { request.extent.lane.0 };
        (request.extent.file, lane, request.extent.lane_offset, id)
    }

    /// Only reads send data.
    fn is_ready(&self, request: &Request) -> bool {
        !self.conduct.minds_connections || request.op != Op::Read || !self.not_ready.contains(&request.conn.0)
    }

    /// An older access of the same connection and kind must go first, even on another lane.
    fn has_older_sibling(&self, k: &Known) -> bool {
        let of = |k: &Known| (k.request.conn, k.request.op);
        let mut all = self.known.values().filter(|o| of(o) == of(k));
        self.in_order && self.shared_space && all.any(|o| o.waits() && o.order < k.order && !self.is_blocked(o))
    }

    fn total_open(&self) -> bool {
        let syncs: u64 = self.lanes.iter().map(|lane| u64::from(lane.syncs)).sum();
        self.unlimited || (self.flying.len() as u64) - syncs < u64::from(self.total_limit)
    }

    /// Requests of this kind have a limit of their own.
    fn is_apart(&self, op: Op) -> bool {
        op == Op::Sync && self.lane_syncs > 0
    }

    /// The limits let a batch of this kind start.
    fn has_room(&self, op: Op, lane: usize) -> bool {
        match self.is_apart(op) {
            true => self.lanes[lane].syncs < self.lane_syncs,
            false => self.total_open() && self.lane_open(lane),
        }
    }

    fn lane_open(&self, lane: usize) -> bool {
        self.lanes[lane].in_flight < self.lanes[lane].limit.unwrap_or(u32::MAX)
    }

    /// Only batches that the policy did not choose fill the lane.
    fn filled_by_others(&self, lane: usize) -> bool {
        let Lane { in_flight, alone, barriers, limit, .. } = self.lanes[lane];
        !self.lane_open(lane) && in_flight.saturating_sub(alone + barriers) < limit.unwrap_or(u32::MAX)
    }

    /// Accounts for the time that lanes with room idled.
    fn pass_time(&mut self, now: u64) {
        let from = std::mem::replace(&mut self.looked, now);
        if now == from {
            return;
        }
        let (total_open, overdue) = (self.total_open(), now > self.due);
        let pending = self.changes.len();
        self.changes.retain(|at| *at > now);
        let changed = self.changes.len() < pending;
        for i in 0..self.lanes.len() {
            let (open, others) = (self.lane_open(i), self.filled_by_others(i));
            let lane = &mut self.lanes[i];
            if total_open && open {
                lane.idle += now - from;
            }
            // Idling does not count while the node is full, barriers or speculations fill the lane, it is held, or a
            // timer late: the policy did not cause it, and may have missed a turn meanwhile. Nor before turns were dealt anew.
            if !total_open || others || overdue || changed || lane.hold_until > from {
                lane.idle_floor = lane.idle;
            }
        }
    }

    /// A request was accepted. Call before the core's next decision.
    pub fn pushed(&mut self, now: u64, core: &Core, id: RequestId, request: &Request) {
        self.pass_time(now);
        let bound = core.wait_bound(Nanos(now), id).filter(|_| self.is_ready(request));
        self.order += 1;
        self.places.insert(self.place(id, request));
        self.longest = self.longest.max(request.extent.len);
        if request.op != Op::Read {
            *self.writes.entry(request.extent.file).or_default() += 1;
        }
        if matches!(request.op, Op::Write | Op::Truncate | Op::Unlink) {
            let changed = &request.extent;
            let covers = |a: &Extent| {
                let same = a.file == changed.file && (self.shared_space || a.lane == changed.lane);
                same && a.lane_offset < changed.end() && changed.lane_offset < a.end()
            };
            self.ahead.values_mut().filter(|a| covers(&a.extent)).for_each(|a| a.covered = true);
        }
        let lane = &self.lanes[request.extent.lane.index()];
        let known = Known {
            request: *request,
            order: self.order,
            since: now,
            sent: 0,
            flying: 0,
            cancelled: false,
            bound,
            batches_before: lane.batches,
            idle_before: lane.idle,
            moved: false,
            own: 0,
            withheld: 0,
        };
        if bound.is_some_and(|b| b.by_rule) {
            self.withheld.insert(id);
        }
        if self.known.insert(id, known).is_some() {
            self.violated(now, "an identity was given twice".into());
        }
    }

    /// A request was accepted that passes scheduling by.
    pub fn passes(&mut self, now: u64, core: &Core, id: RequestId, request: &Request) {
        self.pushed(now, core, id, request);
        let is_blocked = self.known.get(&id).is_some_and(|k| self.is_blocked(k));
        let takes_data = request.op == Op::Write || !self.not_ready.contains(&request.conn.0);
        if !request.op.is_data() || self.unlimited || !takes_data || is_blocked {
            self.violated(now, format!("law 2: it must not pass: {request:?}"));
        }
        if let Some(k) = self.known.get_mut(&id) {
            (k.sent, k.flying, k.bound) = (request.extent.len, 1, None);
        }
    }

    /// Such a request has ended, or, of `served_bytes`, is scheduled for the rest.
    pub fn passed(&mut self, now: u64, core: &Core, id: RequestId, served_bytes: Option<u64>) {
        self.pass_time(now);
        let Some(served_bytes) = served_bytes else { return self.forget(id) };
        let Some(k) = self.known.get_mut(&id) else { return };
        let lane = &self.lanes[k.request.extent.lane.index()];
        (k.sent, k.flying) = (served_bytes, 0);
        k.bound = core.wait_bound(Nanos(now), id);
        (k.batches_before, k.idle_before) = (lane.batches, lane.idle);
        if k.bound.is_some_and(|b| b.by_rule) {
            self.withheld.insert(id);
        }
    }

    /// A speculation was accepted. Call before the core's next decision.
    pub fn speculated(&mut self, now: u64, id: RequestId, request: &Request) {
        self.pass_time(now);
        let ahead = Ahead { extent: request.extent, covered: false };
        if request.op != Op::Read || self.alone_limit == 0 {
            self.violated(now, format!("law 7: speculation is of reads where it is allowed: {request:?}"));
        }
        if self.known.contains_key(&id) || self.ahead.insert(id, ahead).is_some() {
            self.violated(now, "an identity was given twice".into());
        }
    }

    /// The core dropped a speculation.
    pub fn given_up(&mut self, now: u64, id: RequestId) {
        if self.ahead.remove(&id).is_none() {
            self.violated(now, "law 7: what was given up is not a speculation that waits".into());
        }
    }

    fn forget(&mut self, id: RequestId) {
        let Some(k) = self.known.remove(&id) else { return };
        self.places.remove(&self.place(id, &k.request));
        self.withheld.remove(&id);
        let file = k.request.extent.file;
        if k.request.op != Op::Read
            && let Some(count) = self.writes.get_mut(&file)
        {
            *count -= 1;
            if *count == 0 {
                self.writes.remove(&file);
            }
        }
    }

    /// The core made a decision.
    pub fn decided(&mut self, now: u64, core: &Core, next: &Next) {
        self.pass_time(now);
        self.hold(now, core);
        let moved = core.acting().1 != self.own_switches;
        if moved {
            if self.in_order && self.shared_space {
                // Lanes idled for accesses that had to go first elsewhere: the policy before promised no more.
                self.lanes.iter_mut().for_each(|lane| lane.idle_floor = lane.idle);
            }
            self.refresh_conduct(core);
        }
        match next {
            Next::Dispatch(batch) => {
                self.dispatched(now, batch);
                let real = batch.parts.iter().any(|p| self.known.contains_key(&p.id));
                let passed = |id: &RequestId| real && batch.op.is_data() && batch.parts.iter().all(|p| p.id != *id);
                for id in self.withheld.iter().filter(|id| passed(id) && core.is_withheld(Nanos(now), **id)) {
                    if let Some(k) = self.known.get_mut(id).filter(|k| k.request.extent.lane == batch.extent.lane) {
                        k.withheld += 1;
                    }
                }
            }
            Next::Wait { until, reason } => {
                self.due = until.0;
                self.waits(now, until.0, *reason);
            }
        }
        if moved {
            self.moved(now, core);
        }
    }

    /// Which reads wait with the speculations of their files after a decision; none longer than promised.
    fn hold(&mut self, now: u64, core: &Core) {
        let before = std::mem::take(&mut self.held);
        self.held = core.held_back().map(|id| (id, before.get(&id).copied().unwrap_or(now))).collect();
        let late = |(_, since): &(&RequestId, &u64)| now > since.saturating_add(PATIENCE.0 + TOLERANCE_NS);
        if let Some((id, since)) = self.held.iter().find(late) {
            let what = format!("law 7: a read waits with the speculations of its file since {since} ns: {id:?}");
            self.violated(now, what);
        }
    }

    fn dispatched(&mut self, now: u64, batch: &Batch) {
        let mut wrong = Vec::new();
        let lane = batch.extent.lane.index();
        let has_no_limit = self.unlimited && !self.is_apart(batch.op);
        if !has_no_limit && !self.has_room(batch.op, lane) {
            wrong.push(format!("a batch for lane {lane}, which has no room"));
        }
        if self.lanes[lane].hold_until > now {
            wrong.push(format!("a batch for lane {lane}, which is held"));
        }
        let mut end = batch.extent.lane_offset;
        let mut real = false;
        for (nth, part) in batch.parts.iter().enumerate() {
            if let Some(ahead) = self.ahead.remove(&part.id) {
                if nth + 1 < batch.parts.len() {
                    wrong.push(format!("law 7: a speculation is before a request in a batch: {:?}", ahead.extent));
                }
                wrong.extend(self.speculation_is_wrong(now, batch, part, &ahead, (end, real)));
                end = end.max(part.lane_offset.saturating_add(part.len));
                continue;
            }
            real = true;
            let Some(k) = self.known.get(&part.id) else {
                wrong.push("law 1: a request that is not outstanding was dispatched".to_string());
                continue;
            };
            let rest = k.request.extent.len.saturating_sub(k.sent);
            if !k.waits()
                || (part.from, part.lane_offset) != (k.sent, k.request.extent.lane_offset.saturating_add(k.sent))
            {
                wrong.push(format!("law 1: dispatched twice or out of order: {part:?} of {:?}", k.request));
            }
            if !(part.len == rest || self.pieces && part.len > 0 && part.len < rest && batch.parts.len() == 1) {
                wrong.push(format!("law 1: a piece of {} bytes where {rest} are left", part.len));
            }
            if self.is_blocked(k) {
                wrong.push(format!("law 2: an older request that conflicts is outstanding: {:?}", k.request));
            }
            if !self.is_ready(&k.request) && !self.is_pressed(k, now) {
                wrong.push(format!("connection {} cannot take data", k.request.conn.0));
            }
            let elsewhere = !self.shared_space && k.request.extent.lane != batch.extent.lane;
            if k.request.op != batch.op || k.request.extent.file != batch.extent.file || elsewhere {
                wrong.push(format!("a batch is of one file, lane and operation: {:?}", k.request));
            }
            if part.lane_offset > end && !(self.conduct.minds_connections && batch.op == Op::Read) {
                wrong.push(format!("the parts of a batch do not touch at {end}"));
            }
            wrong.extend(self.too_late(k));
            end = end.max(part.lane_offset.saturating_add(part.len));
        }
        if end != batch.extent.end() {
            wrong.push(format!("a batch ends at {}, its parts at {end}", batch.extent.end()));
        }
        for part in &batch.parts {
            if let Some(k) = self.known.get_mut(&part.id) {
                (k.sent, k.flying, k.own) = (k.sent.saturating_add(part.len), k.flying + 1, k.own + 1);
            }
        }
        // The policy does not see barriers and speculations.
        self.lanes[lane].batches += u64::from(batch.op.is_data() && real);
        self.lanes[lane].alone += u32::from(!real);
        if self.is_apart(batch.op) {
            self.lanes[lane].syncs += 1;
        } else {
            self.lanes[lane].barriers += u32::from(!batch.op.is_data());
            self.lanes[lane].in_flight += 1;
        }
        self.flying.insert(batch.id, batch.clone());
        wrong.into_iter().for_each(|what| self.violated(now, what));
    }

    /// What is wrong with starting a speculation behind `real` requests that end at `end`, if anything.
    fn speculation_is_wrong(
        &self,
        now: u64,
        batch: &Batch,
        part: &Part,
        ahead: &Ahead,
        (end, real): (u64, bool),
    ) -> Option<String> {
        let Ahead { extent, covered } = ahead;
        let lane = batch.extent.lane.index();
        let here = (extent.file, extent.lane) == (batch.extent.file, batch.extent.lane) && batch.op == Op::Read;
        let within = part.len > 0
            && part.lane_offset >= extent.lane_offset
            && part.lane_offset.saturating_add(part.len) == extent.end();
        let why = if *covered {
            "a change covers it"
        } else if !here || !within || part.lane_offset != end {
            "it is not the rest of what was accepted, behind the batch"
        } else if real {
            return None;
        } else if self.lanes[lane].alone >= self.alone_limit {
            "too many are under way alone"
        } else if self.startable(now, Some(lane)).is_some() {
            "a request could start instead"
        } else {
            return None;
        };
        Some(format!("law 7: a speculation starts though {why}: {extent:?}"))
    }

    /// A request that could start now, on one lane or any.
    fn startable(&self, now: u64, of: Option<usize>) -> Option<&Known> {
        let is_open = |op: Op| move |lane: usize| self.has_room(op, lane) && self.lanes[lane].hold_until <= now;
        // Of syncs, and of all else.
        let open = [Op::Sync, Op::Read].map(|op| (0..self.lanes.len()).map(is_open(op)).collect::<Vec<_>>());
        if !open.iter().any(|lanes| lanes.contains(&true)) {
            return None;
        }
        let could_go = |k: &Known| {
            let lane = k.request.extent.lane.index();
            let free = k.waits()
                && open[usize::from(k.request.op != Op::Sync)][lane]
                && of.is_none_or(|of| of == lane)
                && self.is_ready(&k.request);
            free && !self.is_blocked(k) && !self.has_older_sibling(k)
        };
        let could_go = |(id, k): &(&RequestId, &Known)| !self.held.contains_key(id) && could_go(k);
        self.known.iter().find(could_go).map(|(_, k)| k)
    }

    /// Whether a request dispatched now waited longer than promised.
    fn too_late(&self, k: &Known) -> Option<String> {
        let (bound, lane) = (k.bound?, &self.lanes[k.request.extent.lane.index()]);
        let batches = lane.batches - k.batches_before - k.own - k.withheld;
        if batches > bound.batches {
            return Some(format!("law 3: {batches} batches before it, bound {}: {:?}", bound.batches, k.request));
        }
        let idle = lane.idle - k.idle_before.max(lane.idle_floor);
        let late = !(self.shared_space && self.in_order) && idle > bound.idle.0.saturating_add(TOLERANCE_NS);
        late.then(|| format!("law 3: the lane idled {idle} ns, bound {} ns: {:?}", bound.idle.0, k.request))
    }

    fn waits(&mut self, now: u64, until: u64, reason: WaitReason) {
        if until <= now {
            self.violated(now, format!("a wait until {until} ns, which is past"));
        }
        let stated = self.may_idle
            && match reason {
                WaitReason::Connection => !self.not_ready.is_empty(),
                WaitReason::Empty => false,
                _ => until < u64::MAX,
            };
        if let Some(k) = self.left_alone(now) {
            let what = format!("law 3: a change presses, and a read in its way is left alone: {:?}", k.request);
            self.violated(now, what);
        }
        if !stated && let Some(k) = self.startable(now, None) {
            let what = format!("law 4: idle ({reason:?} until {until} ns) with work: {:?}", k.request);
            self.violated(now, what);
        }
    }

    /// A batch ended.
    pub fn completed(&mut self, now: u64, batch: BatchId) {
        self.pass_time(now);
        let Some(batch) = self.flying.remove(&batch) else { return };
        let is_apart = self.is_apart(batch.op);
        let lane = &mut self.lanes[batch.extent.lane.index()];
        let real = batch.parts.iter().any(|part| self.known.contains_key(&part.id));
        lane.alone = lane.alone.saturating_sub(u32::from(!real));
        if is_apart {
            lane.syncs -= 1;
        } else {
            lane.in_flight -= 1;
            lane.barriers -= u32::from(!batch.op.is_data());
        }
        for part in batch.parts {
            let Some(k) = self.known.get_mut(&part.id) else { continue };
            k.flying -= 1;
            if k.flying == 0 && !k.waits() {
                self.forget(part.id);
            }
        }
    }

    /// Requests were cancelled.
    pub fn cancelled(&mut self, now: u64, ids: &[RequestId]) {
        self.pass_time(now);
        for id in ids {
            if let Some(k) = self.known.get_mut(id) {
                k.cancelled = true;
                if k.flying == 0 {
                    self.forget(*id);
                }
            }
        }
    }

    /// A connection closed, which removed these requests.
    pub fn disconnected(&mut self, now: u64, conn: u32, ids: &[RequestId]) {
        self.cancelled(now, ids);
        if self.known.values().any(|k| k.waits() && k.request.conn.0 == conn) {
            self.violated(now, format!("connection {conn} was cancelled, but has requests queued"));
        }
        self.readiness(now, conn, true);
    }

    /// A connection became able, or unable, to take data. Policies that mind connections promise bounds only for ready
    /// ones.
    pub fn readiness(&mut self, now: u64, conn: u32, ready: bool) {
        self.pass_time(now);
        let changed = if ready { self.not_ready.remove(&conn) } else { self.not_ready.insert(conn) };
        if changed && self.conduct.minds_connections {
            self.known
                .values_mut()
                .filter(|k| k.request.conn.0 == conn && k.request.op == Op::Read)
                .for_each(|k| k.bound = None);
        }
    }

    /// True if nothing is outstanding, as far as the checker knows.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty() && self.ahead.is_empty() && self.flying.is_empty() && self.writes.is_empty()
    }
}
