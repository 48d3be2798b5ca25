//! Waiting for requests that were predicted from a recorded run (agios-2013, IV.C).
//!
//! An arriving request is matched with its prediction: the same file, operation, offset and length, at about the same
//! time after the first request of its file. A virtual request that is about to be served but smaller than the
//! aggregation predicted for it is held, once; a mark on its requests survives its growth.
//!
//! - [`Rule::Worth`], the paper's: until the predicted span, from the aggregation's first arrival to its last, has
//!   passed since its own first request arrived. α is measured: the part of such waits in which the lane served other
//!   queues.
//! - [`Rule::Causal`], ours: only for requests that did not cause each other in the recorded run, only while some are
//!   missing, and for at most `wait`. Each file has an account in device time: a wait costs its duration and, if it
//!   completed the aggregation, earns the time of a batch, at most the fixed part of its cost. Where waits do not pay,
//!   the file's waits stop, and one is tried again every [`RETRY_BATCHES`] batches.

use std::sync::Arc;

use impresario_foresight::{Aggregations, Group, GroupLimits, PredictedQueues, Rule, part_key};
use rustc_hash::FxHashMap;

use super::anticipation::Stream;
use super::remembered::Remembered;
use super::runs::{Run, Runs};
use crate::contract::Linked;
use crate::policy::View;
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// A request may arrive this much earlier or later than predicted, in addition to the configured part of the predicted
/// time.
const BOUND: Nanos = Nanos(1_000_000_000);
/// After this time without requests a file starts anew: its next request is its first.
const AGAIN_AFTER: Nanos = Nanos(5_000_000_000);
/// α changes in steps of this size, so that aggregations are rarely recomputed.
const OVERLAP_STEP: f64 = 0.125;
/// A causal wait lasts this much longer than 1.5 × the predicted span.
const MARGIN: Nanos = Nanos(200_000);
/// Maximum accounts.
const ACCOUNTS_MAX: usize = 4096;
/// Waits that a new account may lose, and the maximum credit of one.
const FIRST_WAITS: i64 = 1;
const MOST_WAITS: i64 = 4;
/// Batches of a file without credit before it gets one more wait.
const RETRY_BATCHES: u32 = 256;

/// After this many requests in a row without a match only every [`SAMPLE`]th is looked up, until one matches: a run
/// that does not match costs next to nothing.
const ASLEEP_AFTER: u32 = 512;
const SAMPLE: u32 = 32;

/// The prediction matched with a queued request.
#[derive(Clone, Copy, Default)]
struct Link {
    group: Option<Group>,
    /// Until when its virtual request is, or was, held; zero: never held.
    held_to: Nanos,
}

/// A hold in progress.
#[derive(Clone, Copy)]
struct Hold {
    since: Nanos,
    requests: u64,
    group: u32,
    /// Device time of the lane when it began.
    busy_ns: u64,
}

#[derive(Clone, Copy)]
struct Account {
    credit_ns: i64,
    broke_batches: u32,
    /// Recent device time of a batch of the file, ns; 0 before the first.
    service_ns: i64,
}

/// How much of a predicted group has arrived.
#[derive(Clone, Copy)]
struct Progress {
    arrived: u32,
    first: Nanos,
}

pub(in crate::policy) struct Foreseen {
    rule: Rule,
    /// Longest wait.
    wait: Nanos,
    limits: GroupLimits,
    /// How far from its predicted instant a request may arrive, as a fraction of the predicted time.
    bound_part: f64,
    run: Option<(Arc<PredictedQueues>, Aggregations)>,
    /// By slot; absent for requests that never matched.
    links: Vec<Link>,
    /// Requests that belong to an aggregation; while there are none, runs need not be searched.
    grouped: usize,
    counted: Linked,
    /// Requests since the last match.
    missed: u32,
    /// First and last arrival of each predicted file.
    begun: FxHashMap<u64, (Nanos, Nanos)>,
    /// Groups that have arrived in part.
    progress: FxHashMap<u32, Progress>,
    holds: FxHashMap<Stream, Hold>,
    accounts: Remembered<Stream, Account>,
    /// Measured α.
    overlap: f64,
    busy_ns: Vec<u64>,
}

impl Foreseen {
    /// By the paper's rule with an initial α, or by causes.
    pub fn new(rule: Rule, wait: Nanos, limits: (u64, u64), bound_part: f64, groups: usize) -> Foreseen {
        let overlap = if let Rule::Worth { overlap } = rule { overlap } else { 0.0 };
        let limits = GroupLimits { requests: limits.0 as u32, bytes: limits.1, span_ns: wait.0 };
        Foreseen {
            rule,
            wait,
            limits,
            bound_part,
            run: None,
            links: Vec::new(),
            grouped: 0,
            counted: Linked::default(),
            missed: 0,
            begun: FxHashMap::default(),
            progress: FxHashMap::default(),
            holds: FxHashMap::default(),
            accounts: Remembered::new(ACCOUNTS_MAX),
            overlap,
            busy_ns: vec![0; groups],
        }
    }

    /// Longest hold before a batch.
    pub fn longest(&self) -> Nanos {
        self.wait
    }

    /// Holds only for requests that cannot have caused each other, so the lane may be kept for them.
    pub fn is_causal(&self) -> bool {
        self.rule == Rule::Causal
    }

    /// Sets or clears the recorded run. Setting the same run again changes nothing.
    pub fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        if let (Some(new), Some((old, _))) = (&queues, &self.run)
            && Arc::ptr_eq(new, old)
        {
            return;
        }
        self.run = queues.filter(|q| !q.is_empty()).map(|queues| {
            let aggregations = Aggregations::new(&queues, self.rule, self.limits);
            (queues, aggregations)
        });
        self.links.clear();
        (self.grouped, self.counted, self.missed) = (0, Linked::default(), 0);
        self.begun.clear();
        self.progress.clear();
        self.holds.clear();
    }

    /// Requests since the run was set, and how many of them matched it.
    pub fn linked(&self) -> Linked {
        self.counted
    }

    /// A request was queued.
    pub fn arrived(&mut self, view: &View<'_>, slot: Slot) {
        self.forget(slot);
        let Some((queues, aggregations)) = &mut self.run else { return };
        self.counted.arrived += 1;
        self.missed = self.missed.wrapping_add(1).max(1);
        if self.missed > ASLEEP_AFTER && !self.missed.is_multiple_of(SAMPLE) {
            return;
        }
        let (table, at) = (view.table, slot.index());
        let (mut file, op) = (view.names.file(table.file(slot)), table.op(slot));
        if !view.shared_space {
            file = part_key(file, table.lane(slot).0);
        }
        let queue = (file, op == Op::Write);
        if !queues.knows(queue.0, queue.1) {
            return;
        }
        let arrival = table.arrival(slot);
        let (first, last) = self.begun.entry(file).or_insert((arrival, arrival));
        if arrival.since(*last) > AGAIN_AFTER {
            *first = arrival;
        }
        *last = arrival.max(*last);
        let since = arrival.since(*first).0;
        let place = (table.start(slot), table.len_bytes(slot));
        let Some(id) = queues.find(queue, place, since, (BOUND.0, self.bound_part)) else { return };
        self.counted.linked += 1;
        self.missed = 0;
        let group = aggregations.group(queues, queue, id, |bytes| view.cost.ttp(op, bytes).0);
        if group.requests < 2 {
            return;
        }
        if self.links.len() <= at {
            self.links.resize(at + 1, Link::default());
        }
        self.links[at].group = Some(group);
        self.grouped += 1;
        if self.rule == Rule::Causal {
            let stale = Nanos(self.wait.0.saturating_mul(16).saturating_add(BOUND.0));
            let progress = self.progress.entry(group.id()).or_insert(Progress { arrived: 0, first: arrival });
            if arrival.since(progress.first) > stale {
                *progress = Progress { arrived: 0, first: arrival };
            }
            progress.arrived += 1;
            if progress.arrived >= group.requests {
                self.progress.remove(&group.id());
            }
        }
    }

    /// A request left its queue.
    fn forget(&mut self, slot: Slot) -> Link {
        let link = self.links.get_mut(slot.index()).map(std::mem::take).unwrap_or_default();
        self.grouped -= usize::from(link.group.is_some());
        link
    }

    /// How long the virtual request that begins at `head` is held for predicted neighbours; `None`: not at all.
    pub fn hold(&mut self, view: &View<'_>, runs: &Runs, stream: Stream, head: Slot) -> Option<Nanos> {
        if self.grouped == 0 {
            return None;
        }
        let Run { count, len, .. } = runs.run(head);
        let (mut first, mut held_to, mut best): (_, _, Option<Group>) = (Nanos::MAX, Nanos::ZERO, None);
        for slot in runs.members(head) {
            first = first.min(view.table.arrival(slot));
            let link = self.links.get(slot.index()).copied().unwrap_or_default();
            held_to = held_to.max(link.held_to);
            best = match (best, link.group) {
                (Some(a), Some(b)) if a.bytes >= b.bytes => Some(a),
                (a, b) => b.or(a),
            };
        }
        let group = best?;
        if len >= group.bytes || count >= u64::from(group.requests) {
            return None;
        }
        let incomplete = match self.rule {
            Rule::Worth { .. } => true,
            Rule::Causal => self.progress.contains_key(&group.id()),
        };
        if held_to > Nanos::ZERO {
            return (incomplete && view.now < held_to).then_some(held_to);
        }
        let until = match self.rule {
            Rule::Worth { .. } => first + Nanos(group.span_ns()),
            Rule::Causal => {
                let span = Nanos(group.span_ns().saturating_mul(3) / 2) + MARGIN;
                (first + span).min(view.now + self.wait)
            }
        };
        let holds = incomplete && until > view.now && self.pays(stream);
        if holds {
            let busy_ns = self.busy_ns[stream.0.index()];
            self.holds.insert(stream, Hold { since: view.now, requests: count, group: group.id(), busy_ns });
            self.mark(runs, head, until);
        }
        holds.then_some(until)
    }

    fn mark(&mut self, runs: &Runs, head: Slot, until: Nanos) {
        for slot in runs.members(head) {
            if self.links.len() <= slot.index() {
                self.links.resize(slot.index() + 1, Link::default());
            }
            self.links[slot.index()].held_to = until;
        }
    }

    /// Whether an account covers one more wait; the paper has no accounts.
    fn pays(&mut self, stream: Stream) -> bool {
        if self.rule != Rule::Causal {
            return true;
        }
        let wait = self.wait.0 as i64;
        let account =
            self.accounts.of(stream, || Account { credit_ns: wait * FIRST_WAITS, broke_batches: 0, service_ns: 0 });
        account.credit_ns > 0
    }

    /// Requests of a queue were sent, which ends their hold.
    pub fn sent(&mut self, view: &View<'_>, stream: Stream, batch: &[Slot]) {
        if self.run.is_none() {
            return;
        }
        let mut held = false;
        for slot in batch {
            held |= self.forget(*slot).held_to > Nanos::ZERO;
        }
        let hold = if held { self.holds.remove(&stream) } else { None };
        if self.rule == Rule::Causal {
            self.book(view, stream, hold, batch.len() as u64);
        } else if let Some(hold) = hold {
            self.measure(view, stream, hold);
        }
    }

    /// Books a wait, or counts a batch of a file without credit.
    fn book(&mut self, view: &View<'_>, stream: Stream, hold: Option<Hold>, requests: u64) {
        let wait = self.wait.0 as i64;
        let Some(account) = self.accounts.get_mut(&stream) else { return };
        match hold {
            Some(hold) => {
                // One batch less saves at most a batch's time, which is short on a drive that reads ahead.
                let fixed = (view.cost.ttp(stream.2, 0).0 as i64).min(account.service_ns);
                // An incomplete aggregation needs another batch anyway.
                let whole = requests > hold.requests && !self.progress.contains_key(&hold.group);
                let earned = if whole { fixed } else { 0 };
                let spent = view.now.since(hold.since).0 as i64;
                account.credit_ns = (account.credit_ns + earned - spent).clamp(0, wait * MOST_WAITS);
            }
            None if account.credit_ns <= 0 => {
                account.broke_batches += 1;
                if account.broke_batches >= RETRY_BATCHES {
                    (account.credit_ns, account.broke_batches) = (wait / 4, 0);
                }
            }
            None => {}
        }
    }

    /// Measures α, the part of a wait in which other queues were served.
    fn measure(&mut self, view: &View<'_>, stream: Stream, hold: Hold) {
        let waited = view.now.since(hold.since).0;
        if waited == 0 {
            return;
        }
        let busy = self.busy_ns[stream.0.index()].saturating_sub(hold.busy_ns);
        let used = (busy as f64 / waited as f64).min(1.0);
        self.overlap += (used - self.overlap) / 16.0;
        let Some((_, aggregations)) = &mut self.run else { return };
        if let Rule::Worth { overlap } = aggregations.rule()
            && (overlap - self.overlap).abs() > OVERLAP_STEP
        {
            let overlap = (self.overlap / OVERLAP_STEP).round() * OVERLAP_STEP;
            aggregations.set_rule(Rule::Worth { overlap });
        }
    }

    /// A queued request was cancelled.
    pub fn cancelled(&mut self, slot: Slot) {
        self.forget(slot);
    }

    /// A batch of a queue ended after `service`.
    pub fn completed(&mut self, stream: Stream, service: Nanos) {
        if self.run.is_none() {
            return;
        }
        self.busy_ns[stream.0.index()] = self.busy_ns[stream.0.index()].saturating_add(service.0);
        if let Some(account) = self.accounts.get_mut(&stream) {
            let took = service.0.min(i64::MAX as u64) as i64;
            account.service_ns += (took - account.service_ns) / if account.service_ns == 0 { 1 } else { 8 };
        }
    }

    /// Takes over the measurements of another instance after a change of parameters.
    pub fn take_over(&mut self, other: Foreseen) {
        if self.busy_ns.len() == other.busy_ns.len() {
            (self.begun, self.accounts, self.counted) = (other.begun, other.accounts, other.counted);
            self.overlap = other.overlap;
            self.run = other.run.map(|(queues, _)| {
                let aggregations = Aggregations::new(&queues, self.rule, self.limits);
                (queues, aggregations)
            });
        }
    }
}
