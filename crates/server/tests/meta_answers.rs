//! The memory of the metadata server for answers: booked before they are made, however many clients ask and do not read.

use std::time::Duration;

use crate::support::{Cluster, Peer, who};
use impresario_testing::until;
use impresario_wire::{Answer, Call, MetaCall, Role, Who};

const CLIENTS: usize = 12;
/// Listings that each client asks for at once.
const LISTINGS: usize = 24;
const NAMES: usize = 2_500;

fn call(call: MetaCall) -> Call {
    Call::Meta { who: who(1), call }
}

/// The same of a change with this number.
fn change(sequence: u64, call: MetaCall) -> Call {
    Call::Meta { who: Who { sequence, ..who(1) }, call }
}

#[test]
fn listings_that_are_not_read_take_no_more_memory_than_is_booked() {
    let cluster = Cluster::start(1, |config| {
        // A TCP socket takes megabytes of answers that nobody reads.
        config.meta.address = format!("unix:{}", config.meta.dir.with_extension("sock").display());
        config.cluster.request_timeout_ms = 120_000;
    });
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let mut names = Peer::connect(meta.address(), Role::Meta, 1);
    let mkdir = change(1, MetaCall::Mkdir { path: b"d".into(), mode: 0o755, uid: 0, gid: 0 });
    assert!(matches!(names.call(&mkdir, &[]).0, Answer::Attr(_)));
    for n in 0..NAMES {
        let path = format!("d/{n:0>250}").into_bytes();
        names.send(&change(2 + n as u64, MetaCall::Symlink { path, target: b"t".into(), uid: 0, gid: 0 }), &[]);
        assert!(n % 100 != 99 || (0..100).all(|_| matches!(names.answer().unwrap().1, Answer::Attr(_))));
    }
    // While a file is written calls wait for their turn on the server's threads, in any number.
    let create = MetaCall::Create { path: b"w".into(), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
    let created = names.call(&change(2 + NAMES as u64, create), &[]).0;
    assert!(matches!(created, Answer::Opened(_)), "{created:?}");

    let list = call(MetaCall::Readdir { path: b"d".into(), after: Vec::new(), max: 10_000 });
    let mut clients: Vec<Peer> =
        (0..CLIENTS).map(|n| Peer::connect(meta.address(), Role::Meta, 10 + n as u64)).collect();
    for client in &mut clients {
        for _ in 0..LISTINGS {
            client.send(&list, &[]);
        }
    }
    let memory = |peer: &mut Peer| {
        let memory = peer.status()["memory"].clone();
        ["payload_bytes", "payload_bytes_peak", "payload_bytes_max"].map(|key| memory[key].as_u64().unwrap())
    };
    let mut steady = (0, 0);
    until("no more answers are made", || {
        std::thread::sleep(Duration::from_millis(50));
        let used = memory(&mut names)[0];
        steady = if steady.0 == used { (used, steady.1 + 1) } else { (used, 0) };
        used > 32 << 20 && steady.1 == 10
    });
    std::thread::scope(|scope| {
        for client in &mut clients {
            scope.spawn(|| {
                for _ in 0..LISTINGS {
                    let answer = client.answer().unwrap().1;
                    assert!(matches!(&answer, Answer::Entries(entries) if entries.len() > 2_000), "{answer:.200?}");
                }
            });
        }
    });
    until("memory is given back", || memory(&mut names)[0] == 0);
    let [_, peak, max] = memory(&mut names);
    assert!(peak <= max, "{peak} bytes were held, {max} are the limit");
    // What is short is answered as ever, and what was booked for it is given back.
    for (n, what) in [
        MetaCall::Readlink { path: format!("d/{:0>250}", 1).into_bytes() },
        MetaCall::ListXattr { target: impresario_wire::Target::Path(b"d".into()) },
        MetaCall::Readdir { path: b"d".into(), after: format!("{:0>250}", NAMES - 2).into_bytes(), max: u32::MAX },
        MetaCall::Readdir { path: b"none".into(), after: Vec::new(), max: 1 },
    ]
    .into_iter()
    .enumerate()
    {
        let answer = names.call(&call(what), &[]).0;
        let is_right = match &answer {
            Answer::Link(target) => n == 0 && target == b"t",
            Answer::Xattr(names) => n == 1 && names.is_empty(),
            Answer::Entries(entries) => n == 2 && entries.len() == 1,
            Answer::Fault(fault) => n == 3 && fault.errno == libc::ENOENT,
            _ => false,
        };
        assert!(is_right, "{n}: {answer:?}");
    }
    until("all is given back", || memory(&mut names)[0] == 0);
}
