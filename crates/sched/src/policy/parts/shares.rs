//! The rules of `mclock`: reservation, weight and limit of each class.

use super::classes::Classes;

/// The settings of a rule; 0: none.
#[derive(Clone, Copy, Debug)]
pub(in crate::policy) struct Share {
    pub reservation: f64,
    pub weight: f64,
    pub limit: f64,
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
