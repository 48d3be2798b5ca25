//! Reads that the preloaded library cannot see, as the kernel reports them. Needs root.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use impresario_assist::backend::FileId;
use impresario_assist::watch::{Fanotify, Seen, Tracefs};
use impresario_testing::{require, skip, until};

/// A file of 64 pages below the folder of the tests: tmpfs has no such events.
fn file() -> (tempfile::TempDir, std::path::PathBuf, FileId) {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = folder.path().join("data");
    File::create(&path).unwrap().write_all(&vec![7; 64 * 4096]).unwrap();
    let meta = std::fs::metadata(&path).unwrap();
    (folder, path, FileId { dev: meta.dev(), ino: meta.ino() })
}

/// Reads pages 10 to 12 with a program that knows nothing of us; its process.
fn read_three_pages(path: &std::path::Path) -> u32 {
    let mut child = Command::new("dd")
        .arg(format!("if={}", path.display()))
        .args(["of=/dev/null", "bs=4096", "skip=10", "count=3", "status=none"])
        .spawn()
        .unwrap();
    let process = child.id();
    assert!(child.wait().unwrap().success());
    process
}

fn covers(seen: &[Seen], process: u32, number: FileId) -> bool {
    (10..13).all(|page| {
        seen.iter().any(|s| {
            s.thread == process
                && s.inode == number.ino
                && s.device == (libc::major(number.dev), libc::minor(number.dev))
                && (s.offset..s.offset + s.len).contains(&(page * 4096))
        })
    })
}

#[test]
fn the_trace_of_the_kernel_tells_of_reads_of_the_watched_file_alone() {
    if !require("root") {
        return;
    }
    let (folder, path, number) = file();
    let mut trace = match Tracefs::new(&[number]) {
        Ok(trace) => trace,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return skip("tracefs", e);
        }
        Err(e) => panic!("{e}"),
    };
    let other = folder.path().join("other");
    std::fs::write(&other, [1; 4096]).unwrap();
    std::fs::read(&other).unwrap();
    let process = read_three_pages(&path);
    let mut seen = Vec::new();
    until("the reads are traced", || trace.drain(1000, |s| seen.push(s)).is_ok() && covers(&seen, process, number));
    assert!(seen.iter().all(|s| s.inode == number.ino), "{seen:?}");
    let instance = format!("/sys/kernel/tracing/instances/impresario-{}", std::process::id());
    assert!(std::path::Path::new(&instance).is_dir());
    drop(trace);
    assert!(!std::path::Path::new(&instance).exists(), "nothing stays in the kernel");
}

#[test]
fn announced_reads_go_on_at_once_and_are_told() {
    if !require("root") {
        return;
    }
    let (_folder, path, number) = file();
    let listener = match Fanotify::new() {
        Ok(listener) => listener,
        Err(e) => {
            return skip("fanotify", format!("this kernel has no pre-content events: {e}"));
        }
    };
    let open = File::open(&path).unwrap();
    if let Err(e) = listener.add(&open) {
        return skip("fanotify", format!("this file system has no pre-access events: {e}"));
    }
    let process = read_three_pages(&path);
    let mut seen = Vec::new();
    until("the reads are announced", || {
        listener.drain(1000, |s| seen.push(s));
        covers(&seen, process, number)
    });
    listener.remove(&open).unwrap();
    read_three_pages(&path);
    assert_eq!((listener.drain(1000, |_| ()), listener.lost()), (0, 0), "no longer marked");
}
