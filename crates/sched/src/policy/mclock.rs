//! `mclock`: reservation, weight and limit per class (mClock: Gulati, Merchant and Varman, OSDI 2010).
//!
//! `rules` names classes (job, user, client, file, operation; the first matching rule applies; `each=` as in `tbf`) and
//! gives each a `reservation` and a `limit` per second (0: none) and a `weight`. Costs count in requests or, with
//! `unit=device`, in seconds of device time (by the cost model at dispatch, corrected at completion by the time for which
//! the batch had the device to itself). Each class has three tags, each max(now, previous + cost ÷ rate), for its oldest
//! request:
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
//! rule's purpose and stays on: one batch at the limit's rate per older request of the class. With several lanes that
//! has no bound: they share the limit, and a lane that is full whenever its class may go loses the turn to another.
//! Otherwise work-conserving.

mod params;

use smallvec::{SmallVec, smallvec};

use super::parts::by_class::{ByClass, ClassRule, Queues};
use super::parts::class_flows::Flight;
use super::parts::classes::{Class, Classes};
use super::parts::limits::Cost;
use super::parts::rules;
use super::parts::shares::{Share, shares, span};
use super::parts::tags::{Filed, Phase, TagOrder, Tags};
use super::{Conduct, Params, PolicyInfo, Setup, View, WaitBound};
use crate::names::Who;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "mclock",
    summary: "Reservation, weight and limit for each class.",
    source: "mClock (Gulati et al., OSDI 2010)",
    conduct: Conduct {
        shares: true,
        is_chosen_by_hand: true,
        idles: |params| {
            rules::parse(params.text("rules")).is_ok_and(|all| all.iter().any(|r| r.settings.contains_key("limit")))
        },
        ..Conduct::conserving(
            "(older requests + 1) × (guard_batches + 1) batches; with a limit, twice that and its rate (on one lane)",
        )
    },
    params: params::PARAMS,
    build: ByClass::<Mclock>::build,
};

struct Mclock {
    in_device_time: bool,
    /// By rule; the last is for requests without a matching rule.
    shares: Vec<Share>,
    order: TagOrder,
    guard_batches: u64,
}

impl Mclock {
    fn share(&self, class: &Class<Tags>) -> Share {
        self.shares[class.rule]
    }

    fn limited_until(&self, class: &Class<Tags>) -> Nanos {
        self.share(class).limited_until(&class.account)
    }

    fn cost(&self, cost: Cost) -> f64 {
        if self.in_device_time { cost.device.as_secs_f64() } else { cost.requests as f64 }
    }
}

impl ClassRule for Mclock {
    type Account = Tags;
    type Filed = Filed;
    type Phase = Phase;
    const SETTINGS: &[&str] = &["reservation", "weight", "limit"];

    fn new(params: &Params, setup: &Setup, classes: &Classes<Tags>) -> Result<Mclock, String> {
        Ok(Mclock {
            in_device_time: params.text("unit") == "device",
            shares: shares(classes)?,
            order: TagOrder::new(setup.lanes),
            guard_batches: params.integer("guard_batches"),
        })
    }

    fn corrects(&self) -> bool {
        self.in_device_time
    }

    fn is_new(&self, tags: &Tags, now: Nanos) -> bool {
        tags.reservation <= now && tags.limit <= now && self.order.is_past(tags.weight)
    }

    fn is_guarded(&self, class: &Class<Tags>) -> bool {
        self.share(class).limit == 0.0
    }

    fn withheld_until(&self, classes: &Classes<Tags>, class: u32) -> Nanos {
        self.limited_until(classes.get(class))
    }

    fn file(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32, oldest: Option<Slot>) {
        let (lane, class) = queues.flows.key(flow);
        let class = queues.classes.get(class);
        let oldest = oldest.map(|oldest| (view.table.arrival(oldest), view.table.seq(oldest)));
        let by = (&self.share(class), &class.account);
        self.order.refile(view.now, lane, flow, queues.flows.data(flow), by, oldest);
    }

    fn next(&mut self, queues: &mut Queues<Self>, view: &View<'_>, lane: usize) -> Result<(u32, Phase), Nanos> {
        let (now, guard) = (view.now, self.guard_batches);
        let limited = self.first(queues, view, |r| r.order.first_limited(lane), |_, _, until| until <= now);
        let is_limited = |r: &Self, class: &Class<Tags>| r.limited_until(class) > now;
        let left_out = |r: &Self| r.order.first_left_out(lane, guard);
        if let Some((_, flow)) = self.first(queues, view, left_out, |r, class, _| is_limited(r, class)) {
            return Ok((flow, Phase::Weight));
        }
        let reservation = |r: &Self| r.order.first_reservation(lane);
        let reserved = self.first(queues, view, reservation, |_, class, tag| class.account.reservation > tag);
        let due = reserved.filter(|(tag, _)| *tag <= now).map(|(_, flow)| (flow, Phase::Constraint));
        if let Some(due) = due.filter(|_| !self.order.weights_are_due(lane, guard)) {
            return Ok(due);
        }
        let is_late = |r: &Self, class: &Class<Tags>, tag| class.account.weight > tag || is_limited(r, class);
        if let Some((_, flow)) = self.first(queues, view, |r| r.order.first_weight(lane), is_late) {
            return Ok((flow, Phase::Weight));
        }
        // The guard may have counted waiters that have gone.
        let instants = [limited, reserved, self.order.first_limited(lane)].into_iter().flatten();
        due.ok_or_else(|| instants.map(|first| first.0).min().unwrap_or(Nanos::MAX))
    }

    fn charge(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32, phase: Phase, cost: Cost) -> bool {
        let (lane, class) = queues.flows.key(flow);
        let due = self.order.due(queues.flows.data(flow), view.now);
        let class = queues.classes.get_mut(class);
        let (cost, share) = (self.cost(cost), self.share(class));
        let (tags, by_reservation) = (&mut class.account, phase == Phase::Constraint);
        tags.charge(&share, cost, view.now, by_reservation.then_some(due.reservation));
        tags.weight = self.order.sent(lane, flow, phase, &due, tags.weight) + share.weighed(cost);
        by_reservation
    }

    fn correct(
        &mut self,
        queues: &mut Queues<Self>,
        _: Nanos,
        flight: Flight,
        device_time: Nanos,
    ) -> SmallVec<[u32; 2]> {
        if !self.in_device_time {
            return SmallVec::new();
        }
        let class = queues.classes.get_mut(flight.class);
        let (more, less) = (device_time - flight.estimate, flight.estimate - device_time);
        let share = self.share(class);
        class.account.correct(&share, more, less, flight.on_account);
        if less > Nanos::ZERO { smallvec![flight.class] } else { SmallVec::new() }
    }

    fn wait_bound(&self, queues: &Queues<Self>, view: &View<'_>, slot: Slot, class: u32) -> WaitBound {
        let class = queues.classes.get(class);
        let (limit, guarded) = (self.share(class).limit, queues.flows.guarded_wait(view, slot));
        if limit == 0.0 {
            return WaitBound::of_batches(guarded);
        }
        let paid = span(self.cost(queues.longest(view)), limit).0.saturating_mul(queues.paying(view, slot));
        let idle = match view.lanes.len() {
            1 => Nanos(paid) + self.limited_until(class).since(view.now),
            _ => Nanos::MAX,
        };
        // The guards for classes with and without limits alternate.
        WaitBound { batches: guarded.saturating_mul(2), idle, by_rule: true }
    }

    fn explain(&self, classes: &Classes<Tags>, who: &Who, _: Nanos) -> String {
        let (rule, class) = classes.matching(who);
        let name = classes.rules.get(rule).map_or("no rule fits".into(), |r| format!("rule {}", r.name));
        let share = self.shares[rule].phrase(self.in_device_time);
        let (each, held) = (classes.each(rule).phrase(), class.map_or(0, |c| c.held));
        format!("{name}: {share}{each}, {held} requests queued or in flight")
    }

    /// Classes whose rule keeps its name keep their tags.
    fn take_over(&mut self, mine: &mut Classes<Tags>, old: &Mclock, theirs: &Classes<Tags>, _: Nanos) {
        if old.in_device_time == self.in_device_time {
            self.order.take_over(&old.order);
            mine.take_over(theirs);
        }
    }
}
