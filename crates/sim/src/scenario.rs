//! What is simulated, and what comes out.

use impresario_device::DeviceParams;
use impresario_layout::Layout;
use impresario_sched::{Nanos, Op, PolicySpec};

/// How the processes of an application divide its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// One shared file; each process its own contiguous segment.
    Contiguous,
    /// One shared file; request i of rank r at (i × processes + r) × size.
    Strided,
    /// A file per process, read or written from its start.
    FilePerProcess,
}

/// One application: synchronous processes.
#[derive(Clone, Debug)]
pub struct Application {
    /// Processes.
    pub processes: u32,
    /// Access pattern.
    pub pattern: Pattern,
    /// Reads or writes.
    pub op: Op,
    /// Size of an application's request, bytes.
    pub request_bytes: u64,
    /// Requests per process.
    pub requests: u64,
    /// When it starts.
    pub start: Nanos,
}

/// The forwarding layer.
#[derive(Clone, Debug)]
pub struct IoNodes {
    /// How many.
    pub count: u16,
    /// Their policy.
    pub policy: PolicySpec,
    /// Forwarded requests in flight per node.
    pub in_flight: u32,
    /// Neighbours merged into one forwarded request.
    pub merge_requests: u32,
    /// Length of the dispatch queue.
    pub dispatch_requests: u32,
    /// Cut requests at the boundaries of data servers.
    pub split: bool,
    /// Neighbouring ranks share an I/O node (block placement); else they are dealt round robin.
    pub block_placement: bool,
}

/// A cluster and its load.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The applications.
    pub applications: Vec<Application>,
    /// Striping of all files.
    pub layout: Layout,
    /// Policy of the data servers.
    pub data_policy: PolicySpec,
    /// Hand-off depth of the data servers, batches.
    pub data_in_flight: u32,
    /// Their disks.
    pub device: DeviceParams,
    /// The forwarding layer, if any.
    pub io_nodes: Option<IoNodes>,
    /// The clients' largest request on the wire, bytes.
    pub wire_max_bytes: u64,
    /// One way between any two nodes.
    pub latency: Nanos,
    /// Each request of a process is sent after a uniform delay below this.
    pub jitter: Nanos,
    /// Each message takes up to so much longer than `latency`, uniformly: without it the data servers run in lockstep.
    pub message_jitter: Nanos,
    /// Of delays and of the files' places on the disks.
    pub seed: u64,
}

/// What a simulation measured.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The slowest process of the slowest application, from time zero.
    pub makespan: Nanos,
    /// Per application, its slowest process, from its own start.
    pub applications: Vec<Nanos>,
    /// Bytes moved.
    pub bytes: u64,
    /// Mean size of the data servers' batches, bytes.
    pub mean_batch_bytes: f64,
    /// Mean size of the requests that left the I/O nodes (or clients), bytes.
    pub mean_forwarded_bytes: f64,
    /// Mean time that the disks took for an access.
    pub mean_access: Nanos,
    /// Accesses of all disks.
    pub accesses: u64,
    /// Share of the makespan in which the disks were busy, 0 to 1.
    pub busy: f64,
    /// Requests that reached data servers.
    pub requests: u64,
}
