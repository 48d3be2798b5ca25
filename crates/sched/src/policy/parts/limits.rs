//! The rules of `tbf`: rates, bursts, and which rule is under which.

use super::bucket::Bucket;
use super::classes::{Classes, Each};
use super::rules::Rule;
use crate::limited::LimitUnit;
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
    /// Paid for so far, in the units of reports.
    pub granted: u64,
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
        self.granted = self.granted.saturating_add(limit.units(cost));
    }

    /// Device time proved to be more than estimated.
    pub fn pay_more(&mut self, now: Nanos, limit: &Limit, device: Nanos) {
        self.pay(now, limit, Cost { requests: 0, bytes: 0, device });
    }

    /// Device time proved to be less than estimated.
    pub fn give_back(&mut self, limit: &Limit, device: Nanos) {
        self.bucket.give_back(self.span(limit, Cost { requests: 0, bytes: 0, device }));
        self.granted = self.granted.saturating_sub(device.0);
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

/// Whether a rule has a hard limit.
pub(in crate::policy) fn is_hard(rule: &Rule) -> bool {
    rule.settings.get("borrow").is_none_or(|borrow| borrow != "on")
}

/// The settings of all rules, and which rules have others under them.
pub(in crate::policy) fn limits<A: Default>(classes: &Classes<A>) -> Result<(Vec<Limit>, Vec<usize>), String> {
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
