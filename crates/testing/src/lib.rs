//! What a test needs from the machine: `/dev/fuse`, root's rights, a program. A test that cannot run says so here, so
//! that it is counted as skipped and not as passed. And how it waits for what others do, and which ports its servers have.
//!
//! - `IMPRESARIO_REQUIRE` (`fuse,root`, or `all`) lists needs that must be met: a test without one fails.
//! - `IMPRESARIO_PYTHON` names a Python that tests take if it has the modules that they need.
//! - `IMPRESARIO_SKIPPED` names a file; every skip appends a line to it. The test harness hides what passing tests
//!   print, so `scripts/test.sh` counts these lines.
//!
//! ```
//! # use impresario_testing::require;
//! fn a_test_that_mounts() {
//!     if !require("fuse") {
//!         return;
//!     }
//!     // …
//! }
//! # a_test_that_mounts();
//! ```

pub mod campaign;
pub mod ceph;
pub mod certificates;
pub mod content;
pub mod documents;
pub mod fuse;
pub mod gluster;
pub mod idle;
pub mod linear;
pub mod link;
mod log;
pub mod munge;
pub mod page_cache;
pub mod plans;
mod ports;
pub mod power;
pub mod suites;
mod waiting;

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

pub use log::logged;
pub use ports::{free_address, free_ports};
pub use waiting::{PATIENCE, eventually, until, within};

/// Whether the machine has what the test needs: `fuse` (`/dev/fuse` can be opened), `root` (the effective user is root),
/// `strace` (it is installed and may trace, which a container can forbid), or else a program of that name in `PATH`. When
/// not, the test is [skipped](skip).
#[track_caller]
pub fn require(need: &str) -> bool {
    let lacking = match need {
        "fuse" => File::options().read(true).write(true).open("/dev/fuse").err().map(|e| format!("/dev/fuse: {e}")),
        "root" => (!is_root()).then(|| "needs root's rights".to_string()),
        "strace" if installed("strace") => cannot_trace(),
        program => (!installed(program)).then(|| format!("{program} is not installed")),
    };
    match lacking {
        None => true,
        Some(why) => {
            skip(need, why);
            false
        }
    }
}

/// Records that the running test, or a part of it, is skipped because the machine lacks `need`; the test returns after
/// this call.
///
/// # Panics
/// When `IMPRESARIO_REQUIRE` lists the need.
#[track_caller]
pub fn skip(need: &str, why: impl Display) {
    let demanded = std::env::var("IMPRESARIO_REQUIRE").unwrap_or_default();
    assert!(!demands(&demanded, need), "IMPRESARIO_REQUIRE={demanded}, but {need} is missing here: {why}");
    let thread = std::thread::current();
    // The harness gives a test's thread the test's name, except when it runs tests one by one on its own thread.
    let test = match thread.name() {
        Some(name) if name != "main" => name.to_string(),
        _ => std::panic::Location::caller().to_string(),
    };
    eprintln!("skipped: {test}: {need}: {why}");
    if let Some(path) = std::env::var_os("IMPRESARIO_SKIPPED") {
        let program = std::env::args_os().next().unwrap_or_default();
        let line = format!("{}\t{test}\t{need}: {why}\n", program.display());
        // One write, so that lines of tests that run at the same time stay whole.
        let written =
            File::options().create(true).append(true).open(&path).and_then(|mut f| f.write_all(line.as_bytes()));
        written.unwrap_or_else(|e| panic!("IMPRESARIO_SKIPPED={}: {e}", path.display()));
    }
}

/// A Python that has all of these modules, such as `numpy, h5py`: the one that `IMPRESARIO_PYTHON` names, those in `PATH`, or
/// the system's, for which there are Debian's packages. Without one the test is [skipped](skip).
#[track_caller]
pub fn python(modules: &str) -> Option<PathBuf> {
    let named = std::env::var_os("IMPRESARIO_PYTHON").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|folder| folder.join("python3"));
    let mut all = named.into_iter().chain(in_path).chain([PathBuf::from("/usr/bin/python3")]);
    let has = |python: &PathBuf| {
        let tried = Command::new(python).args(["-c", &format!("import {modules}")]).output();
        tried.is_ok_and(|tried| tried.status.success())
    };
    let found = all.find(has);
    if found.is_none() {
        skip(modules, "no python3 has all of them (Debian: python3-NAME; PyPI; IMPRESARIO_PYTHON names a Python)");
    }
    found
}

/// Whether the tests run as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Why strace cannot trace a program, if so.
fn cannot_trace() -> Option<String> {
    let tried = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    match tried {
        Ok(tried) if tried.status.success() => None,
        Ok(tried) => Some(format!("cannot trace: {}", String::from_utf8_lossy(&tried.stderr).trim())),
        Err(error) => Some(format!("cannot run strace: {error}")),
    }
}

fn installed(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

fn demands(list: &str, need: &str) -> bool {
    list.split(',').map(str::trim).any(|word| word == need || word == "all")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_list_demands_its_words_or_all() {
        assert!(demands("fuse,root", "root") && demands(" fuse , root ", "fuse") && demands("all", "fio"));
        assert!(!demands("", "root") && !demands("fuse", "root") && !demands("fuse-too", "fuse"));
    }

    /// Not a test by itself: the next one runs it in a process of its own.
    #[test]
    #[ignore = "run by another test as a process"]
    fn lacks_a_program() {
        assert!(!require("no-such-program-anywhere"));
        skip("a second thing", "is missing too");
    }

    /// Not a test by itself: the next one runs it in a process of its own.
    #[test]
    #[ignore = "run by another test as a process"]
    fn may_not_trace() {
        assert!(!require("strace"));
    }

    #[test]
    fn strace_that_may_not_trace_is_lacking() {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("impresario-strace-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let (strace, record) = (folder.join("strace"), folder.join("skipped"));
        std::fs::write(&strace, "#!/bin/sh\necho 'strace: ptrace: Operation not permitted' >&2; exit 1\n").unwrap();
        std::fs::set_permissions(&strace, PermissionsExt::from_mode(0o755)).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "tests::may_not_trace"]).env("IMPRESARIO_SKIPPED", &record);
        let ran = command.env("PATH", &folder).env("IMPRESARIO_REQUIRE", "").output().unwrap();
        let lines = std::fs::read_to_string(&record).unwrap_or_default();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(ran.status.success(), "{ran:?}");
        assert!(lines.ends_with("\tstrace: cannot trace: strace: ptrace: Operation not permitted\n"), "{lines}");
    }

    #[test]
    fn skips_are_recorded_and_fail_where_they_are_demanded() {
        let record = std::env::temp_dir().join(format!("impresario-skipped-{}", std::process::id()));
        let run = |demanded: &str| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--ignored", "--exact", "tests::lacks_a_program"]).env("IMPRESARIO_SKIPPED", &record);
            command.env("IMPRESARIO_REQUIRE", demanded).output().unwrap()
        };
        assert!(run("fuse,root").status.success());
        let lines = std::fs::read_to_string(&record).unwrap();
        std::fs::remove_file(&record).unwrap();
        let fields: Vec<Vec<&str>> = lines.lines().map(|line| line.split('\t').skip(1).collect()).collect();
        let why = "no-such-program-anywhere: no-such-program-anywhere is not installed";
        assert_eq!(
            fields,
            [["tests::lacks_a_program", why], ["tests::lacks_a_program", "a second thing: is missing too"]]
        );

        let refused = run("no-such-program-anywhere");
        assert!(!refused.status.success() && !record.exists());
        let said = String::from_utf8_lossy(&refused.stdout).into_owned();
        assert!(
            said.contains("IMPRESARIO_REQUIRE=no-such-program-anywhere, but no-such-program-anywhere is missing"),
            "{said}"
        );
    }
}
