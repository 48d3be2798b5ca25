//! `impresario trace` as people use it: conversions there and back, figures, mistakes.

use std::path::Path;
use std::process::{Command, Output};

fn trace(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_impresario")).arg("trace").args(args).current_dir(dir).output().unwrap()
}

fn good(dir: &Path, args: &[&str]) -> String {
    let out = trace(dir, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The exit status and what is complained of.
fn bad(dir: &Path, args: &[&str]) -> (i32, String) {
    let out = trace(dir, args);
    (out.status.code().unwrap(), String::from_utf8(out.stderr).unwrap())
}

const TABLE: &str = "arrival_ns,duration_ns,op,path,offset,len,process\n\
                     1000,500,read,\"/a, b\",0,4096,1\n2000,500,read,\"/a, b\",8192,4096,1\n3000,500,read,\"/a, b\",16384,4096,1\n";

#[test]
fn there_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("in.csv"), TABLE).unwrap();
    assert!(good(dir, &["convert", "in.csv", "-o", "run.imt"]).contains("3 requests written to run.imt (imt)"));
    let info: serde_json::Value = serde_json::from_str(&good(dir, &["info", "run.imt", "--json"])).unwrap();
    assert_eq!((info["requests"].as_u64(), info["ending"].as_str()), (Some(3), Some("closed")));
    let stats: serde_json::Value = serde_json::from_str(&good(dir, &["stats", "run.imt", "--json"])).unwrap();
    assert_eq!(stats["files"][0]["offset_distance_bytes"].as_f64(), Some(8192.0));
    assert!(good(dir, &["stats", "run.imt"]).contains("strides; mostly 8 KiB 100 %"));
    for (name, format) in [("out.csv", "csv"), ("out.iolog", "fio3"), ("out.json", "chrome")] {
        assert!(good(dir, &["convert", "run.imt", "-o", name]).contains(format));
    }
    good(dir, &["convert", "out.iolog", "-o", "again.imt"]);
    assert!(good(dir, &["info", "again.imt"]).contains("fio version 3 iolog"));
    good(dir, &["convert", "run.imt", "run.imt", "-o", "mean.imt", "--combine", "average"]);
    assert!(good(dir, &["info", "mean.imt"]).contains("mean of 2 traces"));
}

#[test]
fn mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("in.csv"), TABLE).unwrap();
    std::fs::write(dir.join("bad.csv"), format!("{TABLE}4000,5,leap,/f,0,1,1\n")).unwrap();
    good(dir, &["convert", "in.csv", "-o", "run.imt"]);
    for (args, status, wanted) in [
        (&["convert", "in.csv", "-o", "run.imt"][..], 2, "run.imt is there already"),
        (&["convert", "in.csv", "in.csv", "-o", "x.imt"], 2, "--combine average"),
        (&["convert", "in.csv", "in.csv", "-o", "x.imt", "--combine", "join"], 1, "wall clock"),
        (&["convert", "in.csv", "-o", "x", "--to", "strace"], 2, "can be read, not written"),
        (&["convert", "in.csv", "-o", "x", "--to", "tar"], 2, "there is no format tar"),
        (&["convert", "bad.csv", "-o", "x.imt"], 1, "bad.csv:5: \"leap\" is no operation"),
        (&["info", "none.imt"], 1, "none.imt: No such file"),
    ] {
        let (got, told) = bad(dir, args);
        assert!(got == status && told.contains(wanted), "{args:?}: {got} {told}");
    }
    assert!(!dir.join("x.imt").exists(), "a conversion that fails leaves nothing");
    good(dir, &["convert", "in.csv", "-o", "run.imt", "--overwrite"]);
}
