//! The loads for training and evaluating the decision table: data servers that serve one batch at a time in front of
//! disks in order of arrival.

use std::collections::BTreeMap;

use impresario_base::Random;
use impresario_device::{DeviceParams, Order};
use impresario_sched::PolicySpec;
use impresario_sched::policy::auto::table::NodeRole;
use impresario_sched::policy::orders;
use impresario_sim::Scenario;
use impresario_sim::model::{Application, Device, IoNodes, Operation, Pattern, RankPlacement, Servers};

/// One load.
#[derive(Clone, PartialEq, Debug)]
pub struct Situation {
    /// For people.
    pub name: String,
    /// The applications.
    pub load: Application,
    /// Data servers.
    pub servers: u16,
    /// I/O nodes in front of them, which then have the policy that is examined; `None`: the data servers have.
    pub forwarding: Option<Forwarding>,
}

/// The forwarding layer of a situation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Forwarding {
    /// I/O nodes.
    pub nodes: u16,
    /// How ranks are distributed over them.
    pub placement: RankPlacement,
    /// The policy of the data servers.
    pub data_policy: &'static str,
}

impl Situation {
    /// `applications` of `processes` processes each move `kib_per_process` in requests of `request_kib`.
    pub fn new(
        (applications, processes): (u32, u32),
        op: Operation,
        pattern: Pattern,
        (request_kib, kib_per_process): (u64, u64),
    ) -> Situation {
        let (op_name, pattern_name) = (format!("{op:?}").to_lowercase(), format!("{pattern:?}").to_lowercase());
        let name = format!("{applications} × {processes}, {op_name} {pattern_name} {request_kib} KiB");
        let load = Application {
            name: name.clone(),
            copies: applications,
            processes,
            op,
            pattern,
            request_bytes: request_kib << 10,
            requests: (kib_per_process / request_kib).max(4),
            ..Application::default()
        };
        Situation { name, load, servers: 4, forwarding: None }
    }

    /// The load on a cluster whose data servers, or I/O nodes, have a policy.
    pub fn scenario(&self, policy: &PolicySpec, seed: u64) -> Scenario {
        let load = vec![self.load.clone()];
        let Some(Forwarding { nodes, placement, data_policy }) = self.forwarding else {
            return cluster(load, self.servers, policy, seed);
        };
        let mut scenario = cluster(load, self.servers, &PolicySpec::named(data_policy), seed);
        scenario.io_nodes = Some(IoNodes { count: nodes, policy: policy.clone(), ..IoNodes::default() });
        scenario.clients.placement = placement;
        scenario
    }

    /// The same load through I/O nodes.
    fn through(mut self, forwarding: Forwarding) -> Situation {
        let Forwarding { nodes, placement, data_policy } = forwarding;
        let placed = if placement == RankPlacement::Block { "neighbouring ranks" } else { "ranks round robin" };
        self.name = format!("{}, {nodes} I/O nodes, {placed}, data servers {data_policy}", self.name);
        self.forwarding = Some(forwarding);
        self
    }

    /// The data servers below I/O nodes have an order of their own.
    pub fn is_scheduled_below(&self) -> bool {
        self.forwarding.is_some_and(|f| orders(&PolicySpec::named(f.data_policy)))
    }

    /// The place whose policy is examined.
    pub fn place(&self) -> NodeRole {
        if self.forwarding.is_some() { NodeRole::IoNode } else { NodeRole::Data }
    }
}

/// A cluster of disks in order of arrival, one batch at a time.
pub fn cluster(application: Vec<Application>, count: u16, policy: &PolicySpec, seed: u64) -> Scenario {
    let disk = DeviceParams { order: Order::Arrival, placement_span: 0.1, ..DeviceParams::default() };
    let servers = Servers { count, policy: policy.clone(), device: "disk".into(), ..Servers::default() };
    let device = BTreeMap::from([("disk".into(), Device::Disk(disk))]);
    let title = application.first().map(|a| a.name.clone()).unwrap_or_default();
    // A policy that delays some requests is slow, not wrong.
    Scenario { title, seed, servers, device, application, request_timeout_ms: 600_000, ..Scenario::default() }
}

const PATTERNS: [Pattern; 4] = [Pattern::Contiguous, Pattern::Strided, Pattern::FilePerProcess, Pattern::Random];
const OPS: [Operation; 2] = [Operation::Read, Operation::Write];

/// Requests of a training situation at most: longer ones say little more, and take most of the time.
const TRAINED_REQUESTS_MAX: u64 = 16_000;

/// The training set: every pattern and operation, with sizes, concurrency and servers from a grid.
pub fn training(count: usize) -> Vec<Situation> {
    let mut random = Random::new(1);
    let mut pick = |values: &[u64]| values[random.below(values.len() as u64) as usize];
    let draw = |nth: usize| {
        let (op, pattern) = (OPS[nth % 2], PATTERNS[nth / 2 % 4]);
        let (applications, processes) = (pick(&[1, 1, 2, 3, 4, 6, 16]), pick(&[2, 4, 6, 8, 12, 16, 32]));
        let request_kib = pick(&[4, 10, 16, 24, 64, 100, 192, 256, 450, 1024]);
        // Short parts and long ones, whatever the size of requests: what a policy is worth depends on how long it acts.
        let kib = pick(&[1, 2, 4, 8, 16]) << 10;
        let kib = kib.min(TRAINED_REQUESTS_MAX / (applications * processes) * request_kib);
        let mut drawn = Situation::new((applications as u32, processes as u32), op, pattern, (request_kib, kib));
        drawn.servers = pick(&[1, 2, 3, 4, 4, 6, 8]) as u16;
        drawn
    };
    (0..count).map(draw).collect()
}

/// The evaluation set: sizes, concurrency and servers between those of the grid, drawn by a seed.
pub fn held_out(count: usize, seed: u64) -> Vec<Situation> {
    let mut random = Random::new(seed);
    let mut pick = |values: &[u64]| values[random.below(values.len() as u64) as usize];
    let draw = |_| {
        let op = OPS[pick(&[0, 1]) as usize];
        let pattern = PATTERNS[pick(&[0, 1, 2, 3]) as usize];
        let (applications, processes) = (pick(&[1, 2, 3, 6, 8]) as u32, pick(&[3, 6, 12, 20]) as u32);
        let request_kib = pick(&[8, 32, 48, 128, 512]);
        let kib = 8 << 10;
        let mut drawn = Situation::new((applications, processes), op, pattern, (request_kib, kib));
        drawn.servers = pick(&[2, 3, 6]) as u16;
        drawn.name = format!("{}, {} servers", drawn.name, drawn.servers);
        drawn
    };
    (0..count).map(draw).collect()
}

/// The forwarding layers of situations: every placement of ranks and policy of the data servers in turn.
fn forwarding(nth: usize, nodes: u16) -> Forwarding {
    let placement = [RankPlacement::Block, RankPlacement::Cyclic][nth % 2];
    Forwarding { nodes, placement, data_policy: ["none", "auto"][nth / 2 % 2] }
}

/// The loads of a set through I/O nodes, each with one forwarding layer, over two data servers at least.
fn through_io_nodes(situations: Vec<Situation>, nodes: &[u16], seed: u64) -> Vec<Situation> {
    let mut random = Random::new(seed);
    let through = |(nth, mut situation): (usize, Situation)| {
        situation.servers = situation.servers.max(2);
        let nodes = nodes[random.below(nodes.len() as u64) as usize];
        // Loads go round by eights.
        situation.through(forwarding(nth / 8, nodes))
    };
    situations.into_iter().enumerate().map(through).collect()
}

/// The training set for I/O nodes.
pub fn training_io(count: usize) -> Vec<Situation> {
    through_io_nodes(training(count), &[1, 2, 4], 2)
}

/// The evaluation set for I/O nodes.
pub fn held_out_io(count: usize, seed: u64) -> Vec<Situation> {
    through_io_nodes(held_out(count, seed), &[2, 3, 6], seed)
}

/// Time between two phases of the schedule, s: longer than any phase takes.
pub const PHASE_S: f64 = 600.0;

/// The schedule of eight phases that differ in operation, pattern, size and concurrency; none of them is on the grid.
pub fn phases() -> Vec<Situation> {
    use Operation::{Read, Write};
    use Pattern::{Contiguous, FilePerProcess, Random, Strided};
    [
        ((4, 12), Read, Contiguous, 32),
        ((1, 24), Write, Strided, 128),
        ((6, 6), Read, FilePerProcess, 48),
        ((3, 16), Read, Strided, 40),
        ((2, 10), Write, Random, 32),
        ((2, 24), Write, Contiguous, 192),
        ((5, 5), Read, Random, 96),
        ((3, 8), Read, Contiguous, 768),
    ]
    .into_iter()
    .map(|(scale, op, pattern, request_kib)| Situation::new(scale, op, pattern, (request_kib, 8 << 10)))
    .collect()
}

/// Requests of a drawn phase at most, so that none is longer than [`PHASE_S`].
const DRAWN_REQUESTS_MAX: u64 = 12_000;

/// A schedule of eight phases drawn at random, to develop with: other sizes and concurrency than those of training, of
/// [`held_out`] and of [`phases`].
pub fn drawn_phases(seed: u64) -> Vec<Situation> {
    let mut random = Random::new(seed);
    let mut pick = |values: &[u64]| values[random.below(values.len() as u64) as usize];
    let servers = pick(&[2, 3, 4, 4, 5, 6]) as u16;
    let draw = |_| {
        let (op, pattern) = (OPS[pick(&[0, 1]) as usize], PATTERNS[pick(&[0, 1, 2, 3]) as usize]);
        let (applications, processes) = (pick(&[1, 2, 3, 4, 5, 7]), pick(&[3, 5, 7, 9, 13, 18, 26, 30]));
        let request_kib = pick(&[6, 12, 20, 36, 56, 88, 144, 160, 320, 384, 640, 896]);
        let requests_max = DRAWN_REQUESTS_MAX / (applications * processes);
        let kib = pick(&[2 << 10, 4 << 10, 8 << 10, 12 << 10]).min(requests_max * request_kib);
        let mut drawn = Situation::new((applications as u32, processes as u32), op, pattern, (request_kib, kib));
        drawn.servers = servers;
        drawn.name = format!("{}, {servers} servers", drawn.name);
        drawn
    };
    (0..8).map(draw).collect()
}

/// The phases one after the other, with a pause between them, on one cluster.
pub fn schedule(phases: &[Situation], policy: &PolicySpec, seed: u64) -> Scenario {
    let applications = phases.iter().enumerate().map(|(at, phase)| {
        let start_s = at as f64 * PHASE_S;
        Application { start_s, ..phase.load.clone() }
    });
    let servers = phases.first().map_or(1, |phase| phase.servers);
    cluster(applications.collect(), servers, policy, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the table is judged by must not be what it was made from.
    #[test]
    fn loads_for_training_for_development_and_for_judging_are_different_ones() {
        let key = |s: &Situation| {
            (s.load.copies, s.load.processes, s.load.op as u8, s.load.pattern as u8, s.load.request_bytes)
        };
        let keys = |all: Vec<Situation>| all.iter().map(key).collect::<std::collections::BTreeSet<_>>();
        let trained = keys(training(4_000));
        let drawn = keys((0..200).flat_map(drawn_phases).collect());
        let held_out = keys(held_out(2_000, 1_000));
        let published = keys(phases());
        assert!(trained.len() > 900 && drawn.len() > 500 && held_out.len() > 500 && published.len() == 8);
        for (one, other) in [
            (&trained, &drawn),
            (&trained, &held_out),
            (&trained, &published),
            (&drawn, &held_out),
            (&drawn, &published),
        ] {
            assert!(one.is_disjoint(other), "{:?}", one.intersection(other).next());
        }
    }

    /// Of a short part that large requests read, little is left once it is recognised.
    #[test]
    fn large_requests_are_trained_on_short_parts_too() {
        let all = training(1_200);
        let short =
            |s: &&Situation| s.load.request_bytes >= 256 << 10 && s.load.requests * s.load.request_bytes <= 8 << 20;
        let count = all.iter().filter(short).count();
        assert!(count >= all.len() / 10, "{count}");
    }

    #[test]
    fn drawn_schedules_replay_from_their_seed() {
        assert_eq!(drawn_phases(3), drawn_phases(3));
        assert_ne!(drawn_phases(3), drawn_phases(4));
        assert!(drawn_phases(3).iter().all(|phase| phase.servers == drawn_phases(3)[0].servers));
    }
}
