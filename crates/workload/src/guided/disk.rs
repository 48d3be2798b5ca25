//! A disk of our own to measure on: a file behind a loop device with ext4. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::block::BlockDevice;
use super::tool;

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
        tool(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))?;
        let name = tool(Command::new("losetup").args(["--find", "--show"]).arg(&image))?;
        let mount = folder.path().join("mount");
        let disk = LoopDisk { mount: mount.clone(), name, _folder: folder };
        fs::create_dir(&mount)?;
        tool(Command::new("mount").args(["-o", "noatime"]).arg(&disk.name).arg(&mount))?;
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
