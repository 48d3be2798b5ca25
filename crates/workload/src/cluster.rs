//! A temporary cluster for one experiment: created in its own folder, started, and removed completely.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_base::machine::is_in_memory;
use impresario_base::units::show_bytes;
use impresario_client::{Access, KeyRole, admin};
use impresario_config::{Cluster, Config, Data, Io, Meta, Protect, Security, Tls};
use impresario_device::DeviceParams;
use impresario_sched::PolicySpec;
use impresario_transport::{Keys, key_file_name};

use crate::children::Children;
use crate::kernel_disk::{self, KernelDisk};
use crate::programs::{BlockDevice, Group, Limits, drop_caches};
use crate::stop::Stop;

/// How long the servers may take until all respond.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// Another program may take a free port before its server starts: then all are chosen again.
const START_TRIES: u32 = 3;
/// Name prefix of the control groups of servers; the process number and the server's name follow.
const GROUP_PREFIX: &str = "impresario-bench-";

/// The cluster to start.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Number of data servers.
    pub data_servers: usize,
    /// Number of I/O nodes.
    pub io_nodes: usize,
    /// Policy of the data servers at the start.
    pub data_policy: PolicySpec,
    /// Policy of the I/O nodes at the start.
    pub io_policy: PolicySpec,
    /// Model of the disk in front of every data server; absent: the folder as fast as it is.
    pub device: Option<DeviceParams>,
    /// Model of a disk below the kernel's own storage stack, one for every data server ([`KernelDisk`]); needs root.
    pub kernel_disk: Option<DeviceParams>,
    /// Whether each run begins with an empty page cache (of the whole machine; needs root), so that reads come from the
    /// block device of `parent`, whose requests are counted.
    pub cold: bool,
    /// Memory of each data server with its page cache, bytes (needs root and control groups); 0: without limit.
    pub server_memory_bytes: u64,
    /// Strip size of new files, bytes.
    pub stripe_bytes: u32,
    /// How far data servers read ahead of a stream, bytes; 0: not at all.
    pub read_ahead_bytes: u64,
    /// Hand-off depth of the data servers; 0: as the policy decides.
    pub in_flight_requests: u32,
    /// Whether its servers require a key from peers; keys are then made.
    pub security: Security,
    /// The folder of the certificates, if it requires these: `ca.pem`, and `client.pem`, `client.key` and so on for each role.
    pub certificates: Option<PathBuf>,
    /// What keys protect.
    pub protect: Protect,
    /// Connections of a server at once; absent: the default.
    pub max_connections: Option<u32>,
    /// How long servers and clients poll before they sleep, µs; absent: the default.
    pub poll_us: Option<u32>,
    /// A request that no server has answered after this time fails, ms. A modelled disk is slow under a full queue, and the run must
    /// not fail for that: so the default is longer than a cluster's.
    pub request_timeout_ms: u64,
    /// The server program `impresario`; absent: this program.
    pub program: Option<PathBuf>,
    /// Where the cluster's folder is made; absent: in memory where the system has `/dev/shm`, else the temporary folder.
    pub parent: Option<PathBuf>,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            data_servers: 4,
            io_nodes: 2,
            data_policy: PolicySpec::named("auto"),
            io_policy: PolicySpec::named("fifo"),
            device: None,
            kernel_disk: None,
            cold: false,
            server_memory_bytes: 0,
            stripe_bytes: 64 << 10,
            read_ahead_bytes: impresario_config::Data::READ_AHEAD_BYTES,
            in_flight_requests: 0,
            security: Security::Auto,
            certificates: None,
            protect: Protect::default(),
            max_connections: None,
            poll_us: None,
            request_timeout_ms: 60_000,
            program: None,
            parent: None,
        }
    }
}

impl Drop for OwnCluster {
    fn drop(&mut self) {
        // Servers that others need end last.
        while self.here.pop().is_some() {}
    }
}

/// A running cluster. Dropping it stops its servers and removes its folder.
pub struct OwnCluster {
    /// Its description.
    pub config: Config,
    // Dropped in this order: servers end before their folder is removed.
    children: Children,
    /// What its servers run; empty where they run in this process.
    program: PathBuf,
    here: Vec<impresario_server::process::Started>,
    groups: Arc<[ServerMemory]>,
    kernel_disks: Arc<[KernelDisk]>,
    cold_device: Option<BlockDevice>,
    dir: tempfile::TempDir,
}

/// The control group of a data server whose memory is limited.
#[derive(Debug)]
pub struct ServerMemory {
    server: String,
    limit_bytes: u64,
    group: Group,
}

impl ServerMemory {
    fn new(server: &str, limit_bytes: u64) -> Result<ServerMemory> {
        let name = format!("{GROUP_PREFIX}{}-{server}", std::process::id());
        let limits = Limits { memory_bytes: limit_bytes, ..Limits::default() };
        let group = Group::new(&name, None, limits);
        let group = group.with_context(|| format!("limiting the memory of {server}"))?;
        Ok(ServerMemory { server: server.into(), limit_bytes, group })
    }

    /// Its limit, bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// How often memory was reclaimed because it had as much as it may have.
    pub fn reclaims(&self) -> u64 {
        self.group.reclaims()
    }
}

impl OwnCluster {
    /// Starts a cluster as child processes of this program.
    ///
    /// The servers are killed when the calling thread ends: call this from one that lives long enough.
    pub fn start(plan: &Plan, stop: &Stop) -> Result<OwnCluster> {
        let mut tries = 1;
        loop {
            match Self::start_once(plan, stop) {
                Err(error) if tries < START_TRIES && !stop.is_set() && format!("{error:#}").contains("in use") => {
                    tries += 1
                }
                result => return result,
            }
        }
    }

    fn start_once(plan: &Plan, stop: &Stop) -> Result<OwnCluster> {
        let mut cluster = OwnCluster::prepare(plan)?;
        if plan.server_memory_bytes > 0 {
            cluster.groups = cluster.limit_memory(plan.server_memory_bytes)?;
        }
        impresario_server::folders::make_all(&cluster.config)?;
        let path = cluster.dir().join("impresario.toml");
        std::fs::write(&path, cluster.config.to_toml()).with_context(|| format!("writing {}", path.display()))?;
        cluster.program = match &plan.program {
            Some(program) => program.clone(),
            None => std::env::current_exe().context("finding this program's own file")?,
        };
        let servers: Vec<(String, String)> =
            cluster.config.servers().map(|s| (s.name().into(), s.address().into())).collect();
        servers.iter().try_for_each(|(name, _)| cluster.launch(name))?;
        let deadline = Instant::now() + START_PATIENCE;
        let access = Access::of(&cluster.config, KeyRole::Client);
        for (name, address) in &servers {
            while let Err(error) = admin::status(&access, address, Duration::from_secs(1)) {
                stop.check()?;
                cluster.children.check()?;
                if Instant::now() >= deadline {
                    bail!("{name} at {address} did not answer within {} s: {error}", START_PATIENCE.as_secs());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(cluster)
    }

    /// A group for each data server. The page cache counts; what lies in a folder in memory could never leave it.
    fn limit_memory(&self, limit_bytes: u64) -> Result<Arc<[ServerMemory]>> {
        if !rustix::process::geteuid().is_root() {
            bail!("limiting the memory of data servers needs root (control groups)");
        }
        let parent = self.config.data.first().and_then(|data| data.dir.parent()).context("a data server's folder")?;
        let kind = rustix::fs::statfs(parent).with_context(|| format!("looking at {}", parent.display()))?.f_type;
        if is_in_memory(kind as u64) {
            bail!(
                "{} is in memory, and files there could not make room: with a limit of the servers' memory, name a folder on a \
                 disk, or let them have one",
                parent.display()
            );
        }
        Group::remove_stale(GROUP_PREFIX);
        self.config.data.iter().map(|data| ServerMemory::new(&data.name, limit_bytes)).collect()
    }

    /// The groups of the data servers whose memory is limited.
    pub fn server_memory(&self) -> &Arc<[ServerMemory]> {
        &self.groups
    }

    /// What to know of servers after a run has failed: those that the kernel has ended for want of memory.
    pub fn lost_for_memory(&self) -> Option<String> {
        let lost = self.groups.iter().filter(|memory| memory.group.killed_for_memory() > 0);
        let lost: Vec<&str> = lost.map(|memory| memory.server.as_str()).collect();
        let limit = show_bytes(self.groups.first()?.limit_bytes as f64);
        (!lost.is_empty()).then(|| format!("{limit} of memory were not enough for {}: allow more", lost.join(", ")))
    }

    /// The configuration and the disks, without servers.
    fn prepare(plan: &Plan) -> Result<OwnCluster> {
        let dir = folder(plan.parent.as_deref())?;
        let mut config = plan.configure(dir.path())?;
        if plan.security == Security::Key {
            let keys = Keys::draw().context("making keys")?;
            for role in KeyRole::ALL {
                keys.for_role(role).store(&config.cluster.key_dir.join(key_file_name(role)))?;
            }
        }
        let cold_device = plan.cold.then(|| BlockDevice::under(dir.path())).transpose()?;
        if plan.cold {
            drop_caches()?;
        }
        let mut disks = Vec::new();
        if let Some(params) = &plan.kernel_disk {
            let parent = dir.path().parent().context("the folder of the cluster")?;
            kernel_disk::remove_stale(parent)?;
            for data in &mut config.data {
                let disk =
                    KernelDisk::new(parent, params).with_context(|| format!("making the disk of {}", data.name))?;
                data.dir = disk.path().join(&data.name);
                disks.push(disk);
            }
        }
        let kernel_disks = disks.into();
        let (children, program, here) = Default::default();
        Ok(OwnCluster { config, children, program, here, groups: Arc::default(), kernel_disks, cold_device, dir })
    }

    /// The modelled disks below the kernel's storage stack, in the order of the data servers; empty without.
    pub fn kernel_disks(&self) -> &Arc<[KernelDisk]> {
        &self.kernel_disks
    }

    /// The machine's own device that runs read from with an empty page cache; none unless [`Plan::cold`] asks for it.
    pub fn cold_device(&self) -> Option<&BlockDevice> {
        self.cold_device.as_ref()
    }

    /// Starts a cluster on threads of this process: for tests, where this program is not `impresario`.
    pub fn start_here(plan: &Plan) -> Result<OwnCluster> {
        if plan.server_memory_bytes > 0 {
            bail!("the memory of servers in this process cannot be limited");
        }
        let mut cluster = OwnCluster::prepare(plan)?;
        impresario_server::folders::make_all(&cluster.config)?;
        for server in cluster.config.servers() {
            cluster.here.push(impresario_server::process::start(&cluster.config, server.name())?);
        }
        Ok(cluster)
    }

    /// Names and numbers of the server processes; none of servers in this process.
    pub fn pids(&self) -> Vec<(String, u32)> {
        self.children.pids()
    }

    /// Kills a server process.
    pub fn kill(&mut self, server: &str) -> Result<()> {
        self.children.kill(server)
    }

    /// Stops a server process as it is, as a machine that hangs is stopped.
    pub fn pause(&mut self, server: &str) -> Result<()> {
        self.children.signal(server, libc::SIGSTOP)
    }

    /// Lets one that was stopped go on.
    pub fn resume(&mut self, server: &str) -> Result<()> {
        self.children.signal(server, libc::SIGCONT)
    }

    /// Starts a server process, also one that was killed; does not wait until it responds.
    pub fn launch(&mut self, server: &str) -> Result<()> {
        let dir = self.dir.path();
        let description = dir.join("impresario.toml").display().to_string();
        let mut command = Command::new(&self.program);
        command.args(["serve", &description, "--name", server]);
        let memory = self.groups.iter().find(|memory| memory.server == server);
        let command = match memory {
            Some(memory) => memory.group.enter(&command),
            None => command,
        };
        self.children.start_command(server, command, &dir.join(format!("{server}.log")))
    }

    /// The folder that holds everything of it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// A new folder in memory, or where the user wants it.
pub fn folder(parent: Option<&Path>) -> Result<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let temporary = std::env::temp_dir();
    let parent = parent.unwrap_or(if memory.is_dir() { memory } else { &temporary });
    tempfile::Builder::new()
        .prefix("impresario-bench-")
        .tempdir_in(parent)
        .with_context(|| format!("making a folder in {}; choose another one with --dir", parent.display()))
}

impl Plan {
    /// The configuration of the cluster, with ports that were free just now.
    pub fn configure(&self, dir: &Path) -> Result<Config> {
        // All are held while the system assigns them, so they differ.
        let held: Vec<TcpListener> = (0..1 + self.data_servers + self.io_nodes)
            .map(|_| TcpListener::bind("127.0.0.1:0"))
            .collect::<Result<_, _>>()
            .context("finding free ports on 127.0.0.1")?;
        let mut addresses = held.iter().map(|l| l.local_addr().map(|a| a.to_string()));
        let mut address = || addresses.next().context("a port for every server").and_then(|a| Ok(a?));
        let meta = Meta { address: address()?, dir: dir.join("meta"), ..Meta::default() };
        let mut data = Vec::new();
        for i in 0..self.data_servers {
            let name = format!("data.{i}");
            let all = Data::new(&name, address()?, dir.join(&name));
            // Payloads are memory of the server, of which nothing can be reclaimed.
            let payload_bytes = match self.server_memory_bytes {
                0 => all.payload_bytes,
                limit => all.payload_bytes.min(limit / 4).max(Cluster::default().max_payload_bytes.into()),
            };
            data.push(Data {
                payload_bytes,
                policy: self.data_policy.clone(),
                in_flight_requests: self.in_flight_requests,
                read_ahead_bytes: self.read_ahead_bytes,
                device: self.device.as_ref().map(|_| "disk".into()),
                trace: Some(dir.join("traces")),
                trace_at_start: false,
                ..all
            });
        }
        let mut io = Vec::new();
        for i in 0..self.io_nodes {
            io.push(Io { policy: self.io_policy.clone(), ..Io::new(format!("io.{i}"), address()?) });
        }
        let device = self.device.iter().map(|d| ("disk".to_string(), d.clone())).collect();
        let cluster = Cluster {
            name: "benchmark".into(),
            stripe_bytes: self.stripe_bytes,
            request_timeout_ms: self.request_timeout_ms,
            security: self.security,
            protect: self.protect,
            key_dir: dir.join("keys"),
            max_connections: self.max_connections.unwrap_or(Cluster::default().max_connections),
            poll_us: self.poll_us.unwrap_or(Cluster::default().poll_us),
            ..Cluster::default()
        };
        let tls = self.certificates.as_ref().map(|folder| {
            let of_role = |ending| folder.join(format!("{{role}}.{ending}"));
            Tls {
                ca: folder.join("ca.pem"),
                certificate: of_role("pem"),
                private_key: of_role("key"),
                ..Tls::default()
            }
        });
        let config = Config { cluster, meta, data, io, tls, device, ..Config::default() };
        match config.check().as_slice() {
            [] => Ok(config),
            complaints => {
                let lines: Vec<&str> = complaints.iter().map(|(_, what)| what.as_str()).collect();
                bail!("the cluster cannot be: {}", lines.join("; "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_becomes_a_configuration() {
        let plan = Plan { device: Some(DeviceParams::default()), ..Plan::default() };
        let config = plan.configure(Path::new("/c")).unwrap();
        assert_eq!((config.data.len(), config.io.len(), config.device.len()), (4, 2, 1));
        assert!(config.data.iter().all(|d| d.device.as_deref() == Some("disk")));
        assert_eq!(Config::parse(&config.to_toml(), Path::new("/c/impresario.toml")).unwrap(), config);
        assert_eq!(config.data[0].payload_bytes, Data::new("data.0", "", "/c").payload_bytes);
        let small = Plan { server_memory_bytes: 128 << 20, ..plan.clone() }.configure(Path::new("/c")).unwrap();
        assert!(small.data.iter().all(|d| d.payload_bytes == 32 << 20), "they have to keep within their memory");
        let bad = Plan { data_policy: PolicySpec::named("twins"), ..plan };
        assert!(bad.configure(Path::new("/c")).is_err());
    }
}
