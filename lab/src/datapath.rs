//! The data path compared with a yardstick: our servers, directly and through an I/O node, and the minimal server.
//!
//! Same machine, same transport, same processes, same verification; memory-backed folders, no device model,
//! one request outstanding per client. Runs of the three are interleaved in random order, and ratios are
//! taken within each repetition.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use impresario_base::Random;
use impresario_base::statistics::{Interval, mean};
use impresario_base::units::show_bytes;
use impresario_workload::access::Target;
use impresario_workload::dataset::DataSet;
use impresario_workload::pattern::{Pattern, Shape};
use impresario_workload::plan::{Operation, Workload};
use impresario_workload::result::RunResult;
use impresario_workload::runner::{RunOptions, run};
use impresario_workload::stop::Stop;

/// A path to the data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The minimal server.
    Minimal,
    /// Our data servers, without an I/O node.
    Direct,
    /// Our data servers through an I/O node.
    IoNode,
}

/// A path and the storage at its end.
pub struct Path<'a> {
    /// The path.
    pub way: Way,
    /// The storage.
    pub target: &'a dyn Target,
}

/// One kind of load.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Load {
    /// For tables.
    pub name: String,
    /// What runs.
    pub workload: Workload,
}

/// One run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Number of data servers.
    pub servers: usize,
    /// Name of the load.
    pub load: String,
    /// Which way.
    pub way: Way,
    /// Repetition, from 0.
    pub repetition: u32,
    /// The result.
    pub result: RunResult,
}

/// A load of some processes, each with a part of a file; `scale` 1 is `loops` times `process_bytes` for each.
pub fn load(
    scale: f64,
    shape: Shape,
    operation: Operation,
    request_bytes: u64,
    processes: u32,
    process_bytes: u64,
    loops: f64,
) -> Load {
    let process_bytes = ((process_bytes as f64 * scale.min(1.0)) as u64 / request_bytes).max(1) * request_bytes;
    let pattern = Pattern { shape, request_bytes, process_bytes, processes, seed: 3 };
    let mut workload = Workload::uniform(1, pattern, operation);
    workload.applications[0].loops = ((loops * scale).round() as u32).max(1);
    let name = format!("{} {shape} {operation}, {}", show_bytes(request_bytes as f64), clients(processes));
    Load { name, workload }
}

/// Their number in words.
pub fn clients(number: u32) -> String {
    format!("{number} {}", if number == 1 { "client" } else { "clients" })
}

const MIB: u64 = 1 << 20;

/// The loads by which other servers were measured. `scale` 1 is some gigabytes each.
pub fn loads(scale: f64) -> Vec<Load> {
    let make = |shape, operation, request_bytes, processes, process_bytes, loops| {
        load(scale, shape, operation, request_bytes, processes, process_bytes, loops)
    };
    vec![
        make(Shape::Contiguous, Operation::Read, MIB, 1, 64 * MIB, 24.0),
        make(Shape::Contiguous, Operation::Read, MIB, 16, 8 * MIB, 16.0),
        make(Shape::Contiguous, Operation::Write, MIB, 1, 64 * MIB, 24.0),
        make(Shape::Contiguous, Operation::Write, MIB, 16, 8 * MIB, 16.0),
        make(Shape::Strided, Operation::Read, 64 << 10, 16, 4 * MIB, 20.0),
        make(Shape::Random, Operation::Read, 4 << 10, 1, 16 * MIB, 6.0),
        make(Shape::Random, Operation::Read, 4 << 10, 16, 4 * MIB, 6.0),
    ]
}

/// Runs all loads over all paths to `servers` data servers; reports every run to `progress`.
pub fn measure(
    paths: &[Path<'_>],
    servers: usize,
    loads: &[Load],
    repetitions: u32,
    stop: &Stop,
    progress: &mut dyn FnMut(&Sample, Option<Duration>),
) -> Result<Vec<Sample>> {
    let began = Instant::now();
    let total = loads.len() as u32 * paths.len() as u32 * repetitions;
    let mut random = Random::new(servers as u64);
    let mut samples: Vec<Sample> = Vec::new();
    for load in loads {
        let mut sets = Vec::new();
        for path in paths {
            let mut set = DataSet::new(&load.workload)?;
            set.prepare(path.target, stop).with_context(|| format!("preparing {} ({:?})", load.name, path.way))?;
            sets.push(set);
        }
        for repetition in 0..repetitions {
            let mut order: Vec<usize> = (0..paths.len()).collect();
            random.shuffle(&mut order);
            for index in order {
                let path = &paths[index];
                let sample = one(path, servers, load, repetition, &mut sets[index], stop)
                    .with_context(|| format!("{} ({:?}, {servers} servers)", load.name, path.way))?;
                let done = samples.len() as u32 + 1;
                progress(&sample, Some(began.elapsed() / done * (total - done)));
                samples.push(sample);
            }
        }
        for (path, set) in paths.iter().zip(&sets) {
            set.remove(path.target)?;
        }
    }
    Ok(samples)
}

fn one(
    path: &Path<'_>,
    servers: usize,
    load: &Load,
    repetition: u32,
    set: &mut DataSet,
    stop: &Stop,
) -> Result<Sample> {
    let options = RunOptions { verify: true, ..RunOptions::default() };
    let result = run(path.target, set, &load.workload, &options, stop)?;
    ensure!(
        result.verification.passed(),
        "the data are wrong: {}",
        result.verification.first.first().map_or("nothing was compared".into(), ToString::to_string)
    );
    let (load, way) = (load.name.clone(), path.way);
    Ok(Sample { servers, load, way, repetition, result })
}

/// A table for people: the figures of each path and their ratio to the minimal server's.
pub fn table(samples: &[Sample]) -> String {
    let mut out = format!(
        "{:<42} {:>7} {:<9} {:>10} {:>11} {:>12} {:>12} {:>9}  {}\n",
        "load",
        "servers",
        "way",
        "MiB/s",
        "requests/s",
        "server µs/op",
        "client µs/op",
        "s CPU/GiB",
        "ratio to minimal"
    );
    let mut seen: Vec<(usize, &str)> = Vec::new();
    for s in samples {
        if !seen.contains(&(s.servers, &s.load)) {
            seen.push((s.servers, &s.load));
        }
    }
    for (servers, load) in seen {
        let of = |way: Way| samples.iter().filter(move |s| s.servers == servers && s.load == load && s.way == way);
        for way in [Way::Minimal, Way::Direct, Way::IoNode] {
            let over = |f: &dyn Fn(&Sample) -> f64| mean(&of(way).map(f).collect::<Vec<_>>());
            if of(way).next().is_none() {
                continue;
            }
            let ratio = ratios(samples, servers, load, way);
            out += &format!(
                "{:<42} {:>7} {:<9} {:>10.0} {:>11.0} {:>12.1} {:>12.1} {:>9.2}  {}\n",
                load,
                servers,
                match way {
                    Way::Minimal => "minimal",
                    Way::Direct => "direct",
                    Way::IoNode => "I/O node",
                },
                over(&|s| s.result.bandwidth_mib_s),
                over(&|s| s.result.requests_per_s),
                over(&|s| s.result.server_cpu_s.unwrap_or_default() / s.result.requests as f64 * 1e6),
                over(&|s| s.result.client_cpu_s / s.result.requests as f64 * 1e6),
                over(&|s| {
                    let cpu_s = s.result.server_cpu_s.unwrap_or_default() + s.result.client_cpu_s;
                    cpu_s / s.result.bytes as f64 * f64::from(1 << 30)
                }),
                if way == Way::Minimal { "1 ×".into() } else { show_ratio(&ratio) },
            );
        }
    }
    out
}

/// Bandwidth over that of the minimal server, repetition by repetition.
pub fn ratios(samples: &[Sample], servers: usize, load: &str, way: Way) -> Interval {
    let find = |way: Way, repetition: u32| {
        let own = |s: &&Sample| s.servers == servers && s.load == load && s.way == way && s.repetition == repetition;
        samples.iter().find(own).map(|s| s.result.bandwidth_mib_s)
    };
    let repetitions = samples.iter().map(|s| s.repetition + 1).max().unwrap_or(0);
    let pair = |r| Some(find(way, r)? / find(Way::Minimal, r)?);
    Interval::of(&(0..repetitions).filter_map(pair).collect::<Vec<_>>())
}

fn show_ratio(ratio: &Interval) -> String {
    match ratio.n {
        0 => "–".into(),
        1 => format!("{:.2} × (one run)", ratio.mean),
        n => format!("{:.2} × [{:.2}, {:.2}] n={n}", ratio.mean, ratio.low, ratio.high),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_workload::memory::Memory;

    #[test]
    fn three_ways_are_measured_alike_and_told() {
        let memories = [Memory::default(), Memory::default(), Memory::default()];
        let ways = [Way::Minimal, Way::Direct, Way::IoNode];
        let paths: Vec<Path> = ways.iter().zip(&memories).map(|(&way, target)| Path { way, target }).collect();
        let loads = loads(0.002);
        let samples = measure(&paths, 1, &loads, 2, &Stop::new(), &mut |_, _| {}).unwrap();
        assert_eq!(samples.len(), loads.len() * 3 * 2);
        assert!(samples.iter().all(|s| s.result.verification.passed() && s.result.client_cpu_s >= 0.0));
        let text = table(&samples);
        assert_eq!(text.lines().count(), 1 + loads.len() * 3);
        assert_eq!(ratios(&samples, 1, &loads[0].name, Way::Minimal).mean, 1.0);
        assert_eq!(ratios(&samples, 1, &loads[0].name, Way::Direct).n, 2);
    }

    #[test]
    fn loads_are_those_other_servers_were_measured_by() {
        let all = loads(1.0);
        assert_eq!(all.len(), 7);
        for load in &all {
            load.workload.check().unwrap();
            assert!(load.workload.bytes() >= 96 << 20, "{}", load.name);
            // All data fit into the arena, so none is generated or compared in the timed part.
            assert!(load.workload.applications[0].pattern.total_bytes() <= 256 << 20);
        }
    }
}
