//! The requests that the program holds: delivered and not yet released.
//!
//! AGIOS identifies a request by file, type, length and offset in every call. Only the library's thread knows queued
//! requests; an entry here begins at delivery and ends at release. Entries are spread over shards with a lock each, so
//! threads rarely contend.

use std::sync::atomic::{AtomicU32, Ordering};

use hashbrown::HashTable;
use impresario_base::lock::{Apart, Mutex, MutexGuard};

use crate::files::FileName;

/// Of a file's name in a message at most, before control characters are escaped: each is up to six bytes then.
const NAME_SHOWN_BYTES: usize = 200;

/// The identity of a request.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    /// The file, as named by the program.
    pub file: &'a [u8],
    /// Write or read.
    pub write: bool,
    /// Offset, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl Named<'_> {
    /// The identity as used by the library.
    pub fn identity(&self) -> Identity {
        let Named { write, offset, len, .. } = *self;
        // The core does not accept empty requests.
        Identity { file: FileName::of(self.file), offset, len: len.max(1), write }
    }

    /// For messages, in one line, however long the file's name is.
    pub fn shown(&self) -> String {
        let op = if self.write { "write" } else { "read" };
        let name = self.file.get(..NAME_SHOWN_BYTES).unwrap_or(self.file);
        let rest = if name.len() < self.file.len() { "…" } else { "" };
        let name = String::from_utf8_lossy(name);
        format!("{op} of {} bytes at {} of \"{}{rest}\"", self.len, self.offset, name.escape_debug())
    }
}

/// The identity of a delivered request, with the digest of its file name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The file.
    pub file: FileName,
    /// Offset, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
    /// Write or read.
    pub write: bool,
}

impl Identity {
    fn hash(&self) -> u64 {
        const K: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        let word = self.file.digest ^ self.offset.rotate_left(20) ^ self.len.rotate_left(44) ^ u64::from(self.write);
        let product = u128::from(word).wrapping_mul(K);
        (product >> 64) as u64 ^ product as u64
    }
}

const SHARDS: usize = 16;

/// Deliveries per epoch. A request not released for two whole epochs is forgotten.
const EPOCH: u32 = 1 << 19;

#[derive(Clone, Copy)]
struct Entry {
    identity: Identity,
    batch: u32,
    epoch: u32,
    /// The next younger entry of the same identity; of the youngest, the oldest. Of a free entry, the next free one.
    younger: u32,
    used: bool,
}

#[derive(Default)]
struct Shard {
    /// Entry 0 is never used.
    entries: Vec<Entry>,
    /// The first free entry; 0: none.
    free: u32,
    /// The youngest entry of each identity.
    by_identity: HashTable<u32>,
}

/// All requests that were delivered and not released.
#[derive(Default)]
pub struct Delivered {
    shards: [Apart<Mutex<Shard>>; SHARDS],
    count: AtomicU32,
    epoch: AtomicU32,
}

impl Shard {
    fn place(&mut self, entry: Entry) -> u32 {
        if self.entries.is_empty() {
            self.entries.push(Entry { used: false, ..entry });
        }
        if self.free != 0 {
            let at = self.free;
            self.free = self.entries[at as usize].younger;
            self.entries[at as usize] = entry;
            return at;
        }
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }

    fn insert(&mut self, entry: Entry, hash: u64) {
        let at = self.place(entry);
        let Shard { entries, by_identity, .. } = self;
        match by_identity.find_mut(hash, |e| entries[*e as usize].identity == entry.identity) {
            Some(youngest) => {
                let before = std::mem::replace(youngest, at);
                let oldest = std::mem::replace(&mut entries[before as usize].younger, at);
                entries[at as usize].younger = oldest;
            }
            None => {
                entries[at as usize].younger = at;
                by_identity.insert_unique(hash, at, |e| entries[*e as usize].identity.hash());
            }
        }
    }

    /// Removes the oldest entry of an identity.
    fn remove(&mut self, identity: &Identity, hash: u64) -> Option<Entry> {
        let Shard { entries, by_identity, free, .. } = self;
        let found = by_identity.find_entry(hash, |e| entries[*e as usize].identity == *identity).ok()?;
        let youngest = *found.get();
        let oldest = entries[youngest as usize].younger;
        if oldest == youngest {
            found.remove();
        } else {
            entries[youngest as usize].younger = entries[oldest as usize].younger;
        }
        let entry = &mut entries[oldest as usize];
        let taken = *entry;
        (entry.used, entry.younger) = (false, std::mem::replace(free, oldest));
        Some(taken)
    }
}

impl Delivered {
    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // Bits that affect the index least.
        self.shards[(hash >> 40) as usize & (SHARDS - 1)].0.lock_spinning()
    }

    /// A request is being delivered, in a batch of this number.
    pub fn add(&self, identity: Identity, batch: u32) {
        let epoch = self.epoch.load(Ordering::Relaxed);
        let hash = identity.hash();
        self.shard(hash).insert(Entry { identity, batch, epoch, younger: 0, used: true }, hash);
    }

    /// Releases the request with this identity that was delivered first; returns the number of its batch.
    pub fn release(&self, identity: &Identity) -> Option<u32> {
        let hash = identity.hash();
        self.shard(hash).remove(identity, hash).map(|entry| entry.batch)
    }

    /// Counts requests completed for the scheduler; forgets those not released for long.
    pub fn served(&self, count: u32) {
        let before = self.count.fetch_add(count, Ordering::Relaxed);
        if before / EPOCH != before.wrapping_add(count) / EPOCH {
            self.next_epoch();
        }
    }

    #[cold]
    fn next_epoch(&self) {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        for shard in &self.shards {
            let mut shard = shard.0.lock();
            // Entries of this epoch and the two before it are kept. Within an identity the oldest go first.
            let over = |entry: &&Entry| entry.used && epoch.wrapping_sub(entry.epoch) > 2;
            let old: Vec<Identity> = shard.entries.iter().filter(over).map(|entry| entry.identity).collect();
            for identity in old {
                shard.remove(&identity, identity.hash());
            }
        }
    }

    /// Frees everything.
    pub fn clear(&self) {
        for shard in &self.shards {
            *shard.0.lock() = Shard::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_short_line_whatever_the_file_is_called() {
        let shown = |file: &[u8]| Named { file, write: false, offset: 0, len: 1 }.shown();
        assert_eq!(shown("Größe \"a\"".as_bytes()), r#"read of 1 bytes at 0 of "Größe \"a\"""#);
        assert_eq!(shown(b"two\nlines"), r#"read of 1 bytes at 0 of "two\nlines""#);
        assert!(shown(&[b'n'; 1 << 20]).len() < 300);
    }

    fn read(name: &str, offset: u64) -> Identity {
        Identity { file: FileName::of(name.as_bytes()), offset, len: 10, write: false }
    }

    #[test]
    fn equal_requests_are_released_in_order_of_their_delivery() {
        let delivered = Delivered::default();
        let f = read("f", 50);
        assert_eq!(delivered.release(&f), None);
        (7..10).for_each(|batch| delivered.add(f, batch));
        delivered.add(Identity { write: true, ..f }, 1);
        delivered.add(Identity { len: 9, ..f }, 2);
        delivered.add(read("g", 50), 3);
        assert_eq!([0; 4].map(|_| delivered.release(&f)), [Some(7), Some(8), Some(9), None]);
        assert_eq!(delivered.release(&Identity { write: true, ..f }), Some(1));
        assert_eq!(delivered.release(&Identity { len: 9, ..f }), Some(2));
        assert_eq!(delivered.release(&read("g", 50)), Some(3));
    }

    /// A program that never releases cannot make the library grow; one that releases in time loses no request.
    #[test]
    fn what_is_never_released_is_forgotten_at_last() {
        let delivered = Delivered::default();
        let serve = |from: u64, count: u64| {
            for offset in from..from + count {
                delivered.add(read("f", offset / 2), 0);
                delivered.served(1);
            }
        };
        serve(0, 2 * u64::from(EPOCH));
        assert_eq!(delivered.release(&read("f", 0)), Some(0), "1,048,576 deliveries later at the most");
        serve(1 << 40, 2 * u64::from(EPOCH));
        assert_eq!(delivered.release(&read("f", 1)), None);
        let entries: usize = delivered.shards.iter().map(|s| s.0.lock().entries.len()).sum();
        assert!(entries <= 4 * EPOCH as usize, "{entries}");
    }
}
