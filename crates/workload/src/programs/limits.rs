//! A control group with a limited disk and memory, for programs that are measured. Works with the first and the
//! second version of control groups; needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::block::BlockDevice;

const ROOT: &str = "/sys/fs/cgroup";

/// What the members of a group may use together.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Limits {
    /// Reads a second on the device; 0: without limit.
    pub read_iops: u64,
    /// Bytes a second read from the device; 0: without limit.
    pub read_bytes_per_s: u64,
    /// Memory with its page cache, bytes; 0: without limit.
    pub memory_bytes: u64,
}

/// A group of our own; removed when dropped, after its members have ended.
#[derive(Debug)]
pub struct Group {
    folders: Vec<PathBuf>,
}

impl Group {
    /// Makes a group of that name with limits on a device, and on memory. Where memory alone is limited it needs no device.
    pub fn new(name: &str, device: Option<&BlockDevice>, limits: Limits) -> Result<Group> {
        let mut group = Group { folders: Vec::new() };
        let is_limited = limits.read_iops > 0 || limits.read_bytes_per_s > 0;
        let disk = match (is_limited, device) {
            (false, _) => None,
            (true, Some(device)) => Some(device),
            (true, None) => bail!("reads can be limited on a block device only, and there is none"),
        };
        if Path::new(ROOT).join("cgroup.controllers").exists() {
            let wanted = [disk.map(|_| "+io"), (limits.memory_bytes > 0).then_some("+memory")];
            let wanted: Vec<&str> = wanted.into_iter().flatten().collect();
            fs::write(Path::new(ROOT).join("cgroup.subtree_control"), wanted.join(" "))
                .with_context(|| format!("asking the kernel for the controllers {}", wanted.join(" ")))?;
            let folder = group.add(Path::new(ROOT), name)?;
            if let Some(device) = disk {
                let or_max = |n: u64| if n > 0 { n.to_string() } else { "max".into() };
                let rule = format!(
                    "{} riops={} rbps={}",
                    device.numbers,
                    or_max(limits.read_iops),
                    or_max(limits.read_bytes_per_s)
                );
                write(&folder, "io.max", &rule)?;
            }
            if limits.memory_bytes > 0 {
                write(&folder, "memory.max", &limits.memory_bytes.to_string())?;
            }
            return Ok(group);
        }
        if let Some(device) = disk {
            let folder = group.add(&Path::new(ROOT).join("blkio"), name)?;
            for (file, value) in [
                ("blkio.throttle.read_iops_device", limits.read_iops),
                ("blkio.throttle.read_bps_device", limits.read_bytes_per_s),
            ] {
                if value > 0 {
                    write(&folder, file, &format!("{} {value}", device.numbers))?;
                }
            }
        }
        if limits.memory_bytes > 0 {
            let folder = group.add(&Path::new(ROOT).join("memory"), name)?;
            write(&folder, "memory.limit_in_bytes", &limits.memory_bytes.to_string())?;
        }
        Ok(group)
    }

    /// Removes the groups of processes that were killed: their names begin with `prefix` and the process's number.
    pub fn remove_stale(prefix: &str) {
        let owner = |name: &str| name.strip_prefix(prefix)?.split('-').next()?.parse::<u32>().ok();
        for parent in ["", "blkio", "memory"].map(|controller| Path::new(ROOT).join(controller)) {
            for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
                let owner = owner(&entry.file_name().to_string_lossy());
                if owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
                    // One whose members are still ending is removed next time.
                    let _ = fs::remove_dir(entry.path());
                }
            }
        }
    }

    /// How many of its members the kernel has ended because the group's memory was used up.
    pub fn killed_for_memory(&self) -> u64 {
        self.figure("memory.events", "oom_kill") + self.figure("memory.oom_control", "oom_kill")
    }

    /// How often memory was reclaimed because the group had as much as it may have.
    pub fn reclaims(&self) -> u64 {
        let failures =
            |folder: &PathBuf| fs::read_to_string(folder.join("memory.failcnt")).ok()?.trim().parse::<u64>().ok();
        self.folders.iter().filter_map(failures).sum::<u64>() + self.figure("memory.events", "max")
    }

    /// Memory of its members themselves, without the page cache, bytes.
    pub fn anonymous_bytes(&self) -> u64 {
        // The name in the second and in the first version; neither has the other's.
        self.figure("memory.stat", "anon") + self.figure("memory.stat", "rss")
    }

    /// A figure of one of its files that has a name in each line; 0 where there is none.
    fn figure(&self, file: &str, name: &str) -> u64 {
        let of = |folder: &PathBuf| {
            let text = fs::read_to_string(folder.join(file)).ok()?;
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok();
            text.lines().find_map(value)
        };
        self.folders.iter().filter_map(of).sum()
    }

    fn add(&mut self, parent: &Path, name: &str) -> Result<PathBuf> {
        if !parent.is_dir() {
            bail!("{} is missing: this machine has no such control groups", parent.display());
        }
        let folder = parent.join(name);
        fs::create_dir(&folder)
            .with_context(|| format!("making the control group {} (needs root)", folder.display()))?;
        self.folders.push(folder.clone());
        Ok(folder)
    }

    /// The words in front of a program and its arguments that run it inside the group with all its children.
    pub fn front(&self) -> [String; 4] {
        // A shell that joins and then becomes the program: no code of ours runs between fork and exec.
        let mut script = String::new();
        for folder in &self.folders {
            script.push_str(&format!("echo $$ > '{}/cgroup.procs' && ", folder.display()));
        }
        script.push_str("exec \"$@\"");
        ["/bin/sh".into(), "-c".into(), script, "sh".into()]
    }

    /// The command, changed so that it runs inside the group with all its children.
    pub fn enter(&self, command: &Command) -> Command {
        let [shell, front @ ..] = self.front();
        let mut inside = Command::new(shell);
        inside.args(front).arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(key, value),
                None => inside.env_remove(key),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            inside.current_dir(folder);
        }
        inside
    }
}

fn write(folder: &Path, file: &str, value: &str) -> Result<()> {
    let path = folder.join(file);
    fs::write(&path, value).with_context(|| format!("writing {value:?} to {}", path.display()))
}

impl Drop for Group {
    fn drop(&mut self) {
        for folder in &self.folders {
            // A member that is just ending keeps the group busy for a moment.
            for _ in 0..50 {
                if fs::remove_dir(folder).is_ok() {
                    break;
                }
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group of a process that was killed, whose number no process has.
    #[test]
    fn groups_of_killed_processes_are_removed_and_no_others() {
        let (prefix, limits) = ("impresario-stale-test-", Limits { memory_bytes: 64 << 20, ..Limits::default() });
        let own = Group::new(&format!("{prefix}{}-a", std::process::id()), None, limits);
        let stale = Group::new(&format!("{prefix}{}-a", u32::MAX), None, limits);
        let (Ok(own), Ok(stale)) = (own, stale) else {
            return impresario_testing::skip("cgroups", "no control group with a limit of memory can be made here");
        };
        Group::remove_stale(prefix);
        assert!(own.folders.iter().all(|folder| folder.exists()));
        assert!(!stale.folders.is_empty() && !stale.folders.iter().any(|folder| folder.exists()));
    }

    #[test]
    fn what_exceeds_a_group_s_memory_is_reclaimed_and_counted() {
        let name = format!("impresario-reclaim-test-{}", std::process::id());
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let limits = Limits { memory_bytes: 32 << 20, ..Limits::default() };
        let Ok(group) = Group::new(&name, None, limits) else {
            return impresario_testing::skip("cgroups", "no control group with a limit of memory can be made here");
        };
        assert_eq!((group.reclaims(), group.killed_for_memory()), (0, 0));
        // Clean pages, which can be reclaimed at any time: of written ones a disk that is busy may not have enough ready. They are not
        // in memory before, where they would be another group's.
        let path = folder.path().join("file");
        let to = format!("of={}", path.display());
        let made =
            Command::new("dd").args(["if=/dev/zero", &to, "bs=1M", "count=96", "oflag=direct"]).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let from = format!("if={}", path.display());
        let command = group.enter(Command::new("dd").args([&from, "of=/dev/null", "bs=1M"]));
        let ran = { command }.output().unwrap();
        assert!(ran.status.success(), "{ran:?}");
        assert!(group.reclaims() > 0, "three times as much as there is room for");
        assert_eq!(group.killed_for_memory(), 0);
        assert!(group.anonymous_bytes() <= 32 << 20);
    }
}
