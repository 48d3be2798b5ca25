//! Passes: in each, every queue with an eligible request has one turn; the queue with the oldest request goes first.
//!
//! A pass takes no time, or a fixed one. Passes in which nothing can be served are skipped by arithmetic.

use crate::policy::{Choice, View, WaitReason};
use crate::sorted::SortedSet;
use crate::table::Numbered;
use crate::types::Nanos;

/// When a queue may send next: the pass, and its order within that pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::policy) struct Turn {
    pub pass: u64,
    pub place: u64,
}

/// A queue's turn, and whether it is among the eligible.
type Filed = Option<(Turn, bool)>;

#[derive(Default)]
struct Lane {
    pass: u64,
    /// Queues that may send in this pass, by order.
    eligible: SortedSet<Numbered>,
    /// Other queues, by the first pass in which they may send.
    future: SortedSet<Numbered>,
}

/// The turns of numbered queues, by lane group.
pub(in crate::policy) struct Passes {
    length: Nanos,
    lanes: Vec<Lane>,
    /// By queue.
    filed: Vec<Filed>,
}

impl Passes {
    /// Passes of the given length; zero: a pass ends when every eligible queue has had its turn.
    pub fn new(length: Nanos, groups: usize) -> Passes {
        Passes { length, lanes: (0..groups).map(|_| Lane::default()).collect(), filed: Vec::new() }
    }

    /// The length of a pass.
    pub fn length(&self) -> Nanos {
        self.length
    }

    /// The current pass.
    pub fn now(&self, view: &View<'_>, lane: usize) -> u64 {
        match self.length {
            Nanos::ZERO => self.lanes[lane].pass,
            length => view.now.0 / length.0,
        }
    }

    /// When a pass begins; for passes that take time.
    pub fn begins(&self, pass: u64) -> Nanos {
        Nanos(pass.saturating_mul(self.length.0))
    }

    /// Sets a queue's turn, or removes it from all turns.
    pub fn file(&mut self, view: &View<'_>, lane: usize, queue: u32, turn: Option<Turn>) {
        let at = queue as usize;
        if self.filed.len() <= at {
            self.filed.resize(at + 1, None);
        }
        let pass = self.now(view, lane);
        let filed = turn.map(|turn| (turn, turn.pass <= pass));
        let old = std::mem::replace(&mut self.filed[at], filed);
        let eligible = |filed: Filed| filed.filter(|f| f.1).map(|(turn, _)| Numbered::new(turn.place, queue));
        let future = |filed: Filed| filed.filter(|f| !f.1).map(|(turn, _)| Numbered::new(turn.pass, queue));
        self.lanes[lane].eligible.replace(eligible(old), eligible(filed));
        self.lanes[lane].future.replace(future(old), future(filed));
    }

    /// The queue that sends next, after advancing to its pass; or how long to wait.
    pub fn next(&mut self, view: &View<'_>, lane: usize) -> Result<u32, Choice> {
        loop {
            let pass = self.now(view, lane);
            let l = &mut self.lanes[lane];
            let Some(first) = l.future.first().filter(|f| f.number() <= pass || l.eligible.is_empty()) else {
                return l.eligible.first().map(|e| e.whose()).ok_or(Choice::until_event(WaitReason::Empty));
            };
            let (due, queue) = (first.number(), first.whose());
            if due > pass && self.length != Nanos::ZERO {
                return Err(Choice::Wait { until: self.begins(due), reason: WaitReason::Quantum });
            }
            l.pass = due.max(pass);
            let turn = self.filed[queue as usize].map(|f| f.0);
            self.file(view, lane, queue, turn);
        }
    }

    /// Continues from another instance's pass after a change of parameters.
    pub fn take_over(&mut self, view: &View<'_>, other: &Passes) {
        for lane in 0..self.lanes.len().min(other.lanes.len()) {
            self.lanes[lane].pass = other.now(view, lane);
        }
    }
}
