//! Open files: the table of files in use, and the sessions with their handles.
//!
//! A file is in the table while a client has it open or an operation needs it to stay (a *pin*). The table's lock is
//! held for look-ups only, never across a system call that may wait, let alone a call to data servers.

use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_layout::Layout;
use impresario_node::append::{AllAppends, Appends};
use impresario_wire::message::{ClientKey, FileKey, MetaCall, Who};
use rustc_hash::FxHashMap;
use rustix::io::Errno;

use super::background::Job;
use super::fault::{Outcome, fault};
use super::permissions::{User, Users};
use super::record::{Record, Seen};
use super::service::Meta;

/// Largest number of sessions.
const SESSIONS_MAX: usize = 65_536;
/// Largest number of opens of one session.
const SESSION_OPENS_MAX: usize = 65_536;
/// Largest number of opens of all sessions.
const OPENS_MAX: usize = 1 << 20;
/// Files remembered whose openers were lost: of each client as many as one session has open, and as many as may be open.
const LOST_OF_CLIENT_MAX: u32 = SESSION_OPENS_MAX as u32;
const LOST_MAX: usize = OPENS_MAX;
/// While no more find room, those that are over are looked for this often.
const LOST_LOOK: Duration = Duration::from_secs(1);
/// How often a record is read again because files come to other objects meanwhile.
const READS_MAX: usize = 100;

/// A file of the name space that is in use.
pub(super) struct OpenFile {
    pub(super) ino: u64,
    pub(super) key: FileKey,
    pub(super) layout: Layout,
    /// Open for reading and writing.
    pub(super) fd: OwnedFd,
    /// Held while the file's size is settled or truncated and while a writer is admitted; may be held while waiting for
    /// data servers.
    pub(super) gate: Mutex<()>,
    /// When its data servers have not answered last.
    pub(super) unanswered: Mutex<Option<Instant>>,
    /// Held briefly while the file gains or loses a name in `writers/` or `orphans/`.
    pub(super) links: Mutex<()>,
    /// As in [`super::record::Record`].
    pub(super) seen: Mutex<Seen>,
    /// As in [`super::record::Record`].
    pub(super) spare: Mutex<Option<(FileKey, Layout)>>,
    /// The record on the disk has, durably, these objects and these spare ones. Of importance while there are spare ones.
    pub(super) is_confirmed: AtomicBool,
    /// The handle of the program that copies it to other data servers; 0: none does.
    pub(super) relay: AtomicU64,
    /// [`Opens::switches`] before its record was read.
    pub(super) read_at: u64,
}

impl OpenFile {
    /// With this record, which is read when no file has come to other objects yet.
    pub(super) fn of(ino: u64, fd: OwnedFd, record: Record) -> OpenFile {
        let Record { key, layout, seen, spare } = record;
        let (seen, spare) = (Mutex::new(seen), Mutex::new(spare));
        let (gate, unanswered, links, is_confirmed, relay) = Default::default();
        OpenFile { ino, key, layout, fd, gate, unanswered, links, seen, spare, is_confirmed, relay, read_at: 0 }
    }
}

struct Slot {
    file: Arc<OpenFile>,
    /// Running operations that need the file.
    pins: u32,
    readers: u32,
    writers: u32,
    /// Writers that were admitted since there was none.
    admitted: u32,
    /// It has lost its last name in the name space.
    removed: bool,
    /// Its objects are being removed: no new open is admitted.
    reaping: bool,
    /// Its last known path.
    path: Box<[u8]>,
}

/// The files in use.
pub(super) struct Opens {
    table: Mutex<Table>,
    /// Files that may be open at once: each holds a descriptor.
    files_max: usize,
}

/// Files remembered whose marks are gone.
const UNMARKED_MAX: usize = 64;

#[derive(Default)]
struct Table {
    slots: FxHashMap<u64, Slot>,
    /// Files with a name in `writers/`, whose sizes only the data servers know. Keyed by inode, which the file system
    /// cannot reuse while that name exists.
    marks: FxHashMap<u64, Mark>,
    /// The files whose marks went last, and how many marks have gone.
    unmarked: VecDeque<u64>,
    unmarkings: u64,
    /// The ranges assigned lately of marked files: they outlive the connection of the writer that asked for them.
    appends: AllAppends,
    readers: usize,
    writers: usize,
    /// How often the record of some file came to name other objects.
    switches: u64,
    /// Files with readers or writers.
    opened: usize,
    lost: Lost,
}

/// Files that clients may have open that are not connected: until when they may come back, and the files must not be removed.
/// Who comes back ends nothing, as others may have had the file open, too. Clients that lose their connections again and again, each
/// time with other files, keep no space from being freed: beyond their share, files may go early that they come back to.
#[derive(Default)]
struct Lost {
    /// And the client that counts for it.
    until: FxHashMap<FileKey, (Instant, ClientKey)>,
    /// How many files count for a client.
    shares: FxHashMap<ClientKey, u32>,
    /// Those that are over are not looked for before this instant.
    look_from: Option<Instant>,
    /// All files: after a restart nobody knows who had which open.
    all_until: Option<Instant>,
}

impl Lost {
    fn add(&mut self, key: FileKey, client: ClientKey, until: Instant, now: Instant) {
        if let Some((known, _)) = self.until.get_mut(&key) {
            *known = until.max(*known);
            return;
        }
        let is_full = |lost: &Lost| {
            lost.until.len() >= LOST_MAX || lost.shares.get(&client).is_some_and(|share| *share >= LOST_OF_CLIENT_MAX)
        };
        if is_full(self) && self.look_from.is_none_or(|from| from <= now) {
            self.look_from = Some(now + LOST_LOOK);
            self.until.retain(|_, (until, _)| *until > now);
            self.shares.clear();
            self.until.values().for_each(|(_, client)| *self.shares.entry(*client).or_default() += 1);
            if is_full(self) {
                let client = format!("{:016x}", client.0);
                tracing::warn!(client, "its connection is lost too often; files that it has open may be removed early");
            }
        }
        if !is_full(self) {
            self.until.insert(key, (until, client));
            *self.shares.entry(client).or_default() += 1;
        }
    }

    fn remove(&mut self, key: FileKey) {
        let Some((_, client)) = self.until.remove(&key) else { return };
        if let Some(share) = self.shares.get_mut(&client) {
            *share -= 1;
            if *share == 0 {
                self.shares.remove(&client);
            }
        }
    }

    /// How long a file must not be removed yet.
    fn wait(&self, key: FileKey, now: Instant) -> Duration {
        let until = self.until.get(&key).map(|(until, _)| *until).max(self.all_until);
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }
}

/// A file whose size only the data servers know.
struct Mark {
    /// Its name in `writers/`: the key of the file, or for a moment the one that it had before.
    key: FileKey,
    /// Its objects may have been changed since the local size was right.
    written: bool,
    /// Set when a writer vanished: data it sent may still be on its way to the data servers, so the size must not be
    /// settled before this instant.
    settle_from: Option<Instant>,
    /// Who asked for a truncation that failed and may still be under way.
    doubt: Option<Who>,
}

/// The result of claiming a file for its removal.
pub(super) enum Claim {
    /// No look-up finds it from now on.
    Claimed(Arc<OpenFile>),
    InUse,
    /// A client may come back that has it open, for so long.
    Lost(Duration),
}

/// The result of looking up a file in the table.
pub(super) enum Found<'m> {
    /// In use, now pinned.
    Pinned(Pin<'m>),
    /// In use, but it has no name any more.
    Removed,
    /// Not in use.
    Absent,
}

impl Meta {
    /// Pins a file that is in use. Removed files are found only if `wanted_removed`.
    pub(super) fn pin(&self, ino: u64, wanted_removed: bool) -> Found<'_> {
        let mut table = self.opens.table.lock();
        match table.slots.get_mut(&ino) {
            None => Found::Absent,
            Some(slot) if slot.reaping || (slot.removed && !wanted_removed) => Found::Removed,
            Some(slot) => {
                slot.pins += 1;
                Found::Pinned(Pin { meta: self, file: slot.file.clone() })
            }
        }
    }

    /// Adds a file to the table and pins it; if another thread was faster, pins that one. `removed`: it is an orphan.
    pub(super) fn insert_pinned(&self, mut file: OpenFile, path: &[u8], removed: bool) -> Found<'_> {
        let ino = file.ino;
        for _ in 0..READS_MAX {
            let mut table = self.opens.table.lock();
            if table.slots.contains_key(&ino) {
                drop(table);
                // Closing a descriptor may take a while: not under the lock.
                drop(file);
                return self.pin(ino, removed);
            }
            if table.switches == file.read_at {
                let slot = Slot {
                    file: Arc::new(file),
                    pins: 0,
                    readers: 0,
                    writers: 0,
                    admitted: 0,
                    removed,
                    reaping: false,
                    path: path.into(),
                };
                table.slots.insert(ino, slot);
                drop(table);
                return self.pin(ino, removed);
            }
            // It may have come to other objects after it was read.
            let read_at = table.switches;
            drop(table);
            let Ok(record) = Record::of(&self.dir.disk, &file.fd) else { return Found::Removed };
            file = OpenFile { read_at, ..OpenFile::of(ino, file.fd, record) };
        }
        Found::Removed
    }

    /// Gives a file other objects, if the caller's pin is its only use or becomes so soon: from now on it is found as `file`,
    /// and pinned. The record on the disk is not changed.
    pub(super) fn switch(&self, pin: &Pin<'_>, file: OpenFile, patience: Duration) -> Option<Pin<'_>> {
        let (began, file) = (Instant::now(), Arc::new(file));
        loop {
            let mut table = self.opens.table.lock();
            let slot = table.slots.get_mut(&pin.ino)?;
            if slot.readers + slot.writers > 0 || slot.removed || !Arc::ptr_eq(&slot.file, &pin.file) {
                return None;
            }
            if slot.pins == 1 {
                slot.pins += 1;
                // The caller's pin keeps what was there.
                slot.file = file.clone();
                drop(table);
                return Some(Pin { meta: self, file });
            }
            drop(table);
            if began.elapsed() > patience {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Pins a file through a handle of a session.
    pub(super) fn pin_handle(&self, session: &Session, handle: u64) -> Outcome<Pin<'_>> {
        let held = session.handles.lock().open.get(&handle).map(|held| held.file.clone());
        held.and_then(|file| self.pin_again(file)).ok_or_else(|| no_handle(handle))
    }

    fn pin_again(&self, file: Arc<OpenFile>) -> Option<Pin<'_>> {
        let mut table = self.opens.table.lock();
        let slot = table.slots.get_mut(&file.ino).filter(|slot| Arc::ptr_eq(&slot.file, &file))?;
        slot.pins += 1;
        drop(table);
        Some(Pin { meta: self, file })
    }

    /// Claims a removed, unused file for the removal of its objects; from now on look-ups do not find it.
    pub(super) fn claim(&self, file: OpenFile) -> Claim {
        let ino = file.ino;
        let file = Arc::new(file);
        let mut table = self.opens.table.lock();
        if table.slots.contains_key(&ino) {
            return Claim::InUse;
        }
        let wait = table.lost.wait(file.key, Instant::now());
        if !wait.is_zero() {
            return Claim::Lost(wait);
        }
        table.lost.remove(file.key);
        let slot = Slot {
            file: file.clone(),
            pins: 1,
            readers: 0,
            writers: 0,
            admitted: 0,
            removed: true,
            reaping: true,
            path: Box::default(),
        };
        table.slots.insert(ino, slot);
        Claim::Claimed(file)
    }

    /// Ends a claim.
    pub(super) fn forget(&self, ino: u64) {
        let gone = self.opens.table.lock().slots.remove(&ino);
        drop(gone);
    }

    fn unpin(&self, ino: u64) {
        let mut table = self.opens.table.lock();
        let Some(slot) = table.slots.get_mut(&ino) else { return };
        slot.pins -= 1;
        if slot.pins + slot.readers + slot.writers > 0 {
            // Readers do not need the settled size, but nothing else would settle the file before they close it.
            let unsettled = slot.pins + slot.writers == 0 && !slot.removed && !slot.file.is_relaid();
            if let Some(mark) = table.marks.get(&ino).filter(|_| unsettled) {
                let (key, wait) = (mark.key, mark.wait());
                drop(table);
                self.background.push(Job::Settle(key), wait);
            }
            return;
        }
        let Some(slot) = table.slots.remove(&ino) else { return };
        let settle_in = table.marks.get(&ino).map(|mark| (mark.key, mark.wait()));
        let reap_in = table.lost.wait(slot.file.key, Instant::now());
        drop(table);
        match (slot.removed, settle_in) {
            (true, _) => self.background.push(Job::Reap(slot.file.key), reap_in),
            (false, Some((key, wait))) => self.background.push(Job::Settle(key), wait),
            (false, None) => {}
        }
    }
}

impl Mark {
    /// How long its size must not be settled yet.
    fn wait(&self) -> Duration {
        self.settle_from.map_or(Duration::ZERO, |from| from.saturating_duration_since(Instant::now()))
    }
}

impl Opens {
    pub(super) fn new(files_max: usize) -> Opens {
        Opens { table: Mutex::default(), files_max }
    }

    /// Counts an open of a pinned file.
    pub(super) fn admit(&self, ino: u64, write: bool) -> Outcome<()> {
        let mut table = self.table.lock();
        if table.readers + table.writers >= OPENS_MAX {
            return Err(fault(Errno::NFILE, format!("the metadata server has {OPENS_MAX} open files; close some")));
        }
        if table.slots.get(&ino).is_some_and(|slot| slot.readers + slot.writers == 0) {
            if table.opened >= self.files_max {
                let why =
                    "as many as its limit of descriptors allows; close some, or raise it (LimitNOFILE, ulimit -n)";
                return Err(fault(Errno::NFILE, format!("the metadata server has {} files open, {why}", table.opened)));
            }
            table.opened += 1;
        }
        *(if write { &mut table.writers } else { &mut table.readers }) += 1;
        if let Some(slot) = table.slots.get_mut(&ino) {
            *(if write { &mut slot.writers } else { &mut slot.readers }) += 1;
            slot.admitted = slot.admitted.saturating_add(write.into());
        }
        Ok(())
    }

    /// Ends an open of a pinned file.
    pub(super) fn leave(&self, ino: u64, write: bool) {
        let mut table = self.table.lock();
        let total = if write { &mut table.writers } else { &mut table.readers };
        *total = total.saturating_sub(1);
        if let Some(slot) = table.slots.get_mut(&ino) {
            let count = if write { &mut slot.writers } else { &mut slot.readers };
            let was_open = *count > 0;
            *count = count.saturating_sub(1);
            if slot.writers == 0 {
                slot.admitted = 0;
            }
            if was_open && slot.readers + slot.writers == 0 {
                table.opened = table.opened.saturating_sub(1);
            }
        }
    }

    /// For so long this client may come back, which has this file open.
    pub(super) fn note_lost(&self, key: FileKey, client: ClientKey, grace: Duration) {
        let now = Instant::now();
        self.table.lock().lost.add(key, client, now + grace, now);
    }

    /// At a start after an earlier run: for so long clients may come back that have any file open.
    pub(super) fn note_all_lost(&self, grace: Duration) {
        self.table.lock().lost.all_until = Some(Instant::now() + grace);
    }

    /// Opens for reading and for writing of a pinned file, and whether it is removed.
    pub(super) fn uses_of(&self, ino: u64) -> (u32, u32, bool) {
        self.table.lock().slots.get(&ino).map_or((0, 0, true), |slot| (slot.readers, slot.writers, slot.removed))
    }

    /// For [`OpenFile::read_at`].
    pub(super) fn switches(&self) -> u64 {
        self.table.lock().switches
    }

    /// The record of a pinned file may name other objects than before.
    pub(super) fn note_switch(&self) {
        self.table.lock().switches += 1;
    }

    /// The mark of a file has the name of another key from now on.
    pub(super) fn rename_mark(&self, ino: u64, key: FileKey) {
        if let Some(mark) = self.table.lock().marks.get_mut(&ino) {
            mark.key = key;
        }
    }

    /// Number of writers of a file.
    pub(super) fn writers_of(&self, ino: u64) -> u32 {
        self.table.lock().slots.get(&ino).map_or(0, |slot| slot.writers)
    }

    /// Whether the one writer of a file has been the only one since it came.
    pub(super) fn has_one_writer(&self, ino: u64) -> bool {
        self.table.lock().slots.get(&ino).is_some_and(|slot| (slot.writers, slot.admitted) == (1, 1))
    }

    /// Something else than a writer changes the length of a file.
    pub(super) fn note_other_writer(&self, ino: u64) {
        if let Some(slot) = self.table.lock().slots.get_mut(&ino) {
            slot.admitted = slot.admitted.saturating_add(u32::from(slot.writers > 0));
        }
    }

    /// The mark of a file whose size only the data servers know.
    pub(super) fn mark_of(&self, ino: u64) -> Option<FileKey> {
        self.table.lock().marks.get(&ino).map(|mark| mark.key)
    }

    /// How many marks have gone; for [`marked_since`](Opens::marked_since).
    pub(super) fn unmarkings(&self) -> u64 {
        self.table.lock().unmarkings
    }

    /// Which of these are marked, or were at some time since `unmarkings` was asked for: what was seen of their local size
    /// meanwhile may be older than the mark's end.
    pub(super) fn marked_since(&self, unmarkings: u64, inos: impl Iterator<Item = u64>) -> Vec<bool> {
        let table = self.table.lock();
        let gone = usize::try_from(table.unmarkings - unmarkings).unwrap_or(usize::MAX);
        match (gone, table.marks.is_empty()) {
            (0, true) => Vec::new(),
            // Too many to know.
            _ if gone > table.unmarked.len() => inos.map(|_| true).collect(),
            _ => {
                let recent = |ino: &u64| table.unmarked.iter().rev().take(gone).any(|gone| gone == ino);
                inos.map(|ino| table.marks.contains_key(&ino) || recent(&ino)).collect()
            }
        }
    }

    /// Records that a file has, or is about to have, a name in `writers/`. `written`: its local size may be wrong already.
    pub(super) fn set_mark(&self, ino: u64, key: FileKey, written: bool) {
        let mark = Mark { key, written, settle_from: None, doubt: None };
        let mut table = self.table.lock();
        table.marks.insert(ino, mark);
        table.appends.forget(ino);
    }

    /// The objects of a file may be changed from now on, or may have been by a writer that leaves.
    pub(super) fn note_written(&self, ino: u64) {
        if let Some(mark) = self.table.lock().marks.get_mut(&ino) {
            mark.written = true;
        }
    }

    /// Whether the local size of a marked file is right, if the writers that it has now change nothing.
    pub(super) fn is_unwritten(&self, ino: u64) -> bool {
        self.table.lock().marks.get(&ino).is_some_and(|mark| !mark.written)
    }

    /// Looks at or changes the ranges assigned of a file that is being written; `None` if it is not.
    pub(super) fn with_appends<T>(&self, file: &OpenFile, change: impl FnOnce(&mut Appends) -> T) -> Option<T> {
        let mut table = self.table.lock();
        let is_written = table.slots.get(&file.ino).is_some_and(|slot| slot.writers > 0);
        table.marks.get(&file.ino).filter(|mark| is_written && mark.key == file.key)?;
        Some(table.appends.with(file.ino, change))
    }

    /// Who asked for a truncation of a marked file that failed and may still be under way.
    pub(super) fn doubt_of(&self, ino: u64) -> Option<Who> {
        self.table.lock().marks.get(&ino)?.doubt
    }

    pub(super) fn set_doubt(&self, ino: u64, doubt: Option<Who>) {
        if let Some(mark) = self.table.lock().marks.get_mut(&ino) {
            mark.doubt = doubt;
        }
    }

    /// Delays the settling of a marked file.
    pub(super) fn put_off_settling(&self, ino: u64, by: Duration) {
        if let Some(mark) = self.table.lock().marks.get_mut(&ino) {
            mark.settle_from = Some(Instant::now() + by);
        }
    }

    /// Whether a file is marked and may be settled now.
    pub(super) fn may_settle(&self, ino: u64) -> bool {
        self.table.lock().marks.get(&ino).is_some_and(|mark| mark.wait().is_zero())
    }

    /// Records that a file's name in `writers/` is gone.
    pub(super) fn clear_mark(&self, ino: u64) {
        let mut table = self.table.lock();
        if table.marks.remove(&ino).is_some() {
            table.appends.forget(ino);
            table.unmarkings += 1;
            table.unmarked.push_back(ino);
            if table.unmarked.len() > UNMARKED_MAX {
                table.unmarked.pop_front();
            }
        }
    }

    /// Records that a pinned file has lost its last name.
    pub(super) fn set_removed(&self, ino: u64) {
        if let Some(slot) = self.table.lock().slots.get_mut(&ino) {
            slot.removed = true;
        }
    }

    /// Whether a pinned file has lost its last name.
    pub(super) fn is_removed(&self, ino: u64) -> bool {
        self.table.lock().slots.get(&ino).is_some_and(|slot| slot.removed)
    }

    /// Records a file's new path, if it is in use.
    pub(super) fn moved(&self, ino: u64, path: &[u8]) {
        if let Some(slot) = self.table.lock().slots.get_mut(&ino) {
            slot.path = path.into();
        }
    }

    /// Last known path of a pinned file.
    pub(super) fn path_of(&self, ino: u64) -> Vec<u8> {
        self.table.lock().slots.get(&ino).map_or_else(Vec::new, |slot| slot.path.to_vec())
    }

    /// Counts of open files.
    pub(super) fn counts(&self) -> OpenCounts {
        let table = self.table.lock();
        let Table { slots, marks, readers, writers, .. } = &*table;
        OpenCounts { files: slots.len(), readers: *readers, writers: *writers, marked: marks.len() }
    }
}

/// Counts of open files.
pub(super) struct OpenCounts {
    /// Files in use.
    pub(super) files: usize,
    /// Opens for reading.
    pub(super) readers: usize,
    /// Opens for writing.
    pub(super) writers: usize,
    /// Files whose sizes only the data servers know.
    pub(super) marked: usize,
}

/// Keeps a file in the table.
pub(super) struct Pin<'m> {
    meta: &'m Meta,
    file: Arc<OpenFile>,
}

impl Deref for Pin<'_> {
    type Target = OpenFile;
    fn deref(&self) -> &OpenFile {
        &self.file
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.meta.unpin(self.file.ino);
    }
}

/// Identifies a session until it is closed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionId(pub(super) u64);

/// A client's connection and its open files.
pub(super) struct Session {
    pub(super) id: SessionId,
    who: Who,
    handles: Mutex<Handles>,
    /// What its users are, where not what its calls say.
    pub(super) users: OnceLock<Users>,
}

#[derive(Default)]
struct Handles {
    open: FxHashMap<u64, Held>,
    /// Further ones that calls under way may open.
    rooms: usize,
    ended: bool,
}

/// Room for one more open file of a session. Taken before a call does anything: a file that is made is open then, too, whatever
/// other calls have opened meanwhile.
pub(super) struct Room<'s>(&'s Session);

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.handles.lock().rooms -= 1;
    }
}

struct Held {
    file: Arc<OpenFile>,
    write: bool,
}

/// All sessions.
#[derive(Default)]
pub(super) struct Sessions {
    by_id: Mutex<FxHashMap<SessionId, Arc<Session>>>,
    next_session: AtomicU64,
    next_handle: AtomicU64,
}

impl Sessions {
    pub(super) fn start(&self, who: Who) -> Outcome<SessionId> {
        let id = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed) + 1);
        let mut by_id = self.by_id.lock();
        if by_id.len() >= SESSIONS_MAX {
            return Err(fault(
                Errno::USERS,
                format!("the metadata server has {SESSIONS_MAX} clients, which is its limit"),
            ));
        }
        by_id.insert(id, Arc::new(Session { id, who, handles: Mutex::default(), users: OnceLock::new() }));
        Ok(id)
    }

    pub(super) fn get(&self, id: SessionId) -> Outcome<Arc<Session>> {
        let session = self.by_id.lock().get(&id).cloned();
        session.ok_or_else(|| fault(Errno::NOTCONN, "the session has ended; reconnect"))
    }

    /// Removes a session and returns what it had open.
    pub(super) fn end(&self, id: SessionId) -> Vec<(u64, Arc<OpenFile>, bool)> {
        let Some(session) = self.by_id.lock().remove(&id) else { return Vec::new() };
        let mut handles = session.handles.lock();
        handles.ended = true;
        if !handles.open.is_empty() {
            tracing::info!(client = session.who.client.0, files = handles.open.len(), "a client left files open");
        }
        let open = std::mem::take(&mut handles.open).into_iter();
        open.map(|(handle, held)| (handle, held.file, held.write)).collect()
    }

    /// Gives a session a handle for an admitted file.
    pub(super) fn register(&self, room: Room<'_>, pin: &Pin<'_>, write: bool) -> Outcome<u64> {
        // Given back after the lock.
        let session = room.0;
        let mut handles = session.handles.lock();
        if handles.ended {
            return Err(fault(Errno::NOTCONN, "the session has ended; reconnect"));
        }
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed) + 1;
        handles.open.insert(handle, Held { file: pin.file.clone(), write });
        Ok(handle)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.lock().len()
    }
}

impl Session {
    /// The client whose session it is.
    pub(super) fn client(&self) -> ClientKey {
        self.who.client
    }

    /// As whom a call is served; `None`: as root.
    pub(super) fn user_of(&self, who: &Who, call: &MetaCall) -> Outcome<Option<Arc<User>>> {
        self.users.get().map_or(Ok(None), |users| users.of(who.user, call))
    }

    /// Takes room for a file that is to be opened.
    pub(super) fn take_room(&self) -> Outcome<Room<'_>> {
        let mut handles = self.handles.lock();
        if handles.open.len() + handles.rooms >= SESSION_OPENS_MAX {
            return Err(full());
        }
        handles.rooms += 1;
        Ok(Room(self))
    }

    /// Checks that a handle is open for writing.
    pub(super) fn check_writes(&self, handle: u64) -> Outcome<()> {
        let write = self.handles.lock().open.get(&handle).map(|held| held.write);
        match write.ok_or_else(|| no_handle(handle))? {
            true => Ok(()),
            false => Err(fault(Errno::BADF, format!("handle {handle} is open for reading only"))),
        }
    }

    /// Removes a handle.
    pub(super) fn take(&self, handle: u64) -> Outcome<(Arc<OpenFile>, bool)> {
        let held = self.handles.lock().open.remove(&handle);
        held.map(|held| (held.file, held.write)).ok_or_else(|| no_handle(handle))
    }
}

fn full() -> super::Fault {
    fault(Errno::MFILE, format!("the client has {SESSION_OPENS_MAX} files open; close some"))
}

fn no_handle(handle: u64) -> super::Fault {
    fault(Errno::BADF, format!("handle {handle} is not open on this connection"))
}

/// How an open ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Left {
    /// Its client closed it, and says that it has changed nothing.
    Unwritten,
    /// Its client closed it.
    Written,
    /// This client did not close it.
    Vanished(ClientKey),
}

impl Meta {
    /// Ends an open: counts it out and pins the file for the remaining work.
    pub(super) fn leave(&self, file: Arc<OpenFile>, write: bool, how: Left) -> Option<Pin<'_>> {
        let pin = self.pin_again(file)?;
        let vanished = if let Left::Vanished(client) = how { Some(client) } else { None };
        if write && how != Left::Unwritten {
            // Before it is counted out: without writers the file may be settled at once.
            self.opens.note_written(pin.ino);
        }
        if let Some(client) = vanished {
            // Before it is counted out, for the same reason.
            self.opens.note_lost(pin.key, client, self.options.grace);
        }
        self.opens.leave(pin.ino, write);
        if vanished.is_some() && write {
            self.opens.put_off_settling(pin.ino, self.options.grace);
        }
        Some(pin)
    }

    /// The file of a handle, and whether it is open for writing.
    pub(super) fn held_by(&self, session: SessionId, handle: u64) -> Option<(Arc<OpenFile>, bool)> {
        let session = self.sessions.get(session).ok()?;
        let handles = session.handles.lock();
        handles.open.get(&handle).map(|held| (held.file.clone(), held.write))
    }

    /// Whether ending this open may wait for data servers or for the disk.
    pub(super) fn close_may_wait(&self, session: SessionId, handle: u64, wrote: bool) -> bool {
        self.held_by(session, handle).filter(|(_, write)| *write).is_some_and(|(file, _)| {
            wrote || !self.dir.disk.ordered || !self.opens.is_unwritten(file.ino) || file.spare.lock().is_some()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_client_as_many_lost_files_are_remembered_as_it_may_have_open_and_no_more() {
        let (mut lost, now, hour) = (Lost::default(), Instant::now(), Duration::from_secs(3600));
        let is_kept = |lost: &Lost, key, now| !lost.wait(FileKey(key), now).is_zero();
        let share = u64::from(LOST_OF_CLIENT_MAX);
        let lose = |lost: &mut Lost, client: u64, keys: std::ops::Range<u64>, now| {
            keys.for_each(|key| lost.add(FileKey(key), ClientKey(client), now + hour, now));
        };
        // Again and again.
        for client in [1, 2, 1, 2] {
            lose(&mut lost, client, client * share..(client + 1) * share, now);
        }
        assert!((share..3 * share).all(|key| is_kept(&lost, key, now)));
        assert!(!is_kept(&lost, 0, now), "a file of nobody");
        lose(&mut lost, 1, 10 * share..11 * share, now);
        assert!(!is_kept(&lost, 10 * share, now), "beyond its share");
        assert!(lost.until.len() == 2 * LOST_OF_CLIENT_MAX as usize && !is_kept(&lost, 0, now));
        lose(&mut lost, 3, 0..1, now);
        assert!(is_kept(&lost, 0, now), "others have theirs");
        lost.remove(FileKey(share));
        lose(&mut lost, 1, 10 * share..11 * share, now);
        assert!(is_kept(&lost, 10 * share, now) && !is_kept(&lost, 10 * share + 1, now), "one has gone");
        lost.add(FileKey(0), ClientKey(3), now, now);
        assert!(is_kept(&lost, 0, now), "the later one counts");
        let later = now + hour;
        lose(&mut lost, 1, 10 * share..11 * share, later);
        assert!((10 * share..11 * share).all(|key| is_kept(&lost, key, later)), "those that are over have gone");
        for client in 100..=100 + (LOST_MAX as u64 / share) {
            lose(&mut lost, client, client * share..(client + 1) * share, later);
        }
        assert_eq!(lost.until.len(), LOST_MAX);
        assert_eq!(lost.shares.values().sum::<u32>() as usize, LOST_MAX);
    }

    #[test]
    fn calls_under_way_have_room_for_what_they_open() {
        let sessions = Sessions::default();
        let session = sessions.get(sessions.start(Who::default()).unwrap()).unwrap();
        let mut rooms: Vec<_> = (0..SESSION_OPENS_MAX).map(|_| session.take_room().unwrap()).collect();
        assert_eq!(session.take_room().err().map(|full| full.errno), Some(Errno::MFILE.raw_os_error()));
        rooms.pop();
        drop(session.take_room().unwrap());
        drop(rooms);
        assert_eq!(session.handles.lock().rooms, 0);
    }

    #[test]
    fn a_file_whose_mark_went_meanwhile_is_looked_at_again() {
        let opens = Opens::new(usize::MAX);
        assert!(opens.marked_since(opens.unmarkings(), [1].into_iter()).is_empty());
        opens.set_mark(1, FileKey(10), false);
        opens.set_mark(2, FileKey(20), false);
        let before = opens.unmarkings();
        assert_eq!(opens.marked_since(before, [1, 2, 3].into_iter()), [true, true, false]);
        opens.clear_mark(1);
        opens.clear_mark(1);
        assert_eq!(opens.marked_since(before, [1, 2, 3].into_iter()), [true, true, false]);
        opens.clear_mark(2);
        assert_eq!(opens.marked_since(before, [1, 2, 3].into_iter()), [true, true, false]);
        assert!(opens.marked_since(opens.unmarkings(), [1, 2, 3].into_iter()).is_empty());
        for ino in 100..=100 + UNMARKED_MAX as u64 {
            opens.set_mark(ino, FileKey(ino), false);
            opens.clear_mark(ino);
        }
        assert_eq!(opens.marked_since(before, [1, 3].into_iter()), [true, true], "too many to know");
    }
}
