//! The one file that describes a cluster, `impresario.toml`: every key, its unit, default and range.

use std::collections::BTreeMap;
use std::path::PathBuf;

use impresario_device::DeviceParams;
use impresario_sched::PolicySpec;
use serde::{Deserialize, Serialize};

/// A whole cluster.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What holds for all servers.
    #[serde(default)]
    pub cluster: Cluster,
    /// The metadata server.
    pub meta: Meta,
    /// The data servers; their order is the order of striping and must never change.
    pub data: Vec<Data>,
    /// The I/O nodes; none: clients speak to the data servers themselves.
    #[serde(default)]
    pub io: Vec<Io>,
    /// Device models by name, for `device` of a data server.
    #[serde(default)]
    pub device: BTreeMap<String, DeviceParams>,
}

/// What holds for all servers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cluster {
    /// For people.
    pub name: String,
    /// Strip size of files whose directory says nothing, bytes.
    pub stripe_bytes: u32,
    /// Number of data servers per file; absent: all.
    pub stripe_count: Option<u16>,
    /// A request that no server has answered after this time fails with an I/O error, ms (100 to 600000).
    pub request_timeout_ms: u64,
    /// Largest payload of one request on the wire, bytes (4096 to 64 MiB).
    pub max_payload_bytes: u32,
}

/// The metadata server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// `host:port` or `unix:/path`.
    pub address: String,
    /// Folder of the name space; relative to the configuration file.
    pub dir: PathBuf,
}

/// A data server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Unique name, e.g. `data.0`.
    pub name: String,
    /// `host:port` or `unix:/path`.
    pub address: String,
    /// Folder of the objects; relative to the configuration file.
    pub dir: PathBuf,
    /// Scheduling policy.
    #[serde(default = "default_data_policy")]
    pub policy: PolicySpec,
    /// Hand-off depth: requests in flight below the scheduler; 0 lets the policy choose.
    #[serde(default)]
    pub in_flight_requests: u32,
    /// Bound of the queue, requests.
    #[serde(default = "default_queue")]
    pub queue_requests: u32,
    /// Bound of the memory for payloads, bytes.
    #[serde(default = "default_payload")]
    pub payload_bytes: u64,
    /// A device model of `[device.<name>]` in front of the folder; absent: none.
    #[serde(default)]
    pub device: Option<String>,
}

/// An I/O node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Io {
    /// Unique name, e.g. `io.0`.
    pub name: String,
    /// `host:port` or `unix:/path`.
    pub address: String,
    /// Scheduling policy.
    #[serde(default = "default_io_policy")]
    pub policy: PolicySpec,
    /// Forwarded requests in flight at once (1 to 256).
    #[serde(default = "default_in_flight")]
    pub in_flight_requests: u32,
    /// Neighbours merged into one forwarded request at most (1 to 1024).
    #[serde(default = "default_merge")]
    pub merge_requests: u32,
    /// Length of the dispatch queue, requests.
    #[serde(default = "default_dispatch")]
    pub dispatch_requests: u32,
    /// Cut requests at the boundaries of data servers before they are scheduled.
    #[serde(default)]
    pub split: bool,
    /// Bound of the queue, requests.
    #[serde(default = "default_queue")]
    pub queue_requests: u32,
    /// Bound of the memory for payloads, bytes.
    #[serde(default = "default_payload")]
    pub payload_bytes: u64,
}

impl Default for Cluster {
    fn default() -> Self {
        Cluster {
            name: "impresario".into(),
            stripe_bytes: impresario_layout::Layout::SSIZE_DEFAULT_BYTES,
            stripe_count: None,
            request_timeout_ms: 10_000,
            max_payload_bytes: 4 << 20,
        }
    }
}

fn default_data_policy() -> PolicySpec {
    PolicySpec::named("mlf")
}
fn default_io_policy() -> PolicySpec {
    PolicySpec::named("fifo")
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
