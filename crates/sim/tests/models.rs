//! Each model of the simulation, compared with results worked out by hand.

use std::collections::BTreeMap;

use impresario_device::{DeviceParams, FlashParams};
use impresario_sched::PolicySpec;
use impresario_sim::model::*;
use impresario_sim::{Budget, Outcome, Scenario, Simulation, run};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// One server with a flash drive of 100 µs and 1 GB/s, no jitter, processors without cost, an unlimited network of 50
/// µs.
fn plain(application: Application) -> Scenario {
    let flash =
        FlashParams { channels: 8, read_us: 100.0, write_us: 40.0, read_bytes_per_s: 1e9, write_bytes_per_s: 5e8 };
    Scenario {
        network: Network { jitter_us: 0.0, header_bytes: 100, ..Network::default() },
        servers: Servers { count: 1, cpu_us: 0.0, in_flight: 0, device: "flash".into(), ..Servers::default() },
        device: BTreeMap::from([("flash".into(), Device::Flash(flash))]),
        application: vec![Application { jitter_us: 0.0, ..application }],
        ..Scenario::default()
    }
}

fn reads(processes: u32, requests: u64, request_bytes: u64) -> Application {
    Application { processes, requests, request_bytes, ..Application::default() }
}

fn lawful(s: &Scenario) -> Outcome {
    let o = Simulation::new(s).unwrap().with_checks(true).finish();
    assert_eq!(o.violations, Vec::<String>::new());
    o
}

fn near(got: f64, expected: f64, what: &str) {
    assert!((got / expected - 1.0).abs() < 1e-4, "{what}: {got} instead of {expected}");
}

#[test]
fn one_process_takes_the_sum_of_the_parts() {
    // Request 50 µs, flash 100 µs and 65.536 µs, reply 50 µs; ten times.
    near(lawful(&plain(reads(1, 10, 64 * KIB))).makespan_s, 10.0 * 265.536e-6, "endless network");

    let mut s = plain(reads(1, 10, 64 * KIB));
    s.servers.cpu_us = 7.0;
    s.servers.copy_bytes_per_s = 1e9;
    s.clients.cpu_us = 3.0;
    near(lawful(&s).makespan_s, 10.0 * (265.536e-6 + 10e-6 + 65.536e-6), "processors and copying");

    // Two that arrive together: 7 µs for the first, 7 and 5 for the second, which finds the first outstanding.
    let mut s = plain(reads(2, 1, 4 * KIB));
    (s.servers.cpu_us, s.servers.concurrency_us) = (7.0, 5.0);
    near(lawful(&s).makespan_s, 204.096e-6 + 7e-6 + 12e-6, "concurrency at a server");

    // Links: 100 bytes out at 1e8 B/s take 1 µs; 65536 + 100 back over 1e9 and 1e8 B/s take 656.36 µs, two quanta.
    let mut s = plain(reads(1, 10, 64 * KIB));
    (s.network.client_bytes_per_s, s.network.server_bytes_per_s) = (1e8, 1e9);
    near(lawful(&s).makespan_s, 10.0 * (265.536e-6 + 1e-6 + 656.36e-6), "links");

    // Through an I/O node: two more hops, and its processor.
    let mut s = plain(reads(1, 10, 64 * KIB));
    s.io_nodes = Some(IoNodes { cpu_us: 11.0, ..IoNodes::default() });
    near(lawful(&s).makespan_s, 10.0 * (365.536e-6 + 11e-6), "an I/O node");

    // Writes, computing, a later start.
    let mut s = plain(Application { op: Operation::Write, think_us: 500.0, start_s: 2.0, ..reads(1, 10, 64 * KIB) });
    s.application[0].queue_depth = 1;
    near(lawful(&s).applications[0].time_s, 10.0 * (140e-6 + 131.072e-6) + 9.0 * 500e-6, "writes with computing");
}

#[test]
fn a_queue_depth_overlaps_requests() {
    let one = lawful(&plain(reads(1, 64, 4 * KIB))).makespan_s;
    let mut s = plain(reads(1, 64, 4 * KIB));
    s.application[0].queue_depth = 8;
    let eight = lawful(&s);
    assert!(eight.makespan_s < one / 6.0 && eight.makespan_s > one / 8.5, "{} of {one}", eight.makespan_s);
}

#[test]
fn two_flows_share_a_link_in_equal_parts() {
    // Reads of 10 MiB over the server's link of 1e8 B/s; the drive is ten times as fast.
    let mut s = plain(Application { copies: 2, ..reads(1, 1, 10 * MIB) });
    s.network.server_bytes_per_s = 1e8;
    let o = lawful(&s);
    let both = 2.0 * (10 * MIB) as f64 / 1e8;
    for a in &o.applications {
        assert!((a.time_s / both - 1.0).abs() < 0.1, "each takes as long as both: {} of {both}", a.time_s);
    }
    // A small message does not wait for a large one.
    let mut s = plain(reads(1, 1, 10 * MIB));
    s.network.server_bytes_per_s = 1e8;
    s.application.push(Application { jitter_us: 0.0, start_s: 0.05, ..reads(1, 10, 4 * KIB) });
    let o = lawful(&s);
    assert!(o.applications[1].time_s < 0.03, "{}", o.applications[1].time_s);
}

#[test]
fn a_cache_serves_again_what_was_read() {
    // Consecutive applications cannot share files, so one process reads its block twice by a trace.
    let access = |offset| TracedAccess { process: 0, file: 0, op: Operation::Read, offset, len: 64 * KIB, think_ns: 0 };
    let twice = |blocks: u64| (0..2 * blocks).map(|i| access(i % blocks * 64 * KIB)).collect::<Vec<_>>();
    let mut s = plain(Application { pattern: Pattern::Trace, trace: twice(16), ..Application::default() });
    s.servers.read_ahead_bytes = 0;
    s.servers.cache_bytes = 2 * MIB;
    let o = lawful(&s);
    assert_eq!((o.layers.cache_hit, o.layers.device.bytes), (0.5, MIB));
    near(o.makespan_s, 16.0 * 265.536e-6 + 16.0 * 100e-6, "misses and hits");
    // More than fits, cyclically: the worst case for least recently used.
    s.application[0].trace = twice(64);
    let o = lawful(&s);
    assert_eq!((o.layers.cache_hit, o.layers.device.bytes), (0.0, 8 * MIB));
    // Read-ahead of 128 KiB overlaps the device with the rest: every other access finds its pages cached, and the
    // others wait for only part of the time.
    s.application[0].trace = (0..64).map(|i| access(i * 64 * KIB)).collect();
    s.servers.read_ahead_bytes = 128 * KIB;
    let o = lawful(&s);
    assert!(o.layers.cache_hit > 0.4 && o.layers.device.bytes == 4 * MIB, "{:?}", o.layers);
    assert!(o.makespan_s < 64.0 * 180e-6, "{}", o.makespan_s);
    // Warm: everything is cached.
    s.servers.warm = true;
    s.servers.cache_bytes = 8 * MIB;
    let o = lawful(&s);
    assert_eq!((o.layers.cache_hit, o.layers.device.bytes), (1.0, 0));
}

/// A file read just before leaves its end in a least-recently-used cache that is smaller than the file.
#[test]
fn a_warm_cache_holds_what_was_read_last() {
    let access = |offset| TracedAccess { process: 0, file: 0, op: Operation::Read, offset, len: 64 * KIB, think_ns: 0 };
    let read = |blocks: std::ops::Range<u64>| {
        // The last block first, so that the file has 64 blocks in both cases.
        let trace = std::iter::once(63).chain(blocks).map(|i| access(i * 64 * KIB)).collect();
        let mut s = plain(Application { pattern: Pattern::Trace, trace, ..Application::default() });
        s.servers.read_ahead_bytes = 0;
        s.servers.cache_bytes = 2 * MIB;
        s.servers.warm = true;
        lawful(&s).layers.cache_hit
    };
    assert_eq!((read(32..64), read(0..32)), (1.0, 1.0 / 33.0));
}

#[test]
fn writers_wait_when_too_much_is_dirty() {
    let mut s = plain(Application { op: Operation::Write, ..reads(1, 64, 64 * KIB) });
    s.servers.cache_bytes = 16 * MIB;
    s.servers.dirty_ratio = 0.5;
    // 4 MiB are below half of the limit of 8 MiB: the device is not used.
    let o = lawful(&s);
    near(o.makespan_s, 64.0 * 100e-6, "into memory");
    assert_eq!(o.layers.device.requests, 0);
    // 64 MiB: all but the limit must reach the device, at 5e8 B/s, while they are written.
    s.application[0].requests = 1024;
    let o = lawful(&s);
    let least = (64 - 8) as f64 * MIB as f64 / 5e8;
    assert!(o.makespan_s > least && o.makespan_s < 1.2 * least + 0.02, "{} and {least}", o.makespan_s);
    assert!(o.layers.device.bytes >= 56 * MIB && o.layers.device.bytes <= 64 * MIB, "{:?}", o.layers.device);
    // Without write-back every write waits for the device.
    s.servers.dirty_ratio = 0.0;
    s.application[0].requests = 64;
    near(lawful(&s).makespan_s, 64.0 * (140e-6 + 131.072e-6), "through");
}

#[test]
fn a_slow_device_takes_longer_by_its_factor() {
    let slow = |at_s, for_s| Fault { at_s, for_s, what: FaultKind::SlowDisk, which: 0, factor: 4.0 };
    let mut s = plain(reads(1, 10, 64 * KIB));
    s.fault.push(slow(0.0, 100.0));
    near(lawful(&s).makespan_s, 10.0 * (100e-6 + 4.0 * 165.536e-6), "flash");
    // A disk: accesses take four times as long, the rest is unchanged.
    let disk = |fault: Option<Fault>| {
        let mut s = plain(Application { pattern: Pattern::Random, ..reads(4, 50, 64 * KIB) });
        let params = DeviceParams { read_ahead_bytes: 0, ..DeviceParams::default() };
        s.device.insert("flash".into(), Device::Disk(params));
        s.fault.extend(fault);
        lawful(&s).layers.access_mean_ms
    };
    let (fast, slow) = (disk(None), disk(Some(slow(0.0, 1e6))));
    assert!((slow / fast / 4.0 - 1.0).abs() < 0.1, "{fast} → {slow}");
}

#[test]
fn operations_survive_a_partition_or_fail_in_time() {
    let cut = |at_s, for_s, what| Fault { at_s, for_s, what, which: 0, factor: 1.0 };
    // Partitioned for less than the client's patience: after half of its time the client retries, and succeeds.
    for what in [FaultKind::PartitionedServer, FaultKind::RestartedServer] {
        let mut s = plain(reads(4, 20, 64 * KIB));
        s.request_timeout_ms = 100;
        s.fault.push(cut(0.001, 0.05, what));
        let o = lawful(&s);
        assert_eq!((o.failed, o.applications[0].bytes), (0, 80 * 64 * KIB), "{what:?}");
        assert!(o.makespan_s > 0.05 && o.makespan_s < 0.1, "{}", o.makespan_s);
        assert_eq!(o.faults.len(), 2);
    }
    // A fault planned long after the end does not stretch the series.
    let mut s = plain(reads(4, 20, 64 * KIB));
    s.fault.push(cut(1e6, 1e6, FaultKind::PartitionedServer));
    let o = lawful(&s);
    assert!(o.makespan_s < 0.1 && o.series.interval_s < 0.01 && o.faults.is_empty(), "{:?}", o.series.interval_s);
    // Permanently: every operation fails when its time is over.
    let mut s = plain(reads(4, 5, 64 * KIB));
    s.request_timeout_ms = 100;
    s.fault.push(cut(0.0, 1e6, FaultKind::PartitionedServer));
    let o = lawful(&s);
    assert_eq!((o.failed, o.applications[0].bytes, o.operations), (20, 0, 20));
    near(o.applications[0].latency_max_ms, 100.0, "the timeout");
    // One of two I/O nodes is lost: its clients go to the other one.
    for (what, for_s) in
        [(FaultKind::LostIoNode, 1e6), (FaultKind::PartitionedIoNode, 0.01), (FaultKind::LostIoNode, 0.01)]
    {
        let mut s = plain(Application { op: Operation::Write, ..reads(8, 20, 64 * KIB) });
        s.io_nodes = Some(IoNodes { count: 2, ..IoNodes::default() });
        s.request_timeout_ms = 100;
        s.fault.push(cut(0.002, for_s, what));
        let o = lawful(&s);
        assert_eq!((o.failed, o.applications[0].bytes), (0, 160 * 64 * KIB), "{what:?}");
        assert!(o.makespan_s > 0.05 && o.makespan_s < 0.1, "{}", o.makespan_s);
    }
}

#[test]
fn a_collective_read_reads_the_file_once() {
    // 16 processes on 4 nodes want 8 KiB blocks in turn; 4 aggregators read 64 KiB at a time.
    for op in [Operation::Read, Operation::Write] {
        let mut s = plain(Application { pattern: Pattern::Strided, regions: 8, op, ..reads(16, 3, 8 * KIB) });
        s.clients.processes_per_node = 4;
        s.application[0].collective = Some(Collective { aggregators: 0, buffer_bytes: 64 * KIB });
        let o = lawful(&s);
        assert_eq!(o.layers.clients, impresario_sim::outcome::Flow { requests: 48, bytes: 3 * MIB }, "{op:?}");
        assert_eq!((o.layers.device.bytes, o.applications[0].bytes, o.operations), (3 * MIB, 3 * MIB, 48));
        assert!(o.applications[0].task_variance_s2 < 1e-20, "all end together");
        // A node keeps a quarter of its aggregator's data; the rest crosses the network, so a slower network takes
        // longer.
        let mut slow = s.clone();
        slow.network.client_bytes_per_s = 1e7;
        let exchanged = 0.75 * 3.0 * MIB as f64 / 4.0 / 1e7;
        let more = lawful(&slow).makespan_s - o.makespan_s;
        assert!(more > exchanged, "{more} {exchanged}");
    }
    // Blocks with holes: the holes are read too, and for writes read first.
    let mut s = plain(Application { pattern: Pattern::Contiguous, ..reads(4, 2, 4 * KIB) });
    s.application[0].collective = Some(Collective { aggregators: 1, buffer_bytes: MIB });
    let o = lawful(&s);
    // From the first to the last wanted byte of a call: 4 KiB at 0, 8, 16 and 24 KiB.
    assert_eq!(o.layers.device.bytes, 2 * 28 * KIB);
    s.application[0].op = Operation::Write;
    assert_eq!(lawful(&s).layers.device.bytes, 2 * 2 * 28 * KIB);
}

/// Requests of a file that wait for one server go as one list though they do not touch: fewer messages, the same bytes.
#[test]
fn requests_that_wait_for_one_server_go_as_a_list() {
    for (op, split, policy) in [
        (Operation::Read, false, "fifo"),
        (Operation::Read, true, "hbrr"),
        (Operation::Write, true, "fifo"),
        (Operation::Write, false, "twins"),
    ] {
        let forwarded = |merge| {
            // Two requests of 4 KiB by each of 16 processes, the first ones 8 KiB apart; 8 processes for each server.
            let mut s = plain(Application { op, ..reads(16, 2, 4 * KIB) });
            s.servers.count = 2;
            let handover_us = 500.0;
            s.io_nodes = Some(IoNodes {
                policy: PolicySpec::named(policy),
                split,
                merge,
                threads: 2,
                handover_us,
                ..IoNodes::default()
            });
            let o = lawful(&s);
            assert_eq!((o.applications[0].bytes, o.layers.servers.bytes), (128 * KIB, 128 * KIB), "{op:?} {policy}");
            o.layers
        };
        let (apart, listed) = (forwarded(Merge::Contiguous), forwarded(Merge::List));
        let case = format!("{op:?}, split {split}, {policy}: {apart:?} {listed:?}");
        assert!(2 * listed.io_nodes.requests < apart.io_nodes.requests, "{case}");
        assert!(
            listed.servers.requests >= 2 * listed.io_nodes.requests,
            "each range is a request of the server: {case}"
        );
    }
}

#[test]
fn sieving_reads_the_hull() {
    // Among 4 processes' blocks one wants every fourth of 1 KiB: 16 regions over 61 KiB, in ranges of 16 KiB.
    let sieved = Application { pattern: Pattern::Strided, regions: 16, sieve_bytes: 16 * KIB, ..reads(4, 1, KIB) };
    let o = lawful(&plain(sieved.clone()));
    // Each range begins and ends with a wanted block: 13 KiB, four times.
    assert_eq!(o.layers.clients, impresario_sim::outcome::Flow { requests: 16, bytes: 4 * 4 * 13 * KIB });
    assert_eq!(o.applications[0].bytes, 64 * KIB);
    let o = lawful(&plain(Application { op: Operation::Write, ..sieved.clone() }));
    assert_eq!(o.layers.clients.bytes, 2 * 4 * 4 * 13 * KIB, "read, modify, write");
    let o = lawful(&plain(Application { sieve_bytes: 0, ..sieved }));
    assert_eq!(o.layers.clients, impresario_sim::outcome::Flow { requests: 4, bytes: 64 * KIB }, "a list each");
    assert_eq!((o.layers.servers.requests, o.layers.device.bytes), (64, 64 * KIB));
}

#[test]
fn barriers_align_processes() {
    // A straggler: process 0 of the trace computes 10 ms before each of its accesses.
    let access = |process: u32, i: u64| TracedAccess {
        process,
        file: 0,
        op: Operation::Read,
        offset: (i * 2 + u64::from(process)) * 64 * KIB,
        len: 64 * KIB,
        think_ns: if process == 0 { 10_000_000 } else { 0 },
    };
    let trace: Vec<_> = (0..10).flat_map(|i| [access(0, i), access(1, i)]).collect();
    let mut s = plain(Application { pattern: Pattern::Trace, processes: 2, trace, ..Application::default() });
    let free = lawful(&s);
    s.application[0].barrier_requests = 1;
    let aligned = lawful(&s);
    let a = &free.applications[0];
    assert!(a.task_mean_s < 0.6 * a.time_s, "one is done long before the other");
    let a = &aligned.applications[0];
    assert!(a.task_mean_s > 0.95 * a.time_s && a.task_variance_s2.sqrt() < 0.0101, "{a:?}");
    assert!((aligned.makespan_s / free.makespan_s - 1.0).abs() < 0.01);
}

#[test]
fn the_clients_cache_and_read_ahead_save_calls() {
    let mut s = plain(reads(1, 64, 4 * KIB));
    s.clients.read_ahead_bytes = 64 * KIB;
    s.clients.request_bytes_max = 32 * KIB;
    let o = lawful(&s);
    assert_eq!((o.layers.clients.bytes, o.applications[0].bytes), (256 * KIB, 256 * KIB), "not past the end");
    assert!(o.layers.clients.requests < 20, "{:?}", o.layers.clients);
    assert!(o.makespan_s < 20.0 * 300e-6, "{}", o.makespan_s);
    // Blocks in the node's cache are not requested again.
    let access = |i: u64| TracedAccess {
        process: 0,
        file: 0,
        op: Operation::Read,
        offset: i % 8 * 4096,
        len: 4096,
        think_ns: 0,
    };
    let mut s =
        plain(Application { pattern: Pattern::Trace, trace: (0..64).map(access).collect(), ..Application::default() });
    s.clients.cache_bytes = MIB;
    let o = lawful(&s);
    assert_eq!((o.layers.clients.bytes, o.applications[0].bytes), (8 * 4096, 64 * 4096));
}

#[test]
fn a_stream_is_answered_in_pieces() {
    // server-side-scheduling-2002: two servers, tasks that read 1 MiB each, sockets of 64 KiB, slow links.
    for policy in ["stream", "scan", "wscan", "sstf"] {
        for regions in [1, 16] {
            let mut s =
                plain(Application { pattern: Pattern::Strided, regions, ..reads(7, 1, MIB / u64::from(regions)) });
            s.servers.count = 2;
            s.servers.in_flight = 1;
            s.servers.pieces = true;
            s.servers.policy = PolicySpec::named(policy);
            s.network.client_bytes_per_s = 12.5e6;
            s.network.server_bytes_per_s = 12.5e6;
            s.network.socket_bytes = 64 * KIB;
            let o = lawful(&s);
            assert_eq!(o.applications[0].bytes, 7 * MIB);
            // Each server's link carries half of all data.
            let least = 3.5 * MIB as f64 / 12.5e6;
            // sstf idles the drive for a connection that it waits for.
            let most = if policy == "sstf" { 2.0 * least } else { 1.15 * least + 0.1 };
            assert!(o.makespan_s > least && o.makespan_s < most, "{policy}: {} {least}", o.makespan_s);
            let pieces = o.layers.batches;
            assert!(pieces.mean_bytes() <= 131_072.0, "{policy}: {pieces:?}");
        }
    }
}

/// While a piece travels its connection is still among those that may be served next; where it is not, the head moves to another
/// job after each piece.
#[test]
fn the_head_stays_at_a_job_while_its_answer_travels() {
    for policy in ["stream", "scan", "wscan"] {
        let makespan_s = |socket_bytes: Option<u64>| {
            let mut s = plain(reads(14, 1, 512 * KIB));
            s.servers.device = String::new(); // a disk
            s.servers.in_flight = 1;
            s.servers.pieces = true;
            s.servers.policy = PolicySpec::named(policy);
            s.network.socket_bytes = socket_bytes.unwrap_or(s.network.socket_bytes);
            lawful(&s).makespan_s
        };
        let (default, unlimited, less_than_a_piece) =
            (makespan_s(None), makespan_s(Some(64 * MIB)), makespan_s(Some(64 * KIB)));
        near(default, unlimited, policy);
        assert!(less_than_a_piece > 1.5 * default, "{policy}: {default} {less_than_a_piece}");
    }
}

#[test]
fn time_may_run_out() {
    let mut s = plain(reads(2, 1000, 64 * KIB));
    s.time_limit_s = 0.01;
    let o = run(&s).unwrap();
    assert_eq!((o.makespan_s, o.operations, o.violations.len()), (0.01, 2000, 0));
    assert!(o.failed > 1900 && o.failed < 2000, "{}", o.failed);
}

#[test]
fn stepping_gives_the_same_outcome_as_one_run() {
    let mut s = plain(Application { pattern: Pattern::Random, jitter_us: 50.0, ..reads(8, 40, 64 * KIB) });
    s.application[0].jitter_us = 50.0;
    s.servers.device = String::new();
    s.io_nodes = Some(IoNodes::default());
    s.random_faults = Some(RandomFaults { mean_interval_s: 0.2, mean_duration_s: 0.05, count_max: 5 });
    s.request_timeout_ms = 300;
    let whole = run(&s).unwrap();
    let mut simulation = Simulation::new(&s).unwrap();
    let (mut last, mut steps) = (0.0, 0);
    loop {
        let budget = if steps % 2 == 0 { Budget::Events(37) } else { Budget::VirtualS(f64::from(steps) * 0.001) };
        let p = simulation.step_until(budget);
        assert!(p.fraction >= last && p.fraction <= 1.0);
        (last, steps) = (p.fraction, steps + 1);
        if p.done {
            break;
        }
    }
    assert!(steps > 20);
    assert_eq!(format!("{:?}", simulation.finish()), format!("{whole:?}"));
    // Stopped half-way: unfinished operations failed.
    let mut simulation = Simulation::new(&s).unwrap();
    simulation.step_until(Budget::VirtualS(whole.makespan_s / 2.0));
    let half = simulation.stop();
    assert!(half.failed > 50 && half.makespan_s <= whole.makespan_s / 2.0 && half.violations.is_empty());
}

#[test]
fn series_and_picture_add_up() {
    let mut s = plain(Application { copies: 20, pattern: Pattern::Strided, ..reads(4, 100, 64 * KIB) });
    s.servers.count = 3;
    s.servers.device = String::new();
    s.io_nodes = Some(IoNodes { count: 2, ..IoNodes::default() });
    let o = lawful(&s);
    let bytes: u64 = o.series.bandwidth.iter().flatten().sum();
    assert_eq!((bytes, o.series.bandwidth.len()), (20 * 4 * 100 * 64 * KIB, 16));
    let intervals = o.series.io_queue.len();
    assert!(intervals <= 512 && o.series.server_concurrency.len() == intervals);
    assert!((intervals as f64 - 1.0) * o.series.interval_s < o.makespan_s);
    assert!(o.picture.len() > 2000 && o.picture.len() <= 4096, "{}", o.picture.len());
    assert!(o.picture.windows(2).all(|w| w[0].at_s <= w[1].at_s));
    // A server sees at most two I/O nodes, and mostly at least one, since requests are always outstanding.
    let mean = o.series.server_concurrency.iter().sum::<f64>() / intervals as f64;
    assert!(mean > 1.0 && mean <= 2.0, "{mean}");
    assert!(o.layers.device_busy > 0.9 && o.layers.server_concurrency > 1.0, "{:?}", o.layers);
    assert!(o.fairness > 0.9 && o.fairness <= 1.0);
}

#[test]
fn unlucky_parameters_of_a_disk_still_end() {
    // A write cache, the elevator, a tiny page cache, and everything at once.
    let params =
        DeviceParams { write_cache: true, order: impresario_device::Order::Elevator, ..DeviceParams::default() };
    let mut s = plain(Application { queue_depth: 5, ..reads(6, 30, 200 * KIB) });
    s.device.insert("flash".into(), Device::Disk(params));
    s.servers.cache_bytes = 4096;
    s.application.push(Application { op: Operation::Write, ..s.application[0].clone() });
    let o = lawful(&s);
    assert_eq!(o.applications.iter().map(|a| a.bytes).collect::<Vec<_>>(), [180 * 200 * KIB; 2]);
}

#[test]
fn who_has_no_memory_for_a_call_takes_it_later() {
    let one_ns = 100e3 + 2.0 * MIB as f64 * 1.0;
    // Four reads of 2 MiB that arrive together at 50 µs, memory for one: each waits until the reply before it has arrived.
    let mut s = plain(reads(4, 1, 2 * MIB));
    s.servers.payload_bytes = 2 * MIB;
    near(lawful(&s).makespan_s, (50e3 + 4.0 * (one_ns + 50e3)) / 1e9, "one at a time");
    // A request that is longer than the memory has all of it.
    s.servers.payload_bytes = MIB;
    near(lawful(&s).makespan_s, (50e3 + 4.0 * (one_ns + 50e3)) / 1e9, "none is refused");
    // Memory for all changes nothing.
    s.servers.payload_bytes = 64 * MIB;
    let enough = lawful(&s).makespan_s;
    s.servers.payload_bytes = 0;
    near(enough, lawful(&s).makespan_s, "as without a limit");
    // A call that waits for half of the timeout is refused and comes again: nothing fails, and nothing comes to a halt.
    let mut s = plain(reads(10, 1, 2 * MIB));
    s.servers.payload_bytes = 2 * MIB;
    s.request_timeout_ms = 40;
    let o = lawful(&s);
    assert_eq!(o.applications[0].failed, 0);
    assert!(o.makespan_s < 0.1, "{}", o.makespan_s);
}

/// Writers whose slices take all memory would wait for each other for ever without a headroom for one of them; those behind
/// I/O nodes wait there, too.
#[test]
fn writers_that_share_little_memory_come_to_an_end() {
    let mut s = plain(Application { op: Operation::Write, ..reads(12, 6, 3 * MIB) });
    (s.servers.payload_bytes, s.servers.count) = (9 * MIB, 2);
    s.request_timeout_ms = 600_000;
    assert_eq!(lawful(&s).applications[0].failed, 0);
    s.io_nodes = Some(IoNodes { count: 2, payload_bytes: 9 * MIB, split: true, ..IoNodes::default() });
    assert_eq!(lawful(&s).applications[0].failed, 0);
}

/// The port toward a server has room for ten of twelve packets that come at once. Who loses the last of what it has sent waits.
#[test]
fn what_overflows_a_port_costs_its_sender_a_timeout() {
    let mut s = plain(Application { op: Operation::Write, pattern: Pattern::FilePerProcess, ..reads(12, 1, 1024) });
    s.network.server_bytes_per_s = 1e8;
    s.network.quantum_bytes = 2048;
    s.network.port_buffer_bytes = 12 * 1124;
    let enough = lawful(&s).makespan_s;
    assert!(enough < 0.001, "all fit: {enough}");
    s.network.port_buffer_bytes = 10 * 1124;
    let lost = lawful(&s).makespan_s;
    assert!((0.2..0.21).contains(&lost), "two waited: {lost}");
    s.network.retransmit_ms = 10.0;
    assert!((0.01..0.011).contains(&lawful(&s).makespan_s));
}
