//! Several nodes on one cluster, and failing servers.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use impresario_device::DeviceParams;
use impresario_fuse::MountOptions;
use impresario_testing::content::first_difference;
use rustix::fs::Advice;

use crate::cluster::{Cluster, Node, errno, mounted};
use crate::files::pattern;

/// Two nodes whose kernels may cache for a long time: a correct result then does not depend on luck.
fn two_nodes() -> Option<(Node, Node)> {
    let patient = || MountOptions { cache_time: Duration::from_secs(600), ..Default::default() };
    let one = crate::cluster::mounted_with(patient())?;
    let two = one.second(patient());
    Some((one, two))
}

#[test]
fn close_to_open() {
    let Some((one, two)) = two_nodes() else { return };
    for round in 0..8u64 {
        // Growing, shrinking, and changing without another size.
        let len = [100_000, 250_000, 250_000, 10, 0, 250_000, 250_000, 1][round as usize];
        let (writer, reader) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
        let bytes = pattern(round, len);
        fs::write(writer.at("f"), &bytes).unwrap();
        assert!(fs::read(reader.at("f")).unwrap() == bytes, "round {round}");
        let open = File::open(reader.at("f")).unwrap();
        assert_eq!(open.metadata().unwrap().len(), len as u64);
    }
}

/// The kernel opens what it has cached. What another node has removed meanwhile is made again, each time, whoever else
/// does the same at that moment.
#[test]
fn a_name_removed_elsewhere_is_made_again() {
    let Some((one, two)) = two_nodes() else { return };
    for round in 0..12u64 {
        let write = || fs::write(one.at("f"), pattern(round, 1000));
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..1 + round % 4).map(|_| scope.spawn(write)).collect();
            writers.into_iter().for_each(|writer| writer.join().unwrap().unwrap_or_else(|e| panic!("{round}: {e}")));
        });
        assert!(fs::read(two.at("f")).unwrap() == pattern(round, 1000), "round {round}");
        fs::remove_file(two.at("f")).unwrap();
    }
}

#[test]
fn a_change_without_another_size_is_seen_at_the_next_open() {
    let Some((one, two)) = two_nodes() else { return };
    fs::write(one.at("f"), pattern(0, 200_000)).unwrap();
    for round in 1..6u64 {
        assert_eq!(fs::read(two.at("f")).unwrap().len(), 200_000);
        let file = OpenOptions::new().write(true).open(one.at("f")).unwrap();
        file.write_all_at(&pattern(round, 200_000), 0).unwrap();
        drop(file);
        assert!(fs::read(two.at("f")).unwrap() == pattern(round, 200_000), "round {round}");
    }
}

/// What is read ahead waits for the data servers in the kernel, not in the mount's threads: names are answered meanwhile.
#[test]
fn a_look_up_does_not_wait_behind_what_is_read_ahead() {
    const LEN: usize = 16 << 20;
    let slow = DeviceParams { interface_bytes_per_s: 1_000_000, ..DeviceParams::default() };
    let cluster = Cluster::with(Duration::from_secs(60), 0, |config| {
        config.device.insert("slow".into(), slow);
        config.data.iter_mut().for_each(|data| data.device = Some("slow".into()));
    });
    let Some(cluster) = cluster else { return };
    let node = cluster.mount(MountOptions { threads: Some(4), ..MountOptions::default() });
    let writer = cluster.mount(MountOptions::default());
    fs::write(writer.at("f"), pattern(1, LEN)).unwrap();
    fs::write(writer.at("other"), b"").unwrap();

    let file = File::open(node.at("f")).unwrap();
    let began = Instant::now();
    for at in (0..LEN as u64).step_by(1 << 20) {
        rustix::fs::fadvise(&file, at, NonZeroU64::new(1 << 20), Advice::WillNeed).unwrap();
    }
    assert_eq!(fs::metadata(node.at("other")).unwrap().len(), 0);
    let looked_up = began.elapsed();
    assert!(fs::read(node.at("f")).unwrap() == pattern(1, LEN));
    let read = began.elapsed();
    assert!(read > Duration::from_secs(2), "the devices are slow: {read:?}");
    assert!(looked_up < read / 4, "{looked_up:?} of {read:?}");
}

/// Servers' clocks need not agree: what a server writes whose clock is an hour behind another's is seen as well.
#[test]
fn an_overwrite_on_a_server_whose_clock_is_behind_is_seen_at_the_next_open() {
    let Some((one, two)) = two_nodes() else { return };
    let mut bytes = pattern(0, 8 << 20);
    fs::write(one.at("f"), &bytes).unwrap();
    let objects = one.cluster().objects();
    assert!(objects.len() > 1, "{objects:?}");
    let now = SystemTime::now();
    let set = |path: &PathBuf, ago_s: u64| {
        File::options().write(true).open(path).unwrap().set_modified(now - Duration::from_secs(ago_s)).unwrap();
    };
    objects.iter().for_each(|object| set(object, 7200));
    for round in 1..5u64 {
        let file = OpenOptions::new().write(true).open(one.at("f")).unwrap();
        bytes[..1000].copy_from_slice(&pattern(round, 1000));
        file.write_all_at(&bytes[..1000], 0).unwrap();
        file.sync_all().unwrap();
        let is_new = |path: &PathBuf| fs::metadata(path).unwrap().modified().unwrap() > now - Duration::from_secs(600);
        let (written, others): (Vec<_>, Vec<_>) = objects.iter().partition(|object| is_new(object));
        assert_eq!(written.len(), 1, "{written:?}");
        set(written[0], 7200 - round);
        set(others[0], 3600);
        drop(file);
        for _ in 0..2 {
            assert!(fs::read(two.at("f")).unwrap() == bytes, "round {round}");
        }
    }
}

/// As `rsync --times`, `cp -p` and reproducible builds do: other bytes, of the same length and modification time.
#[test]
fn an_overwrite_that_keeps_the_modification_time_is_seen_at_the_next_open() {
    let Some((one, two)) = two_nodes() else { return };
    let then = SystemTime::now() - Duration::from_secs(3600);
    for round in 0..3 {
        let bytes = pattern(round, 100_000);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(one.at("f")).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file.set_modified(then).unwrap();
        drop(file);
        // The second open may keep the pages that the first has brought.
        for _ in 0..2 {
            assert!(fs::read(two.at("f")).unwrap() == bytes, "round {round}");
        }
    }
}

#[test]
fn an_append_after_another_nodes_append() {
    let Some((one, two)) = two_nodes() else { return };
    let mut want = String::new();
    for i in 0..30 {
        let node = if i % 2 == 0 { &one } else { &two };
        let line = format!("line {i}\n");
        let mut file = OpenOptions::new().append(true).create(true).open(node.at("log")).unwrap();
        file.write_all(line.as_bytes()).unwrap();
        want += &line;
    }
    assert_eq!(fs::read_to_string(one.at("log")).unwrap(), want);
    assert_eq!(fs::read_to_string(two.at("log")).unwrap(), want);
}

/// Writers of one record each, from several mounts at once; `meanwhile` disturbs them. Whether a record was lost, torn or
/// written twice shows in the file: each is once there and whole, and each writer's are in its order.
fn append_from(nodes: &[&Node], writers: usize, records: usize, meanwhile: impl FnOnce()) -> Vec<u8> {
    let line = |writer: usize, record: usize| format!("<{writer} {record} {}>\n", "x".repeat(record * 7 % 300));
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let node = nodes[writer % nodes.len()];
            scope.spawn(move || {
                let mut file = OpenOptions::new().append(true).create(true).open(node.at("log")).unwrap();
                for record in 0..records {
                    let line = line(writer, record);
                    assert_eq!(file.write(line.as_bytes()).unwrap(), line.len());
                }
            });
        }
        meanwhile();
    });
    let bytes = fs::read(nodes[0].at("log")).unwrap();
    let text = String::from_utf8(bytes.iter().copied().filter(|byte| *byte != 0).collect()).unwrap();
    let mut next = vec![0; writers];
    for found in text.split_inclusive('\n') {
        let writer: usize = found[1..].split(' ').next().unwrap().parse().unwrap();
        assert_eq!(found, line(writer, next[writer]));
        next[writer] += 1;
    }
    assert_eq!(next, vec![records; writers]);
    bytes
}

#[test]
fn appends_of_several_nodes_are_whole_and_all_there() {
    let Some((one, two)) = two_nodes() else { return };
    let bytes = append_from(&[&one, &two], 6, 300, || ());
    assert!(!bytes.contains(&0), "no range was left unwritten");
    assert!(fs::read(two.at("log")).unwrap() == bytes);
}

#[test]
fn appends_of_several_nodes_survive_a_lost_io_node_and_a_restarted_metadata_server() {
    let Some(cluster) = Cluster::with_io_nodes(Duration::from_secs(20), 2) else { return };
    let (one, two) =
        (cluster.mount_through(0, MountOptions::default()), cluster.mount_through(1, MountOptions::default()));
    append_from(&[&one, &two], 4, 200, || {
        std::thread::sleep(Duration::from_millis(300));
        cluster.stop("meta");
        cluster.start_again("meta");
        std::thread::sleep(Duration::from_millis(300));
        cluster.stop("io.0");
    });
}

/// The kernel of one node believes in an end that another node has moved.
#[test]
fn a_node_reads_what_it_appended_behind_another_nodes_bytes() {
    let Some((one, two)) = two_nodes() else { return };
    let open = |node: &Node| OpenOptions::new().read(true).append(true).create(true).open(node.at("log")).unwrap();
    fs::write(one.at("log"), "0").unwrap();
    let (mut mine, mut others) = (open(&one), open(&two));
    let mut reader = File::open(one.at("log")).unwrap();
    let (mut all, mut want) = (String::new(), String::from("0"));
    reader.read_to_string(&mut all).unwrap();
    for i in 1..20 {
        others.write_all(format!("two {i};").as_bytes()).unwrap();
        mine.write_all(format!("one {i};").as_bytes()).unwrap();
        want += &format!("two {i};one {i};");
        reader.read_to_string(&mut all).unwrap();
        assert_eq!(all, want);
        assert_eq!(fs::read_to_string(one.at("log")).unwrap(), want);
    }
    assert_eq!(fs::metadata(one.at("log")).unwrap().len(), want.len() as u64);
}

/// Its kernel may know the number of a link that was removed on another node, and what that one said.
#[test]
fn a_link_made_again_elsewhere_says_what_the_new_one_says() {
    let Some(one) = mounted() else { return };
    let two = one.second(MountOptions { cache_time: Duration::ZERO, ..Default::default() });
    let mut inos = std::collections::HashSet::new();
    for round in 0..30 {
        let said = format!("target-{round:02}");
        symlink(&said, one.at("l")).unwrap();
        inos.insert(fs::symlink_metadata(two.at("l")).unwrap().ino());
        assert_eq!(fs::read_link(two.at("l")).unwrap().to_str(), Some(&said[..]), "round {round}");
        fs::remove_file(one.at("l")).unwrap();
    }
    assert!(inos.len() < 30, "no number was used again: this tested nothing");
}

#[test]
fn replaced_by_rename_elsewhere() {
    let Some((one, two)) = two_nodes() else { return };
    for round in 0..20u64 {
        let bytes = pattern(round, 1000 + 3000 * (round as usize % 3));
        fs::write(one.at("next"), &bytes).unwrap();
        fs::rename(one.at("next"), one.at("f")).unwrap();
        assert!(fs::read(two.at("f")).unwrap() == bytes, "round {round}");
    }
}

#[test]
fn a_file_kept_open_follows_within_the_cache_time() {
    let Some(one) = mounted() else { return };
    let two = one.second(MountOptions::default());
    fs::write(one.at("f"), pattern(1, 50_000)).unwrap();
    let open = File::open(two.at("f")).unwrap();
    let mut buffer = vec![0; 80_000];
    assert_eq!(open.read_at(&mut buffer, 0).unwrap(), 50_000);
    fs::write(one.at("f"), pattern(2, 80_000)).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(open.read_at(&mut buffer, 0).unwrap(), 80_000);
    assert!(buffer == pattern(2, 80_000));
}

#[test]
fn names_cross_nodes() {
    let Some(one) = mounted() else { return };
    let two = one.second(MountOptions::default());
    fs::create_dir(one.at("d")).unwrap();
    fs::write(one.at("d/new"), "new").unwrap();
    assert_eq!(fs::read_to_string(two.at("d/new")).unwrap(), "new", "a name not used before is seen at once");
    fs::rename(one.at("d/new"), one.at("d/moved")).unwrap();
    assert_eq!(fs::read_to_string(two.at("d/moved")).unwrap(), "new");
    fs::remove_file(one.at("d/moved")).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert!(!two.at("d/new").exists() && !two.at("d/moved").exists());
    assert_eq!(fs::read_dir(two.at("d")).unwrap().count(), 0);
    fs::rename(one.at("d"), one.at("e")).unwrap();
    fs::write(one.at("e/f"), "text").unwrap();
    assert_eq!(fs::read_to_string(two.at("e/f")).unwrap(), "text");
    std::thread::sleep(Duration::from_millis(1100));
    assert!(!two.at("d").exists());
}

#[test]
fn removed_elsewhere_while_open() {
    let Some((one, two)) = two_nodes() else { return };
    let bytes = pattern(3, 120_000);
    fs::write(one.at("f"), &bytes).unwrap();
    let open = OpenOptions::new().read(true).write(true).open(two.at("f")).unwrap();
    fs::remove_file(one.at("f")).unwrap();
    fs::write(one.at("f"), "another").unwrap();
    let mut got = vec![0; bytes.len()];
    open.read_exact_at(&mut got, 0).unwrap();
    assert!(got == bytes);
    open.write_all_at(b"changed", 5).unwrap();
    assert_eq!(open.metadata().unwrap().len(), 120_000);
    drop(open);
    assert_eq!(fs::read_to_string(two.at("f")).unwrap(), "another");
}

#[test]
fn a_number_used_again_elsewhere_is_not_mixed_up() {
    let Some((one, two)) = two_nodes() else { return };
    // Local file systems reuse inode numbers soon; node two still knows the old files by them.
    for round in 0..30u64 {
        let bytes = pattern(round, 5000);
        fs::write(one.at("f"), &bytes).unwrap();
        assert!(fs::read(two.at("f")).unwrap() == bytes, "round {round}");
        assert!(fs::metadata(two.at("f")).unwrap().ino() > 1);
        fs::remove_file(one.at("f")).unwrap();
    }
}

#[test]
fn readers_survive_a_restarted_data_server() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    let node = cluster.mount(MountOptions { direct_io: true, ..Default::default() });
    let bytes = pattern(4, 4_000_000);
    fs::write(node.at("f"), &bytes).unwrap();
    let open = OpenOptions::new().read(true).write(true).open(node.at("f")).unwrap();
    cluster.stop_data_server(1);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4usize)
            .map(|i| {
                let (open, bytes) = (&open, &bytes);
                scope.spawn(move || {
                    let mut got = vec![0; 1_000_000];
                    open.read_exact_at(&mut got, i as u64 * 1_000_000).unwrap();
                    assert!(got == bytes[i * 1_000_000..][..1_000_000]);
                })
            })
            .collect();
        let writer = scope.spawn(|| open.write_all_at(&pattern(5, 600_000), 4_000_000).unwrap());
        std::thread::sleep(Duration::from_millis(700));
        assert!(readers.iter().all(|reader| !reader.is_finished()), "they wait for the server");
        cluster.start_data_server(1);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        writer.join().unwrap();
    });
    assert!(
        fs::read(node.at("f")).unwrap() == [bytes, pattern(5, 600_000)].concat(),
        "acknowledged data is still there"
    );
}

#[test]
fn a_lost_data_server_gives_an_error_in_time() {
    let timeout = Duration::from_secs(2);
    let Some(cluster) = Cluster::start(timeout) else { return };
    let node = cluster.mount(MountOptions { direct_io: true, ..Default::default() });
    fs::write(node.at("f"), pattern(6, 1_000_000)).unwrap();
    let open = OpenOptions::new().read(true).write(true).open(node.at("f")).unwrap();
    cluster.stop_data_server(0);
    let mut buffer = vec![0; 500_000];
    for what in ["read", "write"] {
        let started = Instant::now();
        let failed = match what {
            "read" => errno(open.read_exact_at(&mut buffer, 0)),
            // A write that it gave up may be done in part, so it stays away from the range that is read below.
            _ => errno(open.write_all_at(&buffer, 500_000)),
        };
        assert_eq!(failed, libc::EIO, "{what}");
        let waited = started.elapsed();
        // A busy machine may take seconds to run a thread.
        assert!(waited >= timeout / 2 && waited < timeout + Duration::from_secs(20), "{what} failed after {waited:?}");
    }
    // Names do not depend on it, and nothing hangs.
    fs::create_dir(node.at("d")).unwrap();
    assert!(fs::read_dir(node.mount_point()).unwrap().count() == 2);
    cluster.start_data_server(0);
    open.read_exact_at(&mut buffer, 0).unwrap();
    assert!(buffer == pattern(6, 1_000_000)[..500_000]);
}

#[test]
fn a_listing_while_a_data_server_is_lost_tells_no_wrong_length() {
    const BYTES: u64 = 300_000;
    let Some(cluster) = Cluster::start(Duration::from_secs(2)) else { return };
    let nodes = [0, 1].map(|_| cluster.mount(MountOptions::default()));
    let mut open = fs::File::create(nodes[0].at("f")).unwrap();
    open.write_all_at(&pattern(6, BYTES as usize), 0).unwrap();
    // Longer than attributes are cached.
    std::thread::sleep(Duration::from_millis(1500));
    cluster.stop_data_server(0);
    for node in &nodes {
        let names: Vec<_> = fs::read_dir(node.mount_point()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["f"]);
        let looked = fs::metadata(node.at("f")).map(|attributes| attributes.len());
        assert!(looked.is_err_and(|error| error.raw_os_error() == Some(libc::EIO)));
    }
    fs::read_dir(nodes[0].mount_point()).unwrap().for_each(|entry| drop(entry.unwrap()));
    assert_eq!(errno(open.seek(std::io::SeekFrom::End(0))), libc::EIO, "where it would write over what it has written");
    cluster.start_data_server(0);
    for node in &nodes {
        assert_eq!(fs::metadata(node.at("f")).unwrap().len(), BYTES);
    }
    assert_eq!(open.seek(std::io::SeekFrom::End(0)).unwrap(), BYTES);
}

#[test]
fn io_nodes_carry_a_mount_and_replace_each_other() {
    let Some(cluster) = Cluster::with_io_nodes(Duration::from_secs(20), 2) else { return };
    let node = cluster.mount(MountOptions::default());
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(node.at("f")).unwrap();
    for part in 0..12u64 {
        if part == 4 {
            cluster.stop("io.0");
        }
        open.write_all_at(&pattern(part, 300_000), part * 300_000).unwrap();
    }
    let want: Vec<u8> = (0..12).flat_map(|part| pattern(part, 300_000)).collect();
    let got = fs::read(node.at("f")).unwrap();
    assert_eq!((got.len(), first_difference(&got, &want)), (want.len(), None));
    fs::rename(node.at("f"), node.at("g")).unwrap();
    open.sync_all().unwrap();
    assert!(cluster.mount(MountOptions::default()).at("g").exists());
}

#[test]
fn replaced_all_the_time_elsewhere() {
    let Some((one, two)) = two_nodes() else { return };
    let content = |i: u64| format!("{i} ").repeat(1 + 700 * (i as usize % 4));
    fs::write(one.at("f"), content(0)).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut seen, mut reads) = (0, 0);
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let text = fs::read_to_string(two.at("f")).unwrap();
                let now: u64 = text.split(' ').next().unwrap().parse().unwrap();
                assert_eq!(text, content(now), "whole");
                assert!(now >= seen, "{now} after {seen}");
                (seen, reads) = (now, reads + 1);
            }
            reads
        });
        for i in 1..300 {
            fs::write(one.at("next"), content(i)).unwrap();
            fs::rename(one.at("next"), one.at("f")).unwrap();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(reader.join().unwrap() > 20);
    });
    assert_eq!(fs::read_to_string(two.at("f")).unwrap(), content(299));
}
