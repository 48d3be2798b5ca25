//! The space that files take: `fallocate`, holes, blocks used.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use impresario_base::random::Random;
use impresario_fuse::MountOptions;
use impresario_testing::content::{first_difference, is_zero};
use impresario_testing::until;
use impresario_wire::{SeekTo, SpaceChange};

use crate::cluster::{Cluster, Node, errno, mounted};
use crate::files::pattern;
use crate::tools::run;

const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;

fn fallocate(file: &File, mode: i32, offset: i64, len: i64) -> io::Result<()> {
    // SAFETY: a plain call on an open descriptor.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn seek(file: &File, from: u64, whence: i32) -> Option<u64> {
    // SAFETY: as above.
    u64::try_from(unsafe { libc::lseek(file.as_raw_fd(), from as i64, whence) }).ok()
}

fn create(path: impl AsRef<Path>) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap()
}

fn used(path: impl AsRef<Path>) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// An open file, as a program or as a client's own program has it.
trait Target {
    fn write(&self, bytes: &[u8], offset: u64);
    fn change(&self, change: SpaceChange, offset: u64, len: u64);
    fn set_len(&self, len: u64);
    fn content(&self) -> Vec<u8>;
    fn seek(&self, from: u64, to: SeekTo) -> Option<u64>;
}

impl Target for File {
    fn write(&self, bytes: &[u8], offset: u64) {
        self.write_all_at(bytes, offset).unwrap();
    }

    fn change(&self, change: SpaceChange, offset: u64, len: u64) {
        let keeps = |keep_size| if keep_size { KEEP } else { 0 };
        let mode = match change {
            SpaceChange::Allocate { keep_size } => keeps(keep_size),
            SpaceChange::Punch => PUNCH,
            SpaceChange::Zero { keep_size } => ZERO | keeps(keep_size),
        };
        fallocate(self, mode, offset as i64, len as i64).unwrap_or_else(|error| panic!("{change:?}: {error}"));
    }

    fn set_len(&self, len: u64) {
        self.set_len(len).unwrap();
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![1; self.metadata().unwrap().len() as usize];
        self.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn seek(&self, from: u64, to: SeekTo) -> Option<u64> {
        seek(self, from, if to == SeekTo::Data { libc::SEEK_DATA } else { libc::SEEK_HOLE })
    }
}

impl Target for impresario_client::File {
    fn write(&self, bytes: &[u8], offset: u64) {
        assert_eq!(self.write_at(bytes, offset).unwrap(), bytes.len());
    }

    fn change(&self, change: SpaceChange, offset: u64, len: u64) {
        self.change_space(change, offset, len).unwrap();
    }

    fn set_len(&self, len: u64) {
        self.set_len(len).unwrap();
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![1; self.attr().unwrap().size as usize];
        assert_eq!(self.read_at(&mut bytes, 0).unwrap(), bytes.len());
        bytes
    }

    fn seek(&self, from: u64, to: SeekTo) -> Option<u64> {
        self.seek(from, to).unwrap()
    }
}

/// Does the same random calls on both, and compares what they hold. Holes are compared with the bytes: they may be at
/// other places than in a local file, but hide nothing.
fn same_as_a_local_file(target: &dyn Target, steps: u64, seed: u64) {
    let local = tempfile::tempfile().unwrap();
    let mut random = Random::new(seed);
    for step in 0..steps {
        let place = |random: &mut Random| match random.below(3) {
            0 => random.below(12) * 65_536,
            1 => random.below(800_000),
            _ => random.below(200) * 4096,
        };
        let (offset, len) = (place(&mut random), 1 + random.below(300_000));
        let what = random.below(10);
        match what {
            0..4 => {
                let bytes = pattern(step, len as usize);
                target.write(&bytes, offset);
                Target::write(&local, &bytes, offset);
            }
            4 => {
                let to = place(&mut random);
                target.set_len(to);
                Target::set_len(&local, to);
            }
            _ => {
                let keep_size = random.below(2) == 0;
                let change = match what {
                    5 => SpaceChange::Allocate { keep_size },
                    6 => SpaceChange::Zero { keep_size },
                    _ => SpaceChange::Punch,
                };
                target.change(change, offset, len);
                local.change(change, offset, len);
            }
        }
        let (found, wanted) = (target.content(), local.content());
        assert_eq!(found.len(), wanted.len(), "seed {seed}, step {step}: length");
        assert_eq!(first_difference(&found, &wanted), None, "seed {seed}, step {step}: this byte differs");
        holes_hide_nothing(target, &wanted, offset);
    }
}

fn holes_hide_nothing(target: &dyn Target, content: &[u8], from: u64) {
    let end = content.len() as u64;
    let zeros = |range: std::ops::Range<u64>| is_zero(&content[range.start as usize..range.end as usize]);
    for from in [0, from].into_iter().filter(|from| *from < end) {
        let data = target.seek(from, SeekTo::Data);
        assert!(data.is_none_or(|at| (from..end).contains(&at)), "{data:?} from {from} of {end}");
        assert!(zeros(from..data.unwrap_or(end)), "data before {data:?} from {from}");
        let hole = target.seek(from, SeekTo::Hole).expect("the end is one");
        assert!((from..=end).contains(&hole), "{hole} from {from} of {end}");
        if hole < end {
            let next = target.seek(hole, SeekTo::Data).unwrap_or(end);
            assert!(next > hole && zeros(hole..next), "{hole} to {next} is no hole");
        }
    }
    assert_eq!(target.seek(end, SeekTo::Data), None);
    assert_eq!(target.seek(end, SeekTo::Hole), None);
}

/// Through a mount with and without the page cache, and through a client.
fn all_ways(cluster: &std::sync::Arc<Cluster>, seed: u64) {
    for (nth, direct_io) in [(0, false), (1, true)] {
        let node = cluster.mount_through(nth, MountOptions { direct_io, ..MountOptions::default() });
        same_as_a_local_file(&create(node.at(&format!("f{nth}"))), 60, seed + nth);
    }
    let client = cluster.client();
    let file = client.create("client", impresario_client::CreateOptions::default()).unwrap();
    same_as_a_local_file(&file, 80, seed + 2);
    file.close().unwrap();
}

#[test]
fn space_changes_as_in_a_local_file() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    all_ways(&cluster, 1);
}

#[test]
fn space_changes_as_in_a_local_file_through_io_nodes() {
    let Some(cluster) = Cluster::with_io_nodes(Duration::from_secs(20), 2) else { return };
    all_ways(&cluster, 11);
}

#[test]
fn space_of_a_folder_changes_as_in_a_local_file() {
    for split in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let Some(cluster) = Cluster::over(folder.path(), 2, |io| io.split = split) else { return };
        all_ways(&cluster, if split { 21 } else { 31 });
        let node = cluster.mount(MountOptions::default());
        let file = create(node.at("sparse"));
        file.set_len(1 << 20).unwrap();
        fallocate(&file, 0, 0, 256 << 10).unwrap();
        drop(file);
        let (here, there) = (used(node.at("sparse")), used(folder.path().join("sparse")));
        assert_eq!(here, there);
    }
}

#[test]
fn what_a_file_uses_is_what_its_objects_use() {
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions::default());
    const MIB: u64 = 1 << 20;
    let near = |found: u64, wanted: u64| found.abs_diff(wanted) <= wanted / 64 + 64 * 1024;
    let file = create(node.at("f"));
    file.set_len(64 * MIB).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 0);
    file.write_all_at(&pattern(1, 4 * MIB as usize), 32 * MIB).unwrap();
    file.sync_all().unwrap();
    drop(file);
    // Closed: the metadata server has the number, and no data server is asked.
    for node in [&node, &other] {
        assert!(near(used(node.at("f")), 4 * MIB), "{}", used(node.at("f")));
        assert!(near(node.stat_past_the_mount("f").used_bytes, 4 * MIB));
    }
    let listed = node.cluster().client().list("").unwrap();
    let listed = listed.into_iter().find(|entry| entry.name == b"f").unwrap();
    assert!(near(listed.attr.used_bytes, 4 * MIB), "{}", listed.attr.used_bytes);
    let file = OpenOptions::new().write(true).open(node.at("f")).unwrap();
    fallocate(&file, PUNCH, 33 * MIB as i64, 2 * MIB as i64).unwrap();
    assert!(near(file.metadata().unwrap().blocks() * 512, 2 * MIB));
    fallocate(&file, KEEP, 64 * MIB as i64, 8 * MIB as i64).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 64 * MIB);
    assert!(near(file.metadata().unwrap().blocks() * 512, 10 * MIB));
    drop(file);
    assert!(near(node.stat_past_the_mount("f").used_bytes, 10 * MIB));
    // With a second name, with other attributes set, and after it is full.
    fs::hard_link(node.at("f"), node.at("g")).unwrap();
    fs::set_permissions(node.at("f"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    assert!(near(used(node.at("f")), 10 * MIB) && near(node.stat_past_the_mount("g").used_bytes, 10 * MIB));
    fs::write(node.at("f"), pattern(2, 3 * MIB as usize)).unwrap();
    assert!(near(used(node.at("g")), 3 * MIB), "{}", used(node.at("g")));
    fs::write(node.at("f"), "").unwrap();
    assert_eq!(used(node.at("f")), 0);
}

#[test]
fn a_hole_is_seen_on_another_node_at_the_next_open() {
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions::default());
    let mut content = pattern(3, 700_000);
    fs::write(node.at("f"), &content).unwrap();
    assert!(fs::read(other.at("f")).unwrap() == content);
    let file = OpenOptions::new().write(true).open(node.at("f")).unwrap();
    fallocate(&file, PUNCH, 100_001, 300_000).unwrap();
    content[100_001..400_001].fill(0);
    assert!(fs::read(node.at("f")).unwrap() == content, "the node's own pages");
    drop(file);
    assert!(fs::read(other.at("f")).unwrap() == content);
}

#[test]
fn what_would_move_bytes_is_refused() {
    let Some(node) = mounted() else { return };
    let file = create(node.at("f"));
    file.write_all_at(&[1; 1 << 20], 0).unwrap();
    for mode in [libc::FALLOC_FL_COLLAPSE_RANGE, libc::FALLOC_FL_INSERT_RANGE] {
        assert_eq!(errno(fallocate(&file, mode, 0, 65_536)), libc::EOPNOTSUPP);
    }
    let reader = File::open(node.at("f")).unwrap();
    assert_eq!(errno(fallocate(&reader, 0, 0, 10)), libc::EBADF);
    assert_eq!(errno(fallocate(&file, 0, i64::MAX, 10)), libc::EFBIG);
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
}

/// A file with data, holes and zeros, the same at each path.
fn sparse(path: &Path) {
    let file = create(path);
    file.write_all_at(&pattern(5, 300_000), 100_000).unwrap();
    file.write_all_at(&[0; 500_000], 1_000_000).unwrap();
    file.write_all_at(&pattern(6, 70_001), 3_000_001).unwrap();
    file.set_len(5_000_000).unwrap();
}

#[test]
fn programs_make_and_keep_holes() {
    let Some(node) = mounted() else { return };
    let local = tempfile::tempdir().unwrap();
    let here = |name: &str| local.path().join(name);
    sparse(&here("f"));
    sparse(&node.at("f"));
    let same = |name: &str| {
        run(Command::new("cmp").arg(here(name)).arg(node.at(name)));
        // The objects are local files, too. Their holes have the same blocks, more or less: programs look for zeros in steps
        // of the preferred request size, which is larger here.
        let (local, ours) = (used(here(name)), used(node.at(name)));
        assert!(local.abs_diff(ours) <= 512 << 10, "{name}: {ours} bytes used, {local} in a local folder");
        ours
    };
    same("f");
    for way in ["always", "auto"] {
        let copy = format!("cp-{way}");
        for dir in [local.path(), node.mount_point()] {
            run(Command::new("cp").arg(format!("--sparse={way}")).args(["f", &copy]).current_dir(dir));
        }
        assert!(same(&copy) < 1_500_000);
    }
    for dir in [local.path(), node.mount_point()] {
        let program = |name: &str, arguments: &[&str]| run(Command::new(name).args(arguments).current_dir(dir));
        program("fallocate", &["-l", "3MiB", "new"]);
        program("fallocate", &["-p", "-o", "1MiB", "-l", "512KiB", "new"]);
        program("fallocate", &["-z", "-n", "-o", "2MiB", "-l", "4MiB", "new"]);
        program("truncate", &["-s", "20M", "new"]);
        program("cp", &["--sparse=never", "f", "dug"]);
        program("fallocate", &["--dig-holes", "dug"]);
        program("tar", &["-cSf", "archive", "f", "new"]);
        program("mkdir", &["unpacked"]);
        program("tar", &["-xSf", "archive", "-C", "unpacked"]);
    }
    for name in ["new", "dug", "unpacked/f", "unpacked/new"] {
        same(name);
    }
    let du = |path: &Path| {
        let said = run(Command::new("du").args(["-B1", "--apparent-size"]).arg(path)).stdout;
        let used = run(Command::new("du").arg("-B1").arg(path)).stdout;
        [said, used]
            .map(|text| String::from_utf8_lossy(&text).split_whitespace().next().unwrap().parse::<u64>().unwrap())
    };
    let [len, used] = du(&node.at("new"));
    assert!(len == 20 << 20 && used < 7 << 20, "du says {used} of {len}");
    if impresario_testing::require("rsync") {
        let to = |from: &Path, to: &Path| run(Command::new("rsync").args(["-aS", "--inplace"]).arg(from).arg(to));
        to(&node.at("f"), &here("back"));
        to(&here("f"), &node.at("back"));
        assert!(same("back") < 1_500_000);
    }
}

/// A data server whose folder is a file system of its own.
fn with_a_small_server(size: &str) -> Option<(Small, Node)> {
    if !impresario_testing::require("root") {
        return None;
    }
    let cluster = Cluster::start(Duration::from_secs(20))?;
    let folder = cluster.data_folder(1);
    cluster.stop_data_server(1);
    // What the folder has must be there still.
    let kept = tempfile::tempdir().unwrap();
    run(Command::new("cp").arg("-a").arg(folder.join(".")).arg(kept.path()));
    run(Command::new("mount").args(["-t", "tmpfs", "-o", size, "small"]).arg(&folder));
    let small = Small { folder: folder.clone(), cluster: cluster.clone() };
    run(Command::new("cp").arg("-a").arg(kept.path().join(".")).arg(&folder));
    cluster.start_data_server(1);
    Some((small, cluster.mount(MountOptions::default())))
}

struct Small {
    folder: std::path::PathBuf,
    cluster: std::sync::Arc<Cluster>,
}

impl Drop for Small {
    fn drop(&mut self) {
        self.cluster.stop_data_server(1);
        // A process that another test has just forked may have the data server's files open still.
        let unmount = || Command::new("umount").arg(&self.folder).status().is_ok_and(|status| status.success());
        if std::thread::panicking() {
            unmount();
        } else {
            until("the file system of the data server is unmounted", unmount);
        }
    }
}

#[test]
fn allocation_of_more_than_there_is_fails_and_leaves_the_length() {
    let Some((_small, node)) = with_a_small_server("size=4m") else { return };
    let file = create(node.at("f"));
    file.write_all_at(&pattern(1, 100_000), 0).unwrap();
    for mode in [0, KEEP, ZERO] {
        assert_eq!(errno(fallocate(&file, mode, 200_000, 64 << 20)), libc::ENOSPC);
        assert_eq!(file.metadata().unwrap().len(), 100_000);
        assert_eq!(node.stat_past_the_mount("f").size, 100_000);
    }
    fallocate(&file, PUNCH, 200_000, 64 << 20).unwrap();
    fallocate(&file, 0, 0, 2 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 2 << 20);
    let mut start = vec![0; 100_000];
    file.read_exact_at(&mut start, 0).unwrap();
    assert!(start == pattern(1, 100_000));
}

#[test]
fn a_write_that_fails_half_way_is_short_and_makes_the_file_no_longer() {
    let Some((_small, node)) = with_a_small_server("size=2m") else { return };
    for (name, direct_io) in [("f", false), ("direct", true)] {
        let node = node.second(MountOptions { direct_io, ..MountOptions::default() });
        let file = create(node.at(name));
        let bytes = pattern(8, 16 << 20);
        let mut written = 0;
        let error = loop {
            match file.write_at(&bytes[written..], written as u64) {
                Ok(more) => written += more,
                Err(error) => break error,
            }
        };
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert!((1 << 20..12 << 20).contains(&written), "{written}");
        assert_eq!(file.metadata().unwrap().len(), written as u64);
        assert_eq!(node.stat_past_the_mount(name).size, written as u64);
        file.sync_all().unwrap();
        drop(file);
        let other = node.second(MountOptions::default());
        assert!(fs::read(other.at(name)).unwrap() == bytes[..written]);
        fs::remove_file(node.at(name)).unwrap();
        until("the space comes back", || node.cluster().objects().is_empty());
    }
    // As a program sees it.
    let local = tempfile::tempdir().unwrap();
    fs::write(local.path().join("f"), pattern(9, 16 << 20)).unwrap();
    let copied = Command::new("cp").arg(local.path().join("f")).arg(node.at("copy")).output().unwrap();
    assert!(String::from_utf8_lossy(&copied.stderr).contains("No space left on device"));
    let copy = fs::read(node.at("copy")).unwrap();
    assert!(!copy.is_empty() && copy == pattern(9, 16 << 20)[..copy.len()]);
}
