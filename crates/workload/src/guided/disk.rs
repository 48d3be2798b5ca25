//! A disk of our own to measure on: a file behind a loop device with ext4. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::block::BlockDevice;

/// A mounted loop device; unmounted and removed when dropped.
#[derive(Debug)]
pub struct LoopDisk {
    // In the order in which they must go.
    mount: PathBuf,
    name: String,
    _folder: TempDir,
}

impl LoopDisk {
    /// Makes and mounts a disk of `size_bytes` in a new folder below `parent`, with the kernel's usual read-ahead of
    /// 128 KiB.
    pub fn new(parent: &Path, size_bytes: u64) -> Result<LoopDisk> {
        let folder = tempfile::Builder::new().prefix("impresario-disk-").tempdir_in(parent)?;
        let image = folder.path().join("image");
        fs::File::create(&image)?.set_len(size_bytes).context("making the image of a disk")?;
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))?;
        let name = run(Command::new("losetup").args(["--find", "--show"]).arg(&image))?;
        let mount = folder.path().join("mount");
        let disk = LoopDisk { mount: mount.clone(), name, _folder: folder };
        fs::create_dir(&mount)?;
        run(Command::new("mount").args(["-o", "noatime"]).arg(&disk.name).arg(&mount))?;
        disk.device()?.set_read_ahead_kib(128)?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// The device.
    pub fn device(&self) -> Result<BlockDevice> {
        BlockDevice::under(&self.mount)
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        // Lazily, so that a straggler cannot keep the folder of the image from being removed.
        let _ = Command::new("umount").arg("--lazy").arg(&self.mount).output();
        let _ = Command::new("losetup").arg("--detach").arg(&self.name).output();
    }
}

/// Runs a system tool to its end; its output, or an error with what it said.
fn run(command: &mut Command) -> Result<String> {
    let tool = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("starting {tool}; is its package installed?"))?;
    if !output.status.success() {
        bail!("{tool} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}
