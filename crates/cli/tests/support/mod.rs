//! What the end-to-end tests share: clusters of real processes that are gone when the test ends.
#![allow(dead_code, unused_imports, reason = "each test program uses its own part")]

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use impresario_client::{Client, ClientOptions, CreateOptions, Via};
use impresario_config::{Config, Data, Io, Meta};
pub use impresario_testing::content::pattern;
use impresario_testing::{PATIENCE, free_address, until, within};

/// The program under test.
pub const IMPRESARIO: &str = env!("CARGO_BIN_EXE_impresario");
/// What it executes for all but `assist run`.
pub const MAIN: &str = env!("CARGO_BIN_EXE_impresario-main");

/// Puts the command and what it executes into a folder, as links where possible. The command's path.
pub fn put_into(folder: &Path) -> PathBuf {
    let [command, _main] = [IMPRESARIO, MAIN].map(|from| put(Path::new(from), folder));
    command
}

/// Puts a file into a folder, as a link where possible. Its path there.
pub fn put(from: &Path, folder: &Path) -> PathBuf {
    let to = folder.join(from.file_name().unwrap());
    if !to.exists() && std::fs::hard_link(from, &to).is_err() {
        std::fs::copy(from, &to).unwrap();
    }
    to
}

/// A process that is killed when the test ends. Its output is kept in a file.
pub struct Process {
    pub child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts the program with standard output and error together in `log`.
    pub fn start<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, log: &Path) -> Process {
        Process::start_command(Command::new(IMPRESARIO).args(args), log)
    }

    pub fn start_command(command: &mut Command, log: &Path) -> Process {
        let out = File::options().create(true).append(true).open(log).unwrap();
        let err = out.try_clone().unwrap();
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn().unwrap();
        Process { child, log: log.into() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it wrote so far.
    pub fn log(&self) -> String {
        written(&self.log)
    }

    /// Sends a signal; fails the test if that is impossible.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        self.wait_within(PATIENCE)
    }

    /// Waits for its end, which takes long by itself.
    #[track_caller]
    pub fn wait_within(&mut self, limit: Duration) -> ExitStatus {
        let Process { child, log } = self;
        within(limit, Ending(log), || child.try_wait().unwrap())
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The end of a process, for the message that it does not come.
struct Ending<'a>(&'a Path);

impl std::fmt::Display for Ending<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the end of a process that wrote\n{}", written(self.0))
    }
}

fn written(file: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(file).unwrap_or_default()).into_owned()
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a process has a handler for a signal.
pub fn catches(pid: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// What a command wrote, and how it ended.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs `impresario args` to its end.
#[track_caller]
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    run_command(Command::new(IMPRESARIO).args(args))
}

/// Runs a command to its end.
#[track_caller]
pub fn run_command(command: &mut Command) -> Ran {
    run_within(PATIENCE, command)
}

/// Runs a command that takes long by itself to its end. Its output goes through files, so that it never blocks.
#[track_caller]
pub fn run_within(limit: Duration, command: &mut Command) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let (out, err) = (dir.path().join("out"), dir.path().join("err"));
    command.stdin(Stdio::null()).stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
    let mut process = Process { child: command.spawn().unwrap(), log: err.clone() };
    let status = process.wait_within(limit);
    Ran { code: status.code().unwrap_or(-1), out: written(&out), err: written(&err) }
}

/// A cluster of one process a server in a temporary folder. All end with the test.
pub struct Cluster {
    pub config: Config,
    pub path: PathBuf,
    pub dir: tempfile::TempDir,
    servers: Vec<(String, Process)>,
}

impl Cluster {
    /// Describes a cluster; nothing runs yet.
    pub fn describe(data: usize, io: usize, change: impl FnOnce(&mut Config)) -> Cluster {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config {
            meta: Meta { address: free_address(), dir: "meta".into(), ..Meta::default() },
            data: (0..data).map(|i| Data::new(format!("data.{i}"), free_address(), format!("data.{i}"))).collect(),
            io: (0..io).map(|i| Io::new(format!("io.{i}"), free_address())).collect(),
            ..Config::default()
        };
        // Of a server that is down or of a busy machine no test notices anything but that it takes longer.
        config.cluster.request_timeout_ms = 20_000;
        change(&mut config);
        let path = dir.path().join("impresario.toml");
        std::fs::write(&path, config.to_toml()).unwrap();
        let config = Config::load(&path).unwrap_or_else(|e| panic!("{e}"));
        Cluster { config, path, dir, servers: Vec::new() }
    }

    /// A running cluster that answers.
    pub fn start(data: usize, io: usize, change: impl FnOnce(&mut Config)) -> Cluster {
        let mut cluster = Cluster::describe(data, io, change);
        cluster.begin();
        cluster
    }

    /// Makes the servers' folders, and starts them.
    #[track_caller]
    pub fn begin(&mut self) {
        impresario_server::folders::make_all(&self.config).unwrap();
        let names: Vec<String> = self.config.servers().map(|s| s.name().to_string()).collect();
        names.iter().for_each(|name| self.launch(name));
        names.iter().for_each(|name| self.await_answer(name));
    }

    /// Writes what has changed in `config` into the configuration file, as an administrator does while everything runs.
    #[track_caller]
    pub fn rewrite(&mut self) {
        std::fs::write(&self.path, self.config.to_toml()).unwrap();
        self.config = Config::load(&self.path).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Starts one server; does not wait.
    pub fn launch(&mut self, name: &str) {
        self.launch_by(&mut Command::new(IMPRESARIO), name);
    }

    /// The same, by a command that runs the program with the arguments that it is given here.
    pub fn launch_by(&mut self, command: &mut Command, name: &str) {
        let log = self.dir.path().join(format!("{name}.log"));
        command.args(["serve".as_ref(), self.path.as_os_str(), "--name".as_ref(), name.as_ref()]);
        let process = Process::start_command(command, &log);
        self.servers.retain(|(other, _)| other != name);
        self.servers.push((name.into(), process));
    }

    #[track_caller]
    pub fn await_answer(&mut self, name: &str) {
        let address = self.config.server(name).unwrap().address().to_string();
        let access = self.access();
        until(format!("{name} answers"), || {
            let process = self.server(name);
            let ended = process.child.try_wait().unwrap();
            assert!(ended.is_none(), "{name} ended: {ended:?}\n{}", process.log());
            impresario_client::admin::status(&access, &address, Duration::from_secs(2)).is_ok()
        });
    }

    /// The same of a server that was started otherwise.
    #[track_caller]
    pub fn await_address(&self, name: &str) {
        let (address, access) = (self.config.server(name).unwrap().address(), self.access());
        until(format!("{name} answers"), || {
            impresario_client::admin::status(&access, address, Duration::from_secs(2)).is_ok()
        });
    }

    /// What a client of it proves itself by.
    pub fn access(&self) -> impresario_client::Access {
        impresario_client::Access::of(&self.config, impresario_client::KeyRole::Client)
    }

    /// The process of a server.
    #[track_caller]
    pub fn server(&mut self, name: &str) -> &mut Process {
        let found = self.servers.iter_mut().find(|(other, _)| other == name);
        &mut found.unwrap_or_else(|| panic!("{name} was not started")).1
    }

    /// `kill -9` of one server.
    pub fn kill(&mut self, name: &str) {
        self.server(name).kill();
    }

    /// Starts a killed server again and waits until it answers.
    pub fn restart(&mut self, name: &str) {
        self.launch(name);
        self.await_answer(name);
    }

    /// The state that a server tells.
    pub fn state(&self, name: &str) -> serde_json::Value {
        let address = self.config.server(name).unwrap().address();
        serde_json::from_str(&impresario_client::admin::status(&self.access(), address, PATIENCE).unwrap()).unwrap()
    }
}

/// A server that is stopped, and goes on when this is dropped, however the test ends.
pub struct Stopped(rustix::process::Pid);

impl Stopped {
    #[track_caller]
    pub fn stop(cluster: &mut Cluster, name: &str) -> Stopped {
        let process = cluster.server(name);
        process.signal(rustix::process::Signal::STOP);
        let stopped = Stopped(rustix::process::Pid::from_raw(process.pid() as i32).unwrap());
        let tasks = format!("/proc/{}/task", process.pid());
        impresario_testing::eventually("all its threads have stopped", || {
            let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
                let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
                stat.rsplit_once(") ").filter(|(_, state)| state.starts_with('T')).map(drop)
            };
            std::fs::read_dir(&tasks).ok()?.try_for_each(is_stopped)
        });
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.0, rustix::process::Signal::CONT);
    }
}

/// A small file system on a folder, gone when this is dropped.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None` where none can be mounted; that is recorded.
    pub fn mount(on: &Path, options: &std::ffi::CStr) -> Option<SmallDisk> {
        std::fs::create_dir_all(on).unwrap();
        match rustix::mount::mount("tmpfs", on, "tmpfs", rustix::mount::MountFlags::empty(), options) {
            Ok(()) => Some(SmallDisk(on.into())),
            Err(_) => {
                impresario_testing::skip("root", "a small tmpfs cannot be mounted");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// A thread that works in rounds until it is told to stop.
pub struct Worker<T> {
    rounds: Arc<Rounds>,
    thread: std::thread::JoinHandle<T>,
}

/// The rounds of a [`Worker`].
#[derive(Default)]
pub struct Rounds {
    is_over: AtomicBool,
    begun: AtomicU64,
}

impl Rounds {
    /// The number of the next round, from 0; `None`: there is none.
    pub fn next(&self) -> Option<u64> {
        (!self.is_over.load(Ordering::Relaxed)).then(|| self.begun.fetch_add(1, Ordering::Relaxed))
    }
}

impl<T: Send + 'static> Worker<T> {
    pub fn start(work: impl FnOnce(&Rounds) -> T + Send + 'static) -> Worker<T> {
        let rounds = Arc::new(Rounds::default());
        let given = rounds.clone();
        Worker { rounds, thread: std::thread::spawn(move || work(&given)) }
    }

    /// Waits until it has done so many more rounds; fails the test if it gives up.
    #[track_caller]
    pub fn goes_on(&self, rounds: u64) {
        let begun = || self.rounds.begun.load(Ordering::Relaxed);
        let wanted = begun() + rounds + 1;
        until("the work goes on", || {
            assert!(!self.thread.is_finished(), "a worker gave up in round {}", begun());
            begun() >= wanted
        });
    }

    /// Ends it after the present round.
    #[track_caller]
    pub fn stop(self) -> T {
        self.rounds.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("a worker failed")
    }
}

/// A client of its own: identity, connections and all.
#[track_caller]
pub fn client(config: &Config, seed: u64) -> Arc<Client> {
    client_via(config, seed, Via::Auto)
}

#[track_caller]
pub fn client_via(config: &Config, seed: u64, via: Via) -> Arc<Client> {
    let options = ClientOptions { job: seed, via, placement_seed: seed, ..ClientOptions::default() };
    Client::connect(config, options).unwrap_or_else(|e| panic!("cannot connect: {e}"))
}

/// A file that must not be there yet, root's.
pub fn new_file(mode: u32) -> CreateOptions {
    CreateOptions { mode, uid: 0, gid: 0, exclusive: true, layout: None }
}

/// Makes a file with this content and fsyncs it.
#[track_caller]
pub fn write_file(client: &Arc<Client>, path: &str, data: &[u8]) {
    let file = client.create(path.as_bytes(), new_file(0o644)).unwrap();
    let mut at = 0;
    while at < data.len() {
        at += file.write_at(&data[at..data.len().min(at + (1 << 20))], at as u64).unwrap();
    }
    file.sync().unwrap();
    file.close().unwrap();
}

/// All of a file.
#[track_caller]
pub fn read_file(client: &Arc<Client>, path: &str) -> Vec<u8> {
    let file = client.open(path.as_bytes(), false).unwrap();
    let size = file.attr().unwrap().size as usize;
    let mut data = vec![0; size];
    let mut at = 0;
    while at < size {
        let end = size.min(at + (1 << 20));
        let n = file.read_at(&mut data[at..end], at as u64).unwrap();
        assert!(n > 0, "{path} ends at {at} though its size is {size}");
        at += n;
    }
    let mut beyond = [0; 1];
    assert_eq!(file.read_at(&mut beyond, size as u64).unwrap(), 0, "{path} goes on behind its end");
    file.close().unwrap();
    data
}
