//! `mlf`: the multilevel-feedback scheduler of aIOLi as AGIOS describes it (agios-2013, III).
//!
//! Requests wait in two queues per file, one for reads and one for writes, in offset order; touching ones
//! are aggregated into virtual requests. A new request has a quantum of 0. Each *pass* adds TTP(`quantum_bytes`) to
//! the quantum of every request; a virtual request owns the sum of its parts' quanta. Queues are
//! visited by their oldest arrival, and each sends at most one batch a pass: the first virtual request in
//! offset order whose quantum is at least TTP(its size).
//!
//! Nothing is walked to do so. Quanta are linear in the pass: those of a virtual request with n parts that
//! arrived in passes p₁…pₙ sum up to (n·p − Σpᵢ)·TTP(`quantum_bytes`) in pass p, so the pass from which it
//! may be served is known when it is built, and a pass in which nothing may be served is skipped by
//! arithmetic.
//!
//! The turn of a queue is a *dedicated window* (aioli-2006, part 2: serialise the files, since every change of file
//! moves the disk's head): for `window_us` after its first batch the queue goes first for as long as it has
//! requests, whatever their quanta, so that the next requests of its synchronous processes are
//! served while the head is there; its offset order goes on from the last batch and wraps. An empty queue ends its
//! window: data servers whose windows are not in step would else keep each other's processes waiting.
//! `window_us=0` is the rule of agios-2013 alone, one batch a pass.
//!
//! The rest of aIOLi (aioli-2006, part 2) is there as options, on in `aioli`, which is this policy with other defaults:
//! - `weights`: the quanta of an application's requests grow so many times as fast and its windows last so many times
//!   as long ("the grow of a quantum could be set for each application"). A queue has the weight of the request that
//!   began it, since applications seldom share a file.
//! - `adapt=on`: a file's next quantum follows how much of the present one its batches used.
//! - `hold_us`: a file whose run is shorter than its runs were of late is passed over, and a lane that has nothing
//!   else is held, until its newest request is that old (four times that for the first of the run): the others of a
//!   synchronous parallel application are about to come. Where two holds of a file brought nothing, none is made for
//!   its next 32 batches.
//! - `reads_ahead_requests`: a write counts as arrived so many requests later, so that reads go first and writes wait
//!   no longer than that.
//!
//! Where the papers are silent we chose:
//! - A pass takes no time: it ends when every queue that had something eligible has had its turn. With a deep
//!   hand-off below the scheduler nothing would ever wait then; `pass_us` gives a pass a set time.
//! - A virtual request never grows beyond a batch (`batch_requests`, `batch_bytes`); a longer run of touching
//!   requests is several virtual requests.
//! - "Offset order" starts at the lowest offset each time, which can starve high offsets: after `guard_batches`
//!   batches of a queue that left out its oldest request, the oldest goes next, whatever its quantum
//!   (0 switches the guard off).
//! - A window ends after [`WINDOW_BATCHES`] batches at the latest, however short they are.
//! - `growth=double` is the rule of the public library: the quantum in bytes doubles with each pass
//!   (0, 1, 2, 4 … × `quantum_bytes`) and must reach the size in bytes; the parts of a virtual request count
//!   from the mean of their arrivals.
//!
//! Wait: at most the passes that its quantum needs, then `guard_batches` turns for each older request of its queue, in
//! each of which every queue has its window. Work-conserving unless `pass_us` is set (then a lane
//! idles until the pass in which something becomes eligible) or `hold_us` (then for a hold at a time).

use rustc_hash::FxHashMap;

use super::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};
use super::parts::history::Histories;
use super::parts::rules::{self, Rule as Match};
use super::parts::runs::{Run, RunQueue, Runs};
use super::{Choice, ParamInfo, Params, Policy, PolicyError, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::cost::CostModel;
use crate::occupied::Occupied;
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{FileId, LaneId, Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "mlf",
    summary: "Multilevel feedback: aggregate in offset order, quanta grow until a request's turn has come.",
    source: "agios-2013, III (algorithm of aioli-2006)",
    params: MLF_PARAMS,
    build: |params, setup| build(params, setup),
};

/// The same with the parts of aIOLi that agios-2013 left out.
pub(super) const AIOLI: PolicyInfo = PolicyInfo {
    name: "aioli",
    summary: "mlf with adapted quanta and short holds for synchronous parallel applications.",
    source: "aioli-2006, part 2; defaults of the public library",
    params: AIOLI_PARAMS,
    build: |params, setup| build(params, setup),
};

const MLF_PARAMS: &[ParamInfo] = &params("8192", "off", "0");
const AIOLI_PARAMS: &[ParamInfo] = &params("65536", "on", "900");

/// The parameters, with the defaults in which the two differ.
const fn params(quantum_bytes: &'static str, adapt: &'static str, hold_us: &'static str) -> [ParamInfo; 11] {
    [
        ParamInfo {
            name: "quantum_bytes",
            default: quantum_bytes,
            range: Range::Integer(512, 1 << 30),
            doc: "Each pass adds the time to process so many bytes.",
        },
        ParamInfo { doc: "Requests per virtual request at most.", ..BATCH_REQUESTS },
        ParamInfo { doc: "Bytes per virtual request at most.", ..BATCH_BYTES },
        ParamInfo {
            name: "growth",
            default: "fixed",
            range: Range::Choice(&["fixed", "double"]),
            doc: "How quanta grow: a fixed step (paper) or doubling (public library).",
        },
        ParamInfo {
            name: "pass_us",
            default: "0",
            range: Range::Integer(0, 10_000_000),
            doc: "Time that a pass takes, microseconds; 0: none.",
        },
        ParamInfo {
            name: "window_us",
            default: "60000",
            range: Range::Integer(0, 10_000_000),
            doc: "Dedicated window: how long a queue whose turn it is keeps its lane while it has requests, \
                  microseconds; 0: one batch a pass.",
        },
        ParamInfo {
            name: "guard_batches",
            default: "16",
            range: Range::Integer(0, 1_000_000),
            doc: "Batches of a queue that may leave out its oldest request; 0: any number.",
        },
        ParamInfo {
            name: "weights",
            default: "",
            range: Range::Text("rules such as \"a: job=17 {weight=4}; b: * {weight=1}\", weights from 0.01 to 100"),
            doc: "How fast quanta grow and how long windows last, by application; the first rule that fits counts.",
        },
        ParamInfo { name: "adapt", default: adapt, range: SWITCH, doc: "A file's next quantum follows its use." },
        ParamInfo {
            name: "hold_us",
            default: hold_us,
            range: Range::Integer(0, 1_000_000),
            doc: "How long a run shorter than the file's usual ones is held for its neighbours, microseconds; 0: not.",
        },
        ParamInfo {
            name: "reads_ahead_requests",
            default: "0",
            range: Range::Integer(0, 1 << 20),
            doc: "A write counts as arrived so many requests later.",
        },
    ]
}

fn build(params: &Params, setup: &Setup) -> Result<Box<dyn Policy>, PolicyError> {
    let weighed = |rule: Match| {
        rule.only(&["weight"])?;
        let weight = rule.number("weight", 1.0, 0.01..=100.0)?;
        Ok((rule, weight))
    };
    let parsed = rules::parse(params.text("weights")).and_then(|all| all.into_iter().map(weighed).collect());
    Ok(Box::new(Mlf {
        rule: Rule { quantum_bytes: params.integer("quantum_bytes"), double: params.text("growth") == "double" },
        weights: parsed.map_err(|why: String| params.refuse("weights", format!("in the form of rules: {why}")))?,
        adapt: params.on("adapt"),
        hold: Nanos::from_micros(params.integer("hold_us")),
        reads_ahead: params.integer("reads_ahead_requests"),
        pass_length: Nanos::from_micros(params.integer("pass_us")),
        window: Nanos::from_micros(params.integer("window_us")),
        guard: params.integer("guard_batches"),
        batch_bytes: params.integer("batch_bytes"),
        capacity: u64::from(setup.capacity),
        params: params.clone(),
        runs: Runs::new(params.integer("batch_requests"), params.integer("batch_bytes"), setup.capacity),
        queues: Vec::new(),
        free: Vec::new(),
        by_key: FxHashMap::default(),
        lanes: (0..setup.lanes).map(|_| LaneQueues::default()).collect(),
        busy: Occupied::new(setup.lanes.into()),
        next_lane: 0,
        histories: Histories::default(),
        aside: Vec::new(),
    }))
}

type Key = (usize, FileId, Op);

struct Queue {
    key: Key,
    runs: RunQueue,
    /// The last pass in which it sent a batch.
    served_pass: Option<u64>,
    /// Batches that left out its present oldest request.
    skipped: u64,
    /// How many times as fast as others its requests earn their quantum.
    weight: f64,
    filed: Filed,
}

/// In which of its lane's sets a queue is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Filed {
    Nowhere,
    Eligible(u64),
    Future(u64),
}

#[derive(Default)]
struct LaneQueues {
    pass: u64,
    /// (arrival of the oldest request, queue): may send a batch in this pass.
    eligible: SortedSet<(u64, u32)>,
    /// (first pass in which it may send one, queue)
    future: SortedSet<(u64, u32)>,
    window: Option<Window>,
}

/// The lane is dedicated to one queue.
#[derive(Clone, Copy)]
struct Window {
    /// Its file and operation.
    key: Key,
    end: Nanos,
    batches: u32,
    /// Where its last batch ended: within a window the offset order goes on from there and wraps.
    offset: u64,
}

/// Queues passed over in one decision at most, in the hope of longer runs.
const ASIDE_MAX: usize = 8;

/// Batches of one dedicated window at most: bounds what others wait for when batches take next to no time.
const WINDOW_BATCHES: u32 = 256;

#[derive(Clone, Copy)]
struct Rule {
    quantum_bytes: u64,
    double: bool,
}

fn scaled(n: u64, factor: f64) -> u64 {
    if factor == 1.0 { n } else { (n as f64 * factor) as u64 }
}

impl Rule {
    /// The first pass in which the quantum of a virtual request suffices.
    fn ready_pass(&self, cost: &CostModel, op: Op, run: &Run) -> u64 {
        let quantum_bytes = self.quantum_bytes.max(1);
        if self.double {
            // factor × n × quantum ≥ size, the factor being 2^(visits-1)
            let factor = run.len.div_ceil(quantum_bytes.saturating_mul(run.count)).max(1);
            return run.pass_sum.div_ceil(run.count) + 1 + u64::from(factor.next_power_of_two().trailing_zeros());
        }
        let passes_of_one = cost.ttp(op, run.len).0.div_ceil(cost.ttp(op, quantum_bytes).0);
        // n·p − Σpᵢ ≥ passes that one request of this size would need
        (run.pass_sum + passes_of_one).div_ceil(run.count)
    }
}

struct Mlf {
    params: Params,
    rule: Rule,
    pass_length: Nanos,
    window: Nanos,
    guard: u64,
    weights: Vec<(Match, f64)>,
    adapt: bool,
    hold: Nanos,
    reads_ahead: u64,
    batch_bytes: u64,
    capacity: u64,
    runs: Runs,
    queues: Vec<Queue>,
    free: Vec<u32>,
    by_key: FxHashMap<Key, u32>,
    /// One per lane group.
    lanes: Vec<LaneQueues>,
    /// Those that have requests or a window, which may have to end: only they are looked at.
    busy: Occupied,
    next_lane: usize,
    histories: Histories,
    /// Queues that the present decision passes over; empty between decisions.
    aside: Vec<u32>,
}

impl Mlf {
    fn key(view: &View<'_>, slot: Slot) -> Key {
        (view.group(slot), view.table.file(slot), view.table.op(slot))
    }

    /// The present pass of a lane.
    fn pass(&self, view: &View<'_>, lane: usize) -> u64 {
        match self.pass_length {
            Nanos::ZERO => self.lanes[lane].pass,
            length => view.now.0 / length.0,
        }
    }

    /// The queue of a request; begun when there is none.
    fn queue_for(&mut self, view: &View<'_>, slot: Slot) -> u32 {
        let key = Self::key(view, slot);
        if let Some(&q) = self.by_key.get(&key) {
            return q;
        }
        let weight = if self.weights.is_empty() { 1.0 } else { self.weight(view, slot) };
        let q = self.free.pop().unwrap_or_else(|| {
            self.queues.push(Queue {
                key,
                runs: RunQueue::default(),
                served_pass: None,
                skipped: 0,
                weight,
                filed: Filed::Nowhere,
            });
            self.queues.len() as u32 - 1
        });
        let queue = &mut self.queues[q as usize];
        (queue.key, queue.served_pass, queue.skipped, queue.weight) = (key, None, 0, weight);
        self.by_key.insert(key, q);
        q
    }

    fn weight(&self, view: &View<'_>, slot: Slot) -> f64 {
        let who = view.who(slot);
        self.weights.iter().find(|(rule, _)| rule.fits(&who)).map_or(1.0, |(_, weight)| *weight)
    }

    /// How quanta grow in a queue: by its weight, and by its file's history.
    fn rule_of(&self, view: &View<'_>, q: u32) -> Rule {
        let queue = &self.queues[q as usize];
        let mut factor = queue.weight;
        if self.adapt {
            factor *= self.histories.quantum_factor(view.names.file(queue.key.1), queue.key.2);
        }
        Rule { quantum_bytes: scaled(self.rule.quantum_bytes, factor), ..self.rule }
    }

    /// A queue's place among the eligible: the arrival of its oldest request.
    fn place(&self, view: &View<'_>, q: u32) -> u64 {
        let queue = &self.queues[q as usize];
        let oldest = queue.runs.oldest().map_or(0, |o| view.table.seq(o));
        oldest + if queue.key.2 == Op::Write { self.reads_ahead } else { 0 }
    }

    /// Until when a queue whose first run would be `head` is held in the hope of a longer one; `None`: not at all.
    fn hold_until(&mut self, view: &View<'_>, q: u32, head: Slot) -> Option<Nanos> {
        if self.hold == Nanos::ZERO || self.aside.len() >= ASIDE_MAX {
            return None;
        }
        let queue = &self.queues[q as usize];
        let newest = queue.runs.newest().map_or(Nanos::ZERO, |s| view.table.arrival(s));
        let longest = view.table.arrival(head) + Nanos(self.hold.0.saturating_mul(4));
        let until = (newest + self.hold).min(longest);
        let requests = self.runs.run(head).count;
        let history = self.histories.of(view.names.file(queue.key.1), queue.key.2);
        if until <= view.now || !history.is_short(requests) {
            return None;
        }
        history.hold(requests);
        Some(until)
    }

    /// Remembers a batch of so many requests.
    fn remember(&mut self, view: &View<'_>, q: u32, requests: usize, bytes: u64) {
        if self.hold == Nanos::ZERO && !self.adapt {
            return;
        }
        let key = self.queues[q as usize].key;
        let history = self.histories.of(view.names.file(key.1), key.2);
        history.sent(requests as u64);
        if self.adapt {
            let quantum = self.rule.quantum_bytes as f64;
            let limits = ((512.0 / quantum).min(1.0), (self.batch_bytes as f64 / quantum).max(1.0));
            history.adapt(bytes, self.rule.quantum_bytes, limits);
        }
    }

    /// Puts a queue into the set where it belongs after a change, or drops it when it is empty.
    fn refile(&mut self, view: &View<'_>, q: u32) {
        let queue = &self.queues[q as usize];
        let lane = queue.key.0;
        let pass = self.pass(view, lane);
        let filed = match (queue.runs.oldest(), self.runs.ready_from(&queue.runs, pass)) {
            (Some(_), Some(ready)) => match ready.max(queue.served_pass.map_or(0, |p| p + 1)) {
                due if due <= pass => Filed::Eligible(self.place(view, q)),
                due => Filed::Future(due),
            },
            _ => Filed::Nowhere,
        };
        self.file(q, filed);
        let queue = &mut self.queues[q as usize];
        if queue.runs.is_empty() {
            self.by_key.remove(&queue.key);
            self.free.push(q);
        }
    }

    fn file(&mut self, q: u32, filed: Filed) {
        let queue = &mut self.queues[q as usize];
        let old = std::mem::replace(&mut queue.filed, filed);
        if old == filed {
            return;
        }
        let lane = &mut self.lanes[queue.key.0];
        match old {
            Filed::Eligible(seq) => lane.eligible.remove(&(seq, q)),
            Filed::Future(pass) => lane.future.remove(&(pass, q)),
            Filed::Nowhere => false,
        };
        match filed {
            Filed::Eligible(seq) => lane.eligible.insert((seq, q)),
            Filed::Future(pass) => lane.future.insert((pass, q)),
            Filed::Nowhere => return,
        };
        self.busy.set(queue.key.0, true);
    }

    /// The queue of a lane that sends next, having moved to the pass in which there is one; or how long to wait.
    fn next_queue(&mut self, view: &View<'_>, lane: usize) -> Result<u32, Choice> {
        if let Some(window) = self.lanes[lane].window {
            match self.by_key.get(&window.key).copied() {
                Some(q) if self.aside.contains(&q) => {}
                Some(q) if view.now < window.end && window.batches < WINDOW_BATCHES => return Ok(q),
                Some(q) => {
                    self.queues[q as usize].served_pass = Some(self.pass(view, lane));
                    self.refile(view, q);
                    self.lanes[lane].window = None;
                }
                None => self.lanes[lane].window = None,
            }
        }
        loop {
            let pass = self.pass(view, lane);
            let l = &mut self.lanes[lane];
            if let Some((due, q)) = l.future.first().filter(|f| f.0 <= pass || l.eligible.is_empty()) {
                if due > pass && self.pass_length != Nanos::ZERO {
                    return Err(Choice::Wait { until: Nanos(due * self.pass_length.0), reason: WaitReason::Quantum });
                }
                l.pass = due.max(pass);
                self.file(q, Filed::Eligible(self.place(view, q)));
                continue;
            }
            return l.eligible.first().map(|e| e.1).ok_or(Choice::until_event(WaitReason::Empty));
        }
    }

    /// Puts the next batch of a lane into `batch`, or says how long there is none.
    fn serve(&mut self, view: &View<'_>, lane: usize, batch: &mut Vec<Slot>) -> Option<Choice> {
        let mut held = None;
        // A stale entry can make a queue look ready; each look removes one, so this ends.
        loop {
            let q = match self.next_queue(view, lane) {
                Ok(q) => q,
                Err(quantum) => return Some(held.map_or(quantum, |h: Choice| h.sooner(quantum))),
            };
            let pass = self.pass(view, lane);
            let (rule, cost) = (self.rule_of(view, q), view.cost);
            let queue = &mut self.queues[q as usize];
            let op = queue.key.2;
            // In its window everything of a queue may go, whatever its quantum.
            let windowed = self.lanes[lane].window.is_some_and(|w| w.key == queue.key);
            let ready_at = |run: &Run| if windowed { 0 } else { rule.ready_pass(cost, op, run) };
            self.runs.promote(&mut queue.runs, view.table, if windowed { u64::MAX } else { pass }, ready_at);
            let oldest = queue.runs.oldest();
            let guarded = oldest.filter(|_| self.guard > 0 && queue.skipped >= self.guard);
            let head = match guarded {
                Some(oldest) => Some(self.runs.run_of(oldest)),
                None => queue.runs.next_ready(self.lanes[lane].window.filter(|_| windowed).map_or(0, |w| w.offset)),
            };
            let Some(head) = head else {
                self.refile(view, q);
                continue;
            };
            if !view.open(view.table.lane(head)) {
                let busy = Choice::until_event(WaitReason::LanesBusy);
                return Some(held.map_or(busy, |h: Choice| h.sooner(busy)));
            }
            if guarded.is_none()
                && let Some(until) = self.hold_until(view, q, head)
            {
                let hold = Choice::Wait { until, reason: WaitReason::Hold };
                held = Some(held.map_or(hold, |h: Choice| h.sooner(hold)));
                self.file(q, Filed::Nowhere);
                self.aside.push(q);
                continue;
            }
            let queue = &mut self.queues[q as usize];
            self.runs.take(&mut queue.runs, view.table, head, usize::MAX, batch, ready_at);
            let offset = batch.last().map_or(0, |s| view.table.end(*s));
            match &mut self.lanes[lane].window {
                Some(window) if windowed => {
                    window.batches += 1;
                    window.offset = offset;
                }
                none @ None if self.window > Nanos::ZERO => {
                    let end = view.now + Nanos(scaled(self.window.0, queue.weight));
                    *none = Some(Window { key: queue.key, end, batches: 1, offset });
                }
                _ => queue.served_pass = Some(pass),
            }
            queue.skipped = if queue.runs.oldest() == oldest { queue.skipped + 1 } else { 0 };
            self.remember(view, q, batch.len(), offset.saturating_sub(view.table.start(head)));
            self.refile(view, q);
            return None;
        }
    }
}

impl Policy for Mlf {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let key = Self::key(view, slot);
        let (pass, q) = (self.pass(view, key.0), self.queue_for(view, slot));
        let (rule, cost) = (self.rule_of(view, q), view.cost);
        let queue = &mut self.queues[q as usize];
        self.runs.insert(&mut queue.runs, view.table, slot, pass, |run| rule.ready_pass(cost, key.2, run));
        self.refile(view, q);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let key = Self::key(view, slot);
        let Some(&q) = self.by_key.get(&key) else { return };
        let (rule, cost) = (self.rule_of(view, q), view.cost);
        let queue = &mut self.queues[q as usize];
        self.runs.remove(&mut queue.runs, view.table, slot, |run| rule.ready_pass(cost, key.2, run));
        self.refile(view, q);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut wait = Choice::until_event(WaitReason::Empty);
        let groups = view.groups();
        let busy = self.busy.clone(); // changes for the lane that is looked at only
        for lane in busy.round_from(self.next_lane) {
            // Of many lanes those without room are not asked. One alone is: its passes go on while the device is busy.
            if groups > 1 && !view.open(LaneId(lane as u16)) {
                wait = wait.sooner(Choice::until_event(WaitReason::LanesBusy));
                continue;
            }
            if let Some(choice) = self.serve(view, lane, batch) {
                wait = wait.sooner(choice);
            }
            for q in std::mem::take(&mut self.aside) {
                self.refile(view, q);
            }
            let l = &self.lanes[lane];
            self.busy.set(lane, l.window.is_some() || !l.eligible.is_empty() || !l.future.is_empty());
            if !batch.is_empty() {
                self.next_lane = (lane + 1) % groups;
                return Choice::Serve;
            }
        }
        wait
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let key = Self::key(view, slot);
        let run = Run { count: 1, len: view.table.len_bytes(slot), pass_sum: 0 };
        // Weights and histories make quanta grow a hundred times as slowly at worst.
        let slowest = if self.weights.is_empty() && !self.adapt { 1 } else { 100 };
        let passes = self.rule.ready_pass(view.cost, key.2, &run).saturating_mul(slowest);
        let guard = if self.guard == 0 { u64::MAX } else { self.guard };
        // Each older request of its queue may use up the guard once; in each pass every queue may have its window.
        let turns = passes.saturating_add(guard.saturating_mul(self.capacity)).saturating_add(1);
        // A write lets so many later requests pass; before each batch the lane may be held once.
        let turns = turns.saturating_add(self.reads_ahead);
        let held = self.hold.0.saturating_mul(4).saturating_mul(self.capacity);
        WaitBound {
            batches: turns.saturating_mul(self.capacity).saturating_mul(u64::from(WINDOW_BATCHES)),
            // A queue sends one batch a pass, so that each turn may take one.
            idle: Nanos(self.pass_length.0.saturating_mul(turns).saturating_add(held)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worked by hand: TTP(x) = 10 ms + 8 µs/KiB, quantum 8 KiB, so a pass adds 10.064 ms.
    #[test]
    fn quanta_by_hand() {
        let linear = crate::cost::LinearCost { fixed: Nanos::from_millis(10), ps_per_byte: 7812 };
        let cost = CostModel::new(linear, linear);
        let rule = Rule { quantum_bytes: 8192, double: false };
        let ready = |count, len, pass_sum| rule.ready_pass(&cost, Op::Read, &Run { count, len, pass_sum });
        assert_eq!(ready(1, 8192, 0), 1, "one pass pays for one request of the quantum's size");
        assert_eq!(ready(1, 262_144, 0), 2, "12.05 ms need two passes");
        assert_eq!(ready(2, 16_384, 0), 1, "two parts earn twice as much");
        assert_eq!(ready(2, 16_384, 5 + 6), 7, "2p − 11 ≥ 2, p = 6.5");
        assert_eq!(ready(64, 1 << 20, 0), 1);
    }

    #[test]
    fn doubling_as_in_the_public_library() {
        let rule = Rule { quantum_bytes: 8192, double: true };
        let cost = CostModel::default();
        let ready = |count, len, pass_sum| rule.ready_pass(&cost, Op::Read, &Run { count, len, pass_sum });
        assert_eq!(ready(1, 8192, 0), 1, "factor 1 at the first visit");
        assert_eq!(ready(1, 8193, 0), 2, "factor 2 at the second");
        assert_eq!(ready(1, 65_536, 0), 4, "factor 8 at the fourth");
        assert_eq!(ready(8, 65_536, 80), 11);
    }
}
