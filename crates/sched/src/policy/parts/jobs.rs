//! Jobs: connections with lists of accesses, served in rounds while they can take data.
//!
//! The machinery of `stream`, `scan`, `wscan` and `sstf` (server-side-scheduling-2002, 3.3 and 4). A *job* is a
//! connection and the accesses queued on it; the stream protocol of the paper's system keeps them in order, in
//! pieces of at most 128 KiB (`job_order=free` makes a job of each access, for protocols that answer in any order).
//! The four differ in which jobs make up a *round*, in which order, and in whether a job that cannot take data is
//! waited for; that is a [`JobRule`]. A round is fixed when it begins.
//!
//! Choices where the paper is silent, for all four:
//! - An offset is that of the first byte of an access or piece, in the lane's space; the last offset is that of the
//!   last one served. Files follow one another in the order in which they were first seen: positions are (file,
//!   offset), so that a scan goes through one file, then the next, and wraps. The paper had one file only.
//! - A job's turn ends after `turn_bytes` even when its connection takes more; socket buffers did that in the paper.
//! - `guard_batches`: after so many batches that were not of the job with the oldest access, that job is served
//!   next if it is ready, whatever its offset (0 switches it off: the paper's rules, which starve).
//! - `sieve=on`: following reads of a job are read together with the holes between them where the cost model says
//!   that this is cheaper than to skip them (2002, 2.1), up to a piece.
//!
//! Wait: each batch of an older access, and the request's own, lets `guard_batches` others pass. Work-conserving
//! for jobs whose connection is ready, except where the rule waits.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::turns::Turns;
use crate::policy::params::{ParamInfo, Range, SWITCH};
use crate::policy::{Choice, Params, Policy, Setup, View, WaitBound, WaitReason};
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::{Slot, Table};
use crate::types::{ConnId, FileId, Nanos, Op};

/// The parameters that all four have.
pub(in crate::policy) const PIECE: ParamInfo = ParamInfo {
    name: "piece_bytes",
    default: "131072",
    range: Range::Integer(512, 1 << 30),
    doc: "Bytes of an access served at a time at most.",
};
pub(in crate::policy) const TURN: ParamInfo = ParamInfo {
    name: "turn_bytes",
    default: "1048576",
    range: Range::Integer(0, 1 << 40),
    doc: "Bytes of a job served in its turn at most; 0: as long as its connection takes them.",
};
pub(in crate::policy) const GUARD: ParamInfo = ParamInfo {
    name: "guard_batches",
    default: "256",
    range: Range::Integer(0, 1_000_000),
    doc: "Batches that may leave out the job with the oldest access; 0: any number.",
};
pub(in crate::policy) const JOB_ORDER: ParamInfo = ParamInfo {
    name: "job_order",
    default: "byte",
    range: Range::Choice(&["byte", "free"]),
    doc: "Accesses of a connection in the order in which they came, or in any.",
};
pub(in crate::policy) const SIEVE: ParamInfo = ParamInfo {
    name: "sieve",
    default: "on",
    range: SWITCH,
    doc: "Read through holes between accesses of a job that are cheaper to read than to skip.",
};

/// Where a job would go on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(in crate::policy) struct Position {
    pub file: FileId,
    pub offset: u64,
}

/// A job in a list that may outlive it: `arrival` tells whether the place was given to another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::policy) struct JobId {
    arrival: u64,
    index: u32,
}

struct Job {
    conn: ConnId,
    accesses: VecDeque<Slot>,
    id: JobId,
    head: Position,
    /// Arrival of its first access.
    head_seq: u64,
    ready: bool,
    /// Waited for in vain; not considered until its connection is ready.
    given_up: bool,
    /// Its place among the jobs of its connection.
    sibling: usize,
}

/// The jobs of one lane group.
#[derive(Default)]
pub(in crate::policy) struct JobQueue {
    jobs: Vec<Option<Job>>,
    free: Vec<u32>,
    by_conn: FxHashMap<ConnId, Vec<u32>>,
    /// Jobs that a rule may choose, by position; of equal ones the earlier first.
    positions: SortedSet<(Position, JobId)>,
    /// The ready ones by arrival of the job, and of their first access.
    arrivals: SortedSet<JobId>,
    ages: SortedSet<(u64, JobId)>,
    /// Position of the last access or piece served.
    pub last: Position,
}

impl JobQueue {
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

    fn get(&self, id: JobId) -> Option<&Job> {
        self.jobs.get(id.index as usize)?.as_ref().filter(|j| j.id == id)
    }

    fn job(&mut self, index: u32) -> Option<&mut Job> {
        self.jobs.get_mut(index as usize)?.as_mut()
    }

    /// Enters a job into the orders in which it belongs.
    fn file(&mut self, index: u32, waits: bool) {
        let Some(Some(j)) = self.jobs.get(index as usize) else { return };
        if j.ready || (waits && !j.given_up) {
            self.positions.insert((j.head, j.id));
        }
        if j.ready {
            self.arrivals.insert(j.id);
            self.ages.insert((j.head_seq, j.id));
        }
    }

    fn unfile(&mut self, index: u32) {
        let Some(Some(j)) = self.jobs.get(index as usize) else { return };
        self.positions.remove(&(j.head, j.id));
        self.arrivals.remove(&j.id);
        self.ages.remove(&(j.head_seq, j.id));
    }

    /// Begins a job with one access.
    fn begin(&mut self, view: &View<'_>, slot: Slot) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() as u32 - 1
        });
        let (conn, seq) = (view.table.conn(slot), view.table.seq(slot));
        let siblings = self.by_conn.entry(conn).or_default();
        let sibling = siblings.len();
        siblings.push(index);
        self.jobs[index as usize] = Some(Job {
            conn,
            accesses: VecDeque::from([slot]),
            id: JobId { arrival: seq, index },
            head: position(view.table, slot),
            head_seq: seq,
            ready: view.ready(conn),
            given_up: false,
            sibling,
        });
        index
    }

    /// Drops a job without accesses, which is in no order any more.
    fn end(&mut self, index: u32) {
        let Some(job) = self.jobs.get_mut(index as usize).and_then(Option::take) else { return };
        self.free.push(index);
        if let Some(siblings) = self.by_conn.get_mut(&job.conn) {
            siblings.swap_remove(job.sibling);
            if let Some(moved) = siblings.get(job.sibling).copied() {
                if let Some(moved) = self.jobs.get_mut(moved as usize).and_then(Option::as_mut) {
                    moved.sibling = job.sibling;
                }
            } else if siblings.is_empty() {
                self.by_conn.remove(&job.conn);
            }
        }
    }

    /// Puts a job back into the orders after its accesses changed, `head` being where its first one now begins.
    fn renew(&mut self, table: &Table, index: u32, head: Option<Position>, waits: bool) {
        let Some(job) = self.job(index) else { return };
        match job.accesses.front().copied() {
            Some(first) => {
                (job.head, job.head_seq) = (head.unwrap_or_else(|| position(table, first)), table.seq(first));
                self.file(index, waits);
            }
            None => self.end(index),
        }
    }
}

fn position(table: &Table, slot: Slot) -> Position {
    Position { file: table.file(slot), offset: table.start(slot) }
}

/// What tells the four policies apart.
pub(in crate::policy) trait JobRule: Send {
    /// Jobs whose connection is not ready are chosen too, and waited for.
    const WAITS: bool;
    /// A turn is one access (or piece) instead of all that the connection takes.
    const ONE_ACCESS: bool;

    /// The jobs of the next round, in order; nothing when no job can be chosen.
    fn round(&self, queue: &JobQueue, round: &mut VecDeque<JobId>);
}

struct Group {
    queue: JobQueue,
    round: VecDeque<JobId>,
    /// Whose turn it is, and the bytes of it served.
    turn: Option<(JobId, u64)>,
    /// The job that is not ready and waited for, and since when.
    waiting: Option<(JobId, Nanos)>,
    /// Batches since the job with the oldest access was served.
    passed_over: u64,
}

/// A policy over jobs.
pub(in crate::policy) struct Jobs<R: JobRule> {
    params: Params,
    rule: R,
    piece_bytes: u64,
    turn_bytes: u64,
    guard: u64,
    free_order: bool,
    sieve: bool,
    patience: Nanos,
    capacity: u64,
    groups: Vec<Group>,
    turns: Turns,
}

impl<R: JobRule + 'static> Jobs<R> {
    /// `patience` bounds the waiting of a rule that waits; zero: it does not end.
    pub fn boxed(params: &Params, setup: &Setup, rule: R, patience: Nanos) -> Box<dyn Policy> {
        let group =
            || Group { queue: JobQueue::default(), round: VecDeque::new(), turn: None, waiting: None, passed_over: 0 };
        let unbounded = |n| if n == 0 { u64::MAX } else { n };
        Box::new(Jobs {
            rule,
            piece_bytes: params.integer("piece_bytes"),
            turn_bytes: if R::ONE_ACCESS { 1 } else { unbounded(params.integer("turn_bytes")) },
            guard: params.integer("guard_batches"),
            free_order: params.text("job_order") == "free",
            sieve: params.on("sieve"),
            patience,
            capacity: u64::from(setup.capacity),
            params: params.clone(),
            groups: (0..setup.lanes).map(|_| group()).collect(),
            turns: Turns::default(),
        })
    }
}

impl Group {
    /// The job to serve: the one that the guard demands, the one whose turn goes on, or the next of the round.
    fn choose<R: JobRule>(&mut self, rule: &R, turn_bytes: u64, guard: u64) -> Option<JobId> {
        if guard > 0
            && self.passed_over >= guard
            && let Some((_, oldest)) = self.queue.ages.first()
        {
            return Some(oldest);
        }
        let ready = |q: &JobQueue, id: JobId| q.get(id).is_some_and(|j| j.ready || (R::WAITS && !j.given_up));
        if let Some((id, bytes)) = self.turn
            && bytes < turn_bytes
            && ready(&self.queue, id)
        {
            return Some(id);
        }
        for fresh in [false, true] {
            if fresh {
                rule.round(&self.queue, &mut self.round);
            }
            while let Some(id) = self.round.pop_front() {
                if ready(&self.queue, id) {
                    self.turn = Some((id, 0));
                    return Some(id);
                }
            }
        }
        None
    }

    /// How long a job that is not ready is waited for; `None` when that is over.
    fn wait_for(&mut self, now: Nanos, id: JobId, patience: Nanos) -> Option<Nanos> {
        let since = match self.waiting {
            Some((waited, since)) if waited == id => since,
            _ => {
                self.waiting = Some((id, now));
                now
            }
        };
        if patience == Nanos::ZERO {
            return Some(Nanos::MAX);
        }
        Some(since + patience).filter(|until| *until > now)
    }

    /// Stops waiting for a job until its connection is ready.
    fn give_up(&mut self, id: JobId) {
        self.waiting = None;
        self.queue.unfile(id.index);
        if let Some(job) = self.queue.job(id.index) {
            job.given_up = true;
        }
    }
}

impl<R: JobRule> Jobs<R> {
    /// What a group with requests does next.
    fn ask(&mut self, view: &View<'_>, g: usize, batch: &mut Vec<Slot>) -> Option<Choice> {
        loop {
            let group = &mut self.groups[g];
            let Some(id) = group.choose(&self.rule, self.turn_bytes, self.guard) else {
                // What is queued is for connections that are not ready.
                return Some(Choice::until_event(WaitReason::Connection));
            };
            let job = group.queue.get(id)?;
            let first = *job.accesses.front()?;
            if !view.open(view.table.lane(first)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            if job.ready {
                return Some(self.serve(view, g, id, batch));
            }
            match group.wait_for(view.now, id, self.patience) {
                Some(until) => return Some(Choice::Wait { until, reason: WaitReason::Connection }),
                None => group.give_up(id),
            }
        }
    }

    /// Takes the next access of a job, or a piece of it, or several with the holes between them.
    fn serve(&mut self, view: &View<'_>, g: usize, id: JobId, batch: &mut Vec<Slot>) -> Choice {
        let group = &mut self.groups[g];
        let was_oldest = group.queue.ages.first().is_some_and(|(_, oldest)| oldest == id);
        group.queue.unfile(id.index);
        let Some(job) = group.queue.job(id.index) else { return Choice::until_event(WaitReason::Empty) };
        let at = job.head;
        let mut bytes = 0;
        let mut rest = None;
        while let Some(&slot) = job.accesses.front() {
            let (start, len) = (view.table.start(slot), view.table.len_bytes(slot));
            if batch.is_empty() && len > self.piece_bytes && view.pieces {
                batch.push(slot);
                bytes = self.piece_bytes;
                rest = Some(Position { file: at.file, offset: start + bytes });
                break;
            }
            let hull = view.table.end(slot).saturating_sub(at.offset);
            if let Some(&last) = batch.last()
                && !(self.sieve && hull <= self.piece_bytes && through(view, last, slot))
            {
                break;
            }
            job.accesses.pop_front();
            batch.push(slot);
            bytes = hull;
        }
        group.queue.renew(view.table, id.index, rest, R::WAITS);
        group.queue.last = at;
        let turn = group.turn.filter(|t| t.0 == id).map_or(0, |t| t.1);
        group.turn = Some((id, turn.saturating_add(bytes)));
        group.waiting = None;
        group.passed_over = if was_oldest { 0 } else { group.passed_over + 1 };
        match (rest, batch.len()) {
            (Some(_), _) => Choice::ServePiece { len_bytes: self.piece_bytes },
            (None, 1) => Choice::Serve,
            (None, _) => Choice::ServeThrough,
        }
    }
}

/// True when `next` may be read together with `last` and the hole between them, and that costs less than two accesses.
fn through(view: &View<'_>, last: Slot, next: Slot) -> bool {
    let t = view.table;
    let reads = t.op(last) == Op::Read && t.op(next) == Op::Read;
    let ascending = t.file(last) == t.file(next) && t.lane(last) == t.lane(next) && t.start(next) >= t.end(last);
    if !reads || !ascending {
        return false;
    }
    let together = view.cost.ttp(Op::Read, t.end(next) - t.start(last));
    let apart = view.cost.ttp(Op::Read, t.len_bytes(last)) + view.cost.ttp(Op::Read, t.len_bytes(next));
    together <= apart
}

impl<R: JobRule> Policy for Jobs<R> {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let (conn, seq) = (view.table.conn(slot), view.table.seq(slot));
        let queue = &mut self.groups[view.group(slot)].queue;
        let job = if self.free_order { None } else { queue.by_conn.get(&conn).and_then(|jobs| jobs.first()).copied() };
        let index = match job {
            None => queue.begin(view, slot),
            Some(index) => {
                let Some(job) = queue.job(index) else { return };
                // One that a conflict held back takes its place by arrival.
                let place = job.accesses.iter().rposition(|s| view.table.seq(*s) < seq).map_or(0, |p| p + 1);
                if place > 0 {
                    job.accesses.insert(place, slot);
                    return;
                }
                queue.unfile(index);
                if let Some(job) = queue.job(index) {
                    job.accesses.push_front(slot);
                }
                return queue.renew(view.table, index, None, R::WAITS);
            }
        };
        queue.file(index, R::WAITS);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let queue = &mut self.groups[view.group(slot)].queue;
        let Some(siblings) = queue.by_conn.get(&view.table.conn(slot)) else { return };
        // The youngest are cancelled first when a connection ends.
        let holds =
            |i: &&u32| queue.jobs[**i as usize].as_ref().is_some_and(|j| j.accesses.iter().rev().any(|s| *s == slot));
        let Some(index) = siblings.iter().rev().find(holds).copied() else { return };
        queue.unfile(index);
        if let Some(job) = queue.job(index) {
            let at = job.accesses.iter().rposition(|s| *s == slot);
            at.and_then(|at| job.accesses.remove(at));
        }
        queue.renew(view.table, index, None, R::WAITS);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.go_round(view, |group| self.ask(view, group, batch));
        self.turns = turns;
        choice
    }

    fn readiness(&mut self, view: &View<'_>, conn: ConnId) {
        let ready = view.ready(conn);
        for group in &mut self.groups {
            for index in group.queue.by_conn.get(&conn).cloned().unwrap_or_default() {
                group.queue.unfile(index);
                if let Some(job) = group.queue.job(index) {
                    (job.ready, job.given_up) = (ready, false);
                }
                group.queue.file(index, R::WAITS);
                // A turn lasts until the connection takes no more.
                group.turn = group.turn.filter(|(id, _)| ready || id.index != index);
            }
        }
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let any_lane = view.groups() == 1;
        let pieces = |len: u64| if view.pieces { len.div_ceil(self.piece_bytes).max(1) } else { 1 };
        let older: u64 = view.table.older(slot, any_lane).map(pieces).fold(0, u64::saturating_add);
        let own = pieces(view.table.len_bytes(slot));
        // Where a conflict held an older access back, or a lane is busy, its job may come after this one's.
        let turns = older.saturating_add(own).saturating_add(self.capacity);
        let guard = if self.guard == 0 { u64::MAX } else { self.guard };
        WaitBound {
            batches: turns.saturating_mul(guard.saturating_add(1)),
            idle: if R::WAITS { Nanos(self.patience.0.saturating_mul(self.capacity)) } else { Nanos::ZERO },
        }
    }
}
