//! `impresario assist run`: a program with hints.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result};
use impresario_assist::backend::FileId;
use impresario_assist::config::{Hints, Paths};
use impresario_assist::learn::program_of;
use impresario_assist::manager::{Access, Handle, Manager, Options, Record, RecordedAccess, RecordedFile, Sink};
use impresario_assist::record::TraceSink;
use impresario_base::machine::raise_file_limit;
use impresario_ring::{Op, SMALL_FILE_BYTES};

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

/// Accesses of a run that is learnt from, and files that it opens; of a longer one nothing is learnt.
const LEARNT_ACCESSES_MAX: u64 = 1 << 22;
/// What is learnt from a program is waited for for this part of the time that it ran: processes that are left behind end with a
/// batch job, in which programs run long.
const LEARNING_SHARE: u32 = 200;

/// Now, on the clock from which the kernel takes the times of files, in nanoseconds since 1970.
fn file_time_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let (s, ns) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    s.saturating_mul(1_000_000_000).saturating_add(ns)
}

/// A trace of what can be learnt from, which does not grow without end.
struct Lesson {
    trace: TraceSink,
    left: u64,
    /// Open files from which something can be learnt: what was changed since the run began was written by it, most likely.
    long: HashSet<u64>,
    /// Open files, and those that were written to: the clock of a server, by which files were changed, may lag behind ours.
    open: HashMap<u64, FileId>,
    written: HashSet<FileId>,
    began_unix_ns: u64,
    /// Whether one of them was read.
    is_worthwhile: Arc<AtomicBool>,
}

impl Lesson {
    /// One more line of the trace. Nothing is learnt from a part of a run.
    fn add(&mut self, line: impl FnOnce(&mut TraceSink) -> io::Result<()>) -> io::Result<()> {
        let added = match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                line(&mut self.trace)
            }
            None => Err(io::Error::other("too long a run to learn from")),
        };
        added.inspect_err(|_| self.is_worthwhile.store(false, Relaxed))
    }
}

impl Sink for Lesson {
    fn opened(&mut self, file: &RecordedFile) -> io::Result<()> {
        let is_input = file.changed_unix_ns <= self.began_unix_ns && !self.written.contains(&file.id);
        if file.size_bytes > SMALL_FILE_BYTES.into() && is_input {
            self.long.insert(file.number);
        }
        self.open.insert(file.number, file.id);
        self.add(|trace| trace.opened(file))
    }

    fn access(&mut self, access: &RecordedAccess) -> io::Result<()> {
        match access.op {
            Op::Read if !self.long.contains(&access.file) => return Ok(()),
            Op::Read => self.is_worthwhile.store(true, Relaxed),
            // Once is enough to know.
            Op::Write if !self.open.get(&access.file).is_some_and(|id| self.written.insert(*id)) => return Ok(()),
            Op::Close => {
                self.long.remove(&access.file);
                self.open.remove(&access.file);
            }
            _ => {}
        }
        self.add(|trace| trace.access(access))
    }

    fn finish(&mut self) -> io::Result<()> {
        self.trace.finish().inspect_err(|_| self.is_worthwhile.store(false, Relaxed))
    }
}

impl Guided<'_> {
    /// Runs it to its end.
    pub fn run(
        self,
        folder: OwnSocket,
        program: &[OsString],
        environment: &[(OsString, OsString)],
    ) -> Result<ExitCode> {
        let trace = folder.path().join("learnt.imt");
        let is_worthwhile = Arc::new(AtomicBool::new(false));
        let prepare = || {
            let record = if self.learns {
                let command: Vec<_> = program.iter().map(|word| word.to_string_lossy()).collect();
                let sink = Lesson {
                    trace: TraceSink::create(&trace, &command.join(" "))?,
                    left: LEARNT_ACCESSES_MAX,
                    long: HashSet::new(),
                    open: HashMap::new(),
                    written: HashSet::new(),
                    began_unix_ns: file_time_ns(),
                    is_worthwhile: is_worthwhile.clone(),
                };
                Some(Record::to_learn_from(Box::new(sink)))
            } else {
                None
            };
            let listening = Manager::listen(&folder.socket(), Access::Owner);
            anyhow::Ok((record, listening.context("making the advice manager's socket")?))
        };
        let (record, listening) = match prepare() {
            Ok(prepared) => prepared,
            Err(why) => return unguided(program, self.instances, self.told.is_some().then_some(&why)),
        };
        // The program loads while its manager is made.
        let began = Instant::now();
        let programs = Programs::start(program, Purpose::Advise, self.instances, listening.socket(), environment)?;
        raise_file_limit(0);
        let options = Options {
            paths: self.paths,
            program: self.name.clone(),
            kinds: Some(Arc::new(known::of_own)),
            record,
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
    fn what_can_be_learnt_from_is_recorded_and_no_more() {
        use impresario_trace::Trace;
        let folder = tempfile::tempdir().unwrap();
        let lesson = |name: &str, left| {
            let trace = TraceSink::create(&folder.path().join(name), "program").unwrap();
            let (long, open, written) = Default::default();
            Lesson { trace, left, long, open, written, began_unix_ns: 5000, is_worthwhile: Arc::default() }
        };
        let file = |number, size_bytes| RecordedFile {
            number,
            path: format!("/data/{number}").into(),
            id: FileId { dev: 1, ino: number },
            size_bytes,
            changed_unix_ns: 5000,
            pid: 1,
            uid: 0,
            program: "program".into(),
        };
        let access = |file, op| RecordedAccess {
            file,
            pid: 1,
            thread: 1,
            op,
            flags: 0,
            offset: 0,
            len_bytes: 4096,
            start_ns: impresario_ring::now_ns(),
            duration_ns: 1,
        };
        let (short, long) = (file(1, SMALL_FILE_BYTES.into()), file(2, u64::from(SMALL_FILE_BYTES) + 1));
        let mut sink = lesson("a.imt", 7);
        for file in [&short, &long] {
            sink.opened(file).unwrap();
        }
        // One that was short when it was opened may be read by another name when it is long.
        for op in [Op::Read, Op::Write] {
            sink.access(&access(short.number, op)).unwrap();
        }
        assert!(!sink.is_worthwhile.load(Relaxed));
        let made = RecordedFile { changed_unix_ns: 5001, ..file(3, long.size_bytes) };
        sink.opened(&made).unwrap();
        sink.access(&access(made.number, Op::Read)).unwrap();
        assert!(!sink.is_worthwhile.load(Relaxed), "the run has written it");
        // On a server whose clock lags.
        let output = RecordedFile { id: short.id, ..file(4, long.size_bytes) };
        sink.opened(&output).unwrap();
        sink.access(&access(output.number, Op::Read)).unwrap();
        assert!(!sink.is_worthwhile.load(Relaxed), "so it has this one");
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.is_worthwhile.load(Relaxed));
        sink.access(&access(long.number, Op::Close)).unwrap();
        sink.finish().unwrap();
        assert_eq!(Trace::load(folder.path().join("a.imt")).unwrap().records.len(), 3);
        let mut sink = lesson("b.imt", 2);
        sink.opened(&long).unwrap();
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.access(&access(long.number, Op::Read)).is_err(), "it is too long a run");
        assert!(!sink.is_worthwhile.load(Relaxed), "nothing is learnt from a part of it");
        let mut sink = lesson("c.imt", 2);
        sink.opened(&long).unwrap();
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.opened(&short).is_err() && !sink.is_worthwhile.load(Relaxed), "files count, too");
        let mut sink = lesson("d.imt", 9);
        sink.opened(&long).unwrap();
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.add(|_| Err(io::ErrorKind::StorageFull.into())).is_err());
        assert!(!sink.is_worthwhile.load(Relaxed), "nor from a trace that is cut");
    }

    #[test]
    fn words_that_may_name_files() {
        let words = ["python3", "a.py", "--input=data.root", "x=", "data/b=c"].map(OsString::from);
        let named = ["a.py", "--input=data.root", "data.root", "x=", "data/b=c", "c"].map(PathBuf::from);
        assert_eq!(files_named(&words), named);
    }
}
