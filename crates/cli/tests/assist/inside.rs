//! GPFS hints from inside the program, with a recorder in place of its library: the caller, the file, and that nothing
//! else changes for the program.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::report::Report;
use impresario_testing::eventually;
use serde_json::json;

use crate::support::Process;
use crate::tools::{Daemon, Folder, of, try_compile};

/// One call of `gpfs_fcntl`, as the recorder wrote it.
#[derive(Clone, Debug)]
struct Call {
    pid: u32,
    thread: u32,
    ino: u64,
    kind: u32,
    asked: u64,
    taken: u64,
    released: u64,
    held_after: u64,
    broken: u64,
}

const RANGES: u32 = 1003;
const CANCEL: u32 = 2001;

struct Stage {
    folder: Folder,
    program: PathBuf,
    library: PathBuf,
    data: PathBuf,
    other: PathBuf,
    daemon: Daemon,
}

impl Stage {
    fn new() -> Stage {
        let folder = Folder::new();
        let library = folder.at("libgpfs.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assist/tests/support/gpfs.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library).arg(source);
        assert!(cc.status().unwrap().success());
        let program = try_compile(folder.path(), "inside", &[]).unwrap();
        let (data, other) = (folder.data("data"), folder.data("other"));
        let entry = |path: &Path| {
            json!({ "Path": path, "BlockSize": 16384, "CacheSize": 8, "ReadAheadSize": 4, "Backend": "Gpfs",
                    "WillNeed": [{ "Offset": 0, "Length": 0 }] })
        };
        // Nothing is gained here, so that the judge would stop these hints, rightly.
        let hints = json!({ "File": [entry(&data), entry(&other)], "StandDown": { "Enabled": false } });
        let daemon = Daemon::start(&folder, &folder.write("hints.json", hints.to_string()), &[]);
        Stage { folder, program, library, data, other, daemon }
    }

    fn start(&self, what: &str, more: Option<&Path>, library: &Path, environment: &[(&str, &str)]) -> Process {
        let mut words: Vec<String> = vec![self.program.to_str().unwrap().into(), what.into()];
        let paths = [Some(self.data.as_path()), Some(&self.folder.at("stop")), more];
        words.extend(paths.into_iter().flatten().map(|path| path.to_str().unwrap().to_string()));
        let mut command = self.daemon.run_told(&words);
        command.env("IMPRESARIO_ASSIST_LIBGPFS", library).env("GPFS_RECORD", self.folder.at("calls"));
        command.env("IMPRESARIO_ASSIST_LOG", self.folder.at("log")).envs(environment.iter().copied());
        Process::start_command(&mut command, &self.folder.at("out"))
    }

    fn calls(&self) -> Vec<Call> {
        let text = std::fs::read_to_string(self.folder.at("calls")).unwrap_or_default();
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let call = |line: &str| {
            let n: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
            let [pid, thread, ino, kind, asked, taken, released, _, _, held_after, broken] = n[..] else {
                panic!("{line}")
            };
            let (pid, thread, kind) = (pid as u32, thread as u32, kind as u32);
            Call { pid, thread, ino, kind, asked, taken, released, held_after, broken }
        };
        whole.lines().map(call).collect()
    }

    fn until_calls(&self, what: &str, seen: impl Fn(&[Call]) -> bool) -> Vec<Call> {
        eventually(what, || Some(self.calls()).filter(|calls| seen(calls)))
    }

    /// Ends the program, which must have printed its number (and its child's) and "done", and nothing else. Returns the
    /// numbers.
    fn end(&self, mut process: Process) -> Vec<u32> {
        std::fs::write(self.folder.at("stop"), "").unwrap();
        let status = process.wait();
        assert!(status.success(), "{status}: {}", process.log());
        let said = process.log();
        let (numbers, rest): (Vec<&str>, Vec<&str>) = said.lines().partition(|line| line.parse::<u32>().is_ok());
        assert!(!rest.is_empty() && rest.iter().all(|line| *line == "done"), "{said}");
        numbers.iter().map(|n| n.parse().unwrap()).collect()
    }

    /// The manager's report, once all ranges are released.
    fn report(&self) -> Report {
        self.daemon.until("all is let go", |r| r.programs == 0 && of(r, &self.data).open == 0)
    }

    fn ino(path: &Path) -> u64 {
        std::fs::metadata(path).unwrap().ino()
    }
}

#[test]
fn a_program_gives_the_hints_and_gives_everything_back() {
    let stage = Stage::new();
    let leave = stage.folder.at("leave");
    let process = stage.start("stays", Some(&leave), &stage.library, &[]);
    stage.until_calls("ranges are given back", |calls| calls.iter().map(|c| c.released).sum::<u64>() > 20);
    std::fs::write(stage.folder.at("stop"), "").unwrap();
    stage.until_calls("the program closes the file", |calls| calls.last().is_some_and(|c| c.held_after == 0));
    std::fs::write(&leave, "").unwrap();
    let pids = stage.end(process);
    let (report, calls) = (stage.report(), stage.calls());
    let ino = Stage::ino(&stage.data);
    assert!(calls.iter().all(|c| (c.pid, c.ino, c.broken) == (pids[0], ino, 0)));
    let thread = calls[0].thread;
    assert!(calls.iter().all(|c| c.thread == thread) && thread != pids[0], "one thread, and not the program's");
    let first = calls.iter().position(|c| c.kind == RANGES).unwrap();
    assert_eq!(calls[first - 1].kind, CANCEL);
    let ranges: Vec<&Call> = calls.iter().filter(|c| c.kind == RANGES).collect();
    assert!(ranges.iter().any(|c| c.asked > 3 && c.taken == 3), "a prefix is taken on");
    assert!(ranges.iter().all(|c| c.held_after <= 10 && c.taken <= 3));
    let file = of(&report, &stage.data);
    assert_eq!((file.backend.as_str(), file.errors), ("gpfs-inside", 0), "{file:?}");
    assert!(file.calls > 0 && file.calls <= ranges.len() as u64 && file.used_bytes > 0, "{file:?}");
    assert_eq!((report.cut_off, report.programs_ever), (0, 1), "its thread is no program of its own");
}

#[test]
fn a_file_closed_and_its_number_used_again_are_not_mixed_up() {
    let stage = Stage::new();
    let process = stage.start("reuses", Some(&stage.other), &stage.library, &[]);
    let inos = [Stage::ino(&stage.data), Stage::ino(&stage.other)];
    stage.until_calls("both are hinted and given back", |calls| {
        inos.iter().all(|ino| {
            let of_file: Vec<&Call> = calls.iter().filter(|c| c.ino == *ino).collect();
            // Each of its open files ends with all ranges released.
            of_file.iter().filter(|c| c.kind == RANGES && c.held_after == 0).count() > 5
        })
    });
    let pids = stage.end(process);
    stage.report();
    let calls = stage.calls();
    assert!(calls.iter().all(|c| c.pid == pids[0] && inos.contains(&c.ino) && c.broken == 0));
}

#[test]
fn a_forked_child_has_a_thread_of_its_own() {
    let stage = Stage::new();
    let fork = stage.folder.at("fork");
    let process = stage.start("forks", Some(&fork), &stage.library, &[]);
    stage.until_calls("the parent is hinted", |calls| calls.len() > 10);
    std::fs::write(&fork, "").unwrap();
    let by = |calls: &[Call]| {
        let mut pids: Vec<u32> = calls.iter().map(|c| c.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    };
    stage.until_calls("the child is, too", |calls| by(calls).len() == 2);
    let before = stage.calls().len();
    stage.until_calls("both go on", |calls| by(calls.get(before..).unwrap_or_default()).len() == 2);
    let mut pids = stage.end(process);
    pids.sort_unstable();
    stage.report();
    let calls = stage.calls();
    assert_eq!(by(&calls), pids);
    assert!(calls.iter().all(|c| c.broken == 0), "the child's library remembers nothing of the parent's thread");
}

#[test]
fn programs_that_a_thread_could_disturb_are_not() {
    // The last one restricts its system calls while a hint takes its time.
    for (what, delay_ms) in [("locks", "0"), ("leaves", "0"), ("restricts", "0"), ("restricts", "300")] {
        let stage = Stage::new();
        let leave = stage.folder.at("leave");
        let process = stage.start(what, Some(&leave), &stage.library, &[("GPFS_DELAY_MS", delay_ms)]);
        stage.until_calls("hints are given", |calls| calls.len() > 5);
        std::fs::write(&leave, "").unwrap();
        let pids = stage.end(process);
        stage.report();
        assert!(stage.calls().iter().all(|c| c.pid == pids[0] && c.broken == 0), "{what}");
    }
}

#[test]
fn no_thread_is_started_in_a_signal_handler() {
    let stage = Stage::new();
    let process = stage.start("handles", None, &stage.library, &[]);
    stage
        .daemon
        .until("the manager gives hints", |r| r.files.iter().any(|f| f.calls + f.found_bytes > 0 && f.reads > 500));
    stage.end(process);
    let report = stage.report();
    assert_eq!((of(&report, &stage.data).backend.as_str(), stage.calls().len()), ("forced-read", 0));
}

#[test]
fn without_libgpfs_the_manager_reads() {
    let stage = Stage::new();
    for library in [stage.folder.at("missing.so"), PathBuf::new()] {
        let _ = std::fs::remove_file(stage.folder.at("stop"));
        let process = stage.start("stays", None, &library, &[]);
        stage.daemon.until("it reads on", |r| {
            r.files.iter().any(|f| f.reads > 500 && f.open == 1 && f.backend == "forced-read")
        });
        stage.end(process);
        let report = stage.report();
        assert_eq!((of(&report, &stage.data).errors, stage.calls().len(), report.cut_off), (0, 0, 0));
    }
    let log = std::fs::read_to_string(stage.folder.at("log")).unwrap();
    assert_eq!(log.matches("libgpfs cannot be loaded").count(), 1, "{log}");
}

#[test]
fn a_call_that_takes_long_holds_nobody_up() {
    let stage = Stage::new();
    let process = stage.start("stays", None, &stage.library, &[("GPFS_DELAY_MS", "2000")]);
    let reads = |r: &Report| r.files.iter().map(|f| f.reads).sum::<u64>();
    stage.daemon.until("it has read", |r| reads(r) > 0);
    let (before, calls) = (reads(&stage.daemon.report()), stage.calls().len());
    stage.daemon.until("it reads on", |r| reads(r) > before + 300);
    // Each call takes two seconds: reads that waited for one would be as few.
    let calls = stage.calls().len() - calls;
    assert!(calls < 100, "{calls} calls during 300 reads");
    let ended = std::time::Instant::now();
    stage.end(process);
    assert!(ended.elapsed() < std::time::Duration::from_secs(20));
}

#[test]
fn a_manager_that_is_killed_and_comes_back_finds_the_thread_again() {
    let mut stage = Stage::new();
    let process = stage.start("stays", None, &stage.library, &[]);
    stage.until_calls("hints are given", |calls| calls.len() > 10);
    // Counted before the kill: the thread may notice it, and give back, before the next line runs.
    let before = stage.calls().len();
    stage.daemon.process.kill();
    let hints = stage.folder.at("hints.json");
    stage.daemon = Daemon::start(&stage.folder, &hints, &[]);
    let calls = stage.until_calls("hints are given again", |calls| calls.len() > before + 10);
    let anew = calls.iter().skip(before.saturating_sub(1)).find(|c| c.kind == CANCEL);
    assert!(anew.is_some(), "what the killed manager asked for is given back");
    let pids = stage.end(process);
    stage.report();
    assert!(stage.calls().iter().all(|c| c.pid == pids[0] && c.broken == 0));
}
