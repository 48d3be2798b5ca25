//! `impresario-lab reproduce` end to end, at a fraction of the papers' volume.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn lab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_impresario-lab")).args(args).output().expect("the program starts")
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn a_small_reproduction_leaves_tables_plots_and_measures() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let run = |threads: &str, json: &Path| {
        let (html, markdown) = (file("page.html"), file("tables.md"));
        let _ = std::fs::remove_file(&markdown);
        let paths = [json, &html, &markdown].map(|p| p.to_str().unwrap().to_string());
        lab(&[
            "reproduce",
            "agios-2013",
            "--divide",
            "64",
            "--repetitions",
            "2",
            "--threads",
            threads,
            "--json",
            &paths[0],
            "--html",
            &paths[1],
            "--markdown",
            &paths[2],
        ])
    };
    let output = run("1", &file("one.json"));
    assert!(output.status.success(), "{}", said(&output));
    let text = said(&output);
    assert!(
        text.contains("divided by 64")
            && text.contains("not tested")
            && text.contains("the length of a pass, which is assumed, sets the ratio"),
        "{text}"
    );

    let report: Value = serde_json::from_str(&read(&file("one.json"))).unwrap();
    let figures = report["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 4, "Figs. 3, 5, 6 and 7");
    for figure in figures {
        assert!(!figure["assumptions"].as_array().unwrap().is_empty());
        for cell in figure["cells"].as_array().unwrap() {
            let value = |key: &str| cell[key].as_f64().unwrap_or_else(|| panic!("{key} of {cell}"));
            assert!(cell["makespan_s"]["mean"].as_f64().unwrap() > 0.0, "{cell}");
            assert!(
                value("task_mean_s") > 0.0 && value("least_throughput") >= 0.0 && value("fairness") > 0.0,
                "{cell}"
            );
            assert!(cell["inside"]["accesses"].as_f64().unwrap() > 0.0, "{cell}");
        }
    }
    let interference = figures[1]["cells"][0]["interference"].as_f64().unwrap();
    assert!(interference > 1.0, "four applications share the disks: {interference}");

    let (html, tables) = (read(&file("page.html")), read(&file("tables.md")));
    assert!(html.matches("<svg").count() >= 5 && html.contains("Assumed where the paper is silent"));
    assert!(tables.contains("| `agios.fig5.average`") && tables.contains("| case | makespan, s |"));

    let again = run("2", &file("two.json"));
    assert!(again.status.success(), "{}", said(&again));
    assert_eq!(read(&file("one.json")), read(&file("two.json")), "the same whatever the number of threads");
}

#[test]
fn a_wrong_name_is_one_line_with_the_remedy() {
    let output = lab(&["goals", "nothing"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("no goal nothing"), "{}", said(&output));
    let output = lab(&["reproduce", "twins-2018"]);
    assert_eq!(output.status.code(), Some(2));
    let text = said(&output);
    assert!(text.contains("twins-2018") && text.contains("twins-2017") && text.lines().count() == 1, "{text}");
}

#[test]
fn the_figures_are_listed_with_their_files() {
    let output = lab(&["reproduce", "list"]);
    assert!(output.status.success());
    let text = said(&output);
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("papers");
    assert!(text.lines().count() >= 15, "{text}");
    for line in text.lines() {
        let name = line.rsplit("lab/papers/").next().unwrap().trim_end_matches(')');
        assert!(files.join(name).exists(), "{line}");
    }
}
