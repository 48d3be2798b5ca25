//! `mlf`: the multilevel-feedback scheduler of aIOLi as AGIOS describes it (agios-2013, III).
//!
//! Requests wait in two queues per file, one for reads and one for writes, in offset order; touching requests are
//! aggregated into virtual requests (`parts/runs.rs`). A new request has a quantum of 0. Each *pass* adds
//! TTP(`quantum_bytes`) to the quantum of every request; a virtual request has the sum of its parts' quanta. Queues are
//! visited by oldest arrival, and each sends at most one batch per pass: the first virtual request in offset order
//! whose quantum is at least TTP(its size). All that is in `parts/levels.rs`.
//!
//! From aioli-2006, part 2:
//! - The queue whose turn it is keeps its lane for a *dedicated window* of `window_us` while it has requests, whatever
//!   their quanta; the lane is held for up to `anticipation_us` when a synchronous process is about to send the next
//!   one (`parts/windows.rs`). `window_us=0` is the rule of agios-2013 alone.
//! - `weights`: an application's quanta grow faster, and its windows last longer, by its weight ("the grow of a quantum
//!   could be set for each application"). A queue has the weight of the request that opened it.
//! - `adapt`: a file's next quantum follows its use. It is on in `aioli`, as is `hold_us`, which is ours: short runs are
//!   held for their neighbours (`parts/holds.rs`).
//!
//! What lengthens or delays a queue's turn is in `parts/tenure.rs`, the parameters are in `mlf/params.rs`.
//!
//! Ours, where the papers are silent: a virtual request is at most one batch. "Offset order" starts at the lowest
//! offset each time, which starves high ones: after `guard_batches` batches of a queue that passed over its oldest
//! request, that request goes next, whatever its quantum; after [`WINDOW_BATCHES`] times as many batches of a lane that
//! passed over the lane's oldest, that one goes, whatever quanta, windows and holds say (0 disables both guards). A
//! pass takes no time unless `pass_us` sets one, for a deep hand-off below. `reads_ahead_requests`: a write is ordered
//! as if it had arrived that many requests later, so that reads go first.
//!
//! Wait: (older requests of the lane + 1) × (`guard_batches` × [`WINDOW_BATCHES`] + 1) batches. Work-conserving except
//! for holds (`hold_us`, and `anticipation_us` within windows: at most one of each before a batch; both stop for files
//! where they do not pay) and `pass_us` (a lane idles until the pass in which a request becomes eligible).

mod params;

use std::any::Any;
use std::sync::Arc;

use impresario_foresight::PredictedQueues;

pub(super) use params::params;
use params::{MLF_PARAMS, dwell};

use super::parts::arrivals::Guards;
use super::parts::levels::{Levels, key_of};
use super::parts::tenure::{Foresight, Start, Tenure};
use super::parts::turns::Turns;
use super::parts::windows::WINDOW_BATCHES;
use super::{Choice, Conduct, Done, Params, Policy, PolicyError, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::contract::Linked;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "mlf",
    summary: "Multilevel feedback: aggregate in offset order, quanta grow until a request's turn has come.",
    source: "agios-2013, III (algorithm of aioli-2006)",
    conduct: Conduct { idles: |params| (CONDUCT.idles)(params) || dwell(params) > Nanos::ZERO, ..CONDUCT },
    params: &MLF_PARAMS,
    build: |params, setup| build(params, setup, Foresight::of_readers(dwell(params), setup)),
};

pub(super) const CONDUCT: Conduct = Conduct {
    idles: |params| {
        let held = params.integer("window_us") > 0 && params.integer("anticipation_us") > 0;
        held || params.integer("hold_us") > 0 || params.integer("pass_us") > 0
    },
    ..Conduct::conserving("(older requests of the lane + 1) × (256 × guard_batches + 1) batches")
};

/// Builds from the parameters.
pub(super) fn build(params: &Params, setup: &Setup, foresight: Foresight) -> Result<Box<dyn Policy>, PolicyError> {
    let levels = Levels::new(params, setup);
    let guard = params.integer("guard_batches").saturating_mul(WINDOW_BATCHES);
    Ok(Box::new(Mlf {
        levels: levels.map_err(|why| params.refuse("weights", format!("in the form of rules: {why}")))?,
        tenure: Tenure::new(params, setup, foresight),
        guards: Guards::new(guard, setup.lanes.into()),
        turns: Turns::default(),
        params: params.clone(),
    }))
}

struct Mlf {
    params: Params,
    levels: Levels,
    tenure: Tenure,
    /// By lane group.
    guards: Guards,
    turns: Turns,
}

impl Mlf {
    /// Puts a lane's next batch into `batch`, or says how long to wait.
    fn serve(&mut self, view: &View<'_>, lane: usize, batch: &mut Vec<Slot>) -> Choice {
        if let Some(oldest) = self.guards.due(view.table, lane)
            && let Some(q) = self.levels.find(&key_of(view, oldest))
        {
            let first = self.levels.head_of(oldest);
            return self.send_if_open(view, q, first, batch);
        }
        // A stale entry can make a queue look ready; each iteration removes one or skips a queue, so the loop ends.
        loop {
            let (q, window) = match self.tenure.next_queue(view, &mut self.levels, lane) {
                Ok(next) => next,
                Err(wait) => return wait,
            };
            let Some(head) = self.levels.head(view, q, window) else {
                self.levels.refile(view, q);
                continue;
            };
            match self.tenure.start(view, &mut self.levels, q, head) {
                Start::Now(q, first) => return self.send_if_open(view, q, first, batch),
                Start::Wait(wait) => return wait,
                Start::Later => {}
            }
        }
    }

    fn send_if_open(&mut self, view: &View<'_>, q: u32, first: Slot, batch: &mut Vec<Slot>) -> Choice {
        if view.open(view.table.lane(first)) {
            self.send(view, q, first, batch);
            return Choice::Serve;
        }
        Choice::until_event(WaitReason::LanesBusy)
    }

    /// Sends the run, or the rest of it, that begins at a request of a queue.
    fn send(&mut self, view: &View<'_>, q: u32, first: Slot, batch: &mut Vec<Slot>) {
        let end = self.levels.take(view, q, first, batch);
        let queue = self.levels.queue(q);
        self.guards.sent(view.table, queue.key.0, batch);
        match self.tenure.sent(view, queue, batch, end) {
            true => self.levels.refile(view, q),
            false => self.levels.end_turn(view, q),
        }
    }
}

impl Policy for Mlf {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.guards.insert(view.table, view.group(slot), slot);
        let (q, new) = self.levels.insert(view, slot);
        self.tenure.arrived(view, self.levels.queue(q), new, slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(q) = self.levels.find(&key_of(view, slot)) else { return };
        let queue = self.levels.queue(q);
        let (group, file_op, stream) = (queue.key.0, queue.file_op(), queue.stream());
        self.guards.remove(view.table, group, slot);
        let was_last = self.levels.remove(view, q, slot);
        self.tenure.cancelled(view, stream, slot, was_last.then_some(file_op));
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |lane| {
            let choice = self.serve(view, lane, batch);
            Some(self.tenure.take_back(view, &mut self.levels, choice))
        });
        self.turns = turns;
        choice
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        let Some(q) = self.levels.find(&key_of(view, oldest)) else { return Choice::until_event(WaitReason::Empty) };
        let head = self.levels.head_of(oldest);
        if let Some(until) = self.levels.waits_until(view, q, head) {
            return Choice::Wait { until, reason: WaitReason::Quantum };
        }
        self.send(view, q, oldest, batch);
        Choice::Serve
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        self.tenure.completed(view, &self.levels, done);
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let older = view.table.older_than(slot, view.groups() == 1);
        let batches = self.guards.wait(older);
        let holds = self.tenure.longest_hold().0.saturating_mul(batches.saturating_add(1));
        WaitBound { idle: self.levels.wait(view, slot, older) + Nanos(holds), ..WaitBound::of_batches(batches) }
    }

    fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        self.tenure.foresee(queues);
    }

    fn linked(&self) -> Option<Linked> {
        self.tenure.linked()
    }

    /// Keeps quanta, histories, windows and accounts.
    fn take_over(&mut self, view: &View<'_>, old: Box<dyn Any>) {
        let Ok(old) = old.downcast::<Mlf>() else { return };
        self.levels.take_over(view, old.levels);
        self.tenure.take_over(view, old.tenure);
    }
}
