//! Figs. 8 to 10 of server-side-scheduling-2002 on a live cluster with modelled disks, compared with their simulation.
//!
//! The figures' tasks, scaled down: 14 clients read one file over two data servers, by one call each (Fig. 8), by one
//! list request of 16 regions to each server (Fig. 9), or by 32 calls for random blocks (Fig. 10), under Opt 1 to 4.
//! The modelled disk has no page cache in front, so this is the paper's uncached case; the network is this machine's,
//! so connections are nearly always ready. In each repetition the four run in random order, and gains over Opt 1 are
//! computed within the repetition. Data are verified outside the timed part.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_base::random::Random;
use impresario_client::{Client, ClientOptions, CreateOptions, File};
use impresario_config::Config;
use impresario_device::DeviceParams;
use impresario_sim::Scenario;
use impresario_sim::model::{Application, FileAt, Pattern, Servers};
use impresario_workload::access::{FilePlace, Target};
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::content::Source;
use impresario_workload::cpu::MachineTimes;
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::result::why_not;
use impresario_workload::rounds::{Paired, shuffled, tried};
use impresario_workload::stats::{Interval, mean, side};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use impresario_workload::system::{Switch, System};
use serde::Serialize;

use crate::reproduce::agreement::Agreement;
use crate::reproduce::figure::policy;
use crate::{impresario, named, report};

const TASKS: u64 = 14;
const SERVERS: usize = 2;
/// Opt 1 to 4, with the parameters of the files in `lab/papers`.
const OPTS_2002: [(&str, &str); 4] = [
    ("opt1", "stream turn_bytes=0 guard_batches=0 sieve=off"),
    ("opt2", "scan turn_bytes=0 guard_batches=0 sieve=off"),
    ("opt3", "wscan turn_bytes=0 guard_batches=0 sieve=off window_bytes=56000000"),
    ("opt4", "sstf patience_us=0 guard_batches=0 sieve=off"),
];

/// Regions of a strided call, and blocks of a task with random access, as in the paper.
const REGIONS: u64 = 16;
const BLOCKS: u64 = 32;
/// After the barrier the tasks start within this time, as in the simulation.
const START_WITHIN_US: u64 = 1000;
const FILE: &str = "shared";

/// Read Figs. 8 to 10 of server-side-scheduling-2002 on live data servers, beside the simulation
///
/// Starts two data servers with modelled disks and runs the paper's three access patterns under Opt 1 to 4 (stream,
/// scan, wscan, sstf), paired, with list requests for the strided one. A run counts with at least 20 % of the CPU idle
/// and a modelled disk that is not late.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab live-2002
  impresario-lab live-2002 --mib 28 --repetitions 8 --json live-2002.json")]
pub struct Args {
    /// Data of each server, MiB; 7 makes every task's share of every pattern a whole number of KiB
    #[arg(long, default_value_t = 14, value_name = "N", value_parser = clap::value_parser!(u64).range(7..=448))]
    mib: u64,
    /// Repetitions of each pattern
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    repetitions: u64,
    /// Only figures whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// Take runs that do not count, too: for trying out on a busy machine
    #[arg(long)]
    uncounted: bool,
    /// Write all figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// An access pattern of the paper.
#[derive(Clone, Copy)]
struct Figure {
    name: &'static str,
    pattern: Pattern,
}

const FIGURES: [Figure; 3] = [
    Figure { name: "Fig. 8: single blocks", pattern: Pattern::Contiguous },
    Figure { name: "Fig. 9: strided, 16 regions in a list", pattern: Pattern::Strided },
    Figure { name: "Fig. 10: random, 32 blocks a task", pattern: Pattern::Random },
];

impl Figure {
    /// Calls of a task, regions of a call and bytes of a region.
    fn calls(&self, mib: u64) -> (u64, u64, u64) {
        let (calls, regions) = match self.pattern {
            Pattern::Strided => (1, REGIONS),
            Pattern::Random => (BLOCKS, 1),
            _ => (1, 1),
        };
        // Blocks are multiples of the words of which the content is made.
        (calls, regions, (mib << 20) * SERVERS as u64 / TASKS / calls / regions / 8 * 8)
    }

    /// The calls of a task, each a list of (offset, length).
    fn plan(&self, task: u64, mib: u64, order: &[u64]) -> Vec<Vec<(u64, usize)>> {
        let (calls, regions, bytes) = self.calls(mib);
        let call = |i: u64| match self.pattern {
            Pattern::Strided => (0..regions).map(|r| ((r * TASKS + task) * bytes, bytes as usize)).collect(),
            Pattern::Random => vec![(order[(task * calls + i) as usize] * bytes, bytes as usize)],
            _ => vec![(task * bytes, bytes as usize)],
        };
        (0..calls).map(call).collect()
    }

    fn scenario(&self, mib: u64, opt: &str, seed: u64, place: FilePlace) -> Scenario {
        let (requests, regions, request_bytes) = self.calls(mib);
        Scenario {
            seed,
            servers: Servers {
                count: SERVERS as u16,
                in_flight: 1,
                pieces: true,
                policy: policy(opt),
                ..Servers::default()
            },
            application: vec![Application {
                processes: TASKS as u32,
                pattern: self.pattern,
                request_bytes,
                requests,
                regions: regions as u32,
                jitter_us: START_WITHIN_US as f64,
                files: vec![FileAt { key: place.key, server: place.base }],
                ..Application::default()
            }],
            ..Scenario::default()
        }
    }
}

/// One run under one of the four.
#[derive(Clone, Copy, Serialize)]
struct Run {
    /// Mean time of a task, s.
    task_mean_s: f64,
    /// Time of the slowest task, s.
    application_s: f64,
}

/// The four in one repetition.
type Four = Vec<Run>;

/// One option of a figure, live and simulated.
#[derive(Serialize)]
struct Row {
    figure: &'static str,
    opt: &'static str,
    policy: &'static str,
    /// Repetitions that count.
    counted: usize,
    live: [Interval; 2],
    simulated: [Interval; 2],
    /// Gain over Opt 1 of the same repetition in the mean time of a task.
    live_gain: Interval,
    simulated_gain: Interval,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let figures = named(FIGURES.into(), |figure| figure.name.into(), &[&args.only])?;
    let stop = catch_signals()?;
    let plan = Plan {
        data_servers: SERVERS,
        io_nodes: 0,
        device: Some(DeviceParams::default()),
        // The paper's servers do not read ahead.
        read_ahead_bytes: 0,
        in_flight_requests: 1,
        program: Some(impresario()?),
        ..Plan::default()
    };
    let cluster = OwnCluster::start(&plan, &stop)?;
    let nonce = Instant::now().elapsed().as_nanos() as u64 ^ u64::from(std::process::id()) << 20;
    let place = write_file(&cluster, args.mib, nonce)?;
    let (mut rows, mut text, mut line) = (Vec::new(), String::new(), Progress::new());
    for figure in figures {
        let [mut live, mut simulated] = [(); 2].map(|()| Paired { rounds: Vec::new() });
        let mut left_out = Vec::new();
        for repetition in 0..args.repetitions {
            line.show(&format!("{}, repetition {} of {}", figure.name, repetition + 1, args.repetitions));
            simulated.rounds.push(simulate(figure, args.mib, repetition, place)?);
            match repeat(&cluster, figure, args, repetition, nonce, &stop)? {
                Ok(four) => live.rounds.push(four),
                Err(why) => left_out.push(why),
            }
        }
        let of = rows.len();
        rows.extend(rows_of(figure.name, &live, &simulated));
        table(&mut text, figure, args, &rows[of..], &left_out)?;
    }
    line.end();
    report(&text, args.json.as_deref(), &rows)
}

/// The content of the file.
fn content(nonce: u64) -> Source {
    Source { nonce, file: 0, writer: 0, generation: 0 }
}

fn connect(config: &Config, name: &str) -> Result<Arc<Client>> {
    let options = ClientOptions { name: name.into(), ..ClientOptions::default() };
    Ok(Client::connect(config, options)?)
}

fn write_file(cluster: &OwnCluster, mib: u64, nonce: u64) -> Result<FilePlace> {
    let file = connect(&cluster.config, "live-2002 prepares")?.create(FILE, CreateOptions::default())?;
    let mut part = vec![0; 1 << 20];
    for n in 0..mib * SERVERS as u64 {
        content(nonce).fill(n << 20, &mut part);
        file.write_at(&part, n << 20)?;
    }
    file.sync()?;
    let place = FilePlace { key: file.key().0, base: file.layout().base };
    file.close()?;
    Ok(place)
}

/// Runs the four live, in random order; returns the reason if a run does not count after a second try.
fn repeat(
    cluster: &OwnCluster,
    figure: Figure,
    args: &Args,
    repetition: u64,
    nonce: u64,
    stop: &Stop,
) -> Result<Result<Four, String>> {
    let mut random = Random::new(repetition);
    let turns = shuffled(4, &mut random);
    let mut order: Vec<u64> = (0..TASKS * BLOCKS).collect();
    random.shuffle(&mut order);
    let mut four = [None; 4];
    for opt in turns {
        let counts = |(_, why): &(Run, Vec<String>)| why.is_empty() || args.uncounted;
        let mut made = tried(2, counts, || {
            stop.check()?;
            run_live(cluster, figure, args.mib, OPTS_2002[opt].1, &order, nonce)
        })?;
        match made.pop() {
            Some(last) if counts(&last) => four[opt] = Some(last.0),
            Some((_, why)) => return Ok(Err(why.join("; "))),
            None => {}
        }
    }
    four.into_iter().collect::<Option<Four>>().map(Ok).context("a run is missing")
}

fn run_live(
    cluster: &OwnCluster,
    figure: Figure,
    mib: u64,
    opt: &str,
    order: &[u64],
    nonce: u64,
) -> Result<(Run, Vec<String>)> {
    let storage = Storage::of(cluster);
    let data_policy = Some(policy(opt));
    storage.switch(&System { name: opt.into(), data_policy, io_policy: None, disk_order: None, recorded: false })?;
    storage.cool()?;
    storage.reset()?;
    let barrier = Barrier::new(TASKS as usize + 1);
    let (tasks, idle) = std::thread::scope(|scope| {
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let (calls, barrier, config) = (figure.plan(task, mib, order), &barrier, &cluster.config);
                scope.spawn(move || {
                    let opened = connect(config, "live-2002 task").and_then(|client| Ok(client.open(FILE, false)?));
                    barrier.wait();
                    let file = opened?;
                    std::thread::sleep(Duration::from_micros(Random::new(task ^ nonce).below(START_WITHIN_US)));
                    read_and_verify(&file, &calls, nonce)
                })
            })
            .collect();
        let before = MachineTimes::now();
        barrier.wait();
        let times: Result<Vec<f64>> = tasks
            .into_iter()
            .map(|task| task.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a task panicked"))))
            .collect();
        (times, before.zip(MachineTimes::now()).and_then(|(before, after)| after.idle_since(&before)))
    });
    let tasks = tasks?;
    let why = why_not(&storage.observe()?, idle);
    Ok((Run { task_mean_s: mean(&tasks), application_s: tasks.into_iter().fold(0.0, f64::max) }, why))
}

/// The time of a task's calls, s.
fn read_and_verify(file: &File, calls: &[Vec<(u64, usize)>], nonce: u64) -> Result<f64> {
    let mut got: Vec<Vec<u8>> = calls.iter().map(|list| vec![0; list.iter().map(|e| e.1).sum()]).collect();
    let started = Instant::now();
    for (list, into) in calls.iter().zip(&mut got) {
        match list.as_slice() {
            [(offset, _)] => file.read_at(into, *offset).map(drop)?,
            list => file.read_list(list, into).map(drop)?,
        }
    }
    let took = started.elapsed().as_secs_f64();
    for (list, got) in calls.iter().zip(&got) {
        let mut rest = &got[..];
        for (offset, len) in list {
            let (mine, later) = rest.split_at(*len);
            rest = later;
            content(nonce).check(*offset, mine)?;
        }
    }
    Ok(took)
}

fn simulate(figure: Figure, mib: u64, seed: u64, place: FilePlace) -> Result<Four> {
    let one = |(_, opt): &(&str, &str)| -> Result<Run> {
        let outcome = impresario_sim::run(&figure.scenario(mib, opt, seed, place))?;
        let tasks = outcome.applications.first().context("the simulation has no application")?;
        Ok(Run { task_mean_s: tasks.task_mean_s, application_s: outcome.makespan_s })
    };
    OPTS_2002.iter().map(one).collect()
}

fn rows_of(figure: &'static str, live: &Paired<Run>, simulated: &Paired<Run>) -> Vec<Row> {
    let times = |runs: &Paired<Run>, opt: usize| {
        [|r: &Run| r.task_mean_s, |r: &Run| r.application_s]
            .map(|of: fn(&Run) -> f64| Interval::of(&runs.values(opt, of)))
    };
    let gain = |runs: &Paired<Run>, opt: usize| runs.less(opt, 0, |run| run.task_mean_s);
    let row = |(opt, (name, policy)): (usize, &(&'static str, &'static str))| Row {
        figure,
        opt: name,
        policy,
        counted: live.rounds.len(),
        live: times(live, opt),
        simulated: times(simulated, opt),
        live_gain: gain(live, opt),
        simulated_gain: gain(simulated, opt),
    };
    OPTS_2002.iter().enumerate().map(row).collect()
}

/// Whether both gains are resolved and have the same sign.
fn agreement(live: &Interval, simulated: &Interval) -> Agreement {
    match (side(*live, 0.0), side(*simulated, 0.0)) {
        (None, _) | (_, None) => Agreement::Unresolved,
        (live, simulated) if live == simulated => Agreement::SameSign,
        _ => Agreement::OppositeSign,
    }
}

fn table(text: &mut String, figure: Figure, args: &Args, rows: &[Row], left_out: &[String]) -> Result<()> {
    let Args { mib, repetitions, .. } = args;
    writeln!(text, "{}; {mib} MiB a server, modelled disk, no cache", figure.name)?;
    writeln!(
        text,
        "       mean time of a task, s   application, s          gain over Opt 1 in the task's time (95 %)"
    )?;
    writeln!(text, "          live      simulated    live     simulated   live                    simulated")?;
    for row in rows {
        let ([task, all], [sim_task, sim_all]) = (&row.live, &row.simulated);
        let percent = |gain: &Interval| {
            format!("{:+.1} % [{:+.1}, {:+.1}]", gain.mean * 100.0, gain.low * 100.0, gain.high * 100.0)
        };
        let seconds = |of: &Interval| if of.n == 0 { "–".into() } else { format!("{:.3}", of.mean) };
        let (live_gain, sim_gain, verdict) = match row.opt {
            _ if row.counted == 0 => ("–".into(), percent(&row.simulated_gain), String::new()),
            "opt1" => Default::default(),
            _ => (
                percent(&row.live_gain),
                percent(&row.simulated_gain),
                agreement(&row.live_gain, &row.simulated_gain).to_string(),
            ),
        };
        writeln!(
            text,
            "  {:5} {:>8} {:>10} {:>11} {:>10}      {live_gain:24}{sim_gain:24}{verdict}",
            row.opt,
            seconds(task),
            seconds(sim_task),
            seconds(all),
            seconds(sim_all)
        )?;
    }
    let counted = rows.first().map_or(0, |row| row.counted);
    let taken = if args.uncounted { "were taken, whether they count or not" } else { "count" };
    writeln!(text, "  {counted} of {repetitions} repetitions {taken}")?;
    for why in left_out {
        writeln!(text, "  left out: {why}")?;
    }
    writeln!(text)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pattern reads every byte of the file once.
    #[test]
    fn the_tasks_share_the_file() {
        for figure in FIGURES {
            let mut order: Vec<u64> = (0..TASKS * BLOCKS).collect();
            Random::new(1).shuffle(&mut order);
            let mut extents: Vec<(u64, usize)> =
                (0..TASKS).flat_map(|task| figure.plan(task, 7, &order).concat()).collect();
            extents.sort_unstable();
            let mut at = 0;
            for (offset, len) in extents {
                assert_eq!(offset, at, "{}", figure.name);
                at += len as u64;
            }
            assert_eq!(at, 14 << 20, "{}", figure.name);
            assert!(figure.scenario(7, OPTS_2002[0].1, 1, FilePlace { key: 1, base: 0 }).check().is_empty());
        }
    }

    #[test]
    fn signs_are_compared_only_where_both_have_one() {
        let gain = |low, high| Interval { mean: (low + high) / 2.0, low, high, n: 3 };
        assert_eq!(agreement(&gain(0.1, 0.2), &gain(0.3, 0.4)), Agreement::SameSign);
        assert_eq!(agreement(&gain(-0.2, -0.1), &gain(0.3, 0.4)), Agreement::OppositeSign);
        assert_eq!(agreement(&gain(-0.1, 0.2), &gain(0.3, 0.4)), Agreement::Unresolved);
    }
}
