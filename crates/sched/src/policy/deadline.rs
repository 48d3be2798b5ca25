//! `deadline`: offset order in batches, with an expiry per operation (after Linux's mq-deadline).
//!
//! Reads and writes of a lane are each kept in two orders: by file and offset, and by arrival. A *sweep* sends up to
//! `sweep_batches` batches of one operation in ascending order (file, then offset). The next sweep is of reads if there
//! are any, unless writes have waited for `writes_starved` sweeps of reads; then it is of writes. A sweep continues
//! where the operation's last one stopped, or starts at the operation's oldest request if that has expired. It also
//! ends at the last offset of the last file; the next one then begins at the lowest.
//!
//! Source: the kernel's block/mq-deadline.c and Documentation/block/deadline-iosched (read_expire, write_expire,
//! fifo_batch, writes_starved; our names, its defaults), reworded. The source orders one device; here files are ordered
//! by their number at this server, which says nothing about their place on the device but keeps the requests of one
//! file together. Touching requests form one batch, as the kernel merges them; a batch counts once towards the sweep,
//! and is limited by `batch_requests` and `batch_bytes`. `writes_starved` is at least 1: with 0 the kernel's rule would
//! starve reads.
//!
//! Wait: expiry bounds the wait only while the device keeps up. So a request also expires after `guard_batches` batches
//! of its operation that passed it over while it was the oldest (0 disables this). At most (older requests of its
//! operation + 1) × (`guard_batches` + `sweep_batches`) batches of its operation precede it, and for each sweep of
//! writes `writes_starved` + 1 of reads. Work-conserving.

use std::collections::BTreeMap;

use super::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, Range};
use super::parts::arrivals::Guards;
use super::parts::runs::{RunQueue, Runs};
use super::parts::turns::Turns;
use super::{Choice, Conduct, ParamInfo, Params, Policy, PolicyInfo, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{FileId, Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "deadline",
    summary: "Sweeps in offset order, reads before writes, with an expiry for each.",
    source: "Linux, block/mq-deadline",
    conduct: Conduct::conserving(
        "the sweeps until the guard has let each older request of its operation go, and those of the other operation",
    ),
    params: &[
        ParamInfo {
            name: "read_expire_ms",
            default: "500",
            range: Range::Integer(0, 3_600_000),
            doc: "A read that has waited this long starts the next sweep, milliseconds.",
        },
        ParamInfo {
            name: "write_expire_ms",
            default: "5000",
            range: Range::Integer(0, 3_600_000),
            doc: "The same for writes.",
        },
        ParamInfo {
            name: "sweep_batches",
            default: "16",
            range: Range::Integer(1, 65_535),
            doc: "Batches of a sweep at most.",
        },
        ParamInfo {
            name: "writes_starved",
            default: "2",
            range: Range::Integer(1, 1000),
            doc: "Sweeps of reads that may go before waiting writes.",
        },
        ParamInfo { doc: "Requests per batch at most; 1: no aggregation.", ..BATCH_REQUESTS },
        ParamInfo { doc: "Bytes per batch at most.", ..BATCH_BYTES },
        ParamInfo {
            default: "1024",
            doc: "Batches of an operation that may pass over its oldest request; 0: any number.",
            ..GUARD_BATCHES
        },
    ],
    build: |params, setup| {
        let expire = ["read_expire_ms", "write_expire_ms"].map(|name| Nanos::from_millis(params.integer(name)));
        Ok(Box::new(Deadline {
            expire,
            sweep: params.integer("sweep_batches"),
            writes_starved: params.integer("writes_starved"),
            guard: params.integer("guard_batches"),
            guards: Guards::new(params.integer("guard_batches"), 2 * usize::from(setup.lanes)),
            runs: Runs::new(params.integer("batch_requests"), params.integer("batch_bytes")),
            groups: (0..setup.lanes).map(|_| Group::default()).collect(),
            turns: Turns::default(),
            params: params.clone(),
        }))
    },
};

const READ: usize = 0;
const WRITE: usize = 1;

/// The requests of one operation.
#[derive(Default)]
struct Direction {
    files: BTreeMap<FileId, RunQueue>,
    /// Where its last batch ended; `None`: beyond all requests.
    position: Option<(FileId, u64)>,
}

#[derive(Default)]
struct Group {
    directions: [Direction; 2],
    /// The current sweep's operation and its batches so far.
    sweep: Option<(usize, u64)>,
    /// Sweeps of reads since writes began to wait.
    starved: u64,
}

struct Deadline {
    params: Params,
    /// For reads and writes.
    expire: [Nanos; 2],
    sweep: u64,
    writes_starved: u64,
    guard: u64,
    /// By lane group and operation, see [`guarded`].
    guards: Guards,
    runs: Runs,
    groups: Vec<Group>,
    turns: Turns,
}

fn direction(op: Op) -> usize {
    if op == Op::Read { READ } else { WRITE }
}

/// Index of a lane group and operation among the guards.
fn guarded(group: usize, direction: usize) -> usize {
    2 * group + direction
}

impl Direction {
    /// The first run, by file and offset, that begins at or after the end of the last batch.
    fn ahead(&self, view: &View<'_>) -> Option<Slot> {
        let (file, offset) = self.position?;
        let mut files = self.files.range(file..);
        let (first, runs) = files.next()?;
        if *first != file {
            return runs.next_ready(0);
        }
        let head = runs.next_ready(offset).filter(|h| view.table.start(*h) >= offset);
        head.or_else(|| files.next().and_then(|(_, runs)| runs.next_ready(0)))
    }

    /// Moves the run (or its rest) that begins at `first` into the batch.
    fn take(&mut self, runs: &mut Runs, view: &View<'_>, first: Slot, batch: &mut Vec<Slot>) {
        let file = view.table.file(first);
        let Some(queue) = self.files.get_mut(&file) else { return };
        runs.take_from(queue, view.table, first, batch, |_| 0);
        if queue.is_empty() {
            self.files.remove(&file);
        }
    }

    fn lowest(&self) -> Option<Slot> {
        self.files.first_key_value().and_then(|(_, runs)| runs.next_ready(0))
    }
}

impl Group {
    /// The operation of the next sweep, and how many sweeps of reads writes have waited for by then.
    fn next_direction(&self, writes_starved: u64) -> Option<(usize, u64)> {
        let [reads, writes] = &self.directions;
        match (reads.files.is_empty(), writes.files.is_empty()) {
            (true, true) => None,
            (false, true) => Some((READ, 0)),
            (false, false) if self.starved < writes_starved => Some((READ, self.starved + 1)),
            (_, false) => Some((WRITE, 0)),
        }
    }
}

impl Policy for Deadline {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let (group, d) = (view.group(slot), direction(view.table.op(slot)));
        self.guards.insert(view.table, guarded(group, d), slot);
        let queue = self.groups[group].directions[d].files.entry(view.table.file(slot)).or_default();
        self.runs.insert(queue, view.table, slot, 0, |_| 0);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let (group, d, file) = (view.group(slot), direction(view.table.op(slot)), view.table.file(slot));
        self.guards.remove(view.table, guarded(group, d), slot);
        let files = &mut self.groups[group].directions[d].files;
        let Some(queue) = files.get_mut(&file) else { return };
        self.runs.remove(queue, view.table, slot, |_| 0);
        if queue.is_empty() {
            files.remove(&file);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| {
            let g = &mut self.groups[group];
            let going = g.sweep.filter(|(_, batches)| *batches < self.sweep);
            let continued = going.and_then(|(d, batches)| Some((g.directions[d].ahead(view)?, d, batches, g.starved)));
            let (head, d, batches, starved) = match continued {
                Some(next) => next,
                None => {
                    let (d, starved) = g.next_direction(self.writes_starved)?;
                    let of = &g.directions[d];
                    let oldest = self.guards.oldest(view.table, guarded(group, d))?;
                    let expired = self.guards.due(view.table, guarded(group, d)).is_some()
                        || view.table.arrival(oldest) + self.expire[d] <= view.now;
                    let head = match of.ahead(view) {
                        Some(ahead) if !expired => ahead,
                        _ if expired => self.runs.run_of(oldest),
                        _ => of.lowest()?,
                    };
                    (head, d, 0, starved)
                }
            };
            if !view.open(view.table.lane(head)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            let of = &mut g.directions[d];
            of.take(&mut self.runs, view, head, batch);
            self.guards.sent(view.table, guarded(group, d), batch);
            of.position = batch.last().map(|last| (view.table.file(head), view.table.end(*last)));
            g.sweep = Some((d, batches + 1));
            g.starved = starved;
            Some(Choice::Serve)
        });
        self.turns = turns;
        choice
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        let (group, d) = (view.group(oldest), direction(view.table.op(oldest)));
        self.groups[group].directions[d].take(&mut self.runs, view, oldest, batch);
        self.guards.sent(view.table, guarded(group, d), batch);
        Choice::Serve
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let older = view.table.older_than(slot, view.groups() == 1);
        let guard = if self.guard == 0 { u64::MAX } else { self.guard };
        // Count the sweeps of its own operation until the guard has released every older request and this one, and for
        // each of them the sweeps of the other operation. A sweep has at least one batch, so batches bound sweeps.
        let own = older.saturating_add(1).saturating_mul(guard.saturating_add(self.sweep));
        let other = own.saturating_mul(self.writes_starved.saturating_add(1)).saturating_mul(self.sweep);
        WaitBound::of_batches(own.saturating_add(other))
    }
}
