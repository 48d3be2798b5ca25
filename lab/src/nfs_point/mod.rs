//! `impresario-lab nfs`: aIOLi's central point, an NFS server, on a modelled disk below the real kernel.
//!
//! The experiments of aioli-2006 ("Evaluations") scaled down: the NFS service with its policies and nfs-ganesha export the same
//! folder of the kernel-disk bed, and the same programs (libnfs) load them. The server's page cache is empty before each run.

mod load;
mod server;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use impresario_base::Random;
use impresario_base::statistics::{Interval, median};
use impresario_base::units::{parse_positive_bytes, show_bytes, show_seconds};
use impresario_device::DeviceParams;
use impresario_workload::access::Observation;
use impresario_workload::children::Children;
use impresario_workload::cpu::MachineTimes;
use impresario_workload::kernel_disk::{KernelDisk, remove_stale, tool};
use impresario_workload::programs::drop_caches;
use impresario_workload::progress::{Progress, catch_signals, write_json};
use impresario_workload::result::why_not;
use impresario_workload::stop::Stop;
use impresario_workload::storage::observe_kernel_disks;
use serde::Serialize;
use serde_json::json;

use crate::{nfs_ganesha, print, usage};
use load::{Load, loads};
use server::{SYSTEMS, Server};

/// Measure what a central NFS point gains on a modelled disk below the real kernel, beside nfs-ganesha (aioli-2006)
///
/// 32 processes read a shared file in turns of 8, 64 and 128 KiB, by separate and by collective calls; a small sequential
/// `cat` beside that; and the paper's ten applications. Systems: policies of `impresario nfs`, one request at a time in order of arrival
/// (serialising alone), and nfs-ganesha where it is installed. Caches of the whole machine are dropped before each run; a run
/// counts with at least 20 % of the CPU idle and a disk that is not late; everything read and written is compared. Needs root,
/// /dev/fuse, cc, and the Debian packages libnfs-dev, rpcbind and nfs-ganesha-vfs; everything runs in a network of its own.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab nfs
  impresario-lab nfs --loads 'decomposition, 64' --systems none,mlf --pairs 6
  impresario-lab nfs --size 256m --json nfs.json")]
pub struct Args {
    /// The file that is taken apart (4 GB in the paper); the other files are scaled with it
    #[arg(long, default_value = "128m", value_parser = parse_positive_bytes, value_name = "SIZE")]
    size: u64,
    /// Processes of the decomposition
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=128))]
    processes: u64,
    /// Runs of every system under each load, in random order
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,
    /// Only loads whose names contain one of these
    #[arg(long, value_delimiter = ';', value_name = "TEXT;…")]
    loads: Vec<String>,
    /// Only these systems
    #[arg(long, value_delimiter = ',', value_name = "SYSTEM,…")]
    systems: Vec<String>,
    /// Take runs that do not count, too: for trying out on a busy machine
    #[arg(long)]
    uncounted: bool,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const CLIENTS: &str = include_str!("clients.c");
/// A run takes seconds; one that does not end is an error.
const RUN_PATIENCE: Duration = Duration::from_secs(300);
/// Attempts at a run that counts.
const ATTEMPTS: u32 = 3;

/// One run.
#[derive(Clone, Serialize)]
struct Run {
    load: usize,
    system: usize,
    pair: u32,
    /// From the common start to the end of the last process, s.
    makespan_s: f64,
    /// Each application, from its own start to the end of its last process, s.
    application_s: Vec<f64>,
    /// Requests at the disk and their mean size, by the kernel's count.
    disk_requests: u64,
    disk_request_bytes: f64,
    /// Why it does not count; empty if it does.
    does_not_count: Vec<String>,
}

/// The bed and what is on it.
struct Bed {
    disk: KernelDisk,
    export: PathBuf,
    clients: PathBuf,
}

impl Bed {
    fn new(folder: &Path) -> Result<Bed> {
        let disk = KernelDisk::new(folder, &DeviceParams::default())?;
        let export = disk.path().join("export");
        std::fs::create_dir(&export)?;
        let (source, clients) = (folder.join("clients.c"), folder.join("clients"));
        std::fs::write(&source, CLIENTS)?;
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-pthread", "-o"]).arg(&clients).arg(&source).arg("-lnfs");
        tool(&mut cc).context("building the clients (packages gcc and libnfs-dev)")?;
        Ok(Bed { disk, export, clients })
    }

    fn run(&self, server: &Server, load: &Load, generation: u64, stop: &Stop) -> Result<Run> {
        drop_caches()?;
        self.disk.reset()?;
        let before = MachineTimes::now();
        let said = self.clients(&server.url, &load.lines(generation), stop)?;
        let idle = before.and_then(|before| MachineTimes::now()?.idle_since(&before));
        let mut seen = Observation::default();
        observe_kernel_disks(std::slice::from_ref(&self.disk), &mut seen)?;
        load.verify(&self.export, generation)?;
        let (makespan_s, application_s) = times(&said, load.applications.len())?;
        Ok(Run {
            load: 0,
            system: 0,
            pair: 0,
            makespan_s,
            application_s,
            disk_requests: seen.at_disk.requests,
            disk_request_bytes: seen.at_disk.mean_bytes().unwrap_or(0.0),
            does_not_count: why_not(&seen, idle),
        })
    }

    /// Runs the clients to their end and gives what they printed.
    fn clients(&self, url: &str, lines: &str, stop: &Stop) -> Result<String> {
        let mut command = Command::new(&self.clients);
        command.arg(url).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting the clients")?;
        child.stdin.take().context("their input")?.write_all(lines.as_bytes())?;
        let until = Instant::now() + RUN_PATIENCE;
        // What they print fits into a pipe.
        while child.try_wait()?.is_none() {
            if stop.is_set() || Instant::now() > until {
                child.kill()?;
                child.wait()?;
                stop.check()?;
                bail!("the clients did not end within {} s", RUN_PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "the clients failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Makespan and the applications' times from what the clients printed.
fn times(said: &str, applications: usize) -> Result<(f64, Vec<f64>)> {
    let mut spans = vec![(f64::INFINITY, 0.0_f64); applications];
    for line in said.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [nth, began, ended] = words[..] else { bail!("the clients printed {line:?}") };
        let (began, ended): (f64, f64) = (began.parse()?, ended.parse()?);
        let span = spans.get_mut(nth.parse::<usize>()?).context("an unknown application")?;
        *span = (span.0.min(began), span.1.max(ended));
    }
    ensure!(spans.iter().all(|span| span.0.is_finite()), "an application printed nothing");
    let makespan = spans.iter().map(|span| span.1).fold(0.0, f64::max);
    Ok((makespan, spans.iter().map(|span| span.1 - span.0).collect()))
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let named = |name: &str| args.systems.is_empty() || args.systems.iter().any(|only| only == name);
    if let Some(unknown) = args.systems.iter().find(|name| SYSTEMS.iter().all(|system| system.name != name.as_str())) {
        let known: Vec<&str> = SYSTEMS.iter().map(|system| system.name).collect();
        return Err(usage(format!("there is no system {unknown:?}; there are {}", known.join(", "))));
    }
    let wanted = |load: &Load| args.loads.is_empty() || args.loads.iter().any(|only| load.name.contains(only.as_str()));
    let loads: Vec<Load> = loads(args.size, args.processes).into_iter().filter(wanted).collect();
    if loads.is_empty() {
        return Err(usage(format!("no load's name contains {}", args.loads.join(" or "))));
    }
    let parent = impresario_workload::cluster::folder(None)?;
    remove_stale(parent.path())?;
    let (mut portmapper, mut missing) = (Children::default(), Vec::new());
    if let Err(error) = nfs_ganesha::own_network(&mut portmapper, parent.path()) {
        missing.push(format!("no portmapper for nfs-ganesha: {error:#}"));
    }
    let bed = Bed::new(parent.path())?;
    let mut servers = Vec::new();
    for system in SYSTEMS.iter().filter(|system| named(system.name)) {
        match Server::start(system, &bed.export, parent.path(), &stop) {
            Ok(server) => servers.push(server),
            Err(error) if stop.is_set() => return Err(error),
            Err(error) => missing.push(format!("{} could not be started: {error:#}", system.name)),
        }
    }
    let (mut runs, mut line) = (Vec::<Run>::new(), Progress::new());
    let (mut random, mut generation) = (Random::new(1), 0);
    let total = loads.len() * servers.len() * args.pairs as usize;
    for (nth, load) in loads.iter().enumerate() {
        load.prepare(&bed.export)?;
        for pair in 0..args.pairs {
            let mut order: Vec<usize> = (0..servers.len()).collect();
            random.shuffle(&mut order);
            for system in order {
                for attempt in 1..=ATTEMPTS {
                    stop.check()?;
                    generation = (generation + 1) % 2048;
                    line.show(&format!("{} of {total}: {}, {}", runs.len() + 1, load.name, servers[system].name));
                    let run = bed.run(&servers[system], load, generation, &stop);
                    let run = run.with_context(|| format!("{}, {}", load.name, servers[system].name))?;
                    if run.does_not_count.is_empty() || args.uncounted || attempt == ATTEMPTS {
                        runs.push(Run { load: nth, system, pair, ..run });
                        break;
                    }
                }
            }
        }
    }
    line.end();
    let names: Vec<&str> = servers.iter().map(|server| server.name).collect();
    let text =
        table(&loads, &names, &runs, args.uncounted) + &missing.iter().map(|m| format!("{m}\n")).collect::<String>();
    write_json(
        args.json.as_deref(),
        &json!({
            "loads": loads.iter().map(|load| &load.name).collect::<Vec<_>>(),
            "systems": names,
            "runs": runs,
            "missing": missing,
        }),
    )?;
    print(text.as_bytes())
}

/// Times of every system, and how many times as fast as `none` and nfs-ganesha it was, pair by pair.
fn table(loads: &[Load], systems: &[&str], runs: &[Run], uncounted: bool) -> String {
    let counts = |run: &&Run| uncounted || run.does_not_count.is_empty();
    let mut out = String::from(
        "times on the MODELLED disk; × is the baseline's time over the system's, pair by pair, with its 95 % interval\n",
    );
    for (nth, load) in loads.iter().enumerate() {
        out += &format!(
            "\n{}\n  {:<22} {:>10} {:>12} {:>26} {:>26}\n",
            load.name, "", "makespan", "at the disk", "× none", "× nfs-ganesha"
        );
        for (system, name) in systems.iter().enumerate() {
            let of =
                |system: usize| runs.iter().filter(move |run| run.load == nth && run.system == system).filter(counts);
            let median_of = |value: &dyn Fn(&Run) -> f64| median(&of(system).map(value).collect::<Vec<_>>());
            if of(system).next().is_none() {
                out += &format!("  {name:<22} no run counts\n");
                continue;
            }
            let over = |base: &str| {
                let Some(base) = systems.iter().position(|other| *other == base).filter(|base| *base != system) else {
                    return "–".to_string();
                };
                let ratio =
                    |run: &Run| of(base).find(|other| other.pair == run.pair).map(|b| b.makespan_s / run.makespan_s);
                let ratios: Vec<f64> = of(system).filter_map(ratio).collect();
                let interval = Interval::of(&ratios);
                match ratios.len() {
                    0 => "no pair counts".into(),
                    1 => format!("{:.2} (one pair)", interval.mean),
                    n => format!("{:.2} [{:.2}, {:.2}] n={n}", interval.mean, interval.low, interval.high),
                }
            };
            out += &format!(
                "  {name:<22} {:>10} {:>12} {:>26} {:>26}\n",
                show_seconds(median_of(&|run| run.makespan_s)),
                show_bytes(median_of(&|run| run.disk_request_bytes)),
                over("none"),
                over("nfs-ganesha"),
            );
            if load.applications.len() > 1 {
                for (application, a) in load.applications.iter().enumerate() {
                    out += &format!(
                        "      {:<28} {:>10}\n",
                        a.name,
                        show_seconds(median_of(&|run| run.application_s[application]))
                    );
                }
            }
        }
    }
    let excluded = runs.iter().filter(|run| !run.does_not_count.is_empty()).count();
    out += &format!("\nruns that do not count: {excluded} of {}\n", runs.len());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_compared_pair_by_pair() {
        assert_eq!(times("0 0.0 2.0\n1 0.5 1.0\n0 0.1 3.0\n", 2).unwrap(), (3.0, vec![3.0, 0.5]));
        assert!(times("0 0.0 2.0\n", 2).is_err() && times("x", 1).is_err());
        let run = |system, pair, makespan_s, counts: bool| Run {
            load: 0,
            system,
            pair,
            makespan_s,
            application_s: vec![makespan_s],
            disk_requests: 4,
            disk_request_bytes: 4096.0,
            does_not_count: if counts { Vec::new() } else { vec!["late".into()] },
        };
        let runs = [
            run(0, 0, 4.0, true),
            run(1, 0, 2.0, true),
            run(0, 1, 6.0, true),
            run(1, 1, 3.0, true),
            run(1, 2, 9.0, false),
        ];
        let loads = &loads(1 << 20, 2)[..1];
        let text = table(loads, &["none", "mlf"], &runs, false);
        assert!(text.contains("2.00 [2.00, 2.00] n=2") && text.contains("runs that do not count: 1 of 5"), "{text}");
    }
}
