//! `set10`: applications in sets by how often they do I/O; alone within a set, shares between sets (Set-10).
//!
//! An application belongs to set i = round(log₁₀ T), where T is the mean time in seconds between the starts of its I/O
//! phases. Within a set applications are served one after the other, in the order in which their phases began, so that
//! similar applications do not stretch each other's phases. Sets share the device with weights 10⁻ⁱ: the short phase of
//! a frequent application costs those with long phases little, and helps it much.
//!
//! Source: Boito, Pallez, Teylo and Vidal, "IO-SETS: simple and efficient approaches for I/O bandwidth management",
//! IEEE TPDS 2023. Where it is silent, or needs what a server does not know:
//! - Periods are learnt: a phase begins with a request after `phase_gap_ms` without outstanding ones (`phases.rs`), and
//!   T is the mean over about 16 periods. Until the second phase begins, T is `unknown_period_s`; `rules` can set it
//!   (`big: job=17 {period_s=900}`).
//! - Sets range from 10⁻³ s to 10⁶ s; a T outside belongs to the nearest.
//! - Shares are of device time and per lane: start-time fair queueing, debited by the cost model at dispatch, corrected
//!   by the device time at completion. A set that was idle starts at the others' virtual time.
//! - If the application whose turn it is in a set has nothing queued at the moment, the next one by start of phase
//!   goes. Within an application: order of arrival, aggregated.
//!
//! Wait: an endless phase would starve its set, so after `guard_batches` batches of a lane that passed over its oldest
//! request, that request goes next (0 disables the guard). Work-conserving.

use std::any::Any;

use super::lowest_yield_first::PHASE_GAP;
use super::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, MERGE_ON, Range};
use super::parts::flows::{Flows, hull_bytes};
use super::parts::phases::{Application, Phases};
use super::parts::rules::{self, Rule};
use super::parts::turns::Turns;
use super::{Choice, Conduct, Done, ParamInfo, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::names::Who;
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "set10",
    summary: "Applications in sets by the period of their I/O phases: alone within a set, shares between sets.",
    source: "IO-SETS (Boito et al., IEEE TPDS 2023)",
    conduct: Conduct {
        shares: true,
        ..Conduct::conserving("(older requests of the lane + 1) × (guard_batches + 1) batches")
    },
    params: &[
        ParamInfo {
            name: "rules",
            default: "",
            range: Range::Text("rules such as \"big: job=17|18 {period_s=900}\", by job only"),
            doc: "Known periods: period_s, seconds between the beginnings of phases, 0.001 to 1e6.",
        },
        ParamInfo {
            name: "unknown_period_s",
            default: "1",
            range: Range::Decimal(0.001, 1e6),
            doc: "The period of an application until it has begun two phases, seconds.",
        },
        PHASE_GAP,
        MERGE_ON,
        BATCH_REQUESTS,
        BATCH_BYTES,
        GUARD_BATCHES,
    ],
    build: |params, setup| Ok(Box::new(Set10::new(params, setup).map_err(|e| params.refuse("rules", e))?)),
};

/// The sets are 10^-3 to 10^6 seconds; a set's index counts from the first.
const FIRST: i32 = -3;
const SETS: usize = 10;

/// The index of the set of a period.
fn set_of(period_s: f64) -> usize {
    (period_s.max(1e-9).log10().round() as i32 - FIRST).clamp(0, SETS as i32 - 1) as usize
}

/// Virtual time of a set for some device time: multiplied by 10^i, the inverse of its share.
fn virtual_ns(set: usize, device: Nanos) -> u128 {
    u128::from(device.0) * 10u128.pow(set as u32)
}

#[derive(Default)]
struct Group {
    /// (set, phase number, flow); most groups have one set at a time.
    flows: SortedSet<(u16, u64, u32)>,
    /// The virtual time of the set served last.
    virtual_now: u128,
    /// Virtual time used by each set.
    used: [u128; SETS],
}

impl Group {
    fn insert(&mut self, set: usize, order: u64, flow: u32) {
        if self.first_from(set).is_none_or(|f| usize::from(f.0) != set) {
            self.used[set] = self.used[set].max(self.virtual_now);
        }
        self.flows.insert((set as u16, order, flow));
    }

    /// The first entry of a set, or of the next non-empty one.
    fn first_from(&self, set: usize) -> Option<(u16, u64, u32)> {
        self.flows.at_or_after(&(set as u16, 0, 0))
    }

    /// The flow that sends next: in the set that has used least, the application whose phase began first.
    fn next(&self) -> Option<u32> {
        let firsts = std::iter::successors(self.flows.first(), |f| self.first_from(usize::from(f.0) + 1));
        firsts.min_by_key(|f| self.used[usize::from(f.0)]).map(|f| f.2)
    }
}

/// A batch in flight.
#[derive(Clone, Copy)]
struct Flight {
    job: u32,
    group: usize,
    set: usize,
    estimate: Nanos,
}

struct Set10 {
    params: Params,
    known: Vec<(Rule, f64)>,
    unknown_s: f64,
    phases: Phases,
    /// By lane group and application, with the set and phase number under which each is filed.
    flows: Flows<u32, Option<(usize, u64)>, Flight>,
    groups: Vec<Group>,
    turns: Turns,
}

impl Set10 {
    fn new(params: &Params, setup: &Setup) -> Result<Set10, String> {
        let mut known = Vec::new();
        for rule in rules::parse(params.text("rules"))? {
            rule.only(&["period_s"])?;
            rule.by_job_only()?;
            let period_s = rule.number("period_s", f64::NAN, 0.001..=1e6)?;
            if period_s.is_nan() {
                return Err(format!("rule {} gives no period_s", rule.name));
            }
            known.push((rule, period_s));
        }
        Ok(Set10 {
            known,
            unknown_s: params.decimal("unknown_period_s"),
            phases: Phases::new(Nanos::from_millis(params.integer("phase_gap_ms"))),
            flows: Flows::new(params, setup, params.integer("guard_batches")),
            groups: (0..setup.lanes).map(|_| Group::default()).collect(),
            turns: Turns::default(),
            params: params.clone(),
        })
    }

    /// The period of an application, and its source.
    fn period_s(&self, who: &Who, job: Option<&Application>) -> (f64, String) {
        if let Some((rule, period_s)) = self.known.iter().find(|k| k.0.fits(who)) {
            return (*period_s, format!("by rule {}", rule.name));
        }
        match job.map(|j| j.period).filter(|p| p.seen > 0) {
            Some(period) => (period.mean_s, format!("learnt from {} periods", period.seen)),
            None => (self.unknown_s, "not known yet".into()),
        }
    }

    fn close(&mut self, flow: u32) {
        let group = self.flows.key(flow).0;
        if let Some((set, order)) = self.flows.data(flow).take() {
            self.groups[group].flows.remove(&(set as u16, order, flow));
        }
        self.flows.close(flow);
    }
}

impl Policy for Set10 {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let job = self.phases.arrived(view, slot);
        let group = view.group(slot);
        let (flow, new) = self.flows.push(view, job, slot, true);
        if !new {
            return;
        }
        // Neither changes while the application has requests queued.
        let job = self.phases.job(job);
        let (order, set) = (job.order, set_of(self.period_s(&view.who(slot), Some(job)).0));
        *self.flows.data(flow) = Some((set, order));
        self.groups[group].insert(set, order, flow);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(flow) = self.flows.remove(view, slot) else { return };
        self.phases.left(self.flows.key(flow).1, 1, view.now);
        if self.flows.is_empty(flow) {
            self.close(flow);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| {
            let due = self.flows.due(view, group);
            let flow = due.or_else(|| self.groups[group].next())?;
            let first = self.flows.first(view, flow)?;
            if !view.open(view.table.lane(first)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            self.flows.take(view, first, batch);
            let estimate = view.cost.ttp(view.table.op(first), hull_bytes(view, batch));
            if let Some((set, _)) = *self.flows.data(flow) {
                let g = &mut self.groups[group];
                if due.is_none() {
                    g.virtual_now = g.virtual_now.max(g.used[set]);
                }
                g.used[set] += virtual_ns(set, estimate);
                let job = self.flows.key(flow).1;
                self.flows.depart(batch[0], Flight { job, group, set, estimate });
            }
            if self.flows.is_empty(flow) {
                self.close(flow);
            }
            Some(Choice::Serve)
        });
        self.turns = turns;
        choice
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        WaitBound::of_batches(self.flows.guarded_wait(view, slot))
    }

    fn reads_device_time(&self) -> bool {
        true
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        let Some(flight) = self.flows.returned(done) else { return };
        let used = &mut self.groups[flight.group].used[flight.set];
        *used =
            (*used + virtual_ns(flight.set, done.device_time)).saturating_sub(virtual_ns(flight.set, flight.estimate));
        self.phases.left(flight.job, done.slots.len() as u32, view.now);
    }

    fn explain(&self, who: &Who, _: Nanos) -> Option<String> {
        let (period_s, source) = self.period_s(who, self.phases.find(who.job));
        let set = set_of(period_s) as i32 + FIRST;
        Some(format!("job {}: period {period_s:.3} s, {source}; set {set}, weight 1e{}", who.job, -set))
    }

    fn take_over(&mut self, _: &View<'_>, old: Box<dyn Any>) {
        if let Ok(old) = old.downcast::<Set10>() {
            self.phases.import(old.phases.export());
        }
    }
}
