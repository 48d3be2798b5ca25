//! What io_uring gains an I/O node in front of a mounted file system: the back end with it and with plain calls, through
//! the page cache and past it.
//!
//! One tree for each way over one folder, each with a file of its own. Every run reads or overwrites for a fixed time.
//! The order of the ways is random in each repetition, and ratios are taken within it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use impresario_backend::posix::{Calls, Options};
use impresario_backend::{Backend, Caller, Errno, Handle, Make, PosixTree, SetAttr};
use impresario_base::Random;
use impresario_base::units::show_bytes;
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::rounds::Rounds;
use impresario_workload::stats::show;
use serde_json::json;

use crate::report;

/// Measure reads and writes of a mounted file system through io_uring beside plain calls
#[derive(clap::Args)]
pub struct Args {
    /// Folder to work in, on the file system in question
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Repetitions, each with every way once
    #[arg(long, default_value_t = 5, value_name = "N")]
    repetitions: u32,
    /// Length of a run, milliseconds
    #[arg(long, default_value_t = 400, value_name = "MS")]
    run_ms: u64,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Length of the file of each way, bytes.
const FILE_BYTES: u64 = 64 << 20;
/// Name, calls, past the page cache. Plain calls come before the ring that they are compared with.
const WAYS: [(&str, Calls, bool); 4] = [
    ("cached, calls", Calls::Threads, false),
    ("cached, ring", Calls::Uring, false),
    ("direct, calls", Calls::Threads, true),
    ("direct, ring", Calls::Uring, true),
];

struct Load {
    writes: bool,
    request_bytes: usize,
    threads: u64,
}

struct Way {
    tree: PosixTree,
    file: Handle,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let stop = catch_signals()?;
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let folder = tempfile::Builder::new().prefix("impresario-lab-").tempdir_in(&parent);
    let folder = folder.with_context(|| format!("making a folder in {}", parent.display()))?;
    let caller = caller();
    let ways = WAYS.iter().map(|way| open(folder.path(), way, &caller)).collect::<Result<Vec<_>>>()?;
    let sizes = [1 << 20, 64 << 10, 4 << 10];
    let loads = [false, true].into_iter().flat_map(|writes| {
        sizes.into_iter().flat_map(move |request_bytes| {
            [1, 16].into_iter().map(move |threads| Load { writes, request_bytes, threads })
        })
    });
    let mut out = format!("{:<28}", "load, MiB/s");
    WAYS.iter().for_each(|(name, ..)| out += &format!(" {name:>14}"));
    out += "   ring / calls, cached      ring / calls, direct\n";
    let (mut random, mut line, mut all) = (Random::new(1), Progress::new(), Vec::new());
    for load in loads {
        let does = if load.writes { "writes" } else { "reads" };
        let name = format!("{} {does}, {} threads", show_bytes(load.request_bytes as f64), load.threads);
        let rounds = Rounds::cold(args.repetitions);
        let rates = rounds.measure(WAYS.len(), &mut random, &stop, |repetition, way| {
            line.show(&format!("{name}, {}, repetition {repetition}", WAYS[way].0));
            measure(&ways[way], &load, &caller, Duration::from_millis(args.run_ms))
        })?;
        out += &format!("{name:<28}");
        (0..WAYS.len()).for_each(|way| out += &format!(" {:>14.0}", rates.mean(way, |rate| *rate)));
        for calls in [0, 2] {
            out += &format!(
                "   {}",
                show(&rates.ratio(calls + 1, calls, |rate| *rate), " ×", |ratio| format!("{ratio:.2}"))
            );
        }
        out.push('\n');
        all.push(json!({ "load": name, "ways": WAYS.map(|(name, ..)| name), "mib_s": rates.rounds }));
    }
    line.end();
    report(&out, args.json.as_deref(), &json!({ "folder": parent, "loads": all }))
}

fn caller() -> Caller {
    let groups = rustix::process::getgroups().unwrap_or_default();
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: groups.iter().map(|group| group.as_raw()).collect(),
    }
}

/// A tree that moves bytes in this way, with a file that is written.
fn open(folder: &std::path::Path, (name, calls, direct): &(&str, Calls, bool), caller: &Caller) -> Result<Way> {
    let tree = PosixTree::open(folder, Options { calls: *calls, direct: *direct, ..Options::default() })?;
    let failed = |error: Errno| anyhow!("{name}: {error}");
    let root = tree.root().map_err(failed)?;
    let (file, _) = tree.make(caller, &root, name.as_bytes(), Make::File, &SetAttr::default()).map_err(failed)?;
    let bytes = vec![7; 1 << 20];
    for at in (0..FILE_BYTES).step_by(bytes.len()) {
        tree.write(caller, &file, at, &bytes, false).map_err(failed)?;
    }
    tree.sync(&file).map_err(failed)?;
    let io = tree.io();
    ensure!(*calls != Calls::Uring || io.ring.is_some(), "{}", io.no_ring.unwrap_or_default());
    ensure!(io.direct == *direct, "{} does not pass the page cache by; choose another --dir", folder.display());
    Ok(Way { tree, file })
}

/// MiB/s of a load.
fn measure(way: &Way, load: &Load, caller: &Caller, length: Duration) -> Result<f64> {
    let (stop, moved, begun) = (AtomicBool::new(false), AtomicU64::new(0), Instant::now());
    let failed = std::thread::scope(|scope| {
        let thread = |seed: u64| {
            let (stop, moved) = (&stop, &moved);
            scope.spawn(move || {
                let (mut random, mut buffer) = (Random::new(seed), vec![7; load.request_bytes]);
                let places = FILE_BYTES / load.request_bytes as u64;
                while !stop.load(Relaxed) {
                    let at = random.below(places) * load.request_bytes as u64;
                    match load.writes {
                        true => way.tree.write(caller, &way.file, at, &buffer, false)?,
                        false => drop(way.tree.read(caller, &way.file, at, &mut buffer)?),
                    }
                    moved.fetch_add(load.request_bytes as u64, Relaxed);
                }
                Ok::<(), Errno>(())
            })
        };
        let threads: Vec<_> = (0..load.threads).map(thread).collect();
        std::thread::sleep(length);
        stop.store(true, Relaxed);
        threads.into_iter().filter_map(|thread| thread.join().unwrap_or(Err(Errno(libc::EIO))).err()).next()
    });
    failed.map_or(Ok(()), |error| Err(anyhow!("{error}")))?;
    Ok(moved.into_inner() as f64 / f64::from(1 << 20) / begun.elapsed().as_secs_f64())
}
