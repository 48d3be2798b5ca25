//! Listing a directory in byte order of names, as clients ask for it: a directory is read whole, sorted, and kept for its
//! session until it is listed anew or asked for something else.

use impresario_backend::{Backend, Caller, Handle, Result};
use impresario_wire::Entry;

/// Bytes of names that are kept at most: of a larger directory the smallest names, and later slices read it again.
const NAMES_MAX_BYTES: usize = 32 << 20;
/// Names that one call of the backend is asked for.
const AT_ONCE: usize = 4096;
/// Encoded entries of one answer, bytes; below the limit of a frame's body.
pub(super) const ANSWER_MAX_BYTES: usize = 850 << 10;
/// Largest encoded entry without its name, bytes.
const ENTRY_BYTES: usize = 112;

/// Sorted names of a directory.
pub(super) struct Snapshot {
    pub(super) dir: Handle,
    /// The names are those after this one.
    beyond: Vec<u8>,
    names: Vec<Vec<u8>>,
    /// The directory had no more.
    whole: bool,
}

impl Snapshot {
    /// Reads the names of a directory after `beyond`.
    pub(super) fn read(backend: &dyn Backend, caller: &Caller, dir: &Handle, beyond: &[u8]) -> Result<Snapshot> {
        let (mut names, mut bytes, mut cookie): (Vec<Vec<u8>>, _, _) = (Vec::new(), 0, 0);
        // Of the names after this one not all are kept: none is.
        let mut ceiling: Option<Vec<u8>> = None;
        loop {
            let (entries, last) = backend.read_dir(caller, dir, cookie, AT_ONCE)?;
            cookie = entries.last().map_or(cookie, |entry| entry.cookie);
            for entry in entries {
                let wanted = *entry.name > *beyond && ceiling.as_ref().is_none_or(|ceiling| entry.name <= *ceiling);
                if wanted && entry.name != b"." && entry.name != b".." {
                    bytes += entry.name.len();
                    names.push(entry.name);
                }
            }
            if bytes > NAMES_MAX_BYTES {
                names.sort_unstable();
                names.truncate(names.len().div_ceil(2));
                bytes = names.iter().map(Vec::len).sum();
                ceiling = names.last().cloned();
            }
            if last {
                names.sort_unstable();
                return Ok(Snapshot { dir: *dir, beyond: beyond.into(), names, whole: ceiling.is_none() });
            }
        }
    }

    /// The directory has no names beyond these.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// The names after one; `None` where the snapshot does not tell.
    pub(super) fn after(&self, name: &[u8]) -> Option<&[Vec<u8>]> {
        if *name < *self.beyond {
            return None;
        }
        let from = self.names.partition_point(|known| **known <= *name);
        let rest = &self.names[from..];
        (self.whole || !rest.is_empty()).then_some(rest)
    }
}

/// Whether another entry fits into an answer of `bytes` so far.
pub(super) fn fits(bytes: &mut usize, entry: &Entry) -> bool {
    *bytes += entry.name.len() + ENTRY_BYTES;
    *bytes <= ANSWER_MAX_BYTES
}
