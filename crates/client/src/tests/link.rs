//! One link, many threads, a server that behaves.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use impresario_wire::{Answer, Call, FileKey};

use super::*;
use crate::pending::{Op, exchange};
use crate::testing::{FakeCall, FakeConnection, FakeObjects};

fn serve_content(connection: &FakeConnection, call: FakeCall) -> Flow {
    match call.call {
        Call::Read { lane_offset, len, .. } => {
            connection.answer(call.id, &Answer::Data, &content(lane_offset, len as usize));
        }
        Call::Write { lane_offset, .. } if call.payload == content(lane_offset, call.payload.len()) => {
            connection.answer(call.id, &Answer::Written(call.payload.len() as u32), &[]);
        }
        _ => return Flow::Close,
    }
    Flow::Continue
}

#[test]
fn a_data_server_in_another_place_is_not_used() {
    let asked = Arc::new(AtomicU64::new(0));
    let greeting = FakeGreeting { number: Some(1), ..FakeGreeting::of("data.0") };
    let counted = asked.clone();
    let serve = move || {
        let counted = counted.clone();
        Box::new(move |connection: &FakeConnection, call| {
            counted.fetch_add(1, Ordering::Relaxed);
            serve_content(connection, call)
        }) as Serve
    };
    let server = FakeServer::start(greeting, serve).unwrap();
    let data = |name: &str, address: &str| impresario_config::Data::new(name, address, name);
    let data = vec![data("data.0", server.address()), data("data.1", "127.0.0.1:1")];
    let mut config = impresario_config::Config { data, ..Default::default() };
    let call = |config: &impresario_config::Config| {
        let identity = Arc::new(Identity::draw(7, 1000).unwrap());
        let options = LinkOptions { timeout: Duration::from_secs(20), ..LinkOptions::new(Role::Data, 4 << 20) };
        let link = Link::to(config, "data.0", identity, options).unwrap();
        link.call(read_call(&link, 0, 10), &[], Some(&mut [IoSliceMut::new(&mut [0; 10])]), in_ms(20_000))
    };
    let error = call(&config).unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, ClientError::Protocol { .. }) && said.contains("the place 2 among"), "{said}");
    assert!(said.contains(server.address()) && said.contains("the place 1 in"), "{said}");
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    config.data.swap(0, 1);
    call(&config).unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

#[test]
fn answers_in_any_order_reach_their_callers() {
    let mut held: Vec<FakeCall> = Vec::new();
    let server = server(move |connection, call| {
        held.push(call);
        if held.len() == 8 {
            for call in held.drain(..).rev() {
                serve_content(connection, call);
            }
        }
        Flow::Continue
    });
    let link = link_to(&[server.address()], Duration::from_secs(10));
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let link = &link;
            scope.spawn(move || {
                for round in 0..50u64 {
                    let (offset, len) = (thread << 32 | round << 8, 1 + (thread * 17_000 + round * 300) as usize);
                    let mut bytes = vec![0; len];
                    let reply = link
                        .call(
                            read_call(link, offset, len as u32),
                            &[],
                            Some(&mut [IoSliceMut::new(&mut bytes)]),
                            in_ms(10_000),
                        )
                        .unwrap();
                    assert_eq!((reply.answer, reply.len), (Answer::Data, len));
                    assert!(bytes == content(offset, len), "thread {thread} round {round}");
                }
            });
        }
    });
    assert_eq!(server.accepted(), 1, "one connection for all");
    assert_eq!(link.identity().epoch(), 0);
}

#[test]
fn sixteen_threads_read_and_write_pieces_of_all_sizes() {
    let objects = Arc::new(FakeObjects::default());
    let served = objects.clone();
    let server = FakeServer::start(FakeGreeting::of("data.0"), move || served.serve()).unwrap();
    let link = link_to(&[server.address()], Duration::from_secs(20));
    std::thread::scope(|scope| {
        for thread in 0..16u64 {
            let link = &link;
            scope.spawn(move || {
                let file = FileKey(thread);
                for round in 0..40u64 {
                    let len = [1, 24, 4096, 70_000, 65_536, 300_000][((thread + round) % 6) as usize];
                    let offset = round * 1000;
                    let bytes = content(thread << 20 | round, len);
                    let (a, b) = bytes.split_at(len / 3);
                    let call = Call::Write { who: link.identity().who(), file, lane_offset: offset };
                    let reply = link.call(call, &[IoSlice::new(a), IoSlice::new(b)], None, in_ms(20_000)).unwrap();
                    assert_eq!(reply.answer, Answer::Written(len as u32));
                    let mut back = vec![0; len];
                    let (a, b) = back.split_at_mut(len / 2);
                    let call = Call::Read { who: link.identity().who(), file, lane_offset: offset, len: len as u32 };
                    let into = &mut [IoSliceMut::new(a), IoSliceMut::new(b)];
                    let reply = link.call(call, &[], Some(into), in_ms(20_000)).unwrap();
                    assert_eq!(reply.len, len);
                    assert!(back == bytes);
                }
            });
        }
    });
    let traffic = link.identity().traffic.now();
    assert_eq!((traffic.reads, traffic.writes), (640, 640));
    assert_eq!(traffic.read_bytes, traffic.written_bytes);
}

#[test]
fn calls_under_way_are_waited_for_in_any_order() {
    let server = server(serve_content);
    let link = link_to(&[server.address()], Duration::from_secs(10));
    let pending: Vec<_> = (0..20).map(|i| link.start(read_call(&link, i * 100, 50_000), &[], in_ms(10_000))).collect();
    for (i, pending) in pending.into_iter().enumerate().rev() {
        let mut bytes = vec![0; 50_000];
        let reply = pending.wait(Some(&mut [IoSliceMut::new(&mut bytes)]), in_ms(10_000)).unwrap();
        assert_eq!(reply.len, 50_000);
        assert!(bytes == content(i as u64 * 100, 50_000), "call {i}");
    }
}

#[test]
fn a_server_that_does_not_read_on_before_it_is_read_does_not_block_us() {
    // The fake server answers a call before it reads the next, so it stops reading when its answers are not taken.
    let server = server(serve_content);
    let link = link_to(&[server.address()], Duration::from_secs(20));
    let mut buffers: Vec<Vec<u8>> = (0..40).map(|_| vec![0; 1 << 20]).collect();
    let written: Vec<Vec<u8>> = (0..40).map(|i| content(i << 20, 1 << 20)).collect();
    let slices: Vec<_> = written.iter().map(|bytes| [IoSlice::new(bytes)]).collect();
    let mut pieces: Vec<_> = buffers.iter_mut().map(|bytes| [IoSliceMut::new(bytes)]).collect();
    let mut ops = Vec::new();
    for (i, (piece, slice)) in pieces.iter_mut().zip(&slices).enumerate() {
        let offset = (i as u64) << 20;
        ops.push(Op { link: &link, call: read_call(&link, offset, 1 << 20), payload: &[], into: Some(piece) });
        let call = Call::Write { who: link.identity().who(), file: FileKey(1), lane_offset: offset };
        ops.push(Op { link: &link, call, payload: slice, into: None });
    }
    for reply in exchange(ops, in_ms(20_000)) {
        reply.unwrap();
    }
    assert!(buffers == written);
}

#[test]
fn one_thread_receiving_for_others_does_not_miss_its_own_end() {
    // Threads come and go with few calls each, so that leadership changes hands all the time.
    let server = server(serve_content);
    let link = link_to(&[server.address()], Duration::from_secs(20));
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for i in 0..300 {
                    let mut bytes = [0; 64];
                    let call = read_call(&link, i, 64);
                    link.call(call, &[], Some(&mut [IoSliceMut::new(&mut bytes)]), in_ms(5_000)).unwrap();
                    assert_eq!(bytes.as_slice(), content(i, 64));
                    if i % 50 == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 2400);
}

#[test]
fn over_a_unix_socket_too() {
    use std::os::unix::net::UnixListener;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.0");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let stream = impresario_transport::Stream::from_unix(socket, Duration::from_secs(10)).unwrap();
        let mut reader = impresario_transport::FrameReader::default();
        let limits = impresario_wire::Limits::of_server(1 << 20);
        let send = |kind, id, body: &[u8], payload: &[u8]| {
            let head = impresario_wire::FrameHeader {
                kind,
                id,
                body_len: body.len() as u32,
                payload_len: payload.len() as u32,
            };
            let head = [&head.encode()[..], body].concat();
            impresario_transport::send_frame(&stream, &head, &[IoSlice::new(payload)], in_ms(5_000)).unwrap();
        };
        reader.next_frame(&stream, &limits, in_ms(5_000)).unwrap();
        let welcome = impresario_wire::Welcome {
            version: impresario_wire::PROTOCOL_VERSION,
            name: "data.0".into(),
            incarnation: 5,
            max_payload_bytes: 1 << 20,
            cluster: Default::default(),
            store: 0,
            number: None,
            keys: Default::default(),
        };
        let frame = impresario_wire::frame::encode(impresario_wire::Kind::Welcome, 0, &welcome, 0).unwrap();
        send(impresario_wire::Kind::Welcome, 0, &frame[24..], &[]);
        let (header, _) = reader.next_frame(&stream, &limits, in_ms(5_000)).unwrap();
        let frame = impresario_wire::frame::encode(impresario_wire::Kind::Answer, 0, &Answer::Data, 0).unwrap();
        send(impresario_wire::Kind::Answer, header.id, &frame[24..], &content(3, 200_000));
    });
    let link = link_to(&[&format!("unix:{}", path.display())], Duration::from_secs(5));
    let mut bytes = vec![0; 200_000];
    let into = &mut [IoSliceMut::new(&mut bytes)];
    let reply = link.call(read_call(&link, 3, 200_000), &[], Some(into), in_ms(5_000)).unwrap();
    assert_eq!((reply.len, reply.incarnation), (200_000, 5));
    assert!(bytes == content(3, 200_000));
    server.join().unwrap();
}

#[test]
fn buffers_that_are_too_small_are_refused() {
    let server = server(serve_content);
    let link = link_to(&[server.address()], Duration::from_secs(5));
    let mut bytes = [0; 10];
    let error =
        link.call(read_call(&link, 0, 11), &[], Some(&mut [IoSliceMut::new(&mut bytes)]), in_ms(1000)).unwrap_err();
    assert!(matches!(error, ClientError::Invalid { .. }), "{error}");
    let call = Call::Write { who: link.identity().who(), file: FileKey(1), lane_offset: 0 };
    let error = link.call(call, &[IoSlice::new(&vec![0; 5 << 20])], None, in_ms(1000)).unwrap_err();
    assert!(error.to_string().contains("claims 5242880 bytes, but 4194304 is the limit"), "{error}");
}
