//! The streams of one file: contiguous ones over all its readers, strided ones of each reader.
//!
//! A *run* is a range read lately without gaps, by any reader. Requests extend runs; runs that meet become one. So a
//! sequential reader is a run that grows at its end, 32 of them are 32 runs, and processes that read a file in turns
//! (each every n-th block, in whatever order they arrive) are one run with islands before it. A run that keeps
//! growing is predicted to grow on beyond its islands, up to the next run. What does not grow is left to the readers'
//! [`Detector`](crate::Detector)s. Before both come [`turns`], which several readers with the same step show, or
//! [`interleaved`] sequences where readers are not told apart.

mod following;
mod interleaved;
mod ledger;
mod runs;
pub(crate) mod strides;
mod turns;

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::account::Account;
use crate::outstanding::{Outstanding, Taken};
use crate::phases::Phases;
use crate::predictor::{Prediction, Shared, Source};
use following::Following;
use interleaved::Interleaved;
use ledger::{Ledger, WINDOW_BYTES_MIN};
use runs::Run;
use strides::Strides;
use turns::Turns;

/// Runs of one file: of any file, and as long as all files together are below [`RUNS_OF_ALL`].
const RUNS_MAX: (usize, usize) = (64, 1024);
/// Runs of all files beyond which a file with more than its part gives one up for a new one.
pub(crate) const RUNS_OF_ALL: usize = 32 << 10;
/// Runs among which the one that was touched longest ago makes room.
const SAMPLED: usize = 8;
/// Times that a run must have grown: where as many runs do not and fewer do, neighbours may be there by chance.
const GROWN_MIN: u32 = 1;
const GROWN_MIN_BY_CHANCE: u32 = 3;
const LONE_RUNS: usize = 16;
/// A prediction is late after this and four times the time in which its stream will have read all of it, ns.
const LATE_NS: u64 = 1_000_000_000;
/// The same where the stream's pace is not known yet.
const LATE_UNKNOWN_NS: u64 = 4_000_000_000;

/// What a prediction goes by.
#[derive(Clone, Copy)]
struct Basis {
    file: u64,
    stream: u32,
    /// The readers have begun again since: what was read before may be read again, and may have left memory.
    since_ns: u64,
    /// When it is late, unless the stream's pace decides.
    late_ns: Option<u64>,
}

/// One file.
#[derive(Debug, Default)]
pub(crate) struct FileStreams {
    requests: u64,
    used: bool,
    len_bytes: Option<u64>,
    runs: BTreeMap<u64, Run>,
    /// Ranges that they consist of.
    ranges: usize,
    /// Runs that grow.
    growing: usize,
    /// Where the next runs are sampled.
    hand: u64,
    readers: Vec<Strides>,
    /// In which several readers together read all.
    turns: Vec<Turns>,
    interleaved: Interleaved,
    ledgers: FxHashMap<u32, Ledger>,
    next_stream: u32,
    outstanding: Outstanding,
    /// Of all streams but what an earlier run foretells.
    account: Account,
    phases: Phases,
    /// Of an earlier run.
    following: Following,
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
        self.phases.observe(at_ns);
        self.account.demanded(extent.end - extent.start);
        self.expire(shared, at_ns);
        self.credit(shared, &extent);
        let mut predictions = Vec::new();
        let is_again = self.is_read(&extent, at_ns);
        let run = self.extend_run(shared, &extent, at_ns);
        let grown_min = if self.is_chancy() { GROWN_MIN_BY_CHANCE } else { GROWN_MIN };
        let (grows, has_front) = self.runs.get(&run).map_or((false, false), |r| (r.grown >= grown_min, r.has_front()));
        let strided = self.observe_stride(shared, source.reader, &extent, (at_ns, is_again), !grows);
        let any = self.interleaved.observe(&extent, self.requests);
        let any = strided.is_several.then_some(any);
        let follows = self.follow(shared, source.file, &extent, (at_ns, is_again));
        if follows {
            self.foretell(shared, source.file, at_ns, &mut predictions);
        } else if self.account.pays() {
            // A series that ends soon is contiguous, too; but where others fill the gaps, it is all read.
            let (extents, since_ns) = match self.in_turns(shared, (strided.reader, any), &extent, at_ns) {
                Some(ahead) => (ahead, strided.again_ns),
                None if grows && (has_front || !strided.is_nested) => {
                    (self.run_ahead(shared, run, extent.end - extent.start, at_ns), 0)
                }
                None => (strided.extents, strided.again_ns),
            };
            for (stream, extent) in extents {
                let (by, end) = (Basis { file: source.file, stream, since_ns, late_ns: None }, extent.end);
                let predicted_to = self.predict(shared, by, extent, at_ns, &mut predictions);
                if predicted_to < end {
                    self.turns_predicted_to(stream, predicted_to);
                }
                if let Some(run) = self.runs.get_mut(&run).filter(|run| run.stream == stream) {
                    run.predicted_to = predicted_to;
                }
            }
        }
        predictions
    }

    /// So many runs do not grow that others may by chance.
    fn is_chancy(&self) -> bool {
        self.runs.len() - self.growing > LONE_RUNS.max(self.growing)
    }

    /// The run that a request extends or begins, by its first byte.
    fn extend_run(&mut self, shared: &mut Shared, extent: &Range<u64>, at_ns: u64) -> u64 {
        let bytes = extent.end - extent.start;
        let touched = self.runs.range(..=extent.start).next_back();
        let touched = touched.filter(|(_, run)| run.reaches() >= extent.start).map(|(start, _)| *start);
        let (mut found, mut ended) = (None, None);
        if let Some(start) = touched
            && let Some(mut run) = self.take_run(shared, start)
        {
            match run.left_of(extent, at_ns) {
                None if extent.start > run.end && run.is_over(at_ns) => {
                    run.leave_islands();
                    self.put_run(shared, start, run);
                }
                None => found = Some((start, run)),
                Some(left) if left < run.end => self.put_run(shared, left, run),
                Some(_) => {
                    ended = Some(run.end);
                    self.end_stream(shared, run.stream);
                }
            }
        }
        let (start, mut run) = match found {
            Some((start, mut run)) => {
                run.read(extent, at_ns);
                (start, self.take_in_reach(shared, (start, run), bytes, at_ns))
            }
            None => {
                let mut run = Run::new(extent.start, self.new_stream(), at_ns);
                if extent.start == 0 && shared.openings.pays() {
                    run.grown = GROWN_MIN;
                    if let Some(ledger) = self.ledgers.get_mut(&run.stream) {
                        ledger.opening = true;
                    }
                }
                (run.end, run.ended) = (extent.end, ended);
                (extent.start, self.take_in_reach(shared, (extent.start, run), bytes, at_ns))
            }
        };
        run.touched_ns = at_ns;
        if let Some(ledger) = self.ledgers.get_mut(&run.stream) {
            if run.grown >= GROWN_MIN {
                shared.stream_lives(&mut ledger.lives, at_ns);
            }
            ledger.account.demanded(bytes);
            ledger.request(bytes, at_ns);
        }
        if self.ranges >= RUNS_MAX.1 || self.ranges >= RUNS_MAX.0 && shared.runs >= RUNS_OF_ALL {
            self.drop_a_run(shared);
        }
        self.put_run(shared, start, run);
        start
    }

    /// A run that a request of `bytes` has extended takes in those that it reaches now.
    fn take_in_reach(&mut self, shared: &mut Shared, (start, mut run): (u64, Run), bytes: u64, at_ns: u64) -> Run {
        while let Some((&next, _)) = self.runs.range(start..=run.reaches()).next() {
            let Some(mut other) = self.take_run(shared, next) else { break };
            if next > run.end && other.is_over(at_ns) {
                self.end_stream(shared, other.stream);
                continue;
            }
            run.take(next, &mut other, bytes);
            // One with predictions outstanding keeps its number.
            let (keep, gone) = match self.outstanding_of(run.stream) >= self.outstanding_of(other.stream) {
                true => (run.stream, other.stream),
                false => (other.stream, run.stream),
            };
            self.join(shared, keep, gone);
            run.stream = keep;
        }
        run
    }

    fn take_run(&mut self, shared: &mut Shared, start: u64) -> Option<Run> {
        let run = self.runs.remove(&start)?;
        shared.runs -= run.ranges();
        self.ranges -= run.ranges();
        self.growing -= usize::from(run.grown >= GROWN_MIN);
        Some(run)
    }

    fn put_run(&mut self, shared: &mut Shared, start: u64, run: Run) {
        shared.runs += run.ranges();
        self.ranges += run.ranges();
        self.growing += usize::from(run.grown >= GROWN_MIN);
        self.runs.insert(start, run);
    }

    /// Forgets the run that was touched longest ago, of a few; each time others.
    fn drop_a_run(&mut self, shared: &mut Shared) {
        let sample = self.runs.range(self.hand..).chain(self.runs.range(..self.hand)).take(SAMPLED);
        let sample: Vec<(u64, u64)> = sample.map(|(start, run)| (run.touched_ns, *start)).collect();
        self.hand = sample.last().map_or(0, |(_, start)| start + 1);
        if let Some((_, oldest)) = sample.into_iter().min()
            && let Some(gone) = self.take_run(shared, oldest)
        {
            self.end_stream(shared, gone.stream);
        }
    }

    /// What a growing run will read next and is not predicted yet, in whole requests as long as the last one.
    fn run_ahead(&self, shared: &Shared, start: u64, request_bytes: u64, at_ns: u64) -> Vec<(u32, Range<u64>)> {
        let len = self.len_bytes;
        let Some(run) = self.runs.get(&start) else { return Vec::new() };
        let Some(ledger) = self.ledgers.get(&run.stream) else { return Vec::new() };
        let (wanted, part) = (ledger.window_bytes, shared.part(self.growing));
        // Islands may be there by chance, until predictions beyond them have come true.
        let has_front = run.has_front() && !self.is_chancy();
        let is_proven = !has_front || ledger.account.hit_bytes >= WINDOW_BYTES_MIN;
        let wanted = if is_proven { wanted } else { wanted.min(4 * request_bytes) };
        let window = (wanted.min(part) / request_bytes).max(1).saturating_mul(request_bytes);
        let front = if has_front { run.predicts_from() } else { run.end };
        let from = run.predicted_to.max(run.end);
        // Before the stream waits for it; but where there is too little room for all, one long piece beats two short ones.
        let left_max = if part < wanted { 0 } else { window / 2 };
        if from.saturating_sub(front) > left_max {
            return Vec::new();
        }
        let to = from.max(front).saturating_add(window).min(len.unwrap_or(u64::MAX));
        let to = run.ended.filter(|ended| run.end <= *ended).map_or(to, |ended| to.min(ended));
        // What does not grow itself is others' on the same way.
        let in_the_way = |other: &Run| !has_front || other.grown >= GROWN_MIN_BY_CHANCE;
        let to = run.next_island(front..to.max(front)).unwrap_or(to);
        let to = self
            .runs
            .range(front..to.max(front))
            .find(|(_, r)| !r.is_over(at_ns) && in_the_way(r))
            .map_or(to, |(s, _)| *s);
        if from >= to {
            return Vec::new();
        }
        vec![(run.stream, from..to)]
    }

    /// Predicts of an extent what is neither predicted nor read already, as far as the budgets allow; how far that is.
    fn predict(
        &mut self,
        shared: &mut Shared,
        Basis { file, stream, since_ns, late_ns }: Basis,
        extent: Range<u64>,
        at_ns: u64,
        predictions: &mut Vec<Prediction>,
    ) -> u64 {
        let mut at = extent.start;
        while at < extent.end {
            if let Some(end) = self.known_until(at, (at_ns, since_ns)) {
                at = end;
                continue;
            }
            let next_read = self.next_read(at..extent.end, (at_ns, since_ns));
            let next_prediction = self.outstanding.first_within(at..extent.end);
            let end = extent.end.min(at.saturating_add(shared.limits.piece_bytes));
            let end = end.min(next_read.unwrap_or(end)).min(next_prediction.unwrap_or(end));
            let bytes = end - at;
            let Some(ledger) = self.ledgers.get_mut(&stream) else { return at };
            let hit = ledger.account.hit_bytes;
            if !ledger.account.pays()
                || self.outstanding.is_full()
                || !shared.may_predict(bytes, hit, ledger.account.wasted_bytes + ledger.outstanding_bytes)
            {
                shared.totals.withheld_bytes += extent.end - at;
                return at;
            }
            let wait_ns = ledger.time_ns(ledger.outstanding_bytes);
            ledger.outstanding_bytes += bytes;
            let confidence = ledger.account.confidence();
            let patience_ns = match ledger.ps_per_byte {
                0 => LATE_UNKNOWN_NS,
                _ => LATE_NS.saturating_add(ledger.time_ns(ledger.outstanding_bytes).saturating_mul(4)),
            };
            let late_ns = late_ns.unwrap_or(at_ns.saturating_add(patience_ns));
            self.outstanding.add(at..end, stream, late_ns);
            shared.totals.outstanding_bytes += bytes;
            shared.totals.predicted_bytes += bytes;
            let expected_at_ns = at_ns.saturating_add(wait_ns);
            predictions.push(Prediction { file, stream, extent: at..end, expected_at_ns, confidence });
            at = end;
        }
        extent.end
    }

    /// The first byte of these that was [read lately](Run::is_fresh).
    fn next_read(&self, within: Range<u64>, when: (u64, u64)) -> Option<u64> {
        let before = self.runs.range(..within.start).next_back().map(|(_, run)| run);
        let island = before.filter(|run| run.is_fresh(when)).and_then(|run| run.next_island(within.clone()));
        island.or_else(|| self.runs.range(within).find(|(_, run)| run.is_fresh(when)).map(|(start, _)| *start))
    }

    /// Where the range ends that holds this byte and was [read lately](Run::is_fresh).
    fn read_until(&self, byte: u64, when: (u64, u64)) -> Option<u64> {
        let run = self.runs.range(..=byte).next_back().map(|(_, run)| run).filter(|run| run.is_fresh(when));
        run.and_then(|run| run.known_until(byte))
    }

    /// Where the run or the prediction ends that holds this byte.
    fn known_until(&self, byte: u64, when: (u64, u64)) -> Option<u64> {
        self.read_until(byte, when).max(self.outstanding.last_end(byte)).filter(|end| *end > byte)
    }

    /// All of an extent was read lately.
    fn is_read(&self, extent: &Range<u64>, at_ns: u64) -> bool {
        self.read_until(extent.start, (at_ns, 0)).is_some_and(|end| end >= extent.end)
    }

    /// Predictions that a request proves right.
    fn credit(&mut self, shared: &mut Shared, extent: &Range<u64>) {
        self.outstanding.forget_expected(extent);
        for taken in self.outstanding.take(extent) {
            let (stream, bytes) = (taken.stream, taken.bytes());
            let hit: fn(&mut Account, u64, u64) = if taken.is_late { Account::hit_late } else { Account::hit };
            self.leaves(shared, &taken);
            self.outstanding.expect(taken);
            shared.totals.hit_bytes += bytes;
            let ns = shared.fetch_ns(bytes);
            shared.totals.gained_ns = shared.totals.gained_ns.saturating_add(ns);
            let of_all = if stream == self.following.stream { &mut shared.followers } else { &mut self.account };
            hit(of_all, bytes, ns);
            let Some(ledger) = self.ledgers.get_mut(&stream) else { continue };
            hit(&mut ledger.account, bytes, ns);
            if ledger.opening {
                hit(&mut shared.openings, bytes, ns);
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

    /// Predictions that are late will hardly come true. Accounts are judged at once; but what is in memory is there for a while
    /// to come, and a program that computes between its reads may go on where it stopped.
    pub(crate) fn expire(&mut self, shared: &mut Shared, at_ns: u64) {
        while let Some((extent, stream)) = self.outstanding.next_late(at_ns) {
            if self.is_early(stream, &extent, at_ns) {
                continue;
            }
            let arrived = extent.start..self.outstanding.arrived_to(extent.start);
            if arrived.end < extent.end {
                self.waste(shared, stream, &(arrived.end..extent.end));
            }
            if arrived.is_empty() {
                continue;
            }
            let bytes = arrived.end - arrived.start;
            self.outstanding.stays_late(arrived.start);
            shared.totals.outstanding_bytes -= bytes;
            shared.totals.late_bytes += bytes;
            if let Some(ledger) = self.ledgers.get_mut(&stream) {
                ledger.outstanding_bytes -= bytes;
                ledger.late_bytes += bytes;
            }
            self.judge(shared, stream, bytes, Account::wasted);
        }
        while let Some((extent, stream)) = self.outstanding.next_given_up(at_ns, &self.phases) {
            self.waste(shared, stream, &extent);
        }
    }

    fn waste(&mut self, shared: &mut Shared, stream: u32, extent: &Range<u64>) {
        for taken in self.outstanding.take(extent) {
            self.leaves(shared, &taken);
            self.count_wasted(shared, stream, taken.bytes());
            if !taken.is_late {
                self.judge(shared, stream, taken.bytes(), Account::wasted);
            }
        }
    }

    /// Predicted bytes are neither outstanding nor late any more.
    fn leaves(&mut self, shared: &mut Shared, taken: &Taken) {
        let of = |outstanding: &mut u64, late: &mut u64| {
            let bytes = if taken.is_late { late } else { outstanding };
            *bytes -= taken.bytes();
        };
        of(&mut shared.totals.outstanding_bytes, &mut shared.totals.late_bytes);
        if let Some(ledger) = self.ledgers.get_mut(&taken.stream) {
            of(&mut ledger.outstanding_bytes, &mut ledger.late_bytes);
        }
    }

    fn count_wasted(&mut self, shared: &mut Shared, stream: u32, bytes: u64) {
        shared.totals.wasted_bytes += bytes;
        shared.totals.lost_ns = shared.totals.lost_ns.saturating_add(shared.fetch_ns(bytes));
        if let Some(ledger) = self.ledgers.get_mut(&stream) {
            ledger.window_bytes = (ledger.window_bytes / 2).max(WINDOW_BYTES_MIN);
        }
    }

    fn judge(&mut self, shared: &mut Shared, stream: u32, bytes: u64, judge: fn(&mut Account, u64, u64)) {
        let ns = shared.fetch_ns(bytes);
        let of_all = if stream == self.following.stream { &mut shared.followers } else { &mut self.account };
        let stops = of_all.stops;
        judge(of_all, bytes, ns);
        shared.totals.stops += u64::from(of_all.stops - stops);
        let Some(ledger) = self.ledgers.get_mut(&stream) else { return };
        let stops = ledger.account.stops;
        judge(&mut ledger.account, bytes, ns);
        if ledger.opening {
            judge(&mut shared.openings, bytes, ns);
        }
        shared.totals.stops += u64::from(ledger.account.stops - stops);
    }

    /// Predicted bytes are in memory.
    pub(crate) fn arrived(&mut self, extent: &Range<u64>) {
        self.outstanding.arrived(extent);
    }

    /// A read of these bytes needed the device. What had arrived of them and is not in memory left it unused, and with it
    /// what was asked for together with it.
    pub(crate) fn missed(&mut self, shared: &mut Shared, extent: &Range<u64>, in_memory: &dyn Fn(u64) -> bool) {
        for taken in self.outstanding.take_lost(extent, in_memory) {
            let (stream, bytes) = (taken.stream, taken.bytes());
            let ns = shared.fetch_ns(bytes);
            shared.totals.hit_bytes = shared.totals.hit_bytes.saturating_sub(bytes);
            shared.totals.gained_ns = shared.totals.gained_ns.saturating_sub(ns);
            self.count_wasted(shared, stream, bytes);
            self.judge(shared, stream, bytes, Account::lost);
            // The kernel reads on from here and would hide that the rest is gone, too.
            let gone = self.outstanding.gone_of(stream, in_memory);
            gone.iter().for_each(|extent| self.waste(shared, stream, extent));
        }
    }

    /// Looks at memory where [`missed`](Self::missed) would; changes nothing.
    pub(crate) fn look_for_missed(&self, extent: &Range<u64>, in_memory: &dyn Fn(u64) -> bool) {
        self.outstanding.look_for_lost(extent, in_memory);
    }

    /// Drops predictions without a judgement; late ones are judged already.
    pub(crate) fn drop_predictions(&mut self, shared: &mut Shared, extent: &Range<u64>) {
        self.outstanding.forget_expected(extent);
        for taken in self.outstanding.take(extent) {
            self.leaves(shared, &taken);
            match taken.is_late {
                true => self.count_wasted(shared, taken.stream, taken.bytes()),
                false => shared.totals.dropped_bytes += taken.bytes(),
            }
        }
    }

    fn new_stream(&mut self) -> u32 {
        self.next_stream = self.next_stream.wrapping_add(1);
        self.ledgers.insert(self.next_stream, Ledger::default());
        self.next_stream
    }

    /// Bytes that a stream has outstanding or late.
    fn outstanding_of(&self, stream: u32) -> u64 {
        self.ledgers.get(&stream).map_or(0, |l| l.outstanding_bytes + l.late_bytes)
    }

    /// Two streams have met and are one.
    fn join(&mut self, shared: &mut Shared, keep: u32, gone: u32) {
        let Some(other) = self.ledgers.remove(&gone) else { return };
        if other.outstanding_bytes + other.late_bytes > 0 {
            self.outstanding.join(keep, gone);
        }
        if let Some(ledger) = self.ledgers.get_mut(&keep) {
            shared.streams_meet(ledger.lives, other.lives);
            ledger.account.join(&other.account);
            ledger.outstanding_bytes += other.outstanding_bytes;
            ledger.late_bytes += other.late_bytes;
            ledger.window_bytes = ledger.window_bytes.max(other.window_bytes);
            ledger.last_ns = ledger.last_ns.max(other.last_ns);
            ledger.ps_per_byte = if ledger.ps_per_byte == 0 { other.ps_per_byte } else { ledger.ps_per_byte };
        }
    }

    /// A stream is forgotten: what it predicted will not come true.
    fn end_stream(&mut self, shared: &mut Shared, stream: u32) {
        if self.outstanding_of(stream) > 0 {
            self.outstanding.of(stream).iter().for_each(|extent| self.waste(shared, stream, extent));
        }
        self.ledgers.remove(&stream);
    }

    /// The file is forgotten.
    pub(crate) fn end(&mut self, shared: &mut Shared, at_ns: u64) {
        self.expire(shared, at_ns);
        let streams: Vec<u32> = self.ledgers.keys().copied().collect();
        streams.into_iter().for_each(|stream| self.end_stream(shared, stream));
        self.leave(shared);
    }

    /// It counts no longer among all files.
    pub(crate) fn leave(&self, shared: &mut Shared) {
        shared.runs -= self.ranges;
        shared.readers -= self.readers.len();
        shared.followed -= usize::from(self.following.agrees);
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

    #[cfg(test)]
    pub(crate) fn runs_and_readers(&self) -> (usize, usize) {
        (self.ranges, self.readers.len())
    }

    #[cfg(test)]
    pub(crate) fn check(&self) -> (u64, u64) {
        let (outstanding, late) = self.outstanding.check();
        let of_ledgers = |bytes: fn(&Ledger) -> u64| self.ledgers.values().map(bytes).sum::<u64>();
        assert_eq!((outstanding, late), (of_ledgers(|l| l.outstanding_bytes), of_ledgers(|l| l.late_bytes)));
        // In one pass: tests check thousands of runs after every read.
        let (mut front, mut ranges, mut growing) = (0, 0, 0);
        for (start, run) in &self.runs {
            run.check();
            assert!(front <= *start);
            front = run.front();
            ranges += run.ranges();
            growing += usize::from(run.grown >= GROWN_MIN);
        }
        assert_eq!((self.ranges, self.growing), (ranges, growing));
        assert!(self.runs.len() <= RUNS_MAX.1 && self.readers.len() <= strides::READERS_MAX.1);
        assert!(
            self.ledgers.len()
                <= self.runs.len() + self.readers.len() * crate::detector::STREAMS_MAX + 1 + self.turns.len()
        );
        (outstanding, late)
    }
}
