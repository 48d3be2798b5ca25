//! `impresario-lab nfs` end to end, at a fraction of its volume.

use std::process::Command;

use impresario_testing::{page_cache, require, skip};
use serde_json::Value;

/// What is needed, or `None` after a skip.
fn needed() -> Option<()> {
    if !require("root") || !require("fuse") || !require("cc") || !require("ip") {
        return None;
    }
    if !std::path::Path::new("/usr/include/nfsc/libnfs.h").exists() {
        skip("libnfs-dev", "its header is not there");
        return None;
    }
    if !std::path::Path::new(env!("CARGO_BIN_EXE_impresario-lab")).with_file_name("impresario").exists() {
        skip("impresario", "the program is not built");
        return None;
    }
    Some(())
}

/// Runs the command with these arguments; its output.
fn lab(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_impresario-lab")).arg("nfs").args(arguments).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    said
}

/// Requests at the disk are as long as the device lets them be.
#[test]
fn other_devices_read_what_is_asked_for() {
    let Some(()) = needed() else { return };
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir().unwrap();
    for (device, title) in [("bare", "on a bare modelled disk"), ("kernel-2005", "which reads nothing ahead")] {
        let file = dir.path().join(device);
        let said = lab(&[
            "--device",
            device,
            "--uncounted",
            "--size",
            "8m",
            "--processes",
            "16",
            "--pairs",
            "1",
            "--systems",
            "none,aioli",
            "--loads",
            "64 KiB, POSIX",
            "--json",
            file.to_str().unwrap(),
        ]);
        assert!(said.contains(title), "{said}");
        let json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let bytes = |system: u64| {
            let run = json["runs"].as_array().unwrap().iter().find(|run| run["system"] == system).unwrap();
            run["disk_request_bytes"].as_f64().unwrap() / 1024.0
        };
        assert!((60.0..80.0).contains(&bytes(0)), "{device}: {json}");
        // How much meets in the queue depends on the machine.
        assert!(bytes(1) > bytes(0), "{device}: {json}");
    }
}

#[test]
fn weights_divide_the_disk() {
    let Some(()) = needed() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (csv, html) = (dir.path().join("w.csv"), dir.path().join("w.html"));
    let said = lab(&["--weights", "4", "--csv", csv.to_str().unwrap(), "--html", html.to_str().unwrap()]);
    let ratio = |weights: &str| -> f64 {
        let line = said.lines().find(|line| line.starts_with(weights)).unwrap_or_else(|| panic!("{said}"));
        line.split_whitespace().nth(5).unwrap().parse().unwrap_or_else(|_| panic!("{line}"))
    };
    assert!((0.85..1.15).contains(&ratio("weights 1 : 1")), "{said}");
    assert!((1.7..2.3).contains(&ratio("weights 2 : 1")), "{said}");
    assert_eq!(std::fs::read_to_string(csv).unwrap().lines().count(), 81);
    assert!(std::fs::read_to_string(html).unwrap().contains("<svg"));
}

#[test]
fn applications_at_an_nfs_server_are_measured_and_compared() {
    let Some(()) = needed() else { return };
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("runs.json");
    let said = lab(&[
        "--uncounted",
        "--size",
        "4m",
        "--processes",
        "4",
        "--pairs",
        "1",
        "--systems",
        "none,mlf",
        "--loads",
        "64 KiB, collective;ten",
        "--json",
        file.to_str().unwrap(),
    ]);
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
