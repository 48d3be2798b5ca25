//! How one table of the file is read: typed keys, their places, and what was not asked for is unknown.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use impresario_sched::PolicySpec;
use toml_edit::{Item, TableLike, Value};

use crate::check::KeyPath;
use crate::nearest;

/// Walks the document; remembers where every key stands and what was wrong on the way.
#[derive(Default)]
pub(crate) struct Reader {
    /// Byte of the text, and what is wrong there.
    pub(crate) found: Vec<(usize, String)>,
    /// Keys complained about already: what a placeholder in their stead may break is no second mistake.
    pub(crate) blamed: BTreeSet<KeyPath>,
    /// Where the value of a key, or the header of a section, stands.
    pub(crate) places: BTreeMap<KeyPath, usize>,
}

impl Reader {
    /// Where `path` stands, or the nearest section around it that is in the file.
    pub(crate) fn place_of(&self, path: &KeyPath) -> usize {
        let prefixes = (0..=path.0.len()).rev().map(|n| KeyPath(path.0[..n].to_vec()));
        prefixes.filter_map(|prefix| self.places.get(&prefix).copied()).next().unwrap_or(0)
    }

    fn blame(&mut self, path: KeyPath, message: String) {
        self.found.push((self.place_of(&path), message));
        self.blamed.insert(path);
    }
}

/// A table and where it stands in the text.
type Placed<'a> = (&'a dyn TableLike, Option<Range<usize>>);

/// One table being read: keys that nobody asked for are unknown.
pub(crate) struct Section<'a, 'r> {
    reader: &'r mut Reader,
    table: Option<&'a dyn TableLike>,
    path: KeyPath,
    pub(crate) known: Vec<&'static str>,
}

impl<'a, 'r> Section<'a, 'r> {
    pub(crate) fn new(reader: &'r mut Reader, table: Option<&'a dyn TableLike>, path: KeyPath) -> Self {
        Section { reader, table, path, known: Vec::new() }
    }

    /// The value of a key, if the file has it; its place is remembered.
    fn item(&mut self, key: &'static str) -> Option<&'a Item> {
        self.known.push(key);
        let item = self.table?.get(key)?;
        let place = item.span().map_or_else(|| self.reader.place_of(&self.path), |span| span.start);
        self.reader.places.insert(self.path.key(key), place);
        Some(item)
    }

    fn wrong(&mut self, key: &str, message: String) {
        self.reader.blame(self.path.key(key), message);
    }

    pub(crate) fn text(&mut self, key: &'static str) -> Option<String> {
        let item = self.item(key)?;
        let text = item.as_str().map(str::to_string);
        if text.is_none() {
            self.wrong(key, format!("{key} must be text in quotes, not {}", item.type_name()));
        }
        text
    }

    /// A key that has no default; a placeholder stands for it once its absence is complained about.
    pub(crate) fn needed_text(&mut self, key: &'static str, example: &str) -> String {
        let there = self.table.is_some_and(|table| table.contains_key(key));
        let text = self.text(key);
        if !there {
            self.wrong(key, format!("{} has no {key}; add for example: {key} = {example}", self.path));
        }
        text.unwrap_or_default()
    }

    pub(crate) fn number<T: TryFrom<i64>>(&mut self, key: &'static str, unit: &str) -> Option<T> {
        let item = self.item(key)?;
        let number = item.as_integer().and_then(|n| T::try_from(n).ok());
        if number.is_none() {
            let given = match item {
                Item::Value(value) => value.clone().decorated("", "").to_string(),
                other => other.type_name().into(),
            };
            self.wrong(key, format!("{key} must be a whole number of {unit} without quotes or suffix, not {given}"));
        }
        number
    }

    pub(crate) fn flag(&mut self, key: &'static str) -> Option<bool> {
        let item = self.item(key)?;
        let flag = item.as_bool();
        if flag.is_none() {
            self.wrong(key, format!("{key} must be true or false, not {}", item.type_name()));
        }
        flag
    }

    /// `"mlf"` or `{ name = "twins", window_us = 1000 }`, also as a section of its own.
    pub(crate) fn policy(&mut self, key: &'static str) -> Option<PolicySpec> {
        let item = self.item(key)?;
        if let Some(name) = item.as_str() {
            return Some(PolicySpec::named(name));
        }
        let table = item.as_table_like();
        let Some((table, name)) = table.and_then(|table| Some((table, table.get("name")?.as_str()?))) else {
            self.wrong(
                key,
                format!("{key} must be a name such as \"mlf\", or {{ name = \"twins\", window_us = 1000 }}"),
            );
            return None;
        };
        let mut spec = PolicySpec::named(name);
        for (param, item) in table.iter().filter(|(param, _)| *param != "name") {
            let value = match item.as_value() {
                Some(Value::String(text)) => text.value().clone(),
                Some(Value::Integer(number)) => number.value().to_string(),
                Some(Value::Float(number)) => number.value().to_string(),
                Some(Value::Boolean(flag)) => if *flag.value() { "on" } else { "off" }.to_string(),
                _ => {
                    let kind = item.type_name();
                    self.wrong(
                        key,
                        format!("{param} of policy {name} must be a number, text, true or false, not {kind}"),
                    );
                    continue;
                }
            };
            spec.params.insert(param.to_string(), value);
        }
        Some(spec)
    }

    /// A section within this one.
    pub(crate) fn section<T>(&mut self, key: &'static str, needed: bool, read: fn(&mut Section<'a, '_>) -> T) -> T {
        let item = self.item(key);
        let table = item.and_then(Item::as_table_like);
        match item {
            None if needed => self.wrong(key, format!("there is no section [{key}]; add one")),
            Some(item) if table.is_none() => {
                self.wrong(key, format!("{key} must be a section [{key}], not {}", item.type_name()));
            }
            _ => {}
        }
        let path = self.path.key(key);
        let blame_inside = table.is_some() || !needed;
        self.read_table(table, path, blame_inside, read)
    }

    /// All sections `[[key]]`.
    pub(crate) fn sections<T>(
        &mut self,
        key: &'static str,
        needed: bool,
        read: fn(&mut Section<'a, '_>) -> T,
    ) -> Vec<T> {
        let item = self.item(key);
        let all: Option<Vec<Placed<'a>>> = match item {
            None => Some(Vec::new()),
            Some(Item::ArrayOfTables(array)) => Some(array.iter().map(|t| (t as &dyn TableLike, t.span())).collect()),
            Some(Item::Value(Value::Array(array))) => {
                let tables = array.iter().map(|v| v.as_inline_table().map(|t| (t as &dyn TableLike, t.span())));
                tables.collect()
            }
            Some(_) => None,
        };
        let path = self.path.key(key);
        match (item, &all) {
            (None, _) if needed => self.wrong(key, format!("there is no section [[{key}]]; add one for each server")),
            (Some(_), None) => {
                self.wrong(key, format!("{key} must be sections [[{key}]], with two brackets, one a server"))
            }
            _ => {}
        }
        let read_one = |(index, (table, span)): (usize, Placed<'a>)| {
            let path = path.index(index);
            if let Some(span) = span {
                self.reader.places.insert(path.clone(), span.start);
            }
            self.read_table(Some(table), path, true, read)
        };
        all.unwrap_or_default().into_iter().enumerate().map(read_one).collect()
    }

    fn read_table<T>(
        &mut self,
        table: Option<&'a dyn TableLike>,
        path: KeyPath,
        blame: bool,
        read: fn(&mut Section<'a, '_>) -> T,
    ) -> T {
        let found_before = self.reader.found.len();
        let mut section = Section::new(self.reader, table, path);
        let value = read(&mut section);
        section.finish();
        if !blame {
            // The section itself is missing: that is one complaint, not one for each of its keys.
            self.reader.found.truncate(found_before);
        }
        value
    }

    /// Complains about every key that was not asked for.
    pub(crate) fn finish(self) {
        let Some(table) = self.table else { return };
        for (name, item) in table.iter() {
            if self.known.contains(&name) {
                continue;
            }
            let place = table.get_key_value(name).and_then(|(key, item)| key.span().or(item.span()));
            let place = place.or(item.span()).map_or_else(|| self.reader.place_of(&self.path), |span| span.start);
            let (what, inside) = match self.path.0.is_empty() {
                true => ("section", String::new()),
                false => ("key", format!(" in {}", self.path)),
            };
            let remedy = match nearest(name, self.known.iter().copied()) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("known are {}", self.known.join(", ")),
            };
            self.reader.found.push((place, format!("unknown {what} {name}{inside}; {remedy}")));
        }
    }
}
