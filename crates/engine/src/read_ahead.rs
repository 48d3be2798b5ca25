//! Reads ahead of a server's clients: what foresight predicts of a file, and what clients hint, is read into the page
//! cache before it is requested. Gives [`ReadingAhead`] and [`Hints`] a lock, the clock and the file; threads are the
//! server's.
//!
//! The kernel's own read-ahead keeps one state per open file, and a server reads a file through one open file for all
//! clients: streams of several clients disturb one another there. Here each stream is separate, with an account that
//! stops it where it does not pay. Predicted extents pass through the server's core as speculations: along with the
//! request that they continue, or alone while little else is in flight.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use impresario_base::lock::Mutex;
use impresario_foresight::{EarlierReads, Hints, Prediction, ReadingAhead, Source, Totals, is_there};
use impresario_sched::{Op, PredictedQueues};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use crate::now;

/// A file that is read through a page cache.
pub trait PagedFile {
    /// Its length, bytes; 0 if unknown. Does not wait.
    fn len_bytes(&self) -> u64;

    /// Whether a byte is in the page cache. Does not wait for the device, though a file system may take its time.
    fn has(&self, at: u64) -> bool;

    /// Starts reading a range into the page cache, without waiting. A hint: it may do nothing.
    fn will_read(&self, range: Range<u64>);

    /// Waits until a started range is in the page cache, as far as the file reaches.
    fn wait_for(&self, range: Range<u64>) -> io::Result<()>;
}

/// The state of reading ahead.
#[derive(Debug)]
pub struct ReadAhead {
    /// Limit of outstanding bytes, for both kinds together.
    budget_bytes: AtomicU64,
    rule: Mutex<ReadingAhead>,
    hints: Mutex<Hints>,
    /// Hints are outstanding.
    is_hinted: AtomicBool,
    /// The rule sleeps, so requests need not take its lock.
    sleeps: AtomicBool,
    /// Bytes of reads that had to wait for the device.
    waited_bytes: AtomicU64,
    /// The most that was told of bytes hit and of time gained. Foresight takes back what memory turns out to have lost; what
    /// has been counted cannot fall.
    told_hit_bytes: AtomicU64,
    told_gained_ns: AtomicU64,
}

impl ReadAhead {
    /// With a limit of bytes read ahead and not yet requested.
    pub fn new(budget_bytes: u64) -> ReadAhead {
        ReadAhead {
            budget_bytes: AtomicU64::new(budget_bytes),
            rule: Mutex::new(ReadingAhead::new(budget_bytes)),
            hints: Mutex::default(),
            is_hinted: AtomicBool::new(false),
            sleeps: AtomicBool::new(false),
            waited_bytes: AtomicU64::new(0),
            told_hit_bytes: AtomicU64::new(0),
            told_gained_ns: AtomicU64::new(0),
        }
    }

    /// A client announces what it will read. Returns how many bytes are, or will be, read ahead for it, and which of
    /// them are new.
    pub fn hinted(
        &self,
        file: (u64, &dyn PagedFile),
        extents: impl Iterator<Item = Range<u64>>,
        client: u64,
    ) -> (u64, Vec<Range<u64>>) {
        let len_bytes = file.1.len_bytes();
        let predicted_bytes = self.rule.lock().totals().outstanding_bytes;
        self.with_hints(|hints| {
            hints.expire(now().0);
            let room_bytes =
                self.budget_bytes.load(Relaxed).saturating_sub(predicted_bytes + hints.totals().outstanding_bytes);
            hints.hint(client, file.0, extents, len_bytes, room_bytes, now().0)
        })
    }

    /// Changes the limit of bytes read ahead and not yet requested.
    pub fn set_budget(&self, budget_bytes: u64) {
        let hints = self.hints.lock();
        self.budget_bytes.store(budget_bytes, Relaxed);
        self.rule.lock().set_budget(budget_bytes.saturating_sub(hints.totals().outstanding_bytes));
    }

    /// Updates the hints; predictions get the rest of the budget.
    fn with_hints<T>(&self, change: impl FnOnce(&mut Hints) -> T) -> T {
        let mut hints = self.hints.lock();
        let before = hints.totals().outstanding_bytes;
        let changed = change(&mut hints);
        let outstanding_bytes = hints.totals().outstanding_bytes;
        if outstanding_bytes != before {
            self.is_hinted.store(!hints.is_empty(), Relaxed);
            let budget_bytes = self.budget_bytes.load(Relaxed);
            self.rule.lock().set_budget(budget_bytes.saturating_sub(outstanding_bytes));
        }
        changed
    }

    /// A request arrived: updates the hints of these bytes. For a file of which nothing is predicted;
    /// [`observe`](ReadAhead::observe) does it as well.
    pub fn observe_hints(&self, op: Op, file: u64, extent: Range<u64>) {
        if !self.is_hinted.load(Relaxed) {
            return;
        }
        match op {
            Op::Read => self.with_hints(|hints| hints.read(file, extent, now().0)),
            Op::Write => self.with_hints(|hints| hints.changed(file, extent)),
            Op::Truncate | Op::Unlink => self.with_hints(|hints| hints.changed(file, extent.start..u64::MAX)),
            Op::Sync => {}
        }
    }

    /// A read of these bytes waits for the device.
    pub fn waited(&self, (key, file): (u64, &dyn PagedFile), extent: &Range<u64>) {
        /// Looks until what is looked for is known; beyond, bytes that nobody has looked at count as there.
        const LOOKS_MAX: usize = 4;
        self.waited_bytes.fetch_add(extent.end - extent.start, Relaxed);
        let (mut seen, unseen) = (FxHashMap::default(), RefCell::new(Vec::new()));
        for looks in 0.. {
            let mut rule = self.rule.lock();
            if looks < LOOKS_MAX {
                rule.look_for_missed(key, extent, |at| {
                    seen.get(&at).copied().unwrap_or_else(|| {
                        unseen.borrow_mut().push(at);
                        true
                    })
                });
            }
            if unseen.borrow().is_empty() {
                rule.device_read(key, extent, |at| seen.get(&at).copied().unwrap_or(true));
                self.sleeps.store(rule.sleeps(), Relaxed);
                return;
            }
            drop(rule);
            // Without the lock: a file system that hangs must not keep it.
            seen.extend(unseen.take().into_iter().map(|at| (at, file.has(at))));
        }
    }

    /// A request of a client arrived. Returns what to read ahead now, within the file's end.
    pub fn observe(
        &self,
        op: Op,
        (file, paged): (u64, &dyn PagedFile),
        extent: Range<u64>,
        client: u64,
    ) -> Vec<Prediction> {
        self.observe_hints(op, file, extent.clone());
        if self.sleeps.load(Relaxed) {
            return Vec::new();
        }
        let mut rule = self.rule.lock();
        let mut predictions = Vec::new();
        match op {
            Op::Read => {
                predictions = rule.read(Source { file, reader: client }, extent, now().0);
                self.sleeps.store(rule.sleeps(), Relaxed);
            }
            Op::Write => rule.changed(file, extent),
            Op::Truncate => rule.changed(file, extent.start..i64::MAX as u64),
            Op::Unlink => rule.removed(file),
            Op::Sync => {}
        }
        drop(rule);
        if !predictions.is_empty() {
            let end = paged.len_bytes();
            self.rule.lock().within(&mut predictions, end);
        }
        predictions
    }

    /// Sets reads of earlier runs that will probably be repeated, replacing previous ones.
    pub fn foretell(&self, queues: Option<&PredictedQueues>) {
        // Outside the lock: there may be a million.
        let earlier = queues.map(|queues| Arc::new(EarlierReads::of(queues)));
        self.rule.lock().foretell(earlier);
    }

    /// Requests will not be observed for a while: forgets outstanding extents without judging them.
    pub fn rest(&self) {
        self.rule.lock().rest();
    }

    /// Reads a speculation into the page cache and waits for it, on a thread that may block.
    pub fn fetch(&self, (key, file): (u64, &dyn PagedFile), extent: Range<u64>) -> io::Result<()> {
        if is_there(&extent, |at| file.has(at)) {
            self.was_there(key, extent);
            return Ok(());
        }
        let started = now();
        file.will_read(extent.clone());
        self.follow((key, file), &extent)?;
        self.fetched(key, extent, now().since(started).0);
        Ok(())
    }

    /// Waits until a started extent is in the page cache, recording progress, on a thread that may block.
    pub fn follow(&self, (key, file): (u64, &dyn PagedFile), extent: &Range<u64>) -> io::Result<()> {
        const STEP_BYTES: u64 = 512 << 10;
        let mut at = extent.start;
        while at < extent.end {
            let to = (at + STEP_BYTES).min(extent.end);
            file.wait_for(at..to)?;
            self.came(key, &(extent.start..to), to - at);
            at = to;
        }
        Ok(())
    }

    /// The last `new_bytes` of an extent have just come; what is before them in it came earlier.
    pub fn came(&self, file: u64, extent: &Range<u64>, new_bytes: u64) {
        let mut rule = self.rule.lock();
        rule.arrived(file, extent);
        rule.came(new_bytes, now().0);
        self.sleeps.store(rule.sleeps(), Relaxed);
    }

    /// A speculation reaches beyond the file's end at `end`.
    pub fn ended(&self, file: u64, extent: Range<u64>, end: u64) {
        self.rule.lock().ended(file, extent, end);
    }

    /// A speculation was already cached: the prediction gained and cost nothing.
    pub fn was_there(&self, file: u64, extent: Range<u64>) {
        self.rule.lock().was_there(file, extent);
    }

    /// Bytes of a speculation have arrived; those of one prediction arrive in order.
    pub fn arrived(&self, file: u64, extent: &Range<u64>) {
        self.rule.lock().arrived(file, extent);
    }

    /// A speculation was read alone from the device in `took_ns`.
    pub fn fetched(&self, file: u64, extent: Range<u64>, took_ns: u64) {
        if self.is_hinted.load(Relaxed) {
            self.hints.lock().fetched(file, extent.clone());
        }
        let mut rule = self.rule.lock();
        rule.fetched(file, &extent, took_ns);
        self.sleeps.store(rule.sleeps(), Relaxed);
    }

    /// Sums since the start.
    pub fn totals(&self) -> Totals {
        self.rule.lock().totals()
    }

    /// State for the server's status.
    pub fn describe(&self) -> Value {
        let t = self.totals();
        let h = self.with_hints(|hints| {
            hints.expire(now().0);
            hints.totals()
        });
        let most = |told: &AtomicU64, now: u64| told.fetch_max(now, Relaxed).max(now);
        json!({
            "waited_bytes": self.waited_bytes.load(Relaxed),
            "predicted_bytes": t.predicted_bytes,
            "hit_bytes": most(&self.told_hit_bytes, t.hit_bytes),
            "wasted_bytes": t.wasted_bytes,
            "late_bytes": t.late_bytes,
            "outstanding_bytes": t.outstanding_bytes,
            "withheld_bytes": t.withheld_bytes,
            "gained_s": most(&self.told_gained_ns, t.gained_ns) as f64 / 1e9,
            "lost_s": t.lost_ns as f64 / 1e9,
            "stopped": t.stops,
            "hints": {
                "hinted_bytes": h.hinted_bytes,
                "fetched_bytes": h.fetched_bytes,
                "hit_bytes": h.hit_bytes,
                "wasted_bytes": h.wasted_bytes,
                "dropped_bytes": h.dropped_bytes,
                "outstanding_bytes": h.outstanding_bytes,
                "refused_bytes": h.refused_bytes,
                "stopped": h.stops,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// A file that memory has lost; each look finds the lock free.
    struct Lost<'a> {
        ahead: &'a ReadAhead,
        looks: AtomicUsize,
    }

    impl PagedFile for Lost<'_> {
        fn len_bytes(&self) -> u64 {
            u64::MAX
        }

        fn has(&self, _: u64) -> bool {
            assert!(self.ahead.rule.try_lock().is_some(), "whoever observes a request would wait for the file system");
            self.looks.fetch_add(1, Relaxed);
            false
        }

        fn will_read(&self, _: Range<u64>) {}

        fn wait_for(&self, _: Range<u64>) -> io::Result<()> {
            Ok(())
        }
    }

    /// Bytes that were asked for and turn out to have left memory before are no hits; counters that scrapers read do not fall.
    #[test]
    fn what_has_been_counted_does_not_fall() {
        const BLOCK: u64 = 256 << 10;
        let ahead = ReadAhead::new(64 << 20);
        let file = Lost { ahead: &ahead, looks: AtomicUsize::new(0) };
        let (mut fell, mut told) = (false, (0, 0.0));
        for i in 0..64 {
            let extent = i * BLOCK..(i + 1) * BLOCK;
            for prediction in ahead.observe(Op::Read, (1, &file), extent.clone(), 1) {
                ahead.fetched(1, prediction.extent, 10_000_000);
            }
            let hit_bytes = ahead.totals().hit_bytes;
            let tell = || {
                let state = ahead.describe();
                (state["hit_bytes"].as_u64().unwrap(), state["gained_s"].as_f64().unwrap())
            };
            let before = tell();
            ahead.waited((1, &file), &extent);
            fell |= ahead.totals().hit_bytes < hit_bytes;
            let after = tell();
            assert!(told <= before && before.0 <= after.0 && before.1 <= after.1, "{told:?} {before:?} {after:?}");
            told = after;
        }
        assert!(fell, "nothing is taken back: {:?}", ahead.totals());
    }

    #[test]
    fn no_look_at_memory_holds_the_lock() {
        const BLOCK: u64 = 256 << 10;
        let ahead = ReadAhead::new(64 << 20);
        let file = Lost { ahead: &ahead, looks: AtomicUsize::new(0) };
        for i in 0..64 {
            let extent = i * BLOCK..(i + 1) * BLOCK;
            for prediction in ahead.observe(Op::Read, (1, &file), extent.clone(), 1) {
                ahead.fetched(1, prediction.extent, 10_000_000);
            }
            ahead.waited((1, &file), &extent);
        }
        assert!(file.looks.load(Relaxed) > 0);
        assert!(ahead.totals().wasted_bytes > 0, "what is lost is found all the same: {:?}", ahead.totals());
    }
}
