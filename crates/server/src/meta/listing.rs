//! Reading folders: names in byte order, resumable after any name, in slices that fit into a frame.
//!
//! A folder is read as a whole when a listing begins and sorted; what follows the first slice is served from
//! that snapshot, which its session keeps for a moment ([`SNAPSHOT_AGE_MAX`]). So a folder of n names costs one
//! reading and one sorting, not one per slice. Names that go meanwhile are left out, names that come may be
//! missed, as POSIX has it. Snapshots are bounded in size; of a folder with more names than fit, the smallest
//! are kept and the next ones are read when those are used up. All of them together are bounded too; one
//! pushed out is read again.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use impresario_wire::message::{Entry, NodeKind};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::fault::{Explain, Outcome};
use super::lock;
use super::opens::SessionId;
use super::service::Meta;
use super::tree::local_attr;

/// Largest snapshot, bytes.
const SNAPSHOT_MAX_BYTES: usize = 4 << 20;
/// All snapshots kept, bytes.
const SNAPSHOTS_MAX_BYTES: usize = 32 << 20;
/// A listing that goes on later than this sees the folder as it is then.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_secs(10);
/// Encoded entries of one answer, bytes; below what a frame's body may have.
const ANSWER_MAX_BYTES: usize = 850 << 10;
/// Most bytes of an encoded entry besides its name.
const ENTRY_BYTES: usize = 96;
/// Data servers are asked for so many files in one call at most; then the slice ends.
const ASKED_MAX: usize = 64;

/// Names of a folder, sorted, in one piece of memory.
#[derive(Default)]
struct Names {
    bytes: Vec<u8>,
    /// Start and length of each.
    index: Vec<(u32, u16)>,
    /// There are no names beyond.
    whole: bool,
}

impl Names {
    fn get(&self, i: usize) -> Option<&[u8]> {
        let (start, len) = *self.index.get(i)?;
        self.bytes.get(start as usize..start as usize + usize::from(len))
    }

    fn name(&self, &(start, len): &(u32, u16)) -> &[u8] {
        self.bytes.get(start as usize..start as usize + usize::from(len)).unwrap_or_default()
    }

    fn size_bytes(&self) -> usize {
        self.bytes.len() + self.index.len() * size_of::<(u32, u16)>()
    }

    fn sort(&mut self) {
        let mut index = std::mem::take(&mut self.index);
        index.sort_unstable_by(|a, b| self.name(a).cmp(self.name(b)));
        self.index = index;
    }

    /// Keeps the smaller half.
    fn halve(&mut self) {
        self.sort();
        self.index.truncate(self.index.len().div_ceil(2));
        let mut kept = Names { whole: false, ..Names::default() };
        for at in &self.index {
            kept.push(self.name(at));
        }
        *self = kept;
    }

    fn push(&mut self, name: &[u8]) {
        // Both fit: a name has at most 255 bytes, a snapshot at most a few MiB.
        self.index.push((self.bytes.len() as u32, name.len() as u16));
        self.bytes.extend_from_slice(name);
    }

    /// The smallest names of a folder beyond `after`, as many as fit.
    fn read(folder: &OwnedFd, after: &[u8], max_bytes: usize) -> rustix::io::Result<Names> {
        let mut names = Names { whole: true, ..Names::default() };
        let mut ceiling: Option<Vec<u8>> = None;
        // Not opened anew: its permission bits may not allow that.
        let mut entries = rustix::fs::Dir::new(rustix::io::fcntl_dupfd_cloexec(folder, 0)?)?;
        entries.rewind();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." || name <= after || ceiling.as_deref().is_some_and(|c| name > c) {
                continue;
            }
            names.push(name);
            if names.size_bytes() > max_bytes {
                names.halve();
                ceiling = names.index.last().map(|last| names.name(last).to_vec());
            }
        }
        names.sort();
        Ok(names)
    }
}

/// The snapshots kept, oldest first.
#[derive(Default)]
pub(super) struct Listings {
    kept: Mutex<VecDeque<Listing>>,
}

struct Listing {
    session: SessionId,
    folder: u64,
    /// The snapshot holds what was beyond this name.
    beyond: Vec<u8>,
    names: Arc<Names>,
    taken: Instant,
}

impl Listings {
    /// A session's snapshot of a folder that has what follows `after`.
    fn take(&self, session: SessionId, folder: u64, after: &[u8]) -> Option<Listing> {
        let mut kept = lock(&self.kept);
        kept.retain(|listing| listing.taken.elapsed() < SNAPSHOT_AGE_MAX);
        let at =
            kept.iter().position(|l| l.session == session && l.folder == folder && after >= l.beyond.as_slice())?;
        kept.remove(at)
    }

    fn keep(&self, listing: Listing) {
        let mut kept = lock(&self.kept);
        kept.retain(|other| other.session != listing.session || other.folder != listing.folder);
        kept.push_back(listing);
        while kept.iter().map(|l| l.names.size_bytes()).sum::<usize>() > SNAPSHOTS_MAX_BYTES {
            kept.pop_front();
        }
    }

    /// Drops what a session had.
    pub(super) fn forget(&self, session: SessionId) {
        lock(&self.kept).retain(|listing| listing.session != session);
    }
}

impl Meta {
    /// A slice of a folder after a name; empty at its end.
    pub(super) fn readdir(&self, session: SessionId, path: &[u8], after: &[u8], max: u32) -> Outcome<Vec<Entry>> {
        let doing = "list";
        let folder = self.home.open_folder(path).explain(doing, path)?;
        let ino = rustix::fs::fstat(&folder).explain(doing, path)?.st_ino;
        let kept = if after.is_empty() { None } else { self.listings.take(session, ino, after) };
        let mut listing = match kept {
            Some(listing) => listing,
            None => self.snapshot(session, ino, &folder, after).explain(doing, path)?,
        };
        let max = usize::try_from(max).unwrap_or(usize::MAX).max(1);
        let mut slice = Slice::default();
        let mut at = listing.names.index.partition_point(|i| listing.names.name(i) <= after);
        while !slice.is_full(max) {
            if let Some(name) = listing.names.get(at) {
                slice.add(&folder, name).explain(doing, path)?;
                at += 1;
            } else if listing.names.whole {
                break;
            } else {
                let Some(last) = listing.names.index.last().map(|last| listing.names.name(last).to_vec()) else {
                    break;
                };
                listing = self.snapshot(session, ino, &folder, &last).explain(doing, path)?;
                at = 0;
            }
        }
        // The end is told by an empty slice, so a listing is kept until that was asked for.
        if !slice.entries.is_empty() {
            self.listings.keep(listing);
        }
        self.ask_sizes(path, &mut slice.entries);
        Ok(slice.entries)
    }

    fn snapshot(&self, session: SessionId, ino: u64, folder: &OwnedFd, after: &[u8]) -> rustix::io::Result<Listing> {
        let names = Arc::new(Names::read(folder, after, SNAPSHOT_MAX_BYTES)?);
        Ok(Listing { session, folder: ino, beyond: after.to_vec(), names, taken: Instant::now() })
    }

    /// Replaces the attributes of files that are being written by what the data servers say. A listing does not
    /// fail for a data server that does not answer: it shows the size last known, and asking for such a file by
    /// itself fails.
    fn ask_sizes(&self, path: &[u8], entries: &mut Vec<Entry>) {
        let marked = self.opens.marked_among(entries.iter().map(|entry| entry.attr.ino));
        let mut asked = 0;
        let mut answering = !self.care.is_paused();
        for i in 0..marked.len() {
            let (Some(entry), Some(true)) = (entries.get_mut(i), marked.get(i)) else { continue };
            if asked == ASKED_MAX {
                entries.truncate(i);
                return;
            }
            entry.attr.nlink = 1;
            if answering {
                asked += 1;
                let mut file = path.to_vec();
                file.extend((!path.is_empty()).then_some(b'/'));
                file.extend(&entry.name);
                match self.home.place(&file) {
                    Ok(Some(place)) => match self.attr_at(&place) {
                        Ok(attr) => entry.attr = attr,
                        Err(fault) => {
                            tracing::warn!(%fault, "listed with the size last known");
                            answering = false;
                        }
                    },
                    _ => continue,
                }
            }
        }
    }
}

#[derive(Default)]
struct Slice {
    entries: Vec<Entry>,
    bytes: usize,
}

impl Slice {
    fn is_full(&self, max: usize) -> bool {
        self.entries.len() >= max || self.bytes + ENTRY_BYTES + 255 > ANSWER_MAX_BYTES
    }

    /// Adds a name unless it is gone, or nothing for a name space.
    fn add(&mut self, folder: &OwnedFd, name: &[u8]) -> rustix::io::Result<()> {
        let stat = match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            other => other?,
        };
        if let Ok(attr) = local_attr(&stat) {
            debug_assert!(attr.kind != NodeKind::File || attr.nlink > 0);
            self.bytes += name.len() + ENTRY_BYTES;
            self.entries.push(Entry { name: name.to_vec(), attr });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_folder_is_read_in_pieces_none_lost() {
        let dir = tempfile::tempdir().unwrap();
        let mut wanted: Vec<Vec<u8>> = (0..500).map(|i| format!("{:x}", i * 7919 % 1000).into_bytes()).collect();
        wanted.sort();
        wanted.dedup();
        for name in &wanted {
            std::fs::write(dir.path().join(std::str::from_utf8(name).unwrap()), "").unwrap();
        }
        let folder = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
        let (mut read, mut after, mut pieces) = (Vec::new(), Vec::new(), 0);
        loop {
            let names = Names::read(&folder, &after, 1000).unwrap();
            assert!(names.size_bytes() <= 1000);
            read.extend((0..names.index.len()).map(|i| names.get(i).unwrap().to_vec()));
            pieces += 1;
            if names.whole {
                break;
            }
            after = read.last().unwrap().clone();
        }
        assert_eq!(read, wanted);
        assert!(pieces > 4, "{pieces}");
    }

    #[test]
    fn snapshots_are_bounded_and_one_per_session_and_folder() {
        let listings = Listings::default();
        let names = Arc::new(Names { bytes: vec![0; SNAPSHOT_MAX_BYTES], ..Names::default() });
        let listing = |session, folder| Listing {
            session: SessionId(session),
            folder,
            beyond: b"m".to_vec(),
            names: names.clone(),
            taken: Instant::now(),
        };
        for folder in 0..20 {
            listings.keep(listing(1, folder));
            listings.keep(listing(1, folder));
        }
        assert_eq!(lock(&listings.kept).len(), SNAPSHOTS_MAX_BYTES / SNAPSHOT_MAX_BYTES);
        assert!(listings.take(SessionId(1), 19, b"a").is_none(), "it begins beyond that");
        assert!(listings.take(SessionId(2), 19, b"z").is_none());
        assert!(listings.take(SessionId(1), 19, b"z").is_some());
        listings.forget(SessionId(1));
        assert!(lock(&listings.kept).is_empty());
    }
}
