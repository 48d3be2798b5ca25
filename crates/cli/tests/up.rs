//! `impresario up`: it starts, reports its state and deaths, and leaves nothing running.

use std::collections::BTreeSet;
use std::path::Path;

use crate::support::{self, Process, pattern, run};
use impresario_config::Config;
use impresario_testing::until;
use rustix::process::Signal;

fn up(dir: &Path, more: &[&str]) -> Process {
    let words = ["up", "--dir", dir.to_str().unwrap()];
    let log = dir.with_extension("log");
    let _ = std::fs::remove_file(&log);
    let process = Process::start(words.iter().chain(more), &log);
    until("up says ready", || {
        assert!(!process.log().contains("did not start"), "{}", process.log());
        process.log().contains("ready: ")
    });
    process
}

/// Processes of this program that work on `config`: (process number, server's name).
fn servers_of(config: &Path) -> Vec<(i32, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|b| *b == 0).collect();
        if words.get(1) == Some(&&b"serve"[..]) && words.get(2) == Some(&config.as_os_str().as_encoded_bytes()) {
            found.push((pid, String::from_utf8_lossy(words[4]).into_owned()));
        }
    }
    found
}

#[test]
fn up_status_and_ctrl_c_leave_nothing_running() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("c");
    let mut up = up(&dir, &["--data-servers", "2", "--io-nodes", "1", "--data-policy", "mlf", "--io-policy", "hbrr"]);
    let path = dir.join("impresario.toml");
    let log = up.log();
    assert!(log.contains(&format!("wrote the configuration: {}", path.display())), "{log}");
    assert!(log.contains(&format!("impresario mount {} ", path.display())), "{log}");

    let ran = run(["status".as_ref(), path.as_os_str(), "--json".as_ref()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    let servers = told["servers"].as_array().unwrap();
    let policies: Vec<(&str, Option<&str>)> = servers
        .iter()
        .map(|s| (s["name"].as_str().unwrap(), s.pointer("/state/engine/policy/name").and_then(|p| p.as_str())))
        .collect();
    assert_eq!(policies, [("data.0", Some("mlf")), ("data.1", Some("mlf")), ("meta", None), ("io.0", Some("hbrr"))]);

    let ran = run(["status".as_ref(), path.as_os_str()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("server") && ran.out.contains("hbrr") && !ran.out.contains("DOES NOT ANSWER"), "{ran:?}");

    // A table of one's own is a file here and a text there.
    let explain = |json: &str| run(["explain".as_ref(), path.as_os_str(), json.as_ref()]);
    let table = base.path().join("table.toml");
    let rule = |condition, policy| {
        format!("[[rule]]\nname = \"for {policy}\"\n{condition}choice = [{{ policy = \"{policy}\" }}]\n")
    };
    let text = format!("version = 1\n{}{}", rule("reads = { from = 9.0 }\n", "fifo"), rule("", "sjf"));
    std::fs::write(&table, text).unwrap();
    let set = |server: &str, table: &std::path::Path| {
        let table = format!("table={}", table.display());
        run([
            "policy".as_ref(),
            "set".as_ref(),
            path.as_os_str(),
            "--server".as_ref(),
            server.as_ref(),
            "auto".as_ref(),
            table.as_ref(),
        ])
    };
    let ran = set("data.1", &base.path().join("no.toml"));
    assert!(ran.code == 2 && ran.err.contains("no.toml: cannot be read"), "{ran:?}");
    assert_eq!(set("data.1", &table).code, 0);
    let ran = run(["explain".as_ref(), path.as_os_str()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("data.0: mlf, as configured: nothing is chosen"), "{ran:?}");
    assert!(ran.out.contains("data.1: sjf\n  because       for sjf\n"), "{ran:?}");
    let told: serde_json::Value = serde_json::from_str(&explain("--json").out).unwrap();
    assert_eq!(told.pointer("/1/chosen/policy/name").and_then(|p| p.as_str()), Some("sjf"), "{told}");
    assert_eq!(told.pointer("/0/chosen"), Some(&serde_json::Value::Null), "{told}");

    assert_eq!(servers_of(&path).len(), 4);
    up.signal(Signal::INT);
    assert_eq!(up.wait().code(), Some(0), "{}", up.log());
    assert_eq!(servers_of(&path), []);

    // Again: the same file, the same ports; SIGTERM ends it as well.
    let text = std::fs::read_to_string(&path).unwrap();
    let mut again = self::up(&dir, &["--data-servers", "2"]);
    assert!(again.log().contains("using the existing configuration"), "{}", again.log());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    again.signal(Signal::TERM);
    assert_eq!(again.wait().code(), Some(0), "{}", again.log());
    assert_eq!(servers_of(&path), []);
}

#[test]
fn servers_end_with_up_even_when_it_is_killed() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("c");
    let mut up = up(&dir, &["--data-servers", "1", "--io-nodes", "1"]);
    let path = dir.join("impresario.toml");
    assert_eq!(servers_of(&path).len(), 3);
    up.kill();
    until("the servers end", || servers_of(&path).is_empty());
}

#[test]
fn a_died_server_is_reported_and_may_be_started_by_hand() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("c");
    let mut up = up(&dir, &["--data-servers", "2", "--io-nodes", "0"]);
    let path = dir.join("impresario.toml");
    let (pid, _) = servers_of(&path).into_iter().find(|(_, name)| name == "data.1").unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    until("the death is reported", || up.log().contains("server data.1 was killed by signal 9; the end of its log:"));
    assert!(up.log().contains(&format!("impresario serve {} --name data.1", path.display())), "{}", up.log());
    let left: BTreeSet<String> = servers_of(&path).into_iter().map(|(_, name)| name).collect();
    assert_eq!(left, BTreeSet::from(["data.0".to_string(), "meta".to_string()]));

    let by_hand = Process::start(
        ["serve".as_ref(), path.as_os_str(), "--name".as_ref(), "data.1".as_ref()],
        &base.path().join("d1"),
    );
    until("all answer", || run(["status".as_ref(), path.as_os_str()]).code == 0);
    drop(by_hand);
    up.signal(Signal::INT);
    assert_eq!(up.wait().code(), Some(1), "a death shows in the exit status: {}", up.log());
    assert_eq!(servers_of(&path), []);
}

#[test]
fn a_cluster_may_lie_in_a_folder_of_any_name() {
    use std::os::unix::ffi::OsStrExt;
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join(std::ffi::OsStr::from_bytes(b"a b\n\xff"));
    let path = dir.join("impresario.toml");
    let words = ["up", "--data-servers", "1", "--io-nodes", "1", "--dir"].map(std::ffi::OsStr::new);
    let mut up = Process::start(words.into_iter().chain([dir.as_os_str()]), &base.path().join("log"));
    until("it says ready", || up.log().contains("ready: "));
    let words = |words: &[&str]| run(words.iter().map(std::ffi::OsStr::new).chain([path.as_os_str()]));
    for command in
        [&["status", "--json"][..], &["store", "show", "--json"], &["key", "new"], &["key", "show", "--json"]]
    {
        let ran = words(command);
        assert!(ran.code == 0 && !ran.err.contains("panicked"), "{command:?}: {ran:?}");
    }
    up.signal(Signal::INT);
    assert_eq!(up.wait().code(), Some(0), "{}", up.log());
    assert!(!up.log().contains("panicked"), "{}", up.log());
}

#[test]
fn a_cluster_that_runs_is_not_started_twice() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("c");
    let mut up = up(&dir, &["--data-servers", "2", "--io-nodes", "1"]);
    let ran = run(["up".as_ref(), "--dir".as_ref(), dir.as_os_str()]);
    assert!(ran.code == 1 && ran.err.contains("the cluster did not start: "), "{ran:?}");
    assert!(ran.err.contains("in use") && !ran.out.contains("ready: "), "{ran:?}");
    assert_eq!(run(["status".as_ref(), dir.join("impresario.toml").as_os_str()]).code, 0, "the first one goes on");
    up.signal(Signal::INT);
    assert_eq!(up.wait().code(), Some(0), "{}", up.log());
}

/// Data written before Ctrl-C is there after the next start.
#[test]
fn data_outlive_the_cluster() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("c");
    let path = dir.join("impresario.toml");
    let data = pattern(1, 1, 0, 3_000_000);
    for round in 0..2 {
        let mut up = up(&dir, &["--data-servers", "3", "--io-nodes", "1"]);
        let client = support::client(&Config::load(&path).unwrap(), round);
        if round == 0 {
            support::write_file(&client, "kept", &data);
        } else {
            assert!(support::read_file(&client, "kept") == data, "the file changed");
        }
        drop(client);
        up.signal(Signal::INT);
        assert_eq!(up.wait().code(), Some(0), "{}", up.log());
    }
}
