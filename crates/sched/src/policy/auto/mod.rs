//! `auto`: chooses the policy that suits the layer below the scheduler and the observed requests.
//!
//! The papers leave the choice to future work (agios-2013, VI; twins-2017, VIII). Here a readable table (`table.rs`)
//! makes it: the first rule whose conditions hold for the place (layer below, device class) and the observed requests
//! (`observe.rs`) names alternatives with their simulated gain over `fifo`; the alternative with the largest gain by
//! `objective` acts. `impresario-lab auto` retrains the built-in table.
//!
//! - **Switching.** Another rule takes effect once two observation windows in a row agree on it (after a pause, the
//!   first window), if its expected gain exceeds [`MARGIN`] (after a pause, at all). The new policy receives the queued
//!   requests in order of arrival.
//! - **Pauses.** After a pause the rule acts under which the application's last phase of that operation ended; of one that is not
//!   known, the rule for nothing observed until the first window is full, unless the last two phases ended under the same rule.
//! - **Correction.** The rate (bytes per time with something outstanding) is measured before and after a switch, unless
//!   a pause preceded it and while the same rule applies. A choice that yields less than [`YIELD_MIN`] of the previous
//!   rate is undone and avoided for a minute, doubling each time.
//! - **Bound.** No switch happens while a request moved by the previous one still waits. A request is thus moved at
//!   most once, and waits no longer than its first and its second policy allow together.
//!
//! If no observation could change the rule (above a kernel that sorts), nothing is observed.

mod meter;
mod observe;
pub mod table;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::sync::Arc;

use impresario_foresight::PredictedQueues;
use serde::Serialize;

use super::params::Range;
use super::{Choice, Conduct, Done, ParamInfo, Params, Policy, PolicyError, PolicyInfo, Setup, View, WaitBound, build};
use crate::contract::Linked;
use crate::members::{Agreed, Members};
use crate::names::Who;
use crate::spec::PolicySpec;
use crate::table::{Slot, State};
use crate::types::{ConnId, Nanos};
use meter::Meter;
use observe::Sampler;
pub use observe::{DeviceClass, FEATURES, Observation};
use table::{Alternative, DecisionTable, NodeRole, Objective, Situation};

/// No switch for less expected relative gain.
pub const MARGIN: f64 = 0.05;
/// Consecutive windows that must agree before a switch.
const AGREEING: u32 = 2;
/// A switch that yields less than this part of the previous rate is undone.
pub const YIELD_MIN: f64 = 0.9;
/// How long an undone choice is avoided: at first, and at most.
const REMEMBERED: (Nanos, Nanos) = (Nanos::from_millis(60_000), Nanos::from_millis(3_600_000));
/// Maximum choices avoided at a time.
const UNDONE_MAX: usize = 16;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "auto",
    summary: "Choose by a table from the layer below and observations; above a layer that sorts, hand over at once.",
    source: "table trained in the simulator; the papers leave the choice to future work (agios-2013, VI; twins-2017, VIII)",
    // The laws and drivers ask the acting policy.
    conduct: Conduct {
        idles: |_| true,
        is_chosen_by_hand: true,
        ..Conduct::conserving("as the policy that acts; a request that a switch moved, as the two that had it")
    },
    params: &[
        ParamInfo {
            name: "objective",
            default: "makespan",
            range: Range::Choice(&Objective::NAMES),
            doc: "What is to be gained: the time of the slowest process, the mean time of a process, even times, or the \
                  least that an application gets.",
        },
        ParamInfo {
            name: "table",
            default: "",
            range: Range::Text("the text of a decision table"),
            doc: "Another decision table; empty: the built-in one. Configuration files and commands take table=FILE.",
        },
    ],
    build: |params, setup| {
        let refuse = |why| PolicyError::Unsuitable { policy: "auto", why: format!("its decision table: {why}") };
        Ok(Box::new(Auto::new(params, table::of(params).map_err(refuse)?, setup)?))
    },
};

/// The status of `auto`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Chosen {
    /// The objective.
    pub objective: Objective,
    /// Data server or I/O node.
    pub place: NodeRole,
    /// The layer below sorts.
    pub sorted_below: bool,
    /// The layer below has an order of its own.
    pub scheduled_below: bool,
    /// Device class by the cost model; absent before the first request.
    pub device: Option<DeviceClass>,
    /// The rule behind the acting policy.
    pub rule: String,
    /// The acting policy.
    pub policy: PolicySpec,
    /// Speculative reads are started beside it.
    pub read_ahead: bool,
    /// Expected gain of the acting policy over `fifo`.
    pub expected_gain: f64,
    /// The rule's other alternatives with their expected gains, best first.
    pub alternatives: Vec<Expected>,
    /// Switches since the start.
    pub switches: u64,
    /// Choices that performed worse than expected and are avoided for now.
    pub undone: Vec<String>,
    /// The latest observation, if any.
    pub observed: Option<Observation>,
    /// Bytes per second with something outstanding, since the rule or policy changed; absent while there are too few
    /// measurements.
    pub rate_bytes_per_s: Option<f64>,
}

/// An alternative not chosen.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Expected {
    /// The policy.
    pub policy: String,
    /// The expected gain over `fifo`.
    pub gain: f64,
}

/// A rule and one of its alternatives, by index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pick {
    rule: usize,
    choice: usize,
}

/// A choice that is avoided for now.
struct Undone {
    pick: Pick,
    /// What acts instead.
    instead: Pick,
    until: Nanos,
    /// How long the next time.
    next: Nanos,
}

/// Applications and operations whose phases are remembered; they displace one another.
const LEARNT: usize = 64;

/// What a phase of an application and operation ended under.
#[derive(Clone, Copy, Default)]
struct Learnt {
    tag: u64,
    rule: usize,
    /// Without the identity of an application the last two agreed.
    is_sure: bool,
}

/// A phase of I/O.
#[derive(Clone, Copy, Default)]
struct Phase {
    /// Whose: of the application and operation of its first request, never 0.
    tag: u64,
    /// The application has an identity.
    is_known: bool,
    /// A window of it was full.
    is_judged: bool,
}

/// A switch under evaluation.
struct Trial {
    before: f64,
    back: Pick,
}

struct Auto {
    params: Params,
    setup: Setup,
    objective: Objective,
    table: DecisionTable,
    situation: Situation,
    inner: Box<dyn Policy>,
    acting: Pick,
    /// `None` if nothing need be observed.
    sampler: Option<Sampler>,
    /// The device class is known.
    begun: bool,
    seen: Option<Observation>,
    /// The rule of the phase before this one.
    ended: Option<usize>,
    phase: Phase,
    learnt: [Learnt; LEARNT],
    /// The rule on which the last windows agreed, and how many did.
    counts: (usize, u32),
    wanted: Option<Pick>,
    /// The youngest request moved by the last switch.
    moved: Option<u64>,
    switches: u64,
    meter: Meter,
    trial: Option<Trial>,
    undone: Vec<Undone>,
    foreseen: Option<Arc<PredictedQueues>>,
    members: Agreed,
}

impl Auto {
    fn new(params: &Params, table: DecisionTable, setup: &Setup) -> Result<Auto, PolicyError> {
        let place = if setup.lanes > 1 { NodeRole::IoNode } else { NodeRole::Data };
        let Setup { sorted_below, scheduled_below, .. } = *setup;
        let situation = Situation { place, sorted_below, scheduled_below, device: None };
        let objective = Objective::named(params.text("objective"));
        let rule = table.rule_for(situation, None);
        let acting = Pick { rule, choice: best(&table.rule[rule].choice, objective) };
        let inner = build(&table.rule[rule].choice[acting.choice].spec(), setup)?;
        let sampler = (!table.needs_no_observation(situation)).then(Sampler::new);
        Ok(Auto {
            params: params.clone(),
            setup: *setup,
            objective,
            table,
            situation,
            inner,
            acting,
            sampler,
            begun: false,
            seen: None,
            ended: None,
            phase: Phase::default(),
            learnt: [Learnt::default(); LEARNT],
            counts: (rule, 0),
            wanted: None,
            moved: None,
            switches: 0,
            meter: Meter::default(),
            trial: None,
            undone: Vec::new(),
            foreseen: None,
            members: Agreed::default(),
        })
    }

    fn alternative(&self, pick: Pick) -> &Alternative {
        &self.table.rule[pick.rule].choice[pick.choice]
    }

    /// The rule's choice, or (true) what acts instead because that choice performed worse.
    fn pick(&self, rule: usize, now: Nanos) -> (Pick, bool) {
        let pick = Pick { rule, choice: best(&self.table.rule[rule].choice, self.objective) };
        let undone = self.undone.iter().find(|u| u.pick == pick && now < u.until);
        undone.map_or((pick, false), |undone| (undone.instead, true))
    }

    /// Remembers what the phase that is over ended under, if that was observed.
    fn learn(&mut self) {
        let Phase { tag, is_known, is_judged } = self.phase;
        if is_judged {
            let (learnt, rule) = (&mut self.learnt[tag as usize % LEARNT], self.counts.0);
            let agrees = learnt.tag == tag && learnt.rule == rule;
            *learnt = Learnt { tag, rule, is_sure: is_known || agrees };
        }
    }

    /// A phase begins with a request. The rule acts under which the application's last one ended. What suited that of another
    /// may spoil the start of this one, so otherwise the rule for nothing observed acts until the first window is full, unless
    /// the last two phases ended under the same rule.
    fn begin(&mut self, view: &View<'_>, slot: Slot) {
        self.learn();
        let who = view.who(slot);
        let tag = observe::hash(who.job, who.op as u64 + 1) | 1 << 63;
        self.phase = Phase { tag, is_known: who.job != 0, is_judged: false };
        let learnt = self.learnt[tag as usize % LEARNT];
        let known = (learnt.tag == tag && learnt.is_sure).then_some(learnt.rule);
        let ended = self.begun.then_some(self.counts.0);
        let alike = ended.is_some() && ended == self.ended;
        (self.begun, self.ended) = (true, ended);
        self.situation.device = Some(DeviceClass::of(view.cost));
        self.wanted = None;
        if known.is_some() || !alike {
            let rule = known.unwrap_or_else(|| self.table.rule_for(self.situation, None));
            let (pick, _) = self.pick(rule, view.now);
            self.wanted = (!same(self.alternative(pick), self.alternative(self.acting))).then_some(pick);
        }
    }

    /// An observation window is full.
    fn observed(&mut self, view: &View<'_>, seen: Observation) {
        self.seen = Some(seen);
        self.phase.is_judged = true;
        self.situation.device = Some(DeviceClass::of(view.cost));
        let rule = self.table.rule_for(self.situation, Some(&seen));
        if rule != self.counts.0 || seen.first {
            self.counts = (rule, 0);
            self.trial = None;
            self.meter.begin(0);
        }
        self.counts.1 += 1;
        self.judge_trial(view.now);
        let (pick, measured) = self.pick(rule, view.now);
        let (now, wanted) = (self.alternative(self.acting), self.alternative(pick));
        if same(now, wanted) {
            self.acting = pick;
            self.wanted = None;
            return;
        }
        let agreed = seen.first || self.counts.1 >= AGREEING;
        // The rule's entry for the acting policy, if it lists it.
        let listed = self.table.rule[rule].choice.iter().find(|other| same(other, now));
        let worth = |alternative: &Alternative| 1.0 - alternative.gain(self.objective);
        // At the start of a phase nothing measured speaks for the acting policy.
        let pays = measured || seen.first || listed.is_none_or(|listed| worth(wanted) < worth(listed) * (1.0 - MARGIN));
        self.wanted = (agreed && pays && !self.has_moved(view)).then_some(pick);
    }

    /// Undoes a switch that yielded less than the policy before it.
    fn judge_trial(&mut self, now: Nanos) {
        let Some(rate) = self.meter.rate() else { return };
        let Some(Trial { before, back }) = self.trial.take() else { return };
        if rate >= before * YIELD_MIN {
            return;
        }
        let pick = self.acting;
        let known = self.undone.iter().position(|u| u.pick == pick);
        let last = known.map_or(REMEMBERED.0, |at| self.undone.swap_remove(at).next);
        if self.undone.len() == UNDONE_MAX {
            self.undone.remove(0);
        }
        let next = Nanos(last.0.saturating_mul(2).min(REMEMBERED.1.0));
        self.undone.push(Undone { pick, instead: back, until: now + last, next });
    }

    /// True while a request moved by the last switch waits.
    fn has_moved(&self, view: &View<'_>) -> bool {
        let Some(moved) = self.moved else { return false };
        let queued = view.table.in_state(|state| state == State::Queued);
        queued.iter().any(|slot| view.table.op(*slot).is_data() && view.table.seq(*slot) <= moved)
    }

    /// Requests left the queue.
    fn left(&mut self, view: &View<'_>, slots: &[Slot], choice: Choice) {
        let Some(sampler) = &mut self.sampler else { return };
        match choice {
            Choice::Serve | Choice::ServeThrough => slots.iter().for_each(|slot| sampler.left(view, *slot)),
            // The core sends the whole request if the driver takes no pieces, or if the piece is the rest.
            Choice::ServePiece { len_bytes } => {
                let whole = |slot: &&Slot| !view.pieces || len_bytes >= view.table.len_bytes(**slot);
                slots.iter().filter(whole).for_each(|slot| sampler.left(view, *slot));
            }
            Choice::Wait { .. } => {}
        }
    }

    fn switch(&mut self, view: &View<'_>, to: Pick) -> bool {
        // The table was validated when parsed; skip a policy that this node refuses.
        let Ok(next) = build(&self.alternative(to).spec(), &self.setup) else { return false };
        let same_phase = self.seen.is_some_and(|seen| !seen.first);
        let before = self.meter.rate().filter(|_| same_phase);
        self.trial = before.map(|before| Trial { before, back: self.acting });
        let old = std::mem::replace(&mut self.inner, next);
        self.inner.take_over(view, old);
        self.members.iter().for_each(|members| self.inner.members(view, members));
        self.inner.foresee(self.foreseen.clone());
        self.moved = None;
        for slot in view.table.in_state(|state| state == State::Queued) {
            if view.table.op(slot).is_data() {
                self.inner.enqueue(view, slot);
                self.moved = Some(view.table.seq(slot));
            }
        }
        // Requests sent by the old policy do not count for the new one.
        self.meter.begin(view.table.len() as u32);
        self.acting = to;
        self.switches += 1;
        true
    }

    fn chosen(&self) -> Chosen {
        let (rule, acting) = (&self.table.rule[self.acting.rule], self.alternative(self.acting));
        let others = rule.choice.iter().filter(|other| !same(other, acting));
        let mut alternatives: Vec<Expected> =
            others.map(|a| Expected { policy: a.policy.clone(), gain: a.gain(self.objective) }).collect();
        alternatives.sort_by(|a, b| b.gain.total_cmp(&a.gain));
        Chosen {
            objective: self.objective,
            place: self.situation.place,
            sorted_below: self.situation.sorted_below,
            scheduled_below: self.situation.scheduled_below,
            device: self.situation.device,
            rule: rule.name.clone(),
            policy: self.inner.spec(),
            read_ahead: acting.read_ahead,
            expected_gain: acting.gain(self.objective),
            alternatives,
            switches: self.switches,
            undone: self.undone.iter().map(|u| self.alternative(u.pick).policy.clone()).collect(),
            observed: self.seen,
            rate_bytes_per_s: self.meter.rate(),
        }
    }
}

/// The alternative with the largest expected gain; the first among equals.
fn best(choices: &[Alternative], objective: Objective) -> usize {
    let better = |best: usize, at: usize| {
        if choices[at].gain(objective) > choices[best].gain(objective) { at } else { best }
    };
    (0..choices.len()).reduce(better).unwrap_or(0)
}

/// True if both configure the same policy, whatever their expected gains.
fn same(a: &Alternative, b: &Alternative) -> bool {
    a.policy == b.policy && a.depth == b.depth && a.read_ahead == b.read_ahead
}

impl Policy for Auto {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        if let Some(sampler) = &mut self.sampler {
            self.meter.arrived(view.now, view.table.len() <= 1);
            let (seen, paused) = sampler.arrived(view, slot);
            if let Some(seen) = seen {
                self.observed(view, seen);
            }
            if paused || !self.begun {
                self.begin(view, slot);
            }
        }
        self.inner.enqueue(view, slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        if let Some(sampler) = &mut self.sampler {
            sampler.left(view, slot);
        }
        self.inner.dequeue(view, slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let choice = self.inner.select(view, batch);
        self.left(view, batch, choice);
        choice
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        let choice = self.inner.serve_lane(view, oldest, batch);
        self.left(view, batch, choice);
        choice
    }

    fn serve_pressing(&mut self, view: &View<'_>, slot: Slot, batch: &mut Vec<Slot>) -> Choice {
        let choice = self.inner.serve_pressing(view, slot, batch);
        self.left(view, batch, choice);
        choice
    }

    fn reconsider(&mut self, view: &View<'_>) -> bool {
        self.wanted.take().is_some_and(|to| self.switch(view, to))
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        self.inner.wait_bound(view, slot)
    }

    fn is_withheld(&self, view: &View<'_>, slot: Slot) -> bool {
        self.inner.is_withheld(view, slot)
    }

    fn may_withhold(&self) -> bool {
        self.inner.may_withhold()
    }

    fn unlimited(&self) -> bool {
        self.inner.unlimited()
    }

    fn lane_requests(&self) -> Option<u32> {
        let asked = [self.inner.lane_requests(), self.alternative(self.acting).depth];
        asked.into_iter().flatten().min()
    }

    fn speculates(&self) -> bool {
        // A policy that hands over everything at once may speculate too; only `none` configured directly does not.
        self.alternative(self.acting).read_ahead
    }

    fn shares(&self) -> bool {
        self.objective == Objective::Share || self.inner.shares()
    }

    fn acting(&self) -> PolicySpec {
        self.inner.spec()
    }

    fn reads_device_time(&self) -> bool {
        self.inner.reads_device_time()
    }

    fn window(&self, view: &View<'_>) -> u64 {
        self.inner.window(view)
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        if let Some(sampler) = &mut self.sampler {
            sampler.completed(view, done);
            self.meter.ended(view.now, done.len_bytes, done.slots.len() as u32);
        }
        self.inner.completed(view, done);
    }

    fn readiness(&mut self, view: &View<'_>, conn: ConnId) {
        self.inner.readiness(view, conn);
    }

    fn explain(&self, who: &Who, now: Nanos) -> Option<String> {
        let rule = &self.table.rule[self.acting.rule].name;
        let what = match self.unlimited() {
            true => "hands every request over at once".to_string(),
            false => format!("schedules as {}", self.inner.spec()),
        };
        let more = self.inner.explain(who, now).map(|more| format!("; {more}")).unwrap_or_default();
        Some(format!("auto {what}: {rule}{more}"))
    }

    fn chosen(&self) -> Option<Chosen> {
        Some(Auto::chosen(self))
    }

    fn members(&mut self, view: &View<'_>, members: &Members) {
        self.inner.members(view, members);
        self.members.add(view.shared_now, members.clone());
    }

    fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        self.inner.foresee(queues.clone());
        self.foreseen = queues;
    }

    fn linked(&self) -> Option<Linked> {
        self.inner.linked()
    }

    fn take_over(&mut self, view: &View<'_>, old: Box<dyn Any>) {
        let old = match old.downcast::<Auto>() {
            Ok(mut auto) => {
                // With the same table and objective the choice stays; queued requests are enqueued again.
                if auto.table == self.table && auto.objective == self.objective && auto.setup.lanes == self.setup.lanes
                {
                    let spec = auto.alternative(auto.acting).spec();
                    if let Ok(inner) = build(&spec, &self.setup) {
                        self.inner = inner;
                        (self.acting, self.counts, self.begun) = (auto.acting, auto.counts, auto.begun);
                        (self.situation, self.seen, self.switches) = (auto.situation, auto.seen, auto.switches);
                        (self.ended, self.phase, self.learnt) = (auto.ended, auto.phase, auto.learnt);
                        self.undone = std::mem::take(&mut auto.undone);
                    }
                }
                auto.inner as Box<dyn Any>
            }
            Err(old) => old,
        };
        self.inner.take_over(view, old);
    }
}
