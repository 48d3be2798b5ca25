//! A modelled disk as a file system of this machine: a cluster of one data server, mounted.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use impresario_sched::PolicySpec;

use impresario_workload::access::Target;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::kernel_disk::tool;
use impresario_workload::programs::{Counts, TestBed, drop_caches};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;

/// A mounted cluster whose only disk is the model of a 7200 rpm drive; taken away when dropped.
pub struct ModelledDisk {
    mount: PathBuf,
    cluster: OwnCluster,
}

impl ModelledDisk {
    /// Starts and mounts it.
    pub fn new(stop: &Stop) -> Result<ModelledDisk> {
        let plan = Plan {
            data_servers: 1,
            io_nodes: 0,
            data_policy: PolicySpec::named("none"),
            device: Some(Default::default()),
            program: Some(crate::impresario()?),
            ..Plan::default()
        };
        let cluster = OwnCluster::start(&plan, stop)?;
        let mount = cluster.dir().join("mount");
        std::fs::create_dir(&mount)?;
        let disk = ModelledDisk { mount, cluster };
        let config = disk.cluster.dir().join("impresario.toml");
        tool(Command::new(crate::impresario()?).args(["mount", "-d"]).arg(config).arg(&disk.mount))?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }

    /// Empties the caches of the model.
    pub fn reset(&self) -> Result<()> {
        Storage::of(&self.cluster).reset()
    }
}

impl TestBed for ModelledDisk {
    /// Empties every cache, in this machine and in the model.
    fn cool(&self) -> Result<()> {
        drop_caches()?;
        self.reset()
    }

    /// What the modelled disk served since [`TestBed::cool`].
    fn counts(&self) -> Result<Counts> {
        let moved = Storage::of(&self.cluster).observe()?.at_disk;
        Ok(Counts { reads: moved.requests, read_bytes: moved.bytes, ..Counts::default() })
    }
}

impl Drop for ModelledDisk {
    fn drop(&mut self) {
        if let Ok(program) = crate::impresario() {
            let _ = Command::new(program).args(["umount", "--lazy"]).arg(&self.mount).output();
        }
    }
}
