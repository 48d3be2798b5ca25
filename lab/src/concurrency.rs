//! `impresario-lab concurrency`: the cost of a request at a server by the number of concurrent requests.

use std::any::Any;
use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use impresario_base::Random;
use impresario_base::statistics::{Interval, mean};
use impresario_base::units::{parse_positive_bytes, show_bytes};
use impresario_sched::PolicySpec;
use impresario_workload::access::{Identity, Target};
use impresario_workload::children::Children;
use impresario_workload::cluster::{self, OwnCluster, Plan};
use impresario_workload::cpu::process_cpu;
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::rounds::shuffled;
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use serde::Serialize;
use serde_json::json;

use crate::client_program::{self, LIBGFAPI, LIBNFS, Library};
use crate::command::datapath::minimal_cluster;
use crate::server_bench::until_ready;
use crate::{free_port, impresario, nfs_ganesha, report};

/// Measure what a request costs a server while 1 to 64 others are there
///
/// Random reads of a file in memory, at one data server of ours, a minimal TCP server, nfs-ganesha (by libnfs, a connection
/// for each request) and a GlusterFS brick (by libgfapi, one connection). A server that is not installed or does not start
/// is named. The others need the Debian packages nfs-ganesha-vfs, libnfs-dev, glusterfs-server, libglusterfs-dev and gcc,
/// and root's rights.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of requests at once
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64], value_name = "N")]
    concurrency: Vec<u32>,
    /// Sizes of the reads
    #[arg(long, value_delimiter = ',', default_values = ["16k", "256k"], value_parser = parse_positive_bytes, value_name = "SIZE")]
    sizes: Vec<u64>,
    /// Time of each measurement, s
    #[arg(long, default_value_t = 0.6, value_name = "SECONDS")]
    seconds: f64,
    /// Repetitions of each measurement, in random order
    #[arg(long, default_value_t = 3, value_name = "N")]
    repetitions: u32,
    /// Only servers whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The file that is read, bytes.
const FILE_BYTES: u64 = 64 << 20;
const WARM_UP: Duration = Duration::from_millis(200);
const START_PATIENCE: Duration = Duration::from_secs(20);
const READERS: &str = include_str!("concurrency/readers.c");

/// One measurement.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Sample {
    server: &'static str,
    read_bytes: u64,
    concurrency: u32,
    requests_per_s: f64,
    /// Processor time of the server per request, µs.
    server_cpu_us: f64,
}

/// A running server.
struct Subject {
    name: &'static str,
    pid: u32,
    client: Client,
    /// Ends it when dropped.
    _server: Box<dyn Any>,
}

enum Client {
    /// Threads of this process, each with its own client.
    Threads(Box<dyn Target>),
    /// A program that takes size, concurrency and seconds after these words.
    Program(Vec<String>),
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let stop = catch_signals()?;
    let dir = cluster::folder(None)?;
    type Start = fn(&Path, &Stop) -> Result<Subject>;
    let servers: [(&str, Start); 4] =
        [("impresario", ours), ("minimal", minimal), ("nfs-ganesha", ganesha), ("glusterfs", gluster)];
    let (mut subjects, mut missing) = (Vec::new(), Vec::new());
    for (name, start) in servers.into_iter().filter(|(n, _)| args.only.as_ref().is_none_or(|only| n.contains(only))) {
        match start(dir.path(), &stop) {
            Ok(subject) => subjects.push(subject),
            Err(error) if stop.is_set() => return Err(error),
            Err(error) => missing.push(format!("{name} could not be started: {error:#}")),
        }
    }
    let cases = subjects.len() * args.sizes.len() * args.concurrency.len();
    let order = shuffled(cases * args.repetitions.max(1) as usize, &mut Random::new(1));
    let (mut samples, mut line) = (Vec::new(), Progress::new());
    for (done, nth) in order.iter().enumerate() {
        stop.check()?;
        let (case, subject) = (nth % cases / subjects.len(), &subjects[nth % subjects.len()]);
        let concurrency = args.concurrency[case % args.concurrency.len()];
        let read_bytes = args.sizes[case / args.concurrency.len()];
        line.show(&format!("{} of {}: {}, {concurrency} at once", done + 1, order.len(), subject.name));
        let measured = subject.measure(read_bytes, concurrency, args.seconds);
        samples.push(measured.with_context(|| format!("{}, {concurrency} at once", subject.name))?);
    }
    line.end();
    let measured = json!({ "samples": samples, "missing": missing });
    report(&table(&samples, args, &missing), args.json.as_deref(), &measured)
}

impl Subject {
    fn measure(&self, read_bytes: u64, concurrency: u32, seconds: f64) -> Result<Sample> {
        let cpu = || process_cpu(self.pid).with_context(|| format!("{} has ended", self.name));
        let (requests, took_s, used) = match &self.client {
            Client::Threads(target) => by_threads(target.as_ref(), read_bytes, concurrency, seconds, &cpu)?,
            Client::Program(words) => by_program(words, read_bytes, concurrency, seconds, &cpu)?,
        };
        ensure!(requests > 0, "no read ended within {seconds} s");
        Ok(Sample {
            server: self.name,
            read_bytes,
            concurrency,
            requests_per_s: requests as f64 / took_s,
            server_cpu_us: used.as_secs_f64() * 1e6 / requests as f64,
        })
    }
}

/// Requests, seconds, and processor time of the server.
type Measured = (u64, f64, Duration);

fn identity() -> Identity {
    Identity { job: 1, node: None, wire_max_bytes: None, name: "concurrency".into() }
}

fn by_threads(
    target: &dyn Target,
    read_bytes: u64,
    concurrency: u32,
    seconds: f64,
    cpu: &dyn Fn() -> Result<Duration>,
) -> Result<Measured> {
    let (done, stopping) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..concurrency)
            .map(|n| {
                let (done, stopping) = (&done, &stopping);
                scope.spawn(move || -> Result<()> {
                    let file = target.connect(identity())?.open("data", false)?;
                    let (mut buffer, mut random) = (vec![0; read_bytes as usize], Random::new(n.into()));
                    while !stopping.load(Ordering::Relaxed) {
                        let offset = random.below(FILE_BYTES / read_bytes) * read_bytes;
                        ensure!(file.read_at(&mut buffer, offset)? as u64 == read_bytes, "a short read");
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        // Connecting takes time too: after this many reads, all threads have begun.
        let patience = Instant::now() + START_PATIENCE;
        while done.load(Ordering::Relaxed) < u64::from(concurrency) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(WARM_UP);
        let (started, before, used) = (Instant::now(), done.load(Ordering::Relaxed), cpu());
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let (requests, took_s) = (done.load(Ordering::Relaxed) - before, started.elapsed().as_secs_f64());
        let used_after = cpu();
        stopping.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok((requests, took_s, used_after? - used?))
    })
}

fn by_program(
    words: &[String],
    read_bytes: u64,
    concurrency: u32,
    seconds: f64,
    cpu: &dyn Fn() -> Result<Duration>,
) -> Result<Measured> {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args([read_bytes.to_string(), concurrency.to_string(), seconds.to_string()]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().context(words[0].clone())?;
    let mut lines = BufReader::new(child.stdout.take().context("its output")?).lines();
    let mut line = || -> Result<String> { Ok(lines.next().context("the reader ended early")??) };
    let measured = line().and_then(|_| {
        let used = cpu()?;
        let counted = line()?;
        let used = cpu()? - used;
        let (requests, took_s) = counted.split_once(' ').context("what the reader printed")?;
        Ok((requests.parse()?, took_s.parse()?, used))
    });
    // It ends on its own after its last line, or has failed.
    child.wait()?;
    measured
}

fn ours(_: &Path, stop: &Stop) -> Result<Subject> {
    let plan = Plan {
        data_servers: 1,
        io_nodes: 0,
        data_policy: PolicySpec::named("none"),
        program: Some(impresario()?),
        ..Plan::default()
    };
    let server = OwnCluster::start(&plan, stop)?;
    let pid = server.pids().into_iter().find(|(name, _)| name == "data.0").context("the data server")?.1;
    threads("impresario", pid, Box::new(Storage::of(&server).direct()), server)
}

fn minimal(dir: &Path, stop: &Stop) -> Result<Subject> {
    let (children, target) = minimal_cluster(1, dir, stop)?;
    let pid = *target.pids.first().context("the minimal server")?;
    threads("minimal", pid, Box::new(target), children)
}

/// A subject that threads of this process read, with its file.
fn threads(name: &'static str, pid: u32, target: Box<dyn Target>, server: impl Any) -> Result<Subject> {
    let file = target.connect(identity())?.create("data")?;
    let piece: Vec<u8> = (0..1 << 20).map(|i: u32| (i ^ i >> 8) as u8).collect();
    for offset in (0..FILE_BYTES).step_by(piece.len()) {
        file.write_at(&piece, offset)?;
    }
    Ok(Subject { name, pid, client: Client::Threads(target), _server: Box::new(server) })
}

fn ganesha(dir: &Path, stop: &Stop) -> Result<Subject> {
    let (folder, port) = (dir.join("ganesha"), free_port()?);
    let export = folder.join("export");
    let reader = prepare(&folder, &export, &LIBNFS)?;
    let mut children = Children::default();
    nfs_ganesha::start(&mut children, &folder, &export, nfs_ganesha::Version::Four { port })?;
    let url = format!("nfs://127.0.0.1/export?version=4&nfsport={port}");
    served("nfs-ganesha", children, &reader, &url, stop)
}

fn gluster(dir: &Path, stop: &Stop) -> Result<Subject> {
    let (folder, port) = (dir.join("gluster"), free_port()?);
    let brick = folder.join("export");
    let reader = prepare(&folder, &brick, &LIBGFAPI)?;
    let server = format!(
        "volume posix\n type storage/posix\n option directory {}\nend-volume\n\
         volume locks\n type features/locks\n subvolumes posix\nend-volume\n\
         volume threads\n type performance/io-threads\n subvolumes locks\nend-volume\n\
         volume server\n type protocol/server\n option transport-type tcp\n\
         option transport.socket.bind-address 127.0.0.1\n option transport.socket.listen-port {port}\n\
         option auth.addr.threads.allow *\n subvolumes threads\nend-volume\n",
        brick.display()
    );
    let client = format!(
        "volume client\n type protocol/client\n option transport-type tcp\n option remote-host 127.0.0.1\n\
         option remote-port {port}\n option remote-subvolume threads\nend-volume\n"
    );
    let files = [("server.conf", server), ("client.vol", client)];
    let where_ = folder.join("client.vol").display().to_string();
    served("glusterfs", start_brick("glusterfsd", &folder, &files)?, &reader, &where_, stop)
}

/// The exported folder with the file in it, and the program that reads it.
fn prepare(folder: &Path, export: &Path, library: &Library) -> Result<PathBuf> {
    std::fs::create_dir_all(export)?;
    let bytes: Vec<u8> = (0..FILE_BYTES as u32).map(|i| (i ^ i >> 8) as u8).collect();
    std::fs::write(export.join("data"), bytes)?;
    client_program::build(folder, "readers", READERS, library)
}

/// Starts glusterfsd, or another `program` in its place, with its configuration in `folder`.
fn start_brick(program: &str, folder: &Path, files: &[(&str, String)]) -> Result<Children> {
    for (file, text) in files {
        std::fs::write(folder.join(file), text)?;
    }
    let at = |file: &str| folder.join(file).display().to_string();
    let arguments =
        ["-N", "-f", &at("server.conf"), "-l", &at("server.log"), "-p", &at("server.pid")].map(String::from);
    let mut children = Children::default();
    children.start("glusterfs", Path::new(program), &arguments, &folder.join("output.log"))?;
    Ok(children)
}

/// Waits until the file of a server that was just started can be read.
fn served(name: &'static str, mut children: Children, reader: &Path, address: &str, stop: &Stop) -> Result<Subject> {
    let pid = children.pids().first().context("the server")?.1;
    let words = vec![reader.display().to_string(), address.into(), "/data".into(), FILE_BYTES.to_string()];
    let subject = Subject { name, pid, client: Client::Program(words), _server: Box::new(()) };
    let (until, why) = (Instant::now() + START_PATIENCE, Cell::new(String::new()));
    let ready = || subject.measure(4096, 1, 0.01).map_err(|error| why.set(format!("{error:#}"))).is_ok();
    until_ready(&mut children, until, stop, ready, || format!("its file cannot be read: {}", why.take()))?;
    Ok(Subject { _server: Box::new(children), ..subject })
}

/// A row for each server, size and concurrency, and the slope of the processor time by concurrency.
fn table(samples: &[Sample], args: &Args, missing: &[String]) -> String {
    let mut out = format!(
        "{:<12} {:>8} {:>8} {:>11} {:>8} {:>12} {:>22}\n",
        "server", "read", "at once", "requests/s", "MiB/s", "µs a request", "server CPU µs/request"
    );
    let mut servers: Vec<&str> = Vec::new();
    samples.iter().for_each(|s| {
        if !servers.contains(&s.server) {
            servers.push(s.server)
        }
    });
    servers.sort_unstable();
    for server in servers {
        for &read_bytes in &args.sizes {
            let mut points = Vec::new();
            for &concurrency in &args.concurrency {
                let own = |s: &&Sample| (s.server, s.read_bytes, s.concurrency) == (server, read_bytes, concurrency);
                let of = |f: &dyn Fn(&Sample) -> f64| samples.iter().filter(own).map(f).collect::<Vec<f64>>();
                let (rate, cpu) = (mean(&of(&|s| s.requests_per_s)), Interval::of(&of(&|s| s.server_cpu_us)));
                // A single request pays for waking the server; concurrent ones share that.
                if concurrency > 1 {
                    points.push((f64::from(concurrency), cpu.mean));
                }
                out += &format!(
                    "{server:<12} {:>8} {concurrency:>8} {rate:>11.0} {:>8.0} {:>12.0} {:>11.1} ± {:>6.1}\n",
                    show_bytes(read_bytes as f64),
                    rate * read_bytes as f64 / f64::from(1 << 20),
                    f64::from(concurrency) * 1e6 / rate,
                    cpu.mean,
                    cpu.high - cpu.mean,
                );
            }
            if points.len() > 1 {
                out += &format!("{server:<12} each beyond the second adds {:.2} µs (least squares)\n", slope(&points));
            }
        }
    }
    missing.iter().for_each(|line| out += &format!("{line}\n"));
    out
}

/// Least squares.
fn slope(points: &[(f64, f64)]) -> f64 {
    let (x, y): (Vec<f64>, Vec<f64>) = points.iter().copied().unzip();
    let (x, y) = (mean(&x), mean(&y));
    let over = |f: &dyn Fn(f64, f64) -> f64| points.iter().map(|(a, b)| f(a - x, b - y)).sum::<f64>();
    over(&|a, b| a * b) / over(&|a, _| a * a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_workload::memory::Memory;

    #[test]
    fn threads_read_what_is_there_and_the_table_tells_the_slope() {
        let subject = threads("memory", std::process::id(), Box::new(Memory::default()), ()).unwrap();
        let samples: Vec<Sample> = [2, 4].map(|n| subject.measure(16 << 10, n, 0.05).unwrap()).into();
        assert!(samples.iter().all(|s| s.requests_per_s > 10.0 && s.server_cpu_us > 0.0), "{samples:?}");
        let args = Args {
            concurrency: vec![2, 4],
            sizes: vec![16 << 10],
            seconds: 0.05,
            repetitions: 1,
            only: None,
            json: None,
        };
        let text = table(&samples, &args, &["x could not be started: it is not there".into()]);
        assert_eq!(text.lines().count(), 5, "{text}");
        assert!(text.contains("16 KiB") && text.contains("each beyond the second adds"), "{text}");
        assert!((slope(&[(1.0, 10.0), (2.0, 12.5), (3.0, 15.0)]) - 2.5).abs() < 1e-9);
    }

    #[test]
    fn a_server_that_is_not_installed_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = start_brick("/nowhere/at/all", dir.path(), &[]).err().unwrap();
        assert!(format!("{error:#}").contains("/nowhere/at/all"), "{error:#}");
    }
}
