//! The data server over real sockets: contents, order, limits, faults, live changes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{self, Cluster, Peer, cold_object, encode, fault, pattern, who};
use impresario_sched::PolicySpec;
use impresario_sched::policy::POLICIES;
use impresario_testing::until;
use impresario_wire::{Answer, Call, Extents, Fault, FileKey, Kind, Role, SeekTo, Sought, SpaceChange, Who};

fn sync(file: u64) -> Call {
    Call::Sync { who: who(1), file: FileKey(file) }
}

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

fn change(change: SpaceChange, lane_offset: u64, len: u64) -> Call {
    Call::ChangeSpace { who: who(1), file: FileKey(1), change, lane_offset, len }
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
        let call = Call::Explain { job, user: 0, client: 0, file: 0, write };
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

/// Interleaved streams of one object are read ahead of their clients; what they get is theirs, also after a write.
#[test]
fn streams_are_read_ahead() {
    const BLOCK: u64 = 64 << 10;
    let Some((cluster, mut one, _folder, bytes)) = cold("auto", 16 << 20) else { return };
    let mut two = cluster.peer(0, 2);
    let block = |at: u64| &bytes[at as usize..(at + BLOCK) as usize];
    for i in 0..64 {
        let at = [i * BLOCK, (4 << 20) + i * BLOCK];
        assert!(one.read(1, 1, at[0], BLOCK as u32) == block(at[0]), "{i}");
        assert!(two.read(2, 1, at[1], BLOCK as u32) == block(at[1]), "{i}");
        if i == 20 {
            // What was predicted is written meanwhile.
            let new = vec![9; BLOCK as usize];
            two.write(2, 1, 21 * BLOCK, &new);
            assert_eq!(one.read(1, 1, 21 * BLOCK, BLOCK as u32), new);
            two.write(2, 1, 21 * BLOCK, block(21 * BLOCK));
        }
    }
    let status = one.status();
    let told = &status["read_ahead"];
    let started = status["engine"]["speculated_bytes"].as_u64().unwrap();
    assert!(started > 4 << 20, "{status}");
    let number = |key: &str| told[key].as_u64().unwrap_or_else(|| panic!("{key}: {told}"));
    assert!(number("hit_bytes") > 4 << 20, "{told}");
    assert_eq!((number("wasted_bytes"), number("stopped")), (0, 0), "{told}");
    assert!(number("outstanding_bytes") <= 16 << 20, "{told}");
}

/// A data server with this policy and budget, and an object of 8 MiB that is not in memory, as [`cold_object`] says.
fn cold(policy: &str, read_ahead_bytes: u64) -> Option<(Cluster, Peer, tempfile::TempDir, Vec<u8>)> {
    cold_object(|data| (data.policy, data.read_ahead_bytes) = (PolicySpec::named(policy), read_ahead_bytes))
}

fn hint(file: u64, extents: &[(u64, u32)]) -> Call {
    Call::Prefetch { who: who(1), file: FileKey(file), extents: Extents::of(extents) }
}

/// What a client says that it will read is in memory when it, or another, asks for it; and it is counted.
#[test]
fn hinted_bytes_are_read_before_they_are_asked_for() {
    const MIB: u64 = 1 << 20;
    let Some((cluster, mut peer, _folder, bytes)) = cold("auto", 4 << 20) else { return };
    let told = |peer: &mut Peer, key: &str| {
        let status = peer.status();
        status.pointer(&format!("/read_ahead/{key}")).and_then(|n| n.as_u64()).unwrap_or_else(|| panic!("{status}"))
    };
    assert_eq!(peer.call(&hint(1, &[(MIB, 2 << 20), (5 * MIB + 1, 100)]), &[]).0, Answer::Accepted(2 * MIB + 4096));
    assert_eq!(peer.call(&hint(1, &[(2 * MIB, 4096)]), &[]).0, Answer::Accepted(4096), "it is known already");
    until("it was read", || told(&mut peer, "hints/fetched_bytes") == 2 * MIB + 4096);
    assert_eq!(told(&mut peer, "hints/hinted_bytes"), 2 * MIB + 4096);
    let mut other = cluster.peer(0, 2);
    for at in (MIB..3 * MIB).step_by(256 << 10) {
        assert!(other.read(2, 1, at, 256 << 10) == bytes[at as usize..][..256 << 10], "{at}");
    }
    assert_eq!(told(&mut peer, "waited_bytes"), 0, "nobody waited for the device");
    assert_eq!(told(&mut peer, "hints/hit_bytes"), 2 * MIB);
    // A write drops what it covers.
    assert_eq!(peer.write(1, 1, 5 * MIB, &[1; 8192]), Answer::Written(8192));
    assert_eq!((told(&mut peer, "hints/dropped_bytes"), told(&mut peer, "hints/outstanding_bytes")), (4096, 0));
    // No more than the budget, and nothing that is not there.
    let accepted = match peer.call(&hint(1, &[(0, u32::MAX), (1 << 60, u32::MAX)]), &[]).0 {
        Answer::Accepted(bytes) => bytes,
        other => panic!("{other:?}"),
    };
    let outstanding = told(&mut peer, "hints/outstanding_bytes") + told(&mut peer, "outstanding_bytes");
    assert!(accepted > 0 && outstanding <= 4 * MIB, "{accepted} accepted, {outstanding} outstanding");
    assert_eq!(told(&mut peer, "hints/refused_bytes"), 8 * MIB - accepted);
    assert_eq!(peer.call(&hint(99, &[(0, 4096)]), &[]).0, Answer::Accepted(0));
    // What is no list is refused, as is an epoch that is over.
    for extents in [Extents::Pairs(Vec::new()), Extents::Strided { offset: 0, len: 1, stride: 9, count: u32::MAX }] {
        let call = Call::Prefetch { who: who(1), file: FileKey(1), extents };
        assert_eq!(fault(peer.call(&call, &[]).0).0, libc::EINVAL);
    }
    let newer = Call::Read { who: Who { epoch: 2, ..who(1) }, file: FileKey(1), lane_offset: 0, len: 10 };
    assert_eq!(peer.call(&newer, &[]).0, Answer::Data);
    assert_eq!(fault(peer.call(&hint(1, &[(0, 4096)]), &[]).0).0, Fault::FENCED);
}

#[test]
fn hints_are_not_taken_where_nothing_is_read_ahead() {
    for (policy, budget_bytes) in [("none", 4 << 20), ("auto", 0)] {
        let Some((_cluster, mut peer, _folder, bytes)) = cold(policy, budget_bytes) else { return };
        assert_eq!(peer.call(&hint(1, &[(0, 1 << 20)]), &[]).0, Answer::Accepted(0), "{policy}");
        assert!(peer.read(1, 1, 0, 4096) == bytes[..4096]);
    }
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    peer.write(1, 1, 0, &pattern(1, 8192));
    assert_eq!(peer.call(&hint(1, &[(0, 8192)]), &[]).0, Answer::Accepted(0), "a folder in memory");
}

/// A modelled device reads each byte once: what was read ahead waits in a memory until it is read, changed or forgotten.
#[test]
fn a_modelled_device_reads_ahead_into_a_memory_of_its_own() {
    const MIB: u64 = 1 << 20;
    let cluster = Cluster::start(1, |config| {
        (config.data[0].policy, config.data[0].read_ahead_bytes) = (PolicySpec::named("auto"), 8 << 20);
        config.data[0].device = Some("disk".into());
        let disk = impresario_device::DeviceParams { read_ahead_bytes: 0, ..Default::default() };
        config.device.insert("disk".into(), disk);
    });
    let mut peer = cluster.peer(0, 1);
    let mut bytes = pattern(1, 8 << 20);
    for at in (0..8 * MIB).step_by(1 << 20) {
        peer.write(1, 1, at, &bytes[at as usize..][..1 << 20]);
    }
    let device = |peer: &mut Peer, key: &str| peer.status()["device"][key].as_u64().unwrap();
    // A hint, reads of it, and the same reads again.
    assert_eq!(peer.call(&Call::ResetStatistics, &[]).0, Answer::Done);
    assert_eq!(peer.call(&hint(1, &[(0, 2 << 20)]), &[]).0, Answer::Accepted(2 * MIB));
    until("it was read", || device(&mut peer, "read_ahead_held_bytes") == 2 * MIB);
    assert!(peer.read(1, 1, 0, 256 << 10) == bytes[..256 << 10]);
    assert_eq!(device(&mut peer, "read_bytes"), 2 * MIB, "the device was not needed");
    assert_eq!(device(&mut peer, "read_ahead_held_bytes"), 2 * MIB - (256 << 10));
    assert!(peer.read(1, 1, 0, 256 << 10) == bytes[..256 << 10]);
    assert!(device(&mut peer, "read_bytes") >= 2 * MIB + (256 << 10), "a second reading needs it again");
    // A write drops what it covers.
    bytes[MIB as usize..][..8192].fill(7);
    assert_eq!(peer.write(1, 1, MIB, &[7; 8192]), Answer::Written(8192));
    assert!(peer.read(1, 1, MIB - 4096, 16 << 10) == bytes[MIB as usize - 4096..][..16 << 10]);
    assert_eq!(peer.call(&Call::ResetStatistics, &[]).0, Answer::Done);
    assert_eq!(device(&mut peer, "read_ahead_held_bytes"), 0);
    // A stream and its neighbour, who reads the same a little later; every byte is right, and none is read for nothing.
    std::thread::scope(|scope| {
        for client in 2..4 {
            let (mut peer, bytes) = (cluster.peer(0, client), &bytes);
            scope.spawn(move || {
                for at in (0..8 * MIB).step_by(64 << 10) {
                    assert!(peer.read(client, 1, at, 64 << 10) == bytes[at as usize..][..64 << 10], "{at}");
                }
            });
        }
    });
    let status = peer.status();
    assert!(status["device"]["read_bytes"].as_u64().unwrap() <= 16 * MIB, "{status}");
    assert!(status["read_ahead"]["hit_bytes"].as_u64().unwrap() > 2 * MIB, "{status}");
    assert!(status["device"]["read_ahead_held_bytes"].as_u64().unwrap() <= 8 * MIB, "{status}");
    assert_eq!(status["engine"]["statistics"]["failed"], 0);
}

/// Where everything is in memory there is nothing to gain: after some hundred reads foresight no longer looks at them.
#[test]
fn reads_from_memory_are_soon_left_alone() {
    const BLOCK: u64 = 16 << 10;
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    for at in 0..16 {
        peer.write(1, 1, at << 20, &pattern(7, 1 << 20));
    }
    let predicted = |peer: &mut Peer| {
        for i in 0..1024 {
            peer.read(1, 1, i * BLOCK, BLOCK as u32);
        }
        peer.status()["read_ahead"]["predicted_bytes"].as_u64()
    };
    let first = predicted(&mut peer);
    // A folder that lies in memory has nothing to read ahead from.
    assert!(first.is_none_or(|bytes| bytes > 0));
    let (second, third) = (predicted(&mut peer), predicted(&mut peer));
    assert_eq!((first, first), (second, third));
    // What was read ahead along with them is not counted as theirs.
    let statistics = &peer.status()["engine"]["statistics"];
    let (read, failed) = (statistics["read_bytes"].as_u64(), statistics["failed"].as_u64());
    assert_eq!((read, failed), (Some(3 * 1024 * BLOCK), Some(0)));
    let told = peer.status()["read_ahead"].clone();
    assert!(told.is_null() || told["outstanding_bytes"] == 0, "{told}");
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

/// Sixteen clients read strided blocks of four files on the modelled disk; gives the seconds it took and the status.
fn strided_on_the_model(policy: &str, order: &str) -> (f64, serde_json::Value) {
    let cluster = Cluster::start(1, |config| {
        config.data[0].policy = PolicySpec::named(policy);
        config.data[0].device = Some("disk".into());
        let disk = impresario_device::DeviceParams { read_ahead_bytes: 0, ..Default::default() };
        config.device.insert("disk".into(), disk);
    });
    let bytes = pattern(1, 4 * 8 * 16_384);
    let mut admin = cluster.peer(0, 99);
    for file in 0..4 {
        assert_eq!(admin.write(99, file, 0, &bytes), Answer::Written(bytes.len() as u32));
        assert_eq!(admin.call(&sync(file), &[]).0, Answer::Done);
    }
    assert_eq!(admin.call(&Call::SetDiskOrder { order: order.into() }, &[]).0, Answer::Done);
    assert_eq!(admin.call(&Call::ResetStatistics, &[]).0, Answer::Done);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..16u64 {
            let (mut peer, bytes) = (cluster.peer(0, client), &bytes);
            scope.spawn(move || {
                for round in 0..8 {
                    let (file, offset) = (client % 4, (round * 4 + client / 4) * 16_384);
                    assert!(peer.read(client, file, offset, 16_384) == bytes[offset as usize..][..16_384]);
                }
            });
        }
    });
    (started.elapsed().as_secs_f64(), admin.status())
}

#[test]
fn the_modelled_device_takes_its_time_and_scheduling_saves_some() {
    let (arrival_s, arrival) = strided_on_the_model("none", "arrival");
    let (_, scheduled) = strided_on_the_model("mlf", "arrival");
    let (_, elevator) = strided_on_the_model("none", "elevator");
    for (told, order) in [(&arrival, "arrival"), (&scheduled, "arrival"), (&elevator, "elevator")] {
        assert_eq!(told["device"]["modelled"], true);
        assert!(told["device"]["kind"].as_str().unwrap().contains("modelled"));
        assert_eq!(told["device"]["order"], order);
        assert_eq!(told["device"]["read_bytes"], 16 * 8 * 16_384);
        assert_eq!(told["engine"]["statistics"]["failed"], 0);
    }
    assert_eq!(arrival["device"]["transfers"], 128, "nothing is merged in arrival order");
    // The model's time really passes, and service times on the engine's clock are the model's.
    let busy_s = arrival["device"]["busy_s"].as_f64().unwrap();
    assert!(arrival_s >= busy_s && busy_s > 0.1, "{arrival_s} s, busy {busy_s} s");
    let service_s = arrival["engine"]["statistics"]["service_ns"]["mean"].as_f64().unwrap() * 128.0 / 1e9;
    // One at a time: together they take no less than the model says and no more than the whole run.
    assert!(service_s > busy_s * 0.98 && service_s < arrival_s * 1.02, "engine {service_s} s, device {busy_s} s");
    let batch = &scheduled["engine"]["statistics"]["batch_requests"]["mean"];
    assert!(batch.as_f64().unwrap() > 1.05, "{batch} requests a batch");
    let transfers = |told: &serde_json::Value| told["device"]["transfers"].as_u64().unwrap();
    assert!(transfers(&scheduled) < 122, "{} transfers", transfers(&scheduled));
    assert!(transfers(&elevator) <= 128);
}

#[test]
fn every_operation_works_on_the_modelled_device() {
    let mut cluster = Cluster::start(1, |config| {
        config.data[0].device = Some("disk".into());
        config.device.insert("disk".into(), Default::default());
    });
    let mut peer = cluster.peer(0, 1);
    let bytes = pattern(4, 600_000);
    assert_eq!(peer.write(1, 1, 5000, &bytes), Answer::Written(600_000));
    assert!(peer.read(1, 1, 5000, 600_000) == bytes);
    assert_eq!(peer.call(&change(SpaceChange::Punch, 300_000, 50_000), &[]).0, Answer::Written(0));
    assert_eq!(peer.read(1, 1, 299_999, 3), [bytes[294_999], 0, 0]);
    assert_eq!(peer.call(&sync(1), &[]).0, Answer::Done);
    assert_eq!(peer.status()["device"]["flushes"], 1);
    let cut = Call::Truncate { who: who(1), file: FileKey(1), len: 10_000 };
    assert_eq!(peer.call(&cut, &[]).0, Answer::Done);
    assert!(peer.read(1, 1, 5000, 600_000) == bytes[..5000]);
    assert_eq!(peer.call(&Call::Unlink { who: who(1), file: FileKey(1) }, &[]).0, Answer::Done);
    let read = Call::Read { who: who(1), file: FileKey(1), lane_offset: 0, len: 100 };
    assert_eq!(fault(peer.call(&read, &[]).0).0, libc::EIDRM);
    let (_, refused) = fault(peer.call(&Call::SetDiskOrder { order: "sideways".into() }, &[]).0);
    assert!(refused.contains("arrival or elevator"), "{refused}");
    // Stopped with requests on the device: they end, and nothing hangs.
    for n in 0..20 {
        peer.send(&Call::Write { who: who(1), file: FileKey(2), lane_offset: n * 50_000_000 }, &[1; 1000]);
    }
    let started = Instant::now();
    cluster.stop_data(0);
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// Reads that the page cache has do not wait for a device that is kept busy or idle by the policy; what is about to change
/// them goes first all the same, and where everybody gets a share nothing passes.
#[test]
fn what_the_page_cache_has_is_not_scheduled() {
    let policy = |name: &str, params: &[(&str, &str)]| Call::SetPolicy {
        name: name.into(),
        params: params.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        at_shared_ns: 0,
    };
    let read = |lane_offset, len| Call::Read { who: who(1), file: FileKey(1), lane_offset, len };
    for scheduled in [false, true] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let cluster = Cluster::start(1, |config| {
            config.data[0].dir = folder.path().into();
            config.data[0].policy = PolicySpec::named("fifo");
            config.data[0].schedule_cached_reads = scheduled;
        });
        let mut peer = cluster.peer(0, 1);
        if peer.status()["store"]["in_memory"] == true {
            return impresario_testing::skip("disk", "the build's folder is in memory");
        }
        let bytes = pattern(1, 100_000);
        assert_eq!(peer.write(1, 1, 0, &bytes), Answer::Written(100_000));
        let passed = |peer: &mut Peer| peer.status()["engine"]["statistics"]["passed"].as_u64().unwrap();
        assert_eq!(peer.call(&policy("tbf", &[("rules", "all: * {requests_per_s=1e6}")]), &[]).0, Answer::Done);
        assert!(peer.read(1, 1, 5000, 1000) == bytes[5000..6000]);
        assert_eq!(passed(&mut peer), 0, "every request counts");
        // Each request waits for passes of 200 ms.
        assert_eq!(peer.call(&policy("mlf", &[("pass_us", "200000"), ("window_us", "0")]), &[]).0, Answer::Done);
        let write = Call::Write { who: who(1), file: FileKey(1), lane_offset: 50_000 };
        let write = peer.send(&write, &[7; 1000]);
        let (over, beside) = (peer.send(&read(49_990, 20), &[]), peer.send(&read(0, 1000), &[]));
        let order: Vec<(u64, Vec<u8>)> = (0..3)
            .map(|_| {
                let (id, _, bytes) = peer.answer().unwrap();
                (id, bytes)
            })
            .collect();
        let of = |id| order.iter().position(|(answered, _)| *answered == id).unwrap();
        assert!(of(write) < of(over), "a read of what changes waits");
        assert_eq!(order[of(over)].1, [&bytes[49_990..50_000], &[7; 10]].concat());
        assert!(order[of(beside)].1 == bytes[..1000]);
        if !scheduled {
            assert_eq!(of(beside), 0, "what is in memory goes at once");
            // Short at the end, and empty behind it.
            assert_eq!((peer.read(1, 1, 99_990, 100).len(), peer.read(1, 1, 200_000, 100).len()), (10, 0));
        }
        // Of a list, what nothing changes.
        let extents = Extents::Pairs(vec![(0, 10), (10, 10), (60_000, 10), (10, 5)]);
        let (answer, list) = peer.call(&Call::ReadList { who: who(1), file: FileKey(1), extents }, &[]);
        assert!(matches!(answer, Answer::Data), "{answer:?}");
        assert!(list == [&bytes[..20], &bytes[60_000..60_010], &bytes[10..15]].concat());
        assert_eq!(passed(&mut peer), if scheduled { 0 } else { 7 });
    }
}

/// What the page cache has of the beginning of a long read leaves at once; the device is asked for the rest.
#[test]
fn a_long_read_may_be_in_memory_in_part() {
    const PART: usize = 256 << 10;
    for policy in ["none", "fifo"] {
        let Some((_cluster, mut peer, folder, bytes)) = cold(policy, 0) else {
            return impresario_testing::skip("disk", "the build's folder is in memory");
        };
        let object = std::fs::File::open(folder.path().join("objects/01/0000000000000001")).unwrap();
        let kept = 2 * PART as u64;
        let front = peer.read(1, 1, 0, kept as u32);
        assert!(front == bytes[..kept as usize]);
        rustix::fs::fadvise(&object, kept, None, rustix::fs::Advice::DontNeed).unwrap();
        peer.pieces.clear();
        assert!(peer.read(1, 1, 0, 1 << 20) == bytes[..1 << 20], "{policy}");
        let of: Vec<(u32, usize)> = peer.pieces.iter().map(|(_, at, len)| (*at, *len)).collect();
        assert!(of.starts_with(&[(0, PART)]) && of.len() > 1, "{policy}: {of:?}");
        let statistics = &peer.status()["engine"]["statistics"];
        let counted = statistics["read_bytes"].as_u64().unwrap();
        let passed = if policy == "none" { 0 } else { kept };
        assert!(counted >= kept + (1 << 20) - passed, "{policy}: {statistics:#}");
        // Where the object ends.
        let end = 8 << 20;
        assert!(peer.read(1, 1, end - 300_000, 1 << 20) == bytes[end as usize - 300_000..]);
        assert!(peer.read(1, 1, end, 1 << 20).is_empty());
        assert!(peer.read(1, 1, end - 300_000, 1 << 20) == bytes[end as usize - 300_000..], "all of it in memory");
    }
}
