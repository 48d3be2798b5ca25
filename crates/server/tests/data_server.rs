//! The data server over real sockets: contents, order, limits, faults, live changes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{self, Cluster, Peer, change, encode, fault, pattern, sync, who};
use impresario_sched::PolicySpec;
use impresario_sched::policy::POLICIES;
use impresario_testing::until;
use impresario_wire::{Answer, Call, Fault, FileKey, Kind, Role, SeekTo, Sought, SpaceChange, Who};

fn stat(peer: &mut Peer, file: u64) -> impresario_wire::ObjectInfo {
    match peer.call(&Call::ObjectStat { file: FileKey(file) }, &[]).0 {
        Answer::Object(info) => info,
        other => panic!("{other:?}"),
    }
}

fn set_policy(name: &str) -> Call {
    Call::SetPolicy { name: name.into(), params: Vec::new(), at_shared_ns: 0 }
}

#[test]
fn calls_that_come_together_are_answered_and_none_waits_for_one_that_is_not_there() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let bytes = pattern(1, 64 << 10);
    assert_eq!(peer.write(1, 1, 0, &bytes), Answer::Written(64 << 10));
    let read = |n: u64| Call::Read { who: who(1), file: FileKey(1), lane_offset: n % 16 * 4096, len: 4096 };
    let call = |id: u64, call: &Call, payload: usize| encode(Kind::Call, id, call, payload);
    let check = |peer: &mut Peer, id: u64| {
        let (answered, answer, payload) = peer.answer().expect("an answer");
        assert_eq!((answered, answer), (id, Answer::Data));
        assert!(payload == bytes[(id % 16 * 4096) as usize..][..4096], "{id}");
    };
    // More than are held back at a time, answered in order.
    let many: Vec<u8> = (1000..1100).flat_map(|id| call(id, &read(id), 0)).collect();
    peer.pipe.write_all(&many).unwrap();
    (1000..1100).for_each(|id| check(&mut peer, id));

    // With each of these another call begins that does not come yet: a part of its header, of its body, and all but its payload.
    let (whole, written) = (call(2001, &read(2001), 0), [9; 100]);
    let write = call(2001, &Call::Write { who: who(1), file: FileKey(2), lane_offset: 0 }, written.len());
    for (next, sent) in [(&whole, 5), (&whole, whole.len() - 1), (&write, write.len()), (&write, write.len() - 1)] {
        peer.pipe.write_all(&[call(2000, &read(2000), 0), next[..sent].to_vec()].concat()).unwrap();
        check(&mut peer, 2000);
        peer.pipe.write_all(&next[sent..]).unwrap();
        if next == &whole {
            check(&mut peer, 2001);
        } else {
            peer.pipe.write_all(&written).unwrap();
            assert_eq!(peer.answer().unwrap().1, Answer::Written(100));
        }
    }
    // What goes to the scheduler, and calls of other kinds, among them.
    let sync = Call::Sync { who: who(1), file: FileKey(1) };
    let mixed =
        [call(3000, &read(3000), 0), call(3001, &sync, 0), call(3002, &read(3002), 0), call(3003, &Call::Status, 0)];
    peer.pipe.write_all(&mixed.concat()).unwrap();
    let mut ids: Vec<u64> = (0..4).map(|_| peer.answer().unwrap().0).collect();
    ids.sort_unstable();
    assert_eq!(ids, [3000, 3001, 3002, 3003]);
    // A call that is refused takes along what waits.
    let refused = Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: u32::MAX };
    peer.pipe.write_all(&[call(4000, &read(4000), 0), call(4001, &refused, 0)].concat()).unwrap();
    check(&mut peer, 4000);
    assert_eq!(fault(peer.answer().unwrap().1).0, libc::EINVAL);
}

#[test]
fn contents_survive_the_round_trip_over_tcp_and_unix() {
    for unix in [false, true] {
        let cluster = Cluster::start(1, |config| {
            if unix {
                config.data[0].address = format!("unix:{}/socket", config.meta.dir.parent().unwrap().display());
            }
        });
        let mut peer = cluster.peer(0, 1);
        for (file, size) in [(1, 1), (2, 4096), (3, 100_003), (4, 4 << 20)] {
            let bytes = pattern(file, size);
            assert_eq!(peer.write(1, file, 0, &bytes), Answer::Written(size as u32));
            assert!(peer.read(1, file, 0, size as u32) == bytes, "{size} bytes");
            assert_eq!(stat(&mut peer, file).size, size as u64);
        }
        // Short at the end, empty behind it and where there is no object; holes are zeros.
        assert_eq!(peer.read(1, 2, 4000, 4096).len(), 96);
        assert_eq!(peer.read(1, 2, 1 << 40, 4096).len(), 0);
        assert_eq!(peer.read(1, 999, 0, 10).len(), 0);
        assert_eq!(peer.write(1, 5, 10_000, b"end"), Answer::Written(3));
        assert_eq!(peer.read(1, 5, 9_998, 100), b"\0\0end");
        assert_eq!(peer.call(&sync(5), &[]).0, Answer::Done);
        let cut = Call::Truncate { who: who(1), file: FileKey(5), len: 10_001 };
        assert_eq!(peer.call(&cut, &[]).0, Answer::Done);
        assert_eq!(peer.read(1, 5, 9_999, 100), b"\0e");
        let unlink = Call::Unlink { who: who(1), file: FileKey(5) };
        assert_eq!(peer.call(&unlink, &[]).0, Answer::Done);
        assert_eq!(peer.call(&unlink, &[]).0, Answer::Done, "removing what is not there is no error");
        assert_eq!(fault(peer.call(&Call::ObjectStat { file: FileKey(5) }, &[]).0).0, libc::EIDRM);
        let status = peer.status();
        assert_eq!(status["name"], cluster.config.data[0].name);
        assert_eq!(status["engine"]["policy"]["name"], "auto");
        assert!(status["store"]["free_bytes"].as_u64().unwrap() > 0);
    }
}

#[test]
fn many_clients_at_once_get_their_own_bytes_under_every_policy() {
    // All that one lane can have.
    for policy in POLICIES.iter().map(|p| p.name).filter(|p| *p != "twins") {
        let cluster = Cluster::start(1, |config| {
            config.data[0].policy = PolicySpec::named(policy);
            config.data[0].in_flight_requests = 1;
        });
        std::thread::scope(|scope| {
            for client in 0..8u64 {
                let mut peer = cluster.peer(0, client);
                scope.spawn(move || {
                    // One shared file, strided; eight calls under way at once.
                    let offset = |round: u64| (round * 8 + client) * 5000;
                    for start in (0..40).step_by(8) {
                        for round in start..start + 8 {
                            let call = Call::Write { who: who(client), file: FileKey(7), lane_offset: offset(round) };
                            peer.send(&call, &pattern(offset(round), 5000));
                        }
                        for _ in 0..8 {
                            assert_eq!(peer.answer().unwrap().1, Answer::Written(5000));
                        }
                    }
                    let ids: Vec<(u64, u64)> = (0..40)
                        .map(|round| {
                            let (who, file) = (who(client), FileKey(7));
                            let call = Call::Read { who, file, lane_offset: offset(round), len: 5000 };
                            (peer.send(&call, &[]), round)
                        })
                        .collect();
                    for _ in 0..40 {
                        let (id, answer, bytes) = peer.answer().unwrap();
                        let round = ids.iter().find(|(sent, _)| *sent == id).unwrap().1;
                        assert_eq!(answer, Answer::Data);
                        assert!(bytes == pattern(offset(round), 5000), "{policy}: client {client} round {round}");
                    }
                });
            }
        });
        let mut admin = cluster.peer(0, 1);
        until("all are completed", || admin.status()["engine"]["statistics"]["completed"] == 640);
        assert_eq!(admin.status()["engine"]["statistics"]["failed"], 0, "{policy}");
    }
}

#[test]
fn requests_that_overlap_keep_the_order_in_which_they_were_sent() {
    let cluster = Cluster::start(1, |config| config.data[0].in_flight_requests = 1);
    let mut peer = cluster.peer(0, 1);
    for round in 0..20u8 {
        for version in 0..10u8 {
            let call = Call::Write { who: who(1), file: FileKey(1), lane_offset: 100 };
            peer.send(&call, &[round * 10 + version; 3000]);
        }
        let read = peer.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 10_000 }, &[]);
        peer.send(&Call::Truncate { who: who(1), file: FileKey(1), len: 0 }, &[]);
        let after = peer.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 10_000 }, &[]);
        for _ in 0..13 {
            let (id, _, bytes) = peer.answer().unwrap();
            if id == read {
                assert_eq!(bytes.len(), 3100);
                assert!(bytes[100..].iter().all(|&b| b == round * 10 + 9), "round {round}");
            } else if id == after {
                assert!(bytes.is_empty(), "cut");
            }
        }
    }
}

/// Long reads leave in parts, beside the scheduler where the page cache has them: each is still of one instant.
#[test]
fn a_long_read_sees_all_of_an_overlapping_write_or_nothing_of_it() {
    const LEN: usize = 1 << 20;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cluster = Cluster::start(1, |config| {
        config.data[0].dir = folder.path().into();
        config.data[0].policy = PolicySpec::named("fifo");
    });
    let write = |peer: &mut Peer, fill: u8| {
        let call = Call::Write { who: who(1), file: FileKey(1), lane_offset: 0 };
        assert!(matches!(peer.call(&call, &vec![fill; LEN]).0, Answer::Written(_)));
    };
    write(&mut cluster.peer(0, 1), 255);
    let over = AtomicBool::new(false);
    let mut writer = cluster.peer(0, 1);
    std::thread::scope(|scope| {
        let over = &over;
        scope.spawn(move || {
            for round in 0..400u32 {
                write(&mut writer, (round % 250) as u8);
            }
            over.store(true, Ordering::SeqCst);
        });
        let mut peer = cluster.peer(0, 2);
        let mut seen = std::collections::BTreeSet::new();
        while !over.load(Ordering::SeqCst) {
            // Half of it lies behind the end.
            peer.send(&Call::Read { who: who(2), file: FileKey(1), lane_offset: 0, len: 2 * LEN as u32 }, &[]);
            let (mut done, mut fills) = (0, std::collections::BTreeSet::new());
            while done < 2 * LEN {
                let (_, answer, bytes) = peer.answer().unwrap();
                let missing = match answer {
                    Answer::Piece { missing, .. } => missing as usize,
                    answer => {
                        assert_eq!(answer, Answer::Data);
                        2 * LEN - bytes.len()
                    }
                };
                fills.extend(bytes.iter().copied());
                done += bytes.len() + missing;
            }
            assert_eq!(fills.len(), 1, "parts of several writes: {fills:?}");
            seen.extend(fills);
        }
        assert!(seen.len() > 1, "writes and reads met");
        let status = peer.status();
        let in_memory = status["store"]["in_memory"] == true;
        assert!(in_memory || status["engine"]["statistics"]["passed"].as_u64() > Some(0), "{status}");
    });
}

/// With one request on the device the others queue, and the policy may choose; under each the result is the same.
#[test]
fn changes_of_space_keep_the_order_in_which_they_were_sent() {
    let cluster = Cluster::start(1, |config| config.data[0].in_flight_requests = 1);
    let mut peer = cluster.peer(0, 1);
    for (round, policy) in POLICIES.iter().map(|policy| policy.name).enumerate() {
        let switched = peer.call(&set_policy(policy), &[]).0;
        if switched != Answer::Done {
            continue; // one that needs parameters
        }
        let fill = round as u8 + 1;
        for version in [0, fill] {
            for at in (0..200_000).step_by(10_000) {
                let write = Call::Write { who: who(1), file: FileKey(1), lane_offset: at };
                peer.send(&write, &[version.max(1); 10_000]);
            }
        }
        peer.send(&change(SpaceChange::Punch, 15_000, 100_000), &[]);
        let between = peer.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 200_000 }, &[]);
        peer.send(&Call::Write { who: who(1), file: FileKey(1), lane_offset: 50_000 }, &[fill; 10_000]);
        peer.send(&change(SpaceChange::Zero { keep_size: true }, 190_000, 50_000), &[]);
        let mut read = Vec::new();
        for _ in 0..44 {
            let (id, answer, bytes) = peer.answer().unwrap();
            assert!(!matches!(answer, Answer::Fault(_)), "{policy}: {answer:?}");
            read = if id == between { bytes } else { read };
        }
        let mut wanted = vec![fill; 200_000];
        wanted[15_000..115_000].fill(0);
        assert!(read == wanted, "{policy}");
        wanted[50_000..60_000].fill(fill);
        wanted[190_000..].fill(0);
        assert!(peer.read(1, 1, 0, 300_000) == wanted, "{policy}");
    }
}

#[test]
fn holes_are_found_and_what_is_used_is_told() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let seek = |peer: &mut Peer, from, to| match peer.call(&Call::ObjectSeek { file: FileKey(1), from, to }, &[]).0 {
        Answer::Sought(Sought { at, .. }) => at,
        other => panic!("{other:?}"),
    };
    assert_eq!((seek(&mut peer, 7, SeekTo::Data), seek(&mut peer, 7, SeekTo::Hole)), (None, Some(7)), "no object");
    assert_eq!(peer.write(1, 1, 0, &[1; 1 << 20]), Answer::Written(1 << 20));
    let full = stat(&mut peer, 1).used_bytes;
    assert_eq!(peer.call(&change(SpaceChange::Punch, 256 << 10, 512 << 10), &[]).0, Answer::Written(0));
    assert_eq!(stat(&mut peer, 1).used_bytes, full - (512 << 10));
    assert_eq!(seek(&mut peer, 5, SeekTo::Hole), Some(256 << 10));
    assert_eq!(seek(&mut peer, 300 << 10, SeekTo::Data), Some(768 << 10));
    assert_eq!(seek(&mut peer, 768 << 10, SeekTo::Hole), Some(1 << 20));
    assert_eq!(seek(&mut peer, 1 << 20, SeekTo::Data), None);
    let allocate = change(SpaceChange::Allocate { keep_size: false }, 0, 2 << 20);
    assert_eq!(peer.call(&allocate, &[]).0, Answer::Written(0));
    assert!(stat(&mut peer, 1).used_bytes >= 2 << 20 && stat(&mut peer, 1).size == 2 << 20);
    // Nothing, and more than there can be.
    assert_eq!(peer.call(&change(SpaceChange::Punch, 0, 0), &[]).0, Answer::Written(0));
    assert_eq!(fault(peer.call(&change(SpaceChange::Punch, u64::MAX - 5, 10), &[]).0).0, libc::EFBIG);
    let more = change(SpaceChange::Allocate { keep_size: true }, 0, 1 << 60);
    assert!([libc::ENOSPC, libc::EFBIG].contains(&fault(peer.call(&more, &[]).0).0));
}

#[test]
fn a_restarted_data_server_refuses_what_it_refused_before() {
    let mut cluster = Cluster::start(1, |_| {});
    let write = |epoch| Call::Write { who: Who { epoch, ..who(1) }, file: FileKey(1), lane_offset: 0 };
    assert_eq!(cluster.peer(0, 1).call(&write(2), b"newer").0, Answer::Written(5));
    cluster.stop_data(0);
    cluster.start_data(0);
    let mut peer = cluster.peer(0, 1);
    assert_eq!(fault(peer.call(&write(1), b"older").0).0, Fault::FENCED);
    assert_eq!(peer.read(2, 1, 0, 5), b"newer");
    assert_eq!(peer.call(&write(2), b"again").0, Answer::Written(5));
}

#[test]
fn older_epochs_are_fenced() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let of = |epoch| Call::Write { who: Who { epoch, ..who(1) }, file: FileKey(1), lane_offset: 0 };
    assert_eq!(peer.call(&of(1), b"one").0, Answer::Written(3));
    let mut again = cluster.peer(0, 1);
    assert_eq!(again.call(&of(2), b"two").0, Answer::Written(3));
    let (errno, message) = fault(peer.call(&of(1), b"late").0);
    assert_eq!(errno, Fault::FENCED);
    assert!(message.contains("epoch 1"), "{message}");
    assert_eq!(again.read(7, 1, 0, 10), b"two", "the late write was not applied");
    assert_eq!(fault(peer.call(&Call::Truncate { who: who(1), file: FileKey(1), len: 0 }, &[]).0).0, Fault::FENCED);
    assert_eq!(fault(peer.call(&change(SpaceChange::Punch, 0, 3), &[]).0).0, Fault::FENCED);
    assert_eq!(again.read(7, 1, 0, 10), b"two");
    assert_eq!(peer.call(&Call::Write { who: who(2), file: FileKey(1), lane_offset: 0 }, b"o").0, Answer::Written(1));
}

#[test]
fn impossible_requests_get_faults_and_the_connection_lives_on() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let beyond = Call::Read { who: who(1), file: FileKey(1), lane_offset: u64::MAX - 5, len: 10 };
    assert_eq!(fault(peer.call(&beyond, &[]).0).0, libc::EFBIG);
    let beyond = Call::Write { who: who(1), file: FileKey(1), lane_offset: i64::MAX as u64 };
    assert_eq!(fault(peer.call(&beyond, b"xy").0).0, libc::EFBIG);
    let beyond = Call::Truncate { who: who(1), file: FileKey(1), len: u64::MAX };
    assert_eq!(fault(peer.call(&beyond, &[]).0).0, libc::EFBIG);
    let meta = Call::Meta { who: impresario_wire::Who::default(), call: impresario_wire::MetaCall::Statfs };
    let (errno, message) = fault(peer.call(&meta, &[]).0);
    assert_eq!(errno, libc::EOPNOTSUPP);
    assert!(message.contains("data server"), "{message}");
    let (_, message) = fault(peer.call(&set_policy("twins"), &[]).0);
    assert!(message.contains("twins"), "{message}");
    let (_, message) = fault(peer.call(&set_policy("nonesuch"), &[]).0);
    assert!(message.contains("nonesuch"), "{message}");
    let (_, message) = fault(peer.call(&Call::SetDiskOrder { order: "arrival".into() }, &[]).0);
    assert!(message.contains("device"), "{message}");
    assert_eq!(peer.write(1, 1, 0, b"alive"), Answer::Written(5));
    assert_eq!(peer.call(&Call::Write { who: who(1), file: FileKey(1), lane_offset: 0 }, &[]).0, Answer::Written(0));
    assert!(peer.read(1, 1, 0, 0).is_empty());
}

#[test]
fn a_client_that_vanishes_in_the_middle_of_a_write_hurts_nobody() {
    let cluster = Cluster::start(1, |_| {});
    for cut in [10, 60, 5_000, 90_000] {
        let mut victim = cluster.peer(0, 1);
        for n in 0..5 {
            victim.send(&Call::Write { who: who(1), file: FileKey(n), lane_offset: 0 }, &[1; 50_000]);
        }
        let call = Call::Write { who: who(1), file: FileKey(9), lane_offset: 0 };
        let mut bytes = support::encode(impresario_wire::Kind::Call, 99, &call, 100_000);
        bytes.extend_from_slice(&[9; 100_000]);
        victim.pipe.write_all(&bytes[..cut]).unwrap();
        drop(victim);
    }
    let mut peer = cluster.peer(0, 2);
    assert_eq!(peer.write(2, 1, 0, b"still here"), Answer::Written(10));
    until("the victims' memory is given back", || peer.status()["memory"]["payload_bytes"] == 0);
    assert_eq!(stat(&mut peer, 9).size, 0, "half a write is no write");
    until("the victims' connections are closed", || peer.status()["connections"]["open"] == 1);
}

#[test]
fn a_full_queue_pushes_back_and_loses_nothing() {
    let cluster = Cluster::start(1, |config| {
        config.data[0].queue_requests = 4;
        config.data[0].policy = PolicySpec::named("fifo");
    });
    std::thread::scope(|scope| {
        for client in 0..8u64 {
            let mut peer = cluster.peer(0, client);
            scope.spawn(move || {
                for n in 0..50 {
                    let call = Call::Write { who: who(client), file: FileKey(client), lane_offset: n * 1000 };
                    peer.send(&call, &pattern(n, 1000));
                }
                for _ in 0..50 {
                    assert_eq!(peer.answer().unwrap().1, Answer::Written(1000));
                }
                for n in 0..50 {
                    assert!(peer.read(client, client, n * 1000, 1000) == pattern(n, 1000));
                }
            });
        }
    });
}

#[test]
fn switching_the_policy_under_load_loses_nothing() {
    let cluster = Cluster::start(1, |config| config.data[0].in_flight_requests = 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..6u64)
            .map(|client| {
                let (mut peer, stop) = (cluster.peer(0, client), &stop);
                scope.spawn(move || {
                    let mut rounds = 0u64;
                    while !stop.load(Ordering::Relaxed) || rounds < 11 {
                        for n in 0..10 {
                            let offset = (n * 6 + client) * 2000;
                            let call = Call::Write { who: who(client), file: FileKey(1), lane_offset: offset };
                            peer.send(&call, &pattern(offset + rounds, 2000));
                        }
                        for _ in 0..10 {
                            assert_eq!(peer.answer().unwrap().1, Answer::Written(2000));
                        }
                        let offset = (rounds % 10 * 6 + client) * 2000;
                        assert!(peer.read(client, 1, offset, 2000) == pattern(offset + rounds, 2000));
                        rounds += 1;
                    }
                    rounds
                })
            })
            .collect();
        let mut admin = Peer::connect(cluster.address(0), Role::Any, 100);
        let policies = POLICIES.iter().map(|p| p.name).filter(|p| *p != "twins");
        for policy in policies.cycle().take(60) {
            assert_eq!(admin.call(&set_policy(policy), &[]).0, Answer::Done);
            std::thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Ordering::Relaxed);
        let rounds: u64 = clients.into_iter().map(|c| c.join().unwrap()).sum();
        // The reply leaves a moment before the books are closed.
        let mut statistics = || admin.status()["engine"]["statistics"].clone();
        until("all are completed", || statistics()["completed"].as_u64() == Some(rounds * 11));
        assert_eq!(statistics()["accepted"].as_u64(), Some(rounds * 11));
        assert_eq!(admin.call(&Call::ResetStatistics, &[]).0, Answer::Done);
        assert_eq!(admin.status()["engine"]["statistics"]["accepted"], 0);
    });
}

/// Rules name applications by their own numbers, not by those that the scheduler gives them.
#[test]
fn a_policy_explains_what_it_does_with_whose_requests() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let ask = |peer: &mut Peer, job, write| {
        let op = if write { "write" } else { "read" }.into();
        let call = Call::Explain { job, user: 0, client: 0, file: 0, op, folders: [0; 4] };
        match peer.call(&call, &[]).0 {
            Answer::Text(told) => told,
            other => panic!("{other:?}"),
        }
    };
    assert!(
        ask(&mut peer, 1, false).contains("at once: the storage below has a page cache"),
        "auto says what it chose"
    );
    let fifo = Call::SetPolicy { name: "fifo".into(), params: Vec::new(), at_shared_ns: 0 };
    assert_eq!(peer.call(&fifo, &[]).0, Answer::Done);
    assert!(ask(&mut peer, 1, false).contains("alike"));
    let rules = "big: job=4000000017 & op=write {requests_per_s=10}; rest: * {requests_per_s=1000}";
    let call = Call::SetPolicy { name: "tbf".into(), params: vec![("rules".into(), rules.into())], at_shared_ns: 0 };
    assert_eq!(peer.call(&call, &[]).0, Answer::Done);
    let (big, rest) = (ask(&mut peer, 4_000_000_017, true), ask(&mut peer, 4_000_000_017, false));
    assert!(big.contains("big") && !rest.contains("big") && rest.contains("rest"), "{big} / {rest}");
}

/// Policies over jobs serve large requests in pieces of 128 KiB; each piece of a read leaves as it comes from the store.
#[test]
fn a_request_served_in_pieces_is_answered_piece_by_piece() {
    for policy in ["stream", "scan", "wscan", "sstf"] {
        let cluster = Cluster::start(1, |config| {
            config.data[0].policy = PolicySpec::named(policy);
            config.data[0].in_flight_requests = 2;
        });
        let mut peer = cluster.peer(0, 1);
        let bytes = pattern(3, 1_000_003);
        assert_eq!(peer.write(1, 1, 77, &bytes), Answer::Written(1_000_003), "{policy}");
        assert!(peer.read(1, 1, 77, 1_000_003) == bytes, "{policy}");
        assert_eq!(peer.pieces.len(), 8, "{policy}: {:?}", peer.pieces);
        assert!(peer.read(1, 1, 500_000, 4 << 20) == bytes[499_923..], "{policy}: short at the end of the object");
        let statistics = peer.status()["engine"]["statistics"].clone();
        assert_eq!(statistics["accepted"], 3, "{policy}");
        assert!(statistics["batches"].as_u64().unwrap() >= 8 + 8 + 4, "{policy}: {statistics}");
    }
}

/// What `status` says of a policy's waiting, for tests that need a connection that takes no data.
fn batches(peer: &mut Peer) -> u64 {
    peer.status()["engine"]["statistics"]["batches"].as_u64().unwrap()
}

/// A client that asks for 4 MiB and reads nothing gets what its connection takes, and no more is fetched for it, though
/// one call alone is outstanding and `turn_bytes=0` gives a job all that it takes. Then it gets the rest.
#[test]
fn a_job_is_served_only_while_its_connection_takes_data() {
    for unix in [false, true] {
        let cluster = Cluster::start(1, |config| {
            if unix {
                config.data[0].address = format!("unix:{}/socket", config.meta.dir.parent().unwrap().display());
            }
            config.data[0].policy = PolicySpec::named("stream").with("turn_bytes", 0);
            config.data[0].in_flight_requests = 1;
        });
        let mut slow = cluster.peer(0, 1);
        let bytes = pattern(3, 4 << 20);
        assert_eq!(slow.write(1, 1, 0, &bytes), Answer::Written(4 << 20));
        let mut other = cluster.peer(0, 2);
        other.call(&Call::ResetStatistics, &[]);
        slow.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 4 << 20 }, &[]);
        let mut before = u64::MAX;
        // It comes to rest when nothing was served between two looks.
        until("the connection takes no more", || {
            std::thread::sleep(Duration::from_millis(50));
            let now = batches(&mut other);
            std::mem::replace(&mut before, now) == now && now > 0
        });
        assert!(before < 32, "unix {unix}: all 32 pieces were served to a client that reads nothing");
        // Another job is served meanwhile, and many times.
        for n in 0..20 {
            assert!(other.read(2, 1, n * 1000, 1000) == bytes[n as usize * 1000..][..1000]);
        }
        assert!(slow.answer().unwrap().2 == bytes);
        assert_eq!(slow.pieces.len(), 32);
        until("memory is given back", || other.status()["memory"]["payload_bytes"] == 0);
    }
}

/// Under `sstf` the connection whose offset is next is waited for, for `patience_us` at most: a client behind it in the
/// file is served after that, not before.
#[test]
fn sstf_waits_for_a_connection_that_takes_no_data() {
    let patience = Duration::from_millis(300);
    let cluster = Cluster::start(1, |config| {
        config.data[0].policy = PolicySpec::named("sstf").with("patience_us", patience.as_micros());
        config.data[0].in_flight_requests = 1;
    });
    let mut slow = cluster.peer(0, 1);
    let bytes = pattern(3, 4 << 20);
    slow.write(1, 1, 0, &bytes);
    let mut other = cluster.peer(0, 2);
    other.call(&Call::ResetStatistics, &[]);
    let started = Instant::now();
    slow.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 4 << 20 }, &[]);
    until("the connection is busy", || batches(&mut other) >= 1);
    assert!(other.read(2, 1, (4 << 20) - 1000, 1000) == bytes[(4 << 20) - 1000..]);
    assert!(started.elapsed() >= patience, "the busy connection was not waited for: {:?}", started.elapsed());
    assert!(slow.answer().unwrap().2 == bytes);
}

/// A sync waits for the writes before it, and these neither behind the reads of a client that reads no answers nor, for long, for
/// the bytes that it has asked for; nor does it wait for a write of which the bytes are still to come.
#[test]
fn a_slow_client_holds_up_no_sync_of_others() {
    for policy in ["fifo", "stream", "scan", "wscan", "sstf"] {
        let cluster = Cluster::start(1, |config| {
            config.data[0].policy = PolicySpec::named(policy);
            config.data[0].in_flight_requests = 1;
        });
        let [mut slow, mut half, mut other] = [1, 2, 3].map(|client| cluster.peer(0, client));
        let bytes = pattern(3, 4 << 20);
        assert_eq!(slow.write(1, 1, 0, &bytes), Answer::Written(4 << 20));
        // More than the network takes.
        slow.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 4 << 20 }, &[]);
        slow.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 4 << 20 }, &[]);
        let late = Call::Write { who: who(1), file: FileKey(1), lane_offset: 8 << 20 };
        let written = slow.send(&late, &bytes[..100_000]);
        let begun = Call::Write { who: who(2), file: FileKey(1), lane_offset: 12 << 20 };
        let begun = encode(Kind::Call, 7, &begun, 100_000);
        half.pipe.write_all(&[&begun[..], &bytes[..50_000]].concat()).unwrap();
        until("all are there", || {
            let statistics = other.status()["engine"]["statistics"].clone();
            ["accepted", "passed"].iter().map(|key| statistics[key].as_u64().unwrap()).sum::<u64>() >= 4
        });
        assert_eq!(other.write(3, 1, 4000 << 10, &[9; 5000]), Answer::Written(5000), "{policy}");
        assert_eq!(other.call(&Call::Sync { who: who(3), file: FileKey(1) }, &[]).0, Answer::Done, "{policy}");
        assert!(other.read(3, 1, 8 << 20, 100_000) == bytes[..100_000], "{policy}: synced, but not written");
        half.pipe.write_all(&bytes[50_000..100_000]).unwrap();
        assert_eq!(half.answer().unwrap().1, Answer::Written(100_000), "{policy}");
        let answers: Vec<_> = (0..3).map(|_| slow.answer().unwrap()).collect();
        for (id, answer, read) in answers {
            let expected = if id == written { Answer::Written(100_000) } else { Answer::Data };
            assert!(answer == expected && (id == written || read == bytes), "{policy}: {answer:?}");
        }
    }
}

/// A list is one request on the wire, several to the scheduler, and one answer in pieces.
#[test]
fn a_list_is_answered_in_pieces() {
    for (policy, device) in [("mlf", false), ("stream", false), ("stream", true)] {
        let cluster = Cluster::start(1, |config| {
            config.data[0].policy = PolicySpec::named(policy);
            if device {
                config.data[0].device = Some("disk".into());
                config.device.insert("disk".into(), Default::default());
            }
        });
        let mut peer = cluster.peer(0, 1);
        let bytes = pattern(3, 100_000);
        peer.write(1, 1, 0, &bytes);
        let list = |extents: Vec<(u64, u32)>| {
            let extents = impresario_wire::Extents::of(&extents);
            Call::ReadList { who: who(1), file: FileKey(1), extents }
        };
        let (answer, got) = peer.call(&list((0..16).map(|i| (i * 4000, 100)).collect()), &[]);
        assert_eq!(answer, Answer::Data);
        let wanted: Vec<u8> = (0..16).flat_map(|i| bytes[i * 4000..][..100].to_vec()).collect();
        assert!(got == wanted, "{policy}");
        // Overlapping, backwards, over the end and behind it.
        let (_, got) = peer.call(&list(vec![(50_000, 300_000), (49_000, 2_000), (99_999, 3), (1 << 40, 5)]), &[]);
        let mut wanted = bytes[50_000..].to_vec();
        wanted.resize(300_000, 0);
        wanted.extend_from_slice(&bytes[49_000..51_000]);
        wanted.extend_from_slice(&[bytes[99_999], 0, 0, 0, 0, 0, 0, 0]);
        assert!(got == wanted, "{policy}: beyond the end");
        for bad in [vec![], vec![(0, 0)], vec![(u64::MAX, 1)], vec![(0, u32::MAX); 3], vec![(0, 1); 1025]] {
            assert_eq!(fault(peer.call(&list(bad), &[]).0).0, libc::EINVAL);
        }
        let old = Call::ReadList {
            who: Who { epoch: 0, ..who(1) },
            file: FileKey(1),
            extents: impresario_wire::Extents::of(&[(0, 1)]),
        };
        assert_eq!(fault(peer.call(&old, &[]).0).0, Fault::FENCED);
        assert_eq!(peer.read(1, 1, 0, 10), bytes[..10], "the connection lives on");
    }
}

/// A queue that is shorter than the list, and a client that reads its answer slowly: nothing waits for itself.
#[test]
fn a_list_longer_than_the_queue_is_served() {
    let cluster = Cluster::start(1, |config| {
        config.data[0].policy = PolicySpec::named("stream");
        config.data[0].queue_requests = 4;
    });
    let mut peer = cluster.peer(0, 1);
    let bytes = pattern(3, 4 << 20);
    peer.write(1, 1, 0, &bytes);
    let extents = impresario_wire::Extents::of(&(0..1024).map(|i| (i * 4096, 4096)).collect::<Vec<_>>());
    peer.send(&Call::ReadList { who: who(1), file: FileKey(1), extents }, &[]);
    std::thread::sleep(Duration::from_millis(200));
    assert!(peer.answer().unwrap().2 == bytes);
}

#[test]
fn a_slow_reader_does_not_stall_the_scheduler() {
    // mlf does not ask about connections; stream passes over one that takes no data; sstf waits for a while.
    for policy in ["mlf", "stream", "sstf"] {
        slow_reader(policy);
    }
}

fn slow_reader(policy: &str) {
    let cluster = Cluster::start(1, |config| {
        config.data[0].policy = PolicySpec::named(policy);
        config.data[0].in_flight_requests = 1;
    });
    let mut slow = cluster.peer(0, 1);
    let bytes = pattern(3, 1 << 20);
    slow.write(1, 1, 0, &bytes);
    for _ in 0..100 {
        slow.send(&Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 1 << 20 }, &[]);
    }
    let mut other = cluster.peer(0, 2);
    let started = Instant::now();
    for n in 0..100 {
        assert!(other.read(2, 1, n * 1000, 1000) == bytes[n as usize * 1000..][..1000]);
    }
    assert!(started.elapsed() < Duration::from_secs(60), "{policy}: {:?}", started.elapsed());
    for _ in 0..100 {
        assert!(slow.answer().unwrap().2 == bytes, "{policy}");
    }
}

#[test]
fn a_stopped_server_frees_its_port_and_its_data_is_there_after_a_restart() {
    let mut cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let bytes = pattern(1, 300_000);
    peer.write(1, 1, 0, &bytes);
    peer.call(&sync(1), &[]);
    let before = peer.status()["incarnation"].as_str().unwrap().to_string();
    cluster.stop_data(0);
    assert!(peer.is_closed());
    cluster.start_data(0);
    let mut peer = cluster.peer(0, 1);
    assert!(peer.read(1, 1, 0, 300_000) == bytes);
    let after = peer.status()["incarnation"].as_str().unwrap().to_string();
    assert_ne!(before, after);
    assert_eq!(before[..8], after[..8], "the same boot");
}

#[test]
fn bad_settings_are_refused_in_one_line() {
    let cluster = Cluster::start(1, |_| {});
    let error = |adjust: &dyn Fn(&mut impresario_config::Config)| {
        let mut config = cluster.config.clone();
        config.data[0].address = "127.0.0.1:0".into();
        config.data[0].dir = cluster.dir.path().join("other");
        adjust(&mut config);
        let identity = impresario_store::FolderIdentity { cluster: 1, store: 1, server: config.data[0].name.clone() };
        let _ = impresario_store::make(&config.data[0].dir, &identity);
        let line = impresario_server::start(&config, &config.data[0].name).err().expect("refused").to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    };
    assert!(error(&|c| c.data[0].address = cluster.address(0).into()).contains("in use"));
    assert!(error(&|c| c.data[0].dir = cluster.config.data[0].dir.clone()).contains("in use by another server"));
    assert!(error(&|c| c.data[0].dir = "/proc/none".into()).contains("/proc/none"));
    assert!(error(&|c| c.data[0].policy = PolicySpec::named("twins")).contains("twins"));
    assert!(error(&|c| c.data[0].policy = PolicySpec::named("mlf").with("nonsense", 1)).contains("nonsense"));
    assert!(error(&|c| c.data[0].device = Some("missing".into())).contains("missing"));
    let unknown = impresario_server::start(&cluster.config, "data.9").err().unwrap().to_string();
    assert!(unknown.contains("data.0"), "{unknown}");
}
