//! Random scenarios with random faults, checked against all laws: a failure is reproducible from its seed and reduced
//! to the smallest scenario that fails the same way.
//!
//! Modelled on TigerBeetle's VOPR and property-based testing: a seed makes a scenario ([`scenario`]), a judge runs it
//! ([`judge`]), [`hunt`] tries seeds on all cores, and [`shrink`] removes what the failure does not need.

mod generate;
mod judge;
mod shrink;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use generate::scenario;
pub use judge::{Failure, Judged, Kind, judge, judge_while};
pub use shrink::{Shrunk, shrink};

use crate::model::Scenario;

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

/// Tries seeds from `first` on until `enough` is true, on the given number of threads, and stops at a failing scenario
/// (the lowest failing seed found). `enough` is called after each scenario, from any thread.
pub fn hunt(
    first: u64,
    threads: usize,
    judge: &(dyn Fn(&Scenario) -> Result<Judged, Failure> + Sync),
    enough: &(dyn Fn(Tally) -> bool + Sync),
) -> (Tally, Option<Found>) {
    let (next, over) = (AtomicU64::new(first), AtomicBool::new(false));
    let shared: Mutex<(Tally, Option<Found>)> = Mutex::new((Tally::default(), None));
    let work = || {
        while !over.load(Ordering::Relaxed) {
            // Seeds must be TOML integers.
            let seed = next.fetch_add(1, Ordering::Relaxed) & (u64::MAX >> 1);
            let judged = judge(&scenario(seed));
            let Ok(mut shared) = shared.lock() else { return };
            let (tally, found) = &mut *shared;
            tally.scenarios += 1;
            match judged {
                Ok(judged) => {
                    tally.operations += judged.operations;
                    tally.faults += judged.faults;
                }
                Err(failure) => {
                    if found.as_ref().is_none_or(|f| seed < f.seed) {
                        *found = Some(Found { seed, failure });
                    }
                    over.store(true, Ordering::Relaxed);
                }
            }
            let tally = *tally;
            drop(shared);
            if enough(tally) {
                over.store(true, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, 1024) {
            scope.spawn(work);
        }
    });
    // A judge catches its own panics; a panic of `enough` leaves the scope.
    shared.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
