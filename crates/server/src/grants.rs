//! Limits over several servers: asks the servers of the same kind what they granted, and gives the scheduler the portions
//! that [`Grants`] computes.
//!
//! Nothing runs until a policy with `over=all` comes; until then every such limit has its even portion.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_client::{ClientError, Identity, Link, LinkOptions, Whereabouts};
use impresario_config::Config;
use impresario_engine::{Engine, now};
use impresario_node::grants::{Grant, Grants};
use impresario_sched::PolicySpec;
use impresario_sched::limited::{Limited, Portions};
use impresario_transport::{Access, Membership};
use impresario_wire::{Answer, Call, Granted, KeyRole, Role, frame::ANSWER_BODY_MAX_BYTES};
use serde_json::{Value, json};

/// How often servers ask one another, and portions are computed.
const STEP: Duration = Duration::from_millis(100);
/// How long an answer may take.
const ANSWER_MAX: Duration = Duration::from_millis(250);
/// Threads that ask; further servers are asked in turn.
const ASKERS_MAX: usize = 16;
/// Steps without a limit over all servers after which nothing runs until the next policy.
const IDLE_STEPS: u32 = 100;
/// Limits in a status.
const LISTED_MAX: usize = 64;

/// The servers that limits are shared with.
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

/// What the exchange needs of a scheduler.
trait Scheduler: Send + Sync {
    fn limited(&self) -> (Vec<Limited>, bool);
    fn set_portions(&self, portions: Portions);
    fn policy(&self) -> PolicySpec;
}

impl<T: Send + 'static> Scheduler for Engine<T> {
    fn limited(&self) -> (Vec<Limited>, bool) {
        Engine::limited(self)
    }

    fn set_portions(&self, portions: Portions) {
        Engine::set_portions(self, portions);
    }

    fn policy(&self) -> PolicySpec {
        self.status().policy
    }
}

/// The exchange of one server. Dropping it ends it.
pub(crate) struct Exchange {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    scheduler: Arc<dyn Scheduler>,
    grants: Mutex<Grants>,
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

impl Exchange {
    /// Between the scheduler of a server and its peers. Nothing is connected yet.
    pub(crate) fn new<T: Send + 'static>(
        name: &str,
        peers: Peers,
        engine: &Arc<Engine<T>>,
        policy: &PolicySpec,
    ) -> Result<Exchange, ClientError> {
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
        let grants = Grants::new(me, servers.len());
        engine.set_portions(grants.even());
        let shared = Shared {
            scheduler: engine.clone(),
            grants: Mutex::new(grants),
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

    /// A policy is to be in force, now or at an instant to come.
    pub(crate) fn follow(&self, policy: &PolicySpec) {
        let shared = &self.shared;
        if shared.servers.len() < 2 || !is_over_all(policy) {
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
            let thread = std::thread::Builder::new().name(format!("limits-{asker}")).spawn(move || match asker {
                0 => shared.step(),
                _ => shared.ask(asker - 1, askers),
            });
            match thread {
                Ok(thread) => threads.push(thread),
                // What is not asked is silent, and limits hold.
                Err(error) => tracing::error!(%error, "a thread for limits over all servers cannot be started"),
            }
        }
    }

    /// What this server granted, for another that asks.
    pub(crate) fn report(&self) -> Answer {
        let (limited, is_whole) = self.shared.scheduler.limited();
        let grants = limited.into_iter().filter(|limit| limit.over_all);
        let grants = grants.map(|Limited { rule, key, granted, waiting, .. }| Granted { rule, key, granted, waiting });
        Answer::Grants { grants: grants.collect(), is_whole }
    }

    /// For a server's status: its limits, those that withhold requests first, and which peers answer.
    pub(crate) fn status(&self) -> Value {
        let (mut limited, _) = self.shared.scheduler.limited();
        limited.truncate(LISTED_MAX);
        let is_active = self.shared.state.lock().active;
        let peers = self.shared.peers.get().into_iter().flatten().filter(|_| is_active);
        let peers = peers.map(|peer| json!({ "name": peer.name, "answers": peer.answers.load(Ordering::Relaxed) }));
        json!({ "classes": crate::json(&limited), "peers": peers.collect::<Vec<_>>() })
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

/// Whether a policy's rules have limits over all servers.
fn is_over_all(policy: &PolicySpec) -> bool {
    policy.params.get("rules").is_some_and(|rules| rules.split_whitespace().collect::<String>().contains("over=all"))
}

impl Shared {
    /// Links to the others. One whose address cannot be used is never heard of, which is safe.
    fn connect(&self) -> Vec<Peer> {
        let others = self.servers.iter().enumerate().filter(|(number, _)| *number != self.me);
        let peers = others.filter_map(|(number, (name, address))| {
            let link = Link::new(&[(name, address)], self.identity.clone(), self.options.clone());
            let link = link.inspect_err(|error| tracing::error!(%error, "limits over all servers"));
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
            let (limited, _) = self.scheduler.limited();
            idle = if limited.iter().any(|limit| limit.over_all) { 0 } else { idle + 1 };
            let portions = self.grants.lock().step(now(), &limited);
            self.scheduler.set_portions(portions);
            if idle < IDLE_STEPS {
                continue;
            }
            idle = 0;
            // Under the lock: a switch to another policy either is seen here or comes to `follow` afterwards.
            let mut state = self.state.lock();
            state.active = is_over_all(&self.scheduler.policy());
        }
    }

    /// Asks every `of`-th peer, beginning with the one numbered `first`.
    fn ask(&self, first: usize, of: usize) {
        let mut next = Instant::now();
        while self.wait(next) {
            next = Instant::now() + STEP;
            let peers = self.peers.get().into_iter().flatten();
            for Peer { number, name, link, answers } in peers.skip(first).step_by(of) {
                let reply = link.call(Call::Grants, &[], None, Instant::now() + ANSWER_MAX);
                let is_well = match reply.map(|reply| reply.answer) {
                    Ok(Answer::Grants { grants, is_whole }) => {
                        let grant = |Granted { rule, key, granted, waiting }| Grant { rule, key, granted, waiting };
                        let grants = grants.into_iter().take(Limited::LISTED_MAX).map(grant).collect();
                        self.grants.lock().heard(now(), *number, grants, is_whole);
                        true
                    }
                    Ok(_) => false,
                    Err(error) => {
                        tracing::debug!(peer = name, %error, "asking what it granted");
                        false
                    }
                };
                if answers.swap(is_well, Ordering::Relaxed) && !is_well {
                    tracing::warn!(
                        peer = name,
                        "it does not say what it granted: its even part of limits is kept for it"
                    );
                }
            }
        }
    }
}
