//! `impresario assist selftest`: what a site runs on its own file system.

use std::path::Path;
use std::process::Command;

use impresario_testing::page_cache;
use serde_json::Value;

use crate::support::run_command;
use crate::tools::{Folder, assist};

#[test]
fn a_file_system_is_described_measured_and_left_as_it_was() {
    let _cache = page_cache::watched();
    let folder = Folder::new();
    let json = folder.at("told.json");
    std::fs::create_dir(folder.at("mount")).unwrap();
    let mut command = assist(["selftest", "--size", "16m", "--pairs", "2", "--json"]);
    let ran = run_command(command.arg(&json).arg(folder.at("mount")));
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert_eq!(std::fs::read_dir(folder.at("mount")).unwrap().count(), 0);
    assert!(ran.out.contains("nothing stays behind"), "{}", ran.out);
    let told: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert!(told["file_system"]["kind"].as_str().is_some_and(|kind| !kind.is_empty()), "{told}");
    let ways: Vec<&str> = told["runs"].as_array().unwrap().iter().map(|r| r["way"].as_str().unwrap()).collect();
    assert_eq!(ways, ["strided", "backward", "straight", "mapped"]);
    for runs in told["runs"].as_array().unwrap() {
        assert!(runs["error"].is_null() && runs["without_s"].as_f64() > Some(0.0), "{runs}");
    }
    // What is known to be so on this machine's disk.
    if told["file_system"]["kind"] == "ext4" && told["pages_go"] == true {
        let calls = told["calls"].as_array().unwrap();
        assert!(calls.iter().all(|call| call["there_ms"].is_number()), "{told}");
        assert_eq!(calls.iter().filter(|call| call["is_default"] == true).count(), 1, "{told}");
    }
}

/// With the stand-in for GPFS's library, whose lines are: process, thread, inode, kind, …, first byte, bytes, held, broken.
#[test]
fn the_calls_of_gpfs_are_tried() {
    let folder = Folder::new();
    let (library, record, mount) = (folder.at("libgpfs.so"), folder.at("calls"), folder.at("mount"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assist/tests/support/gpfs.c");
    assert!(Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status().unwrap().success());
    std::fs::create_dir(&mount).unwrap();
    let mut command = assist(["selftest", "--size", "16m", "--pairs", "2"]);
    command.arg(&mount).env("IMPRESARIO_ASSIST_LIBGPFS", &library).env("GPFS_RECORD", &record);
    let ran = run_command(&mut command);
    for way in ["gpfsAccessRange_t: taken", "gpfsCancelHints_t: taken", "gpfsClearFileCache_t: taken"] {
        assert!(ran.code == 0 && ran.out.contains(way), "{way}: {}{}", ran.out, ran.err);
    }
    let lines = std::fs::read_to_string(record).unwrap();
    let calls = lines.lines().map(|line| line.split(' ').skip(3).map(|n| n.parse().unwrap()).collect::<Vec<u64>>());
    let calls: Vec<[u64; 4]> = calls.map(|n| [n[0], n[4], n[5], n[7]]).collect();
    assert_eq!(calls, [[1001, 1 << 20, 8 << 20, 0], [2001, 0, 0, 0], [1004, 0, 0, 0]]);
}

#[test]
fn mistakes_are_named_and_nothing_is_left() {
    let folder = Folder::new();
    for (more, why) in [(["--size", "1m"], "at least 16 MiB"), (["--pairs", "2"], "no folder can be made")] {
        let mut command = assist(["selftest"]);
        command.args(more).arg(if more[0] == "--size" { folder.path().into() } else { folder.at("nowhere") });
        let ran = run_command(&mut command);
        assert_eq!((ran.code, ran.err.lines().count()), (2, 1), "{}", ran.err);
        assert!(ran.err.contains(why), "{}", ran.err);
    }
    // A reader that finds something else says so.
    let path = folder.write("zeros", vec![0; 1 << 20]);
    let ran = run_command(assist(["selftest", "--reader", "strided"]).arg(&path));
    assert!(ran.code != 0 && ran.err.contains("is not what was written"), "{ran:?}");
}
