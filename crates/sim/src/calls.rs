//! Calls: a request to a node, its reply, and their path through the network.
//!
//! `patience.rs` handles calls without a reply.

use impresario_base::prefetch::fetch;
use impresario_node::pieces::{Answering, Gathering, Send};
use impresario_node::session::{self, Silence};
use impresario_sched::Nanos;

use crate::network::{About, Fate, Message};
use crate::patience::Listed;
use crate::simulation::{Event, Simulation, micros};
use impresario_base::slab::Key;

/// The errno of a fence, as on the wire.
pub(crate) const FENCED: i32 = 116;
/// The errno of an I/O node that lost its path to a data server, as on the wire.
pub(crate) const PATH_LOST: i32 = 11;
/// The errno of a node without memory for a call, as on the wire.
pub(crate) const BUSY: i32 = 16;
/// Bytes of a list entry in a request.
const LIST_ENTRY_BYTES: u64 = 16;

/// The sender of a call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Owner {
    /// An operation of a client.
    Op(Key),
    /// A forwarded request of an I/O node.
    Forward(Key),
}

/// The purpose of a call.
#[derive(Clone, Copy)]
pub(crate) struct CallContext {
    pub(crate) owner: Owner,
    pub(crate) process: u32,
    pub(crate) file: u32,
    pub(crate) write: bool,
}

pub(crate) struct Call {
    pub(crate) owner: Owner,
    /// The process on whose behalf it is made.
    pub(crate) process: u32,
    pub(crate) file: u32,
    pub(crate) from: u32,
    pub(crate) target: u32,
    pub(crate) write: bool,
    /// The first request of its process.
    pub(crate) first: bool,
    /// Reads are answered in pieces.
    stream: bool,
    /// In the target's address space.
    pub(crate) offset: u64,
    /// Total bytes.
    pub(crate) len: u64,
    /// Several extents in order.
    pub(crate) list: Option<Box<[(u64, u64)]>>,
    /// Retry state, and how long there has been no reply.
    pub(crate) session: session::Call,
    pub(crate) silence: Silence,
    /// A part of the call or of its reply was lost.
    pub(crate) is_lost: bool,
    pub(crate) listed: Listed,
    /// The reply as seen by the target and by the sender.
    pub(crate) answering: Answering,
    gathering: Gathering,
}

impl Call {
    /// Bytes of data in a reply that is sent as a whole.
    fn data(&self) -> u64 {
        if self.write || self.answering.errno() != 0 { 0 } else { self.len }
    }
}

impl Simulation {
    /// Makes a call for one range.
    pub(crate) fn call(&mut self, of: CallContext, target: u32, range: (u64, u64), first: bool) {
        let stream = target >= self.first_server && self.scenario.servers.pieces;
        self.begin_call(Call { stream, first, ..self.new_call(of, target, range) });
    }

    /// Makes a call for several ranges.
    pub(crate) fn call_list(&mut self, of: CallContext, target: u32, list: Vec<(u64, u64)>, first: bool) {
        let range = (list.first().map_or(0, |e| e.0), list.iter().map(|e| e.1).sum());
        self.begin_call(Call { stream: true, first, list: Some(list.into()), ..self.new_call(of, target, range) });
    }

    fn new_call(&self, of: CallContext, target: u32, (offset, len): (u64, u64)) -> Call {
        let CallContext { owner, process, file, write } = of;
        let from = match owner {
            Owner::Op(_) => self.processes[process as usize].node,
            Owner::Forward(forward) => self.forwards.get(forward).map_or(0, |f| self.first_io + u32::from(f.node)),
        };
        let mut session = self.timeouts.session(owner, write, self.now);
        // Until then all epochs are 0; the process record of a forwarded request is not cached.
        if self.fencing {
            session.stamp(&self.processes[process as usize].epoch);
        }
        Call {
            owner,
            process,
            file,
            from,
            target,
            write,
            first: false,
            stream: false,
            offset,
            len,
            list: None,
            session,
            silence: Silence::new(Nanos(self.now)),
            is_lost: false,
            listed: Listed::NOT,
            answering: Answering::new(len, false),
            gathering: Gathering::new(len),
        }
    }

    fn begin_call(&mut self, mut call: Call) {
        call.answering = Answering::new(call.len, call.stream && !call.write);
        call.gathering = Gathering::new(call.len);
        let (ours, node) = (matches!(call.owner, Owner::Op(_)), call.from);
        let flow = if ours { &mut self.totals.clients } else { &mut self.totals.io_nodes };
        flow.add(call.len);
        let key = self.calls.insert(call);
        self.enlist(key);
        let leaves = if ours { self.client_processor(node) } else { self.now };
        if leaves == self.now {
            self.call_leaves(key);
        } else {
            self.at(leaves, Event::CallLeaves(key));
        }
    }

    /// Sends another copy of a call.
    pub(crate) fn send_again(&mut self, mut call: Call) {
        call.session.stamp(&self.processes[call.process as usize].epoch);
        let silence = Silence::new(Nanos(self.now));
        self.begin_call(Call { is_lost: false, silence, ..call });
    }

    // Outbound

    pub(crate) fn call_leaves(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        let (from, to, bytes) = (call.from, call.target, self.request_bytes(call));
        if self.is_cut(from, to) {
            return self.lose_copy(key);
        }
        let transit = self.transit();
        if self.network.is_small(from, to, bytes) {
            let arrives = self.network.send(self.now, from, to, bytes, transit);
            return self.at(arrives, Event::CallArrives(key));
        }
        let message = self.messages.insert(Message::new(from, to, About::Request(key), bytes, transit));
        self.message_continues(message);
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
            return self.lose_copy(key);
        }
        let there = self.network.receive(self.now, from, to, bytes);
        self.process_call(key, there);
    }

    /// The target's processor starts on a call that has arrived, one at a time.
    fn process_call(&mut self, key: Key, there: u64) {
        let Some(call) = self.calls.get(key) else { return };
        let written = if call.write { call.len } else { 0 };
        let is_in = if call.target >= self.first_server {
            let cpu = micros(self.scenario.servers.cpu_us) + self.copy_ns(written);
            let concurrency = micros(self.scenario.servers.concurrency_us);
            self.servers[(call.target - self.first_server) as usize].take_up(there, cpu, concurrency)
        } else {
            let node = (call.target - self.first_io) as usize;
            let cpu = self.scenario.io_nodes.as_ref().map_or(0, |n| micros(n.cpu_us));
            self.io[node].processor(there, cpu)
        };
        if is_in == self.now {
            self.call_is_in(key);
        } else {
            self.at(is_in, Event::CallIsIn(key));
        }
    }

    pub(crate) fn call_is_in(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return };
        if self.is_cut(call.from, call.target) {
            return self.lose_copy(key);
        }
        if let Owner::Forward(forward) = call.owner {
            self.fetch_batches(forward);
        }
        self.admit(key);
    }

    // Inbound

    /// The target has served `piece_bytes` of a call, or failed; sends what is due.
    pub(crate) fn answer(&mut self, key: Key, piece_bytes: u64, errno: i32) {
        let Some(call) = self.calls.get_mut(key) else { return };
        let send = call.answering.done(piece_bytes, errno);
        self.send(key, piece_bytes, send);
    }

    /// The target rejects a call.
    pub(crate) fn refuse(&mut self, key: Key, errno: i32) {
        let Some(call) = self.calls.get_mut(key) else { return };
        let send = call.answering.give_up(errno);
        self.send(key, 0, send);
    }

    fn send(&mut self, key: Key, piece_bytes: u64, send: Send) {
        let Some(call) = self.calls.get_mut(key) else { return };
        let (from, to, process) = (call.target, call.from, call.process);
        match send {
            Send::Nothing => {}
            Send::Piece { last } => {
                call.answering.sent();
                let leaves = self.copied(from, piece_bytes);
                let about = About::Answer { call: key, bytes: piece_bytes, last };
                self.send_answer(process, from, to, about, piece_bytes, leaves);
            }
            Send::End { .. } => {
                let copied = call.data();
                let leaves = self.copied(from, copied);
                if leaves == self.now {
                    self.answer_leaves(key);
                } else {
                    self.at(leaves, Event::AnswerLeaves(key));
                }
            }
        }
    }

    /// When a server's processor has copied the data of a reply.
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

    /// The connection number between a node and the sender of a call.
    pub(crate) fn connection(&self, process: u32, to: u32) -> u32 {
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
            self.message_continues(message);
        } else {
            self.at(leaves, Event::MessageContinues(message));
        }
    }

    /// Sends the whole reply.
    pub(crate) fn answer_leaves(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return self.free_memory_of(key) };
        let data = call.data();
        let (from, to, process) = (call.target, call.from, call.process);
        let bytes = data + self.network.header_bytes;
        let small = self.network.is_small(from, to, bytes) && !(data > 0 && self.station(from).minds_connections);
        if !small {
            let about = About::Answer { call: key, bytes: data, last: true };
            return self.send_answer(process, from, to, about, data, self.now);
        }
        if self.is_cut(from, to) {
            self.lose_copy(key);
            return self.free_memory(from, key);
        }
        let transit = self.transit();
        let arrives = self.network.send(self.now, from, to, bytes, transit);
        self.at(arrives, Event::AnswerArrives(key));
        self.fetch_for_answer(key);
    }

    /// Prefetches what the end of the call will touch, while its reply is in flight.
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

    /// Prefetches what this reply will answer in turn, when it begins to arrive.
    fn fetch_answered(&self, key: Key) {
        if let Some(Call { owner: Owner::Forward(forward), .. }) = self.calls.get(key) {
            self.fetch_calls(*forward);
        }
    }

    pub(crate) fn answer_arrives(&mut self, key: Key) {
        let Some(call) = self.calls.get(key) else { return self.free_memory_of(key) };
        let data = call.data();
        let (from, to) = (call.target, call.from);
        if self.is_cut(from, to) {
            self.lose_copy(key);
            return self.free_memory(from, key);
        }
        let there = self.network.receive(self.now, from, to, data + self.network.header_bytes);
        self.fetch_answered(key);
        if there == self.now {
            self.answer_arrived(key);
        } else {
            self.at(there, Event::AnswerIsIn(key));
        }
    }

    /// The reply has arrived.
    pub(crate) fn answer_arrived(&mut self, key: Key) {
        let Some(call) = self.remove_call(key) else { return self.free_memory_of(key) };
        self.free_memory(call.target, key);
        if let Owner::Forward(_) = call.owner
            && let Some(known) = &mut self.io[(call.from - self.first_io) as usize].acquaintance
        {
            known.answered(self.now, call.target - self.first_server);
        }
        match (call.owner, call.answering.errno()) {
            (Owner::Forward(forward), errno) => self.forward_part_ended(forward, errno, call.len),
            (Owner::Op(op), 0) => self.op_part_ended(op, 0, call.len),
            (Owner::Op(_), _) => self.refused(call),
        }
    }

    // Messages

    /// Sends the next quantum of a message.
    pub(crate) fn message_continues(&mut self, key: Key) {
        let Some(message) = self.messages.get_mut(key) else { return };
        message.continues = false;
        let (from, to) = (message.from, message.to);
        if self.is_cut(from, to) {
            return self.message_lost(key);
        }
        let Some(message) = self.messages.get_mut(key) else { return };
        let Some(step) = self.network.step(self.now, message) else { return };
        message.continues = step.next.is_some();
        let bytes = step.bytes.min(u64::from(u32::MAX)) as u32;
        self.at(step.arrives, Event::MessageArrives { message: key, bytes });
        if let Some(next) = step.next {
            self.at(next, Event::MessageContinues(key));
        }
    }

    /// Nothing more can come of a message until its sender has waited.
    fn follow(&mut self, key: Key, fate: Fate) {
        if let Some(wait_ns) = fate.times_out_ns {
            self.at(self.now + wait_ns, Event::MessageTimesOut(key));
        }
        if fate.continues {
            self.message_continues(key);
        }
    }

    /// A sender has heard of nothing more for long.
    pub(crate) fn message_times_out(&mut self, key: Key) {
        let Some(message) = self.messages.get_mut(key) else { return };
        let fate = self.network.timed_out(message);
        self.follow(key, fate);
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
        if self.network.overflows(self.now, to, bytes.into()) {
            let Some(message) = self.messages.get_mut(key) else { return };
            let fate = self.network.lost(message, bytes.into());
            return self.follow(key, fate);
        }
        let there = self.network.receive(self.now, from, to, bytes.into());
        if there == self.now {
            self.message_is_in(key, bytes);
        } else {
            self.at(there, Event::MessageIsIn { message: key, bytes });
        }
    }

    pub(crate) fn message_is_in(&mut self, key: Key, bytes: u32) {
        let Some(message) = self.messages.get_mut(key) else { return };
        let fate = self.network.received(self.now, message);
        let last = fate.last;
        let owed = message.owed.min(bytes.into());
        message.owed -= owed;
        let (about, outstanding, from) = (message.about, message.outstanding, message.from);
        if last {
            self.messages.remove(key);
        } else {
            self.follow(key, fate);
        }
        self.release_outstanding(outstanding, owed);
        if let (About::Answer { call, last: true, .. }, true) = (about, last) {
            self.free_memory(from, call);
        }
        if !last {
            if let About::Answer { call, .. } = about {
                self.freshen(call);
            }
            return;
        }
        match about {
            About::Request(call) => self.process_call(call, self.now),
            About::Answer { call, bytes, .. } => self.piece_arrived(call, bytes),
            About::Exchange { application, aggregator } => self.exchanged(application, aggregator),
        }
    }

    /// A part of a reply has arrived; a part without data ends a reply that has none.
    fn piece_arrived(&mut self, key: Key, bytes: u64) {
        let Some(call) = self.calls.get_mut(key) else { return };
        let placed = bytes == 0 || call.gathering.piece(call.gathering.got_bytes(), bytes, 0).is_ok();
        debug_assert!(placed, "a piece beyond its answer");
        if bytes == 0 || call.gathering.is_complete() {
            self.answer_arrived(key);
        } else {
            self.freshen(key);
        }
    }

    /// A message is lost.
    fn message_lost(&mut self, key: Key) {
        let Some(message) = self.messages.remove(key) else { return };
        match message.about {
            About::Exchange { application, aggregator } => self.exchanged(application, aggregator),
            About::Request(call) => self.lose_copy(call),
            About::Answer { call, .. } => {
                self.lose_copy(call);
                self.free_memory(message.from, call);
            }
        }
        self.release_outstanding(message.outstanding, message.owed);
    }

    /// Removes bytes of replies from a connection's outstanding count.
    fn release_outstanding(&mut self, outstanding: Option<(u32, u32, u32)>, bytes: u64) {
        let Some((node, incarnation, connection)) = outstanding else { return };
        let (now, socket) = (self.now, self.network.socket_bytes);
        let station = self.station(node);
        if station.incarnation == incarnation && station.sent(now, connection, bytes, socket) {
            self.pump(node);
        }
    }
}
