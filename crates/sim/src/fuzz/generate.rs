//! Generates a scenario from a seed: every policy on both layers, every pattern, every fault; small enough to run
//! hundreds a second.

use std::collections::BTreeMap;

use impresario_base::Random;
use impresario_device::{DeviceParams, FlashParams, Order};
use impresario_sched::PolicySpec;
use impresario_sched::policy::params::Range;
use impresario_sched::policy::{self, POLICIES};

use crate::access;
use crate::model::{
    Application, Clients, Collective, Device, Fault, FaultKind, IoNodes, Merge, Network, Operation, Pattern,
    RandomFaults, RankPlacement, Scenario, Servers,
};

/// The scenario of a seed, the same while the generator is unchanged.
pub fn scenario(seed: u64) -> Scenario {
    let mut choices = Choices(Random::new(seed ^ 0x6675_7a7a));
    let servers = 1 + choices.below(4) as u16;
    let io_nodes = choices.often(2).then(|| io_nodes(&mut choices, servers));
    let io_count = io_nodes.as_ref().map_or(0, |io| io.count);
    let applications: Vec<Application> = (0..=choices.below(3)).map(|i| application(&mut choices, i)).collect();
    let device = match choices.below(4) {
        0 => None,
        1 => Some(Device::Flash(FlashParams {
            channels: choices.pick(&[1, 4, 32]),
            read_us: choices.pick(&[0.0, 80.0, 500.0]),
            ..FlashParams::default()
        })),
        _ => Some(Device::Disk(DeviceParams {
            order: if choices.often(3) { Order::Elevator } else { Order::Arrival },
            write_cache: choices.often(3),
            read_ahead_bytes: choices.pick(&[0, 1 << 20]),
            ..DeviceParams::default()
        })),
    };
    let mut servers = data_servers(&mut choices, servers);
    if device.is_some() {
        servers.device = "d".into();
    }
    let mut clients = clients(&mut choices);
    let asked: u64 = applications
        .iter()
        .map(|a| u64::from(a.copies) * u64::from(a.processes) * a.requests.min(u64::from(a.queue_depth)))
        .sum();
    let pieces_max = (OUTSTANDING_MAX / asked.max(1)).clamp(2, 32);
    let piece_least = applications.iter().map(asked_at_once).max().unwrap_or(0) / pieces_max;
    servers.stripe_bytes = servers.stripe_bytes.max(piece_least.next_power_of_two() as u32);
    if clients.request_bytes_max > 0 {
        clients.request_bytes_max = clients.request_bytes_max.max(piece_least);
    }
    let mut scenario = Scenario {
        title: format!("Seed {seed}"),
        seed: seed & (u64::MAX >> 1),
        time_limit_s: 300.0,
        request_timeout_ms: choices.pick(&[50, 500, 10_000]),
        network: network(&mut choices),
        clients,
        io_nodes,
        fault: faults(&mut choices, servers.count, io_count),
        random_faults: choices.often(4).then(|| RandomFaults {
            mean_interval_s: choices.pick(&[0.01, 0.05, 0.5]),
            mean_duration_s: choices.pick(&[0.001, 0.02, 0.2]),
            count_max: choices.pick(&[1, 5, 20]),
        }),
        servers,
        device: device.map(|device| BTreeMap::from([("d".into(), device)])).unwrap_or_default(),
        application: applications,
        ..Scenario::default()
    };
    // Drawn last, so that earlier seeds keep the rest of their scenarios.
    if choices.often(2) {
        read_ahead(&mut choices, &mut scenario);
    }
    if choices.often(3) {
        scenario.servers.payload_bytes = choices.pick(&[4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]);
    }
    if choices.often(4) {
        // Small enough to lose much, and never a quantum that does not fit.
        scenario.network.quantum_bytes = 4096;
        scenario.network.port_buffer_bytes = choices.pick(&[4096, 16 << 10, 64 << 10, 1 << 20]);
        scenario.network.retransmit_ms = choices.pick(&[1.0, 10.0, 200.0]);
    }
    if let Some(io) = &mut scenario.io_nodes {
        io.members = choices.often(2);
        if choices.often(3) {
            io.payload_bytes = choices.pick(&[4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]);
        }
    }
    scenario
}

/// Data servers that read ahead, under adverse conditions: streams that end, files that change, little memory.
fn read_ahead(choices: &mut Choices, scenario: &mut Scenario) {
    let servers = &mut scenario.servers;
    servers.foresight_bytes = choices.pick(&[4 << 20, 8 << 20, 64 << 20]);
    servers.cache_bytes = choices.pick(&[256 << 10, 8 << 20, 16 << 20, 256 << 20]);
    if choices.often(8) {
        // Long enough to waste more than is free.
        let application = Application {
            processes: 1 + choices.below(4) as u32,
            request_bytes: choices.pick(&[64 << 10, 256 << 10, 1 << 20]),
            requests: 50 + choices.below(400),
            ..Application::default()
        };
        scenario.application = vec![application];
        servers.stripe_bytes = 1 << 20;
        scenario.network.quantum_bytes = 1 << 20;
        scenario.clients = Clients::default();
    }
    for application in &mut scenario.application {
        if application.collective.is_none() && choices.often(2) {
            application.pattern = Pattern::Runs;
            application.regions = 1;
            application.run_requests = choices.pick(&[1, 2, 3, 5, 9, 40]);
        }
    }
    let files: u64 = scenario.application.iter().map(|a| u64::from(a.copies) * u64::from(access::files(a))).sum();
    let changes = choices.below(4);
    for _ in 0..changes {
        scenario.fault.push(Fault {
            at_s: choices.pick(&[0.0, 0.001, 0.01, 0.05, 0.3]),
            for_s: choices.pick(&[0.0, 0.0001, 0.01, 0.2]),
            what: choices.pick(&[FaultKind::TruncatedFile, FaultKind::ReplacedFile]),
            which: choices.below(files) as u32,
            factor: 1.0,
        });
    }
}

/// Approximate pieces of requests outstanding at once: the laws visit all of them at each step.
const OUTSTANDING_MAX: u64 = 600;

/// Bytes that a process of an application, or its aggregator, has outstanding.
fn asked_at_once(a: &Application) -> u64 {
    let all = a.request_bytes * u64::from(a.regions) * a.requests * u64::from(a.processes);
    let round = a.collective.as_ref().map_or(0, |c| c.buffer_bytes.min(all));
    (a.request_bytes * u64::from(a.regions)).max(a.sieve_bytes.min(all)).max(round)
}

/// Random choices from the seed.
struct Choices(Random);

impl Choices {
    fn below(&mut self, n: u64) -> u64 {
        self.0.below(n)
    }

    /// True once in `n` times.
    fn often(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// A number in a range, small ones more often than large: errors occur at both ends.
    fn between(&mut self, low: u64, high: u64) -> u64 {
        let span = high - low;
        match self.below(6) {
            0 => low,
            1 => high,
            _ => {
                let bits = self.below(u64::from(u64::BITS - span.leading_zeros()) + 1) as u32;
                let below = 1u64.checked_shl(bits).unwrap_or(u64::MAX).min(span).saturating_add(1);
                low + self.below(below)
            }
        }
    }
}

/// With shorter windows a policy does little but read the clock.
const SHORTEST_US: u64 = 100;

/// Any policy valid for this number of lanes, with defaults or with some parameters anywhere in their range.
fn policy_for(choices: &mut Choices, lanes: u16) -> PolicySpec {
    loop {
        let info = &POLICIES[choices.below(POLICIES.len() as u64) as usize];
        let plain = PolicySpec::named(info.name);
        let mut spec = plain.clone();
        let change = choices.often(2);
        for param in info.params {
            if !change || !choices.often(3) {
                continue;
            }
            let value = match param.range {
                Range::Integer(low, high) => {
                    let value = choices.between(low, high);
                    let time = param.name.ends_with("_us") && value > 0;
                    if time { value.max(SHORTEST_US).to_string() } else { value.to_string() }
                }
                Range::Decimal(low, high) => {
                    (low + (high - low) * choices.pick(&[0.0, 0.01, 0.1, 0.5, 1.0])).to_string()
                }
                Range::Choice(words) => choices.pick(words).to_string(),
                Range::Text(_) => continue,
            };
            spec = spec.with(param.name, value);
        }
        if policy::check(&spec, lanes).is_ok() {
            return spec;
        }
        if policy::check(&plain, lanes).is_ok() {
            return plain;
        }
    }
}

fn io_nodes(choices: &mut Choices, servers: u16) -> IoNodes {
    IoNodes {
        count: 1 + choices.below(3) as u16,
        policy: policy_for(choices, servers),
        threads: choices.pick(&[1, 2, 16]),
        handover_us: choices.pick(&[0.0, 50.0, 2000.0]),
        merge: choices.pick(&[Merge::Contiguous, Merge::List]),
        merge_requests: choices.pick(&[1, 4, 16]),
        dispatch_requests: choices.pick(&[1, 16, 256]),
        split: choices.often(2),
        cpu_us: choices.pick(&[0.0, 10.0, 300.0]),
        clock_skew_us: choices.pick(&[0.0, 0.0, 100.0, 5000.0]),
        started_within_us: 0.0,
        timer_late_us: choices.pick(&[0.0, 0.0, 100.0, 3000.0]),
        // Drawn last.
        members: false,
        payload_bytes: 0,
    }
}

fn data_servers(choices: &mut Choices, count: u16) -> Servers {
    let cache_bytes = choices.pick(&[0, 0, 256 << 10, 16 << 20]);
    Servers {
        count,
        stripe_bytes: choices.pick(&[512, 4096, 16 << 10, 64 << 10]),
        stripe_count: choices.below(u64::from(count) + 1) as u16,
        policy: policy_for(choices, 1),
        in_flight: choices.pick(&[0, 1, 1, 2, 8]),
        pieces: choices.often(2),
        cpu_us: choices.pick(&[0.0, 10.0, 300.0]),
        // Not drawn: that would change the scenario of every seed.
        concurrency_us: 0.0,
        timer_late_us: choices.pick(&[0.0, 0.0, 100.0, 3000.0]),
        copy_bytes_per_s: choices.pick(&[0.0, 0.0, 1e8]),
        device: String::new(),
        cache_bytes,
        read_ahead_bytes: choices.pick(&[0, 128 << 10]),
        foresight_bytes: 0,
        dirty_ratio: choices.pick(&[0.0, 0.2, 1.0]),
        warm: cache_bytes > 0 && choices.often(3),
        earlier_runs: choices.pick(&[0, 0, 0, 1]),
        payload_bytes: 0,
    }
}

fn network(choices: &mut Choices) -> Network {
    let rate = |choices: &mut Choices| choices.pick(&[0.0, 0.0, 1.25e7, 1.25e8]);
    Network {
        latency_us: choices.pick(&[0.0, 50.0, 1000.0]),
        jitter_us: choices.pick(&[0.0, 20.0, 500.0]),
        in_order: choices.pick(&[false, true]),
        client_bytes_per_s: rate(choices),
        io_node_bytes_per_s: rate(choices),
        server_bytes_per_s: rate(choices),
        quantum_bytes: choices.pick(&[1 << 10, 64 << 10]),
        header_bytes: choices.pick(&[0, 128]),
        socket_bytes: choices.pick(&[4 << 10, 64 << 10, impresario_node::READY_MAX_BYTES]),
        // Drawn last.
        port_buffer_bytes: 0,
        retransmit_ms: 200.0,
    }
}

fn clients(choices: &mut Choices) -> Clients {
    Clients {
        processes_per_node: choices.pick(&[1, 1, 2, 4]),
        request_bytes_max: choices.pick(&[0, 0, 8192, 5000]),
        read_ahead_bytes: choices.pick(&[0, 0, 128 << 10]),
        cache_bytes: choices.pick(&[0, 0, 1 << 20]),
        cpu_us: choices.pick(&[0.0, 20.0]),
        placement: choices.pick(&[RankPlacement::Block, RankPlacement::Cyclic]),
    }
}

fn application(choices: &mut Choices, nth: u64) -> Application {
    let pattern = choices.pick(&[Pattern::Contiguous, Pattern::Strided, Pattern::FilePerProcess, Pattern::Random]);
    let processes = 1 + choices.below(6) as u32;
    let shared = pattern != Pattern::FilePerProcess;
    let collective = (shared && choices.often(4)).then(|| Collective {
        aggregators: choices.pick(&[0, 1, 2]).min(processes),
        buffer_bytes: choices.pick(&[16 << 10, 100_000, 4 << 20]),
    });
    let op = choices.pick(&[Operation::Read, Operation::Write]);
    Application {
        name: format!("a{nth}"),
        copies: choices.pick(&[1, 1, 1, 2]),
        processes,
        start_s: choices.pick(&[0.0, 0.0, 0.01, 0.3]),
        op,
        pattern,
        request_bytes: choices.pick(&[1, 512, 4096, 5000, 16 << 10, 64 << 10, 200_000]),
        requests: 1 + choices.below(12),
        regions: if pattern == Pattern::Strided { choices.pick(&[1, 1, 4]) } else { 1 },
        queue_depth: if collective.is_some() { 1 } else { choices.pick(&[1, 1, 3, 16]) },
        think_us: choices.pick(&[0.0, 0.0, 500.0]),
        jitter_us: choices.pick(&[0.0, 100.0, 5000.0]),
        barrier_requests: choices.pick(&[0, 0, 1, 3]),
        sieve_bytes: if op == Operation::Read && collective.is_none() { choices.pick(&[0, 0, 64 << 10]) } else { 0 },
        collective,
        ..Application::default()
    }
}

fn faults(choices: &mut Choices, servers: u16, io_nodes: u16) -> Vec<Fault> {
    let count = if choices.often(2) { 0 } else { choices.below(4) };
    let one = |choices: &mut Choices| {
        let kinds = [
            FaultKind::SlowDisk,
            FaultKind::RestartedServer,
            FaultKind::PartitionedServer,
            FaultKind::LostIoNode,
            FaultKind::PartitionedIoNode,
        ];
        let what = choices.pick(&kinds[..if io_nodes > 0 { 5 } else { 3 }]);
        let of = if matches!(what, FaultKind::LostIoNode | FaultKind::PartitionedIoNode) { io_nodes } else { servers };
        Fault {
            at_s: choices.pick(&[0.0, 0.001, 0.01, 0.05, 0.3]),
            for_s: choices.pick(&[0.0001, 0.01, 0.2, 3.0]),
            what,
            which: choices.below(u64::from(of)) as u32,
            factor: choices.pick(&[1.0, 10.0, 1000.0]),
        }
    };
    (0..count).map(|_| one(choices)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_policy_pattern_and_fault_comes_up_and_all_scenarios_are_good() {
        let (mut below, mut above, mut patterns, mut faults) =
            (BTreeSet::new(), BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for seed in 0..2000 {
            let s = scenario(seed);
            assert_eq!(s, scenario(seed));
            assert_eq!(s.check(), [], "seed {seed}");
            below.insert(s.servers.policy.name);
            above.extend(s.io_nodes.map(|io| io.policy.name));
            patterns.extend(s.application.iter().map(|a| format!("{:?} {:?}", a.pattern, a.op)));
            faults.extend(s.fault.iter().map(|f| format!("{:?}", f.what)));
        }
        let for_lanes =
            |lanes| POLICIES.iter().filter(|p| policy::check(&PolicySpec::named(p.name), lanes).is_ok()).count();
        assert_eq!(below.len(), for_lanes(1), "{below:?}");
        assert_eq!(above.len(), for_lanes(4), "{above:?}");
        assert_eq!((patterns.len(), faults.len()), (10, 7));
    }
}
