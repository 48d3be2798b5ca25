//! The data path compared with a yardstick: our servers, directly and through an I/O node, and the minimal server.
//!
//! Same machine, same transport, same processes, same verification; memory-backed folders, no device model,
//! one request outstanding per client. Runs of the three are interleaved in random order, and ratios are
//! taken within each repetition.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use impresario_base::Random;
use impresario_base::statistics::Interval;
use impresario_base::units::show_bytes;
use impresario_workload::access::Target;
use impresario_workload::dataset::DataSet;
use impresario_workload::pattern::{Pattern, Shape};
use impresario_workload::plan::{Operation, Workload};
use impresario_workload::result::RunResult;
use impresario_workload::rounds::{Paired, Rounds};
use impresario_workload::runner::{RunOptions, run_verified};
use impresario_workload::stats::show;
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

/// What was measured of a load over the paths to some data servers.
pub struct Measured {
    /// Number of data servers.
    pub servers: usize,
    /// Name of the load.
    pub load: String,
    /// The paths.
    pub ways: Vec<Way>,
    /// Their results, repetition by repetition.
    pub runs: Paired<RunResult>,
}

/// One run, as it is written.
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

impl Measured {
    /// Each run.
    pub fn samples(&self) -> impl Iterator<Item = Sample> {
        (0..).zip(&self.runs.rounds).flat_map(move |(repetition, round)| {
            let sample = move |(way, result): (&Way, &RunResult)| Sample {
                servers: self.servers,
                load: self.load.clone(),
                way: *way,
                repetition,
                result: result.clone(),
            };
            self.ways.iter().zip(round).map(sample)
        })
    }

    /// Bandwidth over that of the minimal server, repetition by repetition.
    fn ratio(&self, way: usize) -> Option<Interval> {
        let minimal = self.ways.iter().position(|way| *way == Way::Minimal)?;
        Some(self.runs.ratio(way, minimal, |run| run.bandwidth_mib_s))
    }
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

/// Runs all loads over all paths to `servers` data servers; says of every run what it was, its bandwidth in MiB/s and how long the
/// others will take.
pub fn measure(
    paths: &[Path<'_>],
    servers: usize,
    loads: &[Load],
    repetitions: u32,
    stop: &Stop,
    progress: &mut dyn FnMut(&str, Way, f64, Duration),
) -> Result<Vec<Measured>> {
    let began = Instant::now();
    let (total, mut done) = (loads.len() as u32 * paths.len() as u32 * repetitions.max(1), 0);
    let (mut random, mut measured) = (Random::new(servers as u64), Vec::new());
    for load in loads {
        let mut sets = Vec::new();
        for path in paths {
            let mut set = DataSet::new(&load.workload)?;
            set.prepare(path.target, stop).with_context(|| format!("preparing {} ({:?})", load.name, path.way))?;
            sets.push(set);
        }
        let runs = Rounds::cold(repetitions).measure(paths.len(), &mut random, stop, |_, nth| {
            let (Path { way, target }, options) = (&paths[nth], RunOptions::default());
            let result = run_verified(*target, &mut sets[nth], &load.workload, &options, stop)
                .with_context(|| format!("{} ({way:?}, {servers} servers)", load.name))?;
            done += 1;
            progress(&load.name, *way, result.bandwidth_mib_s, began.elapsed() / done * (total - done));
            Ok(result)
        })?;
        for (path, set) in paths.iter().zip(&sets) {
            set.remove(path.target)?;
        }
        let ways = paths.iter().map(|path| path.way).collect();
        measured.push(Measured { servers, load: load.name.clone(), ways, runs });
    }
    Ok(measured)
}

/// A table for people: the figures of each path and their ratio to the minimal server's.
pub fn table(measured: &[Measured]) -> String {
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
    let server_s = |run: &RunResult| run.server_cpu_s.unwrap_or_default();
    for of in measured {
        for (nth, way) in of.ways.iter().enumerate() {
            let ratio = of.ratio(nth).map(|ratio| show(&ratio, " ×", |ratio| format!("{ratio:.2}")));
            let over = |value: &dyn Fn(&RunResult) -> f64| of.runs.mean(nth, value);
            out += &format!(
                "{:<42} {:>7} {:<9} {:>10.0} {:>11.0} {:>12.1} {:>12.1} {:>9.2}  {}\n",
                of.load,
                of.servers,
                match way {
                    Way::Minimal => "minimal",
                    Way::Direct => "direct",
                    Way::IoNode => "I/O node",
                },
                over(&|run| run.bandwidth_mib_s),
                over(&|run| run.requests_per_s),
                over(&|run| server_s(run) / run.requests as f64 * 1e6),
                over(&|run| run.client_cpu_s / run.requests as f64 * 1e6),
                over(&|run| (server_s(run) + run.client_cpu_s) / run.bytes as f64 * f64::from(1 << 30)),
                if *way == Way::Minimal { "1 ×".into() } else { ratio.unwrap_or_else(|| "–".into()) },
            );
        }
    }
    out
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
        let mut said = 0;
        let measured = measure(&paths, 1, &loads, 2, &Stop::new(), &mut |_, _, _, _| said += 1).unwrap();
        let samples: Vec<Sample> = measured.iter().flat_map(Measured::samples).collect();
        assert_eq!((samples.len(), said), (loads.len() * 3 * 2, loads.len() * 3 * 2));
        assert!(samples.iter().all(|s| s.result.verification.passed() && s.result.client_cpu_s >= 0.0));
        let last = samples.last().unwrap();
        assert_eq!((last.way, last.repetition, &last.load), (Way::IoNode, 1, &loads[loads.len() - 1].name));
        let text = table(&measured);
        assert_eq!(text.lines().count(), 1 + loads.len() * 3);
        assert_eq!((measured[0].ratio(0).unwrap().mean, measured[0].ratio(1).unwrap().n), (1.0, 2));
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
