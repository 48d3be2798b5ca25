//! Limits over several servers: servers of one kind ask one another what they granted, and the scheduler gets the portions
//! that [`Grants`] computes.
//!
//! Until a policy with `over=all` comes, every such limit has its even portion.

use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_client::ClientError;
use impresario_engine::{Engine, now};
use impresario_node::grants::{Grant, Grants};
use impresario_sched::PolicySpec;
use impresario_sched::limited::{Limited, Portions};
use impresario_wire::{Answer, Call, Granted};
use serde_json::{Value, json};

use crate::peers::{Exchange, Peers, Subject};

/// Limits in a status.
pub(crate) const LISTED_MAX: usize = 64;

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
        Engine::policy(self)
    }
}

/// What servers granted.
pub(crate) struct Limits {
    scheduler: Arc<dyn Scheduler>,
    grants: Mutex<Grants>,
}

impl Exchange<Limits> {
    /// Between the scheduler of a server and its peers.
    pub(crate) fn of_limits<T: Send + 'static>(
        name: &str,
        peers: Peers,
        engine: &Arc<Engine<T>>,
        policy: &PolicySpec,
    ) -> Result<Exchange<Limits>, ClientError> {
        let grants = Grants::new(peers.me, peers.servers.len());
        engine.set_portions(grants.even());
        Exchange::new(name, peers, Limits { scheduler: engine.clone(), grants: Mutex::new(grants) }, policy)
    }

    /// What this server granted, for another that asks.
    pub(crate) fn report(&self) -> Answer {
        let (limited, is_whole) = self.subject().scheduler.limited();
        let grants = limited.into_iter().filter(|limit| limit.over_all);
        let grants = grants.map(|Limited { rule, key, granted, waiting, .. }| Granted { rule, key, granted, waiting });
        Answer::Grants { grants: grants.collect(), is_whole }
    }

    /// For a server's status: its limits, those that withhold requests first, and which peers answer.
    pub(crate) fn status(&self) -> Value {
        let (mut limited, _) = self.subject().scheduler.limited();
        limited.truncate(LISTED_MAX);
        json!({ "classes": crate::json(&limited), "peers": self.peers() })
    }
}

impl Subject for Limits {
    const NAME: &'static str = "limits";
    const SILENCE: &'static str = "its even part of limits is kept for it";

    /// Whether the policy's rules have limits over all servers.
    fn is_needed(&self, policy: &PolicySpec, others: usize) -> bool {
        let is_over_all = |rules: &String| rules.split_whitespace().collect::<String>().contains("over=all");
        others > 0 && policy.params.get("rules").is_some_and(is_over_all)
    }

    fn policy(&self) -> PolicySpec {
        self.scheduler.policy()
    }

    fn question(&self) -> Call {
        Call::Grants
    }

    fn heard(&self, peer: usize, answer: Answer) -> bool {
        let Answer::Grants { grants, is_whole } = answer else { return false };
        let grant = |Granted { rule, key, granted, waiting }| Grant { rule, key, granted, waiting };
        let grants = grants.into_iter().take(Limited::LISTED_MAX).map(grant).collect();
        self.grants.lock().heard(now(), peer, grants, is_whole);
        true
    }

    fn step(&self) -> bool {
        let (limited, _) = self.scheduler.limited();
        let portions = self.grants.lock().step(now(), &limited);
        self.scheduler.set_portions(portions);
        limited.iter().any(|limit| limit.over_all)
    }
}
