//! The rules of the policies from production and research, worked by hand.

use impresario_sched::limited::Portions;
use impresario_sched::policy::POLICIES;
use impresario_sched::{
    ClientId, Completion, ConnId, Core, CoreConfig, CostModel, Event, Extent, FileId, JobId, LaneId, LinearCost, Nanos,
    Next, Op, PolicySpec, Request, RequestId, Who,
};

const fn ms(ms: u64) -> Nanos {
    Nanos::from_millis(ms)
}

/// A core whose TTP is 10 ms and 1 ms per KiB, one batch in flight per lane, and a device with given service times.
struct Bench {
    core: Core,
    now: Nanos,
    service: Nanos,
    next_offset: u64,
}

/// What was dispatched: when, for which job, and where.
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

    /// Dispatches until `end`, or until nothing is left; time ends with the last completion, or at `end`.
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
        self.core
            .explain(self.now, &Who { job, user: 0, client: job, file: job, op: Op::Read, naming: Default::default() })
            .unwrap()
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
    // Two connections of one client share a turn.
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
    // 0 is behind the sweep, which continues at 32 and wraps after 60.
    bench.push(Op::Read, 1, 0, 0);
    assert_eq!(order(bench.run()), [(2, 0, 1), (2, 16, 1), (1, 40, 1), (1, 60, 1), (1, 0, 1)]);
    // Touching requests go as one batch; a write has its own queue.
    for (op, offset) in [(Op::Read, 16), (Op::Write, 100), (Op::Read, 8), (Op::Read, 0)] {
        bench.push(op, 5, offset, 0);
    }
    assert_eq!(order(bench.run()), [(5, 0, 2), (5, 100, 1), (5, 16, 1)], "the quantum of 2 cuts the run");
}

/// Sweeps of two batches; two sweeps of reads may precede waiting writes. An expired read starts the next sweep.
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
            // A sweep, in offset order; 10 and 18 touch.
            (r, 1, 10, 2),
            (r, 1, 30, 1),
            // The second continues where that one stopped; then writes have their turn.
            (r, 1, 50, 1),
            (r, 1, 70, 1),
            (w, 1, 300, 1),
            (w, 1, 500, 1),
            // 6 ms have passed: the oldest read, of file 2, has expired and starts the sweep, which ends there; the
            // next one starts with the oldest request at that time.
            (r, 2, 0, 1),
            (r, 1, 90, 1),
        ]
    );
}

/// 100 requests a second and a burst of three: three at once, then one every 10 ms. Others are not limited.
#[test]
fn tbf_limits_by_rate_and_burst() {
    let rules = "slow: job=1 {requests_per_s=100}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), ms(1));
    bench.reads(&[1, 1, 1, 1, 1, 2, 2]);
    let sent = bench.run();
    assert_eq!(times_ms(&sent, 1), [0, 1, 2, 10, 20]);
    assert_eq!(times_ms(&sent, 2), [3, 4], "allowed as long, but younger");
    // Idle time fills the bucket only up to its depth.
    bench.now = ms(5000);
    bench.reads(&[1, 1, 1, 1]);
    assert_eq!(times_ms(&bench.run(), 1), [5000, 5001, 5002, 5010]);
}

/// 8 KiB at 81,920 bytes/s cost 100 ms. The bucket holds 8 KiB: one request empties it, and as soon as it holds
/// anything again the next goes and leaves it in debt.
#[test]
fn tbf_counts_bytes_for_each_job_apart() {
    let rules = "bulk: * {bytes_per_s=81920, burst=8192, each=job}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), Nanos::ZERO);
    bench.reads(&[1, 1, 1, 1, 2]);
    let sent = bench.run();
    assert_eq!(times_ms(&sent, 1), [0, 0, 100, 200]);
    assert_eq!(times_ms(&sent, 2), [0]);
}

/// Half a device. TTP predicts 18 ms per request; the device takes 4, which is 8 ms of the rate. Corrected at
/// completion.
#[test]
fn tbf_counts_device_time_as_it_was() {
    let rules = "half: job=1 {device=0.5, burst=0.001}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), ms(4));
    bench.reads(&[1; 6]);
    // 8 ms each, except for the burst of 1 ms (2 ms of the rate), which is used once.
    let sent = bench.run();
    assert_eq!(times_ms(&sent, 1), [0, 6, 14, 22, 30, 38]);
}

/// Job 1 may use 100/s, job 2 300/s, and the device manages 1000/s. Both borrow: the rest is shared 1 : 3.
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
    // A hard limit holds, except for the burst; the other job gets the rest.
    assert_eq!(run("off"), (102, 898));
}

/// By default every client has Lustre's 10,000/s and a burst of three, and a share of the rest.
#[test]
fn tbf_by_default_keeps_clients_apart() {
    let mut bench = Bench::new(PolicySpec::named("tbf").with("guard_batches", 0), Nanos(1000));
    bench.reads(&[1; 40]);
    bench.reads(&[2; 20]);
    let sent = bench.run();
    assert_eq!(jobs(&sent[..6]), [1, 1, 1, 2, 2, 2]);
    assert!((9..=11).contains(&count(&sent[6..26], 2)), "{:?}", jobs(&sent));
}

/// A group of two jobs may use 100/s together, job 1 of it 60/s. Under a common rule, the job goes first whose own
/// bucket has allowed it for the longest time: t = 0 job 1 (again from 16.7 on); t = 10 job 2 (from 11 on); t = 20 job
/// 2 (from 21 on); t = 30 job 1 (from 46.7 on); 40 and 50 job 2; 60 job 1.
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

/// 100 requests a second over all servers: here a quarter of them, then all.
#[test]
fn tbf_grants_its_portion_of_a_limit_over_all_servers() {
    let rules = "a: job=1 {requests_per_s=100, burst=1, over=all}; b: job=2 {requests_per_s=100, burst=1}";
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), Nanos(1000));
    let set = |bench: &mut Bench, others, listed: &[(&str, f64)]| {
        let listed = listed.iter().map(|(rule, portion)| (rule.to_string(), None, *portion)).collect();
        bench.core.set_portions(bench.now, Portions { others, listed });
    };
    set(&mut bench, 0.25, &[]);
    bench.reads(&[1; 20]);
    bench.reads(&[2; 5]);
    let sent = bench.run_until(ms(161));
    assert_eq!(times_ms(&sent, 1), [0, 40, 80, 120, 160]);
    assert_eq!(times_ms(&sent, 2), [0, 10, 20, 30, 40], "a limit of this server alone is whole");
    let (limited, is_whole) = bench.core.limited(bench.now);
    let told: Vec<_> =
        limited.iter().map(|l| (l.rule.as_str(), l.over_all, l.fraction, l.granted, l.waiting)).collect();
    assert_eq!((told, is_whole), (vec![("a", true, 0.25, 5, 15)], true));
    assert!(bench.explain(1).contains("100 requests/s over all servers, 25.0 % of it here"), "{}", bench.explain(1));
    // Debt shrinks with a larger portion: the next goes after 10 ms instead of 40.
    set(&mut bench, 0.25, &[("a", 1.0), ("b", 0.1), ("unknown", 0.5)]);
    let sent = bench.run_until(ms(200));
    assert_eq!(times_ms(&sent, 1)[..3], [170, 180, 190]);
    // It outlives a change of the rules.
    let spec = PolicySpec::named("tbf").with("rules", "a: job=1 {requests_per_s=200, burst=1, over=all}");
    bench.core.reconfigure(bench.now, &spec).unwrap();
    let (limited, _) = bench.core.limited(bench.now);
    assert_eq!((limited[0].fraction, limited[0].rate, limited[0].granted), (1.0, 200.0, 5 + sent.len() as u64));
}

/// Of 100 requests a second over all servers this one grants a quarter, or half as it is listed. What is owed when the same rules are
/// set again is paid as if they had not been.
#[test]
fn tbf_rules_that_are_set_again_change_nothing_of_what_is_owed() {
    let spec = |over| {
        let rules = format!("a: job=1 {{requests_per_s=100, burst=1, over={over}}}");
        PolicySpec::named("tbf").with("rules", rules)
    };
    // Where the limit becomes one of this server alone, all of it is granted here.
    let cases = [(None, 40, "all", [80, 120]), (Some(0.5), 20, "all", [40, 60]), (Some(0.5), 20, "server", [40, 50])];
    for (listed, every, over, then) in cases {
        let mut bench = Bench::new(spec("all"), Nanos(1000));
        let listed = listed.map(|portion| ("a".to_string(), None, portion));
        bench.core.set_portions(bench.now, Portions { others: 0.25, listed: listed.into_iter().collect() });
        bench.reads(&[1; 20]);
        assert_eq!(times_ms(&bench.run_until(ms(every + every / 2)), 1), [0, every]);
        (0..3).for_each(|_| bench.core.reconfigure(bench.now, &spec(over)).unwrap());
        assert_eq!(times_ms(&bench.run_until(ms(130)), 1)[..2], then, "over={over}");
    }
}

/// Each batch is paid for as 18 ms and corrected to 4. What a server reports as granted never falls, since its peers would
/// take that for a restart; and nothing is counted twice.
#[test]
fn tbf_never_takes_back_what_it_reported_as_granted() {
    let spec = |rate: f64| PolicySpec::named("tbf").with("rules", format!("a: job=1 {{device={rate}, over=all}}"));
    let mut bench = Bench::new(spec(0.5), ms(4));
    bench.reads(&[1; 100]);
    let (mut last, mut served) = (0, 0);
    while served < 100 {
        let batch = match bench.core.next(bench.now) {
            Next::Wait { until, .. } => {
                bench.now = until;
                continue;
            }
            Next::Dispatch(batch) => batch,
        };
        let finished = bench.now + bench.service;
        for ended in [false, true] {
            if ended {
                bench.core.event(finished, Event::Completed(Completion::of(&batch, bench.now, finished)));
                bench.now = finished;
            }
            let granted = bench.core.limited(bench.now).0[0].granted;
            assert!(granted >= last, "{granted} after {last}, {served} served");
            last = granted;
        }
        served += 1;
        if served == 50 {
            bench.core.reconfigure(bench.now, &spec(0.25)).unwrap();
        }
        assert!((served * ms(4).0..=served * ms(4).0 + ms(18).0).contains(&last), "{last} for {served} batches");
    }
}

/// Four batches at a time are at a device that serves one after the other. Waiting there is not device time: a quarter of the
/// device is a quarter.
#[test]
fn a_portion_of_the_device_does_not_depend_on_the_depth() {
    let tbf = PolicySpec::named("tbf").with("rules", "a: job=1 {device=0.25}");
    let mclock = PolicySpec::named("mclock").with("unit", "device").with("rules", "a: job=1 {limit=0.25}");
    for spec in [tbf, mclock] {
        let name = spec.name.clone();
        let mut bench = Bench::new(spec, ms(4));
        bench.core.set_depth(4, 0);
        let mut flying = std::collections::VecDeque::new();
        let (mut free_at, mut served, mut queued) = (Nanos::ZERO, [0_u32; 3], [0_u32; 3]);
        while bench.now < ms(10_000) {
            for job in [1, 2] {
                while queued[job] < 8 {
                    bench.reads(&[job as u32]);
                    queued[job] += 1;
                }
            }
            match bench.core.next(bench.now) {
                Next::Dispatch(batch) => {
                    queued[batch.extent.file.0 as usize] -= 1;
                    free_at = free_at.max(bench.now) + bench.service;
                    flying.push_back((bench.now, free_at, batch));
                }
                Next::Wait { until, .. } => {
                    if flying.front().is_none_or(|(_, finished, _)| *finished > until) {
                        bench.now = until;
                        continue;
                    }
                    let (started, finished, batch) = flying.pop_front().unwrap();
                    bench.now = finished;
                    served[batch.extent.file.0 as usize] += 1;
                    bench.core.event(finished, Event::Completed(Completion::of(&batch, started, finished)));
                }
            }
        }
        let portion = f64::from(served[1]) * bench.service.as_secs_f64() / bench.now.as_secs_f64();
        assert!((0.225..=0.275).contains(&portion), "{name}: {portion:.3} of the device, {served:?}");
    }
}

/// A disk serves reads of 10 ms one after the other, a cache beside it a read of 0.1 ms each millisecond. The reads of the disk pay
/// for their time though others end meanwhile: a quarter of the device is a quarter.
#[test]
fn a_portion_of_the_device_counts_batches_that_others_overlap() {
    let tbf = PolicySpec::named("tbf").with("rules", "a: job=1 {device=0.25}");
    let mclock = PolicySpec::named("mclock").with("unit", "device").with("rules", "a: job=1 {limit=0.25}");
    for spec in [tbf, mclock] {
        let name = spec.name.clone();
        let mut bench = Bench::new(spec, ms(10));
        bench.core.set_depth(4, 0);
        let mut flying = std::collections::BTreeMap::new();
        let (mut free_at, mut next_fast, mut served, mut queued) = (Nanos::ZERO, Nanos::ZERO, 0_u32, 0_u32);
        while bench.now < ms(10_000) {
            while queued < 4 {
                bench.reads(&[1]);
                queued += 1;
            }
            if bench.now >= next_fast {
                bench.reads(&[2]);
                next_fast += ms(1);
            }
            match bench.core.next(bench.now) {
                Next::Dispatch(batch) if batch.extent.file.0 == 1 => {
                    queued -= 1;
                    free_at = free_at.max(bench.now) + bench.service;
                    flying.insert((free_at, batch.id.0), (bench.now, batch));
                }
                Next::Dispatch(batch) => {
                    flying.insert((bench.now + Nanos(100_000), batch.id.0), (bench.now, batch));
                }
                Next::Wait { until, .. } => {
                    let until = until.min(next_fast);
                    if flying.first_key_value().is_none_or(|((finished, _), _)| *finished > until) {
                        bench.now = until;
                        continue;
                    }
                    let ((finished, _), (started, batch)) = flying.pop_first().unwrap();
                    bench.now = finished;
                    served += u32::from(batch.extent.file.0 == 1);
                    bench.core.event(finished, Event::Completed(Completion::of(&batch, started, finished)));
                }
            }
        }
        let portion = f64::from(served) * bench.service.as_secs_f64() / bench.now.as_secs_f64();
        assert!((0.225..=0.275).contains(&portion), "{name}: {portion:.3} of the device");
    }
}

/// What waits for a rule with others under it are their requests. Requests in flight wait for no limit.
#[test]
fn tbf_reports_as_waiting_what_a_limit_withholds() {
    let rules =
        "one: job=1 {requests_per_s=1000, burst=1, under=group}; group: job=9 {requests_per_s=100, burst=1, over=all}";
    let waiting = |core: &Core, now, rule: &str| {
        let (limited, _) = core.limited(now);
        limited.iter().find(|limit| limit.rule == rule).map(|limit| limit.waiting)
    };
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", rules), Nanos(1000));
    bench.reads(&[1; 20]);
    assert_eq!(times_ms(&bench.run_until(ms(42)), 1), [0, 10, 20, 30, 40]);
    assert_eq!(waiting(&bench.core, bench.now, "group"), Some(15));
    let mut bench = Bench::new(PolicySpec::named("tbf").with("rules", "a: job=1 {requests_per_s=100, burst=3}"), ms(1));
    bench.core.set_depth(8, 0);
    bench.reads(&[1; 5]);
    for left in (2..5).rev() {
        assert!(matches!(bench.core.next(bench.now), Next::Dispatch(_)));
        assert_eq!(waiting(&bench.core, bench.now, "a"), Some(if left > 2 { 0 } else { 2 }), "{left} left");
    }
    for _ in 0..2 {
        bench.now += ms(10);
        assert!(matches!(bench.core.next(bench.now), Next::Dispatch(_)));
    }
    assert_eq!(waiting(&bench.core, bench.now, "a"), Some(0), "all are in flight");
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
        "rule a: 10 requests/s, 0.5 of 4 tokens at present, 2 requests queued or in flight; does not borrow"
    );
    assert_eq!(bench.explain(2), "no rule fits: not limited");
    bench.core.reconfigure(bench.now, &spec(100)).unwrap();
    // It held half a token at the change (t = 50 ms); one arrives every 10 ms since.
    assert_eq!(times_ms(&bench.run(), 1), [55, 65]);
    bench.reads(&[1; 3]);
    assert_eq!(times_ms(&bench.run(), 1), [75, 85, 95]);
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
        ("tbf", "a: * {device=1, over=some}", "over=some in rule a is neither server nor all"),
        ("tbf", "a: * {device=1, over=all, borrow=on}", "rule a borrows"),
        ("mclock", "a: * {reservation=5, limit=4}", "reservation in rule a is above its limit"),
        ("mclock", "a: * {rate=4}", "it has: reservation, weight, limit, each"),
        ("mclock", "a: * {reservation=0.0009, limit=0.0005}", "reservation in rule a is above its limit"),
        ("set10", "a: job=1 {}", "rule a gives no period_s"),
        ("set10", "b: * {period_s=1}; a: job=1 & op=read {period_s=5}", "rule a goes by op; use job= or * only"),
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

/// A limit holds even if the device is otherwise idle. An idle class gets no credit: afterwards weights 1 : 1
/// alternate, rather than the returning class taking over.
#[test]
fn mclock_limits_and_returns_from_idleness() {
    let mut bench = Bench::new(PolicySpec::named("mclock").with("rules", "l: job=1 {limit=100}"), ms(1));
    bench.reads(&[1; 4]);
    assert_eq!(times_ms(&bench.run(), 1), [0, 10, 20, 30]);
    let mut bench = Bench::new(PolicySpec::named("mclock"), ms(1));
    bench.reads(&[1; 10]);
    bench.run_until(ms(5));
    bench.reads(&[2; 5]);
    // The returning class starts at the last tag served, where job 1 was before: one ahead, then they alternate.
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

/// The guard of policies that favour some requests: with 3, at least every fourth batch is the oldest request's.
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

/// State that outlives requests is bounded: only the most recent idle applications are remembered, and full accounts
/// are dropped.
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
    // At one instant 16,384 jobs have accounts; further jobs share a bucket, and wait for it until others are full
    // again (a second later) and are dropped.
    assert!(bench.now >= ms(1000) && bench.now < ms(100_000), "{}", bench.now);
}

/// A core with separate lanes, one batch in flight at each, and the given capacity.
fn lanes(spec: PolicySpec, lanes: u16, capacity: u32) -> Core {
    Core::new(CoreConfig { lanes, ..CoreConfig::single_lane(capacity) }, &spec).unwrap()
}

/// A read of a job on a lane, touching no other.
fn push_at(core: &mut Core, now: Nanos, lane: u16, job: u32, len: u64) -> RequestId {
    let offset = (core.room() as u64) << 41 | now.0 << 21;
    let extent = Extent { file: FileId(job), lane: LaneId(lane), file_offset: offset, lane_offset: offset, len };
    core.push(now, &Request { job: JobId(job), arrival: now, ..Request::new(Op::Read, extent) }).unwrap()
}

/// The job of the next batch, which ends `service` later.
fn next_job(core: &mut Core, now: Nanos, service: Nanos) -> Option<u32> {
    let Next::Dispatch(batch) = core.next(now) else { return None };
    core.event(now + service, Event::Completed(Completion::of(&batch, now, now + service)));
    Some(batch.extent.file.0)
}

/// Virtual time outlasts 64 bits of nanoseconds: 30 requests that each cost 10^18 of them.
#[test]
fn virtual_times_do_not_run_out() {
    let mclock = PolicySpec::named("mclock").with("rules", "a: * {weight=0.001, each=job}").with("unit", "device");
    let tbf = PolicySpec::named("tbf").with("rules", "a: * {bytes_per_s=1, borrow=on, each=job}");
    for spec in [mclock, tbf] {
        let name = spec.name.clone();
        let mut core = lanes(spec.with("guard_batches", 0), 1, 128);
        for job in [1, 2] {
            (0..30).for_each(|_| _ = push_at(&mut core, Nanos::ZERO, 0, job, 1 << 30));
        }
        // 10^6 s each, one after the other: with a weight of 0.001 10^18 ns of virtual time.
        let service = ms(1_000_000_000);
        let sent: Vec<u32> = (0..60).map(|i| next_job(&mut core, Nanos(i * service.0), service).unwrap()).collect();
        assert!(sent[4..].windows(2).all(|w| w[0] != w[1]), "{name}: {sent:?}");
    }
}

/// Weights 1 : 4 on one lane, although virtual time passes much faster on another.
#[test]
fn virtual_times_are_of_lanes() {
    let mclock = PolicySpec::named("mclock").with("rules", "a: job=1 {weight=0.01}; b: job=2 {}; c: job=3 {weight=4}");
    let tbf = "a: job=1 {requests_per_s=0.001, borrow=on}; b: job=2 {requests_per_s=0.1, burst=1, borrow=on}; \
               c: job=3 {requests_per_s=0.4, burst=1, borrow=on}";
    for spec in [mclock, PolicySpec::named("tbf").with("rules", tbf)] {
        let name = spec.name.clone();
        let mut core = lanes(spec.with("guard_batches", 0), 2, 4096);
        for (lane, job) in [(0, 1), (1, 2), (1, 3)] {
            (0..200).for_each(|_| _ = push_at(&mut core, Nanos::ZERO, lane, job, 4096));
        }
        // The lanes take turns.
        let sent: Vec<u32> = (0..200).map(|i| next_job(&mut core, Nanos(i), Nanos::ZERO).unwrap()).collect();
        let [two, three] = [2, 3].map(|job| sent.iter().filter(|s| **s == job).count());
        assert!(two + three == 100 && two.abs_diff(20) <= 2, "{name}: {two} : {three}");
    }
}

/// Reservations that the device cannot keep do not starve a class within its limit: after waiting for three batches (0,
/// 1, 2) it goes, and again from 13 on, after those of 13, 14 and 15.
#[test]
fn mclock_reservations_leave_some_to_limited_classes() {
    let rules = "r: job=1 {reservation=1000000}; l: job=2 {limit=100}";
    let mut bench = Bench::new(PolicySpec::named("mclock").with("rules", rules).with("guard_batches", 3), ms(1));
    bench.reads(&[2, 2]);
    bench.reads(&[1; 40]);
    assert_eq!(times_ms(&bench.run(), 2), [3, 16]);
}

/// Requests of a rule under another: while the own bucket fills for the next request, others queue up for the common
/// bucket, each time before it.
#[test]
fn tbf_bounds_hold_under_another_rule() {
    let rules = "own: job=1 {requests_per_s=1000, burst=1, under=all}; others: job=2 {requests_per_s=100000, \
                 burst=100000, under=all}; all: job=3 {requests_per_s=100, burst=1}";
    let mut core = lanes(PolicySpec::named("tbf").with("rules", rules), 1, 16);
    let last = (0..3).map(|_| push_at(&mut core, Nanos::ZERO, 0, 1, 512)).last().unwrap();
    let bound = core.wait_bound(Nanos::ZERO, last).unwrap().idle;
    let (mut now, mut mine) = (Nanos::ZERO, 0);
    while mine < 3 {
        match core.next(now) {
            Next::Wait { until, .. } => now = until,
            Next::Dispatch(batch) => {
                core.event(now, Event::Completed(Completion::of(&batch, now, now)));
                if batch.extent.file == FileId(1) {
                    mine += 1;
                    (0..12).for_each(|_| _ = push_at(&mut core, now, 0, 2, 512));
                }
            }
        }
    }
    assert!(now > ms(240) && now <= bound, "{now}, bound {bound}");
}

/// A clock that goes backwards or far ahead distorts the order, but nothing panics and no request is lost.
#[test]
fn clocks_that_jump_lose_nothing() {
    let rules = |policy: &str| match policy {
        "tbf" => "a: job=1 {device=0.5}; b: job=2 {bytes_per_s=1e6, under=c}; c: * {requests_per_s=1, borrow=on}",
        "mclock" => "a: job=1 {reservation=5, limit=7}; b: job=2 {limit=0.001}; c: * {weight=0.001, each=job}",
        _ => "",
    };
    for (info, shared_space) in POLICIES.iter().flat_map(|p| [(p, false), (p, true)]) {
        let mut spec = PolicySpec::named(info.name);
        if !rules(info.name).is_empty() {
            spec = spec.with("rules", rules(info.name));
        }
        let config = CoreConfig { lanes: 3, shared_space, ..CoreConfig::single_lane(512) };
        let mut core = Core::new(config, &spec).unwrap();
        let clock = [ms(1000), Nanos(0), Nanos(u64::MAX - 1), Nanos(5), Nanos::MAX, ms(1), Nanos::MAX];
        let mut sent = 0;
        for round in 0..70 {
            let now = clock[round % clock.len()];
            for i in 0..3 {
                let extent = Extent {
                    file: FileId(i),
                    lane: LaneId(i as u16),
                    file_offset: round as u64 * 8192,
                    lane_offset: round as u64 * 8192,
                    len: 4096,
                };
                let job = JobId((round as u32 + i) % 4);
                core.push(now, &Request { job, arrival: now, ..Request::new(Op::Read, extent) }).unwrap();
            }
            let then = clock[(round * 3 + 1) % clock.len()];
            while let Next::Dispatch(batch) = core.next(then) {
                sent += batch.parts.len();
                core.event(now, Event::Completed(Completion::of(&batch, then, now)));
            }
            core.reconfigure(now, &spec).unwrap();
        }
        // Requests that wait for an unreachable time are still queued.
        assert_eq!(sent + core.drain(Nanos(7)).len(), 210, "{}", info.name);
        assert!(core.is_empty(), "{}", info.name);
    }
}

/// One space for two servers, as at an I/O node that does not split requests. Server 0 is busy, and the oldest request
/// waits for it; requests for server 1 go, with their neighbours if the policy aggregates.
#[test]
fn an_idle_server_is_served_though_the_oldest_request_waits_for_a_busy_one() {
    // In front of several servers `auto` is `none`.
    let queueing = |p: &&impresario_sched::policy::PolicyInfo| !["none", "auto", "twins"].contains(&p.name);
    for info in impresario_sched::policy::POLICIES.iter().filter(queueing) {
        let config = CoreConfig { lanes: 2, shared_space: true, ..CoreConfig::single_lane(16) };
        let mut core = Core::new(config, &PolicySpec::named(info.name)).unwrap();
        let mut push = |file: u32, lane: u16, offset: u64| {
            let extent =
                Extent { file: FileId(file), lane: LaneId(lane), file_offset: offset, lane_offset: offset, len: 4096 };
            let request = Request { conn: ConnId(file), client: ClientId(file), ..Request::new(Op::Read, extent) };
            core.push(Nanos(0), &request).unwrap()
        };
        push(1, 0, 0);
        push(1, 0, 1 << 20);
        let (third, fourth) = (push(2, 1, 0), push(2, 1, 4096));
        let mut sent = Vec::new();
        while let Next::Dispatch(batch) = core.next(Nanos(1)) {
            sent.push((batch.extent.lane.0, batch.parts.iter().map(|p| p.id).collect::<Vec<_>>()));
        }
        sent.sort();
        assert_eq!(sent.iter().map(|s| s.0).collect::<Vec<_>>(), [0, 1], "{}: {sent:?}", info.name);
        let both = [third, fourth];
        assert!(both.starts_with(&sent[1].1) || sent[1].1 == both, "{}: {sent:?}", info.name);
    }
}
