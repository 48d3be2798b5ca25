//! Random small scenarios without faults: they finish, bytes are conserved from layer to layer, a seed decides all.

use std::collections::BTreeMap;

use impresario_device::{DeviceParams, FlashParams, Order};
use impresario_sched::PolicySpec;
use impresario_sim::model::*;
use impresario_sim::{Scenario, Simulation};
use proptest::prelude::*;

const POLICIES: &[&str] =
    &["none", "fifo", "hbrr", "mlf", "aioli", "to-agg", "sjf", "wfq", "stream", "scan", "sstf", "tbf"];

fn applications() -> impl Strategy<Value = Application> {
    let pattern =
        prop::sample::select(vec![Pattern::Contiguous, Pattern::Strided, Pattern::FilePerProcess, Pattern::Random]);
    let shape = (1u32..3, 1u32..9, 1u64..9, 1u64..300_000, 1u32..4);
    let habits = (1u32..4, 0u64..4, any::<bool>(), prop::option::of(1u32..4), 0u64..3);
    (pattern, shape, habits).prop_map(|(pattern, shape, habits)| {
        let (copies, processes, requests, request_bytes, regions) = shape;
        let (queue_depth, barrier_requests, write, collective, sieve) = habits;
        let collective = collective.filter(|_| pattern != Pattern::FilePerProcess);
        Application {
            copies,
            processes,
            op: if write { Operation::Write } else { Operation::Read },
            pattern,
            request_bytes,
            requests,
            regions,
            queue_depth: if collective.is_some() { 1 } else { queue_depth },
            barrier_requests,
            sieve_bytes: sieve * 100_000,
            collective: collective.map(|n| Collective { aggregators: n.min(processes), buffer_bytes: 150_000 }),
            ..Application::default()
        }
    })
}

fn scenarios() -> impl Strategy<Value = Scenario> {
    let policy = || prop::sample::select(POLICIES).prop_map(PolicySpec::named);
    let network = (0u32..3, 0u32..3, 10u32..20);
    let servers = (1u16..5, policy(), 0u32..4, any::<bool>(), 0u64..3, 0u8..3);
    let memory = || prop::sample::select(&[0, 0, 4 << 10, 100_000, 1 << 20, 20 << 20][..]);
    let io = prop::option::of((1u16..4, policy(), any::<bool>(), 1u32..20));
    let clients = (0u64..3, 0u64..2, 1u32..4);
    (prop::collection::vec(applications(), 1..3), network, servers, io, clients, (memory(), memory(), any::<u64>()))
        .prop_map(|(application, (client_link, server_link, quantum), servers, io, (wire, ahead, per_node), others)| {
            let (payload_bytes, io_payload_bytes, seed) = others;
            let rate = |n: u32| [0.0, 1.25e7, 1.25e9][n as usize];
            let (count, policy, in_flight, pieces, cache, device) = servers;
            let disk = |order| Device::Disk(DeviceParams { order, ..DeviceParams::default() });
            let device = [disk(Order::Arrival), disk(Order::Elevator), Device::Flash(FlashParams::default())]
                [usize::from(device)]
            .clone();
            Scenario {
                seed,
                request_timeout_ms: 600_000,
                application,
                network: Network {
                    client_bytes_per_s: rate(client_link),
                    server_bytes_per_s: rate(server_link),
                    quantum_bytes: 1 << quantum,
                    ..Network::default()
                },
                clients: Clients {
                    request_bytes_max: wire * 8192,
                    read_ahead_bytes: ahead * 200_000,
                    processes_per_node: per_node,
                    ..Clients::default()
                },
                servers: Servers {
                    count,
                    policy,
                    in_flight,
                    pieces,
                    cache_bytes: cache * 300_000,
                    payload_bytes,
                    device: "d".into(),
                    ..Servers::default()
                },
                device: BTreeMap::from([("d".into(), device)]),
                io_nodes: io.map(|(count, policy, split, threads)| IoNodes {
                    count,
                    policy,
                    split,
                    merge: if threads % 2 == 0 { Merge::List } else { Merge::Contiguous },
                    threads,
                    payload_bytes: io_payload_bytes,
                    ..IoNodes::default()
                }),
                ..Scenario::default()
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn bytes_are_conserved_and_a_seed_decides(s in scenarios()) {
        prop_assert_eq!(s.check(), []);
        let o = Simulation::new(&s).unwrap().with_checks(true).finish();
        prop_assert_eq!(&o.violations, &Vec::<String>::new());
        let copies = s.application.iter().flat_map(|a| std::iter::repeat_n(a, a.copies as usize));
        let mut asked_in_all = 0;
        for (a, got) in copies.zip(&o.applications) {
            let asked = u64::from(a.processes) * a.requests * u64::from(a.regions) * a.request_bytes;
            prop_assert_eq!((got.bytes, got.failed), (asked, 0));
            asked_in_all += asked;
        }
        let l = &o.layers;
        // Pages and sieved ranges of several clients overlap, and what overlaps may be read once for both.
        let apart = s.clients.read_ahead_bytes == 0 && s.application.iter().all(|a| a.sieve_bytes == 0 || a.regions == 1);
        // Holes that aggregators and policies read through come on top. What I/O nodes read through may be asked for by
        // another of their requests too: a data server then reads it once for both.
        if apart {
            let once = if l.servers.bytes == l.clients.bytes { l.servers.bytes } else { asked_in_all };
            prop_assert!(l.clients.bytes >= asked_in_all && l.batches.bytes >= once, "{:?}", l);
        }
        match &s.io_nodes {
            Some(_) => {
                prop_assert!(l.io_nodes.bytes >= l.clients.bytes || !apart, "{:?}", l);
                prop_assert_eq!(l.servers.bytes, l.io_nodes.bytes);
            }
            None => prop_assert_eq!((l.io_nodes.requests, l.servers.bytes), (0, l.clients.bytes)),
        }
        if s.servers.cache_bytes == 0 {
            prop_assert_eq!(l.device.bytes, l.batches.bytes);
        }
        prop_assert!(l.device_busy <= 1.0 && o.fairness > 0.0 && o.fairness <= 1.0 + 1e-9);
        prop_assert!(o.applications.iter().all(|a| a.task_mean_s <= a.time_s + 1e-9 && a.latency_p99_ms <= a.latency_max_ms));
        let again = Simulation::new(&s).unwrap().finish();
        prop_assert_eq!(format!("{o:?}"), format!("{again:?}"), "checks change nothing");
    }
}
