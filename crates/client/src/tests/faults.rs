//! Servers that are slow, silent, broken or gone: each call ends in time, with the right error or the right data.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use impresario_node::locks::EPOCHS_AHEAD;
use impresario_testing::free_address;
use impresario_wire::{Answer, Call, Fault, FileKey, FileLock, FrameHeader, Kind, MetaCall, frame};

use super::*;
use crate::Access;
use crate::leases::lease_time;
use crate::testing::{FakeCall, FakeObjects, refuse};

/// Reads 100 bytes at offset 5 and checks them.
fn read(link: &Link, deadline: Instant) -> Result<crate::Reply, ClientError> {
    let mut bytes = [0; 100];
    let reply = link.call(read_call(link, 5, 100), &[], Some(&mut [IoSliceMut::new(&mut bytes)]), deadline)?;
    assert_eq!(bytes.as_slice(), content(5, 100));
    Ok(reply)
}

fn write(link: &Link, deadline: Instant) -> Result<crate::Reply, ClientError> {
    let call = Call::Write { who: link.identity().who(), file: FileKey(1), lane_offset: 0 };
    link.call(call, &[IoSlice::new(b"abc")], None, deadline)
}

#[test]
fn a_server_that_never_answers_fails_calls_at_their_deadline() {
    let server = server(|_, _| Flow::Continue);
    let link = link_to(&[server.address()], Duration::from_millis(500));
    let error = fails_at(500, |deadline| read(&link, deadline));
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert_eq!(error.errno(), libc::EIO);
    assert!(error.to_string().contains("data.0") && error.to_string().contains(server.address()), "{error}");
    assert_eq!(link.identity().epoch(), 1, "the connection was given up with a call outstanding");
    // Many threads, one connection: each at its own deadline.
    std::thread::scope(|scope| {
        for i in 0..8 {
            let link = &link;
            scope.spawn(move || fails_at(400 + i * 50, |deadline| write(link, deadline)));
        }
    });
}

#[test]
fn a_server_that_takes_nothing_fails_large_writes_at_their_deadline() {
    let server = server(|_, _| {
        std::thread::sleep(Duration::from_secs(5));
        Flow::Close
    });
    let link = link_to(&[server.address()], Duration::from_millis(500));
    let bytes = vec![1; 4 << 20];
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                fails_at(500, |deadline| {
                    for _ in 0..20 {
                        let call = Call::Write { who: link.identity().who(), file: FileKey(1), lane_offset: 0 };
                        link.call(call, &[IoSlice::new(&bytes)], None, deadline)?;
                    }
                    Ok(())
                })
            });
        }
    });
}

#[test]
fn a_server_that_is_not_there_fails_calls_at_their_deadline() {
    let address = free_address();
    let link = link_to(&[&address], Duration::from_millis(600));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let error = scope.spawn(|| fails_at(600, |deadline| read(&link, deadline))).join().unwrap();
            assert!(error.to_string().contains("refused"), "{error}");
        }
    });
    let started = Instant::now();
    let error = crate::admin::status(&Access::default(), &address, Duration::from_secs(60)).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(30), "a command line does not wait for it to come back: {error}");
}

#[test]
fn a_listener_that_never_accepts_or_greets_fails_calls_at_their_deadline() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let link = link_to(&[&listener.local_addr().unwrap().to_string()], Duration::from_millis(400));
    let error = fails_at(400, |deadline| read(&link, deadline));
    assert!(error.to_string().contains("no welcome"), "{error}");
}

#[test]
fn calls_survive_a_server_that_closes_after_every_third_request() {
    let mut count = 0;
    let objects = Arc::new(FakeObjects::default());
    let seen = objects.clone();
    let server = server(move |connection, call| {
        count += 1;
        let (answer, payload) = objects.apply(&call.call, &call.payload);
        if count == 3 {
            // Applied, but the answer is lost.
            return Flow::Close;
        }
        connection.answer(call.id, &answer, &payload);
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(10));
    for i in 0..20u64 {
        let call = Call::Write { who: link.identity().who(), file: FileKey(1), lane_offset: i * 3 };
        let bytes = content(i * 3, 3);
        assert_eq!(link.call(call, &[IoSlice::new(&bytes)], None, in_ms(10_000)).unwrap().answer, Answer::Written(3));
    }
    assert!(seen.object(FileKey(1)).unwrap() == content(0, 60));
    assert!(server.accepted() >= 7);
    assert_eq!(link.identity().epoch() as usize, server.accepted() - 1, "an epoch for each connection given up");
    let who: Vec<_> = seen.log().iter().filter_map(|call| call.who().copied()).collect();
    assert!(who.windows(2).all(|w| w[0].epoch <= w[1].epoch && w[0].sequence <= w[1].sequence));
    let repeated = who.windows(2).filter(|w| w[0].sequence == w[1].sequence).collect::<Vec<_>>();
    assert!(repeated.len() >= 6 && repeated.iter().all(|w| w[0].epoch < w[1].epoch), "a retry keeps its sequence");
}

#[test]
fn what_others_wrote_is_not_repeated_for_them() {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    let server = server(move |_, _| {
        count.fetch_add(1, Ordering::SeqCst);
        Flow::Close
    });
    let link = link_to(&[server.address()], Duration::from_secs(2));
    let error = link.call(foreign_write(0), &[IoSlice::new(b"x")], None, in_ms(2000)).unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }), "{error}");
    assert_eq!(error.to_fault().errno, Fault::PATH_LOST);
    let foreign = Call::Meta { who: *foreign_write(0).who().unwrap(), call: MetaCall::Unlink { path: b"x".into() } };
    let error = link.call(foreign, &[], None, in_ms(2000)).unwrap_err();
    assert!(matches!(error, ClientError::Lost { .. }), "{error}");
    assert_eq!(calls.load(Ordering::SeqCst), 2, "each was sent once");
}

#[test]
fn a_call_is_repeated_under_a_new_epoch_when_a_server_asks_for_it() {
    let server = server(|connection, call| {
        let who = call.call.who().copied().unwrap();
        let answer = match who.epoch {
            0 => refuse(Fault::FENCED, "older epoch"),
            1 | 2 => refuse(Fault::PATH_LOST, "data.0 was lost"),
            _ => Answer::Written(call.payload.len() as u32),
        };
        connection.answer(call.id, &answer, &[]);
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(5));
    let reply = write(&link, in_ms(5000)).unwrap();
    assert!(reply.repeated);
    assert_eq!(link.identity().epoch(), 3);
    // On behalf of others it is their matter.
    let error = link.call(foreign_write(0), &[IoSlice::new(b"x")], None, in_ms(1000)).unwrap_err();
    assert_eq!(error.errno(), Fault::FENCED);
}

/// The locks of a client went to others, and by its own clock its lease still runs: its machine was suspended. Data servers
/// refuse what it sends, and it must not come back to them in a newer epoch before it has heard of that.
#[test]
fn a_refused_read_of_a_locked_file_is_repeated_only_when_the_lease_is_renewed() {
    let server = server(|connection, call| {
        match call.call.who().copied().unwrap().epoch {
            0..=EPOCHS_AHEAD => connection.answer(call.id, &refuse(Fault::FENCED, "older epoch"), &[]),
            _ => connection.answer(call.id, &Answer::Data, &content(5, 100)),
        }
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(5));
    let (leases, lease) = (&link.identity().leases, Duration::from_secs(60));
    leases.renewed(0, 7, lease, lease_time(), 0);
    let lock = FileLock { owner: 1, pid: 1, start: 0, end: 9, exclusive: true };
    assert!(leases.take(FileKey(1), &lock, 7));
    let error = read(&link, in_ms(1500)).unwrap_err();
    assert!(matches!(error, ClientError::LocksLost { .. }), "{error}");
    assert!(link.identity().epoch() > EPOCHS_AHEAD);
    leases.renewed(7, 7, lease, lease_time(), link.identity().epoch());
    read(&link, in_ms(1500)).unwrap();
}

#[test]
fn faults_are_passed_on_as_they_are() {
    let server = server(|connection, call| {
        connection.answer(call.id, &refuse(libc::ENOSPC, "the disk of data.0 is full"), &[]);
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(5));
    let error = write(&link, in_ms(1000)).unwrap_err();
    assert_eq!(error.errno(), libc::ENOSPC);
    assert!(error.to_string().contains("the disk of data.0 is full"));
}

#[test]
fn greetings_that_are_wrong_are_explained_at_once() {
    let data = |instead: Option<Vec<u8>>, change: fn(&mut FakeGreeting)| {
        let mut greeting = FakeGreeting { instead, ..FakeGreeting::of("data.0") };
        change(&mut greeting);
        FakeServer::start(greeting, || Box::new(|_, _| Flow::Continue)).unwrap()
    };
    let fault = |errno, message: &str| frame::encode(Kind::Answer, 0, &refuse(errno, message), 0).unwrap();
    let cases = [
        (data(Some(b"220 mail.example ESMTP ready\r\n".into()), |_| {}), "not an Impresario peer"),
        (data(Some(b"IMP1\x04\0\0\0".repeat(3)), |_| {}), "claims"),
        (data(None, |greeting| greeting.version = 99), "version 99"),
        (data(None, |greeting| greeting.name = "data.3".into()), "calls itself \"data.3\""),
        (data(Some(fault(libc::EPROTO, "use the same release")), |_| {}), "use the same release"),
    ];
    for (server, text) in cases {
        let link = link_to(&[server.address()], Duration::from_secs(60));
        let started = Instant::now();
        let error = read(&link, in_ms(60_000)).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.errno(), libc::EIO);
        assert!(started.elapsed() < Duration::from_secs(30), "{error}");
    }
    let busy = data(Some(fault(libc::EUSERS, "too many connections")), |_| {});
    let link = link_to(&[busy.address()], Duration::from_secs(5));
    let error = fails_at(500, |deadline| read(&link, deadline));
    assert!(error.to_string().contains("too many connections"), "{error}");
}

#[test]
fn garbage_in_answers_is_an_error_and_never_data() {
    let header = |id, body_len, payload_len| FrameHeader { kind: Kind::Answer, id, body_len, payload_len }.encode();
    type Bytes = fn(u64, &dyn Fn(u64, u32, u32) -> [u8; 24]) -> Vec<u8>;
    let cases: [(Bytes, &str); 6] = [
        (|_, _| b"nonsense that is longer than a header".into(), "not an Impresario peer"),
        (|id, header| [&header(id, 1, 101)[..], &[1]].concat(), "claims 101 bytes, but 100 is the limit"),
        (|id, header| [&header(id, 1, u32::MAX)[..], &[1]].concat(), "claims 4294967295 bytes"),
        (|id, header| [&header(id, 1, 0)[..], &[99]].concat(), "not a valid message"),
        (|id, header| [&header(id, 2, 0)[..], &[1, 1]].concat(), "trailing"),
        (|_, header| [&header(777, 1, 0)[..], &[0]].concat(), "call 777, which is not under way"),
    ];
    for (bytes, text) in cases {
        let server = server(move |connection, call| {
            connection.raw(&bytes(call.id, &header));
            Flow::Continue
        });
        let link = link_to(&[server.address()], Duration::from_secs(60));
        let started = Instant::now();
        let error = read(&link, in_ms(60_000)).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(matches!(error, ClientError::Protocol { .. }));
        assert!(started.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn more_payload_than_announced_is_found_out() {
    let server = server(move |connection, call| {
        let head = FrameHeader { kind: Kind::Answer, id: call.id, body_len: 1, payload_len: 100 }.encode();
        connection.raw(&[&head[..], &[1], &content(5, 100), b"and some more, much more than a header"].concat());
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(5));
    read(&link, in_ms(5000)).unwrap();
    let error = read(&link, in_ms(5000)).unwrap_err();
    assert!(error.to_string().contains("not an Impresario peer"), "{error}");
}

#[test]
fn an_answer_cut_off_is_asked_for_again() {
    let count = Arc::new(AtomicUsize::new(0));
    let server = server(move |connection, call| {
        let cut = [10, 24, 25, 60, usize::MAX][count.fetch_add(1, Ordering::SeqCst).min(4)];
        let head = FrameHeader { kind: Kind::Answer, id: call.id, body_len: 1, payload_len: 100 }.encode();
        let bytes = [&head[..], &[1], &content(5, 100)].concat();
        connection.raw(&bytes[..cut.min(bytes.len())]);
        if cut == usize::MAX { Flow::Continue } else { Flow::Close }
    });
    let link = link_to(&[server.address()], Duration::from_secs(5));
    assert!(read(&link, in_ms(5000)).unwrap().repeated);
    assert_eq!(server.accepted(), 5);
}

#[test]
fn a_payload_that_stops_halfway_is_given_up_at_the_deadline_and_its_buffer_is_left_alone() {
    let server = server(|connection, call| {
        let head = FrameHeader { kind: Kind::Answer, id: call.id, body_len: 1, payload_len: 100_000 }.encode();
        connection.raw(&[&head[..], &[1], &[7; 50_000]].concat());
        std::thread::sleep(Duration::from_millis(1500));
        connection.raw(&[8; 50_000]);
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_millis(1000));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut bytes = vec![0; 100_000];
                fails_at(500, |deadline| {
                    link.call(read_call(&link, 0, 100_000), &[], Some(&mut [IoSliceMut::new(&mut bytes)]), deadline)
                });
                bytes.fill(3);
                std::thread::sleep(Duration::from_millis(1300));
                assert!(bytes.iter().all(|byte| *byte == 3), "written after it was given back");
            });
        }
    });
}

#[test]
fn late_answers_are_thrown_away_and_the_connection_lives_on() {
    // A call for offset 0 is answered only after the second of the others that follow it.
    let mut held: Option<FakeCall> = None;
    let mut others = 0;
    let asked = Arc::new(AtomicUsize::new(0));
    let arrived = asked.clone();
    let server = server(move |connection, call| {
        let Call::Read { lane_offset, len, .. } = call.call else { return Flow::Close };
        if lane_offset == 0 {
            (held, others) = (Some(call), 0);
            arrived.fetch_add(1, Ordering::SeqCst);
            return Flow::Continue;
        }
        others += 1;
        connection.answer(call.id, &Answer::Data, &content(lane_offset, len as usize));
        if others == 2
            && let Some(late) = held.take()
        {
            connection.answer(late.id, &Answer::Data, &[9; 70_000]);
        }
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(5));
    for round in 0..3 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while asked.load(Ordering::SeqCst) <= round {
                    std::thread::sleep(Duration::from_millis(1));
                }
                read(&link, in_ms(5000)).unwrap();
            });
            let mut bytes = vec![0; 70_000];
            let error = fails_at(1000, |deadline| {
                // Not silent: an answer to the other thread arrives after this call was sent.
                link.call(read_call(&link, 0, 70_000), &[], Some(&mut [IoSliceMut::new(&mut bytes)]), deadline)
            });
            assert!(matches!(error, ClientError::Unreachable { .. }), "round {round}: {error}");
            read(&link, in_ms(5000)).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0));
        });
        read(&link, in_ms(5000)).unwrap();
    }
    drop(link.start(read_call(&link, 0, 70_000), &[], in_ms(5000)));
    read(&link, in_ms(5000)).unwrap();
    read(&link, in_ms(5000)).unwrap();
    read(&link, in_ms(5000)).unwrap();
    assert_eq!((server.accepted(), link.identity().epoch()), (1, 0));
}

#[test]
fn a_server_that_stops_or_lacks_memory_is_asked_again() {
    let count = Arc::new(AtomicUsize::new(0));
    let server = server(move |connection, call| {
        let answer = match count.fetch_add(1, Ordering::SeqCst) {
            0 => refuse(libc::ESHUTDOWN, "data.0 is stopping"),
            1 | 2 => refuse(libc::EBUSY, "data.0 has no memory for this request"),
            _ => Answer::Written(3),
        };
        connection.answer(call.id, &answer, &[]);
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(5));
    assert!(!write(&link, in_ms(5000)).unwrap().repeated, "nothing was begun before");
    assert_eq!(server.accepted(), 2);
}

#[test]
fn a_farewell_says_why_the_connection_ends() {
    let farewell = |errno| {
        server(move |connection, _| {
            connection.answer(0, &refuse(errno, "data.0: the frame was no frame"), &[]);
            Flow::Close
        })
    };
    let server = farewell(libc::EPROTO);
    let error = read(&link_to(&[server.address()], Duration::from_secs(5)), in_ms(5000)).unwrap_err();
    assert!(matches!(error, ClientError::Protocol { .. }) && error.to_string().contains("no frame"), "{error}");
    let server = farewell(libc::ENFILE);
    let link = link_to(&[server.address()], Duration::from_secs(5));
    let error = fails_at(600, |deadline| read(&link, deadline));
    assert!(error.to_string().contains("no frame"), "{error}");
    assert!((2..=10).contains(&server.accepted()), "{} attempts in 600 ms, with pauses", server.accepted());
}

#[test]
fn a_restarted_server_is_found_again_and_told_from_a_lost_connection() {
    let objects = Arc::new(FakeObjects::default());
    let start = |address: &str, incarnation| {
        let objects = objects.clone();
        let greeting = FakeGreeting { incarnation, ..FakeGreeting::of("data.0") };
        FakeServer::start_at(address, greeting, move || objects.serve()).unwrap()
    };
    let address = free_address();
    let server = start(&address, 1);
    let link = link_to(&[&address], Duration::from_secs(5));
    let first = write(&link, in_ms(5000)).unwrap();
    server.drop_connections();
    let second = write(&link, in_ms(5000)).unwrap();
    assert_eq!((first.incarnation, second.incarnation), (1, 1));
    assert_ne!(first.session, second.session);
    server.kill();
    let restarted = std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..4).map(|_| scope.spawn(|| write(&link, in_ms(5000)))).collect();
        std::thread::sleep(Duration::from_millis(300));
        let restarted = start(&address, 2);
        for reply in waiting {
            assert_eq!(reply.join().unwrap().unwrap().incarnation, 2);
        }
        restarted
    });
    let error = link.call_in(second.session, Call::Status, in_ms(1000)).unwrap_err();
    assert!(matches!(error, ClientError::SessionEnded { .. }), "{error}");
    let session = link.session(in_ms(1000)).unwrap();
    assert_eq!(link.call_in(session, Call::Status, in_ms(1000)).unwrap().session, session);
    assert_eq!(restarted.accepted(), 1);
}

#[test]
fn another_route_is_taken_when_one_is_shut_or_silent() {
    let objects = Arc::new(FakeObjects::default());
    let served = objects.clone();
    let good = FakeServer::start(FakeGreeting::of("data.0"), move || served.serve()).unwrap();
    let shut = free_address();
    let link = link_to(&[&shut, good.address()], Duration::from_secs(60));
    let started = Instant::now();
    write(&link, in_ms(60_000)).unwrap();
    assert!(started.elapsed() < Duration::from_secs(15), "a closed port costs no part of the time limit");

    let silent = server(|_, _| Flow::Continue);
    let link = link_to(&[silent.address(), good.address()], Duration::from_secs(4));
    let started = Instant::now();
    assert!(write(&link, in_ms(4000)).unwrap().repeated);
    let took = started.elapsed().as_millis();
    let silence_max_ms = u128::from(impresario_node::session::SILENCE_MAX.0 / 1_000_000);
    assert!(took >= silence_max_ms, "given up when it has been silent for long, not {took} ms");
    assert_eq!(link.identity().epoch(), 1);

    // Slow is not silent: it answers what every server answers at once.
    let mut held: Option<FakeCall> = None;
    let slow = server(move |connection, call| {
        if call.call == Call::Status {
            connection.answer(call.id, &Answer::Text("{}".into()), &[]);
        }
        match held.take() {
            None => held = Some(call),
            Some(call) => {
                std::thread::sleep(Duration::from_millis(900));
                connection.answer(call.id, &Answer::Written(3), &[]);
            }
        }
        Flow::Continue
    });
    let link = link_to(&[slow.address(), good.address()], Duration::from_secs(8));
    assert!(!write(&link, in_ms(8000)).unwrap().repeated);
    assert_eq!(link.identity().epoch(), 0);

    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let link = link_to(&[&deaf.local_addr().unwrap().to_string(), good.address()], Duration::from_secs(4));
    write(&link, in_ms(4000)).unwrap();
}
