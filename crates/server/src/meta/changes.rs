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
//! that finds a restarted server cuts nothing that was written since. Nor does one of a call that has failed after that, as where it
//! was to set a mode, too, or the new length could not be asked for: it stays begun, and the copy does the rest.
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

mod calls;
mod notes;

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use impresario_base::Durable;
use impresario_base::lock::Mutex;
use impresario_base::random::mix;
use impresario_node::session::{Kept, Replies};
use impresario_wire::message::{Answer, ClientKey, Fault, FileKey, LaneState, Who};
use rustc_hash::FxHashMap;
use rustix::io::Errno;

use super::directory::MetaDirectory;
use super::fault::{Outcome, fault};
use super::tree::Absent;
use notes::{
    ASSIGNED, BASE, BEFORE, BEGUN, CLIENT, CUT, CUTTING, DONE, EXCHANGING, FAILED, FORGOT, NOTE_BYTES, Note, OPENED,
};

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
    /// An earlier run began it; or this one, which has cut a file and failed then.
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
    /// It was the last run, or this one: what others have done to the name space since is known.
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
