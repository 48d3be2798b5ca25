//! `agios` and `agios-causal` with recorded runs (agios-2013, IV.C), worked by hand.

use std::sync::Arc;

use impresario_foresight::{PredictedQueues, Recorded};
use impresario_sched::{
    Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, LaneId, LinearCost, Nanos, Next, Op, PolicySpec,
    Request, WaitReason,
};

/// One lane that takes one batch at a time; TTP is 10 ms and 1 ms for each 64 KiB. Requests have 8 KiB.
struct Bench {
    core: Core,
    now: Nanos,
    service: Nanos,
}

/// (offset in KiB, arrival in µs, completion in µs)
type Run = [(u64, u64, u64)];

fn foretold(run: &Run) -> Arc<PredictedQueues> {
    Arc::new(PredictedQueues::new(run.iter().map(|(offset, arrival, completed)| Recorded {
        file: 1,
        write: false,
        offset: offset << 10,
        len: 8 << 10,
        arrival_ns: arrival * 1000,
        completed_ns: Some(completed * 1000),
        source: 0,
    })))
}

impl Bench {
    fn new(spec: PolicySpec, run: &Run) -> Bench {
        let linear = LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 15_258_789 / 1000 };
        let config = CoreConfig { cost: CostModel::new(linear, linear), ..CoreConfig::single_lane(256) };
        let mut core = Core::new(config, &spec).unwrap();
        core.foresee(Some(foretold(run)));
        Bench { core, now: Nanos::ZERO, service: Nanos::from_millis(1) }
    }

    fn read(&mut self, at_us: u64, offset_kib: u64) {
        self.send(Op::Read, at_us, offset_kib);
    }

    fn send(&mut self, op: Op, at_us: u64, offset_kib: u64) {
        self.now = us(at_us);
        let (offset, len) = (offset_kib << 10, 8 << 10);
        let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
        self.core.push(self.now, &Request { arrival: self.now, ..Request::new(op, extent) }).unwrap();
    }

    /// At an instant: (offset in KiB, requests) of the next batch, served in `service`; or the end of the wait, µs.
    fn next(&mut self, at_us: u64) -> Result<(u64, usize), u64> {
        self.now = us(at_us);
        match self.core.next(self.now) {
            Next::Dispatch(batch) => {
                let end = self.now + self.service;
                self.core.event(end, Event::Completed(Completion::of(&batch, self.now, end)));
                self.now = end;
                Ok((batch.extent.lane_offset >> 10, batch.parts.len()))
            }
            Next::Wait { until: Nanos::MAX, .. } => Err(u64::MAX),
            Next::Wait { until, reason } => {
                assert_eq!(reason, WaitReason::Hold);
                Err(until.0 / 1000)
            }
        }
    }
}

fn us(us: u64) -> Nanos {
    Nanos::from_micros(us)
}

fn agios() -> PolicySpec {
    PolicySpec::named("agios").with("overlap_percent", 0)
}

fn causal() -> PolicySpec {
    PolicySpec::named("agios-causal")
}

/// Fig. 4: three neighbours are predicted over 6 ms. The first waits that long even if others join; all go together
/// once all have arrived.
#[test]
fn a_virtual_request_waits_for_the_aggregation_that_is_predicted() {
    let run = [(0, 0, 50_000), (8, 2_000, 50_000), (16, 6_000, 50_000)];
    let mut b = Bench::new(agios(), &run);
    b.read(1_000, 0);
    assert_eq!(b.next(1_000), Err(7_000), "6 ms after its own arrival");
    b.read(3_500, 8);
    assert_eq!(b.next(3_500), Err(7_000), "the mark survives its growth");
    b.read(6_500, 16);
    assert_eq!(b.next(6_500), Ok((0, 3)));
    assert_eq!(b.next(8_000), Err(u64::MAX));
}

#[test]
fn it_waits_once() {
    let run = [(0, 0, 50_000), (8, 2_000, 50_000), (16, 6_000, 50_000)];
    let mut b = Bench::new(agios(), &run);
    b.read(0, 0);
    assert_eq!(b.next(100), Err(6_000));
    b.read(5_900, 8);
    assert_eq!(b.next(6_000), Ok((0, 2)), "the third is late");
    b.read(6_900, 16);
    assert_eq!(b.next(7_000), Err(12_900), "the rule does not ask what has been served: it waits for itself");
    assert_eq!(b.next(12_900), Ok((16, 1)));
}

/// TTP(8 KiB) is 10.125 ms, of 16 KiB 10.25 ms: neighbours more than 10 ms apart are not worth the wait.
#[test]
fn what_is_not_worth_the_wait_is_not_predicted() {
    for (apart_us, said) in [(9_000, Err(9_000)), (11_000, Ok((0, 1)))] {
        let mut b = Bench::new(agios(), &[(0, 0, 50_000), (8, apart_us, 50_000)]);
        b.read(0, 0);
        assert_eq!(b.next(0), said);
    }
    let half = agios().with("overlap_percent", 50);
    let mut b = Bench::new(half, &[(0, 0, 50_000), (8, 19_000, 50_000)]);
    b.read(0, 0);
    assert_eq!(b.next(0), Err(19_000), "half of the wait costs nothing");
    let mut b = Bench::new(agios().with("wait_us", 5_000), &[(0, 0, 50_000), (8, 9_000, 50_000)]);
    b.read(0, 0);
    assert_eq!(b.next(0), Ok((0, 1)), "longer than any wait may be");
}

/// Requests that the run lacks, or has at another time, are served as by mlf.
#[test]
fn mispredictions_cost_nothing() {
    let run = [(0, 0, 50_000), (64, 8_000_000, 8_050_000), (72, 8_001_000, 8_050_000)];
    for spec in [agios(), causal()] {
        let mut b = Bench::new(spec.clone().with("bound_percent", 0), &run);
        b.read(0, 512);
        assert_eq!(b.next(0), Ok((512, 1)), "{spec}: another offset");
        b.read(2_000, 64);
        assert_eq!(b.next(2_000), Ok((64, 1)), "{spec}: 8 s early");
        let mut b = Bench::new(spec.clone(), &run);
        b.core.foresee(None);
        b.read(0, 0);
        assert_eq!(b.next(0), Ok((0, 1)), "{spec}: forgotten");
    }
}

/// A prediction survives a change of policy.
#[test]
fn a_switch_keeps_the_recorded_run() {
    let mut b = Bench::new(PolicySpec::named("fifo"), &[(0, 0, 50_000), (8, 2_000, 50_000)]);
    b.core.reconfigure(us(0), &agios()).unwrap();
    b.read(0, 0);
    assert_eq!(b.next(0), Err(2_000));
    b.core.reconfigure(us(10), &agios().with("batch_requests", 32)).unwrap();
    assert_eq!(b.next(20), Err(2_000));
}

/// Rounds of two processes, every 20 ms: the second one's request comes 0.3 ms after the first one's.
fn pairs(rounds: u64) -> Vec<(u64, u64, u64)> {
    let round =
        |i: u64| [(i * 100, i * 20_000, i * 20_000 + 9_000), (i * 100 + 8, i * 20_000 + 300, i * 20_000 + 9_000)];
    (0..rounds).flat_map(round).collect()
}

fn slow(run: &Run) -> Bench {
    Bench { service: Nanos::from_millis(5), ..Bench::new(causal(), run) }
}

/// What a second batch costs is learnt first, 5 ms each time; then the pair goes together. The wait may last 1.5 × the
/// recorded 0.3 ms, and 0.3 ms.
#[test]
fn a_neighbour_that_is_due_is_waited_for_once_its_price_is_known() {
    let mut b = slow(&pairs(8));
    for i in 0..4 {
        let (at, kib) = (i * 20_000, i * 100);
        b.read(at, kib);
        assert_eq!(b.next(at), Ok((kib, 1)));
        b.read(at + 5_100, kib + 8);
        assert_eq!(b.next(at + 5_100), Ok((kib + 8, 1)));
    }
    b.read(80_000, 400);
    assert_eq!(b.next(80_000), Err(80_750));
    b.read(80_200, 408);
    assert_eq!(b.next(80_200), Ok((400, 2)));
}

/// The second request of a process follows the reply to the first: nothing is due before that.
#[test]
fn causes_are_not_waited_for() {
    let run: Vec<(u64, u64, u64)> = (0..8)
        .flat_map(|i| [(i * 100, i * 20_000, i * 20_000 + 900), (i * 100 + 8, i * 20_000 + 1_000, i * 20_000 + 9_000)])
        .collect();
    let mut b = slow(&run);
    for i in 0..8 {
        let (at, kib) = (i * 20_000, i * 100);
        b.read(at, kib);
        assert_eq!(b.next(at), Ok((kib, 1)), "its neighbour waits for its reply");
        b.read(at + 5_100, kib + 8);
        assert_eq!(b.next(at + 5_100), Ok((kib + 8, 1)));
    }
    let mut b = Bench::new(agios(), &run);
    b.read(0, 0);
    assert_eq!(b.next(0), Err(1_000), "the paper's rule waits for it");
}

/// Neighbours that come late at first and then not at all: waits that bring nothing end.
#[test]
fn waiting_ends_where_it_does_not_pay() {
    let mut b = slow(&pairs(200));
    let mut waited_us = 0;
    for i in 0..200 {
        let (at, kib) = (i * 20_000, i * 100);
        b.read(at, kib);
        if let Err(until) = b.next(at) {
            waited_us += until - at;
            assert_eq!(b.next(until), Ok((kib, 1)));
        }
        if i < 4 {
            b.read(at + 6_000, kib + 8);
            assert_eq!(b.next(at + 6_000), Ok((kib + 8, 1)));
        }
    }
    assert!((750..4_000).contains(&waited_us), "{waited_us} µs");
}

/// A load that does not match the run is soon only sampled; the run's own requests are recognised again at once.
#[test]
fn a_run_that_does_not_match_sleeps_and_wakes() {
    let run: Vec<(u64, u64, u64)> = (0..64).map(|i| (i * 8, i, i + 1000)).collect();
    let mut b = Bench::new(agios().with("wait_us", 1), &run);
    let linked = |b: &Bench| b.core.status().foretold.and_then(|f| f.linked).unwrap();
    let serve = |b: &mut Bench, offset_kib: u64| {
        b.read(b.now.0 / 1000, offset_kib);
        while let Err(until) = b.next(b.now.0 / 1000) {
            b.now = us(until);
        }
    };
    (0..900).for_each(|i| serve(&mut b, 100_000 + i * 8));
    assert_eq!((linked(&b).arrived, linked(&b).linked), (900, 0));
    (0..64).for_each(|i| serve(&mut b, i * 8));
    let found = linked(&b).linked;
    assert!((32..=64).contains(&found), "{found} of 64 are linked");
}

/// A request of one of several processes.
fn of_process(source: u32, op: Op, offset_kib: u64, arrival_us: u64, completed_us: u64) -> Recorded {
    Recorded {
        file: 1,
        write: op == Op::Write,
        offset: offset_kib << 10,
        len: 8 << 10,
        arrival_ns: arrival_us * 1000,
        completed_ns: Some(completed_us * 1000),
        source,
    }
}

fn of_processes(run: impl IntoIterator<Item = Recorded>) -> Bench {
    let mut b = Bench::new(causal(), &[]);
    b.core.foresee(Some(Arc::new(PredictedQueues::new(run))));
    b
}

/// Two processes read a file in strides and write another part of it after each read. What follows a read is a write,
/// which no read waits for; what follows a write is a read, which those in front wait for.
#[test]
fn reads_in_step_wait_for_reads_only() {
    let rounds = (0..32).flat_map(|i| {
        [0, 1].into_iter().flat_map(move |process| {
            let (at, kib) = (i * 10_000, (i * 2 + process) * 8);
            let source = 1 + process as u32;
            [
                of_process(source, Op::Read, kib, at, at + 2_000),
                of_process(source, Op::Write, 100_000 + kib, at + 2_100, at + 9_000),
            ]
        })
    });
    let mut b = of_processes(rounds);
    b.read(0, 0);
    assert_eq!(b.next(0), Ok((0, 1)));
    b.read(1_000, 10 * 16 + 8);
    assert_eq!(b.next(1_000), Ok((168, 1)), "the first process goes on with a write");
    b.send(Op::Write, 2_000, 100_000);
    assert_eq!(b.next(2_300), Ok((100_000, 1)));
    b.read(3_300, 11 * 16 + 8);
    assert_eq!(b.next(3_300), Err(3_300 + 1_500 + 300), "it is about to read");
}

/// A process that has one request in flight after the other in the recorded run now sends two at once.
#[test]
fn what_came_before_its_cause_was_done_is_not_waited_for() {
    let two = [of_process(1, Op::Read, 0, 0, 500), of_process(1, Op::Read, 16, 2_000, 2_500)];
    let other = (0..32).map(|i| of_process(2, Op::Read, i * 16 + 8, i * 2_000, i * 2_000 + 500));
    let mut b = of_processes(two.into_iter().chain(other));
    b.read(0, 0);
    b.read(0, 16);
    assert_eq!((b.next(0), b.next(1_000)), (Ok((0, 1)), Ok((16, 1))));
    b.read(2_000, 20 * 16 + 8);
    assert_eq!(b.next(2_000), Ok((328, 1)), "nobody is to come");
}

const PROCESSES: u64 = 4;

/// Processes read a file in strides, each 0.1 ms after its last reply; a batch takes 1 ms. In the recorded run they are
/// in step. Now the first one pauses once, for 60 ms. Returns how many requests it is behind the others when they end.
fn behind_after_a_pause(spec: PolicySpec) -> u64 {
    const STEPS: u64 = 200;
    let round = |step: u64| {
        (0..PROCESSES).map(move |process| {
            let at = step * 1_100;
            of_process(1 + process as u32, Op::Read, (step * PROCESSES + process) * 8, at, at + 1_000)
        })
    };
    let mut core = Bench::new(spec, &[]).core;
    core.foresee(Some(Arc::new(PredictedQueues::new((0..STEPS).flat_map(round)))));
    // When each sends its next request, and which.
    let mut next: Vec<(Option<u64>, u64)> = vec![(Some(0), 0); PROCESSES as usize];
    let mut in_flight = None;
    for now in (0..).step_by(50) {
        assert!(now < 5_000_000, "{next:?}");
        if let Some((batch, begun)) = in_flight.take_if(|(_, begun)| *begun + 1_000 <= now) {
            core.event(us(now), Event::Completed(Completion::of(&batch, us(begun), us(now))));
            for part in &batch.parts {
                let process = (part.lane_offset >> 13) % PROCESSES;
                let (when, step) = &mut next[process as usize];
                *step += 1;
                if *step == STEPS {
                    return *step - next[0].1;
                }
                let pause = if (process, *step) == (0, 50) { 60_000 } else { 100 };
                *when = Some(now + pause);
            }
        }
        for (process, (when, step)) in next.iter_mut().enumerate() {
            if when.take_if(|when| *when <= now).is_some() {
                let (offset, len) = ((*step * PROCESSES + process as u64) << 13, 8 << 10);
                let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
                core.push(us(now), &Request { arrival: us(now), ..Request::new(Op::Read, extent) }).unwrap();
            }
        }
        if in_flight.is_none()
            && let Next::Dispatch(batch) = core.next(us(now))
        {
            in_flight = Some((batch, now));
        }
    }
    unreachable!()
}

#[test]
fn a_process_that_paused_catches_up() {
    let behind = [causal(), PolicySpec::named("mlf")].map(behind_after_a_pause);
    assert!(behind[0] <= 9 && behind[1] > 40, "{behind:?}");
}

/// Processes read a part of a file each, 8 KiB after 8 KiB, as in the recorded run. After a read the drive reads on while
/// nothing moves its head, 64 KiB a millisecond, and keeps that: what it has takes 0.1 ms, everything else 5. `keeps`: else
/// it keeps nothing. Returns how long they take, ms.
fn time_of_parts(spec: PolicySpec, keeps: bool) -> u64 {
    const STEPS: u64 = 64;
    let read = |process: u64, step: u64| {
        let at = step * 20_000;
        of_process(
            1 + process as u32,
            Op::Read,
            (process * STEPS + step) * 8,
            at + process * 5_000,
            at + process * 5_000 + 5_000,
        )
    };
    let mut core = Bench::new(spec, &[]).core;
    let run = (0..PROCESSES).flat_map(|process| (0..STEPS).map(move |step| read(process, step)));
    core.foresee(Some(Arc::new(PredictedQueues::new(run))));
    let mut next: Vec<(Option<u64>, u64)> = vec![(Some(0), 0); PROCESSES as usize];
    // Up to where the drive has each process's part, and of which one it reads on since when.
    let (mut kept, mut reads_on) = ([0_u64; PROCESSES as usize], None::<(usize, u64)>);
    let mut in_flight = None;
    for now in (0..).step_by(50) {
        assert!(now < 5_000_000, "{next:?}");
        if let Some((batch, begun, _)) = in_flight.take_if(|(_, begun, took)| *begun + *took <= now) {
            core.event(us(now), Event::Completed(Completion::of(&batch, us(begun), us(now))));
            for part in &batch.parts {
                let (when, step) = &mut next[((part.lane_offset >> 13) / STEPS) as usize];
                *step += 1;
                *when = (*step < STEPS).then_some(now + 500);
            }
            reads_on = reads_on.map(|(process, _)| (process, now));
        }
        if next.iter().all(|(_, step)| *step == STEPS) {
            return now / 1000;
        }
        for (process, (when, step)) in next.iter_mut().enumerate() {
            if when.take_if(|when| *when <= now).is_some() {
                let (offset, len) = ((process as u64 * STEPS + *step) << 13, 8 << 10);
                let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
                core.push(us(now), &Request { arrival: us(now), ..Request::new(Op::Read, extent) }).unwrap();
            }
        }
        if in_flight.is_none()
            && let Next::Dispatch(batch) = core.next(us(now))
        {
            if let Some((process, since)) = reads_on.filter(|_| keeps) {
                kept[process] += (now - since) * 64 * 1024 / 1000;
            }
            let (start, end) = (batch.extent.lane_offset, batch.extent.end());
            let process = ((start >> 13) / STEPS) as usize;
            let has = end <= kept[process];
            if !has {
                (kept[process], reads_on) = (end, Some((process, now)));
            }
            in_flight = Some((batch, now, if has { 100 } else { 5_000 }));
        }
    }
    unreachable!()
}

#[test]
fn what_the_drive_reads_on_serves_processes_that_read_parts() {
    let [ours, mlf] = [causal(), PolicySpec::named("mlf")].map(|spec| time_of_parts(spec, true));
    assert!(ours * 2 < mlf, "{ours} and {mlf} ms");
    let [ours, mlf] = [causal(), PolicySpec::named("mlf")].map(|spec| time_of_parts(spec, false));
    assert!(ours * 100 < mlf * 103, "{ours} and {mlf} ms with a drive that keeps nothing");
}
