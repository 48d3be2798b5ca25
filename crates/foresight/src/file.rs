//! The streams of one file: contiguous ones over all its readers, strided ones of each reader.
//!
//! A *run* is a range read lately without gaps, whoever read it. Requests extend runs; runs that meet become one. So a
//! sequential reader is a run that grows at its end, 32 of them are 32 runs, and processes that read a file in turns
//! (each every n-th block, in whatever order they arrive) are one run with a few islands before it. A run that keeps
//! growing is predicted to grow on, up to the next run. What does not grow is left to the readers' [`Detector`]s.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::account::Account;
use crate::detector::{Detector, STREAMS_MAX};
use crate::phases::{NextPhase, Phases};
use crate::predictor::{Prediction, Shared, Source};

/// Runs of one file.
const RUNS_MAX: usize = 64;
/// Readers of one file whose strides are looked for.
const READERS_MAX: usize = 8;
/// Predicted extents outstanding in one file.
const OUTSTANDING_MAX: usize = 512;
/// What is read again so far behind a run's end, or farther, begins a new one; of the old one this much is left, in
/// case its own reader goes on.
const AGAIN: (u64, u64) = (1 << 20, 64 << 10);
/// What is read again of a run that nobody has read for so long begins a new one wherever it is, ns.
const AGAIN_AFTER_NS: u64 = 1_000_000_000;
/// Times that a run must have grown.
const GROWN_MIN: u32 = 1;
/// Requests of the file within which a run must grow again to count as growing.
const GROWS_WITHIN: u64 = 4 * RUNS_MAX as u64;
/// Rounds that a stride's forecast must reach: it was right at least once.
const ROUNDS_MIN: u64 = 8;
/// Rounds predicted at a time.
const ROUNDS_AHEAD_MAX: u64 = 64;
/// Gaps up to here are read along by strided streams: they cost less than a request, bytes.
const GAP_BYTES: u64 = 128 << 10;
/// The least that a stream predicts at a time, bytes.
const WINDOW_BYTES_MIN: u64 = 1 << 20;
/// A prediction is late after this and four times the time it was expected to take, ns.
const LATE_NS: u64 = 1_000_000_000;

/// A range read lately without gaps; it begins at its key in the map.
#[derive(Clone, Debug)]
struct Run {
    end: u64,
    stream: u32,
    grown: u32,
    /// The last request that extended it, in requests of the file.
    extended: u64,
    /// Predicted up to here.
    predicted_to: u64,
}

/// What is known of one stream's predictions.
#[derive(Clone, Debug, Default)]
struct Ledger {
    account: Account,
    outstanding_bytes: u64,
    /// Bytes to be predicted beyond the reader; doubled as they are hit.
    window_bytes: u64,
    hit_in_window: u64,
    last_ns: u64,
    /// Nothing but the beginning of the file speaks for it so far.
    opening: bool,
    /// A moving average of the time between requests by their bytes, ps a byte.
    ps_per_byte: u64,
}

impl Ledger {
    fn request(&mut self, bytes: u64, at_ns: u64) {
        if self.last_ns > 0 {
            let ps =
                (u128::from(at_ns.saturating_sub(self.last_ns)) * 1000 / u128::from(bytes.max(1))).min(1 << 50) as u64;
            self.ps_per_byte = if self.ps_per_byte == 0 { ps } else { (self.ps_per_byte * 7 + ps) / 8 };
        }
        self.last_ns = at_ns;
        self.window_bytes = self.window_bytes.max((4 * bytes).max(WINDOW_BYTES_MIN));
    }
}

/// One reader's strides.
#[derive(Debug)]
struct Strides {
    reader: u64,
    detector: Detector,
    /// Each detector stream's number here, and how far it is predicted, in its direction.
    streams: [Option<(u32, u64)>; STREAMS_MAX],
    used: u64,
}

#[derive(Debug)]
struct Outstanding {
    end: u64,
    stream: u32,
    late_ns: u64,
}

/// One file.
#[derive(Debug, Default)]
pub(crate) struct FileStreams {
    requests: u64,
    used: bool,
    len_bytes: Option<u64>,
    runs: BTreeMap<u64, Run>,
    readers: Vec<Strides>,
    ledgers: FxHashMap<u32, Ledger>,
    next_stream: u32,
    /// By first byte, disjoint.
    outstanding: BTreeMap<u64, Outstanding>,
    /// First bytes of predictions in the order of time; some are gone already.
    order: VecDeque<u64>,
    account: Account,
    phases: Phases,
}

impl FileStreams {
    pub(crate) fn observe(
        &mut self,
        shared: &mut Shared,
        source: Source,
        extent: Range<u64>,
        at_ns: u64,
    ) -> Vec<Prediction> {
        self.requests += 1;
        self.used = true;
        self.may_grow(extent.end);
        self.phases.observe(extent.start, at_ns);
        self.account.demanded(extent.end - extent.start);
        self.expire(shared, at_ns);
        self.credit(shared, &extent);
        let mut predictions = Vec::new();
        let run = self.extend_run(shared, &extent, at_ns);
        let strided = self.observe_stride(shared, source.reader, &extent, at_ns);
        if self.account.pays() {
            let extents = match self.runs.get(&run).is_some_and(|r| r.grown >= GROWN_MIN) {
                true => self.run_ahead(shared, run),
                false => strided,
            };
            for (stream, extent) in extents {
                let predicted_to = self.predict(shared, source.file, stream, extent, at_ns, &mut predictions);
                if let Some(run) = self.runs.get_mut(&run).filter(|run| run.stream == stream) {
                    run.predicted_to = predicted_to;
                }
            }
        }
        predictions
    }

    /// The run that a request extends or begins, by its first byte.
    fn extend_run(&mut self, shared: &mut Shared, extent: &Range<u64>, at_ns: u64) -> u64 {
        let touched = self.runs.range(..=extent.start).next_back();
        let mut touched = touched.filter(|(_, run)| run.end >= extent.start).map(|(start, _)| *start);
        if let Some(start) = touched
            && self.runs.get(&start).is_some_and(|run| self.reads_again(run, extent, at_ns))
            && let Some(run) = self.runs.remove(&start)
        {
            let left = run.end - AGAIN.1.min(run.end - extent.end);
            match left < run.end {
                true => _ = self.runs.insert(left, run),
                false => self.end_stream(shared, run.stream),
            }
            touched = None;
        }
        let (start, mut run) = match touched.and_then(|start| Some((start, self.runs.remove(&start)?))) {
            Some(found) => found,
            None => {
                let stream = self.new_stream();
                let opening = extent.start == 0 && shared.openings.pays();
                if let Some(ledger) = self.ledgers.get_mut(&stream).filter(|_| opening) {
                    ledger.opening = true;
                }
                let grown = if opening { GROWN_MIN } else { 0 };
                (extent.start, Run { end: extent.start, stream, grown, extended: 0, predicted_to: 0 })
            }
        };
        let grew = touched.is_some() && extent.end > run.end;
        run.end = run.end.max(extent.end);
        while let Some((&next, _)) = self.runs.range(start..=run.end).next() {
            let Some(other) = self.runs.remove(&next) else { break };
            run.end = run.end.max(other.end);
            run.predicted_to = run.predicted_to.max(other.predicted_to);
            // One with predictions outstanding keeps its number.
            let (keep, gone) = match self.outstanding_of(run.stream) >= self.outstanding_of(other.stream) {
                true => (run.stream, other.stream),
                false => (other.stream, run.stream),
            };
            self.join(keep, gone);
            run.stream = keep;
            (run.grown, run.extended) = (run.grown.max(other.grown), run.extended.max(other.extended));
        }
        if grew {
            run.grown = if self.requests - run.extended <= GROWS_WITHIN { run.grown + 1 } else { 1 };
        }
        run.extended = self.requests;
        if let Some(ledger) = self.ledgers.get_mut(&run.stream) {
            ledger.account.demanded(extent.end - extent.start);
            ledger.request(extent.end - extent.start, at_ns);
        }
        self.runs.insert(start, run);
        if self.runs.len() > RUNS_MAX
            && let Some((&oldest, _)) = self.runs.iter().min_by_key(|(_, run)| run.extended)
            && let Some(gone) = self.runs.remove(&oldest)
        {
            self.end_stream(shared, gone.stream);
        }
        start
    }

    /// Whether a request is of a new pass over what a run holds.
    fn reads_again(&self, run: &Run, extent: &Range<u64>, at_ns: u64) -> bool {
        let idle_ns = || at_ns.saturating_sub(self.ledgers.get(&run.stream).map_or(0, |ledger| ledger.last_ns));
        extent.end + AGAIN.0 <= run.end || extent.end <= run.end && idle_ns() >= AGAIN_AFTER_NS
    }

    /// What a growing run will read next and is not predicted yet.
    fn run_ahead(&self, shared: &Shared, start: u64) -> Vec<(u32, Range<u64>)> {
        let next = self.runs.range(start + 1..).next().map(|(next, _)| *next);
        let len = self.len_bytes;
        let part = shared.part_of(self.runs.len());
        let Some(run) = self.runs.get(&start) else { return Vec::new() };
        let window = self.ledgers.get(&run.stream).map_or(0, |l| l.window_bytes.min(part));
        let from = run.predicted_to.max(run.end);
        if (from - run.end) * 2 > window {
            return Vec::new();
        }
        let to = from.saturating_add(window).min(next.unwrap_or(u64::MAX)).min(len.unwrap_or(u64::MAX));
        if from >= to {
            return Vec::new();
        }
        vec![(run.stream, from..to)]
    }

    /// Lets the reader's detector see a request; what its stride will read next and is not predicted yet.
    fn observe_stride(
        &mut self,
        shared: &mut Shared,
        reader: u64,
        extent: &Range<u64>,
        at_ns: u64,
    ) -> Vec<(u32, Range<u64>)> {
        let at = match self.readers.iter().position(|r| r.reader == reader) {
            Some(at) => at,
            None => {
                if self.readers.len() == READERS_MAX
                    && let Some(oldest) = (0..READERS_MAX).min_by_key(|i| self.readers[*i].used)
                {
                    let gone = self.readers.swap_remove(oldest);
                    gone.streams.iter().flatten().for_each(|(stream, _)| self.end_stream(shared, *stream));
                }
                self.readers.push(Strides {
                    reader,
                    detector: Detector::default(),
                    streams: [None; STREAMS_MAX],
                    used: 0,
                });
                self.readers.len() - 1
            }
        };
        let strides = &mut self.readers[at];
        strides.used = self.requests;
        let seen = strides.detector.observe(extent, GAP_BYTES);
        let number = seen.stream;
        if seen.fresh
            && let Some((stream, _)) = strides.streams[number].take()
        {
            self.end_stream(shared, stream);
            return Vec::new();
        }
        let Some(forecast) = seen.forecast.filter(|f| f.rounds() >= ROUNDS_MIN) else { return Vec::new() };
        let (stream, predicted_to) = match strides.streams[number] {
            Some(known) => known,
            None => {
                self.next_stream = self.next_stream.wrapping_add(1);
                self.ledgers.insert(self.next_stream, Ledger::default());
                (self.next_stream, if forecast.stride_bytes() > 0 { 0 } else { u64::MAX })
            }
        };
        let Some(ledger) = self.ledgers.get_mut(&stream) else { return Vec::new() };
        ledger.account.demanded(extent.end - extent.start);
        ledger.request(extent.end - extent.start, at_ns);
        let window = ledger.window_bytes.min(shared.limits.stream_bytes);
        let stride = forecast.stride_bytes().unsigned_abs();
        let reach = match forecast.is_dense() {
            true => window,
            false => stride.saturating_mul((window / forecast.round_bytes().max(1)).clamp(1, ROUNDS_AHEAD_MAX)),
        };
        // Far behind what was predicted: the reader has begun again.
        let (low, high) = (extent.start.saturating_sub(2 * reach), extent.end.saturating_add(2 * reach));
        let predicted_to = match forecast.stride_bytes() > 0 {
            true if predicted_to > high => 0,
            false if predicted_to < low => u64::MAX,
            _ => predicted_to,
        };
        let (ahead, to) = match forecast.stride_bytes() > 0 {
            true => {
                let end = extent.end.saturating_add(reach).min(self.len_bytes.unwrap_or(u64::MAX)).min(i64::MAX as u64);
                (predicted_to.max(extent.end)..end, end)
            }
            false => {
                let start = extent.start.saturating_sub(reach);
                (start..predicted_to.min(extent.start), start)
            }
        };
        strides.streams[number] = Some((stream, predicted_to));
        // Half of the reach at least, so that predictions are long and rare.
        if ahead.start >= ahead.end || (ahead.end - ahead.start) * 2 < reach {
            return Vec::new();
        }
        strides.streams[number] = Some((stream, to));
        forecast.within(ahead).into_iter().map(|piece| (stream, piece)).collect()
    }

    /// Predicts of an extent what is neither predicted nor read already, as far as the budgets allow; how far that is.
    fn predict(
        &mut self,
        shared: &mut Shared,
        file: u64,
        stream: u32,
        extent: Range<u64>,
        at_ns: u64,
        predictions: &mut Vec<Prediction>,
    ) -> u64 {
        let mut at = extent.start;
        while at < extent.end {
            if let Some(end) = self.known_until(at) {
                at = end;
                continue;
            }
            let next_run = self.runs.range(at..extent.end).next().map(|(start, _)| *start);
            let next_prediction = self.outstanding.range(at..extent.end).next().map(|(start, _)| *start);
            let end = extent.end.min(at.saturating_add(shared.limits.piece_bytes));
            let end = end.min(next_run.unwrap_or(end)).min(next_prediction.unwrap_or(end));
            let bytes = end - at;
            let Some(ledger) = self.ledgers.get_mut(&stream) else { return at };
            let hit = ledger.account.hit_bytes;
            if !ledger.account.pays()
                || self.outstanding.len() >= OUTSTANDING_MAX
                || !shared.may_predict(bytes, hit, ledger.outstanding_bytes)
            {
                shared.totals.withheld_bytes += extent.end - at;
                return at;
            }
            let distance = ledger.outstanding_bytes;
            let wait_ns = (u128::from(distance) * u128::from(ledger.ps_per_byte) / 1000).min(1 << 60) as u64;
            ledger.outstanding_bytes += bytes;
            let confidence = ledger.account.confidence();
            let late_ns = at_ns.saturating_add(LATE_NS).saturating_add(wait_ns.saturating_mul(4));
            self.outstanding.insert(at, Outstanding { end, stream, late_ns });
            self.order.push_back(at);
            shared.totals.outstanding_bytes += bytes;
            shared.totals.predicted_bytes += bytes;
            let expected_at_ns = at_ns.saturating_add(wait_ns);
            predictions.push(Prediction { file, stream, extent: at..end, expected_at_ns, confidence });
            at = end;
        }
        extent.end
    }

    /// Where the run or the prediction ends that holds this byte.
    fn known_until(&self, byte: u64) -> Option<u64> {
        let run = self.runs.range(..=byte).next_back().map(|(_, run)| run.end);
        let predicted = self.outstanding.range(..=byte).next_back().map(|(_, o)| o.end);
        run.max(predicted).filter(|end| *end > byte)
    }

    /// Predictions that a request proves right.
    fn credit(&mut self, shared: &mut Shared, extent: &Range<u64>) {
        for (stream, bytes) in self.take_outstanding(extent) {
            shared.totals.outstanding_bytes -= bytes;
            shared.totals.hit_bytes += bytes;
            let ns = shared.fetch_ns(bytes);
            shared.totals.gained_ns = shared.totals.gained_ns.saturating_add(ns);
            self.account.hit(bytes, ns);
            let Some(ledger) = self.ledgers.get_mut(&stream) else { continue };
            ledger.outstanding_bytes -= bytes;
            ledger.account.hit(bytes, ns);
            if ledger.opening {
                shared.openings.hit(bytes, ns);
                // One window shows it.
                ledger.opening = ledger.account.hit_bytes < ledger.window_bytes;
            }
            ledger.hit_in_window += bytes;
            if ledger.hit_in_window >= ledger.window_bytes {
                ledger.hit_in_window = 0;
                ledger.window_bytes = (ledger.window_bytes * 2).min(shared.limits.stream_bytes);
            }
        }
    }

    /// Predictions that are late will not come true.
    pub(crate) fn expire(&mut self, shared: &mut Shared, at_ns: u64) {
        while let Some(&start) = self.order.front() {
            match self.outstanding.get(&start) {
                Some(o) if o.late_ns > at_ns => return,
                Some(o) => {
                    let (extent, stream) = (start..o.end, o.stream);
                    self.waste(shared, stream, &extent);
                }
                None => {}
            }
            self.order.pop_front();
        }
    }

    fn waste(&mut self, shared: &mut Shared, stream: u32, extent: &Range<u64>) {
        for (_, bytes) in self.take_outstanding(extent) {
            shared.totals.outstanding_bytes -= bytes;
            shared.totals.wasted_bytes += bytes;
            let ns = shared.fetch_ns(bytes);
            shared.totals.lost_ns = shared.totals.lost_ns.saturating_add(ns);
            let stops = self.account.stops;
            self.account.wasted(bytes, ns);
            shared.totals.stops += u64::from(self.account.stops - stops);
            let Some(ledger) = self.ledgers.get_mut(&stream) else { continue };
            ledger.outstanding_bytes -= bytes;
            let stops = ledger.account.stops;
            ledger.account.wasted(bytes, ns);
            if ledger.opening {
                shared.openings.wasted(bytes, ns);
            }
            shared.totals.stops += u64::from(ledger.account.stops - stops);
            ledger.window_bytes = (ledger.window_bytes / 2).max(WINDOW_BYTES_MIN);
        }
    }

    /// Drops predictions without a judgement.
    pub(crate) fn drop_predictions(&mut self, shared: &mut Shared, extent: &Range<u64>) {
        for (stream, bytes) in self.take_outstanding(extent) {
            shared.totals.outstanding_bytes -= bytes;
            shared.totals.dropped_bytes += bytes;
            if let Some(ledger) = self.ledgers.get_mut(&stream) {
                ledger.outstanding_bytes -= bytes;
            }
        }
    }

    /// Takes the predicted bytes within an extent out: stream and bytes of each prediction.
    fn take_outstanding(&mut self, extent: &Range<u64>) -> Vec<(u32, u64)> {
        let before = self.outstanding.range(..extent.start).next_back().filter(|(_, o)| o.end > extent.start);
        let within = self.outstanding.range(extent.clone());
        let found: Vec<u64> = before.into_iter().chain(within).map(|(start, _)| *start).collect();
        let mut taken = Vec::with_capacity(found.len());
        for start in found {
            let Some(o) = self.outstanding.remove(&start) else { continue };
            let inside = start.max(extent.start)..o.end.min(extent.end);
            taken.push((o.stream, inside.end - inside.start));
            if start < inside.start {
                self.outstanding.insert(start, Outstanding { end: inside.start, ..o });
            }
            if inside.end < o.end {
                self.order.push_back(inside.end);
                self.outstanding.insert(inside.end, o);
            }
        }
        // Entries of predictions that are gone leave at the front or here.
        if self.order.len() > 4 * OUTSTANDING_MAX {
            self.order.retain(|start| self.outstanding.contains_key(start));
        }
        taken
    }

    fn new_stream(&mut self) -> u32 {
        self.next_stream = self.next_stream.wrapping_add(1);
        self.ledgers.insert(self.next_stream, Ledger::default());
        self.next_stream
    }

    fn outstanding_of(&self, stream: u32) -> u64 {
        self.ledgers.get(&stream).map_or(0, |l| l.outstanding_bytes)
    }

    /// Two streams have met and are one.
    fn join(&mut self, keep: u32, gone: u32) {
        let Some(other) = self.ledgers.remove(&gone) else { return };
        if other.outstanding_bytes > 0 {
            self.outstanding.values_mut().filter(|o| o.stream == gone).for_each(|o| o.stream = keep);
        }
        if let Some(ledger) = self.ledgers.get_mut(&keep) {
            ledger.account.join(&other.account);
            ledger.outstanding_bytes += other.outstanding_bytes;
            ledger.window_bytes = ledger.window_bytes.max(other.window_bytes);
            ledger.last_ns = ledger.last_ns.max(other.last_ns);
            ledger.ps_per_byte = if ledger.ps_per_byte == 0 { other.ps_per_byte } else { ledger.ps_per_byte };
        }
    }

    /// A stream is forgotten: what it predicted will not come true.
    fn end_stream(&mut self, shared: &mut Shared, stream: u32) {
        if self.outstanding_of(stream) > 0 {
            let of = self.outstanding.iter().filter(|(_, o)| o.stream == stream);
            let extents: Vec<Range<u64>> = of.map(|(start, o)| *start..o.end).collect();
            extents.iter().for_each(|extent| self.waste(shared, stream, extent));
        }
        self.ledgers.remove(&stream);
    }

    /// The file is forgotten.
    pub(crate) fn end(&mut self, shared: &mut Shared, at_ns: u64) {
        self.expire(shared, at_ns);
        let streams: Vec<u32> = self.ledgers.keys().copied().collect();
        streams.into_iter().for_each(|stream| self.end_stream(shared, stream));
    }

    pub(crate) fn ends_at(&mut self, len_bytes: u64) {
        self.len_bytes = Some(len_bytes);
    }

    /// The file reaches this far at least.
    pub(crate) fn may_grow(&mut self, end: u64) {
        if self.len_bytes.is_some_and(|len| len < end) {
            self.len_bytes = None;
        }
    }

    pub(crate) fn take_used(&mut self) -> bool {
        std::mem::take(&mut self.used)
    }

    pub(crate) fn next_phase(&self) -> Option<NextPhase> {
        self.phases.next()
    }

    #[cfg(test)]
    pub(crate) fn check(&self) -> u64 {
        let outstanding: u64 = self.outstanding.iter().map(|(start, o)| o.end - start).sum();
        assert_eq!(outstanding, self.ledgers.values().map(|l| l.outstanding_bytes).sum::<u64>());
        let disjoint = |(a, b): ((&u64, u64), (&u64, u64))| a.1 <= *b.0;
        let ranges = || self.outstanding.iter().map(|(s, o)| (s, o.end));
        assert!(ranges().zip(ranges().skip(1)).all(disjoint));
        let runs = || self.runs.iter().map(|(s, r)| (s, r.end));
        assert!(runs().zip(runs().skip(1)).all(disjoint));
        assert!(self.runs.len() <= RUNS_MAX && self.readers.len() <= READERS_MAX);
        assert!(self.ledgers.len() <= RUNS_MAX + READERS_MAX * STREAMS_MAX);
        assert!(self.order.len() <= 4 * OUTSTANDING_MAX + OUTSTANDING_MAX);
        assert!(self.outstanding.keys().all(|start| self.order.contains(start)));
        outstanding
    }
}
