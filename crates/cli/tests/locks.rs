//! File locks of mounts that hang or die.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::support::{Cluster, Process};
use impresario_testing::{eventually, until};
use rustix::process::Signal;

const LEASE_MS: u64 = 1500;
/// Files that stay locked beside the one that is looked at.
const OTHERS: usize = 50;

/// A mount in a process of its own, without a terminal; gone when the test ends.
pub struct Mount {
    process: Process,
    pub dir: PathBuf,
}

impl Mount {
    fn start(cluster: &Cluster, name: &str) -> Mount {
        Mount::start_with(cluster, name, &[])
    }

    pub fn start_with(cluster: &Cluster, name: &str, more: &[&str]) -> Mount {
        let dir = cluster.dir.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        let words = ["mount".as_ref(), cluster.path.as_os_str(), dir.as_os_str()];
        let words = words.into_iter().chain(more.iter().map(|word| word.as_ref()));
        let process = Process::start(words, &cluster.dir.path().join(format!("{name}.log")));
        until("the mount is usable", || process.log().contains("mounted "));
        Mount { process, dir }
    }

    fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(self.dir.join("f")).unwrap()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.process.kill();
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.dir).status();
        let _ = std::process::Command::new("fusermount3").arg("-uzq").arg(&self.dir).status();
    }
}

pub fn lock(file: &File, command: i32, kind: i32) -> io::Result<()> {
    let (l_type, l_whence) = (kind as i16, libc::SEEK_SET as i16);
    let wanted = libc::flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: an open descriptor, and a structure that lives over the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &wanted) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits for the lock as long as its holder's lease runs.
#[track_caller]
fn get(file: &File) {
    let began = Instant::now();
    lock(file, libc::F_SETLKW, libc::F_WRLCK).unwrap();
    let waited = began.elapsed();
    assert!(waited >= Duration::from_millis(LEASE_MS / 2) && waited < Duration::from_secs(9), "{waited:?}");
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn a_mount_that_hung_writes_nothing_under_a_lock_that_it_has_lost() {
    if !impresario_testing::require("fuse") {
        return;
    }
    for io_nodes in [0, 1] {
        let cluster = Cluster::start(2, io_nodes, |config| config.meta.lock_lease_ms = Some(LEASE_MS));
        let (one, two) = (Mount::start(&cluster, "one"), Mount::start(&cluster, "two"));
        let (a, b) = (one.open(), two.open());
        lock(&a, libc::F_SETLK, libc::F_WRLCK).unwrap();
        a.write_all_at(&[1; 100_000], 0).unwrap();
        one.process.signal(Signal::STOP);
        get(&b);
        b.write_all_at(&[2; 100_000], 0).unwrap();
        one.process.signal(Signal::CONT);
        for _ in 0..20 {
            assert_eq!(errno(a.write_at(&[3; 100], 50_000)), Some(libc::EIO));
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(errno(a.set_len(0)), Some(libc::EIO));
        assert_eq!(errno(lock(&a, libc::F_SETLK, libc::F_WRLCK)), Some(libc::EIO));
        eventually("reads fail too", || errno(a.read_at(&mut [0; 100], 0)).filter(|errno| *errno == libc::EIO));
        drop(a);
        let a = one.open();
        let mut bytes = vec![0; 100_001];
        assert_eq!(a.read_at(&mut bytes, 0).unwrap(), 100_000);
        assert!(bytes[..100_000] == [2; 100_000]);
        assert_eq!(errno(lock(&a, libc::F_SETLK, libc::F_WRLCK)), Some(libc::EAGAIN));
        lock(&b, libc::F_SETLK, libc::F_UNLCK).unwrap();
        lock(&a, libc::F_SETLK, libc::F_WRLCK).unwrap();
        a.write_all_at(&[4; 100], 0).unwrap();
        let locks = &cluster.state("meta")["meta"]["locks"];
        assert_eq!((locks["held"].as_u64(), locks["waiting"].as_u64()), (Some(1), Some(0)), "{locks}");
    }
}

/// The kernel answers programs by what it has cached while the mount is stopped, but no longer than the locks are certain.
#[test]
fn a_mount_that_hangs_shows_nothing_cached_under_a_lock_that_it_has_lost() {
    if !impresario_testing::require("fuse") {
        return;
    }
    let cluster = Cluster::start(2, 0, |config| config.meta.lock_lease_ms = Some(LEASE_MS));
    let one = Mount::start_with(&cluster, "one", &["--cache-time", "1h"]);
    let two = Mount::start(&cluster, "two");
    let (a, b) = (one.open(), two.open());
    lock(&a, libc::F_SETLK, libc::F_WRLCK).unwrap();
    a.write_all_at(&[1; 8192], 0).unwrap();
    let mut bytes = [0; 8192];
    a.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [1; 8192]);
    // Attributes and bytes are cached now, for an hour unless the lock says otherwise.
    assert_eq!(a.metadata().unwrap().len(), 8192);
    // However many other files are open and locked after it, all of which are lost with it.
    let make = |n| File::create(one.dir.join(format!("other.{n}"))).unwrap();
    let others: Vec<File> = (0..OTHERS).map(make).collect();
    others.iter().for_each(|other| lock(other, libc::F_SETLK, libc::F_WRLCK).unwrap());
    one.process.signal(Signal::STOP);
    get(&b);
    b.write_all_at(&[2; 8192], 0).unwrap();
    let reading = std::thread::spawn(move || a.read_exact_at(&mut bytes, 0).map(|()| bytes));
    std::thread::sleep(Duration::from_millis(300));
    one.process.signal(Signal::CONT);
    let read = reading.join().unwrap();
    assert!(errno(read) == Some(libc::EIO), "it has read what was there before");
    drop(others);
}

#[test]
fn locks_of_a_killed_mount_become_free() {
    if !impresario_testing::require("fuse") {
        return;
    }
    let cluster = Cluster::start(2, 0, |config| config.meta.lock_lease_ms = Some(LEASE_MS));
    let (mut one, two) = (Mount::start(&cluster, "one"), Mount::start(&cluster, "two"));
    let (a, b) = (one.open(), two.open());
    lock(&a, libc::F_SETLK, libc::F_WRLCK).unwrap();
    one.process.kill();
    get(&b);
    b.write_all_at(b"free", 0).unwrap();
    drop(a);
}
