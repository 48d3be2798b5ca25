//! How much may be written into the page cache without the kernel making the writer wait.
//!
//! Up to half-way between its two thresholds Linux lets everybody dirty pages freely (`balance_dirty_pages`); beyond, each
//! write is delayed, by up to 200 ms. Who must not be delayed writes half of what is left of that, and looks again. What else
//! delays writes (a limit of a control group, a journal that is full) shows by the time that they take: then nothing is
//! written so for a while.

use std::fs;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use crate::page_cache::page_bytes;
use crate::time::Nanos;

/// What was left is looked at again after this time.
const LOOK_AFTER: Nanos = Nanos::from_millis(100);
/// When all of it is used up, after this time.
const LOOK_AGAIN: Nanos = Nanos::from_millis(5);
/// A write that took longer than this, and than memory takes, was delayed.
const DELAYED: Nanos = Nanos::from_millis(20);
const MEMORY_BYTES_PER_S: u64 = 100_000_000;
/// How long nothing is written after one was.
const REST: Nanos = Nanos::from_millis(200);

/// The room for pages that are not on the device yet.
pub struct DirtyRoom {
    left_bytes: AtomicI64,
    /// When what is left was looked at; 0: never.
    looked_ns: AtomicU64,
    rests_until_ns: AtomicU64,
    room_bytes: fn() -> Option<u64>,
}

impl Default for DirtyRoom {
    fn default() -> DirtyRoom {
        DirtyRoom::told_by(|| free_run_bytes(&fs::read_to_string("/proc/vmstat").ok()?, page_bytes()))
    }
}

impl DirtyRoom {
    fn told_by(room_bytes: fn() -> Option<u64>) -> DirtyRoom {
        let (left_bytes, looked_ns, rests_until_ns) = Default::default();
        DirtyRoom { left_bytes, looked_ns, rests_until_ns, room_bytes }
    }

    /// Whether so many bytes may be written now without a delay; they are taken from what is left.
    pub fn takes(&self, bytes: u64, now: Nanos) -> bool {
        if now.0 < self.rests_until_ns.load(Relaxed) {
            return false;
        }
        let looked = self.looked_ns.load(Relaxed);
        let age = now.since(Nanos(looked));
        let is_left = self.take(bytes);
        if is_left && age < LOOK_AFTER && looked > 0 {
            return true;
        }
        if looked > 0 && age < LOOK_AGAIN {
            return false;
        }
        // One thread looks.
        if self.looked_ns.compare_exchange(looked, now.0.max(1), Relaxed, Relaxed).is_err() {
            return is_left && looked > 0;
        }
        let room = (self.room_bytes)().unwrap_or(0) / 2;
        self.left_bytes.store(i64::try_from(room).unwrap_or(i64::MAX), Relaxed);
        self.take(bytes)
    }

    fn take(&self, bytes: u64) -> bool {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let taken =
            self.left_bytes.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes).filter(|left| *left >= 0));
        taken.is_ok()
    }

    /// So many bytes were written, which took this long.
    pub fn took(&self, bytes: u64, took: Nanos, now: Nanos) {
        let memory = Nanos(bytes.saturating_mul(1_000_000_000) / MEMORY_BYTES_PER_S);
        if took > DELAYED + memory {
            self.rests_until_ns.fetch_max(now.0.saturating_add(REST.0), Relaxed);
        }
    }
}

/// What may still be dirtied freely, by the kernel's own figures.
fn free_run_bytes(vmstat: &str, page_bytes: u64) -> Option<u64> {
    let pages = |name: &str| {
        let line = vmstat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|pages| pages.trim().parse::<u64>().ok())
    };
    let freely = (pages("nr_dirty_threshold")? + pages("nr_dirty_background_threshold")?) / 2;
    let dirty = pages("nr_dirty")? + pages("nr_writeback")?;
    Some(freely.saturating_sub(dirty).saturating_mul(page_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_free_run_is_half_way_between_the_thresholds() {
        let vmstat = "nr_free_pages 5865679\nnr_dirty 100\nnr_writeback 50\nnr_writeback_temp 7\n\
                      nr_dirty_threshold 3000\nnr_dirty_background_threshold 1000\n";
        assert_eq!(free_run_bytes(vmstat, 4096), Some(1850 * 4096));
        assert_eq!(free_run_bytes(&vmstat.replace("nr_dirty 100", "nr_dirty 5000"), 4096), Some(0));
        for absent in ["nr_dirty_threshold", "nr_writeback 50", "nr_dirty 100"] {
            assert_eq!(free_run_bytes(&vmstat.replace(absent, "x"), 4096), None);
        }
        assert_eq!(free_run_bytes("", 4096), None);
    }

    #[test]
    fn half_of_what_is_left_is_written_between_two_looks() {
        let room = DirtyRoom::told_by(|| Some(2000));
        let takes = |bytes, ms: u64| room.takes(bytes, Nanos(ms * MS));
        assert!(takes(600, 1) && takes(400, 1));
        assert!(!takes(1, 2), "no more, and it is not looked so soon");
        assert!(takes(1000, 6), "the kernel has written some back meanwhile");
        assert!(!takes(1, 10));
        assert!(!takes(1001, 20), "never more than that");
        assert!(takes(100, 21) && takes(900, 121), "it is looked again though something is left");
        assert!(!takes(101, 122));
        let none = DirtyRoom::told_by(|| None);
        assert!(!none.takes(1, Nanos(5)) && !none.takes(1, Nanos(500 * MS)), "who cannot look writes nothing");
    }

    #[test]
    fn a_write_that_was_delayed_is_the_last_for_a_while() {
        let room = DirtyRoom::told_by(|| Some(1 << 30));
        room.took(4 << 20, Nanos(50 * MS), Nanos(100 * MS));
        assert!(room.takes(1, Nanos(100 * MS)), "so long may memory take");
        room.took(4096, Nanos(21 * MS), Nanos(100 * MS));
        assert!(!room.takes(1, Nanos(299 * MS)));
        assert!(room.takes(1, Nanos(300 * MS)));
    }
}
