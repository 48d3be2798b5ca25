//! What the schedulers must reach on modelled disks, as experiments with exact parameters and claims.

use impresario_sched::PolicySpec;

use crate::compare::{Bound, Case, Claim, Experiment};
use crate::pattern::{Pattern, Shape};
use crate::plan::{Operation, Placement, Workload};
use crate::system::{DiskOrder, Layer, System, policy};

/// How much of an experiment is made.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Effort {
    /// Pairs at least.
    pub pairs: u32,
    /// Pairs at most, while a claim is unresolved.
    pub pairs_max: u32,
    /// No further pair starts after this time, s.
    pub time_max_s: f64,
    /// Share of the full data volume per process, 0 to 1; 1 for a judgement.
    pub scale: f64,
    /// Of all chance.
    pub seed: u64,
}

/// An experiment and the cluster that it needs.
pub struct Goal {
    /// Short name, for choosing it.
    pub name: &'static str,
    /// Number of I/O nodes in front of the four data servers.
    pub io_nodes: usize,
    /// What is done.
    pub experiment: Experiment,
}

/// The goals by name, in the order in which they run.
pub const NAMES: [&str; 3] = ["mlf", "mlf-8k", "twins"];

/// The experiment of a name.
pub fn goal(name: &str, effort: &Effort) -> Option<Goal> {
    match name {
        "mlf" => Some(mlf("mlf", None, (0.40, 0.05), effort)),
        "mlf-8k" => Some(mlf("mlf-8k", Some(8192), (0.60, 0.20), effort)),
        "twins" => Some(twins(effort)),
        _ => None,
    }
}

/// The access patterns of agios-2013, V-A: 16 KiB strided and 256 KiB contiguous, 2 MiB per process, four
/// applications of eight synchronous processes.
pub fn agios_cases(wire_max_bytes: Option<u32>, scale: f64, seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, request_bytes) in [(Shape::Strided, 16 << 10), (Shape::Contiguous, 256 << 10)] {
        for operation in [Operation::Write, Operation::Read] {
            let process_bytes = scaled(2 << 20, request_bytes, scale);
            let pattern = Pattern { shape, request_bytes, process_bytes, processes: 8, seed };
            let mut workload = Workload::uniform(4, pattern, operation);
            workload.wire_max_bytes = wire_max_bytes;
            let size = crate::size::show_bytes(request_bytes as f64);
            cases.push(Case { name: format!("{size} {shape} {operation}"), workload });
        }
    }
    cases
}

/// A share of a volume, in whole requests, at least one.
fn scaled(bytes: u64, request_bytes: u64, scale: f64) -> u64 {
    let wanted = (bytes as f64 * scale.clamp(0.0, 1.0)) as u64;
    (wanted / request_bytes).max(1) * request_bytes
}

fn experiment(title: String, cases: Vec<Case>, systems: Vec<System>, effort: &Effort) -> Experiment {
    Experiment {
        title,
        cases,
        systems,
        baselines: Vec::new(),
        claims: Vec::new(),
        pairs: effort.pairs,
        pairs_max: effort.pairs_max,
        time_max_s: effort.time_max_s,
        tries: 3,
        shuffle: true,
        seed: effort.seed,
    }
}

fn on_data(name: &str, policy: PolicySpec, disk_order: DiskOrder) -> System {
    System { name: name.into(), data_policy: Some(policy), io_policy: None, disk_order: Some(disk_order) }
}

fn mlf(name: &'static str, wire: Option<u32>, (arrival, elevator): (f64, f64), effort: &Effort) -> Goal {
    let none = || PolicySpec::named("none");
    let control = || PolicySpec::named("fifo").with("merge", "on");
    let systems = vec![
        on_data("none@arrival", none(), DiskOrder::Arrival),
        on_data("none@elevator", none(), DiskOrder::Elevator),
        on_data("control@arrival", control(), DiskOrder::Arrival),
        on_data("mlf", PolicySpec::named("mlf"), DiskOrder::Arrival),
    ];
    let wire_text = wire.map_or("client requests as they are".into(), |w| format!("{} KiB client requests", w / 1024));
    let title = format!("mlf on the data servers, 4 applications × 8 processes, {wire_text}");
    let mut e = experiment(title, agios_cases(wire, effort.scale, effort.seed), systems, effort);
    e.baselines = ["none@arrival", "none@elevator", "control@arrival"].map(String::from).into();
    let claim = |base: &str, bound| Claim { new: "mlf".into(), base: base.into(), bound };
    e.claims = vec![
        claim("none@arrival", Bound::AverageAtLeast(arrival)),
        claim("none@arrival", Bound::NoCaseWorseThan(0.03)),
        claim("none@elevator", Bound::AverageAtLeast(elevator)),
    ];
    Goal { name, io_nodes: 0, experiment: e }
}

/// Shared strided reads as in twins-2017, V, by the four applications of the other goals, through two I/O nodes with
/// neighbouring ranks on the same one, data servers in arrival order. Windows: the two that the paper found best, and
/// one that fits a disk which takes 12 ms a request.
fn twins(effort: &Effort) -> Goal {
    let request_bytes = 16 << 10;
    let process_bytes = scaled(2 << 20, request_bytes, effort.scale);
    let pattern = Pattern { shape: Shape::Strided, request_bytes, process_bytes, processes: 8, seed: effort.seed };
    let mut workload = Workload::uniform(4, pattern, Operation::Read);
    workload.placement = Placement::Block;
    let names = ["fifo", "hbrr", "twins+window_us=1000", "twins+window_us=8000", "twins+window_us=16000"];
    let systems = names.map(|name| System {
        name: name.into(),
        // The names are constants of this list; a mistake in one is caught by its test.
        io_policy: Some(policy(name).unwrap_or_else(|_| PolicySpec::named(name))),
        data_policy: Some(PolicySpec::named("none")),
        disk_order: Some(DiskOrder::Arrival),
    });
    let case = Case { name: "16 KiB strided read, shared".into(), workload };
    let title = "twins on two I/O nodes, data servers in arrival order".into();
    let mut e = experiment(title, vec![case], systems.into(), effort);
    e.baselines = ["fifo", "hbrr"].map(String::from).into();
    for base in ["fifo", "hbrr"] {
        let (new, base) = ("twins+window_us=16000".to_string(), base.to_string());
        e.claims.push(Claim { new, base, bound: Bound::EachAtLeast(0.20) });
    }
    Goal { name: "twins", io_nodes: 2, experiment: e }
}

/// What a comparison on the command line asks for.
#[derive(Clone, Debug)]
pub struct Asked<'a> {
    /// Systems as the user wrote them.
    pub systems: &'a [String],
    /// Baselines by name; none: the first system.
    pub baselines: &'a [String],
    /// Which servers switch.
    pub on: Layer,
    /// Policy of the other servers.
    pub other: &'a PolicySpec,
    /// Claimed mean gain of every other system over each baseline.
    pub at_least: Option<f64>,
    /// Claimed bound of the loss in every case.
    pub no_worse: Option<f64>,
}

/// The experiment that a command line asks for, or what is wrong with it.
pub fn asked(asked: &Asked<'_>, cases: Vec<Case>, data_servers: usize, effort: &Effort) -> Result<Experiment, String> {
    let systems: Vec<System> =
        asked.systems.iter().map(|s| System::parse(s, asked.on, asked.other)).collect::<Result<_, _>>()?;
    if systems.len() < 2 {
        return Err("a comparison needs at least two systems, such as none,mlf".into());
    }
    for (i, system) in systems.iter().enumerate() {
        system.check(data_servers)?;
        if systems[..i].iter().any(|s| s.name == system.name) {
            return Err(format!("{} is named twice", system.name));
        }
    }
    let baselines = match asked.baselines {
        [] => vec![systems[0].name.clone()],
        given => given.to_vec(),
    };
    if let Some(unknown) = baselines.iter().find(|b| systems.iter().all(|s| s.name != **b)) {
        let names: Vec<&str> = systems.iter().map(|s| s.name.as_str()).collect();
        return Err(format!("the baseline {unknown} is none of the systems compared: {}", names.join(", ")));
    }
    let mut e = experiment("comparison".into(), cases, systems, effort);
    for base in &baselines {
        for system in e.systems.iter().filter(|s| !baselines.contains(&s.name)) {
            let claim = |bound| Claim { new: system.name.clone(), base: base.clone(), bound };
            let wanted = asked
                .at_least
                .map(|share| if e.cases.len() > 1 { Bound::AverageAtLeast(share) } else { Bound::EachAtLeast(share) });
            e.claims.extend(wanted.map(claim));
            e.claims.extend(asked.no_worse.map(|share| claim(Bound::NoCaseWorseThan(share))));
        }
    }
    e.baselines = baselines;
    Ok(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Effort = Effort { pairs: 3, pairs_max: 9, time_max_s: 60.0, scale: 1.0, seed: 1 };

    #[test]
    fn goals_have_the_parameters_of_the_papers() {
        for name in NAMES {
            let goal = goal(name, &EFFORT).unwrap();
            for system in &goal.experiment.systems {
                system.check(4).unwrap();
            }
            for case in &goal.experiment.cases {
                case.workload.check().unwrap();
            }
            for claim in &goal.experiment.claims {
                assert!(
                    [&claim.new, &claim.base].iter().all(|n| goal.experiment.systems.iter().any(|s| s.name == **n))
                );
            }
        }
        assert!(goal("nonsense", &EFFORT).is_none());
        let cases = agios_cases(Some(8192), 1.0, 1);
        assert_eq!(cases.len(), 4);
        let requests: Vec<u64> = cases.iter().map(|c| c.workload.applications[0].pattern.requests()).collect();
        assert_eq!(requests, [128, 128, 8, 8]);
        assert!(cases.iter().all(|c| c.workload.bytes() == 64 << 20 && c.workload.processes() == 32));
        assert_eq!(agios_cases(None, 0.1, 1)[2].workload.applications[0].pattern.requests(), 1);
    }

    #[test]
    fn a_command_line_becomes_an_experiment_or_says_why_not() {
        let cases = || agios_cases(None, 0.1, 1);
        let fifo = PolicySpec::named("fifo");
        let ask = |systems: &str, baselines: &str, at_least| {
            let split = |t: &str| t.split(',').filter(|w| !w.is_empty()).map(String::from).collect::<Vec<_>>();
            let (systems, baselines) = (split(systems), split(baselines));
            let on = Layer::Data;
            let a =
                Asked { systems: &systems, baselines: &baselines, on, other: &fifo, at_least, no_worse: Some(0.03) };
            asked(&a, cases(), 4, &EFFORT)
        };
        let e = ask("none,none@elevator,mlf", "none,none@elevator", Some(0.4)).unwrap();
        assert_eq!((e.baselines.len(), e.claims.len()), (2, 4));
        assert_eq!(ask("none,mlf", "", None).unwrap().baselines, ["none"]);
        assert!(ask("none", "", None).unwrap_err().contains("at least two"));
        assert!(ask("none,none", "", None).unwrap_err().contains("twice"));
        assert!(ask("none,mlf", "fifo", None).unwrap_err().contains("none of the systems"));
        assert!(ask("none,twins", "", None).is_err());
    }
}
