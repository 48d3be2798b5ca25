//! Random scenarios with random faults, checked against all laws: a failure is reproducible from its seed and reduced
//! to the smallest scenario that fails the same way.
//!
//! Modelled on TigerBeetle's VOPR and property-based testing: a seed makes a scenario ([`scenario`]), a judge runs it
//! ([`judge`]), [`hunt`] tries seeds on all cores, and [`shrink`] removes what the failure does not need.

mod generate;
mod judge;
mod shrink;

use std::sync::atomic::{AtomicBool, Ordering};

pub use generate::scenario;
pub use judge::{Failure, Judged, Kind, judge, judge_while};
pub use shrink::{Shrunk, shrink};

use crate::model::Scenario;
use crate::sweep::side_by_side;

/// A seed whose scenario fails.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    /// The seed.
    pub seed: u64,
    /// How it fails.
    pub failure: Failure,
}

/// The progress of a hunt.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tally {
    /// Scenarios judged.
    pub scenarios: u64,
    /// Operations of their applications.
    pub operations: u64,
    /// Faults that occurred in them.
    pub faults: u64,
}

/// Tries seeds from `first` on until `enough` is true, on the given number of threads, and stops at the first failing
/// scenario. `enough` is called after each scenario.
pub fn hunt(
    first: u64,
    threads: usize,
    judge: &(dyn Fn(&Scenario) -> Result<Judged, Failure> + Sync),
    enough: &mut dyn FnMut(Tally) -> bool,
) -> (Tally, Option<Found>) {
    let over = AtomicBool::new(false);
    let (mut tally, mut found) = (Tally::default(), None);
    // Seeds must be TOML integers.
    let seed = |nth: usize| first.wrapping_add(nth as u64) & (u64::MAX >> 1);
    let work = |nth| (!over.load(Ordering::Relaxed)).then(|| judge(&scenario(seed(nth))));
    side_by_side(usize::MAX, threads, work, |nth, judged| {
        if over.load(Ordering::Relaxed) {
            return;
        }
        tally.scenarios += 1;
        match judged {
            Ok(judged) => {
                tally.operations += judged.operations;
                tally.faults += judged.faults;
            }
            Err(failure) => found = Some(Found { seed: seed(nth), failure }),
        }
        over.store(found.is_some() || enough(tally), Ordering::Relaxed);
    });
    (tally, found)
}

#[cfg(test)]
mod tests;
