//! What a simulation measured. Nothing here depends on the machine that it ran on: the same scenario and seed give
//! the same bytes.

use serde::{Deserialize, Serialize};

/// The result of one run.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The seed of the run.
    pub seed: u64,
    /// From time zero to the end of the slowest process, s.
    pub makespan_s: f64,
    /// The applications, in the order of the scenario (copies one after the other).
    pub applications: Vec<ApplicationOutcome>,
    /// What each layer did.
    pub layers: Layers,
    /// Jain's index over the applications' mean bandwidths: 1 when all got the same.
    pub fairness: f64,
    /// Requests of applications.
    pub operations: u64,
    /// Operations that failed after the time that the scenario allows.
    pub failed: u64,
    /// Requests that some core took, all layers.
    pub requests: u64,
    /// Events of the simulation.
    pub events: u64,
    /// How things went over time.
    pub series: Series,
    /// Who was served when: at most a few thousand accesses of devices, evenly chosen.
    pub picture: Vec<Served>,
    /// Faults as they happened.
    pub faults: Vec<String>,
    /// What the laws found wrong; empty when all held.
    pub violations: Vec<String>,
}

/// What an application saw.
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
    /// The least throughput in any of up to 32 equal parts of its time in all of which it had requests outstanding,
    /// bytes a second.
    pub least_throughput: f64,
    /// Operations that failed.
    pub failed: u64,
}

/// What each layer did.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Layers {
    /// Requests that left the clients: how many, and their mean size.
    pub clients: Flow,
    /// Requests that left the I/O nodes; zero without any.
    pub io_nodes: Flow,
    /// Requests that arrived at data servers.
    pub servers: Flow,
    /// Batches of the data servers' policies.
    pub batches: Flow,
    /// Accesses of the devices.
    pub device: Flow,
    /// Mean distance between the offsets of consecutive requests that left the I/O nodes (or clients), bytes, a file
    /// at a time (twins-2017, Table II).
    pub offset_distance_bytes: f64,
    /// The same at the data servers' devices, in their local offsets.
    pub device_distance_bytes: f64,
    /// Mean time between arrivals of the first request of each process at an I/O node (or server), median, µs.
    pub first_arrival_gap_us: f64,
    /// Requests outstanding at data servers, time average over all of them.
    pub server_concurrency: f64,
    /// Part of the makespan in which devices were busy.
    pub device_busy: f64,
    /// Mean time of a device access, ms.
    pub access_mean_ms: f64,
    /// Part of the bytes read that page caches of servers had.
    pub cache_hit: f64,
    /// Longest time that a request waited for its dispatch at a data server, ms.
    pub wait_max_ms: f64,
}

/// Requests and bytes that passed somewhere.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Flow {
    /// How many.
    pub requests: u64,
    /// Bytes of them.
    pub bytes: u64,
}

impl Flow {
    /// Mean size, bytes; 0 when there was none.
    pub fn mean_bytes(&self) -> f64 {
        self.bytes as f64 / self.requests.max(1) as f64
    }
}

/// Values over time, in intervals of equal length; their number is bounded.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Series {
    /// Length of an interval, s.
    pub interval_s: f64,
    /// Bytes that each application got in each interval (at most 16 applications; the rest are added up in the last).
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
    /// How long, ms.
    pub ms: f64,
    /// Data server.
    pub server: u16,
    /// Application.
    pub application: u32,
    /// Place on the device, bytes.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
}
