//! `impresario bench` and `impresario demo` as a user starts them: results, exit statuses, nothing left behind.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use impresario_client::KeyRole;
use impresario_config::Security;
use impresario_sched::PolicySpec;
use impresario_testing::{eventually, page_cache, require, until};
use impresario_transport::key_file_name;
use rustix::process::Signal;

use crate::support::{Cluster, Process, client, run};

const PROGRAM: &str = env!("CARGO_BIN_EXE_impresario");

fn impresario(words: &[&str]) -> Output {
    Command::new(PROGRAM).args(words).stdin(Stdio::null()).output().unwrap()
}

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_quick_demonstration_tells_table_page_and_json() {
    // The runs below the kernel empty it.
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir().unwrap();
    let (page, runs) = (dir.path().join("demo.html"), dir.path().join("demo.json"));
    let output = impresario(&["demo", "--quick", "--html", page.to_str().unwrap(), "--json", runs.to_str().unwrap()]);
    assert!(output.status.success(), "{}", told(&output));
    let below_the_kernel = require("root") && require("fuse") && require("mkfs.ext4");
    let count = if below_the_kernel { 30 } else { 24 };
    assert_eq!(told(&output).contains("Left out: "), !below_the_kernel, "{}", told(&output));
    assert!(told(&output).contains("MODELLED"));
    assert!(told(&output).contains(&format!("Every byte of all {count} runs was verified")), "{}", told(&output));
    let runs = json(&runs);
    let runs = runs["runs"].as_array().unwrap();
    assert_eq!(runs.len(), count);
    for run in runs {
        assert_eq!(run["verified"], true);
        assert!(run["makespan_s"].as_f64().unwrap() > 0.0 && run["mean_batch_bytes"].as_f64().unwrap() > 0.0);
        assert!(["arrival", "elevator"].contains(&run["disk_order"].as_str().unwrap()));
    }
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("<svg") && html.contains("modelled") && !html.contains("http"));
}

#[test]
fn an_injected_fault_is_wrong_data_and_exit_status_1() {
    let words =
        ["bench", "run", "--op", "write", "--size", "64k", "--apps", "1", "--processes", "2", "--io-nodes", "1"];
    let output = impresario(&words);
    assert!(output.status.success(), "{}", told(&output));
    assert!(told(&output).contains("verified: 128 KiB"), "{}", told(&output));
    for fault in ["drop", "swap", "stale"] {
        let output = impresario(&[&words[..], &["--inject", fault]].concat());
        assert_eq!(output.status.code(), Some(1), "{fault}: {}", told(&output));
        assert!(told(&output).contains("WRONG DATA"), "{fault}: {}", told(&output));
    }
}

#[test]
fn a_comparison_writes_every_run_and_its_verdicts() {
    let dir = tempfile::tempdir().unwrap();
    let (file, page) = (dir.path().join("c.json"), dir.path().join("c.html"));
    let output = impresario(&[
        "bench",
        "compare",
        "fifo,hbrr,twins+window_us=2000",
        "--on",
        "io",
        "--op",
        "read",
        "--size",
        "64k",
        "--apps",
        "1",
        "--pairs",
        "2",
        "--max-pairs",
        "2",
        "--no-worse",
        "1000000",
        "--json",
        file.to_str().unwrap(),
        "--html",
        page.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", told(&output));
    let outcome = json(&file);
    assert_eq!(outcome["trials"].as_array().unwrap().len(), 6);
    assert_eq!(outcome["claims"].as_array().unwrap().len(), 2);
    assert!(outcome["claims"].as_array().unwrap().iter().all(|c| c["verdict"] == "holds"), "{}", outcome["claims"]);
    assert!(std::fs::read_to_string(&page).unwrap().contains("twins+window_us=2000"));
}

#[test]
fn different_applications_run_side_by_side() {
    let output = impresario(&[
        "bench",
        "run",
        "--io-nodes",
        "0",
        "--processes",
        "2",
        "--size",
        "64k",
        "--app",
        "op=write,request-size=32k,loops=2",
        "--app",
        "op=read,pattern=random,request-size=4k,processes=1,pause=200ms",
    ]);
    assert!(output.status.success(), "{}", told(&output));
    let text = told(&output);
    assert!(
        text.contains("2 processes, contiguous write of 32 KiB, 128 KiB each; 1 processes, random read of 4 KiB"),
        "{text}"
    );
    assert!(text.contains("64 KiB each, pauses of 0.20 s"), "{text}");
    assert!(text.contains("verified: ") && !text.contains("WRONG"), "{text}");
}

#[test]
fn mistakes_are_told_before_anything_starts() {
    for (words, wanted) in [
        (&["bench", "compare", "none,best"][..], "no policy \"best\""),
        (&["bench", "compare", "none"], "at least two"),
        (&["bench", "compare", "none,mlf", "--baseline", "fifo"], "none of the systems"),
        (&["bench", "run", "--device", "tape"], "device model tape"),
        (&["bench", "run", "--cold"], "--cold needs --dir"),
        (&["bench", "run", "--cold", "--dir", "/tmp", "--device", "disk"], "--device is disk"),
        (&["bench", "run", "--pattern", "zigzag"], "strided"),
        (&["bench", "run", "--request-size", "0"], "at least 1"),
        (&["bench", "run", "--apps", "3", "--start-at", "0s,1s"], "one for each"),
        (&["bench", "run", "--app", "op=write,colour=red"], "there is no key colour"),
        (&["bench", "run", "--app", "op=write", "--app", "processes=some"], "no whole number"),
        (&["bench", "run", "--app", "op=write", "--apps", "2"], "cannot be used with"),
        (&["bench", "idle", "--config", "x.toml"], "--config cannot be used"),
        (&["bench", "run", "--config", "x.toml", "--device", "disk"], "cannot be used with"),
        (&["bench", "run", "--config", "x.toml", "--data-policy", "mlf"], "cannot be used with"),
        (&["bench", "compare", "none,mlf", "--config", "x.toml", "--data-servers", "2"], "cannot be used with"),
        // What is to be written is tried before anything is measured.
        (&["bench", "run", "--json", "/nowhere/run.json"], "create it first"),
        (&["bench", "compare", "none,mlf", "--html", "/nowhere/page.html"], "create it first"),
        (&["bench", "idle", "--json", "/"], "it is a directory"),
        (&["demo", "--html", "/nowhere/page.html"], "create it first"),
        (&["sim", "run", "scenario.toml", "--csv", "/nowhere/runs.csv"], "create it first"),
        (&["assist", "compare", "--json", "/nowhere/a.json", "hints", "--", "true"], "create it first"),
        (&["trace", "replay", "run.imt", "--folder", "/tmp", "--json", "/nowhere/r.json"], "create it first"),
    ] {
        let output = impresario(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", told(&output));
        assert!(told(&output).contains(wanted), "{words:?}: {}", told(&output));
    }
}

#[test]
fn ctrl_c_leaves_no_folder_and_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let parent = dir.path().to_str().unwrap();
    let words = ["bench", "run", "--device", "disk", "--size", "64m", "--dir", parent];
    let mut child = Command::new(PROGRAM).args(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let config = eventually("a cluster is started", || {
        let folder = std::fs::read_dir(dir.path()).unwrap().next().map(|entry| entry.unwrap().path());
        folder.map(|f| f.join("impresario.toml")).filter(|f| f.exists())
    });
    // It is at work then.
    until("the servers answer", || impresario(&["status", config.to_str().unwrap()]).status.success());
    let pid = rustix::process::Pid::from_child(&child);
    // Twice, as `timeout` does it, to the program and to its group.
    for _ in 0..2 {
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = eventually("it ends", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(1));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a folder is left");
    let servers = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok).filter(|entry| {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&command).contains(config.to_str().unwrap())
    });
    assert_eq!(servers.count(), 0, "a server is left");
}

/// The names in the root of a cluster, and what its servers say of their policies.
fn as_it_is(cluster: &Cluster) -> (usize, String) {
    let shown = run([OsStr::new("policy"), OsStr::new("show"), cluster.path.as_os_str()]);
    assert_eq!(shown.code, 0, "{shown:?}");
    (client(&cluster.config, 1).list("/").unwrap().len(), shown.out)
}

/// `bench` on a running cluster, with its output in a file.
fn bench_on(config: &Path, words: &[&str]) -> Process {
    let words = [&["bench"][..], words, &["--config", config.to_str().unwrap()]].concat();
    Process::start(words, &config.with_file_name("bench.log"))
}

#[test]
fn a_running_cluster_is_as_before_after_a_measurement_and_after_ctrl_c() {
    let cluster = Cluster::start(2, 1, |config| config.data[1].policy = PolicySpec::named("mlf"));
    let config = cluster.path.to_str().unwrap();
    let set = run(["policy", "set", config, "--server", "data.0", "fifo", "merge=on"]);
    assert_eq!(set.code, 0, "{set:?}");
    let before = as_it_is(&cluster);
    assert!(before.0 == 0 && before.1.contains("fifo merge=on") && before.1.contains("mlf"), "{before:?}");
    let small = ["--apps", "1", "--processes", "2", "--size", "64k", "--op", "read"];
    let compare = ["compare", "none,sjf", "--pairs", "1"];
    let mut whole = bench_on(&cluster.path, &[&compare[..], &small].concat());
    assert!(whole.wait().success(), "{}", whole.log());
    assert_eq!(as_it_is(&cluster), before);

    let large = ["--apps", "1", "--processes", "1", "--size", "64m", "--request-size", "4k", "--op", "read"];
    let mut measuring = bench_on(&cluster.path, &[&["compare", "none,sjf", "--pairs", "1000"][..], &large].concat());
    until("it has switched the policies", || as_it_is(&cluster).1 != before.1);
    measuring.signal(Signal::INT);
    measuring.wait();
    assert_eq!(as_it_is(&cluster), before, "{}", measuring.log());

    let mut preparing = bench_on(&cluster.path, &["run", "--apps", "1", "--processes", "1", "--size", "1g"]);
    until("it makes files", || as_it_is(&cluster).0 == 1);
    preparing.signal(Signal::INT);
    assert_eq!(preparing.wait().code(), Some(1), "{}", preparing.log());
    assert_eq!(as_it_is(&cluster), before, "{}", preparing.log());

    // Whose processes the servers are is not known.
    let file = cluster.dir.path().join("run.json");
    let mut told = bench_on(&cluster.path, &[&["run", "--json", file.to_str().unwrap()][..], &small].concat());
    assert!(told.wait().success(), "{}", told.log());
    assert!(json(&file)["cases"][0]["results"][0]["server_cpu_s"].is_null());
    assert!(!told.log().contains("CPU of servers"), "{}", told.log());
}

#[test]
fn who_may_not_reset_statistics_is_refused_before_files_are_made() {
    let mut cluster = Cluster::describe(1, 0, |config| config.cluster.security = Security::Key);
    assert_eq!(run(["key", "new", cluster.path.to_str().unwrap()]).code, 0);
    cluster.begin();
    // A machine that has the key of clients only.
    let theirs = cluster.dir.path().join("theirs");
    std::fs::create_dir_all(theirs.join("keys")).unwrap();
    let client_key = key_file_name(KeyRole::Client);
    std::fs::copy(cluster.config.cluster.key_dir.join(&client_key), theirs.join("keys").join(&client_key)).unwrap();
    let config = theirs.join("impresario.toml");
    std::fs::copy(&cluster.path, &config).unwrap();
    for words in [&["run"][..], &["compare", "none,sjf"]] {
        let mut refused = bench_on(&config, words);
        assert_eq!(refused.wait().code(), Some(1), "{}", refused.log());
        assert!(refused.log().contains("admin"), "{}", refused.log());
        assert_eq!(client(&cluster.config, 1).list("/").unwrap().len(), 0, "files are left: {}", refused.log());
    }
}

/// Mounts and loop devices of modelled disks whose folders lie below a folder.
fn kernel_disks_below(dir: &Path) -> Vec<String> {
    let loops = Command::new("losetup").args(["--all", "--noheadings", "--output", "BACK-FILE"]).output().unwrap();
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let lines = format!("{}{mounts}", String::from_utf8_lossy(&loops.stdout));
    lines.lines().filter(|line| line.contains(dir.to_str().unwrap())).map(str::to_string).collect()
}

#[test]
fn a_modelled_disk_below_the_kernel_is_measured_and_removed_even_after_a_kill() {
    if !require("root") || !require("fuse") || !require("mkfs.ext4") {
        return;
    }
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir().unwrap();
    let parent = dir.path().to_str().unwrap();
    let bed = ["bench", "run", "--device", "kernel-disk", "--data-servers", "1", "--io-nodes", "0", "--dir", parent];
    let load = ["--pattern", "contiguous", "--apps", "1", "--processes", "2", "--request-size", "64k"];

    let long = [&bed[..], &load, &["--size", "256m", "--op", "write"]].concat();
    let mut killed = Command::new(PROGRAM).args(long).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("a disk is made", || {
        assert!(killed.try_wait().unwrap().is_none(), "it ended before its disk was made");
        kernel_disks_below(dir.path()).len() >= 3
    });
    killed.kill().unwrap();
    killed.wait().unwrap();

    let file = dir.path().join("run.json");
    let short = [&bed[..], &load, &["--size", "256k", "--op", "read", "--json", file.to_str().unwrap()]].concat();
    let output = impresario(&short);
    assert!(output.status.success(), "{}", told(&output));
    let run = json(&file);
    let servers = &run["cases"][0]["results"][0]["servers"];
    // The cache is cold: everything comes from the disk, and the kernel's read-ahead makes larger requests.
    assert!(servers["at_disk"]["bytes"].as_u64().unwrap() >= 512 << 10, "{servers}");
    assert!(servers["device"]["requests"].as_u64().unwrap() > 0, "{servers}");
    assert_eq!(kernel_disks_below(dir.path()), [] as [String; 0]);
    let left = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let disks = left.filter(|name| name.to_string_lossy().starts_with("impresario-kernel-disk-"));
    assert_eq!(disks.count(), 0, "the folder of a disk is left");
}

/// Control groups of a benchmark's servers.
fn groups_of(pid: u32) -> Vec<std::path::PathBuf> {
    let parents = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"];
    let entries = parents.iter().flat_map(|parent| std::fs::read_dir(parent).into_iter().flatten().flatten());
    let name = format!("impresario-bench-{pid}-");
    entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains(&name)).collect()
}

#[test]
fn servers_with_little_memory_make_room_and_leave_no_groups_behind() {
    if !require("root") {
        return;
    }
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bed = ["bench", "run", "--data-servers", "1", "--io-nodes", "0", "--pattern", "contiguous", "--apps", "1"];
    let load = ["--processes", "2", "--request-size", "256k", "--server-memory", "64m"];
    let place = ["--dir", dir.path().to_str().unwrap()];
    let words = |more: &[&str]| -> Vec<String> {
        [&bed[..], &load, &place, more].concat().into_iter().map(str::to_string).collect()
    };
    let bench = |more: &[&str]| Command::new(PROGRAM).args(words(more)).stdin(Stdio::null()).output().unwrap();

    let file = dir.path().join("run.json");
    let output = bench(&["--size", "96m", "--op", "read", "--json", file.to_str().unwrap()]);
    if told(&output).contains("this machine has no such control groups") {
        return impresario_testing::skip("cgroups", told(&output));
    }
    assert!(output.status.success(), "{}", told(&output));
    assert!(told(&output).contains("memory of each data server: 64 MiB; reclaimed "), "{}", told(&output));
    let memory = json(&file)["cases"][0]["results"][0]["servers"]["memory"].clone();
    assert_eq!(memory["limit_bytes"], 64 << 20, "{memory}");
    assert!(memory["reclaims"].as_u64().unwrap() > 0, "192 MiB were read with 64 MiB of memory: {memory}");

    // Ctrl-C, and what no program can clean up after: the next one does.
    for signal in [Signal::INT, Signal::KILL] {
        let long = Command::new(PROGRAM)
            .args(words(&["--size", "8g", "--op", "write"]))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut long = long.unwrap();
        let pid = long.id();
        until("the servers' group is made", || {
            assert!(long.try_wait().unwrap().is_none(), "it ended before");
            !groups_of(pid).is_empty()
        });
        rustix::process::kill_process(rustix::process::Pid::from_child(&long), signal).unwrap();
        long.wait().unwrap();
        if signal == Signal::KILL {
            // Its servers end with it, a moment later.
            until("the group of a killed benchmark is removed by the next one", || {
                let next = bench(&["--size", "256k", "--op", "write"]);
                assert!(next.status.success(), "{}", told(&next));
                groups_of(pid).is_empty()
            });
        }
        assert_eq!(groups_of(pid), [] as [std::path::PathBuf; 0]);
    }
}

#[test]
fn a_cold_run_reads_from_the_device_of_its_folder() {
    if !require("root") {
        return;
    }
    let _cache = page_cache::emptied();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if let Err(why) = impresario_workload::programs::BlockDevice::under(dir.path()) {
        return impresario_testing::skip("block device", why);
    }
    let file = dir.path().join("run.json");
    let output = impresario(&[
        "bench",
        "run",
        "--cold",
        "--data-servers",
        "1",
        "--io-nodes",
        "0",
        "--pattern",
        "contiguous",
        "--apps",
        "1",
        "--processes",
        "2",
        "--request-size",
        "64k",
        "--size",
        "1m",
        "--op",
        "read",
        "--dir",
        dir.path().to_str().unwrap(),
        "--json",
        file.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", told(&output));
    let servers = &json(&file)["cases"][0]["results"][0]["servers"];
    assert!(servers["at_disk"]["bytes"].as_u64().unwrap() >= 2 << 20, "{servers}");
    assert!(servers["at_disk"]["requests"].as_u64().unwrap() > 0, "{servers}");
}
