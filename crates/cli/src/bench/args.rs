//! Flags that several benchmarks share: the workload and the cluster.

use std::path::PathBuf;

use anyhow::Result;
use impresario_base::units::{parse_bytes, parse_duration, parse_positive_bytes, show_bytes};
use impresario_device::DeviceParams;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::compare::Case;
use impresario_workload::pattern::{Pattern, Shape};
use impresario_workload::plan::{Operation, Placement, Think, Workload};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use impresario_workload::system::policy;

use crate::{load, usage};

/// What the applications do.
#[derive(clap::Args)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Access patterns: contiguous, strided, file-per-process, random; several make several cases
    #[arg(long = "pattern", value_delimiter = ',', default_value = "strided", value_name = "PATTERN")]
    patterns: Vec<Shape>,
    /// Operations: read, write; several make several cases
    #[arg(long = "op", value_delimiter = ',', default_value = "write,read", value_name = "OP")]
    operations: Vec<Operation>,
    /// Size of a request
    #[arg(long, default_value = "16k", value_parser = parse_positive_bytes, value_name = "SIZE")]
    request_size: u64,
    /// Bytes that every process reads or writes
    #[arg(long, default_value = "2m", value_parser = parse_positive_bytes, value_name = "SIZE")]
    size: u64,
    /// Processes of every application
    #[arg(long, default_value_t = 8, value_name = "N")]
    processes: u32,
    /// Applications that run at once
    #[arg(long, default_value_t = 4, value_name = "N")]
    apps: u32,
    /// Start each application this long after the one before
    #[arg(long, default_value = "0s", value_parser = parse_duration, value_name = "TIME")]
    start_every: std::time::Duration,
    /// When each application starts, one time for every application, such as 0s,1s,5s
    #[arg(long, value_delimiter = ',', value_parser = parse_duration, value_name = "TIMES", conflicts_with = "start_every")]
    start_at: Vec<std::time::Duration>,
    /// Requests that a process keeps outstanding; 1 is synchronous
    #[arg(long, default_value_t = 1, value_name = "N")]
    queue_depth: u32,
    /// How often every process goes through its requests
    #[arg(long, default_value_t = 1, value_name = "N")]
    loops: u32,
    /// Waiting time before every request: none, uniform:100us, exponential:100us
    #[arg(long, default_value = "none", value_name = "JITTER")]
    jitter: Think,
    /// Every process computes for so long after each quarter of its requests but the last; these times count
    #[arg(long, default_value = "0s", value_parser = parse_duration, value_name = "TIME")]
    pause: std::time::Duration,
    /// The client's largest request on the wire; larger ones are cut and sent at once [default: no limit]
    #[arg(long, value_parser = parse_positive_bytes, value_name = "SIZE")]
    wire_max: Option<u64>,
    /// Ranks on I/O nodes: block (neighbours together) or cyclic (neighbours apart)
    #[arg(long, default_value = "block", value_name = "HOW")]
    placement: Placement,
    /// Each process starts up to this much later (for instance 20ms), in an order that is the same for every system
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
    start_spread: std::time::Duration,
    /// Start each process without waiting for the others
    #[arg(long)]
    no_barrier: bool,
    /// End writing with an fsync, inside the timed part
    #[arg(long)]
    fsync: bool,
    /// Seed of everything random
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// One application of a single case of different ones, given once for each, as KEY=VALUE,...; keys: pattern, op, request-size,
    /// size, processes, queue-depth, loops, jitter, pause, start; what is left out is as the options above say
    #[arg(long = "app", value_name = "KEYS", conflicts_with_all = ["patterns", "operations", "apps", "start_every", "start_at"])]
    mixed: Vec<String>,
}

impl WorkloadArgs {
    /// The applications of `--app`, in one case.
    fn mixed_case(&self) -> Result<Workload> {
        let pattern = Pattern {
            shape: Shape::Contiguous,
            request_bytes: self.request_size,
            process_bytes: self.size,
            processes: self.processes,
            seed: self.seed,
        };
        let mut workload = Workload::uniform(self.mixed.len() as u32, pattern, Operation::Read);
        for (app, text) in workload.applications.iter_mut().zip(&self.mixed) {
            (app.queue_depth, app.loops, app.think) = (self.queue_depth, self.loops, self.jitter);
            app.pause_us = self.pause.as_micros() as u64;
            for pair in text.split(',') {
                let mistake = |why: String| usage(format!("--app {text}: {why}"));
                let Some((key, value)) = pair.split_once('=') else {
                    return Err(mistake(format!("{pair:?} is not KEY=VALUE, such as op=write")));
                };
                let number = || value.parse().map_err(|_| format!("{key}={value} is no whole number"));
                let pattern = &mut app.pattern;
                let set = match key {
                    "pattern" => value.parse().map(|shape| pattern.shape = shape),
                    "op" => value.parse().map(|operation| app.operation = operation),
                    "request-size" => parse_positive_bytes(value).map(|bytes| pattern.request_bytes = bytes),
                    "size" => parse_positive_bytes(value).map(|bytes| pattern.process_bytes = bytes),
                    "processes" => number().map(|n| pattern.processes = n),
                    "queue-depth" => number().map(|n| app.queue_depth = n),
                    "loops" => number().map(|n| app.loops = n),
                    "jitter" => value.parse().map(|think| app.think = think),
                    "pause" => parse_duration(value).map(|time| app.pause_us = time.as_micros() as u64),
                    "start" => parse_duration(value).map(|after| app.start_us = after.as_micros() as u64),
                    _ => Err(format!(
                        "there is no key {key}: pattern, op, request-size, size, processes, queue-depth, loops, jitter, pause or start"
                    )),
                };
                set.map_err(mistake)?;
            }
        }
        Ok(workload)
    }

    /// A case for every pattern and operation, or the one of `--app`.
    pub fn cases(&self) -> Result<Vec<Case>> {
        let wire_max_bytes = match self.wire_max.map(u32::try_from) {
            None => None,
            Some(Ok(bytes)) => Some(bytes),
            Some(Err(_)) => return Err(usage("--wire-max is larger than any request on the wire: give less than 4g")),
        };
        if !self.start_at.is_empty() && self.start_at.len() != self.apps as usize {
            let (times, apps) = (self.start_at.len(), self.apps);
            return Err(usage(format!("--start-at has {times} times for {apps} applications: give one for each")));
        }
        let finish = |mut workload: Workload| -> Result<Workload> {
            workload.placement = self.placement;
            workload.wire_max_bytes = wire_max_bytes;
            workload.barrier = !self.no_barrier;
            workload.start_spread_us = self.start_spread.as_micros() as u64;
            workload.sync = self.fsync;
            workload.check().map_err(usage)?;
            Ok(workload)
        };
        if !self.mixed.is_empty() {
            return Ok(vec![Case { name: "mixed".into(), workload: finish(self.mixed_case()?)? }]);
        }
        let mut cases = Vec::new();
        for &shape in &self.patterns {
            for &operation in &self.operations {
                let (request_bytes, process_bytes) = (self.request_size, self.size);
                let pattern =
                    Pattern { shape, request_bytes, process_bytes, processes: self.processes, seed: self.seed };
                let mut workload = Workload::uniform(self.apps, pattern, operation);
                for (i, app) in workload.applications.iter_mut().enumerate() {
                    let every = self.start_every.saturating_mul(i as u32);
                    app.start_us = self.start_at.get(i).copied().unwrap_or(every).as_micros() as u64;
                    app.queue_depth = self.queue_depth;
                    app.loops = self.loops;
                    app.think = self.jitter;
                    app.pause_us = self.pause.as_micros() as u64;
                }
                let name = format!("{} {shape} {operation}", show_bytes(request_bytes as f64));
                cases.push(Case { name, workload: finish(workload)? });
            }
        }
        Ok(cases)
    }
}

/// On what it runs.
#[derive(clap::Args)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Use the running cluster that this file describes, instead of starting one: with none of the options that describe one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Data servers to start
    #[arg(long, default_value_t = 4, value_name = "N", conflicts_with = "config")]
    data_servers: usize,
    /// I/O nodes to start; 0: clients speak to the data servers
    #[arg(long, default_value_t = 2, value_name = "N", conflicts_with = "config")]
    io_nodes: usize,
    /// Under every data server: disk (a modelled 7200 rpm disk that serves its requests directly), kernel-disk (such a disk
    /// under this kernel's page cache, read-ahead and I/O scheduler; needs root) or none
    #[arg(long, default_value = "none", value_name = "MODEL", conflicts_with = "config")]
    device: String,
    /// The processes of an application share one client, as those of one mount do (with I/O nodes one for each), instead of having
    /// one each
    #[arg(long)]
    one_mount: bool,
    /// Empty this machine's page cache before each run, so that reads come from the device of --dir; needs root
    #[arg(long, conflicts_with = "config")]
    cold: bool,
    /// Memory of each data server with its page cache, so that what the applications use does not fit in (at least 64m); needs
    /// root, control groups, and a disk: --device kernel-disk or --dir
    #[arg(long, value_name = "SIZE", value_parser = parse_positive_bytes, conflicts_with = "config")]
    server_memory: Option<u64>,
    /// The modelled disk reports writes as done when they are in its memory
    #[arg(long, conflicts_with = "config")]
    disk_write_cache: bool,
    /// Policy of the data servers, such as mlf or fifo+merge=on
    #[arg(long, default_value = "auto", value_name = "POLICY", conflicts_with = "config")]
    data_policy: String,
    /// Policy of the I/O nodes
    #[arg(long, default_value = "fifo", value_name = "POLICY", conflicts_with = "config")]
    io_policy: String,
    /// Strip size of the files
    #[arg(long, default_value = "64k", value_parser = parse_bytes, value_name = "SIZE", conflicts_with = "config")]
    stripe_size: u64,
    /// Batches that a data server hands to its disk at once; 0: the policy's choice
    #[arg(long, default_value_t = 0, value_name = "N", conflicts_with = "config")]
    depth: u32,
    /// How far a data server reads ahead of a stream; 0: not at all (see read_ahead_bytes in doc/CONFIGURATION.md)
    #[arg(long, default_value = "128m", value_parser = parse_bytes, value_name = "SIZE", conflicts_with = "config")]
    read_ahead: u64,
    /// Where the started cluster's folder is made [default: in memory, /dev/shm]
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    dir: Option<PathBuf>,
}

/// With less than this a data server that is asked much may find no memory for itself.
const SERVER_MEMORY_MIN: u64 = 64 << 20;

/// A cluster to measure: a running one, or one that is started for it.
pub struct Opened {
    storage: Storage,
    own: Option<OwnCluster>,
}

impl Opened {
    /// Its storage.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// What became of a run; where it failed because servers lost their memory, that is said.
    pub fn told<T>(&self, result: Result<T>) -> Result<T> {
        let why = || self.own.as_ref().and_then(OwnCluster::lost_for_memory);
        result.map_err(|error| match why() {
            Some(why) => error.context(why),
            None => error,
        })
    }
}

impl ClusterArgs {
    /// Number of data servers.
    pub fn data_servers(&self) -> Result<usize> {
        match &self.config {
            Some(path) => Ok(load(path)?.data.iter().filter(|data| !data.is_retired()).count()),
            None => Ok(self.data_servers),
        }
    }

    /// The cluster to start; refused when a running one is given.
    pub fn own_plan(&self, why: &str) -> Result<Plan> {
        match self.config {
            Some(_) => Err(usage(format!("--config cannot be used here: {why}"))),
            None => self.plan(),
        }
    }

    /// The cluster to start.
    fn plan(&self) -> Result<Plan> {
        let write_cache = self.disk_write_cache;
        let params = DeviceParams { write_cache, ..DeviceParams::default() };
        let (device, kernel_disk) = match self.device.as_str() {
            "none" if write_cache => return Err(usage("--disk-write-cache needs --device disk or kernel-disk")),
            "none" => (None, None),
            "disk" => (Some(params), None),
            "kernel-disk" => (None, Some(params)),
            other => return Err(usage(format!("there is no device model {other}: disk, kernel-disk or none"))),
        };
        if self.cold && self.dir.is_none() {
            return Err(usage("--cold needs --dir, a folder on the disk to measure: by default files lie in memory"));
        }
        if self.cold && self.device != "none" {
            return Err(usage(format!("--cold is for the machine's own disk, and --device is {}", self.device)));
        }
        match self.server_memory {
            Some(size) if size < SERVER_MEMORY_MIN => {
                return Err(usage(format!(
                    "--server-memory {size} is less than a data server needs: allow 64m or more"
                )));
            }
            Some(_) if kernel_disk.is_none() && self.dir.is_none() => {
                return Err(usage(
                    "--server-memory needs --device kernel-disk, or --dir, a folder on a disk: by default files lie in memory",
                ));
            }
            _ => {}
        }
        let stripe_bytes =
            u32::try_from(self.stripe_size).map_err(|_| usage("--stripe-size must be less than 4 GiB"))?;
        Ok(Plan {
            data_servers: self.data_servers,
            io_nodes: self.io_nodes,
            data_policy: policy(&self.data_policy).map_err(usage)?,
            io_policy: policy(&self.io_policy).map_err(usage)?,
            device,
            kernel_disk,
            cold: self.cold,
            server_memory_bytes: self.server_memory.unwrap_or(0),
            stripe_bytes,
            read_ahead_bytes: self.read_ahead,
            in_flight_requests: self.depth,
            parent: self.dir.clone(),
            ..Plan::default()
        })
    }

    /// Opens the running cluster, or starts one.
    pub fn open(&self, stop: &Stop) -> Result<Opened> {
        let (storage, own) = match &self.config {
            Some(path) => (Storage::new(load(path)?), None),
            None => {
                let own = OwnCluster::start(&self.plan()?, stop)?;
                (Storage::of(&own), Some(own))
            }
        };
        let storage = if self.one_mount { storage.with_shared_clients() } else { storage };
        Ok(Opened { storage, own })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        cluster: ClusterArgs,
    }

    #[test]
    fn memory_is_limited_where_there_is_a_disk() {
        let plan = |words: &[&str]| Line::parse_from([&["bench"], words].concat()).cluster.plan();
        let why = |words: &[&str]| plan(words).unwrap_err().to_string();
        assert!(why(&["--server-memory", "1g"]).contains("--device kernel-disk"));
        assert!(why(&["--server-memory", "1g", "--device", "disk"]).contains("--device kernel-disk"));
        assert!(why(&["--server-memory", "63m", "--dir", "/x"]).contains("64m"));
        assert_eq!(plan(&["--server-memory", "64m", "--dir", "/x"]).unwrap().server_memory_bytes, 64 << 20);
        let below_the_kernel = plan(&["--server-memory", "64m", "--device", "kernel-disk"]).unwrap();
        assert_eq!(below_the_kernel.server_memory_bytes, 64 << 20);
        assert_eq!(plan(&[]).unwrap().server_memory_bytes, 0);
    }

    #[test]
    fn started_servers_read_ahead_as_far_as_others() {
        let plan = Line::parse_from(["bench"]).cluster.plan().unwrap();
        assert_eq!(plan.read_ahead_bytes, impresario_config::Data::READ_AHEAD_BYTES);
    }
}
