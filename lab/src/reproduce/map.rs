//! Which policy wins where: policies of I/O nodes times policies of data servers, over situations and scales.
//!
//! Beyond the papers: TWINS with additions, limits and shares under interference, the policies by I/O phases, and the
//! cascade of a scheduler in both layers. The resulting map can be compared with an automatic choice.

use std::collections::BTreeMap;

use anyhow::Result;
use impresario_device::Order;
use impresario_sched::PolicySpec;
use impresario_sim::model::{Application, Device, IoNodes, Operation, Pattern, Scenario};
use serde::{Deserialize, Serialize};

pub use super::map_text::markdown;

use super::campaign::{Effort, Run, Step, run_cells};
use super::claim::Table;
use super::figure::{Cell, policy};
use super::papers;
use super::report::cell;
use impresario_base::statistics::Interval;
use impresario_workload::stop::Stop;

/// The system that gains are relative to: no I/O nodes, no scheduler.
pub const BASELINE: &str = "direct + none";
/// Systems whose mean is within this of the best share the first place, unless the interval of their difference
/// excludes it.
pub const TIE: f64 = 0.03;

/// Describes a situation by what an automatic choice could observe.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Features {
    /// read or write.
    pub op: String,
    /// Access pattern.
    pub pattern: String,
    /// Size of a request, bytes.
    pub request_bytes: u64,
    /// Largest request on the wire, bytes; 0: whole.
    pub wire_bytes: u64,
    /// Applications at a time.
    pub applications: u32,
    /// Processes of all applications.
    pub processes: u32,
    /// Data servers.
    pub servers: u16,
    /// I/O nodes, where a system has them.
    pub io_nodes: u16,
    /// In what order devices serve what is outstanding: arrival or elevator.
    pub devices_serve: String,
}

/// A system in a situation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SystemRow {
    /// I/O-node policy + data-server policy.
    pub system: String,
    /// Makespan, s, mean over the repetitions.
    pub makespan_s: f64,
    /// Gain in makespan over [`BASELINE`], paired, with its 95 % interval.
    pub gain: Interval,
    /// Mean time of a task, s.
    pub task_mean_s: f64,
    /// Variance of the tasks' times, s².
    pub task_variance_s2: f64,
    /// Mean interference factor.
    pub interference: Option<f64>,
    /// Least instantaneous throughput of any application, bytes a second.
    pub least_throughput: f64,
    /// Jain's index over applications.
    pub fairness: f64,
}

/// The winners of a situation, best first; the others do not differ from the first significantly.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Winners {
    /// Shortest makespan.
    pub makespan: Vec<String>,
    /// Shortest mean time of a task.
    pub task_mean: Vec<String>,
    /// Largest least throughput of an application.
    pub least_throughput: Vec<String>,
    /// The shortest makespan among systems with at most one scheduled layer.
    pub one_layer: Vec<String>,
}

/// A situation with all that was measured in it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Situation {
    /// Its name.
    pub name: String,
    /// Its description.
    pub features: Features,
    /// The winners.
    pub winners: Winners,
    /// The baseline, the best five, and the winners, best first.
    pub systems: Vec<SystemRow>,
    /// Makespan, s, of every system with one scheduled layer: what a choice between them is checked against.
    pub makespans_s: BTreeMap<String, f64>,
    /// Systems that were run.
    pub run: usize,
}

/// The map at one scale.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ScaleMap {
    /// Processes, I/O nodes and data servers are this many times those of scale 1 (32, 2 and 4); at most 1000 I/O nodes
    /// and servers.
    pub scale: u32,
    /// The volume of every process was divided by this.
    pub divide: u64,
    /// Repetitions of each system in each situation.
    pub repetitions: u32,
    /// Whether every I/O-node policy was run with every data-server policy.
    pub cascade: bool,
    /// All situations.
    pub situations: Vec<Situation>,
    /// Distinct simulations.
    pub simulations: usize,
    /// Failed operations and violated laws.
    pub complaints: Vec<String>,
}

/// The extent of the map: large scales take long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// Every situation.
    All,
    /// Situations of several applications on devices that serve in order of arrival.
    Few,
    /// Of these, shared files with strided and contiguous requests and the two unequal readers, under the systems that
    /// won at smaller scales, the papers' and the plain ones.
    Least,
}

impl Extent {
    /// What is made at a scale.
    pub fn at(scale: u32) -> Extent {
        match scale {
            0..=10 => Extent::All,
            11..=100 => Extent::Few,
            _ => Extent::Least,
        }
    }
}

/// What is run.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// The scale.
    pub scale: u32,
    /// Every I/O-node policy with every data-server policy; else one layer at a time.
    pub cascade: bool,
    /// The part that is left out.
    pub extent: Extent,
    /// Repetitions, threads and volume.
    pub effort: Effort,
}

/// Name, policy and whether requests are cut at servers; `None`: no I/O nodes.
type IoSystem = (&'static str, Option<(PolicySpec, bool)>);

fn io_systems() -> Vec<IoSystem> {
    let plain = |name: &'static str| (name, Some((policy(name), false)));
    let cut = |name, line: &str| (name, Some((policy(line), true)));
    const ONE: &str = "twins window_us=8000 in_flight_per_server=1 merge=on order_within=offset";
    vec![
        ("direct", None),
        plain("none"),
        plain("fifo"),
        cut("fifo split", "fifo"),
        plain("hbrr"),
        cut("mlf", "mlf"),
        cut("aioli", "aioli"),
        plain("sjf"),
        plain("sw"),
        plain("wfq"),
        plain("crr"),
        plain("orr"),
        plain("deadline"),
        ("tbf", Some((shares(), false))),
        plain("mclock"),
        plain("set10"),
        plain("lowest-yield-first"),
        ("twins (paper)", Some((policy("twins window_us=1000"), false))),
        ("twins (paper, 8 ms)", Some((policy("twins window_us=8000"), false))),
        cut("twins one scan", ONE),
        cut("twins idle", &format!("{ONE} work_conserving=idle")),
        cut("twins conserving", &format!("{ONE} work_conserving=on")),
        cut("twins anticipating", &format!("{ONE} work_conserving=idle anticipation_us=800")),
    ]
}

/// Equal shares of device time for every application, which may borrow.
fn shares() -> PolicySpec {
    PolicySpec::named("tbf").with("rules", "all: * {device=0.25, each=job, borrow=on}").with("merge", "on")
}

fn data_systems() -> Vec<(&'static str, PolicySpec)> {
    let mut all: Vec<(&'static str, PolicySpec)> = impresario_sched::policy::POLICIES
        .iter()
        .filter(|p| p.name != "twins" && p.name != "fifo" && p.name != "to" && p.name != "tbf")
        .map(|p| (p.name, PolicySpec::named(p.name)))
        .collect();
    all.push(("fifo merge", policy("fifo merge=on")));
    all.push(("tbf", shares()));
    all
}

/// All systems; without the cascade one of the layers is plain.
fn systems(cascade: bool, extent: Extent) -> Vec<(IoSystem, (&'static str, PolicySpec))> {
    const DATA: [&str; 8] = ["none", "fifo merge", "hbrr", "mlf", "sjf", "orr", "wscan", "deadline"];
    const IO: [&str; 4] = ["fifo", "twins (paper, 8 ms)", "twins one scan", "twins conserving"];
    let data = data_systems();
    let least = |io: &str, d: &str| match io {
        "direct" => DATA.contains(&d),
        _ => d == "none" && IO.contains(&io),
    };
    io_systems()
        .into_iter()
        .flat_map(|io| data.iter().map(move |d| (io.clone(), d.clone())))
        .filter(|(io, d)| cascade || one_layer(io.0, d.0))
        .filter(|(io, d)| extent != Extent::Least || least(io.0, d.0))
        .collect()
}

/// At most one layer schedules.
fn one_layer(io: &str, data: &str) -> bool {
    data == "none" || matches!(io, "direct" | "fifo")
}

/// The machine of scale 1: the twins-2017 machine with half its I/O nodes, so that scales are comparable.
fn machine() -> Result<Scenario> {
    Ok(papers::figure("twins-2017-fig3")?.base)
}

/// Situations of a scale: name and scenario under the baseline.
fn situations(asked: &MapOptions) -> Result<Vec<(String, Features, Scenario)>> {
    let base = machine()?;
    let mut all = Vec::new();
    let ops = [("read", Operation::Read), ("write", Operation::Write)];
    let shapes = [
        ("contiguous", Pattern::Contiguous, 16u64 << 10, 64u64, 0u64),
        ("strided", Pattern::Strided, 16 << 10, 64, 0),
        ("strided", Pattern::Strided, 16 << 10, 64, 8192),
        ("file per process", Pattern::FilePerProcess, 16 << 10, 64, 0),
        ("random", Pattern::Random, 16 << 10, 64, 0),
        ("contiguous", Pattern::Contiguous, 256 << 10, 8, 0),
        ("strided", Pattern::Strided, 256 << 10, 8, 0),
    ];
    for order in [Order::Arrival, Order::Elevator] {
        for (op_name, op) in ops {
            for (pattern_name, pattern, bytes, requests, wire) in shapes {
                for apps in [1u32, 4] {
                    let app = Application {
                        name: "app".into(),
                        copies: apps,
                        processes: 32 * asked.scale / apps,
                        op,
                        pattern,
                        request_bytes: bytes,
                        requests,
                        ..Application::default()
                    };
                    let cut = if wire > 0 { format!(" cut to {} KiB", wire >> 10) } else { String::new() };
                    let name = format!("{apps} × {op_name} {pattern_name} {} KiB{cut}, {order}", bytes >> 10);
                    all.push(situation(name, &base, asked, order, wire, vec![app]));
                }
            }
        }
        all.push(situation(
            format!("a large and a small reader, {order}"),
            &base,
            asked,
            order,
            0,
            unequal(asked.scale),
        ));
    }
    if asked.extent != Extent::All {
        all.retain(|(_, f, _)| f.applications > 1 && f.devices_serve == "arrival" && f.wire_bytes == 0);
    }
    if asked.extent == Extent::Least {
        all.retain(|(_, f, _)| f.pattern == "unequal" || f.pattern == "strided" || f.pattern == "contiguous");
    }
    Ok(all)
}

/// Interference: many large requests at once beside one that computes between small ones.
fn unequal(scale: u32) -> Vec<Application> {
    let app = |name: &str, processes, request_bytes, requests, queue_depth, think_us| Application {
        name: name.into(),
        processes,
        pattern: Pattern::FilePerProcess,
        request_bytes,
        requests,
        queue_depth,
        think_us,
        ..Application::default()
    };
    vec![app("large", 28 * scale, 256 << 10, 16, 4, 0.0), app("small", 4 * scale, 16 << 10, 64, 1, 2000.0)]
}

fn situation(
    name: String,
    base: &Scenario,
    asked: &MapOptions,
    order: Order,
    wire: u64,
    application: Vec<Application>,
) -> (String, Features, Scenario) {
    let mut s = base.clone();
    s.title = name.clone();
    s.application = application;
    s.clients.request_bytes_max = wire;
    s.servers.count = (4 * asked.scale).min(1000) as u16;
    s.servers.in_flight = 1;
    // A file has at most four servers, as in systems of that size.
    s.servers.stripe_count = 4;
    s.io_nodes = Some(IoNodes { count: (2 * asked.scale).min(1000) as u16, ..s.io_nodes.unwrap_or_default() });
    for device in s.device.values_mut() {
        if let Device::Disk(disk) = device {
            disk.order = order;
        }
    }
    asked.effort.thin(&mut s);
    let first = &s.application[0];
    let features = Features {
        op: if first.op == Operation::Read { "read" } else { "write" }.into(),
        pattern: if s.application.len() > 1 { "unequal".into() } else { format!("{:?}", first.pattern).to_lowercase() },
        request_bytes: first.request_bytes,
        wire_bytes: wire,
        applications: s.application.iter().map(|a| a.copies).sum(),
        processes: s.application.iter().map(|a| a.copies * a.processes).sum(),
        servers: s.servers.count,
        io_nodes: s.io_nodes.as_ref().map_or(0, |n| n.count),
        devices_serve: order.to_string(),
    };
    (name, features, s)
}

fn with(base: &Scenario, io: &IoSystem, data: &(&str, PolicySpec)) -> Scenario {
    let mut s = base.clone();
    s.servers.policy = data.1.clone();
    // Policies that mind connections serve jobs in pieces.
    s.servers.pieces = impresario_sched::policy::minds_connections(&data.1);
    match (&io.1, &mut s.io_nodes) {
        (None, nodes) => *nodes = None,
        (Some((spec, split)), Some(nodes)) => (nodes.policy, nodes.split) = (spec.clone(), *split),
        (Some(_), None) => {}
    }
    s
}

/// Makes the map of one scale.
pub fn run(asked: &MapOptions, stop: &Stop, step: &mut dyn FnMut(Step)) -> Result<ScaleMap> {
    let repetitions = asked.effort.repetitions.unwrap_or(3);
    let situations = situations(asked)?;
    let systems = systems(asked.cascade, asked.extent);
    let mut cells = Vec::new();
    for (name, features, base) in &situations {
        for (io, data) in &systems {
            let s = with(base, io, data);
            let key = format!("{name}/{} + {}", io.0, data.0);
            if let Some((at, message)) = s.check().into_iter().next() {
                anyhow::bail!("{key}: {at}: {message}");
            }
            let alone = features.applications > 1;
            cells.push(("map", repetitions, if alone { Cell::and_alone(key, s) } else { Cell::new(key, s) }));
        }
    }
    let campaign = run_cells(&cells, &asked.effort, stop, step)?;
    let none = BTreeMap::new();
    let runs = campaign.figures.get("map").unwrap_or(&none);
    let judged = situations.into_iter().map(|(name, features, _)| {
        let names: Vec<String> = systems.iter().map(|(io, d)| format!("{} + {}", io.0, d.0)).collect();
        judge(name, features, &names, runs)
    });
    Ok(ScaleMap {
        scale: asked.scale,
        divide: asked.effort.divide.max(1),
        repetitions,
        cascade: asked.cascade,
        situations: judged.collect(),
        simulations: campaign.simulations,
        complaints: campaign.complaints,
    })
}

fn judge(name: String, features: Features, systems: &[String], runs: &BTreeMap<String, Vec<Run>>) -> Situation {
    let table = Table { runs };
    let key = |system: &str| format!("{name}/{system}");
    let mut rows: Vec<SystemRow> = systems
        .iter()
        .filter_map(|system| {
            let row = cell(system, runs.get(&key(system))?, 0.95);
            let gain = table.gain(&key(BASELINE), &key(system), Run::makespan_s)?;
            Some(SystemRow {
                system: system.clone(),
                makespan_s: digits(row.makespan_s.mean),
                gain: {
                    let i = Interval::of(&gain);
                    Interval { mean: digits(i.mean), low: digits(i.low), high: digits(i.high), n: i.n }
                },
                task_mean_s: digits(row.task_mean_s),
                task_variance_s2: digits(row.task_variance_s2),
                interference: row.interference.map(digits),
                least_throughput: digits(row.least_throughput),
                fairness: digits(row.fairness),
            })
        })
        .collect();
    rows.sort_by(|a, b| a.makespan_s.total_cmp(&b.makespan_s));
    let alone = |system: &String| system.split_once(" + ").is_some_and(|(io, d)| one_layer(io, d));
    let single: Vec<String> = systems.iter().filter(|s| alone(s)).cloned().collect();
    let winners = Winners {
        makespan: winners(&table, systems, &key, Run::makespan_s),
        task_mean: winners(&table, systems, &key, Run::task_mean_s),
        // Inverted: gains are about quantities that should be small.
        least_throughput: winners(&table, systems, &key, |r| 1.0 / r.least_throughput().max(1.0)),
        one_layer: winners(&table, &single, &key, Run::makespan_s),
    };
    let run = rows.len();
    let makespans_s = rows.iter().filter(|r| alone(&r.system)).map(|r| (r.system.clone(), r.makespan_s)).collect();
    let mut shown: Vec<String> = rows.iter().take(5).map(|r| r.system.clone()).collect();
    shown.push(BASELINE.into());
    let w = &winners;
    shown.extend(
        [&w.makespan, &w.task_mean, &w.least_throughput, &w.one_layer].into_iter().flat_map(|w| w.first().cloned()),
    );
    rows.retain(|r| shown.contains(&r.system));
    Situation { name, features, winners, systems: rows, makespans_s, run }
}

/// Four significant digits: the map is a tracked file.
fn digits(v: f64) -> f64 {
    if v == 0.0 || !v.is_finite() {
        return v;
    }
    let place = 10f64.powi(3 - v.abs().log10().floor() as i32);
    (v * place).round() / place
}

/// The system with the lowest metric, followed by those that do not differ from it significantly.
fn winners(
    table: &Table<'_>,
    systems: &[String],
    key: &dyn Fn(&str) -> String,
    metric: fn(&Run) -> f64,
) -> Vec<String> {
    let mut means: Vec<(f64, &String)> =
        systems.iter().filter_map(|s| Some((table.mean(&key(s), metric)?, s))).collect();
    means.sort_by(|a, b| a.0.total_cmp(&b.0));
    let Some(&(least, best)) = means.first() else { return Vec::new() };
    let near = means.iter().filter(|(mean, system)| {
        let worse = table.gain(&key(system), &key(best), metric).map(|g| Interval::of(&g));
        *mean <= least * (1.0 + TIE) || worse.is_some_and(|w| w.n > 1 && w.low <= 0.0)
    });
    near.map(|(_, system)| (*system).clone()).take(8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_situation_and_system_passes_the_checks() {
        for scale in [1, 10] {
            let asked = MapOptions { scale, cascade: true, extent: Extent::All, effort: Effort::default() };
            let systems = systems(true, Extent::All);
            assert_eq!(self::systems(false, Extent::Least).len(), 12, "8 policies of servers, 4 of I/O nodes");
            let names: std::collections::BTreeSet<_> = systems.iter().map(|(io, d)| (io.0, d.0)).collect();
            assert_eq!(names.len(), systems.len());
            assert!(names.contains(&("direct", "none")), "{BASELINE}");
            for (name, features, base) in situations(&asked).unwrap() {
                assert_eq!(features.processes, 32 * scale, "{name}");
                for (io, data) in &systems {
                    assert_eq!(with(&base, io, data).check(), [], "{name}, {} + {}", io.0, data.0);
                }
            }
        }
    }

    #[test]
    fn every_policy_is_on_the_map() {
        let known: Vec<&str> = io_systems().iter().map(|s| s.0).chain(data_systems().iter().map(|s| s.0)).collect();
        for p in impresario_sched::policy::POLICIES.iter().filter(|p| p.name != "to") {
            assert!(known.iter().any(|k| k.starts_with(p.name)), "{}", p.name);
        }
    }

    #[test]
    fn four_digits_matter() {
        assert_eq!([123456.0, 1.23456, -0.000123456, 0.0].map(digits), [123500.0, 1.235, -0.0001235, 0.0]);
    }

    #[test]
    fn winners_are_the_best_and_those_not_told_apart() {
        let run = |s: f64| Run {
            outcome: impresario_sim::outcome::Outcome { makespan_s: s, ..Default::default() },
            alone_s: Vec::new(),
        };
        let runs: BTreeMap<String, Vec<Run>> =
            [("x/a", vec![1.00, 1.02]), ("x/b", vec![1.02, 1.00]), ("x/c", vec![2.0, 2.1]), ("x/d", vec![0.9, 3.0])]
                .map(|(k, v)| (k.to_string(), v.into_iter().map(run).collect()))
                .into();
        let systems: Vec<String> = ["a", "b", "c", "d"].map(String::from).into();
        let best = winners(&Table { runs: &runs }, &systems, &|s| format!("x/{s}"), Run::makespan_s);
        assert_eq!(best, ["a", "b", "d"], "d varies too much to differ significantly, c does not");
    }
}
