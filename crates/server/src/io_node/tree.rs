//! A folder of a file system that this machine has mounted, in the place of data servers and metadata server.
//!
//! Names and attributes are the folder's own; file ranges go through the scheduler as everywhere, over one lane for each
//! data server that the file system names. The node acts as itself: like the servers of a cluster it leaves the check of
//! permissions to the machines of its clients, and gives new nodes to the users who make them.
//!
//! An open file is known by a key that every node over the folder computes alike, so that a client goes on through
//! another node: it opens its files there again by their paths.

mod ahead;
mod files;
mod listing;
mod names;
mod once;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use impresario_backend::{Backend, Caller, Errno, Lost};
use impresario_base::lock::Mutex;
use impresario_client::Identity;
use impresario_layout::Layout;
use impresario_wire::{Answer, Call, Fault, FileKey, LaneState, ObjectInfo, SeekTo, Sought, SpaceChange, Time, Who};
use rustc_hash::FxHashMap;

use super::storage::{Storage, Striping, Target, joined};
use crate::connection::Reply;
use crate::listener::Vitals;
use crate::workers::{PATIENCE, Workers, stop_all, waiting_elsewhere};
pub(super) use ahead::{Ahead, Foreseen};
pub(super) use files::OpenFile;

use files::Files;
use listing::Snapshot;
use once::Once;

/// Threads for metadata calls. Those that are [stuck](STUCK_AFTER) do not count: there are 528 at most, and with them as many
/// listings, each of 32 MiB at most, of directories whose calls hang.
const THREADS: usize = 16;
/// A call that has taken so long hangs, as far as others are concerned. Less is usual: the file system may be on a disk that is busy, or
/// on another machine.
const STUCK_AFTER: Duration = Duration::from_secs(1);
/// Files that one client may have open.
const OPENS_MAX: usize = 65_536;

/// What a tree is made of.
pub(crate) struct TreeSettings {
    /// Name of the I/O node.
    pub(crate) name: String,
    /// The file system.
    pub(crate) backend: Arc<dyn Backend>,
    /// How long a sync of all files may take: less than a client waits for the answer.
    pub(crate) sync_all_wait: Duration,
    /// Who the node is to it.
    pub(crate) caller: Caller,
    /// Lanes of the scheduler.
    pub(crate) lanes: u16,
    /// Requests are split: lanes of one file must differ.
    pub(crate) split: bool,
    /// What is read ahead of the clients at most, bytes; 0: nothing is.
    pub(crate) read_ahead_bytes: u64,
    /// The node's run, for what may have been lost with it, its memory for merged writes, and what the file system has failed.
    pub(crate) vitals: Vitals,
    /// Counts what goes to the file system.
    pub(crate) identity: Arc<Identity>,
    /// What `status` says of the file system.
    pub(crate) describe: Box<dyn Fn() -> serde_json::Value + Send + Sync>,
}

/// A folder, as a storage and a name space.
pub(crate) struct Tree {
    settings: TreeSettings,
    files: Arc<Files>,
    ahead: Option<Arc<Ahead>>,
    once: Once,
    next_handle: AtomicU64,
    threads: Workers,
    /// All files are being synced: for one client after the other, as the first leaves the others little to wait for.
    syncing_all: Arc<AtomicBool>,
}

/// What a client has open.
pub(super) struct TreeSession {
    tree: Arc<Tree>,
    state: Mutex<SessionState>,
}

#[derive(Default)]
struct SessionState {
    opens: FxHashMap<u64, Arc<OpenFile>>,
    snapshot: Option<Arc<Snapshot>>,
    ended: bool,
}

impl Tree {
    pub(crate) fn new(settings: TreeSettings) -> Arc<Tree> {
        let (files, once, next_handle) = (Arc::<Files>::default(), Once::default(), AtomicU64::new(1));
        let TreeSettings { backend, caller, read_ahead_bytes, .. } = &settings;
        let ahead = || Ahead::new(*read_ahead_bytes, backend.clone(), caller.clone(), files.clone());
        let ahead = (*read_ahead_bytes > 0).then(ahead);
        let threads = Workers::new("metadata", THREADS).patient(STUCK_AFTER);
        Arc::new(Tree { settings, files, ahead, once, next_handle, threads, syncing_all: Arc::default() })
    }

    pub(super) fn stop(&self) {
        stop_all(std::iter::once(&self.threads).chain(self.ahead.iter().map(|ahead| ahead.threads())), PATIENCE);
    }

    pub(super) fn status(&self) -> serde_json::Value {
        let mut status = (self.settings.describe)();
        status["open_files"] = self.files.count().into();
        status
    }

    fn backend(&self) -> &dyn Backend {
        &*self.settings.backend
    }

    /// A file that a client reads or writes.
    fn file(&self, key: FileKey) -> Result<Arc<OpenFile>, Fault> {
        self.files.get(key).ok_or_else(|| Fault {
            errno: libc::EBADF,
            message: format!("the file is not open at {}; open it again", self.settings.name),
        })
    }

    /// The file system has failed a call of the scheduler; those for names are noted where they are answered.
    fn storage_failed(&self, error: Errno, doing: &str) -> Fault {
        self.settings.vitals.failures().note(error.0, &format_args!("{doing}: {error}"));
        self.failed(error, doing)
    }

    fn failed(&self, error: Errno, doing: &str) -> Fault {
        let errno = match error.0 {
            // To a client this number says that the request was fenced.
            libc::ESTALE => libc::EBADF,
            errno => outward(errno),
        };
        Fault { errno, message: format!("{}: {doing}: {error}", self.settings.name) }
    }

    /// Puts all that was written through this node on stable storage; after [`TreeSettings::sync_all_wait`] says that it has not.
    /// A file system that hangs has one thread of it, whoever asks.
    fn sync_all(&self) -> Result<Answer, Fault> {
        let busy = |what| {
            let message = format!("{} {what}; try again", self.settings.name);
            Err(Fault { errno: libc::EBUSY, message })
        };
        let Some(alone) = Alone::begin(&self.syncing_all) else {
            return busy("is syncing all files for another client");
        };
        let (backend, (ended, end)) = (self.settings.backend.clone(), std::sync::mpsc::sync_channel(1));
        self.threads.run(Box::new(move || {
            let synced = waiting_elsewhere(|| backend.sync_all());
            drop(alone);
            let _ = ended.send(synced); // who asked may not wait any more
        }));
        let Lost { files, any } = match end.recv_timeout(self.settings.sync_all_wait) {
            Ok(Ok(lost)) => lost,
            // What only took too long, behind the calls of others, says nothing of the file system.
            Err(_) | Ok(Err(Errno(libc::ETIMEDOUT))) => return busy("has not synced all files in time"),
            Ok(Err(error)) => return Err(self.storage_failed(error, "syncing all files")),
        };
        let lost = files.map(|files| files.iter().map(files::key_of).collect());
        Ok(Answer::AllSynced { lane: self.lane(), run: self.settings.vitals.incarnation(), lost, any_lost: any })
    }

    /// What tells whether writes may have been lost: they are in the memory of this machine until a sync.
    fn lane(&self) -> LaneState {
        LaneState::new(0, self.settings.vitals.incarnation(), 0)
    }

    fn state(&self) -> Vec<LaneState> {
        vec![self.lane()]
    }
}

/// Held while all files are synced.
struct Alone(Arc<AtomicBool>);

impl Alone {
    fn begin(is_held: &Arc<AtomicBool>) -> Option<Alone> {
        (!is_held.swap(true, Ordering::AcqRel)).then(|| Alone(is_held.clone()))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A number as a client may hear it: some tell it to act rather than to fail.
fn outward(errno: i32) -> i32 {
    match errno {
        libc::ESTALE => libc::ENOENT,
        // Another server has a lease of the file and was told to give it up: the client asks again.
        libc::EAGAIN => libc::EBUSY,
        libc::ESHUTDOWN => libc::EIO,
        libc::EBUSY => libc::EPERM,
        // The server's own shortage.
        libc::EMFILE => libc::ENFILE,
        errno => errno,
    }
}

/// The ranges of the file (offset, length) that a range of a data server's object is.
fn file_ranges(layout: Layout, server: u16, start: u64, len: u64) -> impl Iterator<Item = (u64, usize)> {
    let (k, ssize) = (layout.position_of(server).unwrap_or(0), u64::from(layout.ssize_bytes));
    // Of one data server all of the object is the file.
    let strip = move |at: u64| if layout.pcount == 1 { u64::MAX } else { ssize - at % ssize };
    let (mut at, end) = (start, start.saturating_add(len));
    std::iter::from_fn(move || {
        let len = strip(at).min(end.checked_sub(at).filter(|left| *left > 0)?);
        let offset = layout.file_offset(k, at);
        at += len;
        Some((offset, len as usize))
    })
}

impl Storage for Tree {
    fn striping(&self, file: FileKey, _: Layout) -> Result<Striping, Fault> {
        Ok(self.file(file)?.striping.clone())
    }

    fn read(&self, target: &Target, start: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let Some(server) = target.server else { return self.read_file(target, start, into) };
        let mut done = 0;
        for (offset, len) in file_ranges(target.layout, server, start, into.len() as u64) {
            let got = self.read_file(target, offset, &mut into[done..done + len])?;
            done += got;
            if got < len {
                break;
            }
        }
        Ok(done)
    }

    fn read_file(&self, target: &Target, offset: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let file = self.file(target.file)?;
        self.settings.identity.traffic.count_read(into.len() as u64);
        let got = self.backend().read(&self.settings.caller, &file.handle, offset, into);
        got.map_err(|error| self.storage_failed(error, "reading"))
    }

    fn write(&self, _: &[Who], target: &Target, start: u64, pieces: &[&[u8]]) -> Result<Vec<LaneState>, Fault> {
        let file = self.file(target.file)?;
        let merged;
        let bytes: &[u8] = match pieces {
            [whole] => whole,
            pieces => {
                merged = joined(self.settings.vitals.pool(), pieces);
                &merged
            }
        };
        let write = |offset: u64, bytes: &[u8]| {
            self.settings.identity.traffic.count_write(bytes.len() as u64);
            let written = self.backend().write(&self.settings.caller, &file.handle, offset, bytes, false);
            written.map_err(|error| self.storage_failed(error, "writing"))
        };
        match target.server {
            None => write(start, bytes)?,
            Some(server) => {
                let mut done = 0;
                for (offset, len) in file_ranges(target.layout, server, start, bytes.len() as u64) {
                    write(offset, &bytes[done..done + len])?;
                    done += len;
                }
            }
        }
        Ok(self.state())
    }

    fn sync(&self, target: &Target) -> Result<(Vec<LaneState>, i32), Fault> {
        let file = self.file(target.file)?;
        let made = file.attributes.made();
        match self.backend().sync(&file.handle) {
            Ok(()) => {
                file.attributes.synced(made);
                Ok((self.state(), 0))
            }
            Err(error @ Errno(libc::ESTALE | libc::EBADF)) => Err(self.storage_failed(error, "syncing")),
            Err(error @ Errno(errno)) => {
                self.settings.vitals.failures().note(errno, &error);
                Ok((self.state(), errno))
            }
        }
    }

    fn change_space(
        &self,
        target: &Target,
        change: SpaceChange,
        (offset, len): (u64, u64),
    ) -> Result<Vec<LaneState>, Fault> {
        let file = self.file(target.file)?;
        let change = match change {
            SpaceChange::Allocate { keep_size } => impresario_backend::SpaceChange::Allocate { keep_size },
            SpaceChange::Punch => impresario_backend::SpaceChange::Punch,
            SpaceChange::Zero { keep_size } => impresario_backend::SpaceChange::Zero { keep_size },
        };
        let changed = self.backend().change_space(&self.settings.caller, &file.handle, change, offset, len);
        changed.map_err(|error| self.storage_failed(error, "changing the space"))?;
        Ok(self.state())
    }

    fn seek(&self, key: FileKey, layout: &Layout, _: u64, from: u64, to: SeekTo) -> Result<Sought, Fault> {
        let file = self.file(key)?;
        let at = self.backend().seek(&self.settings.caller, &file.handle, from, to == SeekTo::Data);
        let at = at.map_err(|error| self.storage_failed(error, "looking for holes"))?;
        Ok(Sought { at, object: self.stat(key, layout)? })
    }

    fn stat(&self, file: FileKey, _: &Layout) -> Result<ObjectInfo, Fault> {
        let attr =
            self.backend().attr(&self.file(file)?.handle).map_err(|error| self.storage_failed(error, "looking"))?;
        Ok(ObjectInfo { size: attr.size_bytes, mtime: time(attr.mtime), used_bytes: attr.used_bytes, made: 1 })
    }

    fn ahead(&self) -> Option<&Arc<Ahead>> {
        self.ahead.as_ref()
    }
}

/// A time for the wire; seconds are rounded down.
fn time(time: std::time::SystemTime) -> Time {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => Time { secs: i64::try_from(since.as_secs()).unwrap_or(i64::MAX), nanos: since.subsec_nanos() },
        Err(before) => {
            let until = before.duration();
            let secs = -i64::try_from(until.as_secs()).unwrap_or(i64::MAX);
            match until.subsec_nanos() {
                0 => Time { secs, nanos: 0 },
                nanos => Time { secs: secs.saturating_sub(1), nanos: 1_000_000_000 - nanos },
            }
        }
    }
}

impl TreeSession {
    pub(super) fn new(tree: &Arc<Tree>) -> Arc<TreeSession> {
        Arc::new(TreeSession { tree: tree.clone(), state: Mutex::default() })
    }

    /// Serves a metadata call on a thread of its own: the file system may take its time.
    pub(super) fn serve(self: &Arc<Self>, call: Call, reply: Reply) {
        let Call::Meta { who, call } = call else { return };
        let session = self.clone();
        self.tree.threads.run(Box::new(move || {
            // It may have been done through another node, and something else with the same names since.
            if call.is_change() && reply.client_is_gone() {
                return reply.forget();
            }
            // One file whose calls hang must not take the threads of all.
            let answer = waiting_elsewhere(|| session.tree.answer(&session, who, call));
            let note = |fault: &Fault| session.tree.settings.vitals.failures().note(fault.errno, &fault.message);
            reply.send(&answer.inspect_err(note).unwrap_or_else(Answer::Fault));
        }));
    }

    /// The client is gone: what it had open is closed.
    pub(super) fn end(&self) {
        let opens = {
            let mut state = self.state.lock();
            state.ended = true;
            state.snapshot = None;
            std::mem::take(&mut state.opens)
        };
        for file in opens.into_values() {
            self.tree.files.close(self.tree.backend(), &file);
        }
    }

    /// Keeps an open for the client; its number.
    fn keep(&self, file: Arc<OpenFile>) -> Result<u64, Fault> {
        let mut state = self.state.lock();
        let refused = match (state.ended, state.opens.len() < OPENS_MAX) {
            (false, true) => None,
            (true, _) => Some((libc::ENOTCONN, "the connection has ended; reconnect".into())),
            (_, false) => Some((libc::EMFILE, format!("the client has {OPENS_MAX} files open; close some"))),
        };
        if let Some((errno, message)) = refused {
            drop(state);
            self.tree.files.close(self.tree.backend(), &file);
            return Err(Fault { errno, message });
        }
        let handle = self.tree.next_handle.fetch_add(1, Ordering::Relaxed);
        state.opens.insert(handle, file);
        Ok(handle)
    }

    fn opened(&self, handle: u64) -> Result<Arc<OpenFile>, Fault> {
        self.state.lock().opens.get(&handle).cloned().ok_or_else(|| not_open(handle))
    }

    fn close(&self, handle: u64) -> Result<(), Fault> {
        let file = self.state.lock().opens.remove(&handle).ok_or_else(|| not_open(handle))?;
        self.tree.files.close(self.tree.backend(), &file);
        Ok(())
    }
}

fn not_open(handle: u64) -> Fault {
    Fault { errno: libc::EBADF, message: format!("handle {handle} is not open on this connection") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_an_object_is_strips_of_the_file() {
        let layout = Layout::new(1, 2, 1000, 4).unwrap();
        // The second data server of the file: strips 1, 3, 5, …
        let ranges: Vec<_> = file_ranges(layout, 2, 500, 1600).collect();
        assert_eq!(ranges, [(1500, 500), (3000, 1000), (5000, 100)]);
        assert_eq!(file_ranges(layout, 2, 500, 0).count(), 0);
        let whole = Layout::new(0, 1, 1000, 1).unwrap();
        assert_eq!(file_ranges(whole, 0, 2500, 7000).collect::<Vec<_>>(), [(2500, 7000)]);
    }
}
