//! `impresario sim` from outside: scenario files that are run, swept, refused and interrupted; the fuzzer; and that the
//! documents say what the program says.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{IMPRESARIO, Process, Ran, catches, run, run_command};
use impresario_testing::until;

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn scenario(name: &str) -> String {
    root().join("scenarios").join(name).display().to_string()
}

const SMALL: &str = "seed = 5\nrepetitions = 2\n[servers]\ncount = 2\n\
    [[application]]\nname = \"a\"\nprocesses = 4\npattern = \"strided\"\nrequest_bytes = 4096\n\
    [[application]]\nname = \"b\"\nop = \"write\"\nprocesses = 2\n\
    [sweep]\n\"servers.policy\" = [\"fifo\", \"mlf\"]\n";

fn small(dir: &Path) -> String {
    let path = dir.join("small.toml");
    std::fs::write(&path, SMALL).unwrap();
    path.display().to_string()
}

#[test]
fn the_template_is_a_scenario() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.toml");
    let template = run(["sim", "template"]);
    assert_eq!(template.code, 0, "{template:?}");
    std::fs::write(&path, &template.out).unwrap();
    let path = path.display().to_string();
    let checked = run(["sim", "check", &path]);
    assert_eq!((checked.code, checked.err.as_str()), (0, ""), "{checked:?}");
    assert!(
        checked.out.contains("good: 1 points × 1 repetitions; 1 processes, 0 I/O nodes, 4 data servers"),
        "{checked:?}"
    );
    let ran = run(["sim", "run", &path]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.starts_with("A template\n") && ran.out.contains("makespan"), "{ran:?}");
}

#[test]
fn mistakes_are_told_with_file_line_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.toml");
    std::fs::write(&path, "seed = 1\n[servers]\npolcy = \"fifo\"\n[[application]]\nrequest_bytes = \"64k\"\n").unwrap();
    let path = path.display().to_string();
    for words in [&["sim", "check", &path][..], &["sim", "run", &path]] {
        let ran = run(words);
        assert_eq!((ran.code, ran.err.lines().count(), ran.out.as_str()), (2, 2, ""), "{ran:?}");
        assert!(
            ran.err.starts_with(&format!("{path}:3:1: unknown key polcy in servers; did you mean policy?")),
            "{ran:?}"
        );
        assert!(ran.err.contains(&format!("{path}:5:17: request_bytes must be a whole number of bytes")), "{ran:?}");
    }
    let good = small(dir.path());
    for (words, says) in [
        (&["--set", "servers.count"][..], "write --set servers.in_flight=8"),
        (&["--set", "servers.cont=1"], "--set servers.cont=1: unknown key cont in servers; did you mean count?"),
        (&["--sweep", "servers.policy=fifo,fido"], "there is no policy \"fido\""),
        (&["--sweep", "servers.count=1,,2"], "has an empty value"),
        (&["--repetitions", "0"], "--repetitions is 0; it must be between 1 and 10000"),
        (&["--repetitions", "10000", "--sweep", "servers.count=1..900/900"], "at most 100000"),
    ] {
        let mut all = vec!["sim", "check", &good];
        all.extend(words);
        let ran = run(all);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(says) && ran.err.lines().count() == 1, "{ran:?} does not say {says}");
    }
    let missing = run(["sim", "run", "/nonexistent.toml"]);
    assert_eq!(missing.code, 2, "{missing:?}");
    assert!(missing.err.starts_with("/nonexistent.toml: cannot be read: No such file"), "{missing:?}");
}

#[test]
fn results_are_the_same_bytes_whatever_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let path = small(dir.path());
    let files = |name: &str| ["json", "csv", "html"].map(|end| dir.path().join(format!("{name}.{end}")));
    let with = |threads: &str, name: &str| -> Ran {
        let [json, csv, html] = files(name);
        let mut command = Command::new(IMPRESARIO);
        command.args(["sim", "run", &path, "--interference", "--threads", threads, "--sweep", "servers.in_flight=1,8"]);
        command.arg("--json").arg(json).arg("--csv").arg(csv).arg("--html").arg(html);
        run_command(&mut command)
    };
    let (one, three) = (with("1", "one"), with("3", "three"));
    assert_eq!((one.code, &one.out), (0, &three.out), "{one:?} {three:?}");
    // Title, head, and a line for each of two policies with two depths.
    assert_eq!(one.out.lines().count(), 2 + 4, "{one:?}");
    for (one, three) in files("one").iter().zip(&files("three")) {
        let (one, three) = (std::fs::read(one).unwrap(), std::fs::read(three).unwrap());
        assert!(!one.is_empty() && one == three);
    }
    let json = std::fs::read_to_string(&files("one")[0]).unwrap();
    let told: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(told[0]["points"].as_array().unwrap().len(), 4);
    let run = &told[0]["points"][3]["runs"][1];
    assert_eq!((run["outcome"]["seed"].as_u64(), run["alone_s"].as_array().map(Vec::len)), (Some(6), Some(2)));
    // Another seed is another run.
    let other = run_command(Command::new(IMPRESARIO).args(["sim", "run", &path, "--seed", "77"]));
    let plain = run_command(Command::new(IMPRESARIO).args(["sim", "run", &path]));
    assert!(other.code == 0 && plain.code == 0 && other.out != plain.out, "{other:?}");
    let quiet = run_command(Command::new(IMPRESARIO).args(["sim", "run", &path, "--quiet"]));
    assert_eq!((quiet.code, quiet.out.as_str(), quiet.err.as_str()), (0, "", ""), "{quiet:?}");
}

#[test]
fn an_interrupted_study_tells_what_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = (small(dir.path()), dir.path().join("log"));
    let mut process =
        Process::start(["sim", "run", &path, "--repetitions", "10000", "--set", "application.*.requests=64"], &log);
    // Before it catches the signal, the signal ends it without a word.
    until("it catches the signal", || catches(process.pid(), libc::SIGINT));
    process.signal(rustix::process::Signal::INT);
    assert_eq!(process.wait().code(), Some(1), "{}", process.log());
    assert!(process.log().contains("of 20000 runs are complete"), "{}", process.log());
    assert!(process.log().contains("stopped; what is complete was shown"), "{}", process.log());
}

/// All example files, each named in the document.
#[test]
fn the_examples_run() {
    let text = std::fs::read_to_string(root().join("doc/SIMULATION.md")).unwrap();
    let mut names: Vec<String> = std::fs::read_dir(root().join("scenarios"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    names.sort();
    assert!(names.len() >= 6, "{names:?}");
    for name in names {
        assert!(text.contains(&format!("scenarios/{name}")), "doc/SIMULATION.md does not name {name}");
        let path = scenario(&name);
        let checked = run(["sim", "check", &path]);
        assert_eq!(checked.code, 0, "{checked:?}");
        if name.starts_with("scale") {
            continue;
        }
        let ran = run_command(Command::new(IMPRESARIO).args(["sim", "run", "--checks", &path]));
        assert_eq!(ran.code, 0, "{name}: {ran:?}");
        assert!(!ran.out.contains("runs are complete"), "{ran:?}");
        if name == "quickstart.toml" {
            let stale: Vec<&str> = ran.out.lines().skip(1).filter(|line| !text.contains(line)).collect();
            assert!(stale.is_empty(), "doc/SIMULATION.md shows another table than the program: {stale:#?}");
        }
    }
}

#[test]
fn the_fuzzer_runs_and_a_seed_can_be_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let keep = dir.path().display().to_string();
    let ran = run(["sim", "fuzz", "--for", "1s", "--seed", "1", "--keep", &keep]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("scenarios from seed 1") && ran.out.contains("every law held"), "{ran:?}");
    let replayed = run(["sim", "fuzz", "--replay", "3", "--keep", &keep]);
    assert_eq!(replayed.code, 0, "{replayed:?}");
    assert!(replayed.out.starts_with("seed 3: good, "), "{replayed:?}");
    let ran = run(["sim", "fuzz", "--for", "1s", "--keep", "/nonexistent"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("--keep /nonexistent is not a folder"), "{ran:?}");
}

/// Flags that a help text names.
fn flags(help: &str) -> Vec<String> {
    let words = help.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    let mut flags: Vec<String> = words.filter(|w| w.starts_with("--") && w.len() > 3).map(str::to_string).collect();
    flags.sort();
    flags.dedup();
    flags
}

#[test]
fn the_documents_say_what_the_program_says() {
    let document = std::fs::read_to_string(root().join("doc/SIMULATION.md")).unwrap();
    let template = run(["sim", "template"]).out;
    assert!(document.contains(&template), "doc/SIMULATION.md must hold the output of `impresario sim template`");
    let page = std::fs::read_to_string(root().join("doc/man/impresario-sim.1")).unwrap();
    // In roff a flag --for is written Fl -for.
    let page = page.replace("Fl -", "--");
    for what in ["run", "check", "template", "fuzz"] {
        let help = run(["sim", what, "--help"]);
        assert_eq!(help.code, 0, "{help:?}");
        for flag in flags(&help.out).iter().filter(|f| !["--help", "--version"].contains(&f.as_str())) {
            assert!(page.contains(flag.as_str()), "doc/man/impresario-sim.1 does not name {flag} of {what}");
            assert!(document.contains(flag.as_str()), "doc/SIMULATION.md does not name {flag} of {what}");
        }
    }
}
