//! The canonical path behind a descriptor, read from `/proc/self/fd` into memory that is there already: a program may be
//! inside a signal handler on a small stack.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use impresario_ring::patterns::PATH_BYTES_MAX;

/// Maximum threads that can look at paths at a time; the next one leaves its descriptor for its next use.
const PATH_BUFFERS: usize = 32;

struct PathBuffer {
    taken: AtomicBool,
    bytes: UnsafeCell<[u8; PATH_BYTES_MAX]>,
}

// SAFETY: `bytes` is only touched by the thread that set `taken`.
unsafe impl Sync for PathBuffer {}

struct PathBuffers([PathBuffer; PATH_BUFFERS]);

static ALL: PathBuffers = PathBuffers::new();

impl PathBuffers {
    const fn new() -> PathBuffers {
        PathBuffers(
            [const { PathBuffer { taken: AtomicBool::new(false), bytes: UnsafeCell::new([0; PATH_BYTES_MAX]) } };
                PATH_BUFFERS],
        )
    }

    fn show<R>(&self, fd: i32, unlinked: bool, look: impl FnOnce(&[u8]) -> R) -> Result<R, NoPath> {
        let place = self.0.iter().find(|p| !p.taken.swap(true, Acquire)).ok_or(NoPath::Busy)?;
        // SAFETY: `taken` was false, so that this thread alone has the bytes until it is false again.
        let bytes = unsafe { &mut *place.bytes.get() };
        let name = ProcName::new(fd);
        let result = match rustix::fs::readlinkat_raw(rustix::fs::CWD, name.as_c_str(), &mut bytes[..]) {
            // A path that fills all of it may be longer.
            Ok(len) if len < PATH_BYTES_MAX && bytes[0] == b'/' => {
                let path = &bytes[..len];
                Ok(look(if unlinked { path.strip_suffix(b" (deleted)").unwrap_or(path) } else { path }))
            }
            _ => Err(NoPath::Unknown),
        };
        place.taken.store(false, Release);
        result
    }
}

/// Why there is no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPath {
    /// All places are taken.
    Busy,
    /// The descriptor is gone, its path too long, or `/proc` is not there.
    Unknown,
}

/// The name of a descriptor in `/proc`.
pub(crate) struct ProcName {
    bytes: [u8; 32],
}

impl ProcName {
    pub(crate) fn new(fd: i32) -> ProcName {
        ProcName::below(b"/proc/self/fd/", fd)
    }

    /// Of what the kernel says about it.
    pub(crate) fn about(fd: i32) -> ProcName {
        ProcName::below(b"/proc/self/fdinfo/", fd)
    }

    /// `start` has at most 21 bytes.
    fn below(start: &[u8], fd: i32) -> ProcName {
        let mut bytes = [0; 32];
        bytes[..start.len()].copy_from_slice(start);
        let mut digits = [0u8; 10];
        let (mut rest, mut count) = (fd.unsigned_abs(), 0);
        loop {
            digits[count] = b'0' + (rest % 10) as u8;
            (rest, count) = (rest / 10, count + 1);
            if rest == 0 {
                break;
            }
        }
        for i in 0..count {
            bytes[start.len() + i] = digits[count - 1 - i];
        }
        ProcName { bytes }
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

/// Shows the path of an open descriptor to `look`. A file that has no name any more is shown by the name that it had.
pub(crate) fn with_path<R>(fd: i32, unlinked: bool, look: impl FnOnce(&[u8]) -> R) -> Result<R, NoPath> {
    ALL.show(fd, unlinked, look)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStrExt;

    fn path_of(fd: i32, unlinked: bool) -> Result<Vec<u8>, NoPath> {
        with_path(fd, unlinked, <[u8]>::to_vec)
    }

    #[test]
    fn names_of_descriptors() {
        for fd in [0, 9, 10, 1234567890, i32::MAX] {
            assert_eq!(ProcName::new(fd).as_c_str().to_str().unwrap(), format!("/proc/self/fd/{fd}"));
        }
    }

    #[test]
    fn paths_are_canonical_whatever_the_program_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap().join("real");
        std::fs::write(&real, "x").unwrap();
        std::os::unix::fs::symlink("real", dir.path().join("link")).unwrap();
        let file =
            std::fs::File::open(dir.path().join("../").join(dir.path().file_name().unwrap()).join("link")).unwrap();
        assert_eq!(path_of(file.as_raw_fd(), false).unwrap(), real.as_os_str().as_bytes());
        std::fs::remove_file(&real).unwrap();
        assert_eq!(path_of(file.as_raw_fd(), true).unwrap(), real.as_os_str().as_bytes());
        assert!(path_of(file.as_raw_fd(), false).unwrap().ends_with(b" (deleted)"));
    }

    #[test]
    fn what_has_no_path_has_none() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(path_of(a.as_raw_fd(), false), Err(NoPath::Unknown));
        assert_eq!(path_of(1 << 30, false), Err(NoPath::Unknown));
    }

    #[test]
    fn with_all_places_taken_nobody_waits() {
        static TAKEN: PathBuffers = PathBuffers::new();
        let file = tempfile::NamedTempFile::new().unwrap();
        let fd = file.as_file().as_raw_fd();
        TAKEN.0.iter().for_each(|p| p.taken.store(true, Release));
        assert_eq!(TAKEN.show(fd, false, |_| ()), Err(NoPath::Busy));
        TAKEN.0[7].taken.store(false, Release);
        assert_eq!(TAKEN.show(fd, false, |_| ()), Ok(()));
        assert_eq!(TAKEN.show(fd, false, |_| ()), Ok(()));
    }
}
