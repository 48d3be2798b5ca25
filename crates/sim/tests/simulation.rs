//! The simulation replays, finishes everything, and shows what the policies are for.

use std::collections::BTreeMap;

use impresario_device::{DeviceParams, Order};
use impresario_sched::PolicySpec;
use impresario_sim::model::{
    Application, Clients, Device, IoNodes, Network, Operation, Pattern, RankPlacement, Servers,
};
use impresario_sim::{Outcome, Scenario, run};

/// Four applications of eight processes; no processors, no limits of the network.
fn scenario(pattern: Pattern, op: Operation, seed: u64) -> Scenario {
    let (request_bytes, requests) = if pattern == Pattern::Strided { (16 << 10, 32) } else { (256 << 10, 4) };
    Scenario {
        application: vec![Application {
            copies: 4,
            processes: 8,
            pattern,
            op,
            request_bytes,
            requests,
            ..Application::default()
        }],
        servers: Servers { cpu_us: 0.0, ..Servers::default() },
        network: Network { jitter_us: 0.0, ..Network::default() },
        seed,
        ..Scenario::default()
    }
}

fn outcome(s: &Scenario) -> Outcome {
    let o = run(s).unwrap();
    let moved: u64 =
        s.application.iter().map(|a| u64::from(a.copies) * u64::from(a.processes) * a.requests * a.request_bytes).sum();
    assert_eq!(o.applications.iter().map(|a| a.bytes).sum::<u64>(), moved);
    assert!(o.makespan_s > 0.0 && o.failed == 0, "every process ends");
    assert_eq!(o.violations, Vec::<String>::new());
    o
}

fn forwarding(policy: &str) -> IoNodes {
    IoNodes { count: 2, policy: PolicySpec::named(policy), cpu_us: 0.0, ..IoNodes::default() }
}

#[test]
fn a_seed_replays_byte_for_byte_and_another_differs() {
    for policy in ["none", "fifo", "hbrr", "mlf"] {
        let mut s = scenario(Pattern::Strided, Operation::Read, 7);
        s.servers.policy = PolicySpec::named(policy);
        s.io_nodes = Some(forwarding("twins"));
        assert_eq!(outcome(&s), outcome(&s), "{policy}");
        let other = Scenario { seed: 8, ..s.clone() };
        assert_ne!(outcome(&s).makespan_s, outcome(&other).makespan_s);
    }
}

#[test]
fn every_layer_and_policy_finishes_all_work() {
    for pattern in [Pattern::Contiguous, Pattern::Strided, Pattern::FilePerProcess, Pattern::Random] {
        for op in [Operation::Read, Operation::Write] {
            for io in [None, Some("none"), Some("fifo"), Some("hbrr"), Some("mlf"), Some("twins")] {
                for split in [false, true] {
                    for order in [Order::Arrival, Order::Elevator] {
                        let mut s = scenario(pattern, op, 1);
                        s.application[0].copies = 2;
                        s.clients = Clients { request_bytes_max: 8 << 10, ..Clients::default() };
                        s.servers.policy = PolicySpec::named("mlf");
                        let disk = Device::Disk(DeviceParams { order, ..DeviceParams::default() });
                        s.device = BTreeMap::from([("disk".into(), disk)]);
                        s.servers.device = "disk".into();
                        s.io_nodes = io.map(|p| IoNodes { split, ..forwarding(p) });
                        s.clients.placement = RankPlacement::Cyclic;
                        outcome(&s);
                    }
                }
            }
        }
    }
}

/// The model is deterministic, so this is a fact about the model and not a timed test: on a 7200 rpm disk in
/// arrival order, mlf is faster than no scheduler in each of the demonstration's cases.
#[test]
fn mlf_beats_arrival_order_on_the_modelled_disk() {
    for pattern in [Pattern::Strided, Pattern::Contiguous] {
        for op in [Operation::Read, Operation::Write] {
            let base = scenario(pattern, op, 3);
            let mut mlf = base.clone();
            mlf.servers.policy = PolicySpec::named("mlf");
            let (t_base, t_mlf) = (outcome(&base).makespan_s, outcome(&mlf).makespan_s);
            assert!(1.0 - t_mlf / t_base > 0.2, "{pattern:?} {op:?}: {t_base} → {t_mlf}");
        }
    }
}

#[test]
fn a_bad_policy_is_refused_in_words() {
    let mut s = scenario(Pattern::Strided, Operation::Read, 1);
    s.servers.policy = PolicySpec::named("twins");
    let refusal = run(&s).unwrap_err().to_string();
    assert!(refusal.starts_with("servers.policy: ") && refusal.contains("one lane"), "{refusal}");
}

/// A small file is read from start to end while 32 processes take a large one apart, which is read ahead of them. The
/// elevator below serves what is near its head: without giving way the small file's first read waited for the end of the
/// large one, if it lies ahead of it.
#[test]
fn a_small_file_is_not_passed_over_by_one_that_is_read_ahead() {
    let disk = Device::Disk(DeviceParams { order: Order::Elevator, ..DeviceParams::default() });
    let small = Application {
        name: "cat".into(),
        request_bytes: 32 << 10,
        requests: 64,
        start_s: 0.3,
        ..Application::default()
    };
    let large = Application {
        processes: 32,
        pattern: Pattern::Strided,
        request_bytes: 64 << 10,
        requests: 64,
        ..Application::default()
    };
    let times = |application: Vec<Application>| -> Vec<Vec<f64>> {
        let run = |seed| {
            let s = Scenario {
                application: application.clone(),
                servers: Servers {
                    count: 1,
                    policy: PolicySpec::named("auto"),
                    in_flight: 0,
                    cache_bytes: 1 << 30,
                    foresight_bytes: 128 << 20,
                    device: "disk".into(),
                    ..Servers::default()
                },
                device: BTreeMap::from([("disk".into(), disk.clone())]),
                seed,
                ..Scenario::default()
            };
            outcome(&s).applications.iter().map(|a| a.time_s).collect()
        };
        (1..=6).map(run).collect()
    };
    let (alone, beside) = (times(vec![large.clone()]), times(vec![large, small]));
    for (alone, beside) in alone.iter().zip(&beside) {
        println!("{alone:?} s alone, {beside:?} s beside one another");
        assert!(beside[1] < 0.35, "{beside:?} s, {alone:?} s alone");
        assert!(beside[0] < alone[0] + 0.2, "{beside:?} s, {alone:?} s alone");
    }
}

/// In front of disks that keep the order of arrival, `auto` on I/O nodes finds the strided reads for which windows of `twins` pay.
/// In front of data servers that have an order of their own it leaves them the order.
#[test]
fn io_nodes_choose_windows_where_they_pay() {
    let time_s = |io: &str, data: &str| -> f64 {
        let run = |seed| {
            let mut s = scenario(Pattern::Strided, Operation::Read, seed);
            s.application[0].requests = 128;
            s.network.jitter_us = 200.0;
            s.servers.policy = PolicySpec::named(data);
            s.servers.device = "disk".into();
            let disk = DeviceParams { order: Order::Arrival, placement_span: 0.1, ..DeviceParams::default() };
            s.device = BTreeMap::from([("disk".into(), Device::Disk(disk))]);
            s.io_nodes = Some(IoNodes { count: 4, ..forwarding(io) });
            outcome(&s).makespan_s
        };
        (11..15).map(run).sum()
    };
    let (fifo_s, auto_s) = (time_s("fifo", "none"), time_s("auto", "none"));
    assert!(auto_s <= 0.8 * fifo_s, "in order of arrival: {auto_s} s, fifo {fifo_s} s");
    let (fifo_s, auto_s) = (time_s("fifo", "auto"), time_s("auto", "auto"));
    assert!(auto_s <= 1.03 * fifo_s, "in an order of their own: {auto_s} s, fifo {fifo_s} s");
}
