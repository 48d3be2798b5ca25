//! Zarr 3: a shard, one file that holds many chunks of an array. An index at its end, or at its beginning, has the place and
//! the length of each, in the order of the grid within the shard, and a sum of itself.
//!
//! How many chunks there are stands in the array's metadata, which is another file. Here the index tells it itself: it is as
//! long as it takes to reach the data of a chunk, and its sum must be right. Not known: indexes without a sum, which
//! none of the writers makes by default.

use std::ops::Range;
use std::path::Path;

use super::{Fields, Format, Source, Track};
use impresario_foresight::EXTENTS_MAX;

/// The reader.
pub struct Shard;

const ENTRY_BYTES: usize = 16;
const SUM_BYTES: usize = 4;
/// How many chunks there may be: most shards have few.
const ENTRIES_MAX: [usize; 3] = [255, 4095, EXTENTS_MAX];

impl Format for Shard {
    fn name(&self) -> &'static str {
        "Zarr shard"
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &[]
    }

    fn may_be_named(&self, path: &Path) -> bool {
        crate::zarr::looks_like_chunk(path)
    }

    /// One track: the chunks in the order of the grid. Those never written have no place and are left out.
    fn tracks(&self, file: &mut Source<'_>) -> Option<Vec<Track>> {
        Some(vec![at_end(file).or_else(|| at_start(file))?])
    }
}

/// An index at the end: its first byte follows the chunk that lies last.
fn at_end(file: &mut Source<'_>) -> Option<Track> {
    let size = file.size_bytes();
    for most in ENTRIES_MAX {
        let bytes = file.up_to(size.saturating_sub((most * ENTRY_BYTES + SUM_BYTES) as u64), size)?;
        let (entries, sum) = bytes.split_last_chunk()?;
        let (mut data_end, mut begin) = (0, entries.len());
        for entry in entries.rchunks_exact(ENTRY_BYTES) {
            begin -= ENTRY_BYTES;
            data_end = data_end.max(chunk(entry)?.map_or(0, |chunk| chunk.end));
            let index = &entries[begin..];
            match data_end.cmp(&(size - (index.len() + SUM_BYTES) as u64)) {
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Equal => return chunks(index, *sum),
                std::cmp::Ordering::Greater => return None,
            }
        }
    }
    None
}

/// An index at the beginning: the chunk that lies first follows its sum.
fn at_start(file: &mut Source<'_>) -> Option<Track> {
    for most in ENTRIES_MAX {
        let bytes = file.up_to(0, (most * ENTRY_BYTES + SUM_BYTES) as u64)?;
        let (mut data_start, mut end) = (u64::MAX, 0);
        for entry in bytes.chunks_exact(ENTRY_BYTES) {
            end += ENTRY_BYTES;
            data_start = data_start.min(chunk(entry)?.map_or(u64::MAX, |chunk| chunk.start));
            match data_start.cmp(&((end + SUM_BYTES) as u64)) {
                std::cmp::Ordering::Less => return None,
                std::cmp::Ordering::Equal => return chunks(&bytes[..end], *bytes.get(end..)?.first_chunk()?),
                std::cmp::Ordering::Greater => {}
            }
        }
    }
    None
}

/// The chunks that an index lists, if this is its sum.
fn chunks(index: &[u8], sum: [u8; SUM_BYTES]) -> Option<Track> {
    if crc32c::crc32c(index) != u32::from_le_bytes(sum) {
        return None;
    }
    Some(index.chunks_exact(ENTRY_BYTES).filter_map(|entry| chunk(entry)?).collect())
}

/// Where a chunk lies, or that it was never written; `None` for what is no entry of an index.
fn chunk(entry: &[u8]) -> Option<Option<Range<u64>>> {
    let mut fields = Fields::new(entry);
    match (fields.little(8)?, fields.little(8)?) {
        (u64::MAX, u64::MAX) => Some(None),
        (_, 0) => None,
        (at, bytes) => Some(Some(at..at.checked_add(bytes)?)),
    }
}
