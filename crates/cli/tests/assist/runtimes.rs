//! Programs whose language makes its system calls in a way of its own: Java's virtual machine by the C library, Go past it.

use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::coverage::Coverage;
use impresario_assist::report::Report;
use impresario_testing::require;
use impresario_trace::{Trace, TraceOp};

use crate::support::run_command;
use crate::tools::{Folder, PIECE, STRIDE, WAIT_MS, assist, forget, of, plain};

/// Pieces of each file.
const PIECES: u64 = 24;

/// A source beside this file.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/assist/runtimes").join(name)
}

/// A file that is not in memory.
fn data(folder: &Folder, name: &str) -> PathBuf {
    let seed = name.bytes().fold(1u64, |seed, byte| seed * 31 + u64::from(byte));
    let path =
        folder.write(name, (0..PIECES * STRIDE).map(|at| (at.wrapping_mul(seed) >> 9) as u8).collect::<Vec<u8>>());
    forget(&path);
    path
}

/// Runs a program without a plan; its result is its own. What was seen, and the last line.
#[track_caller]
fn guided(folder: &Folder, words: &[String], alone: &str) -> (Report, Coverage, String) {
    let report = folder.at("report.json");
    let mut command = assist(["run", "--report"]);
    command.arg(&report).arg("--").args(words).env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
    let ran = run_command(&mut command);
    assert_eq!((ran.code, ran.out.as_str()), (0, alone), "{}", ran.err);
    let report: Report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let coverage = report.coverage.expect("the kernel keeps an account");
    assert_eq!((report.cut_off, report.dropped_accesses), (0, 0));
    (report, coverage, ran.err)
}

/// What a trace has of a file: its reads, by place, and the bytes that were mapped.
fn recorded(trace: &Trace, path: &Path) -> (Vec<(u64, u64)>, u64) {
    let is_of = |number: usize| trace.files[number].path == path.as_os_str().as_encoded_bytes();
    let ours: Vec<_> = trace.records.iter().filter(|r| is_of(r.file.0 as usize)).collect();
    let mut reads: Vec<_> =
        ours.iter().filter(|r| r.op == TraceOp::Read).map(|r| (r.offset, r.moved_bytes())).collect();
    reads.sort_unstable();
    // No bytes are moved by it.
    (reads, ours.iter().filter(|r| r.op == TraceOp::Map).map(|r| r.len).sum())
}

/// Bytes of reads, however they were cut, in each piece that was to be read.
fn of_pieces(reads: &[(u64, u64)]) -> Vec<u64> {
    let inside = |piece: u64, (at, len): (u64, u64)| {
        let (from, to) = (at.max(piece * STRIDE), (at + len).min(piece * STRIDE + PIECE));
        to.saturating_sub(from)
    };
    (0..PIECES).map(|piece| reads.iter().map(|read| inside(piece, *read)).sum()).collect()
}

/// Channels, streams and maps: each read is seen, by its place.
#[test]
fn what_java_reads_is_seen() {
    if !require("java") || !require("javac") {
        return;
    }
    let folder = Folder::new();
    let made = run_command(Command::new("javac").arg("-d").arg(folder.path()).arg(source("Reads.java")));
    assert_eq!(made.code, 0, "{}", made.err);
    let ways = ["channel", "position", "random", "stream", "asynchronous", "map"];
    let files = ways.map(|way| data(&folder, way));
    let numbers = [PIECE, STRIDE, PIECES].map(|number| number.to_string());
    let mut words = ["java", "-XX:TieredStopAtLevel=1", "-Xmx64m", "-cp"].map(String::from).to_vec();
    words.push(folder.path().display().to_string());
    words.extend(["Reads".into(), folder.at("").display().to_string()]);
    words.extend(numbers.into_iter().chain([ways.join(",")]));
    let alone = plain(&words);
    assert_eq!(alone.lines().count(), ways.len());

    let trace = folder.at("t.imt");
    let ran = run_command(assist(["record", "-o"]).arg(&trace).arg("--").args(&words));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    let trace = Trace::load(&trace).unwrap();
    for (way, file) in ways.into_iter().zip(&files) {
        let (reads, mapped) = recorded(&trace, file);
        match way {
            "map" => assert_eq!((reads.len(), mapped), (0, PIECES * STRIDE), "{way}"),
            _ => assert_eq!((of_pieces(&reads), mapped), (vec![PIECE; PIECES as usize], 0), "{way}: {reads:?}"),
        }
    }

    files.iter().for_each(|file| forget(file));
    let (report, coverage, said) = guided(&folder, &words, &alone);
    for (way, file) in ways.into_iter().zip(&files).filter(|(way, _)| *way != "map") {
        assert!(of(&report, file).read_bytes >= PIECES * PIECE, "{way}: {:?}", of(&report, file));
    }
    // The virtual machine itself reads little in other ways: the kernel's files of it, by the C library's streams.
    assert!(coverage.unseen_calls_bytes() < PIECES * PIECE, "{coverage:?}");
    assert!(coverage.mapped_bytes >= PIECES * STRIDE && said.contains(" of files were mapped"), "{coverage:?}: {said}");
}

/// Go's compiler for one source; what it keeps is used by the next test run.
#[track_caller]
fn compiled(folder: &Folder, name: &str, cgo: &str) -> PathBuf {
    let (program, cache) = (folder.at(name), Path::new(env!("CARGO_TARGET_TMPDIR")).join("go"));
    let mut go = Command::new("go");
    go.args(["build", "-o"]).arg(&program).arg(source(&format!("{name}.go"))).current_dir(folder.path());
    go.env("GOCACHE", cache.join("cache")).env("GOPATH", cache.join("path")).env("GOFLAGS", "").env("CGO_ENABLED", cgo);
    go.env("GOTOOLCHAIN", "local").env("GOPROXY", "off").env("GO111MODULE", "off").env("GOTELEMETRY", "off");
    let made = run_command(&mut go);
    assert_eq!(made.code, 0, "{}", made.err);
    program
}

/// Go calls the kernel by itself: that is not seen, the last line says how much it was, and the C library's calls beside it are seen.
#[test]
fn what_go_reads_by_itself_is_told_as_unseen() {
    if !require("go") {
        return;
    }
    let folder = Folder::new();
    let program = compiled(&folder, "calls", "1");
    let [own, by_c] = ["own", "by_c"].map(|name| data(&folder, name));
    let numbers = [PIECE, STRIDE, PIECES].map(|number| number.to_string());
    let path = |path: &Path| path.to_str().unwrap().to_string();
    let words = [vec![path(&program), path(&own), path(&by_c)], numbers.to_vec()].concat();
    let alone = plain(&words);

    let trace = folder.at("t.imt");
    let ran = run_command(assist(["record", "-o"]).arg(&trace).arg("--").args(&words));
    assert_eq!((ran.code, ran.out.as_str()), (0, alone.as_str()), "{}", ran.err);
    assert!(ran.err.contains("; 1.5 MiB by calls that were not seen"), "{}", ran.err);
    let trace = Trace::load(&trace).unwrap();
    let expected: Vec<_> = (0..PIECES).map(|piece| (piece * STRIDE, PIECE)).collect();
    assert_eq!((recorded(&trace, &by_c).0, recorded(&trace, &own).0), (expected, Vec::new()));

    let (report, coverage, said) = guided(&folder, &words, &alone);
    assert_eq!(of(&report, &by_c).reads, PIECES);
    assert!(report.files.iter().all(|file| Path::new(&file.path) != own), "{report:?}");
    let unseen = coverage.unseen_calls_bytes();
    assert!((PIECES * PIECE..PIECES * PIECE + (1 << 20)).contains(&unseen), "{coverage:?}");
    assert!(said.contains("Saw 1.5 MiB of 3 MiB read") && said.contains("unseen"), "{said}");
}

/// Nor is anything of a program without a C library. It runs as ever, and `run` says why it has no hints.
#[test]
fn a_program_of_go_alone_runs_without_hints() {
    if !require("go") {
        return;
    }
    let folder = Folder::new();
    let program = compiled(&folder, "alone", "0");
    let file = data(&folder, "own");
    let numbers = [PIECE, STRIDE, PIECES].map(|number| number.to_string());
    let words = [vec![program.display().to_string(), file.display().to_string()], numbers.to_vec()].concat();
    let (report, coverage, said) = guided(&folder, &words, &plain(&words));
    assert!(said.contains("it runs without hints") && said.contains("statically linked"), "{said}");
    assert_eq!((report.programs_ever, coverage.seen_bytes), (0, 0));
    assert!(coverage.called_bytes >= PIECES * PIECE && said.contains("Saw 0 "), "{coverage:?}: {said}");
}
