//! User mistakes in configuration, command line, ports and directories. Each gets one clear line and an exit status.

use std::net::TcpListener;
use std::process::Command;

use crate::support::{Cluster, IMPRESARIO, Process, run, run_command};

#[test]
fn config_check_names_every_mistake_and_exits_2() {
    let cluster = Cluster::describe(2, 1, |_| {});
    let ran = run(["config".as_ref(), "check".as_ref(), cluster.path.as_os_str()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("good: 2 data servers, 1 I/O nodes"), "{ran:?}");

    let text = std::fs::read_to_string(&cluster.path).unwrap();
    let bad = text.replace("stripe_bytes = 65536", "stripe_byte = 65536");
    let bad = bad.replacen("policy = \"auto\"", "policy = \"fido\"", 1);
    let line = 1 + bad.lines().position(|line| line.starts_with("stripe_byte =")).unwrap();
    std::fs::write(&cluster.path, bad).unwrap();
    let ran = run(["config".as_ref(), "check".as_ref(), cluster.path.as_os_str()]);
    assert_eq!((ran.code, ran.err.lines().count()), (2, 2), "{ran:?}");
    assert!(ran.err.starts_with(&format!("{}:{line}:1: unknown key stripe_byte", cluster.path.display())), "{ran:?}");
    assert!(ran.err.contains("did you mean stripe_bytes?") && ran.err.contains("did you mean fifo?"), "{ran:?}");

    // A server does not start with such a file either, and says the same.
    let ran = run(["serve".as_ref(), cluster.path.as_os_str(), "--name".as_ref(), "data.0".as_ref()]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("did you mean stripe_bytes?"), "{ran:?}");
}

#[test]
fn a_configuration_that_is_not_there_is_named() {
    for words in [&["status", "/nonexistent.toml"][..], &["serve", "/nonexistent.toml", "--name", "x"]] {
        let ran = run(words);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.starts_with("/nonexistent.toml: cannot be read: No such file"), "{ran:?}");
    }
}

/// A unit does not start what ended with status 2: that is for what a person must put right.
#[test]
fn a_configuration_that_cannot_be_read_now_is_no_wrong_one() {
    // Its first page is nobody's.
    let ran = run(["serve", "/proc/self/mem", "--name", "x"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.starts_with("/proc/self/mem: cannot be read: Input/output error"), "{ran:?}");
    assert_eq!(run(["serve", "/proc/self", "--name", "x"]).code, 2, "a folder");
}

#[test]
fn an_interval_of_nothing_is_refused() {
    let cluster = Cluster::describe(1, 0, |_| {});
    for every in ["0s", "1us"] {
        let ran = run(["status".as_ref(), cluster.path.as_os_str(), "--watch".as_ref(), every.as_ref()]);
        assert!(ran.code == 2 && ran.err.contains("give at least 10ms"), "{ran:?}");
    }
}

#[test]
fn an_unknown_server_is_answered_with_those_there_are() {
    let cluster = Cluster::describe(2, 1, |_| {});
    let ran = run(["serve".as_ref(), cluster.path.as_os_str(), "--name".as_ref(), "data1".as_ref()]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("did you mean data.1?") && ran.err.contains("data.0, data.1, meta, io.0"), "{ran:?}");
}

#[test]
fn a_port_in_use_names_the_address_and_the_remedy() {
    let cluster = Cluster::describe(1, 1, |_| {});
    impresario_server::folders::make_all(&cluster.config).unwrap();
    for name in ["data.0", "meta", "io.0"] {
        let address = cluster.config.server(name).unwrap().address().to_string();
        let _held = TcpListener::bind(&address).unwrap();
        let ran = run(["serve".as_ref(), cluster.path.as_os_str(), "--name".as_ref(), name.as_ref()]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains(&address) && ran.err.contains("in use"), "{ran:?}");
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    // Below a file even root cannot create a directory.
    let cluster = Cluster::describe(1, 0, |config| {
        config.data[0].dir = "a-file/data".into();
        config.meta.dir = "a-file/meta".into();
    });
    std::fs::write(cluster.dir.path().join("a-file"), "").unwrap();
    for (name, folder) in [("data.0", "a-file/data"), ("meta", "a-file/meta")] {
        let more = ["--name", name, "--cluster", "0000000000000001"].map(std::ffi::OsStr::new);
        let ran = run(["store".as_ref(), "init".as_ref(), cluster.path.as_os_str()].into_iter().chain(more));
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains(folder) && ran.err.contains("Not a directory"), "{ran:?}");
    }
}

#[test]
fn up_names_the_folder_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a-file");
    std::fs::write(&file, "").unwrap();
    let ran = run(["up".as_ref(), "--dir".as_ref(), file.join("cluster").as_os_str()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("cannot create the directory") && ran.err.contains("a-file/cluster"), "{ran:?}");
}

#[test]
fn up_refuses_flags_that_contradict_the_file() {
    let cluster = Cluster::describe(2, 1, |_| {});
    let dir = cluster.dir.path().as_os_str();
    let ran = run(["up".as_ref(), "--dir".as_ref(), dir, "--data-servers".as_ref(), "3".as_ref()]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(
        ran.err.contains("--data-servers 3 contradicts") && ran.err.contains("impresario.toml, which has 2"),
        "{ran:?}"
    );
}

#[test]
fn up_stops_and_shows_the_log_when_a_server_cannot_start() {
    let cluster = Cluster::describe(2, 1, |_| {});
    let _held = TcpListener::bind(&cluster.config.data[1].address).unwrap();
    let ran = run(["up".as_ref(), "--dir".as_ref(), cluster.dir.path().as_os_str()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("the cluster did not start: server data.1 ended with exit status 1"), "{ran:?}");
    assert!(ran.err.contains("in use"), "{ran:?}");
    // The other servers are gone: their ports are free.
    TcpListener::bind(&cluster.config.data[0].address).unwrap();
    TcpListener::bind(&cluster.config.meta.address).unwrap();
}

#[test]
fn policies_that_cannot_be_are_refused_before_anything_changes() {
    let cluster = Cluster::describe(2, 1, |_| {});
    let set =
        |words: &[&str]| run_command(Command::new(IMPRESARIO).args(["policy", "set"]).arg(&cluster.path).args(words));
    for (words, says) in [
        (&["--server", "io.0", "twinz"][..], "there is no policy \"twinz\""),
        (&["--server", "data.0", "twins"], "one lane"),
        (&["--server", "io.0", "twins", "window_us=0"], "window_us"),
        (&["--server", "io.0", "twins", "window_us"], "write key=value"),
        (&["--server", "meta", "fifo"], "tbf and none only"),
        (&["--server", "meta", "tbf", "rules=a: * {bytes_per_s=1}"], "must have requests_per_s"),
        (&["fifo"], "no server is named"),
        (&["--server", "io.7", "fifo"], "no server is named io.7"),
    ] {
        let ran = set(words);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(says), "{ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
    }
}

#[test]
fn status_shows_servers_that_do_not_answer_and_exits_1() {
    let mut cluster = Cluster::describe(2, 0, |_| {});
    impresario_server::folders::make_all(&cluster.config).unwrap();
    cluster.launch("data.0");
    cluster.await_answer("data.0");
    let ran = run(["status".as_ref(), cluster.path.as_os_str()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(ran.out.matches("DOES NOT ANSWER").count(), 2, "{ran:?}");
    let ran = run(["status".as_ref(), "--json".as_ref(), cluster.path.as_os_str()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    let answers: Vec<bool> =
        told["servers"].as_array().unwrap().iter().map(|s| s["answers"].as_bool().unwrap()).collect();
    assert_eq!(answers, [true, false, false], "{told}");
    // Another one answers at the address of data.1, and something that says nothing at that of the metadata server.
    let silent = TcpListener::bind(&cluster.config.meta.address).unwrap();
    let (first, rest) = cluster.config.data.split_first_mut().unwrap();
    std::mem::swap(&mut first.address, &mut rest[0].address);
    cluster.rewrite();
    let ran = run(["status".as_ref(), cluster.path.as_os_str()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("DOES NOT ANSWER: data.0 answers there; correct the address of data.1"), "{ran:?}");
    let mut reasons = ran.out.lines().filter_map(|line| Some(line.split_once("DOES NOT ANSWER: ")?.1));
    assert!(reasons.all(|why| !why.starts_with([' ', '('])), "a server without a name: {ran:?}");
    drop(silent);
}

#[test]
fn a_server_ends_with_the_process_that_started_it() {
    let cluster = Cluster::describe(1, 0, |_| {});
    let log = cluster.dir.path().join("log");
    // A parent that is not ours: the server must refuse to run.
    let mut process = Process::start(
        [
            "serve".as_ref(),
            cluster.path.as_os_str(),
            "--name".as_ref(),
            "data.0".as_ref(),
            "--parent".as_ref(),
            "1".as_ref(),
        ],
        &log,
    );
    assert_eq!(process.wait().code(), Some(1), "{}", process.log());
    assert!(process.log().contains("that started this server has ended"), "{}", process.log());
}
