//! `tbf`: token buckets by rules (TBF of the Lustre network request scheduler, extended).
//!
//! `rules` classifies requests (job, user, client, file, operation; the first matching rule applies) and gives each
//! rule a rate: `requests_per_s`, `bytes_per_s`, or `device` (device time per second: 0.25 is a quarter of one device;
//! debited by the cost model at dispatch, corrected at completion by the time for which the batch had the device to
//! itself). A bucket holds up to `burst` tokens (in the rate's unit: requests, bytes, seconds of device time). A rule has
//! one bucket or, with `each=job|user|client|file`, one for each of those. With `under=RULE` a rule's requests also pay
//! from that rule's bucket (one level: applications under a group's total). Requests without a matching rule are not
//! limited; a final rule for `*` is the default.
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

use smallvec::SmallVec;

use super::parts::bucket_order::{BucketOrder, Filed, Turn};
use super::parts::by_class::{ByClass, ClassRule, Queues};
use super::parts::class_flows::Flight;
use super::parts::classes::{Class, Classes};
use super::parts::limits::{Account, Cost, Limits, is_hard};
use super::parts::rules;
use super::{Conduct, Params, PolicyInfo, Setup, View, WaitBound};
use crate::limited::{Limited, Portions};
use crate::names::Who;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "tbf",
    summary: "Token buckets by rules, with borrowing of what is idle.",
    source: "Lustre network request scheduler, TBF; Qian et al., SC 2017",
    conduct: Conduct {
        shares: true,
        is_chosen_by_hand: true,
        idles: |params| rules::parse(params.text("rules")).is_ok_and(|all| all.iter().any(is_hard)),
        ..Conduct::conserving(
            "(older requests + 1) × (guard_batches + 1) batches; with a hard limit, its tokens as well",
        )
    },
    params: params::PARAMS,
    build: ByClass::<Tbf>::build,
};

struct Tbf {
    limits: Limits,
    order: BucketOrder,
    capacity: u64,
}

impl Tbf {
    /// The flow of a lane whose oldest request has been allowed to go the longest, or when there will be one.
    fn allowed(&mut self, queues: &mut Queues<Self>, view: &View<'_>, lane: usize) -> Result<u32, Nanos> {
        let (mut best, mut until): (Option<(Turn, u32)>, Nanos) = (None, Nanos::MAX);
        for parent in 0..=self.limits.parents() {
            let is_late = |r: &Self, class: &Class<Account>, turn: Turn| r.limits.ready_at(class) > turn.ready_at();
            let Some(first) = self.first(queues, view, |r| r.order.first(lane, parent), is_late) else { continue };
            match first.0.ready_at().max(self.limits.above_ready_at(&queues.classes, parent)) {
                from if from > view.now => until = until.min(from),
                _ => best = Some(best.map_or(first, |best| best.min(first))),
            }
        }
        best.map(|best| best.1).ok_or(until)
    }
}

impl ClassRule for Tbf {
    type Account = Account;
    type Filed = Filed;
    type Phase = ();
    const SETTINGS: &[&str] = &["requests_per_s", "bytes_per_s", "device", "burst", "borrow", "under", "over"];

    fn new(_: &Params, setup: &Setup, classes: &Classes<Account>) -> Result<Tbf, String> {
        let limits = Limits::new(classes)?;
        let order = BucketOrder::new(setup.lanes, limits.parents());
        Ok(Tbf { limits, order, capacity: u64::from(setup.capacity) })
    }

    fn corrects(&self) -> bool {
        self.limits.change()
    }

    fn is_new(&self, account: &Account, now: Nanos) -> bool {
        account.bucket.is_full(now)
    }

    fn is_guarded(&self, class: &Class<Account>) -> bool {
        self.limits.is_soft(class)
    }

    fn withheld_until(&self, classes: &Classes<Account>, class: u32) -> Nanos {
        if self.limits.is_soft(classes.get(class)) { Nanos::ZERO } else { self.limits.pays_at(classes, class) }
    }

    fn file(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32, oldest: Option<Slot>) {
        let (lane, class) = queues.flows.key(flow);
        let class = queues.classes.get(class);
        let limit = self.limits.of(class);
        let mut fresh = Filed { parent: limit.map_or(0, |l| l.parent), ..Filed::default() };
        if let Some(oldest) = oldest {
            let ready_at = self.limits.ready_at(class);
            let from = ready_at.max(view.table.arrival(oldest).min(view.now));
            fresh.turn = Turn::new(from, view.table.seq(oldest));
            if limit.is_some() && self.limits.is_soft(class) {
                fresh.borrow = class.account.borrowed.max(self.order.virtual_now(lane));
            }
        }
        self.order.refile(lane, flow, queues.flows.data(flow), fresh);
    }

    fn settle(&mut self, queues: &mut Queues<Self>, _: &View<'_>, flow: u32) {
        let (lane, class) = queues.flows.key(flow);
        let class = queues.classes.get(class);
        let (ready_at, borrowed) = (self.limits.ready_at(class), class.account.borrowed);
        self.order.settle(lane, flow, queues.flows.data(flow), ready_at, borrowed);
    }

    fn next(&mut self, queues: &mut Queues<Self>, view: &View<'_>, lane: usize) -> Result<(u32, ()), Nanos> {
        let is_late = |_: &Self, class: &Class<Account>, tag| class.account.borrowed > tag;
        let next = self.allowed(queues, view, lane).or_else(|until| {
            let borrower = self.first(queues, view, |r| r.order.first_borrower(lane), is_late);
            borrower.map(|first| first.1).ok_or(until)
        });
        next.map(|flow| (flow, ()))
    }

    /// It pays, or borrows if it cannot.
    fn charge(&mut self, queues: &mut Queues<Self>, view: &View<'_>, flow: u32, (): (), cost: Cost) -> bool {
        let (lane, class) = queues.flows.key(flow);
        let pays = self.limits.pays_at(&queues.classes, class) <= view.now;
        if pays {
            self.limits.pay(&mut queues.classes, class, view.now, cost);
        } else if let Some(limit) = self.limits.of(queues.classes.get(class)) {
            let account = &mut queues.classes.get_mut(class).account;
            account.borrowed = self.order.borrow(lane, account.borrowed, limit.span(cost));
        }
        pays
    }

    fn correct(
        &mut self,
        queues: &mut Queues<Self>,
        now: Nanos,
        flight: Flight,
        device_time: Nanos,
    ) -> SmallVec<[u32; 2]> {
        if !flight.on_account {
            return SmallVec::new();
        }
        self.limits.correct(&mut queues.classes, flight.class, now, (flight.estimate, device_time))
    }

    fn wait_bound(&self, queues: &Queues<Self>, view: &View<'_>, slot: Slot, class: u32) -> WaitBound {
        if self.limits.is_soft(queues.classes.get(class)) {
            return WaitBound::of_batches(queues.flows.guarded_wait(view, slot));
        }
        // Its bucket's older requests pay before it; meanwhile, those on other lanes may pay too.
        let paying = queues.paying(view, slot);
        let longest = queues.longest(view);
        let idle = self.limits.payers(class, &queues.classes).enumerate().map(|(above, (limit, payer))| {
            let account = &queues.classes.get(payer).account;
            let (debt, longest) = (account.ready_at(&limit).since(view.now), account.span(&limit, longest).0);
            // While its own bucket fills, others may queue up for the bucket above.
            let before = if above == 0 { paying } else { paying.saturating_mul(self.capacity + 1) };
            debt.0.saturating_add(longest.saturating_mul(before))
        });
        // Whenever its bucket has tokens, requests that were allowed earlier go first, and as many under the guard.
        let batches = paying.saturating_mul(2 * (self.capacity + 1));
        WaitBound { batches, idle: Nanos(idle.fold(0, u64::saturating_add)), by_rule: true }
    }

    fn explain(&self, classes: &Classes<Account>, who: &Who, now: Nanos) -> String {
        self.limits.explain(classes, who, now)
    }

    fn limited(&self, classes: &Classes<Account>, now: Nanos) -> Vec<Limited> {
        self.limits.limited(classes, now)
    }

    fn set_portions(&mut self, classes: &mut Classes<Account>, portions: &Portions, now: Nanos) -> Vec<u32> {
        self.limits.set_portions(classes, portions, now)
    }

    /// A bucket whose rule keeps its name and unit keeps its tokens.
    fn take_over(&mut self, mine: &mut Classes<Account>, old: &Tbf, theirs: &Classes<Account>, now: Nanos) {
        self.limits.take_over(mine, &old.limits, theirs, now);
    }
}
