//! Files by name: digests that adding threads compute without a lock, and the core's file numbers.

use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

use impresario_base::slab::Rows;
use impresario_sched::FileId;
use impresario_trace::key_of_name;
use rustc_hash::FxHashMap;

use crate::metrics::Pattern;

/// The digest of a name: a collision needs improbable luck, or knowledge of this process's secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileName {
    /// The same in every run, so that a run's trace predicts the next one. Names can be constructed that share one.
    pub key: u64,
    /// Valid in this process only.
    pub digest: u64,
}

/// Names whose keys a thread caches.
const REMEMBERED: usize = 256;

thread_local! {
    /// Digests of names, and their keys: computing a key takes as many steps as the name has bytes.
    static KEYS: RefCell<[(u64, u64, u64); REMEMBERED]> = const { RefCell::new([(0, 0, 0); REMEMBERED]) };
}

fn secrets() -> &'static [u64; 2] {
    static SECRETS: OnceLock<[u64; 2]> = OnceLock::new();
    SECRETS.get_or_init(|| [1u8, 2].map(|n| RandomState::new().hash_one(n)))
}

/// Eight bytes per step, starting from a secret.
fn digest(name: &[u8], secret: u64) -> u64 {
    const K: u64 = 0x9e37_79b9_7f4a_7c15;
    let fold = |state: u64, word: u64| {
        let product = u128::from(state ^ word) * u128::from(K ^ secret.rotate_left(32));
        (product >> 64) as u64 ^ product as u64
    };
    let mut words = name.chunks_exact(8);
    let mut state = fold(secret, name.len() as u64);
    for word in &mut words {
        state = fold(state, u64::from_le_bytes(word.try_into().unwrap_or_default())).wrapping_add(secret);
    }
    // The last eight bytes, some of them again, or all of a shorter name.
    let last = match name.last_chunk::<8>() {
        Some(last) => u64::from_le_bytes(*last),
        None => name.iter().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    };
    fold(fold(state, last), secret)
}

impl FileName {
    /// Digests a name.
    pub fn of(name: &[u8]) -> FileName {
        let [first, second] = *secrets();
        let (here, check) = (digest(name, first), digest(name, second));
        let key = KEYS.try_with(|keys| {
            let mut keys = keys.try_borrow_mut().ok()?;
            let known = &mut keys[here as usize % REMEMBERED];
            if (known.0, known.1) != (here, check) {
                *known = (here, check, key_of_name(name));
            }
            Some(known.2)
        });
        // A thread that is ending has no cache any more.
        FileName { key: key.ok().flatten().unwrap_or_else(|| key_of_name(name)), digest: here }
    }
}

/// A file with current or earlier requests.
#[derive(Clone, Copy)]
pub struct File {
    /// Its name.
    pub name: FileName,
    /// Requests in the core.
    requests: u32,
    /// Metrics of reads and writes.
    pub patterns: [Pattern; 2],
}

/// Maximum files without requests that are remembered.
const IDLE_MAX: usize = 65_536;

/// The files that the core knows by number.
#[derive(Default)]
pub struct Files {
    by_name: FxHashMap<FileName, u32>,
    files: Rows<File>,
    last: u32,
    /// The number of files at which those without requests are dropped.
    full: usize,
}

impl Files {
    /// The number of a file, and whether it is new.
    pub fn number(&mut self, name: FileName) -> (FileId, bool) {
        if self.files.get_mut(self.last).is_some_and(|file| file.name == name) {
            return (FileId(self.last), false);
        }
        if let Some(&number) = self.by_name.get(&name) {
            self.last = number;
            return (FileId(number), false);
        }
        let number = self.files.insert(File { name, requests: 0, patterns: Default::default() });
        self.by_name.insert(name, number);
        self.last = number;
        (FileId(number), true)
    }

    /// A file by number.
    pub fn file(&mut self, id: FileId) -> Option<&mut File> {
        self.files.get_mut(id.0)
    }

    /// Counts another request of a file in the core.
    pub fn enter(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(id.0) {
            file.requests += 1;
        }
    }

    /// Counts one fewer.
    pub fn leave(&mut self, id: FileId) {
        if let Some(file) = self.files.get_mut(id.0) {
            file.requests = file.requests.saturating_sub(1);
        }
    }

    /// True if there are enough that some should be dropped.
    pub fn are_many(&self) -> bool {
        self.by_name.len() > self.full.max(IDLE_MAX)
    }

    /// Drops those without requests, after reporting their metrics.
    pub fn forget_idle(&mut self, mut tell: impl FnMut(&[Pattern; 2])) {
        let files = &mut self.files;
        let mut gone = Vec::new();
        self.by_name.retain(|_, number| {
            let idle = files.get_mut(*number).is_none_or(|file| file.requests == 0);
            if idle {
                gone.push(*number);
            }
            !idle
        });
        for number in gone {
            if let Some(file) = self.files.get_mut(number) {
                tell(&file.patterns);
                // No name leads to numbers of released rows: `last` has none of them.
                file.name = FileName { key: 0, digest: 0 };
            }
            self.files.release(number);
        }
        self.full = 2 * self.by_name.len();
    }

    /// All files.
    pub fn all(&mut self) -> impl Iterator<Item = &File> {
        let files = &self.files;
        self.by_name.values().map(|number| &files[*number])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_and_keep_their_keys() {
        let long = "a name that has more than eight bytes";
        for name in ["", "a", "b", "12345678", "123456780", long] {
            assert_eq!(FileName::of(name.as_bytes()), FileName::of(name.as_bytes()));
            assert_eq!(FileName::of(name.as_bytes()).key, key_of_name(name.as_bytes()));
        }
        let names: Vec<String> = (0..10_000).map(|n| format!("file {n}")).collect();
        let digests: std::collections::HashSet<u64> = names.iter().map(|n| FileName::of(n.as_bytes()).digest).collect();
        assert_eq!(digests.len(), names.len());
        // Trailing zero bytes count too.
        assert_ne!(FileName::of(b"a").digest, FileName::of(b"a\0").digest);
    }

    #[test]
    fn idle_files_are_forgotten_when_there_are_many() {
        let mut files = Files::default();
        let name = |n: u64| FileName { key: n, digest: n };
        let busy = files.number(name(1)).0;
        files.enter(busy);
        for n in 2..=IDLE_MAX as u64 + 2 {
            assert!(files.number(name(n)).1);
        }
        assert!(files.are_many());
        let mut told = 0;
        files.forget_idle(|_| told += 1);
        assert_eq!((told, files.all().count()), (IDLE_MAX + 1, 1));
        assert_eq!(files.number(name(1)), (busy, false));
        assert!(files.number(name(2)).1 && !files.are_many());
    }
}
