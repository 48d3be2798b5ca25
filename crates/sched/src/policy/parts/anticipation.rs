//! Is it worth to keep a server for the next request of the stream that it just served?
//!
//! A synchronous program sends its next request only after the reply to the last one. A server that turns elsewhere in
//! between seeks away and back. *Holding* it for a moment saves that, if the request comes. Each stream (server, file,
//! operation) has an account in device time: a hold costs what it lasted, and one that ended with
//! the expected request earns what that saved, the fixed part of its cost. A stream whose account does not
//! cover a hold is not held for: holds that do not pay switch themselves off, and one more is
//! tried every [`RETRY_BATCHES`] batches of the stream.

use rustc_hash::FxHashMap;

use crate::types::{LaneId, Nanos, Op};

/// A server, the stable key of a file, and an operation.
pub(crate) type Stream = (LaneId, u64, Op);

/// Holds that a new stream may lose before it is held for no more.
const FIRST_HOLDS: u64 = 4;
/// Holds that a stream may save up for.
const MOST_HOLDS: u64 = 16;
/// Batches of a stream without credit until it is given one more hold.
const RETRY_BATCHES: u32 = 64;
/// Accounts kept; beyond, all begin anew (each can then lose `FIRST_HOLDS` holds again).
const STREAMS_MAX: usize = 4096;

struct Account {
    credit_ns: u64,
    broke_batches: u32,
}

/// What is expected after a batch.
struct Expected {
    stream: Stream,
    /// Where the stream goes on.
    end: u64,
    /// When the hold would have to end.
    until: Nanos,
    /// Since when the server is held.
    held_since: Option<Nanos>,
}

/// The accounts, and the one request that is expected.
pub(crate) struct Anticipation {
    longest: Nanos,
    accounts: FxHashMap<Stream, Account>,
    expected: Option<Expected>,
}

impl Anticipation {
    /// Holds of at most `longest`.
    pub fn new(longest: Nanos) -> Anticipation {
        Anticipation { longest, accounts: FxHashMap::default(), expected: None }
    }

    /// A batch of a stream ended at offset `end`: its successor is expected until the hold would be too long, or until
    /// `limit`.
    pub fn expect(&mut self, now: Nanos, stream: Stream, end: u64, limit: Nanos) {
        self.give_up(now);
        if self.may_hold(stream) {
            let until = (now + self.longest).min(limit);
            self.expected = Some(Expected { stream, end, until, held_since: None });
        }
    }

    /// The stream and offset from which a request is expected.
    pub fn expected(&self) -> Option<(Stream, u64)> {
        self.expected.as_ref().map(|e| (e.stream, e.end))
    }

    /// Holds the server, or goes on to; until when. `None` when it was held long enough.
    pub fn hold(&mut self, now: Nanos) -> Option<Nanos> {
        match &mut self.expected {
            Some(e) if now < e.until => {
                e.held_since.get_or_insert(now);
                Some(e.until)
            }
            _ => {
                self.give_up(now);
                None
            }
        }
    }

    /// The expected request is here: `saved` is what it would have cost more, had the server turned elsewhere.
    pub fn came(&mut self, now: Nanos, saved: Nanos) {
        self.settle(now, saved);
    }

    /// Nothing is expected any more.
    pub fn give_up(&mut self, now: Nanos) {
        self.settle(now, Nanos::ZERO);
    }

    /// Ends the hold, if there is one, and books it.
    fn settle(&mut self, now: Nanos, earned: Nanos) {
        let Some(Expected { stream, until, held_since: Some(since), .. }) = self.expected.take() else { return };
        if let Some(account) = self.accounts.get_mut(&stream) {
            let most = self.longest.0.saturating_mul(MOST_HOLDS);
            let spent = now.min(until).since(since).0;
            let credit = account.credit_ns.saturating_add(earned.0).saturating_sub(spent);
            account.credit_ns = credit.min(most);
        }
    }

    /// The stream's account covers one more hold.
    fn may_hold(&mut self, stream: Stream) -> bool {
        if self.accounts.len() >= STREAMS_MAX && !self.accounts.contains_key(&stream) {
            self.accounts.clear();
        }
        let first = Account { credit_ns: self.longest.0.saturating_mul(FIRST_HOLDS), broke_batches: 0 };
        let account = self.accounts.entry(stream).or_insert(first);
        if account.credit_ns >= self.longest.0 {
            account.broke_batches = 0;
            return true;
        }
        account.broke_batches += 1;
        let retry = account.broke_batches >= RETRY_BATCHES;
        if retry {
            (account.credit_ns, account.broke_batches) = (self.longest.0, 0);
        }
        retry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Stream = (LaneId(0), 7, Op::Read);

    /// One hold per batch; those that succeed last 10 of at most 100 ns and save `saved`.
    fn holds(batches: u64, succeeds: impl Fn(u64) -> bool, saved: u64) -> (u64, Anticipation) {
        let mut a = Anticipation::new(Nanos(100));
        let mut held = 0;
        for i in 0..batches {
            let now = Nanos(i * 1000);
            a.expect(now, STREAM, 0, Nanos::MAX);
            if a.hold(now).is_some() {
                held += 1;
                if succeeds(i) {
                    a.came(now + Nanos(10), Nanos(saved));
                } else {
                    assert_eq!(a.hold(now + Nanos(100)), None);
                }
            }
        }
        (held, a)
    }

    #[test]
    fn holds_that_fail_switch_themselves_off() {
        let (held, _) = holds(1000, |_| false, 500);
        // The first four; then one in every 64 batches.
        assert_eq!(held, 4 + (1000 - 4) / 64);
    }

    #[test]
    fn holds_that_pay_go_on_and_those_that_earn_too_little_do_not() {
        assert_eq!(holds(1000, |_| true, 500).0, 1000);
        assert_eq!(holds(1000, |i| i % 4 == 0, 500).0, 1000, "500 − 10 earned for each 300 lost");
        assert!(holds(1000, |i| i % 8 == 0, 500).0 < 300, "490 earned for each 700 lost");
        assert!(holds(1000, |_| true, 5).0 < 250, "5 earned, 10 lost: nothing to save on such a device");
    }

    #[test]
    fn a_stream_that_changes_its_ways_is_noticed() {
        let (_, mut a) = holds(1000, |_| false, 500);
        let mut held = 0;
        for i in 2000..2200 {
            let now = Nanos(i * 1000);
            a.expect(now, STREAM, 0, Nanos::MAX);
            if a.hold(now).is_some() {
                held += 1;
                a.came(now + Nanos(10), Nanos(500));
            }
        }
        assert!(held > 130, "{held}");
    }

    #[test]
    fn accounts_are_bounded() {
        let mut a = Anticipation::new(Nanos(100));
        for file in 0..10_000 {
            a.expect(Nanos(file), (LaneId(0), file, Op::Write), 0, Nanos::MAX);
            assert!(a.accounts.len() <= STREAMS_MAX);
        }
        assert_eq!(a.hold(Nanos(9_999)), Some(Nanos(10_099)));
        a.give_up(Nanos(10_000));
        assert_eq!(a.expected(), None);
    }
}
