//! I/O nodes agree on which of them, and which data servers, take turns: each drives the machine of the real ones,
//! [`impresario_node::members`]. Their questions and answers take no time and no part of the network.

use impresario_node::members::{HANGS_AFTER, Members};
use impresario_sched::Nanos;

use crate::calls::Owner;
use crate::simulation::{Event, Simulation};

/// How often they ask one another, as on the servers.
const STEP_NS: u64 = 100_000_000;

/// What an I/O node knows of the others and of the data servers.
pub(crate) struct Acquaintance {
    members: Members,
    /// When each data server last answered it.
    answered: Vec<u64>,
}

impl Acquaintance {
    /// Of the node of this rank.
    pub(crate) fn new(rank: u16, nodes: u16, servers: u16) -> Acquaintance {
        Acquaintance { members: Members::new(rank, nodes, servers), answered: vec![0; servers.into()] }
    }

    /// A data server has answered.
    pub(crate) fn answered(&mut self, now: u64, server: u32) {
        if let Some(answered) = self.answered.get_mut(server as usize) {
            *answered = now;
        }
    }
}

impl Simulation {
    pub(crate) fn begin_members(&mut self) {
        if self.scenario.io_nodes.as_ref().is_some_and(|n| n.members) {
            self.at(STEP_NS, Event::Members);
        }
    }

    /// A node has lost its memory.
    pub(crate) fn forget_members(&mut self, node: u16) {
        let (nodes, servers) = (self.io.len() as u16, self.servers.len() as u16);
        if let Some(known) = &mut self.io[usize::from(node)].acquaintance {
            **known = Acquaintance::new(node, nodes, servers);
        }
    }

    /// Every node asks the others, and follows what comes of it.
    pub(crate) fn members_step(&mut self) {
        if self.running == 0 {
            return;
        }
        let now = Nanos(self.now);
        let hung = self.hung_servers();
        let is_there: Vec<bool> = (0..self.io.len()).map(|node| self.cut[node] == 0).collect();
        for me in 0..self.io.len() {
            let shared_now = self.io[me].station.shared_time(self.now);
            for other in (0..self.io.len()).filter(|other| *other != me && is_there[me] && is_there[*other]) {
                let Some((view, hangs)) = self.io[other].acquaintance.as_ref().map(|known| known.members.report())
                else {
                    continue;
                };
                if let Some(known) = &mut self.io[me].acquaintance
                    && !known.members.heard(now, shared_now, other as u16, view, hangs)
                {
                    self.violated(format!("I/O node {me} does not believe I/O node {other} which nodes take turns"));
                }
            }
            let node = &mut self.io[me];
            let Some(known) = &mut node.acquaintance else { continue };
            if let Some(turns) = known.members.step(now, shared_now, &hung[me], &[]) {
                node.station.members(self.now, turns);
                self.pump_io(me as u16);
            }
        }
        self.at(self.now + STEP_NS, Event::Members);
    }

    /// By I/O node, the data servers that have not answered it for a while although it waits for them.
    fn hung_servers(&self) -> Vec<Vec<u16>> {
        let mut hung = vec![Vec::new(); self.io.len()];
        for (_, call) in self.calls.iter() {
            let Owner::Forward(forward) = call.owner else { continue };
            let Some(started) = self.forwards.get(forward).map(|forward| forward.started) else { continue };
            let (node, server) = ((call.from - self.first_io) as usize, (call.target - self.first_server) as u16);
            let answered = self.io[node].acquaintance.as_ref().map_or(0, |known| known.answered[usize::from(server)]);
            if self.now - started.max(answered) >= HANGS_AFTER.0 && !hung[node].contains(&server) {
                hung[node].push(server);
            }
        }
        hung
    }
}
