//! GlusterFS volumes on this machine, from volume files, without a management daemon: bricks, and a mount of them.
//! Everything ends with the value.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{free_ports, require};

const PATIENCE: Duration = Duration::from_secs(60);

/// Bricks of a volume and the volume file of its clients.
pub struct GlusterBricks {
    bricks: Vec<Brick>,
    client: String,
    dir: tempfile::TempDir,
}

struct Brick {
    process: Child,
    port: u16,
}

impl GlusterBricks {
    /// Starts bricks that distribute files, in shards of this length (`4MB`) if it is given; `None` where the machine lacks
    /// what that needs: the test is then skipped.
    ///
    /// # Panics
    /// When they do not start.
    #[track_caller]
    pub fn start(count: usize, shards: Option<&str>) -> Option<GlusterBricks> {
        if !(require("root") && require("glusterfsd")) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let mut bricks = GlusterBricks { bricks: Vec::new(), client: String::new(), dir };
        for n in 0..count {
            let port = free_ports(1)[0];
            let folder = bricks.brick(n);
            fs::create_dir(&folder).expect("a folder");
            let server = format!(
                "volume posix\n type storage/posix\n option directory {}\nend-volume\n\
                 volume rights\n type features/access-control\n subvolumes posix\nend-volume\n\
                 volume locks\n type features/locks\n subvolumes rights\nend-volume\n\
                 volume brick{n}\n type performance/io-threads\n subvolumes locks\nend-volume\n\
                 volume server\n type protocol/server\n option transport-type tcp\n \
                 option transport.socket.bind-address 127.0.0.1\n option transport.socket.listen-port {port}\n \
                 option auth.addr.brick{n}.allow 127.0.0.1\n subvolumes brick{n}\nend-volume\n",
                folder.display()
            );
            fs::write(bricks.path(&format!("brick{n}.vol")), server).expect("a file");
            let process = bricks.run(n);
            bricks.bricks.push(Brick { process, port });
            bricks.client += &format!(
                "volume client{n}\n type protocol/client\n option transport-type tcp\n option remote-host 127.0.0.1\n \
                 option remote-port {port}\n option remote-subvolume brick{n}\nend-volume\n"
            );
        }
        let all: Vec<String> = (0..count).map(|n| format!("client{n}")).collect();
        // Names go where their hash says, however full the disk is.
        let all = all.join(" ");
        bricks.client += &format!(
            "volume dht\n type cluster/distribute\n option min-free-disk 0\n option min-free-inodes 0\n \
             subvolumes {all}\nend-volume\n"
        );
        if let Some(length) = shards {
            bricks.client += &format!(
                "volume shard\n type features/shard\n option shard-block-size {length}\n subvolumes dht\nend-volume\n"
            );
        }
        (0..count).for_each(|n| bricks.wait(n));
        Some(bricks)
    }

    /// A volume file of its clients.
    pub fn volume_file(&self) -> PathBuf {
        self.volume_file_with("client", |_| String::new())
    }

    /// A volume file with translators above all others; `more` is given the name of the translator below.
    pub fn volume_file_with(&self, name: &str, more: impl FnOnce(&str) -> String) -> PathBuf {
        let top = if self.client.contains("features/shard") { "shard" } else { "dht" };
        let file = self.path(&format!("{name}.vol"));
        fs::write(&file, format!("{}{}", self.client, more(top))).expect("a file");
        file
    }

    /// The folder of a brick.
    pub fn brick(&self, number: usize) -> PathBuf {
        self.path(&format!("brick{number}"))
    }

    /// Kills a brick.
    pub fn kill(&mut self, number: usize) {
        let process = &mut self.bricks[number].process;
        process.kill().and_then(|()| process.wait()).expect("a process");
    }

    /// Starts a brick that was killed, where it was.
    ///
    /// # Panics
    /// When it does not start.
    pub fn restart(&mut self, number: usize) {
        self.bricks[number].process = self.run(number);
        self.wait(number);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, number: usize) -> Child {
        let mut command = Command::new("glusterfsd");
        let file = |end: &str| self.path(&format!("brick{number}.{end}"));
        command.arg("-N").arg("-f").arg(file("vol")).arg("-p").arg(file("pid")).arg("-l").arg(file("log"));
        start(&mut command)
    }

    /// Until a brick takes connections.
    fn wait(&mut self, number: usize) {
        let (deadline, log) = (Instant::now() + PATIENCE, self.path(&format!("brick{number}.log")));
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let Brick { process, port } = &mut self.bricks[number];
        while TcpStream::connect(("127.0.0.1", *port)).is_err() {
            assert!(Instant::now() < deadline, "a brick does not start in time:\n{}", said());
            assert!(matches!(process.try_wait(), Ok(None)), "a brick ended:\n{}", said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for GlusterBricks {
    fn drop(&mut self) {
        for Brick { process, .. } in self.bricks.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// A volume of two bricks that is mounted.
pub struct GlusterVolume {
    mount: PathBuf,
    client: Child,
    bricks: GlusterBricks,
}

impl GlusterVolume {
    /// Starts one; `None` where the machine lacks what it needs: the test is then skipped.
    ///
    /// # Panics
    /// When it does not start.
    #[track_caller]
    pub fn start() -> Option<GlusterVolume> {
        if !(require("fuse") && require("glusterfs")) {
            return None;
        }
        let bricks = GlusterBricks::start(2, None)?;
        let mount = bricks.path("mount");
        fs::create_dir(&mount).expect("a folder");
        let mut client = Command::new("glusterfs");
        client.arg("-N").arg("-f").arg(bricks.volume_file()).arg("-l").arg(bricks.path("client.log")).arg(&mount);
        let mut volume = GlusterVolume { mount, client: start(&mut client), bricks };
        volume.wait();
        Some(volume)
    }

    /// Where it is mounted.
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// A volume file of its clients.
    pub fn volume_file(&self) -> PathBuf {
        self.bricks.volume_file()
    }

    /// The folder of a brick.
    pub fn brick(&self, number: usize) -> PathBuf {
        self.bricks.brick(number)
    }

    /// Until names that fall to every brick can be made.
    fn wait(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        let log = self.bricks.path("client.log");
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
            assert!(matches!(self.client.try_wait(), Ok(None)), "the client of the volume ended:\n{}", said());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for GlusterVolume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mount).stderr(Stdio::null()).status();
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}
