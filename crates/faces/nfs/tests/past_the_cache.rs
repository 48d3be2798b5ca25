//! A folder whose reads go past the page cache, as on a file system with direct I/O: nothing is kept of what would be read
//! ahead, so the device reads what clients request, once.

use std::sync::Arc;

use crate::support::open_rules;
use impresario_backend::posix::Options;
use impresario_backend::{Backend, Caller, PosixTree};
use impresario_device::DeviceParams;
use impresario_nfs::testing::Client;
use impresario_nfs::{ExportSettings, Settings, start};
use impresario_testing::require;
use impresario_workload::bare_disk::BareDisk;

const BLOCK: u64 = 128 << 10;
const FILE_BYTES: u64 = 8 << 20;

/// A modelled disk without a page cache, with a file.
fn disk(folder: &tempfile::TempDir) -> (BareDisk, Vec<u8>) {
    let disk = BareDisk::new(folder.path(), &DeviceParams::default()).unwrap();
    let content: Vec<u8> = (0..FILE_BYTES).map(|at| (at.wrapping_mul(31) ^ at >> 8) as u8).collect();
    std::fs::write(disk.bytes().join("file"), &content).unwrap();
    (disk, content)
}

fn at_disk(disk: &BareDisk) -> (u64, u64) {
    let moved = disk.observe().at_disk;
    (moved.requests, moved.bytes)
}

#[test]
fn what_nothing_keeps_is_not_read_ahead() {
    if !(require("root") && require("fuse")) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (disk, content) = disk(&folder);
    let tree = Arc::new(PosixTree::open(&disk.path(), Options::default()).unwrap());
    let export = ExportSettings {
        name: "/data".into(),
        backend: tree.clone(),
        folder: String::new(),
        rules: open_rules(),
        reopen: None,
    };
    // As `impresario nfs` runs unless it is told otherwise.
    let settings = Settings { read_ahead_bytes: 128 << 20, ..Settings::new(vec![export]).unwrap() };
    let running = start(settings).unwrap();
    let mut clients = [(); 2].map(|()| Client::connect(running.addresses()[0]).unwrap());
    let root = clients[0].mount("/data").unwrap();
    let file = clients[0].lookup(&root, "file").unwrap();
    disk.reset();
    // Two processes in turns, as a decomposition.
    for (nth, at) in (0..FILE_BYTES).step_by(BLOCK as usize).enumerate() {
        let read = clients[nth % 2].read(&file, at, BLOCK as u32).unwrap();
        assert!(read.bytes == content[at as usize..(at + BLOCK) as usize], "{at}");
    }
    let status = running.status();
    drop((clients, running));
    assert_eq!(at_disk(&disk), (FILE_BYTES / BLOCK, FILE_BYTES), "{status:#}");
    assert_eq!(status["read_ahead"]["predicted_bytes"], 0, "{status:#}");
    drop(tree);
}

#[test]
fn a_hint_before_the_first_read_costs_a_byte() {
    if !(require("root") && require("fuse")) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (disk, _) = disk(&folder);
    let tree = PosixTree::open(&disk.path(), Options::default()).unwrap();
    let root = tree.root().unwrap();
    let caller = Caller { uid: 0, gid: 0, groups: Vec::new() };
    let (file, _) = tree.lookup(&caller, &root, b"file").unwrap();
    disk.reset();
    for _ in 0..10 {
        tree.will_read(&file, 1 << 20, 4 << 20);
    }
    assert_eq!(at_disk(&disk), (1, 1));
    assert!(!tree.has_page_cache());
    drop(tree);
}
