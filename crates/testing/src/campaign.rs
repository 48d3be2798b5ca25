//! Random plans until one fails, and the smallest that fails likewise: for simulations whose plans follow from a seed.
//!
//! `IMPRESARIO_SIM_FUZZ_S` says for how many seconds (default 5; `make test`: 8; `make soak`: SOAK_S), and
//! `IMPRESARIO_SIM_FUZZ_SEED` with which seed to begin, and so repeats one.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A plan that fails.
#[derive(Debug)]
pub struct Found<P, W> {
    /// The seed of the plan before it was made smaller.
    pub seed: u64,
    /// What fails.
    pub plan: P,
    /// How.
    pub wrong: W,
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// How long to try.
pub fn time() -> Duration {
    Duration::from_secs(number("IMPRESARIO_SIM_FUZZ_S").unwrap_or(5))
}

/// With which seed to begin, if one was given.
pub fn given_seed() -> Option<u64> {
    number("IMPRESARIO_SIM_FUZZ_SEED")
}

/// With which seed to begin: other ones every second, so that each run explores new ones.
pub fn first_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    given_seed().unwrap_or(now << 20)
}

/// Tries the plans of seeds, on all processors, until one fails or `is_over` says so of the number of plans tried.
pub fn hunt<P: Send, W: Send>(
    first: u64,
    of_seed: impl Fn(u64) -> P + Sync,
    judge: impl Fn(&P) -> Result<(), W> + Sync,
    is_over: impl Fn(u64) -> bool + Sync,
) -> Option<Found<P, W>> {
    let (next, found, is_found) = (AtomicU64::new(0), Mutex::new(None), AtomicBool::new(false));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let tried = next.fetch_add(1, Ordering::Relaxed);
                    if is_over(tried) || is_found.load(Ordering::Relaxed) {
                        return;
                    }
                    let seed = first.wrapping_add(tried);
                    let plan = of_seed(seed);
                    if let Err(wrong) = judge(&plan) {
                        is_found.store(true, Ordering::Relaxed);
                        found.lock().expect("no thread panics with it").get_or_insert(Found { seed, plan, wrong });
                    }
                }
            });
        }
    });
    found.into_inner().expect("no thread panics with it")
}

/// Makes a plan that fails smaller for a while; `resembles` says whether another failure is of the same kind.
pub fn shrink<P, W>(
    found: Found<P, W>,
    smaller: impl Fn(&P) -> Vec<P>,
    judge: impl Fn(&P) -> Result<(), W>,
    resembles: impl Fn(&W, &W) -> bool,
    time: Duration,
) -> Found<P, W> {
    let (began, mut best) = (Instant::now(), found);
    'smaller: loop {
        for plan in smaller(&best.plan) {
            if began.elapsed() > time {
                return best;
            }
            if let Some(wrong) = judge(&plan).err().filter(|wrong| resembles(wrong, &best.wrong)) {
                best = Found { plan, wrong, ..best };
                continue 'smaller;
            }
        }
        return best;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_is_found_and_made_as_small_as_it_can_be() {
        // Lists that have a 7 fail.
        let of_seed = |seed: u64| (0..seed % 20).collect::<Vec<u64>>();
        let judge = |plan: &Vec<u64>| if plan.contains(&7) { Err("seven") } else { Ok(()) };
        let found = hunt(0, of_seed, judge, |tried| tried > 100).expect("one of them");
        assert!(found.plan.len() > 7 && found.plan.len() as u64 == found.seed % 20);
        let without = |plan: &Vec<u64>| (0..plan.len()).map(|at| [&plan[..at], &plan[at + 1..]].concat()).collect();
        let smallest = shrink(found, without, judge, |one, other| one == other, Duration::from_secs(60));
        assert_eq!(smallest.plan, [7]);
        assert!(hunt(0, |_| vec![0], judge, |tried| tried > 10).is_none());
    }
}
