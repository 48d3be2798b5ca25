//! `impresario allocate`: which I/O nodes the clients of a job or a machine use.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Subcommand;
use impresario_base::replace::replace_content;
use impresario_config::{AllocationRule, Config, Placed};
use impresario_node::allocation::{Choice, Job, allocate};
use impresario_toml::{FileErrors, text_of};
use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;

use crate::{load, print, usage};

/// How long another command may change the file.
const LOCK_MAX: Duration = Duration::from_secs(10);

/// Decide which I/O nodes the clients of a job or a machine use, while they run
///
/// Rules are kept in the section [allocation] of the configuration file; doc/CONFIGURATION.md explains them. Mounts and
/// `impresario run` look at their file every two seconds and change over without losing a request, unless they were started
/// with --via. Where each machine has a copy of the file, change the copy of the clients' machines.
#[derive(Subcommand)]
pub enum Command {
    /// Give I/O nodes to jobs or machines, in the place of those that they had
    #[command(after_long_help = "Examples:
  impresario allocate set cluster/impresario.toml --job 4711 --node io.0 --node io.1
  impresario allocate set cluster/impresario.toml --job 4712 --direct
  impresario allocate set cluster/impresario.toml --host 'rack1-*' --node io.2")]
    Set {
        /// The configuration file of the cluster
        config: PathBuf,
        #[command(flatten)]
        of: Of,
        /// An I/O node's name; may be repeated
        #[arg(long = "node", value_name = "NAME", required_unless_present = "direct")]
        nodes: Vec<String>,
        /// None: the clients speak to the data servers themselves
        #[arg(long, conflicts_with = "nodes")]
        direct: bool,
    },
    /// Take a rule away: of a job that has ended, for example
    #[command(after_long_help = "Example:
  impresario allocate clear cluster/impresario.toml --job 4711")]
    Clear {
        /// The configuration file of the cluster
        config: PathBuf,
        #[command(flatten)]
        of: Of,
    },
    /// Show the rules, or the I/O nodes that a client would use
    #[command(after_long_help = "Examples:
  impresario allocate show cluster/impresario.toml
  impresario allocate show cluster/impresario.toml --job 4711 --host n17")]
    Show {
        /// The configuration file of the cluster
        config: PathBuf,
        /// The job of the client
        #[arg(long, value_name = "N")]
        job: Option<u64>,
        /// The machine of the client
        #[arg(long, value_name = "NAME")]
        host: Option<String>,
    },
    /// Give each of several jobs as many I/O nodes as make the sum of their bandwidths largest
    ///
    /// The bandwidths of each job with some numbers of I/O nodes come from a file, measured by you: by `impresario bench`
    /// with the job's pattern, or in the job's earlier runs. Nodes are not shared between these jobs; a job keeps those that it
    /// has as far as it keeps any.
    #[command(after_long_help = "The file has a section for each job, 0 meaning straight to the data servers:
  [[job]]
  job = 4711
  bandwidth = { 0 = 195.7, 1 = 77.6, 2 = 80.1 }

Examples:
  impresario allocate plan cluster/impresario.toml measured.toml
  impresario allocate plan cluster/impresario.toml measured.toml --margin 5 --apply")]
    Plan {
        /// The configuration file of the cluster
        config: PathBuf,
        /// The file of bandwidths, in any unit that all jobs share
        curves: PathBuf,
        /// Least gain of bandwidth for which the number of nodes of a running job changes, percent
        #[arg(long, value_name = "PERCENT", default_value_t = 0.0)]
        margin: f64,
        /// Write the rules into the configuration; otherwise they are only shown
        #[arg(long)]
        apply: bool,
    },
}

/// Whom a rule is about.
#[derive(clap::Args)]
pub struct Of {
    /// Number of a job, as mounts are told it by --job; may be repeated
    #[arg(long = "job", value_name = "N", value_parser = clap::value_parser!(u64).range(..=i64::MAX as u64), required_unless_present = "hosts")]
    jobs: Vec<u64>,
    /// Name of a machine, as `uname -n` prints it there, or a pattern as of a shell (`rack1-*`); may be repeated
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
}

pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Set { config, of, nodes, direct: _ } => {
            let rule = AllocationRule { jobs: of.jobs, hosts: of.hosts, nodes };
            change(&config, |text| rule.put_into(text))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Clear { config, of } => {
            let rule = AllocationRule { jobs: of.jobs, hosts: of.hosts, nodes: Vec::new() };
            let remedy = "there is no such rule; `impresario allocate show` lists them";
            change(&config, |text| rule.remove_from(text)?.ok_or_else(|| remedy.into()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Show { config, job: None, host: None } => print(rules(&load(&config)?)),
        Command::Show { config, job, host } => {
            let config = load(&config)?;
            let client = Placed { job: job.unwrap_or(0), host: host.as_deref().unwrap_or(""), number: 0 };
            print(format!("{}\n", names(&config, &config.own_io_nodes_of(&client))))
        }
        Command::Plan { config, curves, margin, apply } => plan(&config, &curves, margin, apply),
    }
}

fn names(config: &Config, nodes: &[usize]) -> String {
    let names: Vec<&str> = nodes.iter().filter_map(|index| config.io.get(*index)).map(|io| io.name.as_str()).collect();
    if names.is_empty() { "the data servers".into() } else { names.join(", ") }
}

/// The rules, a line each.
fn rules(config: &Config) -> String {
    let mut out = String::new();
    for AllocationRule { jobs, hosts, nodes } in &config.allocation.rules {
        let jobs: Vec<String> = jobs.iter().map(u64::to_string).collect();
        let of = match (jobs.as_slice(), hosts.as_slice()) {
            ([], []) => "all others".into(),
            (jobs, []) => format!("job {}", jobs.join(", ")),
            ([], hosts) => format!("machine {}", hosts.join(", ")),
            (jobs, hosts) => format!("job {} on machine {}", jobs.join(", "), hosts.join(", ")),
        };
        let nodes = if nodes.is_empty() { "the data servers".into() } else { nodes.join(", ") };
        // Writing to a String does not fail.
        let _ = writeln!(out, "{of}: {nodes}");
    }
    let is_for_all = config.allocation.rules.iter().any(|rule| rule.jobs.is_empty() && rule.hosts.is_empty());
    if !is_for_all {
        let all: Vec<usize> = (0..config.io.len()).collect();
        let _ = writeln!(out, "all others: {}", names(config, &all));
    }
    let _ = writeln!(out, "Clients are spread over their nodes by {}.", config.allocation.spread.name());
    out
}

/// Replaces the file by its changed text, if that is a valid configuration. Commands that change it at the same time wait.
fn change(path: &Path, edit: impl FnOnce(&str) -> Result<String, String>) -> anyhow::Result<()> {
    let path = std::fs::canonicalize(path).with_context(|| format!("{}: cannot be found", path.display()))?;
    let folder = path.parent().context("the file has no folder")?;
    let _lock = lock(folder)?;
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let changed = edit(&text).map_err(|why| usage(format!("{}: {why}", path.display())))?;
    Config::parse(&changed, &path)?;
    replace_content(&path, changed.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}

/// Locks a folder against other commands that change its files.
pub(crate) fn lock(folder: &Path) -> anyhow::Result<File> {
    let file = File::open(folder).with_context(|| format!("cannot open {}", folder.display()))?;
    let until = Instant::now() + LOCK_MAX;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                bail!("another command has locked {} for {} s; try again", folder.display(), LOCK_MAX.as_secs())
            }
            // A file system without locks: of two changes at a time the second may undo the first.
            Err(_) => return Ok(file),
        }
    }
}

/// Size limit of a file of bandwidths, bytes.
const CURVES_MAX_BYTES: u64 = 4 << 20;

/// A file of bandwidths.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Curves {
    job: Vec<Curve>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Curve {
    job: u64,
    /// By number of I/O nodes.
    bandwidth: BTreeMap<String, f64>,
}

fn plan(path: &Path, curves: &Path, margin: f64, apply: bool) -> anyhow::Result<ExitCode> {
    let config = load(path)?;
    if !(0.0..=1000.0).contains(&margin) {
        return Err(usage("--margin must be between 0 and 1000 percent"));
    }
    let text =
        text_of(curves, CURVES_MAX_BYTES, "a file of bandwidths", "`impresario allocate plan --help` shows one")?;
    let Curves { job: jobs } = impresario_toml::parse(&text, curves)?;
    let chosen = choose(&config, &jobs, margin / 100.0).map_err(|why| FileErrors::whole(curves, why))?;
    let mut out = String::new();
    let mut sum = 0.0;
    for (rule, bandwidth) in &chosen {
        let nodes = if rule.nodes.is_empty() { "the data servers".into() } else { rule.nodes.join(", ") };
        let job = rule.jobs.first().copied().unwrap_or(0);
        sum += bandwidth;
        let _ = writeln!(out, "job {job}: {nodes} ({bandwidth})");
    }
    let _ = writeln!(out, "sum of the bandwidths: {sum}");
    if apply {
        change(path, |text| chosen.iter().try_fold(text.to_owned(), |text, (rule, _)| rule.put_into(&text)))?;
    }
    print(&out)
}

/// A rule for each job, with the bandwidth that it is chosen for.
fn choose(config: &Config, jobs: &[Curve], margin: f64) -> Result<Vec<(AllocationRule, f64)>, String> {
    let now = |job: u64| {
        let rule = config.allocation.rules.iter().find(|rule| rule.jobs == [job] && rule.hosts.is_empty());
        rule.map(|rule| rule.nodes.as_slice())
    };
    let mut curves = Vec::with_capacity(jobs.len());
    for (nth, Curve { job, bandwidth }) in jobs.iter().enumerate() {
        if jobs.iter().take(nth).any(|other| other.job == *job) {
            return Err(format!("job {job} is there twice"));
        }
        let mut curve = Vec::with_capacity(bandwidth.len());
        for (nodes, bandwidth) in bandwidth {
            let nodes = nodes.parse().map_err(|_| format!("job {job}: {nodes:?} is not a number of I/O nodes"))?;
            // Without I/O nodes a folder of a file system is not reached.
            if nodes > 0 || config.tree.is_none() {
                curve.push(Choice { nodes, bandwidth: *bandwidth });
            }
        }
        curves.push(curve);
    }
    let weighed: Vec<Job<'_>> = curves
        .iter()
        .zip(jobs)
        .map(|(curve, Curve { job, .. })| Job { curve, has: now(*job).map(<[String]>::len) })
        .collect();
    let counts = allocate(&weighed, config.io.len(), margin).map_err(|error| {
        format!(
            "{error}; {} I/O nodes are in the configuration, and each job needs a number for which it has a bandwidth",
            config.io.len()
        )
    })?;
    // Each keeps what it has as far as it may; then the others are dealt.
    let mut free: Vec<&str> = config.io.iter().map(|io| io.name.as_str()).collect();
    let mut given: Vec<Vec<String>> = vec![Vec::new(); jobs.len()];
    for ((given, Curve { job, .. }), count) in given.iter_mut().zip(jobs).zip(&counts) {
        for name in now(*job).unwrap_or(&[]) {
            if given.len() < *count
                && let Some(at) = free.iter().position(|other| other == name)
            {
                free.remove(at);
                given.push(name.clone());
            }
        }
    }
    let mut free = free.into_iter();
    for (given, count) in given.iter_mut().zip(&counts) {
        given.extend(free.by_ref().take(count - given.len()).map(str::to_owned));
    }
    let rules = jobs.iter().zip(given).zip(&curves).map(|((Curve { job, .. }, nodes), curve)| {
        let bandwidth = curve.iter().filter(|choice| choice.nodes == nodes.len()).map(|choice| choice.bandwidth);
        let bandwidth = bandwidth.fold(0.0, f64::max);
        (AllocationRule { jobs: vec![*job], hosts: Vec::new(), nodes }, bandwidth)
    });
    Ok(rules.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(rules: &str) -> Config {
        let mut text = "[meta]\naddress = \"127.0.0.1:7000\"\ndir = \"m\"\n[[data]]\nname = \"data.0\"\n\
                        address = \"127.0.0.1:7100\"\ndir = \"d\"\n"
            .to_string();
        for i in 0..12 {
            text += &format!("[[io]]\nname = \"io.{i}\"\naddress = \"127.0.0.1:72{i:02}\"\n");
        }
        Config::parse(&(text + rules), Path::new("/c.toml")).unwrap_or_else(|e| panic!("{e}"))
    }

    fn curves(text: &str) -> Vec<Curve> {
        impresario_toml::parse_text::<Curves>(text).unwrap().job
    }

    /// The six applications of the published decision; see the tests of the solver.
    #[test]
    fn jobs_get_nodes_of_their_own_by_benefit_and_keep_what_they_have() {
        let jobs = curves(
            "[[job]]\njob = 1\nbandwidth = { 0 = 195.7, 1 = 77.6 }\n[[job]]\njob = 2\nbandwidth = { 1 = 597.2, 2 = 594.2 }\n\
             [[job]]\njob = 3\nbandwidth = { 1 = 268.4, 8 = 5089.9 }\n[[job]]\njob = 4\nbandwidth = { 2 = 411.9 }\n\
             [[job]]\njob = 5\nbandwidth = { 0 = 255.9, 1 = 77.8 }\n[[job]]\njob = 6\nbandwidth = { 0 = 241.3, 2 = 48.1 }\n",
        );
        let before = config("[[allocation.rule]]\njobs = [4]\nnodes = [\"io.0\", \"io.5\", \"io.7\"]\n");
        let chosen = choose(&before, &jobs, 0.0).unwrap();
        let counts: Vec<usize> = chosen.iter().map(|(rule, _)| rule.nodes.len()).collect();
        assert_eq!(counts, [0, 1, 8, 2, 0, 0]);
        assert_eq!(chosen[3].0.nodes, ["io.0", "io.5"]);
        let mut all: Vec<&String> = chosen.iter().flat_map(|(rule, _)| &rule.nodes).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 11, "none is given twice");
        assert!((chosen.iter().map(|(_, bandwidth)| bandwidth).sum::<f64>() - 6791.9).abs() < 0.1);
    }

    #[test]
    fn a_bad_file_of_bandwidths_is_explained() {
        let of = |text: &str| choose(&config(""), &curves(text), 0.0).unwrap_err();
        assert!(of("[[job]]\njob = 1\nbandwidth = { two = 1.0 }").contains("\"two\" is not a number"));
        assert!(of("[[job]]\njob = 1\nbandwidth = { 13 = 1.0 }").contains("12 I/O nodes"));
        assert!(of("[[job]]\njob = 1\nbandwidth = { 1 = -1.0 }").contains("negative"));
        let twice = "[[job]]\njob = 1\nbandwidth = { 1 = 1.0 }\n[[job]]\njob = 1\nbandwidth = { 1 = 1.0 }";
        assert!(of(twice).contains("twice"));
    }

    #[test]
    fn rules_are_listed() {
        let text = rules(&config(
            "[allocation]\nspread = \"host\"\n[[allocation.rule]]\njobs = [4]\nhosts = [\"n*\"]\nnodes = []\n",
        ));
        assert!(text.starts_with("job 4 on machine n*: the data servers\nall others: io.0, io.1"), "{text}");
        assert!(text.ends_with("by host.\n"), "{text}");
    }
}
