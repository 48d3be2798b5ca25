//! Who knows a file's size: the local file while nobody writes, the data servers while the file is marked.
//!
//! A *mark* is a second name of the file, `writers/<key>`. It is made before the first writer is admitted and
//! removed after the last has gone and the size was settled: asked from the data servers and set on the local
//! file. It survives a crash, and so does what it says. The order of steps, and why each is safe to be
//! interrupted after:
//!
//! - *mark*: noted in memory, linked, made durable, only then the writer is admitted. A mark without a writer
//!   is settled by whoever comes first.
//! - *settle*: ask, set length, set time, note the objects' time ([`Record::seen`]), remove the mark. Done twice
//!   it does the same. Length and time must not become durable after the mark's removal: the journal keeps that
//!   order ([`Disk::ordered`]), elsewhere an fsync does.
//! - *truncate*: mark, cut the objects, settle unless there are writers.
//!
//! The local time of modification holds while the objects' time is the one noted: so a time set by hand stays
//! until somebody writes, whichever clocks the data servers have.
//!
//! [`Disk::ordered`]: super::disk::Disk::ordered

use std::io;
use std::sync::{MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use impresario_wire::message::{Attr, FileKey, NodeKind, ObjectInfo, SetTime};
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

use super::care::Failure;
use super::disk::mtime_of;
use super::fault::{Explain, Outcome, data_fault, fault, show};
use super::home::key_name;
use super::lock;
use super::opens::{Found, OpenFile, Pin};
use super::record::{FILE_ATTRIBUTE, Record};
use super::removal::{bad_record, read_in};
use super::service::Meta;
use super::tree::{Place, local_attr};

/// See [`Meta::enter`].
const GATE_PATIENCE: Duration = Duration::from_secs(1);
/// Most files that wait for the data servers to tell their size before no more writers are admitted.
const MARKS_MAX: usize = 1 << 20;

impl Meta {
    /// Admits an open of a pinned file. True when this open marked it: until now the local size was right.
    pub(super) fn admit(&self, pin: &Pin<'_>, write: bool, path: &[u8]) -> Outcome<bool> {
        if !write {
            self.opens.admit(pin.ino, false)?;
            return Ok(false);
        }
        let _gate = self.enter(pin, "open for writing", path)?;
        let fresh = self.mark(pin).explain("open for writing", path)?;
        self.opens.admit(pin.ino, true)?;
        Ok(fresh)
    }

    /// Waits for a file's gate. Who waited long because data servers did not answer the one before is not made to
    /// wait for them as long again.
    fn enter<'p>(&self, pin: &'p Pin<'_>, doing: &str, path: &[u8]) -> Outcome<MutexGuard<'p, ()>> {
        let began = Instant::now();
        let gate = lock(&pin.gate);
        if began.elapsed() >= GATE_PATIENCE && self.care.is_paused() {
            let why = "the data servers do not answer; see which with `impresario status`";
            return Err(fault(Errno::IO, format!("cannot {doing} {}: {why}", show(path))));
        }
        Ok(gate)
    }

    /// What a file's objects say.
    fn ask(&self, file: &OpenFile) -> io::Result<ObjectInfo> {
        self.heard(self.objects.stat(file.key, &file.layout))
    }

    /// Notes whether data servers answered.
    pub(super) fn heard<T>(&self, answer: io::Result<T>) -> io::Result<T> {
        match &answer {
            Ok(_) => self.care.resume(),
            Err(_) => self.care.pause(),
        }
        answer
    }

    /// Marks a file, durably; false when it was. Under its gate.
    fn mark(&self, file: &OpenFile) -> rustix::io::Result<bool> {
        let _links = lock(&file.links);
        if self.opens.mark_of(file.ino).is_some() {
            return Ok(false);
        }
        let disk = &self.home.disk;
        if self.opens.counts().marked >= MARKS_MAX {
            return Err(Errno::NFILE);
        }
        self.opens.set_mark(file.ino, file.key);
        let made = match disk.link_open(&file.fd, &self.home.writers, &key_name(file.key)) {
            Err(Errno::EXIST) => Ok(()),
            other => other,
        };
        match made.and_then(|()| disk.sync(&self.home.writers)) {
            Ok(()) => Ok(true),
            Err(errno) => {
                let _ = disk.unlink(&self.home.writers, key_name(file.key).as_bytes());
                self.opens.clear_mark(file.ino);
                Err(errno)
            }
        }
    }

    /// Removes a file's mark.
    pub(super) fn unmark(&self, file: &OpenFile) -> rustix::io::Result<()> {
        let _links = lock(&file.links);
        match self.home.disk.unlink(&self.home.writers, key_name(file.key).as_bytes()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        self.opens.clear_mark(file.ino);
        Ok(())
    }

    /// Settles a file that has no writers: nothing to do if it has, is not marked, is to wait, or is removed.
    pub(super) fn settle(&self, pin: &Pin<'_>) -> Result<(), Failure> {
        self.settle_held(pin, &lock(&pin.gate))
    }

    fn settle_held(&self, pin: &Pin<'_>, _gate: &MutexGuard<'_, ()>) -> Result<(), Failure> {
        let idle = self.opens.writers_of(pin.ino) == 0 && !self.opens.is_removed(pin.ino);
        if !idle || !self.opens.may_settle(pin.ino) {
            return Ok(());
        }
        let objects = self.ask(pin).map_err(Failure::DataServers)?;
        self.write_down(pin, &objects)?;
        if !self.home.disk.ordered {
            self.home.disk.sync(&pin.fd)?;
        }
        Ok(self.unmark(pin)?)
    }

    /// Sets what the objects say on the local file. Under its gate.
    fn write_down(&self, file: &OpenFile, objects: &ObjectInfo) -> rustix::io::Result<()> {
        let disk = &self.home.disk;
        let stat = rustix::fs::fstat(&file.fd)?;
        let seen = *lock(&file.seen);
        let cut = u64::try_from(stat.st_size) != Ok(objects.size);
        if cut {
            disk.set_len(&file.fd, objects.size)?;
        }
        let written = objects.mtime != seen;
        if cut || written {
            let mtime = if written { objects.mtime } else { mtime_of(&stat) };
            disk.set_times(&file.fd, None, Some(SetTime::At(mtime)))?;
        }
        if written { self.note_seen(file, objects) } else { Ok(()) }
    }

    /// Notes that what the objects' time says is known: the local time holds from now on.
    fn note_seen(&self, file: &OpenFile, objects: &ObjectInfo) -> rustix::io::Result<()> {
        let record = Record { key: file.key, layout: file.layout, seen: objects.mtime };
        self.home.disk.set_attribute(&file.fd, FILE_ATTRIBUTE, &record.encode())?;
        *lock(&file.seen) = objects.mtime;
        Ok(())
    }

    /// Settles a marked file that may not be in use.
    pub(super) fn settle_by_key(&self, key: FileKey) -> Result<(), Failure> {
        match self.pin_marked(key)? {
            Some(pin) => self.settle(&pin),
            None => Ok(()),
        }
    }

    /// Pins a marked file by its mark; none when it has none any more, or is removed.
    pub(super) fn pin_marked(&self, key: FileKey) -> Result<Option<Pin<'_>>, Failure> {
        // An orphan's size is nobody's concern but of those who have it open.
        if rustix::fs::statat(&self.home.orphans, key_name(key), AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Ok(None);
        }
        let fd = match self.home.disk.open_file(&self.home.writers, key_name(key).as_bytes()) {
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let (file, _) =
            read_in(&self.home.disk, fd).map_err(|bad| Failure::Local(bad_record(bad, &key_name(key)).message))?;
        Ok(match self.bring(file, b"", false) {
            Found::Pinned(pin) if !self.note_removed(&pin) => Some(pin),
            _ => None,
        })
    }

    /// Attributes of what is at a place, asked from the data servers when they know better.
    pub(super) fn attr_at(&self, place: &Place<'_>) -> Outcome<Attr> {
        self.attr_by(place.path, || place.stat())
    }

    /// The same, for whatever `look` looks at.
    pub(super) fn attr_by(&self, path: &[u8], look: impl Fn() -> rustix::io::Result<Stat>) -> Outcome<Attr> {
        // A file may be settled, or marked, between two looks; not for ever.
        for _ in 0..100 {
            let attr = look().and_then(|stat| local_attr(&stat)).explain("look at", path)?;
            let Some(key) = self.opens.mark_of(attr.ino) else {
                if attr.kind != NodeKind::File || attr.nlink == 1 {
                    return Ok(attr);
                }
                // A second name may be one of ours that is just coming or going.
                match self.pin(attr.ino, false) {
                    Found::Pinned(pin) => return self.local_attr_of(&pin, path),
                    Found::Removed => continue,
                    Found::Absent => {}
                }
                let same = |stat: Stat| {
                    local_attr(&stat).is_ok_and(|again| (again.ino, again.nlink) == (attr.ino, attr.nlink))
                };
                if look().is_ok_and(same) {
                    return Ok(attr);
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
        Err(fault(Errno::BUSY, format!("cannot look at {}: it keeps changing", show(path))))
    }

    /// Attributes of a pinned file.
    pub(super) fn attr_of(&self, pin: &Pin<'_>, path: &[u8]) -> Outcome<Attr> {
        let ask = self.opens.mark_of(pin.ino).is_some();
        if ask && self.opens.writers_of(pin.ino) == 0 && !self.care.is_paused() {
            match pin.gate.try_lock() {
                Ok(gate) => self.settle_held(pin, &gate).or_else(|failure| self.unless_local(failure, path))?,
                Err(TryLockError::Poisoned(gate)) => {
                    self.settle_held(pin, &gate.into_inner()).or_else(|failure| self.unless_local(failure, path))?;
                }
                // Whoever holds the gate may be waiting for data servers; asking them is no slower.
                Err(TryLockError::WouldBlock) => {}
            }
        }
        if self.opens.mark_of(pin.ino).is_none() {
            return self.local_attr_of(pin, path);
        }
        let objects = self.ask(pin).map_err(|error| data_fault(&error, "look at", path))?;
        let seen = *lock(&pin.seen);
        let mut attr = self.local_attr_of(pin, path)?;
        attr.size = objects.size;
        if objects.mtime != seen {
            attr.mtime = objects.mtime;
            attr.ctime = attr.ctime.max(objects.mtime);
        }
        Ok(attr)
    }

    /// A local failure to settle does not matter to who only looks: the data servers are asked.
    fn unless_local(&self, failure: Failure, path: &[u8]) -> Outcome<()> {
        match failure {
            Failure::Local(error) => {
                tracing::error!(path = show(path), error, "a size cannot be settled");
                Ok(())
            }
            Failure::DataServers(_) => Err(failed(failure, path)),
        }
    }

    /// Attributes of a pinned file as the local file system has them, without the names that are ours.
    pub(super) fn local_attr_of(&self, pin: &Pin<'_>, path: &[u8]) -> Outcome<Attr> {
        let _links = lock(&pin.links);
        let stat = rustix::fs::fstat(&pin.fd);
        let mut attr = stat.and_then(|stat| local_attr(&stat)).explain("look at", path)?;
        let ours = u32::from(self.opens.mark_of(pin.ino).is_some());
        attr.nlink = if self.opens.is_removed(pin.ino) { 0 } else { attr.nlink.saturating_sub(ours).max(1) };
        Ok(attr)
    }

    /// Cuts or extends a pinned file.
    pub(super) fn truncate(&self, pin: &Pin<'_>, len_bytes: u64, path: &[u8]) -> Outcome<()> {
        let doing = "set the length of";
        if i64::try_from(len_bytes).is_err() {
            return Err(Errno::FBIG).explain(doing, path);
        }
        let gate = self.enter(pin, doing, path)?;
        let stat = rustix::fs::fstat(&pin.fd).explain(doing, path)?;
        if self.opens.mark_of(pin.ino).is_none() && stat.st_size == 0 && len_bytes == 0 {
            return self.home.disk.set_times(&pin.fd, None, Some(SetTime::Now)).explain(doing, path);
        }
        self.mark(pin).explain(doing, path)?;
        let cut = self.heard(self.objects.truncate(pin.key, &pin.layout, len_bytes));
        cut.map_err(|error| data_fault(&error, doing, path))?;
        // The objects have their new length and the mark says so: that they cannot be asked just now only
        // means that the next one asks.
        if let Err(failure) = self.settle_held(pin, &gate) {
            tracing::warn!(path = show(path), ?failure, "the new length is settled later");
        }
        Ok(())
    }

    /// Before a time is set by hand on a file that may be ahead: notes the objects' time, so that the time set
    /// holds until the next write.
    pub(super) fn note_before_times(&self, pin: &Pin<'_>, path: &[u8]) -> Outcome<()> {
        let doing = "set the times of";
        let _gate = self.enter(pin, doing, path)?;
        if self.opens.mark_of(pin.ino).is_none() {
            return Ok(());
        }
        let objects = self.ask(pin).map_err(|error| data_fault(&error, doing, path))?;
        if objects.mtime == *lock(&pin.seen) {
            return Ok(());
        }
        self.note_seen(pin, &objects).explain(doing, path)
    }

    /// Makes size, attributes and names of a pinned file durable.
    pub(super) fn sync(&self, pin: &Pin<'_>) -> Outcome<()> {
        let path = self.opens.path_of(pin.ino);
        let doing = "make durable";
        if self.opens.mark_of(pin.ino).is_some() {
            let _gate = self.enter(pin, doing, &path)?;
            let objects = self.ask(pin).map_err(|error| data_fault(&error, doing, &path))?;
            self.write_down(pin, &objects).explain(doing, &path)?;
        }
        self.home.disk.sync(&pin.fd).explain(doing, &path)?;
        if self.opens.is_removed(pin.ino) {
            return Ok(());
        }
        match self.sync_names(&path, pin.ino) {
            Ok(true) => Ok(()),
            // It was moved with a folder above it; where to, only the whole file system knows.
            Ok(false) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                self.home.disk.sync_file_system(&self.home.names).explain(doing, &path)
            }
            Err(errno) => Err(errno).explain(doing, &path),
        }
    }

    /// Makes the name of a file and those of its folders durable; false when the path is not its path.
    fn sync_names(&self, path: &[u8], ino: u64) -> rustix::io::Result<bool> {
        let Some(place) = self.home.place(path)? else { return Ok(false) };
        if place.stat()?.st_ino != ino {
            return Ok(false);
        }
        let folder = super::tree::split(path).map_or(&b""[..], |(folder, _)| folder);
        self.sync_folders(folder)?;
        Ok(true)
    }

    /// Makes the names in a folder durable, and those of its folders up to the root.
    pub(super) fn sync_folders(&self, path: &[u8]) -> rustix::io::Result<()> {
        let mut path = path;
        loop {
            self.home.disk.sync(self.home.open_folder(path)?)?;
            match super::tree::split(path) {
                Some((folder, _)) => path = folder,
                None => return Ok(()),
            }
        }
    }
}

fn failed(failure: Failure, path: &[u8]) -> super::Fault {
    match failure {
        Failure::DataServers(error) => data_fault(&error, "look at", path),
        Failure::Local(error) => fault(Errno::IO, format!("cannot look at {}: {error}", show(path))),
    }
}
