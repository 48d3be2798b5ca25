//! Reads ahead of the clients: what foresight predicts of an object, and what clients say that they will read of it
//! (hints), is read into the page cache before it is asked for.
//!
//! The kernel's own read-ahead keeps one state for each open file, and a data server reads an object through one open
//! file for all clients: streams of several clients disturb one another there. Here each has a stream of its own, with an
//! account that stops it where it does not pay. Predicted extents go through the server's core as speculations: along
//! with the request that they continue, or alone while little else is under way.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use impresario_base::lock::Mutex;
use impresario_engine::now;
use impresario_foresight::{Hints, Limits, Prediction, Predictor, Source};
use impresario_sched::Op;
use impresario_store::ObjectStore;
use impresario_wire::Extents;
use serde_json::{Value, json};

/// After so many reads that all came from memory, with nothing read ahead from the device either, there is nothing to gain:
/// requests are not looked at until the next one that needs the device.
const AWAKE_READS: u32 = 512;

/// What is read ahead, and what becomes of it.
pub(super) struct ReadAhead {
    /// What both kinds may have outstanding together, bytes.
    budget_bytes: u64,
    predictor: Mutex<Predictor>,
    hints: Mutex<Hints>,
    /// Hints are outstanding.
    is_hinted: AtomicBool,
    /// Reads until it sleeps; 0: it does.
    awake: AtomicU32,
    /// Bytes of reads that had to wait for the device.
    waited_bytes: AtomicU64,
}

impl ReadAhead {
    /// With a bound for what is read ahead and not yet asked for.
    pub(super) fn new(budget_bytes: u64) -> ReadAhead {
        let predictor = Mutex::new(Predictor::new(Limits { budget_bytes, ..Limits::default() }));
        ReadAhead {
            budget_bytes,
            predictor,
            hints: Mutex::default(),
            is_hinted: AtomicBool::new(false),
            awake: AtomicU32::new(AWAKE_READS),
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
        let predicted_bytes = self.predictor.lock().totals().outstanding_bytes;
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
            self.predictor.lock().set_budget(self.budget_bytes.saturating_sub(outstanding_bytes));
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

    /// A read of so many bytes waits for the device.
    pub(super) fn waited(&self, bytes: u64) {
        self.waited_bytes.fetch_add(bytes, Relaxed);
        self.wake();
    }

    /// The device was needed.
    fn wake(&self) {
        if self.awake.load(Relaxed) != AWAKE_READS {
            self.awake.store(AWAKE_READS, Relaxed);
        }
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
        let awake = self.awake.load(Relaxed);
        if awake == 0 {
            return Vec::new();
        }
        let mut predictor = self.predictor.lock();
        if op == Op::Read {
            // Several threads at once may count one read less: it only sleeps a little later.
            self.awake.store(awake - 1, Relaxed);
            if awake == 1 {
                predictor.rest();
                return Vec::new();
            }
        }
        let mut predictions = Vec::new();
        match op {
            Op::Read => predictions = predictor.observe(Source { file, reader: client }, extent, now().0),
            Op::Write => predictor.changed(file, extent),
            Op::Truncate => predictor.changed(file, extent.start..i64::MAX as u64),
            Op::Unlink => predictor.forget(file),
            Op::Sync => {}
        }
        if predictions.is_empty() {
            return predictions;
        }
        drop(predictor);
        let end = store.stat(file).map_or(0, |state| state.size);
        if predictions.iter().any(|p| p.extent.end > end) {
            let mut predictor = self.predictor.lock();
            for prediction in &mut predictions {
                let within = prediction.extent.end.min(end).max(prediction.extent.start);
                let beyond = within..std::mem::replace(&mut prediction.extent.end, within);
                if beyond.start < beyond.end {
                    predictor.declined(prediction.file, beyond);
                }
            }
            predictor.ends_at(file, end);
            predictions.retain(|p| !p.extent.is_empty());
        }
        predictions
    }

    /// Predicted bytes were in memory already: the prediction gained and cost nothing.
    pub(super) fn was_there(&self, file: u64, extent: Range<u64>) {
        self.predictor.lock().declined(file, extent);
    }

    /// Predicted bytes were read from the device in so much time.
    pub(super) fn fetched(&self, file: u64, extent: Range<u64>, took_ns: u64) {
        self.wake();
        if self.is_hinted.load(Relaxed) {
            self.hints.lock().fetched(file, extent.clone());
        }
        self.predictor.lock().fetched(extent.end - extent.start, took_ns);
    }

    /// For the server's status.
    pub(super) fn describe(&self) -> Value {
        let t = self.predictor.lock().totals();
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
