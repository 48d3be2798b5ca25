//! Other nodes of a parallel job: what `mpirun` and its kind start there runs under an advice manager of that node.
//!
//! Launchers start a daemon of their own on each node, by `ssh` or what the environment names in its place. [`Hook`] names a
//! script, which calls [`through_ssh`]; that has [`on_node`] started there around the daemon, and so around the ranks.
//! Launchers pass the environment of the first node on to ranks (Hydra) or do not (Open MPI); so each manager listens at the
//! path at which the first node's does. Under Slurm its own prologue of tasks does the same: see `packaging/slurm`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use impresario_assist::config::Hints;
use impresario_base::machine::host_name;

use super::launch::{Environment, OwnSocket, Programs, Purpose, own_socket_at};
use super::record::{self, record};
use super::run::{self, Guided};
use crate::front::command_file;
use crate::usage;

/// What the managers of other nodes are told.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Job {
    /// Where programs look for their manager
    #[arg(long)]
    socket: PathBuf,
    /// Follows these hints
    #[arg(long)]
    hints: Option<PathBuf>,
    /// The name of the program that was started, for the report and where that of a process is not known
    #[arg(long)]
    learnt: Option<String>,
    /// Where the first node's report goes; others stand beside it
    #[arg(long)]
    report: Option<PathBuf>,
    /// Records instead, beside this trace
    #[arg(long)]
    record: Option<PathBuf>,
    /// Writes over a trace that is there
    #[arg(long)]
    force: bool,
    /// Says nothing at the end
    #[arg(long)]
    quiet: bool,
}

impl Job {
    /// One that is guided.
    pub fn guided(socket: &Path, args: &run::Args, learnt: Option<String>) -> Result<Job> {
        let absolute = |path: &Option<PathBuf>| path.as_deref().map(std::path::absolute).transpose();
        let (hints, report) = (absolute(&args.hints)?, absolute(&args.report)?);
        Ok(Job { socket: socket.into(), hints, learnt, report, quiet: args.quiet > 0, ..Job::default() })
    }

    /// One that is recorded.
    pub fn recorded(socket: &Path, trace: &Path, force: bool) -> Result<Job> {
        Ok(Job { socket: socket.into(), record: Some(std::path::absolute(trace)?), force, ..Job::default() })
    }

    /// As [`Args`] read it.
    fn words(&self) -> Vec<OsString> {
        let Job { socket, hints, learnt, report, record, force, quiet } = self;
        let valued = |name: &str, value: Option<&OsStr>| value.map(|v| vec![OsString::from(name), v.into()]);
        let flag = |name: &str, is_set: bool| is_set.then(|| vec![OsString::from(name)]);
        let path = |path: &Option<PathBuf>| path.as_ref().map(|p| p.as_os_str().to_owned());
        [
            valued("--socket", Some(socket.as_os_str())),
            valued("--hints", path(hints).as_deref()),
            valued("--learnt", learnt.as_ref().map(OsStr::new)),
            valued("--report", path(report).as_deref()),
            valued("--record", path(record).as_deref()),
            flag("--force", *force),
            flag("--quiet", *quiet),
        ]
        .into_iter()
        .flatten()
        .flatten()
        .collect()
    }
}

/// Batch systems whose own ways to reach nodes launchers prefer: a stand-in for `ssh` would take their place.
const BATCH_SYSTEMS: [&str; 6] =
    ["SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "PE_HOSTFILE", "LOADL_HOSTFILE", "COBALT_NODEFILE"];
/// What names a launcher's `ssh`: Open MPI 4 and 5, MPICH's Hydra, Intel MPI.
const SHELLS: [&str; 4] =
    ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC"];
/// Sessions must last as long as the daemons, and all begin at the first node, where the script is.
const SESSIONS: [&str; 4] = [
    "OMPI_MCA_plm_rsh_no_tree_spawn",
    "OMPI_MCA_orte_leave_session_attached",
    "PRTE_MCA_plm_ssh_no_tree_spawn",
    "PRTE_MCA_prte_leave_session_attached",
];
/// Where `make install` puts Slurm's scripts, below the prefix.
const SLURM: &str = "share/impresario/slurm";

/// The environment in which launchers reach other nodes through us. What the user has set stays as it is.
pub fn hook(folder: &Path, job: &Job, known: impl Fn(&str) -> Option<OsString>) -> Result<Environment> {
    let is_set = |name: &str| known(name).is_some_and(|value| !value.is_empty());
    let own = command_file().context("finding this program's file")?;
    let mut environment = Environment::new();
    // Outside of a job, too: there `srun` makes one.
    if job.record.is_none()
        && !is_set("SLURM_TASK_PROLOG")
        && let Some(prefix) = own.parent().and_then(Path::parent)
    {
        slurm(prefix, job, &is_set, &mut environment);
    }
    if BATCH_SYSTEMS.into_iter().any(is_set) || SHELLS.into_iter().any(is_set) {
        return Ok(environment);
    }
    let script = folder.join(SCRIPT);
    let words: Vec<OsString> = [own.into_os_string(), "assist".into(), "through-ssh".into()]
        .into_iter()
        .chain(job.words())
        .chain(["--".into()])
        .collect();
    let text = [b"#!/bin/sh\nexec ".to_vec(), quoted(&words), b" \"$@\"\n".to_vec()].concat();
    std::fs::write(&script, text).with_context(|| format!("writing {}", script.display()))?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700))?;
    environment.extend(SHELLS.map(|name| (name.into(), script.clone().into_os_string())));
    environment.extend(SESSIONS.map(|name| (name.into(), "1".into())));
    Ok(environment)
}

/// Slurm runs a prologue for each task, wherever that is.
fn slurm(prefix: &Path, job: &Job, is_set: &dyn Fn(&str) -> bool, environment: &mut Environment) {
    let scripts = prefix.join(SLURM);
    if !scripts.join("task-prolog.sh").is_file() {
        if is_set("SLURM_JOB_ID") {
            tell!(
                "impresario: tasks on other nodes run without hints: {} is not there; `make install` puts it there",
                scripts.join("task-prolog.sh").display()
            );
        }
        return;
    }
    let hints = job.hints.clone().unwrap_or_else(|| scripts.join("hints.json"));
    let mut set = |name: &str, value: PathBuf| environment.push((name.into(), value.into_os_string()));
    set("SLURM_TASK_PROLOG", scripts.join("task-prolog.sh"));
    set("IMPRESARIO_PREFIX", prefix.into());
    set("IMPRESARIO_ASSIST_HINTS", hints);
    if let Some(folder) = job.report.as_deref().and_then(Path::parent).filter(|_| !is_set("SLURM_TASK_EPILOG")) {
        set("SLURM_TASK_EPILOG", scripts.join("task-epilog.sh"));
        set("IMPRESARIO_ASSIST_REPORTS", folder.into());
    }
}

/// Words as a shell takes them.
fn quoted(words: &[OsString]) -> Vec<u8> {
    let one = |word: &OsString| {
        let inside = word.as_bytes().split(|b| *b == b'\'').collect::<Vec<_>>().join(&b"'\\''"[..]);
        [b"'", inside.as_slice(), b"'"].concat()
    };
    words.iter().map(one).collect::<Vec<_>>().join(&b' ')
}

/// A launcher's daemon for another node, started there by `ssh` with a manager around it
#[derive(clap::Args)]
pub struct ThroughSsh {
    #[command(flatten)]
    job: Job,
    /// As `ssh` takes them
    #[arg(last = true, required = true)]
    words: Vec<OsString>,
}

/// Options of `ssh` that take a word.
const WITH_A_WORD: &[u8] = b"BbcDEeFIiJLlmOopQRSWw";
/// Runs its first word in the user's shell, under the rest if that is installed there.
const START: &str = r#"command=$1; shift; shell=${SHELL:-/bin/sh}
[ -x "$1" ] && exec "$@" "$shell" -c "$command"
exec "$shell" -c "$command""#;

pub fn through_ssh(args: ThroughSsh) -> Result<ExitCode> {
    let (before, command) = parted(&args.words);
    let mut ssh = Command::new("ssh");
    ssh.args(before);
    if !command.is_empty() {
        let own = command_file().context("finding this program's file")?;
        let command = without_script(command, &args.job.socket);
        let mut words: Vec<OsString> = ["sh", "-c", START, "guided"].map(OsString::from).to_vec();
        words.extend([command, own.into(), "assist".into(), "on-node".into()]);
        words.extend(args.job.words());
        words.push("--".into());
        ssh.arg(OsStr::from_bytes(&quoted(&words)));
    }
    Err(ssh.exec()).context("starting ssh")
}

/// The name of the script in the folder of the socket: launchers know it by that, and so how to call it.
const SCRIPT: &str = "ssh";

/// A command as one text, which is how `ssh` passes it. Open MPI has its daemons look for the script of the first node, though they
/// start nothing by it: they find a shell in its place.
fn without_script(command: &[OsString], socket: &Path) -> OsString {
    let mut left: &[u8] = &command.iter().map(|word| word.as_bytes()).collect::<Vec<_>>().join(&b' ');
    let script = socket.with_file_name(SCRIPT).into_os_string();
    let mut text = Vec::new();
    while let Some(at) = left.windows(script.len()).position(|window| window == script.as_bytes()) {
        text.extend([&left[..at], b"sh"].concat());
        left = &left[at + script.len()..];
    }
    OsString::from_vec([&text, left].concat())
}

/// `ssh`'s options with the host, and the command.
fn parted(words: &[OsString]) -> (&[OsString], &[OsString]) {
    let mut at = 0;
    while let Some([b'-', options @ ..]) = words.get(at).map(|word| word.as_bytes()) {
        // In `-xp 22` and `-p22` the first option that takes a word ends the list.
        let taker = options.iter().position(|option| WITH_A_WORD.contains(option));
        at += if taker.is_some_and(|place| place + 1 == options.len()) { 2 } else { 1 };
    }
    words.split_at((at + 1).min(words.len()))
}

/// What another node starts for a launcher, under a manager of that node
#[derive(clap::Args)]
pub struct OnNode {
    #[command(flatten)]
    job: Job,
    /// The launcher's daemon and its arguments
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

pub fn on_node(args: OnNode) -> Result<ExitCode> {
    let OnNode { job, program } = args;
    let folder = job.socket.parent().ok_or_else(|| usage("the socket's path has no folder"))?;
    let node = host_name();
    let own = match own_socket_at(folder) {
        Ok(own) => own,
        // Another command of the job was started here before, or there is no such place. The library does without a manager.
        Err(error) => {
            tracing::debug!(%error, "this node's manager is another one");
            let purpose = if job.record.is_some() { Purpose::Record } else { Purpose::Advise };
            return Ok(Programs::start(&program, purpose, 1, &job.socket, &[])?.wait()?.0);
        }
    };
    match &job.record {
        Some(trace) => recorded(&own, &beside(trace, &node), &job, &program),
        None => guided(own, &node, &job, &program),
    }
}

fn recorded(own: &OwnSocket, trace: &Path, job: &Job, program: &[OsString]) -> Result<ExitCode> {
    record::make_room(trace, job.force)?;
    Ok(record(own, trace, program, &[])?.0)
}

fn guided(own: OwnSocket, node: &str, job: &Job, program: &[OsString]) -> Result<ExitCode> {
    let planned = job.hints.as_deref().map(super::hints).transpose().unwrap_or_else(|error| {
        tell!("impresario: {node}: no plan: {error:#}");
        None
    });
    let (hints, paths) =
        planned.map_or_else(|| (Hints::online(), None), |(hints, paths)| (hints.and_online(), Some(paths)));
    let report = job.report.as_deref().map(|report| beside(report, node));
    let guided = Guided {
        name: job.learnt.clone(),
        hints,
        paths,
        instances: 1,
        told: if job.quiet { None } else { Some(format!("impresario: {node}")) },
        verbose: false,
        report: report.as_deref(),
        learns: false,
        is_silent: job.quiet,
    };
    guided.run(own, program, &[])
}

/// `trace.imt` of a node or rank: `trace.PART.imt`.
pub fn beside(path: &Path, part: &str) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_os_string();
    name.push(format!(".{part}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn words(text: &[&str]) -> Vec<OsString> {
        text.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_host_ends_the_options_of_ssh() {
        for (given, before) in [
            (&["node7", "orted", "-x"][..], 1),
            (&["-x", "node7", "orted"], 2),
            (&["-xp", "22", "-oA=b", "-l", "me", "node7", "a b"], 6),
            (&["-p22", "node7"], 2),
            (&["-p"], 1),
            (&[], 0),
        ] {
            let given = words(given);
            assert_eq!(parted(&given), given.split_at(before), "{given:?}");
        }
    }

    #[test]
    fn the_script_s_path_is_none_of_another_node_s() {
        let text = without_script(
            &words(&["orted -mca a \"/tmp/i/ssh\"", "/tmp/i/ssh", "/tmp/i/sock"]),
            Path::new("/tmp/i/socket"),
        );
        assert_eq!(text, "orted -mca a \"sh\" sh /tmp/i/sock");
        assert_eq!(without_script(&[], Path::new("/tmp/i/socket")), "");
    }

    #[test]
    fn words_survive_a_shell_and_our_own_reading() {
        let odd = words(&["it's", "a  b", "$HOME;`x`", "\"", "'", "", "\n"]);
        let script = [b"printf '%s|' ".to_vec(), quoted(&odd)].concat();
        let said = Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)).output().unwrap().stdout;
        assert_eq!(said, odd.iter().flat_map(|w| [w.as_bytes(), b"|"].concat()).collect::<Vec<u8>>());

        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            of: OnNode,
        }
        let job = Job {
            socket: "/tmp/i/socket".into(),
            learnt: Some("it's mine.py".into()),
            record: Some("/data/t.imt".into()),
            force: true,
            ..Job::default()
        };
        let line = [words(&["on-node"]), job.words(), words(&["--", "orted", "-x"])].concat();
        let read = Line::parse_from(line).of;
        assert_eq!((read.job.words(), read.program), (job.words(), words(&["orted", "-x"])));
    }

    #[test]
    fn what_the_user_or_a_batch_system_says_stays() {
        let folder = tempfile::tempdir().unwrap();
        let job = Job { socket: folder.path().join("socket"), ..Job::default() };
        let set = |known: &[&str]| {
            let known = |name: &str| known.contains(&name).then(|| OsString::from("theirs"));
            let names = hook(folder.path(), &job, known).unwrap().into_iter().map(|(name, _)| name);
            names.collect::<Vec<_>>()
        };
        assert_eq!(set(&[]).len(), SHELLS.len() + SESSIONS.len());
        assert_eq!(set(&["HYDRA_LAUNCHER_EXEC"]), Vec::<OsString>::new());
        assert_eq!(set(&["PBS_JOBID"]), Vec::<OsString>::new());
        assert_eq!(set(&["SLURM_JOB_ID"]), Vec::<OsString>::new(), "the scripts are not installed beside a test");
    }

    #[test]
    fn files_of_a_node_stand_beside_the_first_node_s() {
        assert_eq!(beside(Path::new("out/trace.imt"), "7"), Path::new("out/trace.7.imt"));
        assert_eq!(beside(Path::new("trace"), "n2"), Path::new("trace.n2"));
    }
}
