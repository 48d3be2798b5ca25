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
mod source;
#[cfg(test)]
mod tests;
mod zarr;

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;

pub use bytes::Fields;
use impresario_foresight::Tracks;
pub use source::{ReadAt, Source, Spent};

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

    /// Whether a file of this name may be one. By default its suffix tells.
    fn may_be_named(&self, path: &Path) -> bool {
        let suffix = path.extension().and_then(|s| s.to_str()).unwrap_or_default().to_ascii_lowercase();
        self.suffixes().contains(&suffix.as_str())
    }

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
pub static FORMATS: [&dyn Format; 7] = [
    &parquet::Parquet,
    &safetensors::Safetensors,
    &numpy::Numpy,
    &netcdf::NetCdf,
    &hdf5::Hdf5,
    &root::Root,
    &zarr::Shard,
];

/// The formats that a file of this name may have.
pub fn by_name(path: &Path) -> Vec<&'static dyn Format> {
    FORMATS.iter().copied().filter(|format| format.may_be_named(path)).collect()
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
    /// Only what stands where the program reads was looked for: the rest can be asked for when it reads elsewhere.
    pub is_partial: bool,
    /// What reading it took.
    pub spent: Spent,
}

/// A file's index, read by the first of these formats that understands it.
pub fn read(formats: &[&'static dyn Format], size_bytes: u64, read_at: &ReadAt<'_>) -> Option<Index> {
    index(formats, Source::new(read_at, size_bytes, None))
}

fn index(formats: &[&'static dyn Format], mut source: Source<'_>) -> Option<Index> {
    let size_bytes = source.size_bytes();
    let (format, tracks) = formats.iter().find_map(|format| {
        let tracks = Tracks::new(format.tracks(&mut source)?, size_bytes);
        (!tracks.is_empty() || source.is_partial()).then_some((format.name(), tracks))
    })?;
    Some(Index { format, tracks, size_bytes, is_partial: source.is_partial(), spent: source.spent() })
}

/// The index of an open file, which nobody else reads through, or with a place at which a program reads what tells of the extent
/// there: the kernel is told that it is read in pieces. Nothing is
/// believed of a file that changes meanwhile.
pub fn read_open(file: BorrowedFd<'_>, formats: &[&'static dyn Format], place: Option<u64>) -> Option<Index> {
    let state = || {
        let stat = rustix::fs::fstat(file).ok()?;
        Some((u64::try_from(stat.st_size).ok()?, stat.st_ctime, stat.st_ctime_nsec))
    };
    let before = state()?;
    // An index lies in small pieces: what stands between them is not wanted.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    let read_at = |at, bytes: &mut [u8]| Ok(rustix::io::pread(file, bytes, at)?);
    let index = index(formats, Source::new(&read_at, before.0, None).at(place))?;
    (state()? == before).then_some(index)
}
