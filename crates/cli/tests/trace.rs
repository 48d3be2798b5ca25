//! `impresario trace` as a user runs it: round-trip conversions, statistics, mistakes.

use std::path::Path;
use std::process::{Command, Output};

use crate::support;

fn trace(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_impresario")).arg("trace").args(args).current_dir(dir).output().unwrap()
}

fn good(dir: &Path, args: &[&str]) -> String {
    let out = trace(dir, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The exit status and the error.
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
    let out = trace(dir, &["merge", "run.imt", "run.imt", "in.csv", "-o", "merged.imt"]);
    let told = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && told.contains("arrivals differ by 0.0 %"), "{told}");
    assert!(good(dir, &["info", "merged.imt"]).contains("mean of 3 traces"));
    assert_eq!(bad(dir, &["merge", "run.imt", "-o", "alone.imt"]).0, 2);
}

#[test]
fn mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("in.csv"), TABLE).unwrap();
    std::fs::write(dir.join("bad.csv"), format!("{TABLE}4000,5,leap,/f,0,1,1\n")).unwrap();
    good(dir, &["convert", "in.csv", "-o", "run.imt"]);
    for (args, status, wanted) in [
        (&["convert", "in.csv", "-o", "run.imt"][..], 2, "run.imt already exists"),
        (&["convert", "in.csv", "in.csv", "-o", "x.imt"], 2, "--combine average"),
        (&["convert", "in.csv", "in.csv", "-o", "x.imt", "--combine", "join"], 1, "wall clock"),
        (&["convert", "in.csv", "-o", "x", "--to", "strace"], 2, "can be read, not written"),
        (&["convert", "in.csv", "-o", "x", "--to", "tar"], 2, "there is no format tar"),
        (&["convert", "bad.csv", "-o", "x.imt"], 1, "bad.csv:5: \"leap\" is not a valid operation"),
        (&["info", "none.imt"], 1, "none.imt: No such file"),
    ] {
        let (got, told) = bad(dir, args);
        assert!(got == status && told.contains(wanted), "{args:?}: {got} {told}");
    }
    assert!(!dir.join("x.imt").exists(), "a conversion that fails leaves nothing");
    good(dir, &["convert", "in.csv", "-o", "run.imt", "--overwrite"]);
}

/// Recorded, loaded and recognised, by a data server and an I/O node that are given one folder.
#[test]
fn servers_load_earlier_runs() {
    let cluster = support::Cluster::start(1, 1, |config| {
        let agios =
            || impresario_sched::PolicySpec::named("agios").with("wait_us", 1000).with("bound_percent", 1_000_000);
        (config.data[0].policy, config.io[0].policy) = (agios(), agios());
        config.data[0].schedule_cached_reads = true;
        (config.data[0].trace, config.io[0].trace) = (Some("traces".into()), Some("traces".into()));
        (config.data[0].trace_at_start, config.io[0].trace_at_start) = (false, false);
    });
    let (config, dir) = (cluster.path.display().to_string(), cluster.dir.path().to_path_buf());
    let all = [&config, "--all-data", "--all-io"];
    let with = |word: &'static str, more: &[&'static str]| [&[word], &all[..], more].concat();
    support::write_file(&support::client(&cluster.config, 1), "a", &[7; 3 << 20]);
    let (code, err) = bad(&dir, &with("load", &[]));
    assert!(code == 1 && err.contains("io.0 has no earlier runs") && err.contains("data.0"), "{err}");
    let (code, err) = bad(&dir, &with("load", &["none"]));
    assert!(code == 1 && err.contains("No such file"), "{err}");
    // An answer may leave before its request has ended.
    let settle = || {
        for name in ["data.0", "io.0"] {
            impresario_testing::until("nothing is in flight", || {
                cluster.state(name)["engine"]["in_flight_batches"] == 0
            });
        }
    };
    settle();
    good(&dir, &with("start", &[]));
    assert_eq!(support::read_file(&support::client(&cluster.config, 2), "a").len(), 3 << 20);
    settle();
    good(&dir, &with("stop", &[]));
    let told = good(&dir, &with("load", &["traces"]));
    assert!(told.contains("data.0: 4 requests of 1 file foretold by") && told.contains("io.0: 4 requests"), "{told}");
    assert_eq!(support::read_file(&support::client(&cluster.config, 3), "a").len(), 3 << 20);
    let status = Command::new(env!("CARGO_BIN_EXE_impresario")).arg("status").arg(&cluster.path).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    let lines: Vec<&str> = status.lines().filter(|line| line.contains("earlier runs: 4 requests of 1 file ")).collect();
    assert!(
        lines.len() == 2 && lines.iter().all(|l| l.ends_with("; 4 of the 4 that came since are among them")),
        "{status}"
    );
    assert!(good(&dir, &with("unload", &[])).contains("io.0: goes by no earlier run"));
    let (code, err) = bad(&dir, &with("unload", &[]));
    assert!(code == 1 && err.contains("no earlier runs loaded"), "{err}");
}

/// Switched on live and stopped; killed, the trace can be read up to its last whole block.
#[test]
fn servers_write_traces() {
    let mut cluster = support::Cluster::start(1, 0, |config| {
        config.data[0].trace = Some("traces".into());
        config.data[0].trace_at_start = false;
    });
    let (config, dir) = (cluster.path.display().to_string(), cluster.dir.path().to_path_buf());
    let (code, err) = bad(&dir, &["start", &config]);
    assert!(code == 2 && err.contains("--all-data"), "{err}");
    let (code, err) = bad(&dir, &["stop", &config, "--all-data"]);
    assert!(code == 1 && err.contains("writes no trace"), "{err}");
    let begun = good(&dir, &["start", &config, "--all-data"]);
    assert!(begun.contains("data.0: writes") && begun.contains(".imt"), "{begun}");
    support::write_file(&support::client(&cluster.config, 1), "a", &[7; 3 << 20]);
    let told = good(&dir, &["stop", &config, "--server", "data.0"]);
    let path = told.split_once(": ").unwrap().1.split_once(": ").unwrap().0.to_string();
    let info: serde_json::Value = serde_json::from_str(&good(&dir, &["info", &path, "--json"])).unwrap();
    assert_eq!((info["ending"].as_str(), info["command"].as_str()), (Some("closed"), Some("data.0")));
    let requests = info["requests"].as_u64().unwrap();
    assert!(requests > 3 && told.contains(&format!("{requests} requests")), "{told}");
    good(&dir, &["start", &config, "--all-data"]);
    let client = support::client(&cluster.config, 2);
    (0..20).for_each(|_| assert_eq!(support::read_file(&client, "a").len(), 3 << 20));
    let traced = |cluster: &support::Cluster| cluster.state("data.0")["trace"].clone();
    let written = impresario_testing::eventually("it is written", || {
        let told = traced(&cluster);
        // Flushed: the header alone has some hundred bytes.
        (told["bytes"].as_u64().unwrap() > 600).then_some(told)
    });
    cluster.kill("data.0");
    let path = written["path"].as_str().unwrap();
    let info: serde_json::Value = serde_json::from_str(&good(&dir, &["info", path, "--json"])).unwrap();
    assert_ne!(info["ending"].as_str(), Some("closed"));
    assert!(info["requests"].as_u64().unwrap() >= 20, "{info}");
}

/// What a live server records is made again on a folder and on the cluster, request for request.
#[test]
fn traces_are_replayed() {
    let cluster = support::Cluster::start(1, 0, |config| {
        config.data[0].trace = Some("traces".into());
        config.data[0].trace_at_start = false;
    });
    let (config, dir) = (cluster.path.display().to_string(), cluster.dir.path().to_path_buf());
    let settle = || {
        impresario_testing::until("nothing is in flight", || {
            cluster.state("data.0")["engine"]["in_flight_batches"] == 0
        });
    };
    let recorded = |during: &dyn Fn()| -> (String, Vec<u64>) {
        settle();
        good(&dir, &["start", &config, "--all-data"]);
        during();
        settle();
        let told = good(&dir, &["stop", &config, "--all-data"]);
        let path = told.split_once(": ").unwrap().1.split_once(": ").unwrap().0.to_string();
        let trace = impresario_trace::Trace::load(&path).unwrap();
        use impresario_trace::TraceOp::{Read, Sync, Write};
        let count = |op| trace.records.iter().filter(|r| r.op == op && (op == Sync || r.len > 1)).count() as u64;
        (path, [Read, Write, Sync].map(count).into())
    };
    let (path, counts) = recorded(&|| {
        let client = support::client(&cluster.config, 1);
        support::write_file(&client, "a", &[7; 3 << 20]);
        support::write_file(&client, "b", &[8; 100_000]);
        assert_eq!(support::read_file(&client, "a").len(), 3 << 20);
    });
    assert_eq!(counts, [3, 4, 2]);
    std::fs::create_dir(dir.join("scratch")).unwrap();
    let result = |name: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(dir.join(name)).unwrap()).unwrap()
    };
    let figures = |json: &serde_json::Value| -> Vec<u64> {
        ["reads", "writes", "syncs", "failed"].map(|key| json[key].as_u64().unwrap()).into()
    };
    // The two reads of one byte at the files' ends find nothing, as they did when they were recorded.
    let told = good(&dir, &["replay", &path, "--folder", "scratch", "--timing", "scaled:2", "--json", "f.json"]);
    let json = result("f.json");
    let ends = figures(&json)[0] - counts[0];
    assert!(ends <= 2 && told.contains("4 writes, 2 syncs") && told.contains("lateness"), "{told}");
    assert_eq!(figures(&json)[1..], [4, 2, 0]);
    assert_eq!(json["verification"]["mismatches"], 0);
    assert_eq!(std::fs::read_dir(dir.join("scratch")).unwrap().count(), 0);
    // On the cluster the servers see the same requests again, after those that make the files.
    let args = ["replay", &path, "--config", &config, "--into", "again", "--keep"];
    good(&dir, &args);
    let (code, err) = bad(&dir, &args);
    assert!(code == 1 && err.contains("again is there already"), "{err}");
    let again = [&args[..], &["--overwrite", "--timing", "fast", "--json", "c.json"]].concat();
    let (_, seen) = recorded(&|| drop(good(&dir, &again)));
    assert_eq!(figures(&result("c.json")), figures(&json));
    // To make the files takes a write for each MiB and a sync of each.
    assert_eq!(seen, [counts[0], counts[1] + 4, counts[2] + 2]);
    for (args, code, wanted) in [
        (&["replay", &path][..], 2, "--folder"),
        (&["replay", &path, "--folder", "none"], 2, "none is not a directory"),
        (&["replay", "none.imt", "--folder", "scratch"], 1, "No such file"),
        (&["replay", &path, "--folder", "scratch", "--timing", "scaled:-1"], 2, "is not a valid factor"),
        (&["replay", &path, "--folder", "scratch", "--into", "../x"], 2, "is no name of a folder"),
        (&["replay", &path, "--folder", "scratch", "--overwrite"], 2, "--into"),
        (&["replay", &path, "--folder", "scratch", "--size-max", "1m"], 1, "--size-max"),
    ] {
        let (got, told) = bad(&dir, args);
        assert!(got == code && told.contains(wanted), "{args:?}: {got} {told}");
    }
    std::fs::write(dir.join("scratch/text"), "hello").unwrap();
    assert_eq!(bad(&dir, &["replay", "scratch/text", "--folder", "scratch"]).0, 1);
}
