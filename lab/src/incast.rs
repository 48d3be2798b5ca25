//! `impresario-lab incast`: many I/O nodes that send to one server at the same time, through a switch whose port toward the server
//! has a small buffer; and the simulator's model of that beside it.

mod network;

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use impresario_base::Random;
use impresario_base::statistics::{Interval, mean};
use impresario_base::units::{parse_positive_bytes, show_bytes};
use impresario_client::{Identity, Link, LinkOptions};
use impresario_config::{Config, Data, Security};
use impresario_sched::PolicySpec;
use impresario_sim::Scenario;
use impresario_sim::model::{Application, Device, Network, Operation, Pattern, Servers};
use impresario_wire::{Answer, Call, FileKey, Role};
use impresario_workload::children::Children;
use impresario_workload::cluster;
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs};
use impresario_workload::rounds::shuffled;
use impresario_workload::stop::Stop;
use network::{Namespace, Room, SERVER};
use serde::{Deserialize, Serialize};

use crate::server_bench::until_ready;
use crate::{impresario, print};

/// Measure what a data server receives from many I/O nodes that send at the same time
///
/// All send a unit each, at the same instant, and begin again when the last of them has its answer. Their packets meet at a port
/// of a switch toward the server (a token bucket with a bounded queue, in network namespaces: needs root's rights and the
/// package iproute2). What does not fit there is lost, and whoever loses the end of what it has sent waits for a timeout.
/// Beside our data server a bare socket that receives and answers a byte, and what the simulator says for the same.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of senders
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64], value_name = "N")]
    senders: Vec<u32>,
    /// What each sends at a time
    #[arg(long, value_delimiter = ',', default_values = ["64k", "256k"], value_parser = parse_positive_bytes, value_name = "SIZE")]
    units: Vec<u64>,
    /// Buffers of the port
    #[arg(long, value_delimiter = ',', default_values = ["64k", "256k"], value_parser = parse_positive_bytes, value_name = "SIZE")]
    buffers: Vec<u64>,
    /// Rate of the port, Mbit/s
    #[arg(long, default_value_t = 200, value_name = "RATE")]
    mbit: u64,
    /// Congestion control of the senders; a namespace takes only those that the kernel allows to all
    #[arg(long, default_value = "reno", value_name = "NAME")]
    congestion: String,
    /// Time of each measurement, s
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    seconds: f64,
    /// Repetitions of each measurement, in random order
    #[arg(long, default_value_t = 3, value_name = "N")]
    repetitions: u32,
    /// Write every run to a file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

const PORT: u16 = 7100;
const START_PATIENCE: Duration = Duration::from_secs(20);
/// A call that took longer would be a fault of the server, not of the network.
const CALL_MAX: Duration = Duration::from_secs(60);

/// What a sender talks to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Receiver {
    /// Our data server: a write, answered when it is done.
    Impresario,
    /// A bare socket.
    Socket,
}

impl Receiver {
    fn name(self) -> &'static str {
        match self {
            Receiver::Impresario => "impresario",
            Receiver::Socket => "socket",
        }
    }
}

/// One measurement.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Sample {
    receiver: Receiver,
    senders: u32,
    unit_bytes: u64,
    buffer_bytes: u64,
    bits_per_s: u64,
    rounds: u64,
    /// What all have sent, by the time that it took, bytes a second.
    goodput: f64,
    /// Timeouts, segments sent again, and packets dropped at the port.
    timeouts: u64,
    resent: u64,
    dropped: u64,
}

/// The situation of a sample.
type Case = (Receiver, u64, u64, u32);

impl Sample {
    fn case(&self) -> Case {
        (self.receiver, self.unit_bytes, self.buffer_bytes, self.senders)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.csv.as_deref()])?;
    ensure!(!args.senders.contains(&0), "--senders: at least one sends");
    let stop = catch_signals()?;
    let dir = cluster::folder(None)?;
    let room = Room::new(&args.congestion)?;
    let mut server = data_server(&room, dir.path(), &stop)?;
    let socket = bare_server(&room)?;
    let mut cases: Vec<Case> = Vec::new();
    for receiver in [Receiver::Impresario, Receiver::Socket] {
        for unit in &args.units {
            for buffer in &args.buffers {
                cases.extend(args.senders.iter().map(|senders| (receiver, *unit, *buffer, *senders)));
            }
        }
    }
    let order = shuffled(cases.len() * args.repetitions.max(1) as usize, &mut Random::new(1));
    let (mut samples, mut line) = (Vec::new(), Progress::new());
    for (done, nth) in order.iter().enumerate() {
        let case = cases[nth % cases.len()];
        stop.check()?;
        server.check()?;
        line.show(&format!("{} of {}: {}, {} send", done + 1, order.len(), case.0.name(), case.3));
        let measured = measure(&room, case, socket, args);
        samples.push(measured.with_context(|| format!("{}, {} senders", case.0.name(), case.3))?);
    }
    line.end();
    let text = table(&cases, &samples)?;
    all_written([print(text.as_bytes()).map(drop), write_csv(args.csv.as_deref(), &samples)])?;
    Ok(ExitCode::SUCCESS)
}

/// A data server alone, in its namespace.
fn data_server(room: &Room, dir: &Path, stop: &Stop) -> Result<Children> {
    let mut data = Data::new("data.0", format!("{SERVER}:{PORT}"), dir.join("data.0"));
    data.policy = PolicySpec::named("none");
    let mut config = Config { data: vec![data], ..Config::default() };
    (config.meta.address, config.meta.dir) = (format!("{SERVER}:{}", PORT + 1), dir.join("meta"));
    // The network is nobody else's.
    config.cluster.security = Security::None;
    let file = dir.join("impresario.toml");
    std::fs::write(&file, config.to_toml())?;
    let (program, file) = (impresario()?, file.display().to_string());
    let made = Command::new(&program).args(["store", "init", &file, "--all"]).stdout(Stdio::null()).status()?;
    ensure!(made.success(), "the data server's folder could not be made in {}", dir.display());
    let log = dir.join("data.0.log");
    // By this thread, as the server ends with the thread that has started it.
    let (own, mut children) = (Namespace::own()?, Children::default());
    room.server.enter()?;
    let started = children.start("data.0", &program, &["serve", &*file, "--name", "data.0"].map(String::from), &log);
    own.enter()?;
    started?;
    let (until, why) = (Instant::now() + START_PATIENCE, Cell::new(String::new()));
    let answers = || room.clients.within(|| Sender::new(Receiver::Impresario, 0, 4096, PORT)?.send());
    let ready = || answers().map_err(|error| why.set(format!("{error:#}"))).is_ok();
    until_ready(&mut children, until, stop, ready, || format!("the data server does not answer: {}", why.take()))?;
    Ok(children)
}

/// The port of a server that receives units of a length that the client names first, and answers each with a byte. It ends with
/// this program.
fn bare_server(room: &Room) -> Result<u16> {
    let listener = room.server.within(|| Ok(TcpListener::bind((SERVER, 0))?))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            std::thread::spawn(move || drop(receive(socket)));
        }
    });
    Ok(port)
}

fn receive(mut socket: TcpStream) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let mut len = [0; 8];
    socket.read_exact(&mut len)?;
    // Of this program's own clients.
    let mut unit = vec![0; u64::from_le_bytes(len).min(64 << 20) as usize];
    loop {
        socket.read_exact(&mut unit)?;
        socket.write_all(&[1])?;
    }
}

/// What sends a unit and waits for the answer.
enum Sender {
    Impresario { link: Box<Link>, file: FileKey, unit: Vec<u8> },
    Socket { socket: TcpStream, unit: Vec<u8> },
}

impl Sender {
    /// From the namespace of the calling thread.
    fn new(to: Receiver, number: u32, unit_bytes: u64, port: u16) -> Result<Sender> {
        let unit = vec![number as u8; unit_bytes as usize];
        Ok(match to {
            Receiver::Impresario => {
                let identity = Arc::new(Identity::draw(0, 0)?);
                let options = LinkOptions {
                    who: identity.who(),
                    timeout: CALL_MAX,
                    keep_trying: false,
                    ..LinkOptions::new(Role::Data, 64 << 20)
                };
                let link = Box::new(Link::new(&[("data.0", &format!("{SERVER}:{port}"))], identity, options)?);
                Sender::Impresario { link, file: FileKey(u64::from(number) + 1), unit }
            }
            Receiver::Socket => {
                let mut socket = TcpStream::connect((SERVER, port))?;
                socket.set_nodelay(true)?;
                socket.set_read_timeout(Some(CALL_MAX))?;
                socket.set_write_timeout(Some(CALL_MAX))?;
                socket.write_all(&unit_bytes.to_le_bytes())?;
                Sender::Socket { socket, unit }
            }
        })
    }

    fn send(&mut self) -> Result<()> {
        match self {
            Sender::Impresario { link, file, unit } => {
                let call = Call::Write { who: link.identity().who(), file: *file, lane_offset: 0 };
                let reply = link.call(call, &[IoSlice::new(unit)], None, Instant::now() + CALL_MAX)?;
                ensure!(reply.answer == Answer::Written(unit.len() as u32), "the data server says {:?}", reply.answer);
            }
            Sender::Socket { socket, unit } => {
                socket.write_all(unit)?;
                socket.read_exact(&mut [0])?;
            }
        }
        Ok(())
    }
}

/// Rounds of all senders together, for the time of a measurement.
fn measure(room: &Room, case: Case, socket: u16, args: &Args) -> Result<Sample> {
    let (receiver, unit_bytes, buffer_bytes, senders) = case;
    let bits_per_s = args.mbit * 1_000_000;
    room.limit(bits_per_s, buffer_bytes)?;
    let port = if receiver == Receiver::Socket { socket } else { PORT };
    let (gate, deadline, goes_on) = (Barrier::new(senders as usize), OnceLock::new(), AtomicBool::new(true));
    let before = (room.waits()?, room.dropped()?);
    let one = |number: u32| -> Result<(u64, Duration)> {
        // Who fails would keep the others at the gate: it goes on with them, and says so in the end.
        let mut failed = None;
        let mut sender = room.clients.enter().and_then(|()| {
            let mut sender = Sender::new(receiver, number, unit_bytes, port)?;
            sender.send()?;
            Ok(sender)
        });
        let (mut rounds, mut all) = (0, Duration::ZERO);
        loop {
            // One of them says whether there is another round.
            if gate.wait().is_leader() {
                let until = deadline.get_or_init(|| Instant::now() + Duration::from_secs_f64(args.seconds));
                goes_on.store(Instant::now() < *until, Ordering::Relaxed);
            }
            gate.wait();
            if !goes_on.load(Ordering::Relaxed) {
                break;
            }
            let began = Instant::now();
            if let Ok(sender) = &mut sender {
                failed = failed.or(sender.send().err());
            }
            gate.wait();
            (rounds, all) = (rounds + 1, all + began.elapsed());
        }
        sender?;
        failed.map_or(Ok((rounds, all)), Err)
    };
    let results: Vec<Result<(u64, Duration)>> = std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..senders).map(|number| scope.spawn(move || one(number))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let results = results.into_iter().collect::<Result<Vec<_>>>()?;
    let (rounds, took) = results.first().copied().context("no sender")?;
    ensure!(rounds > 0, "no round ended within {} s", args.seconds);
    let ((timeouts, resent), dropped) = (room.waits()?, room.dropped()?);
    Ok(Sample {
        receiver,
        senders,
        unit_bytes,
        buffer_bytes,
        bits_per_s,
        rounds,
        goodput: (rounds * unit_bytes * u64::from(senders)) as f64 / took.as_secs_f64(),
        timeouts: timeouts - before.0.0,
        resent: resent - before.0.1,
        dropped: dropped.saturating_sub(before.1),
    })
}

/// The same in the simulator: processes that each write a unit to one data server and meet at a barrier, no device below.
fn simulated(case: Case, bits_per_s: u64) -> Scenario {
    let (_, unit_bytes, buffer_bytes, senders) = case;
    let flash = impresario_device::FlashParams {
        channels: 1024,
        write_us: 0.0,
        write_bytes_per_s: 1e12,
        ..impresario_device::FlashParams::default()
    };
    Scenario {
        request_timeout_ms: 600_000,
        network: Network {
            latency_us: 20.0,
            jitter_us: 5.0,
            server_bytes_per_s: bits_per_s as f64 / 8.0,
            quantum_bytes: SEGMENT_BYTES,
            port_buffer_bytes: buffer_bytes,
            ..Network::default()
        },
        servers: Servers {
            count: 1,
            stripe_bytes: 1 << 30,
            in_flight: 0,
            cpu_us: 5.0,
            device: "memory".into(),
            ..Servers::default()
        },
        device: [("memory".to_string(), Device::Flash(flash))].into(),
        application: vec![Application {
            processes: senders,
            op: Operation::Write,
            pattern: Pattern::FilePerProcess,
            request_bytes: unit_bytes,
            requests: SIMULATED_ROUNDS,
            jitter_us: 20.0,
            barrier_requests: 1,
            ..Application::default()
        }],
        ..Scenario::default()
    }
}

/// What a packet of Ethernet carries of TCP.
const SEGMENT_BYTES: u64 = 1448;
const SIMULATED_ROUNDS: u64 = 8;

/// The goodput that the simulator says for a case, bytes a second.
fn model(case: Case, bits_per_s: u64) -> Result<f64> {
    let outcome = impresario_sim::run(&simulated(case, bits_per_s))?;
    if let Some(violation) = outcome.violations.first() {
        bail!("the simulation broke a law: {violation}");
    }
    Ok((case.1 * u64::from(case.3) * SIMULATED_ROUNDS) as f64 / outcome.makespan_s)
}

/// A row for each case.
fn table(cases: &[Case], samples: &[Sample]) -> Result<String> {
    let mut out = format!(
        "{:<11} {:>8} {:>8} {:>7}  {:>20} {:>10} {:>16} {:>8}\n",
        "receiver", "unit", "buffer", "senders", "goodput, MB/s", "simulated", "timeouts a round", "dropped"
    );
    for case in cases {
        let own: Vec<&Sample> = samples.iter().filter(|sample| sample.case() == *case).collect();
        let Some(first) = own.first() else { continue };
        let goodput = Interval::of(&own.iter().map(|sample| sample.goodput / 1e6).collect::<Vec<_>>());
        let sum = |of: fn(&Sample) -> u64| own.iter().map(|sample| of(sample)).sum::<u64>() as f64;
        let dropped = mean(&own.iter().map(|sample| sample.dropped as f64).collect::<Vec<_>>());
        let _ = writeln!(
            out,
            "{:<11} {:>8} {:>8} {:>7}  {:>11.1} ± {:>6.1} {:>10.1} {:>16.2} {:>8.0}",
            case.0.name(),
            show_bytes(case.1 as f64),
            show_bytes(case.2 as f64),
            case.3,
            goodput.mean,
            goodput.high - goodput.mean,
            model(*case, first.bits_per_s)? / 1e6,
            sum(|sample| sample.timeouts) / sum(|sample| sample.rounds),
            dropped,
        );
    }
    Ok(out)
}

const HEAD: &str = "receiver,senders,unit_bytes,buffer_bytes,bits_per_s,rounds,goodput,timeouts,resent,dropped";

fn write_csv(file: Option<&Path>, samples: &[Sample]) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let mut text = format!("{HEAD}\n");
    for s in samples {
        let Sample {
            senders, unit_bytes, buffer_bytes, bits_per_s, rounds, goodput, timeouts, resent, dropped, ..
        } = s;
        let _ = writeln!(
            text,
            "{},{senders},{unit_bytes},{buffer_bytes},{bits_per_s},{rounds},{goodput:.0},{timeouts},{resent},{dropped}",
            s.receiver.name()
        );
    }
    std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `impresario-lab incast --csv` wrote.
    const MEASURED: &str = include_str!("../data/incast.csv");

    fn measured() -> Vec<Sample> {
        let mut lines = MEASURED.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(lines.next(), Some(HEAD));
        let sample = |line: &str| {
            let words: Vec<&str> = line.split(',').collect();
            let number = |at: usize| words[at].parse::<u64>().unwrap();
            let receiver = if words[0] == "socket" { Receiver::Socket } else { Receiver::Impresario };
            Sample {
                receiver,
                senders: number(1) as u32,
                unit_bytes: number(2),
                buffer_bytes: number(3),
                bits_per_s: number(4),
                rounds: number(5),
                goodput: words[6].parse().unwrap(),
                timeouts: number(7),
                resent: number(8),
                dropped: number(9),
            }
        };
        lines.map(sample).collect()
    }

    /// The model collapses where real servers do and not elsewhere, and by as much within a factor.
    #[test]
    fn the_model_says_what_was_measured() {
        let samples = measured();
        let mut cases: Vec<Case> = Vec::new();
        samples.iter().map(Sample::case).filter(|case| case.0 == Receiver::Impresario).for_each(|case| {
            if !cases.contains(&case) {
                cases.push(case);
            }
        });
        assert!(cases.len() > 10);
        let (mut wrong, mut collapsed) = (Vec::new(), 0);
        for case in &cases {
            let own: Vec<&Sample> = samples.iter().filter(|sample| sample.case() == *case).collect();
            let real = mean(&own.iter().map(|sample| sample.goodput).collect::<Vec<_>>());
            let simulated = model(*case, own[0].bits_per_s).unwrap();
            let link = own[0].bits_per_s as f64 / 8.0;
            collapsed += u32::from(real < link / 2.0);
            let off = (simulated / real).max(real / simulated);
            if off > OFF_MAX {
                wrong.push(format!("{case:?}: {:.1} MB/s, simulated {:.1}", real / 1e6, simulated / 1e6));
            }
        }
        assert!(collapsed >= 3, "the measurement shows no collapse");
        assert!(wrong.len() <= cases.len() / 10, "off by more than {OFF_MAX} ×:\n{}", wrong.join("\n"));
    }

    /// How far the model may be from the mean of the measurements.
    const OFF_MAX: f64 = 3.0;

    #[test]
    fn a_bare_socket_receives_units_and_a_row_shows_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || receive(listener.accept().unwrap().0));
        let mut socket = TcpStream::connect(address).unwrap();
        socket.write_all(&1000u64.to_le_bytes()).unwrap();
        let mut sender = Sender::Socket { socket, unit: vec![7; 1000] };
        (0..3).for_each(|_| sender.send().unwrap());
        drop(sender);
        assert!(server.join().unwrap().is_err(), "it ends with its client");
        let case = (Receiver::Socket, 65_536, 65_536, 2);
        let sample = Sample {
            receiver: case.0,
            senders: case.3,
            unit_bytes: case.1,
            buffer_bytes: case.2,
            bits_per_s: 1_000_000_000,
            rounds: 10,
            goodput: 1e8,
            timeouts: 5,
            resent: 9,
            dropped: 9,
        };
        let text = table(&[case], std::slice::from_ref(&sample)).unwrap();
        assert!(text.contains("100.0 ±") && text.contains("0.50"), "{text}");
        let file = tempfile::NamedTempFile::new().unwrap();
        write_csv(Some(file.path()), &[sample]).unwrap();
        let written = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(written, format!("{HEAD}\nsocket,2,65536,65536,1000000000,10,100000000,5,9,9\n"));
    }
}
