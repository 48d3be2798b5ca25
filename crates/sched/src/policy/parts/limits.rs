//! The rules of `tbf`: rates, bursts, which rule is under which, and the accounts of the classes that pay for them.

use smallvec::SmallVec;

use super::bucket::Bucket;
use super::classes::{Class, Classes, Each};
use super::rules::Rule;
use crate::limited::{LimitUnit, Limited, Portions};
use crate::names::Who;
use crate::types::Nanos;

/// Maximum rules with others under them: every decision visits each of them.
const PARENTS_MAX: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::policy) enum Unit {
    Requests,
    Bytes,
    Device,
}

/// The settings of a rule.
#[derive(Clone, Copy, Debug)]
pub(in crate::policy) struct Limit {
    pub unit: Unit,
    /// Tokens per second.
    pub rate: f64,
    /// As spans of the rate (like all that follows): depth of the bucket, and what it must hold for a request to go.
    pub depth: Nanos,
    pub need: Nanos,
    pub borrow: bool,
    /// It holds over all servers together.
    pub over_all: bool,
    /// The portion of the rate that this server may grant to a class for which no other is set.
    pub portion: f64,
    /// Index, from 1, of the rule above it among those that have others under them; 0: none.
    pub parent: usize,
}

/// The cost of a batch.
#[derive(Clone, Copy, Debug)]
pub(in crate::policy) struct Cost {
    pub requests: u64,
    pub bytes: u64,
    pub device: Nanos,
}

impl Limit {
    /// A cost in time at the whole rate.
    pub fn span(&self, cost: Cost) -> Nanos {
        let tokens = match self.unit {
            Unit::Requests => cost.requests as f64,
            Unit::Bytes => cost.bytes as f64,
            Unit::Device => cost.device.as_secs_f64(),
        };
        Nanos::from_secs_f64((tokens / self.rate).max(1e-9))
    }

    /// A cost in the units of reports.
    fn units(&self, cost: Cost) -> u64 {
        match self.unit {
            Unit::Requests => cost.requests,
            Unit::Bytes => cost.bytes,
            Unit::Device => cost.device.0,
        }
    }

    /// The unit of reports, and the rate in it.
    pub fn reported(&self) -> (LimitUnit, f64) {
        match self.unit {
            Unit::Requests => (LimitUnit::Requests, self.rate),
            Unit::Bytes => (LimitUnit::Bytes, self.rate),
            Unit::Device => (LimitUnit::DeviceNs, self.rate * 1e9),
        }
    }
}

/// What a class has of its limit.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::policy) struct Account {
    pub bucket: Bucket,
    /// Virtual time up to which it has borrowed, ns; 64 bits would overflow at small rates.
    pub borrowed: u128,
    /// Paid for so far, in the units of reports. Never falls: other servers take a smaller number for a new beginning.
    pub granted: u64,
    /// Of that, what was given back: later payments count towards it first.
    owed: u64,
    /// The portion of the rate that this server may grant; 0: that of the rule.
    portion: f64,
}

impl Account {
    /// The portion of the rate that this server may grant.
    pub fn portion(&self, limit: &Limit) -> f64 {
        if self.portion > 0.0 { self.portion } else { limit.portion }
    }

    /// A span at the whole rate as one at this server's portion of it.
    fn stretched(&self, limit: &Limit, span: Nanos) -> Nanos {
        match self.portion(limit) {
            1.0 => span,
            portion => Nanos::from_secs_f64(span.as_secs_f64() / portion),
        }
    }

    /// When its limit lets a request go.
    pub fn ready_at(&self, limit: &Limit) -> Nanos {
        self.bucket.ready_at(self.stretched(limit, limit.need), limit.depth)
    }

    /// How long its limit needs to make up for a cost.
    pub fn span(&self, limit: &Limit, cost: Cost) -> Nanos {
        self.stretched(limit, limit.span(cost))
    }

    /// Pays.
    pub fn pay(&mut self, now: Nanos, limit: &Limit, cost: Cost) {
        self.bucket.take(now, self.span(limit, cost));
        let units = limit.units(cost);
        let from_owed = units.min(self.owed);
        self.owed -= from_owed;
        self.granted = self.granted.saturating_add(units - from_owed);
    }

    /// Device time proved to be more than estimated.
    pub fn pay_more(&mut self, now: Nanos, limit: &Limit, device: Nanos) {
        self.pay(now, limit, Cost { requests: 0, bytes: 0, device });
    }

    /// Device time proved to be less than estimated.
    pub fn give_back(&mut self, limit: &Limit, device: Nanos) {
        self.bucket.give_back(self.span(limit, Cost { requests: 0, bytes: 0, device }));
        self.owed = self.owed.saturating_add(device.0);
    }

    /// Its tokens; negative is debt.
    pub fn tokens(&self, now: Nanos, limit: &Limit) -> f64 {
        self.bucket.tokens_s(now, limit.depth) * limit.rate * self.portion(limit)
    }

    /// From now on this server grants another portion of the rate; true if that changes anything.
    pub fn set_portion(&mut self, now: Nanos, limit: &Limit, portion: f64) -> bool {
        let before = self.portion(limit);
        self.portion = portion;
        if before == portion {
            return false;
        }
        self.bucket.stretch(now, before / portion);
        true
    }
}

/// The rate in words.
impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let unit = match self.unit {
            Unit::Requests => "requests/s",
            Unit::Bytes => "bytes/s",
            Unit::Device => "s of device time per second",
        };
        write!(f, "{} {unit}", self.rate)
    }
}

/// The limits of all rules, applied to the accounts of their classes.
pub(in crate::policy) struct Limits {
    /// By rule; none for requests without a matching rule.
    limits: Vec<Limit>,
    /// Rules that have others under them; [`Limit::parent`] counts these from 1.
    parents: Vec<usize>,
}

impl Limits {
    /// Of the rules of these classes.
    pub fn new(classes: &Classes<Account>) -> Result<Limits, String> {
        let (limits, parents) = parse(classes)?;
        Ok(Limits { limits, parents })
    }

    /// How many rules have others under them.
    pub fn parents(&self) -> usize {
        self.parents.len()
    }

    /// Whether accounts also change when nothing is sent.
    pub fn change(&self) -> bool {
        self.limits.iter().any(|limit| limit.unit == Unit::Device || limit.over_all)
    }

    /// The limit of a class.
    pub fn of(&self, class: &Class<Account>) -> Option<&Limit> {
        self.limits.get(class.rule)
    }

    fn above(&self, limit: &Limit) -> Option<usize> {
        limit.parent.checked_sub(1).map(|parent| self.parents[parent])
    }

    /// It borrows or is unlimited: no hard limit applies.
    pub fn is_soft(&self, class: &Class<Account>) -> bool {
        self.of(class).is_none_or(|limit| limit.borrow && self.above(limit).is_none_or(|rule| self.limits[rule].borrow))
    }

    /// When its own bucket lets a class's next request go.
    pub fn ready_at(&self, class: &Class<Account>) -> Nanos {
        self.of(class).map_or(Nanos::ZERO, |limit| class.account.ready_at(limit))
    }

    /// When the bucket of a rule that has others under it lets one go; `parent` as in [`Limit::parent`].
    pub fn above_ready_at(&self, classes: &Classes<Account>, parent: usize) -> Nanos {
        parent.checked_sub(1).map_or(Nanos::ZERO, |p| self.ready_at(classes.get(self.parents[p] as u32)))
    }

    /// The limits that a class pays to, each with its bucket's class: its own and the one above.
    pub fn payers(&self, class: u32, classes: &Classes<Account>) -> impl Iterator<Item = (Limit, u32)> + use<> {
        let own = self.of(classes.get(class)).copied();
        let above = own.and_then(|limit| self.above(&limit)).map(|rule| (self.limits[rule], rule as u32));
        own.map(|limit| (limit, class)).into_iter().chain(above)
    }

    /// When all buckets that a class pays from will let a request go.
    pub fn pays_at(&self, classes: &Classes<Account>, class: u32) -> Nanos {
        let class = classes.get(class);
        let above = self.of(class).map_or(Nanos::ZERO, |limit| self.above_ready_at(classes, limit.parent));
        self.ready_at(class).max(above)
    }

    /// A class pays for a batch.
    pub fn pay(&self, classes: &mut Classes<Account>, class: u32, now: Nanos, cost: Cost) {
        for (limit, payer) in self.payers(class, classes) {
            classes.get_mut(payer).account.pay(now, &limit, cost);
        }
    }

    /// A batch that a class paid for took another device time than estimated. Returns the classes whose requests may now
    /// go earlier.
    pub fn correct(
        &self,
        classes: &mut Classes<Account>,
        class: u32,
        now: Nanos,
        (estimate, device_time): (Nanos, Nanos),
    ) -> SmallVec<[u32; 2]> {
        let mut earlier = SmallVec::new();
        for (limit, payer) in self.payers(class, classes).filter(|p| p.0.unit == Unit::Device) {
            let account = &mut classes.get_mut(payer).account;
            if device_time >= estimate {
                account.pay_more(now, &limit, device_time - estimate);
            } else {
                account.give_back(&limit, estimate - device_time);
                earlier.push(payer);
            }
        }
        earlier
    }

    /// How such a request is treated, in words.
    pub fn explain(&self, classes: &Classes<Account>, who: &Who, now: Nanos) -> String {
        let (rule, class) = classes.matching(who);
        let Some(limit) = self.limits.get(rule) else {
            return "no rule fits: not limited".into();
        };
        let (name, each) = (&classes.rules[rule].name, classes.each(rule).phrase());
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
        if let Some(above) = self.above(limit) {
            let (limit, account) = (&self.limits[above], &classes.get(above as u32).account);
            let name = &classes.rules[above].name;
            text += &format!("; under rule {name}: {limit}, {} tokens", tokens(account, limit));
        }
        text += if limit.borrow { "; borrows what is idle" } else { "; does not borrow" };
        text
    }

    /// The classes in use with hard limits.
    pub fn limited(&self, classes: &Classes<Account>, now: Nanos) -> Vec<Limited> {
        // A rule also withholds what is queued under it.
        let mut under: Vec<u32> = vec![0; self.parents.len()];
        for class in classes.all().filter(|class| class.queued > 0) {
            if let Some(parent) = self.of(class).and_then(|limit| limit.parent.checked_sub(1)) {
                under[parent] += class.queued;
            }
        }
        let queued = |class: &Class<Account>| {
            let parent = class.key.is_none().then(|| self.parents.iter().position(|rule| *rule == class.rule));
            class.queued + parent.flatten().map_or(0, |parent| under[parent])
        };
        let used = classes.all().filter(|class| class.held > 0 || !class.account.bucket.is_full(now));
        let limited = used.filter_map(|class| {
            let (limit, account) = (self.of(class).filter(|limit| !limit.borrow)?, &class.account);
            let (unit, rate) = limit.reported();
            Some(Limited {
                rule: classes.rules[class.rule].name.clone(),
                key: class.key,
                unit,
                rate,
                over_all: limit.over_all,
                fraction: account.portion(limit),
                granted: account.granted,
                waiting: if account.ready_at(limit) > now { queued(class) } else { 0 },
            })
        });
        limited.collect()
    }

    /// Sets the portions of limits over all servers that this one may grant; returns the classes for which that changes
    /// anything.
    pub fn set_portions(&mut self, classes: &mut Classes<Account>, portions: &Portions, now: Nanos) -> Vec<u32> {
        self.limits.iter_mut().filter(|limit| limit.over_all).for_each(|limit| limit.portion = portions.others);
        let mut changed = Vec::new();
        for (rule, key, portion) in &portions.listed {
            let Some(class) = classes.find(rule, *key) else { continue };
            let Some(limit) = self.of(classes.get(class)).filter(|limit| limit.over_all) else { continue };
            if classes.get_mut(class).account.set_portion(now, limit, portion.max(1e-6)) {
                changed.push(class);
            }
        }
        changed
    }

    /// A bucket whose rule keeps its name and unit keeps its tokens, and the portion of the rate at which more of them come.
    pub fn take_over(&self, classes: &mut Classes<Account>, old: &Limits, theirs: &Classes<Account>, now: Nanos) {
        for class in theirs.all().filter(|c| !c.account.bucket.is_full(now)) {
            let (Some(limit), Some(mine)) = (old.of(class), classes.counterpart(theirs, class)) else { continue };
            let Some(new) = self.of(classes.get(mine)).filter(|new| new.unit == limit.unit) else { continue };
            let tokens = class.account.tokens(now, limit);
            let account = &mut classes.get_mut(mine).account;
            (account.granted, account.owed) = (class.account.granted, class.account.owed);
            if new.over_all && class.account.portion > 0.0 {
                account.portion = class.account.portion;
            }
            let span = Nanos::from_secs_f64(tokens.abs() / (new.rate * account.portion(new)));
            account.bucket = Bucket::holding(if tokens >= 0.0 { span } else { Nanos::ZERO }, new.depth, now);
            if tokens < 0.0 {
                account.bucket.take(now, span);
            }
        }
    }
}

/// Whether a rule has a hard limit.
pub(in crate::policy) fn is_hard(rule: &Rule) -> bool {
    rule.settings.get("borrow").is_none_or(|borrow| borrow != "on")
}

/// The settings of all rules, and which rules have others under them.
fn parse(classes: &Classes<Account>) -> Result<(Vec<Limit>, Vec<usize>), String> {
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
        let over_all = match rule.settings.get("over").map_or("server", String::as_str) {
            "server" => false,
            "all" => true,
            other => return Err(format!("over={other} in rule {} is neither server nor all", rule.name)),
        };
        if over_all && borrow {
            return Err(format!("rule {} borrows; over=all is for limits (borrow=off)", rule.name));
        }
        let need = if unit == Unit::Requests { 1.0 } else { 0.0 };
        let [depth, need] = [burst, need].map(|tokens| Nanos::from_secs_f64(tokens / rate));
        let [depth, need] = [depth, need].map(|span| span.max(Nanos(1)));
        limits.push(Limit { unit, rate, depth, need, borrow, over_all, portion: 1.0, parent });
    }
    if parents.len() > PARENTS_MAX {
        return Err(format!("{} rules stand above others; {PARENTS_MAX} may", parents.len()));
    }
    Ok((limits, parents))
}
