//! The server's front: takes its addresses, accepts connections within a limit, stops gracefully, tells its state.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_base::unpaced;
use impresario_engine::workers::Workers;
use impresario_engine::{Engine, EngineConfig};
use impresario_foresight::ALONE_MAX;
use impresario_sched::{PolicySpec, policy};
use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use serde_json::{Value, json};

use crate::budget::budget;
use crate::connection::{Connection, Limits, Receiver};
use crate::data::{Ahead, Data, Queued, data_threads};
use crate::exports::{ExportSettings, Exports};
use crate::gather::Gathering;
use crate::handles::HandleKey;
use crate::portmap::Registered;
use crate::service::{QUIET, Service};
use crate::statistics::Statistics;
use crate::verifier::Verifier;

/// Largest READ and WRITE, bytes.
const TRANSFER_BYTES: u32 = 1 << 20;
/// What a WRITE has beside its bytes: head, credential, handle.
const CALL_HEAD_BYTES: usize = 4 << 10;
/// Stack of a connection's thread.
const STACK_BYTES: usize = 256 << 10;
/// When stopping: how long calls that were taken may take.
const SETTLE_MAX: Duration = Duration::from_secs(10);
/// When stopping: how long what is left may take then.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// A connection that has had no call for less is not closed for another.
const IDLE_MIN: Duration = Duration::from_secs(1);
/// Requests in the scheduler's queue at most.
const QUEUE_REQUESTS: u32 = 10_000;

/// Addresses that a server has taken. They are taken before its file systems are opened: a file system may give a server that starts
/// again what the one before had, and one that cannot have its addresses must not take that from the one that has them.
pub struct Listening {
    listeners: Vec<TcpListener>,
    addresses: Vec<SocketAddr>,
}

impl Listening {
    /// Takes addresses; port 0: any free one. Connections wait until the server starts. An error is one line with the address.
    pub fn bind(addresses: &[SocketAddr]) -> Result<Listening, String> {
        let mut bound = Listening { listeners: Vec::new(), addresses: Vec::new() };
        for address in addresses {
            let bind = || -> io::Result<(TcpListener, SocketAddr)> {
                let listener = TcpListener::bind(address)?;
                unpaced::unpace(&listener);
                listener.set_nonblocking(true)?;
                let address = listener.local_addr()?;
                Ok((listener, address))
            };
            let (listener, address) = bind().map_err(|error| format!("cannot listen on {address}: {error}"))?;
            bound.listeners.push(listener);
            bound.addresses.push(address);
        }
        Ok(bound)
    }
}

/// How a server is set up.
pub struct Settings {
    /// Where it listens, for NFS and MOUNT alike.
    pub listen: Listening,
    /// What it offers.
    pub exports: Vec<ExportSettings>,
    /// The secret of its handles.
    pub key: HandleKey,
    /// Scheduling policy.
    pub policy: PolicySpec,
    /// Batches that each file system below the exports has at once at most.
    pub in_flight_requests: u32,
    /// What is read ahead of the clients and not yet asked for, bytes, at most; 0: nothing is.
    pub read_ahead_bytes: u64,
    /// Unstable writes that are answered before they are done, bytes, at most; 0: none. Where files have no page cache.
    pub gather_bytes: u64,
    /// Also schedule reads that the page cache has.
    pub schedule_cached_reads: bool,
    /// Threads for calls on names and attributes.
    pub name_threads: u32,
    /// Connections at once.
    pub max_connections: u32,
    /// Memory for calls and answers, bytes.
    pub memory_bytes: u64,
    /// A connection without calls is closed after this time.
    pub idle_max: Duration,
    /// The portmapper that is told where the server is; `None`: none.
    pub portmapper: Option<SocketAddr>,
}

impl Settings {
    /// With defaults but for the exports, on any free port of this machine, and with a new key.
    pub fn new(exports: Vec<ExportSettings>) -> io::Result<Settings> {
        Ok(Settings {
            listen: Listening::bind(&[SocketAddr::from(([127, 0, 0, 1], 0))]).map_err(io::Error::other)?,
            exports,
            key: HandleKey::random()?,
            policy: PolicySpec::named("auto"),
            in_flight_requests: 16,
            read_ahead_bytes: 0,
            gather_bytes: 0,
            schedule_cached_reads: false,
            name_threads: 16,
            max_connections: 1024,
            memory_bytes: 256 << 20,
            idle_max: Duration::from_secs(600),
            portmapper: None,
        })
    }
}

struct Shared {
    service: Arc<Service>,
    engine: Arc<Engine<Queued>>,
    limits: Limits,
    max_connections: u32,
    connections: Mutex<FxHashMap<u32, Arc<Connection>>>,
    threads: Mutex<u32>,
    fewer_threads: Condvar,
    next_id: AtomicU32,
    accepted: AtomicU64,
    refused: AtomicU64,
    evicted: AtomicU64,
    started: Instant,
    stopping: AtomicBool,
    wake: OwnedFd,
    addresses: Vec<SocketAddr>,
}

/// A server that runs; dropping it stops it.
pub struct Running {
    shared: Arc<Shared>,
    acceptor: Option<std::thread::JoinHandle<()>>,
    registered: Option<Registered>,
}

/// A call on names that has taken so long hangs, as far as other files are concerned, and does not count against their threads.
const NAMES_STUCK_AFTER: Duration = Duration::from_secs(1);

/// Starts a server. An error is one line with the remedy.
pub fn start(settings: Settings) -> Result<Running, String> {
    let system = |what: &str, error: io::Error| format!("{what}: {error}");
    let exports = Exports::new(settings.exports)?;
    let Listening { listeners, addresses } = settings.listen;
    let verifier = Verifier::new().map_err(|e| system("the system gives no random numbers", e))?;
    let (name_threads, in_flight) = (settings.name_threads.max(2) as usize, settings.in_flight_requests.max(1));
    let lanes = exports.lanes();
    let service = Arc::new_cyclic(|this| Service {
        this: this.clone(),
        exports,
        key: settings.key,
        verifier,
        changes: Default::default(),
        gathering: Gathering::new(settings.gather_bytes),
        replay: Default::default(),
        mounts: Default::default(),
        statistics: Statistics::default(),
        budget: budget(settings.memory_bytes),
        transfer_bytes: TRANSFER_BYTES,
        // One connection leaves a quarter to the others.
        names: Workers::fair("nfs-names", name_threads, name_threads - name_threads.div_ceil(4))
            .patient(NAMES_STUCK_AFTER),
        data: data_threads(in_flight, lanes),
        engine: OnceLock::new(),
        ahead: (settings.read_ahead_bytes > 0).then(|| Ahead::new(settings.read_ahead_bytes, lanes)),
        foresees: AtomicBool::new(policy::speculates(&settings.policy)),
        cached_pass: !settings.schedule_cached_reads,
        stopping: AtomicBool::new(false),
        complaints: AtomicU64::new(0),
        complained: Mutex::default(),
    });
    let config = EngineConfig {
        lanes,
        lane_requests: in_flight,
        lane_syncs: in_flight,
        // A file system with a page cache.
        sorted_below: true,
        queue_requests: QUEUE_REQUESTS,
        lane_speculations: if service.ahead.is_some() { ALONE_MAX } else { 0 },
        ..EngineConfig::new(settings.policy)
    };
    let engine = Engine::new(config, Arc::new(Data(Arc::downgrade(&service)))).map_err(|e| e.to_string())?;
    let _ = service.engine.set(engine.clone());
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| system("the system gives no event descriptor", e.into()))?;
    let limits = Limits {
        record_max_bytes: TRANSFER_BYTES as usize + CALL_HEAD_BYTES,
        bytes_max: (settings.memory_bytes / 4).max(u64::from(TRANSFER_BYTES)),
        idle_max: settings.idle_max,
    };
    let shared = Arc::new(Shared {
        service,
        engine,
        limits,
        max_connections: settings.max_connections.max(1),
        connections: Mutex::default(),
        threads: Mutex::default(),
        fewer_threads: Condvar::new(),
        next_id: AtomicU32::new(1),
        accepted: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        evicted: AtomicU64::new(0),
        started: Instant::now(),
        stopping: AtomicBool::new(false),
        wake,
        addresses,
    });
    let accepting = shared.clone();
    let acceptor = std::thread::Builder::new().name("nfs-accept".into()).stack_size(STACK_BYTES);
    let acceptor = acceptor.spawn(move || accept(&accepting, &listeners)).map_err(|e| system("no thread", e))?;
    let mut running = Running { shared, acceptor: Some(acceptor), registered: None };
    if let (Some(portmapper), Some(address)) = (settings.portmapper, running.addresses().first()) {
        running.registered = Some(Registered::new(portmapper, address.port())?);
    }
    Ok(running)
}

fn accept(shared: &Arc<Shared>, listeners: &[TcpListener]) {
    let mut told: Option<Instant> = None;
    while !shared.stopping.load(Ordering::Acquire) {
        let mut nothing = true;
        for listener in listeners {
            match listener.accept() {
                Ok((socket, peer)) => {
                    nothing = false;
                    shared.admit(socket, peer);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {
                }
                Err(error) => {
                    // Out of descriptors or memory: wait for connections to end instead of spinning.
                    if told.is_none_or(|told| told.elapsed() >= QUIET) {
                        told = Some(Instant::now());
                        tracing::warn!(%error, "cannot accept connections; raise the limit of open files (ulimit -n)");
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
        if nothing {
            let mut fds: Vec<PollFd<'_>> = listeners.iter().map(|l| PollFd::new(l, PollFlags::IN)).collect();
            fds.push(PollFd::new(&shared.wake, PollFlags::IN));
            let _ = poll(&mut fds, None);
        }
    }
}

impl Shared {
    fn admit(self: &Arc<Shared>, socket: TcpStream, peer: SocketAddr) {
        // Whom no export admits is nobody's client.
        let known = self.service.exports.iter().any(|e| e.rules.access.admits(peer.ip()));
        if !known || !self.make_room() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let receiver: Arc<dyn Receiver> = self.service.clone();
        let connection = match Connection::new(id, socket, peer, self.limits, receiver) {
            Ok(connection) => connection,
            Err(error) => {
                let log = || tracing::warn!(%error, %peer, "a connection cannot be set up");
                return self.service.complain_of(peer.ip(), log);
            }
        };
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.connections.lock().insert(id, connection.clone());
        *self.threads.lock() += 1;
        let here = self.clone();
        let thread = std::thread::Builder::new().name(format!("nfs-{id}")).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            if catch_unwind(AssertUnwindSafe(|| connection.serve(&here.service.budget))).is_err() {
                tracing::error!(%peer, "a connection's thread panicked; the connection is closed");
                connection.close();
            }
            drop(connection);
            here.ended(id);
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for a connection; raise its limit (ulimit -u)");
            self.ended(id);
        }
    }

    /// Finds a place for a connection; where there is none, closes the idlest, whose client connects again when it needs to.
    fn make_room(&self) -> bool {
        let connections = self.connections.lock();
        if connections.len() < self.max_connections as usize {
            return true;
        }
        let idle = connections.values().filter_map(|c| Some((c.idle()?, c))).max_by_key(|(idle, _)| *idle);
        match idle {
            Some((idle, connection)) if idle >= IDLE_MIN => {
                connection.close();
                self.evicted.fetch_add(1, Ordering::Relaxed);
                // A few more than allowed, until its thread has ended.
                connections.len() < self.max_connections as usize + 64
            }
            _ => false,
        }
    }

    fn ended(&self, id: u32) {
        self.connections.lock().remove(&id);
        *self.threads.lock() -= 1;
        self.fewer_threads.notify_all();
    }

    fn wait_for_threads(&self, patience: Duration) -> bool {
        let threads = self.threads.lock();
        *self.fewer_threads.wait_timeout_while(threads, patience, |threads| *threads > 0).0 == 0
    }
}

impl Running {
    /// Where it listens, with the ports that were really taken.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.shared.addresses
    }

    /// Switches the policy, live. A refusal says why and changes nothing.
    pub fn set_policy(&self, policy: &PolicySpec) -> Result<(), String> {
        self.shared.engine.set_policy(policy).map_err(|e| e.to_string())?;
        let (service, foresees) = (&self.shared.service, policy::speculates(policy));
        service.foresees.store(foresees, Ordering::Relaxed);
        if !foresees {
            service.ahead.iter().for_each(|ahead| ahead.reading.rest());
        }
        Ok(())
    }

    /// Its state: exports, connections, memory, the scheduler, calls and their times by procedure, who loads it.
    pub fn status(&self) -> Value {
        status(&self.shared)
    }

    /// For other threads that report the state; nothing once the server is gone.
    pub fn observer(&self) -> impl Fn() -> Value + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move || shared.upgrade().map_or(Value::Null, |shared| status(&shared))
    }

    /// Stops: takes no more connections and calls, answers those that were taken, for at most ten seconds, and closes.
    pub fn stop(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        drop(self.registered.take());
        let shared = &self.shared;
        shared.stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&shared.wake, &1u64.to_ne_bytes());
        let _ = acceptor.join();
        let connections: Vec<_> = shared.connections.lock().values().cloned().collect();
        connections.iter().for_each(|connection| connection.finish());
        let until = Instant::now() + SETTLE_MAX;
        let settled = shared.wait_for_threads(SETTLE_MAX);
        shared.service.gathering.settle_all(until.saturating_duration_since(Instant::now()));
        // What is left is not answered: its clients ask the next server.
        shared.service.stopping.store(true, Ordering::Release);
        if !settled {
            connections.iter().for_each(|connection| connection.close());
            if !shared.wait_for_threads(LEAVE_MAX) {
                tracing::warn!("some connections did not end in time; left behind");
            }
        }
        drop(connections);
        drop(shared.engine.shutdown(LEAVE_MAX));
        shared.service.names.stop(LEAVE_MAX);
        shared.service.data.stop(LEAVE_MAX);
        shared.service.ahead.iter().for_each(|ahead| ahead.threads.stop(LEAVE_MAX));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

fn status(shared: &Shared) -> Value {
    let service = &shared.service;
    let (used, peak, limit) = service.budget.lock().usage_bytes();
    let (answers, repeated) = service.replay.counts();
    let (open, calls, unsent): (usize, u64, u64) = {
        let connections = shared.connections.lock();
        let calls = connections.values().map(|c| u64::from(c.calls_under_way())).sum();
        (connections.len(), calls, connections.values().map(|c| c.unsent_bytes()).sum())
    };
    let exports: Vec<Value> = service
        .exports
        .iter()
        .map(|export| {
            let networks: Vec<String> = export.rules.access.networks.iter().map(ToString::to_string).collect();
            json!({
                "name": export.name,
                "lane": export.lane,
                "read_only": export.rules.access.read_only,
                "networks": networks,
            })
        })
        .collect();
    let addresses: Vec<String> = shared.addresses.iter().map(ToString::to_string).collect();
    json!({
        "role": "nfs",
        "addresses": addresses,
        "pid": std::process::id(),
        "uptime_s": shared.started.elapsed().as_secs_f64(),
        "exports": exports,
        "mounts": service.mounts.len(),
        "connections": {
            "open": open,
            "max": shared.max_connections,
            "accepted": shared.accepted.load(Ordering::Relaxed),
            "refused": shared.refused.load(Ordering::Relaxed),
            "evicted": shared.evicted.load(Ordering::Relaxed),
            "complaints": service.complaints.load(Ordering::Relaxed),
            "calls_under_way": calls,
            "unsent_bytes": unsent,
        },
        "memory": { "used_bytes": used, "peak_bytes": peak, "max_bytes": limit },
        "waiting": { "names": service.names.waiting(), "data": service.data.waiting() },
        "repetitions": { "answers_kept": answers, "repeated": repeated },
        "calls": service.statistics.describe(),
        "engine": serde_json::to_value(shared.engine.status()).unwrap_or_default(),
        "gathered_writes": service.gathering.describe(),
        "read_ahead": service.ahead.as_ref().map(|ahead| ahead.reading.describe()),
    })
}
