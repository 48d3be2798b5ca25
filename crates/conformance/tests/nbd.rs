//! The checks of an NBD server: a correct one passes them, and each defect is found by the check that names it.

use std::path::Path;
use std::time::Duration;

use crate::fake_nbd::{Defect, Server};
use crate::support::{PATIENCE, options};
use impresario_conformance::{Error, Options, Outcome, Report, run};

fn check(server: &Server, only: &[&str], patience: Duration) -> Report {
    let mut restart = format!("touch '{}'", server.restart_file().display());
    if server.loses_requests() {
        restart += &format!(" && until [ -e '{}' ]; do sleep 0.01; done", server.lost_file().display());
    }
    let only = only.iter().map(|name| name.to_string()).collect();
    run(&Options { only, restart: Some(restart), patience, ..options(server.socket()) }, &mut |_| {}).unwrap()
}

#[test]
fn a_correct_server_passes_every_check() {
    let server = Server::start(Defect::None);
    let report = check(&server, &[], PATIENCE);
    for check in &report.checks {
        assert!(check.outcome == Outcome::Pass && check.requests > 0, "{}", report.text());
    }
    assert!(report.notes.is_empty(), "{}", report.text());
    assert!(server.contents().iter().all(|&byte| byte == 0), "its stamps are gone");
}

/// Each defect with the check that must find it, and a word of the reason.
const DEFECTS: [(Defect, &str, &str); 17] = [
    (Defect::StuckOption, "handshake", "no answer"),
    (Defect::AcceptedGarbage, "handshake", "expected an error"),
    (Defect::LostWrite, "read-after-write", "expected writer"),
    (Defect::StaleRead, "read-after-write", "expected"),
    (Defect::ReorderedWrites, "overlapping-writes", "expected"),
    (Defect::LateZeroes, "zeroes", "expected"),
    (Defect::SwappedReplies, "replies", "its bytes for offset"),
    (Defect::SwappedReplies, "bytes", "expected"),
    (Defect::FlushDoesNotWait, "flush", "flushed, and the connection had broken"),
    (Defect::FuaIgnored, "fua", "written with FUA"),
    (Defect::WrongError, "errors", "beside requests that fail"),
    (Defect::DropAtClose, "disconnect", "before NBD_CMD_DISC"),
    (Defect::LoseAtRestart, "shutdown", "after the restart"),
    (Defect::HangAtRestart, "shutdown", "no answer within"),
    (Defect::RefuseWrites, "shutdown", "No space left"),
    (Defect::LateAfterBreak, "disconnect", "expected"),
    (Defect::LeakAtBreak, "disconnect", "no answer within"),
];

#[test]
fn each_defect_is_found_by_the_check_that_names_it() {
    for (defect, name, word) in DEFECTS {
        let server = Server::start(defect);
        let hangs = [Defect::StuckOption, Defect::HangAtRestart, Defect::LeakAtBreak].contains(&defect);
        let patience = if hangs { Duration::from_secs(3) } else { PATIENCE };
        let report = check(&server, &[name], patience);
        let [check] = report.checks.as_slice() else { panic!("{}", report.text()) };
        let Outcome::Fail(reason) = &check.outcome else { panic!("{defect:?}: {}", report.text()) };
        assert!(reason.contains(word), "{defect:?}: {reason}");
    }
}

/// Writers go on for as long as the restart takes, so that it meets one.
#[test]
fn a_server_that_takes_a_while_to_stop_is_under_load_until_then() {
    for defect in [Defect::HangAtRestart, Defect::LoseAtRestart, Defect::None] {
        let server = Server::start(defect);
        let mut restart = format!("sleep 1; touch '{}'", server.restart_file().display());
        if server.loses_requests() {
            restart += &format!(
                "; for i in $(seq 500); do [ -e '{}' ] && break; sleep 0.01; done",
                server.lost_file().display()
            );
        }
        let patience = if server.loses_requests() { Duration::from_secs(3) } else { PATIENCE };
        let options =
            Options { only: vec!["shutdown".into()], restart: Some(restart), patience, ..options(server.socket()) };
        let report = run(&options, &mut |_| {}).unwrap();
        let word = match (&report.checks[0].outcome, defect) {
            (Outcome::Pass, Defect::None) => continue,
            (Outcome::Fail(reason), Defect::HangAtRestart) => reason.contains("no answer within"),
            (Outcome::Fail(reason), Defect::LoseAtRestart) => reason.contains("after the restart"),
            _ => false,
        };
        assert!(word, "{defect:?}: {}", report.text());
    }
}

#[test]
fn a_request_without_an_answer_is_named() {
    let server = Server::start(Defect::Hang);
    let report = check(&server, &["completion"], Duration::from_secs(3));
    let Outcome::Fail(reason) = &report.checks[0].outcome else { panic!("{}", report.text()) };
    assert!(reason.contains("no answer within 3 s") && reason.contains("the reply to a"), "{reason}");
}

#[test]
fn exports_with_data_and_foreign_servers_are_refused() {
    let server = Server::start(Defect::None);
    server.fill(b"precious", 70_000);
    let refused = |options: &Options| match run(options, &mut |_| {}) {
        Err(Error::Usage(text) | Error::Target(text)) => text,
        other => panic!("{other:?}"),
    };
    let said = refused(&options(server.socket()));
    assert!(said.contains("contains data at 70000") && said.contains("--overwrite"), "{said}");
    assert_eq!(&server.contents()[70_000..70_008], b"precious");
    let overwriting = Options { overwrite: true, only: vec!["replies".into()], ..options(server.socket()) };
    assert!(run(&overwriting, &mut |_| {}).unwrap().passed());
    let wrong = Options { only: vec!["rename".into()], ..options(server.socket()) };
    assert!(refused(&wrong).contains("there are handshake, read-after-write"));

    // Something else that listens, and nothing that does.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let speaks = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"220 mail.example ESMTP\r\n").unwrap();
    });
    assert!(refused(&options(Path::new(&address))).contains("not an NBD server"));
    speaks.join().unwrap();
    assert!(refused(&options(Path::new(&address))).contains("connecting"));
}
