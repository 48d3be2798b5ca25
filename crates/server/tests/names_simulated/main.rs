//! The metadata server under faults in virtual time: several clients change a few names over links that delay, double, cut and
//! heal, while the server is killed in the middle of calls and started again and its disk fails. Each history must be
//! linearizable, and nothing may be left over.
//!
//! How long it takes, and how a seed is repeated, says [`impresario_testing::campaign`].

mod concurrent;
#[path = "../meta_support/mod.rs"]
mod meta_support;
mod model;
mod plan;
mod world;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_testing::campaign::{self, Found};
use impresario_testing::linear::{Verdict, check};
use model::{NameSpace, Names, Seen};
use plan::{Fault, Plan};
use world::{History, Sabotage};

/// Configurations that the check of one history may come to.
const CONFIGURATIONS_MAX: usize = 300_000;

/// Why a history is wrong.
enum Wrong {
    /// No order of its operations explains its answers.
    Order(String),
    /// Something is left in the folder, or lacks there.
    Left(String),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Order(what) => write!(f, "no order of the operations explains the answers:\n{what}"),
            Wrong::Left(what) => write!(f, "the folder is not as it must be when everything has ended: {what}"),
        }
    }
}

/// What was run and checked.
#[derive(Default, Debug)]
struct Tally {
    histories: AtomicU64,
    operations: AtomicU64,
    copies: AtomicU64,
    restarts: AtomicU64,
    undecided: AtomicU64,
}

fn judge(plan: &Plan, sabotage: Sabotage, tally: &Tally) -> Result<(), Wrong> {
    judge_history(world::run(plan, sabotage), plan.has_full_disk(), tally)
}

fn judge_history(history: History, may_be_full: bool, tally: &Tally) -> Result<(), Wrong> {
    let add = |count: &AtomicU64, more: u64| count.fetch_add(more, Ordering::Relaxed);
    add(&tally.histories, 1);
    add(&tally.operations, history.events.len() as u64);
    add(&tally.copies, history.copies);
    add(&tally.restarts, history.restarts);
    let rules = NameSpace { made_by: history.made_by.clone(), may_be_full };
    match check(&rules, &Names::default(), &history.events, CONFIGURATIONS_MAX) {
        Verdict::Linearizable(_) => history.left.map_err(Wrong::Left),
        Verdict::Undecided => {
            add(&tally.undecided, 1);
            Ok(())
        }
        Verdict::Broken { order, next } => Err(Wrong::Order(show(&history, &order, &next))),
    }
}

fn show(history: &History, order: &[usize], next: &[usize]) -> String {
    let line = |at: &usize| {
        let event = &history.events[*at];
        let until = match event.ended {
            Some(end) => format!("{} µs", end / 1000),
            None => "?".into(),
        };
        let told = &event.operation;
        let said = if told.seen == Seen::Unknown { "nobody knows".into() } else { format!("{:?}", told.seen) };
        format!("  {} to {until}: {:?}: {said}", event.called / 1000, told.op)
    };
    let lines = |of: &[usize]| of.iter().map(line).collect::<Vec<_>>().join("\n");
    format!("as far as it goes:\n{}\nwhat cannot come next:\n{}", lines(order), lines(next))
}

fn shrink(found: Found<Plan, Wrong>, sabotage: Sabotage, time: Duration) -> Found<Plan, Wrong> {
    let resembles = |one: &Wrong, other: &Wrong| matches!(one, Wrong::Order(_)) == matches!(other, Wrong::Order(_));
    campaign::shrink(found, Plan::smaller, |plan| judge(plan, sabotage, &Tally::default()), resembles, time)
}

#[test]
fn names_are_linearizable_under_faults() {
    let (time, first) = (campaign::time(), campaign::first_seed());
    let (began, tally) = (Instant::now(), Tally::default());
    let judge = |plan: &Plan| judge(plan, Sabotage::None, &tally);
    let found = campaign::hunt(first, Plan::of_seed, judge, |tried| tried > 0 && began.elapsed() >= time);
    println!("names: {tally:?} in {time:?} from seed {first}");
    if let Some(found) = found {
        let (seed, operations) = (found.seed, found.plan.operations());
        let found = shrink(found, Sabotage::None, Duration::from_secs(60));
        let Found { plan, wrong, .. } = &found;
        panic!(
            "seed {seed}, with {operations} operations, fails. To see it again: IMPRESARIO_SIM_FUZZ_SEED={seed}\nThe smallest plan that fails so: {plan}{wrong}"
        );
    }
    let [histories, undecided] = [&tally.histories, &tally.undecided].map(|count| count.load(Ordering::Relaxed));
    assert!(histories > 0 && undecided * 20 <= histories, "too many histories are too large to be checked: {tally:?}");
}

/// Threads that call at the same time, without faults: what happens depends on the machine, so a failure may not come again.
#[test]
fn names_are_linearizable_when_threads_call_at_once() {
    let time = campaign::time() / 4;
    let (began, tally) = (Instant::now(), Tally::default());
    let mut seed = campaign::given_seed().unwrap_or(1);
    while began.elapsed() < time {
        if let Err(wrong) = judge_history(concurrent::run(seed), false, &tally) {
            panic!("seed {seed}: {wrong}");
        }
        seed += 1;
    }
    println!("names at once: {tally:?}");
    let [histories, undecided] = [&tally.histories, &tally.undecided].map(|count| count.load(Ordering::Relaxed));
    assert!(histories > 0 && undecided * 20 <= histories, "too many histories are too large to be checked: {tally:?}");
}

/// What is broken on purpose is found soon, from small plans.
fn is_found(sabotage: Sabotage) -> Found<Plan, Wrong> {
    let tally = Tally::default();
    let judge = |plan: &Plan| judge(plan, sabotage, &tally);
    let found = campaign::hunt(1, Plan::of_seed, judge, |tried| tried > 3000);
    let found = found.unwrap_or_else(|| panic!("{sabotage:?} is not found in {tally:?}"));
    let before = found.plan.operations();
    let found = shrink(found, sabotage, Duration::from_secs(20));
    println!(
        "{sabotage:?}: seed {} of {tally:?}; {before} operations, smallest {}{}",
        found.seed, found.plan, found.wrong
    );
    assert!(matches!(found.wrong, Wrong::Order(_)), "{}", found.wrong);
    found
}

#[test]
fn a_server_that_does_not_know_copies_is_found() {
    is_found(Sabotage::NoReplies);
}

#[test]
fn a_server_that_does_what_was_given_up_is_found() {
    is_found(Sabotage::NoFence);
}

#[test]
fn a_restart_that_forgets_what_was_done_is_found() {
    let found = is_found(Sabotage::ForgetsChanges);
    assert!(found.plan.faults.iter().any(|fault| matches!(fault, Fault::Kill { .. })), "{}", found.plan);
}

#[test]
fn a_restart_that_forgets_what_had_begun_is_found() {
    is_found(Sabotage::ForgetsBegun);
}

#[test]
fn stale_answers_are_found() {
    is_found(Sabotage::StaleAnswers);
}

/// A seed replays: what it does depends on nothing else.
#[test]
fn a_seed_does_the_same_again() {
    for seed in 0..10 {
        let once = || {
            let history = world::run(&Plan::of_seed(seed), Sabotage::None);
            // The numbers of files are drawn by the server.
            let mut files = std::collections::BTreeMap::new();
            let mut number = |key: u64| {
                let next = files.len();
                *files.entry(key).or_insert(next)
            };
            let events = history.events.into_iter().map(|event| {
                let seen = match event.operation.seen {
                    Seen::File(key) => format!("file {}", number(key)),
                    seen => format!("{seen:?}"),
                };
                (event.operation.id, event.called, event.ended, seen)
            });
            (events.collect::<Vec<_>>(), history.copies, history.restarts)
        };
        assert_eq!(once(), once(), "seed {seed}");
    }
}
