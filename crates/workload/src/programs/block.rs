//! The block device under a file, and what the kernel counted of it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use impresario_base::mounts::device_below_path;

/// A block device by its numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockDevice {
    /// `major:minor` as control groups and sysfs write it.
    pub numbers: String,
    /// Its folder in sysfs.
    folder: PathBuf,
}

/// What the kernel counted of a device since it came.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Reads that reached the device, after merging.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes that reached the device, after merging.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

impl Counts {
    /// What was counted between `earlier` and now.
    pub fn since(self, earlier: Counts) -> Counts {
        Counts {
            reads: self.reads.saturating_sub(earlier.reads),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            writes: self.writes.saturating_sub(earlier.writes),
            write_bytes: self.write_bytes.saturating_sub(earlier.write_bytes),
        }
    }
}

impl BlockDevice {
    /// The device that a file or folder lies on. An error where the file system has none (tmpfs, network, FUSE).
    pub fn under(path: &Path) -> Result<BlockDevice> {
        let (major, minor) = device_below_path(path).with_context(|| format!("looking at {}", path.display()))?;
        let numbers = format!("{major}:{minor}");
        let folder = PathBuf::from("/sys/dev/block").join(&numbers);
        if !folder.join("stat").is_file() {
            bail!(
                "{} lies on no block device of this machine ({numbers}): its requests cannot be counted",
                path.display()
            );
        }
        Ok(BlockDevice { numbers, folder })
    }

    /// What was counted so far.
    pub fn counts(&self) -> Result<Counts> {
        let file = self.folder.join("stat");
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        parse(&text).with_context(|| format!("{} holds {text:?}, not the counters of a block device", file.display()))
    }

    /// Sets the kernel's read-ahead of the device, KiB. For a device of our own only.
    pub fn set_read_ahead_kib(&self, kib: u32) -> Result<()> {
        self.set_queue("read_ahead_kb", &kib.to_string())
    }

    /// Sets an attribute of the device's queue (Documentation/ABI/stable/sysfs-block). For a device of our own only.
    pub fn set_queue(&self, attribute: &str, value: &str) -> Result<()> {
        let file = self.folder.join("queue").join(attribute);
        fs::write(&file, value).with_context(|| format!("writing {value} to {}", file.display()))
    }
}

/// The first fields of `/sys/block/*/stat`: requests, merged, sectors of 512 bytes and time, for reads and then for writes
/// (Documentation/block/stat.rst).
fn parse(text: &str) -> Option<Counts> {
    let mut fields = text.split_ascii_whitespace().map(str::parse::<u64>);
    let mut next = |skipped| fields.nth(skipped)?.ok();
    let (reads, read_sectors, writes, written_sectors) = (next(0)?, next(1)?, next(1)?, next(1)?);
    let bytes = |sectors: u64| sectors.checked_mul(512);
    Some(Counts { reads, read_bytes: bytes(read_sectors)?, writes, write_bytes: bytes(written_sectors)? })
}

/// Forgets what the whole machine has cached, so that the next read is cold. Needs root.
pub fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("dropping the page cache (needs root)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read() {
        let text = "    2181     4   103402      671     1   0   8   0   0   452   671   0 0 0 0 0 0\n";
        let counts = Counts { reads: 2181, read_bytes: 103_402 * 512, writes: 1, write_bytes: 8 * 512 };
        assert_eq!(parse(text), Some(counts));
        assert_eq!(parse(""), None);
        assert_eq!(parse("1 2"), None);
        assert_eq!(parse("1 2 x"), None);
        assert_eq!(parse("1 2 18446744073709551615"), None);
    }

    #[test]
    fn differences_never_go_below_nothing() {
        let of = |reads| Counts { reads, read_bytes: 9, writes: 3, write_bytes: 8 };
        let (a, b) = (of(5), of(7));
        assert_eq!(b.since(a), Counts { reads: 2, ..Counts::default() });
        assert_eq!(a.since(b), Counts::default());
    }

    #[test]
    fn a_file_without_a_device_is_said_to_have_none() {
        let error = BlockDevice::under(Path::new("/proc/self/status")).unwrap_err().to_string();
        assert!(error.contains("/proc/self/status") && error.contains("no block device"), "{error}");
    }
}
