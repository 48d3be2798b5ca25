//! The indexes of files that list their own extents. The manager reads them as a program runs; a plan that is made where the
//! files are reads them, too, and so knows what that is worth.

use std::fs::{File, Metadata};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use super::device::Device;
use crate::formats::{self, Index};

/// Files whose index is read for a plan, and the extents of those that are kept until it is made.
const FILES_MAX: usize = 64;
const EXTENTS_MAX: usize = 1 << 21;

/// What may still be read.
pub(super) struct Indexes {
    files: usize,
    extents: usize,
}

impl Default for Indexes {
    fn default() -> Indexes {
        Indexes { files: FILES_MAX, extents: EXTENTS_MAX }
    }
}

impl Indexes {
    /// The index of a file that still has the length that it had as it was recorded.
    pub(super) fn of(&mut self, path: &str, recorded_bytes: u64) -> Option<Index> {
        let formats = formats::by_name(Path::new(path));
        if formats.is_empty() || recorded_bytes < formats::FILE_BYTES_MIN || self.files == 0 {
            return None;
        }
        self.files -= 1;
        // A pipe of that name is not waited for.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
        file.metadata().ok().filter(Metadata::is_file)?;
        let index =
            formats::read_open(file.as_fd(), &formats, None).filter(|index| index.size_bytes == recorded_bytes)?;
        self.extents = self.extents.checked_sub(index.tracks.extents())?;
        Some(index)
    }
}

/// How long a device takes for an index; `None` where its reader would give up.
pub(super) fn reading_ns(index: &Index, device: &Device) -> Option<u64> {
    let spent = &index.spent;
    let each = Duration::from_nanos(device.random.ttp(spent.bytes / spent.requests.max(1)).0);
    Some(u64::try_from(spent.time(each, device.parallel)?.as_nanos()).unwrap_or(u64::MAX))
}
