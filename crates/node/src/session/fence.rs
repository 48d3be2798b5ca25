//! Fencing: a write that a client gave up and repeated on another route must not arrive late and undo newer ones.
//!
//! A client raises its epoch whenever it gives up something that may still be in flight. A server remembers the highest
//! epoch of each client and refuses older ones.
//!
//! All clients begin in the *base* epoch, so only those that raised theirs are remembered. Memory is bounded: when the
//! oldest of them are forgotten, the base rises to the highest of their epochs, as far as an honest client can have
//! come. Their requests in flight are then refused, and a client below the base begins new epochs until one is
//! accepted.

use rustc_hash::FxHashMap;

use super::epoch::base_after;

/// The decision on a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passage {
    /// It may pass.
    Open,
    /// It may pass once its epoch is remembered: [`Fence::remember`].
    Raised,
    /// Its client has left its epoch, or may have.
    Closed,
}

/// The highest epochs seen.
///
/// Memory is bounded by two generations of `generation_clients` clients that have raised their epochs.
pub struct Fence {
    base: u32,
    young: FxHashMap<u64, u32>,
    old: FxHashMap<u64, u32>,
    generation_clients: usize,
}

impl Fence {
    /// A fence that remembers at least the last `generation_clients` clients that have raised their epochs.
    pub fn new(generation_clients: usize) -> Fence {
        let (young, old) = (FxHashMap::default(), FxHashMap::default());
        Fence { base: 0, young, old, generation_clients: generation_clients.max(1) }
    }

    /// Whether a request of this epoch may pass.
    pub fn passage(&self, client: u64, epoch: u32) -> Passage {
        let seen = self.young.get(&client).or_else(|| self.old.get(&client)).copied().unwrap_or(self.base);
        match epoch.cmp(&seen) {
            std::cmp::Ordering::Less => Passage::Closed,
            std::cmp::Ordering::Equal => Passage::Open,
            std::cmp::Ordering::Greater => Passage::Raised,
        }
    }

    /// Whether remembering this client begins a new generation, and so may raise the base: the epoch of every unknown client.
    pub fn rotates(&self, client: u64) -> bool {
        self.young.len() >= self.generation_clients && !self.young.contains_key(&client)
    }

    /// Remembers that a client has raised its epoch.
    pub fn remember(&mut self, client: u64, epoch: u32) {
        let older = self.old.remove(&client).unwrap_or(0);
        let seen = self.young.entry(client).or_insert(epoch);
        *seen = (*seen).max(epoch).max(older);
        if self.young.len() > self.generation_clients {
            let forgotten = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
            self.base = base_after(self.base, forgotten.into_values());
        }
    }

    /// True if a request of this epoch may pass; remembers the epoch.
    pub fn admit(&mut self, client: u64, epoch: u32) -> bool {
        match self.passage(client, epoch) {
            Passage::Open => true,
            Passage::Raised => {
                self.remember(client, epoch);
                true
            }
            Passage::Closed => false,
        }
    }

    /// The epoch of unknown clients.
    pub fn base(&self) -> u32 {
        self.base
    }

    /// Raises the base to that of an earlier run of the server.
    pub fn raise_base(&mut self, base: u32) {
        self.base = self.base.max(base);
    }

    /// The remembered clients and their epochs.
    pub fn remembered(&self) -> impl Iterator<Item = (u64, u32)> {
        self.old.iter().chain(&self.young).map(|(client, epoch)| (*client, *epoch))
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
    fn what_is_not_remembered_may_be_asked_again() {
        let mut f = Fence::new(10);
        assert_eq!((f.passage(1, 2), f.passage(1, 2)), (Passage::Raised, Passage::Raised));
        f.remember(1, 2);
        assert_eq!((f.passage(1, 2), f.passage(1, 1)), (Passage::Open, Passage::Closed));
    }

    #[test]
    fn memory_is_bounded_and_the_forgotten_is_refused() {
        let mut f = Fence::new(100);
        f.admit(7, 9);
        (10_000..100_000).for_each(|client| assert!(f.admit(client, 0), "takes no memory"));
        assert_eq!(f.remembered().count(), 1);
        for client in 1000..1150 {
            let rotates = f.rotates(client);
            f.admit(client, 1);
            assert_eq!(rotates, f.young.is_empty(), "client {client}");
            assert!(rotates || !f.rotates(client), "it is young");
        }
        assert!(!f.admit(7, 8), "still known from the old generation");
        for client in 2000..3000 {
            f.admit(client, 1 + f.base());
        }
        assert!(f.young.len() <= 101 && f.old.len() <= 101);
        assert!(f.base() >= 9 && !f.admit(7, 8), "forgotten, and refused");
        assert!(!f.admit(5_000_000, 0) && f.admit(5_000_000, f.base()), "a new client begins in the base epoch");
    }

    #[test]
    fn clients_that_claim_huge_epochs_do_not_lock_others_out() {
        use crate::session::{Call, Epoch, Rights, Step, Verdict};
        use impresario_sched::Nanos;
        let mut f = Fence::new(100);
        for hostile in 0..250 {
            assert!(f.admit(1_000_000 + hostile, u32::MAX - hostile as u32));
        }
        let honest = Epoch::new(0);
        let mut call = Call::new(Rights { ours: true, repeat: true, ..Rights::default() }, Nanos(u64::MAX));
        let mut sent = 0;
        while !f.admit(7, call.stamp(&honest)) {
            sent += 1;
            let step = call.answered(Nanos(0), Verdict::Fenced, &honest);
            assert!(matches!(step, Step::Again { at: Nanos(0), .. }), "after {sent} refusals: {step:?}");
            assert!(sent < 64, "base {}", f.base());
        }
    }

    #[test]
    fn a_restart_takes_up_what_was_remembered() {
        let mut before = Fence::new(2);
        (0..10).for_each(|client| assert!(before.admit(client, 1 + client as u32)));
        let mut after = Fence::new(2);
        after.raise_base(before.base());
        before.remembered().for_each(|(client, epoch)| after.remember(client, epoch));
        for client in 0..10 {
            assert!(!after.admit(client, client as u32), "client {client}");
        }
    }
}
