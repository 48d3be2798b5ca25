//! Calls: one request to one node and its answer, its way through the network, and what is done when none comes.
//!
//! A client gives a call up when nothing has come of it for the time that the scenario allows, raises its epoch,
//! and tries once more: through the next I/O node, or the same server where there is none. Then it fails. An I/O node
//! does not repeat what it forwards: it tells its client, who decides. A call that a fence refused because its client had
//! begun a newer epoch meanwhile is sent again.

use impresario_sched::prefetch::fetch;

use crate::client::EIO;
use crate::network::{About, Message};
use crate::simulation::{Happening, Simulation, micros};
use impresario_sched::slab::Key;

/// The errno of a fence, as on the wire.
pub(crate) const FENCED: i32 = 116;
/// How often a call that is refused by fences is sent again.
const FENCED_MAX: u8 = 8;
/// Bytes of a list's entry in a request.
const LIST_ENTRY_BYTES: u64 = 16;
const NONE: u32 = u32::MAX;

/// Who made a call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Owner {
    /// An operation of a client.
    Op(Key),
    /// A forwarded request of an I/O node.
    Forward(Key),
}

/// What a call is made for.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) owner: Owner,
    pub(crate) process: u32,
    pub(crate) file: u32,
    pub(crate) write: bool,
}

pub(crate) struct Call {
    pub(crate) owner: Owner,
    /// On whose behalf.
    pub(crate) process: u32,
    pub(crate) file: u32,
    pub(crate) from: u32,
    pub(crate) target: u32,
    pub(crate) write: bool,
    /// The first request of its process.
    pub(crate) first: bool,
    /// Answered piece by piece.
    pub(crate) stream: bool,
    tries: u8,
    fenced: u8,
    /// In the target's space.
    pub(crate) offset: u64,
    /// Bytes in all.
    pub(crate) len: u64,
    /// Several extents in order.
    pub(crate) list: Option<Box<[(u64, u64)]>>,
    pub(crate) epoch: u32,
    /// Requests of the target's core that have not come back, and the first error.
    pub(crate) parts_left: u32,
    pub(crate) errno: i32,
    /// Bytes sent and received in pieces; the last piece was sent.
    answered: u64,
    received: u64,
    complete: bool,
    /// When it was begun, or something of its answer came.
    fresh: u64,
    newer: u32,
    older: u32,
}

/// Calls in the order in which they would be given up.
pub(crate) struct Timeouts {
    after_ns: u64,
    oldest: u32,
    newest: u32,
    armed: bool,
}

impl Timeouts {
    pub(crate) fn new(after_ns: u64) -> Timeouts {
        Timeouts { after_ns, oldest: NONE, newest: NONE, armed: false }
    }

    pub(crate) fn after_ns(&self) -> u64 {
        self.after_ns
    }
}

impl Simulation {
    /// Makes a call of one range.
    pub(crate) fn call(&mut self, of: Asked, target: u32, range: (u64, u64), first: bool) {
        let stream = target >= self.first_server && self.scenario.servers.pieces;
        self.begin_call(Call { stream, first, ..self.new_call(of, target, range) });
    }

    /// Makes a call of several ranges.
    pub(crate) fn call_list(&mut self, of: Asked, target: u32, list: Vec<(u64, u64)>, first: bool) {
        let range = (list.first().map_or(0, |e| e.0), list.iter().map(|e| e.1).sum());
        self.begin_call(Call { stream: true, first, list: Some(list.into()), ..self.new_call(of, target, range) });
    }

    fn new_call(&self, of: Asked, target: u32, (offset, len): (u64, u64)) -> Call {
        let Asked { owner, process, file, write } = of;
        let from = match owner {
            Owner::Op(_) => self.processes[process as usize].node,
            Owner::Forward(forward) => self.forwards.get(forward).map_or(0, |f| self.first_io + u32::from(f.node)),
        };
        Call {
            owner,
            process,
            file,
            from,
            target,
            write,
            first: false,
            stream: false,
            tries: 0,
            fenced: 0,
            offset,
            len,
            list: None,
            // All are 0 before, and the process of a forwarded request is far from any cache.
            epoch: if self.fencing { self.processes[process as usize].epoch } else { 0 },
            parts_left: 0,
            errno: 0,
            answered: 0,
            received: 0,
            complete: false,
            fresh: self.now,
            newer: NONE,
            older: NONE,
        }
    }

    fn begin_call(&mut self, call: Call) {
        let (ours, node) = (matches!(call.owner, Owner::Op(_)), call.from);
        let flow = if ours { &mut self.totals.clients } else { &mut self.totals.io_nodes };
        flow.add(call.len);
        let key = self.calls.insert(call);
        self.enlist(key);
        let leaves = if ours { self.client_processor(node) } else { self.now };
        if leaves == self.now {
            self.call_leaves(key);
        } else {
            self.at(leaves, Happening::CallLeaves(key));
        }
    }

    // Giving up

    fn enlist(&mut self, key: Key) {
        let old = std::mem::replace(&mut self.timeouts.newest, key.index);
        if let Some(call) = self.calls.at_mut(key.index) {
            (call.fresh, call.newer, call.older) = (self.now, NONE, old);
        }
        match self.calls.at_mut(old) {
            Some(older) => older.newer = key.index,
            None => self.timeouts.oldest = key.index,
        }
        if !self.timeouts.armed {
            self.timeouts.armed = true;
            self.at(self.now + self.timeouts.after_ns, Happening::Timeouts);
        }
    }

    fn delist(&mut self, newer: u32, older: u32) {
        match self.calls.at_mut(newer) {
            Some(call) => call.older = older,
            None => self.timeouts.newest = older,
        }
        match self.calls.at_mut(older) {
            Some(call) => call.newer = newer,
            None => self.timeouts.oldest = newer,
        }
    }

    /// Takes a call out: it ended.
    pub(crate) fn remove_call(&mut self, key: Key) -> Option<Call> {
        let call = self.calls.remove(key)?;
        self.delist(call.newer, call.older);
        self.totals.silence_max = self.totals.silence_max.max(self.now - call.fresh);
        Some(call)
    }

    /// Something of a call's answer came.
    fn freshen(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        let (newer, older, silence) = (call.newer, call.older, self.now - call.fresh);
        self.totals.silence_max = self.totals.silence_max.max(silence);
        self.delist(newer, older);
        self.enlist(key);
    }

    pub(crate) fn give_up_late_calls(&mut self) {
        while let Some(key) = self.calls.key_at(self.timeouts.oldest) {
            let due = self.calls.get(key).map_or(self.now, |call| call.fresh + self.timeouts.after_ns);
            if due > self.now {
                return self.at(due, Happening::Timeouts);
            }
            let Some(call) = self.remove_call(key) else { break };
            self.path_lost(call);
        }
        self.timeouts.armed = false;
    }

    /// No answer came, or word that none will: another try, or failure.
    fn path_lost(&mut self, call: Call) {
        match call.owner {
            Owner::Forward(forward) => self.forward_part_ended(forward, EIO, 0),
            Owner::Op(op) if call.tries > 0 => self.op_part_ended(op, EIO, 0),
            Owner::Op(_) => {
                let (io_nodes, first_io) = (self.io.len() as u16, self.first_io);
                let p = &mut self.processes[call.process as usize];
                let mut target = call.target;
                if io_nodes > 0 {
                    if call.target == first_io + u32::from(p.io_node) {
                        p.io_node = (p.io_node + 1) % io_nodes;
                    }
                    target = first_io + u32::from(p.io_node);
                }
                // Whatever of the first copy is still under way comes too late from now on.
                if p.epoch == call.epoch {
                    p.epoch += 1;
                }
                self.fencing = true;
                self.send_again(Call { target, tries: 1, ..call });
            }
        }
    }

    fn send_again(&mut self, call: Call) {
        let epoch = self.processes[call.process as usize].epoch;
        let anew = Call { epoch, parts_left: 0, errno: 0, answered: 0, received: 0, complete: false, ..call };
        self.begin_call(anew);
    }

    // There

    pub(crate) fn call_leaves(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        let (from, to, bytes) = (call.from, call.target, self.request_bytes(call));
        if self.is_cut(from, to) {
            return;
        }
        let transit = self.transit();
        if self.network.is_small(from, to, bytes) {
            let arrives = self.network.send(self.now, from, to, bytes, transit);
            return self.at(arrives, Happening::CallArrives(key));
        }
        let message = self.messages.insert(Message::new(from, to, About::Request(key), bytes, transit));
        self.message_goes_on(message);
    }

    fn request_bytes(&self, call: &Call) -> u64 {
        let list = call.list.as_ref().map_or(0, |list| list.len() as u64 * LIST_ENTRY_BYTES);
        self.network.header_bytes + list + if call.write { call.len } else { 0 }
    }

    pub(crate) fn is_cut(&self, from: u32, to: u32) -> bool {
        let is_cut = |node: u32| node >= self.first_io && self.cut[(node - self.first_io) as usize] > 0;
        is_cut(from) || is_cut(to)
    }

    pub(crate) fn call_arrives(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        let (from, to, bytes) = (call.from, call.target, self.request_bytes(call));
        if self.is_cut(from, to) {
            return;
        }
        let there = self.network.receive(self.now, from, to, bytes);
        self.process_call(key, there);
    }

    /// A call that is there at an instant is taken up by the target's processor, one at a time.
    fn process_call(&mut self, key: Key, there: u64) {
        let Some(call) = self.calls.get(key) else { return };
        let written = if call.write { call.len } else { 0 };
        let is_in = if call.target >= self.first_server {
            let cpu = micros(self.scenario.servers.cpu_us) + self.copy_ns(written);
            let server = (call.target - self.first_server) as usize;
            self.servers[server].processor(there, cpu)
        } else {
            let node = (call.target - self.first_io) as usize;
            let cpu = self.scenario.io_nodes.as_ref().map_or(0, |n| micros(n.cpu_us));
            self.io[node].processor(there, cpu)
        };
        if is_in == self.now {
            self.call_is_in(key);
        } else {
            self.at(is_in, Happening::CallIsIn(key));
        }
    }

    pub(crate) fn call_is_in(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        if self.is_cut(call.from, call.target) {
            return;
        }
        if let Owner::Forward(forward) = call.owner {
            self.fetch_batches(forward);
        }
        if call.target >= self.first_server {
            self.server_takes((call.target - self.first_server) as u16, key);
        } else {
            self.io_node_takes((call.target - self.first_io) as u16, key);
        }
    }

    // And back

    /// The target has something for the answer: `bytes` of a piece, or, when the last part came back, all.
    pub(crate) fn answer(&mut self, key: Key, piece_bytes: u64) {
        let Some(call) = self.calls.get_mut(key) else { return };
        let last = call.parts_left == 0;
        let reads = !call.write && call.errno == 0;
        if !call.stream || !reads {
            if last {
                let copied = if reads { call.len } else { 0 };
                let target = call.target;
                let leaves = self.copied(target, copied);
                if leaves == self.now {
                    self.answer_leaves(key);
                } else {
                    self.at(leaves, Happening::AnswerLeaves(key));
                }
            }
            return;
        }
        call.answered += piece_bytes;
        let (from, to, process) = (call.target, call.from, call.process);
        let leaves = self.copied(from, piece_bytes);
        let about = About::Answer { call: key, bytes: piece_bytes, last };
        self.send_answer(process, from, to, about, piece_bytes, leaves);
    }

    /// When a server's processor has copied the data of an answer.
    fn copied(&mut self, node: u32, bytes: u64) -> u64 {
        let copy = if node >= self.first_server { self.copy_ns(bytes) } else { 0 };
        if copy == 0 {
            return self.now;
        }
        self.servers[(node - self.first_server) as usize].processor(self.now, copy)
    }

    fn copy_ns(&self, bytes: u64) -> u64 {
        let rate = self.scenario.servers.copy_bytes_per_s;
        if rate > 0.0 { (bytes as f64 * 1e9 / rate) as u64 } else { 0 }
    }

    /// The number of the connection between a node and whoever sent it a call.
    fn connection(&self, process: u32, to: u32) -> u32 {
        if to >= self.first_io { to - self.first_io } else { process }
    }

    fn send_answer(&mut self, process: u32, from: u32, to: u32, about: About, bytes: u64, leaves: u64) {
        if let About::Answer { call, last: true, .. } = about {
            self.fetch_for_answer(call);
        }
        let transit = self.transit();
        let mut message = Message::new(from, to, about, bytes + self.network.header_bytes, transit);
        let (socket, connection) = (self.network.socket_bytes, self.connection(process, to));
        let now = self.now;
        let station = self.station(from);
        if station.minds_connections && bytes > 0 {
            message.outstanding = Some((from, station.incarnation, connection));
            message.owed = bytes;
            station.sending(now, connection, bytes, socket);
        }
        let message = self.messages.insert(message);
        if leaves == self.now {
            self.message_goes_on(message);
        } else {
            self.at(leaves, Happening::MessageGoesOn(message));
        }
    }

    /// The whole answer is sent.
    pub(crate) fn answer_leaves(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        let data = if call.write || call.errno != 0 { 0 } else { call.len };
        let (from, to, process) = (call.target, call.from, call.process);
        let bytes = data + self.network.header_bytes;
        let small = self.network.is_small(from, to, bytes) && !(data > 0 && self.station(from).minds_connections);
        if !small {
            if let Some(call) = self.calls.get_mut(key) {
                call.answered += data;
            }
            let about = About::Answer { call: key, bytes: data, last: true };
            return self.send_answer(process, from, to, about, data, self.now);
        }
        if self.is_cut(from, to) {
            return;
        }
        let transit = self.transit();
        let arrives = self.network.send(self.now, from, to, bytes, transit);
        self.at(arrives, Happening::AnswerArrives(key));
        self.fetch_for_answer(key);
    }

    /// An answer is under way: what the end of its call touches is needed soon.
    fn fetch_for_answer(&self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        match call.owner {
            Owner::Op(op) => {
                self.network.fetch(call.from);
                self.ops.fetch(op);
                fetch(&self.processes[call.process as usize]);
            }
            Owner::Forward(forward) => self.fetch_waiters(forward),
        }
    }

    /// An answer begins to arrive: what is answered with it in turn is needed soon.
    fn fetch_answered(&self, key: Key) {
        if let Some(Call { owner: Owner::Forward(forward), .. }) = self.calls.get(key) {
            self.fetch_calls(*forward);
        }
    }

    pub(crate) fn answer_arrives(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        let data = if call.write || call.errno != 0 { 0 } else { call.len };
        let (from, to) = (call.target, call.from);
        if self.is_cut(from, to) {
            return;
        }
        let there = self.network.receive(self.now, from, to, data + self.network.header_bytes);
        self.fetch_answered(key);
        if there == self.now {
            self.answer_is_in(key);
        } else {
            self.at(there, Happening::AnswerIsIn(key));
        }
    }

    /// The answer is there.
    pub(crate) fn answer_is_in(&mut self, key: Key) {
        let Some(call) = self.remove_call(key) else { return };
        match (call.owner, call.errno) {
            (Owner::Forward(forward), errno) => self.forward_part_ended(forward, errno, call.len),
            (Owner::Op(op), 0) => self.op_part_ended(op, 0, call.len),
            (Owner::Op(_), FENCED) if call.fenced < FENCED_MAX => {
                self.send_again(Call { fenced: call.fenced + 1, ..call });
            }
            (Owner::Op(_), _) => self.path_lost(call),
        }
    }

    // Messages

    /// Sends the next quantum of a message.
    pub(crate) fn message_goes_on(&mut self, key: Key) {
        let Some(message) = self.messages.get(key) else { return };
        let (from, to) = (message.from, message.to);
        if self.is_cut(from, to) {
            return self.message_lost(key);
        }
        let Some(message) = self.messages.get_mut(key) else { return };
        let Some(step) = self.network.step(self.now, message) else { return };
        let bytes = step.bytes.min(u64::from(u32::MAX)) as u32;
        self.at(step.arrives, Happening::MessageArrives { message: key, bytes });
        if let Some(next) = step.next {
            self.at(next, Happening::MessageGoesOn(key));
        }
    }

    pub(crate) fn message_arrives(&mut self, key: Key, bytes: u32) {
        let Some(message) = self.messages.get(key) else { return };
        let (from, to) = (message.from, message.to);
        if self.is_cut(from, to) {
            return self.message_lost(key);
        }
        if let About::Answer { call, last: true, .. } = message.about {
            self.fetch_answered(call);
        }
        let there = self.network.receive(self.now, from, to, bytes.into());
        if there == self.now {
            self.message_is_in(key, bytes);
        } else {
            self.at(there, Happening::MessageIsIn { message: key, bytes });
        }
    }

    pub(crate) fn message_is_in(&mut self, key: Key, bytes: u32) {
        let Some(message) = self.messages.get_mut(key) else { return };
        let (last, stalled) = crate::network::Network::received(message);
        let owed = message.owed.min(bytes.into());
        message.owed -= owed;
        let (about, outstanding) = (message.about, message.outstanding);
        if last {
            self.messages.remove(key);
        } else if stalled {
            self.message_goes_on(key);
        }
        self.less_outstanding(outstanding, owed);
        if !last {
            if let About::Answer { call, .. } = about {
                self.freshen(call);
            }
            return;
        }
        match about {
            About::Request(call) => self.process_call(call, self.now),
            About::Answer { call, bytes, last } => self.piece_is_in(call, bytes, last),
            About::Exchange { application, aggregator } => self.exchanged(application, aggregator),
        }
    }

    fn piece_is_in(&mut self, key: Key, bytes: u64, last: bool) {
        let Some(call) = self.calls.get_mut(key) else { return };
        call.received += bytes;
        call.complete |= last;
        if call.complete && (call.errno != 0 || call.received >= call.answered) {
            self.answer_is_in(key);
        } else {
            self.freshen(key);
        }
    }

    /// A message will not arrive.
    fn message_lost(&mut self, key: Key) {
        let Some(message) = self.messages.remove(key) else { return };
        if let About::Exchange { application, aggregator } = message.about {
            self.exchanged(application, aggregator);
        }
        self.less_outstanding(message.outstanding, message.owed);
    }

    /// Bytes of answers that are no longer under way to a connection.
    fn less_outstanding(&mut self, outstanding: Option<(u32, u32, u32)>, bytes: u64) {
        let Some((node, incarnation, connection)) = outstanding else { return };
        let (now, socket) = (self.now, self.network.socket_bytes);
        let station = self.station(node);
        if station.incarnation == incarnation && station.sent(now, connection, bytes, socket) {
            self.pump(node);
        }
    }
}
