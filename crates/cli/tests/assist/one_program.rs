//! One program of one user: recorded, planned for, run with hints, compared.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::report::Report;
use impresario_testing::{is_root, require, skip, until};
use impresario_trace::{Trace, TraceOp};

use crate::support::{Process, Ran, run_command};
use crate::tools::{COUNT, Folder, Nobody, PIECE, STRIDE, WAIT_MS, assist, forget, of, plain, reading, try_compile};

fn words(text: &[&str]) -> Vec<String> {
    text.iter().map(|w| w.to_string()).collect()
}

/// Runs a program under `assist run` with hints and under `assist record`.
#[track_caller]
fn both(folder: &Folder, hints: &Path, program: &[String]) -> [Ran; 2] {
    let recorded = run_command(assist(["record", "-f", "-o"]).arg(folder.at("both.imt")).arg("--").args(program));
    let guided = run_command(assist(["run"]).arg(hints).arg("--").args(program));
    [recorded, guided]
}

#[test]
fn recorded_planned_run_and_reported() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let read = reading(&program, &data, 1000);
    let alone = plain(&read);
    let trace = folder.at("t.imt");
    let ran = run_command(assist(["record", "-o"]).arg(&trace).arg("--").args(&read));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    assert!(ran.err.contains("64 reads (4 MiB) and 0 writes"), "{}", ran.err);
    let recorded = Trace::load(&trace).unwrap();
    let path = data.as_os_str().as_encoded_bytes();
    let ours: Vec<usize> = (0..recorded.files.len()).filter(|f| recorded.files[*f].path == path).collect();
    assert_eq!(ours.len(), 1, "{:?}", recorded.files);
    let seen = recorded.records.iter().filter(|r| r.file.0 as usize == ours[0] && r.op != TraceOp::Close);
    let seen: Vec<_> = seen.map(|r| (r.op, r.offset, r.moved_bytes())).collect();
    assert_eq!(seen, (0..COUNT).map(|i| (TraceOp::Read, i * STRIDE, PIECE)).collect::<Vec<_>>());

    // An existing trace is not lost by mistake.
    let ran = run_command(assist(["record", "-o"]).arg(&trace).args(["--", "true"]));
    assert!(ran.code != 0 && ran.err.contains("--force") && ran.err.lines().count() == 1, "{ran:?}");
    assert_eq!(Trace::load(&trace).unwrap().records.len(), recorded.records.len());

    let hints = folder.at("hints.json");
    let planning = |more: &[&str]| {
        let mut command = assist(["plan"]);
        command.arg(&trace).arg("-o").arg(&hints).args(["--device", "disk", "--cold"]).args(more);
        run_command(&mut command)
    };
    let ran = planning(&[]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{}", ran.out);
    assert!(ran.out.contains(data.to_str().unwrap()), "the plan does not speak of the file:\n{}", ran.out);
    let mut planned: serde_json::Value = serde_json::from_slice(&std::fs::read(&hints).unwrap()).unwrap();
    let entry = &planned["File"][0];
    assert_eq!(entry["Path"].as_str().map(Path::new), Some(data.as_path()), "{planned}");
    assert!(entry["Why"].as_str().is_some_and(|why| !why.is_empty()), "{planned}");
    let told: serde_json::Value = serde_json::from_str(&planning(&["--json"]).out).unwrap();
    assert!(told["hints"]["File"].is_array(), "{told}");

    // Given whatever this machine's device is like.
    planned["StandDown"]["Trial"] = false.into();
    std::fs::write(&hints, planned.to_string()).unwrap();
    forget(&data);
    let report = folder.at("report.json");
    let mut command = assist(["run", "-v"]);
    command.env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
    let ran = run_command(command.arg(&hints).arg("--report").arg(&report).arg("--").args(&read));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    assert!(ran.err.contains(data.to_str().unwrap()) && ran.err.contains("prefetched"), "{}", ran.err);
    let report: Report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let file = of(&report, &data);
    assert_eq!((file.reads, file.read_bytes, file.programs), (COUNT, COUNT * PIECE, 1));
    assert!(file.hints > 0 && file.prefetched_bytes > 0 && file.used_bytes > 0, "{file:?}");
    assert_eq!((report.dropped_accesses, report.cut_off), (0, 0));
}

/// What the library does not see is told at the end, by the kernel's account of the program and its children.
#[test]
fn how_much_was_seen_is_told() {
    let folder = Folder::new();
    let (data, mapped) = (folder.data("data"), try_compile(folder.path(), "mapped", &[]).unwrap());
    if !Path::new("/proc/self/io").exists() {
        return skip("taskstats", "this kernel keeps no account of what processes read");
    }
    let hints = folder.hints("hints.json", &[&data]);
    let size = (COUNT * STRIDE) >> 20;
    // Two children read it all, one of them by a map.
    let script = format!("cat {0} > /dev/null; {1} {0}", data.display(), mapped.display());
    let [recorded, guided] = both(&folder, &hints, &words(&["sh", "-c", &script]));
    let line = |ran: &Ran| ran.err.lines().find(|l| l.contains("Saw ")).unwrap_or_default().to_string();
    let (recorded, guided) = (line(&recorded), line(&guided));
    assert!(recorded.starts_with(&format!("Saw {size} MiB of {size} MiB read")), "{recorded}");
    assert!(recorded.contains(&format!("; {size} MiB of files were mapped")), "{recorded}");
    assert!(guided.starts_with("impresario: Saw "), "{guided}");
    let quiet = run_command(assist(["run", "-q"]).arg(&hints).args(["--", "sh", "-c", &script]));
    assert_eq!((quiet.code, quiet.err.as_str()), (0, ""));
    // A child that calls the kernel past any library, as programs in Go do.
    let Some(unseen) = try_compile(folder.path(), "strided", &["-static"]) else {
        return skip("static-libc", "no C library to link a static program with");
    };
    let script = format!("{}; true", reading(&unseen, &data, 0).join(" "));
    let recorded =
        run_command(assist(["record", "-f", "-o"]).arg(folder.at("u.imt")).args(["--", "sh", "-c", &script]));
    let unseen = format!("; {} MiB by calls that were not seen", (COUNT * PIECE) >> 20);
    assert!(line(&recorded).contains(&unseen), "{}", recorded.err);
}

/// No hints file: what a program reads next is found while it runs, and its result is its own.
#[test]
fn without_a_plan_it_runs_guided_all_the_same() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let read = reading(&program, &data, 0);
    let (alone, report) = (plain(&read), folder.at("report.json"));
    let mut command = assist(["run", "--report"]);
    command.env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
    let ran = run_command(command.arg(&report).arg("--").args(&read));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    let report: Report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let file = report.files.iter().find(|f| f.path == data.to_str().unwrap()).expect("the file is looked after");
    assert_eq!((file.reads, file.entry.as_str()), (COUNT, "Directory[0]"));
}

/// The ranks of a job record side by side, and are planned for together.
#[test]
fn ranks_record_one_trace_each() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    for rank in ["0", "1"] {
        let mut command = assist(["record"]);
        command.env("PMI_RANK", rank).env("PMI_SIZE", "2").current_dir(folder.path());
        let ran = run_command(command.arg("--").args(reading(&program, &data, 0)));
        assert_eq!(ran.code, 0, "{}", ran.err);
        assert!(ran.err.contains(&format!("trace.{rank}.imt; next: impresario assist plan trace.*.imt")), "{ran:?}");
    }
    let mut command = assist(["plan", "trace.0.imt", "trace.1.imt", "-o", "h.json", "--device", "disk", "--cold"]);
    let ran = run_command(command.current_dir(folder.path()));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{}", ran.out);
    assert!(ran.out.contains("by 2 processes"), "{}", ran.out);
}

#[test]
fn a_program_ends_as_it_would_alone() {
    let folder = Folder::new();
    let hints = folder.hints("hints.json", &[&folder.data("data")]);
    for (script, status, out) in [
        ("echo said; exit 7", 7, "said\n"),
        ("echo said; kill -9 $$", 128 + 9, "said\n"),
        ("kill -TERM $$", 128 + 15, ""),
    ] {
        for ran in both(&folder, &hints, &words(&["sh", "-c", script])) {
            assert_eq!((ran.code, ran.out.as_str()), (status, out), "{script}: {}", ran.err);
        }
    }
    // The first of several failures is reported.
    let mut command = assist(["run", "--instances", "3"]);
    command.arg(&hints).args(["--", "sh", "-c", "mkdir once 2>/dev/null || exit 9"]).current_dir(folder.path());
    assert_eq!(run_command(&mut command).code, 9);
}

/// By `nohup`, or in the background of a script: such a program outlives the terminal with and without us.
#[test]
fn what_a_program_was_started_to_ignore_it_ignores() {
    let folder = Folder::new();
    let hints = folder.hints("hints.json", &[&folder.data("data")]);
    let ignoring = |command: &std::process::Command| {
        let mut all = std::process::Command::new("sh");
        all.args(["-c", "trap '' HUP INT; exec \"$@\"", "sh"]).arg(command.get_program()).args(command.get_args());
        all.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(folder.path());
        run_command(&mut all).out
    };
    let program = ["grep", "SigIgn", "/proc/self/status"];
    let plain = ignoring(std::process::Command::new("env").args(program));
    assert!(plain.trim_end().ends_with('3'), "{plain}");
    for mut command in [assist(["run", "hints.json"]), assist(["record", "-o", "t.imt"])] {
        assert_eq!(ignoring(command.arg("--").args(program)), plain, "{hints:?}");
    }
}

/// A job must not fail for what guides it.
#[test]
fn a_program_runs_to_its_own_end_where_we_can_write_nothing() {
    let folder = Folder::new();
    let hints = folder.hints("hints.json", &[&folder.data("data")]);
    let program = words(&["sh", "-c", "echo said; exit 7"]);
    let long = folder.at(&"long".repeat(25));
    std::fs::create_dir(&long).unwrap();
    let none = Path::new("/nonexistent");
    for (place, more, told) in [
        (none, &[][..], "runs without hints"),
        (none, &["--learn"], "runs without hints"),
        (&*long, &["--instances", "2"], "at most 107 bytes"),
        (folder.path(), &["--report", "/nonexistent/report.json"], "no report"),
    ] {
        let ran = run_command(assist(["run"]).args(more).arg(&hints).arg("--").args(&program).env("TMPDIR", place));
        assert_eq!((ran.code, ran.out.lines().next()), (7, Some("said")), "{place:?} {more:?}: {}", ran.err);
        assert!(ran.err.contains(told) && !ran.err.contains("panicked"), "{place:?} {more:?}: {}", ran.err);
    }
    // Neither where its manager's folder cannot be made nor where its socket has too long a name.
    for place in [none, &*long] {
        let ran = run_command(assist(["run", "-q", "--"]).args(&program).env("TMPDIR", place));
        assert_eq!((ran.code, ran.err.as_str()), (7, ""), "{place:?}");
    }
    // On a disk that is full.
    for command in [assist(["run", "-v"]), assist(["record", "-o", "t.imt"])] {
        let mut all = std::process::Command::new("sh");
        all.args(["-c", "\"$@\" 2>/dev/full", "sh"]).arg(command.get_program()).args(command.get_args());
        all.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(folder.path());
        let ran = run_command(all.arg("--").args(&program));
        assert_eq!((ran.code, ran.out.as_str()), (7, "said\n"), "{command:?}");
    }
}

#[test]
fn a_trace_takes_the_place_of_files_only() {
    let folder = Folder::new();
    let (pipe, trace) = (folder.at("pipe"), folder.at("t.imt"));
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    let recorded = run_command(assist(["record", "-o"]).arg(&trace).args(["--", "cat"]).arg(folder.data("data")));
    assert_eq!(recorded.code, 0, "{}", recorded.err);
    let mut convert = std::process::Command::new(crate::support::IMPRESARIO);
    convert.args(["trace", "convert", "--overwrite"]).arg(&trace).arg("-o").arg(&pipe);
    for mut command in [convert, assist(["record", "-f", "-o", pipe.to_str().unwrap(), "--", "true"])] {
        let ran = run_command(&mut command);
        assert!(ran.code == 2 && ran.err.contains("is no file"), "{command:?}: {ran:?}");
        assert!(!pipe.is_file() && pipe.exists(), "{command:?}: the pipe is gone");
    }
}

#[test]
fn a_termination_is_handed_on_and_the_trace_is_whole() {
    let folder = Folder::new();
    let data = folder.data("data");
    let script =
        format!("trap 'kill $p; exit 4' TERM; cat {} > /dev/null; sleep 60 & p=$!; echo up; wait", data.display());
    for mut command in [assist(["record", "-o", "t.imt", "--"]), assist(["run", "hints.json", "--"])] {
        folder.hints("hints.json", &[&data]);
        let log = folder.at("log");
        let _ = std::fs::remove_file(&log);
        let mut process = Process::start_command(command.args(["sh", "-c", &script]).current_dir(folder.path()), &log);
        until("it is up", || process.log().contains("up"));
        process.signal(rustix::process::Signal::TERM);
        assert_eq!(process.wait().code(), Some(4), "{}", process.log());
    }
    let trace = Trace::load(folder.at("t.imt")).unwrap();
    let path = data.as_os_str().as_encoded_bytes();
    let reads = trace.records.iter().filter(|r| r.op == TraceOp::Read && trace.files[r.file.0 as usize].path == path);
    assert_eq!(reads.map(|r| r.moved_bytes()).sum::<u64>(), COUNT * STRIDE);
}

#[test]
fn a_script_is_seen_through_its_interpreter() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let read = reading(&program, &data, 0);
    let script = folder.write("script", format!("#!/bin/sh\n{} \"$@\"\nexit 3\n", read.join(" ")));
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let hints = folder.hints("hints.json", &[&data]);
    for ran in both(&folder, &hints, &words(&[script.to_str().unwrap()])) {
        assert_eq!((ran.code, ran.out), (3, plain(&read)), "{}", ran.err);
        assert!(!ran.err.contains("without hints"), "{}", ran.err);
    }
    let trace = Trace::load(folder.at("both.imt")).unwrap();
    assert!(trace.files.iter().any(|f| f.path == data.as_os_str().as_encoded_bytes()), "{:?}", trace.files);
}

/// Shells, `execvp` and `env` run it, so a job may be one.
#[test]
fn a_text_that_names_no_interpreter_is_run_by_a_shell() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let read = reading(&program, &data, 0);
    let hints = folder.hints("hints.json", &[&data]);
    for (name, first) in [("job", "\n"), ("empty-line", "#!\n")] {
        let job = folder.write(name, format!("{first}{}\nexit \"$1\"\n", read.join(" ")));
        std::fs::set_permissions(&job, std::fs::Permissions::from_mode(0o755)).unwrap();
        for ran in both(&folder, &hints, &words(&[job.to_str().unwrap(), "3"])) {
            assert_eq!((ran.code, ran.out), (3, plain(&read)), "{}", ran.err);
            assert!(!ran.err.contains("without hints"), "{}", ran.err);
        }
        let trace = Trace::load(folder.at("both.imt")).unwrap();
        assert!(trace.files.iter().any(|f| f.path == data.as_os_str().as_encoded_bytes()), "{:?}", trace.files);
    }
    // By its name, as another variable of the environment is there, too.
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let ran = run_command(assist(["run", "-q", "--instances", "2", "--", "job", "4"]).env("PATH", path));
    assert_eq!((ran.code, ran.out, ran.err), (4, plain(&read).repeat(2), String::new()));
    let compared =
        run_command(assist(["compare", "--pairs", "2"]).arg(&hints).arg("--").arg(folder.at("job")).arg("0"));
    assert_eq!(compared.code, 0, "{}", compared.err);
    // What is no text is no script.
    let garbage = folder.write("garbage", b"\x01\x02\0\x03");
    std::fs::set_permissions(&garbage, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ran = run_command(assist(["run", "--"]).arg(&garbage));
    assert!(ran.code == 1 && ran.err.contains("Exec format error"), "{ran:?}");
}

/// Whoever reads the hints from a pipe reads nothing else.
#[test]
fn hints_on_standard_output_stand_there_alone() {
    let folder = Folder::new();
    let trace = folder.at("t.imt");
    let read = reading(&folder.strided(), &folder.data("data"), 0);
    assert_eq!(run_command(assist(["record", "-o"]).arg(&trace).arg("--").args(&read)).code, 0);
    let impresario = crate::support::IMPRESARIO;
    let plan = format!("{impresario} assist plan {} --device disk --cold", trace.display());
    let sh = |script: &str| run_command(Command::new("bash").args(["-c", script]).current_dir(folder.path()));
    let is_plan = |text: &str| {
        let hints: serde_json::Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}:\n{text}"));
        assert!(hints["File"].is_array(), "{text}");
    };
    for output in ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        for more in ["", "--json"] {
            let ran = sh(&format!("{plan} {more} -o {output} | cat"));
            is_plan(&ran.out);
            assert!(ran.err.contains("data"), "the plan is told: {ran:?}");
            // Into a regular file.
            std::fs::write(folder.at("f"), "").unwrap();
            let ran = sh(&format!("{plan} {more} -o {output} > f && cat f && ls -A"));
            let (hints, names) = ran.out.rsplit_once("}\n").unwrap();
            is_plan(&format!("{hints}}}"));
            assert!(ran.err.contains("data") && names.lines().any(|name| name == "f"), "{ran:?}");
        }
    }
    let ran = sh(&format!("{plan} -o f > f && cat f"));
    is_plan(&ran.out);
    // Elsewhere the plan is told as always.
    let ran = sh(&format!("{plan} -o /dev/fd/7 7> g"));
    assert!(ran.err.is_empty() && ran.out.contains("data"), "{ran:?}");
    is_plan(&std::fs::read_to_string(folder.at("g")).unwrap());
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let folder = Folder::new();
    let hints = folder.hints("hints.json", &[&folder.data("data")]);
    for name in ["no-such-program-anywhere", "/no/such/program"] {
        for ran in both(&folder, &hints, &words(&[name])) {
            assert_eq!((ran.code, ran.err.lines().count()), (2, 1), "{}", ran.err);
            assert!(ran.err.starts_with("impresario: ") && ran.err.contains(name), "{}", ran.err);
        }
    }
    assert!(!folder.at("both.imt").exists(), "a trace of nothing is left");
}

#[test]
fn programs_that_the_library_cannot_reach_run_and_are_told() {
    let folder = Folder::new();
    let data = folder.data("data");
    let hints = folder.hints("hints.json", &[&data]);
    let check = |program: PathBuf, reason: &str| {
        let read = reading(&program, &data, 0);
        let [recorded, guided] = both(&folder, &hints, &read);
        assert_eq!((recorded.code, recorded.err.lines().count()), (2, 1), "{}", recorded.err);
        assert!(recorded.err.contains(reason) && recorded.err.contains("--watch"), "{}", recorded.err);
        assert_eq!((guided.code, guided.out), (0, plain(&read)), "{}", guided.err);
        assert!(guided.err.contains("runs without hints") && guided.err.contains(reason), "{}", guided.err);
    };
    match try_compile(folder.path(), "strided", &["-static"]) {
        Some(program) => check(program, "statically linked"),
        None => skip("static-libc", "no C library to link a static program with"),
    }
    if !require("root") {
        return;
    }
    let program = folder.at("gains");
    std::fs::copy(folder.strided(), &program).unwrap();
    std::os::unix::fs::chown(&program, Some(65534), None).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    check(program, "gains rights");
}

/// As programs in Go are, too. What cannot be helped costs neither their results nor what is there already.
#[test]
fn a_static_program_is_told_of_in_one_line_and_loses_nothing() {
    let folder = Folder::new();
    let (data, trace) = (folder.data("data"), folder.write("t.imt", "of another run"));
    let mut programs =
        ["-static", "-static-pie"].into_iter().filter_map(|flag| try_compile(folder.path(), "strided", &[flag]));
    let Some(first) = programs.next() else {
        return skip("static-libc", "no C library to link a static program with");
    };
    for program in std::iter::once(first).chain(programs) {
        let told = |ran: &Ran| {
            let is_told = ran.err.contains("statically linked") && ran.err.contains("--watch");
            assert!(is_told && ran.err.lines().count() == 1, "{}", ran.err);
        };
        let read = reading(&program, &data, 0);
        for args in [&["run", "-q"][..], &["run", "-q", "--learn"], &["run", "-q", "--instances", "2"]] {
            let ran = run_command(assist(args).arg("--").args(&read).env("XDG_DATA_HOME", folder.at("share")));
            let times = if args.contains(&"2") { 2 } else { 1 };
            assert_eq!((ran.code, ran.out.as_str()), (0, &*plain(&read).repeat(times)), "{args:?}: {}", ran.err);
            assert_eq!(ran.err, "", "{args:?}");
        }
        let fails = run_command(Command::new(&program).arg("/nowhere"));
        let ran = run_command(assist(["run", "-q", "--"]).arg(&program).arg("/nowhere"));
        assert_eq!((ran.code, ran.out.as_str()), (fails.code, fails.out.as_str()));
        assert!(fails.code != 0 && ran.err.ends_with(&fails.err), "{}", ran.err);
        let ran = run_command(assist(["record", "-f", "-o"]).arg(&trace).arg("--").args(&read));
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "it is not run for a trace of nothing");
        told(&ran);
        assert_eq!(std::fs::read_to_string(&trace).unwrap(), "of another run");
        // The line at the end tells how much was not seen.
        let ran = run_command(assist(["run", "--"]).args(&read));
        let last = ran.err.lines().last().unwrap_or_default();
        assert!(last.starts_with("impresario: Saw 0 B of ") && last.contains("unseen"), "{}", ran.err);
        told(&Ran { err: ran.err.lines().take(1).collect(), ..ran });
    }
}

/// Another loader may refuse to start a program with the library, so its environment must not name it.
#[test]
fn another_loader_gets_no_library() {
    let folder = Folder::new();
    let hints = folder.hints("hints.json", &[&folder.data("data")]);
    let mut bytes = std::fs::read("/usr/bin/printenv").unwrap();
    let ours = |w: &[u8]| w.starts_with(b"/lib64/ld-linux-") || w.starts_with(b"/lib/ld-linux-");
    let Some(at) = bytes.windows(16).position(ours) else {
        return skip("glibc", "printenv is not loaded by the GNU C library's loader");
    };
    let len = bytes[at..].iter().position(|b| *b == 0).unwrap();
    let loader = std::path::PathBuf::from(String::from_utf8(bytes[at..at + len].to_vec()).unwrap());
    let link = tempfile::Builder::new().prefix("l").rand_bytes(4).tempdir_in("/tmp").unwrap();
    let name = link.path().join("ld");
    std::os::unix::fs::symlink(loader, &name).unwrap();
    let name = name.to_str().unwrap().as_bytes();
    bytes[at..at + len].fill(0);
    bytes[at..at + name.len()].copy_from_slice(name);
    let program = folder.at("printenv");
    std::fs::write(&program, bytes).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let printed = words(&[program.to_str().unwrap(), "LD_PRELOAD"]);
    let [_, guided] = both(&folder, &hints, &printed);
    assert!(
        guided.err.contains("runs without hints") && guided.err.contains("does not preload libraries"),
        "{guided:?}"
    );
    assert_eq!((guided.code, guided.out.as_str()), (1, ""), "the variable is not set");
}

#[test]
fn compared_with_itself() {
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let hints = folder.hints("hints.json", &[&data]);
    // As a user without rights where possible, since root empties the whole machine's cache.
    let nobody = if is_root() { Nobody::new(&folder) } else { None };
    let compare = |program: &[String]| {
        let mut command = match &nobody {
            Some(nobody) => nobody.command(["compare"]),
            None => assist(["compare"]),
        };
        run_command(command.arg(&hints).args(["--pairs", "2", "--"]).args(program).current_dir("/"))
    };
    let ran = compare(&reading(&program, &data, 0));
    assert_eq!(ran.code, 0, "{}", ran.err);
    let verdicts = ["faster with hints", "slower with hints", "unresolved"];
    let verdict = ran.out.lines().find(|l| l.starts_with("time saved")).unwrap_or_default();
    assert!(verdict.contains("2 pairs") && verdicts.iter().any(|v| verdict.contains(v)), "{}", ran.out);
    assert!(ran.out.contains("last guided run: ") && !ran.out.contains(": 0 hints"), "{}", ran.out);
    for (program, wanted) in [
        (&["cat", "/proc/sys/kernel/random/uuid"][..], "print"),
        (&["sh", "-c", "exit 5"], "5"),
        (&["no-such-program-anywhere"], "no-such-program-anywhere"),
    ] {
        let ran = compare(&words(program));
        assert!(ran.code != 0 && ran.err.contains(wanted), "{program:?}: {ran:?}");
    }
}

#[test]
fn another_mount_name_space() {
    if !require("root") {
        return;
    }
    let folder = Folder::new();
    let (program, data) = (folder.strided(), folder.data("data"));
    let elsewhere = folder.write("elsewhere", "");
    let hints = folder.hints("hints.json", &[&data]);
    let script = format!(
        "mount --bind {} {} && exec {}",
        data.display(),
        elsewhere.display(),
        reading(&program, &elsewhere, 0).join(" ")
    );
    let inside = words(&["unshare", "-m", "sh", "-c", &script]);
    if run_command(std::process::Command::new(&inside[0]).args(&inside[1..])).code != 0 {
        return skip("root", "mounting is not allowed here");
    }
    let alone = plain(&reading(&program, &data, 0));
    for ran in both(&folder, &hints, &inside) {
        assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    }
}
