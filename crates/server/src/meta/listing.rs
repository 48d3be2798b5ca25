//! Reading directories: names in byte order, resumable after any name, in slices that fit into a frame.
//!
//! A listing reads the whole directory once and sorts it. Later slices come from that snapshot, which the session keeps
//! for a moment ([`SNAPSHOT_AGE_MAX`]). So a directory of n names costs one read and one sort, not one per slice. As
//! POSIX allows, names removed meanwhile are left out and names added meanwhile may be missed. Snapshots are bounded in
//! size: of a larger directory the smallest names are kept, and the next ones are read when those are used up. All
//! snapshots together are bounded too; an evicted one is read again.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_wire::message::{Entry, NodeKind};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::fault::{Explain, Outcome};
use super::opens::SessionId;
use super::permissions::User;
use super::service::Meta;
use super::sizes::with_used_bytes;
use super::tree::local_attr;

/// Largest snapshot, bytes.
const SNAPSHOT_MAX_BYTES: usize = 4 << 20;
/// All cached snapshots together, bytes.
const SNAPSHOTS_MAX_BYTES: usize = 32 << 20;
/// A listing resumed later than this sees the directory as it is then.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_secs(10);
/// Encoded entries of one answer, bytes; below the limit of a frame's body.
const ANSWER_MAX_BYTES: usize = 850 << 10;
/// Largest encoded entry without its name, and its name, bytes.
const ENTRY_BYTES: usize = 123;
const NAME_MAX_BYTES: usize = 255;
/// What an answer has beside names, targets and values, with the header of its frame, at most, bytes.
pub(super) const HEAD_BYTES: usize = 128;
/// Largest number of files whose size one call asks from data servers; then the slice ends.
const SIZE_QUERIES_MAX: usize = 64;

/// A fault that takes longer is taken for that of a server that does not answer.
const FAULT_AFTER_MAX: Duration = Duration::from_millis(500);

/// Sorted names of a directory, in one buffer.
#[derive(Default)]
pub(super) struct Names {
    bytes: Vec<u8>,
    /// Start and length of each.
    index: Vec<(u32, u16)>,
    /// The directory has no names beyond these.
    whole: bool,
}

impl Names {
    fn get(&self, i: usize) -> Option<&[u8]> {
        let (start, len) = *self.index.get(i)?;
        self.bytes.get(start as usize..start as usize + usize::from(len))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.index.iter().map(|at| self.name(at))
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
        // Neither cast truncates: a name has at most 255 bytes, a snapshot at most a few MiB.
        self.index.push((self.bytes.len() as u32, name.len() as u16));
        self.bytes.extend_from_slice(name);
    }

    /// The smallest names of a directory after `after`, as many as fit.
    pub(super) fn read(directory: &OwnedFd, after: &[u8], max_bytes: usize) -> rustix::io::Result<Names> {
        let mut names = Names { whole: true, ..Names::default() };
        let mut ceiling: Option<Vec<u8>> = None;
        // Duplicated, not opened again: its permission bits may forbid that.
        let mut entries = rustix::fs::Dir::new(rustix::io::fcntl_dupfd_cloexec(directory, 0)?)?;
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

/// The cached snapshots, oldest first.
#[derive(Default)]
pub(super) struct Listings {
    kept: Mutex<VecDeque<Listing>>,
}

struct Listing {
    session: SessionId,
    directory: u64,
    /// The snapshot holds the names after this one.
    beyond: Vec<u8>,
    names: Arc<Names>,
    taken: Instant,
}

impl Listings {
    /// A session's snapshot of a directory that holds what follows `after`.
    fn take(&self, session: SessionId, directory: u64, after: &[u8]) -> Option<Listing> {
        let mut kept = self.kept.lock();
        kept.retain(|listing| listing.taken.elapsed() < SNAPSHOT_AGE_MAX);
        let at = kept
            .iter()
            .position(|l| l.session == session && l.directory == directory && after >= l.beyond.as_slice())?;
        kept.remove(at)
    }

    fn keep(&self, listing: Listing) {
        let mut kept = self.kept.lock();
        kept.retain(|other| other.session != listing.session || other.directory != listing.directory);
        kept.push_back(listing);
        while kept.iter().map(|l| l.names.size_bytes()).sum::<usize>() > SNAPSHOTS_MAX_BYTES {
            kept.pop_front();
        }
    }

    /// Drops a session's snapshots.
    pub(super) fn forget(&self, session: SessionId) {
        self.kept.lock().retain(|listing| listing.session != session);
    }
}

impl Meta {
    /// A slice of a directory after a name; empty at the end.
    /// `user`: for whom it has to be permitted.
    pub(super) fn readdir(
        &self,
        (session, user): (SessionId, Option<&User>),
        path: &[u8],
        after: &[u8],
        max: u32,
    ) -> Outcome<Vec<Entry>> {
        let max = usize::try_from(max).unwrap_or(usize::MAX).max(1);
        let mut slice = Slice::default();
        let before = self.opens.unmarkings();
        let directory = self.directory_for(user, path)?;
        let listed = self.names_after(session, directory, after, |directory, name| {
            slice.add(self, directory, name)?;
            Ok(!slice.is_full(max))
        });
        listed.explain("list", path)?;
        self.ask_sizes(path, &mut slice.entries, before);
        Ok(slice.entries)
    }

    /// Passes on the names of a directory after a name, in order, until `take` says that it has enough.
    pub(super) fn names_after(
        &self,
        session: SessionId,
        directory: OwnedFd,
        after: &[u8],
        mut take: impl FnMut(&OwnedFd, &[u8]) -> rustix::io::Result<bool>,
    ) -> rustix::io::Result<()> {
        let ino = rustix::fs::fstat(&directory)?.st_ino;
        let kept = if after.is_empty() { None } else { self.listings.take(session, ino, after) };
        let mut listing = match kept {
            Some(listing) => listing,
            None => self.snapshot(session, ino, &directory, after)?,
        };
        let mut at = listing.names.index.partition_point(|i| listing.names.name(i) <= after);
        let mut taken = 0;
        loop {
            if let Some(name) = listing.names.get(at) {
                at += 1;
                taken += 1;
                if !take(&directory, name)? {
                    break;
                }
            } else if listing.names.whole {
                break;
            } else {
                let Some(last) = listing.names.index.last().map(|last| listing.names.name(last).to_vec()) else {
                    break;
                };
                listing = self.snapshot(session, ino, &directory, &last)?;
                at = 0;
            }
        }
        // A slice without names marks the end, so the snapshot is kept until the client has requested that slice.
        if taken > 0 {
            self.listings.keep(listing);
        }
        Ok(())
    }

    fn snapshot(&self, session: SessionId, ino: u64, directory: &OwnedFd, after: &[u8]) -> rustix::io::Result<Listing> {
        let names = Arc::new(Names::read(directory, after, SNAPSHOT_MAX_BYTES)?);
        Ok(Listing { session, directory: ino, beyond: after.to_vec(), names, taken: Instant::now() })
    }

    /// Replaces the attributes of files being written with what the data servers report. A listing does not fail
    /// because a data server does not answer: the size is [unknown](Entry::UNKNOWN_SIZE) then, and a request for that file alone
    /// fails. The last known one would be taken for the size: a program that seeks to the end of what it has written would
    /// write over it.
    /// `before` is from before the entries were looked at: a file whose size was settled meanwhile is looked at again.
    fn ask_sizes(&self, path: &[u8], entries: &mut Vec<Entry>, before: u64) {
        let marked = self.opens.marked_since(before, entries.iter().map(|entry| entry.attr.ino));
        let mut asked = 0;
        let mut answering = !self.background.is_paused();
        for i in 0..marked.len() {
            let (Some(entry), Some(true)) = (entries.get_mut(i), marked.get(i)) else { continue };
            if entry.attr.kind != NodeKind::File {
                continue;
            }
            if asked == SIZE_QUERIES_MAX {
                entries.truncate(i);
                return;
            }
            if answering {
                asked += 1;
                let mut file = path.to_vec();
                file.extend((!path.is_empty()).then_some(b'/'));
                file.extend(&entry.name);
                let began = Instant::now();
                match self.dir.entry(&file) {
                    Ok(Some(named)) => match self.attr_at(&named) {
                        Ok(attr) => entry.attr = attr,
                        Err(fault) => {
                            tracing::warn!(%fault, "listed without a size");
                            entry.attr.size = Entry::UNKNOWN_SIZE;
                            // What is wrong with one file says nothing of the others; but a server that is waited for is not
                            // asked again, also if another one has answered somebody meanwhile.
                            answering = !self.background.is_paused() && began.elapsed() < FAULT_AFTER_MAX;
                        }
                    },
                    // It has no name there any more, or cannot be opened.
                    Ok(None) | Err(_) => entry.attr.size = Entry::UNKNOWN_SIZE,
                }
            } else {
                entry.attr.size = Entry::UNKNOWN_SIZE;
            }
        }
    }
}

/// The most that the answer to a listing of at most `max` entries has, bytes.
pub(super) fn slice_bytes_max(max: u32) -> usize {
    let entries = usize::try_from(max).unwrap_or(usize::MAX).max(1);
    entries.saturating_mul(ENTRY_BYTES + NAME_MAX_BYTES).min(ANSWER_MAX_BYTES) + HEAD_BYTES
}

#[derive(Default)]
struct Slice {
    entries: Vec<Entry>,
    bytes: usize,
}

impl Slice {
    fn is_full(&self, max: usize) -> bool {
        self.entries.len() >= max || self.bytes + ENTRY_BYTES + NAME_MAX_BYTES > ANSWER_MAX_BYTES
    }

    /// Adds a name, unless it is gone or not a kind of node that a name space holds.
    fn add(&mut self, meta: &Meta, directory: &OwnedFd, name: &[u8]) -> rustix::io::Result<()> {
        let look = || rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = match look() {
            Err(Errno::NOENT) => return Ok(()),
            other => other?,
        };
        if let Ok(mut attr) = local_attr(&stat) {
            if attr.kind == NodeKind::File && attr.nlink > 1 {
                attr.nlink = meta.names_of(&attr, look);
            }
            let attr = with_used_bytes(attr, &stat, |ino| meta.noted_at(directory, name, ino));
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
    fn a_large_directory_is_read_in_pieces_none_lost() {
        let dir = tempfile::tempdir().unwrap();
        let mut wanted: Vec<Vec<u8>> = (0..500).map(|i| format!("{:x}", i * 7919 % 1000).into_bytes()).collect();
        wanted.sort();
        wanted.dedup();
        for name in &wanted {
            std::fs::write(dir.path().join(std::str::from_utf8(name).unwrap()), "").unwrap();
        }
        let directory = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
        let (mut read, mut after, mut pieces) = (Vec::new(), Vec::new(), 0);
        loop {
            let names = Names::read(&directory, &after, 1000).unwrap();
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
    fn snapshots_are_bounded_and_one_per_session_and_directory() {
        let listings = Listings::default();
        let names = Arc::new(Names { bytes: vec![0; SNAPSHOT_MAX_BYTES], ..Names::default() });
        let listing = |session, directory| Listing {
            session: SessionId(session),
            directory,
            beyond: b"m".to_vec(),
            names: names.clone(),
            taken: Instant::now(),
        };
        for directory in 0..20 {
            listings.keep(listing(1, directory));
            listings.keep(listing(1, directory));
        }
        assert_eq!(listings.kept.lock().len(), SNAPSHOTS_MAX_BYTES / SNAPSHOT_MAX_BYTES);
        assert!(listings.take(SessionId(1), 19, b"a").is_none(), "it begins beyond that");
        assert!(listings.take(SessionId(2), 19, b"z").is_none());
        assert!(listings.take(SessionId(1), 19, b"z").is_some());
        listings.forget(SessionId(1));
        assert!(listings.kept.lock().is_empty());
    }
}
