//! The rules of the policies from production and research, worked by hand.

use impresario_sched::{
    ClientId, Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, JobId, LaneId, LinearCost, Nanos, Next,
    Op, PolicySpec, Request, Who,
};

const fn ms(ms: u64) -> Nanos {
    Nanos::from_millis(ms)
}

/// A core whose TTP is 10 ms and 1 ms per KiB, one batch in flight per lane, and a device that takes what it is told.
struct Bench {
    core: Core,
    now: Nanos,
    service: Nanos,
    next_offset: u64,
}

/// What was sent: when, for which job, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sent {
    at: Nanos,
    job: u32,
    file: u32,
    offset_kib: u64,
    requests: usize,
    op: Op,
}

impl Bench {
    fn new(spec: PolicySpec, service: Nanos) -> Bench {
        let linear = LinearCost { fixed: ms(10), ps_per_byte: 1_000_000_000_u64.div_ceil(1024) };
        let cost = CostModel::new(linear, linear);
        let core = Core::new(CoreConfig { cost, ..CoreConfig::single_lane(4096) }, &spec).unwrap();
        Bench { core, now: Nanos::ZERO, service, next_offset: 0 }
    }

    fn push(&mut self, op: Op, file: u32, offset_kib: u64, who: u32) {
        let lane_offset = offset_kib << 10;
        let extent =
            Extent { file: FileId(file), lane: LaneId(0), file_offset: lane_offset, lane_offset, len: 8 << 10 };
        let mut request = Request::new(op, extent);
        (request.job, request.client, request.arrival) = (JobId(who), ClientId(who), self.now);
        self.core.push(self.now, &request).unwrap();
    }

    /// Reads of 8 KiB that touch nothing, of the jobs (which are clients and files too) given.
    fn reads(&mut self, jobs: &[u32]) {
        for &job in jobs {
            self.push(Op::Read, job, self.next_offset, job);
            self.next_offset += 16;
        }
    }

    /// Sends until `end`, or until nothing is left; time ends with the last completion, or at `end`.
    fn run_until(&mut self, end: Nanos) -> Vec<Sent> {
        let mut sent = Vec::new();
        while self.now < end {
            match self.core.next(self.now) {
                Next::Dispatch(batch) => {
                    let request = self.core.request(batch.parts[0].id).unwrap();
                    sent.push(Sent {
                        at: self.now,
                        job: request.job.0,
                        file: batch.extent.file.0,
                        offset_kib: batch.extent.lane_offset >> 10,
                        requests: batch.parts.len(),
                        op: batch.op,
                    });
                    let finished = self.now + self.service;
                    self.core.event(finished, Event::Completed(Completion::of(&batch, self.now, finished)));
                    self.now = finished;
                }
                Next::Wait { until: Nanos::MAX, .. } => break,
                Next::Wait { until, .. } => self.now = until.min(end),
            }
        }
        sent
    }

    fn run(&mut self) -> Vec<Sent> {
        self.run_until(Nanos::MAX)
    }

    fn explain(&self, job: u64) -> String {
        self.core.explain(&Who { job, user: 0, client: job, file: job, op: Op::Read }).unwrap()
    }
}

fn jobs(sent: &[Sent]) -> Vec<u32> {
    sent.iter().map(|s| s.job).collect()
}

fn times_ms(sent: &[Sent], job: u32) -> Vec<u64> {
    sent.iter().filter(|s| s.job == job).map(|s| s.at.0 / 1_000_000).collect()
}

fn count(sent: &[Sent], job: u32) -> usize {
    sent.iter().filter(|s| s.job == job).count()
}

#[test]
fn crr_goes_round_the_clients_by_quanta() {
    let mut bench = Bench::new(PolicySpec::named("crr").with("quantum_requests", 2), ms(1));
    bench.reads(&[1, 1, 1, 2, 3, 1, 2, 2]);
    assert_eq!(jobs(&bench.run()), [1, 1, 2, 2, 3, 1, 1, 2]);
    // Two connections of one client share its turn.
    bench.core.names_mut().name_client(ClientId(8), 7);
    bench.reads(&[7, 8, 9, 7, 8, 9]);
    assert_eq!(jobs(&bench.run()), [7, 8, 9, 9, 7, 8]);
}

#[test]
fn orr_sweeps_over_an_object_across_its_turns() {
    let mut bench = Bench::new(PolicySpec::named("orr").with("quantum_requests", 2), ms(1));
    for (file, offset) in [(1, 40), (1, 8), (1, 24), (2, 0), (1, 60), (2, 16)] {
        bench.push(Op::Read, file, offset, 0);
    }
    let order = |sent: Vec<Sent>| sent.iter().map(|s| (s.file, s.offset_kib, s.requests)).collect::<Vec<_>>();
    let (mut first, turn) = (bench.run_until(ms(2)), [(1, 8, 1), (1, 24, 1)]);
    assert_eq!(order(std::mem::take(&mut first)), turn);
    // 0 is behind the sweep, which goes on at 32 and wraps after 60.
    bench.push(Op::Read, 1, 0, 0);
    assert_eq!(order(bench.run()), [(2, 0, 1), (2, 16, 1), (1, 40, 1), (1, 60, 1), (1, 0, 1)]);
    // Touching ones go as one; a write has a queue of its own.
    for (op, offset) in [(Op::Read, 16), (Op::Write, 100), (Op::Read, 8), (Op::Read, 0)] {
        bench.push(op, 5, offset, 0);
    }
    assert_eq!(order(bench.run()), [(5, 0, 2), (5, 100, 1), (5, 16, 1)], "the quantum of 2 cuts the run");
}

/// Sweeps of two batches; two sweeps of reads may go before waiting writes. A read of an expired sweep starts it.
#[test]
fn deadline_sweeps_reads_before_writes() {
    let spec = PolicySpec::named("deadline").with("sweep_batches", 2).with("read_expire_ms", 5);
    let mut bench = Bench::new(spec, ms(1));
    for (op, file, offset) in [
        (Op::Write, 1, 500),
        (Op::Write, 1, 300),
        (Op::Read, 2, 0),
        (Op::Read, 1, 90),
        (Op::Read, 1, 70),
        (Op::Read, 1, 50),
        (Op::Read, 1, 30),
        (Op::Read, 1, 10),
        (Op::Read, 1, 11 + 7),
    ] {
        bench.push(op, file, offset, 0);
    }
    let order: Vec<_> = bench.run().iter().map(|s| (s.op, s.file, s.offset_kib, s.requests)).collect();
    let (r, w) = (Op::Read, Op::Write);
    assert_eq!(
        order,
        [
            // A sweep, in order of offsets; 10 and 18 touch.
            (r, 1, 10, 2),
            (r, 1, 30, 1),
            // The second goes on where that one stopped; then it is the writes' turn.
            (r, 1, 50, 1),
            (r, 1, 70, 1),
            (w, 1, 300, 1),
            (w, 1, 500, 1),
            // 6 ms have gone: the oldest read, of file 2, has expired and starts the sweep, which ends there; the next
            // one starts with what is then the oldest.
            (r, 2, 0, 1),
            (r, 1, 90, 1),
        ]
    );
}

/// 100 requests a second and a burst of three: three at once, then one each 10 ms. Others are not limited.
#[test]
fn tbf_limits_by_rate_and_burst() {
    let rules = "slow: job=1 {requests_per_s=100}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), ms(1));
    bench.reads(&[1, 1, 1, 1, 1, 2, 2]);
    let sent = bench.run();
    assert_eq!(times_ms(&sent, 1), [0, 1, 2, 10, 20]);
    assert_eq!(times_ms(&sent, 2), [3, 4], "allowed as long, but younger");
    // Idle time fills the bucket up to its depth only.
    bench.now = ms(5000);
    bench.reads(&[1, 1, 1, 1]);
    assert_eq!(times_ms(&bench.run(), 1), [5000, 5001, 5002, 5010]);
}

/// 8 KiB of 81,920 bytes/s cost 100 ms. The bucket holds 8 KiB: one empties it, and once it holds anything again the
/// next goes and leaves it in debt.
#[test]
fn tbf_counts_bytes_for_each_job_apart() {
    let rules = "bulk: * {bytes_per_s=81920, burst=8192, each=job}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), Nanos::ZERO);
    bench.reads(&[1, 1, 1, 1, 2]);
    let sent = bench.run();
    assert_eq!(times_ms(&sent, 1), [0, 0, 100, 200]);
    assert_eq!(times_ms(&sent, 2), [0]);
}

/// Half a device. TTP says 18 ms a request; the device takes 4, which is 8 ms of the rate. Corrected at completion.
#[test]
fn tbf_counts_device_time_as_it_was() {
    let rules = "half: job=1 {device=0.5, burst=0.001}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), ms(4));
    bench.reads(&[1; 6]);
    // Each 8 ms but for the burst of 1 ms (2 ms of the rate), which goes once.
    let sent = bench.run();
    assert_eq!(times_ms(&sent, 1), [0, 6, 14, 22, 30, 38]);
}

/// Job 1 may use 100/s, job 2 300/s, and the device manages 1000/s. Both borrow: what is left is shared 1 : 3.
#[test]
fn tbf_shares_what_is_idle_by_the_rates() {
    let rules = |borrow| {
        format!("a: job=1 {{requests_per_s=100, borrow={borrow}}}; b: job=2 {{requests_per_s=300, borrow=on}}")
    };
    let run = |borrow| {
        let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules(borrow)), ms(1));
        for _ in 0..1000 {
            bench.reads(&[1, 2]);
        }
        let sent = bench.run_until(ms(1000));
        (count(&sent, 1), count(&sent, 2))
    };
    let (a, b) = run("on");
    assert_eq!(a + b, 1000, "the device is never idle");
    assert!((248..=252).contains(&a), "{a} : {b}");
    // A hard limit holds, but for the burst; the other has the rest.
    assert_eq!(run("off"), (102, 898));
}

/// A group of two jobs may use 100/s together, job 1 of it 60/s. Of those under a rule that goes first which its own
/// bucket has allowed to for the longest time: t = 0 job 1 (again from 16.7 on); t = 10 job 2 (from 11 on); t = 20
/// job 2 (from 21 on); t = 30 job 1 (from 46.7 on); 40 and 50 job 2; 60 job 1.
#[test]
fn tbf_rules_stand_under_others() {
    let rules = "one: job=1 {requests_per_s=60, burst=1, under=group}; two: job=2 {requests_per_s=1000, burst=1, \
                 under=group}; group: job=1|2 {requests_per_s=100, burst=1}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), Nanos(1000));
    for _ in 0..500 {
        bench.reads(&[1, 2]);
    }
    let sent = bench.run_until(ms(1000));
    assert_eq!(jobs(&sent[..7]), [1, 2, 2, 1, 2, 2, 1]);
    assert_eq!((count(&sent, 1), count(&sent, 2)), (34, 66));
    assert!(bench.explain(1).contains("under rule group: 100 requests/s, "), "{}", bench.explain(1));
}

/// A changed rate applies at once, but the empty bucket stays empty.
#[test]
fn tbf_keeps_tokens_when_rules_change() {
    let spec = |rate: u32| {
        let rules = format!("a: job=1 {{requests_per_s={rate}, burst=4}}; b: job=3 {{requests_per_s=1}}");
        PolicySpec::named("tbf").with("rules", rules)
    };
    let mut bench = Bench::new(spec(10), Nanos::ZERO);
    assert!(bench.explain(1).starts_with("rule a: 10 requests/s, 4 of 4 tokens at present, 0 requests queued"));
    bench.reads(&[1; 6]);
    assert_eq!(times_ms(&bench.run_until(ms(50)), 1), [0, 0, 0, 0]);
    assert_eq!(
        bench.explain(1),
        "rule a: 10 requests/s, 0 of 4 tokens at present, 2 requests queued or in flight; does not borrow"
    );
    assert_eq!(bench.explain(2), "no rule fits: not limited");
    bench.core.reconfigure(bench.now, &spec(100)).unwrap();
    // At the last look (t = 0) it was empty; a token comes each 10 ms since.
    assert_eq!(times_ms(&bench.run(), 1), [50, 50]);
    bench.reads(&[1; 6]);
    assert_eq!(times_ms(&bench.run(), 1), [50, 50, 60, 70, 80, 90], "4 in 40 ms, of which 2 were left");
}

#[test]
fn rules_that_make_no_sense_are_refused() {
    let refused = |policy: &str, rules: &str| {
        let spec = PolicySpec::named(policy).with("rules", rules);
        Core::new(CoreConfig::single_lane(8), &spec).err().unwrap().to_string()
    };
    for (policy, rules, says) in [
        ("tbf", "a: * {}", "rule a needs one of requests_per_s, bytes_per_s, device"),
        ("tbf", "a: * {device=1, bytes_per_s=1}", "not two"),
        ("tbf", "a: * {requests_per_s=0}", "requests_per_s=0 in rule a is not a number from 0.001"),
        ("tbf", "a: * {device=1, under=b}", "under=b in rule a: there is no such rule"),
        ("tbf", "a: * {device=1, under=a}", "must be without under"),
        ("tbf", "a: * {device=1, borrow=perhaps}", "neither on nor off"),
        ("mclock", "a: * {reservation=5, limit=4}", "reservation in rule a is above its limit"),
        ("mclock", "a: * {rate=4}", "it has: reservation, weight, limit, each"),
        ("set10", "a: job=1 {}", "rule a gives no period_s"),
    ] {
        let error = refused(policy, rules);
        assert!(error.contains(says) && error.lines().count() == 1, "{error}");
    }
}

/// Job 1 has a reservation of 250/s and next to no weight, jobs 2 and 3 weights 1 and 4; the device manages 1000/s.
/// By hand, with P tags in seconds: t = 0 job 1 (its tag is due, the next is at 4 ms); then P 2: 0, 3: 0, and 2's
/// request is older → 2 (1); 3 (¼); 3 (½); t = 4 job 1; 3 (¾); 3 (1); equal, and 2's request is older → 2 (2); t = 8
/// job 1.
#[test]
fn mclock_keeps_reservations_then_weights() {
    let rules = "r: job=1 {reservation=250, weight=0.001}; b: job=2 {weight=1}; c: job=3 {weight=4}";
    let mut bench = Bench::new(PolicySpec::named("mclock").with("rules", rules).with("guard_batches", 0), ms(1));
    for _ in 0..1000 {
        bench.reads(&[1, 2, 3]);
    }
    let sent = bench.run_until(ms(1000));
    assert_eq!(jobs(&sent[..9]), [1, 2, 3, 3, 1, 3, 3, 2, 1]);
    let counts = [1, 2, 3].map(|job| count(&sent, job));
    assert_eq!(counts.iter().sum::<usize>(), 1000);
    assert!(counts[0] == 250 && counts[1].abs_diff(150) <= 2 && counts[2].abs_diff(600) <= 2, "{counts:?}");
}

/// A limit holds although nobody else wants the device. A class that was idle gets no credit for it: afterwards weights
/// 1 : 1 mean turns, not a monopoly for the newcomer.
#[test]
fn mclock_limits_and_returns_from_idleness() {
    let mut bench = Bench::new(PolicySpec::named("mclock").with("rules", "l: job=1 {limit=100}"), ms(1));
    bench.reads(&[1; 4]);
    assert_eq!(times_ms(&bench.run(), 1), [0, 10, 20, 30]);
    let mut bench = Bench::new(PolicySpec::named("mclock"), ms(1));
    bench.reads(&[1; 10]);
    bench.run_until(ms(5));
    bench.reads(&[2; 5]);
    // The newcomer's tag is that of what was served last, with which job 1 was level before: one ahead, then turns.
    assert_eq!(jobs(&bench.run()), [2, 1, 2, 1, 2, 1, 2, 1, 2, 1]);
    assert!(
        bench.explain(1).starts_with("rule default: reservation none, weight 1, limit none for each job, 0 requests")
    );
}

/// Job 1 (period 1 s, set 0), job 2 (10 s, set 1) and job 3 (1 s too, began later). Shares 1 : 0.1, so one of set 1
/// for ten of set 0, and job 3 waits for job 1's phase.
#[test]
fn set10_is_exclusive_in_a_set_and_shares_between_sets() {
    let rules = "often: job=1|3 {period_s=1}; seldom: job=2 {period_s=10}";
    let mut bench = Bench::new(PolicySpec::named("set10").with("rules", rules), ms(1));
    for _ in 0..4 {
        bench.reads(&[1, 2]);
    }
    bench.reads(&[3; 20]);
    let order = jobs(&bench.run());
    let mut want = vec![1, 2, 1, 1, 1];
    // Equal use of both sets: the first set goes, hence an eleventh before job 2 is next.
    want.extend([3; 7]);
    want.push(2);
    want.extend([3; 10]);
    want.push(2);
    want.extend([3; 3]);
    want.push(2);
    assert_eq!(order, want);
}

/// Three phases that begin every 20 s: the period is 20 s, the set round(log₁₀ 20) = 1.
#[test]
fn set10_learns_periods() {
    let mut bench = Bench::new(PolicySpec::named("set10").with("phase_gap_ms", 1000), ms(1));
    assert_eq!(bench.explain(7), "job 7: period 1.000 s, not known yet; set 0, weight 1e0");
    for phase in 0..3 {
        for burst in [0, 500] {
            bench.now = ms(20_000 * phase + burst); // half a second later is still the same phase
            bench.reads(&[7, 7]);
            bench.run();
        }
    }
    let learnt = "job 7: period 20.000 s, learnt from 2 periods; set 1, weight 1e-1";
    assert_eq!(bench.explain(7), learnt);
    let spec = PolicySpec::named("set10").with("phase_gap_ms", 2000);
    bench.core.reconfigure(bench.now, &spec).unwrap();
    assert_eq!(bench.explain(7), learnt, "a change of parameters forgets nothing");
}

/// Jobs 1 and 2 begin at 0 and alternate (equal yields: the first to begin). Job 3 begins at 10 ms: t = 10 yields .5,
/// .5, 0 → 3; t = 11: 5/11, 5/11, 1/1 → 1; t = 12: 6/12, 5/12, 1/2 → 2; t = 13: 6/13, 6/13, 1/3 → 3; t = 14: 6/14,
/// 6/14, 2/4 → 1; t = 15: 7/15, 6/15, 2/5, the last a trifle less, because a phase counts from a nanosecond before it
/// began → 3; t = 16: 7/16, 6/16, 3/6 → 2.
#[test]
fn lowest_yield_goes_first() {
    let mut bench = Bench::new(PolicySpec::named("lowest-yield-first"), ms(1));
    for _ in 0..20 {
        bench.reads(&[1, 2]);
    }
    assert_eq!(jobs(&bench.run_until(ms(10))), [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]);
    bench.reads(&[3; 20]);
    assert_eq!(jobs(&bench.run_until(ms(17))), [3, 1, 2, 3, 1, 3, 2]);
    assert_eq!(bench.explain(3), "job 3: 3.000 ms of device time in its present phase");
}

/// The guard of those whose rule favours some: with 3, each fourth batch at the latest is the oldest request's.
#[test]
fn guards_let_the_oldest_go() {
    for (policy, rules) in [
        ("mclock", "r: job=1 {reservation=1000000}"),
        ("set10", "a: job=1 {period_s=0.001}; b: job=2 {period_s=1000000}"),
    ] {
        let spec = PolicySpec::named(policy).with("rules", rules).with("guard_batches", 3);
        let mut bench = Bench::new(spec, ms(1));
        bench.reads(&[2, 2]);
        bench.reads(&[1; 20]);
        let order = jobs(&bench.run());
        let places: Vec<usize> = (0..order.len()).filter(|i| order[*i] == 2).collect();
        assert!(places[0] <= 3 && places[1] - places[0] <= 4, "{policy}: {order:?}");
    }
}

/// What outlives requests is bounded: of idle applications the last seen are remembered, and accounts that are as
/// good as new are forgotten.
#[test]
fn memories_of_the_idle_are_bounded() {
    let mut bench = Bench::new(PolicySpec::named("set10").with("phase_gap_ms", 1), Nanos(1000));
    for job in 0..20_000 {
        for _ in 0..2 {
            bench.now += ms(5);
            bench.reads(&[job]);
            bench.run();
        }
    }
    assert!(bench.explain(0).contains("not known yet"), "{}", bench.explain(0));
    assert!(
        bench.explain(19_999).contains("period 0.005 s, learnt from 1 periods; set -2"),
        "{}",
        bench.explain(19_999)
    );
    let rules = "each: * {requests_per_s=1, each=job}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), Nanos::ZERO);
    for job in 0..20_000 {
        bench.reads(&[job]);
        bench.run();
    }
    // In one instant 16,384 jobs have accounts; the next ones share a bucket, and wait for it until others are full
    // again (a second later) and are forgotten.
    assert!(bench.now >= ms(1000) && bench.now < ms(100_000), "{}", bench.now);
}
