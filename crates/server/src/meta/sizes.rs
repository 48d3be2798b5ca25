//! Where a file's size is known: in the local file while the file has no writer, on the data servers while it is
//! marked.
//!
//! A *mark* is a second name of the file, `writers/<key>`. It is created before the first writer is admitted and
//! removed after the last one has closed and the size is settled, that is, asked from the data servers and set on the
//! local file. It survives a crash and stays true. The order of steps, and why an interruption after each is safe:
//!
//! - *mark*: noted in memory, linked, made durable; only then is the writer admitted. A mark without a writer is
//!   settled by the next access.
//! - *settle*: ask, set length, set time, note the objects' time and which there are ([`Record::seen`]), remove the mark. Repeating it
//!   changes nothing. Length and time must not become durable after the mark's removal: the journal keeps that order
//!   ([`Disk::ordered`]), elsewhere an fsync does.
//!   Where no writer has changed anything since the mark was made in this run, the local size is right still: nothing is asked or set.
//!   A writer says so when it closes ([`Left::Unwritten`]). One that says so of a file that it did change leaves that file with the
//!   size that it had before, until the next writer closes it.
//! - *truncate*: mark, truncate the objects, settle unless the file has writers.
//!
//! While a file is marked, its local length is the end of the ranges that were assigned to appends ([`super::append`]).
//!
//! A file that uses about as much storage as its size says has no note of it; of others the record has the number
//! ([`Seen::used_bytes`]), as it was when the size was settled.
//!
//! The local modification time holds while the objects' time equals the noted one. So a time set by hand stays until
//! the next write, whatever clocks the data servers have.
//!
//! [`Disk::ordered`]: super::disk::Disk::ordered
//! [`Left::Unwritten`]: super::opens::Left::Unwritten

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use impresario_base::lock::MutexGuard;
use impresario_wire::message::{Attr, Fault, FileKey, LaneState, NodeKind, ObjectInfo, SetTime, Target};
use rustix::fs::{AtFlags, Mode, Stat};
use rustix::io::Errno;

use super::background::{Failure, Group, Stopped};
use super::changes::By;
use super::directory::key_name;
use super::disk::PATH_FLAGS;
use super::disk::mtime_of;
use super::fault::{Explain, Outcome, data_fault, fault, show};
use super::opens::{Found, OpenFile, Pin, SessionId};
use super::record::{FILE_ATTRIBUTE, Record, Seen};
use super::removal::bad_record;
use super::service::Meta;
use super::tree::{EntryRef, check_path, full_bytes, has_used_bytes, local_attr};
use crate::workers::waiting_elsewhere;

/// See [`Meta::enter`].
const GATE_PATIENCE: Duration = Duration::from_secs(1);
/// Largest number of files whose size only the data servers know; beyond it no more writers are admitted.
const MARKS_MAX: usize = 1 << 20;

impl Meta {
    /// Admits an open of a pinned file. True if this open marked it: until now the local size was right.
    pub(super) fn admit(&self, pin: &Pin<'_>, write: bool, path: &[u8]) -> Outcome<bool> {
        if !write {
            self.opens.admit(pin.ino, false)?;
            return Ok(false);
        }
        let _gate = self.enter(pin, "open for writing", path)?;
        self.end_relays(pin).explain("open for writing", path)?;
        self.settle_doubt(pin).map_err(|error| data_fault(&error, "open for writing", path))?;
        let fresh = self.mark(pin).explain("open for writing", path)?;
        self.opens.admit(pin.ino, true)?;
        Ok(fresh)
    }

    /// Waits for a file's gate. A caller that waited long because the data servers did not answer a previous holder
    /// fails instead of waiting for them again.
    pub(super) fn enter<'p>(&self, pin: &'p Pin<'_>, doing: &str, path: &[u8]) -> Outcome<MutexGuard<'p, ()>> {
        let began = Instant::now();
        // Whoever has it may be waiting for a data server, and so does who waits for it.
        let gate = pin.gate.try_lock().unwrap_or_else(|| waiting_elsewhere(|| pin.gate.lock()));
        let was_in_vain = || pin.unanswered.lock().is_some_and(|at| at >= began);
        if began.elapsed() >= GATE_PATIENCE && was_in_vain() {
            let why = "the data servers do not answer; see which with `impresario status`";
            return Err(fault(Errno::IO, format!("cannot {doing} {}: {why}", show(path))));
        }
        Ok(gate)
    }

    /// Asks the data servers about a file's objects.
    pub(super) fn ask(&self, file: &OpenFile) -> io::Result<ObjectInfo> {
        // Before they are asked: an object that is made meanwhile, and noted, is not one that the answer lacks.
        let made = file.seen.lock().made;
        // Its length cannot be known, and must not be taken for less.
        let lost = || Err(io::Error::new(io::ErrorKind::InvalidData, "a data server has lost its object of it"));
        match self.note_answer(file, self.objects.stat(file.key, &file.layout)) {
            Ok(objects) if made & !objects.made == 0 => Ok(objects),
            Ok(_) => lost(),
            // Those of a file without a name are removed when its openers have been away for too long.
            Err(error) if error.raw_os_error() == Some(libc::EIDRM) && !self.opens.is_removed(file.ino) => lost(),
            Err(error) => Err(error),
        }
    }

    /// Records whether the data servers of a file answered.
    pub(super) fn note_answer<T>(&self, file: &OpenFile, answer: io::Result<T>) -> io::Result<T> {
        match &answer {
            // What its client has given up was refused, or the client has to say whether it is to be done again.
            Err(error) if matches!(error.raw_os_error(), Some(Fault::FENCED | Fault::PATH_LOST)) => {}
            // It answered: what was asked for is more than it takes.
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {}
            // It answered: it has removed the file's object.
            Err(error) if error.raw_os_error() == Some(libc::EIDRM) => {}
            Ok(_) => {
                *file.unanswered.lock() = None;
                self.background.resume();
            }
            Err(_) => {
                *file.unanswered.lock() = Some(Instant::now());
                self.background.pause();
            }
        }
        answer
    }

    /// Marks a file durably; false if it was marked. Call under its gate.
    pub(super) fn mark(&self, file: &OpenFile) -> rustix::io::Result<bool> {
        let _links = file.links.lock();
        if self.opens.mark_of(file.ino).is_some() {
            return Ok(false);
        }
        let disk = &self.dir.disk;
        if self.opens.counts().marked >= MARKS_MAX {
            return Err(Errno::NFILE);
        }
        self.opens.set_mark(file.ino, file.key, false);
        let made = match disk.link_open(&file.fd, &self.dir.writers, &key_name(file.key)) {
            Err(Errno::EXIST) => {
                // Of whoever made it nothing is known.
                self.opens.note_written(file.ino);
                Ok(())
            }
            other => other,
        };
        match made.and_then(|()| disk.sync("sync_mark", &self.dir.writers)) {
            Ok(()) => Ok(true),
            Err(errno) => {
                let _ = disk.unlink(&self.dir.writers, key_name(file.key).as_bytes());
                self.opens.clear_mark(file.ino);
                Err(errno)
            }
        }
    }

    /// Removes a file's mark.
    pub(super) fn unmark(&self, file: &OpenFile) -> rustix::io::Result<()> {
        let _links = file.links.lock();
        let name = key_name(self.opens.mark_of(file.ino).unwrap_or(file.key));
        match self.dir.disk.unlink(&self.dir.writers, name.as_bytes()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        self.opens.clear_mark(file.ino);
        Ok(())
    }

    /// Settles a file; does nothing if it has writers, is unmarked or removed, or must wait. Nor if another one has its gate:
    /// that one has pinned it, and the last pin that goes has it settled.
    pub(super) fn settle(&self, pin: &Pin<'_>) -> Result<(), Failure> {
        pin.gate.try_lock().map_or(Ok(()), |gate| self.settle_held(pin, &gate))
    }

    pub(super) fn settle_held(&self, pin: &Pin<'_>, _gate: &MutexGuard<'_, ()>) -> Result<(), Failure> {
        let idle = self.opens.writers_of(pin.ino) == 0 && !self.opens.is_removed(pin.ino);
        if !idle || !self.opens.may_settle(pin.ino) || pin.is_relaid() {
            return Ok(());
        }
        self.remove_spare(pin)?;
        if !self.opens.is_unwritten(pin.ino) {
            self.settle_doubt(pin).map_err(Failure::DataServers)?;
            let objects = self.ask(pin).map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => Failure::Local(error.to_string()),
                _ => Failure::DataServers(error),
            })?;
            self.copy_to_local(pin, &objects, objects.size)?;
        }
        if !self.dir.disk.ordered {
            self.dir.disk.sync("sync_settled", &pin.fd)?;
        }
        Ok(self.unmark(pin)?)
    }

    /// Copies the time of the objects to the local file, and sets its length. Call under its gate.
    fn copy_to_local(&self, file: &OpenFile, objects: &ObjectInfo, len_bytes: u64) -> rustix::io::Result<()> {
        let disk = &self.dir.disk;
        let stat = rustix::fs::fstat(&file.fd)?;
        let seen = *file.seen.lock();
        let cut = u64::try_from(stat.st_size) != Ok(len_bytes);
        if cut {
            disk.set_len(&file.fd, len_bytes)?;
        }
        let written = objects.mtime != seen.mtime;
        let used_bytes = noted_bytes(file, objects);
        let has_block = if cut { rustix::fs::fstat(&file.fd)?.st_blocks } else { stat.st_blocks } > 0;
        let wants_block = match used_bytes {
            Some(_) => true,
            // Any other is that of its attributes.
            None => has_block && seen.used_bytes.is_none(),
        };
        // Where the local file system cannot, the file is taken to use what its size says.
        if has_block != wants_block
            && let Err(errno) = disk.set_block(&file.fd, wants_block)
        {
            tracing::debug!(key = file.key.0, %errno, "what a file uses cannot be shown");
        }
        if cut || written || has_block != wants_block {
            let mtime = if written { objects.mtime } else { mtime_of(&stat) };
            disk.set_times(&file.fd, None, Some(SetTime::At(mtime)))?;
        }
        let is_other = objects.made != seen.made || used_bytes != seen.used_bytes;
        if written || is_other { self.note_seen(file, objects) } else { Ok(()) }
    }

    /// Records the objects' current time: from now on the local time holds.
    fn note_seen(&self, file: &OpenFile, objects: &ObjectInfo) -> rustix::io::Result<()> {
        let used_bytes = noted_bytes(file, objects);
        self.remember(file, Seen { mtime: objects.mtime, made: objects.made, used_bytes })
    }

    pub(super) fn remember(&self, file: &OpenFile, seen: Seen) -> rustix::io::Result<()> {
        let record = Record { key: file.key, layout: file.layout, seen, spare: *file.spare.lock() };
        self.dir.disk.set_attribute(&file.fd, FILE_ATTRIBUTE, &record.encode())?;
        *file.seen.lock() = seen;
        Ok(())
    }

    /// Settles a marked file that may not be in use; false if it has to stay marked. `tries`: whether its data servers answer again.
    pub(super) fn settle_by_key(&self, key: FileKey, tries: bool) -> Result<bool, Stopped> {
        let found = self.pin_marked(key).map_err(|failure| Stopped::by(failure, Group::default()))?;
        let Some(pin) = found else { return Ok(false) };
        let group = Group::of(&pin);
        if !self.background.may_ask(&group, tries) {
            return Err(Stopped::Away(group, None));
        }
        // By then it may have no spare objects any more.
        self.settle(&pin).map_err(|failure| Stopped::by(failure, Group::of(&pin)))?;
        Ok(self.opens.mark_of(pin.ino).is_none())
    }

    /// Pins a marked file by its mark; `None` if it has no mark any more or is removed.
    pub(super) fn pin_marked(&self, key: FileKey) -> Result<Option<Pin<'_>>, Failure> {
        // Only the openers of an orphan need its size.
        if rustix::fs::statat(&self.dir.orphans, key_name(key), AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Ok(None);
        }
        let fd = match self.dir.disk.open_file(&self.dir.writers, key_name(key).as_bytes()) {
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let (file, _) = self.read_in(fd).map_err(|bad| Failure::Local(bad_record(bad, &key_name(key)).message))?;
        Ok(self.pin_if_marked(file, key))
    }

    /// Pins a file that was found by this mark; `None` if it has lost the mark or its last name meanwhile.
    fn pin_if_marked(&self, file: OpenFile, mark: FileKey) -> Option<Pin<'_>> {
        match self.insert_pinned(file, b"", false) {
            // The mark goes last when a removed file goes for good: a file that still has it has its objects, and keeps
            // them while it is pinned.
            Found::Pinned(pin) if !self.note_removed(&pin) && self.opens.mark_of(pin.ino) == Some(mark) => Some(pin),
            _ => None,
        }
    }

    /// Whether the data servers have to be asked about a node, as far as can be told now. A look at its name is much less than
    /// the way of a call to another thread and back.
    pub(super) fn is_written(&self, session: SessionId, target: &Target) -> bool {
        match target {
            Target::Path(path) => self.is_written_at(path),
            Target::Handle(handle) => {
                let held = self.held_by(session, *handle);
                held.is_some_and(|(file, _)| self.opens.mark_of(file.ino).is_some())
            }
        }
    }

    /// The same by its name.
    pub(super) fn is_written_at(&self, path: &[u8]) -> bool {
        if self.opens.counts().marked == 0 || check_path(path).is_err() {
            return false;
        }
        let Ok(Some(entry)) = self.dir.entry(path) else { return false };
        entry.stat().is_ok_and(|stat| self.opens.mark_of(stat.st_ino).is_some())
    }

    /// Attributes of an entry, asked from the data servers when they know better.
    pub(super) fn attr_at(&self, entry: &EntryRef<'_>) -> Outcome<Attr> {
        self.attr_by(entry.path, || entry.stat(), |ino| self.noted_at(entry.directory(), entry.name, ino))
    }

    /// What the record of a file notes of the storage it uses, if the name is still that of this node.
    pub(super) fn noted_at(&self, directory: impl AsFd, name: &[u8], ino: u64) -> Option<u64> {
        let node = rustix::fs::openat(directory, name, PATH_FLAGS, Mode::empty()).ok()?;
        let is_same = rustix::fs::fstat(&node).is_ok_and(|stat| stat.st_ino == ino);
        if is_same { self.noted_of(node) } else { None }
    }

    /// The same of a node that is open, with `O_PATH` at least.
    pub(super) fn noted_of(&self, node: impl AsFd) -> Option<u64> {
        Record::of(&self.dir.disk, node).ok()?.seen.used_bytes
    }

    /// The same, for the node that `look` examines; `noted` reads what is noted of the storage used by a file.
    pub(super) fn attr_by(
        &self,
        path: &[u8],
        look: impl Fn() -> rustix::io::Result<Stat>,
        noted: impl Fn(u64) -> Option<u64>,
    ) -> Outcome<Attr> {
        // The file may be settled or marked between two attempts, but not for ever.
        for _ in 0..100 {
            let doing = "get the attributes of";
            let stat = look().explain(doing, path)?;
            let attr = local_attr(&stat).explain(doing, path)?;
            let Some(key) = self.opens.mark_of(attr.ino) else {
                if attr.kind != NodeKind::File || attr.nlink == 1 {
                    return Ok(with_used_bytes(attr, &stat, noted));
                }
                // A second name may be one of ours that is being added or removed.
                match self.pin(attr.ino, false) {
                    Found::Pinned(pin) => return self.local_attr_of(&pin, path),
                    Found::Removed => continue,
                    Found::Absent => {}
                }
                let same = |stat: Stat| {
                    local_attr(&stat).is_ok_and(|again| (again.ino, again.nlink) == (attr.ino, attr.nlink))
                };
                if look().is_ok_and(same) {
                    return Ok(with_used_bytes(attr, &stat, noted));
                }
                continue;
            };
            let pinned = match self.pin(attr.ino, false) {
                Found::Pinned(pin) => Some(pin),
                _ => self.pin_marked(key).map_err(|failure| failed(failure, path))?,
            };
            if let Some(pin) = pinned.filter(|pin| pin.ino == attr.ino) {
                return self.attr_of(&pin, path);
            }
        }
        Err(fault(Errno::BUSY, format!("cannot get the attributes of {}: it keeps changing", show(path))))
    }

    /// Attributes of a pinned file.
    pub(super) fn attr_of(&self, pin: &Pin<'_>, path: &[u8]) -> Outcome<Attr> {
        let ask = self.opens.mark_of(pin.ino).is_some();
        if ask && self.opens.writers_of(pin.ino) == 0 && !self.background.is_paused() {
            // The holder of the gate may be waiting for data servers; asking them here is no slower.
            if let Some(gate) = pin.gate.try_lock() {
                self.settle_held(pin, &gate).or_else(|failure| self.unless_local(failure, path))?;
            }
        }
        if self.opens.mark_of(pin.ino).is_none() {
            return self.local_attr_of(pin, path);
        }
        // Before they are asked: once the file is settled, the local time is newer than their answer.
        let seen = *pin.seen.lock();
        let objects = self.ask(pin).map_err(|error| data_fault(&error, "get the attributes of", path))?;
        let mut attr = self.local_attr_of(pin, path)?;
        (attr.size, attr.used_bytes) = (objects.size, objects.used_bytes);
        if objects.mtime != seen.mtime {
            attr.mtime = objects.mtime;
            attr.ctime = attr.ctime.max(objects.mtime);
        }
        Ok(attr)
    }

    /// A read of attributes ignores a local failure to settle and asks the data servers.
    fn unless_local(&self, failure: Failure, path: &[u8]) -> Outcome<()> {
        match failure {
            Failure::Local(error) => {
                self.background.complaints.counted("size", |times| {
                    tracing::error!(path = show(path), times, error, "the size cannot be settled");
                });
                Ok(())
            }
            Failure::TooLong(error) => {
                self.background.complaints.counted("long size", |times| {
                    tracing::warn!(path = show(path), times, error, "the size cannot be settled");
                });
                Ok(())
            }
            Failure::DataServers(_) => Err(failed(failure, path)),
        }
    }

    /// Attributes of a pinned file as the local file system has them, without our own names.
    pub(super) fn local_attr_of(&self, pin: &Pin<'_>, path: &[u8]) -> Outcome<Attr> {
        let _links = pin.links.lock();
        let stat = rustix::fs::fstat(&pin.fd);
        let mut attr = stat.and_then(|stat| local_attr(&stat)).explain("get the attributes of", path)?;
        let ours = u32::from(self.opens.mark_of(pin.ino).is_some());
        attr.nlink = if self.opens.is_removed(pin.ino) { 0 } else { attr.nlink.saturating_sub(ours).max(1) };
        attr.used_bytes = pin.seen.lock().used_bytes.unwrap_or(attr.used_bytes);
        Ok(attr)
    }

    /// Makes certain that no truncation is still to be done that failed as far as its client knows. Call under the file's
    /// gate. Its client itself revokes it with whatever it does next; this is for all others.
    fn settle_doubt(&self, pin: &Pin<'_>) -> io::Result<()> {
        let Some(who) = self.opens.doubt_of(pin.ino) else { return Ok(()) };
        self.note_answer(pin, self.objects.revoke(&who, pin.key, &pin.layout))?;
        self.opens.set_doubt(pin.ino, None);
        Ok(())
    }

    /// Sets the length of a pinned file. Gives the states of the data servers that have done it.
    pub(super) fn truncate(&self, by: By<'_>, pin: &Pin<'_>, len_bytes: u64, path: &[u8]) -> Outcome<Vec<LaneState>> {
        let doing = "set the length of";
        if i64::try_from(len_bytes).is_err() {
            return Err(Errno::FBIG).explain(doing, path);
        }
        let gate = self.enter(pin, doing, path)?;
        self.truncate_held(by, pin, len_bytes, path, &gate)
    }

    /// Cuts off what a failed write up to `end` has added behind `len_bytes`, if the caller's open is the only writer's.
    pub(super) fn cut_back(&self, by: By<'_>, pin: &Pin<'_>, len_bytes: u64, end: u64) -> Outcome<()> {
        let (doing, path) = ("take back a failed write to", self.opens.path_of(pin.ino));
        let gate = self.enter(pin, doing, &path)?;
        // No writer is admitted while the gate is held.
        if !self.opens.has_one_writer(pin.ino) {
            return Ok(());
        }
        let objects = self.ask(pin).map_err(|error| data_fault(&error, doing, &path))?;
        match objects.size > len_bytes && objects.size <= end {
            // The write that it takes back has failed as far as its client knows: there is nothing to sync.
            true => self.truncate_held(by, pin, len_bytes, &path, &gate).map(drop),
            false => Ok(()),
        }
    }

    fn truncate_held(
        &self,
        by: By<'_>,
        pin: &Pin<'_>,
        len_bytes: u64,
        path: &[u8],
        gate: &MutexGuard<'_, ()>,
    ) -> Outcome<Vec<LaneState>> {
        let (doing, who) = ("set the length of", by.who);
        self.end_relays(pin).explain(doing, path)?;
        let stat = rustix::fs::fstat(&pin.fd).explain(doing, path)?;
        // Nothing is cut: but a copy of the call may have been done by an earlier run, and cut something.
        let is_first = who.since == who.epoch;
        if self.opens.mark_of(pin.ino).is_none() && stat.st_size == 0 && len_bytes == 0 && is_first {
            let timed = self.dir.disk.set_times(&pin.fd, None, Some(SetTime::Now));
            return timed.map(|()| Vec::new()).explain(doing, path);
        }
        self.mark(pin).explain(doing, path)?;
        self.opens.note_written(pin.ino);
        // The same client revokes it by being in a newer epoch.
        let in_doubt = self.opens.doubt_of(pin.ino);
        if in_doubt.is_some_and(|older| older.client != who.client || older.epoch >= who.epoch) {
            self.settle_doubt(pin).map_err(|error| data_fault(&error, doing, path))?;
        }
        // What lies behind the new end is noted to be cut before it is, and until it is known beside the data.
        if u64::try_from(stat.st_size).unwrap_or(0) > len_bytes {
            self.changes.note_cut(&self.dir, pin.key, len_bytes).explain(doing, path)?;
        }
        self.opens.set_doubt(pin.ino, Some(*who));
        let cut = self.note_answer(pin, self.objects.truncate(who, pin.key, &pin.layout, len_bytes));
        let lanes = cut.map_err(|error| {
            self.changes.end_cut(&self.dir, pin.key);
            data_fault(&error, doing, path)
        })?;
        self.opens.set_doubt(pin.ino, None);
        self.changes.note_was_cut(&self.dir, by, &lanes);
        // Not before: it moves the local time, which from now on is not the file's.
        let noted = self.cut_assigned(pin, len_bytes).and_then(|()| {
            let seen = *pin.seen.lock();
            match (len_bytes, seen.made) {
                // Without objects nothing else has the time.
                (0, 0) => self.dir.disk.set_times(&pin.fd, None, Some(SetTime::Now)),
                // An empty file misses nothing.
                (0, _) => self.remember(pin, Seen { made: 0, ..seen }),
                _ => Ok(()),
            }
        });
        if noted.is_ok() {
            self.changes.end_cut(&self.dir, pin.key);
        }
        // It is done, and must not be called undone: what is missing here is as after a crash at this point.
        if let Err(error) = noted {
            tracing::warn!(path = show(path), %error, "a new length could not be noted beside the file's data");
        }
        // The objects have their new length, and the mark says so. If they cannot be asked now, the next access asks
        // them.
        if let Err(failure) = self.settle_held(pin, gate) {
            tracing::warn!(path = show(path), ?failure, "the new length will be settled later");
        }
        Ok(lanes)
    }

    /// Called before a time is set by hand on a file whose objects may be newer: records the objects' time, so that the
    /// new time holds until the next write.
    pub(super) fn note_before_times(&self, pin: &Pin<'_>, path: &[u8]) -> Outcome<()> {
        let doing = "set the times of";
        let _gate = self.enter(pin, doing, path)?;
        if self.opens.mark_of(pin.ino).is_none() {
            return Ok(());
        }
        let objects = self.ask(pin).map_err(|error| data_fault(&error, doing, path))?;
        if objects.mtime == pin.seen.lock().mtime {
            return Ok(());
        }
        self.note_seen(pin, &objects).explain(doing, path)
    }

    /// Makes size, attributes and names of a pinned file durable.
    pub(super) fn sync(&self, pin: &Pin<'_>) -> Outcome<()> {
        let path = self.opens.path_of(pin.ino);
        let doing = "sync";
        self.changes.sync(&self.dir).explain(doing, &path)?;
        if self.opens.mark_of(pin.ino).is_some() {
            let _gate = self.enter(pin, doing, &path)?;
            let objects = self.ask(pin).map_err(|error| data_fault(&error, doing, &path))?;
            // Ranges that were assigned to appends may not be written yet.
            let assigned = self.assigned_end(pin, objects.size).explain(doing, &path)?;
            self.copy_to_local(pin, &objects, objects.size.max(assigned)).explain(doing, &path)?;
        }
        self.dir.disk.sync("sync", &pin.fd).explain(doing, &path)?;
        if self.opens.is_removed(pin.ino) {
            return Ok(());
        }
        // A journal that keeps the order has its other names with the file itself.
        let has_others = !self.dir.disk.ordered && self.local_attr_of(pin, &path)?.nlink > 1;
        match self.sync_names(&path, pin.ino) {
            Ok(true) if !has_others => Ok(()),
            // Paths are unknown, of other names or since a directory was moved: sync the whole file system.
            Ok(true) => self.dir.disk.sync_file_system("sync_all_names", &self.dir.names).explain(doing, &path),
            Ok(false) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                self.dir.disk.sync_file_system("sync_moved_names", &self.dir.names).explain(doing, &path)
            }
            Err(errno) => Err(errno).explain(doing, &path),
        }
    }

    /// Makes the name of a file and those of its directories durable; false if the path no longer names it.
    fn sync_names(&self, path: &[u8], ino: u64) -> rustix::io::Result<bool> {
        let Some(entry) = self.dir.entry(path)? else { return Ok(false) };
        if entry.stat()?.st_ino != ino {
            return Ok(false);
        }
        let directory = super::tree::split(path).map_or(&b""[..], |(directory, _)| directory);
        self.sync_directories(directory)?;
        Ok(true)
    }

    /// Makes the names in a directory durable, and those of its parents up to the root.
    pub(super) fn sync_directories(&self, path: &[u8]) -> rustix::io::Result<()> {
        let mut path = path;
        loop {
            self.dir.disk.sync_directory(self.dir.open_dir_by_path(path)?)?;
            match super::tree::split(path) {
                Some((directory, _)) => path = directory,
                None => return Ok(()),
            }
        }
    }
}

/// Attributes of a file that is not being written, with the storage that it uses; `noted` reads the record.
pub(super) fn with_used_bytes(attr: Attr, stat: &Stat, noted: impl FnOnce(u64) -> Option<u64>) -> Attr {
    let used_bytes = if has_used_bytes(stat) { noted(attr.ino) } else { None };
    Attr { used_bytes: used_bytes.unwrap_or(attr.used_bytes), ..attr }
}

/// What is noted of the storage used; nothing where it is what the size says, give or take what data servers round up or
/// need beside the bytes.
fn noted_bytes(file: &OpenFile, objects: &ObjectInfo) -> Option<u64> {
    let (full, used) = (full_bytes(objects.size), objects.used_bytes);
    let slack = 4096 * u64::from(file.layout.pcount) + full / 128;
    let is_empty = used == 0 && objects.size > 0;
    (full.abs_diff(used) > slack || is_empty).then_some(used)
}

fn failed(failure: Failure, path: &[u8]) -> super::Fault {
    match failure {
        Failure::DataServers(error) => data_fault(&error, "get the attributes of", path),
        Failure::Local(error) => fault(Errno::IO, format!("cannot get the attributes of {}: {error}", show(path))),
        Failure::TooLong(error) => fault(Errno::FBIG, format!("cannot get the attributes of {}: {error}", show(path))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use impresario_layout::Layout;
    use impresario_wire::message::{Answer, ClusterId, LayoutRequest, MetaCall, Opened, Who};

    use super::*;
    use crate::meta::{MemoryObjects, MetaOptions, MetaService, Objects, make};

    /// Between the opening of its mark and the pin, a file may be removed for good: its data servers know nothing of it any
    /// more, and must not be asked.
    #[test]
    fn a_marked_file_that_goes_before_it_is_pinned_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
        let options = MetaOptions { grace: Duration::ZERO, ..MetaOptions::new(dir.path(), 4) };
        let service = MetaService::open(options, Arc::new(MemoryObjects::default())).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        let path = || b"f".to_vec();
        let create = MetaCall::Create { path: path(), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
        let Answer::Opened(opened) = service.call(session, create) else { panic!("not made") };
        let meta = &service.meta;
        let found = || {
            let fd = meta.dir.disk.open_file(&meta.dir.writers, key_name(opened.file).as_bytes()).unwrap();
            meta.read_in(fd).unwrap().0
        };
        assert_eq!(meta.pin_if_marked(found(), opened.file).map(|pin| pin.key), Some(opened.file));
        let late = found();
        assert!(matches!(service.call(session, MetaCall::Unlink { path: path() }), Answer::Removed { links: 0 }));
        assert!(matches!(service.call(session, MetaCall::Close { handle: opened.handle, wrote: false }), Answer::Done));
        let began = Instant::now();
        while meta.opens.mark_of(late.ino).is_some() {
            assert!(began.elapsed() < Duration::from_secs(60), "it is not removed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(meta.pin_if_marked(late, opened.file).is_none());
    }

    /// A client that writes far behind what the local file system can have is told the length, and the log no error.
    #[test]
    fn what_is_too_long_for_the_local_file_system_is_a_warning() {
        use crate::meta::{Fate, StepHook};

        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::<MemoryObjects>::default());
        make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
        let hook: StepHook = Arc::new(|step| if step == "set_len" { Fate::Fails(libc::EFBIG) } else { Fate::Done });
        let options = MetaOptions { before_step: Some(hook), ..MetaOptions::new(dir.path(), 4) };
        let service = MetaService::open(options, objects.clone()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        let path = || b"f".to_vec();
        let create = MetaCall::Create { path: path(), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
        let Answer::Opened(opened) = service.call(session, create) else { panic!("not made") };
        objects.write(opened.file, &opened.layout, 1 << 44, 1);
        service.call(session, MetaCall::Close { handle: opened.handle, wrote: true });
        assert!(service.wait_idle(Duration::from_secs(60)));
        let lines = impresario_testing::logged(|| {
            let looked = service.call(session, MetaCall::GetAttr { target: Target::Path(path()) });
            assert!(matches!(&looked, Answer::Attr(attr) if attr.size == (1 << 44) + 1), "{looked:?}");
        });
        assert!(!lines.is_empty() && lines.iter().all(|line| line.starts_with("WARN")), "{lines:?}");
    }

    struct Bed {
        _dir: tempfile::TempDir,
        service: Arc<MetaService>,
        objects: Arc<MemoryObjects>,
        session: SessionId,
    }

    impl Bed {
        fn new() -> Bed {
            let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::<MemoryObjects>::default());
            make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
            let service = Arc::new(MetaService::open(MetaOptions::new(dir.path(), 4), objects.clone()).unwrap());
            let session = service.open_session(Who::default()).unwrap();
            Bed { _dir: dir, service, objects, session }
        }

        fn call(&self, call: MetaCall) -> Answer {
            self.service.call(self.session, call)
        }

        fn create(&self, name: &str) -> Opened {
            let path = name.as_bytes().to_vec();
            let create = MetaCall::Create { path, mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
            let Answer::Opened(opened) = self.call(create) else { panic!("not made") };
            opened
        }

        fn errno(&self, target: Target) -> i32 {
            match self.call(MetaCall::GetAttr { target }) {
                Answer::Fault(fault) => fault.errno,
                other => panic!("{other:?}"),
            }
        }
    }

    /// A file is asked for by its name, and its writer makes its first object and closes it before the answer has come: it
    /// has lost nothing.
    #[test]
    fn an_object_that_is_made_while_it_is_asked_for_is_not_lost() {
        let bed = Bed::new();
        let opened = bed.create("f");
        let (service, objects, session) = (bed.service.clone(), bed.objects.clone(), bed.session);
        let (file, layout, handle) = (opened.file, opened.layout, opened.handle);
        bed.objects.before_next_answer(move || {
            objects.write(file, &layout, 0, 1000);
            assert!(matches!(service.call(session, MetaCall::Close { handle, wrote: true }), Answer::Done));
        });
        let before = opened.attr.mtime;
        for asked in ["while it was closed", "afterwards"] {
            let target = Target::Path(b"f".to_vec());
            let Answer::Attr(attr) = bed.call(MetaCall::GetAttr { target }) else { panic!("lost, {asked}") };
            // That of no object is 1970.
            assert!(attr.mtime.secs >= before.secs, "{asked}: {attr:?}");
        }
        assert!(bed.objects.has_answered(), "nobody has asked the data servers");
    }

    /// What is removed for good is stale for who has it open; what is not removed must be there.
    #[test]
    fn removed_objects_are_lost_unless_their_file_is_removed_too() {
        let bed = Bed::new();
        let written = |name: &str| {
            let opened = bed.create(name);
            bed.objects.write(opened.file, &opened.layout, 0, 1000);
            assert!(matches!(bed.call(MetaCall::Fsync { handle: opened.handle }), Answer::Done));
            opened
        };
        let (removed, there, lost) = (written("removed"), written("there"), written("lost"));
        let handle = |opened: &Opened| Target::Handle(opened.handle);
        assert!(matches!(bed.call(MetaCall::Unlink { path: b"removed".to_vec() }), Answer::Removed { links: 0 }));
        bed.objects.unlink(&[(removed.file, removed.layout), (there.file, there.layout)]);
        bed.objects.lose(lost.file, 0);
        assert_eq!(bed.errno(handle(&removed)), libc::EIDRM);
        assert!(!bed.service.meta.background.is_paused(), "the data servers have answered");
        assert_eq!(bed.errno(handle(&there)), libc::EIO);
        assert_eq!(bed.errno(Target::Path(b"there".to_vec())), libc::EIO);
        assert_eq!(bed.errno(handle(&lost)), libc::EIO);
    }

    /// A connection's own thread answers what no data server is asked for.
    #[test]
    fn only_calls_about_files_that_are_being_written_may_wait() {
        let bed = Bed::new();
        let other = bed.create("other");
        assert!(matches!(bed.call(MetaCall::Close { handle: other.handle, wrote: false }), Answer::Done));
        let written = bed.create("written");
        let may_wait = |call: MetaCall| bed.service.may_wait(bed.session, &Who::default(), &call);
        let path = |name: &str| name.as_bytes().to_vec();
        let of = |target| {
            let set = || impresario_wire::message::SetAttr { mode: Some(0o600), ..Default::default() };
            [MetaCall::GetAttr { target: Target::clone(&target) }, MetaCall::SetAttr { target, set: set() }]
        };
        let Answer::Opened(other) = bed.call(MetaCall::Open { path: path("other"), write: false }) else { panic!() };
        for target in [Target::Path(path("other")), Target::Handle(other.handle), Target::Path(path("missing"))] {
            of(target).into_iter().for_each(|call| assert!(!may_wait(call.clone()), "{call:?}"));
        }
        for target in [Target::Path(path("written")), Target::Handle(written.handle)] {
            of(target).into_iter().for_each(|call| assert!(may_wait(call.clone()), "{call:?}"));
        }
        for (name, waits) in [("other", false), ("written", true)] {
            assert_eq!(may_wait(MetaCall::Open { path: path(name), write: false }), waits, "{name}");
            assert_eq!(may_wait(MetaCall::Link { from: path(name), to: path("new") }), waits, "{name}");
        }
        assert!(may_wait(MetaCall::Readdir { path: path(""), after: Vec::new(), max: 10 }), "it lists them");
    }

    /// Who waits at a file's gate for long fails only if the data servers have not answered since.
    #[test]
    fn who_waits_for_a_file_goes_on_when_its_data_servers_answer_again() {
        let bed = Bed::new();
        let opened = bed.create("f");
        let meta = &bed.service.meta;
        let Found::Pinned(pin) = meta.pin(opened.attr.ino, false) else { panic!() };
        let gate = pin.gate.lock();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| meta.enter(&pin, "look at", b"f").map(drop));
            std::thread::sleep(GATE_PATIENCE / 4);
            let refused = meta.note_answer(&pin, Err::<(), _>(io::ErrorKind::TimedOut.into()));
            assert!(refused.is_err() && meta.note_answer(&pin, Ok(())).is_ok());
            std::thread::sleep(GATE_PATIENCE);
            drop(gate);
            assert!(waiter.join().unwrap().is_ok());
        });
    }

    /// Objects that a file had before, on a server that is away, are of no importance to files that are not on it.
    #[test]
    fn a_server_of_spare_objects_that_is_away_holds_up_no_file_of_others() {
        let bed = Bed::new();
        let meta = &bed.service.meta;
        let until = |what: &str, is_so: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !is_so() {
                assert!(began.elapsed() < Duration::from_secs(60), "{what}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let on_one = |name: &str| {
            let layout = LayoutRequest { base: Some(1), pcount: Some(1), ssize_bytes: None };
            let path = name.as_bytes().to_vec();
            let create = MetaCall::Create { path, mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: Some(layout) };
            let Answer::Opened(opened) = bed.call(create) else { panic!("not made") };
            bed.objects.write(opened.file, &opened.layout, 0, 10);
            opened
        };
        let pinned = |opened: &Opened| match meta.pin(opened.attr.ino, false) {
            Found::Pinned(pin) => pin,
            _ => panic!("not in use"),
        };
        let unlink = |name: &str| {
            let removed = bed.call(MetaCall::Unlink { path: name.as_bytes().to_vec() });
            assert!(matches!(removed, Answer::Removed { links: 0 }), "{removed:?}");
        };
        let close = |opened: &Opened| {
            assert!(matches!(bed.call(MetaCall::Close { handle: opened.handle, wrote: true }), Answer::Done));
        };
        bed.objects.set_silent(Some(2));
        for (name, is_removed) in [("settled", false), ("removed", true)] {
            let (file, other) = (on_one(name), on_one("other"));
            let (pin, other_pin) = (pinned(&file), pinned(&other));
            *pin.spare.lock() = Some((FileKey(file.file.0 + 1000), Layout { base: 2, ..file.layout }));
            let seen = *pin.seen.lock();
            meta.remember(&pin, seen).unwrap();
            let (all, one) = (Group::of(&pin), Group::of(&other_pin));
            drop((pin, other_pin));
            if is_removed {
                unlink(name);
            }
            close(&file);
            until("it is not tried", &|| !meta.background.may_ask(&all, false));
            assert!(meta.background.may_ask(&one, false), "{name}");
            unlink("other");
            close(&other);
            until("the other is not removed", &|| !bed.objects.files().contains(&other.file));
        }
        bed.objects.set_silent(None);
        unlink("settled");
        until("not all are removed", &|| bed.objects.files().is_empty());
    }
}
