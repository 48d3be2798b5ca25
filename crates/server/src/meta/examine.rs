//! What a check of the cluster asks: what is kept of each file, and whether a walk through all directories may have missed
//! some.
//!
//! A walk misses a file that is renamed from a directory that it has not seen yet to one that it has. So while a walk is
//! under way the keys of renamed files are noted, before the rename. A renamed directory moves too many files to note: then
//! the walk is not sure.

use impresario_base::lock::{Mutex, RwLock, RwLockReadGuard};
use impresario_layout::Skipped;
use impresario_wire::message::{Answer, Examine, Examined, FileKey, FileRecord, NodeKind, Time};
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::Fault;
use super::directory::{MetaDirectory, StartError, key_of};
use super::disk::Disk;
use super::fault::{Explain, Outcome};
use super::listing::Names;
use super::opens::SessionId;
use super::record::{BadRecord, Record};
use super::removal::links;
use super::service::Meta;
use super::tree::{EntryRef, kind_of};

/// Entries of one answer: each has a name of up to 255 bytes and a record.
const ENTRIES_MAX: usize = 2000;
/// Names of `orphans/` and `writers/` that are sorted at once, bytes.
const UNNAMED_MAX_BYTES: usize = 4 << 20;
/// Renamed files that one walk notes.
const RENAMED_MAX: usize = 1 << 16;

/// The walk that is under way, if any.
#[derive(Default)]
pub(super) struct Walks {
    /// Held for reading over a rename, so that none is under way when a walk begins.
    renaming: RwLock<bool>,
    state: Mutex<Walk>,
}

#[derive(Default)]
struct Walk {
    number: u64,
    renamed: Vec<FileKey>,
    is_unsure: bool,
    /// One of what was renamed may be striped over servers that new files do not use.
    may_miss_skipped: bool,
}

impl Walks {
    /// Call before a rename of these entries and hold the result over it.
    /// `skipped`: the servers that new files do not use.
    pub(super) fn rename(
        &self,
        disk: &Disk,
        moved: &[(&EntryRef<'_>, &Stat)],
        skipped: &dyn Fn() -> Skipped,
    ) -> impl Sized + use<'_> {
        let is_walked: RwLockReadGuard<'_, bool> = self.renaming.read();
        for (from, moved) in moved.iter().filter(|_| *is_walked) {
            let key = match kind_of(moved) {
                Some(NodeKind::File) => disk.open_file(from.directory(), from.name).map(|file| Record::of(disk, file)),
                Some(NodeKind::Dir) | None => Err(Errno::ISDIR),
                // Nothing else has objects.
                Some(_) => continue,
            };
            let may_be_skipped = match &key {
                Ok(Ok(record)) => skipped().servers().iter().any(|n| record.layout.position_of(*n).is_some()),
                Ok(Err(BadRecord::Missing)) => false,
                _ => true,
            };
            let mut walk = self.state.lock();
            walk.may_miss_skipped |= may_be_skipped;
            match key {
                Ok(Ok(record)) if walk.renamed.len() < RENAMED_MAX => walk.renamed.push(record.key),
                // It has no objects.
                Ok(Err(BadRecord::Missing)) => {}
                _ => walk.is_unsure = true,
            }
        }
        is_walked
    }

    fn begin(&self) -> u64 {
        let mut is_walked = self.renaming.write();
        let mut walk = self.state.lock();
        // Not that of a walk before a restart of the server.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as u64);
        *walk = Walk { number: now.max(walk.number + 1), ..Walk::default() };
        *is_walked = true;
        walk.number
    }

    /// Call before these objects become, or do not remain, those of a file that a walk may have met.
    pub(super) fn note(&self, keys: &[FileKey]) {
        let is_walked = self.renaming.read();
        let mut walk = self.state.lock();
        match *is_walked {
            true if walk.renamed.len() < RENAMED_MAX => walk.renamed.extend(keys),
            true => walk.is_unsure = true,
            false => {}
        }
    }

    fn end(&self, number: u64) -> (Vec<FileKey>, bool) {
        let walk = self.take(number).unwrap_or(Walk { is_unsure: true, ..Walk::default() });
        (walk.renamed, !walk.is_unsure)
    }

    /// Ends a walk for files on servers that new files do not use; false if it may have missed one.
    pub(super) fn end_of_draining(&self, number: u64) -> bool {
        self.take(number).is_some_and(|walk| !walk.may_miss_skipped)
    }

    fn take(&self, number: u64) -> Option<Walk> {
        let mut is_walked = self.renaming.write();
        let mut walk = self.state.lock();
        if walk.number != number || !*is_walked {
            return None;
        }
        *is_walked = false;
        Some(std::mem::replace(&mut *walk, Walk { number, ..Walk::default() }))
    }
}

impl Meta {
    pub(super) fn examine(&self, session: SessionId, what: Examine) -> Outcome<Answer> {
        let doing = "examine";
        let (mut entries, mut walk, mut renamed, mut is_sure) = (Vec::new(), 0, Vec::new(), true);
        match what {
            Examine::Directory { path, after, max } => {
                let max = (max as usize).clamp(1, ENTRIES_MAX);
                let directory = self.dir.open_dir_by_path(&path).explain(doing, &path)?;
                self.names_after(session, directory, &after, |directory, name| {
                    entries.extend(self.dir.examine(directory, name)?);
                    Ok(entries.len() < max)
                })
                .explain(doing, &path)?;
            }
            Examine::File { path } => match self.dir.entry(&path) {
                Ok(Some(entry)) => {
                    entries.extend(self.dir.examine(entry.directory(), entry.name).explain(doing, &path)?)
                }
                Ok(None) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(errno) => return Err(errno).explain(doing, &path),
            },
            Examine::Unnamed { removed, after, max } => {
                let max = (max as usize).clamp(1, ENTRIES_MAX);
                entries = self.dir.unnamed(removed, &after, max).explain(doing, b"")?;
            }
            Examine::BeginWalk => {
                walk = self.walks.begin();
                // Those that become spare from now on are noted.
                self.walks.note(&self.dir.spares().explain(doing, b"")?);
            }
            Examine::EndWalk { walk: number } => {
                walk = number;
                (renamed, is_sure) = self.walks.end(number);
            }
        }
        Ok(Answer::Examined { entries, walk, renamed, is_sure })
    }
}

impl MetaDirectory {
    /// What is kept of one name; `None` if there is none.
    pub(super) fn examine(&self, directory: impl AsFd, name: &[u8]) -> rustix::io::Result<Option<Examined>> {
        let stat = match rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let mut kind = kind_of(&stat);
        let file = match kind {
            Some(NodeKind::File) => match self.disk.open_file(&directory, name) {
                Err(Errno::NOENT) => return Ok(None),
                Err(errno) => Some(Err(format!("it cannot be opened: {}", std::io::Error::from(errno)))),
                Ok(file) => Some(self.file_record(file).map_err(|bad| match bad {
                    BadRecord::Missing => {
                        kind = None;
                        "it has no record: the metadata server has not made it, or the folder was copied without \
                         extended attributes"
                            .into()
                    }
                    BadRecord::Unknown => "its record is damaged, or of a later version".into(),
                    BadRecord::Io(errno) => format!("its record cannot be read: {}", std::io::Error::from(errno)),
                })),
            },
            _ => None,
        };
        Ok(Some(Examined { name: name.to_vec(), kind, file }))
    }

    fn file_record(&self, file: OwnedFd) -> Result<FileRecord, BadRecord> {
        // The mark is looked for before and after: the record is of a time at which it was there throughout, or was not.
        let record = Record::of(&self.disk, &file)?;
        // That of a file that was laid out anew just now may have the key of before.
        let keys = [Some(record.key), record.spare.map(|(key, _)| key)];
        let is_marked = || {
            let name = |key: FileKey| super::directory::key_name(key);
            let is_there = |name| rustix::fs::statat(&self.writers, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
            keys.into_iter().flatten().any(|key| is_there(name(key)))
        };
        let was_marked = is_marked();
        let stat = rustix::fs::fstat(&file).map_err(BadRecord::Io)?;
        let name = super::directory::key_name(record.key);
        let is_orphan = links(&stat) > 1 + u64::from(was_marked)
            && rustix::fs::statat(&self.orphans, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        let ours = u64::from(was_marked) + u64::from(is_orphan);
        let is_still =
            was_marked == is_marked() && rustix::fs::fstat(&file).is_ok_and(|now| links(&now) == links(&stat));
        let names = is_still.then(|| u32::try_from(links(&stat).saturating_sub(ours)).unwrap_or(u32::MAX));
        let record = Record::of(&self.disk, &file)?;
        Ok(FileRecord {
            file: record.key,
            layout: record.layout,
            made: record.seen.made,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            is_marked: was_marked || is_marked(),
            changed: Time { secs: stat.st_ctime, nanos: stat.st_ctime_nsec as u32 },
            links: names,
        })
    }

    /// A slice of `orphans/` or `writers/`.
    pub(super) fn unnamed(&self, removed: bool, after: &[u8], max: usize) -> rustix::io::Result<Vec<Examined>> {
        let directory = if removed { &self.orphans } else { &self.writers };
        let names = Names::read(directory, after, UNNAMED_MAX_BYTES)?;
        let mut entries = Vec::new();
        for name in names.iter() {
            if entries.len() == max {
                break;
            }
            let Some(mut entry) = self.examine(directory, name)? else { continue };
            if key_of(name).is_none() {
                (entry.kind, entry.file) = (None, None);
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

/// A metadata folder that no server serves, for a check.
pub struct IdleFolder {
    dir: MetaDirectory,
}

impl IdleFolder {
    /// Claims the folder; refuses one that a server serves. Changes nothing in it.
    pub fn open(dir: &Path) -> Result<IdleFolder, StartError> {
        Ok(IdleFolder { dir: MetaDirectory::open_idle(dir)? })
    }

    /// The number that the keys of its files begin with.
    pub fn key_prefix(&self) -> u64 {
        self.dir.identity
    }

    /// How many keys count as issued.
    pub fn keys_issued(&self) -> u64 {
        self.dir.keys_issued()
    }

    /// How many keys were issued cannot be read.
    pub fn are_keys_damaged(&self) -> bool {
        self.dir.are_keys_damaged
    }

    /// Has at least so many keys count as issued.
    pub fn count_keys(&self, issued: u64) -> Result<(), Fault> {
        self.dir.count_keys(issued).explain("count the keys in", b"keys")
    }

    /// As the call of the server; nothing is renamed meanwhile.
    pub fn examine(&self, what: &Examine) -> Result<Vec<Examined>, Fault> {
        let doing = "examine";
        Ok(match what {
            Examine::Directory { path, after, max } => {
                let directory = self.dir.open_dir_by_path(path).explain(doing, path)?;
                let names = Names::read(&directory, after, UNNAMED_MAX_BYTES).explain(doing, path)?;
                let entries = names.iter().take(*max as usize).map(|name| self.dir.examine(&directory, name));
                let entries: rustix::io::Result<Vec<_>> = entries.collect();
                entries.explain(doing, path)?.into_iter().flatten().collect()
            }
            Examine::File { path } => match self.dir.entry(path).explain(doing, path)? {
                Some(entry) => {
                    let entry = self.dir.examine(entry.directory(), entry.name).explain(doing, path)?;
                    entry.into_iter().collect()
                }
                None => Vec::new(),
            },
            Examine::Unnamed { removed, after, max } => {
                self.dir.unnamed(*removed, after, *max as usize).explain(doing, b"")?
            }
            Examine::BeginWalk | Examine::EndWalk { .. } => Vec::new(),
        })
    }

    /// Keys of the spare objects of files that were being laid out anew.
    pub fn spares(&self) -> Result<Vec<FileKey>, Fault> {
        self.dir.spares().explain("examine", b"")
    }

    /// Sets the length of a file to what its objects say, and removes its mark.
    pub fn settle(&self, path: &[u8], size: u64, file: FileKey) -> Result<(), Fault> {
        let doing = "set the length of";
        let entry = self.dir.entry(path).and_then(|entry| entry.ok_or(Errno::ISDIR)).explain(doing, path)?;
        let opened = self.dir.disk.open_file(entry.directory(), entry.name).explain(doing, path)?;
        let record = Record::of(&self.dir.disk, &opened).ok().filter(|record| record.key == file);
        let set = match record.is_some() {
            // The metadata server removes these first.
            true if record.is_some_and(|record| record.spare.is_some()) => Err(Errno::BUSY),
            true => self.dir.disk.set_len(&opened, size).and_then(|()| self.dir.disk.sync("sync_corrected", &opened)),
            false => Err(Errno::STALE),
        };
        set.explain(doing, path)?;
        self.drop_name(&self.dir.writers, file)
    }

    /// Removes the last names of a file whose objects are removed: its mark, and that of its removal.
    pub fn finish_removal(&self, file: FileKey) -> Result<(), Fault> {
        self.drop_name(&self.dir.writers, file)?;
        self.drop_name(&self.dir.orphans, file)
    }

    /// Ends a removal that had not come so far that the file lost its name.
    pub fn cancel_removal(&self, file: FileKey) -> Result<(), Fault> {
        self.drop_name(&self.dir.orphans, file)
    }

    fn drop_name(&self, directory: &OwnedFd, file: FileKey) -> Result<(), Fault> {
        let name = super::directory::key_name(file);
        match self.dir.disk.unlink(directory, name.as_bytes()) {
            Err(Errno::NOENT) => Ok(()),
            other => {
                other.and_then(|()| self.dir.disk.sync("sync_struck", directory)).explain("remove", name.as_bytes())
            }
        }
    }
}
