//! The devices that programs are measured on, each with the programs' files on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use impresario_device::DeviceParams;
use impresario_workload::kernel_disk::{KernelDisk, LoopDisk, tool};
use impresario_workload::programs::{BlockDevice, Counts, Files, Group, Limits, TestBed};
use impresario_workload::stop::Stop;
use serde::{Deserialize, Serialize};

use super::modelled::ModelledDisk;
use super::slow_mount::{SlowMount, Slowness};

/// The slow disk of the measurements: 200 requests and 200 MiB a second.
pub const SLOW: Limits = Limits { read_iops: 200, read_bytes_per_s: 200 << 20, memory_bytes: 0 };
/// Where a disk's bytes lie that cost time by their model only.
const MEMORY: &str = "/dev/shm";

/// A device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// A mount where each read request takes 5 ms
    Mount,
    /// A disk of 200 requests and 200 MiB a second, by a limit of the control group
    Limited,
    /// Our own mount, whose data server has a modelled 7200 rpm disk
    Modelled,
    /// The modelled disk below the kernel's page cache, scheduler and ext4
    KernelDisk,
    /// The machine's own disk
    Disk,
}

impl Device {
    /// All, the slowest to set up last.
    pub const ALL: [Device; 5] = [Device::Mount, Device::Disk, Device::Limited, Device::KernelDisk, Device::Modelled];

    /// For tables.
    pub fn name(self) -> &'static str {
        match self {
            Device::Mount => "mount",
            Device::Limited => "limited",
            Device::Modelled => "modelled",
            Device::KernelDisk => "kernel-disk",
            Device::Disk => "disk",
        }
    }
}

enum Under {
    Mount(SlowMount),
    Limited(LoopDisk),
    Modelled(Box<ModelledDisk>),
    Kernel(Box<KernelDisk>),
    Own,
}

/// A device with files; taken away when dropped.
pub struct Bed {
    under: Under,
    data: PathBuf,
    group: Option<Group>,
}

impl Bed {
    /// Makes the device in `folder`, with what is in `files` on it. Mounts need root.
    ///
    /// # Errors
    /// Where the machine refuses: no root, no `/dev/fuse`, no loop devices, no control groups.
    pub fn new(device: Device, files: &Path, folder: &Path, slowness: Slowness, stop: &Stop) -> Result<Bed> {
        let made = Bed::make(device, files, folder, slowness, stop);
        let mut bed = made.with_context(|| format!("making the device {:?}", device.name()))?;
        let disk = match &bed.under {
            Under::Mount(_) | Under::Own => return Ok(bed),
            Under::Limited(disk) => disk.path(),
            Under::Modelled(disk) => disk.path(),
            Under::Kernel(disk) => disk.path(),
        };
        bed.data = disk.join("files");
        tool(Command::new("cp").arg("-R").arg(files).arg(&bed.data))?;
        Ok(bed)
    }

    fn make(device: Device, files: &Path, folder: &Path, slowness: Slowness, stop: &Stop) -> Result<Bed> {
        let mut bed = Bed { under: Under::Own, data: files.into(), group: None };
        match device {
            Device::Mount => {
                let mount = SlowMount::new(files, folder, slowness)?;
                bed.data = mount.path().into();
                bed.under = Under::Mount(mount);
            }
            Device::Limited => {
                // With room for the file system's own tables.
                let disk = LoopDisk::new(folder, length(files)? * 5 / 4 + (256 << 20))?;
                let name = format!("impresario-{}", std::process::id());
                bed.group = Some(Group::new(&name, Some(&disk.device()?), SLOW)?);
                bed.under = Under::Limited(disk);
            }
            Device::Modelled => bed.under = Under::Modelled(Box::new(ModelledDisk::new(stop)?)),
            Device::KernelDisk => {
                let memory = Path::new(MEMORY);
                let parent = if memory.is_dir() { memory } else { folder };
                bed.under = Under::Kernel(Box::new(KernelDisk::new(parent, &DeviceParams::default())?));
            }
            Device::Disk => {}
        }
        Ok(bed)
    }

    /// Where the files are.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Where programs run, if their reads are limited.
    pub fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// A command that runs where programs are to run.
    pub fn inside(&self, command: Command) -> Command {
        match &self.group {
            Some(group) => group.enter(&command),
            None => command,
        }
    }

    /// The device for programs that read the files below these folders.
    pub fn cold(&self, folders: &[PathBuf]) -> Result<Cold<'_>> {
        let mut paths = Vec::new();
        // A mount is made anew, which takes its files out of memory.
        if !matches!(self.under, Under::Mount(_)) {
            folders.iter().try_for_each(|folder| files_below(folder, &mut paths))?;
        }
        Ok(Cold { bed: self, files: Files { paths, device: BlockDevice::under(&self.data).ok() } })
    }
}

/// A device some of whose files leave the memory of machine and model before each run.
pub struct Cold<'a> {
    bed: &'a Bed,
    files: Files,
}

impl TestBed for Cold<'_> {
    fn cool(&self) -> Result<()> {
        self.files.cool()?;
        match &self.bed.under {
            Under::Mount(mount) => mount.cool(),
            Under::Modelled(disk) => disk.reset(),
            Under::Kernel(disk) => disk.reset(),
            Under::Limited(_) | Under::Own => Ok(()),
        }
    }

    fn counts(&self) -> Result<Counts> {
        match &self.bed.under {
            Under::Mount(mount) => mount.counts(),
            Under::Modelled(disk) => disk.counts(),
            Under::Kernel(disk) => disk.counts(),
            Under::Limited(_) | Under::Own => self.files.counts(),
        }
    }
}

fn files_below(folder: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => files_below(&entry.path(), into)?,
            false => into.push(entry.path()),
        }
    }
    Ok(())
}

/// Bytes of the files below a folder.
fn length(folder: &Path) -> Result<u64> {
    let mut files = Vec::new();
    files_below(folder, &mut files)?;
    let lengths = files.iter().map(|file| Ok(fs::metadata(file)?.len().next_multiple_of(4096)));
    lengths.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What stays in memory between runs makes a device seem fast, and what is not counted makes it seem idle.
    #[test]
    fn each_device_has_the_files_and_reads_them_anew() {
        if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
            return;
        }
        let (files, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/var/tmp").unwrap());
        let text = vec![7; 300_000];
        fs::create_dir(files.path().join("kind")).unwrap();
        fs::write(files.path().join("kind/file"), &text).unwrap();
        for device in [Device::Mount, Device::KernelDisk] {
            let bed = Bed::new(device, files.path(), folder.path(), Slowness::default(), &Stop::new()).unwrap();
            let cold = bed.cold(&[bed.data().join("kind")]).unwrap();
            for _ in 0..2 {
                cold.cool().unwrap();
                let before = cold.counts().unwrap();
                assert_eq!(fs::read(bed.data().join("kind/file")).unwrap(), text);
                let read = cold.counts().unwrap().since(before);
                assert!(read.reads > 0 && read.read_bytes >= 300_000, "{}: {read:?}", device.name());
            }
        }
        assert_eq!(length(files.path()).unwrap(), 303_104);
    }
}
