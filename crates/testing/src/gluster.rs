//! A GlusterFS volume on this machine: two bricks and a mount, from volume files, without a management daemon. Everything
//! ends with the value.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::require;

const BRICKS: usize = 2;
const PATIENCE: Duration = Duration::from_secs(60);

/// A mounted volume.
pub struct GlusterVolume {
    mount: PathBuf,
    processes: Vec<Child>,
    dir: tempfile::TempDir,
}

impl GlusterVolume {
    /// Starts one; `None` where the machine lacks what it needs: the test is then skipped.
    ///
    /// # Panics
    /// When it does not start.
    #[track_caller]
    pub fn start() -> Option<GlusterVolume> {
        if !(require("root") && require("fuse") && require("glusterfsd") && require("glusterfs")) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let mount = dir.path().join("mount");
        fs::create_dir(&mount).expect("a folder");
        let mut volume = GlusterVolume { mount, processes: Vec::new(), dir };
        let mut client = String::new();
        for n in 0..BRICKS {
            let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
            let brick = volume.path(&format!("brick{n}"));
            fs::create_dir(&brick).expect("a folder");
            let server = format!(
                "volume posix\n type storage/posix\n option directory {}\nend-volume\n\
                 volume locks\n type features/locks\n subvolumes posix\nend-volume\n\
                 volume brick{n}\n type performance/io-threads\n subvolumes locks\nend-volume\n\
                 volume server\n type protocol/server\n option transport-type tcp\n \
                 option transport.socket.bind-address 127.0.0.1\n option transport.socket.listen-port {port}\n \
                 option auth.addr.brick{n}.allow 127.0.0.1\n subvolumes brick{n}\nend-volume\n",
                brick.display()
            );
            let file = volume.path(&format!("brick{n}.vol"));
            fs::write(&file, server).expect("a file");
            let pid = volume.path(&format!("brick{n}.pid"));
            volume
                .run(Command::new("glusterfsd").arg("-N").arg("-f").arg(file).arg("-p").arg(pid), &format!("brick{n}"));
            client += &format!(
                "volume client{n}\n type protocol/client\n option transport-type tcp\n option remote-host 127.0.0.1\n \
                 option remote-port {port}\n option remote-subvolume brick{n}\nend-volume\n"
            );
        }
        let all: Vec<String> = (0..BRICKS).map(|n| format!("client{n}")).collect();
        // Names go where their hash says, however full the disk is.
        let all = all.join(" ");
        client += &format!(
            "volume dht\n type cluster/distribute\n option min-free-disk 0\n option min-free-inodes 0\n \
             subvolumes {all}\nend-volume\n"
        );
        let file = volume.path("client.vol");
        fs::write(&file, client).expect("a file");
        let mount = volume.mount.clone();
        volume.run(Command::new("glusterfs").arg("-N").arg("-f").arg(file).arg(mount), "client");
        volume.wait();
        Some(volume)
    }

    /// Where it is mounted.
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// The folder of a brick.
    pub fn brick(&self, number: usize) -> PathBuf {
        self.path(&format!("brick{number}"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&mut self, command: &mut Command, name: &str) {
        command.arg("-l").arg(self.path(&format!("{name}.log"))).stdout(Stdio::null()).stderr(Stdio::null());
        self.processes.push(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")));
    }

    /// Until names that fall to every brick can be made.
    fn wait(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        let log = self.path("client.log");
        loop {
            let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
            let mounted = mounts.contains(&format!(" {} ", self.mount.display()));
            let probe = |n: usize| {
                let name = self.mount.join(format!("probe {n}"));
                fs::write(&name, "").and_then(|()| fs::remove_file(&name)).is_ok()
            };
            if mounted && (0..32).all(probe) {
                return;
            }
            let said = || fs::read_to_string(&log).unwrap_or_default();
            assert!(Instant::now() < deadline, "the volume is not there in time:\n{}", said());
            for process in &mut self.processes {
                assert!(matches!(process.try_wait(), Ok(None)), "a process of the volume ended:\n{}", said());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for GlusterVolume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mount).stderr(Stdio::null()).status();
        for process in self.processes.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
