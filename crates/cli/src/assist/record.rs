//! `impresario assist record`: records one run of a program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use impresario_assist::manager::{Manager, Options, raise_file_limit};
use impresario_assist::record::TraceSink;
use impresario_base::units::show_bytes;
use impresario_trace::{Trace, TraceOp};

use super::launch::{Programs, Purpose, Reach, own_socket, reach};
use crate::usage;

/// Record one run of a program: write its reads and writes to a trace
///
/// The program runs as usual. The trace holds every access to regular files with its time and duration, but not the
/// contents. The exit status is that of the program.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist record -- python3 analysis.py data.root
  impresario assist record -o second.imt -- ./solver --input mesh.h5")]
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
    if args.output.exists() {
        if !args.force {
            let shown = args.output.display();
            return Err(usage(format!(
                "{shown} already exists; name another trace with -o, or replace it with --force"
            )));
        }
        std::fs::remove_file(&args.output).with_context(|| format!("replacing {}", args.output.display()))?;
    }
    let command: Vec<_> = args.program.iter().map(|word| word.to_string_lossy()).collect();
    let sink = TraceSink::create(&args.output, &command.join(" "))?;
    let folder = own_socket()?;
    let before = raise_file_limit();
    let manager = Manager::start(Options::record(Box::new(sink)), &folder.path().join("socket"))
        .context("starting the advice manager")?;
    let programs = Programs::start(&args.program, Purpose::Record, 1, manager.socket(), before)?;
    let code = programs.wait()?;
    let report = manager.stop().context("ending the advice manager")?;
    let trace = Trace::load(&args.output)?;
    eprint!("{}", seen(&trace));
    if report.dropped_accesses > 0 {
        eprintln!("{} accesses came too fast to be recorded.", report.dropped_accesses);
    }
    eprintln!("The trace is {}; next: impresario assist plan {0} -o hints.json", args.output.display());
    Ok(code)
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
