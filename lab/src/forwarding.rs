//! `impresario-lab forwarding`: what I/O nodes in front of a mounted file system gain or cost, beside that file system itself.
//!
//! The same programs (plain calls on files) load the folder, and mounts of I/O nodes in front of it. The folder lies on a modelled disk
//! below the real kernel, or is one that the user names, of any file system.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use impresario_base::units::parse_positive_bytes;
use impresario_config::{Cluster, Config, Io, Tree};
use impresario_device::DeviceParams;
use impresario_sched::PolicySpec;
use impresario_workload::access::Observation;
use impresario_workload::children::Children;
use impresario_workload::kernel_disk::{KernelDisk, remove_stale};
use impresario_workload::progress::catch_signals;
use impresario_workload::stop::Stop;

use crate::client_program::POSIX;
use crate::server_bench::load::Load;
use crate::server_bench::{
    Bed, Choice, Clients, Comparison, Subject, accepts, observe_disks, reset_disks, until_ready,
};
use crate::{free_port, impresario, print};

/// Measure what I/O nodes in front of a mounted file system gain, beside that file system itself
///
/// Applications of several processes read and write a shared file each, 256 KiB at a time one behind the other and 16 KiB in turns:
/// in the folder itself, and through I/O nodes in front of it, mounted or with `impresario run`: their default, without reading ahead,
/// with one policy or another. The folder lies on a modelled disk below this kernel, or is one that --folder names, of a file system of yours. Caches
/// of the whole machine are dropped before each run; on the modelled disk a run counts with at least 20 % of the CPU idle and a disk
/// that is not late; everything read and written is compared. Needs root, /dev/fuse and cc.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab forwarding
  impresario-lab forwarding --io-nodes 2 --loads 'strided' --pairs 6
  impresario-lab forwarding --folder /mnt/lustre/bench --applications 8 --size 256m --json lustre.json")]
pub struct Args {
    /// Files are made and removed here, in a folder of their own, instead of on a modelled disk
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// I/O nodes, all in front of the same folder
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=8))]
    io_nodes: u64,
    /// Applications, each with a file and a mount of its own
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=16))]
    applications: u64,
    /// Processes of an application
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=16))]
    processes: u64,
    /// The file of an application
    #[arg(long, default_value = "64m", value_parser = parse_positive_bytes, value_name = "SIZE")]
    size: u64,
    #[command(flatten)]
    choice: Choice,
}

/// A way to reach the folder.
struct System {
    name: &'static str,
    way: Way,
    /// The I/O nodes' settings.
    io: fn(&mut Io),
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// Without I/O nodes.
    Folder,
    /// A mount for each application, with these options.
    Mounts(&'static [&'static str]),
    /// `impresario run`, which is one client for all applications.
    Run,
}

const FOLDER: &str = "the folder";
const MOUNTS: Way = Way::Mounts(&[]);
const SYSTEMS: [System; 7] = [
    System { name: FOLDER, way: Way::Folder, io: |_| () },
    // What an administrator gets who sets nothing.
    System { name: "default", way: MOUNTS, io: |_| () },
    System { name: "direct I/O", way: Way::Mounts(&["--direct-io"]), io: |_| () },
    System { name: "run", way: Way::Run, io: |_| () },
    System { name: "without reading ahead", way: MOUNTS, io: |io| io.read_ahead_bytes = Some(0) },
    System { name: "fifo", way: MOUNTS, io: |io| io.policy = PolicySpec::named("fifo") },
    System { name: "none", way: MOUNTS, io: |io| io.policy = PolicySpec::named("none") },
];

const START_PATIENCE: Duration = Duration::from_secs(20);

/// The folder below all systems.
struct Folder {
    /// With the files; removed at the end.
    files: tempfile::TempDir,
    /// What it lies on, if that is a model.
    disk: Vec<KernelDisk>,
}

impl Folder {
    fn new(args: &Args, parent: &Path) -> Result<Folder> {
        let disk = match &args.folder {
            Some(_) => Vec::new(),
            None => vec![KernelDisk::new(parent, &DeviceParams::default())?],
        };
        let below = args.folder.as_deref().unwrap_or_else(|| disk[0].path());
        let made = tempfile::Builder::new().prefix("impresario-forwarding-").tempdir_in(below);
        let files = made.with_context(|| format!("making a folder in {}", below.display()))?;
        // It looks to the clients as the mounts do: one path for each application.
        for nth in 0..args.applications {
            std::os::unix::fs::symlink(".", files.path().join(nth.to_string()))?;
        }
        Ok(Folder { files, disk })
    }
}

impl Bed for Folder {
    fn prepare(&self, load: &mut Load) -> Result<()> {
        load.prepare(self.files.path())
    }

    fn verify(&self, load: &Load, generation: u64) -> Result<()> {
        load.verify(self.files.path(), generation)
    }

    fn reset(&self) -> Result<()> {
        reset_disks(&self.disk)
    }

    fn observe(&self) -> Result<Observation> {
        match self.disk.is_empty() {
            true => Ok(Observation::default()),
            false => observe_disks(&self.disk),
        }
    }
}

/// I/O nodes in front of the folder, and the mounts of the applications.
struct Nodes {
    name: &'static str,
    /// Where the clients find a folder for each application, by its number.
    address: String,
    /// What starts the clients; empty: they are started as they are.
    launcher: Vec<String>,
    /// Dropped in this order, after what is mounted.
    mounting: Children,
    serving: Children,
    mounted: Vec<PathBuf>,
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for path in &self.mounted {
            let _ = Command::new("umount").arg("-l").arg(path).output();
        }
    }
}

impl Nodes {
    fn start(system: &System, args: &Args, served: &Path, folder: &Path, stop: &Stop) -> Result<Nodes> {
        let name = system.name;
        let folder = folder.join(name.replace([' ', ',', '/'], "-"));
        let mounts = folder.join("mounts");
        std::fs::create_dir_all(&mounts)?;
        let mut ports = Vec::new();
        let mut config = Config {
            cluster: Cluster { name: "forwarding".into(), request_timeout_ms: 60_000, ..Cluster::default() },
            tree: Some(Tree { folder: served.into(), ..Tree::default() }),
            ..Config::default()
        };
        for i in 0..args.io_nodes {
            let port = free_port()?;
            let mut io = Io::new(format!("io.{i}"), format!("127.0.0.1:{port}"));
            (system.io)(&mut io);
            config.io.push(io);
            ports.push(port);
        }
        if let Some((_, complaint)) = config.check().first() {
            bail!("the I/O nodes cannot be: {complaint}");
        }
        let description = folder.join("impresario.toml");
        std::fs::write(&description, config.to_toml())?;
        let description = description.display().to_string();
        let program = impresario()?;
        let (mounting, serving, mounted, launcher) = Default::default();
        let address = mounts.to_str().context("the temporary folder's name is not UTF-8 text")?.to_string();
        let mut nodes = Nodes { name, address, launcher, mounting, serving, mounted };
        for (io, port) in config.io.iter().zip(ports) {
            let arguments = ["serve".into(), description.clone(), "--name".into(), io.name.clone()];
            nodes.serving.start(&io.name, &program, &arguments, &folder.join(format!("{}.log", io.name)))?;
            accepts(&mut nodes.serving, &io.name, port, START_PATIENCE, stop)?;
        }
        let Way::Mounts(options) = system.way else {
            nodes.address = "/impresario".into();
            nodes.launcher = vec![program.display().to_string(), "run".into(), description, "--".into()];
            return Ok(nodes);
        };
        for nth in 0..args.applications {
            let (path, name) = (mounts.join(nth.to_string()), format!("mount.{nth}"));
            std::fs::create_dir(&path)?;
            let mut arguments = vec!["mount".to_string(), "--job".into(), (nth + 1).to_string()];
            arguments.extend(options.iter().map(|option| option.to_string()));
            arguments.extend([description.clone(), path.display().to_string()]);
            nodes.mounting.start(&name, &program, &arguments, &folder.join(format!("{name}.log")))?;
            nodes.mounted.push(path.clone());
            let until = Instant::now() + START_PATIENCE;
            let at = format!(" {} fuse", path.display());
            let ready = || std::fs::read_to_string("/proc/mounts").is_ok_and(|mounts| mounts.contains(&at));
            let complaint = || format!("{} was not mounted", path.display());
            until_ready(&mut nodes.mounting, until, stop, ready, complaint)?;
        }
        Ok(nodes)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let stop = catch_signals()?;
    let loads = args.choice.loads(Load::contiguous_and_strided(args.applications, args.processes, args.size))?;
    let systems = args.choice.systems(&SYSTEMS, |system| system.name)?;
    let parent = impresario_workload::cluster::folder(None)?;
    remove_stale(parent.path())?;
    let clients = Clients::build(parent.path(), &POSIX)?;
    let bed = Folder::new(args, parent.path())?;
    let (mut running, mut missing) = (Vec::new(), Vec::new());
    for system in systems.iter().filter(|system| system.way != Way::Folder) {
        match Nodes::start(system, args, bed.files.path(), parent.path(), &stop) {
            Ok(nodes) => running.push(nodes),
            Err(error) if stop.is_set() => return Err(error),
            Err(error) => missing.push(format!("{} could not be started: {error:#}", system.name)),
        }
    }
    let direct = bed.files.path().to_str().context("the folder's name is not UTF-8 text")?;
    let mut subjects = Vec::new();
    if systems.iter().any(|system| system.way == Way::Folder) {
        subjects.push(Subject { name: FOLDER, address: direct, launcher: &[] });
    }
    for nodes in &running {
        subjects.push(Subject { name: nodes.name, address: &nodes.address, launcher: &nodes.launcher });
    }
    ensure!(!subjects.is_empty(), "no system could be started: {}", missing.join("; "));
    let title = match &args.folder {
        None => "I/O nodes in front of a folder on a modelled disk below this kernel".into(),
        Some(folder) => format!("I/O nodes in front of {}", folder.display()),
    };
    let mut comparison = Comparison {
        title: &title,
        modelled: args.folder.is_none(),
        loads,
        subjects,
        choice: &args.choice,
        baselines: &[FOLDER],
        missing,
    };
    let text = comparison.run(&bed, &clients, &stop).context("I/O nodes in front of a folder")?;
    // Before the folder that they serve.
    drop(running);
    print(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_the_users_is_loaded_and_left_as_it_was() {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        let folder = tempfile::tempdir().unwrap();
        let line = ["x", "--folder", folder.path().to_str().unwrap(), "--size", "1m"];
        let args = Line::parse_from(line).args;
        let bed = Folder::new(&args, Path::new("/nonexistent")).unwrap();
        for mut load in Load::contiguous_and_strided(2, 2, 1 << 20) {
            bed.prepare(&mut load).unwrap();
            bed.verify(&load, 0).unwrap();
            assert!(!load.applications[0].writes || bed.verify(&load, 1).is_err(), "what was not written is found");
        }
        assert!(bed.observe().unwrap().device.is_none());
        drop(bed);
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    }
}
