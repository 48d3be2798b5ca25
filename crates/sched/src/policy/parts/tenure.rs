//! How long a queue of `mlf` keeps its lane, and what its lane waits for: dedicated windows (`windows.rs`), short runs held
//! for their neighbours (`holds.rs`), predicted requests (`foreseen.rs`, `due.rs`).

use std::sync::Arc;

use impresario_foresight::PredictedQueues;

use super::anticipation::Stream;
use super::due::Due;
use super::foreseen::Foreseen;
use super::holds::{FileOp, Holds};
use super::levels::{Levels, Queue, key_of};
use super::readers::Readers;
use super::windows::{Dedicated, Windows};
use crate::contract::Linked;
use crate::policy::{Choice, Done, Params, Setup, View, WaitReason};
use crate::table::Slot;
use crate::types::{LaneId, Nanos};

/// Maximum queues skipped in one decision because their runs are held.
const ASIDE_MAX: usize = 8;

/// What is made of a recorded run.
pub(in crate::policy) enum Foresight {
    /// Nothing.
    None,
    /// There is none: processes that go on are recognised while they read.
    Readers(Readers),
    /// Waits for predicted aggregations.
    Aggregations(Foreseen),
    /// Waits for requests that are due.
    Due(Due),
}

impl Foresight {
    /// That of processes that go on, for which a lane dwells so long; 0: nothing.
    pub fn of_readers(dwell: Nanos, setup: &Setup) -> Foresight {
        if dwell == Nanos::ZERO {
            return Foresight::None;
        }
        Foresight::Readers(Readers::new(dwell, setup.lanes.into()))
    }
}

/// What becomes of a queue's turn.
pub(in crate::policy) enum Start {
    /// It sends the run that begins here, perhaps another queue's, so that processes stay in step.
    Now(u32, Slot),
    /// The lane waits.
    Wait(Choice),
    /// The queue is skipped for the rest of this decision: its run is held for a longer one.
    Later,
}

/// Of all queues.
pub(in crate::policy) struct Tenure {
    windows: Windows,
    holds: Holds,
    foresight: Foresight,
    /// Queues that the current decision skips; empty between decisions.
    aside: Vec<u32>,
    /// The first wait of those that ends.
    held: Option<Choice>,
}

impl Tenure {
    /// From the parameters of `mlf`.
    pub fn new(params: &Params, setup: &Setup, foresight: Foresight) -> Tenure {
        let micros = |name| Nanos::from_micros(params.integer(name));
        // If lanes share one space, a queue's next request may be for any of them, so no lane is held.
        let hold = if setup.shared_space { Nanos::ZERO } else { micros("anticipation_us") };
        Tenure {
            windows: Windows::new(micros("window_us"), hold, params.integer("batch_bytes"), setup.lanes),
            holds: Holds::new(micros("hold_us")),
            foresight,
            aside: Vec::new(),
            held: None,
        }
    }

    /// The lane's next queue, and where its offset order begins if the lane is in its window.
    pub fn next_queue(
        &mut self,
        view: &View<'_>,
        levels: &mut Levels,
        lane: usize,
    ) -> Result<(u32, Option<u64>), Choice> {
        if let Foresight::Due(due) = &mut self.foresight
            && let Some((key, end)) = self.windows.current(view, lane)
        {
            let stream = (LaneId(lane as u16), view.names.file(key.1), key.2);
            if let Some(until) = due.next(view, stream, levels.find(&key).is_none()) {
                return Err(Choice::Wait { until: until.min(end), reason: WaitReason::Hold });
            }
        }
        match self.windows.at(view, lane, |key| levels.find(key)) {
            Dedicated::To(q, offset) if !self.aside.contains(&q) => return Ok((q, Some(offset))),
            Dedicated::To(..) | Dedicated::No => {}
            Dedicated::Held(until) => {
                if let Foresight::Due(due) = &mut self.foresight {
                    due.idles(view, lane);
                }
                return Err(Choice::Wait { until, reason: WaitReason::Hold });
            }
            Dedicated::Over(q) => levels.end_turn(view, q),
        }
        levels.next(view, lane).map(|q| (q, None))
    }

    /// What becomes of the turn of a queue whose first run is `head`; `guarded`: the guard makes it send this run.
    pub fn start(&mut self, view: &View<'_>, levels: &mut Levels, q: u32, (head, guarded): (Slot, bool)) -> Start {
        if !view.open(view.table.lane(head)) {
            return Start::Now(q, head);
        }
        let head = match self.in_step(view, levels, q, (head, guarded)) {
            Ok(head) => head,
            Err(until) => return Start::Wait(Choice::Wait { until, reason: WaitReason::Hold }),
        };
        let sender = levels.find(&key_of(view, head)).unwrap_or(q);
        let hold = if guarded { None } else { self.hold(view, levels, sender, head) };
        match hold {
            None => Start::Now(sender, head),
            Some(hold) if self.keeps_lane() => Start::Wait(hold),
            Some(hold) => {
                self.held = Some(self.held.map_or(hold, |held| held.sooner(hold)));
                levels.put_aside(view, sender);
                self.aside.push(sender);
                Start::Later
            }
        }
    }

    /// The wait of a queue that holds its first run `head` for a longer one.
    fn hold(&mut self, view: &View<'_>, levels: &Levels, q: u32, head: Slot) -> Option<Choice> {
        if self.aside.len() >= ASIDE_MAX {
            return None;
        }
        let queue = levels.queue(q);
        let foreseen = match &mut self.foresight {
            Foresight::None | Foresight::Readers(_) => None,
            Foresight::Aggregations(foreseen) => foreseen.hold(view, levels.runs(), queue.stream(), head),
            Foresight::Due(due) => due.neighbours(view, levels.runs(), queue.stream(), head),
        };
        let until = foreseen.or_else(|| {
            let (requests, first, newest) = self.holds.any().then(|| levels.run(view, q, head))?;
            self.holds.until(view.now, queue.file_op(), requests, first, newest)
        })?;
        Some(Choice::Wait { until, reason: WaitReason::Hold })
    }

    /// What a queue sends in place of its first run so that its processes stay in step, or until when it waits for that.
    /// `guarded`: the guard makes the queue send this run.
    fn in_step(
        &mut self,
        view: &View<'_>,
        levels: &mut Levels,
        q: u32,
        (head, guarded): (Slot, bool),
    ) -> Result<Slot, Nanos> {
        let stream = levels.queue(q).stream();
        match &mut self.foresight {
            Foresight::Due(due) => due.in_step(view, levels, stream, (head, guarded)),
            Foresight::Readers(readers) => readers.choose(view, levels, stream, (head, guarded)),
            _ => Ok(head),
        }
    }

    /// Whether a queue whose run is held keeps its lane: a short wait costs less than a seek to another file and back.
    fn keeps_lane(&self) -> bool {
        matches!(self.foresight, Foresight::Due(_) | Foresight::Readers(_))
    }

    /// A decision is over: what it skipped takes part again, and its choice lasts no longer than the first hold of those.
    pub fn take_back(&mut self, view: &View<'_>, levels: &mut Levels, choice: Choice) -> Choice {
        self.aside.drain(..).for_each(|q| levels.refile(view, q));
        self.held.take().map_or(choice, |held| held.sooner(choice))
    }

    /// A request was queued; `new`: its queue was empty.
    pub fn arrived(&mut self, view: &View<'_>, queue: &Queue, new: bool, slot: Slot) {
        if new {
            self.windows.arrived(view, queue.stream(), view.table.start(slot));
        }
        match &mut self.foresight {
            Foresight::None => {}
            Foresight::Readers(readers) => readers.arrived(view, queue.stream(), slot),
            Foresight::Aggregations(foreseen) => foreseen.arrived(view, slot),
            Foresight::Due(due) => due.arrived(view, queue.stream(), new, slot),
        }
    }

    /// A request was cancelled; `emptied`: the last one of its queue.
    pub fn cancelled(&mut self, view: &View<'_>, stream: Stream, slot: Slot, emptied: Option<FileOp>) {
        match &mut self.foresight {
            Foresight::None => {}
            Foresight::Readers(readers) => readers.left(view, stream, slot),
            Foresight::Aggregations(foreseen) => foreseen.cancelled(slot),
            Foresight::Due(due) => due.cancelled(view, stream, slot),
        }
        if let Some(file_op) = emptied {
            self.holds.cancelled(file_op);
        }
    }

    /// A queue sent a batch that ended at an offset; whether it keeps its lane.
    pub fn sent(&mut self, view: &View<'_>, queue: &Queue, batch: &[Slot], end: u64) -> bool {
        self.holds.sent(queue.file_op(), batch.len());
        match &mut self.foresight {
            Foresight::None => {}
            Foresight::Readers(readers) => readers.sent(view, queue.stream(), batch),
            Foresight::Aggregations(foreseen) => foreseen.sent(view, queue.stream(), batch),
            Foresight::Due(due) => due.sent(view, queue.stream(), batch),
        }
        self.windows.sent(view, queue.key, queue.weight, end)
    }

    /// A batch ended.
    pub fn completed(&mut self, view: &View<'_>, levels: &Levels, done: &Done<'_>) {
        let Some(&slot) = done.slots.first() else { return };
        let key = key_of(view, slot);
        let stream = (LaneId(key.0 as u16), view.names.file(key.1), key.2);
        let empty = levels.find(&key).is_none();
        match &mut self.foresight {
            Foresight::None => {}
            Foresight::Readers(readers) => {
                readers.completed(view, stream.0.index(), done);
                if readers.went_by_parts(stream.0.index()) {
                    return;
                }
            }
            Foresight::Aggregations(foreseen) => foreseen.completed(stream, done.service),
            Foresight::Due(due) => {
                due.completed(view, stream, empty, done);
                if !due.may_stay(stream.0.index()) {
                    return;
                }
            }
        }
        if self.windows.expects() && empty {
            self.windows.ended(view, key, (view.table.lane(slot), stream.1, stream.2), done);
        }
    }

    /// The longest time that a lane idles before one batch.
    pub fn longest_hold(&self) -> Nanos {
        let foreseen = match &self.foresight {
            Foresight::None => Nanos::ZERO,
            Foresight::Readers(readers) => readers.longest(),
            Foresight::Aggregations(foreseen) => foreseen.longest(),
            Foresight::Due(due) => due.longest(),
        };
        self.holds.longest() + self.windows.longest_hold() + foreseen
    }

    /// Sets or clears the prediction from a recorded run.
    pub fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        match &mut self.foresight {
            Foresight::None | Foresight::Readers(_) => {}
            Foresight::Aggregations(foreseen) => foreseen.foresee(queues),
            Foresight::Due(due) => due.foresee(queues),
        }
    }

    /// How many requests matched the recorded run.
    pub fn linked(&self) -> Option<Linked> {
        match &self.foresight {
            Foresight::None | Foresight::Readers(_) => None,
            Foresight::Aggregations(foreseen) => Some(foreseen.linked()),
            Foresight::Due(due) => Some(due.linked()),
        }
    }

    /// Takes over another instance's windows, histories and accounts after a change of parameters.
    pub fn take_over(&mut self, view: &View<'_>, other: Tenure) {
        self.holds.take_over(other.holds);
        match (&mut self.foresight, other.foresight) {
            (Foresight::Aggregations(mine), Foresight::Aggregations(theirs)) => mine.take_over(theirs),
            (Foresight::Due(mine), Foresight::Due(theirs)) => mine.take_over(theirs),
            _ => {}
        }
        self.windows.take_over(view, other.windows);
    }
}
