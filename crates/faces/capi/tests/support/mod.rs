//! Compiles C programs against the library that cargo built beside the test, and runs them with a time limit.
#![allow(dead_code)] // each test uses its part

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The root of the source tree.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// A library with its header, in a folder of its own as installing would lay it out.
pub struct Library {
    pub dir: tempfile::TempDir,
    name: &'static str,
}

impl Library {
    /// `libNAME.so`, found beside the test's own program.
    pub fn find(name: &'static str) -> Library {
        let exe = std::env::current_exe().unwrap();
        let deps = exe.parent().unwrap();
        let file = format!("lib{name}.so");
        let places = [deps.join(&file), deps.parent().unwrap().join(&file)];
        let built = places.iter().find(|p| p.exists()).unwrap_or_else(|| panic!("no {file} in {places:?}"));
        let dir = tempfile::tempdir().unwrap();
        let link = |to: &str| std::os::unix::fs::symlink(built, dir.path().join(to)).unwrap();
        link(&file);
        // Under the soname, as installing does.
        let elf = succeed(Command::new("readelf").arg("-d").arg(built));
        let soname = elf.lines().find(|l| l.contains("(SONAME)")).and_then(|l| l.split(['[', ']']).nth(1));
        link(soname.unwrap_or_else(|| panic!("{file} has no soname")));
        Library { dir, name }
    }

    pub fn so(&self) -> PathBuf {
        self.dir.path().join(format!("lib{}.so", self.name))
    }

    /// Compiles a program; warnings are errors.
    pub fn compile(&self, compiler: &str, out: &str, source: &Path, flags: &[&str]) -> PathBuf {
        let program = self.dir.path().join(out);
        let mut cc = Command::new(compiler);
        cc.args(["-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]).args(flags);
        cc.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"));
        cc.arg("-o").arg(&program).arg(source);
        cc.arg(format!("-L{}", self.dir.path().display())).arg(format!("-l{}", self.name));
        cc.arg(format!("-Wl,-rpath,{}", self.dir.path().display()));
        let made = cc.output().unwrap_or_else(|e| panic!("{compiler} cannot be run: {e}"));
        assert!(made.status.success(), "{cc:?}:\n{}", String::from_utf8_lossy(&made.stderr));
        program
    }
}

/// Ends a process whatever happens to the test.
pub struct Reaped(pub Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for a process, with a time limit.
pub fn wait(child: &mut Child, limit: Duration) -> Option<std::process::ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return Some(status),
            None if Instant::now() > end => return None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Runs a program to its end; panics when it takes longer than a minute. Without a folder given it runs in one of its
/// own, which goes with all it left there.
pub fn run(command: &mut Command) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| std::fs::File::create(dir.path().join(name)).unwrap();
    if command.get_current_dir().is_none() {
        command.current_dir(dir.path());
    }
    let child = command.stdin(Stdio::null()).stdout(file("out")).stderr(file("err")).spawn();
    let mut child = Reaped(child.unwrap_or_else(|e| panic!("{command:?}: {e}")));
    let status = wait(&mut child.0, Duration::from_secs(60));
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let (stdout, stderr) = (read("out"), read("err"));
    let Some(status) = status else {
        panic!("{command:?} hangs:\n{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    };
    Output { status, stdout, stderr }
}

/// Runs a program that must succeed; its output.
pub fn succeed(command: &mut Command) -> String {
    let output = run(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}{err}", output.status);
    text
}

/// A command under valgrind: memory errors and definite leaks fail.
pub fn valgrind(program: &Path) -> Option<Command> {
    if !impresario_testing::require("valgrind") {
        return None;
    }
    let mut command = Command::new("valgrind");
    command.args(["-q", "--error-exitcode=99", "--leak-check=full", "--show-leak-kinds=definite"]);
    command.args(["--errors-for-leak-kinds=definite", "--fair-sched=yes"]).arg(program);
    Some(command)
}

/// A command for a program made with `-fsanitize=thread`. The sanitizer needs its addresses where they were planned:
/// kernels with more randomness than it knows are asked to use none.
pub fn sanitized(program: &Path) -> Command {
    let mut command = Command::new("setarch");
    command.arg("-R").arg(program).env("TSAN_OPTIONS", "halt_on_error=1:exitcode=66:ignore_noninstrumented_modules=1");
    command
}

/// Names that a shared library gives to others.
pub fn exported(so: &Path) -> Vec<String> {
    let text = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(so));
    let mut names: Vec<String> = text.lines().filter_map(|l| l.split_whitespace().last()).map(String::from).collect();
    names.sort();
    names
}

/// Functions that a header declares: identifiers with a prefix before an opening parenthesis, outside comments.
pub fn declared(header: &str, prefix: &str) -> Vec<String> {
    let mut text = String::new();
    let mut rest = header;
    while let Some(at) = rest.find("/*") {
        text += &rest[..at];
        rest = &rest[at + rest[at..].find("*/").unwrap() + 2..];
    }
    text += rest;
    let mut names = Vec::new();
    for (at, _) in text.match_indices('(') {
        let before = &text[..at];
        let start = before.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_').map_or(0, |i| i + 1);
        if before[start..].starts_with(prefix) {
            names.push(before[start..].to_string());
        }
    }
    names.sort();
    names.dedup();
    names
}
