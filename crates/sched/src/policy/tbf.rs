//! `tbf`: token buckets by rules (TBF of the Lustre network request scheduler, extended).
//!
//! `rules` classifies requests (job, user, client, file, operation; the first matching rule applies) and gives each
//! rule a rate: `requests_per_s`, `bytes_per_s`, or `device` (device time per second: 0.25 is a quarter of one device;
//! debited by the cost model at dispatch, corrected by the service time at completion). A bucket holds up to `burst`
//! tokens (in the rate's unit: requests, bytes, seconds of device time). A rule has one bucket or, with
//! `each=job|user|client|file`, one for each of those. With `under=RULE` a rule's requests also pay from that rule's
//! bucket (one level: applications under a group's total). Requests without a matching rule are not limited; a final
//! rule for `*` is the default.
//!
//! Requests of one bucket leave in order of arrival. A request may go when its bucket is not empty (with requests per
//! second: holds one token); a higher cost becomes debt, so small requests do not starve large ones and the rate is
//! exact in the long run. Among buckets, the request that has been allowed to go for the longest time goes first.
//!
//! Borrowing: with `borrow=on` a rule is a share rather than a limit. When a lane has room and none of its requests has
//! tokens, such requests exceed their rates without paying: by start-time fair queueing in proportion to the rates (the
//! earliest deadline that the rates would give, in virtual time, so that using idle capacity never costs later). A rule
//! under another needs `borrow=on` in both. In the original a limit is a limit: `off` is the rule's default, while the
//! default `rules` are Lustre's 10,000 requests/s for each client (there every client or job has its own bucket) with
//! borrowing.
//!
//! With `over=all` a limit holds over all servers of this kind together: this server grants the portion of the rate that
//! [`Policy::set_portions`] gives it (`node::grants` computes the portions from what all of them report).
//!
//! Rules can be changed live: a bucket whose rule keeps its name and unit keeps its tokens, up to its new depth.
//!
//! Sources: Lustre operations manual, "Network request scheduler tuning" (TBF; default depth 3 and 10,000 requests/s);
//! Qian et al., SC 2017 (its dependency rules are `under`). Choices: the first matching rule in the text applies, where
//! Lustre's list begins with the last one started; the default burst is 3 requests, or what 0.1 s gives; buckets belong
//! to this server, over all its lanes; at most 64 rules are above others; classes by key are bounded (`classes.rs`).
//! `merge=on` (not in the original) also sends a request's queued neighbours of the same bucket.
//!
//! Wait: with `borrow=on`, and without a matching rule, a lane never idles, and after `guard_batches` batches of a lane
//! that passed over its oldest such request, that request goes (0 disables the guard). A request with a hard limit
//! waits for tokens even if its lane idles: that is the rule's purpose and stays on. It waits at most until the
//! bucket's debt is paid and the bucket's older requests have paid before it, one at a time on each lane (for a bucket
//! above: all that may be outstanding, for each of them). While its bucket has tokens, at most twice the requests that
//! may be outstanding go before each of them. Queues belong to a lane even if lanes share one space.

mod params;

use std::any::Any;

use super::parts::bucket_order::{BucketOrder, Filed, Turn};
use super::parts::class_flows::{ClassFlows, Flight, Taken};
use super::parts::classes::{Class, Classes};
use super::parts::limits::{Account, Cost, Limits, is_hard};
use super::parts::rules;
use super::parts::turns::Turns;
use super::{Choice, Conduct, Done, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::limited::{Limited, Portions};
use crate::names::Who;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "tbf",
    summary: "Token buckets by rules, with borrowing of what is idle.",
    source: "Lustre network request scheduler, TBF; Qian et al., SC 2017",
    conduct: Conduct {
        shares: true,
        idles: |params| rules::parse(params.text("rules")).is_ok_and(|all| all.iter().any(is_hard)),
        ..Conduct::conserving(
            "(older requests + 1) × (guard_batches + 1) batches; with a hard limit, its tokens as well",
        )
    },
    params: params::PARAMS,
    build: |params, setup| Ok(Box::new(Tbf::new(params, setup).map_err(|e| params.refuse("rules", e))?)),
};

struct Tbf {
    params: Params,
    /// A batch in flight records whether it was paid for.
    queues: ClassFlows<Account, Filed>,
    limits: Limits,
    order: BucketOrder,
    turns: Turns,
    capacity: u64,
}

impl Tbf {
    fn new(params: &Params, setup: &Setup) -> Result<Tbf, String> {
        let known = ["requests_per_s", "bytes_per_s", "device", "burst", "borrow", "under", "over"];
        let classes = Classes::parse(params, "rules", &known)?;
        let limits = Limits::new(&classes)?;
        Ok(Tbf {
            queues: ClassFlows::new(params, setup, classes, limits.change()),
            order: BucketOrder::new(setup.lanes, limits.parents()),
            limits,
            turns: Turns::default(),
            capacity: u64::from(setup.capacity),
            params: params.clone(),
        })
    }

    /// Updates a flow's position after its bucket or its oldest request changed, or closes it.
    fn refile(&mut self, view: &View<'_>, flow: u32) {
        let (group, class) = self.queues.flows.key(flow);
        let class = self.queues.classes.get(class);
        let limit = self.limits.of(class);
        let mut fresh = Filed { parent: limit.map_or(0, |l| l.parent), ..Filed::default() };
        let oldest = self.queues.flows.oldest(view, flow);
        if let Some(oldest) = oldest {
            let ready_at = self.limits.ready_at(class);
            fresh.turn = (ready_at.max(view.table.arrival(oldest).min(view.now)), view.table.seq(oldest));
            if limit.is_some() && self.limits.is_soft(class) {
                fresh.borrow = class.account.borrowed.max(self.order.virtual_now(group));
            }
        }
        self.order.refile(group, flow, self.queues.flows.data(flow), fresh);
        if oldest.is_none() {
            self.queues.flows.close(flow);
        }
    }

    /// The flow of a group whose oldest request has been allowed to go the longest, or when there will be one.
    fn allowed(&mut self, view: &View<'_>, group: usize) -> Result<u32, Nanos> {
        let (mut best, mut until): (Option<(Turn, u32)>, Nanos) = (None, Nanos::MAX);
        for parent in 0..=self.limits.parents() {
            // Another group may have emptied a bucket since a flow was filed; each iteration updates one.
            let first = loop {
                let Some((turn, flow)) = self.order.first(group, parent) else { break None };
                if self.limits.ready_at(self.class_of(flow)) <= turn.0 {
                    break Some((turn, flow));
                }
                self.refile(view, flow);
            };
            let Some((turn, flow)) = first else { continue };
            match turn.0.max(self.limits.above_ready_at(&self.queues.classes, parent)) {
                from if from > view.now => until = until.min(from),
                _ => best = Some(best.map_or((turn, flow), |b| b.min((turn, flow)))),
            }
        }
        best.map(|b| b.1).ok_or(until)
    }

    fn class_of(&self, flow: u32) -> &Class<Account> {
        self.queues.classes.get(self.queues.flows.key(flow).1)
    }

    /// Refiles the flows of a class that may go earlier.
    fn refile_all(&mut self, view: &View<'_>, class: u32) {
        for flow in self.queues.flows.of_party(class) {
            self.refile(view, flow);
        }
    }

    /// The flow of a group that borrows next.
    fn borrower(&mut self, view: &View<'_>, group: usize) -> Option<u32> {
        loop {
            let (tag, flow) = self.order.first_borrower(group)?;
            if self.class_of(flow).account.borrowed <= tag {
                return Some(flow);
            }
            self.refile(view, flow);
        }
    }

    /// Sends a flow's next batch, paid for or borrowed.
    fn serve(&mut self, view: &View<'_>, flow: u32, batch: &mut Vec<Slot>) -> Option<Choice> {
        let first = self.queues.flows.first(view, flow)?;
        if !view.open(view.table.lane(first)) {
            return Some(Choice::until_event(WaitReason::LanesBusy));
        }
        let (group, class) = self.queues.flows.key(flow);
        let paid = self.limits.pays_at(&self.queues.classes, class) <= view.now;
        let Taken { requests, bytes, estimate } = self.queues.take(view, first, batch);
        let cost = Cost { requests, bytes, device: estimate };
        if paid {
            self.limits.pay(&mut self.queues.classes, class, view.now, cost);
        } else if let Some(limit) = self.limits.of(self.queues.classes.get(class)) {
            let account = &mut self.queues.classes.get_mut(class).account;
            account.borrowed = self.order.borrow(group, account.borrowed, limit.span(cost));
        }
        self.queues.flows.depart(batch[0], Flight { class, on_account: paid, estimate });
        self.refile(view, flow);
        Some(Choice::Serve)
    }
}

impl Policy for Tbf {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let class = self.queues.class_of(view, slot, |c| c.account.bucket.is_full(view.now));
        let soft = self.limits.is_soft(self.queues.classes.get(class));
        if let Some(flow) = self.queues.push(view, class, slot, soft) {
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
                return self.serve(view, flow, batch);
            }
            let until = match self.allowed(view, group) {
                Ok(flow) => return self.serve(view, flow, batch),
                Err(until) => until,
            };
            if let Some(flow) = self.borrower(view, group) {
                return self.serve(view, flow, batch);
            }
            (until < Nanos::MAX).then_some(Choice::Wait { until, reason: WaitReason::Rate })
        });
        self.turns = turns;
        choice
    }

    fn is_withheld(&self, view: &View<'_>, slot: Slot) -> bool {
        let classes = &self.queues.classes;
        let Some(class) = self.queues.class(slot) else { return false };
        !self.limits.is_soft(classes.get(class)) && self.limits.pays_at(classes, class) > view.now
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let Some(class) = self.queues.class(slot) else { return WaitBound::of_batches(0) };
        if self.limits.is_soft(self.queues.classes.get(class)) {
            return WaitBound::of_batches(self.queues.flows.guarded_wait(view, slot));
        }
        // Its bucket's older requests pay before it; meanwhile, those on other lanes may pay too.
        let paying = self.queues.paying(view, slot);
        let ((requests, bytes), device) = (self.queues.longest, self.queues.longest_device(view));
        let longest = Cost { requests, bytes, device };
        let idle = self.limits.payers(class, &self.queues.classes).enumerate().map(|(above, (limit, payer))| {
            let account = &self.queues.classes.get(payer).account;
            let (debt, longest) = (account.ready_at(&limit).since(view.now), account.span(&limit, longest).0);
            // While its own bucket fills, others may queue up for the bucket above.
            let before = if above == 0 { paying } else { paying.saturating_mul(self.capacity + 1) };
            debt.0.saturating_add(longest.saturating_mul(before))
        });
        // Whenever its bucket has tokens, requests that were allowed earlier go first, and as many under the guard.
        let batches = paying.saturating_mul(2 * (self.capacity + 1));
        WaitBound { batches, idle: Nanos(idle.fold(0, u64::saturating_add)), by_rule: true }
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        let Some(Flight { class, on_account: true, estimate }) = self.queues.returned(done) else { return };
        let payers = self.limits.correct(&mut self.queues.classes, class, view.now, (estimate, done.service));
        payers.into_iter().for_each(|payer| self.refile_all(view, payer));
    }

    fn explain(&self, who: &Who, now: Nanos) -> Option<String> {
        Some(self.limits.explain(&self.queues.classes, who, now))
    }

    fn limited(&self, now: Nanos) -> Vec<Limited> {
        self.limits.limited(&self.queues.classes, now)
    }

    fn set_portions(&mut self, view: &View<'_>, portions: &Portions) {
        let changed = self.limits.set_portions(&mut self.queues.classes, portions, view.now);
        changed.into_iter().for_each(|class| self.refile_all(view, class));
    }

    /// A bucket whose rule keeps its name and unit keeps its tokens.
    fn take_over(&mut self, view: &View<'_>, old: Box<dyn Any>) {
        if let Ok(old) = old.downcast::<Tbf>() {
            self.limits.take_over(&mut self.queues.classes, &old.limits, &old.queues.classes, view.now);
        }
    }
}
