//! What a data server promises of data, on a disk that loses and fails like Linux's.
//!
//! The real store, fence and notes of losses, and what real clients make of the answers to their syncs, run over a disk in
//! memory. It writes what is dirty when it likes, a sector of 512 bytes at a time; when it cannot, it counts as written
//! what is not, and tells each open file once; it fails in the middle of a change; it loses what is not durable, or any part of
//! that, when the machine loses its power. Servers are killed in the middle of calls.
//!
//! After every sync that succeeds a copy of the disk loses its power: what its client wrote must be there. What is read is
//! what was written last. Every open file is told of lost data once, and of nothing else.
//!
//! How long it takes, and how a seed is repeated, says [`impresario_testing::campaign`].

mod plan;
mod world;

use std::mem::discriminant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_testing::campaign::{self, Found};
use plan::Plan;
use world::{Sabotage, Wrong, run};

/// What was run.
#[derive(Default, Debug)]
struct Tally {
    plans: AtomicU64,
    steps: AtomicU64,
}

fn judge(plan: &Plan, sabotage: Sabotage, tally: &Tally) -> Result<(), Wrong> {
    tally.plans.fetch_add(1, Ordering::Relaxed);
    let steps = run(plan, sabotage)?;
    tally.steps.fetch_add(steps as u64, Ordering::Relaxed);
    Ok(())
}

fn shrink(found: Found<Plan, Wrong>, sabotage: Sabotage, time: Duration) -> Found<Plan, Wrong> {
    let resembles = |one: &Wrong, other: &Wrong| discriminant(one) == discriminant(other);
    campaign::shrink(found, Plan::smaller, |plan| run(plan, sabotage).map(drop), resembles, time)
}

fn show(found: &Found<Plan, Wrong>) -> String {
    let Plan { checksums, capacity_bytes, steps } = &found.plan;
    let steps: Vec<String> = steps.iter().map(|step| format!("  {step:?}")).collect();
    format!("checksums {checksums}, {capacity_bytes} bytes:\n{}\n{:?}", steps.join("\n"), found.wrong)
}

#[test]
fn what_was_synced_is_kept_and_what_was_lost_is_told_on_disks_that_fail() {
    let (time, first) = (campaign::time(), campaign::first_seed());
    let (began, tally) = (Instant::now(), Tally::default());
    let judge = |plan: &Plan| judge(plan, Sabotage::None, &tally);
    let found = campaign::hunt(first, Plan::of_seed, judge, |tried| tried > 0 && began.elapsed() >= time);
    println!("disks: {tally:?} in {time:?} from seed {first}");
    if let Some(found) = found {
        let (seed, steps) = (found.seed, found.plan.steps.len());
        let found = shrink(found, Sabotage::None, Duration::from_secs(60));
        panic!(
            "seed {seed}, with {steps} steps, fails. To see it again: IMPRESARIO_SIM_FUZZ_SEED={seed}\nThe smallest plan that \
             fails so: {}",
            show(&found)
        );
    }
}

/// A power failure lost an object and kept its file of checksums. To remove that was not durable when a new object was made, since the
/// sync of the directory had failed, and the next power failure brought it back: it counted for the new object.
#[test]
fn plans_that_once_failed_do_not() {
    for seed in [1_883_010_888_630_320, 1_883_010_536_312_258] {
        assert_eq!(
            run(&Plan::of_seed(seed).with_prompt_answers().with_whole_writes(), Sabotage::None).err(),
            None,
            "seed {seed}"
        );
    }
    for in_parts in [1_883_110_322_995_460, 1_883_126_919_856_255] {
        assert_eq!(run(&Plan::of_seed(in_parts), Sabotage::None).err(), None, "seed {in_parts}");
    }
}

/// What is broken on purpose is found soon, from small plans.
fn is_found(sabotage: Sabotage) -> Wrong {
    let tally = Tally::default();
    let judge = |plan: &Plan| judge(plan, sabotage, &tally);
    let found = campaign::hunt(1, Plan::of_seed, judge, |tried| tried > 20_000);
    let found = found.unwrap_or_else(|| panic!("{sabotage:?} is not found in {tally:?}"));
    let before = found.plan.steps.len();
    let found = shrink(found, sabotage, Duration::from_secs(20));
    println!("{sabotage:?}: seed {} of {tally:?}; {before} steps, smallest {}", found.seed, show(&found));
    assert!(found.plan.steps.len() < 12, "{}", show(&found));
    found.wrong
}

#[test]
fn syncs_that_are_left_out_are_found() {
    assert!(matches!(is_found(Sabotage::SkipsSyncs), Wrong::Lost(_)));
}

#[test]
fn swallowed_errors_are_found() {
    assert!(matches!(is_found(Sabotage::SwallowsErrors), Wrong::Lost(_)));
}

#[test]
fn losses_of_which_only_one_client_is_told_are_found() {
    assert!(matches!(is_found(Sabotage::NotesNoLosses), Wrong::Lost(_)));
}

#[test]
fn restarts_that_forget_losses_are_found() {
    assert!(matches!(is_found(Sabotage::ForgetsLosses), Wrong::Lost(_)));
}

#[test]
fn restarts_that_forget_syncs_under_way_are_found() {
    assert!(matches!(is_found(Sabotage::ForgetsSyncs), Wrong::Lost(_)));
}

#[test]
fn syncs_that_count_for_what_is_written_meanwhile_are_found() {
    assert!(matches!(is_found(Sabotage::CoversLaterWrites), Wrong::Lost(_)));
}

#[test]
fn truncations_that_count_as_nothing_written_are_found() {
    assert!(matches!(is_found(Sabotage::ForgetsCuts), Wrong::Lost(_)));
}

#[test]
fn power_failures_that_are_hidden_are_found() {
    assert!(matches!(is_found(Sabotage::HidesReboots), Wrong::Lost(_)));
}

#[test]
fn losses_in_the_middle_of_a_write_that_are_not_told_are_found() {
    assert!(matches!(is_found(Sabotage::NamesTheLastLoss), Wrong::Lost(_)));
}

#[test]
fn open_files_that_are_not_told_are_found() {
    assert!(matches!(is_found(Sabotage::TellsOneFile), Wrong::Told(_)));
}

/// A seed replays: what it does depends on nothing else.
#[test]
fn a_seed_does_the_same_again() {
    for seed in 0..200 {
        let once = || run(&Plan::of_seed(seed), Sabotage::SwallowsErrors);
        assert_eq!(once(), once(), "seed {seed}");
    }
}
