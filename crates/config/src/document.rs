//! The text of a TOML file as values, and the position of each in the text.

use std::collections::BTreeMap;
use std::fmt;

use impresario_base::place::line_column;
use toml::{Table, Value};
use toml_edit::{Document, Item, TableLike};

use crate::load::Complaint;

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

/// The values of a file and their positions.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    /// The values.
    pub values: Table,
    /// Positions of keys, bytes from the start of the text.
    keys: BTreeMap<KeyPath, usize>,
    /// Positions of their values.
    places: BTreeMap<KeyPath, usize>,
}

impl Tree {
    /// Reads a text; the complaint is about its syntax.
    pub fn parse(text: &str) -> Result<Tree, Complaint> {
        let document = Document::parse(text).map_err(|e| Complaint {
            at: e.span().map(|s| line_column(text, s.start)),
            message: e.message().trim().replace('\n', "; "),
        })?;
        let mut tree = Tree::default();
        tree.values = tree.table(document.as_table(), &KeyPath::default());
        Ok(tree)
    }

    /// The position of a value, or of the closest one around it that is in the text.
    pub fn place(&self, path: &KeyPath) -> Option<usize> {
        (1..=path.0.len()).rev().find_map(|n| self.places.get(&KeyPath(path.0[..n].to_vec())).copied())
    }

    /// The position of a key, or of the closest value around it.
    pub fn key_place(&self, path: &KeyPath) -> Option<usize> {
        self.keys.get(path).copied().or_else(|| self.place(path))
    }

    fn table(&mut self, table: &dyn TableLike, at: &KeyPath) -> Table {
        let mut values = Table::new();
        for (key, item) in table.iter() {
            let path = at.key(key);
            let key_span = table.get_key_value(key).and_then(|(key, _)| key.span());
            let place = item.span().or(key_span.clone()).map(|span| span.start);
            if let Some(start) = key_span.map(|span| span.start).or(place) {
                self.keys.insert(path.clone(), start);
            }
            if let Some(place) = place {
                self.places.insert(path.clone(), place);
            }
            if let Some(value) = self.item(item, &path) {
                values.insert(key.to_string(), value);
            }
        }
        values
    }

    fn item(&mut self, item: &Item, path: &KeyPath) -> Option<Value> {
        match item {
            Item::None => None,
            Item::Value(value) => Some(self.value(value, path)),
            Item::Table(table) => Some(Value::Table(self.table(table, path))),
            Item::ArrayOfTables(array) => {
                let tables = array.iter().enumerate().map(|(i, table)| {
                    let path = self.element(path, i, table.span());
                    Value::Table(self.table(table, &path))
                });
                Some(Value::Array(tables.collect()))
            }
        }
    }

    fn value(&mut self, value: &toml_edit::Value, path: &KeyPath) -> Value {
        match value {
            toml_edit::Value::String(text) => Value::String(text.value().clone()),
            toml_edit::Value::Integer(number) => Value::Integer(*number.value()),
            toml_edit::Value::Float(number) => Value::Float(*number.value()),
            toml_edit::Value::Boolean(flag) => Value::Boolean(*flag.value()),
            // No key takes a date; the complaint about its type shows this text.
            toml_edit::Value::Datetime(date) => Value::String(date.value().to_string()),
            toml_edit::Value::Array(array) => {
                let values = array.iter().enumerate().map(|(i, value)| {
                    let path = self.element(path, i, value.span());
                    self.value(value, &path)
                });
                Value::Array(values.collect())
            }
            toml_edit::Value::InlineTable(table) => Value::Table(self.table(table, path)),
        }
    }

    /// The path of an element of an array; records its position.
    fn element(&mut self, array: &KeyPath, index: usize, span: Option<std::ops::Range<usize>>) -> KeyPath {
        let path = array.index(index);
        if let Some(span) = span {
            self.places.insert(path.clone(), span.start);
        }
        path
    }
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

/// A value as it would be written, in short.
pub fn shown(value: &Value) -> String {
    let text = match value {
        Value::Table(_) => return "a section".into(),
        Value::Array(_) => return "a list".into(),
        value => value.to_string(),
    };
    if text.chars().count() > 60 { text.chars().take(57).chain("…".chars()).collect() } else { text }
}
