//! Which data a crashed server may have lost: acknowledged writes since the last sync, by the boot of the machine.
//!
//! An acknowledged write lies in the memory of its data server's machine until a sync. When the machine restarts
//! meanwhile, the next sync of the file must fail instead of promising what is gone.

use impresario_base::lock::Mutex;
use impresario_wire::{FileKey, same_boot};
use rustc_hash::FxHashMap;

/// Entries of a generation; twice as many are kept at most. What is older is forgotten: a file that was written
/// and not synced before tens of thousands of others were written.
const GENERATION_MAX: usize = 1 << 15;

/// Writes without a sync since, per data server and file.
#[derive(Default)]
pub(crate) struct Unsynced {
    generations: Mutex<[FxHashMap<(u16, FileKey), u64>; 2]>,
}

impl Unsynced {
    /// A write was acknowledged by this incarnation of the server.
    pub(crate) fn note_write(&self, server: u16, file: FileKey, incarnation: u64) {
        let mut generations = self.generations.lock();
        let [young, old] = &mut *generations;
        if young.contains_key(&(server, file)) {
            return;
        }
        let first = old.remove(&(server, file)).unwrap_or(incarnation);
        if young.len() >= GENERATION_MAX {
            *old = std::mem::take(young);
        }
        young.insert((server, file), first);
    }

    /// A sync was acknowledged. False when writes from before may have been lost.
    pub(crate) fn note_sync(&self, server: u16, file: FileKey, incarnation: u64) -> bool {
        self.forget(server, file).is_none_or(|written| same_boot(written, incarnation))
    }

    /// The object is gone, or its state known.
    pub(crate) fn forget(&self, server: u16, file: FileKey) -> Option<u64> {
        let mut generations = self.generations.lock();
        let [young, old] = &mut *generations;
        let (a, b) = (young.remove(&(server, file)), old.remove(&(server, file)));
        a.or(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_restarted_machine_loses_writes() {
        let (boot_a, boot_b) = (1 << 32, 2 << 32);
        let unsynced = Unsynced::default();
        assert!(unsynced.note_sync(0, FileKey(1), boot_b), "nothing was written");
        unsynced.note_write(0, FileKey(1), boot_a | 1);
        assert!(unsynced.note_sync(0, FileKey(1), boot_a | 2), "the process restarted, the machine did not");
        unsynced.note_write(0, FileKey(1), boot_a);
        unsynced.note_write(0, FileKey(1), boot_b);
        unsynced.note_write(1, FileKey(1), boot_b);
        assert!(!unsynced.note_sync(0, FileKey(1), boot_b), "the first write may be lost");
        assert!(unsynced.note_sync(1, FileKey(1), boot_b), "another server");
        assert!(unsynced.note_sync(0, FileKey(1), boot_b), "reported once");
    }

    #[test]
    fn memory_is_bounded() {
        let unsynced = Unsynced::default();
        for key in 0..4 * GENERATION_MAX as u64 {
            unsynced.note_write(0, FileKey(key), 7);
        }
        let generations = unsynced.generations.lock();
        assert!(generations.iter().all(|g| g.len() <= GENERATION_MAX));
        assert!(generations[0].contains_key(&(0, FileKey(4 * GENERATION_MAX as u64 - 1))));
    }
}
