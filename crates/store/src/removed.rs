//! Deleted stays deleted: which objects were removed, in the files `removed` and `removed.old`, 8 bytes each.
//!
//! Keys are never used twice, so what comes for a removed object comes late: a write or truncation that was delayed, or a
//! copy of one. It must not make the object again. And a removal that was acknowledged must outlast a power failure, which
//! may bring the object's name back. So a removal is noted, durably, before it is acknowledged; an object that is noted is
//! never made again, and is removed again when the store is opened. Nor is it read as a hole: a client may have been cut off
//! while the file was removed, or moved to other objects.
//!
//! **Bound.** Keys are remembered in two generations. When the younger one is full ([`StoreOptions::removed_keys`]), all
//! removals so far and their notes are made durable, the older generation is forgotten, and the younger one takes its place.
//! So a key is forgotten after at least that many later removals. By then nothing sent before its removal may still come:
//! the server ends every connection that is older than half as many removals ([`ObjectStore::removals`]).
//!
//! **Order.** A key is noted before the object is removed. The note becomes durable after that, and several removals share
//! one sync. A device that is full takes no note: then the removal itself is made durable, and is noted with a later one. So
//! is a removal during which a generation begins: what the older generation notes is not removed again when the store is
//! opened.
//!
//! [`StoreOptions::removed_keys`]: crate::StoreOptions::removed_keys

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use impresario_base::Durable;
use impresario_base::lock::{Mutex, RwLock};
use rustc_hash::FxHashSet;

use crate::filesystem::FileSystem;
use crate::grown::{self, Grown};
use crate::objects::ObjectStore;
use crate::replace::{read_all, write_all};

pub(crate) const REMOVED: &str = "removed";
pub(crate) const REMOVED_OLD: &str = "removed.old";
const KEY_BYTES: usize = 8;
/// Space for this many more keys is allocated ahead of them.
const SPARE: usize = 1024;

/// The keys of removed objects.
pub(crate) struct Removed<H> {
    keys: RwLock<Keys>,
    file: Mutex<File<H>>,
    durable: Durable,
    /// Removals that were remembered since the older generation began.
    count: AtomicU64,
    generation_keys: usize,
}

#[derive(Default)]
struct Keys {
    young: FxHashSet<u64>,
    old: FxHashSet<u64>,
    /// Counts the generations of this run.
    generation: u64,
}

/// The file of the younger generation.
struct File<H> {
    open: Option<Grown<H>>,
    /// Keys that it has room for.
    room: usize,
    /// Keys that found no room; the next removal notes them, too.
    unnoted: Vec<u64>,
}

/// A key as it is written. Zeros are room, so no key may look like them.
fn encode(key: u64) -> [u8; KEY_BYTES] {
    (!key).to_le_bytes()
}

fn decode(bytes: &[u8]) -> Vec<u64> {
    let words = bytes.chunks_exact(KEY_BYTES).filter_map(|word| word.first_chunk());
    words.map(|word| u64::from_le_bytes(*word)).take_while(|word| *word != 0).map(|word| !word).collect()
}

impl<H> Removed<H> {
    /// What earlier runs noted.
    pub(crate) fn open<F: FileSystem<File = H>>(fs: &F, generation_keys: usize) -> io::Result<Removed<H>> {
        let read = |name| read_all(fs, name).map(|bytes| bytes.map(|bytes| (bytes.len() / KEY_BYTES, decode(&bytes))));
        let (old, young) = (read(REMOVED_OLD)?, read(REMOVED)?);
        let open = young.is_some().then(|| fs.open(REMOVED, false)).transpose()?;
        let (room, young) = young.unwrap_or_default();
        let found = || young.iter().flat_map(|key| encode(*key)).collect();
        let open = open.map(|file| Grown::new(file, young.len() * KEY_BYTES, found()));
        let old = old.map(|(_, keys)| keys.into_iter().collect()).unwrap_or_default();
        let file = File { open, room, unnoted: Vec::new() };
        let keys = Keys { young: young.into_iter().collect(), old, generation: 0 };
        Ok(Removed {
            count: AtomicU64::new(keys.young.len() as u64),
            keys: RwLock::new(keys),
            file: Mutex::new(file),
            durable: Durable::default(),
            generation_keys: generation_keys.max(1),
        })
    }

    /// True when the object was removed: it must not be made again.
    pub(crate) fn contains(&self, key: u64) -> bool {
        let keys = self.keys.read();
        keys.young.contains(&key) || keys.old.contains(&key)
    }

    /// The objects whose removal may not be durable.
    pub(crate) fn recent(&self) -> Vec<u64> {
        self.keys.read().young.iter().copied().collect()
    }

    /// Whether this is the younger generation.
    pub(crate) fn is_young(&self, generation: u64) -> bool {
        self.keys.read().generation == generation
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }
}

impl<F: FileSystem> ObjectStore<F> {
    /// Removals since the older of the generations that are remembered began, and how many a generation has. A key is
    /// forgotten after at least a generation's worth of later removals; what was sent before its removal must not come
    /// after that.
    pub fn removals(&self) -> (u64, u64) {
        (self.removed.count(), self.removed.generation_keys as u64)
    }

    /// Remembers that an object is removed, before it is. Gives the generation if that is noted in its file, though not durable
    /// yet: when [`ObjectStore::sync_removed`] has returned and the generation [is still the younger one](Removed::is_young),
    /// the removal is durable. `None`: the object's directory has to be synced.
    pub(crate) fn remember_removed(&self, key: u64) -> io::Result<Option<u64>> {
        let removed = &self.removed;
        let mut file = removed.file.lock();
        let is_new = !removed.contains(key);
        if is_new {
            if removed.keys.read().young.len() >= removed.generation_keys {
                self.begin_generation(&mut file)?;
            }
            removed.keys.write().young.insert(key);
            removed.count.fetch_add(1, Ordering::AcqRel);
            file.unnoted.push(key);
        }
        if !file.unnoted.is_empty() {
            if let Err(error) = self.append(&mut file) {
                self.complaints.counted("removals", |removals| {
                    let how = "a removal could not be noted in the store's folder; it is made durable itself";
                    tracing::warn!(removals, %error, "{how}");
                });
                return Ok(None);
            }
            removed.durable.changed();
        }
        let keys = removed.keys.read();
        Ok(keys.young.contains(&key).then_some(keys.generation))
    }

    /// The keys of all removed objects that are remembered, those first that will be forgotten first.
    pub fn removed_keys(&self) -> Vec<u64> {
        let keys = self.removed.keys.read();
        keys.old.iter().chain(&keys.young).copied().collect()
    }

    /// Remembers objects as removed that were removed elsewhere, durably.
    pub fn remember_all_removed(&self, keys: &[u64]) -> io::Result<()> {
        for key in keys {
            self.remember_removed(*key)?;
        }
        let is_noted = self.removed.file.lock().unnoted.is_empty();
        if !is_noted {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.sync_removed()
    }

    /// Makes the notes so far durable.
    pub(crate) fn sync_removed(&self) -> io::Result<()> {
        self.removed.durable.sync(|| grown::sync(&self.fs, &self.removed.file, |file| file.open.as_mut()))
    }

    fn append(&self, file: &mut File<F::File>) -> io::Result<()> {
        let File { open, room, unnoted } = file;
        let open = match open {
            Some(open) => open,
            None => {
                let made = self.fs.open(REMOVED, true)?;
                self.fs.sync_dir("")?;
                open.insert(Grown::new(made, 0, Vec::new()))
            }
        };
        let wanted = open.len_bytes() / KEY_BYTES + unnoted.len();
        if wanted > *room {
            let spare = vec![0; (wanted + SPARE - *room) * KEY_BYTES];
            write_all(&self.fs, open.file(), (*room * KEY_BYTES) as u64, &spare)?;
            *room = wanted + SPARE;
        }
        let entries: Vec<u8> = unnoted.iter().flat_map(|key| encode(*key)).collect();
        open.append(&self.fs, &entries)?;
        unnoted.clear();
        Ok(())
    }

    /// Forgets the older generation; the younger one takes its place, after its removals were made durable.
    fn begin_generation(&self, file: &mut File<F::File>) -> io::Result<()> {
        self.sync_names()?;
        if let Some(open) = &mut file.open {
            // Those who noted a removal and wait for its sync find another file.
            open.sync_alone(&self.fs)?;
            match self.fs.rename(REMOVED, REMOVED_OLD) {
                // An attempt before this one came so far.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // The first note of the new generation makes it durable; until then a crash finds both in one file.
                renamed => renamed?,
            }
        }
        *file = File { open: None, room: 0, unnoted: Vec::new() };
        let mut keys = self.removed.keys.write();
        keys.old = std::mem::take(&mut keys.young);
        keys.generation += 1;
        Ok(())
    }
}

/// The error of what comes for a removed object.
pub(crate) fn is_removed() -> io::Error {
    // Nothing else uses this number, so a log says at once what it was.
    rustix::io::Errno::IDRM.into()
}
