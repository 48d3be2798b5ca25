//! Which connections are open, and since how many removals: those on which something may still be under way for an object
//! whose removal the store is about to forget are ended.
//!
//! The store forgets a removal after a generation's worth of later ones. Every half of a generation, the connections that
//! are older than half a generation end here. So whatever is forgotten was removed before every open connection was made:
//! what was sent before the removal is gone with its connection. The clients connect again and repeat what was unanswered.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use impresario_base::lock::Mutex;

use impresario_sched::ConnId;

use crate::connection::Connection;

/// The open connections.
#[derive(Default)]
pub(super) struct Callers {
    /// Each with the removals before it was made.
    open: Mutex<Vec<(u64, Weak<Connection>)>>,
    /// Removals at which the oldest are ended next.
    next: AtomicU64,
}

impl Callers {
    /// A connection was made.
    pub(super) fn add(&self, connection: &Arc<Connection>, removals: u64) {
        let mut open = self.open.lock();
        if open.len() == open.capacity() {
            open.retain(|(_, connection)| connection.strong_count() > 0);
        }
        open.push((removals, Arc::downgrade(connection)));
    }

    /// Ends all connections but one.
    pub(super) fn end_all_but(&self, conn: ConnId) {
        let open = std::mem::take(&mut *self.open.lock());
        let open = open.into_iter().filter_map(|(_, connection)| connection.upgrade());
        open.filter(|connection| connection.id() != conn).for_each(|connection| connection.close());
    }

    /// Something was removed. Ends the connections that are too old for the store to forget more.
    pub(super) fn removed(&self, (removals, generation): (u64, u64)) {
        let half = (generation / 2).max(1);
        let next = self.next.load(Ordering::Acquire);
        if removals < next {
            return;
        }
        let then = (removals / half + 1) * half;
        if self.next.compare_exchange(next, then, Ordering::AcqRel, Ordering::Acquire).is_err() || next == 0 {
            return;
        }
        let mut open = self.open.lock();
        open.retain(|(since, connection)| {
            let Some(connection) = connection.upgrade() else { return false };
            let is_old = since + half <= removals;
            if is_old {
                tracing::info!(client = connection.name(), "ends a connection from before many removals");
                connection.close();
            }
            !is_old
        });
    }
}
