//! What programs of the run have changed and nobody has synced: what `sync` and `syncfs` have to make durable, also when it
//! was closed since and its programs have ended.
//!
//! An entry leaves the table when its sync has succeeded, or when its node has lost its last name, and not before: a sync that
//! runs meanwhile, or comes after one that failed, finds it there.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_client::{Client, ClientError, Errno, File};
use impresario_layout::Layout;
use impresario_wire::FileKey;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::open::{Moves, moved};

/// What is remembered, bytes. Above, each further file or directory has another one synced; above twice that, which takes syncs
/// that fail, it is not remembered.
const HELD_MAX_BYTES: usize = 64 << 20;
/// What one takes without its path, with the slack of its table.
const ENTRY_BYTES: usize = 256;
/// Syncs at a time.
const AT_ONCE: usize = 8;
/// Moves that are remembered for calls that began before they ended.
const MOVES_MAX: usize = 256;
/// Before another look at what is being moved.
const MOVE_PAUSE: Duration = Duration::from_millis(5);

/// Who makes it durable.
pub(crate) trait Servers: Sync {
    /// Syncs a file. False: the path does not lead to it.
    fn sync_file(&self, path: &[u8], ino: u64) -> Result<bool, ClientError>;
    /// Syncs the bytes of a file, whatever its name is.
    fn sync_data(&self, file: FileKey, layout: &Layout) -> Result<(), ClientError>;
    /// Syncs a directory. False: the path does not lead to one.
    fn sync_directory(&self, path: &[u8]) -> Result<bool, ClientError>;
    /// How long an answer may take.
    fn timeout(&self) -> Duration;
}

impl Servers for Arc<Client> {
    fn sync_file(&self, path: &[u8], ino: u64) -> Result<bool, ClientError> {
        let (file, attr) = match self.open_with_attr(path, false) {
            Err(error) if is_elsewhere(&error) => return Ok(false),
            opened => opened?,
        };
        let is_it = attr.ino == ino;
        let synced = if is_it { file.sync() } else { Ok(()) };
        let closed = file.close();
        match synced.and(closed) {
            Err(error) if is_gone(&error) => Ok(false),
            synced => synced.map(|()| is_it),
        }
    }

    fn sync_data(&self, file: FileKey, layout: &Layout) -> Result<(), ClientError> {
        match Client::sync_data(self, file, layout) {
            Err(error) if is_gone(&error) => Ok(()),
            synced => synced,
        }
    }

    fn sync_directory(&self, path: &[u8]) -> Result<bool, ClientError> {
        match self.sync_dir(path) {
            Err(error) if is_elsewhere(&error) => Ok(false),
            synced => synced.map(|()| true),
        }
    }

    fn timeout(&self) -> Duration {
        Client::timeout(self)
    }
}

/// As [`Moves`].
type OwnedMoves = Vec<(Vec<u8>, Vec<u8>)>;

/// What was changed.
pub(crate) struct Unsynced {
    changed: Mutex<Changed>,
    /// Moves that have ended.
    moves: AtomicU64,
    held_max_bytes: usize,
}

impl Default for Unsynced {
    fn default() -> Unsynced {
        Unsynced { changed: Mutex::default(), moves: AtomicU64::new(0), held_max_bytes: HELD_MAX_BYTES }
    }
}

#[derive(Default)]
struct Changed {
    /// By the number of the inode.
    files: FxHashMap<u64, ChangedFile>,
    /// By their paths.
    directories: FxHashMap<Vec<u8>, State>,
    /// The lengths of all their paths.
    paths_bytes: usize,
    /// Counts changes.
    changes: u64,
    /// Old paths of what is being moved at the servers, each with the number of its move.
    moving: Vec<(u64, Vec<u8>)>,
    /// The last moves that have ended, each with how many had then.
    moved: VecDeque<(u64, OwnedMoves)>,
    /// Data that were lost, as the sync of something that had to make room found out. The client tells of it once.
    lost: Option<ClientError>,
    /// Something could not be remembered.
    is_incomplete: bool,
}

/// A file with bytes or attributes that are not synced.
struct ChangedFile {
    path: Vec<u8>,
    /// Which file it is; `None`: it was changed by its path.
    data: Option<(FileKey, Layout)>,
    state: State,
}

/// Which changes are not synced, and how that goes.
#[derive(Clone, Copy)]
struct State {
    /// The first that may not be.
    first: u64,
    last: u64,
    /// How often its path has changed.
    moves: u32,
    /// It is being synced to make room.
    makes_room: bool,
    /// Its last sync failed: others come first.
    has_failed: bool,
}

/// Something to be synced.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Node {
    File(u64),
    Directory(Vec<u8>),
}

impl State {
    fn new(change: u64) -> State {
        State { first: change, last: change, moves: 0, makes_room: false, has_failed: false }
    }
}

impl Changed {
    fn count(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }

    fn held_bytes(&self) -> usize {
        (self.files.len() + self.directories.len()) * ENTRY_BYTES + self.paths_bytes
    }

    /// Whether there is room for one more.
    fn has_room(&mut self, max_bytes: usize) -> bool {
        let has_room = self.held_bytes() < max_bytes.saturating_mul(2);
        self.is_incomplete |= !has_room;
        has_room
    }

    fn is_moving(&self, path: &[u8]) -> bool {
        self.moving.iter().any(|(_, from)| moved(&[(&from[..], &b""[..])], path).is_some())
    }

    /// A path that was found when so many moves had ended, as it is now.
    fn path_now<'a>(&self, path: &'a [u8], since: u64) -> Cow<'a, [u8]> {
        let later = self.moved.iter().skip_while(|(number, _)| *number <= since);
        later.fold(Cow::Borrowed(path), |path, (_, moves)| {
            let mut to = moves.iter().filter_map(|(from, to)| moved(&[(&from[..], &to[..])], &path));
            to.next().map_or(path.clone(), Cow::Owned)
        })
    }

    fn state(&mut self, node: &Node) -> Option<&mut State> {
        match node {
            Node::File(ino) => self.files.get_mut(ino).map(|file| &mut file.state),
            Node::Directory(path) => self.directories.get_mut(path),
        }
    }

    fn remove(&mut self, node: &Node) {
        let path_bytes = match node {
            Node::File(ino) => self.files.remove(ino).map(|file| file.path.len()),
            Node::Directory(path) => self.directories.remove(path).map(|_| path.len()),
        };
        self.paths_bytes -= path_bytes.unwrap_or(0);
    }

    /// What changes up to `mark` are to be synced of, the last to be tried first.
    fn up_to(&self, mark: u64, but: &FxHashSet<Node>) -> Vec<Node> {
        let files = self.files.iter().map(|(ino, file)| (Node::File(*ino), file.state));
        let directories = self.directories.iter().map(|(path, state)| (Node::Directory(path.clone()), *state));
        let unsynced = files.chain(directories).filter(|(node, state)| state.first <= mark && !but.contains(node));
        let (mut nodes, others): (Vec<_>, Vec<_>) = unsynced.partition(|(_, state)| state.has_failed);
        nodes.extend(others);
        nodes.into_iter().map(|(node, _)| node).collect()
    }

    /// What is to make room, which no other thread does then.
    fn makes_room(&mut self) -> Option<Node> {
        let may = |state: &State| !state.makes_room && !state.has_failed;
        let file = self.files.iter().find(|(_, file)| may(&file.state)).map(|(ino, _)| Node::File(*ino));
        let directory = || self.directories.iter().find(|(_, state)| may(state));
        let node = file.or_else(|| directory().map(|(path, _)| Node::Directory(path.clone())))?;
        self.state(&node)?.makes_room = true;
        Some(node)
    }

    /// What has a path has another one now. Others than directories are given by their inodes.
    fn apply(&mut self, moves: Moves<'_>, files: &[u64], has_directory: bool) {
        let mut longer = 0;
        let mut move_file = |file: &mut ChangedFile| {
            if let Some(to) = moved(moves, &file.path) {
                longer += to.len() as isize - file.path.len() as isize;
                file.path = to;
                file.state.moves = file.state.moves.wrapping_add(1);
            }
        };
        if !has_directory {
            files.iter().for_each(|ino| self.files.get_mut(ino).into_iter().for_each(&mut move_file));
            self.paths_bytes = self.paths_bytes.saturating_add_signed(longer);
            return;
        }
        self.files.values_mut().for_each(move_file);
        for (path, mut state) in std::mem::take(&mut self.directories) {
            let to = moved(moves, &path);
            if to.is_some() {
                state.moves = state.moves.wrapping_add(1);
                state.makes_room = false;
            }
            let to = to.unwrap_or(path);
            // One that was removed may have had the path.
            let there = self.directories.entry(to).or_insert(state);
            there.first = there.first.min(state.first);
            there.last = there.last.max(state.last);
            there.moves = there.moves.max(state.moves);
        }
        let files = self.files.values().map(|file| file.path.len());
        self.paths_bytes = files.chain(self.directories.keys().map(Vec::len)).sum();
    }
}

/// Names that are being moved at the servers, until this goes: what is not found by them meanwhile may be elsewhere.
pub(crate) struct Moving<'a> {
    unsynced: &'a Unsynced,
    number: u64,
}

impl Moving<'_> {
    /// They are, and `opens` tells the open files, in the same step. Others than directories are given by their inodes.
    pub(crate) fn done(self, moves: Moves<'_>, files: &[u64], has_directory: bool, opens: impl FnOnce()) {
        let mut changed = self.unsynced.changed.lock();
        opens();
        changed.apply(moves, files, has_directory);
        if changed.moved.len() >= MOVES_MAX {
            changed.moved.pop_front();
        }
        let number = self.unsynced.moves.fetch_add(1, Relaxed) + 1;
        changed.moved.push_back((number, moves.iter().map(|(from, to)| (from.to_vec(), to.to_vec())).collect()));
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.unsynced.changed.lock().moving.retain(|(number, _)| *number != self.number);
    }
}

/// A file as it was found before its name was removed.
pub(crate) struct Seen {
    ino: u64,
    moves: u32,
}

impl Unsynced {
    /// How many moves have ended. Who is about to look for a path asks: when it has been changed, it may have another one.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Relaxed)
    }

    /// A file was changed by one of its names, which was found when so many moves had ended.
    pub(crate) fn note_named(
        &self,
        servers: &impl Servers,
        ino: u64,
        (path, since): (&[u8], u64),
        file: Option<&File>,
    ) {
        let data = file.map(|file| (file.key(), file.layout()));
        self.note(servers, ino, data, Vec::new, Some((path, since)));
    }

    /// A file was changed that is open. Its path, which may lead to it no more, is asked for only when that is needed.
    pub(crate) fn note_open(&self, servers: &impl Servers, ino: u64, file: &File, path: impl FnOnce() -> Vec<u8>) {
        self.note(servers, ino, Some((file.key(), file.layout())), path, None);
    }

    fn note(
        &self,
        servers: &impl Servers,
        ino: u64,
        data: Option<(FileKey, Layout)>,
        path: impl FnOnce() -> Vec<u8>,
        leads_there: Option<(&[u8], u64)>,
    ) {
        let mut guard = self.changed.lock();
        let changed = &mut *guard;
        let change = changed.count();
        let leads_there = leads_there.map(|(path, since)| changed.path_now(path, since));
        if let Some(known) = changed.files.get_mut(&ino) {
            known.state.last = change;
            known.data = data.or(known.data);
            if let Some(path) = leads_there.filter(|path| **path != known.path) {
                changed.paths_bytes = changed.paths_bytes - known.path.len() + path.len();
                known.path = path.into_owned();
                known.state.moves = known.state.moves.wrapping_add(1);
            }
            return;
        }
        if changed.has_room(self.held_max_bytes) {
            let path = leads_there.map_or_else(path, Cow::into_owned);
            changed.paths_bytes += path.len();
            changed.files.insert(ino, ChangedFile { path, data, state: State::new(change) });
        }
        drop(guard);
        self.make_room(servers);
    }

    /// Names in a directory were changed, or its attributes; it was found when so many moves had ended.
    pub(crate) fn note_directory(&self, servers: &impl Servers, (path, since): (&[u8], u64)) {
        self.note_directory_at(servers, || path.to_vec());
        // It may have been moved before or after it was found.
        if self.moves() > since {
            let now = self.changed.lock().path_now(path, since).into_owned();
            self.note_directory_at(servers, || now);
        }
    }

    /// The same of one that is open.
    pub(crate) fn note_directory_at(&self, servers: &impl Servers, path: impl FnOnce() -> Vec<u8>) {
        let mut guard = self.changed.lock();
        let changed = &mut *guard;
        let change = changed.count();
        let path = path();
        if let Some(known) = changed.directories.get_mut(&path) {
            known.last = change;
            return;
        }
        if changed.has_room(self.held_max_bytes) {
            changed.paths_bytes += path.len();
            changed.directories.insert(path, State::new(change));
        }
        drop(guard);
        self.make_room(servers);
    }

    fn make_room(&self, servers: &impl Servers) {
        let mut changed = self.changed.lock();
        if changed.held_bytes() <= self.held_max_bytes {
            return;
        }
        let Some(node) = changed.makes_room() else { return };
        drop(changed);
        let synced = self.sync_node(servers, &node);
        let mut changed = self.changed.lock();
        if let Some(state) = changed.state(&node) {
            state.makes_room = false;
        }
        if let Err(error) = synced {
            tracing::warn!(%error, "a sync of what was changed long ago");
            if is_loss(&error) {
                changed.lost = Some(error);
            }
        }
    }

    /// Names are about to be moved, or linked, at the servers.
    pub(crate) fn begin_move(&self, moves: Moves<'_>) -> Moving<'_> {
        let mut changed = self.changed.lock();
        let number = changed.count();
        changed.moving.extend(moves.iter().map(|(from, _)| (number, from.to_vec())));
        Moving { unsynced: self, number }
    }

    /// A name of a file is about to be removed.
    pub(crate) fn see(&self, ino: u64, path: &[u8]) -> Option<Seen> {
        let changed = self.changed.lock();
        let file = changed.files.get(&ino).filter(|file| file.path == path && !changed.is_moving(path))?;
        Some(Seen { ino, moves: file.state.moves })
    }

    /// It was, and the file has no name any more: nothing of it is left to do. Unless it was moved meanwhile: then another one
    /// had the name.
    pub(crate) fn forget(&self, seen: Option<Seen>, path: &[u8]) {
        let Some(Seen { ino, moves }) = seen else { return };
        let mut changed = self.changed.lock();
        let is_same = changed.files.get(&ino).is_some_and(|file| file.state.moves == moves && file.path == path);
        if is_same && !changed.is_moving(path) {
            changed.remove(&Node::File(ino));
        }
    }

    /// Syncs an open file.
    pub(crate) fn sync_file(&self, ino: u64, file: &File) -> Result<(), ClientError> {
        let covered = self.changed.lock().changes;
        file.sync()?;
        self.changed.lock().settle(&Node::File(ino), covered);
        Ok(())
    }

    /// Makes everything durable that was changed before.
    ///
    /// # Errors
    /// The first loss of data, or else the first failure; the rest is synced all the same, unless a server does not answer: that
    /// is not waited for again and again. What was not synced is left to the next one. EBUSY: all the time, names were being
    /// moved. ENOBUFS: more was changed than is remembered, while syncs failed.
    pub(crate) fn sync(&self, servers: &impl Servers) -> Result<(), ClientError> {
        let mut changed = self.changed.lock();
        let (mark, lost) = (changed.changes, changed.lost.take());
        drop(changed);
        let (failure, failed, is_stopped) =
            (Mutex::new(lost), Mutex::new(FxHashSet::default()), AtomicBool::new(false));
        let mut idle_until = None;
        loop {
            let nodes = self.changed.lock().up_to(mark, &failed.lock());
            if nodes.is_empty() || is_stopped.load(Relaxed) {
                break;
            }
            if let Some(until) = idle_until {
                if Instant::now() >= until {
                    let what = "syncing what is being moved all the time".into();
                    failure.lock().get_or_insert(ClientError::System { what, errno: Errno(libc::EBUSY) });
                    break;
                }
                std::thread::sleep(MOVE_PAUSE);
            }
            let (threads, nodes, has_progress) = (AT_ONCE.min(nodes.len()), Mutex::new(nodes), AtomicBool::new(false));
            let work = || {
                while !is_stopped.load(Relaxed) {
                    let Some(node) = nodes.lock().pop() else { return };
                    let began = Instant::now();
                    match self.sync_node(servers, &node) {
                        Ok(is_settled) => has_progress.fetch_or(is_settled, Relaxed),
                        Err(error) => {
                            // An I/O node says by itself that the server behind it does not answer, in time.
                            if is_unanswered(&error) || began.elapsed() >= servers.timeout() / 2 {
                                is_stopped.store(true, Relaxed);
                            }
                            failed.lock().insert(node);
                            let mut failure = failure.lock();
                            // A loss is told once, the others will be again.
                            if failure.as_ref().is_none_or(|first| is_loss(&error) && !is_loss(first)) {
                                *failure = Some(error);
                            }
                            has_progress.fetch_or(true, Relaxed)
                        }
                    };
                }
            };
            std::thread::scope(|scope| {
                for _ in 1..threads {
                    // Without a thread, the others and this one do the work.
                    let _ = std::thread::Builder::new().name("sync".into()).spawn_scoped(scope, work);
                }
                work();
            });
            let is_idle = !has_progress.load(Relaxed);
            idle_until = is_idle.then(|| idle_until.unwrap_or_else(|| Instant::now() + servers.timeout()));
        }
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        if self.changed.lock().is_incomplete {
            let what = "syncing all that was changed: it was more than is remembered".into();
            return Err(ClientError::System { what, errno: Errno(libc::ENOBUFS) });
        }
        Ok(())
    }

    /// Syncs one; false: it is being moved, or has been, so it has to be tried again as it is then.
    fn sync_node(&self, servers: &impl Servers, node: &Node) -> Result<bool, ClientError> {
        let mut changed = self.changed.lock();
        let covered = changed.changes;
        let Some(State { moves, .. }) = changed.state(node).copied() else { return Ok(false) };
        let (path, data) = match node {
            Node::File(ino) => changed.files.get(ino).map(|file| (file.path.clone(), file.data)).unwrap_or_default(),
            Node::Directory(path) => (path.clone(), None),
        };
        drop(changed);
        let synced = match node {
            Node::File(ino) => servers.sync_file(&path, *ino),
            Node::Directory(_) => servers.sync_directory(&path),
        };
        // Others may have moved or removed it: its bytes can be synced all the same.
        let synced = match (synced, data) {
            (Ok(false), Some((file, layout))) => servers.sync_data(file, &layout).map(|()| false),
            (synced, _) => synced,
        };
        let mut changed = self.changed.lock();
        let is_found = match synced {
            Ok(is_found) => is_found,
            Err(error) => {
                if let Some(state) = changed.state(node) {
                    state.has_failed = true;
                }
                return Err(error);
            }
        };
        // A path says which directory it is, and that something is gone, only while nothing moves there.
        let is_sure = is_found && matches!(node, Node::File(_));
        let has_moved = changed.state(node).is_none_or(|state| state.moves != moves);
        if !is_sure && (has_moved || changed.is_moving(&path)) {
            return Ok(false);
        }
        changed.settle(node, covered);
        Ok(true)
    }
}

impl Changed {
    /// Its changes up to `covered` are durable.
    fn settle(&mut self, node: &Node, covered: u64) {
        match self.state(node) {
            Some(state) if state.last > covered => {
                state.first = covered + 1;
                state.has_failed = false;
            }
            Some(_) => self.remove(node),
            None => {}
        }
    }
}

/// The path leads nowhere, or to something else.
fn is_elsewhere(error: &ClientError) -> bool {
    use libc::{EISDIR, ELOOP, ENOENT, ENOTDIR, ENXIO, EOPNOTSUPP, ESTALE};
    matches!(error.errno(), ENOENT | ENOTDIR | EISDIR | ELOOP | ESTALE | EOPNOTSUPP | ENXIO)
}

/// It was removed, with its objects.
fn is_gone(error: &ClientError) -> bool {
    matches!(error.errno(), libc::ENOENT | libc::ESTALE)
}

fn is_loss(error: &ClientError) -> bool {
    matches!(error, ClientError::UnsyncedLost { .. })
}

fn is_unanswered(error: &ClientError) -> bool {
    use ClientError::{Lost, Refused, SessionEnded, Unreachable};
    matches!(error, Unreachable { .. } | Lost { .. } | Refused { .. } | SessionEnded { .. })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use impresario_client::Peer;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Servers that answer as the test says, by the path.
    struct Fake<F> {
        answer: F,
        timeout: Duration,
        synced: Mutex<Vec<Vec<u8>>>,
    }

    impl<F: Fn(&[u8]) -> Result<bool, ClientError> + Sync> Fake<F> {
        fn new(answer: F) -> Fake<F> {
            Fake { answer, timeout: PATIENCE, synced: Mutex::default() }
        }

        fn sync(&self, path: &[u8]) -> Result<bool, ClientError> {
            let answer = (self.answer)(path)?;
            if answer {
                self.synced.lock().push(path.to_vec());
            }
            Ok(answer)
        }

        /// What was synced since the last time.
        fn take(&self) -> Vec<Vec<u8>> {
            let mut synced = std::mem::take(&mut *self.synced.lock());
            synced.sort();
            synced
        }
    }

    impl<F: Fn(&[u8]) -> Result<bool, ClientError> + Sync> Servers for Fake<F> {
        fn sync_file(&self, path: &[u8], _: u64) -> Result<bool, ClientError> {
            self.sync(path)
        }

        fn sync_data(&self, file: FileKey, _: &Layout) -> Result<(), ClientError> {
            self.synced.lock().push(format!("bytes of {}", file.0).into_bytes());
            Ok(())
        }

        fn sync_directory(&self, path: &[u8]) -> Result<bool, ClientError> {
            self.sync(path)
        }

        fn timeout(&self) -> Duration {
            self.timeout
        }
    }

    fn failure(errno: i32) -> ClientError {
        ClientError::System { what: "a sync, on purpose".into(), errno: Errno(errno) }
    }

    fn unanswered() -> ClientError {
        let (server, address, cause) = (String::new(), String::new(), String::new());
        ClientError::Unreachable { server, address, waited: Duration::ZERO, cause }
    }

    fn loss() -> ClientError {
        ClientError::UnsyncedLost { peer: Peer { name: "data.0".into(), address: String::new() }, errno: libc::EIO }
    }

    /// With room for so many files of short names.
    fn room_for(files: usize) -> Unsynced {
        Unsynced { held_max_bytes: files * (ENTRY_BYTES + 8), ..Unsynced::default() }
    }

    /// Notes files of these names and numbers.
    fn note(unsynced: &Unsynced, servers: &impl Servers, files: std::ops::Range<u64>) {
        files.for_each(|ino| unsynced.note_named(servers, ino, (&name(ino), 0), None));
    }

    fn name(ino: u64) -> Vec<u8> {
        ino.to_string().into_bytes()
    }

    #[track_caller]
    fn check(unsynced: &Unsynced) {
        let changed = unsynced.changed.lock();
        let files = changed.files.values().map(|file| file.path.len());
        assert_eq!(files.chain(changed.directories.keys().map(Vec::len)).sum::<usize>(), changed.paths_bytes);
    }

    #[track_caller]
    fn check_empty(unsynced: &Unsynced) {
        check(unsynced);
        assert_eq!(unsynced.changed.lock().held_bytes(), 0);
    }

    #[test]
    fn a_sync_waits_for_what_is_making_room() {
        let (entered, has_entered) = mpsc::channel();
        let (opens, gate) = mpsc::channel::<()>();
        let first = Mutex::new(Some((entered, gate)));
        let fake = Fake::new(|_: &[u8]| {
            let is_first = first.lock().take();
            if let Some((entered, gate)) = is_first {
                entered.send(()).unwrap();
                let _ = gate.recv_timeout(PATIENCE);
            }
            Ok(true)
        });
        let unsynced = room_for(1);
        std::thread::scope(|scope| {
            scope.spawn(|| note(&unsynced, &fake, 0..2));
            has_entered.recv_timeout(PATIENCE).unwrap();
            unsynced.sync(&fake).unwrap();
            assert_eq!(fake.take(), [b"0", b"1"], "durable, though a sync of one has not ended");
            drop(opens);
        });
        check_empty(&unsynced);
    }

    #[test]
    fn what_could_not_make_room_is_synced_later() {
        let fails = AtomicBool::new(true);
        let fake = Fake::new(|_: &[u8]| if fails.load(Relaxed) { Err(failure(libc::EIO)) } else { Ok(true) });
        let unsynced = room_for(3);
        note(&unsynced, &fake, 0..6);
        for _ in 0..3 {
            assert_eq!(unsynced.sync(&fake).unwrap_err().errno(), libc::EIO);
        }
        fails.store(false, Relaxed);
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), (0..6).map(name).collect::<Vec<_>>());
        check_empty(&unsynced);
    }

    #[test]
    fn a_sync_says_so_when_more_was_changed_than_is_remembered() {
        let fails = AtomicBool::new(true);
        let fake = Fake::new(|_: &[u8]| if fails.load(Relaxed) { Err(failure(libc::EIO)) } else { Ok(true) });
        let unsynced = room_for(3);
        note(&unsynced, &fake, 0..100);
        (100..200).for_each(|number| unsynced.note_directory(&fake, (&name(number), 0)));
        assert!(unsynced.changed.lock().held_bytes() <= 2 * unsynced.held_max_bytes + ENTRY_BYTES + 8);
        fails.store(false, Relaxed);
        for _ in 0..2 {
            assert_eq!(unsynced.sync(&fake).unwrap_err().errno(), libc::ENOBUFS);
        }
        check_empty(&unsynced);
    }

    #[test]
    fn a_loss_that_making_room_found_is_told_once() {
        let found = Mutex::new(Some(loss()));
        let fake = Fake::new(|_: &[u8]| found.lock().take().map_or(Ok(true), Err));
        let unsynced = room_for(1);
        note(&unsynced, &fake, 0..2);
        assert!(is_loss(&unsynced.sync(&fake).unwrap_err()));
        unsynced.sync(&fake).unwrap();
        check_empty(&unsynced);
    }

    #[test]
    fn one_that_cannot_be_synced_keeps_no_other_from_it() {
        for error in [|| failure(libc::EIO), unanswered, loss] {
            let fake = Fake::new(|path: &[u8]| if path == b"13" { Err(error()) } else { Ok(true) });
            let unsynced = Unsynced::default();
            note(&unsynced, &fake, 0..100);
            unsynced.sync(&fake).unwrap_err();
            if is_unanswered(&error()) {
                // From now on it is the last to be tried.
                unsynced.sync(&fake).unwrap_err();
            }
            assert_eq!(fake.take().len(), 99);
            unsynced.sync(&fake).unwrap_err();
            assert!(fake.take().is_empty(), "once is enough");
        }
    }

    #[test]
    fn a_server_that_does_not_answer_is_not_waited_for_by_each() {
        let asked = Mutex::new(0);
        let fake = Fake::new(|_: &[u8]| {
            *asked.lock() += 1;
            Err(unanswered())
        });
        let unsynced = Unsynced::default();
        note(&unsynced, &fake, 0..100);
        unsynced.sync(&fake).unwrap_err();
        assert!((1..=AT_ONCE).contains(&*asked.lock()), "{}", asked.lock());
        assert_eq!(unsynced.changed.lock().files.len(), 100);
    }

    #[test]
    fn what_is_being_moved_is_synced_where_it_is_afterwards() {
        // The server has moved it, and the run does not know yet.
        let (asked, has_asked) = mpsc::channel();
        let asked = Mutex::new(asked);
        let fake = Fake::new(|path: &[u8]| {
            let _ = asked.lock().send(());
            Ok(path.starts_with(b"e"))
        });
        let unsynced = Unsynced::default();
        unsynced.note_named(&fake, 1, (b"d/f", 0), None);
        unsynced.note_directory(&fake, (b"d", 0));
        std::thread::scope(|scope| {
            let moving = unsynced.begin_move(&[(b"d", b"e")]);
            let synced = scope.spawn(|| unsynced.sync(&fake));
            for _ in 0..4 {
                has_asked.recv_timeout(PATIENCE).unwrap();
            }
            moving.done(&[(b"d", b"e")], &[], true, || {});
            synced.join().unwrap().unwrap();
        });
        assert_eq!(fake.take(), [&b"e"[..], b"e/f"]);
        check_empty(&unsynced);
    }

    #[test]
    fn a_move_that_ends_during_a_sync_is_seen() {
        let unsynced = Unsynced::default();
        let moves: Moves<'_> = &[(b"d", b"e"), (b"e", b"d")];
        let exchanges = Mutex::new(2);
        let fake = Fake::new(|path: &[u8]| {
            // There and back again, and both are there all the time.
            if path == b"d" && std::mem::replace(&mut *exchanges.lock(), 0) > 0 {
                unsynced.begin_move(moves).done(moves, &[], true, || {});
                unsynced.begin_move(moves).done(moves, &[], true, || {});
            }
            Ok(true)
        });
        unsynced.note_directory(&fake, (b"d", 0));
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), [b"d", b"d"], "it may have been the other one at first");
        check_empty(&unsynced);
    }

    #[test]
    fn a_move_without_end_is_not_waited_for_without_end() {
        let mut fake = Fake::new(|_: &[u8]| Ok(false));
        fake.timeout = Duration::from_millis(50);
        let unsynced = Unsynced::default();
        let data = Some((FileKey(7), Layout::new(0, 1, 4096, 1).unwrap()));
        unsynced.note(&fake, 1, data, || b"f".to_vec(), None);
        let moving = unsynced.begin_move(&[(b"f", b"g")]);
        assert_eq!(unsynced.sync(&fake).unwrap_err().errno(), libc::EBUSY);
        drop(moving);
        fake.take();
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), [b"bytes of 7"], "it is gone, though it may be open");
        check_empty(&unsynced);
    }

    #[test]
    fn only_a_file_that_had_the_removed_name_all_the_time_is_forgotten() {
        let fake = Fake::new(|_: &[u8]| Ok(true));
        let unsynced = Unsynced::default();
        note(&unsynced, &fake, 1..4);
        let seen = unsynced.see(1, b"1");
        unsynced.forget(seen, b"1");
        assert!(unsynced.see(2, b"another").is_none());
        let (there, back): (Moves<'_>, Moves<'_>) = (&[(b"2", b"x")], &[(b"x", b"2")]);
        let seen = unsynced.see(2, b"2");
        unsynced.begin_move(there).done(there, &[2], false, || {});
        unsynced.begin_move(back).done(back, &[2], false, || {});
        unsynced.forget(seen, b"2");
        let seen = unsynced.see(3, b"3");
        let moving = unsynced.begin_move(&[(b"3", b"y")]);
        unsynced.forget(seen, b"3");
        assert!(unsynced.see(3, b"3").is_none());
        drop(moving);
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), [b"2", b"3"]);
        check_empty(&unsynced);
    }

    #[test]
    fn what_is_changed_during_its_sync_is_left_to_the_next() {
        let unsynced = Unsynced::default();
        let changes = AtomicBool::new(true);
        let fake = Fake::new(|path: &[u8]| {
            if changes.swap(false, Relaxed) {
                let quiet = Fake::new(|_: &[u8]| Ok(true));
                unsynced.note_named(&quiet, 1, (path, 0), None);
            }
            Ok(true)
        });
        note(&unsynced, &fake, 1..2);
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), [b"1"]);
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), [b"1"]);
        check_empty(&unsynced);
    }

    #[test]
    fn a_file_is_synced_by_the_name_by_which_it_was_changed_last() {
        let fake = Fake::new(|path: &[u8]| Ok(path == b"another name"));
        let unsynced = Unsynced::default();
        note(&unsynced, &fake, 1..2);
        unsynced.note_named(&fake, 1, (b"another name", 0), None);
        check(&unsynced);
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), [b"another name"]);
        check_empty(&unsynced);
    }

    #[test]
    fn what_was_moved_before_its_change_is_noted_has_its_new_path() {
        let fake = Fake::new(|path: &[u8]| Ok(path.starts_with(b"c")));
        let unsynced = Unsynced::default();
        let since = unsynced.moves();
        for moves in [&[(&b"a"[..], &b"b"[..])], &[(b"b", b"c")]] {
            unsynced.begin_move(moves).done(moves, &[], true, || {});
        }
        unsynced.note_named(&fake, 1, (b"a/f", since), None);
        unsynced.note_directory(&fake, (b"a", since));
        unsynced.sync(&fake).unwrap();
        assert_eq!(fake.take(), [&b"c"[..], b"c/f"]);
        check_empty(&unsynced);
        for _ in 0..2 * MOVES_MAX {
            let moves: Moves<'_> = &[(b"x", b"y")];
            unsynced.begin_move(moves).done(moves, &[], true, || {});
        }
        assert_eq!(unsynced.changed.lock().moved.len(), MOVES_MAX);
    }
}
