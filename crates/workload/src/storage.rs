//! One of our clusters as a target that can be measured and reconfigured.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_base::at_once;
use impresario_base::lock::Mutex;
use impresario_client::{Access, Client, ClientOptions, CreateOptions, File, KeyRole, Via, admin};
use impresario_config::Config;
use impresario_layout::{Layout, Skipped};
use impresario_sched::PolicySpec;
use impresario_wire::FileKey;
use serde_json::Value;

use crate::access::{
    DeviceObservation, FileIo, FilePlace, Identity, MemoryObservation, Moved, Observation, Process, Target,
};
use crate::cluster::{OwnCluster, ServerMemory};
use crate::kernel_disk::KernelDisk;
use crate::programs::{BlockDevice, Counts, drop_caches};
use crate::system::{Settings, Switch, System};

/// Timeout of a server's reply to a control call.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same where it loads traces first.
const LOAD_PATIENCE: Duration = Duration::from_secs(60);

/// Clients by application and I/O node.
type Shared = HashMap<(u64, Via), Weak<Counted>>;

/// A running cluster.
pub struct Storage {
    config: Config,
    /// The keys of an administrator, where they are needed.
    access: Access,
    direct: bool,
    /// Where the processes of an application share clients.
    shared: Option<Mutex<Shared>>,
    pids: Vec<u32>,
    kernel_disks: Arc<[KernelDisk]>,
    /// The machine's own device below the servers' folders and what it had counted before the run, where runs are cold.
    cold_device: Option<(BlockDevice, Mutex<Counts>)>,
    /// The limits of the data servers' memory, and what they had counted before the run.
    memory: (Arc<[ServerMemory]>, Mutex<u64>),
}

impl Storage {
    /// An existing cluster.
    pub fn new(config: Config) -> Storage {
        let access = Access::of(&config, KeyRole::Admin);
        Storage {
            config,
            access,
            direct: false,
            shared: None,
            pids: Vec::new(),
            kernel_disks: Arc::default(),
            cold_device: None,
            memory: Default::default(),
        }
    }

    /// A cluster of our own.
    pub fn of(cluster: &OwnCluster) -> Storage {
        let pids = cluster.pids().into_iter().map(|(_, pid)| pid).collect();
        let kernel_disks = Arc::clone(cluster.kernel_disks());
        let cold_device = cluster.cold_device().map(|device| (device.clone(), Mutex::default()));
        let memory = (Arc::clone(cluster.server_memory()), Mutex::default());
        Storage { pids, kernel_disks, cold_device, memory, ..Storage::new(cluster.config.clone()) }
    }

    /// The same, bypassing its I/O nodes.
    pub fn direct(mut self) -> Storage {
        self.direct = true;
        self
    }

    /// The same, with one client for the processes of an application, as those of one mount have; through I/O nodes one for each.
    pub fn with_shared_clients(mut self) -> Storage {
        self.shared = Some(Mutex::default());
        self
    }

    /// The states of servers, requested concurrently.
    fn status<'a>(&self, servers: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Vec<(String, Value)>> {
        each(servers, |name, address| {
            let text = admin::status(&self.access, address, PATIENCE)?;
            let value = serde_json::from_str(&text).context("its state is not JSON")?;
            Ok((name.to_string(), value))
        })
    }

    /// What a comparison changes on a server, as it is now.
    fn settings_of(&self, name: &str, address: &str) -> Result<Settings> {
        let text = admin::status(&self.access, address, PATIENCE)?;
        let state: Value = serde_json::from_str(&text).context("its state is not JSON")?;
        let of = |pointer: &str| state.pointer(pointer).filter(|value| !value.is_null()).cloned();
        let policy = of("/engine/policy").context("it has no policy")?;
        let order = of("/device/order").map(serde_json::from_value).transpose()?;
        Ok(Settings {
            server: name.into(),
            policy: serde_json::from_value(policy)?,
            disk_order: order,
            earlier_runs: runs_loaded(&state)?,
            is_recording: is_recording(&state),
        })
    }

    /// Sets back on a server what differs; returns what failed.
    fn set_server_back(&self, address: &str, before: &Settings, now: &Settings) -> Vec<anyhow::Error> {
        let mut errors = Vec::new();
        let mut note = |what, error| errors.push(anyhow::Error::new(error).context(what));
        if now.is_recording
            && !before.is_recording
            && let Err(error) = admin::trace(&self.access, address, false, PATIENCE)
        {
            note("ending its trace", error);
        }
        if now.policy != before.policy
            && let Err(error) = admin::set_policy(&self.access, address, &before.policy, PATIENCE)
        {
            note("its policy", error);
        }
        if let Some(order) = before.disk_order.filter(|_| now.disk_order != before.disk_order)
            && let Err(error) = admin::set_disk_order(&self.access, address, order.name(), PATIENCE)
        {
            note("the order of its disk", error);
        }
        let runs = Some(before.earlier_runs.as_slice()).filter(|runs| !runs.is_empty());
        if now.earlier_runs != before.earlier_runs
            && let Err(error) = admin::earlier_runs(&self.access, address, runs, LOAD_PATIENCE)
        {
            note("its earlier runs", error);
        }
        errors
    }

    /// How often the memory of a data server was as much as it may be.
    fn reclaims(&self) -> u64 {
        self.memory.0.iter().map(ServerMemory::reclaims).sum()
    }

    /// Those that serve: of a retired one only the section is left.
    fn data(&self) -> impl Iterator<Item = (&str, &str)> {
        let serving = self.config.data.iter().filter(|d| !d.is_retired());
        serving.map(|d| (d.name.as_str(), d.address.as_str()))
    }

    fn io(&self) -> impl Iterator<Item = (&str, &str)> {
        self.config.io.iter().map(|i| (i.name.as_str(), i.address.as_str()))
    }
}

/// The layout of a file that all data servers hold, but the retired ones.
fn over_serving(config: &Config) -> Result<Layout> {
    let (serving, retired): (Vec<u16>, Vec<u16>) =
        (0..config.data.len() as u16).partition(|server| !config.data[usize::from(*server)].is_retired());
    let retired = Skipped::of(retired).context("more data servers are retired than a layout can leave out")?;
    let base = *serving.first().context("no data server is left")?;
    let whole = Layout::new(base, serving.len() as u16, Layout::SSIZE_DEFAULT_BYTES, config.data.len() as u16)?;
    Ok(whole.without(retired)?)
}

/// The traces that a server goes by.
fn runs_loaded(state: &Value) -> Result<Vec<PathBuf>> {
    let runs = state.pointer("/earlier_runs/traces").filter(|runs| !runs.is_null()).cloned();
    Ok(runs.map(serde_json::from_value).transpose()?.unwrap_or_default())
}

/// A trace is being written: of one that ended early the state still tells.
fn is_recording(state: &Value) -> bool {
    let has = |pointer| state.pointer(pointer).is_some_and(|value| !value.is_null());
    has("/trace/path") && !has("/trace/failure")
}

/// Runs an action on several servers concurrently; errors name the server.
fn each<'a, T: Send>(
    servers: impl Iterator<Item = (&'a str, &'a str)>,
    act: impl Fn(&str, &str) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let act = |(name, address)| act(name, address).with_context(|| format!("server {name} at {address}"));
    at_once::each(servers, act).into_iter().collect()
}

impl Target for Storage {
    fn connect(&self, identity: Identity) -> Result<Box<dyn Process>> {
        let via = match identity.node {
            _ if self.direct || self.config.io.is_empty() => Via::Direct,
            Some(node) => Via::IoNode(node),
            None => Via::Auto,
        };
        let options = ClientOptions {
            job: identity.job,
            name: identity.name,
            via,
            wire_max_bytes: identity.wire_max_bytes,
            ..ClientOptions::default()
        };
        let Some(shared) = self.shared.as_ref().filter(|_| identity.job > 0) else {
            return Ok(Box::new(Connected::to(Counted::connect(&self.config, options)?)));
        };
        let mut shared = shared.lock();
        let known = shared.entry((identity.job, via)).or_default();
        let client = match known.upgrade() {
            Some(client) => client,
            None => Counted::connect(&self.config, options)?,
        };
        *known = Arc::downgrade(&client);
        Ok(Box::new(Connected::to(client)))
    }

    fn nodes(&self) -> usize {
        if self.direct { 0 } else { self.config.io.len() }
    }

    fn pids(&self) -> Vec<u32> {
        self.pids.clone()
    }

    /// Destages an earlier run's data from the drives' write caches: a sync of any file does that. (Read caches are
    /// cleared with the statistics, see [`Target::reset`].)
    fn cool(&self) -> Result<()> {
        if !self.kernel_disks.is_empty() || self.cold_device.is_some() {
            drop_caches()?;
        }
        let serving = self.config.data.iter().filter(|data| !data.is_retired());
        let mut models = serving.filter_map(|data| self.config.device.get(data.device.as_ref()?));
        if !models.any(|params| params.write_cache) {
            return Ok(());
        }
        let options = ClientOptions { name: "bench cool".into(), via: Via::Direct, ..ClientOptions::default() };
        let everywhere = over_serving(&self.config)?;
        Ok(Client::connect(&self.config, options)?
            .sync_data(FileKey(impresario_base::machine::random_number()?), &everywhere)?)
    }

    fn reset(&self) -> Result<()> {
        self.kernel_disks.iter().try_for_each(KernelDisk::reset)?;
        if let Some((device, began)) = &self.cold_device {
            *began.lock() = device.counts()?;
        }
        *self.memory.1.lock() = self.reclaims();
        each(self.data().chain(self.io()), |_, address| Ok(admin::reset_statistics(&self.access, address, PATIENCE)?))
            .map(|_| ())
    }

    fn observe(&self) -> Result<Observation> {
        let (data, io) = (self.status(self.data())?, self.status(self.io())?);
        let mut seen = observation(data, io);
        if !self.kernel_disks.is_empty() {
            observe_kernel_disks(&self.kernel_disks, &mut seen)?;
        } else if let Some((device, began)) = &self.cold_device {
            seen.at_disk = of_device(device.counts()?.since(*began.lock()));
        }
        seen.memory = self.memory.0.first().map(|memory| MemoryObservation {
            limit_bytes: memory.limit_bytes(),
            reclaims: self.reclaims().saturating_sub(*self.memory.1.lock()),
        });
        Ok(seen)
    }
}

impl Switch for Storage {
    fn settings(&self) -> Result<Vec<Settings>> {
        each(self.data().chain(self.io()), |name, address| self.settings_of(name, address))
    }

    fn set_back(&self, before: &[Settings]) -> Result<()> {
        // A server that is away keeps none of the others, and nothing on a server keeps the rest of it.
        let set_back = |(name, address): (&str, &str)| -> Vec<anyhow::Error> {
            let Some(before) = before.iter().find(|settings| settings.server == name) else { return Vec::new() };
            let errors = match self.settings_of(name, address) {
                Ok(now) => self.set_server_back(address, before, &now),
                Err(error) => vec![error],
            };
            errors.into_iter().map(|error| error.context(format!("server {name} at {address}"))).collect()
        };
        let errors = at_once::each(self.data().chain(self.io()), set_back).into_iter().flatten();
        let errors: Vec<String> = errors.map(|error| format!("{error:#}")).collect();
        anyhow::ensure!(errors.is_empty(), "{}", errors.join("; "));
        Ok(())
    }

    fn switch(&self, system: &System) -> Result<()> {
        let set = |address: &str, spec: &PolicySpec| Ok(admin::set_policy(&self.access, address, spec, PATIENCE)?);
        if let Some(spec) = &system.data_policy {
            each(self.data(), |_, address| set(address, spec))?;
        }
        if let Some(spec) = &system.io_policy {
            each(self.io(), |_, address| set(address, spec))?;
        }
        let modelled = self.config.data.iter().filter(|d| d.device.is_some() && !d.is_retired());
        if let Some(order) = system.disk_order {
            let servers = modelled.map(|d| (d.name.as_str(), d.address.as_str()));
            each(servers, |_, address| Ok(admin::set_disk_order(&self.access, address, order.name(), PATIENCE)?))?;
        }
        Ok(())
    }

    fn begin_recording(&self) -> Result<()> {
        self.foretell(&[])?;
        each(self.data(), |_, address| Ok(admin::trace(&self.access, address, true, PATIENCE)?)).map(|_| ())
    }

    fn end_recording(&self) -> Result<Vec<PathBuf>> {
        let path = |(name, state): (String, Value)| {
            let path = state.pointer("/trace/path").and_then(Value::as_str).map(PathBuf::from);
            path.with_context(|| format!("server {name} writes no trace"))
        };
        let paths = self.status(self.data())?.into_iter().map(path).collect::<Result<_>>()?;
        each(self.data(), |_, address| Ok(admin::trace(&self.access, address, false, PATIENCE)?))?;
        Ok(paths)
    }

    fn foretell(&self, traces: &[PathBuf]) -> Result<()> {
        if traces.is_empty() {
            let states = self.status(self.data())?;
            let mut servers = Vec::new();
            for (server, (_, state)) in self.data().zip(&states) {
                if !runs_loaded(state)?.is_empty() {
                    servers.push(server);
                }
            }
            return each(servers.into_iter(), |_, address| {
                Ok(admin::earlier_runs(&self.access, address, None, PATIENCE)?)
            })
            .map(|_| ());
        }
        let of = |name: &str| self.data().position(|(other, _)| other == name).and_then(|at| traces.get(at));
        each(self.data(), |name, address| {
            let trace = of(name).context("there is no trace of it")?;
            Ok(admin::earlier_runs(&self.access, address, Some(std::slice::from_ref(trace)), LOAD_PATIENCE)?)
        })
        .map(|_| ())
    }

    fn depth(&self) -> Result<Option<u32>> {
        let status = self.status(self.data().take(1))?;
        let limit = status.first().and_then(|(_, s)| s.pointer("/engine/lanes/0/limit_batches")?.as_u64());
        Ok(limit.and_then(|n| u32::try_from(n).ok()))
    }
}

/// Reads and writes of a device together.
fn of_device(counts: Counts) -> Moved {
    Moved { requests: counts.reads + counts.writes, bytes: counts.read_bytes + counts.write_bytes }
}

/// Requests that reached the modelled disks below the kernel: counts by the kernel, times by the model.
pub fn observe_kernel_disks(disks: &[KernelDisk], seen: &mut Observation) -> Result<()> {
    seen.at_disk = Moved::default();
    let mut device = DeviceObservation::default();
    for disk in disks {
        seen.at_disk = seen.at_disk.plus(of_device(disk.counts()?));
        let status = disk.status();
        device.requests += status.transfers;
        device.mean_service_us += status.transfers as f64 * status.service_mean_ms * 1e3;
        device.lateness_p99_us = device.lateness_p99_us.max(status.lateness.p99_us);
    }
    device.mean_service_us /= device.requests.max(1) as f64;
    seen.device = Some(device);
    Ok(())
}

/// What the servers' states say about a run.
fn observation(data: Vec<(String, Value)>, io: Vec<(String, Value)>) -> Observation {
    let mut seen = Observation::default();
    let number = |state: &Value, pointer: &str| state.pointer(pointer).and_then(Value::as_f64).unwrap_or(0.0);
    let moved = |state: &Value, count: &str, mean: &str| {
        let (requests, mean) = (number(state, count), number(state, mean));
        Moved { requests: requests as u64, bytes: (requests * mean).round() as u64 }
    };
    for (_, state) in &io {
        let sent = moved(state, "/forward/forwarded", "/forward/mean_forwarded_bytes");
        seen.leaving_io_nodes = seen.leaving_io_nodes.plus(sent);
    }
    let mut service_us = 0.0;
    for (_, state) in &data {
        let statistics = |part: &str, field: &str| format!("/engine/statistics/{part}/{field}");
        let arrived = moved(state, &statistics("request_bytes", "count"), &statistics("request_bytes", "mean"));
        seen.arriving_at_servers = seen.arriving_at_servers.plus(arrived);
        let batches = moved(state, &statistics("batch_bytes", "count"), &statistics("batch_bytes", "mean"));
        let Some(device) = state.get("device") else {
            seen.at_disk = seen.at_disk.plus(batches);
            continue;
        };
        // The elevator merges once more below the scheduler: count the disk's requests.
        let taken = moved(device, "/transfers", "/transfer_mean_bytes");
        seen.at_disk = seen.at_disk.plus(taken);
        service_us += taken.requests as f64 * number(device, "/service_mean_ms") * 1e3;
        let whole = seen.device.get_or_insert_with(DeviceObservation::default);
        whole.requests += taken.requests;
        whole.lateness_p99_us = whole.lateness_p99_us.max(number(device, "/lateness/p99_us"));
    }
    if let Some(device) = &mut seen.device {
        device.mean_service_us = service_us / device.requests.max(1) as f64;
    }
    seen.status = data.into_iter().chain(io).collect();
    seen
}

/// A client of the cluster, of one process or of several.
struct Counted {
    client: Arc<Client>,
    /// What it has sent that is put down to one of its processes.
    put_down: Mutex<Moved>,
}

impl Counted {
    fn connect(config: &Config, options: ClientOptions) -> Result<Arc<Counted>> {
        Ok(Arc::new(Counted { client: Client::connect(config, options)?, put_down: Mutex::default() }))
    }
}

/// A process of the cluster's client.
struct Connected {
    counted: Arc<Counted>,
    sent: Mutex<Moved>,
}

impl Connected {
    fn to(counted: Arc<Counted>) -> Connected {
        Connected { counted, sent: Mutex::default() }
    }

    fn client(&self) -> &Arc<Client> {
        &self.counted.client
    }
}

impl Process for Connected {
    fn make_dir(&self, path: &str) -> Result<bool> {
        match self.client().mkdir(path, 0o755, 0, 0) {
            Err(e) if e.errno() != libc::EEXIST => Err(e.into()),
            made => Ok(made.is_ok()),
        }
    }

    fn create(&self, path: &str) -> Result<Box<dyn FileIo>> {
        Ok(Box::new(Open(self.client().create(path, CreateOptions::default())?)))
    }

    fn open(&self, path: &str, write: bool) -> Result<Box<dyn FileIo>> {
        Ok(Box::new(Open(self.client().open(path, write)?)))
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        match self.client().stat(path) {
            Ok(attributes) => Ok(Some(attributes.size)),
            Err(e) if e.errno() == libc::ENOENT => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn remove(&self, path: &str) -> Result<()> {
        Ok(self.client().unlink(path)?)
    }

    fn remove_dir(&self, path: &str) -> Result<()> {
        Ok(self.client().rmdir(path)?)
    }

    fn sent(&self) -> Moved {
        // Of what several processes have sent through one client, each has what no other had been given before it asked: their sum
        // is right.
        let (mut put_down, mut sent) = (self.counted.put_down.lock(), self.sent.lock());
        let traffic = self.client().traffic();
        let all = Moved { requests: traffic.requests(), bytes: traffic.read_bytes + traffic.written_bytes };
        sent.requests += all.requests - put_down.requests;
        sent.bytes += all.bytes - put_down.bytes;
        *put_down = all;
        *sent
    }
}

struct Open(File);

impl FileIo for Open {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        Ok(self.0.read_at(buffer, offset)?)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize> {
        Ok(self.0.write_at(data, offset)?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.0.sync()?)
    }

    fn place(&self) -> Option<FilePlace> {
        Some(FilePlace { key: self.0.key().0, base: self.0.layout().base })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_servers_tell_is_summed() {
        let data = |transfers: u64, late: f64| {
            json!({
                "engine": { "statistics": {
                    "request_bytes": { "count": 10, "mean": 8192.0 }, "batch_bytes": { "count": 5, "mean": 16384.0 } } },
                "device": { "requests": 5, "transfers": transfers, "transfer_mean_bytes": 20480.0, "service_mean_ms": 8.0,
                            "lateness": { "p50_us": 1.0, "p99_us": late, "max_us": 500.0 } },
            })
        };
        let io = json!({ "forward": { "forwarded": 6, "mean_forwarded_bytes": 32768.0 } });
        let servers = vec![("data.0".into(), data(4, 90.0)), ("data.1".into(), data(4, 120.0))];
        let seen = observation(servers, vec![("io.0".into(), io)]);
        assert_eq!(seen.arriving_at_servers, Moved { requests: 20, bytes: 163_840 });
        assert_eq!(seen.at_disk, Moved { requests: 8, bytes: 163_840 });
        assert_eq!(seen.leaving_io_nodes, Moved { requests: 6, bytes: 196_608 });
        let device = seen.device.unwrap();
        assert_eq!((device.requests, device.mean_service_us, device.lateness_p99_us), (8, 8000.0, 120.0));
        let plain = json!({ "engine": { "statistics": { "batch_bytes": { "count": 2, "mean": 4096.0 } } } });
        let seen = observation(vec![("data.0".into(), plain)], vec![]);
        assert_eq!((seen.at_disk, seen.device), (Moved { requests: 2, bytes: 8192 }, None));
    }

    #[test]
    fn a_trace_that_ended_early_and_runs_that_could_not_be_loaded_are_none() {
        let state = json!({ "trace": { "path": "/t/data.0-1.imt" }, "earlier_runs": { "traces": ["a.imt"] } });
        assert!(is_recording(&state));
        assert_eq!(runs_loaded(&state).unwrap(), [PathBuf::from("a.imt")]);
        let failed = json!({
            "trace": { "path": "/t/data.0-1.imt", "failure": "No space left on device" },
            "earlier_runs": { "traces": [], "failure": "none of the traces can be used" },
        });
        assert!(!is_recording(&failed) && !is_recording(&json!({ "trace": null })));
        assert!(runs_loaded(&failed).unwrap().is_empty() && runs_loaded(&json!({})).unwrap().is_empty());
    }
}
