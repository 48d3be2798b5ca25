//! Locks between nodes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_fuse::MountOptions;
use impresario_testing::until;

use crate::cluster::{Cluster, Node, errno};
use crate::files::pattern;

const READ: i32 = libc::F_RDLCK;
const WRITE: i32 = libc::F_WRLCK;
const UNLOCK: i32 = libc::F_UNLCK;

fn two_nodes() -> Option<(Node, Node)> {
    let cluster = Cluster::start(Duration::from_secs(20))?;
    // The kernels may cache for long: a correct result does not depend on luck.
    let patient = || MountOptions { cache_time: Duration::from_secs(600), ..Default::default() };
    Some((cluster.mount(patient()), cluster.mount(patient())))
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn described(kind: i32, start: i64, len: i64) -> libc::flock {
    let (l_type, l_whence) = (kind as i16, libc::SEEK_SET as i16);
    libc::flock { l_type, l_whence, l_start: start, l_len: len, l_pid: 0 }
}

fn call(fd: RawFd, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: an open descriptor, and a structure that lives over the call.
    match unsafe { libc::fcntl(fd, command, lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Locks for the whole process; does not wait.
fn lock(file: &File, kind: i32, start: i64, len: i64) -> io::Result<()> {
    call(file.as_raw_fd(), libc::F_SETLK, &mut described(kind, start, len))
}

/// The same, and waits.
fn wait_for(file: &File, kind: i32, start: i64, len: i64) -> io::Result<()> {
    call(file.as_raw_fd(), libc::F_SETLKW, &mut described(kind, start, len))
}

/// What excludes a lock: kind, start, length, process.
fn held(file: &File, kind: i32, start: i64, len: i64) -> (i32, i64, i64, i32) {
    let mut lock = described(kind, start, len);
    call(file.as_raw_fd(), libc::F_GETLK, &mut lock).unwrap();
    (lock.l_type.into(), lock.l_start, lock.l_len, lock.l_pid)
}

/// Runs a part of the test in a process of its own, which ends with its result. It shares this one's standard streams and the
/// open file `shared`, and may do system calls only. Of what the tests beside this one have open it keeps nothing: their folders
/// and file systems would be in use for as long as it lives.
fn in_child(shared: &File, run: impl FnOnce() -> i32) -> libc::pid_t {
    let fd = shared.as_raw_fd() as libc::c_uint;
    // SAFETY: the child makes system calls and ends.
    match unsafe { libc::fork() } {
        0 => {
            let first = libc::STDERR_FILENO as libc::c_uint + 1;
            let closed = close_all(first, fd - 1) && close_all(fd + 1, libc::c_uint::MAX);
            let code = if closed { run() } else { NOT_CLOSED };
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(code) }
        }
        pid => pid,
    }
}

/// Of a child that could not close what it does not share.
const NOT_CLOSED: i32 = 120;

/// Closes these descriptors; there may be none.
fn close_all(first: libc::c_uint, last: libc::c_uint) -> bool {
    // SAFETY: only a child that uses none of them does it.
    first > last || unsafe { libc::close_range(first, last, 0) } == 0
}

#[test]
fn a_child_keeps_open_what_it_shares_and_nothing_else() {
    let (shared, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    // SAFETY: waits to be killed.
    let child = in_child(&shared, || unsafe { libc::pause() });
    let open = || -> Vec<RawFd> {
        let entries = fs::read_dir(format!("/proc/{child}/fd")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
    };
    until("the child closes what it does not share", || open().iter().all(|fd| *fd <= 2 || *fd == shared.as_raw_fd()));
    assert!(open().contains(&shared.as_raw_fd()));
    kill(child, libc::SIGKILL);
    assert_eq!(end_of(child), libc::SIGKILL);
    drop(other);
}

fn end_of(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: a child of ours, and a place for its status.
    until("the child ends", || unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } == pid);
    status
}

fn kill(pid: libc::pid_t, signal: i32) {
    // SAFETY: a child of ours that was not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn sleep_ms(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// Waits on `node` for an exclusive lock of a file that is locked; `release` frees it.
#[track_caller]
fn gets_it_when(node: &Node, release: impl FnOnce()) {
    let file = open(&node.at("f"));
    assert_eq!(errno(lock(&file, WRITE, 0, 0)), libc::EAGAIN);
    let has_it = Arc::new(AtomicBool::new(false));
    let waiter = std::thread::spawn({
        let has_it = has_it.clone();
        move || {
            wait_for(&file, WRITE, 0, 0).unwrap();
            has_it.store(true, Ordering::SeqCst);
            lock(&file, UNLOCK, 0, 0).unwrap();
        }
    });
    sleep_ms(150);
    assert!(!has_it.load(Ordering::SeqCst), "it is locked");
    release();
    until("the waiter gets the lock, which is free", || has_it.load(Ordering::SeqCst));
    waiter.join().unwrap();
}

#[test]
fn locks_exclude_across_nodes() {
    let Some((one, two)) = two_nodes() else { return };
    let (a, b) = (open(&one.at("f")), open(&two.at("f")));
    lock(&a, WRITE, 0, 10).unwrap();
    assert_eq!(errno(lock(&b, WRITE, 9, 1)), libc::EAGAIN);
    assert_eq!(errno(lock(&b, READ, 0, 0)), libc::EAGAIN);
    lock(&b, WRITE, 10, 0).unwrap();
    assert_eq!(errno(lock(&a, READ, 1 << 40, 1)), libc::EAGAIN);
    lock(&a, READ, 0, 10).unwrap();
    lock(&b, READ, 5, 1).unwrap();
    assert_eq!(errno(lock(&a, WRITE, 5, 1)), libc::EAGAIN);
    lock(&a, WRITE, 0, 5).unwrap();
    lock(&a, UNLOCK, 0, 0).unwrap();
    lock(&b, WRITE, 0, 0).unwrap();
    // Another file is another matter.
    lock(&open(&one.at("g")), WRITE, 0, 0).unwrap();
}

#[test]
fn who_holds_a_lock_is_told() {
    let Some((one, two)) = two_nodes() else { return };
    let (a, b) = (open(&one.at("f")), open(&two.at("f")));
    assert_eq!(held(&b, WRITE, 0, 0).0, UNLOCK);
    lock(&a, WRITE, 100, 10).unwrap();
    assert_eq!(held(&b, READ, 0, 0), (WRITE, 100, 10, 0), "processes of other nodes have no number here");
    assert_eq!(held(&a, WRITE, 0, 0).0, UNLOCK, "its own");
    let child = in_child(&a, || {
        let mut lock = described(READ, 0, 0);
        let asked = call(a.as_raw_fd(), libc::F_GETLK, &mut lock).is_ok();
        // SAFETY: asks for the number of the parent.
        let is_parent = lock.l_pid == unsafe { libc::getppid() };
        i32::from(!(asked && is_parent && i32::from(lock.l_type) == WRITE && lock.l_start == 100))
    });
    assert_eq!(end_of(child), 0, "a process of the same node");
    lock(&a, READ, 200, 0).unwrap();
    assert_eq!(held(&b, WRITE, 150, 0), (READ, 200, 0, 0), "to the end of the file");
}

#[test]
fn a_waiter_gets_a_lock_when_it_is_free() {
    let Some((one, two)) = two_nodes() else { return };
    let a = open(&one.at("f"));
    lock(&a, WRITE, 5, 1).unwrap();
    gets_it_when(&two, || lock(&a, UNLOCK, 0, 0).unwrap());
    lock(&a, READ, 5, 1).unwrap();
    gets_it_when(&two, || drop(File::open(one.at("f")).unwrap()));
    lock(&a, WRITE, 5, 1).unwrap();
    gets_it_when(&two, || drop(a));
    let mut description = described(WRITE, 0, 1);
    let a = open(&one.at("f"));
    call(a.as_raw_fd(), libc::F_OFD_SETLK, &mut description).unwrap();
    drop(File::open(one.at("f")).unwrap());
    gets_it_when(&two, || drop(a));
}

#[test]
fn a_waiter_gets_a_lock_when_its_holder_is_killed() {
    let Some((one, two)) = two_nodes() else { return };
    let a = open(&one.at("f"));
    let holder = in_child(&a, || {
        lock(&a, WRITE, 0, 0).map_or(1, |()| {
            // SAFETY: waits to be killed.
            unsafe { libc::pause() }
        })
    });
    let b = open(&two.at("f"));
    until("the child locks", || held(&b, READ, 0, 0).0 == WRITE);
    gets_it_when(&two, || {
        kill(holder, libc::SIGKILL);
        assert_eq!(end_of(holder), libc::SIGKILL);
    });
}

#[test]
fn a_waiter_can_be_killed_and_then_holds_up_nobody() {
    let Some((one, two)) = two_nodes() else { return };
    let (a, b) = (open(&one.at("f")), open(&two.at("f")));
    lock(&a, READ, 0, 0).unwrap();
    for signal in [libc::SIGKILL, libc::SIGINT, libc::SIGTERM] {
        let waiter = in_child(&b, || i32::from(wait_for(&b, WRITE, 0, 0).is_err()));
        sleep_ms(200);
        let began = Instant::now();
        kill(waiter, signal);
        assert_eq!(end_of(waiter) & 0x7f, signal);
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
    // It would wait behind one that waits to write.
    wait_for(&b, READ, 0, 0).unwrap();
    lock(&b, UNLOCK, 0, 0).unwrap();
    lock(&a, UNLOCK, 0, 0).unwrap();
    lock(&b, WRITE, 0, 0).unwrap();
}

#[test]
fn many_waiters_hold_up_no_other_request_and_all_get_their_turn() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    let few = || MountOptions { threads: Some(2), ..Default::default() };
    let (one, two) = (cluster.mount(few()), cluster.mount(few()));
    let a = open(&one.at("f"));
    lock(&a, WRITE, 0, 0).unwrap();
    let inside = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for waiter in 0..24 {
            let (node, inside) = (if waiter % 2 == 0 { &one } else { &two }, &inside);
            scope.spawn(move || {
                // As if it were a process of its own.
                let file = open(&node.at("f"));
                call(file.as_raw_fd(), libc::F_OFD_SETLKW, &mut described(WRITE, 0, 0)).unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two are inside");
                sleep_ms(2);
                inside.store(false, Ordering::SeqCst);
                call(file.as_raw_fd(), libc::F_OFD_SETLK, &mut described(UNLOCK, 0, 0)).unwrap();
            });
        }
        sleep_ms(500);
        for node in [&one, &two] {
            fs::write(node.at("g"), pattern(1, 100_000)).unwrap();
            assert!(fs::read(node.at("g")).unwrap() == pattern(1, 100_000));
        }
        lock(&a, UNLOCK, 0, 0).unwrap();
    });
}

extern "C" fn on_alarm(_: i32) {}

/// In a child: has the timer interrupt it in 200 ms.
fn set_alarm(flags: i32) {
    // SAFETY: a handler that does nothing, and structures that live over the calls; zeros are valid in them.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_alarm as *const () as usize;
        action.sa_flags = flags;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
        let mut timer: libc::itimerval = std::mem::zeroed();
        timer.it_value.tv_usec = 200_000;
        libc::syscall(libc::SYS_setitimer, libc::ITIMER_REAL, &timer, std::ptr::null_mut::<libc::itimerval>());
    }
}

#[test]
fn a_signal_interrupts_a_waiter_or_not_as_its_handler_says() {
    let Some((one, two)) = two_nodes() else { return };
    let (a, b) = (open(&one.at("f")), open(&two.at("f")));
    lock(&a, WRITE, 0, 0).unwrap();
    let interrupted = in_child(&b, || {
        set_alarm(0);
        let error = wait_for(&b, WRITE, 0, 0).map_err(|error| error.raw_os_error());
        i32::from(error != Err(Some(libc::EINTR)))
    });
    let restarted = in_child(&b, || {
        set_alarm(libc::SA_RESTART);
        wait_for(&b, WRITE, 0, 0).map_or(1, |()| 0)
    });
    assert_eq!(end_of(interrupted), 0, "it was not interrupted");
    sleep_ms(300);
    lock(&a, UNLOCK, 0, 0).unwrap();
    assert_eq!(end_of(restarted), 0, "it did not go on");
}

#[test]
fn a_deadlock_over_nodes_is_found() {
    let Some((one, two)) = two_nodes() else { return };
    let (f1, g1) = (open(&one.at("f")), open(&one.at("g")));
    let (f2, g2) = (open(&two.at("f")), open(&two.at("g")));
    lock(&f1, WRITE, 0, 0).unwrap();
    lock(&g2, WRITE, 0, 0).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| wait_for(&f2, WRITE, 0, 0));
        sleep_ms(200);
        assert_eq!(errno(wait_for(&g1, WRITE, 0, 0)), libc::EDEADLK);
        lock(&f1, UNLOCK, 0, 0).unwrap();
        waiter.join().unwrap().unwrap();
    });
}

/// Both nodes keep the file open, and their kernels cache it. Each round one changes a number and adds a record, without
/// anything but a lock around it.
#[test]
fn who_has_a_lock_sees_what_others_wrote_before() {
    let Some((one, two)) = two_nodes() else { return };
    let files = [open(&one.at("f")), open(&two.at("f"))];
    files[0].write_all_at(&[0; 8], 0).unwrap();
    let rounds: u64 = 150;
    std::thread::scope(|scope| {
        for file in &files {
            scope.spawn(move || {
                for _ in 0..rounds {
                    wait_for(file, WRITE, 0, 8).unwrap();
                    let mut bytes = [0; 8];
                    file.read_exact_at(&mut bytes, 0).unwrap();
                    let number = u64::from_le_bytes(bytes);
                    assert_eq!(file.metadata().unwrap().len(), 8 + number * 100);
                    if number > 0 {
                        let mut last = [0; 100];
                        file.read_exact_at(&mut last, 8 + (number - 1) * 100).unwrap();
                        assert_eq!(last, [number as u8; 100]);
                    }
                    file.write_all_at(&[(number + 1) as u8; 100], 8 + number * 100).unwrap();
                    file.write_all_at(&(number + 1).to_le_bytes(), 0).unwrap();
                    lock(file, UNLOCK, 0, 8).unwrap();
                }
            });
        }
    });
    for file in &files {
        lock(file, READ, 0, 8).unwrap();
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), 2 * rounds);
    }
}

#[test]
fn names_beside_a_locked_file_are_seen_at_once() {
    let Some((one, two)) = two_nodes() else { return };
    let (a, b) = (open(&one.at("f")), open(&two.at("f")));
    lock(&a, READ, 0, 0).unwrap();
    lock(&b, READ, 0, 0).unwrap();
    for round in 0..10 {
        fs::write(one.at("f-journal"), pattern(round, 100)).unwrap();
        assert_eq!(fs::read_dir(two.mount_point()).unwrap().count(), 2);
        assert!(fs::metadata(two.at("f-journal")).is_ok());
        assert!(fs::read(two.at("f-journal")).unwrap() == pattern(round, 100));
        let by = if round % 2 == 0 { &one } else { &two };
        fs::remove_file(by.at("f-journal")).unwrap();
        for node in [&two, by] {
            assert_eq!(errno(fs::metadata(node.at("f-journal"))), libc::ENOENT, "round {round}");
        }
    }
}

/// Transactions of two sqlite programs on two nodes at the same time, in its usual journal mode.
fn sqlite(nodes: [&Node; 2], transactions: usize) {
    let shell = |node: &Node, script: &str| {
        let mut shell = Command::new("sqlite3");
        shell.args(["-bail", "-cmd", ".timeout 60000"]).arg(node.at("data.db"));
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        io::Write::write_all(&mut shell.stdin.take().unwrap(), script.as_bytes()).unwrap();
        shell
    };
    let answer = |shell: std::process::Child| {
        let output = shell.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
        text
    };
    let made = "CREATE TABLE total(n INTEGER); INSERT INTO total VALUES(0);
                CREATE TABLE log(id INTEGER PRIMARY KEY, who TEXT, filler BLOB);\n";
    assert_eq!(answer(shell(nodes[0], made)), "");
    let script = |who: &str| {
        let transaction = format!(
            "BEGIN IMMEDIATE; UPDATE total SET n = n + 1;
             INSERT INTO log(who, filler) VALUES('{who}', randomblob(300)); COMMIT;\n"
        );
        transaction.repeat(transactions)
    };
    let running = [shell(nodes[0], &script("one")), shell(nodes[1], &script("two"))];
    running.into_iter().for_each(|shell| assert_eq!(answer(shell), ""));
    let question = "PRAGMA integrity_check; SELECT n FROM total; SELECT count(*) FROM log;
                    SELECT count(*) FROM log WHERE who = 'one';\n";
    let want = format!("ok\n{}\n{}\n{transactions}\n", 2 * transactions, 2 * transactions);
    for node in nodes {
        assert_eq!(answer(shell(node, question)), want);
    }
}

#[test]
fn sqlite_on_two_nodes_loses_no_transaction() {
    if !impresario_testing::require("sqlite3") {
        return;
    }
    let Some((one, two)) = two_nodes() else { return };
    sqlite([&one, &two], 150);
}

#[test]
#[ignore = "minutes; run by make soak"]
fn sqlite_on_two_nodes_loses_no_transaction_of_thousands() {
    if !impresario_testing::require("sqlite3") {
        return;
    }
    let Some((one, two)) = two_nodes() else { return };
    sqlite([&one, &two], 2500);
}

#[test]
fn locks_outlast_a_restarted_metadata_server() {
    let Some(cluster) = Cluster::with_io_nodes(Duration::from_secs(20), 2) else { return };
    let (one, two) =
        (cluster.mount_through(0, MountOptions::default()), cluster.mount_through(1, MountOptions::default()));
    let (a, b) = (open(&one.at("f")), open(&two.at("f")));
    lock(&a, WRITE, 0, 10).unwrap();
    lock(&b, READ, 20, 10).unwrap();
    cluster.stop("meta");
    cluster.start_again("meta");
    assert_eq!(errno(lock(&b, READ, 0, 1)), libc::EAGAIN);
    assert_eq!(errno(lock(&a, WRITE, 20, 1)), libc::EAGAIN);
    a.write_all_at(b"still mine", 0).unwrap();
    gets_it_when(&two, || {
        cluster.stop("meta");
        cluster.start_again("meta");
        lock(&a, UNLOCK, 0, 0).unwrap();
    });
    // And a lost I/O node.
    lock(&a, WRITE, 0, 10).unwrap();
    cluster.stop("io.0");
    assert_eq!(errno(lock(&b, READ, 0, 1)), libc::EAGAIN);
    gets_it_when(&two, || lock(&a, UNLOCK, 0, 0).unwrap());
}

/// `flock` without waiting.
fn flock(file: &File, operation: i32) -> io::Result<()> {
    // SAFETY: an open descriptor.
    match unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[test]
fn flock_excludes_across_nodes() {
    use libc::{LOCK_EX, LOCK_SH, LOCK_UN};
    let Some((one, two)) = two_nodes() else { return };
    let (a, b, also_a) = (open(&one.at("f")), open(&two.at("f")), open(&one.at("f")));
    flock(&a, LOCK_SH).unwrap();
    flock(&b, LOCK_SH).unwrap();
    assert_eq!(errno(flock(&b, LOCK_EX)), libc::EAGAIN);
    flock(&a, LOCK_UN).unwrap();
    flock(&b, LOCK_EX).unwrap();
    assert_eq!(errno(flock(&a, LOCK_SH)), libc::EAGAIN);
    flock(&b, LOCK_SH).unwrap();
    flock(&a, LOCK_SH).unwrap();
    flock(&b, LOCK_UN).unwrap();
    assert_eq!(errno(flock(&also_a, LOCK_EX)), libc::EAGAIN, "another open of the same process");
    assert_eq!(errno(lock(&b, WRITE, 100, 1)), libc::EAGAIN, "as on NFS it is one kind of lock with fcntl");
    // What was written under the lock is seen by who has it next.
    flock(&a, LOCK_EX).unwrap();
    for turn in 0..20u8 {
        let (from, to) = if turn % 2 == 0 { (&a, &b) } else { (&b, &a) };
        from.write_all_at(&[turn; 5000], 0).unwrap();
        flock(from, LOCK_UN).unwrap();
        flock(to, LOCK_EX).unwrap();
        let mut seen = [0; 5000];
        to.read_exact_at(&mut seen, 0).unwrap();
        assert_eq!(seen, [turn; 5000]);
    }
    drop((a, b, also_a));
}

#[test]
fn flock_ends_with_the_last_descriptor_of_an_open_file() {
    let Some((one, two)) = two_nodes() else { return };
    let a = open(&one.at("f"));
    flock(&a, libc::LOCK_EX).unwrap();
    let copy = a.try_clone().unwrap();
    // A child shares the open file; other opens of the file are closed meanwhile.
    let child = in_child(&a, || {
        // SAFETY: waits to be killed.
        unsafe { libc::pause() }
    });
    drop(File::open(one.at("f")).unwrap());
    drop(a);
    let b = open(&two.at("f"));
    assert_eq!(errno(flock(&b, libc::LOCK_SH)), libc::EAGAIN, "a copy and a child have it");
    drop(copy);
    assert_eq!(errno(flock(&b, libc::LOCK_SH)), libc::EAGAIN, "a child has it");
    let waiter = std::thread::spawn(move || {
        // SAFETY: an open descriptor.
        assert_eq!(unsafe { libc::flock(b.as_raw_fd(), libc::LOCK_EX) }, 0);
        b
    });
    sleep_ms(100);
    assert!(!waiter.is_finished());
    kill(child, libc::SIGKILL);
    end_of(child);
    until("the waiter gets the lock of the child, which is gone", || waiter.is_finished());
    let b = waiter.join().unwrap();
    // flock(1) in scripts: on the other node it waits, and is killed while it does.
    let mut script = Command::new("flock").arg(one.at("f")).arg("true").stdin(Stdio::null()).spawn().unwrap();
    sleep_ms(100);
    assert!(script.try_wait().unwrap().is_none());
    kill(script.id() as libc::pid_t, libc::SIGTERM);
    until("a waiting flock is ended", || script.try_wait().unwrap().is_some());
    flock(&b, libc::LOCK_UN).unwrap();
    assert!(Command::new("flock").arg("-n").arg(one.at("f")).arg("true").status().unwrap().success());
}

#[test]
fn locks_may_stay_on_one_node() {
    let Some(cluster) = Cluster::start(Duration::from_secs(20)) else { return };
    let local = || MountOptions { shared_locks: false, ..Default::default() };
    let (one, two) = (cluster.mount(local()), cluster.mount(local()));
    let (a, b) = (open(&one.at("f")), open(&two.at("f")));
    lock(&a, WRITE, 0, 0).unwrap();
    lock(&b, WRITE, 0, 0).unwrap();
    let child = in_child(&a, || i32::from(lock(&a, READ, 0, 1).is_ok()));
    assert_eq!(end_of(child), 0, "another process of the node");
    flock(&a, libc::LOCK_EX).unwrap();
    flock(&b, libc::LOCK_EX).unwrap();
    assert_eq!(errno(flock(&open(&one.at("f")), libc::LOCK_EX)), libc::EAGAIN);
    fs::remove_file(one.at("f")).unwrap();
}
