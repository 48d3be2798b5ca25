//! `impresario assist run`: a program with hints.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result};
use impresario_assist::config::{Hints, Paths};
use impresario_assist::learn::{Lesson, program_of};
use impresario_assist::manager::{Access, Handle, Manager, Options, Record};
use impresario_assist::record::TraceSink;
use impresario_base::machine::raise_file_limit;

use super::known;
use super::launch::{OwnSocket, Programs, Purpose, Reach, own_socket, reach};
use super::nodes::{self, Job};
use crate::usage;

/// Run a program with hints
///
/// An advice manager serves this program alone, as long as it runs. With a hints file it follows the plan, and prefetches the
/// beginnings of files named on the command line while the program loads. For files without hints it follows what
/// was learnt of files of their kind (see `impresario assist learn`), or else finds a pattern while the program reads them. With --node the manager of the node serves it (see
/// `impresario assist daemon`). The exit status is that of the program. A program into which the library cannot be
/// preloaded runs without hints, and a message says so. Processes that mpirun or srun starts on other nodes have a manager on each
/// node, whose report stands beside the first (report.NODE.json). The last line on standard error tells how much of what the program
/// read was seen, without --node: reads of files without hints, memory maps and statically linked children are not.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist run -- tar -cf archive.tar data
  impresario assist run hints.json -- python3 analysis.py data.root
  impresario assist run hints.json --report report.json -- ./solver mesh.h5
  impresario assist run --learn -- python3 analysis.py data.root
  impresario assist run --node -- python3 analysis.py data.root")]
pub struct Args {
    /// The hints file [default: no plan]
    pub hints: Option<PathBuf>,
    /// Use the advice manager of the node
    #[arg(long, conflicts_with_all = ["hints", "report"])]
    node: bool,
    /// Write the effect of the hints to a file, as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Report the effect of the hints on standard error
    #[arg(short, long)]
    verbose: bool,
    /// Report neither how much of what the program read was seen, nor that it runs without hints; given twice, nor that nothing
    /// can be learnt
    #[arg(short, long, conflicts_with = "verbose", action = clap::ArgAction::Count)]
    pub quiet: u8,
    /// Learn from this run what the program does with kinds of files, for the next one, as `impresario assist learn` does
    #[arg(long, conflicts_with = "node")]
    learn: bool,
    /// Number of instances of the program to start at once
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    instances: u32,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    if let Reach::No(why) = reach(&args.program[0].to_string_lossy())?
        && args.quiet == 0
    {
        tell!("impresario: it runs without hints: {why}");
    }
    if args.node {
        let socket = super::report::answering_socket();
        if !socket.exists() {
            return Err(usage(format!(
                "no advice manager listens at {}; start one with `impresario assist daemon`, or give a hints file",
                socket.display()
            )));
        }
        let programs = Programs::start(&args.program, Purpose::Advise, args.instances, &socket, &[])?;
        return Ok(programs.wait()?.0);
    }
    let (hints, paths) = match &args.hints {
        Some(path) => super::hints(path).map(|(hints, paths)| (hints.and_online(), Some(paths)))?,
        None => (Hints::online(), None),
    };
    let words: Vec<_> = args.program.iter().map(|word| word.to_string_lossy()).collect();
    let name = program_of(words.iter().map(|word| &**word));
    let prepare = || {
        let folder = own_socket()?;
        let job = Job::guided(&folder.socket(), &args, name.clone())?;
        let environment = nodes::hook(folder.path(), &job, |name| std::env::var_os(name))?;
        anyhow::Ok((folder, environment))
    };
    let (folder, environment) = match prepare() {
        Ok(prepared) => prepared,
        Err(why) => return unguided(&args.program, args.instances, (args.quiet == 0).then_some(&why)),
    };
    let guided = Guided {
        name,
        hints,
        paths,
        instances: args.instances,
        told: (args.quiet == 0).then(|| "impresario".into()),
        verbose: args.verbose,
        report: args.report.as_deref(),
        learns: args.learn,
        is_silent: args.quiet > 1,
    };
    guided.run(folder, &args.program, &environment)
}

/// A program under a manager of its own.
pub struct Guided<'a> {
    /// The program's, as far as it has one.
    pub name: Option<String>,
    pub hints: Hints,
    /// What the file system says of their paths, where it was asked.
    pub paths: Option<Paths>,
    pub instances: u32,
    /// What stands before the line that tells how much was seen; `None` for no line.
    pub told: Option<String>,
    pub verbose: bool,
    pub report: Option<&'a Path>,
    /// Whether its next run is to know what this one did.
    pub learns: bool,
    /// Not even that nothing can be learnt is told.
    pub is_silent: bool,
}

/// What is learnt from a program is waited for for this part of the time that it ran: processes that are left behind end with a
/// batch job, in which programs run long.
const LEARNING_SHARE: u32 = 200;

impl Guided<'_> {
    /// Runs it to its end.
    pub fn run(
        self,
        folder: OwnSocket,
        program: &[OsString],
        environment: &[(OsString, OsString)],
    ) -> Result<ExitCode> {
        let trace = folder.path().join("learnt.imt");
        let prepare = || {
            let lesson = if self.learns {
                let command: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
                Some(Lesson::new(TraceSink::create(&trace, &command.join(" "))?))
            } else {
                None
            };
            let listening = Manager::listen(&folder.socket(), Access::Owner);
            anyhow::Ok((lesson, listening.context("making the advice manager's socket")?))
        };
        let (lesson, listening) = match prepare() {
            Ok(prepared) => prepared,
            Err(why) => return unguided(program, self.instances, self.told.is_some().then_some(&why)),
        };
        let is_worthwhile = lesson.as_ref().map(Lesson::worth).unwrap_or_default();
        // The program loads while its manager is made.
        let began = Instant::now();
        let programs = Programs::start(program, Purpose::Advise, self.instances, listening.socket(), environment)?;
        raise_file_limit(0);
        let options = Options {
            paths: self.paths,
            program: self.name.clone(),
            known: Some(Arc::new(known::of_own)),
            record: lesson.map(|lesson| Record::to_learn_from(Box::new(lesson))),
            ..Options::new(self.hints)
        };
        let started = listening.start(options);
        let started = started.map_err(|e| io::Error::new(e.kind(), format!("the advice manager did not start: {e}")));
        let manager = started.inspect(|manager| {
            if let Err(error) = manager.expect(files_named(program)) {
                tracing::debug!(%error, "nothing is prefetched before the program's first read");
            }
        });
        let (code, account) = programs.wait()?;
        let ran_for = began.elapsed();
        match manager.and_then(Handle::stop) {
            Ok(mut report) => {
                report.origin = super::report::origin(self.name.as_deref().unwrap_or_default());
                let coverage = account.map(|account| report.cover(account, self.learns));
                if let Some((coverage, told)) = coverage.zip(self.told) {
                    tell!("{told}: {coverage}");
                }
                if self.verbose {
                    tell!("{}", report.to_string().trim_end());
                }
                // The program's result counts, not ours.
                if let Some(file) = self.report
                    && let Err(error) = std::fs::write(file, report.to_json())
                {
                    tell!("impresario: there is no report: writing {}: {error}", file.display());
                }
            }
            Err(error) => {
                // Its trace may have no end.
                is_worthwhile.store(false, Relaxed);
                tell!("impresario: the effect of the hints is unknown: {error}");
            }
        }
        if is_worthwhile.load(Relaxed)
            && let Err(error) = super::learn::hand_over(&trace, ran_for / LEARNING_SHARE)
            && !self.is_silent
        {
            tell!("impresario: nothing is learnt from this run: {error:#}");
        }
        Ok(code)
    }
}

/// Runs programs for which no manager can be had, and tells why where that is wanted. Theirs is not there, and the library does without.
fn unguided(program: &[OsString], instances: u32, why: Option<&anyhow::Error>) -> Result<ExitCode> {
    if let Some(why) = why {
        tell!("impresario: it runs without hints: {}", crate::one_line(why));
    }
    Ok(Programs::start(program, Purpose::Advise, instances, Path::new("/nowhere"), &[])?.wait()?.0)
}

/// The words of a command that may name files to read: arguments, and the part after the first `=` of one.
fn files_named(program: &[OsString]) -> Vec<PathBuf> {
    let words = program.iter().skip(1).map(|word| word.as_bytes());
    let named = words.flat_map(|word| {
        let value = word.iter().position(|b| *b == b'=').map(|at| &word[at + 1..]);
        [Some(word), value].into_iter().flatten()
    });
    named.filter(|name| !name.is_empty()).map(|name| PathBuf::from(OsStr::from_bytes(name))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_may_name_files() {
        let words = ["python3", "a.py", "--input=data.root", "x=", "data/b=c"].map(OsString::from);
        let named = ["a.py", "--input=data.root", "data.root", "x=", "data/b=c", "c"].map(PathBuf::from);
        assert_eq!(files_named(&words), named);
    }
}
