//! Checks a run against the laws: no violation, no panic, an end, a reproducible outcome.

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::model::Scenario;
use crate::outcome::Outcome;
use crate::{Budget, SimError, Simulation};

/// Events allowed for any scenario, plus those per request and per second of virtual time. A generated scenario takes
/// some hundred events a request, and policies with windows of 0.1 ms read the clock ten thousand times a second at
/// each node. Virtual time ends with the scenario's limit.
const EVENTS_FREE: u64 = 1_000_000;
const EVENTS_PER_OPERATION: u64 = 10_000;
const EVENTS_PER_SECOND: f64 = 500_000.0;

/// One scenario in this many is run twice.
const TWICE: u64 = 16;

/// The kind of a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A law was broken.
    Violation,
    /// The program panicked.
    Panic,
    /// It does not end within a bounded number of events.
    Endless,
    /// The same seed gave another outcome.
    Undetermined,
    /// A valid scenario was refused.
    Refused,
}

/// A failure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Its kind.
    pub kind: Kind,
    /// Where and how it failed, in words.
    pub message: String,
}

impl Failure {
    /// True for the same kind and the same message apart from numbers and names.
    pub fn resembles(&self, other: &Failure) -> bool {
        self.kind == other.kind && words(&self.message) == words(&other.message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Violation => "a law is broken",
            Kind::Panic => "panic",
            Kind::Endless => "no end",
            Kind::Undetermined => "not determined by its seed",
            Kind::Refused => "refused",
        };
        write!(f, "{kind}: {}", self.message)
    }
}

/// The words of a message that a smaller scenario keeps: without numbers, and without the request shown after a brace.
fn words(message: &str) -> Vec<String> {
    let word = |w: &str| w.chars().filter(|c| c.is_alphabetic()).collect::<String>();
    let steady = |w: &&str| !w.chars().any(|c| c.is_ascii_digit());
    let message = message.split('{').next().unwrap_or_default();
    message.split_whitespace().filter(steady).map(word).filter(|w| w.len() > 1).collect()
}

/// The size of a scenario that passed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Judged {
    /// Operations of its applications.
    pub operations: u64,
    /// Faults that occurred.
    pub faults: u64,
}

/// Runs a scenario with the complete checks.
pub fn judge(scenario: &Scenario) -> Result<Judged, Failure> {
    judge_while(scenario, &|| true).map(Option::unwrap_or_default)
}

/// The same while `go_on`, called occasionally, is true; `None` if it was abandoned.
pub fn judge_while(scenario: &Scenario, go_on: &dyn Fn() -> bool) -> Result<Option<Judged>, Failure> {
    let Some(outcome) = caught(|| run(scenario, go_on))? else { return Ok(None) };
    let broken = outcome.violations.first().cloned().or_else(|| wrong_sums(scenario, &outcome));
    if let Some(message) = broken {
        return Err(Failure { kind: Kind::Violation, message });
    }
    let again = scenario.seed.is_multiple_of(TWICE);
    if again && caught(|| run(scenario, go_on))?.is_some_and(|again| again != outcome) {
        let message = "two runs gave different outcomes".into();
        return Err(Failure { kind: Kind::Undetermined, message });
    }
    Ok(Some(Judged { operations: outcome.operations, faults: outcome.faults.len() as u64 }))
}

/// Checks the outcome from outside: an application without failures got all its bytes.
fn wrong_sums(scenario: &Scenario, outcome: &Outcome) -> Option<String> {
    let asked = scenario.application.iter().flat_map(|a| {
        let bytes = u64::from(a.processes) * a.requests * u64::from(a.regions) * a.request_bytes;
        std::iter::repeat_n((a, bytes), a.copies as usize)
    });
    for ((application, bytes), told) in asked.zip(&outcome.applications) {
        if told.failed == 0 && outcome.failed == 0 && told.bytes != bytes {
            return Some(format!("application {} got {} bytes of {bytes}", application.name, told.bytes));
        }
    }
    None
}

fn run(scenario: &Scenario, go_on: &dyn Fn() -> bool) -> Result<Option<Outcome>, Failure> {
    let refused = |e: SimError| Failure { kind: Kind::Refused, message: e.to_string() };
    let mut simulation = Simulation::new(scenario).map_err(refused)?.with_checks(true);
    let operations: u64 = scenario
        .application
        .iter()
        .map(|a| u64::from(a.copies) * u64::from(a.processes) * a.requests * u64::from(a.regions))
        .sum();
    let events_max = EVENTS_FREE + EVENTS_PER_OPERATION * operations;
    const STEP: u64 = 5_000;
    let mut events = 0;
    loop {
        let progress = simulation.step_until(Budget::Events(STEP));
        if progress.done {
            return Ok(Some(simulation.finish()));
        }
        if !go_on() {
            return Ok(None);
        }
        events += STEP;
        if events > events_max + (progress.virtual_s * EVENTS_PER_SECOND) as u64 {
            let message = format!("{events} events in {} s of virtual time", progress.virtual_s);
            return Err(Failure { kind: Kind::Endless, message });
        }
    }
}

thread_local! {
    /// The location and message of a panic on this thread, while it is being caught.
    static CAUGHT: RefCell<Option<Option<String>>> = const { RefCell::new(None) };
}

/// Turns a panic into a failure, without printing it.
fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let mine = CAUGHT.with_borrow_mut(|caught| match caught {
                Some(message) => {
                    let place = info.location().map(|l| format!("{}:{}: ", l.file(), l.line())).unwrap_or_default();
                    let payload = info.payload();
                    let text = payload.downcast_ref::<&str>().copied();
                    let said = text.or(payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without words");
                    *message = Some(format!("{place}{said}").replace('\n', " "));
                    true
                }
                None => false,
            });
            if !mine {
                before(info);
            }
        }));
    });
    CAUGHT.set(Some(None));
    let result = catch_unwind(AssertUnwindSafe(work));
    let message = CAUGHT.take().flatten();
    result.unwrap_or_else(|_| Err(Failure { kind: Kind::Panic, message: message.unwrap_or_default() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_reported_with_its_location() {
        let failure = caught::<()>(|| panic!("request {} is lost", 7)).unwrap_err();
        assert_eq!(failure.kind, Kind::Panic);
        assert!(failure.message.contains("judge.rs:") && failure.message.ends_with("request 7 is lost"), "{failure}");
        assert_eq!(caught(|| Ok(5)), Ok(5));
    }

    #[test]
    fn numbers_and_names_do_not_make_another_failure() {
        let of = |message: &str| Failure { kind: Kind::Violation, message: message.into() };
        assert!(
            of("0.123 s, server 3: request 17 waited too long")
                .resembles(&of("2 s, server 0: request 1 waited too long"))
        );
        assert!(!of("request 17 waited too long").resembles(&of("request 17 is lost")));
        let panic = Failure { kind: Kind::Panic, message: "request 17 is lost".into() };
        assert!(!of("request 17 is lost").resembles(&panic));
    }
}
