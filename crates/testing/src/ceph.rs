//! A Ceph cluster with a file system on this machine: a monitor, a manager, a metadata server and OSDs that keep their
//! objects in memory, on loopback and free ports, without authentication. Everything ends with the value.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{free_ports, require};

const PATIENCE: Duration = Duration::from_secs(60);
const PROGRAMS: [&str; 6] = ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph", "monmaptool"];

/// A cluster whose file system is called `fs`.
pub struct CephCluster {
    daemons: Vec<Daemon>,
    dir: tempfile::TempDir,
}

struct Daemon {
    kind: &'static str,
    id: String,
    process: Child,
}

impl CephCluster {
    /// Starts one of so many OSDs; `None` where the machine lacks what that needs: the test is then skipped.
    ///
    /// # Panics
    /// When it does not start.
    #[track_caller]
    pub fn start(osds: usize) -> Option<CephCluster> {
        if !(require("root") && PROGRAMS.into_iter().all(require)) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let mut cluster = CephCluster { daemons: Vec::new(), dir };
        let port = free_ports(1)[0];
        let fsid = uuid();
        fs::write(cluster.config(), cluster.settings(port, &fsid)).expect("a file");
        for folder in ["run", "log", "mon", "mgr", "mds"] {
            fs::create_dir(cluster.path(folder)).expect("a folder");
        }
        let map = cluster.path("monmap");
        let address = format!("[v2:127.0.0.1:{port}]");
        done(Command::new("monmaptool").args(["--create", "--addv", "a", &address, "--fsid", &fsid]).arg(&map));
        done(cluster.program("ceph-mon").args(["--mkfs", "-i", "a", "--monmap"]).arg(&map));
        cluster.run("mon", "a");
        cluster.run("mgr", "a");
        for n in 0..osds {
            let (n, uuid) = (n.to_string(), uuid());
            cluster.ceph(&["osd", "new", &uuid, &n]);
            fs::create_dir(cluster.path(&format!("osd{n}"))).expect("a folder");
            done(cluster.program("ceph-osd").args(["--mkfs", "-i", &n, "--osd-uuid", &uuid]));
            cluster.run("osd", &n);
        }
        for pool in ["meta", "data"] {
            cluster.ceph(&["osd", "pool", "create", pool, "16", "16"]);
        }
        cluster.run("mds", "a");
        cluster.ceph(&["fs", "new", "fs", "meta", "data"]);
        // Files are as sparse as elsewhere.
        cluster.ceph(&["fs", "set", "fs", "max_file_size", "35184372088832"]);
        cluster.wait("the metadata server", &["mds", "stat"], |said| said.contains("up:active"));
        Some(cluster)
    }

    /// An OSD that was paused for longer than its lease to read (here 48 to 96 s) waits for others to renew it, for ever where it has
    /// no replicas.
    fn settings(&self, port: u16, fsid: &str) -> String {
        let dir = self.dir.path().display();
        format!(
            "[global]\nfsid = {fsid}\nmon host = v2:127.0.0.1:{port}/0\npublic addr = 127.0.0.1\n\
             cluster addr = 127.0.0.1\nauth cluster required = none\nauth service required = none\n\
             auth client required = none\nkeyring = /dev/null\nlog file = {dir}/log/$name.log\nrun dir = {dir}/run\n\
             [mon]\nmon data = {dir}/mon\nmon allow pool size one = true\nmon allow pool delete = true\n\
             mon data avail crit = 1\nmon data avail warn = 1\npaxos propose interval = 0.05\npaxos min wait = 0.01\n\
             osd pool default size = 1\nosd pool default min size = 1\nosd pool default pg autoscale mode = off\n\
             osd crush chooseleaf type = 0\nmon osd min down reporters = 1\n\
             mon warn on insecure global id reclaim allowed = false\n\
             [mgr]\nmgr data = {dir}/mgr\nmgr initial modules =\nmgr stats period = 1\n\
             [mds]\nmds data = {dir}/mds\nmds beacon interval = 0.5\n\
             [osd]\nosd data = {dir}/osd$id\nosd objectstore = memstore\nmemstore device bytes = 4294967296\n\
             osd fast shutdown = false\nosd pool default read lease ratio = 6\nosd pg stat report interval max = 2\n"
        )
    }

    /// The configuration file.
    pub fn config(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// What `ceph` with these arguments says.
    ///
    /// # Panics
    /// When it fails.
    pub fn ceph(&self, args: &[&str]) -> String {
        done(self.program("ceph").args(["--connect-timeout", "30"]).args(args))
    }

    /// Kills a daemon: `osd` and its number, `mds` and `a`.
    ///
    /// # Panics
    /// Where there is none.
    pub fn kill(&mut self, kind: &str, id: &str) {
        let process = &mut self.find(kind, id).process;
        process.kill().and_then(|()| process.wait()).expect("a process");
    }

    /// Ends a daemon in order: an OSD then writes its memory into its folder, and has it again when it is started.
    ///
    /// # Panics
    /// Where there is none, or it does not end.
    pub fn stop(&mut self, kind: &str, id: &str) {
        let process = &mut self.find(kind, id).process;
        let pid = rustix::process::Pid::from_child(process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a process");
        let deadline = Instant::now() + PATIENCE;
        while process.try_wait().expect("a process").is_none() {
            assert!(Instant::now() < deadline, "{kind}.{id} does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops a daemon in its tracks, or lets it go on.
    ///
    /// # Panics
    /// Where there is none, or it does not stop.
    pub fn pause(&mut self, kind: &str, id: &str, pause: bool) {
        self::pause(&self.find(kind, id).process, pause);
    }

    /// Starts a daemon that was ended. An OSD that was killed has lost its memory, and does not start again.
    ///
    /// # Panics
    /// When it does not start.
    pub fn restart(&mut self, kind: &'static str, id: &str) {
        self.daemons.retain(|daemon| (daemon.kind, &*daemon.id) != (kind, id));
        self.run(kind, id);
    }

    /// Until what `ceph` with these arguments says is as wanted.
    ///
    /// # Panics
    /// When that takes too long.
    pub fn wait(&mut self, what: &str, args: &[&str], wanted: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let said = self.ceph(args);
            if wanted(&said) {
                return;
            }
            assert!(Instant::now() < deadline, "{what} is not there in time: {said}\n{}", self.said());
            for daemon in &mut self.daemons {
                let ended = daemon.process.try_wait().expect("a process");
                assert!(ended.is_none(), "{}.{} ended: {ended:?}", daemon.kind, daemon.id);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn find(&mut self, kind: &str, id: &str) -> &mut Daemon {
        let found = self.daemons.iter_mut().find(|daemon| (daemon.kind, &*daemon.id) == (kind, id));
        found.unwrap_or_else(|| panic!("there is no {kind}.{id}"))
    }

    fn run(&mut self, kind: &'static str, id: &str) {
        let mut command = self.program(&format!("ceph-{kind}"));
        command.args(["-f", "-i", id]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        self.daemons.push(Daemon { kind, id: id.into(), process });
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command.arg("-c").arg(self.config()).env_remove("CEPH_ARGS");
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The ends of the daemons' logs.
    fn said(&self) -> String {
        let end = |path: &Path| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().rev().take(5).collect();
            format!("{}: {}\n", path.display(), lines.into_iter().rev().collect::<Vec<_>>().join("\n"))
        };
        fs::read_dir(self.path("log")).into_iter().flatten().flatten().map(|entry| end(&entry.path())).collect()
    }
}

impl Drop for CephCluster {
    fn drop(&mut self) {
        for Daemon { process, .. } in self.daemons.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Stops a process, until all of its threads have stopped, or lets it go on. A signal stops a thread when that next has a processor, and one
/// thread has to be the first: on a busy machine the others serve on for a while.
fn pause(process: &Child, pause: bool) {
    let pid = rustix::process::Pid::from_child(process);
    let signal = if pause { rustix::process::Signal::STOP } else { rustix::process::Signal::CONT };
    rustix::process::kill_process(pid, signal).expect("a process");
    if pause {
        let stopped = rustix::process::WaitIdOptions::STOPPED | rustix::process::WaitIdOptions::NOHANG;
        crate::until("all threads have stopped", || {
            rustix::process::waitid(rustix::process::WaitId::Pid(pid), stopped).expect("a child").is_some()
        });
    }
}

fn uuid() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a random number").trim().into()
}

/// Runs a program to its end; what it says.
fn done(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that ends with the value.
    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Lines that threads of a shell's children write; none may come after the pause.
    #[test]
    fn a_paused_process_does_nothing_more() {
        let dir = tempfile::tempdir().unwrap();
        let (file, program) = (
            dir.path().join("count"),
            "import os, sys, threading\n\
            f = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n\
            def work():\n while True: os.write(f, b'x')\n\
            [threading.Thread(target=work).start() for _ in range(16)]\n",
        );
        if !require("python3") {
            return;
        }
        let child = Running(Command::new("python3").args(["-c", program]).arg(&file).spawn().unwrap());
        let len = || fs::metadata(&file).map_or(0, |file| file.len());
        let mut late = 0;
        for _ in 0..20 {
            let before = len();
            crate::until("it works", || len() > before + 100);
            pause(&child.0, true);
            let paused = len();
            std::thread::sleep(Duration::from_millis(5));
            late += len() - paused;
            pause(&child.0, false);
        }
        drop(child);
        assert_eq!(late, 0, "bytes were written by a process that was paused");
    }
}
