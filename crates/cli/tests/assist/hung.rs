//! A manager of all users while one user's file system hangs: the others are served as before.

use std::fs::File;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use impresario_assist::report::Report;
use impresario_ring::message::{ToManager, register};
use impresario_testing::{PATIENCE, page_cache, require, skip, until};
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType};
use rustix::process::Signal;
use serde_json::json;

use crate::hung_mount::{Asked, HungMount};
use crate::support::{Process, run_command};
use crate::tools::{Daemon, Folder, Nobody, WAIT_MS, assist, forget, plain, reading, try_compile};
use crate::watched::{can_precede, can_trace};

/// Bytes of each file of the users who are well.
const FILE_BYTES: usize = 512 << 10;
/// Users have numbers from here on; the one whose files hang has the first.
const FIRST_UID: u32 = 41_000;
/// Workers of the manager, which are started as they are needed, and its other threads.
const THREADS: u64 = 8 + 8;
/// With those started in the place of others.
const THREADS_MAX: u64 = THREADS + 24;

/// What is measured of a manager.
#[derive(Clone, Copy, Debug)]
struct Holds {
    descriptors: u64,
    threads: u64,
    memory_kib: u64,
}

impl Holds {
    fn of(daemon: &Daemon) -> Holds {
        let proc = PathBuf::from(format!("/proc/{}", daemon.process.pid()));
        let status = std::fs::read_to_string(proc.join("status")).unwrap();
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let descriptors = std::fs::read_dir(proc.join("fd")).unwrap().count() as u64;
        Holds { descriptors, threads: number("Threads:"), memory_kib: number("VmRSS:") }
    }
}

/// A manager of all users, and programs that run as several of them.
struct Node<'a> {
    folder: &'a Folder,
    daemon: Daemon,
    users: u32,
    processes: u32,
    files: u32,
}

impl Node<'_> {
    fn command(&self, uid: u32, words: &[&str]) -> Command {
        let mut command = Command::new(self.folder.at(words[0]));
        command.args(&words[1..]).uid(uid).gid(uid).current_dir("/").env_clear();
        command.env("LD_PRELOAD", self.folder.at("libimpresario_assist.so"));
        command.env("IMPRESARIO_ASSIST_SOCKET", &self.daemon.socket).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
        command
    }

    /// All programs of all users who are well, on files of their own that were never read. How long each hint took to
    /// bring its data, µs, shortest first. Each byte must be right.
    fn arrivals(&self, round: &str, pause_us: u64) -> Vec<u64> {
        let mut programs = Vec::new();
        for uid in (1..=self.users).map(|n| FIRST_UID + n) {
            for process in 0..self.processes {
                let data = self.folder.at("data").join(format!("{round}.{uid}.{process}"));
                std::fs::create_dir(&data).unwrap();
                let mut sum = 14695981039346656037u64;
                for file in 0..self.files {
                    let path = data.join(file.to_string());
                    let seed = u64::from(uid) << 32 | u64::from(process) << 8 | u64::from(file);
                    let bytes = contents(seed);
                    sum = bytes.iter().fold(sum, |sum, b| (sum ^ u64::from(*b)).wrapping_mul(1099511628211));
                    std::fs::write(&path, bytes).unwrap();
                    std::os::unix::fs::chown(&path, Some(uid), Some(uid)).unwrap();
                    forget(&path);
                }
                programs.push((uid, data, format!("{sum:016x}")));
            }
        }
        let numbers = [self.files.to_string(), FILE_BYTES.to_string(), pause_us.to_string()];
        let start = |(uid, data, sum): (u32, PathBuf, String)| {
            let words = ["arrivals", data.to_str().unwrap(), &numbers[0], &numbers[1], &numbers[2]];
            let log = self.folder.at(&format!("{round}.{uid}.{}", data.file_name().unwrap().to_str().unwrap()));
            (Process::start_command(&mut self.command(uid, &words), &log), data, sum)
        };
        let mut took = Vec::new();
        for (mut process, data, sum) in programs.into_iter().map(start).collect::<Vec<_>>() {
            let status = process.wait_within(3 * PATIENCE);
            let log = process.log();
            assert!(status.success(), "{status}: {log}");
            let mut lines: Vec<&str> = log.lines().collect();
            assert_eq!(lines.pop(), Some(sum.as_str()), "the bytes of {}", data.display());
            took.extend(lines.iter().map(|line| line.parse::<u64>().unwrap_or_else(|_| panic!("a hint came {line}"))));
            std::fs::remove_dir_all(&data).unwrap();
        }
        assert_eq!(took.len() as u32, self.users * self.processes * self.files);
        took.sort_unstable();
        took
    }
}

/// What is in a file.
fn contents(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..FILE_BYTES / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

fn quantiles(took_us: &[u64]) -> String {
    let at = |share: f64| took_us[((took_us.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    format!("median {:.2} ms, 99 % {:.2} ms, longest {:.2} ms", at(0.5), at(0.99), at(1.0))
}

/// `users` users with `processes` processes each, beside one more user with as many on a file system that hangs.
fn others_are_served(users: u32, processes: u32, files: u32, pause_us: u64) {
    if !require("root") || !require("fuse") {
        return;
    }
    let folder = Folder::new();
    if Nobody::new(&folder).is_none() {
        return;
    }
    let _cache = page_cache::watched();
    for name in ["arrivals", "hold"] {
        try_compile(folder.path(), name, &[]).unwrap();
    }
    let (data, hung) = (folder.at("data"), folder.at("hung"));
    for path in [&data, &hung] {
        std::fs::create_dir(path).unwrap();
    }
    // Of each process one file is read by the manager itself, and of the other it asks what file system it is on.
    let (first, count) = (|process: u32| (process * 2).to_string(), "2");
    let forced = (0..processes)
        .map(|process| json!({ "Path": hung.join(first(process)), "Backend": "ForcedRead", "WillNeed": [{}] }));
    let hints = json!({
        "File": forced.collect::<Vec<_>>(),
        "Directory": [
            { "Path": data, "Recursive": true, "BlockSize": FILE_BYTES, "ReadAheadSize": 1, "WillNeed": [{}] },
            { "Path": hung, "WillNeed": [{}] },
        ],
        "StandDown": { "Enabled": false, "Trial": false },
        "Budget": { "PerFile": 64 << 20, "PerUser": 1 << 30, "PerNode": 4u64 << 30 },
    });
    let daemon = Daemon::start(&folder, &folder.write("hints.json", hints.to_string()), &["--everyone"]);
    let node = Node { folder: &folder, daemon, users, processes, files };
    let mut stuck = Vec::new();
    // Dropped first: what hangs then ends.
    let mount = HungMount::new(&hung, Duration::from_secs(3600));
    let before = node.arrivals("before", pause_us);
    node.daemon.until("all are let go", |r| r.programs == 0 && r.files.iter().all(|f| f.open == 0));
    let idle = Holds::of(&node.daemon);

    mount.hang();
    for process in 0..processes {
        let end = if process % 2 == 0 { "close" } else { "stay" };
        let words = ["hold", hung.to_str().unwrap(), &first(process), count, "read", end];
        let log = folder.at(&format!("hold.{process}"));
        stuck.push(Process::start_command(&mut node.command(FIRST_UID, &words), &log));
    }
    until("it hangs in every way", || [Asked::Read, Asked::Flush, Asked::Statfs].iter().all(|a| mount.waiting(*a) > 0));
    // Those that wait in no call of the file system go; their files are still to be closed.
    for (process, stuck) in stuck.iter().enumerate().filter(|(process, _)| process % 2 == 1) {
        until("its files are open", || {
            std::fs::read_to_string(folder.at(&format!("hold.{process}"))).unwrap() == "open\n"
        });
        stuck.signal(Signal::KILL);
    }
    let beside = node.arrivals("beside", pause_us);
    let holds = Holds::of(&node.daemon);
    let report = node.daemon.report();
    assert!(mount.waiting(Asked::Read) > 0 && mount.waiting(Asked::Statfs) > 0, "it hangs still");
    let stands = |what: &str, took: &[u64]| println!("{} hints {what}: {}", took.len(), quantiles(took));
    println!("{users} users with {processes} processes each");
    stands("before", &before);
    stands("beside a file system that hangs", &beside);
    println!("the manager: {idle:?} idle, {holds:?} then");
    // Fewer processes are too few to tell a delay from one that the machine makes.
    let median = |took: &[u64]| took[took.len() / 2];
    assert!(processes < 50 || median(&beside) <= median(&before) + 10_000, "hints come late");
    assert!(holds.threads <= THREADS_MAX, "{holds:?}");
    // A file may be open twice here, by a program and by a worker, beside its connection of four.
    let of_hung = u64::from(processes) * (2 * 2 + 4);
    assert!(holds.descriptors <= idle.descriptors + of_hung + 100, "{idle:?}, {holds:?}");
    assert!(holds.memory_kib <= idle.memory_kib + 64 * 1024, "{idle:?}, {holds:?}");
    let healthy = u64::from(users * processes);
    assert!(report.programs_ever >= 2 * healthy && report.cut_off == 0, "{} of {healthy}", report.programs_ever);

    mount.go_on();
    for stuck in &mut stuck {
        stuck.kill();
    }
    let mut last = idle;
    until("everything is let go", || {
        last = Holds::of(&node.daemon);
        node.daemon.report().programs == 0 && last.descriptors <= idle.descriptors && last.threads <= THREADS
    });
    drop(mount);
    node.daemon.end();
}

#[test]
fn users_whose_files_do_not_hang_are_served() {
    others_are_served(6, 4, 3, 0);
}

#[test]
#[ignore = "starts a thousand processes: make soak"]
fn twenty_users_with_a_thousand_processes_are_served() {
    others_are_served(19, 50, 3, 4_000_000);
}

/// The kernel asks a file system whether one who is not root could write to a file, before it tells what of it is in memory.
#[test]
fn a_manager_without_rights_does_not_wait_for_a_map_on_a_file_system_that_hangs() {
    if !require("root") || !require("fuse") {
        return;
    }
    let folder = Folder::new();
    let Some(nobody) = Nobody::new(&folder) else { return };
    try_compile(folder.path(), "hold", &[]).unwrap();
    let (program, data, hung) = (folder.strided(), folder.data("data"), folder.at("hung"));
    std::fs::create_dir(&hung).unwrap();
    let run = folder.at("run");
    std::fs::create_dir(&run).unwrap();
    std::os::unix::fs::chown(&run, Some(65534), Some(65534)).unwrap();
    let hints = json!({
        "File": [{ "Path": data, "BlockSize": 1 << 20, "WillNeed": [{}] }],
        "Directory": [{ "Path": hung, "Online": true }],
        "StandDown": { "Trial": false },
    });
    let (hints, socket) = (folder.write("hints.json", hints.to_string()), run.join("s"));
    let mut command = nobody.command(["daemon", "--everyone", "--config"]);
    command.arg(&hints).arg("--socket").arg(&socket).current_dir("/");
    let daemon = Daemon { process: Process::start_command(&mut command, &folder.at("daemon.log")), socket };
    until("it listens", || daemon.process.log().contains("listens at"));
    let node = Node { folder: &folder, daemon, users: 0, processes: 0, files: 0 };
    let read = reading(&program, &data, 0);
    let alone = plain(&read);
    let mut stuck = Vec::new();
    let mount = HungMount::new(&hung, Duration::ZERO);
    let words = ["hold", hung.to_str().unwrap(), "0", "1", "map", "stay"];
    stuck.push(Process::start_command(&mut node.command(FIRST_UID, &words), &folder.at("hold.log")));
    node.daemon.until("it has mapped a file", |r| r.mapped_bytes > 0);
    mount.hang();
    // Time for the manager to look into the map, which it must not.
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        assert_eq!(run_command(&mut node.daemon.run_told(&read)).out, alone);
        node.daemon.report();
    }
    let report = node.daemon.report();
    assert!(crate::tools::of(&report, &data).prefetched_bytes > 0, "{report:?}");
    assert_eq!(mount.waiting(Asked::Getattr), 0);
    mount.go_on();
    stuck.iter_mut().for_each(Process::kill);
    node.daemon.until("everything is let go", |r| r.programs == 0);
}

/// Hints name files, folders and patterns on a file system that does not answer, also as the daemon starts: the others are served,
/// and go on being served when it is told to read its hints again.
#[test]
fn hints_about_a_file_system_that_hangs_hold_nobody_up() {
    if !require("root") || !require("fuse") {
        return;
    }
    let folder = Folder::new();
    let (program, data, hung) = (folder.strided(), folder.data("data"), folder.at("hung"));
    std::fs::create_dir(&hung).unwrap();
    let link = folder.at("link");
    std::os::unix::fs::symlink(folder.path(), &link).unwrap();
    let write = |cache_blocks: u64, names_hung: bool| {
        let there =
            json!({ "Path": link.join("data"), "BlockSize": 1 << 20, "CacheSize": cache_blocks, "WillNeed": [{}] });
        let files = ["0", "1", "2", "3", "4", "5"].map(|name| json!({ "Path": hung.join(name), "WillNeed": [{}] }));
        let files = files.into_iter().filter(|_| names_hung).chain([there]).collect::<Vec<_>>();
        let glob = if names_hung { json!([{ "Path": hung.join("6/*"), "Online": true }]) } else { json!([]) };
        let hints = json!({ "File": files, "Glob": glob, "StandDown": { "Trial": false } });
        folder.write("hints.json", hints.to_string())
    };
    let read = reading(&program, &data, 0);
    let alone = plain(&read);
    let served = |daemon: &Daemon| {
        // It may be about to take new hints.
        until("it answers", || daemon.ask(&["--json"]).code == 0);
        let before = daemon.report().programs_ever;
        forget(&data);
        assert_eq!(run_command(&mut daemon.run_told(&read)).out, alone, "{}", daemon.process.log());
        let report = daemon.report();
        assert!(report.programs_ever > before, "{report:?}");
        assert!(crate::tools::of(&report, &data).prefetched_bytes > 0, "{report:?}");
    };
    let says = |daemon: &Daemon, times: usize, what: &str| {
        until(what, || daemon.process.log().matches(what).count() == times);
    };
    // First only what is under the names does not answer, then the names do not.
    for (log, hang) in [("run.0", HungMount::hang as fn(&HungMount)), ("run.1", HungMount::hang_names)] {
        let (daemon, second, mut run);
        // Dropped first: what waits for it then ends.
        let mount = HungMount::new(&hung, Duration::ZERO);
        daemon = Daemon::start(&folder, &write(8, true), &[]);
        served(&daemon);
        hang(&mount);
        for _ in 0..2 {
            daemon.process.signal(Signal::HUP);
            served(&daemon);
        }
        says(&daemon, 2, "the hints are unchanged");
        served(&daemon);
        // Hints that do not name it are taken.
        write(4, false);
        daemon.process.signal(Signal::HUP);
        says(&daemon, 1, "The hints were read again");
        served(&daemon);
        // What waits in the mount keeps its process until it is answered, and nothing else: another one takes its place.
        daemon.process.signal(Signal::TERM);
        until("it has let go of its place", || !daemon.socket.exists());
        let hints = write(8, true);
        second = Daemon::start(&folder, &hints, &[]);
        assert!(second.process.log().contains("does not answer"), "{}", second.process.log());
        served(&second);
        let mut command = assist(["run"]);
        run = Process::start_command(command.arg(&hints).arg("--").args(&read), &folder.at(log));
        until("the program has run to its end", || run.log().contains(&alone));
        assert!(run.log().contains("does not answer"), "{}", run.log());
        mount.go_on();
        assert!(run.wait().success(), "{}", run.log());
        until("nothing waits for it any more", || threads_named(second.process.pid(), "assist-paths") == 0);
        second.process.signal(Signal::HUP);
        says(&second, 1, "The hints were read again");
        served(&second);
        second.end();
        daemon.end();
    }
}

/// The same where the kernel tells of reads: the files are looked for beside, too.
#[test]
fn a_watching_manager_waits_for_no_file_system_that_hangs() {
    if !require("root") || !require("fuse") {
        return;
    }
    let folder = Folder::new();
    let how = match (can_precede(&folder), can_trace()) {
        (Ok(()), _) => "--watch-before",
        (_, Ok(())) => "--watch",
        (_, Err(why)) => return skip("tracefs", why),
    };
    let (program, data, hung) = (folder.strided(), folder.data("data"), folder.at("hung"));
    std::fs::create_dir(&hung).unwrap();
    let hints = json!({
        "File": [
            { "Path": hung.join("0"), "WillNeed": [{}] },
            { "Path": data, "BlockSize": 1 << 20, "WillNeed": [{}] },
        ],
        "Glob": [{ "Path": hung.join("6/*"), "Online": true }],
        "StandDown": { "Enabled": false, "Trial": false },
    });
    let hints = folder.write("hints.json", hints.to_string());
    let read = reading(&program, &data, 0);
    let alone = plain(&read);
    let daemon;
    // Dropped first: what waits for it then ends.
    let mount = HungMount::new(&hung, Duration::ZERO);
    mount.hang_names();
    daemon = Daemon::start(&folder, &hints, &[how]);
    assert!(daemon.process.log().contains("nothing there is watched"), "{}", daemon.process.log());
    assert!(daemon.process.log().contains("Watching 1 files"), "{}", daemon.process.log());
    forget(&data);
    assert_eq!(run_command(Command::new(&read[0]).args(&read[1..])).out, alone);
    daemon.until("it was told of reads", |report| crate::tools::of(report, &data).reads > 0);
    daemon.process.signal(Signal::TERM);
    until("it has let go of its place", || !daemon.socket.exists());
    mount.go_on();
    daemon.end();
}

/// What was learnt lies in a home that does not answer, from the start or when the program ends: it has its hints from the plan, and its
/// user its result.
#[test]
fn a_home_that_hangs_holds_no_run_up() {
    if !require("root") || !require("fuse") {
        return;
    }
    let folder = Folder::new();
    let (program, data, home, go) = (folder.strided(), folder.data("data"), folder.at("home"), folder.at("go"));
    std::fs::create_dir(&home).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &go, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut go_on = File::options().read(true).write(true).open(&go).unwrap();
    let hints = folder.hints("hints.json", &[&data]);
    let read = reading(&program, &data, 0);
    let alone = plain(&read);
    for (case, learns, from_the_start) in [("plain", false, true), ("learns", true, true), ("late", true, false)] {
        let mut run;
        // Dropped first: what waits for it then ends.
        let mount = HungMount::new(&home, Duration::ZERO);
        if from_the_start {
            mount.hang_names();
        }
        forget(&data);
        let report = folder.at(&format!("{case}.json"));
        let mut command = assist(["run", "--report"]);
        command.arg(&report).args(learns.then_some("--learn")).arg(&hints).arg("--");
        command.args(["sh", "-c", "\"$@\"; read go < \"$0\""]).arg(&go).args(&read);
        command.env("XDG_DATA_HOME", &home).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
        run = Process::start_command(&mut command, &folder.at(case));
        until("the program has read", || run.log().contains(&alone));
        mount.hang_names();
        go_on.write_all(b"\n").unwrap();
        until("its main thread has ended", || has_ended(run.pid()));
        let says = run.log();
        let report: Report = serde_json::from_slice(&std::fs::read(&report).expect(&says)).unwrap();
        assert!(crate::tools::of(&report, &data).prefetched_bytes > 0, "{report:?}");
        assert_eq!(says.contains("nothing that was learnt in"), from_the_start, "{says}");
        assert_eq!(says.contains("nothing is learnt from this run"), learns, "{says}");
        assert!(says.contains("does not answer"), "{says}");
        // What waits in the mount keeps the rest of the process until it is answered.
        mount.go_on();
        assert!(run.wait().success(), "{says}");
    }
}

/// A folder that hangs while the manager watches costs what is in it, and nothing beside it.
#[test]
fn a_folder_that_hangs_stops_no_search_for_the_others() {
    if !require("root") || !require("fuse") {
        return;
    }
    let folder = Folder::new();
    let how = match (can_trace(), can_precede(&folder)) {
        (Ok(()), _) => "--watch",
        (_, Ok(())) => "--watch-before",
        (Err(why), _) => return skip("tracefs", why),
    };
    let (local, hung) = (folder.at("local"), folder.at("hung"));
    for dir in [&local, &hung] {
        std::fs::create_dir(dir).unwrap();
    }
    std::fs::write(local.join("first"), "1").unwrap();
    // More than all searches together may have threads.
    let files: Vec<_> = (0..100).map(|n| json!({ "Path": hung.join(n.to_string()), "Online": true })).collect();
    let hints = json!({ "File": files, "Directory": [{ "Path": local, "Online": true }] });
    let hints = folder.write("hints.json", hints.to_string());
    let daemon;
    // Dropped first: what waits for it then ends.
    let mount = HungMount::new(&hung, Duration::ZERO);
    daemon = Daemon::start(&folder, &hints, &[how]);
    // The kernel tells of no access to a file in user space before it is made.
    let is_watched = how == "--watch";
    let files = if is_watched { "Watching 101 files" } else { "Watching 1 files" };
    assert!(daemon.process.log().contains(files), "{}", daemon.process.log());
    let has_open = |path: &std::path::Path| {
        let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.process.pid())).unwrap().flatten();
        open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|open| open.starts_with(path))
    };
    assert!(has_open(&local.join("first")) && (has_open(&hung) || !is_watched));
    mount.hang_names();
    // Each is found by another search.
    for new in ["second", "third", "fourth", "fifth", "sixth"] {
        std::fs::write(local.join(new), new).unwrap();
        until("a new file is watched", || has_open(&local.join(new)));
    }
    assert!(
        has_open(&local.join("first")) && (has_open(&hung) || !is_watched),
        "what was watched is watched as before"
    );
    assert!(mount.waiting(Asked::Lookup) > 0, "the search waits in the mount");
    let stuck = threads_named(daemon.process.pid(), "assist-search");
    std::fs::remove_file(local.join("first")).unwrap();
    let gone = PathBuf::from(format!("{} (deleted)", local.join("first").display()));
    until("a file that is gone is closed", || !has_open(&gone) && !has_open(&local.join("first")));
    let then = threads_named(daemon.process.pid(), "assist-search");
    assert!(then <= stuck.max(20), "no place is looked into twice: {stuck}, then {then}");
    daemon.process.signal(Signal::TERM);
    until("it has let go of its place", || !daemon.socket.exists());
    mount.go_on();
    daemon.end();
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    rustix::net::sendmsg(socket, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Connections whose last descriptor waits, when it is closed, until the peer has taken everything.
fn lingering(listener: &std::net::TcpListener, peers: &mut Vec<std::net::TcpStream>) -> OwnedFd {
    let mut slow = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    peers.push(listener.accept().unwrap().0);
    slow.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut slow, &[0; 1 << 16]).is_ok() {}
    slow.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&slow, Some(2 * PATIENCE)).unwrap();
    slow.into()
}

/// Threads of a process that have this name.
fn threads_named(pid: u32, name: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|comm| comm.trim_end() == name).count()
}

/// Whether all threads of a process have stopped.
fn stopped(pid: u32) -> bool {
    let states = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let mut states = states.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    states.all(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')))
}

/// Whether nothing is left of a process's main thread.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

/// Descriptors that come where none are expected, and those that are not even taken, are closed beside the service, too.
#[test]
fn descriptors_in_a_connection_that_is_cut_off_delay_nobody() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let daemon = Daemon::start(&folder, &folder.hints("hints.json", &[&data]), &[]);
    let read = reading(&program, &data, 0);
    let alone = plain(&read);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peers = Vec::new();
    let register = ToManager::Register { file: 1, flags: register::READ }.encode();
    /// Messages, each with so many descriptors.
    type Messages<'a> = &'a [(&'a [u8], usize)];
    let cases: [(&str, Messages<'_>); 4] = [
        ("not taken", &[(&[0xff; 16], 1), (register.as_bytes(), 1)]),
        ("too many", &[(register.as_bytes(), 8)]),
        ("with nothing", &[(b"", 1)]),
        ("too early", &[(register.as_bytes(), 2), (register.as_bytes(), 2)]),
    ];
    for (case, messages) in cases {
        // Until the descriptors are in the connection alone.
        daemon.process.signal(Signal::STOP);
        until("all its threads have stopped", || stopped(daemon.process.pid()));
        let address = SocketAddrUnix::new(&daemon.socket).unwrap();
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        for (bytes, count) in messages {
            let slow: Vec<OwnedFd> = (0..*count).map(|_| lingering(&listener, &mut peers)).collect();
            send(&socket, bytes, &slow.iter().map(AsFd::as_fd).collect::<Vec<_>>());
        }
        daemon.process.signal(Signal::CONT);
        until(case, || {
            // Its end, or that there are bytes left which it did not take.
            !matches!(
                rustix::net::recv(&socket, &mut [0u8; 8][..], rustix::net::RecvFlags::DONTWAIT),
                Err(rustix::io::Errno::AGAIN)
            )
        });
        assert_eq!(run_command(&mut daemon.run_told(&read)).out, alone, "{case}");
        assert!(daemon.report().cut_off > 0 || case == "with nothing", "{case}");
    }
    drop(peers);
    daemon.end();
}
