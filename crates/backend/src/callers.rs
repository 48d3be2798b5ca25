//! Numbers that stand for callers in the keys of descriptors.

use std::sync::atomic::{AtomicU64, Ordering};

use impresario_base::lock::RwLock;
use rustc_hash::FxHashMap;

use crate::Caller;

/// Callers with different users and groups that are told apart by number at once.
const CALLERS_MAX: usize = 16_384;

/// The callers that are known.
#[derive(Default)]
pub(crate) struct Callers {
    numbers: RwLock<FxHashMap<Caller, u64>>,
    next: AtomicU64,
}

impl Callers {
    /// The number of a caller: another caller never has it.
    pub(crate) fn number(&self, caller: &Caller) -> u64 {
        if let Some(&number) = self.numbers.read().get(caller) {
            return number;
        }
        let mut numbers = self.numbers.write();
        if numbers.len() >= CALLERS_MAX {
            // Numbers are never used again: descriptors of the callers that are forgotten here close when idle.
            numbers.clear();
        }
        *numbers.entry(caller.clone()).or_insert_with(|| self.next.fetch_add(1, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_callers_have_a_number() {
        let callers = Callers::default();
        let caller = |uid| Caller { uid, gid: 0, groups: vec![] };
        let first = callers.number(&caller(0));
        assert_eq!(callers.number(&caller(0)), first);
        let all: std::collections::HashSet<u64> =
            (0..2 * CALLERS_MAX as u32).map(|uid| callers.number(&caller(uid))).collect();
        assert_eq!(all.len(), 2 * CALLERS_MAX);
        assert!(callers.numbers.read().len() <= CALLERS_MAX, "memory is bounded");
    }
}
