//! doc/METRICS.md describes every metric, as what it is, and no others.

use std::collections::BTreeSet;

use impresario_metrics::{FAMILIES, Family};

/// The labels that a metric's values have, from the places of the status that they are taken from.
fn labels(family: &Family) -> BTreeSet<&str> {
    let of = |place: &'static str| {
        let (place, constant) = place.split_once(' ').unwrap_or((place, ""));
        let open = |c| ['[', '{', '<'].contains(&c);
        let named = place.split(open).skip(1).flat_map(|rest| rest.split([']', '}', '>']).next().unwrap().split(','));
        named.chain([constant]).map(|label| label.split('=').next().unwrap()).filter(|label| !label.is_empty())
    };
    family.places.iter().flat_map(|place| of(place)).collect()
}

#[test]
fn every_metric_is_documented_and_no_other() {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../doc/METRICS.md");
    let document = std::fs::read_to_string(document).unwrap();
    // Those of guided I/O are another room's.
    let of_servers = document.split("\n## Guided I/O").next().unwrap();
    let rows = of_servers.lines().filter_map(|line| line.strip_prefix("| `impresario_")?.split_once('`'));
    let rows: Vec<(&str, &str)> = rows.collect();
    for family in FAMILIES {
        let kind = family.kind.name();
        let row = rows.iter().find(|(name, _)| *name == family.name);
        let (_, row) = row.unwrap_or_else(|| panic!("add a row for impresario_{}", family.name));
        assert!(row.contains(&format!("| {kind} |")), "impresario_{} is a {kind}: {row}", family.name);
        let documented = row.split('|').nth(2).unwrap().split('`').skip(1).step_by(2).collect();
        assert_eq!(labels(family), documented, "the labels of impresario_{}: {row}", family.name);
        assert!(
            row.contains(family.help.trim_end_matches('.')),
            "impresario_{}: {} in: {row}",
            family.name,
            family.help
        );
    }
    let known: BTreeSet<&str> = FAMILIES.iter().map(|family| family.name).collect();
    let unknown: Vec<_> = rows.iter().filter(|(name, _)| !known.contains(name)).collect();
    assert!(unknown.is_empty(), "there are no such metrics: {unknown:?}");
    assert_eq!(rows.len(), FAMILIES.len(), "a row is there twice");
}
