//! Turns the values of a scenario file into a scenario, or lists every error in them.

use std::collections::BTreeMap;

use impresario_config::policies;
use impresario_device::{DeviceParams, FlashParams};
use impresario_toml::{KeyPath, Mistake, Mistakes, nearest, read};
use toml::{Table, Value};

use crate::model::{Pattern, Scenario, TracedAccess};

/// Traces by the name in `trace_file`.
pub(crate) type Traces = BTreeMap<String, Vec<TracedAccess>>;

/// The scenario of the values, with its traces; or all errors.
pub(crate) fn scenario(values: &Table, traces: &Traces) -> Result<Scenario, Vec<Mistake>> {
    let (mut values, mut mistakes, root) = (values.clone(), Mistakes::default(), KeyPath::default());
    policies(&mut values, &root, &mut mistakes);
    devices(&mut values, &mut mistakes);
    let scenario = read::<Scenario>(values, &root, missing, &mut mistakes).map(|mut scenario| {
        fill(&mut scenario, traces);
        check(&scenario, &mut mistakes);
        scenario
    });
    scenario.filter(|_| mistakes.0.is_empty()).ok_or(mistakes.0)
}

/// Gives the applications the accesses of their traces.
pub(crate) fn fill(scenario: &mut Scenario, traces: &Traces) {
    for application in scenario.application.iter_mut().filter(|a| a.pattern == Pattern::Trace) {
        if let Some(trace) = application.trace_file.as_ref().and_then(|file| traces.get(file)) {
            application.trace.clone_from(trace);
            // The trace determines the number of processes.
            application.processes = trace.iter().map(|access| access.process + 1).max().unwrap_or(1);
        }
    }
}

/// Checks ranges and names, once the types are right.
fn check(scenario: &Scenario, mistakes: &mut Mistakes) {
    for (path, message) in scenario.check() {
        let key = path.0.last().map_or("", String::as_str);
        let named = message.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == key);
        let message = if named { message } else { format!("{key}: {message}") };
        mistakes.add(path, message);
    }
}

/// The keys without a default.
fn missing(path: &KeyPath) -> Option<(&'static str, Value)> {
    Some(match path.0.last()?.as_str() {
        "what" => ("\"slow-disk\"", Value::String("slow-disk".into())),
        "at_s" | "for_s" => ("1.5", Value::Float(1.5)),
        _ => ("0", Value::Integer(0)),
    })
}

/// Checks the kind of a device first: parsed as one of several kinds, the whole device would be the error.
fn devices(values: &mut Table, mistakes: &mut Mistakes) {
    let Some(Value::Table(devices)) = values.get_mut("device") else { return };
    for (name, value) in devices.iter_mut() {
        let Value::Table(device) = value else { continue };
        let at = KeyPath::default().key("device").key(name);
        let before = mistakes.0.len();
        let mut rest = device.clone();
        match rest.remove("kind").as_ref().and_then(Value::as_str) {
            Some("disk") => drop(read::<DeviceParams>(rest, &at, missing, mistakes)),
            Some("flash") => drop(read::<FlashParams>(rest, &at, missing, mistakes)),
            Some(other) => {
                let near = nearest(other, ["disk", "flash"]).map_or(String::new(), |n| format!("; did you mean {n}?"));
                let message = format!("kind is {other:?}; it must be \"disk\" or \"flash\"{near}");
                mistakes.add(at.key("kind"), message);
            }
            None => {
                let message = format!("{at} has no kind; add kind = \"disk\" or kind = \"flash\"");
                mistakes.add(at.key("kind"), message);
            }
        }
        if mistakes.0.len() > before {
            // Substitute a valid one, so that it is not also reported as missing.
            *value = Value::Table(Table::from_iter([("kind".to_string(), Value::String("disk".into()))]));
        }
    }
}
