//! `impresario-lab nfs` end to end, at a fraction of its volume.

use std::process::Command;

use impresario_testing::{page_cache, require, skip};
use serde_json::Value;

#[test]
fn applications_at_an_nfs_server_are_measured_and_compared() {
    if !require("root") || !require("fuse") || !require("cc") || !require("ip") {
        return;
    }
    if !std::path::Path::new("/usr/include/nfsc/libnfs.h").exists() {
        return skip("libnfs-dev", "its header is not there");
    }
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_impresario-lab")).with_file_name("impresario");
    if !program.exists() {
        return skip("impresario", "the program is not built");
    }
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("runs.json");
    let output = Command::new(env!("CARGO_BIN_EXE_impresario-lab"))
        .args(["nfs", "--uncounted", "--size", "4m", "--processes", "4", "--pairs", "1", "--systems", "none,mlf"])
        .args(["--loads", "64 KiB, collective;ten", "--json", file.to_str().unwrap()])
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("MODELLED") && said.contains("write sequential 512 MB"), "{said}");
    let json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4, "{json}");
    for run in runs {
        assert!(run["makespan_s"].as_f64().unwrap() > 0.0 && run["disk_requests"].as_u64().unwrap() > 0, "{run}");
    }

    let refused =
        Command::new(env!("CARGO_BIN_EXE_impresario-lab")).args(["nfs", "--systems", "fast"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("one at a time"));
}
