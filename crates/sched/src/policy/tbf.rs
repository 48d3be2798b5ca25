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

use std::any::Any;

use smallvec::{SmallVec, smallvec};

use super::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, MERGE_OFF, Range};
use super::parts::bucket::Bucket;
use super::parts::class_flows::{ClassFlows, Flight, Taken};
use super::parts::classes::{Class, Classes};
use super::parts::flows::refile;
use super::parts::limits::{Account, Cost, Limit, Unit, is_hard, limits};
use super::parts::rules;
use super::parts::turns::Turns;
use super::{Choice, Conduct, Done, ParamInfo, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::limited::{Limited, Portions};
use crate::names::Who;
use crate::sorted::SortedSet;
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
    params: &[
        ParamInfo {
            name: "rules",
            default: "default: * {requests_per_s=10000, each=client, borrow=on}",
            range: Range::Text(
                "rules such as \"big: job=17|18 {bytes_per_s=1e8, burst=4e6, each=job}; rest: * {device=0.5}\"",
            ),
            doc: "Settings: one of requests_per_s (0.001 to 1e9), bytes_per_s (1 to 1e15), device (device seconds per \
                  second, 1e-6 to 1e6); burst (requests, bytes or device seconds; default 3 requests or 0.1 s); \
                  each=rule|job|user|client|file; borrow=on|off (default off); under=RULE; over=server|all \
                  (default server).",
        },
        MERGE_OFF,
        BATCH_REQUESTS,
        BATCH_BYTES,
        ParamInfo {
            doc: "Batches of a lane that may pass over its oldest request without a hard limit; 0: any number.",
            ..GUARD_BATCHES
        },
    ],
    build: |params, setup| Ok(Box::new(Tbf::new(params, setup).map_err(|e| params.refuse("rules", e))?)),
};

/// A flow's position: (when its bucket lets, or will let, its oldest request go; that request's order of arrival).
type Turn = (Nanos, u64);

const NO_TURN: Turn = (Nanos::MAX, u64::MAX);
const NO_BORROWER: u128 = u128::MAX;

struct Filed {
    turn: Turn,
    borrow: u128,
}

impl Default for Filed {
    fn default() -> Self {
        Filed { turn: NO_TURN, borrow: NO_BORROWER }
    }
}

#[derive(Clone, Default)]
struct Group {
    /// One set per rule above, index 0 for none; usually only that one.
    turns: SmallVec<[SortedSet<(Turn, u32)>; 1]>,
    borrowers: SortedSet<(u128, u32)>,
    /// Virtual time of borrowing.
    virtual_now: u128,
}

struct Tbf {
    params: Params,
    /// A batch in flight records whether it was paid for.
    queues: ClassFlows<Account, Filed>,
    /// By rule; none for requests without a matching rule.
    limits: Vec<Limit>,
    /// Rules that have others under them; `Limit::parent` counts these from 1.
    parents: Vec<usize>,
    groups: Vec<Group>,
    turns: Turns,
    capacity: u64,
}

impl Tbf {
    fn new(params: &Params, setup: &Setup) -> Result<Tbf, String> {
        let known = ["requests_per_s", "bytes_per_s", "device", "burst", "borrow", "under", "over"];
        let classes = Classes::parse(params, "rules", &known)?;
        let (limits, parents) = limits(&classes)?;
        let group = Group { turns: smallvec![SortedSet::default(); parents.len() + 1], ..Group::default() };
        let corrected = limits.iter().any(|l| l.unit == Unit::Device || l.over_all);
        Ok(Tbf {
            queues: ClassFlows::new(params, setup, classes, corrected),
            limits,
            parents,
            groups: vec![group; usize::from(setup.lanes)],
            turns: Turns::default(),
            capacity: u64::from(setup.capacity),
            params: params.clone(),
        })
    }

    fn limit(&self, class: u32) -> Option<&Limit> {
        self.limits.get(self.queues.classes.get(class).rule)
    }

    /// It borrows or is unlimited: no hard limit applies.
    fn is_soft(&self, class: u32) -> bool {
        self.limit(class)
            .is_none_or(|l| l.borrow && l.parent.checked_sub(1).is_none_or(|p| self.limits[self.parents[p]].borrow))
    }

    fn ready_at(&self, class: u32) -> Nanos {
        let account = &self.queues.classes.get(class).account;
        self.limit(class).map_or(Nanos::ZERO, |limit| account.ready_at(limit))
    }

    /// Updates a flow's position after its bucket or its oldest request changed, or closes it.
    fn refile(&mut self, view: &View<'_>, flow: u32) {
        let (group, class) = self.queues.flows.key(flow);
        let oldest = self.queues.flows.oldest(view, flow);
        let turn = oldest.map_or(NO_TURN, |oldest| {
            (self.ready_at(class).max(view.table.arrival(oldest).min(view.now)), view.table.seq(oldest))
        });
        let borrow = match oldest.is_some() && self.limit(class).is_some() && self.is_soft(class) {
            true => self.queues.classes.get(class).account.borrowed.max(self.groups[group].virtual_now),
            false => NO_BORROWER,
        };
        let parent = self.limit(class).map_or(0, |l| l.parent);
        let old = std::mem::replace(self.queues.flows.data(flow), Filed { turn, borrow });
        let g = &mut self.groups[group];
        refile(&mut g.turns[parent], flow, old.turn, turn, NO_TURN);
        refile(&mut g.borrowers, flow, old.borrow, borrow, NO_BORROWER);
        if oldest.is_none() {
            self.queues.flows.close(flow);
        }
    }

    /// The flow of a group whose oldest request has been allowed to go the longest, or when there will be one.
    fn allowed(&mut self, view: &View<'_>, group: usize) -> Result<u32, Nanos> {
        let (mut best, mut until): (Option<(Turn, u32)>, Nanos) = (None, Nanos::MAX);
        for parent in 0..=self.parents.len() {
            // Another group may have emptied a bucket since a flow was filed; each iteration updates one.
            let first = loop {
                let Some((turn, flow)) = self.groups[group].turns[parent].first() else { break None };
                if self.ready_at(self.queues.flows.key(flow).1) <= turn.0 {
                    break Some((turn, flow));
                }
                self.refile(view, flow);
            };
            let Some((turn, flow)) = first else { continue };
            let above = parent.checked_sub(1).map_or(Nanos::ZERO, |p| self.ready_at(self.parents[p] as u32));
            match turn.0.max(above) {
                from if from > view.now => until = until.min(from),
                _ => best = Some(best.map_or((turn, flow), |b| b.min((turn, flow)))),
            }
        }
        best.map(|b| b.1).ok_or(until)
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
            let (tag, flow) = self.groups[group].borrowers.first()?;
            if self.queues.classes.get(self.queues.flows.key(flow).1).account.borrowed <= tag {
                return Some(flow);
            }
            self.refile(view, flow);
        }
    }

    /// When all buckets that a class pays from will let a request go.
    fn pays_at(&self, class: u32) -> Nanos {
        let ready = |(limit, payer): (Limit, u32)| self.queues.classes.get(payer).account.ready_at(&limit);
        self.payers(class).map(ready).max().unwrap_or(Nanos::ZERO)
    }

    /// The limits that a class pays to, each with its bucket's class: its own and the one above.
    fn payers(&self, class: u32) -> impl Iterator<Item = (Limit, u32)> + use<> {
        let own = self.limit(class).copied();
        let above = own.and_then(|l| l.parent.checked_sub(1)).map(|p| self.parents[p]);
        let above = above.map(|rule| (self.limits[rule], rule as u32));
        own.map(|l| (l, class)).into_iter().chain(above)
    }

    /// Sends a flow's next batch, paid for or borrowed.
    fn serve(&mut self, view: &View<'_>, flow: u32, batch: &mut Vec<Slot>) -> Option<Choice> {
        let first = self.queues.flows.first(view, flow)?;
        if !view.open(view.table.lane(first)) {
            return Some(Choice::until_event(WaitReason::LanesBusy));
        }
        let (group, class) = self.queues.flows.key(flow);
        let paid = self.pays_at(class) <= view.now;
        let Taken { requests, bytes, estimate } = self.queues.take(view, first, batch);
        let cost = Cost { requests, bytes, device: estimate };
        if paid {
            for (limit, payer) in self.payers(class) {
                self.queues.classes.get_mut(payer).account.pay(view.now, &limit, cost);
            }
        } else if let Some(limit) = self.limit(class) {
            let span = limit.span(cost);
            let account = &mut self.queues.classes.get_mut(class).account;
            let start = account.borrowed.max(self.groups[group].virtual_now);
            account.borrowed = start + u128::from(span.0);
            self.groups[group].virtual_now = start;
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
        if let Some(flow) = self.queues.push(view, class, slot, self.is_soft(class)) {
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
        self.queues.class(slot).is_some_and(|class| !self.is_soft(class) && self.pays_at(class) > view.now)
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let Some(class) = self.queues.class(slot) else { return WaitBound::of_batches(0) };
        if self.is_soft(class) {
            return WaitBound::of_batches(self.queues.flows.guarded_wait(view, slot));
        }
        // Its bucket's older requests pay before it; meanwhile, those on other lanes may pay too.
        let paying = self.queues.paying(view, slot);
        let ((requests, bytes), device) = (self.queues.longest, self.queues.longest_device(view));
        let longest = Cost { requests, bytes, device };
        let idle = self.payers(class).enumerate().map(|(above, (limit, payer))| {
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
        for (limit, payer) in self.payers(class).filter(|p| p.0.unit == Unit::Device) {
            let account = &mut self.queues.classes.get_mut(payer).account;
            if done.service >= estimate {
                account.pay_more(view.now, &limit, done.service - estimate);
                continue;
            }
            account.give_back(&limit, estimate - done.service);
            self.refile_all(view, payer);
        }
    }

    fn explain(&self, who: &Who, now: Nanos) -> Option<String> {
        let (rule, class) = self.queues.classes.matching(who);
        let Some(limit) = self.limits.get(rule) else {
            return Some("no rule fits: not limited".into());
        };
        let (name, each) = (&self.queues.classes.rules[rule].name, self.queues.classes.each(rule).phrase());
        let mut text = format!("rule {name}: {limit}{each}");
        let fresh = Account::default();
        let account = class.map_or(&fresh, |c| &c.account);
        let rounded = |tokens: f64| (tokens * 1000.0).round() / 1000.0;
        let tokens = |account: &Account, limit: &Limit| rounded(account.tokens(now, limit));
        let portion = account.portion(limit);
        if limit.over_all {
            text += &format!(" over all servers, {:.1} % of it here", 100.0 * portion);
        }
        let depth = rounded(limit.depth.as_secs_f64() * limit.rate * portion);
        text += &format!(", {} of {depth} tokens at present", tokens(account, limit));
        text += &format!(", {} requests queued or in flight", class.map_or(0, |c| c.held));
        if let Some(above) = limit.parent.checked_sub(1).map(|p| self.parents[p]) {
            let (l, a) = (&self.limits[above], &self.queues.classes.get(above as u32).account);
            text += &format!("; under rule {}: {}, {} tokens", self.queues.classes.rules[above].name, l, tokens(a, l));
        }
        text += if limit.borrow { "; borrows what is idle" } else { "; does not borrow" };
        Some(text)
    }

    fn limited(&self, now: Nanos) -> Vec<Limited> {
        let hard = |class: &&Class<Account>| self.limits.get(class.rule).is_some_and(|limit| !limit.borrow);
        let used = self.queues.classes.all().filter(hard);
        let used = used.filter(|class| class.held > 0 || !class.account.bucket.is_full(now));
        let limited = used.filter_map(|class| {
            let (limit, account) = (self.limits.get(class.rule)?, &class.account);
            let (unit, rate) = limit.reported();
            let is_short = account.ready_at(limit) > now;
            Some(Limited {
                rule: self.queues.classes.rules[class.rule].name.clone(),
                key: class.key,
                unit,
                rate,
                over_all: limit.over_all,
                fraction: account.portion(limit),
                granted: account.granted,
                waiting: if is_short { class.held } else { 0 },
            })
        });
        limited.collect()
    }

    fn set_portions(&mut self, view: &View<'_>, portions: &Portions) {
        self.limits.iter_mut().filter(|limit| limit.over_all).for_each(|limit| limit.portion = portions.others);
        for (rule, key, portion) in &portions.listed {
            let Some(class) = self.queues.classes.find(rule, *key) else { continue };
            let Some(limit) = self.limit(class).copied().filter(|limit| limit.over_all) else { continue };
            if self.queues.classes.get_mut(class).account.set_portion(view.now, &limit, portion.max(1e-6)) {
                self.refile_all(view, class);
            }
        }
    }

    /// A bucket whose rule keeps its name and unit keeps its tokens.
    fn take_over(&mut self, view: &View<'_>, old: Box<dyn Any>) {
        let Ok(old) = old.downcast::<Tbf>() else { return };
        for class in old.queues.classes.all().filter(|c| !c.account.bucket.is_full(view.now)) {
            let (Some(limit), Some(mine)) =
                (old.limits.get(class.rule), self.queues.classes.counterpart(&old.queues.classes, class))
            else {
                continue;
            };
            let Some(new) = self.limit(mine).copied().filter(|new| new.unit == limit.unit) else { continue };
            let tokens = class.account.bucket.tokens_s(view.now, limit.depth) * limit.rate;
            let span = Nanos::from_secs_f64(tokens.abs() / new.rate);
            let account = &mut self.queues.classes.get_mut(mine).account;
            account.granted = class.account.granted;
            account.bucket = Bucket::holding(if tokens >= 0.0 { span } else { Nanos::ZERO }, new.depth, view.now);
            if tokens < 0.0 {
                account.bucket.take(view.now, span);
            }
        }
    }
}
