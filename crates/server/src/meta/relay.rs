//! Laying a file out anew over other data servers, while nobody has it open.
//!
//! A program copies the bytes to new objects, under a key of their own; this is the part of the metadata server. The record of
//! the file says at every moment where its bytes are, and which objects are *spare*: the new ones until the file lies there,
//! the old ones afterwards. One write of the record exchanges the two. A file with spare objects is marked
//! ([`super::sizes`]), so they are found after a crash, and settling it removes them first, whichever they are.
//!
//! - *begin*: no one has the file open, and its size is settled. It is marked, and the new objects are noted as spare, durably.
//!   The copier's handle counts as an open for reading.
//! - Whoever opens the file for writing or sets its length ends the copy: [`OpenFile::relay`] is cleared under the gate.
//! - *commit*: the copy is still the one that was begun, no one else has the file open, and none of its old objects has
//!   changed. While the record is exchanged no look-up finds the file; they wait.
//!
//! A client that is cut off may have the file open without our knowledge, for the grace period. So nothing is committed while
//! that may be.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_wire::message::{FileKey, LayoutRequest, NodeKind, ObjectInfo, Who};
use impresario_wire::relay::{Objects, Relaid, RelayCall};
use rustix::io::Errno;

use super::background::Failure;
use super::directory::{MetaDirectory, key_name, names_in};
use super::fault::{Explain, Outcome, data_fault, fault, show};
use super::opens::{OpenFile, Pin, Session};
use super::record::{FILE_ATTRIBUTE, Record, Seen};
use super::service::Meta;
use super::tree::kind_of;

const DOING: &str = "lay out anew";
/// How long a commit waits for operations that need the file just now.
const PATIENCE: Duration = Duration::from_secs(1);

impl OpenFile {
    /// The copy of this handle is over.
    pub(super) fn end_relay(&self, handle: u64) -> bool {
        self.relay.compare_exchange(handle, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Something changes the file: no copy that has begun is of use.
    pub(super) fn end_relays(&self) {
        self.relay.store(0, Ordering::SeqCst);
    }

    pub(super) fn is_relaid(&self) -> bool {
        self.relay.load(Ordering::SeqCst) != 0
    }
}

impl Meta {
    pub(super) fn relay(&self, session: &Session, call: &RelayCall) -> Outcome<Relaid> {
        match call {
            RelayCall::Begin { path } => self.begin_relay(session, path),
            RelayCall::Commit { handle } => self.commit_relay(session, *handle),
        }
    }

    fn begin_relay(&self, session: &Session, path: &[u8]) -> Outcome<Relaid> {
        session.check_room()?;
        let entry = self.dir.entry(path).and_then(|entry| entry.ok_or(Errno::ISDIR)).explain(DOING, path)?;
        if kind_of(&entry.stat().explain(DOING, path)?) != Some(NodeKind::File) {
            return Ok(Relaid::Done);
        }
        let pin = self.pin_at(&entry, DOING)?;
        let skipped = (self.options.skipped)();
        if !skipped.servers().iter().any(|server| pin.layout.position_of(*server).is_some()) {
            return Ok(Relaid::Done);
        }
        let gate = self.enter(&pin, DOING, path)?;
        if let Some(why) = self.why_not(&pin, 0) {
            return Ok(Relaid::InUse { why });
        }
        self.settle_held(&pin, &gate).map_err(|failure| failed(failure, path))?;
        if self.opens.mark_of(pin.ino).is_some() {
            return Ok(Relaid::InUse { why: "a lost client may still write to it".into() });
        }
        let size = rustix::fs::fstat(&pin.fd).explain(DOING, path)?.st_size;
        let request = LayoutRequest {
            base: None,
            pcount: Some(pin.layout.pcount),
            ssize_bytes: Some(pin.layout.ssize_bytes),
        };
        let layout = self.resolve(&request, || self.dealt.fetch_add(1, Ordering::Relaxed), path)?;
        let file = self.dir.new_key().explain(DOING, path)?;
        self.walks.note(&[file]);
        self.mark(&pin).explain(DOING, path)?;
        let noted = self.note_spare(&pin, Some((file, layout))).and_then(|()| self.dir.disk.sync(&pin.fd));
        noted.explain(DOING, path)?;
        self.opens.admit(pin.ino, false)?;
        let handle = self.sessions.register(session, &pin, false).inspect_err(|_| {
            self.opens.leave(pin.ino, false, false);
        })?;
        pin.relay.store(handle, Ordering::SeqCst);
        let made = pin.seen.lock().made;
        let from = Objects { file: pin.key, layout: pin.layout };
        let size = u64::try_from(size).unwrap_or(0);
        Ok(Relaid::Begun { handle, from, made, size, to: Objects { file, layout } })
    }

    /// Why a file cannot be laid out anew now; `own`: opens for reading of who asks.
    fn why_not(&self, pin: &Pin<'_>, own: u32) -> Option<String> {
        let (readers, writers, removed) = self.opens.uses_of(pin.ino);
        let grace = self.options.grace;
        let vanished = self.vanished.lock().is_some_and(|at| at.elapsed() < grace);
        match (readers.saturating_sub(own), writers) {
            _ if removed => Some("it is removed".into()),
            (_, 1..) => Some("it is open for writing".into()),
            (1.., _) => Some("it is open for reading".into()),
            _ if self.started.elapsed() < grace => Some("the metadata server has just started".into()),
            _ if vanished => Some("a client was lost just now that had files open".into()),
            _ => None,
        }
    }

    fn commit_relay(&self, session: &Session, handle: u64) -> Outcome<Relaid> {
        let pin = self.pin_handle(session, handle)?;
        let path = self.opens.path_of(pin.ino);
        let gate = self.enter(&pin, DOING, &path)?;
        let (file, write) = session.take(handle)?;
        let is_same = file.end_relay(handle);
        drop(self.leave(file, write, false));
        let spare = *pin.spare.lock();
        let Some((file, layout)) = spare.filter(|_| is_same) else {
            return Ok(Relaid::InUse { why: "it was changed while it was copied".into() });
        };
        if let Some(why) = self.why_not(&pin, 0) {
            return Ok(Relaid::InUse { why });
        }
        let to = Objects { file, layout };
        let objects = self.complete(&pin, &to).map_err(|error| data_fault(&error, DOING, &path))?;
        let Some(objects) = objects else {
            return Ok(Relaid::InUse { why: "it was changed while it was copied".into() });
        };
        if !self.opens.begin_switch(pin.ino, PATIENCE) {
            return Ok(Relaid::InUse { why: "it is being opened".into() });
        }
        let switched = self.switch(&pin, &to, &objects);
        let outcome = switched.as_ref().map(|_| ()).map_err(|errno| *errno);
        self.opens.end_switch(pin.ino, switched.ok());
        drop(gate);
        outcome.explain(DOING, &path)?;
        drop(pin);
        // It lies there; what is left of the old objects is removed now, or when their servers answer.
        if let Ok(Some(pin)) = self.pin_marked(to.file)
            && let Err(failure) = self.settle(&pin)
        {
            tracing::warn!(key = pin.key.0, ?failure, "the old objects of a file will be removed later");
        }
        Ok(Relaid::Done)
    }

    /// Makes the new objects durable, and compares what is known of both; `None`: the file has changed.
    fn complete(&self, pin: &Pin<'_>, to: &Objects) -> std::io::Result<Option<ObjectInfo>> {
        let size = rustix::fs::fstat(&pin.fd)?.st_size;
        let size = u64::try_from(size).unwrap_or(0);
        let own = Who::default();
        self.note_answer(self.objects.truncate(&own, to.file, &to.layout, size))?;
        self.note_answer(self.objects.revoke(&own, to.file, &to.layout))?;
        let new = self.note_answer(self.objects.stat(to.file, &to.layout))?;
        let old = self.ask(pin)?;
        let is_same = old.size == size && new.size == size && old.mtime == pin.seen.lock().mtime;
        Ok(is_same.then_some(new))
    }

    /// The record says where the file lies; its mark is named after its key.
    fn switch(&self, pin: &Pin<'_>, to: &Objects, objects: &ObjectInfo) -> rustix::io::Result<OpenFile> {
        let (disk, writers) = (&self.dir.disk, &self.dir.writers);
        let seen = Seen { mtime: objects.mtime, made: objects.made, ..*pin.seen.lock() };
        let spare = Some((pin.key, pin.layout));
        let record = Record { key: to.file, layout: to.layout, seen, spare };
        let fd = rustix::io::dup(&pin.fd)?;
        self.walks.note(&[pin.key, to.file]);
        disk.set_attribute(&pin.fd, FILE_ATTRIBUTE, &record.encode())?;
        if let Err(errno) = disk.sync(&pin.fd) {
            self.remember(pin, *pin.seen.lock())?;
            return Err(errno);
        }
        if let Err(error) = disk.rename(writers, key_name(pin.key).as_bytes(), writers, key_name(to.file).as_bytes(), false)
        {
            // The next start does it.
            tracing::error!(key = to.file.0, %error, "the mark of a file that was laid out anew cannot be renamed");
        }
        self.opens.rename_mark(pin.ino, to.file);
        Ok(OpenFile {
            ino: pin.ino,
            key: to.file,
            layout: to.layout,
            fd,
            gate: Mutex::default(),
            links: Mutex::default(),
            seen: Mutex::new(seen),
            spare: Mutex::new(spare),
            relay: AtomicU64::default(),
        })
    }

    fn note_spare(&self, file: &OpenFile, spare: Option<(FileKey, impresario_layout::Layout)>) -> rustix::io::Result<()> {
        let before = std::mem::replace(&mut *file.spare.lock(), spare);
        let seen = *file.seen.lock();
        self.remember(file, seen).inspect_err(|_| *file.spare.lock() = before)
    }

    /// Removes the spare objects of a file. Call under its gate.
    pub(super) fn remove_spare(&self, file: &OpenFile) -> Result<(), Failure> {
        let Some(spare) = *file.spare.lock() else { return Ok(()) };
        let removed = self.objects.unlink(&[spare]).pop().unwrap_or(Ok(()));
        self.note_answer(removed).map_err(Failure::DataServers)?;
        Ok(self.note_spare(file, None)?)
    }

    /// At start: a file that was laid out anew just before may have its mark under its old key. Gives the name that it has now.
    pub(super) fn rename_old_mark(&self, name: &[u8], key: FileKey) -> rustix::io::Result<Vec<u8>> {
        let now = key_name(key).into_bytes();
        if now != name {
            self.dir.disk.rename(&self.dir.writers, name, &self.dir.writers, &now, false)?;
        }
        Ok(now)
    }

    /// A client that had files open is gone, and may come back.
    pub(super) fn note_vanished(&self) {
        *self.vanished.lock() = Some(Instant::now());
    }
}

impl MetaDirectory {
    /// Keys of spare objects.
    pub(super) fn spares(&self) -> rustix::io::Result<Vec<FileKey>> {
        let mut spares = Vec::new();
        for name in names_in(&self.writers)? {
            // What cannot be read is reported where the marks are looked at.
            let Ok(file) = self.disk.open_file(&self.writers, &name?) else { continue };
            let spare = Record::of(&self.disk, &file).ok().and_then(|record| record.spare);
            spares.extend(spare.map(|(key, _)| key));
        }
        Ok(spares)
    }
}

fn failed(failure: Failure, path: &[u8]) -> super::Fault {
    match failure {
        Failure::DataServers(error) => data_fault(&error, DOING, path),
        Failure::Local(error) => fault(Errno::IO, format!("cannot {DOING} {}: {error}", show(path))),
    }
}
