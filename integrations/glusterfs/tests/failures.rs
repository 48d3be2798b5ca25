//! Clients that vanish, bricks that stop or are killed, options that make no sense: every request is answered once, and
//! nothing that was answered is lost.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use crate::support::{Machine, PATIENCE, Place, Process, Volume, apart, brick_file, figure, script, succeed, until};

/// One write passes; the next ones wait for ever.
const NO_WRITES: [(&str, &str); 2] = [("policy", "tbf"), ("rules", "none: op=write {requests_per_s=0.001, burst=1}")];

/// A program that writes blocks of 4 KiB, one after the other.
fn writer(file: &Path, blocks: u32) -> Process {
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=4k", "conv=notrunc"]).arg(format!("of={}", file.display()));
    Process::start(dd.arg(format!("count={blocks}")).stdout(Stdio::null()).stderr(Stdio::null()))
}

#[test]
fn what_a_vanished_client_has_queued_is_dropped() {
    apart("failures::inside_vanished_client");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_vanished_client() {
    let machine = Machine::new();
    for (name, place) in [("above", Place::Above), ("instead", Place::Instead)] {
        let mut volume = Volume::start(&machine, name, 1, place, &NO_WRITES);
        let (mut gone, stays) = (volume.mount(&[]), volume.mount(&[]));
        fs::write(stays.path.join("kept"), "kept").unwrap(); // the write that passes
        let _writer = writer(&gone.path.join("queued"), 9);
        let brick = &volume.bricks[0];
        until("a queued write", || figure(&brick.report(), "queued_requests") > 0);
        gone.process.signal("KILL");
        gone.process.end(PATIENCE).expect("the client ends");
        until("the drop", || figure(&brick.report(), "open_requests") == 0);
        let report = brick.report();
        assert!(figure(&report, "disconnected_requests") > 0, "{report:?}");
        assert_eq!(figure(&report, "queued_write_bytes"), 0, "{report:?}");
        assert_eq!(fs::read_to_string(stays.path.join("kept")).unwrap(), "kept");
        drop((gone, stays));
        volume.bricks.clear(); // its port is needed again
    }
}

#[test]
fn a_brick_stops_with_requests_pending() {
    apart("failures::inside_brick_stops");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_brick_stops() {
    let machine = Machine::new();
    for (name, place) in [("above", Place::Above), ("instead", Place::Instead)] {
        let mut volume = Volume::start(&machine, name, 1, place, &NO_WRITES);
        let mount = volume.mount(&[]);
        fs::write(mount.path.join("kept"), "kept").unwrap();
        let mut queued = writer(&mount.path.join("queued"), 9);
        until("a queued write", || figure(&volume.bricks[0].report(), "queued_requests") > 0);
        let brick = &mut volume.bricks[0];
        brick.process.signal("TERM");
        let status = brick.process.end(PATIENCE).expect("the brick ends with requests pending");
        // GlusterFS exits with the number of the signal; a crash is a signal by itself.
        assert_eq!(status.code(), Some(15), "{status}\n{}", brick.log());
        assert!(!queued.end(PATIENCE).expect("the writer gets an error").success());
        brick.restart(&[]);
        until("the brick", || fs::read_to_string(mount.path.join("kept")).is_ok_and(|text| text == "kept"));
        drop(mount);
        volume.bricks.clear();
    }
}

#[test]
fn killed_bricks_lose_nothing_that_was_answered() {
    apart("failures::inside_killed_bricks");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_killed_bricks() {
    let machine = Machine::new();
    let options = [("policy", "mlf"), ("depth", "2")];
    const WRITERS: u64 = 8;
    const BLOCKS: u64 = 200;
    const BLOCK: usize = 8192;
    let mut volume = Volume::start(&machine, "killed", 4, Place::Above, &options);
    let mount = volume.mount(&[]);
    // Each writer goes round its file, repeats a block until it is answered, and goes on until all bricks were killed.
    let byte = |writer: u64, n: u64| (writer * 31 + n * 7 + 1) as u8;
    let (killed, failures) = (AtomicBool::new(false), AtomicU32::new(0));
    let end = Instant::now() + PATIENCE;
    let write = |writer: u64| {
        let path = mount.path.join(format!("file{writer}"));
        let mut file = None;
        let mut n = 0;
        // Ends with an answered write: one that is not may have been done or not.
        loop {
            let open = || File::options().create(true).truncate(false).write(true).open(&path);
            let opened: std::io::Result<File> = file.take().map_or_else(open, Ok);
            let bytes = [byte(writer, n); BLOCK];
            match opened.and_then(|f| f.write_all_at(&bytes, n % BLOCKS * BLOCK as u64).map(|()| f)) {
                Ok(open) => {
                    (file, n) = (Some(open), n + 1);
                    if n >= BLOCKS && killed.load(SeqCst) {
                        return n;
                    }
                }
                Err(error) => {
                    assert!(Instant::now() < end, "{}: {error}", path.display());
                    failures.fetch_add(1, SeqCst);
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    };
    let written: Vec<u64> = std::thread::scope(|s| {
        let writers: Vec<_> = (0..WRITERS).map(|writer| s.spawn(move || write(writer))).collect();
        for brick in &mut volume.bricks {
            brick.process.signal("KILL");
            brick.process.end(PATIENCE).expect("the brick is killed");
            let before = brick.log().matches("Final graph").count();
            brick.restart(&[]);
            until("the brick's start", || brick.log().matches("Final graph").count() > before);
        }
        killed.store(true, SeqCst);
        writers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    assert!(failures.into_inner() > 0, "no writer noticed");
    drop(mount);
    let fresh = volume.mount(&[]);
    for (writer, written) in (0..WRITERS).zip(written) {
        let content = fs::read(fresh.path.join(format!("file{writer}"))).unwrap();
        assert_eq!(content.len() as u64, BLOCKS * BLOCK as u64, "file{writer}");
        for (at, bytes) in (0..).zip(content.chunks(BLOCK)) {
            let last = (written - 1 - at) / BLOCKS * BLOCKS + at;
            assert!(bytes.iter().all(|b| *b == byte(writer, last)), "file{writer}, block {at}: not of write {last}");
        }
    }
}

#[test]
fn glusterfs_own_processes_are_a_class_of_their_own() {
    apart("failures::inside_own_processes");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_own_processes() {
    let machine = Machine::new();
    // Writes of the internal class wait for ever; nobody else does.
    let options = [("policy", "tbf"), ("rules", "own: job=internal {requests_per_s=0.001, burst=2}")];
    let mut volume = Volume::start(&machine, "own", 1, Place::Above, &options);
    let user = volume.mount(&[]);
    script(&user.path, "for i in 1 2 3 4 5 6 7 8; do head -c 300000 /dev/zero >file$i; done; cat file* >/dev/null");
    assert_eq!(volume.sum("internal_requests"), 0);
    let healer = volume.mount(&["--client-pid=-6"]);
    let mut writers: Vec<Process> = (0..4).map(|n| writer(&healer.path.join(format!("healed{n}")), 50)).collect();
    // In the scheduler, or before it while the user counts as at work.
    until("waiting requests", || {
        let report = volume.bricks[0].report();
        figure(&report, "open_requests") >= 4 && figure(&report, "queued_requests") > 0
    });
    script(&user.path, "head -c 300000 /dev/zero >another && cat file1 >/dev/null");
    let mut client = healer;
    client.process.signal("KILL");
    client.process.end(PATIENCE).expect("the client ends");
    until("the drop", || volume.sum("open_requests") == 0);
    assert!(volume.sum("internal_requests") >= 4 && volume.sum("disconnected_requests") >= 4);
    for writer in &mut writers {
        writer.end(PATIENCE).expect("the writer gets an error");
    }
    script(&user.path, "cat another | wc -c | grep -qx 300000");
}

#[test]
fn glusterfs_own_processes_go_one_at_a_time_beside_clients_only() {
    apart("failures::inside_own_processes_beside_clients");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_own_processes_beside_clients() {
    let machine = Machine::new();
    // 50 ms a call.
    let mut volume = Volume::start(&machine, "beside", 1, Place::Above, &[("delay.delay-duration", "50000")]);
    let (user, healer) = (volume.mount_uncached(), volume.mount(&["--client-pid=-6"]));
    let client = writer(&user.path.join("busy"), 1_000_000);
    until("a client at work", || volume.sum("in_flight_batches") > 0);
    let _healers: Vec<Process> = (0..4).map(|n| writer(&healer.path.join(format!("healed{n}")), 100_000)).collect();
    // One in the scheduler, and three before it.
    until("waiting healers", || volume.sum("open_requests") >= 4);
    // A client that gets no processor for a second is not at work. Without the rule all of them would be there each time.
    let in_flight = || figure(&volume.bricks[0].report(), "in_flight_batches");
    let seen: Vec<_> = (0..20).map(|_| in_flight()).collect();
    assert!(seen.iter().filter(|batches| **batches > 2).count() <= 10, "{seen:?}");
    drop(client);
    until("healers at the same time", || volume.sum("in_flight_batches") > 2);
}

#[test]
fn requests_that_wait_for_a_mandatory_lock_hold_nobody_else() {
    if impresario_testing::python("fcntl").is_some() {
        apart("failures::inside_mandatory_locks");
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_mandatory_locks() {
    let machine = Machine::new();
    let python = impresario_testing::python("fcntl").unwrap();
    // Opens a file, and does what lines of its input say; prints a line for each.
    let text = "import fcntl, os, sys\nfile = os.open(sys.argv[1], os.O_RDWR)\nfor line in sys.stdin:\n    \
                word = line.strip()\n    \
                if word == 'lock': fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 4096)\n    \
                elif word == 'unlock': fcntl.lockf(file, fcntl.LOCK_UN, 4096)\n    \
                elif word == 'write': os.pwrite(file, b'w' * 4096, 0)\n    \
                elif word == 'read': os.pread(file, 4096, 0)\n    \
                print(word, flush=True)\n";
    let user = |path: &Path| {
        let mut command = Command::new(&python);
        let command = command.args(["-c", text]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (to, said) = std::sync::mpsc::channel();
        std::thread::spawn(move || BufReader::new(output).lines().map_while(Result::ok).try_for_each(|l| to.send(l)));
        (Process(child), input, said)
    };
    for (name, place, waits_s) in [("above", Place::Above, 11), ("instead", Place::Instead, 4)] {
        // A write of user 1 waits in the scheduler for so long; nothing else does.
        let rules = format!("late: op=write & user=1 {{requests_per_s={}, burst=1}}", 1.0 / waits_s as f64);
        let options = [("policy", "tbf"), ("rules", &rules), ("depth", "1"), ("locks.mandatory-locking", "forced")];
        let mut volume = Volume::start(&machine, name, 1, place, &options);
        let (mount, other) = (volume.mount_uncached(), volume.mount_uncached());
        for file in ["file", "another"] {
            fs::write(mount.path.join(file), [1; 8192]).unwrap();
            fs::set_permissions(mount.path.join(file), fs::Permissions::from_mode(0o666)).unwrap();
        }
        let (_owner, mut owner, owner_said) = user(&mount.path.join("file"));
        let (_waiter, mut waiter, waiter_said) = user(&other.path.join("file"));
        let (_third, mut third, third_said) = user(&other.path.join("another"));
        let says = |from: &Receiver<String>, what: &str| {
            let said = from.recv_timeout(PATIENCE / 4);
            if said.as_deref() != Ok(what) {
                // A panic would have to wait for programs that wait for the lock.
                eprintln!("{name}: {said:?} in the place of {what}: {:?}", volume.bricks[0].report());
                std::process::exit(1);
            }
        };
        // A lock's owner writes while another waits for that lock, and so does who has nothing to do with it.
        writeln!(owner, "lock").unwrap();
        says(&owner_said, "lock");
        writeln!(waiter, "write").unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert!(waiter_said.try_recv().is_err(), "{name}: a write passes the lock");
        writeln!(owner, "write").unwrap();
        says(&owner_said, "write");
        writeln!(third, "write").unwrap();
        says(&third_said, "write");
        writeln!(owner, "unlock").unwrap();
        says(&owner_said, "unlock");
        says(&waiter_said, "write");
        until("the end", || volume.sum("open_requests") == 0);
        // A write that was queued when the file was locked for the first time.
        let late = mount.path.join("late");
        fs::write(&late, [1; 8192]).unwrap();
        fs::set_permissions(&late, fs::Permissions::from_mode(0o666)).unwrap();
        let (_owner, mut owner, owner_said) = user(&late);
        let mut writers: Vec<Process> = (0..2)
            .map(|_| {
                let mut dd = Command::new("setpriv");
                dd.args(["--reuid=1", "--regid=1", "--clear-groups", "dd", "if=/dev/zero", "bs=4k", "count=1"]);
                Process::start(dd.args(["conv=notrunc", "status=none", "of=late"]).current_dir(&other.path))
            })
            .collect();
        until("a queued write", || volume.sum("queued_requests") == 1);
        writeln!(owner, "lock").unwrap();
        says(&owner_said, "lock");
        until("its delivery", || volume.sum("queued_requests") == 0);
        assert!(writers.iter_mut().any(|writer| writer.0.try_wait().unwrap().is_none()), "{name}: it passes the lock");
        writeln!(third, "read").unwrap();
        says(&third_said, "read");
        writeln!(owner, "unlock").unwrap();
        says(&owner_said, "unlock");
        for writer in &mut writers {
            assert!(writer.end(PATIENCE).expect("the writer ends").success());
        }
        // A large figure is written in full.
        let waited_ns: u64 = volume.bricks[0].report()["queue_ns_max"].parse().expect("digits");
        assert!(waited_ns > (waits_s - 2) * 1_000_000_000, "{name}: {waited_ns}");
        drop((mount, other));
        volume.bricks.clear();
    }
}

#[test]
fn a_limit_meets_the_tenant_that_it_names() {
    apart("failures::inside_limited_tenants");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_limited_tenants() {
    let machine = Machine::new();
    let away = "another-machine";
    for (name, job, tenant) in [
        ("user", "process", "user=1000"),
        ("host", "process", "client=host:another-machine"),
        ("group", "group", "job=4242"),
    ] {
        let rules = format!("slow: op=write & {tenant} {{requests_per_s=0.001, burst=1}}");
        let options = [("policy", "tbf"), ("rules", rules.as_str()), ("job", job)];
        let mut volume = Volume::start(&machine, name, 1, Place::Above, &options);
        let (mut limited, free) = (volume.mount_from(away), volume.mount(&[]));
        fs::set_permissions(&limited.path, fs::Permissions::from_mode(0o777)).unwrap();
        // The tenant's second write waits; others' writes, through the same mount unless that is the tenant, do not.
        let user = ["--reuid=1000", "--regid=4242", "--clear-groups"];
        let mut slow = Command::new("setpriv");
        slow.args(user).args(["dd", "if=/dev/zero", "of=slow", "bs=4k", "count=5", "status=none"]);
        let mut slow = Process::start(slow.current_dir(&limited.path).stderr(Stdio::null()));
        until("a queued write", || {
            assert!(slow.0.try_wait().unwrap().is_none(), "{name}: the writer has ended");
            volume.sum("queued_requests") == 1
        });
        let others = if name == "host" { &free } else { &limited };
        script(&others.path, "dd if=/dev/zero of=fast bs=4k count=50 status=none");
        assert!(slow.0.try_wait().unwrap().is_none() && volume.sum("queued_requests") == 1, "{name}");
        assert_eq!(fs::metadata(free.path.join("fast")).unwrap().len(), 50 * 4096);
        limited.process.signal("KILL");
        limited.process.end(PATIENCE).expect("the client ends");
        slow.end(PATIENCE).expect("the writer gets an error");
        drop((limited, free));
        volume.bricks.clear();
    }
}

#[test]
fn nonsense_is_refused_in_the_log() {
    apart("failures::inside_nonsense");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_nonsense() {
    let machine = Machine::new();
    let folder = machine.path("");
    fs::create_dir(folder.join("brick0")).unwrap();
    let log = folder.join("log");
    let start = |options: &[(&str, &str)]| {
        let _ = fs::remove_file(&log);
        fs::write(folder.join("brick.vol"), brick_file(&folder, 0, Place::Above, options)).unwrap();
        let mut brick = Command::new("glusterfsd");
        brick.args(["-N", "-f"]).arg(folder.join("brick.vol")).arg("-l").arg(&log);
        (Process::start(&mut brick), || fs::read_to_string(&log).unwrap_or_default())
    };
    for (options, says) in [
        (&[("policy", "nosuch")][..], &["option policy \"nosuch\"", "nosuch"][..]),
        (&[("policy", "mlf quantum_bytes=1")], &["option policy \"mlf quantum_bytes=1\"", "quantum_bytes"]),
        (&[("policy", "tbf"), ("rules", "a: user=x {bytes_per_s=1}")], &["option rules \"a: user=x", "\"x\""]),
        (&[("policy", "tbf"), ("rules", "a: client=host: {bytes_per_s=1}")], &["option rules", "name of a host"]),
        (&[("policy", "tbf"), ("rules", "a: * {bytes_per_s=\"1\"}")], &["option rules", "quotation marks"]),
        (&[("depth", "0")], &["depth", "[1 - 4096]"]),
        (&[("depth", "many")], &["option \"depth\"", "many"]),
        (&[("internal-depth", "-1")], &["internal-depth", "-1"]),
        (&[("merge", "sideways")], &["merge", "sideways"]),
        (&[("job", "nobody")], &["job", "nobody"]),
        (&[("threads", "257")], &["option threads \"257\"", "0 to 256, or auto"]),
        (&[("threads", "4x")], &["option threads \"4x\""]),
        (&[("queue-requests", "0")], &["queue-requests", "[1 - 1048576]"]),
        (&[("queue-bytes", "1KB")], &["queue-bytes", "1024"]),
        (&[("read-ahead", "1MB")], &["option read-ahead 1048576", "4194304"]),
        (&[("read-ahead", "1TB")], &["read-ahead", "1099511627776"]),
    ] {
        let (mut brick, log) = start(options);
        let status = brick.end(PATIENCE).unwrap_or_else(|| panic!("{options:?} is accepted"));
        assert!(status.code().is_some_and(|c| c != 0), "{options:?}: {status}: a refusal is no crash");
        let log = log();
        let errors: Vec<&str> = log.lines().filter(|l| l.contains("] E [") && l.contains("scheduler")).collect();
        assert!(errors.iter().any(|l| says.iter().all(|s| l.contains(s))), "{options:?} says {errors:#?}");
    }
    // What only looks odd is taken: rules of a policy without rules, names of hosts.
    for options in [
        &[("policy", "  mlf   quantum_bytes=65536"), ("rules", "a: user=1 {bytes_per_s=1}")][..],
        &[("policy", "mclock"), ("rules", "a: client=host:a.b-c|host:d & job=internal|7 {weight=2}; b: * {}")],
        &[("policy", "wfq by=user"), ("rules", ""), ("threads", "3"), ("queue-bytes", "2MB")],
    ] {
        let (brick, log) = start(options);
        until("the start", || log().contains("Final graph"));
        brick.signal("TERM");
    }
}

#[test]
fn a_full_scheduler_passes_requests_on() {
    if impresario_testing::require("fio") {
        apart("failures::inside_full_scheduler");
    }
}

/// The scheduler holds little, and a limit keeps that there: what finds no room goes straight to the translator below, and
/// nothing is lost or out of order.
#[test]
#[ignore = "run by another test as a process"]
fn inside_full_scheduler() {
    let machine = Machine::new();
    for (name, place, option) in [
        ("bytes", Place::Above, ("queue-bytes", "1MB")),
        ("requests", Place::Above, ("queue-requests", "4")),
        ("bytes-instead", Place::Instead, ("queue-bytes", "1MB")),
    ] {
        let limit = [("policy", "tbf"), ("rules", "slow: op=write {requests_per_s=100, burst=1}"), option];
        let mut volume = Volume::start(&machine, name, 1, place, &limit);
        let mount = volume.mount(&[]);
        let mut fio = Command::new("fio");
        fio.args(["--name=job", "--ioengine=libaio", "--direct=1", "--size=8m", "--rw=randwrite", "--bs=128k"]);
        fio.args(["--iodepth=32", "--verify=crc32c", "--verify_fatal=1"]);
        succeed(fio.current_dir(&mount.path));
        let report = volume.bricks[0].report();
        assert!(figure(&report, "unscheduled_requests") > 0, "{name}: {report:?}");
        for left in ["open_requests", "queued_write_bytes", "queued_requests"] {
            assert_eq!(figure(&report, left), 0, "{name}: {report:?}");
        }
        drop(mount);
        volume.bricks.clear();
    }
}

/// Where a merged write meets the end of a full disk, what it has written is told as it would be of each write alone.
#[test]
fn a_full_disk_in_the_middle_of_merged_writes() {
    apart("failures::inside_full_disk");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_full_disk() {
    const LEN: usize = 20 << 10;
    const MOUNTS: usize = 8;
    let machine = Machine::new();
    let disk = machine.path("full");
    fs::create_dir(&disk).unwrap();
    succeed(Command::new("mount").args(["-t", "tmpfs", "-o", "size=12m", "none"]).arg(&disk));
    // Slow enough that a queue forms.
    let slow = ("delay.delay-duration", "2000");
    let options = [("policy", "mlf"), ("depth", "1"), ("merge", "file"), ("storage.reserve", "0"), slow];
    let mut volume = Volume::start(&machine, "full", 1, Place::Above, &options);
    // A mount has one write of a file on its way at a time.
    let mounts: Vec<_> = (0..MOUNTS).map(|_| volume.mount(&["--direct-io-mode=enable"])).collect();
    let other = volume.mount(&["--direct-io-mode=enable"]);
    script(&disk, "head -c 10m /dev/zero >filler; ! cat /dev/zero >rest; truncate -s -610K rest");
    let mut short = 0;
    for round in 0..10 {
        let name = format!("f{round}");
        File::create(mounts[0].path.join(&name)).unwrap();
        let next = AtomicU32::new(0);
        let shorts = AtomicU32::new(0);
        let write = |path: &Path| {
            let file = File::options().write(true).open(path.join(&name)).unwrap();
            loop {
                let at = u64::from(next.fetch_add(1, SeqCst)) * LEN as u64;
                match file.write_at(&[round + 1; LEN], at) {
                    Ok(LEN) => {}
                    Ok(_) => _ = shorts.fetch_add(1, SeqCst),
                    Err(error) => {
                        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
                        return;
                    }
                }
            }
        };
        std::thread::scope(|s| mounts.iter().for_each(|mount| _ = s.spawn(|| write(&mount.path))));
        let there = fs::metadata(disk.join("brick0").join(&name)).unwrap();
        assert!((1..4 << 20).contains(&there.len()), "{there:?}: one shard is filled, but not the disk");
        // The shard translator adds up what the answers say that the file has grown.
        assert_eq!(fs::metadata(other.path.join(&name)).unwrap().blocks(), there.blocks(), "round {round}");
        fs::remove_file(other.path.join(&name)).unwrap();
        short += shorts.into_inner();
    }
    let report = volume.bricks[0].report();
    println!("{short} short writes, {report:?}");
    assert!(figure(&report, "merged_calls") > 0 && figure(&report, "repeated_requests") > 0, "{report:?}");
}

#[test]
fn valgrind_finds_nothing_in_a_brick() {
    if impresario_testing::require("valgrind") {
        apart("failures::inside_valgrind");
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_valgrind() {
    let machine = Machine::new();
    let options = [("policy", "mlf"), ("depth", "1")];
    let mut volume = Volume::start(&machine, "valgrind", 1, Place::Above, &options);
    let brick = &mut volume.bricks[0];
    brick.process.signal("KILL");
    brick.process.end(PATIENCE);
    let found = machine.path("valgrind.log");
    let log = format!("--log-file={}", found.display());
    brick.restart(&["valgrind", "--fair-sched=yes", "--leak-check=full", "--num-callers=40", &log]);
    let mount = volume.mount(&[]);
    script(
        &mount.path,
        "for i in 1 2 3; do dd if=/dev/urandom of=f$i bs=300k count=4 conv=fsync status=none & done; wait
         cat f1 f2 f3 >all; cmp <(cat f1 f2 f3) all; truncate -s 100 f1; mv f2 moved; rm f3",
    );
    let mut fio = Command::new("fio");
    fio.args(["--name=job", "--ioengine=libaio", "--direct=1", "--size=1m", "--rw=write", "--bs=16k", "--iodepth=16"]);
    succeed(fio.arg("--verify=crc32c").current_dir(&mount.path));
    let report = volume.bricks[0].report();
    assert!(figure(&report, "merged_calls") > 0, "{report:?}");
    drop(mount);
    let brick = &mut volume.bricks[0];
    brick.process.signal("TERM");
    brick.process.end(PATIENCE).expect("the brick ends");
    let text = fs::read_to_string(found).unwrap();
    let faults = faults(&text);
    assert!(faults.is_empty(), "{faults:#?}");
    assert!(text.contains("ERROR SUMMARY") && text.contains("LEAK SUMMARY"), "{text}");
}

/// What valgrind found in the translator and its library. GlusterFS's own faults are not ours to judge.
fn faults(text: &str) -> Vec<String> {
    let sources = ["ahead", "batches", "requests", "runs", "tenants", "translator"].map(|name| format!("({name}.c:"));
    let ours = |frame: &str| frame.contains("impresario") || sources.iter().any(|source| frame.contains(source));
    // Each line begins with ==PROCESS==.
    let lines: Vec<&str> = text.lines().map(|line| line.splitn(3, "==").nth(2).unwrap_or(line).trim()).collect();
    let blocks = lines.split(|line| line.is_empty());
    let is_ours = |block: &&[&str]| match block[0].contains("definitely lost") {
        // Who had it allocated: what other translators allocate is theirs, even if they were called by ours.
        true => block.iter().find(|frame| ours(frame) || frame.contains("/xlator/")).is_some_and(|frame| ours(frame)),
        false => {
            let is_fault = block.iter().any(|line| line.contains("Invalid") || line.contains("ninitialised"));
            is_fault && block.iter().any(|frame| ours(frame))
        }
    };
    blocks.filter(|block| !block.is_empty()).filter(is_ours).map(|block| block.join("\n")).collect()
}

#[test]
fn faults_of_the_translator_are_told_from_those_of_others() {
    let leak = |frames: &str| {
        let frames: String = frames.split(';').map(|frame| format!("==7==    by 0x1: {frame}\n")).collect();
        format!("==7== \n==7== 40 bytes in 1 blocks are definitely lost in loss record 3 of 9\n{frames}==7== \n")
    };
    let (stub, posix) =
        ("fop_readv_stub (in /usr/lib/libglusterfs.so.0)", "x (in /usr/lib/10.3/xlator/storage/posix.so)");
    let (enter, above) = ("enter (requests.c:231)", "y (in /usr/lib/10.3/xlator/protocol/server.so)");
    assert_eq!(faults(&leak(&format!("malloc (in /x.so);{stub};{enter};{above}"))).len(), 1);
    assert_eq!(faults(&leak(&format!("malloc (in /x.so);{posix};{enter};{above}"))).len(), 0);
    assert_eq!(faults(&leak(&format!("malloc (in /x.so);{above}"))).len(), 0);
    assert_eq!(faults("==7== Invalid read of size 8\n==7==    at 0x1: impresario_submit (a.rs:1)\n==7== \n").len(), 1);
    assert_eq!(faults(&format!("==7== Invalid read of size 8\n==7==    at 0x1: {above}\n==7== \n")).len(), 0);
}
