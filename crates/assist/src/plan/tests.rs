//! The canonical patterns get the hints they should, and what can never be right never comes out.

mod maps;

use std::path::Path;
use std::sync::Arc;

use impresario_base::random::Random;
use impresario_foresight::{Sample, Shape};
use impresario_sched::{FileId, LinearCost, Nanos};
use impresario_trace::{Builder, FileInfo, Header, Origin, Record};
use proptest::prelude::*;

use super::replay::replay_judged;
use super::*;
use crate::config::{DeviceCost, Region};

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;

/// One read of a script: process, file, offset, length, compute time before it in µs.
type Step = (u32, usize, u64, u64, u64);

/// Writes a script down as a run on a cold device would have been recorded.
fn record(sizes: &[u64], steps: &[Step], device: &Device) -> Trace {
    let mut builder = Builder::new(Header::default());
    for (i, size) in sizes.iter().enumerate() {
        let path = format!("/data/f{i}").into_bytes();
        builder.file(FileInfo { path, key: 0, size_bytes: Some(*size) }).unwrap();
    }
    let mut now: FxHashMap<u32, u64> = FxHashMap::default();
    for (process, file, offset, len, compute_us) in steps {
        let origin = builder.origin(Origin { process: *process, thread: *process, ..Origin::default() }).unwrap();
        let at = now.entry(*process).or_default();
        *at += compute_us * 1000;
        let took = device.random.ttp(*len).0;
        let record = Record::new(TraceOp::Read, FileId(*file as u32), *offset, *len, Nanos(*at));
        builder.push(Record { origin, duration: Some(Nanos(took)), ..record }).unwrap();
        *at += took;
    }
    builder.build()
}

fn planned(sizes: &[u64], steps: &[Step], device: &Device) -> Plan {
    let plan = plan(&record(sizes, steps, device), &Options::new(device.clone()));
    check(&plan);
    plan
}

/// What is true of every plan.
fn check(plan: &Plan) {
    plan.hints.check().unwrap();
    let text = plan.hints.to_json().unwrap();
    assert_eq!(Hints::parse(&text, Path::new("x")).unwrap(), plan.hints);
    let expected = plan.files.iter().filter_map(|f| f.expected.as_ref()).chain(&plan.expected);
    for e in expected {
        assert!(e.with_s >= e.bound_s && e.bound_s <= e.without_s, "{e:?}");
        assert!((0.0..=1.0).contains(&e.gain()));
    }
    let advised = plan.files.iter().filter(|f| f.entry.is_some()).count();
    assert_eq!(plan.refused.is_none(), advised > 0);
    assert_eq!(advised > 0, !plan.hints.file.is_empty() || !plan.hints.directory.is_empty());
    assert!(plan.files.iter().all(|f| !f.why.is_empty()));
    assert!(!plan.text().is_empty());
    serde_json::to_string(plan).unwrap();
}

fn strided() -> Vec<Step> {
    (0..1000).map(|i| (1, 0, i * 500 * KIB, 250 * KIB, 500)).collect()
}

/// The paper's pattern on a volume with limits.
#[test]
fn strided_reads_on_a_limited_device() {
    let plan = planned(&[500_000 * KIB], &strided(), &Device::limited(200, 200));
    let entry = &plan.hints.file[0];
    assert_eq!((entry.path.as_path(), &entry.will_need[..]), (Path::new("/data/f0"), &[Region::WHOLE][..]));
    assert!(entry.block_size >= MIB, "{entry:?}");
    let e = plan.expected.unwrap();
    assert!(e.gain() >= 0.45, "{e:?}");
    assert!(e.requests_with * 2 <= e.requests_without + 50, "{e:?}");
    let f = &plan.files[0];
    assert_eq!(
        (f.pattern.stride, f.pattern.kind(), f.purpose),
        (Some((500 * KIB as i64, 1.0)), Kind::Forward, Purpose::Input)
    );
    assert!(entry.why.as_ref().unwrap().contains("500 KiB after the one before"), "{:?}", entry.why);
}

/// Programs whose plans are made on one device and used on another.
fn programs() -> Vec<(&'static str, u64, Vec<Step>)> {
    let scattered = |n: u64, len: u64, every: u64, us: u64| -> Vec<Step> {
        // Each place once, in an order that is none.
        (0..n).map(|i| (1, 0, i * 7919 % n * every, len, us)).collect()
    };
    vec![
        ("strided 250 KiB", 500_000 * KIB, strided()),
        (
            "one column, 250 KiB of 1 MiB",
            437 * MIB,
            (0..437).map(|i| (1, 0, i * MIB + 77_777, 250 * KIB, 300)).collect(),
        ),
        ("437 chunks of 250 KiB in no order", 437 * MIB, scattered(437, 250 * KIB, MIB, 300)),
        ("baskets of 64 KiB in no order", 2000 * 300 * KIB, scattered(2000, 64 * KIB, 300 * KIB, 200)),
        ("4 KiB all over", 1 << 30, scattered(4000, 4 * KIB, 260 * KIB, 50)),
        ("straight on", 400 * MIB, (0..6400).map(|i| (1, 0, i * 64 * KIB, 64 * KIB, 100)).collect()),
        ("backward", 400 * MIB, (0..800).rev().map(|i| (1, 0, i * 512 * KIB, 128 * KIB, 300)).collect()),
        ("one in seven, 64 KiB", 448_000 * KIB, (0..1000).map(|i| (1, 0, i * 448 * KIB, 64 * KIB, 100)).collect()),
    ]
}

/// Devices of many kinds.
fn devices() -> [Device; 7] {
    let line = |us: u64, ps_per_byte| LinearCost { fixed: Nanos::from_micros(us), ps_per_byte };
    let of = |us, ps, parallel, name: &str| Device {
        parallel,
        ..Device::of(line(us, ps).into(), line(us, ps).into(), name)
    };
    [
        Device::disk(),
        Device::flash(),
        Device::limited(200, 200),
        Device::limited(1000, 50),
        Device::limited(3000, 1000),
        of(5000, 5000, 32, "latency-bound"),
        of(20, 100, 8, "nearly memory"),
    ]
}

/// A plan costs next to nothing where the device is another one than it was made for, whichever that is.
#[test]
fn a_plan_for_another_device_costs_next_to_nothing() {
    let devices = devices();
    let made_for = [0, 1, 2, 5, 6];
    let mut bad = Vec::new();
    for (name, size, steps) in programs() {
        for made in made_for.map(|i| &devices[i]) {
            let options = Options { gain_min: 0.0, ..Options::new(made.clone()) };
            let trace = record(&[size], &steps, made);
            let plan = plan(&trace, &options);
            let Some(entry) = plan.hints.file.first() else { continue };
            let run = run_of(&trace, made, |_| true, usize::MAX);
            let entries: Entries = [(0, Hinted { entry, index: None, learnt: None })].into_iter().collect();
            for used in &devices {
                let seconds = |o: Outcome| o.run_ns as f64 / 1e9;
                let without = seconds(replay(&run, used, 1 << 30, &Entries::default()));
                let judged =
                    |stand_down| seconds(replay_judged(&run, used, 1 << 30, &entries, stand_down, &plan.hints.device));
                let with = judged(StandDown::default());
                let mut note = |what: &str| {
                    let (made, used, way) = (&made.source, &used.source, &plan.files[0].why);
                    bad.push(format!("{what}: {name}, for {made}, on {used}: {without:.2} s → {with:.2} s; {way}"));
                };
                if with > without * 1.01 + 0.02 {
                    note("slower");
                }
                // Where the plan is right, most of its gain is left.
                let alone = used.source == "nearly memory"; // such fast reads are left alone
                if made == used && !alone {
                    let gives = judged(StandDown { enabled: false, ..StandDown::default() });
                    if with > gives + 0.1 * (without - gives) + 0.02 {
                        note(&format!("trying costs too much of {gives:.2} s"));
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}\n{}", bad.len(), bad.join("\n"));
}

/// Long pieces with three quarters for nothing pay where requests are rationed or late, and not where bytes are: there hints
/// end within the first twentieth of the run or two seconds.
#[test]
fn devices_bound_by_requests_latency_and_bytes_are_told_apart() {
    let steps: Vec<Step> = (0..4000).map(|i| (1, 0, i * 256 * KIB, 64 * KIB, 100)).collect();
    let size = 1000 * MIB;
    let rationed = Device::limited(200, 200);
    let line = |us: u64, ps_per_byte| LinearCost { fixed: Nanos::from_micros(us), ps_per_byte };
    let late = Device { parallel: 32, ..Device::of(line(5000, 5000).into(), line(5000, 5000).into(), "late") };
    let narrow = Device::of(line(50, 50_000).into(), line(50, 50_000).into(), "narrow");
    let trace = record(&[size], &steps, &rationed);
    let plan = plan(&trace, &Options::new(rationed.clone()));
    let entry = &plan.hints.file[0];
    let run = run_of(&trace, &rationed, |_| true, usize::MAX);
    let entries: Entries = [(0, Hinted { entry, index: None, learnt: None })].into_iter().collect();
    for (device, pays) in [(&rationed, true), (&late, true), (&narrow, false)] {
        let without = replay(&run, device, 1 << 30, &Entries::default()).run_ns;
        let with = replay_judged(&run, device, 1 << 30, &entries, StandDown::default(), &plan.hints.device);
        let what = format!("{}: {without} ns, {with:?}", device.source);
        if pays {
            assert!(with.stood_down_ns.is_none() && with.run_ns < without * 7 / 10, "{what}");
        } else {
            let soon = (without / 20).min(2_000_000_000);
            assert!(with.stood_down_ns.is_some_and(|after_ns| after_ns <= soon), "{what}");
            assert!(with.run_ns <= without + without / 100 + 20_000_000, "{what}");
        }
    }
}

/// Where six sevenths of what blocks bring in are for nothing, they must gain plainly; else the manager would stop them.
#[test]
fn what_goes_unread_must_pay() {
    let steps: Vec<Step> = (0..1000).map(|i| (1, 0, i * 448 * KIB, 64 * KIB, 100)).collect();
    let plan = planned(&[448_000 * KIB], &steps, &Device::limited(200, 200));
    let e = plan.expected.unwrap();
    assert!(e.wasted_bytes > 300 * MIB && e.gain() > 0.4, "few large requests are worth it: {e:?}");
    let line = |us: u64, ps_per_byte| LinearCost { fixed: Nanos::from_micros(us), ps_per_byte };
    let fast = Device::of(line(300, 1).into(), line(300, 1).into(), "a device that is quick with bytes");
    for compute_us in [100, 300, 1000, 3000] {
        let steps: Vec<Step> = (0..1000).map(|i| (1, 0, i * 448 * KIB, 64 * KIB, compute_us)).collect();
        if let Some(e) = planned(&[448_000 * KIB], &steps, &fast).expected {
            assert!(e.wasted_bytes < 150 * MIB || e.gain() >= 0.3, "{compute_us}: {e:?}");
        }
    }
}

#[test]
fn strided_reads_on_a_disk() {
    let plan = planned(&[500_000 * KIB], &strided(), &Device::disk());
    let e = plan.expected.unwrap();
    assert!(e.gain() >= 0.5, "the paper's half: {e:?}");
}

#[test]
fn a_few_jumps_back_are_kept_in_the_cache() {
    let mut steps = strided();
    for i in (50..950).step_by(50) {
        steps[i].2 -= 9 * 500 * KIB - 250 * KIB;
    }
    let plan = planned(&[500_000 * KIB], &steps, &Device::limited(200, 200));
    let entry = &plan.hints.file[0];
    assert_eq!(entry.will_need, [Region::WHOLE]);
    let behind = (entry.cache_size - entry.read_ahead_size) * entry.block_size;
    let p = &plan.files[0].pattern;
    assert!(p.backward >= 18 && p.back_bytes >= 4_000_000, "{p:?}");
    assert!(behind >= p.back_bytes, "{behind} {}", p.back_bytes);
    assert!(plan.expected.unwrap().gain() >= 0.4);
}

#[test]
fn sequential_reads_that_the_kernel_serves_get_nothing() {
    let steps: Vec<Step> = (0..2000).map(|i| (1, 0, i * 64 * KIB, 64 * KIB, 2000)).collect();
    let mut device = Device::disk();
    device.read_ahead_bytes = 4 * MIB;
    let plan = planned(&[2000 * 64 * KIB], &steps, &device);
    assert!(plan.hints.file.is_empty(), "{}", plan.text());
    let reason = plan.refused.unwrap();
    assert!(reason.contains("in order") || reason.contains("fast enough"), "{reason}");
    assert_eq!(plan.files[0].pattern.kind(), Kind::Sequential);
}

#[test]
fn a_fast_device_gets_nothing() {
    // 20 µs a request, and 2 ms of computing between.
    let device = Device { parallel: 8, ..Device::limited(50_000, 8000) };
    let steps: Vec<Step> = (0..1000).map(|i| (1, 0, i * 500 * KIB, 250 * KIB, 2000)).collect();
    let plan = planned(&[500_000 * KIB], &steps, &device);
    let reason = plan.refused.unwrap();
    assert!(reason.contains("waited for reads"), "{reason}");
}

#[test]
fn what_came_from_memory_gets_nothing_unless_asked() {
    let device = Device::limited(200, 200);
    let mut trace = record(&[500_000 * KIB], &strided(), &device);
    trace.records.iter_mut().for_each(|r| r.duration = Some(Nanos(40_000)));
    let plan_warm = plan(&trace, &Options::new(device.clone()));
    check(&plan_warm);
    assert!(plan_warm.refused.as_ref().unwrap().contains("came from memory"), "{:?}", plan_warm.refused);
    let cold = plan(&trace, &Options { assume_cold: true, ..Options::new(device) });
    check(&cold);
    assert!(cold.refused.is_none(), "{:?}", cold.refused);
}

/// 4 KiB reads anywhere in 32 MiB of a large file: the region is brought in as a whole.
#[test]
fn random_reads_in_a_hot_region() {
    let mut random = Random::new(7);
    let steps: Vec<Step> = (0..4000).map(|_| (1, 0, 512 * MIB + random.below(8192) * 4096, 4096, 300)).collect();
    let plan = planned(&[4096 * MIB], &steps, &Device::limited(200, 200));
    let entry = &plan.hints.file[0];
    let region = entry.will_need[0].bytes();
    assert!(region.start >= 511 * MIB && region.end <= 545 * MIB, "{entry:?}");
    assert!(entry.block_size * entry.cache_size >= 32 * MIB);
    assert!(plan.expected.unwrap().gain() > 0.8, "{}", plan.text());
    assert_eq!(plan.files[0].pattern.kind(), Kind::Random);
}

/// Random reads all over a file that fits nowhere: only their order could help, and it does when it is known.
#[test]
fn random_reads_all_over() {
    let mut random = Random::new(11);
    let steps: Vec<Step> = (0..1000).map(|_| (1, 0, random.below(1 << 24) * 4096, 64 * KIB, 5000)).collect();
    let plan = planned(&[1 << 37], &steps, &Device::disk());
    match plan.hints.file.first() {
        Some(entry) => {
            assert!(!entry.sequence.is_empty() && entry.will_need.is_empty(), "{entry:?}");
            assert!(entry.why.as_ref().unwrap().contains("order of the recorded run"));
        }
        None => assert!(plan.refused.is_some()),
    }
}

#[test]
fn many_small_files_get_nothing() {
    let sizes = [64 * KIB; 300];
    let steps: Vec<Step> = (0..300).flat_map(|f| (0..4).map(move |i| (1, f, i * 16 * KIB, 16 * KIB, 200))).collect();
    let plan = planned(&sizes, &steps, &Device::disk());
    assert!(plan.hints.file.is_empty() && plan.hints.directory.is_empty(), "{}", plan.text());
}

/// Large files of one folder, all read alike: one entry for the folder.
#[test]
fn many_alike_files_of_a_folder_get_one_entry() {
    let sizes = [100 * MIB; 10];
    let steps: Vec<Step> = (0..10).flat_map(|f| (0..150).map(move |i| (1, f, i * 500 * KIB, 250 * KIB, 500))).collect();
    let plan = planned(&sizes, &steps, &Device::limited(200, 200));
    assert_eq!(plan.hints.directory.len(), 1, "{}", plan.text());
    assert_eq!(plan.hints.directory[0].path, Path::new("/data"));
    assert!(plan.hints.file.len() < 3);
}

#[test]
fn several_streams_in_one_file() {
    let steps: Vec<Step> = (0..1200).map(|i| (1, 0, i % 4 * 256 * MIB + i / 4 * 400 * KIB, 200 * KIB, 500)).collect();
    let plan = planned(&[1024 * MIB], &steps, &Device::limited(200, 200));
    assert_eq!(plan.files[0].pattern.streams, 4, "{:?}", plan.files[0].pattern);
    let entry = &plan.hints.file[0];
    assert!(entry.cache_size >= 4 * entry.read_ahead_size, "each stream has its window: {entry:?}");
    assert!(plan.expected.unwrap().gain() > 0.3, "{}", plan.text());
}

#[test]
fn several_processes_share_what_is_brought_in() {
    let mut steps: Vec<Step> = Vec::new();
    for i in 0..500 {
        for process in 1..=4 {
            steps.push((process, 0, i * 500 * KIB, 250 * KIB, 500 + u64::from(process)));
        }
    }
    let plan = planned(&[250_000 * KIB], &steps, &Device::limited(200, 200));
    assert_eq!(plan.files[0].pattern.processes, 4);
    let e = plan.expected.unwrap();
    assert!(e.requests_with < 400, "one process's worth: {e:?}");
}

/// A header, then records in no order, then an index in order: regions and phases.
#[test]
fn regions_and_phases() {
    let mut steps: Vec<Step> = (0..200).map(|i| (1, 0, i * 500 * KIB, 250 * KIB, 500)).collect();
    let mut random = Random::new(3);
    for _ in 0..800 {
        steps.push((1, 0, 200 * MIB + random.below(100 * 256) * 4096, 4096, 100));
    }
    steps.extend((0..500).map(|i| (1, 0, 400 * MIB + i * 64 * KIB, 64 * KIB, 500)));
    let plan = planned(&[440 * MIB], &steps, &Device::limited(200, 200));
    let p = &plan.files[0].pattern;
    let kinds: Vec<Kind> = p.parts.iter().map(|p| p.kind).collect();
    assert_eq!(kinds, [Kind::Forward, Kind::Random, Kind::Sequential], "{:?}", p.parts);
    assert_eq!(p.phases.iter().map(|ph| ph.part).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(plan.refused.is_none(), "{}", plan.text());
}

#[test]
fn programs_one_after_the_other_stay_so() {
    // The second begins when the first has ended: what the first saves, the second gains.
    let device = Device::limited(200, 200);
    let first: Vec<Step> = (0..200).map(|i| (1, 0, i * 500 * KIB, 250 * KIB, 500)).collect();
    let mut trace = record(&[200 * MIB, 200 * MIB], &first, &device);
    let end = trace.records.last().unwrap().completion().unwrap().0;
    let mut builder = Builder::new(Header::default());
    trace.files.iter().for_each(|f| _ = builder.file(f.clone()).unwrap());
    let origins = [1, 2].map(|process| builder.origin(Origin { process, ..Origin::default() }).unwrap());
    for r in std::mem::take(&mut trace.records) {
        builder.push(Record { origin: origins[0], ..r }).unwrap();
        let arrival = Nanos(r.arrival.0 + end + 1000);
        builder.push(Record { origin: origins[1], file: FileId(1), arrival, ..r }).unwrap();
    }
    let plan = plan(&builder.build(), &Options::new(device));
    check(&plan);
    let e = plan.expected.unwrap();
    let one = plan.files[0].expected.unwrap();
    assert!((e.without_s / one.without_s - 2.0).abs() < 0.1, "{e:?} {one:?}");
    assert!((e.with_s / one.with_s - 2.0).abs() < 0.2, "{e:?} {one:?}");
}

/// A program that maps its data and reads a small file: the mapped file is listed, with the reason for having no hints.
#[test]
fn a_file_that_is_only_mapped_is_listed() {
    let device = Device::limited(200, 200);
    for reads in [false, true] {
        let mut builder = Builder::new(Header::default());
        let mut file =
            |path: &[u8], size| builder.file(FileInfo { path: path.to_vec(), key: 0, size_bytes: Some(size) }).unwrap();
        let (model, library, small) =
            (file(b"/data/model.bin", 900 * MIB), file(b"/data/env/lib/_x.so", MIB), file(b"/data/config", 200 * KIB));
        for (file, at) in [(model, 1), (library, 2)] {
            builder.push(Record::new(TraceOp::Map, file, 0, 4096, Nanos(at))).unwrap();
        }
        for i in 0..u64::from(reads) * 3 {
            let record = Record::new(TraceOp::Read, small, i * 64 * KIB, 64 * KIB, Nanos(10 + i * 6_000_000));
            builder.push(Record { duration: Some(Nanos(5_000_000)), ..record }).unwrap();
        }
        let plan = plan(&builder.build(), &Options::new(device.clone()));
        check(&plan);
        let listed = plan.files.iter().find(|f| f.path == "/data/model.bin").expect("the mapped file");
        assert!(listed.why.contains("maps it into memory") && listed.purpose == Purpose::Input);
        assert!(plan.text().contains("/data/model.bin") && plan.text().contains("mapped"), "{}", plan.text());
        assert!(!plan.files.iter().any(|f| f.path.contains("_x.so")));
    }
}

#[test]
fn traces_without_reads_or_ends() {
    let device = Device::limited(200, 200);
    let empty = plan(&Builder::new(Header::default()).build(), &Options::new(device.clone()));
    assert!(empty.refused.unwrap().contains("no reads"));
    // fio's logs and DXT's do not tell all: without ends, they are assumed.
    let mut trace = record(&[500_000 * KIB], &strided(), &device);
    trace.records.iter_mut().for_each(|r| r.duration = None);
    let plan = plan(&trace, &Options::new(device));
    check(&plan);
    assert!(plan.refused.is_none(), "{}", plan.text());
}

/// Names that cannot be written down are told of, not written.
#[test]
fn odd_names() {
    let device = Device::limited(200, 200);
    for path in [&b"relative"[..], b"/not utf-8 \xff", b"/usr/lib/x.so", b""] {
        let mut trace = record(&[500_000 * KIB], &strided(), &device);
        trace.files[0].path = path.to_vec();
        let plan = plan(&trace, &Options::new(device.clone()));
        check(&plan);
        assert!(plan.hints.file.is_empty());
    }
    let mut trace = record(&[500_000 * KIB], &strided(), &device);
    trace.files[0].path = b"/with \"quotes\" and\nlines".to_vec();
    let plan = plan(&trace, &Options::new(device));
    check(&plan);
    assert_eq!(plan.hints.file.len(), 1);
}

fn any_device() -> impl Strategy<Value = Device> {
    let limited = (1u64..100_000, 1u64..10_000, 1u32..9)
        .prop_map(|(iops, mib, parallel)| Device { parallel, ..Device::limited(iops, mib) });
    let device = prop_oneof![Just(Device::disk()), Just(Device::flash()), limited];
    (device, 12..23u32, 16..23u32).prop_map(|(d, ahead, largest)| Device {
        read_ahead_bytes: 1 << ahead,
        request_bytes_max: 1 << largest,
        ..d
    })
}

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    let wild = prop::collection::vec(
        (1u32..4, 0usize..3, prop_oneof![0..64 * MIB, 0..u64::MAX / 4], 1..2 * MIB, 0u64..5000),
        1..60,
    );
    let strided =
        (1u64..2 * MIB, 1..MIB, 0u64..3000, 1u64..150, 1u32..4).prop_map(|(stride, len, us, n, processes)| {
            (0..n).flat_map(|i| (1..=processes).map(move |p| (p, 0, i * stride, len, us))).collect::<Vec<Step>>()
        });
    prop_oneof![wild, strided]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever was recorded: hints that the reader of hints files takes, and no gain beyond perfect overlap.
    #[test]
    fn plans_can_be_used_and_promise_nothing_impossible(
        steps in any_steps(),
        device in any_device(),
        assume_cold in any::<bool>(),
        window in 12..28u32,
    ) {
        let trace = record(&[64 * MIB, 0, 100], &steps, &device);
        let options = Options { assume_cold, window_bytes_max: 1 << window, ..Options::new(device) };
        check(&plan(&trace, &options));
    }
}

/// A program reads a quarter of the members of an archive in the order of its directory, which is not that of the file. The plan goes by
/// the directory where it can be read, and so holds for other archives, too; else by the order of the run.
#[test]
fn a_file_that_lists_its_own_extents_is_planned_by_its_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("a.npz");
    let (members, len) = (2400u64, 100 * KIB);
    let starts: Vec<u64> = (0..members).map(|i| (i * 367 + 11) % members * len).collect();
    let mut directory = Vec::new();
    for start in &starts {
        directory.extend([&b"PK\x01\x02"[..], &[0; 38], &(*start as u32).to_le_bytes()].concat());
    }
    let at = members * len;
    let end = [&b"PK\x05\x06"[..], &[0; 6], &(members as u16).to_le_bytes(), &(directory.len() as u32).to_le_bytes()];
    let end = [end.concat(), (at as u32).to_le_bytes().to_vec(), vec![0; 2]].concat();
    let size = at + (directory.len() + end.len()) as u64;
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(&path).unwrap();
    file.write_all_at(b"PK\x03\x04", 0).unwrap();
    file.write_all_at(&[directory, end].concat(), at).unwrap();
    let line = LinearCost { fixed: Nanos(5_000_000), ps_per_byte: 5000 };
    let device = Device { parallel: 32, ..Device::of(line.into(), line.into(), "a mount with latency") };
    let plan_of = |path: &Path, size: u64| {
        let steps: Vec<Step> = starts.iter().take(600).map(|start| (1, 0, *start, len, 500)).collect();
        let mut trace = record(&[size], &steps, &device);
        trace.files[0].path = path.to_str().unwrap().as_bytes().to_vec();
        let plan = plan(&trace, &Options::new(device.clone()));
        check(&plan);
        plan
    };
    let plan = plan_of(&path, size);
    let entry = &plan.hints.file[0];
    assert!(entry.online && entry.sequence.is_empty() && entry.will_need.is_empty(), "{entry:?}");
    assert!(plan.files[0].why.contains("index (NumPy)"), "{}", plan.files[0].why);
    assert!(plan.expected.unwrap().gain() > 0.2, "{:?}", plan.expected);
    // Where the reader of the index would give up, the plan does not count on it.
    let index = crate::formats::read_open(
        std::os::fd::AsFd::as_fd(&std::fs::File::open(&path).unwrap()),
        &crate::formats::by_name(&path),
        None,
    );
    let line = |ms: u64| LinearCost { fixed: Nanos(ms * 1_000_000), ps_per_byte: 0 };
    let slow =
        |ms: u64| super::index::reading_ns(index.as_ref().unwrap(), &Device::of(line(ms).into(), line(ms).into(), ""));
    assert_eq!(slow(150), None);
    assert!(slow(5).is_some_and(|takes_ns| takes_ns < 50_000_000), "{:?}", slow(5));
    // Of another length, and not there: nothing is believed of its index.
    for plan in [plan_of(&path, size + 1), plan_of(&dir.path().join("other.npz"), size)] {
        assert!(!plan.files[0].why.contains("index"), "{}", plan.files[0].why);
    }
}

/// Programs that no rule was made for, with the sizes of their files.
fn other_programs() -> Vec<(&'static str, u64, Vec<Step>)> {
    let strided =
        |n: u64, len: u64, stride: u64, us: u64| -> Vec<Step> { (0..n).map(|i| (1, 0, i * stride, len, us)).collect() };
    let shuffled = |n: u64, len: u64, every: u64, us: u64| -> Vec<Step> {
        let mut places: Vec<u64> = (0..n).collect();
        Random::new(n).shuffle(&mut places);
        places.into_iter().map(|i| (1, 0, i * every, len, us)).collect()
    };
    let columns = (0..800u64).flat_map(|row| [(row * 400_000, 30_000), (row * 400_000 + 150_000, 10_000)]);
    vec![
        ("12 KiB of each 96 KiB", 2000 * 96 * KIB, strided(2000, 12 * KIB, 96 * KIB, 20)),
        ("100 KB of each 300 KB", 180_000_000, strided(600, 100_000, 300_000, 200)),
        ("1 MiB of each 3 MiB", 450 * MIB, strided(150, MIB, 3 * MIB, 1000)),
        ("180 KB of each 400 KB, soon over", 16_000_000, strided(40, 180_000, 400_000, 10)),
        ("40 KB of each 200 KB, backward", 300_000_000, {
            let mut steps = strided(1500, 40_000, 200_000, 50);
            steps.reverse();
            steps
        }),
        ("two columns of rows of 400 KB", 320_000_000, columns.map(|(at, len)| (1, 0, at, len, 30)).collect()),
        ("600 chunks of 64 KiB in no order", 150 * MIB, shuffled(600, 64 * KIB, 256 * KIB, 100)),
        ("193 chunks of 700 KiB in no order", 193 * MIB, shuffled(193, 700 * KIB, MIB, 300)),
        ("150 of 900 chunks of 100 KB in no order", 90_000_000, shuffled(900, 100_000, 100_000, 50)[..150].to_vec()),
        ("400 places in 15 MiB in no order", 15 * MIB, shuffled(3840, 4096, 4096, 10)[..400].to_vec()),
        ("60 places in 8 MiB in no order", 8 * MIB, shuffled(2048, 4096, 4096, 10)[..60].to_vec()),
    ]
}

/// Devices that no rule was made for.
fn other_devices() -> Vec<Device> {
    let line = |us: u64, ps_per_byte| LinearCost { fixed: Nanos::from_micros(us), ps_per_byte };
    let of = |us, ps, parallel, name: &str| Device {
        parallel,
        ..Device::of(line(us, ps).into(), line(us, ps).into(), name)
    };
    vec![
        Device::limited(300, 20),
        Device::limited(5000, 200),
        of(5000, 160_000, 32, "5 ms, 32 at once, 200 MB/s together"),
        of(700, 4000, 4, "0.7 ms, 4 at once, 250 MB/s each"),
    ]
}

/// Without a plan no program is held up on any device by more than a hundredth and 20 ms, and those that the rules were made with by
/// no more than 3 ms beside that, whether it is known what the device costs or not.
#[test]
fn no_plan_costs_next_to_nothing_on_any_device() {
    let line = LinearCost { fixed: Nanos::from_micros(60), ps_per_byte: 450 };
    let fast = Device { parallel: 2, ..Device::of(line.into(), line.into(), "fast") };
    let mut devices: Vec<Device> = devices().into_iter().chain([fast]).collect();
    let entry = Entry { online: true, ..Entry::new("/data/f0") };
    let entries: Entries = [(0, Hinted { entry: &entry, index: None, learnt: None })].into_iter().collect();
    let mut all = programs();
    all.push(("20 KB of each 150 KB, soon over", 48 * MIB, (0..320).map(|i| (1, 0, i * 150_000, 20_000, 5)).collect()));
    let known = (all.len(), devices.len());
    all.extend(other_programs());
    devices.extend(other_devices());
    let mut bad = Vec::new();
    for (program, (name, size, steps)) in all.into_iter().enumerate() {
        for (number, device) in devices.iter().enumerate() {
            let slack_ns = if program < known.0 && number < known.1 { 3_000_000 } else { 20_000_000 };
            let run = run_of(&record(&[size], &steps, device), device, |_| true, usize::MAX);
            let without = replay(&run, device, 1 << 30, &Entries::default()).run_ns;
            for cost in [device.cost(), DeviceCost::default()] {
                let with = replay_judged(&run, device, 1 << 30, &entries, StandDown::default(), &cost).run_ns;
                let (without_ms, with_ms) = (without / 1_000_000, with / 1_000_000);
                let row = format!("{name}, on {}, {cost:?}: {without_ms} → {with_ms} ms", device.source);
                println!("{row}");
                if with > without + without / 100 + slack_ns {
                    bad.push(row);
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}\n{}", bad.len(), bad.join("\n"));
}

/// A run takes no longer with what is known of a file's kind than without hints, and nine tenths of what is saved where nothing is known
/// are left, but for 60 ms in which the first pieces are seen to come late.
#[test]
fn a_known_kind_is_never_worse_than_an_unknown_one() {
    let devices: Vec<Device> = devices().into_iter().chain(other_devices()).collect();
    let entry = Entry { online: true, ..Entry::new("/data/f0") };
    let mut all: Vec<_> = programs().into_iter().chain(other_programs()).collect();
    let backward = |len: u64, n: u64| (0..n).rev().map(|i| (1, 0, i * len, len, 20)).collect();
    all.push(("8 KiB after the other, backward", 16 * MIB, backward(8 * KIB, 2048)));
    all.push(("64 KiB after the other, backward", 48 * MIB, backward(64 * KIB, 768)));
    all.push(("half of each 256 KiB", 24 * MIB, (0..96).map(|i| (1, 0, i * 256 * KIB, 128 * KIB, 100)).collect()));
    let mut bad = Vec::new();
    for (name, size, steps) in all {
        let reads = steps.iter().map(|(_, _, offset, len, _)| *offset..offset + len);
        let Some(sample) = Sample::of(size, reads) else { continue };
        let shape = Arc::new(Shape::learn(&[&sample, &sample]));
        let [unknown, known]: [Entries; 2] = [None, Some(&shape)]
            .map(|learnt| [(0, Hinted { entry: &entry, index: None, learnt })].into_iter().collect());
        for device in &devices {
            let run = run_of(&record(&[size], &steps, device), device, |_| true, usize::MAX);
            let without = replay(&run, device, 1 << 30, &Entries::default()).run_ns;
            let cost = DeviceCost::default();
            let [unknown, known] = [&unknown, &known]
                .map(|entries| replay_judged(&run, device, 1 << 30, entries, StandDown::default(), &cost).run_ns);
            let [without_ms, unknown_ms, known_ms] = [without, unknown, known].map(|ns| ns / 1_000_000);
            let row = format!("{name}, on {}: {without_ms} → {unknown_ms}, known {known_ms} ms", device.source);
            println!("{row}");
            let saved = without.saturating_sub(unknown);
            let is_slower = known > without + without / 100 + 20_000_000;
            if is_slower || known > unknown + saved / 10 + without / 100 + 60_000_000 {
                bad.push(row);
            }
        }
    }
    assert!(bad.is_empty(), "{}\n{}", bad.len(), bad.join("\n"));
}

/// Columns of a table of chunks that its index knows, one after the other, from a mount where each request takes 5 ms.
#[test]
fn columns_of_chunks_hardly_wait_for_a_distant_device() {
    let line = LinearCost { fixed: Nanos::from_micros(5000), ps_per_byte: 5000 };
    let device = Device { parallel: 32, ..Device::of(line.into(), line.into(), "latency-bound") };
    let size = 64 * MIB;
    let chunk = |i: u64| MIB + i * 64 * KIB;
    let chunks: Vec<_> = (0..512).map(|i| chunk(i)..chunk(i + 1)).collect();
    let index = Index {
        format: "HDF5",
        tracks: impresario_foresight::Tracks::new([chunks], size),
        size_bytes: size,
        is_partial: false,
        spent: crate::formats::Spent { requests: 4, bytes: 80 * KIB, rounds: vec![1; 4] },
    };
    // The superblock, and every fourth column.
    let mut steps = vec![(1, 0, 0, 512, 0), (1, 0, 2048, 544, 0)];
    let columns = (0..32).step_by(4).flat_map(|column| (0..16).map(move |row| row * 32 + column));
    steps.extend(columns.map(|i| (1, 0, chunk(i), 64 * KIB, 20)));
    let run = run_of(&record(&[size], &steps, &device), &device, |_| true, usize::MAX);
    let entry = Entry { online: true, ..Entry::new("/data/f0.h5") };
    let entries: Entries = [(0, Hinted { entry: &entry, index: Some(&index), learnt: None })].into_iter().collect();
    let without = replay(&run, &device, 1 << 30, &Entries::default());
    let with = replay_judged(&run, &device, 1 << 30, &entries, StandDown::default(), &device.cost());
    assert!(with.wait_ns * 10 <= without.wait_ns * 3, "{without:?} {with:?}");
    assert!(with.device_bytes <= without.device_bytes * 12 / 10, "{without:?} {with:?}");
}
