//! The servers that are compared.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use impresario_workload::children::Children;
use impresario_workload::stop::Stop;

use crate::server_bench::accepts;
use crate::{free_port, impresario, nfs_ganesha};

/// A way to serve the folder.
pub struct System {
    pub name: &'static str,
    /// Options of `impresario nfs`; `None`: nfs-ganesha.
    pub options: Option<&'static [&'static str]>,
}

/// The systems.
pub const SYSTEMS: [System; 9] = [
    System { name: "none", options: Some(&["--policy", "none"]) },
    System { name: "one at a time", options: Some(&["--policy", "fifo", "--in-flight", "1", "--read-ahead", "0"]) },
    System { name: "default", options: Some(&[]) },
    System { name: "auto alone", options: Some(&["--read-ahead", "0"]) },
    System { name: "aioli", options: Some(&["--policy", "aioli", "--in-flight", "1", "--read-ahead", "0"]) },
    System { name: "mlf", options: Some(&["--policy", "mlf", "--in-flight", "1", "--read-ahead", "0"]) },
    System {
        name: "mlf gathering",
        options: Some(&["--policy", "mlf", "--in-flight", "1", "--read-ahead", "0", "--gather", "64m"]),
    },
    System { name: "mlf with foresight", options: Some(&["--policy", "mlf", "--read-ahead", "64m"]) },
    System { name: "nfs-ganesha", options: None },
];

const START_PATIENCE: Duration = Duration::from_secs(20);

/// A running server; it ends when dropped.
pub struct Server {
    pub name: String,
    /// Of the export, for libnfs.
    pub url: String,
    _children: Children,
}

impl Server {
    /// Starts `impresario nfs` with these options, or nfs-ganesha without any, on a free port of loopback, and waits until it
    /// accepts connections.
    pub fn start(
        name: &str,
        options: Option<Vec<String>>,
        export: &Path,
        folder: &Path,
        stop: &Stop,
    ) -> Result<Server> {
        let port = free_port()?;
        let folder = folder.join(name.replace([' ', ',', ':'], "-"));
        std::fs::create_dir(&folder)?;
        let mut children = Children::default();
        let log = folder.join("output.log");
        let mut mount_port = port;
        match options {
            Some(options) => {
                let mut arguments: Vec<String> =
                    ["nfs", "--any-port", "--squash", "none", "--listen"].map(String::from).into();
                arguments.push(format!("127.0.0.1:{port}"));
                arguments.extend(["--key-file".into(), folder.join("key").display().to_string()]);
                arguments.extend(["--export".into(), format!("{}:/export", export.display())]);
                arguments.extend(options);
                children.start(name, &impresario()?, &arguments, &log)?;
            }
            None => {
                mount_port = free_port()?;
                nfs_ganesha::start(&mut children, &folder, export, nfs_ganesha::Version::Three { port, mount_port })?;
            }
        }
        let url = format!("nfs://127.0.0.1/export?version=3&nfsport={port}&mountport={mount_port}");
        accepts(&mut children, "it", port, START_PATIENCE, stop)?;
        Ok(Server { name: name.into(), url, _children: children })
    }
}
