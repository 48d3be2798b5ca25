//! Reads a scenario file: TOML text becomes the runs that it describes, or one error that lists every mistake with its
//! line, key, allowed values and likely intention.
//!
//! Besides a [`Scenario`] a file may have `repetitions` and `[sweep]` (see [`crate::sweep`]); the command line may set
//! keys and add sweeps. A section `[metadata]` is for other programs and is ignored. Nothing is read from disk here:
//! the caller passes in the text and the traces that it names.

mod judge;
#[cfg(test)]
mod tests;

use std::path::Path;

use impresario_toml::{FileErrors, KeyPath, Mistake, Tree, shown};
use toml::{Table, Value};

use crate::model::{Scenario, TracedAccess};
use crate::sweep::{self, Axis, Origin};
use judge::Traces;

/// Every key with its unit and default: what `impresario sim template` prints.
pub const TEMPLATE: &str = include_str!("file/template.toml");

/// Maximum repetitions of a point.
pub const REPETITIONS_MAX: u32 = 10_000;

/// Settings from the command line.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Overrides {
    /// Keys and their values, in this order. A sweep of the file over one of them, or over what it is a part of, is dropped.
    pub set: Vec<(String, Value)>,
    /// Keys and their lists of values; each replaces a sweep of the file over the same key.
    pub sweep: Vec<(String, Vec<Value>)>,
    /// Replaces the file's value (1 to [`REPETITIONS_MAX`]).
    pub repetitions: Option<u32>,
    /// Replaces the file's value, or a sweep over it.
    pub seed: Option<u64>,
}

/// One point of a sweep.
#[derive(Clone, PartialEq, Debug)]
pub struct Point {
    /// The values of the swept keys, as text, in the order of [`Study::keys`].
    pub values: Vec<String>,
    /// The scenario, without its traces.
    scenario: Scenario,
}

/// The points that a file describes, and how often each is run.
#[derive(Clone, PartialEq, Debug)]
pub struct Study {
    /// The swept keys.
    pub keys: Vec<String>,
    /// All points; one without a sweep.
    pub points: Vec<Point>,
    /// Runs of each point, with consecutive seeds.
    pub repetitions: u32,
    traces: Traces,
}

/// Looks up the accesses of a trace file by the name in the scenario; the error is one line.
pub type FindTrace<'a> = dyn FnMut(&str) -> Result<Vec<TracedAccess>, String> + 'a;

impl Study {
    /// Reads the text of a file named `file`.
    pub fn read(
        text: &str,
        file: &Path,
        overrides: &Overrides,
        trace: &mut FindTrace<'_>,
    ) -> Result<Study, FileErrors> {
        let tree = Tree::parse(text, file)?;
        let mut reading = Reading { tree: &tree, found: Vec::new() };
        let study = reading.study(overrides, trace);
        let mut found = reading.found;
        match study {
            Some(study) if found.is_empty() => Ok(study),
            _ => {
                // Errors on the command line come last.
                found.sort_by_key(|(place, _)| place.unwrap_or(usize::MAX));
                let complaints = found.into_iter().map(|(place, message)| tree.complaint(place, message));
                Err(FileErrors::new(file, complaints.collect()))
            }
        }
    }

    /// The number of runs: points times repetitions.
    pub fn runs(&self) -> usize {
        self.points.len() * self.repetitions as usize
    }

    /// The scenario of one run, with its traces and its seed.
    ///
    /// # Panics
    /// If there is no such point.
    pub fn scenario(&self, point: usize, repetition: u32) -> Scenario {
        let mut scenario = self.points[point].scenario.clone();
        // Seeds in files are TOML integers, below 2^63.
        scenario.seed = scenario.seed.wrapping_add(u64::from(repetition)) & (u64::MAX >> 1);
        judge::fill(&mut scenario, &self.traces);
        scenario
    }

    /// The scenario of the first point without traces: for its title and assumptions.
    pub fn first(&self) -> &Scenario {
        &self.points[0].scenario
    }
}

/// The state of reading: errors so far, with their positions in the text.
struct Reading<'a> {
    tree: &'a Tree,
    found: Vec<(Option<usize>, String)>,
}

impl Reading<'_> {
    fn study(&mut self, overrides: &Overrides, trace: &mut FindTrace<'_>) -> Option<Study> {
        let mut values = self.tree.values.clone();
        let repetitions = self.repetitions(values.remove("repetitions"), overrides);
        // For other programs, as in the files of `lab/papers`.
        values.remove("metadata");
        let swept = values.remove("sweep");
        let (mut axes, zip) = self.axes(swept);
        // What the command line sets is not what the file sweeps, nor a part of it.
        let mut fixed: Vec<KeyPath> = overrides.set.iter().map(|(key, _)| KeyPath::of(key)).collect();
        fixed.extend(overrides.seed.map(|_| KeyPath::of("seed")));
        axes.retain(|axis| !fixed.iter().any(|set| is_within(set, &KeyPath::of(&axis.key))));
        for (key, list) in &overrides.sweep {
            let key = KeyPath::of(key);
            axes.retain(|axis| KeyPath::of(&axis.key) != key);
            axes.push(Axis { key: sweep::key_of(&key.0), values: list.clone(), origin: Origin::CommandLine });
        }
        // Check the file on its own first: overrides must not hide its errors.
        let traces = self.traces(&values, overrides, &axes, trace);
        self.judged(&values, &traces, &[]);
        if !self.found.is_empty() {
            return None;
        }
        for (key, value) in &overrides.set {
            if let Err(why) = sweep::set(&mut values, key, value) {
                self.found.push((None, format!("--set {key}={}: {why}", text_of(value))));
            }
        }
        if let Some(seed) = overrides.seed {
            values.insert("seed".into(), Value::Integer((seed & (u64::MAX >> 1)) as i64));
        }
        let set: Vec<Applied> = overrides.set.iter().map(|(key, value)| Applied::by_hand(key, value)).collect();
        let choices = match sweep::choices(&axes, zip, repetitions) {
            Ok(choices) => choices,
            Err(why) => {
                let place = self.tree.key_place(&KeyPath::of("sweep"));
                self.found.push((place, why));
                return None;
            }
        };
        if !self.found.is_empty() {
            return None;
        }
        let mut points = Vec::with_capacity(choices.len());
        for choice in choices {
            points.push(self.point(&values, &axes, &choice, &set, &traces)?);
        }
        let keys = axes.into_iter().map(|axis| axis.key).collect();
        Some(Study { keys, points, repetitions, traces })
    }

    fn point(
        &mut self,
        values: &Table,
        axes: &[Axis],
        choice: &[usize],
        set: &[Applied],
        traces: &Traces,
    ) -> Option<Point> {
        let mut values = values.clone();
        let mut applied = set.to_vec();
        let mut texts = Vec::with_capacity(axes.len());
        for (axis, &i) in axes.iter().zip(choice) {
            let value = &axis.values[i];
            texts.push(text_of(value));
            let place = match axis.origin {
                Origin::File(place) => place,
                Origin::CommandLine => None,
            };
            let said = format!("{} = {} of the sweep", axis.key, text_of(value));
            if let Err(why) = sweep::set(&mut values, &axis.key, value) {
                self.found.push((place, format!("{said}: {why}")));
                return None;
            }
            applied.push(Applied { path: KeyPath::of(&axis.key), place, said });
        }
        let mut scenario = self.judged(&values, traces, &applied)?;
        scenario.application.iter_mut().for_each(|a| a.trace = Vec::new());
        Some(Point { values: texts, scenario })
    }

    /// The scenario of these values; errors point to where the value was written.
    fn judged(&mut self, values: &Table, traces: &Traces, applied: &[Applied]) -> Option<Scenario> {
        match judge::scenario(values, traces) {
            Ok(scenario) => Some(scenario),
            Err(wrong) => {
                for wrong in wrong {
                    let found = place_of(self.tree, wrong, applied);
                    // Do not also call a trace empty that could not be read.
                    if found.0.is_none() || self.found.iter().all(|(place, _)| *place != found.0) {
                        self.found.push(found);
                    }
                }
                None
            }
        }
    }

    fn repetitions(&mut self, given: Option<Value>, overrides: &Overrides) -> u32 {
        if let Some(n) = overrides.repetitions {
            if n == 0 || n > REPETITIONS_MAX {
                let message = format!("--repetitions is {n}; it must be between 1 and {REPETITIONS_MAX}");
                self.found.push((None, message));
            }
            return n;
        }
        let Some(value) = given else { return 1 };
        match value.as_integer().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=REPETITIONS_MAX).contains(n)) {
            Some(n) => n,
            None => {
                let range = format!("a whole number between 1 and {REPETITIONS_MAX}");
                let place = self.tree.place(&KeyPath::of("repetitions"));
                self.found.push((place, format!("repetitions must be {range}, not {}", shown(&value))));
                1
            }
        }
    }

    fn axes(&mut self, given: Option<Value>) -> (Vec<Axis>, bool) {
        let root = KeyPath::of("sweep");
        let Some(given) = given else { return (Vec::new(), false) };
        let Value::Table(mut table) = given else {
            self.found.push((self.tree.place(&root), "sweep must be a section [sweep]".into()));
            return (Vec::new(), false);
        };
        let zip = match table.remove("zip") {
            None => false,
            Some(Value::Boolean(zip)) => zip,
            Some(other) => {
                let place = self.tree.place(&root.key("zip"));
                self.found.push((place, format!("zip must be true or false, not {}", shown(&other))));
                false
            }
        };
        let mut axes = Vec::new();
        for (path, axis) in sweep::entries(&table) {
            let place = self.tree.key_place(&KeyPath([&root.0[..], &path].concat()));
            match axis {
                Ok(values) => axes.push(Axis { key: sweep::key_of(&path), values, origin: Origin::File(place) }),
                Err(why) => self.found.push((place, format!("{} of the sweep: {why}", sweep::key_of(&path)))),
            }
        }
        // In the order of the text: the last one varies fastest.
        axes.sort_by_key(|axis| match axis.origin {
            Origin::File(place) => place,
            Origin::CommandLine => None,
        });
        (axes, zip)
    }

    /// Reads the traces named by any application, including by `--set` or a sweep; a trace that cannot be read is an
    /// error of its key.
    fn traces(&mut self, values: &Table, overrides: &Overrides, axes: &[Axis], find: &mut FindTrace<'_>) -> Traces {
        let mut traces = Traces::new();
        let applications = values.get("application").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let in_file = applications.iter().enumerate().filter_map(|(i, application)| {
            let file = application.get("trace_file")?.as_str()?;
            Some((self.tree.place(&KeyPath::of("application").index(i).key("trace_file")), file))
        });
        let beside = overrides.set.iter().filter(|(key, _)| key.ends_with("trace_file"));
        let beside = beside.filter_map(|(_, value)| Some((None, value.as_str()?)));
        let swept = axes.iter().filter(|axis| axis.key.ends_with("trace_file")).flat_map(|axis| &axis.values);
        let swept = swept.filter_map(|value| Some((None, value.as_str()?)));
        let mut wrong = Vec::new();
        for (place, file) in in_file.chain(beside).chain(swept) {
            if traces.contains_key(file) {
                continue;
            }
            match find(file) {
                Ok(trace) => drop(traces.insert(file.to_string(), trace)),
                Err(why) => wrong.push((place, format!("trace_file: {why}"))),
            }
        }
        self.found.extend(wrong);
        traces
    }
}

/// A value set over those of the file.
#[derive(Clone)]
struct Applied {
    path: KeyPath,
    place: Option<usize>,
    said: String,
}

impl Applied {
    fn by_hand(key: &str, value: &Value) -> Applied {
        Applied { path: KeyPath::of(key), place: None, said: format!("--set {key}={}", text_of(value)) }
    }
}

/// Whether a key is another one or lies within it; `*` stands for each entry of an array.
fn is_within(key: &KeyPath, around: &KeyPath) -> bool {
    let same = |(a, b): (&String, &String)| a == b || a == "*" || b == "*";
    key.0.len() >= around.0.len() && key.0.iter().zip(&around.0).all(same)
}

/// Where an error was written, and its sentence.
fn place_of(tree: &Tree, wrong: Mistake, applied: &[Applied]) -> (Option<usize>, String) {
    let touches = |a: &&Applied| {
        let same = |(a, b): (&String, &String)| a == b || a == "*";
        a.path.0.iter().zip(&wrong.path.0).all(same)
    };
    if let Some(applied) = applied.iter().rev().find(touches) {
        return (applied.place, format!("{}: {}", applied.said, wrong.message));
    }
    (Some(wrong.place(tree)), wrong.message)
}

/// The scenario of these values, or what is wrong with them.
pub(crate) fn scenario_of(values: &Table) -> Result<Scenario, String> {
    judge::scenario(values, &Traces::new()).map_err(|wrong| wrong.into_iter().map(|w| w.message).collect())
}

/// A value for people: text without its quotes, a policy as `twins window_us=1000`.
pub(crate) fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Table(table) => {
            let name = table.get("name").map(text_of);
            let rest = table.iter().filter(|(key, _)| *key != "name").map(|(k, v)| format!("{k}={}", text_of(v)));
            name.into_iter().chain(rest).collect::<Vec<_>>().join(" ")
        }
        Value::Array(array) => array.iter().map(text_of).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}
