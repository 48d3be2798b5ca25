//! A volume from hand-written volume files: bricks, a client graph, mounts; and what bricks report of themselves.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Machine, Process, until};

/// Where the translator stands in the graph of a brick.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Nowhere: GlusterFS as it comes.
    None,
    /// Above io-threads.
    Above,
    /// In place of io-threads.
    Instead,
}

/// A brick.
pub struct Brick {
    pub process: Process,
    pub file: PathBuf,
    log: PathBuf,
}

/// A mount of a volume.
pub struct Mount {
    pub path: PathBuf,
    pub process: Process,
}

/// Bricks that are served from hand-written volume files.
pub struct Volume {
    folder: PathBuf,
    pub bricks: Vec<Brick>,
    mounts: usize,
}

const FIRST_PORT: usize = 24_100;

/// The volume file of a brick. Options that begin with `storage.` are those of its storage, with `locks.` those of its locks, with
/// `server.` those of what receives requests; with `delay.`, every call of its storage takes time, and with `errors.` some fail.
pub fn brick_file(folder: &Path, number: usize, place: Place, options: &[(&str, &str)]) -> String {
    let mut text = String::new();
    let mut below = String::new();
    let mut add = |name: &str, kind: &str, options: &[(&str, &str)]| {
        text += &format!("volume {name}\n    type {kind}\n");
        for (key, value) in options {
            text += &format!("    option {key} \"{}\"\n", value.replace('\\', "\\\\").replace('"', "\\\""));
        }
        if !below.is_empty() {
            text += &format!("    subvolumes {below}\n");
        }
        text += "end-volume\n";
        below = name.to_string();
    };
    let directory = folder.join(format!("brick{number}"));
    let mut storage = vec![("directory", directory.to_str().unwrap())];
    storage.extend(options.iter().filter_map(|(key, value)| Some((key.strip_prefix("storage.")?, *value))));
    let mut delay: Vec<_> =
        options.iter().filter_map(|(key, value)| Some((key.strip_prefix("delay.")?, *value))).collect();
    let others =
        |key: &str| ["storage.", "delay.", "errors.", "locks.", "server."].iter().any(|prefix| key.starts_with(prefix));
    let locks: Vec<_> = options.iter().filter_map(|(key, value)| Some((key.strip_prefix("locks.")?, *value))).collect();
    let errors: Vec<_> =
        options.iter().filter_map(|(key, value)| Some((key.strip_prefix("errors.")?, *value))).collect();
    let receives = options.iter().filter_map(|(key, value)| Some((key.strip_prefix("server.")?, *value)));
    let options: Vec<_> = options.iter().filter(|(key, _)| !others(key)).copied().collect();
    add("posix", "storage/posix", &storage);
    if !delay.is_empty() {
        delay.push(("delay-percentage", "100"));
        add("delay", "debug/delay-gen", &delay);
    }
    if !errors.is_empty() {
        add("errors", "debug/error-gen", &errors);
    }
    add("locks", "features/locks", &locks);
    if place != Place::Instead {
        add("io-threads", "performance/io-threads", &[]);
    }
    if place != Place::None {
        add("scheduler", "user/impresario", &options);
    }
    let name = format!("brick{number}");
    add(&name, "debug/io-stats", &[]);
    let port = (FIRST_PORT + number).to_string();
    let allow = format!("auth.addr.{name}.allow");
    let mut server = vec![
        ("transport-type", "tcp"),
        ("transport.socket.bind-address", "127.0.0.1"),
        ("transport.socket.listen-port", &port),
        (&allow, "127.0.0.1"),
    ];
    server.extend(receives);
    add("server", "protocol/server", &server);
    text
}

impl Volume {
    /// Starts bricks.
    pub fn start(machine: &Machine, name: &str, bricks: usize, place: Place, options: &[(&str, &str)]) -> Volume {
        let folder = machine.path(name);
        // It is there where it is a mount.
        fs::create_dir_all(&folder).unwrap();
        let start = |number| {
            let file = folder.join(format!("brick{number}.vol"));
            fs::create_dir(folder.join(format!("brick{number}"))).unwrap();
            fs::write(&file, brick_file(&folder, number, place, options)).unwrap();
            let log = folder.join(format!("brick{number}.log"));
            let process = Brick::process(Command::new("glusterfsd"), &file, &log);
            Brick { process, file, log }
        };
        let bricks = (0..bricks).map(start).collect();
        let volume = Volume { folder, bricks, mounts: 0 };
        let subvolumes =
            |prefix: &str| (0..volume.bricks.len()).map(|n| format!("{prefix}{n}")).collect::<Vec<String>>().join(" ");
        let mut text = String::new();
        for number in 0..volume.bricks.len() {
            text += &format!(
                "volume client{number}\n    type protocol/client\n    option transport-type tcp\n    \
                 option remote-host 127.0.0.1\n    option remote-port {}\n    option remote-subvolume brick{number}\n\
                 end-volume\n",
                FIRST_PORT + number
            );
        }
        text +=
            &format!("volume dht\n    type cluster/distribute\n    subvolumes {}\nend-volume\n", subvolumes("client"));
        fs::write(volume.folder.join("whole-files.vol"), &text).unwrap();
        text +=
            "volume shard\n    type features/shard\n    option shard-block-size 4MB\n    subvolumes dht\nend-volume\n";
        fs::write(volume.folder.join("shards.vol"), text).unwrap();
        volume
    }

    /// Mounts the volume, its files in shards, with more arguments for the client.
    pub fn mount(&mut self, arguments: &[&str]) -> Mount {
        self.mount_graph("shards.vol", arguments)
    }

    /// Mounts the volume with each file whole on one brick: shards cannot discard.
    pub fn mount_whole_files(&mut self) -> Mount {
        self.mount_graph("whole-files.vol", &[])
    }

    /// The same without the kernel's cache of the client: what programs read, the bricks are asked for.
    pub fn mount_uncached(&mut self) -> Mount {
        self.mount_graph("whole-files.vol", &["--direct-io-mode=enable"])
    }

    /// Mounts the volume, its files whole, as a machine of this name would.
    pub fn mount_from(&mut self, host: &str) -> Mount {
        let mut front = Command::new("unshare");
        front.args(["--uts", "sh", "-c", "hostname \"$0\" && exec glusterfs \"$@\"", host]);
        self.mount_by(front, "whole-files.vol", &[])
    }

    fn mount_graph(&mut self, graph: &str, arguments: &[&str]) -> Mount {
        self.mount_by(Command::new("glusterfs"), graph, arguments)
    }

    fn mount_by(&mut self, mut client: Command, graph: &str, arguments: &[&str]) -> Mount {
        self.mounts += 1;
        let path = self.folder.join(format!("mount{}", self.mounts));
        fs::create_dir(&path).unwrap();
        client.arg("-N").args(arguments).arg("-f").arg(self.folder.join(graph));
        client.arg("-l").arg(path.with_extension("log")).arg(&path);
        let mut process = Process::start(&mut client);
        until("the mount", || {
            let ended = process.0.try_wait().unwrap();
            assert!(ended.is_none(), "{}", fs::read_to_string(path.with_extension("log")).unwrap_or_default());
            for brick in &mut self.bricks {
                assert!(brick.process.0.try_wait().unwrap().is_none(), "{}", brick.log());
            }
            let mounted = fs::read_to_string("/proc/mounts").unwrap().contains(path.to_str().unwrap());
            mounted && self.bricks.iter().all(|b| b.log().matches("accepted client from").count() >= self.mounts)
        });
        // The client's side of the connections: names that fall to every brick can be made.
        until("its bricks", || {
            let mut names = (0..16).map(|n| path.join(format!(".probe{n}")));
            names.all(|name| fs::create_dir(&name).and_then(|()| fs::remove_dir(&name)).is_ok())
        });
        Mount { path, process }
    }
}

impl Volume {
    /// The sum of a figure over all bricks.
    pub fn sum(&self, name: &str) -> u64 {
        self.bricks.iter().map(|b| figure(&b.report(), name)).sum()
    }

    /// Calls below the translator that were saved by merging.
    pub fn saved_calls(&self) -> u64 {
        self.sum("merged_requests") - self.sum("merged_calls")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).output();
    }
}

impl Brick {
    fn process(mut command: Command, file: &Path, log: &Path) -> Process {
        command.arg("-N").arg("-f").arg(file).arg("-l").arg(log);
        // One that crashes leaves its memory where it was started.
        Process::start(command.current_dir(log.parent().unwrap()))
    }

    /// Starts it again, with a program in front (such as valgrind) or as it was.
    pub fn restart(&mut self, front: &[&str]) {
        let mut command = Command::new(front.first().unwrap_or(&"glusterfsd"));
        if let Some(rest) = front.get(1..).filter(|_| front.len() > 1) {
            command.args(rest).arg("glusterfsd");
        }
        self.process = Brick::process(command, &self.file, &self.log);
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The translator's part of a new statedump.
    pub fn report(&self) -> BTreeMap<String, String> {
        statedump(self.process.0.id())
    }

    /// Calls of the kernel that wrote something so far, to disks and to connections.
    pub fn write_calls(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/io", self.process.0.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("syscw: ")).unwrap();
        line.trim().parse().unwrap()
    }
}

/// The text of a new statedump of a process.
pub fn text_of_statedump(process: u32) -> String {
    let folder = Path::new("/run/gluster");
    let dumps = || {
        let ours = format!(".{process}.dump.");
        let entries = fs::read_dir(folder).unwrap().flatten().map(|e| e.path());
        entries.filter(move |p| p.to_str().is_some_and(|p| p.contains(&ours))).collect::<Vec<PathBuf>>()
    };
    dumps().iter().for_each(|old| fs::remove_file(old).unwrap());
    assert!(Command::new("kill").args(["-USR1", &process.to_string()]).status().unwrap().success());
    let mut text = String::new();
    until("a statedump", || {
        text = dumps().first().map(|p| fs::read_to_string(p).unwrap()).unwrap_or_default();
        text.contains("DUMP-END-TIME")
    });
    text
}

/// The translator's part of a new statedump of a process.
pub fn statedump(process: u32) -> BTreeMap<String, String> {
    let text = text_of_statedump(process);
    let mut lines = text.lines().skip_while(|l| !l.starts_with("[user/impresario.") || l.contains(" - "));
    assert!(lines.next().is_some(), "no section of the translator in:\n{text}");
    let own = lines.take_while(|l| !l.starts_with('['));
    own.filter_map(|l| l.split_once('=')).map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

/// A figure of a report.
pub fn figure(report: &BTreeMap<String, String>, name: &str) -> u64 {
    report.get(name).unwrap_or_else(|| panic!("no {name} in {report:?}")).parse::<f64>().unwrap() as u64
}
