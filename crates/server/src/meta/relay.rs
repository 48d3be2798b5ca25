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
        let request =
            LayoutRequest { base: None, pcount: Some(pin.layout.pcount), ssize_bytes: Some(pin.layout.ssize_bytes) };
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
        if let Err(error) =
            disk.rename(writers, key_name(pin.key).as_bytes(), writers, key_name(to.file).as_bytes(), false)
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

    fn note_spare(
        &self,
        file: &OpenFile,
        spare: Option<(FileKey, impresario_layout::Layout)>,
    ) -> rustix::io::Result<()> {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::Arc;

    use impresario_layout::{Layout, Skipped};
    use impresario_wire::message::{Answer, ClusterId, MetaCall, Opened, SetAttr, Target};

    use super::*;
    use crate::meta::{MemoryObjects, MetaOptions, MetaService, SessionId, make};

    fn open(dir: &Path, objects: &Arc<MemoryObjects>, draining: bool) -> (MetaService, SessionId) {
        let skipped = if draining { Skipped::of([1]).unwrap() } else { Skipped::NONE };
        let options =
            MetaOptions { grace: Duration::ZERO, skipped: Arc::new(move || skipped), ..MetaOptions::new(dir, 3) };
        let service = MetaService::open(options, objects.clone()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        (service, session)
    }

    /// A file of three objects, on a service that now has server 1 draining.
    fn written(dir: &Path, objects: &Arc<MemoryObjects>) -> (MetaService, SessionId, FileKey) {
        make(dir, ClusterId(1), &BTreeMap::new()).unwrap();
        let (service, session) = open(dir, objects, false);
        let create =
            MetaCall::Create { path: b"f".to_vec(), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
        let Answer::Opened(made) = service.call(session, create) else { panic!("not made") };
        objects.write(made.file, &made.layout, 0, 300_000);
        assert_eq!(service.call(session, MetaCall::Close { handle: made.handle }), Answer::Done);
        drop(service);
        let (service, session) = open(dir, objects, true);
        (service, session, made.file)
    }

    fn begin((service, session): (&MetaService, SessionId)) -> (u64, Objects) {
        match service.call(session, MetaCall::Relay(RelayCall::Begin { path: b"f".to_vec() })) {
            Answer::Relaid(Relaid::Begun { handle, size: 300_000, to, .. }) => (handle, to),
            other => panic!("{other:?}"),
        }
    }

    fn commit((service, session): (&MetaService, SessionId), handle: u64) -> Answer {
        service.call(session, MetaCall::Relay(RelayCall::Commit { handle }))
    }

    fn is_refused(answer: &Answer) -> bool {
        matches!(answer, Answer::Relaid(Relaid::InUse { .. }))
    }

    fn lookup((service, session): (&MetaService, SessionId), write: bool) -> Opened {
        let Answer::Opened(opened) = service.call(session, MetaCall::Open { path: b"f".to_vec(), write }) else {
            panic!("not opened")
        };
        opened
    }

    fn settled(service: &MetaService, objects: &MemoryObjects, key: FileKey) {
        let began = Instant::now();
        while objects.files() != [key] || service.meta.opens.mark_of(service.meta.ino(b"f")).is_some() {
            assert!(began.elapsed() < Duration::from_secs(30), "{:?} but {key:?}", objects.files());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    impl Meta {
        fn ino(&self, path: &[u8]) -> u64 {
            self.dir.entry(path).unwrap().unwrap().stat().unwrap().st_ino
        }
    }

    #[test]
    fn a_file_lies_in_its_new_objects_and_has_no_others() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
        let (service, session, old) = written(dir.path(), &objects);
        let at = (&service, session);
        let (handle, to) = begin(at);
        assert!(to.file != old && to.layout.position_of(1).is_none() && to.layout.pcount == 2, "{to:?}");
        let again = service.call(session, MetaCall::Relay(RelayCall::Begin { path: b"f".to_vec() }));
        assert!(is_refused(&again), "two copies of one file: {again:?}");
        let ino = service.meta.ino(b"f");
        objects.write(to.file, &to.layout, 0, 300_000);
        assert_eq!(commit(at, handle), Answer::Relaid(Relaid::Done));
        settled(&service, &objects, to.file);
        let opened = lookup(at, false);
        assert_eq!((opened.file, opened.layout, opened.attr.size), (to.file, to.layout, 300_000));
        assert_eq!((opened.attr.ino, opened.attr.nlink), (ino, 1));
        let again = service.call(session, MetaCall::Relay(RelayCall::Begin { path: b"f".to_vec() }));
        assert_eq!(again, Answer::Relaid(Relaid::Done), "nothing is to be done");
        drop(service);
        let (service, session) = open(dir.path(), &objects, true);
        assert_eq!(lookup((&service, session), true).file, to.file);
    }

    #[test]
    fn whatever_uses_or_changes_the_file_ends_the_copy() {
        type Change = fn(&MetaService, SessionId, &MemoryObjects, (FileKey, Layout));
        let changes: [Change; 5] = [
            |service, session, _, _| drop(lookup((service, session), false)),
            |service, session, _, _| drop(lookup((service, session), true)),
            |service, session, objects, (file, layout)| {
                let handle = lookup((service, session), true).handle;
                objects.write(file, &layout, 10, 10);
                assert_eq!(service.call(session, MetaCall::Close { handle }), Answer::Done);
            },
            |service, session, _, _| {
                for size in [Some(5), Some(300_000)] {
                    let set = SetAttr { size, ..SetAttr::default() };
                    let call = MetaCall::SetAttr { target: Target::Path(b"f".to_vec()), set };
                    assert!(matches!(service.call(session, call), Answer::Attr(_)));
                }
            },
            // By a client that the server does not know.
            |_, _, objects, (file, layout)| objects.write(file, &layout, 10, 10),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
            let (service, session, old) = written(dir.path(), &objects);
            let layout = Layout::new(lookup((&service, session), false).layout.base, 3, 65536, 3).unwrap();
            drop(service);
            let (service, session) = open(dir.path(), &objects, true);
            let (handle, to) = begin((&service, session));
            objects.write(to.file, &to.layout, 0, 300_000);
            change(&service, session, &objects, (old, layout));
            let answer = commit((&service, session), handle);
            assert!(is_refused(&answer), "change {number}: {answer:?}");
            service.close_session(session);
            settled(&service, &objects, old);
        }
    }

    #[test]
    fn a_copy_whose_program_ends_is_removed_and_so_it_is_with_the_file() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
        let (service, session, old) = written(dir.path(), &objects);
        let (_, to) = begin((&service, session));
        objects.write(to.file, &to.layout, 0, 100_000);
        service.close_session(session);
        settled(&service, &objects, old);
        // The server ends in the middle.
        let session = service.open_session(Who::default()).unwrap();
        let (_, to) = begin((&service, session));
        objects.write(to.file, &to.layout, 0, 100_000);
        assert_eq!(objects.files().len(), 2);
        drop(service);
        let (service, session) = open(dir.path(), &objects, true);
        settled(&service, &objects, old);
        let (_, to) = begin((&service, session));
        objects.write(to.file, &to.layout, 0, 100_000);
        assert!(matches!(
            service.call(session, MetaCall::Unlink { path: b"f".to_vec() }),
            Answer::Removed { links: 0 }
        ));
        service.close_session(session);
        let began = Instant::now();
        while !objects.files().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(30), "{:?}", objects.files());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The process ends before each change of the file system that a commit makes, and after the last.
    #[test]
    fn a_commit_is_done_as_a_whole_or_not_at_all_wherever_it_ends() {
        for kept in 0.. {
            let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
            let (service, session, old) = written(dir.path(), &objects);
            let (_, to) = begin((&service, session));
            objects.write(to.file, &to.layout, 0, 300_000);
            drop(service);
            // As it is on the disk in the middle of a commit: the record exchanged, the mark renamed, the old objects gone.
            let folder = dir.path();
            let opened = crate::meta::directory::MetaDirectory::open_idle(folder).unwrap();
            let fd = opened.disk.open_file(&opened.writers, key_name(old).as_bytes()).unwrap();
            let record = Record::of(&opened.disk, &fd).unwrap();
            assert_eq!((record.key, record.spare), (old, Some((to.file, to.layout))));
            let exchanged = Record {
                key: to.file,
                layout: to.layout,
                seen: Seen { made: 0, ..record.seen },
                spare: Some((old, record.layout)),
            };
            if kept > 0 {
                opened.disk.set_attribute(&fd, FILE_ATTRIBUTE, &exchanged.encode()).unwrap();
            }
            if kept > 1 {
                let (from, to) = (key_name(old), key_name(to.file));
                opened.disk.rename(&opened.writers, from.as_bytes(), &opened.writers, to.as_bytes(), false).unwrap();
            }
            if kept > 2 {
                use crate::meta::Objects as _;
                assert!(objects.unlink(&[(old, record.layout)])[0].is_ok());
            }
            drop((fd, opened));
            let (service, session) = open(folder, &objects, true);
            let expected = if kept == 0 { old } else { to.file };
            settled(&service, &objects, expected);
            let opened = lookup((&service, session), false);
            assert_eq!((opened.file, opened.attr.size, opened.attr.nlink), (expected, 300_000, 1), "after {kept}");
            if kept > 2 {
                break;
            }
        }
    }
}
