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
//!   changed. The file is given its new objects in memory ([`Meta::switch`]), where no one can have it open in between, and
//!   then in its record.
//!
//! **What the disk has** may not be what memory has: a write of the record, or its sync, can fail, and after that the disk may
//! have either. Both places hold the same bytes then, and [`Meta::confirm`] keeps it so: spare objects are removed, and the file
//! is changed, only after the record was written as memory has it, and synced without an error.
//!
//! A client that is cut off may have the file open without our knowledge, for the grace period. So nothing is committed while
//! that may be. One that comes back later finds the objects removed: the data servers say so (EIDRM), and the file is stale.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use impresario_wire::message::{FileKey, LayoutRequest, NodeKind, ObjectInfo, Who};
use impresario_wire::relay::{Objects, Relaid, RelayCall};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::background::Failure;
use super::directory::{MetaDirectory, key_name, names_in};
use super::fault::{Explain, Outcome, data_fault, fault, show};
use super::opens::{Left, OpenFile, Pin, Session};
use super::record::{Record, Seen};
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

    pub(super) fn is_relaid(&self) -> bool {
        self.relay.load(Ordering::SeqCst) != 0
    }
}

impl Meta {
    /// Something is about to change the file: no copy that has begun is of use, and it must be known which objects are the
    /// file's. Call under its gate.
    pub(super) fn end_relays(&self, file: &OpenFile) -> rustix::io::Result<()> {
        file.relay.store(0, Ordering::SeqCst);
        self.confirm(file)
    }

    /// Makes the record durable of a file with spare objects, with the name of its mark. Call under its gate.
    fn confirm(&self, file: &OpenFile) -> rustix::io::Result<()> {
        if file.spare.lock().is_none() || file.is_confirmed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let seen = *file.seen.lock();
        self.remember(file, seen)?;
        self.opens.note_switch();
        self.dir.disk.sync("sync", &file.fd)?;
        let _links = file.links.lock();
        if let Some(name) = self.opens.mark_of(file.ino).filter(|name| *name != file.key) {
            self.rename_mark(key_name(name).as_bytes(), file.key)?;
            self.opens.rename_mark(file.ino, file.key);
        }
        file.is_confirmed.store(true, Ordering::SeqCst);
        Ok(())
    }

    pub(super) fn relay(&self, session: &Session, call: &RelayCall) -> Outcome<Relaid> {
        match call {
            RelayCall::Begin { path } => self.begin_relay(session, path),
            RelayCall::Commit { handle } => self.commit_relay(session, *handle),
            RelayCall::Emptied { server, number, walk } => self.note_emptied(server, *number, *walk),
        }
    }

    fn begin_relay(&self, session: &Session, path: &[u8]) -> Outcome<Relaid> {
        let room = session.take_room()?;
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
        if let Some(why) = self.why_not(&pin) {
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
        let file = self.new_key().explain(DOING, path)?;
        self.walks.note(&[file]);
        self.mark(&pin).explain(DOING, path)?;
        self.opens.note_written(pin.ino);
        pin.is_confirmed.store(false, Ordering::SeqCst);
        *pin.spare.lock() = Some((file, layout));
        self.confirm(&pin).explain(DOING, path)?;
        self.opens.admit(pin.ino, false)?;
        let handle = self.sessions.register(room, &pin, false).inspect_err(|_| {
            self.opens.leave(pin.ino, false);
        })?;
        pin.relay.store(handle, Ordering::SeqCst);
        let made = pin.seen.lock().made;
        let from = Objects { file: pin.key, layout: pin.layout };
        let size = u64::try_from(size).unwrap_or(0);
        Ok(Relaid::Begun { handle, from, made, size, to: Objects { file, layout } })
    }

    /// Why a file cannot be laid out anew now.
    fn why_not(&self, pin: &Pin<'_>) -> Option<String> {
        let (readers, writers, removed) = self.opens.uses_of(pin.ino);
        let grace = self.options.grace;
        let vanished = self.vanished.lock().is_some_and(|at| at.elapsed() < grace);
        match () {
            () if removed => Some("it is removed".into()),
            () if writers > 0 => Some("it is open for writing".into()),
            () if readers > 0 => Some("it is open for reading".into()),
            () if self.started.elapsed() < grace => Some("the metadata server has just started".into()),
            () if vanished => Some("a client was lost just now that had files open".into()),
            () => None,
        }
    }

    fn commit_relay(&self, session: &Session, handle: u64) -> Outcome<Relaid> {
        let pin = self.pin_handle(session, handle)?;
        let path = self.opens.path_of(pin.ino);
        let gate = self.enter(&pin, DOING, &path)?;
        let (file, write) = session.take(handle)?;
        let is_same = file.end_relay(handle);
        drop(self.leave(file, write, Left::Written));
        let spare = *pin.spare.lock();
        let Some((file, layout)) = spare.filter(|_| is_same) else {
            return Ok(Relaid::InUse { why: "it was changed while it was copied".into() });
        };
        if let Some(why) = self.why_not(&pin) {
            return Ok(Relaid::InUse { why });
        }
        let to = Objects { file, layout };
        let objects = self.complete(&pin, &to).map_err(|error| data_fault(&error, DOING, &path))?;
        let Some(objects) = objects else {
            return Ok(Relaid::InUse { why: "it was changed while it was copied".into() });
        };
        if rustix::fs::statat(&self.dir.orphans, key_name(pin.key), AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Ok(Relaid::InUse { why: "one of its names is being removed".into() });
        }
        self.walks.note(&[pin.key, to.file]);
        let seen = Seen { mtime: objects.mtime, made: objects.made, ..*pin.seen.lock() };
        let record = Record { key: to.file, layout: to.layout, seen, spare: Some((pin.key, pin.layout)) };
        let fd = rustix::io::dup(&pin.fd).explain(DOING, &path)?;
        let Some(now) = self.switch(&pin, OpenFile::of(pin.ino, fd, record), PATIENCE) else {
            return Ok(Relaid::InUse { why: "it is being used".into() });
        };
        drop(gate);
        drop(pin);
        let gate = self.enter(&now, DOING, &path)?;
        // Where this fails, nothing is removed or changed before it has succeeded.
        self.confirm(&now).explain(DOING, &path)?;
        if let Err(failure) = self.settle_held(&now, &gate) {
            tracing::warn!(key = now.key.0, ?failure, "the old objects of a file will be removed later");
        }
        Ok(Relaid::Done)
    }

    /// A walk has met no file that is striped over a draining server. Notes that, durably, unless one may have been missed.
    fn note_emptied(&self, server: &str, number: u16, walk: u64) -> Outcome<Relaid> {
        let in_use = |why: &str| Ok(Relaid::InUse { why: why.into() });
        let Some(stores) = &self.options.stores else {
            return in_use("the metadata server has no note of data servers");
        };
        if !(self.options.skipped)().contains(number) {
            return in_use("the metadata server does not read the same configuration, where the server is draining");
        }
        if !self.walks.end_of_draining(walk) {
            return in_use("files or directories were renamed while the names were looked at");
        }
        stores.note_emptied(server, true).explain("note as empty", server.as_bytes())?;
        tracing::info!(server, "no file is striped over this data server any more");
        Ok(Relaid::Done)
    }

    /// Makes the new objects durable, and compares what is known of both; `None`: the file has changed.
    fn complete(&self, pin: &Pin<'_>, to: &Objects) -> std::io::Result<Option<ObjectInfo>> {
        let size = rustix::fs::fstat(&pin.fd)?.st_size;
        let size = u64::try_from(size).unwrap_or(0);
        let own = Who::default();
        self.note_answer(pin, self.objects.truncate(&own, to.file, &to.layout, size))?;
        self.note_answer(pin, self.objects.revoke(&own, to.file, &to.layout))?;
        let new = self.note_answer(pin, self.objects.stat(to.file, &to.layout))?;
        let old = self.ask(pin)?;
        let is_same = old.size == size && new.size == size && old.mtime == pin.seen.lock().mtime;
        Ok(is_same.then_some(new))
    }

    /// Removes the spare objects of a file. Call under its gate.
    pub(super) fn remove_spare(&self, file: &OpenFile) -> Result<(), Failure> {
        let Some(spare) = *file.spare.lock() else { return Ok(()) };
        self.confirm(file)?;
        let removed = self.objects.unlink(&[spare]).pop().unwrap_or(Ok(()));
        self.note_answer(file, removed).map_err(Failure::DataServers)?;
        // A crash may bring the old record back: what it has too much is removed again.
        *file.spare.lock() = None;
        let seen = *file.seen.lock();
        let noted = self.remember(file, seen);
        if noted.is_err() {
            *file.spare.lock() = Some(spare);
        }
        Ok(noted?)
    }

    /// Names a mark after this key.
    fn rename_mark(&self, name: &[u8], key: FileKey) -> rustix::io::Result<Vec<u8>> {
        let now = key_name(key).into_bytes();
        self.dir.disk.rename(&self.dir.writers, name, &self.dir.writers, &now, false)?;
        Ok(now)
    }

    /// At start: a file that was laid out anew just before may have its mark under its old key. Gives the name that it has now.
    pub(super) fn rename_old_mark(&self, name: Vec<u8>, key: FileKey) -> rustix::io::Result<Vec<u8>> {
        if name == key_name(key).as_bytes() { Ok(name) } else { self.rename_mark(&name, key) }
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
        Failure::TooLong(error) => fault(Errno::FBIG, format!("cannot {DOING} {}: {error}", show(path))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::Path;
    use std::sync::Arc;

    use impresario_base::lock::Mutex;
    use impresario_layout::{Layout, Skipped};
    use impresario_wire::message::{Answer, ClusterId, Examine, MetaCall, Opened, SetAttr, Target};
    use rustix::fs::XattrFlags;

    use super::super::opens::Found;
    use super::super::record::FILE_ATTRIBUTE;
    use super::*;
    use crate::meta::{MemoryObjects, MetaOptions, MetaService, SessionId, StepHook, Stores, disk, make};

    fn open(dir: &Path, objects: &Arc<MemoryObjects>, draining: bool) -> (MetaService, SessionId) {
        open_with(dir, objects, draining, None)
    }

    fn open_with(
        dir: &Path,
        objects: &Arc<MemoryObjects>,
        draining: bool,
        before_step: Option<StepHook>,
    ) -> (MetaService, SessionId) {
        let skipped = if draining { Skipped::of([1]).unwrap() } else { Skipped::NONE };
        let skipped = Arc::new(move || skipped);
        let options = MetaOptions { grace: Duration::ZERO, skipped, before_step, ..MetaOptions::new(dir, 3) };
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
        assert_eq!(service.call(session, MetaCall::Close { handle: made.handle, wrote: true }), Answer::Done);
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
            |service, session, _, _| assert!(lookup((service, session), false).handle > 0),
            |service, session, _, _| assert!(lookup((service, session), true).handle > 0),
            |service, session, objects, (file, layout)| {
                let handle = lookup((service, session), true).handle;
                objects.write(file, &layout, 10, 10);
                assert_eq!(service.call(session, MetaCall::Close { handle, wrote: true }), Answer::Done);
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

    /// A record that was read before the file came to other objects is read again.
    #[test]
    fn who_has_read_the_record_before_finds_the_new_objects() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
        let (service, session, old) = written(dir.path(), &objects);
        let (handle, to) = begin((&service, session));
        objects.write(to.file, &to.layout, 0, 300_000);
        let meta = &service.meta;
        let read = || {
            let entry = meta.dir.entry(b"f").unwrap().unwrap();
            meta.read_in(meta.dir.disk.open_file(entry.directory(), entry.name).unwrap()).unwrap().0
        };
        let before = read();
        assert_eq!(before.key, old);
        assert_eq!(commit((&service, session), handle), Answer::Relaid(Relaid::Done));
        let Found::Pinned(pin) = meta.insert_pinned(before, b"f", false) else { panic!("not found") };
        assert_eq!((pin.key, pin.layout), (to.file, to.layout));
        // And while the file is in use, it is found in the table.
        let Found::Pinned(again) = meta.insert_pinned(read(), b"f", false) else { panic!("not found") };
        assert!(std::ptr::eq(&*again, &*pin));
    }

    /// A client that holds the old objects for longer than is waited for it must open the file again.
    #[test]
    fn a_file_that_was_laid_out_anew_is_stale_to_who_had_it_open_before() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
        let (service, session, old) = written(dir.path(), &objects);
        let (handle, to) = begin((&service, session));
        objects.write(to.file, &to.layout, 0, 300_000);
        assert_eq!(commit((&service, session), handle), Answer::Relaid(Relaid::Done));
        let reopen = |file, write| service.call(session, MetaCall::Reopen { path: b"f".to_vec(), file, write });
        for write in [false, true] {
            let answer = reopen(old, write);
            assert!(matches!(&answer, Answer::Fault(fault) if fault.errno == libc::EIDRM), "{answer:?}");
            assert!(matches!(reopen(to.file, write), Answer::Opened(opened) if opened.file == to.file));
        }
    }

    /// No client may be there that could have the file open without our knowledge.
    #[test]
    fn nothing_is_moved_while_a_lost_client_may_come_back() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
        let (service, _, _) = written(dir.path(), &objects);
        drop(service);
        let skipped = Skipped::of([1]).unwrap();
        let grace = Duration::from_millis(600);
        let options = MetaOptions { grace, skipped: Arc::new(move || skipped), ..MetaOptions::new(dir.path(), 3) };
        let service = MetaService::open(options, objects.clone()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        let begin = || service.call(session, MetaCall::Relay(RelayCall::Begin { path: b"f".to_vec() }));
        assert!(is_refused(&begin()), "it has just started");
        std::thread::sleep(grace);
        let other = service.open_session(Who::default()).unwrap();
        lookup((&service, other), false);
        assert!(is_refused(&begin()), "it is open");
        service.close_session(other);
        assert!(is_refused(&begin()), "its client is lost");
        std::thread::sleep(grace);
        let began = begin();
        let Answer::Relaid(Relaid::Begun { handle, to, .. }) = began else { panic!("{began:?}") };
        objects.write(to.file, &to.layout, 0, 300_000);
        let other = service.open_session(Who::default()).unwrap();
        lookup((&service, other), false);
        service.close_session(other);
        assert!(is_refused(&commit((&service, session), handle)), "a client came and is lost meanwhile");
    }

    #[test]
    fn a_server_is_empty_only_if_no_file_can_have_been_missed() {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
        let (service, _, _) = written(dir.path(), &objects);
        drop(service);
        let stores = Arc::new(Stores::open(dir.path()).unwrap());
        let skipped = Skipped::of([1]).unwrap();
        let options = MetaOptions {
            grace: Duration::ZERO,
            skipped: Arc::new(move || skipped),
            stores: Some(stores.clone()),
            ..MetaOptions::new(dir.path(), 3)
        };
        let service = MetaService::open(options, objects.clone()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        let call = |call| service.call(session, call);
        let walk = || match call(MetaCall::Examine(Examine::BeginWalk)) {
            Answer::Examined { walk, .. } => walk,
            other => panic!("{other:?}"),
        };
        let emptied =
            |number, walk| call(MetaCall::Relay(RelayCall::Emptied { server: "data.1".into(), number, walk }));
        let rename = |from: &str, to: &str| {
            call(MetaCall::Rename { from: from.into(), to: to.into(), no_replace: false, whiteout: false });
        };
        call(MetaCall::Mkdir { path: b"d".to_vec(), mode: 0o755, uid: 0, gid: 0 });
        let number = walk();
        assert!(is_refused(&emptied(0, number)), "it gets new files");
        rename("f", "g");
        assert!(is_refused(&emptied(1, number)), "a file on it was renamed");
        let number = walk();
        rename("d", "e");
        assert!(is_refused(&emptied(1, number)), "a directory was renamed");
        let number = walk();
        call(MetaCall::Link { from: b"g".to_vec(), to: b"h".to_vec() });
        assert!(is_refused(&emptied(1, number)), "a file on it has another name");
        let number = walk();
        walk();
        assert!(is_refused(&emptied(1, number)), "another walk has begun");
        let number = walk();
        let create =
            MetaCall::Create { path: b"new".to_vec(), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
        assert!(matches!(call(create), Answer::Opened(_)));
        rename("new", "newer");
        assert!(!stores.is_emptied("data.1"));
        assert_eq!(emptied(1, number), Answer::Relaid(Relaid::Done), "what was renamed is not on it");
        assert!(stores.is_emptied("data.1"));
        assert!(is_refused(&emptied(1, number)), "the walk has ended");
    }

    /// What the steps of the local file system do from some step on.
    #[derive(Clone, Default)]
    struct Fate(Arc<Mutex<Option<(usize, bool)>>>);

    impl Fate {
        /// From the step `at` on, counted from now, the process is stopped, or all steps fail; `None`: it lives.
        fn set(&self, at: Option<(usize, bool)>) {
            *self.0.lock() = at;
        }

        /// It has met its fate.
        fn has_come(&self) -> bool {
            self.0.lock().is_some_and(|(left, _)| left == 0)
        }

        fn hook(&self) -> StepHook {
            let fate = self.clone();
            Arc::new(move |step| {
                let now = match &mut *fate.0.lock() {
                    Some((0, stops)) => Some(*stops),
                    Some((left, _)) => {
                        *left -= 1;
                        None
                    }
                    None => None,
                };
                match now {
                    Some(true) => panic!("stopped before {step}"),
                    Some(false) => disk::Fate::Fails(libc::EIO),
                    None => disk::Fate::Done,
                }
            })
        }
    }

    /// A file that has been copied but for the commit, on a service with this fate.
    fn copied(
        dir: &Path,
        objects: &Arc<MemoryObjects>,
        fate: &Fate,
    ) -> (MetaService, SessionId, FileKey, u64, Objects) {
        let (service, _, old) = written(dir, objects);
        drop(service);
        let (service, session) = open_with(dir, objects, true, Some(fate.hook()));
        let (handle, to) = begin((&service, session));
        objects.write(to.file, &to.layout, 0, 300_000);
        (service, session, old, handle, to)
    }

    fn is_whole(at: (&MetaService, SessionId), keys: [FileKey; 2]) -> FileKey {
        let opened = lookup(at, false);
        assert!(keys.contains(&opened.file), "{opened:?}");
        assert_eq!((opened.attr.size, opened.attr.nlink), (300_000, 1), "{opened:?}");
        assert_eq!(at.0.call(at.1, MetaCall::Close { handle: opened.handle, wrote: true }), Answer::Done);
        opened.file
    }

    /// The process ends before each change of the file system that a commit makes, and after the last.
    #[test]
    fn a_commit_is_done_as_a_whole_or_not_at_all_wherever_it_ends() {
        let (mut was_old, mut was_new) = (false, false);
        for at in 0.. {
            let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
            let fate = Fate::default();
            let (service, session, old, handle, to) = copied(dir.path(), &objects, &fate);
            fate.set(Some((at, true)));
            let committed = catch_unwind(AssertUnwindSafe(|| commit((&service, session), handle)));
            let has_ended = fate.has_come();
            let dropped = catch_unwind(AssertUnwindSafe(|| drop(service)));
            assert!(dropped.is_ok() || has_ended);
            let (service, session) = open(dir.path(), &objects, true);
            let key = is_whole((&service, session), [old, to.file]);
            if committed.is_ok_and(|answer| answer == Answer::Relaid(Relaid::Done)) {
                assert_eq!(key, to.file, "acknowledged and undone, at {at}");
            }
            was_old |= key == old;
            was_new |= key == to.file;
            settled(&service, &objects, key);
            if !has_ended {
                break;
            }
        }
        assert!(was_old && was_new);
    }

    /// A write of the record or its sync fails, or any other step does, and the disk works again later, or the server ends
    /// and the disk has the record of before.
    #[test]
    fn nothing_is_removed_or_changed_while_the_disk_may_have_either_record() {
        for (at, has_before) in (0..).flat_map(|at| [(at, false), (at, true)]) {
            let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
            let fate = Fate::default();
            let (service, session, old, handle, to) = copied(dir.path(), &objects, &fate);
            let mut before = vec![0; 256];
            let len = rustix::fs::getxattr(dir.path().join("names/f"), FILE_ATTRIBUTE, &mut before[..]).unwrap();
            before.truncate(len);
            fate.set(Some((at, false)));
            let committed = commit((&service, session), handle);
            let is_done = committed == Answer::Relaid(Relaid::Done);
            let has_failed = fate.has_come();
            if !is_done {
                assert!(matches!(&committed, Answer::Fault(_)), "{committed:?}");
                let write = service.call(session, MetaCall::Open { path: b"f".to_vec(), write: true });
                assert!(matches!(&write, Answer::Fault(fault) if fault.errno == libc::EIO), "at {at}: {write:?}");
                is_whole((&service, session), [old, to.file]);
                let mut both = objects.files();
                both.sort();
                assert_eq!(both, [old, to.file], "at {at}");
            }
            if has_before && !is_done {
                drop(service);
                rustix::fs::setxattr(dir.path().join("names/f"), FILE_ATTRIBUTE, &before, XattrFlags::empty()).unwrap();
                let (service, session) = open(dir.path(), &objects, true);
                assert_eq!(is_whole((&service, session), [old, to.file]), old);
                settled(&service, &objects, old);
            } else {
                fate.set(None);
                let handle = lookup((&service, session), true).handle;
                assert_eq!(service.call(session, MetaCall::Close { handle, wrote: true }), Answer::Done);
                let key = is_whole((&service, session), [old, to.file]);
                assert!(key == to.file || !is_done, "at {at}");
                settled(&service, &objects, key);
            }
            if !has_failed {
                break;
            }
        }
    }
}
