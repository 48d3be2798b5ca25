//! What is prefetched for a job is charged to the job: its manager is in the job's control group, or the manager of the node
//! lets the program's own thread read.

use std::path::PathBuf;
use std::process::Command;

use impresario_testing::{page_cache, require, skip};
use impresario_workload::programs::{BlockDevice, Group, Limits};
use serde_json::json;

use crate::support::run_command;
use crate::tools::{COUNT, Daemon, Folder, PIECE, STRIDE, assist, forget, of, plain, reading};

/// Bytes of files that the kernel has charged to a group, with either version of control groups.
fn charged_bytes(group: &str) -> Option<u64> {
    let at = |parent: &str| PathBuf::from(parent).join(group).join("memory.stat");
    let (path, name) = [("/sys/fs/cgroup/memory", "cache"), ("/sys/fs/cgroup", "file")]
        .into_iter()
        .map(|(parent, name)| (at(parent), name))
        .find(|(path, _)| path.exists())?;
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// A job in a control group of its own that reads a file in pieces.
struct Job {
    folder: Folder,
    words: Vec<String>,
    data: PathBuf,
    alone: String,
    name: String,
    group: Group,
}

impl Job {
    /// `None`, and the test is skipped, where no such group can be made.
    fn new(what: &str) -> Option<Job> {
        if !require("root") {
            return None;
        }
        let folder = Folder::new();
        let (program, data) = (folder.strided(), folder.data("data"));
        let words = reading(&program, &data, 2000);
        let name = format!("impresario-{what}-{}", std::process::id());
        let limits = Limits { memory_bytes: 512 << 20, ..Limits::default() };
        let device = BlockDevice::under(&data).ok();
        let Some(group) = device.and_then(|device| Group::new(&name, Some(&device), limits).ok()) else {
            skip("cgroups", "no control group with a limit of memory can be made here");
            return None;
        };
        let alone = plain(&words);
        Some(Job { folder, words, data, alone, name, group })
    }

    /// Hints for all of the file, by which all of it is kept.
    fn hints(&self, backend: &str, block_bytes: u64) -> PathBuf {
        let blocks = COUNT * STRIDE / block_bytes;
        let entry = json!({ "Path": self.data, "BlockSize": block_bytes, "CacheSize": blocks, "ReadAheadSize": 4,
                            "Backend": backend, "WillNeed": [{}] });
        let hints = json!({ "File": [entry], "StandDown": { "Trial": false, "Enabled": false } });
        self.folder.write("hints.json", hints.to_string())
    }

    /// Bytes that a run adds to what is charged to the group.
    #[track_caller]
    fn charge(&self, command: &mut Command) -> u64 {
        forget(&self.data);
        let before = charged_bytes(&self.name).unwrap();
        let ran = run_command(&mut self.group.enter(command));
        assert_eq!((ran.code, ran.out.as_str()), (0, self.alone.as_str()), "{}", ran.err);
        charged_bytes(&self.name).unwrap().saturating_sub(before)
    }

    /// What the program's own reads add, without hints.
    fn without(&self) -> u64 {
        let mut command = Command::new(&self.words[0]);
        let without = self.charge(command.args(&self.words[1..]));
        assert!((COUNT * PIECE..SIZE * 3 / 4).contains(&without), "the program's own reads: {without}");
        without
    }
}

const SIZE: u64 = COUNT * STRIDE;

#[test]
fn what_is_brought_in_for_a_job_counts_as_its_memory() {
    let _cache = page_cache::watched();
    let Some(job) = Job::new("charged") else { return };
    job.without();
    let mut command = assist(["run", "-q"]);
    let with = job.charge(command.arg(job.hints("Auto", 1 << 20)).arg("--").args(&job.words));
    assert!(with >= SIZE * 7 / 8, "what its manager brought in: {with} of {SIZE}");
}

/// The manager of the node is in another group; so are its workers.
#[test]
fn what_a_program_reads_for_the_manager_of_the_node_counts_as_its_memory() {
    let _cache = page_cache::watched();
    let Some(job) = Job::new("inside") else { return };
    let without = job.without();
    let mut charges = Vec::new();
    for backend in ["ForcedRead", "Program"] {
        let daemon = Daemon::start(&job.folder, &job.hints(backend, 256 << 10), &[]);
        charges.push(job.charge(&mut daemon.run_told(&job.words)));
        let report = daemon.until("it is let go", |r| r.files.iter().any(|f| f.reads == COUNT && f.open == 0));
        let file = of(&report, &job.data);
        assert_eq!((file.errors, report.cut_off), (0, 0), "{file:?}");
        if backend == "Program" {
            assert_eq!((file.backend.as_str(), report.programs_ever), ("program", 1));
            assert!(file.prefetched_bytes >= SIZE * 7 / 8 && file.used_bytes > 0, "{file:?}");
        }
        daemon.end();
    }
    let [by_manager, by_program] = charges[..] else { unreachable!() };
    // What the kernel reads ahead for the program differs by some MiB.
    assert!(by_manager < SIZE / 2, "what the manager reads is charged to itself: {by_manager}, {without} without");
    assert!(by_program >= SIZE * 7 / 8, "what the program's thread brought in: {by_program} of {SIZE}");
}
