//! How far the processes that read a file together have come, so that they stay in step.
//!
//! With strides the processes go through a file side by side, and a drive reads ahead for all of them. One that falls
//! behind by more than the drive keeps costs a seek back and forth with each request, for good: those in front never
//! wait for it. The *step* of a request is how many its source had sent in the recorded run.

use std::collections::BTreeSet;

use impresario_foresight::PredictedId;
use rustc_hash::FxHashMap;

use super::anticipation::Stream;
use crate::table::Slot;

/// A process is behind if it is so many requests behind another.
const BEHIND: u32 = 8;
/// Waits in vain, beyond those that were not, after which each further one makes those that are tried half as many.
const IN_VAIN_MAX: u32 = 4;
/// Of so many, as a power of two, one is tried at least.
const TRIED_MIN_LOG2: u32 = 16;

#[derive(Default)]
struct Pace {
    /// Step and slot of what is queued.
    queued: BTreeSet<(u32, u32)>,
    /// Step of what follows completions and has not arrived.
    expected: BTreeSet<(u32, PredictedId)>,
    /// The lane has waited for it.
    awaited: Option<PredictedId>,
    in_vain: u32,
    /// So many requests that are behind are not waited for.
    passed_over: u32,
}

/// Of all streams that the recorded run has.
#[derive(Default)]
pub(super) struct Paces {
    streams: FxHashMap<Stream, Pace>,
}

impl Paces {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.streams.clear();
    }

    /// The completion that a request follows has come.
    pub fn expect(&mut self, stream: Stream, step: u32, id: PredictedId) {
        self.streams.entry(stream).or_default().expected.insert((step, id));
    }

    /// A request was queued.
    pub fn arrived(&mut self, stream: Stream, step: u32, id: PredictedId, slot: Slot) {
        let pace = self.streams.entry(stream).or_default();
        pace.expected.remove(&(step, id));
        pace.queued.insert((step, slot.0));
        if pace.awaited.take_if(|awaited| *awaited == id).is_some() {
            pace.in_vain = pace.in_vain.saturating_sub(1);
        }
    }

    /// It left the queue.
    pub fn left(&mut self, stream: Stream, step: u32, slot: Slot) {
        if let Some(pace) = self.streams.get_mut(&stream) {
            pace.queued.remove(&(step, slot.0));
        }
    }

    /// The queued request that is farthest behind one of this step.
    pub fn behind(&self, stream: Stream, step: u32) -> Option<Slot> {
        let (behind, slot) = *self.streams.get(&stream)?.queued.first()?;
        (behind + BEHIND <= step).then_some(Slot(slot))
    }

    /// The expected request that is farthest behind one of this step, if it is worth a wait.
    pub fn expected_behind(&mut self, stream: Stream, step: u32) -> Option<PredictedId> {
        let pace = self.streams.get_mut(&stream)?;
        loop {
            let (behind, id) = *pace.expected.first()?;
            if behind + BEHIND > step {
                return None;
            }
            if pace.passed_over == 0 {
                return Some(id);
            }
            pace.passed_over -= 1;
            pace.expected.pop_first();
        }
    }

    /// The lane waits for it.
    pub fn waits(&mut self, stream: Stream, id: PredictedId) {
        if let Some(pace) = self.streams.get_mut(&stream) {
            pace.awaited = Some(id);
        }
    }

    /// It is no longer expected; that was in vain if the lane has waited for it.
    pub fn give_up(&mut self, stream: Stream, step: u32, id: PredictedId) {
        if let Some(pace) = self.streams.get_mut(&stream) {
            pace.expected.remove(&(step, id));
            if pace.awaited.take_if(|awaited| *awaited == id).is_some() {
                pace.in_vain = (pace.in_vain + 1).min(TRIED_MIN_LOG2);
                pace.passed_over = if pace.in_vain < IN_VAIN_MAX { 0 } else { 1 << pace.in_vain };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use impresario_foresight::{PredictedQueues, Recorded};

    use super::*;
    use crate::types::{LaneId, Op};

    const STREAM: Stream = (LaneId(0), 7, Op::Read);

    #[test]
    fn who_is_behind_goes_first_and_is_awaited_until_that_is_in_vain() {
        let request = |i: u64| Recorded {
            file: 7,
            write: false,
            offset: i * 8,
            len: 8,
            arrival_ns: i,
            completed_ns: Some(i + 1),
            source: 1,
        };
        let queues = PredictedQueues::new((0..16).map(request));
        let id = |i: u64| queues.find((7, false), (i * 8, 8), i, (0, 0.0)).unwrap();
        let mut paces = Paces::default();
        paces.arrived(STREAM, 3, id(3), Slot(1));
        assert_eq!((paces.behind(STREAM, 10), paces.behind(STREAM, 11)), (None, Some(Slot(1))));
        paces.left(STREAM, 3, Slot(1));
        assert_eq!(paces.behind(STREAM, 11), None);
        paces.expect(STREAM, 4, id(4));
        assert_eq!((paces.expected_behind(STREAM, 11), paces.expected_behind(STREAM, 12)), (None, Some(id(4))));
        paces.arrived(STREAM, 4, id(4), Slot(2));
        assert_eq!((paces.expected_behind(STREAM, 12), paces.behind(STREAM, 12)), (None, Some(Slot(2))));
        // Whether it is worth a wait; `waits`: the lane did wait, in vain.
        let mut worth = |waits: bool| {
            paces.expect(STREAM, 5, id(5));
            let awaited = paces.expected_behind(STREAM, 20);
            if let Some(id) = awaited {
                if waits {
                    paces.waits(STREAM, id);
                }
                paces.give_up(STREAM, 5, id);
            }
            awaited.is_some()
        };
        assert!((0..10).all(|_| worth(false)), "what was not waited for was not in vain");
        let waits: Vec<usize> = (0..100).filter(|_| worth(true)).collect();
        assert_eq!(waits, [0, 1, 2, 3, 20, 53], "ever more rarely");
        assert_eq!(paces.streams[&STREAM].expected.len(), 0);
    }
}
