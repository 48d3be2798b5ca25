//! A disk of our own to measure on: a file behind a loop device with ext4. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::programs::BlockDevice;

/// A mounted loop device; unmounted and detached when dropped.
#[derive(Debug)]
pub struct LoopDisk {
    mount: PathBuf,
    name: String,
    /// The folder of an image that belongs to the disk.
    _folder: Option<TempDir>,
}

impl LoopDisk {
    /// Makes and mounts a disk of `size_bytes` in a new folder below `parent`, with the kernel's usual read-ahead of
    /// 128 KiB.
    pub fn new(parent: &Path, size_bytes: u64) -> Result<LoopDisk> {
        let folder = tempfile::Builder::new().prefix("impresario-disk-").tempdir_in(parent)?;
        let image = folder.path().join("image");
        make_image(&image, size_bytes)?;
        let mount = folder.path().join("mount");
        let mut disk = LoopDisk::attach(&image, &mount, false)?;
        disk._folder = Some(folder);
        disk.device()?.set_read_ahead_kib(128)?;
        Ok(disk)
    }

    /// Mounts an image with a file system on the new folder `mount`. `direct` bypasses the page cache of the file
    /// system below, whose requests are then those of the device.
    pub(super) fn attach(image: &Path, mount: &Path, direct: bool) -> Result<LoopDisk> {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show"]);
        if direct {
            losetup.arg("--direct-io=on");
        }
        let name = tool(losetup.arg(image))?;
        let disk = LoopDisk { mount: mount.into(), name, _folder: None };
        fs::create_dir(mount)?;
        tool(Command::new("mount").args(["-o", "noatime"]).arg(&disk.name).arg(mount))?;
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
        detach(&self.mount, &self.name);
    }
}

/// Unmounts and detaches a loop device. A busy mount is detached lazily, so that a straggler cannot keep the image.
pub(super) fn detach(mount: &Path, name: &str) {
    let unmounted = Command::new("umount").arg(mount).output().is_ok_and(|output| output.status.success());
    if !unmounted {
        let _ = Command::new("umount").arg("--lazy").arg(mount).output();
    }
    let _ = Command::new("losetup").arg("--detach").arg(name).output();
}

/// The loop devices whose images are below a folder, as reported by the kernel: including those of a process killed
/// before it could record them.
pub(super) fn devices_on(folder: &Path) -> Vec<String> {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.into());
    let Ok(devices) = fs::read_dir("/sys/block") else { return Vec::new() };
    let on_folder = |device: fs::DirEntry| {
        let image = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        Path::new(image.trim_end())
            .starts_with(&folder)
            .then(|| format!("/dev/{}", device.file_name().to_string_lossy()))
    };
    devices.flatten().filter_map(on_folder).collect()
}

/// Creates a sparse image with an empty ext4 file system. Its tables are written now: otherwise the kernel would write
/// them in the background during a measurement.
pub(super) fn make_image(image: &Path, size_bytes: u64) -> Result<()> {
    fs::File::create(image)?.set_len(size_bytes).context("making the image of a disk")?;
    let eager = "lazy_itable_init=0,lazy_journal_init=0";
    tool(Command::new("mkfs.ext4").args(["-q", "-F", "-E", eager]).arg(image))?;
    Ok(())
}

/// Runs a program to its end and returns its output, or an error with its error output.
pub fn tool(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("starting {name}; is its package installed?"))?;
    if !output.status.success() {
        bail!("{name} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}
