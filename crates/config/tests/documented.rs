//! doc/CONFIGURATION.md has every key with its default and range, and every example of a configuration is one.

use std::collections::BTreeSet;
use std::path::Path;

use impresario_config::{Config, Nfs};
use impresario_testing::documents;
use toml::{Table, Value};

/// A table of the document: its heading, the section of the file, and a file in which lines at the end belong to that section.
const SECTIONS: [(&str, &str, &str); 10] = [
    ("`[cluster]`", "cluster", "{servers}[cluster]"),
    ("`[tls]`", "tls", "{servers}[cluster]\nsecurity = \"tls\"\n[tls]"),
    ("`[meta]`", "meta", "{servers}{meta}"),
    ("`[[data]]`", "data", "{servers}[[data]]\nname = \"z\"\naddress = \"h:9\"\ndir = \"z\""),
    ("`[[io]]`", "io", "{servers}[[io]]\nname = \"z\"\naddress = \"h:9\""),
    ("`[allocation]`", "allocation", "{servers}[[io]]\nname = \"z\"\naddress = \"h:9\"\n[allocation]"),
    ("`[[export]]`", "export", "{servers}[cluster]\nsecurity = \"key\"\n[[export]]"),
    ("`[tree]`", "tree", "[[io]]\nname = \"z\"\naddress = \"h:9\"\n[tree]"),
    ("`[nfs]`", "nfs", "{servers}[nfs]"),
    ("`[device.NAME]`", "device.disk", "{servers}[device.disk]"),
];
const META: &str = "[meta]\naddress = \"h:1\"\ndir = \"m\"\n";
/// Sizes in the document.
const UNITS: [(&str, f64); 8] = [
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
    ("MB/s", 1e6),
    ("GB/s", 1e9),
    ("GB", 1e9),
    ("TB", 1e12),
];

/// A row of a table: its keys, default and range.
#[derive(Debug)]
struct Row {
    keys: Vec<String>,
    default: String,
    range: String,
}

/// The tables of the document below a heading: one, or two where lists of other sections are below.
fn tables(heading: &str) -> Vec<Vec<Row>> {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../doc/CONFIGURATION.md")).unwrap();
    let section = document.split("\n## ").find(|section| section.starts_with(heading)).expect(heading);
    let row = |head: &[String], cells: &Vec<String>| {
        let keys = documents::spans(&cells[0]).map(|key| key.rsplit('.').next().unwrap().to_string()).collect();
        let range = if head.len() == 4 { cells[2].clone() } else { String::new() };
        Row { keys, default: cells[1].clone(), range }
    };
    let tables = documents::tables(section, "key |");
    tables.iter().map(|table| table.rows.iter().map(|cells| row(&table.head, cells)).collect()).collect()
}

fn file(template: &str, more: &str) -> String {
    let data: String =
        (0..4).map(|i| format!("[[data]]\nname = \"d{i}\"\naddress = \"h:10{i}\"\ndir = \"d{i}\"\n")).collect();
    let meta = if template.ends_with("{meta}") { "" } else { META };
    // Of a section that is a list the last one is the one in question.
    let template = template.replace("{servers}", &format!("{meta}{data}")).replace("{meta}", META);
    format!("{template}\n{more}\n")
}

/// What is said of a file, without the places in it.
fn complaints(text: &str) -> Vec<String> {
    let errors = match Config::parse(text, Path::new("/c.toml")) {
        Ok(_) => return Vec::new(),
        Err(errors) => errors.to_string(),
    };
    errors.lines().map(|line| line.split_once(": ").unwrap().1.to_string()).collect()
}

/// A number or a size such as `128 MiB`, or the values of keys that limit others, at their defaults here.
fn number(text: &str) -> Option<f64> {
    let text = text.trim().trim_matches('`');
    let limits = [("max_payload_bytes", 4194304.0), ("data_servers", 1.0), ("the number of data servers", 4.0)];
    if let Some((_, value)) = limits.iter().find(|(name, _)| *name == text) {
        return Some(*value);
    }
    let unit = UNITS.iter().find(|(unit, _)| text.ends_with(&format!(" {unit}")));
    let digits = unit.map_or(text, |(unit, _)| text.trim_end_matches(unit).trim());
    Some(digits.parse::<f64>().ok()? * unit.map_or(1.0, |(_, factor)| *factor))
}

/// The value of a key that a file need not name: none where the absence is what the program goes by.
fn default_of(template: &str, section: &str, key: &str, is_export: bool) -> Option<Value> {
    let value = if section == "nfs" {
        let text = format!("[nfs]\n{}", if is_export { "[[nfs.export]]\nname = \"/d\"\ndir = \"d\"\n" } else { "" });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n.toml");
        std::fs::write(&path, text).unwrap();
        let nfs = Value::try_from(Nfs::load(&path).unwrap()).unwrap();
        if is_export { nfs["export"][0].clone() } else { nfs }
    } else {
        let more = if section == "tree" { "folder = \"/f\"" } else { "" };
        let config = Config::parse(&file(template, more), Path::new("/c.toml")).unwrap();
        let mut value = Value::try_from(config.with_defaults()).unwrap();
        for name in section.split('.') {
            value = value.get(name).cloned().unwrap_or_else(|| Value::Table(Table::new()));
            if let Some(last) = value.as_array().and_then(|list| list.last()) {
                value = last.clone();
            }
        }
        value
    };
    value.get(key).cloned()
}

#[test]
fn every_key_has_a_row_and_every_row_a_key() {
    let mut rows = 0;
    for (heading, section, template) in SECTIONS {
        let tables = tables(heading);
        // Keys of the lists below a section are in a table of their own, or have the list's name in front.
        let below = match section {
            "nfs" => Some("[[nfs.export]]\nname = \"/d\"\ndir = \"d\""),
            "allocation" => Some("[[allocation.rule]]\nnodes = []"),
            _ => None,
        };
        let mut known = BTreeSet::new();
        for more in std::iter::once("").chain(below) {
            let found = complaints(&file(template, &format!("{more}\nqzxjvk0qzxjvk = 1")));
            let list =
                found.iter().find_map(|line| line.split_once("known are ")).unwrap_or_else(|| panic!("{found:?}"));
            known.extend(list.1.split(", ").map(str::to_string));
        }
        let documented: Vec<String> = tables.iter().flatten().flat_map(|row| row.keys.clone()).collect();
        rows += documented.len();
        let documented: BTreeSet<String> = documented.into_iter().collect();
        // The lists have headings.
        let known: BTreeSet<String> =
            known.into_iter().filter(|key| !["export", "rule"].contains(&key.as_str())).collect();
        assert_eq!(documented, known, "{heading}");
    }
    assert!(rows > 100, "{rows}");
}

#[test]
fn every_default_is_the_one_in_the_table() {
    let mut checked = 0;
    for (heading, section, template) in SECTIONS {
        for (t, row) in tables(heading).iter().enumerate().flat_map(|(t, rows)| rows.iter().map(move |row| (t, row))) {
            for key in row.keys.iter().filter(|_| section != "allocation") {
                let told = row.default.trim_matches('`');
                let is_text = told.starts_with(['"', '[']);
                let real = default_of(template, section, key, t == 1);
                let fits = match &real {
                    // A server's state is shown where it is another one.
                    _ if told.starts_with("required") || key == "state" => true,
                    // What is not set is described in words, or by what another program goes by.
                    None => number(told).is_none() && !is_text || ["user", "object_bytes"].contains(&key.as_str()),
                    Some(Value::Integer(real)) => number(told) == Some(*real as f64) || told == "all",
                    Some(Value::Float(real)) => number(told) == Some(*real),
                    Some(Value::Boolean(real)) => told == real.to_string(),
                    // A path is relative to the file; a policy has a name.
                    Some(Value::String(real)) => {
                        is_text && (told.trim_matches('"') == real || *real == format!("/{}", told.trim_matches('"')))
                    }
                    Some(Value::Table(policy)) => told.trim_matches('"') == policy["name"].as_str().unwrap(),
                    Some(real) => told == real.to_string() || told == "this machine",
                };
                assert!(fits, "{heading}: {key} is {real:?} by default, not {told}");
                checked += usize::from(real.is_some());
            }
        }
    }
    assert!(checked > 80, "{checked}");
}

#[test]
fn every_range_is_the_one_in_the_table() {
    let (mut numbers, mut choices) = (0, 0);
    for (heading, section, template) in SECTIONS {
        let tables = tables(heading);
        for (t, row) in tables.iter().enumerate().flat_map(|(t, rows)| rows.iter().map(move |row| (t, row))) {
            let key = &row.keys[0];
            let above = match (section, t) {
                ("nfs", 1) => "[[nfs.export]]\nname = \"/d\"\ndir = \"d\"\n",
                ("tree", _) if key == "stripe_count" => "folder = \"/f\"\nstripe_bytes = 65536\n",
                _ => "",
            };
            let said = |value: &str| complaints(&file(template, &format!("{above}{key} = {value}")));
            // Values of other keys may not fit.
            let of_key =
                |value: f64| said(&value.to_string()).into_iter().any(|line| line.starts_with(&format!("{key} is ")));
            let (range, more) = row.range.split_once(", ").map_or((row.range.as_str(), ""), |(a, b)| (a, b));
            let (range, or_none) = if range == "0" { (more.trim_start_matches("or "), true) } else { (range, false) };
            let ends = range.split_once(" to ").and_then(|(low, high)| Some((number(low)?, number(high)?)));
            if let Some((low, high)) = ends {
                let is_real = default_of(template, section, key, t == 1).is_some_and(|value| value.is_float());
                // The least that a number of the kind can be beside the range.
                let step = if is_real && low > 0.0 { low / 1000.0 } else { 1.0 };
                assert!(!of_key(low), "{heading}: {key} = {low}: {:?}", said(&low.to_string()));
                assert!(!or_none || !of_key(0.0), "{heading}: {key} = 0");
                if more.is_empty() || or_none {
                    assert!(!of_key(high), "{heading}: {key} = {high}: {:?}", said(&high.to_string()));
                }
                let beside = [low - step, high + step.max(high / 1e6)];
                for value in beside.map(|value| if is_real { value } else { value.floor() }) {
                    // Below 0 it is no number of the kind.
                    let found = said(&value.to_string());
                    assert!(
                        found.iter().any(|line| line.contains(key.as_str())),
                        "{heading}: {key} = {value}: {found:?}"
                    );
                }
                numbers += 1;
            }
            let words: Vec<&str> = row.range.split(", ").map(|word| word.trim_matches(['`', '"'])).collect();
            let are_words = words.len() > 1 && words.iter().all(|word| word.chars().all(|c| c.is_ascii_lowercase()));
            if are_words && words != ["true", "false"] {
                let found = said("\"qzxjvk\"").join("\n");
                assert!(words.iter().all(|word| found.contains(word)), "{heading}: {key}: {words:?}: {found}");
                let taken = words.iter().map(|word| said(&format!("\"{word}\"")).join("\n"));
                let refused: Vec<String> = taken.filter(|found| found.contains(&format!("{key} must be"))).collect();
                assert!(refused.is_empty(), "{heading}: {refused:?}");
                choices += 1;
            }
        }
    }
    assert!(numbers > 40 && choices >= 8, "{numbers} ranges, {choices} choices");
}

/// Every block of a configuration in the documents, with what it leaves out: servers, addresses and folders.
#[test]
fn the_examples_are_good() {
    let mut checked = 0;
    for document in documents::files() {
        for (line, text) in documents::blocks(&document, "toml") {
            let place = format!("{}:{line}", document.display());
            let mut values: Table = toml::from_str(&text).unwrap_or_else(|e| panic!("{place}: {e}"));
            let sections = ["cluster", "tls", "meta", "data", "io", "allocation", "export", "tree", "nfs", "device"];
            if !values.keys().any(|key| sections.contains(&key.as_str())) {
                continue;
            }
            let server = |name: &str, port: usize| {
                Table::from_iter(
                    [("name", name.to_string()), ("address", format!("h:{port}")), ("dir", name.into())]
                        .map(|(k, v)| (k.to_string(), Value::String(v))),
                )
            };
            let servers = |names: &[&str], port: usize| {
                Value::Array(names.iter().enumerate().map(|(i, name)| Value::Table(server(name, port + i))).collect())
            };
            if !values.contains_key("tree") {
                let mut meta = server("meta", 1);
                meta.remove("name");
                values.entry("meta").or_insert(Value::Table(meta));
                values.entry("data").or_insert(servers(&["data.0", "data.1"], 10));
                for (i, data) in values["data"].as_array_mut().unwrap().iter_mut().enumerate() {
                    for (key, value) in server(&format!("data.{i}"), 10 + i) {
                        data.as_table_mut().unwrap().entry(key).or_insert(value);
                    }
                }
            }
            if values.contains_key("tree") || values.contains_key("allocation") {
                let mut nodes = servers(&["io.0", "io.1", "io.2"], 20);
                nodes
                    .as_array_mut()
                    .unwrap()
                    .iter_mut()
                    .for_each(|node| drop(node.as_table_mut().unwrap().remove("dir")));
                values.entry("io").or_insert(nodes);
            }
            let text = toml::to_string(&values).unwrap();
            if let Err(errors) = Config::parse(&text, Path::new("/c.toml")) {
                panic!("{place}: {errors}\n{text}");
            }
            checked += 1;
        }
    }
    assert!(checked >= 10, "{checked}");
}
