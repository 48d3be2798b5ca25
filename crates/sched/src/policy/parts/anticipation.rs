//! Decides whether to hold a server for the next request of the stream it has just served.
//!
//! A synchronous program sends its next request only after the reply to the last one. A server that turns elsewhere in
//! between seeks away and back. *Holding* it for a moment saves those seeks if the request comes. Each stream (server,
//! file, operation) has an account in device time: a hold costs its duration, and a hold that ends with the expected
//! request earns the seek it saved, the fixed part of the request's cost. A stream whose account does not cover a hold
//! gets none: holds that do not pay switch themselves off, and one more is tried every [`RETRY_BATCHES`] batches of the
//! stream.
//!
//! *By lag*, a hold lasts no longer than the stream's next request usually takes to arrive (1.5 × the observed lag plus
//! [`LAG_MARGIN`]), and a stream in which no request has closely followed another gets no hold: files that are read
//! once cost nothing.

use super::remembered::Remembered;
use crate::types::{LaneId, Nanos, Op};

/// A server, the stable key of a file, and an operation.
pub(crate) type Stream = (LaneId, u64, Op);

/// Holds that a new stream may lose before it gets no more.
const FIRST_HOLDS: u64 = 4;
/// Maximum credit of a stream, in holds.
const MOST_HOLDS: u64 = 16;
/// Batches of a stream without credit before it gets one more hold.
const RETRY_BATCHES: u32 = 64;
/// Maximum accounts.
const STREAMS_MAX: usize = 4096;
/// A hold by lag lasts this much longer than 1.5 × the lag.
const LAG_MARGIN: Nanos = Nanos(300_000);

struct Account {
    credit_ns: u64,
    broke_batches: u32,
    /// Recent time from the end of a batch to the next request; `None` while no request followed closely.
    lag: Option<Nanos>,
    /// When the last batch ended, until the next request arrives.
    ended: Option<Nanos>,
}

/// The expected successor of a batch.
struct Expected {
    stream: Stream,
    /// The offset at which the stream continues.
    end: u64,
    /// When the hold must end.
    until: Nanos,
    /// When the hold began, if it did.
    held_since: Option<Nanos>,
}

/// The accounts of streams, and the request expected at each server.
pub(crate) struct Anticipation {
    longest: Nanos,
    by_lag: bool,
    accounts: Remembered<Stream, Account>,
    expected: Vec<Option<Expected>>,
}

impl Anticipation {
    /// Holds `servers` servers for at most `longest` each time.
    pub fn new(longest: Nanos, by_lag: bool, servers: u16) -> Anticipation {
        let expected = (0..servers).map(|_| None).collect();
        Anticipation { longest, by_lag, accounts: Remembered::new(STREAMS_MAX), expected }
    }

    /// Longest hold.
    pub fn longest(&self) -> Nanos {
        self.longest
    }

    /// The account of a stream, created if missing.
    fn account(&mut self, stream: Stream) -> &mut Account {
        let credit_ns = self.longest.0.saturating_mul(FIRST_HOLDS);
        self.accounts.of(stream, || Account { credit_ns, broke_batches: 0, lag: None, ended: None })
    }

    /// The last batch of a stream ended and none of its requests is queued: the lag starts.
    pub fn ended(&mut self, now: Nanos, stream: Stream) {
        self.account(stream).ended = Some(now);
    }

    /// The stream's first request since then arrived: the lag ends.
    pub fn arrived(&mut self, now: Nanos, stream: Stream) {
        let longest = self.longest;
        let Some(account) = self.accounts.get_mut(&stream) else { return };
        let Some(lag) = account.ended.take().map(|ended| now.since(ended)) else { return };
        account.lag = match account.lag {
            _ if lag > longest => None,
            None => Some(lag),
            Some(usual) => Some(Nanos((usual.0 * 3 + lag.0) / 4).max(lag)),
        };
    }

    /// A batch of a stream ended at offset `end`: expect its successor until the longest hold has passed, or until
    /// `limit`.
    pub fn expect(&mut self, now: Nanos, stream: Stream, end: u64, limit: Nanos) {
        self.give_up(now, stream.0);
        if let Some(hold) = self.may_hold(stream) {
            let until = (now + hold).min(limit);
            self.expected[stream.0.index()] = Some(Expected { stream, end, until, held_since: None });
        }
    }

    /// The stream and offset expected at a server.
    pub fn expected(&self, server: LaneId) -> Option<(Stream, u64)> {
        self.expected[server.index()].as_ref().map(|e| (e.stream, e.end))
    }

    /// Starts or continues the hold of a server; returns its end, or `None` once the server was held long enough.
    pub fn hold(&mut self, now: Nanos, server: LaneId) -> Option<Nanos> {
        match &mut self.expected[server.index()] {
            Some(e) if now < e.until => {
                e.held_since.get_or_insert(now);
                Some(e.until)
            }
            _ => {
                self.give_up(now, server);
                None
            }
        }
    }

    /// The expected request arrived; `saved` is the extra cost had the server turned elsewhere.
    pub fn fulfilled(&mut self, now: Nanos, server: LaneId, saved: Nanos) {
        self.settle(now, server, saved);
    }

    /// Stops expecting a request at a server.
    pub fn give_up(&mut self, now: Nanos, server: LaneId) {
        self.settle(now, server, Nanos::ZERO);
    }

    /// Ends the hold, if any, and books it.
    fn settle(&mut self, now: Nanos, server: LaneId, earned: Nanos) {
        let Some(Expected { stream, until, held_since: Some(since), .. }) = self.expected[server.index()].take() else {
            return;
        };
        if let Some(account) = self.accounts.get_mut(&stream) {
            let most = self.longest.0.saturating_mul(MOST_HOLDS);
            let spent = now.min(until).since(since).0;
            let credit = account.credit_ns.saturating_add(earned.0).saturating_sub(spent);
            account.credit_ns = credit.min(most);
        }
    }

    /// How long a stream may be held for, if its account covers one more hold.
    fn may_hold(&mut self, stream: Stream) -> Option<Nanos> {
        let (longest, by_lag) = (self.longest, self.by_lag);
        let account = self.account(stream);
        let hold = match account.lag {
            Some(lag) if by_lag => Nanos((lag.0 + lag.0 / 2).saturating_add(LAG_MARGIN.0)).min(longest),
            None if by_lag => return None,
            _ => longest,
        };
        if account.credit_ns >= longest.0 {
            account.broke_batches = 0;
            return Some(hold);
        }
        account.broke_batches += 1;
        let retry = account.broke_batches >= RETRY_BATCHES;
        if retry {
            (account.credit_ns, account.broke_batches) = (longest.0, 0);
        }
        retry.then_some(hold)
    }

    /// Takes over another instance's accounts after a change of parameters.
    pub fn take_over(&mut self, other: Anticipation) {
        let (ours, theirs) = (u128::from(self.longest.0), u128::from(other.longest.0.max(1)));
        self.accounts = other.accounts;
        // Credit is counted in holds, whose length has changed.
        self.accounts.for_each(|account| {
            let credit = u128::from(account.credit_ns) * ours / theirs;
            account.credit_ns = u64::try_from(credit).unwrap_or(u64::MAX);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Stream = (LaneId(0), 7, Op::Read);

    /// One hold per batch; successful holds last 10 of at most 100 ns and save `saved`.
    fn holds(batches: u64, succeeds: impl Fn(u64) -> bool, saved: u64) -> (u64, Anticipation) {
        let mut a = Anticipation::new(Nanos(100), false, 1);
        let mut held = 0;
        for i in 0..batches {
            let now = Nanos(i * 1000);
            a.expect(now, STREAM, 0, Nanos::MAX);
            if a.hold(now, LaneId(0)).is_some() {
                held += 1;
                if succeeds(i) {
                    a.fulfilled(now + Nanos(10), LaneId(0), Nanos(saved));
                } else {
                    assert_eq!(a.hold(now + Nanos(100), LaneId(0)), None);
                }
            }
        }
        (held, a)
    }

    #[test]
    fn holds_that_fail_switch_themselves_off() {
        let (held, _) = holds(1000, |_| false, 500);
        // The first four, then one in every 64 batches.
        assert_eq!(held, 4 + (1000 - 4) / 64);
    }

    #[test]
    fn holds_continue_only_where_they_pay() {
        assert_eq!(holds(1000, |_| true, 500).0, 1000);
        assert_eq!(holds(1000, |i| i % 4 == 0, 500).0, 1000, "500 − 10 earned for each 300 lost");
        assert!(holds(1000, |i| i % 8 == 0, 500).0 < 300, "490 earned for each 700 lost");
        assert!(holds(1000, |_| true, 5).0 < 250, "5 earned, 10 lost: nothing to save on such a device");
    }

    #[test]
    fn a_stream_that_changes_its_behaviour_is_noticed() {
        let (_, mut a) = holds(1000, |_| false, 500);
        let mut held = 0;
        for i in 2000..2200 {
            let now = Nanos(i * 1000);
            a.expect(now, STREAM, 0, Nanos::MAX);
            if a.hold(now, LaneId(0)).is_some() {
                held += 1;
                a.fulfilled(now + Nanos(10), LaneId(0), Nanos(500));
            }
        }
        assert!(held > 130, "{held}");
    }

    /// By lag: no hold until a request has followed closely; then 1.5 × its lag plus the margin.
    #[test]
    fn holds_follow_the_observed_lag() {
        let longest = Nanos::from_millis(5);
        let mut a = Anticipation::new(longest, true, 1);
        let after = |a: &mut Anticipation, now: Nanos| {
            a.ended(now, STREAM);
            a.expect(now, STREAM, 0, Nanos::MAX);
            a.hold(now, LaneId(0)).map(|until| until - now)
        };
        assert_eq!(after(&mut a, Nanos(0)), None);
        a.arrived(Nanos(200_000), STREAM);
        assert_eq!(after(&mut a, Nanos(1_000_000)), Some(Nanos(600_000)));
        a.arrived(Nanos(1_000_000) + Nanos::from_millis(4), STREAM);
        assert_eq!(after(&mut a, Nanos(9_000_000)), Some(longest), "the longer of the last and the usual lag");
        a.arrived(Nanos(9_000_000) + Nanos::from_millis(6), STREAM);
        assert_eq!(after(&mut a, Nanos(99_000_000)), None, "it no longer follows closely");
    }

    #[test]
    fn accounts_are_bounded() {
        let mut a = Anticipation::new(Nanos(100), false, 1);
        for file in 0..10_000 {
            a.expect(Nanos(file), (LaneId(0), file, Op::Write), 0, Nanos::MAX);
        }
        let kept = (0..10_000).filter(|file| a.accounts.get(&(LaneId(0), *file, Op::Write)).is_some()).count();
        assert_eq!(kept, STREAMS_MAX);
        assert_eq!(a.hold(Nanos(9_999), LaneId(0)), Some(Nanos(10_099)));
        a.give_up(Nanos(10_000), LaneId(0));
        assert_eq!(a.expected(LaneId(0)), None);
    }
}
