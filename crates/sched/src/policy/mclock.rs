//! `mclock`: reservation, weight and limit per class (mClock: Gulati, Merchant and Varman, OSDI 2010).
//!
//! `rules` names classes (job, user, client, file, operation; the first matching rule applies; `each=` as in `tbf`) and
//! gives each a `reservation` and a `limit` per second (0: none) and a `weight`. Costs count in requests or, with
//! `unit=device`, in seconds of device time (by the cost model at dispatch, corrected by the service time at
//! completion). Each class has three tags, each max(now, previous + cost ÷ rate), for its oldest request:
//! - *Constraint phase*: among classes whose reservation tag is due, the earliest tag goes first.
//! - *Weight phase*, when no tag is due: among classes within their limit, the lowest weight tag goes first. This does
//!   not count against the class's reservation.
//!
//! "Now" in the reservation tag is the request's arrival, so a reservation that the device could not keep stays owed,
//! as in the paper. The limit tag counts from dispatch: a class never makes up for time below its limit (with the
//! paper's arrival tags a backlog can exceed it later); but a due reservation goes whatever the limit says, as in the
//! paper. The paper adjusts the weight tags of all active classes whenever an idle one returns, so that the lowest
//! equals the present; we keep the tags in virtual time (a returning class starts at the last tag served), which has
//! the same effect at any scale of weights without touching the others. As in dmClock's library, only a class's oldest
//! request has tags.
//!
//! Choices: requests without a matching rule form a class of weight 1 without reservation or limit; a reservation above
//! its limit is refused; tags belong to this server, over all its lanes (a client of several servers would need
//! dmClock's counts in its requests: not here), while queues, and the virtual time at which a class starts, belong to a
//! lane. Rules can be changed live: classes whose rule keeps its name keep their tags. `merge=on` (not in the original)
//! also sends a request's queued neighbours of the same class.
//!
//! Wait: excessive reservations and large weights would starve others. So after `guard_batches` batches of a lane that
//! passed over its oldest request of a class without a limit, that request goes; likewise for the oldest among classes
//! that have a limit and are within it; and after as many batches by reservation while others within their limits
//! waited, one goes by weight (0 disables the guards). A class at its limit waits even if its lane idles; that is the
//! rule's purpose and stays on: one batch at the limit's rate per older request of the class. Otherwise
//! work-conserving.

use std::any::Any;

use super::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, MERGE_OFF, Range};
use super::parts::class_flows::{ClassFlows, Flight};
use super::parts::classes::Classes;
use super::parts::flows::refile;
use super::parts::rules;
use super::parts::shares::{Share, shares};
use super::parts::turns::Turns;
use super::{Choice, Conduct, Done, ParamInfo, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::names::Who;
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "mclock",
    summary: "Reservation, weight and limit for each class.",
    source: "mClock (Gulati et al., OSDI 2010)",
    conduct: Conduct {
        shares: true,
        idles: |params| {
            rules::parse(params.text("rules")).is_ok_and(|all| all.iter().any(|r| r.settings.contains_key("limit")))
        },
        ..Conduct::conserving(
            "(older requests + 1) × (guard_batches + 1) batches; with a limit, twice that and its rate",
        )
    },
    params: &[
        ParamInfo {
            name: "rules",
            default: "default: * {each=job}",
            range: Range::Text(
                "rules such as \"db: job=17 {reservation=500, weight=4}; rest: * {limit=200, each=user}\"",
            ),
            doc: "Settings: reservation and limit per second (0: none; up to 1e9), weight (0.001 to 1e6, default 1), \
                  each=rule|job|user|client|file.",
        },
        ParamInfo {
            name: "unit",
            default: "requests",
            range: Range::Choice(&["requests", "device"]),
            doc: "What reservations and limits count per second: requests, or seconds of device time.",
        },
        MERGE_OFF,
        BATCH_REQUESTS,
        BATCH_BYTES,
        ParamInfo {
            doc: "Batches of a lane that may pass over its oldest request without a limit; 0: any number.",
            ..GUARD_BATCHES
        },
    ],
    build: |params, setup| Ok(Box::new(Mclock::new(params, setup).map_err(|e| params.refuse("rules", e))?)),
};

/// The base of the next request's tags.
#[derive(Clone, Copy, Default, Debug)]
struct Tags {
    reservation: Nanos,
    /// Virtual time, ns; 64 bits would overflow within days.
    weight: u128,
    limit: Nanos,
}

/// Breaks ties by arrival.
type Tag<T = Nanos> = (T, u64);

const NO_TAG: Tag = (Nanos::MAX, u64::MAX);
const NO_WEIGHT: Tag<u128> = (u128::MAX, u64::MAX);

/// The sets of its group that contain a flow, and its keys there.
struct Filed {
    reservation: Tag,
    weight: Tag<u128>,
    limit: Tag,
    /// The oldest request, if the class has a limit and is within it.
    allowed: u64,
}

impl Default for Filed {
    fn default() -> Self {
        Filed { reservation: NO_TAG, weight: NO_WEIGHT, limit: NO_TAG, allowed: u64::MAX }
    }
}

#[derive(Default)]
struct Group {
    reservations: SortedSet<(Tag, u32)>,
    /// Within their limits.
    weights: SortedSet<(Tag<u128>, u32)>,
    /// At their limits.
    limited: SortedSet<(Tag, u32)>,
    /// Flows of limited classes within their limit, by oldest request; and the batches that passed over the first.
    allowed: SortedSet<(u64, u32)>,
    left_out: u64,
    /// The last weight tag served.
    virtual_now: u128,
    /// Consecutive batches by reservation while a flow within its limit waited.
    reserved_run: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Constraint,
    Weight,
}

struct Mclock {
    params: Params,
    in_device_time: bool,
    /// A batch in flight records whether it used a reservation.
    queues: ClassFlows<Tags, Filed>,
    /// By rule; the last is for requests without a matching rule.
    shares: Vec<Share>,
    groups: Vec<Group>,
    turns: Turns,
    guard_batches: u64,
}

/// The time that a cost takes at a rate.
fn span(cost: f64, rate: f64) -> Nanos {
    Nanos::from_secs_f64((cost / rate).max(1e-9))
}

impl Mclock {
    fn new(params: &Params, setup: &Setup) -> Result<Mclock, String> {
        let classes = Classes::parse(params, "rules", &["reservation", "weight", "limit"])?;
        let shares = shares(&classes)?;
        let in_device_time = params.text("unit") == "device";
        Ok(Mclock {
            in_device_time,
            queues: ClassFlows::new(params, setup, classes, in_device_time),
            shares,
            groups: (0..setup.lanes).map(|_| Group::default()).collect(),
            turns: Turns::default(),
            guard_batches: params.integer("guard_batches"),
            params: params.clone(),
        })
    }

    fn share(&self, class: u32) -> Share {
        self.shares[self.queues.classes.get(class).rule]
    }

    /// When a class drops below its limit.
    fn limited_until(&self, class: u32) -> Nanos {
        if self.share(class).limit > 0.0 { self.queues.classes.get(class).account.limit } else { Nanos::ZERO }
    }

    /// Updates a flow's position after its class's tags or its oldest request changed, or closes it.
    fn refile(&mut self, view: &View<'_>, flow: u32) {
        let (group, class) = self.queues.flows.key(flow);
        let (share, tags) = (self.share(class), self.queues.classes.get(class).account);
        let g = &mut self.groups[group];
        let mut fresh = Filed::default();
        let oldest = self.queues.flows.oldest(view, flow);
        if let Some(oldest) = oldest {
            let seq = view.table.seq(oldest);
            let arrival = view.table.arrival(oldest).min(view.now);
            if share.reservation > 0.0 {
                fresh.reservation = (tags.reservation.max(arrival), seq);
            }
            match share.limit > 0.0 && tags.limit > view.now {
                true => fresh.limit = (tags.limit, seq),
                false => fresh.weight = (tags.weight.max(g.virtual_now), seq),
            }
            if share.limit > 0.0 && fresh.limit == NO_TAG {
                fresh.allowed = seq;
            }
        }
        let old = self.queues.flows.data(flow);
        refile(&mut g.reservations, flow, old.reservation, fresh.reservation, NO_TAG);
        refile(&mut g.weights, flow, old.weight, fresh.weight, NO_WEIGHT);
        refile(&mut g.limited, flow, old.limit, fresh.limit, NO_TAG);
        refile(&mut g.allowed, flow, old.allowed, fresh.allowed, u64::MAX);
        *old = fresh;
        if oldest.is_none() {
            self.queues.flows.close(flow);
        }
    }

    /// True if the class's tags changed since the flow was filed (it sent in another group).
    fn is_stale(&self, flow: u32, filed: impl Fn(&Tags) -> bool) -> bool {
        filed(&self.queues.classes.get(self.queues.flows.key(flow).1).account)
    }

    /// The flow of a group that sends next and its phase, or when there will be one.
    fn next(&mut self, view: &View<'_>, group: usize) -> Result<(u32, Phase), Nanos> {
        // Each iteration updates one flow.
        while let Some((_, flow)) = self.groups[group].limited.first().filter(|f| f.0.0 <= view.now) {
            self.refile(view, flow);
        }
        while let Some((_, flow)) = self.groups[group].allowed.first().filter(|_| self.is_left_out(group)) {
            if self.limited_until(self.queues.flows.key(flow).1) <= view.now {
                return Ok((flow, Phase::Weight));
            }
            self.refile(view, flow);
        }
        let mut reserved = None;
        let mut until = self.groups[group].limited.first().map_or(Nanos::MAX, |f| f.0.0);
        while let Some(((tag, _), flow)) = self.groups[group].reservations.first() {
            if self.is_stale(flow, |t| t.reservation > tag) {
                self.refile(view, flow);
            } else if tag <= view.now {
                let g = &self.groups[group];
                if self.guard_batches == 0 || g.reserved_run < self.guard_batches || g.weights.is_empty() {
                    return Ok((flow, Phase::Constraint));
                }
                reserved = Some(flow);
                break;
            } else {
                until = until.min(tag);
                break;
            }
        }
        while let Some(((tag, _), flow)) = self.groups[group].weights.first() {
            let limited = self.share(self.queues.flows.key(flow).1).limit > 0.0;
            if self.is_stale(flow, |t| t.weight > tag || (limited && t.limit > view.now)) {
                self.refile(view, flow);
            } else {
                return Ok((flow, Phase::Weight));
            }
        }
        if let Some(flow) = reserved {
            return Ok((flow, Phase::Constraint)); // the guard counted waiters that have gone
        }
        let limited = self.groups[group].limited.first().map_or(Nanos::MAX, |f| f.0.0);
        Err(until.min(limited))
    }

    /// True if too many batches passed over the oldest request among limited classes within their limits.
    fn is_left_out(&self, group: usize) -> bool {
        self.guard_batches > 0 && self.groups[group].left_out >= self.guard_batches
    }

    fn cost(&self, requests: u64, device: Nanos) -> f64 {
        if self.in_device_time { device.as_secs_f64() } else { requests as f64 }
    }

    /// Sends a flow's next batch in the given phase.
    fn serve(&mut self, view: &View<'_>, flow: u32, phase: Phase, batch: &mut Vec<Slot>) -> Option<Choice> {
        let first = self.queues.flows.first(view, flow)?;
        if !view.open(view.table.lane(first)) {
            return Some(Choice::until_event(WaitReason::LanesBusy));
        }
        let (group, class) = self.queues.flows.key(flow);
        let filed = self.queues.flows.data(flow);
        let due = if filed.reservation == NO_TAG { view.now } else { filed.reservation.0 };
        let weight = Some(filed.weight).filter(|w| *w != NO_WEIGHT).map(|w| w.0);
        let taken = self.queues.take(view, first, batch);
        let (cost, share) = (self.cost(taken.requests, taken.estimate), self.share(class));
        let (g, tags) = (&mut self.groups[group], &mut self.queues.classes.get_mut(class).account);
        g.left_out = if g.allowed.first().is_none_or(|first| first.1 == flow) { 0 } else { g.left_out + 1 };
        if phase == Phase::Constraint {
            tags.reservation = due.max(tags.reservation) + span(cost, share.reservation);
        }
        if share.limit > 0.0 {
            tags.limit = tags.limit.max(view.now) + span(cost, share.limit);
        }
        let start = weight.unwrap_or(g.virtual_now).max(tags.weight);
        tags.weight = start + u128::from(span(cost, share.weight).0);
        match phase {
            Phase::Weight => (g.virtual_now, g.reserved_run) = (g.virtual_now.max(start), 0),
            // Other flows in the weight order are waiting.
            Phase::Constraint if g.weights.len() > usize::from(weight.is_some()) => g.reserved_run += 1,
            Phase::Constraint => {}
        }
        let flight = Flight { class, on_account: phase == Phase::Constraint, estimate: taken.estimate };
        self.queues.flows.depart(batch[0], flight);
        self.refile(view, flow);
        Some(Choice::Serve)
    }
}

impl Policy for Mclock {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let groups = &self.groups;
        let class = self.queues.class_of(view, slot, |c| {
            let t = c.account;
            let in_use = || groups.iter().all(|g| t.weight > g.virtual_now);
            t.reservation <= view.now && t.limit <= view.now && !in_use()
        });
        if let Some(flow) = self.queues.push(view, class, slot, self.share(class).limit == 0.0) {
            self.refile(view, flow);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        if let Some(flow) = self.queues.remove(view, slot) {
            self.refile(view, flow);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin_lanes(view, |group| {
            if let Some(flow) = self.queues.flows.due(view, group) {
                return self.serve(view, flow, Phase::Weight, batch);
            }
            match self.next(view, group) {
                Ok((flow, phase)) => self.serve(view, flow, phase, batch),
                Err(until) => (until < Nanos::MAX).then_some(Choice::Wait { until, reason: WaitReason::Rate }),
            }
        });
        self.turns = turns;
        choice
    }

    fn is_withheld(&self, view: &View<'_>, slot: Slot) -> bool {
        self.queues.class(slot).is_some_and(|class| self.limited_until(class) > view.now)
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let Some(class) = self.queues.class(slot) else { return WaitBound::of_batches(0) };
        let (share, guarded) = (self.share(class), self.queues.flows.guarded_wait(view, slot));
        if share.limit == 0.0 {
            return WaitBound::of_batches(guarded);
        }
        let longest = self.cost(self.queues.longest.0, self.queues.longest_device(view));
        let paid = span(longest, share.limit).0.saturating_mul(self.queues.paying(view, slot));
        let idle = Nanos(paid) + self.limited_until(class).since(view.now);
        // The guards for classes with and without limits alternate.
        WaitBound { batches: guarded.saturating_mul(2), idle, by_rule: true }
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        let Some(Flight { class, on_account: by_reservation, estimate }) = self.queues.returned(done) else { return };
        if !self.in_device_time {
            return;
        }
        let share = self.share(class);
        let (more, less) = (done.service - estimate, estimate - done.service);
        let at_rate = |span: Nanos, rate: f64| Nanos::from_secs_f64(span.as_secs_f64() / rate);
        let correct = |tag: &mut Nanos, rate: f64| {
            if rate > 0.0 {
                *tag = (*tag + at_rate(more, rate)).since(at_rate(less, rate));
            }
        };
        let tags = &mut self.queues.classes.get_mut(class).account;
        let [more_v, less_v] = [more, less].map(|span| u128::from(at_rate(span, share.weight).0));
        tags.weight = (tags.weight + more_v).saturating_sub(less_v);
        correct(&mut tags.limit, share.limit);
        if by_reservation {
            correct(&mut tags.reservation, share.reservation);
        }
        if less > Nanos::ZERO {
            for flow in self.queues.flows.of_party(class) {
                self.refile(view, flow);
            }
        }
    }

    fn explain(&self, who: &Who, _: Nanos) -> Option<String> {
        let (rule, class) = self.queues.classes.matching(who);
        let share = self.shares[rule];
        let unit = if self.in_device_time { "s of device time per second" } else { "requests/s" };
        let rate = |r: f64| if r > 0.0 { format!("{r} {unit}") } else { "none".into() };
        let name = self.queues.classes.rules.get(rule).map_or("no rule fits".into(), |r| format!("rule {}", r.name));
        let each = self.queues.classes.each(rule).phrase();
        Some(format!(
            "{name}: reservation {}, weight {}, limit {}{each}, {} requests queued or in flight",
            rate(share.reservation),
            share.weight,
            rate(share.limit),
            class.map_or(0, |c| c.held)
        ))
    }

    /// Classes whose rule keeps its name keep their tags.
    fn take_over(&mut self, _: &View<'_>, old: Box<dyn Any>) {
        let Ok(old) = old.downcast::<Mclock>() else { return };
        if old.in_device_time != self.in_device_time {
            return;
        }
        for (group, old) in self.groups.iter_mut().zip(&old.groups) {
            group.virtual_now = old.virtual_now;
        }
        for class in old.queues.classes.all() {
            if let Some(mine) = self.queues.classes.counterpart(&old.queues.classes, class) {
                self.queues.classes.get_mut(mine).account = class.account;
            }
        }
    }
}
