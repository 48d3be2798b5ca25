//! Clients go over to other I/O nodes, and to none, while they run: nothing is lost, nothing is done twice.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support::{Cluster, Peer, pattern};
use impresario_client::{Client, ClientOptions, CreateOptions, Locked, Via};
use impresario_config::{Allocation, AllocationRule, Config};
use impresario_server::Started;
use impresario_testing::until;
use impresario_wire::{FileLock, Role};

const JOB: u64 = 7;
/// Bytes of a write.
const PIECE: usize = 3000;

/// Two data servers, a metadata server and three I/O nodes.
struct Bed {
    cluster: Cluster,
    _meta: Started,
    io: Vec<Started>,
}

fn start() -> Bed {
    let mut cluster = Cluster::start(2, |config| config.cluster.request_timeout_ms = 20_000);
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let io = (0..3).map(|_| cluster.start_io(|_| {})).collect();
    Bed { cluster, _meta: meta, io }
}

/// Dropped, it ends the writers.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Bed {
    /// The configuration with these I/O nodes for the job.
    fn with(&self, nodes: &[usize]) -> Config {
        let nodes = nodes.iter().map(|node| format!("io.{node}")).collect();
        let rule = AllocationRule { jobs: vec![JOB], hosts: Vec::new(), nodes };
        Config { allocation: Allocation { rules: vec![rule], ..Allocation::default() }, ..self.cluster.config.clone() }
    }

    fn client(&self, config: &Config) -> Arc<Client> {
        Client::connect(config, ClientOptions { job: JOB, placement_seed: 0, ..ClientOptions::default() }).unwrap()
    }

    /// Connections of an I/O node, without the one that asks.
    fn connections(&self, node: usize) -> u64 {
        let mut peer = Peer::connect(self.io[node].address(), Role::Io, 99);
        peer.status()["connections"]["open"].as_u64().unwrap() - 1
    }
}

#[test]
fn a_job_changes_its_nodes_under_load_without_losing_a_request() {
    const WRITERS: u64 = 4;
    let bed = start();
    let client = bed.client(&bed.with(&[0]));
    let files: Vec<_> =
        (0..WRITERS).map(|n| client.create(format!("f{n}"), CreateOptions::default()).unwrap()).collect();
    let lock = FileLock { owner: 1, pid: 1, start: 0, end: 9, exclusive: true };
    let soon = std::time::Instant::now() + Duration::from_secs(10);
    assert!(matches!(files[0].lock(lock, false, soon).unwrap(), Locked::Granted { .. }));
    // Removed, and in use all the same.
    let removed = client.create("removed", CreateOptions::default()).unwrap();
    removed.write_at(b"still here", 0).unwrap();
    client.unlink("removed").unwrap();

    let (ends, made) = (AtomicBool::new(false), AtomicU64::new(0));
    let written: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> = files
            .iter()
            .zip(0u64..)
            .map(|(file, writer)| {
                let (ends, made, client) = (&ends, &made, &client);
                scope.spawn(move || {
                    let mut count = 0;
                    while !ends.load(Ordering::Relaxed) {
                        let (seed, at) = (writer << 32 | count, count * PIECE as u64);
                        assert_eq!(file.write_at(&pattern(seed, PIECE), at).unwrap(), PIECE);
                        let mut back = vec![0; PIECE];
                        assert_eq!(file.read_at(&mut back, at).unwrap(), PIECE);
                        assert!(back == pattern(seed, PIECE), "what was written is read, whichever way it went");
                        // Done twice, the second would find it there, or gone.
                        let name = format!("d{writer}.{count}");
                        client.mkdir(&name, 0o755, 0, 0).unwrap();
                        client.rename(&name, format!("{name}.renamed"), true).unwrap();
                        client.rmdir(format!("{name}.renamed")).unwrap();
                        if count % 64 == 0 {
                            file.sync().unwrap();
                        }
                        count += 1;
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                    count
                })
            })
            .collect();
        // However this ends, so do the writers.
        let ending = Ending(&ends);
        let changes: [&[usize]; 6] = [&[2, 1], &[], &[0, 2], &[], &[2], &[1]];
        for nodes in changes.into_iter().cycle().take(12) {
            let before = made.load(Ordering::Relaxed);
            until("the writers have gone on", || made.load(Ordering::Relaxed) >= before + 4);
            assert!(client.reallocate(&bed.with(nodes)).unwrap(), "{nodes:?}");
            assert_eq!(client.is_direct(), nodes.is_empty());
            assert!(!client.reallocate(&bed.with(nodes)).unwrap(), "nothing has changed");
        }
        drop(ending);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    // The way that it has, and no other.
    until("old connections end", || [0, 1, 2].map(|node| bed.connections(node)) == [0, 1, 0]);
    let mut bytes = [0; 10];
    assert_eq!(removed.read_at(&mut bytes, 0).unwrap(), 10);
    assert_eq!(&bytes, b"still here");
    assert!(!files[0].is_lost(), "its lock outlasts the changes");
    let other = Client::connect(&bed.cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap();
    let seen = other.open("f0", true).unwrap();
    let soon = std::time::Instant::now() + Duration::from_secs(10);
    assert!(matches!(seen.lock(FileLock { owner: 2, ..lock }, false, soon).unwrap(), Locked::Held(_)));
    drop(seen);
    for file in files {
        file.close().unwrap();
    }
    for (writer, count) in written.into_iter().enumerate() {
        let name = format!("f{writer}");
        assert_eq!(other.stat(&name).unwrap().size, count * PIECE as u64);
        let file = other.open(&name, false).unwrap();
        for piece in 0..count {
            let mut back = vec![0; PIECE];
            file.read_at(&mut back, piece * PIECE as u64).unwrap();
            assert!(back == pattern((writer as u64) << 32 | piece, PIECE), "piece {piece} of {name}");
        }
    }
    assert!(!other.list("").unwrap().iter().any(|entry| entry.name.starts_with(b"d")), "every rmdir was done");
}

/// A node that cannot be reached changes nothing, and clients that were given their way keep it.
#[test]
fn what_cannot_be_reached_is_not_taken() {
    let bed = start();
    let client = bed.client(&bed.with(&[0]));
    let mut gone = bed.with(&[]);
    gone.cluster.request_timeout_ms = 200;
    gone.meta.address = "127.0.0.1:1".into();
    assert!(client.reallocate(&gone).is_err());
    assert!(!client.is_direct());
    client.mkdir("goes on", 0o755, 0, 0).unwrap();
    let fixed = ClientOptions { via: Via::IoNode(2), job: JOB, ..ClientOptions::default() };
    let fixed = Client::connect(&bed.with(&[0]), fixed).unwrap();
    assert!(!fixed.reallocate(&bed.with(&[1])).unwrap());
    assert_eq!([0, 1, 2].map(|node| bed.connections(node)), [1, 0, 1]);
}

/// The nodes of a job are lost: its clients use others until it gets some.
#[test]
fn a_job_outlives_its_nodes() {
    let mut bed = start();
    let client = bed.client(&bed.with(&[0]));
    let file = client.create("f", CreateOptions::default()).unwrap();
    file.write_at(b"before", 0).unwrap();
    drop(bed.io.remove(0));
    file.write_at(b"behind", 6).unwrap();
    file.sync().unwrap();
    let mut bytes = [0; 12];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 12);
    assert_eq!(&bytes, b"beforebehind");
}

#[test]
fn a_client_follows_its_file_and_mistakes_change_nothing() {
    let bed = start();
    let file = bed.cluster.dir.path().join("impresario.toml");
    let write = |text: &str| {
        let new = file.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, &file).unwrap();
    };
    write(&bed.with(&[0]).to_toml());
    let config = Config::load(Path::new(&file)).unwrap();
    let client = bed.client(&config);
    client.follow(&config);
    write(&bed.with(&[]).to_toml());
    until("it goes straight", || client.is_direct());
    write("[allocation]\nspread = \"nonsense\"\n");
    std::thread::sleep(Duration::from_millis(2500));
    assert!(client.is_direct());
    client.mkdir("goes on", 0o755, 0, 0).unwrap();
    write(&bed.with(&[2]).to_toml());
    until("it goes through the third", || bed.connections(2) == 1 && !client.is_direct());
}

/// Else each restart of a node would leave its clients with those that were not restarted.
#[test]
fn a_client_goes_back_to_its_node_when_that_is_there_again() {
    let mut cluster = Cluster::start(2, |config| config.cluster.request_timeout_ms = 20_000);
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let io = (0..2).map(|_| cluster.start_io(|_| {})).collect();
    let mut bed = Bed { cluster, _meta: meta, io };
    let config = bed.with(&[0, 1]);
    let client = bed.client(&config);
    client.follow(&config);
    let file = client.create("f", CreateOptions::default()).unwrap();
    let removed = client.create("removed", CreateOptions::default()).unwrap();
    removed.write_at(b"still here", 0).unwrap();
    client.unlink("removed").unwrap();
    drop(bed.io.remove(0));
    let mut count = 0;
    let mut write = || {
        assert_eq!(file.write_at(&pattern(count, PIECE), count * PIECE as u64).unwrap(), PIECE);
        client.mkdir(format!("d{count}"), 0o755, 0, 0).unwrap();
        count += 1;
    };
    write();
    assert!(client.is_away());
    assert!(!client.return_home(&config).unwrap(), "it is not there");
    write();
    let _again = impresario_server::start(&bed.cluster.config, "io.0").unwrap();
    until("it goes back", || {
        write();
        !client.is_away()
    });
    write();
    file.sync().unwrap();
    for piece in 0..count {
        let mut back = vec![0; PIECE];
        file.read_at(&mut back, piece * PIECE as u64).unwrap();
        assert!(back == pattern(piece, PIECE), "piece {piece}");
        client.rmdir(format!("d{piece}")).unwrap();
    }
    let mut bytes = [0; 10];
    assert_eq!(removed.read_at(&mut bytes, 0).unwrap(), 10);
    assert_eq!(&bytes, b"still here");
}
