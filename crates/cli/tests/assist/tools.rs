//! What the tests of guided I/O share: the library, C programs, files to read, advice managers of a node.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use impresario_assist::report::{FileReport, Report};
use impresario_testing::{eventually, require, skip, until};
use serde_json::json;

use crate::support::{IMPRESARIO, Process, Ran, put, put_into, run_command};

/// How long programs wait for the manager where every access is counted.
pub const WAIT_MS: &str = "10000";

/// `strided`'s pieces, their distance and their number: a file of 16 MiB.
pub const PIECE: u64 = 64 << 10;
pub const STRIDE: u64 = 256 << 10;
pub const COUNT: u64 = 64;

#[path = "../../../faces/interpose/preload/tests/support/library.rs"]
mod library;
pub use library::library;

/// A C program of `tests/assist/c`; warnings are errors. `None` when it cannot be linked with these flags.
pub fn try_compile(to: &Path, name: &str, flags: &[&str]) -> Option<PathBuf> {
    let program = to.join(if flags.is_empty() { name.to_string() } else { format!("{name}{}", flags.concat()) });
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]).args(flags).arg("-o").arg(&program);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/assist/c").join(format!("{name}.c")));
    let made = cc.output().unwrap();
    assert!(made.status.success() || !flags.is_empty(), "{cc:?}:\n{}", String::from_utf8_lossy(&made.stderr));
    made.status.success().then_some(program)
}

/// The program under test, which finds the library, no advice manager of this machine and nothing that was learnt.
pub fn assist<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(IMPRESARIO);
    command.arg("assist").args(args).env("IMPRESARIO_ASSIST_LIBRARY", library());
    command.env_remove("IMPRESARIO_ASSIST_SOCKET").env_remove("XDG_RUNTIME_DIR").env_remove("IMPRESARIO_LOG");
    command.env("XDG_DATA_HOME", "/nowhere");
    command
}

/// A folder for one test, which other users may look into.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Folder {
        let dir = tempfile::Builder::new().prefix("ia-").tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        Folder(dir)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().unwrap().join(name)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.at(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// A file that `strided` reads, not in memory; its contents follow from the name.
    pub fn data(&self, name: &str) -> PathBuf {
        let path = self.cached(name);
        forget(&path);
        path
    }

    /// The same in memory, for tests that need not wait for a busy disk.
    pub fn cached(&self, name: &str) -> PathBuf {
        let mut state =
            name.bytes().fold(0x9e37_79b9_7f4a_7c15_u64, |s, b| (s ^ u64::from(b)).wrapping_mul(0x100_0193));
        let words = (0..COUNT * STRIDE / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        self.write(name, words.collect::<Vec<u8>>())
    }

    /// Hints that bring in all of these files, 1 MiB at a time.
    pub fn hints(&self, name: &str, files: &[&Path]) -> PathBuf {
        let entry = |path: &&Path| {
            json!({ "Path": path, "BlockSize": 1 << 20, "CacheSize": 8, "ReadAheadSize": 4,
                    "WillNeed": [{ "Offset": 0, "Length": 0 }] })
        };
        let files = files.iter().map(entry).collect::<Vec<_>>();
        // Given whatever this machine's device is like.
        self.write(name, json!({ "File": files, "StandDown": { "Trial": false } }).to_string())
    }

    pub fn strided(&self) -> PathBuf {
        try_compile(self.path(), "strided", &[]).unwrap()
    }
}

/// Empties the cache of a file.
pub fn forget(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// The words of a command that reads `data` in pieces, `pause_us` apart.
pub fn reading(program: &Path, data: &Path, pause_us: u64) -> Vec<String> {
    let path = |p: &Path| p.to_str().unwrap().to_string();
    let numbers = [PIECE, STRIDE, COUNT, pause_us].map(|n| n.to_string());
    [path(program), path(data)].into_iter().chain(numbers).collect()
}

/// What a command prints when it runs alone.
#[track_caller]
pub fn plain(words: &[String]) -> String {
    let ran = run_command(Command::new(&words[0]).args(&words[1..]));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{words:?}");
    ran.out
}

/// The numbers of one file.
#[track_caller]
pub fn of<'a>(report: &'a Report, path: &Path) -> &'a FileReport {
    let found = report.files.iter().find(|f| Path::new(&f.path) == path);
    found.unwrap_or_else(|| panic!("{} is not in {report:?}", path.display()))
}

/// An advice manager of a node.
pub struct Daemon {
    pub process: Process,
    pub socket: PathBuf,
}

impl Daemon {
    /// Starts one and waits until it listens.
    #[track_caller]
    pub fn start(folder: &Folder, hints: &Path, more: &[&str]) -> Daemon {
        let mut daemon = Daemon::spawn(folder, hints, more);
        until("the daemon listens", || {
            let ended = daemon.process.child.try_wait().unwrap();
            assert!(ended.is_none(), "the daemon ended with {ended:?}: {}", daemon.process.log());
            daemon.process.log().contains("listens at")
        });
        daemon
    }

    /// Starts one; it may fail to.
    pub fn spawn(folder: &Folder, hints: &Path, more: &[&str]) -> Daemon {
        let socket = folder.at("s");
        let log = folder.at("daemon.log");
        let _ = std::fs::remove_file(&log);
        let mut command = assist(["daemon", "--config"]);
        command.arg(hints).arg("--socket").arg(&socket).args(more);
        Daemon { process: Process::start_command(&mut command, &log), socket }
    }

    /// A command that runs a program under it.
    pub fn run(&self, words: &[String]) -> Command {
        let mut command = assist(["run", "--node", "--"]);
        command.args(words).env("IMPRESARIO_ASSIST_SOCKET", &self.socket);
        command
    }

    /// The same, and the manager is told of every access, however busy the machine is.
    pub fn run_told(&self, words: &[String]) -> Command {
        let mut command = self.run(words);
        command.env("IMPRESARIO_ASSIST_WAIT_MS", WAIT_MS);
        command
    }

    #[track_caller]
    pub fn report(&self) -> Report {
        let ran = self.ask(&["--json"]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""));
        serde_json::from_str(&ran.out).unwrap()
    }

    #[track_caller]
    pub fn ask(&self, more: &[&str]) -> Ran {
        run_command(assist(["report", "--socket"]).arg(&self.socket).args(more))
    }

    /// Waits until the report says something.
    #[track_caller]
    pub fn until(&self, what: &str, said: impl Fn(&Report) -> bool) -> Report {
        eventually(what, || Some(self.report()).filter(&said))
    }

    /// Ends it as the service manager would: the sockets must be gone.
    #[track_caller]
    pub fn end(mut self) -> String {
        self.process.signal(rustix::process::Signal::TERM);
        let status = self.process.wait();
        assert!(status.success(), "{status}: {}", self.process.log());
        let left = |p: &Path| p.symlink_metadata().is_ok();
        assert!(!left(&self.socket) && !left(&self.socket.with_extension("report")), "sockets stay behind");
        self.process.log()
    }
}

/// A user without rights, as root can be for a while: copies of what it has to run, where it can reach them.
pub struct Nobody {
    program: PathBuf,
    library: PathBuf,
}

impl Nobody {
    /// `None` where this is impossible; the test is then skipped.
    pub fn new(folder: &Folder) -> Option<Nobody> {
        if !require("root") {
            return None;
        }
        let place = folder.path().canonicalize().unwrap();
        let them = Nobody { program: put_into(&place), library: put(library(), &place) };
        if run_command(&mut them.command(["--help"])).code != 0 {
            skip("setpriv", "another user cannot start programs in the folder for temporary files");
            return None;
        }
        Some(them)
    }

    /// `impresario assist` as that user.
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&self.program).arg("assist").args(args);
        command.env("IMPRESARIO_ASSIST_LIBRARY", &self.library).env("HOME", "/").env_remove("XDG_RUNTIME_DIR");
        command.env_remove("IMPRESARIO_ASSIST_SOCKET").env_remove("IMPRESARIO_LOG");
        command
    }
}
