//! The I/O node between clients and data servers: contents, merging, splitting, faults, recovery, metadata.

use std::time::Duration;

use crate::support::{self, Cluster, Peer, SmallDisk, fault, pattern, who};
use impresario_config::Merge;
use impresario_layout::{Layout, Skipped};
use impresario_sched::PolicySpec;
use impresario_testing::link::Link;
use impresario_testing::until;
use impresario_wire::{
    Answer, Call, ClientKey, Extents, Fault, FileKey, MetaCall, Role, Sender, SpaceChange, Target, Who,
};

const LAYOUT: Layout = Layout { base: 1, pcount: 3, ssize_bytes: 4096, servers: 4, skipped: Skipped::NONE };

fn write(client: u64, file: u64, offset: u64) -> Call {
    Call::FileWrite { who: who(client), file: FileKey(file), layout: LAYOUT, offset }
}

fn read(client: u64, file: u64, offset: u64, len: u32) -> Call {
    Call::FileRead { who: who(client), file: FileKey(file), layout: LAYOUT, made: 0, offset, len }
}

fn sender(client: u64, epoch: u32) -> Sender {
    Sender { client: ClientKey(client), epoch, sequence: 0 }
}

fn data(answer: (Answer, Vec<u8>)) -> Vec<u8> {
    assert_eq!(answer.0, Answer::Data);
    answer.1
}

fn cluster(timeout_ms: u64) -> Cluster {
    Cluster::start(4, |config| {
        config.cluster.request_timeout_ms = timeout_ms;
        config.cluster.max_payload_bytes = 1 << 20;
    })
}

/// How many more requests an I/O node has sent than it got, since it was asked last.
fn more_sent(peer: &mut Peer) -> f64 {
    let forward = peer.status()["forward"].clone();
    let more = forward["forwarded"].as_f64().unwrap() - forward["requests"].as_f64().unwrap();
    assert_eq!(peer.call(&Call::ResetStatistics, &[]).0, Answer::Done);
    more
}

#[test]
fn files_are_striped_and_come_back_whole_or_split() {
    for split in [false, true] {
        let mut cluster = cluster(10_000);
        let io = cluster.start_io(|io| io.split = split);
        let mut peer = Peer::connect(io.address(), Role::Io, 1);
        for (file, offset, len) in [(1, 0, 1), (2, 0, 4096), (3, 5000, 100_003), (4, 12_287, 2), (5, 0, 1 << 20)] {
            let bytes = pattern(file, len);
            assert_eq!(peer.call(&write(1, file, offset), &bytes).0, Answer::Written(len as u32));
            assert!(data(peer.call(&read(1, file, offset, len as u32), &[])) == bytes, "split {split}: file {file}");
            // Each data server has exactly its lane.
            for server in 0..4 {
                let size = match cluster.peer(server, 1).call(&Call::ObjectStat { file: FileKey(file) }, &[]).0 {
                    Answer::Object(info) => info.size,
                    other => panic!("{other:?}"),
                };
                let ranges = LAYOUT.lane_ranges(offset, len as u64);
                let range = ranges.iter().find(|r| usize::from(r.server) == server);
                assert_eq!(size, range.map_or(0, |r| r.lane_offset + r.len), "file {file} server {server}");
            }
            let stat = Call::FileStat { file: FileKey(file), layout: LAYOUT };
            match peer.call(&stat, &[]).0 {
                Answer::Object(info) => assert_eq!(info.size, offset + len as u64),
                other => panic!("{other:?}"),
            }
        }
        // Short at the end of the file, empty behind it; holes are zeros, wherever objects end.
        assert!(data(peer.call(&read(1, 3, 100_003, 100_000), &[])) == pattern(3, 100_003)[95_003..]);
        assert!(data(peer.call(&read(1, 3, 1 << 30, 4096), &[])).is_empty());
        assert!(data(peer.call(&read(1, 77, 0, 4096), &[])).is_empty(), "no objects at all");
        let holes = data(peer.call(&read(1, 3, 0, 8192), &[]));
        assert!(holes[..5000].iter().all(|&b| b == 0) && holes[5000..] == pattern(3, 100_003)[..3192]);
        peer.call(&write(1, 6, 1_000_000), b"far");
        let holes = data(peer.call(&read(1, 6, 990_000, 20_000), &[]));
        assert!(holes.len() == 10_003 && holes[..10_000].iter().all(|&b| b == 0) && &holes[10_000..] == b"far");
        let sync = Call::FileSync { who: who(1), file: FileKey(5), layout: LAYOUT };
        assert_eq!(peer.call(&sync, &[]).0, Answer::Done);
        assert_eq!(peer.call(&write(1, 7, 0), &[]).0, Answer::Written(0));
        assert!(data(peer.call(&read(1, 5, 0, 0), &[])).is_empty());
        let status = peer.status();
        assert_eq!((&status["role"], &status["split"]), (&"io".into(), &split.into()));
        assert_eq!(status["engine"]["lanes"].as_array().unwrap().len(), 4);
        until("all memory is given back", || peer.status()["memory"]["payload_bytes"] == 0);
    }
}

fn change(change: SpaceChange, offset: u64, len: u64) -> Call {
    Call::FileChangeSpace { who: who(1), file: FileKey(1), layout: LAYOUT, change, offset, len }
}

/// A write to the second of two servers hangs, so a hole over both waits there; a write to the first one that comes after the hole
/// stays.
#[test]
fn changes_of_space_keep_the_order_on_each_server() {
    for split in [false, true] {
        for how in [SpaceChange::Punch, SpaceChange::Zero { keep_size: true }, SpaceChange::Zero { keep_size: false }] {
            let mut cluster = cluster(10_000);
            let second = Link::to(cluster.address(2)).unwrap();
            cluster.config.data[2].address = second.address().into();
            let io = cluster.start_io(|io| io.split = split);
            let mut peer = Peer::connect(io.address(), Role::Io, 1);
            assert_eq!(peer.call(&write(1, 1, 0), &[1; 12_288]).0, Answer::Written(12_288));
            second.hold();
            peer.send(&write(1, 1, 4096), &[2; 4096]);
            peer.send(&change(how, 1000, 6000), &[]);
            let newer = peer.send(&write(1, 1, 2000), &[3; 100]);
            let mut answers = 3;
            if split {
                let (id, answer, _) = peer.answer().unwrap();
                assert_eq!((id, answer), (newer, Answer::Written(100)), "the first server does not hang");
                answers -= 1;
            }
            second.go_on();
            for _ in 0..answers {
                let answer = peer.answer().unwrap().1;
                assert!(matches!(answer, Answer::Written(_)), "{answer:?}");
            }
            let mut wanted = [vec![1; 1000], vec![0; 6000], vec![2; 1192], vec![1; 4096]].concat();
            wanted[2000..2100].fill(3);
            assert!(data(peer.call(&read(1, 1, 0, 20_000), &[])) == wanted, "split {split}: {how:?}");
        }
    }
}

#[test]
fn changes_of_space_give_what_memory_holds() {
    for split in [false, true] {
        let mut cluster = cluster(10_000);
        let io = cluster.start_io(|io| io.split = split);
        let mut peer = Peer::connect(io.address(), Role::Io, 1);
        let (mut memory, mut random) = (Vec::new(), 1_u64);
        let mut below = |limit: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % limit
        };
        for step in 0..300 {
            let (offset, len) = (below(60_000), 1 + below(30_000));
            let range = offset as usize..(offset + len) as usize;
            let end = memory.len().max(range.end);
            let (how, extends) = match below(7) {
                0 => (Some(SpaceChange::Punch), false),
                1 => (Some(SpaceChange::Zero { keep_size: true }), false),
                2 => (Some(SpaceChange::Zero { keep_size: false }), true),
                3 => (Some(SpaceChange::Allocate { keep_size: true }), false),
                4 => (Some(SpaceChange::Allocate { keep_size: false }), true),
                _ => (None, true),
            };
            let before = memory.len();
            memory.resize(if extends { end } else { before }, 0);
            match how {
                None => memory[range].fill(step as u8),
                Some(how) if how.changes_bytes() => {
                    let end = range.end.min(memory.len());
                    memory[range.start.min(end)..end].fill(0);
                }
                Some(_) => {}
            }
            let answer = match how {
                None => peer.call(&write(1, 1, offset), &vec![step as u8; len as usize]).0,
                Some(how) => peer.call(&change(how, offset, len), &[]).0,
            };
            assert_eq!(answer, Answer::Written(if how.is_none() { len as u32 } else { 0 }), "{how:?}");
            assert!(data(peer.call(&read(1, 1, 0, 100_000), &[])) == memory, "split {split}, step {step}: {how:?}");
        }
    }
}

/// A hint for a file goes to the data servers, in the name of the client that gave it.
#[test]
fn hints_are_passed_on() {
    let folders: Vec<_> = (0..4).map(|_| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()).collect();
    let mut cluster = Cluster::start(4, |config| {
        for (data, folder) in config.data.iter_mut().zip(&folders) {
            data.dir = folder.path().into();
        }
    });
    let io = cluster.start_io(|_| {});
    let mut peer = Peer::connect(io.address(), Role::Io, 1);
    assert_eq!(peer.call(&write(1, 3, 0), &pattern(3, 1 << 20)).0, Answer::Written(1 << 20));
    let hint = |file, offset, len| Call::FilePrefetch { who: who(1), file: FileKey(file), layout: LAYOUT, offset, len };
    let in_memory = cluster.peer(0, 1).status()["store"]["in_memory"] == true;
    let expected = if in_memory { 0 } else { 100 << 10 };
    assert_eq!(peer.call(&hint(3, 64 << 10, 100 << 10), &[]).0, Answer::Accepted(expected));
    let told = |server: usize| cluster.peer(server, 1).status()["read_ahead"]["hints"]["hinted_bytes"].as_u64();
    let hinted: Vec<u64> = (0..4).map(|server| told(server).unwrap_or(0)).collect();
    assert_eq!((hinted[0], hinted.iter().sum::<u64>()), (0, expected), "{hinted:?}: by the layout");
    // To the end of the file, behind it, of no file; a layout and an offset that cannot be.
    assert_eq!(peer.call(&hint(3, 1 << 19, u64::MAX), &[]).0, Answer::Accepted(if in_memory { 0 } else { 1 << 19 }));
    assert_eq!(peer.call(&hint(3, 1 << 40, 4096), &[]).0, Answer::Accepted(0));
    assert_eq!(peer.call(&hint(99, 0, 4096), &[]).0, Answer::Accepted(0));
    assert_eq!(fault(peer.call(&hint(3, u64::MAX, 1), &[]).0).0, libc::EFBIG);
    let layout = Layout { pcount: 0, ..LAYOUT };
    let damaged = Call::FilePrefetch { who: who(1), file: FileKey(3), layout, offset: 0, len: 1 };
    assert_eq!(fault(peer.call(&damaged, &[]).0).0, libc::EINVAL);
}

#[test]
fn neighbours_of_many_clients_are_merged_and_each_gets_its_own() {
    for (split, policy) in
        [(false, "fifo"), (true, "fifo"), (false, "hbrr"), (false, "twins"), (true, "twins"), (true, "mlf")]
    {
        let mut cluster = cluster(10_000);
        let io = cluster.start_io(|io| {
            io.split = split;
            io.policy = PolicySpec::named(policy);
            io.in_flight_requests = 1;
        });
        std::thread::scope(|scope| {
            for client in 0..8u64 {
                let mut peer = Peer::connect(io.address(), Role::Io, client);
                scope.spawn(move || {
                    let offset = |round: u64| (round * 8 + client) * 1000;
                    for round in 0..25 {
                        peer.send(&write(client, 1, offset(round)), &pattern(offset(round), 1000));
                    }
                    for _ in 0..25 {
                        assert_eq!(peer.answer().unwrap().1, Answer::Written(1000));
                    }
                    let first = peer.next_id;
                    for round in 0..25 {
                        peer.send(&read(client, 1, offset(round), 1000), &[]);
                    }
                    for _ in 0..25 {
                        let (id, answer, bytes) = peer.answer().unwrap();
                        assert_eq!(answer, Answer::Data);
                        assert!(bytes == pattern(offset(id - first), 1000), "{policy} split {split}");
                    }
                });
            }
        });
        let mut peer = Peer::connect(io.address(), Role::Any, 99);
        let forward = peer.status()["forward"].clone();
        let number = |key: &str| forward[key].as_f64().unwrap();
        assert!(number("mean_forwarded_bytes") > 1.2 * number("mean_request_bytes"), "{policy} {split}: {forward}");
        assert!(number("forwarded") < number("requests") && number("failed") == 0.0, "{forward}");
        assert_eq!(number("requests") * number("mean_request_bytes"), 400_000.0, "{forward}");
        assert!(number("sent") > 0.0 && number("sent_bytes") == number("forwarded_bytes"), "{forward}");
        assert_eq!(peer.call(&Call::ResetStatistics, &[]).0, Answer::Done);
        assert_eq!(peer.status()["forward"]["sent"], 0);
    }
}

#[test]
fn a_lost_data_server_is_an_error_in_time_and_comes_back() {
    for split in [false, true] {
        let mut cluster = Cluster::start(4, |config| config.cluster.request_timeout_ms = 2500);
        let io = cluster.start_io(|io| io.split = split);
        let mut peer = Peer::connect(io.address(), Role::Io, 1);
        let bytes = pattern(1, 50_000);
        assert_eq!(peer.call(&write(1, 1, 0), &bytes).0, Answer::Written(50_000));
        cluster.stop_data(2);
        // The answer must come within the patience of the peer.
        let (errno, message) = fault(peer.call(&read(1, 1, 0, 50_000), &[]).0);
        assert_eq!(errno, libc::EIO, "{message}");
        assert!(message.contains("data.2"), "{message}");
        // What lies on the others is not affected.
        assert!(data(peer.call(&read(1, 1, 0, 4096), &[])) == bytes[..4096]);
        let (errno, _) = fault(peer.call(&write(1, 1, 4096), &bytes[..4096]).0);
        assert_eq!(errno, libc::EIO);
        cluster.start_data(2);
        let mut healed = peer.call(&read(1, 1, 0, 50_000), &[]);
        // The first request after the loss may still be told of it; the client repeats that.
        if matches!(&healed.0, Answer::Fault(fault) if fault.errno == Fault::PATH_LOST) {
            healed = peer.call(&read(1, 1, 0, 50_000), &[]);
        }
        assert!(data(healed) == bytes, "split {split}");
        assert_eq!(peer.call(&write(1, 1, 4096), &bytes[4096..8192]).0, Answer::Written(4096));
    }
}

#[test]
fn a_request_under_way_to_a_server_that_dies_is_answered() {
    let mut cluster = cluster(1500);
    let io = cluster.start_io(|_| {});
    let mut peers: Vec<Peer> = (0..4).map(|n| Peer::connect(io.address(), Role::Io, n)).collect();
    for (client, peer) in peers.iter_mut().enumerate() {
        for n in 0..50 {
            peer.send(&write(client as u64, 1, (n * 4 + client as u64) * 5000), &[1; 5000]);
        }
    }
    cluster.stop_data(1);
    // Sixteen at a time, each answer within the patience of the peer.
    for peer in &mut peers {
        for _ in 0..50 {
            match peer.answer().unwrap().1 {
                Answer::Written(5000) => {}
                Answer::Fault(fault) => {
                    assert!(
                        [libc::EIO, Fault::PATH_LOST, libc::ESHUTDOWN, libc::EBUSY].contains(&fault.errno),
                        "{fault}"
                    );
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn older_epochs_and_foreign_layouts_are_refused() {
    let mut cluster = cluster(5_000);
    let io = cluster.start_io(|_| {});
    let mut peer = Peer::connect(io.address(), Role::Io, 1);
    let of = |epoch| Call::FileWrite { who: Who { epoch, ..who(1) }, file: FileKey(1), layout: LAYOUT, offset: 0 };
    assert_eq!(peer.call(&of(2), b"new").0, Answer::Written(3));
    assert_eq!(fault(peer.call(&of(1), b"old").0).0, Fault::FENCED);
    assert_eq!(data(peer.call(&read(9, 1, 0, 10), &[])), b"new");
    // The data servers learn the epoch too: another I/O node cannot bring the old write.
    let other = cluster.start_io(|_| {});
    let mut late = Peer::connect(other.address(), Role::Io, 1);
    assert_eq!(fault(late.call(&of(1), b"old").0).0, Fault::FENCED);
    let foreign = |layout| Call::FileRead { who: who(3), file: FileKey(1), layout, made: 0, offset: 0, len: 10 };
    let (errno, message) = fault(peer.call(&foreign(Layout { servers: 9, ..LAYOUT }), &[]).0);
    assert_eq!(errno, libc::EINVAL);
    assert!(message.contains('9') && message.contains('4'), "{message}");
    for damaged in
        [Layout { pcount: 0, ..LAYOUT }, Layout { ssize_bytes: 0, ..LAYOUT }, Layout { servers: 0, ..LAYOUT }]
    {
        assert_eq!(fault(peer.call(&foreign(damaged), &[]).0).0, libc::EINVAL);
        assert_eq!(fault(peer.call(&Call::FileStat { file: FileKey(1), layout: damaged }, &[]).0).0, libc::EINVAL);
    }
    let direct = Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 1 };
    assert_eq!(fault(peer.call(&direct, &[]).0).0, libc::EOPNOTSUPP);
    assert_eq!(data(peer.call(&read(9, 1, 0, 10), &[])), b"new", "the connection lives on");
}

#[test]
fn two_layouts_for_one_file_do_not_mix() {
    let mut cluster = cluster(5_000);
    let io = cluster.start_io(|io| io.in_flight_requests = 1);
    let (a, b) = (LAYOUT, Layout { base: 0, pcount: 4, ssize_bytes: 512, servers: 4, skipped: Skipped::NONE });
    let mut peer = Peer::connect(io.address(), Role::Io, 1);
    for n in 0..40u64 {
        let layout = if n % 3 == 0 { b } else { a };
        let call =
            Call::FileWrite { who: who(1), file: FileKey(if n % 3 == 0 { 2 } else { 1 }), layout, offset: n * 700 };
        peer.send(&call, &pattern(n, 700));
    }
    for _ in 0..40 {
        assert_eq!(peer.answer().unwrap().1, Answer::Written(700));
    }
    for n in 0..40u64 {
        let layout = if n % 3 == 0 { b } else { a };
        let file = FileKey(if n % 3 == 0 { 2 } else { 1 });
        let call = Call::FileRead { who: who(1), file, layout, made: 0, offset: n * 700, len: 700 };
        assert!(data(peer.call(&call, &[])) == pattern(n, 700));
    }
}

#[test]
fn metadata_passes_with_a_session_of_its_own_per_client() {
    let mut cluster = cluster(2_000);
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let io = cluster.start_io(|_| {});
    let mut peer = Peer::connect(io.address(), Role::Io, 1);
    let create = |path: &str| {
        let path = path.as_bytes().to_vec();
        let call = MetaCall::Create { path, mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
        Call::Meta { who: Who::default(), call }
    };
    let Answer::Opened(opened) = peer.call(&create("a"), &[]).0 else { panic!("not opened") };
    let bytes = pattern(5, 300_000);
    let call = Call::FileWrite { who: who(1), file: opened.file, layout: opened.layout, offset: 0 };
    assert_eq!(peer.call(&call, &bytes).0, Answer::Written(300_000));
    // The size comes from the data servers while it is open, and stays when its client is gone.
    let size = |peer: &mut Peer| match peer
        .call(&Call::Meta { who: Who::default(), call: MetaCall::GetAttr { target: Target::Path(b"a".to_vec()) } }, &[])
        .0
    {
        Answer::Attr(attr) => attr.size,
        other => panic!("{other:?}"),
    };
    assert_eq!(size(&mut peer), 300_000);
    let mut direct = Peer::connect(meta.address(), Role::Meta, 7);
    assert_eq!(direct.status()["meta"]["opens_write"], 1);
    drop(peer);
    until("the client's opens are closed", || direct.status()["meta"]["opens_write"] == 0);
    let mut peer = Peer::connect(io.address(), Role::Io, 2);
    assert_eq!(size(&mut peer), 300_000);
    let (errno, _) = fault(peer.call(&create("a"), &[]).0);
    assert_eq!(errno, libc::EEXIST);

    // The metadata server is lost: its clients' connections end, as they would without an I/O node; then calls
    // fail in time, while data pass; then all is well again.
    drop(direct);
    drop(meta);
    until("the connection is ended", || {
        peer.next_id += 1;
        let id = peer.next_id;
        let call = MetaCall::GetAttr { target: Target::Path(Vec::new()) };
        let call = Call::Meta { who: Who::default(), call };
        let frame = support::encode(impresario_wire::Kind::Call, id, &call, 0);
        peer.pipe.write_all(&frame).is_err() || peer.answer().is_err()
    });
    let mut peer = Peer::connect(io.address(), Role::Io, 2);
    peer.send(&Call::Meta { who: Who::default(), call: MetaCall::Statfs }, &[]);
    let call =
        Call::FileRead { who: who(2), file: opened.file, layout: opened.layout, made: 0, offset: 0, len: 300_000 };
    peer.send(&call, &[]);
    let (_, answer, payload) = peer.answer().unwrap();
    assert!(data((answer, payload)) == bytes, "data overtake the metadata call that waits");
    let (errno, message) = fault(peer.answer().unwrap().1);
    assert_eq!(errno, libc::EIO);
    assert!(message.contains("metadata server") && message.contains(&cluster.config.meta.address), "{message}");
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    assert_eq!(size(&mut peer), 300_000);
}

#[test]
fn live_changes_lose_nothing() {
    let mut cluster = cluster(10_000);
    let io = cluster.start_io(|io| io.in_flight_requests = 2);
    std::thread::scope(|scope| {
        for client in 0..4u64 {
            let mut peer = Peer::connect(io.address(), Role::Io, client);
            scope.spawn(move || {
                for round in 0..40u64 {
                    for n in 0..8 {
                        peer.send(&write(client, 1, (n * 4 + client) * 3000), &pattern(round + n, 3000));
                    }
                    for _ in 0..8 {
                        assert_eq!(peer.answer().unwrap().1, Answer::Written(3000));
                    }
                    let n = round % 8;
                    let got = data(peer.call(&read(client, 1, (n * 4 + client) * 3000, 3000), &[]));
                    assert!(got == pattern(round + n, 3000));
                }
            });
        }
        let mut admin = Peer::connect(io.address(), Role::Any, 9);
        for policy in ["twins", "hbrr", "none", "mlf", "fifo"].into_iter().cycle().take(30) {
            let call = Call::SetPolicy { name: policy.into(), params: Vec::new(), at_shared_ns: 0 };
            assert_eq!(admin.call(&call, &[]).0, Answer::Done);
            std::thread::sleep(Duration::from_millis(15));
        }
        let (_, refused) =
            fault(admin.call(&Call::SetPolicy { name: "x".into(), params: Vec::new(), at_shared_ns: 0 }, &[]).0);
        assert!(refused.contains('x'), "{refused}");
    });
}

#[test]
fn two_nodes_in_front_of_the_same_servers_agree() {
    let mut cluster = cluster(5_000);
    let nodes = [cluster.start_io(|_| {}), cluster.start_io(|io| io.split = true)];
    let bytes = pattern(1, 200_000);
    let mut first = Peer::connect(nodes[0].address(), Role::Io, 1);
    let mut second = Peer::connect(nodes[1].address(), Role::Io, 2);
    assert_eq!(first.call(&write(1, 1, 0), &bytes).0, Answer::Written(200_000));
    assert!(data(second.call(&read(2, 1, 0, 200_000), &[])) == bytes);
    assert_eq!(second.call(&write(2, 1, 77_777), b"other").0, Answer::Written(5));
    assert_eq!(data(first.call(&read(1, 1, 77_777, 5), &[])), b"other");
}

/// What waits for one data server goes as a list, touching or not; what lies on several servers goes alone, and everybody gets
/// what is theirs, also where the list meets the end of an object.
#[test]
fn what_waits_for_one_server_goes_as_a_list() {
    const LEN: usize = 1000;
    let layout = Layout { ssize_bytes: 65_536, ..LAYOUT };
    let server = usize::from(LAYOUT.base);
    // On the first data server of the file, in two of its strips; the last one reaches over to the next server.
    let offsets = [50_000, 0, 3000, 8000, 9000, 196_608, 200_000, 65_536 - 10];
    let write = |client, offset| Call::FileWrite { who: who(client), file: FileKey(1), layout, offset };
    let read = |client, offset, len| {
        let (who, file) = (who(client), FileKey(1));
        Call::FileRead { who, file, layout, made: 0, offset, len }
    };
    for (split, policy) in [(false, "fifo"), (true, "fifo"), (false, "twins"), (true, "mlf")] {
        let case = format!("split {split}, {policy}");
        let mut cluster = cluster(10_000);
        let io = cluster.start_io(|io| {
            (io.split, io.merge, io.in_flight_requests) = (split, Merge::List, 1);
            io.policy = PolicySpec::named(policy);
        });
        let mut peers: Vec<Peer> =
            (1..=offsets.len() as u64).map(|client| Peer::connect(io.address(), Role::Io, client)).collect();
        let mut busy = Peer::connect(io.address(), Role::Io, 99);
        let (mut lists, mut content) = (0, vec![0; 300_000]);
        for round in 0..200u64 {
            for writes in [true, false] {
                assert_eq!(busy.call(&Call::ResetStatistics, &[]).0, Answer::Done);
                // Behind the others' requests all wait together.
                (0..20).for_each(|i| {
                    _ = busy.send(
                        &Call::FileWrite { who: who(99), file: FileKey(2), layout: LAYOUT, offset: i * 8192 },
                        &[1; 4096],
                    )
                });
                for (n, (peer, offset)) in peers.iter_mut().zip(offsets).enumerate() {
                    let bytes = pattern(round * 100 + n as u64, LEN);
                    let at = offset as usize;
                    match writes {
                        true => _ = peer.send(&write(n as u64 + 1, offset), &bytes),
                        false => _ = peer.send(&read(n as u64 + 1, offset, LEN as u32), &[]),
                    }
                    if writes {
                        content[at..at + LEN].copy_from_slice(&bytes);
                    }
                }
                for (peer, offset) in peers.iter_mut().zip(offsets) {
                    let (_, answer, bytes) = peer.answer().unwrap();
                    match writes {
                        true => assert_eq!(answer, Answer::Written(LEN as u32), "{case}"),
                        false => {
                            let at = offset as usize;
                            assert!(answer == Answer::Data && bytes == content[at..at + LEN], "{case}: {offset}");
                        }
                    }
                }
                (0..20).for_each(|_| assert_eq!(busy.answer().unwrap().1, Answer::Written(4096)));
                let forward = busy.status()["forward"].clone();
                let count = |what: &str| forward[what].as_u64().unwrap();
                assert!(count("list_ranges") >= 2 * count("lists"), "{case}: {forward}");
                // A list of writes, then one of reads.
                if lists == u64::from(!writes) && count("lists") > 0 {
                    assert!(count("forwarded") < count("requests"), "{case}: {forward}");
                    lists += 1;
                }
            }
            if lists == 2 {
                break;
            }
        }
        assert_eq!(lists, 2, "{case}: no lists were sent");
        // On the servers is what was written, and nothing else.
        for (n, k) in (0..layout.pcount).map(|k| (usize::from(layout.server_at(k)), k)) {
            let lane = layout.lane_len(k, 201_000);
            let object = cluster.peer(n, 99).read(99, 1, 0, lane as u32);
            for (at, byte) in (0..).zip(&object) {
                assert_eq!(*byte, content[layout.file_offset(k, at) as usize], "{case}: byte {at} of server {n}");
            }
        }
        // The object of the server ends in one of them, and before another.
        let mut short = false;
        for _ in 0..200 {
            (0..20).for_each(|i| {
                _ = busy.send(
                    &Call::FileWrite { who: who(99), file: FileKey(2), layout: LAYOUT, offset: i * 8192 },
                    &[1; 4096],
                )
            });
            let ends = [(0, LEN), (200_500, 500), (250_000, 0)];
            for (peer, (offset, _)) in peers.iter_mut().zip(ends) {
                peer.send(&read(1, offset, LEN as u32), &[]);
            }
            for (peer, (offset, len)) in peers.iter_mut().zip(ends) {
                let (_, answer, bytes) = peer.answer().unwrap();
                let at = offset as usize;
                assert!(answer == Answer::Data && bytes == content[at..at + len], "{case}: {offset}");
            }
            (0..20).for_each(|_| assert_eq!(busy.answer().unwrap().1, Answer::Written(4096)));
            let lists = busy.status()["forward"]["lists"].as_u64().unwrap();
            busy.call(&Call::ResetStatistics, &[]);
            short |= lists > 0;
            if short {
                break;
            }
        }
        assert!(short, "{case}: no list met the end");
        assert!(cluster.peer(server, 99).status()["engine"]["statistics"]["failed"] == 0, "{case}");
    }
}

/// A request that waits at an I/O node, of a client that has begun a newer epoch elsewhere meanwhile, is merged with a
/// neighbour's, or goes in a list with it: it must not be done for all that, and the neighbour's must.
#[test]
fn a_stale_request_is_refused_though_it_is_merged_with_a_neighbours() {
    let orders = [(true, true), (true, false), (false, true), (false, false)];
    let cases = [true, false].into_iter().flat_map(|writes| orders.map(|order| (Merge::Contiguous, writes, order)));
    let lists = [(true, orders[0]), (true, orders[3]), (false, orders[1])];
    for (merge, writes, (split, stale_first)) in cases.chain(lists.map(|(writes, order)| (Merge::List, writes, order)))
    {
        let mut cluster = cluster(10_000);
        let io = cluster.start_io(|io| {
            (io.split, io.merge) = (split, merge);
            io.in_flight_requests = 1;
        });
        let case = format!("{merge:?}, writes {writes}, split {split}, stale first {stale_first}");
        let server = usize::from(LAYOUT.base);
        let (mut stale, mut fresh) =
            (Peer::connect(io.address(), Role::Io, 1), Peer::connect(io.address(), Role::Io, 2));
        let other = if merge == Merge::List { 2500 } else { 1000 };
        let (at_stale, at_fresh) = if stale_first { (0, other) } else { (other, 0) };
        assert_eq!(cluster.peer(server, 9).write(9, 1, at_fresh, &[2; 1000]), Answer::Written(1000));
        // The client of the stale request has written the same bytes since, by another way and in a newer epoch.
        let newer = Who { epoch: 5, ..who(1) };
        let call = Call::Write { who: newer, file: FileKey(1), lane_offset: at_stale };
        assert_eq!(cluster.peer(server, 1).call(&call, &[7; 1000]).0, Answer::Written(1000));
        let mut merged = false;
        for _ in 0..200 {
            // Behind the others' requests the two wait together.
            let mut busy = Peer::connect(io.address(), Role::Io, 3);
            for i in 0..20 {
                busy.send(&write(3, 2 + i, i * 8192), &[1; 4096]);
            }
            if writes {
                fresh.send(&write(2, 1, at_fresh), &[2; 1000]);
                stale.send(&write(1, 1, at_stale), &[1; 1000]);
                assert_eq!(fresh.answer().unwrap().1, Answer::Written(1000), "{case}");
            } else {
                fresh.send(&read(2, 1, at_fresh, 1000), &[]);
                stale.send(&read(1, 1, at_stale, 1000), &[]);
                let (_, answer, bytes) = fresh.answer().unwrap();
                assert!(answer == Answer::Data && bytes == [2; 1000], "{case}: {answer:?}");
            }
            match stale.answer().unwrap() {
                // Merged reads travel under the name of the first. Whoever gave this one up, it changes nothing.
                (_, Answer::Data, bytes) => assert!(!writes && !stale_first && bytes == [7; 1000], "{case}"),
                (_, answer, _) => assert_eq!(fault(answer).0, Fault::FENCED, "{case}"),
            }
            (0..20).for_each(|_| assert_eq!(busy.answer().unwrap().1, Answer::Written(4096)));
            // Merged and refused, they are sent again one by one; merged and not refused, they were sent as one.
            let more = more_sent(&mut busy);
            merged |= if writes || stale_first { more > 0.0 } else { more < 0.0 };
            if merged {
                break;
            }
        }
        assert!(merged, "{case}: the two were never merged");
        let mut reader = cluster.peer(server, 9);
        assert_eq!(reader.read(9, 1, at_stale, 1000), [7; 1000], "{case}");
        assert_eq!(reader.read(9, 1, at_fresh, 1000), [2; 1000]);
    }
}

#[test]
fn a_merged_write_is_refused_when_any_of_its_clients_has_left_its_epoch() {
    let cluster = cluster(10_000);
    let mut peer = cluster.peer(0, 1);
    let merged = |others: Vec<(u64, u32)>| {
        let others = others.into_iter().map(|(client, epoch)| sender(client, epoch)).collect();
        Call::WriteMerged { who: who(1), others, file: FileKey(1), lane_offset: 0 }
    };
    assert_eq!(peer.call(&merged(vec![(2, 1), (3, 4)]), b"first").0, Answer::Written(5));
    assert_eq!(fault(peer.call(&merged(vec![(2, 1), (3, 3)]), b"other").0).0, Fault::FENCED);
    assert_eq!(peer.read(9, 1, 0, 5), b"first");
    assert_eq!(peer.call(&merged(vec![(2, 2), (3, 4)]), b"again").0, Answer::Written(5));
    assert_eq!(fault(peer.call(&merged(vec![(2, 1)]), b"other").0).0, Fault::FENCED);
    assert_eq!(peer.read(9, 1, 0, 5), b"again");
    // So is a list, of which nothing is written then; nor is one whose extents are not those of its bytes.
    let list = |others: &[(u64, u32)], extents: &[(u64, u32)]| {
        let others = others.iter().map(|(client, epoch)| sender(*client, *epoch)).collect();
        Call::WriteList { who: who(1), others, file: FileKey(1), extents: Extents::of(extents) }
    };
    let extents = [(10, 2), (0, 1), (20, 2)];
    assert_eq!(peer.call(&list(&[(2, 2), (3, 4)], &extents), b"12345").0, Answer::Written(5));
    assert_eq!(fault(peer.call(&list(&[(3, 3)], &extents), b"abcde").0).0, Fault::FENCED);
    for wrong in [&extents[..2], &[(0, 0)], &[(0, 4), (u64::MAX, 1)], &[(0, 6)]] {
        assert_eq!(fault(peer.call(&list(&[], wrong), b"abcde").0).0, libc::EINVAL, "{wrong:?}");
    }
    assert_eq!(peer.read(9, 1, 0, 30), [&b"3gain"[..], &[0; 5], b"12", &[0; 8], b"45"].concat());
}

/// Data servers schedule, count and charge by the name that a request goes under: neighbours of another job or another user are not
/// merged with it, whether they met behind the policy or in one of its batches.
#[test]
fn neighbours_are_merged_within_a_job_and_a_user_and_each_is_charged_for_its_own() {
    const LEN: u64 = 64 << 10;
    const ROUNDS: u64 = 30;
    let layout = Layout { base: 1, pcount: 1, ssize_bytes: 1 << 20, ..LAYOUT };
    let server = usize::from(layout.base);
    let others = [(2, 0), (1, 7), (1, 0)];
    for (split, policy, (job, user)) in [(false, "fifo"), (true, "mlf")]
        .into_iter()
        .flat_map(|(split, policy)| others.map(|other| (split, policy, other)))
    {
        let mut cluster = cluster(10_000);
        let io = cluster.start_io(|io| {
            io.split = split;
            io.policy = PolicySpec::named(policy);
            io.in_flight_requests = 1;
        });
        let case = format!("split {split}, {policy}, the other is user {user} of job {job}");
        let bytes = pattern(1, 8 * LEN as usize);
        assert_eq!(cluster.peer(server, 9).write(9, 1, 0, &bytes), Answer::Written(8 * LEN as u32));
        let mut peers = [1, 2].map(|client| Peer::connect(io.address(), Role::Io, client));
        let whos = [who(1), Who { job, user, ..who(2) }];
        let mut busy = Peer::connect(io.address(), Role::Io, 3);
        more_sent(&mut busy);
        for _ in 0..ROUNDS {
            // Behind the others' requests all wait together.
            (0..20).for_each(|i| _ = busy.send(&write(3, 2, i * 8192), &[1; 4096]));
            for offset in (0..8).map(|n| n * LEN) {
                let nth = (offset / LEN % 2) as usize;
                let (who, file, len) = (whos[nth], FileKey(1), LEN as u32);
                peers[nth].send(&Call::FileRead { who, file, layout, made: 0, offset, len }, &[]);
            }
            for peer in &mut peers {
                (0..4).for_each(|_| assert!(peer.answer().unwrap().1 == Answer::Data, "{case}"));
            }
            (0..20).for_each(|_| assert_eq!(busy.answer().unwrap().1, Answer::Written(4096)));
        }
        let is_one = (job, user) == (1, 0);
        let more = more_sent(&mut busy);
        assert!(if is_one { more < 0.0 } else { more == 0.0 }, "{case}: {more} more were sent");
        let loads = cluster.peer(server, 9).status()["loads"].clone();
        let read = |parties: &str, key: u64| {
            let (all, key) = (loads[parties].as_array().unwrap(), key.to_string());
            all.iter().find(|party| party["key"] == *key).map_or(0, |party| party["read_bytes"].as_u64().unwrap())
        };
        let half = ROUNDS * 4 * LEN;
        let expected = |theirs: u64, first: u64| if theirs == first { (2 * half, 2 * half) } else { (half, half) };
        assert_eq!((read("jobs", 1), read("jobs", job)), expected(job, 1), "{case}: {loads}");
        assert_eq!((read("users", 0), read("users", user.into())), expected(user.into(), 0), "{case}: {loads}");
    }
}

/// A block that its device has damaged fails the requests that need it, and not those that were merged with them.
#[test]
fn damage_fails_no_request_that_was_merged_with_one_that_meets_it() {
    const BLOCK: u64 = 4096;
    let layout = Layout { ssize_bytes: 65_536, ..LAYOUT };
    let read = |client, offset| {
        let (who, file, len) = (who(client), FileKey(1), BLOCK as u32);
        Call::FileRead { who, file, layout, made: 0, offset, len }
    };
    let both = [true, false];
    for (merge, split) in
        [Merge::Contiguous, Merge::List].into_iter().flat_map(|merge| both.map(|split| (merge, split)))
    {
        let mut cluster = Cluster::start(4, |config| config.data.iter_mut().for_each(|data| data.checksums = true));
        let io = cluster.start_io(|io| {
            (io.split, io.merge) = (split, merge);
            io.in_flight_requests = 1;
        });
        let server = usize::from(LAYOUT.base);
        let healthy = if merge == Merge::List { 2 } else { 1 };
        let bytes = pattern(1, 3 * BLOCK as usize);
        let mut direct = cluster.peer(server, 9);
        assert_eq!(direct.write(9, 1, 0, &bytes), Answer::Written(3 * BLOCK as u32));
        assert_eq!(direct.call(&Call::Sync { who: who(9), file: FileKey(1) }, &[]).0, Answer::Done);
        let object = cluster.config.data[server].dir.join("objects/01/0000000000000001");
        let damaged = [&[bytes[0] ^ 1], &bytes[1..]].concat();
        std::fs::write(object, damaged).unwrap();
        let (mut unlucky, mut other) =
            (Peer::connect(io.address(), Role::Io, 1), Peer::connect(io.address(), Role::Io, 2));
        let mut merged = 0.0;
        for _ in 0..200 {
            // Behind the others' requests the two wait together.
            let mut busy = Peer::connect(io.address(), Role::Io, 3);
            (0..20).for_each(|i| _ = busy.send(&write(3, 2 + i, i * 8192), &[1; 4096]));
            other.send(&read(2, healthy * BLOCK), &[]);
            unlucky.send(&read(1, 0), &[]);
            let (_, answer, got) = other.answer().unwrap();
            let wanted = &bytes[(healthy * BLOCK) as usize..][..BLOCK as usize];
            assert!(answer == Answer::Data && got == wanted, "{merge:?}, split {split}: {answer:?}");
            assert_eq!(fault(unlucky.answer().unwrap().1).0, libc::EIO);
            (0..20).for_each(|_| assert_eq!(busy.answer().unwrap().1, Answer::Written(4096)));
            // Merged and refused, they are sent again one by one.
            merged += more_sent(&mut busy);
            if merged > 0.0 {
                break;
            }
        }
        assert!(merged > 0.0, "{merge:?}, split {split}: the two were never merged");
    }
}

/// Where the disk is full, a write that needs no more space is done though it was merged with one that does.
#[test]
fn a_full_disk_fails_no_request_that_was_merged_with_one_that_needs_space() {
    const BLOCK: usize = 4096;
    let layout = Layout { ssize_bytes: 65_536, ..LAYOUT };
    let write = |client, offset| Call::FileWrite { who: who(client), file: FileKey(1), layout, offset };
    let server = usize::from(LAYOUT.base);
    for split in [true, false] {
        let Some(small) = SmallDisk::mount(c"size=2m") else { return };
        let mut cluster = Cluster::start(4, |config| config.data[server].dir = small.at("objects"));
        let io = cluster.start_io(|io| {
            io.split = split;
            io.in_flight_requests = 1;
        });
        let mut direct = cluster.peer(server, 9);
        assert_eq!(direct.write(9, 1, 0, &[1; BLOCK]), Answer::Written(BLOCK as u32));
        let mut busy = Peer::connect(io.address(), Role::Io, 3);
        let busy_write = |i: u64| Call::FileWrite { who: who(3), file: FileKey(2), layout, offset: i * 8192 };
        for i in 0..20 {
            assert_eq!(busy.call(&busy_write(i), &[1; BLOCK]).0, Answer::Written(BLOCK as u32));
        }
        for len in [64 << 10, BLOCK] {
            let mut full = (0..).map(|n| direct.write(9, 3 + len as u64, n * len as u64, &vec![3; len]));
            full.find(|answer| matches!(answer, Answer::Fault(fault) if fault.errno == libc::ENOSPC)).unwrap();
        }
        let (mut longer, mut over) =
            (Peer::connect(io.address(), Role::Io, 1), Peer::connect(io.address(), Role::Io, 2));
        let mut merged = 0.0;
        for round in 0..200_u8 {
            // Behind the others' requests the two wait together.
            (0..20).for_each(|i| _ = busy.send(&busy_write(i), &[1; BLOCK]));
            over.send(&write(2, 0), &[round; BLOCK]);
            longer.send(&write(1, BLOCK as u64), &[9; BLOCK]);
            assert_eq!(over.answer().unwrap().1, Answer::Written(BLOCK as u32), "split {split}");
            assert_eq!(fault(longer.answer().unwrap().1).0, libc::ENOSPC);
            (0..20).for_each(|_| assert_eq!(busy.answer().unwrap().1, Answer::Written(BLOCK as u32)));
            assert_eq!(direct.read(9, 1, 0, 2 * BLOCK as u32), [round; BLOCK]);
            // Merged and refused, they are sent again one by one.
            merged += more_sent(&mut busy);
            if merged > 0.0 {
                break;
            }
        }
        assert!(merged > 0.0, "the two were never merged");
    }
}

/// A long read of one data server is passed on while the rest of it comes; with holes, and what is behind the end.
#[test]
fn long_reads_are_passed_on_in_parts() {
    const PART: usize = 256 << 10;
    const LONE: Layout = Layout { base: 2, pcount: 1, ssize_bytes: 65_536, servers: 4, skipped: Skipped::NONE };
    let write = |file, offset| Call::FileWrite { who: who(1), file: FileKey(file), layout: LONE, offset };
    let read = |file, offset, len: usize| {
        let (file, len) = (FileKey(file), len as u32);
        Call::FileRead { who: who(1), file, layout: LONE, made: 0, offset, len }
    };
    for split in [false, true] {
        let mut cluster = cluster(10_000);
        let io = cluster.start_io(|io| io.split = split);
        let mut peer = Peer::connect(io.address(), Role::Io, 1);
        let bytes = pattern(1, 1 << 20);
        assert_eq!(peer.call(&write(1, 0), &bytes).0, Answer::Written(1 << 20));
        for (offset, len) in [(0, 1 << 20), (5, 3 * PART), (PART, PART), (PART, PART + 1), (1 << 19, 1 << 20)] {
            peer.pieces.clear();
            let end = bytes.len().min(offset + len);
            assert!(data(peer.call(&read(1, offset as u64, len), &[])) == bytes[offset..end], "{split} {offset} {len}");
            let pieces = peer.pieces.iter().filter(|(.., len)| *len > 0);
            assert!(len <= PART || pieces.clone().count() > 1, "{split} {offset} {len}: {:?}", peer.pieces);
            assert!(pieces.clone().all(|(.., len)| *len <= PART), "{split} {offset} {len}: {:?}", peer.pieces);
        }
        assert!(data(peer.call(&read(1, 1 << 20, 1 << 20), &[])).is_empty());
        assert_eq!(peer.call(&write(2, 900_000), b"far").0, Answer::Written(3));
        let holes = data(peer.call(&read(2, 10, 1 << 20), &[]));
        assert!(holes.len() == 899_993 && holes[..899_990].iter().all(|b| *b == 0) && &holes[899_990..] == b"far");
        until("all memory is given back", || peer.status()["memory"]["payload_bytes"] == 0);
    }
}

/// A connection to a data server that ends in the middle of an answer: the rest is asked for again, and only that.
#[test]
fn what_was_passed_on_of_a_read_is_not_asked_for_again() {
    use impresario_client::testing::{FakeGreeting, FakeServer, Flow, Serve};
    const PART: usize = 256 << 10;
    const LEN: usize = 4 * PART - 1000;
    const LONE: Layout = Layout { base: 0, pcount: 1, ssize_bytes: 65_536, servers: 1, skipped: Skipped::NONE };
    let bytes = std::sync::Arc::new(pattern(3, LEN));
    for (split, fails) in [(false, false), (true, false), (true, true)] {
        let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let (held, log) = (bytes.clone(), asked.clone());
        let serve = move || {
            let (held, log) = (held.clone(), log.clone());
            let serve: Serve = Box::new(move |connection, call| {
                let Call::Read { lane_offset, len, .. } = call.call else { return Flow::Continue };
                let from = lane_offset as usize;
                let times = {
                    let mut log = log.lock().unwrap();
                    log.push((from, len as usize));
                    log.len()
                };
                let piece = |at: usize, len: usize| {
                    connection.answer(call.id, &Answer::Piece { at: at as u32, missing: 0 }, &held[from + at..][..len]);
                };
                match times {
                    1 => {
                        piece(0, PART);
                        piece(PART, PART + 10);
                        Flow::Close
                    }
                    _ if fails => {
                        let fault = Fault { errno: libc::EIO, message: "a bad sector".into() };
                        connection.answer(call.id, &Answer::Fault(fault), &[]);
                        Flow::Continue
                    }
                    _ => {
                        connection.answer(call.id, &Answer::Data, &held[from..][..len as usize]);
                        Flow::Continue
                    }
                }
            });
            serve
        };
        let mut cluster = Cluster::start(0, |_| {});
        let server = FakeServer::start(FakeGreeting::of("data.0"), serve).unwrap();
        let folder = cluster.dir.path().join("d0");
        cluster.config.data.push(impresario_config::Data::new("data.0", server.address(), folder));
        let io = cluster.start_io(|io| io.split = split);
        let mut peer = Peer::connect(io.address(), Role::Io, 1);
        let read = |len: usize| Call::FileRead {
            who: who(1),
            file: FileKey(1),
            layout: LONE,
            made: 0,
            offset: 0,
            len: len as u32,
        };
        // The first finds no connection and is read by a thread that waits for one.
        let mut tries = 0;
        let (answer, got) = loop {
            peer.pieces.clear();
            asked.lock().unwrap().clear();
            let answered = peer.call(&read(LEN), &[]);
            tries += 1;
            if !peer.pieces.is_empty() || tries == 10 {
                break answered;
            }
        };
        assert_eq!(*asked.lock().unwrap(), [(0, LEN), (2 * PART, LEN - 2 * PART)], "{split} {fails}");
        match fails {
            true => assert!(fault(answer).1.contains("a bad sector")),
            false => assert!(answer == Answer::Data && got == *bytes),
        }
        until("all memory is given back", || peer.status()["memory"]["payload_bytes"] == 0);
    }
}
