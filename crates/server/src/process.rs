//! Running one server of a configuration: in a thread of a test or in the foreground of a process of its own.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use impresario_backend::{Caller, SYNC_ALL_WAIT};
use impresario_base::machine::{ending_signals, raise_file_limit, survive_file_size_limit};
use impresario_client::Vet;
use impresario_config::{
    Calibration, Config, Data, Io, META_NAME, Merge, Security, Server as Configured, TreeBackend, read_table,
};
use impresario_engine::EngineConfig;
use impresario_metrics::Endpoint;
use impresario_node::Merging;
use impresario_sched::policy::orders;
use impresario_sched::{CostModel, LinearCost, Nanos};
use impresario_store::{ModelledDevice, ObjectStore, StoreError, StoreOptions};
use impresario_trace::Space;
use impresario_transport::{Access, BindError, Certificates, KeyError, Keyring, Membership, Munge};
use impresario_wire::{ClusterId, KeyRole, Role};
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;

use crate::data::{DataServer, Departure, Disk, SYNCS_MAX};
use crate::data_servers::{DataServers, upstream_timeout};
use crate::export::Exports;
use crate::file_system::{self, FileSystem};
use crate::io_node::{Below, IoNode, IoSettings, Tree, TreeSettings, Upstream};
use crate::listener::{Running, Server, Service, Settings};
use crate::meta::{Answered, MetaOptions, MetaService, Stores};
use crate::meta_front::MetaFront;
use crate::peers::Peers;
use crate::request_trace::TraceSettings;
use crate::whereabouts::{Anchored, Loss, Watch};

/// Why a server does not start, or has ended; one line with the remedy.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration has no such server.
    #[error("{0}")]
    Unknown(String),
    /// Its address cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Its folder cannot be used.
    #[error("{name}: {source}")]
    Store {
        /// The server.
        name: String,
        /// What is wrong, and the remedy.
        source: impresario_store::StoreError,
    },
    /// The folder or the volume that it serves cannot be used.
    #[error("{name}: {source}")]
    Tree {
        /// The server.
        name: String,
        /// What is wrong, and the remedy.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The metadata server's folder cannot be used.
    #[error("{META_NAME}: {0}")]
    Meta(#[from] crate::meta::StartError),
    /// Its keys cannot be used.
    #[error("{name}: it listens at {address}, where only peers with a key are taken (`security`), and {source}")]
    Keys {
        /// The server.
        name: String,
        /// Its address.
        address: String,
        /// What is wrong, and the remedy.
        source: KeyError,
    },
    /// Its certificates cannot be used.
    #[error(
        "{name}: it listens at {address}, where only peers with a certificate are taken (`security`), and {source}"
    )]
    Certificates {
        /// The server.
        name: String,
        /// Its address.
        address: String,
        /// What is wrong, and the remedy.
        source: KeyError,
    },
    /// The key for passes cannot be used.
    #[error(
        "{name}: an [[export]] has files passed on under server.key in `key_dir`, also where peers show certificates, and {source}"
    )]
    Passes {
        /// The server.
        name: String,
        /// What is wrong, and the remedy.
        source: KeyError,
    },
    /// Its policy, or another setting, does not suit it.
    #[error("{name}: {reason}")]
    Unsuitable {
        /// The server.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Its metrics cannot be served.
    #[error("{name}: {source}")]
    Metrics {
        /// The server.
        name: String,
        /// What is wrong, and the remedy.
        source: impresario_metrics::OpenError,
    },
    /// Its folder was moved or replaced while it ran.
    #[error("{0}")]
    FolderLost(String),
    /// The system denies something.
    #[error("{name}: {what}: {source}")]
    System {
        /// The server.
        name: String,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A server that runs. Dropping it stops it as [`Started::stop`] does.
pub struct Started {
    name: String,
    front: Running,
    metrics: Option<Endpoint>,
    end: Option<Box<dyn FnOnce() + Send>>,
    /// Of a data server.
    departure: Option<Arc<Departure>>,
    /// Of a server with a folder.
    folder: Option<Watch>,
}

impl Started {
    /// Name in the configuration.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address that it answers at; with port 0 in the configuration, the port that was taken.
    pub fn address(&self) -> &str {
        self.front.address()
    }

    /// The address at which its metrics are; with port 0 in the configuration, the port that was taken.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Endpoint::address)
    }

    /// Has this called when the server has moved to another folder or machine.
    pub fn on_leaving(&self, then: impl FnOnce() + Send + 'static) {
        if let Some(departure) = &self.departure {
            departure.on_leaving(then);
        }
    }

    /// The loss of its folder; `None`: it has none.
    fn loss(&self) -> Option<Arc<Loss>> {
        self.folder.as_ref().map(|folder| folder.loss().clone())
    }

    /// Stops: accepts nothing more, finishes what is in flight for a bounded time, closes.
    pub fn stop(&mut self) {
        (self.metrics, self.folder) = (None, None);
        self.front.stop();
        if let Some(end) = self.end.take() {
            end();
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts the server of that name on threads of this process. Folders are used as the configuration says them.
pub fn start(config: &Config, name: &str) -> Result<Started, StartError> {
    match config.server(name).map_err(StartError::Unknown)? {
        Configured::Meta(_) => start_meta(config),
        Configured::Data(_, data) if data.is_retired() => Err(StartError::Unsuitable {
            name: name.into(),
            reason:
                "it is retired in the configuration; with state = \"draining\" it serves the files that it still has"
                    .into(),
        }),
        Configured::Data(index, data) => start_data(config, index, data),
        Configured::Io(index, io) => start_io(config, index, io),
    }
}

/// Runs the server of that name until SIGTERM or SIGINT, or until it has moved elsewhere; an error also when its folder is not where
/// it was any more ([`StartError::FolderLost`]). Calls `ready` with its address once it answers. On SIGHUP it reads its keys again;
/// without any it ends, unless a service manager runs it, or it was started to ignore it.
pub fn run(config: &Config, name: &str, ready: impl FnOnce(&str)) -> Result<(), StartError> {
    let mut loss = None;
    let start = || {
        let server = start(config, name)?;
        tracing::info!(name, address = server.address(), pid = std::process::id(), "serving");
        ready(server.address());
        // As if it was told to stop: it ends in order.
        let end = || {
            let _ = kill_process(getpid(), Signal::TERM); // it has a handler for it
        };
        server.on_leaving(end);
        loss = server.loss().inspect(|loss| loss.then(end));
        Ok(server)
    };
    let no_signals = |error| system(name, "handling signals", error);
    // `systemctl reload` sends it to servers without keys, too.
    let is_managed = std::env::var_os("NOTIFY_SOCKET").is_some();
    let goes_on = |server: &Started| server.front.refresh_keys() || is_managed;
    until_signal(name, start, no_signals, goes_on, |mut server| server.stop())?;
    // A service manager starts it again then: from what is in the place of the folder, if that is this server's too.
    let why = loss.as_ref().and_then(|loss| loss.why());
    why.map_or(Ok(()), |why| Err(StartError::FolderLost(why.into())))
}

/// Starts something that serves, runs it until one of the [`ending_signals`], and stops it; a second signal ends the process
/// at once. It goes on after a SIGHUP where `goes_on` says so. `no_signals` makes an error of signals that cannot be handled.
pub fn until_signal<S, E>(
    name: &str,
    start: impl FnOnce() -> Result<S, E>,
    no_signals: impl FnOnce(std::io::Error) -> E,
    goes_on: impl Fn(&S) -> bool,
    stop: impl FnOnce(S),
) -> Result<(), E> {
    // Before anything else, so that a signal during the start is not lost.
    let mut signals = Signals::new(ending_signals()).map_err(no_signals)?;
    // A thousand clients and as many open objects need more descriptors than shells give by default.
    raise_file_limit(0);
    survive_file_size_limit();
    keep_the_heap_small();
    let server = start()?;
    let signal = signals.forever().find(|signal| *signal != SIGHUP || !goes_on(&server));
    tracing::info!(name, signal, "stopping");
    let impatient = signals.handle();
    let _ = std::thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_some() {
            std::process::exit(1);
        }
    });
    stop(server);
    impatient.close();
    tracing::info!(name, "stopped");
    Ok(())
}

/// Bound of the answers of a metadata server that have names or attributes, while they are made and until they have left, bytes.
const ANSWERS_MAX_BYTES: u64 = 128 << 20;

fn start_meta(config: &Config) -> Result<Started, StartError> {
    let meta = &config.meta;
    let folder = Anchored::before_opening(&meta.dir);
    let stores = Arc::new(Stores::open(&meta.dir)?);
    let membership = Arc::new(Membership::of(stores.cluster()));
    let descriptors = Descriptors::of(config, META_NAME);
    let mut settings = Settings {
        membership: membership.clone(),
        keys: keys(config, META_NAME, &meta.address)?,
        certificates: certificates(config, META_NAME, &meta.address)?,
        exports: exports(config, META_NAME)?,
        max_connections: descriptors.connections,
        place: meta.dir.display().to_string(),
        ..Settings::new(META_NAME, Role::Meta, &config.cluster, ANSWERS_MAX_BYTES)
    };
    if !config.io.is_empty() && settings.keys.is_none() && settings.certificates.is_none() {
        // An I/O node has a connection for each of its clients, and without keys nothing tells which one it is.
        settings.max_connections_per_address = settings.max_connections;
    }
    let squashes = settings.exports.as_ref().is_some_and(|exports| exports.squash());
    if squashes && !rustix::process::geteuid().is_root() {
        let reason = "an [[export]] squashes users, and a metadata server that does not run as root keeps no owners; run it as \
                      root, or write squash = \"none\"";
        return Err(StartError::Unsuitable { name: META_NAME.into(), reason: reason.into() });
    }
    let server = Server::bind(&meta.address, settings)?;
    let known = stores.clone();
    let names: Vec<String> = config.data.iter().map(|data| data.name.clone()).collect();
    let prefix = crate::meta::key_prefix(&meta.dir)?;
    let answered = Arc::new(Answered::new(names.clone(), prefix, upstream_timeout(config)));
    let hears = answered.clone();
    let vet = Vet(Arc::new(move |welcome| known.vet(welcome).inspect(|()| hears.note(welcome))));
    let unsuitable = |reason| StartError::Unsuitable { name: META_NAME.into(), reason };
    stores.vet_order(&names).map_err(unsuitable)?;
    if let Some(data) = config.data.iter().find(|data| data.is_retired() && !stores.is_emptied(&data.name)) {
        return Err(unsuitable(format!(
            "{name} is retired in the configuration, but it was not found empty: files may be striped over it; write state = \
             \"draining\" for it, start it, and empty it with `impresario store drain`",
            name = data.name
        )));
    }
    let objects = DataServers::of(config, META_NAME, membership, Some(vet), Some(stores.clone()))
        .map_err(|error| unsuitable(error.to_string()))?;
    let objects = Arc::new(objects);
    let options = MetaOptions {
        stripe_bytes: config.cluster.stripe_bytes,
        stripe_count: config.stripe_count(),
        grace: Duration::from_millis(meta.grace_ms()),
        lock_lease: Duration::from_millis(meta.lock_lease_ms()),
        skipped: {
            let states = objects.states.clone();
            Arc::new(move || states.skipped())
        },
        answered: Some(answered.clone()),
        stores: Some(stores.clone()),
        files_max: descriptors.files,
        squashes,
        munge: Munge::at(config.cluster.munge_socket.as_deref()),
        ..MetaOptions::new(&meta.dir, config.data.len() as u16)
    };
    let service = MetaService::open(options, objects.clone())?;
    objects.greet(&answered).map_err(|source| system(META_NAME, "starting a thread", source))?;
    let folder = opened(META_NAME, folder, Some(crate::meta::LOCK))?;
    let limits = (&meta.policy(), Duration::from_millis(config.cluster.request_timeout_ms));
    let service = MetaFront::new(server.vitals(), service, stores, answered, limits).map_err(unsuitable)?;
    begin(META_NAME, meta.metrics, server, folder, service, |service| service.stop())
}

fn start_data(config: &Config, index: usize, data: &Data) -> Result<Started, StartError> {
    let moved = |source| StartError::Store { name: data.name.clone(), source };
    let data = &crate::folders::place_of(data).map_err(moved)?;
    let unsuitable = |reason| StartError::Unsuitable { name: data.name.clone(), reason };
    let descriptors = Descriptors::of(config, &data.name);
    let kept = StoreOptions::default().open_files;
    // An object may have a file of checksums beside it.
    let open_files = kept.min(descriptors.files / 2);
    let options = StoreOptions { checksums: Some(data.checksums), open_files, ..StoreOptions::default() };
    let folder = Anchored::before_opening(&data.dir);
    let store = ObjectStore::open(&data.dir, &data.name, options);
    let store = store.map_err(|source| StartError::Store { name: data.name.clone(), source })?;
    let folder = opened(&data.name, folder, Some(impresario_store::LOCK))?;
    settle_number(config, index, data, &store)?;
    let membership = Arc::new(Membership::of(ClusterId(store.identity().cluster)));
    let settings = Settings {
        membership: membership.clone(),
        store: store.identity().store,
        number: Some(index as u16),
        boot: boot_of(data)?,
        keys: keys(config, &data.name, &data.address)?,
        certificates: certificates(config, &data.name, &data.address)?,
        exports: exports(config, &data.name)?,
        max_connections: descriptors.connections,
        place: data.dir.display().to_string(),
        ..Settings::new(&data.name, Role::Data, &config.cluster, data.payload_bytes)
    };
    let server = Server::bind(&data.address, settings)?;
    let device = match &data.device {
        Some(model) => Some(config.device.get(model).ok_or_else(|| {
            unsuitable(format!("its device model {model} is not in the configuration; add [device.{model}]"))
        })?),
        None => None,
    };
    let modelled = device.map(ModelledDevice::start).transpose();
    let modelled = modelled.map_err(|source| system(&data.name, "starting its modelled device", source))?;
    let (cost, depth) = cost_model(data.cost.as_deref(), data.correct_cost, device).map_err(unsuitable)?;
    let lane_requests = match (data.in_flight_requests, device) {
        // A disk does one thing at a time: what it does not have yet, the policy can still order.
        (0, Some(_)) => 1,
        // As many as a measured device profits from.
        (0, None) => depth.unwrap_or(0),
        (configured, _) => configured,
    };
    let passes = !data.schedule_cached_reads;
    let disk = Disk::new(server.vitals(), store, modelled, lane_requests, data.read_ahead_bytes, passes)
        .map_err(|source| system(&data.name, "starting a thread", source))?;
    disk.begin_settling().map_err(|source| system(&data.name, "starting a thread", source))?;
    let engine = EngineConfig {
        lane_requests,
        // What a modelled device does it does in one queue.
        lane_syncs: if device.is_some() { 0 } else { SYNCS_MAX },
        // A kernel with a page cache and an I/O scheduler.
        sorted_below: device.is_none(),
        node_rank: index as u32,
        queue_requests: data.queue_requests,
        submit_timeout: Duration::from_millis(config.cluster.request_timeout_ms / 2),
        cost,
        ..EngineConfig::new(read_table(&data.policy).map_err(unsuitable)?)
    };
    let trace = TraceSettings { folder: data.trace.clone(), at_start: data.trace_at_start, space: Space::Lane };
    let runs = data.earlier_runs.clone();
    let peers = Peers::data(config, index, membership);
    let timeout = Duration::from_millis(config.cluster.request_timeout_ms);
    let service = DataServer::new(server.vitals(), disk, engine, trace, runs, peers, timeout).map_err(unsuitable)?;
    let departure = service.departure().clone();
    let mut started = begin(&data.name, data.metrics, server, folder, service, |service| service.stop())?;
    started.departure = Some(departure);
    Ok(started)
}

/// Checks that a data server has the number in the configuration under which it got its objects; notes it where it has none yet. Files
/// would be read from, and written to, servers that have other parts of them.
fn settle_number(config: &Config, index: usize, data: &Data, store: &ObjectStore) -> Result<(), StartError> {
    let name = || data.name.clone();
    let failed = |source| StartError::Store { name: name(), source: StoreError::Io { dir: data.dir.clone(), source } };
    match store.number().map_err(failed)?.map(usize::from) {
        Some(noted) if noted == index => return Ok(()),
        Some(noted) if !store.key_marks().is_empty() => {
            let file = config.cluster.file.path().display();
            let (noted, now) = (noted + 1, index + 1);
            let reason = format!(
                "its folder has the objects of the data server with the place {noted}, and its section [[data]] has the place {now} in \
                 {file}: write the sections in the order that they had, which the file `order` in the metadata folder tells, \
                 new ones behind them; that of a server that does not run any more stays (`state`)"
            );
            return Err(StartError::Unsuitable { name: name(), reason });
        }
        _ => {}
    }
    if let Err(error) = store.note_number(index as u16) {
        // A full disk, say: it is noted at another start.
        tracing::warn!(name = data.name, %error, "the place of the data server cannot be noted in its folder");
    }
    Ok(())
}

/// The boot that a server speaks of whose folder came from another machine, until this one restarts.
fn boot_of(data: &Data) -> Result<Option<u32>, StartError> {
    let arrived = impresario_store::arrived(&data.dir);
    let arrived = arrived.map_err(|source| StartError::Store { name: data.name.clone(), source })?;
    let here = this_boot().map_err(|source| system(&data.name, "finding out the boot of this machine", source))?;
    Ok(arrived.filter(|arrived| arrived.boot.0 == here).map(|arrived| arrived.boot.1))
}

/// Names the boot of this machine, as incarnations do.
pub(crate) fn this_boot() -> std::io::Result<u32> {
    Ok((impresario_transport::new_incarnation()? >> 32) as u32)
}

fn start_io(config: &Config, index: usize, io: &Io) -> Result<Started, StartError> {
    let unsuitable = |reason: String| StartError::Unsuitable { name: io.name.clone(), reason };
    // Learnt from the first server that welcomes it.
    let membership = Arc::<Membership>::default();
    let settings = Settings {
        membership: membership.clone(),
        keys: keys(config, &io.name, &io.address)?,
        certificates: certificates(config, &io.name, &io.address)?,
        exports: exports(config, &io.name)?,
        max_connections: Descriptors::of(config, &io.name).connections,
        place: config.tree.as_ref().map_or_else(String::new, ToString::to_string),
        ..Settings::new(&io.name, Role::Io, &config.cluster, io.payload_bytes)
    };
    let server = Server::bind(&io.address, settings)?;
    let peers = Peers::io(config, index, membership.clone());
    let data =
        DataServers::of(config, &io.name, membership.clone(), None, None).map_err(|e| unsuitable(e.to_string()))?;
    // Of a volume, or a file system of other servers, nothing is kept open here.
    let folder = config.tree.as_ref().filter(|tree| tree.backend == TreeBackend::Posix);
    let folder = folder.map(|tree| Anchored::before_opening(&tree.folder));
    let below = match &config.tree {
        Some(tree) => start_tree(&server, config, io, tree, data)?,
        None => {
            let (address, timeout) = (config.meta.address.clone(), upstream_timeout(config));
            let (via, access) = (io.name.clone(), Access::of(config, KeyRole::Server));
            let poll = config.cluster.poll();
            Below::Cluster(data, Upstream { address, timeout, poll, via, membership, access })
        }
    };
    let engine = EngineConfig {
        lanes: config.lanes(),
        shared_space: !io.split,
        // A kernel with a page cache and an I/O scheduler, here or on the data servers, or another system's servers.
        sorted_below: config.tree.is_some() || config.data.iter().all(|data| data.device.is_none()),
        scheduled_below: config.data.iter().any(|data| orders(&data.policy)),
        // What the policy has released waits in the dispatch queue, which is as long as this.
        lane_requests: io.dispatch_requests,
        total_requests: io.dispatch_requests,
        lane_syncs: crate::io_node::SYNCS_MAX,
        node_rank: index as u32,
        queue_requests: io.queue_requests,
        submit_timeout: Duration::from_millis(config.cluster.request_timeout_ms / 2),
        cost: cost_model(io.cost.as_deref(), io.correct_cost, None).map_err(unsuitable)?.0,
        ..EngineConfig::new(read_table(&io.policy).map_err(unsuitable)?)
    };
    let io_settings = IoSettings {
        engine,
        in_flight_requests: io.in_flight_requests as usize,
        merging: match io.merge {
            Merge::Contiguous => Merging::Contiguous,
            Merge::List => Merging::List,
        },
        merge_requests: io.merge_requests as usize,
        merge_bytes: u64::from(config.cluster.max_payload_bytes),
        split: io.split,
        trace: TraceSettings {
            folder: io.trace.clone(),
            at_start: io.trace_at_start,
            space: if io.split { Space::Lane } else { Space::File },
        },
        earlier_runs: io.earlier_runs.clone(),
        peers,
        timeout: Duration::from_millis(config.cluster.request_timeout_ms),
    };
    let service = IoNode::new(server.vitals(), below, io_settings).map_err(unsuitable)?;
    let folder = folder.map(|folder| opened(&io.name, folder, None)).transpose()?.flatten();
    begin(&io.name, io.metrics, server, folder, service, |service| service.stop())
}

/// The file system that an I/O node serves.
fn start_tree(
    server: &Server,
    config: &Config,
    io: &Io,
    tree: &impresario_config::Tree,
    data: DataServers,
) -> Result<Below, StartError> {
    let name = io.name.clone();
    let settings = file_system::Settings {
        // What takes longer is of no use to the client, which has given it up.
        patience: Some(Duration::from_millis(config.cluster.request_timeout_ms)),
        identity: Some(format!("{} {} {}", config.cluster.name, io.name, io.address)),
    };
    let FileSystem { backend, describe } =
        FileSystem::open(tree, settings).map_err(|source| StartError::Tree { name: name.clone(), source })?;
    let groups = rustix::process::getgroups().unwrap_or_default().into_iter().map(rustix::process::Gid::as_raw);
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let identity = data.identity;
    let settings = TreeSettings {
        name,
        backend,
        sync_all_wait: SYNC_ALL_WAIT.min(Duration::from_millis(config.cluster.request_timeout_ms / 2)),
        caller: Caller { uid, gid, groups: groups.collect() },
        lanes: tree.data_servers,
        split: io.split,
        read_ahead_bytes: config.read_ahead_bytes(io),
        vitals: server.vitals(),
        identity: identity.clone(),
        describe,
    };
    Ok(Below::Tree(Tree::new(settings), identity))
}

/// The keys that a server's peers must prove, or that passes are signed with; `None` where they need none.
fn keys(config: &Config, name: &str, address: &str) -> Result<Option<Arc<Keyring>>, StartError> {
    let (security, name) = (config.cluster.security, name.to_string());
    let find = || Keyring::find(&config.cluster.key_dir, KeyRole::Server).map(|keys| Some(Arc::new(keys)));
    match security {
        Security::Tls if exports(config, &name)?.is_some_and(|exports| exports.give_passes()) => {
            find().map_err(|source| StartError::Passes { name, source })
        }
        Security::Auto | Security::Key if security.needs_key(address) => {
            find().map_err(|source| StartError::Keys { name, address: address.into(), source })
        }
        _ => Ok(None),
    }
}

/// The certificates of a server whose peers must show theirs.
fn certificates(config: &Config, name: &str, address: &str) -> Result<Option<Arc<Certificates>>, StartError> {
    if config.cluster.security != Security::Tls {
        return Ok(None);
    }
    let failed = |source| StartError::Certificates { name: name.into(), address: address.into(), source };
    Certificates::of(config, KeyRole::Server).map(|found| Some(Arc::new(found))).map_err(failed)
}

/// The rules that a server's clients are under.
fn exports(config: &Config, name: &str) -> Result<Option<Arc<Exports>>, StartError> {
    Exports::of(config).map_err(|reason| StartError::Unsuitable { name: name.into(), reason })
}

fn begin<S: Service>(
    name: &str,
    metrics: Option<SocketAddr>,
    server: Server,
    folder: Option<Anchored>,
    service: Arc<S>,
    end: impl FnOnce(&S) + Send + 'static,
) -> Result<Started, StartError> {
    let vitals = server.vitals();
    let front = server.start(service.clone()).map_err(|source| system(name, "starting to accept", source))?;
    // Before the metrics: when their address cannot be had, the server that has begun is stopped in order.
    let observed = service.clone();
    let mut started = Started {
        name: name.into(),
        front,
        metrics: None,
        end: Some(Box::new(move || end(&service))),
        departure: None,
        folder: None,
    };
    let folder = folder.map(|folder| folder.watch(vitals)).transpose();
    started.folder = folder.map_err(|source| system(name, "starting a thread", source))?;
    let metrics = metrics.map(|address| Endpoint::open(address, name, move || observed.status()));
    started.metrics = metrics.transpose().map_err(|source| StartError::Metrics { name: name.into(), source })?;
    Ok(started)
}

fn opened(name: &str, folder: Anchored, file: Option<&str>) -> Result<Option<Anchored>, StartError> {
    let opened = folder.opened(name, file).map_err(|source| system(name, "finding its folder", source))?;
    opened.map_err(|reason| StartError::Unsuitable { name: name.into(), reason })
}

fn system(name: &str, what: &'static str, source: std::io::Error) -> StartError {
    StartError::System { name: name.into(), what, source }
}

/// What the scheduler is to assume of a server's device: a calibration, else the model in front of it, else a disk; and how
/// many requests the device profits from at once, where that was measured.
fn cost_model(
    calibration: Option<&Path>,
    correct: Option<bool>,
    device: Option<&impresario_device::DeviceParams>,
) -> Result<(CostModel, Option<u32>), String> {
    let (model, depth) = match calibration {
        Some(file) => {
            let read = Calibration::load(file).map_err(|errors| format!("its cost model: {errors}"))?;
            (read.cost_model(&file.display().to_string())?, read.depth())
        }
        None => (device.map_or_else(CostModel::default, cost_of), None),
    };
    let correct = correct.unwrap_or(model.correct);
    Ok((model.corrected(correct), depth))
}

/// What the scheduler assumes of a modelled device before it has measured it.
fn cost_of(device: &impresario_device::DeviceParams) -> CostModel {
    let fit = |op| {
        let (none, mib) = (
            impresario_device::LinearCost::of(device, op).ns(0),
            impresario_device::LinearCost::of(device, op).ns(1 << 20),
        );
        LinearCost { fixed: Nanos(none), ps_per_byte: ((mib.saturating_sub(none)) * 1000) >> 20 }
    };
    CostModel::new(fit(impresario_device::Op::Read), fit(impresario_device::Op::Write)).from_source("disk model")
}

/// How the descriptors of a process are shared out, so that neither connections nor open files take them all: a server
/// without any could neither be asked nor close a file.
struct Descriptors {
    /// Connections at once.
    connections: u32,
    /// Files that are kept open.
    files: usize,
}

impl Descriptors {
    /// Descriptors of requests under way, of other servers' connections and of the server itself.
    const OTHERS: u64 = 4096;

    fn of(config: &Config, name: &str) -> Descriptors {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let wanted = config.cluster.max_connections;
        let shared = Descriptors::share_out(limit, wanted);
        if shared.connections < wanted {
            let possible = shared.connections;
            tracing::warn!(
                name,
                limit,
                wanted,
                possible,
                "fewer connections than max_connections: raise the limit of open files"
            );
        }
        shared
    }

    fn share_out(limit: u64, connections: u32) -> Descriptors {
        let connections = u32::try_from(limit / 2).unwrap_or(u32::MAX).min(connections);
        let left = limit - u64::from(connections);
        let files = left - (left / 2).min(Descriptors::OTHERS);
        Descriptors { connections, files: usize::try_from(files).unwrap_or(usize::MAX) }
    }
}

/// A server has many threads and large buffers that come and go. The C library would keep freed ones in a heap per
/// thread and raise the size from which it gives them back; so that memory stays near what is in use, neither.
fn keep_the_heap_small() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallopt takes two numbers and changes the allocator's settings; it may be called at any time.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 2);
            libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_suffice_for_connections_files_and_the_rest() {
        for (limit, connections, files) in [
            (1 << 20, 1024, (1 << 20) - 1024 - 4096),
            (65_536, 1024, 60_416),
            (1024, 512, 256),
            (64, 32, 16),
            (0, 0, 0),
        ] {
            let shared = Descriptors::share_out(limit, 1024);
            assert_eq!((shared.connections, shared.files), (connections, files), "of {limit}");
        }
        assert_eq!(Descriptors::share_out(u64::MAX, u32::MAX).connections, u32::MAX);
    }
}
