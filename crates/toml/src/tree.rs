//! The text of a TOML file as values, and the position of each in the text.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use crate::errors::{Complaint, FileErrors};
use crate::place::line_column;

/// The path of a key: names, and indices of arrays as numbers, for example `data`, `2`, `address`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct KeyPath(pub Vec<String>);

impl KeyPath {
    /// The path of a key in this table.
    pub fn key(&self, key: &str) -> KeyPath {
        KeyPath(self.0.iter().cloned().chain([key.to_string()]).collect())
    }

    /// The path of one table of an array.
    pub fn index(&self, index: usize) -> KeyPath {
        self.key(&index.to_string())
    }

    /// Reads `data.2.address` or `data[2].address`.
    pub fn of(text: &str) -> KeyPath {
        let text = text.replace('[', ".").replace(']', "");
        KeyPath(text.split('.').map(|step| step.trim().to_string()).filter(|step| !step.is_empty()).collect())
    }

    /// Whether one of the two lies within the other, or they are the same.
    pub fn touches(&self, other: &KeyPath) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a == b)
    }
}

/// As `data[2].address`.
impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match i {
                0 => f.write_str(step)?,
                _ if step.bytes().all(|b| b.is_ascii_digit()) => write!(f, "[{step}]")?,
                _ => write!(f, ".{step}")?,
            }
        }
        Ok(())
    }
}

/// The values of a text and their positions.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    /// The values.
    pub values: Table,
    text: String,
    /// Positions of keys, bytes from the start of the text.
    keys: BTreeMap<KeyPath, usize>,
    /// Positions of their values.
    places: BTreeMap<KeyPath, usize>,
    /// Numbers for which no value has room: their positions and what is to be said.
    too_large: Vec<(usize, String)>,
}

impl Tree {
    /// Reads the text of a file; the error is about its syntax.
    pub fn parse(text: &str, file: &Path) -> Result<Tree, FileErrors> {
        let wrong = |error: toml::de::Error| {
            let at = error.span().map(|span| line_column(text, span.start));
            let message = error.message().trim().replace('\n', "; ");
            FileErrors::new(file, vec![Complaint { at, message }])
        };
        let mut tree = Tree { text: text.into(), ..Tree::default() };
        tree.table(DeTable::parse(text).map_err(wrong)?.get_ref(), &KeyPath::default());
        // Before the values are read, which stops at the first and names no key.
        let mut too_large = std::mem::take(&mut tree.too_large);
        too_large.sort();
        if !too_large.is_empty() {
            let complaint = |(place, message)| tree.complaint(Some(place), message);
            return Err(FileErrors::new(file, too_large.into_iter().map(complaint).collect()));
        }
        tree.values = text.parse().map_err(wrong)?;
        Ok(tree)
    }

    /// A complaint about what is at this position of the text; `None`: about the whole of it.
    pub fn complaint(&self, place: Option<usize>, message: String) -> Complaint {
        Complaint { at: place.map(|place| line_column(&self.text, place)), message }
    }

    /// The position of a value, or of the closest one around it that is in the text.
    pub fn place(&self, path: &KeyPath) -> Option<usize> {
        (1..=path.0.len()).rev().find_map(|n| self.places.get(&KeyPath(path.0[..n].to_vec())).copied())
    }

    /// The position of a key, or of the closest value around it.
    pub fn key_place(&self, path: &KeyPath) -> Option<usize> {
        self.keys.get(path).copied().or_else(|| self.place(path))
    }

    fn table(&mut self, table: &DeTable<'_>, at: &KeyPath) {
        for (key, value) in table {
            let path = at.key(key.get_ref());
            self.keys.insert(path.clone(), key.span().start);
            self.value(value, path);
        }
    }

    /// Notes a number for which no value has room.
    fn too_large(&mut self, path: &KeyPath, number: &dyn fmt::Display, place: usize, range: &str) {
        let key =
            path.0.iter().rfind(|step| !step.bytes().all(|byte| byte.is_ascii_digit())).map_or("", String::as_str);
        let mut number = number.to_string();
        if let Some((end, _)) = number.char_indices().nth(TEXT_MAX) {
            number.truncate(end);
            number.push('…');
        }
        self.too_large.push((place, format!("{key} is {number}; a number must be between {range}")));
    }

    fn value(&mut self, value: &Spanned<DeValue<'_>>, path: KeyPath) {
        match value.get_ref() {
            DeValue::Table(table) => self.table(table, &path),
            DeValue::Array(array) => (0..).zip(array.iter()).for_each(|(i, value)| self.value(value, path.index(i))),
            DeValue::Integer(number) if i64::from_str_radix(number.as_str(), number.radix()).is_err() => {
                self.too_large(&path, number, value.span().start, &format!("{} and {}", i64::MIN, i64::MAX));
            }
            DeValue::Float(number) if is_beyond(number.as_str()) => {
                self.too_large(&path, number, value.span().start, &format!("{:.1e} and {:.1e}", f64::MIN, f64::MAX));
            }
            _ => {}
        }
        self.places.insert(path, value.span().start);
    }
}

/// Whether a number with a fraction or an exponent is read as infinite, and says another.
fn is_beyond(written: &str) -> bool {
    written.parse::<f64>().is_ok_and(f64::is_infinite) && !written.contains("inf")
}

/// The value at a path.
pub fn value_at<'a>(values: &'a Table, path: &[String]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let step = |value: &'a Value, step: &String| match value {
        Value::Table(table) => table.get(step),
        Value::Array(array) => array.get(step.parse::<usize>().ok()?),
        _ => None,
    };
    rest.iter().try_fold(values.get(first)?, step)
}

/// The value at a path, to change.
pub fn value_at_mut<'a>(values: &'a mut Table, path: &[String]) -> Option<&'a mut Value> {
    let (first, rest) = path.split_first()?;
    let step = |value: &'a mut Value, step: &String| match value {
        Value::Table(table) => table.get_mut(step),
        Value::Array(array) => array.get_mut(step.parse::<usize>().ok()?),
        _ => None,
    };
    rest.iter().try_fold(values.get_mut(first)?, step)
}

/// Characters of a value that messages show at most.
const TEXT_MAX: usize = 60;

/// A value as it would be written. A long text is not repeated: messages are lines, and it may be a secret.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Table(_) => "a section".into(),
        Value::Array(_) => "a list".into(),
        Value::String(text) if text.chars().count() > TEXT_MAX => format!("a text of {} bytes", text.len()),
        value => value.to_string(),
    }
}
