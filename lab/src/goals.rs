//! The required performance of the schedulers on modelled disks, as experiments with exact parameters and claims.

use impresario_sched::PolicySpec;

use impresario_workload::compare::{Bound, Case, Claim, Experiment};
use impresario_workload::comparison::{Effort, experiment};
use impresario_workload::pattern::{Pattern, Shape};
use impresario_workload::plan::{Operation, Placement, Workload};
use impresario_workload::system::{DiskOrder, System, policy};

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
pub fn goal(name: &str, effort: &Effort, scale: f64) -> Option<Goal> {
    match name {
        "mlf" => Some(mlf("mlf", None, (0.40, 0.05), effort, scale)),
        "mlf-8k" => Some(mlf("mlf-8k", Some(8192), (0.60, 0.20), effort, scale)),
        "twins" => Some(twins(effort, scale)),
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
            let size = impresario_base::units::show_bytes(request_bytes as f64);
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

fn on_data(name: &str, policy: PolicySpec, disk_order: DiskOrder) -> System {
    System {
        name: name.into(),
        data_policy: Some(policy),
        io_policy: None,
        disk_order: Some(disk_order),
        recorded: false,
    }
}

fn mlf(name: &'static str, wire: Option<u32>, (arrival, elevator): (f64, f64), effort: &Effort, scale: f64) -> Goal {
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
    let mut e = experiment(title, agios_cases(wire, scale, effort.seed), systems, effort);
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
fn twins(effort: &Effort, scale: f64) -> Goal {
    let request_bytes = 16 << 10;
    let process_bytes = scaled(2 << 20, request_bytes, scale);
    let pattern = Pattern { shape: Shape::Strided, request_bytes, process_bytes, processes: 8, seed: effort.seed };
    let mut workload = Workload::uniform(4, pattern, Operation::Read);
    workload.placement = Placement::Block;
    let names = ["fifo", "hbrr", "twins+window_us=1000", "twins+window_us=8000", "twins+window_us=16000"];
    let systems = names.map(|name| System {
        name: name.into(),
        // The names are constants of this list; a test catches errors in them.
        io_policy: Some(policy(name).unwrap_or_else(|_| PolicySpec::named(name))),
        data_policy: Some(PolicySpec::named("none")),
        disk_order: Some(DiskOrder::Arrival),
        recorded: false,
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

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Effort = Effort { pairs: 3, pairs_max: 9, minutes_max: 1.0, seed: 1 };

    #[test]
    fn goals_have_the_parameters_of_the_papers() {
        for name in NAMES {
            let goal = goal(name, &EFFORT, 1.0).unwrap();
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
        assert!(goal("nonsense", &EFFORT, 1.0).is_none());
        let cases = agios_cases(Some(8192), 1.0, 1);
        assert_eq!(cases.len(), 4);
        let requests: Vec<u64> = cases.iter().map(|c| c.workload.applications[0].pattern.requests()).collect();
        assert_eq!(requests, [128, 128, 8, 8]);
        assert!(cases.iter().all(|c| c.workload.bytes() == 64 << 20 && c.workload.processes() == 32));
        assert_eq!(agios_cases(None, 0.1, 1)[2].workload.applications[0].pattern.requests(), 1);
    }
}
