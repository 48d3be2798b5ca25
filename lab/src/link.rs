//! Measures a client's link beside bare sockets: `impresario-lab link`.
//!
//! The server answers reads with bytes from memory, one thread per connection, in the same way for both: receive a
//! small request, send 4 KiB or 1 MiB with one system call. The bare client sends 64 bytes and receives the reply into
//! its buffer. Rounds of the two alternate; the median of the paired ratios is shown.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_client::{Identity, Link, LinkOptions};
use impresario_transport::{FrameReader, Stream, TransportError, send_frame};
use impresario_wire::{
    Answer, Call, ClusterId, FileKey, Kind, Limits, PROTOCOL_VERSION, Role, Welcome, encode_frame, frame,
};

/// The server's patience; its single receives wait half as long.
const FAR: Duration = Duration::from_secs(7200);

fn serve_frames(socket: TcpStream) -> Result<(), TransportError> {
    let (stream, mut reader) = (Stream::from_tcp(socket, FAR / 2)?, FrameReader::default());
    let limits = Limits::of_server(1 << 20);
    let bytes = vec![1; 1 << 20];
    let end = Instant::now() + FAR;
    reader.next_frame(&stream, &limits, end)?;
    let (version, name, cluster) = (PROTOCOL_VERSION, "speed".into(), ClusterId::default());
    let (number, keys) = (None, Default::default());
    let welcome =
        Welcome { version, name, incarnation: 1, max_payload_bytes: 1 << 20, cluster, store: 0, number, keys };
    send_frame(&stream, &frame::encode(Kind::Welcome, 0, &welcome, 0)?, &[], end)?;
    let mut head = Vec::new();
    loop {
        let (header, body) = reader.next_frame(&stream, &limits, end)?;
        let Call::Read { len, .. } = frame::decode_body(body)? else { return Ok(()) };
        head.clear();
        encode_frame(Kind::Answer, header.id, &Answer::Data, len, &mut head)?;
        send_frame(&stream, &head, &[IoSlice::new(bytes.get(..len as usize).unwrap_or(&[]))], end)?;
    }
}

fn serve_bare(mut socket: TcpStream, answer_bytes: usize) -> std::io::Result<()> {
    let answer = vec![1; answer_bytes];
    let mut request = [0; 64];
    loop {
        socket.read_exact(&mut request)?;
        socket.write_all(&answer)?;
    }
}

fn listen(serve: impl Fn(TcpStream) + Send + Sync + Clone + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("the port taken").to_string();
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let _ = socket.set_nodelay(true);
            // Where BBR is the default, it would pace a loopback connection by a wrong estimate of the network.
            let _ = rustix::net::sockopt::set_tcp_congestion(&socket, "reno");
            let serve = serve.clone();
            std::thread::spawn(move || serve(socket));
        }
    });
    address
}

fn link(address: &str) -> Arc<Link> {
    let identity = Arc::new(Identity::draw(0, 0).expect("random numbers"));
    Arc::new(Link::new(&[("speed", address)], identity, LinkOptions::new(Role::Data, 1 << 20)).expect("an address"))
}

fn read(link: &Link, into: &mut [u8]) {
    let call = Call::Read { who: link.identity().who(), file: FileKey(1), lane_offset: 0, len: into.len() as u32 };
    let deadline = Instant::now() + Duration::from_secs(10);
    let reply = link.call(call, &[], Some(&mut [IoSliceMut::new(into)]), deadline).expect("an answer");
    assert_eq!(reply.len, into.len());
}

/// Round trips per second of `act` on each of `threads`.
fn rate(threads: usize, time: Duration, make: impl Fn() -> Box<dyn FnMut() + Send>) -> f64 {
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let acts: Vec<_> = (0..threads).map(|_| make()).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for mut act in acts {
            let (stop, count) = (&stop, &count);
            scope.spawn(move || {
                let mut done = 0;
                while !stop.load(Ordering::Relaxed) {
                    act();
                    done += 1;
                }
                count.fetch_add(done, Ordering::Relaxed);
            });
        }
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
    });
    count.into_inner() as f64 / started.elapsed().as_secs_f64()
}

/// Measure a client's link to a server beside bare sockets
#[derive(clap::Args)]
pub struct Args {
    /// How long each row takes, s
    #[arg(default_value_t = 10.0, value_name = "SECONDS")]
    seconds: f64,
    /// Only this row of the table, from 0
    #[arg(long, value_name = "N")]
    row: Option<usize>,
}

/// Prints a row for each size of answer and number of threads.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let time = Duration::from_secs_f64(args.seconds / 10.0);
    let framed = listen(|socket| drop(serve_frames(socket)));
    println!(
        "{:<10} {:>8} {:>14} {:>14} {:>16} {:>9}",
        "answer", "threads", "bare /s", "link /s", "link MiB/s", "ratio"
    );
    let row = args.row;
    let rows = [(4096, 1, true), (1 << 20, 1, true), (4096, 16, true), (1 << 20, 16, true), (4096, 16, false)];
    for (_, (answer_bytes, threads, shared)) in (0..).zip(rows).filter(|(i, _)| row.is_none_or(|row| row == *i)) {
        let bare = listen(move |socket| drop(serve_bare(socket, answer_bytes)));
        let mut pairs: Vec<(f64, f64)> = (0..5)
            .map(|_| {
                let one_socket = rate(threads, time, || {
                    let mut socket = TcpStream::connect(&bare).expect("our server");
                    socket.set_nodelay(true).expect("a TCP socket");
                    let mut bytes = vec![0; answer_bytes];
                    Box::new(move || {
                        socket.write_all(&[0; 64]).expect("our server");
                        socket.read_exact(&mut bytes).expect("our server");
                    })
                });
                let common = link(&framed);
                let linked = rate(threads, time, || {
                    let link = if shared { common.clone() } else { link(&framed) };
                    let mut bytes = vec![0; answer_bytes];
                    Box::new(move || read(&link, &mut bytes))
                });
                (one_socket, linked)
            })
            .collect();
        pairs.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
        let (bare, linked) = pairs[pairs.len() / 2];
        let how = if shared { "one link" } else { "own links" };
        let mib = linked * answer_bytes as f64 / f64::from(1 << 20);
        println!(
            "{answer_bytes:<10} {threads:>8} {bare:>14.0} {linked:>14.0} {mib:>16.0} {:>9.2}  {how}",
            linked / bare
        );
    }
    Ok(ExitCode::SUCCESS)
}
