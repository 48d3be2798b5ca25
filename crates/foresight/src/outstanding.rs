//! The predicted bytes of one file that were not requested yet, and those that were requested lately.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use crate::phases::Phases;
use crate::reading_ahead::is_there;

/// Predicted extents of one file.
const OUTSTANDING_MAX: usize = 4096;
/// Predicted parts of a file's requests between their arrival and their service.
const EXPECTED_MAX: usize = 64;
/// Late extents of one file that may still come true: beyond these, those that were late first are given up, and any after this
/// time, ns, or later where phases of reading are known to be farther apart.
const LATE_MAX: usize = 256;
const LATE_KEPT_NS: u64 = 600_000_000_000;

/// A predicted extent; it begins at its key in the map.
#[derive(Debug)]
struct Predicted {
    end: u64,
    stream: u32,
    late_ns: u64,
    /// It is in memory up to here.
    arrived_to: u64,
    /// It was not read in time, and may be yet.
    is_late: bool,
}

/// Bytes of a prediction.
#[derive(Debug)]
pub(crate) struct Taken {
    extent: Range<u64>,
    pub(crate) stream: u32,
    pub(crate) is_late: bool,
    /// They are in memory up to here.
    arrived_to: u64,
}

impl Taken {
    pub(crate) fn bytes(&self) -> u64 {
        self.extent.end - self.extent.start
    }

    /// What has arrived of a range.
    fn arrived_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start.max(self.extent.start)..range.end.min(self.extent.end).min(self.arrived_to)
    }

    /// What has arrived of a range is not in memory.
    fn is_lost(&self, range: &Range<u64>, in_memory: &dyn Fn(u64) -> bool) -> bool {
        let arrived = self.arrived_of(range);
        !arrived.is_empty() && !is_there(&arrived, in_memory)
    }
}

/// How far a prediction that begins at `start` has arrived when an extent of it has, too.
fn arrived_to(start: u64, end: u64, before: u64, extent: &Range<u64>) -> u64 {
    if extent.start <= before.max(start) { before.max(extent.end.min(end)) } else { before }
}

/// The predictions of one file.
#[derive(Debug, Default)]
pub(crate) struct Outstanding {
    /// By first byte, disjoint.
    predicted: BTreeMap<u64, Predicted>,
    /// First bytes of predictions in the order of time; some are gone already.
    order: VecDeque<u64>,
    /// Predictions that are late, by that instant and first byte.
    late: BTreeSet<(u64, u64)>,
    /// Predictions that were asked for lately; oldest first.
    expected: VecDeque<Taken>,
}

impl Outstanding {
    /// Whether there are as many predictions as one file may have.
    pub(crate) fn is_full(&self) -> bool {
        self.predicted.len() >= OUTSTANDING_MAX
    }

    /// The first byte of the first prediction that begins within a range.
    pub(crate) fn first_within(&self, range: Range<u64>) -> Option<u64> {
        self.predicted.range(range).next().map(|(start, _)| *start)
    }

    /// Where the last prediction ends that begins at this byte or before it.
    pub(crate) fn last_end(&self, byte: u64) -> Option<u64> {
        self.predicted.range(..=byte).next_back().map(|(_, p)| p.end)
    }

    /// A new prediction, of bytes that no other has.
    pub(crate) fn add(&mut self, extent: Range<u64>, stream: u32, late_ns: u64) {
        let predicted = Predicted { end: extent.end, stream, late_ns, arrived_to: extent.start, is_late: false };
        self.predicted.insert(extent.start, predicted);
        self.order.push_back(extent.start);
    }

    /// The extents that a stream has outstanding.
    pub(crate) fn of(&self, stream: u32) -> Vec<Range<u64>> {
        self.predicted.iter().filter(|(_, p)| p.stream == stream).map(|(start, p)| *start..p.end).collect()
    }

    /// The predictions of a stream are another's from now on.
    pub(crate) fn join(&mut self, keep: u32, gone: u32) {
        self.predicted.values_mut().filter(|p| p.stream == gone).for_each(|p| p.stream = keep);
    }

    /// A prediction that is late, in the order in which they were made; it is told once, and stays until it is taken.
    pub(crate) fn next_late(&mut self, at_ns: u64) -> Option<(Range<u64>, u32)> {
        while let Some(&start) = self.order.front() {
            match self.predicted.get(&start).filter(|p| !p.is_late) {
                Some(p) if p.late_ns > at_ns => return None,
                Some(p) => {
                    let late = (start..p.end, p.stream);
                    self.order.pop_front();
                    return Some(late);
                }
                None => {
                    self.order.pop_front();
                }
            }
        }
        None
    }

    /// A prediction that was told as late is not, until then.
    pub(crate) fn postpone(&mut self, start: u64, late_ns: u64) {
        if let Some(p) = self.predicted.get_mut(&start) {
            p.late_ns = late_ns;
            self.order.push_back(start);
        }
    }

    /// A prediction that was told as late may still come true: memory has it up to here.
    pub(crate) fn arrived_to(&self, start: u64) -> u64 {
        self.predicted.get(&start).map_or(start, |p| p.arrived_to.max(start))
    }

    /// It stays as a late one.
    pub(crate) fn stays_late(&mut self, start: u64) {
        if let Some(p) = self.predicted.get_mut(&start) {
            p.is_late = true;
            self.late.insert((p.late_ns, start));
        }
    }

    /// A late prediction to be given up; it stays until it is taken.
    pub(crate) fn next_given_up(&self, at_ns: u64, phases: &Phases) -> Option<(Range<u64>, u32)> {
        let (late_ns, start) = self.late.first()?;
        let waited_ns = at_ns.saturating_sub(*late_ns);
        let is_over = self.late.len() > LATE_MAX
            || waited_ns >= LATE_KEPT_NS && phases.period_ns().is_none_or(|period_ns| waited_ns >= period_ns);
        self.predicted.get(start).filter(|_| is_over).map(|p| (*start..p.end, p.stream))
    }

    /// Takes the predicted bytes within an extent out.
    pub(crate) fn take(&mut self, extent: &Range<u64>) -> Vec<Taken> {
        let before = self.predicted.range(..extent.start).next_back().filter(|(_, p)| p.end > extent.start);
        let within = self.predicted.range(extent.clone());
        let found: Vec<u64> = before.into_iter().chain(within).map(|(start, _)| *start).collect();
        let mut taken = Vec::with_capacity(found.len());
        for start in found {
            let Some(p) = self.predicted.remove(&start) else { continue };
            let inside = start.max(extent.start)..p.end.min(extent.end);
            let Predicted { stream, arrived_to, is_late, late_ns, .. } = p;
            taken.push(Taken { extent: inside.clone(), stream, arrived_to, is_late });
            if start < inside.start {
                let arrived_to = arrived_to.min(inside.start);
                self.predicted.insert(start, Predicted { end: inside.start, arrived_to, ..p });
            } else {
                self.late.remove(&(late_ns, start));
            }
            if inside.end < p.end {
                if is_late {
                    self.late.insert((late_ns, inside.end));
                } else {
                    self.order.push_back(inside.end);
                }
                self.predicted.insert(inside.end, p);
            }
        }
        // Entries of predictions that are gone leave at the front or here.
        if self.order.len() > 4 * OUTSTANDING_MAX {
            self.order.retain(|start| self.predicted.contains_key(start));
        }
        taken
    }

    /// These bytes were asked for.
    pub(crate) fn expect(&mut self, taken: Taken) {
        if self.expected.len() == EXPECTED_MAX {
            self.expected.pop_front();
        }
        self.expected.push_back(taken);
    }

    /// What was asked for of these bytes before is asked for anew, or has changed.
    pub(crate) fn forget_expected(&mut self, extent: &Range<u64>) {
        self.expected.retain(|e| e.extent.end <= extent.start || extent.end <= e.extent.start);
    }

    /// Predicted bytes are in memory.
    pub(crate) fn arrived(&mut self, extent: &Range<u64>) {
        let first = self.predicted.range(..=extent.start).next_back().map_or(extent.start, |(start, _)| *start);
        for (start, p) in self.predicted.range_mut(first..extent.end.max(first)) {
            p.arrived_to = arrived_to(*start, p.end, p.arrived_to, extent);
        }
        for e in &mut self.expected {
            e.arrived_to = arrived_to(e.extent.start, e.extent.end, e.arrived_to, extent);
        }
    }

    /// Takes out what was asked for of an extent, had arrived and is not in memory.
    pub(crate) fn take_lost(&mut self, extent: &Range<u64>, in_memory: &dyn Fn(u64) -> bool) -> VecDeque<Taken> {
        let (lost, kept) = self.expected.drain(..).partition(|e| e.is_lost(extent, in_memory));
        self.expected = kept;
        lost
    }

    /// Looks at memory where [`Outstanding::take_lost`] would, and then [`Outstanding::gone_of`]; changes nothing.
    pub(crate) fn look_for_lost(&self, extent: &Range<u64>, in_memory: &dyn Fn(u64) -> bool) {
        for lost in self.expected.iter().filter(|e| e.is_lost(extent, in_memory)) {
            drop(self.gone_of(lost.stream, in_memory));
        }
    }

    /// The predictions of a stream that had arrived and are not in memory.
    pub(crate) fn gone_of(&self, stream: u32, in_memory: &dyn Fn(u64) -> bool) -> Vec<Range<u64>> {
        let gone = |(start, p): &(&u64, &Predicted)| {
            let arrived = **start..p.arrived_to;
            p.stream == stream && !arrived.is_empty() && !is_there(&arrived, in_memory)
        };
        self.predicted.iter().filter(gone).map(|(start, p)| *start..p.end).collect()
    }

    /// Bytes of all predictions, those that are not late and those that are.
    #[cfg(test)]
    pub(crate) fn check(&self) -> (u64, u64) {
        let disjoint = |(a, b): ((&u64, u64), (&u64, u64))| a.1 <= *b.0;
        let ranges = || self.predicted.iter().map(|(s, p)| (s, p.end));
        assert!(ranges().zip(ranges().skip(1)).all(disjoint));
        assert!(self.order.len() <= 4 * OUTSTANDING_MAX + OUTSTANDING_MAX);
        assert!(self.expected.len() <= EXPECTED_MAX);
        assert!(self.predicted.iter().all(|(start, p)| (*start..=p.end).contains(&p.arrived_to.max(*start))));
        let late = || self.predicted.iter().filter(|(_, p)| p.is_late);
        assert!(late().map(|(start, p)| (p.late_ns, *start)).collect::<BTreeSet<_>>() == self.late);
        let in_time = || self.predicted.iter().filter(|(_, p)| !p.is_late);
        assert!(in_time().all(|(start, _)| self.order.contains(start)));
        let bytes = |(start, p): (&u64, &Predicted)| p.end - start;
        (in_time().map(bytes).sum(), late().map(bytes).sum())
    }
}
