//! Peers that send invalid data: every server refuses them, says why, and continues to serve others.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::support::Cluster;
use impresario_testing::PATIENCE;
use impresario_wire::{Answer, Call, ClientKey, FileKey, Hello, PROTOCOL_VERSION, Role, Who};
use impresario_workload::cpu::process_rss_bytes;

const MAGIC: u32 = u32::from_le_bytes(*b"IMP1");
const HELLO: u8 = 1;
const CALL: u8 = 3;
const ANSWER: u8 = 4;

/// A frame in wire format, written by hand: these tests must not trust the encoder.
fn frame(magic: u32, kind: u8, id: u64, body: &[u8], lens: (u32, u32)) -> Vec<u8> {
    let mut out = magic.to_le_bytes().to_vec();
    out.extend([kind, 0, 0, 0]);
    out.extend(id.to_le_bytes());
    out.extend(lens.0.to_le_bytes());
    out.extend(lens.1.to_le_bytes());
    out.extend(body);
    out
}

fn whole(kind: u8, id: u64, body: &[u8]) -> Vec<u8> {
    frame(MAGIC, kind, id, body, (body.len() as u32, 0))
}

fn hello(version: u32, role: Role) -> Vec<u8> {
    let who = Who { client: ClientKey(7), ..Who::default() };
    let hello = Hello { version, who, role, name: "a test".into(), cluster: Default::default(), credential: vec![] };
    whole(HELLO, 0, &postcard(&hello))
}

fn postcard(value: &impl serde::Serialize) -> Vec<u8> {
    postcard::to_allocvec(value).unwrap()
}

fn roles() -> [(&'static str, Role); 3] {
    [("data.0", Role::Data), ("meta", Role::Meta), ("io.0", Role::Io)]
}

fn connect(cluster: &Cluster, name: &str) -> TcpStream {
    let stream = TcpStream::connect(cluster.config.server(name).unwrap().address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends, and returns the reply up to the close of the connection by the server, which must follow.
#[track_caller]
fn send(stream: &mut TcpStream, bytes: &[u8], what: &str) -> Vec<u8> {
    // The server may close the connection in the middle of our write.
    let _ = stream.write_all(bytes);
    let mut back = Vec::new();
    match stream.read_to_end(&mut back) {
        Ok(_) => {}
        Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
        Err(e) => panic!("{what}: the server did not hang up: {e}"),
    }
    back
}

/// Splits the frames of a reply: (kind, body).
fn frames(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut out = Vec::new();
    while bytes.len() >= 24 {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let (body, payload) = (word(16), word(20));
        out.push((bytes[4], bytes[24..24 + body].to_vec()));
        bytes = &bytes[24 + body + payload..];
    }
    out
}

#[test]
fn nonsense_is_refused_and_others_are_served() {
    let mut cluster = Cluster::start(1, 1, |_| {});
    for (name, role) in roles() {
        let noise: Vec<u8> = (0..70_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let bad_body = [0xff; 40];
        let cases: Vec<(&str, Vec<u8>)> = vec![
            ("a web browser", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
            ("noise", noise),
            ("another magic number", frame(0x3250_4d49, HELLO, 0, &[0; 8], (8, 0))),
            ("an unknown kind", [hello(PROTOCOL_VERSION, role), whole(99, 1, &[0; 8])].concat()),
            ("a call before hello", whole(CALL, 1, &postcard(&Call::Status))),
            ("a body that is none", [hello(PROTOCOL_VERSION, role), whole(CALL, 1, &bad_body)].concat()),
            ("hello twice", [hello(PROTOCOL_VERSION, role), hello(PROTOCOL_VERSION, role)].concat()),
            ("an empty hello", whole(HELLO, 0, &[])),
        ];
        for (what, bytes) in cases {
            let mut stream = connect(&cluster, name);
            send(&mut stream, &bytes, &format!("{what} to {name}"));
        }
        cluster.state(name);
        assert!(cluster.server(name).child.try_wait().unwrap().is_none(), "{name} died");
    }
}

#[test]
fn another_version_and_another_role_are_told_apart_clearly() {
    let cluster = Cluster::start(1, 1, |_| {});
    for (name, role) in roles() {
        let mut stream = connect(&cluster, name);
        let back = send(&mut stream, &hello(PROTOCOL_VERSION + 41, role), "another version");
        let message = fault(&back, name);
        assert!(
            message.contains("version") && message.contains(&format!("{}", PROTOCOL_VERSION + 41)),
            "{name}: {message}"
        );

        let wrong = if role == Role::Data { Role::Meta } else { Role::Data };
        let mut stream = connect(&cluster, name);
        let back = send(&mut stream, &hello(PROTOCOL_VERSION, wrong), "another role");
        let message = fault(&back, name);
        assert!(message.contains(name), "a message names the server that was reached: {message}");
    }
}

#[track_caller]
fn fault(bytes: &[u8], name: &str) -> String {
    let frames = frames(bytes);
    let (kind, body) = frames.first().unwrap_or_else(|| panic!("{name} hung up without a word"));
    assert_eq!(*kind, ANSWER, "{name}");
    match postcard::from_bytes(body).unwrap() {
        Answer::Fault(fault) => fault.message,
        other => panic!("{name} answered {other:?}"),
    }
}

#[test]
fn truncated_frames_do_no_harm() {
    let cluster = Cluster::start(1, 1, |_| {});
    for (name, role) in roles() {
        let bytes = [hello(PROTOCOL_VERSION, role), whole(CALL, 1, &postcard(&Call::Status))].concat();
        for cut in 0..bytes.len() {
            let mut stream = connect(&cluster, name);
            let _ = stream.write_all(&bytes[..cut]);
            // Close the connection in the middle.
            drop(stream);
        }
        cluster.state(name);
    }
}

#[test]
fn a_frame_that_claims_4_gib_is_refused_without_the_memory() {
    let mut cluster = Cluster::start(1, 1, |_| {});
    for (name, role) in roles() {
        let pid = cluster.server(name).pid();
        let before = process_rss_bytes(pid).unwrap();
        let write = Call::Write { who: Who::default(), file: FileKey(1), lane_offset: 0 };
        let body = postcard(&write);
        for lens in [(body.len() as u32, u32::MAX), (u32::MAX, 0), (u32::MAX, u32::MAX), (1 << 20, 0)] {
            let mut stream = connect(&cluster, name);
            let bytes = [hello(PROTOCOL_VERSION, role), frame(MAGIC, CALL, 1, &body, lens)].concat();
            send(&mut stream, &bytes, &format!("{lens:?} to {name}"));
        }
        // The same before the handshake.
        let mut stream = connect(&cluster, name);
        send(&mut stream, &frame(MAGIC, HELLO, 0, &[0; 16], (u32::MAX, u32::MAX)), "a huge hello");
        let after = process_rss_bytes(pid).unwrap();
        assert!(after < before + 20_000_000, "{name} grew from {before} to {after} bytes");
        cluster.state(name);
    }
}

/// A silent peer must not keep others from being served, nor stay connected for ever.
#[test]
fn silent_peers_do_not_block_others() {
    let cluster = Cluster::start(1, 1, |_| {});
    for (name, role) in roles() {
        let silent: Vec<TcpStream> = (0..50).map(|_| connect(&cluster, name)).collect();
        let half: Vec<TcpStream> = (0..50)
            .map(|_| {
                let mut stream = connect(&cluster, name);
                stream.write_all(&hello(PROTOCOL_VERSION, role)[..30]).unwrap();
                stream
            })
            .collect();
        cluster.state(name);
        // Answered while they were still connected, not after the server had given them up.
        for mut stream in silent.into_iter().chain(half) {
            stream.set_nonblocking(true).unwrap();
            let error = stream.read(&mut [0]).expect_err("the server gave up a silent peer first");
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{name}");
        }
    }
}

#[test]
fn replies_are_read_even_when_the_peer_is_slow() {
    let cluster = Cluster::start(1, 0, |_| {});
    let mut stream = connect(&cluster, "data.0");
    let calls: Vec<u8> = (1..=2000).flat_map(|id| whole(CALL, id, &postcard(&Call::Status))).collect();
    stream.write_all(&hello(PROTOCOL_VERSION, Role::Data)).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let writing = std::thread::spawn(move || writer.write_all(&calls));
    // This client reads nothing for a while: others must be served meanwhile.
    std::thread::sleep(Duration::from_millis(500));
    cluster.state("data.0");
    let mut answers = 0;
    let mut header = [0u8; 24];
    while answers < 2001 {
        stream.read_exact(&mut header).unwrap();
        let len = u32::from_le_bytes(header[16..20].try_into().unwrap());
        let mut body = vec![0; len as usize];
        stream.read_exact(&mut body).unwrap();
        answers += 1;
    }
    writing.join().unwrap().unwrap();
}
