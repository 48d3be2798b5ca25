//! Names, attributes and missing entries.

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use impresario_fuse::MountOptions;
use impresario_testing::require;
use rustix::fs::{AtFlags, StatxFlags};

use crate::cluster::{Node, errno, mounted, mounted_with, six_at_once};

pub fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn renameat2(from: &Path, to: &Path, flags: u32) -> std::io::Result<()> {
    let (from, to) = (c_path(from), c_path(to));
    // SAFETY: terminated strings that live over the call.
    match unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[test]
fn rename_over_an_open_file() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("old"), "old content").unwrap();
    fs::write(node.at("new"), "new").unwrap();
    let mut old = OpenOptions::new().read(true).write(true).open(node.at("old")).unwrap();
    let new = File::open(node.at("new")).unwrap();
    fs::rename(node.at("new"), node.at("old")).unwrap();
    assert!(!node.at("new").exists());
    assert_eq!(fs::read_to_string(node.at("old")).unwrap(), "new");
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!(text, "old content");
    old.write_all(b"!").unwrap();
    assert_eq!(old.metadata().unwrap().len(), 12);
    assert_eq!(new.metadata().unwrap().ino(), fs::metadata(node.at("old")).unwrap().ino());
    assert_eq!(fs::read_to_string(node.at("old")).unwrap(), "new");
}

#[test]
fn rename_is_atomic() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("f"), "0").unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0u32;
            while !done.load(Relaxed) {
                let now: u32 = fs::read_to_string(node.at("f")).unwrap().parse().unwrap();
                assert!(now >= seen, "{now} after {seen}");
                seen = now;
            }
            seen
        });
        for i in 1..200 {
            fs::write(node.at("next"), i.to_string()).unwrap();
            fs::rename(node.at("next"), node.at("f")).unwrap();
        }
        done.store(true, Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(fs::read_to_string(node.at("f")).unwrap(), "199");
}

#[test]
fn rename_flags() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("a"), "a").unwrap();
    fs::write(node.at("b"), "b").unwrap();
    let refused = |flags, what| assert_eq!(errno(renameat2(&node.at("a"), &node.at("b"), flags)), what);
    refused(libc::RENAME_NOREPLACE, libc::EEXIST);
    refused(libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE, libc::EEXIST);
    refused(libc::RENAME_WHITEOUT | libc::RENAME_EXCHANGE, libc::EINVAL);
    refused(libc::RENAME_EXCHANGE | libc::RENAME_NOREPLACE, libc::EINVAL);
    assert_eq!(fs::read_to_string(node.at("b")).unwrap(), "b");
    renameat2(&node.at("a"), &node.at("c"), libc::RENAME_NOREPLACE).unwrap();
    assert_eq!(fs::read_to_string(node.at("c")).unwrap(), "a");
    fs::create_dir_all(node.at("full/inside")).unwrap();
    fs::create_dir(node.at("dir")).unwrap();
    assert_eq!(errno(fs::rename(node.at("dir"), node.at("full"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::rename(node.at("full"), node.at("full/inside/deeper"))), libc::EINVAL);
    assert_eq!(errno(fs::rename(node.at("c"), node.at("dir"))), libc::EISDIR);
}

#[test]
fn a_whiteout_is_left_where_something_was() {
    use std::os::unix::fs::FileTypeExt;
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions { cache_time: std::time::Duration::ZERO, ..MountOptions::default() });
    fs::create_dir_all(node.at("d/e")).unwrap();
    fs::write(node.at("d/e/f"), "below").unwrap();
    fs::write(node.at("a"), "one").unwrap();
    fs::write(node.at("b"), "two").unwrap();
    let leave = |a: &str, b: &str, more| renameat2(&node.at(a), &node.at(b), libc::RENAME_WHITEOUT | more);
    let is_left = |name: &str| {
        for node in [&node, &other] {
            let left = fs::symlink_metadata(node.at(name)).unwrap();
            assert!(left.file_type().is_char_device() && left.rdev() == 0 && left.nlink() == 1, "{name}: {left:?}");
        }
    };
    let mut open = OpenOptions::new().append(true).open(node.at("a")).unwrap();
    leave("a", "c", libc::RENAME_NOREPLACE).unwrap();
    is_left("a");
    open.write_all(b" more").unwrap();
    assert_eq!(fs::read_to_string(other.at("c")).unwrap(), "one more");
    leave("c", "b", 0).unwrap();
    is_left("c");
    assert_eq!(fs::read_to_string(node.at("b")).unwrap(), "one more");
    leave("d", "moved", 0).unwrap();
    is_left("d");
    assert_eq!(fs::read_to_string(node.at("moved/e/f")).unwrap(), "below");
    // Names of one file: nothing is done.
    fs::hard_link(node.at("b"), node.at("b.2")).unwrap();
    leave("b", "b.2", 0).unwrap();
    assert_eq!(fs::read_to_string(node.at("b")).unwrap(), "one more");
    assert_eq!(errno(leave("none", "x", 0)), libc::ENOENT);
    // What is left is replaced and removed like anything else.
    fs::rename(node.at("b"), node.at("a")).unwrap();
    assert_eq!(fs::read_to_string(other.at("a")).unwrap(), "one more");
    fs::remove_file(node.at("c")).unwrap();
    fs::remove_file(node.at("d")).unwrap();
    fs::create_dir(node.at("d")).unwrap();
}

#[test]
fn names_are_exchanged() {
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions::default());
    fs::create_dir_all(node.at("d/e")).unwrap();
    fs::write(node.at("d/e/f"), "below").unwrap();
    fs::write(node.at("a"), "one").unwrap();
    fs::write(node.at("b"), "two").unwrap();
    let exchange = |a: &str, b: &str| renameat2(&node.at(a), &node.at(b), libc::RENAME_EXCHANGE);
    let mut open = OpenOptions::new().append(true).open(node.at("a")).unwrap();
    exchange("a", "b").unwrap();
    open.write_all(b" and more").unwrap();
    assert_eq!(fs::read_to_string(node.at("a")).unwrap(), "two");
    assert_eq!(fs::read_to_string(node.at("b")).unwrap(), "one and more");
    // A file and a directory with what is below it, in use.
    let mut below = OpenOptions::new().append(true).open(node.at("d/e/f")).unwrap();
    exchange("b", "d/e").unwrap();
    below.write_all(b" still").unwrap();
    assert_eq!(fs::read_to_string(node.at("b/f")).unwrap(), "below still");
    assert_eq!(fs::read_to_string(node.at("d/e")).unwrap(), "one and more");
    assert_eq!(fs::read_to_string(other.at("b/f")).unwrap(), "below still");
    assert_eq!(errno(exchange("b", "b/f")), libc::EINVAL);
    assert_eq!(errno(exchange("a", "none")), libc::ENOENT);
    fs::hard_link(node.at("a"), node.at("c")).unwrap();
    exchange("a", "c").unwrap();
    assert_eq!(fs::read_to_string(node.at("a")).unwrap(), "two");
}

/// A name always means one of the two, and each once, whoever looks when.
#[test]
fn an_exchange_is_one_step() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("a"), "0").unwrap();
    fs::write(node.at("b"), "1").unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !done.load(Relaxed) {
                assert!(["0", "1"].contains(&fs::read_to_string(node.at("a")).unwrap().as_str()));
            }
        });
        for _ in 0..201 {
            renameat2(&node.at("a"), &node.at("b"), libc::RENAME_EXCHANGE).unwrap();
        }
        done.store(true, Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(fs::read_to_string(node.at("a")).unwrap(), "1", "an odd number of times");
}

#[test]
fn only_one_makes_it() {
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions::default());
    for round in 0..10 {
        let made = six_at_once([&node, &other], |node, _| {
            let made = OpenOptions::new().write(true).create_new(true).open(node.at(&format!("lock{round}")));
            made.map_err(|error| assert_eq!(error.kind(), ErrorKind::AlreadyExists)).is_ok()
        });
        assert_eq!(made.into_iter().filter(|made| *made).count(), 1);
        // Without exclusive creation, every caller succeeds.
        six_at_once([&node, &other], |node, _| {
            OpenOptions::new().append(true).create(true).open(node.at(&format!("shared{round}"))).unwrap();
        });
    }
}

#[test]
fn names_are_bytes() {
    let Some(node) = mounted() else { return };
    let long = "n".repeat(255);
    let names: [&[u8]; 7] =
        [b"plain", b"\xff\xfe\x01", "grüße 世界".as_bytes(), b"new\nline", b"-rf", b"a b'c\"d", long.as_bytes()];
    for name in names {
        fs::write(node.mount_point().join(OsStr::from_bytes(name)), name).unwrap();
    }
    let listed: BTreeSet<Vec<u8>> =
        fs::read_dir(node.mount_point()).unwrap().map(|e| e.unwrap().file_name().as_bytes().to_vec()).collect();
    assert_eq!(listed, names.iter().map(|name| name.to_vec()).collect());
    for name in names {
        assert_eq!(fs::read(node.mount_point().join(OsStr::from_bytes(name))).unwrap(), name);
    }
    assert_eq!(errno(fs::write(node.at(&"n".repeat(256)), "")), libc::ENAMETOOLONG);
}

#[test]
fn a_directory_of_2000_names() {
    let Some(node) = mounted() else { return };
    fs::create_dir(node.at("big")).unwrap();
    let want: BTreeSet<String> = (0..2000).map(|i| format!("file-{i:04}{}", "x".repeat(i % 40))).collect();
    for name in &want {
        File::create(node.at("big").join(name)).unwrap();
    }
    let list = || -> Vec<String> {
        fs::read_dir(node.at("big")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    };
    let listed = list();
    assert_eq!(listed.len(), 2000, "each once");
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), want);
    let shown = Command::new("ls").arg("-lU").arg(node.at("big")).output().unwrap();
    assert_eq!(String::from_utf8(shown.stdout).unwrap().lines().count(), 2001);
    fs::remove_dir_all(node.at("big")).unwrap();
    assert!(!node.at("big").exists());
}

#[test]
fn listing_while_removing() {
    let Some(node) = mounted() else { return };
    fs::create_dir(node.at("d")).unwrap();
    for i in 0..1500 {
        File::create(node.at(&format!("d/{i:05}"))).unwrap();
    }
    // Every other name is removed during the listing, and new ones are added.
    let mut seen = Vec::new();
    for (i, entry) in fs::read_dir(node.at("d")).unwrap().enumerate() {
        seen.push(entry.unwrap().file_name().into_string().unwrap());
        if i % 10 == 0 && i < 1500 {
            for victim in (i..i + 20).filter(|n| n % 2 == 1) {
                let _ = fs::remove_file(node.at(&format!("d/{:05}", 1499 - victim % 1500)));
            }
            File::create(node.at(&format!("d/new{i}"))).unwrap();
        }
    }
    let stayed: BTreeSet<String> = fs::read_dir(node.at("d"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("new"))
        .collect();
    let old: Vec<&String> = seen.iter().filter(|name| !name.starts_with("new")).collect();
    let unique: BTreeSet<&String> = old.iter().copied().collect();
    assert_eq!(old.len(), unique.len(), "nothing twice");
    assert!(stayed.len() < 1400 && stayed.iter().all(|name| unique.contains(name)), "nothing that stayed is missing");
}

#[test]
fn symbolic_links() {
    let Some(node) = mounted() else { return };
    fs::create_dir(node.at("d")).unwrap();
    fs::write(node.at("d/f"), "text").unwrap();
    symlink("d/f", node.at("link")).unwrap();
    symlink("/nowhere/at all", node.at("broken")).unwrap();
    symlink("loop", node.at("loop")).unwrap();
    symlink("d", node.at("dir")).unwrap();
    let long = "t/".repeat(2000);
    symlink(&long, node.at("long")).unwrap();
    assert_eq!(fs::read_to_string(node.at("link")).unwrap(), "text");
    assert_eq!(fs::read_to_string(node.at("dir/f")).unwrap(), "text");
    assert_eq!(fs::read_link(node.at("broken")).unwrap(), Path::new("/nowhere/at all"));
    assert_eq!(fs::read_link(node.at("long")).unwrap(), Path::new(&long));
    assert_eq!(errno(fs::read(node.at("broken"))), libc::ENOENT);
    assert_eq!(errno(fs::read(node.at("loop"))), libc::ELOOP);
    assert!(fs::symlink_metadata(node.at("link")).unwrap().is_symlink());
    assert_eq!(fs::symlink_metadata(node.at("link")).unwrap().len(), 3);
    fs::remove_file(node.at("link")).unwrap();
    assert_eq!(fs::read_to_string(node.at("d/f")).unwrap(), "text");
}

#[test]
fn moving_a_directory_with_open_files_below() {
    let Some(node) = mounted() else { return };
    fs::create_dir_all(node.at("a/b/c")).unwrap();
    fs::write(node.at("a/b/c/f"), "one").unwrap();
    let mut open = OpenOptions::new().append(true).open(node.at("a/b/c/f")).unwrap();
    let directory = File::open(node.at("a/b/c")).unwrap();
    fs::rename(node.at("a/b"), node.at("moved")).unwrap();
    open.write_all(b" two").unwrap();
    assert_eq!(open.metadata().unwrap().len(), 7);
    assert_eq!(fs::read_to_string(node.at("moved/c/f")).unwrap(), "one two");
    assert!(!node.at("a/b").exists());
    assert!(directory.metadata().unwrap().is_dir(), "an open directory moves along");
    directory.sync_all().unwrap();
    // An open file never sees an error while a directory above it is renamed back and forth.
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                open.metadata().unwrap();
                directory.metadata().unwrap();
            }
        });
        for _ in 0..50 {
            fs::rename(node.at("moved"), node.at("a/away")).unwrap();
            fs::rename(node.at("a/away"), node.at("moved")).unwrap();
        }
        done.store(true, Relaxed);
    });
}

#[test]
fn inode_numbers_are_stable() {
    let Some(node) = mounted() else { return };
    let numbers = || -> Vec<u64> { (0..50).map(|i| fs::metadata(node.at(&format!("{i}"))).unwrap().ino()).collect() };
    for i in 0..50 {
        File::create(node.at(&format!("{i}"))).unwrap();
    }
    let first = numbers();
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 50);
    // Make the kernel forget them and ask again.
    let _cache = impresario_testing::page_cache::emptied();
    let _ = fs::write("/proc/sys/vm/drop_caches", "2");
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(numbers(), first);
    fs::rename(node.at("7"), node.at("renamed")).unwrap();
    assert_eq!(fs::metadata(node.at("renamed")).unwrap().ino(), first[7]);
}

#[test]
fn directories_can_be_synced() {
    let Some(node) = mounted() else { return };
    fs::create_dir(node.at("d")).unwrap();
    fs::write(node.at("d/f"), "x").unwrap();
    File::open(node.at("d")).unwrap().sync_all().unwrap();
    File::open(node.mount_point()).unwrap().sync_all().unwrap();
    let removed = File::open(node.at("d")).unwrap();
    fs::remove_dir_all(node.at("d")).unwrap();
    removed.sync_all().unwrap();
}

#[test]
fn attributes_are_kept() {
    let Some(node) = mounted() else { return };
    let time = |secs, nanos| std::time::UNIX_EPOCH + Duration::new(secs, nanos);
    let mut file = File::create(node.at("f")).unwrap();
    file.write_all(b"written before").unwrap();
    let (accessed, modified) = (time(1_000_000_000, 123_456_789), time(1_234_567_890, 987_654_321));
    file.set_times(fs::FileTimes::new().set_accessed(accessed).set_modified(modified)).unwrap();
    file.set_permissions(Permissions::from_mode(0o1640)).unwrap();
    drop(file);
    std::thread::sleep(Duration::from_millis(100));
    let fresh = node.second(MountOptions::default());
    for seen in [fs::metadata(node.at("f")).unwrap(), fs::metadata(fresh.at("f")).unwrap()] {
        assert_eq!((seen.accessed().unwrap(), seen.modified().unwrap()), (accessed, modified));
        assert_eq!((seen.mode() & 0o7777, seen.len(), seen.nlink()), (0o1640, 14, 1));
    }
    if !require("root") {
        return;
    }
    chown(node.at("f"), Some(1234), Some(2345)).unwrap();
    let seen = fs::metadata(node.at("f")).unwrap();
    assert_eq!((seen.uid(), seen.gid()), (1234, 2345));
    chown(node.at("f"), None, Some(7)).unwrap();
    assert_eq!(node.stat_past_the_mount("f").gid, 7);
    assert_eq!(node.stat_past_the_mount("f").uid, 1234);
    fs::create_dir(node.at("d")).unwrap();
    fs::set_permissions(node.at("d"), Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(fs::metadata(node.at("d")).unwrap().mode() & 0o7777, 0o1777);
    symlink("f", node.at("l")).unwrap();
    std::os::unix::fs::lchown(node.at("l"), Some(99), None).unwrap();
    assert_eq!(fs::symlink_metadata(node.at("l")).unwrap().uid(), 99);
    assert_eq!(fs::metadata(node.at("f")).unwrap().uid(), 1234);
}

/// Sets times of a file and a directory before and around 1970, with and without fractions, and compares what two nodes
/// and a local folder show.
pub fn times_are_exact(node: &Node, fresh: &Node) {
    let local = tempfile::tempdir().unwrap();
    let times =
        [(-1, 250_000_000), (-1, 999_999_999), (-1, 0), (-2, 1), (-86_400, 500), (-1_000_000_000, 123_456_789), (0, 1)];
    for (i, (secs, nanos)) in times.into_iter().enumerate() {
        let at = |offset: i64| libc::timespec { tv_sec: secs + offset, tv_nsec: nanos };
        let names = [format!("old.{i}"), format!("old directory.{i}"), format!("old link.{i}")];
        for folder in [local.path(), node.mount_point()] {
            fs::write(folder.join(&names[0]), "text").unwrap();
            fs::create_dir(folder.join(&names[1])).unwrap();
            symlink("nowhere", folder.join(&names[2])).unwrap();
            for name in &names {
                let (path, times) = (c_path(&folder.join(name)), [at(-5), at(0)]);
                // SAFETY: a terminated string and two times that live over the call.
                let set = unsafe {
                    libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), libc::AT_SYMLINK_NOFOLLOW)
                };
                assert_eq!(set, 0, "{:?}", std::io::Error::last_os_error());
            }
        }
        for name in &names {
            for folder in [local.path(), node.mount_point(), fresh.mount_point()] {
                let seen = fs::symlink_metadata(folder.join(name)).unwrap();
                let seen = (seen.atime(), seen.atime_nsec(), seen.mtime(), seen.mtime_nsec());
                assert_eq!(seen, (secs - 5, nanos, secs, nanos), "{name} in {folder:?}");
            }
        }
    }
}

#[test]
fn times_before_1970_are_exact() {
    let Some(node) = mounted() else { return };
    times_are_exact(&node, &node.second(MountOptions::default()));
}

/// Runs a shell command as another user.
pub fn as_user(uid: u32, command: &str, path: &Path) -> bool {
    Command::new("sh")
        .arg("-c")
        .arg(command)
        .arg("sh")
        .arg(path)
        .uid(uid)
        .gid(uid)
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap()
        .success()
}

#[test]
fn permissions_are_checked() {
    if !require("root") {
        return;
    }
    let Some(node) = mounted_with(MountOptions { allow_other: true, ..Default::default() }) else { return };
    node.open_the_way();
    fs::write(node.at("f"), "secret").unwrap();
    fs::set_permissions(node.at("f"), Permissions::from_mode(0o640)).unwrap();
    assert!(!as_user(4321, "cat \"$1\"", &node.at("f")));
    chown(node.at("f"), None, Some(4321)).unwrap();
    assert!(as_user(4321, "cat \"$1\" > /dev/null", &node.at("f")));
    assert!(!as_user(4321, "echo x >> \"$1\"", &node.at("f")));
    fs::create_dir(node.at("d")).unwrap();
    assert!(!as_user(4321, "touch \"$1/new\"", &node.at("d")));
    fs::set_permissions(node.at("d"), Permissions::from_mode(0o1777)).unwrap();
    assert!(as_user(4321, "umask 027; echo hi > \"$1/theirs\"", &node.at("d")));
    let theirs = fs::metadata(node.at("d/theirs")).unwrap();
    assert_eq!((theirs.uid(), theirs.gid(), theirs.mode() & 0o777), (4321, 4321, 0o640));
    assert!(!as_user(5432, "rm -f \"$1/theirs\"", &node.at("d")), "the sticky bit");
    assert!(node.at("d/theirs").exists());
    let root_only = node.second(MountOptions::default());
    assert!(!as_user(4321, "ls \"$1\"", root_only.mount_point()), "without allow_other other users are refused");
}

#[test]
fn set_user_id_goes_on_write() {
    if !require("root") {
        return;
    }
    // Also where the kernel keeps locks to itself.
    for shared_locks in [true, false] {
        let Some(node) = mounted_with(MountOptions { allow_other: true, shared_locks, ..Default::default() }) else {
            return;
        };
        node.open_the_way();
        let mode = || node.stat_past_the_mount("f").mode & 0o7777;
        let set = || {
            fs::write(node.at("f"), "program").unwrap();
            fs::set_permissions(node.at("f"), Permissions::from_mode(0o6777)).unwrap();
            assert_eq!(mode(), 0o6777);
        };
        // What the node itself shows, at once, to a program that asks for nothing else.
        let shown = || {
            let asked = rustix::fs::statx(rustix::fs::CWD, node.at("f"), AtFlags::empty(), StatxFlags::MODE).unwrap();
            u32::from(asked.stx_mode) & 0o7777
        };
        set();
        OpenOptions::new().append(true).open(node.at("f")).unwrap().write_all(b"x").unwrap();
        assert_eq!((mode(), shown()), (0o6777, 0o6777), "root may");
        for (how, script) in [
            ("by appending", "echo x >> \"$1\""),
            ("by writing", "echo x 1<> \"$1\""),
            ("by allocating", "fallocate -l 99 \"$1\""),
            ("by an open that truncates", ": > \"$1\""),
            ("by truncating", "truncate -s 3 \"$1\""),
        ] {
            set();
            assert_eq!(shown(), 0o6777);
            assert!(as_user(4321, script, &node.at("f")), "{how}");
            assert_eq!((mode(), shown()), (0o777, 0o777), "{how}");
        }
        set();
        assert_eq!(shown(), 0o6777);
        chown(node.at("f"), Some(4321), None).unwrap();
        assert_eq!((mode(), shown()), (0o777, 0o777), "by changing the owner");
    }
}

/// What this node knows of the mode may be old: the write takes set-user-id, and nothing else is set by it.
#[test]
fn a_write_that_takes_set_user_id_leaves_the_rights_that_another_node_has_set() {
    if !require("root") {
        return;
    }
    let cache_time = Duration::from_secs(60);
    let Some(node) = mounted_with(MountOptions { allow_other: true, cache_time, ..Default::default() }) else { return };
    node.open_the_way();
    fs::write(node.at("f"), "program").unwrap();
    fs::set_permissions(node.at("f"), Permissions::from_mode(0o4666)).unwrap();
    let mut writer = Command::new("sh")
        .args(["-c", "exec 3<>\"$1\"; echo open; read go; echo x >&3", "sh"])
        .arg(node.at("f"))
        .uid(4321)
        .gid(4321)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut open = [0; 5];
    writer.stdout.as_mut().unwrap().read_exact(&mut open).unwrap();
    let other = node.second(MountOptions::default());
    fs::set_permissions(other.at("f"), Permissions::from_mode(0o4600)).unwrap();
    writer.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    assert!(writer.wait().unwrap().success());
    assert_eq!(node.stat_past_the_mount("f").mode & 0o7777, 0o600);
}

#[test]
fn a_set_group_id_bit_without_execution_stays_only_for_members_of_the_group() {
    if !require("root") {
        return;
    }
    let Some(node) = mounted_with(MountOptions { allow_other: true, ..Default::default() }) else { return };
    node.open_the_way();
    let set = |group| {
        fs::write(node.at("f"), "data").unwrap();
        chown(node.at("f"), Some(0), Some(group)).unwrap();
        fs::set_permissions(node.at("f"), Permissions::from_mode(0o6666)).unwrap();
    };
    let mode = || node.stat_past_the_mount("f").mode & 0o7777;
    for change in
        ["echo x >> \"$1\"", "echo x 1<> \"$1\"", "fallocate -l 99 \"$1\"", ": > \"$1\"", "truncate -s 3 \"$1\""]
    {
        for (group, left) in [(4322, 0o666), (4321, 0o2666)] {
            set(group);
            assert!(as_user(4321, change, &node.at("f")));
            assert_eq!(mode(), left, "{change} in a file of group {group}");
        }
    }
    // Not the group of the process, but one of its further ones.
    set(4322);
    let change = "setpriv --reuid=4321 --regid=4321 --groups=4322 sh -c 'echo x >> \"$1\"' sh \"$1\"";
    assert!(as_user(0, change, &node.at("f")));
    assert_eq!(mode(), 0o2666);
}

#[test]
fn a_removed_directory_that_is_open_has_attributes() {
    let Some(node) = mounted_with(MountOptions { cache_time: std::time::Duration::ZERO, ..Default::default() }) else {
        return;
    };
    fs::create_dir(node.at("d")).unwrap();
    fs::set_permissions(node.at("d"), Permissions::from_mode(0o751)).unwrap();
    let open = File::open(node.at("d")).unwrap();
    let before = open.metadata().unwrap();
    fs::remove_dir(node.at("d")).unwrap();
    let after = open.metadata().unwrap();
    assert_eq!((after.ino(), after.mode(), after.nlink()), (before.ino(), before.mode(), 0));
    fs::create_dir(node.at("d")).unwrap();
    assert!(fs::metadata(node.at("d")).unwrap().nlink() > 0, "another one, perhaps of the same number");
    assert_eq!(open.metadata().unwrap().nlink(), 0);
}

#[test]
fn set_group_id_directories() {
    if !require("root") {
        return;
    }
    let Some(node) = mounted() else { return };
    fs::create_dir(node.at("d")).unwrap();
    chown(node.at("d"), None, Some(777)).unwrap();
    fs::set_permissions(node.at("d"), Permissions::from_mode(0o2775)).unwrap();
    File::create(node.at("d/f")).unwrap();
    fs::create_dir(node.at("d/sub")).unwrap();
    symlink("f", node.at("d/l")).unwrap();
    let of = |name: &str| fs::symlink_metadata(node.at(name)).unwrap();
    assert_eq!((of("d/f").gid(), of("d/l").gid()), (777, 777));
    assert_eq!((of("d/sub").gid(), of("d/sub").mode() & libc::S_ISGID), (777, libc::S_ISGID));
}

#[test]
fn reading_leaves_the_access_time() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("f"), "text").unwrap();
    let long_ago = std::time::UNIX_EPOCH + Duration::from_secs(1000);
    File::options()
        .write(true)
        .open(node.at("f"))
        .unwrap()
        .set_times(fs::FileTimes::new().set_accessed(long_ago))
        .unwrap();
    fs::read(node.at("f")).unwrap();
    assert_eq!(fs::metadata(node.at("f")).unwrap().accessed().unwrap(), long_ago);
}

#[test]
fn totals() {
    let Some(node) = mounted() else { return };
    let look = |path: &Path| {
        let path = c_path(path);
        // SAFETY: a terminated string and a structure of the right size, both alive over the call.
        unsafe {
            let mut seen: libc::statvfs = std::mem::zeroed();
            assert_eq!(libc::statvfs(path.as_ptr(), &mut seen), 0);
            seen
        }
    };
    let seen = look(node.mount_point());
    assert_eq!(seen.f_namemax, 255);
    // All data servers store on one file system.
    let (below, bytes) = (look(&node.cluster().data_folder(0)), |seen: &libc::statvfs| seen.f_blocks * seen.f_frsize);
    assert!(bytes(&below) - bytes(&seen) < seen.f_frsize, "{} of {}", bytes(&seen), bytes(&below));
    assert!(seen.f_blocks > 0 && seen.f_bavail <= seen.f_blocks);
    assert!(Command::new("df").arg(node.mount_point()).output().unwrap().status.success());
}

pub fn get_xattr(path: &Path, name: &str) -> std::io::Result<String> {
    let (path, name, mut value) = (c_path(path), CString::new(name).unwrap(), [0u8; 256]);
    // SAFETY: terminated strings and a buffer of the length given.
    match unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) } {
        len @ 0.. => Ok(String::from_utf8(value[..len as usize].to_vec()).unwrap()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

pub fn set_xattr(path: &Path, name: &str, value: &str) -> std::io::Result<()> {
    set_xattr_with(path, name, value, 0)
}

fn set_xattr_with(path: &Path, name: &str, value: &str, flags: i32) -> std::io::Result<()> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    // SAFETY: terminated strings and a value of the length given.
    match unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[test]
fn striping_by_extended_attribute() {
    const LAYOUT: &str = "user.impresario.layout";
    let Some(node) = mounted() else { return };
    fs::create_dir(node.at("d")).unwrap();
    set_xattr(&node.at("d"), LAYOUT, "pcount=1,ssize=128k,base=1").unwrap();
    fs::write(node.at("d/f"), "x").unwrap();
    assert_eq!(get_xattr(&node.at("d/f"), LAYOUT).unwrap(), "pcount=1,ssize=131072,base=1");
    fs::create_dir(node.at("d/sub")).unwrap();
    let open = File::create(node.at("d/sub/g")).unwrap();
    assert_eq!(get_xattr(&node.at("d/sub/g"), LAYOUT).unwrap(), "pcount=1,ssize=131072,base=1", "inherited");
    drop(open);
    fs::write(node.at("plain"), "x").unwrap();
    assert!(get_xattr(&node.at("plain"), LAYOUT).unwrap().contains("ssize=65536"));
    for (value, what) in [("pcount=99", libc::EINVAL), ("pcount=x", libc::EINVAL), ("ssize=3", libc::EINVAL)] {
        assert_eq!(errno(set_xattr(&node.at("d"), LAYOUT, value)), what, "{value}");
    }
    assert_eq!(errno(set_xattr(&node.at("d/f"), LAYOUT, "pcount=2")), libc::EOPNOTSUPP, "chosen when it is made");
    let (path, name) = (c_path(&node.at("d")), CString::new(LAYOUT).unwrap());
    // SAFETY: terminated strings that live over the call.
    assert_eq!(unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) }, 0);
    fs::write(node.at("d/h"), "x").unwrap();
    assert!(get_xattr(&node.at("d/h"), LAYOUT).unwrap().contains("ssize=65536"), "as its parent again");
}

fn make_node(path: &Path, mode: u32, device: u64) -> i32 {
    // SAFETY: a terminated string that lives over the call.
    unsafe { libc::mknod(c_path(path).as_ptr(), mode, device) }
}

#[test]
fn pipes_and_sockets_connect_programs_of_a_node() {
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions::default());
    assert_eq!(make_node(&node.at("pipe"), libc::S_IFIFO | 0o640, 0), 0);
    let writing = std::thread::spawn({
        let path = node.at("pipe");
        move || fs::write(path, "through the pipe").unwrap()
    });
    assert_eq!(fs::read_to_string(node.at("pipe")).unwrap(), "through the pipe");
    writing.join().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(node.at("socket")).unwrap();
    let mut caller = std::os::unix::net::UnixStream::connect(node.at("socket")).unwrap();
    caller.write_all(b"hello").unwrap();
    let mut heard = [0; 5];
    listener.accept().unwrap().0.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
    for node in [&node, &other] {
        let of = |name: &str| fs::symlink_metadata(node.at(name)).unwrap();
        assert!(of("pipe").file_type().is_fifo() && of("socket").file_type().is_socket());
        assert_eq!((of("pipe").mode() & 0o7777, of("pipe").nlink()), (0o640, 1));
    }
    fs::rename(node.at("pipe"), node.at("moved")).unwrap();
    fs::write(node.at("f"), "text").unwrap();
    fs::rename(node.at("f"), node.at("moved")).unwrap();
    assert_eq!(fs::read_to_string(node.at("moved")).unwrap(), "text");
    fs::remove_file(node.at("socket")).unwrap();
    assert!(!node.at("socket").exists());
    assert_eq!(make_node(&node.at("plain"), libc::S_IFREG | 0o600, 0), 0);
    assert_eq!(fs::read_to_string(node.at("plain")).unwrap(), "");
}

#[test]
fn devices_are_kept_and_do_not_open() {
    let Some(node) = mounted() else { return };
    if !require("root") {
        return;
    }
    let zero = fs::metadata("/dev/zero").unwrap().rdev();
    assert_eq!(make_node(&node.at("zero"), libc::S_IFCHR | 0o666, zero), 0);
    let disk = libc::makedev(259, 70_000);
    assert_eq!(make_node(&node.at("disk"), libc::S_IFBLK | 0o600, disk), 0);
    let other = node.second(MountOptions::default());
    for node in [&node, &other] {
        let of = |name: &str| fs::symlink_metadata(node.at(name)).unwrap();
        assert!(of("zero").file_type().is_char_device() && of("disk").file_type().is_block_device());
        assert_eq!((of("zero").rdev(), of("disk").rdev()), (zero, disk));
        assert_eq!(errno(File::open(node.at("zero"))), libc::EACCES, "mounts are nodev");
    }
}

pub fn list_xattr(path: &Path) -> Vec<String> {
    let (path, mut names) = (c_path(path), [0u8; 4096]);
    // SAFETY: a terminated string and a buffer of the length given.
    let len = unsafe { libc::listxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    let names = std::str::from_utf8(&names[..usize::try_from(len).unwrap()]).unwrap();
    let mut names: Vec<_> = names.split_terminator('\0').map(str::to_owned).collect();
    names.sort();
    names
}

pub fn remove_xattr(path: &Path, name: &str) -> std::io::Result<()> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    // SAFETY: terminated strings that live over the call.
    match unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[test]
fn extended_attributes_of_users() {
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions::default());
    fs::create_dir(node.at("d")).unwrap();
    fs::write(node.at("d/f"), "text").unwrap();
    for name in ["d", "d/f"] {
        let at = node.at(name);
        set_xattr(&at, "user.one", "first").unwrap();
        set_xattr_with(&at, "user.two", "", libc::XATTR_CREATE).unwrap();
        assert_eq!(errno(set_xattr_with(&at, "user.one", "x", libc::XATTR_CREATE)), libc::EEXIST);
        assert_eq!(errno(set_xattr_with(&at, "user.three", "x", libc::XATTR_REPLACE)), libc::ENODATA);
        set_xattr_with(&at, "user.one", "second", libc::XATTR_REPLACE).unwrap();
        for node in [&node, &other] {
            assert_eq!(get_xattr(&node.at(name), "user.one").unwrap(), "second");
            assert_eq!(get_xattr(&node.at(name), "user.two").unwrap(), "");
            assert_eq!(list_xattr(&node.at(name)), ["user.one", "user.two"]);
        }
        remove_xattr(&at, "user.two").unwrap();
        assert_eq!(errno(remove_xattr(&at, "user.two")), libc::ENODATA);
        assert_eq!(errno(get_xattr(&other.at(name), "user.two")), libc::ENODATA);
        assert_eq!(errno(set_xattr(&at, "user.large", &"x".repeat(4000))), libc::ENOSPC);
        assert_eq!(errno(set_xattr(&at, "user.large", &"x".repeat(65536))), libc::ENOSPC);
    }
    // They stay with the file, open or not, and go with it.
    let open = File::open(node.at("d/f")).unwrap();
    set_xattr(&node.at("d/f"), "user.open", "yes").unwrap();
    fs::rename(node.at("d/f"), node.at("g")).unwrap();
    assert_eq!(list_xattr(&node.at("g")), ["user.one", "user.open"]);
    fs::remove_file(node.at("g")).unwrap();
    use std::os::fd::AsRawFd;
    let mut value = [0u8; 16];
    // SAFETY: a terminated string and a buffer of the length given.
    let len =
        unsafe { libc::fgetxattr(open.as_raw_fd(), c"user.one".as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    assert_eq!(&value[..usize::try_from(len).unwrap()], b"second");
    drop(open);
    fs::write(node.at("g"), "another").unwrap();
    assert!(list_xattr(&node.at("g")).is_empty());
}

#[test]
fn what_is_not_there_says_so() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("f"), "text").unwrap();
    if require("root") {
        for name in ["trusted.other", "system.other"] {
            assert_eq!(errno(set_xattr(&node.at("f"), name, "x")), libc::EOPNOTSUPP);
            assert_eq!(errno(get_xattr(&node.at("f"), "trusted.other")), libc::ENODATA);
        }
    }
    assert_eq!(errno(get_xattr(&node.at("f"), "security.capability")), libc::ENODATA);
    assert_eq!(fs::copy(node.at("f"), node.at("copy")).unwrap(), 4, "which tries copy_file_range");
    assert_eq!(fs::read_to_string(node.at("copy")).unwrap(), "text");
    assert_eq!(errno(OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(node.at("f"))), libc::ENOTDIR);
    assert_eq!(errno(fs::remove_dir(node.at("f"))), libc::ENOTDIR);
    assert_eq!(errno(fs::remove_file(node.at("nothing"))), libc::ENOENT);
    fs::create_dir(node.at("d")).unwrap();
    assert_eq!(errno(fs::create_dir(node.at("d"))), libc::EEXIST);
    assert_eq!(errno(File::create(node.at("d"))), libc::EISDIR);
    fs::write(node.at("d/x"), "").unwrap();
    assert_eq!(errno(fs::remove_dir(node.at("d"))), libc::ENOTEMPTY);
}
