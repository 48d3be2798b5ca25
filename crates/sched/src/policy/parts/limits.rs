//! The rules of `tbf`: rates, bursts, and which rule is under which.

use super::classes::{Classes, Each};
use super::rules::Rule;
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
    /// Index, from 1, of the rule above it among those that have others under them; 0: none.
    pub parent: usize,
}

impl Limit {
    /// The cost of a batch.
    pub fn span(&self, requests: u64, bytes: u64, device: Nanos) -> Nanos {
        let tokens = match self.unit {
            Unit::Requests => requests as f64,
            Unit::Bytes => bytes as f64,
            Unit::Device => device.as_secs_f64(),
        };
        Nanos::from_secs_f64((tokens / self.rate).max(1e-9))
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
