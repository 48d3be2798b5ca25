//! `impresario assist learn`: what a program does with kinds of files, from recorded runs.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_assist::learn::{Learnt, Observed, SHARED, Saving, Store, observe, programs_in, savings};
use impresario_assist::plan::Device;
use impresario_trace::Trace;
use impresario_trace::convert::{ImportOptions, import};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::setpriority_process;

use super::plan::{device_named, files_used};
use crate::{print, print_json, usage};

/// Learn from recorded runs how a program reads kinds of files, for files that it has never read
///
/// A plan names files; what is learnt here names kinds of files (by suffix, first bytes, name, folder and size) and what the
/// program reads of them whatever their size. `impresario assist run` uses it for files without hints. Each file of a
/// kind is predicted from the others, and the report tells how much of that was right, and by replay on a model of the device how much of
/// the time waited for these files hints would save that come from the others: a kind that was wrong too often, or
/// was seen in one file only, is kept and not used. What was learnt is one file for each program in
/// $XDG_DATA_HOME/impresario/assist (~/.local/share/impresario/assist); where that has none, run looks into
/// /var/lib/impresario-learnt.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist record -o monday.imt -- python3 analysis.py monday.root
  impresario assist record -o tuesday.imt -- python3 analysis.py tuesday.root
  impresario assist learn monday.imt tuesday.imt
  impresario assist run -- python3 analysis.py wednesday.root
  impresario assist learn --list
  impresario assist learn --forget analysis.py")]
pub struct Args {
    /// Recorded runs: from `assist record`, or Darshan DXT as text, strace, CSV or fio
    #[arg(required_unless_present_any = ["list", "forget"], conflicts_with_all = ["list", "forget"], value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// The program of these runs [default: each program of a run by its own name; of an interpreter, the script's]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["list", "forget"])]
    program: Option<String>,
    /// Keep it for all users of this machine, in /var/lib/impresario-learnt
    #[arg(long, conflicts_with = "folder")]
    shared: bool,
    /// Keep it in another folder
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// The device for which the saving is told: auto (measured for half a second), disk, flash, or IOPS:MIB_PER_S of a limited volume
    #[arg(long, default_value = "auto", value_name = "DEVICE", conflicts_with_all = ["list", "forget"])]
    device: String,
    /// List what was learnt
    #[arg(long, conflicts_with = "forget")]
    list: bool,
    /// Forget what was learnt of a program
    #[arg(long, value_name = "PROGRAM")]
    forget: Option<String>,
    /// Print JSON
    #[arg(long, conflicts_with = "forget")]
    json: bool,
}

/// A device is measured for so long.
const MEASURED_FOR: Duration = Duration::from_millis(500);
/// The niceness of a process that learns.
const LOWEST_PRIORITY: i32 = 19;
/// It is waited for no longer than this.
const PATIENCE_MAX: Duration = Duration::from_secs(10);
/// And its start, which includes the end of all that it had open, no longer than this.
const STARTED_WITHIN: Duration = Duration::from_secs(5);
/// And so long the file system on which it is kept.
const PREPARED_WITHIN: Duration = Duration::from_secs(5);

pub fn run(args: Args) -> Result<ExitCode> {
    let store = match (&args.folder, args.shared) {
        (Some(folder), _) => Store::at(folder),
        (None, true) => Store::of_machine(SHARED),
        (None, false) => Store::of_user(|name| std::env::var_os(name))
            .ok_or_else(|| usage("neither XDG_DATA_HOME nor HOME names a folder; name one with --folder"))?,
    };
    if let Some(program) = &args.forget {
        return match store.forget(program)? {
            true => print(format!("What was learnt of {program} is forgotten.\n")),
            false => Err(usage(format!(
                "nothing was learnt of {program:?} in {}; --list tells of what was",
                store.folder().display()
            ))),
        };
    }
    if args.list {
        return list(&store, args.json);
    }
    store.prepare()?;
    let mut learnt: Vec<(Learnt, String)> = Vec::new();
    for path in &args.traces {
        let imported = import(path, &ImportOptions::default())?;
        imported.notes.iter().for_each(|note| tell!("impresario: {}: {note}", path.display()));
        let trace = imported.trace;
        for (program, observed) in observations(&trace, args.program.as_deref()) {
            let program = program.with_context(|| {
                format!("{} does not tell which program it is of; name it with --program", path.display())
            })?;
            let note = left_out(&observed, path);
            let now = store.add(&program, observed.files)?;
            match learnt.iter_mut().find(|(before, _)| before.program == program) {
                Some((before, notes)) => (*before, *notes) = (now, notes.clone() + &note),
                None => learnt.push((now, note)),
            }
        }
    }
    let expected = expected(&args, learnt.iter().map(|(learnt, _)| learnt))?;
    if args.json {
        let told =
            learnt.iter().zip(&expected.savings).map(|((learnt, _), savings)| Told { learnt, expected: savings });
        return print_json(&told.collect::<Vec<_>>());
    }
    let text = learnt.iter().zip(&expected.savings).map(|((learnt, notes), savings)| words(learnt, savings) + notes);
    print(text.collect::<String>() + &expected.device)
}

/// As JSON.
#[derive(serde::Serialize)]
struct Told<'a> {
    #[serde(flatten)]
    learnt: &'a Learnt,
    /// For each kind, what hints would save of the files of these runs.
    expected: &'a [Saving],
}

/// What hints by kind would save in these runs.
struct Expected {
    /// Of each program and kind; empty where it is not known.
    savings: Vec<Vec<Saving>>,
    /// A line on the device.
    device: String,
}

/// Replays the runs, one after the other: all of them at once may need much memory.
fn expected<'a>(args: &Args, learnt: impl Iterator<Item = &'a Learnt>) -> Result<Expected> {
    let learnt: Vec<&Learnt> = learnt.collect();
    let mut all = vec![Vec::new(); learnt.len()];
    let mut device: Option<Device> = None;
    if !learnt.iter().any(|learnt| learnt.kinds.iter().any(|kind| kind.is_used())) {
        return Ok(Expected { savings: all, device: String::new() });
    }
    for path in &args.traces {
        let trace = import(path, &ImportOptions::default())?.trace;
        let device = match &device {
            Some(device) => device,
            None => match device_named(&args.device, &files_used(&trace), MEASURED_FOR) {
                Ok(found) => &*device.insert(found),
                Err(error) if args.device == "auto" => {
                    let line = format!("What hints save is not known: {error:#}\n");
                    return Ok(Expected { savings: vec![Vec::new(); learnt.len()], device: line });
                }
                Err(error) => return Err(error),
            },
        };
        for (name, label) in labels(&trace, args.program.as_deref()) {
            let Some(at) = learnt.iter().position(|learnt| Some(&learnt.program) == name.as_ref()) else { continue };
            let more = savings(learnt[at], &trace, label, device);
            all[at] = match all[at].is_empty() {
                true => more,
                false => all[at].iter().zip(more).map(|(one, other): (&Saving, _)| one.and(other)).collect(),
            };
        }
    }
    let device =
        device.map(|device| format!("Savings are those of a replay on a model of the device: {}.\n", device.source));
    Ok(Expected { savings: all, device: device.unwrap_or_default() })
}

/// The programs of a run with the labels of their accesses, or all that it read under one name.
fn labels<'a>(trace: &'a Trace, program: Option<&str>) -> Vec<(Option<String>, Option<&'a str>)> {
    program.map_or_else(|| programs_in(trace), |program| vec![(Some(program.into()), None)])
}

/// What is observed of each program of a run, or of all that it read, under one name. Programs of which nothing is are left out
/// beside others: shells and launchers.
fn observations(trace: &Trace, program: Option<&str>) -> Vec<(Option<String>, Observed)> {
    let mut all: Vec<_> =
        labels(trace, program).into_iter().map(|(name, label)| (name, observe(trace, label))).collect();
    if all.iter().any(|(_, observed)| !observed.files.is_empty()) {
        all.retain(|(_, observed)| !observed.files.is_empty());
    } else {
        all.truncate(1);
    }
    all
}

/// What this user knows.
fn own_store() -> Result<Store> {
    Store::of_user(|name| std::env::var_os(name)).context("neither XDG_DATA_HOME nor HOME names a folder")
}

/// The name of a process's standard input, also where no folder has its file any more.
const STDIN: &str = "/proc/self/fd/0";

/// Has a run added to what this user knows of its programs, by a process that nobody needs to wait for: it has the lowest priority and a
/// process group of its own, so that keys typed at the terminal do not end it, and nothing that was open here but the trace, which may
/// be removed. Waits for it as long as `patience`, and in any case until it has closed what it had from here.
pub fn hand_over(trace: &Path, patience: Duration) -> Result<()> {
    let store = own_store()?;
    let folder = store.folder().to_path_buf();
    match within(PREPARED_WITHIN, move || store.prepare()) {
        Some(prepared) => prepared?,
        None => anyhow::bail!("{}: its file system does not answer", folder.display()),
    }
    leave_to_no_child()?;
    // Also where another release has replaced the file.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("impresario").args(["assist", "remember"]).current_dir("/").process_group(0);
    command.stdin(File::open(trace)?).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut learner = command.spawn().context("starting a process that learns")?;
    let began = Instant::now();
    // The kernel closes files that are marked so after it has let this process go on.
    if let Some(said) = learner.stdout.take() {
        let patience = Timespec { tv_sec: STARTED_WITHIN.as_secs().cast_signed(), tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&said, PollFlags::IN)], Some(&patience)); // the program's result counts, not this
    }
    let end = began + patience.min(PATIENCE_MAX);
    while learner.try_wait()?.is_none() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Does what waits for a file system in a thread beside. `None` where it takes longer than this; the thread ends with the process.
pub fn within<T: Send + 'static>(patience: Duration, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, answer) = mpsc::channel();
    let asking = move || drop(tell.send(ask()));
    std::thread::Builder::new().name("assist-learnt".into()).spawn(asking).ok()?;
    answer.recv_timeout(patience).ok()
}

/// What this process has open is closed in those that it starts from now on: also pipes and locks of whoever started it, who may wait for
/// their end.
fn leave_to_no_child() -> Result<()> {
    for entry in std::fs::read_dir("/proc/self/fd").context("listing open files")?.flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        if let Some(number) = number.filter(|number| *number > 2) {
            // SAFETY: sets a flag that has no effect in this process; one that was closed meanwhile is refused.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
    Ok(())
}

/// Learn from a run whose trace is on standard input
#[derive(clap::Args)]
pub struct Remember {
    /// Where a node's manager has what is learnt kept [default: the user's own]
    #[arg(long, requires = "home")]
    folder: Option<PathBuf>,
    /// What must be there for that
    #[arg(long)]
    home: Option<PathBuf>,
}

/// Adds the run whose trace is on standard input to what its user knows of its programs. Where others are long before it, or somebody
/// has removed the folder meanwhile, it ends without. A run that a node's manager has recorded counts where it teaches nothing, too, so
/// that a program of which nothing can be learnt is not recorded for ever.
pub fn remember(args: Remember) -> Result<ExitCode> {
    // Whoever started it may go now. It was not given a low priority before: on a busy machine it would have started late.
    let _ = std::io::stdout().write_all(b"\n").and_then(|()| std::io::stdout().flush());
    let _ = setpriority_process(None, LOWEST_PRIORITY); // it would only be in others' way
    let counts = args.folder.is_some();
    let store = match args.folder {
        None => own_store()?,
        Some(folder) => {
            let home = args.home.unwrap_or_default();
            // What a program reads is its user's affair alone, whatever the umask of who serves it.
            rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
            anyhow::ensure!(home.is_dir(), "{} is not there, so nothing is kept below it", home.display());
            let store = Store::at(folder);
            store.prepare()?;
            store
        }
    };
    let _turn = store.turn_to_learn()?;
    for (program, observed) in observations(&Trace::load(STDIN)?, None) {
        if let Some(program) = program.filter(|_| counts || !observed.files.is_empty()) {
            store.add(&program, observed.files)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn list(store: &Store, json: bool) -> Result<ExitCode> {
    let (learnt, errors) = store.all();
    errors.iter().for_each(|error| tell!("impresario: {error}"));
    if json {
        print_json(&learnt)?;
    } else if learnt.is_empty() && errors.is_empty() {
        print(format!("Nothing was learnt yet in {}.\n", store.folder().display()))?;
    } else {
        print(learnt.iter().map(|learnt| words(learnt, &[])).collect::<String>())?;
    }
    Ok(if errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is known of a program, for people, and what hints by each kind save.
fn words(learnt: &Learnt, savings: &[Saving]) -> String {
    let mut text = format!("{}, {}:\n", learnt.program, count(learnt.runs, "recorded run"));
    if learnt.kinds.is_empty() {
        text += "  nothing could be learnt\n";
    }
    for (at, kind) in learnt.kinds.iter().enumerate() {
        let _ = writeln!(text, "  {}: {}", kind.files.words(), kind.shape);
        let percent = |part: f64| (1000.0 * part).floor() / 10.0;
        if let Some(score) = kind.held_out {
            let files = match score.files > kind.learnt_from {
                true => format!("{} that were read in different ways", count(kind.learnt_from, "file")),
                false => count(kind.learnt_from, "file"),
            };
            let _ = writeln!(
                text,
                "    {files}, each held out once: {:.1} % of what the others predicted was read, {:.1} % of what was read was predicted",
                percent(score.precision()),
                percent(score.recall()),
            );
        }
        if let Some(why) = kind.why_unused() {
            let _ = writeln!(text, "    not used: {why}");
            continue;
        }
        if let Some(saving) = savings.get(at).filter(|saving| saving.files > 0) {
            let _ = writeln!(
                text,
                "    expected of {} held out: {:.2} s of {:.2} s waiting saved ({:.0} %)",
                count(saving.files, "file"),
                saving.without_s - saving.with_s,
                saving.without_s,
                100.0 * saving.part(),
            );
        }
        if let Some(size) = kind.shape.only_size_bytes {
            let _ = writeln!(text, "    used for files of {size} bytes only: no other size was recorded");
        }
    }
    text
}

fn left_out(observed: &Observed, path: &Path) -> String {
    let reasons = [
        (observed.written, "written, too"),
        (observed.in_no_order, "read in no order"),
        (observed.short, "shorter than 64 KiB or of unknown length"),
    ];
    let reasons: Vec<String> =
        reasons.iter().filter(|(n, _)| *n > 0).map(|(n, why)| format!("{} {why}", count(*n, "file"))).collect();
    match reasons.is_empty() {
        true => String::new(),
        false => format!("  left out of {}: {}\n", path.display(), reasons.join(", ")),
    }
}

pub fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
