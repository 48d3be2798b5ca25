//! What servers of one kind ask one another at short intervals: one exchange for each subject, such as what they granted of
//! limits over all of them ([`crate::grants`]), or who of them is there ([`crate::members`]).
//!
//! Nothing runs until a policy comes that needs it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_client::{ClientError, Identity, Link, LinkOptions, Whereabouts};
use impresario_config::Config;
use impresario_sched::PolicySpec;
use impresario_transport::{Access, Membership};
use impresario_wire::{Answer, Call, KeyRole, Role, frame::ANSWER_BODY_MAX_BYTES};
use serde_json::{Value, json};

/// How often servers ask one another, and what follows from the answers is computed.
const STEP: Duration = Duration::from_millis(100);
/// How long an answer may take.
const ANSWER_MAX: Duration = Duration::from_millis(250);
/// Threads that ask; further servers are asked in turn.
const ASKERS_MAX: usize = 16;
/// Steps without use after which nothing runs until the next policy.
const IDLE_STEPS: u32 = 100;

/// The servers of one kind, as one of them knows them.
#[derive(Clone)]
pub(crate) struct Peers {
    /// The number of this server among all of its kind.
    pub(crate) me: usize,
    /// Names and addresses of all servers of its kind, this one included.
    pub(crate) servers: Vec<(String, String)>,
    pub(crate) role: Role,
    pub(crate) membership: Arc<Membership>,
    pub(crate) access: Access,
    pub(crate) whereabouts: Whereabouts,
}

impl Peers {
    /// The data servers of a cluster, as the one of this number.
    pub(crate) fn data(config: &Config, me: usize, membership: Arc<Membership>) -> Peers {
        let here = config.data.iter().enumerate().filter(|(number, data)| !data.is_retired() || *number == me);
        let (numbers, servers): (Vec<_>, _) =
            here.map(|(number, data)| (number, (data.name.clone(), data.address.clone()))).unzip();
        let me = numbers.iter().position(|number| *number == me).unwrap_or_default();
        Peers::of(config, (me, servers), Role::Data, membership)
    }

    /// The I/O nodes of a cluster, as the one of this number.
    pub(crate) fn io(config: &Config, me: usize, membership: Arc<Membership>) -> Peers {
        let servers = config.io.iter().map(|io| (io.name.clone(), io.address.clone())).collect();
        Peers::of(config, (me, servers), Role::Io, membership)
    }

    fn of(
        config: &Config,
        (me, servers): (usize, Vec<(String, String)>),
        role: Role,
        membership: Arc<Membership>,
    ) -> Peers {
        let (access, whereabouts) = (Access::of(config, KeyRole::Server), Whereabouts::of(config));
        Peers { me, servers, role, membership, access, whereabouts }
    }
}

/// What servers ask one another.
pub(crate) trait Subject: Send + Sync + 'static {
    /// In the names of threads and in messages.
    const NAME: &'static str;
    /// What follows when a server does not answer, for its peers' logs.
    const SILENCE: &'static str;

    /// Whether the exchange is of use to a server with this policy and so many others.
    fn is_needed(&self, policy: &PolicySpec, others: usize) -> bool;

    /// The policy in force.
    fn policy(&self) -> PolicySpec;

    /// What the others are asked.
    fn question(&self) -> Call;

    /// A peer's answer; false if it answers another question.
    fn heard(&self, peer: usize, answer: Answer) -> bool;

    /// Computes what follows; whether it was of use.
    fn step(&self) -> bool;
}

/// The exchange of one server. Dropping it ends it.
pub(crate) struct Exchange<S: Subject> {
    shared: Arc<Shared<S>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared<S> {
    subject: S,
    servers: Vec<(String, String)>,
    me: usize,
    identity: Arc<Identity>,
    options: LinkOptions,
    /// The others; made when they are first needed.
    peers: OnceLock<Vec<Peer>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Another server.
struct Peer {
    number: usize,
    name: String,
    link: Link,
    /// It answered when it was last asked.
    answers: AtomicBool,
}

#[derive(Default)]
struct State {
    active: bool,
    stopping: bool,
}

impl<S: Subject> Exchange<S> {
    /// Between the server `name` and its peers. Nothing is connected yet.
    pub(crate) fn new(name: &str, peers: Peers, subject: S, policy: &PolicySpec) -> Result<Exchange<S>, ClientError> {
        let Peers { me, servers, role, membership, access, whereabouts } = peers;
        let identity = Arc::new(Identity::draw(0, 0)?.with_membership(membership));
        let options = LinkOptions {
            who: identity.who(),
            name: name.into(),
            timeout: ANSWER_MAX,
            keep_trying: false,
            access,
            whereabouts: Some(whereabouts),
            ..LinkOptions::new(role, ANSWER_BODY_MAX_BYTES)
        };
        let shared = Shared {
            subject,
            servers,
            me,
            identity,
            options,
            peers: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::default(),
        };
        let exchange = Exchange { shared: Arc::new(shared), threads: Mutex::default() };
        exchange.follow(policy);
        Ok(exchange)
    }

    /// What is exchanged.
    pub(crate) fn subject(&self) -> &S {
        &self.shared.subject
    }

    /// The name of a server.
    pub(crate) fn name(&self, number: usize) -> Option<&str> {
        self.shared.servers.get(number).map(|(name, _)| name.as_str())
    }

    /// A policy is to be in force, now or at an instant to come.
    pub(crate) fn follow(&self, policy: &PolicySpec) {
        let shared = &self.shared;
        if !shared.is_needed(policy) {
            return;
        }
        let peers = shared.peers.get_or_init(|| shared.connect());
        let mut threads = self.threads.lock();
        let mut state = shared.state.lock();
        if state.stopping {
            return;
        }
        state.active = true;
        shared.changed.notify_all();
        drop(state);
        if !threads.is_empty() {
            return;
        }
        let askers = ASKERS_MAX.min(peers.len());
        for asker in 0..=askers {
            let shared = shared.clone();
            let name = format!("{}-{asker}", S::NAME);
            let thread = std::thread::Builder::new().name(name).spawn(move || match asker {
                0 => shared.step(),
                _ => shared.ask(asker - 1, askers),
            });
            match thread {
                Ok(thread) => threads.push(thread),
                // What is not asked is silent.
                Err(error) => tracing::error!(%error, "a thread for {} cannot be started", S::NAME),
            }
        }
    }

    /// For a server's status: which peers answer.
    pub(crate) fn peers(&self) -> Value {
        let is_active = self.is_active();
        let peers = self.shared.peers.get().into_iter().flatten().filter(|_| is_active);
        peers.map(|peer| json!({ "name": peer.name, "answers": peer.answers.load(Ordering::Relaxed) })).collect()
    }

    /// It runs.
    pub(crate) fn is_active(&self) -> bool {
        self.shared.state.lock().active
    }

    /// Ends the exchange, waiting for questions under way.
    pub(crate) fn stop(&self) {
        self.shared.state.lock().stopping = true;
        self.shared.changed.notify_all();
        for thread in self.threads.lock().drain(..) {
            let _ = thread.join();
        }
    }
}

impl<S: Subject> Shared<S> {
    fn is_needed(&self, policy: &PolicySpec) -> bool {
        self.subject.is_needed(policy, self.servers.len().saturating_sub(1))
    }

    /// Links to the others. One whose address cannot be used is never heard of, which is safe.
    fn connect(&self) -> Vec<Peer> {
        let others = self.servers.iter().enumerate().filter(|(number, _)| *number != self.me);
        let peers = others.filter_map(|(number, (name, address))| {
            let link = Link::new(&[(name, address)], self.identity.clone(), self.options.clone());
            let link = link.inspect_err(|error| tracing::error!(%error, "{}", S::NAME));
            Some(Peer { number, name: name.clone(), link: link.ok()?, answers: AtomicBool::new(false) })
        });
        peers.collect()
    }

    /// Waits for the next step; false when the exchange ends.
    fn wait(&self, until: Instant) -> bool {
        let mut state = self.state.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match (state.stopping, state.active) {
                (true, _) => return false,
                (_, true) if left.is_zero() => return true,
                (_, true) => state = self.changed.wait_timeout(state, left).0,
                (_, false) => state = self.changed.wait(state),
            }
        }
    }

    fn step(&self) {
        let mut idle = 0;
        let mut next = Instant::now();
        while self.wait(next) {
            next = Instant::now() + STEP;
            idle = if self.subject.step() { 0 } else { idle + 1 };
            if idle < IDLE_STEPS {
                continue;
            }
            idle = 0;
            // Under the lock: a switch to another policy either is seen here or comes to `follow` afterwards.
            let mut state = self.state.lock();
            state.active = self.is_needed(&self.subject.policy());
        }
    }

    /// Asks every `of`-th peer, beginning with the one numbered `first`.
    fn ask(&self, first: usize, of: usize) {
        let mut next = Instant::now();
        while self.wait(next) {
            next = Instant::now() + STEP;
            let peers = self.peers.get().into_iter().flatten();
            for Peer { number, name, link, answers } in peers.skip(first).step_by(of) {
                let reply = link.call(self.subject.question(), &[], None, Instant::now() + ANSWER_MAX);
                let is_well = match reply.map(|reply| reply.answer) {
                    Ok(answer) => self.subject.heard(*number, answer),
                    Err(error) => {
                        tracing::debug!(peer = name, %error, "asking about {}", S::NAME);
                        false
                    }
                };
                if answers.swap(is_well, Ordering::Relaxed) && !is_well {
                    tracing::warn!(peer = name, "it does not answer about {}: {}", S::NAME, S::SILENCE);
                }
            }
        }
    }
}
