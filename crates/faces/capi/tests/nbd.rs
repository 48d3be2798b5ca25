//! The example NBD server: built as its Makefile does, and checked by `impresario conformance` under several policies, while
//! it is restarted, under valgrind and the thread sanitizer.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{self, Library, root, sanitized, succeed, valgrind};
use impresario_conformance::{Options, Outcome, Report, run};

/// Tells the process of a test program that it is an agent of the checker.
const AGENT: &str = "IMPRESARIO_CONFORMANCE_AGENT";
/// For servers that answer: only a bound, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(60);
const SIZE: u64 = 4 << 20;

/// Not a test by itself: the checker looks at its target by an agent.
#[test]
#[ignore = "run by other tests as a process"]
fn agent_process() {
    if std::env::var_os(AGENT).is_some() {
        impresario_conformance::serve_agent().unwrap();
    }
}

/// A running server, which a shell can stop and start again.
struct Server {
    dir: tempfile::TempDir,
    start: String,
}

impl Server {
    fn start(command: &Command, policy: &str) -> Server {
        let dir = tempfile::tempdir().unwrap();
        std::fs::File::create(dir.path().join("file")).unwrap().set_len(SIZE).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let words: Vec<String> = std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| format!("'{}'", word.to_str().unwrap()))
            .collect();
        let variables: Vec<String> = command
            .get_envs()
            .filter_map(|(name, value)| Some(format!("{}='{}'", name.to_str()?, value?.to_str()?)))
            .collect();
        let start = format!(
            "{} {} '{}' '{}' '{policy}' >'{}' 2>&1 & echo $! >'{}'",
            variables.join(" "),
            words.join(" "),
            path("file"),
            path("socket"),
            path("log"),
            path("pid")
        );
        let server = Server { dir, start };
        let status = Command::new("sh").args(["-c", &server.start]).stdin(Stdio::null()).status().unwrap();
        assert!(status.success());
        let deadline = Instant::now() + PATIENCE;
        while !server.log().contains("ready") {
            let failed = Instant::now() > deadline || server.log().contains("nbd: ");
            assert!(!failed, "the server does not start: {}", server.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// A shell command that ends it and waits for its last line.
    fn stop(&self) -> String {
        let (pid, log) = (self.path("pid"), self.path("log"));
        let (pid, log) = (pid.display(), log.display());
        format!("kill -TERM $(cat '{pid}') && until grep -q ^served '{log}'; do sleep 0.02; done")
    }

    fn check(&self, only: &[&str], restart: bool) -> Report {
        let mut agent = vec!["env".into(), format!("{AGENT}=1").into(), std::env::current_exe().unwrap().into()];
        agent.extend(["nbd::agent_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"].map(From::from));
        let options = Options {
            seed: 3,
            only: only.iter().map(|name| name.to_string()).collect(),
            patience: PATIENCE,
            below: Some(self.path("file")),
            restart: restart.then(|| format!("{}; : >'{}'; {}", self.stop(), self.path("log").display(), self.start)),
            ..Options::new(self.path("socket"), agent)
        };
        run(&options, &mut |_| {}).unwrap_or_else(|error| panic!("{error}; the server: {}", self.log()))
    }

    /// Ends it; everything it wrote.
    fn end(self) -> String {
        succeed(Command::new("sh").args(["-c", &self.stop()]));
        self.log()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.log().contains("served") {
            let kill = format!("kill -KILL $(cat '{}')", self.path("pid").display());
            let _ = Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status();
        }
    }
}

#[track_caller]
fn passed(report: &Report, server: &Server) {
    for check in &report.checks {
        // The example offers neither; a server without a restart command cannot be restarted.
        let optional = matches!(check.name, "zeroes" | "shutdown") && matches!(check.outcome, Outcome::Skipped(_));
        assert!(check.outcome == Outcome::Pass || optional, "{}the server: {}", report.text(), server.log());
    }
    assert!(report.notes.is_empty(), "{}", report.text());
}

fn compile(library: &Library, out: &str, flags: &[&str]) -> PathBuf {
    library.compile("cc", out, &root().join("examples/nbd/nbd.c"), &[&["-std=gnu99"], flags].concat())
}

#[test]
fn the_example_passes_the_conformance_checks() {
    let library = Library::find("impresario");
    let program = compile(&library, "nbd", &[]);
    let server = Server::start(&Command::new(&program), "mlf");
    let report = server.check(&[], true);
    passed(&report, &server);
    let shutdown = report.checks.iter().find(|check| check.name == "shutdown").unwrap();
    assert_eq!(shutdown.outcome, Outcome::Pass);
    assert!(server.end().contains("served "));
    for policy in ["fifo", "sstf", "wfq", "scan"] {
        let server = Server::start(&Command::new(&program), policy);
        passed(&server.check(&["overlapping-writes", "bytes", "flush", "errors"], false), &server);
        assert!(server.end().contains("served "));
    }
}

#[test]
fn the_example_is_clean_under_valgrind_and_the_thread_sanitizer() {
    let library = Library::find("impresario");
    let checks = ["handshake", "bytes", "errors", "disconnect"];
    if let Some(command) = valgrind(&compile(&library, "nbd", &[])) {
        let server = Server::start(&command, "mlf");
        passed(&server.check(&checks, false), &server);
        let log = server.end();
        // Valgrind is quiet but for errors.
        assert!(!log.contains("=="), "{log}");
    }
    let program = compile(&library, "nbd-tsan", &["-fsanitize=thread"]);
    let probe = sanitized(&program).stderr(Stdio::null()).status().unwrap();
    if probe.code() != Some(2) {
        return impresario_testing::skip("tsan", "the thread sanitizer does not run on this kernel");
    }
    let server = Server::start(&sanitized(&program), "mlf");
    passed(&server.check(&checks, false), &server);
    let log = server.end();
    assert!(!log.contains("WARNING"), "{log}");
}

#[test]
fn the_example_is_short_and_refuses_wrong_arguments() {
    let source = std::fs::read_to_string(root().join("examples/nbd/nbd.c")).unwrap();
    assert!(source.lines().count() < 400, "doc/EMBEDDING.md promises fewer than 400 lines");
    let library = Library::find("impresario");
    let program = compile(&library, "nbd", &[]);
    let file = library.dir.path().join("disk");
    std::fs::write(&file, [0; 4096]).unwrap();
    let said = |words: &[&Path]| {
        let output = support::run(Command::new(&program).args(words));
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert!(matches!(said(&[]), (Some(2), text) if text.contains("usage")));
    assert!(matches!(said(&[Path::new("/nowhere"), Path::new("0")]), (Some(1), text) if text.contains("/nowhere")));
    let socket = Path::new("/nowhere/socket");
    assert!(matches!(said(&[&file, socket]), (Some(1), text) if text.contains("/nowhere/socket")));
    let policy = Path::new("no-such-policy");
    assert!(matches!(said(&[&file, Path::new("0"), policy]), (Some(1), text) if text.contains("no-such-policy")));
}
