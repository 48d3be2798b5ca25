//! A batch on the modelled device, and the memory in front of it.
//!
//! The model says when a batch is done, the store does the work meanwhile, and whichever ends last answers. The work runs
//! beside the model's time, not after it, so that an answer leaves as soon as the modelled device is done. No client can
//! see the difference: conflicting requests wait until the batch is completed.
//!
//! A modelled device has no page cache in front of it. What the server reads ahead of its clients comes into a memory that
//! is a model too: it holds extents, not bytes, at most as many as may be read ahead, each until its first read. So a
//! second read of the same bytes needs the device again.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_engine::Work;
use impresario_store::{Timing, monotonic_ns};
use rustc_hash::FxHashMap;

use super::Item;
use super::disk::Done;

/// A batch with its result.
pub(super) type Performed = (Work<Item>, io::Result<Done>);

/// Bytes that one transfer reads ahead: a read of the first of them need not wait for the last of a prediction.
const STEP_BYTES: u64 = 512 << 10;

/// Where the work of a batch and the transfers that it waits for join.
pub(super) struct Rendezvous(Mutex<Joined>);

struct Joined {
    /// Transfers outstanding; the batch itself counts as one until [`Rendezvous::timed`] with nothing.
    transfers: u32,
    timing: Option<Timing>,
    performed: Option<Performed>,
}

impl Rendezvous {
    /// Of a batch's work and one transfer.
    pub(super) fn new() -> Arc<Rendezvous> {
        Arc::new(Rendezvous(Mutex::new(Joined { transfers: 1, timing: None, performed: None })))
    }

    /// The batch waits for one more transfer.
    fn add(&self) {
        self.0.lock().transfers += 1;
    }

    /// The work is done; gives the batch back if its last transfer has ended.
    pub(super) fn performed(&self, performed: Performed) -> Option<(Performed, Timing)> {
        let mut joined = self.0.lock();
        joined.performed = Some(performed);
        joined.take()
    }

    /// A transfer has ended, or there was none; gives the batch back if it was the last and the work is done.
    pub(super) fn timed(&self, timing: Option<Timing>) -> Option<(Performed, Timing)> {
        let mut joined = self.0.lock();
        joined.transfers -= 1;
        joined.timing = match (joined.timing, timing) {
            (Some(a), Some(b)) => Some(Timing {
                started_ns: a.started_ns.min(b.started_ns),
                finished_ns: a.finished_ns.max(b.finished_ns),
                lateness_ns: a.lateness_ns.max(b.lateness_ns),
            }),
            (a, b) => a.or(b),
        };
        joined.take()
    }
}

impl Joined {
    fn take(&mut self) -> Option<(Performed, Timing)> {
        if self.transfers > 0 {
            return None;
        }
        let now_ns = monotonic_ns();
        // Without a transfer the batch took no time of the device.
        let none = Timing { started_ns: now_ns, finished_ns: now_ns, lateness_ns: 0 };
        self.performed.take().map(|performed| (performed, self.timing.unwrap_or(none)))
    }
}

/// The memory in front of a modelled device.
pub(super) struct Memory {
    budget_bytes: u64,
    files: Mutex<Files>,
}

#[derive(Default)]
struct Files {
    /// By file and first byte, disjoint.
    extents: FxHashMap<u64, BTreeMap<u64, Extent>>,
    /// Bytes that have arrived and were not read.
    held_bytes: u64,
    /// File and first byte of what has arrived, oldest first; some were read since.
    arrived: VecDeque<(u64, u64)>,
}

struct Extent {
    end: u64,
    /// Absent: it has arrived.
    under_way: Option<UnderWay>,
}

/// A transfer that has not ended.
#[derive(Default)]
struct UnderWay {
    /// Bytes that are not to be held: read or changed meanwhile.
    gone: Vec<Range<u64>>,
    /// Batches that wait for it, and since when.
    batches: Vec<(Arc<Rendezvous>, u64)>,
}

impl Memory {
    /// Holds at most this number of bytes.
    pub(super) fn new(budget_bytes: u64) -> Memory {
        Memory { budget_bytes, files: Mutex::default() }
    }

    /// Whether a byte has arrived and was not read.
    pub(super) fn has(&self, file: u64, at: u64) -> bool {
        self.has_all(file, &(at..at + 1))
    }

    /// Whether all bytes of an extent have arrived and were not read.
    pub(super) fn has_all(&self, file: u64, extent: &Range<u64>) -> bool {
        let files = self.files.lock();
        let Some(extents) = files.extents.get(&file) else { return false };
        let mut at = extent.start;
        while at < extent.end {
            match extents.range(..=at).next_back() {
                Some((_, held)) if held.end > at && held.under_way.is_none() => at = held.end,
                _ => return false,
            }
        }
        true
    }

    /// Bytes were read, or are about to be changed: they are held no longer.
    pub(super) fn release(&self, file: u64, extent: &Range<u64>) {
        self.files.lock().release(file, extent, None);
    }

    /// A batch reads an extent. What the device must transfer for it; the batch joins the transfers under way.
    pub(super) fn read(&self, file: u64, extent: &Range<u64>, batch: &Arc<Rendezvous>) -> Vec<Range<u64>> {
        let mut files = self.files.lock();
        let missing = files.missing(file, extent);
        files.release(file, extent, Some(batch));
        missing
    }

    /// An extent is about to be read ahead. The transfers that this takes; each is to be reported by
    /// [`Memory::arrived`].
    pub(super) fn begin(&self, file: u64, extent: &Range<u64>) -> Vec<Range<u64>> {
        let mut files = self.files.lock();
        let mut steps = Vec::new();
        for missing in files.missing(file, extent) {
            let mut at = missing.start;
            while at < missing.end {
                let end = (at + STEP_BYTES).min(missing.end);
                files.extents.entry(file).or_default().insert(at, Extent { end, under_way: Some(UnderWay::default()) });
                steps.push(at..end);
                at = end;
            }
        }
        steps
    }

    /// A transfer of [`Memory::begin`] has ended. The batches that have nothing more to wait for.
    pub(super) fn arrived(&self, file: u64, step: &Range<u64>, timing: Timing) -> Vec<(Performed, Timing)> {
        let under_way = self.files.lock().arrived(file, step, self.budget_bytes);
        let joined = |(batch, since_ns): (Arc<Rendezvous>, u64)| {
            // The batch did not occupy the device before it came.
            let started_ns = timing.started_ns.max(since_ns).min(timing.finished_ns);
            batch.timed(Some(Timing { started_ns, ..timing }))
        };
        under_way.batches.into_iter().filter_map(joined).collect()
    }

    /// Gives up everything that has arrived, so that the next measurement begins cold.
    pub(super) fn clear(&self) {
        let mut files = self.files.lock();
        while let Some((file, start)) = files.arrived.pop_front() {
            files.release_held(file, start);
        }
    }

    /// Bytes that have arrived and were not read.
    pub(super) fn held_bytes(&self) -> u64 {
        self.files.lock().held_bytes
    }
}

impl Files {
    /// First bytes of the extents that an extent touches.
    fn touched(&self, file: u64, extent: &Range<u64>) -> Vec<u64> {
        let Some(extents) = self.extents.get(&file) else { return Vec::new() };
        let first = extents.range(..=extent.start).next_back().filter(|(_, held)| held.end > extent.start);
        let first = first.map_or(extent.start, |(start, _)| *start);
        extents.range(first..extent.end).map(|(start, _)| *start).collect()
    }

    /// The parts of an extent that are neither held nor under way.
    fn missing(&self, file: u64, extent: &Range<u64>) -> Vec<Range<u64>> {
        let (mut missing, mut at) = (Vec::new(), extent.start);
        for start in self.touched(file, extent) {
            let end = self.extents[&file][&start].end;
            if start > at {
                missing.push(at..start);
            }
            at = at.max(end);
        }
        if at < extent.end {
            missing.push(at..extent.end);
        }
        missing
    }

    /// Gives up what is held of an extent; a batch joins what is under way of it.
    fn release(&mut self, file: u64, extent: &Range<u64>, batch: Option<&Arc<Rendezvous>>) {
        for start in self.touched(file, extent) {
            let Some(extents) = self.extents.get_mut(&file) else { return };
            let Some(held) = extents.get_mut(&start) else { continue };
            let (end, cut) = (held.end, extent.start.max(start)..extent.end.min(held.end));
            if let Some(under_way) = &mut held.under_way {
                under_way.gone.push(cut);
                if let Some(batch) = batch {
                    batch.add();
                    under_way.batches.push((batch.clone(), monotonic_ns()));
                }
                continue;
            }
            extents.remove(&start);
            self.held_bytes -= end - start;
            self.hold(file, start..cut.start);
            self.hold(file, cut.end..end);
        }
        if self.extents.get(&file).is_some_and(BTreeMap::is_empty) {
            self.extents.remove(&file);
        }
    }

    /// Holds an extent that no other touches, as the youngest.
    fn hold(&mut self, file: u64, extent: Range<u64>) {
        if extent.is_empty() {
            return;
        }
        self.held_bytes += extent.end - extent.start;
        self.arrived.push_back((file, extent.start));
        self.extents.entry(file).or_default().insert(extent.start, Extent { end: extent.end, under_way: None });
    }

    /// Gives up an extent that has arrived, if it is still held.
    fn release_held(&mut self, file: u64, start: u64) {
        let held = self.extents.get(&file).and_then(|extents| extents.get(&start));
        if let Some(end) = held.filter(|held| held.under_way.is_none()).map(|held| held.end) {
            self.release(file, &(start..end), None);
        }
    }

    fn arrived(&mut self, file: u64, step: &Range<u64>, budget_bytes: u64) -> UnderWay {
        let extents = self.extents.entry(file).or_default();
        let under_way = extents.remove(&step.start).and_then(|extent| extent.under_way).unwrap_or_default();
        self.hold(file, step.clone());
        for gone in &under_way.gone {
            self.release(file, gone, None);
        }
        while self.held_bytes > budget_bytes
            && let Some((file, start)) = self.arrived.pop_front()
        {
            self.release_held(file, start);
        }
        // Each extent that was read in parts has left entries.
        let held: usize = if self.arrived.len() > 4096 { self.extents.values().map(BTreeMap::len).sum() } else { 0 };
        if self.arrived.len() > 4096.max(2 * held) {
            let extents = &self.extents;
            let is_held = |(file, start): &(u64, u64)| {
                extents.get(file).and_then(|e| e.get(start)).is_some_and(|held| held.under_way.is_none())
            };
            self.arrived.retain(is_held);
        }
        under_way
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMING: Timing = Timing { started_ns: 5, finished_ns: 9, lateness_ns: 0 };

    #[test]
    fn a_read_waits_for_what_is_under_way_and_takes_what_is_there() {
        let memory = Memory::new(4 << 20);
        assert_eq!(memory.begin(1, &(0..1 << 20)), [0..STEP_BYTES, STEP_BYTES..1 << 20]);
        assert!(memory.begin(1, &(0..1 << 20)).is_empty(), "nothing is read twice");
        assert!(memory.arrived(1, &(0..STEP_BYTES), TIMING).is_empty());
        assert!(memory.has(1, 0) && !memory.has(1, STEP_BYTES) && !memory.has(2, 0));
        let batch = Rendezvous::new();
        let extent = STEP_BYTES - 100..STEP_BYTES + 100;
        assert!(memory.read(1, &extent, &batch).is_empty(), "the device need not be asked again");
        assert_eq!(batch.0.lock().transfers, 2);
        assert!(batch.timed(None).is_none());
        memory.arrived(1, &(STEP_BYTES..1 << 20), TIMING);
        assert_eq!(batch.0.lock().transfers, 0);
        assert_eq!(memory.held_bytes(), (1 << 20) - 200, "what was read is not held");
        memory.clear();
        assert_eq!((memory.held_bytes(), memory.files.lock().extents.len()), (0, 0));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Begin(Range<u64>),
        Arrive(usize),
        Read(Range<u64>),
        Change(Range<u64>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let extent = || (0..40u64, 1..20u64).prop_map(|(start, len)| start..start + len);
        let step = prop_oneof![
            extent().prop_map(Step::Begin),
            any::<usize>().prop_map(Step::Arrive),
            extent().prop_map(Step::Read),
            extent().prop_map(Step::Change),
        ];
        proptest::collection::vec(step, 1..60)
    }

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Byte {
        Away,
        UnderWay,
        /// Under way, and not to be held.
        Gone,
        Held,
    }

    proptest! {
        /// Against a state for each byte.
        #[test]
        fn it_is_as_a_state_for_each_byte(steps in steps()) {
            let memory = Memory::new(1 << 20);
            let mut bytes = [Byte::Away; 64];
            let mut under_way: Vec<Range<u64>> = Vec::new();
            let at = |extent: &Range<u64>| extent.start as usize..extent.end as usize;
            for step in steps {
                match step {
                    Step::Begin(extent) => {
                        let begun = memory.begin(1, &extent);
                        for byte in at(&extent) {
                            let is_begun = begun.iter().any(|step| step.contains(&(byte as u64)));
                            prop_assert_eq!(is_begun, bytes[byte] == Byte::Away);
                            if is_begun {
                                bytes[byte] = Byte::UnderWay;
                            }
                        }
                        under_way.extend(begun);
                    }
                    Step::Arrive(nth) if !under_way.is_empty() => {
                        let step = under_way.swap_remove(nth % under_way.len());
                        memory.arrived(1, &step, TIMING);
                        for byte in at(&step) {
                            bytes[byte] = if bytes[byte] == Byte::UnderWay { Byte::Held } else { Byte::Away };
                        }
                    }
                    Step::Arrive(_) => {}
                    Step::Read(extent) => {
                        let batch = Rendezvous::new();
                        let missing = memory.read(1, &extent, &batch);
                        for byte in at(&extent) {
                            let is_missing = missing.iter().any(|part| part.contains(&(byte as u64)));
                            prop_assert_eq!(is_missing, bytes[byte] == Byte::Away);
                        }
                        let joined = under_way.iter().filter(|s| s.start < extent.end && extent.start < s.end).count();
                        prop_assert_eq!(batch.0.lock().transfers as usize, 1 + joined);
                        release(&mut bytes, at(&extent));
                    }
                    Step::Change(extent) => {
                        memory.release(1, &extent);
                        release(&mut bytes, at(&extent));
                    }
                }
                for (byte, state) in bytes.iter().enumerate() {
                    prop_assert_eq!(memory.has(1, byte as u64), *state == Byte::Held, "byte {}", byte);
                }
                let held = bytes.iter().filter(|state| **state == Byte::Held).count();
                prop_assert_eq!(memory.held_bytes(), held as u64);
            }
        }
    }

    fn release(bytes: &mut [Byte], extent: Range<usize>) {
        for byte in &mut bytes[extent] {
            *byte = match *byte {
                Byte::UnderWay | Byte::Gone => Byte::Gone,
                Byte::Held | Byte::Away => Byte::Away,
            };
        }
    }

    #[test]
    fn it_holds_no_more_than_its_budget_and_nothing_grows_with_reads() {
        let memory = Memory::new(2 * STEP_BYTES);
        for nth in 0..200u64 {
            for step in memory.begin(nth, &(0..STEP_BYTES)) {
                memory.arrived(nth, &step, TIMING);
            }
            assert!(memory.held_bytes() <= 2 * STEP_BYTES);
            for at in (0..STEP_BYTES).step_by(16 << 10) {
                memory.release(nth, &(at..at + (8 << 10)));
            }
        }
        let files = memory.files.lock();
        assert!(files.extents.len() <= 4 && files.arrived.len() <= 8192, "{}", files.arrived.len());
    }
}
