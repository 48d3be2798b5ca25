//! Every row of `doc/SEMANTICS.md` names tests, and every named test exists.

use std::fs;
use std::path::{Path, PathBuf};

/// Directories of the letters in the document.
const PLACES: [(&str, &str); 12] = [
    ("F", "crates/faces/fuse/tests/mounted"),
    ("U", "crates/faces/fuse/src"),
    ("S", "crates/server/tests"),
    ("T", "crates/store"),
    ("E", "crates/sched/src"),
    ("C", "crates/client"),
    ("L", "crates/cli/tests"),
    ("N", "crates/faces/nfs/tests"),
    ("G", "integrations/glusterfs/tests"),
    ("M", "crates/server/src/meta"),
    ("D", "crates/server/src/data"),
    ("Y", "crates/layout"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).unwrap().to_owned()
}

/// The tests of a table row's last column: (letter, file, test).
fn named_in(row: &str) -> Vec<(&str, &str, &str)> {
    let last = row.trim().trim_end_matches('|').rsplit('|').next().unwrap();
    last.split(", ")
        .filter_map(|item| {
            let (letter, quoted) = item.trim().split_once(" `")?;
            let (file, test) = quoted.strip_suffix('`')?.split_once("::")?;
            Some((letter, file, test))
        })
        .collect()
}

fn missing(letter: &str, file: &str, test: &str) -> Option<String> {
    let Some((_, place)) = PLACES.iter().find(|(known, _)| *known == letter) else {
        return Some(format!("`{letter}` leads nowhere"));
    };
    let path = root().join(place).join(file);
    // The tests of a larger unit lie in a directory of its name.
    let beside = path.with_extension("").join("tests.rs");
    let text: String = [path, beside].iter().filter_map(|path| fs::read_to_string(path).ok()).collect();
    let there = match test {
        "*" => text.contains("#[test]"),
        _ => text.contains(&format!("fn {test}(")),
    };
    (!there).then(|| format!("{place}/{file} has no test {test}"))
}

#[test]
fn every_promise_names_tests_that_exist() {
    let text = fs::read_to_string(root().join("doc/SEMANTICS.md")).unwrap();
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("| ") && !line.contains("Checked by")).collect();
    assert!(rows.len() > 40, "the tables were not found");
    let mut complaints = Vec::new();
    for row in rows {
        let named = named_in(row);
        if named.is_empty() {
            complaints.push(format!("no test: {row}"));
        }
        complaints.extend(named.into_iter().filter_map(|(letter, file, test)| missing(letter, file, test)));
    }
    assert!(complaints.is_empty(), "doc/SEMANTICS.md:\n{}", complaints.join("\n"));
}
