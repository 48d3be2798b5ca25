//! What a reader must survive, shared by the fuzzer and the property tests.

use super::*;

/// Gives arbitrary bytes to each reader as the contents of a file.
///
/// # Panics
/// If a reader breaks a promise: it panics, reads outside of the file, or lists more than the bytes that it may read can
/// hold.
pub fn read_everything(bytes: &[u8]) {
    for format in FORMATS {
        let found = tracks(format, bytes).unwrap_or_default();
        let all: usize = found.iter().map(Vec::len).sum();
        assert!(all <= EXTENTS_MAX + (INDEX_BYTES_MAX / 2) as usize, "{}: {all}", format.name());
        drop(Tracks::new(found, bytes.len() as u64));
    }
}

/// What a reader makes of these bytes, given time.
pub(super) fn tracks(format: &dyn Format, bytes: &[u8]) -> Option<Vec<Track>> {
    let mut read_at = |at: u64, out: &mut [u8]| {
        let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).expect("a place in the file");
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        Ok(len)
    };
    let mut source = Source::new(&mut read_at, bytes.len() as u64, Instant::now() + Duration::from_secs(60));
    format.tracks(&mut source)
}
