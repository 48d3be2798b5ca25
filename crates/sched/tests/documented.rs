//! doc/POLICIES.md has every policy, and every parameter with its default and range.

use std::collections::BTreeSet;

use impresario_sched::policy::params::Range;
use impresario_sched::policy::{POLICIES, ParamInfo};
use impresario_testing::documents;

/// A row of a table of parameters.
#[derive(Debug)]
struct Row {
    name: String,
    default: String,
    range: String,
    /// The row is of several parameters.
    shared: bool,
}

/// The sections about policies: their names and the text.
fn sections() -> Vec<(Vec<&'static str>, String)> {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../doc/POLICIES.md")).unwrap();
    let named = |section: &str| {
        let heading = section.lines().next().unwrap();
        let names: Vec<&str> = heading.split(", ").collect();
        POLICIES.iter().map(|policy| policy.name).filter(|name| names.contains(name)).collect::<Vec<_>>()
    };
    document
        .split("\n## ")
        .map(|section| (named(section), section.to_string()))
        .filter(|(n, _)| !n.is_empty())
        .collect()
}

/// The rows of a section; one may be of several parameters.
fn rows(section: &str) -> Vec<Row> {
    let mut found = Vec::new();
    for cells in documents::tables(section, "parameter").iter().flat_map(|table| &table.rows) {
        let names: Vec<&str> = documents::spans(&cells[0]).collect();
        let defaults: Vec<&str> = if names.len() > 1 { cells[1].split(", ").collect() } else { vec![&cells[1]] };
        assert_eq!(names.len(), defaults.len(), "{cells:?}");
        let row = |(name, default): (&&str, &&str)| Row {
            name: name.to_string(),
            default: default.trim_matches('`').to_string(),
            range: cells[2].clone(),
            shared: names.len() > 1,
        };
        found.extend(names.iter().zip(&defaults).map(row));
    }
    found
}

/// A number such as `10^6`, `3.6·10^6` or `3 600 000`.
fn number(text: &str) -> Option<f64> {
    let factor = |text: &str| match text.split_once('^') {
        Some((base, power)) => Some(base.parse::<f64>().ok()?.powi(power.parse().ok()?)),
        None => text.parse().ok(),
    };
    text.replace(' ', "").split(['·', '×']).map(factor).product()
}

/// Whether the text of a row's range says what the parameter accepts.
fn says(text: &str, range: Range) -> bool {
    let ends = |low: f64, high: f64| {
        text.split_once('–').is_some_and(|(a, b)| (number(a), number(b)) == (Some(low), Some(high)))
    };
    match range {
        Range::Integer(low, high) => ends(low as f64, high as f64),
        Range::Decimal(low, high) => ends(low, high),
        Range::Choice(words) => text.split(", ").collect::<BTreeSet<_>>() == words.iter().copied().collect(),
        // The form is described in words.
        Range::Text(_) => true,
    }
}

/// What is wrong with the row of a parameter.
fn complaint(policy: &str, param: &ParamInfo, row: &Row) -> Option<String> {
    // A default may be of one policy of the section.
    let own = row.default.split(", ").find_map(|part| part.strip_suffix(&format!(" (`{policy}`)")));
    let default = own.unwrap_or(&row.default);
    let is_text = matches!(param.range, Range::Text(_));
    let fits = default == param.default || is_text && ["", "–"].contains(&default) && param.default.is_empty();
    if !fits {
        return Some(format!("the default is {:?}, not {default:?}", param.default));
    }
    // A row of several, or one that refers to another section, has the range in words.
    let in_words = row.shared && row.range.is_empty() || row.range.starts_with("as in");
    (!in_words && !says(&row.range, param.range)).then(|| format!("takes {}, not {:?}", param.range, row.range))
}

#[test]
fn every_parameter_of_every_policy_is_documented_and_no_other() {
    let sections = sections();
    let of = |name: &str| sections.iter().find(|(names, _)| names.contains(&name)).map(|(_, text)| text.as_str());
    let (mut complaints, mut checked) = (Vec::new(), 0);
    for policy in POLICIES {
        let section = of(policy.name).unwrap_or_else(|| panic!("doc/POLICIES.md has no section on {}", policy.name));
        // Policies with the code and the parameters of another one.
        let base = match policy.name {
            "aioli" | "agios" | "agios-causal" => "mlf",
            "srtf" => "sjf",
            _ => policy.name,
        };
        let (own, inherited) = (rows(section), rows(of(base).unwrap()));
        for param in policy.params {
            let shared = inherited.iter().find(|row| row.name == param.name);
            let row = own.iter().find(|row| row.name == param.name).or(shared);
            let other = format!("`{}={}`", param.name, param.default);
            let why = match row {
                None => Some("there is no row".to_string()),
                Some(_) if section.contains(&other) => None,
                Some(row) => complaint(policy.name, param, row),
            };
            complaints.extend(why.map(|why| format!("{}: {}: {why}", policy.name, param.name)));
            checked += 1;
        }
    }
    for (names, text) in &sections {
        let is_known = |row: &Row| {
            let mut params =
                POLICIES.iter().filter(|policy| names.contains(&policy.name)).flat_map(|policy| policy.params);
            params.any(|param| param.name == row.name)
        };
        complaints
            .extend(rows(text).iter().filter(|row| !is_known(row)).map(|row| format!("{names:?}: no {}", row.name)));
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    assert!(checked > 120, "{checked}");
}
