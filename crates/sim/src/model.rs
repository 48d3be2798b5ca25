//! The model of a scenario: every key of a scenario file with its unit, default and range.
//!
//! A scenario is a cluster, its load and its faults. The same structure is written in TOML or built in code. Sizes and
//! rates are plain numbers in the unit of the key's name.

use std::collections::BTreeMap;

use impresario_device::DeviceParams;
use impresario_sched::PolicySpec;
use serde::{Deserialize, Serialize};

/// A cluster, its load, and its faults.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scenario {
    /// One line for people.
    pub title: String,
    /// What it represents, and assumptions where the source is silent, one sentence per entry.
    pub assumptions: Vec<String>,
    /// Seed of all random values: delays, positions on the disks, faults.
    pub seed: u64,
    /// End of virtual time, s (0.001 to 1e9; default 100000): unfinished operations then fail.
    pub time_limit_s: f64,
    /// A client gives up an operation that no server has answered after this time, ms (1 to 600000; default 10000), and
    /// tries another route once; then it fails with an I/O error. Any part of a reply restarts the time.
    pub request_timeout_ms: u64,
    /// The network.
    pub network: Network,
    /// The compute nodes.
    pub clients: Clients,
    /// The forwarding layer; absent: clients connect directly to the data servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_nodes: Option<IoNodes>,
    /// The data servers.
    pub servers: Servers,
    /// Devices by name, for `servers.device`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub device: BTreeMap<String, Device>,
    /// The applications.
    pub application: Vec<Application>,
    /// Scheduled faults.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fault: Vec<Fault>,
    /// Random faults from the seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub random_faults: Option<RandomFaults>,
}

/// The network: every node has one full-duplex link to a switch that never blocks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// One-way latency between any two nodes, µs (0 to 1e6; default 50).
    pub latency_us: f64,
    /// Uniform extra delay of each message, up to this, µs (default 20); without it servers run in lockstep.
    pub jitter_us: f64,
    /// Messages between the same two nodes keep their order, as on one connection (default false: each is independent).
    pub in_order: bool,
    /// Rate of a compute node's link, bytes a second (default 0: without limit).
    pub client_bytes_per_s: f64,
    /// Rate of an I/O node's link (default 0: without limit).
    pub io_node_bytes_per_s: f64,
    /// Rate of a data server's link (default 0: without limit).
    pub server_bytes_per_s: f64,
    /// Links are shared fairly in turns of this size, bytes (1 KiB to 16 MiB; default 64 KiB).
    pub quantum_bytes: u64,
    /// Header of each message, bytes (default 128).
    pub header_bytes: u64,
    /// Bytes of replies in flight to one connection before it is not ready (default 256 KiB), as seen by policies that
    /// check whether a connection can take data. It is ready again at half of that.
    pub socket_bytes: u64,
    /// Buffer of the switch's port toward each limited link, bytes (default 0: without limit). What does not fit is lost, and
    /// its sender backs off as TCP does: a model of incast. Takes a `quantum_bytes` of about a packet.
    pub port_buffer_bytes: u64,
    /// The shortest time after which a sender that hears of nothing more sends again, ms (0.01 to 1e5; default 200, that of
    /// Linux).
    pub retransmit_ms: f64,
}

/// The compute nodes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Clients {
    /// Processes per compute node (default 1); they share its link and its page cache. Applications do not share nodes.
    pub processes_per_node: u32,
    /// Largest request on the wire, bytes (default 0: without limit; NFS over UDP: 8192).
    pub request_bytes_max: u64,
    /// The longest read-ahead window of the client, bytes (default 0: no read-ahead). Each process has its own state.
    pub read_ahead_bytes: u64,
    /// Page cache of a compute node, bytes (default 0: off).
    pub cache_bytes: u64,
    /// Processor time of a client per request, µs (default 0).
    pub cpu_us: f64,
    /// How ranks are distributed over I/O nodes.
    pub placement: RankPlacement,
}

impl Clients {
    /// Whether compute nodes have page caches: for repeated reads, or for read-ahead.
    pub(crate) fn have_caches(&self) -> bool {
        self.cache_bytes > 0 || self.read_ahead_bytes > 0
    }
}

/// How ranks are distributed over I/O nodes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankPlacement {
    /// Neighbouring ranks share an I/O node.
    #[default]
    Block,
    /// Round robin.
    Cyclic,
}

/// Which requests of one file and operation an I/O node merges.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Merge {
    /// Those that touch, as one range.
    #[default]
    Contiguous,
    /// Those for one data server, and of one window of twins, as one list of ranges, whether they touch or not.
    List,
}

/// The forwarding layer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IoNodes {
    /// Number of I/O nodes (1 to 10000; default 1).
    pub count: u16,
    /// Their policy (default fifo).
    pub policy: PolicySpec,
    /// Forwarded requests in flight per node (default 16: the threads of IOFSL).
    pub threads: u32,
    /// Which waiting requests are merged into one forwarded request (default contiguous).
    pub merge: Merge,
    /// Maximum requests merged into one (default 16).
    pub merge_requests: u32,
    /// Length of the dispatch queue, requests (default 256).
    pub dispatch_requests: u32,
    /// Split requests at the boundaries of data servers before they are scheduled.
    pub split: bool,
    /// Processor time of the node per request, µs (default 10); one request at a time.
    pub cpu_us: f64,
    /// A released batch reaches its forwarding thread after a uniform time below this, µs (default 0): later arrivals
    /// can still be merged with it.
    pub handover_us: f64,
    /// Their clocks differ by up to this, µs (default 0).
    pub clock_skew_us: f64,
    /// They were started within this time, µs (default 0): timers of their own (`timer = "local"` of twins) began then.
    pub started_within_us: f64,
    /// A timer fires late by a uniform time below this, µs (default 0): windows of two nodes that open at the same instant
    /// are not used at the same instant.
    pub timer_late_us: f64,
    /// They agree on which of them, and which data servers, take turns under twins, as real ones do (default false).
    pub members: bool,
    /// Limit of each node's memory for requests and replies, bytes (4 KiB to 2^48; default 0: without limit).
    pub payload_bytes: u64,
}

/// The data servers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Servers {
    /// Number of data servers (1 to 10000; default 4).
    pub count: u16,
    /// Strip size, bytes (default 64 KiB).
    pub stripe_bytes: u32,
    /// Servers of a file (default 0: all); files start at different servers.
    pub stripe_count: u16,
    /// Their policy (default none).
    pub policy: PolicySpec,
    /// Hand-off depth: batches below the scheduler (default 1; 0: without limit).
    pub in_flight: u32,
    /// Requests are served in pieces that a connection can take (as data servers do for stream, scan, wscan and sstf).
    pub pieces: bool,
    /// Processor time of the server per request, µs (default 10); one at a time.
    pub cpu_us: f64,
    /// Additional processor time of the server for every other unanswered request, µs (0 to 1e6; default 0: concurrency
    /// is free). doc/SIMULATION.md has measured figures.
    pub concurrency_us: f64,
    /// A timer fires late by a uniform time below this, µs (default 0).
    pub timer_late_us: f64,
    /// Rate of copying and sending by the server's processor, bytes a second (default 0: free).
    pub copy_bytes_per_s: f64,
    /// Name of their device in `[device.<name>]` (default: a 7200 rpm disk).
    pub device: String,
    /// Page cache, bytes (default 0: direct I/O, every request reaches the device).
    pub cache_bytes: u64,
    /// The kernel's longest read-ahead window into that cache, bytes (default 128 KiB). Each object has its own state.
    pub read_ahead_bytes: u64,
    /// Maximum bytes that the server reads ahead of its clients by prediction (4 MiB to 64 GiB; default 0: off):
    /// `read_ahead_bytes` of a data server's configuration.
    pub foresight_bytes: u64,
    /// Fraction of the cache that may be dirty before writers wait (0 to 1; default 0.2); 0: write-through. The flusher
    /// works while more than half of that is dirty.
    pub dirty_ratio: f64,
    /// The files were read just before the start, one after the other: the cache holds the last bytes read.
    pub warm: bool,
    /// Limit of each server's memory for requests and replies, bytes (4 KiB to 2^48; default 0: without limit).
    pub payload_bytes: u64,
    /// Runs of the same scenario with other delays, whose averaged traces the policy gets (0 to 16; default 0).
    pub earlier_runs: u32,
}

/// A storage device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Device {
    /// A disk with platters.
    Disk(DeviceParams),
    /// Flash.
    Flash(impresario_device::FlashParams),
}

/// How the processes of an application divide its data.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// One shared file; each process its own contiguous segment.
    #[default]
    Contiguous,
    /// One shared file; request i of rank r at (i × processes + r) × size.
    Strided,
    /// A file per process, from its start.
    FilePerProcess,
    /// One shared file in blocks of `request_bytes`; each process reads its share of them in random order.
    Random,
    /// One shared file in blocks of `request_bytes`; each process reads sequentially for up to `run_requests` blocks,
    /// then jumps to a random position: apparent streams that end.
    Runs,
    /// A list of accesses in `trace`.
    Trace,
}

/// Reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// Reads.
    #[default]
    Read,
    /// Writes.
    Write,
}

/// One application.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Application {
    /// A name for people.
    pub name: String,
    /// Number of applications like this one, each with its own files (default 1).
    pub copies: u32,
    /// Processes (default 1).
    pub processes: u32,
    /// When it starts, s (default 0).
    pub start_s: f64,
    /// Start of each process after that, by rank, µs; ranks beyond the list start at once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub starts_us: Vec<f64>,
    /// Reads (default) or writes.
    pub op: Operation,
    /// Access pattern (default contiguous).
    pub pattern: Pattern,
    /// Size of a request, bytes (default 64 KiB).
    pub request_bytes: u64,
    /// Requests per process (default 16).
    pub requests: u64,
    /// With the pattern `runs`: the longest run, requests (1 to 2^40; default 8).
    pub run_requests: u64,
    /// A request is a list of this many regions of `request_bytes`, each followed by those of the other processes
    /// (default 1): the strided call of server-side-scheduling-2002.
    pub regions: u32,
    /// Requests outstanding per process (default 1: synchronous).
    pub queue_depth: u32,
    /// Computing between two requests, µs (default 0).
    pub think_us: f64,
    /// Each request is sent after a uniform delay below this, µs (default 100).
    pub jitter_us: f64,
    /// All processes wait for one another after this many requests (default 0: never).
    pub barrier_requests: u64,
    /// Collective two-phase I/O as in ROMIO, the i-th requests of all processes together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collective: Option<Collective>,
    /// Data sieving of requests with several regions: read whole ranges of this size and extract the wanted pieces,
    /// bytes (default 0: off); for writes read, modify and write them.
    pub sieve_bytes: u64,
    /// The placement of its files, in order; the rest follows from the seed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileAt>,
    /// The accesses, when `pattern = "trace"`; filled in by the reader of `trace_file`.
    #[serde(skip)]
    pub trace: Vec<TracedAccess>,
    /// The file that `trace` comes from; relative to the scenario file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_file: Option<String>,
}

/// Determines a file's placement on servers and disks, as reported by a real cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileAt {
    /// Stable key of the file, which determines its addresses on the disks.
    pub key: u64,
    /// The data server of its first stripe.
    pub server: u16,
}

/// One access of a traced job.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TracedAccess {
    /// Which process.
    pub process: u32,
    /// Which file, from 0.
    pub file: u32,
    /// Reads or writes.
    pub op: Operation,
    /// First byte.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
    /// Computing time since the end of the process's previous access, ns.
    pub think_ns: u64,
}

/// Collective two-phase I/O.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Collective {
    /// Processes that do the I/O (default 0: one per compute node).
    pub aggregators: u32,
    /// Their buffer, bytes (default 4 MiB, ROMIO 1.2.5; 16 MiB since 2009).
    pub buffer_bytes: u64,
}

/// A fault.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Start, s.
    pub at_s: f64,
    /// Duration, s.
    pub for_s: f64,
    /// Its kind.
    pub what: FaultKind,
    /// The disk, I/O node, server or file, from 0. Files are counted over all applications, copies in sequence.
    pub which: u32,
    /// `slow-disk`: every access takes this many times as long (default 10).
    #[serde(default = "ten")]
    pub factor: f64,
}

/// Kinds of faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// A data server's device is slower.
    SlowDisk,
    /// An I/O node fails with everything that it holds.
    LostIoNode,
    /// A data server fails with everything that it has not answered, and restarts.
    RestartedServer,
    /// Messages to and from a data server are lost.
    PartitionedServer,
    /// Messages to and from an I/O node are lost.
    PartitionedIoNode,
    /// Another client truncates a file to half, and extends it again at the end of the fault.
    TruncatedFile,
    /// Another client removes a file; a new one of the same length exists at the end of the fault.
    ReplacedFile,
}

/// Random faults.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RandomFaults {
    /// Mean time between two faults, s (default 1).
    pub mean_interval_s: f64,
    /// Mean duration of a fault, s (default 0.2).
    pub mean_duration_s: f64,
    /// Maximum number of faults (default 100).
    pub count_max: u32,
}

fn ten() -> f64 {
    10.0
}

impl Default for Scenario {
    fn default() -> Self {
        Scenario {
            title: String::new(),
            assumptions: Vec::new(),
            seed: 1,
            time_limit_s: 100_000.0,
            request_timeout_ms: 10_000,
            network: Network::default(),
            clients: Clients::default(),
            io_nodes: None,
            servers: Servers::default(),
            device: BTreeMap::new(),
            application: Vec::new(),
            fault: Vec::new(),
            random_faults: None,
        }
    }
}

impl Default for Network {
    fn default() -> Self {
        Network {
            latency_us: 50.0,
            jitter_us: 20.0,
            in_order: false,
            client_bytes_per_s: 0.0,
            io_node_bytes_per_s: 0.0,
            server_bytes_per_s: 0.0,
            quantum_bytes: 64 << 10,
            header_bytes: 128,
            socket_bytes: impresario_node::READY_MAX_BYTES,
            port_buffer_bytes: 0,
            retransmit_ms: 200.0,
        }
    }
}

impl Default for Clients {
    fn default() -> Self {
        Clients {
            processes_per_node: 1,
            request_bytes_max: 0,
            read_ahead_bytes: 0,
            cache_bytes: 0,
            cpu_us: 0.0,
            placement: RankPlacement::default(),
        }
    }
}

impl Default for IoNodes {
    fn default() -> Self {
        IoNodes {
            count: 1,
            policy: PolicySpec::named("fifo"),
            threads: 16,
            merge: Merge::Contiguous,
            merge_requests: 16,
            dispatch_requests: 256,
            split: false,
            cpu_us: 10.0,
            handover_us: 0.0,
            clock_skew_us: 0.0,
            started_within_us: 0.0,
            timer_late_us: 0.0,
            members: false,
            payload_bytes: 0,
        }
    }
}

impl Default for Servers {
    fn default() -> Self {
        Servers {
            count: 4,
            stripe_bytes: 64 << 10,
            stripe_count: 0,
            policy: PolicySpec::named("none"),
            in_flight: 1,
            pieces: false,
            cpu_us: 10.0,
            concurrency_us: 0.0,
            timer_late_us: 0.0,
            copy_bytes_per_s: 0.0,
            device: String::new(),
            cache_bytes: 0,
            read_ahead_bytes: 128 << 10,
            foresight_bytes: 0,
            dirty_ratio: 0.2,
            warm: false,
            payload_bytes: 0,
            earlier_runs: 0,
        }
    }
}

impl Default for Application {
    fn default() -> Self {
        Application {
            name: String::new(),
            copies: 1,
            processes: 1,
            start_s: 0.0,
            op: Operation::Read,
            pattern: Pattern::Contiguous,
            request_bytes: 64 << 10,
            requests: 16,
            run_requests: 8,
            regions: 1,
            queue_depth: 1,
            think_us: 0.0,
            jitter_us: 100.0,
            barrier_requests: 0,
            collective: None,
            sieve_bytes: 0,
            starts_us: Vec::new(),
            files: Vec::new(),
            trace: Vec::new(),
            trace_file: None,
        }
    }
}

impl Default for Collective {
    fn default() -> Self {
        Collective { aggregators: 0, buffer_bytes: 4 << 20 }
    }
}

impl Default for RandomFaults {
    fn default() -> Self {
        RandomFaults { mean_interval_s: 1.0, mean_duration_s: 0.2, count_max: 100 }
    }
}
