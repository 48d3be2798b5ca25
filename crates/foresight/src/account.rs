//! What predictions gained and what they cost: an account for each stream of predictions that stops it where it does not
//! pay, and lets it try again later.

/// Bytes that may be wasted before an account is judged.
const FREE_BYTES: u64 = 1 << 20;
/// An account pays while at least this many bytes are hit for each one wasted.
const HITS_A_WASTED_BYTE: u64 = 4;
/// Demanded bytes after which a stopped account tries again; doubled with each stop, up to the second.
const PAUSE_BYTES: (u64, u64) = (16 << 20, 1 << 30);
/// After this many hit bytes an account's past stops are forgotten: its next pause is a short one.
const PROVEN_BYTES: u64 = 16 << 20;
/// Beyond this many judged bytes an account is halved, so that it follows what a program does now.
const MEMORY_BYTES: u64 = 1 << 30;

/// An account of predictions. Bytes predicted are outstanding until they are read (hit), or until that has become
/// unlikely (wasted).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Account {
    /// Bytes that were predicted and then read.
    pub hit_bytes: u64,
    /// Bytes that were predicted and not read.
    pub wasted_bytes: u64,
    /// Device time of the bytes hit: what their readers did not wait for, at most.
    pub gained_ns: u64,
    /// Device time of the bytes wasted.
    pub lost_ns: u64,
    /// How often it was stopped.
    pub stops: u32,
    /// Demanded bytes until it may try again; 0 while it is not stopped.
    paused_bytes: u64,
    /// Stops since it was last proven.
    in_a_row: u32,
}

impl Account {
    /// Predicted bytes were read; `ns` is the device time that they took.
    pub fn hit(&mut self, bytes: u64, ns: u64) {
        self.hit_bytes += bytes;
        self.gained_ns = self.gained_ns.saturating_add(ns);
        if self.hit_bytes >= PROVEN_BYTES {
            self.in_a_row = 0;
        }
        if self.hit_bytes + self.wasted_bytes > MEMORY_BYTES {
            self.fade();
        }
    }

    /// Predicted bytes were not read; `ns` is the device time that they took.
    pub fn wasted(&mut self, bytes: u64, ns: u64) {
        self.wasted_bytes += bytes;
        self.lost_ns = self.lost_ns.saturating_add(ns);
        if self.paused_bytes == 0 && self.is_wasteful() {
            self.paused_bytes = (PAUSE_BYTES.0 << self.in_a_row.min(16)).min(PAUSE_BYTES.1);
            self.stops += 1;
            self.in_a_row += 1;
        }
    }

    /// Predicted bytes that were counted as wasted were read after all. An account that was stopped for them goes on.
    pub fn hit_late(&mut self, bytes: u64, ns: u64) {
        // Another try may have begun since.
        self.wasted_bytes = self.wasted_bytes.saturating_sub(bytes);
        self.lost_ns = self.lost_ns.saturating_sub(ns);
        self.hit(bytes, ns);
        if self.paused_bytes > 0 && !self.is_wasteful() {
            self.paused_bytes = 0;
            self.in_a_row = self.in_a_row.saturating_sub(1);
        }
    }

    /// Predicted bytes that were counted as hit had left memory before they were read.
    pub fn lost(&mut self, bytes: u64, ns: u64) {
        self.hit_bytes = self.hit_bytes.saturating_sub(bytes);
        self.gained_ns = self.gained_ns.saturating_sub(ns);
        self.wasted(bytes, ns);
    }

    /// Bytes were asked for, predicted or not. A stopped account that has paused long enough may try again.
    pub fn demanded(&mut self, bytes: u64) {
        if self.paused_bytes > 0 {
            self.paused_bytes = self.paused_bytes.saturating_sub(bytes);
            if self.paused_bytes == 0 {
                // What it may lose by the next attempt is what a new account may lose.
                (self.hit_bytes, self.wasted_bytes, self.gained_ns, self.lost_ns) = (0, 0, 0, 0);
            }
        }
    }

    /// Whether it may predict.
    pub fn pays(&self) -> bool {
        self.paused_bytes == 0
    }

    /// The likelihood that a predicted byte is read, by what is known: 0 to 1, about a half at first.
    pub fn confidence(&self) -> f64 {
        let prior = FREE_BYTES as f64;
        (self.hit_bytes as f64 + prior) / ((self.hit_bytes + self.wasted_bytes) as f64 + 2.0 * prior)
    }

    /// Adds another account to this one: two streams became one.
    pub(crate) fn join(&mut self, other: &Account) {
        self.hit_bytes += other.hit_bytes;
        self.wasted_bytes += other.wasted_bytes;
        self.gained_ns = self.gained_ns.saturating_add(other.gained_ns);
        self.lost_ns = self.lost_ns.saturating_add(other.lost_ns);
        self.stops = self.stops.max(other.stops);
        self.in_a_row = self.in_a_row.max(other.in_a_row);
        self.paused_bytes = self.paused_bytes.max(other.paused_bytes);
    }

    fn is_wasteful(&self) -> bool {
        self.wasted_bytes > FREE_BYTES.max(self.hit_bytes / HITS_A_WASTED_BYTE)
    }

    fn fade(&mut self) {
        for n in [&mut self.hit_bytes, &mut self.wasted_bytes, &mut self.gained_ns, &mut self.lost_ns] {
            *n /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_stops_and_tries_again_ever_later() {
        let mut account = Account::default();
        account.wasted(FREE_BYTES, 5);
        assert!(account.pays() && account.confidence() < 0.4);
        account.wasted(1, 1);
        assert!(!account.pays());
        assert_eq!((account.stops, account.lost_ns), (1, 6));
        account.demanded(PAUSE_BYTES.0 - 1);
        assert!(!account.pays());
        account.demanded(1);
        assert!(account.pays() && account.wasted_bytes == 0);
        account.wasted(2 * FREE_BYTES, 0);
        account.demanded(PAUSE_BYTES.0);
        assert!(!account.pays(), "the second pause is twice as long");
        account.demanded(PAUSE_BYTES.0);
        assert!(account.pays());
    }

    #[test]
    fn what_left_memory_is_no_hit() {
        let mut account = Account::default();
        account.hit(3 * FREE_BYTES, 30);
        account.lost(2 * FREE_BYTES, 20);
        assert_eq!((account.hit_bytes, account.wasted_bytes, account.gained_ns), (FREE_BYTES, 2 * FREE_BYTES, 10));
        assert!(!account.pays());
    }

    #[test]
    fn what_is_read_late_was_not_wasted() {
        let mut account = Account::default();
        account.hit(2 * FREE_BYTES, 20);
        account.wasted(2 * FREE_BYTES, 20);
        assert!(!account.pays());
        account.hit_late(FREE_BYTES - 1, 10);
        assert!(!account.pays());
        account.hit_late(1, 0);
        let (hit, wasted) = (account.hit_bytes, account.wasted_bytes);
        assert_eq!((hit, wasted, account.gained_ns, account.lost_ns), (3 * FREE_BYTES, FREE_BYTES, 30, 10));
        assert!(account.pays() && account.stops == 1);
        account.wasted(1, 0);
        account.demanded(PAUSE_BYTES.0);
        assert!(account.pays(), "the pause that was lifted does not lengthen the next one");
        account.hit_late(FREE_BYTES, 0);
        assert_eq!((account.hit_bytes, account.wasted_bytes), (FREE_BYTES, 0), "of a try that is over");
    }

    #[test]
    fn what_mostly_hits_goes_on() {
        let mut account = Account::default();
        for _ in 0..10_000 {
            account.hit(1 << 20, 1000);
            account.wasted(200 << 10, 200);
            assert!(account.pays());
        }
        assert!(account.hit_bytes + account.wasted_bytes <= MEMORY_BYTES + (2 << 20), "it fades");
        assert!(account.confidence() > 0.8 && account.gained_ns > account.lost_ns);
    }
}
