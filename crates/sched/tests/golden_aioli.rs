//! What `mlf` and `aioli` take from aioli-2006, part 2, worked by hand.

use impresario_sched::{
    ClientId, Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, JobId, LaneId, LinearCost, Nanos, Next,
    Op, PolicySpec, Request, WaitReason,
};

/// One lane that serves one batch at a time; TTP is 10 ms and 1 ms per KiB.
struct Bench {
    core: Core,
    now: Nanos,
}

impl Bench {
    fn new(spec: PolicySpec) -> Bench {
        let linear = LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 1_000_000_000_u64.div_ceil(1024) };
        let cost = CostModel::new(linear, linear);
        Bench { core: Core::new(CoreConfig { cost, ..CoreConfig::single_lane(256) }, &spec).unwrap(), now: Nanos::ZERO }
    }

    fn push(&mut self, op: Op, file: u32, offset_kib: u64, len_kib: u64) {
        let (offset, len) = (offset_kib << 10, len_kib << 10);
        let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
        let request = Request { arrival: self.now, job: JobId(file), ..Request::new(op, extent) };
        self.core.push(self.now, &request).unwrap();
    }

    fn read(&mut self, file: u32, offset_kib: u64, len_kib: u64) {
        self.push(Op::Read, file, offset_kib, len_kib);
    }

    /// The next batch, served in a millisecond: (file, offset in KiB, requests); or how long to wait.
    fn next(&mut self) -> Result<(u32, u64, usize), (Nanos, WaitReason)> {
        match self.core.next(self.now) {
            Next::Dispatch(batch) => {
                let end = self.now + Nanos::from_millis(1);
                self.core.event(end, Event::Completed(Completion::of(&batch, self.now, end)));
                self.now = end;
                Ok((batch.extent.file.0, batch.extent.lane_offset >> 10, batch.parts.len()))
            }
            Next::Wait { until, reason } => Err((until, reason)),
        }
    }

    fn all(&mut self) -> Vec<(u32, u64, usize)> {
        std::iter::from_fn(|| self.next().ok()).collect()
    }
}

fn us(us: u64) -> Nanos {
    Nanos::from_micros(us)
}

/// A pass adds TTP(8 KiB) = 18 ms; a request of 64 KiB costs 74 ms: five passes, but two at four times the growth (2 ×
/// TTP(32 KiB) = 84 ms). Meanwhile one small request of file 2 goes per pass.
#[test]
fn the_quanta_of_a_weighty_application_grow_faster() {
    for (weights, place) in [("", 4), ("big: job=1 {weight=4}; rest: * {weight=1}", 1)] {
        let spec = PolicySpec::named("mlf").with("window_us", 0).with("weights", weights);
        let mut b = Bench::new(spec);
        b.read(1, 0, 64);
        (0..8).for_each(|i| b.read(2, i * 100, 8));
        let served = b.all();
        assert_eq!(served.iter().position(|s| s.0 == 1), Some(place), "{weights}: {served:?}");
    }
}

/// With a weight of 3 a window of 2 ms lasts 6 ms: six batches of file 1 instead of two before file 2's turn.
#[test]
fn a_weighty_application_has_longer_windows() {
    for (weights, batches) in [("", 2), ("a: job=1 {weight=3}", 6)] {
        let mut b = Bench::new(PolicySpec::named("mlf").with("window_us", 2000).with("weights", weights));
        (0..9).for_each(|i| b.read(1, i * 100, 8));
        b.read(2, 0, 8);
        assert_eq!(b.all().iter().position(|s| s.0 == 2), Some(batches), "{weights}");
    }
}

#[test]
fn reads_go_before_writes_up_to_a_number() {
    for (ahead, order) in [(0, [1, 2, 3, 4]), (2, [2, 1, 3, 4]), (100, [2, 3, 4, 1])] {
        let mut b = Bench::new(PolicySpec::named("mlf").with("reads_ahead_requests", ahead).with("window_us", 0));
        b.push(Op::Write, 1, 0, 8);
        (2..5).for_each(|file| b.read(file, 0, 8));
        let served: Vec<u32> = b.all().iter().map(|s| s.0).collect();
        assert_eq!(served, order, "{ahead}");
    }
}

/// Four processes read a file in rounds. The first round arrived complete; two requests of the second are queued: the
/// lane is held for 900 µs after the newest, and the others join.
#[test]
fn a_short_run_is_held_for_its_neighbours() {
    let mut b = Bench::new(PolicySpec::named("aioli"));
    (0..4).for_each(|i| b.read(1, i * 8, 8));
    assert_eq!(b.next(), Ok((1, 0, 4)));
    b.read(1, 32, 8);
    b.read(1, 40, 8);
    let t = b.now;
    assert_eq!(b.next(), Err((t + us(900), WaitReason::Hold)));
    b.now = t + us(500);
    b.read(1, 48, 8);
    assert_eq!(b.next(), Err((t + us(1400), WaitReason::Hold)), "the hold follows the newest");
    b.read(1, 56, 8);
    assert_eq!(b.next(), Ok((1, 32, 4)));
}

/// Another file is served while one is held: holding a run never idles a lane that has other work.
#[test]
fn others_are_served_meanwhile() {
    let mut b = Bench::new(PolicySpec::named("aioli"));
    (0..4).for_each(|i| b.read(1, i * 8, 8));
    assert_eq!(b.next(), Ok((1, 0, 4)));
    b.read(1, 32, 8);
    b.read(2, 0, 8);
    assert_eq!(b.next(), Ok((2, 0, 1)));
    (0..3).for_each(|i| b.read(1, 40 + i * 8, 8));
    assert_eq!(b.next(), Ok((1, 32, 4)));
}

/// After two holds without effect the file is not held any more.
#[test]
fn holding_stops_where_it_does_not_pay() {
    let mut b = Bench::new(PolicySpec::named("aioli"));
    (0..4).for_each(|i| b.read(1, i * 8, 8));
    assert_eq!(b.next(), Ok((1, 0, 4)));
    for i in 0..3 {
        b.read(1, 1000 + i * 100, 8);
        if i < 2 {
            let Err((until, WaitReason::Hold)) = b.next() else { panic!("hold {i}") };
            b.now = until;
        }
        assert_eq!(b.next(), Ok((1, 1000 + i * 100, 1)), "{i}");
    }
}

/// Batches of 64 KiB against a quantum of 8 KiB double it three times; then one pass pays for what took five.
#[test]
fn the_quantum_follows_the_files_history() {
    for (adapt, place) in [("off", 4), ("on", 1)] {
        let spec = PolicySpec::named("mlf").with("window_us", 0).with("adapt", adapt);
        let mut b = Bench::new(spec);
        for round in 0..6 {
            (0..8).for_each(|i| b.read(1, round * 1000 + i * 8, 8));
            assert_eq!(b.next(), Ok((1, round * 1000, 8)));
        }
        b.read(2, 0, 8);
        b.read(1, 9000, 64);
        (1..8).for_each(|i| b.read(2, i * 100, 8));
        let served = b.all();
        let at = served.iter().position(|s| s.0 == 1);
        assert_eq!(at, Some(place), "adapt={adapt}: {served:?}");
    }
}

/// Two files, each read by a synchronous process that sends its next request 200 µs after the last reply. Returns the
/// files in the order served, and the time of the last reply.
fn synchronous(spec: PolicySpec, rounds: u64, offset_kib: fn(u64) -> u64) -> (Vec<u32>, Nanos) {
    let mut b = Bench::new(spec);
    let mut order = Vec::new();
    let mut sent = [0; 3];
    let mut next_at = [None, Some(Nanos::ZERO), Some(Nanos::ZERO)];
    loop {
        for file in 1..3 {
            if next_at[file as usize].is_some_and(|at| at <= b.now) {
                b.read(file, offset_kib(sent[file as usize]), 64);
                sent[file as usize] += 1;
                next_at[file as usize] = None;
            }
        }
        let arrival = next_at.iter().flatten().min().copied();
        match b.next() {
            Ok((file, ..)) => {
                order.push(file);
                if sent[file as usize] < rounds {
                    next_at[file as usize] = Some(b.now + us(200));
                }
            }
            Err((until, _)) => match arrival.map_or(until, |at| until.min(at)) {
                Nanos::MAX => return (order, b.now),
                at => b.now = at,
            },
        }
    }
}

fn turns(order: &[u32]) -> usize {
    order.windows(2).filter(|w| w[0] != w[1]).count()
}

/// A window holds for a synchronous process, instead of A, B, A, B with a seek each.
#[test]
fn a_window_holds_for_a_synchronous_process() {
    let (order, _) = synchronous(PolicySpec::named("mlf"), 200, |n| n * 64);
    assert_eq!(order.len(), 400);
    assert_eq!(order[..12], [1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], "the lag is known after one request of each");
    assert!(turns(&order) <= 16, "windows of 60 ms and requests of 1.2 ms: {order:?}");
    let (order, _) = synchronous(PolicySpec::named("mlf").with("anticipation_us", 0), 200, |n| n * 64);
    assert!(turns(&order) > 300, "without anticipation every request changes the file");
}

/// If the next request is far off, staying with its file saves no seek: holding switches itself off, and costs no more
/// than the accounts allow.
#[test]
fn a_window_is_not_held_where_that_does_not_pay() {
    let scattered = |n| n * 7919 % 1000 * 4096;
    let (order, with) = synchronous(PolicySpec::named("mlf"), 300, scattered);
    let (_, without) = synchronous(PolicySpec::named("mlf").with("anticipation_us", 0), 300, scattered);
    assert!(turns(&order[order.len() - 200..]) > 180, "{order:?}");
    assert!(with <= without + Nanos::from_millis(2 * (4 * 2 + 300 / 64 * 2)), "{with} instead of {without}");
}

/// Files that are read once are never held: none of their requests followed another.
#[test]
fn files_that_are_read_once_cost_no_hold() {
    let mut b = Bench::new(PolicySpec::named("mlf"));
    for file in 0..100 {
        b.read(file, 0, 8);
    }
    assert_eq!(b.all().len(), 100);
    assert_eq!(b.now, Nanos::from_millis(100), "one after the other without a pause");
}

/// While the device is busy no choice is made and no pass elapses.
#[test]
fn a_busy_lane_is_not_asked() {
    let mut b = Bench::new(PolicySpec::named("mlf").with("window_us", 0));
    b.read(1, 0, 8);
    let Next::Dispatch(first) = b.core.next(b.now) else { panic!() };
    b.read(1, 100, 64);
    for _ in 0..10 {
        assert_eq!(b.next(), Err((Nanos::MAX, WaitReason::LanesBusy)));
    }
    b.read(2, 0, 8);
    b.core.event(b.now, Event::Completed(Completion::of(&first, b.now, b.now)));
    assert_eq!(b.next(), Ok((2, 0, 1)), "64 KiB need five passes from now");
}

/// `policy set` to the same policy with other parameters keeps learnt quanta, the history of holds and the passes that
/// a queued request has waited.
#[test]
fn what_was_learnt_outlives_a_change_of_parameters() {
    let spec = |name: &str, guard: u32| PolicySpec::named(name).with("window_us", 0).with("guard_batches", guard);
    // Four passes waited: the fifth pays for 64 KiB.
    for change in [false, true] {
        let mut b = Bench::new(spec("mlf", 16));
        b.read(1, 0, 64);
        (0..8).for_each(|i| b.read(2, i * 100, 8));
        assert_eq!((0..4).map(|_| b.next().unwrap().0).collect::<Vec<_>>(), [2; 4]);
        if change {
            b.core.reconfigure(b.now, &spec("mlf", 17)).unwrap();
        }
        assert_eq!(b.next(), Ok((1, 0, 1)), "change: {change}");
    }
    // Runs of four are expected, so a shorter one is held, before and after.
    let mut b = Bench::new(spec("aioli", 16));
    (0..4).for_each(|i| b.read(1, i * 8, 8));
    assert_eq!(b.next(), Ok((1, 0, 4)));
    b.core.reconfigure(b.now, &spec("aioli", 17)).unwrap();
    b.read(1, 32, 8);
    assert_eq!(b.next(), Err((b.now + us(900), WaitReason::Hold)));
}

/// Two synchronous processes read a part of one file each; the seeks of 400 requests.
fn seeks_of_two_parts(spec: &PolicySpec) -> u32 {
    let linear = LinearCost { fixed: Nanos::from_millis(8), ps_per_byte: 10_000 };
    let cost = CostModel::new(linear, linear);
    let mut core = Core::new(CoreConfig { cost, ..CoreConfig::single_lane(16) }, spec).unwrap();
    let (mut now, mut sent, mut head) = (Nanos::ZERO, [0, 0], u64::MAX);
    let mut due = [Some(now), Some(now)];
    let (mut seeks, mut served) = (0, 0);
    while served < 400 {
        for (client, at) in due.iter_mut().enumerate() {
            if at.take_if(|at| *at <= now).is_some() {
                let offset = (client as u64) << 30 | sent[client] << 13;
                sent[client] += 1;
                let extent =
                    Extent { file: FileId(1), lane: LaneId(0), file_offset: offset, lane_offset: offset, len: 8192 };
                let request =
                    Request { arrival: now, client: ClientId(client as u32), ..Request::new(Op::Read, extent) };
                core.push(now, &request).unwrap();
            }
        }
        match core.next(now) {
            Next::Dispatch(batch) => {
                let start = batch.extent.lane_offset;
                let service = if start == head { us(100) } else { us(8_000) };
                seeks += u32::from(start != head);
                head = start + batch.extent.len;
                core.event(now + service, Event::Completed(Completion::of(&batch, now, now + service)));
                now += service;
                due[(start >> 30) as usize] = Some(now + us(200));
                served += batch.parts.len();
            }
            Next::Wait { until, .. } => now = due.iter().flatten().copied().fold(until, Nanos::min),
        }
    }
    seeks
}

/// The process that was served goes on in a moment: without a dwell each request pays a seek to the other.
#[test]
fn a_lane_dwells_behind_a_process_that_goes_on_in_its_part() {
    assert!(seeks_of_two_parts(&PolicySpec::named("mlf")) > 350);
    let dwells = seeks_of_two_parts(&PolicySpec::named("mlf").with("dwell_us", 2000));
    assert!(dwells < 60, "{dwells}");
}
