//! The kernel-disk bed: a modelled disk below a real Linux storage stack.
//!
//! ```text
//! data server's folder → ext4 → page cache, read-ahead → mq-deadline → loop device (direct I/O) → FUSE image → disk model
//! ```
//!
//! Everything above the image is the users' kernel; only the time of a request to the platter is modelled. The model
//! serves in elevator order with 32 requests outstanding, as a drive with command queueing does; or, as the papers' disks,
//! in order of arrival.

pub(crate) mod image;
mod loop_disk;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use fuser::BackgroundSession;
use impresario_base::lock::Mutex;
use impresario_device::{DeviceParams, Order};
use impresario_store::{DeviceStatus, ModelledDevice};
use tempfile::TempDir;

use crate::disk_mount;
use crate::programs::{BlockDevice, Counts};
pub use loop_disk::{LoopDisk, tool};

/// Name prefix of the beds' folders; the process number follows.
const PREFIX: &str = "impresario-kernel-disk-";
/// Space on a disk, bytes; a sparse file.
const SIZE_BYTES: u64 = 8 << 30;
/// Largest request of the loop device, KiB: what FUSE takes in one piece.
const REQUEST_MAX_KIB: &str = "1024";
/// The kernel's read-ahead of a disk unless it is set (a loop device has another).
const READ_AHEAD_KIB: u32 = 128;
/// The scheduler that distributions give rotating disks.
const SCHEDULER: &str = "mq-deadline";

/// One disk. Dropping it unmounts and removes everything.
pub struct KernelDisk {
    // Dropped in this order.
    disk: Option<LoopDisk>,
    image: Option<BackgroundSession>,
    model: Arc<ModelledDevice>,
    device: BlockDevice,
    began: Mutex<Counts>,
    folder: TempDir,
}

impl KernelDisk {
    /// Makes a disk below `parent`, which should lie in memory. Needs root, `/dev/fuse` and loop devices.
    pub fn new(parent: &Path, params: &DeviceParams) -> Result<KernelDisk> {
        KernelDisk::make(parent, &DeviceParams { order: Order::Elevator, ..params.clone() }, SCHEDULER, READ_AHEAD_KIB)
    }

    /// The same in order of arrival: neither the drive nor the kernel sorts, and the kernel reads nothing ahead. Above it is still a
    /// page cache, unless programs pass it by (O_DIRECT).
    pub fn in_order_of_arrival(parent: &Path, params: &DeviceParams) -> Result<KernelDisk> {
        KernelDisk::make(parent, &DeviceParams { order: Order::Arrival, ..params.clone() }, "none", 0)
    }

    fn make(parent: &Path, params: &DeviceParams, scheduler: &str, read_ahead_kib: u32) -> Result<KernelDisk> {
        if !rustix::process::geteuid().is_root() {
            bail!(
                "a modelled disk below the real kernel needs root (loop devices, mounts): run as root, or use --device disk"
            );
        }
        let folder = tempfile::Builder::new().prefix(&format!("{PREFIX}{}-", std::process::id())).tempdir_in(parent)?;
        let at = |name: &str| folder.path().join(name);
        loop_disk::make_image(&at("bytes"), SIZE_BYTES)?;
        let flusher = Flusher::begin();
        let model = ModelledDevice::start(params).context("starting the model of a disk")?;
        fs::create_dir(at("fuse"))?;
        let bytes = fs::File::options().read(true).write(true).open(at("bytes"))?;
        let session = image::mount(bytes, model.clone(), &at("fuse"))?;
        drop(flusher);
        // From here on, dropping removes the mounts.
        let image = Some(session);
        let disk = LoopDisk::attach(&at("fuse").join(image::IMAGE), &at("disk"), true)?;
        let device = disk.device()?;
        device.set_queue("max_sectors_kb", REQUEST_MAX_KIB)?;
        device.set_queue("scheduler", scheduler)?;
        device.set_queue("rotational", "1")?;
        device.set_read_ahead_kib(read_ahead_kib)?;
        let began = Mutex::new(device.counts()?);
        Ok(KernelDisk { disk: Some(disk), image, model, device, began, folder })
    }

    /// Folder on the disk's file system.
    pub fn path(&self) -> &Path {
        self.disk.as_ref().map_or(Path::new("/"), LoopDisk::path)
    }

    /// Resets the counters and the drive's memory. Does not drop any kernel cache.
    pub fn reset(&self) -> Result<()> {
        self.model.reset();
        *self.began.lock() = self.device.counts()?;
        Ok(())
    }

    /// Sets the kernel's read-ahead for files that are opened from now on, KiB.
    pub fn set_read_ahead_kib(&self, kib: u32) -> Result<()> {
        self.device.set_read_ahead_kib(kib)
    }

    /// Requests at the device since [`KernelDisk::reset`], as the kernel counts them.
    pub fn counts(&self) -> Result<Counts> {
        let began = *self.began.lock();
        Ok(self.device.counts()?.since(began))
    }

    /// The model's own statistics.
    pub fn status(&self) -> DeviceStatus {
        self.model.status()
    }
}

impl Drop for KernelDisk {
    fn drop(&mut self) {
        drop(self.disk.take());
        if let Some(image) = self.image.take() {
            disk_mount::unmount(image, &self.folder.path().join("fuse"));
        }
    }
}

/// Threads started while it lives serve a disk that the kernel writes to when memory is short: their allocations must
/// not wait for such writes, i.e. for themselves (prctl(2), `PR_SET_IO_FLUSHER`).
struct Flusher;

impl Flusher {
    fn begin() -> Flusher {
        // Before Linux 5.6 or without the right, a bed in too little memory may hang.
        let _ = rustix::process::configure_io_flusher_behavior(true);
        Flusher
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        let _ = rustix::process::configure_io_flusher_behavior(false);
    }
}

/// Removes the remains of killed processes' disks below `parent`; returns the folders removed.
pub fn remove_stale(parent: &Path) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(parent).with_context(|| format!("listing {}", parent.display()))?.flatten() {
        let Some(owner) = owner_of(&entry.file_name().to_string_lossy()) else { continue };
        if Path::new(&format!("/proc/{owner}")).exists() {
            continue;
        }
        let folder = entry.path();
        for device in loop_disk::devices_on(&folder) {
            loop_disk::detach(&folder.join("disk"), &device);
        }
        let _ = std::process::Command::new("umount").arg("--lazy").arg(folder.join("fuse")).output();
        fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
        removed.push(folder);
    }
    Ok(removed)
}

/// The process that made a disk's folder, by the folder's name.
fn owner_of(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_stand_in_the_names_of_folders() {
        assert_eq!(owner_of("impresario-kernel-disk-4711-abCd1"), Some(4711));
        assert_eq!(owner_of("impresario-kernel-disk-x-abCd1"), None);
        assert_eq!(owner_of("impresario-bench-4711"), None);
    }

    #[test]
    fn threads_inherit_that_they_serve_a_disk() {
        let is_flusher = || rustix::process::is_io_flusher().ok();
        let Some(false) = is_flusher() else {
            return impresario_testing::skip(
                "CAP_SYS_RESOURCE",
                "a thread may not be marked as one that serves a disk",
            );
        };
        let flusher = Flusher::begin();
        let inherited = std::thread::spawn(is_flusher).join();
        assert_eq!(inherited.ok(), Some(Some(true)));
        drop(flusher);
        assert_eq!(is_flusher(), Some(false));
    }

    #[test]
    fn without_root_it_says_what_it_needs() {
        // As root: a thread gives its rights up, by itself.
        let error = std::thread::spawn(|| {
            if rustix::process::geteuid().is_root() {
                let uid = rustix::thread::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            }
            KernelDisk::new(Path::new("/tmp"), &DeviceParams::default()).err().map(|e| e.to_string())
        });
        let error = error.join().unwrap().expect("it is refused");
        assert!(error.contains("needs root"), "{error}");
    }
}
