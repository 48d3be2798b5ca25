//! Other people's suites for file systems: `pjdfstest` and `fsx`, which `make soak` installs with cargo. They take minutes, so
//! only tests that are left to `make soak` run them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// What became of one test of a suite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It passed.
    Passed,
    /// It failed.
    Failed,
    /// It was not run.
    Skipped,
}

/// Runs a program to its end.
///
/// # Panics
/// When it takes longer than that.
fn run_within(command: &mut Command, limit: Duration) -> Output {
    let dir = tempfile::tempdir().expect("a folder");
    let file = |name: &str| fs::File::create(dir.path().join(name)).expect("a file");
    command.stdin(Stdio::null()).stdout(file("out")).stderr(file("err"));
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let end = Instant::now() + limit;
    let read = |name: &str| fs::read(dir.path().join(name)).unwrap_or_default();
    loop {
        if let Some(status) = child.try_wait().expect("a process") {
            return Output { status, stdout: read("out"), stderr: read("err") };
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{command:?} hangs:\n{}", String::from_utf8_lossy(&read("out")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs all of `pjdfstest` in a folder that is a mount point, as root; the outcomes by the tests' names.
///
/// # Panics
/// When it does not end, or says nothing that can be understood.
pub fn pjdfstest(folder: &Path) -> BTreeMap<String, Outcome> {
    let local = tempfile::tempdir().expect("a folder");
    let config = |name: &str, settings: &str| {
        let text = format!(
            "[dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n\
             [settings]\nnaptime = 0.05\n{settings}\n\
             [features]\nposix_fallocate = {{}}\nrename_ctime = {{}}\nutime_now = {{}}\nutimensat = {{}}\n"
        );
        let path = local.path().join(name);
        fs::write(&path, text).expect("a file");
        path
    };
    // The suite remounts with `mount`, which asks a helper that knows nothing of it; `-i` leaves it to the kernel. That is busy
    // until the file system has been told of the last file closed.
    let (programs, mount) = (local.path().join("bin"), local.path().join("bin/mount"));
    fs::create_dir(&programs).expect("a folder");
    let text = format!(
        "#!/bin/sh\n[ \"$3\" = '{}' ] || exit 1\nfor i in 1 2 3 4 5 6 7 8 9 10; do\n/usr/bin/mount -i \"$@\" && exit 0\nsleep \
         0.1\ndone\nexit 1\n",
        folder.display()
    );
    fs::write(&mount, text).expect("a file");
    fs::set_permissions(&mount, fs::Permissions::from_mode(0o755)).expect("a file of our own");
    let path = std::env::var("PATH").unwrap_or_default();
    let run = |config: &Path, which: &[&str], path: &str| {
        let mut command = Command::new("pjdfstest");
        command.arg("-c").arg(config).arg("-p").arg(folder).arg("-s").arg(local.path()).args(which).env("PATH", path);
        run_within(&mut command, Duration::from_secs(900))
    };
    let outcomes = |output: &Output| -> BTreeMap<String, Outcome> {
        String::from_utf8_lossy(&output.stdout).lines().filter_map(outcome).collect()
    };
    // Some of its tests leave files open, after which nothing can be remounted: those that remount come apart.
    let whole = run(&config("all.toml", ""), &[], &path);
    let again =
        run(&config("remount.toml", "allow_remount = true"), &["erofs"], &format!("{}:{path}", programs.display()));
    let mut found = outcomes(&whole);
    found.extend(outcomes(&again));
    let said = |output: &Output| String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    assert!(found.len() > 300, "{}{}", said(&whole), said(&again));
    found
}

/// A line like `chmod::efault_path      ok`.
fn outcome(line: &str) -> Option<(String, Outcome)> {
    let mut words = line.split_whitespace();
    let (name, outcome, None) = (words.next()?, words.next()?, words.next()) else { return None };
    let outcome = match outcome {
        "ok" => Outcome::Passed,
        "FAILED" => Outcome::Failed,
        "skipped" => Outcome::Skipped,
        _ => return None,
    };
    (name.contains("::") && !line.starts_with(char::is_whitespace)).then(|| (name.to_string(), outcome))
}

/// What `fsx` may use beside reads, writes, truncations, syncs and reopenings.
#[derive(Clone, Copy, Debug)]
pub struct Fsx {
    /// Maps, also shared and written.
    pub maps: bool,
    /// `posix_fallocate` and holes.
    pub space: bool,
    /// `sendfile` and `copy_file_range`.
    pub copies: bool,
}

impl Fsx {
    /// Runs `fsx` on a file; it names the first byte that is wrong and the calls before it.
    ///
    /// # Panics
    /// When it fails or does not end.
    pub fn run(self, file: &Path, seed: u64, calls: u64) {
        let local = tempfile::tempdir().expect("a folder");
        let config = local.path().join("fsx.toml");
        let weight = |is_used: bool, weight: u32| if is_used { weight } else { 0 };
        let (maps, space, copies) = (weight(self.maps, 10), weight(self.space, 5), weight(self.copies, 5));
        let text = format!(
            "flen = 1048576\n[opsize]\nmax = 131072\n[weights]\nclose_open = 2\nread = 10\nwrite = 10\ntruncate = 4\n\
             fsync = 1\nfdatasync = 1\nposix_fadvise = 3\nmapread = {maps}\nmapwrite = {maps}\ninvalidate = {}\n\
             posix_fallocate = {space}\npunch_hole = {space}\nsendfile = {copies}\ncopy_file_range = {copies}\n",
            maps / 5
        );
        fs::write(&config, text).expect("a file");
        let mut command = Command::new("fsx");
        command.arg("-q").arg("-f").arg(&config).args(["-N", &calls.to_string(), "-S", &seed.to_string(), "-P"]);
        let output = run_within(command.arg(local.path()).arg(file), Duration::from_secs(600));
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{command:?}: {}\n{}", output.status, said.concat());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_found_in_what_the_suite_says() {
        let said = "chmod::efault_path      ok\nchown::erofs_named    skipped\n\tRemounts ok\nlink::a::b  FAILED\n\
                    Summary: 1 failed\n   8: _start\n   0: a::b ok\n";
        let found: Vec<_> = said.lines().filter_map(outcome).collect();
        let name = |name: &str| name.to_string();
        assert_eq!(
            found,
            [
                (name("chmod::efault_path"), Outcome::Passed),
                (name("chown::erofs_named"), Outcome::Skipped),
                (name("link::a::b"), Outcome::Failed)
            ]
        );
    }
}
