//! The six laws of the core's contract, checked for every policy by one harness over random scripts.
//!
//! A new policy joins by a line in [`specs`]. A failure names its seed; `LAWS_SEED=n` replays that one alone,
//! `LAWS_SEEDS=n` runs more than the usual number.

use std::collections::{BTreeMap, BTreeSet};

use impresario_sched::{
    Cancelled, ClientId, Completion, ConnId, Core, CoreConfig, Event, Extent, FileId, JobId, LaneId, Nanos, Next, Op,
    PolicySpec, Request, RequestId, UserId, WaitReason,
};

/// (policy, number of lanes, may let a lane idle by its own rule)
fn specs() -> Vec<(PolicySpec, u16, bool)> {
    let p = PolicySpec::named;
    vec![
        (p("none"), 1, false),
        (p("none"), 3, false),
        (p("fifo"), 1, false),
        (p("fifo").with("merge", "on").with("batch_requests", 5), 3, false),
        (p("hbrr"), 1, false),
        (p("hbrr").with("quantum_requests", 3), 3, false),
        (p("mlf"), 1, false),
        (p("mlf").with("window_us", 0), 1, false),
        (p("mlf").with("batch_requests", 4).with("guard_batches", 2), 3, false),
        (p("mlf").with("growth", "double").with("quantum_bytes", 512), 1, false),
        (p("mlf").with("pass_us", 50), 2, true),
        (p("mlf").with("weights", "a: user=0 & op=read {weight=8}; b: op=write {weight=0.1}"), 1, false),
        (p("mlf").with("reads_ahead_requests", 100).with("batch_requests", 3), 2, false),
        (p("aioli").with("hold_us", 10), 1, true),
        (p("aioli").with("hold_us", 5).with("window_us", 0).with("quantum_bytes", 1024), 3, true),
        (p("stream"), 1, false),
        (p("stream").with("turn_bytes", 2048).with("piece_bytes", 1024).with("guard_batches", 7), 3, false),
        (p("scan"), 1, false),
        (p("scan").with("job_order", "free").with("guard_batches", 3).with("sieve", "off"), 2, false),
        (p("wscan").with("window_bytes", 8192), 1, false),
        (p("wscan").with("window_bytes", 0).with("piece_bytes", 512).with("guard_batches", 5), 2, false),
        (p("sstf"), 1, true),
        (p("sstf").with("patience_us", 5).with("job_order", "free").with("piece_bytes", 700), 2, true),
        (p("sstf").with("patience_us", 0).with("guard_batches", 4), 1, true),
        (p("to"), 1, false),
        (p("to"), 3, false),
        (p("to-agg"), 1, false),
        (p("to-agg").with("batch_requests", 4), 3, false),
        (p("sjf"), 1, false),
        (p("sjf").with("merge", "off").with("guard_batches", 3), 3, false),
        (p("sw").with("window_ms", 1), 1, false),
        (p("sw").with("guard_batches", 4).with("batch_requests", 3), 3, false),
        (p("wfq"), 1, false),
        (p("wfq").with("quantum_bytes", 1024).with("by", "file").with("merge", "on"), 3, false),
        (p("wfq").with("by", "client").with("rules", "a: op=read {quantum_bytes=700}; b: * {}"), 2, false),
        (p("twins").with("window_us", 20).with("in_flight_per_server", 1).with("merge", "on"), 4, true),
        (p("twins").with("window_us", 30).with("order_within", "offset").with("guard_batches", 3), 3, true),
        (p("twins").with("window_us", 25).with("merge", "on").with("work_conserving", "on"), 3, false),
        (
            p("twins")
                .with("window_us", 50)
                .with("order_within", "offset")
                .with("merge", "on")
                .with("anticipation_us", 9),
            3,
            true,
        ),
        (p("twins").with("window_us", 40).with("work_conserving", "on").with("anticipation_us", 30), 2, true),
        (p("twins").with("window_us", 40).with("work_conserving", "idle").with("anticipation_us", 30), 2, true),
        (p("twins").with("window_us", 20), 4, true),
        (p("twins").with("window_us", 35).with("order", "permutation"), 3, true),
        (p("crr"), 1, false),
        (p("crr").with("quantum_requests", 2).with("merge", "on").with("batch_requests", 3), 3, false),
        (p("orr"), 1, false),
        (p("orr").with("quantum_requests", 3).with("guard_batches", 2), 3, false),
        (p("deadline").with("read_expire_ms", 0), 1, false),
        (p("deadline").with("sweep_batches", 3).with("guard_batches", 5).with("batch_requests", 4), 3, false),
        (p("tbf"), 1, false),
        (p("tbf").with("rules", TBF_LIMITS), 1, true),
        (p("tbf").with("rules", TBF_LIMITS).with("merge", "on").with("batch_requests", 4), 3, true),
        (p("tbf").with("rules", TBF_SHARES).with("guard_batches", 5).with("merge", "on"), 3, false),
        (p("mclock"), 1, false),
        (p("mclock").with("rules", MCLOCK_LIMITS).with("guard_batches", 7), 2, true),
        (p("mclock").with("rules", MCLOCK_LIMITS).with("unit", "device").with("merge", "on"), 1, true),
        (p("mclock").with("rules", MCLOCK_SHARES).with("guard_batches", 4), 3, false),
        (p("set10").with("phase_gap_ms", 1), 1, false),
        (p("set10").with("rules", "a: job=1 {period_s=1000}").with("guard_batches", 6), 3, false),
        (p("lowest-yield-first").with("phase_gap_ms", 1), 1, false),
        (p("lowest-yield-first").with("measure", "bytes").with("guard_batches", 5).with("merge", "off"), 3, false),
    ]
}

/// Limits small enough to be met often within a script, large enough that it ends.
const TBF_LIMITS: &str = "w: op=write {requests_per_s=30000, burst=2}; f: file=1|2 {bytes_per_s=1e8, burst=8192, \
                          each=file, under=all}; j: job=1 {requests_per_s=40000, each=client, under=all}; \
                          t: file=0 {device=300, burst=0.02}; all: job=2 {device=500}";
const TBF_SHARES: &str = "w: op=write {requests_per_s=3000, borrow=on, under=all}; j: job=1|2 {bytes_per_s=1e6, each=job, \
                          borrow=on}; all: file=3 {device=0.1, borrow=on}";
const MCLOCK_LIMITS: &str = "a: job=1 {limit=40000, weight=3}; b: file=1 {reservation=10000, limit=30000}; \
                             c: * {reservation=50, each=client}";
const MCLOCK_SHARES: &str = "a: op=write {reservation=30000, each=job}; b: * {weight=0.01, each=client}";

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Waiting,
    InFlight,
    Done,
    Cancelled,
}

struct Known {
    request: Request,
    order: usize,
    fate: Fate,
    /// Bytes of it dispatched, from its start, and batches in flight that carry some.
    sent: u64,
    flying: u32,
    /// Batches dispatched, and idle time passed, since its bound was stated; the bound; void after a switch or hold.
    bound: Option<(u64, u64, impresario_sched::WaitBound)>,
}

struct Harness {
    core: Core,
    rng: Rng,
    now: Nanos,
    lanes: u16,
    shared_space: bool,
    lane_limit: u32,
    total_limit: u32,
    unlimited: bool,
    may_idle: bool,
    pieces: bool,
    /// Policies that have to do with connections serve those that are ready only.
    minds_connections: bool,
    not_ready: BTreeSet<ConnId>,
    known: BTreeMap<RequestId, Known>,
    flying: Vec<(impresario_sched::Batch, Nanos)>,
    holds: Vec<Nanos>,
    log: Vec<String>,
    pushed: usize,
}

fn conflict(a: &Request, b: &Request, shared_space: bool) -> bool {
    let same = a.extent.file == b.extent.file && (shared_space || a.extent.lane == b.extent.lane);
    let overlap = a.extent.lane_offset < b.extent.end() && b.extent.lane_offset < a.extent.end();
    let harmless = |x: Op, y: Op| matches!((x, y), (Op::Read | Op::Sync, Op::Read | Op::Sync));
    same && overlap && !harmless(a.op, b.op)
}

fn minds_connections(spec: &PolicySpec) -> bool {
    ["stream", "scan", "wscan", "sstf"].contains(&spec.name.as_str())
}

impl Harness {
    fn new(spec: &PolicySpec, lanes: u16, may_idle: bool, seed: u64) -> Harness {
        let mut rng = Rng(seed);
        let shared_space = lanes > 1 && rng.below(2) == 0;
        let lane_limit = 1 + rng.below(3) as u32;
        let total_limit = if rng.below(2) == 0 { u32::MAX } else { 2 };
        let pieces = rng.below(2) == 0;
        let config = CoreConfig {
            pieces,
            lanes,
            shared_space,
            lane_requests: lane_limit,
            total_requests: total_limit,
            node_rank: rng.below(9) as u32,
            ..CoreConfig::single_lane(64)
        };
        Harness {
            core: Core::new(config, spec).unwrap(),
            rng,
            now: Nanos(1_000),
            lanes,
            shared_space,
            lane_limit,
            total_limit,
            unlimited: spec.name == "none",
            may_idle,
            pieces,
            minds_connections: minds_connections(spec),
            not_ready: BTreeSet::new(),
            known: BTreeMap::new(),
            flying: Vec::new(),
            holds: vec![Nanos::ZERO; usize::from(lanes)],
            log: Vec::new(),
            pushed: 0,
        }
    }

    fn push(&mut self) {
        let op = match self.rng.below(20) {
            0 => Op::Sync,
            1 => Op::Truncate,
            2..8 => Op::Write,
            _ => Op::Read,
        };
        let lane = LaneId(self.rng.below(u64::from(self.lanes)) as u16);
        let offset = self.rng.below(40) * 1024;
        let extent = match op {
            Op::Sync => Extent { file: FileId(0), lane, file_offset: 0, lane_offset: 0, len: u64::MAX },
            Op::Truncate => Extent { file: FileId(0), lane, file_offset: offset, lane_offset: offset, len: u64::MAX },
            _ => {
                let len = [512, 1024, 1024, 1024, 4096][self.rng.below(5) as usize];
                Extent { file: FileId(0), lane, file_offset: offset, lane_offset: offset, len }
            }
        };
        let mut request = Request::new(op, Extent { file: FileId(self.rng.below(4) as u32), ..extent });
        request.arrival = self.now;
        request.conn = ConnId(self.rng.below(5) as u32);
        // Who asks follows from the connection: three clients of two users, each with one or two jobs.
        request.client = ClientId(request.conn.0 % 3);
        (request.job, request.user) = (JobId(request.conn.0 % 4), UserId(request.client.0 % 2));
        (request.job, request.client) = (JobId(self.pushed as u32 % 3), ClientId(self.pushed as u32 % 4));
        if self.core.room() == 0 {
            assert!(self.core.push(self.now, &request).is_err());
            return;
        }
        let id = self.core.push(self.now, &request).unwrap();
        request.id = id;
        assert_eq!(self.core.request(id), Some(request));
        // Holds are waits that somebody else stated; while one lasts no policy can promise anything.
        let held = self.holds.iter().any(|h| *h > self.now) || !self.not_ready.is_empty();
        let bound = self.core.wait_bound(self.now, id).filter(|_| !held).map(|b| (0, 0, b));
        let order = self.pushed;
        self.pushed += 1;
        let known = Known { request, order, fate: Fate::Waiting, sent: 0, flying: 0, bound };
        let old = self.known.insert(id, known);
        assert!(old.is_none_or(|k| matches!(k.fate, Fate::Done | Fate::Cancelled)), "an identity was given twice");
    }

    fn outstanding(&self) -> impl Iterator<Item = &Known> {
        self.known.values().filter(|k| matches!(k.fate, Fate::Waiting | Fate::InFlight))
    }

    /// Law 2: nothing older that conflicts is outstanding.
    fn is_blocked(&self, k: &Known) -> bool {
        self.outstanding().any(|o| o.order < k.order && conflict(&o.request, &k.request, self.shared_space))
    }

    /// Asks for dispatches until there is none.
    fn pump(&mut self) -> Nanos {
        loop {
            match self.core.next(self.now) {
                Next::Dispatch(batch) => self.dispatched(batch),
                Next::Wait { until, reason } => {
                    self.check_idling(until, reason);
                    return until;
                }
            }
        }
    }

    fn dispatched(&mut self, batch: impresario_sched::Batch) {
        assert!(!batch.parts.is_empty());
        let mut end = batch.extent.lane_offset;
        for part in &batch.parts {
            let k = &self.known[&part.id];
            assert_eq!(k.fate, Fate::Waiting, "law 1: dispatched once");
            assert!(!self.is_blocked(k), "law 2: a conflicting older request is outstanding");
            assert_eq!(
                (part.from, part.lane_offset),
                (k.sent, k.request.extent.lane_offset + k.sent),
                "law 1: in order"
            );
            let rest = k.request.extent.len - k.sent;
            assert!(part.len == rest || (self.pieces && part.len > 0 && part.len < rest && batch.parts.len() == 1));
            assert!(
                !self.minds_connections || self.ready(k) || !k.request.op.is_data(),
                "a connection that is not ready"
            );
            assert_eq!(k.request.extent.file, batch.extent.file);
            assert_eq!(k.request.op, batch.op);
            assert!(self.shared_space || k.request.extent.lane == batch.extent.lane);
            let touch = part.lane_offset <= end || part.lane_offset == batch.extent.lane_offset;
            assert!(
                touch || (self.minds_connections && batch.op == Op::Read),
                "parts touch, but where reads are sieved"
            );
            let part_end = if batch.op.is_data() { part.lane_offset + part.len } else { k.request.extent.end() };
            end = end.max(part_end);
        }
        assert!(batch.parts.windows(2).all(|w| w[0].lane_offset <= w[1].lane_offset), "offset order");
        if batch.op.is_data() {
            assert_eq!(end, batch.extent.end(), "the hull of the parts");
            for k in self.known.values_mut().filter(|k| k.fate == Fate::Waiting) {
                let mine = batch.parts.iter().any(|p| p.id == k.request.id);
                let same_lane = self.shared_space || k.request.extent.lane == batch.extent.lane;
                if let Some((batches, _, bound)) = &mut k.bound
                    && !mine
                    && same_lane
                {
                    *batches += 1;
                    assert!(*batches <= bound.batches, "law 3: {batches} batches before it, bound {bound:?}");
                }
            }
        }
        let lane = batch.extent.lane.index();
        assert!(self.holds[lane] <= self.now, "a held lane idles");
        let in_flight = self.flying.iter().filter(|f| f.0.extent.lane == batch.extent.lane).count() as u32;
        // After a switch, what is in flight may exceed the new policy's limit, but nothing is added then.
        assert!(self.unlimited || in_flight < self.lane_limit, "the lane's limit");
        for part in &batch.parts {
            let k = self.known.get_mut(&part.id).unwrap();
            k.sent += part.len;
            k.flying += 1;
            if k.sent == k.request.extent.len {
                k.fate = Fate::InFlight;
            }
        }
        self.log.push(format!("{} {:?} {:?}", self.now.0, batch.extent, batch.parts));
        self.flying.push((batch, self.now));
    }

    fn ready(&self, k: &Known) -> bool {
        !self.not_ready.contains(&k.request.conn)
    }

    /// Law 4: no lane idles while dispatchable work for it exists, except for a stated hold.
    fn check_idling(&self, until: Nanos, reason: WaitReason) {
        assert!(until > self.now, "waiting for the past would spin");
        let status = self.core.status();
        let total_open = self.unlimited || status.in_flight_batches < self.total_limit;
        for k in self.known.values().filter(|k| k.fate == Fate::Waiting) {
            let lane = k.request.extent.lane.index();
            let limit = status.lanes[lane].limit_batches.unwrap_or(u32::MAX);
            let open = total_open && status.lanes[lane].in_flight_batches < limit && self.holds[lane] <= self.now;
            if !open || self.is_blocked(k) || (self.minds_connections && !self.ready(k) && k.request.op.is_data()) {
                continue;
            }
            // With one space for all lanes a queue's first request decides which lane it waits for.
            let other_lane_blocks = self.shared_space
                && status.lanes.iter().enumerate().any(|(l, s)| {
                    s.in_flight_batches >= s.limit_batches.unwrap_or(u32::MAX) || self.holds[l] > self.now
                });
            let stated = self.may_idle
                && match reason {
                    WaitReason::Connection => !self.not_ready.is_empty(),
                    WaitReason::Window | WaitReason::Quantum | WaitReason::LanesBusy => until < Nanos::MAX,
                    WaitReason::Hold | WaitReason::Rate => until < Nanos::MAX,
                    WaitReason::Empty => false,
                };
            assert!(stated || other_lane_blocks, "law 4: idle with work ({reason:?} until {until:?}): {:?}", k.request);
        }
    }

    fn complete(&mut self) {
        if self.flying.is_empty() {
            return;
        }
        let at = self.rng.below(self.flying.len() as u64) as usize;
        let (batch, started) = self.flying.swap_remove(at);
        let mut completion = Completion::of(&batch, started, self.now);
        if self.rng.below(10) == 0 {
            (completion.errno, completion.bytes_done) = (5, 0);
        }
        self.core.event(self.now, Event::Completed(completion));
        self.core.event(self.now, Event::Completed(completion)); // reported twice: ignored
        for part in &batch.parts {
            let k = self.known.get_mut(&part.id).unwrap();
            k.flying -= 1;
            if k.flying == 0 && k.fate == Fate::InFlight {
                k.fate = Fate::Done;
            }
        }
    }

    fn advance(&mut self, by: Nanos) {
        self.now += by;
        let status = self.core.status();
        for k in self.known.values_mut().filter(|k| k.fate == Fate::Waiting) {
            let lane = &status.lanes[k.request.extent.lane.index()];
            let open = lane.in_flight_batches < lane.limit_batches.unwrap_or(u32::MAX) && status.in_flight_batches < 2;
            if let Some((_, idle, bound)) = &mut k.bound
                && open
                && !self.shared_space
            {
                *idle += by.0;
                // Time goes on in steps; a wait may be noticed one step late.
                assert!(*idle <= bound.idle.0 + 2 * by.0 + 200_000, "law 3: idle {idle} ns, bound {bound:?}");
            }
        }
    }

    fn cancel(&mut self) {
        let waiting: Vec<RequestId> =
            self.known.iter().filter(|(_, k)| k.fate == Fate::Waiting).map(|(id, _)| *id).collect();
        if !waiting.is_empty() {
            let id = waiting[self.rng.below(waiting.len() as u64) as usize];
            let k = self.known.get_mut(&id).unwrap();
            let (expected, then, fate) = match k.flying {
                0 => (Cancelled::Removed, Cancelled::Unknown, Fate::Cancelled),
                _ => (Cancelled::InFlight, Cancelled::InFlight, Fate::InFlight),
            };
            k.fate = fate;
            assert_eq!(self.core.cancel(self.now, id), expected);
            assert_eq!(self.core.cancel(self.now, id), then);
        }
        let whole = |b: &impresario_sched::Batch| self.known[&b.parts[0].id].fate == Fate::InFlight;
        if let Some((batch, _)) = self.flying.iter().find(|f| whole(&f.0)) {
            assert_eq!(self.core.cancel(self.now, batch.parts[0].id), Cancelled::InFlight);
        }
        if self.rng.below(8) == 0 {
            let conn = ConnId(self.rng.below(5) as u32);
            let mut gone = self.core.cancel_connection(self.now, conn);
            gone.sort();
            let mut mine = Vec::new();
            for k in self.known.values_mut().filter(|k| k.fate == Fate::Waiting && k.request.conn == conn) {
                k.fate = if k.flying == 0 { Fate::Cancelled } else { Fate::InFlight };
                mine.push(k.request.id);
            }
            mine.sort();
            assert_eq!(gone, mine);
            self.not_ready.remove(&conn);
        }
    }

    fn change_readiness(&mut self) {
        let conn = ConnId(self.rng.below(5) as u32);
        let ready = self.not_ready.remove(&conn);
        if !ready {
            self.not_ready.insert(conn);
        }
        self.core.event(self.now, Event::Ready { connection: conn, ready });
        self.void_bounds();
    }

    fn void_bounds(&mut self) {
        self.known.values_mut().for_each(|k| k.bound = None);
    }

    /// Lets everything outstanding finish; bounded by what there is.
    fn finish(&mut self) {
        for conn in std::mem::take(&mut self.not_ready) {
            self.core.event(self.now, Event::Ready { connection: conn, ready: true });
        }
        for _ in 0..100_000 {
            let until = self.pump();
            if self.core.is_empty() {
                break;
            }
            if self.flying.is_empty() {
                assert!(until < Nanos::MAX, "work is left and nothing would ever wake the scheduler");
                let by = until - self.now;
                self.advance(by);
            } else {
                self.advance(Nanos(3_000));
                self.complete();
            }
        }
        assert!(self.core.is_empty(), "everything ends");
        assert!(self.known.values().all(|k| matches!(k.fate, Fate::Done | Fate::Cancelled)), "law 1");
        assert!(matches!(self.core.next(self.now), Next::Wait { until: Nanos::MAX, reason: WaitReason::Empty }));
        let status = self.core.status();
        assert_eq!((status.queued, status.blocked, status.in_flight_batches), (0, 0, 0), "gauges are back at zero");
    }
}

fn seeds(default: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    match number("LAWS_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("LAWS_SEEDS").unwrap_or(default)).collect(),
    }
}

/// Names the seed when an assertion fails inside.
fn replayable<R>(what: &str, seed: u64, run: impl FnOnce() -> R) -> R {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
        .unwrap_or_else(|_| panic!("{what} failed; replay it with LAWS_SEED={seed}"))
}

fn script(spec: &PolicySpec, lanes: u16, may_idle: bool, seed: u64, switches: &[PolicySpec]) -> Vec<String> {
    let mut h = Harness::new(spec, lanes, may_idle || !switches.is_empty(), seed);
    for _ in 0..400 {
        match h.rng.below(10) {
            0..5 => h.push(),
            5..8 => h.complete(),
            8 => {
                let by = Nanos(h.rng.below(40_000));
                h.advance(by);
            }
            _ => match h.rng.below(6) {
                0 => {
                    let lane = h.rng.below(u64::from(lanes)) as u16;
                    let until = h.now + Nanos(h.rng.below(30_000));
                    h.core.hold(LaneId(lane), until);
                    h.holds[usize::from(lane)] = until;
                    h.void_bounds();
                }
                1 if !switches.is_empty() => {
                    let to = &switches[h.rng.below(switches.len() as u64) as usize];
                    h.core.reconfigure(h.now, to).unwrap();
                    h.unlimited = to.name == "none";
                    h.minds_connections = minds_connections(to);
                    h.void_bounds();
                }
                2 => h.change_readiness(),
                _ => h.cancel(),
            },
        }
        h.pump();
    }
    h.void_bounds();
    h.finish();
    h.log
}

#[test]
fn every_policy_keeps_the_laws() {
    for (spec, lanes, may_idle) in specs() {
        for seed in seeds(40) {
            replayable(&format!("{spec} on {lanes} lanes"), seed, || script(&spec, lanes, may_idle, seed, &[]));
        }
    }
}

/// Law 5.
#[test]
fn the_same_seed_gives_the_same_schedule() {
    for (spec, lanes, may_idle) in specs() {
        let run = || script(&spec, lanes, may_idle, 4711, &[]);
        let (first, second) = (run(), run());
        assert!(first.len() > 10 && first == second, "{spec}");
    }
}

/// Law 6: a live switch between any two policies loses and repeats nothing.
#[test]
fn live_switches_between_every_ordered_pair() {
    for (from, from_lanes, _) in specs() {
        for (to, to_lanes, _) in specs() {
            let lanes = from_lanes.max(to_lanes);
            for seed in seeds(1) {
                replayable(&format!("{from} → {to}"), seed, || {
                    script(&from, lanes, true, seed, std::slice::from_ref(&to))
                });
            }
        }
    }
}

#[test]
fn refusals_say_why_and_change_nothing() {
    let mut core = Core::new(CoreConfig::single_lane(8), &PolicySpec::named("fifo")).unwrap();
    let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 10 };
    let id = core.push(Nanos(0), &Request::new(Op::Read, extent)).unwrap();
    let p = PolicySpec::named;
    for (spec, says) in [
        (p("twins"), "one lane only"),
        (p("fastest"), "there is no policy \"fastest\"; there are: none, fifo, hbrr, mlf, "),
        (p("mlf").with("quantum", 1), "no parameter \"quantum\"; it has: quantum_bytes"),
        (p("mlf").with("quantum_bytes", 0), "\"0\" is not a whole number from 512"),
        (p("fifo").with("merge", "maybe"), "\"maybe\" is not one of on, off"),
    ] {
        let error = core.reconfigure(Nanos(1), &spec).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(core.status().policy.name, "fifo");
    }
    let Next::Dispatch(batch) = core.next(Nanos(2)) else { panic!() };
    assert_eq!(batch.parts[0].id, id);
}
