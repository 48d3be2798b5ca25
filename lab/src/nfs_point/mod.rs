//! `impresario-lab nfs`: aIOLi's central point, an NFS server, on a modelled disk.
//!
//! The experiments of aioli-2006 ("Evaluations") scaled down: the NFS service with its policies and nfs-ganesha export the same
//! folder, and the same programs (libnfs) load them. The server's page cache is empty before each run.

mod loads;
mod server;
mod weights;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use impresario_base::units::parse_positive_bytes;
use impresario_device::DeviceParams;
use impresario_workload::access::Observation;
use impresario_workload::bare_disk::BareDisk;
use impresario_workload::children::Children;
use impresario_workload::kernel_disk::{KernelDisk, remove_stale};
use impresario_workload::progress::{all_written, catch_signals, check_outputs, write_text};

use crate::client_program::LIBNFS;
use crate::server_bench::load::Load;
use crate::server_bench::{Bed, Choice, Clients, Comparison, Subject, observe_disks, own_network, reset_disks};
use crate::{nfs_ganesha, print};
use loads::loads;
use server::{SYSTEMS, Server};

/// Measure what a central NFS point gains on a modelled disk, beside nfs-ganesha (aioli-2006)
///
/// 32 processes read a shared file in turns of 8, 64 and 128 KiB, by separate and by collective calls; a small sequential
/// `cat` beside that; and the paper's ten applications. Systems: policies of `impresario nfs`, one request at a time in order of arrival
/// (serialising alone), and nfs-ganesha where it is installed. Caches of the whole machine are dropped before each run; a run
/// counts with at least 20 % of the CPU idle and a disk that is not late; everything read and written is compared. With
/// `--weights` two equal applications run beside each other instead, and the weight of one is doubled half-way. Needs root,
/// /dev/fuse, cc, and the Debian packages libnfs-dev, rpcbind and nfs-ganesha-vfs; everything runs in a network of its own.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab nfs
  impresario-lab nfs --device bare --loads 'decomposition, 64' --systems none,aioli --pairs 6
  impresario-lab nfs --size 256m --json nfs.json
  impresario-lab nfs --weights 20 --csv weights.csv --html weights.html")]
pub struct Args {
    /// What the server's folder lies on
    #[arg(long, value_enum, default_value = "kernel")]
    device: Device,
    /// The file that is taken apart (4 GB in the paper); the other files are scaled with it
    #[arg(long, default_value = "128m", value_parser = parse_positive_bytes, value_name = "SIZE")]
    size: u64,
    /// Processes of the decomposition
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=128))]
    processes: u64,
    #[command(flatten)]
    choice: Choice,
    /// Instead, show on the bare disk how weights divide it: this many seconds with equal weights, and as many with one doubled
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(4..=300), conflicts_with_all = ["device", "loads", "systems", "pairs", "json", "uncounted"])]
    weights: Option<u32>,
    /// Write the bytes of every tenth of a second to a file
    #[arg(long, value_name = "FILE", requires = "weights")]
    csv: Option<PathBuf>,
    /// Draw them on a page
    #[arg(long, value_name = "FILE", requires = "weights")]
    html: Option<PathBuf>,
}

/// What the exported folder lies on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Device {
    /// A modelled disk below this kernel: ext4, page cache, mq-deadline, read-ahead of today
    Kernel,
    /// The same as it was for a server in 2005: one state of reading ahead for each file handle, which another reader's request
    /// resets, so that of a file with several readers nothing is read ahead. Loads with files of one reader are left out: of these it read ahead, and a disk
    /// below one kernel can do only one of both
    #[value(name = "kernel-2005")]
    Kernel2005,
    /// A modelled disk in order of arrival, without cache, read-ahead and scheduler of a kernel
    Bare,
}

impl Device {
    /// How much the kernel reads ahead is set for a disk, not for a file: as in 2005 is either what was the case for files that
    /// readers take turns in, or what was the case for files of one reader, whose state was kept.
    fn can_show(self, load: &Load) -> bool {
        self != Device::Kernel2005 || load.applications.iter().all(|application| application.processes > 1)
    }
}

/// A page: the least that a kernel reads. With it, as with the reset state of 2005, the kernel reads of a request what was asked
/// for in one piece, and nothing more.
const READ_AHEAD_2005_KIB: u32 = 4;

/// A disk with the exported folder.
enum Disk {
    Kernel(Box<[KernelDisk; 1]>),
    Bare(BareDisk),
}

impl Disk {
    fn new(device: Device, parent: &Path) -> Result<Disk> {
        let params = DeviceParams::default();
        if device == Device::Bare {
            return Ok(Disk::Bare(BareDisk::new(parent, &params)?));
        }
        let disk = KernelDisk::new(parent, &params)?;
        if device == Device::Kernel2005 {
            disk.set_read_ahead_kib(READ_AHEAD_2005_KIB)?;
        }
        std::fs::create_dir(disk.path().join("export"))?;
        Ok(Disk::Kernel(Box::new([disk])))
    }

    fn export(&self) -> PathBuf {
        match self {
            Disk::Kernel(disks) => disks[0].path().join("export"),
            Disk::Bare(disk) => disk.path(),
        }
    }

    /// The folder in which files are made and compared.
    fn files(&self) -> PathBuf {
        match self {
            Disk::Kernel(_) => self.export(),
            Disk::Bare(disk) => disk.bytes(),
        }
    }
}

impl Bed for Disk {
    fn prepare(&self, load: &mut Load) -> Result<()> {
        load.prepare(&self.files())
    }

    fn verify(&self, load: &Load, generation: u64) -> Result<()> {
        load.verify(&self.files(), generation)
    }

    fn reset(&self) -> Result<()> {
        match self {
            Disk::Kernel(disks) => reset_disks(&**disks),
            Disk::Bare(disk) => {
                disk.reset();
                Ok(())
            }
        }
    }

    fn observe(&self) -> Result<Observation> {
        match self {
            Disk::Kernel(disks) => observe_disks(&**disks),
            Disk::Bare(disk) => Ok(disk.observe()),
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.csv.as_deref(), args.html.as_deref()])?;
    let stop = catch_signals()?;
    let systems = args.choice.systems(&SYSTEMS, |system| system.name)?;
    let all = loads(args.size, args.processes);
    let loads = args.choice.loads(all.into_iter().filter(|load| args.device.can_show(load)).collect())?;
    let parent = impresario_workload::cluster::folder(None)?;
    remove_stale(parent.path())?;
    let (mut portmapper, mut missing) = (Children::default(), Vec::new());
    own_network()?;
    if let Err(error) = nfs_ganesha::portmapper(&mut portmapper, parent.path()) {
        missing.push(format!("no portmapper for nfs-ganesha: {error:#}"));
    }
    let device = if args.weights.is_some() { Device::Bare } else { args.device };
    let bed = Disk::new(device, parent.path())?;
    let clients = Clients::build(parent.path(), &LIBNFS)?;
    if let Some(seconds) = args.weights {
        let shown = weights::run(&bed, &clients, parent.path(), seconds, &stop)?;
        all_written([
            write_text(args.csv.as_deref(), || Ok(shown.csv())),
            write_text(args.html.as_deref(), || Ok(shown.html())),
            print(shown.text().as_bytes()).map(drop),
        ])?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut servers = Vec::new();
    for system in systems {
        let options = system.options.map(|options| options.iter().map(|option| option.to_string()).collect());
        match Server::start(system.name, options, &bed.export(), parent.path(), &stop) {
            Ok(server) => servers.push(server),
            Err(error) if stop.is_set() => return Err(error),
            Err(error) => missing.push(format!("{} could not be started: {error:#}", system.name)),
        }
    }
    let title = match device {
        Device::Kernel => "an NFS server on a modelled disk below this kernel",
        Device::Kernel2005 => "an NFS server on a modelled disk below this kernel, which reads nothing ahead",
        Device::Bare => "an NFS server on a bare modelled disk, in order of arrival",
    };
    let mut comparison = Comparison {
        title,
        modelled: true,
        loads,
        subjects: servers
            .iter()
            .map(|server| Subject { name: &server.name, address: &server.url, launcher: &[] })
            .collect(),
        choice: &args.choice,
        baselines: &["none", "nfs-ganesha"],
        missing,
    };
    let text = comparison.run(&bed, &clients, &stop).context("an NFS server on a disk")?;
    print(text.as_bytes())
}
