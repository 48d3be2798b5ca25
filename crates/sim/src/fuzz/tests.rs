//! The fuzzer finds a planted bug, and its reduced scenario still fails.

use super::*;
use crate::model::{FaultKind, Pattern};

/// A planted bug: more than two processes with strided accesses fail when a server restarts. Everything runs for real;
/// other tests check the laws.
fn planted(scenario: &Scenario) -> Result<Judged, Failure> {
    let outcome = crate::run(scenario).map_err(|e| Failure { kind: Kind::Refused, message: e.to_string() })?;
    let judged = Judged { operations: outcome.operations, faults: outcome.faults.len() as u64 };
    let strided = scenario.application.iter().any(|a| a.pattern == Pattern::Strided && a.processes > 2);
    let restarted = scenario.fault.iter().find(|f| f.what == FaultKind::RestartedServer);
    match restarted {
        Some(fault) if strided => {
            let message = format!("{} s, server {}: a request is lost", fault.at_s, fault.which);
            Err(Failure { kind: Kind::Violation, message })
        }
        _ => Ok(judged),
    }
}

#[test]
fn a_planted_bug_is_found_by_its_seed_and_reduced() {
    let (tally, found) = hunt(1, 2, &planted, &mut |tally| tally.scenarios > 5000);
    let found = found.unwrap_or_else(|| panic!("not found in {tally:?}"));
    // The seed alone reproduces it.
    let large = scenario(found.seed);
    let failure = planted(&large).unwrap_err();
    assert!(failure.resembles(&found.failure));

    let shrunk = shrink(&large, &failure, &mut |s| planted(s).err(), &mut |tries| tries < 3000);
    assert!(planted(&shrunk.scenario).unwrap_err().resembles(&failure));
    let s = &shrunk.scenario;
    assert_eq!((s.application.len(), s.fault.len(), s.io_nodes.is_none()), (1, 1, true), "{}", shrunk.text);
    assert_eq!((s.application[0].processes, s.application[0].requests), (3, 1), "{}", shrunk.text);
    assert!(s.device.is_empty() && s.random_faults.is_none(), "{}", shrunk.text);

    // The written scenario is the failing one.
    let no_trace = &mut |_: &str| Err("none".to_string());
    let study = crate::file::Study::read(&shrunk.text, "s.toml".as_ref(), &Default::default(), no_trace).unwrap();
    assert_eq!(study.scenario(0, 0), *s, "{}", shrunk.text);
    assert!(shrunk.text.starts_with("# a law is broken: "), "{}", shrunk.text);
    assert!(shrunk.text.lines().count() < 20, "{}", shrunk.text);
}

#[test]
fn a_hunt_without_a_bug_ends_when_told() {
    let (tally, found) = hunt(7, 2, &|_| Ok(Judged { operations: 3, faults: 1 }), &mut |tally| tally.scenarios >= 20);
    assert_eq!(found, None);
    assert_eq!(tally.scenarios, 20);
    assert_eq!((tally.operations, tally.faults), (tally.scenarios * 3, tally.scenarios));
}

#[test]
fn an_endless_scenario_and_a_panic_are_failures() {
    let fails = |kind: Kind| move |_: &Scenario| Err(Failure { kind, message: "x".into() });
    for kind in [Kind::Endless, Kind::Panic] {
        let (_, found) = hunt(3, 1, &fails(kind), &mut |_| false);
        assert_eq!(found.map(|f| (f.seed, f.failure.kind)), Some((3, kind)));
    }
}
