//! Peers that misbehave: what they send, and what they do not take, harms nobody else.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::support::{Served, serve};
use impresario_backend::SetAttr;
use impresario_base::Random;
use impresario_nfs::protocol::{Stability, procedure::*};
use impresario_nfs::testing::{Client, MemoryTree, handle};
use impresario_nfs::xdr::Writer;

/// The connection is closed by the server within the client's patience.
fn is_closed(client: &mut Client) -> bool {
    matches!(client.socket().read(&mut [0; 64]), Ok(0) | Err(_))
}

#[test]
fn nonsense_ends_its_connection_only() {
    let served = Served::new();
    let (mut good, root) = served.mounted();
    let bad: [&[u8]; 5] = [
        &[0xff; 64],                                           // a record of 2 GiB
        &[0x80, 0, 0, 4, 0, 0, 0, 1],                          // too short for a call
        &[0x80, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0], // a reply
        &[0; 4096],                                            // empty fragments without end
        b"GET / HTTP/1.1\r\n\r\n",
    ];
    for bytes in bad {
        let mut client = served.client();
        client.socket().write_all(bytes).unwrap();
        assert!(is_closed(&mut client), "{bytes:?}");
        good.attr(&root).unwrap();
    }
    assert!(served.running.status()["connections"]["complaints"].as_u64() >= Some(5));
}

/// Calls with arguments of any bytes, and calls cut anywhere: all are answered or end their connection, none the server.
#[test]
fn any_arguments_are_answered() {
    let served = Served::new();
    let (mut good, root) = served.mounted();
    let mut random = Random::new(5);
    let mut client = served.client();
    for round in 0..3000 {
        let number = random.below(23) as u32;
        let mut args = if random.below(2) == 0 { handle(&root) } else { Writer::default() };
        for _ in 0..random.below(12) {
            match random.below(4) {
                0 => args.u32(random.below(4) as u32),
                1 => args.u32(random.next_u64() as u32),
                2 => args.opaque(&random.next_u64().to_be_bytes()[..random.below(9) as usize]),
                _ => args.opaque(&root),
            };
        }
        let xid = client.send(number, args).unwrap();
        // A read or listing of nonsense is a status; what is no call is refused; none is left without a reply.
        match client.wait(xid) {
            Ok(_) | Err(impresario_nfs::testing::ClientError::Refused(_)) => {}
            Err(other) => panic!("{round}: {other}"),
        }
    }
    good.attr(&root).unwrap();
}

#[test]
fn a_peer_that_takes_no_answers_holds_little_memory() {
    let served = serve(&MemoryTree::new(), |settings| settings.memory_bytes = 16 << 20);
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &SetAttr::default()).unwrap();
    client.write(&file, 0, &[7; 1 << 20], Stability::File).unwrap();
    let mut greedy: Vec<Client> = (0..8).map(|_| served.client()).collect();
    for client in &mut greedy {
        client.socket().set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        for _ in 0..100 {
            if client.send_read(&file, 0, 1 << 20).is_err() {
                break;
            }
        }
    }
    // Others are served meanwhile: reads, too.
    for _ in 0..20 {
        client.attr(&root).unwrap();
    }
    let status = served.running.status();
    let peak = status["memory"]["peak_bytes"].as_u64().unwrap();
    assert!(peak <= 19 << 20, "{status}");
    drop(greedy);
    assert_eq!(client.read(&file, 0, 1 << 20).unwrap().bytes.len(), 1 << 20);
}

#[test]
fn idle_connections_give_way_and_end() {
    let served = serve(&MemoryTree::new(), |settings| {
        settings.max_connections = 4;
        settings.idle_max = Duration::from_secs(3);
    });
    let mut first = served.client();
    first.mount("/data").unwrap();
    // Over the limit while all are busy: refused; then the idlest gives way.
    let mut others: Vec<Client> = (0..20).map(|_| served.client()).collect();
    let answered = others.iter_mut().filter_map(|client| client.mount("/data").ok()).count();
    assert!(answered >= 1);
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut late = served.client();
    while late.mount("/data").is_err() {
        assert!(Instant::now() < deadline, "no connection gives way");
        std::thread::sleep(Duration::from_millis(50));
        late = served.client();
    }
    // Without calls, a connection ends after a while.
    assert!(is_closed(&mut late));
}

#[test]
fn a_reply_is_not_lost_when_answers_overtake_one_another() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let sent: Vec<u32> = (0..500).map(|_| client.send(GETATTR, handle(&root)).unwrap()).collect();
    for xid in sent.into_iter().rev() {
        client.wait(xid).unwrap().good().unwrap();
    }
}

/// A program that ends with an answer on its way resets its connection; that is no misbehaviour.
#[test]
fn a_client_that_ends_is_not_complained_of() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    for _ in 0..20 {
        let mut ends = served.client();
        ends.send(GETATTR, handle(&root)).unwrap();
        ends.socket().peek(&mut [0; 4]).unwrap();
        drop(ends); // unread
    }
    let connections = || served.running.status()["connections"].clone();
    impresario_testing::until("they have ended", || connections()["open"] == 1);
    assert_eq!(connections()["complaints"], 0, "{}", connections());
    client.attr(&root).unwrap();
}
