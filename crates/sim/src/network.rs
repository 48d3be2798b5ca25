//! The network: one full-duplex link a node, to a switch that never blocks.
//!
//! A link serves messages in order of arrival, separately for sending and receiving. A message up to a quantum passes
//! either side in one go, which costs one event, or two if the receiver's link is limited. A larger one advances
//! quantum by quantum, each queued behind later arrivals, so that messages share a link equally; only a few quanta are
//! in flight between sender and receiver (a TCP window of the path's bandwidth × delay plus two quanta). The first bit
//! takes latency and jitter; the last arrives when both links have passed it.
//!
//! With a limited buffer at the port toward a link what does not fit is lost ([`crate::congestion`]). Then all messages go in
//! quanta, and their windows are those of TCP.

use impresario_base::prefetch::fetch;
use rustc_hash::FxHashMap;

use crate::congestion::{Flow, Ports};
use crate::model::Network as Params;
use impresario_base::slab::Key;

/// A node's link: until when each side is busy, ns.
#[derive(Clone, Copy, Default)]
pub(crate) struct Link {
    sent_until: u64,
    received_until: u64,
}

/// The content of a message that has several quanta or is counted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum About {
    /// The call, to its target.
    Request(Key),
    /// Bytes of the reply to a call; `last` with an errno ends it.
    Answer { call: Key, bytes: u64, last: bool },
    /// Data of an application's collective operation, for one of its aggregators if it will be written.
    Exchange { application: u32, aggregator: u32 },
}

/// A message with its own state.
pub(crate) struct Message {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) about: About,
    /// Bytes not yet sent.
    unsent: u64,
    /// Quanta in flight.
    under_way: u32,
    /// Waits for the arrival of a quantum before sending the next.
    stalled: bool,
    /// It will send the next at some instant.
    pub(crate) continues: bool,
    /// On its way through a port with a limited buffer.
    flow: Option<Box<Flow>>,
    transit_ns: u64,
    /// The connection on which it is outstanding: (server or I/O node, its incarnation, connection).
    pub(crate) outstanding: Option<(u32, u32, u32)>,
    /// The bytes outstanding there.
    pub(crate) owed: u64,
}

impl Message {
    pub(crate) fn new(from: u32, to: u32, about: About, bytes: u64, transit_ns: u64) -> Message {
        let (under_way, owed) = (0, 0);
        Message {
            from,
            to,
            about,
            unsent: bytes,
            under_way,
            stalled: false,
            continues: false,
            flow: None,
            transit_ns,
            outstanding: None,
            owed,
        }
    }
}

/// The timing of a quantum.
pub(crate) struct Step {
    /// Its bytes.
    pub(crate) bytes: u64,
    /// When its first bit (or its last, if the receiver's link is unlimited) arrives.
    pub(crate) arrives: u64,
    /// When the sender may send the next.
    pub(crate) next: Option<u64>,
}

/// What follows from the arrival or the loss of a quantum.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Fate {
    /// The message has arrived.
    pub(crate) last: bool,
    /// The next quantum is to be sent.
    pub(crate) continues: bool,
    /// Nothing happens until this much later the sender gives up waiting.
    pub(crate) times_out_ns: Option<u64>,
}

pub(crate) struct Network {
    links: Vec<Link>,
    /// The ports toward limited links, if their buffers are limited.
    ports: Option<Ports>,
    /// The link rates of compute nodes, I/O nodes and data servers, ns a byte (0: unlimited), and where the latter two
    /// begin.
    ns_per_byte: [f64; 3],
    first_io: u32,
    first_server: u32,
    pub(crate) latency_ns: u64,
    pub(crate) jitter_ns: u64,
    pub(crate) quantum_bytes: u64,
    pub(crate) header_bytes: u64,
    pub(crate) socket_bytes: u64,
    /// The last arrival between two nodes, if messages keep their order.
    last_arrival: Option<FxHashMap<(u32, u32), u64>>,
}

impl Network {
    /// Links of compute nodes, I/O nodes and data servers, in that order.
    pub(crate) fn new(params: &Params, clients: usize, io_nodes: usize, servers: usize) -> Network {
        let rates = [params.client_bytes_per_s, params.io_node_bytes_per_s, params.server_bytes_per_s];
        Network {
            links: vec![Link::default(); clients + io_nodes + servers],
            ports: Ports::new(params.port_buffer_bytes, params.retransmit_ms, params.quantum_bytes),
            ns_per_byte: rates.map(|rate| if rate > 0.0 { 1e9 / rate } else { 0.0 }),
            first_io: clients as u32,
            first_server: (clients + io_nodes) as u32,
            latency_ns: (params.latency_us * 1e3) as u64,
            jitter_ns: (params.jitter_us * 1e3) as u64,
            quantum_bytes: params.quantum_bytes,
            header_bytes: params.header_bytes,
            socket_bytes: params.socket_bytes,
            last_arrival: params.in_order.then(FxHashMap::default),
        }
    }

    fn ns_per_byte(&self, node: u32) -> f64 {
        self.ns_per_byte[usize::from(node >= self.first_io) + usize::from(node >= self.first_server)]
    }

    /// Prefetches a node's link.
    pub(crate) fn fetch(&self, node: u32) {
        fetch(&self.links[node as usize]);
    }

    /// True if a message is sent and received in one go.
    pub(crate) fn is_small(&self, from: u32, to: u32, bytes: u64) -> bool {
        if self.has_port(to) {
            return false;
        }
        bytes <= self.quantum_bytes || (self.ns_per_byte(from) == 0.0 && self.ns_per_byte(to) == 0.0)
    }

    /// Sends a small message: when its first bit (or its last, if the receiver's link is unlimited) arrives.
    pub(crate) fn send(&mut self, now: u64, from: u32, to: u32, bytes: u64, transit_ns: u64) -> u64 {
        let unlimited = self.ns_per_byte(to) == 0.0;
        let ns_per_byte = self.ns_per_byte(from);
        let arrives = if ns_per_byte == 0.0 {
            now + transit_ns
        } else {
            let link = &mut self.links[from as usize];
            let start = now.max(link.sent_until);
            link.sent_until = start + (bytes as f64 * ns_per_byte) as u64;
            transit_ns + if unlimited { link.sent_until } else { start }
        };
        let Some(last) = &mut self.last_arrival else { return arrives };
        let last = last.entry((from, to)).or_default();
        *last = arrives.max(*last);
        *last
    }

    /// When the last byte has arrived, if bytes from `from` start arriving at `to` now.
    pub(crate) fn receive(&mut self, now: u64, from: u32, to: u32, bytes: u64) -> u64 {
        let sending_ns = (bytes as f64 * self.ns_per_byte(from)) as u64;
        let ns_per_byte = self.ns_per_byte(to);
        if ns_per_byte == 0.0 {
            return now;
        }
        let link = &mut self.links[to as usize];
        link.received_until = now.max(link.received_until) + (bytes as f64 * ns_per_byte) as u64;
        link.received_until.max(now + sending_ns)
    }

    /// Sends the next quantum of a message, or stalls it.
    pub(crate) fn step(&mut self, now: u64, message: &mut Message) -> Option<Step> {
        let (from, to) = (message.from, message.to);
        let has_room = match self.ports.as_ref().filter(|_| self.has_port(to)) {
            Some(ports) => {
                // A message may be empty, and is sent all the same.
                let is_begun = message.flow.is_some();
                let flow = message.flow.get_or_insert_with(|| ports.begin(now, from, to));
                flow.has_several |= message.under_way > 0;
                (message.unsent > 0 || !is_begun) && flow.has_room(message.under_way)
            }
            None => {
                let slower = self.ns_per_byte(from).max(self.ns_per_byte(to));
                let delay_quanta = (message.transit_ns as f64 / (slower * self.quantum_bytes as f64).max(1.0)) as u32;
                message.under_way < delay_quanta.saturating_add(2)
            }
        };
        if !has_room {
            message.stalled = true;
            return None;
        }
        let bytes = message.unsent.min(self.quantum_bytes);
        message.unsent -= bytes;
        message.under_way += 1;
        let arrives = self.send(now, message.from, message.to, bytes, message.transit_ns);
        let next = (message.unsent > 0).then(|| now.max(self.links[from as usize].sent_until));
        Some(Step { bytes, arrives, next })
    }

    /// The link of a node is behind a port with a limited buffer.
    fn has_port(&self, to: u32) -> bool {
        self.ports.is_some() && self.ns_per_byte(to) > 0.0
    }

    /// Whether a quantum that arrives at a port does not fit into its buffer.
    pub(crate) fn overflows(&self, now: u64, to: u32, bytes: u64) -> bool {
        let Some(ports) = self.ports.as_ref().filter(|_| self.has_port(to)) else { return false };
        let queued_ns = self.links[to as usize].received_until.saturating_sub(now);
        queued_ns as f64 / self.ns_per_byte(to) + bytes as f64 > ports.buffer_bytes as f64
    }

    /// A quantum was received.
    pub(crate) fn received(&mut self, now: u64, message: &mut Message) -> Fate {
        message.under_way -= 1;
        let stalled = std::mem::take(&mut message.stalled);
        let (Some(flow), Some(ports)) = (&mut message.flow, &mut self.ports) else {
            let last = message.unsent == 0 && message.under_way == 0;
            return Fate { last, continues: !last && stalled, times_out_ns: None };
        };
        message.unsent += flow.arrived(ports.timeout_ns);
        let last = message.unsent == 0 && message.under_way == 0 && !flow.has_lost();
        if last {
            ports.end(now, message.from, message.to, flow);
            return Fate { last, ..Fate::default() };
        }
        self.go_on(message)
    }

    /// A quantum was lost.
    pub(crate) fn lost(&mut self, message: &mut Message, bytes: u64) -> Fate {
        message.under_way -= 1;
        message.flow.iter_mut().for_each(|flow| flow.lost(bytes));
        self.go_on(message)
    }

    /// A sender has waited for long.
    pub(crate) fn timed_out(&self, message: &mut Message) -> Fate {
        message.unsent += message.flow.as_mut().map_or(0, |flow| flow.timed_out());
        self.go_on(message)
    }

    /// What a message on its way through a port does next.
    fn go_on(&self, message: &mut Message) -> Fate {
        let (Some(flow), Some(ports)) = (&mut message.flow, &self.ports) else { return Fate::default() };
        if message.unsent > 0 && flow.has_room(message.under_way) {
            return Fate { continues: !message.continues, ..Fate::default() };
        }
        let is_stuck = message.under_way == 0 && flow.has_lost();
        // Twice the longest round.
        let queue_ns = (ports.buffer_bytes as f64 * self.ns_per_byte(message.to)) as u64;
        let probe_ns = 2 * (queue_ns + message.transit_ns);
        let times_out_ns = if is_stuck { flow.wait(message.from, probe_ns, ports.timeout_max_ns()) } else { None };
        Fate { times_out_ns, ..Fate::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(client: f64, server: f64) -> Network {
        let params = Params {
            latency_us: 10.0,
            jitter_us: 0.0,
            client_bytes_per_s: client,
            server_bytes_per_s: server,
            quantum_bytes: 1000,
            ..Params::default()
        };
        Network::new(&params, 2, 0, 1)
    }

    #[test]
    fn a_small_message_passes_both_links_at_once() {
        let mut n = network(1e9, 5e8);
        let first = n.send(0, 0, 2, 1000, 10_000);
        assert_eq!((first, n.receive(first, 0, 2, 1000)), (10_000, 12_000), "the slower link decides");
        let second = n.send(0, 0, 2, 1000, 10_000);
        assert_eq!((second, n.receive(second, 0, 2, 1000)), (11_000, 14_000), "behind the first on both");
        let other = n.send(0, 1, 2, 500, 10_000);
        assert_eq!((other, n.receive(other, 1, 2, 500)), (10_000, 15_000));
    }

    #[test]
    fn messages_keep_their_order_if_configured() {
        for in_order in [false, true] {
            let params = Params { in_order, ..Params::default() };
            let mut n = Network::new(&params, 2, 0, 1);
            assert_eq!(n.send(0, 0, 2, 10, 30_000), 30_000);
            assert_eq!(n.send(5, 0, 2, 10, 10_000), if in_order { 30_000 } else { 10_005 });
            assert_eq!(
                (n.send(5, 1, 2, 10, 10_000), n.send(5, 2, 0, 10, 10_000)),
                (10_005, 10_005),
                "other connections"
            );
        }
    }

    #[test]
    fn unlimited_links_take_no_time() {
        let mut n = network(0.0, 0.0);
        let at = n.send(7, 0, 2, 1 << 40, 10_000);
        assert_eq!((at, n.receive(at, 0, 2, 1 << 40)), (10_007, 10_007));
        assert!(n.is_small(0, 2, 1 << 40));
        let mut n = network(1e9, 0.0);
        assert_eq!(n.send(0, 0, 2, 1000, 10_000), 11_000, "the last bit");
        assert!(!n.is_small(0, 2, 1001));
    }

    /// Two quanta fit into the port's buffer. Of the first window the others are lost, and as nothing comes behind them, found
    /// by a probe.
    #[test]
    fn what_does_not_fit_into_a_port_is_lost_and_sent_again() {
        let params = Params {
            server_bytes_per_s: 1e9,
            quantum_bytes: 1460,
            port_buffer_bytes: 2 * 1460,
            retransmit_ms: 200.0,
            ..Params::default()
        };
        let mut n = Network::new(&params, 1, 0, 1);
        let mut m = Message::new(0, 1, About::Request(Key::NONE), 10 * 1460, 10_000);
        let steps: Vec<Step> = std::iter::from_fn(|| n.step(0, &mut m)).collect();
        assert_eq!(steps.len(), 10, "the first window");
        let fits: Vec<bool> = (0..10)
            .map(|_| {
                let fits = !n.overflows(10_000, 1, 1460);
                if fits {
                    n.receive(10_000, 0, 1, 1460);
                } else {
                    assert_eq!(n.lost(&mut m, 1460), Fate::default(), "two are under way");
                }
                fits
            })
            .collect();
        assert_eq!(fits.iter().filter(|fits| **fits).count(), 2);
        assert_eq!(n.received(12_000, &mut m), Fate::default());
        let times_out_ns = n.received(13_000, &mut m).times_out_ns;
        assert_eq!(times_out_ns, Some(2 * (2 * 1460 + 10_000)), "for a probe");
        assert!(n.timed_out(&mut m).continues);
        for left in (0..8u32).rev() {
            while n.step(300_000_000, &mut m).is_some() {}
            let fate = n.received(300_000_000, &mut m);
            assert_eq!((fate.last, fate.times_out_ns), (left == 0, None));
        }
        // Without a limited link behind it there is no port.
        assert!(!n.overflows(0, 0, u64::MAX) && n.is_small(1, 0, 1000) && !n.is_small(0, 1, 1000));
    }

    #[test]
    fn a_large_message_goes_in_quanta_with_a_window() {
        let mut n = network(1e9, 1e9);
        let mut m = Message::new(0, 2, About::Request(Key::NONE), 100_000, 10_000);
        let first = n.step(0, &mut m).unwrap();
        assert_eq!((first.bytes, first.arrives, first.next), (1000, 10_000, Some(1000)));
        let mut sent = 1;
        while n.step(sent * 1000, &mut m).is_some() {
            sent += 1;
        }
        assert_eq!(sent, 12, "ten quanta of delay and two");
        assert_eq!(n.received(20_000, &mut m), Fate { continues: true, ..Fate::default() });
        assert!(n.step(20_000, &mut m).is_some());
    }
}
