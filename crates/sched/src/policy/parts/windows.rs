//! Dedicated windows (aioli-2006, part 2: "serialise and define dedicated windows"): every change of file moves the
//! disk's head, so the queue whose turn it is keeps its lane for a while.
//!
//! A window lasts while its queue has requests. When a synchronous process has none for the moment, the lane is held
//! within the window for its next request, where that pays (`anticipation.rs`).

use super::anticipation::{Anticipation, Stream};
use crate::policy::{Done, View};
use crate::types::{FileId, LaneId, Nanos, Op};

/// A lane group, file and operation.
pub(in crate::policy) type Key = (usize, FileId, Op);

/// Maximum batches of one window; limits how long others wait when batches take next to no time.
pub(in crate::policy) const WINDOW_BATCHES: u64 = 256;

/// A lane is dedicated to one queue.
#[derive(Clone, Copy)]
struct Window {
    key: Key,
    end: Nanos,
    batches: u64,
    /// End of its last batch: within a window the offset order continues there and wraps.
    offset: u64,
}

impl Window {
    fn lasts(&self, view: &View<'_>) -> bool {
        view.now < self.end && self.batches < WINDOW_BATCHES
    }
}

/// What a window means for its lane at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::policy) enum Dedicated {
    /// The lane is not dedicated.
    No,
    /// Dedicated to a queue, whose offset order continues at an offset.
    To(u32, u64),
    /// Held until an instant for the next request of an empty queue.
    Held(Nanos),
    /// The window of this queue has ended.
    Over(u32),
}

/// The windows of all lane groups.
pub(in crate::policy) struct Windows {
    length: Nanos,
    lanes: Vec<Option<Window>>,
    anticipation: Option<Anticipation>,
    /// A request that starts at most this far behind the last one continues its stream.
    reach_bytes: u64,
}

impl Windows {
    /// Windows of the given length (zero: none), in which lanes are held for at most `hold` (zero: not at all).
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

    /// The queue to which a lane is dedicated at present, whether or not it has requests, and until when.
    pub fn current(&self, view: &View<'_>, lane: usize) -> Option<(Key, Nanos)> {
        self.lanes[lane].filter(|window| window.lasts(view)).map(|window| (window.key, window.end))
    }

    /// What a lane is dedicated to; `queue_of` finds the queue of a key if it has requests. Drops windows that have
    /// ended.
    pub fn at(&mut self, view: &View<'_>, lane: usize, queue_of: impl FnOnce(&Key) -> Option<u32>) -> Dedicated {
        let Some(window) = self.lanes[lane] else { return Dedicated::No };
        let queue = queue_of(&window.key);
        if window.lasts(view) {
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

    /// A queue sent a batch that ended at an offset. If the lane has no window, one begins and lasts `weight` times the
    /// usual length; false if windows are off or another queue has one.
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

    /// An empty queue received a request that starts at an offset.
    pub fn arrived(&mut self, view: &View<'_>, stream: Stream, start: u64) {
        let Some(anticipation) = &mut self.anticipation else { return };
        anticipation.arrived(view.now, stream);
        if let Some((expected, end)) = anticipation.expected(stream.0)
            && expected == stream
        {
            // The fixed part of the cost is the price of turning elsewhere, which a distant request pays anyway.
            let near = (end..=end.saturating_add(self.reach_bytes)).contains(&start);
            let saved = if near { view.cost.ttp(stream.2, 0) } else { Nanos::ZERO };
            anticipation.fulfilled(view.now, stream.0, saved);
        }
    }

    /// Whether lanes may be held for expected requests.
    pub fn expects(&self) -> bool {
        self.anticipation.is_some()
    }

    /// A batch ended and its queue is empty: expect the next request if the lane is still dedicated to it.
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

    /// Takes over another instance's windows and accounts after a change of parameters. A running window ends when it
    /// would have, or after the new length from now.
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
