//! A data server with 10,000 silent and 100 hostile connections: others are served, their bytes are right, and its memory
//! stays small.

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::support::{Cluster, Worker, client, new_file, pattern, read_file, write_file};
use impresario_base::machine::raise_file_limit;
use impresario_client::Client;
use impresario_testing::{skip, until};
use impresario_workload::cpu::process_rss_bytes;
use impresario_workload::crowd::{Crowd, Malice};

const SILENT: usize = 10_000;
/// Silent ones that say hello first.
const GREETED: usize = 1000;
const HOSTILE: usize = 100;
/// What a data server may have resident, bytes.
const RESIDENT_MAX: u64 = 200_000_000;
/// Honest clients.
const CLIENTS: u64 = 4;

/// Rewrites a file of its own, block by block, and reads every block back.
fn work(client: Arc<Client>, n: u64) -> Worker<()> {
    const BLOCK: usize = 256 << 10;
    Worker::start(move |rounds| {
        let file = client.create(format!("honest.{n}").as_bytes(), new_file(0o644)).unwrap();
        let mut back = vec![0; BLOCK];
        while let Some(round) = rounds.next() {
            let offset = round % 8 * BLOCK as u64;
            let bytes = pattern(n, round, offset, BLOCK);
            assert_eq!(file.write_at(&bytes, offset).unwrap(), BLOCK);
            assert_eq!(file.read_at(&mut back, offset).unwrap(), BLOCK);
            assert!(back == bytes, "client {n} reads other bytes in round {round}");
        }
        file.close().unwrap();
    })
}

/// A program of its own that connects, writes and reads.
fn newcomer(cluster: &Cluster, n: u64) {
    let (path, bytes) = (format!("new.{n}"), pattern(100 + n, 1, 0, 300_000));
    let client = client(&cluster.config, 100 + n);
    write_file(&client, &path, &bytes);
    assert!(read_file(&client, &path) == bytes, "{path}");
}

fn load(a: &AtomicU64) -> u64 {
    a.load(Relaxed)
}

#[test]
fn ten_thousand_silent_and_a_hundred_hostile_connections_stop_nobody() {
    let mut cluster = Cluster::start(1, 0, |_| {});
    let descriptors = raise_file_limit(0).now.unwrap_or(u64::MAX);
    if descriptors < (SILENT + HOSTILE + 500) as u64 {
        skip("descriptors", format!("the limit of open files is {descriptors}"));
        return;
    }
    let pid = cluster.server("data.0").pid();
    let workers: Vec<_> = (0..CLIENTS).map(|n| work(client(&cluster.config, n), n)).collect();
    workers.iter().for_each(|worker| worker.goes_on(1));
    let address: SocketAddrV4 = cluster.config.server("data.0").unwrap().address().parse().unwrap();
    let crowd = Crowd::gather(address, SILENT, GREETED, HOSTILE).unwrap();
    let mut resident_max = 0;
    let mut look = || {
        let resident = process_rss_bytes(pid).expect("the data server lives");
        resident_max = resident.max(resident_max);
        assert!(resident < RESIDENT_MAX, "{resident} bytes are resident; {:?}", crowd.fates());
    };
    until("all of the crowd have come", || {
        look();
        load(&crowd.fates().silent_made) >= SILENT as u64
    });
    for n in 0..20 {
        look();
        workers.iter().for_each(|worker| worker.goes_on(2));
        newcomer(&cluster, n);
    }
    for (n, way) in Malice::ALL.iter().enumerate() {
        until(format!("the server has closed those of {way:?}; {:?}", crowd.fates()), || {
            look();
            match way {
                // What is refused call by call is no reason to end a connection.
                Malice::Oversized => true,
                // It sees the end behind what it has not read.
                Malice::Unread => cluster.server("data.0").log().contains("reads its replies too slowly"),
                _ => load(&crowd.fates().hostile_closed[n]) > 0,
            }
        });
    }
    workers.iter().for_each(|worker| worker.goes_on(2));
    let state = cluster.state("data.0");
    println!("at most {:.1} MB resident; {:?}; {}", resident_max as f64 / 1e6, crowd.fates(), state["connections"]);
    let memory = &state["memory"];
    assert!(memory["payload_bytes_peak"].as_u64() <= memory["payload_bytes_max"].as_u64(), "{memory}");
    workers.into_iter().for_each(Worker::stop);
    drop(crowd);
    // Nothing of the crowd is left.
    until("the connections of the crowd are gone", || {
        cluster.state("data.0")["connections"]["open"].as_u64().is_some_and(|open| open < 20)
    });
    // Up to 32 more are told why they are refused, and up to 64 that have just spoken count as silent, too.
    let connections = &state["connections"];
    assert!(connections["open"].as_u64() <= connections["max"].as_u64().map(|max| max + 32 + 64), "{connections}");
    assert!(connections["evicted"].as_u64() > Some(0), "{connections}");
}
