//! `impresario assist record`: records one run of a program.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use impresario_assist::coverage::Coverage;
use impresario_assist::manager::{Manager, Options};
use impresario_assist::record::TraceSink;
use impresario_base::machine::raise_file_limit;
use impresario_base::replace::replaceable;
use impresario_base::units::show_bytes;
use impresario_trace::{Trace, TraceOp};

use super::launch::{OwnSocket, Programs, Purpose, Reach, own_socket, reach};
use super::nodes::{self, Job, beside};
use crate::usage;

/// Record one run of a program: write its reads and writes to a trace
///
/// The program runs as usual. The trace holds every access to regular files with its time and duration, but not the
/// contents. The exit status is that of the program. Processes that it starts on this node are in the same trace, those that
/// mpirun starts on other nodes in one for each node beside it (trace.NODE.imt). Where it runs as one of several ranks (mpirun, srun), each rank writes its own, with its number before the suffix. The last
/// lines tell how much of what the program read was seen.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist record -- python3 analysis.py data.root
  impresario assist record -o second.imt -- ./solver --input mesh.h5
  mpirun -n 4 impresario assist record -- ./solver      # trace.0.imt to trace.3.imt; plan them together")]
pub struct Args {
    /// The trace
    #[arg(short, long, default_value = "trace.imt", value_name = "FILE")]
    output: PathBuf,
    /// Replace an existing trace
    #[arg(short, long)]
    force: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    if let Reach::No(why) = reach(&args.program[0].to_string_lossy())? {
        return Err(usage(why));
    }
    let (output, ranks) = match rank(|name| std::env::var(name).ok()) {
        Some(rank) => (beside(&args.output, &rank.to_string()), Some(beside(&args.output, "*"))),
        None => (args.output, None),
    };
    make_room(&output, args.force)?;
    let folder = own_socket()?;
    let job = Job::recorded(&folder.socket(), &output, args.force)?;
    let environment = nodes::hook(folder.path(), &job, |name| std::env::var_os(name))?;
    let (code, trace, coverage) = record(&folder, &output, &args.program, &environment)?;
    tell!("{}", seen(&trace).trim_end());
    match coverage {
        Some(coverage) => tell!("{coverage}"),
        None => tell!("How much of what the program read was seen is not known: this kernel does not count it."),
    }
    let next = ranks.as_ref().unwrap_or(&output).display();
    tell!("The trace is {}; next: impresario assist plan {next} -o hints.json", output.display());
    Ok(code)
}

/// No trace is lost by mistake.
pub fn make_room(output: &Path, force: bool) -> Result<()> {
    if output.exists() {
        if !force {
            let shown = output.display();
            return Err(usage(format!(
                "{shown} already exists; name another trace with -o, or replace it with --force"
            )));
        }
        replaceable(output).map_err(|error| usage(format!("{}: {error}", output.display())))?;
        std::fs::remove_file(output).with_context(|| format!("replacing {}", output.display()))?;
    }
    Ok(())
}

/// Runs a program to its end and records it.
pub fn record(
    folder: &OwnSocket,
    output: &Path,
    program: &[OsString],
    environment: &[(OsString, OsString)],
) -> Result<(ExitCode, Trace, Option<Coverage>)> {
    let command: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
    let sink = TraceSink::create(output, &command.join(" "))?;
    let manager =
        Manager::start(Options::record(Box::new(sink)), &folder.socket()).context("starting the advice manager")?;
    let programs = Programs::start(program, Purpose::Record, 1, manager.socket(), environment)?;
    raise_file_limit(0);
    let (code, account) = programs.wait()?;
    let mut report = manager.stop().context("ending the advice manager")?;
    let coverage = account.map(|account| report.cover(account, true));
    File::open(output).and_then(|trace| trace.sync_all()).with_context(|| format!("writing {}", output.display()))?;
    Ok((code, Trace::load(output)?, coverage))
}

/// Which rank of a parallel job this process was started as, when there are several: each rank records a trace of its
/// own. By what Open MPI, MPICH and its kind, and Slurm's `srun` tell the processes that they start.
fn rank(variable: impl Fn(&str) -> Option<String>) -> Option<u32> {
    const KNOWN: [(&str, &str); 3] = [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        // Not SLURM_NTASKS, which a batch script has too.
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ];
    let number = |name| variable(name)?.parse::<u32>().ok();
    KNOWN.into_iter().find_map(|(rank, size)| number(rank).filter(|_| number(size).is_some_and(|size| size > 1)))
}

/// A short summary of a run: the files with the longest waiting time.
fn seen(trace: &Trace) -> String {
    #[derive(Default, Clone)]
    struct Of {
        reads: u64,
        read_bytes: u64,
        writes: u64,
        wait_ns: u64,
    }
    let mut files = vec![Of::default(); trace.files.len()];
    for r in &trace.records {
        let Some(of) = files.get_mut(r.file.0 as usize) else { continue };
        of.wait_ns += r.duration.map_or(0, |d| d.0);
        match r.op {
            TraceOp::Read => {
                of.reads += 1;
                of.read_bytes += r.moved_bytes();
            }
            TraceOp::Write => of.writes += 1,
            _ => {}
        }
    }
    let mut order: Vec<usize> = (0..files.len()).filter(|f| files[*f].reads + files[*f].writes > 0).collect();
    order.sort_by_key(|f| std::cmp::Reverse(files[*f].wait_ns));
    let mut text = format!("Recorded: {} accesses of {} files.\n", trace.records.len(), order.len());
    for f in order.iter().take(5) {
        let of = &files[*f];
        text += &format!(
            "  {:.2} s in {} reads ({}) and {} writes: {}\n",
            of.wait_ns as f64 / 1e9,
            of.reads,
            show_bytes(of.read_bytes as f64),
            of.writes,
            String::from_utf8_lossy(&trace.files[*f].path)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_trace_of_its_own() {
        let of = |set: &[(&str, &str)]| {
            rank(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
        };
        assert_eq!(of(&[("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")]), Some(3));
        assert_eq!(of(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]), Some(0));
        assert_eq!(of(&[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")]), Some(1));
        // One rank alone, a batch script, and nonsense.
        assert_eq!(of(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]), None);
        assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), None);
        assert_eq!((of(&[("PMI_RANK", "x"), ("PMI_SIZE", "2")]), of(&[])), (None, None));
    }
}
