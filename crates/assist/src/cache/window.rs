//! The blocks that one reader holds, least recently used first.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

#[derive(Debug, Default)]
pub(super) struct Window {
    stamps: FxHashMap<u64, u64>,
    by_age: BTreeMap<u64, u64>,
    next_stamp: u64,
    position: Option<u64>,
    /// The blocks touched last, when another touch of the same ones would change nothing.
    settled: Option<(u64, u64)>,
}

impl Window {
    pub(super) fn len(&self) -> u64 {
        self.by_age.len() as u64
    }

    pub(super) fn position(&self) -> Option<u64> {
        self.position
    }

    /// The reader is now at the last of these blocks; where it was before.
    pub(super) fn move_to(&mut self, touched: (u64, u64)) -> Option<u64> {
        self.settled = None;
        self.position.replace(touched.1)
    }

    pub(super) fn settled_at(&self) -> Option<(u64, u64)> {
        self.settled
    }

    pub(super) fn settle(&mut self, touched: (u64, u64)) {
        self.settled = Some(touched);
    }

    pub(super) fn unsettle(&mut self) {
        self.settled = None;
    }

    /// Makes a block the most recently used; whether it was held already.
    pub(super) fn touch(&mut self, block: u64) -> bool {
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        self.by_age.insert(stamp, block);
        match self.stamps.insert(block, stamp) {
            Some(old) => self.by_age.remove(&old).is_some(),
            None => false,
        }
    }

    pub(super) fn forget(&mut self, block: u64) {
        if let Some(stamp) = self.stamps.remove(&block) {
            self.by_age.remove(&stamp);
        }
    }

    pub(super) fn evict_oldest(&mut self) -> Option<u64> {
        let (_, block) = self.by_age.pop_first()?;
        self.stamps.remove(&block);
        Some(block)
    }

    pub(super) fn evict_oldest_but(&mut self, kept: &[u64]) -> Option<u64> {
        let block = self.by_age.values().copied().find(|block| !kept.contains(block))?;
        self.forget(block);
        Some(block)
    }

    pub(super) fn evict_where(&mut self, which: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut gone: Vec<u64> = self.by_age.values().copied().filter(|b| which(*b)).collect();
        gone.sort_unstable();
        gone.iter().for_each(|b| self.forget(*b));
        gone
    }
}
