//! Checksums on a data server: damage of what it stores is an error for whoever reads it, and counted.

use crate::support::{Cluster, fault, pattern, who};
use impresario_client::{Client, ClientOptions, CreateOptions, Via};
use impresario_sched::PolicySpec;
use impresario_server::fsck::{Damage, ScrubOptions, scrub};
use impresario_testing::until;
use impresario_wire::{Answer, Call, Extents, FileKey};

const BLOCK: u64 = 4096;

/// Inverts a bit of an object behind the back of its data server.
fn rot(cluster: &Cluster, key: u64, at: u64) {
    use std::os::unix::fs::FileExt;
    let path = cluster.config.data[0].dir.join(format!("objects/{:02x}/{key:016x}", key & 0xff));
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[test]
fn damage_is_an_error_that_names_server_object_and_byte() {
    let mut cluster = Cluster::start(1, |config| config.data[0].checksums = true);
    let mut peer = cluster.peer(0, 1);
    let bytes = pattern(1, 300_000);
    assert_eq!(peer.write(1, 1, 0, &bytes), Answer::Written(300_000));
    assert_eq!(peer.call(&Call::Sync { who: who(1), file: FileKey(1) }, &[]).0, Answer::Done);
    assert_eq!(peer.read(1, 1, 5, 200_000), bytes[5..200_005]);
    rot(&cluster, 1, 20 * BLOCK + 7);
    for restart in [false, true] {
        if restart {
            cluster.stop_data(0);
            cluster.start_data(0);
            peer = cluster.peer(0, 1);
        }
        let call = Call::Read { who: who(1), file: FileKey(1), lane_offset: 20 * BLOCK + 100, len: 10 };
        let (errno, message) = fault(peer.call(&call, &[]).0);
        let name = &cluster.config.data[0].name;
        assert_eq!(errno, libc::EIO);
        assert!(message.contains(&format!("{name}: object 0000000000000001 is damaged at byte 81920:")), "{message}");
        let extents = Extents::of(&[(0, 4096), (20 * BLOCK, 4096)]);
        let list = Call::ReadList { who: who(1), file: FileKey(1), extents };
        assert_eq!(fault(peer.call(&list, &[]).0).0, libc::EIO);
        assert_eq!(peer.read(1, 1, 21 * BLOCK, 4096), bytes[21 * 4096..22 * 4096], "other blocks are as good as ever");
        assert_eq!(peer.status()["checksums"]["corrupt_blocks"], 2);
    }
    assert_eq!(fault(peer.write(1, 1, 20 * BLOCK, b"a part")).0, libc::EIO, "damage is not hidden by a new checksum");
    assert_eq!(peer.write(1, 1, 20 * BLOCK, &pattern(2, 4096)), Answer::Written(4096));
    assert_eq!(peer.read(1, 1, 20 * BLOCK, 4096), pattern(2, 4096));
}

#[test]
fn what_nobody_syncs_is_settled_when_the_server_stops() {
    let mut cluster = Cluster::start(1, |config| config.data[0].checksums = true);
    let mut peer = cluster.peer(0, 1);
    for key in 1..20 {
        assert_eq!(peer.write(1, key, 0, &pattern(key, 10_000)), Answer::Written(10_000));
    }
    assert!(peer.status()["checksums"]["unsettled_blocks"].as_u64().unwrap() >= 19 * 3);
    cluster.stop_data(0);
    rot(&cluster, 7, 9_999);
    cluster.start_data(0);
    let mut peer = cluster.peer(0, 1);
    assert_eq!(peer.read(1, 6, 0, 10_000), pattern(6, 10_000));
    let call = Call::Read { who: who(1), file: FileKey(7), lane_offset: 0, len: 10_000 };
    assert_eq!(fault(peer.call(&call, &[]).0).0, libc::EIO);
    until("the server goes on", || peer.status()["checksums"]["unsettled_blocks"] == 0);
}

#[test]
fn scrub_finds_damage_with_its_file_beside_clients_and_on_stopped_folders() {
    let mut cluster = Cluster::start(2, |config| {
        config.cluster.stripe_bytes = 65536;
        config.data.iter_mut().for_each(|data| data.checksums = true);
    });
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let options = ClientOptions { via: Via::Direct, ..ClientOptions::default() };
    let client = Client::connect(&cluster.config, options).unwrap();
    client.mkdir("d", 0o755, 0, 0).unwrap();
    let file = client.create("d/large", CreateOptions::default()).unwrap();
    file.write_at(&pattern(1, 1_000_000), 0).unwrap();
    file.sync().unwrap();
    let (key, layout) = (file.key().0, file.layout());
    file.close().unwrap();
    let online = ScrubOptions { online: true, servers: Vec::new(), rate_bytes: 0 };
    let report = scrub(&cluster.config, &online, &mut |_| {}).unwrap();
    assert!(report.status() == 0 && report.unknown_blocks == 0 && report.good_blocks >= 244, "{}", report.text());
    assert!(
        scrub(&cluster.config, &ScrubOptions { servers: vec!["data.7".into()], ..online.clone() }, &mut |_| {})
            .is_err()
    );

    // Byte 5 of the fourth block of the second strip of data server 0.
    let at = 65536 + 3 * BLOCK;
    rot(&cluster, key, at + 5);
    let k = layout.position_of(0).unwrap();
    let expected = Damage {
        server: cluster.config.data[0].name.clone(),
        key,
        bytes: at..at + BLOCK,
        file: Some(("d/large".into(), layout.file_offset(k, at))),
    };
    let report = scrub(&cluster.config, &online, &mut |_| {}).unwrap();
    assert_eq!((report.status(), &report.damage), (4, &vec![expected.clone()]), "{}", report.text());
    let offline = ScrubOptions { online: false, ..online.clone() };
    let report = scrub(&cluster.config, &offline, &mut |_| {}).unwrap();
    assert!(report.status() == 8 && report.text().contains("in use"), "{}", report.text());
    drop((client, meta));
    (0..2).for_each(|index| cluster.stop_data(index));
    let report = scrub(&cluster.config, &offline, &mut |_| {}).unwrap();
    assert_eq!((report.status(), &report.damage), (4, &vec![expected]), "{}", report.text());
    rot(&cluster, key, at + 5);
    assert_eq!(scrub(&cluster.config, &offline, &mut |_| {}).unwrap().status(), 0);
}

/// Two clients read neighbouring blocks, one of which is damaged, in one batch: each gets its own answer.
#[test]
fn damage_fails_no_other_request_of_its_batch() {
    let cluster = Cluster::start(1, |config| {
        config.data[0].checksums = true;
        config.data[0].device = Some("disk".into());
        config.data[0].policy = PolicySpec::named("fifo").with("merge", "on");
        config.data[0].in_flight_requests = 1;
        config.data[0].read_ahead_bytes = 0;
        config.device.insert("disk".into(), Default::default());
    });
    let mut busy = cluster.peer(0, 3);
    let bytes = pattern(1, 2 * BLOCK as usize);
    assert_eq!(busy.write(3, 1, 0, &bytes), Answer::Written(2 * BLOCK as u32));
    assert_eq!(busy.write(3, 2, 0, &pattern(2, 1 << 20)), Answer::Written(1 << 20));
    assert_eq!(busy.call(&Call::Sync { who: who(3), file: FileKey(1) }, &[]).0, Answer::Done);
    rot(&cluster, 1, 7);
    let read = |client, file, lane_offset| Call::Read {
        who: who(client),
        file: FileKey(file),
        lane_offset,
        len: BLOCK as u32,
    };
    let (mut unlucky, mut other) = (cluster.peer(0, 1), cluster.peer(0, 2));
    until("two reads are merged", || {
        let before = busy.status()["engine"]["statistics"]["batches"].as_u64().unwrap();
        (0..4).for_each(|i| _ = busy.send(&read(3, 2, i * 200_000 / BLOCK * BLOCK), &[]));
        unlucky.send(&read(1, 1, 0), &[]);
        other.send(&read(2, 1, BLOCK), &[]);
        let (_, answer, got) = other.answer().unwrap();
        assert!(answer == Answer::Data && got == bytes[BLOCK as usize..], "{answer:?}");
        assert_eq!(fault(unlucky.answer().unwrap().1).0, libc::EIO);
        (0..4).for_each(|_| assert_eq!(busy.answer().unwrap().1, Answer::Data));
        busy.status()["engine"]["statistics"]["batches"].as_u64().unwrap() - before < 6
    });
}
