//! The scripts for batch systems, run as the batch systems run them.

use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::report::Report;
use impresario_testing::{eventually, until};

use crate::support::{IMPRESARIO, run_command};
use crate::tools::{Folder, WAIT_MS, assist, forget, library, of, plain, reading};

/// What `make install` lays out.
fn prefix(folder: &Folder) -> PathBuf {
    let prefix = folder.at("prefix");
    std::fs::create_dir_all(prefix.join("bin")).unwrap();
    std::os::unix::fs::symlink(IMPRESARIO, prefix.join("bin/impresario")).unwrap();
    let laid_out = run_command(assist(["library"]).arg(prefix.join("lib/impresario/preload")));
    assert_eq!(laid_out.code, 0, "{}", laid_out.err);
    prefix
}

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

/// The words of a `strided` run with data of its own.
fn job(folder: &Folder) -> (Vec<String>, PathBuf) {
    let data = folder.data("data");
    (reading(&folder.strided(), &data, 500), data)
}

#[test]
fn slurm_s_prologue_and_epilogues_serve_a_job() {
    let folder = Folder::new();
    let prefix = prefix(&folder);
    let uid = rustix::process::getuid().as_raw().to_string();
    let script = |name: &str| {
        let mut script = Command::new("sh");
        script.arg(packaging().join("slurm").join(name)).env("IMPRESARIO_PREFIX", &prefix);
        script.env("IMPRESARIO_ASSIST_HINTS", packaging().join("slurm/hints.json"));
        script.env("SLURM_JOB_ID", "4711").env("SLURM_JOB_UID", &uid).env("IMPRESARIO_JOBS", folder.path());
        script
    };
    let told = run_command(script("task-prolog.sh").env("LD_PRELOAD", ""));
    assert_eq!((told.code, told.err.as_str()), (0, ""));
    let again = run_command(&mut script("task-prolog.sh"));
    assert_eq!(again.out, told.out, "one manager for all tasks of the job");
    let place = folder.path().join(format!("impresario-{uid}-4711.0"));
    let socket = place.join("assist.sock");
    until("the manager listens", || socket.exists());

    let (words, data) = job(&folder);
    let alone = plain(&words);
    forget(&data);
    let mut task = Command::new(&words[0]);
    task.args(&words[1..]).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
    let share = folder.at("share");
    std::fs::create_dir(&share).unwrap();
    task.env("XDG_DATA_HOME", &share);
    for line in told.out.lines() {
        let (name, value) = line.strip_prefix("export ").and_then(|set| set.split_once('=')).unwrap();
        task.env(name, value);
    }
    let ran = run_command(&mut task);
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, alone.as_str(), ""));

    let kept = || {
        let mut epilog = script("task-epilog.sh");
        epilog.env("IMPRESARIO_ASSIST_REPORTS", folder.path()).env("IMPRESARIO_ASSIST_SOCKET", &socket);
        assert_eq!(run_command(&mut epilog).code, 0);
        let found = std::fs::read_dir(folder.path()).unwrap().find_map(|entry| {
            let path = entry.unwrap().path();
            path.file_name()?.to_str()?.starts_with("guided-4711-").then_some(path)
        })?;
        let report: Report = serde_json::from_slice(&std::fs::read(found).unwrap()).unwrap();
        (of(&report, &data).reads > 0).then_some(())
    };
    eventually("the report is kept", kept);
    until("the task is learnt from", || share.join("impresario/assist/strided.json").exists());
    let pid: i32 = std::fs::read_to_string(place.join("pid")).unwrap().trim().parse().unwrap();
    let ended = run_command(&mut script("epilog.sh"));
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
    assert!(!place.exists());
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    until("the manager ends", || state().is_empty() || state().contains(") Z "));
}

#[test]
fn slurm_s_prologue_leaves_a_job_alone_where_it_must() {
    let folder = Folder::new();
    let prologue = |variables: &[(&str, &Path)], job: &str| {
        let mut script = Command::new("sh");
        script
            .arg(packaging().join("slurm/task-prolog.sh"))
            .env("IMPRESARIO_JOBS", folder.path())
            .env("SLURM_JOB_ID", job);
        script.envs(variables.iter().copied());
        let ran = run_command(&mut script);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", ""));
    };
    prologue(&[("IMPRESARIO_PREFIX", Path::new("/nowhere"))], "1");
    let laid_out = prefix(&folder);
    let prefix = ("IMPRESARIO_PREFIX", laid_out.as_path());
    prologue(&[prefix, ("IMPRESARIO_ASSIST", Path::new("off"))], "1");
    prologue(&[prefix, ("IMPRESARIO_ASSIST_HINTS", Path::new("/nowhere"))], "1");
    prologue(&[prefix], "");
}

#[test]
fn htcondor_s_wrapper_serves_a_job_and_keeps_its_status() {
    let folder = Folder::new();
    let prefix = prefix(&folder);
    let wrapper = |words: &[String]| {
        let mut wrapper = Command::new(packaging().join("htcondor/job-wrapper.sh"));
        wrapper
            .args(words)
            .env("IMPRESARIO_PREFIX", &prefix)
            .env("_CONDOR_SCRATCH_DIR", "/execute/dir_7")
            .env("IMPRESARIO_ASSIST_REPORTS", folder.path())
            .env("XDG_DATA_HOME", folder.at("share"));
        wrapper.env("IMPRESARIO_ASSIST_LIBRARY", library()).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
        wrapper
    };
    let (words, data) = job(&folder);
    let alone = plain(&words);
    let ran = run_command(&mut wrapper(&words));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    let mut kept = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let is_report = |path: &PathBuf| path.to_str().unwrap().contains("/guided-dir_7-");
    let report = std::fs::read(kept.find(is_report).unwrap()).unwrap();
    let report: Report = serde_json::from_slice(&report).unwrap();
    assert!(of(&report, &data).reads > 0);
    let known = folder.at("share").join("impresario/assist/strided.json");
    until("the run is learnt from", || known.exists());
    let mut homeless = wrapper(&words);
    homeless.env("XDG_DATA_HOME", folder.write("file", ""));
    let ran = run_command(&mut homeless);
    assert_eq!(
        (ran.code, ran.out.as_str(), ran.err.as_str()),
        (0, alone.as_str(), ""),
        "nothing is said where it cannot be"
    );
    let fails = ["sh", "-c", "exit 7"].map(String::from);
    assert_eq!(run_command(&mut wrapper(&fails)).code, 7);
    assert_eq!(run_command(wrapper(&fails).env("IMPRESARIO_ASSIST", "off")).code, 7);
}
