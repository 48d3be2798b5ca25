//! The library starts in programs whose C library is older than the one that it was built with.

use std::process::Command;

use impresario_testing::require;

use crate::support::library;

fn readelf(flag: &str) -> String {
    let output = Command::new("readelf").args(["--wide", flag]).arg(library()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A program does not start with a library that asks for a version that its C library does not have.
#[test]
fn nothing_newer_than_glibc_2_17_is_asked_for() {
    if !require("readelf") {
        return;
    }
    let text = readelf("--version-info");
    let versions: Vec<(u32, u32)> = text
        .split_whitespace()
        .filter_map(|word| {
            let mut numbers = word.strip_prefix("GLIBC_")?.split('.').map(|n| n.parse().unwrap());
            Some((numbers.next()?, numbers.next()?))
        })
        .collect();
    assert!(!versions.is_empty(), "{text}");
    assert!(versions.iter().all(|v| *v <= (2, 17)), "asks for more than glibc 2.17:\n{text}");
}

/// Before glibc 2.34 these functions are in libraries of their own, which not every program has loaded.
#[test]
fn the_libraries_of_old_systems_are_asked_for() {
    if !require("readelf") {
        return;
    }
    let text = readelf("--dynamic");
    for library in ["libdl.so.2", "libpthread.so.0", "libc.so.6"] {
        assert!(text.contains(&format!("[{library}]")), "{library} is not asked for:\n{text}");
    }
}

/// Programs could not link these by name before glibc 2.33, but the library's own parts call them: as hooks they are there,
/// and go to the kernel where the C library has none.
#[test]
fn functions_that_old_systems_lack_are_hooks() {
    if !require("readelf") {
        return;
    }
    let text = readelf("--dyn-syms");
    let symbol = |name: &str| {
        let line = text.lines().find(|line| line.split_whitespace().nth(7).is_some_and(|n| n == name));
        line.unwrap_or_else(|| panic!("{name} is not there:\n{text}"))
    };
    for name in ["open64", "impresario_assist_state", "stat64", "lstat64", "fstat64", "fstatat64", "statx"] {
        assert!(!symbol(name).contains(" UND "), "{name} is asked for:\n{text}");
    }
}
