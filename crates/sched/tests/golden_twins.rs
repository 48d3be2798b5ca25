//! The options of `twins`, worked by hand, and the guarantees of the paper's windows.

use impresario_sched::{
    Batch, Completion, Core, CoreConfig, Event, Extent, FileId, LaneId, Members, Nanos, Next, Op, PolicySpec, Request,
    WaitReason,
};

const MS: u64 = 1_000_000;

fn us(us: u64) -> Nanos {
    Nanos::from_micros(us)
}

/// Windows of a millisecond.
fn twins() -> PolicySpec {
    PolicySpec::named("twins").with("window_us", 1000)
}

fn core(spec: PolicySpec, lanes: u16, lane_requests: u32) -> Core {
    Core::new(CoreConfig { lanes, lane_requests, ..CoreConfig::single_lane(256) }, &spec).unwrap()
}

/// Pushes reads of 4 KiB: (server, file, offset in KiB).
fn push(core: &mut Core, now: Nanos, requests: &[(u16, u32, u64)]) {
    for &(lane, file, offset) in requests {
        let (lane, offset) = (LaneId(lane), offset << 10);
        let extent = Extent { file: FileId(file), lane, file_offset: offset, lane_offset: offset, len: 4096 };
        core.push(now, &Request { arrival: now, ..Request::new(Op::Read, extent) }).unwrap();
    }
}

fn dispatch(core: &mut Core, now: Nanos) -> Batch {
    match core.next(now) {
        Next::Dispatch(batch) => batch,
        wait => panic!("{wait:?} at {now}"),
    }
}

fn complete(core: &mut Core, now: Nanos, batch: &Batch) {
    core.event(now, Event::Completed(Completion::of(batch, now, now)));
}

/// What is dispatched at an instant until there is a wait, each completing at once: (server, file, offset in KiB,
/// requests).
fn serve(core: &mut Core, now: Nanos) -> Vec<(u16, u32, u64, usize)> {
    std::iter::from_fn(|| match core.next(now) {
        Next::Dispatch(batch) => {
            complete(core, now, &batch);
            Some((batch.extent.lane.0, batch.extent.file.0, batch.extent.lane_offset >> 10, batch.parts.len()))
        }
        Next::Wait { .. } => None,
    })
    .collect()
}

fn wait(core: &mut Core, now: Nanos) -> (Nanos, WaitReason) {
    match core.next(now) {
        Next::Wait { until, reason } => (until, reason),
        Next::Dispatch(batch) => panic!("{batch:?} at {now}"),
    }
}

/// The public library has one queue more than servers; it is always empty and wastes its windows. Here each of three
/// servers has every third window.
#[test]
fn no_window_is_wasted() {
    let mut core = core(twins(), 3, 1);
    for window in 0..30u64 {
        let now = Nanos(window * MS);
        push(&mut core, now, &[(0, 1, window), (1, 1, window), (2, 1, window)].map(|(l, f, o)| (l, f, 100 * o)));
        let served = serve(&mut core, now);
        assert!(!served.is_empty() && served.iter().all(|s| u64::from(s.0) == window % 3), "window {window}");
    }
}

/// No wake-up for windows of servers without requests.
#[test]
fn the_next_look_is_at_the_next_window_with_work() {
    let mut core = core(twins(), 200, 1);
    let at = |lane: u64, round: u64| Nanos((200 * round + lane) * MS);
    push(&mut core, Nanos(0), &[(130, 1, 0), (7, 1, 0)]);
    assert_eq!(wait(&mut core, Nanos(MS / 2)), (at(7, 0), WaitReason::Window));
    push(&mut core, Nanos(MS), &[(3, 1, 0)]);
    assert_eq!(wait(&mut core, Nanos(MS)), (at(3, 0), WaitReason::Window), "what comes is served at its window");
    assert_eq!(serve(&mut core, at(3, 0)).len(), 1);
    assert_eq!(wait(&mut core, at(3, 0)), (at(7, 0), WaitReason::Window));
    assert_eq!(serve(&mut core, at(7, 0)).len(), 1);
    assert_eq!(wait(&mut core, at(7, 0)), (at(130, 0), WaitReason::Window));
    assert_eq!(wait(&mut core, at(131, 0)), (at(130, 1), WaitReason::Window), "a window that was missed comes again");
    assert_eq!(serve(&mut core, at(130, 1)), [(130, 1, 0, 1)]);
}

/// A node with the paper's timer and order of servers.
fn as_published(lanes: u16, node_rank: u32, started: Nanos) -> Core {
    let config = CoreConfig { lanes, node_rank, started, ..CoreConfig::single_lane(256) };
    let mut core = Core::new(config, &twins().with("timer", "local").with("order", "permutation")).unwrap();
    // The time of day is of no consequence to it.
    core.event(started, Event::SharedClock { offset_ns: 7_345_678_901_234 });
    core
}

/// The server that a node serves at an instant at which all of its servers have requests.
fn served_at(core: &mut Core, lanes: u16, now: Nanos) -> u16 {
    (0..lanes).for_each(|lane| push(core, now, &[(lane, 1, now.0 % 1_000_000 * 4)]));
    let mut servers: Vec<u16> = serve(core, now).iter().map(|served| served.0).collect();
    servers.dedup();
    let [server] = servers[..] else { panic!("{servers:?} at {now}") };
    server
}

/// Algorithm 1 with the translation of IV-B. The first window begins when the node starts (lines 1 and 3), lasts for
/// `windowSize` (line 4), is waited through although others have work (line 9), and is followed by that of the next
/// server (lines 12 and 3); the N-th node goes through the N-th permutation of the servers.
#[test]
fn the_papers_timer_and_permutation_give_its_windows() {
    let permutations = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 1, 2]];
    for (rank, order) in permutations.into_iter().enumerate() {
        let started = Nanos(rank as u64 * 123_456_789 + 17);
        let mut core = as_published(3, rank as u32, started);
        for window in 0..9 {
            let begins = started.0 + window * MS;
            for now in [begins, begins + MS / 2, begins + MS - 1] {
                assert_eq!(
                    served_at(&mut core, 3, Nanos(now)),
                    order[window as usize % 3],
                    "window {window} of {rank}"
                );
                assert_eq!(wait(&mut core, Nanos(now)), (Nanos(begins + MS), WaitReason::Window));
            }
        }
    }
}

/// The paper's example: of two nodes, the first goes through S0, S1, the second through S1, S0. Started together they are at
/// different servers in every window; started half a window apart, half of the time at the same one.
#[test]
fn nodes_with_timers_of_their_own_are_as_far_apart_as_their_starts() {
    let together = |apart: u64| {
        let mut nodes = [as_published(2, 0, Nanos(5 * MS)), as_published(2, 1, Nanos(5 * MS + apart))];
        let at = |nth: u64| Nanos(20 * MS + nth * MS / 10);
        let servers = |now| nodes.each_mut().map(|core| served_at(core, 2, now));
        (0..40).map(at).map(servers).filter(|[a, b]| a == b).count()
    };
    assert_eq!([together(0), together(MS / 2), together(MS)], [0, 20, 40]);
}

/// Two nodes whose clocks differ by hours are at different servers in every window, and switch at the same instant.
#[test]
fn nodes_are_aligned_by_the_shared_clock() {
    let offsets_ns = [0, 7_345_678_901_234i64];
    let mut nodes: Vec<Core> = (0..2)
        .map(|node_rank| {
            let config = CoreConfig { lanes: 2, node_rank, ..CoreConfig::single_lane(256) };
            let mut core = Core::new(config, &twins()).unwrap();
            let offset_ns = offsets_ns[node_rank as usize];
            core.event(Nanos::ZERO, Event::SharedClock { offset_ns });
            core
        })
        .collect();
    for window in 8_000_000..8_000_010u64 {
        for at in [0, MS - 1] {
            let servers: Vec<u16> = nodes
                .iter_mut()
                .zip(offsets_ns)
                .map(|(core, offset)| {
                    let local = Nanos(window * MS + at - offset as u64);
                    push(core, local, &[(0, 1, window * 8 + at % 2 * 4), (1, 1, window * 8 + at % 2 * 4)]);
                    serve(core, local)[0].0
                })
                .collect();
            assert_eq!(servers, [(window % 2) as u16, ((window + 1) % 2) as u16]);
        }
    }
}

#[test]
fn in_flight_per_server_is_a_limit_of_its_own() {
    for (option, most) in [(0, 4), (1, 1), (3, 3), (9, 4)] {
        let mut core = core(twins().with("in_flight_per_server", option), 2, 4);
        push(&mut core, Nanos(0), &[0, 100, 200, 300, 400, 500].map(|offset| (0, 1, offset)));
        let flying: Vec<Batch> = std::iter::from_fn(|| match core.next(Nanos(0)) {
            Next::Dispatch(batch) => Some(batch),
            Next::Wait { until, reason } => {
                // Until its next window: the other server has no requests.
                assert_eq!((until, reason), (us(2000), WaitReason::LanesBusy));
                None
            }
        })
        .collect();
        assert_eq!(flying.len(), most);
        complete(&mut core, Nanos(1), &flying[0]);
        dispatch(&mut core, Nanos(1));
        // A switch to a policy without the limit restores the configured one.
        core.reconfigure(Nanos(1), &PolicySpec::named("fifo")).unwrap();
        assert_eq!(core.status().lanes[0].limit_batches, Some(4));
    }
}

/// What is merged below the scheduler is of one window: batches say which.
#[test]
fn batches_carry_the_number_of_their_window() {
    let window = |core: &mut Core, at| {
        push(core, at, &[(0, 1, at.0 / MS), (1, 1, at.0 / MS)]);
        let batch = dispatch(core, at);
        complete(core, at, &batch);
        (batch.extent.lane.0, batch.window)
    };
    for timer in ["shared", "local"] {
        let mut core = core(twins().with("timer", timer), 2, 4);
        let first = window(&mut core, us(0));
        assert!(first.1 > 0);
        assert_eq!(window(&mut core, us(999)), first, "the same");
        assert_eq!(window(&mut core, us(1000)), (1 - first.0, first.1 + 1));
        // The next one of this server is not the same.
        assert_eq!(window(&mut core, us(2000)), (first.0, first.1 + 2));
        core.reconfigure(us(2000), &PolicySpec::named("fifo")).unwrap();
        assert_eq!(window(&mut core, us(2500)).1, 0, "there are none");
    }
}

/// Server 0's stripes of one file touch in its own offsets, whatever is between them in the file.
#[test]
fn merging_goes_by_the_servers_own_offsets() {
    let striped = |stripe: u64| {
        // Stripes of 4 KiB over two servers: stripe 0, 2, 4 … are bytes 0, 4096, 8192 … of server 0.
        let lane = LaneId((stripe % 2) as u16);
        let (file_offset, lane_offset) = (stripe * 4096, stripe / 2 * 4096);
        Request::new(Op::Read, Extent { file: FileId(1), lane, file_offset, lane_offset, len: 4096 })
    };
    for (merge, batches) in [("on", vec![3]), ("off", vec![1, 1, 1])] {
        let mut core = core(twins().with("merge", merge), 2, 1);
        for stripe in [2, 0, 1, 3, 4] {
            core.push(Nanos(0), &striped(stripe)).unwrap();
        }
        let parts: Vec<usize> = serve(&mut core, Nanos(0)).iter().map(|s| s.3).collect();
        assert_eq!(parts, batches, "server 0 in its window");
        assert_eq!(serve(&mut core, us(1000)).iter().map(|s| s.3).sum::<usize>(), 2, "server 1 in the next");
    }
}

/// A scan: files by key, ascending from the end of the last batch, wrapping to the lowest.
#[test]
fn offset_order_is_a_scan() {
    let mut core = core(twins().with("order_within", "offset"), 2, 1);
    push(&mut core, Nanos(0), &[(0, 2, 40), (0, 1, 80), (0, 3, 0), (0, 2, 20)]);
    let first = dispatch(&mut core, Nanos(0));
    assert_eq!((first.extent.file.0, first.extent.lane_offset >> 10), (1, 80));
    // Behind the scan, ahead in the same file, and lower in a later file.
    push(&mut core, Nanos(0), &[(0, 1, 0), (0, 1, 200), (0, 2, 0)]);
    complete(&mut core, Nanos(0), &first);
    let order: Vec<_> = serve(&mut core, Nanos(0)).iter().map(|s| (s.1, s.2)).collect();
    assert_eq!(order, [(1, 200), (2, 0), (2, 20), (2, 40), (3, 0), (1, 0)]);
}

#[test]
fn offset_order_merges_when_asked_and_guards_the_oldest() {
    let spec = twins().with("order_within", "offset").with("merge", "on").with("guard_batches", 2);
    let mut core = core(spec, 2, 1);
    push(&mut core, Nanos(0), &[(0, 1, 8), (0, 1, 0), (0, 1, 4)]);
    assert_eq!(serve(&mut core, Nanos(0)), [(0, 1, 0, 3)]);
    // File 1 keeps ascending. Once its request at 100 has gone, file 9's is the oldest, and waits for two more batches.
    push(&mut core, Nanos(1), &[(0, 1, 100), (0, 9, 0)]);
    let mut order = Vec::new();
    for i in 2..7 {
        let batch = dispatch(&mut core, Nanos(1));
        order.push(batch.extent.file.0);
        complete(&mut core, Nanos(1), &batch);
        push(&mut core, Nanos(1), &[(0, 1, i * 100)]);
    }
    assert_eq!(order, [1, 1, 1, 9, 1]);
}

/// Server 0's window: its own first; then, since it has none, server 1, whose window is next, then server 2. In server
/// 1's window: 1, 2, 0.
#[test]
fn work_conserving_serves_the_next_windows_servers() {
    let mut core = core(twins().with("work_conserving", "on"), 3, 1);
    let requests = [(2, 1, 0), (1, 1, 0), (0, 1, 0), (2, 1, 100), (1, 1, 100)];
    push(&mut core, Nanos(0), &requests);
    let lanes = |served: Vec<(u16, u32, u64, usize)>| served.iter().map(|s| s.0).collect::<Vec<u16>>();
    assert_eq!(lanes(serve(&mut core, Nanos(0))), [0, 1, 1, 2, 2]);
    push(&mut core, us(1000), &requests);
    assert_eq!(lanes(serve(&mut core, us(1000))), [1, 1, 2, 2, 0]);
    // Full servers are skipped; then there is nothing to do before an event or the next window.
    push(&mut core, us(2000), &requests);
    let flying: Vec<u16> = (0..3).map(|_| dispatch(&mut core, us(2000)).extent.lane.0).collect();
    assert_eq!(flying, [2, 0, 1]);
    assert_eq!(wait(&mut core, us(2000)), (us(3000), WaitReason::LanesBusy));
}

/// Others are served only while server 0, whose window it is, has neither requests nor batches.
#[test]
fn work_conserving_while_idle() {
    let mut core = core(twins().with("work_conserving", "idle"), 3, 1);
    push(&mut core, Nanos(0), &[(0, 1, 0), (1, 1, 0), (2, 1, 0)]);
    let first = dispatch(&mut core, Nanos(0));
    assert_eq!(first.extent.lane, LaneId(0));
    assert_eq!(wait(&mut core, Nanos(0)), (us(1000), WaitReason::LanesBusy));
    complete(&mut core, us(10), &first);
    assert_eq!(dispatch(&mut core, us(10)).extent.lane, LaneId(1));
    push(&mut core, us(10), &[(0, 1, 100)]);
    assert_eq!(dispatch(&mut core, us(10)).extent.lane, LaneId(0));
    assert_eq!(wait(&mut core, us(10)), (us(1000), WaitReason::LanesBusy));
}

fn anticipating() -> PolicySpec {
    twins().with("order_within", "offset").with("anticipation_us", 200)
}

/// The stream of file 1 ended at 4 KiB; instead of serving file 2 the server is held for the stream's next request,
/// which arrives.
#[test]
fn anticipation_holds_for_the_streams_next_request() {
    let mut core = core(anticipating(), 2, 1);
    push(&mut core, Nanos(0), &[(0, 1, 0), (0, 2, 0)]);
    let first = dispatch(&mut core, Nanos(0));
    assert_eq!(first.extent.file.0, 1);
    complete(&mut core, us(100), &first);
    assert_eq!(wait(&mut core, us(100)), (us(300), WaitReason::Hold));
    // Unrelated arrivals do not end the hold, nor does a request behind the stream's end.
    push(&mut core, us(150), &[(0, 3, 0), (0, 1, 0)]);
    assert_eq!(wait(&mut core, us(150)), (us(300), WaitReason::Hold));
    push(&mut core, us(200), &[(0, 1, 8)]);
    let second = dispatch(&mut core, us(200));
    assert_eq!((second.extent.file.0, second.extent.lane_offset >> 10), (1, 8), "a small hole is no break");
    complete(&mut core, us(250), &second);
    assert_eq!(wait(&mut core, us(250)), (us(450), WaitReason::Hold));
    assert_eq!(dispatch(&mut core, us(450)).extent.file.0, 2, "it did not come");
}

/// No hold if the continuation is already queued, if other batches are in flight, after a failure, or outside the
/// server's window; and no hold extends beyond it.
#[test]
fn anticipation_knows_when_not_to_hold() {
    let mut one = core(anticipating(), 2, 1);
    push(&mut one, Nanos(0), &[(0, 1, 0), (0, 1, 4), (0, 2, 0)]);
    let first = dispatch(&mut one, Nanos(0));
    complete(&mut one, us(10), &first);
    let second = dispatch(&mut one, us(10));
    assert_eq!(second.extent.lane_offset, 4096);
    let failed = Completion { errno: 5, ..Completion::of(&second, us(10), us(20)) };
    one.event(us(20), Event::Completed(failed));
    let third = dispatch(&mut one, us(20));
    complete(&mut one, us(900), &third);
    push(&mut one, us(900), &[(0, 7, 0)]);
    assert_eq!(wait(&mut one, us(900)), (us(1000), WaitReason::Hold), "until the window ends");
    assert_eq!(wait(&mut one, us(1000)), (us(2000), WaitReason::Window));

    let mut two = core(anticipating(), 2, 2);
    push(&mut two, Nanos(0), &[(0, 1, 0), (0, 2, 0), (0, 3, 0)]);
    let [first, _second] = [dispatch(&mut two, Nanos(0)), dispatch(&mut two, Nanos(0))];
    complete(&mut two, us(10), &first);
    assert_eq!(dispatch(&mut two, us(10)).extent.file.0, 3, "the server is busy with another batch");
}

/// In order of arrival a server is held only against the other servers.
#[test]
fn anticipation_before_turning_to_other_servers() {
    let spec = twins().with("work_conserving", "on").with("anticipation_us", 200);
    let mut core = core(spec, 2, 1);
    push(&mut core, Nanos(0), &[(0, 1, 0), (1, 1, 0)]);
    let first = dispatch(&mut core, Nanos(0));
    // Server 1 is free and has work: it is served while server 0 is busy.
    let second = dispatch(&mut core, Nanos(0));
    assert_eq!((first.extent.lane.0, second.extent.lane.0), (0, 1));
    complete(&mut core, us(10), &second);
    push(&mut core, us(20), &[(1, 2, 0)]);
    complete(&mut core, us(30), &first);
    assert_eq!(wait(&mut core, us(30)), (us(230), WaitReason::Hold));
    push(&mut core, us(50), &[(0, 1, 4)]);
    assert_eq!(dispatch(&mut core, us(50)).extent.lane.0, 0);
    assert_eq!(dispatch(&mut core, us(50)).extent.lane.0, 1);

    let refused = Core::new(CoreConfig { lanes: 2, ..CoreConfig::single_lane(4) }, &twins().with("anticipation_us", 5));
    let error = refused.err().unwrap().to_string();
    assert!(
        error.contains("anticipation_us = \"5\" is not 0: without order_within=offset or work_conserving"),
        "{error}"
    );
}

/// In 300 rounds file 1 is served while file 9 waits. If file 1 continues within 50 µs it is held for in every round;
/// if it never does, four times, and then once in 64 rounds.
#[test]
fn anticipation_switches_itself_off_where_it_does_not_pay() {
    let holds = |goes_on: bool| {
        let mut core = core(anticipating().with("window_us", 2_000_000), 2, 1);
        // A failure cancels the expectation.
        let fail = |core: &mut Core, now, batch: &Batch| {
            core.event(now, Event::Completed(Completion { errno: 5, ..Completion::of(batch, now, now) }));
        };
        let (mut held, mut now) = (0, Nanos(0));
        for i in 0..300u64 {
            now += us(10);
            push(&mut core, now, &[(0, 1, i * 100)]);
            let batch = dispatch(&mut core, now);
            complete(&mut core, now, &batch);
            push(&mut core, now, &[(0, 9, i * 100)]);
            let mut next = core.next(now);
            if let Next::Wait { until, reason } = next {
                assert_eq!((until, reason), (now + us(200), WaitReason::Hold));
                held += 1;
                if goes_on {
                    now += us(50);
                    push(&mut core, now, &[(0, 1, i * 100 + 4)]);
                    let batch = dispatch(&mut core, now);
                    assert_eq!(batch.extent.file.0, 1);
                    fail(&mut core, now, &batch);
                } else {
                    now = until;
                }
                next = core.next(now);
            }
            let Next::Dispatch(batch) = next else { panic!("{next:?}") };
            assert_eq!(batch.extent.file.0, 9);
            fail(&mut core, now, &batch);
        }
        held
    };
    assert_eq!(holds(true), 300);
    assert_eq!(holds(false), 4 + (300 - 4) / 64);
}

/// A change of parameters keeps the scan's position, and the empty account of a stream that did not pay.
#[test]
fn a_change_of_parameters_forgets_nothing() {
    let ordered = twins().with("order_within", "offset");
    let order_after = |spec: PolicySpec| {
        let mut core = core(ordered.clone(), 2, 1);
        push(&mut core, Nanos(0), &[(0, 1, 80)]);
        let first = dispatch(&mut core, Nanos(0));
        push(&mut core, Nanos(0), &[(0, 1, 0), (0, 1, 200)]);
        core.reconfigure(Nanos(0), &spec).unwrap();
        complete(&mut core, Nanos(0), &first);
        serve(&mut core, Nanos(0)).iter().map(|s| s.2).collect::<Vec<_>>()
    };
    assert_eq!(order_after(ordered.clone().with("window_us", 2000)), [200, 0], "from 84 KiB on, then round");
    assert_eq!(order_after(twins()), [0, 200], "another order begins anew");

    let mut core = core(anticipating().with("window_us", 2_000_000), 2, 1);
    let holds = |core: &mut Core, rounds: std::ops::Range<u64>| {
        let mut held = 0;
        for i in rounds {
            let mut now = us(i * 1000);
            push(core, now, &[(0, 1, i * 100), (0, 9, i * 100)]);
            while let Next::Dispatch(batch) = core.next(now) {
                complete(core, now, &batch);
            }
            held += u32::from(matches!(core.next(now), Next::Wait { reason: WaitReason::Hold, .. }));
            now += us(500);
            while let Next::Dispatch(batch) = core.next(now) {
                core.event(now, Event::Completed(Completion { errno: 5, ..Completion::of(&batch, now, now) }));
            }
        }
        held
    };
    let before = holds(&mut core, 0..40);
    assert!((1..20).contains(&before), "held for {before} times, then no longer");
    core.reconfigure(us(40_000), &anticipating().with("window_us", 1_999_000)).unwrap();
    assert!(holds(&mut core, 40..60) <= 1, "the account is still empty");
}

/// Of four nodes two are gone. Before the agreed instant the two that are left always meet at the same server; from then on
/// never, and no window is cut off or lost in between.
#[test]
fn nodes_that_are_left_do_not_meet() {
    let node = |node_rank| {
        let config = CoreConfig { lanes: 2, node_rank, ..CoreConfig::single_lane(256) };
        Core::new(config, &twins()).unwrap()
    };
    let (mut first, mut third) = (node(0), node(2));
    for (rank, core) in [(0, &mut first), (1, &mut third)] {
        let from_shared = Nanos(10 * MS);
        core.event(Nanos(3 * MS), Event::Members(Members { from_shared, rank, absent: Vec::new() }));
    }
    for window in 3..20 {
        let now = Nanos(window * MS + MS / 3);
        let [a, b] = [&mut first, &mut third].map(|core| served_at(core, 2, now));
        assert_eq!(a == b, window < 10, "window {window}");
    }
}

/// A server that hangs loses its window to the others at the agreed instant; what is asked of it is served whenever it has room.
#[test]
fn a_server_that_hangs_has_no_window() {
    let mut core = core(twins(), 3, 1);
    let absent = vec![LaneId(1)];
    core.event(Nanos(0), Event::Members(Members { from_shared: Nanos(6 * MS), rank: 0, absent: absent.clone() }));
    push(&mut core, Nanos(4 * MS), &[(1, 1, 0), (2, 1, 0)]);
    assert_eq!(serve(&mut core, Nanos(4 * MS)), [(1, 1, 0, 1)], "it still has its window");
    // The window of server 2 would come at 5 ms, at 8 ms and so on; from 6 ms on it has every second one.
    assert_eq!(wait(&mut core, Nanos(4 * MS)), (Nanos(5 * MS), WaitReason::Window));
    assert_eq!(serve(&mut core, Nanos(5 * MS)).len(), 1);
    push(&mut core, Nanos(5 * MS + 1), &[(1, 1, 100)]);
    assert_eq!(wait(&mut core, Nanos(5 * MS + 1)), (Nanos(6 * MS), WaitReason::Window), "the agreed instant");
    assert_eq!(serve(&mut core, Nanos(6 * MS)), [(1, 1, 100, 1)], "it needs no window any more");
    for window in 6..20u64 {
        let now = Nanos(window * MS);
        push(&mut core, now, &[(0, 1, 1000 + 4 * window), (2, 1, 1000 + 4 * window)]);
        let mut served: Vec<u16> = serve(&mut core, now).iter().map(|served| served.0).collect();
        served.dedup();
        assert_eq!(served, [if window % 2 == 0 { 0 } else { 2 }], "window {window}");
    }
    // It survives a change of parameters, and ends as it began.
    core.reconfigure(Nanos(20 * MS), &twins().with("merge", "on")).unwrap();
    push(&mut core, Nanos(20 * MS), &[(1, 1, 200)]);
    assert!(serve(&mut core, Nanos(20 * MS)).iter().any(|served| served.0 == 1));
    core.event(Nanos(20 * MS), Event::Members(Members { from_shared: Nanos(20 * MS), rank: 0, absent: Vec::new() }));
    push(&mut core, Nanos(20 * MS), &[(1, 1, 300)]);
    assert!(serve(&mut core, Nanos(20 * MS)).iter().all(|served| served.0 != 1), "window 20 is that of server 2");
}
