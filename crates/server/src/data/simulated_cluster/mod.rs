//! A whole cluster under faults in virtual time: clients make, write, append to, cut, sync, read, rename and remove files through I/O
//! nodes, over links that delay, double, cut and heal. Servers are killed in the middle of calls and started again, and the disks
//! of data servers lose what was not synced, and fail.
//!
//! The metadata server is the real one, in a folder; data servers have the real store, fence and notes of losses on disks in
//! memory; clients decide by the machines of `node::session`, and judge syncs as the real ones do. Names must be linearizable, and
//! each strip of a file a register that only a power failure takes back, to what was synced or later. No two appends get one
//! range. A removed file has no objects when everything has ended, and a file with a name is not removed.
//!
//! How long it takes, and how a seed is repeated, says [`impresario_testing::campaign`].

mod history;
mod jobs;
mod model;
mod plan;
mod servers;
mod world;

use std::mem::discriminant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use history::Wrong;
use impresario_testing::campaign::{self, Found};
use plan::Plan;
use servers::Sabotage;
use world::run;

/// What was run and checked.
#[derive(Default, Debug)]
struct Tally {
    plans: AtomicU64,
    calls: AtomicU64,
    copies: AtomicU64,
    restarts: AtomicU64,
    events: AtomicU64,
    undecided: AtomicU64,
}

fn judge(plan: &Plan, sabotage: Sabotage, tally: &Tally) -> Result<(), Wrong> {
    let add = |count: &AtomicU64, more: u64| count.fetch_add(more, Ordering::Relaxed);
    add(&tally.plans, 1);
    let ran = run(plan, sabotage)?;
    add(&tally.calls, ran.calls);
    add(&tally.copies, ran.copies);
    add(&tally.restarts, ran.restarts);
    add(&tally.events, ran.checked.events);
    add(&tally.undecided, ran.checked.undecided);
    Ok(())
}

fn shrink(found: Found<Plan, Wrong>, sabotage: Sabotage, time: Duration) -> Found<Plan, Wrong> {
    let resembles = |one: &Wrong, other: &Wrong| discriminant(one) == discriminant(other);
    campaign::shrink(found, Plan::smaller, |plan| run(plan, sabotage).map(drop), resembles, time)
}

fn show(found: &Found<Plan, Wrong>) -> String {
    let (Wrong::Names(why) | Wrong::Bytes(why) | Wrong::Appended(why) | Wrong::Removed(why)) = &found.wrong;
    format!("{}{why}", found.plan)
}

#[test]
fn names_and_bytes_of_a_cluster_are_right_under_faults() {
    let (time, first) = (campaign::time(), campaign::first_seed());
    let (began, tally) = (Instant::now(), Tally::default());
    let judge = |plan: &Plan| judge(plan, Sabotage::None, &tally);
    let found = campaign::hunt(first, Plan::of_seed, judge, |tried| tried > 0 && began.elapsed() >= time);
    println!("clusters: {tally:?} in {time:?} from seed {first}");
    if let Some(found) = found {
        let (seed, operations) = (found.seed, found.plan.operations());
        let found = shrink(found, Sabotage::None, Duration::from_secs(60));
        panic!(
            "seed {seed}, with {operations} operations, fails. To see it again: IMPRESARIO_SIM_FUZZ_SEED={seed}\nThe smallest plan \
             that fails so: {}",
            show(&found)
        );
    }
    let [plans, undecided] = [&tally.plans, &tally.undecided].map(|count| count.load(Ordering::Relaxed));
    assert!(plans > 0 && undecided * 20 <= plans, "too many histories are too large to be checked: {tally:?}");
}

/// The metadata server was killed right after it had made a file. The copy of the call found the file there, and failed because a
/// data server was away. The next one made the file anew, which another client had removed meanwhile.
#[test]
fn a_plan_that_once_failed_does_not() {
    assert_eq!(run(&Plan::of_seed(1_883_209_222_588_493), Sabotage::None).err(), None);
}

/// What is broken on purpose is found soon.
fn is_found(sabotage: Sabotage) -> Wrong {
    let tally = Tally::default();
    let judge = |plan: &Plan| judge(plan, sabotage, &tally);
    let found = campaign::hunt(1, Plan::of_seed, judge, |tried| tried > 6000);
    let found = found.unwrap_or_else(|| panic!("{sabotage:?} is not found in {tally:?}"));
    let before = found.plan.operations();
    let found = shrink(found, sabotage, Duration::from_secs(10));
    println!("{sabotage:?}: seed {} of {tally:?}; {before} operations, smallest {}", found.seed, show(&found));
    found.wrong
}

#[test]
fn data_servers_without_a_fence_are_found() {
    assert!(matches!(is_found(Sabotage::NoDataFence), Wrong::Bytes(_)));
}

#[test]
fn writes_that_are_done_again_are_found() {
    assert!(matches!(is_found(Sabotage::DoesCopiesAgain), Wrong::Bytes(_)));
}

#[test]
fn syncs_that_are_left_out_are_found() {
    assert!(matches!(is_found(Sabotage::SkipsSyncs), Wrong::Bytes(_)));
}

#[test]
fn swallowed_errors_are_found() {
    assert!(matches!(is_found(Sabotage::SwallowsErrors), Wrong::Bytes(_)));
}

#[test]
fn power_failures_that_are_hidden_are_found() {
    assert!(matches!(is_found(Sabotage::HidesReboots), Wrong::Bytes(_)));
}

#[test]
fn removals_that_are_not_marked_are_found() {
    assert!(matches!(is_found(Sabotage::NoRemovalMarks), Wrong::Removed(_)));
}

#[test]
fn truncations_that_are_left_out_are_found() {
    assert!(matches!(is_found(Sabotage::SkipsCuts), Wrong::Bytes(_)));
}

#[test]
fn a_metadata_server_that_does_not_know_copies_is_found() {
    assert!(matches!(is_found(Sabotage::NoReplies), Wrong::Names(_)));
}

#[test]
fn a_metadata_server_without_a_fence_is_found() {
    assert!(matches!(is_found(Sabotage::NoMetaFence), Wrong::Names(_) | Wrong::Bytes(_)));
}

/// A seed replays: what it does depends on nothing else.
#[test]
fn a_seed_does_the_same_again() {
    for seed in 0..10 {
        let once = || run(&Plan::of_seed(seed), Sabotage::None);
        assert_eq!(once(), once(), "seed {seed}");
    }
}
