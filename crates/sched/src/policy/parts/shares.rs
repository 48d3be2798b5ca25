//! The rules of `mclock`: reservation, weight and limit of each class.

use super::classes::Classes;
use super::tags::Tags;
use crate::types::Nanos;

/// The settings of a rule; 0: none.
#[derive(Clone, Copy, Debug)]
pub(in crate::policy) struct Share {
    pub reservation: f64,
    pub weight: f64,
    pub limit: f64,
}

impl Share {
    /// When a class with these tags drops below its limit.
    pub fn limited_until(&self, tags: &Tags) -> Nanos {
        if self.limit > 0.0 { tags.limit } else { Nanos::ZERO }
    }

    /// The settings in words; rates count requests, or seconds of device time.
    pub fn phrase(&self, in_device_time: bool) -> String {
        let unit = if in_device_time { "s of device time per second" } else { "requests/s" };
        let rate = |rate: f64| if rate > 0.0 { format!("{rate} {unit}") } else { "none".into() };
        let (reservation, limit) = (rate(self.reservation), rate(self.limit));
        format!("reservation {reservation}, weight {}, limit {limit}", self.weight)
    }

    /// A cost in virtual time.
    pub fn weighed(&self, cost: f64) -> u128 {
        u128::from(span(cost, self.weight).0)
    }
}

/// The time that a cost takes at a rate.
pub(in crate::policy) fn span(cost: f64, rate: f64) -> Nanos {
    Nanos::from_secs_f64((cost / rate).max(1e-9))
}

/// The settings of all rules, and last those of requests without a matching rule.
pub(in crate::policy) fn shares<A: Default>(classes: &Classes<A>) -> Result<Vec<Share>, String> {
    let mut shares = Vec::with_capacity(classes.rules.len() + 1);
    for rule in &classes.rules {
        let share = Share {
            reservation: rule.number("reservation", 0.0, 0.0..=1e9)?,
            weight: rule.number("weight", 1.0, 0.001..=1e6)?,
            limit: rule.number("limit", 0.0, 0.0..=1e9)?,
        };
        if share.limit > 0.0 && share.limit < share.reservation {
            return Err(format!("reservation in rule {} is above its limit", rule.name));
        }
        if [share.limit, share.reservation].iter().any(|r| *r > 0.0 && *r < 1e-6) {
            return Err(format!("a rate in rule {} is below 1e-6 per second; 0 means none", rule.name));
        }
        shares.push(share);
    }
    shares.push(Share { reservation: 0.0, weight: 1.0, limit: 0.0 });
    Ok(shares)
}
