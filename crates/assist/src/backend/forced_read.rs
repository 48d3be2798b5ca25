//! Reading the data ourselves.
//!
//! On file systems that ignore advice it is the only way: a read on this node fills its page cache under the file
//! system's own locks, the user-space equivalent of the kernel change by which MERCURY's authors made `WILLNEED` work on
//! Lustre (III.C). On others it is the way to fewer and longer requests ([`DeviceLimits`](super::DeviceLimits)).
//!
//! Reads go through an open file of our own where the file can be opened again, so that the program's read-ahead is left
//! alone and the kernel sees one reader that goes forward; else through the program's, whose position `pread` leaves
//! alone. What is read is not looked at.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use impresario_base::machine::path_of;
use rustc_hash::FxHashMap;
use rustix::fs::{AtFlags, OFlags, StatxFlags};

use super::{Brought, FileId, HintBackend, HintedFile, pieces};
use impresario_base::lock::{Mutex, MutexGuard};
use impresario_device::device_limits_of;

/// Bytes read in one call at least: several requests of most devices. Calls are whole requests long, so that the kernel
/// need not make short ones.
const CALL_BYTES_MIN: u64 = 2 << 20;
/// And at most.
const CALL_BYTES_MAX: u64 = 8 << 20;
/// Where they go: the same few pages again and again, which stay in the processor's cache.
const SCRATCH_BYTES: usize = 64 << 10;

thread_local! {
    /// Each worker's, made when it first reads.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// How far beyond our last read the kernel may have read ahead for us.
const OWN_AHEAD_BYTES: u64 = 4 << 20;

/// A read that ended so much further on has just passed a piece; one further away is somewhere else.
const JUST_PASSED_BYTES: u64 = 32 << 20;

/// A file as we read it.
#[derive(Debug)]
struct Own {
    /// Our own open file; `None` when it cannot be opened again.
    fd: Option<OwnedFd>,
    /// Where our last read ended; 0 before the first.
    end: AtomicU64,
    /// Bytes to read in one call.
    call_bytes: u64,
}

/// Reads by the calling thread.
#[derive(Debug)]
pub struct ForcedRead {
    sysfs: PathBuf,
    files: Mutex<FxHashMap<FileId, Arc<Own>>>,
}

impl ForcedRead {
    /// With the tree that describes devices, `/sys`.
    pub fn new(sysfs: &Path) -> ForcedRead {
        ForcedRead { sysfs: sysfs.into(), files: Mutex::default() }
    }

    fn files(&self) -> MutexGuard<'_, FxHashMap<FileId, Arc<Own>>> {
        self.files.lock()
    }

    fn own(&self, file: HintedFile<'_>) -> Arc<Own> {
        if let Some(known) = self.files().get(&file.id) {
            return known.clone();
        }
        // Opening may take long; two threads that open the same file at once do no harm.
        let request = device_limits_of(&self.sysfs, file.id.dev, file.fd).request_bytes;
        let call_bytes = CALL_BYTES_MIN.next_multiple_of(request).min(CALL_BYTES_MAX);
        let own = Arc::new(Own { fd: open_again(file), end: AtomicU64::new(0), call_bytes });
        self.files().insert(file.id, own.clone());
        own
    }

    /// Reads what was asked for, so as to know when it is there.
    pub(super) fn wait_for(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<()> {
        let own = self.own(file);
        let fd = own.fd.as_ref().map_or(file.fd, |fd| fd.as_fd());
        pieces(range, own.call_bytes).take_while(|_| !file.has_ended()).try_for_each(|piece| {
            own.end.store(piece.end, Relaxed);
            read_piece(fd, piece).map(drop)
        })
    }
}

/// Whether a program has just read past a piece. Bringing it in then would only fill the gaps between what the program
/// read itself, in many short requests, and never get ahead of it.
pub(super) fn overtaken(file: HintedFile<'_>, piece: &Range<u64>) -> bool {
    let passed = file.progress.map_or(0, |progress| progress.passed.load(Relaxed));
    (piece.end..piece.end.saturating_add(JUST_PASSED_BYTES)).contains(&passed)
}

/// The same file, opened once more.
fn open_again(file: HintedFile<'_>) -> Option<OwnedFd> {
    let path = path_of(file.fd);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let quietly = rustix::fs::open(&path, flags | OFlags::NOATIME, rustix::fs::Mode::empty());
    let own = quietly.or_else(|_| rustix::fs::open(&path, flags, rustix::fs::Mode::empty())).ok()?;
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(&own, c"", how, StatxFlags::INO).ok()?;
    let dev = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    (FileId { dev, ino: stat.stx_ino } == file.id).then_some(own)
}

impl HintBackend for ForcedRead {
    fn name(&self) -> &'static str {
        "forced-read"
    }

    fn waits(&self) -> bool {
        true
    }

    fn will_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<Brought> {
        let own = self.own(file);
        let fd = own.fd.as_ref().map_or(file.fd, |fd| fd.as_fd());
        let mut brought = Brought::default();
        for piece in pieces(range, own.call_bytes).take_while(|_| !file.has_ended()) {
            let bytes = piece.end - piece.start;
            if overtaken(file, &piece) {
                continue;
            }
            // What the kernel read ahead of our last read is there by our doing. It is read all the same: passing over
            // it would end the stream that the kernel sees, and its requests would become short again.
            let end = own.end.load(Relaxed);
            let goes_on = end > 0 && (end..end.saturating_add(OWN_AHEAD_BYTES)).contains(&piece.start);
            if !goes_on && brought.look(fd, &piece).is_some_and(|cached| cached.complete()) {
                continue;
            }
            let (read, calls) = read_piece(fd, piece.clone())?;
            own.end.store(piece.start + read, Relaxed);
            brought.asked_bytes += read;
            brought.calls += calls;
            if read < bytes {
                break; // the end of the file
            }
        }
        Ok(brought)
    }

    fn closed(&self, file: HintedFile<'_>) {
        let own = self.files().remove(&file.id);
        drop(own);
    }
}

/// Reads a piece; how many bytes there were, and in how many calls.
fn read_piece(fd: BorrowedFd<'_>, piece: Range<u64>) -> io::Result<(u64, u64)> {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.resize(SCRATCH_BYTES, 0);
        let mut places =
            [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; CALL_BYTES_MAX as usize / SCRATCH_BYTES];
        let (mut at, mut calls) = (piece.start, 0);
        while at < piece.end {
            let mut left = (piece.end - at) as usize;
            let mut count = 0;
            for place in &mut places {
                if left == 0 {
                    break;
                }
                *place = libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: left.min(SCRATCH_BYTES) };
                left -= place.iov_len;
                count += 1;
            }
            // SAFETY: each place is the scratch space, which lives and is not looked at while the kernel writes to it.
            let n = unsafe { libc::preadv(fd.as_raw_fd(), places.as_ptr(), count, at as libc::off_t) };
            match n {
                0 => break,
                1.. => at += n as u64,
                _ => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => continue,
                    e => return Err(e),
                },
            }
            calls += 1;
        }
        Ok((at - piece.start, calls))
    })
}
