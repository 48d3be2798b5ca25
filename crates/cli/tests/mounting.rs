//! The commands of the five-minute tour: up, mount, cp, tar, fio, layout, umount; and a server killed meanwhile.

use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::{Cluster, IMPRESARIO, Process, Ran, client, pattern, run, run_command};
use impresario_testing::until;
use rustix::process::Signal;

/// A mount in the background that is gone when the test ends.
pub struct Mount {
    pub dir: PathBuf,
}

impl Mount {
    /// `None` where this machine cannot mount; the test is then skipped.
    pub fn detached(cluster: &Cluster, more: &[&str]) -> Option<Mount> {
        if !impresario_testing::require("fuse") {
            return None;
        }
        let dir = cluster.dir.path().join("mnt");
        std::fs::create_dir_all(&dir).unwrap();
        let words = ["mount".as_ref(), "-d".as_ref(), cluster.path.as_os_str(), dir.as_os_str()];
        let ran = run(words.into_iter().chain(more.iter().map(|word| word.as_ref())));
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.out.starts_with("mounted ") && ran.out.contains("mnt"), "{ran:?}");
        Some(Mount { dir })
    }

    #[track_caller]
    pub fn umount(&self) {
        let ran = run(["umount".as_ref(), self.dir.as_os_str()]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
        assert!(!mounted(&self.dir));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if mounted(&self.dir) {
            let _ = Command::new(IMPRESARIO).args(["umount", "--lazy"]).arg(&self.dir).status();
        }
    }
}

fn mounted(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == dir.to_str())
}

#[track_caller]
fn shell(script: &str) -> Ran {
    let ran = run_command(Command::new("bash").args(["-euo", "pipefail", "-c", script]));
    assert_eq!(ran.code, 0, "{script}: {ran:?}");
    ran
}

/// Also where the mount's kernel still has its name.
#[test]
fn a_directory_that_another_node_removed_or_replaced_is_listed_as_what_is_there() {
    let cluster = Cluster::start(1, 0, |_| {});
    let Some(mount) = Mount::detached(&cluster, &["--cache-time", "1h"]) else { return };
    let other = client(&cluster.config, 1);
    let list = |name: &str| -> std::io::Result<Vec<_>> {
        std::fs::read_dir(mount.dir.join(name))?.map(|entry| Ok(entry?.file_name())).collect()
    };
    let removed = |name: &str| {
        other.mkdir(name, 0o755, 0, 0).unwrap();
        assert_eq!(list(name).unwrap().len(), 0);
        other.rmdir(name).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    };
    removed("gone");
    assert_eq!(list("gone").unwrap_err().raw_os_error(), Some(libc::ENOENT));
    removed("replaced");
    other.mkdir("replaced", 0o755, 0, 0).unwrap();
    other.mkdir("replaced/new", 0o755, 0, 0).unwrap();
    assert_eq!(list("replaced").unwrap(), ["new"]);
}

#[test]
fn cp_tar_and_fio_work_and_umount_leaves_nothing() {
    let cluster = Cluster::start(4, 2, |_| {});
    let Some(mount) = Mount::detached(&cluster, &[]) else { return };
    let mnt = mount.dir.to_str().unwrap();
    let work = cluster.dir.path().join("work");
    for i in 0..40u64 {
        let path = work.join(format!("tree/d{}/f{i}", i % 5));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, pattern(i, 1, 0, (i * i * 500) as usize)).unwrap();
    }
    std::os::unix::fs::symlink("d1/f1", work.join("tree/link")).unwrap();
    let work = work.to_str().unwrap();
    shell(&format!("cp -a {work}/tree {mnt}/ && diff -r --no-dereference {work}/tree {mnt}/tree"));
    shell(&format!("tar -C {mnt} -cf {work}/t.tar tree && mkdir {mnt}/u && tar -C {mnt}/u -xf {work}/t.tar"));
    shell(&format!("diff -r --no-dereference {work}/tree {mnt}/u/tree && rm -r {mnt}/u && test ! -e {mnt}/u"));
    if impresario_testing::require("fio") {
        let job = "--rw=randrw --bs=4k-64k --size=8m --verify=crc32c --verify_fatal=1 --verify_dump=0 --verify_state_save=0 --numjobs=2";
        shell(&format!("fio --name=v --directory={mnt} {job} --fsync=64 --minimal"));
    }
    let ran = shell(&format!("df --output=fstype,source {mnt}"));
    assert!(ran.out.contains("fuse.impresario"), "{ran:?}");

    // In use: reported, and still mounted.
    let held = std::fs::File::open(mount.dir.join("tree/d1/f1")).unwrap();
    let ran = run(["umount".as_ref(), mount.dir.as_os_str()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("in use") && ran.err.contains("--lazy"), "{ran:?}");
    drop(held);
    until("it can be unmounted", || run(["umount".as_ref(), mount.dir.as_os_str()]).code == 0);
    assert!(!mounted(&mount.dir));
    let ran = run(["umount".as_ref(), mount.dir.as_os_str()]);
    assert!(ran.code == 1 && ran.err.contains("is not a mounted cluster"), "{ran:?}");
}

/// Where the kernel keeps no pages of what is written, it leaves it to the mount.
#[test]
fn synchronous_writes_reach_the_device() {
    let cluster = Cluster::start(1, 0, |_| {});
    // Requests that are neither reads nor writes.
    let syncs =
        || cluster.state("data.0")["engine"]["histograms"]["request_ns"]["other"]["count"].as_u64().unwrap_or(0);
    let (append, mut wrong) = (libc::O_APPEND, Vec::new());
    for more in [&[][..], &["--direct-io"]] {
        let Some(mount) = Mount::detached(&cluster, more) else { return };
        for (flags, write_flags, are_synced) in [
            (libc::O_SYNC, 0, true),
            (libc::O_DSYNC, 0, true),
            (0, libc::RWF_DSYNC, true),
            (append | libc::O_SYNC, 0, true),
            (append | libc::O_DSYNC, 0, true),
            (append, libc::RWF_SYNC, true),
            (libc::O_DIRECT | libc::O_DSYNC, 0, true),
            (libc::O_DIRECT, libc::RWF_DSYNC, true),
            (0, 0, false),
            (append, 0, false),
            (libc::O_DIRECT, 0, false),
        ] {
            let mut open = std::fs::OpenOptions::new();
            let file = open.write(true).create(true).custom_flags(flags).open(mount.dir.join("f")).unwrap();
            let before = syncs();
            for _ in 0..5 {
                let bytes = [7u8; 512];
                let part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
                // SAFETY: the descriptor is open, and the one part is the array, which is only read.
                let written = unsafe { libc::pwritev2(file.as_raw_fd(), &part, 1, 0, write_flags) };
                assert_eq!(written, 512, "{flags:o} {write_flags:x}: {}", std::io::Error::last_os_error());
            }
            // They are counted when they have been answered.
            let what = format!("{more:?}, flags {flags:o} and {write_flags:x}: 5 syncs");
            until(what, || !are_synced || syncs() >= before + 5);
            let made = syncs() - before;
            if (made >= 5) != are_synced || (made > 0) != are_synced {
                wrong.push(format!("{more:?}, flags {flags:o} and {write_flags:x}: {made} syncs"));
            }
        }
        mount.umount();
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn layouts_are_set_for_directories_and_shown_for_files() {
    let cluster = Cluster::start(3, 1, |_| {});
    let Some(mount) = Mount::detached(&cluster, &[]) else { return };
    std::fs::create_dir(mount.dir.join("one")).unwrap();
    let layout = |words: &[&str]| {
        run_command(Command::new(IMPRESARIO).args(["layout", words[0]]).arg(&cluster.path).args(&words[1..]))
    };
    let ran = layout(&["set", "/one", "--stripe-count", "1", "--stripe-size", "1m", "--base", "2"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    std::fs::write(mount.dir.join("one/file"), "x").unwrap();
    std::fs::write(mount.dir.join("file"), "x").unwrap();
    let ran = layout(&["get", "/one/file"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (0, "/one/file: strips of 1 MiB, distributed in turn over data.2\n"),
        "{ran:?}"
    );
    let ran = layout(&["get", "--json", "file"]);
    let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&told["stripe_bytes"], &told["stripe_count"]), (&65536.into(), &3.into()), "{told}");
    let ran = layout(&["set", "/one", "--stripe-count", "9"]);
    assert!(ran.code == 1 && ran.err.contains("pcount 9 is not between 1 and 3"), "{ran:?}");
    let ran = layout(&["get", "/missing"]);
    assert!(ran.code == 1 && ran.err.contains("/missing"), "{ran:?}");
    mount.umount();
}

/// `cp -a` of a tree continues while data servers are killed and restarted; all bytes are right.
#[test]
fn a_copy_survives_killed_servers() {
    let mut cluster = Cluster::start(3, 1, |_| {});
    let Some(mount) = Mount::detached(&cluster, &[]) else { return };
    let work = cluster.dir.path().join("work");
    std::fs::create_dir(&work).unwrap();
    for i in 0..60u64 {
        std::fs::write(work.join(format!("f{i}")), pattern(i, 1, 0, 700_000)).unwrap();
    }
    let (from, mnt) = (work.to_str().unwrap(), mount.dir.to_str().unwrap());
    let mut command = Command::new("bash");
    command.args(["-c", &format!("for i in 1 2 3; do cp -a {from} {mnt}/copy.$i && sync || exit 1; done")]);
    let mut copy = Process::start_command(&mut command, &cluster.dir.path().join("copy.log"));
    for victim in ["data.1", "io.0", "data.2", "meta"] {
        std::thread::sleep(Duration::from_millis(400));
        cluster.kill(victim);
        std::thread::sleep(Duration::from_millis(200));
        cluster.restart(victim);
    }
    let status = copy.wait();
    assert!(status.success(), "{}", copy.log());
    for i in 1..=3 {
        shell(&format!("diff -r {from} {mnt}/copy.{i}"));
    }
    mount.umount();
}

#[test]
fn a_foreground_mount_ends_with_ctrl_c_and_an_unreachable_cluster_is_told() {
    if !impresario_testing::require("fuse") {
        return;
    }
    let cluster = Cluster::start(1, 0, |config| config.cluster.request_timeout_ms = 1_000);
    let dir = cluster.dir.path().join("mnt");
    std::fs::create_dir(&dir).unwrap();
    let words = ["mount".as_ref(), cluster.path.as_os_str(), dir.as_os_str()];
    let mut process = Process::start(words, &cluster.dir.path().join("mount.log"));
    until("it is mounted", || mounted(&dir));
    std::fs::write(dir.join("x"), "y").unwrap();
    process.signal(Signal::INT);
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
    assert!(!mounted(&dir));

    let ran = run(["mount".as_ref(), cluster.path.as_os_str(), "/nonexistent".as_ref()]);
    assert!(ran.code == 1 && ran.err.contains("/nonexistent"), "{ran:?}");

    let path = cluster.path.clone();
    let keep = cluster.dir.path().join("mnt");
    let mut cluster = cluster;
    cluster.kill("meta");
    for words in [&["mount"][..], &["mount", "-d"]] {
        let ran = run_command(Command::new(IMPRESARIO).args(words).arg(&path).arg(&keep));
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains("cannot") && ran.err.contains(&cluster.config.meta.address), "{ran:?}");
    }
    assert!(!mounted(&keep));
}

/// Programs go on while their job's I/O nodes change.
#[test]
fn a_mount_follows_the_allocation_of_its_job() {
    let cluster = Cluster::start(2, 3, |_| {});
    let allocate = |words: &[&str]| {
        let mut command = Command::new(IMPRESARIO);
        run_command(command.args(["allocate", words[0]]).arg(&cluster.path).args(&words[1..]))
    };
    let done = |words: &[&str]| {
        let ran = allocate(words);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{words:?}: {ran:?}");
        ran.out
    };
    // Without the connection that asks.
    let connections = |io: &str| cluster.state(io)["connections"]["open"].as_u64().unwrap() - 1;
    let goes = |wanted: [u64; 3]| {
        until(format!("connections are {wanted:?}"), || ["io.0", "io.1", "io.2"].map(connections) == wanted);
    };
    done(&["set", "--job", "7", "--node", "io.1"]);
    assert_eq!(done(&["show", "--job", "7"]), "io.1\n");
    let Some(mount) = Mount::detached(&cluster, &["--job", "7"]) else { return };
    goes([0, 1, 0]);
    let (mnt, stop) = (mount.dir.to_str().unwrap(), cluster.dir.path().join("stop"));
    let script = format!(
        "cd {mnt}; exec 3>>log; n=0; while [ ! -e {} ]; do n=$((n+1)); echo $n >&3; seq $n > f.new; mv f.new f; \
         [ $(tail -n1 f) = $n ]; mkdir d; rmdir d; done; seq $n | cmp - log",
        stop.display()
    );
    let mut program = Command::new("bash");
    program.args(["-euo", "pipefail", "-c", &script]);
    let mut program = Process::start_command(&mut program, &cluster.dir.path().join("program.log"));
    done(&["set", "--job", "7", "--direct"]);
    goes([0, 0, 0]);
    done(&["set", "--host", "*", "--node", "io.0"]);
    done(&["clear", "--job", "7"]);
    goes([1, 0, 0]);
    let measured = cluster.dir.path().join("measured.toml");
    std::fs::write(&measured, "[[job]]\njob = 7\nbandwidth = { 0 = 10.0, 1 = 30.0, 2 = 40.0 }\n").unwrap();
    let planned = done(&["plan", measured.to_str().unwrap(), "--apply"]);
    assert_eq!(planned, "job 7: io.0, io.1 (40)\nsum of the bandwidths: 40\n");
    assert_eq!(
        done(&["show"]),
        "job 7: io.0, io.1\nmachine *: io.0\nall others: io.0, io.1, io.2\nClients are spread over their nodes by client.\n"
    );
    std::fs::write(&stop, "").unwrap();
    let ended = program.wait();
    assert!(ended.success(), "{ended}: {}", program.log());
    mount.umount();

    let ran = allocate(&["set", "--job", "7", "--node", "oi.0"]);
    assert!(ran.code == 2 && ran.err.contains("did you mean io.0?"), "{ran:?}");
    let ran = allocate(&["clear", "--job", "8"]);
    assert!(ran.code == 2 && ran.err.contains("no such rule"), "{ran:?}");
    assert_eq!(allocate(&["set", "--job", "8"]).code, 2, "neither nodes nor --direct");
}
