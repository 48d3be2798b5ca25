//! The jobs of a lane group in the orders that policies over jobs need: by position, by arrival, by the age of their
//! first access.

use std::collections::VecDeque;

use impresario_base::slab::Slab;
use rustc_hash::FxHashMap;

use crate::policy::{Setup, View};
use crate::sorted::SortedSet;
use crate::table::{Slot, Table};
use crate::types::{ConnId, FileId, LaneId, Op};

/// What a job is of: a connection's reads, or its writes (true). A write sends nothing, so it waits neither for its connection to
/// take data nor for reads that do: syncs of other clients may wait for it.
pub(super) type Origin = (ConnId, bool);

pub(super) fn origin(table: &Table, slot: Slot) -> Origin {
    (table.conn(slot), table.op(slot) == Op::Write)
}

/// Where a job continues.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(in crate::policy) struct Position {
    pub file: FileId,
    pub offset: u64,
}

/// A job reference that may outlive the job: `arrival` tells whether the index was reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::policy) struct JobId {
    arrival: u64,
    pub index: u32,
}

pub(super) struct Job {
    origin: Origin,
    pub accesses: VecDeque<Slot>,
    pub id: JobId,
    pub head: Position,
    /// Lane of its first access.
    lane: LaneId,
    /// Arrival of its first access.
    head_seq: u64,
    pub ready: bool,
    /// The wait for it timed out; not considered until its connection is ready.
    pub given_up: bool,
    /// Its index among the jobs of its origin.
    sibling: usize,
}

/// A job's keys in the orders.
struct Places {
    position: Option<(Position, JobId)>,
    arrival: Option<JobId>,
    age: Option<(u64, JobId)>,
    lane: LaneId,
}

impl Places {
    const NONE: Places = Places { position: None, arrival: None, age: None, lane: LaneId(0) };
}

impl Job {
    /// If the rule waits, jobs that are not ready may be chosen too, until it has given them up.
    fn places(&self, waits: bool) -> Places {
        Places {
            position: (self.ready || (waits && !self.given_up)).then_some((self.head, self.id)),
            arrival: self.ready.then_some(self.id),
            age: self.ready.then_some((self.head_seq, self.id)),
            lane: self.lane,
        }
    }
}

/// The jobs of one lane group.
pub(in crate::policy) struct JobQueue {
    pub(super) jobs: Slab<Job>,
    pub(super) by_origin: FxHashMap<Origin, Vec<u32>>,
    /// Jobs that a rule may choose, by position, then arrival.
    positions: SortedSet<(Position, JobId)>,
    /// The ready jobs by arrival, and by the arrival of their first access.
    arrivals: SortedSet<JobId>,
    pub(super) ages: SortedSet<(u64, JobId)>,
    /// The same per lane of the first access; empty unless lanes share one space.
    pub(super) ages_by_lane: Vec<SortedSet<(u64, JobId)>>,
    /// Position of the last access or piece served.
    pub last: Position,
}

impl JobQueue {
    pub(super) fn new(setup: &Setup) -> JobQueue {
        let shared = if setup.shared_space { setup.lanes } else { 0 };
        JobQueue {
            jobs: Slab::default(),
            by_origin: FxHashMap::default(),
            positions: SortedSet::default(),
            arrivals: SortedSet::default(),
            ages: SortedSet::default(),
            ages_by_lane: vec![SortedSet::default(); shared.into()],
            last: Position::default(),
        }
    }

    /// Ready jobs in order of arrival.
    pub fn by_arrival(&self) -> impl Iterator<Item = JobId> {
        std::iter::successors(self.arrivals.first(), |j| {
            self.arrivals.at_or_after(&JobId { arrival: j.arrival, index: j.index + 1 })
        })
    }

    /// The first job at or after a position.
    pub fn at_or_after(&self, position: Position) -> Option<(Position, JobId)> {
        self.positions.at_or_after(&(position, JobId { arrival: 0, index: 0 }))
    }

    /// The last job before a position.
    pub fn before(&self, position: Position) -> Option<(Position, JobId)> {
        self.positions.before(&(position, JobId { arrival: 0, index: 0 }))
    }

    /// Jobs in ascending order from a position on.
    pub fn ascending(&self, from: Position) -> impl Iterator<Item = (Position, JobId)> {
        std::iter::successors(self.at_or_after(from), |(p, j)| {
            self.positions.at_or_after(&(*p, JobId { arrival: j.arrival, index: j.index + 1 }))
        })
    }

    pub(super) fn get(&self, id: JobId) -> Option<&Job> {
        self.jobs.at(id.index).filter(|j| j.id == id)
    }

    /// The job of an access.
    pub(super) fn job_of(&self, table: &Table, slot: Slot) -> Option<u32> {
        // When a connection closes, its youngest requests are cancelled first.
        let holds = |i: &&u32| self.jobs.at(**i).is_some_and(|j| j.accesses.iter().rev().any(|s| *s == slot));
        self.by_origin.get(&origin(table, slot))?.iter().rev().find(holds).copied()
    }

    /// Moves a job from its old keys in the orders to its current ones.
    fn refile(&mut self, index: u32, waits: bool, old: Places) {
        let new = self.jobs.at(index).map_or(Places::NONE, |job| job.places(waits));
        self.positions.replace(old.position, new.position);
        self.arrivals.replace(old.arrival, new.arrival);
        self.ages.replace(old.age, new.age);
        let [from, to] = [&old, &new].map(|p| p.lane.index());
        if let Some(ages) = self.ages_by_lane.get_mut(to) {
            ages.replace(old.age.filter(|_| from == to), new.age);
            if from != to {
                self.ages_by_lane[from].replace(old.age, None);
            }
        }
    }

    /// Changes a job without changing its accesses.
    pub(super) fn change(&mut self, index: u32, waits: bool, change: impl FnOnce(&mut Job)) {
        let Some(job) = self.jobs.at_mut(index) else { return };
        let old = job.places(waits);
        change(job);
        self.refile(index, waits, old);
    }

    /// Creates a job with one access.
    pub(super) fn begin(&mut self, view: &View<'_>, slot: Slot, waits: bool) {
        let (origin, seq) = (origin(view.table, slot), view.table.seq(slot));
        let siblings = self.by_origin.entry(origin).or_default();
        let sibling = siblings.len();
        let key = self.jobs.insert_with(|key| Job {
            origin,
            accesses: VecDeque::from([slot]),
            id: JobId { arrival: seq, index: key.index },
            head: position(view.table, slot),
            lane: view.table.lane(slot),
            head_seq: seq,
            ready: origin.1 || view.ready(origin.0),
            given_up: false,
            sibling,
        });
        siblings.push(key.index);
        self.refile(key.index, waits, Places::NONE);
    }

    /// Removes a job without accesses.
    fn end(&mut self, index: u32) {
        let Some(job) = self.jobs.remove_at(index) else { return };
        if let Some(siblings) = self.by_origin.get_mut(&job.origin) {
            siblings.swap_remove(job.sibling);
            if let Some(moved) = siblings.get(job.sibling).copied() {
                if let Some(moved) = self.jobs.at_mut(moved) {
                    moved.sibling = job.sibling;
                }
            } else if siblings.is_empty() {
                self.by_origin.remove(&job.origin);
            }
        }
    }

    /// Changes the accesses of a job; its first one then begins where `change` says, or where the table does. A job
    /// without accesses ends.
    pub(super) fn change_accesses(
        &mut self,
        table: &Table,
        index: u32,
        waits: bool,
        change: impl FnOnce(&mut Job) -> Option<Position>,
    ) {
        let Some(job) = self.jobs.at_mut(index) else { return };
        let old = job.places(waits);
        let head = change(job);
        if let Some(first) = job.accesses.front().copied() {
            job.head = head.unwrap_or_else(|| position(table, first));
            (job.lane, job.head_seq) = (table.lane(first), table.seq(first));
        } else {
            self.end(index);
        }
        self.refile(index, waits, old);
    }
}

fn position(table: &Table, slot: Slot) -> Position {
    Position { file: table.file(slot), offset: table.start(slot) }
}
