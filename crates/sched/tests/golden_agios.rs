//! The rules of the AGIOS family worked by hand: `sjf`, `srtf`, `to`, `to-agg`, `sw`, `wfq`; and known defects of the
//! public library, which our policies must not have.

use std::sync::Arc;

use impresario_foresight::{PredictedQueues, Recorded};
use impresario_sched::policy::POLICIES;
use impresario_sched::{
    Batch, Cancelled, Completion, Core, CoreConfig, Event, Extent, FileId, JobId, LaneId, Nanos, Next, Op, PolicySpec,
    Request, RequestId, Who,
};

/// A read of `len` KiB at `offset` KiB of a file, on lane 0, by job 0, at time zero.
fn read(file: u32, offset: u64, len: u64) -> Request {
    let (offset, len) = (offset << 10, len << 10);
    Request::new(
        Op::Read,
        Extent { file: FileId(file), lane: LaneId(0), file_offset: offset, lane_offset: offset, len },
    )
}

fn core(spec: PolicySpec, lanes: u16) -> Core {
    Core::new(CoreConfig { lanes, ..CoreConfig::single_lane(256) }, &spec).unwrap()
}

fn push(core: &mut Core, requests: impl IntoIterator<Item = Request>) -> Vec<RequestId> {
    requests.into_iter().map(|r| core.push(r.arrival, &r).unwrap()).collect()
}

fn complete(core: &mut Core, now: Nanos, batch: &Batch) {
    core.event(now, Event::Completed(Completion::of(batch, now, now)));
}

/// The next batch at an instant, completed at once: (file, offset in KiB, requests).
fn next(core: &mut Core, now: Nanos) -> Option<(u32, u64, usize)> {
    let Next::Dispatch(batch) = core.next(now) else { return None };
    complete(core, now, &batch);
    Some((batch.extent.file.0, batch.extent.lane_offset >> 10, batch.parts.len()))
}

fn serve(core: &mut Core) -> Vec<(u32, u64, usize)> {
    std::iter::from_fn(|| next(core, Nanos::from_millis(1))).collect()
}

fn served(spec: PolicySpec, requests: impl IntoIterator<Item = Request>) -> Vec<(u32, u64, usize)> {
    let mut core = core(spec, 1);
    push(&mut core, requests);
    serve(&mut core)
}

fn p(name: &str) -> PolicySpec {
    PolicySpec::named(name)
}

/// Queued bytes: file 1 24 KiB, file 2 64 KiB, file 3 16 KiB, file 1's writes 8 KiB. Fewest first, lowest offset first;
/// file 3 still has the fewest after each of its requests.
#[test]
fn sjf_serves_the_fewest_bytes_from_the_lowest_offset() {
    let mut requests = vec![read(1, 0, 8), read(1, 200, 8), read(1, 100, 8), read(2, 0, 64)];
    requests.extend([50, 40, 30, 20].map(|offset| read(3, offset, 4)));
    requests.push(Request { op: Op::Write, ..read(1, 900, 8) });
    let order = served(p("sjf"), requests);
    let small = [(1, 900, 1), (3, 20, 1), (3, 30, 1), (3, 40, 1), (3, 50, 1)];
    assert_eq!(order[..5], small);
    assert_eq!(order[5..], [(1, 0, 1), (1, 100, 1), (1, 200, 1), (2, 0, 1)]);
}

/// File 1 has 16 KiB at first, then 8, and keeps its turn; an arrival for file 2 makes that one longer.
#[test]
fn sjf_looks_at_what_is_queued_now() {
    let mut core = core(p("sjf").with("merge", "off"), 1);
    push(&mut core, [read(1, 0, 8), read(1, 8, 8), read(2, 0, 12)]);
    let t = Nanos(1);
    assert_eq!(next(&mut core, t), Some((2, 0, 1)), "12 KiB are fewer than 16");
    push(&mut core, [read(2, 100, 12)]);
    assert_eq!(next(&mut core, t), Some((2, 100, 1)));
    push(&mut core, [read(2, 200, 12), read(2, 300, 12)]);
    assert_eq!(next(&mut core, t), Some((1, 0, 1)), "16 are fewer than 24");
    assert_eq!(next(&mut core, t), Some((1, 8, 1)));
    assert_eq!(next(&mut core, t), Some((2, 200, 1)));
}

/// A run predicts 40 KiB of file 1's reads and 24 KiB of file 2's, none of file 3. First the files without remaining
/// bytes, by fewest queued bytes; then file 2, with 16 KiB remaining, before file 1 with 32, although less of that is
/// queued.
#[test]
fn srtf_serves_the_file_with_the_fewest_bytes_to_come() {
    let foretold = |file: u64, kib: u64| {
        let request = move |i: u64| Recorded {
            file,
            write: false,
            offset: i << 12,
            len: 4 << 10,
            arrival_ns: i,
            completed_ns: None,
            source: 0,
        };
        (0..kib / 4).map(request)
    };
    let run = || Arc::new(PredictedQueues::new(foretold(1, 40).chain(foretold(2, 24))));
    let requests = || [read(1, 0, 8), read(2, 100, 4), read(2, 0, 4), read(3, 0, 64), read(4, 0, 32)];
    let mut core = core(p("srtf"), 1);
    core.foresee(Some(run()));
    push(&mut core, requests());
    assert_eq!(serve(&mut core), [(4, 0, 1), (3, 0, 1), (2, 0, 1), (2, 100, 1), (1, 0, 1)]);
    // Served bytes count as arrived: of file 1, 28 KiB more leave 4, fewer than the 16 of file 2.
    push(&mut core, [read(2, 200, 1), read(1, 8, 28)]);
    assert_eq!(serve(&mut core), [(1, 8, 1), (2, 200, 1)]);
    let told = core.status().foretold.unwrap();
    assert_eq!((told.requests, told.linked.unwrap().arrived, told.linked.unwrap().linked), (16, 7, 5));
    // More than predicted: nothing remains. A cancelled request does not count as arrived.
    let ids = push(&mut core, [read(1, 40, 400), read(2, 300, 15)]);
    assert_eq!(core.cancel(Nanos(5), ids[0]), Cancelled::Removed);
    push(&mut core, [read(1, 60, 1), read(2, 400, 1)]);
    assert_eq!(serve(&mut core), [(2, 300, 1), (2, 400, 1), (1, 60, 1)]);
    // After a pause the program runs again.
    let later = Nanos::from_millis(60_000);
    for r in [read(1, 0, 36), read(2, 0, 4)] {
        core.push(later, &Request { arrival: later, ..r }).unwrap();
    }
    assert_eq!(next(&mut core, later), Some((1, 0, 1)));
    assert_eq!(next(&mut core, later), Some((2, 0, 1)));
    // Without a run it is sjf.
    core.foresee(None);
    push(&mut core, requests());
    assert_eq!(serve(&mut core), [(1, 0, 1), (2, 0, 1), (2, 100, 1), (4, 0, 1), (3, 0, 1)]);
    assert!(core.status().foretold.is_none());
}

#[test]
fn sjf_takes_along_what_touches() {
    let requests = || [read(1, 16, 8), read(1, 0, 8), read(1, 8, 8), read(2, 0, 64)];
    assert_eq!(served(p("sjf"), requests()), [(1, 0, 3), (2, 0, 1)]);
    assert_eq!(served(p("sjf").with("merge", "off"), requests()), [(1, 0, 1), (1, 8, 1), (1, 16, 1), (2, 0, 1)]);
}

/// Small requests of new files keep arriving; the large one goes after three batches, or never.
#[test]
fn sjf_guards_the_oldest_request() {
    for (guard, turn) in [(3, Some(3)), (0, None)] {
        let mut core = core(p("sjf").with("guard_batches", guard), 1);
        push(&mut core, [read(1, 0, 640)]);
        let order: Vec<u32> = (0..8)
            .map(|i| {
                push(&mut core, [read(10 + i, 0, 4)]);
                next(&mut core, Nanos(u64::from(i))).unwrap().0
            })
            .collect();
        assert_eq!(order.iter().position(|file| *file == 1), turn);
    }
}

/// Lane 0 is busy with A: B waits for it, C on lane 1 does not. With room for two, `to` keeps the order of arrival over
/// both lanes, while `fifo` alternates between them.
#[test]
fn to_is_the_order_of_arrival_over_all_lanes() {
    let on = |lane, file| {
        let mut r = read(file, 0, 4);
        r.extent.lane = LaneId(lane);
        r
    };
    let order = |name: &str, depth| {
        let config = CoreConfig { lanes: 2, lane_requests: depth, ..CoreConfig::single_lane(9) };
        let mut core = Core::new(config, &p(name)).unwrap();
        push(&mut core, [on(0, 1), on(0, 2), on(1, 3)]);
        std::iter::from_fn(|| match core.next(Nanos(1)) {
            Next::Dispatch(batch) => Some(batch.extent.file.0),
            Next::Wait { .. } => None,
        })
        .collect::<Vec<u32>>()
    };
    for name in ["to", "to-agg"] {
        assert_eq!(order(name, 1), [1, 3]);
        assert_eq!(order(name, 2), [1, 2, 3]);
    }
    assert_eq!(order("fifo", 2), [1, 3, 2]);
}

#[test]
fn to_agg_has_the_oldest_take_its_neighbours_along() {
    let requests = || {
        [(1, 40), (2, 0), (1, 8), (2, 16), (1, 0), (2, 8), (1, 48), (3, 100)]
            .map(|(file, offset)| read(file, offset, 8))
    };
    let aggregated = served(p("to-agg"), requests());
    assert_eq!(aggregated, [(1, 40, 2), (2, 0, 3), (1, 0, 2), (3, 100, 1)]);
    assert_eq!(aggregated, served(p("fifo").with("merge", "on"), requests()), "one machinery on one lane");
    assert_eq!(served(p("to"), requests()), served(p("fifo"), requests()));
    assert_eq!(served(p("to"), requests()).len(), 8, "one request a batch");
}

/// Windows of 10 ms. Window 0: jobs 5 and 2; window 1: job 1. By window, then job, then file, then offset, merged.
#[test]
fn sw_orders_by_window_then_application() {
    let at = |ms, job, request: Request| Request { arrival: Nanos::from_millis(ms), job: JobId(job), ..request };
    let requests = [
        at(1, 5, read(1, 8, 8)),
        at(2, 5, read(7, 90, 8)),
        at(3, 2, read(9, 0, 8)),
        at(4, 5, Request { op: Op::Write, ..read(1, 400, 8) }),
        at(9, 5, read(1, 0, 8)),
        at(10, 1, read(4, 0, 8)),
    ];
    let mut core = core(p("sw").with("window_ms", 10), 1);
    push(&mut core, requests);
    let order: Vec<_> = std::iter::from_fn(|| next(&mut core, Nanos::from_millis(11))).collect();
    assert_eq!(order, [(9, 0, 1), (1, 0, 2), (1, 400, 1), (7, 90, 1), (4, 0, 1)]);
}

/// The same under the public library's rule: an application's requests keep the order in which they arrived.
#[test]
fn sw_may_keep_the_order_of_arrival_within_an_application() {
    let at = |ms, job, request: Request| Request { arrival: Nanos::from_millis(ms), job: JobId(job), ..request };
    let requests = [
        at(1, 5, read(1, 8, 8)),
        at(2, 5, read(7, 90, 8)),
        at(3, 2, read(9, 0, 8)),
        at(4, 5, Request { op: Op::Write, ..read(1, 400, 8) }),
        at(9, 5, read(1, 0, 8)),
        at(10, 1, read(4, 0, 8)),
    ];
    let by_arrival = p("sw").with("window_ms", 10).with("order_within", "arrival");
    let order = |spec: PolicySpec, cancelled: Option<usize>| {
        let mut core = core(spec, 1);
        let ids = push(&mut core, requests);
        if let Some(at) = cancelled {
            assert_eq!(core.cancel(Nanos::from_millis(11), ids[at]), Cancelled::Removed);
        }
        std::iter::from_fn(|| next(&mut core, Nanos::from_millis(11))).collect::<Vec<_>>()
    };
    let alone = by_arrival.clone().with("merge", "off");
    assert_eq!(order(alone.clone(), None), [(9, 0, 1), (1, 8, 1), (7, 90, 1), (1, 400, 1), (1, 0, 1), (4, 0, 1)]);
    assert_eq!(order(alone, Some(2)), [(1, 8, 1), (7, 90, 1), (1, 400, 1), (1, 0, 1), (4, 0, 1)]);
    let together = [(9, 0, 1), (1, 0, 2), (7, 90, 1), (1, 400, 1), (4, 0, 1)];
    assert_eq!(order(by_arrival, None), together, "the oldest takes along what touches it");
}

/// Two servers with clocks 7 ms apart and different interned identities for the same jobs agree on the order, since
/// windows are cut on the shared clock and jobs are ordered by stable key.
#[test]
fn sw_servers_agree_without_talking() {
    // (shared arrival in ms, key of the job); served by window of 10 ms, then key
    let arrivals = [(8, 300u64), (9, 200), (12, 100), (13, 300), (19, 200)];
    let order = |clock_ms: u64, ids: [u32; 3]| {
        let mut core = core(p("sw").with("window_ms", 10), 1);
        core.event(Nanos::ZERO, Event::SharedClock { offset_ns: clock_ms as i64 * 1_000_000 });
        for (id, key) in ids.into_iter().zip([100, 200, 300]) {
            core.names_mut().name_job(JobId(id), key);
        }
        let key_of = |id: u32| [100, 200, 300][ids.iter().position(|i| *i == id).unwrap()];
        for (i, (shared_ms, key)) in arrivals.into_iter().enumerate() {
            let job = JobId(ids[(key / 100 - 1) as usize]);
            let arrival = Nanos::from_millis(shared_ms - clock_ms);
            push(&mut core, [Request { arrival, job, ..read(i as u32, 0, 4) }]);
        }
        std::iter::from_fn(|| match core.next(Nanos::from_millis(20)) {
            Next::Dispatch(batch) => {
                let job = core.request(batch.parts[0].id).unwrap().job;
                complete(&mut core, Nanos::from_millis(20), &batch);
                Some(key_of(job.0))
            }
            Next::Wait { .. } => None,
        })
        .collect::<Vec<u64>>()
    };
    let here = order(0, [0, 1, 2]);
    assert_eq!(here, [200, 300, 100, 200, 300]);
    assert_eq!(here, order(7, [2, 0, 1]));
}

/// Jobs with lower keys keep arriving within one window; job 9 goes after four batches.
#[test]
fn sw_guards_the_oldest_request() {
    for (order_within, guard, expected) in
        [("offset", 4, [1, 1, 1, 1, 0, 1]), ("arrival", 4, [1, 1, 1, 1, 0, 1]), ("arrival", 0, [1; 6])]
    {
        let mut core = core(p("sw").with("guard_batches", guard).with("order_within", order_within), 1);
        push(&mut core, [Request { job: JobId(9), ..read(0, 0, 4) }]);
        let order: Vec<u32> = (0..6)
            .map(|i| {
                push(&mut core, [Request { job: JobId(1), ..read(1, i * 100, 4) }]);
                next(&mut core, Nanos(1)).unwrap().0
            })
            .collect();
        assert_eq!(order, expected, "{order_within}, {guard}");
    }
}

fn of_job(job: u32, offset: u64, len: u64) -> Request {
    Request { job: JobId(job), ..read(job, offset, len) }
}

fn jobs(core: &mut Core) -> Vec<u32> {
    serve(core).into_iter().map(|s| s.0).collect()
}

/// Job 1's quantum is 8 KiB, job 2's 4. Round 1: job 1 sends two of 4 KiB, job 2 one; round 2 likewise, job 1 is done.
#[test]
fn wfq_serves_by_quanta() {
    let mut core = core(p("wfq").with("quantum_bytes", 4096).with("rules", "big: job=1 {quantum_bytes=8192}"), 1);
    push(&mut core, (0..4).flat_map(|i| [of_job(1, i * 100, 4), of_job(2, i * 100, 4)]));
    assert_eq!(jobs(&mut core), [1, 1, 2, 1, 1, 2, 2, 2]);
}

/// Quantum 4 KiB. Job 3's 10 KiB are paid for in round 3, after two requests of job 2; it precedes job 2's third, since
/// it joined the ring earlier. The 2 KiB left are lost with its empty queue.
#[test]
fn wfq_saves_up_for_large_requests() {
    let mut core = core(p("wfq").with("quantum_bytes", 4096), 1);
    push(&mut core, [of_job(3, 0, 10)]);
    push(&mut core, (0..4).map(|i| of_job(2, i * 100, 4)));
    assert_eq!(jobs(&mut core), [2, 2, 3, 2, 2]);
    push(&mut core, [of_job(3, 0, 6), of_job(2, 0, 4)]);
    assert_eq!(jobs(&mut core), [2, 3], "6 KiB would have been paid for in one round with the 2 KiB");
}

/// A queue that runs dry leaves the ring and rejoins at its end, so leaving and joining never overtakes another queue.
#[test]
fn wfq_newcomers_join_at_the_end() {
    let mut core = core(p("wfq").with("quantum_bytes", 4096), 1);
    push(&mut core, [of_job(1, 0, 4), of_job(2, 0, 4), of_job(3, 0, 4)]);
    let mut order = Vec::new();
    for i in 1..7 {
        let job = next(&mut core, Nanos(1)).unwrap().0;
        order.push(job);
        push(&mut core, [of_job(job, i * 100, 4)]);
    }
    assert_eq!(order, [1, 2, 3, 1, 2, 3]);
}

/// Queues that are always busy share the bytes in proportion to their quanta, whatever the sizes of their requests.
#[test]
fn wfq_shares_bytes_by_weight() {
    let rules = "a: job=1 {quantum_bytes=16384}; b: job=2 {quantum_bytes=32768}; c: * {quantum_bytes=65536}";
    let mut core = core(p("wfq").with("rules", rules), 1);
    let lens = [5, 40, 13];
    let mut bytes = [0u64; 3];
    for i in 0..50 {
        push(&mut core, (1..=3).map(|job| of_job(job, i * 100, lens[job as usize - 1])));
    }
    for i in 50..2050 {
        let job = next(&mut core, Nanos(1)).unwrap().0;
        bytes[job as usize - 1] += lens[job as usize - 1];
        push(&mut core, [of_job(job, i * 100, lens[job as usize - 1])]);
    }
    let share = bytes.map(|b| b as f64 / bytes.iter().sum::<u64>() as f64);
    for (share, want) in share.into_iter().zip([1.0 / 7.0, 2.0 / 7.0, 4.0 / 7.0]) {
        assert!((share - want).abs() < 0.005, "{share} instead of {want}");
    }
}

/// With merging the whole batch is paid for: job 1's 12 KiB in one batch need three rounds.
#[test]
fn wfq_pays_for_what_goes_along() {
    let mut core = core(p("wfq").with("quantum_bytes", 4096).with("merge", "on"), 1);
    push(&mut core, [0, 4, 8].map(|offset| of_job(1, offset, 4)));
    push(&mut core, [0, 100, 200].map(|offset| of_job(2, offset, 4)));
    assert_eq!(serve(&mut core), [(2, 0, 1), (2, 100, 1), (1, 0, 3), (2, 200, 1)]);
}

#[test]
fn wfq_explains_and_refuses() {
    let rules = "big: job=17 & op=read {quantum_bytes=262144}; rest: * {}";
    let core = core(p("wfq").with("rules", rules), 1);
    let who = Who { job: 17, user: 1, client: 2, file: 3, op: Op::Read, naming: Default::default() };
    assert_eq!(core.explain(Nanos::ZERO, &who).unwrap(), "queue of job 17: 262144 bytes a round (rule big)");
    let other = core.explain(Nanos::ZERO, &Who { op: Op::Write, ..who }).unwrap();
    assert_eq!(other, "queue of job 17: 65536 bytes a round (rule rest)");
    for (rules, says) in [
        ("big: job=17 {weight=2}", "rule big has no setting \"weight\"; it has: quantum_bytes"),
        ("big: job=17 {quantum_bytes=1}", "quantum_bytes=1 in rule big is not a number from 512"),
        ("big: job=x {}", "\"x\" in \"job=x\" is not a whole number"),
    ] {
        let refused = Core::new(CoreConfig::single_lane(4), &p("wfq").with("rules", rules));
        let error = refused.err().unwrap().to_string();
        assert!(error.contains(says) && error.contains("policy wfq: rules"), "{error}");
    }
}

/// Serves everything, waiting as long as the policy says, for at most an hour; returns the tokens in order.
fn finish(core: &mut Core, what: &str) -> Vec<RequestId> {
    let (mut now, mut order) = (Nanos::from_millis(1), Vec::new());
    while !core.is_empty() {
        match core.next(now) {
            Next::Dispatch(batch) => {
                order.extend(batch.parts.iter().map(|p| p.id));
                complete(core, now, &batch);
            }
            Next::Wait { until, reason } => {
                assert!(until < Nanos::from_millis(3_600_000), "{what}: {reason:?} until {until:?}");
                now = until;
            }
        }
    }
    order
}

/// The public library never serves lengths above 1 GiB under some of its algorithms.
#[test]
fn every_policy_serves_lengths_above_a_gibibyte() {
    for info in POLICIES {
        for (op, gib) in [(Op::Read, 1), (Op::Write, 3), (Op::Read, 4), (Op::Write, 9_000)] {
            let mut core = core(p(info.name), 2);
            let large = Request { op, ..read(1, 8, (gib << 20) + 1) };
            let ids = push(&mut core, [large, read(2, 0, 4), Request { op, ..read(3, 4, 8 << 20) }]);
            let mut order = finish(&mut core, info.name);
            order.dedup(); // pieces
            order.sort();
            order.dedup();
            assert_eq!(order, ids, "{} {op:?} {gib} GiB", info.name);
        }
    }
}

/// In timeline mode the public library cancels the wrong file's request.
#[test]
fn every_policy_cancels_what_was_named() {
    for info in POLICIES {
        let mut core = core(p(info.name), 2);
        // Same offsets, lengths and arrival times in four files; neighbours within each.
        let requests = (0..4).flat_map(|file| [read(file, 0, 4), read(file, 4, 4), read(file, 8, 4)]);
        let mut ids = push(&mut core, requests);
        for at in [7, 1] {
            assert_eq!(core.cancel(Nanos(1), ids.remove(at)), Cancelled::Removed);
        }
        let mut order = finish(&mut core, info.name);
        order.sort();
        assert_eq!(order, ids, "{}", info.name);
    }
}

/// In the public library a request added right after the start can wait forever.
#[test]
fn every_policy_serves_what_comes_first_at_time_zero() {
    for info in POLICIES {
        let mut core = core(p(info.name), 2);
        assert!(matches!(core.next(Nanos::ZERO), Next::Wait { until: Nanos::MAX, .. }));
        let id = core.push(Nanos::ZERO, &read(1, 0, 4)).unwrap();
        assert_eq!(finish(&mut core, info.name), [id], "{}", info.name);
    }
}
