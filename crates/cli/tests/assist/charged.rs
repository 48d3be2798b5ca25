//! What is prefetched for a job is charged to the job: its manager is in the job's control group.

use std::path::PathBuf;

use impresario_testing::{page_cache, require, skip};
use impresario_workload::programs::{BlockDevice, Group, Limits};
use serde_json::json;

use crate::support::run_command;
use crate::tools::{COUNT, Folder, PIECE, STRIDE, assist, forget, plain, reading};

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

#[test]
fn what_is_brought_in_for_a_job_counts_as_its_memory() {
    if !require("root") {
        return;
    }
    let _cache = page_cache::watched();
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let words = reading(&program, &data, 2000);
    let alone = plain(&words);
    let name = format!("impresario-charged-{}", std::process::id());
    let limits = Limits { memory_bytes: 512 << 20, ..Limits::default() };
    let device = BlockDevice::under(&data).ok();
    let Some(group) = device.and_then(|device| Group::new(&name, &device, limits).ok()) else {
        return skip("cgroups", "no control group with a limit of memory can be made here");
    };
    let size = COUNT * STRIDE;
    let charge = |guided: bool| {
        forget(&data);
        let before = charged_bytes(&name).unwrap();
        // All of the file, and all of it kept.
        let entry =
            json!({ "Path": data, "BlockSize": 1 << 20, "CacheSize": 64, "ReadAheadSize": 4, "WillNeed": [{}] });
        let hints = json!({ "File": [entry], "StandDown": { "Trial": false } });
        let hints = folder.write("hints.json", hints.to_string());
        let mut command = assist(["run", "-q"]);
        command.arg(&hints).arg("--").args(&words);
        if !guided {
            command = std::process::Command::new(&words[0]);
            command.args(&words[1..]);
        }
        let ran = run_command(&mut group.enter(&command));
        assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
        charged_bytes(&name).unwrap().saturating_sub(before)
    };
    let without = charge(false);
    assert!(without >= COUNT * PIECE && without < size * 3 / 4, "the program's own reads: {without}");
    let with = charge(true);
    assert!(with >= size * 7 / 8, "what its manager brought in: {with} of {size}");
}
