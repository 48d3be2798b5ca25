//! How the bytes of files are moved: by plain calls or through a [ring](super::ring), by the page cache or past it.
//!
//! Past the page cache (`O_DIRECT`) whole granules are moved, through memory of ours; what a write has before and after
//! its whole granules goes by the page cache, which the kernel keeps consistent with both.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use impresario_base::machine::path_of;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno as Number;

use super::region::Region;
use super::ring::{PIECE_BYTES, Ring, RingStatus};
use crate::{Errno, Result};

/// Which calls move the bytes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Calls {
    /// io_uring past the page cache for transfers of several pieces, which it has under way at once, where the kernel gives
    /// it; plain calls otherwise: no other thread's waking up is waited for.
    #[default]
    Auto,
    /// io_uring where the kernel gives it.
    Uring,
    /// `pread` and `pwrite`.
    Threads,
}

/// How bytes are moved, for `status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoStatus {
    /// Files are read and written past the page cache.
    pub direct: bool,
    /// The ring, if there is one.
    pub ring: Option<RingStatus>,
    /// Why there is none, where one was wanted.
    pub no_ring: Option<String>,
}

/// Memory of a thread for plain calls past the page cache, bytes.
const BOUNCE_BYTES: usize = 1 << 20;

thread_local! {
    static BOUNCE: RefCell<Option<Region>> = const { RefCell::new(None) };
}

/// A file or directory that is open.
pub(super) struct OpenFile {
    plain: OwnedFd,
    /// Passes the page cache by.
    direct: Option<OwnedFd>,
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.plain.as_fd()
    }
}

/// How a tree moves bytes.
pub(super) struct Io {
    calls: Calls,
    direct: bool,
    ring: Option<Ring>,
    no_ring: Option<String>,
    /// Files are aligned so past the page cache, bytes: the largest of what disks, file systems and pages need.
    granule: usize,
    /// It was reported that the file system does not pass the page cache by.
    is_refused: AtomicBool,
}

impl Io {
    /// `patience`: how long a read through a ring may take.
    pub(super) fn new(calls: Calls, direct: bool, patience: Duration) -> Io {
        let wanted = match calls {
            Calls::Auto => direct,
            Calls::Uring => true,
            Calls::Threads => false,
        };
        let (ring, no_ring) = match wanted.then(|| Ring::start(patience)) {
            None => (None, None),
            Some(Ok(ring)) => (Some(ring), None),
            Some(Err(error)) => {
                let why = refusal(&error);
                tracing::warn!("no io_uring: {why}; files are read and written by plain calls");
                (None, Some(why))
            }
        };
        let granule = rustix::param::page_size().max(4096);
        Io { calls, direct, ring, no_ring, granule, is_refused: AtomicBool::new(false) }
    }

    pub(super) fn is_direct(&self) -> bool {
        self.direct
    }

    pub(super) fn status(&self) -> IoStatus {
        let ring = self.ring.as_ref().map(Ring::status);
        IoStatus { direct: self.direct && !self.is_refused.load(Relaxed), ring, no_ring: self.no_ring.clone() }
    }

    /// A descriptor with what moves its bytes; `writes` and `reads`: what it is open for.
    pub(super) fn open(&self, plain: OwnedFd, (reads, writes): (bool, bool), is_file: bool) -> OpenFile {
        if !is_file {
            return OpenFile { plain, direct: None };
        }
        if self.ring.is_some() {
            // A ring fails what would wait on descriptors that are not to.
            let flags = rustix::fs::fcntl_getfl(&plain).map(|flags| flags - OFlags::NONBLOCK);
            let _ = flags.and_then(|flags| rustix::fs::fcntl_setfl(&plain, flags)); // then plain calls do it
        }
        let access = match (reads, writes) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        let open = || rustix::fs::open(path_of(&plain), access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty());
        let direct = match self.direct.then(open) {
            Some(Ok(direct)) => Some(direct),
            Some(Err(Number::INVAL)) => {
                self.refused();
                None
            }
            // Without a right to open it anew, as of a file whose owner has taken all rights away.
            Some(Err(_)) | None => None,
        };
        OpenFile { plain, direct }
    }

    /// Reads from `offset` on until `into` is full or the file ends.
    pub(super) fn read(&self, file: &OpenFile, offset: u64, into: &mut [u8]) -> Result<usize> {
        // No file is longer, and no call takes a range that passes this.
        let longest = i64::MAX as u64 / self.granule as u64 * self.granule as u64;
        let most = usize::try_from(longest.saturating_sub(offset)).unwrap_or(usize::MAX).min(into.len());
        let into = &mut into[..most];
        if into.is_empty() {
            return Ok(0);
        }
        if let Some(direct) = &file.direct {
            match self.read_by(direct.as_fd(), self.granule, offset, into) {
                Err(Errno(libc::EINVAL)) => self.refused(),
                read => return read,
            }
        }
        self.read_by(file.as_fd(), 1, offset, into)
    }

    /// Writes all of `bytes` at `offset`, a range that a file can have.
    pub(super) fn write(&self, file: &OpenFile, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some(direct) = &file.direct else { return self.write_by(file.as_fd(), 1, offset, bytes) };
        let granule = self.granule as u64;
        let before = bytes.len().min((offset.next_multiple_of(granule) - offset) as usize);
        let (before, rest) = bytes.split_at(before);
        let (whole, after) = rest.split_at(rest.len() - rest.len() % self.granule);
        let whole_at = offset + before.len() as u64;
        self.write_by(file.as_fd(), 1, offset, before)?;
        match self.write_by(direct.as_fd(), self.granule, whole_at, whole) {
            Err(Errno(libc::EINVAL)) => {
                self.refused();
                self.write_by(file.as_fd(), 1, whole_at, whole)?;
            }
            written => written?,
        }
        self.write_by(file.as_fd(), 1, whole_at + whole.len() as u64, after)
    }

    /// The ring, where it is to be used for such a transfer.
    fn ring(&self, granule: usize, len: usize) -> Option<&Ring> {
        let is_worth_it = granule > 1 && len > PIECE_BYTES;
        self.ring.as_ref().filter(|_| len > 0 && (is_worth_it || self.calls == Calls::Uring))
    }

    fn read_by(&self, file: BorrowedFd<'_>, granule: usize, offset: u64, into: &mut [u8]) -> Result<usize> {
        let (got, goes_on) = match self.ring(granule, into.len()) {
            Some(ring) => ring.read(file, offset, into, granule)?,
            None => (0, true),
        };
        if !goes_on {
            return Ok(got);
        }
        let (offset, into) = (offset + got as u64, &mut into[got..]);
        let more = if granule == 1 { read_plain(file, offset, into) } else { read_direct(file, granule, offset, into) };
        Ok(got + more?)
    }

    fn write_by(&self, file: BorrowedFd<'_>, granule: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let written = self.ring(granule, bytes.len()).map_or(Ok(0), |ring| ring.write(file, offset, bytes))?;
        let (offset, bytes) = (offset + written as u64, &bytes[written..]);
        if granule == 1 { write_plain(file, offset, bytes) } else { write_direct(file, offset, bytes) }
    }

    /// The file system takes no `O_DIRECT`, or not so.
    fn refused(&self) {
        if !self.is_refused.swap(true, Relaxed) {
            tracing::warn!("this file system does not pass the page cache by (O_DIRECT); files go through it");
        }
    }
}

/// Why the kernel gives no ring, and what helps.
fn refusal(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel has none, or a container's filter of system calls hides it".into(),
        Some(libc::EPERM | libc::EACCES) => {
            "it is not permitted (kernel.io_uring_disabled, or a container's filter of system calls)".into()
        }
        Some(libc::ENOMEM) => "too little memory may be locked; raise the limit (ulimit -l)".into(),
        _ => error.to_string(),
    }
}

fn read_plain(file: BorrowedFd<'_>, offset: u64, into: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match rustix::io::pread(file, &mut into[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Number::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

fn write_plain(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], offset + done as u64) {
            Ok(0) => return Err(Errno(libc::EIO)),
            Ok(count) => done += count,
            Err(Number::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Has something done with this thread's memory for direct transfers.
fn with_bounce<T>(act: impl FnOnce(&mut [u8]) -> Result<T>) -> Result<T> {
    BOUNCE.with_borrow_mut(|bounce| {
        let region = match bounce {
            Some(region) => region,
            None => bounce.insert(Region::new(BOUNCE_BYTES)?),
        };
        act(region.bytes())
    })
}

fn read_direct(file: BorrowedFd<'_>, granule: usize, offset: u64, into: &mut [u8]) -> Result<usize> {
    let granule = granule as u64;
    with_bounce(|bounce| {
        let (mut came, end) = (offset, offset + into.len() as u64);
        while came < end {
            let at = came - came % granule;
            let len = (end.next_multiple_of(granule) - at).min(bounce.len() as u64);
            let got = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut bounce[..len as usize], at))? as u64;
            let to = (at + got).min(end);
            if to <= came {
                break;
            }
            let bytes = &bounce[(came - at) as usize..(to - at) as usize];
            into[(came - offset) as usize..(to - offset) as usize].copy_from_slice(bytes);
            came = to;
            if !got.is_multiple_of(granule) {
                break;
            }
        }
        Ok((came - offset) as usize)
    })
}

fn write_direct(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    with_bounce(|bounce| {
        for (at, bytes) in (offset..).step_by(bounce.len()).zip(bytes.chunks(bounce.len())) {
            let bounce = &mut bounce[..bytes.len()];
            bounce.copy_from_slice(bytes);
            write_plain(file, at, bounce)?;
        }
        Ok(())
    })
}
