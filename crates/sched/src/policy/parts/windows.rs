//! Dedicated windows (aioli-2006, part 2: "serialise and define dedicated windows"): since every change of file moves
//! the disk's head, the queue whose turn it is keeps its lane for a while.
//!
//! A window lasts as long as its queue has requests. When a synchronous process has none for the moment, the lane is
//! held within the window for the one that is about to come, where that pays (`anticipation.rs`).

use super::anticipation::{Anticipation, Stream};
use crate::policy::{Done, View};
use crate::types::{FileId, LaneId, Nanos, Op};

/// A lane group, file and operation.
pub(in crate::policy) type Key = (usize, FileId, Op);

/// Batches of one window at most: bounds what others wait for when batches take next to no time.
pub(in crate::policy) const WINDOW_BATCHES: u64 = 256;

/// The lane is dedicated to one queue.
#[derive(Clone, Copy)]
struct Window {
    key: Key,
    end: Nanos,
    batches: u64,
    /// Where its last batch ended: within a window the offset order goes on from there and wraps.
    offset: u64,
}

/// What a window means for its lane at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::policy) enum Dedicated {
    /// To nothing.
    No,
    /// To a queue, whose offset order goes on from an offset.
    To(u32, u64),
    /// To the next request of a queue that is empty, until then.
    Held(Nanos),
    /// No longer to this queue: its window is over.
    Over(u32),
}

/// The windows of all lane groups.
pub(in crate::policy) struct Windows {
    length: Nanos,
    lanes: Vec<Option<Window>>,
    anticipation: Option<Anticipation>,
    /// A request that starts so far behind the last one at most continues its stream.
    reach_bytes: u64,
}

impl Windows {
    /// Windows of so long (zero: none), in which lanes are held for at most `hold` (zero: not).
    pub fn new(length: Nanos, hold: Nanos, reach_bytes: u64, lanes: u16) -> Windows {
        let holds = hold > Nanos::ZERO && length > Nanos::ZERO;
        Windows {
            length,
            lanes: vec![None; lanes.into()],
            anticipation: holds.then(|| Anticipation::new(hold, true, lanes)),
            reach_bytes,
        }
    }

    /// Longest hold before one batch.
    pub fn longest_hold(&self) -> Nanos {
        self.anticipation.as_ref().map_or(Nanos::ZERO, |a| a.longest().min(self.length))
    }

    /// To what a lane is dedicated; `queue_of` finds the queue of a key while it has requests. What is over is forgotten.
    pub fn at(&mut self, view: &View<'_>, lane: usize, queue_of: impl FnOnce(&Key) -> Option<u32>) -> Dedicated {
        let Some(window) = self.lanes[lane] else { return Dedicated::No };
        let (queue, lasts) = (queue_of(&window.key), view.now < window.end && window.batches < WINDOW_BATCHES);
        if lasts {
            if let Some(queue) = queue {
                return Dedicated::To(queue, window.offset);
            }
            if let Some(until) = self.anticipation.as_mut().and_then(|a| a.hold(view.now, LaneId(lane as u16))) {
                return Dedicated::Held(until);
            }
        }
        self.lanes[lane] = None;
        queue.map_or(Dedicated::No, Dedicated::Over)
    }

    /// A queue sent a batch that ended at an offset. Its window begins, if the lane has none, and lasts `weight` times
    /// as long as usual; false when windows are off, or another queue has one.
    pub fn sent(&mut self, view: &View<'_>, key: Key, weight: f64, offset: u64) -> bool {
        match &mut self.lanes[key.0] {
            Some(window) if window.key == key => {
                (window.batches, window.offset) = (window.batches + 1, offset);
                true
            }
            none @ None if self.length > Nanos::ZERO => {
                let end = view.now + Nanos((self.length.0 as f64 * weight) as u64);
                *none = Some(Window { key, end, batches: 1, offset });
                true
            }
            _ => false,
        }
    }

    /// An empty queue got a request that starts at an offset.
    pub fn arrived(&mut self, view: &View<'_>, stream: Stream, start: u64) {
        let Some(anticipation) = &mut self.anticipation else { return };
        anticipation.arrived(view.now, stream);
        if let Some((expected, end)) = anticipation.expected(stream.0)
            && expected == stream
        {
            // The fixed part of the cost is what turning elsewhere would have added. What lies far off costs it anyway.
            let near = (end..=end.saturating_add(self.reach_bytes)).contains(&start);
            let saved = if near { view.cost.ttp(stream.2, 0) } else { Nanos::ZERO };
            anticipation.came(view.now, stream.0, saved);
        }
    }

    /// Lanes may be held for requests that are expected.
    pub fn expects(&self) -> bool {
        self.anticipation.is_some()
    }

    /// A batch ended and its queue is empty: its next request is expected, if the lane is still dedicated to it.
    pub fn ended(&mut self, view: &View<'_>, key: Key, stream: Stream, done: &Done<'_>) {
        let Some(anticipation) = &mut self.anticipation else { return };
        if done.errno != 0 || view.lanes[stream.0.index()].in_flight_requests > 0 {
            return;
        }
        anticipation.ended(view.now, stream);
        if let Some(window) = self.lanes[key.0].filter(|w| w.key == key && view.now < w.end) {
            anticipation.expect(view.now, stream, done.end, window.end);
        }
    }

    /// Goes on with the windows and accounts of another one, after a change of parameters. Windows that have begun end
    /// as they would have, or after the new length from now.
    pub fn take_over(&mut self, view: &View<'_>, other: Windows) {
        if let (Some(mine), Some(theirs)) = (&mut self.anticipation, other.anticipation) {
            mine.take_over(theirs);
        }
        if self.length > Nanos::ZERO && self.lanes.len() == other.lanes.len() {
            self.lanes = other.lanes;
            self.lanes.iter_mut().flatten().for_each(|w| w.end = w.end.min(view.now + self.length));
        }
    }
}
