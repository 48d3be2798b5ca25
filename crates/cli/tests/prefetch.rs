//! `impresario prefetch` on a running cluster: what it brings into memory no later read waits for.

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::support::{Cluster, client, pattern, read_file, run, write_file};
use impresario_config::{Meta, Tree};
use impresario_testing::until;
use serde_json::Value;

/// A number of the data servers' status, over all of them.
fn sum(cluster: &Cluster, pointer: &str) -> u64 {
    let of = |i: usize| cluster.state(&format!("data.{i}")).pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
    (0..2).map(of).sum()
}

/// Pages of a file that are in memory.
fn resident_pages(file: &File) -> usize {
    let len = file.metadata().unwrap().len() as usize;
    if len == 0 {
        return 0;
    }
    let mut pages = vec![0u8; len.div_ceil(4096)];
    let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: a mapping of the whole file at a place of the kernel's choice, which is only asked about and then removed;
    // `pages` has a byte for each of its pages.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), len, read, shared, file.as_raw_fd(), 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::mincore(at, len, pages.as_mut_ptr()), 0);
        libc::munmap(at, len);
    }
    pages.iter().filter(|page| **page & 1 == 1).count()
}

/// Takes a file out of memory. The kernel leaves pages there that it is busy with, so this repeats.
fn forget(file: &File) {
    until("a file is out of memory", || {
        file.sync_all().unwrap();
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        resident_pages(file) == 0
    });
}

/// The data servers' objects.
fn objects(cluster: &Cluster) -> Vec<File> {
    let folders = cluster.config.data.iter().flat_map(|data| std::fs::read_dir(data.dir.join("objects")).unwrap());
    let folders = folders.map(|folder| folder.unwrap().path()).filter(|path| path.is_dir());
    let objects = folders.flat_map(|folder| std::fs::read_dir(folder).unwrap());
    objects.map(|object| File::open(object.unwrap().path()).unwrap()).collect()
}

#[test]
fn what_was_prefetched_is_read_from_memory() {
    let _cache = impresario_testing::page_cache::watched();
    for io_nodes in [0, 1] {
        let cluster = Cluster::start(2, io_nodes, |_| {});
        let writer = client(&cluster.config, 1);
        let bytes = pattern(1, 1, 0, 16 << 20);
        write_file(&writer, "input", &bytes);
        let config = cluster.path.to_str().unwrap();
        if cluster.state("data.0")["store"]["in_memory"] == true {
            let told = run(["prefetch", config, "/input"]);
            assert!(told.code == 0 && told.out.contains("read nothing ahead"), "{told:?}");
            continue;
        }
        let objects = objects(&cluster);
        objects.iter().for_each(forget);
        let part = run(["prefetch", config, "/input", "--offset", "1m", "--length", "2m", "--json"]);
        let told: Value = serde_json::from_str(&part.out).unwrap_or_else(|e| panic!("{e}: {part:?}"));
        assert_eq!((told["asked_bytes"].as_u64(), told["accepted_bytes"].as_u64()), (Some(2 << 20), Some(2 << 20)));
        assert_eq!(sum(&cluster, "/read_ahead/hints/hinted_bytes"), 2 << 20);
        let whole = run(["prefetch", config, "input"]);
        assert!(whole.code == 0 && whole.out.contains("16 MiB of 16 MiB"), "{whole:?}");
        // More where the kernel has taken some of the first part out of memory meanwhile. What was asked for may be on its way yet.
        until("all of it was fetched", || sum(&cluster, "/read_ahead/hints/fetched_bytes") >= 16 << 20);
        until("all of it is in memory", || objects.iter().map(resident_pages).sum::<usize>() >= (16 << 20) / 4096);
        assert!(read_file(&client(&cluster.config, 2), "input") == bytes);
        assert_eq!(sum(&cluster, "/read_ahead/waited_bytes"), 0, "no read waited for a device");
        assert_eq!(sum(&cluster, "/read_ahead/hints/hit_bytes"), 16 << 20);
        assert_eq!(sum(&cluster, "/read_ahead/hints/outstanding_bytes"), 0);
    }
}

/// An I/O node in front of a mounted folder brings into its page cache what it has room for, and says so.
#[test]
fn a_hint_in_front_of_a_folder_has_a_budget() {
    const ROOM: u64 = 4 << 20;
    const TMPFS: i64 = 0x0102_1994;
    let _cache = impresario_testing::page_cache::watched();
    // Of a file on one lane what comes of a hint is scheduled.
    for data_servers in [1, 4] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let cluster = Cluster::start(0, 1, |config| {
            let tree = Tree { folder: folder.path().into(), data_servers, ..Tree::default() };
            config.tree = Some(Tree { stripe_bytes: Some(64 << 10), ..tree });
            config.meta = Meta::default();
            config.io[0].read_ahead_bytes = Some(ROOM);
        });
        let bytes = pattern(1, 1, 0, 16 << 20);
        std::fs::write(folder.path().join("input"), &bytes).unwrap();
        let (file, config) = (File::open(folder.path().join("input")).unwrap(), cluster.path.to_str().unwrap());
        if rustix::fs::statfs(folder.path()).unwrap().f_type == TMPFS {
            let told = run(["prefetch", config, "/input"]);
            assert!(told.code == 0 && told.out.contains("reads nothing ahead"), "{told:?}");
            continue;
        }
        forget(&file);
        let told = run(["prefetch", config, "/input"]);
        let says = "4 MiB of 16 MiB are, or are going to be, in the memory of the I/O node; it has no room for more";
        assert!(told.code == 0 && told.out.contains(says), "{told:?}");
        let hints = |what: &str| {
            let state = cluster.state("io.0");
            state["read_ahead"]["hints"][what].as_u64().unwrap_or_else(|| panic!("{what}: {state:#}"))
        };
        until("all of that is in memory", || hints("fetched_bytes") == ROOM);
        let resident_bytes = resident_pages(&file) as u64 * 4096;
        // The kernel may read a little around what it is asked for.
        assert!((ROOM..2 * ROOM).contains(&resident_bytes), "{resident_bytes}");
        assert!(read_file(&client(&cluster.config, 2), "input") == bytes);
        assert_eq!((hints("hinted_bytes"), hints("hit_bytes"), hints("outstanding_bytes")), (ROOM, ROOM, 0));
        assert!(hints("refused_bytes") >= 12 << 20);
    }
}

#[test]
fn mistakes_are_named() {
    let cluster = Cluster::start(1, 0, |config| config.data[0].read_ahead_bytes = 4 << 20);
    write_file(&client(&cluster.config, 1), "input", &pattern(1, 1, 0, 8 << 20));
    let config = cluster.path.to_str().unwrap();
    let missing = run(["prefetch", config, "/nowhere"]);
    assert!(missing.code == 1 && missing.err.contains("cannot open /nowhere"), "{missing:?}");
    assert_eq!(run(["prefetch", config, "/input", "--length", "much"]).code, 2);
    let beyond = run(["prefetch", config, "/input", "--offset", "1g"]);
    assert!(beyond.code == 2 && beyond.err.contains("/input has 8388608 bytes") && beyond.out.is_empty(), "{beyond:?}");
    write_file(&client(&cluster.config, 2), "empty", &[]);
    assert_eq!(run(["prefetch", config, "/empty"]).code, 0);
    let much = run(["prefetch", config, "/input"]);
    let in_memory = cluster.state("data.0")["store"]["in_memory"] == true;
    let why = if in_memory { "read nothing ahead" } else { "4 MiB of 8 MiB are, or are going to be" };
    assert!(much.code == 0 && much.out.contains(why), "{much:?}");
}
