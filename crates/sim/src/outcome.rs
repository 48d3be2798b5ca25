//! The results of a simulation. They do not depend on the machine: the same scenario and seed give the same bytes.

use serde::{Deserialize, Serialize};

/// The result of one run.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The seed of the run.
    pub seed: u64,
    /// From time zero to the end of the slowest process, s.
    pub makespan_s: f64,
    /// The applications, in the order of the scenario (copies in sequence).
    pub applications: Vec<ApplicationOutcome>,
    /// What each layer did.
    pub layers: Layers,
    /// Jain's index over the applications' mean bandwidths: 1 if all are equal.
    pub fairness: f64,
    /// Requests of applications.
    pub operations: u64,
    /// Operations that failed after the time that the scenario allows.
    pub failed: u64,
    /// Requests accepted by cores, over all layers.
    pub requests: u64,
    /// Events of the simulation.
    pub events: u64,
    /// Values over time.
    pub series: Series,
    /// Which requests the devices served when: a sample of at most a few thousand accesses.
    pub picture: Vec<Served>,
    /// The faults that occurred.
    pub faults: Vec<String>,
    /// Violations of the laws; empty if all held.
    pub violations: Vec<String>,
}

/// The outcome of one application.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct ApplicationOutcome {
    /// Its name.
    pub name: String,
    /// From its start to its slowest process, s: the application service time of server-side-scheduling-2002.
    pub time_s: f64,
    /// Mean of its processes' times, s: the mean task service time.
    pub task_mean_s: f64,
    /// Variance of its processes' times, s².
    pub task_variance_s2: f64,
    /// Bytes moved.
    pub bytes: u64,
    /// Mean latency of a request, ms.
    pub latency_mean_ms: f64,
    /// 99th percentile of it, ms (to within 5 %).
    pub latency_p99_ms: f64,
    /// Longest, ms.
    pub latency_max_ms: f64,
    /// The lowest throughput in any of up to 32 equal parts of its time throughout which it had requests outstanding,
    /// bytes a second.
    pub least_throughput: f64,
    /// Operations that failed.
    pub failed: u64,
}

/// The totals of each layer.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Layers {
    /// Requests that left the clients.
    pub clients: Flow,
    /// Requests that left the I/O nodes; zero without I/O nodes.
    pub io_nodes: Flow,
    /// Requests that arrived at data servers.
    pub servers: Flow,
    /// Batches of the data servers' policies.
    pub batches: Flow,
    /// Accesses of the devices.
    pub device: Flow,
    /// Mean distance between the offsets of consecutive requests of a file that left the I/O nodes (or clients), bytes
    /// (twins-2017, Table II).
    pub offset_distance_bytes: f64,
    /// The same at the data servers' devices, in their local offsets.
    pub device_distance_bytes: f64,
    /// Mean time between arrivals of the first request of each process at an I/O node (or server), median, µs.
    pub first_arrival_gap_us: f64,
    /// Requests outstanding at a data server, average over time and servers.
    pub server_concurrency: f64,
    /// Fraction of the makespan in which devices were busy.
    pub device_busy: f64,
    /// Mean time of a device access, ms.
    pub access_mean_ms: f64,
    /// Fraction of the bytes read that were in the servers' page caches.
    pub cache_hit: f64,
    /// Longest time that a request waited for dispatch at a data server, ms.
    pub wait_max_ms: f64,
}

/// Requests and bytes that passed a point.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Flow {
    /// Number of requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Flow {
    /// Mean size, bytes; 0 without requests.
    pub fn mean_bytes(&self) -> f64 {
        self.bytes as f64 / self.requests.max(1) as f64
    }
}

/// Values over time, in a bounded number of equal intervals.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Series {
    /// Length of an interval, s.
    pub interval_s: f64,
    /// Bytes of each application in each interval (at most 16 applications; the last entry sums the rest).
    pub bandwidth: Vec<Vec<u64>>,
    /// Mean number of requests queued in the cores of I/O nodes.
    pub io_queue: Vec<f64>,
    /// Mean number of requests queued in the cores of data servers.
    pub server_queue: Vec<f64>,
    /// Mean number of different clients (or I/O nodes) with requests outstanding at a data server.
    pub server_concurrency: Vec<f64>,
}

/// One access of a device, for the space-time picture.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Served {
    /// Start, s.
    pub at_s: f64,
    /// Duration, ms.
    pub ms: f64,
    /// Data server.
    pub server: u16,
    /// Application.
    pub application: u32,
    /// Address on the device, bytes.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
}
