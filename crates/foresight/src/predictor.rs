//! What will be asked of many files, each read by any number of clients: the streams of an object that its data server
//! sees interleaved, strides of single readers, phases.
//!
//! An observation costs time logarithmic in the streams of the file; memory is bounded by [`Limits`]. What may be
//! predicted is bounded twice: each stream has an account that stops it where it does not pay, and of all bytes demanded
//! only a share may be wasted.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::PAGE_BYTES;
use crate::account::Account;
use crate::earlier::EarlierReads;
use crate::file::FileStreams;

/// Bytes that may be wasted, or outstanding without any hit yet, before shares of what was demanded count.
const SLACK_BYTES: u64 = 32 << 20;
/// Streams are counted over so long, ns.
const BEAT_NS: u64 = 2_000_000_000;
/// An earlier run is trusted after this many of the bytes that it predicted were read.
const TRUSTED_BYTES: u64 = 1 << 20;
/// When the waste is used up, a stream may still have this part of its own hits outstanding or wasted.
const PROVEN_PART: u64 = 50;

/// Bounds of a [`Predictor`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Longest predicted extent, bytes; at least a page. Default: 4 MiB.
    pub piece_bytes: u64,
    /// Predicted and not yet read, bytes: of one stream. Default: 4 MiB.
    pub stream_bytes: u64,
    /// The same of all streams together. Default: 64 MiB.
    pub budget_bytes: u64,
    /// Files remembered; the one idle longest is forgotten first. Together they take up to 60 MiB, when many are read in
    /// strides by many readers each. Default: 512.
    pub files: usize,
    /// Bytes that may be wasted of a hundred demanded, beyond a constant of 32 MiB; streams that were
    /// right so far may add two. Default: 3.
    pub waste_percent: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { piece_bytes: 4 << 20, stream_bytes: 4 << 20, budget_bytes: 64 << 20, files: 512, waste_percent: 3 }
    }
}

/// Whose request it is. Requests of one file are compared with one another whichever reader they have; a reader's own
/// strides are looked for as well.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Source {
    /// The file or object.
    pub file: u64,
    /// A client, process or connection.
    pub reader: u64,
}

/// An extent that will probably be asked for. It counts as outstanding until it is read, written, late or
/// [declined](Predictor::declined).
#[derive(Clone, PartialEq, Debug)]
pub struct Prediction {
    /// Of this file.
    pub file: u64,
    /// The stream that it belongs to, unique within the file.
    pub stream: u32,
    /// The bytes, never empty.
    pub extent: Range<u64>,
    /// When it will be asked for at the stream's present pace.
    pub expected_at_ns: u64,
    /// How likely that is, 0 to 1: the share of the stream's predictions that came true.
    pub confidence: f64,
}

/// Sums over all streams since the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Bytes observed.
    pub demand_bytes: u64,
    /// Bytes predicted.
    pub predicted_bytes: u64,
    /// Of these, bytes read afterwards.
    pub hit_bytes: u64,
    /// Of these, bytes not read and given up, or no longer in memory when they were read.
    pub wasted_bytes: u64,
    /// Of these, bytes in memory that were not read in time, and may be yet. Until then they count as wasted for whatever
    /// is predicted.
    pub late_bytes: u64,
    /// Of these, bytes that a write or a truncation covered, or that were declined.
    pub dropped_bytes: u64,
    /// Of these, bytes still to come.
    pub outstanding_bytes: u64,
    /// Device time of the bytes hit, as far as [`Predictor::fetched`] was called.
    pub gained_ns: u64,
    /// Device time of the bytes wasted.
    pub lost_ns: u64,
    /// Times that an account was stopped.
    pub stops: u64,
    /// Bytes that were not predicted because a budget was used up.
    pub withheld_bytes: u64,
}

/// What all files share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) totals: Totals,
    /// Device time of a byte read ahead, a moving average, ps.
    pub(crate) fetch_ps_per_byte: u64,
    /// Of predictions that a file's first read alone gave rise to, because it began where the file does.
    pub(crate) openings: Account,
    /// Runs and readers of all files.
    pub(crate) runs: usize,
    pub(crate) readers: usize,
    /// Of an earlier run, and how often they were exchanged.
    pub(crate) earlier: (Option<Arc<EarlierReads>>, u32),
    /// Files that follow them, and what became of what they were foretold.
    pub(crate) followed: usize,
    pub(crate) followers: Account,
    /// Streams seen in this interval of [`BEAT_NS`] and in the one before.
    streams: (usize, usize),
    beat: u64,
}

impl Shared {
    pub(crate) fn fetch_ns(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(self.fetch_ps_per_byte) / 1000) as u64
    }

    /// What may be outstanding of all streams, bytes: the slack and what was hit, so that an unknown load is approached
    /// in steps.
    fn outstanding_max(&self) -> u64 {
        (SLACK_BYTES + self.totals.hit_bytes).min(self.limits.budget_bytes)
    }

    /// A stream that is predicted is seen: it counts once in each interval. `lives`: the last one in which it did, and one more.
    pub(crate) fn stream_lives(&mut self, lives: &mut u64, at_ns: u64) {
        let beat = at_ns / BEAT_NS;
        if beat != self.beat {
            self.streams = (0, if beat == self.beat + 1 { self.streams.0 } else { 0 });
            self.beat = beat;
        }
        if *lives != beat + 1 {
            *lives = beat + 1;
            self.streams.0 += 1;
        }
    }

    /// Two streams have met and are one.
    pub(crate) fn streams_meet(&mut self, lives: u64, other: u64) {
        if lives == other && lives == self.beat + 1 {
            self.streams.0 = self.streams.0.saturating_sub(1);
        }
    }

    /// What one stream may have outstanding, so that the others get their part, bytes; `growing`: streams of its
    /// file that grow.
    pub(crate) fn part(&self, growing: usize) -> u64 {
        let streams = self.streams.0.max(self.streams.1).max(growing).max(1) as u64;
        (self.outstanding_max() / streams / PAGE_BYTES * PAGE_BYTES).min(self.limits.stream_bytes)
    }

    /// What a file that follows an earlier run may have outstanding, bytes.
    pub(crate) fn followers_part(&self) -> u64 {
        (self.outstanding_max() / self.followed.max(1) as u64).max(PAGE_BYTES)
    }

    /// What the earlier run foretold of other files came true.
    pub(crate) fn trusts_followers(&self) -> bool {
        self.followers.pays() && self.followers.hit_bytes >= TRUSTED_BYTES
    }

    /// The budget has room for so many bytes more.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.totals.outstanding_bytes + bytes <= self.outstanding_max()
    }

    /// Whether `bytes` more may be outstanding, for a stream that has hit `hit` bytes and has `not_hit`
    /// outstanding, late or wasted.
    pub(crate) fn may_predict(&self, bytes: u64, hit: u64, not_hit: u64) -> bool {
        let Totals { demand_bytes, wasted_bytes, late_bytes, hit_bytes, outstanding_bytes, .. } = self.totals;
        let wasted_bytes = wasted_bytes + late_bytes;
        // What is outstanding comes true as often as what was before.
        let doubtful =
            u128::from(outstanding_bytes) * u128::from(wasted_bytes) / u128::from((wasted_bytes + hit_bytes).max(1));
        let waste_max = SLACK_BYTES + demand_bytes / 100 * self.limits.waste_percent;
        let proven = not_hit + bytes <= hit / PROVEN_PART;
        self.has_room(bytes) && (wasted_bytes + doubtful as u64 + bytes <= waste_max || proven)
    }
}

/// Predicts the requests of many files.
#[derive(Debug)]
pub struct Predictor {
    shared: Shared,
    files: FxHashMap<u64, FileStreams>,
    /// Files for the clock that finds one to forget.
    clock: VecDeque<u64>,
}

impl Predictor {
    /// One that has seen nothing.
    pub fn new(limits: Limits) -> Predictor {
        let limits = Limits {
            piece_bytes: limits.piece_bytes.max(PAGE_BYTES),
            stream_bytes: limits.stream_bytes.max(limits.piece_bytes),
            files: limits.files.max(1),
            ..limits
        };
        let shared = Shared {
            limits,
            totals: Totals::default(),
            fetch_ps_per_byte: 0,
            openings: Account::default(),
            runs: 0,
            readers: 0,
            earlier: (None, 0),
            followed: 0,
            followers: Account::default(),
            streams: (0, 0),
            beat: 0,
        };
        Predictor { shared, files: FxHashMap::default(), clock: VecDeque::new() }
    }

    /// A read of `extent`, not empty, was asked for at `at_ns`. What it makes likely and was not predicted before.
    pub fn observe(&mut self, source: Source, extent: Range<u64>, at_ns: u64) -> Vec<Prediction> {
        if extent.start >= extent.end || extent.end > i64::MAX as u64 {
            return Vec::new();
        }
        self.shared.totals.demand_bytes += extent.end - extent.start;
        self.shared.openings.demanded(extent.end - extent.start);
        self.shared.followers.demanded(extent.end - extent.start);
        self.look_after_one(at_ns);
        if !self.files.contains_key(&source.file) {
            self.make_room(at_ns);
            self.files.insert(source.file, FileStreams::default());
            self.clock.push_back(source.file);
        }
        let Some(file) = self.files.get_mut(&source.file) else { return Vec::new() };
        file.observe(&mut self.shared, source, extent, at_ns)
    }

    /// The file ends here as far as is known: nothing is predicted beyond, until a read goes further.
    pub fn ends_at(&mut self, file: u64, len_bytes: u64) {
        if let Some(file) = self.files.get_mut(&file) {
            file.ends_at(len_bytes);
        }
    }

    /// These bytes were written or cut off: predictions of them are dropped, without a judgement.
    pub fn changed(&mut self, file: u64, extent: Range<u64>) {
        if let Some(file) = self.files.get_mut(&file) {
            file.drop_predictions(&mut self.shared, &extent);
            file.may_grow(extent.end);
        }
    }

    /// What was predicted of this extent was not acted on.
    pub fn declined(&mut self, file: u64, extent: Range<u64>) {
        if let Some(file) = self.files.get_mut(&file) {
            file.drop_predictions(&mut self.shared, &extent);
        }
    }

    /// Predicted bytes were read from the device in so much time: the unit of what predictions gain and lose.
    pub fn fetched(&mut self, bytes: u64, took_ns: u64) {
        if bytes > 0 {
            let ps = (u128::from(took_ns) * 1000 / u128::from(bytes)).min(1 << 40) as u64;
            let before = self.shared.fetch_ps_per_byte;
            self.shared.fetch_ps_per_byte = if before == 0 { ps } else { (before * 7 + ps) / 8 };
        }
    }

    /// Predicted and not yet read, bytes of all streams together, at most: [`Limits::budget_bytes`] from now on.
    pub fn set_budget(&mut self, budget_bytes: u64) {
        self.shared.limits.budget_bytes = budget_bytes;
    }

    /// Predicted bytes of a file are in memory now: a read of them that needs the device after all is
    /// [told](Predictor::missed).
    pub fn arrived(&mut self, file: u64, extent: &Range<u64>) {
        if let Some(file) = self.files.get_mut(&file) {
            file.arrived(extent);
        }
    }

    /// The last read of these bytes needed the device. What had [arrived](Predictor::arrived) of them and is not in memory
    /// left it unused: it was counted as hit and was wasted.
    pub fn missed(&mut self, file: u64, extent: &Range<u64>, in_memory: &dyn Fn(u64) -> bool) {
        if let Some(file) = self.files.get_mut(&file) {
            file.missed(&mut self.shared, extent, in_memory);
        }
    }

    /// Looks at memory where [`missed`](Predictor::missed) would; changes nothing.
    pub fn look_for_missed(&self, file: u64, extent: &Range<u64>, in_memory: &dyn Fn(u64) -> bool) {
        if let Some(file) = self.files.get(&file) {
            file.look_for_missed(extent, in_memory);
        }
    }

    /// Reads of an earlier run that will probably be made again, instead of those given before. While the reads of a file agree
    /// with them, what they foretell is predicted in the place of streams.
    pub fn foretell(&mut self, earlier: Option<Arc<EarlierReads>>) {
        for file in self.files.values_mut() {
            file.forget_earlier(&mut self.shared);
        }
        self.shared.followers = Account::default();
        self.shared.earlier = (earlier, self.shared.earlier.1.wrapping_add(1));
    }

    /// Requests will not be observed for a while: what is outstanding is dropped, without a judgement.
    pub fn rest(&mut self) {
        for file in self.files.values_mut() {
            file.drop_predictions(&mut self.shared, &(0..u64::MAX));
        }
    }

    /// The file is gone.
    pub fn forget(&mut self, file: u64) {
        if let Some(mut gone) = self.files.remove(&file) {
            gone.drop_predictions(&mut self.shared, &(0..u64::MAX));
            gone.leave(&mut self.shared);
            self.clock.retain(|other| *other != file);
        }
    }

    /// Sums over all streams.
    pub fn totals(&self) -> Totals {
        self.shared.totals
    }

    /// Predictions of one file that has been idle may be late.
    fn look_after_one(&mut self, at_ns: u64) {
        if let Some(file) = self.clock.pop_front() {
            if let Some(streams) = self.files.get_mut(&file) {
                streams.expire(&mut self.shared, at_ns);
            }
            self.clock.push_back(file);
        }
    }

    /// Forgets files until there is room for one more: those not used since the clock passed them last.
    fn make_room(&mut self, at_ns: u64) {
        while self.files.len() >= self.shared.limits.files {
            let Some(file) = self.clock.pop_front() else { return };
            let Some(streams) = self.files.get_mut(&file) else { continue };
            if streams.take_used() {
                self.clock.push_back(file);
                continue;
            }
            streams.end(&mut self.shared, at_ns);
            self.files.remove(&file);
        }
    }
}

#[cfg(test)]
#[path = "predictor_tests.rs"]
mod tests;
