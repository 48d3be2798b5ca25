//! The text of a scenario file as a tree of values, and where each of them stands in the text.

use std::collections::BTreeMap;

use impresario_config::{Complaint, line_column};
use toml::{Table, Value};
use toml_edit::{Document, Item, TableLike};

/// The way to a value: keys, and places in arrays as numbers.
pub(crate) type Path = Vec<String>;

/// The values of a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    /// The values.
    pub(crate) values: Table,
    /// Where keys stand, bytes from the start of the text.
    keys: BTreeMap<Path, usize>,
    /// Where their values stand.
    places: BTreeMap<Path, usize>,
}

impl Tree {
    /// Reads a text; the complaint is about its syntax.
    pub(crate) fn parse(text: &str) -> Result<Tree, Complaint> {
        let document = Document::parse(text).map_err(|e| Complaint {
            at: e.span().map(|s| line_column(text, s.start)),
            message: e.message().trim().replace('\n', "; "),
        })?;
        let mut tree = Tree::default();
        tree.values = tree.table(document.as_table(), &mut Vec::new());
        Ok(tree)
    }

    /// Where a value stands, or the nearest around it that is in the text.
    pub(crate) fn place(&self, path: &[String]) -> Option<usize> {
        (1..=path.len()).rev().find_map(|n| self.places.get(&path[..n]).copied())
    }

    /// Where a key stands.
    pub(crate) fn key_place(&self, path: &[String]) -> Option<usize> {
        self.keys.get(path).copied().or_else(|| self.place(path))
    }

    fn table(&mut self, table: &dyn TableLike, path: &mut Path) -> Table {
        let mut values = Table::new();
        for (key, item) in table.iter() {
            path.push(key.to_string());
            let key_span = table.get_key_value(key).and_then(|(key, _)| key.span());
            let place = item.span().or(key_span.clone()).map(|span| span.start);
            if let Some(start) = key_span.map(|span| span.start).or(place) {
                self.keys.insert(path.clone(), start);
            }
            if let Some(place) = place {
                self.places.insert(path.clone(), place);
            }
            if let Some(value) = self.item(item, path) {
                values.insert(key.to_string(), value);
            }
            path.pop();
        }
        values
    }

    fn item(&mut self, item: &Item, path: &mut Path) -> Option<Value> {
        match item {
            Item::None => None,
            Item::Value(value) => Some(self.value(value, path)),
            Item::Table(table) => Some(Value::Table(self.table(table, path))),
            Item::ArrayOfTables(array) => {
                let tables = array.iter().enumerate().map(|(i, table)| {
                    let place = table.span().map(|span| span.start);
                    self.within(i, place, path, |tree, path| Value::Table(tree.table(table, path)))
                });
                Some(Value::Array(tables.collect()))
            }
        }
    }

    fn value(&mut self, value: &toml_edit::Value, path: &mut Path) -> Value {
        match value {
            toml_edit::Value::String(text) => Value::String(text.value().clone()),
            toml_edit::Value::Integer(number) => Value::Integer(*number.value()),
            toml_edit::Value::Float(number) => Value::Float(*number.value()),
            toml_edit::Value::Boolean(flag) => Value::Boolean(*flag.value()),
            // No key takes a date: whoever judges the type says what belongs there.
            toml_edit::Value::Datetime(date) => Value::String(date.value().to_string()),
            toml_edit::Value::Array(array) => {
                let values = array.iter().enumerate().map(|(i, value)| {
                    let place = value.span().map(|span| span.start);
                    self.within(i, place, path, |tree, path| tree.value(value, path))
                });
                Value::Array(values.collect())
            }
            toml_edit::Value::InlineTable(table) => Value::Table(self.table(table, path)),
        }
    }

    fn within(
        &mut self,
        index: usize,
        place: Option<usize>,
        path: &mut Path,
        read: impl FnOnce(&mut Tree, &mut Path) -> Value,
    ) -> Value {
        path.push(index.to_string());
        if let Some(place) = place {
            self.places.insert(path.clone(), place);
        }
        let value = read(self, path);
        path.pop();
        value
    }
}

/// Text for people and for keys of sweeps: `application.0.request_bytes`.
pub(crate) fn dotted(path: &[String]) -> String {
    path.join(".")
}

/// The steps of a dotted text; `application[0]` is welcome too.
pub(crate) fn steps(text: &str) -> Path {
    let text = text.replace('[', ".").replace(']', "");
    text.split('.').map(|step| step.trim().to_string()).filter(|step| !step.is_empty()).collect()
}
