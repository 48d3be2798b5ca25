//! How hints are given: the ways into the page cache, and which one a file needs.
//!
//! [`Backends::will_need`] takes the way that the configuration names, or chooses: by the file system's magic number
//! (GPFS, Lustre), else the kernel's advice. The manager reads the data itself where advice proves to bring nothing,
//! which is seen in the page cache (`cachestat`), not guessed from a name, and where reading makes the device's requests
//! longer ([`DeviceLimits`]).

mod cachestat;
mod fadvise;
mod forced_read;
mod gpfs;
mod inside;
mod lustre;
mod page_table;
mod program;

use std::ffi::{CStr, CString};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::config::{BackendChoice, ReadAhead};
pub use cachestat::{CachedPages, cached_pages, is_cached, page_bytes, sees_all_pages};
use cachestat::{missing_parts, pages_before};
pub use fadvise::Fadvise;
pub use forced_read::ForcedRead;
pub use gpfs::Gpfs;
use impresario_base::lock::Mutex;
pub use impresario_device::{DeviceLimits, device_limits, device_limits_of};
pub use inside::Inside;
pub use lustre::{Advice, Ladvise, Lustre};
pub use page_table::{are_mapped, parts_in_page_table};
use program::ByProgram;

/// An open file and which file it is.
#[derive(Clone, Copy, Debug)]
pub struct HintedFile<'a> {
    /// The program's open file, by our own descriptor.
    pub fd: BorrowedFd<'a>,
    /// Device and inode.
    pub id: FileId,
    /// What its readers do meanwhile, if that is known.
    pub progress: Option<&'a Progress>,
    /// The program, when it has the library and may be asked to give hints itself.
    pub inside: Option<&'a Arc<Inside>>,
}

/// What the readers of a file do while hints for it are on their way.
#[derive(Debug, Default)]
pub struct Progress {
    /// Where the last read ended: what lies shortly before need not be brought in any more.
    pub passed: AtomicU64,
    /// The file has no reader any more: a long hint ends at its next piece.
    pub ended: AtomicBool,
}

impl HintedFile<'_> {
    /// Whether it has no reader any more.
    fn has_ended(&self) -> bool {
        self.progress.is_some_and(|progress| progress.ended.load(Relaxed))
    }
}

/// Device and inode: the same for all programs that open the same file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FileId {
    /// As in `st_dev`.
    pub dev: u64,
    /// As in `st_ino`.
    pub ino: u64,
}

/// What became of a hint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Brought {
    /// Bytes that were in memory before.
    pub found_bytes: u64,
    /// Bytes that were asked for and taken on.
    pub asked_bytes: u64,
    /// System calls that asked for them.
    pub calls: u64,
    /// Bytes that were asked for and are seen not to have come.
    pub missed_bytes: u64,
}

impl Brought {
    fn add(&mut self, more: Brought) {
        self.found_bytes += more.found_bytes;
        self.asked_bytes += more.asked_bytes;
        self.calls += more.calls;
        self.missed_bytes += more.missed_bytes;
    }

    /// Looks for a piece that is about to be brought in, and counts what memory has of it; `None` where that cannot be known.
    fn look(&mut self, fd: BorrowedFd<'_>, piece: &Range<u64>) -> Option<CachedPages> {
        let cached = pages_before(fd, piece.clone()).ok()?;
        self.found_bytes += cached.of_bytes(piece.end - piece.start);
        Some(cached)
    }
}

/// One way of giving hints. Calls may block for as long as the device takes; any thread may make them.
pub trait HintBackend: Send + Sync {
    /// Its name in reports.
    fn name(&self) -> &'static str;

    /// Whether [`will_need`](HintBackend::will_need) returns when the range is there, and not before.
    fn waits(&self) -> bool;

    /// Brings a range (not empty) into memory; blocks that are there already are not asked for again.
    fn will_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<Brought>;

    /// Lets a range go. Dirty pages stay. By default the kernel is told.
    fn dont_need(&self, file: HintedFile<'_>, range: Range<u64>) -> io::Result<()> {
        fadvise_drop(file, range)
    }

    /// Sets how the kernel reads ahead on this open file.
    fn read_ahead(&self, file: HintedFile<'_>, how: ReadAhead) -> io::Result<()> {
        fadvise_mode(file, how)
    }

    /// A program closed this open file, but the file is read here through others.
    fn left(&self, _file: HintedFile<'_>) {}

    /// The file has no reader here any more: what the backend remembers of it is forgotten, what it must give back is
    /// given back.
    fn closed(&self, _file: HintedFile<'_>) {}
}

const LUSTRE_MAGIC: u64 = 0x0BD0_0BD0;

/// All ways, and which one each device needs.
pub struct Backends {
    fadvise: Fadvise,
    forced_read: ForcedRead,
    lustre: Lustre,
    gpfs: OnceLock<Option<Gpfs>>,
    gpfs_inside: Gpfs,
    libgpfs: CString,
    /// Devices whose file system ignores the kernel's advice.
    ignoring: Mutex<FxHashSet<u64>>,
    /// Magic numbers of the file systems of open files: a file system that is asked again and again may be a slow one.
    magics: Mutex<FxHashMap<FileId, u64>>,
}

impl Default for Backends {
    fn default() -> Backends {
        Backends::new(&impresario_gpfs::library_name(), lustre::ladvise_ioctl())
    }
}

impl Backends {
    /// Backends with a GPFS library (loaded when the first file needs it) and a way to advise Lustre of one's own.
    /// Empty, no library is loaded.
    pub fn new(libgpfs: &CStr, ladvise: Box<Ladvise>) -> Backends {
        Backends {
            fadvise: Fadvise::new(Path::new("/sys")),
            forced_read: ForcedRead::new(Path::new("/sys")),
            lustre: Lustre::new(ladvise),
            gpfs: OnceLock::new(),
            gpfs_inside: Gpfs::inside(),
            libgpfs: libgpfs.into(),
            ignoring: Mutex::default(),
            magics: Mutex::default(),
        }
    }

    /// The way for a file.
    pub fn choose(&self, choice: BackendChoice, file: HintedFile<'_>) -> &dyn HintBackend {
        match choice {
            BackendChoice::Fadvise => &self.fadvise,
            BackendChoice::ForcedRead => &self.forced_read,
            BackendChoice::Lustre => &self.lustre,
            BackendChoice::Gpfs => self.gpfs(file),
            BackendChoice::Program => &ByProgram,
            BackendChoice::Auto if self.is_ignored(file.id.dev) => &self.forced_read,
            BackendChoice::Auto => match self.magic(file) {
                Some(LUSTRE_MAGIC) => &self.lustre,
                Some(impresario_gpfs::MAGIC) => self.gpfs(file),
                _ => &self.fadvise,
            },
        }
    }

    /// Brings a range in, by the way that is best for it if the choice is free. Also the name of the way.
    pub fn will_need(
        &self,
        choice: BackendChoice,
        file: HintedFile<'_>,
        range: Range<u64>,
    ) -> io::Result<(Brought, &'static str)> {
        let mut backend = self.choose(choice, file);
        let free = choice == BackendChoice::Auto && backend.name() == self.fadvise.name();
        let dev = file.id.dev;
        if free && self.fadvise.limits(file).better_read(range.end.saturating_sub(range.start)) {
            backend = &self.forced_read;
        }
        let mut brought = match backend.will_need(file, range.clone()) {
            Err(_) if self.was_inside(backend, file) => {
                backend = self.choose(choice, file);
                backend.will_need(file, range.clone())?
            }
            brought => brought?,
        };
        if free && self.fadvise.ignored(dev) {
            tracing::info!(dev, "the file system ignores advice; data is read into memory instead");
            self.ignoring.lock().insert(dev);
            backend = &self.forced_read;
            brought.add(backend.will_need(file, range)?);
        }
        Ok((brought, backend.name()))
    }

    /// Brings a range in as [`Backends::will_need`] would and waits until it is there, where a way is known to wait; with the
    /// way.
    pub fn bring_in(
        &self,
        choice: BackendChoice,
        file: HintedFile<'_>,
        range: Range<u64>,
    ) -> (io::Result<Brought>, &dyn HintBackend) {
        let chosen = self.choose(choice, file);
        if chosen.name() != self.fadvise.name() {
            return (chosen.will_need(file, range), chosen);
        }
        if self.fadvise.limits(file).better_read(range.end.saturating_sub(range.start)) {
            return (self.forced_read.will_need(file, range), &self.forced_read);
        }
        // The kernel's advice only begins to read; a device that serves many requests at once is much faster by it than by
        // reading. Who reads behind it waits for what is on its way. What was there before is left alone: where the kernel reads
        // ahead for a program it has marked a page, and whoever reads that one makes it go on, by up to the device's whole window
        // (Linux, `page_cache_async_ra`).
        let missing = missing_parts(file.fd, range.clone());
        let brought = self.fadvise.will_need(file, range);
        let wait =
            |brought| missing.into_iter().try_for_each(|part| self.forced_read.wait_for(file, part)).map(|()| brought);
        (brought.and_then(wait), &self.forced_read)
    }

    /// Lets a range go. With an error, the name of the way that failed.
    pub fn dont_need(
        &self,
        choice: BackendChoice,
        file: HintedFile<'_>,
        range: Range<u64>,
    ) -> Result<(), (io::Error, &'static str)> {
        let mut backend = self.choose(choice, file);
        let mut done = backend.dont_need(file, range.clone());
        if done.is_err() && self.was_inside(backend, file) {
            backend = self.choose(choice, file);
            done = backend.dont_need(file, range);
        }
        done.map_err(|e| (e, backend.name()))
    }

    /// A program closed an open file; `last` when the file has no other reader here.
    pub fn closed(&self, file: HintedFile<'_>, last: bool) {
        // Hints may have been given by one way first and then by another.
        let gpfs = [Some(&self.gpfs_inside), self.gpfs_here()].into_iter().flatten();
        if !last {
            return gpfs.for_each(|way| way.left(file));
        }
        gpfs.for_each(|way| way.closed(file));
        self.fadvise.closed(file);
        self.lustre.closed(file);
        self.forget(file);
    }

    /// What is kept of a file that has no reader here any more, but by GPFS.
    pub fn forget(&self, file: HintedFile<'_>) {
        self.forced_read.closed(file);
        self.magics.lock().remove(&file.id);
    }

    fn magic(&self, file: HintedFile<'_>) -> Option<u64> {
        let known = self.magics.lock().get(&file.id).copied();
        // Not asked with the lock held: the answer may take long.
        known.or_else(|| {
            let magic = rustix::fs::fstatfs(file.fd.as_fd()).ok()?.f_type as u64;
            self.magics.lock().insert(file.id, magic);
            Some(magic)
        })
    }

    /// It failed because the program could not be asked (any more).
    fn was_inside(&self, backend: &dyn HintBackend, file: HintedFile<'_>) -> bool {
        backend.name() == self.gpfs_inside.name() && file.inside.is_some_and(|inside| !inside.is_there())
    }

    /// GPFS's library in this process, if it was needed and could be loaded.
    fn gpfs_here(&self) -> Option<&Gpfs> {
        self.gpfs.get().and_then(Option::as_ref)
    }

    fn is_ignored(&self, dev: u64) -> bool {
        self.ignoring.lock().contains(&dev)
    }

    /// From inside the program, if it can be asked, else from here, if that can be.
    fn gpfs(&self, file: HintedFile<'_>) -> &dyn HintBackend {
        if let Some(inside) = file.inside {
            if inside.is_there() {
                // What was asked for from here before the program could be asked is its matter from now on.
                if let Some(here) = self.gpfs_here() {
                    here.left(file);
                }
                return &self.gpfs_inside;
            }
            inside.want();
        }
        let loaded = self.gpfs.get_or_init(|| {
            (!self.libgpfs.is_empty()).then(|| Gpfs::load(&self.libgpfs)).and_then(|loaded| {
                loaded
                    .inspect_err(
                        |e| tracing::warn!(error = %e, "no GPFS hints from here; data is read into memory instead"),
                    )
                    .ok()
            })
        });
        loaded.as_ref().map_or(&self.forced_read, |gpfs| gpfs)
    }
}

/// Sets the kernel's read-ahead of an open file.
fn fadvise_mode(file: HintedFile<'_>, how: ReadAhead) -> io::Result<()> {
    use rustix::fs::Advice;
    let advice = match how {
        ReadAhead::Normal => Advice::Normal,
        ReadAhead::Sequential => Advice::Sequential,
        ReadAhead::Random => Advice::Random,
    };
    Ok(rustix::fs::fadvise(file.fd, 0, None, advice)?)
}

/// Drops clean pages that lie wholly in a range.
fn fadvise_drop(file: HintedFile<'_>, range: Range<u64>) -> io::Result<()> {
    let Some(len) = std::num::NonZero::new(range.end.saturating_sub(range.start)) else { return Ok(()) };
    Ok(rustix::fs::fadvise(file.fd, range.start, Some(len), rustix::fs::Advice::DontNeed)?)
}

/// A range cut into pieces of `at` bytes from its beginning on, so that what fits into one piece is not cut.
fn pieces(range: Range<u64>, at: u64) -> impl Iterator<Item = Range<u64>> {
    cut(range, move |start| start.saturating_add(at))
}

/// A range cut at multiples of `at` bytes.
fn blocks(range: Range<u64>, at: u64) -> impl Iterator<Item = Range<u64>> {
    cut(range, move |start| (start / at + 1).saturating_mul(at))
}

fn cut(range: Range<u64>, end: impl Fn(u64) -> u64) -> impl Iterator<Item = Range<u64>> {
    let mut next = range.start;
    std::iter::from_fn(move || {
        let start = next;
        if start >= range.end {
            return None;
        }
        next = end(start).min(range.end);
        Some(start..next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program reads the beginning, behind which the kernel has marked a page. Who reads that page, through whatever open file,
    /// makes the kernel read on, by some hundred KiB and more.
    #[test]
    fn what_is_waited_for_brings_in_nothing_beside_it() {
        use std::io::Write;
        const MIB: u64 = 1 << 20;
        let mut file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.write_all(&vec![1; 8 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let program = std::fs::File::open(file.path()).unwrap();
        let there = || cached_pages(file.as_file().as_fd(), 0..8 * MIB).map_or(u64::MAX, |pages| pages.cached);
        let before = there();
        rustix::io::pread(&program, &mut vec![0; 64 << 10], 0).unwrap();
        let stat = rustix::fs::fstat(&program).unwrap();
        let id = FileId { dev: stat.st_dev, ino: stat.st_ino };
        let hinted = HintedFile { fd: program.as_fd(), id, progress: None, inside: None };
        let backends = Backends::default();
        if before > 0 || !(17..100).contains(&there()) || backends.fadvise.limits(hinted).better_read(MIB / 2) {
            return impresario_testing::skip("cachestat", "no cachestat, pages that stay, or another reading ahead");
        }
        let (brought, _) = backends.bring_in(BackendChoice::Auto, hinted, 0..MIB / 2);
        assert!(brought.is_ok());
        assert_eq!(there(), MIB / 2 / page_bytes());
    }

    #[test]
    fn what_fits_into_one_piece_is_not_cut() {
        assert_eq!(pieces(5..25, 10).collect::<Vec<_>>(), [5..15, 15..25]);
        assert_eq!(blocks(5..25, 10).collect::<Vec<_>>(), [5..10, 10..20, 20..25]);
        assert_eq!(blocks(10..30, 10).collect::<Vec<_>>(), [10..20, 20..30]);
        assert!(pieces(7..15, 10).eq(std::iter::once(7..15)));
        assert_eq!(pieces(10..30, 10).collect::<Vec<_>>(), [10..20, 20..30]);
        assert_eq!(pieces(7..7, 10).count(), 0);
        assert_eq!(pieces(u64::MAX - 5..u64::MAX, 10).count(), 1);
    }
}
