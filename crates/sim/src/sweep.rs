//! Sweeps: which values are combined, how they enter a scenario, and how many runs execute in parallel.
//!
//! `[sweep]` names keys by dotted paths, including into arrays (`application.0.request_bytes`, `application.*.op`,
//! `io_nodes.policy.window_us`), each with a list of values or `{ from, to, steps, scale }`. All combinations are run,
//! the last key varying fastest; with `zip = true` values at the same position are combined.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use impresario_toml::{KeyPath, shown, value_at_mut};
use toml::{Table, Value};

/// Maximum runs of a study: points times repetitions.
pub const RUNS_MAX: usize = 100_000;

/// Maximum steps of one `{ from, to, steps }`.
const STEPS_MAX: i64 = 10_000;

/// A key and its values.
#[derive(Clone, PartialEq, Debug)]
pub struct Axis {
    /// Dotted path.
    pub key: String,
    /// In the order of the runs; never empty.
    pub values: Vec<Value>,
    /// Where it was written.
    pub(crate) origin: Origin,
}

/// Where an axis was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// In the file, at this byte.
    File(Option<usize>),
    /// On the command line.
    CommandLine,
}

/// An entry of a sweep section: its path, and its values or the error.
pub(crate) type Entry = (Vec<String>, Result<Vec<Value>, String>);

/// The entries of a `[sweep]` section, whose keys may be nested tables or dotted text.
pub(crate) fn entries(section: &Table) -> Vec<Entry> {
    let mut found = Vec::new();
    walk(section, &mut Vec::new(), &mut found);
    found
}

fn walk(table: &Table, path: &mut Vec<String>, found: &mut Vec<Entry>) {
    for (key, value) in table {
        path.push(key.clone());
        match value {
            Value::Array(values) if values.is_empty() => found.push((path.clone(), Err("there is no value".into()))),
            Value::Array(values) => found.push((path.clone(), Ok(values.clone()))),
            Value::Table(range) if range.contains_key("from") || range.contains_key("to") => {
                found.push((path.clone(), spread(range)));
            }
            Value::Table(inner) => walk(inner, path, found),
            other => {
                let form = "a list of values, or { from = 1, to = 64, steps = 7, scale = \"log\" }";
                found.push((path.clone(), Err(format!("must be {form}, not {}", shown(other)))));
            }
        }
        path.pop();
    }
}

/// The values of `{ from, to, steps, scale }`: whole numbers if both ends are.
fn spread(range: &Table) -> Result<Vec<Value>, String> {
    for key in range.keys() {
        if !["from", "to", "steps", "scale"].contains(&key.as_str()) {
            return Err(format!("unknown key {key}; known are from, to, steps, scale"));
        }
    }
    let number = |key: &str| match range.get(key) {
        Some(Value::Integer(n)) => Ok((*n as f64, true)),
        Some(Value::Float(x)) if x.is_finite() => Ok((*x, false)),
        Some(other) => Err(format!("{key} must be a number, not {}", shown(other))),
        None => Err(format!("{key} is missing: write {{ from = 1, to = 64, steps = 7 }}")),
    };
    let ((from, from_whole), (to, to_whole)) = (number("from")?, number("to")?);
    let steps = match range.get("steps") {
        Some(Value::Integer(n)) if (2..=STEPS_MAX).contains(n) => *n,
        Some(other) => return Err(format!("steps must be a whole number from 2 to {STEPS_MAX}, not {}", shown(other))),
        None => return Err("steps is missing: how many values there are, both ends included".into()),
    };
    let log = match range.get("scale").map(|s| s.as_str().unwrap_or("?")) {
        None | Some("linear") => false,
        Some("log") if from > 0.0 && to > 0.0 => true,
        Some("log") => return Err("scale = \"log\" needs from and to above 0".into()),
        Some(_) => return Err("scale must be \"linear\" or \"log\"".into()),
    };
    let mut values: Vec<Value> = (0..steps)
        .map(|i| {
            let part = i as f64 / (steps - 1) as f64;
            let value = match (i, log) {
                // Exactly the given ends.
                (0, _) => from,
                (i, _) if i == steps - 1 => to,
                (_, false) => from + (to - from) * part,
                (_, true) => from * (to / from).powf(part),
            };
            if from_whole && to_whole { Value::Integer(value.round() as i64) } else { Value::Float(value) }
        })
        .collect();
    values.dedup();
    Ok(values)
}

/// The name of a path, which may have dotted keys.
pub(crate) fn key_of(path: &[String]) -> String {
    dotted(&KeyPath::of(&dotted(path)).0)
}

/// As the key of a sweep: `application.0.request_bytes`.
fn dotted(path: &[String]) -> String {
    path.join(".")
}

/// The index of each axis's value, for every point.
pub(crate) fn choices(axes: &[Axis], zip: bool, repetitions: u32) -> Result<Vec<Vec<usize>>, String> {
    let lens: Vec<usize> = axes.iter().map(|axis| axis.values.len()).collect();
    let count = if zip {
        if let Some(other) = axes.iter().find(|axis| axis.values.len() != lens[0]) {
            let (first, key, n) = (&axes[0].key, &other.key, other.values.len());
            return Err(format!("with zip = true all lists are of one length; {first} has {}, {key} has {n}", lens[0]));
        }
        lens.first().copied().unwrap_or(1)
    } else {
        lens.iter().try_fold(1usize, |n, len| n.checked_mul(*len)).unwrap_or(usize::MAX)
    };
    let runs = count.saturating_mul(repetitions as usize);
    if runs > RUNS_MAX {
        return Err(format!(
            "{count} points with {repetitions} repetitions are {runs} runs; at most {RUNS_MAX} are run"
        ));
    }
    let choose = |nth: usize| -> Vec<usize> {
        if zip {
            return vec![nth; lens.len()];
        }
        let mut rest = nth;
        let mut choice = vec![0; lens.len()];
        for (place, len) in choice.iter_mut().zip(&lens).rev() {
            *place = rest % len;
            rest /= len;
        }
        choice
    };
    Ok((0..count).map(choose).collect())
}

/// Sets a key of a scenario's values by its dotted path; `*` stands for all entries of an array. Creates missing
/// sections; unknown keys are reported when the scenario is read.
pub(crate) fn set(values: &mut Table, key: &str, value: &Value) -> Result<(), String> {
    let path = KeyPath::of(key).0;
    if path.is_empty() {
        return Err("the key is empty: write for example servers.in_flight".into());
    }
    if matches!(path[0].as_str(), "sweep" | "repetitions") {
        return Err(format!("{key} is not a key of a scenario; use --sweep or --repetitions"));
    }
    if let Some(star) = path.iter().position(|step| step == "*") {
        let around = &path[..star];
        let Some(Value::Array(array)) = value_at_mut(values, around) else {
            return Err(format!("{} is not a list, so that * means nothing", dotted(around)));
        };
        for i in 0..array.len() {
            let one = [&path[..star], &[i.to_string()], &path[star + 1..]].concat();
            set(values, &dotted(&one), value)?;
        }
        return Ok(());
    }
    let (last, around) = path.split_last().ok_or("the key is empty")?;
    let mut table = values;
    let mut i = 0;
    while i < around.len() {
        let step = &around[i];
        let entry = table.entry(step.clone()).or_insert_with(|| Value::Table(Table::new()));
        if let (Value::String(name), "policy") = (&mut *entry, step.as_str()) {
            let name = Value::String(std::mem::take(name));
            *entry = Value::Table(Table::from_iter([("name".to_string(), name)]));
        }
        let inner = match entry {
            Value::Array(array) => {
                let (len, at) = (array.len(), dotted(&around[..=i]));
                let Some(index) = around.get(i + 1) else { return Err(format!("{at} is a list; write {at}.0.{last}")) };
                i += 1;
                let found = index.parse::<usize>().ok().and_then(|index| array.get_mut(index));
                found.ok_or_else(|| format!("there is no {at}.{index}: there are {len}, counted from 0"))?
            }
            other => other,
        };
        table = match inner {
            Value::Table(inner) => inner,
            other => return Err(format!("{} is {}, not a section", dotted(&around[..=i]), shown(other))),
        };
        i += 1;
    }
    // A new policy does not keep the old one's parameters.
    table.insert(last.clone(), value.clone());
    Ok(())
}

/// A value from the command line: TOML, or text without quotes.
pub fn value(text: &str) -> Value {
    let text = text.trim();
    let parsed = format!("x = {text}\n").parse::<Table>().ok().filter(|table| table.len() == 1);
    parsed.and_then(|mut table| table.remove("x")).unwrap_or_else(|| Value::String(text.to_string()))
}

/// A list of values from the command line: separated by commas outside brackets and quotes, or `from..to/steps`, with
/// `log` appended for equal factors.
pub fn values(text: &str) -> Result<Vec<Value>, String> {
    if let Some((from, rest)) = text.split_once("..")
        && let Some((to, steps)) = rest.split_once('/')
    {
        let (steps, scale) = steps.strip_suffix("log").map_or((steps, "linear"), |steps| (steps, "log"));
        let range = [("from", value(from)), ("to", value(to)), ("steps", value(steps)), ("scale", value(scale))];
        return spread(&range.into_iter().map(|(k, v)| (k.to_string(), v)).collect());
    }
    let mut parts = vec![String::new()];
    let (mut depth, mut quote) = (0i32, None);
    for c in text.chars() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => quote = Some(c),
            ('[' | '{', None) => depth += 1,
            (']' | '}', None) => depth -= 1,
            (',', None) if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    if parts.iter().any(|part| part.trim().is_empty()) {
        return Err(format!("{text:?} has an empty value: write a,b,c or 1..64/7log"));
    }
    Ok(parts.iter().map(|part| value(part)).collect())
}

/// Does `count` pieces of work on the given number of threads and passes on the results in order. The results do not
/// depend on the number of threads. `work` returns `None` to stop: later pieces are not started or passed on.
pub fn side_by_side<T: Send>(
    count: usize,
    threads: usize,
    work: impl Fn(usize) -> Option<T> + Sync,
    mut each: impl FnMut(usize, T),
) {
    let next = AtomicUsize::new(0);
    // Results wait for earlier ones; bounded, so that one slow run does not fill the memory with results of others.
    let threads = threads.clamp(1, 1024).min(count.max(1));
    let (send, receive) = mpsc::sync_channel(threads * 2);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (send, next, work) = (send.clone(), &next, &work);
            scope.spawn(move || {
                loop {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    if nth >= count {
                        return;
                    }
                    let result = work(nth);
                    let stop = result.is_none();
                    if stop {
                        next.store(count, Ordering::Relaxed);
                    }
                    if send.send((nth, result)).is_err() || stop {
                        return;
                    }
                }
            });
        }
        drop(send);
        let mut early = std::collections::BTreeMap::new();
        let mut due = 0;
        for (nth, result) in receive {
            early.insert(nth, result);
            while let Some(result) = early.remove(&due) {
                if let Some(result) = result {
                    each(due, result);
                }
                due += 1;
            }
        }
        // Stopped: completed results count even if an earlier piece is missing.
        for (nth, result) in early {
            if let Some(result) = result {
                each(nth, result);
            }
        }
    });
}

/// The values of a point on one line.
pub fn label(keys: &[String], values: &[String]) -> String {
    let pairs = keys.iter().zip(values).map(|(key, value)| format!("{key}={value}"));
    pairs.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::file::text_of;

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    fn listed(text: &str) -> Vec<(String, Vec<String>)> {
        let section = table(text);
        let shown = |(path, values): Entry| (key_of(&path), values.unwrap().iter().map(text_of).collect());
        entries(&section).into_iter().map(shown).collect()
    }

    #[test]
    fn keys_may_be_dotted_quoted_or_nested() {
        let text = "servers.policy = [\"fifo\", { name = \"mlf\", quantum_us = 5 }]\n\
                    \"application.0.op\" = [\"read\"]\napplication.1.request_bytes = [1, 2]\n";
        let found = listed(text);
        let want = [
            ("application.1.request_bytes", vec!["1", "2"]),
            ("application.0.op", vec!["read"]),
            ("servers.policy", vec!["fifo", "mlf quantum_us=5"]),
        ];
        for (key, values) in want {
            assert!(found.iter().any(|(k, v)| k == key && *v == values), "{key}: {found:?}");
        }
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn ranges_are_spread_evenly_or_by_equal_factors() {
        let of = |text: &str| listed(&format!("x = {text}"))[0].1.join(" ");
        assert_eq!(of("{ from = 1, to = 9, steps = 5 }"), "1 3 5 7 9");
        assert_eq!(of("{ from = 1, to = 64, steps = 7, scale = \"log\" }"), "1 2 4 8 16 32 64");
        assert_eq!(of("{ from = 1, to = 3, steps = 9 }"), "1 2 3", "rounded values are run once");
        assert_eq!(of("{ from = 0.5, to = 1, steps = 2 }"), "0.5 1.0");
        let refused = |text: &str| entries(&table(&format!("x = {text}"))).remove(0).1.unwrap_err();
        assert!(refused("{ from = 0, to = 9, steps = 5, scale = \"log\" }").contains("above 0"));
        assert!(refused("{ from = 1, to = 9 }").contains("steps is missing"));
        assert!(refused("{ from = 1, to = 9, steps = 1 }").contains("from 2"));
        assert!(refused("{ from = 1, to = 9, step = 1 }").contains("unknown key step"));
        assert!(refused("{ from = 1, to = 9, steps = 2, scale = \"lin\" }").contains("linear"));
        assert!(refused("5").contains("must be a list"));
        assert!(refused("[]").contains("no value"));
    }

    #[test]
    fn all_combinations_or_side_by_side() {
        let axis = |key: &str, n: i64| Axis {
            key: key.into(),
            values: (0..n).map(Value::Integer).collect(),
            origin: Origin::CommandLine,
        };
        let axes = [axis("a", 2), axis("b", 3)];
        let all = choices(&axes, false, 1).unwrap();
        assert_eq!(all, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]);
        assert!(choices(&axes, true, 1).unwrap_err().contains("a has 2, b has 3"));
        assert_eq!(choices(&[axis("a", 2), axis("b", 2)], true, 1).unwrap(), [[0, 0], [1, 1]]);
        assert_eq!(choices(&[], false, 3).unwrap(), [[0usize; 0]]);
        assert_eq!(choices(&[], true, 3).unwrap(), [[0usize; 0]]);
        let many = [axis("a", 1000), axis("b", 1000)];
        assert!(choices(&many, false, 1).unwrap_err().contains("at most 100000"));
    }

    #[test]
    fn keys_are_set_anywhere() {
        let mut values = table("[servers]\npolicy = \"twins\"\n[[application]]\nop = \"read\"\n[[application]]\n");
        set(&mut values, "servers.policy.window_us", &Value::Integer(5)).unwrap();
        set(&mut values, "application.*.requests", &Value::Integer(7)).unwrap();
        set(&mut values, "application[1].op", &Value::String("write".into())).unwrap();
        set(&mut values, "io_nodes.count", &Value::Integer(2)).unwrap();
        let text = values.to_string();
        for wanted in ["name = \"twins\"", "window_us = 5", "op = \"write\"", "count = 2"] {
            assert_eq!(text.matches(wanted).count(), 1, "{wanted}: {text}");
        }
        assert_eq!(text.matches("requests = 7").count(), 2, "{text}");
        let refused = |key: &str| set(&mut values.clone(), key, &Value::Integer(1)).unwrap_err();
        assert!(refused("application.2.op").contains("there are 2"));
        assert!(refused("application.x.op").contains("no application.x"));
        assert!(refused("application.op").contains("application.0.op"));
        assert!(refused("servers.*.op").contains("not a list"));
        assert!(refused("").contains("empty"));
        assert!(refused("sweep.x").contains("--sweep"));
        assert!(refused("servers.policy.name.x").contains("not a section"));
    }

    #[test]
    fn values_of_the_command_line() {
        let shown = |text: &str| values(text).unwrap().iter().map(|v| v.to_string()).collect::<Vec<_>>();
        assert_eq!(shown("1, 2.5,true,fifo,\"a,b\""), ["1", "2.5", "true", "\"fifo\"", "\"a,b\""]);
        assert_eq!(shown("fifo,{ name = \"twins\", window_us = 5 }").len(), 2);
        assert_eq!(shown("1..16/5log"), ["1", "2", "4", "8", "16"]);
        assert!(values("1,,2").unwrap_err().contains("empty value"));
        // Text that would be several values in TOML stays text.
        assert_eq!(value("1\ny = 2"), Value::String("1\ny = 2".into()));
    }

    proptest! {
        #[test]
        fn results_do_not_depend_on_threads(count in 0usize..60, threads in 1usize..9, stop in 0usize..80) {
            let work = |i: usize| (i != stop).then_some(i * i);
            let mut seen = Vec::new();
            side_by_side(count, threads, work, |i, result| seen.push((i, result)));
            prop_assert!(seen.iter().all(|(i, result)| *result == i * i && *i != stop));
            prop_assert!(seen.is_sorted());
            let all: Vec<_> = (0..count.min(stop)).map(|i| (i, i * i)).collect();
            prop_assert_eq!(&seen[..all.len().min(seen.len())], &all[..all.len().min(seen.len())]);
            if stop >= count {
                prop_assert_eq!(seen.len(), count);
            }
        }
    }
}
