//! Servers that die under load and come back, or stay away: acknowledged data is there, errors come in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::{
    self, Cluster, Rounds, SmallDisk, Stopped, Worker, client, client_via, new_file, pattern, read_file, run,
    write_file,
};
use impresario_base::Random;
use impresario_client::{Client, CreateOptions, File, Locked, Via};
use impresario_config::{Config, Meta, Tree};
use impresario_testing::content::first_difference;
use impresario_testing::{PATIENCE, eventually, until};
use impresario_wire::{FileLock, SpaceChange};

const BLOCK: usize = 24 * 1024;
const BLOCKS: u64 = 64;

/// Writers that overwrite blocks of their own file, sometimes fsync, and record what was acknowledged.
struct Load(Vec<Worker<Vec<u64>>>);

impl Load {
    /// Starts `count` writers, each with its own client and file.
    fn start(config: &Config, count: u64) -> Load {
        let writer = |w| {
            let config = config.clone();
            Worker::start(move |rounds| write_blocks(&client(&config, w), w, rounds))
        };
        Load((0..count).map(writer).collect())
    }

    /// Waits until each writer has written `blocks` more blocks.
    #[track_caller]
    fn goes_on(&self, blocks: u64) {
        self.0.iter().for_each(|writer| writer.goes_on(blocks));
    }

    /// Stops the writers and compares every file with what was acknowledged, by a fresh client.
    #[track_caller]
    fn stop_and_verify(self, config: &Config) {
        let reader = client(config, 99);
        for (w, writer) in self.0.into_iter().enumerate() {
            let generations = writer.stop();
            let data = read_file(&reader, &format!("load.{w}"));
            for (block, generation) in generations.iter().enumerate().filter(|(_, generation)| **generation > 0) {
                let offset = block * BLOCK;
                let wanted = pattern(w as u64, *generation, offset as u64, BLOCK);
                assert!(
                    data[offset..offset + BLOCK] == wanted,
                    "file {w} block {block} is not generation {generation}"
                );
            }
        }
    }
}

/// The last acknowledged generation of each block.
fn write_blocks(client: &Arc<Client>, w: u64, rounds: &Rounds) -> Vec<u64> {
    let file = client.create(format!("load.{w}").as_bytes(), new_file(0o644)).unwrap();
    let mut generations = vec![0; BLOCKS as usize];
    while let Some(count) = rounds.next() {
        // A walk that visits every block and is not sequential.
        let block = (count * 37 + w) % BLOCKS;
        let generation = count / BLOCKS + 1;
        let offset = block * BLOCK as u64;
        let data = pattern(w, generation, offset, BLOCK);
        let mut done = 0;
        while done < BLOCK {
            done += file.write_at(&data[done..], offset + done as u64).unwrap_or_else(|e| panic!("writer {w}: {e}"));
        }
        generations[block as usize] = generation;
        if count % 50 == 49 {
            file.sync().unwrap_or_else(|e| panic!("writer {w}, fsync: {e}"));
        }
    }
    file.sync().unwrap();
    file.close().unwrap();
    generations
}

#[track_caller]
fn killed_under_load_heals(data: usize, io: usize, victim: &str) {
    let mut cluster = Cluster::start(data, io, |_| {});
    let load = Load::start(&cluster.config, 3);
    for _ in 0..3 {
        load.goes_on(30);
        cluster.kill(victim);
        std::thread::sleep(Duration::from_millis(300));
        cluster.restart(victim);
    }
    load.goes_on(30);
    load.stop_and_verify(&cluster.config);
}

#[test]
fn a_killed_data_server_heals_direct() {
    killed_under_load_heals(3, 0, "data.1");
}

#[test]
fn a_killed_data_server_heals_behind_io_nodes() {
    killed_under_load_heals(3, 2, "data.1");
}

#[test]
fn a_killed_io_node_heals() {
    killed_under_load_heals(2, 1, "io.0");
}

#[test]
fn a_killed_metadata_server_heals() {
    killed_under_load_heals(2, 1, "meta");
}

/// With another I/O node, its clients continue at once, without a restart.
#[test]
fn clients_of_a_lost_io_node_go_to_the_next() {
    let mut cluster = Cluster::start(2, 2, |_| {});
    let load = Load::start(&cluster.config, 4);
    load.goes_on(30);
    cluster.kill("io.0");
    load.goes_on(80);
    cluster.restart("io.0");
    cluster.kill("io.1");
    load.goes_on(80);
    load.stop_and_verify(&cluster.config);
}

/// A node that hangs answers nothing and ends no connection: its clients must find out, long before their calls time out.
#[test]
fn clients_of_an_io_node_that_hangs_go_to_the_next() {
    let mut cluster = Cluster::start(2, 2, |config| config.cluster.request_timeout_ms = 600_000);
    let load = Load::start(&cluster.config, 4);
    load.goes_on(30);
    let stopped = Stopped::stop(&mut cluster, "io.0");
    load.goes_on(80);
    drop(stopped);
    let other = Stopped::stop(&mut cluster, "io.1");
    load.goes_on(80);
    drop(other);
    load.stop_and_verify(&cluster.config);
}

/// In front of a folder nothing but the node itself knows that its clients have done their work through another one since.
#[test]
fn an_io_node_of_a_folder_that_hung_does_nothing_that_its_clients_have_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::describe(0, 2, |config| {
        config.cluster.request_timeout_ms = 600_000;
        config.meta = Meta::default();
        config.tree = Some(Tree { folder: folder.path().into(), ..Tree::default() });
    });
    cluster.begin();
    let client = client_via(&cluster.config, 1, Via::IoNode(0));
    let file = client.create("file", new_file(0o644)).unwrap();
    file.write_at(&[0; BLOCK], 0).unwrap();
    write_file(&client, "name", b"first");
    let calls = cluster.state("io.0")["connections"]["calls"].as_u64().unwrap();
    let stopped = Stopped::stop(&mut cluster, "io.0");
    // Each is sent to the node that hangs, and then to the other one.
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(file.write_at(&[1; BLOCK], 0).unwrap(), BLOCK));
        scope.spawn(|| client.unlink("name").unwrap());
        scope.spawn(|| file.set_len(BLOCK as u64).unwrap());
    });
    assert_eq!(file.write_at(&[2; BLOCK], 0).unwrap(), BLOCK);
    file.set_len(2 * BLOCK as u64).unwrap();
    write_file(&client, "name", b"second");
    drop(stopped);
    let mut asked = 0;
    until("the node that hung has read what it was sent, and is done with it", || {
        asked += 1;
        let now = cluster.state("io.0")["connections"].clone();
        now["calls"].as_u64().unwrap() >= calls + asked + 3 && now["calls_under_way"] == 1
    });
    let node = client_via(&cluster.config, 2, Via::IoNode(0));
    write_file(&node, "through it", b"as ever");
    let bytes = std::fs::read(folder.path().join("file")).unwrap();
    assert!(bytes.len() == 2 * BLOCK && bytes[..BLOCK] == [2; BLOCK] && bytes[BLOCK..] == [0; BLOCK]);
    assert_eq!(std::fs::read(folder.path().join("name")).unwrap(), b"second");
    assert_eq!(std::fs::read(folder.path().join("through it")).unwrap(), b"as ever");
}

/// All servers are killed at once and restarted: names, sizes and data that were fsynced are intact.
#[test]
fn a_cluster_that_is_killed_as_a_whole_heals() {
    let mut cluster = Cluster::start(2, 1, |_| {});
    let data = pattern(7, 1, 0, 1_234_567);
    let writer = client(&cluster.config, 1);
    write_file(&writer, "synced", &data);
    // Still open for writing when everything dies.
    let open = writer.create(b"open", new_file(0o600)).unwrap();
    open.write_at(&data[..500_000], 0).unwrap();
    open.sync().unwrap();
    for name in ["io.0", "meta", "data.0", "data.1"] {
        cluster.kill(name);
    }
    for name in ["data.0", "data.1", "meta", "io.0"] {
        cluster.restart(name);
    }
    let reader = client(&cluster.config, 2);
    assert!(read_file(&reader, "synced") == data);
    assert!(read_file(&reader, "open") == data[..500_000]);
    // The writer continues as if nothing had happened.
    open.write_at(&data[500_000..600_000], 500_000).unwrap();
    open.close().unwrap();
    assert!(read_file(&reader, "open") == data[..600_000]);
}

#[test]
fn a_data_server_that_stays_away_gives_eio_within_the_stated_time() {
    for io in [0, 1] {
        let mut cluster = Cluster::start(2, io, |config| config.cluster.request_timeout_ms = 1_500);
        let client = client(&cluster.config, 1);
        let data = pattern(3, 1, 0, 512 * 1024);
        write_file(&client, "striped", &data);
        let file = client.open(b"striped", true).unwrap();
        cluster.kill("data.1");
        let mut back = vec![0; data.len()];
        let timed = |what: &str, outcome: Result<(), impresario_client::ClientError>, started: Instant| {
            let (took, error) = (started.elapsed(), outcome.expect_err(what));
            assert_eq!(error.errno(), libc::EIO, "{what}: {error}");
            assert!(error.to_string().contains("data.1"), "{what} does not name the server: {error}");
            // A busy machine may take seconds to run a thread.
            assert!(took < Duration::from_millis(1_500 + 20_000), "{what} failed only after {took:?}");
        };
        let started = Instant::now();
        timed("a read", file.read_at(&mut back, 0).map(|_| ()), started);
        let started = Instant::now();
        timed("a write", file.write_at(&data, 0).map(|_| ()), started);
        let started = Instant::now();
        timed("an fsync", file.sync(), started);
        // What needs only the other server works meanwhile: the first strip is on one of the two.
        let alive = (0..2).filter(|strip| file.read_at(&mut back[..4096], strip * 65536).is_ok()).count();
        assert_eq!(alive, 1, "one strip in two is on the server that lives");
        // It restarts, and all requests succeed again.
        cluster.restart("data.1");
        assert!(read_file(&client, "striped") == data);
    }
}

#[test]
fn names_with_dots_are_refused() {
    use impresario_wire::{MetaCall, Target};
    let mut cluster = Cluster::start(1, 1, |_| {});
    let outside = cluster.dir.path().join("outside");
    std::fs::write(&outside, "secret").unwrap();
    let client = client(&cluster.config, 1);
    client.mkdir(b"d", 0o755, 0, 0).unwrap();
    let names: [&[u8]; 10] = [
        b"..",
        b"../outside",
        b"../../outside",
        b"d/../../../outside",
        b"d/..",
        b".",
        b"d/.",
        b"/outside",
        b"d//x",
        b"a\0b",
    ];
    for path in names {
        let path = path.to_vec();
        let shown = String::from_utf8_lossy(&path).into_owned();
        let calls = [
            MetaCall::GetAttr { target: Target::Path(path.clone()) },
            MetaCall::Create { path: path.clone(), mode: 0o644, uid: 0, gid: 0, exclusive: false, layout: None },
            MetaCall::Open { path: path.clone(), write: true },
            MetaCall::Mkdir { path: path.clone(), mode: 0o755, uid: 0, gid: 0 },
            MetaCall::Unlink { path: path.clone() },
            MetaCall::Rmdir { path: path.clone() },
            MetaCall::Readdir { path: path.clone(), after: vec![], max: 10 },
            MetaCall::Symlink { path: path.clone(), target: b"x".to_vec(), uid: 0, gid: 0 },
            MetaCall::Rename { from: path.clone(), to: b"y".to_vec(), no_replace: false, whiteout: false },
            MetaCall::Rename { from: b"d".to_vec(), to: path.clone(), no_replace: false, whiteout: false },
        ];
        for call in calls {
            let what = format!("{call:?}");
            let error = client.meta(call).map(|answer| panic!("{what} for {shown:?} gave {answer:?}")).unwrap_err();
            assert!([libc::EINVAL, libc::EPERM, libc::ENOENT].contains(&error.errno()), "{what}: {error}");
        }
    }
    let long = vec![b'x'; 256];
    let error = client.mkdir(&long, 0o755, 0, 0).unwrap_err();
    assert_eq!(error.errno(), libc::ENAMETOOLONG, "{error}");
    assert_eq!(std::fs::read(&outside).unwrap(), b"secret");
    // Symbolic links lead clients, never the server.
    client.symlink(b"link", outside.as_os_str().as_encoded_bytes(), 0, 0).unwrap();
    let error = client.open(b"link", false).map(|_| ()).unwrap_err();
    assert!([libc::ELOOP, libc::EINVAL].contains(&error.errno()), "{error}");
    assert!(cluster.server("meta").child.try_wait().unwrap().is_none());
}

/// A full disk: the write reports it, the server survives, and after freeing space everything works again.
#[test]
fn a_full_disk_is_told_and_survived() {
    let mut cluster = Cluster::describe(2, 1, |_| {});
    let Some(_small) = SmallDisk::mount(&cluster.config.data[1].dir, c"size=16m") else { return };
    impresario_server::folders::make_all(&cluster.config).unwrap();
    for name in ["data.0", "data.1", "meta", "io.0"] {
        cluster.restart(name);
    }
    let client = client(&cluster.config, 1);
    let file = client.create(b"large", new_file(0o644)).unwrap();
    let block = pattern(1, 1, 0, 1 << 20);
    let mut full = None;
    for i in 0..64u64 {
        if let Err(error) = file.write_at(&block, i << 20).and_then(|_| file.sync()) {
            full = Some(error);
            break;
        }
    }
    let error = full.expect("64 MiB fit into 16 MiB");
    assert_eq!(error.errno(), libc::ENOSPC, "{error}");
    cluster.state("data.1");
    // Earlier data is intact, and freeing space helps.
    let mut back = vec![0; 1 << 20];
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 1 << 20);
    assert!(back == block);
    let _ = file.close();
    client.unlink(b"large").unwrap();
    let data = pattern(2, 1, 0, 2 << 20);
    eventually("there is room again", || {
        let outcome = client
            .create(b"small", CreateOptions { exclusive: false, ..new_file(0o644) })
            .and_then(|file| file.write_at(&data, 0).and_then(|_| file.sync()).and_then(|_| file.close()));
        outcome.ok()
    });
    assert!(read_file(&client, "small") == data);
}

/// Policies change under load: no request is lost, repeated or stuck.
#[test]
fn policies_switch_live_under_load() {
    let cluster = Cluster::start(2, 2, |_| {});
    let load = Load::start(&cluster.config, 4);
    let path = cluster.path.to_str().unwrap();
    for round in 0..3 {
        for words in [
            &["--all-data", "none"][..],
            &["--all-io", "hbrr"],
            &["--all-data", "fifo"],
            &["--all-io", "twins", "window_us=500"],
            &["--all-data", "hbrr"],
            &["--server", "io.0", "mlf"],
            &["--all-data", "mlf"],
            &["--all-io", "fifo"],
        ] {
            let ran = run(["policy", "set", path].iter().chain(words));
            assert_eq!(ran.code, 0, "round {round}, {words:?}: {ran:?}");
            load.goes_on(3);
        }
    }
    let ran = run(["policy", "show", path]);
    assert!(ran.code == 0 && ran.out.contains("data.0       mlf") && ran.out.contains("io.1         fifo"), "{ran:?}");
    load.stop_and_verify(&cluster.config);
}

/// Not a test of its own: the process that [`a_client_killed_in_the_middle_leaves_nothing_behind`] kills.
#[test]
#[ignore = "started by another test as the process that is killed"]
fn process_that_writes_until_it_is_killed() {
    let path = std::env::var("IMPRESARIO_TEST_CONFIG").expect("started by the other test");
    let config = Config::load(path.as_ref()).unwrap();
    let client = client(&config, 5);
    let file = client.create(b"victim", new_file(0o644)).unwrap();
    let block = pattern(5, 1, 0, 1 << 20);
    std::thread::scope(|scope| {
        for t in 0..4u64 {
            let (file, block) = (&file, &block);
            scope.spawn(move || {
                let mut i = 0u64;
                loop {
                    // Errors do not stop it: the end comes from outside.
                    let _ = file.write_at(block, ((i % 16) * 4 + t) << 20);
                    i += 1;
                }
            });
        }
    });
}

#[test]
fn a_client_killed_in_the_middle_leaves_nothing_behind() {
    let cluster = Cluster::start(2, 1, |_| {});
    let observer = client(&cluster.config, 1);
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "faults::process_that_writes_until_it_is_killed"]);
    command.env("IMPRESARIO_TEST_CONFIG", &cluster.path);
    let mut process = support::Process::start_command(&mut command, &cluster.dir.path().join("victim.log"));
    eventually("it writes", || {
        assert!(process.child.try_wait().unwrap().is_none(), "{}", process.log());
        observer.stat(b"victim").ok().filter(|attr| attr.size > 8 << 20)
    });
    process.kill();
    // Its queued requests are dropped or done, its memory is freed, its open is closed.
    for name in ["io.0", "data.0", "data.1"] {
        until(format!("{name} is quiet"), || {
            let state = cluster.state(name);
            let number = |pointer: &str| state.pointer(pointer).and_then(|n| n.as_u64());
            let quiet = ["/engine/queued", "/engine/blocked", "/engine/in_flight_batches"];
            quiet.iter().all(|p| number(p) == Some(0))
        });
    }
    let size = eventually("its size stands still", || {
        let size = observer.stat(b"victim").ok()?.size;
        std::thread::sleep(Duration::from_millis(200));
        (observer.stat(b"victim").ok()?.size == size).then_some(size)
    });
    assert!(read_file(&observer, "victim").len() as u64 == size);
    observer.unlink(b"victim").unwrap();
    assert_eq!(observer.stat(b"victim").unwrap_err().errno(), libc::ENOENT);
}

/// Clients with open files and locks come back, all at once, to a metadata server that is killed again and again while they do.
#[test]
fn many_clients_come_back_to_a_server_that_keeps_dying() {
    const CLIENTS: u64 = 60;
    const LOCK: FileLock = FileLock { owner: 1, pid: 1, start: 0, end: 99, exclusive: true };
    let mut cluster = Cluster::start(2, 1, |config| {
        config.cluster.request_timeout_ms = 20_000;
        // Longer than a busy machine may keep one of many clients from renewing its lease.
        config.meta.lock_lease_ms = Some(30_000);
    });
    let shared = client(&cluster.config, 1000);
    (0..20).for_each(|n| write_file(&shared, &format!("shared.{n}"), &pattern(n, 1, 0, 3000)));
    let held: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let client = client(&cluster.config, n);
            let own = client.create(format!("own.{n}"), new_file(0o644)).unwrap();
            own.write_at(&pattern(n, 1, 0, 5000), 0).unwrap();
            let locked = own.lock(LOCK, false, Instant::now() + PATIENCE).unwrap();
            assert!(matches!(locked, Locked::Granted { .. }), "{locked:?}");
            let others: Vec<_> = (0..20).map(|n| client.open(format!("shared.{n}"), false).unwrap()).collect();
            (client, own, others)
        })
        .collect();
    (0..10).for_each(|n| shared.unlink(format!("shared.{n}")).unwrap());
    for pause_ms in [0, 40, 120, 300] {
        cluster.kill("meta");
        cluster.launch("meta");
        std::thread::sleep(Duration::from_millis(pause_ms));
    }
    cluster.await_answer("meta");
    std::thread::scope(|scope| {
        for (n, (client, own, others)) in (0u64..).zip(held) {
            let shared = &shared;
            scope.spawn(move || {
                for (k, file) in (0u64..).zip(&others) {
                    let mut got = vec![0; 4000];
                    let len = file.read_at(&mut got, 0).unwrap_or_else(|e| panic!("client {n}, shared.{k}: {e}"));
                    assert!(got[..len] == pattern(k, 1, 0, 3000), "shared.{k}");
                    assert_eq!(file.attr().unwrap_or_else(|e| panic!("client {n}, shared.{k}: {e}")).size, 3000);
                }
                own.write_at(&pattern(n, 2, 5000, 5000), 5000).unwrap_or_else(|e| panic!("client {n}: {e}"));
                own.sync().unwrap_or_else(|e| panic!("client {n}: {e}"));
                // Still locked against all others.
                let probe = shared.open(format!("own.{n}"), true).unwrap();
                let other = FileLock { owner: 2, ..LOCK };
                let held = probe.test_lock(other).unwrap();
                assert!(held.is_some_and(|held| !held.own), "client {n} has lost its lock");
                own.unlock(1, 0, 99).unwrap();
                let locked = probe.lock(other, true, Instant::now() + PATIENCE).unwrap();
                assert!(matches!(locked, Locked::Granted { .. }), "client {n}: {locked:?}");
                probe.unlock(2, 0, 99).unwrap();
                others.into_iter().for_each(|file| file.close().unwrap());
                own.close().unwrap();
                assert_eq!(client.stat(format!("own.{n}")).unwrap().size, 10_000);
            });
        }
    });
    let names = shared.list(b"").unwrap();
    assert_eq!(names.len() as u64, CLIENTS + 10);
}

/// What memory holds after calls that change the space of a file.
struct Model {
    bytes: Vec<u8>,
    random: Random,
}

impl Model {
    /// One call on both.
    fn step(&mut self, file: &File, number: u64, round: u64) {
        const MAX: u64 = 300_000;
        let (at, len) = (self.random.below(MAX), 1 + self.random.below(60_000));
        let range = at as usize..(at + len) as usize;
        let grow = |bytes: &mut Vec<u8>, end: usize| bytes.resize(bytes.len().max(end), 0);
        let zero = |bytes: &mut Vec<u8>, range: std::ops::Range<usize>| {
            let end = range.end.min(bytes.len());
            bytes[range.start.min(end)..end].fill(0);
        };
        let what = match self.random.below(6) {
            0 => {
                zero(&mut self.bytes, range);
                file.change_space(SpaceChange::Punch, at, len).map(drop)
            }
            1 => {
                grow(&mut self.bytes, range.end);
                zero(&mut self.bytes, range);
                file.change_space(SpaceChange::Zero { keep_size: false }, at, len).map(drop)
            }
            2 => {
                grow(&mut self.bytes, range.end);
                file.change_space(SpaceChange::Allocate { keep_size: false }, at, len).map(drop)
            }
            3 => {
                self.bytes.resize(range.start, 0);
                file.set_len(at).map(drop)
            }
            _ => {
                let bytes = pattern(number, round, at & !7, len as usize);
                grow(&mut self.bytes, range.end);
                self.bytes[range].copy_from_slice(&bytes);
                file.write_at(&bytes, at).map(|written| assert_eq!(written as u64, len))
            }
        };
        what.unwrap_or_else(|error| panic!("file {number}, round {round}: {error}"));
    }
}

/// Holes, zeros, allocation, truncation and writes through I/O nodes that die or hang, and a data server that dies: each is
/// done once, in its place, also when its first copy comes late.
#[test]
fn changes_of_space_are_done_once_through_lost_io_nodes() {
    let mut cluster = Cluster::start(2, 2, |config| config.cluster.request_timeout_ms = 4_000);
    let (stop, progress) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4u64)
            .map(|n| {
                let (config, stop, progress) = (cluster.config.clone(), &stop, &progress);
                scope.spawn(move || {
                    let client = client(&config, n);
                    let file = client.create(format!("f.{n}"), new_file(0o644)).unwrap();
                    let mut model = Model { bytes: Vec::new(), random: Random::new(n) };
                    for round in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        model.step(&file, n, round);
                        if round % 8 == 0 {
                            let mut got = vec![0; 400_000];
                            let len = file.read_at(&mut got, 0).unwrap_or_else(|e| panic!("file {n}: {e}"));
                            let first = first_difference(&got[..len], &model.bytes);
                            assert_eq!(first, None, "file {n}, round {round}: differs there");
                        }
                        progress.fetch_add(1, Ordering::Relaxed);
                    }
                    file.sync().unwrap();
                    file.close().unwrap();
                    model.bytes
                })
            })
            .collect();
        let goes_on = || {
            let from = progress.load(Ordering::Relaxed);
            eventually("the load goes on", || {
                assert!(!workers.iter().any(|worker| worker.is_finished()), "a client has given up");
                (progress.load(Ordering::Relaxed) >= from + 60).then_some(())
            });
        };
        for name in ["io.0", "io.1", "data.1"] {
            goes_on();
            // Longer than clients are patient with a silent server, but not than a call may take.
            let stopped = Stopped::stop(&mut cluster, name);
            std::thread::sleep(Duration::from_millis(if name == "data.1" { 500 } else { 2_500 }));
            drop(stopped);
            goes_on();
            cluster.kill(name);
            std::thread::sleep(Duration::from_millis(200));
            cluster.restart(name);
        }
        goes_on();
        stop.store(true, Ordering::Relaxed);
        let wanted: Vec<Vec<u8>> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        let reader = client(&cluster.config, 99);
        for (n, bytes) in wanted.iter().enumerate() {
            assert!(read_file(&reader, &format!("f.{n}")) == *bytes, "file {n}");
        }
    });
}

/// Objects in the folder of a data server.
fn objects(folder: &std::path::Path) -> usize {
    let folders = std::fs::read_dir(folder.join("objects")).unwrap();
    folders.map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap().count()).sum()
}

/// A file that another client has removed, through another I/O node, serves those who have it open until they close it,
/// whatever server is lost meanwhile; then its objects go.
#[test]
fn a_removed_file_serves_its_openers_through_lost_servers() {
    let mut cluster = Cluster::start(2, 2, |_| {});
    let [a, b] = [0, 1].map(|index| client_via(&cluster.config, index as u64, Via::IoNode(index)));
    let opened = a.create("f", new_file(0o644)).unwrap();
    opened.write_at(&pattern(1, 1, 0, 300_000), 0).unwrap();
    let reader = b.open("f", false).unwrap();
    b.unlink("f").unwrap();
    let again = b.create("f", new_file(0o644)).unwrap();
    again.write_at(b"another", 0).unwrap();
    again.close().unwrap();
    for name in ["meta", "data.1", "io.0", "io.1", "meta"] {
        cluster.kill(name);
        cluster.restart(name);
        opened.write_at(&pattern(1, 2, 0, 8_192), 0).unwrap_or_else(|error| panic!("{name}: {error}"));
        opened.sync().unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut got = vec![0; 300_000];
        let len = reader.read_at(&mut got, 0).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(len, 300_000, "{name}");
        assert!(
            got[..8_192] == pattern(1, 2, 0, 8_192) && got[8_192..] == pattern(1, 1, 0, 300_000)[8_192..],
            "{name}"
        );
        assert_eq!((opened.attr().unwrap().nlink, opened.attr().unwrap().size), (0, 300_000), "{name}");
        assert_eq!(read_file(&b, "f"), b"another");
    }
    let folders: Vec<_> = cluster.config.data.iter().map(|data| data.dir.clone()).collect();
    let count = || folders.iter().map(|folder| objects(folder)).sum::<usize>();
    assert!(count() >= 3, "{}", count());
    opened.close().unwrap();
    reader.close().unwrap();
    eventually("the objects are removed", || (count() == 1).then_some(()));
    assert_eq!(read_file(&b, "f"), b"another");
}

#[test]
fn servers_are_reached_over_ipv6() {
    if let Err(why) = std::net::TcpListener::bind("[::1]:0") {
        return impresario_testing::skip("ipv6", why);
    }
    let cluster = Cluster::start(2, 1, |config| {
        let over_six = |address: &mut String| *address = address.replace("127.0.0.1", "[::1]");
        over_six(&mut config.meta.address);
        config.data.iter_mut().for_each(|data| over_six(&mut data.address));
        config.io.iter_mut().for_each(|io| over_six(&mut io.address));
        config.cluster.max_connections_per_address = 20;
    });
    for (n, via) in [Via::Direct, Via::IoNode(0)].into_iter().enumerate() {
        let (client, path) = (client_via(&cluster.config, n as u64, via), format!("f.{n}"));
        let data = pattern(n as u64, 1, 0, 600_000);
        write_file(&client, &path, &data);
        assert!(read_file(&client, &path) == data);
    }
    let ran = run(["status", cluster.path.to_str().unwrap()]);
    assert!(ran.code == 0 && ran.out.contains("[::1]:"), "{ran:?}");
    // Its connections are all of one address.
    let address = cluster.config.data[0].address.clone();
    let many: Vec<_> = (0..30).filter_map(|_| std::net::TcpStream::connect(&address).ok()).collect();
    let status = || impresario_client::admin::status(&cluster.access(), &address, Duration::from_secs(10));
    eventually("those beyond the limit are refused", || {
        status().err().filter(|error| error.to_string().contains("max_connections_per_address"))
    });
    drop(many);
    eventually("they have left", || status().ok());
}
