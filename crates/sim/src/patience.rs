//! Calls without a reply: keep-alive, leaving a silent peer, retrying, giving up.
//!
//! The rules are those of the real client, [`impresario_node::session`]; this file adds virtual time and the simulated
//! network. Two things are simpler than on a real network. A message that meets a partition is lost instead of being
//! delivered late, so every silent peer is left for a new connection, as if there were another route. And a partitioned
//! peer refuses a connection at once.

use impresario_base::slab::Key;
use impresario_node::session::{self, Next, Patience, Rights, Routes, Sign, Step, Verdict};
use impresario_sched::Nanos;

use crate::calls::{BUSY, Call, FENCED, Owner, PATH_LOST};
use crate::client::EIO;
use crate::simulation::{Event, Simulation};

const NONE: u32 = u32::MAX;

/// Outstanding calls in the order of their next check.
pub(crate) struct Timeouts {
    timeout_ns: u64,
    patience: Patience,
    oldest: u32,
    newest: u32,
    armed: bool,
}

impl Timeouts {
    pub(crate) fn new(timeout_ns: u64) -> Timeouts {
        let patience = Patience::new(Nanos(timeout_ns), true);
        Timeouts { timeout_ns, patience, oldest: NONE, newest: NONE, armed: false }
    }

    /// Interval between checks of an outstanding call: half of the patience with its peer.
    fn step_ns(&self) -> u64 {
        self.patience.silence.0 / 2
    }

    /// How long a call may wait for memory, as on the servers.
    pub(crate) fn memory_patience_ns(&self) -> u64 {
        self.timeout_ns / 2
    }

    /// Longest time that a call may go without a reply.
    pub(crate) fn silence_max_ns(&self) -> u64 {
        self.timeout_ns + self.step_ns()
    }

    /// The session state of a call; an I/O node gives up earlier than its client, so that the client gets the error.
    pub(crate) fn session(&self, owner: Owner, changes: bool, now: u64) -> session::Call {
        let (rights, timeout) = match owner {
            Owner::Op(_) => {
                (Rights { repeat: true, ours: true, bound: false, again_when_busy: true, changes }, self.timeout_ns)
            }
            Owner::Forward(_) => (Rights::default(), self.timeout_ns / 4 * 3),
        };
        session::Call::new(rights, Nanos(now.saturating_add(timeout)))
    }
}

/// An entry in the list of [`Timeouts`].
#[derive(Clone, Copy)]
pub(crate) struct Listed {
    at: u64,
    newer: u32,
    older: u32,
}

impl Listed {
    pub(crate) const NOT: Listed = Listed { at: 0, newer: NONE, older: NONE };
}

/// A call waiting to be sent again.
pub(crate) struct Parked {
    call: Call,
    /// It first needs a connection.
    connects: bool,
}

impl Simulation {
    pub(crate) fn enlist(&mut self, key: Key) {
        let old = std::mem::replace(&mut self.timeouts.newest, key.index);
        if let Some(call) = self.calls.at_mut(key.index) {
            call.listed = Listed { at: self.now, newer: NONE, older: old };
        }
        match self.calls.at_mut(old) {
            Some(older) => older.listed.newer = key.index,
            None => self.timeouts.oldest = key.index,
        }
        if !self.timeouts.armed {
            self.timeouts.armed = true;
            self.at(self.now + self.timeouts.step_ns(), Event::Timeouts);
        }
    }

    fn delist(&mut self, Listed { newer, older, .. }: Listed) {
        match self.calls.at_mut(newer) {
            Some(call) => call.listed.older = older,
            None => self.timeouts.newest = older,
        }
        match self.calls.at_mut(older) {
            Some(call) => call.listed.newer = newer,
            None => self.timeouts.oldest = newer,
        }
    }

    /// Removes a call that ended.
    pub(crate) fn remove_call(&mut self, key: Key) -> Option<Call> {
        let call = self.calls.remove(key)?;
        self.delist(call.listed);
        self.note_silence(&call);
        Some(call)
    }

    fn note_silence(&mut self, call: &Call) {
        self.totals.silence_max = self.totals.silence_max.max(self.now - call.silence.last_heard().0);
    }

    /// A part of a call's reply arrived.
    pub(crate) fn freshen(&mut self, key: Key) {
        let (now, timeouts) = (self.now, &self.timeouts);
        let Some(call) = self.calls.get_mut(key) else { return };
        let silent = now - call.silence.last_heard().0;
        call.silence.heard(Nanos(now));
        call.session.set_deadline(timeouts.session(call.owner, call.write, now).deadline());
        let listed = call.listed;
        self.totals.silence_max = self.totals.silence_max.max(silent);
        self.delist(listed);
        self.enlist(key);
    }

    /// A message of a call was lost in a partition, or its target lost its memory.
    pub(crate) fn lose_copy(&mut self, key: Key) {
        if let Some(call) = self.calls.get_mut(key) {
            call.is_lost = true;
        }
    }

    /// A node has lost all its calls.
    pub(crate) fn lose_copies_at(&mut self, node: u32) {
        let theirs: Vec<Key> = self.calls.iter().filter(|(_, c)| c.target == node).map(|(key, _)| key).collect();
        theirs.into_iter().for_each(|key| self.lose_copy(key));
    }

    pub(crate) fn look_at_silent_calls(&mut self) {
        while let Some(key) = self.calls.key_at(self.timeouts.oldest) {
            let due = self.calls.get(key).map_or(self.now, |call| call.listed.at + self.timeouts.step_ns());
            if due > self.now {
                return self.at(due, Event::Timeouts);
            }
            self.look_at(key);
        }
        self.timeouts.armed = false;
    }

    fn look_at(&mut self, key: Key) {
        let now = Nanos(self.now);
        let patience = self.timeouts.patience;
        let Some(call) = self.calls.get_mut(key) else { return };
        let is_late = now >= call.session.deadline();
        let (from, to, is_lost, listed) = (call.from, call.target, call.is_lost, call.listed);
        match call.silence.judge(now, Nanos(0), is_late, &patience) {
            Sign::GiveUp(_) => return self.remove_call(key).into_iter().for_each(|call| self.peer_lost(call)),
            _ if is_late => return self.remove_call(key).into_iter().for_each(|call| self.failed(&call)),
            // A peer that still has the call is slow, not dead.
            Sign::Ping if !is_lost && !self.is_cut(from, to) => {
                if let Some(call) = self.calls.get_mut(key) {
                    let silent = now.0 - call.silence.last_heard().0;
                    call.silence.heard(now);
                    self.totals.silence_max = self.totals.silence_max.max(silent);
                }
            }
            Sign::Ping | Sign::Wait => {}
        }
        self.delist(listed);
        self.enlist(key);
    }

    /// Gives up the peer of a call.
    fn peer_lost(&mut self, mut call: Call) {
        if call.session.is_ours() {
            // Before repeating the call, leave the epoch of copies that may still be in flight.
            self.fencing = true;
            self.processes[call.process as usize].epoch.leave(call.session.epoch());
        }
        match call.session.lost(Nanos(self.now), false) {
            Step::Again { .. } => {
                let (service, now) = (self.service_of(&call), Nanos(self.now));
                let target = call.target;
                let routes = self.routes_of(&call);
                // The first of several calls leaves the route; the others follow.
                if service + routes.at() as u32 == target {
                    routes.lost(now, true);
                }
                self.connect(call);
            }
            _ => self.failed(&call),
        }
    }

    /// An error reply arrived.
    pub(crate) fn refused(&mut self, mut call: Call) {
        let verdict = match call.answering.errno() {
            FENCED => Verdict::Fenced,
            PATH_LOST => Verdict::PathLost,
            BUSY => Verdict::Busy,
            _ => Verdict::Final,
        };
        let epoch = &self.processes[call.process as usize].epoch;
        match call.session.answered(Nanos(self.now), verdict, epoch) {
            Step::Again { at, .. } => {
                // A node without memory has not begun the call: no other copy of it is under way.
                self.fencing |= verdict != Verdict::Busy;
                self.park(call, at, false);
            }
            _ => self.failed(&call),
        }
    }

    fn failed(&mut self, call: &Call) {
        if call.session.is_ours() && call.write {
            self.fencing = true;
            call.session.given_up(&self.processes[call.process as usize].epoch);
        }
        match call.owner {
            Owner::Op(op) => self.op_part_ended(op, EIO, 0),
            // The client decides whether to retry.
            Owner::Forward(forward) => self.forward_part_ended(forward, PATH_LOST, 0),
        }
    }

    /// The first node of the service that a call addresses.
    fn service_of(&self, call: &Call) -> u32 {
        if self.io.is_empty() { call.target } else { self.first_io }
    }

    fn routes_of(&mut self, call: &Call) -> &mut Routes {
        let service = self.service_of(call);
        let (count, first) = match self.io.len() {
            0 => (1, 0),
            count => (count, usize::from(self.processes[call.process as usize].io_node)),
        };
        self.routes.entry((call.process, service)).or_insert_with(|| Routes::new(count, first))
    }

    /// Sends a call over the first route that opens.
    fn connect(&mut self, mut call: Call) {
        let (now, timeout) = (Nanos(self.now), Nanos(self.timeouts.timeout_ns));
        let (service, deadline) = (self.service_of(&call), call.session.deadline());
        loop {
            match self.routes_of(&call).next(now, deadline, timeout) {
                Next::Connect { route, .. } if self.is_cut(call.from, service + route as u32) => {
                    self.routes_of(&call).refused(now);
                }
                Next::Connect { route, .. } => {
                    self.routes_of(&call).opened();
                    if !self.io.is_empty() {
                        self.processes[call.process as usize].io_node = route as u16;
                    }
                    call.target = service + route as u32;
                    return self.send_again(call);
                }
                Next::Wait { until } => return self.park(call, until, true),
                Next::Late => return self.failed(&call),
            }
        }
    }

    fn park(&mut self, call: Call, until: Nanos, connects: bool) {
        let key = self.parked.insert(Parked { call, connects });
        self.at(until.0, Event::Resume(key));
    }

    /// The back-off of a parked call is over.
    pub(crate) fn resume(&mut self, key: Key) {
        let Some(Parked { call, connects }) = self.parked.remove(key) else { return };
        match call.session.again(Nanos(self.now)) {
            Step::Again { .. } if connects => self.connect(call),
            Step::Again { .. } => self.send_again(call),
            _ => self.failed(&call),
        }
    }
}
