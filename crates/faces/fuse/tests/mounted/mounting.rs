//! Mounting, unmounting and their errors.

use std::fs::{self, File};
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use impresario_fuse::{MountError, MountOptions, mount};
use impresario_testing::{skip, until};

use crate::cluster::{Cluster, errno, mounted, mounted_with};

#[test]
fn a_busy_mount_says_who_uses_it() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("f"), "text").unwrap();
    let mut open = File::open(node.at("f")).unwrap();
    let error = node.mounted().unmount().unwrap_err();
    assert!(matches!(&error, MountError::Busy { .. }), "{error}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    // Still mounted and usable.
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "text");
    drop(open);
    until("the kernel drops the file", || node.mounted().unmount().is_ok());
    assert!(node.mounted().wait_for(Duration::ZERO).is_some_and(|outcome| outcome.is_ok()));
    assert_eq!(fs::read_dir(node.mount_point()).unwrap().count(), 0, "the directory below");
    node.mounted().unmount().unwrap();
}

#[test]
fn a_forced_unmount_ends_its_users() {
    let Some(node) = mounted() else { return };
    fs::write(node.at("f"), "text").unwrap();
    let mut open = File::open(node.at("f")).unwrap();
    node.mounted().abort().unwrap();
    assert!(node.mounted().wait_for(Duration::from_secs(30)).is_some(), "its threads have ended");
    let mut text = String::new();
    assert!([libc::ENOTCONN, libc::ECONNABORTED, libc::EIO].contains(&errno(open.read_to_string(&mut text))));
    assert_eq!(fs::read_dir(node.mount_point()).unwrap().count(), 0, "the directory below");
}

#[test]
fn somebody_else_unmounts() {
    let Some(node) = mounted() else { return };
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| node.mounted().wait());
        assert!(Command::new("umount").arg(node.mount_point()).status().unwrap().success());
        waiter.join().unwrap().unwrap();
    });
    node.mounted().unmount().unwrap();
}

#[test]
fn dropping_unmounts() {
    let Some(node) = mounted() else { return };
    let point = node.mount_point().to_owned();
    let kept = node.keep_directory();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(point.to_str().unwrap()));
    drop(kept);
}

#[test]
fn what_is_mounted_is_shown() {
    let options = MountOptions { source: "/etc/cluster, one.toml".into(), read_only: true, ..Default::default() };
    let Some(node) = mounted_with(options) else { return };
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.contains(node.mount_point().to_str().unwrap())).unwrap();
    assert!(line.contains("fuse.impresario") && line.contains("nosuid,nodev"), "{line}");
    assert!(line.contains("/etc/cluster_\\040one.toml"), "{line}");
    assert_eq!(errno(File::create(node.at("f"))), libc::EROFS);
}

#[test]
fn mount_points_that_cannot_be_used() {
    let Some(node) = mounted() else { return };
    let client = node.cluster().client();
    let directory = tempfile::tempdir().unwrap();
    let try_at = |path: &std::path::Path| mount(client.clone(), path, MountOptions::default()).unwrap_err();

    let missing = directory.path().join("missing");
    let error = try_at(&missing);
    assert!(matches!(error, MountError::MountPoint { .. }) && error.to_string().contains("missing"), "{error}");
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(try_at(&file), MountError::MountPoint { .. }));
    let error = try_at(node.mount_point());
    assert!(matches!(error, MountError::Already { .. }) && error.to_string().contains("fusermount3 -u"), "{error}");
}

#[test]
fn a_dead_mount_is_recognised() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    let directory = tempfile::tempdir().unwrap();
    let point = directory.path().join("dead");
    fs::create_dir(&point).unwrap();
    // What a killed process leaves: a mount whose device has no open descriptor any more.
    let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = {
        use std::os::fd::AsRawFd;
        format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd())
    };
    if rustix::mount::mount(
        "dead",
        &point,
        "fuse",
        rustix::mount::MountFlags::empty(),
        Some(std::ffi::CString::new(options).unwrap().as_c_str()),
    )
    .is_err()
    {
        return skip("root", "a dead mount cannot be left behind");
    }
    drop(device);
    let error = mount(cluster.client(), &point, MountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::Stale { .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("fusermount3 -u") && said.contains(point.to_str().unwrap()), "{said}");
    assert!(Command::new("umount").arg("-l").arg(&point).stderr(Stdio::inherit()).status().unwrap().success());
    drop(mount(cluster.client(), &point, MountOptions::default()).unwrap());
}

#[test]
fn an_unreachable_cluster_is_said_at_once() {
    let Some(cluster) = Cluster::start(Duration::from_millis(300)) else { return };
    let client = cluster.client();
    cluster.stop_meta_server();
    let directory = tempfile::tempdir().unwrap();
    let error = mount(client, directory.path(), MountOptions::default()).unwrap_err();
    assert!(matches!(error, MountError::Cluster { .. }), "{error}");
}

#[test]
fn unmounting_leaves_what_was_mounted_there_before() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    let directory = tempfile::tempdir().unwrap();
    let below = directory.path().join("below");
    fs::create_dir(&below).unwrap();
    if rustix::mount::mount("none", &below, "tmpfs", rustix::mount::MountFlags::empty(), None).is_err() {
        return skip("root", "nothing else can be mounted first");
    }
    fs::write(below.join("theirs"), "").unwrap();
    let mounted = mount(cluster.client(), &below, MountOptions::default()).unwrap();
    assert!(!below.join("theirs").exists());
    drop(mounted);
    std::thread::sleep(Duration::from_millis(200));
    assert!(below.join("theirs").exists());
    rustix::mount::unmount(&below, rustix::mount::UnmountFlags::empty()).unwrap();
}

#[test]
fn a_mount_whose_connection_was_cut_is_taken_away() {
    let Some(node) = mounted() else { return };
    let point = node.mount_point().to_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.contains(point.to_str().unwrap())).unwrap();
    let minor = line.split(' ').nth(2).unwrap().split(':').nth(1).unwrap();
    let control = tempfile::tempdir().unwrap();
    if rustix::mount::mount("none", control.path(), "fusectl", rustix::mount::MountFlags::empty(), None).is_err() {
        return skip("root", "fusectl cannot be mounted to cut a connection");
    }
    fs::write(control.path().join(minor).join("abort"), "1").unwrap();
    rustix::mount::unmount(control.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    assert!(node.mounted().wait_for(Duration::from_secs(30)).is_some(), "its threads have ended");
    assert_eq!(errno(fs::read_dir(&point)), libc::ENOTCONN);
    let kept = node.keep_directory();
    assert_eq!(fs::read_dir(&point).unwrap().count(), 0, "the directory below");
    drop(kept);
}

/// The mount's lines in the kernel's list.
fn lines_below(folder: &std::path::Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter(|line| line.contains(folder.to_str().unwrap())).count()
}

/// The kernel gives the number of a device that is gone to the next one.
#[test]
fn a_mount_that_is_gone_takes_no_other_one_away() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    let directory = tempfile::tempdir().unwrap();
    let device = |name: &str| {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let point = directory.path().join(name);
        let line = mounts.lines().find(|line| line.contains(point.to_str().unwrap()));
        line.map(|line| line.split(' ').nth(2).unwrap().to_owned())
    };
    let mount = |name: &str| {
        let point = directory.path().join(name);
        fs::create_dir(&point).unwrap();
        mount(cluster.client(), &point, MountOptions::default()).unwrap()
    };
    // Another test may be the next one.
    let is_shown = (0..20).any(|round| {
        let (name, other) = (format!("gone{round}"), format!("there{round}"));
        let gone = mount(&name);
        let number = device(&name).unwrap();
        rustix::mount::unmount(directory.path().join(&name), rustix::mount::UnmountFlags::empty()).unwrap();
        let _there = mount(&other);
        let is_same = device(&other).unwrap() == number;
        gone.abort().unwrap();
        drop(gone);
        assert!(device(&other).is_some(), "round {round}, the same number: {is_same}");
        is_same
    });
    assert!(is_shown, "no number was given twice");
}

#[test]
fn a_mount_is_taken_away_where_it_is_now() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    let directory = tempfile::tempdir().unwrap();
    let [before, now, bound] = ["before", "now", "bound"].map(|name| directory.path().join(name));
    for is_forced in [false, true] {
        fs::create_dir_all(before.join("mount")).unwrap();
        let mounted = mount(cluster.client(), &before.join("mount"), MountOptions::default()).unwrap();
        fs::rename(&before, &now).unwrap();
        let in_use = is_forced.then(|| File::create(now.join("mount/f")).unwrap());
        if is_forced {
            mounted.abort().unwrap()
        } else {
            mounted.unmount().unwrap()
        }
        assert_eq!(lines_below(directory.path()), 0, "forced: {is_forced}");
        assert!(mounted.wait_for(Duration::ZERO).is_some(), "forced: {is_forced}");
        drop(in_use);
        fs::remove_dir_all(&now).unwrap();
    }
    fs::create_dir_all(&before).unwrap();
    fs::create_dir_all(&bound).unwrap();
    let mounted = mount(cluster.client(), &before, MountOptions::default()).unwrap();
    if rustix::mount::mount_bind(&before, &bound).is_err() {
        return skip("root", "nothing can be bound elsewhere");
    }
    drop(mounted);
    assert_eq!(lines_below(directory.path()), 0);
}
