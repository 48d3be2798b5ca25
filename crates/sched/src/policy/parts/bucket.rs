//! A token bucket, stored as one instant: when it will be full if nothing more is taken.

use crate::types::Nanos;

/// Amounts are spans: tokens divided by the rate at which they arrive.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::policy) struct Bucket {
    full_at: Nanos,
}

impl Bucket {
    /// A bucket of the given depth that holds `span` worth of tokens.
    pub fn holding(span: Nanos, depth: Nanos, now: Nanos) -> Bucket {
        Bucket { full_at: now + depth.since(span) }
    }

    /// When it will hold `need`. More may then be taken: the debt delays later requests.
    pub fn ready_at(&self, need: Nanos, depth: Nanos) -> Nanos {
        (self.full_at + need.min(depth)).since(depth)
    }

    /// Takes tokens; a shortfall becomes debt.
    pub fn take(&mut self, now: Nanos, span: Nanos) {
        self.full_at = self.full_at.max(now) + span;
    }

    /// Returns tokens taken in excess.
    pub fn give_back(&mut self, span: Nanos) {
        self.full_at = self.full_at.since(span);
    }

    /// Its rate changes: what it lacks takes `ratio` times as long to come.
    pub fn stretch(&mut self, now: Nanos, ratio: f64) {
        let lacks = self.full_at.since(now);
        self.full_at = now + Nanos::from_secs_f64(lacks.as_secs_f64() * ratio);
    }

    /// Its tokens in seconds' worth; negative is debt.
    pub fn tokens_s(&self, now: Nanos, depth: Nanos) -> f64 {
        (i128::from(depth.0) - i128::from(self.full_at.since(now).0)) as f64 / 1e9
    }

    /// True if it is full, like a new one.
    pub fn is_full(&self, now: Nanos) -> bool {
        self.full_at <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 tokens a second, depth 3: three at once, then one every 10 ms; idle time fills it only up to its depth.
    #[test]
    fn depth_and_rate() {
        let (ms, depth, one) = (Nanos::from_millis, Nanos::from_millis(30), Nanos::from_millis(10));
        let mut bucket = Bucket::default();
        let mut taken = Vec::new();
        for now in (1000..1050).map(ms) {
            while bucket.ready_at(one, depth) <= now {
                bucket.take(now, one);
                taken.push(now);
            }
        }
        assert_eq!(taken, [1000, 1000, 1000, 1010, 1020, 1030, 1040].map(ms));
        assert!(!bucket.is_full(ms(1050)));
        assert_eq!(bucket.tokens_s(ms(2000), depth), 0.03);
        bucket.take(ms(2000), ms(100));
        assert_eq!(bucket.tokens_s(ms(2000), depth), -0.07, "debt");
        assert_eq!(bucket.ready_at(one, depth), ms(2080));
        bucket.give_back(ms(50));
        assert_eq!(bucket.ready_at(one, depth), ms(2030));
        bucket.take(ms(2000), ms(100));
        bucket.stretch(ms(2000), 0.5);
        assert_eq!(bucket.ready_at(one, depth), ms(2055), "150 ms until it is full became 75 ms");
        bucket.stretch(ms(2100), 9.0);
        assert!(bucket.is_full(ms(2100)), "it lacks nothing");
        assert_eq!(Bucket::holding(ms(20), depth, ms(7)).ready_at(one, depth), Nanos::ZERO);
        assert_eq!(Bucket::holding(ms(20), depth, ms(7)).tokens_s(ms(7), depth), 0.02);
    }
}
