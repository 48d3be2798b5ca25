//! The request limits of a real device, as the kernel reports them.
//!
//! - One `WILLNEED` call is limited to the larger of the device's read-ahead and its largest request.
//! - Data prefetched by advice is in single pages, and a request gathers only a limited number of them; data prefetched
//!   by long reads is, on file systems with large folios, in long extents, with requests as long as the device takes.
//!   If requests are expensive on the device, reading is then the better way to prefetch.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use impresario_base::mounts::device_below;

use crate::PAGE_BYTES;

/// Used if the device does not say.
const DEFAULT_BYTES: u64 = 128 << 10;
/// The kernel's own hints are no larger; longer ones would also occupy a worker for long.
const MOST_BYTES: u64 = 8 << 20;

/// The request limits of a device, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceLimits {
    /// Limit of one `WILLNEED` call. A power of two: from calls of, say, 1280 KiB the kernel would make one large and
    /// one small request each.
    pub call_bytes: u64,
    /// Limit of one request for data in single pages.
    pub page_request_bytes: u64,
    /// Limit of any request.
    pub request_bytes: u64,
}

impl DeviceLimits {
    /// Whether reading this many bytes takes clearly fewer requests than advising them.
    pub fn better_read(&self, bytes: u64) -> bool {
        bytes > self.page_request_bytes && self.request_bytes * 2 >= self.page_request_bytes * 3
    }
}

fn numbers(dev: u64) -> String {
    format!("{}:{}", rustix::fs::major(dev), rustix::fs::minor(dev))
}

/// The limits for an open file on a device (`st_dev`), from the tree at `sysfs` (`/sys`). Where this knows no such device, as on
/// btrfs, whose subvolumes have numbers of their own, those of the device that is mounted.
pub fn device_limits_of(sysfs: &Path, dev: u64, open: BorrowedFd<'_>) -> DeviceLimits {
    let is_known = ["dev/block", "class/bdi"].iter().any(|place| sysfs.join(place).join(numbers(dev)).exists());
    let below = if is_known { None } else { device_below(open) };
    device_limits(sysfs, below.map_or(dev, |(major, minor)| rustix::fs::makedev(major, minor)))
}

/// The limits for files on a device (`st_dev`), from the tree at `sysfs` (`/sys`).
pub fn device_limits(sysfs: &Path, dev: u64) -> DeviceLimits {
    let device = numbers(dev);
    let block = sysfs.join("dev/block").join(&device);
    // A partition's queue is in its parent; file systems without a block device have only a bdi.
    let queues = [block.join("queue"), block.join("../queue")];
    let queue = |name: &str| queues.iter().find_map(|queue| number(queue.join(name)));
    let bdi = number(sysfs.join("class/bdi").join(&device).join("read_ahead_kb"));
    let read_ahead = bdi.or_else(|| queue("read_ahead_kb"));
    let request_kib = queue("max_sectors_kb");
    let call_bytes = match (read_ahead, request_kib) {
        (None, None) => DEFAULT_BYTES,
        (a, b) => (a.unwrap_or(0).max(b.unwrap_or(0)) << 10).clamp(DEFAULT_BYTES, MOST_BYTES),
    };
    let request_bytes = request_kib.map_or(DEFAULT_BYTES, |kib| (kib << 10).clamp(PAGE_BYTES, MOST_BYTES));
    let segments = queue("max_segments").unwrap_or(u64::MAX);
    let page_request_bytes = segments.saturating_mul(PAGE_BYTES).clamp(PAGE_BYTES, request_bytes);
    DeviceLimits { call_bytes: 1 << call_bytes.ilog2(), page_request_bytes, request_bytes }
}

fn number(path: PathBuf) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    text.trim().parse::<u64>().ok().filter(|n| *n < 1 << 32)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_larger_limit_applies() {
        let sys = tempfile::tempdir().unwrap();
        let put = |path: &str, value: &str| {
            let path = sys.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, value).unwrap();
        };
        put("dev/block/7:0/queue/read_ahead_kb", "128\n");
        put("dev/block/7:0/queue/max_sectors_kb", "1280\n");
        put("dev/block/7:0/queue/max_segments", "128\n");
        put("class/bdi/7:1/read_ahead_kb", "4096\n");
        put("class/bdi/7:2/read_ahead_kb", "nonsense\n");
        put("devices/sda/queue/max_sectors_kb", "512\n");
        std::fs::create_dir_all(sys.path().join("devices/sda/sda1")).unwrap();
        std::os::unix::fs::symlink("../../devices/sda/sda1", sys.path().join("dev/block/8:1")).unwrap();
        let limit = |major, minor| device_limits(sys.path(), rustix::fs::makedev(major, minor)).call_bytes;
        assert_eq!(limit(7, 0), 1 << 20, "1280 KiB, rounded down");
        assert_eq!(limit(7, 1), 4 << 20);
        assert_eq!(limit(7, 2), DEFAULT_BYTES);
        assert_eq!(limit(8, 1), 512 << 10, "a partition's queue is its disk's");
        assert_eq!(limit(9, 9), DEFAULT_BYTES);
        let disk = device_limits(sys.path(), rustix::fs::makedev(7, 0));
        assert_eq!((disk.page_request_bytes, disk.request_bytes), (512 << 10, 1280 << 10));
        assert_eq!([512 << 10, 513 << 10].map(|bytes| disk.better_read(bytes)), [false, true]);
        let unknown = device_limits(sys.path(), rustix::fs::makedev(9, 9));
        assert!(!unknown.better_read(1 << 30));
    }

    #[test]
    fn of_a_device_that_a_file_system_made_up_the_one_below_counts() {
        let (sys, file) = (tempfile::tempdir().unwrap(), tempfile::tempfile().unwrap());
        let (major, minor) = device_below(&file).unwrap();
        let bdi = sys.path().join(format!("class/bdi/{major}:{minor}"));
        std::fs::create_dir_all(&bdi).unwrap();
        std::fs::write(bdi.join("read_ahead_kb"), "4096\n").unwrap();
        let made_up = rustix::fs::makedev(0, 99_999);
        assert_eq!(device_limits_of(sys.path(), made_up, file.as_fd()).call_bytes, 4 << 20);
        let own = sys.path().join("class/bdi/0:99999");
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(own.join("read_ahead_kb"), "2048\n").unwrap();
        assert_eq!(device_limits_of(sys.path(), made_up, file.as_fd()).call_bytes, 2 << 20, "one that is known");
    }
}
