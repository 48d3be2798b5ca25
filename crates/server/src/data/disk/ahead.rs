//! Reads that no client has requested yet: into the page cache, or into the memory in front of a modelled device.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};

use impresario_base::lock::Mutex;
use impresario_device as device;
use impresario_engine::{Outcome, PagedFile, Started, Ticket, Work, now};
use impresario_foresight::Prediction;
use impresario_sched::{Nanos, Op, PredictedQueues};
use impresario_store::{Job, ModelledDevice, ObjectStore, Timing};
use impresario_wire::{Extents, FileKey};

use super::answers::{complete_modelled, errno_of};
use super::{Disk, Item};
use crate::data::modelled::Memory;
use crate::owed::Owed;

/// An object and its store.
pub(super) struct Object<'a> {
    pub(super) store: &'a ObjectStore,
    pub(super) memory: Option<&'a Memory>,
    pub(super) key: u64,
}

impl PagedFile for Object<'_> {
    fn len_bytes(&self) -> u64 {
        self.store.stat(self.key).map_or(0, |state| state.size)
    }

    fn has(&self, at: u64) -> bool {
        match self.memory {
            Some(memory) => memory.has(self.key, at),
            None => self.store.has_cached(self.key, at),
        }
    }

    fn will_read(&self, range: Range<u64>) {
        self.store.will_read(self.key, range);
    }

    fn wait_for(&self, range: Range<u64>) -> io::Result<()> {
        self.store.wait_for(self.key, range)
    }
}

impl Disk {
    /// Reads ahead from the modelled device into the memory in front of it; then ends its batch, if it is
    /// one.
    pub(super) fn read_ahead_modelled(
        &self,
        device: &Arc<ModelledDevice>,
        speculation: Option<(u64, Range<u64>)>,
        ticket: Option<Ticket<Item>>,
    ) -> Started<Item> {
        let Some((file, extent)) = speculation else { return Started::Pending };
        let (Some((read_ahead, _)), Some(memory)) = (&self.read_ahead, &self.memory) else { return Started::Pending };
        let len = extent.end - extent.start;
        let steps = memory.begin(file, &extent);
        if steps.is_empty() {
            read_ahead.was_there(file, extent);
            let (started, finished) = (now(), now());
            let outcome = Outcome { errno: 0, bytes_done: len, started, finished };
            return ticket.map_or(Started::Pending, |ticket| Started::Finished(ticket, outcome));
        }
        let transfers = Arc::new((AtomicUsize::new(steps.len()), AtomicU64::new(u64::MAX), Mutex::new(ticket)));
        for step in steps {
            let (this, transfers, extent) = (self.this.clone(), transfers.clone(), extent.clone());
            let ios = device.placement().place(device::Op::Read, file, step.start, step.end - step.start).collect();
            let run = move |timing: Timing| {
                let Some(disk) = this.upgrade() else { return };
                let (Some((read_ahead, _)), Some(memory)) = (&disk.read_ahead, &disk.memory) else { return };
                read_ahead.arrived(file, &step);
                memory.arrived(file, &step, timing).into_iter().for_each(complete_modelled);
                let (left, started_ns, ticket) = &*transfers;
                let started_ns = started_ns.fetch_min(timing.started_ns, Relaxed).min(timing.started_ns);
                if left.fetch_sub(1, AcqRel) > 1 {
                    return;
                }
                let (started, finished) = (Nanos(started_ns), Nanos(timing.finished_ns));
                if let Some(ticket) = ticket.lock().take() {
                    read_ahead.fetched(file, extent, finished.since(started).0);
                    ticket.complete(Outcome { errno: 0, bytes_done: len, started, finished });
                }
            };
            device.submit(Job { ios, flush: false, run: Box::new(run) });
        }
        Started::Pending
    }

    /// A request came that will be scheduled. What should be read before it is asked for.
    pub(in crate::data) fn foresee(
        &self,
        op: Op,
        file: FileKey,
        (offset, len): (u64, u64),
        client: u64,
    ) -> Vec<Prediction> {
        let Some((read_ahead, _)) = &self.read_ahead else { return Vec::new() };
        let object = self.object(file.0);
        read_ahead.observe(op, (file.0, &object), offset..offset.saturating_add(len), client)
    }

    /// Requests are not told to foresight for a while.
    pub(in crate::data) fn rest(&self) {
        self.read_ahead.iter().for_each(|(read_ahead, _)| read_ahead.rest());
    }

    /// What earlier runs foretell of reads.
    pub(in crate::data) fn foretell(&self, queues: Option<&PredictedQueues>) {
        self.read_ahead.iter().for_each(|(read_ahead, _)| read_ahead.foretell(queues));
    }

    /// A client says what it will read. How many bytes are, or are to be, read ahead for it, and which of them are new.
    pub(in crate::data) fn hinted(&self, file: FileKey, extents: &Extents, client: u64) -> (u64, Vec<Range<u64>>) {
        let Some((read_ahead, _)) = &self.read_ahead else { return (0, Vec::new()) };
        let extents = extents.iter().map(|(start, len)| start..start.saturating_add(len.into()));
        read_ahead.hinted((file.0, &self.object(file.0)), extents, client)
    }

    /// Reads ahead into the page cache, on a thread of its own; then ends its batch, if it is one.
    pub(super) fn read_ahead(&self, speculation: Option<(u64, Range<u64>)>, ticket: Option<Ticket<Item>>) {
        let (Some(this), Some((file, extent))) = (self.this.upgrade(), speculation) else { return };
        let Some((_, threads)) = &self.read_ahead else { return };
        threads.run(Box::new(move || {
            let Some((read_ahead, _)) = &this.read_ahead else { return };
            let (started, len) = (now(), extent.end - extent.start);
            let read = read_ahead.fetch((file, &this.object(file)), extent);
            // A request for these bytes will report an error itself.
            let (errno, bytes_done) = read.map_or_else(|error| (errno_of(&error), 0), |()| (0, len));
            if let Some(ticket) = ticket {
                ticket.complete(Outcome { errno, bytes_done, started, finished: now() });
            }
        }));
    }

    /// Takes note when what was read along with a request is there.
    pub(super) fn await_along(&self, along: Option<(u64, Range<u64>)>) {
        let (Some(this), Some((file, extent))) = (self.this.upgrade(), along) else { return };
        let Some((_, threads)) = &self.read_ahead else { return };
        threads.run(Box::new(move || {
            let Some((read_ahead, _)) = &this.read_ahead else { return };
            // A request for these bytes will report an error itself.
            drop(read_ahead.follow((file, &this.object(file)), &extent));
        }));
    }
}

/// Takes the speculation out of a batch; it is the last part.
pub(super) fn take_speculation(work: &mut Work<Item>) -> Option<(u64, Range<u64>)> {
    let along = work.parts.pop_if(|(_, item)| matches!(item.owed, Owed::Nothing));
    let (request, item) = along?;
    let extent = request.extent.lane_offset..request.extent.end();
    work.batch.extent.len = extent.start - work.batch.extent.lane_offset;
    Some((item.file.0, extent))
}
