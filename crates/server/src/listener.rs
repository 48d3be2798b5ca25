//! The front of every server: accepts connections, greets, reads calls and hands them to its [`Service`];
//! keeps the limits, survives peers that speak nonsense, and ends gracefully.

mod admission;
mod conversation;
mod lobby;
mod together;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use impresario_base::complaints::Complaints;
use impresario_base::lock::{Condvar, Mutex};
use impresario_config::Protect;
use impresario_sched::ConnId;
use impresario_transport::{BindError, Certificates, Keyring, Listening, Membership, Munge};
use impresario_wire::{Call, Fault, HeldKeys, Role};
use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, eventfd};

use admission::Refusal;
pub(crate) use admission::host_of;
use conversation::{GREETING_MAX, PACE};
use lobby::{Lobby, Ready, Waiting};
use together::Together;
pub use together::before_waiting;

use crate::addresses::Addresses;
use crate::connection::{Connection, Reply};
use crate::export::Exports;
use crate::failures::Failures;
use crate::outbox::{self, Outbox, STACK_BYTES};
use crate::payload::{Buffer, PayloadPool};

/// When stopping: how long accepted calls may take to finish.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// Connections over the limit that are refused with a message; further ones are closed at once.
const REFUSALS_MAX: usize = 32;
/// Connections that are taken in at a time, between which those that speak are heard.
const NEWCOMERS_MAX: usize = 64;

/// What a server does with its clients' calls.
pub trait Service: Send + Sync + 'static {
    /// What is kept for each connection, and dropped by [`Service::close`].
    type Session: Send + 'static;

    /// Several calls that came together may be answered together. [`Service::serve`] then lets replies that are held back go
    /// before it does anything that may wait.
    const ANSWERS_TOGETHER: bool = false;

    /// Whether a call takes no time: it is answered from memory, or passed on to other threads or servers. A thread that receives
    /// for several connections serves such calls itself; should it have to wait then, it calls [`before_waiting`] first.
    fn serves_at_once(&self, _call: &Call) -> bool {
        false
    }

    /// How many threads may serve such calls at once, on a machine with so many processors.
    fn watches(processors: usize) -> usize {
        processors
    }

    /// Calls of several connections are served one after another on this thread: what is sent to other servers for them may wait for
    /// [`Service::end_round`].
    fn begin_round(&self) {}

    /// What has waited must leave.
    fn end_round(&self) {}

    /// The most that the body of the answer to a call may have, if memory for it is booked before it is made, bytes; 0: it is not.
    /// No call whose answer is booked has a payload, or asks for one.
    fn body_bytes_max(&self, _call: &Call) -> u64 {
        0
    }

    /// Of a data server: below which keys it has, or had, objects.
    fn held_keys(&self) -> HeldKeys {
        HeldKeys::default()
    }

    /// A client connected. A fault refuses it.
    fn open(&self, connection: &Arc<Connection>) -> Result<Self::Session, Fault>;

    /// Serves a call on its connection's thread; calls of one connection come in the order in which they were
    /// sent. The reply may be sent later, from any thread; other calls of the connection are read meanwhile.
    fn serve(&self, session: &mut Self::Session, request: Incoming, reply: Reply);

    /// The connection has ended. What of it is still queued should be dropped.
    fn close(&self, session: Self::Session);

    /// State and statistics, for status calls and metrics.
    fn status(&self) -> serde_json::Value;
}

/// A call as it came in.
pub struct Incoming {
    /// The call.
    pub call: Call,
    /// Its payload: of writes; of other calls it is empty.
    pub payload: Option<Buffer>,
}

/// Settings of a server's front.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name in the configuration.
    pub name: String,
    /// What it is.
    pub role: Role,
    /// Connections at once.
    pub max_connections: u32,
    /// Connections at once from one address.
    pub max_connections_per_address: u32,
    /// Bytes of requests and answers that one address may have under way.
    pub payload_bytes_per_address: u64,
    /// Largest payload of one request or reply, bytes.
    pub max_payload_bytes: u32,
    /// Bound of the memory for payloads, bytes.
    pub payload_bytes: u64,
    /// How long a request waits for payload memory before it fails with EBUSY.
    pub payload_patience: Duration,
    /// Longest time for which a connection's thread polls for a call before it sleeps, where that pays; zero: never.
    pub poll: Duration,
    /// The cluster that it belongs to.
    pub membership: Arc<Membership>,
    /// Number of its folder; 0 without one.
    pub store: u64,
    /// Of a data server: its number among those of its cluster.
    pub number: Option<u16>,
    /// The boot that it speaks of in the place of this machine's: of the machine that its folder came from, whose last writes
    /// are durable here.
    pub boot: Option<u32>,
    /// The keys of which peers must prove one, unless they must show certificates; passes are signed with them too. `None`:
    /// peers need no key.
    pub keys: Option<Arc<Keyring>>,
    /// The certificates of the server, if its peers must show theirs.
    pub certificates: Option<Arc<Certificates>>,
    /// What of the frames is protected where keys are used.
    pub protect: Protect,
    /// The rules that clients are under; `None`: none.
    pub exports: Option<Arc<Exports>>,
    /// What vouches for users of clients that have to prove which one they are.
    pub munge: Munge,
    /// Where it keeps its files, for people; empty: it has none.
    pub place: String,
}

impl Settings {
    /// Settings with the cluster's limits.
    pub fn new(name: &str, role: Role, cluster: &impresario_config::Cluster, payload_bytes: u64) -> Settings {
        Settings {
            name: name.into(),
            role,
            max_connections: cluster.max_connections,
            max_connections_per_address: cluster.max_connections_per_address,
            payload_bytes_per_address: payload_bytes / 100 * u64::from(cluster.payload_percent_per_address),
            max_payload_bytes: cluster.max_payload_bytes,
            payload_bytes,
            // Half of what the client is ready to wait, so that it hears of it.
            payload_patience: Duration::from_millis(cluster.request_timeout_ms / 2),
            poll: cluster.poll(),
            membership: Arc::default(),
            store: 0,
            number: None,
            boot: None,
            keys: None,
            certificates: None,
            protect: cluster.protect,
            exports: None,
            munge: Munge::at(cluster.munge_socket.as_deref()),
            place: String::new(),
        }
    }
}

/// A server whose address is taken; it answers after [`Server::start`].
pub struct Server {
    listening: Listening,
    shared: Arc<Shared>,
}

struct Shared {
    settings: Settings,
    address: String,
    incarnation: u64,
    started: Instant,
    pool: Arc<PayloadPool>,
    complaints: Complaints,
    failures: Failures,
    /// Why no call is served any more.
    folder_lost: OnceLock<String>,
    connections: Mutex<FxHashMap<u32, Arc<Connection>>>,
    addresses: Addresses,
    /// Connection threads that run; changes are signalled.
    threads: Mutex<u32>,
    fewer_threads: Condvar,
    /// Connections that have said nothing.
    silent: AtomicU32,
    /// Held once more by each connection whose hello is not complete, and by each that is refused with a message.
    ungreeted: Arc<()>,
    refusals: Arc<()>,
    next_id: AtomicU32,
    accepted: AtomicU64,
    refused: AtomicU64,
    evicted: AtomicU64,
    calls: AtomicU64,
    stopping: AtomicBool,
    wake: rustix::fd::OwnedFd,
}

/// What a service may ask of its front.
#[derive(Clone)]
pub struct Vitals(Arc<Shared>);

impl Vitals {
    /// The payload memory.
    pub fn pool(&self) -> &Arc<PayloadPool> {
        &self.0.pool
    }

    /// Name in the configuration.
    pub fn name(&self) -> &str {
        &self.0.settings.name
    }

    /// What the file system below the server has failed.
    pub(crate) fn failures(&self) -> &Failures {
        &self.0.failures
    }

    /// The folder is not where it was: from now on calls are refused, for this reason.
    pub(crate) fn lose_folder(&self, why: &str) {
        let _ = self.0.folder_lost.set(why.into()); // the first reason stays
    }

    /// Tells this run from others, and the boot of the machine ([`impresario_wire::same_boot`]).
    pub(crate) fn incarnation(&self) -> u64 {
        self.0.incarnation
    }

    /// What every server's status begins with: who it is, how long it runs, connections, payload memory.
    pub fn status(&self) -> serde_json::Map<String, serde_json::Value> {
        let shared = &self.0;
        let (used, peak, limit) = shared.pool.usage_bytes();
        let (connections, calls_under_way) = {
            let connections = shared.connections.lock();
            (connections.len(), connections.values().map(|c| u64::from(c.calls_under_way())).sum::<u64>())
        };
        let (paid, in_vain) = impresario_transport::polls();
        let status = serde_json::json!({
            "name": shared.settings.name,
            "role": match shared.settings.role { Role::Meta => "meta", Role::Data => "data", Role::Io => "io", Role::Any => "any" },
            "address": shared.address,
            "pid": std::process::id(),
            "cluster": shared.settings.membership.cluster().to_string(),
            "incarnation": format!("{:016x}", shared.incarnation),
            "uptime_s": shared.started.elapsed().as_secs_f64(),
            "connections": {
                "open": connections + shared.silent.load(Ordering::Relaxed) as usize,
                "max": shared.settings.max_connections,
                "accepted": shared.accepted.load(Ordering::Relaxed),
                "evicted": shared.evicted.load(Ordering::Relaxed),
                "refused": shared.refused.load(Ordering::Relaxed),
                "complaints": shared.complaints.count(),
                "calls": shared.calls.load(Ordering::Relaxed),
                "calls_under_way": calls_under_way,
            },
            "polls": { "paid": paid, "in_vain": in_vain },
            "memory": { "payload_bytes": used, "payload_bytes_peak": peak, "payload_bytes_max": limit },
        });
        let mut status = match status {
            serde_json::Value::Object(map) => map,
            _ => serde_json::Map::new(),
        };
        status.extend(shared.failures.as_json().map(|failures| ("failures".into(), failures)));
        status
    }
}

/// A server that runs; dropping it stops it.
pub struct Running {
    shared: Arc<Shared>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Takes the address: `host:port` (port 0: any free one) or `unix:/path`.
    pub fn bind(address: &str, settings: Settings) -> Result<Server, BindError> {
        let listening = Listening::bind(address)?;
        let fail = |reason: String, source| BindError { address: address.into(), reason, source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| fail("the system gives no event descriptor; raise its limits".into(), Some(e.into())))?;
        let incarnation = impresario_transport::new_incarnation()
            .map_err(|e| fail("the system gives no random numbers".into(), Some(e)))?;
        let incarnation = match settings.boot {
            Some(boot) => u64::from(boot) << 32 | incarnation & 0xffff_ffff,
            None => incarnation,
        };
        let shared = Shared {
            address: listening.address(),
            incarnation,
            started: Instant::now(),
            pool: PayloadPool::with_headroom(settings.payload_bytes, settings.max_payload_bytes.into()),
            complaints: Complaints::default(),
            failures: Failures::new(&settings.name, &settings.place),
            folder_lost: OnceLock::new(),
            connections: Mutex::default(),
            addresses: Addresses::new(settings.payload_bytes_per_address),
            threads: Mutex::default(),
            fewer_threads: Condvar::new(),
            silent: AtomicU32::new(0),
            ungreeted: Arc::default(),
            refusals: Arc::default(),
            next_id: AtomicU32::new(1),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            wake,
            settings,
        };
        let shared = Arc::new(shared);
        let weak = Arc::downgrade(&shared);
        shared.pool.relieve_by(move || weak.upgrade().iter().for_each(|shared| shared.close_those_that_owe()));
        Ok(Server { listening, shared })
    }

    /// The address that clients use, with the port that was really taken.
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// For the service that will be started on it.
    pub fn vitals(&self) -> Vitals {
        Vitals(self.shared.clone())
    }

    /// Begins to answer, on threads of its own.
    pub fn start<S: Service>(self, service: Arc<S>) -> io::Result<Running> {
        let Server { listening, shared } = self;
        let (accepting, together) = (shared.clone(), Arc::new(Together::new()?));
        let lobby = Lobby::new(&listening, &shared.wake)?;
        let acceptor = std::thread::Builder::new().name("accept".into()).stack_size(STACK_BYTES);
        let acceptor = acceptor.spawn(move || accept(&accepting, &listening, lobby, &service, &together))?;
        Ok(Running { shared, acceptor: Some(acceptor) })
    }
}

impl Running {
    /// The address that clients use.
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Reads keys and certificates again if their files have changed; false when there are none.
    pub fn refresh_keys(&self) -> bool {
        let Settings { keys, certificates, .. } = &self.shared.settings;
        keys.iter().for_each(|keys| _ = keys.refresh());
        certificates.iter().for_each(|certificates| _ = certificates.refresh());
        keys.is_some() || certificates.is_some()
    }

    /// Stops: no new connections or calls; accepted calls may finish, for at most five seconds.
    pub fn stop(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.shared.stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let _ = acceptor.join();
        let connections: Vec<_> = self.shared.connections.lock().values().cloned().collect();
        connections.iter().for_each(|connection| connection.receive_no_more());
        if !self.wait_for_threads(SETTLE_MAX + Duration::from_secs(1)) {
            connections.iter().for_each(|c| c.close());
            if !self.wait_for_threads(Duration::from_secs(2)) {
                tracing::warn!(name = self.shared.settings.name, "some connections did not end in time; left behind");
            }
        }
    }

    fn wait_for_threads(&self, patience: Duration) -> bool {
        let threads = self.shared.threads.lock();
        let waited = self.shared.fewer_threads.wait_timeout_while(threads, patience, |threads| *threads > 0);
        *waited.0 == 0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The accepting thread.
fn accept<S: Service>(
    shared: &Arc<Shared>,
    listening: &Listening,
    mut lobby: Lobby,
    service: &Arc<S>,
    together: &Arc<Together<S>>,
) {
    while !shared.stopping.load(Ordering::Acquire) {
        for ready in lobby.wait(lobby.next_expiry(GREETING_MAX)) {
            match ready {
                Ready::Newcomers => take_in(shared, listening, &mut lobby),
                Ready::Speaks(waiting) => admit(shared, service, together, waiting),
            }
        }
        while let Some(Waiting { peer, .. }) = lobby.expired(GREETING_MAX) {
            shared.complaints.about("peer", host_of(&peer), |_| {
                tracing::warn!(peer, "closed a connection: no hello came within {} s", GREETING_MAX.as_secs());
            });
        }
        shared.silent.store(lobby.len() as u32, Ordering::Relaxed);
    }
}

/// Takes new connections into the lobby.
fn take_in(shared: &Shared, listening: &Listening, lobby: &mut Lobby) {
    for _ in 0..NEWCOMERS_MAX {
        match listening.accept(PACE.stall) {
            Ok((stream, peer)) => {
                let admission = shared.make_room_for(&peer, lobby).map_err(|why| {
                    shared.refused.fetch_add(1, Ordering::Relaxed);
                    shared
                        .complaints
                        .about("peer", host_of(&peer), |_| tracing::warn!(peer, "refused a connection: {why}"));
                    Refusal { why, place: shared.refusals.clone() }
                });
                if admission.is_err() && Arc::strong_count(&shared.refusals) - 1 > REFUSALS_MAX {
                    continue;
                }
                shared.accepted.fetch_add(u64::from(admission.is_ok()), Ordering::Relaxed);
                if let Err(error) = lobby.enter(stream, peer, admission) {
                    shared.complaints.counted("accept", |_| tracing::warn!(%error, "cannot wait for a connection"));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                // Out of descriptors or memory: wait for connections to end instead of spinning.
                shared.complaints.counted("accept", |_| {
                    tracing::warn!(%error, "cannot accept connections; raise the limit of open files (ulimit -n)");
                });
                return std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Gives a connection its thread, on which it is served or told why it is refused.
fn admit<S: Service>(shared: &Arc<Shared>, service: &Arc<S>, together: &Arc<Together<S>>, waiting: Waiting) {
    let Waiting { stream, peer, admission, .. } = waiting;
    let stream = Arc::new(stream);
    let (tenancy, refusal, place) = match admission {
        Ok(tenancy) => (Some(tenancy), None, None),
        Err(Refusal { why, place }) => (None, Some(why), Some(place)),
    };
    let is_refused = refusal.is_some();
    let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
    let outbox = Outbox::new(stream.clone(), peer.clone(), shared.pool.clone());
    let bytes_max = (shared.settings.payload_bytes / 2).max(u64::from(shared.settings.max_payload_bytes));
    let connection = Connection::new(ConnId(id), peer, outbox, shared.pool.clone(), bytes_max, tenancy);
    let ungreeted = (!is_refused).then(|| shared.ungreeted.clone());
    if !is_refused {
        shared.connections.lock().insert(id, connection.clone());
    }
    *shared.threads.lock() += 1;
    let (here, service, together) = (shared.clone(), service.clone(), together.clone());
    let thread = std::thread::Builder::new().name(format!("conn-{id}")).stack_size(STACK_BYTES);
    let spawned = thread.spawn(move || {
        let served = catch_unwind(AssertUnwindSafe(|| {
            here.converse(&service, &together, &connection, stream, refusal, ungreeted)
        }));
        if served.is_err() {
            tracing::error!(peer = connection.peer(), "a connection's thread panicked; the connection is closed");
        }
        connection.close();
        outbox::serve_on_this_thread(None);
        // A thread that waits for the end of this one relies on the service being released.
        drop((service, place));
        here.ended(id);
    });
    if let Err(error) = spawned {
        shared.complaints.counted("thread", |_| tracing::warn!(%error, "no thread for a connection; raise ulimit -u"));
        shared.ended(id);
    }
}

impl Shared {
    /// Books the end of a connection's thread.
    fn ended(&self, id: u32) {
        drop(self.connections.lock().remove(&id));
        *self.threads.lock() -= 1;
        self.fewer_threads.notify_all();
    }
}
