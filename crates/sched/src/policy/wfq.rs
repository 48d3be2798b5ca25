//! `wfq`: weighted fair queueing as deficit round robin (AGIOS, public library: WFQ; the rule is that of Shreedhar and
//! Varghese, SIGCOMM 1995).
//!
//! One queue per job (or user, client, file: `by`), in order of arrival. Queues are visited in rounds. Each visit adds
//! the queue's quantum in bytes, its weight, to its deficit; the queue then sends while its next batch is no longer
//! than the deficit, which shrinks by what it sends. An empty queue leaves the ring and loses its deficit; a queue that
//! joins is visited after the existing ones.
//!
//! Quanta come from `rules`, e.g. `big: job=17 {quantum_bytes=262144}; rest: * {quantum_bytes=32768}`: the first that
//! matches the request that opens a queue applies, else `quantum_bytes`.
//!
//! Our choices where the source is silent:
//! - Rounds are not iterated. The round that pays for a queue's next batch is computed when the queue joins or ends its
//!   turn, and rounds in which no queue could send are skipped by arithmetic, so a request of any length is served at
//!   once if no other waits. Within a round, queues visited longest ago go first.
//! - With `merge=on` the oldest request of a queue takes along the requests that touch it; the whole batch is paid for.
//! - Each lane has its own ring: one device's bytes cannot be paid for with another's idle time.
//!
//! Wait: the rounds that pay for the queue's older requests and for this one, each with one turn of every other queue.
//! Nothing starves, so there is no guard. Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, MERGE_OFF, Range};
use super::parts::flows::Flows;
use super::parts::rules::{self, Rule};
use super::parts::turns::Turns;
use super::{Choice, Conduct, ParamInfo, Params, Policy, PolicyError, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::names::Who;
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::{Slot, State};
use crate::types::Nanos;

const QUANTUM_MIN: u64 = 512;
const QUANTUM_MAX: u64 = 1 << 30;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "wfq",
    summary: "Weighted fair queueing: deficit round robin over jobs (users, clients, files), quanta by rules.",
    source: "AGIOS, public library (WFQ); Shreedhar and Varghese, SIGCOMM 1995",
    conduct: Conduct {
        shares: true,
        ..Conduct::conserving("the rounds that pay for the older requests of the queue and for this one")
    },
    params: &[
        ParamInfo {
            name: "by",
            default: "job",
            range: Range::Choice(&["job", "user", "client", "file"]),
            doc: "Whose requests share a queue.",
        },
        ParamInfo {
            name: "quantum_bytes",
            default: "65536",
            range: Range::Integer(QUANTUM_MIN, QUANTUM_MAX),
            doc: "Bytes that a round grants to a queue, unless a rule says otherwise.",
        },
        ParamInfo {
            name: "rules",
            default: "",
            range: Range::Text("rules such as \"big: job=17 {quantum_bytes=262144}; rest: * {quantum_bytes=32768}\""),
            doc: "Quanta of particular queues: bytes a round.",
        },
        MERGE_OFF,
        BATCH_REQUESTS,
        BATCH_BYTES,
    ],
    build,
};

fn build(params: &Params, setup: &Setup) -> Result<Box<dyn Policy>, PolicyError> {
    let with_quantum = |rule: Rule| -> Result<(Rule, u64), String> {
        rule.only(&["quantum_bytes"])?;
        let range = QUANTUM_MIN as f64..=QUANTUM_MAX as f64;
        let quantum = rule.number("quantum_bytes", params.integer("quantum_bytes") as f64, range)?;
        Ok((rule, quantum as u64))
    };
    let rules = rules::parse(params.text("rules"))
        .and_then(|rules| rules.into_iter().map(with_quantum).collect::<Result<Vec<_>, String>>())
        .map_err(|why| params.refuse("rules", format!("in order: {why}")))?;
    let whose = match params.text("by") {
        "user" => |who: &Who| who.user,
        "client" => |who: &Who| who.client,
        "file" => |who: &Who| who.file,
        _ => |who: &Who| who.job,
    };
    Ok(Box::new(Wfq {
        whose,
        rules,
        quantum: params.integer("quantum_bytes"),
        batch_bytes: if params.on("merge") { params.integer("batch_bytes") } else { 0 },
        capacity: u64::from(setup.capacity),
        queues: Flows::new(params, setup, 0),
        params: params.clone(),
        rings: (0..setup.lanes).map(|_| Ring::default()).collect(),
        turns: Turns::default(),
    }))
}

/// The policy's data of a queue.
#[derive(Default)]
struct Account {
    quantum: u64,
    deficit: u64,
    /// The round up to which quanta were added to the deficit.
    paid_round: u64,
    /// Order among queues due in the same round.
    stamp: u64,
    /// The round in which it may send next; `None` for the queue whose turn it is.
    due: Option<u64>,
}

/// One per lane group.
#[derive(Default)]
struct Ring {
    round: u64,
    last_stamp: u64,
    /// (round, stamp, queue)
    waiting: SortedSet<(u64, u64, u32)>,
    turn: Option<u32>,
}

struct Wfq {
    params: Params,
    whose: fn(&Who) -> u64,
    rules: Vec<(Rule, u64)>,
    quantum: u64,
    batch_bytes: u64,
    capacity: u64,
    /// By lane group and key.
    queues: Flows<u64, Account, ()>,
    rings: Vec<Ring>,
    turns: Turns,
}

impl Wfq {
    fn quantum_of(&self, who: &Who) -> (u64, Option<&Rule>) {
        let found = rules::matching(self.rules.iter().map(|(rule, _)| rule), who).map(|at| &self.rules[at]);
        found.map_or((self.quantum, None), |(rule, quantum)| (*quantum, Some(rule)))
    }

    fn leave(&mut self, q: u32) {
        self.unfile(q);
        let ring = &mut self.rings[self.queues.key(q).0];
        ring.turn = ring.turn.filter(|t| *t != q);
        self.queues.close(q);
    }

    fn unfile(&mut self, q: u32) {
        let group = self.queues.key(q).0;
        let account = self.queues.data(q);
        if let Some(due) = account.due.take() {
            self.rings[group].waiting.remove(&(due, account.stamp, q));
        }
    }

    /// Computes the round that pays for a queue's next batch.
    fn file(&mut self, view: &View<'_>, q: u32) {
        self.unfile(q);
        let Some(first) = self.queues.first(view, q) else { return };
        let len = self.queues.len_bytes(view, first);
        let ring = &mut self.rings[self.queues.key(q).0];
        let account = self.queues.data(q);
        let rounds = len.saturating_sub(account.deficit).div_ceil(account.quantum).max(1);
        let due = (account.paid_round + rounds).max(ring.round);
        account.due = Some(due);
        ring.waiting.insert((due, account.stamp, q));
    }

    /// The queue whose turn it is and whose next batch is paid for, and that batch's first request.
    fn turn(&mut self, view: &View<'_>, group: usize) -> Option<(u32, Slot)> {
        loop {
            let ring = &mut self.rings[group];
            let Some(q) = ring.turn else {
                let (due, _, q) = ring.waiting.first()?;
                (ring.round, ring.turn) = (due, Some(q));
                self.unfile(q);
                let account = self.queues.data(q);
                account.deficit += (due - account.paid_round) * account.quantum;
                account.paid_round = due;
                continue;
            };
            // An empty queue left the ring when its last request went.
            let first = self.queues.first(view, q)?;
            if self.queues.len_bytes(view, first) <= self.queues.data(q).deficit {
                return Some((q, first));
            }
            (ring.turn, ring.last_stamp) = (None, ring.last_stamp + 1);
            self.queues.data(q).stamp = ring.last_stamp;
            self.file(view, q);
        }
    }
}

impl Policy for Wfq {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let who = view.who(slot);
        let group = view.group(slot);
        let (q, is_new) = self.queues.push(view, (self.whose)(&who), slot, false);
        if is_new {
            let ring = &mut self.rings[group];
            ring.last_stamp += 1;
            let (quantum, _) = self.quantum_of(&who);
            let (paid_round, stamp) = (self.rings[group].round, self.rings[group].last_stamp);
            *self.queues.data(q) = Account { quantum, deficit: 0, paid_round, stamp, due: None };
        }
        // Most requests join behind others; one at the head decides when its queue's turn comes.
        let waits = is_new || self.queues.data(q).due.is_some();
        if waits && self.queues.first(view, q) == Some(slot) {
            self.file(view, q);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(q) = self.queues.remove(view, slot) else { return };
        if self.queues.is_empty(q) {
            self.leave(q);
        } else if self.queues.data(q).due.is_some() {
            self.file(view, q);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| {
            let (q, first) = self.turn(view, group)?;
            if !view.open(view.table.lane(first)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            let len = self.queues.len_bytes(view, first);
            self.queues.data(q).deficit -= len;
            self.queues.take(view, first, batch);
            if self.queues.is_empty(q) {
                self.leave(q);
            }
            Some(Choice::Serve)
        });
        self.turns = turns;
        choice
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let (key, seq) = ((self.whose)(&view.who(slot)), view.table.seq(slot));
        // A queue's quantum follows the request that opened it, which may match another rule.
        let quantum = self.rules.iter().map(|r| r.1).fold(self.quantum, u64::min);
        let older = view.table.in_state(State::may_go).into_iter();
        let mine = older.filter(|s| view.table.seq(*s) <= seq && (self.whose)(&view.who(*s)) == key);
        let rounds = mine.map(|s| view.table.len_bytes(s).max(self.batch_bytes).div_ceil(quantum) + 1);
        let rounds = rounds.fold(1, u64::saturating_add);
        // A turn sends at most one batch that was saved for and then a quantum, byte by byte.
        let most = self.rules.iter().map(|r| r.1).max().unwrap_or(0).max(self.quantum) + 1;
        WaitBound::of_batches(rounds.saturating_mul(self.capacity).saturating_mul(most))
    }

    fn explain(&self, who: &Who, _: Nanos) -> Option<String> {
        let (quantum, rule) = self.quantum_of(who);
        let by = rule.map_or("no rule fits".into(), |r| format!("rule {}", r.name));
        let (what, key) = (self.params.text("by"), (self.whose)(who));
        Some(format!("queue of {what} {key}: {quantum} bytes a round ({by})"))
    }
}
