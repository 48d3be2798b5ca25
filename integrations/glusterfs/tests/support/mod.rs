//! A machine of its own for each test: namespaces for mounts, network and processes, in which GlusterFS's folders are
//! private and the translator is installed. Everything in it ends with the test.

mod volume;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use impresario_testing::{require, skip};

pub use volume::{Brick, Mount, Place, Volume, brick_file, figure, statedump, text_of_statedump};

/// Longest wait for anything that should happen at once.
pub const PATIENCE: Duration = Duration::from_secs(90);
const TRANSLATORS: &str = "IMPRESARIO_TEST_TRANSLATORS";

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library that cargo built beside the test.
pub fn library() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let places = [deps, deps.parent().unwrap()].map(|folder| folder.join("libimpresario.so"));
    let found = places.iter().find(|p| p.exists());
    found.unwrap_or_else(|| panic!("none of {places:?} exists")).clone()
}

/// The translator with the library that cargo built beside the test, in a folder as installing would lay it out.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        remove_translators_of_ended_tests();
        let (library, so) = (library(), "libimpresario.so");
        let folder = library.parent().unwrap().join(format!("glusterfs-translator-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        // A copy: a later build must not change what a running brick has mapped.
        fs::copy(library, folder.join(format!("{so}.0"))).unwrap();
        std::os::unix::fs::symlink(format!("{so}.0"), folder.join(so)).unwrap();
        let at = folder.display();
        let include = here().join("../../crates/faces/capi/include");
        let mut make = Command::new("make");
        make.arg("-C").arg(here()).arg("install").arg("WARNINGS=-Wall -Wextra -Werror");
        make.arg(format!("BUILD={at}/build")).arg(format!("IMPRESARIO_CFLAGS=-I{}", include.display()));
        make.arg(format!("IMPRESARIO_LIBS=-L{at} -limpresario -Wl,-rpath,{at}"));
        make.arg(format!("XLATORDIR={at}/xlator"));
        succeed(&mut make);
        folder
    })
}

/// Runs an ignored test of this program in a machine of its own; skipped without what that needs.
pub fn apart(test: &str) {
    apart_within(test, Duration::from_secs(300));
}

/// The same, for a test that takes longer.
pub fn apart_within(test: &str, limit: Duration) {
    if !(require("root") && require("fuse") && require("glusterfsd") && require("gluster") && require("unshare")) {
        return;
    }
    if !Path::new("/usr/include/glusterfs/xlator.h").exists() {
        return skip("libglusterfs-dev", "/usr/include/glusterfs/xlator.h is missing");
    }
    let folder = built();
    // Ends with this test, even if that is killed.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare"]);
    command.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    // The first process of the machine is a shell, which reaps what others leave: to glusterd a brick that was killed and
    // not reaped still runs.
    command.args(["bash", "-c", "\"$0\" \"$@\"; exit $?"]);
    command.arg(std::env::current_exe().unwrap()).args(["--ignored", "--exact", "--nocapture", test]);
    command.env(TRANSLATORS, folder.join("xlator"));
    let said = succeed_within(&mut command, limit);
    assert!(said.contains("1 passed"), "{test} did not run:\n{said}");
    said.lines().filter(|line| line.contains(": ")).for_each(|line| println!("{line}"));
}

/// Removes what [`built`] made for test programs that have ended.
fn remove_translators_of_ended_tests() {
    let folders = fs::read_dir(library().parent().unwrap()).unwrap().flatten();
    for folder in folders {
        let name = folder.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix("glusterfs-translator-").map(|id| Path::new("/proc").join(id));
        if process.is_some_and(|p| !p.exists()) {
            let _ = fs::remove_dir_all(folder.path());
        }
    }
}

/// The machine of a test that [`apart`] runs: GlusterFS's folders are empty and go with it.
pub struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    pub fn new() -> Machine {
        let translators = std::env::var_os(TRANSLATORS).expect("run by another test");
        let dir = tempfile::tempdir().unwrap();
        succeed(Command::new("ip").args(["link", "set", "lo", "up"]));
        // glusterd refuses loopback addresses.
        succeed(Command::new("ip").args(["address", "add", "10.99.0.1/24", "dev", "lo"]));
        for folder in ["/run", "/var/lib/glusterd", "/var/log/glusterfs"] {
            succeed(Command::new("mount").args(["-t", "tmpfs", "none", folder]));
        }
        succeed(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(dir.path()));
        fs::create_dir_all("/run/gluster").unwrap();
        // The system's translators with ours beside them.
        let system = installed_translators();
        let (theirs, all) = (dir.path().join("theirs"), dir.path().join("all"));
        fs::create_dir(&theirs).unwrap();
        fs::create_dir(&all).unwrap();
        succeed(Command::new("mount").arg("--bind").arg(&system).arg(&theirs));
        for entry in fs::read_dir(&theirs).unwrap().flatten() {
            if entry.file_name() != "user" {
                std::os::unix::fs::symlink(entry.path(), all.join(entry.file_name())).unwrap();
            }
        }
        std::os::unix::fs::symlink(Path::new(&translators).join("user"), all.join("user")).unwrap();
        succeed(Command::new("mount").arg("--bind").arg(&all).arg(&system));
        Machine { dir }
    }

    /// A path in the machine's own folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Lets the folder itself go; what still runs in the namespace ends with it.
        let _ = Command::new("umount").args(["-R", "-l"]).arg(self.dir.path()).output();
    }
}

/// A folder on the build's disk in the place of a volume's, which is in memory. It goes with the value.
pub fn on_disk(machine: &Machine, name: &str) -> Option<tempfile::TempDir> {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let kind = succeed(Command::new("stat").args(["-f", "-c", "%T"]).arg(disk.path()));
    if kind.trim() == "tmpfs" {
        skip("disk", "the build's folder is in memory");
        return None;
    }
    let place = machine.path(name);
    fs::create_dir(&place).unwrap();
    succeed(Command::new("mount").arg("--bind").arg(disk.path()).arg(&place));
    Some(disk)
}

/// Has the files below a folder leave memory again and again, as long as the value lives; while their content is written, cut and
/// verified, say.
pub fn cooling(folder: &Path) -> Process {
    let text = "while sleep 0.05; do find . -path ./.glusterfs -prune -o -type f -size +0 -print | while read -r f; do \
                sync \"$f\"; dd if=\"$f\" iflag=nocache count=0 status=none; done; done 2>/dev/null";
    Process::start(Command::new("nice").args(["bash", "-c", text]).current_dir(folder))
}

fn installed_translators() -> PathBuf {
    let libraries = fs::read_dir("/usr/lib").unwrap().flatten().map(|e| e.path().join("glusterfs"));
    let versions = libraries.filter_map(|folder| fs::read_dir(folder).ok()).flat_map(|folders| folders.flatten());
    let mut found = versions.map(|version| version.path().join("xlator")).filter(|p| p.join("storage").exists());
    found.next().expect("glusterfs has a folder of translators")
}

/// A process that ends with its owner.
pub struct Process(pub Child);

impl Process {
    pub fn start(command: &mut Command) -> Process {
        let child = command.stdin(Stdio::null()).spawn();
        Process(child.unwrap_or_else(|e| panic!("{command:?}: {e}")))
    }

    pub fn signal(&self, name: &str) {
        succeed(Command::new("kill").args([&format!("-{name}"), &self.0.id().to_string()]));
    }

    /// Waits for its end.
    pub fn end(&mut self, limit: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            match self.0.try_wait().unwrap() {
                Some(status) => return Some(status),
                None if Instant::now() > end => return None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until something holds; panics with its name when it does not within [`PATIENCE`].
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(what, PATIENCE, holds);
}

/// The same within another time.
pub fn until_within(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < end, "{what} does not come to pass");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a program to its end.
pub fn run_within(command: &mut Command, limit: Duration) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| fs::File::create(dir.path().join(name)).unwrap();
    let mut process = Process::start(command.stdout(file("out")).stderr(file("err")));
    let status = process.end(limit);
    let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
    let (stdout, stderr) = (read("out"), read("err"));
    let Some(status) = status else {
        panic!("{command:?} hangs:\n{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    };
    Output { status, stdout, stderr }
}

/// Runs a program that must succeed; its output.
pub fn succeed_within(command: &mut Command, limit: Duration) -> String {
    let output = run_within(command, limit);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}{err}", output.status);
    text
}

/// The same within [`PATIENCE`].
pub fn succeed(command: &mut Command) -> String {
    succeed_within(command, PATIENCE)
}

/// Runs a shell script that must succeed, in a folder.
pub fn script(folder: &Path, text: &str) -> String {
    succeed(Command::new("bash").args(["-euc", text]).current_dir(folder))
}
