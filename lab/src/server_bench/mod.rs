//! The chain of the benchmarks that load file servers on modelled disks with whole programs: servers of several kinds or with
//! several settings, the same bed below and the same clients above, cold caches, random order, pairs, a table.

pub mod load;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use impresario_base::Random;
use impresario_base::statistics::{Interval, median};
use impresario_base::units::{show_bytes, show_seconds};
use impresario_workload::access::Observation;
use impresario_workload::children::Children;
use impresario_workload::cpu::MachineTimes;
use impresario_workload::kernel_disk::{KernelDisk, tool};
use impresario_workload::programs::drop_caches;
use impresario_workload::progress::{Progress, all_written, check_outputs, write_json};
use impresario_workload::result::why_not;
use impresario_workload::rounds::{shuffled, tried};
use impresario_workload::stats::show;
use impresario_workload::stop::Stop;
use impresario_workload::storage::observe_kernel_disks;
use serde::Serialize;
use serde_json::json;

use crate::client_program::{self, Library};
use crate::{named, print, usage};
use load::Load;

const CLIENTS: &str = include_str!("clients.c");
/// A run takes seconds; one that does not end is an error.
const RUN_PATIENCE: Duration = Duration::from_secs(300);
/// Attempts at a run that counts.
const ATTEMPTS: u32 = 3;

/// Gives this thread, and all processes that it starts, a network of their own with nothing but loopback. Needs root.
pub fn own_network() -> Result<()> {
    // SAFETY: only file descriptor tables that are unshared could surprise other code; a network namespace concerns sockets that
    // are made from here on.
    let unshared = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) };
    unshared.context("making a network namespace (needs root)")?;
    tool(Command::new("ip").args(["link", "set", "lo", "up"])).map(drop)
}

/// Waits until a server among the children accepts connections on a port of loopback.
pub fn accepts(children: &mut Children, what: &str, port: u16, patience: Duration, stop: &Stop) -> Result<()> {
    let ready = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
    let complaint = || format!("{what} accepts no connection on port {port}");
    until_ready(children, Instant::now() + patience, stop, ready, complaint)
}

/// Waits until what the children do is ready, as long as all of them run.
pub fn until_ready(
    children: &mut Children,
    until: Instant,
    stop: &Stop,
    mut ready: impl FnMut() -> bool,
    complaint: impl FnOnce() -> String,
) -> Result<()> {
    while !ready() {
        children.check()?;
        stop.check()?;
        if Instant::now() >= until {
            bail!(complaint());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The modelled disks below the servers, and the files on them.
pub trait Bed {
    /// Writes the files of a load; it may name them otherwise.
    fn prepare(&self, load: &mut Load) -> Result<()>;
    /// Compares what a run wrote.
    fn verify(&self, load: &Load, generation: u64) -> Result<()>;
    /// Starts the disks' counts anew.
    fn reset(&self) -> Result<()>;
    /// What was at the disks since.
    fn observe(&self) -> Result<Observation>;
}

/// Kernel disks as [`Bed`]s see them.
pub fn reset_disks(disks: &[KernelDisk]) -> Result<()> {
    disks.iter().try_for_each(KernelDisk::reset)
}

/// The same, for what was at them.
pub fn observe_disks(disks: &[KernelDisk]) -> Result<Observation> {
    let mut seen = Observation::default();
    observe_kernel_disks(disks, &mut seen)?;
    Ok(seen)
}

/// One run.
#[derive(Clone, Serialize)]
pub struct Run {
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

/// The program that loads a server.
pub struct Clients(PathBuf);

impl Clients {
    /// Builds it in `folder`, for servers that this library is a client of.
    pub fn build(folder: &Path, library: &Library) -> Result<Clients> {
        client_program::build(folder, "clients", CLIENTS, library).map(Clients)
    }

    /// Runs it to its end, for `seconds` if these are not 0, and gives what it printed.
    pub fn run(&self, address: &str, lines: &str, seconds: f64, stop: &Stop) -> Result<String> {
        self.launched(&[], address, lines, seconds, stop)
    }

    /// The same, started by another program: its name and arguments.
    fn launched(&self, launcher: &[String], address: &str, lines: &str, seconds: f64, stop: &Stop) -> Result<String> {
        let mut command = match launcher {
            [] => Command::new(&self.0),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(&self.0);
                command
            }
        };
        command.args([address, &seconds.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting the clients")?;
        child.stdin.take().context("their input")?.write_all(lines.as_bytes())?;
        let until = Instant::now() + RUN_PATIENCE + Duration::from_secs_f64(seconds);
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

/// Which parts of a comparison run, how often, and where its runs go.
#[derive(clap::Args)]
pub struct Choice {
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

impl Choice {
    /// The chosen ones of all loads; that there is none, or that the runs cannot be written, is the user's mistake.
    pub fn loads(&self, all: Vec<Load>) -> Result<Vec<Load>> {
        check_outputs(&[self.json.as_deref()])?;
        named(all, |load| load.name.clone(), &self.loads)
    }

    /// The chosen ones of all systems; an unknown name is the user's mistake.
    pub fn systems<'a, T>(&self, all: &'a [T], name: impl Fn(&T) -> &str) -> Result<Vec<&'a T>> {
        if let Some(unknown) =
            self.systems.iter().find(|chosen| all.iter().all(|system| name(system) != chosen.as_str()))
        {
            let known: Vec<&str> = all.iter().map(&name).collect();
            return Err(usage(format!("there is no system {unknown:?}; there are {}", known.join(", "))));
        }
        let is_chosen = |system: &&T| self.systems.is_empty() || self.systems.iter().any(|only| only == name(system));
        Ok(all.iter().filter(is_chosen).collect())
    }
}

/// Has a server serve each load once, as a measurement begins, for whoever records that.
pub fn serve_once(bed: &dyn Bed, clients: &Clients, address: &str, loads: &mut [Load], stop: &Stop) -> Result<()> {
    for load in loads {
        stop.check()?;
        bed.prepare(load)?;
        drop_caches()?;
        bed.reset()?;
        clients.run(address, &load.lines(0), 0.0, stop).with_context(|| format!("{}, once", load.name))?;
    }
    Ok(())
}

/// A running server.
pub struct Subject<'a> {
    pub name: &'a str,
    /// What the clients are told.
    pub address: &'a str,
    /// What starts the clients; empty: they are started as they are.
    pub launcher: &'a [String],
}

/// What is compared, and how.
pub struct Comparison<'a> {
    /// First line of the table.
    pub title: &'a str,
    /// Times are of a modelled disk.
    pub modelled: bool,
    pub loads: Vec<Load>,
    pub subjects: Vec<Subject<'a>>,
    /// How often, and where the runs go.
    pub choice: &'a Choice,
    /// Subjects that the others are compared with.
    pub baselines: &'a [&'a str],
    /// What could not be compared, in words.
    pub missing: Vec<String>,
}

impl Comparison<'_> {
    /// Runs everything, and gives the table. When it is stopped, or a run fails, what was measured until then is printed and
    /// written before the error is returned.
    pub fn run(&mut self, bed: &dyn Bed, clients: &Clients, stop: &Stop) -> Result<String> {
        let total = self.loads.len() * self.subjects.len() * self.choice.pairs as usize;
        let mut runs = Vec::new();
        let ended = self.measure(&mut runs, total, bed, clients, stop);
        if runs.is_empty() {
            return ended.map(|()| self.table(&runs));
        }
        let written = write_json(
            self.choice.json.as_deref(),
            &json!({
                "loads": self.loads.iter().map(|load| &load.name).collect::<Vec<_>>(),
                "systems": self.subjects.iter().map(|subject| subject.name).collect::<Vec<_>>(),
                "runs": runs,
                "missing": self.missing,
            }),
        );
        let table = self.table(&runs);
        let ended = ended.map_err(|error| error.context(format!("the table holds {} of {total} runs", runs.len())));
        if ended.is_err() || written.is_err() {
            all_written([print(table.as_bytes()).map(drop), written, ended])?;
        }
        Ok(table)
    }

    fn measure(
        &mut self,
        runs: &mut Vec<Run>,
        total: usize,
        bed: &dyn Bed,
        clients: &Clients,
        stop: &Stop,
    ) -> Result<()> {
        let (mut line, mut random, mut generation) = (Progress::new(), Random::new(1), 0);
        for (nth, load) in self.loads.iter_mut().enumerate() {
            bed.prepare(load)?;
            for pair in 0..self.choice.pairs {
                for system in shuffled(self.subjects.len(), &mut random) {
                    let subject = &self.subjects[system];
                    let counts = |run: &Run| run.does_not_count.is_empty() || self.choice.uncounted;
                    let made = tried(ATTEMPTS, counts, || {
                        stop.check()?;
                        generation = (generation + 1) % 2048;
                        line.show(&format!("{} of {total}: {}, {}", runs.len() + 1, load.name, subject.name));
                        let run = one(bed, clients, subject, load, generation, stop);
                        run.with_context(|| format!("{}, {}", load.name, subject.name))
                    })?;
                    runs.extend(made.into_iter().next_back().map(|run| Run { load: nth, system, pair, ..run }));
                }
            }
        }
        line.end();
        Ok(())
    }

    /// Times of every subject, and how many times as fast as the baselines it was, pair by pair.
    fn table(&self, runs: &[Run]) -> String {
        let counts = |run: &&Run| self.choice.uncounted || run.does_not_count.is_empty();
        let mut out = format!(
            "{}\n{}× is the baseline's time over the system's, pair by pair, with its 95 % interval\n",
            self.title,
            if self.modelled { "times on the MODELLED disk; " } else { "" },
        );
        let measured = |nth: usize| runs.iter().any(|run| run.load == nth);
        for (nth, load) in self.loads.iter().enumerate().filter(|(nth, _)| measured(*nth)) {
            out += &format!("\n{}\n  {:<24} {:>10} {:>12}", load.name, "", "makespan", "at the disk");
            self.baselines.iter().for_each(|base| out += &format!(" {:>26}", format!("× {base}")));
            out += "\n";
            for (system, subject) in self.subjects.iter().enumerate() {
                let of = |system: usize| {
                    runs.iter().filter(move |run| run.load == nth && run.system == system).filter(counts)
                };
                let median_of = |value: &dyn Fn(&Run) -> f64| median(&of(system).map(value).collect::<Vec<_>>());
                if of(system).next().is_none() {
                    out += &format!("  {:<24} no run counts\n", subject.name);
                    continue;
                }
                let over = |base: &str| {
                    let base = self.subjects.iter().position(|other| other.name == base);
                    let Some(base) = base.filter(|base| *base != system) else { return "–".to_string() };
                    let ratio = |run: &Run| {
                        of(base).find(|other| other.pair == run.pair).map(|b| b.makespan_s / run.makespan_s)
                    };
                    match Interval::of(&of(system).filter_map(ratio).collect::<Vec<_>>()) {
                        none if none.n == 0 => "no pair counts".into(),
                        ratio => show(&ratio, "", |ratio| format!("{ratio:.2}")),
                    }
                };
                out += &format!(
                    "  {:<24} {:>10} {:>12}",
                    subject.name,
                    show_seconds(median_of(&|run| run.makespan_s)),
                    show_bytes(median_of(&|run| run.disk_request_bytes)),
                );
                self.baselines.iter().for_each(|base| out += &format!(" {:>26}", over(base)));
                out += "\n";
                let named = load.applications.iter().any(|a| a.name != load.applications[0].name);
                for (application, a) in load.applications.iter().enumerate().filter(|_| named) {
                    out += &format!(
                        "      {:<28} {:>10}\n",
                        a.name,
                        show_seconds(median_of(&|run| run.application_s[application]))
                    );
                }
            }
        }
        let excluded = runs.iter().filter(|run| !run.does_not_count.is_empty()).count();
        out += &format!("\nruns that do not count: {excluded} of {}", runs.len());
        out += if self.choice.uncounted && excluded > 0 {
            ", taken all the same: a TRIAL, not a measurement\n"
        } else {
            "\n"
        };
        self.missing.iter().for_each(|line| out += &format!("{line}\n"));
        out
    }
}

fn one(bed: &dyn Bed, clients: &Clients, subject: &Subject, load: &Load, generation: u64, stop: &Stop) -> Result<Run> {
    drop_caches()?;
    bed.reset()?;
    let before = MachineTimes::now();
    let said = clients.launched(subject.launcher, subject.address, &load.lines(generation), 0.0, stop)?;
    let idle = before.and_then(|before| MachineTimes::now()?.idle_since(&before));
    let seen = bed.observe()?;
    bed.verify(load, generation)?;
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

/// Bytes of each application in each tenth of a second from what the clients printed.
pub fn tenths(said: &str, applications: usize) -> Result<Vec<Vec<u64>>> {
    let mut bytes = vec![Vec::new(); applications];
    // The lines of processes have fractions of seconds.
    for line in said.lines().filter(|line| !line.contains('.')) {
        let words: Vec<&str> = line.split(' ').collect();
        let [nth, tenth, moved] = words[..] else { bail!("the clients printed {line:?}") };
        let series: &mut Vec<u64> = bytes.get_mut(nth.parse::<usize>()?).context("an unknown application")?;
        ensure!(tenth.parse::<usize>()? == series.len(), "the clients left a tenth of a second out: {line:?}");
        series.push(moved.parse()?);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use load::Application;

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
        let applications = vec![Application::new("a", 2, false, 4096, 1 << 20)];
        let choice = |uncounted| Choice { pairs: 3, loads: vec![], systems: vec![], uncounted, json: None };
        let (counted, all) = (choice(false), choice(true));
        let mut comparison = Comparison {
            title: "a title",
            modelled: true,
            loads: ["a load", "one not reached"]
                .map(|name| Load { name: name.into(), applications: applications.clone() })
                .into(),
            subjects: ["none", "mlf"].map(|name| Subject { name, address: "", launcher: &[] }).into(),
            choice: &counted,
            baselines: &["none"],
            missing: vec!["x is not there".into()],
        };
        let text = comparison.table(&runs);
        assert!(
            text.contains("MODELLED")
                && text.contains("2.00 [2.00, 2.00] n=2")
                && text.contains("runs that do not count: 1 of 5\n"),
            "{text}"
        );
        assert!(text.contains("x is not there") && !text.contains("TRIAL"), "{text}");
        assert!(!text.contains("one not reached"), "{text}");
        comparison.choice = &all;
        assert!(comparison.table(&runs).contains("TRIAL"));
    }

    #[test]
    fn bytes_over_time_are_read() {
        let said = "0 0.0 2.0\n1 0.5 1.0\n0 0 100\n0 1 0\n1 0 7\n1 1 8\n";
        assert_eq!(tenths(said, 2).unwrap(), [vec![100, 0], vec![7, 8]]);
        assert!(tenths("0 1 5\n", 1).is_err() && tenths("0 0\n", 1).is_err());
    }
}
