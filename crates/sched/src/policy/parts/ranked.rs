//! Queues in offset order, served by lowest rank: `sjf`, `srtf` and `sw`, and a part of `twins` in offset order.
//!
//! The policy defines queues and their ranks. A queue is served from its lowest offset, or from where a scan stands.
//! Such orders starve high ranks: after too many batches that passed over the oldest request, the guard serves it next.

use std::hash::Hash;
use std::sync::Arc;

use impresario_base::slab::Rows;
use impresario_foresight::PredictedQueues;
use rustc_hash::FxHashMap;

use super::arrivals::Guards;
use super::runs::{RunQueue, Runs};
use super::turns::Turns;
use crate::contract::Linked;
use crate::policy::{Choice, Params, Policy, Setup, View, WaitBound, WaitReason};
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::{Arrival, BySlot, Slot};

/// The inputs to a queue's rank, besides its key.
pub(crate) struct Contents {
    /// Bytes queued.
    pub bytes: u64,
    /// Further bytes expected, as stated with the last request.
    pub to_come_bytes: u64,
    /// Arrival of its oldest request.
    pub oldest: Arrival,
}

type RankOf<K, R> = fn(K, Contents) -> R;

struct Queue<K, R> {
    group: u32,
    key: K,
    rank: Option<R>,
    bytes: u64,
    to_come_bytes: u64,
    runs: RunQueue,
}

/// What distinguishes the policies that serve queues by rank.
pub(in crate::policy) trait RankRule: Send + 'static {
    /// Identifies a queue within a lane group.
    type Key: Hash + Eq + Copy + Send;
    /// Distinct for distinct queues at any time.
    type Rank: Ord + Copy + Send;

    /// The rank of a queue.
    fn rank(key: Self::Key, contents: Contents) -> Self::Rank;

    /// The queue of a request that arrives, and the bytes that it still expects.
    fn queue(&mut self, view: &View<'_>, slot: Slot) -> (Self::Key, u64);

    /// A queued request was cancelled.
    fn cancelled(&mut self, _view: &View<'_>, _slot: Slot) {}

    /// As [`Policy::foresee`].
    fn foresee(&mut self, _queues: Option<Arc<PredictedQueues>>) {}

    /// As [`Policy::linked`].
    fn linked(&self) -> Option<Linked> {
        None
    }
}

/// A policy that serves the lanes in turn, and on each the queue of the lowest rank.
pub(in crate::policy) struct ByRank<R: RankRule> {
    params: Params,
    queues: Ranked<R::Key, R::Rank>,
    turns: Turns,
    rule: R,
}

impl<R: RankRule> ByRank<R> {
    /// From the parameters of [`Ranked::new`].
    pub fn boxed(params: &Params, setup: &Setup, rule: R) -> Box<dyn Policy> {
        let queues = Ranked::new(params, setup, R::rank);
        Box::new(ByRank { params: params.clone(), queues, turns: Turns::default(), rule })
    }
}

impl<R: RankRule> Policy for ByRank<R> {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let (key, to_come_bytes) = self.rule.queue(view, slot);
        self.queues.insert_expecting(view, view.group(slot), key, slot, to_come_bytes);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        self.rule.cancelled(view, slot);
        self.queues.remove(view, slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        self.turns.round_robin(view, |group| self.queues.serve(view, group, batch))
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        self.queues.take(view, oldest, batch);
        Choice::Serve
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let older = view.table.older_than(slot, view.groups() == 1);
        WaitBound::of_batches(self.queues.wait_bound(older))
    }

    fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        self.rule.foresee(queues);
    }

    fn linked(&self) -> Option<Linked> {
        self.rule.linked()
    }
}

/// The queues of a policy. `K` identifies them within a lane group; ranks `R` are distinct at any time.
pub(crate) struct Ranked<K, R> {
    rank_of: RankOf<K, R>,
    runs: Runs,
    queues: Rows<Queue<K, R>>,
    by_key: FxHashMap<(u32, K), u32>,
    /// The queue of each queued request.
    queue_of: BySlot<u32>,
    /// By lane group: the queues by rank, and the guard.
    orders: Vec<SortedSet<(R, u32)>>,
    guards: Guards,
}

impl<K: Hash + Eq + Copy, R: Ord + Copy> Ranked<K, R> {
    /// From the parameters `merge`, `batch_requests`, `batch_bytes` and `guard_batches`.
    pub fn new(params: &Params, setup: &Setup, rank_of: RankOf<K, R>) -> Self {
        let most = if params.on("merge") { params.integer("batch_requests") } else { 1 };
        Ranked {
            rank_of,
            runs: Runs::new(most, params.integer("batch_bytes")),
            queues: Rows::default(),
            by_key: FxHashMap::default(),
            queue_of: BySlot::new(0),
            orders: vec![SortedSet::default(); setup.lanes.into()],
            guards: Guards::new(params.integer("guard_batches"), setup.lanes.into()),
        }
    }

    /// Queues a request under its key.
    pub fn insert(&mut self, view: &View<'_>, group: usize, key: K, slot: Slot) {
        self.insert_expecting(view, group, key, slot, 0);
    }

    /// The same; `to_come_bytes` more are expected.
    pub fn insert_expecting(&mut self, view: &View<'_>, group: usize, key: K, slot: Slot, to_come_bytes: u64) {
        let q = match self.by_key.get(&(group as u32, key)) {
            Some(&q) => q,
            None => self.open(group as u32, key),
        };
        self.queue_of.set(slot, q);
        self.guards.insert(view.table, group, slot);
        let queue = &mut self.queues[q];
        queue.bytes += counted(view, slot);
        queue.to_come_bytes = to_come_bytes;
        self.runs.insert(&mut queue.runs, view.table, slot, 0, |_| 0);
        self.refile(view, q);
    }

    fn open(&mut self, group: u32, key: K) -> u32 {
        let q = self.queues.insert_over(|old| {
            let runs = RunQueue::renewed(old.map(|old| &mut old.runs));
            Queue { group, key, rank: None, bytes: 0, to_come_bytes: 0, runs }
        });
        self.by_key.insert((group, key), q);
        q
    }

    /// Forgets a cancelled request.
    pub fn remove(&mut self, view: &View<'_>, slot: Slot) {
        let q = self.queue_of[slot];
        let queue = &mut self.queues[q];
        self.guards.remove(view.table, queue.group as usize, slot);
        queue.bytes -= counted(view, slot);
        self.runs.remove(&mut queue.runs, view.table, slot, |_| 0);
        self.refile(view, q);
    }

    /// Updates a queue's rank after a change, or drops the queue if it is empty.
    fn refile(&mut self, view: &View<'_>, q: u32) {
        let queue = &mut self.queues[q];
        let oldest = queue.runs.oldest().map(|o| view.table.arrival_order(o));
        let Queue { key, bytes, to_come_bytes, .. } = *queue;
        let rank = oldest.map(|oldest| (self.rank_of)(key, Contents { bytes, to_come_bytes, oldest }));
        let old = std::mem::replace(&mut queue.rank, rank);
        self.orders[queue.group as usize].replace(old.map(|rank| (rank, q)), rank.map(|rank| (rank, q)));
        if rank.is_none() {
            self.by_key.remove(&(queue.group, queue.key));
            self.queues.release(q);
        }
    }

    /// True if the group is empty.
    pub fn is_empty(&self, group: usize) -> bool {
        self.guards.is_empty(group)
    }

    /// The head of the next run: that of the oldest request if the guard requires it, else the lowest offset of the
    /// first queue by rank.
    pub fn first(&mut self, view: &View<'_>, group: usize) -> Option<Slot> {
        if let Some(due) = self.due(view, group) {
            return Some(due);
        }
        let (_, q) = self.orders[group].first()?;
        self.queues[q].runs.next_ready(0)
    }

    /// Puts the next run into `batch` if its lane has room; `None` if nothing is queued.
    pub fn serve(&mut self, view: &View<'_>, group: usize, batch: &mut Vec<Slot>) -> Option<Choice> {
        let first = self.first(view, group)?;
        if !view.open(view.table.lane(first)) {
            return Some(Choice::until_event(WaitReason::LanesBusy));
        }
        self.take(view, first, batch);
        Some(Choice::Serve)
    }

    /// The same along a scan at an offset of the queue ranked from `low` to `high`, wrapping.
    pub fn first_from(&mut self, view: &View<'_>, group: usize, (low, high): (R, R), offset: u64) -> Option<Slot> {
        if let Some(due) = self.due(view, group) {
            return Some(due);
        }
        self.at_or_after(view, group, (low, high), offset).or_else(|| {
            let order = &self.orders[group];
            let (_, q) = order.at_or_after(&(high, u32::MAX)).or_else(|| order.first())?;
            self.queues[q].runs.next_ready(0)
        })
    }

    /// The next run at or after an offset of the queue ranked from `low` to `high`.
    pub fn at_or_after(&self, view: &View<'_>, group: usize, (low, high): (R, R), offset: u64) -> Option<Slot> {
        let (_, q) = self.orders[group].at_or_after(&(low, 0)).filter(|f| f.0 <= high)?;
        self.queues[q].runs.next_ready(offset).filter(|head| view.table.start(*head) >= offset)
    }

    fn due(&mut self, view: &View<'_>, group: usize) -> Option<Slot> {
        self.guards.due(view.table, group).map(|oldest| self.runs.run_of(oldest))
    }

    /// Moves the run, or the rest of one, that begins at `first` into the batch.
    pub fn take(&mut self, view: &View<'_>, first: Slot, batch: &mut Vec<Slot>) {
        let q = self.queue_of[first];
        let queue = &mut self.queues[q];
        self.runs.take_from(&mut queue.runs, view.table, first, batch, |_| 0);
        // In a long queue the next request is not cached any more.
        if let Some(next) = queue.runs.next_ready(0) {
            view.table.fetch(next);
            self.runs.fetch(next);
        }
        self.guards.sent(view.table, queue.group as usize, batch);
        for &slot in &*batch {
            queue.bytes -= counted(view, slot);
        }
        self.refile(view, q);
    }

    /// Maximum batches before a request with `older` older ones on its lane (or node).
    pub fn wait_bound(&self, older: u64) -> u64 {
        self.guards.wait(older)
    }
}

/// Its length, limited so that the sum over all outstanding requests fits 64 bits.
fn counted(view: &View<'_>, slot: Slot) -> u64 {
    view.table.len_bytes(slot).min(u64::MAX >> crate::table::Table::SLOT_BITS)
}
