//! Removal of a file's last name, and then of the file: through `orphans/`, so that no crash loses track of its objects
//! and an open file stays usable.
//!
//! A file that loses a name gets one in `orphans/` before, or in the same step. If it has no other name left, it stays
//! there until its last opener closes it. Then the removal is made durable and its objects, its mark and the orphan are
//! removed, in that order. An entry found in `orphans/` at start was interrupted: it is merely dropped if the file
//! still has a name, and removed otherwise after a grace period in which clients may reopen it
//! ([`Meta::pin_for_reopen`]).
//!
//! File names are removed under their own locks ([`NameLocks`]), so the file that was checked is the file that is
//! removed.

use std::hash::{BuildHasher, BuildHasherDefault};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use impresario_base::lock::{Mutex, MutexGuard, RwLockReadGuard};
use impresario_wire::message::{FileKey, NodeKind};
use rustc_hash::FxHasher;
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

use super::background::{Failure, Group, Job, Stopped};
use super::changes::By;
use super::directory::{key_name, key_of, names_in};
use super::disk::Disk;
use super::fault::{Explain, Outcome, fault, reason, show};
use super::opens::{Claim, Found, OpenFile, Pin};
use super::record::{BadRecord, Record};
use super::service::Meta;
use super::tree::{EntryRef, kind_of};

const STRIPES: usize = 256;
/// How often an operation restarts because others changed the same name.
pub(super) const TRIES: usize = 100;
/// Locks for changes of names, chosen by directory and name.
pub(super) struct NameLocks([Mutex<()>; STRIPES]);

impl Default for NameLocks {
    fn default() -> Self {
        NameLocks([const { Mutex::new(()) }; STRIPES])
    }
}

fn number_of(directory: BorrowedFd<'_>) -> rustix::io::Result<u64> {
    Ok(rustix::fs::fstat(directory)?.st_ino)
}

impl NameLocks {
    fn stripe(directory: u64, entry: &EntryRef<'_>) -> usize {
        let hash = BuildHasherDefault::<FxHasher>::default().hash_one((directory, entry.name));
        (hash >> 32) as usize % STRIPES
    }

    fn lock(&self, stripe: usize) -> Option<MutexGuard<'_, ()>> {
        self.0.get(stripe).map(Mutex::lock)
    }

    pub(super) fn hold(&self, entry: &EntryRef<'_>) -> rustix::io::Result<impl Sized> {
        Ok(self.hold_in(number_of(entry.directory())?, entry))
    }

    /// The same by the number of the entry's directory.
    pub(super) fn hold_in(&self, directory: u64, entry: &EntryRef<'_>) -> impl Sized {
        self.lock(Self::stripe(directory, entry))
    }

    /// Locks two names, always in the same order.
    pub(super) fn hold_both(&self, one: &EntryRef<'_>, other: &EntryRef<'_>) -> rustix::io::Result<impl Sized> {
        let directory = number_of(one.directory())?;
        let is_same = one.directory().as_raw_fd() == other.directory().as_raw_fd();
        let other_directory = if is_same { directory } else { number_of(other.directory())? };
        let (a, b) = (Self::stripe(directory, one), Self::stripe(other_directory, other));
        let first = self.lock(a.min(b));
        Ok((first, (a != b).then(|| self.lock(a.max(b)))))
    }
}

impl Meta {
    /// Pins the file at an entry; the entry named it at a moment when the pin was held.
    pub(super) fn pin_at(&self, entry: &EntryRef<'_>, doing: &str) -> Outcome<Pin<'_>> {
        let pin = self.pin_ours(entry, doing)?;
        pin.ok_or_else(|| bad_record(BadRecord::Missing, &format!("cannot {doing} {}", show(entry.path))))
    }

    /// The same; `None` if the file has no record: a file put there by hand has no objects to remove.
    fn pin_ours(&self, entry: &EntryRef<'_>, doing: &str) -> Outcome<Option<Pin<'_>>> {
        for _ in 0..TRIES {
            let still = self.dir.disk.without_specials();
            let stat = entry.stat().explain(doing, entry.path)?;
            // If it had lost its name before the pin, its objects might already be being removed, and its number might
            // be another file's by now.
            match self.find_ours(entry, doing, still, &stat)? {
                None => return Ok(None),
                Some(Found::Pinned(pin)) if entry.stat().is_ok_and(|now| now.st_ino == pin.ino) => {
                    return Ok(Some(pin));
                }
                Some(_) => {}
            }
        }
        Err(Errno::BUSY).explain(doing, entry.path)
    }

    /// The file that was just seen at an entry, `still` being held; `None` if it has no record.
    fn find_ours(
        &self,
        entry: &EntryRef<'_>,
        doing: &str,
        still: RwLockReadGuard<'_, ()>,
        stat: &Stat,
    ) -> Outcome<Option<Found<'_>>> {
        if kind_of(stat) == Some(NodeKind::File) {
            match self.pin(stat.st_ino, false) {
                Found::Absent => {}
                known => return Ok(Some(known)),
            }
        }
        let fd = self.dir.disk.open_known(&still, entry.directory(), entry.name, stat).explain(doing, entry.path)?;
        drop(still);
        match self.read_in(fd) {
            Ok((file, _)) => Ok(Some(self.insert_pinned(file, entry.path, false))),
            Err(BadRecord::Missing) => Ok(None),
            Err(bad) => Err(bad_record(bad, &format!("cannot {doing} {}", show(entry.path)))),
        }
    }

    /// Removes a name of anything but a directory; how many its node has left.
    pub(super) fn unlink(&self, by: By<'_>, path: &[u8]) -> Outcome<u32> {
        let doing = "remove";
        let entry = self.dir.entry(path).and_then(|entry| entry.ok_or(Errno::ISDIR)).explain(doing, path)?;
        let _name = self.names.hold(&entry).explain(doing, path)?;
        let still = self.dir.disk.without_specials();
        let stat = entry.stat().explain(doing, path)?;
        if kind_of(&stat) == Some(NodeKind::Dir) {
            return Err(Errno::ISDIR).explain(doing, path);
        }
        let undone = self.changes.begin(&self.dir, by, stat.st_ino)?;
        let pin = match kind_of(&stat) {
            Some(NodeKind::File) => match self.find_ours(&entry, doing, still, &stat)? {
                // It has the name still, which nobody else takes away while that is held.
                Some(Found::Pinned(pin)) => Some(pin),
                Some(_) => self.pin_ours(&entry, doing)?,
                None => None,
            },
            _ => None,
        };
        let left = match pin {
            Some(pin) => self.orphan_by_rename(&pin, &entry),
            None => self.dir.disk.unlink(entry.directory(), entry.name).map(|()| links_but_one(&stat)),
        };
        left.explain(doing, path).inspect(|_| undone.done())
    }

    /// Moves a pinned file's name to `orphans/` in one step, which works on a full disk too.
    fn orphan_by_rename(&self, pin: &Pin<'_>, entry: &EntryRef<'_>) -> rustix::io::Result<u32> {
        let (disk, orphans, name) = (&self.dir.disk, &self.dir.orphans, key_name(pin.key));
        let _links = pin.links.lock();
        match disk.rename(entry.directory(), entry.name, orphans, name.as_bytes(), true) {
            // The same file: a rename would leave both names.
            Err(Errno::EXIST) => disk.unlink(entry.directory(), entry.name)?,
            other => other?,
        }
        self.lost_a_name(pin)
    }

    /// Gives a pinned file a name in `orphans/` before `replace` takes the one at `entry`.
    fn orphan_by_link(
        &self,
        pin: &Pin<'_>,
        entry: &EntryRef<'_>,
        replace: impl FnOnce() -> rustix::io::Result<()>,
    ) -> rustix::io::Result<u32> {
        let (disk, orphans, name) = (&self.dir.disk, &self.dir.orphans, key_name(pin.key));
        let _links = pin.links.lock();
        match disk.link(entry.directory(), entry.name, orphans, name.as_bytes()) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        if let Err(errno) = replace() {
            disk.unlink(orphans, name.as_bytes())?;
            return Err(errno);
        }
        self.lost_a_name(pin)
    }

    /// Makes a pinned file an orphan unless it has other names; how many it has. Call under its `links` lock.
    fn lost_a_name(&self, pin: &Pin<'_>) -> rustix::io::Result<u32> {
        let ours = 1 + u64::from(self.opens.mark_of(pin.ino).is_some());
        let left = links(&rustix::fs::fstat(&pin.fd)?).saturating_sub(ours);
        match left {
            0 => self.opens.set_removed(pin.ino),
            // What is left in `orphans/` is found as what it is, then or at the next start.
            _ => {
                if let Err(error) = self.dir.disk.unlink(&self.dir.orphans, key_name(pin.key).as_bytes()) {
                    tracing::warn!(key = pin.key.0, %error, "a name in orphans/ could not be removed; tried again at once");
                    self.background.push(Job::Reap(pin.key), Duration::ZERO);
                }
            }
        }
        Ok(u32::try_from(left).unwrap_or(u32::MAX))
    }

    /// Renames; a replaced file is removed like any other. Of what was replaced, if anything was: how many names it has
    /// left. `whiteout`: the old name is that of a new device 0/0, which belongs to the user that the server runs as.
    pub(super) fn rename(
        &self,
        by: By<'_>,
        from: &[u8],
        to: &[u8],
        no_replace: bool,
        whiteout: bool,
    ) -> Outcome<Option<u32>> {
        let doing = "rename";
        let source = self.dir.entry(from).and_then(|entry| entry.ok_or(Errno::BUSY)).explain(doing, from)?;
        let target = self.dir.entry_beside(&source, to).and_then(|entry| entry.ok_or(Errno::BUSY));
        let target = target.explain("rename to", to)?;
        let _names = self.names.hold_both(&source, &target).explain(doing, from)?;
        for _ in 0..TRIES {
            let moved = source.stat().explain(doing, from)?;
            let replaced = match target.stat() {
                Err(Errno::NOENT) => None,
                other => Some(other.explain("rename to", to)?),
            };
            let undone = self.changes.begin(&self.dir, by, moved.st_ino)?;
            let from_dir = kind_of(&moved) == Some(NodeKind::Dir);
            let is_special = !matches!(kind_of(&moved), Some(NodeKind::File | NodeKind::Dir | NodeKind::Symlink));
            let plain = |no_replace| {
                let _special = (is_special || whiteout).then(|| self.dir.disk.with_specials());
                let rename = if whiteout { Disk::rename_leaving_whiteout } else { Disk::rename };
                rename(&self.dir.disk, source.directory(), source.name, target.directory(), target.name, no_replace)
            };
            let _walked = self.walks.rename(&self.dir.disk, &[(&source, &moved)], &*self.options.skipped);
            let result = match replaced {
                // A name created meanwhile must not be replaced unchecked.
                None => plain(true).map(|()| None),
                Some(_) if no_replace => Err(Errno::EXIST),
                Some(there) if there.st_ino == moved.st_ino => {
                    undone.done();
                    return Ok(None);
                }
                Some(there) => match kind_of(&there) {
                    Some(NodeKind::Dir) if !from_dir => Err(Errno::ISDIR),
                    Some(NodeKind::File) if !from_dir => match self.pin_ours(&target, doing)? {
                        Some(pin) => self.orphan_by_link(&pin, &target, || plain(false)).map(Some),
                        None => plain(false).map(|()| None),
                    },
                    Some(NodeKind::Dir) => plain(false).map(|()| None),
                    _ => plain(false).map(|()| Some(links_but_one(&there))),
                },
            };
            match result {
                Err(Errno::EXIST) if replaced.is_none() && !no_replace => continue,
                Ok(left) => {
                    undone.done();
                    self.opens.moved(moved.st_ino, to);
                    return Ok(left);
                }
                Err(errno) => {
                    return Err(errno).explain(doing, from).map_err(|mut fault| {
                        fault.message = format!("{} (the new name is {})", fault.message, show(to));
                        fault
                    });
                }
            }
        }
        Err(Errno::BUSY).explain(doing, from)
    }

    /// Removes an empty directory.
    pub(super) fn rmdir(&self, by: By<'_>, path: &[u8]) -> Outcome<()> {
        let doing = "remove";
        let entry = self.dir.entry(path).and_then(|entry| entry.ok_or(Errno::BUSY)).explain(doing, path)?;
        let _name = self.names.hold(&entry).explain(doing, path)?;
        let undone = self.changes.begin(&self.dir, by, entry.stat().explain(doing, path)?.st_ino)?;
        self.dir.disk.remove_dir(entry.directory(), entry.name).explain(doing, path)?;
        undone.done();
        Ok(())
    }

    /// Makes all removals so far durable. If a file's objects were removed before that, a power failure could bring
    /// back its name without its data. For a file replaced by a rename, preventing that is the purpose of the rename.
    pub(super) fn sync_removals(&self) -> rustix::io::Result<()> {
        let disk = &self.dir.disk;
        match disk.ordered {
            true => disk.sync("sync_removals", &self.dir.orphans),
            false => disk.sync_file_system("sync_all_removals", &self.dir.orphans),
        }
    }

    /// Removes the objects of files without names and openers, then the files. Their removals are durable. A result for
    /// each, false if there was nothing to be removed yet; the data servers are asked once for all, and not those that do not
    /// answer, unless it `tries` whether they do.
    pub(super) fn reap(&self, keys: &[FileKey], tries: bool) -> Vec<Result<bool, Stopped>> {
        let claimed: Vec<_> = keys.iter().map(|key| self.claim_orphan(*key)).collect();
        let is_whole = |file: &Arc<OpenFile>| Ok(links(&rustix::fs::fstat(&file.fd)?) > 1 + self.is_marked(file));
        // A file that still has a name is no orphan: a removal failed half-way and could not be undone.
        let whole: Vec<Option<rustix::io::Result<bool>>> =
            claimed.iter().map(|claimed| claimed.as_ref().ok()?.as_ref().map(is_whole)).collect();
        let groups: Vec<Group> = claimed
            .iter()
            .map(|claimed| claimed.as_ref().ok().and_then(Option::as_ref).map(|file| Group::of(file)))
            .map(Option::unwrap_or_default)
            .collect();
        let is_asked: Vec<bool> = groups.iter().map(|group| self.background.may_ask(group, tries)).collect();
        let orphans = claimed.iter().zip(&whole).zip(&is_asked);
        let orphans = orphans.filter(|((_, whole), is_asked)| matches!(whole, Some(Ok(false))) && **is_asked);
        let orphans: Vec<_> = orphans.filter_map(|((claimed, _), _)| claimed.as_ref().ok()?.as_ref()).collect();
        let files = orphans.iter().flat_map(|file| [(file.key, file.layout)].into_iter().chain(*file.spare.lock()));
        let files: Vec<_> = files.collect();
        let mut removed = if files.is_empty() { Vec::new() } else { self.objects.unlink(&files) }.into_iter();
        let results = claimed.into_iter().zip(whole).zip(groups.into_iter().zip(is_asked));
        let results = results.map(|((claimed, whole), (group, is_asked))| {
            let claimed = claimed.map_err(|failure| Stopped::by(failure, Group::default()))?;
            let (Some(file), Some(whole)) = (claimed, whole) else { return Ok(false) };
            if !is_asked && matches!(whole, Ok(false)) {
                self.forget(file.ino);
                return Err(Stopped::Away(group, None));
            }
            let result = whole.map_err(Failure::from).and_then(|is_whole| match is_whole {
                true => {
                    self.dir.disk.unlink(&self.dir.orphans, key_name(file.key).as_bytes())?;
                    Ok(true)
                }
                false => {
                    let of_file = 1 + usize::from(file.spare.lock().is_some());
                    let removed: Vec<_> = removed.by_ref().take(of_file).collect();
                    if removed.len() < of_file {
                        // Others have found out that data servers do not answer, perhaps none of its own.
                        self.background.push(Job::Reap(file.key), Duration::ZERO);
                        return Ok(false);
                    }
                    removed
                        .into_iter()
                        .try_for_each(|one| self.note_answer(&file, one).map_err(Failure::DataServers))?;
                    self.finish_removal(&file)?;
                    Ok(true)
                }
            });
            self.forget(file.ino);
            result.map_err(|failure| Stopped::by(failure, group))
        });
        results.collect()
    }

    fn is_marked(&self, file: &OpenFile) -> u64 {
        u64::from(self.opens.mark_of(file.ino).is_some())
    }

    /// The file behind an open descriptor, as the table keeps it, and its link count.
    pub(super) fn read_in(&self, fd: OwnedFd) -> Result<(OpenFile, u64), BadRecord> {
        let read_at = self.opens.switches();
        let stat = rustix::fs::fstat(&fd).map_err(BadRecord::Io)?;
        let record = Record::of(&self.dir.disk, &fd)?;
        Ok((OpenFile { read_at, ..OpenFile::of(stat.st_ino, fd, record) }, links(&stat)))
    }

    /// Claims a file without names; `None` if it is in use or gone, or clients may come back that have it open.
    fn claim_orphan(&self, key: FileKey) -> Result<Option<Arc<OpenFile>>, Failure> {
        let name = key_name(key);
        for _ in 0..TRIES {
            let fd = match self.dir.disk.open_file(&self.dir.orphans, name.as_bytes()) {
                Err(Errno::NOENT) => return Ok(None),
                other => other?,
            };
            let (file, _) = self.read_in(fd).map_err(|bad| Failure::Local(bad_record(bad, &name).message))?;
            let ino = file.ino;
            let claim = self.claim(file);
            if let Claim::Lost(wait) = claim {
                self.background.push(Job::Reap(key), wait);
                return Ok(None);
            }
            if let Claim::Claimed(file) = claim {
                // A file with other names is here only while it loses one. By now that may be over, and its link count
                // does not tell.
                let there = rustix::fs::statat(&self.dir.orphans, &name, AtFlags::SYMLINK_NOFOLLOW);
                match there {
                    Ok(stat) if stat.st_ino == ino => return Ok(Some(file)),
                    Ok(_) | Err(Errno::NOENT) => {}
                    Err(errno) => {
                        self.forget(ino);
                        return Err(errno.into());
                    }
                }
                self.forget(ino);
                return Ok(None);
            }
            // In use: the last opener queues the removal again if the table knows of it. An opener whose name was just
            // being removed may have added the file without knowing.
            match self.pin(ino, true) {
                Found::Pinned(pin) => {
                    if !self.note_removed(&pin) {
                        self.drop_stray_orphan(&pin)?;
                    }
                    return Ok(None);
                }
                Found::Removed => return Ok(None),
                Found::Absent => {}
            }
        }
        Err(Failure::Local(format!("{name} in orphans/ is never free")))
    }

    /// Removes the name in `orphans/` of a file in use that has others: its removal failed half-way.
    fn drop_stray_orphan(&self, pin: &Pin<'_>) -> rustix::io::Result<()> {
        let (orphans, name) = (&self.dir.orphans, key_name(pin.key));
        let _links = pin.links.lock();
        let ours = 1 + self.is_marked(pin);
        match rustix::fs::statat(orphans, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_ino == pin.ino && links(&stat) > ours => self.dir.disk.unlink(orphans, name.as_bytes()),
            _ => Ok(()),
        }
    }

    /// Removes a file whose objects are removed.
    fn finish_removal(&self, file: &OpenFile) -> Result<(), Failure> {
        if self.is_marked(file) > 0 {
            self.unmark(file)?;
        }
        Ok(self.dir.disk.unlink(&self.dir.orphans, key_name(file.key).as_bytes())?)
    }

    /// Reopens what a client had open before its connection or this server ended.
    pub(super) fn pin_for_reopen(&self, path: &[u8], key: FileKey) -> Outcome<Pin<'_>> {
        if let Ok(Some(entry)) = self.dir.entry(path)
            && let Ok(pin) = self.pin_at(&entry, "reopen")
            && pin.key == key
        {
            return Ok(pin);
        }
        if let Some(pin) = self.pin_orphan(key) {
            return Ok(pin);
        }
        // Another client renamed it; a marked file is still found by its mark.
        match self.pin_marked(key) {
            Ok(Some(pin)) if pin.key == key => Ok(pin),
            // ESTALE would have the client ask again, in a newer epoch.
            _ => Err(Errno::IDRM).explain("reopen", path),
        }
    }

    fn pin_orphan(&self, key: FileKey) -> Option<Pin<'_>> {
        let name = key_name(key);
        let fd = self.dir.disk.open_file(&self.dir.orphans, name.as_bytes()).ok()?;
        let (file, _) = self.read_in(fd).ok()?;
        let Found::Pinned(pin) = self.insert_pinned(file, b"", true) else { return None };
        // As in `pin_ours`: it must still have existed once it was pinned.
        self.note_removed(&pin).then_some(pin)
    }

    /// Records that a file, pinned other than by name, has no name left; false if it has one or is gone altogether.
    pub(super) fn note_removed(&self, pin: &Pin<'_>) -> bool {
        let _links = pin.links.lock();
        let there = rustix::fs::statat(&self.dir.orphans, key_name(pin.key), AtFlags::SYMLINK_NOFOLLOW);
        let ours = 1 + u64::from(self.opens.mark_of(pin.ino).is_some());
        let removed = there.is_ok_and(|stat| stat.st_ino == pin.ino && links(&stat) == ours);
        if removed {
            self.opens.set_removed(pin.ino);
        }
        removed
    }

    /// At start: entries of `writers/` and `orphans/` are interrupted operations.
    pub(super) fn recover(&self) -> rustix::io::Result<()> {
        self.recover_marks()?;
        // A file that is not marked has been settled.
        let is_marked = |key| rustix::fs::statat(&self.dir.writers, key_name(key), AtFlags::SYMLINK_NOFOLLOW).is_ok();
        self.changes.end_cuts_unless(&self.dir, is_marked);
        self.recover_orphans()
    }

    fn recover_marks(&self) -> rustix::io::Result<()> {
        let (disk, writers, orphans) = (&self.dir.disk, &self.dir.writers, &self.dir.orphans);
        for name in names_in(writers)? {
            let name = name?;
            if key_of(&name).is_none() {
                tracing::warn!(name = show(&name), "ignored an entry of writers/: its name is not a key");
                continue;
            };
            // One file that cannot be read must not keep the others from being served.
            let fd = match disk.open_file(writers, &name) {
                Ok(fd) => fd,
                // Others may pass, and an ignored mark would show an old size.
                Err(error @ (Errno::IO | Errno::UCLEAN | Errno::LOOP | Errno::ISDIR | Errno::OPNOTSUPP)) => {
                    tracing::error!(name = show(&name), %error, "ignored an entry of writers/, which cannot be opened");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let (file, nlink) = match self.read_in(fd) {
                Ok(read) => read,
                Err(BadRecord::Missing) => {
                    // Its creation got no further than this.
                    disk.unlink(writers, &name)?;
                    continue;
                }
                Err(bad) => {
                    let error = bad_record(bad, &show(&name)).message;
                    tracing::error!(error, "ignored an entry of writers/");
                    continue;
                }
            };
            let (name, key) = (self.rename_old_mark(name, file.key)?, file.key);
            if nlink == 1 {
                // Created, but never linked into the name space.
                disk.rename(writers, &name, orphans, &name, true)?;
                continue;
            }
            self.opens.set_mark(file.ino, key, true);
            // Its writers may come back, and data they sent may still be on its way.
            self.opens.put_off_settling(file.ino, self.options.grace);
            self.background.push(Job::Settle(key), self.options.grace);
        }
        Ok(())
    }

    fn recover_orphans(&self) -> rustix::io::Result<()> {
        let (disk, orphans) = (&self.dir.disk, &self.dir.orphans);
        for name in names_in(orphans)? {
            let name = name?;
            let Some(key) = key_of(&name) else {
                tracing::warn!(name = show(&name), "ignored an entry of orphans/: its name is not a key");
                continue;
            };
            let stat = rustix::fs::statat(orphans, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            if links(&stat) > 1 + u64::from(self.opens.mark_of(stat.st_ino).is_some()) {
                // It still has a name: its removal got no further than this.
                disk.unlink(orphans, &name)?;
            } else {
                self.background.push(Job::Reap(key), self.options.grace);
            }
        }
        Ok(())
    }

    /// Finds the jobs that did not fit into the queue.
    pub(super) fn rescan(&self) -> rustix::io::Result<()> {
        let orphans = names_in(&self.dir.orphans)?.map(|name| name.map(|name| key_of(&name).map(Job::Reap)));
        let writers = names_in(&self.dir.writers)?.map(|name| name.map(|name| key_of(&name).map(Job::Settle)));
        let after = self.background.rescan_after();
        for (n, job) in orphans.chain(writers).enumerate().skip(after) {
            if job?.is_some_and(|job| !self.background.offer(job)) {
                // The next search goes on here: those before it may fail, be dropped, and take the room again each time.
                self.background.rescan_later(n);
                return Ok(());
            }
        }
        if after > 0 {
            self.background.rescan_later(0);
        }
        Ok(())
    }

    /// Files in `orphans/`, up to `max`.
    pub(super) fn count_orphans(&self, max: usize) -> usize {
        names_in(&self.dir.orphans).map_or(0, |names| names.take(max).count())
    }
}

/// Link count of a file, including our own names.
#[allow(clippy::useless_conversion, reason = "its width differs between architectures")]
pub(super) fn links(stat: &Stat) -> u64 {
    u64::from(stat.st_nlink)
}

/// The number of names of a node that lost one of these, and has none of ours.
fn links_but_one(stat: &Stat) -> u32 {
    u32::try_from(links(stat).saturating_sub(1)).unwrap_or(u32::MAX)
}

/// `what` names the file or the operation that failed.
pub(super) fn bad_record(bad: BadRecord, what: &str) -> super::Fault {
    let why = match bad {
        BadRecord::Missing => {
            let why = "not created by this server, or the metadata folder was restored without extended attributes";
            format!("{why}: restore it with them; what is another's, remove there and copy it in through a mount")
        }
        BadRecord::Unknown => "this program does not understand its record; a later version may".into(),
        BadRecord::Io(errno) => format!("its record cannot be read: {}", reason(errno)),
    };
    fault(Errno::IO, format!("{what}: {why}"))
}
