//! Reads ahead of the clients: what foresight predicts of an object is read into the page cache before it is asked for.
//!
//! The kernel's own read-ahead keeps one state for each open file, and a data server reads an object through one open
//! file for all clients: streams of several clients disturb one another there. Here each has a stream of its own, with an
//! account that stops it where it does not pay. Predicted extents go through the server's core as speculations: along
//! with the request that they continue, or alone while little else is under way.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use impresario_base::lock::Mutex;
use impresario_engine::now;
use impresario_foresight::{Limits, Prediction, Predictor, Source};
use impresario_sched::Op;
use impresario_store::ObjectStore;
use serde_json::{Value, json};

/// After so many reads that all came from memory, with nothing read ahead from the device either, there is nothing to gain:
/// requests are not looked at until the next one that needs the device.
const AWAKE_READS: u32 = 512;

/// What is read ahead, and what becomes of it.
pub(super) struct ReadAhead {
    predictor: Mutex<Predictor>,
    /// Reads until it sleeps; 0: it does.
    awake: AtomicU32,
}

impl ReadAhead {
    /// With a bound for what is read ahead and not yet asked for.
    pub(super) fn new(budget_bytes: u64) -> ReadAhead {
        let predictor = Mutex::new(Predictor::new(Limits { budget_bytes, ..Limits::default() }));
        ReadAhead { predictor, awake: AtomicU32::new(AWAKE_READS) }
    }

    /// The device was needed for a read.
    pub(super) fn device_read(&self) {
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
                    predictor.declined(&Prediction { extent: beyond, ..prediction.clone() });
                }
            }
            predictor.ends_at(file, end);
            predictions.retain(|p| !p.extent.is_empty());
        }
        predictions
    }

    /// Predicted bytes were read from the device in so much time.
    pub(super) fn fetched(&self, bytes: u64, took_ns: u64) {
        self.device_read();
        self.predictor.lock().fetched(bytes, took_ns);
    }

    /// For the server's status.
    pub(super) fn describe(&self) -> Value {
        let t = self.predictor.lock().totals();
        json!({
            "predicted_bytes": t.predicted_bytes,
            "hit_bytes": t.hit_bytes,
            "wasted_bytes": t.wasted_bytes,
            "outstanding_bytes": t.outstanding_bytes,
            "withheld_bytes": t.withheld_bytes,
            "gained_s": t.gained_ns as f64 / 1e9,
            "lost_s": t.lost_ns as f64 / 1e9,
            "stopped": t.stops,
        })
    }
}
