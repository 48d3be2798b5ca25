//! `tbf`: token buckets by rules (TBF of the Lustre network request scheduler, extended).
//!
//! `rules` tells requests apart (job, user, client, file, operation; the first rule that fits counts) and gives each
//! a rate: `requests_per_s`, `bytes_per_s`, or `device` (device time per second: 0.25 is a quarter of one device;
//! debited by the cost model at dispatch, corrected by the service time at completion). A bucket holds up to `burst`
//! tokens (in the rate's unit: requests, bytes, seconds of device time) and a rule has one bucket, or with
//! `each=job|user|client|file` one for each of those. `under=RULE` has a rule's requests pay from that rule's bucket
//! as well (one level: applications under a group's total). Requests that no rule fits are not limited; a rule for
//! `*` at the end is the default.
//!
//! Requests of one bucket leave in order of arrival. A request may go when its bucket holds anything (with requests
//! per second: one token); what it costs more becomes debt, so large ones are not starved by small ones and the rate
//! is exact in the long run. Between buckets the request goes first that has been allowed to for the longest time.
//!
//! Borrowing: with `borrow=on` a rule is a share rather than a limit. When a lane has room and no bucket with
//! requests for it holds tokens, such requests go beyond their rates, without paying: by start-time fair queueing in
//! proportion to the rates (the earliest deadline that the rates would give, counted in virtual time, so that nobody
//! pays later for having used what was idle). A rule under another needs `borrow=on` in both. In the original a limit
//! is a limit: `off` is the rule's default, while the default `rules` are Lustre's 10,000 requests/s for each client
//! (there every client or job has a bucket of its own) with borrowing.
//!
//! Rules can be changed live: a bucket whose rule keeps its name and unit keeps its tokens, up to its new depth.
//!
//! Sources: Lustre operations manual, "Network request scheduler tuning" (TBF; default depth 3 and 10,000
//! requests/s); Qian et al., SC 2017 (its dependency rules are `under`). Choices: the first rule in the text counts, where
//! Lustre's list begins with the one started last; the default burst is 3 requests, or
//! what 0.1 s gives; buckets are this server's, over all its lanes; at most [`PARENTS_MAX`] rules stand above others;
//! classes of keys are bounded (`classes.rs`). `merge=on` (not in the original) sends a request's queued neighbours
//! of the same bucket along.
//!
//! Wait: with `borrow=on`, and where no rule fits, a lane never idles, and after `guard_batches` batches of a lane
//! that left out its oldest such request, that one goes (0 switches the guard off). A request with a hard limit waits
//! for tokens, its lane idle if need be: that is the rule's purpose and does not switch itself off. It waits at most
//! until the bucket's debt is paid and every outstanding request has gone before it at that rate (from a bucket above:
//! that once for each older request of its own), as long as its lane has room then; how many batches of others go meanwhile depends on them, so that bound is one of time.

use std::any::Any;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, MERGE_OFF, Range};
use super::parts::bucket::Bucket;
use super::parts::classes::{Class, Classes, Each};
use super::parts::flows::{Flows, hull_bytes, refile};
use super::parts::turns::Turns;
use super::{Choice, Done, ParamInfo, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::names::Who;
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "tbf",
    summary: "Token buckets by rules, with borrowing of what is idle.",
    source: "Lustre network request scheduler, TBF; Qian et al., SC 2017",
    params: &[
        ParamInfo {
            name: "rules",
            default: "default: * {requests_per_s=10000, each=client, borrow=on}",
            range: Range::Text(
                "rules such as \"big: job=17|18 {bytes_per_s=1e8, burst=4e6, each=job}; rest: * {device=0.5}\"",
            ),
            doc: "Settings: one of requests_per_s (0.001 to 1e9), bytes_per_s (1 to 1e15), device (device seconds per \
                  second, 1e-6 to 1e6); burst (requests, bytes or device seconds; default 3 requests or 0.1 s); \
                  each=rule|job|user|client|file; borrow=on|off (default off); under=RULE.",
        },
        MERGE_OFF,
        BATCH_REQUESTS,
        BATCH_BYTES,
        ParamInfo {
            doc: "Batches of a lane that may leave out its oldest request without a hard limit; 0: any number.",
            ..GUARD_BATCHES
        },
    ],
    build: |params, setup| Ok(Box::new(Tbf::new(params, setup).map_err(|e| params.refuse("rules", e))?)),
};

/// Rules with others under them at most: each is looked at in every decision.
const PARENTS_MAX: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unit {
    Requests,
    Bytes,
    Device,
}

/// What a rule says.
#[derive(Clone, Copy, Debug)]
struct Limit {
    unit: Unit,
    /// Tokens per second.
    rate: f64,
    /// In spans of the rate, as all that follows: depth of the bucket, and what it must hold for a request to go.
    depth: Nanos,
    need: Nanos,
    borrow: bool,
    /// The place of the rule above it among those that have others under them, counted from 1; 0: none.
    parent: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    bucket: Bucket,
    /// Virtual time up to which it has borrowed, nanoseconds; 64 bits would not last at small rates.
    borrowed: u128,
}

/// Where a flow is filed: (since when, or from when on, its bucket lets its oldest request go; that one's place in the
/// order of arrival).
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
    /// By rule above; seldom is there any.
    turns: SmallVec<[SortedSet<(Turn, u32)>; 1]>,
    borrowers: SortedSet<(u128, u32)>,
    /// Virtual time of borrowing.
    virtual_now: u128,
}

struct Tbf {
    params: Params,
    classes: Classes<Account>,
    /// By rule; none for those whom no rule fits.
    limits: Vec<Limit>,
    /// Rules that have others under them; the place counts from 1 in `Limit::parent`.
    parents: Vec<usize>,
    /// By class; of a batch in flight twice its class is noted, and one more when it was paid for.
    flows: Flows<u32, Filed>,
    groups: Vec<Group>,
    turns: Turns,
    /// What batches in flight were thought to cost, by their first request; where that is corrected.
    estimates: FxHashMap<Slot, Nanos>,
    capacity: u64,
    /// Requests and bytes of a batch at most, as far as has been seen: a single request may be longer than the limit.
    longest: (u64, u64),
    /// The present as last seen.
    now: Nanos,
}

impl Tbf {
    fn new(params: &Params, setup: &Setup) -> Result<Tbf, String> {
        let known = ["requests_per_s", "bytes_per_s", "device", "burst", "borrow", "under"];
        let classes = Classes::parse(params, "rules", &known)?;
        let (limits, parents) = limits(&classes)?;
        let merge = params.on("merge");
        let group = Group { turns: smallvec![SortedSet::default(); parents.len() + 1], ..Group::default() };
        let mut flows = Flows::new(params, setup, params.integer("guard_batches"));
        if limits.iter().any(|l| l.unit == Unit::Device) {
            flows.list_parties(setup);
        }
        Ok(Tbf {
            limits,
            parents,
            flows,
            groups: vec![group; usize::from(setup.lanes)],
            turns: Turns::default(),
            estimates: FxHashMap::default(),
            capacity: u64::from(setup.capacity),
            longest: match merge {
                true => (params.integer("batch_requests"), params.integer("batch_bytes")),
                false => (1, 1),
            },
            now: Nanos::ZERO,
            params: params.clone(),
            classes,
        })
    }

    fn limit(&self, class: u32) -> Option<&Limit> {
        self.limits.get(self.classes.get(class).rule)
    }

    /// Borrows, or is not limited at all: no limit is hard for it.
    fn is_soft(&self, class: u32) -> bool {
        self.limit(class)
            .is_none_or(|l| l.borrow && l.parent.checked_sub(1).is_none_or(|p| self.limits[self.parents[p]].borrow))
    }

    fn ready_at(&self, class: u32) -> Nanos {
        let bucket = &self.classes.get(class).account.bucket;
        self.limit(class).map_or(Nanos::ZERO, |l| bucket.ready_at(l.need, l.depth))
    }

    /// Files a flow anew after a change of its bucket or of its oldest request, or closes it.
    fn refile(&mut self, view: &View<'_>, flow: u32) {
        let (group, class) = self.flows.key(flow);
        let oldest = self.flows.oldest(view, flow);
        let turn = oldest.map_or(NO_TURN, |oldest| {
            (self.ready_at(class).max(view.table.arrival(oldest).min(view.now)), view.table.seq(oldest))
        });
        let borrow = match oldest.is_some() && self.limit(class).is_some() && self.is_soft(class) {
            true => self.classes.get(class).account.borrowed.max(self.groups[group].virtual_now),
            false => NO_BORROWER,
        };
        let parent = self.limit(class).map_or(0, |l| l.parent);
        let old = std::mem::replace(self.flows.data(flow), Filed { turn, borrow });
        let g = &mut self.groups[group];
        refile(&mut g.turns[parent], flow, old.turn, turn, NO_TURN);
        refile(&mut g.borrowers, flow, old.borrow, borrow, NO_BORROWER);
        if oldest.is_none() {
            self.flows.close(flow);
        }
    }

    /// The flow of a group whose oldest request has been allowed to go for the longest time, or when there will be one.
    fn allowed(&mut self, view: &View<'_>, group: usize) -> Result<u32, Nanos> {
        let (mut best, mut until): (Option<(Turn, u32)>, Nanos) = (None, Nanos::MAX);
        for parent in 0..=self.parents.len() {
            // Other groups may have emptied a bucket since a flow was filed; each look puts one right.
            let first = loop {
                let Some((turn, flow)) = self.groups[group].turns[parent].first() else { break None };
                if self.ready_at(self.flows.key(flow).1) <= turn.0 {
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

    /// The flow of a group that borrows next.
    fn borrower(&mut self, view: &View<'_>, group: usize) -> Option<u32> {
        loop {
            let (tag, flow) = self.groups[group].borrowers.first()?;
            if self.classes.get(self.flows.key(flow).1).account.borrowed <= tag {
                return Some(flow);
            }
            self.refile(view, flow);
        }
    }

    /// What such a batch costs by a limit.
    fn span(limit: &Limit, requests: u64, bytes: u64, device: Nanos) -> Nanos {
        let tokens = match limit.unit {
            Unit::Requests => requests as f64,
            Unit::Bytes => bytes as f64,
            Unit::Device => device.as_secs_f64(),
        };
        Nanos::from_secs_f64((tokens / limit.rate).max(1e-9))
    }

    /// The rules that a class pays by: its own with its bucket, and the one above with its.
    fn payers(&self, class: u32) -> impl Iterator<Item = (Limit, u32)> + use<> {
        let own = self.limit(class).copied();
        let above = own.and_then(|l| l.parent.checked_sub(1)).map(|p| self.parents[p]);
        let above = above.map(|rule| (self.limits[rule], rule as u32));
        own.map(|l| (l, class)).into_iter().chain(above)
    }

    /// Sends what a flow has next, from the buckets or borrowed.
    fn serve(&mut self, view: &View<'_>, flow: u32, batch: &mut Vec<Slot>) -> Option<Choice> {
        let (group, class) = self.flows.key(flow);
        let first = self.flows.first(view, flow)?;
        if !view.open(view.table.lane(first)) {
            return Some(Choice::until_event(WaitReason::LanesBusy));
        }
        let pays =
            self.payers(class).all(|(l, c)| self.classes.get(c).account.bucket.ready_at(l.need, l.depth) <= view.now);
        self.flows.take(view, first, batch);
        let bytes = batch.iter().map(|s| view.table.len_bytes(*s)).fold(0, u64::saturating_add);
        let estimate = view.cost.ttp(view.table.op(first), hull_bytes(view, batch));
        let requests = batch.len() as u64;
        if pays {
            for (limit, payer) in self.payers(class) {
                let span = Self::span(&limit, requests, bytes, estimate);
                self.classes.get_mut(payer).account.bucket.take(view.now, span);
            }
        } else if let Some(limit) = self.limit(class) {
            let span = Self::span(limit, requests, bytes, estimate);
            let account = &mut self.classes.get_mut(class).account;
            let start = account.borrowed.max(self.groups[group].virtual_now);
            account.borrowed = start + u128::from(span.0);
            self.groups[group].virtual_now = start;
        }
        self.flows.depart(batch[0], class << 1 | u32::from(pays));
        if pays && self.payers(class).any(|p| p.0.unit == Unit::Device) {
            self.estimates.insert(batch[0], estimate);
        }
        self.refile(view, flow);
        Some(Choice::Serve)
    }
}

/// What the rules say, and which of them have others under them.
fn limits(classes: &Classes<Account>) -> Result<(Vec<Limit>, Vec<usize>), String> {
    let rules = &classes.rules;
    let mut parents: Vec<usize> = Vec::new();
    let mut limits = Vec::with_capacity(rules.len());
    for rule in rules {
        let units = [
            ("requests_per_s", Unit::Requests, 0.001..=1e9, 3.0),
            ("bytes_per_s", Unit::Bytes, 1.0..=1e15, 0.0),
            ("device", Unit::Device, 1e-6..=1e6, 0.0),
        ];
        let mut given = units.into_iter().filter(|u| rule.settings.contains_key(u.0));
        let one = || format!("rule {} needs one of requests_per_s, bytes_per_s, device", rule.name);
        let (name, unit, range, burst) = given.next().ok_or_else(one)?;
        if given.next().is_some() {
            return Err(format!("{}, not two; put one of them into a rule above it (under=)", one()));
        }
        let rate = rule.number(name, 0.0, range)?;
        let burst = rule.number("burst", if burst > 0.0 { burst } else { rate * 0.1 }, 1e-9..=1e18)?;
        let borrow = match rule.settings.get("borrow").map_or("off", String::as_str) {
            "on" => true,
            "off" => false,
            other => return Err(format!("borrow={other} in rule {} is neither on nor off", rule.name)),
        };
        let parent = match rule.settings.get("under") {
            None => 0,
            Some(name) => {
                let above = rules.iter().position(|r| r.name == *name);
                let above =
                    above.ok_or_else(|| format!("under={name} in rule {}: there is no such rule", rule.name))?;
                if rules[above].settings.contains_key("under") || classes.each(above) != Each::Rule {
                    return Err(format!(
                        "under={name} in rule {}: that rule must be without under and each",
                        rule.name
                    ));
                }
                let known = parents.iter().position(|p| *p == above);
                known.unwrap_or_else(|| {
                    parents.push(above);
                    parents.len() - 1
                }) + 1
            }
        };
        let need = if unit == Unit::Requests { 1.0 } else { 0.0 };
        let [depth, need] = [burst, need].map(|tokens| Nanos::from_secs_f64(tokens / rate));
        let [depth, need] = [depth, need].map(|span| span.max(Nanos(1)));
        limits.push(Limit { unit, rate, depth, need, borrow, parent });
    }
    if parents.len() > PARENTS_MAX {
        return Err(format!("{} rules stand above others; {PARENTS_MAX} may", parents.len()));
    }
    Ok((limits, parents))
}

impl Policy for Tbf {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.now = view.now;
        self.longest.1 = self.longest.1.max(view.table.len_bytes(slot));
        let class = self.classes.of(&view.who(slot), |c| c.account.bucket.is_full(view.now));
        self.classes.get_mut(class).held += 1;
        let soft = self.is_soft(class);
        let (flow, _) = self.flows.push(view, class, slot, soft);
        // A late request may be older than what the flow was filed by.
        if self.flows.oldest(view, flow) == Some(slot) {
            self.refile(view, flow);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(flow) = self.flows.remove(view, slot) else { return };
        self.classes.get_mut(self.flows.key(flow).1).held -= 1;
        self.refile(view, flow);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        self.now = view.now;
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.go_round(view, |group| {
            if let Some(flow) = self.flows.due(view, group) {
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

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let Some(class) = self.flows.of(slot).map(|f| self.flows.key(f).1) else {
            return WaitBound { batches: 0, idle: Nanos::ZERO };
        };
        if self.is_soft(class) {
            return WaitBound { batches: self.flows.guarded_wait(view, slot), idle: Nanos::ZERO };
        }
        let bytes = self.longest.1;
        let device = view.cost.ttp(Op::Read, bytes).max(view.cost.ttp(Op::Write, bytes));
        let idle = self.payers(class).enumerate().map(|(above, (limit, payer))| {
            let debt = self.classes.get(payer).account.bucket.ready_at(limit.need, limit.depth).since(view.now);
            let longest = Self::span(&limit, self.longest.0, bytes, device).0;
            let all = longest.saturating_mul(self.capacity + 1);
            // While its own bucket fills for each of its older requests, others may queue up for the one above.
            debt.0.saturating_add(if above == 0 { all } else { all.saturating_mul(self.capacity + 1) })
        });
        WaitBound { batches: u64::MAX, idle: Nanos(idle.fold(0, u64::saturating_add)) }
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        self.now = view.now;
        let Some(note) = self.flows.returned(done) else { return };
        let class = self.classes.get_mut(note >> 1);
        class.held = class.held.saturating_sub(done.slots.len() as u32);
        let Some(estimate) = self.estimates.remove(&done.slots[0]) else { return };
        for (limit, payer) in self.payers(note >> 1).filter(|p| p.0.unit == Unit::Device) {
            let bucket = &mut self.classes.get_mut(payer).account.bucket;
            let difference = if done.service > estimate { done.service - estimate } else { estimate - done.service };
            let span = Nanos::from_secs_f64(difference.as_secs_f64() / limit.rate);
            match done.service > estimate {
                true => bucket.take(view.now, span),
                false => bucket.give_back(span),
            }
            if done.service < estimate {
                for flow in self.flows.of_party(payer) {
                    self.refile(view, flow);
                }
            }
        }
    }

    fn explain(&self, who: &Who, now: Nanos) -> Option<String> {
        let (rule, class) = match self.classes.find(who) {
            Ok(class) => (self.classes.get(class).rule, Some(self.classes.get(class))),
            Err(rule) => (rule, None),
        };
        let Some(limit) = self.limits.get(rule) else {
            return Some("no rule fits: not limited".into());
        };
        let each = self.classes.each(rule);
        let of = |l: &Limit| match l.unit {
            Unit::Requests => format!("{} requests/s", l.rate),
            Unit::Bytes => format!("{} bytes/s", l.rate),
            Unit::Device => format!("{} s of device time per second", l.rate),
        };
        let mut text = format!("rule {}: {}", self.classes.rules[rule].name, of(limit));
        if each != Each::Rule {
            text += &format!(" for each {}", each.word());
        }
        let fresh = Bucket::default();
        let bucket = class.map_or(&fresh, |c| &c.account.bucket);
        let tokens = |b: &Bucket, l: &Limit| (b.tokens_s(now, l.depth) * l.rate * 1000.0).round() / 1000.0;
        let depth = (limit.depth.as_secs_f64() * limit.rate * 1000.0).round() / 1000.0;
        text += &format!(", {} of {depth} tokens at present", tokens(bucket, limit));
        text += &format!(", {} requests queued or in flight", class.map_or(0, |c| c.held));
        if let Some(above) = limit.parent.checked_sub(1).map(|p| self.parents[p]) {
            let (l, b) = (&self.limits[above], &self.classes.get(above as u32).account.bucket);
            text += &format!("; under rule {}: {}, {} tokens", self.classes.rules[above].name, of(l), tokens(b, l));
        }
        text += if limit.borrow { "; borrows what is idle" } else { "; does not borrow" };
        Some(text)
    }

    fn legacy(&mut self) -> Option<Box<dyn Any + Send>> {
        let kept =
            self.classes.all().filter(|c| !c.account.bucket.is_full(self.now)).filter_map(|c: &Class<Account>| {
                let limit = self.limits.get(c.rule)?;
                let tokens = c.account.bucket.tokens_s(self.now, limit.depth) * limit.rate;
                Some(Kept { rule: self.classes.name(c).into(), key: c.key, unit: limit.unit, tokens })
            });
        Some(Box::new(Legacy { now: self.now, kept: kept.collect() }))
    }

    fn inherit(&mut self, legacy: Box<dyn Any + Send>) {
        let Ok(legacy) = legacy.downcast::<Legacy>() else { return };
        self.now = legacy.now;
        for kept in legacy.kept {
            let Some(rule) = self.classes.rules.iter().position(|r| r.name == kept.rule) else { continue };
            let limit = self.limits[rule];
            if limit.unit != kept.unit || (self.classes.each(rule) == Each::Rule) != kept.key.is_none() {
                continue;
            }
            let class = kept.key.map_or(rule as u32, |key| self.classes.named(rule, key, |_| false));
            let account = &mut self.classes.get_mut(class).account;
            account.bucket = match kept.tokens >= 0.0 {
                true => Bucket::holding(Nanos::from_secs_f64(kept.tokens / limit.rate), limit.depth, legacy.now),
                false => {
                    let mut bucket = Bucket::holding(Nanos::ZERO, limit.depth, legacy.now);
                    bucket.take(legacy.now, Nanos::from_secs_f64(-kept.tokens / limit.rate));
                    bucket
                }
            };
        }
    }
}

/// A bucket that is not full, to be gone on with.
struct Kept {
    rule: String,
    key: Option<u64>,
    unit: Unit,
    tokens: f64,
}

struct Legacy {
    now: Nanos,
    kept: Vec<Kept>,
}
