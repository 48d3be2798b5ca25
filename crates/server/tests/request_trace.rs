//! Traces that servers write: every request once with its completion, switched live, and no harm from a full disk.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{FileType, Filesystem, INodeNo, ReplyAttr, ReplyEntry, Request};
use impresario_base::lock::Mutex;

use crate::support::{Cluster, Peer, fault, pattern, who};
use impresario_testing::{require, until};
use impresario_trace::codec::Outcome;
use impresario_trace::{Ending, Space, Trace, TraceOp};
use impresario_wire::{Answer, Call, FileKey};

/// The traces in a folder, in order of their names.
fn traces(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

fn text(answer: Answer) -> String {
    match answer {
        Answer::Text(text) => text,
        other => panic!("{other:?}"),
    }
}

fn switch(peer: &mut Peer, on: bool) -> Answer {
    peer.call(&Call::Trace { on }, &[]).0
}

fn in_trace(peer: &mut Peer) -> u64 {
    peer.status()["trace"]["requests"].as_u64().unwrap_or(0)
}

/// A file system without files. Its calls that make a folder, or look for one named `runs`, hang until it is released.
#[derive(Clone, Default)]
struct Hangs(Arc<Mutex<(Vec<ReplyEntry>, bool)>>);

impl Hangs {
    fn hang(&self, reply: ReplyEntry) {
        let mut state = self.0.lock();
        match state.1 {
            false => state.0.push(reply),
            true => reply.error(fuser::Errno::EIO),
        }
    }

    fn calls(&self) -> usize {
        self.0.lock().0.len()
    }

    fn release(&self) {
        let mut state = self.0.lock();
        state.1 = true;
        state.0.drain(..).for_each(|reply| reply.error(fuser::Errno::EIO));
    }
}

impl Filesystem for Hangs {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("runs") => self.hang(reply),
            _ => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<fuser::FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &impresario_testing::fuse::attr(node.0, FileType::Directory, 0o755, 0));
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        self.hang(reply);
    }
}

/// Where its traces and earlier runs are hangs: a server starts, tells its status, serves, says so, and ends.
#[test]
fn a_file_system_that_hangs_delays_no_server() {
    if !require("fuse") || !require("root") {
        return;
    }
    let hangs = Hangs::default();
    let mounted = tempfile::tempdir().unwrap();
    let session = fuser::spawn_mount(hangs.clone(), mounted.path(), &fuser::Config::default()).unwrap();
    // A server that waits for it fails here, not never.
    std::thread::spawn({
        let hangs = hangs.clone();
        move || {
            std::thread::sleep(Duration::from_secs(90));
            hangs.release();
        }
    });
    let folder = mounted.path().join("traces");
    let mut cluster = Cluster::start(1, |config| {
        config.data[0].trace = Some(folder.clone());
        config.data[0].trace_at_start = false;
    });
    let (mut peer, mut other) = (cluster.peer(0, 1), cluster.peer(0, 2));
    let began = Instant::now();
    let start = peer.send(&Call::Trace { on: true }, &[]);
    until("it hangs", || hangs.calls() > 0);
    assert_eq!(other.status()["trace"]["path"], folder.to_str().unwrap());
    // On the same connection, too.
    assert_eq!(peer.send(&Call::Status, &[]), start + 1);
    assert_eq!(peer.answer().unwrap().0, start + 1);
    assert_eq!(other.write(2, 1, 0, &[1; 100]), Answer::Written(100));
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let (answered, answer, _) = peer.answer().unwrap();
    let (errno, message) = fault(answer);
    assert_eq!((answered, errno), (start, libc::EBUSY));
    assert!(message.contains(folder.to_str().unwrap()) && message.contains("nothing is traced"), "{message}");
    assert_eq!(peer.status()["trace"], serde_json::Value::Null);
    let began = Instant::now();
    let (errno, message) = fault(switch(&mut peer, true));
    assert!(errno == libc::EBUSY && message.contains(folder.to_str().unwrap()), "{message}");
    assert!(fault(switch(&mut peer, false)).1.contains("writes no trace"));
    assert!(began.elapsed() < Duration::from_secs(5), "one thread hangs, not one for each call");

    cluster.stop_data(0);
    cluster.config.data[0].trace_at_start = true;
    cluster.config.data[0].earlier_runs = vec![mounted.path().join("runs")];
    let began = Instant::now();
    cluster.start_data(0);
    let mut peer = cluster.peer(0, 1);
    assert_eq!(peer.write(1, 1, 0, &[1; 100]), Answer::Written(100));
    let status = peer.status();
    assert_eq!(status["trace"]["path"], folder.to_str().unwrap());
    assert_eq!(status["earlier_runs"]["failure"], "they are being loaded");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let began = Instant::now();
    drop(peer);
    cluster.stop_data(0);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    hangs.release();
    // A thread of the server may be there yet; what stays mounted is in the way of whoever removes the folder.
    let unmounted = std::process::Command::new("umount").arg("--lazy").arg(mounted.path()).status().unwrap();
    assert!(unmounted.success());
    drop(session);
}

/// Under policies that merge, and that serve by pieces.
#[test]
fn every_request_is_in_the_trace_once_with_its_completion() {
    for policy in ["mlf", "stream"] {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = Cluster::start(1, |config| {
            config.data[0].trace = Some(folder.path().join("made/here"));
            config.data[0].policy = impresario_sched::PolicySpec::named(policy);
            config.data[0].in_flight_requests = 1;
        });
        std::thread::scope(|scope| {
            for client in 1..=4u64 {
                let mut peer = cluster.peer(0, client);
                scope.spawn(move || {
                    for i in 0..100 {
                        let offset = (i * 4 + client - 1) * 20_000;
                        peer.send(
                            &Call::Write { who: who(client), file: FileKey(7), lane_offset: offset },
                            &pattern(offset, 20_000),
                        );
                        let read = Call::Read { who: who(client), file: FileKey(7), lane_offset: offset, len: 20_000 };
                        peer.send(&read, &[]);
                    }
                    (0..200).for_each(|_| drop(peer.answer().unwrap()));
                });
            }
        });
        let mut peer = cluster.peer(0, 9);
        assert_eq!(peer.call(&Call::Sync { who: who(9), file: FileKey(7) }, &[]).0, Answer::Done);
        assert_eq!(peer.read(9, 7, 8_000_000 - 5, 50).len(), 5, "short at the end");
        let extents = impresario_wire::Extents::of(&[(0, 10), (100, 10)]);
        assert_eq!(peer.call(&Call::ReadList { who: who(9), file: FileKey(7), extents }, &[]).0, Answer::Data);
        cluster.stop_data(0);
        let [path] = &traces(&folder.path().join("made/here"))[..] else { panic!("one trace") };
        let trace = Trace::load(path).unwrap();
        assert_eq!((trace.ending, trace.header.space), (Ending::Closed, Space::Lane));
        assert_eq!(trace.records.len(), 804, "{policy}");
        for op in [TraceOp::Read, TraceOp::Write] {
            let mut offsets: Vec<u64> =
                trace.records.iter().filter(|r| r.op == op && r.len == 20_000).map(|r| r.offset).collect();
            offsets.sort_unstable();
            assert_eq!(offsets, (0..400).map(|i| i * 20_000).collect::<Vec<u64>>(), "{policy}: once each");
        }
        assert!(trace.records.iter().all(|r| r.duration.is_some() && r.completion() >= Some(r.arrival)));
        assert_eq!(trace.files.iter().map(|f| f.key).collect::<Vec<_>>(), [7]);
        let wholes = trace.records.iter().filter(|r| r.outcome == Outcome::Whole).count();
        let odd: Vec<_> = trace.records.iter().filter(|r| r.outcome != Outcome::Whole).collect();
        assert_eq!(odd.len(), 1, "{policy}: {odd:?}");
        let short = trace.records.iter().find(|r| r.outcome != Outcome::Whole).unwrap();
        assert_eq!((wholes, short.len, short.outcome), (803, 50, Outcome::Short(5)));
        // Each client's requests in its order: a conflicting read was not served before its write had ended.
        for read in trace.records.iter().filter(|r| r.op == TraceOp::Read && r.len == 20_000) {
            let write = trace.records.iter().find(|r| r.op == TraceOp::Write && r.offset == read.offset).unwrap();
            assert!(read.completion() >= write.completion() && read.origin == write.origin);
        }
        assert_eq!(trace.origins.len(), 5);
    }
}

#[test]
fn traces_are_switched_on_a_running_server() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(2, |config| {
        config.data[0].trace = Some(folder.path().into());
        config.data[0].trace_at_start = false;
    });
    let mut peer = cluster.peer(0, 1);
    assert!(fault(switch(&mut peer, false)).1.contains("writes no trace"));
    peer.write(1, 1, 0, &[1; 100]);
    for round in 0..2u64 {
        assert!(text(switch(&mut peer, true)).contains(".imt"));
        assert!(fault(switch(&mut peer, true)).1.contains("already writes"));
        for i in 0..10 {
            peer.write(1, 1, i * 100, &[1; 100]);
        }
        let told = text(switch(&mut peer, false));
        assert!(told.contains("10 requests"), "{told}");
        peer.write(1, 1, 0, &[1; 100]);
        let paths = traces(folder.path());
        assert_eq!(paths.len() as u64, round + 1);
        let trace = Trace::load(&paths[round as usize]).unwrap();
        assert_eq!((trace.ending, trace.records.len()), (Ending::Closed, 10));
    }
    assert_eq!(peer.status()["trace"], serde_json::Value::Null);
    let mut other = cluster.peer(1, 1);
    let (errno, message) = fault(switch(&mut other, true));
    assert!(errno == libc::ENOENT && message.contains("add trace ="), "{message}");
    // An I/O node writes what its clients asked for, in offsets of the file.
    let mut io = cluster.start_io(|io| io.trace = Some(folder.path().join("io")));
    let layout = impresario_layout::Layout::new(0, 2, 65_536, 2).unwrap();
    let mut client = Peer::connect(&cluster.config.io[0].address, impresario_wire::Role::Io, 5);
    for i in 0..8u64 {
        let call = Call::FileWrite { who: who(5), file: FileKey(3), layout, offset: i * 65_536 };
        assert_eq!(client.call(&call, &[3; 65_536]).0, Answer::Written(65_536));
    }
    io.stop();
    let trace = Trace::load(&traces(&folder.path().join("io"))[0]).unwrap();
    assert_eq!((trace.header.space, trace.records.len()), (Space::File, 8));
    let mut seen: Vec<(u64, u16)> = trace.records.iter().map(|r| (r.offset, r.lane.0)).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..8).map(|i| (i * 65_536, (i % 2) as u16)).collect::<Vec<_>>());
}

/// On a file system of 64 KiB: the trace ends with a message, the service goes on, and a new trace can begin.
#[test]
fn a_full_disk_ends_the_trace_and_not_the_service() {
    if !require("root") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().join("small");
    std::fs::create_dir(&small).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(&small).status().unwrap();
    assert!(mounted.success());
    let cluster = Cluster::start(1, |config| config.data[0].trace = Some(small.clone()));
    let mut peer = cluster.peer(0, 1);
    let bytes = pattern(1, 1 << 20);
    peer.write(1, 1, 0, &bytes);
    let mut asked = 0;
    until("the disk is full", || {
        for _ in 0..1000 {
            asked += 1;
            let at = (asked * 7919) % 1000 * 1000;
            assert!(peer.read(1, 1, at, 100) == bytes[at as usize..][..100]);
        }
        !peer.status()["trace"]["failure"].is_null()
    });
    let failure = peer.status()["trace"]["failure"].as_str().unwrap().to_string();
    assert!(failure.contains("No space left"), "{failure}");
    peer.read(1, 1, 0, 100);
    let path = traces(&small).pop().unwrap();
    // What is there is readable up to the last whole block.
    let trace = Trace::load(&path).unwrap();
    assert!(trace.ending != Ending::Closed, "{:?}", trace.ending);
    std::fs::remove_file(&path).unwrap();
    assert!(text(switch(&mut peer, true)).contains(".imt"), "room again");
    (0..10).for_each(|_| drop(peer.read(1, 1, 0, 100)));
    until("it is traced", || in_trace(&mut peer) == 10);
    assert!(text(switch(&mut peer, false)).contains("10 requests"));
    drop(cluster);
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
}
