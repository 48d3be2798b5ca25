//! The front of every server: accepts connections, greets, reads calls and hands them to its [`Service`];
//! keeps the limits, survives peers that speak nonsense, and ends gracefully.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_config::Protect;
use impresario_node::credits::{SLICE_BYTES, owes_too_long};
use impresario_sched::ConnId;
use impresario_transport::{
    BindError, FrameReader, HelloError, Host, Keyring, Listening, Membership, Pace, Stream, TransportError,
    receive_hello,
};
use impresario_wire::{Answer, Call, Fault, Kind, Limits, PROTOCOL_VERSION, Role, Welcome, frame, may_send};
use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::Shutdown;

use crate::addresses::{Addresses, Tenancy};
use crate::complaints::Complaints;
use crate::connection::{self, Connection, Denied, Reply};
use crate::outbox::{self, Bulk, OutFrame, Outbox, STACK_BYTES};
use crate::payload::{Buffer, PayloadPool};

/// The hand-shake must be over after this time.
const GREETING_MAX: Duration = Duration::from_secs(5);
/// Enough for the header, body and payload of a 16 KiB write; larger payloads mostly bypass the buffer, bytes.
const BUFFER_BYTES: usize = 20 << 10;
/// How fast a peer must send a frame that it has begun.
const PACE: Pace = Pace { stall: Duration::from_secs(10), frame: Duration::from_secs(120) };
/// How often a connection that is used is asked whether its key is still accepted.
const KEY_CHECK_EVERY: Duration = Duration::from_secs(1);
/// A refused peer has this time to read why.
const FAREWELL_MAX: Duration = Duration::from_millis(300);
/// A connection that has been idle for less is not closed for another.
const IDLE_MIN: Duration = Duration::from_millis(500);
/// The same for one of the machine that the other is from, or of one that has no more.
const IDLE_MIN_OF_EQUALS: Duration = Duration::from_secs(60);
/// This many connections may always be silent before their hello; beyond that, half of all.
const UNPROVEN_MIN: usize = 16;
/// Threads of connections that were closed and have not ended yet, beyond which no connection is taken.
const CLOSING_MAX: usize = 64;
/// When stopping: how long accepted calls may take to finish.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// Connections over the limit that are refused with a message; further ones are closed at once.
const REFUSALS_MAX: u32 = 32;

/// What a server does with its clients' calls.
pub trait Service: Send + Sync + 'static {
    /// What is kept for each connection, and dropped by [`Service::close`].
    type Session: Send + 'static;

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
    /// The cluster that it belongs to.
    pub membership: Arc<Membership>,
    /// Number of its folder; 0 without one.
    pub store: u64,
    /// The keys of which peers must prove one; `None`: they need none.
    pub keys: Option<Arc<Keyring>>,
    /// What of the frames is protected where keys are used.
    pub protect: Protect,
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
            membership: Arc::default(),
            store: 0,
            keys: None,
            protect: cluster.protect,
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
    connections: Mutex<FxHashMap<u32, Arc<Connection>>>,
    addresses: Addresses,
    /// Connection threads that run; changes are signalled.
    threads: Mutex<u32>,
    fewer_threads: Condvar,
    refusals: AtomicU32,
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
        let status = serde_json::json!({
            "name": shared.settings.name,
            "role": match shared.settings.role { Role::Meta => "meta", Role::Data => "data", Role::Io => "io", Role::Any => "any" },
            "address": shared.address,
            "pid": std::process::id(),
            "cluster": shared.settings.membership.cluster().to_string(),
            "incarnation": format!("{:016x}", shared.incarnation),
            "uptime_s": shared.started.elapsed().as_secs_f64(),
            "connections": {
                "open": connections,
                "max": shared.settings.max_connections,
                "accepted": shared.accepted.load(Ordering::Relaxed),
                "evicted": shared.evicted.load(Ordering::Relaxed),
                "refused": shared.refused.load(Ordering::Relaxed),
                "complaints": shared.complaints.count(),
                "calls": shared.calls.load(Ordering::Relaxed),
                "calls_under_way": calls_under_way,
            },
            "memory": { "payload_bytes": used, "payload_bytes_peak": peak, "payload_bytes_max": limit },
        });
        match status {
            serde_json::Value::Object(map) => map,
            _ => serde_json::Map::new(),
        }
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
        let shared = Shared {
            address: listening.address(),
            incarnation,
            started: Instant::now(),
            pool: PayloadPool::with_headroom(settings.payload_bytes, settings.max_payload_bytes.into()),
            complaints: Complaints::default(),
            connections: Mutex::default(),
            addresses: Addresses::new(settings.payload_bytes_per_address),
            threads: Mutex::default(),
            fewer_threads: Condvar::new(),
            refusals: AtomicU32::new(0),
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
        let accepting = shared.clone();
        let acceptor = std::thread::Builder::new().name("accept".into()).stack_size(STACK_BYTES);
        let acceptor = acceptor.spawn(move || accept(&accepting, &listening, &service))?;
        Ok(Running { shared, acceptor: Some(acceptor) })
    }
}

impl Running {
    /// The address that clients use.
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Reads the keys again if their file has changed; false when there are none.
    pub fn refresh_keys(&self) -> bool {
        let keys = self.shared.settings.keys.as_ref();
        keys.inspect(|keys| _ = keys.refresh()).is_some()
    }

    /// Stops: no new connections or calls; accepted calls may finish, for at most five seconds.
    pub fn stop(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.shared.stopping.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        let _ = acceptor.join();
        let connections: Vec<_> = self.shared.connections.lock().values().cloned().collect();
        for connection in &connections {
            connection.outbox.shutdown(Shutdown::Read);
        }
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
fn accept<S: Service>(shared: &Arc<Shared>, listening: &Listening, service: &Arc<S>) {
    while !shared.stopping.load(Ordering::Acquire) {
        match listening.accept(PACE.stall) {
            Ok((stream, peer)) => admit(shared, service, stream, peer),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(listening, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
                let _ = poll(&mut fds, None);
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                // Out of descriptors or memory: wait for connections to end instead of spinning.
                shared.complaints.about("accept", || {
                    tracing::warn!(%error, "cannot accept connections; raise the limit of open files (ulimit -n)");
                });
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Gives a connection its thread, or refuses it.
fn admit<S: Service>(shared: &Arc<Shared>, service: &Arc<S>, stream: Stream, peer: String) {
    let stream = Arc::new(stream);
    let (refusal, tenancy) = match shared.make_room_for(&peer) {
        Ok(tenancy) => (None, Some(tenancy)),
        Err(why) => (Some(why), None),
    };
    let full = refusal.is_some();
    if let Some(why) = &refusal {
        shared.refused.fetch_add(1, Ordering::Relaxed);
        shared.complaints.about(host_of(&peer), || tracing::warn!(peer, "refused a connection: {why}"));
        if shared.refusals.fetch_add(1, Ordering::AcqRel) >= REFUSALS_MAX {
            shared.refusals.fetch_sub(1, Ordering::AcqRel);
            return;
        }
    }
    shared.accepted.fetch_add(u64::from(!full), Ordering::Relaxed);
    let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
    let outbox = Outbox::new(stream.clone(), shared.pool.clone());
    let bytes_max = (shared.settings.payload_bytes / 2).max(u64::from(shared.settings.max_payload_bytes));
    let connection = Connection::new(ConnId(id), peer, outbox, shared.pool.clone(), bytes_max, tenancy);
    if !full {
        shared.connections.lock().insert(id, connection.clone());
    }
    *shared.threads.lock() += 1;
    let (here, service) = (shared.clone(), service.clone());
    let thread = std::thread::Builder::new().name(format!("conn-{id}")).stack_size(STACK_BYTES);
    let spawned = thread.spawn(move || {
        let served = catch_unwind(AssertUnwindSafe(|| here.converse(&*service, &connection, stream, refusal)));
        if served.is_err() {
            tracing::error!(peer = connection.peer(), "a connection's thread panicked; the connection is closed");
        }
        connection.close();
        outbox::serve_on_this_thread(None);
        // A thread that waits for the end of this one relies on the service being released.
        drop(service);
        here.ended(id, full);
    });
    if let Err(error) = spawned {
        shared.complaints.about("thread", || tracing::warn!(%error, "no thread for a connection; raise ulimit -u"));
        shared.ended(id, full);
    }
}

impl Shared {
    /// Finds a place for a connection from `peer`; where there is none, closes one of the machine that has most: one that is
    /// silent before its hello, else the idlest. None is closed in favour of a machine that would then have the most.
    /// The error is what to tell the peer.
    fn make_room_for(&self, peer: &str) -> Result<Tenancy, String> {
        let Settings { name, max_connections, max_connections_per_address, .. } = &self.settings;
        let max = *max_connections as usize;
        let full = || format!("{name} has its {max} connections (max_connections); try again later");
        if *self.threads.lock() as usize >= max + CLOSING_MAX {
            return Err(full());
        }
        let ours = host_of(peer);
        let tenancy = self.addresses.enter(ours, *max_connections_per_address).map_err(|has| {
            format!(
                "{name} has {has} connections from {ours}, of {max_connections_per_address} that an address may have \
                 (max_connections_per_address); close some, or raise it"
            )
        })?;
        let mut connections = self.connections.lock();
        let unproven = connections.values().filter(|connection| !connection.is_greeted()).count();
        if connections.len() < max && unproven < (max / 2).max(UNPROVEN_MIN) {
            return Ok(tenancy);
        }
        let mut counts: FxHashMap<&str, usize> = FxHashMap::default();
        connections.values().for_each(|connection| *counts.entry(connection.host()).or_default() += 1);
        let most = counts.iter().max_by_key(|(_, count)| **count).map(|(host, count)| (*host, *count));
        let own = counts.get(ours).copied().unwrap_or(0);
        let (host, idle_min) = match most {
            Some((host, count)) if count > own + 1 => (host, IDLE_MIN),
            _ => (ours, IDLE_MIN_OF_EQUALS),
        };
        let standing = |connection: &&Arc<Connection>| {
            let idle = connection.idle_for().filter(|idle| connection.host() == host && *idle >= IDLE_MIN)?;
            let silent = !connection.is_greeted();
            (silent || idle >= idle_min).then_some((silent, idle))
        };
        let of_unproven = connections.len() < max;
        let silent = |c: &&Arc<Connection>| !c.is_greeted() && c.idle_for().is_some_and(|idle| idle >= IDLE_MIN);
        let victim = match of_unproven {
            // Half of the connections may be silent before their hello; the longest of them goes.
            true => connections.values().filter(silent).max_by_key(|c| c.idle_for()).cloned(),
            false => connections.values().filter(|c| standing(c).is_some()).max_by_key(standing).cloned(),
        };
        let Some(victim) = victim else {
            return Err(match of_unproven {
                true => format!("{name} has {unproven} connections that have not said hello; try again later"),
                false => full(),
            });
        };
        self.complaints.about(victim.host(), || {
            tracing::warn!(peer = victim.peer(), name = victim.name(), max, "closed an idle connection for a new one");
        });
        connections.remove(&victim.id().0);
        drop(connections);
        self.evicted.fetch_add(1, Ordering::Relaxed);
        victim.close();
        Ok(tenancy)
    }

    /// Others wait for memory: closes the connections that announced bytes for a write and send them too slowly.
    fn close_those_that_owe(&self) {
        let owing = |connection: &&Arc<Connection>| owes_too_long(connection.owes_for());
        let slow: Vec<_> = self.connections.lock().values().filter(owing).cloned().collect();
        for connection in slow {
            self.complaints.about(connection.host(), || {
                tracing::warn!(
                    peer = connection.peer(),
                    "closed a connection: it holds memory for bytes that it does not send"
                );
            });
            connection.close();
        }
    }

    /// Why a request is not taken: memory is short, and whose requests hold most of it.
    fn busy(&self) -> Fault {
        let connections: Vec<_> = self.connections.lock().values().cloned().collect();
        let mut held: FxHashMap<&str, (u64, u32)> = FxHashMap::default();
        for connection in &connections {
            let (bytes, count) = held.entry(connection.host()).or_default();
            *bytes += connection.bytes_under_way();
            *count += 1;
        }
        let most = held.iter().max_by_key(|(_, held)| **held);
        let whose = most.map_or_else(String::new, |(host, (bytes, count))| {
            format!("; {host} with {count} connections has {} KiB of it", bytes / 1024)
        });
        let name = &self.settings.name;
        let message = format!("{name} is busy: it has no memory for this request{whose}; raise payload_bytes");
        Fault { errno: libc::EBUSY, message }
    }

    /// The same where the peer's address has its share.
    fn busy_with(&self, host: &str) -> Fault {
        let Settings { name, payload_bytes_per_address, .. } = &self.settings;
        let message = format!(
            "{name} is busy: {host} has the {} KiB of requests and answers under way that an address may have \
             (payload_percent_per_address)",
            payload_bytes_per_address / 1024
        );
        Fault { errno: libc::EBUSY, message }
    }

    /// Books the end of a connection's thread.
    fn ended(&self, id: u32, was_refused: bool) {
        match was_refused {
            true => drop(self.refusals.fetch_sub(1, Ordering::AcqRel)),
            false => drop(self.connections.lock().remove(&id)),
        }
        *self.threads.lock() -= 1;
        self.fewer_threads.notify_all();
    }

    /// The whole life of a connection.
    fn converse<S: Service>(
        &self,
        service: &S,
        connection: &Arc<Connection>,
        stream: Arc<Stream>,
        refusal: Option<String>,
    ) {
        outbox::serve_on_this_thread(Some(connection.outbox.clone()));
        let limits = Limits { max_payload_bytes: self.settings.max_payload_bytes };
        let mut receiver = Receiver { stream, reader: FrameReader::new(BUFFER_BYTES), limits };
        let greeted = self.greet(&mut receiver, connection, refusal);
        let session = greeted.and_then(|()| service.open(connection).map_err(|fault| Farewell::Fault(0, fault)));
        let mut session = match session {
            Ok(session) => session,
            Err(farewell) => return self.farewell(farewell, &mut receiver, connection),
        };
        let farewell = loop {
            if self.stopping.load(Ordering::Acquire) || connection.has_ended() {
                break Farewell::Silent;
            }
            let next = AssertUnwindSafe(|| self.next_call(service, &mut session, &mut receiver, connection));
            match catch_unwind(next) {
                Ok(Ok(())) => {}
                Ok(Err(farewell)) => break farewell,
                Err(_) => {
                    tracing::error!(peer = connection.peer(), "serving a call panicked; its connection is closed");
                    break Farewell::Silent;
                }
            }
            connection.outbox.drain_own();
        };
        if self.stopping.load(Ordering::Acquire) {
            // Replies made from here on must not wait for this thread.
            outbox::serve_on_this_thread(None);
            connection.settle(Instant::now() + SETTLE_MAX);
        }
        service.close(session);
        self.farewell(farewell, &mut receiver, connection);
    }

    /// Hello and welcome.
    fn greet(&self, receiver: &mut Receiver, connection: &Connection, refusal: Option<String>) -> Result<(), Farewell> {
        let settings = &self.settings;
        let keys = settings.keys.as_deref().map(|keys| (keys, settings.protect));
        let host = Host { name: &settings.name, role: settings.role, membership: &settings.membership, keys };
        let Receiver { stream, reader, limits } = receiver;
        let received = receive_hello(stream, reader, host, limits, Instant::now() + GREETING_MAX);
        // A refusal is protected too, once both sides have keys.
        stream.session().inspect(|session| connection.outbox.protect((*session).clone()));
        let (id, hello, guest) = match received {
            Ok(hello) => hello,
            Err(HelloError::Broken(error)) => return Err(Farewell::Broken(error)),
            Err(HelloError::Refused(id, fault)) => return Err(Farewell::Fault(id, fault)),
        };
        if let Some(message) = refusal {
            return Err(Farewell::Fault(id, Fault { errno: libc::EUSERS, message }));
        }
        let name: String = hello.name.chars().filter(|c| !c.is_control()).take(256).collect();
        tracing::debug!(peer = connection.peer(), name, job = hello.who.job, "connected");
        connection.introduce(name, hello.who, guest);
        let welcome = Welcome {
            version: PROTOCOL_VERSION,
            name: settings.name.clone(),
            incarnation: self.incarnation,
            max_payload_bytes: settings.max_payload_bytes,
            cluster: settings.membership.cluster(),
            store: settings.store,
        };
        let head = frame::encode(Kind::Welcome, id, &welcome, 0).map_err(TransportError::from)?;
        connection.outbox.send(OutFrame::new(head, Bulk::None, None));
        connection.outbox.drain_own();
        Ok(())
    }

    /// Reads one call and has it served.
    fn next_call<S: Service>(
        &self,
        service: &S,
        session: &mut S::Session,
        receiver: &mut Receiver,
        connection: &Arc<Connection>,
    ) -> Result<(), Farewell> {
        let Receiver { stream, reader, limits } = receiver;
        let (header, body) = reader.next_frame_paced(stream, limits, &PACE)?;
        let refuse = |errno, message: String| Farewell::Fault(header.id, Fault { errno, message });
        if header.kind != Kind::Call {
            return Err(refuse(libc::EPROTO, format!("only calls are expected here, not {:?}", header.kind)));
        }
        let call: Call = frame::decode_body(body)
            .map_err(|e| refuse(libc::EPROTO, format!("this is no call that version {PROTOCOL_VERSION} knows: {e}")))?;
        self.check_key(connection)?;
        if let Err(fault) = self.check_right(connection, &call) {
            reader.skip_payload_paced(stream, header.payload_len as usize, &PACE)?;
            return self.refuse(connection, header.id, &fault);
        }
        let bytes = match &call {
            Call::Write { .. } | Call::WriteMerged { .. } | Call::FileWrite { .. } => u64::from(header.payload_len),
            _ if header.payload_len > 0 => {
                return Err(refuse(libc::EPROTO, "only writes carry a payload".into()));
            }
            Call::ReadList { extents, .. } => match extents.check(self.settings.max_payload_bytes.into()) {
                Ok(bytes) => bytes,
                Err(bad) => {
                    let fault = Fault { errno: libc::EINVAL, message: bad.to_string() };
                    return self.refuse(connection, header.id, &fault);
                }
            },
            call => call.answer_bytes().unwrap_or(0),
        };
        let max = self.settings.max_payload_bytes;
        if bytes > u64::from(max) {
            let message = format!("{bytes} bytes were asked for at once; at most {max} (max_payload_bytes) are given");
            return self.refuse(connection, header.id, &Fault { errno: libc::EINVAL, message });
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        connection.note_call();
        let patience = self.settings.payload_patience;
        let is_write = matches!(call, Call::Write { .. } | Call::WriteMerged { .. } | Call::FileWrite { .. });
        let first = if is_write { self.pool.first_slice_bytes(bytes) } else { bytes };
        let mut slot = match connection.admit(first, patience) {
            Ok(slot) => slot,
            Err(_) if connection.has_ended() || connection.outbox.peer_is_gone() => return Err(Farewell::Silent),
            Err(denied) => {
                reader.skip_payload_paced(stream, header.payload_len as usize, &PACE)?;
                let fault = if denied == Denied::Address { self.busy_with(connection.host()) } else { self.busy() };
                return self.refuse(connection, header.id, &fault);
            }
        };
        let mut payload = None;
        if is_write {
            let mut buffer = self.pool.buffer(header.payload_len as usize);
            let (mut from, mut to) = (0, first as usize);
            loop {
                connection.note_owing(true);
                let slice = buffer.get_mut(from..to).unwrap_or(&mut []);
                let received = reader.read_payload_paced(stream, slice, &PACE);
                connection.note_owing(false);
                received?;
                if to == buffer.len() {
                    break;
                }
                (from, to) = (to, buffer.len().min(to + SLICE_BYTES as usize));
                if !slot.grow((to - from) as u64, patience) {
                    let left = buffer.len() - from;
                    drop((buffer, slot));
                    reader.skip_payload_paced(stream, left, &PACE)?;
                    return self.refuse(connection, header.id, &self.busy());
                }
            }
            payload = Some(buffer);
        }
        let reply = Reply::new(header.id, slot);
        service.serve(session, Incoming { call, payload }, reply);
        Ok(())
    }

    /// Ends a connection whose key has been replaced and is no longer accepted. Its client comes back with the present one.
    fn check_key(&self, connection: &Connection) -> Result<(), Farewell> {
        let Some(ring) = &self.settings.keys else { return Ok(()) };
        let Some(key) = connection.guest().and_then(|guest| guest.key) else { return Ok(()) };
        if !connection.is_due(KEY_CHECK_EVERY) || ring.accepts(key) {
            return Ok(());
        }
        let name = &self.settings.name;
        let message =
            format!("{name}: key {key:016x} was replaced and is no longer accepted; use the present key file");
        Err(Farewell::Fault(0, Fault { errno: libc::EKEYEXPIRED, message }))
    }

    /// Whether the peer may send the call.
    fn check_right(&self, connection: &Connection, call: &Call) -> Result<(), Fault> {
        let Some(guest) = connection.guest() else { return Ok(()) };
        if let Some(role) = guest.role {
            may_send(role, connection.who().client, call).map_err(|why| {
                let name = &self.settings.name;
                let message = match guest.key {
                    Some(_) => format!("{name}: {why}"),
                    None => format!("{name}: {why}, as its user is neither the server's nor root"),
                };
                Fault { errno: libc::EPERM, message }
            })?;
        }
        Ok(())
    }

    /// Answers a call that is not served. The answer takes a slot as every other does: a peer that reads none of them is
    /// given no further call.
    fn refuse(&self, connection: &Arc<Connection>, id: u64, fault: &Fault) -> Result<(), Farewell> {
        let Some(slot) = connection.admit_answer() else { return Err(Farewell::Silent) };
        Reply::new(id, slot).send(&Answer::Fault(fault.clone()));
        Ok(())
    }

    /// The last words to a peer.
    fn answer_unadmitted(&self, connection: &Connection, id: u64, fault: Fault) {
        if let Ok(head) = connection::encode(id, &Answer::Fault(fault), 0) {
            connection.outbox.send(OutFrame::new(head, Bulk::None, None));
        }
    }

    /// Says why, where that is possible, and closes.
    fn farewell(&self, farewell: Farewell, receiver: &mut Receiver, connection: &Connection) {
        let (id, fault) = match farewell {
            Farewell::Silent | Farewell::Broken(TransportError::Closed | TransportError::Io(_)) => {
                return connection.close();
            }
            Farewell::Broken(broken) => {
                (0, Fault { errno: libc::EPROTO, message: format!("{}: {broken}", self.settings.name) })
            }
            Farewell::Fault(id, fault) => (id, fault),
        };
        let peer = connection.peer();
        self.complaints.about(connection.host(), || {
            tracing::warn!(peer, name = connection.name(), reason = fault.message, "closing a connection");
        });
        self.answer_unadmitted(connection, id, fault);
        connection.outbox.drain_own();
        connection.outbox.shutdown(Shutdown::Write);
        receiver.reader.drain(&receiver.stream, Instant::now() + FAREWELL_MAX);
        connection.close();
    }
}

/// The machine that a peer speaks from; all peers on Unix sockets are one.
fn host_of(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(host, _)| host)
}

/// The receiving end of a connection.
struct Receiver {
    stream: Arc<Stream>,
    reader: FrameReader,
    limits: Limits,
}

/// Why a connection is ended by us.
enum Farewell {
    /// Without a message.
    Silent,
    /// Receiving failed.
    Broken(TransportError),
    /// With a message to the peer.
    Fault(u64, Fault),
}

impl From<TransportError> for Farewell {
    fn from(broken: TransportError) -> Farewell {
        Farewell::Broken(broken)
    }
}
