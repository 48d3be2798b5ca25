//! The laws of the core's contract, watched during a simulation (architecture, *The core's contract*; the
//! same laws that the core's own tests check over random scripts).
//!
//! Everything here is looked at from outside the core, by what it was given and what it gave: every accepted byte
//! is dispatched exactly once; conflicting requests keep their order; no wait exceeds the policy's bound; no lane idles while
//! there is work for it, except for a wait that the policy may state; a connection that cannot take data is left
//! alone. It costs about as much as the core itself, and more where many requests of one file conflict.

use std::collections::{BTreeMap, BTreeSet};

use impresario_sched::{
    Batch, BatchId, Core, CoreConfig, FileId, Nanos, Next, Op, PolicySpec, Request, RequestId, WaitBound, WaitReason,
};
use rustc_hash::FxHashMap;

/// Violations kept.
pub(crate) const VIOLATIONS_MAX: usize = 20;
/// A wait may be noticed so much late, ns.
const TOLERANCE_NS: u64 = 200_000;

/// True for policies that serve connections that can take data only (server-side-scheduling-2002).
pub(crate) fn minds_connections(spec: &PolicySpec) -> bool {
    ["stream", "scan", "wscan", "sstf"].contains(&spec.name.as_str())
}

/// True for policies that may let a lane idle by their own rule with some parameters.
fn may_idle(spec: &PolicySpec) -> bool {
    ["mlf", "aioli", "sstf", "twins", "tbf", "mclock"].contains(&spec.name.as_str())
}

struct Known {
    request: Request,
    order: u64,
    sent: u64,
    flying: u32,
    cancelled: bool,
    /// What the policy promised, and how much its lane had been dispatched and had idled by then.
    bound: Option<WaitBound>,
    batches_before: u64,
    idle_before: u64,
    /// Batches of it.
    own: u64,
}

impl Known {
    fn waits(&self) -> bool {
        !self.cancelled && self.sent < self.request.extent.len
    }
}

/// A lane (or all of them, where they share one space).
#[derive(Clone, Default)]
struct Lane {
    limit: Option<u32>,
    in_flight: u32,
    /// Batches dispatched and time idled away since the beginning.
    batches: u64,
    idle: u64,
    /// Idle time before which does not count any more.
    idle_floor: u64,
}

pub(crate) struct Laws {
    policy: String,
    shared_space: bool,
    total_limit: u32,
    pieces: bool,
    /// Its policy hands everything over at once: limits do not apply.
    unlimited: bool,
    minds_connections: bool,
    may_idle: bool,
    not_ready: BTreeSet<u32>,
    known: BTreeMap<RequestId, Known>,
    /// Outstanding requests by file, lane (0 where all share one space) and offset, and the longest that there was.
    places: BTreeSet<(FileId, u16, u64, RequestId)>,
    longest: u64,
    /// Outstanding writes of files.
    writes: FxHashMap<FileId, u32>,
    flying: BTreeMap<BatchId, Batch>,
    lanes: Vec<Lane>,
    order: u64,
    /// Bounds of requests up to this one hold no more.
    void_to: u64,
    looked: u64,
    /// When the core asked to be asked again.
    due: u64,
    violations: Vec<String>,
}

fn conflict(a: &Request, b: &Request, shared_space: bool) -> bool {
    let same = a.extent.file == b.extent.file && (shared_space || a.extent.lane == b.extent.lane);
    let overlap = a.extent.lane_offset < b.extent.end() && b.extent.lane_offset < a.extent.end();
    same && overlap && !(a.op == Op::Read && b.op == Op::Read)
}

impl Laws {
    pub(crate) fn new(config: &CoreConfig, spec: &PolicySpec, core: &Core) -> Laws {
        let lane = |l: &impresario_sched::LaneStatus| Lane { limit: l.limit_batches, ..Lane::default() };
        Laws {
            policy: spec.to_string(),
            shared_space: config.shared_space,
            total_limit: config.total_requests.max(1),
            pieces: config.pieces,
            unlimited: spec.name == "none",
            minds_connections: minds_connections(spec),
            may_idle: may_idle(spec),
            not_ready: BTreeSet::new(),
            known: BTreeMap::new(),
            places: BTreeSet::new(),
            longest: 0,
            writes: FxHashMap::default(),
            flying: BTreeMap::new(),
            lanes: core.status().lanes.iter().map(lane).collect(),
            order: 0,
            void_to: 0,
            looked: 0,
            due: u64::MAX,
            violations: Vec::new(),
        }
    }

    fn violated(&mut self, now: u64, what: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(format!("{:.9} s, {}: {what}", now as f64 / 1e9, self.policy));
        }
    }

    pub(crate) fn take_violations(&mut self) -> Vec<String> {
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

    fn place(&self, id: RequestId, request: &Request) -> (FileId, u16, u64, RequestId) {
        let lane = if self.shared_space { 0 } else { request.extent.lane.0 };
        (request.extent.file, lane, request.extent.lane_offset, id)
    }

    fn is_ready(&self, request: &Request) -> bool {
        !self.minds_connections || !self.not_ready.contains(&request.conn.0)
    }

    fn total_open(&self) -> bool {
        self.unlimited || (self.flying.len() as u64) < u64::from(self.total_limit)
    }

    fn lane_open(&self, lane: usize) -> bool {
        self.lanes[lane].in_flight < self.lanes[lane].limit.unwrap_or(u32::MAX)
    }

    /// Time went on: lanes with room idled.
    fn pass_time(&mut self, now: u64) {
        let by = now - std::mem::replace(&mut self.looked, now);
        if by == 0 {
            return;
        }
        let (total_open, overdue) = (self.total_open(), now > self.due);
        for i in 0..self.lanes.len() {
            let open = self.lane_open(i);
            let lane = &mut self.lanes[i];
            match (total_open, open) {
                (true, true) => lane.idle += by,
                (true, false) => {}
                (false, _) => {}
            }
            // While the node is full, or a timer late, times at which a lane would have had its turn pass without the
            // policy's doing.
            if !total_open || overdue {
                lane.idle_floor = lane.idle;
            }
        }
    }

    pub(crate) fn pushed(&mut self, now: u64, core: &Core, id: RequestId, request: &Request) {
        self.pass_time(now);
        let bound = core.wait_bound(Nanos(now), id).filter(|_| self.not_ready.is_empty());
        self.order += 1;
        self.places.insert(self.place(id, request));
        self.longest = self.longest.max(request.extent.len);
        if request.op != Op::Read {
            *self.writes.entry(request.extent.file).or_default() += 1;
        }
        let known = Known {
            request: *request,
            order: self.order,
            sent: 0,
            flying: 0,
            cancelled: false,
            bound,
            batches_before: self.batches(request),
            idle_before: self.lanes[request.extent.lane.index()].idle,
            own: 0,
        };
        if self.known.insert(id, known).is_some() {
            self.violated(now, "an identity was given twice".into());
        }
    }

    /// Batches of a request's lane so far.
    fn batches(&self, request: &Request) -> u64 {
        match self.shared_space {
            true => self.lanes.iter().map(|l| l.batches).sum(),
            false => self.lanes[request.extent.lane.index()].batches,
        }
    }

    fn forget(&mut self, id: RequestId) {
        let Some(k) = self.known.remove(&id) else { return };
        self.places.remove(&self.place(id, &k.request));
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

    pub(crate) fn said(&mut self, now: u64, said: &Next) {
        self.pass_time(now);
        match said {
            Next::Dispatch(batch) => self.dispatched(now, batch),
            Next::Wait { until, reason } => {
                self.due = until.0;
                self.waits(now, until.0, *reason);
            }
        }
    }

    fn dispatched(&mut self, now: u64, batch: &Batch) {
        let mut wrong = Vec::new();
        let lane = batch.extent.lane.index();
        if !(self.unlimited || self.total_open() && self.lane_open(lane)) {
            wrong.push(format!("a batch for lane {lane}, which has no room"));
        }
        let mut end = batch.extent.lane_offset;
        for part in &batch.parts {
            let Some(k) = self.known.get(&part.id) else {
                wrong.push("law 1: a request that is not outstanding was dispatched".to_string());
                continue;
            };
            let rest = k.request.extent.len.saturating_sub(k.sent);
            if !k.waits() || (part.from, part.lane_offset) != (k.sent, k.request.extent.lane_offset + k.sent) {
                wrong.push(format!("law 1: dispatched twice or out of order: {part:?} of {:?}", k.request));
            }
            if !(part.len == rest || self.pieces && part.len > 0 && part.len < rest && batch.parts.len() == 1) {
                wrong.push(format!("law 1: a piece of {} bytes where {rest} are left", part.len));
            }
            if self.is_blocked(k) {
                wrong.push(format!("law 2: an older request that conflicts is outstanding: {:?}", k.request));
            }
            if !self.is_ready(&k.request) {
                wrong.push(format!("connection {} cannot take data", k.request.conn.0));
            }
            let elsewhere = !self.shared_space && k.request.extent.lane != batch.extent.lane;
            if k.request.op != batch.op || k.request.extent.file != batch.extent.file || elsewhere {
                wrong.push(format!("a batch is of one file, lane and operation: {:?}", k.request));
            }
            if part.lane_offset > end && !(self.minds_connections && batch.op == Op::Read) {
                wrong.push(format!("the parts of a batch do not touch at {end}"));
            }
            wrong.extend(self.too_late(k));
            end = end.max(part.lane_offset + part.len);
        }
        if end != batch.extent.end() {
            wrong.push(format!("a batch ends at {}, its parts at {end}", batch.extent.end()));
        }
        for part in &batch.parts {
            if let Some(k) = self.known.get_mut(&part.id) {
                (k.sent, k.flying, k.own) = (k.sent + part.len, k.flying + 1, k.own + 1);
            }
        }
        (self.lanes[lane].batches, self.lanes[lane].in_flight) =
            (self.lanes[lane].batches + 1, self.lanes[lane].in_flight + 1);
        self.flying.insert(batch.id, batch.clone());
        wrong.into_iter().for_each(|what| self.violated(now, what));
    }

    /// Whether a request that is dispatched now waited longer than was promised.
    fn too_late(&self, k: &Known) -> Option<String> {
        let bound = k.bound.filter(|_| k.order > self.void_to)?;
        let batches = self.batches(&k.request) - k.batches_before - k.own;
        if batches > bound.batches {
            return Some(format!("law 3: {batches} batches before it, bound {}: {:?}", bound.batches, k.request));
        }
        let lane = &self.lanes[k.request.extent.lane.index()];
        let idle = lane.idle - k.idle_before.max(lane.idle_floor);
        let late = !self.shared_space && idle > bound.idle.0.saturating_add(TOLERANCE_NS);
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
        let open: Vec<bool> = (0..self.lanes.len()).map(|lane| self.lane_open(lane)).collect();
        // With one space for all lanes a queue's first request decides which lane it waits for.
        if stated || !self.total_open() || !open.contains(&true) || self.shared_space && open.contains(&false) {
            return;
        }
        let could_go = |k: &&Known| {
            k.waits() && open[k.request.extent.lane.index()] && self.is_ready(&k.request) && !self.is_blocked(k)
        };
        if let Some(k) = self.known.values().find(could_go) {
            let what = format!("law 4: idle ({reason:?} until {until} ns) with work: {:?}", k.request);
            self.violated(now, what);
        }
    }

    pub(crate) fn completed(&mut self, now: u64, batch: BatchId) {
        self.pass_time(now);
        let Some(batch) = self.flying.remove(&batch) else { return };
        self.lanes[batch.extent.lane.index()].in_flight -= 1;
        for part in batch.parts {
            let Some(k) = self.known.get_mut(&part.id) else { continue };
            k.flying -= 1;
            if k.flying == 0 && !k.waits() {
                self.forget(part.id);
            }
        }
    }

    pub(crate) fn cancelled(&mut self, now: u64, conn: u32, ids: &[RequestId]) {
        self.pass_time(now);
        for id in ids {
            if let Some(k) = self.known.get_mut(id) {
                k.cancelled = true;
                if k.flying == 0 {
                    self.forget(*id);
                }
            }
        }
        if self.known.values().any(|k| k.waits() && k.request.conn.0 == conn) {
            self.violated(now, format!("connection {conn} was cancelled, but has requests queued"));
        }
        self.readiness(conn, true);
    }

    /// No bound holds across a change of readiness: what waits may have to be served in another order.
    pub(crate) fn readiness(&mut self, conn: u32, ready: bool) {
        if ready {
            self.not_ready.remove(&conn)
        } else {
            self.not_ready.insert(conn)
        };
        self.void_to = self.order;
    }

    /// Nothing is outstanding any more, as far as the laws saw.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty() && self.flying.is_empty() && self.writes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use impresario_sched::{Completion, Event, Extent, FileId, LaneId, Part};

    use super::*;

    fn request(op: Op, offset: u64) -> Request {
        let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: offset, lane_offset: offset, len: 100 };
        Request::new(op, extent)
    }

    fn watched(spec: &PolicySpec) -> (Core, Laws) {
        let config = CoreConfig::single_lane(100);
        let core = Core::new(config.clone(), spec).unwrap();
        let laws = Laws::new(&config, spec, &core);
        (core, laws)
    }

    #[test]
    fn a_core_that_keeps_them_is_not_accused() {
        let (mut core, mut laws) = watched(&PolicySpec::named("fifo").with("merge", "on"));
        for i in 0..20 {
            let r = request(if i % 3 == 0 { Op::Write } else { Op::Read }, i % 7 * 100);
            let id = core.push(Nanos(i), &r).unwrap();
            laws.pushed(i, &core, id, &r);
        }
        for now in 20.. {
            let said = core.next(Nanos(now));
            laws.said(now, &said);
            let Next::Dispatch(batch) = said else { break };
            core.event(Nanos(now), Event::Completed(Completion::of(&batch, Nanos(now), Nanos(now))));
            laws.completed(now, batch.id);
        }
        assert!(core.is_empty() && laws.is_empty());
        assert_eq!(laws.take_violations(), Vec::<String>::new());
    }

    /// What a broken core would say, told to the laws.
    #[test]
    fn each_breach_is_named() {
        let (mut core, mut laws) = watched(&PolicySpec::named("fifo"));
        let (first, second) = (request(Op::Write, 0), request(Op::Write, 50));
        let a = core.push(Nanos(0), &first).unwrap();
        laws.pushed(0, &core, a, &first);
        let b = core.push(Nanos(0), &second).unwrap();
        laws.pushed(0, &core, b, &second);
        let batch = |id, offset, from| Batch {
            id: BatchId(9),
            extent: Extent { lane_offset: offset, ..first.extent },
            op: Op::Write,
            parts: [Part { id, from, len: 100, lane_offset: offset }].into_iter().collect(),
        };
        let mut accused = |said: Next, what: &str| {
            laws.said(5, &said);
            let violations = laws.take_violations();
            assert!(violations.iter().any(|v| v.contains(what)), "{what}: {violations:?}");
        };
        accused(Next::Wait { until: Nanos(9), reason: WaitReason::Quantum }, "law 4");
        accused(Next::Wait { until: Nanos(5), reason: WaitReason::Quantum }, "which is past");
        accused(Next::Dispatch(batch(b, 50, 0)), "law 2");
        accused(Next::Dispatch(batch(a, 10, 10)), "law 1: dispatched twice or out of order");
        accused(Next::Dispatch(batch(a, 0, 0)), "law 1: dispatched twice");
        accused(Next::Dispatch(batch(a, 0, 0)), "no room");
        accused(Next::Dispatch(batch(RequestId(77), 0, 0)), "law 1: a request that is not outstanding");
    }
}
