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
            fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+io +memory")
                .context("asking the kernel for the controllers io and memory")?;
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

    /// How many of its members the kernel has ended because the group's memory was used up.
    pub fn killed_for_memory(&self) -> u64 {
        let of = |folder: &PathBuf| {
            let events =
                ["memory.events", "memory.oom_control"].iter().find_map(|f| fs::read_to_string(folder.join(f)).ok())?;
            events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok())
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

    /// The command, changed so that it runs inside the group with all its children.
    pub fn enter(&self, command: &Command) -> Command {
        // A shell that joins and then becomes the program: no code of ours runs between fork and exec.
        let mut script = String::new();
        for folder in &self.folders {
            script.push_str(&format!("echo $$ > '{}/cgroup.procs' && ", folder.display()));
        }
        script.push_str("exec \"$@\"");
        let mut inside = Command::new("/bin/sh");
        inside.arg("-c").arg(script).arg("sh").arg(command.get_program()).args(command.get_args());
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
