//! A data server that hangs delays what needs it, and nothing else: real processes, one of them stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::locks::{Mount, lock};
use crate::support::{self, Cluster, Stopped, client, new_file, pattern};
use impresario_client::{Client, CreateOptions};
use impresario_wire::LayoutRequest;

const CALLERS: usize = 64;
const BLOCK: usize = 16 << 10;
const BLOCKS: u64 = 500;

/// On one data server, or from one on over several.
fn on(server: u16, servers: u16) -> CreateOptions {
    let layout = LayoutRequest { base: Some(server), pcount: Some(servers), ssize_bytes: Some(4096) };
    CreateOptions { layout: Some(layout), ..new_file(0o644) }
}

/// Writes blocks of a new file on the data server 0, reads them, fsyncs now and then. How long that took.
fn work(client: &Arc<Client>, name: &str, blocks: u64) -> Duration {
    let began = Instant::now();
    let file = client.create(name, on(0, 1)).unwrap();
    let mut got = vec![0; BLOCK];
    for block in 0..blocks {
        let (offset, bytes) = (block * BLOCK as u64, pattern(1, 0, block, BLOCK));
        assert_eq!(file.write_at(&bytes, offset).unwrap(), BLOCK);
        assert_eq!(file.read_at(&mut got, offset).unwrap(), BLOCK);
        assert!(got == bytes, "block {block}");
        if block % 100 == 0 {
            file.sync().unwrap();
        }
    }
    file.close().unwrap();
    began.elapsed()
}

/// What callers do that wait for a stopped data server.
#[derive(Clone, Copy, PartialEq)]
enum Calls {
    Syncs,
    /// Writes, reads and syncs.
    All,
}

/// 64 callers wait for a stopped data server through an I/O node, which serves files on the other meanwhile.
fn io_node_serves_others(split: bool, spanning: bool, calls: Calls) {
    let mut cluster = Cluster::start(2, 1, |config| {
        config.cluster.request_timeout_ms = 60_000;
        config.io[0].split = split;
        config.io[0].dispatch_requests = 48;
    });
    let files: Vec<_> = (0..CALLERS)
        .map(|n| {
            let (first, servers) = if spanning { (n as u16 % 2, 2) } else { (1, 1) };
            let file = client(&cluster.config, n as u64).create(format!("waits.{n}"), on(first, servers)).unwrap();
            file.write_at(&pattern(n as u64, 0, 0, BLOCK), 0).unwrap();
            file
        })
        .collect();
    let healthy = client(&cluster.config, 1000);
    work(&healthy, "warm", 50);
    let before = work(&healthy, "before", BLOCKS);
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let stopped = Stopped::stop(&mut cluster, "data.1");
        for (n, file) in files.iter().enumerate() {
            let ended = &ended;
            scope.spawn(move || {
                let mut got = vec![0; BLOCK];
                match n % 3 {
                    _ if calls == Calls::Syncs => file.sync().unwrap(),
                    0 => assert_eq!(file.write_at(&pattern(n as u64, 0, 0, BLOCK), 0).unwrap(), BLOCK),
                    1 => assert_eq!(file.read_at(&mut got, 0).unwrap(), BLOCK),
                    _ => file.sync().unwrap(),
                }
                ended.fetch_add(1, Ordering::SeqCst);
            });
        }
        let name = format!("beside.{split}.{spanning}");
        work(&healthy, &format!("{name}.at_first"), 50);
        let beside = work(&healthy, &name, BLOCKS);
        println!("{BLOCKS} blocks: {before:?} before, {beside:?} beside {CALLERS} callers of a stopped server");
        assert_eq!(ended.load(Ordering::SeqCst), 0, "all callers of the stopped server wait still");
        let forward = cluster.state("io.0")["forward"].clone();
        // Syncs are not in the dispatch queue, so nothing is stuck there.
        if calls == Calls::Syncs {
            drop(stopped);
            return;
        }
        assert!(forward["hung_lanes"].as_array().is_some_and(|lanes| lanes.contains(&1.into())), "{forward}");
        assert!(forward["stuck"].as_u64().is_some_and(|stuck| (16..=32).contains(&stuck)), "{forward}");
        drop(stopped);
    });
    assert_eq!(ended.load(Ordering::SeqCst), CALLERS, "they were served when it went on");
    let fresh = client(&cluster.config, 2000);
    for n in 0..CALLERS {
        assert!(support::read_file(&fresh, &format!("waits.{n}")) == pattern(n as u64, 0, 0, BLOCK), "file {n}");
    }
    let forward = cluster.state("io.0")["forward"].clone();
    assert_eq!((&forward["stuck"], &forward["hung_lanes"]), (&0.into(), &serde_json::json!([])), "{forward}");
}

#[test]
fn an_io_node_serves_files_on_other_servers() {
    io_node_serves_others(false, false, Calls::All);
}

#[test]
fn an_io_node_that_splits_requests_serves_files_on_other_servers() {
    io_node_serves_others(true, false, Calls::All);
}

#[test]
fn an_io_node_serves_others_while_requests_over_several_servers_are_stuck() {
    io_node_serves_others(false, true, Calls::All);
}

#[test]
fn an_io_node_serves_others_while_parts_of_requests_are_stuck() {
    io_node_serves_others(true, true, Calls::All);
}

/// A file over both servers is synced on the lane of its first byte, so half of them wait on that of the server that answers.
#[test]
fn an_io_node_syncs_other_files_while_64_syncs_are_stuck() {
    io_node_serves_others(false, true, Calls::Syncs);
}

#[test]
fn an_io_node_that_splits_requests_syncs_other_files_while_64_syncs_are_stuck() {
    io_node_serves_others(true, true, Calls::Syncs);
}

/// A node that reads nothing of a client, as the client's requests hold all that it may have under way, hears no ping either.
#[test]
fn an_io_node_that_waits_for_a_data_server_is_not_left_for_another() {
    const WRITERS: u64 = 12;
    const BYTES: usize = 256 << 10;
    let mut cluster = Cluster::start(1, 2, |config| {
        config.cluster.request_timeout_ms = 60_000;
        config.cluster.max_payload_bytes = 1 << 20;
        config.io.iter_mut().for_each(|io| io.payload_bytes = 2 << 20);
    });
    let client = client(&cluster.config, 0);
    let file = client.create("file", on(0, 1)).unwrap();
    file.write_at(&pattern(1, 0, 0, BYTES), 0).unwrap();
    let requests = |cluster: &Cluster, name: &str| cluster.state(name)["forward"]["requests"].as_u64().unwrap();
    let (ours, other) = if requests(&cluster, "io.0") > 0 { ("io.0", "io.1") } else { ("io.1", "io.0") };
    let before = (requests(&cluster, ours), requests(&cluster, other));
    let stopped = Stopped::stop(&mut cluster, "data.0");
    std::thread::scope(|scope| {
        let write = |at: u64| file.write_at(&pattern(1, 1, at * BYTES as u64, BYTES), at * BYTES as u64).unwrap();
        let writers: Vec<_> = (0..WRITERS).map(|at| scope.spawn(move || assert_eq!(write(at), BYTES))).collect();
        // Much longer than a node that says nothing is waited for.
        std::thread::sleep(Duration::from_secs(4));
        let has = requests(&cluster, ours) - before.0;
        assert!((1..WRITERS).contains(&has), "{has} of {WRITERS} writes were read: the client's connection is full");
        drop(stopped);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    assert_eq!(requests(&cluster, other), before.1, "{ours} was left");
    assert_eq!(requests(&cluster, ours), before.0 + WRITERS, "nothing was sent twice");
    let mut got = vec![0; BYTES];
    for at in 0..WRITERS {
        assert_eq!(file.read_at(&mut got, at * BYTES as u64).unwrap(), BYTES);
        assert!(got == pattern(1, 1, at * BYTES as u64, BYTES), "write {at}");
    }
}

/// A call on a mount, what it is, and whether it waits for the stopped server.
type Beside<'a> = (&'a str, bool, Box<dyn FnOnce() + Send + 'a>);

/// What waits on a mount beside a stopped data server: `stuck` does, and of the rest, in this order, no more than what says so.
fn a_mount_goes_on_beside(cluster: &mut Cluster, stuck: impl FnOnce() + Send, beside: Vec<Beside<'_>>) {
    std::thread::scope(|scope| {
        let stopped = Stopped::stop(cluster, "data.1");
        let stuck = scope.spawn(stuck);
        let mut waiting = Vec::new();
        for (what, waits, call) in beside {
            std::thread::sleep(Duration::from_millis(300));
            let call = scope.spawn(call);
            if waits {
                waiting.push((what, call));
                continue;
            }
            impresario_testing::within(Duration::from_secs(8), what, || call.is_finished().then_some(()));
            call.join().unwrap();
        }
        waiting.iter().for_each(|(what, call)| assert!(!call.is_finished(), "{what} waits for the stopped server"));
        assert!(!stuck.is_finished(), "it waits for the stopped server");
        drop(stopped);
    });
}

/// Paths below a directory wait for its move, and the move for calls below it: others are not concerned.
#[test]
fn a_mount_moves_directories_beside_a_call_that_waits_for_a_stopped_server() {
    if !impresario_testing::require("fuse") {
        return;
    }
    let mut cluster = Cluster::start(2, 0, |config| config.cluster.request_timeout_ms = 60_000);
    let mount = Mount::start_with(&cluster, "mnt", &["--cache-time", "0s"]);
    let other = client(&cluster.config, 1);
    other.mkdir("d", 0o755, 0, 0).unwrap();
    let written = other.create("d/written", on(1, 1)).unwrap();
    written.write_at(&pattern(1, 0, 0, BLOCK), 0).unwrap();
    let at = |name: &str| mount.dir.join(name);
    std::fs::create_dir_all(at("x/below")).unwrap();
    std::fs::write(at("x/below/f"), "f").unwrap();
    // A mount hears of a close later: as long as a file is open for writing, its data servers are asked for its size.
    impresario_testing::until("one file is open for writing", || cluster.state("meta")["meta"]["opens_write"] == 1);
    std::fs::metadata(at("d")).unwrap();
    let stuck = || assert!(std::fs::metadata(at("d/written")).is_ok());
    let moves = || std::fs::rename(at("x"), at("y")).unwrap();
    let stat = || assert!(std::fs::metadata(at("y/below/f")).is_ok());
    let made = || std::fs::create_dir(at("new")).unwrap();
    a_mount_goes_on_beside(
        &mut cluster,
        stuck,
        vec![
            ("a move of another directory", false, Box::new(moves)),
            ("a look at what is below it", false, Box::new(stat)),
            ("a new directory", false, Box::new(made)),
        ],
    );
    drop(written);
}

/// What the kernel has of a file is dropped when it is locked, which waits for reads of that file that are under way.
#[test]
fn a_mount_locks_files_beside_a_lock_that_waits_for_a_read_of_a_stopped_server() {
    if !impresario_testing::require("fuse") {
        return;
    }
    let mut cluster = Cluster::start(2, 0, |config| config.cluster.request_timeout_ms = 60_000);
    let mount = Mount::start_with(&cluster, "mnt", &[]);
    let other = client(&cluster.config, 1);
    for (name, server) in [("a", 1), ("b", 0)] {
        let file = other.create(name, on(server, 1)).unwrap();
        file.write_at(&pattern(1, 0, 0, BLOCK), 0).unwrap();
        file.close().unwrap();
    }
    let open = |name: &str| std::fs::OpenOptions::new().read(true).write(true).open(mount.dir.join(name)).unwrap();
    let (a, b) = (open("a"), open("b"));
    let stuck = || std::os::unix::fs::FileExt::read_exact_at(&a, &mut [0; 4096], 0).unwrap();
    let locks = |file| move || lock(file, libc::F_SETLKW, libc::F_WRLCK).unwrap();
    a_mount_goes_on_beside(
        &mut cluster,
        stuck,
        vec![
            ("a lock of the same file", true, Box::new(locks(&a))),
            ("a lock of another file", false, Box::new(locks(&b))),
        ],
    );
}

/// A window that nobody can use would be lost to the others, on every I/O node: they agree that there is none.
#[test]
fn io_nodes_take_no_turns_at_a_server_that_hangs() {
    let mut cluster = Cluster::start(2, 2, |config| {
        config.cluster.request_timeout_ms = 60_000;
        let twins = impresario_sched::PolicySpec::named("twins").with("window_us", 1000);
        config.io.iter_mut().for_each(|io| io.policy = twins.clone());
    });
    let files: Vec<_> = (0..CALLERS)
        .map(|n| client(&cluster.config, n as u64).create(format!("waits.{n}"), on(1, 1)).unwrap())
        .collect();
    let absent = |cluster: &Cluster, node: &str| cluster.state(node)["turns"]["absent_lanes"].clone();
    let agree = |cluster: &Cluster, lanes: serde_json::Value| {
        ["io.0", "io.1"].iter().all(|node| absent(cluster, node) == lanes)
    };
    impresario_testing::until("both have turns for both", || agree(&cluster, serde_json::json!([])));
    std::thread::scope(|scope| {
        let stopped = Stopped::stop(&mut cluster, "data.1");
        for (n, file) in files.iter().enumerate() {
            scope.spawn(move || assert_eq!(file.write_at(&pattern(n as u64, 0, 0, BLOCK), 0).unwrap(), BLOCK));
        }
        impresario_testing::until("neither has turns for the one that hangs", || {
            agree(&cluster, serde_json::json!([1]))
        });
        drop(stopped);
    });
    impresario_testing::until("it has turns again", || agree(&cluster, serde_json::json!([])));
}
