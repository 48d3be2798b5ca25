//! The servers that are compared, each in a folder of its own in memory.

use std::any::Any;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_sched::PolicySpec;
use impresario_workload::access::{Identity, Target};
use impresario_workload::children::Children;
use impresario_workload::cluster::{OwnCluster, Plan, folder};
use impresario_workload::folder::Folder;
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use serde::{Deserialize, Serialize};

use super::nfs3::Nfs;
use super::ninep::NineP;
use crate::command::datapath::minimal_cluster;
use crate::{free_port, impresario, nfs_ganesha};

/// How long a server may take until it serves.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// A metadata server and a data server of ours
    Ours,
    /// The same through an I/O node
    IoNode,
    /// Ours, with servers and clients that sleep while they wait instead of polling first (poll_us = 0)
    Asleep,
    /// A minimal TCP server, for data only
    Minimal,
    /// diod, 9P2000.L (Debian package diod)
    Diod,
    /// nfs-ganesha, NFS version 3 (Debian packages nfs-ganesha-vfs and rpcbind)
    NfsGanesha,
    /// The folder by system calls, without a server: the ceiling
    Direct,
}

impl Subject {
    /// For tables, and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Ours => "ours",
            Subject::IoNode => "io-node",
            Subject::Asleep => "asleep",
            Subject::Minimal => "minimal",
            Subject::Diod => "diod",
            Subject::NfsGanesha => "nfs-ganesha",
            Subject::Direct => "direct",
        }
    }

    /// Whether it is a project that ours is to be ahead of.
    pub fn is_peer(self) -> bool {
        matches!(self, Subject::Diod | Subject::NfsGanesha)
    }

    /// Whether it has names and attributes.
    pub fn has_names(self) -> bool {
        self != Subject::Minimal
    }

    /// Why it cannot be measured here at all, if it cannot.
    pub fn missing(self) -> Option<String> {
        let (programs, packages): (&[&str], &str) = match self {
            Subject::Diod => (&["diod"], "diod"),
            Subject::NfsGanesha => (&["ganesha.nfsd", "rpcbind"], "nfs-ganesha-vfs and rpcbind"),
            _ => return None,
        };
        let lacking = programs.iter().find(|name| program(name).is_none())?;
        Some(format!("{lacking} is not installed (Debian: {packages})"))
    }

    /// Starts it, and waits until a client can use it.
    ///
    /// Its processes are killed when the calling thread ends.
    pub fn start(self, policy: &str, stop: &Stop) -> Result<Running> {
        let dir = folder(None)?;
        match self {
            Subject::Ours | Subject::IoNode | Subject::Asleep => {
                let plan = Plan {
                    data_servers: 1,
                    io_nodes: usize::from(self == Subject::IoNode),
                    data_policy: PolicySpec::named(policy),
                    poll_us: (self == Subject::Asleep).then_some(0),
                    program: Some(impresario()?),
                    ..Plan::default()
                };
                let cluster = OwnCluster::start(&plan, stop)?;
                let target = Storage::of(&cluster);
                Ok(Running {
                    target: Box::new(target),
                    children: Children::default(),
                    _server: Box::new((cluster, dir)),
                })
            }
            Subject::Minimal => {
                let (children, target) = minimal_cluster(1, dir.path(), stop)?;
                Ok(Running { target: Box::new(target), children, _server: Box::new(dir) })
            }
            Subject::Direct => {
                let target = Folder::new(dir.path())?;
                Ok(Running { target: Box::new(target), children: Children::default(), _server: Box::new(dir) })
            }
            Subject::Diod => {
                let (export, address) = (dir.path().join("export"), loopback()?);
                std::fs::create_dir(&export)?;
                let export = std::path::absolute(export)?.display().to_string();
                // It raises its limit for core files, and some of its versions crash when a client leaves: in a folder that goes
                // with the measurement.
                let (folder, diod) = (dir.path().display().to_string(), installed("diod")?.display().to_string());
                let address_text = address.to_string();
                let arguments =
                    ["-C", &folder, &diod, "-f", "-n", "-l", &address_text, "-e", &export].map(String::from);
                let mut children = Children::default();
                children.start(self.name(), &installed("env")?, &arguments, &dir.path().join("log"))?;
                let pids = children.pids().into_iter().map(|(_, pid)| pid).collect();
                let target = NineP { address, export, pids };
                Running { target: Box::new(target), children, _server: Box::new(dir) }.ready(self, stop)
            }
            Subject::NfsGanesha => {
                let (export, address, mount) = (dir.path().join("export"), loopback()?, loopback()?);
                std::fs::create_dir(&export)?;
                let version = nfs_ganesha::Version::Three { port: address.port(), mount_port: mount.port() };
                let mut children = Children::default();
                nfs_ganesha::start(&mut children, dir.path(), &export, version)?;
                let pids = children.pids().into_iter().map(|(_, pid)| pid).collect();
                let target = Nfs { address, mount, export: "/export".into(), pids };
                Running { target: Box::new(target), children, _server: Box::new(dir) }.ready(self, stop)
            }
        }
    }
}

/// A server that can be measured; it ends when dropped.
pub struct Running {
    /// The way to it.
    pub target: Box<dyn Target>,
    // Dropped in this order: servers end before their folder is removed.
    children: Children,
    _server: Box<dyn Any>,
}

impl Running {
    /// What is used as it is.
    #[cfg(test)]
    pub fn of(target: Box<dyn Target>) -> Running {
        Running { target, children: Children::default(), _server: Box::new(()) }
    }

    /// Waits until a client can connect.
    fn ready(mut self, subject: Subject, stop: &Stop) -> Result<Running> {
        let until = Instant::now() + START_PATIENCE;
        let identity = || Identity { job: 0, node: None, wire_max_bytes: None, name: "first".into() };
        while let Err(error) = self.target.connect(identity()) {
            stop.check()?;
            self.children.check()?;
            if Instant::now() > until {
                bail!("{} does not serve within {} s: {error:#}", subject.name(), START_PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(self)
    }
}

fn loopback() -> Result<SocketAddr> {
    Ok((Ipv4Addr::LOCALHOST, free_port()?).into())
}

fn installed(name: &str) -> Result<PathBuf> {
    program(name).with_context(|| format!("{name} is not installed"))
}

/// A program in `PATH`, or among those that are for administrators.
fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(|folder| Path::new(folder).into()));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}
