//! Hard links: several names of one file, as programs see them on one node and on several.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::time::Duration;

use impresario_fuse::MountOptions;
use impresario_testing::require;

use crate::cluster::{errno, mounted, mounted_with, six_at_once};
use crate::names::{as_user, c_path};

fn look(path: &Path) -> (u64, u64) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.ino(), meta.nlink())
}

#[test]
fn all_names_are_of_one_file() {
    let Some(node) = mounted() else { return };
    fs::create_dir(node.at("d")).unwrap();
    fs::write(node.at("a"), "text").unwrap();
    let before = fs::metadata(node.at("a")).unwrap();
    // The clock of the server's file system ticks in milliseconds.
    std::thread::sleep(Duration::from_millis(20));
    fs::hard_link(node.at("a"), node.at("d/b")).unwrap();
    let (a, b) = (fs::metadata(node.at("a")).unwrap(), fs::metadata(node.at("d/b")).unwrap());
    assert_eq!((a.ino(), a.nlink(), b.ino(), b.nlink()), (before.ino(), 2, before.ino(), 2));
    assert!((a.ctime(), a.ctime_nsec()) > (before.ctime(), before.ctime_nsec()), "the time of change moves");
    assert_eq!(a.modified().unwrap(), before.modified().unwrap());
    let listed: Vec<u64> =
        fs::read_dir(node.at("d")).unwrap().map(|e| e.unwrap().metadata().unwrap().nlink()).collect();
    assert_eq!(listed, [2]);

    OpenOptions::new().append(true).open(node.at("d/b")).unwrap().write_all(b" and more").unwrap();
    assert_eq!(fs::read_to_string(node.at("a")).unwrap(), "text and more");
    fs::set_permissions(node.at("a"), fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(node.at("d/b")).unwrap().mode() & 0o7777, 0o640);

    // A directory above one of the names is moved.
    fs::rename(node.at("d"), node.at("e")).unwrap();
    fs::remove_file(node.at("a")).unwrap();
    assert_eq!(look(&node.at("e/b")), (before.ino(), 1));
    assert_eq!(fs::read_to_string(node.at("e/b")).unwrap(), "text and more");
    fs::remove_file(node.at("e/b")).unwrap();
    assert_eq!(fs::read_dir(node.at("e")).unwrap().count(), 0);
}

#[test]
fn renames_among_names_of_a_file() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("a"), "linked").unwrap();
    fs::hard_link(node.at("a"), node.at("b")).unwrap();
    fs::rename(node.at("a"), node.at("b")).unwrap();
    assert!(node.at("a").exists() && node.at("b").exists(), "to another name of the file: nothing is done");
    let open = File::open(node.at("b")).unwrap();
    fs::write(node.at("new"), "new").unwrap();
    fs::rename(node.at("new"), node.at("b")).unwrap();
    assert_eq!(fs::read_to_string(node.at("b")).unwrap(), "new");
    assert_eq!((open.metadata().unwrap().ino(), open.metadata().unwrap().nlink()), look(&node.at("a")));
    assert_eq!(look(&node.at("a")).1, 1);
    fs::rename(node.at("a"), node.at("c")).unwrap();
    assert_eq!(fs::read_to_string(node.at("c")).unwrap(), "linked");
}

#[test]
fn an_open_file_outlives_its_names() {
    let Some(node) = mounted() else { return };
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(node.at("a")).unwrap();
    file.write_all(b"one").unwrap();
    let ino = file.metadata().unwrap().ino();
    fs::hard_link(node.at("a"), node.at("b")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 2);
    // As programs deliver mail: what was written under one name appears under another.
    fs::remove_file(node.at("a")).unwrap();
    assert_eq!((file.metadata().unwrap().ino(), file.metadata().unwrap().nlink()), (ino, 1));
    file.write_all(b" two").unwrap();
    assert_eq!(fs::read_to_string(node.at("b")).unwrap(), "one two");
    assert_eq!(look(&node.at("b")), (ino, 1));
    fs::remove_file(node.at("b")).unwrap();
    file.write_all(b" three").unwrap();
    assert_eq!((file.metadata().unwrap().nlink(), file.metadata().unwrap().len()), (0, 13));
    // It cannot get a name again.
    use std::os::fd::AsRawFd;
    let (from, to) = (c_path(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd()))), c_path(&node.at("c")));
    // SAFETY: terminated strings that live over the call.
    let linked =
        unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) };
    assert_eq!((linked, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ENOENT)));
    assert_eq!(fs::read_dir(node.mount_point()).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_linked() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("f"), "").unwrap();
    fs::write(node.at("g"), "").unwrap();
    fs::create_dir(node.at("d")).unwrap();
    let link = |from: &str, to: &str| errno(fs::hard_link(node.at(from), node.at(to)));
    assert_eq!(link("f", "g"), libc::EEXIST);
    assert_eq!(link("d", "e"), libc::EPERM);
    assert_eq!(link("no", "e"), libc::ENOENT);
    assert_eq!(link("f", "no/e"), libc::ENOENT);
    assert_eq!(link("f", "g/e"), libc::ENOTDIR);
    let elsewhere = tempfile::tempdir().unwrap();
    assert_eq!(errno(fs::hard_link(node.at("f"), elsewhere.path().join("f"))), libc::EXDEV);
    // A symbolic link is linked itself, as by the system call.
    symlink("f", node.at("l")).unwrap();
    fs::hard_link(node.at("l"), node.at("l2")).unwrap();
    assert_eq!(fs::read_link(node.at("l2")).unwrap(), Path::new("f"));
    assert_eq!(look(&node.at("l")), (look(&node.at("l2")).0, 2));
}

#[test]
fn permissions_of_links_are_checked() {
    if !require("root") {
        return;
    }
    let Some(node) = mounted_with(MountOptions { allow_other: true, ..Default::default() }) else { return };
    node.open_the_way();
    fs::create_dir(node.at("open")).unwrap();
    fs::set_permissions(node.at("open"), fs::Permissions::from_mode(0o1777)).unwrap();
    fs::create_dir(node.at("closed")).unwrap();
    for (name, owner) in [("mine", 1000), ("others", 1001)] {
        fs::write(node.at("open").join(name), "text").unwrap();
        chown(node.at("open").join(name), Some(owner), Some(owner)).unwrap();
    }
    assert!(as_user(1000, "ln $1/mine $1/linked", &node.at("open")));
    assert!(!as_user(1000, "ln $1/mine $1/../closed/linked", &node.at("open")), "the directory may not be written");
    let protected = fs::read_to_string("/proc/sys/fs/protected_hardlinks").is_ok_and(|text| text.trim() == "1");
    if protected {
        assert!(!as_user(1000, "ln $1/others $1/stolen", &node.at("open")));
    }
    assert!(!as_user(1001, "rm -f $1/linked", &node.at("open")), "the directory is sticky");
    assert_eq!(look(&node.at("open/mine")).1, 2);
}

#[test]
fn other_nodes_see_names_and_their_number() {
    let Some(one) = mounted() else { return };
    let two = one.second(MountOptions::default());
    fs::write(one.at("a"), "text").unwrap();
    let mut open = File::open(one.at("a")).unwrap();
    assert_eq!(look(&two.at("a")).1, 1);
    fs::hard_link(two.at("a"), two.at("b")).unwrap();
    // This node has not looked the second name up: the file lives on under the same number all the same.
    fs::remove_file(one.at("a")).unwrap();
    assert_eq!(look(&one.at("b")), (open.metadata().unwrap().ino(), 1));
    assert_eq!(look(&one.at("b")).0, look(&two.at("b")).0);
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "text");
    fs::hard_link(two.at("b"), two.at("c")).unwrap();
    fs::hard_link(one.at("c"), one.at("d")).unwrap();
    assert_eq!(look(&one.at("d")).1, 3);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!((look(&two.at("b")).1, look(&two.at("c")).1), (3, 3));
    // The name that this node used last is removed on the other.
    assert_eq!(look(&one.at("c")).1, 3);
    fs::remove_file(two.at("c")).unwrap();
    fs::write(one.at("d"), "more text").unwrap();
    fs::set_permissions(one.at("d"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::read_to_string(two.at("b")).unwrap(), "more text");
    fs::remove_file(one.at("b")).unwrap();
    fs::remove_file(one.at("d")).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(fs::read_dir(two.mount_point()).unwrap().count(), 0);
    assert_eq!(open.metadata().unwrap().nlink(), 0);
}

/// A number that was that of a file with several names means another one at once.
#[test]
fn numbers_used_again_are_not_mixed_up() {
    let Some(one) = mounted() else { return };
    let two = one.second(MountOptions::default());
    for round in 0..30 {
        let text = format!("round {round}");
        fs::write(one.at("a"), &text).unwrap();
        fs::hard_link(one.at("a"), one.at("b")).unwrap();
        assert_eq!(fs::read_to_string(two.at("b")).unwrap(), text);
        let open = File::open(two.at("b")).unwrap();
        fs::remove_file(one.at("a")).unwrap();
        fs::remove_file(two.at("b")).unwrap();
        fs::write(two.at("a"), "another").unwrap();
        let mut read = String::new();
        (&open).read_to_string(&mut read).unwrap();
        assert_eq!((read, open.metadata().unwrap().nlink()), (text, 0));
        assert_eq!(fs::read_to_string(two.at("a")).unwrap(), "another");
        fs::remove_file(two.at("a")).unwrap();
        drop(open);
    }
}

/// The lock that programs make by linking a file of their own.
#[test]
fn only_one_links() {
    let Some(node) = mounted() else { return };
    let other = node.second(MountOptions::default());
    for round in 0..10 {
        let won = six_at_once([&node, &other], |node, i| {
            let own = node.at(&format!("own{round}.{i}"));
            fs::write(&own, "").unwrap();
            let linked = fs::hard_link(&own, node.at(&format!("lock{round}")));
            assert_eq!(look(&own).1, if linked.is_ok() { 2 } else { 1 });
            linked.map_err(|error| assert_eq!(error.raw_os_error(), Some(libc::EEXIST))).is_ok()
        });
        assert_eq!(won.into_iter().filter(|won| *won).count(), 1);
    }
}
