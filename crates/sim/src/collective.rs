//! CollectiveCall two-phase I/O as in ROMIO (R. Thakur, W. Gropp and E. Lusk, *Data sieving and collective I/O in ROMIO*,
//! 1999), as with its hints `romio_cb_read` and `romio_cb_write` set to `enable`.
//!
//! The i-th requests of all processes form one collective call. All processes exchange the bounds of their requests (a
//! tree of latencies); the range from the first to the last wanted byte is divided evenly among the aggregators; each
//! handles its part in rounds of its buffer size. When reading, an aggregator reads from the first to the last wanted
//! byte of a round's window, holes included, and sends each process its bytes; when writing, it first receives the
//! bytes, and reads a window with holes before writing it. Data between processes of one compute node costs nothing. A
//! round ends for all when its last byte has arrived, and the call with its last round.

use crate::access::Access;
use crate::client::Kind;
use crate::model::Operation;
use crate::network::{About, Message};
use crate::simulation::{Event, Simulation};

/// A collective call in progress.
#[derive(Default)]
pub(crate) struct CollectiveCall {
    /// The processes that have arrived, and when.
    arrived: Vec<(u32, u64, Access)>,
    /// The wanted ranges: (offset, length, process), by offset.
    wanted: Vec<(u64, u64, u32)>,
    aggregators: Vec<Aggregator>,
    op: Operation,
    round: u64,
    rounds: u64,
    /// Operations and messages of the round in progress.
    pending: u32,
    failed: bool,
}

/// A process that does the I/O.
struct Aggregator {
    process: u32,
    /// Its part, from the first to the last wanted byte.
    start: u64,
    end: u64,
    /// The round's window from the first to the last wanted byte, and whether it has holes.
    window: (u64, u64),
    holes: bool,
    /// Messages that must arrive before it can write.
    waits_for: u32,
}

impl Simulation {
    /// A process joins its collective call; the last one starts it.
    pub(crate) fn join_collective(&mut self, process: u32, access: Access) {
        let application = self.processes[process as usize].application as usize;
        let a = &mut self.applications[application];
        let (processes, now) = (a.processes, self.now);
        let Some(call) = &mut a.collective else { return };
        call.arrived.push((process, now, access));
        if call.arrived.len() < processes as usize {
            return;
        }
        call.op = access.op;
        self.divide(application as u32);
        // All processes learn all requests: a tree of messages.
        let steps = u64::from(32 - (processes - 1).leading_zeros());
        let exchange = 2 * steps * self.transit();
        self.at(now + exchange, Event::Round(application as u32));
    }

    /// Divides the range among the aggregators.
    fn divide(&mut self, application: u32) {
        let per_node = self.scenario.clients.processes_per_node;
        let Some(params) = self.model_of(application).collective.clone() else { return };
        let a = &mut self.applications[application as usize];
        let (first, processes) = (a.first_process, a.processes);
        let Some(call) = &mut a.collective else { return };
        call.wanted.clear();
        for (process, _, access) in &call.arrived {
            call.wanted.extend(access.extents().map(|(offset, len)| (offset, len, *process)));
        }
        call.wanted.sort_unstable();
        let start = call.wanted.first().map_or(0, |w| w.0);
        let end = call.wanted.iter().map(|w| w.0 + w.1).max().unwrap_or(0);
        let count = match params.aggregators {
            0 => processes.div_ceil(per_node),
            n => n.min(processes),
        };
        let share = (end - start).div_ceil(u64::from(count)).max(1);
        call.aggregators.clear();
        call.rounds = 0;
        for n in 0..count {
            let process = match params.aggregators {
                0 => first + n * per_node,
                _ => first + (u64::from(n) * u64::from(processes) / u64::from(count)) as u32,
            };
            let from = start + u64::from(n) * share;
            let Some((start, end)) = hull(&call.wanted, from, (from + share).min(end)) else { continue };
            call.rounds = call.rounds.max((end - start).div_ceil(params.buffer_bytes));
            call.aggregators.push(Aggregator { process, start, end, window: (0, 0), holes: false, waits_for: 0 });
        }
        (call.round, call.pending, call.failed) = (0, 0, false);
    }

    /// Starts the next round: all aggregators read, or all processes send data to be written.
    pub(crate) fn collective_round(&mut self, application: u32) {
        let buffer = self.model_of(application).collective.as_ref().map_or(1, |c| c.buffer_bytes);
        loop {
            let a = &mut self.applications[application as usize];
            let Some(call) = &mut a.collective else { return };
            if call.round >= call.rounds {
                return self.collective_ends(application);
            }
            let (round, op) = (call.round, call.op);
            call.round += 1;
            for aggregator in &mut call.aggregators {
                let from = aggregator.start + round * buffer;
                let to = (from + buffer).min(aggregator.end);
                let window = hull(&call.wanted, from.min(to), to);
                aggregator.window = window.unwrap_or((0, 0));
                aggregator.holes = window.is_some_and(|(s, e)| covered(&call.wanted, s, e) < e - s);
            }
            let busy: Vec<u32> =
                (0..call.aggregators.len() as u32).filter(|n| call.aggregators[*n as usize].window.1 > 0).collect();
            if busy.is_empty() {
                continue;
            }
            // Counts this loop too, so that the round does not end before all have started.
            call.pending = busy.len() as u32 + 1;
            for n in busy {
                match op {
                    Operation::Read => self.aggregator_works(application, n),
                    Operation::Write => self.send_to_aggregator(application, n),
                }
            }
            return self.round_has_less(application);
        }
    }

    fn aggregator_works(&mut self, application: u32, n: u32) {
        let a = &self.applications[application as usize];
        let Some(call) = &a.collective else { return };
        let (op, aggregator, file) = (call.op, &call.aggregators[n as usize], a.first_file);
        let (process, (start, end)) = (aggregator.process, aggregator.window);
        let then_write = op == Operation::Write && aggregator.holes;
        let op = if then_write { Operation::Read } else { op };
        let access = Access { file: 0, op, offset: start, len: end - start, stride: end - start, count: 1 };
        let first = self.applications[application as usize].latency_ns.count() == 0;
        let op = self.begin(Kind::Aggregate { aggregator: n, then_write }, process, file, access, first);
        self.send_access(op);
    }

    /// An aggregator's operation ended.
    pub(crate) fn aggregator_ended(&mut self, application: u32, n: u32, errno: i32) {
        let Some(call) = &mut self.applications[application as usize].collective else { return };
        call.failed |= errno != 0;
        if call.op == Operation::Read && errno == 0 {
            let sent = self.exchange(application, n, true);
            if let Some(call) = &mut self.applications[application as usize].collective {
                call.pending += sent;
            }
        }
        self.round_has_less(application);
    }

    fn send_to_aggregator(&mut self, application: u32, n: u32) {
        let sent = self.exchange(application, n, false);
        let Some(call) = &mut self.applications[application as usize].collective else { return };
        call.aggregators[n as usize].waits_for = sent;
        if sent == 0 {
            self.aggregator_works(application, n);
        }
    }

    /// Sends the data of an aggregator's window to or from the compute nodes that want it; returns the number of
    /// messages.
    fn exchange(&mut self, application: u32, n: u32, from_aggregator: bool) -> u32 {
        let Some(call) = &self.applications[application as usize].collective else { return 0 };
        let aggregator = &call.aggregators[n as usize];
        let (start, end) = aggregator.window;
        let home = self.processes[aggregator.process as usize].node;
        let mut by_node: Vec<(u32, u64)> = within(&call.wanted, start, end)
            .map(|(_, len, process)| (self.processes[process as usize].node, len))
            .collect();
        by_node.sort_unstable();
        by_node.dedup_by(|next, sum| {
            let same = next.0 == sum.0;
            sum.1 += if same { next.1 } else { 0 };
            same
        });
        by_node.retain(|(node, _)| *node != home);
        let messages = by_node.len() as u32;
        for (node, bytes) in by_node {
            let (from, to) = if from_aggregator { (home, node) } else { (node, home) };
            let about = About::Exchange { application, aggregator: n };
            let transit = self.transit();
            let message = Message::new(from, to, about, bytes + self.network.header_bytes, transit);
            let message = self.messages.insert(message);
            self.message_continues(message);
        }
        messages
    }

    /// A message of an exchange arrived.
    pub(crate) fn exchanged(&mut self, application: u32, n: u32) {
        let Some(call) = &mut self.applications[application as usize].collective else { return };
        if call.op == Operation::Read {
            return self.round_has_less(application);
        }
        let aggregator = &mut call.aggregators[n as usize];
        aggregator.waits_for -= 1;
        if aggregator.waits_for == 0 {
            self.aggregator_works(application, n);
        }
    }

    fn round_has_less(&mut self, application: u32) {
        let Some(call) = &mut self.applications[application as usize].collective else { return };
        call.pending -= 1;
        if call.pending == 0 {
            // A separate event, so that rounds without I/O do not grow the stack.
            self.at(self.now, Event::Round(application));
        }
    }

    fn collective_ends(&mut self, application: u32) {
        let Some(call) = &mut self.applications[application as usize].collective else { return };
        let failed = call.failed;
        call.wanted.clear();
        for (process, began, access) in std::mem::take(&mut call.arrived) {
            self.request_ended(process, began, if failed { 0 } else { access.bytes() });
        }
    }
}

/// The wanted ranges within a range, clipped to it.
fn within(wanted: &[(u64, u64, u32)], start: u64, end: u64) -> impl Iterator<Item = (u64, u64, u32)> {
    // Wanted ranges do not overlap, so their ends are ordered too.
    let first = wanted.partition_point(|w| w.0 + w.1 <= start);
    wanted[first..].iter().take_while(move |w| w.0 < end).map(move |&(offset, len, process)| {
        let (from, to) = (offset.max(start), (offset + len).min(end));
        (from, to - from, process)
    })
}

/// From the first to the last wanted byte in a range.
fn hull(wanted: &[(u64, u64, u32)], start: u64, end: u64) -> Option<(u64, u64)> {
    let first = within(wanted, start, end).next().filter(|_| start < end)?;
    let last = wanted.partition_point(|w| w.0 < end);
    let (offset, len, _) = wanted[last - 1];
    Some((first.0, (offset + len).min(end)))
}

/// Wanted bytes in a range.
fn covered(wanted: &[(u64, u64, u32)], start: u64, end: u64) -> u64 {
    within(wanted, start, end).map(|(_, len, _)| len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_to_what_is_wanted() {
        let wanted = [(0, 10, 1), (20, 10, 2), (40, 10, 3)];
        assert_eq!(within(&wanted, 5, 25).collect::<Vec<_>>(), [(5, 5, 1), (20, 5, 2)]);
        assert_eq!((hull(&wanted, 12, 60), hull(&wanted, 5, 45)), (Some((20, 50)), Some((5, 45))));
        assert_eq!((hull(&wanted, 10, 20), hull(&wanted, 7, 7)), (None, None));
        assert_eq!(covered(&wanted, 5, 45), 20);
    }
}
