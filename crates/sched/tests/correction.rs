//! If enabled, a core corrects its cost model by completions, and policies see the result.

use impresario_sched::{
    Completion, Core, CoreConfig, CostCurve, CostModel, Event, Extent, FileId, LaneId, LinearCost, Nanos, Next, Op,
    PolicySpec, Request,
};

/// 10 ms and 8 ns a byte.
fn model() -> CostModel {
    let line = LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 8_000 };
    CostModel::new(line, line)
}

/// Serves reads of 64 KiB one after the other, each taking `factor` times the model's time.
fn serve(core: &mut Core, n: u64, factor: u64) {
    let mut now = Nanos(1);
    for i in 0..n {
        // Separate files, so that nothing is merged.
        let extent = Extent { file: FileId(i as u32), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 65_536 };
        core.push(now, &Request::new(Op::Read, extent)).unwrap();
        let Next::Dispatch(batch) = core.next(now) else { panic!("a lone request goes at once") };
        let end = now + Nanos(factor * model().ttp(Op::Read, 65_536).0);
        core.event(end, Event::Completed(Completion::of(&batch, now, end)));
        now = end;
    }
}

fn core(cost: CostModel, policy: &str) -> Core {
    Core::new(CoreConfig { cost, ..CoreConfig::single_lane(64) }, &PolicySpec::named(policy)).unwrap()
}

/// (size, TTP in ns) of reads as the core reports them.
fn ttp(core: &Core) -> Vec<(u64, u64)> {
    core.status().cost.read.ttp_ns
}

#[test]
fn a_model_that_is_to_be_corrected_follows_the_device_under_every_policy() {
    for policy in ["none", "fifo", "hbrr", "mlf"] {
        let mut core = core(model().corrected(true), policy);
        serve(&mut core, 800, 3);
        let status = core.status().cost;
        assert!((status.read.ratio - 3.0).abs() < 0.1, "{policy}: {}", status.read.ratio);
        assert_eq!((status.read.observed, status.write.observed), (800, 0));
        for (size, ns) in ttp(&core) {
            let factor = ns as f64 / model().ttp(Op::Read, size).0 as f64;
            assert!((factor - 3.0).abs() < 0.15, "{policy}, {size}: {factor}");
        }
    }
}

#[test]
fn a_fixed_model_stays_as_it_is() {
    let mut core = core(model(), "mlf");
    serve(&mut core, 800, 3);
    let status = core.status().cost;
    assert!(!status.correct);
    assert_eq!((status.read.ratio, status.read.observed), (1.0, 0));
    assert_eq!(ttp(&core)[1], (65_536, model().ttp(Op::Read, 65_536).0));
}

#[test]
fn failed_and_short_batches_teach_nothing() {
    let mut core = core(model().corrected(true), "fifo");
    for i in 0..100 {
        let extent = Extent { file: FileId(i), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 65_536 };
        core.push(Nanos(1), &Request::new(Op::Write, extent)).unwrap();
        let Next::Dispatch(batch) = core.next(Nanos(1)) else { panic!("a lone request goes at once") };
        let whole = Completion::of(&batch, Nanos(1), Nanos::from_millis(900));
        let bad = if i % 2 == 0 { Completion { errno: 5, ..whole } } else { Completion { bytes_done: 7, ..whole } };
        core.event(Nanos::from_millis(900), Event::Completed(bad));
    }
    assert_eq!(core.status().cost.write.observed, 0);
}

/// The device serves one batch after the other. A batch is not charged for the time of those before it, whether the
/// correction learns from them or not: every other one fails, is cut short, or is of another kind.
#[test]
fn waiting_behind_any_batch_is_not_service() {
    for (what, errno, bytes_done, op) in [
        ("whole", 0, 65_536, Op::Read),
        ("failed", 5, 65_536, Op::Read),
        ("short", 0, 7, Op::Read),
        ("sync", 0, 65_536, Op::Sync),
    ] {
        let config = CoreConfig { cost: model().corrected(true), lane_requests: 32, ..CoreConfig::single_lane(64) };
        let mut core = Core::new(config, &PolicySpec::named("fifo")).unwrap();
        let (each, mut now) = (model().ttp(Op::Read, 65_536), Nanos(1));
        for _ in 0..50 {
            let batches: Vec<_> = (0..32)
                .map(|i| {
                    let file = FileId(i as u32);
                    let extent = Extent { file, lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 65_536 };
                    core.push(now, &Request::new(if i % 2 == 0 { op } else { Op::Read }, extent)).unwrap();
                    let Next::Dispatch(batch) = core.next(now) else { panic!("there is room for all") };
                    batch
                })
                .collect();
            let begin = now;
            for (i, batch) in batches.iter().enumerate() {
                now += each;
                let whole = Completion::of(batch, begin, now);
                let odd = Completion { errno, bytes_done, ..whole };
                core.event(now, Event::Completed(if i % 2 == 0 { odd } else { whole }));
            }
        }
        let read = core.status().cost.read;
        assert!((read.ratio - 1.0).abs() < 0.01 && read.observed >= 800, "{what}: {} of {}", read.ratio, read.observed);
    }
}

/// Syncs with a limit of their own run beside reads, which take as long as they would without them.
#[test]
fn syncs_beside_reads_do_not_shorten_them() {
    let config = CoreConfig { cost: model().corrected(true), lane_syncs: 4, ..CoreConfig::single_lane(64) };
    let mut core = Core::new(config, &PolicySpec::named("fifo")).unwrap();
    let (each, mut now) = (model().ttp(Op::Read, 65_536), Nanos(1));
    let start = |core: &mut Core, now, file, op| {
        let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 65_536 };
        core.push(now, &Request::new(op, extent)).unwrap();
        let Next::Dispatch(batch) = core.next(now) else { panic!("there is room for it") };
        batch
    };
    for _ in 0..200 {
        let (read, begin) = (start(&mut core, now, 0, Op::Read), now);
        for _ in 0..3 {
            let (sync, begin) = (start(&mut core, now, 1, Op::Sync), now);
            now += Nanos::from_millis(3);
            core.event(now, Event::Completed(Completion::of(&sync, begin, now)));
        }
        now = begin + each;
        core.event(now, Event::Completed(Completion::of(&read, begin, now)));
    }
    let read = core.status().cost.read;
    assert!((read.ratio - 1.0).abs() < 0.01 && read.observed == 200, "{} of {}", read.ratio, read.observed);
}

/// mlf serves the smaller of two requests first when the larger one needs more passes. With a curve in which bytes cost
/// nothing, both are ready in the first pass and the older one goes first.
#[test]
fn a_curve_changes_what_mlf_serves_first() {
    let order = |cost: CostModel| {
        let mut core = core(cost, "mlf");
        for (file, len) in [(1, 8 << 20), (2, 4096)] {
            let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset: 0, lane_offset: 0, len };
            core.push(Nanos(0), &Request::new(Op::Read, extent)).unwrap();
        }
        let Next::Dispatch(batch) = core.next(Nanos(1)) else { panic!("something is served") };
        batch.extent.file.0
    };
    let curve = |points: &[(u64, u64)]| {
        let points: Vec<_> = points.iter().map(|p| (p.0, Nanos(p.1))).collect();
        CostCurve::through(&points).unwrap()
    };
    let steep = curve(&[(4096, 10_000), (16 << 20, 40_960_000)]);
    let flat = curve(&[(4096, 10_000_000), (16 << 20, 10_000_001)]);
    assert_eq!(order(CostModel::new(steep.clone(), steep)), 2);
    assert_eq!(order(CostModel::new(flat.clone(), flat)), 1);
}
