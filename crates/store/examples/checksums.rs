//! What checksums cost: the same reads and writes of two stores, one with checksums and one without, in turns.
//!
//! `cargo run --release -p impresario-store --example checksums -- [FOLDER [PAIRS]]` makes both stores in a folder (without one,
//! in the system's folder for temporary files), measures each load in pairs whose order alternates, and prints rates and
//! their ratio with its 95 % interval. Reads come from the page cache, where the share of a checksum is largest.

use std::io::IoSlice;
use std::path::Path;
use std::time::Instant;

use impresario_base::Random;
use impresario_base::statistics::{Interval, mean};
use impresario_store::{FolderIdentity, ObjectStore, StoreOptions, make};

const FILE_BYTES: u64 = 64 << 20;
const KEY: u64 = 1;

struct Load {
    name: &'static str,
    request_bytes: u64,
    requests: u64,
    is_random: bool,
    /// Requests between two syncs; 0: reads.
    sync_every: u64,
    /// Of an object that is new each time.
    is_new: bool,
}

const fn load(name: &'static str, request_bytes: u64, requests: u64) -> Load {
    Load { name, request_bytes, requests, is_random: false, sync_every: 0, is_new: false }
}

const LOADS: [Load; 8] = [
    load("read, 1 MiB, sequential", 1 << 20, 64),
    load("read, 64 KiB, sequential", 64 << 10, 1024),
    Load { is_random: true, ..load("read, 4 KiB, random", 4 << 10, 8192) },
    Load { sync_every: 64, is_new: true, ..load("write of a new object, 1 MiB, one sync", 1 << 20, 64) },
    Load { sync_every: 64, ..load("overwrite, 1 MiB, one sync", 1 << 20, 64) },
    Load { sync_every: 1024, ..load("overwrite, 64 KiB, one sync", 64 << 10, 1024) },
    Load { is_random: true, sync_every: 4096, ..load("overwrite, 4 KiB, random, one sync", 4 << 10, 4096) },
    Load { is_random: true, sync_every: 1, ..load("overwrite, 4 KiB, random, a sync each", 4 << 10, 64) },
];

fn open(folder: &Path, name: &str, checksums: bool) -> ObjectStore {
    let dir = folder.join(name);
    make(&dir, &FolderIdentity { cluster: 1, store: 2, server: name.into() }).expect("an empty folder");
    let options = StoreOptions { checksums: Some(checksums), ..StoreOptions::default() };
    ObjectStore::open(&dir, name, options).expect("the folder just made")
}

fn write(store: &ObjectStore, key: u64, at: u64, bytes: &[u8]) {
    store.write_vectored(key, at, &[IoSlice::new(bytes)]).expect("space for the objects");
    store.relieve(|_, error| panic!("{error}"));
}

/// Runs a load; gives its rate, MiB/s.
fn run(store: &ObjectStore, load: &Load, seed: u64, buf: &mut [u8]) -> f64 {
    let buf = &mut buf[..load.request_bytes as usize];
    let mut random = Random::new(seed);
    let key = if load.is_new { 2 + seed } else { KEY };
    let started = Instant::now();
    for i in 0..load.requests {
        let places = FILE_BYTES / load.request_bytes;
        let at = if load.is_random { random.below(places) } else { i % places } * load.request_bytes;
        if load.sync_every == 0 {
            assert_eq!(store.read(key, at, buf).expect("good data"), buf.len());
            continue;
        }
        write(store, key, at, buf);
        if (i + 1) % load.sync_every == 0 {
            store.sync(key).expect("a sync");
        }
    }
    let took_s = started.elapsed().as_secs_f64();
    if load.is_new {
        store.unlink(key).expect("a removal");
    }
    (load.requests * load.request_bytes) as f64 / took_s / f64::from(1 << 20)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = args.next().map_or_else(std::env::temp_dir, Into::into);
    let pairs: u64 = args.next().map_or(11, |pairs| pairs.parse().expect("a number of pairs"));
    let folder = tempfile::tempdir_in(folder).expect("a folder that can be written");
    let stores = [open(folder.path(), "without", false), open(folder.path(), "with", true)];
    let mut buf: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for store in &stores {
        (0..FILE_BYTES >> 20).for_each(|i| write(store, KEY, i << 20, &buf));
        store.sync(KEY).expect("a sync");
    }
    println!("{:40} {:>14} {:>14}   with : without", "", "without MiB/s", "with MiB/s");
    for load in &LOADS {
        let (mut rates, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
        // The first pair warms up.
        for pair in 0..=pairs {
            let mut rate = [0.0; 2];
            for turn in 0..2 {
                let which = (pair + turn) as usize % 2;
                rate[which] = run(&stores[which], load, pair, &mut buf);
            }
            if pair > 0 {
                ratios.push(rate[1] / rate[0]);
                (0..2).for_each(|which| rates[which].push(rate[which]));
            }
        }
        let Interval { low, high, .. } = Interval::of(&ratios);
        let (without, with, ratio) = (mean(&rates[0]), mean(&rates[1]), mean(&ratios));
        println!("{:40} {without:14.0} {with:14.0}   {ratio:.2} [{low:.2}, {high:.2}]", load.name);
    }
}
