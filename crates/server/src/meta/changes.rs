//! Which changes were done: remembered in memory and, over restarts, in the file `changes`.
//!
//! A change is noted before it begins and again when it has ended, 32 bytes each; one that fails before it has changed anything is not
//! noted at all. A restarted server thus knows which
//! changes an earlier run did, and of which it only knows that they had begun: a crash came between the change and
//! its second note. A client that asks for such a one again gets it done, unless the name space shows that it was: the first
//! note says which node the name is to get, or had before if the change takes it away. Changes of names hold them until it is
//! noted how they have ended ([`Undone`]), and a node that did not get its name is there until then. So nobody has built on a
//! change that is not noted, and what others do shows no node in its place. Directories above are not held: one that is moved
//! between a change in it and the second note, right before a crash, lets the change fail as if its directory had not been there.
//! What others have done to the names since the restart could show a wrong node, so the names that they change are remembered as
//! long as such changes are open; a change whose names are among them fails.
//!
//! **Truncations.** A client compares the states of the data servers that have cut a file with those at its next sync. The note that a
//! truncation was done has a digest of them: to a client that asks again, a restarted server says whether they are still so. While
//! ranges of the file are assigned behind its new end, the truncation itself is noted too: a server that is killed before it has taken
//! them back does so later.
//!
//! Others write to the data servers without a word to this one. That the objects are cut is therefore noted as soon as they are: a copy
//! that finds a restarted server cuts nothing that was written since.
//!
//! **Appends.** Ranges that were assigned are noted, so that an append whose answer was lost with the server gets its own again.
//!
//! The epochs of clients are noted, too, so that what they have given up is refused after a restart.
//!
//! The file outlives the process. Where a client has begun a new epoch, it is synced before the next fsync of a file or
//! directory is answered: after a crash of the machine, too, nothing that was given up before is done. Of the changes
//! themselves such a crash may forget some; a copy that comes within its client's time is then done again.
//!
//! **A full disk.** Without a note nothing is changed, and so nothing removed. Space for notes is therefore allocated ahead, and
//! for the file that takes this one's place. A server that finds no space for a new file goes on with the old one.
//!
//! **A failed sync** leaves unknown what the device has: the file is written anew before the next one.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use impresario_base::Durable;
use impresario_base::lock::Mutex;
use impresario_base::random::mix;
use impresario_node::session::{Admission, Kept, Replies, Stamp};
use impresario_wire::message::{Answer, ClientKey, Fault, FileKey, LaneState, MetaCall, SetAttr, Target, Who};
use rustc_hash::FxHashMap;
use rustix::io::Errno;

use super::directory::MetaDirectory;
use super::fault::{Explain, Outcome, data_fault, fault};
use super::labels::is_acl;
use super::opens::SessionId;
use super::service::{Meta, MetaService};
use super::tree::{Absent, check_path};

/// Clients and changes that are remembered at least.
const CLIENTS_MAX: usize = 16 << 10;
const REPLIES_MAX: usize = 16 << 10;
/// Ranges of appends that are remembered over a restart.
const RANGES_MAX: usize = 16 << 10;
/// The file is rewritten when it is longer, bytes.
const FILE_MAX_BYTES: u64 = 4 * ((REPLIES_MAX + CLIENTS_MAX) * NOTE_BYTES) as u64;
/// Where it cannot be rewritten, it may become so long.
const ROOM_BYTES: u64 = FILE_MAX_BYTES + FILE_MAX_BYTES / 4;
/// To rewrite it is tried again after so many more.
const TRY_AGAIN_BYTES: u64 = 1024 * NOTE_BYTES as u64;
const NOTE_BYTES: usize = 32;
/// Names that are remembered for changes that an earlier run began.
const TOUCHED_MAX: usize = 16 << 10;

/// What is known of a change.
#[derive(Clone)]
enum Known {
    /// It was done, with this answer.
    Answered(Answer),
    /// It made this file, or opened it.
    Opened(FileKey),
    /// An earlier run did it; with the digest of the states of the data servers that have changed a length, or 0.
    Done(u64),
    /// An earlier run began it.
    Begun(Begun),
    /// An earlier run began to exchange two names.
    Exchanging(Begun),
}

/// A change of which it is not known whether it was done.
#[derive(Clone, Copy)]
struct Begun {
    /// The node that its name is to get if it gives one, or that its first name had before; 0: none. Of an extended attribute: 1 where
    /// there was one before. Of a truncation: 0 until the objects are cut, then the digest of [`Known::Done`].
    node: u64,
    /// It was the last run: what others have done to the name space since is known.
    is_of_last_run: bool,
}

impl Known {
    /// What an answer says; `None` when nothing was changed.
    fn of(answer: &Answer) -> Option<Known> {
        match answer {
            Answer::Fault(_) => None,
            Answer::Opened(opened) => Some(Known::Opened(opened.file)),
            other => Some(Known::Answered(other.clone())),
        }
    }

    /// Of a change that was done: see [`Known::Done`].
    fn digest(&self) -> u64 {
        match self {
            Known::Answered(Answer::Cut { lanes, .. }) => digest(lanes),
            Known::Done(digest) => *digest,
            _ => 0,
        }
    }
}

/// Of the states of data servers; never 0.
fn digest(lanes: &[LaneState]) -> u64 {
    let mut lanes = lanes.to_vec();
    lanes.sort_unstable_by_key(|lane| lane.server);
    lanes.iter().fold(1, |digest, lane| mix(mix(digest ^ u64::from(lane.server)) ^ lane.state)) | 1
}

/// The changes done lately.
pub(super) struct Changes {
    replies: Mutex<Replies<Known>>,
    file: Mutex<File>,
    /// Held over a sync and what it says: the kernel tells a descriptor only once that it has lost something.
    syncing: Mutex<()>,
    /// Exchanges of names are done one at a time, and what an earlier run began is ended so: two copies must not both end it.
    ending: Mutex<()>,
    /// How many changes that an earlier run began nobody has ended yet.
    open: AtomicUsize,
    /// The names that were changed since the start, while there are such.
    touched: Mutex<Touched>,
    /// What is noted of the changes under way, by client and sequence.
    begun: Mutex<Noted>,
    /// Notes of new epochs.
    epochs: Durable,
    /// Files that are being cut, or were when an earlier run ended, to which length.
    cuts: Mutex<FxHashMap<FileKey, u64>>,
    /// Notes of ranges that were assigned to appends, the oldest first.
    ranges: Mutex<VecDeque<Note>>,
}

/// Names that were changed since the start.
#[derive(Default)]
struct Touched {
    paths: Vec<Vec<u8>>,
    /// There were more than are remembered.
    are_more: bool,
}

impl Touched {
    fn add(&mut self, paths: impl Iterator<Item = Vec<u8>>) {
        for path in paths {
            if self.paths.len() >= TOUCHED_MAX {
                *self = Touched { paths: Vec::new(), are_more: true };
            }
            if !self.are_more && self.paths.last() != Some(&path) {
                self.paths.push(path);
            }
        }
    }

    /// Whether one of these names, or one above or below it, may be among them.
    fn has(&self, path: &[u8]) -> bool {
        let is_below = |path: &[u8], above: &[u8]| {
            path.strip_prefix(above).is_some_and(|rest| above.is_empty() || rest.is_empty() || rest.starts_with(b"/"))
        };
        self.are_more || self.paths.iter().any(|other| is_below(path, other) || is_below(other, path))
    }
}

/// Of changes under way, by client and sequence: kind and key of their last notes.
type Noted = FxHashMap<(u64, u64), (u32, u64)>;

struct File {
    fd: Arc<OwnedFd>,
    len: u64,
    /// It is rewritten when it has become so long.
    renew_at: u64,
    /// A sync of it or of its name has failed: it must be rewritten before anything is promised.
    is_doubtful: bool,
}

impl File {
    fn new(fd: OwnedFd, len: u64) -> File {
        File { fd: Arc::new(fd), len, renew_at: FILE_MAX_BYTES, is_doubtful: false }
    }

    /// Has another file with these notes take its place.
    fn renew(&mut self, directory: &MetaDirectory, notes: &[u8]) -> rustix::io::Result<()> {
        let fd = directory.disk.prepare_changes(&directory.top, notes, ROOM_BYTES)?;
        // From here on either may have the name after a crash.
        self.is_doubtful = true;
        directory.disk.replace_changes(&directory.top)?;
        // This gives the old one's space back, for the next.
        *self = File::new(fd, notes.len() as u64);
        directory.disk.reserve_changes(&directory.top, ROOM_BYTES);
        Ok(())
    }

    /// Makes room for another note.
    fn make_room(&mut self, directory: &MetaDirectory, notes: &[u8]) -> rustix::io::Result<()> {
        match self.renew(directory, notes) {
            Err(error) if !self.is_doubtful && self.len < ROOM_BYTES => {
                tracing::warn!(%error, "the file `changes` of the metadata directory cannot be rewritten; it grows");
                self.renew_at = self.len + TRY_AGAIN_BYTES;
                Ok(())
            }
            renewed => renewed,
        }
    }
}

/// A note in the file.
#[derive(Clone, Copy)]
struct Note {
    kind: u32,
    who: Who,
    /// Of [`OPENED`] and [`CUTTING`]; of [`BEGUN`] and [`EXCHANGING`], [`Begun::node`]; of [`DONE`], [`Known::Done`].
    key: FileKey,
}

const BEGUN: u32 = 1;
const DONE: u32 = 2;
const OPENED: u32 = 3;
/// It failed without having changed anything.
const FAILED: u32 = 4;
/// No change: a client has begun this epoch, and changes up to this sequence were forgotten.
const CLIENT: u32 = 5;
/// No change: the epoch of clients that are not remembered.
const BASE: u32 = 6;
/// No change: changes were forgotten, of this epoch at the latest.
const FORGOT: u32 = 7;
/// An exchange of two names begins.
const EXCHANGING: u32 = 8;
/// No change: the objects of a file are being cut, to the length that is in the place of the client.
const CUTTING: u32 = 9;
/// No change: that has ended.
const CUT: u32 = 10;
/// No change: the append with this sequence was assigned the range at the offset that is in the place of the key; its length is in
/// that of the epoch.
const ASSIGNED: u32 = 11;
/// With [`BEGUN`] or [`EXCHANGING`]: not by the run that has written the note, but by one before.
const BEFORE: u32 = 16;

impl Note {
    fn of_cut(kind: u32, key: FileKey, len_bytes: u64) -> Note {
        Note { kind, who: Who { client: ClientKey(len_bytes), ..Who::default() }, key }
    }

    /// Nothing if it is longer than a note can say.
    fn of_range(who: &Who, offset: u64, len_bytes: u64) -> Option<Note> {
        let who = Who { epoch: u32::try_from(len_bytes).ok()?, ..*who };
        Some(Note { kind: ASSIGNED, who, key: FileKey(offset) })
    }

    fn encode(&self) -> [u8; NOTE_BYTES] {
        let mut bytes = [0; NOTE_BYTES];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.who.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.who.client.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.who.sequence.to_le_bytes());
        bytes[24..].copy_from_slice(&self.key.0.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Note> {
        let [k0, k1, k2, k3, e0, e1, e2, e3, rest @ ..] = bytes.first_chunk::<NOTE_BYTES>()?;
        let (client, rest) = rest.split_first_chunk::<8>()?;
        let (sequence, key) = rest.split_first_chunk::<8>()?;
        let who = Who {
            client: ClientKey(u64::from_le_bytes(*client)),
            epoch: u32::from_le_bytes([*e0, *e1, *e2, *e3]),
            sequence: u64::from_le_bytes(*sequence),
            ..Who::default()
        };
        let kind = u32::from_le_bytes([*k0, *k1, *k2, *k3]);
        let key = FileKey(u64::from_le_bytes(*key.first_chunk::<8>()?));
        let is_known = (BEGUN..=ASSIGNED).contains(&kind) || [BEFORE | BEGUN, BEFORE | EXCHANGING].contains(&kind);
        is_known.then_some(Note { kind, who, key })
    }
}

impl Changes {
    /// Takes up what earlier runs noted in the directory.
    pub(super) fn open(directory: &MetaDirectory) -> rustix::io::Result<Changes> {
        let mut replies = Replies::new(CLIENTS_MAX, REPLIES_MAX);
        let (mut cuts, mut ranges) = (FxHashMap::default(), VecDeque::new());
        let noted = std::fs::read(directory.dir.join("changes")).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(Vec::new()),
            _ => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        })?;
        // What is torn or of unknown kind was not acknowledged.
        for note in noted.chunks_exact(NOTE_BYTES).filter_map(Note::decode) {
            let Who { client: ClientKey(client), epoch, sequence, .. } = note.who;
            let change = |reply| Kept::Change { client, epoch, sequence, reply };
            replies.restore(match note.kind {
                CUTTING => {
                    cuts.insert(note.key, client);
                    continue;
                }
                CUT => {
                    cuts.remove(&note.key);
                    continue;
                }
                ASSIGNED => {
                    add_range(&mut ranges, note);
                    continue;
                }
                BASE => Kept::Base(epoch),
                FORGOT => Kept::Forgot(epoch),
                CLIENT => Kept::Client { client, epoch, forgotten: sequence },
                BEGUN | EXCHANGING => change(Some(begun(&note))),
                kind if kind & BEFORE != 0 => change(Some(begun(&note))),
                DONE => change(Some(Known::Done(note.key.0))),
                OPENED => change(Some(Known::Opened(note.key))),
                _ => change(None),
            });
        }
        let notes = encode_all(&replies, &Noted::default(), &cuts, &ranges);
        let open = notes.chunks_exact(NOTE_BYTES).filter_map(Note::decode).filter(|note| note.kind & BEFORE != 0);
        let open: Vec<Note> = open.collect();
        let file = match directory.disk.prepare_changes(&directory.top, &notes, ROOM_BYTES) {
            Ok(fd) => {
                directory.disk.replace_changes(&directory.top)?;
                directory.disk.reserve_changes(&directory.top, ROOM_BYTES);
                File::new(fd, notes.len() as u64)
            }
            // What is there is as good, and has room.
            Err(error @ (Errno::NOSPC | Errno::DQUOT)) => {
                let fd = directory.disk.open_changes(&directory.top).map_err(|_| error)?;
                let torn = noted.len() % NOTE_BYTES;
                if torn > 0 {
                    directory.disk.append_change(&fd, &[0; NOTE_BYTES][torn..])?;
                }
                let before = open.iter().flat_map(Note::encode).collect::<Vec<u8>>();
                directory.disk.append_change(&fd, &before)?;
                File::new(fd, (noted.len().next_multiple_of(NOTE_BYTES) + before.len()) as u64)
            }
            Err(error) => return Err(error),
        };
        Ok(Changes {
            replies: Mutex::new(replies),
            file: Mutex::new(file),
            syncing: Mutex::default(),
            ending: Mutex::default(),
            open: AtomicUsize::new(open.len()),
            touched: Mutex::default(),
            begun: Mutex::default(),
            epochs: Durable::default(),
            cuts: Mutex::new(cuts),
            ranges: Mutex::new(ranges),
        })
    }

    /// Appends a note. What it says is to be remembered under the same lock, or a file written anew could lack it.
    fn append(&self, directory: &MetaDirectory, file: &mut File, note: Note) -> rustix::io::Result<()> {
        if file.is_doubtful || file.len > file.renew_at {
            file.make_room(directory, &self.all_notes())?;
        }
        directory.disk.append_change(&file.fd, &note.encode()).inspect_err(|_| {
            // What comes behind a part of a note could not be read.
            let is_as_before =
                rustix::fs::fstat(&file.fd).is_ok_and(|stat| u64::try_from(stat.st_size) == Ok(file.len));
            file.is_doubtful |= !is_as_before;
        })?;
        file.len += NOTE_BYTES as u64;
        Ok(())
    }

    /// Notes that a change begins, if it is one to be noted. `node`: see [`Begun::node`].
    pub(super) fn begin<'a>(&'a self, directory: &'a MetaDirectory, by: By<'a>, node: u64) -> Outcome<Undone<'a>> {
        self.note_begin(directory, by, (BEGUN, node)).map_err(not_noted)?;
        Ok(Undone { changes: self, directory, by })
    }

    fn note_begin(&self, directory: &MetaDirectory, by: By<'_>, what: (u32, u64)) -> rustix::io::Result<()> {
        let Some(noted) = by.noted.filter(|noted| noted.get() != Some(what)) else { return Ok(()) };
        let (who, (kind, node)) = (*by.who, what);
        let mut file = self.file.lock();
        let appended = self.append(directory, &mut file, Note { kind, who, key: FileKey(node) });
        // Of a file in doubt it is not known whether it has the note.
        if appended.is_ok() || file.is_doubtful {
            noted.set(Some(what));
        }
        appended?;
        self.begun.lock().insert((who.client.0, who.sequence), what);
        Ok(())
    }

    /// Remembers the names that a change is about to touch, while others depend on who has touched what.
    fn touch(&self, names: impl FnOnce() -> Vec<Vec<u8>>) {
        if self.open.load(Ordering::Acquire) > 0 {
            let names = names();
            self.touched.lock().add(names.into_iter());
        }
    }

    /// Refuses a change of these names that an earlier run had begun when what the name space shows of it may be the work of others.
    fn check_hidden(&self, begun: Begun, names: &[Vec<u8>]) -> Outcome<()> {
        let touched = self.touched.lock();
        if begun.is_of_last_run && !names.iter().any(|path| touched.has(path)) { Ok(()) } else { Err(hidden()) }
    }

    /// A change that an earlier run had begun has ended.
    fn ended(&self) {
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            *self.touched.lock() = Touched::default();
        }
    }

    /// Notes, before an exchange of names that [`MetaService::call_from`] has begun, which node its first name is of.
    pub(super) fn note_exchange<'a>(
        &'a self,
        directory: &'a MetaDirectory,
        by: By<'a>,
        node: u64,
    ) -> rustix::io::Result<Undone<'a>> {
        self.note_begin(directory, by, (EXCHANGING, node))?;
        let undone = Undone { changes: self, directory, by };
        if by.noted.is_some() {
            // A crash of the machine must not keep the exchange and forget the note: a copy would undo it.
            self.sync_file(directory)?;
        }
        Ok(undone)
    }

    /// The end of a change could not be noted: a restarted server would take it for one that had begun, and could do it again. What
    /// is remembered says how it has ended.
    fn write_anew(&self, directory: &MetaDirectory, file: &mut File) {
        file.is_doubtful = true;
        if let Err(error) = file.renew(directory, &self.all_notes()) {
            tracing::warn!(%error, "the end of a change could not be noted; others wait until it is");
        }
    }

    /// What is remembered, for a file. Call under the file's lock.
    fn all_notes(&self) -> Vec<u8> {
        // Not in the call: its lock would be held over it.
        let (begun, cuts) = (self.begun.lock().clone(), self.cuts.lock().clone());
        encode_all(&self.replies.lock(), &begun, &cuts, &self.ranges.lock())
    }

    fn sync_file(&self, directory: &MetaDirectory) -> rustix::io::Result<()> {
        let _syncing = self.syncing.lock();
        let mut file = self.file.lock();
        if file.is_doubtful {
            return file.renew(directory, &self.all_notes());
        }
        // Notes may be taken meanwhile.
        let fd = file.fd.clone();
        drop(file);
        directory.disk.sync_changes(&*fd).inspect_err(|_| self.file.lock().is_doubtful = true)
    }

    /// Notes that the objects of a file are about to be cut to this length, before they are.
    pub(super) fn note_cut(&self, directory: &MetaDirectory, file: FileKey, len_bytes: u64) -> rustix::io::Result<()> {
        let mut notes = self.file.lock();
        let noted = self.append(directory, &mut notes, Note::of_cut(CUTTING, file, len_bytes));
        if noted.is_ok() {
            self.cuts.lock().insert(file, len_bytes);
        }
        noted
    }

    /// Notes of a truncation that the objects are cut, to these states. Where that fails it is as if the server had been killed before.
    pub(super) fn note_was_cut(&self, directory: &MetaDirectory, by: By<'_>, lanes: &[LaneState]) {
        if let Err(error) = self.note_begin(directory, by, (BEGUN, digest(lanes))) {
            tracing::warn!(%error, "it could not be noted that a file was cut");
        }
    }

    /// Notes the range that an append was assigned. Where that fails it is as if the server had been killed before.
    pub(super) fn note_range(&self, directory: &MetaDirectory, who: &Who, offset: u64, len_bytes: u64) {
        let Some(note) = Note::of_range(who, offset, len_bytes).filter(|note| note.who.client.0 != 0) else { return };
        let mut file = self.file.lock();
        match self.append(directory, &mut file, note) {
            Ok(()) => add_range(&mut self.ranges.lock(), note),
            Err(error) => tracing::warn!(%error, "the range of an append could not be noted"),
        }
    }

    /// Where the range of an append is that was noted.
    pub(super) fn range_of(&self, who: &Who, len_bytes: u64) -> Option<u64> {
        let of = |note: &Note| (note.who.client, note.who.sequence, note.who.epoch);
        let wanted = of(&Note::of_range(who, 0, len_bytes)?);
        self.ranges.lock().iter().rev().find(|note| of(note) == wanted).map(|note| note.key.0)
    }

    /// To which length a file was being cut when an earlier run ended.
    pub(super) fn cut_of(&self, file: FileKey) -> Option<u64> {
        self.cuts.lock().get(&file).copied()
    }

    /// What is to be known of the cut of a file is beside its data.
    pub(super) fn end_cut(&self, directory: &MetaDirectory, file: FileKey) {
        let mut notes = self.file.lock();
        if self.cuts.lock().remove(&file).is_none() {
            return;
        }
        if let Err(error) = self.append(directory, &mut notes, Note::of_cut(CUT, file, 0)) {
            tracing::warn!(%error, "the end of a truncation could not be noted");
            // A restarted server must not take it for one that is under way.
            notes.is_doubtful = true;
        }
    }

    /// Ends those that are of no file in need of them any more.
    pub(super) fn end_cuts_unless(&self, directory: &MetaDirectory, is_needed: impl Fn(FileKey) -> bool) {
        let all: Vec<FileKey> = self.cuts.lock().keys().copied().collect();
        all.into_iter().filter(|file| !is_needed(*file)).for_each(|file| self.end_cut(directory, file));
    }

    /// The latest epoch that is known of a client.
    pub(super) fn epoch_of(&self, client: u64) -> u32 {
        self.replies.lock().epoch_of(client)
    }

    /// Whether a change of a client is under way that was admitted in an epoch before this one.
    pub(super) fn is_any_before(&self, client: u64, epoch: u32) -> bool {
        self.replies.lock().is_any_before(client, epoch)
    }

    /// Makes the epochs noted so far durable.
    pub(super) fn sync(&self, directory: &MetaDirectory) -> rustix::io::Result<()> {
        self.epochs.sync(|| self.sync_file(directory))
    }

    /// Notes the epoch of a call, if it is news; whether its client is still in it.
    pub(super) fn note_epoch(&self, directory: &MetaDirectory, who: Who) -> rustix::io::Result<bool> {
        let mut replies = self.replies.lock();
        if replies.epoch_of(who.client.0) >= who.epoch {
            return Ok(replies.note(who.client.0, who.epoch));
        }
        drop(replies);
        let mut file = self.file.lock();
        self.append(directory, &mut file, Note { kind: CLIENT, who: Who { sequence: 0, ..who }, key: FileKey(0) })?;
        self.epochs.changed();
        Ok(self.replies.lock().note(who.client.0, who.epoch))
    }
}

/// What a note of an earlier run says.
fn begun(note: &Note) -> Known {
    let begun = Begun { node: note.key.0, is_of_last_run: note.kind & BEFORE == 0 };
    if note.kind & !BEFORE == EXCHANGING { Known::Exchanging(begun) } else { Known::Begun(begun) }
}

/// Remembers one more, and forgets the oldest for it.
fn add_range(ranges: &mut VecDeque<Note>, note: Note) {
    if ranges.len() >= RANGES_MAX {
        ranges.pop_front();
    }
    ranges.push_back(note);
}

/// The remembered changes, as the file has them.
fn encode_all(
    replies: &Replies<Known>,
    begun: &Noted,
    cuts: &FxHashMap<FileKey, u64>,
    ranges: &VecDeque<Note>,
) -> Vec<u8> {
    let cuts = cuts.iter().map(|(file, len_bytes)| Note::of_cut(CUTTING, *file, *len_bytes));
    let mut bytes: Vec<u8> = cuts.chain(ranges.iter().copied()).flat_map(|note| note.encode()).collect();
    for kept in replies.kept() {
        let (kind, client, epoch, sequence, key) = match kept {
            Kept::Base(epoch) => (BASE, 0, epoch, 0, 0),
            Kept::Forgot(epoch) => (FORGOT, 0, epoch, 0, 0),
            Kept::Client { client, epoch, forgotten } => (CLIENT, client, epoch, forgotten, 0),
            Kept::Change { client, epoch, sequence, reply } => match reply {
                Some(known @ (Known::Answered(_) | Known::Done(_))) => (DONE, client, epoch, sequence, known.digest()),
                Some(Known::Opened(key)) => (OPENED, client, epoch, sequence, key.0),
                Some(Known::Begun(begun)) => (BEFORE | BEGUN, client, epoch, sequence, begun.node),
                Some(Known::Exchanging(begun)) => (BEFORE | EXCHANGING, client, epoch, sequence, begun.node),
                None => (FAILED, client, epoch, sequence, 0),
            },
        };
        let who = Who { client: ClientKey(client), epoch, sequence, ..Who::default() };
        bytes.extend_from_slice(&Note { kind, who, key: FileKey(key) }.encode());
    }
    for (client, epoch, sequence) in replies.under_way() {
        let who = Who { client: ClientKey(client), epoch, sequence, ..Who::default() };
        // What is not noted yet has changed nothing.
        let Some((kind, key)) = begun.get(&(client, sequence)).copied() else { continue };
        bytes.extend_from_slice(&Note { kind, who, key: FileKey(key) }.encode());
    }
    bytes
}

/// True for calls that are of no harm whenever they come.
fn only_looks(call: &MetaCall) -> bool {
    matches!(
        call,
        MetaCall::GetAttr { .. }
            | MetaCall::Readlink { .. }
            | MetaCall::Readdir { .. }
            | MetaCall::GetXattr { .. }
            | MetaCall::ListXattr { .. }
            | MetaCall::Statfs
    )
}

/// In whose name a call is served.
#[derive(Clone, Copy)]
pub(super) struct By<'a> {
    pub(super) who: &'a Who,
    /// What is noted of it: a change is noted before it changes anything. `None`: it is not to be noted.
    noted: Option<&'a Cell<Option<(u32, u64)>>>,
    /// Where the name that it makes was not there a moment ago.
    pub(super) absent: Option<&'a Absent>,
}

impl<'a> By<'a> {
    /// Of a call that is no change, or that is noted already.
    pub(super) fn unnoted(who: &'a Who) -> By<'a> {
        By { who, noted: None, absent: None }
    }
}

/// A change that is noted to have begun. Dropped before it is done it has failed, which is noted then: while it still has what
/// would show another's work as its own.
#[must_use = "dropped, the change has failed"]
pub(super) struct Undone<'a> {
    changes: &'a Changes,
    directory: &'a MetaDirectory,
    by: By<'a>,
}

impl Undone<'_> {
    /// It is done, which is noted now: call it before others get the names.
    pub(super) fn done(self) {
        self.ends_as((DONE, 0));
    }

    /// The same of one that made this file.
    pub(super) fn made(self, file: FileKey) {
        self.ends_as((OPENED, file.0));
    }

    /// How it ends is noted when it is answered.
    pub(super) fn goes_on(self) {
        std::mem::forget(self);
    }

    fn ends_as(self, what: (u32, u64)) {
        let Undone { changes, directory, by } = self;
        std::mem::forget(self);
        let Some(noted) = by.noted else { return };
        let (who, (kind, key)) = (*by.who, what);
        let mut file = changes.file.lock();
        let appended = changes.append(directory, &mut file, Note { kind, who, key: FileKey(key) });
        // A file written anew has it too, before the reply is remembered.
        changes.begun.lock().insert((who.client.0, who.sequence), what);
        noted.set(Some(what));
        if appended.is_err() {
            changes.write_anew(directory, &mut file);
        }
    }
}

impl Drop for Undone<'_> {
    fn drop(&mut self) {
        let Some(noted) = self.by.noted.filter(|noted| noted.get().is_some()) else { return };
        let (changes, who) = (self.changes, *self.by.who);
        let mut file = changes.file.lock();
        let appended = changes.append(self.directory, &mut file, Note { kind: FAILED, who, key: FileKey(0) });
        changes.begun.lock().remove(&(who.client.0, who.sequence));
        noted.set(None);
        if appended.is_err() {
            changes.write_anew(self.directory, &mut file);
        }
    }
}

/// Ends a change however its service ends.
struct UnderWay<'a> {
    service: &'a MetaService,
    who: Who,
    known: Option<Known>,
    /// What was noted of it last. A change that failed before it was noted that it begins has left nothing to be noted.
    noted: Cell<Option<(u32, u64)>>,
}

impl UnderWay<'_> {
    /// Of a change that an earlier run had begun.
    fn end(service: &MetaService, who: Who, known: Option<Known>) {
        drop(UnderWay { service, who, known, noted: Cell::new(Some((BEGUN, 0))) });
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let changes = &self.service.meta.changes;
        let (kind, key) = match &self.known {
            None => (FAILED, 0),
            Some(Known::Opened(key)) => (OPENED, key.0),
            Some(known) => (DONE, known.digest()),
        };
        let directory = &self.service.meta.dir;
        let is_noted = self.noted.get().is_some();
        let is_over = self.noted.get() == Some((kind, key));
        let mut file = changes.file.lock();
        let noted = match (is_noted || self.known.is_some()) && !is_over {
            true => changes.append(directory, &mut file, Note { kind, who: self.who, key: FileKey(key) }),
            false => Ok(()),
        };
        changes.replies.lock().end(self.who.client.0, self.who.sequence, self.known.take());
        if noted.is_err() {
            changes.write_anew(directory, &mut file);
        }
        drop(file);
        if is_noted {
            changes.begun.lock().remove(&(self.who.client.0, self.who.sequence));
        }
    }
}

/// A change of an earlier run that is being ended.
struct Resumed<'a> {
    replies: &'a Mutex<Replies<Known>>,
    who: Who,
}

impl Drop for Resumed<'_> {
    fn drop(&mut self) {
        self.replies.lock().leave(self.who.client.0, self.who.sequence);
    }
}

impl MetaService {
    /// Serves one call of a client: a change once, whatever copies of it come. A client without a key is served
    /// without that.
    pub fn call_from(&self, session: SessionId, who: Who, call: MetaCall) -> Answer {
        self.call_at(session, who, call, None)
    }

    /// The same of a call of which the name was looked for ([`MetaService::absent`]).
    pub fn call_at(&self, session: SessionId, who: Who, call: MetaCall, absent: Option<Absent>) -> Answer {
        if who.client == ClientKey::default() {
            return self.call(session, call);
        }
        // Before the change is noted: a call of a user who is not known yet is not done.
        if self.meta.options.squashes
            && let Err(fault) = self.meta.sessions.get(session).and_then(|session| session.user_of(&who, &call))
        {
            return Answer::Fault(fault);
        }
        self.admit_from(session, who, call, absent).unwrap_or_else(Answer::Fault)
    }

    fn admit_from(&self, session: SessionId, who: Who, call: MetaCall, absent: Option<Absent>) -> Outcome<Answer> {
        let (changes, client) = (&self.meta.changes, who.client.0);
        let is_current = changes.note_epoch(&self.meta.dir, who).map_err(|errno| match who.since < who.epoch {
            // A copy of it may have been done: this is no answer to that.
            true => Fault { errno: libc::EIO, ..not_noted(errno) },
            false => not_noted(errno),
        })?;
        if !call.is_change() {
            return if is_current || only_looks(&call) {
                Ok(self.call_as(session, By::unnoted(&who), call))
            } else {
                Err(fenced(who))
            };
        }
        let exchanging = matches!(call, MetaCall::Exchange { .. }).then(|| changes.ending.lock());
        let stamp = Stamp { client, epoch: who.epoch, since: who.since, sequence: who.sequence };
        // Not in the `match`: its lock would be held through it.
        let begin = || changes.replies.lock().begin(stamp);
        let admission = begin();
        let is_open = matches!(admission, Admission::Done(Known::Begun(_))) && exchanging.is_none();
        let ending = is_open.then(|| changes.ending.lock());
        // Another copy may have ended it meanwhile.
        let admission = if ending.is_some() { begin() } else { admission };
        match admission {
            Admission::New => self.change(session, who, call, absent),
            Admission::Done(Known::Answered(answer)) => Ok(answer),
            Admission::Done(Known::Opened(file)) => match call {
                MetaCall::Create { path, .. } => self.look(session, &who, MetaCall::Reopen { path, file, write: true }),
                other => Ok(self.call_as(session, By::unnoted(&who), other)),
            },
            Admission::Done(Known::Done(digest)) => self.answer_again(session, &who, call, digest),
            Admission::Done(Known::Begun(begun)) => self.resume(who, || self.finish(session, who, call, begun)),
            Admission::Done(Known::Exchanging(begun)) => {
                self.resume(who, || self.finish_exchange(session, who, call, begun))
            }
            Admission::Busy => {
                Err(fault(Errno::BUSY, "an earlier copy of this change, or one given up before it, is being served"))
            }
            Admission::Fenced => Err(fenced(who)),
            Admission::Forgotten => Err(fault(
                Errno::IO,
                "a copy of this change may have been done before, too long ago for the metadata server to know; look",
            )),
        }
    }

    fn change(&self, session: SessionId, who: Who, call: MetaCall, absent: Option<Absent>) -> Outcome<Answer> {
        let mut under_way = UnderWay { service: self, who, known: None, noted: Cell::new(None) };
        let by = By { who: &who, noted: Some(&under_way.noted), absent: absent.as_ref() };
        // Others look at what they are about anyway, and are noted then.
        let is_noted_later = match &call {
            MetaCall::Exchange { .. } => true,
            MetaCall::SetXattr { name, .. } => !is_acl(name),
            call => deciding_name(call).is_some(),
        };
        if !is_noted_later {
            self.meta.changes.begin(&self.meta.dir, by, 0)?.goes_on();
        }
        self.meta.changes.touch(|| self.names_of(session, &call));
        let answer = self.call_as(session, by, call);
        under_way.known = Known::of(&answer);
        Ok(answer)
    }

    /// The answer to a change that an earlier run of the server did; `digest`: see [`Known::Done`].
    fn answer_again(&self, session: SessionId, who: &Who, call: MetaCall, digest: u64) -> Outcome<Answer> {
        let target = match call {
            MetaCall::SetAttr { target, .. } if digest != 0 => {
                let (file, lanes) = self.meta.states_since(session, &target, digest).map_err(untold)?;
                return Ok(match self.look(session, who, MetaCall::GetAttr { target })? {
                    Answer::Attr(attr) if !lanes.is_empty() => Answer::Cut { attr, file, lanes },
                    answer => answer,
                });
            }
            MetaCall::SetAttr { target, .. } => target,
            MetaCall::Mkdir { path, .. }
            | MetaCall::Symlink { path, .. }
            | MetaCall::Mknod { path, .. }
            | MetaCall::Link { to: path, .. } => Target::Path(path),
            _ => return Ok(Answer::Done),
        };
        self.look(session, who, MetaCall::GetAttr { target })
    }

    /// What a change that was done has to answer, by a call that looks. Where it cannot, because others have changed the name
    /// since or a disk is full, its failure is not that of the change, which must not seem not to have been done.
    fn look(&self, session: SessionId, who: &Who, call: MetaCall) -> Outcome<Answer> {
        match self.call_as(session, By::unnoted(who), call) {
            Answer::Fault(why) => Err(untold(why)),
            answer => Ok(answer),
        }
    }

    /// The names that a change is about; of an extended attribute of an open file, that of the file.
    fn names_of(&self, session: SessionId, call: &MetaCall) -> Vec<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = call.paths().cloned().collect();
        if let MetaCall::SetXattr { target: Target::Handle(handle), .. } = call
            && let Some((file, _)) = self.meta.held_by(session, *handle)
        {
            names.push(self.meta.opens.path_of(file.ino));
        }
        names
    }

    /// The number of the node by which it is seen whether a change was done: that of the name that it takes away, or gives. 0 if
    /// there is none.
    fn deciding_node(&self, call: &MetaCall) -> u64 {
        let Some(path) = deciding_name(call) else { return 0 };
        let entry = check_path(path).ok().and_then(|()| self.meta.dir.entry(path).ok().flatten());
        entry.and_then(|entry| entry.stat().ok()).map_or(0, |stat| stat.st_ino)
    }

    /// Has a change ended that an earlier run had begun. It is under way meanwhile: neither its client nor who gets what that client
    /// had locked must take it for over.
    fn resume(&self, who: Who, end: impl FnOnce() -> Outcome<Answer>) -> Outcome<Answer> {
        let replies = &self.meta.changes.replies;
        if !replies.lock().resume(who.client.0, who.epoch, who.sequence) {
            return Err(fenced(who));
        }
        // Also when it panics, which the server outlives.
        let _resumed = Resumed { replies, who };
        end()
    }

    /// Ends a change that an earlier run of the server had begun: does it, unless the name space shows that it was done.
    fn finish(&self, session: SessionId, who: Who, call: MetaCall, begun: Begun) -> Outcome<Answer> {
        let now = self.deciding_node(&call);
        let is_done = match &call {
            MetaCall::Unlink { .. } | MetaCall::Rmdir { .. } | MetaCall::Rename { .. } => {
                begun.node != 0 && now != begun.node
            }
            // A list is set in more than one step, and set again it is the same.
            MetaCall::SetXattr { target, name, value, .. } if !is_acl(name) => {
                let is_there =
                    self.meta.sessions.get(session).and_then(|session| self.meta.get_xattr(&session, target, name));
                match is_there {
                    Ok(_) => value.is_some() && begun.node == 0,
                    Err(fault) => fault.errno == libc::ENODATA && value.is_none() && begun.node != 0,
                }
            }
            MetaCall::SetAttr { .. } | MetaCall::CutBack { .. } => begun.node != 0,
            // An older version did not note which node it was making.
            call if deciding_name(call).is_some() && begun.node == 0 && now != 0 => return Err(hidden()),
            call => deciding_name(call).is_some() && begun.node != 0 && now == begun.node,
        };
        // After the look: who has changed a name before it is known by now.
        let names = self.names_of(session, &call);
        self.meta.changes.check_hidden(begun, &names)?;
        let answer = match call {
            MetaCall::Create { path, .. } if is_done => {
                self.look(session, &who, MetaCall::Open { path, write: true })?
            }
            MetaCall::SetAttr { target, set } if is_done => {
                // It is cut. What else it sets may be missing.
                let rest = MetaCall::SetAttr { target, set: SetAttr { size: None, ..set } };
                let states = if begun.node == digest(&[]) { 0 } else { begun.node };
                match self.call_as(session, By::unnoted(&who), rest.clone()) {
                    // What was noted stays: its client may ask again, and others have written to the file since it was cut.
                    Answer::Fault(why) => return Err(why),
                    _ => self.answer_again(session, &who, rest, states)?,
                }
            }
            _ if is_done => self.answer_again(session, &who, call, 0)?,
            _ => {
                self.meta.changes.touch(|| names);
                self.call_as(session, By::unnoted(&who), call)
            }
        };
        UnderWay::end(self, who, Known::of(&answer));
        self.meta.changes.ended();
        Ok(answer)
    }

    /// Ends an exchange that an earlier run had begun.
    fn finish_exchange(&self, session: SessionId, who: Who, call: MetaCall, begun: Begun) -> Outcome<Answer> {
        let MetaCall::Exchange { from, to } = &call else {
            return Err(fault(Errno::INVAL, "an exchange of names had this number before"));
        };
        // Not by the attributes of files, which only data servers may know.
        let is_at = |path: &[u8]| {
            let stat = self.meta.dir.entry(path).and_then(|entry| entry.ok_or(Errno::ISDIR)?.stat());
            match stat {
                Ok(stat) => Ok(stat.st_ino == begun.node),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::ISDIR) => Ok(false),
                Err(errno) => Err(errno).explain("look where an exchange of names left", path),
            }
        };
        let (is_at_first, is_at_second) = (is_at(from)?, is_at(to)?);
        self.meta.changes.check_hidden(begun, &[from.clone(), to.clone()])?;
        match (is_at_first, is_at_second) {
            (false, true) => {
                UnderWay::end(self, who, Known::of(&Answer::Done));
                self.meta.changes.ended();
                Ok(Answer::Done)
            }
            (true, false) => {
                self.meta.changes.touch(|| self.names_of(session, &call));
                let noted = Cell::new(None);
                let answer = self.call_as(session, By { who: &who, noted: Some(&noted), absent: None }, call);
                UnderWay::end(self, who, Known::of(&answer));
                self.meta.changes.ended();
                Ok(answer)
            }
            _ => Err(fault(
                Errno::IO,
                "the metadata server was restarted during this exchange of names, and others changed them since; look",
            )),
        }
    }
}

impl Meta {
    /// Makes what a truncation has cut durable. Gives the file, and what its client has to compare with at its next sync: nothing if
    /// the states of its data servers are those of this digest, and what differs from every state otherwise.
    fn states_since(&self, session: SessionId, target: &Target, before: u64) -> Outcome<(FileKey, Vec<LaneState>)> {
        let doing = "sync what was cut of";
        let session = self.sessions.get(session)?;
        let (pin, path) = match target {
            Target::Handle(handle) => (self.pin_handle(&session, *handle)?, Vec::new()),
            Target::Path(path) => {
                let entry = self.dir.entry(path).and_then(|entry| entry.ok_or(Errno::ISDIR)).explain(doing, path)?;
                (self.pin_at(&entry, doing)?, path.clone())
            }
        };
        let now = self.note_answer(&pin, self.objects.sync(pin.key, &pin.layout));
        let mut lanes = now.map_err(|error| data_fault(&error, doing, &path))?;
        if digest(&lanes) == before {
            return Ok((pin.key, Vec::new()));
        }
        lanes.iter_mut().for_each(|lane| *lane = LaneState::unknown(lane.server));
        Ok((pin.key, lanes))
    }
}

/// The name whose node shows whether a change was done: that which it takes away, or gives.
fn deciding_name(call: &MetaCall) -> Option<&[u8]> {
    match call {
        MetaCall::Create { path, exclusive: true, .. }
        | MetaCall::Mkdir { path, .. }
        | MetaCall::Symlink { path, .. }
        | MetaCall::Mknod { path, .. }
        | MetaCall::Unlink { path }
        | MetaCall::Rmdir { path }
        | MetaCall::Rename { from: path, .. }
        | MetaCall::Link { to: path, .. } => Some(path),
        _ => None,
    }
}

/// Of a change that was done and whose answer fails so: the change must not seem not to have been done.
fn untold(why: Fault) -> Fault {
    match why.errno {
        libc::EBUSY => why,
        _ => fault(Errno::IO, format!("this was done, and what it made cannot be told again: {}", why.message)),
    }
}

/// Of a change that an earlier run had begun, and of which nothing shows whether it was done.
fn hidden() -> Fault {
    let why = "the metadata server was restarted during this change, and others may have changed its names since; look";
    fault(Errno::IO, why)
}

fn not_noted(errno: Errno) -> Fault {
    fault(errno, "the metadata server cannot note the change in its directory")
}

pub(super) fn fenced(who: Who) -> Fault {
    let epoch = who.epoch;
    let message = format!("a call of epoch {epoch} came after the client had begun a newer one; it was not done");
    Fault { errno: Fault::FENCED, message }
}
