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

mod params;

use std::any::Any;

use super::parts::class_flows::{ClassFlows, Flight};
use super::parts::classes::Classes;
use super::parts::rules;
use super::parts::shares::{Share, shares, span};
use super::parts::tags::{Filed, Phase, TagOrder, Tags};
use super::parts::turns::Turns;
use super::{Choice, Conduct, Done, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::names::Who;
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
    params: params::PARAMS,
    build: |params, setup| Ok(Box::new(Mclock::new(params, setup).map_err(|e| params.refuse("rules", e))?)),
};

struct Mclock {
    params: Params,
    in_device_time: bool,
    /// A batch in flight records whether it used a reservation.
    queues: ClassFlows<Tags, Filed>,
    /// By rule; the last is for requests without a matching rule.
    shares: Vec<Share>,
    order: TagOrder,
    turns: Turns,
    guard_batches: u64,
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
            order: TagOrder::new(setup.lanes),
            turns: Turns::default(),
            guard_batches: params.integer("guard_batches"),
            params: params.clone(),
        })
    }

    fn share(&self, class: u32) -> Share {
        self.shares[self.queues.classes.get(class).rule]
    }

    fn tags(&self, flow: u32) -> &Tags {
        &self.queues.classes.get(self.queues.flows.key(flow).1).account
    }

    /// Updates a flow's position after its class's tags or its oldest request changed, or closes it.
    fn refile(&mut self, view: &View<'_>, flow: u32) {
        let (group, class) = self.queues.flows.key(flow);
        let (share, tags) = (self.share(class), self.queues.classes.get(class).account);
        let oldest = self.queues.flows.oldest(view, flow);
        let oldest = oldest.map(|oldest| (view.table.arrival(oldest), view.table.seq(oldest)));
        self.order.refile(view.now, group, flow, self.queues.flows.data(flow), (&share, &tags), oldest);
        if oldest.is_none() {
            self.queues.flows.close(flow);
        }
    }

    /// The flow of a group that sends next and its phase, or when there will be one. A flow's place may be out of date,
    /// since its class sent in another group; each iteration updates one.
    fn next(&mut self, view: &View<'_>, group: usize) -> Result<(u32, Phase), Nanos> {
        while let Some((_, flow)) = self.order.first_limited(group).filter(|first| first.0 <= view.now) {
            self.refile(view, flow);
        }
        while let Some(flow) = self.order.first_left_out(group, self.guard_batches) {
            if self.share(self.queues.flows.key(flow).1).limited_until(self.tags(flow)) <= view.now {
                return Ok((flow, Phase::Weight));
            }
            self.refile(view, flow);
        }
        let mut reserved = None;
        let mut until = self.order.first_limited(group).map_or(Nanos::MAX, |first| first.0);
        while let Some((tag, flow)) = self.order.first_reservation(group) {
            if self.tags(flow).reservation > tag {
                self.refile(view, flow);
            } else if tag <= view.now {
                if !self.order.weights_are_due(group, self.guard_batches) {
                    return Ok((flow, Phase::Constraint));
                }
                reserved = Some(flow);
                break;
            } else {
                until = until.min(tag);
                break;
            }
        }
        while let Some((tag, flow)) = self.order.first_weight(group) {
            let limit = self.share(self.queues.flows.key(flow).1).limit;
            if self.tags(flow).weight > tag || (limit > 0.0 && self.tags(flow).limit > view.now) {
                self.refile(view, flow);
            } else {
                return Ok((flow, Phase::Weight));
            }
        }
        if let Some(flow) = reserved {
            return Ok((flow, Phase::Constraint)); // the guard counted waiters that have gone
        }
        Err(until.min(self.order.first_limited(group).map_or(Nanos::MAX, |first| first.0)))
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
        let due = self.order.due(self.queues.flows.data(flow), view.now);
        let taken = self.queues.take(view, first, batch);
        let (cost, share) = (self.cost(taken.requests, taken.estimate), self.share(class));
        let tags = &mut self.queues.classes.get_mut(class).account;
        tags.charge(&share, cost, view.now, (phase == Phase::Constraint).then_some(due.reservation));
        tags.weight = self.order.sent(group, flow, phase, &due, tags.weight) + share.weighed(cost);
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
        let order = &self.order;
        let class = self.queues.class_of(view, slot, |c| {
            c.account.reservation <= view.now && c.account.limit <= view.now && order.is_past(c.account.weight)
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
        let until = |class| self.share(class).limited_until(&self.queues.classes.get(class).account);
        self.queues.class(slot).is_some_and(|class| until(class) > view.now)
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let Some(class) = self.queues.class(slot) else { return WaitBound::of_batches(0) };
        let (share, guarded) = (self.share(class), self.queues.flows.guarded_wait(view, slot));
        if share.limit == 0.0 {
            return WaitBound::of_batches(guarded);
        }
        let longest = self.cost(self.queues.longest.0, self.queues.longest_device(view));
        let paid = span(longest, share.limit).0.saturating_mul(self.queues.paying(view, slot));
        let limited_until = share.limited_until(&self.queues.classes.get(class).account);
        let idle = Nanos(paid) + limited_until.since(view.now);
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
        self.queues.classes.get_mut(class).account.correct(&share, more, less, by_reservation);
        if less > Nanos::ZERO {
            for flow in self.queues.flows.of_party(class) {
                self.refile(view, flow);
            }
        }
    }

    fn explain(&self, who: &Who, _: Nanos) -> Option<String> {
        let (rule, class) = self.queues.classes.matching(who);
        let name = self.queues.classes.rules.get(rule).map_or("no rule fits".into(), |r| format!("rule {}", r.name));
        let share = self.shares[rule].phrase(self.in_device_time);
        let (each, held) = (self.queues.classes.each(rule).phrase(), class.map_or(0, |c| c.held));
        Some(format!("{name}: {share}{each}, {held} requests queued or in flight"))
    }

    /// Classes whose rule keeps its name keep their tags.
    fn take_over(&mut self, _: &View<'_>, old: Box<dyn Any>) {
        let Ok(old) = old.downcast::<Mclock>() else { return };
        if old.in_device_time != self.in_device_time {
            return;
        }
        self.order.take_over(&old.order);
        for class in old.queues.classes.all() {
            if let Some(mine) = self.queues.classes.counterpart(&old.queues.classes, class) {
                self.queues.classes.get_mut(mine).account = class.account;
            }
        }
    }
}
