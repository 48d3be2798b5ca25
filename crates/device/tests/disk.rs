//! The disk against figures worked out by hand from its parameters, and against properties of any requests.

use impresario_base::random::Random;
use impresario_device::{DeviceParams, DeviceQueue, Disk, Io, LinearCost, Op, Order, Served};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
/// 60 s / 7200.
const TURN_NS: u64 = 8_333_333;
const TRACK_BYTES: u64 = 1_212_416;
const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;

fn plain() -> DeviceParams {
    DeviceParams { read_ahead_bytes: 0, ..DeviceParams::default() }
}

/// Deterministic random addresses on the disk.
fn places(count: usize) -> Vec<u64> {
    let mut random = Random::new(1);
    (0..count).map(|_| random.below(244_000_000) * 4096).collect()
}

/// Serves requests back to back.
fn run(disk: &mut Disk, ios: impl IntoIterator<Item = Io>) -> Vec<Served> {
    ios.into_iter().map(|io| disk.serve(disk.busy_until_ns(), &io)).collect()
}

fn mean_ms(disk: &Disk, requests: usize) -> f64 {
    disk.busy_until_ns() as f64 / 1e6 / requests as f64
}

/// Queues all requests at once and serves them in the queue's order.
fn run_queued(params: &DeviceParams, ios: &[Io]) -> u64 {
    let (mut disk, mut queue) = (Disk::new(params), DeviceQueue::new(params));
    ios.iter().for_each(|&io| queue.push(io, ()));
    while let Some(taken) = queue.pop(disk.head_address()) {
        disk.serve(disk.busy_until_ns(), &taken.io);
    }
    disk.busy_until_ns()
}

#[test]
fn random_reads_cost_overhead_seek_and_half_a_turn() {
    let mut disk = Disk::new(&DeviceParams::default());
    let served = run(&mut disk, places(20_000).into_iter().map(|p| Io::read(p, 4096)));
    // 0.1 + 8.5 + 8.333 / 2 + 4096 / 1212416 × 8.333
    let expected_ms = 0.1 + 8.5 + 4.167 + 0.028;
    assert!((mean_ms(&disk, 20_000) / expected_ms - 1.0).abs() < 0.01, "{}", mean_ms(&disk, 20_000));
    let seek_ms = served.iter().map(|s| s.seek_ns).sum::<u64>() as f64 / 1e6 / 20_000.0;
    assert!((seek_ms / 8.5 - 1.0).abs() < 0.01, "{seek_ms}");
    let fit = LinearCost::of(&DeviceParams::default(), Op::Read);
    assert!((fit.ns(4096) as f64 / 1e6 / expected_ms - 1.0).abs() < 0.001, "{fit:?}");
}

#[test]
fn random_writes_settle_a_millisecond_longer() {
    let mut disk = Disk::new(&DeviceParams::default());
    run(&mut disk, places(20_000).into_iter().map(|p| Io::write(p, 4096)));
    let expected_ms = 0.1 + 9.5 + 4.167 + 0.028;
    assert!((mean_ms(&disk, 20_000) / expected_ms - 1.0).abs() < 0.01, "{}", mean_ms(&disk, 20_000));
    let fit = LinearCost::of(&DeviceParams::default(), Op::Write);
    assert!((fit.ns(4096) as f64 / 1e6 / expected_ms - 1.0).abs() < 0.001, "{fit:?}");
}

#[test]
fn a_request_is_overhead_then_rotation_to_its_sector_then_transfer() {
    let mut disk = Disk::new(&plain());
    // Half a track in: half a turn from time zero; 101040 bytes take 694 µs.
    let served = disk.serve(0, &Io::read(TRACK_BYTES / 2, TRACK_BYTES / 12));
    assert_eq!(served.seek_ns, 0);
    assert_eq!(served.rotation_ns, 4_166_666 - 100_000);
    assert!(served.transfer_ns.abs_diff(TURN_NS / 12) <= 20, "{served:?}");
    assert_eq!(served.end_ns, 100_000 + served.rotation_ns + served.transfer_ns);
    assert!(!served.cached);
}

#[test]
fn a_queued_stream_reaches_the_sustained_rate() {
    for (op, params) in [(Op::Read, DeviceParams::default()), (Op::Read, plain()), (Op::Write, plain())] {
        for len in [64 * KIB, MIB, 4 * MIB] {
            let mut disk = Disk::new(&params);
            let total = 512 * MIB;
            run(&mut disk, (0..total / len).map(|i| Io { op, address: i * len, len }));
            let rate = total as f64 / (disk.busy_until_ns() as f64 / 1e9);
            assert!((rate / params.sustained_bytes_per_s() as f64 - 1.0).abs() < 0.01, "{op:?} {len}: {rate}");
            assert!((rate / 130e6 - 1.0).abs() < 0.01, "{rate}");
        }
    }
}

#[test]
fn a_request_a_little_late_loses_a_turn_without_read_ahead() {
    let late_ns = MS / 2;
    let next = |disk: &mut Disk, op| {
        let first = disk.serve(0, &Io { op, address: 0, len: 64 * KIB });
        disk.serve(first.end_ns + late_ns, &Io { op, address: 64 * KIB, len: 64 * KIB })
    };
    for op in [Op::Read, Op::Write] {
        let second = next(&mut Disk::new(&plain()), op);
        // 0.5 ms late and 0.1 ms overhead: the rest of the turn.
        assert_eq!((second.seek_ns, second.rotation_ns), (0, TURN_NS - late_ns - 100_000), "{op:?}");
    }
    let mut disk = Disk::new(&DeviceParams::default());
    let second = next(&mut disk, Op::Read);
    assert!(second.cached, "the drive read on meanwhile");
    assert_eq!(second.end_ns, disk.busy_until_ns());
}

#[test]
fn the_read_ahead_serves_cached_bytes_and_streams_the_rest() {
    let params = DeviceParams { overhead_us: 0, ..DeviceParams::default() };
    let mut disk = Disk::new(&params);
    let first = disk.serve(0, &Io::read(0, 64 * KIB));
    // After 2 ms the drive has read 2 / 8.333 × 1212416 = 290980 bytes more.
    let at = first.end_ns + 2 * MS;
    let hit = disk.serve(at, &Io::read(64 * KIB, 128 * KIB));
    assert!(hit.cached);
    assert_eq!(hit.end_ns - at, 128 * KIB * 3333 / 1000, "300 MB/s");
    // The rest comes at the platter's rate: 640 KiB / 145.5 MB/s in total after the first.
    let rest = disk.serve(hit.end_ns, &Io::read(192 * KIB, 512 * KIB));
    assert!(!rest.cached && rest.seek_ns == 0);
    assert!(rest.end_ns.abs_diff(first.end_ns + 640 * KIB * TURN_NS / TRACK_BYTES) < 20, "{rest:?}");
    // It stops 1 MiB after the last read; a later read waits for that address to come round.
    let late = disk.serve(rest.end_ns + 500 * MS, &Io::read(1728 * KIB, 64 * KIB));
    assert!(!late.cached && late.rotation_ns > 0 && late.end_ns - rest.end_ns < 510 * MS, "{late:?}");
}

#[test]
fn the_drive_caches_what_it_read_before_the_head_moved() {
    let mut disk = Disk::new(&DeviceParams::default());
    let first = disk.serve(0, &Io::read(0, 64 * KIB));
    let away = disk.serve(first.end_ns + 20 * MS, &Io::read(500_000_000_000, 4 * KIB));
    let back = disk.serve(away.end_ns, &Io::read(MIB, 64 * KIB));
    assert!(back.cached, "64 KiB and the whole read-ahead of 1 MiB");
    let beyond = disk.serve(back.end_ns, &Io::read(MIB, 128 * KIB));
    assert!(!beyond.cached && beyond.seek_ns > 5 * MS, "only half of it was remembered: {beyond:?}");
    assert!(beyond.transfer_ns < 64 * KIB * TURN_NS / TRACK_BYTES + 20, "and only the other half is read");
    let rewritten = disk.serve(beyond.end_ns, &Io::write(0, 4 * KIB));
    let reread = disk.serve(rewritten.end_ns, &Io::read(0, 4 * KIB));
    assert!(!reread.cached, "written data is not taken from what was read before");
}

#[test]
fn interleaved_streams_pay_seeks() {
    let (near, far) = (0, 700_000_000_000);
    let mut disk = Disk::new(&DeviceParams::default());
    let served = run(&mut disk, (0..400u64).map(|i| Io::read((i % 2) * far + near + i / 2 * 64 * KIB, 64 * KIB)));
    let seeks = served.iter().filter(|s| s.seek_ns > 5 * MS).count();
    assert!(seeks >= 399, "{seeks}");
    let alone_ms = 400.0 * 64.0 * 1024.0 / 130e6 * 1e3;
    assert!(disk.busy_until_ns() as f64 / 1e6 > 20.0 * alone_ms);
}

#[test]
fn the_elevator_beats_arrival_order_and_merges() {
    let elevator = DeviceParams { order: Order::Elevator, ..DeviceParams::default() };
    let random: Vec<Io> = places(4000).into_iter().map(|p| Io::read(p, 16 * KIB)).collect();
    let (arrival_ns, elevator_ns) = (run_queued(&DeviceParams::default(), &random), run_queued(&elevator, &random));
    // 32 addresses in a sweep: a 33rd of the stroke is about 3 ms instead of 8.5.
    let gain = 1.0 - elevator_ns as f64 / arrival_ns as f64;
    assert!((0.3..0.6).contains(&gain), "{gain}");
    // Four streams, interleaved: in arrival order each request seeks; merged, one in eight does.
    let streams: Vec<Io> =
        (0..4000u64).map(|i| Io::write(i % 4 * 200_000_000_000 + i / 4 * 16 * KIB, 16 * KIB)).collect();
    let (arrival_ns, elevator_ns) = (run_queued(&DeviceParams::default(), &streams), run_queued(&elevator, &streams));
    assert!(elevator_ns * 5 < arrival_ns, "{elevator_ns} {arrival_ns}");
}

#[test]
fn the_write_cache_hides_writes_until_it_is_full() {
    let params = DeviceParams { write_cache: true, write_cache_bytes: 4 * MIB, ..DeviceParams::default() };
    let mut disk = Disk::new(&params);
    let ios: Vec<Io> = places(4000).into_iter().map(|p| Io::write(p, 64 * KIB)).collect();
    let served = run(&mut disk, ios.clone());
    let spans: Vec<u64> = std::iter::once(0).chain(served.iter().map(|s| s.end_ns)).collect();
    let took = |i: usize| spans[i + 1] - spans[i];
    // 64 × 64 KiB fit; until then a write takes the overhead and 64 KiB at 300 MB/s.
    assert!((0..64).all(|i| took(i) == 100_000 + 64 * KIB * 3333 / 1000));
    // Then each waits for room, but the elevator chooses among 64: cheaper than in order of arrival.
    let full_ms = (spans[4000] - spans[100]) as f64 / 1e6 / 3900.0;
    let mut uncached = Disk::new(&DeviceParams::default());
    run(&mut uncached, ios);
    let uncached_ms = mean_ms(&uncached, 4000);
    assert!(full_ms > 5.0 && full_ms < 0.75 * uncached_ms, "{full_ms} {uncached_ms}");
    let flushed = disk.flush(disk.busy_until_ns());
    assert!((flushed - spans[4000]) / MS > 200, "some 64 places were left to write");
    assert_eq!(disk.flush(flushed), flushed + 100_000, "nothing left");
}

#[test]
fn an_idle_drive_writes_its_cache_out() {
    let params = DeviceParams { write_cache: true, ..DeviceParams::default() };
    let mut disk = Disk::new(&params);
    let served = run(&mut disk, places(20).into_iter().map(|p| Io::write(p, 4 * KIB)));
    let soon = served[19].end_ns;
    assert!(soon < 3 * MS);
    let read = disk.clone().serve(soon, &Io::read(places(20)[3], 4 * KIB));
    assert!(read.cached, "read back from the drive's memory");
    // It begins after 10 ms of idling; a read that arrives then waits for the current write.
    let waiting = disk.clone().serve(soon + 11 * MS, &Io::read(0, 4 * KIB));
    assert!(waiting.end_ns - soon - 11 * MS > waiting.seek_ns + waiting.rotation_ns + waiting.transfer_ns + 100_000);
    let later = soon + 1000 * MS;
    assert_eq!(disk.flush(later), later + 100_000, "all written out long ago");
}

#[test]
fn a_write_larger_than_the_cache_goes_to_the_platter() {
    let params = DeviceParams { write_cache: true, write_cache_bytes: 64 * KIB, ..DeviceParams::default() };
    let mut disk = Disk::new(&params);
    disk.serve(0, &Io::write(800_000_000_000, 4 * KIB));
    let served = disk.serve(MS, &Io::write(0, MIB));
    assert!(!served.cached && served.end_ns > 20 * MS);
    assert_eq!(disk.flush(served.end_ns), served.end_ns + 100_000);
}

#[test]
fn addresses_beyond_the_disk_are_harmless() {
    let mut disk = Disk::new(&DeviceParams::default());
    for io in [Io::read(u64::MAX, u64::MAX), Io::write(u64::MAX - 1, 1), Io::read(999_999_999_999, u64::MAX)] {
        let before = disk.busy_until_ns();
        assert!(disk.serve(before, &io).end_ns >= before);
    }
}

fn any_io() -> impl Strategy<Value = (u64, Io)> {
    // Few addresses, so that requests are neighbours, overlap, or are far apart.
    let place = prop_oneof![0u64..64, 400_000_000u64..400_000_064, 0u64..976_000_000];
    (prop_oneof![Just(0), 0u64..1_000_000, 0u64..100_000_000], any::<bool>(), place, 1u64..600).prop_map(
        |(pause, write, place, blocks)| {
            let op = if write { Op::Write } else { Op::Read };
            (pause, Io { op, address: place * 1024, len: blocks * 512 })
        },
    )
}

proptest! {
    #[test]
    fn time_goes_forward_and_adds_up_and_repeats(
        steps in prop::collection::vec(any_io(), 1..200),
        write_cache: bool,
        read_ahead in prop_oneof![Just(0u64), Just(64 * KIB), Just(MIB)],
        segments in 1u32..4,
    ) {
        let params = DeviceParams {
            write_cache, write_cache_bytes: MIB, read_ahead_bytes: read_ahead, read_ahead_segments: segments,
            ..DeviceParams::default()
        };
        let (mut disk, mut again) = (Disk::new(&params), Disk::new(&params));
        for (pause, io) in steps {
            let start = disk.busy_until_ns() + pause;
            let served = disk.serve(start, &io);
            prop_assert!(served.end_ns > start);
            prop_assert!(start + served.seek_ns + served.rotation_ns + served.transfer_ns <= served.end_ns, "{served:?}");
            prop_assert!(served.seek_ns <= 19 * MS && served.rotation_ns < TURN_NS);
            if served.cached {
                prop_assert_eq!((served.seek_ns, served.rotation_ns), (0, 0));
            }
            // A request takes at most its own time plus that of a full cache before it.
            prop_assert!(served.end_ns - start < 300 * 40 * MS);
            prop_assert_eq!(disk.busy_until_ns(), served.end_ns);
            prop_assert_eq!(again.serve(start, &io), served);
        }
        let end = disk.busy_until_ns();
        let flushed = disk.flush(end);
        prop_assert!(flushed >= end);
        prop_assert_eq!(again.flush(end), flushed);
    }

    #[test]
    fn a_later_start_never_ends_earlier(steps in prop::collection::vec(any_io(), 1..40), delay in 0u64..50_000_000) {
        let mut disk = Disk::new(&plain());
        for (pause, io) in steps {
            let start = disk.busy_until_ns() + pause;
            let late = disk.clone().serve(start + delay, &io);
            let served = disk.serve(start, &io);
            prop_assert!(late.end_ns >= served.end_ns);
        }
    }
}

#[test]
fn a_disk_that_forgot_its_reads_fetches_them_again() {
    let mut disk = Disk::new(&DeviceParams::default());
    let io = Io::read(40 * MIB, 16 * KIB);
    assert!(!disk.serve(0, &io).cached);
    let again = disk.serve(disk.busy_until_ns() + 50 * MS, &io);
    assert!(again.cached);
    disk.forget_reads(again.end_ns);
    assert!(!disk.serve(again.end_ns + 50 * MS, &io).cached);
}
