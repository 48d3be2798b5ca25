//! What a data server reads before it is asked for it, and what is in memory already.

use crate::support::{Cluster, Peer, cold_object, fault, pattern, who};
use impresario_sched::PolicySpec;
use impresario_testing::until;
use impresario_wire::{Answer, Call, Extents, Fault, FileKey, Who};

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

/// Reads that the page cache has do not wait for a device that is kept busy or idle by the policy; what is about to change
/// them goes first all the same, and where everybody gets a share nothing passes.
#[test]
fn what_the_page_cache_has_is_not_scheduled() {
    let policy = |name: &str, params: &[(&str, &str)]| Call::SetPolicy {
        name: name.into(),
        params: params.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        at_shared_ns: 0,
    };
    let read = |file, lane_offset, len| Call::Read { who: who(1), file: FileKey(file), lane_offset, len };
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
        assert_eq!(peer.write(1, 2, 0, &bytes[..8192]), Answer::Written(8192));
        let passed = |peer: &mut Peer| peer.status()["engine"]["statistics"]["passed"].as_u64().unwrap();
        let first = passed(&mut peer);
        assert_eq!(first, u64::from(!scheduled), "the first write has shown that what is written stays in memory");
        assert_eq!(peer.call(&policy("tbf", &[("rules", "all: * {requests_per_s=1e6}")]), &[]).0, Answer::Done);
        assert!(peer.read(1, 1, 5000, 1000) == bytes[5000..6000]);
        assert_eq!(passed(&mut peer), first, "every request counts");
        // What is read from the device is not in memory, and waits for passes of 200 ms.
        assert_eq!(peer.call(&policy("mlf", &[("pass_us", "200000"), ("window_us", "0")]), &[]).0, Answer::Done);
        let object = std::fs::File::open(folder.path().join("objects/02/0000000000000002")).unwrap();
        object.sync_all().unwrap();
        rustix::fs::fadvise(&object, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        // After one that took long, as on a busy machine, no write passes for a while.
        until("a write passes", || {
            let before = passed(&mut peer);
            assert_eq!(peer.write(1, 3, 0, &[1]), Answer::Written(1));
            scheduled || passed(&mut peer) > before
        });
        let before = passed(&mut peer);
        let cold = peer.send(&read(2, 5000, 100), &[]);
        // So what changes these bytes waits for it, and what reads them then for that.
        let write = |file, lane_offset| Call::Write { who: who(1), file: FileKey(file), lane_offset };
        let write_over = peer.send(&write(2, 5000), &[7; 1000]);
        let (over, beside) = (peer.send(&read(2, 4990, 20), &[]), peer.send(&read(1, 0, 1000), &[]));
        let write_beside = peer.send(&write(1, 90_000), &[8; 1000]);
        let order: Vec<(u64, Vec<u8>)> = (0..5)
            .map(|_| {
                let (id, _, bytes) = peer.answer().unwrap();
                (id, bytes)
            })
            .collect();
        let of = |id| order.iter().position(|(answered, _)| *answered == id).unwrap();
        assert!(of(cold) < of(write_over), "a change of what is read waits");
        assert!(order[of(cold)].1 == bytes[5000..5100]);
        assert!(of(write_over) < of(over), "a read of what changes waits");
        assert_eq!(order[of(over)].1, [&bytes[4990..5000], &[7; 10]].concat());
        assert!(order[of(beside)].1 == bytes[..1000]);
        let these = passed(&mut peer) - before;
        // The kernel may just be busy with a page that was written.
        until("the read of what was written passes", || {
            let before = passed(&mut peer);
            assert_eq!(peer.read(1, 1, 90_000, 1000), [8; 1000]);
            scheduled || passed(&mut peer) > before
        });
        let before = passed(&mut peer);
        if !scheduled {
            assert!(of(beside) < of(cold), "what is in memory goes at once");
            assert!(of(write_beside) < of(cold), "so does what only goes there");
            assert_eq!(these, 2, "these two");
            // Short at the end, and empty behind it.
            assert_eq!((peer.read(1, 1, 99_990, 100).len(), peer.read(1, 1, 200_000, 100).len()), (10, 0));
        }
        // Of a list, what nothing changes.
        let extents = Extents::Pairs(vec![(0, 10), (10, 10), (60_000, 10), (10, 5)]);
        let (answer, list) = peer.call(&Call::ReadList { who: who(1), file: FileKey(1), extents }, &[]);
        assert!(matches!(answer, Answer::Data), "{answer:?}");
        assert!(list == [&bytes[..20], &bytes[60_000..60_010], &bytes[10..15]].concat());
        assert_eq!((these, passed(&mut peer) - before), if scheduled { (0, 0) } else { (2, 6) });
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
        let passed = if policy == "none" { 0 } else { kept };
        // It is counted after it was answered.
        until(format!("{policy}: what did not pass is counted"), || {
            peer.status()["engine"]["statistics"]["read_bytes"].as_u64().unwrap() >= kept + (1 << 20) - passed
        });
        // Where the object ends.
        let end = 8 << 20;
        assert!(peer.read(1, 1, end - 300_000, 1 << 20) == bytes[end as usize - 300_000..]);
        assert!(peer.read(1, 1, end, 1 << 20).is_empty());
        assert!(peer.read(1, 1, end - 300_000, 1 << 20) == bytes[end as usize - 300_000..], "all of it in memory");
    }
}
