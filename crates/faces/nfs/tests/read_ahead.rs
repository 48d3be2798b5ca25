//! Reading ahead of the clients, and reads that the page cache has: what is brought in, what is not, and that a change
//! comes first.

use std::ops::Range;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::{Served, export, open_rules, serve};
use impresario_backend::SetAttr;
use impresario_nfs::Settings;
use impresario_nfs::protocol::{Stability, procedure, write_set};
use impresario_nfs::testing::{Client, Faults, MemoryTree, handle, read_back};
use impresario_sched::PolicySpec;
use serde_json::Value;

const BLOCK: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

fn content(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|at| (at.wrapping_mul(31) ^ at >> 8) as u8).collect()
}

/// A server that reads ahead, before a page cache that has nothing of the file of that length, which a client has found.
fn cold(len: u64, change: impl FnOnce(&mut Settings)) -> (Served, Client, Vec<u8>) {
    let tree = MemoryTree::with_page_cache();
    let served = serve(&tree, |settings| {
        settings.read_ahead_bytes = 64 << 20;
        change(settings);
    });
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &SetAttr::default()).unwrap();
    for offset in (0..len).step_by(MIB as usize) {
        client.write(&file, offset, &content(offset, MIB.min(len - offset)), Stability::File).unwrap();
    }
    tree.drop_caches();
    (served, client, file)
}

/// SETATTR.
fn send_set(client: &mut Client, file: &[u8], set: &SetAttr) -> u32 {
    let mut args = handle(file);
    write_set(&mut args, set);
    args.u32(0);
    client.send(procedure::SETATTR, args).unwrap()
}

fn told(served: &Served, pointer: &str) -> u64 {
    let status = served.running.status();
    status.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}: {status:#}"))
}

/// Waits until it holds.
#[track_caller]
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::yield_now();
    }
}

/// Waits until what was started is done: nothing is queued or in flight.
fn settled(served: &Served) {
    // What is queued goes in flight: looked at in this order, nothing is missed on its way.
    let counts = ["/engine/queued", "/engine/in_flight_batches"];
    eventually("everything is done", || counts.iter().all(|count| told(served, count) == 0));
}

fn reaches(advised: &[Range<u64>]) -> u64 {
    advised.iter().map(|range| range.end).max().unwrap_or(0)
}

#[test]
fn streams_of_several_clients_are_read_ahead_within_budget_and_file() {
    let (served, mut one, file) = cold(12 * MIB + 100, |settings| settings.read_ahead_bytes = 4 << 20);
    let mut two = served.client();
    for at in (0..6 * MIB).step_by(BLOCK as usize) {
        for (client, at) in [(&mut one, at), (&mut two, 6 * MIB + at)] {
            assert!(client.read(&file, at, BLOCK as u32).unwrap().bytes == content(at, BLOCK), "{at}");
        }
        assert!(told(&served, "/read_ahead/outstanding_bytes") <= 4 * MIB);
    }
    settled(&served);
    assert_eq!(two.read(&file, 12 * MIB, BLOCK as u32).unwrap().bytes, content(12 * MIB, 100));
    assert!(told(&served, "/read_ahead/hit_bytes") > 6 * MIB, "{:#}", served.running.status());
    assert_eq!(told(&served, "/read_ahead/wasted_bytes"), 0);
    // Nearly all of it came from memory when it was asked for, most of that without being scheduled.
    assert!(told(&served, "/read_ahead/waited_bytes") < 3 * MIB, "{:#}", served.running.status());
    let advised = served.tree.take_advised();
    assert!(!advised.is_empty() && reaches(&advised) <= 12 * MIB + 100, "{advised:?}");
}

#[test]
fn nothing_is_read_ahead_unless_it_is_to_be() {
    assert_eq!(Settings::new(Vec::new()).unwrap().read_ahead_bytes, 0);
    let off = |settings: &mut Settings| settings.read_ahead_bytes = 0;
    let none = |settings: &mut Settings| settings.policy = PolicySpec::named("none");
    for change in [off as fn(&mut Settings), none] {
        let (served, mut client, file) = cold(2 * MIB, change);
        for at in (0..2 * MIB).step_by(BLOCK as usize) {
            assert!(client.read(&file, at, BLOCK as u32).unwrap().bytes == content(at, BLOCK));
        }
        assert_eq!(served.tree.take_advised(), []);
    }
    // A policy that lets nothing be read ahead may follow one that does, and the reverse.
    let (served, mut client, file) = cold(4 * MIB, |_| ());
    let mut read = |from: u64| {
        for at in (from..from + MIB).step_by(BLOCK as usize) {
            assert!(client.read(&file, at, BLOCK as u32).unwrap().bytes == content(at, BLOCK));
        }
        settled(&served);
        served.tree.take_advised().len()
    };
    assert!(read(0) > 0);
    served.running.set_policy(&PolicySpec::named("none")).unwrap();
    served.tree.drop_caches();
    assert_eq!(read(0), 0);
    assert_eq!(told(&served, "/read_ahead/outstanding_bytes"), 0);
    served.running.set_policy(&PolicySpec::named("mlf")).unwrap();
    assert!(read(MIB) > 0);
}

/// Without a page cache there is nothing to read ahead into.
#[test]
fn a_folder_in_memory_is_left_alone() {
    let served = serve(&MemoryTree::new(), |settings| settings.read_ahead_bytes = 64 << 20);
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &SetAttr::default()).unwrap();
    client.write(&file, 0, &content(0, MIB), Stability::File).unwrap();
    for at in (0..MIB).step_by(BLOCK as usize) {
        assert!(client.read(&file, at, BLOCK as u32).unwrap().bytes == content(at, BLOCK));
    }
    assert_eq!(told(&served, "/read_ahead/predicted_bytes"), 0);
    assert_eq!(told(&served, "/engine/statistics/passed"), 0);
}

/// A file whose device hangs holds the only batch; another's reads are answered from memory meanwhile.
#[test]
fn reads_that_the_cache_has_wait_for_no_device() {
    let (served, mut client, file) = cold(MIB, |settings| settings.in_flight_requests = 1);
    client.read(&file, 0, MIB as u32).unwrap();
    settled(&served);
    let passed = told(&served, "/engine/statistics/passed");
    served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
    let mut stuck = served.client();
    let waits = stuck.send_write(&file, MIB, b"waits", Stability::Unstable).unwrap();
    served.tree.await_hung(1);
    for at in (0..MIB).step_by(BLOCK as usize) {
        assert!(client.read(&file, at, BLOCK as u32).unwrap().bytes == content(at, BLOCK));
    }
    assert_eq!(told(&served, "/engine/statistics/passed"), passed + MIB / BLOCK);
    // Not what a write that came before will change.
    let over = stuck.send_write(&file, 0, &[9; 100], Stability::Unstable).unwrap();
    eventually("the write is queued", || told(&served, "/engine/queued") > 0);
    let after = client.send_read(&file, 0, 200).unwrap();
    served.tree.set_faults(Faults::default());
    let read = read_back(&client.wait(after).unwrap()).unwrap();
    assert_eq!(read.bytes, [vec![9; 100], content(100, 100)].concat());
    [waits, over].into_iter().for_each(|xid| assert!(stuck.wait(xid).unwrap().good().is_ok()));
    // Nor for another who may not read them.
    let mut other = served.client();
    other.be(6, 6, &[]);
    let closed = send_set(&mut client, &file, &SetAttr { mode: Some(0o600), ..SetAttr::default() });
    client.wait(closed).unwrap().good().unwrap();
    assert!(other.read(&file, 0, 100).is_err());
    // Where all reads are to be scheduled none pass.
    let (served, mut client, file) = cold(MIB, |settings| settings.schedule_cached_reads = true);
    for _ in 0..10 {
        client.read(&file, 0, MIB as u32).unwrap();
    }
    assert_eq!(told(&served, "/engine/statistics/passed"), 0);
}

/// The same under a policy that hands over everything at once: no read of what memory has waits for a thread.
#[test]
fn reads_that_the_cache_has_wait_for_no_thread() {
    let (served, mut client, file) = cold(MIB, |settings| {
        settings.in_flight_requests = 1;
        settings.policy = PolicySpec::named("auto");
    });
    // Of another, whose reads memory never has.
    let mut stuck = served.client();
    for _ in 0..64 {
        served.tree.drop_caches();
        stuck.read(&file, 0, 100).unwrap();
    }
    client.read(&file, 0, MIB as u32).unwrap();
    settled(&served);
    served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
    let waits = stuck.send_write(&file, MIB, b"waits", Stability::Unstable).unwrap();
    served.tree.await_hung(1);
    for at in (0..MIB).step_by(BLOCK as usize) {
        assert!(client.read(&file, at, BLOCK as u32).unwrap().bytes == content(at, BLOCK));
    }
    // Nor do they overtake a write that came before.
    let over = stuck.send_write(&file, 0, &[9; 100], Stability::Unstable).unwrap();
    eventually("the write is handed over", || told(&served, "/engine/in_flight_batches") == 2);
    let after = client.send_read(&file, 0, 200).unwrap();
    eventually("the read waits", || told(&served, "/engine/blocked") == 1);
    served.tree.set_faults(Faults::default());
    let read = read_back(&client.wait(after).unwrap()).unwrap();
    assert_eq!(read.bytes, [vec![9; 100], content(100, 100)].concat());
    [waits, over].into_iter().for_each(|xid| assert!(stuck.wait(xid).unwrap().good().is_ok()));
    // Nor are they answered to another who may not read them.
    let mut other = served.client();
    other.be(6, 6, &[]);
    let closed = send_set(&mut client, &file, &SetAttr { mode: Some(0o600), ..SetAttr::default() });
    client.wait(closed).unwrap().good().unwrap();
    assert!(other.read(&file, 0, 100).is_err());
}

/// What it reads, and what is predicted of that, is no reason to ask it for anything where other exports are served.
#[test]
fn a_connection_does_not_wait_for_a_file_system_that_hangs() {
    let other = MemoryTree::on_another_device();
    let (served, mut client, file) =
        cold(8 * MIB, |settings| settings.exports.push(export("/other", &other, open_rules())));
    let root = client.mount("/other").unwrap();
    let there = client.create(&root, "f", &SetAttr::default()).unwrap();
    client.write(&there, 0, &content(0, 100), Stability::File).unwrap();
    for at in (0..MIB).step_by(BLOCK as usize) {
        client.read(&file, at, BLOCK as u32).unwrap();
    }
    settled(&served);
    let before = told(&served, "/read_ahead/predicted_bytes");
    served.tree.set_faults(Faults { data_hung: true, attrs_hung: true, ..Faults::default() });
    let blocks = (MIB..4 * MIB).step_by(BLOCK as usize);
    let hung: Vec<u32> = blocks.map(|at| client.send_read(&file, at, BLOCK as u32).unwrap()).collect();
    let asked = client.send_read(&there, 0, 100).unwrap();
    let (tell, answered) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            tell.send(read_back(&client.wait(asked).unwrap()).unwrap().bytes).unwrap();
            hung.into_iter().for_each(|xid| drop(client.wait(xid).unwrap()));
        });
        let got = answered.recv_timeout(Duration::from_secs(10));
        let predicted = told(&served, "/read_ahead/predicted_bytes");
        served.tree.set_faults(Faults::default());
        assert_eq!(got, Ok(content(0, 100)));
        assert!(predicted > before, "nothing was predicted of what hangs");
    });
}

/// What is predicted and still queued is dropped when a write or a cut covers it.
#[test]
fn a_change_drops_the_speculations_that_it_covers() {
    let change = |settings: &mut Settings| {
        settings.in_flight_requests = 1;
        settings.schedule_cached_reads = true;
    };
    for cut in [true, false] {
        let (served, mut client, file) = cold(16 * MIB, change);
        for at in (0..8 * BLOCK).step_by(BLOCK as usize) {
            client.read(&file, at, BLOCK as u32).unwrap();
        }
        settled(&served);
        let all_begun = || told(&served, "/engine/speculated_bytes") == told(&served, "/read_ahead/predicted_bytes");
        eventually("what was predicted is read", all_begun);
        let before = reaches(&served.tree.take_advised());
        assert!(before > 8 * BLOCK && before < 12 * MIB, "{before}");
        // The device is busy; behind it a read waits that predicts more, and then the change of what it predicts.
        served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
        let mut other = served.client();
        let busy = other.send_read(&file, 15 * MIB, 4096).unwrap();
        // Reading along with an earlier one may hang too: that alone holds up nobody.
        eventually("the device is busy", || told(&served, "/engine/lanes/0/in_flight_bytes") == 4096);
        let read: Vec<u32> = (8 * BLOCK..before)
            .step_by(BLOCK as usize)
            .map(|at| client.send_read(&file, at, BLOCK as u32).unwrap())
            .collect();
        eventually("the reads are queued", || told(&served, "/engine/queued") == read.len() as u64);
        let predicted = told(&served, "/read_ahead/outstanding_bytes");
        assert!(predicted > 0, "{:#}", served.running.status());
        let mut changer = served.client();
        let send = |at: u64| {
            let bytes = vec![7; MIB.min(15 * MIB - at) as usize];
            changer.send_write(&file, at, &bytes, Stability::Unstable).unwrap()
        };
        let sent: Vec<u32> = match cut {
            false => (before..15 * MIB).step_by(MIB as usize).map(send).collect(),
            true => vec![send_set(&mut changer, &file, &SetAttr { size_bytes: Some(before), ..SetAttr::default() })],
        };
        eventually("what was predicted is dropped", || told(&served, "/read_ahead/outstanding_bytes") == 0);
        // A cut waits for the device's read.
        let waits = || told(&served, "/engine/queued") + told(&served, "/engine/blocked");
        eventually("the change waits", || waits() == (read.len() + sent.len()) as u64);
        served.tree.set_faults(Faults::default());
        sent.into_iter().for_each(|xid| assert!(changer.wait(xid).unwrap().good().is_ok()));
        for xid in read {
            read_back(&client.wait(xid).unwrap()).unwrap();
        }
        other.wait(busy).unwrap().good().unwrap();
        settled(&served);
        let advised = served.tree.take_advised();
        assert!(reaches(&advised) <= before, "cut: {cut}, {before}: {advised:?}");
    }
}
