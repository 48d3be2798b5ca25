//! Reads ahead of the clients: what foresight predicts of an object, and what clients say that they will read of it
//! (hints), is read into the page cache before it is asked for.
//!
//! The kernel's own read-ahead keeps one state for each open file, and a data server reads an object through one open
//! file for all clients: streams of several clients disturb one another there. Here each has a stream of its own, with an
//! account that stops it where it does not pay. Predicted extents go through the server's core as speculations: along
//! with the request that they continue, or alone while little else is under way.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use impresario_base::lock::Mutex;
use impresario_engine::now;
use impresario_foresight::{EarlierReads, Hints, Prediction, ReadingAhead, Source};
use impresario_sched::{Op, PredictedQueues};
use impresario_store::ObjectStore;
use impresario_wire::Extents;
use serde_json::{Value, json};

/// Whether a byte of an object is in the page cache.
pub(super) fn in_memory(store: &ObjectStore, file: u64, at: u64) -> bool {
    matches!(store.read_cached(file, at, &mut [0]), Some(Ok(1)))
}

/// What is read ahead, and what becomes of it.
pub(super) struct ReadAhead {
    /// What both kinds may have outstanding together, bytes.
    budget_bytes: u64,
    rule: Mutex<ReadingAhead>,
    hints: Mutex<Hints>,
    /// Hints are outstanding.
    is_hinted: AtomicBool,
    /// The rule sleeps, so that requests need not wait for its lock.
    sleeps: AtomicBool,
    /// Bytes of reads that had to wait for the device.
    waited_bytes: AtomicU64,
}

impl ReadAhead {
    /// With a bound for what is read ahead and not yet asked for.
    pub(super) fn new(budget_bytes: u64) -> ReadAhead {
        ReadAhead {
            budget_bytes,
            rule: Mutex::new(ReadingAhead::new(budget_bytes)),
            hints: Mutex::default(),
            is_hinted: AtomicBool::new(false),
            sleeps: AtomicBool::new(false),
            waited_bytes: AtomicU64::new(0),
        }
    }

    /// A client says what it will read. How many bytes are, or are to be, read ahead for it, and which of them are new.
    pub(super) fn hinted(
        &self,
        store: &ObjectStore,
        file: u64,
        extents: &Extents,
        client: u64,
    ) -> (u64, Vec<Range<u64>>) {
        let len_bytes = store.stat(file).map_or(0, |state| state.size);
        let extents = extents.iter().map(|(start, len)| start..start.saturating_add(len.into()));
        let predicted_bytes = self.rule.lock().totals().outstanding_bytes;
        self.with_hints(|hints| {
            hints.expire(now().0);
            let room_bytes = self.budget_bytes.saturating_sub(predicted_bytes + hints.totals().outstanding_bytes);
            hints.hint(client, file, extents, len_bytes, room_bytes, now().0)
        })
    }

    /// Lets the hints change; what they leave of the budget is for predictions.
    fn with_hints<T>(&self, change: impl FnOnce(&mut Hints) -> T) -> T {
        let mut hints = self.hints.lock();
        let before = hints.totals().outstanding_bytes;
        let changed = change(&mut hints);
        let outstanding_bytes = hints.totals().outstanding_bytes;
        if outstanding_bytes != before {
            self.is_hinted.store(!hints.is_empty(), Relaxed);
            self.rule.lock().set_budget(self.budget_bytes.saturating_sub(outstanding_bytes));
        }
        changed
    }

    /// A request came: what becomes of the hints of these bytes.
    fn observe_hints(&self, op: Op, file: u64, extent: Range<u64>) {
        match op {
            Op::Read => self.with_hints(|hints| hints.read(file, extent, now().0)),
            Op::Write => self.with_hints(|hints| hints.changed(file, extent)),
            Op::Truncate | Op::Unlink => self.with_hints(|hints| hints.changed(file, extent.start..u64::MAX)),
            Op::Sync => {}
        }
    }

    /// A read of these bytes waits for the device.
    pub(super) fn waited(&self, store: &ObjectStore, file: u64, extent: &Range<u64>) {
        self.waited_bytes.fetch_add(extent.end - extent.start, Relaxed);
        self.rule.lock().device_read(file, extent, |at| in_memory(store, file, at));
        self.sleeps.store(false, Relaxed);
    }

    /// A request came. What should be read ahead now, none of it beyond the object's end.
    pub(super) fn observe(
        &self,
        store: &ObjectStore,
        op: Op,
        file: u64,
        extent: Range<u64>,
        client: u64,
    ) -> Vec<Prediction> {
        if self.is_hinted.load(Relaxed) {
            self.observe_hints(op, file, extent.clone());
        }
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
            let end = store.stat(file).map_or(0, |state| state.size);
            self.rule.lock().within(&mut predictions, end);
        }
        predictions
    }

    /// Reads of earlier runs that will probably be made again; those before are forgotten.
    pub(super) fn foretell(&self, queues: Option<&PredictedQueues>) {
        // Off the lock: there may be a million.
        let earlier = queues.map(|queues| Arc::new(EarlierReads::of(queues)));
        self.rule.lock().foretell(earlier);
    }

    /// Requests will not be observed for a while: what is outstanding is forgotten, without a judgement.
    pub(super) fn rest(&self) {
        self.rule.lock().rest();
    }

    /// Predicted bytes were in memory already: the prediction gained and cost nothing.
    pub(super) fn was_there(&self, file: u64, extent: Range<u64>) {
        self.rule.lock().was_there(file, extent);
    }

    /// Predicted bytes have come into the page cache.
    pub(super) fn arrived(&self, file: u64, extent: &Range<u64>) {
        self.rule.lock().arrived(file, extent);
    }

    /// Predicted bytes were read alone from the device in so much time.
    pub(super) fn fetched(&self, file: u64, extent: Range<u64>, took_ns: u64) {
        if self.is_hinted.load(Relaxed) {
            self.hints.lock().fetched(file, extent.clone());
        }
        self.rule.lock().fetched(file, &extent, took_ns);
        self.sleeps.store(false, Relaxed);
    }

    /// For the server's status.
    pub(super) fn describe(&self) -> Value {
        let t = self.rule.lock().totals();
        let h = self.with_hints(|hints| {
            hints.expire(now().0);
            hints.totals()
        });
        json!({
            "waited_bytes": self.waited_bytes.load(Relaxed),
            "predicted_bytes": t.predicted_bytes,
            "hit_bytes": t.hit_bytes,
            "wasted_bytes": t.wasted_bytes,
            "outstanding_bytes": t.outstanding_bytes,
            "withheld_bytes": t.withheld_bytes,
            "gained_s": t.gained_ns as f64 / 1e9,
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
