//! Fencing: a write that a client gave up and sent again by another way must not arrive late and undo newer ones.
//!
//! A client raises its epoch whenever it gives up a path to a server. A server remembers the highest epoch it
//! has seen of each client and refuses older ones.

use rustc_hash::FxHashMap;

/// The highest epochs seen, of the clients heard of lately.
///
/// Memory is bounded by two generations of `generation_clients`: a client not heard of for a whole generation is
/// forgotten, and with it the protection against writes of it that are even older.
pub struct Fence {
    young: FxHashMap<u64, u32>,
    old: FxHashMap<u64, u32>,
    generation_clients: usize,
}

impl Fence {
    /// A fence that remembers at least the last `generation_clients` clients.
    pub fn new(generation_clients: usize) -> Fence {
        Fence { young: FxHashMap::default(), old: FxHashMap::default(), generation_clients: generation_clients.max(1) }
    }

    /// True when a request of this epoch may pass; notes the epoch.
    pub fn admit(&mut self, client: u64, epoch: u32) -> bool {
        if let Some(seen) = self.young.get_mut(&client) {
            *seen = epoch.max(*seen);
            return epoch == *seen;
        }
        let seen = self.old.get(&client).copied().unwrap_or(0);
        if self.young.len() >= self.generation_clients {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(client, epoch.max(seen));
        epoch >= seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_epochs_are_refused() {
        let mut f = Fence::new(10);
        assert!(f.admit(1, 0) && f.admit(1, 0) && f.admit(1, 3) && f.admit(1, 3));
        assert!(!f.admit(1, 2));
        assert!(f.admit(2, 0), "another client");
    }

    #[test]
    fn memory_is_bounded_and_recent_clients_are_kept() {
        let mut f = Fence::new(100);
        f.admit(7, 9);
        for client in 1000..1150 {
            f.admit(client, 1);
        }
        assert!(!f.admit(7, 8), "still known from the old generation");
        for client in 2000..3000 {
            f.admit(client, 1);
        }
        assert!(f.young.len() <= 100 && f.old.len() <= 100);
    }
}
