//! A data server on a modelled disk.

use std::time::{Duration, Instant};

use crate::support::{Cluster, change, fault, pattern, sync, who};
use impresario_sched::PolicySpec;
use impresario_wire::{Answer, Call, FileKey, SpaceChange};

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
