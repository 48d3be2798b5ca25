//! Queues in order of arrival in which the oldest request may take along the requests that touch it: used by `fifo`,
//! `to`, `to-agg`, `wfq` and `twins`.

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;

use super::arrivals::Arrivals;
use super::runs::{RunQueue, Runs};
use crate::policy::{Params, View};
use crate::table::Slot;
use crate::types::{FileId, Op};

/// Several such queues, by number. Merging stays within a queue.
pub(crate) struct Backlog {
    queues: Arrivals,
    merging: Option<Merging>,
}

struct Merging {
    runs: Runs,
    by_key: FxHashMap<(u32, FileId, Op), u32>,
    queues: Rows<RunQueue>,
}

impl Backlog {
    /// `queues` queues; `merge` allows batches up to `batch_requests` and `batch_bytes`.
    pub fn new(queues: usize, merge: bool, params: &Params) -> Backlog {
        let runs = || Runs::new(params.integer("batch_requests"), params.integer("batch_bytes"));
        Backlog {
            queues: Arrivals::new(queues),
            merging: merge.then(|| Merging { runs: runs(), by_key: FxHashMap::default(), queues: Rows::default() }),
        }
    }

    /// Adds a queue.
    pub fn add_queue(&mut self) {
        self.queues.add_list();
    }

    /// Queues a request.
    pub fn insert(&mut self, view: &View<'_>, queue: usize, slot: Slot) {
        self.queues.insert(view.table, queue, slot);
        if let Some(m) = &mut self.merging {
            let key = (queue as u32, view.table.file(slot), view.table.op(slot));
            let fresh = || m.queues.insert_over(RunQueue::renewed);
            let q = *m.by_key.entry(key).or_insert_with(fresh);
            m.runs.insert(&mut m.queues[q], view.table, slot, 0, |_| 0);
        }
    }

    /// Forgets a cancelled request.
    pub fn remove(&mut self, view: &View<'_>, queue: usize, slot: Slot) {
        self.queues.remove(view.table, queue, slot);
        self.with_run_queue(view, queue, slot, |runs, q| runs.remove(q, view.table, slot, |_| 0));
    }

    /// True if the queue is empty.
    pub fn is_empty(&self, queue: usize) -> bool {
        self.queues.is_empty(queue)
    }

    /// The first request of the next batch: the oldest request or, with merging, the head of its run.
    pub fn first(&mut self, view: &View<'_>, queue: usize) -> Option<Slot> {
        let oldest = self.oldest(view, queue)?;
        Some(self.merging.as_mut().map_or(oldest, |m| m.runs.run_of(oldest)))
    }

    /// The oldest request of a queue.
    pub fn oldest(&self, view: &View<'_>, queue: usize) -> Option<Slot> {
        self.queues.oldest(view.table, queue)
    }

    /// Bytes of the batch that starts at [`first`](Backlog::first): at least 1, at most 16 TiB, so that sums fit 64
    /// bits.
    pub fn len_bytes(&self, view: &View<'_>, first: Slot) -> u64 {
        // A run's length has 32 bits; a single request may be longer than any batch.
        let run = self.merging.as_ref().map_or(0, |m| m.runs.run(first).len);
        run.max(view.table.len_bytes(first)).clamp(1, 1 << 44)
    }

    /// Moves the batch that starts at `first` out of the queue.
    pub fn take(&mut self, view: &View<'_>, queue: usize, first: Slot, batch: &mut Vec<Slot>) {
        match self.merging {
            None => batch.push(first),
            Some(_) => self.with_run_queue(view, queue, first, |runs, q| {
                runs.take_from(q, view.table, first, batch, |_| 0);
            }),
        }
        for &slot in &*batch {
            self.queues.remove(view.table, queue, slot);
        }
        // In a long queue the next request is not cached any more.
        if let Some(next) = self.oldest(view, queue) {
            view.table.fetch(next);
        }
    }

    fn with_run_queue(
        &mut self,
        view: &View<'_>,
        queue: usize,
        slot: Slot,
        act: impl FnOnce(&mut Runs, &mut RunQueue),
    ) {
        let Some(m) = &mut self.merging else { return };
        let key = (queue as u32, view.table.file(slot), view.table.op(slot));
        if let Some(&q) = m.by_key.get(&key) {
            act(&mut m.runs, &mut m.queues[q]);
            if m.queues[q].is_empty() {
                m.by_key.remove(&key);
                m.queues.release(q);
            }
        }
    }
}
