//! From a tree of values to a scenario: every unknown key, wrong type and bad value, each said in one sentence.
//!
//! What keys there are and what they take is known to `serde` from the structures of [`crate::model`]; it stops at the
//! first mistake, so each one is taken out of the tree and the rest read again.

use std::collections::BTreeMap;

use impresario_config::{nearest, policy_complaint};
use impresario_device::{DeviceParams, FlashParams};
use impresario_sched::{PolicySpec, policy};
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::tree::{Path, dotted, steps};
use crate::model::{Pattern, Scenario, TracedAccess};

/// More mistakes than this are not told at once.
const MISTAKES_MAX: usize = 100;

/// Traces by the name that `trace_file` gives.
pub(crate) type Traces = BTreeMap<String, Vec<TracedAccess>>;

/// One mistake.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Wrong {
    /// The key that is wrong.
    pub(crate) path: Path,
    /// The key itself is wrong, not its value.
    pub(crate) unknown: bool,
    /// What is wrong, and the remedy.
    pub(crate) message: String,
}

/// The scenario that the values describe, its traces filled in; or everything that is wrong with it.
pub(crate) fn scenario(values: &Table, traces: &Traces) -> Result<Scenario, Vec<Wrong>> {
    let mut values = values.clone();
    let mut wrong = Vec::new();
    name_policies(&mut values);
    devices(&mut values, &mut wrong);
    let scenario = read::<Scenario>(values, &[], &mut wrong);
    if let Some(mut scenario) = scenario {
        fill(&mut scenario, traces);
        check(&scenario, &mut wrong);
        if wrong.is_empty() {
            return Ok(scenario);
        }
    }
    Err(wrong)
}

/// Gives applications the accesses of their traces.
pub(crate) fn fill(scenario: &mut Scenario, traces: &Traces) {
    for application in scenario.application.iter_mut().filter(|a| a.pattern == Pattern::Trace) {
        if let Some(trace) = application.trace_file.as_ref().and_then(|file| traces.get(file)) {
            application.trace.clone_from(trace);
            // The trace knows how many there are.
            application.processes = trace.iter().map(|access| access.process + 1).max().unwrap_or(1);
        }
    }
}

/// Ranges and names, after the types are right.
fn check(scenario: &Scenario, wrong: &mut Vec<Wrong>) {
    let mut add = |path: Path, message: String| {
        let near = |w: &Wrong| w.path.starts_with(&path) || path.starts_with(&w.path);
        // What a placeholder may break is no second mistake, and a key is judged once.
        if !wrong.iter().any(near) {
            wrong.push(Wrong { path, unknown: false, message });
        }
    };
    let mut policy = |at: &[&str], spec: &PolicySpec, lanes: u16| {
        if let Err(error) = policy::check(spec, lanes) {
            add(at.iter().map(|s| s.to_string()).collect(), policy_complaint(&error));
        }
    };
    policy(&["servers", "policy"], &scenario.servers.policy, 1);
    if let Some(io) = &scenario.io_nodes {
        policy(&["io_nodes", "policy"], &io.policy, scenario.servers.count.max(1));
    }
    let device = &scenario.servers.device;
    if !device.is_empty() && !scenario.device.contains_key(device) {
        let remedy = match nearest(device, scenario.device.keys().map(String::as_str)) {
            Some(near) => format!("did you mean {near:?}?"),
            None => format!("add a section [device.{device}] or remove the key"),
        };
        add(steps("servers.device"), format!("there is no device {device:?}; {remedy}"));
    }
    for (path, message) in scenario.check() {
        let mut path = steps(&path);
        // A device is judged as a whole, in words that begin with the key.
        if path.len() == 2 && path[0] == "device" && message.contains(" is ") {
            path.extend(message.split(' ').next().map(str::to_string));
        }
        let key = path.last().map_or("", String::as_str);
        let named = message.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == key);
        add(path.clone(), if named { message } else { format!("{key}: {message}") });
    }
}

/// `policy = "fifo"` is `policy = { name = "fifo" }`.
fn name_policies(values: &mut Table) {
    for section in ["io_nodes", "servers"] {
        let Some(policy) = values.get_mut(section).and_then(|s| s.get_mut("policy")) else { continue };
        if let Value::String(name) = policy {
            *policy = Value::Table(Table::from_iter([("name".to_string(), Value::String(std::mem::take(name)))]));
        }
    }
}

/// Devices are read by their kind first: as one of several kinds they would be blamed as a whole.
fn devices(values: &mut Table, wrong: &mut Vec<Wrong>) {
    let Some(Value::Table(devices)) = values.get_mut("device") else { return };
    let names: Vec<String> = devices.iter().map(|(name, _)| name.clone()).collect();
    for name in names {
        let Some(Value::Table(device)) = devices.get(&name) else { continue };
        let at = ["device".to_string(), name.clone()];
        let before = wrong.len();
        let mut rest = device.clone();
        match rest.remove("kind").as_ref().and_then(Value::as_str) {
            Some("disk") => drop(read::<DeviceParams>(rest, &at, wrong)),
            Some("flash") => drop(read::<FlashParams>(rest, &at, wrong)),
            Some(other) => {
                let near = nearest(other, ["disk", "flash"]).map_or(String::new(), |n| format!("; did you mean {n}?"));
                let message = format!("kind is {other:?}; it must be \"disk\" or \"flash\"{near}");
                wrong.push(Wrong { path: [&at[..], &["kind".into()]].concat(), unknown: false, message });
            }
            None => {
                let message = format!("device.{name} has no kind; add kind = \"disk\" or kind = \"flash\"");
                wrong.push(Wrong { path: at.to_vec(), unknown: false, message });
            }
        }
        if wrong.len() > before {
            // A good one in its place, so that it is not called missing as well.
            let good = Table::from_iter([("kind".to_string(), Value::String("disk".into()))]);
            devices.insert(name, Value::Table(good));
        }
    }
}

/// Reads values into a structure; mistakes are told and taken out.
fn read<T: DeserializeOwned>(mut values: Table, at: &[String], wrong: &mut Vec<Wrong>) -> Option<T> {
    for _ in 0..MISTAKES_MAX {
        let error = match serde_path_to_error::deserialize::<_, T>(Value::Table(values.clone())) {
            Ok(read) => return Some(read),
            Err(error) => error,
        };
        let mut path: Path = error.path().iter().filter_map(step).collect();
        let message = error.inner().message().trim().replace('\n', "; ");
        let found = value_at(&values, &path).cloned();
        let (sentence, unknown) = sentence(&mut path, at, &message, found.as_ref());
        let full: Path = at.iter().chain(&path).cloned().collect();
        // What was taken out for a mistake is not missing.
        let inside = |w: &Wrong| w.path.len() > full.len() && w.path.starts_with(&full);
        if !(message.starts_with("missing field") && wrong.iter().any(inside)) {
            wrong.push(Wrong { path: full, unknown, message: sentence });
        }
        if !take_out(&mut values, &path) {
            return None;
        }
    }
    None
}

fn step(segment: &serde_path_to_error::Segment) -> Option<String> {
    use serde_path_to_error::Segment;
    match segment {
        Segment::Map { key } => Some(key.clone()),
        Segment::Seq { index } => Some(index.to_string()),
        Segment::Enum { .. } | Segment::Unknown => None,
    }
}

fn value_at<'a>(values: &'a Table, path: &[String]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let step = |value: &'a Value, step: &String| match value {
        Value::Table(table) => table.get(step),
        Value::Array(array) => array.get(step.parse::<usize>().ok()?),
        _ => None,
    };
    rest.iter().try_fold(values.get(first)?, step)
}

/// Removes the value, or the nearest around it that is of a table: those after it keep their places.
fn take_out(values: &mut Table, path: &[String]) -> bool {
    for n in (1..=path.len()).rev() {
        let (around, last) = (&path[..n - 1], &path[n - 1]);
        let table = match around {
            [] => Some(&mut *values),
            _ => value_at_mut(values, around).and_then(Value::as_table_mut),
        };
        if table.and_then(|table| table.remove(last)).is_some() {
            return true;
        }
    }
    false
}

/// The value at a path, to change.
pub(crate) fn value_at_mut<'a>(values: &'a mut Table, path: &[String]) -> Option<&'a mut Value> {
    let (first, rest) = path.split_first()?;
    let mut value = values.get_mut(first)?;
    for step in rest {
        value = match value {
            Value::Table(table) => table.get_mut(step)?,
            Value::Array(array) => array.get_mut(step.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    Some(value)
}

/// What `serde` says, for whoever wrote the file. The path grows by the key where only the words name it.
fn sentence(path: &mut Path, at: &[String], message: &str, found: Option<&Value>) -> (String, bool) {
    let words = quoted(message);
    if message.starts_with("unknown field") {
        let (name, known) = (words.first().cloned().unwrap_or_default(), words.get(1..).unwrap_or_default());
        if path.last() != Some(&name) {
            path.push(name.clone());
        }
        let section = [at, &path[..path.len() - 1]].concat();
        let inside = if section.is_empty() { String::new() } else { format!(" in {}", dotted(&section)) };
        let remedy = match nearest(&name, known.iter().map(String::as_str)) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("known are {}", known.join(", ")),
        };
        return (format!("unknown key {name}{inside}; {remedy}"), true);
    }
    let key = path.iter().rev().find(|step| step.parse::<usize>().is_err()).cloned().unwrap_or_default();
    let given = found.map_or_else(|| "nothing".to_string(), shown);
    if message.starts_with("unknown variant") {
        let (name, known) = (words.first().cloned().unwrap_or_default(), words.get(1..).unwrap_or_default());
        let near = nearest(&name, known.iter().map(String::as_str)).map(|n| format!("; did you mean {n}?"));
        let one_of = known.iter().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
        return (format!("{key} is {name:?}; it must be one of {one_of}{}", near.unwrap_or_default()), false);
    }
    if message.starts_with("missing field") {
        let missing = words.first().cloned().unwrap_or_default();
        let section = dotted(&[at, path].concat());
        return (format!("{section} has no {missing}; add it, for example: {missing} = {}", example(&missing)), false);
    }
    if key == "policy" {
        let form =
            "a name such as \"mlf\", or { name = \"twins\", window_us = 1000 } with numbers, text, true or false";
        return (format!("policy must be {form}; not {given}"), false);
    }
    let expected = message.rsplit_once("expected ").map_or("", |(_, expected)| expected);
    let unit = unit(&key);
    let form = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => {
            let most = match expected {
                "u16" => format!(", at most {}", u16::MAX),
                "u32" => format!(", at most {}", u32::MAX),
                _ => String::new(),
            };
            format!("a whole number{unit} without quotes or suffix{most}")
        }
        "f32" | "f64" => format!("a number{unit} without quotes or suffix"),
        "a boolean" => "true or false".into(),
        "a string" | "string" => "text in quotes".into(),
        "a sequence" if key == "assumptions" => "a list of sentences: [\"…\", \"…\"]".into(),
        "a sequence" => format!("sections [[{key}]], with two brackets, one for each"),
        _ if expected.starts_with("struct") || expected == "a map" => format!("a section [{key}]"),
        _ => return (format!("{key}: {message}"), false),
    };
    (format!("{key} must be {form}, not {given}"), false)
}

/// The words in back quotes.
fn quoted(message: &str) -> Vec<String> {
    message.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

/// The unit that the end of a key names.
fn unit(key: &str) -> &'static str {
    let units = [
        ("_bytes_per_s", " of bytes a second"),
        ("_bytes", " of bytes"),
        ("_bytes_max", " of bytes"),
        ("_us", " of microseconds"),
        ("_ms", " of milliseconds"),
        ("_s", " of seconds"),
    ];
    units.iter().find(|(end, _)| key.ends_with(end)).map_or("", |(_, unit)| unit)
}

fn example(key: &str) -> &'static str {
    match key {
        "what" => "\"slow-disk\"",
        "at_s" | "for_s" => "1.5",
        "name" => "\"fifo\"",
        "kind" => "\"disk\"",
        _ => "0",
    }
}

/// A value as it would be written, in short.
pub(crate) fn shown(value: &Value) -> String {
    let text = match value {
        Value::Table(_) => return "a section".into(),
        Value::Array(_) => return "a list".into(),
        value => value.to_string(),
    };
    if text.chars().count() > 60 { text.chars().take(57).chain("…".chars()).collect() } else { text }
}
