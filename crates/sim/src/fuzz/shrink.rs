//! Finds the smallest scenario that still fails the same way: greedily removes sections, list entries and keys, and
//! reduces numbers.
//!
//! Works on the values as written, without knowing the meaning of keys: a removed key takes its default. Each accepted
//! step leaves fewer or smaller values, so it terminates.

use std::collections::BTreeMap;

use impresario_toml::value_at_mut;
use toml::{Table, Value};

use super::Failure;
use crate::file;
use crate::model::Scenario;

/// The result of shrinking.
#[derive(Clone, PartialEq, Debug)]
pub struct Shrunk {
    /// The smallest scenario found.
    pub scenario: Scenario,
    /// Its text as a scenario file.
    pub text: String,
    /// How it fails.
    pub failure: Failure,
    /// Scenarios tried.
    pub tries: u64,
}

/// Shrinks a failing scenario. `fails` judges a candidate; `go_on` is called before each with the number of tries.
pub fn shrink(
    scenario: &Scenario,
    failure: &Failure,
    fails: &mut dyn FnMut(&Scenario) -> Option<Failure>,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Shrunk {
    let mut best = Shrunk { scenario: scenario.clone(), text: String::new(), failure: failure.clone(), tries: 0 };
    let Ok(Value::Table(mut values)) = Value::try_from(scenario) else { return best };
    let mut tried = std::collections::BTreeSet::new();
    'again: loop {
        for candidate in candidates(&values) {
            // Values already tried would not fail now either.
            if !tried.insert(candidate.to_string()) {
                continue;
            }
            let Ok(smaller) = file::scenario_of(&candidate) else { continue };
            if load(&smaller) > load(&best.scenario) {
                continue;
            }
            if !go_on(best.tries) {
                break 'again;
            }
            best.tries += 1;
            if let Some(failure) = fails(&smaller).filter(|f| f.resembles(&best.failure)) {
                best = Shrunk { scenario: smaller, failure, ..best };
                values = candidate;
                continue 'again;
            }
        }
        break;
    }
    best.text = format!("# {}\n{}", best.failure, values);
    best
}

/// The size of a scenario: defaults must not make it larger.
fn load(scenario: &Scenario) -> u64 {
    let one = |a: &crate::model::Application| {
        u64::from(a.copies) * u64::from(a.processes) * a.requests * u64::from(a.regions)
    };
    scenario.application.iter().map(one).sum()
}

/// Values with one thing removed or reduced, the largest steps first.
fn candidates(values: &Table) -> Vec<Table> {
    let mut steps = BTreeMap::new();
    let mut path = Vec::new();
    for (key, value) in values {
        path.push(key.clone());
        walk(value, &mut path, &mut steps);
        path.pop();
    }
    let mut found = Vec::new();
    for changes in steps.values() {
        for (path, change) in changes {
            let mut candidate = values.clone();
            if apply(&mut candidate, path, change) {
                found.push(candidate);
            }
        }
    }
    found
}

/// One step.
enum Change {
    Remove,
    Become(Value),
}

/// Steps by how much they remove: list entries and sections, then keys, then numbers.
type Steps = BTreeMap<u8, Vec<(Vec<String>, Change)>>;

fn walk(value: &Value, path: &mut Vec<String>, steps: &mut Steps) {
    let mut add = |rank: u8, change: Change| steps.entry(rank).or_default().push((path.clone(), change));
    match value {
        Value::Table(table) => {
            add(if path.len() == 1 { 1 } else { 2 }, Change::Remove);
            for (key, value) in table {
                path.push(key.clone());
                walk(value, path, steps);
                path.pop();
            }
        }
        Value::Array(array) => {
            add(4, Change::Remove);
            for (i, value) in array.iter().enumerate() {
                path.push(i.to_string());
                let rank = if value.is_table() { 0 } else { 3 };
                steps.entry(rank).or_default().push((path.clone(), Change::Remove));
                if let Value::Table(table) = value {
                    for (key, value) in table {
                        path.push(key.clone());
                        walk(value, path, steps);
                        path.pop();
                    }
                }
                path.pop();
            }
        }
        Value::Integer(n) => {
            add(4, Change::Remove);
            for smaller in [0, 1, n / 2, n - 1] {
                if smaller >= 0 && smaller < *n {
                    add(5, Change::Become(Value::Integer(smaller)));
                }
            }
        }
        Value::Float(x) => {
            add(4, Change::Remove);
            for smaller in [0.0, x / 2.0] {
                // Repeated halving would take a thousand steps.
                if smaller < *x && (smaller == 0.0 || smaller > 1e-6) {
                    add(5, Change::Become(Value::Float(smaller)));
                }
            }
        }
        Value::String(text) => {
            add(4, Change::Remove);
            // Parameters of policies are text.
            if let Ok(n) = text.parse::<u64>() {
                for smaller in [0, 1, n / 2, n.saturating_sub(1)].into_iter().filter(|smaller| *smaller < n) {
                    add(5, Change::Become(Value::String(smaller.to_string())));
                }
            }
        }
        _ => add(4, Change::Remove),
    }
}

fn apply(values: &mut Table, path: &[String], change: &Change) -> bool {
    let Some((last, around)) = path.split_last() else { return false };
    if around.is_empty() {
        return change_in(values, last, change);
    }
    match value_at_mut(values, around) {
        Some(Value::Table(table)) => change_in(table, last, change),
        Some(Value::Array(array)) => match (last.parse::<usize>(), change) {
            (Ok(i), Change::Remove) if i < array.len() => {
                array.remove(i);
                true
            }
            _ => false,
        },
        _ => false,
    }
}

fn change_in(table: &mut Table, key: &str, change: &Change) -> bool {
    match change {
        Change::Remove => table.remove(key).is_some(),
        Change::Become(value) => table.insert(key.to_string(), value.clone()).is_some(),
    }
}
