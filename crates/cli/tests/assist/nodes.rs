//! Ranks on other nodes: real launchers, and a stand-in for `ssh` that starts what it is told in a mount and a host name
//! space of its own, with nothing of this environment and an empty folder for temporary files.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use impresario_assist::report::Report;
use impresario_testing::{eventually, require};
use impresario_trace::{Trace, TraceOp};

use crate::support::{IMPRESARIO, MAIN, Ran, put, run_command, run_within};
use crate::tools::{COUNT, Folder, WAIT_MS, assist, library, of, plain, reading};

const OPEN_MPI: (&str, &[&str]) = (
    "mpirun.openmpi",
    &["--allow-run-as-root", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo", "--host", "nodeb:2", "-n", "2"],
);
const MPICH: (&str, &[&str]) = ("mpiexec.hydra", &["-localhost", "127.0.0.1", "-hosts", "nodeb", "-n", "2"]);

/// What the stand-in runs: `$1` the host, `$2` the command. `$WITHOUT` names a program that is not installed there.
const NODE: &str = r#"
hostname "$1"
mount -t tmpfs none "$TEMPORARY"
[ -z "$WITHOUT" ] || mount --bind /dev/null "$WITHOUT"
exec sh -c "$2"
"#;

struct Nodes {
    folder: Folder,
    words: Vec<String>,
    data: PathBuf,
}

impl Nodes {
    /// `None` where other nodes cannot be imitated, or the launcher is missing.
    fn new(launcher: &str) -> Option<Nodes> {
        if !(require("root") && require(launcher)) {
            return None;
        }
        let folder = Folder::new();
        for name in ["temporary", "bin"] {
            std::fs::create_dir(folder.at(name)).unwrap();
        }
        let data = folder.data("data");
        let words = reading(&folder.strided(), &data, 0);
        Some(Nodes { folder, words, data })
    }

    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.write(name, text);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Puts the stand-in first in the path of a command; `without` is not there on the other node.
    fn imitate(&self, command: &mut Command, without: &str) {
        self.script("node", NODE);
        let temporary = self.folder.at("temporary");
        let keep = [
            ("TEMPORARY", temporary.to_str().unwrap()),
            ("WITHOUT", without),
            ("IMPRESARIO_ASSIST_LIBRARY", library().to_str().unwrap()),
            ("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS),
        ]
        .map(|(name, value)| format!("{name}='{value}'"));
        let text = format!(
            "#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift; done\nhost=$1; shift\n\
             exec env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/ SHELL=/bin/sh {} \
             unshare --mount --uts sh \"{}\" \"$host\" \"$*\"\n",
            keep.join(" "),
            self.folder.at("node").display()
        );
        self.script("bin/ssh", &text);
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.folder.at("bin").display()));
        command.env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS).env("TMPDIR", &temporary).current_dir(self.folder.path());
    }

    fn report(&self, name: &str) -> Report {
        eventually("the report is written", || serde_json::from_slice(&std::fs::read(self.folder.at(name)).ok()?).ok())
    }
}

/// Launchers start slowly where processors are busy.
fn ran(command: &mut Command) -> Ran {
    run_within(Duration::from_secs(120), command)
}

/// Two ranks on another node, under one manager that is there; the first node's manager hears nothing of their reads.
fn ranks_are_served_there((launcher, options): (&str, &[&str])) {
    let Some(nodes) = Nodes::new(launcher) else { return };
    let alone = plain(&nodes.words);
    let mut command = assist(["run", "--report"]);
    command.arg(nodes.folder.at("r.json")).arg("--").arg(launcher).args(options).args(&nodes.words);
    nodes.imitate(&mut command, "");
    let run = ran(&mut command);
    assert_eq!((run.code, run.out.as_str()), (0, alone.repeat(2).as_str()), "{}", run.err);
    let there = nodes.report("r.nodeb.json");
    let file = of(&there, &nodes.data);
    assert_eq!((file.programs, file.reads), (2, 2 * COUNT), "{there:?}");
    let here = nodes.report("r.json");
    assert!(here.files.iter().all(|file| Path::new(&file.path) != nodes.data || file.reads == 0), "{here:?}");
    assert!(run.err.contains("impresario: nodeb: Saw "), "{}", run.err);
    assert_eq!(std::fs::read_dir(nodes.folder.at("temporary")).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn ranks_that_open_mpi_starts_elsewhere_have_a_manager_there() {
    ranks_are_served_there(OPEN_MPI);
}

#[test]
fn ranks_that_mpich_starts_elsewhere_have_a_manager_there() {
    ranks_are_served_there(MPICH);
}

/// A node on which nothing is installed costs hints and not the job.
#[test]
fn a_node_without_us_runs_its_ranks() {
    for (launcher, options) in [OPEN_MPI, MPICH] {
        let Some(nodes) = Nodes::new(launcher) else { return };
        let alone = plain(&nodes.words);
        let mut command = assist(["run", "-q", "--report"]);
        command.arg(nodes.folder.at("r.json")).arg("--").arg(launcher).args(options).args(&nodes.words);
        nodes.imitate(&mut command, IMPRESARIO);
        let run = ran(&mut command);
        assert_eq!((run.code, run.out.as_str()), (0, alone.repeat(2).as_str()), "{}", run.err);
        assert!(!nodes.folder.at("r.nodeb.json").exists());
    }
}

#[test]
fn ranks_elsewhere_are_recorded_beside_the_first_node_s_trace() {
    let (launcher, options) = OPEN_MPI;
    let Some(nodes) = Nodes::new(launcher) else { return };
    let mut command = assist(["record", "-o", "t.imt", "--", launcher]);
    command.args(options).args(&nodes.words);
    nodes.imitate(&mut command, "");
    let run = ran(&mut command);
    assert_eq!(run.code, 0, "{}", run.err);
    let path = nodes.data.as_os_str().as_encoded_bytes();
    let trace = eventually("the trace is whole", || {
        let trace = Trace::load(nodes.folder.at("t.nodeb.imt")).ok()?;
        let is_read =
            |r: &&impresario_trace::Record| r.op == TraceOp::Read && trace.files[r.file.0 as usize].path == path;
        (trace.records.iter().filter(is_read).count() as u64 == 2 * COUNT).then_some(trace)
    });
    assert!(!trace.files.is_empty());
    let plan = run_command(
        assist(["plan", "t.imt", "t.nodeb.imt", "-o", "h.json", "--device", "disk", "--cold"])
            .current_dir(nodes.folder.path()),
    );
    assert_eq!(plan.code, 0, "{}", plan.err);
    assert!(plan.out.contains("by 2 processes"), "{}", plan.out);
}

/// Slurm's `srun` as far as it matters: the prologue of the task, on a node with another host name, and its epilogue.
const SRUN: &str = r#"#!/bin/sh
export SLURM_JOB_ID=4712 SLURM_STEP_ID=0 SLURM_PROCID=0
exec unshare --uts sh -c '
hostname nodeb
"$SLURM_TASK_PROLOG" >"$IMPRESARIO_JOBS/told" || exit 98
while IFS= read -r line; do
	case $line in "export "*) export "${line#export }" ;; esac
done <"$IMPRESARIO_JOBS/told"
"$@"; code=$?
"$SLURM_TASK_EPILOG"; exit $code' srun "$@"
"#;

/// The manager of a step by the file with its number; Slurm ends it with the step.
struct OfStep(PathBuf);

impl Drop for OfStep {
    fn drop(&mut self) {
        let pid = std::fs::read_to_string(&self.0).ok().and_then(|pid| pid.trim().parse().ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
    }
}

#[test]
fn tasks_of_srun_have_a_manager_for_their_step() {
    if !require("root") {
        return;
    }
    let folder = Folder::new();
    let data = folder.data("data");
    let words = reading(&folder.strided(), &data, 500);
    let alone = plain(&words);
    // What `make install` lays out. The program finds the scripts from where it is itself.
    let prefix = folder.at("prefix");
    std::fs::create_dir_all(prefix.join("bin")).unwrap();
    std::fs::create_dir_all(prefix.join("share/impresario")).unwrap();
    std::fs::create_dir_all(prefix.join("lib/impresario")).unwrap();
    let program = put(Path::new(IMPRESARIO), &prefix.join("bin"));
    put(Path::new(MAIN), &prefix.join("lib/impresario"));
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/slurm");
    std::os::unix::fs::symlink(scripts.canonicalize().unwrap(), prefix.join("share/impresario/slurm")).unwrap();
    let laid_out = run_command(assist(["library"]).arg(prefix.join("lib/impresario/preload")));
    assert_eq!(laid_out.code, 0, "{}", laid_out.err);
    let srun = folder.write("srun", SRUN);
    std::fs::set_permissions(&srun, std::fs::Permissions::from_mode(0o755)).unwrap();

    let uid = rustix::process::getuid().as_raw();
    let _daemon = OfStep(folder.at(&format!("impresario-{uid}-4712.0/pid")));
    let mut command = Command::new(&program);
    command.args(["assist", "run", "--report"]).arg(folder.at("r.json")).arg("--").arg(&srun).args(&words);
    command.env_remove("IMPRESARIO_ASSIST_SOCKET").env_remove("XDG_RUNTIME_DIR").env("XDG_DATA_HOME", "/nowhere");
    command.env("IMPRESARIO_JOBS", folder.path()).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
    command.env("IMPRESARIO_ASSIST_LIBRARY", library());
    let run = ran(&mut command);
    assert_eq!((run.code, run.out.as_str()), (0, alone.as_str()), "{}", run.err);
    let told = std::fs::read_to_string(folder.at("told")).unwrap();
    assert!(!told.contains("LD_PRELOAD"), "the library is there already: {told}");
    let report: Report = serde_json::from_slice(&std::fs::read(folder.at("guided-4712-nodeb.json")).unwrap()).unwrap();
    assert_eq!(of(&report, &data).programs, 1);
    assert!(of(&report, &data).reads > 0);
}
