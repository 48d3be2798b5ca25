//! Lustre: the servers are advised to read ahead from their disks (`ladvise`), and the data is read into this node's
//! page cache, since Lustre's client ignores the kernel's advice.
//!
//! The interface is that of Lustre's public `lustre_user.h`: ioctl `LL_IOC_LADVISE` with a header and one advice. It has
//! not been tried on a real Lustre; tests put a recorder in the place of the ioctl.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use rustc_hash::FxHashSet;

use super::forced_read::ForcedRead;
use super::{Brought, HintBackend, HintedFile};
use crate::config::ReadAhead;
use impresario_base::lock::Mutex;

const LADVISE_MAGIC: u32 = 0x1ADF_1CE0;
const WILLREAD: u16 = 1;
/// The servers answer before they have read.
const ASYNC: u64 = 1;

/// What the ioctl takes: a header (32 bytes) and one advice (32 bytes).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Advice {
    magic: u32,
    count: u32,
    flags: u64,
    unused: [u64; 2],
    advice: u16,
    value1: u16,
    value2: u32,
    /// First byte.
    pub start: u64,
    /// First byte after.
    pub end: u64,
    value3: u32,
    value4: u32,
}

/// Gives one advice on an open file.
pub type Ladvise = dyn Fn(BorrowedFd<'_>, &mut Advice) -> io::Result<()> + Send + Sync;

/// `_IOR('f', 250, struct llapi_lu_ladvise)`, whose size is 32.
const LL_IOC_LADVISE: u64 = 2 << 30 | 32 << 16 | (b'f' as u64) << 8 | 250;

/// The real ioctl.
pub(super) fn ladvise_ioctl() -> Box<Ladvise> {
    Box::new(|fd, advice| {
        // SAFETY: Lustre reads and writes within the 64 bytes of the header and one advice; other file systems refuse
        // the number without looking.
        match unsafe { libc::ioctl(fd.as_raw_fd(), LL_IOC_LADVISE as _, std::ptr::from_mut(advice)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    })
}

/// Server-side advice and reads by the calling thread.
pub struct Lustre {
    ladvise: Box<Ladvise>,
    /// File systems, by device number, whose servers do not know the advice.
    refused: Mutex<FxHashSet<u64>>,
    forced_read: ForcedRead,
}

impl Lustre {
    /// With a way to give advice.
    pub fn new(ladvise: Box<Ladvise>) -> Lustre {
        Lustre { ladvise, refused: Mutex::default(), forced_read: ForcedRead::new(Path::new("/sys")) }
    }
}

impl HintBackend for Lustre {
    fn name(&self) -> &'static str {
        "lustre"
    }

    fn waits(&self) -> bool {
        true
    }

    fn will_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<Brought> {
        let refused = || self.refused.lock();
        let known = refused().contains(&file.id.dev);
        if !known {
            let mut advice = Advice {
                magic: LADVISE_MAGIC,
                count: 1,
                flags: ASYNC,
                advice: WILLREAD,
                start: range.start,
                end: range.end,
                ..Advice::default()
            };
            if let Err(e) = (self.ladvise)(file.fd, &mut advice) {
                // Only an answer that will be the same next time ends it, and for this file system alone.
                if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS)) {
                    tracing::info!(error = %e, dev = file.id.dev, "the servers of this file system take no advice");
                    refused().insert(file.id.dev);
                } else {
                    tracing::debug!(error = %e, "an advice was not taken");
                }
            }
        }
        self.forced_read.will_need(file, range)
    }

    fn dont_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<()> {
        // This node's pages only: other nodes may read the same data from the servers' memory.
        self.forced_read.dont_need(file, range)
    }

    fn read_ahead(&self, _: HintedFile<'_>, _: ReadAhead) -> io::Result<()> {
        // Lustre has a read-ahead of its own and switches the kernel's off.
        Ok(())
    }

    fn closed(&self, file: HintedFile<'_>) {
        self.forced_read.closed(file);
    }
}

#[cfg(test)]
mod tests {
    use super::super::FileId;
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    #[test]
    fn servers_are_advised_and_the_data_is_read() {
        assert_eq!((size_of::<Advice>(), LL_IOC_LADVISE), (64, 0x8020_66fa));
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 100_000]).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let record = seen.clone();
        let lustre = Lustre::new(Box::new(move |_, advice| {
            record.lock().push(*advice);
            Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
        }));
        let hinted = HintedFile { fd: file.as_fd(), id: FileId { dev: 1, ino: 1 }, progress: None, inside: None };
        lustre.will_need(hinted, 4096..50_000).unwrap();
        lustre.will_need(hinted, 0..10).unwrap();
        let seen = seen.lock();
        assert_eq!(seen.len(), 1, "servers that refuse are not asked again");
        let bytes: [u8; 64] = {
            // SAFETY: plain numbers without padding.
            unsafe { std::mem::transmute(seen[0]) }
        };
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(number(0), 1 << 32 | u64::from(LADVISE_MAGIC));
        assert_eq!([8, 16, 24, 32, 40, 48, 56].map(number), [1, 0, 0, 1, 4096, 50_000, 0]);
    }

    #[test]
    fn one_error_ends_neither_the_advice_nor_that_of_another_file_system() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 10_000]).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let record = asked.clone();
        let lustre = Lustre::new(Box::new(move |_, advice| {
            let mut asked = record.lock();
            asked.push(advice.start);
            Err(io::Error::from_raw_os_error(if asked.len() == 1 { libc::EIO } else { libc::ENOTTY }))
        }));
        let on = |dev| HintedFile { fd: file.as_fd(), id: FileId { dev, ino: 1 }, progress: None, inside: None };
        for (dev, start) in [(1, 0), (1, 4096), (1, 8192), (2, 1), (2, 2)] {
            lustre.will_need(on(dev), start..10_000).unwrap();
        }
        assert_eq!(*asked.lock(), [0, 4096, 1], "an I/O error passes; a refusal holds for one device");
    }

    #[test]
    fn other_file_systems_refuse_the_ioctl() {
        let file = tempfile::tempfile().unwrap();
        let said = ladvise_ioctl()(file.as_fd(), &mut Advice::default()).unwrap_err();
        assert_eq!(said.raw_os_error(), Some(libc::ENOTTY));
    }
}
