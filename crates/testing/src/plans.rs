//! What plans of simulations have in common: threads of clients that do one thing after another, links that delay and double
//! messages, and how a plan that fails is made smaller.

use std::fmt;

use impresario_base::Random;
use impresario_base::random::mix;

/// An operation, and how long its thread waits before it, virtual µs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step<O> {
    /// Its number in the whole plan, by which its messages are drawn: it keeps them when others are left out.
    pub id: u64,
    /// The wait, virtual µs.
    pub pause_us: u64,
    /// What is done.
    pub op: O,
}

/// A thread of a client does one thing after another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Thread<O> {
    /// The client's number.
    pub client: usize,
    /// What it does.
    pub steps: Vec<Step<O>>,
}

impl<O: fmt::Debug> fmt::Display for Thread<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps: Vec<String> = self.steps.iter().map(|step| format!("+{} µs {:?}", step.pause_us, step.op)).collect();
        write!(f, "  client {}: {}", self.client, steps.join("; "))
    }
}

/// What links do with each message, beside the faults: one of so many (0: none).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Links {
    /// Comes up to 60 ms late.
    pub slow_of: u64,
    /// Comes up to 15 s late, which is longer than a call may take.
    pub late_of: u64,
    /// Comes twice.
    pub doubled_of: u64,
    /// The seed of the draws.
    pub seed: u64,
}

impl Links {
    /// Some that do none of it, and some that do much.
    pub fn draw(draws: &mut Random) -> Links {
        let of = |draws: &mut Random, most: u64| draws.below(3) * draws.below(most);
        Links { slow_of: of(draws, 6), late_of: of(draws, 20), doubled_of: of(draws, 10), seed: draws.next_u64() }
    }

    /// A number that only the message decides, which these three tell from all others.
    pub fn number_of(&self, message: [u64; 3]) -> u64 {
        message.into_iter().fold(self.seed, |seed, part| mix(seed ^ mix(part)))
    }

    /// How long the message takes, ns.
    pub fn transit_ns(&self, message: [u64; 3]) -> u64 {
        let draw = self.number_of(message);
        let is = |one_of: u64, salt: u64| one_of > 0 && mix(draw ^ salt).is_multiple_of(one_of);
        let within_us = match () {
            () if is(self.late_of, 1) => 15_000_000,
            () if is(self.slow_of, 2) => 60_000,
            () => 400,
        };
        50_000 + mix(draw ^ 3) % (within_us * 1000)
    }
}

/// The parts of a plan that can be left out.
#[allow(missing_docs, reason = "they are named as they are in plans")]
pub struct Parts<'a, O, F> {
    pub threads: &'a mut Vec<Thread<O>>,
    pub faults: &'a mut Vec<F>,
    pub links: &'a mut Links,
    pub ways: &'a mut usize,
}

/// Plans with less in them than `plan` has, those that lack most first; `less` are changes of its own.
pub fn smaller<P: Clone + PartialEq, O, F>(
    plan: &P,
    parts: impl Fn(&mut P) -> Parts<'_, O, F>,
    less: &[&dyn Fn(&mut P)],
) -> Vec<P> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut P)| {
        let mut smaller = plan.clone();
        change(&mut smaller);
        parts(&mut smaller).threads.retain(|thread| !thread.steps.is_empty());
        if smaller != *plan {
            found.push(smaller);
        }
    };
    let mut whole = plan.clone();
    let Parts { threads, faults, .. } = parts(&mut whole);
    let (steps, faults): (Vec<usize>, _) = (threads.iter().map(|thread| thread.steps.len()).collect(), faults.len());
    for thread in 0..steps.len() {
        add(&|plan| drop(parts(plan).threads.remove(thread)));
    }
    for fault in 0..faults {
        add(&|plan| drop(parts(plan).faults.remove(fault)));
    }
    for (thread, steps) in steps.iter().enumerate() {
        let half = steps / 2;
        add(&|plan| parts(plan).threads[thread].steps.truncate(half));
        add(&|plan| drop(parts(plan).threads[thread].steps.drain(..half)));
    }
    add(&|plan| parts(plan).links.doubled_of = 0);
    add(&|plan| parts(plan).links.late_of = 0);
    add(&|plan| parts(plan).links.slow_of = 0);
    add(&|plan| *parts(plan).ways = 1);
    less.iter().for_each(|change| add(*change));
    for (thread, steps) in steps.iter().enumerate() {
        for step in 0..*steps {
            add(&|plan| drop(parts(plan).threads[thread].steps.remove(step)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, PartialEq, Debug)]
    struct Plan {
        threads: Vec<Thread<u8>>,
        faults: Vec<u8>,
        links: Links,
        ways: usize,
        odd: bool,
    }

    fn parts(Plan { threads, faults, links, ways, .. }: &mut Plan) -> Parts<'_, u8, u8> {
        Parts { threads, faults, links, ways }
    }

    #[test]
    fn a_plan_gets_smaller_until_nothing_is_left() {
        let step = |id| Step { id, pause_us: 5, op: 1 };
        let threads = (0..2).map(|client| Thread { client, steps: (0..3).map(step).collect() }).collect();
        let links = Links { slow_of: 1, late_of: 2, doubled_of: 3, seed: 4 };
        let mut plan = Plan { threads, faults: vec![1, 2], links, ways: 2, odd: true };
        assert_eq!(plan.threads[0].to_string(), "  client 0: +5 µs 1; +5 µs 1; +5 µs 1");
        let mut rounds = 0;
        while let Some(last) = smaller(&plan, parts, &[&|plan: &mut Plan| plan.odd = false]).pop() {
            assert_ne!(last, plan);
            plan = last;
            rounds += 1;
        }
        let nothing = Links { slow_of: 0, late_of: 0, doubled_of: 0, seed: 4 };
        assert_eq!(plan, Plan { threads: vec![], faults: vec![], links: nothing, ways: 1, odd: false });
        assert_eq!(rounds, 6 + 2 + 3 + 1 + 1);
    }

    #[test]
    fn a_message_takes_the_same_time_each_time_and_others_another() {
        let links = Links { slow_of: 2, late_of: 0, doubled_of: 0, seed: 4 };
        let all: Vec<u64> = (0..100).map(|n| links.transit_ns([n, 1, 2])).collect();
        assert_eq!(all, (0..100).map(|n| links.transit_ns([n, 1, 2])).collect::<Vec<_>>());
        assert!(all.iter().any(|ns| *ns > 1_000_000) && all.iter().any(|ns| *ns < 450_000), "{all:?}");
        assert!(all.iter().all(|ns| (50_000..60_050_000).contains(ns)));
    }
}
