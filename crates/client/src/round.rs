//! Calls that a thread starts for several clients leave together, where no thread waits for their answers: the server that
//! gets them wakes up once, and so does the thread that receives its answers.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use crate::connection::Connection;

thread_local! {
    static ROUND: RefCell<Round> = const { RefCell::new(Round { is_open: false, held: Vec::new(), before_waiting: None }) };
}

struct Round {
    is_open: bool,
    /// Connections with calls that have not left, and when they must have.
    held: Vec<(Arc<Connection>, Instant)>,
    before_waiting: Option<fn()>,
}

/// From now on calls that this thread starts, and that no thread waits for, wait for [`end_round`], which the thread calls before it
/// waits for anything. `before_waiting` is called should sending them have to wait for a server.
pub fn begin_round(before_waiting: fn()) {
    ROUND.with_borrow_mut(|round| (round.is_open, round.before_waiting) = (true, Some(before_waiting)));
}

/// Sends what has waited.
pub fn end_round() {
    let held = ROUND.with_borrow_mut(|round| {
        round.is_open = false;
        std::mem::take(&mut round.held)
    });
    held.into_iter().for_each(|(connection, deadline)| connection.send_queued(deadline));
    ROUND.with_borrow_mut(|round| round.before_waiting = None);
}

/// Whether calls wait.
pub(crate) fn is_open() -> bool {
    ROUND.with_borrow(|round| round.is_open)
}

/// A call on this connection waits, and must have left by the deadline.
pub(crate) fn hold(connection: &Arc<Connection>, deadline: Instant) {
    ROUND.with_borrow_mut(|round| {
        if !round.held.iter().any(|(held, _)| Arc::ptr_eq(held, connection)) {
            round.held.push((connection.clone(), deadline));
        }
    });
}

/// To be called before this thread waits for a server to take what it is sent.
pub(crate) fn before_waiting() {
    let before_waiting = ROUND.with_borrow(|round| round.before_waiting);
    before_waiting.inspect(|before_waiting| before_waiting());
}
