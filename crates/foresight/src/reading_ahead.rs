//! What a data server decides when it reads ahead of its clients: which requests it looks at, how much of a prediction is
//! worth a read, and when there is nothing to gain. Real servers and the simulator drive the same machine; how bytes are
//! fetched, and into what, is theirs.

use std::ops::Range;
use std::sync::Arc;

use crate::earlier::EarlierReads;
use crate::predictor::{Limits, Prediction, Predictor, Source, Totals};

/// After this many reads that all came from memory, with nothing read ahead from the device, there is nothing to gain:
/// requests are not looked at until the next one that needs the device.
const AWAKE_READS: u32 = 512;

/// A device that gives bytes as fast as this, 1/s, has neither seeks nor long latencies to save: copying is the bound, and what
/// the kernel reads ahead by itself comes in larger pages than what it is asked for.
const FAST_BYTES_PER_S: u64 = 800_000_000;
/// The same of a piece that is read alone, whose first byte takes its time, 1/s.
const FAST_ALONE_BYTES_PER_S: u64 = 500_000_000;
/// Bytes that were read ahead, by which the device's speed is judged; two judgements in a row must agree.
const JUDGED_BYTES: u64 = 16 << 20;
/// Bytes that requests read from a fast device before its speed is judged again: at first, and at most.
const PAUSE_BYTES: (u64, u64) = (1 << 30, 16 << 30);

/// Predicted extents that a server reads at a time without a request that they continue: a request waits behind these at
/// most.
pub const ALONE_MAX: u32 = 16;

/// The predictions of a server's requests, and what became of them.
#[derive(Debug)]
pub struct ReadingAhead {
    predictor: Predictor,
    /// Reads until it sleeps; 0: it does.
    awake_reads: u32,
    speed: Speed,
}

/// How fast the device is, and for how long nothing is read ahead because it is fast. It is judged by the rate at which bytes come,
/// and, as one client may request less than the device gives, by the time that pieces take.
#[derive(Debug)]
struct Speed {
    /// When bytes came last.
    came_ns: Option<u64>,
    coming: Judge,
    fetching: Judge,
    /// Bytes that requests still read from the device before it is judged again; 0: reading ahead goes on.
    pause_bytes: u64,
    next_pause_bytes: u64,
}

/// Whether bytes come fast: two judgements in a row.
#[derive(Clone, Copy, Debug, Default)]
struct Judge {
    bytes: u64,
    took_ns: u64,
    was_fast: bool,
}

impl Judge {
    /// Bytes that took so long; the judgement when there are enough.
    fn add(&mut self, bytes: u64, took_ns: u64, fast_bytes_per_s: u64) -> Option<bool> {
        self.bytes = self.bytes.saturating_add(bytes);
        self.took_ns = self.took_ns.saturating_add(took_ns);
        if self.bytes < JUDGED_BYTES {
            return None;
        }
        let is_fast = u128::from(self.bytes) * 1_000_000_000 > u128::from(fast_bytes_per_s) * u128::from(self.took_ns);
        let twice = is_fast && self.was_fast;
        *self = Judge { was_fast: is_fast, ..Judge::default() };
        Some(twice)
    }
}

impl Speed {
    fn new() -> Speed {
        let (coming, fetching) = (Judge::default(), Judge::default());
        Speed { came_ns: None, coming, fetching, pause_bytes: 0, next_pause_bytes: PAUSE_BYTES.0 }
    }

    /// Bytes have come from the device that were read ahead; true if a pause begins.
    fn came(&mut self, bytes: u64, at_ns: u64) -> bool {
        let Some(came_ns) = self.came_ns.replace(at_ns) else {
            // How long these took is not known.
            return false;
        };
        let judged = self.coming.add(bytes, at_ns.saturating_sub(came_ns), FAST_BYTES_PER_S);
        self.pauses(judged)
    }

    /// A piece was read alone in so much time; true if a pause begins.
    fn fetched(&mut self, bytes: u64, took_ns: u64) -> bool {
        let judged = self.fetching.add(bytes, took_ns, FAST_ALONE_BYTES_PER_S);
        self.pauses(judged)
    }

    fn pauses(&mut self, judged: Option<bool>) -> bool {
        if judged != Some(true) {
            if !self.coming.was_fast && !self.fetching.was_fast && judged.is_some() {
                self.next_pause_bytes = PAUSE_BYTES.0;
            }
            return false;
        }
        let pause_bytes = self.next_pause_bytes;
        *self = Speed { pause_bytes, next_pause_bytes: (pause_bytes * 2).min(PAUSE_BYTES.1), ..Speed::new() };
        true
    }
}

impl ReadingAhead {
    /// With a bound for what is read ahead and not yet asked for, bytes.
    pub fn new(budget_bytes: u64) -> ReadingAhead {
        let predictor = Predictor::new(Limits { budget_bytes, ..Limits::default() });
        ReadingAhead { predictor, awake_reads: AWAKE_READS, speed: Speed::new() }
    }

    /// Requests need not be told at present, until [`device_read`](ReadingAhead::device_read) is.
    pub fn sleeps(&self) -> bool {
        self.awake_reads == 0
    }

    /// The device was needed for a read of these bytes. What had been read ahead of them and is not `in_memory` left it too
    /// early, as under memory pressure: it was read for nothing.
    pub fn device_read(&mut self, file: u64, extent: &Range<u64>, in_memory: impl Fn(u64) -> bool) {
        self.speed.pause_bytes = self.speed.pause_bytes.saturating_sub(extent.end.saturating_sub(extent.start));
        if self.speed.pause_bytes > 0 {
            return;
        }
        self.awake_reads = AWAKE_READS;
        self.predictor.missed(file, extent, &in_memory);
    }

    /// Looks at memory where [`device_read`](ReadingAhead::device_read) would; changes nothing. For those who must not wait
    /// for a look at memory meanwhile.
    pub fn look_for_missed(&self, file: u64, extent: &Range<u64>, in_memory: impl Fn(u64) -> bool) {
        if self.speed.pause_bytes == 0 {
            self.predictor.look_for_missed(file, extent, &in_memory);
        }
    }

    /// A read of `extent`, not empty, came at `at_ns`. What should be read before it is asked for, as far as the file
    /// [reaches](ReadingAhead::within).
    pub fn read(&mut self, source: Source, extent: Range<u64>, at_ns: u64) -> Vec<Prediction> {
        if self.sleeps() {
            return Vec::new();
        }
        self.awake_reads -= 1;
        if self.sleeps() {
            self.predictor.rest();
            return Vec::new();
        }
        self.predictor.observe(source, extent, at_ns)
    }

    /// So many bytes that were read ahead have just come from the device.
    pub fn came(&mut self, bytes: u64, at_ns: u64) {
        if !self.sleeps() && self.speed.came(bytes, at_ns) {
            self.awake_reads = 0;
            self.predictor.rest();
        }
    }

    /// The file of these predictions ends at `end`: nothing is read beyond, nor predicted until a read goes further.
    pub fn within(&mut self, predictions: &mut Vec<Prediction>, end: u64) {
        for prediction in predictions.iter_mut().filter(|p| p.extent.end > end) {
            self.ended(prediction.file, prediction.extent.clone(), end);
            prediction.extent.end = end.max(prediction.extent.start);
        }
        predictions.retain(|p| !p.extent.is_empty());
    }

    /// The file of a prediction ends at `end`, before the prediction does.
    pub fn ended(&mut self, file: u64, extent: Range<u64>, end: u64) {
        self.predictor.declined(file, end.max(extent.start).min(extent.end)..extent.end);
        self.predictor.ends_at(file, end);
    }

    /// These bytes of a file are about to be written or cut off.
    pub fn changed(&mut self, file: u64, extent: Range<u64>) {
        if !self.sleeps() {
            self.predictor.changed(file, extent);
        }
    }

    /// A file is about to be removed.
    pub fn removed(&mut self, file: u64) {
        self.predictor.forget(file);
    }

    /// Predicted bytes were in memory already: the prediction gained and cost nothing.
    pub fn was_there(&mut self, file: u64, extent: Range<u64>) {
        self.predictor.declined(file, extent);
    }

    /// Predicted and not yet read, bytes of all streams together, at most from now on.
    pub fn set_budget(&mut self, budget_bytes: u64) {
        self.predictor.set_budget(budget_bytes);
    }

    /// Reads of an earlier run that will probably be made again; those before are forgotten.
    pub fn foretell(&mut self, earlier: Option<Arc<EarlierReads>>) {
        self.predictor.foretell(earlier);
    }

    /// Requests are not told for a while: what they would show of predictions is not known, so these are dropped.
    pub fn rest(&mut self) {
        self.predictor.rest();
    }

    /// Predicted bytes have come into memory; those of one prediction come in order.
    pub fn arrived(&mut self, file: u64, extent: &Range<u64>) {
        self.predictor.arrived(file, extent);
    }

    /// Predicted bytes were read alone from the device in so much time.
    pub fn fetched(&mut self, file: u64, extent: &Range<u64>, took_ns: u64) {
        let bytes = extent.end.saturating_sub(extent.start);
        if self.speed.pause_bytes == 0 {
            self.awake_reads = AWAKE_READS;
        }
        self.predictor.arrived(file, extent);
        self.predictor.fetched(bytes, took_ns);
        if !self.sleeps() && self.speed.fetched(bytes, took_ns) {
            self.awake_reads = 0;
            self.predictor.rest();
        }
    }

    /// Sums since the beginning.
    pub fn totals(&self) -> Totals {
        self.predictor.totals()
    }
}

/// Where it is looked whether memory has an extent: so far apart, bytes, but in a long one at so many places at most.
const LOOK_BYTES: (u64, u64) = (32 << 10, 128 << 10);
const LOOKS_MAX: u64 = 64;

/// Whether a predicted extent, not empty, need not be read: its ends are in memory, and so is what is between them, as far as a few
/// looks tell. Requests bring such pieces along; of a small file, programs often read both ends alone.
pub fn is_there(extent: &Range<u64>, in_memory: impl Fn(u64) -> bool) -> bool {
    let bytes = extent.end - extent.start;
    let step = (bytes / 4).clamp(LOOK_BYTES.0, LOOK_BYTES.1).max(bytes / LOOKS_MAX);
    in_memory(extent.end - 1) && extent.clone().step_by(step as usize).all(in_memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const SOURCE: Source = Source { file: 1, reader: 1 };

    #[test]
    fn it_sleeps_while_memory_has_everything_and_wakes_with_the_device() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        for i in 0..u64::from(AWAKE_READS) {
            assert!(!ahead.sleeps(), "{i}");
            ahead.read(SOURCE, i * 4096..(i + 1) * 4096, i);
        }
        assert!(ahead.sleeps());
        assert_eq!(ahead.totals().outstanding_bytes, 0, "nothing stays outstanding that no request will match");
        assert!(ahead.read(SOURCE, 4 * MIB..5 * MIB, 1000).is_empty());
        ahead.device_read(1, &(0..4096), |_| false);
        let predicted = (5..9).any(|i| !ahead.read(SOURCE, i * MIB..(i + 1) * MIB, 1001).is_empty());
        assert!(predicted);
    }

    /// Reads that are not told, under a policy that does not foresee, show nothing of what was predicted before.
    #[test]
    fn what_happens_while_it_rests_is_no_waste() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        for i in 0..32 {
            for prediction in ahead.read(SOURCE, i * MIB / 4..(i + 1) * MIB / 4, i) {
                ahead.arrived(prediction.file, &prediction.extent);
            }
        }
        assert!(ahead.totals().hit_bytes > 4 * MIB);
        ahead.rest();
        for i in 0..64 {
            ahead.device_read(1, &(i * MIB / 4..(i + 1) * MIB / 4), |_| false);
        }
        let totals = ahead.totals();
        assert_eq!((totals.wasted_bytes, totals.stops, totals.outstanding_bytes), (0, 0, 0), "{totals:?}");
    }

    /// A page cache so small that what is read ahead is gone when it is asked for.
    #[test]
    fn memory_pressure_ends_it() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        let mut read_bytes = 0;
        let reads = 16 << 10;
        for i in 0..reads {
            let extent = i * MIB / 4..(i + 1) * MIB / 4;
            for p in ahead.read(SOURCE, extent.clone(), i * 1_000_000) {
                read_bytes += p.extent.end - p.extent.start;
                ahead.fetched(1, &p.extent, 10_000_000);
            }
            ahead.device_read(1, &extent, |_| false);
        }
        assert!(read_bytes > MIB && read_bytes < 32 * MIB + reads * MIB / 4 / 20, "{read_bytes}");
        let totals = ahead.totals();
        assert!(
            totals.hit_bytes < MIB && totals.wasted_bytes + totals.outstanding_bytes >= read_bytes - MIB,
            "{totals:?}"
        );
        assert!(totals.stops > 0);
    }

    #[test]
    fn what_is_still_on_its_way_or_there_is_not_lost() {
        for arrives in [false, true] {
            let mut ahead = ReadingAhead::new(64 * MIB);
            for i in 0..64 {
                let extent = i * MIB..(i + 1) * MIB;
                let predicted = ahead.read(SOURCE, extent.clone(), i * 10_000_000);
                // Only the last page was missing.
                ahead.device_read(1, &(extent.start..extent.end + 1), |at| arrives && at < extent.end);
                predicted.iter().filter(|_| arrives).for_each(|p| ahead.arrived(1, &p.extent));
            }
            let totals = ahead.totals();
            assert_eq!((totals.wasted_bytes, totals.stops), (0, 0), "{totals:?}");
            assert!(totals.hit_bytes >= 60 * MIB);
        }
    }

    /// Memory that loses what is read ahead every now and then, for ever: the loss stays in proportion to what is asked for,
    /// however much was hit before.
    #[test]
    fn what_hits_mostly_does_not_waste_for_ever() {
        let mut ahead = ReadingAhead::new(8 * MIB);
        let (mut lost, reads) = (0, 40_000);
        for i in 0..reads {
            let extent = i * MIB / 4..(i + 1) * MIB / 4;
            for p in ahead.read(SOURCE, extent.clone(), i * 1_000_000) {
                ahead.fetched(1, &p.extent, 10_000_000);
            }
            if i % 6 == 0 {
                let before = ahead.totals().wasted_bytes;
                ahead.device_read(1, &extent, |_| false);
                lost += ahead.totals().wasted_bytes - before;
            }
        }
        let bound = 32 * MIB + 8 * MIB + reads * MIB / 4 / 20;
        assert!(lost > 32 * MIB && lost <= bound, "{lost} of at most {bound}: {:?}", ahead.totals());
    }

    /// Half of the window fits into memory: what is asked for first is gone before the rest has come.
    #[test]
    fn a_window_that_pushes_itself_out_is_found() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        let mut read_bytes = 0;
        for i in 0..4096 {
            let extent = i * MIB / 4..(i + 1) * MIB / 4;
            for p in ahead.read(SOURCE, extent.clone(), i * 1_000_000) {
                read_bytes += p.extent.end - p.extent.start;
                ahead.arrived(1, &(p.extent.start..p.extent.start + MIB / 2));
            }
            ahead.device_read(1, &(extent.start..extent.start + 4096), |_| false);
        }
        assert!(ahead.totals().stops > 0 && read_bytes < 256 * MIB, "{read_bytes} {:?}", ahead.totals());
    }

    #[test]
    fn nothing_is_read_beyond_the_end() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        let mut predictions = ahead.read(SOURCE, 0..MIB, 1);
        assert_eq!(predictions.iter().map(|p| p.extent.clone()).next(), Some(MIB..5 * MIB));
        ahead.within(&mut predictions, 3 * MIB);
        assert_eq!(predictions.iter().map(|p| p.extent.clone()).collect::<Vec<_>>(), vec![MIB..3 * MIB]);
        assert_eq!(ahead.totals().outstanding_bytes, 2 * MIB);
        let mut predictions = ahead.read(SOURCE, MIB..3 * MIB, 2);
        ahead.within(&mut predictions, 3 * MIB);
        assert!(predictions.is_empty());
        assert_eq!((ahead.totals().outstanding_bytes, ahead.totals().hit_bytes), (0, 2 * MIB));
    }

    #[test]
    fn a_change_and_a_removal_take_predictions_back() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        assert!(!ahead.read(SOURCE, 0..MIB, 1).is_empty());
        ahead.changed(1, 2 * MIB..u64::MAX);
        assert_eq!(ahead.totals().outstanding_bytes, MIB);
        ahead.removed(1);
        let totals = ahead.totals();
        assert_eq!((totals.outstanding_bytes, totals.wasted_bytes), (0, 0));
    }

    /// Reads 256 KiB after 256 KiB at a rate; gives the bytes that were read ahead.
    fn at_rate(
        ahead: &mut ReadingAhead,
        from_ns: u64,
        (bytes_per_s, device_bytes_per_s): (u64, u64),
        asked_bytes: u64,
        is_cached: bool,
    ) -> u64 {
        let (step, mut read_bytes) = (MIB / 4, 0);
        for i in 0..asked_bytes / step {
            let extent = i * step..(i + 1) * step;
            let mut there = false;
            for p in ahead.read(SOURCE, extent.clone(), from_ns + i * (step * 1_000_000_000 / bytes_per_s)) {
                there = true;
                if is_cached {
                    ahead.was_there(1, p.extent);
                } else {
                    read_bytes += p.extent.end - p.extent.start;
                    let bytes = p.extent.end - p.extent.start;
                    ahead.fetched(1, &p.extent, bytes * 1_000_000_000 / device_bytes_per_s);
                }
            }
            if !is_cached && !ahead.sleeps() {
                ahead.came(step, from_ns + i * (step * 1_000_000_000 / bytes_per_s));
            }
            if !there && !is_cached && ahead.sleeps() {
                ahead.device_read(1, &extent, |_| false);
            }
        }
        read_bytes
    }

    #[test]
    fn a_fast_device_is_left_to_the_kernel() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        let mut read_bytes = at_rate(&mut ahead, 0, (2_000_000_000, 2_000_000_000), 512 * MIB, false);
        assert!((MIB..=6 * JUDGED_BYTES).contains(&read_bytes) && ahead.sleeps(), "{read_bytes}");
        // It is judged again after ever longer pauses.
        read_bytes = at_rate(&mut ahead, 1 << 40, (2_000_000_000, 2_000_000_000), 16 << 30, false);
        assert!((JUDGED_BYTES..=6 * 6 * JUDGED_BYTES).contains(&read_bytes), "{read_bytes}");
        // It has become slow, or another one is read.
        at_rate(&mut ahead, 1 << 42, (100_000_000, 100_000_000), 20 << 30, false);
        assert!(!ahead.sleeps());
        let more = at_rate(&mut ahead, 1 << 44, (100_000_000, 100_000_000), 1 << 30, false);
        assert!(more > 900 * MIB, "{more}");
    }

    #[test]
    fn a_device_is_fast_though_its_client_is_not() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        let read_bytes = at_rate(&mut ahead, 0, (100_000_000, 2_000_000_000), 256 * MIB, false);
        assert!((MIB..=3 * JUDGED_BYTES).contains(&read_bytes) && ahead.sleeps(), "{read_bytes}");
    }

    #[test]
    fn disks_and_memory_are_not_taken_for_fast_devices() {
        let mut ahead = ReadingAhead::new(64 * MIB);
        let read_bytes = at_rate(&mut ahead, 0, (300_000_000, 300_000_000), 4 << 30, false);
        assert!(read_bytes > 4000 * MIB, "{read_bytes}");
        let mut ahead = ReadingAhead::new(64 * MIB);
        at_rate(&mut ahead, 0, (5_000_000_000, 5_000_000_000), 100 * MIB, true);
        assert_eq!(ahead.speed.pause_bytes, 0);
    }

    #[test]
    fn an_extent_is_there_when_both_its_ends_are() {
        assert!(is_there(&(10..20), |at| at == 10 || at == 19));
        assert!(!is_there(&(10..20), |at| at < 15) && !is_there(&(10..20), |at| at >= 15));
    }

    #[test]
    fn a_file_is_not_there_because_its_ends_are() {
        const PAGE: u64 = 4096;
        for pages in [24, 64, 300, 1024, 1 << 20] {
            let (extent, looks) = (3 * PAGE..(3 + pages) * PAGE, std::cell::Cell::new(0));
            assert!(!is_there(&extent, |at| at < 4 * PAGE || at >= (2 + pages) * PAGE), "{pages}");
            assert!(is_there(&extent, |at| {
                looks.set(looks.get() + 1);
                extent.contains(&at)
            }));
            assert!(looks.get() <= LOOKS_MAX + 2, "{pages}: {}", looks.get());
        }
    }
}
