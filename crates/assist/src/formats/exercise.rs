//! What a reader must survive, shared by the fuzzer and the property tests.

use std::time::Duration;

use impresario_foresight::EXTENTS_MAX;

use super::source::INDEX_BYTES_MAX;
use super::*;

/// So many of the extents that a reader lists are read, one after the other.
const READS: usize = 200;

/// Gives arbitrary bytes to each reader as the contents of a file.
///
/// # Panics
/// If a reader breaks a promise: it panics, reads outside of the file, or lists more than the bytes that it may read can
/// hold; or if by what it lists something outside of the file would be brought in.
pub fn read_everything(bytes: &[u8]) {
    for format in FORMATS {
        let found = tracks(format, bytes).unwrap_or_default();
        let all: usize = found.iter().map(Vec::len).sum();
        assert!(all <= EXTENTS_MAX + (INDEX_BYTES_MAX / 2) as usize, "{}: {all}", format.name());
        let mut tracks = Tracks::new(found.clone(), bytes.len() as u64);
        for read in found.iter().flatten().take(READS) {
            let next = tracks.read(1, read, &mut |_| true).unwrap_or_default().next;
            assert!(next.iter().all(|r| r.start < r.end && r.end <= bytes.len() as u64), "{}: {next:?}", format.name());
        }
    }
}

/// What a reader makes of these bytes, given time.
pub(super) fn tracks(format: &dyn Format, bytes: &[u8]) -> Option<Vec<Track>> {
    let read_at = |at: u64, out: &mut [u8]| {
        let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).expect("a place in the file");
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        Ok(len)
    };
    let mut source = Source::new(&read_at, bytes.len() as u64, Some(Duration::from_secs(60)));
    format.tracks(&mut source)
}
