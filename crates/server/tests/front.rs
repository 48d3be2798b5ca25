//! The front that all servers share, with a service that does next to nothing.

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_server::connection::{Connection, Reply};
use impresario_server::listener::{Incoming, Running, Server, Service, Settings, Vitals, before_waiting};
use impresario_server::outbox::Bulk;
use impresario_server::payload::Slice;
use impresario_testing::{free_address, until};
use impresario_wire::{Answer, Call, FileKey, Kind, PROTOCOL_VERSION, Role, decode_body};
use support::{Peer, encode, fault, hello, who};

/// Answers reads with zeros, keeps writes to `file` 9 unanswered until released, panics on `Sync` and on reads of `file` 13,
/// waits for `gate` before it reads `file` 7.
struct Toy {
    vitals: Vitals,
    sessions: AtomicU32,
    kept: Mutex<Vec<Reply>>,
    gate: Mutex<()>,
    /// Which threads served reads.
    threads: Mutex<HashSet<ThreadId>>,
}

impl Toy {
    fn new(vitals: Vitals) -> Arc<Toy> {
        let (sessions, kept, gate, threads) = Default::default();
        Arc::new(Toy { vitals, sessions, kept, gate, threads })
    }
}

impl Service for Toy {
    type Session = ();

    fn serves_at_once(&self, call: &Call) -> bool {
        matches!(call, Call::Read { len: ..=1000, .. })
    }

    fn open(&self, connection: &Arc<Connection>) -> Result<(), impresario_wire::Fault> {
        if connection.who().user == 666 {
            return Err(impresario_wire::Fault { errno: libc::EACCES, message: "not you".into() });
        }
        self.sessions.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn serve(&self, _: &mut (), request: Incoming, reply: Reply) {
        match request.call {
            Call::Read { file, len, .. } => {
                self.threads.lock().insert(std::thread::current().id());
                match file {
                    FileKey(7) => {
                        before_waiting();
                        drop(self.gate.lock());
                    }
                    FileKey(13) => panic!("a deliberate panic"),
                    _ => {}
                }
                let mut buffer = self.vitals.pool().buffer(len as usize);
                buffer.fill(0);
                reply.send_data(Bulk::One(Slice::new(Arc::new(buffer), 0..len as usize)));
            }
            Call::Write { file: FileKey(9), .. } => self.kept.lock().push(reply),
            Call::Write { .. } => reply.send(&Answer::Written(request.payload.map_or(0, |p| p.len()) as u32)),
            Call::Status => reply.send(&Answer::Text(self.status().to_string())),
            Call::Sync { .. } => panic!("a deliberate panic"),
            Call::ResetStatistics => drop(reply),
            _ => reply.fault(libc::ENOSYS, "not for toys"),
        }
    }

    fn close(&self, (): ()) {
        self.sessions.fetch_sub(1, Ordering::SeqCst);
    }

    fn status(&self) -> serde_json::Value {
        let mut status = self.vitals.status();
        status.insert("kept".into(), self.kept.lock().len().into());
        serde_json::Value::Object(status)
    }
}

fn settings() -> Settings {
    Settings {
        name: "toy".into(),
        role: Role::Data,
        max_connections: 4,
        max_connections_per_address: 1024,
        payload_bytes_per_address: 4 << 20,
        max_payload_bytes: 1 << 20,
        payload_bytes: 4 << 20,
        payload_patience: Duration::from_millis(200),
        poll: Duration::from_micros(50),
        membership: Arc::default(),
        store: 0,
        number: None,
        boot: None,
        keys: None,
        protect: impresario_config::Protect::Headers,
        exports: None,
        certificates: None,
        munge: Default::default(),
        place: String::new(),
    }
}

fn start(address: &str) -> (Arc<Toy>, Running) {
    let server = Server::bind(address, settings()).unwrap();
    let toy = Toy::new(server.vitals());
    let running = server.start(toy.clone()).unwrap();
    (toy, running)
}

fn write(file: u64) -> Call {
    Call::Write { who: who(1), file: FileKey(file), lane_offset: 0 }
}

fn read(len: u32) -> Call {
    Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len }
}

#[test]
fn greets_and_serves_over_tcp_and_unix() {
    let dir = tempfile::tempdir().unwrap();
    for address in ["127.0.0.1:0".to_string(), format!("unix:{}/s", dir.path().display())] {
        let (toy, mut running) = start(&address);
        let mut peer = Peer::raw(running.address());
        let welcome = peer.greet(&hello(Role::Data, 1)).unwrap();
        assert_eq!((welcome.name.as_str(), welcome.version), ("toy", PROTOCOL_VERSION));
        assert_eq!(welcome.max_payload_bytes, 1 << 20);
        assert_eq!(peer.call(&write(1), &[7; 100_000]).0, Answer::Written(100_000));
        assert_eq!(peer.call(&write(1), &[]).0, Answer::Written(0));
        assert_eq!(peer.call(&read(1 << 20), &[]), (Answer::Data, vec![0; 1 << 20]));
        let status = peer.status();
        assert_eq!((&status["role"], &status["connections"]["open"]), (&"data".into(), &1.into()));
        assert_eq!(status["memory"]["payload_bytes_max"], 4 << 20);
        drop(peer);
        until("the session is closed", || toy.sessions.load(Ordering::SeqCst) == 0);
        running.stop();
        until("nothing is reserved", || toy.vitals.pool().usage_bytes().0 == 0);
    }
}

#[test]
fn nonsense_is_answered_with_a_fault_and_closed_and_hurts_nobody() {
    let (_toy, running) = start("127.0.0.1:0");
    let mut good = Peer::connect(running.address(), Role::Data, 1);
    let greeting = encode(Kind::Hello, 0, &hello(Role::Data, 2), 0);
    let call = encode(Kind::Call, 5, &Call::Status, 0);
    let with = |at: usize, bytes: &[u8], mut frame: Vec<u8>| {
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let huge = u32::MAX.to_le_bytes();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("http", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()),
        ("short nonsense", b"hi".to_vec()),
        ("4 GiB of hello", with(16, &huge, greeting.clone())),
        ("4 GiB of payload with the hello", with(20, &huge, greeting.clone())),
        ("an unknown kind", with(4, &[77], greeting.clone())),
        ("reserved bytes", with(5, &[1], greeting.clone())),
        ("a hello that is none", with(24, &[0xff; 8], greeting.clone())),
        ("a call without hello", call.clone()),
        ("4 GiB of call", [greeting.clone(), with(16, &huge, call.clone())].concat()),
        ("4 GiB of payload", [greeting.clone(), with(20, &huge, call.clone())].concat()),
        ("a payload with a status", [greeting.clone(), with(20, &[9, 0, 0, 0], call.clone()), vec![0; 9]].concat()),
        ("an unknown message", [greeting.clone(), with(24, &[250], call.clone())].concat()),
        ("a second hello", [greeting.clone(), greeting.clone()].concat()),
    ];
    for (what, bytes) in cases {
        let mut peer = Peer::raw(running.address());
        peer.pipe.write_all(&bytes).unwrap();
        let mut answer = None;
        while answer.is_none() {
            let (kind, _, body, _) = peer.frame().unwrap_or_else(|e| panic!("{what}: {e}"));
            answer = (kind == Kind::Answer).then(|| decode_body::<Answer>(&body).unwrap());
        }
        let (errno, message) = fault(answer.unwrap());
        assert_eq!(errno, libc::EPROTO, "{what}: {message}");
        assert!(!message.contains('\n'), "{what}: {message}");
        assert!(peer.is_closed(), "{what}");
        assert_eq!(good.call(&write(1), b"abc").0, Answer::Written(3), "after {what}");
        // The peer may see the end before the server has counted it, and there is room for four.
        until("the connection is counted out", || good.status()["connections"]["open"] == 1);
    }
}

#[test]
fn another_version_or_role_is_told_what_to_do() {
    let (_toy, running) = start("127.0.0.1:0");
    let mut peer = Peer::raw(running.address());
    let refused = peer.greet(&impresario_wire::Hello { version: 99, ..hello(Role::Data, 1) });
    let (_, message) = fault(*refused.unwrap_err());
    assert!(message.contains("99") && message.contains("same release"), "{message}");
    assert!(peer.is_closed());
    let mut peer = Peer::raw(running.address());
    let (_, message) = fault(*peer.greet(&hello(Role::Io, 1)).unwrap_err());
    assert!(message.contains("Data") && message.contains("Io") && message.contains("address"), "{message}");
    let mut peer = Peer::raw(running.address());
    let mut unwanted = hello(Role::Data, 1);
    unwanted.who.user = 666;
    peer.pipe.write_all(&encode(Kind::Hello, 0, &unwanted, 0)).unwrap();
    assert_eq!(peer.frame().unwrap().0, Kind::Welcome);
    assert_eq!(fault(peer.answer().unwrap().1), (libc::EACCES, "not you".into()));
}

#[test]
fn a_truncated_frame_and_a_vanished_writer_leave_nothing_behind() {
    let (toy, running) = start("127.0.0.1:0");
    for cut in [3, 20, 30, 5000] {
        let mut peer = Peer::connect(running.address(), Role::Data, 1);
        let mut bytes = encode(Kind::Call, 1, &write(1), 100_000);
        bytes.extend_from_slice(&[1; 100_000]);
        peer.pipe.write_all(&bytes[..cut]).unwrap();
        if cut == 5000 {
            until("memory is reserved for it", || toy.vitals.pool().usage_bytes().0 > 0);
        }
        peer.pipe.shutdown_write();
        assert_eq!(fault(peer.answer().unwrap().1).0, libc::EPROTO);
        assert!(peer.is_closed());
    }
    until("all sessions are closed", || toy.sessions.load(Ordering::SeqCst) == 0);
    assert_eq!(toy.vitals.pool().usage_bytes().0, 0);
}

#[test]
fn too_much_at_once_is_refused_without_ending_the_connection() {
    let (_toy, running) = start("127.0.0.1:0");
    let mut peer = Peer::connect(running.address(), Role::Data, 1);
    let (errno, message) = fault(peer.call(&read((1 << 20) + 1), &[]).0);
    assert_eq!(errno, libc::EINVAL);
    assert!(message.contains("max_payload_bytes"), "{message}");
    assert_eq!(peer.call(&read(10), &[]).1.len(), 10);
}

#[test]
fn one_connection_too_many_is_told_so() {
    let (_toy, running) = start("127.0.0.1:0");
    let peers: Vec<Peer> = (0..4).map(|n| Peer::connect(running.address(), Role::Data, n)).collect();
    let mut fifth = Peer::raw(running.address());
    let (errno, message) = fault(*fifth.greet(&hello(Role::Data, 5)).unwrap_err());
    assert_eq!(errno, libc::EUSERS);
    assert!(message.contains("4 connections"), "{message}");
    assert!(fifth.is_closed());
    drop(peers);
    until("there is room again", || Peer::raw(running.address()).greet(&hello(Role::Data, 6)).is_ok());
}

#[test]
fn who_does_not_greet_in_time_is_closed() {
    let (_toy, running) = start("127.0.0.1:0");
    let mut silent = Peer::raw(running.address());
    let mut slow = Peer::raw(running.address());
    let started = Instant::now();
    slow.pipe.write_all(b"IMP1").unwrap();
    assert!(silent.is_closed() && slow.is_closed());
    let took = started.elapsed();
    assert!(took > Duration::from_secs(4) && took < Duration::from_secs(25), "{took:?}");
}

#[test]
fn full_memory_fails_a_request_in_time_and_keeps_the_stream_in_step() {
    let (toy, running) = start("127.0.0.1:0");
    let mut hoarders: Vec<Peer> = (0..3).map(|n| Peer::connect(running.address(), Role::Data, n)).collect();
    // A connection may hold half of the memory; what is left at the end is kept for completing a write.
    for peer in [0, 0, 1] {
        hoarders[peer].send(&write(9), &[1; 1 << 20]);
    }
    until("all is held", || toy.vitals.pool().usage_bytes().0 == 3 << 20);
    let third = &mut hoarders[2];
    let (errno, message) = fault(third.call(&write(1), &[2; 50_000]).0);
    assert_eq!(errno, libc::EBUSY);
    assert!(message.contains("payload_bytes"), "{message}");
    assert!(message.contains("is busy") && message.contains("127.0.0.1 with 3 connections has 3072 KiB"), "{message}");
    toy.kept.lock().drain(..).for_each(|reply| reply.send(&Answer::Written(1 << 20)));
    until("memory is free", || toy.vitals.pool().usage_bytes().0 == 0);
    assert_eq!(third.call(&write(1), &[2; 50_000]).0, Answer::Written(50_000));
    assert!(toy.vitals.pool().usage_bytes().1 <= 4 << 20, "never more than the limit");
}

#[test]
fn a_slow_reader_stalls_only_itself() {
    let (toy, running) = start("127.0.0.1:0");
    let mut slow = Peer::connect(running.address(), Role::Data, 1);
    for _ in 0..64 {
        slow.send(&read(1 << 20), &[]);
    }
    let mut good = Peer::connect(running.address(), Role::Data, 2);
    let started = Instant::now();
    for _ in 0..50 {
        assert_eq!(good.call(&read(100_000), &[]).1.len(), 100_000);
    }
    assert!(started.elapsed() < Duration::from_secs(30));
    // Half of the memory for the slow one; the other's last reply may be on its way.
    assert!(
        toy.vitals.pool().usage_bytes().0 <= (2 << 20) + 100_000,
        "a connection holds more than half of the memory"
    );
    for _ in 0..64 {
        assert_eq!(slow.answer().unwrap().2.len(), 1 << 20, "nothing of it was lost");
    }
}

#[test]
fn an_unanswered_request_and_a_panic_are_answered() {
    let (toy, running) = start("127.0.0.1:0");
    let mut peer = Peer::connect(running.address(), Role::Data, 1);
    assert_eq!(fault(peer.call(&Call::ResetStatistics, &[]).0).0, libc::EIO);
    peer.send(&Call::Sync { who: who(1), file: FileKey(1) }, &[]);
    assert_eq!(fault(peer.answer().unwrap().1).0, libc::EIO);
    assert!(peer.is_closed());
    let mut other = Peer::connect(running.address(), Role::Data, 1);
    assert_eq!(other.call(&write(1), b"x").0, Answer::Written(1));
    until("the session is closed", || toy.sessions.load(Ordering::SeqCst) == 1);
    until("one is open", || toy.vitals.status()["connections"]["open"] == 1);
}

#[test]
fn stopping_lets_accepted_calls_finish() {
    let (toy, mut running) = start(&free_address());
    let address = running.address().to_string();
    let mut peer = Peer::connect(&address, Role::Data, 1);
    peer.send(&write(9), b"in flight");
    until("it is accepted", || toy.kept.lock().len() == 1);
    let stopping = std::thread::spawn(move || {
        let started = Instant::now();
        running.stop();
        started.elapsed()
    });
    std::thread::sleep(Duration::from_millis(100));
    toy.kept.lock().pop().unwrap().send(&Answer::Written(9));
    assert_eq!(peer.answer().unwrap().1, Answer::Written(9));
    assert!(peer.is_closed());
    // With the call, and not after the five seconds that it waits at most.
    assert!(stopping.join().unwrap() < Duration::from_secs(5));
    Server::bind(&address, settings()).expect("the port is free again");
}

/// What a server that stops has not finished may be done by another one: no program is to see an error for it.
#[test]
fn what_a_stop_leaves_unfinished_is_for_the_client_to_repeat() {
    let (toy, mut running) = start(&free_address());
    let address = running.address().to_string();
    let mut peer = Peer::connect(&address, Role::Data, 1);
    peer.send(&write(9), b"in flight");
    until("it is accepted", || toy.kept.lock().len() == 1);
    let stopping = std::thread::spawn(move || running.stop());
    until("nobody listens any more", || std::net::TcpStream::connect(&address).is_err());
    std::thread::sleep(Duration::from_millis(200));
    toy.kept.lock().clear();
    assert_eq!(fault(peer.answer().unwrap().1).0, impresario_wire::Fault::PATH_LOST);
    stopping.join().unwrap();
}

/// Starts a toy with room for many connections.
fn start_large(payload_patience: Duration) -> (Arc<Toy>, Running) {
    start_with(Settings { max_connections: 64, payload_patience, ..settings() })
}

#[test]
fn a_peer_that_reads_no_refusals_is_given_no_further_call() {
    let (_toy, running) = start_large(Duration::from_secs(5));
    let mut hostile = Peer::connect(running.address(), Role::Data, 1);
    // Each is refused; none of the refusals is read. 64 MiB of them do not fit into the buffers of two sockets.
    let call = Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 2 << 20 };
    let calls: Vec<u8> = (0..1000).flat_map(|id| encode(Kind::Call, id, &call, 0)).collect();
    hostile.pipe.patience(Duration::from_secs(3));
    let mut sent = 0;
    let stopped = loop {
        match hostile.pipe.write_all(&calls) {
            Ok(()) => sent += calls.len(),
            Err(error) => break Some(error),
        }
        if sent > 64 << 20 {
            break None;
        }
    };
    assert!(stopped.is_some(), "the server took {sent} bytes of calls whose answers nobody reads");
    let mut other = Peer::connect(running.address(), Role::Data, 2);
    assert_eq!(other.call(&write(2), &[7; 1000]).0, Answer::Written(1000));
    assert!(other.status()["connections"]["calls_under_way"].as_u64().unwrap() <= 4096 + 1);
}

#[test]
fn writes_that_are_announced_and_do_not_come_hold_nobody_up() {
    let (_toy, running) = start_large(Duration::from_secs(20));
    // Sixteen of a MiB each, four times the memory, of which a byte comes now and then.
    let mut tricklers: Vec<Peer> = (0..16).map(|n| Peer::connect(running.address(), Role::Data, 100 + n)).collect();
    for peer in &mut tricklers {
        peer.pipe.write_all(&encode(Kind::Call, 1, &write(1), 1 << 20)).unwrap();
        // More than a slice, so that each waits for a second one.
        peer.pipe.write_all(&vec![1; 300 << 10]).unwrap();
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let done = &done;
        scope.spawn(move || {
            // Not for ever, should the others fail.
            let started = Instant::now();
            while !done.load(Ordering::SeqCst) && started.elapsed() < Duration::from_secs(60) {
                tricklers.iter_mut().for_each(|peer| drop(peer.pipe.write_all(&[1])));
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        let mut other = Peer::connect(running.address(), Role::Data, 1);
        for _ in 0..4 {
            assert_eq!(other.call(&write(1), &vec![7; 1 << 20]).0, Answer::Written(1 << 20));
        }
        let memory = other.status()["memory"].clone();
        done.store(true, Ordering::SeqCst);
        assert!(memory["payload_bytes_peak"].as_u64() <= memory["payload_bytes_max"].as_u64(), "{memory}");
    });
}

#[test]
fn who_did_not_take_what_it_asked_for_has_little_of_the_memory_afterwards() {
    let (toy, running) = start_large(Duration::from_secs(20));
    let hold_what_it_gets = || {
        let peers = (0..4).map(|n| {
            let mut peer = Peer::raw_from([127, 0, 0, 2], running.address());
            peer.greet(&hello(Role::Data, 100 + n)).unwrap();
            for _ in 0..8 {
                peer.send(&read(1 << 20), &[]);
            }
            peer
        });
        peers.collect::<Vec<Peer>>()
    };
    let held = || toy.vitals.pool().usage_bytes().0;
    let greedy = hold_what_it_gets();
    until("it has what others need", || held() >= 2 << 20);
    let mut other = Peer::connect(running.address(), Role::Data, 1);
    assert_eq!(other.call(&read(1 << 20), &[]).1.len(), 1 << 20, "it waits until those connections are closed");
    drop(greedy);
    until("all is given back", || held() == 0);
    let greedy = hold_what_it_gets();
    until("it has one answer again", || held() >= 1 << 20);
    for _ in 0..50 {
        assert_eq!(other.call(&read(1 << 20), &[]).1.len(), 1 << 20);
    }
    // Nobody waited, or they would have been closed again.
    until("the last answer has left", || held() < 2 << 20);
    assert!((1 << 20..(1 << 20) + 4096).contains(&held()), "{} bytes", held());
    drop(greedy);
}

#[test]
fn silent_connections_of_one_machine_lock_no_other_out() {
    let (_toy, running) = start("127.0.0.1:0");
    // Half of them have not even said hello.
    let mut silent: Vec<Peer> = (0..4).map(|_| Peer::raw_from([127, 0, 0, 2], running.address())).collect();
    silent.iter_mut().take(2).for_each(|peer| drop(peer.greet(&hello(Role::Data, 9)).unwrap()));
    let mut ours = Vec::new();
    for client in 0..2 {
        until("a silent one makes room", || {
            let mut peer = Peer::raw(running.address());
            let is_welcome = peer.greet(&hello(Role::Data, client)).is_ok();
            ours.extend(is_welcome.then_some(peer));
            is_welcome
        });
        assert_eq!(ours[client as usize].call(&write(client), &[1; 10]).0, Answer::Written(10));
    }
    // Those that have as many as we are left alone.
    let status = ours[0].status();
    assert_eq!(status["connections"]["evicted"], 2, "{status}");
    let refused = Peer::raw(running.address()).greet(&hello(Role::Data, 7));
    assert_eq!(fault(*refused.unwrap_err()).0, libc::EUSERS);
    assert_eq!(silent[0].call(&write(1), &[1; 10]).0, Answer::Written(10), "those that said hello stayed");
}

fn start_with(settings: Settings) -> (Arc<Toy>, Running) {
    let server = Server::bind("127.0.0.1:0", settings).unwrap();
    let toy = Toy::new(server.vitals());
    let running = server.start(toy.clone()).unwrap();
    (toy, running)
}

#[test]
fn an_address_has_its_connections_and_others_have_theirs() {
    let settings = Settings { max_connections: 64, max_connections_per_address: 3, ..settings() };
    let (_toy, running) = start_with(settings);
    let mut held: Vec<Peer> = (1..=3).map(|client| Peer::connect(running.address(), Role::Data, client)).collect();
    let refused = Peer::raw(running.address()).greet(&hello(Role::Data, 4)).unwrap_err();
    let Answer::Fault(fault) = *refused else { panic!("{refused:?}") };
    assert!(fault.errno == libc::EUSERS && fault.message.contains("max_connections_per_address"), "{fault:?}");
    assert!(fault.message.contains("3 connections from 127.0.0.1"), "{fault:?}");
    Peer::raw_from([127, 0, 0, 2], running.address()).greet(&hello(Role::Data, 5)).expect("another address");
    held.pop();
    until("a place is free", || Peer::raw(running.address()).greet(&hello(Role::Data, 6)).is_ok());
}

#[test]
fn an_address_has_its_share_of_the_memory_and_is_told_so() {
    let settings = Settings {
        max_connections: 64,
        payload_bytes_per_address: 1 << 20,
        payload_patience: Duration::from_millis(300),
        ..settings()
    };
    let (toy, running) = start_with(settings);
    // A write that is not answered holds its share.
    let mut slow = Peer::connect(running.address(), Role::Data, 1);
    slow.send(&write(9), &[1; 1 << 20]);
    until("it is accepted", || toy.kept.lock().len() == 1);
    let mut other = Peer::connect(running.address(), Role::Data, 2);
    let fault = fault(other.call(&write(8), &[1; 1 << 20]).0);
    assert!(fault.0 == libc::EBUSY && fault.1.contains("payload_percent_per_address"), "{fault:?}");
    assert!(fault.1.contains("127.0.0.1 has the 1024 KiB"), "{fault:?}");
    let mut elsewhere = Peer::raw_from([127, 0, 0, 2], running.address());
    elsewhere.greet(&hello(Role::Data, 3)).unwrap();
    let answer = elsewhere.call(&write(10), &[1; 1 << 20]).0;
    assert!(!matches!(answer, Answer::Fault(_)), "another address is served: {answer:?}");
}

#[test]
fn silent_peers_have_half_of_the_connections_at_most() {
    let (_toy, running) = start_with(Settings { max_connections: 64, ..settings() });
    let silent: Vec<Peer> = (0..40).map(|_| Peer::raw(running.address())).collect();
    // Those that have been silent for half a second make room; nobody waits for their five.
    until("others are served", || Peer::raw(running.address()).greet(&hello(Role::Data, 1)).is_ok());
    drop(silent);
}

#[test]
fn a_storm_of_silent_connections_keeps_no_other_machine_out() {
    let (_toy, running) = start_with(Settings { max_connections: 64, ..settings() });
    // All of them have come a moment ago: none has been silent for long.
    let storm: Vec<Peer> = (0..31).map(|_| Peer::raw_from([127, 0, 0, 2], running.address())).collect();
    let mut first = Peer::raw(running.address());
    for client in 0..8 {
        Peer::raw(running.address()).greet(&hello(Role::Data, client)).expect("welcome at once");
    }
    first.greet(&hello(Role::Data, 9)).expect("of a machine with few, none was closed");
    drop(storm);
}

#[test]
fn a_storm_that_says_hello_keeps_no_other_machine_out_while_others_are_silent() {
    let (_toy, running) = start_with(Settings { max_connections: 64, ..settings() });
    let greeted = |_| {
        let mut peer = Peer::raw_from([127, 0, 0, 2], running.address());
        peer.greet(&hello(Role::Data, 9)).expect("there is room");
        peer
    };
    let storm: Vec<Peer> = (0..40).map(greeted).collect();
    let silent: Vec<Peer> = (0..24).map(|_| Peer::raw_from([127, 0, 0, 3], running.address())).collect();
    // The machine with most has only connections that have just come; that with fewer, but more than ours, makes room.
    for client in 0..4 {
        let mut ours = Peer::raw(running.address());
        ours.greet(&hello(Role::Data, client)).expect("welcome at once");
    }
    drop((storm, silent));
}

#[test]
fn silent_connections_have_no_threads() {
    let (_toy, running) = start_with(Settings { max_connections: 512, ..settings() });
    let mut peers: Vec<Peer> = (0..200).map(|_| Peer::raw(running.address())).collect();
    let mut first = Peer::connect(running.address(), Role::Data, 1);
    // Accepted after them; for a moment it counts among the silent ones as well.
    until("all are there", || first.status()["connections"]["open"] == 201);
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    peers.iter_mut().for_each(|peer| drop(peer.greet(&hello(Role::Data, 2)).expect("welcome")));
    let with_hellos = threads();
    // Other tests of this program have threads, too.
    assert!(
        with_hellos >= before + 100,
        "{before} threads for 200 silent connections, {with_hellos} for those that speak"
    );
}

/// As many connections are served by one thread in turn at most.
fn groups() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

/// Connections that have sent so many small reads, one after another, that they wait together.
fn start_together() -> (Arc<Toy>, Running, Vec<Peer>) {
    let settings = Settings { max_connections: 4096, ..settings() };
    let (toy, running) = start_with(settings);
    let count = 4 * groups().max(2);
    let mut peers: Vec<Peer> =
        (0..count as u64).map(|client| Peer::connect(running.address(), Role::Data, client)).collect();
    for _ in 0..20 {
        peers.iter_mut().for_each(|peer| assert_eq!(peer.call(&read(100), &[]).1.len(), 100));
    }
    (toy, running, peers)
}

fn read_of(file: u64) -> Call {
    Call::Read { who: who(1), file: FileKey(file), lane_offset: 0, len: 10 }
}

#[test]
fn small_reads_of_many_connections_are_served_by_few_threads() {
    let (toy, mut running, mut peers) = start_together();
    let served_by = |peers: &mut [Peer]| {
        toy.threads.lock().clear();
        for peer in peers {
            // Several at once too.
            let ids = [peer.send(&read(10), &[]), peer.send(&read(1000), &[])];
            let answers = ids.map(|_| peer.answer().unwrap());
            assert_eq!(
                answers.map(|(id, answer, bytes)| (id, answer, bytes.len())),
                [(ids[0], Answer::Data, 10), (ids[1], Answer::Data, 1000)]
            );
        }
        toy.threads.lock().len()
    };
    let threads = served_by(&mut peers);
    assert!(threads <= groups(), "{threads} threads for {} connections", peers.len());

    // Other calls are their own threads', in order with the reads before and after.
    for peer in &mut peers {
        peer.send(&read(10), &[]);
        peer.send(&write(1), &[7; 100_000]);
        peer.send(&read(100_000), &[]);
        peer.send(&read(10), &[]);
        let answers: Vec<_> =
            (0..4).map(|_| peer.answer().unwrap()).map(|(_, answer, bytes)| (answer, bytes.len())).collect();
        let expected = [(Answer::Data, 10), (Answer::Written(100_000), 0), (Answer::Data, 100_000), (Answer::Data, 10)];
        assert_eq!(answers, expected);
    }
    // Those that have ended have left.
    let rest = peers.split_off(peers.len() / 2);
    drop(rest);
    until("their sessions are closed", || toy.sessions.load(Ordering::SeqCst) as usize == peers.len());
    for _ in 0..20 {
        served_by(&mut peers);
    }
    assert!(served_by(&mut peers) <= groups());
    let started = Instant::now();
    running.stop();
    assert!(started.elapsed() < Duration::from_secs(5), "stopping waits for no connection that is idle");
    assert!(peers.iter_mut().all(Peer::is_closed) && toy.sessions.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_frame_in_pieces_and_a_panic_hold_up_none_of_those_that_wait_together() {
    let (toy, _running, mut peers) = start_together();
    let others = peers.split_off(2);
    let (mut slow, mut failing) = (peers.pop().unwrap(), peers.pop().unwrap());
    let mut others = others;
    let mut all_others = || others.iter_mut().for_each(|peer| assert_eq!(peer.call(&read(10), &[]).1.len(), 10));
    let frame = encode(Kind::Call, 99, &read(10), 0);
    for piece in frame.chunks(7) {
        slow.pipe.write_all(piece).unwrap();
        all_others();
    }
    assert_eq!(slow.frame().unwrap().1, 99);
    assert_eq!(slow.call(&read(10), &[]).1.len(), 10);
    failing.send(&read_of(13), &[]);
    assert_eq!(fault(failing.answer().unwrap().1).0, libc::EIO);
    assert!(failing.is_closed());
    all_others();
    slow.pipe.write_all(b"nonsense that is no frame").unwrap();
    assert_eq!(fault(slow.answer().unwrap().1).0, libc::EPROTO);
    assert!(slow.is_closed());
    all_others();
    let left = others.len();
    until("two sessions are closed", || toy.sessions.load(Ordering::SeqCst) as usize == left);
}

#[test]
fn a_thread_that_has_to_wait_makes_way_for_those_that_wait_with_it() {
    let (toy, mut running, mut peers) = start_together();
    for _ in 0..3 {
        let gate = toy.gate.lock();
        let half = peers.len() / 2;
        // More than one may have to, one after another.
        let (waiting, others) = peers.split_at_mut(half);
        waiting.iter_mut().for_each(|peer| _ = peer.send(&read_of(7), &[]));
        for _ in 0..3 {
            others.iter_mut().for_each(|peer| assert_eq!(peer.call(&read(10), &[]).1.len(), 10));
        }
        drop(gate);
        waiting.iter_mut().for_each(|peer| assert_eq!(peer.answer().unwrap().2.len(), 10));
        peers.iter_mut().for_each(|peer| assert_eq!(peer.call(&read(10), &[]).1.len(), 10));
        peers.rotate_left(1);
    }
    running.stop();
    assert!(toy.sessions.load(Ordering::SeqCst) == 0);
}
