//! Small reads of many clients through an I/O node, in a process of their own, of which the threads are looked at.

mod support;

use impresario_layout::{Layout, Skipped};
use impresario_testing::until;
use impresario_wire::{Answer, Call, FileKey, Role};
use support::{Cluster, Peer, pattern, who};

const LAYOUT: Layout = Layout { base: 0, pcount: 1, ssize_bytes: 4096, servers: 1, skipped: Skipped::NONE };
const CLIENTS: u64 = 12;
const FILE_BYTES: usize = 64 << 10;

fn read(client: u64, offset: u64, len: u32) -> Call {
    Call::FileRead { who: who(client), file: FileKey(client), layout: LAYOUT, made: 0, offset, len }
}

/// Threads of this process with this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks
        .filter(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name))
        .count()
}

/// Also where more are under way than may be forwarded at once: whoever is answered forwards the next.
#[test]
fn no_thread_is_woken_to_forward_small_reads() {
    for in_flight in [2, 4, 64] {
        let mut cluster = Cluster::start(1, |_| {});
        for client in 0..CLIENTS {
            let written = cluster.peer(0, client).write(client, client, 0, &pattern(client, FILE_BYTES));
            assert_eq!(written, Answer::Written(FILE_BYTES as u32));
        }
        let io = cluster.start_io(|io| io.in_flight_requests = in_flight);
        // The first has to wait for a connection to the data server.
        let mut first = Peer::connect(io.address(), Role::Io, 0);
        assert_eq!(first.call(&read(0, 0, 10), &[]).1, pattern(0, FILE_BYTES)[..10]);
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let address = io.address();
                scope.spawn(move || {
                    let mut peer = Peer::connect(address, Role::Io, client);
                    let file = pattern(client, FILE_BYTES);
                    for round in 0..400u64 {
                        // One after another, and now and then several at once.
                        let several = if round % 50 == 49 { 6 } else { 1 };
                        let at = |n: u64| ((round * 7 + n * 5) % 16) as usize * 4096;
                        let sent: Vec<u64> =
                            (0..several).map(|n| peer.send(&read(client, at(n) as u64, 4096), &[])).collect();
                        for _ in 0..several {
                            let (id, answer, bytes) = peer.answer().unwrap();
                            let n = sent.iter().position(|sent| *sent == id).unwrap();
                            assert_eq!(answer, Answer::Data);
                            assert!(bytes == file[at(n as u64)..][..4096], "client {client}, round {round}");
                        }
                    }
                });
            }
        });
        assert!(threads("forward") <= 1, "{in_flight} at once");
        let mut peer = Peer::connect(io.address(), Role::Io, 1);
        let forwarded = peer.status()["forward"].clone();
        assert!(forwarded["requests"].as_u64().unwrap() >= CLIENTS * 400 && forwarded["failed"] == 0, "{forwarded}");
        until("nothing waits", || {
            let forward = peer.status()["forward"].clone();
            forward["waiting"] == 0 && forward["in_flight"] == 0
        });
    }
}
