//! From a table of values to a structure: every unknown key, wrong type and missing key, each in one sentence.
//!
//! The structures tell `serde` which keys exist and what they accept, but it stops at the first mistake. Each mistake
//! is therefore removed from the table, or filled in if a key is missing, and the rest read again.

use std::path::Path;

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::errors::FileErrors;
use crate::nearest::nearest;
use crate::tree::{KeyPath, Tree, shown, value_at, value_at_mut};

/// More mistakes than this are not reported at once.
const MISTAKES_MAX: usize = 100;

/// One mistake.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mistake {
    /// The key.
    pub path: KeyPath,
    /// The key itself is wrong, not its value.
    pub unknown: bool,
    /// The mistake and its remedy.
    pub message: String,
}

impl Mistake {
    /// Its position in the text, bytes.
    pub fn place(&self, tree: &Tree) -> usize {
        if self.unknown { tree.key_place(&self.path) } else { tree.place(&self.path) }.unwrap_or(0)
    }
}

/// The mistakes of a file so far.
#[derive(Default, Debug)]
pub struct Mistakes(pub Vec<Mistake>);

impl Mistakes {
    /// Adds a bad value, unless a mistake there, around it or inside it is known: each key is judged once, and the
    /// consequence of a value that was taken out is not a second mistake.
    pub fn add(&mut self, path: KeyPath, message: String) {
        if !self.0.iter().any(|known| known.path.touches(&path)) {
            self.0.push(Mistake { path, unknown: false, message });
        }
    }

    /// What was read of a file, or its mistakes in the order of the text.
    pub fn settle<T>(self, read: Option<T>, file: &Path, tree: &Tree) -> Result<T, FileErrors> {
        match read {
            Some(read) if self.0.is_empty() => Ok(read),
            _ => {
                let mut placed: Vec<_> = self.0.into_iter().map(|m| (m.place(tree), m.message)).collect();
                placed.sort_by_key(|(place, _)| *place);
                let complaints = placed.into_iter().map(|(place, message)| tree.complaint(Some(place), message));
                Err(FileErrors::new(file, complaints.collect()))
            }
        }
    }
}

/// For a key without default: an example as it would be written, and the value with which reading continues.
pub type Missing = fn(&KeyPath) -> Option<(&'static str, Value)>;

/// Reads the values of the section `at` into a structure. `None` if they cannot be read even without their mistakes.
pub fn read<T: DeserializeOwned>(
    mut values: Table,
    at: &KeyPath,
    missing: Missing,
    mistakes: &mut Mistakes,
) -> Option<T> {
    for _ in 0..MISTAKES_MAX {
        let error = match serde_path_to_error::deserialize::<_, T>(Value::Table(values.clone())) {
            Ok(read) => return Some(read),
            Err(error) => error,
        };
        let mut path: Vec<String> = error.path().iter().filter_map(step).collect();
        let message = error.inner().message().trim().replace('\n', "; ");
        if let Some(key) = message.strip_prefix("missing field").map(|_| quoted(&message).concat()) {
            let section = KeyPath([&at.0[..], &path].concat());
            let substitute = missing(&section.key(&key));
            let example =
                substitute.as_ref().map_or(String::new(), |(text, _)| format!(", for example: {key} = {text}"));
            let said = match (section.0.is_empty(), &substitute) {
                (true, Some((_, Value::Table(_)))) => format!("there is no section [{key}]; add one"),
                (true, _) => format!("there is no {key}; add it{example}"),
                (false, _) => format!("{section} has no {key}; add it{example}"),
            };
            // A key that was taken out is not missing as well.
            mistakes.add(section.key(&key), said);
            let table = if path.is_empty() { Some(&mut values) } else { table_at_mut(&mut values, &path) };
            match (table, substitute) {
                (Some(table), Some((_, value))) => drop(table.insert(key, value)),
                _ => return None,
            }
            continue;
        }
        let (sentence, unknown) = sentence(&mut path, at, &message, &values);
        let full = KeyPath([&at.0[..], &path].concat());
        mistakes.0.push(Mistake { path: full, unknown, message: sentence });
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

fn table_at_mut<'a>(values: &'a mut Table, path: &[String]) -> Option<&'a mut Table> {
    match path {
        [] => Some(values),
        path => value_at_mut(values, path).and_then(Value::as_table_mut),
    }
}

/// Removes the value, or the nearest around it that a table holds: elements of an array must keep their indices.
fn take_out(values: &mut Table, path: &[String]) -> bool {
    (1..=path.len())
        .rev()
        .any(|n| table_at_mut(values, &path[..n - 1]).and_then(|table| table.remove(&path[n - 1])).is_some())
}

/// The message of `serde` in words for the author of the file. The path grows by the key where only the message names it.
fn sentence(path: &mut Vec<String>, at: &KeyPath, message: &str, values: &Table) -> (String, bool) {
    let words = quoted(message);
    let (name, known) = (words.first().map_or("", String::as_str), words.get(1..).unwrap_or_default());
    let near = nearest(name, known.iter().map(String::as_str)).map(|near| format!("did you mean {near}?"));
    if message.starts_with("unknown field") {
        if path.last().is_none_or(|last| last != name) {
            path.push(name.to_string());
        }
        let section = KeyPath([&at.0[..], &path[..path.len() - 1]].concat());
        let (what, inside) = match value_at(values, path) {
            Some(Value::Table(_) | Value::Array(_)) if section.0.is_empty() => ("section", String::new()),
            _ if section.0.is_empty() => ("key", String::new()),
            _ => ("key", format!(" in {section}")),
        };
        let remedy = near.unwrap_or_else(|| format!("known are {}", known.join(", ")));
        return (format!("unknown {what} {name}{inside}; {remedy}"), true);
    }
    let key = path.iter().rev().find(|step| step.parse::<usize>().is_err()).map_or("", String::as_str);
    let given = value_at(values, path).map_or_else(|| "nothing".to_string(), shown);
    if message.starts_with("unknown variant") {
        let one_of = known.iter().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
        let near = near.map_or(String::new(), |near| format!("; {near}"));
        return (format!("{key} is {name:?}; it must be one of {one_of}{near}"), false);
    }
    let expected = message.rsplit_once("expected ").map_or("", |(_, expected)| expected);
    let unit = unit(key);
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
        "a string" | "string" | "path string" => "text in quotes".into(),
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
        ("_requests", " of requests"),
        ("_us", " of microseconds"),
        ("_ms", " of milliseconds"),
        ("_s", " of seconds"),
    ];
    units.iter().find(|(end, _)| key.ends_with(end)).map_or("", |(_, unit)| unit)
}
