//! A volume that glusterd manages: the translator is inserted, changed and removed with `gluster volume set`, and its
//! order and limits hold while that happens.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::shares::{Tenant, rates};
use crate::support::{
    Machine, PATIENCE, Process, apart, apart_within, figure, run_within, script, statedump, succeed, text_of_statedump,
    until, until_within,
};

/// The address that the machine has besides loopback.
const ADDRESS: &str = "10.99.0.1";
/// Longest wait for a heal, also on a loaded machine.
const HEAL_PATIENCE: Duration = Duration::from_secs(150);
/// Longest time for a test with many commands of `gluster`, or heals.
const LONG: Duration = Duration::from_secs(600);

/// A machine with glusterd.
struct Pool {
    machine: Machine,
    _glusterd: Process,
    mounts: u32,
}

impl Pool {
    fn start() -> Pool {
        let machine = Machine::new();
        let mut glusterd = Command::new("glusterd");
        let glusterd = Process::start(glusterd.args(["-N", "-p", "/run/glusterd.pid"]));
        until("glusterd", || Command::new("gluster").args(["pool", "list"]).output().unwrap().status.success());
        Pool { machine, _glusterd: glusterd, mounts: 0 }
    }

    fn gluster(&self, arguments: &[&str]) -> String {
        succeed(Command::new("gluster").arg("--mode=script").args(arguments))
    }

    /// The same of what may fail for a while.
    fn ask(&self, arguments: &[&str]) -> Output {
        run_within(Command::new("gluster").arg("--mode=script").args(arguments), HEAL_PATIENCE)
    }

    fn set(&self, volume: &str, option: &str, value: &str) {
        self.set_all(volume, &[(option, value)]);
    }

    /// Sets options, all at once.
    fn set_all(&self, volume: &str, options: &[(&str, &str)]) {
        let words = options.iter().flat_map(|(option, value)| [*option, *value]);
        self.gluster(&["volume", "set", volume].into_iter().chain(words).collect::<Vec<&str>>());
    }

    /// Sets options of the translator, all at once.
    fn schedule(&self, volume: &str, options: &[(&str, &str)]) {
        let quoted: Vec<(&str, String)> = options.iter().map(|(key, value)| (*key, format!("\"{value}\""))).collect();
        self.schedule_bare(volume, &quoted.iter().map(|(key, value)| (*key, value.as_str())).collect::<Vec<_>>());
    }

    /// The same without quotes, which glusterd minds when it makes new graphs.
    fn schedule_bare(&self, volume: &str, options: &[(&str, &str)]) {
        let named: Vec<(String, &str)> =
            options.iter().map(|(key, value)| (format!("user.xlator.impresario.{key}"), *value)).collect();
        self.set_all(volume, &named.iter().map(|(key, value)| (key.as_str(), *value)).collect::<Vec<_>>());
    }

    /// A started volume of one brick with the translator, without the client's caches, which would keep requests back.
    fn volume(&self, name: &str) {
        self.create(name, &[], &[name]);
    }

    /// The same of several bricks, in these folders, with more words about the volume.
    fn create(&self, name: &str, kind: &[&str], folders: &[&str]) {
        let brick = |folder: &&str| format!("{ADDRESS}:{}", self.machine.path(folder).display());
        let bricks: Vec<String> = folders.iter().map(brick).collect();
        let bricks = bricks.iter().map(String::as_str);
        let words = ["volume", "create", name].into_iter().chain(kind.iter().copied()).chain(bricks).chain(["force"]);
        self.gluster(&words.collect::<Vec<&str>>());
        let caches = ["write-behind", "open-behind", "quick-read", "io-cache", "read-ahead", "stat-prefetch"];
        let caches = caches.map(|cache| format!("performance.{cache}"));
        let mut options: Vec<(&str, &str)> = caches.iter().map(|cache| (cache.as_str(), "off")).collect();
        options.push(("user.xlator.impresario", "io-threads"));
        self.set_all(name, &options);
        self.gluster(&["volume", "start", name]);
    }

    fn mount(&mut self, volume: &str) -> (PathBuf, Process) {
        self.mounts += 1;
        let path = self.machine.path(&format!("mount{}", self.mounts));
        fs::create_dir(&path).unwrap();
        let mut client = Command::new("glusterfs");
        client.args(["-N", "-s", ADDRESS, "--volfile-id", volume, "-l", "/var/log/glusterfs/mount.log"]);
        let process = Process::start(client.arg(&path));
        until("the mount", || fs::read_to_string("/proc/mounts").unwrap().contains(path.to_str().unwrap()));
        until("its root", || fs::write(path.join(".mounted"), "").is_ok());
        (path, process)
    }

    /// Has a volume healed; whether nothing is left to heal in any of its bricks. While a brick is starting, or a heal takes the
    /// lock, `gluster` says that it failed.
    fn heals(&self, volume: &str, bricks: usize) -> bool {
        self.ask(&["volume", "heal", volume]);
        let info = self.ask(&["volume", "heal", volume, "info"]);
        let entries = String::from_utf8_lossy(&info.stdout).matches("Number of entries: 0\n").count();
        info.status.success() && entries == bricks
    }

    /// The process that serves a volume's only brick.
    fn brick(&self, volume: &str) -> u32 {
        self.brick_in(volume, "")
    }

    /// The process that serves a volume's brick in a folder.
    fn brick_in(&self, volume: &str, folder: &str) -> u32 {
        let files = fs::read_dir(Path::new("/run/gluster/vols").join(volume)).unwrap().flatten().map(|f| f.path());
        let ours = |file: &PathBuf| file.to_str().unwrap().ends_with(&format!("{folder}.pid"));
        let file = files.into_iter().find(ours).expect("a file with the brick's process");
        fs::read_to_string(file).unwrap().trim().parse().unwrap()
    }

    fn log(&self, volume: &str) -> String {
        let name = self.machine.path(volume).display().to_string();
        let name = name.trim_start_matches('/').replace('/', "-");
        let log = fs::read(format!("/var/log/glusterfs/bricks/{name}.log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }
}

/// One write passes; the next ones wait until the policy changes.
const NO_WRITES: [(&str, &str); 2] = [("policy", "tbf"), ("rules", "none: op=write {requests_per_s=0.001, burst=1}")];

#[test]
fn a_running_volume_is_changed_and_keeps_its_order() {
    apart("managed::inside_running_volume");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_running_volume() {
    let mut pool = Pool::start();
    pool.volume("plain");
    let mounts: Vec<(PathBuf, Process)> = (0..5).map(|_| pool.mount("plain")).collect();
    let brick = pool.brick("plain");
    let file = |mount: usize| mounts[mount].0.join("file");
    fs::write(file(0), vec![b'.'; 16_384]).unwrap();
    fs::write(mounts[4].0.join("other"), "other").unwrap();
    until("the first policy", || pool.log("plain").contains("policy auto, depth 16"));

    pool.schedule("plain", &NO_WRITES);
    until("the limit", || statedump(brick).get("policy").is_some_and(|p| p.starts_with("tbf ")));
    script(&mounts[0].0, "printf passes | dd of=file conv=notrunc status=none");
    // Two writes wait for the limit; truncate, though it has none, waits for the writes. All in processes of their own: closing a descriptor waits for its writes, and starting a program closes descriptors.
    let waiting = |count| until("a waiting request", || figure(&statedump(brick), "open_requests") == count);
    let start = |mount: usize, text: &str| {
        Process::start(Command::new("bash").args(["-euc", text]).current_dir(&mounts[mount].0))
    };
    let block = |digit, at| {
        format!(
            "printf '{digit}%.0s' {{1..4096}} | dd of=file bs=4096 iflag=fullblock seek={at} conv=notrunc status=none"
        )
    };
    let mut waiters = vec![start(0, &block(1, 1))];
    waiting(1);
    waiters.push(start(1, &block(2, 2)));
    waiting(2);
    waiters.push(start(3, "truncate -s 6000 file"));
    waiting(3);
    // Whoever has nothing to wait for does not wait: an fsync covers what its own descriptor has written.
    script(&mounts[2].0, "sync file");
    script(&mounts[4].0, "grep -qx other other && exec 3<>file 3<&-");
    // A change that makes no sense is named in the log and changes nothing.
    pool.schedule("plain", &[("rules", "none: op=writ {requests_per_s=1}")]);
    until("a refusal", || pool.log("plain").contains("option rules \"none: op=writ "));
    pool.schedule("plain", &[("depth", "5000")]);
    until("a refusal", || pool.log("plain").contains("'5000' in 'option depth 5000' is out of range"));
    let report = statedump(brick);
    assert!(report["policy"].contains("op=write "), "{report:?}");
    assert_eq!((figure(&report, "depth"), figure(&report, "open_requests")), (16, 3), "{report:?}");
    assert!(waiters.iter_mut().all(|w| w.0.try_wait().unwrap().is_none()), "something did not wait");

    pool.schedule("plain", &[("policy", "mlf"), ("rules", ""), ("depth", "3"), ("merge", "file")]);
    for waiter in &mut waiters {
        assert!(waiter.end(PATIENCE).expect("all end with the limit").success());
    }
    let report = statedump(brick);
    assert_eq!((report["policy"].as_str(), figure(&report, "depth")), ("mlf", 3), "{report:?}");
    // Both writes were done before the truncate: neither is there again behind it.
    let content = fs::read(file(1)).unwrap();
    assert_eq!(content.len(), 6000);
    assert_eq!((&content[..6], content[4096], content[5999]), (&b"passes"[..], b'1', b'1'));

    // Out of the way, and in it again.
    let requests = || figure(&statedump(brick), "requests");
    pool.schedule("plain", &[("pass-through", "on")]);
    let before = requests();
    until("the detour", || {
        let before = requests();
        fs::write(file(1), "x").unwrap();
        requests() == before
    });
    pool.schedule("plain", &[("pass-through", "off")]);
    until("the way back", || {
        fs::write(file(1), "x").unwrap();
        requests() > before + 1
    });
    // Metrics, as `kill -USR2` writes them.
    succeed(Command::new("kill").args(["-USR2", &brick.to_string()]));
    until("metrics", || {
        let files = fs::read_dir("/run/gluster/metrics").into_iter().flatten().flatten();
        let texts = files.map(|f| fs::read_to_string(f.path()).unwrap_or_default());
        texts.into_iter().any(|t| t.contains("plain-impresario.impresario.queue_ns_p99 "))
    });
    pool.gluster(&["volume", "stop", "plain"]);
}

#[test]
fn a_brick_is_detached_from_a_process_that_goes_on() {
    apart("managed::inside_detached_brick");
}

/// With multiplexing one process serves the bricks of several volumes: stopping a volume ends the translator's part of it,
/// not the process.
#[test]
#[ignore = "run by another test as a process"]
fn inside_detached_brick() {
    let mut pool = Pool::start();
    pool.gluster(&["volume", "set", "all", "cluster.brick-multiplex", "on"]);
    pool.volume("stays");
    pool.volume("goes");
    let (stays, goes) = (pool.mount("stays"), pool.mount("goes"));
    let process = pool.brick("stays");
    for round in 0..2 {
        until("the brick", || fs::write(goes.0.join("before"), "before").is_ok());
        pool.schedule("goes", &NO_WRITES);
        until("the limit", || pool.log("stays").matches("policy tbf").count() > round);
        let mut writer = Command::new("dd");
        writer.args(["if=/dev/zero", "of=queued", "bs=4k", "count=9", "conv=notrunc", "status=none"]);
        let mut writer = Process::start(writer.current_dir(&goes.0));
        until("a queued write", || text_of_statedump(process).contains("\nqueued_requests=1\n"));
        pool.gluster(&["volume", "stop", "goes", "force"]);
        let status = writer.end(PATIENCE).expect("the writer gets an error");
        assert!(!status.success(), "what is queued is not answered as done");
        fs::write(stays.0.join("after"), "after").unwrap();
        assert_eq!(pool.brick("stays"), process);
        assert!(Path::new("/proc").join(process.to_string()).exists());
        pool.schedule("goes", &[("policy", "none")]);
        pool.gluster(&["volume", "start", "goes"]);
    }
    until("the brick", || fs::read_to_string(goes.0.join("before")).is_ok_and(|text| text == "before"));
    assert_eq!(fs::read_to_string(stays.0.join("after")).unwrap(), "after");
    assert!(!pool.log("stays").contains("signal received"), "{}", pool.log("stays"));
}

/// Writes and verifies until [`end_load`].
fn verified_load(mount: &Path) -> Process {
    let fio = "fio --name=job --ioengine=libaio --size=4m --rw=randwrite --bsrange=4k-256k --iodepth=8 --numjobs=2 \
               --verify=crc32c --verify_fatal=1 --output=/dev/null";
    let load = format!("until [ -e stop ]; do {fio}; done");
    Process::start(Command::new("bash").args(["-euc", &load]).current_dir(mount))
}

fn end_load(load: &mut Process, mount: &Path) {
    fs::write(mount.join("stop"), "").unwrap();
    assert!(load.end(PATIENCE).expect("fio ends").success());
}

#[test]
fn a_running_volume_refuses_nonsense_and_follows_quick_changes() {
    if impresario_testing::require("fio") {
        apart_within("managed::inside_nonsense_on_a_running_volume", LONG);
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_nonsense_on_a_running_volume() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let mut pool = Pool::start();
    pool.volume("hostile");
    let (mount, _client) = pool.mount("hostile");
    let brick = pool.brick("hostile");
    let mut load = verified_load(&mount);
    let long = [b"/".as_slice(), &[b'x'; 3000]].concat();
    let no_text = b"\xff\xfe".as_slice();
    let is_refusal = |key: &str, line: &str| {
        let is_grave = line.contains("] E [") || (line.contains("] W [") && line.contains(": no requests are "));
        line.contains("impresario") && is_grave && line.contains(key)
    };
    pool.schedule("hostile", &[("policy", "wfq by=user")]);
    // Every option that can be changed, and what puts it right afterwards. Rules first: `mlf` does not look at them.
    for (key, right, wrong) in [
        ("rules", "\"\"", [b"nonsense".as_slice(), no_text]),
        ("policy", "\"mlf\"", [b"nonsense", &long]),
        ("merge", "\"client\"", [b"nonsense", &long]),
        ("job", "\"process\"", [b"-1", no_text]),
        ("trace", "\"off\"", [b"/dev/null/folder", &long]),
        ("prediction", "\"off\"", [b"/none", &long]),
        ("read-ahead", "\"64MB\"", [b"nonsense", b"99999999999999999999999"]),
        ("depth", "16", [b"nonsense", b"99999999999999999999999"]),
        ("internal-depth", "1", [b"nonsense", b"-1"]),
        ("queue-bytes", "1GB", [b"-1", b"99999999999999999999999"]),
        ("pass-through", "off", [b"nonsense", b"-1"]),
    ] {
        let mut reached = 0;
        for value in wrong {
            let before = pool.log("hostile").lines().count();
            let mut set = Command::new("gluster");
            set.args(["--mode=script", "volume", "set", "hostile", &format!("user.xlator.impresario.{key}")]);
            // glusterd may refuse it first.
            if run_within(set.arg(OsStr::from_bytes(value)), PATIENCE).status.success() {
                reached += 1;
                let said = format!("{key} is refused {:?}", String::from_utf8_lossy(&value[..value.len().min(30)]));
                until(&said, || pool.log("hostile").lines().skip(before).any(|line| is_refusal(key, line)));
            }
        }
        println!("{key}: {reached} of {} values reached the brick", wrong.len());
        assert!(reached > 0, "{key}: glusterd refused all values");
        assert!(load.0.try_wait().unwrap().is_none(), "{key}: the load has ended");
        assert_eq!(pool.brick("hostile"), brick, "{key}");
        assert_eq!(statedump(brick)["depth"], "16", "{key}");
        pool.schedule_bare("hostile", &[(key, right)]);
    }
    for n in 0..7_usize {
        let pick = |of: &[&'static str]| of[n % of.len()];
        pool.schedule(
            "hostile",
            &[
                ("policy", pick(&["none", "mlf", "sstf", "aioli", "wfq by=user", "auto", "fifo"])),
                ("merge", pick(&["off", "fd", "client", "file"])),
                ("job", pick(&["process", "owner"])),
                ("read-ahead", pick(&["0", "64MB"])),
                ("depth", pick(&["1", "4096", "3", "16", "2"])),
            ],
        );
    }
    until("the last change", || statedump(brick)["depth"] == "4096");
    end_load(&mut load, &mount);
    assert_eq!(pool.brick("hostile"), brick);
    until("the last request", || figure(&statedump(brick), "open_requests") == 0);
}

#[test]
fn a_client_switches_graphs_under_load() {
    if impresario_testing::require("fio") {
        apart_within("managed::inside_switched_graphs", LONG);
    }
}

/// Options of the volume that clients have translators for: each change gives them a new graph, with connections of its own, and
/// the bricks lose the clients of the old one with requests under way.
#[test]
#[ignore = "run by another test as a process"]
fn inside_switched_graphs() {
    let mut pool = Pool::start();
    pool.volume("switched");
    pool.schedule_bare("switched", &[("policy", "mlf"), ("depth", "1")]);
    let (mount, _client) = pool.mount("switched");
    let clients = || {
        let text = text_of_statedump(pool.brick("switched"));
        text.lines().filter(|line| line.starts_with("client[")).count()
    };
    let mut load = verified_load(&mount);
    let switches = || fs::read_to_string("/var/log/glusterfs/mount.log").unwrap().matches("switched to graph").count();
    for value in ["on", "off", "on"] {
        let switched = switches();
        pool.set("switched", "performance.read-ahead", value);
        until("the switch", || switches() > switched);
        assert!(load.0.try_wait().unwrap().is_none(), "{value}: the load has ended");
    }
    end_load(&mut load, &mount);
    until("the last request", || figure(&statedump(pool.brick("switched")), "open_requests") == 0);
    until("the clients of old graphs go", || {
        // A client leaves an old graph at a request.
        fs::write(mount.join("after"), "after").unwrap();
        assert_eq!(fs::read_to_string(mount.join("after")).unwrap(), "after");
        clients() == 1
    });
}

#[test]
fn a_replica_that_was_away_is_healed() {
    apart_within("managed::inside_healed_replica", LONG);
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_healed_replica() {
    let mut pool = Pool::start();
    pool.create("healed", &["replica", "2"], &["first", "second"]);
    pool.schedule("healed", &[("policy", "mlf"), ("depth", "2")]);
    let mount = pool.mount("healed");
    let file = mount.0.join("file");
    fs::write(&file, vec![b'a'; 3_000_000]).unwrap();
    let away = pool.brick_in("healed", "second");
    succeed(Command::new("kill").args(["-KILL", &away.to_string()]));
    let content: Vec<u8> = (0..5_000_000_u32).map(|n| (n % 251) as u8).collect();
    until("writing without the second brick", || fs::write(&file, &content).is_ok());
    assert_ne!(fs::read(pool.machine.path("second/file")).unwrap(), content);
    pool.gluster(&["volume", "start", "healed", "force"]);
    // GlusterFS looks for what to heal every ten minutes, or when it is told to and both bricks are connected.
    until_within("the second brick is healed", HEAL_PATIENCE, || {
        let bytes = || fs::read(pool.machine.path("second/file"));
        pool.heals("healed", 2) && bytes().is_ok_and(|bytes| bytes == content)
    });
    assert_eq!(fs::read(pool.machine.path("first/file")).unwrap(), content);
    assert_eq!(fs::read(&file).unwrap(), content);
    // What healed it is known for what it is, on the side that was read and on the side that was written.
    for folder in ["first", "second"] {
        let report = statedump(pool.brick_in("healed", folder));
        assert!(figure(&report, "internal_requests") > 0, "{folder}: {report:?}");
        assert_eq!(figure(&report, "open_requests"), 0, "{folder}: {report:?}");
    }
}

#[test]
fn arbiters_and_dispersed_volumes_keep_what_is_written_without_a_brick() {
    if impresario_testing::require("fio") {
        apart_within("managed::inside_other_volumes", LONG);
    }
}

/// Both at the same time, since most of it is waiting.
#[test]
#[ignore = "run by another test as a process"]
fn inside_other_volumes() {
    let mut pool = Pool::start();
    let kinds = [("arbiter", ["replica", "3", "arbiter", "1"]), ("dispersed", ["disperse", "3", "redundancy", "1"])];
    let mut volumes = kinds.map(|(name, kind)| {
        let folders = [0, 1, 2].map(|n| format!("{name}{n}"));
        pool.create(name, &kind, &folders.each_ref().map(String::as_str));
        pool.schedule_bare(name, &[("policy", "mlf"), ("depth", "1"), ("merge", "file")]);
        let (mount, client) = pool.mount(name);
        let load = verified_load(&mount);
        (name, folders, mount, client, load)
    });
    let requests = |name: &str, folder: &str| figure(&statedump(pool.brick_in(name, folder)), "requests");
    for (name, folders, ..) in &volumes {
        until("the load", || requests(name, &folders[1]) > 200);
        succeed(Command::new("kill").args(["-KILL", &pool.brick_in(name, &folders[1]).to_string()]));
        let before = requests(name, &folders[0]);
        until("the load goes on", || requests(name, &folders[0]) > before + 200);
    }
    for (name, folders, ..) in &volumes {
        pool.gluster(&["volume", "start", name, "force"]);
        until_within("the brick serves again", HEAL_PATIENCE, || requests(name, &folders[1]) > 0);
    }
    for (name, folders, mount, _client, load) in &mut volumes {
        end_load(load, mount);
        until_within("all is healed", HEAL_PATIENCE, || pool.heals(name, 3));
        for folder in folders {
            let report = statedump(pool.brick_in(name, folder));
            assert_eq!(figure(&report, "open_requests"), 0, "{name}: {report:?}");
        }
    }
}

#[test]
fn files_that_are_moved_to_a_new_brick_keep_their_bytes() {
    if impresario_testing::require("fio") {
        apart_within("managed::inside_rebalanced", LONG);
    }
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_rebalanced() {
    let mut pool = Pool::start();
    pool.create("moved", &[], &["moved0", "moved1"]);
    pool.schedule_bare("moved", &[("policy", "mlf"), ("depth", "1"), ("merge", "file")]);
    let (mount, _client) = pool.mount("moved");
    let content = |n: u32| (0..300_000 + n).map(|at| (at * 7 + at / 251 * n) as u8).collect::<Vec<u8>>();
    for n in 0..40 {
        fs::write(mount.join(format!("file{n}")), content(n)).unwrap();
    }
    let mut load = verified_load(&mount);
    let added = pool.machine.path("moved2");
    pool.gluster(&["volume", "add-brick", "moved", &format!("{ADDRESS}:{}", added.display()), "force"]);
    pool.gluster(&["volume", "rebalance", "moved", "start", "force"]);
    // Refused while the process that moves files has not begun.
    let status = || pool.ask(&["volume", "rebalance", "moved", "status"]).stdout;
    until("all is moved", || String::from_utf8_lossy(&status()).contains(" completed "));
    end_load(&mut load, &mount);
    let moved = (0..40).filter(|n| added.join(format!("file{n}")).metadata().is_ok_and(|file| file.len() > 0)).count();
    assert!(moved > 0, "nothing was moved");
    for n in 0..40 {
        assert!(fs::read(mount.join(format!("file{n}"))).unwrap() == content(n), "file{n}");
    }
    let internal = ["moved0", "moved1", "moved2"].map(|folder| {
        let report = statedump(pool.brick_in("moved", folder));
        assert_eq!(figure(&report, "open_requests"), 0, "{folder}: {report:?}");
        figure(&report, "internal_requests")
    });
    assert!(internal.iter().sum::<u64>() > 0, "{internal:?}");
}

#[test]
fn a_recorded_run_foretells_the_next_on_a_running_volume() {
    apart("managed::inside_recorded_runs");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_recorded_runs() {
    const BLOCK_BYTES: u64 = 64 << 10;
    const BLOCKS: u64 = 64;
    const FILE_BYTES: u64 = 2 * BLOCKS * BLOCK_BYTES;
    // Longer than a brick takes bytes for read lately.
    const READ_LATELY: Duration = Duration::from_millis(1100);
    let mut pool = Pool::start();
    pool.volume("runs");
    let (mount, _client) = pool.mount("runs");
    let traces = pool.machine.path("traces");
    let there = traces.to_str().unwrap();
    fs::write(mount.join("file"), vec![7; FILE_BYTES as usize]).unwrap();
    let report = |name: &str| figure(&statedump(pool.brick("runs")), name);
    // What reading every second block of the file in an order without a pattern, the same each time, makes the brick predict.
    let predicted = || {
        let before = report("read_ahead_predicted_bytes");
        script(
            &mount,
            "for i in {0..63}; do \
             dd if=file of=/dev/null iflag=direct bs=64k count=1 skip=$((2 * ((7 * i + 10 * i * i) % 64))) status=none; done",
        );
        report("read_ahead_predicted_bytes") - before
    };
    let set = |options: &[(&str, &str)]| pool.schedule("runs", options);
    let says = |line: &str| until(line, || pool.log("runs").contains(line));
    set(&[("policy", "fifo"), ("trace", there)]);
    says("requests are recorded there");
    let unforetold = predicted();
    until("the record", || report("traced_requests") >= BLOCKS);
    assert_eq!((report("untraced_requests"), report("predicted_requests")), (0, 0));
    set(&[("trace", "off"), ("prediction", there)]);
    until("the run", || report("predicted_requests") > 0);
    // Every time that it is made again. What was read within the last second is not predicted, whoever foretells it.
    for _ in 0..2 {
        std::thread::sleep(READ_LATELY);
        let foretold = predicted();
        assert!(foretold > BLOCKS / 2 * BLOCK_BYTES && foretold > 2 * unforetold, "{foretold} against {unforetold}");
    }
    // Traces that are no use: each is named, and nothing is foretold then.
    let trace = fs::read_dir(&traces).unwrap().next().unwrap().unwrap().path();
    let bytes = fs::read(&trace).unwrap();
    let bad = pool.machine.path("bad");
    fs::create_dir(&bad).unwrap();
    let (mut later, mut damaged) = (bytes.clone(), bytes.clone());
    later[7] += 1;
    damaged[bytes.len() / 2] ^= 0xff;
    let another = pool.machine.path("another");
    let mut run = impresario_trace::Trace::load(&trace).unwrap();
    run.header.command = "another brick".into();
    run.save(&another).unwrap();
    let another = fs::read(&another).unwrap();
    for (name, bytes, why) in [
        ("later", &later[..], "version"),
        ("damaged", &damaged, "at byte"),
        ("cut", &bytes[..bytes.len() - 3], "its end is missing"),
        ("not-one", b"whatever lies there", "not a trace"),
        ("another's", &another, "recorded by another brick, not by "),
    ] {
        let path = bad.join(name);
        fs::write(&path, bytes).unwrap();
        set(&[("prediction", path.to_str().unwrap())]);
        let option = format!("option prediction \"{}\": no requests are predicted", path.display());
        until(name, || pool.log("runs").lines().any(|line| line.contains(&option) && line.contains(why)));
        assert_eq!(report("predicted_requests"), 0, "{name}");
        // The brick serves as before.
        assert_eq!(fs::read(mount.join("file")).unwrap().len() as u64, FILE_BYTES);
        set(&[("prediction", there)]);
        until("the run again", || report("predicted_requests") > 0);
    }
    set(&[("prediction", "off")]);
    until("no run", || report("predicted_requests") == 0);
    set(&[("trace", "/dev/null/folder")]);
    says("no requests are recorded: /dev/null/folder");
    // A brick that stops ends its trace, and one that starts goes by it: files are known by their gfids.
    set(&[("trace", there)]);
    until("a second trace", || fs::read_dir(&traces).unwrap().count() == 2);
    predicted();
    pool.gluster(&["volume", "stop", "runs"]);
    set(&[("trace", "off"), ("prediction", there)]);
    pool.gluster(&["volume", "start", "runs"]);
    let brick = pool.brick("runs");
    until("both runs", || figure(&statedump(brick), "predicted_requests") >= BLOCKS);
    assert!(!pool.log("runs").contains("passed over"), "{}", pool.log("runs"));
}

/// Whoever doubles the weight of a tenant on a running volume doubles what it gets beside another.
#[test]
fn a_weight_that_is_doubled_doubles_the_share() {
    apart("managed::inside_doubled_weight");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_doubled_weight() {
    let mut pool = Pool::start();
    pool.volume("shares");
    pool.set("shares", "delay-gen.delay-percentage", "100");
    pool.set("shares", "delay-gen.delay-duration", "4000");
    pool.set("shares", "debug.delay-gen", "posix");
    pool.gluster(&["volume", "stop", "shares"]);
    pool.gluster(&["volume", "start", "shares"]);
    let (mount, _client) = pool.mount("shares");
    fs::set_permissions(&mount, fs::Permissions::from_mode(0o777)).unwrap();
    let (brick, names) = (pool.machine.path("shares"), ["first", "second"]);
    let rules =
        |weight: u64| format!("first: user=1001 {{quantum_bytes={}}}; rest: * {{quantum_bytes=65536}}", weight << 16);
    let share = |weight: u64| {
        pool.schedule(
            "shares",
            &[("policy", "wfq by=user"), ("rules", &rules(weight)), ("depth", "1"), ("read-ahead", "0")],
        );
        let set = format!("quantum_bytes={}", weight << 16);
        until("the weight", || statedump(pool.brick("shares")).get("policy").is_some_and(|p| p.contains(&set)));
        let [first, second] = rates(&brick, &names);
        println!("weight {weight}: {first:.1} and {second:.1} blocks a second");
        first / second
    };
    let writers = [1001, 1002].map(|user| {
        let name = names[user as usize - 1001];
        Tenant { name, user, group: user, mount: &mount }.write()
    });
    for weight in [1, 2, 1] {
        let share = share(weight);
        assert!((0.85..=1.15).contains(&(share / weight as f64)), "weight {weight}: {share}");
    }
    drop(writers);
}

#[test]
fn reading_ahead_is_switched_on_a_running_volume() {
    apart("managed::inside_switched_ahead");
}

#[test]
#[ignore = "run by another test as a process"]
fn inside_switched_ahead() {
    let mut pool = Pool::start();
    pool.volume("ahead");
    let (mount, _client) = pool.mount("ahead");
    let brick = pool.brick("ahead");
    fs::write(mount.join("file"), vec![7; 8 << 20]).unwrap();
    // What reading the whole file, of which the client keeps nothing, makes the brick predict.
    let predicted = || {
        let before = figure(&statedump(brick), "read_ahead_predicted_bytes");
        script(&mount, "dd if=file iflag=nocache count=0 status=none; cat file | cksum");
        figure(&statedump(brick), "read_ahead_predicted_bytes") - before
    };
    let set = |value: &str, reported: &str| {
        pool.schedule("ahead", &[("read-ahead", value)]);
        until("the change", || statedump(brick).get("read-ahead").is_some_and(|bytes| bytes == reported));
    };
    assert!(predicted() > 2 << 20, "nothing is read ahead where the translator has no options");
    for (policy, predicts) in [("none", false), ("fifo", true)] {
        pool.schedule("ahead", &[("policy", policy)]);
        until("the policy", || statedump(brick).get("policy").is_some_and(|p| p == policy));
        let predicted = predicted();
        assert!(if predicts { predicted > 2 << 20 } else { predicted == 0 }, "{policy}: {predicted}");
    }
    set("0", "0");
    assert_eq!(predicted(), 0);
    set("32MB", "33554432");
    assert!(predicted() > 2 << 20);
    // A refused value is named, and the old one stays.
    pool.schedule("ahead", &[("read-ahead", "1MB")]);
    until("the refusal", || pool.log("ahead").contains("option read-ahead 1048576 is refused"));
    assert_eq!(statedump(brick)["read-ahead"], "33554432");
    assert!(predicted() > 2 << 20);
}
