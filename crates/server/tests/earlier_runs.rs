//! Earlier runs that servers load: what they foretell is what comes when the run is made again, and no bad trace does harm.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::support::{Cluster, Peer, cold_object, cool, fault, pattern, who};
use impresario_layout::Layout;
use impresario_sched::PolicySpec;
use impresario_testing::until;
use impresario_trace::{FileInfo, Header, Space, Trace};
use impresario_wire::{Answer, Call, FileKey, Role};
use serde_json::Value;

const BLOCK: usize = 16 << 10;

/// Links whatever the machine delays, and waits briefly.
fn agios() -> PolicySpec {
    PolicySpec::named("agios").with("wait_us", 2000).with("bound_percent", 1_000_000)
}

fn text(answer: Answer) -> String {
    match answer {
        Answer::Text(text) => text,
        other => panic!("{other:?}"),
    }
}

/// Begins or ends a trace when nothing is under way: an answer may leave before its request has ended.
fn trace(peer: &mut Peer, on: bool) -> String {
    until("nothing is in flight", || peer.status()["engine"]["in_flight_batches"] == 0);
    text(peer.call(&Call::Trace { on }, &[]).0)
}

fn load(peer: &mut Peer, runs: &[&Path]) -> Answer {
    let runs = runs.iter().map(|run| run.as_os_str().as_bytes().to_vec()).collect();
    peer.call(&Call::EarlierRuns { runs: Some(runs) }, &[]).0
}

fn unload(peer: &mut Peer) -> Answer {
    peer.call(&Call::EarlierRuns { runs: None }, &[]).0
}

/// The file that an ended trace is in.
fn path_of(told: &str) -> PathBuf {
    told.split_once(": ").unwrap().0.into()
}

fn linked(peer: &mut Peer) -> (u64, u64, u64) {
    let foretold = &peer.status()["engine"]["foretold"];
    let figure = |pointer: &str| foretold.pointer(pointer).and_then(Value::as_u64).unwrap();
    (figure("/requests"), figure("/linked/arrived"), figure("/linked/linked"))
}

/// Four synchronous clients read a file in turns; what they get is right.
fn strided_reads(address: &str, role: Role, content: &[u8], read: impl Fn(u64, u64) -> Call + Sync) {
    std::thread::scope(|scope| {
        for client in 0..4u64 {
            let read = &read;
            scope.spawn(move || {
                let mut peer = Peer::connect(address, role, 100 + client);
                for at in (client as usize * BLOCK..content.len()).step_by(4 * BLOCK) {
                    let (answer, bytes) = peer.call(&read(100 + client, at as u64), &[]);
                    assert_eq!(answer, Answer::Data);
                    assert!(bytes == content[at..at + BLOCK], "at {at}");
                }
            });
        }
    });
}

/// A data server reads ahead what the run read next, in whatever order that was; other reads it leaves alone.
#[test]
fn reads_in_no_order_are_read_ahead_after_a_recorded_run() {
    let traces = tempfile::tempdir().unwrap();
    let cold = cold_object(|data| {
        (data.trace, data.trace_at_start) = (Some(traces.path().into()), false);
        (data.policy, data.read_ahead_bytes) = (PolicySpec::named("auto"), 16 << 20);
    });
    let Some((_cluster, mut peer, folder, bytes)) = cold else { return };
    let blocks = bytes.len() / BLOCK;
    // Every block once, no two neighbours one after the other.
    let read_all = |peer: &mut Peer, step: usize| {
        for block in (0..blocks).map(|n| n * step % blocks) {
            assert!(
                peer.read(1, 1, (block * BLOCK) as u64, BLOCK as u32) == bytes[block * BLOCK..][..BLOCK],
                "{block}"
            );
        }
        peer.status()["read_ahead"]["hit_bytes"].as_u64().unwrap()
    };
    trace(&mut peer, true);
    let blind = read_all(&mut peer, 201);
    let recorded = path_of(&trace(&mut peer, false));
    assert!(text(load(&mut peer, &[&recorded])).contains("512 requests"));
    cool(folder.path());
    let foretold = read_all(&mut peer, 201) - blind;
    assert!(foretold > 7 << 20, "{foretold} of 8 MiB were there before they were asked for");
    let told = &peer.status()["read_ahead"];
    assert!(told["wasted_bytes"].as_u64().unwrap() < 1 << 20, "{told}");
}

fn read_of(file: u64) -> impl Fn(u64, u64) -> Call + Sync {
    move |client, lane_offset| Call::Read { who: who(client), file: FileKey(file), lane_offset, len: BLOCK as u32 }
}

#[test]
fn a_recorded_run_foretells_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(1, |config| {
        config.data[0].trace = Some(folder.path().into());
        config.data[0].trace_at_start = false;
        config.data[0].policy = agios();
        config.data[0].in_flight_requests = 1;
    });
    let address = cluster.address(0).to_string();
    let mut peer = cluster.peer(0, 1);
    let content = pattern(5, 256 * BLOCK);
    for at in (0..content.len()).step_by(1 << 20) {
        peer.write(1, 7, at as u64, &content[at..content.len().min(at + (1 << 20))]);
    }
    assert!(fault(unload(&mut peer)).1.contains("no earlier runs"));
    assert!(fault(load(&mut peer, &[])).1.contains("earlier_runs = "), "none is configured");
    trace(&mut peer, true);
    strided_reads(&address, Role::Data, &content, read_of(7));
    let recorded = path_of(&trace(&mut peer, false));

    let told = text(load(&mut peer, &[&recorded]));
    assert!(told.contains("256 requests of 1 file ") && told.contains(".imt"), "{told}");
    assert_eq!(peer.status()["earlier_runs"]["requests"], 256);
    // Loaded is loaded: the file may go.
    std::fs::rename(&recorded, folder.path().join("aside")).unwrap();
    std::fs::write(&recorded, "no trace any more").unwrap();
    strided_reads(&address, Role::Data, &content, read_of(7));
    let (requests, arrived, found) = linked(&mut peer);
    assert_eq!((requests, arrived), (256, 256));
    assert!(found > 128, "{found} of 256 linked");
    // Other parameters of the policy keep the count, another policy has none.
    let other = |name: &str, params: &[(&str, &str)]| Call::SetPolicy {
        name: name.into(),
        params: params.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        at_shared_ns: 0,
    };
    peer.call(&other("agios", &[("wait_us", "1000")]), &[]);
    assert_eq!(linked(&mut peer), (256, 256, found));
    peer.call(&other("fifo", &[]), &[]);
    assert_eq!(peer.status()["engine"]["foretold"]["linked"], Value::Null);
    assert!(text(unload(&mut peer)).contains("no earlier run"));
    let status = peer.status();
    assert_eq!((&status["earlier_runs"], &status["engine"]["foretold"]), (&Value::Null, &Value::Null));

    // Named in the configuration it is there from the start, by the folder, where other things are passed over.
    std::fs::rename(folder.path().join("aside"), &recorded).unwrap();
    cluster.stop_data(0);
    cluster.config.data[0].earlier_runs = vec![folder.path().into()];
    cluster.config.data[0].trace_at_start = true;
    cluster.start_data(0);
    let mut peer = cluster.peer(0, 1);
    until("they are loaded", || peer.status()["earlier_runs"]["failure"].is_null());
    strided_reads(cluster.address(0), Role::Data, &content, read_of(7));
    let (_, arrived, found) = linked(&mut peer);
    assert!(arrived == 256 && found > 128, "{found} of {arrived} linked");
    // The trace that is being written there is no earlier run yet.
    let told = text(load(&mut peer, &[]));
    assert!(
        told.contains("256 requests") && told.contains("1 passed over") && told.contains("its end is missing"),
        "{told}"
    );
}

/// On a node that splits requests the parts of a file on several servers have the same offsets, and are told apart.
#[test]
fn an_io_node_foresees_too() {
    for split in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = Cluster::start(2, |_| {});
        let _io = cluster.start_io(|io| {
            io.trace = Some(folder.path().into());
            io.trace_at_start = false;
            io.policy = agios();
            io.split = split;
        });
        let address = cluster.config.io[0].address.clone();
        let mut peer = Peer::connect(&address, Role::Io, 1);
        let layout = Layout::new(0, 2, BLOCK as u32, 2).unwrap();
        let content = pattern(9, 128 * BLOCK);
        for at in (0..content.len()).step_by(1 << 20) {
            let call = Call::FileWrite { who: who(1), file: FileKey(3), layout, offset: at as u64 };
            assert_eq!(peer.call(&call, &content[at..at + (1 << 20)]).0, Answer::Written(1 << 20));
        }
        let read = |client, offset| Call::FileRead {
            who: who(client),
            file: FileKey(3),
            layout,
            made: 0,
            offset,
            len: BLOCK as u32,
        };
        trace(&mut peer, true);
        strided_reads(&address, Role::Io, &content, read);
        let recorded = path_of(&trace(&mut peer, false));
        let told = text(load(&mut peer, &[&recorded]));
        assert!(told.contains("128 requests"), "{told}");
        strided_reads(&address, Role::Io, &content, read);
        let (_, arrived, found) = linked(&mut peer);
        assert_eq!(arrived, 128);
        assert!(found > 64, "split {split}: {found} of 128 linked");
        // Another kind of server's trace, and this one's with other offsets.
        let wrong = if split { Space::File } else { Space::Lane };
        let mut other = Trace::load(&recorded).unwrap();
        other.header.space = wrong;
        other.save(folder.path().join("wrong")).unwrap();
        let (_, message) = fault(load(&mut peer, &[&folder.path().join("wrong")]));
        assert!(message.contains("with other offsets"), "{message}");
        let mut data = cluster.peer(0, 1);
        let (_, message) = fault(load(&mut data, &[&recorded]));
        assert!(message.contains("recorded by io.0"), "{message}");
    }
}

/// A server begins and goes on with whatever it is given, says what is wrong, and keeps what it had.
#[test]
fn bad_traces_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut name = String::new();
    let mut cluster = Cluster::start(1, |config| {
        config.data[0].policy = agios();
        config.data[0].earlier_runs = vec![folder.path().join("text")];
        std::fs::write(folder.path().join("text"), "hello, this is no trace").unwrap();
        name.clone_from(&config.data[0].name);
    });
    let mut peer = cluster.peer(0, 1);
    assert_eq!(peer.write(1, 7, 0, &pattern(1, BLOCK)), Answer::Written(BLOCK as u32));
    let mut failure = String::new();
    until("they are not loaded", || {
        failure = peer.status()["earlier_runs"]["failure"].as_str().unwrap().to_string();
        failure != "they are being loaded"
    });
    assert!(failure.contains("/text: at byte 0: it is not a trace"), "{failure}");
    // A trace with this file, as the server writes it, and what may become of one.
    let header = Header { command: name.clone(), space: Space::Lane, ..Header::default() };
    let build = |header: &Header, key: u64| {
        let mut builder = impresario_trace::Builder::new(header.clone());
        let file = builder.file(FileInfo { key, ..FileInfo::default() }).unwrap();
        builder.origin(Default::default()).unwrap();
        for i in 0..5000u64 {
            let at = impresario_sched::Nanos(i * 1000);
            builder
                .push(impresario_trace::Record::new(impresario_trace::TraceOp::Read, file, i * 4096, 4096, at))
                .unwrap();
        }
        builder.build()
    };
    build(&header, 7).save(path("good")).unwrap();
    build(&header, 8).save(path("other-files")).unwrap();
    build(&Header { command: "make -j".into(), ..header }, 7).save(path("program")).unwrap();
    let bytes = std::fs::read(path("good")).unwrap();
    std::fs::write(path("cut"), &bytes[..bytes.len() * 2 / 3]).unwrap();
    let mut changed = bytes.clone();
    changed[bytes.len() / 2] ^= 1;
    std::fs::write(path("changed"), &changed).unwrap();
    changed.clone_from(&bytes);
    changed[7] = 2;
    std::fs::write(path("later"), &changed).unwrap();
    assert!(text(load(&mut peer, &[&path("good")])).contains("5000 requests"));
    for (name, wanted) in [
        ("text", "it is not a trace"),
        ("other-files", "holds none of its files"),
        ("program", "recorded by make -j"),
        ("cut", "its end is missing"),
        ("changed", "checksum"),
        ("later", "version 2"),
        ("missing", "No such file"),
    ] {
        let (_, message) = fault(load(&mut peer, &[&path("good"), &path(name)]));
        let whole = message.contains(name) && message.contains(wanted) && message.contains("nothing was loaded");
        assert!(whole, "{name}: {message}");
        assert_eq!(peer.status()["earlier_runs"]["requests"], 5000, "what was loaded stays");
        assert_eq!(peer.read(1, 7, 0, BLOCK as u32), pattern(1, BLOCK));
    }
    // Truncated while loaded: it was read whole.
    std::fs::write(path("good"), &bytes[..20]).unwrap();
    assert_eq!(peer.read(1, 7, 4096, 4096), &pattern(1, BLOCK)[4096..8192]);
    assert_eq!(linked(&mut peer).0, 5000);
    cluster.stop_data(0);
}
