//! Files that hold an index of their own: which extents belong together, and in which order they come.
//!
//! One file of this folder knows one format. To add one, implement [`Format`] and add it to [`FORMATS`];
//! `doc/FORMATS.md` goes through it. A reader gets the file through [`Source`], which bounds bytes, calls and time, and
//! answers `None` where it does not understand what it reads: the file is then followed as any other. Every byte of a file
//! is somebody else's. The test at the end of this file gives each reader damaged files.

mod bytes;
pub mod exercise;
mod hdf5;
mod netcdf;
mod numpy;
mod parquet;
mod root;
mod safetensors;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

pub use bytes::Fields;
use impresario_foresight::{EXTENTS_MAX, Tracks};

/// What is read of a file's index at most.
const INDEX_BYTES_MAX: u64 = 4 << 20;
const INDEX_READS_MAX: u32 = 2048;
const INDEX_TIME_MAX: Duration = Duration::from_millis(200);
/// Smaller files are in memory after a few reads.
pub const FILE_BYTES_MIN: u64 = 1 << 20;

/// The extents of one column, variable or data set, in the order of its data.
pub type Track = Vec<Range<u64>>;

/// A kind of file that lists its own extents.
pub trait Format: Sync {
    /// As users know it.
    fn name(&self) -> &'static str;

    /// Suffixes of such files, in small letters and without the dot.
    fn suffixes(&self) -> &'static [&'static str];

    /// Reads the index. `None` where the file is not of this format, is damaged, or uses a part of the format that this
    /// reader does not know. Extents need not lie in the file: what does not is left out.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>>;
}

impl std::fmt::Debug for dyn Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// All formats that are known.
pub static FORMATS: [&dyn Format; 6] =
    [&parquet::Parquet, &safetensors::Safetensors, &numpy::Numpy, &netcdf::NetCdf, &hdf5::Hdf5, &root::Root];

/// The formats that a file of this name may have.
pub fn by_name(path: &Path) -> Vec<&'static dyn Format> {
    let suffix = path.extension().and_then(|s| s.to_str()).unwrap_or_default().to_ascii_lowercase();
    FORMATS.iter().copied().filter(|format| format.suffixes().contains(&suffix.as_str())).collect()
}

/// What a file's index says.
#[derive(Clone, Debug)]
pub struct Index {
    /// The format's name.
    pub format: &'static str,
    /// Which extents belong together.
    pub tracks: Tracks,
    /// The file's length as the index was read.
    pub size_bytes: u64,
    /// What reading it took: calls, and bytes.
    pub reads: u64,
    /// Bytes that these read.
    pub read_bytes: u64,
}

/// A file's index, read by the first of these formats that understands it.
pub fn read(formats: &[&'static dyn Format], size_bytes: u64, read_at: &mut ReadAt<'_>) -> Option<Index> {
    let until = Instant::now() + INDEX_TIME_MAX;
    let (mut reads, mut read_bytes) = (0, 0);
    formats.iter().find_map(|format| {
        let mut source = Source::new(read_at, size_bytes, until);
        let tracks = format.tracks(&mut source);
        reads += u64::from(INDEX_READS_MAX - source.left_reads);
        read_bytes += INDEX_BYTES_MAX - source.left_bytes;
        let tracks = Tracks::new(tracks?, size_bytes);
        (!tracks.is_empty()).then_some(Index { format: format.name(), tracks, size_bytes, reads, read_bytes })
    })
}

/// The index of an open file, which nobody else reads through: the kernel is told that it is read in pieces. Nothing is
/// believed of a file that changes meanwhile.
pub fn read_open(file: BorrowedFd<'_>, formats: &[&'static dyn Format]) -> Option<Index> {
    let state = || {
        let stat = rustix::fs::fstat(file).ok()?;
        Some((u64::try_from(stat.st_size).ok()?, stat.st_ctime, stat.st_ctime_nsec))
    };
    let before = state()?;
    // An index lies in small pieces: what stands between them is not wanted.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    let index = read(formats, before.0, &mut |at, bytes: &mut [u8]| Ok(rustix::io::pread(file, bytes, at)?))?;
    (state()? == before).then_some(index)
}

/// Reads at a place; how many bytes it got.
pub type ReadAt<'a> = dyn FnMut(u64, &mut [u8]) -> std::io::Result<usize> + 'a;

/// A file whose index is read, within bounds.
pub struct Source<'a> {
    read_at: &'a mut ReadAt<'a>,
    size_bytes: u64,
    left_bytes: u64,
    left_reads: u32,
    left_extents: usize,
    until: Instant,
}

impl<'a> Source<'a> {
    fn new(read_at: &'a mut ReadAt<'a>, size_bytes: u64, until: Instant) -> Source<'a> {
        let (left_bytes, left_reads, left_extents) = (INDEX_BYTES_MAX, INDEX_READS_MAX, EXTENTS_MAX);
        Source { read_at, size_bytes, left_bytes, left_reads, left_extents, until }
    }

    /// The file's length.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// These bytes; `None` where the file does not have them all, or the index has become too large or slow to read.
    pub fn bytes(&mut self, at: u64, len: u64) -> Option<Vec<u8>> {
        let end = at.checked_add(len)?;
        if end > self.size_bytes || len > self.left_bytes || self.left_reads == 0 || Instant::now() > self.until {
            return None;
        }
        (self.left_bytes, self.left_reads) = (self.left_bytes - len, self.left_reads - 1);
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        let mut filled = 0;
        while filled < bytes.len() {
            match (self.read_at)(at + filled as u64, &mut bytes[filled..]) {
                Ok(0) => return None,
                Ok(read) => filled += read.min(bytes.len() - filled),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        Some(bytes)
    }

    /// As many of these bytes as the file has.
    pub fn up_to(&mut self, at: u64, most: u64) -> Option<Vec<u8>> {
        self.bytes(at, most.min(self.size_bytes.checked_sub(at)?))
    }

    /// Extents of `len` bytes, `step` bytes apart, as far as the file goes. All series of a file together are bounded.
    pub fn series(&mut self, start: u64, step: u64, len: u64, count: u64) -> Track {
        let extent = |i: u64| {
            let start = start.checked_add(i.checked_mul(step)?)?;
            Some(start..start.checked_add(len)?)
        };
        let count = count.min(self.left_extents as u64);
        let track: Track = (0..count).map_while(extent).take_while(|extent| extent.end <= self.size_bytes).collect();
        self.left_extents -= track.len();
        track
    }
}
