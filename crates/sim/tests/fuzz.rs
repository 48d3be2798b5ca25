//! Random scenarios with random faults under all laws, for IMPRESARIO_SIM_FUZZ_S seconds (default 5; `make test`: 8;
//! `make soak`: SOAK_S). IMPRESARIO_SIM_FUZZ_SEED repeats a hunt.

use std::time::{Duration, Instant};

use impresario_sim::{Scenario, fuzz};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn random_scenarios_keep_every_law() {
    let seconds = number("IMPRESARIO_SIM_FUZZ_S").unwrap_or(5);
    // Different seeds every second, so that each run explores new ones.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let first = number("IMPRESARIO_SIM_FUZZ_SEED").unwrap_or((now << 20) & (u64::MAX >> 1));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (start, time) = (Instant::now(), Duration::from_secs(seconds));
    // Unfinished scenarios are abandoned some time after the end.
    let judge = |s: &Scenario| {
        fuzz::judge_while(s, &|| start.elapsed() < time + Duration::from_secs(10)).map(Option::unwrap_or_default)
    };
    let (tally, found) = fuzz::hunt(first, threads, &judge, &mut |_| start.elapsed() >= time);
    println!("fuzz: {tally:?} in {seconds} s from seed {first} (IMPRESARIO_SIM_FUZZ_SEED={first} repeats it)");
    if let Some(found) = found {
        let begin = Instant::now();
        let in_time = &mut |tries| tries < 5000 && begin.elapsed() < Duration::from_secs(60);
        let fails = &mut |s: &Scenario| fuzz::judge_while(s, &|| begin.elapsed() < Duration::from_secs(60)).err();
        let shrunk = fuzz::shrink(&fuzz::scenario(found.seed), &found.failure, fails, in_time);
        panic!(
            "seed {}: {}\nto see it again: impresario sim fuzz --replay {}\nsmallest scenario that fails so:\n{}",
            found.seed, found.failure, found.seed, shrunk.text
        );
    }
    assert!(tally.scenarios > 0);
}
