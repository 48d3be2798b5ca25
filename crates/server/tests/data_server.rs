//! The data server over real sockets: contents, order, limits, faults, live changes.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_sched::PolicySpec;
use impresario_sched::policy::POLICIES;
use impresario_wire::{Answer, Call, Fault, FileKey, Role, Who};
use support::{Cluster, Peer, eventually, fault, pattern, who};

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
    Call::SetPolicy { name: name.into(), params: Vec::new() }
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
        assert_eq!(stat(&mut peer, 5), Default::default());
        let status = peer.status();
        assert_eq!(status["name"], cluster.config.data[0].name);
        assert_eq!(status["engine"]["policy"]["name"], "mlf");
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
        eventually("all are completed", || admin.status()["engine"]["statistics"]["completed"] == 640);
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
    let meta = Call::Meta(impresario_wire::MetaCall::Statfs);
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
    eventually("the victims' memory is given back", || peer.status()["memory"]["payload_bytes"] == 0);
    assert_eq!(stat(&mut peer, 9).size, 0, "half a write is no write");
    assert_eq!(peer.status()["connections"]["open"], 1);
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
                    while !stop.load(Ordering::Relaxed) {
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
        assert!(rounds > 60, "{rounds}");
        // The reply leaves a moment before the books are closed.
        let mut statistics = || admin.status()["engine"]["statistics"].clone();
        eventually("all are completed", || statistics()["completed"].as_u64() == Some(rounds * 11));
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
    assert!(ask(&mut peer, 1, false).contains("alike"));
    let rules = "big: job=4000000017 & op=write {requests_per_s=10}; rest: * {requests_per_s=1000}";
    let call = Call::SetPolicy { name: "tbf".into(), params: vec![("rules".into(), rules.into())] };
    assert_eq!(peer.call(&call, &[]).0, Answer::Done);
    let (big, rest) = (ask(&mut peer, 4_000_000_017, true), ask(&mut peer, 4_000_000_017, false));
    assert!(big.contains("big") && !rest.contains("big") && rest.contains("rest"), "{big} / {rest}");
}

/// Policies over jobs serve large requests in pieces of 128 KiB; the client gets one answer.
#[test]
fn a_request_served_in_pieces_is_answered_once() {
    for policy in ["stream", "scan", "wscan", "sstf"] {
        let cluster = Cluster::start(1, |config| {
            config.data[0].policy = PolicySpec::named(policy);
            config.data[0].in_flight_requests = 2;
        });
        let mut peer = cluster.peer(0, 1);
        let bytes = pattern(3, 1_000_003);
        assert_eq!(peer.write(1, 1, 77, &bytes), Answer::Written(1_000_003), "{policy}");
        assert!(peer.read(1, 1, 77, 1_000_003) == bytes, "{policy}");
        assert!(peer.read(1, 1, 500_000, 4 << 20) == bytes[499_923..], "{policy}: short at the end of the object");
        let statistics = peer.status()["engine"]["statistics"].clone();
        assert_eq!(statistics["accepted"], 3, "{policy}");
        assert!(statistics["batches"].as_u64().unwrap() >= 8 + 8 + 4, "{policy}: {statistics}");
    }
}

#[test]
fn a_slow_reader_does_not_stall_the_scheduler() {
    // Under mlf nobody looks at connections; stream passes over one that takes no data; sstf waits for a while.
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
    assert!(started.elapsed() < Duration::from_secs(10), "{policy}: {:?}", started.elapsed());
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
    assert!((service_s / busy_s - 1.0).abs() < 0.25, "engine {service_s} s, device {busy_s} s");
    assert!(scheduled["engine"]["statistics"]["batch_requests"]["mean"].as_f64().unwrap() > 1.5);
    let transfers = |told: &serde_json::Value| told["device"]["transfers"].as_u64().unwrap();
    assert!(transfers(&scheduled) < 100, "{} transfers", transfers(&scheduled));
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
    assert_eq!(peer.call(&sync(1), &[]).0, Answer::Done);
    assert_eq!(peer.status()["device"]["flushes"], 1);
    let cut = Call::Truncate { who: who(1), file: FileKey(1), len: 10_000 };
    assert_eq!(peer.call(&cut, &[]).0, Answer::Done);
    assert!(peer.read(1, 1, 5000, 600_000) == bytes[..5000]);
    assert_eq!(peer.call(&Call::Unlink { who: who(1), file: FileKey(1) }, &[]).0, Answer::Done);
    assert!(peer.read(1, 1, 0, 100).is_empty());
    let (_, refused) = fault(peer.call(&Call::SetDiskOrder { order: "sideways".into() }, &[]).0);
    assert!(refused.contains("arrival or elevator"), "{refused}");
    // Stopped with requests on the device: they end, and nothing hangs.
    for n in 0..20 {
        peer.send(&Call::Write { who: who(1), file: FileKey(2), lane_offset: n * 50_000_000 }, &[1; 1000]);
    }
    let started = Instant::now();
    cluster.stop_data(0);
    assert!(started.elapsed() < Duration::from_secs(8));
}
