//! Hints of GPFS (IBM Storage Scale): the structures of its library, loading it at run time, and calling it. Used by
//! the advice manager and by the library inside a program.
//!
//! The interface is that of the public `gpfs_fcntl.h`. The `assist` crate decides which ranges to request and release,
//! and when.

use std::ffi::{CStr, CString, c_int, c_void};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;

/// Largest number of ranges to prefetch, and of ranges to release, in one hint.
pub const RANGES_MAX: usize = 8;

/// Environment variable with the name of GPFS's library, for programs and managers. Unset, [`LIBRARY`] is used; empty,
/// none.
pub const LIBRARY_VARIABLE: &str = "IMPRESARIO_ASSIST_LIBGPFS";
/// Default name of the library.
pub const LIBRARY: &CStr = c"libgpfs.so";

/// The file system's number, as `statfs` has it.
pub const MAGIC: u64 = 0x4750_4653;

const ACCESS_RANGE: c_int = 1001;
const FREE_RANGE: c_int = 1002;
const MULTIPLE_ACCESS_RANGE: c_int = 1003;
const CLEAR_FILE_CACHE: c_int = 1004;
const CANCEL_HINTS: c_int = 2001;

/// A range within one block of the file system.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct BlockRange {
    /// Number of the block in the file.
    pub block: i64,
    /// First byte in the block.
    pub start: i32,
    /// Bytes.
    pub length: i32,
    is_write: c_int,
    padding: [u8; 4],
}

impl BlockRange {
    /// A range to read.
    pub fn new(block: i64, start: i32, length: i32) -> BlockRange {
        BlockRange { block, start, length, is_write: 0, padding: [0; 4] }
    }
}

/// At most [`RANGES_MAX`] ranges.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Ranges {
    places: [BlockRange; RANGES_MAX],
    count: usize,
}

impl FromIterator<BlockRange> for Ranges {
    /// Takes the first ranges; those beyond the limit are dropped.
    fn from_iter<I: IntoIterator<Item = BlockRange>>(ranges: I) -> Ranges {
        let mut all = Ranges::default();
        for (place, range) in all.places.iter_mut().zip(ranges) {
            *place = range;
            all.count += 1;
        }
        all
    }
}

impl Deref for Ranges {
    type Target = [BlockRange];

    fn deref(&self) -> &[BlockRange] {
        &self.places[..self.count]
    }
}

/// The hints of one call.
#[allow(
    clippy::large_enum_variant,
    reason = "it lives on the stack for one call; in a program nothing is allocated for it"
)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hint {
    /// Ranges to prefetch, of which GPFS accepts the first few, and previously accepted ranges to release.
    Ranges {
        /// To prefetch.
        access: Ranges,
        /// To release.
        release: Ranges,
    },
    /// The cached data of a range may be dropped.
    Free {
        /// First byte.
        start: i64,
        /// Bytes; 0 means to the end of the file.
        bytes: i64,
    },
    /// Releases all ranges accepted for this open file.
    Cancel,
}

#[repr(C)]
struct Header {
    total_length: c_int,
    version: c_int,
    error_offset: c_int,
    reserved: c_int,
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
struct AccessRange {
    header: Header,
    length: c_int,
    kind: c_int,
    start: i64,
    bytes: i64,
    is_write: c_int,
    padding: [u8; 4],
}

/// What has nothing but its kind.
#[repr(C)]
struct Plain {
    header: Header,
    length: c_int,
    kind: c_int,
}

/// The library's name: the environment's, or the default. Empty: there is none.
pub fn library_name() -> CString {
    let named = std::env::var_os(LIBRARY_VARIABLE).and_then(|name| CString::new(name.into_vec()).ok());
    named.unwrap_or_else(|| LIBRARY.into())
}

fn header<T>() -> Header {
    Header { total_length: size_of::<T>() as c_int, version: 1, error_offset: 0, reserved: 0 }
}

/// Length of the structure after the header.
fn body<T>() -> c_int {
    (size_of::<T>() - size_of::<Header>()) as c_int
}

type GpfsFcntl = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;

/// The library, loaded. It stays loaded unless it is [unloaded](Library::unload).
#[derive(Clone, Copy, Debug)]
pub struct Library {
    handle: *mut c_void,
    fcntl: GpfsFcntl,
}

// SAFETY: the handle is a number to the loader, and the function may be called by any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads it and runs its constructors.
    ///
    /// # Errors
    /// The loader's message.
    pub fn load(name: &CStr) -> Result<Library, String> {
        // SAFETY: loading runs the library's constructors; the user who names the library consents to that.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(loader_says(name));
        }
        // SAFETY: a valid handle and a terminated name.
        let found = unsafe { libc::dlsym(handle, c"gpfs_fcntl".as_ptr()) };
        if found.is_null() {
            let said = loader_says(name);
            // SAFETY: nothing of it was used.
            unsafe { libc::dlclose(handle) };
            return Err(said);
        }
        // SAFETY: the function of that name has this signature (gpfs_fcntl.h).
        let fcntl = unsafe { std::mem::transmute::<*mut c_void, GpfsFcntl>(found) };
        Ok(Library { handle, fcntl })
    }

    /// Whether this process has loaded it.
    pub fn is_loaded(name: &CStr) -> bool {
        // SAFETY: loads nothing; the name ends with a zero.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if !handle.is_null() {
            // SAFETY: counted up just now.
            unsafe { libc::dlclose(handle) };
        }
        !handle.is_null()
    }

    /// The argument for [`unload`](Library::unload).
    pub fn handle(&self) -> *mut c_void {
        self.handle
    }

    /// Unloads it.
    ///
    /// # Safety
    /// `handle` is that of a loaded [`Library`] that is not used any more.
    pub unsafe fn unload(handle: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { libc::dlclose(handle) };
    }

    /// Gives a hint on an open file; may block. Returns how many of the ranges to prefetch were accepted, counted from
    /// the first.
    ///
    /// # Errors
    /// errno, as the library sets it.
    pub fn give(&self, fd: BorrowedFd<'_>, hint: &Hint) -> io::Result<u32> {
        match *hint {
            Hint::Ranges { access, release } => {
                let mut argument = MultipleAccessRange {
                    header: header::<MultipleAccessRange>(),
                    length: body::<MultipleAccessRange>(),
                    kind: MULTIPLE_ACCESS_RANGE,
                    access_count: access.len() as c_int,
                    release_count: release.len() as c_int,
                    access: access.places,
                    release: release.places,
                };
                self.call(fd, &mut argument)?;
                // The count comes from the library and is clamped to its bounds.
                Ok(argument.access_count.clamp(0, access.len() as c_int) as u32)
            }
            Hint::Free { start, bytes } => {
                let (header, length) = (header::<FreeRange>(), body::<FreeRange>());
                self.call(fd, &mut FreeRange { header, length, kind: FREE_RANGE, start, bytes }).map(|()| 0)
            }
            Hint::Cancel => self.plain(fd, CANCEL_HINTS).map(|()| 0),
        }
    }

    /// Says that this range is read soon, and nothing outside of it; 0 `bytes`: to the end of the file. A later call
    /// replaces it. The manager does not give this hint: it would have to know all that a program reads.
    ///
    /// # Errors
    /// errno, as the library sets it.
    pub fn access_range(&self, fd: BorrowedFd<'_>, start: i64, bytes: i64) -> io::Result<()> {
        let (header, length) = (header::<AccessRange>(), body::<AccessRange>());
        let kind = ACCESS_RANGE;
        self.call(fd, &mut AccessRange { header, length, kind, start, bytes, is_write: 0, padding: [0; 4] })
    }

    /// Lets go what GPFS has of the file in memory, whoever brought it in.
    ///
    /// # Errors
    /// errno, as the library sets it.
    pub fn clear_file_cache(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.plain(fd, CLEAR_FILE_CACHE)
    }

    fn plain(&self, fd: BorrowedFd<'_>, kind: c_int) -> io::Result<()> {
        let (header, length) = (header::<Plain>(), body::<Plain>());
        self.call(fd, &mut Plain { header, length, kind })
    }

    fn call<T>(&self, fd: BorrowedFd<'_>, argument: &mut T) -> io::Result<()> {
        // SAFETY: `argument` is one of the structures above, whose first number is its length in bytes.
        match unsafe { (self.fcntl)(fd.as_raw_fd(), std::ptr::from_mut(argument).cast()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn loader_says(name: &CStr) -> String {
    // SAFETY: the loader's message is a string that is valid until its next call in this thread.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    text.unwrap_or_else(|| format!("{} cannot be loaded", name.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_are_those_of_the_header_file() {
        let sizes = [size_of::<Header>(), size_of::<BlockRange>(), size_of::<MultipleAccessRange>()];
        assert_eq!(sizes, [16, 24, 16 + 16 + 16 * 24]);
        assert_eq!([size_of::<FreeRange>(), size_of::<AccessRange>(), size_of::<Plain>()], [40, 48, 24]);
        assert_eq!(std::mem::offset_of!(AccessRange, is_write), 40);
    }

    #[test]
    fn no_more_ranges_than_fit_are_kept() {
        let all: Ranges = (0..20).map(|n| BlockRange::new(n, 0, 10)).collect();
        assert_eq!((all.len(), all[7].block), (RANGES_MAX, 7));
        let none: Ranges = std::iter::empty().collect();
        assert!(none.is_empty());
    }

    #[test]
    fn what_cannot_be_loaded_is_named() {
        let said = Library::load(c"/nowhere/libgpfs.so").unwrap_err();
        assert!(said.contains("/nowhere/libgpfs.so"), "{said}");
        let said = Library::load(c"libc.so.6").unwrap_err();
        assert!(said.contains("gpfs_fcntl"), "{said}");
        assert!(Library::is_loaded(c"libc.so.6") && !Library::is_loaded(c"/nowhere/libgpfs.so"));
    }
}
