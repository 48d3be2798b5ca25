//! The metadata server's view of the data servers, and a stand-in that keeps objects in memory.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::lock::{Condvar, Mutex};
use impresario_layout::Layout;
use impresario_wire::message::{FileKey, LaneState, ObjectInfo, Statfs, Time, Who};
use rustc_hash::{FxHashMap, FxHashSet};

/// The objects of files, on the data servers. Calls may take long, but each has its own deadline.
pub trait Objects: Send + Sync {
    /// Length and last modification of a file according to its objects; zeros if it has none, EIDRM if they were removed.
    fn stat(&self, file: FileKey, layout: &Layout) -> io::Result<ObjectInfo>;
    /// Truncates or extends the file's objects to those of a file of `len_bytes`, in the name of the client that asked
    /// for it: what that client does in a newer epoch revokes it. Gives the states of the data servers, by which the client
    /// learns at its next sync whether one has lost it.
    fn truncate(&self, who: &Who, file: FileKey, layout: &Layout, len_bytes: u64) -> io::Result<Vec<LaneState>>;
    /// Makes the file's objects durable, as far as that succeeds. Gives the states of the data servers: what has failed is in them.
    fn sync(&self, file: FileKey, layout: &Layout) -> io::Result<Vec<LaneState>>;
    /// When this returns, no change of the file that came under this epoch of the client, or an older one, is still to be
    /// done.
    fn revoke(&self, who: &Who, file: FileKey, layout: &Layout) -> io::Result<()>;
    /// When this returns, no data server takes anything any more that a client sends under an older epoch than this.
    fn fence(&self, who: &Who) -> io::Result<()>;
    /// Removes the objects of files for ever; a result for each, which is good if there are none. Once a data server did not
    /// answer, the rest need not be tried: they have no result.
    fn unlink(&self, files: &[(FileKey, Layout)]) -> Vec<io::Result<()>>;
    /// Totals over the data servers; `files` and `files_free` are ignored.
    fn statfs(&self) -> io::Result<Statfs>;
}

/// To what [`MemoryObjects`] can be extended, bytes; a real file system has such a limit too.
const TRUNCATE_MAX_BYTES: u64 = 1 << 50;

/// How long calls wait for a server of [`MemoryObjects`] that is silent.
const SILENCE: Duration = Duration::from_millis(300);

/// Objects without content, in memory: for tests, and for measuring the metadata server alone.
#[derive(Default)]
pub struct MemoryObjects {
    files: Mutex<FxHashMap<FileKey, MemoryFile>>,
    removed: Mutex<FxHashSet<FileKey>>,
    away: AtomicBool,
    silent: Mutex<Option<u16>>,
    silences: AtomicU64,
    unlinks_at_once: AtomicUsize,
    delay_us: AtomicU64,
    held: Mutex<bool>,
    released: Condvar,
    calls: AtomicU64,
    ticks: AtomicU64,
    meanwhile: Mutex<Option<Meanwhile>>,
}

/// What happens while an answer is on its way.
type Meanwhile = Box<dyn FnOnce() + Send>;

struct MemoryFile {
    lanes: Vec<u64>,
    /// Which of them exist.
    made: u64,
    mtime: Time,
}

impl MemoryObjects {
    /// Applies a client's write of `len_bytes` at `offset` to the objects.
    pub fn write(&self, file: FileKey, layout: &Layout, offset: u64, len_bytes: u64) {
        let mtime = self.now();
        let mut files = self.files.lock();
        let state =
            files.entry(file).or_insert_with(|| MemoryFile { lanes: vec![0; layout.pcount.into()], made: 0, mtime });
        state.mtime = mtime;
        for range in layout.lane_ranges(offset, len_bytes) {
            let Some(k) = layout.position_of(range.server) else { continue };
            if let Some(lane) = state.lanes.get_mut(usize::from(k)) {
                *lane = (*lane).max(range.lane_offset + range.len);
                state.made |= 1 << (k % 64);
            }
        }
    }

    /// Makes every call fail with a time-out, or work again.
    pub fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::SeqCst);
    }

    /// Has one data server, or none, answer no removal: those that need it fail after a while.
    pub fn set_silent(&self, server: Option<u16>) {
        *self.silent.lock() = server;
    }

    /// Removals so far that had to wait for the silent server in vain; those that were asked for together count once.
    pub fn silences(&self) -> u64 {
        self.silences.load(Ordering::SeqCst)
    }

    /// Asks for so many removals at once, and for no more of a call once some of them failed.
    pub fn set_unlinks_at_once(&self, most: usize) {
        self.unlinks_at_once.store(most, Ordering::SeqCst);
    }

    /// Makes every call take this long.
    pub fn set_delay(&self, delay: Duration) {
        self.delay_us.store(delay.as_micros() as u64, Ordering::SeqCst);
    }

    /// Lets no call end, for at most a minute, until it is called with `false`.
    pub fn hold(&self, held: bool) {
        *self.held.lock() = held;
        self.released.notify_all();
    }

    /// Does this between the next answer to [`Objects::stat`] and its arrival, once.
    pub fn before_next_answer(&self, act: impl FnOnce() + Send + 'static) {
        *self.meanwhile.lock() = Some(Box::new(act));
    }

    /// [`Self::before_next_answer`] is over.
    pub fn has_answered(&self) -> bool {
        self.meanwhile.lock().is_none()
    }

    /// Loses the object at a position of a file.
    pub fn lose(&self, file: FileKey, k: u16) {
        if let Some(state) = self.files.lock().get_mut(&file) {
            state.lanes.get_mut(usize::from(k)).into_iter().for_each(|lane| *lane = 0);
            state.made &= !(1 << (k % 64));
        }
    }

    /// Keys of the files that have objects.
    pub fn files(&self) -> Vec<FileKey> {
        self.files.lock().keys().copied().collect()
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    /// The current time, never the same twice.
    fn now(&self) -> Time {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let tick = self.ticks.fetch_add(1, Ordering::SeqCst) % 1000;
        Time { secs: now.as_secs() as i64, nanos: now.subsec_micros() * 1000 + tick as u32 }
    }

    fn enter(&self) -> io::Result<()> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let delay_us = self.delay_us.load(Ordering::SeqCst);
        if delay_us > 0 {
            std::thread::sleep(Duration::from_micros(delay_us));
        }
        drop(self.released.wait_timeout_while(self.held.lock(), Duration::from_secs(60), |held| *held));
        match self.away.load(Ordering::SeqCst) {
            true => Err(io::Error::new(io::ErrorKind::TimedOut, "data.0 does not answer")),
            false => Ok(()),
        }
    }

    fn info_of(&self, file: FileKey, layout: &Layout) -> io::Result<ObjectInfo> {
        self.enter()?;
        let files = self.files.lock();
        let Some(state) = files.get(&file) else {
            let is_removed = self.removed.lock().contains(&file);
            return if is_removed { Err(rustix::io::Errno::IDRM.into()) } else { Ok(ObjectInfo::default()) };
        };
        let size = (0..layout.pcount).zip(&state.lanes).map(|(k, len)| layout.file_len(k, *len)).max().unwrap_or(0);
        Ok(ObjectInfo { size, mtime: state.mtime, used_bytes: state.lanes.iter().sum(), made: state.made })
    }
}

impl Objects for MemoryObjects {
    fn stat(&self, file: FileKey, layout: &Layout) -> io::Result<ObjectInfo> {
        let answer = self.info_of(file, layout);
        let meanwhile = self.meanwhile.lock().take();
        meanwhile.into_iter().for_each(|act| act());
        answer
    }

    fn truncate(&self, _who: &Who, file: FileKey, layout: &Layout, len_bytes: u64) -> io::Result<Vec<LaneState>> {
        self.enter()?;
        if len_bytes > TRUNCATE_MAX_BYTES {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let mtime = self.now();
        let mut files = self.files.lock();
        if len_bytes == 0 && !files.contains_key(&file) {
            return Ok(Vec::new());
        }
        let lanes: Vec<u64> = (0..layout.pcount).map(|k| layout.lane_len(k, len_bytes)).collect();
        let now = lanes.iter().zip(0u32..).filter(|(len, _)| **len > 0).fold(0, |made, (_, k)| made | 1 << (k % 64));
        let made = now | files.get(&file).map_or(0, |state| state.made);
        files.insert(file, MemoryFile { lanes, made, mtime });
        // Memory loses nothing that a sync would have to tell of.
        Ok(Vec::new())
    }

    fn sync(&self, _file: FileKey, _layout: &Layout) -> io::Result<Vec<LaneState>> {
        self.enter().map(|()| Vec::new())
    }

    fn revoke(&self, _who: &Who, _file: FileKey, _layout: &Layout) -> io::Result<()> {
        self.enter()
    }

    fn fence(&self, _who: &Who) -> io::Result<()> {
        self.enter()
    }

    fn unlink(&self, files: &[(FileKey, Layout)]) -> Vec<io::Result<()>> {
        let silent = *self.silent.lock();
        let unlink = |(file, layout): &(FileKey, Layout)| {
            self.enter()?;
            if silent.is_some_and(|server| layout.position_of(server).is_some()) {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "a data server does not answer"));
            }
            self.files.lock().remove(file);
            self.removed.lock().insert(*file);
            Ok(())
        };
        let most = self.unlinks_at_once.load(Ordering::SeqCst);
        let mut removed: Vec<io::Result<()>> = Vec::new();
        for files in files.chunks(if most == 0 { usize::MAX } else { most }) {
            removed.extend(files.iter().map(unlink));
            if removed.iter().any(Result::is_err) {
                break;
            }
        }
        if silent.is_some() && removed.iter().any(Result::is_err) {
            self.silences.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(SILENCE);
        }
        removed
    }

    fn statfs(&self) -> io::Result<Statfs> {
        self.enter()?;
        Ok(Statfs { total_bytes: 1 << 40, free_bytes: 1 << 39, files: 0, files_free: 0 })
    }
}
