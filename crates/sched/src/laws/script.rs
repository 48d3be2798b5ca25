//! Random scripts for every policy: requests, completions, cancellations, holds and switches. To add a policy, add a
//! line to [`specs`].

use std::sync::Arc;

use impresario_base::random::Random;
use impresario_foresight::{PredictedQueues, Recorded, part_key};

use super::*;
use crate::{Cancelled, ClientId, Completion, ConnId, Event, Extent, JobId, Members, UserId};

/// (policy, number of lanes)
pub(super) fn specs() -> Vec<(PolicySpec, u16)> {
    let p = PolicySpec::named;
    vec![
        (p("auto"), 1),
        (p("auto").with("table", AUTO_TABLE), 1),
        (p("auto").with("table", AUTO_TABLE).with("objective", "share"), 3),
        (p("none"), 1),
        (p("none"), 3),
        (p("fifo"), 1),
        (p("fifo").with("merge", "on").with("batch_requests", 5), 3),
        (p("hbrr"), 1),
        (p("hbrr").with("quantum_requests", 3), 3),
        (p("mlf"), 1),
        (p("mlf").with("window_us", 0), 1),
        (p("mlf").with("batch_requests", 4).with("guard_batches", 2), 3),
        (p("mlf").with("growth", "double").with("quantum_bytes", 512), 1),
        (p("mlf").with("pass_us", 50), 2),
        (p("mlf").with("dwell_us", 40).with("batch_requests", 2), 1),
        (p("mlf").with("weights", "a: user=0 & op=read {weight=8}; b: op=write {weight=0.1}"), 1),
        (p("mlf").with("reads_ahead_requests", 100).with("batch_requests", 3), 2),
        (
            p("mlf").with("adapt", "on").with("weights", "a: user=0 {weight=5}; b: * {weight=0.2}").with("pass_us", 20),
            2,
        ),
        (p("aioli").with("hold_us", 10), 1),
        (p("aioli").with("hold_us", 5).with("window_us", 0).with("quantum_bytes", 1024), 3),
        (p("agios"), 1),
        (p("agios").with("wait_us", 30).with("batch_requests", 4).with("pass_us", 10), 3),
        (p("agios-causal"), 1),
        (p("agios-causal").with("wait_us", 20).with("window_us", 200).with("guard_batches", 3), 3),
        (p("stream"), 1),
        (p("stream").with("turn_bytes", 2048).with("piece_bytes", 1024).with("guard_batches", 7), 3),
        (p("scan"), 1),
        (p("scan").with("job_order", "free").with("guard_batches", 3).with("sieve", "off"), 2),
        (p("wscan").with("window_bytes", 8192), 1),
        (p("wscan").with("window_bytes", 0).with("piece_bytes", 512).with("guard_batches", 5), 2),
        (p("sstf"), 1),
        (p("sstf").with("patience_us", 5).with("job_order", "free").with("piece_bytes", 700), 2),
        (p("sstf").with("patience_us", 0).with("guard_batches", 4), 1),
        (p("to"), 1),
        (p("to"), 3),
        (p("to-agg"), 1),
        (p("to-agg").with("batch_requests", 4), 3),
        (p("sjf"), 1),
        (p("sjf").with("merge", "off").with("guard_batches", 3), 3),
        (p("srtf"), 1),
        (p("srtf").with("merge", "off").with("guard_batches", 3), 3),
        (p("sw").with("window_ms", 1), 1),
        (p("sw").with("guard_batches", 4).with("batch_requests", 3), 3),
        (p("sw").with("window_ms", 1).with("order_within", "arrival").with("merge", "off").with("guard_batches", 4), 1),
        (p("sw").with("order_within", "arrival").with("guard_batches", 3).with("batch_requests", 3), 3),
        (p("wfq"), 1),
        (p("wfq").with("quantum_bytes", 1024).with("by", "file").with("merge", "on"), 3),
        (p("wfq").with("by", "client").with("rules", "a: op=read {quantum_bytes=700}; b: * {}"), 2),
        (p("twins").with("window_us", 20).with("in_flight_per_server", 1).with("merge", "on"), 4),
        (p("twins").with("window_us", 30).with("order_within", "offset").with("guard_batches", 3), 3),
        (p("twins").with("window_us", 25).with("merge", "on").with("work_conserving", "on"), 3),
        (
            p("twins")
                .with("window_us", 50)
                .with("order_within", "offset")
                .with("merge", "on")
                .with("anticipation_us", 9),
            3,
        ),
        (p("twins").with("window_us", 40).with("work_conserving", "on").with("anticipation_us", 30), 2),
        (p("twins").with("window_us", 40).with("work_conserving", "idle").with("anticipation_us", 30), 2),
        (p("twins").with("window_us", 20), 4),
        (p("twins").with("window_us", 35).with("order", "permutation"), 3),
        (p("twins").with("window_us", 30).with("order", "permutation").with("timer", "local"), 3),
        (p("crr"), 1),
        (p("crr").with("quantum_requests", 2).with("merge", "on").with("batch_requests", 3), 3),
        (p("orr"), 1),
        (p("orr").with("quantum_requests", 3).with("guard_batches", 2), 3),
        (p("deadline").with("read_expire_ms", 0), 1),
        (p("deadline").with("sweep_batches", 3).with("guard_batches", 5).with("batch_requests", 4), 3),
        (p("tbf"), 1),
        (p("tbf").with("rules", TBF_LIMITS), 1),
        (p("tbf").with("rules", TBF_LIMITS).with("merge", "on").with("batch_requests", 4), 3),
        (p("tbf").with("rules", TBF_SHARES).with("guard_batches", 5).with("merge", "on"), 3),
        (p("mclock"), 1),
        (p("mclock").with("rules", MCLOCK_LIMITS).with("guard_batches", 7), 2),
        (p("mclock").with("rules", MCLOCK_LIMITS).with("unit", "device").with("merge", "on"), 1),
        (p("mclock").with("rules", MCLOCK_SHARES).with("guard_batches", 4), 3),
        (p("set10").with("phase_gap_ms", 1), 1),
        (p("set10").with("rules", "a: job=1 {period_s=1000}").with("guard_batches", 6), 3),
        (p("lowest-yield-first").with("phase_gap_ms", 1), 1),
        (p("lowest-yield-first").with("measure", "bytes").with("guard_batches", 5).with("merge", "off"), 3),
    ]
}

/// Many different rules, so that every observation window may cause a switch.
pub(super) const AUTO_TABLE: &str = r#"
version = 1
[[rule]]
name = "few reads"
reads = { below = 0.66 }
choice = [{ policy = "none", share = -1.0 }, { policy = "aioli hold_us=20", depth = 1, makespan = -1.0, read_ahead = false }]
[[rule]]
name = "near"
distance_bytes = { below = 9000.0 }
choice = [{ policy = "wscan window_bytes=8192" }]
[[rule]]
name = "small"
request_bytes = { below = 1500.0 }
choice = [{ policy = "sw window_ms=1 guard_batches=4" }]
[[rule]]
name = "touching"
touching = { from = 0.15 }
choice = [{ policy = "sstf patience_us=5 guard_batches=4" }]
[[rule]]
name = "the rest"
choice = [{ policy = "mlf guard_batches=2" }]
"#;

/// Limits low enough to be reached often within a script, high enough that it ends.
const TBF_LIMITS: &str = "w: op=write {requests_per_s=30000, burst=2}; f: file=1|2 {bytes_per_s=1e8, burst=8192, \
                          each=file, under=all}; j: job=1 {requests_per_s=40000, each=client, under=all}; \
                          t: file=0 {device=300, burst=0.02}; all: job=2 {device=500}";
const TBF_SHARES: &str = "w: op=write {requests_per_s=3000, borrow=on, under=all}; j: job=1|2 {bytes_per_s=1e6, each=job, \
                          borrow=on}; all: file=3 {device=0.1, borrow=on}";
pub(super) const MCLOCK_LIMITS: &str = "a: job=1 {limit=40000, weight=3}; b: file=1 {reservation=10000, limit=30000}; \
                             c: * {reservation=50, each=client}";
const MCLOCK_SHARES: &str = "a: op=write {reservation=30000, each=job}; b: * {weight=0.01, each=client}";

/// Which requests a script generates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Load {
    /// A random mix.
    Mixed,
    /// One endlessly ascending stream beside a few others: what starves requests that offset order leaves behind.
    Ascending,
    /// The same at the lowest offsets.
    Low,
    /// The ascending stream alone.
    LowAlone,
    /// Only requests that the stream leaves behind.
    Victims,
    /// Mostly processes that each read a part of a file of their own, over and over.
    Parts,
}

/// Processes that read parts of files, of which file and where, and the length of a part and of a request.
const READERS: u64 = 6;
const PART_BYTES: u64 = 128 << 10;
const PART_REQUEST_BYTES: u64 = 4 << 10;

fn part_of(reader: u64) -> (u32, u64) {
    ((reader % 2) as u32, reader / 2 * PART_BYTES)
}

/// A recorded run of such processes.
fn recorded_parts() -> Arc<PredictedQueues> {
    let request = |nth: u64| {
        let (reader, step) = (nth % READERS, nth / READERS);
        let ((file, start), arrival_ns) = (part_of(reader), step * 100_000 + reader);
        Recorded {
            file: part_key(file.into(), 0),
            write: false,
            offset: start + step * PART_REQUEST_BYTES,
            len: PART_REQUEST_BYTES,
            arrival_ns,
            completed_ns: Some(arrival_ns + 50_000),
            source: reader as u32,
        }
    };
    Arc::new(PredictedQueues::new((0..READERS * (PART_BYTES / PART_REQUEST_BYTES)).map(request)))
}

/// A recorded run similar to the scripts, for policies that use one.
fn recorded_run(rng: &mut Random) -> Arc<PredictedQueues> {
    let request = |_| {
        let arrival_ns = rng.below(1_000_000);
        Recorded {
            file: part_key(rng.below(4), rng.below(2) as u16),
            write: rng.below(3) == 0,
            offset: rng.below(60) * 1024,
            len: [512, 1024, 1024, 1024, 4096][rng.below(5) as usize],
            arrival_ns,
            completed_ns: (rng.below(8) > 0).then(|| arrival_ns + rng.below(100_000)),
            source: rng.below(4) as u32,
        }
    };
    Arc::new(PredictedQueues::new((0..400).map(request)))
}

pub(super) struct Script {
    pub(super) core: Core,
    pub(super) laws: Laws,
    pub(super) rng: Random,
    pub(super) now: Nanos,
    pub(super) lanes: u16,
    pub(super) load: Load,
    pub(super) flying: Vec<(Batch, Nanos)>,
    /// Some requests pass scheduling by.
    pub(super) lets_pass: bool,
    /// Those that do, and their lengths.
    pub(super) passing: Vec<(RequestId, u64)>,
    /// Speculations are long and of one file.
    pub(super) long_ahead: bool,
    /// One request of three is a sync.
    pub(super) syncs: bool,
    pub(super) log: Vec<String>,
    pub(super) pushed: u64,
    /// Requests of each process that reads a part.
    pub(super) steps: [u64; READERS as usize],
    /// Waits for something that should come although work is queued.
    pub(super) holds: u64,
}

impl Script {
    /// Processes that each read a part of a file of their own, as in the recorded run, from a server that takes one batch
    /// at a time.
    pub(super) fn in_parts(spec: &PolicySpec, seed: u64) -> Script {
        let config = CoreConfig {
            lane_requests: 1,
            pieces: seed.is_multiple_of(2),
            started: Nanos(seed.wrapping_mul(7919) & 0xffff_ffff),
            ..CoreConfig::single_lane(64)
        };
        let mut core = Core::new(config.clone(), spec).unwrap();
        core.foresee(Some(recorded_parts()));
        Script { load: Load::Parts, ..Script::on(core, &config, Random::new(seed)) }
    }

    pub(super) fn new(spec: &PolicySpec, lanes: u16, seed: u64) -> Script {
        let mut rng = Random::new(seed);
        let config = CoreConfig {
            shared_space: lanes > 1 && rng.below(2) == 0,
            pieces: rng.below(2) == 0,
            lanes,
            lane_requests: 1 + rng.below(3) as u32,
            total_requests: if rng.below(2) == 0 { u32::MAX } else { 2 },
            node_rank: rng.below(9) as u32,
            started: Nanos(seed.wrapping_mul(7919) & 0xffff_ffff),
            lane_speculations: rng.below(3) as u32,
            ..CoreConfig::single_lane(64)
        };
        let mut core = Core::new(config.clone(), spec).unwrap();
        core.foresee(Some(recorded_run(&mut Random::new(seed ^ 0xa610))));
        Script::on(core, &config, rng)
    }

    pub(super) fn on(core: Core, config: &CoreConfig, rng: Random) -> Script {
        let laws = Laws::new(config, &core);
        let (lanes, now) = (config.lanes, Nanos(1_000));
        let (flying, passing, log) = Default::default();
        let (load, lets_pass, long_ahead, syncs) = (Load::Mixed, true, false, false);
        let (steps, pushed, holds) = Default::default();
        Script {
            core,
            laws,
            rng,
            now,
            lanes,
            load,
            flying,
            lets_pass,
            long_ahead,
            syncs,
            passing,
            log,
            pushed,
            steps,
            holds,
        }
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.rng.below(n)
    }

    /// Generates a request; the load decides operation, file, offset, length and connection.
    pub(super) fn request(&mut self) -> Request {
        let lane = LaneId(self.below(u64::from(self.lanes)) as u16);
        let streams = match self.load {
            Load::Victims | Load::LowAlone => true,
            Load::Mixed => false,
            Load::Ascending | Load::Low | Load::Parts => self.below(8) > 0,
        };
        let (op, file, offset, len) = if streams && self.load == Load::Parts {
            let reader = self.below(READERS);
            let (file, start) = part_of(reader);
            let step = &mut self.steps[reader as usize];
            let offset = *step * PART_REQUEST_BYTES % PART_BYTES;
            *step += 1;
            (Op::Read, file, start + offset, PART_REQUEST_BYTES)
        } else if streams {
            let offset = match self.load {
                Load::Victims => 20 + 2 * self.pushed,
                Load::Low | Load::LowAlone => self.pushed % 3,
                _ => 50 + 2 * self.pushed,
            };
            (Op::Read, 3, offset * 1024, 512)
        } else {
            let op = match self.below(20) {
                0..7 if self.syncs => Op::Sync,
                0 => Op::Sync,
                1 => Op::Truncate,
                2..8 => Op::Write,
                _ => Op::Read,
            };
            let len = [512, 1024, 1024, 1024, 4096][self.below(5) as usize];
            (op, self.below(4) as u32, self.below(40) * 1024, len)
        };
        let (offset, len) = match op {
            Op::Sync => (0, u64::MAX),
            Op::Truncate => (offset, u64::MAX),
            _ => (offset, len),
        };
        let extent = Extent { file: FileId(file), lane, file_offset: offset, lane_offset: offset, len };
        // The connection decides the identities: four clients of two users, each with one or two jobs; the stream has
        // its own.
        let conn = match self.load {
            Load::Victims => 0,
            _ if streams => 5,
            _ => self.below(5) as u32,
        };
        Request {
            arrival: self.now,
            conn: ConnId(conn),
            client: ClientId(conn % 4),
            job: JobId(conn % 3),
            user: UserId(conn % 2),
            ..Request::new(op, extent)
        }
    }

    pub(super) fn push(&mut self) {
        let mut request = self.request();
        self.pushed += 1;
        if self.core.room() == 0 {
            assert!(self.core.push(self.now, &request).is_err());
            return;
        }
        let id = self.core.push(self.now, &request).unwrap();
        request.id = id;
        assert_eq!(self.core.request(id), Some(request));
        self.laws.pushed(self.now.0, &self.core, id, &request);
    }

    /// Lets a request pass, if it may; or ends one that does, or has the rest of it scheduled.
    pub(super) fn pass(&mut self) {
        if self.passing.len() < 3 && self.below(2) == 0 {
            let mut request = self.request();
            if let Some(id) = self.core.pass(&request) {
                request.id = id;
                self.laws.passes(self.now.0, &self.core, id, &request);
                self.passing.push((id, request.extent.len));
            }
            return;
        }
        let end = self.below(4);
        self.end_pass(end);
    }

    fn end_pass(&mut self, how: u64) {
        let Some((id, len)) = self.passing.pop() else { return };
        let served = 1 + self.below(len);
        if how == 0 && served < len {
            assert!(self.core.schedule_rest(self.now, id, served));
            assert!(!self.core.schedule_rest(self.now, id, served), "it passes no more");
            return self.laws.passed(self.now.0, &self.core, id, Some(served));
        }
        self.core.passed(self.now, id, how == 1);
        self.core.passed(self.now, id, true); // ended twice: ignored
        self.laws.passed(self.now.0, &self.core, id, None);
    }

    /// Generates a speculation: often one that continues or overlaps a waiting request.
    pub(super) fn speculate(&mut self) {
        let mut request = self.request();
        let known: Vec<Extent> = self.laws.known.values().map(|k| k.request.extent).collect();
        if !known.is_empty() && self.below(2) == 0 {
            let near = known[self.below(known.len() as u64) as usize];
            let start = near.end().saturating_sub(self.below(3) * 512).min(1 << 40);
            request.extent = Extent { file_offset: start, lane_offset: start, len: 1 + self.below(8192), ..near };
        }
        if self.long_ahead {
            request.extent = Extent { file: FileId(0), len: 1 + self.below(4 << 20), ..request.extent };
        }
        if let Some(id) = self.core.speculate(&request) {
            self.laws.speculated(self.now.0, id, &request);
        }
    }

    fn forget_given_up(&mut self) {
        while let Some(id) = self.core.take_given_up() {
            self.laws.given_up(self.now.0, id);
        }
    }

    /// Takes dispatches until there are none; returns until when.
    pub(super) fn pump(&mut self) -> Nanos {
        loop {
            self.forget_given_up();
            let next = self.core.next(self.now);
            self.laws.decided(self.now.0, &self.core, &next);
            match next {
                Next::Dispatch(batch) => {
                    assert!(!batch.parts.is_empty());
                    self.log.push(format!("{} {:?} {:?}", self.now.0, batch.extent, batch.parts));
                    self.flying.push((batch, self.now));
                }
                Next::Wait { until, reason } => {
                    self.holds += u64::from(reason == WaitReason::Hold);
                    return until;
                }
            }
        }
    }

    pub(super) fn complete(&mut self) {
        if self.flying.is_empty() {
            return;
        }
        let at = self.below(self.flying.len() as u64) as usize;
        let (batch, started) = self.flying.swap_remove(at);
        let mut completion = Completion::of(&batch, started, self.now);
        if self.below(10) == 0 {
            (completion.errno, completion.bytes_done) = (5, 0);
        }
        self.core.event(self.now, Event::Completed(completion));
        self.core.event(self.now, Event::Completed(completion)); // reported twice: ignored
        self.laws.completed(self.now.0, batch.id);
    }

    /// Advances time, but not past the core's next wake-up.
    pub(super) fn advance(&mut self, by: u64) {
        let due = self.laws.due.saturating_sub(self.now.0).max(1);
        self.now += Nanos(by.min(due));
    }

    pub(super) fn cancel(&mut self) {
        // Nobody is told the identity of a request that passes.
        let passes = |id: &RequestId| self.passing.iter().any(|(passing, _)| passing == id);
        let known: Vec<RequestId> = self.laws.known.keys().copied().filter(|id| !passes(id)).collect();
        if !known.is_empty() {
            let id = known[self.below(known.len() as u64) as usize];
            let k = &self.laws.known[&id];
            let expected = if k.flying == 0 { Cancelled::Removed } else { Cancelled::InFlight };
            let then = if k.flying == 0 { Cancelled::Unknown } else { Cancelled::InFlight };
            assert_eq!(self.core.cancel(self.now, id), expected);
            assert_eq!(self.core.cancel(self.now, id), then);
            self.laws.cancelled(self.now.0, &[id]);
        }
        if self.below(8) == 0 {
            let conn = self.below(5) as u32;
            let mut gone = self.core.cancel_connection(self.now, ConnId(conn));
            gone.sort();
            let mine = self.laws.known.iter().filter(|(_, k)| k.waits() && k.request.conn.0 == conn);
            assert_eq!(gone, mine.map(|(id, _)| *id).collect::<Vec<_>>());
            self.laws.disconnected(self.now.0, conn, &gone);
        }
    }

    pub(super) fn change_readiness(&mut self) {
        let conn = self.below(5) as u32;
        let ready = self.laws.not_ready.contains(&conn);
        self.be_ready(conn, ready);
    }

    pub(super) fn be_ready(&mut self, conn: u32, ready: bool) {
        self.core.event(self.now, Event::Ready { connection: ConnId(conn), ready });
        self.laws.readiness(self.now.0, conn, ready);
    }

    /// Other nodes or lanes are there, now or soon.
    pub(super) fn change_members(&mut self) {
        let from_shared = self.now + Nanos(self.below(3).saturating_sub(1) * self.below(60_000));
        let lanes = self.lanes;
        let absent = (0..lanes).map(LaneId).filter(|_| self.below(3) == 0).collect();
        let members = Members { from_shared, rank: self.below(9) as u32, absent };
        self.core.event(self.now, Event::Members(members));
        self.laws.members(self.now.0, from_shared.0);
    }

    pub(super) fn hold(&mut self) {
        let lane = LaneId(self.below(u64::from(self.lanes)) as u16);
        let until = self.now + Nanos(self.below(30_000));
        self.core.hold(lane, until);
        self.laws.held(self.now, lane, until);
    }

    pub(super) fn switch(&mut self, to: &PolicySpec) {
        self.core.reconfigure(self.now, to).unwrap();
        self.forget_given_up();
        self.laws.switched(self.now.0, &self.core);
    }

    /// One step. Devices barely keep up.
    pub(super) fn step(&mut self, switches: &[PolicySpec]) {
        match self.below(11) {
            0..5 => self.push(),
            5..8 => self.complete(),
            8 => self.speculate(),
            9 => {
                let by = self.below(40_000);
                self.advance(by);
            }
            _ => match self.below(6) {
                0 => self.hold(),
                1 if !switches.is_empty() => {
                    let to = &switches[self.below(switches.len() as u64) as usize];
                    self.switch(to);
                }
                2 => self.change_readiness(),
                3 if self.lets_pass => self.pass(),
                _ => self.cancel(),
            },
        }
        self.pump();
    }

    /// Steps of pushes and completions only, under a constant load.
    pub(super) fn flood(&mut self, loads: &[(Load, u32)]) {
        for (load, steps) in loads {
            self.load = *load;
            for _ in 0..*steps {
                (0..2).for_each(|_| self.push());
                self.pump();
                // The first requests all arrive before the first completion.
                if self.pushed > 8 {
                    self.advance(1_000);
                    self.complete();
                    self.pump();
                }
            }
        }
    }

    /// Lets all outstanding requests finish; bounded by their number.
    pub(super) fn finish(&mut self) {
        for conn in 0..6 {
            self.be_ready(conn, true);
        }
        while !self.passing.is_empty() {
            self.end_pass(0);
        }
        for _ in 0..200_000 {
            let until = self.pump();
            if self.core.is_empty() {
                break;
            }
            if self.flying.is_empty() {
                assert!(until < Nanos::MAX, "work is left and nothing would ever wake the scheduler");
                self.advance(u64::MAX);
            } else {
                self.advance(3_000);
                self.complete();
            }
        }
        assert!(self.core.is_empty() && self.laws.is_empty(), "everything ends");
        assert!(matches!(self.core.next(self.now), Next::Wait { until: Nanos::MAX, reason: WaitReason::Empty }));
        let status = self.core.status();
        assert_eq!((status.queued, status.blocked, status.in_flight_batches), (0, 0, 0), "gauges are back at zero");
    }

    /// So many steps, and an end; gives what was dispatched.
    pub(super) fn run(mut self, load: Load, steps: u32, switches: &[PolicySpec]) -> Vec<String> {
        for step in 0..steps {
            // First the requests that streams will starve.
            self.load = if step > 40 { load } else { Load::Mixed };
            self.step(switches);
        }
        self.finish();
        self.judge();
        self.log
    }

    pub(super) fn judge(&mut self) {
        assert_eq!(self.laws.take_violations(), Vec::<String>::new());
    }
}

pub(super) fn seeds(default: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    match number("LAWS_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("LAWS_SEEDS").unwrap_or(default)).collect(),
    }
}

/// Prints the seed if an assertion inside fails.
pub(super) fn replayable<R>(what: &str, seed: u64, run: impl FnOnce() -> R) -> R {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
        .unwrap_or_else(|_| panic!("{what} failed; replay it with LAWS_SEED={seed}"))
}

pub(super) fn run(
    spec: &PolicySpec,
    lanes: u16,
    seed: u64,
    load: Load,
    steps: u32,
    switches: &[PolicySpec],
) -> Vec<String> {
    Script::new(spec, lanes, seed).run(load, steps, switches)
}
