//! Reads through I/O nodes, which no thread waits for there, while servers die, hang and come back, and clients go.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::{self, Cluster, Stopped, client, new_file, pattern};
use impresario_client::{CreateOptions, File};
use impresario_config::Config;
use impresario_testing::eventually;
use impresario_wire::LayoutRequest;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;

/// On one data server.
fn on(server: u16) -> CreateOptions {
    let layout = LayoutRequest { base: Some(server), pcount: Some(1), ssize_bytes: Some(65536) };
    CreateOptions { layout: Some(layout), ..new_file(0o644) }
}

fn fill(file: &File, number: u64) {
    let all: Vec<u8> = (0..BLOCKS).flat_map(|block| pattern(number, 1, block * BLOCK as u64, BLOCK)).collect();
    assert_eq!(file.write_at(&all, 0).unwrap(), all.len());
}

fn read(file: &File, block: u64) -> Result<Vec<u8>, impresario_client::ClientError> {
    read_of(file, block, BLOCK)
}

/// A block of that length.
fn read_of(file: &File, block: u64, len: usize) -> Result<Vec<u8>, impresario_client::ClientError> {
    let mut got = vec![0xee; len];
    let len = file.read_at(&mut got, block * len as u64)?;
    got.truncate(len);
    Ok(got)
}

/// What a server holds for requests, and whether it has any.
fn is_quiet(cluster: &Cluster, name: &str) -> bool {
    let state = cluster.state(name);
    let number = |pointer: &str| state.pointer(pointer).and_then(|n| n.as_u64());
    let io = ["/forward/waiting", "/forward/in_flight", "/forward/stuck"];
    let all = ["/engine/queued", "/engine/blocked", "/engine/in_flight_batches", "/memory/payload_bytes"];
    all.iter().all(|pointer| number(pointer) == Some(0)) && io.iter().all(|pointer| number(pointer).unwrap_or(0) == 0)
}

#[track_caller]
fn all_are_quiet(cluster: &Cluster) {
    for name in cluster.config.servers().map(|server| server.name().to_string()).filter(|name| name != "meta") {
        eventually(format!("{name} holds nothing any more"), || is_quiet(cluster, &name).then_some(()));
    }
}

#[test]
fn small_reads_see_every_write_while_servers_die_and_hang() {
    every_write_is_seen_while_servers_die_and_hang(BLOCK, BLOCKS, 200);
}

/// Parts of their answers are passed on before the rest has come, or does not come any more.
#[test]
fn long_reads_see_every_write_while_servers_die_and_hang() {
    every_write_is_seen_while_servers_die_and_hang(700_001, 8, 20);
}

/// Every read gives what was written last, whatever dies under it; so many rounds of each client's are progress.
fn every_write_is_seen_while_servers_die_and_hang(block_bytes: usize, blocks: u64, rounds: u64) {
    const CLIENTS: u64 = 6;
    let mut cluster = Cluster::start(2, 2, |config| config.cluster.request_timeout_ms = 20_000);
    let (stop, progress) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..CLIENTS)
            .map(|n| {
                let (config, stop, progress) = (cluster.config.clone(), &stop, &progress);
                scope.spawn(move || {
                    let file = client(&config, n).create(format!("f.{n}"), on(n as u16 % 2)).unwrap();
                    let mut generations = vec![0; blocks as usize];
                    let mut reads = 0;
                    for count in 0u64.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let block = count * 37 % blocks;
                        let at = block * block_bytes as u64;
                        generations[block as usize] = count + 1;
                        assert_eq!(file.write_at(&pattern(n, count + 1, at, block_bytes), at).unwrap(), block_bytes);
                        for back in 0..4 {
                            let block = (block + blocks - back * 5 % blocks) % blocks;
                            let generation = generations[block as usize];
                            let got = read_of(&file, block, block_bytes);
                            let got = got.unwrap_or_else(|error| panic!("client {n}: {error}"));
                            if generation > 0 {
                                let wanted = pattern(n, generation, block * block_bytes as u64, block_bytes);
                                assert!(got == wanted, "client {n}, block {block} is not generation {generation}");
                            }
                            reads += 1;
                        }
                        progress.fetch_add(1, Ordering::Relaxed);
                    }
                    reads
                })
            })
            .collect();
        let goes_on = || {
            let from = progress.load(Ordering::Relaxed);
            eventually("the load goes on", || {
                assert!(!workers.iter().any(|worker| worker.is_finished()), "a client has given up");
                (progress.load(Ordering::Relaxed) >= from + rounds).then_some(())
            });
        };
        for name in ["data.1", "io.0", "data.0", "io.1"] {
            goes_on();
            cluster.kill(name);
            std::thread::sleep(Duration::from_millis(100));
            cluster.restart(name);
            goes_on();
            let stopped = Stopped::stop(&mut cluster, name);
            std::thread::sleep(Duration::from_millis(400));
            drop(stopped);
        }
        goes_on();
        stop.store(true, Ordering::Relaxed);
        let reads: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        println!("{reads} reads");
    });
    all_are_quiet(&cluster);
}

/// Answers that come after their reads were given up are nobody's: neither the next read's nor memory that stays.
#[test]
fn answers_that_come_too_late_reach_nobody() {
    let mut cluster = Cluster::start(2, 1, |config| config.cluster.request_timeout_ms = 1_000);
    let clients: Vec<_> = (0..4).map(|n| client(&cluster.config, n)).collect();
    let files: Vec<File> = (0..4u64)
        .map(|n| {
            let file = clients[n as usize].create(format!("f.{n}"), on(n as u16 % 2)).unwrap();
            fill(&file, n);
            assert!(read(&file, 0).unwrap() == pattern(n, 1, 0, BLOCK));
            file
        })
        .collect();
    for round in 0..2 {
        let stopped = Stopped::stop(&mut cluster, "data.1");
        let began = Instant::now();
        std::thread::scope(|scope| {
            for (n, file) in (0u64..).zip(&files) {
                for block in 0..8 {
                    scope.spawn(move || match (n % 2, read(file, block)) {
                        (0, got) => assert!(got.unwrap() == pattern(n, 1, block * BLOCK as u64, BLOCK)),
                        (_, got) => assert_eq!(got.expect_err("it hangs").errno(), libc::EIO),
                    });
                }
            }
        });
        assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
        drop(stopped);
        eventually("data.1 answers again", || read(&files[1], 0).ok());
        for (n, file) in (0u64..).zip(&files) {
            for block in 0..BLOCKS {
                let got = read(file, block).unwrap_or_else(|error| panic!("round {round}: {error}"));
                assert!(got == pattern(n, 1, block * BLOCK as u64, BLOCK), "round {round}, file {n}, block {block}");
            }
        }
        all_are_quiet(&cluster);
    }
}

/// Not a test of its own: the process that the next one kills.
#[test]
#[ignore = "started by another test as the process that is killed"]
fn process_that_reads_until_it_is_killed() {
    let path = std::env::var("IMPRESARIO_TEST_CONFIG").expect("started by the other test");
    let config = Config::load(path.as_ref()).unwrap();
    let file = client(&config, 5).open(b"victim", false).unwrap();
    std::thread::scope(|scope| {
        for first in 0..32u64 {
            let file = &file;
            scope.spawn(move || {
                // Errors do not stop it: the end comes from outside.
                let end = Instant::now() + Duration::from_secs(600);
                (0u64..).take_while(|_| Instant::now() < end).for_each(|n| drop(read(file, (first + n * 7) % BLOCKS)));
            });
        }
    });
}

#[test]
fn a_client_killed_while_its_small_reads_wait_leaves_nothing_behind() {
    let mut cluster = Cluster::start(2, 1, |config| config.cluster.request_timeout_ms = 8_000);
    let observer = client(&cluster.config, 1);
    let file = observer.create("victim", on(1)).unwrap();
    fill(&file, 9);
    for is_stopped_first in [false, true] {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "unattended_reads::process_that_reads_until_it_is_killed"]);
        command.env("IMPRESARIO_TEST_CONFIG", &cluster.path);
        let mut process = support::Process::start_command(&mut command, &cluster.dir.path().join("victim.log"));
        let requests = |cluster: &Cluster| cluster.state("io.0").pointer("/forward/requests").and_then(|n| n.as_u64());
        let before = requests(&cluster);
        eventually("it reads", || {
            assert!(process.child.try_wait().unwrap().is_none(), "{}", process.log());
            (requests(&cluster) > before.map(|n| n + 500)).then_some(())
        });
        let stopped = is_stopped_first.then(|| Stopped::stop(&mut cluster, "data.1"));
        std::thread::sleep(Duration::from_millis(300));
        process.kill();
        std::thread::sleep(Duration::from_millis(300));
        drop(stopped);
        all_are_quiet(&cluster);
        assert!(read(&file, 3).unwrap() == pattern(9, 1, 3 * BLOCK as u64, BLOCK));
    }
}
