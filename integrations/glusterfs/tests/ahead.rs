//! What clients will read is read from the brick's disk before they do, nothing of what they see changes by that, and it
//! ends where it should.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{
    Machine, PATIENCE, Place, Process, Volume, apart, cooling, figure, on_disk, script, succeed, until,
};

const OPTIONS: [(&str, &str); 3] = [("policy", "fifo"), ("depth", "8"), ("read-ahead", "16MB")];
const MIB: u64 = 1 << 20;

/// The files of a brick leave memory.
fn cool(machine: &Machine, volume: &str) {
    let files = format!("find {volume}/brick*/ -maxdepth 1 -type f");
    script(
        &machine.path(""),
        &format!("for f in $({files}); do sync $f; dd if=$f iflag=nocache count=0 status=none; done"),
    );
}

fn write(path: PathBuf, mib: u64) -> String {
    let bytes: Vec<u8> =
        (0..mib * MIB / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()).collect();
    fs::write(&path, bytes).unwrap();
    sum(&path, "")
}

/// The sum of a file's content as seen by reads of 128 KiB.
fn sum(path: &Path, more: &str) -> String {
    let read = format!("dd if={} bs=128k status=none {more} | sha256sum", path.display());
    script(Path::new("/"), &read)
}

#[test]
fn streams_are_read_ahead() {
    apart("ahead::inside_streams");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_streams() {
    let machine = Machine::new();
    for (name, place) in [("above", Place::Above), ("instead", Place::Instead)] {
        let Some(_disk) = on_disk(&machine, name) else { return };
        let mut volume = Volume::start(&machine, name, 1, place, &OPTIONS);
        let mount = volume.mount_uncached();
        // Too little for finding the disk fast, which would end it.
        let expected = write(mount.path.join("file"), 12);
        cool(&machine, name);
        let report = volume.bricks[0].report();
        let before = |figure_of: &str| figure(&report, figure_of);
        assert!(sum(&mount.path.join("file"), "") == expected, "{name}");
        until("the last speculation", || figure(&volume.bricks[0].report(), "open_requests") == 0);
        let now = volume.bricks[0].report();
        let more = |name: &str| figure(&now, name) - before(name);
        assert!(more("read_ahead_calls") > 0 && more("read_ahead_read_bytes") > 4 * MIB, "{name}: {now:?}");
        // What the kernel's own reading ahead has brought in before counts as neither.
        assert!(more("read_ahead_hit_bytes") > 2 * MIB, "{name}: {now:?}");
        assert_eq!((more("read_ahead_wasted_bytes"), more("failed_requests")), (0, 0), "{name}: {now:?}");
        // Nothing beyond the end of the file stays expected, and what clients read is counted without it.
        assert_eq!(figure(&now, "read_ahead_outstanding_bytes"), 0, "{name}: {now:?}");
        assert_eq!(more("read_bytes"), 12 * MIB, "{name}: {now:?}");
        // What memory has is not read again; a call may look for the end of the file once more.
        let calls = volume.sum("read_ahead_calls");
        assert!(sum(&mount.path.join("file"), "") == expected, "{name}");
        assert!(volume.sum("read_ahead_calls") <= calls + 1, "{name}");
        // Direct reads pass the brick's page cache: nothing is read into it for them.
        let calls = volume.sum("read_ahead_calls");
        cool(&machine, name);
        assert!(sum(&mount.path.join("file"), "iflag=direct") == expected, "{name}");
        assert_eq!(volume.sum("read_ahead_calls"), calls, "{name}");
        drop(mount);
        volume.bricks.clear();
    }
}

#[test]
fn where_nothing_is_kept_nothing_is_read_ahead() {
    apart("ahead::inside_unkept");
}

/// A brick with `o-direct` reads past the page cache whatever the client's descriptor says.
#[test]
#[ignore = "run by another test as a process"]
fn inside_unkept() {
    let machine = Machine::new();
    let Some(_disk) = on_disk(&machine, "direct") else { return };
    let mut volume = Volume::start(&machine, "direct", 1, Place::Above, &OPTIONS);
    let mount = volume.mount_uncached();
    let expected = write(mount.path.join("file"), 12);
    drop(mount);
    let graph = fs::read_to_string(&volume.bricks[0].file).unwrap();
    let storage = "type storage/posix\n";
    fs::write(&volume.bricks[0].file, graph.replace(storage, &format!("{storage}    option o-direct on\n"))).unwrap();
    volume.bricks[0].restart(&[]);
    let mount = volume.mount_uncached();
    for _ in 0..3 {
        cool(&machine, "direct");
        assert!(sum(&mount.path.join("file"), "") == expected);
    }
    until("the last speculation", || figure(&volume.bricks[0].report(), "open_requests") == 0);
    let report = volume.bricks[0].report();
    // Two show it.
    assert!((1..=3).contains(&figure(&report, "read_ahead_calls")), "{report:?}");
}

#[test]
fn a_speculation_that_fails_fails_no_request() {
    apart("ahead::inside_failing_speculations");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_failing_speculations() {
    let machine = Machine::new();
    let Some(_disk) = on_disk(&machine, "errors") else { return };
    let errors = [("errors.failure", "20"), ("errors.error-no", "EIO"), ("errors.enable", "READ")];
    let options: Vec<_> = OPTIONS.into_iter().chain(errors).collect();
    let mut volume = Volume::start(&machine, "errors", 1, Place::Above, &options);
    let mount = volume.mount_uncached();
    fs::write(mount.path.join("file"), vec![1; 12 << 20]).unwrap();
    let mut failed = 0;
    for _ in 0..4 {
        cool(&machine, "errors");
        let file = fs::File::open(mount.path.join("file")).unwrap();
        let mut bytes = vec![0; 64 << 10];
        failed += (0..192).filter(|block| file.read_at(&mut bytes, block * (64 << 10)).is_err()).count() as u64;
    }
    until("the last speculation", || figure(&volume.bricks[0].report(), "open_requests") == 0);
    let report = volume.bricks[0].report();
    assert!(figure(&report, "read_ahead_calls") > 4, "{report:?}");
    assert_eq!(figure(&report, "failed_requests"), failed, "{report:?}");
}

#[test]
fn writes_cuts_and_vanishing_clients_meet_speculations() {
    if impresario_testing::require("fio") {
        apart("ahead::inside_changes");
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_changes() {
    let machine = Machine::new();
    let Some(_disk) = on_disk(&machine, "changes") else { return };
    let mut volume = Volume::start(&machine, "changes", 1, Place::Above, &OPTIONS);
    let (mount, mut gone) = (volume.mount_uncached(), volume.mount_uncached());
    let expected = write(mount.path.join("kept"), 16);
    let _cooling = cooling(&machine.path("changes/brick0"));
    let fio = |arguments: &[&str]| {
        let mut fio = Command::new("fio");
        fio.args(["--name=job", "--ioengine=libaio", "--size=8m", "--verify=crc32c", "--verify_fatal=1"]);
        succeed(
            fio.args(["--numjobs=2", "--thread", "--bs=64k", "--iodepth=4"]).args(arguments).current_dir(&mount.path),
        );
    };
    fio(&["--rw=write"]);
    fio(&["--rw=rw", "--io_size=8m"]);
    fio(&["--rw=randrw", "--io_size=8m"]);
    for mib in [9, 3, 12] {
        let cut = mount.path.join("cut");
        write(cut.clone(), 12);
        let read = format!("dd if={} bs=64k of=/dev/null status=none", cut.display());
        let mut reader = Process::start(Command::new("bash").args(["-c", &read]).stderr(Stdio::null()));
        succeed(Command::new("truncate").arg(format!("--size={mib}M")).arg(&cut));
        reader.end(PATIENCE).expect("the reader ends");
        assert_eq!(fs::metadata(&cut).unwrap().len(), mib * MIB);
    }
    // A client that is killed while it reads leaves nothing behind.
    let read = format!("while :; do dd if={}/kept bs=128k of=/dev/null status=none; done", gone.path.display());
    let _reader = Process::start(Command::new("bash").args(["-c", &read]).stderr(Stdio::null()));
    let calls = volume.sum("read_ahead_calls");
    until("more is read ahead", || volume.sum("read_ahead_calls") > calls + 8);
    gone.process.signal("KILL");
    gone.process.end(PATIENCE).expect("the client ends");
    assert!(sum(&mount.path.join("kept"), "") == expected);
    until("everything ends", || {
        let report = volume.bricks[0].report();
        ["open_requests", "in_flight_batches", "queued_requests"].iter().all(|name| figure(&report, name) == 0)
    });
    // A brick stops with a reader at work.
    let mut reader = Command::new("dd");
    reader.arg(format!("if={}", mount.path.join("kept").display())).args(["bs=64k", "of=/dev/null"]);
    let mut reader = Process::start(reader.stderr(Stdio::null()));
    let brick = &mut volume.bricks[0];
    brick.process.signal("TERM");
    let status = brick.process.end(PATIENCE).expect("the brick ends");
    assert_eq!(status.code(), Some(15), "{status}\n{}", brick.log());
    brick.restart(&[]);
    reader.end(PATIENCE).expect("the reader ends");
}
