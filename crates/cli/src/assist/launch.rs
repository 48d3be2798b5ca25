//! Starts programs with the preloaded library, under their own advice manager or that of the node.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_assist::coverage::Account;
use impresario_assist::manager::is_abandoned;
use impresario_base::machine::is_ignored;
use impresario_interpose::{Verdict, check_program};
use impresario_ring::{SOCKET_VARIABLE, WAIT_VARIABLE};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};

use super::library;
use crate::usage;

/// Whether the library can be preloaded into a program.
pub enum Reach {
    /// Yes.
    Yes,
    /// No; the reason, and the remedy.
    No(String),
}

/// What runs texts that do not name an interpreter.
const SHELL: &str = "/bin/sh";

/// The file that the kernel loads for a program, or a shell where the kernel does not know what it is, and whether the library can be
/// preloaded into it. `None` for a script of a script of a script: the kernel goes a few steps.
fn loaded(program: &Path) -> Option<(PathBuf, Verdict)> {
    let mut looked_at = program.to_path_buf();
    for _ in 0..5 {
        match check_program(&looked_at) {
            Verdict::Script(interpreter) => looked_at = interpreter,
            Verdict::NotElf if is_text(&looked_at) => looked_at = SHELL.into(),
            verdict => return Some((looked_at, verdict)),
        }
    }
    None
}

/// Whether a shell would take a file for a script.
fn is_text(file: &Path) -> bool {
    let mut start = Vec::new();
    let is_read = file.is_file() && File::open(file).is_ok_and(|file| file.take(256).read_to_end(&mut start).is_ok());
    is_read && !start.contains(&0)
}

/// Whether a program starts with the library named in its environment. A static one ignores it, and programs that it
/// starts may be reached; another loader may refuse to start at all.
fn bears_the_library(program: &Path) -> bool {
    matches!(loaded(program), Some((_, Verdict::Ok | Verdict::Static)))
}

/// Whether the library can be preloaded into a program, given by its name as typed.
pub fn reach(name: &str) -> Result<Reach> {
    let path = find(name)?;
    let Some((file, verdict)) = loaded(&path) else {
        return Ok(Reach::No(format!("{} is a script of a script of a script", path.display())));
    };
    let why = match verdict {
        Verdict::Ok => return Ok(Reach::Yes),
        Verdict::SetUserId => {
            "gains rights when it starts, and no library may be put into such programs; run it as the user whose rights \
             it gains, or watch it with `impresario assist daemon --watch`"
                .into()
        }
        Verdict::Static => {
            "is statically linked, so no library can be preloaded (programs that it starts may have it); observe it with \
             `impresario assist daemon --watch`"
                .into()
        }
        Verdict::OtherMachine => "is built for another architecture than the library".into(),
        Verdict::OtherLoader(loader) => format!("is loaded by {}, which does not preload libraries", loader.display()),
        Verdict::Script(_) | Verdict::NotElf => "is neither a program nor a script".into(),
        Verdict::Unreadable(why) => format!("cannot be read: {why}"),
    };
    Ok(Reach::No(format!("{} {why}", file.display())))
}

/// Starts a command. A text that does not name an interpreter is run by a shell, as shells and `execvp` do; `posix_spawnp` does not.
fn spawn(command: &mut Command, files_limit: Option<u64>) -> io::Result<Child> {
    limit_files(command, files_limit);
    let error = match command.spawn() {
        Err(error) if error.raw_os_error() == Some(libc::ENOEXEC) => error,
        done => return done,
    };
    let Some(mut by_shell) = by_shell(command) else { return Err(error) };
    limit_files(&mut by_shell, files_limit);
    by_shell.spawn()
}

/// A command whose program a shell has to run; `None` where that is none.
pub fn by_shell(command: &Command) -> Option<Command> {
    let name = command.get_program();
    let path = if name.as_bytes().contains(&b'/') { name.into() } else { find(&name.to_string_lossy()).ok()? };
    if !matches!(check_program(&path), Verdict::NotElf) || !is_text(&path) {
        return None;
    }
    let mut shell = Command::new(SHELL);
    shell.arg(path).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    Some(shell)
}

/// Finds the file of a program as a shell does.
fn find(name: &str) -> Result<PathBuf> {
    if name.contains('/') {
        return match std::fs::metadata(name) {
            Ok(_) => Ok(name.into()),
            Err(error) => Err(usage(format!("the program {name:?} cannot be started: {error}"))),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok() && file.is_file());
    found.ok_or_else(|| usage(format!("there is no program {name:?} in the directories of PATH")))
}

/// How long a recorded program may wait for the manager, so that its first accesses are recorded too.
const RECORD_WAIT_MS: &str = "1000";

/// Variables that programs get beside ours.
pub type Environment = Vec<(OsString, OsString)>;

/// The purpose of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To run faster.
    Advise,
    /// To be recorded completely.
    Record,
}

/// How long programs that were asked to end may take, before they are killed.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The signals that are handed on to programs, or end what is done after them. What we were started to ignore, as by `nohup` or in
/// the background of a script, is left alone, so that the programs ignore it as well.
fn heard_signals() -> impl Iterator<Item = i32> {
    [SIGINT, SIGQUIT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal))
}

/// Programs that run under the library.
pub struct Programs {
    children: Vec<Child>,
    /// Ends the handing on of signals.
    signals: Option<Handle>,
}

impl Programs {
    /// Starts `instances` of a program; `socket` is that of their advice manager, and `environment` what they get beside the
    /// library. They have our limit of open files, which is to be raised after this.
    pub fn start(
        words: &[OsString],
        purpose: Purpose,
        instances: u32,
        socket: &Path,
        environment: &[(OsString, OsString)],
    ) -> Result<Programs> {
        let library = library::find()?;
        let mut preload = library.to_preload();
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        let Some((name, arguments)) = words.split_first() else { return Err(usage("name a program after `--`")) };
        let preloaded = library.is_for_all() || bears_the_library(&find(&name.to_string_lossy())?);
        // Before the first of them, so that no signal ends us and leaves a program behind.
        let signals = Signals::new(heard_signals()).context("catching signals")?;
        let mut programs = Programs::start_all(instances.max(1), || {
            let mut command = Command::new(name);
            command.args(arguments).env(SOCKET_VARIABLE, socket).envs(environment.iter().cloned());
            if preloaded {
                command.env("LD_PRELOAD", &preload);
            }
            if purpose == Purpose::Record {
                command.env(WAIT_VARIABLE, RECORD_WAIT_MS);
            }
            spawn(&mut command, None).with_context(|| format!("starting {}", name.to_string_lossy()))
        })?;
        if let Err(error) = programs.hand_on(signals) {
            programs.end();
            return Err(error);
        }
        Ok(programs)
    }

    /// Starts so many, or none.
    fn start_all(count: u32, mut start: impl FnMut() -> Result<Child>) -> Result<Programs> {
        let mut programs = Programs { children: Vec::new(), signals: None };
        for _ in 0..count {
            match start() {
                Ok(child) => programs.children.push(child),
                Err(error) => {
                    programs.end();
                    return Err(error);
                }
            }
        }
        Ok(programs)
    }

    /// Ends those that were started, as not all could be: nobody would wait for them.
    fn end(&mut self) {
        let pid = |child: &Child| i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        self.children.iter().filter_map(pid).for_each(|pid| {
            let _ = kill_process(pid, Signal::TERM);
        });
        let deadline = Instant::now() + END_PATIENCE;
        for child in &mut self.children {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            // Of one that has ended neither does anything.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Ctrl-C and SIGTERM are for the program, and this process ends after it. A signal sent to us alone is forwarded.
    fn hand_on(&mut self, mut signals: Signals) -> Result<()> {
        self.signals = Some(signals.handle());
        let pids: Vec<Pid> = self.children.iter().filter_map(|c| Pid::from_raw(i32::try_from(c.id()).ok()?)).collect();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                // The terminal sends these two to the program itself.
                if matches!(signal, SIGINT | SIGQUIT) {
                    continue;
                }
                let Some(signal) = Signal::from_named_raw(signal) else { continue };
                pids.iter().for_each(|pid| {
                    let _ = kill_process(*pid, signal); // it may have ended
                });
            }
        })?;
        Ok(())
    }

    /// Waits for all; returns the exit status of the first that failed, as a shell would report it, and what the kernel
    /// counted for all of them, if it counts.
    pub fn wait(mut self) -> Result<(ExitCode, Option<Account>)> {
        let mut code = 0;
        let mut account = Some(Account::default());
        for child in &mut self.children {
            // The account of a program is complete when it has ended, and gone when it was waited for.
            let of_it = ended(child.id()).and_then(|()| Account::of(child.id()));
            account = account.zip(of_it.ok()).map(|(all, one)| all.and(one));
            let status = child.wait().context("waiting for the program")?;
            let own = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            if code == 0 {
                code = own;
            }
        }
        // Their numbers may be other processes' from here on.
        self.signals.into_iter().for_each(|signals| signals.close());
        Ok((ExitCode::from(u8::try_from(code).unwrap_or(1)), account))
    }
}

/// Lets the program have the limit of open files that it would have without us.
fn limit_files(command: &mut Command, files_limit: Option<u64>) {
    let Some(current) = files_limit else { return };
    // SAFETY: between fork and exec only getrlimit and setrlimit are called, plain system calls.
    unsafe {
        command.pre_exec(move || {
            use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
            let maximum = getrlimit(Resource::Nofile).maximum;
            Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum })?)
        });
    }
}

/// Runs one program as it is and returns its exit status, as a shell would report it.
pub fn run_one(mut command: Command, files_limit: Option<u64>) -> Result<ExitCode> {
    let signals = Signals::new(heard_signals()).context("catching signals")?;
    let child = spawn(&mut command, files_limit)
        .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
    let mut programs = Programs { children: vec![child], signals: None };
    programs.hand_on(signals)?;
    Ok(programs.wait()?.0)
}

/// Becomes true at a signal that ends processes. For after the programs, when such a signal is for us alone.
pub fn told_to_end() -> Result<Arc<AtomicBool>> {
    let told = Arc::new(AtomicBool::new(false));
    for signal in heard_signals() {
        flag::register(signal, told.clone()).context("catching signals")?;
    }
    Ok(told)
}

/// Waits until a child has ended and leaves it to be waited for.
fn ended(pid: u32) -> io::Result<()> {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Prefix of the directories of [`own_socket`].
const FOLDER: &str = "impresario-assist-";

/// The directory of our own manager's socket, as long as this lives.
pub struct OwnSocket {
    folder: tempfile::TempDir,
    /// Tells others that start at the same time that the socket is not left behind: at first no process listens at it.
    _lock: File,
}

impl OwnSocket {
    /// The directory.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }
}

/// A directory for the socket of our own manager that only this user can access. Removes directories left by killed
/// managers.
pub fn own_socket() -> Result<OwnSocket> {
    let place = std::env::temp_dir();
    remove_left_behind(&place);
    let create = || {
        let only_ours = std::fs::Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix(FOLDER).permissions(only_ours).tempdir_in(&place)?;
        let lock = locked(folder.path())?;
        Ok::<_, io::Error>(OwnSocket { folder, _lock: lock })
    };
    create().context("creating a directory for the manager's socket")
}

/// The same at a path that is given; an error where something is there already.
pub fn own_socket_at(folder: &Path) -> io::Result<OwnSocket> {
    let (Some(place), Some(name)) = (folder.parent(), folder.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let only_ours = std::fs::Permissions::from_mode(0o700);
    let folder = tempfile::Builder::new().prefix(name).rand_bytes(0).permissions(only_ours).tempdir_in(place)?;
    let lock = locked(folder.path())?;
    Ok(OwnSocket { folder, _lock: lock })
}

/// The lock of a manager's directory, which is its own as long as it lives.
fn locked(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// Removes this user's directories without a listening socket. Others, and unknown files in them, stay.
fn remove_left_behind(place: &Path) {
    let own = |folder: &Path| {
        let named = folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(FOLDER.as_bytes()));
        named && folder.symlink_metadata().is_ok_and(|m| m.is_dir() && m.uid() == rustix::process::geteuid().as_raw())
    };
    for folder in std::fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let socket = folder.join("socket");
        // Looked at again with the lock: a manager that starts binds its socket first and listens then.
        let is_left = || own(&folder) && is_abandoned(&socket);
        let Some(_lock) = is_left().then(|| locked(&folder).ok()).flatten() else { continue };
        if is_left() && std::fs::remove_file(&socket).is_ok() {
            let _ = std::fs::remove_dir(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody would wait for them.
    #[test]
    fn programs_that_were_started_before_one_that_could_not_be_end() {
        let mut pids = Vec::new();
        let start = || {
            anyhow::ensure!(pids.len() < 2, "no more processes");
            let child = Command::new("sleep").arg("1000").spawn()?;
            pids.push(i32::try_from(child.id())?);
            Ok(child)
        };
        assert!(Programs::start_all(3, start).is_err_and(|error| error.to_string() == "no more processes"));
        for pid in pids.into_iter().filter_map(Pid::from_raw) {
            assert!(rustix::process::test_kill_process(pid).is_err());
        }
    }

    #[test]
    fn folders_of_killed_managers_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = place.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            folder
        };
        let bound = |folder: &Path| {
            use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
            let ours = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            bind(&ours, &SocketAddrUnix::new(folder.join("socket")).unwrap()).unwrap();
            listen(&ours, 1).unwrap();
            ours
        };
        let named = ["impresario-assist-1", "impresario-assist-2", "impresario-assist-3", "impresario-assist-4"];
        let [dead, alive, fresh, starting] = named.map(folder);
        let other = folder("somebody-s");
        drop((bound(&dead), bound(&other), bound(&starting)));
        let (listens, lock) = (bound(&alive), locked(&starting).unwrap());
        remove_left_behind(place.path());
        assert_eq!([&dead, &alive, &fresh, &other].map(|folder| folder.exists()), [false, true, true, true]);
        assert!(starting.join("socket").exists(), "it has a socket at which it does not listen yet");
        drop((listens, lock));
    }
}
