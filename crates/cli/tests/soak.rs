//! `make soak`: servers are killed at random under load for a long time; every byte is verified.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Cluster, client, new_file, pattern, read_file};

const FILES: u64 = 4;
const BLOCK: usize = 40_000;
const BLOCKS: u64 = 200;

/// A small generator of numbers that a seed repeats.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
#[ignore = "takes minutes: make soak"]
fn servers_die_at_random_under_load_and_no_byte_is_wrong() {
    let seconds: u64 = std::env::var("IMPRESARIO_SOAK_S").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    let seed = std::env::var("IMPRESARIO_SOAK_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) * 7919 + 1);
    println!("soak: {seconds} s, seed {seed} (IMPRESARIO_SOAK_SEED={seed} repeats the choices)");
    let mut cluster = Cluster::start(3, 2, |_| {});
    let (stop, written, read) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let config = cluster.config.clone();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..FILES)
            .map(|w| {
                let (config, stop, written, read) = (&config, &stop, &written, &read);
                scope.spawn(move || {
                    let client = client(config, w);
                    let file = client.create(format!("f{w}").as_bytes(), new_file(0o644)).unwrap();
                    let mut generations = vec![0u64; BLOCKS as usize];
                    let mut random = seed ^ (w + 1) << 32;
                    while !stop.load(Ordering::Relaxed) {
                        let block = next(&mut random) % BLOCKS;
                        let (offset, generation) = (block * BLOCK as u64, generations[block as usize]);
                        if next(&mut random).is_multiple_of(3) && generation > 0 {
                            let mut back = vec![0; BLOCK];
                            let n = file.read_at(&mut back, offset).unwrap();
                            let wanted = pattern(w, generation, offset, BLOCK);
                            assert!(n == BLOCK && back == wanted, "f{w} block {block} is not generation {generation}");
                            read.fetch_add(1, Ordering::Relaxed);
                        } else {
                            let data = pattern(w, generation + 1, offset, BLOCK);
                            assert_eq!(file.write_at(&data, offset).unwrap(), BLOCK);
                            generations[block as usize] += 1;
                            written.fetch_add(1, Ordering::Relaxed);
                        }
                        if next(&mut random).is_multiple_of(100) {
                            file.sync().unwrap();
                        }
                    }
                    file.close().unwrap();
                    generations
                })
            })
            .collect();
        let mut random = seed;
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let names: Vec<String> = config.servers().map(|s| s.name().to_string()).collect();
        let mut kills = 0;
        while Instant::now() < deadline && !workers.iter().any(|w| w.is_finished()) {
            std::thread::sleep(Duration::from_millis(300 + next(&mut random) % 2000));
            let victim = names[(next(&mut random) % names.len() as u64) as usize].clone();
            cluster.kill(&victim);
            std::thread::sleep(Duration::from_millis(next(&mut random) % 1500));
            cluster.restart(&victim);
            kills += 1;
        }
        stop.store(true, Ordering::Relaxed);
        let reader = client(&config, 99);
        for (w, worker) in workers.into_iter().enumerate() {
            let generations = worker.join().expect("a worker failed");
            let data = read_file(&reader, &format!("f{w}"));
            for (block, generation) in generations.iter().enumerate().filter(|(_, g)| **g > 0) {
                let at = block * BLOCK;
                let wanted = pattern(w as u64, *generation, at as u64, BLOCK);
                assert!(data[at..at + BLOCK] == wanted, "f{w} block {block} is not generation {generation}");
            }
        }
        let (written, read) = (written.load(Ordering::Relaxed), read.load(Ordering::Relaxed));
        println!("soak: {kills} kills, {written} blocks written, {read} read and verified");
        assert!(kills > 0 && written > 0 && read > 0);
    });
}
