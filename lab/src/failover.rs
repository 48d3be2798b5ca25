//! How long calls wait when a server fails under load, and whether anything is lost.
//!
//! Clients write, read, make, look up and remove files through two I/O nodes to two data servers, all in memory, with the
//! cluster's usual time-outs. A server is killed, or stopped as a machine that hangs is; the longest wait of any call since then
//! counts. An I/O node stays away until its clients have gone on through the other one; a data or metadata server, for which nobody
//! stands in, is started again at once, and its wait includes that. In the end all that was acknowledged is read and compared.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use impresario_base::lock::Mutex;
use impresario_base::statistics::{Interval, mean};
use impresario_client::{Access, Client, ClientError, ClientOptions, CreateOptions, KeyRole, Via, admin};
use impresario_config::Config;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::content::Source;
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::stats::Verdict;
use impresario_workload::stop::Stop;
use serde::Serialize;
use serde_json::json;

use crate::{impresario, report};

/// What is asked: a client of an I/O node that fails goes on within this time, s.
const BOUND_S: f64 = 2.0;
/// A call that waits for longer is not waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// Clients work for so long before a server fails, and so many rounds afterwards.
const BEFORE: Duration = Duration::from_millis(500);
const ROUNDS_AFTER: u64 = 100;
const BLOCK_BYTES: usize = 24 << 10;
const BLOCKS: u64 = 64;

/// Measure how long calls wait when a server is killed or hangs under load, and verify what was acknowledged
#[derive(clap::Args)]
pub struct Args {
    /// Repetitions of each case
    #[arg(long, default_value_t = 5, value_name = "N")]
    repetitions: u32,
    /// Clients, each of which waits for every call
    #[arg(long, default_value_t = 8, value_name = "N")]
    clients: u64,
    /// Write every repetition to a file
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
}

/// What happens to which server.
struct Case {
    name: &'static str,
    server: &'static str,
    /// It is stopped and goes on later, instead of being killed and started again.
    hangs: bool,
    /// Another one stands in for it.
    has_stand_in: bool,
}

const CASES: [Case; 4] = [
    Case { name: "an I/O node is killed", server: "io.0", hangs: false, has_stand_in: true },
    Case { name: "an I/O node hangs", server: "io.0", hangs: true, has_stand_in: true },
    Case { name: "a data server is killed and started again", server: "data.0", hangs: false, has_stand_in: false },
    Case { name: "the metadata server is killed and started again", server: "meta", hangs: false, has_stand_in: false },
];

/// A repetition, s.
#[derive(Serialize)]
struct Trial {
    /// The longest wait of a call, and of which.
    longest_s: f64,
    call: &'static str,
    /// From when it is back until it is used again.
    used_after_s: f64,
    /// Blocks that were read and compared in the end.
    verified: u64,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    ensure!(args.repetitions > 0 && args.clients > 1, "at least one repetition, and two clients");
    let stop = catch_signals()?;
    let plan = Plan {
        data_servers: 2,
        io_nodes: 2,
        request_timeout_ms: impresario_config::Cluster::default().request_timeout_ms,
        program: Some(impresario()?),
        ..Plan::default()
    };
    let mut cluster = OwnCluster::start(&plan, &stop)?;
    let (mut line, mut out, mut all, mut nonce) = (Progress::new(), String::new(), Vec::new(), 0);
    let mut verdicts = Vec::new();
    for case in &CASES {
        let mut trials: Vec<Trial> = Vec::new();
        for repetition in 1..=args.repetitions {
            let last = trials.last().map_or(String::new(), |t| format!("; the last one {:.2} s", t.longest_s));
            line.show(&format!("{}, {repetition} of {}{last}", case.name, args.repetitions));
            nonce += 1;
            trials.push(trial(&mut cluster, case, args.clients, nonce, &stop).with_context(|| case.name)?);
        }
        let of = |value: fn(&Trial) -> f64| trials.iter().map(value).collect::<Vec<_>>();
        let longest = of(|trial| trial.longest_s);
        let (interval, max_s) = (Interval::of(&longest), longest.iter().copied().fold(0.0, f64::max));
        let verdict = case.has_stand_in.then(|| Verdict::of(max_s <= BOUND_S));
        verdicts.extend(verdict);
        let verdict = verdict.map_or(String::new(), |verdict| format!(", within {BOUND_S} s: {verdict}"));
        out += &format!(
            "{}: the longest wait of a call {:.2} s [{:.2}, {:.2}], at most {max_s:.2} s{verdict}; n={}; used again after {:.2} s; \
             {} blocks verified\n",
            case.name,
            interval.mean,
            interval.low,
            interval.high,
            interval.n,
            mean(&of(|trial| trial.used_after_s)),
            trials.iter().map(|trial| trial.verified).sum::<u64>(),
        );
        all.push(json!({ "case": case.name, "trials": trials }));
    }
    line.end();
    report(&out, args.json.as_deref(), &json!({ "cases": all }))?;
    Ok(if Verdict::of_all(verdicts) == Verdict::Holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a client has done.
#[derive(Default)]
struct Work {
    rounds: AtomicU64,
    /// The longest wait since that was set to nothing.
    longest: Mutex<(Duration, &'static str)>,
}

/// What the clients of a repetition share.
struct Shared {
    is_over: AtomicBool,
    nonce: u64,
}

fn trial(cluster: &mut OwnCluster, case: &Case, clients: u64, nonce: u64, stop: &Stop) -> Result<Trial> {
    let config = cluster.config.clone();
    let shared = Shared { is_over: AtomicBool::new(false), nonce };
    let works: Vec<Work> = (0..clients).map(|_| Work::default()).collect();
    let (measured, written) = std::thread::scope(|scope| {
        let started: Vec<_> = (0..clients)
            .zip(&works)
            .map(|(number, work)| {
                let (config, shared) = (&config, &shared);
                scope.spawn(move || load(config, number, shared, work))
            })
            .collect();
        let measured = fail_and_heal(cluster, case, &works, stop);
        shared.is_over.store(true, Ordering::Relaxed);
        let ended = started.into_iter().map(|thread| match thread.join() {
            Ok(written) => written.map_err(|(call, error)| anyhow::anyhow!("{call}: {error}")),
            Err(_) => bail!("a client panicked"),
        });
        (measured, ended.collect::<Result<Vec<_>>>())
    });
    let written = written.context("a call failed, where all should only wait")?;
    let (longest, call, used_after) = measured?;
    let verified = verify(&config, nonce, &written)?;
    Ok(Trial { longest_s: longest.as_secs_f64(), call, used_after_s: used_after.as_secs_f64(), verified })
}

/// The longest wait and of which call it was, and how long the server was not used once it was back.
fn fail_and_heal(
    cluster: &mut OwnCluster,
    case: &Case,
    works: &[Work],
    stop: &Stop,
) -> Result<(Duration, &'static str, Duration)> {
    let rounds = || works.iter().map(|work| work.rounds.load(Ordering::Relaxed)).collect::<Vec<_>>();
    let go_on = |after: &[u64], count: u64| -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while rounds().iter().zip(after).any(|(now, before)| *now < before + count) {
            stop.check()?;
            ensure!(Instant::now() < until, "a client did not go on within {} s", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    };
    go_on(&rounds(), 1)?;
    stop.sleep_until(Instant::now() + BEFORE)?;
    works.iter().for_each(|work| *work.longest.lock() = Default::default());
    let before = rounds();
    match case.hangs {
        true => cluster.pause(case.server)?,
        false => cluster.kill(case.server)?,
    }
    if case.has_stand_in {
        go_on(&before, ROUNDS_AFTER)?;
    }
    let used_before = if case.hangs { None } else { Some(0) };
    match case.hangs {
        true => cluster.resume(case.server)?,
        false => cluster.launch(case.server)?,
    }
    let back = Instant::now();
    go_on(&rounds(), ROUNDS_AFTER)?;
    let worst = works.iter().map(|work| *work.longest.lock()).max_by_key(|(wait, _)| *wait).unwrap_or_default();
    let used_after = until_used(&cluster.config, case.server, used_before, back, stop)?;
    Ok((worst.0, worst.1, used_after))
}

/// Waits until clients' requests come to a server that had so many (as it has now, if `None`); how long after `back`.
fn until_used(config: &Config, server: &str, mut had: Option<u64>, back: Instant, stop: &Stop) -> Result<Duration> {
    let access = Access::of(config, KeyRole::Admin);
    let address = config.server(server).map_err(anyhow::Error::msg)?.address().to_string();
    let field = if server.starts_with("io") { "/forward/requests" } else { "/connections/calls" };
    loop {
        stop.check()?;
        ensure!(back.elapsed() < PATIENCE, "{server} is not used {} s after it is back", PATIENCE.as_secs());
        if let Ok(text) = admin::status(&access, &address, Duration::from_secs(1)) {
            let status: serde_json::Value = serde_json::from_str(&text)?;
            let has =
                status.pointer(field).and_then(serde_json::Value::as_u64).with_context(|| format!("no {field}"))?;
            // Of a data or metadata server the question for its status is one of its calls.
            if has > *had.get_or_insert(has) + 1 {
                return Ok(back.elapsed());
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn connect(config: &Config, number: u64, via: Via) -> Result<Arc<Client>, ClientError> {
    let options = ClientOptions { job: number, via, placement_seed: number, ..ClientOptions::default() };
    Client::connect(config, options)
}

fn name(nonce: u64, number: u64) -> String {
    format!("failover.{nonce}.{number}")
}

fn source(nonce: u64, number: u64, generation: u32) -> Source {
    Source { nonce, file: number, writer: 0, generation }
}

type Failed = (&'static str, ClientError);

/// Works until it is over; the last generation of each block that was acknowledged.
fn load(config: &Config, number: u64, shared: &Shared, work: &Work) -> Result<Vec<u32>, Failed> {
    let timed = |call: &'static str, act: &mut dyn FnMut() -> Result<(), ClientError>| -> Result<(), Failed> {
        let began = Instant::now();
        act().map_err(|error| (call, error))?;
        let mut longest = work.longest.lock();
        *longest = (*longest).max((began.elapsed(), call));
        Ok(())
    };
    let client = connect(config, number, Via::Auto).map_err(|error| ("connect", error))?;
    // As mounts do: it goes back when its I/O node is there again.
    client.follow(config);
    let options = CreateOptions { mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
    let file = client.create(name(shared.nonce, number), options).map_err(|error| ("create", error))?;
    let (mut generations, mut bytes) = (vec![0; BLOCKS as usize], vec![0; BLOCK_BYTES]);
    for round in 0.. {
        if shared.is_over.load(Ordering::Relaxed) {
            break;
        }
        // A walk that visits every block and is not sequential.
        let block = (round * 37 + number) % BLOCKS;
        let (offset, generation) = (block * BLOCK_BYTES as u64, (round / BLOCKS + 1) as u32);
        source(shared.nonce, number, generation).fill(offset, &mut bytes);
        timed("write", &mut || file.write_at(&bytes, offset).map(|_| ()))?;
        generations[block as usize] = generation;
        timed("read", &mut || file.read_at(&mut bytes, offset).map(|_| ()))?;
        if round % 8 == 0 {
            let other = format!("{}.{round}", name(shared.nonce, number));
            timed("create", &mut || client.create(&other, options)?.close())?;
            timed("stat", &mut || client.stat(&other).map(|_| ()))?;
            timed("unlink", &mut || client.unlink(&other))?;
        }
        if round % 32 == 0 {
            timed("fsync", &mut || file.sync())?;
        }
        work.rounds.store(round + 1, Ordering::Relaxed);
    }
    file.sync().map_err(|error| ("fsync", error))?;
    file.close().map_err(|error| ("close", error))?;
    Ok(generations)
}

/// Compares what was acknowledged, read past the I/O nodes, and removes it; how many blocks.
fn verify(config: &Config, nonce: u64, written: &[Vec<u32>]) -> Result<u64> {
    let client = connect(config, u64::MAX, Via::Direct)?;
    let (mut bytes, mut verified) = (vec![0; BLOCK_BYTES], 0);
    for (number, generations) in (0u64..).zip(written) {
        let file = client.open(name(nonce, number), false)?;
        for (block, generation) in (0u64..).zip(generations).filter(|(_, generation)| **generation > 0) {
            let offset = block * BLOCK_BYTES as u64;
            let len = file.read_at(&mut bytes, offset)?;
            ensure!(len == BLOCK_BYTES, "{} of {BLOCK_BYTES} bytes of block {block} of client {number}", len);
            source(nonce, number, *generation).check(offset, &bytes)?;
            verified += 1;
        }
        file.close()?;
        client.unlink(name(nonce, number))?;
    }
    Ok(verified)
}
