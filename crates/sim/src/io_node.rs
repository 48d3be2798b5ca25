//! The I/O nodes: calls become scheduled requests, batches wait in the dispatch queue, neighbours are forwarded
//! together.

use impresario_node::session::Fence;
use impresario_node::{DispatchQueue, Entry, Merging, Parent, core_requests, covered};
use impresario_sched::{
    Batch, ClientId, Completion, ConnId, Extent, FileId, JobId, LaneId, Naming, Nanos, Op, Request, RequestId, UserId,
};

use crate::calls::{CallContext, FENCED, Owner};
use crate::client::EIO;
use crate::members::Acquaintance;
use crate::memory::Memory;
use crate::model::{IoNodes, Merge};
use crate::simulation::{Event, FENCED_CLIENTS, MERGE_BYTES, Simulation, micros};
use crate::station::{Decision, Station};
use impresario_base::slab::{Key, Slab};

pub(crate) struct IoNode {
    pub(crate) station: Station,
    /// Batches released by the policy, queued or in flight.
    pub(crate) released: Slab<Batch>,
    pub(crate) dispatch: DispatchQueue<Released>,
    /// Forwarding threads woken for an entry of the dispatch queue.
    pub(crate) called: u32,
    pub(crate) fence: Fence,
    /// Until when the processor is busy, ns.
    pub(crate) busy_until: u64,
    /// File + 1 and offset of the last forwarded request.
    pub(crate) last: (u32, u64),
    /// When the last process's first request arrived.
    pub(crate) first_arrival: Option<u64>,
    pub(crate) acquaintance: Option<Box<Acquaintance>>,
    pub(crate) memory: Option<Box<Memory>>,
}

/// A batch in the dispatch queue or in flight.
#[derive(Clone, Copy)]
pub(crate) struct Released {
    batch: Key,
    /// The process of its first request.
    process: u32,
}

/// A request in flight to the data servers.
pub(crate) struct Forward {
    pub(crate) node: u16,
    members: Vec<Entry<Released>>,
    pub(crate) started: u64,
    parent: Parent,
}

/// The dispatch queue of a node.
pub(crate) fn dispatch_queue(settings: &IoNodes) -> DispatchQueue<Released> {
    let IoNodes { merge, threads, merge_requests, .. } = *settings;
    let merging = match merge {
        Merge::Contiguous => Merging::Contiguous,
        Merge::List => Merging::List,
    };
    DispatchQueue::new(threads as usize, merging, merge_requests as usize, MERGE_BYTES)
}

impl IoNode {
    /// When the processor will have handled something that arrives at `there`.
    pub(crate) fn processor(&mut self, there: u64, cpu_ns: u64) -> u64 {
        if cpu_ns == 0 {
            return there;
        }
        self.busy_until = there.max(self.busy_until) + cpu_ns;
        self.busy_until
    }
}

impl Simulation {
    /// The core of an I/O node or data server.
    pub(crate) fn station(&mut self, node: u32) -> &mut Station {
        if node >= self.first_server {
            &mut self.servers[(node - self.first_server) as usize].station
        } else {
            &mut self.io[(node - self.first_io) as usize].station
        }
    }

    pub(crate) fn pump(&mut self, node: u32) {
        if node >= self.first_server {
            self.pump_server((node - self.first_server) as u16);
        } else {
            self.pump_io((node - self.first_io) as u16);
        }
    }

    /// Records the gap between the arrivals of processes' first requests at a node.
    pub(crate) fn note_first(&mut self, node: u32) {
        let now = self.now;
        let last = if node >= self.first_server {
            &mut self.servers[(node - self.first_server) as usize].first_arrival
        } else {
            &mut self.io[(node - self.first_io) as usize].first_arrival
        };
        if let Some(last) = last.replace(now) {
            self.first_gaps.push(now - last);
        }
    }

    pub(crate) fn io_node_takes(&mut self, node: u16, key: Key) {
        let Some(call) = self.calls.get_mut(key) else { return };
        let (process, epoch, file, write) = (call.process, call.session.epoch(), call.file, call.write);
        let (offset, len, target) = (call.offset, call.len, call.target);
        let list = call.list.take();
        if std::mem::take(&mut call.first) {
            self.note_first(target);
        }
        let n = &mut self.io[usize::from(node)];
        if self.fencing && !n.fence.admit(u64::from(process), epoch) {
            return self.refuse(key, FENCED);
        }
        let one = [(offset, len)];
        let extents = list.as_ref().map_or(&one[..], |list| list);
        let split = self.scenario.io_nodes.as_ref().is_some_and(|n| n.split);
        let layout = self.files[file as usize].layout;
        let job = self.files[file as usize].application;
        let op = if write { Op::Write } else { Op::Read };
        let mut request = Request {
            id: RequestId(0),
            extent: Extent { file: FileId(file), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 0 },
            arrival: Nanos(self.now),
            client: ClientId(process),
            conn: ConnId(process),
            job: JobId(job),
            user: UserId(job),
            op,
            naming: Naming::default(),
        };
        let (mut taken, mut parts) = (true, 0);
        for &(offset, len) in extents {
            for p in core_requests(&layout, offset, len, split) {
                let (lane, file_offset) = (LaneId(p.server), p.file_offset);
                request.extent = Extent { lane, file_offset, lane_offset: p.lane_offset, len: p.len, ..request.extent };
                let is_taken = n.station.push(self.now, &request, key, process);
                taken &= is_taken;
                parts += u32::from(is_taken);
            }
        }
        if let Some(call) = self.calls.get_mut(key) {
            call.list = list;
        }
        if !taken {
            self.refuse(key, EIO); // more than a million requests in one core
        }
        self.memory_is_for(target, key, parts);
        self.pump_io(node);
    }

    pub(crate) fn pump_io(&mut self, node: u16) {
        let split = self.scenario.io_nodes.as_ref().is_some_and(|n| n.split);
        let late_us = self.scenario.io_nodes.as_ref().map_or(0.0, |n| n.timer_late_us);
        let handover = self.scenario.io_nodes.as_ref().map_or(0, |n| micros(n.handover_us));
        loop {
            let n = &mut self.io[usize::from(node)];
            match n.station.next(self.now) {
                Decision::Batch(batch, _) => {
                    let file = u64::from(batch.extent.file.0);
                    let process = batch.parts.first().map_or(0, |part| n.station.waiter(part.id).process);
                    // A file is of one application.
                    let entry = Entry::of(&batch, file, split, (0, 0), ());
                    let layout = &self.files[batch.extent.file.0 as usize].layout;
                    let spans = !split && layout.pieces(entry.offset, entry.len).nth(1).is_some() && layout.pcount > 1;
                    let entry = Entry { spans, ..entry };
                    let token = Released { batch: n.released.insert(batch), process };
                    n.dispatch.push(entry.with(token));
                    if handover > 0 {
                        let awake = self.now + self.random.below(handover + 1);
                        self.calendar.push(awake, Event::ThreadAwake(node));
                    } else {
                        n.called += 1;
                    }
                }
                Decision::Wait(until) => {
                    if until < n.station.alarm {
                        n.station.alarm = until;
                        let late = self.late(late_us);
                        self.calendar.push(until.max(self.now) + late, Event::IoAlarm(node));
                    }
                    break;
                }
            }
        }
        let n = &mut self.io[usize::from(node)];
        let queued = n.station.core.queued();
        let change = f64::from(queued) - f64::from(std::mem::replace(&mut n.station.queued, queued));
        self.recorder.change(self.now, |r| &mut r.io_queue, change);
        loop {
            let n = &mut self.io[usize::from(node)];
            if n.called == 0 {
                break;
            }
            let Some(members) = n.dispatch.pop() else {
                // Neighbours took their entries along.
                if n.dispatch.is_empty() {
                    n.called = 0;
                }
                break;
            };
            n.called -= 1;
            self.forward(node, members, split);
        }
    }

    /// A forwarding thread is awake and takes the oldest entry.
    pub(crate) fn thread_awake(&mut self, node: u16) {
        self.io[usize::from(node)].called += 1;
        self.pump_io(node);
    }

    /// Sends batches to the data servers as one request, in the name of the first member.
    fn forward(&mut self, node: u16, members: Vec<Entry<Released>>, split: bool) {
        let Some(first) = members.first() else { return };
        let (file, op, space, start) = (first.file as u32, first.op, first.space, first.offset);
        let (end, lane) = (members.iter().map(|m| m.offset + m.len).max().unwrap_or(start), first.lane);
        let ranges = covered(members.iter().map(|m| (m.offset, m.len)));
        let n = &mut self.io[usize::from(node)];
        let process = first.token.process;
        self.totals.distance.step(&mut n.last, file, start);
        let layout = self.files[file as usize].layout;
        let key = self.forwards.insert(Forward { node, members, started: self.now, parent: Parent::new(1) });
        let context = CallContext { owner: Owner::Forward(key), process, file, write: op == Op::Write };
        let one = match split {
            _ if ranges.len() > 1 => {
                // Not of batches that are read through: those have one member.
                let to_lane = |range: &std::ops::Range<u64>| match split {
                    true => range.start,
                    false => layout.locate(range.start).1,
                };
                let list = covered(ranges.iter().map(|range| (to_lane(range), range.end - range.start)));
                let list = list.into_iter().map(|range| (range.start, range.end - range.start)).collect();
                self.call_list(context, self.first_server + u32::from(lane), list, false);
                if let Some(forward) = self.forwards.get_mut(key) {
                    forward.parent = Parent::new(1);
                }
                return;
            }
            true => Some((space, start)),
            false => {
                let first = layout.pieces(start, end - start).next().filter(|p| p.len == end - start);
                first.map(|p| (p.server, p.lane_offset))
            }
        };
        let mut calls = 0;
        match one {
            Some((server, lane_offset)) => {
                let target = self.first_server + u32::from(server);
                self.call(context, target, (lane_offset, end - start), false);
                calls += 1;
            }
            None => {
                for range in layout.lane_ranges(start, end - start) {
                    let target = self.first_server + u32::from(range.server);
                    self.call(context, target, (range.lane_offset, range.len), false);
                    calls += 1;
                }
            }
        }
        if let Some(forward) = self.forwards.get_mut(key) {
            forward.parent = Parent::new(calls);
        }
    }

    /// The batches of a forwarded request.
    fn batches_of(&self, forward: Key) -> impl Iterator<Item = (&Station, &Batch)> {
        let forward = self.forwards.get(forward);
        forward.into_iter().flat_map(|f| {
            let n = &self.io[usize::from(f.node)];
            f.members.iter().filter_map(|member| Some((&n.station, n.released.get(member.token.batch)?)))
        })
    }

    /// Prefetches the batches of a forwarded request when it reaches its server: its reply will need them.
    pub(crate) fn fetch_batches(&self, forward: Key) {
        let Some(f) = self.forwards.get(forward) else { return };
        let n = &self.io[usize::from(f.node)];
        f.members.iter().for_each(|member| n.released.fetch(member.token.batch));
    }

    /// Prefetches the waiters of a forwarded request while its reply is in flight.
    pub(crate) fn fetch_waiters(&self, forward: Key) {
        self.batches_of(forward).for_each(|(station, batch)| {
            station.core.fetch_batch(batch.id);
            batch.parts.iter().for_each(|part| station.fetch(part.id));
        });
    }

    /// Prefetches the calls that a forwarded request's reply will answer, when it arrives.
    pub(crate) fn fetch_calls(&self, forward: Key) {
        self.batches_of(forward).for_each(|(station, batch)| {
            let calls = batch.parts.iter().filter_map(|part| station.call(part.id));
            calls.for_each(|call| self.calls.fetch(call));
        });
    }

    /// A call of a forwarded request ended.
    pub(crate) fn forward_part_ended(&mut self, key: Key, errno: i32, bytes: u64) {
        let Some(forward) = self.forwards.get_mut(key) else { return };
        let Some((errno, _)) = forward.parent.part_done(errno, bytes) else { return };
        let Some(Forward { node, members, started, .. }) = self.forwards.remove(key) else { return };
        let at = usize::from(node);
        self.io[at].dispatch.done();
        for member in members {
            let Some(batch) = self.io[at].released.remove(member.token.batch) else { continue };
            let mut completion = Completion::of(&batch, Nanos(started), Nanos(self.now));
            if errno != 0 {
                (completion.errno, completion.bytes_done) = (errno, 0);
            }
            // Look up the waiters before the core may reuse the slots.
            for part in &batch.parts {
                self.part_completed(self.first_io + u32::from(node), part.id, part.len, errno);
            }
            self.io[at].station.completed(self.now, completion);
        }
        self.pump_io(node);
    }

    /// `len` bytes of a request of a node's core are complete: adds them to the reply of its call.
    pub(crate) fn part_completed(&mut self, node: u32, id: RequestId, len: u64, errno: i32) -> bool {
        let waiter = self.station(node).waiter(id);
        waiter.undelivered -= len;
        let (whole, key) = (waiter.undelivered == 0, waiter.call);
        self.answer(key, len, errno);
        if whole {
            self.memory_has_less(node, key);
        }
        whole
    }

    /// An I/O node fails with everything that it holds; the servers see its connections close.
    pub(crate) fn lose_io_node(&mut self, node: u16) {
        let Some(settings) = self.scenario.io_nodes.as_ref() else { return };
        let dispatch = dispatch_queue(settings);
        let n = &mut self.io[usize::from(node)];
        n.released = Slab::default();
        n.dispatch = dispatch;
        n.called = 0;
        n.fence = Fence::new(FENCED_CLIENTS);
        n.memory.iter_mut().for_each(|memory| memory.forget());
        let result = n.station.restart(self.now);
        let queued = f64::from(std::mem::take(&mut n.station.queued));
        self.recorder.change(self.now, |r| &mut r.io_queue, -queued);
        let gone: Vec<Key> = self.forwards.iter().filter(|(_, f)| f.node == node).map(|(key, _)| key).collect();
        for key in &gone {
            self.forwards.remove(*key);
        }
        let theirs = |c: &crate::calls::Call| matches!(c.owner, Owner::Forward(f) if self.forwards.get(f).is_none());
        let calls: Vec<Key> = self.calls.iter().filter(|(_, c)| theirs(c)).map(|(key, _)| key).collect();
        calls.into_iter().for_each(|key| drop(self.remove_call(key)));
        self.lose_copies_at(self.first_io + u32::from(node));
        self.forget_members(node);
        self.drop_connection(u32::from(node));
        if let Err(refusal) = result {
            self.violated(format!("a policy that had been accepted was refused: {refusal}"));
        }
    }
}
