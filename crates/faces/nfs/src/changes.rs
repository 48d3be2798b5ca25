//! What a node was before an operation (weak cache consistency; RFC 1813, 2.6): told only where it is the truth.
//!
//! A client that finds its cached attributes equal to those "before" concludes that no other client has changed the node, and
//! keeps its cached data. So "before" is sent only while all changes of the node in progress are one client's. Changes
//! made to the file system outside this server are not seen.

use impresario_backend::Handle;
use impresario_base::lock::Mutex;
use rustc_hash::FxBuildHasher;
use std::hash::BuildHasher;

/// Nodes are told apart by this many hashes; two of one hash seem to be one, which only makes the answer more careful.
const PLACES: usize = 1024;

#[derive(Default, Clone, Copy)]
struct Under {
    changes: u32,
    client: u64,
    mixed: bool,
}

/// The changes under way.
pub struct Changes {
    places: Box<[Mutex<Under>]>,
}

/// A change under way; ended by [`Began::end`] or when dropped.
pub struct Began<'a> {
    place: &'a Mutex<Under>,
    ended: bool,
}

impl Default for Changes {
    fn default() -> Changes {
        Changes { places: (0..PLACES).map(|_| Mutex::default()).collect() }
    }
}

impl Changes {
    /// A client begins to change a node; `None` for a change that several clients take part in.
    pub fn begin(&self, node: &Handle, client: Option<u64>) -> Began<'_> {
        let place = &self.places[FxBuildHasher.hash_one(node) as usize % PLACES];
        let mut under = place.lock();
        if under.changes == 0 {
            *under = Under { changes: 0, client: client.unwrap_or_default(), mixed: client.is_none() };
        }
        under.mixed |= client != Some(under.client);
        under.changes += 1;
        Began { place, ended: false }
    }
}

impl Began<'_> {
    /// It is done. True when no other client can have changed the node since it began.
    pub fn end(mut self) -> bool {
        self.leave()
    }

    fn leave(&mut self) -> bool {
        self.ended = true;
        let mut under = self.place.lock();
        under.changes -= 1;
        !under.mixed
    }
}

impl Drop for Began<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn before_is_true_while_one_client_changes() {
        let (changes, node) = (Changes::default(), Handle::new(b"node").unwrap());
        let (first, again) = (changes.begin(&node, Some(1)), changes.begin(&node, Some(1)));
        assert!(first.end());
        let other = changes.begin(&node, Some(2));
        assert!(!again.end());
        // Also for a change that began while it was another client's.
        let third = changes.begin(&node, Some(2));
        assert!(!other.end() && !third.end());
        assert!(changes.begin(&node, Some(2)).end());
        assert!(!changes.begin(&node, None).end());
        drop(changes.begin(&node, Some(3)));
        assert!(changes.begin(&node, Some(2)).end());
    }
}
