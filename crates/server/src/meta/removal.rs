//! How a file's last name goes, and the file after it: through `orphans/`, so that no crash loses track of its
//! objects and whoever has it open keeps it.
//!
//! A file that loses a name gets one in `orphans/` before, or by the same step. If it has no other left, it stays
//! there until nobody has it open; then that is made durable, its objects are removed, then its mark, then the
//! orphan. Whatever is found in `orphans/` at start was cut short: it is merely dropped when the file still has a
//! name, and removed otherwise after a grace in which clients may come back for it ([`Meta::pin_for_reopen`]).
//!
//! Names of files vanish under a lock of their own ([`NameLocks`]): what was looked at before a removal is
//! still what is removed.

use std::hash::{BuildHasher, BuildHasherDefault};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use impresario_wire::message::{FileKey, NodeKind};
use rustc_hash::FxHasher;
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

use super::care::{Failure, Job};
use super::disk::Disk;
use super::fault::{Explain, Outcome, fault, show};
use super::home::{key_name, key_of, names_in};
use super::lock;
use super::opens::{Found, OpenFile, Pin};
use super::record::{BadRecord, Record};
use super::service::Meta;
use super::tree::{Place, kind_of};

const STRIPES: usize = 256;
/// How often an operation starts anew because others changed the same name under it.
pub(super) const TRIES: usize = 100;

/// Locks for names that go; a name's lock is found by its folder and itself.
pub(super) struct NameLocks([Mutex<()>; STRIPES]);

impl Default for NameLocks {
    fn default() -> Self {
        NameLocks([const { Mutex::new(()) }; STRIPES])
    }
}

impl NameLocks {
    fn stripe(place: &Place<'_>) -> rustix::io::Result<usize> {
        let folder = rustix::fs::fstat(place.folder())?.st_ino;
        let hash = BuildHasherDefault::<FxHasher>::default().hash_one((folder, place.name));
        Ok((hash >> 32) as usize % STRIPES)
    }

    fn lock(&self, stripe: usize) -> Option<MutexGuard<'_, ()>> {
        self.0.get(stripe).map(lock)
    }

    pub(super) fn hold(&self, place: &Place<'_>) -> rustix::io::Result<impl Sized> {
        Ok(self.lock(Self::stripe(place)?))
    }

    /// Two names, in an order that is the same for everybody.
    fn hold_both(&self, one: &Place<'_>, other: &Place<'_>) -> rustix::io::Result<impl Sized> {
        let (a, b) = (Self::stripe(one)?, Self::stripe(other)?);
        let first = self.lock(a.min(b));
        Ok((first, (a != b).then(|| self.lock(a.max(b)))))
    }
}

impl Meta {
    /// Pins the file that a place names; it did so at a moment at which it was pinned.
    pub(super) fn pin_at(&self, place: &Place<'_>, doing: &str) -> Outcome<Pin<'_>> {
        let pin = self.pin_ours(place, doing)?;
        pin.ok_or_else(|| bad_record(BadRecord::Missing, &format!("cannot {doing} {}", show(place.path))))
    }

    /// The same; none when the file has no record: put there by hand, it has no objects to be taken care of.
    fn pin_ours(&self, place: &Place<'_>, doing: &str) -> Outcome<Option<Pin<'_>>> {
        for _ in 0..TRIES {
            let fd = self.home.disk.open_file(place.folder(), place.name).explain(doing, place.path)?;
            let stat = rustix::fs::fstat(&fd).explain(doing, place.path)?;
            if kind_of(&stat) != Some(NodeKind::File) {
                return Err(Errno::OPNOTSUPP).explain(doing, place.path);
            }
            match self.pin(stat.st_ino, false) {
                Found::Pinned(pin) => return Ok(Some(pin)),
                Found::Removed => continue,
                Found::Absent => {}
            }
            let file = match read_in(&self.home.disk, fd) {
                Ok((file, _)) => file,
                Err(BadRecord::Missing) => return Ok(None),
                Err(bad) => return Err(bad_record(bad, &format!("cannot {doing} {}", show(place.path)))),
            };
            let Found::Pinned(pin) = self.bring(file, place.path, false) else { continue };
            // Had it lost its name before it was pinned, its objects might be going already.
            if place.stat().is_ok_and(|now| now.st_ino == pin.ino) {
                return Ok(Some(pin));
            }
        }
        Err(Errno::BUSY).explain(doing, place.path)
    }

    /// Removes a name of a file or a symbolic link.
    pub(super) fn unlink(&self, path: &[u8]) -> Outcome<()> {
        let doing = "remove";
        let place = self.home.place(path).and_then(|place| place.ok_or(Errno::ISDIR)).explain(doing, path)?;
        let _name = self.names.hold(&place).explain(doing, path)?;
        let stat = place.stat().explain(doing, path)?;
        let remove = || self.home.disk.unlink(place.folder(), place.name);
        match kind_of(&stat) {
            Some(NodeKind::Dir) => Err(Errno::ISDIR).explain(doing, path),
            Some(NodeKind::File) => match self.pin_ours(&place, doing)? {
                Some(pin) => self.orphan_by_rename(&pin, &place).explain(doing, path),
                None => remove().explain(doing, path),
            },
            _ => remove().explain(doing, path),
        }
    }

    /// Moves a pinned file's name to `orphans/`: one step, and one that a full disk allows.
    fn orphan_by_rename(&self, pin: &Pin<'_>, place: &Place<'_>) -> rustix::io::Result<()> {
        let (disk, orphans, name) = (&self.home.disk, &self.home.orphans, key_name(pin.key));
        let _links = lock(&pin.links);
        match disk.rename(place.folder(), place.name, orphans, name.as_bytes(), true) {
            // The same file: a rename would leave both names.
            Err(Errno::EXIST) => disk.unlink(place.folder(), place.name)?,
            other => other?,
        }
        self.lost_a_name(pin)
    }

    /// Gives a pinned file a name in `orphans/` before `replace` takes the one at `place`.
    fn orphan_by_link(
        &self,
        pin: &Pin<'_>,
        place: &Place<'_>,
        replace: impl FnOnce() -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let (disk, orphans, name) = (&self.home.disk, &self.home.orphans, key_name(pin.key));
        let _links = lock(&pin.links);
        match disk.link(place.folder(), place.name, orphans, name.as_bytes()) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        if let Err(errno) = replace() {
            disk.unlink(orphans, name.as_bytes())?;
            return Err(errno);
        }
        self.lost_a_name(pin)
    }

    /// A pinned file is an orphan unless it has another name. Under its links.
    fn lost_a_name(&self, pin: &Pin<'_>) -> rustix::io::Result<()> {
        let ours = 1 + u64::from(self.opens.mark_of(pin.ino).is_some());
        if links(&rustix::fs::fstat(&pin.fd)?) > ours {
            return self.home.disk.unlink(&self.home.orphans, key_name(pin.key).as_bytes());
        }
        self.opens.set_removed(pin.ino);
        Ok(())
    }

    /// Renames; what is replaced goes like a removed file.
    pub(super) fn rename(&self, from: &[u8], to: &[u8], no_replace: bool) -> Outcome<()> {
        let doing = "rename";
        let source = self.home.place(from).and_then(|place| place.ok_or(Errno::BUSY)).explain(doing, from)?;
        let target = self.home.place(to).and_then(|place| place.ok_or(Errno::BUSY)).explain("rename to", to)?;
        let _names = self.names.hold_both(&source, &target).explain(doing, from)?;
        for _ in 0..TRIES {
            let moved = source.stat().explain(doing, from)?;
            let replaced = match target.stat() {
                Err(Errno::NOENT) => None,
                other => Some(other.explain("rename to", to)?),
            };
            let plain = |no_replace| {
                self.home.disk.rename(source.folder(), source.name, target.folder(), target.name, no_replace)
            };
            let from_dir = kind_of(&moved) == Some(NodeKind::Dir);
            let result = match replaced {
                // A name that comes up meanwhile must not be replaced without being looked at.
                None => plain(true),
                Some(_) if no_replace => Err(Errno::EXIST),
                Some(there) if there.st_ino == moved.st_ino => return Ok(()),
                Some(there) => match kind_of(&there) {
                    Some(NodeKind::Dir) if !from_dir => Err(Errno::ISDIR),
                    Some(NodeKind::File) if !from_dir => match self.pin_ours(&target, doing)? {
                        Some(pin) => self.orphan_by_link(&pin, &target, || plain(false)),
                        None => plain(false),
                    },
                    _ => plain(false),
                },
            };
            match result {
                Err(Errno::EXIST) if replaced.is_none() && !no_replace => continue,
                Ok(()) => {
                    self.opens.moved(moved.st_ino, to);
                    return Ok(());
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

    /// Removes an empty folder.
    pub(super) fn rmdir(&self, path: &[u8]) -> Outcome<()> {
        let place = self.home.place(path).and_then(|place| place.ok_or(Errno::BUSY)).explain("remove", path)?;
        self.home.disk.remove_dir(place.folder(), place.name).explain("remove", path)
    }

    /// Makes the removals so far durable. Were a file's objects removed before that, a power failure could bring
    /// back its name without its data; for a file that another was renamed over, that is what the rename was for.
    pub(super) fn sync_removals(&self) -> rustix::io::Result<()> {
        let disk = &self.home.disk;
        if disk.ordered { disk.sync(&self.home.orphans) } else { disk.sync_file_system(&self.home.orphans) }
    }

    /// Removes the objects of a file without names and openers, then the file. Its removal is durable.
    pub(super) fn reap(&self, key: FileKey) -> Result<(), Failure> {
        let name = key_name(key);
        for _ in 0..TRIES {
            let fd = match self.home.disk.open_file(&self.home.orphans, name.as_bytes()) {
                Err(Errno::NOENT) => return Ok(()),
                other => other?,
            };
            let (file, _) =
                read_in(&self.home.disk, fd).map_err(|bad| Failure::Local(bad_record(bad, &name).message))?;
            let ino = file.ino;
            if let Some(file) = self.claim(file) {
                let result = self.reap_claimed(&file);
                self.forget(ino);
                return result;
            }
            // In use: whoever leaves it last asks again, if it is known to be removed. One that opened it by a name
            // that was just going may have brought it in without knowing.
            match self.pin(ino, true) {
                Found::Pinned(pin) => {
                    self.note_removed(&pin);
                    return Ok(());
                }
                Found::Removed => return Ok(()),
                Found::Absent => {}
            }
        }
        Err(Failure::Local(format!("{name} in orphans/ is never free")))
    }

    fn reap_claimed(&self, file: &OpenFile) -> Result<(), Failure> {
        let marked = self.opens.mark_of(file.ino).is_some();
        // One that still has a name is no orphan: a removal failed half way and could not be undone then.
        if links(&rustix::fs::fstat(&file.fd)?) <= 1 + u64::from(marked) {
            self.heard(self.objects.unlink(file.key, &file.layout)).map_err(Failure::DataServers)?;
            if marked {
                self.unmark(file)?;
            }
        }
        Ok(self.home.disk.unlink(&self.home.orphans, key_name(file.key).as_bytes())?)
    }

    /// Opens anew what a client had open before its connection or this server went.
    pub(super) fn pin_for_reopen(&self, path: &[u8], key: FileKey) -> Outcome<Pin<'_>> {
        if let Ok(Some(place)) = self.home.place(path)
            && let Ok(pin) = self.pin_at(&place, "reopen")
            && pin.key == key
        {
            return Ok(pin);
        }
        if let Some(pin) = self.pin_orphan(key) {
            return Ok(pin);
        }
        // Somebody else renamed it; while it is marked it is found all the same.
        match self.pin_marked(key) {
            Ok(Some(pin)) => Ok(pin),
            _ => Err(Errno::STALE).explain("reopen", path),
        }
    }

    fn pin_orphan(&self, key: FileKey) -> Option<Pin<'_>> {
        let name = key_name(key);
        let fd = self.home.disk.open_file(&self.home.orphans, name.as_bytes()).ok()?;
        let (file, _) = read_in(&self.home.disk, fd).ok()?;
        let Found::Pinned(pin) = self.bring(file, b"", true) else { return None };
        // As in `pin_ours`: it must still have been there once it was pinned.
        self.note_removed(&pin).then_some(pin)
    }

    /// Notes of a file pinned by another way than its name that it has none any more; false when it has, or is
    /// gone altogether.
    pub(super) fn note_removed(&self, pin: &Pin<'_>) -> bool {
        let _links = lock(&pin.links);
        let there = rustix::fs::statat(&self.home.orphans, key_name(pin.key), AtFlags::SYMLINK_NOFOLLOW);
        let ours = 1 + u64::from(self.opens.mark_of(pin.ino).is_some());
        let removed = there.is_ok_and(|stat| stat.st_ino == pin.ino && links(&stat) == ours);
        if removed {
            self.opens.set_removed(pin.ino);
        }
        removed
    }

    /// At start: what `writers/` and `orphans/` hold was cut short.
    pub(super) fn recover(&self) -> rustix::io::Result<()> {
        self.recover_marks()?;
        self.recover_orphans()
    }

    fn recover_marks(&self) -> rustix::io::Result<()> {
        let (disk, writers, orphans) = (&self.home.disk, &self.home.writers, &self.home.orphans);
        for name in names_in(writers)? {
            let name = name?;
            let Some(key) = key_of(&name) else {
                tracing::warn!(name = show(&name), "left alone in writers/: not a key");
                continue;
            };
            let fd = disk.open_file(writers, &name)?;
            let (file, nlink) = match read_in(&self.home.disk, fd) {
                Ok(read) => read,
                Err(BadRecord::Missing) => {
                    // Its creation got no further than this.
                    disk.unlink(writers, &name)?;
                    continue;
                }
                Err(bad) => {
                    let error = bad_record(bad, &show(&name)).message;
                    tracing::error!(error, "left alone in writers/");
                    continue;
                }
            };
            if nlink == 1 {
                // Made, but never given its name.
                disk.rename(writers, &name, orphans, &name, true)?;
                continue;
            }
            self.opens.set_mark(file.ino, key);
            // Its writers may come back, and what they had sent may still be on its way.
            self.opens.put_off_settling(file.ino, self.options.grace);
            self.care.push(Job::Settle(key), self.options.grace);
        }
        Ok(())
    }

    fn recover_orphans(&self) -> rustix::io::Result<()> {
        let (disk, orphans) = (&self.home.disk, &self.home.orphans);
        for name in names_in(orphans)? {
            let name = name?;
            let Some(key) = key_of(&name) else {
                tracing::warn!(name = show(&name), "left alone in orphans/: not a key");
                continue;
            };
            let stat = rustix::fs::statat(orphans, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            if links(&stat) > 1 + u64::from(self.opens.mark_of(stat.st_ino).is_some()) {
                // It still has a name: its removal got no further than this.
                disk.unlink(orphans, &name)?;
            } else {
                self.care.push(Job::Reap(key), self.options.grace);
            }
        }
        Ok(())
    }

    /// Looks for what did not fit into the queue.
    pub(super) fn rescan(&self) -> Result<(), Failure> {
        for name in names_in(&self.home.orphans)? {
            if let Some(key) = key_of(&name?) {
                self.care.push(Job::Reap(key), Duration::ZERO);
            }
        }
        for name in names_in(&self.home.writers)? {
            if let Some(key) = key_of(&name?) {
                self.care.push(Job::Settle(key), Duration::ZERO);
            }
        }
        Ok(())
    }

    /// Files in `orphans/`, up to `max`.
    pub(super) fn count_orphans(&self, max: usize) -> usize {
        names_in(&self.home.orphans).map_or(0, |names| names.take(max).count())
    }
}

/// The file that an open descriptor stands for, as the table keeps it, with its number of names.
pub(super) fn read_in(disk: &Disk, fd: OwnedFd) -> Result<(OpenFile, u64), BadRecord> {
    let stat = rustix::fs::fstat(&fd).map_err(BadRecord::Io)?;
    let record = Record::of(disk, &fd)?;
    let file = OpenFile {
        ino: stat.st_ino,
        key: record.key,
        layout: record.layout,
        fd,
        gate: Mutex::default(),
        links: Mutex::default(),
        seen: Mutex::new(record.seen),
    };
    Ok((file, links(&stat)))
}

/// Number of names of a file, ours among them.
#[allow(clippy::useless_conversion, reason = "its width differs between architectures")]
fn links(stat: &Stat) -> u64 {
    u64::from(stat.st_nlink)
}

/// `what` names the file or says what could not be done with it.
pub(super) fn bad_record(bad: BadRecord, what: &str) -> super::Fault {
    let why = match bad {
        BadRecord::Missing => "not made by this server; remove it there, and bring it in through a mount".into(),
        BadRecord::Unknown => "its record is none that this program understands; a later one may".into(),
        BadRecord::Io(errno) => format!("its record cannot be read: {}", std::io::Error::from(errno)),
    };
    fault(Errno::IO, format!("{what}: {why}"))
}
