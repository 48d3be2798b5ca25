//! Checksums of blocks: what they are, where they are kept, and when one counts.
//!
//! # The format
//! `objects/<xx>/<kkkkkkkkkkkkkkkk>.sums` belongs to the object of that key: a header of 32 bytes (magic, era, flags), then
//! the CRC-32C of each block of 4096 bytes, 4 bytes each, little endian; 0: nothing is known of that block. What is missing
//! of a block at the object's end counts as zeros, so growth by zeros changes no checksum. `checksums` at the top of the
//! folder holds the *era*, or `checksums.off` while a server serves the folder without checksums; sums of an older era
//! count as absent, since what was written meanwhile has none.
//!
//! The block is a page of memory. Requests that are multiples of a page, which is nearly all that a page cache sends, then
//! need nothing beside their own bytes to be checked; larger blocks would read more than was asked for, smaller ones would
//! cost more memory and more calls for nothing.
//!
//! # When a checksum counts
//! A checksum in the file is *settled*: the bytes that it describes are durable, and nothing was written over them since.
//! - A change of settled blocks first sets their checksums to 0, durably; only then are the bytes written. So a power failure
//!   that leaves half of a write finds a block of which nothing is known: data that nobody synced may be lost, but are never
//!   taken for damage. Each further time before the next sync, twice as many blocks behind it are unsettled along, so that
//!   a burst of overwrites costs a few syncs and not one for each; a crash then leaves these unchecked, too.
//! - The new checksum is kept in memory, where reads find it. A sync of the object writes the bytes to the device, then the
//!   checksums of what was not written again meanwhile into the file, and syncs that.
//! - A sync that failed may have lost any of those bytes, though memory still has them: their checksums are forgotten, and
//!   what is found in the object is not learnt from then on ([`State::is_distrusted`]); only whole blocks written anew count.
//! - A sync of the file itself that failed may have left old checksums on the device, though memory has 0, and the next sync
//!   succeeds without writing that. So nothing changes before the file was written anew ([`State::is_unsure`]). A server that
//!   is killed may take with it that a sync failed: the flag [`CLEARING`] tells the next one. It is set before checksums are
//!   cleared and removed when others are stored.
//!
//! # Locks
//! `settling` is held over a whole sync, `writing` over a change of the object and over the writing of checksums into the
//! file, `state` for an instant. Reads take only `state`; what does not fit is looked at again under `writing`.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use rustc_hash::FxHashMap;

use crate::filesystem::FileSystem;
use crate::handles::Handles;
use crate::objects::ObjectStore;
use crate::replace::{read_all, replace_file, write_all};

/// Bytes that share a checksum.
pub const BLOCK_BYTES: u64 = 4096;
pub(crate) const CHECKSUMS: &str = "checksums";
pub(crate) const CHECKSUMS_OFF: &str = "checksums.off";
pub(crate) const CHECKSUMS_NEW: &str = "checksums.new";
pub(crate) const SUMS: &str = ".sums";

const MAGIC: &[u8; 8] = b"IMPSUMS1";
const HEADER_BYTES: u64 = 32;
const SUM_BYTES: u64 = 4;
/// Flag: see [`State::is_distrusted`].
const DISTRUSTED: u64 = 1;
/// Flag: checksums were set to 0 since others were stored last, and a run that ended may not have known whether the device
/// took that. It need not outlive the machine: after a power failure memory has what the device has.
const CLEARING: u64 = 2;
/// The file is written anew in parts of this many bytes.
const ANEW_BYTES: u64 = 64 << 10;
/// Objects whose state is kept in memory, plus those with checksums that are not settled.
const OBJECTS_MAX: usize = 4096;
/// Blocks that are unsettled along with those that change, at most: 64 MiB.
const AHEAD_MAX: u64 = 16 << 10;

/// The checksums of a store.
pub(crate) struct Checks<H> {
    era: u64,
    pub(crate) files: Handles<H>,
    objects: Mutex<FxHashMap<u64, Arc<Checked>>>,
    /// Checksums that are in memory alone.
    pending: AtomicUsize,
    pending_max: usize,
    pub(crate) corrupt: AtomicU64,
    failures: AtomicU64,
}

/// What is known of an object's checksums beside its file.
#[derive(Default)]
pub(crate) struct Checked {
    pub(crate) writing: Mutex<()>,
    settling: Mutex<()>,
    state: Mutex<State>,
    is_loaded: AtomicBool,
    /// There is a file whose checksums count.
    has_file: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Of blocks that changed since the last sync began.
    changed: FxHashMap<u64, u32>,
    /// Of blocks that a sync is making durable.
    settling: FxHashMap<u64, u32>,
    /// When the first of `changed` came.
    since: Option<Instant>,
    /// A sync failed: what memory shows of a block may not be on the device.
    is_distrusted: bool,
    is_noted: bool,
    /// A sync of the file failed, or may have in an earlier run: the device may have checksums where memory has 0. No byte of
    /// the object changes, and the file does not grow, before [`ObjectStore::make_sure`] has succeeded.
    is_unsure: bool,
    /// The file has the flag [`CLEARING`].
    is_clearing: bool,
    /// There is a file, of an older era, or without a header: its checksums do not count.
    is_stale: bool,
    /// The object was removed.
    is_gone: bool,
    /// How often blocks were unsettled since the last sync began.
    unsettlings: u32,
}

/// What the status tells of checksums.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChecksState {
    /// Blocks that were found not to fit their checksums, each time.
    pub corrupt_blocks: u64,
    /// Checksums that no sync has settled yet.
    pub unsettled_blocks: u64,
    /// Syncs of objects that succeeded, but whose checksums could not be stored, for example on a full device.
    pub failures: u64,
}

/// Bytes that do not fit their checksum.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{server}: object {key:016x} is damaged at byte {offset}: what its device returns is not what was written; restore the file from a copy, or find all damage with `impresario scrub`"
)]
pub struct Corrupt {
    /// The server whose object it is.
    pub server: String,
    /// The object.
    pub key: u64,
    /// First byte of the block.
    pub offset: u64,
}

impl<H> Checks<H> {
    pub(crate) fn new(era: u64, open_files: usize, pending_max: usize) -> Checks<H> {
        Checks {
            era,
            files: Handles::new(open_files),
            objects: Mutex::default(),
            pending: AtomicUsize::new(0),
            pending_max: pending_max.max(1),
            corrupt: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    /// Acts on an object's state and counts what it holds.
    fn with<T>(&self, checked: &Checked, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = checked.state.lock();
        let before = state.changed.len() + state.settling.len();
        let result = act(&mut state);
        if state.is_gone {
            state.changed.clear();
            state.settling.clear();
        }
        state.since = if state.changed.is_empty() { None } else { Some(state.since.unwrap_or_else(Instant::now)) };
        let after = state.changed.len() + state.settling.len();
        self.pending.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
        result
    }

    /// More checksums wait in memory than there is room for.
    pub(crate) fn is_full(&self) -> bool {
        self.pending.load(Ordering::Relaxed) > self.pending_max
    }

    pub(crate) fn state(&self) -> ChecksState {
        ChecksState {
            corrupt_blocks: self.corrupt.load(Ordering::Relaxed),
            unsettled_blocks: self.pending.load(Ordering::Relaxed) as u64,
            failures: self.failures.load(Ordering::Relaxed),
        }
    }
}

impl Checked {
    fn is_idle(&self) -> bool {
        let state = self.state.lock();
        let is_noted = !state.is_distrusted || state.is_noted;
        state.changed.is_empty() && state.settling.is_empty() && is_noted
    }

    pub(crate) fn is_unsure(&self) -> bool {
        self.state.lock().is_unsure
    }

    pub(crate) fn is_distrusted(&self) -> bool {
        self.state.lock().is_distrusted
    }
}

/// The checksum of a block of which these are the first bytes, and zeros the rest. Never 0.
pub(crate) fn sum_of(bytes: &[u8]) -> u32 {
    const ZEROS: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];
    let sum = crc32c::crc32c(bytes);
    let rest = ZEROS.get(bytes.len()..).unwrap_or_default();
    if rest.is_empty() { sum } else { crc32c::crc32c_append(sum, rest) }.max(1)
}

/// The blocks that a range of bytes touches.
pub(crate) fn touched(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)
}

/// Where a look at an object that begins at `offset` ends, bytes: after `max_bytes` (at least a block), or before, so that all the
/// checksums of it are in one page of their file. What cannot be read of that file then leaves nothing else unchecked.
pub fn piece_end(offset: u64, max_bytes: u64) -> u64 {
    let (first, count) = (offset / BLOCK_BYTES, (max_bytes / BLOCK_BYTES).max(1));
    let (before, in_a_page) = (HEADER_BYTES / SUM_BYTES, BLOCK_BYTES / SUM_BYTES);
    let page_end = ((first + before) / in_a_page + 1) * in_a_page - before;
    first.saturating_add(count).min(page_end).saturating_mul(BLOCK_BYTES)
}

/// The checksums of the blocks that lie wholly inside a range, and the first of these blocks.
pub(crate) fn sums_of(offset: u64, bufs: &[io::IoSlice<'_>]) -> (u64, Vec<u32>) {
    let total: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
    let (first, end) = (offset.div_ceil(BLOCK_BYTES), (offset + total) / BLOCK_BYTES);
    let mut sums = Vec::with_capacity(end.saturating_sub(first) as usize);
    let mut skip = (first * BLOCK_BYTES - offset) as usize;
    let (mut sum, mut len) = (0, 0);
    for buf in bufs {
        let mut rest: &[u8] = buf;
        let skipped = skip.min(rest.len());
        skip -= skipped;
        rest = rest.get(skipped..).unwrap_or_default();
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(rest.len().min(BLOCK_BYTES as usize - len));
            (sum, len, rest) = (crc32c::crc32c_append(sum, head), len + head.len(), tail);
            if len == BLOCK_BYTES as usize {
                sums.push(sum.max(1));
                (sum, len) = (0, 0);
            }
        }
    }
    (first, sums)
}

/// Finds out, or decides, whether the blocks of a folder have checksums, and of which era; `None`: they have none.
pub(crate) fn era<F: FileSystem>(fs: &F, wanted: Option<bool>) -> io::Result<Option<u64>> {
    let read = |name| -> io::Result<Option<u64>> {
        let Some(bytes) = read_all(fs, name)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let era = text.strip_prefix("impresario checksums 1\nera ").and_then(|era| era.trim_end().parse().ok());
        era.map(Some).ok_or_else(|| io::Error::other(format!("its file `{name}` cannot be read: {text:?}")))
    };
    let (on, off) = (read(CHECKSUMS)?, read(CHECKSUMS_OFF)?);
    match (on, wanted.unwrap_or(on.is_some())) {
        (Some(era), true) => Ok(Some(era)),
        (Some(_), false) => {
            fs.rename(CHECKSUMS, CHECKSUMS_OFF)?;
            fs.sync_dir("")?;
            Ok(None)
        }
        (None, false) => Ok(None),
        (None, true) => {
            let era = off.unwrap_or(0) + 1;
            replace_file(fs, CHECKSUMS, CHECKSUMS_NEW, format!("impresario checksums 1\nera {era}\n").as_bytes())?;
            Ok(Some(era))
        }
    }
}

impl<F: FileSystem> ObjectStore<F> {
    pub(crate) fn sums_path(&self, key: u64) -> String {
        format!("{}{SUMS}", self.path(key))
    }

    /// What is known of an object's checksums, if that is in memory.
    pub(crate) fn checked_if_loaded(&self, checks: &Checks<F::File>, key: u64) -> Option<Arc<Checked>> {
        checks.objects.lock().get(&key).filter(|checked| checked.is_loaded.load(Ordering::Acquire)).cloned()
    }

    /// What is known of an object's checksums.
    pub(crate) fn checked(&self, checks: &Checks<F::File>, key: u64) -> io::Result<Arc<Checked>> {
        let checked = {
            let mut objects = checks.objects.lock();
            if objects.len() >= OBJECTS_MAX && !objects.contains_key(&key) {
                objects.retain(|_, checked| Arc::strong_count(checked) > 1 || !checked.is_idle());
            }
            objects.entry(key).or_default().clone()
        };
        if !checked.is_loaded.load(Ordering::Acquire) {
            let _writing = checked.writing.lock();
            if !checked.is_loaded.load(Ordering::Acquire) {
                self.load(checks, &checked, key)?;
                checked.is_loaded.store(true, Ordering::Release);
            }
        }
        Ok(checked)
    }

    fn load(&self, checks: &Checks<F::File>, checked: &Checked, key: u64) -> io::Result<()> {
        let Some(file) = self.sums_file(checks, key)? else { return Ok(()) };
        let mut header = [0; HEADER_BYTES as usize];
        read_full(&self.fs, &file, 0, &mut header)?;
        let word =
            |at: usize| header.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
        if header.starts_with(MAGIC) && word(8) == checks.era {
            let (is_distrusted, is_clearing) = (word(16) & DISTRUSTED != 0, word(16) & CLEARING != 0);
            checks.with(checked, |state| {
                (state.is_distrusted, state.is_noted) = (is_distrusted, is_distrusted);
                (state.is_unsure, state.is_clearing) = (is_clearing, is_clearing);
            });
            checked.has_file.store(true, Ordering::Release);
        } else {
            checked.state.lock().is_stale = true;
        }
        Ok(())
    }

    /// Empties a file whose checksums must not count, durably.
    fn empty(&self, file: &F::File) -> io::Result<()> {
        self.fs.set_len(file, 0)?;
        self.fs.sync(file)
    }

    fn sums_file(&self, checks: &Checks<F::File>, key: u64) -> io::Result<Option<Arc<F::File>>> {
        checks.files.get_or_open(key, || match self.fs.open(&self.sums_path(key), false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        })
    }

    /// The file of the checksums, made if need be, or emptied; true if it was. Under `writing`.
    fn sums_file_or_new(
        &self,
        checks: &Checks<F::File>,
        checked: &Checked,
        key: u64,
    ) -> io::Result<(Arc<F::File>, bool)> {
        if checked.has_file.load(Ordering::Acquire)
            && let Some(file) = self.sums_file(checks, key)?
        {
            return Ok((file, false));
        }
        let file = checks.files.get_or_open(key, || self.fs.open(&self.sums_path(key), true).map(Some))?;
        let file = file.ok_or(io::ErrorKind::NotFound)?;
        self.names_changed(key);
        if checked.state.lock().is_stale {
            // Before the new header is written: under that, the old sums would count.
            self.empty(&file)?;
            checked.state.lock().is_stale = false;
        }
        self.write_header(checks, checked, &file)?;
        checked.has_file.store(true, Ordering::Release);
        Ok((file, true))
    }

    /// Writes what the file says of the object as a whole. Under `writing`.
    fn write_header(&self, checks: &Checks<F::File>, checked: &Checked, file: &F::File) -> io::Result<()> {
        let header = header_of(checks.era, &checked.state.lock());
        write_all(&self.fs, file, 0, &header)
    }

    /// The checksums of some blocks, 0 for those of which nothing is known. With `cached`, `None` if that might wait.
    pub(crate) fn sums(
        &self,
        checks: &Checks<F::File>,
        checked: &Checked,
        key: u64,
        blocks: &Range<u64>,
        cached: bool,
    ) -> io::Result<Option<Vec<u32>>> {
        let Some(mut sums) = self.settled(checks, checked, key, blocks, cached)? else { return Ok(None) };
        let state = checked.state.lock();
        if !state.changed.is_empty() || !state.settling.is_empty() {
            for (block, sum) in blocks.clone().zip(&mut sums) {
                *sum = state.changed.get(&block).or_else(|| state.settling.get(&block)).copied().unwrap_or(*sum);
            }
        }
        Ok(Some(sums))
    }

    /// The settled checksums of some blocks.
    fn settled(
        &self,
        checks: &Checks<F::File>,
        checked: &Checked,
        key: u64,
        blocks: &Range<u64>,
        cached: bool,
    ) -> io::Result<Option<Vec<u32>>> {
        let mut bytes = vec![0; ((blocks.end - blocks.start) * SUM_BYTES) as usize];
        if checked.has_file.load(Ordering::Acquire) {
            let offset = HEADER_BYTES + blocks.start * SUM_BYTES;
            let file = if cached { checks.files.get(key) } else { self.sums_file(checks, key)? };
            match file {
                Some(file) if cached => {
                    let len = bytes.len();
                    match self.fs.read_cached(&file, offset, &mut [io::IoSliceMut::new(&mut bytes)])? {
                        Some(read) if read == len || self.fs.stat(&file)?.size <= offset + read as u64 => {}
                        _ => return Ok(None),
                    }
                }
                Some(file) => drop(read_full(&self.fs, &file, offset, &mut bytes)?),
                None if cached => return Ok(None),
                None => {}
            }
        }
        Ok(Some(bytes.chunks_exact(4).map(|sum| sum.try_into().map_or(0, u32::from_le_bytes)).collect()))
    }

    /// Blocks up to the last that has a settled checksum.
    pub(crate) fn settled_len(&self, checks: &Checks<F::File>, checked: &Checked, key: u64) -> io::Result<u64> {
        if !checked.has_file.load(Ordering::Acquire) {
            return Ok(0);
        }
        let Some(file) = self.sums_file(checks, key)? else { return Ok(0) };
        Ok(self.fs.stat(&file)?.size.saturating_sub(HEADER_BYTES) / SUM_BYTES)
    }

    /// The first block from `first` on that may have a settled checksum.
    pub(crate) fn next_settled(
        &self,
        checks: &Checks<F::File>,
        checked: &Checked,
        key: u64,
        first: u64,
    ) -> io::Result<Option<u64>> {
        if !checked.has_file.load(Ordering::Acquire) {
            return Ok(None);
        }
        let Some(file) = self.sums_file(checks, key)? else { return Ok(None) };
        let at = self.fs.next_data(&file, HEADER_BYTES + first * SUM_BYTES)?;
        Ok(at.map(|at| at.saturating_sub(HEADER_BYTES) / SUM_BYTES))
    }

    /// Sets the checksums of blocks that are about to change to 0, durably. On an error nothing may change. Under
    /// `writing`.
    pub(crate) fn unsettle(
        &self,
        checks: &Checks<F::File>,
        checked: &Checked,
        key: u64,
        blocks: Range<u64>,
    ) -> io::Result<()> {
        self.make_sure(checks, checked, key)?;
        let len = self.settled_len(checks, checked, key)?;
        if blocks.start >= len {
            return Ok(());
        }
        let Some(file) = self.sums_file(checks, key)? else { return Ok(()) };
        let offset = HEADER_BYTES + blocks.start * SUM_BYTES;
        if blocks.end >= len {
            return self.clear(checks, checked, &file, || self.fs.set_len(&file, offset));
        }
        let mut old = self.settled(checks, checked, key, &blocks, false)?.unwrap_or_default();
        if old.iter().all(|sum| *sum == 0) {
            return Ok(());
        }
        let ahead = {
            let mut state = checked.state.lock();
            let ahead = match state.unsettlings {
                0 => 0,
                earlier => (blocks.end - blocks.start).saturating_mul(1 << earlier.min(20)).min(AHEAD_MAX),
            };
            state.unsettlings += 1;
            let end = (blocks.end + ahead).min(len);
            blocks.end..end
        };
        old.extend(self.settled(checks, checked, key, &ahead, false)?.unwrap_or_default());
        // The bytes of these blocks stay as they are: the next sync settles them again.
        let keep = |from: u64| {
            checks.with(checked, |state| {
                for (block, sum) in (blocks.start..).zip(&old).skip((from - blocks.start) as usize) {
                    if *sum != 0 && !state.settling.contains_key(&block) {
                        state.changed.entry(block).or_insert(*sum);
                    }
                }
            });
        };
        keep(ahead.start);
        let zeros = vec![0; old.len() * SUM_BYTES as usize];
        let cleared = self.clear(checks, checked, &file, || write_all(&self.fs, &file, offset, &zeros));
        cleared.inspect_err(|_| keep(blocks.start))
    }

    /// Takes checksums out of force by a change of the file, durably. Under `writing`.
    fn clear(
        &self,
        checks: &Checks<F::File>,
        checked: &Checked,
        file: &F::File,
        change: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let was_clearing = std::mem::replace(&mut checked.state.lock().is_clearing, true);
        if !was_clearing {
            self.write_header(checks, checked, file).inspect_err(|_| checked.state.lock().is_clearing = false)?;
        }
        checked.state.lock().is_unsure = true;
        change()?;
        self.fs.sync_data(file)?;
        checked.state.lock().is_unsure = false;
        Ok(())
    }

    /// If a sync of the file failed, or may have: writes what memory has of it anew, durably. Each of these checksums fits
    /// its block or is 0. Under `writing`.
    fn make_sure(&self, checks: &Checks<F::File>, checked: &Checked, key: u64) -> io::Result<()> {
        if !checked.is_unsure() {
            return Ok(());
        }
        let Some(file) = self.sums_file(checks, key)? else { return Ok(()) };
        let (mut at, mut buf) = (0, vec![0; ANEW_BYTES as usize]);
        // A hole has no old checksums: the file has not grown since it was cut.
        while let Some(start) = self.fs.next_data(&file, at)? {
            let end = self.fs.next_hole(&file, start)?.min(start + ANEW_BYTES);
            let part = buf.get_mut(..(end - start) as usize).unwrap_or_default();
            match read_full(&self.fs, &file, start, part)? {
                0 => break,
                len => write_all(&self.fs, &file, start, part.get(..len).unwrap_or_default())?,
            }
            at = end;
        }
        self.fs.sync_data(&file)?;
        checked.state.lock().is_unsure = false;
        Ok(())
    }

    /// Takes up the checksums of blocks that have changed; of all other blocks of the range nothing is known. Under
    /// `writing`.
    pub(crate) fn changed(
        &self,
        checks: &Checks<F::File>,
        checked: &Checked,
        blocks: &Range<u64>,
        sums: impl Iterator<Item = (u64, u32)>,
    ) {
        checks.with(checked, |state| {
            let count = state.changed.len() + state.settling.len();
            if blocks.end - blocks.start > count as u64 {
                state.changed.retain(|block, _| !blocks.contains(block));
                state.settling.retain(|block, _| !blocks.contains(block));
            } else {
                for block in blocks.clone() {
                    state.changed.remove(&block);
                    state.settling.remove(&block);
                }
            }
            state.changed.extend(sums);
        });
    }

    /// Makes an object's bytes durable, then their checksums; whether a name came into being.
    pub(crate) fn settle(&self, checks: &Checks<F::File>, key: u64, object: &F::File) -> io::Result<bool> {
        let checked = self.checked(checks, key)?;
        let _settling = checked.settling.lock();
        checks.with(&checked, |state| {
            state.settling = std::mem::take(&mut state.changed);
            state.unsettlings = 0;
        });
        if let Err(error) = self.sync_object(key, object) {
            self.distrust_found(checks, &checked, key);
            return Err(error);
        }
        let settled = self.settle_sums(checks, &checked, key);
        checks.with(&checked, |state| state.settling.clear());
        match settled {
            Ok(is_new) => Ok(is_new),
            // The bytes are durable, which is what was asked for.
            Err(error) => {
                let failures = checks.failures.fetch_add(1, Ordering::Relaxed) + 1;
                // A device that fails every sync must not fill the log; the status has the count.
                if failures.is_power_of_two() {
                    let told = "the checksums of an object cannot be stored; its last changes are unchecked";
                    tracing::warn!(key, %error, failures, "{told}");
                }
                Ok(false)
            }
        }
    }

    /// A sync of an object has failed, or may have in an earlier run.
    pub fn distrust(&self, key: u64) -> io::Result<()> {
        let Some(checks) = &self.checks else { return Ok(()) };
        if self.existing(key)?.is_some() {
            let checked = self.checked(checks, key)?;
            self.distrust_found(checks, &checked, key);
        }
        Ok(())
    }

    /// Whether a sync of an object has failed in an earlier run is not known yet: until it is, nothing is learnt from what is
    /// found in it, which may be in memory only, and a checksum of that must not be settled. Not noted.
    pub(crate) fn suspect(&self, key: u64, is_suspect: bool) -> io::Result<()> {
        let Some(checks) = &self.checks else { return Ok(()) };
        if self.existing(key)?.is_some() {
            let checked = self.checked(checks, key)?;
            let _writing = checked.writing.lock();
            checks.with(&checked, |state| {
                if !state.is_distrusted || !state.is_noted {
                    (state.is_distrusted, state.is_noted) = (is_suspect, false);
                }
            });
        }
        Ok(())
    }

    /// Whether a restart would not know that nothing is to be learnt from what is found in an object.
    pub(crate) fn must_note_distrust(&self, key: u64) -> bool {
        let checked = self.checks.as_ref().and_then(|checks| checks.objects.lock().get(&key).cloned());
        checked.is_some_and(|checked| {
            let state = checked.state.lock();
            state.is_distrusted && !state.is_noted
        })
    }

    fn distrust_found(&self, checks: &Checks<F::File>, checked: &Checked, key: u64) {
        let _writing = checked.writing.lock();
        checks.with(checked, |state| {
            state.changed.clear();
            state.settling.clear();
            (state.is_distrusted, state.is_noted) = (true, false);
        });
        if checked.state.lock().is_gone {
            return;
        }
        let noted = self.sums_file_or_new(checks, checked, key);
        let noted = noted.and_then(|(file, _)| self.write_header(checks, checked, &file));
        checked.state.lock().is_noted = noted.is_ok();
    }

    fn settle_sums(&self, checks: &Checks<F::File>, checked: &Checked, key: u64) -> io::Result<bool> {
        let (file, is_new) = {
            let _writing = checked.writing.lock();
            let mut sums: Vec<(u64, u32)> = {
                let state = checked.state.lock();
                let is_last = |block: &u64| !state.changed.contains_key(block) && !state.is_gone;
                state.settling.iter().filter(|(block, _)| is_last(block)).map(|(block, sum)| (*block, *sum)).collect()
            };
            if sums.is_empty() {
                return Ok(false);
            }
            sums.sort_unstable();
            let (file, is_new) = self.sums_file_or_new(checks, checked, key)?;
            self.make_sure(checks, checked, key)?;
            for run in sums.chunk_by(|(a, _), (b, _)| a + 1 == *b) {
                let Some((first, _)) = run.first() else { continue };
                let bytes: Vec<u8> = run.iter().flat_map(|(_, sum)| sum.to_le_bytes()).collect();
                write_all(&self.fs, &file, HEADER_BYTES + first * SUM_BYTES, &bytes)?;
            }
            // From now on the file says it.
            checks.with(checked, |state| state.settling.clear());
            if std::mem::replace(&mut checked.state.lock().is_clearing, false) {
                self.write_header(checks, checked, &file).inspect_err(|_| checked.state.lock().is_clearing = true)?;
            }
            (file, is_new)
        };
        self.fs.sync_data(&file)?;
        Ok(is_new)
    }

    /// Settles objects that changed this long ago and were not synced since. For a server's background; a sync that fails is
    /// reported by `failed`.
    pub fn settle_older(&self, age: Duration, mut failed: impl FnMut(u64, io::Error)) {
        let Some(checks) = &self.checks else { return };
        let is_old = |checked: &Checked| checked.state.lock().since.is_some_and(|since| since.elapsed() >= age);
        let old = |(key, checked): (&u64, &Arc<Checked>)| is_old(checked).then_some(*key);
        let keys: Vec<u64> = checks.objects.lock().iter().filter_map(old).collect();
        for key in keys {
            let _ = self.noting(key, || self.settle_one(checks, key), |error| failed(key, error)); // it is reported
        }
    }

    fn settle_one(&self, checks: &Checks<F::File>, key: u64) -> io::Result<()> {
        match self.existing(key)? {
            Some(object) => self.settle(checks, key, &object).map(drop),
            // Removed meanwhile, by a caller that did not wait for its writers.
            None => {
                let checked = self.checked(checks, key)?;
                let _writing = checked.writing.lock();
                checks.with(&checked, |state| {
                    state.changed.clear();
                    state.settling.clear();
                });
                Ok(())
            }
        }
    }

    /// Settles the object with most checksums in memory, if there are too many. To be called after writes; a sync that fails
    /// is reported by `failed`.
    pub fn relieve(&self, failed: impl FnOnce(u64, io::Error)) {
        let Some(checks) = self.checks.as_ref().filter(|checks| checks.is_full()) else { return };
        let size = |checked: &Checked| checked.state.lock().changed.len();
        let most = checks.objects.lock().iter().max_by_key(|(_, checked)| size(checked)).map(|(key, _)| *key);
        if let Some(key) = most {
            let _ = self.noting(key, || self.settle_one(checks, key), |error| failed(key, error)); // it is reported
        }
    }

    /// Before an object is made: empties, durably, the file of checksums of one of that key that a crash has lost. To remove
    /// its name would not do: a server that is killed then finds none, and a crash brings it back.
    pub(crate) fn forget_lost_sums(&self, checks: &Checks<F::File>, key: u64) -> io::Result<()> {
        let Some(file) = self.sums_file(checks, key)? else { return Ok(()) };
        let checked = checks.objects.lock().remove(&key);
        let _writing = checked.as_ref().map(|checked| checked.writing.lock());
        checked.iter().for_each(|checked| checks.with(checked, |state| state.is_gone = true));
        self.empty(&file)
    }

    /// Forgets the checksums of an object that is removed.
    pub(crate) fn forget_sums(&self, checks: &Checks<F::File>, key: u64) {
        let checked = checks.objects.lock().remove(&key);
        let _writing = checked.as_ref().map(|checked| checked.writing.lock());
        checked.iter().for_each(|checked| checks.with(checked, |state| state.is_gone = true));
        match checks.files.remove(key, || self.fs.unlink(&self.sums_path(key))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                self.complaints.counted("sums", |removals| {
                    tracing::warn!(key, removals, %error, "the checksums of a removed object cannot be removed");
                });
            }
            _ => self.names_changed(key),
        }
    }
}

fn header_of(era: u64, state: &State) -> [u8; HEADER_BYTES as usize] {
    let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
    let flags = flag(state.is_distrusted, DISTRUSTED) | flag(state.is_clearing, CLEARING);
    let mut header = [0; HEADER_BYTES as usize];
    let words = [u64::from_le_bytes(*MAGIC), era, flags, 0];
    header.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    header
}

/// Reads until the buffer is full or the file ends; gives the bytes read.
pub(crate) fn read_full<F: FileSystem>(fs: &F, file: &F::File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match fs.read(file, offset + done as u64, &mut [io::IoSliceMut::new(rest)])? {
            0 => break,
            len => done += len,
        }
    }
    Ok(done)
}
