//! Nobody hears what is said: the log is on a full disk, its reader has gone, the terminal was closed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::support::{
    Cluster, IMPRESARIO, Process, Stopped, catches, client, pattern, read_file, run, run_command, write_file,
};
use impresario_testing::{PATIENCE, require, until};
use rustix::process::Signal;

/// The program with standard error on a disk that is full.
fn with_a_full_log() -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" 2>/dev/full", IMPRESARIO]);
    command
}

/// The program with the end of its terminal not ignored, whatever the tests run under.
fn with_a_terminal() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", IMPRESARIO]);
    command
}

#[test]
fn servers_whose_log_cannot_be_written_serve() {
    let mut cluster = Cluster::describe(1, 1, |_| {});
    impresario_server::folders::make_all(&cluster.config).unwrap();
    let servers: Vec<(String, String)> =
        cluster.config.servers().map(|server| (server.name().into(), server.address().into())).collect();
    servers.iter().for_each(|(name, _)| cluster.launch_by(&mut with_a_full_log(), name));
    servers.iter().for_each(|(name, _)| cluster.await_answer(name));
    // Each is worth a line of the log: of the connection's thread, and, where nothing is said, of the thread that accepts.
    let peers = servers.iter().flat_map(|(_, address)| {
        [&b"GET / HTTP/1.1\r\n\r\n"[..], b""].map(|says| {
            let mut peer = TcpStream::connect(address).unwrap();
            peer.write_all(says).unwrap();
            peer
        })
    });
    for mut peer in peers.collect::<Vec<_>>() {
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = peer.read_to_end(&mut Vec::new()); // until the server closes it
    }
    let client = client(&cluster.config, 1);
    let data = pattern(1, 1, 0, 300_000);
    write_file(&client, "file", &data);
    assert!(read_file(&client, "file") == data);
    drop(client);
    for (name, _) in servers.iter().rev() {
        let server = cluster.server(name);
        server.signal(Signal::TERM);
        assert_eq!(server.wait().code(), Some(0), "{name}");
    }
}

#[test]
fn up_whose_log_cannot_be_written_keeps_the_servers_that_are_left() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("c");
    let mut command = with_a_full_log();
    command.args(["up", "--data-servers", "2", "--io-nodes", "0", "--dir"]).arg(&dir);
    let mut up = Process::start_command(&mut command, &base.path().join("log"));
    until("it says ready", || up.log().contains("ready: "));
    let config = impresario_config::Config::load(&dir.join("impresario.toml")).unwrap();
    let access = impresario_client::Access::of(&config, impresario_client::KeyRole::Client);
    let state = |name: &str| -> Option<serde_json::Value> {
        let address = config.server(name).unwrap().address();
        serde_json::from_str(&impresario_client::admin::status(&access, address, Duration::from_secs(2)).ok()?).ok()
    };
    let died = rustix::process::Pid::from_raw(state("data.1").unwrap()["pid"].as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(died, Signal::KILL).unwrap();
    until("its death is noticed", || rustix::process::test_kill_process(died).is_err());
    let left = state("data.0").unwrap();
    // By now it has told of the death, or failed to.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(state("data.0").map(|now| now["pid"].clone()), Some(left["pid"].clone()), "{}", up.log());
    up.signal(Signal::INT);
    assert_eq!(up.wait().code(), Some(1), "a death shows in the exit status: {}", up.log());
}

/// As when the connection to a machine breaks at which somebody has started a server.
#[test]
fn servers_outlive_their_terminal_only_under_nohup() {
    let mut cluster = Cluster::describe(1, 0, |_| {});
    impresario_server::folders::make_all(&cluster.config).unwrap();
    cluster.launch_by(Command::new("nohup").arg(IMPRESARIO), "data.0");
    cluster.launch_by(&mut with_a_terminal(), "meta");
    ["data.0", "meta"].iter().for_each(|name| cluster.await_answer(name));
    ["data.0", "meta"].iter().for_each(|name| cluster.server(name).signal(Signal::HUP));
    assert_eq!(cluster.server("meta").wait().code(), Some(0));
    let kept = cluster.server("data.0");
    assert!(kept.child.try_wait().unwrap().is_none() && !kept.log().contains("stopping"), "{}", kept.log());
    assert!(cluster.state("data.0")["uptime_s"].is_number());
    cluster.server("data.0").signal(Signal::TERM);
    assert_eq!(cluster.server("data.0").wait().code(), Some(0));
}

/// As the units say that come with the program: `Type=notify`, and `ExecReload=/bin/kill -HUP $MAINPID`.
#[test]
fn a_service_manager_hears_that_a_server_serves_and_may_have_it_reload() {
    let mut cluster = Cluster::describe(1, 1, |_| {});
    impresario_server::folders::make_all(&cluster.config).unwrap();
    let socket = cluster.dir.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    for name in ["data.0", "meta", "io.0"] {
        cluster.launch_by(Command::new(IMPRESARIO).env("NOTIFY_SOCKET", &socket), name);
        let mut told = [0; 4096];
        let len = manager.recv(&mut told).unwrap_or_else(|error| panic!("{name} says nothing: {error}"));
        assert!(told[..len].split(|b| *b == b'\n').any(|line| line == b"READY=1"), "{:?}", &told[..len]);
        assert!(cluster.state(name)["uptime_s"].is_number(), "{name} answers when it says so");
        cluster.server(name).signal(Signal::HUP);
    }
    let client = client(&cluster.config, 1);
    write_file(&client, "file", b"served");
    assert_eq!(read_file(&client, "file"), b"served");
    drop(client);
    for name in ["io.0", "meta", "data.0"] {
        let log = cluster.server(name).log();
        assert!(!log.contains("stopping"), "{log}");
        cluster.server(name).signal(Signal::TERM);
        assert_eq!(cluster.server(name).wait().code(), Some(0), "{name}");
    }
}

fn mounted(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == dir.to_str())
}

/// A mount whose process has ended is worse than none: every call at it fails until somebody unmounts it.
#[test]
fn no_dead_mount_is_left_behind() {
    if !require("fuse") {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let dir = cluster.dir.path().join("mnt");
    std::fs::create_dir(&dir).unwrap();
    let mount = |command: &mut Command| {
        command.arg("mount").arg(&cluster.path).arg(&dir);
        Process::start_command(command, &cluster.dir.path().join("mount.log"))
    };

    // No log can be written: said by the command that was to return when it is mounted.
    let ran = run_command(
        Command::new(IMPRESARIO).args(["mount", "-d", "--log-file", "/nonexistent/log"]).arg(&cluster.path).arg(&dir),
    );
    assert!(ran.code == 1 && ran.err.contains("/nonexistent/log") && ran.out.is_empty(), "{ran:?}");
    assert!(!mounted(&dir));

    // The terminal is closed.
    let mut process = mount(&mut with_a_terminal());
    until("it is mounted", || mounted(&dir));
    until("it answers signals", || catches(process.pid(), Signal::HUP.as_raw()));
    process.signal(Signal::HUP);
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
    assert!(!mounted(&dir));

    // The same under `nohup`; and while it is in use with nobody to be told, Ctrl-C twice.
    let mut command = Command::new("nohup");
    command.args(["sh", "-c", "exec \"$0\" \"$@\" >/dev/full 2>&1", IMPRESARIO]);
    let mut process = mount(&mut command);
    until("it is mounted", || mounted(&dir));
    until("it answers signals", || catches(process.pid(), Signal::INT.as_raw()));
    process.signal(Signal::HUP);
    let held = std::fs::File::create(dir.join("held")).unwrap();
    process.signal(Signal::INT);
    std::thread::sleep(Duration::from_millis(500));
    assert!(mounted(&dir) && process.child.try_wait().unwrap().is_none());
    std::fs::write(dir.join("x"), "y").unwrap();
    process.signal(Signal::INT);
    assert!(process.wait().code().is_some() && !mounted(&dir));
    drop(held);
}

/// A service manager sends SIGTERM once, and SIGKILL later.
#[test]
fn a_mount_in_use_ends_with_sigterm() {
    if !require("fuse") {
        return;
    }
    let mut cluster = Cluster::start(1, 0, |config| config.cluster.request_timeout_ms = 120_000);
    let dir = cluster.dir.path().join("mnt");
    std::fs::create_dir(&dir).unwrap();
    write_file(&client(&cluster.config, 1), "file", &pattern(1, 1, 0, 100_000));
    let mount = |cluster: &Cluster, log: &str| {
        let mut command = Command::new(IMPRESARIO);
        let process =
            Process::start_command(command.arg("mount").arg(&cluster.path).arg(&dir), &cluster.dir.path().join(log));
        until("it is mounted", || mounted(&dir));
        until("it answers signals", || catches(process.pid(), Signal::TERM.as_raw()));
        process
    };

    // What is in use only for a moment is waited for.
    let mut process = mount(&cluster, "moment.log");
    let held = std::fs::File::create(dir.join("held")).unwrap();
    process.signal(Signal::TERM);
    until("it says so", || process.log().contains("unmounted anyway in 5 s"));
    (&held).write_all(b"to the end").unwrap();
    drop(held);
    assert_eq!(process.wait().code(), Some(0), "{}", process.log());
    assert!(!mounted(&dir) && !process.log().contains("fails"), "{}", process.log());
    assert_eq!(read_file(&client(&cluster.config, 1), "held"), b"to the end");

    // What stays in use is not; nor a server that does not answer.
    for is_silent in [false, true] {
        let mut process = mount(&cluster, &format!("silent-{is_silent}.log"));
        let held = std::fs::File::create(dir.join("held")).unwrap();
        let stopped = is_silent.then(|| Stopped::stop(&mut cluster, "data.0"));
        let mut reader = Command::new("cat").arg(dir.join("file")).stdout(std::process::Stdio::null()).spawn().unwrap();
        let begun = std::time::Instant::now();
        process.signal(Signal::TERM);
        assert!(process.wait().code().is_some() && begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        assert!(!mounted(&dir) && process.log().contains("still in use"), "{}", process.log());
        assert!((&held).write_all(b"x").is_err());
        assert_eq!(reader.wait().unwrap().success(), !is_silent);
        drop(stopped);
    }
}

/// Who wants to unmount is often who has lost the servers.
#[test]
fn a_mount_is_unmounted_at_once_while_no_server_answers() {
    if !require("fuse") {
        return;
    }
    let mut cluster = Cluster::start(1, 0, |_| {});
    let dir = cluster.dir.path().join("mnt");
    std::fs::create_dir(&dir).unwrap();
    for more in [&[][..], &["--lazy"]] {
        let ran = run(["mount".as_ref(), "-d".as_ref(), cluster.path.as_os_str(), dir.as_os_str()]);
        assert!(ran.code == 0 && mounted(&dir), "{ran:?}");
        ["data.0", "meta"].iter().for_each(|name| cluster.kill(name));
        let begun = std::time::Instant::now();
        let ran = run_command(Command::new(IMPRESARIO).arg("umount").args(more).arg(&dir));
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
        // A request that no server answers would take 20 s.
        assert!(!mounted(&dir) && begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        ["data.0", "meta"].iter().for_each(|name| cluster.restart(name));
    }
    let ran = run(["umount".as_ref(), std::ffi::OsStr::new("/proc")]);
    assert!(ran.code == 1 && ran.err.contains("/proc is not a mounted cluster"), "{ran:?}");
}

#[test]
fn a_mount_is_unmounted_by_a_link_to_it() {
    if !require("fuse") {
        return;
    }
    let cluster = Cluster::start(1, 0, |_| {});
    let [dir, link, other] = ["mnt", "link", "other"].map(|name| cluster.dir.path().join(name));
    std::fs::create_dir(&dir).unwrap();
    std::os::unix::fs::symlink("mnt", &link).unwrap();
    std::os::unix::fs::symlink(&link, &other).unwrap();
    for is_dead in [false, true] {
        let ran = run(["mount".as_ref(), "-d".as_ref(), cluster.path.as_os_str(), other.as_os_str()]);
        assert!(ran.code == 0 && mounted(&dir), "{ran:?}");
        if is_dead {
            for entry in std::fs::read_dir("/proc").unwrap().flatten() {
                let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
                let words: Vec<&[u8]> = words.split(|b| *b == 0).collect();
                let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
                if words.contains(&&b"--background"[..]) && words.contains(&other.as_os_str().as_encoded_bytes()) {
                    let pid = rustix::process::Pid::from_raw(pid.unwrap()).unwrap();
                    rustix::process::kill_process(pid, Signal::KILL).unwrap();
                }
            }
            until("it is dead", || std::fs::read_dir(&dir).is_err());
        }
        let ran = run(["umount".as_ref(), other.as_os_str()]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
        assert!(!mounted(&dir) && link.is_symlink());
    }
}
