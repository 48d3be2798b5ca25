//! What has to come from a disk before a guided program starts: a small file, and nothing of the program with all subcommands.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use impresario_testing::require;

use crate::support::{IMPRESARIO, MAIN, put, run_command};
use crate::tools::{Folder, library};

/// The command in a folder, found by that path and with the library beside it, as users have it.
fn command(folder: &Path) -> Command {
    let mut command = Command::new(folder.join("impresario"));
    command
        .env_remove("IMPRESARIO_ASSIST_LIBRARY")
        .env_remove("IMPRESARIO_ASSIST_SOCKET")
        .env("XDG_DATA_HOME", "/nowhere");
    command
}

#[test]
fn a_program_is_guided_without_what_other_subcommands_need() {
    let folder = Folder::new();
    let place = folder.path().canonicalize().unwrap();
    put(Path::new(IMPRESARIO), &place);
    put(library(), &place);
    let data = folder.data("data");
    // The program looks at what its starter has mapped.
    let script = format!("cat {} >/dev/null; cat /proc/$PPID/maps; exit 7", data.display());
    let ran = run_command(command(&place).args(["assist", "run", "--", "sh", "-c", &script]));
    assert_eq!(ran.code, 7, "{}", ran.err);
    assert!(ran.err.starts_with("impresario: Saw ") && ran.err.lines().count() == 1, "{}", ran.err);
    let own: Vec<&str> = ran.out.lines().filter(|line| line.contains("/impresario")).collect();
    let front = place.join("impresario");
    assert!(!own.is_empty() && own.iter().all(|line| line.ends_with(front.to_str().unwrap())), "{own:?}");
}

/// The kernel may read all of a file at the first fault in it.
#[test]
fn the_command_is_small() {
    if !require("strip") {
        return;
    }
    // As `make install` leaves them: what debuggers want is no part of it.
    let folder = Folder::new();
    let size = |path: &str| {
        let stripped = folder.path().join("stripped");
        let done = Command::new("strip").arg("-o").arg(&stripped).arg(path).status().unwrap();
        assert!(done.success());
        fs::metadata(stripped).unwrap().len()
    };
    let (small, large) = (size(IMPRESARIO), size(MAIN));
    assert!(small * 2 < large, "{small} of {large}");
}

#[test]
fn the_other_half_is_found_or_named() {
    let folder = Folder::new();
    let prefix = folder.path().canonicalize().unwrap();
    let bin = prefix.join("bin");
    let installed = prefix.join("lib/impresario");
    fs::create_dir_all(&bin).unwrap();
    fs::create_dir_all(&installed).unwrap();
    put(Path::new(IMPRESARIO), &bin);
    for words in [&["status", "x.toml"][..], &["assist", "record", "--", "true"], &["--help"], &[]] {
        let ran = run_command(command(&bin).args(words));
        assert_eq!((ran.code, ran.out.as_str(), ran.err.lines().count()), (1, "", 1), "{words:?}: {ran:?}");
        assert!(ran.err.starts_with("impresario: ") && ran.err.contains("impresario-main"), "{}", ran.err);
        assert!(ran.err.contains("make install"), "{}", ran.err);
    }
    put(Path::new(MAIN), &installed);
    let ran = run_command(command(&bin).arg("--version"));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert!(ran.out.starts_with("impresario "), "{}", ran.out);
    // It bears the name by which it was started, and finds what is beside the command.
    let ran = run_command(command(&bin).arg0("by-another-name").arg("status"));
    assert!(ran.code == 2 && ran.err.contains("Usage: by-another-name status"), "{ran:?}");
    let beside = put(library(), &bin);
    let ran = run_command(command(&bin).args(["assist", "library"]));
    assert_eq!((ran.code, ran.out.trim_end()), (0, beside.to_str().unwrap()), "{}", ran.err);
}
