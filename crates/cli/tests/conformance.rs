//! `impresario conformance`: exit status, output, and what it refuses.

use crate::support::{Process, run};

#[test]
fn a_good_folder_passes_and_is_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let ran =
        run(["conformance", path, "--seconds", "0", "--only", "rename", "--only", "shutdown", "--seed", "9", "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&report["passed"], &report["seed"]), (&true.into(), &9.into()), "{report}");
    let outcomes: Vec<_> = report["checks"].as_array().unwrap().iter().map(|c| (&c["name"], &c["outcome"])).collect();
    assert_eq!(outcomes, [(&"rename".into(), &"pass".into()), (&"shutdown".into(), &"skipped".into())]);
    assert!(ran.err.contains("1/2 rename: "), "progress goes to standard error: {ran:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let ran = run(["conformance", path, "--seconds", "0", "--only", "append"]);
    assert!(ran.code == 0 && ran.out.contains("pass     append") && ran.out.contains("1 passed, 0 failed"), "{ran:?}");
}

#[test]
fn a_check_that_fails_gives_status_1() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run(["conformance", dir.path().to_str().unwrap(), "--only", "shutdown", "--restart", "exit 5"]);
    assert!(ran.code == 1 && ran.out.contains("FAIL     shutdown") && ran.out.contains("--restart exit 5"), "{ran:?}");
}

#[test]
fn wrong_uses_are_refused_with_the_remedy() {
    for (words, said) in [
        (&["/nowhere/at/all"][..], "/nowhere/at/all: no such file or directory; give a folder"),
        (&["/etc/passwd"], "neither a folder nor a socket"),
        (&[], "PATH|SOCKET"),
        (&["/tmp", "--only", "nothing"], "there is no such check here; there are read-after-write"),
        (&["/tmp", "--timeout", "10ms"], "--timeout"),
        (&["/tmp", "--seconds", "soon"], "is not a time"),
    ] {
        let ran = run(["conformance"].iter().chain(words));
        assert!(ran.code == 2 && ran.err.contains(said), "{ran:?}");
    }
    let ran = run(["conformance", "--list"]);
    assert!(ran.code == 0 && ran.out.contains("overlapping-writes") && ran.out.contains("NBD"), "{ran:?}");
}

/// Ctrl-C ends the run after the current round, and the folder is gone.
#[test]
fn an_interrupted_run_cleans_up() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    let words = ["conformance", folder.to_str().unwrap(), "--seconds", "600", "--only", "bytes", "--only", "append"];
    let mut process = Process::start(words, &dir.path().join("log"));
    impresario_testing::until("it has begun", || process.log().contains("1/2 bytes"));
    process.signal(rustix::process::Signal::INT);
    let status = process.wait();
    assert!(status.code() == Some(1) && process.log().contains("interrupted"), "{status}: {}", process.log());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn a_socket_that_does_not_speak_nbd_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let speaks = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request").unwrap();
    });
    let ran = run(["conformance", socket.to_str().unwrap()]);
    assert!(ran.code == 1 && ran.err.contains("not an NBD server"), "{ran:?}");
    speaks.join().unwrap();
}
