//! How long the program's reads take by themselves.
//!
//! A read that waits behind a hint takes longer than it would without. Whoever compares what hints cost with what reads cost
//! must leave such reads out, or hints justify themselves: the more they delay the program, the more they seem to be worth.

use super::Read;

/// Reads that count; older ones count less and less.
const READS_MAX: u64 = 512;

/// Of one file.
#[derive(Debug, Default)]
pub(super) struct Unaided {
    /// Hints that were given and not answered yet.
    under_way: u64,
    /// When the last answer came.
    idle_since_ns: u64,
    /// Slow reads that waited for no hint.
    reads: u64,
    bytes: u64,
    ns: u64,
}

impl Unaided {
    /// Hints were given. An answer that never comes leaves all later reads out.
    pub(super) fn gave(&mut self, hints: u64) {
        self.under_way = self.under_way.saturating_add(hints);
    }

    /// A hint was carried out, refused, or failed.
    pub(super) fn answered(&mut self, now_ns: u64) {
        self.under_way = self.under_way.saturating_sub(1);
        self.idle_since_ns = self.idle_since_ns.max(now_ns);
    }

    /// Whether no hint was on its way while this read was.
    pub(super) fn is_alone(&self, read: &Read) -> bool {
        self.is_idle_since(read.now_ns.saturating_sub(read.duration_ns))
    }

    /// Whether no hint was on its way since then.
    pub(super) fn is_idle_since(&self, since_ns: u64) -> bool {
        self.under_way == 0 && since_ns >= self.idle_since_ns
    }

    /// A read that was slow and waited for no hint.
    pub(super) fn read(&mut self, bytes: u64, duration_ns: u64) {
        if self.reads >= READS_MAX {
            (self.reads, self.bytes, self.ns) = (self.reads / 2, self.bytes / 2, self.ns / 2);
        }
        self.reads += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.ns = self.ns.saturating_add(duration_ns);
    }

    /// What a read of so many bytes would take that is not foreseen: as long as others, and what more bytes than theirs take where a device
    /// brings in 100 MB a second. `None` where no read tells.
    pub(super) fn usual_ns(&self, bytes: u64) -> Option<u64> {
        let (mean_ns, mean_bytes) = (self.ns.checked_div(self.reads)?, self.bytes.checked_div(self.reads)?);
        Some(mean_ns.saturating_add(bytes.saturating_sub(mean_bytes).saturating_mul(10)))
    }

    /// What a read of so many bytes took by itself that took this long behind hints: no more than others do, each byte as long
    /// where it is longer than these.
    pub(super) fn without_hints_ns(&self, bytes: u64, duration_ns: u64) -> u64 {
        let Some(mean_ns) = self.ns.checked_div(self.reads) else { return duration_ns };
        let mean_bytes = (self.bytes / self.reads).max(1);
        let longer = u128::from(mean_ns) * u128::from(bytes.max(mean_bytes)) / u128::from(mean_bytes);
        duration_ns.min(u64::try_from(longer).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_behind_hints_are_known_by_their_times() {
        let read =
            |began_ns: u64, ended_ns: u64| Read { bytes: 0..10, duration_ns: ended_ns - began_ns, now_ns: ended_ns };
        let mut unaided = Unaided::default();
        assert!(unaided.is_alone(&read(0, 10)));
        assert_eq!(unaided.without_hints_ns(10, 77), 77, "nothing is known");
        unaided.read(10, 10);
        unaided.gave(2);
        unaided.answered(20);
        assert!(!unaided.is_alone(&read(20, 30)), "one is on its way");
        unaided.answered(40);
        assert!(!unaided.is_alone(&read(39, 50)), "it began before the answer");
        assert!(unaided.is_alone(&read(40, 50)));
        assert_eq!([5, 10, 30].map(|bytes| unaided.without_hints_ns(bytes, 100)), [10, 10, 30]);
        assert_eq!(unaided.without_hints_ns(10, 3), 3);
        (0..10_000).for_each(|_| unaided.read(10, 20));
        assert!(unaided.reads <= READS_MAX && unaided.without_hints_ns(10, 100) > 15, "a device that became slower");
    }
}
