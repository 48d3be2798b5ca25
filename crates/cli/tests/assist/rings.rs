//! fio's engine for io_uring makes its system calls by instructions of its own: its reads are seen in its rings.

use std::collections::BTreeSet;
use std::process::Command;

use impresario_testing::{require, skip};
use impresario_trace::{Trace, TraceOp};

use crate::support::run_command;
use crate::tools::{COUNT, Folder, PIECE, STRIDE, assist};

/// The number before some words of a text; 0 when they are not there.
fn number_before(text: &str, words: &str) -> u64 {
    let Some((before, _)) = text.split_once(words) else { return 0 };
    before.trim_end().rsplit(' ').next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// Records a run: each read is in the trace, or it is said that it is not.
fn recorded(how: &str, more: &[&str]) {
    if !require("fio") {
        return;
    }
    let folder = Folder::new();
    let data = folder.cached("data");
    let (size, bytes) = (COUNT * STRIDE, COUNT * PIECE);
    let mut words = vec!["fio".to_string(), "--name=r".into(), format!("--filename={}", data.display())];
    words.extend([
        format!("--rw=read:{}", STRIDE - PIECE),
        format!("--bs={PIECE}"),
        format!("--size={size}"),
        format!("--io_size={bytes}"),
    ]);
    let rest = "--readonly --ioengine=io_uring --iodepth=2 --invalidate=0 --thinktime=8000 --thinktime_blocks=1";
    words.extend(rest.split(' ').chain(more.iter().copied()).map(String::from));
    words.push(format!("--output={}", folder.at("fio.log").display()));
    let alone = run_command(Command::new(&words[0]).args(&words[1..]).current_dir(folder.path()));
    if alone.code != 0 {
        return skip("io_uring", format!("fio cannot read by io_uring here ({how}): {}", alone.err));
    }
    let trace = folder.at("t.imt");
    let mut command = assist(["record", "-o"]);
    let ran = run_command(command.arg(&trace).arg("--").args(&words).current_dir(folder.path()));
    assert_eq!(ran.code, 0, "{how}: {}", ran.err);
    let said = ran.err.lines().find(|line| line.contains("Saw ")).unwrap_or_default();
    let trace = Trace::load(&trace).unwrap();
    let path = data.as_os_str().as_encoded_bytes();
    let ours = trace.records.iter().filter(|r| r.op == TraceOp::Read && trace.files[r.file.0 as usize].path == path);
    let reads: Vec<_> = ours.map(|r| (r.offset, r.moved_bytes())).collect();
    let places: BTreeSet<u64> = reads.iter().map(|(offset, _)| offset / STRIDE).collect();
    assert!(reads.iter().all(|(offset, bytes)| offset % STRIDE == 0 && *bytes == PIECE), "{how}: {reads:?}");
    // One that fio was about to fill for the next read may be taken for that.
    assert!(!reads.is_empty() && places.len() * 4 >= reads.len() * 3, "{how}: {said}; {reads:?}");
    // On a machine that is too busy to look in time.
    if said.contains("cannot be looked into") {
        return;
    }
    let missed = number_before(said, "accesses came too fast");
    assert_eq!(reads.len() as u64 + missed, COUNT, "{how}: {said}");
}

#[test]
fn reads_of_fio_by_io_uring_are_recorded() {
    recorded("handed over", &[]);
}

#[test]
fn reads_of_fio_that_the_kernel_takes_by_itself_are_recorded() {
    recorded("polled", &["--sqthread_poll=1"]);
}
