//! Which I/O nodes and data servers take turns: the I/O nodes ask one another, and the scheduler follows what
//! [`Members`] says.
//!
//! It runs while the policy has windows for data servers, or may choose one that has.

use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_client::ClientError;
use impresario_engine::{Engine, now};
use impresario_node::members::{Members, View};
use impresario_sched::{Nanos, PolicySpec};
use impresario_wire::{Answer, Call, MembersView};
use serde_json::{Value, json};

use crate::data_servers::States;
use crate::peers::{Exchange, Peers, Subject};

/// The lanes of data servers, some of them.
pub(crate) type LanesThat = Box<dyn Fn() -> Vec<u16> + Send + Sync>;

/// What the exchange needs of a scheduler.
trait Scheduler: Send + Sync {
    fn shared_now(&self) -> Nanos;
    fn set_members(&self, members: impresario_sched::Members);
    fn policy(&self) -> PolicySpec;
}

impl<T: Send + 'static> Scheduler for Engine<T> {
    fn shared_now(&self) -> Nanos {
        Engine::shared_now(self)
    }

    fn set_members(&self, members: impresario_sched::Members) {
        Engine::set_members(self, members);
    }

    fn policy(&self) -> PolicySpec {
        Engine::policy(self)
    }
}

/// Who is there.
pub(crate) struct Turns {
    scheduler: Arc<dyn Scheduler>,
    members: Mutex<Members>,
    hung: LanesThat,
    /// What the configuration says of the data servers; none where there is no cluster below.
    states: Option<Arc<States>>,
    /// The table of `auto` may choose `twins` here: nothing below puts requests in order.
    may_be_chosen: bool,
}

/// What a node stands in front of.
pub(crate) struct Below {
    pub(crate) lanes: u16,
    /// The lanes of data servers that hang.
    pub(crate) hung: LanesThat,
    pub(crate) states: Option<Arc<States>>,
    pub(crate) is_sorted: bool,
}

impl Exchange<Turns> {
    /// Between the scheduler of an I/O node and the other I/O nodes.
    pub(crate) fn of_turns<T: Send + 'static>(
        name: &str,
        peers: Peers,
        engine: &Arc<Engine<T>>,
        below: Below,
        policy: &PolicySpec,
    ) -> Result<Exchange<Turns>, ClientError> {
        let number = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
        let members = Mutex::new(Members::new(number(peers.me), number(peers.servers.len()), below.lanes));
        let Below { hung, states, is_sorted, .. } = below;
        let turns = Turns { scheduler: engine.clone(), members, hung, states, may_be_chosen: !is_sorted };
        Exchange::new(name, peers, turns, policy)
    }

    /// What this node knows, for another that asks.
    pub(crate) fn report(&self) -> Answer {
        let (View { number, from_shared, nodes, absent }, hung) = self.subject().members.lock().report();
        Answer::Members(MembersView { number, from_shared_ns: from_shared.0, nodes, absent, hung })
    }

    /// For the node's status; nothing while no policy needs it.
    pub(crate) fn status(&self) -> Option<Value> {
        if !self.is_active() {
            return None;
        }
        let view = self.subject().members.lock().view().clone();
        let nodes: Vec<&str> = view.nodes.iter().filter_map(|node| self.name(usize::from(*node))).collect();
        Some(json!({ "view": view.number, "nodes": nodes, "absent_lanes": view.absent, "peers": self.peers() }))
    }
}

impl Subject for Turns {
    const NAME: &'static str = "turns";
    const SILENCE: &'static str = "after a second without an answer it has no turns";

    fn is_needed(&self, policy: &PolicySpec, _: usize) -> bool {
        let names_it = || policy.params.get("table").is_some_and(|table| table.contains("twins"));
        policy.name == "twins" || policy.name == "auto" && (self.may_be_chosen || names_it())
    }

    fn policy(&self) -> PolicySpec {
        self.scheduler.policy()
    }

    fn question(&self) -> Call {
        Call::Members
    }

    fn heard(&self, peer: usize, answer: Answer) -> bool {
        let Answer::Members(MembersView { number, from_shared_ns, nodes, absent, hung }) = answer else { return false };
        let Ok(peer) = u16::try_from(peer) else { return false };
        let view = View { number, from_shared: Nanos(from_shared_ns), nodes, absent };
        let shared_now = self.scheduler.shared_now();
        let can_be = self.members.lock().heard(now(), shared_now, peer, view, hung);
        if !can_be {
            tracing::debug!(peer, "its view of who takes turns cannot be: its clock or its configuration is another");
        }
        true
    }

    fn step(&self) -> bool {
        let policy = self.scheduler.policy();
        let (hung, gone) = ((self.hung)(), self.states.as_ref().map_or_else(Vec::new, |states| states.retired()));
        let shared_now = self.scheduler.shared_now();
        let mut members = self.members.lock();
        if let Some(turns) = members.step(now(), shared_now, &hung, &gone) {
            let View { number, nodes, absent, .. } = members.view();
            tracing::info!(
                view = number,
                ?nodes,
                ?absent,
                "other nodes or data servers take turns from an agreed instant on"
            );
            drop(members);
            self.scheduler.set_members(turns);
        }
        self.is_needed(&policy, 0)
    }
}
