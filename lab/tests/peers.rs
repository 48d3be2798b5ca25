//! `impresario-lab peers` end to end, at a fraction of its volume.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use impresario_testing::{is_root, require, skip};
use serde_json::Value;

/// Runs the command with these arguments, and shows every line of its progress to `watch`, with its process number. What it printed, and what it wrote.
fn peers(arguments: &[&str], mut watch: impl FnMut(u32, &str)) -> (String, Value) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("peers.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_impresario-lab"));
    command.args(["peers", "--scale", "0.002", "--repetitions", "3", "--json"]).arg(&file).args(arguments);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        watch(child.id(), &line);
        told += &format!("{line}\n");
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{told}");
    (String::from_utf8(output.stdout).unwrap(), serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap())
}

/// The program that the command starts; `None` after a skip.
fn built() -> Option<()> {
    let there = Path::new(env!("CARGO_BIN_EXE_impresario-lab")).with_file_name("impresario").exists();
    if !there {
        skip("impresario", "the program is not built");
    }
    there.then_some(())
}

/// Rows in which a subject has runs, all of them verified.
fn measured<'a>(json: &'a Value, subject: &str) -> HashSet<&'a str> {
    let samples = json["samples"].as_array().unwrap().iter().filter(|sample| sample["subject"] == subject);
    samples
        .map(|sample| {
            assert!(sample["verified"].as_u64().unwrap() > 0 && sample["per_s"].as_f64().unwrap() > 0.0, "{sample}");
            sample["row"].as_str().unwrap()
        })
        .collect()
}

/// Rows in which it has no figure, and why.
fn lost<'a>(json: &'a Value, subject: &str) -> Vec<(&'a str, &'a str)> {
    let lost = json["no_figure"].as_array().unwrap().iter().filter(|lost| lost["subject"] == subject);
    lost.map(|lost| (lost["row"].as_str().unwrap(), lost["reason"].as_str().unwrap())).collect()
}

#[test]
fn all_subjects_are_measured_and_what_is_missing_is_named() {
    let Some(()) = built() else { return };
    // Each is missing visibly, here and in the table.
    let there =
        [("diod", require("diod")), ("nfs-ganesha", require("ganesha.nfsd") && require("rpcbind") && require("root"))];
    let (text, json) = peers(&[], |_, _| ());
    let rows = measured(&json, "ours");
    assert_eq!(rows.len(), 14, "{json}");
    for subject in ["io-node", "direct"] {
        assert_eq!(measured(&json, subject), rows, "{subject}: {json}");
    }
    assert_eq!(measured(&json, "minimal").len(), 8, "{json}");
    for (subject, there) in there {
        let (measured, lost) = (measured(&json, subject), lost(&json, subject));
        if there {
            assert!(measured == rows && lost.is_empty(), "{subject}: {lost:?}");
            assert!(text.contains(&format!("ours against {subject}: ahead in ")), "{text}");
            continue;
        }
        assert!(measured.is_empty() && lost.len() == rows.len(), "{subject}: {lost:?}");
        let named = lost.iter().all(|(_, why)| why.contains("Debian: ") || !is_root());
        assert!(named && text.contains("no figure: "), "{subject}: {lost:?}");
    }
    assert!(json["ratios"].as_array().unwrap().iter().all(|ratio| ratio["ratio"]["n"] == 3), "{json}");
}

/// The child of a process that runs this program.
fn child(parent: u32, program: &str) -> Option<i32> {
    let all = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    all.into_iter().find(|pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains(&format!("({program})"))
            && stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)) == Some(&parent.to_string())
    })
}

#[test]
fn a_peer_that_dies_loses_its_row_only() {
    let Some(()) = built() else { return };
    if !require("diod") {
        return;
    }
    let mut killed = None;
    // "unlink, 1 client" and "unlink, 16 clients".
    let arguments = ["--peers", "diod,direct", "--rows", "4 KiB random;unlink, 1"];
    let (text, json) = peers(&arguments, |pid, line| {
        if killed.is_none() && line.starts_with("2 of ") && line.ends_with("repetition 0, diod") {
            let diod = child(pid, "diod").unwrap();
            let pid = rustix::process::Pid::from_raw(diod).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            killed = Some(diod);
        }
    });
    assert!(killed.is_some());
    let row = "4 KiB random read, 16 clients";
    let lost = lost(&json, "diod");
    assert!(lost.len() == 1 && lost[0].0 == row, "{lost:?}");
    assert!(text.contains(&format!("no figure: {}", lost[0].1)), "{text}");
    let (rows, of_diod) = (measured(&json, "ours"), measured(&json, "diod"));
    assert_eq!(rows.len(), 4, "{json}");
    // What it had done in that row before is kept, and counts for nothing.
    assert!(rows.iter().all(|other| *other == row || of_diod.contains(other)), "{of_diod:?}");
    assert!(json["ratios"].as_array().unwrap().iter().all(|r| r["other"] != "diod" || r["row"] != row), "{json}");
    assert!(text.contains("no figure in 1 of 4 rows"), "{text}");
}

#[test]
fn a_row_that_is_not_there_is_refused_with_those_that_are() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_impresario-lab"));
    let refused = command.args(["peers", "--rows", "2 MiB"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("stat, 16 clients"));
}
