//! A link to one service: a connection that is made anew when it is lost, and calls that survive that.
//!
//! A link has one route, or several equivalent ones (the I/O nodes): when a connection ends or cannot be made it goes
//! on to the next. Calls are repeated on a new connection until their deadline, as far as that is safe:
//! - what only reads, and control calls, always;
//! - what changes data, when the link's own client is the sender: the connection that was given up raised its epoch, so
//!   that a late first copy is refused by every server that has seen the repetition;
//! - data calls passed on for another client, and metadata calls, only if nothing of them was sent. Otherwise they fail
//!   with [`ClientError::Lost`], and their client decides.

use std::io::IoSlice;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_config::{Address, Config, Server};
use impresario_node::session::{Next, Patience, Routes};
use impresario_transport::Access;
use impresario_wire::{Answer, Call, ClusterId, FileKey, Hello, PROTOCOL_VERSION, Role, Welcome, Who};

use crate::clock::{instant, nanos, span};
use crate::connection::{Connection, Greeting};
use crate::error::{ClientError, Peer};
use crate::identity::{Identity, whoami};
use crate::pending::{Buffers, Pending, Reply};
use crate::unattended::Task;
use crate::whereabouts::Whereabouts;

/// A further check of a server's welcome; the error is what is wrong, with the remedy.
#[derive(Clone)]
pub struct Vet(pub Arc<Check>);

/// The check itself.
pub type Check = dyn Fn(&Welcome) -> Result<(), String> + Send + Sync;

impl std::fmt::Debug for Vet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Vet")
    }
}

/// The place of a data server in a configuration: layouts of files name it by that.
#[derive(Clone, Debug)]
pub struct ServerPosition {
    number: u16,
    file: PathBuf,
}

impl ServerPosition {
    /// Of a server of that name; `None` if it is no data server.
    pub fn of(config: &Config, name: &str) -> Option<ServerPosition> {
        match config.server(name) {
            Ok(Server::Data(number, _)) => {
                Some(ServerPosition { number: number as u16, file: config.cluster.file.path().into() })
            }
            _ => None,
        }
    }

    /// Compares with what the server says: with another order, files would be read from, and written to, servers that have other
    /// parts of them.
    pub(crate) fn check(&self, welcome: &Welcome) -> Result<(), String> {
        let Some(theirs) = welcome.number.filter(|theirs| *theirs != self.number) else { return Ok(()) };
        let file = match self.file.as_os_str().is_empty() {
            true => "the configuration".into(),
            false => self.file.display().to_string(),
        };
        Err(format!(
            "it has the place {} among the data servers of its cluster, but the place {} in {file}: the sections [[data]] are in \
             another order there, and files would get the bytes of others; nothing was read from the server or written to it. Copy the \
             file of the metadata server's machine to this one, and start this program again",
            u32::from(theirs) + 1,
            u32::from(self.number) + 1,
        ))
    }
}

/// How a link behaves.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// Role of the servers.
    pub role: Role,
    /// Who says hello.
    pub who: Who,
    /// Name of this program for the servers' logs.
    pub name: String,
    /// How long a call may take unless it says otherwise; scales the patience with servers that are silent.
    pub timeout: Duration,
    /// Longest payload of a call or an answer, bytes.
    pub max_payload_bytes: u32,
    /// Longest time for which a thread that waits for an answer polls before it sleeps, where that pays; zero: never.
    pub poll: Duration,
    /// Try again until the deadline when no server can be reached; otherwise fail at once.
    pub keep_trying: bool,
    /// What a server's welcome must pass beside the checks of every client.
    pub vet: Option<Vet>,
    /// Where a data server is in the configuration; `None`: not compared.
    pub place: Option<ServerPosition>,
    /// The keys that it shows to servers that want one.
    pub access: Access,
    /// Its calls wait on while a limit withholds them. Where they do not, only those that are [watched](crate::Watch) do: a server's own
    /// work must not wait for hours.
    pub waits_for_limits: bool,
    /// Where the server of a link is looked up when it is not where it was; `None`: nowhere.
    pub whereabouts: Option<Whereabouts>,
}

impl LinkOptions {
    /// For servers of a role: ten seconds for a call, an anonymous hello, no polling, no keys.
    pub fn new(role: Role, max_payload_bytes: u32) -> LinkOptions {
        let timeout = Duration::from_secs(10);
        let (who, name, access) = (Who::default(), String::new(), Access::default());
        let (vet, place, whereabouts, poll) = (None, None, None, Duration::ZERO);
        LinkOptions {
            role,
            who,
            name,
            timeout,
            max_payload_bytes,
            poll,
            keep_trying: true,
            vet,
            place,
            access,
            waits_for_limits: true,
            whereabouts,
        }
    }
}

/// A reconnecting connection that many threads share.
pub struct Link {
    options: LinkOptions,
    hello: Hello,
    identity: Arc<Identity>,
    state: Mutex<State>,
    changed: Condvar,
}

/// The ways to a service: what is found out about them is valid while they are the same.
type Ways = Arc<[Route]>;

struct Route {
    peer: Peer,
    address: Address,
}

struct State {
    connection: Option<Arc<Connection>>,
    ways: Ways,
    routes: Routes,
    /// Why the last connection or attempt came to nothing.
    cause: String,
}

impl Link {
    /// A link to a service behind `(name, address)` routes, of which the first is tried first. Nothing is connected
    /// yet. An empty name accepts whatever server answers there.
    pub fn new(routes: &[(&str, &str)], identity: Arc<Identity>, options: LinkOptions) -> Result<Link, ClientError> {
        let ways: Ways = routes.iter().map(|(name, address)| route_to(name, address)).collect::<Result<_, _>>()?;
        if ways.is_empty() {
            return Err(ClientError::invalid("a link needs the address of at least one server"));
        }
        let mut name = options.name.clone();
        name.truncate((0..=256.min(name.len())).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0));
        let (version, cluster) = (PROTOCOL_VERSION, ClusterId::default());
        let hello = Hello { version, who: options.who, role: options.role, name, cluster, credential: Vec::new() };
        let routes = Routes::new(ways.len(), 0);
        let state = State { connection: None, ways, routes, cause: String::new() };
        Ok(Link { options, hello, identity, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// A link to the server of that name in a configuration, wherever that says it may be.
    pub fn to(config: &Config, name: &str, identity: Arc<Identity>, options: LinkOptions) -> Result<Link, ClientError> {
        let addresses = config.addresses(name);
        let routes: Vec<(&str, &str)> = addresses.iter().map(|address| (name, address.as_str())).collect();
        Link::new(&routes, identity, LinkOptions { place: ServerPosition::of(config, name), ..options })
    }

    /// For a program that asks a server under its own name, and waits for none that is away.
    pub fn asking(
        (name, address): (&str, &str),
        identity: &Arc<Identity>,
        options: LinkOptions,
    ) -> Result<Link, ClientError> {
        let options = LinkOptions { who: identity.who(), name: whoami().1, keep_trying: false, ..options };
        Link::new(&[(name, address)], identity.clone(), options)
    }

    /// The server that the link speaks to, or would speak to next.
    pub fn peer(&self) -> Peer {
        let state = self.state.lock();
        match &state.connection {
            Some(connection) => connection.peer.clone(),
            None => state
                .ways
                .get(state.routes.at())
                .map(|route| route.peer.clone())
                .unwrap_or(Peer { name: String::new(), address: String::new() }),
        }
    }

    /// The client that the link's calls are from, unless they say otherwise.
    pub fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    /// How the link behaves.
    pub fn options(&self) -> &LinkOptions {
        &self.options
    }

    /// Sends a call; `payload` is what a write carries. Never fails: [`Pending::wait`] reports what went wrong, after it
    /// has tried to mend it. Waits at most until `deadline`.
    pub fn start<'a>(&'a self, call: Call, payload: &'a [IoSlice<'a>], deadline: Instant) -> Pending<'a> {
        let mut pending = Pending::new(self, call, payload, None);
        pending.launch(deadline);
        pending
    }

    /// One call from sending to answer; the answer's payload goes into `into`.
    pub fn call(
        &self,
        call: Call,
        payload: &[IoSlice<'_>],
        into: Buffers<'_, '_>,
        deadline: Instant,
    ) -> Result<Reply, ClientError> {
        self.start(call, payload, deadline).wait(into, deadline)
    }

    /// One call without payload, within the time that the link gives its calls.
    pub fn ask(&self, call: Call) -> Result<Answer, ClientError> {
        self.call(call, &[], None, Instant::now() + self.options.timeout).map(|reply| reply.answer)
    }

    /// Sends a call that no thread waits for, if there is a connection: the task hears what comes of this one attempt. Otherwise
    /// gives the task back.
    pub fn start_unattended(
        &self,
        call: &Call,
        want_bytes: u32,
        task: Box<dyn Task>,
        deadline: Instant,
    ) -> Result<(), Box<dyn Task>> {
        let connection = self.state.lock().connection.clone().filter(|connection| connection.broken().is_none());
        match connection {
            Some(connection) => connection.start_unattended(call, want_bytes, task, deadline),
            None => Err(task),
        }
    }

    /// A call that makes sense only on the connection `session`: it is sent there once or not at all
    /// ([`ClientError::SessionEnded`]).
    pub fn call_in(&self, session: u64, call: Call, deadline: Instant) -> Result<Reply, ClientError> {
        self.call_under(session, call, None, deadline)
    }

    /// The same for a change of a file, which is not made when its locks are lost.
    pub(crate) fn call_under(
        &self,
        session: u64,
        call: Call,
        under: Option<FileKey>,
        deadline: Instant,
    ) -> Result<Reply, ClientError> {
        let mut pending = Pending::new(self, call, &[], Some(session)).under(under);
        pending.launch(deadline);
        pending.wait(None, deadline)
    }

    /// Sends a call of that kind, which the connection is asked for its answer later; `None` where that is not possible.
    pub(crate) fn start_in(&self, session: u64, call: &Call, deadline: Instant) -> Option<(Arc<Connection>, u64)> {
        let connection = self.connection_in(session).ok()?;
        let id = connection.start(call, &[], 0, None, deadline).ok()?;
        Some((connection, id))
    }

    /// Number of the present connection, made if need be. It is unique in this process: another number means that the
    /// server has ended what was open on the connection before.
    pub fn session(&self, deadline: Instant) -> Result<u64, ClientError> {
        self.connection(Instant::now(), deadline).map(|connection| connection.session)
    }

    /// Number of the present connection, if there is one and it is sound as far as is known. Never waits for the server.
    pub fn session_now(&self) -> Option<u64> {
        let connection = self.state.lock().connection.clone()?;
        connection.check_idle().is_none().then_some(connection.session)
    }

    /// Ends the present connection, if any; calls under way are repeated on the next.
    pub fn disconnect(&self) {
        let connection = self.state.lock().connection.clone();
        if let Some(connection) = connection {
            connection.break_off("the client ended the connection", false);
        }
    }

    pub(crate) fn connection_in(&self, session: u64) -> Result<Arc<Connection>, ClientError> {
        let connection = self.state.lock().connection.clone();
        match connection.filter(|c| c.session == session) {
            // These calls cannot be repeated, so look twice before one is sent into the void.
            Some(connection) if connection.check_idle().is_none() => Ok(connection),
            _ => Err(ClientError::SessionEnded { peer: self.peer() }),
        }
    }

    /// The present connection, or a new one; tries until the deadline. `started` is when the caller's call began.
    pub(crate) fn connection(&self, started: Instant, deadline: Instant) -> Result<Arc<Connection>, ClientError> {
        let mut state = self.state.lock();
        let mut refusals = 0;
        loop {
            if let Some(connection) = &state.connection {
                let Some(broken) = connection.broken() else { return Ok(connection.clone()) };
                let answered = connection.proven.load(std::sync::atomic::Ordering::Relaxed);
                state.routes.lost(nanos(Instant::now()), answered);
                state.cause = broken.cause.to_string();
                state.connection = None;
                state = self.look_again(state);
            }
            let now = Instant::now();
            let until = match state.routes.next(nanos(now), nanos(deadline), span(self.options.timeout)) {
                Next::Late => return Err(self.unreachable(&state, started)),
                Next::Wait { until } => instant(until),
                Next::Connect { route, until } => {
                    let ways = state.ways.clone();
                    drop(state);
                    let made = self.attempt(&ways, route, instant(until));
                    state = self.state.lock();
                    if let Err(error) = made {
                        state = self.look_again(state);
                        let is_same = Arc::ptr_eq(&ways, &state.ways);
                        let is_hopeless = is_final(&error) || !self.options.keep_trying;
                        refusals = if is_hopeless && is_same { refusals + 1 } else { 0 };
                        // Every route refused for good: trying again does not help.
                        if refusals >= state.ways.len() {
                            return Err(error);
                        }
                    }
                    continue;
                }
            };
            state = self.changed.wait_timeout(state, until - now).0;
        }
    }

    /// One attempt at a route, by the one thread that connects.
    fn attempt(&self, ways: &Ways, at: usize, deadline: Instant) -> Result<(), ClientError> {
        let made = ways.get(at).ok_or_else(|| ClientError::invalid("no such server")).and_then(|route| {
            let greeting = Greeting {
                peer: &route.peer,
                hello: &self.hello,
                deadline,
                // Shorter than any wait of the thread that receives unattended answers, which otherwise would have to poll.
                tick: (self.options.timeout / 20).clamp(Duration::from_millis(5), Duration::from_millis(200)),
                max_payload_bytes: self.options.max_payload_bytes,
                poll: self.options.poll,
                patience: Patience::new(span(self.options.timeout), ways.len() > 1),
                waits_for_limits: self.options.waits_for_limits,
                vet: self.options.vet.as_ref(),
                place: self.options.place.as_ref(),
                access: &self.options.access,
            };
            Connection::open(&route.address, &greeting, &self.identity)
        });
        let mut state = self.state.lock();
        let made = match made {
            Ok(connection) => {
                state.routes.opened();
                state.connection = Some(Arc::new(connection));
                Ok(())
            }
            Err(error) => {
                state.routes.refused(nanos(Instant::now()));
                state.cause = match &error {
                    ClientError::Unreachable { cause, .. } => cause.clone(),
                    ClientError::Refused { fault, .. } => fault.message.clone(),
                    ClientError::Key { what, .. } => what.clone(),
                    other => other.to_string(),
                };
                Err(error)
            }
        };
        drop(state);
        self.changed.notify_all();
        made
    }

    /// Looks up where the server is, if there is a place to look; no other thread is connecting.
    fn look_again<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let (Some(whereabouts), Some(name)) = (&self.options.whereabouts, one_name(&state.ways)) else { return state };
        let before = state.ways.clone();
        // Reading a file takes its time.
        drop(state);
        let addresses = whereabouts.addresses(&name);
        let mut state = self.state.lock();
        let is_same = addresses.iter().eq(before.iter().map(|route| &route.peer.address));
        if is_same || addresses.is_empty() || !Arc::ptr_eq(&before, &state.ways) || state.routes.is_connecting() {
            return state;
        }
        // The configuration was checked.
        if let Ok(ways) = addresses.iter().map(|address| route_to(&name, address)).collect::<Result<Ways, _>>() {
            tracing::info!(server = name, ?addresses, "the server has other addresses now");
            state.routes = Routes::new(ways.len(), 0);
            state.ways = ways;
        }
        state
    }

    fn unreachable(&self, state: &State, started: Instant) -> ClientError {
        let cause = match state.cause.as_str() {
            "" => "no connection came about",
            cause => cause,
        };
        unreachable_because(&state.ways, state.routes.at(), started, cause.into())
    }

    /// The error of a call whose time is up.
    pub(crate) fn late(&self, peer: &Peer, started: Instant, cause: &str) -> ClientError {
        let ways = self.state.lock().ways.clone();
        let at = ways.iter().position(|route| route.peer == *peer).unwrap_or(0);
        unreachable_because(&ways, at, started, cause.into())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A thread that receives keeps the connection.
        self.disconnect();
    }
}

fn route_to(name: &str, address: &str) -> Result<Route, ClientError> {
    let peer = Peer { name: name.to_string(), address: address.to_string() };
    let parsed = address.parse().map_err(|error| ClientError::invalid(format!("{peer}: {error}")));
    parsed.map(|address| Route { peer, address })
}

/// The name of the one server that all ways lead to.
fn one_name(ways: &Ways) -> Option<String> {
    let name = &ways.first()?.peer.name;
    (!name.is_empty() && ways.iter().all(|route| route.peer.name == *name)).then(|| name.clone())
}

fn unreachable_because(ways: &Ways, route: usize, started: Instant, cause: String) -> ClientError {
    let mut names: Vec<&str> = ways.iter().map(|route| route.peer.name.as_str()).collect();
    names.dedup();
    let address = ways.get(route).map(|route| route.peer.address.clone()).unwrap_or_default();
    let server = match names.as_slice() {
        [""] => "the server".into(),
        several => several.join(", "),
    };
    ClientError::Unreachable { server, address, waited: started.elapsed(), cause }
}

/// True when a server's refusal will not change by itself.
fn is_final(error: &ClientError) -> bool {
    match error {
        ClientError::Protocol { .. } | ClientError::Key { .. } | ClientError::Invalid { .. } => true,
        ClientError::Refused { fault, .. } => matches!(fault.errno, libc::EPROTO | libc::EACCES),
        _ => false,
    }
}
