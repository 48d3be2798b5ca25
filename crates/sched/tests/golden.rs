//! The policies' rules, worked by hand.

use impresario_sched::{
    Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, LaneId, LinearCost, Nanos, Next, Op, PolicySpec,
    Request,
};

/// A core whose TTP is 10 ms and 1 ms per KiB, one batch in flight per lane.
fn core(spec: PolicySpec, lanes: u16, node_rank: u32) -> Core {
    let linear = LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 1_000_000_000_u64.div_ceil(1024) };
    let cost = CostModel::new(linear, linear);
    Core::new(CoreConfig { lanes, node_rank, cost, ..CoreConfig::single_lane(64) }, &spec).unwrap()
}

/// Pushes reads of (file, offset in KiB, length in KiB) on lane 0, all at time zero.
fn push(core: &mut Core, requests: &[(u32, u64, u64)]) {
    for &(file, offset, len) in requests {
        let (offset, len) = (offset << 10, len << 10);
        let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
        core.push(Nanos::ZERO, &Request::new(Op::Read, extent)).unwrap();
    }
}

/// Serves until nothing is left, each batch taking a millisecond: (file, offset in KiB, requests).
fn serve(core: &mut Core) -> Vec<(u32, u64, usize)> {
    let (mut now, mut served) = (Nanos::ZERO, Vec::new());
    while let Next::Dispatch(batch) = core.next(now) {
        served.push((batch.extent.file.0, batch.extent.lane_offset >> 10, batch.parts.len()));
        let end = now + Nanos::from_millis(1);
        core.event(end, Event::Completed(Completion::of(&batch, now, end)));
        now = end;
    }
    served
}

fn served(spec: PolicySpec, requests: &[(u32, u64, u64)]) -> Vec<(u32, u64, usize)> {
    let mut core = core(spec, 1, 0);
    push(&mut core, requests);
    serve(&mut core)
}

const MIXED: &[(u32, u64, u64)] =
    &[(1, 40, 8), (2, 0, 8), (1, 8, 8), (2, 16, 8), (1, 0, 8), (2, 8, 8), (1, 48, 8), (3, 100, 8)];

#[test]
fn fifo_serves_in_order_of_arrival() {
    let order = served(PolicySpec::named("fifo"), MIXED);
    assert_eq!(order, MIXED.iter().map(|r| (r.0, r.1, 1)).collect::<Vec<_>>());
    assert_eq!(served(PolicySpec::named("none"), MIXED), order);
}

#[test]
fn merging_fifo_takes_the_neighbours_along() {
    let order = served(PolicySpec::named("fifo").with("merge", "on"), MIXED);
    assert_eq!(order, [(1, 40, 2), (2, 0, 3), (1, 0, 2), (3, 100, 1)]);
}

#[test]
fn without_statistics_the_same_is_decided_and_nothing_is_counted() {
    for statistics in [true, false] {
        let config = CoreConfig { statistics, ..CoreConfig::single_lane(64) };
        let mut core = Core::new(config, &PolicySpec::named("fifo").with("merge", "on")).unwrap();
        push(&mut core, MIXED);
        assert_eq!(serve(&mut core), [(1, 40, 2), (2, 0, 3), (1, 0, 2), (3, 100, 1)]);
        assert_eq!(core.status().statistics.completed, if statistics { 8 } else { 0 });
    }
}

#[test]
fn a_wait_ends_with_the_first_hold() {
    let mut core = core(PolicySpec::named("fifo"), 2, 0);
    push(&mut core, &[(1, 0, 8)]);
    core.hold(LaneId(0), Nanos(500));
    core.hold(LaneId(1), Nanos(300));
    for (now, end) in [(0, 300), (300, 500)] {
        assert!(matches!(core.next(Nanos(now)), Next::Wait { until, .. } if until == Nanos(end)), "at {now}");
    }
    assert!(matches!(core.next(Nanos(500)), Next::Dispatch(_)));
}

/// Quantum 2: file 1 sends its oldest run (40, 48) and has spent its turn; file 2 sends two of its run of three; file 3
/// its only request and is dropped; then file 1's other run; then the rest of file 2.
#[test]
fn hbrr_goes_round_the_files_by_quanta() {
    let order = served(PolicySpec::named("hbrr").with("quantum_requests", 2), MIXED);
    assert_eq!(order, [(1, 40, 2), (2, 0, 2), (3, 100, 1), (1, 0, 2), (2, 16, 1)]);
}

/// One batch per queue and pass, queues by oldest arrival, lowest offset first: agios-2013, III.
#[test]
fn mlf_sends_one_batch_of_each_file_in_a_pass() {
    let order = served(PolicySpec::named("mlf").with("window_us", 0), MIXED);
    assert_eq!(order, [(1, 0, 2), (2, 0, 3), (3, 100, 1), (1, 40, 2)]);
}

/// The dedicated window keeps the head on a file: its second run follows its first.
#[test]
fn mlf_stays_with_a_file_for_its_window() {
    let order = served(PolicySpec::named("mlf"), MIXED);
    assert_eq!(order, [(1, 0, 2), (1, 40, 2), (2, 0, 3), (3, 100, 1)]);
}

/// TTP(8 KiB) = 18 ms a pass. A lone 64 KiB request costs 74 ms and needs ⌈74/18⌉ = 5 passes; eight 8 KiB requests of
/// file 2 that do not touch cost 18 ms each and go one per pass. So the large one, although it arrived first, follows
/// four small ones and goes in pass 5 before the fifth.
#[test]
fn mlf_lets_small_requests_pass_until_the_quantum_has_grown() {
    let mut requests = vec![(1, 0, 64)];
    requests.extend((0..8).map(|i| (2, i * 100, 8)));
    let order = served(PolicySpec::named("mlf").with("window_us", 0), &requests);
    assert_eq!(order[..5], [(2, 0, 1), (2, 100, 1), (2, 200, 1), (2, 300, 1), (1, 0, 1)]);
}

/// The same bytes as one virtual request of eight parts have eight quanta and go in the first pass.
#[test]
fn mlf_virtual_requests_own_the_sum_of_their_parts_quanta() {
    let mut requests: Vec<_> = (0..8).map(|i| (1, i * 8, 8)).collect();
    requests.push((2, 0, 8));
    let order = served(PolicySpec::named("mlf").with("window_us", 0), &requests);
    assert_eq!(order, [(1, 0, 8), (2, 0, 1)]);
}

/// With a pass of 100 µs nothing goes before the first pass has ended, and the large request waits for its fifth.
#[test]
fn mlf_passes_may_take_time() {
    let mut core = core(PolicySpec::named("mlf").with("pass_us", 100), 1, 0);
    push(&mut core, &[(1, 0, 8), (2, 0, 64)]);
    let at = |us| Nanos::from_micros(us);
    assert!(matches!(core.next(at(0)), Next::Wait { until, .. } if until == at(100)));
    let Next::Dispatch(first) = core.next(at(100)) else { panic!() };
    assert_eq!(first.extent.file, FileId(1));
    core.event(at(110), Event::Completed(Completion::of(&first, at(100), at(110))));
    assert!(matches!(core.next(at(110)), Next::Wait { until, .. } if until == at(500)));
    let Next::Dispatch(second) = core.next(at(500)) else { panic!() };
    assert_eq!(second.extent.file, FileId(2));
}

/// The guard: a file whose low offsets keep coming serves its high one after `guard_batches` batches.
#[test]
fn mlf_guards_the_oldest_request_of_a_file() {
    let mut core = core(PolicySpec::named("mlf").with("guard_batches", 3), 1, 0);
    push(&mut core, &[(1, 9_000, 8)]);
    push(&mut core, &[(1, 0, 8)]);
    let mut now = Nanos::ZERO;
    let mut served = Vec::new();
    for i in 1..6 {
        let Next::Dispatch(batch) = core.next(now) else { panic!() };
        served.push(batch.extent.lane_offset >> 10);
        let end = now + Nanos::from_millis(1);
        core.event(end, Event::Completed(Completion::of(&batch, now, end)));
        push(&mut core, &[(1, i * 100, 8)]);
        now = end;
    }
    assert_eq!(served, [0, 100, 200, 9_000, 300]);
}

/// Algorithm 1 of twins-2017: only the window's server is served, even if others have work; with the rotation,
/// node 1 begins at server 1.
#[test]
fn twins_waits_for_its_windows_server() {
    for (rank, order) in [(0, [0u16, 1, 2]), (1, [1, 2, 0]), (5, [2, 0, 1])] {
        let mut core = core(PolicySpec::named("twins").with("window_us", 1000), 3, rank);
        for lane in [0u16, 0, 1, 2] {
            let extent = Extent { file: FileId(1), lane: LaneId(lane), file_offset: 0, lane_offset: 0, len: 1024 };
            core.push(Nanos::ZERO, &Request::new(Op::Read, extent)).unwrap();
        }
        for (window, lane) in order.into_iter().enumerate() {
            let start = Nanos::from_millis(window as u64);
            for _ in 0..if lane == 0 { 2 } else { 1 } {
                let Next::Dispatch(batch) = core.next(start) else { panic!("window {window} of node {rank}") };
                assert_eq!(batch.extent.lane, LaneId(lane));
                core.event(start, Event::Completed(Completion::of(&batch, start, start)));
            }
            let next = core.next(start + Nanos(5));
            if window < 2 {
                let end = start + Nanos::from_millis(1);
                assert!(matches!(next, Next::Wait { until, .. } if until == end), "{next:?}");
            } else {
                assert!(matches!(next, Next::Wait { until: Nanos::MAX, .. }), "nothing queued: no timer");
            }
        }
    }
}

/// Windows follow the shared clock, not the local one.
#[test]
fn twins_windows_follow_the_shared_clock() {
    let mut core = core(PolicySpec::named("twins").with("window_us", 1000), 2, 0);
    core.event(Nanos::ZERO, Event::SharedClock { offset_ns: 1_400_000 });
    let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 1024 };
    core.push(Nanos::ZERO, &Request::new(Op::Read, extent)).unwrap();
    let wait = core.next(Nanos::ZERO);
    assert!(matches!(wait, Next::Wait { until, .. } if until == Nanos::from_micros(600)), "{wait:?}");
    assert!(matches!(core.next(Nanos::from_micros(600)), Next::Dispatch(_)));
}

/// Barriers keep their order against what they cover and pass the policy by.
#[test]
fn a_sync_waits_for_older_writes_only() {
    let mut core = core(PolicySpec::named("mlf"), 1, 0);
    let at = |op, offset, len| {
        let (file, lane) = (FileId(1), LaneId(0));
        Request::new(op, Extent { file, lane, file_offset: offset, lane_offset: offset, len })
    };
    let write = core.push(Nanos::ZERO, &at(Op::Write, 0, 10)).unwrap();
    let sync = core.push(Nanos::ZERO, &at(Op::Sync, 0, u64::MAX)).unwrap();
    let read = core.push(Nanos::ZERO, &at(Op::Read, 50, 10)).unwrap();
    let mut order = Vec::new();
    while let Next::Dispatch(batch) = core.next(Nanos::ZERO) {
        order.push(batch.parts[0].id);
        core.event(Nanos::ZERO, Event::Completed(Completion::of(&batch, Nanos::ZERO, Nanos::ZERO)));
    }
    assert!(order.contains(&read));
    let place = |id| order.iter().position(|o| *o == id);
    assert!(place(write) < place(sync));
}
