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
//! - `adapt`: a file's next quantum follows its use. It is on in `aioli`, which is this policy with other defaults, as
//!   is `hold_us`, which is ours: short runs are held for their neighbours (`parts/holds.rs`).
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

use std::any::Any;
use std::sync::Arc;

use impresario_foresight::PredictedQueues;

use super::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};
use super::parts::arrivals::Guards;
use super::parts::foreseen::Foreseen;
use super::parts::holds::Holds;
use super::parts::levels::{Levels, key_of};
use super::parts::turns::Turns;
use super::parts::windows::{Dedicated, WINDOW_BATCHES, Windows};
use super::{
    Choice, Conduct, Done, ParamInfo, Params, Policy, PolicyError, PolicyInfo, Setup, View, WaitBound, WaitReason,
};
use crate::contract::Linked;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{LaneId, Nanos};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "mlf",
    summary: "Multilevel feedback: aggregate in offset order, quanta grow until a request's turn has come.",
    source: "agios-2013, III (algorithm of aioli-2006)",
    conduct: CONDUCT,
    params: MLF_PARAMS,
    build: |params, setup| build(params, setup, None),
};

/// The same with the parts of aIOLi that agios-2013 left out.
pub(super) const AIOLI: PolicyInfo = PolicyInfo {
    name: "aioli",
    summary: "mlf with adapted quanta and short holds for synchronous parallel applications.",
    source: "aioli-2006, part 2; defaults of the public library",
    conduct: CONDUCT,
    params: AIOLI_PARAMS,
    build: |params, setup| build(params, setup, None),
};

const CONDUCT: Conduct = Conduct {
    idles: |params| {
        let held = params.integer("window_us") > 0 && params.integer("anticipation_us") > 0;
        held || params.integer("hold_us") > 0 || params.integer("pass_us") > 0
    },
    ..Conduct::conserving("(older requests of the lane + 1) × (256 × guard_batches + 1) batches")
};

const MLF_PARAMS: &[ParamInfo] = &params("8192", "off", "0");
const AIOLI_PARAMS: &[ParamInfo] = &params("65536", "on", "900");

/// The parameters, with the defaults in which `mlf` and `aioli` differ.
pub(super) const fn params(quantum_bytes: &'static str, adapt: &'static str, hold_us: &'static str) -> [ParamInfo; 12] {
    [
        ParamInfo {
            name: "quantum_bytes",
            default: quantum_bytes,
            range: Range::Integer(512, 1 << 30),
            doc: "Each pass adds the time to process this many bytes.",
        },
        ParamInfo { doc: "Requests per virtual request at most.", ..BATCH_REQUESTS },
        ParamInfo { doc: "Bytes per virtual request at most.", ..BATCH_BYTES },
        ParamInfo {
            name: "growth",
            default: "fixed",
            range: Range::Choice(&["fixed", "double"]),
            doc: "How quanta grow: a fixed step (paper) or doubling (public library).",
        },
        ParamInfo {
            name: "pass_us",
            default: "0",
            range: Range::Integer(0, 10_000_000),
            doc: "Time that a pass takes, microseconds; 0: none.",
        },
        ParamInfo {
            name: "window_us",
            default: "60000",
            range: Range::Integer(0, 10_000_000),
            doc: "Dedicated window: how long a queue whose turn it is keeps its lane while it has requests, \
                  microseconds; 0: one batch a pass.",
        },
        ParamInfo {
            name: "anticipation_us",
            default: "2000",
            range: Range::Integer(0, 1_000_000),
            doc: "How long a lane is held within a window for the next request of a synchronous process at most, \
                  microseconds; 0: not.",
        },
        ParamInfo {
            name: "guard_batches",
            default: "16",
            range: Range::Integer(0, 1_000_000),
            doc: "Batches of a queue that may pass over its oldest request; 0: any number.",
        },
        ParamInfo {
            name: "weights",
            default: "",
            range: Range::Text("rules such as \"a: job=17 {weight=4}; b: * {weight=1}\", weights from 0.01 to 100"),
            doc: "How fast quanta grow and how long windows last, by application; the first rule that fits counts.",
        },
        ParamInfo { name: "adapt", default: adapt, range: SWITCH, doc: "A file's next quantum follows its use." },
        ParamInfo {
            name: "hold_us",
            default: hold_us,
            range: Range::Integer(0, 1_000_000),
            doc: "How long a run shorter than the file's usual ones is held for its neighbours, microseconds; 0: not.",
        },
        ParamInfo {
            name: "reads_ahead_requests",
            default: "0",
            range: Range::Integer(0, 1 << 20),
            doc: "A write is ordered as if it had arrived this many requests later.",
        },
    ]
}

/// Builds from the parameters; `foreseen`: with holds for predicted requests.
pub(super) fn build(
    params: &Params,
    setup: &Setup,
    foreseen: Option<Foreseen>,
) -> Result<Box<dyn Policy>, PolicyError> {
    let micros = |name| Nanos::from_micros(params.integer(name));
    let levels = Levels::new(params, setup);
    // If lanes share one space, a queue's next request may be for any of them, so no lane is held.
    let hold = if setup.shared_space { Nanos::ZERO } else { micros("anticipation_us") };
    let guard = params.integer("guard_batches").saturating_mul(WINDOW_BATCHES);
    Ok(Box::new(Mlf {
        levels: levels.map_err(|why| params.refuse("weights", format!("in the form of rules: {why}")))?,
        holds: Holds::new(micros("hold_us")),
        foreseen,
        windows: Windows::new(micros("window_us"), hold, params.integer("batch_bytes"), setup.lanes),
        guards: Guards::new(guard, setup.lanes.into(), setup.capacity),
        turns: Turns::default(),
        aside: Vec::new(),
        params: params.clone(),
    }))
}

/// Maximum queues skipped in one decision because their runs are held.
const ASIDE_MAX: usize = 8;

struct Mlf {
    params: Params,
    levels: Levels,
    holds: Holds,
    /// Only in policies that use recorded runs.
    foreseen: Option<Foreseen>,
    windows: Windows,
    /// By lane group.
    guards: Guards,
    turns: Turns,
    /// Queues that the current decision skips; empty between decisions.
    aside: Vec<u32>,
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
        let mut held: Option<Choice> = None;
        // A stale entry can make a queue look ready; each iteration removes one, so the loop ends.
        let choice = loop {
            let (q, window) = match self.next_queue(view, lane) {
                Ok(next) => next,
                Err(wait) => break wait,
            };
            let Some((head, guarded)) = self.levels.head(view, q, window) else {
                self.levels.refile(view, q);
                continue;
            };
            if !guarded
                && view.open(view.table.lane(head))
                && let Some(until) = self.hold_until(view, q, head)
            {
                let hold = Choice::Wait { until, reason: WaitReason::Hold };
                // Within a window, a short wait costs less than a seek to another file and back.
                if window.is_some() && self.foreseen.as_ref().is_some_and(|f| f.is_causal()) {
                    break hold;
                }
                held = Some(held.map_or(hold, |held| held.sooner(hold)));
                self.levels.put_aside(view, q);
                self.aside.push(q);
                continue;
            }
            break self.send_if_open(view, q, head, batch);
        };
        held.map_or(choice, |held| held.sooner(choice))
    }

    /// The lane's next queue, and where its offset order begins if the lane is in its window.
    fn next_queue(&mut self, view: &View<'_>, lane: usize) -> Result<(u32, Option<u64>), Choice> {
        match self.windows.at(view, lane, |key| self.levels.find(key)) {
            Dedicated::To(q, offset) if !self.aside.contains(&q) => return Ok((q, Some(offset))),
            Dedicated::To(..) | Dedicated::No => {}
            Dedicated::Held(until) => return Err(Choice::Wait { until, reason: WaitReason::Hold }),
            Dedicated::Over(q) => self.levels.end_turn(view, q),
        }
        self.levels.next(view, lane).map(|q| (q, None))
    }

    /// How long a queue holds its first run `head` for a longer one; `None`: not at all.
    fn hold_until(&mut self, view: &View<'_>, q: u32, head: Slot) -> Option<Nanos> {
        if self.aside.len() >= ASIDE_MAX {
            return None;
        }
        if let Some(foreseen) = &mut self.foreseen
            && let Some(until) = foreseen.hold(view, self.levels.runs(), self.levels.queue(q).stream(), head)
        {
            return Some(until);
        }
        if !self.holds.any() {
            return None;
        }
        let (queue, (requests, first, newest)) = (self.levels.queue(q), self.levels.run(view, q, head));
        self.holds.until(view.now, (queue.file, queue.key.2), requests, first, newest)
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
        self.holds.sent((queue.file, queue.key.2), batch.len());
        if let Some(foreseen) = &mut self.foreseen {
            foreseen.sent(view, queue.stream(), batch);
        }
        match self.windows.sent(view, queue.key, queue.weight, end) {
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
        if new {
            self.windows.arrived(view, self.levels.queue(q).stream(), view.table.start(slot));
        }
        if let Some(foreseen) = &mut self.foreseen {
            foreseen.arrived(view, slot);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(q) = self.levels.find(&key_of(view, slot)) else { return };
        let (group, file, op) = {
            let queue = self.levels.queue(q);
            (queue.key.0, queue.file, queue.key.2)
        };
        self.guards.remove(view.table, group, slot);
        if let Some(foreseen) = &mut self.foreseen {
            foreseen.cancelled(slot);
        }
        if self.levels.remove(view, q, slot) {
            self.holds.cancelled((file, op));
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |lane| {
            let choice = self.serve(view, lane, batch);
            for q in self.aside.drain(..) {
                self.levels.refile(view, q);
            }
            Some(choice)
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
        let Some(&slot) = done.slots.first() else { return };
        if let Some(foreseen) = &mut self.foreseen {
            let (group, file) = (view.group(slot) as u16, view.names.file(view.table.file(slot)));
            foreseen.completed((LaneId(group), file, done.op), done.service);
        }
        if !self.windows.expects() {
            return;
        }
        let (key, lane) = (key_of(view, slot), view.table.lane(slot));
        if self.levels.find(&key).is_none() {
            self.windows.ended(view, key, (lane, view.names.file(key.1), key.2), done);
        }
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let older = view.table.older_than(slot, view.groups() == 1);
        let foreseen = self.foreseen.as_ref().map_or(Nanos::ZERO, |f| f.longest());
        let (batches, held) = (self.guards.wait(older), self.holds.longest() + self.windows.longest_hold() + foreseen);
        let holds = held.0.saturating_mul(batches.saturating_add(1));
        WaitBound { idle: self.levels.wait(view, slot, older) + Nanos(holds), ..WaitBound::of_batches(batches) }
    }

    fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        if let Some(foreseen) = &mut self.foreseen {
            foreseen.foresee(queues);
        }
    }

    fn linked(&self) -> Option<Linked> {
        self.foreseen.as_ref().map(Foreseen::linked)
    }

    /// Keeps quanta, histories, windows and accounts.
    fn take_over(&mut self, view: &View<'_>, old: Box<dyn Any>) {
        let Ok(old) = old.downcast::<Mlf>() else { return };
        self.levels.take_over(view, old.levels);
        self.holds.take_over(old.holds);
        if let (Some(mine), Some(theirs)) = (&mut self.foreseen, old.foreseen) {
            mine.take_over(theirs);
        }
        self.windows.take_over(view, old.windows);
    }
}
