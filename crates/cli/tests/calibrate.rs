//! `impresario calibrate` as a user starts it: on a directory, on a modelled data server, and its use by a server.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Cluster, IMPRESARIO, Process, Ran, client, run, run_command, write_file};
use impresario_config::Calibration;
use impresario_config::calibration::{self, Described, Method, Pattern, Point, PointOp, Raw, Scope};
use impresario_device::{DeviceParams, LinearCost, Op};
use impresario_sched::{Nanos, Op as SchedOp, PolicySpec};
use impresario_testing::eventually;
use impresario_workload::cpu::MachineTimes;

fn calibrate(words: &[&str]) -> Ran {
    run_command(Command::new(IMPRESARIO).arg("calibrate").args(words))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A directory in memory if the system has one.
fn memory() -> tempfile::TempDir {
    if Path::new("/dev/shm").is_dir() {
        tempfile::tempdir_in("/dev/shm").unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

#[test]
fn a_folder_is_measured_shown_and_written_and_nothing_is_left() {
    let (dir, out) = (memory(), tempfile::tempdir().unwrap());
    let file = |name: &str| out.path().join(name);
    let (cal, page, json) = (file("c.toml"), file("c.html"), file("c.json"));
    let words = [text(dir.path()), "--max-seconds", "3", "--size", "16m", "--sizes", "4k,64k,1m", "-o", text(&cal)];
    let all = [&words[..], &["--html", text(&page), "--json", text(&json)]].concat();
    let mut ran = calibrate(&all);
    // A busy machine is rightly refused; a moment later it may succeed.
    for _ in 0..7 {
        if ran.code == 0 || !ran.err.contains("refused (") {
            break;
        }
        assert_eq!(entries(dir.path()), 0, "something is left in the folder");
        ran = calibrate(&all);
    }
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains("left"), "progress tells the time that is left: {}", ran.err);
    for wanted in ["random read", "sequential write", "random mixed", "2 streams", "Fit: ", "1 MiB", "Written to"] {
        assert!(ran.out.contains(wanted), "{wanted} is missing:\n{}", ran.out);
    }
    assert_eq!(entries(dir.path()), 0, "something is left in the folder");
    let read = Calibration::load(&cal).unwrap_or_else(|e| panic!("{e}"));
    if dir.path().starts_with("/dev/shm") {
        assert_eq!(read.device.scope, Scope::Memory);
        assert!(ran.out.contains("Times are of MEMORY"), "{}", ran.out);
    }
    assert_eq!((read.fit.len(), read.raw.points.len()), (4, 4 * 3 + 3 * 4));
    assert!(read.method.took_s < 8.0, "{}", read.method.took_s);
    assert!(read.raw.points.iter().all(|p| p.samples >= 5 && p.median_ns > 0));
    let curve = read.curve(PointOp::Read, Pattern::Random, 1);
    assert!(curve[0].median_ns < curve[2].median_ns, "1 MiB takes longer than 4 KiB");
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("<polyline") && !html.contains("http"));
    let as_json: Calibration = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(as_json, read);

    // It can be shown again, and is not overwritten by accident.
    let shown = calibrate(&["--show", text(&cal)]);
    assert_eq!(shown.code, 0, "{shown:?}");
    assert!(ran.out.starts_with(&shown.out), "{}", shown.out);
    let again = calibrate(&words);
    assert_eq!(again.code, 2, "{again:?}");
    assert!(again.err.contains("already exists") && again.err.contains("--overwrite"), "{}", again.err);
}

/// On a disk with other load a refusal is a correct result too; leftover files are not.
#[test]
fn a_folder_on_a_device_is_measured_past_the_page_cache() {
    let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let cal = out.path().join("c.toml");
    let words =
        [text(dir.path()), "--max-seconds", "3", "--size", "16m", "--sizes", "4k,1m", "--sync", "-o", text(&cal)];
    let ran = calibrate(&words);
    assert_eq!(entries(dir.path()), 0, "something is left in the folder");
    if ran.code == 0 {
        let read = Calibration::load(&cal).unwrap();
        assert!(read.method.synchronous_writes);
        assert_ne!(read.device.scope, Scope::Modelled);
        assert!(ran.out.contains(read.device.scope.explain()), "{}", ran.out);
    } else {
        assert!(ran.code == 1 && ran.err.contains("refused ("), "{ran:?}");
        assert!(!cal.exists(), "a refused calibration was written");
    }
}

#[test]
fn signals_leave_nothing_behind() {
    for (signal, code) in [(rustix::process::Signal::INT, Some(1)), (rustix::process::Signal::KILL, None)] {
        let (dir, out) = (memory(), tempfile::tempdir().unwrap());
        let cal = out.path().join("c.toml");
        let words = [
            "calibrate",
            text(dir.path()),
            "--size",
            "64m",
            "--max-seconds",
            "600",
            "--spread",
            "0.1",
            "-o",
            text(&cal),
        ];
        let mut process = Process::start(words, &out.path().join("log"));
        let fds = PathBuf::from(format!("/proc/{}/fd", process.pid()));
        eventually("the scratch file is open", || {
            let mut open = std::fs::read_dir(&fds).ok()?.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
            open.find(|to| to.starts_with(dir.path()) && to.to_string_lossy().ends_with("(deleted)"))
        });
        process.signal(signal);
        assert_eq!(process.wait().code(), code, "{}", process.log());
        assert_eq!(entries(dir.path()), 0, "a scratch file is left");
        assert!(!cal.exists());
    }
}

/// A line of the model's own parameters and one fitted to times that a client saw agree within this part. The measured
/// one has the spread of some 40 random seeks a point, and network and server in it.
const TOLERANCE: f64 = 0.25;
/// Where other programs leave less of the processors idle, requests wait for them: a measurement may be too slow, by up to
/// this many times the model, but not too fast.
const IDLE_MIN: f64 = 0.2;
const BUSY_TIMES_MAX: f64 = 10.0;

/// A fast disk of 15,000 turns a minute, so that many requests fit into the time of a test: 5.5 ms + 4.1 ns a byte.
fn disk() -> DeviceParams {
    DeviceParams {
        rpm: 15_000,
        seek_track_ms: 0.4,
        seek_average_ms: 3.4,
        seek_full_ms: 7.0,
        write_settle_ms: 0.5,
        ..DeviceParams::default()
    }
}

/// The ends of a calibration's lines of random requests, as parts of what the model's own parameters give.
fn ends(read: &Calibration) -> Vec<f64> {
    let one = |op, own: LinearCost| {
        let fit = read.fit.iter().find(|f| (f.op, f.pattern) == (op, Pattern::Random)).unwrap();
        [4096, 1 << 20].map(|size| fit.ns(size) / own.ns(size) as f64)
    };
    let reads = one(PointOp::Read, LinearCost::of(&disk(), Op::Read));
    let writes = one(PointOp::Write, LinearCost::of(&disk(), Op::Write));
    reads.into_iter().chain(writes).collect()
}

/// Objects of a data server's folder, wherever in it they are.
fn objects(dir: &Path) -> usize {
    let inside = |entry: std::fs::DirEntry| match entry.file_type().unwrap().is_dir() {
        true => objects(&entry.path()),
        false => usize::from(entry.metadata().unwrap().len() > 100),
    };
    std::fs::read_dir(dir).unwrap().map(|entry| inside(entry.unwrap())).sum()
}

#[test]
fn a_modelled_data_server_is_measured_and_its_calibration_changes_ttp() {
    let mut cluster = Cluster::start(1, 0, |config| {
        config.device.insert("disk".into(), disk());
        config.data[0].device = Some("disk".into());
    });
    let assumed = cluster.state("data.0");
    assert_eq!(assumed["engine"]["cost"]["source"], "disk model");
    assert_eq!(assumed["engine"]["cost"]["correct"], false);

    let cal = cluster.dir.path().join("c.toml");
    let config = cluster.path.clone();
    let mut words = vec![text(&config), "--server", "data.0", "--max-seconds", "20", "--sizes", "4k,256k,1m"];
    words.extend(["-o", text(&cal), "--overwrite"]);
    let measure = || {
        let before = MachineTimes::now().unwrap();
        let ran = calibrate(&words);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.out.contains("MODELLED"), "{}", ran.out);
        let is_busy = MachineTimes::now().unwrap().idle_since(&before).is_some_and(|idle| idle < IDLE_MIN);
        (Calibration::load(&cal).unwrap(), is_busy)
    };
    let is_near = |read: &Calibration, most: f64| ends(read).iter().all(|part| (1.0 - TOLERANCE..most).contains(part));
    let (mut read, mut is_busy) = measure();
    for _ in 0..2 {
        if !is_near(&read, 1.0 + TOLERANCE) {
            (read, is_busy) = measure();
        }
    }
    let most = if is_busy { BUSY_TIMES_MAX } else { 1.0 + TOLERANCE };
    assert!(is_near(&read, most), "{:?} of the model, busy {is_busy}: {:?}", ends(&read), read.fit);
    assert_eq!(read.device.scope, Scope::Modelled);
    // Sequential reads are streamed: far below a seek.
    assert!(read.curve(PointOp::Read, Pattern::Sequential, 1)[0].median_ns < 3_000_000);
    let data = cluster.dir.path().join("data.0");
    assert_eq!(objects(&data.join("objects")), 0, "the scratch object is left");

    // The server takes it on at its next start.
    let with =
        std::fs::read_to_string(&config).unwrap().replace("device = \"disk\"", "device = \"disk\"\ncost = \"c.toml\"");
    std::fs::write(&config, &with).unwrap();
    let check = run(["config", "check", text(&config)]);
    assert_eq!(check.code, 0, "{check:?}");
    cluster.kill("data.0");
    cluster.restart("data.0");
    let state = cluster.state("data.0");
    let cost = &state["engine"]["cost"];
    assert!(cost["source"].as_str().unwrap().contains("c.toml"), "{cost}");
    assert_eq!(cost["correct"], true);
    let model = read.cost_model("c.toml").unwrap();
    assert_ne!(cost["read"]["ttp_ns"], assumed["engine"]["cost"]["read"]["ttp_ns"]);
    for pair in cost["read"]["ttp_ns"].as_array().unwrap() {
        let ttp = model.ttp(SchedOp::Read, pair[0].as_u64().unwrap());
        assert_eq!(Nanos(pair[1].as_u64().unwrap()), ttp, "{cost}");
    }
    // Use corrects it, and the status says so.
    write_file(&client(&cluster.config, 1), "/x", &[7; 3 << 20]);
    assert_eq!(objects(&data.join("objects")), 1, "one file has one object");
    let observed = cluster.state("data.0")["engine"]["cost"]["write"]["observed"].as_u64().unwrap();
    assert!(observed > 0, "nothing was observed");
    let status = run(["status", text(&config)]);
    assert!(
        status.out.contains("data.0: cost model: calibration") && status.out.contains("writes ×"),
        "{}",
        status.out
    );

    // A damaged file is one line that names it, the place and the remedy; nothing starts with it.
    let damaged = std::fs::read_to_string(&cal).unwrap().replacen("size_bytes =     4096", "size_bytes = \"4k\"", 1);
    std::fs::write(&cal, damaged).unwrap();
    let check = run(["config", "check", text(&config)]);
    let key_line = with.lines().position(|l| l.starts_with("cost =")).unwrap() + 1;
    assert_eq!((check.code, check.err.lines().count()), (2, 1), "{check:?}");
    assert!(check.err.starts_with(&format!("{}:{key_line}:", config.display())), "{}", check.err);
    assert!(check.err.contains("c.toml:") && check.err.contains("4k"), "{}", check.err);
    cluster.kill("data.0");
    let started = run(["serve", text(&config), "--name", "data.0"]);
    assert_eq!(started.code, 1, "{started:?}");
    let line = started.err.lines().find(|l| l.starts_with("impresario: ")).unwrap_or_default();
    assert!(line.contains("data.0: its cost model: ") && line.contains("c.toml:"), "{}", started.err);
}

/// A disk that serves up to 16 requests at once.
fn deep_disk() -> Calibration {
    let point = |(op, streams, size_bytes): (PointOp, u32, u64)| Point {
        op,
        pattern: Pattern::Random,
        streams,
        size_bytes,
        median_ns: 1_000_000,
        mean_ns: 1_000_000 * u64::from(streams.max(16)) / 16,
        spread_percent: 1.0,
        samples: 100,
    };
    let curves = [PointOp::Read, PointOp::Write].map(|op| [4096, 1 << 20].map(|size| point((op, 1, size))));
    let deep = [2, 4, 8, 16, 32, 64].map(|streams| point((PointOp::Read, streams, 4096)));
    let notes = Vec::new();
    Calibration {
        format: calibration::FORMAT.into(),
        version: calibration::VERSION,
        device: Described {
            what: "a disk".into(),
            scope: Scope::Device,
            file_system: None,
            block_device: None,
            model: None,
            rotational: None,
            host: "here".into(),
            measured_at: "2026-11-28T23:00:00Z".into(),
        },
        method: Method {
            region_bytes: 1 << 30,
            synchronous_writes: false,
            spread_goal_percent: 5.0,
            max_s: 60.0,
            took_s: 41.5,
            notes,
        },
        fit: Vec::new(),
        raw: Raw { points: curves.into_iter().flatten().chain(deep).collect() },
    }
}

/// Of what was configured, or is modelled, a measurement changes nothing.
#[test]
fn a_server_hands_over_as_many_requests_as_its_device_profits_from() {
    let dir = tempfile::tempdir().unwrap();
    let cal = dir.path().join("c.toml");
    std::fs::write(&cal, deep_disk().to_toml()).unwrap();
    let cluster = Cluster::start(4, 0, |config| {
        config.device.insert("disk".into(), disk());
        config.data.iter_mut().for_each(|data| data.policy = PolicySpec::named("fifo"));
        config.data[1..].iter_mut().for_each(|data| data.cost = Some(cal.clone()));
        config.data[2].in_flight_requests = 5;
        config.data[3].device = Some("disk".into());
    });
    let depths = [0, 1, 2, 3].map(|n| {
        let state = cluster.state(&format!("data.{n}"));
        state["engine"]["lanes"][0]["limit_batches"].as_u64().unwrap()
    });
    assert_eq!(depths, [32, 16, 5, 1]);
}

#[test]
fn writes_that_stay_in_the_drive_are_refused_and_sync_measures_them() {
    let cluster = Cluster::start(1, 0, |config| {
        let cached = DeviceParams { write_cache: true, ..disk() };
        config.device.insert("disk".into(), cached);
        config.data[0].device = Some("disk".into());
        config.cluster.request_timeout_ms = 30_000;
    });
    let (config, cal) = (cluster.path.clone(), cluster.dir.path().join("c.toml"));
    let words = [text(&config), "--server", "data.0", "--max-seconds", "15", "--sizes", "4k,256k", "-o", text(&cal)];
    let ran = calibrate(&words);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("refused (writes stayed in a cache)") && ran.err.contains("--sync"), "{}", ran.err);
    assert!(!cal.exists(), "a refused calibration was written");
    let ran = calibrate(&[&words[..], &["--sync"]].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    let write = Calibration::load(&cal).unwrap().curve(PointOp::Write, Pattern::Random, 1)[0];
    assert!(write.median_ns > 2_500_000, "a write to the platter takes a seek: {write:?}");
}

#[test]
fn mistakes_are_told_before_anything_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("c.toml");
    let cluster = Cluster::describe(1, 1, |_| ());
    let config = text(&cluster.path);
    for (words, code, wanted) in [
        (&["/nonexistent"][..], 1, "name a folder on the device"),
        (&[config], 1, "is not a folder"),
        (&[text(dir.path()), "--sizes", "4k"], 2, "2 to 64 different sizes"),
        (&[text(dir.path()), "--sizes", "4k,5000"], 2, "multiples of 4k"),
        (&[text(dir.path()), "--spread", "90"], 2, "between 0.1 and 50 percent"),
        (&[text(dir.path()), "--max-seconds", "0"], 2, "0 is not in 1..=86400"),
        (&[text(dir.path()), "--size", "1m"], 1, "too small for requests of 16 MiB: allow 64 MiB with --size"),
        (&[config, "--server", "data.9"], 2, "no server is named data.9"),
        (&[config, "--server", "io.0"], 2, "io.0 is not a data server"),
        (&[config, "--server", "data.0"], 1, "is it running?"),
        (&[config, "--server", "data.0", "--sizes", "4k,16m"], 1, "max_payload_bytes"),
        (&["--show", config], 2, "is not a calibration"),
        (&["--show", "/nonexistent"], 2, "cannot be read"),
        (
            &[text(dir.path()), "--html", "/nonexistent/x.html"],
            2,
            "there is no directory /nonexistent; create it first",
        ),
        (&[], 2, "TARGET"),
    ] {
        let output = ["-o", text(&out)];
        let ran = calibrate(&[words, if words.contains(&"--show") { &[] } else { &output }].concat());
        assert_eq!(ran.code, code, "{words:?}: {ran:?}");
        assert!(ran.err.contains(wanted), "{words:?}: {}", ran.err);
        assert!(!out.exists());
    }
}
