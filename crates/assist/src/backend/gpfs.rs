//! GPFS (IBM Storage Scale): hints through its library, `gpfs_fcntl`, loaded at run time.
//!
//! The interface is that of the public `gpfs_fcntl.h`. The *multiple access range* hint takes up to 8 ranges to bring
//! in, each within one block of the file system, and up to 8 to give back. GPFS takes on a prefix of the ranges and says
//! how many; each one taken on must be given back later, or GPFS stops taking any. So this backend remembers for each
//! file what was taken on, gives it back when it is released, and asks again later for what was not taken on.
//!
//! It has not been tried on a real GPFS; tests load a recorder in the place of the library. GPFS has been seen to follow
//! the hints of one file for each process only (Congiu et al., 2014, IV.C).

use std::collections::VecDeque;
use std::ffi::{CString, c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;

use super::{Brought, FileId, HintBackend, HintedFile, pieces};
use crate::config::ReadAhead;

const RANGES_MAX: usize = 8;
/// Ranges of a file that wait to be taken on; more are dropped, oldest first.
const WAITING_MAX: usize = 64;

const FREE_RANGE: c_int = 1002;
const MULTIPLE_ACCESS_RANGE: c_int = 1003;
const CLEAR_FILE_CACHE: c_int = 1004;

#[repr(C)]
struct Header {
    total_length: c_int,
    version: c_int,
    error_offset: c_int,
    reserved: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct BlockRange {
    block: i64,
    start: c_int,
    length: c_int,
    is_write: c_int,
    padding: [u8; 4],
}

#[repr(C)]
struct MultipleAccessRange {
    header: Header,
    length: c_int,
    kind: c_int,
    access_count: c_int,
    release_count: c_int,
    access: [BlockRange; RANGES_MAX],
    release: [BlockRange; RANGES_MAX],
}

#[repr(C)]
struct FreeRange {
    header: Header,
    length: c_int,
    kind: c_int,
    start: i64,
    bytes: i64,
}

#[repr(C)]
struct ClearFileCache {
    header: Header,
    length: c_int,
    kind: c_int,
}

fn header<T>() -> Header {
    Header { total_length: size_of::<T>() as c_int, version: 1, error_offset: 0, reserved: 0 }
}

/// Length of the structure after the header.
fn body<T>() -> c_int {
    (size_of::<T>() - size_of::<Header>()) as c_int
}

type GpfsFcntl = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;

/// What GPFS holds for a file on our behalf.
#[derive(Debug, Default)]
struct Held {
    block_bytes: u64,
    taken_on: VecDeque<BlockRange>,
    to_give_back: VecDeque<BlockRange>,
    waiting: VecDeque<BlockRange>,
}

/// The library.
#[derive(Debug)]
pub struct Gpfs {
    fcntl: GpfsFcntl,
    files: Mutex<FxHashMap<FileId, Arc<Mutex<Held>>>>,
}

impl Gpfs {
    /// Loads the library, which stays loaded. Fails with the loader's own words.
    pub fn load(library: &Path) -> Result<Gpfs, String> {
        let name = CString::new(library.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        let said = || {
            // SAFETY: the loader's message is a string that is valid until its next call in this thread.
            let text = unsafe {
                let text = libc::dlerror();
                (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned())
            };
            text.unwrap_or_else(|| format!("{} cannot be loaded", library.display()))
        };
        // SAFETY: loading runs the library's constructors; it is the file system's own, named by the administrator.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(said());
        }
        // SAFETY: a valid handle and a terminated name.
        let found = unsafe { libc::dlsym(handle, c"gpfs_fcntl".as_ptr()) };
        if found.is_null() {
            return Err(said());
        }
        // SAFETY: the function of that name has this signature (gpfs_fcntl.h), and the library is never unloaded.
        let fcntl = unsafe { std::mem::transmute::<*mut c_void, GpfsFcntl>(found) };
        Ok(Gpfs { fcntl, files: Mutex::default() })
    }

    /// Lets go of everything that GPFS caches of a file.
    pub fn clear_file_cache(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut argument = ClearFileCache {
            header: header::<ClearFileCache>(),
            length: body::<ClearFileCache>(),
            kind: CLEAR_FILE_CACHE,
        };
        self.call(fd, &mut argument)
    }

    fn held(&self, id: FileId) -> Option<Arc<Mutex<Held>>> {
        locked(&self.files).get(&id).cloned()
    }

    fn call<T>(&self, fd: BorrowedFd<'_>, argument: &mut T) -> io::Result<()> {
        // SAFETY: `argument` is one of the structures above, whose first number is its length in bytes.
        match unsafe { (self.fcntl)(fd.as_raw_fd(), std::ptr::from_mut(argument).cast()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Asks for what waits and gives back what is done with, until all is said or GPFS takes no more.
    fn settle(&self, fd: BorrowedFd<'_>, held: &mut Held) -> io::Result<Brought> {
        let mut brought = Brought::default();
        while !(held.waiting.is_empty() && held.to_give_back.is_empty()) {
            let mut argument = MultipleAccessRange {
                header: header::<MultipleAccessRange>(),
                length: body::<MultipleAccessRange>(),
                kind: MULTIPLE_ACCESS_RANGE,
                access_count: 0,
                release_count: 0,
                access: [BlockRange::default(); RANGES_MAX],
                release: [BlockRange::default(); RANGES_MAX],
            };
            let asked = fill(&mut argument.access, &held.waiting);
            let given_back = fill(&mut argument.release, &held.to_give_back);
            (argument.access_count, argument.release_count) = (asked as c_int, given_back as c_int);
            self.call(fd, &mut argument)?;
            held.to_give_back.drain(..given_back);
            brought.calls += 1;
            // What comes back is the library's word; it is not let out of bounds.
            let accepted = usize::try_from(argument.access_count).unwrap_or(0).min(asked);
            for range in held.waiting.drain(..accepted) {
                brought.asked_bytes += range.length as u64;
                held.taken_on.push_back(range);
            }
            if accepted == 0 && asked > 0 && held.to_give_back.is_empty() {
                break;
            }
        }
        Ok(brought)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fill(places: &mut [BlockRange; RANGES_MAX], from: &VecDeque<BlockRange>) -> usize {
    places.iter_mut().zip(from).map(|(place, range)| *place = *range).count()
}

impl Held {
    fn bytes(&self, range: &BlockRange) -> Range<u64> {
        let start = range.block as u64 * self.block_bytes + range.start as u64;
        start..start + range.length as u64
    }
}

impl HintBackend for Gpfs {
    fn name(&self) -> &'static str {
        "gpfs"
    }

    fn will_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<Brought> {
        let shared = self.held(file.id).unwrap_or_default();
        let held = &mut *locked(&shared);
        if held.block_bytes == 0 {
            held.block_bytes = rustix::fs::fstat(file.fd)?.st_blksize.clamp(4096, 1 << 30) as u64;
            locked(&self.files).insert(file.id, shared.clone());
        }
        for piece in pieces(range, held.block_bytes) {
            held.waiting.push_back(BlockRange {
                block: (piece.start / held.block_bytes) as i64,
                start: (piece.start % held.block_bytes) as c_int,
                length: (piece.end - piece.start) as c_int,
                ..BlockRange::default()
            });
        }
        let too_many = held.waiting.len().saturating_sub(WAITING_MAX);
        held.waiting.drain(..too_many);
        self.settle(file.fd, held)
    }

    fn dont_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(()); // a length of 0 would mean the rest of the file
        }
        if let Some(shared) = self.held(file.id) {
            let held = &mut *locked(&shared);
            let inside = |held: &Held, r: &BlockRange| {
                let bytes = held.bytes(r);
                range.start <= bytes.start && bytes.end <= range.end
            };
            let (back, keep): (VecDeque<_>, _) = held.taken_on.iter().copied().partition(|r| inside(held, r));
            let waiting = held.waiting.iter().copied().filter(|r| !inside(held, r)).collect();
            (held.taken_on, held.waiting) = (keep, waiting);
            held.to_give_back.extend(back);
            self.settle(file.fd, held)?;
        }
        let mut argument = FreeRange {
            header: header::<FreeRange>(),
            length: body::<FreeRange>(),
            kind: FREE_RANGE,
            start: range.start.min(i64::MAX as u64) as i64,
            bytes: range.end.saturating_sub(range.start).min(i64::MAX as u64) as i64,
        };
        self.call(file.fd, &mut argument)
    }

    fn read_ahead(&self, _: HintedFile<'_>, _: ReadAhead) -> io::Result<()> {
        // GPFS finds sequential and strided patterns by itself and has no such advice.
        Ok(())
    }

    fn closed(&self, file: HintedFile<'_>) {
        let held = locked(&self.files).remove(&file.id);
        if let Some(shared) = held {
            let held = &mut *locked(&shared);
            held.waiting.clear();
            held.to_give_back.extend(std::mem::take(&mut held.taken_on));
            if let Err(e) = self.settle(file.fd, held) {
                tracing::debug!(error = %e, "GPFS did not take ranges back");
            }
        }
    }
}
