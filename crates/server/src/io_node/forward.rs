//! What the I/O node's policy has released: waits in the dispatch queue, is merged with neighbours, is forwarded.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use impresario_base::lock::Mutex;
use impresario_client::{Identity, TrafficCount};
use impresario_engine::{Executor, Outcome, Started, Ticket, Work, now};
use impresario_node::{DispatchQueue, Entry};
use impresario_sched::{Op, Request};
use impresario_wire::{Answer, Fault, Who};

use super::family::{Complete, Short};
use super::storage::{Storage, Target};
use super::{Answering, IoSettings, Item};
use crate::listener::Vitals;
use crate::outbox::{Bulk, hand_over_own_replies};
use crate::payload::Slice;
use crate::workers::{PATIENCE, Workers};

/// A batch that the policy released.
pub(super) struct Load {
    parts: Vec<(Request, Item)>,
    ticket: Ticket<Item>,
}

/// The dispatch queue and the threads that forward from it.
pub(super) struct Forwarder {
    this: Weak<Forwarder>,
    vitals: Vitals,
    storage: Arc<dyn Storage>,
    split: bool,
    queue: Mutex<DispatchQueue<Load>>,
    /// Entries of the queue that no thread was called for yet.
    uncalled: AtomicUsize,
    threads: Workers,
    counts: Counts,
    /// Whose traffic is what leaves this node.
    identity: Arc<Identity>,
    /// That traffic at the last reset.
    before: Mutex<TrafficCount>,
}

/// Since the start or the last reset.
#[derive(Default)]
struct Counts {
    requests_in: AtomicU64,
    bytes_in: AtomicU64,
    forwarded: AtomicU64,
    forwarded_bytes: AtomicU64,
    failed: AtomicU64,
}

impl Forwarder {
    pub(super) fn new(
        vitals: Vitals,
        storage: Arc<dyn Storage>,
        identity: Arc<Identity>,
        settings: &IoSettings,
    ) -> Arc<Forwarder> {
        let in_flight = settings.in_flight_requests.max(1);
        let queue = DispatchQueue::new(in_flight, settings.merge_requests, settings.merge_bytes);
        Arc::new_cyclic(|this| Forwarder {
            this: this.clone(),
            vitals,
            storage,
            identity,
            before: Mutex::default(),
            split: settings.split,
            queue: Mutex::new(queue),
            uncalled: AtomicUsize::new(0),
            threads: Workers::new("forward", in_flight),
            counts: Counts::default(),
        })
    }

    pub(super) fn stop(&self) {
        self.threads.stop(PATIENCE);
        // Dropped unreported, they complete as EIO.
        let left = self.queue.lock().drain();
        drop(left);
    }

    pub(super) fn reset_statistics(&self) {
        let Counts { requests_in, bytes_in, forwarded, forwarded_bytes, failed } = &self.counts;
        for count in [requests_in, bytes_in, forwarded, forwarded_bytes, failed] {
            count.store(0, Ordering::Relaxed);
        }
        *self.before.lock() = self.identity.traffic.now();
    }

    /// The sizes of requests on their way (twins-2017, Table I): `request` as clients sent them, `forwarded` as
    /// merged in the dispatch queue, `sent` as they left for single data servers.
    pub(super) fn status(&self) -> serde_json::Value {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let mean = |bytes: u64, count: u64| if count == 0 { 0.0 } else { bytes as f64 / count as f64 };
        let (requests, bytes) = (read(&self.counts.requests_in), read(&self.counts.bytes_in));
        let (out, out_bytes) = (read(&self.counts.forwarded), read(&self.counts.forwarded_bytes));
        let (waiting, in_flight) = {
            let queue = self.queue.lock();
            (queue.len(), queue.in_flight())
        };
        let (traffic, before) = (self.identity.traffic.now(), *self.before.lock());
        let sent = traffic.requests() - before.requests();
        let sent_bytes = traffic.read_bytes + traffic.written_bytes - before.read_bytes - before.written_bytes;
        serde_json::json!({
            "waiting": waiting,
            "in_flight": in_flight,
            "requests": requests,
            "mean_request_bytes": mean(bytes, requests),
            "forwarded": out,
            "forwarded_bytes": out_bytes,
            "mean_forwarded_bytes": mean(out_bytes, out),
            "sent": sent,
            "sent_bytes": sent_bytes,
            "mean_sent_bytes": mean(sent_bytes, sent),
            "failed": read(&self.counts.failed),
        })
    }

    /// On a forwarding thread: forwards the oldest waiting batch with its neighbours.
    fn forward_next(&self) {
        let Some(entries) = self.queue.lock().pop() else { return };
        let started = now();
        let (mut tickets, mut parts) = (Vec::with_capacity(entries.len()), Vec::new());
        for entry in entries {
            tickets.push((entry.token.ticket, entry.len));
            parts.extend(entry.token.parts);
        }
        let mut forwarded = Forwarded::default();
        while !parts.is_empty() {
            // All parts are of one file, which has one layout; a client that says otherwise is served apart.
            let layout = parts.first().map(|(_, item)| item.layout);
            let same = parts.iter().take_while(|(_, item)| Some(item.layout) == layout).count();
            let rest = parts.split_off(same);
            self.forward_group(std::mem::replace(&mut parts, rest), &mut forwarded);
        }
        self.queue.lock().done();
        let finished = now();
        for (ticket, len) in tickets {
            let errno = forwarded.errno;
            ticket.complete(Outcome { errno, bytes_done: if errno == 0 { len } else { 0 }, started, finished });
        }
        forwarded.shorts.into_iter().for_each(|(target, short)| self.resolve(&target, short));
    }

    /// Forwards touching parts of one file and operation as one request, and answers them.
    ///
    /// It travels under the name of its first member; a write names the others too, so that the data servers' fence
    /// judges every client's epoch.
    fn forward_group(&self, parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) {
        let Some((request, item)) = parts.first() else { return };
        let start = parts.iter().map(|(r, _)| r.extent.lane_offset).min().unwrap_or_default();
        let end = parts.iter().map(|(r, _)| r.extent.end()).max().unwrap_or_default();
        let target = Target {
            who: item.who,
            file: item.file,
            layout: item.layout,
            made: parts.iter().fold(0, |made, (_, item)| made | item.made),
            server: self.split.then_some(item.server),
        };
        let failed = match request.op {
            Op::Read => self.read(&target, start, end, parts, forwarded),
            Op::Write => self.write(&target, start, end, parts),
            _ => self.sync(&target, parts),
        };
        if let Some(errno) = failed {
            forwarded.errno = errno;
            self.counts.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn read(
        &self,
        target: &Target,
        start: u64,
        end: u64,
        parts: Vec<(Request, Item)>,
        forwarded: &mut Forwarded,
    ) -> Option<i32> {
        let mut buffer = self.vitals.pool().buffer((end - start) as usize);
        self.counts.out(end - start);
        let got = match self.storage.read(target, start, &mut buffer) {
            Ok(got) => got,
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        let buffer = Arc::new(buffer);
        for (request, item) in parts {
            let from = (request.extent.lane_offset - start) as usize;
            let slice = Slice::new(buffer.clone(), from.min(got)..(from + request.extent.len as usize).min(got));
            match item.answer {
                Answering::Whole(reply) => reply.send_data(Bulk::One(slice)),
                Answering::Part(ref family, index) => {
                    if let Complete::Short(short) = family.part_read(index, slice) {
                        let target = Target { who: item.who, made: item.made, ..*target };
                        forwarded.shorts.push((target, short));
                    }
                }
            }
        }
        None
    }

    fn write(&self, target: &Target, start: u64, end: u64, parts: Vec<(Request, Item)>) -> Option<i32> {
        self.counts.out(end - start);
        let whos = senders(&parts);
        let pieces: Vec<&[u8]> =
            parts.iter().flat_map(|(_, item)| item.payload.slices()).map(|slice| &**slice).collect();
        let written = self.storage.write(&whos, target, start, &pieces);
        drop(pieces);
        let lanes = match written {
            Ok(lanes) => lanes,
            // One of them has left its epoch: the others' bytes are as good as before.
            Err(fault) if fault.errno == Fault::FENCED && whos.len() > 1 => {
                let mut failed = None;
                for (request, item) in parts {
                    let (start, end) = (request.extent.lane_offset, request.extent.end());
                    let target = Target { who: item.who, ..*target };
                    failed = self.write(&target, start, end, vec![(request, item)]).or(failed);
                }
                return failed;
            }
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        for (request, mut item) in parts {
            // Before the reply, with which the permission to hold it goes.
            item.payload = Bulk::None;
            match item.answer {
                Answering::Whole(reply) => {
                    reply.send(&Answer::FileWritten { bytes: request.extent.len as u32, lanes: lanes.clone() })
                }
                Answering::Part(family, _) => drop(family.part_written(request.extent.len, &lanes)),
            }
        }
        None
    }

    fn sync(&self, target: &Target, parts: Vec<(Request, Item)>) -> Option<i32> {
        let (lanes, errno) = match self.storage.sync(target) {
            Ok(synced) => synced,
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        for (_, item) in parts {
            if let Answering::Whole(reply) = item.answer {
                reply.send(&Answer::FileSynced { lanes: lanes.clone(), errno });
            }
        }
        (errno != 0).then_some(errno)
    }

    /// Answers a read that met the end of an object: whether that is the end of the file or a hole in it, only
    /// a look at all objects can tell.
    fn resolve(&self, target: &Target, short: Short) {
        let mut buffer = self.vitals.pool().buffer(short.len_bytes());
        match self.storage.read_file(target, short.offset(), &mut buffer) {
            Ok(got) => short.answer(Slice::new(Arc::new(buffer), 0..got)),
            Err(fault) => short.fail(fault),
        }
    }
}

impl Executor<Item> for Forwarder {
    fn start(&self, work: Work<Item>) -> Started<Item> {
        hand_over_own_replies();
        let Work { batch, mut parts, ticket, .. } = work;
        let Some((_, first)) = parts.first_mut() else { return Started::Finished(ticket, done(0)) };
        let file = first.file.0;
        if !batch.op.is_data()
            && let Answering::Part(family, _) = &first.answer
        {
            // A barrier on one of several data servers is reached; with the last one all are.
            match family.part_completed(0) {
                Complete::Barrier(reply) => first.answer = Answering::Whole(reply),
                _ => return Started::Finished(ticket, done(0)),
            }
        }
        self.counts.taken(batch.op, &parts);
        let entry = Entry::of(&batch, file, self.split, Load { parts, ticket });
        self.queue.lock().push(entry);
        self.uncalled.fetch_add(1, Ordering::Release);
        Started::Pending
    }

    fn before_waiting(&self) {
        hand_over_own_replies();
    }

    /// A window that opens releases many requests together: threads that were called for the first of them would take it
    /// away before its neighbours are there to be merged.
    fn all_started(&self) {
        let Some(this) = self.this.upgrade() else { return };
        for _ in 0..self.uncalled.swap(0, Ordering::AcqRel) {
            let this = Arc::clone(&this);
            self.threads.run(Box::new(move || this.forward_next()));
        }
    }
}

/// What became of a forwarded batch.
#[derive(Default)]
struct Forwarded {
    errno: i32,
    shorts: Vec<(Target, Short)>,
}

impl Counts {
    fn taken(&self, op: Op, parts: &[(Request, Item)]) {
        if op.is_data() {
            self.requests_in.fetch_add(parts.len() as u64, Ordering::Relaxed);
            self.bytes_in.fetch_add(parts.iter().map(|(r, _)| r.extent.len).sum(), Ordering::Relaxed);
        }
    }

    fn out(&self, bytes: u64) {
        self.forwarded.fetch_add(1, Ordering::Relaxed);
        self.forwarded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

fn done(bytes_done: u64) -> Outcome {
    let at = now();
    Outcome { errno: 0, bytes_done, started: at, finished: at }
}

/// The clients whose bytes are sent together, each with every epoch that it sent some under.
fn senders(parts: &[(Request, Item)]) -> Vec<Who> {
    let mut whos: Vec<Who> = Vec::with_capacity(1);
    for (_, Item { who, .. }) in parts {
        if !whos.iter().any(|known| (known.client, known.epoch) == (who.client, who.epoch)) {
            whos.push(*who);
        }
    }
    whos
}

/// Answers all parts with the failure; gives its errno.
fn fail_all(parts: Vec<(Request, Item)>, fault: &Fault) -> i32 {
    parts.into_iter().for_each(|(_, item)| item.answer.fail(fault));
    fault.errno
}
