//! `impresario-lab glusterfs` end to end, at a fraction of its volume and without the translator, whose own tests are in
//! `integrations/glusterfs`.

use std::process::Command;

use impresario_testing::{page_cache, require, skip};
use serde_json::Value;

fn lab() -> Command {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_impresario-lab"));
    lab.args(["glusterfs", "--uncounted", "--applications", "3", "--processes", "2", "--size", "1m", "--pairs", "1"]);
    lab
}

#[test]
fn applications_at_bricks_are_measured_and_compared() {
    if !require("root") || !require("fuse") || !require("cc") || !require("ip") || !require("glusterfsd") {
        return;
    }
    if !std::path::Path::new("/usr/include/glusterfs/api/glfs.h").exists() {
        return skip("libglusterfs-dev", "the header of libgfapi is not there");
    }
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("runs.json");
    let output = lab().args(["--systems", "as it comes,io-threads alone", "--json"]).arg(&file).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("MODELLED") && said.contains("16 KiB strided write"), "{said}");
    let json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 8, "{json}");
    for run in runs {
        assert!(run["makespan_s"].as_f64().unwrap() > 0.0 && run["disk_requests"].as_u64().unwrap() > 0, "{run}");
    }
    assert!(!std::fs::read_to_string("/proc/mounts").unwrap().contains("impresario-kernel-disk"), "a disk is left");
}

#[test]
fn mistakes_are_named() {
    let said = |arguments: &[&str]| {
        let output = lab().args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = said(&["--systems", "fast"]);
    assert!(code == Some(2) && text.contains("mlf with foresight"), "{text}");
    let (code, text) = said(&["--systems", "mlf", "--translator", "/nowhere/impresario.so"]);
    assert!(code == Some(1) && text.contains("make -C integrations/glusterfs"), "{text}");
}
