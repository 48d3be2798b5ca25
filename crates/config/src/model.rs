//! The configuration of a cluster: every key with its unit, default and range.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use impresario_device::DeviceParams;
use impresario_sched::PolicySpec;
use serde::{Deserialize, Serialize};

use crate::allocation::Allocation;
use crate::export::Export;
use crate::seen::FileSeen;

/// Name of the metadata server, which has no `name` key because there is only one.
pub const META_NAME: &str = "meta";

/// A whole cluster. Read one with [`Config::load`], which checks; `Deserialize` alone does not. By default it has no servers.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Settings of all servers.
    #[serde(default)]
    pub cluster: Cluster,
    /// A folder of a file system that replaces metadata server and data servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<Tree>,
    /// The metadata server; none with a `tree`.
    #[serde(default, skip_serializing_if = "Meta::is_none")]
    pub meta: Meta,
    /// The data servers (1 to 1024); their order is the order of striping and must never change. None with a `tree`.
    #[serde(default)]
    pub data: Vec<Data>,
    /// The I/O nodes (0 to 1024); without any, clients send requests directly to the data servers.
    #[serde(default)]
    pub io: Vec<Io>,
    /// Which I/O nodes clients use.
    #[serde(default, skip_serializing_if = "Allocation::is_default")]
    pub allocation: Allocation,
    /// The files of certificates; there if and only if `security` is `tls`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// What the clients of some networks may do; without any, all clients may do everything.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub export: Vec<Export>,
    /// Device models by name, for `device` of a data server.
    #[serde(default)]
    pub device: BTreeMap<String, DeviceParams>,
}

/// Settings of all servers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// Shown to people.
    pub name: String,
    /// Strip size of files whose directory sets none, bytes (512 to 1 GiB).
    pub stripe_bytes: u32,
    /// Number of data servers per file; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stripe_count: Option<u16>,
    /// A request that no server has answered after this time fails with an I/O error, ms (100 to 600000).
    pub request_timeout_ms: u64,
    /// Largest payload of one request on the wire, bytes (4096 to 64 MiB).
    pub max_payload_bytes: u32,
    /// Maximum connections of a server (16 to 65536).
    pub max_connections: u32,
    /// Maximum connections of a server from one address (1 to 65536).
    pub max_connections_per_address: u32,
    /// Share of a server's `payload_bytes` available to the requests and replies of one address, percent (1 to 100).
    pub payload_percent_per_address: u32,
    /// Longest time for which a thread of a server or client that waits for a message polls before it sleeps, where that pays,
    /// µs (0 to 1000); 0: never.
    pub poll_us: u32,
    /// Whether servers require peers to prove a key of the cluster, or a certificate.
    pub security: Security,
    /// What keys protect; the stricter of the server's and the client's setting applies.
    pub protect: Protect,
    /// The socket of the MUNGE daemon; absent: the one that the library knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub munge_socket: Option<PathBuf>,
    /// The file that it was read from. Who uses the servers looks there for new addresses when it has changed.
    #[serde(skip)]
    pub file: FileSeen,
    /// Folder of the key files, `client.key`, `admin.key` and `server.key`; each machine has those that it needs.
    /// Relative to the configuration file.
    pub key_dir: PathBuf,
}

/// Whether servers require peers to prove a key or a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Security {
    /// Where a server listens beyond this machine: other than loopback addresses and Unix sockets.
    #[default]
    Auto,
    /// Everywhere.
    Key,
    /// Everywhere, by certificates and TLS 1.3 instead of keys.
    Tls,
    /// Nowhere: anyone who reaches a port can do everything.
    None,
}

impl Security {
    /// True if a server at this configured address requires a key or certificate. Both sides decide from the same text.
    pub fn needs_key(self, address: &str) -> bool {
        match self {
            Security::Key | Security::Tls => true,
            Security::None => false,
            Security::Auto => address.parse::<crate::Address>().map_or_else(
                // Port 0 occurs only with servers started by programs.
                |_| address.rsplit_once(':').is_none_or(|(host, _)| !crate::address::is_loopback(host)),
                |address| !address.is_of_this_machine(),
            ),
        }
    }
}

/// The files of certificates, in PEM. `{role}` in a path stands for the role of the program: client, admin or server.
/// Relative to the configuration file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tls {
    /// The certificates of the authorities that the cluster's programs believe.
    pub ca: PathBuf,
    /// The program's own certificate, followed by those between it and the authority.
    pub certificate: PathBuf,
    /// The private key of the certificate, without a password; nobody but its owner may use the file.
    pub private_key: PathBuf,
    /// The lists of certificates that the authorities have revoked; `None`: there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revoked: Option<PathBuf>,
}

impl Default for Tls {
    fn default() -> Tls {
        let (certificate, private_key) = ("tls/{role}.pem".into(), "tls/{role}.key".into());
        Tls { ca: "tls/ca.pem".into(), certificate, private_key, revoked: None }
    }
}

impl Tls {
    /// The certificate of a program in this role.
    pub fn certificate_of(&self, role: &str) -> PathBuf {
        of_role(&self.certificate, role)
    }

    /// The private key of a program in this role.
    pub fn private_key_of(&self, role: &str) -> PathBuf {
        of_role(&self.private_key, role)
    }
}

/// `path` with the role in its place.
fn of_role(path: &Path, role: &str) -> PathBuf {
    path.to_str().map_or_else(|| path.into(), |text| text.replace("{role}", role).into())
}

/// What keys protect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protect {
    /// The start of a connection: both ends are authenticated. Everything after it is sent in the clear.
    #[default]
    Handshake = 1,
    /// Also every message: requests, identities and replies. File data is sent in the clear.
    Headers = 2,
    /// Also file data.
    All = 3,
}

/// A file system that is there already: a folder that every I/O node has mounted, or one that they reach by its own client
/// library.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tree {
    /// How the file system is reached.
    #[serde(default)]
    pub backend: TreeBackend,
    /// Of `posix`: the folder, on every I/O node; relative to the configuration file. Of `cephfs`: the folder of the file
    /// system that is served, from its root on; absent: all of it.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub folder: PathBuf,
    /// Of `glusterfs`: the volume's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Of `glusterfs`: the host, or `host:port`, of a management daemon that describes the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Of `glusterfs`, instead of `server`: a volume file on every I/O node; relative to the configuration file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volfile: Option<PathBuf>,
    /// Of `cephfs`: Ceph's configuration file on every I/O node; relative to this one. Absent: where Ceph looks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph_config: Option<PathBuf>,
    /// Of `cephfs`: the user, `x` of `client.x`; absent: `admin`. Its key is where Ceph's configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Of `cephfs`: the file system's name; absent: the cluster's default one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<String>,
    /// Data servers of the file system (1 to 1024): each is a lane of the schedulers.
    #[serde(default = "one")]
    pub data_servers: u16,
    /// Strip size of files whose striping the file system does not report, bytes (512 to 1 GiB). Absent: such a file
    /// counts as lying on one data server. Of `cephfs`: that of new files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_bytes: Option<u32>,
    /// Data servers of such a file (1 to `data_servers`); absent: all. Needs `stripe_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_count: Option<u16>,
    /// Of `cephfs`: length of the objects of new files, bytes; absent: 4 MiB. Needs `stripe_bytes`, and is a multiple of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_bytes: Option<u32>,
    /// Of `posix`: which system calls move the bytes of files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<TreeIo>,
    /// Of `posix`: files are read and written past the page cache (`O_DIRECT`), where the file system can. Absent: no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<bool>,
}

impl Default for Tree {
    fn default() -> Tree {
        Tree {
            backend: TreeBackend::default(),
            folder: PathBuf::new(),
            volume: None,
            server: None,
            volfile: None,
            ceph_config: None,
            user: None,
            filesystem: None,
            data_servers: 1,
            stripe_bytes: None,
            stripe_count: None,
            object_bytes: None,
            io: None,
            direct: None,
        }
    }
}

impl std::fmt::Display for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.backend {
            TreeBackend::Posix => write!(f, "the folder {}", self.folder.display()),
            TreeBackend::Glusterfs => write!(f, "the GlusterFS volume {}", self.volume.as_deref().unwrap_or_default()),
            TreeBackend::Cephfs => {
                write!(f, "CephFS")?;
                self.filesystem.as_ref().map_or(Ok(()), |name| write!(f, " {name}"))?;
                if self.folder.as_os_str().is_empty() {
                    Ok(())
                } else {
                    write!(f, ", folder {}", self.folder.display())
                }
            }
        }
    }
}

pub(crate) fn is_empty(path: &std::path::Path) -> bool {
    path.as_os_str().is_empty()
}

/// How a file system is reached.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TreeBackend {
    /// By the system calls of the machine that has it mounted.
    #[default]
    Posix,
    /// By GlusterFS's client library, without a mount.
    Glusterfs,
    /// By Ceph's client library, without a mount.
    Cephfs,
}

/// Which system calls move the bytes of files.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TreeIo {
    /// io_uring past the page cache, if the kernel allows it; `pread` and `pwrite` otherwise.
    #[default]
    Auto,
    /// io_uring, if the kernel allows it.
    Uring,
    /// `pread` and `pwrite`.
    Threads,
}

impl Tree {
    /// Length of the objects of new files of `cephfs` where `stripe_bytes` is given and `object_bytes` is not: Ceph's own.
    pub const OBJECT_DEFAULT_BYTES: u32 = 4 << 20;

    /// A folder that this machine has mounted.
    pub fn of_folder(folder: impl Into<PathBuf>) -> Tree {
        Tree { folder: folder.into(), ..Tree::default() }
    }

    /// The files and folders of this machine.
    pub(crate) fn paths_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        // A folder of CephFS is no folder of this machine.
        let is_here = self.backend != TreeBackend::Cephfs && !is_empty(&self.folder);
        let folder = is_here.then_some(&mut self.folder);
        folder.into_iter().chain(&mut self.volfile).chain(&mut self.ceph_config)
    }

    /// Gives every key a value whose absence stands for one.
    pub(crate) fn fill(&mut self) {
        if self.backend == TreeBackend::Posix {
            self.io.get_or_insert_default();
            self.direct.get_or_insert(false);
        }
        if self.stripe_bytes.is_some() {
            self.stripe_count.get_or_insert(self.data_servers);
        }
        if self.backend == TreeBackend::Cephfs {
            self.user.get_or_insert("admin".into());
            if self.stripe_bytes.is_some() {
                self.object_bytes.get_or_insert(Tree::OBJECT_DEFAULT_BYTES);
            }
        }
    }

    /// The management daemon of a volume: host, and port or 0.
    pub fn volume_server(&self) -> Option<(&str, u16)> {
        let server = self.server.as_deref()?;
        let split = server.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains(':'));
        match split {
            Some((host, port)) => Some((host, port.parse().ok().filter(|port| *port > 0)?)),
            None => (!server.is_empty() && !server.starts_with(':')).then_some((server, 0)),
        }
    }
}

/// The metadata server.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// `host:port` or `unix:/path`.
    pub address: String,
    /// Directory of the name space; relative to the configuration file.
    pub dir: PathBuf,
    /// Address of its metrics for Prometheus, `ip:port`: `http://ip:port/metrics`. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
    /// How long a client that does not answer keeps its file locks, milliseconds (500 to 600000). Absent: 10000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock_lease_ms: Option<u64>,
    /// How long a client that lost its connection, or each client after a restart of the server, may take to come back before
    /// files that it may have open are removed or moved, milliseconds (500 to 600000). Absent: 30000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// What limits the calls on names: `tbf` with rules in requests per second, or `none`. Absent: `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicySpec>,
}

impl Meta {
    /// What limits the calls on names.
    pub fn policy(&self) -> PolicySpec {
        self.policy.clone().unwrap_or_else(impresario_sched::policy::unlimited)
    }

    /// How long a client that does not answer keeps its file locks, milliseconds.
    pub fn lock_lease_ms(&self) -> u64 {
        self.lock_lease_ms.unwrap_or(10_000)
    }

    /// How long a client that lost its connection may take to come back, milliseconds.
    pub fn grace_ms(&self) -> u64 {
        self.grace_ms.unwrap_or(30_000)
    }
}

/// A data server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Unique name, e.g. `data.0`: 1 to 64 letters, digits, `.`, `-` and `_`.
    pub name: String,
    /// `host:port` or `unix:/path`.
    pub address: String,
    /// Directory of the objects; relative to the configuration file.
    pub dir: PathBuf,
    /// Whether new files use the server, and whether there is one.
    #[serde(default, skip_serializing_if = "DataState::is_active")]
    pub state: DataState,
    /// Where the server is going to move, or has moved (`impresario store move`); absent: nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moves_to: Option<MovesTo>,
    /// Scheduling policy.
    #[serde(default = "default_policy")]
    pub policy: PolicySpec,
    /// Hand-off depth: requests in flight below the scheduler (0 to 4096); 0 lets the policy choose.
    #[serde(default)]
    pub in_flight_requests: u32,
    /// Capacity of the queue, requests (1 to 1000000).
    #[serde(default = "default_queue")]
    pub queue_requests: u32,
    /// Limit of the memory for payloads, bytes (at least `max_payload_bytes`, at most 64 GiB).
    #[serde(default = "default_payload")]
    pub payload_bytes: u64,
    /// A device model of `[device.<name>]` in front of the directory; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Maximum bytes that the server reads ahead of its clients (4 MiB to 64 GiB; 0: off). Not from a folder in memory,
    /// unless a device model is in front of it.
    #[serde(default = "default_read_ahead")]
    pub read_ahead_bytes: u64,
    /// Also schedule reads that the page cache can serve, and writes that only go there; otherwise they are done at once, unless
    /// the policy shares the device between parties.
    #[serde(default)]
    pub schedule_cached_reads: bool,
    /// Keep a checksum of each block of 4 KiB, and check it whenever the block is read: damage is an error, not wrong data.
    /// Switched off and on again, the server begins anew; `impresario scrub` makes the missing checksums.
    #[serde(default)]
    pub checksums: bool,
    /// The calibration that the cost model comes from, a file of `impresario calibrate`; relative to the
    /// configuration file. Absent: that of the device model, else of a 7200 rpm disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<PathBuf>,
    /// Correct the cost model by measured service times. Absent: only a calibrated one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correct_cost: Option<bool>,
    /// Folder of the traces of its requests; relative to the configuration file. Absent: no traces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// With `trace`: start a trace with the server, not only on command.
    #[serde(default = "yes")]
    pub trace_at_start: bool,
    /// Traces of earlier runs, for policies that use predictions: files, or folders whose newest traces are taken (at
    /// most 16 entries and 16 runs); relative to the configuration file. Empty: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_runs: Vec<PathBuf>,
    /// Address of its metrics for Prometheus, `ip:port`: `http://ip:port/metrics`. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
}

/// Whether a data server gets files.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataState {
    /// It does.
    #[default]
    Active,
    /// It serves the files that it has, and gets no new ones: it is to be emptied (`impresario store drain`).
    Draining,
    /// It has none and does not run: its section keeps the numbers of the servers behind it.
    Retired,
}

impl DataState {
    /// The name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            DataState::Active => "active",
            DataState::Draining => "draining",
            DataState::Retired => "retired",
        }
    }

    fn is_active(&self) -> bool {
        *self == DataState::Active
    }
}

/// Where a data server moves to.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MovesTo {
    /// `host:port` or `unix:/path`; that of the server where only the directory changes.
    pub address: String,
    /// Directory of the objects; relative to the configuration file.
    pub dir: PathBuf,
}

/// Which requests an I/O node merges: of one file, operation, job and user.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Merge {
    /// Those that touch, as one range.
    #[default]
    Contiguous,
    /// Those for one data server, and of one window of `twins`, as one list of ranges, whether they touch or not.
    List,
}

/// An I/O node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Io {
    /// Unique name, e.g. `io.0`: 1 to 64 letters, digits, `.`, `-` and `_`.
    pub name: String,
    /// `host:port` or `unix:/path`.
    pub address: String,
    /// Scheduling policy.
    #[serde(default = "default_policy")]
    pub policy: PolicySpec,
    /// Forwarded requests in flight at once (1 to 256).
    #[serde(default = "default_in_flight")]
    pub in_flight_requests: u32,
    /// Which waiting requests are merged into one forwarded request.
    #[serde(default)]
    pub merge: Merge,
    /// Largest number of requests merged into one (1 to 1024).
    #[serde(default = "default_merge")]
    pub merge_requests: u32,
    /// Length of the dispatch queue, requests (1 to 100000).
    #[serde(default = "default_dispatch")]
    pub dispatch_requests: u32,
    /// Split requests at the boundaries of data servers before they are scheduled.
    #[serde(default)]
    pub split: bool,
    /// Capacity of the queue, requests (1 to 1000000).
    #[serde(default = "default_queue")]
    pub queue_requests: u32,
    /// Limit of the memory for payloads, bytes (at least `max_payload_bytes`, at most 64 GiB).
    #[serde(default = "default_payload")]
    pub payload_bytes: u64,
    /// Maximum bytes that the node reads ahead of its clients from a mounted folder (4 MiB to 64 GiB; 0: off). Absent: as
    /// a data server there, and nothing elsewhere. See [`Config::read_ahead_bytes`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_ahead_bytes: Option<u64>,
    /// The calibration that the cost model comes from, a file of `impresario calibrate`; relative to the
    /// configuration file. Absent: a 7200 rpm disk's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<PathBuf>,
    /// Correct the cost model by measured service times. Absent: only a calibrated one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correct_cost: Option<bool>,
    /// Folder of the traces of its requests; relative to the configuration file. Absent: no traces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// With `trace`: start a trace with the server, not only on command.
    #[serde(default = "yes")]
    pub trace_at_start: bool,
    /// Traces of earlier runs, for policies that use predictions: files, or folders whose newest traces are taken (at
    /// most 16 entries and 16 runs); relative to the configuration file. Empty: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_runs: Vec<PathBuf>,
    /// Address of its metrics for Prometheus, `ip:port`: `http://ip:port/metrics`. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
}

/// One server of a cluster, found by its name.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Server<'a> {
    /// The metadata server.
    Meta(&'a Meta),
    /// A data server and its index.
    Data(usize, &'a Data),
    /// An I/O node and its index.
    Io(usize, &'a Io),
}

impl<'a> Server<'a> {
    /// Its unique name.
    pub fn name(&self) -> &'a str {
        match self {
            Server::Meta(_) => META_NAME,
            Server::Data(_, data) => &data.name,
            Server::Io(_, io) => &io.name,
        }
    }

    /// Its address as in the configuration.
    pub fn address(&self) -> &'a str {
        match self {
            Server::Meta(meta) => &meta.address,
            Server::Data(_, data) => &data.address,
            Server::Io(_, io) => &io.address,
        }
    }

    /// The address of its metrics, if it has one.
    pub fn metrics(&self) -> Option<SocketAddr> {
        match self {
            Server::Meta(meta) => meta.metrics,
            Server::Data(_, data) => data.metrics,
            Server::Io(_, io) => io.metrics,
        }
    }

    /// Its directory, if it has one.
    pub fn dir(&self) -> Option<&'a Path> {
        match self {
            Server::Meta(meta) => Some(&meta.dir),
            Server::Data(_, data) => Some(&data.dir),
            Server::Io(..) => None,
        }
    }
}

impl Config {
    /// All servers in start order, without retired ones: those that others need come first.
    pub fn servers(&self) -> impl Iterator<Item = Server<'_>> {
        let is_retired = |server: &Server<'_>| matches!(server, Server::Data(_, data) if data.is_retired());
        self.sections().filter(move |server| !is_retired(server))
    }

    /// The same with retired ones.
    pub(crate) fn sections(&self) -> impl Iterator<Item = Server<'_>> {
        let data = self.data.iter().enumerate().map(|(i, data)| Server::Data(i, data));
        let meta = self.tree.is_none().then_some(Server::Meta(&self.meta));
        let io = self.io.iter().enumerate().map(|(i, io)| Server::Io(i, io));
        data.chain(meta).chain(io)
    }

    /// Lanes of the I/O nodes' schedulers: one per data server.
    pub fn lanes(&self) -> u16 {
        let data = self.data.len().min(usize::from(u16::MAX)) as u16;
        self.tree.as_ref().map_or(data, |tree| tree.data_servers)
    }

    /// The server of that name; the error lists the closest name and all names.
    pub fn server(&self, name: &str) -> Result<Server<'_>, String> {
        self.sections().find(|server| server.name() == name).ok_or_else(|| {
            let names: Vec<&str> = self.servers().map(|server| server.name()).collect();
            let hint = impresario_toml::nearest(name, names.iter().copied()).map(|n| format!("; did you mean {n}?"));
            format!("no server is named {name}{} There are: {}", hint.unwrap_or_else(|| ".".into()), names.join(", "))
        })
    }

    /// The addresses at which the server of that name may be found, the first one first.
    pub fn addresses(&self, name: &str) -> Vec<String> {
        let Ok(server) = self.server(name) else { return Vec::new() };
        let more = match server {
            Server::Data(_, data) => data.moves_to.as_ref().map(|to| to.address.clone()),
            _ => None,
        };
        let first = server.address().to_string();
        std::iter::once(first.clone()).chain(more.filter(|more| *more != first)).collect()
    }

    /// The files and folders that are relative to the configuration file.
    pub(crate) fn paths_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let meta = if self.meta.is_none() { None } else { Some(&mut self.meta.dir) };
        let data = self.data.iter_mut().flat_map(|data| {
            let to = data.moves_to.as_mut().map(|to| &mut to.dir);
            let files = data.cost.iter_mut().chain(&mut data.trace).chain(&mut data.earlier_runs);
            std::iter::once(&mut data.dir).chain(to).chain(files)
        });
        let io = self.io.iter_mut().flat_map(|io| io.cost.iter_mut().chain(&mut io.trace).chain(&mut io.earlier_runs));
        let folder = self.tree.as_mut().into_iter().flat_map(Tree::paths_mut);
        let tls = self.tls.iter_mut().flat_map(|tls| {
            [&mut tls.ca, &mut tls.certificate, &mut tls.private_key].into_iter().chain(&mut tls.revoked)
        });
        data.chain(io)
            .chain(meta)
            .chain(folder)
            .chain(std::iter::once(&mut self.cluster.key_dir))
            .chain(tls)
            .chain(&mut self.cluster.munge_socket)
    }

    /// The same configuration with a value for every key whose absence stands for one.
    pub fn with_defaults(mut self) -> Config {
        if !self.meta.is_none() {
            self.meta.lock_lease_ms = Some(self.meta.lock_lease_ms());
            self.meta.grace_ms = Some(self.meta.grace_ms());
            self.meta.policy = Some(self.meta.policy());
            self.cluster.stripe_count = Some(self.stripe_count());
        }
        if self.reads_through_page_cache() {
            for io in &mut self.io {
                io.read_ahead_bytes.get_or_insert(Data::READ_AHEAD_BYTES);
            }
        }
        self.tree.iter_mut().for_each(Tree::fill);
        self
    }

    /// The I/O nodes read through the page cache of their machine, into which something can be read ahead.
    pub(crate) fn reads_through_page_cache(&self) -> bool {
        let is_cached = |tree: &Tree| tree.backend == TreeBackend::Posix && tree.direct != Some(true);
        self.tree.as_ref().is_some_and(is_cached)
    }

    /// Maximum bytes that an I/O node reads ahead of its clients; 0: nothing.
    pub fn read_ahead_bytes(&self, io: &Io) -> u64 {
        let default = if self.reads_through_page_cache() { Data::READ_AHEAD_BYTES } else { 0 };
        io.read_ahead_bytes.unwrap_or(default)
    }

    /// Number of data servers that a file is striped over by default.
    pub fn stripe_count(&self) -> u16 {
        self.cluster.stripe_count.unwrap_or(self.data.len() as u16)
    }
}

impl Meta {
    /// True where the configuration has none.
    pub fn is_none(&self) -> bool {
        *self == Meta::default()
    }
}

impl Default for Cluster {
    fn default() -> Self {
        Cluster {
            name: "impresario".into(),
            stripe_bytes: impresario_layout::Layout::SSIZE_DEFAULT_BYTES,
            stripe_count: None,
            request_timeout_ms: 10_000,
            max_payload_bytes: 4 << 20,
            max_connections: 1024,
            max_connections_per_address: 512,
            payload_percent_per_address: 75,
            poll_us: 50,
            security: Security::default(),
            protect: Protect::default(),
            munge_socket: None,
            file: FileSeen::default(),
            key_dir: "keys".into(),
        }
    }
}

impl Cluster {
    /// How long a thread that waits for a message may poll before it sleeps; zero: never.
    pub fn poll(&self) -> Duration {
        Duration::from_micros(self.poll_us.into())
    }
}

impl Data {
    /// Whether the server exists no more.
    pub fn is_retired(&self) -> bool {
        self.state == DataState::Retired
    }

    /// Default read-ahead limit of a data server.
    pub const READ_AHEAD_BYTES: u64 = 128 << 20;

    /// A data server with the default of every optional key.
    pub fn new(name: impl Into<String>, address: impl Into<String>, dir: impl Into<PathBuf>) -> Data {
        Data {
            name: name.into(),
            address: address.into(),
            dir: dir.into(),
            state: DataState::Active,
            moves_to: None,
            policy: default_policy(),
            in_flight_requests: 0,
            queue_requests: default_queue(),
            payload_bytes: default_payload(),
            read_ahead_bytes: default_read_ahead(),
            schedule_cached_reads: false,
            checksums: false,
            device: None,
            cost: None,
            correct_cost: None,
            trace: None,
            trace_at_start: true,
            earlier_runs: Vec::new(),
            metrics: None,
        }
    }
}

impl Io {
    /// An I/O node with the default of every optional key.
    pub fn new(name: impl Into<String>, address: impl Into<String>) -> Io {
        Io {
            name: name.into(),
            address: address.into(),
            policy: default_policy(),
            in_flight_requests: default_in_flight(),
            merge: Merge::default(),
            merge_requests: default_merge(),
            dispatch_requests: default_dispatch(),
            split: false,
            queue_requests: default_queue(),
            payload_bytes: default_payload(),
            read_ahead_bytes: None,
            cost: None,
            correct_cost: None,
            trace: None,
            trace_at_start: true,
            earlier_runs: Vec::new(),
            metrics: None,
        }
    }
}

fn yes() -> bool {
    true
}
fn one() -> u16 {
    1
}
fn default_policy() -> PolicySpec {
    PolicySpec::named("auto")
}
fn default_read_ahead() -> u64 {
    Data::READ_AHEAD_BYTES
}
fn default_queue() -> u32 {
    10_000
}
fn default_payload() -> u64 {
    32 << 20
}
fn default_in_flight() -> u32 {
    16
}
fn default_merge() -> u32 {
    16
}
fn default_dispatch() -> u32 {
    256
}
