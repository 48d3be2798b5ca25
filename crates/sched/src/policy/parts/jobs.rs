//! Jobs: connections with lists of accesses, served in rounds while they can take data.
//!
//! Shared by `stream`, `scan`, `wscan` and `sstf` (server-side-scheduling-2002, 3.3 and 4). A *job* is a connection and
//! the reads, or the writes, queued on it; the stream protocol of the paper's system keeps them in order, in pieces of at most 128
//! KiB (`job_order=free` makes each access a job, for protocols that may answer in any order). The four policies differ
//! in which jobs form a *round*, in which order, and in whether they wait for a job that cannot take data; that is a
//! [`JobRule`]. A round is fixed when it begins.
//!
//! Choices where the paper is silent, for all four:
//! - Writes send nothing, so a job of writes is always ready; the paper had only reads. A connection that takes no data holds
//!   up no sync, which waits for older writes, for more than half a second (`core/pressing.rs`).
//! - The offset of an access or piece is that of its first byte in the lane's space; the last offset is that of the
//!   last one served. Files are ordered by first use: positions are (file, offset), so a scan goes through one file,
//!   then the next, and wraps. The paper had a single file.
//! - A job's turn ends after `turn_bytes` even if its connection could take more; in the paper, socket buffers did
//!   that.
//! - `guard_batches`: after this many batches without the job that has the oldest access, that job is served next if it
//!   is ready, whatever its offset (0 disables it: the paper's rules, which starve).
//! - `sieve=on`: consecutive reads of a job are read together with the holes between them, up to a piece, if the cost
//!   model says that is cheaper than skipping the holes (2002, 2.1).
//!
//! Wait: each piece of an older access, and of the request itself, lets `guard_batches` other batches pass.
//! Work-conserving for jobs whose connection is ready, except where the rule waits: at most `patience_us` before a
//! batch.

use std::collections::VecDeque;

use super::job_queue::{Job, origin};
pub(in crate::policy) use super::job_queue::{JobId, JobQueue, Position};
use super::turns::Turns;
use crate::policy::params::{ParamInfo, Range, SWITCH};
use crate::policy::{Choice, Conduct, Params, Policy, Setup, View, WaitBound, WaitReason};
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{ConnId, Nanos, Op};

/// The conduct of all four.
pub(in crate::policy) const CONDUCT: Conduct = Conduct {
    minds_connections: true,
    in_order: |params| params.text("job_order") == "byte",
    ..Conduct::conserving(
        "(pieces of older accesses + its own) × (guard_batches + 1) batches while its connection is ready",
    )
};

/// The parameters of all four.
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
    doc: "Batches that may pass over the job with the oldest access; 0: any number.",
};
pub(in crate::policy) const JOB_ORDER: ParamInfo = ParamInfo {
    name: "job_order",
    default: "byte",
    range: Range::Choice(&["byte", "free"]),
    doc: "Reads, and writes, of a connection in the order in which they came, or in any.",
};
pub(in crate::policy) const SIEVE: ParamInfo = ParamInfo {
    name: "sieve",
    default: "on",
    range: SWITCH,
    doc: "Read through holes between accesses of a job that are cheaper to read than to skip.",
};

/// The differences between the four policies.
pub(in crate::policy) trait JobRule: Send {
    /// Jobs whose connection is not ready are chosen too, and waited for.
    const WAITS: bool;
    /// A turn is one access (or piece) instead of everything that the connection takes.
    const ONE_ACCESS: bool;

    /// The jobs of the next round, in order; empty if no job can be chosen.
    fn round(&self, queue: &JobQueue, round: &mut VecDeque<JobId>);
}

struct Group {
    queue: JobQueue,
    round: VecDeque<JobId>,
    /// The job whose turn it is, and the bytes it has been served.
    turn: Option<(JobId, u64)>,
    /// When waiting for unready jobs began, after the last batch.
    waiting_since: Option<Nanos>,
    /// Batches since the job with the oldest access was last served.
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
    groups: Vec<Group>,
    turns: Turns,
}

impl<R: JobRule + 'static> Jobs<R> {
    /// `patience` limits the waits of a rule that waits; zero: no limit.
    pub fn boxed(params: &Params, setup: &Setup, rule: R, patience: Nanos) -> Box<dyn Policy> {
        let group = || Group {
            queue: JobQueue::new(setup),
            round: VecDeque::new(),
            turn: None,
            waiting_since: None,
            passed_over: 0,
        };
        let unbounded = |n| if n == 0 { u64::MAX } else { n };
        Box::new(Jobs {
            rule,
            piece_bytes: params.integer("piece_bytes"),
            turn_bytes: if R::ONE_ACCESS { 1 } else { unbounded(params.integer("turn_bytes")) },
            guard: params.integer("guard_batches"),
            free_order: params.text("job_order") == "free",
            sieve: params.on("sieve"),
            patience,
            params: params.clone(),
            groups: (0..setup.lanes).map(|_| group()).collect(),
            turns: Turns::default(),
        })
    }
}

impl Group {
    /// The job that the guard requires.
    fn due(&self, guard: u64) -> Option<JobId> {
        let is_due = guard > 0 && self.passed_over >= guard;
        self.queue.ages.first().filter(|_| is_due).map(|(_, oldest)| oldest)
    }

    /// The job to serve: the one that the guard requires, the one whose turn continues, or the next of the round.
    fn choose<R: JobRule>(&mut self, rule: &R, turn_bytes: u64, guard: u64) -> Option<JobId> {
        if let Some(oldest) = self.due(guard) {
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

    /// How long to wait for unready jobs; `None` once that is over until the next batch.
    fn wait_until(&mut self, now: Nanos, patience: Nanos) -> Option<Nanos> {
        let since = *self.waiting_since.get_or_insert(now);
        let until = if patience == Nanos::ZERO { Nanos::MAX } else { since + patience };
        Some(until).filter(|until| *until > now)
    }
}

impl<R: JobRule> Jobs<R> {
    /// Decides for a group with requests.
    fn ask(&mut self, view: &View<'_>, g: usize, batch: &mut Vec<Slot>) -> Option<Choice> {
        loop {
            let group = &mut self.groups[g];
            let Some(id) = group.choose(&self.rule, self.turn_bytes, self.guard) else {
                // All queued requests belong to connections that are not ready.
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
            match group.wait_until(view.now, self.patience) {
                Some(until) => return Some(Choice::Wait { until, reason: WaitReason::Connection }),
                // The job is considered again when its connection is ready.
                None => group.queue.change(id.index, R::WAITS, |job| job.given_up = true),
            }
        }
    }

    /// Takes a job's next access, a piece of it, or several with the holes between them.
    fn serve(&mut self, view: &View<'_>, g: usize, id: JobId, batch: &mut Vec<Slot>) -> Choice {
        let group = &mut self.groups[g];
        let was_oldest = group.queue.ages.first().is_some_and(|(_, oldest)| oldest == id);
        let (piece_bytes, sieve) = (self.piece_bytes, self.sieve);
        let (mut at, mut bytes, mut rest) = (group.queue.last, 0, None);
        group.queue.change_accesses(view.table, id.index, R::WAITS, |job| {
            at = job.head;
            while let Some(&slot) = job.accesses.front() {
                let (start, len) = (view.table.start(slot), view.table.len_bytes(slot));
                if batch.is_empty() && len > piece_bytes && view.pieces {
                    batch.push(slot);
                    bytes = piece_bytes;
                    rest = Some(Position { file: at.file, offset: start + bytes });
                    break;
                }
                let hull = view.table.end(slot).saturating_sub(at.offset);
                if let Some(&last) = batch.last()
                    && !(sieve && hull <= piece_bytes && through(view, last, slot))
                {
                    break;
                }
                job.accesses.pop_front();
                batch.push(slot);
                bytes = hull;
            }
            rest
        });
        group.queue.last = at;
        let turn = group.turn.filter(|t| t.0 == id).map_or(0, |t| t.1);
        group.turn = Some((id, turn.saturating_add(bytes)));
        group.waiting_since = None;
        group.passed_over = if was_oldest { 0 } else { group.passed_over + 1 };
        match (rest, batch.len()) {
            (Some(_), _) => Choice::ServePiece { len_bytes: piece_bytes },
            (None, 1) => Choice::Serve,
            (None, _) => Choice::ServeThrough,
        }
    }
}

/// True if `next` can be read together with `last` and the hole between them for less than two accesses.
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

impl<R: JobRule + 'static> Policy for Jobs<R> {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let (origin, seq) = (origin(view.table, slot), view.table.seq(slot));
        let queue = &mut self.groups[view.group(slot)].queue;
        let jobs = queue.by_origin.get(&origin).filter(|_| !self.free_order);
        let job = jobs.and_then(|jobs| jobs.first()).copied();
        let Some(index) = job else { return queue.begin(view, slot, R::WAITS) };
        // A request delayed by a conflict is inserted by arrival.
        let place = |job: &Job| job.accesses.iter().rposition(|s| view.table.seq(*s) < seq).map_or(0, |p| p + 1);
        match queue.jobs.at_mut(index).map(|job| (place(job), job)) {
            Some((place @ 1.., job)) => job.accesses.insert(place, slot),
            _ => queue.change_accesses(view.table, index, R::WAITS, |job| {
                job.accesses.push_front(slot);
                None
            }),
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let queue = &mut self.groups[view.group(slot)].queue;
        let Some(index) = queue.job_of(view.table, slot) else { return };
        queue.change_accesses(view.table, index, R::WAITS, |job| {
            job.accesses.retain(|access| *access != slot);
            None
        });
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| self.ask(view, group, batch));
        self.turns = turns;
        choice
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        // In byte order only a connection's first access may go, so the oldest of the lane may have to wait.
        let (group, lane) = (view.group(oldest), view.table.lane(oldest));
        match self.groups[group].queue.ages_by_lane.get(lane.index()).and_then(SortedSet::first) {
            Some((_, job)) => self.serve(view, group, job, batch),
            None => Choice::until_event(WaitReason::LanesBusy),
        }
    }

    fn serve_pressing(&mut self, view: &View<'_>, slot: Slot, batch: &mut Vec<Slot>) -> Choice {
        let g = view.group(slot);
        let group = &self.groups[g];
        let own = group.queue.job_of(view.table, slot).and_then(|index| group.queue.jobs.at(index)).map(|job| job.id);
        let first = |id: &JobId| group.queue.get(*id).and_then(|job| job.accesses.front());
        let is_open = |id: &JobId| first(id).is_some_and(|first| view.open(view.table.lane(*first)));
        match [group.due(self.guard), own].into_iter().flatten().find(is_open) {
            Some(id) => self.serve(view, g, id, batch),
            None => Choice::until_event(WaitReason::LanesBusy),
        }
    }

    fn readiness(&mut self, view: &View<'_>, conn: ConnId) {
        let ready = view.ready(conn);
        for group in &mut self.groups {
            for index in group.queue.by_origin.get(&(conn, false)).cloned().unwrap_or_default() {
                group.queue.change(index, R::WAITS, |job| (job.ready, job.given_up) = (ready, false));
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
        let guard = if self.guard == 0 { u64::MAX } else { self.guard };
        let batches = older.saturating_add(own).saturating_mul(guard.saturating_add(1));
        let idle = match (R::WAITS, self.patience) {
            (false, _) => Nanos::ZERO,
            (true, Nanos::ZERO) => Nanos::MAX, // the paper's rule waits without limit
            (true, patience) => Nanos(patience.0.saturating_mul(batches.saturating_add(1))),
        };
        WaitBound { idle, ..WaitBound::of_batches(batches) }
    }
}
