//! Reading ahead of a program's clients. What their reads make likely becomes speculative requests, which the scheduler
//! delivers along with the reads that they continue, or alone while little else is with the program. What became of each
//! is accounted, so that reading ahead stops where it does not pay.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use impresario_base::lock::Mutex;
use impresario_engine::{PagedFile, ReadAhead, Submission, Work};
use impresario_foresight::{PredictedQueues, Totals, is_there};
use impresario_sched::Op;
use serde_json::Value;

use crate::{Delivery, Identity, Member, Submit};

/// What a program that reads ahead answers. It serves a speculation by having its bytes read into a memory that later
/// reads of the file find, such as the page cache.
pub trait Ahead: Send + Sync {
    /// Whether this extent, which `after` makes likely, may be read ahead: the token of its request, or `None`. Called
    /// during the submission of `after`, without any lock held. A speculation beyond the end of the file is harmless: one
    /// that completes short without an error tells where the file ends.
    fn accept(&self, after: &Submit, extent: Range<u64>) -> Option<u64>;

    /// An accepted speculation will not be delivered: it was overtaken, covered by a write, or the scheduler ended.
    /// Called during a later call of the program or on a dispatcher thread, without any lock held.
    fn dropped(&self, token: u64);

    /// Whether a byte of the request's file is in memory; `None` if that cannot be told. Must not wait, nor call the
    /// scheduler. Without an answer, memory that loses what was read ahead before it is used goes unnoticed.
    fn in_memory(&self, _of: &Member, _at: u64) -> Option<bool> {
        None
    }
}

/// The state of reading ahead.
pub(crate) struct Foresight {
    ahead: Box<dyn Ahead>,
    rule: ReadAhead,
    /// There is a budget.
    budgeted: AtomicBool,
    /// The policy has speculations started.
    speculates: AtomicBool,
    /// Tokens to be handed back, and whether there are any.
    given_up: Mutex<Vec<u64>>,
    has_given_up: AtomicBool,
    /// Bytes of the speculations that were delivered.
    delivered_bytes: AtomicU64,
}

/// A file as far as the program can tell.
struct Seen<'a> {
    ahead: &'a dyn Ahead,
    of: Option<&'a Member>,
}

impl PagedFile for Seen<'_> {
    fn len_bytes(&self) -> u64 {
        u64::MAX
    }

    /// In doubt yes: a loss is only counted when it is certain.
    fn has(&self, at: u64) -> bool {
        self.of.and_then(|of| self.ahead.in_memory(of, at)).unwrap_or(true)
    }

    fn will_read(&self, _: Range<u64>) {}

    fn wait_for(&self, _: Range<u64>) -> std::io::Result<()> {
        Ok(())
    }
}

impl Foresight {
    pub fn new(ahead: Box<dyn Ahead>, budget_bytes: u64, speculates: bool) -> Foresight {
        Foresight {
            ahead,
            rule: ReadAhead::new(budget_bytes),
            budgeted: AtomicBool::new(budget_bytes > 0),
            speculates: AtomicBool::new(speculates),
            given_up: Mutex::default(),
            has_given_up: AtomicBool::new(false),
            delivered_bytes: AtomicU64::new(0),
        }
    }

    fn is_on(&self) -> bool {
        self.budgeted.load(Relaxed) && self.speculates.load(Relaxed)
    }

    fn rest_unless_on(&self) {
        if !self.is_on() {
            self.rule.rest();
        }
    }

    /// Whether the policy starts speculations from now on.
    pub fn set_speculates(&self, speculates: bool) {
        self.speculates.store(speculates, Relaxed);
        self.rest_unless_on();
    }

    /// Bytes read ahead and not yet requested, at most; 0: nothing is read ahead.
    pub fn set_budget(&self, budget_bytes: u64) {
        self.rule.set_budget(budget_bytes);
        self.budgeted.store(budget_bytes > 0, Relaxed);
        self.rest_unless_on();
    }

    /// Reads of recorded runs that will probably be repeated, replacing earlier ones.
    pub fn foretell(&self, queues: Option<&PredictedQueues>) {
        self.rule.foretell(queues);
    }

    /// A request is about to be submitted. The speculations that go with it.
    pub fn observe(&self, s: &Submit, submission: &Submission) -> Vec<(Submission, Identity)> {
        // Offsets of a file that is striped over lanes do not continue one another.
        if !self.is_on() || s.lane_offset.is_some() {
            return Vec::new();
        }
        let file = Seen { ahead: &*self.ahead, of: None };
        // Processes of one client have strides of their own.
        let reader = s.client.rotate_left(32) ^ s.job;
        let predicted = self.rule.observe(s.op, (s.file, &file), s.offset..s.offset.saturating_add(s.len), reader);
        let mut speculations = Vec::with_capacity(predicted.len());
        for prediction in predicted {
            match self.ahead.accept(s, prediction.extent.clone()) {
                Some(token) => {
                    let identity =
                        Identity { token, file: s.file, client: s.client, job: s.job, user: s.user, speculative: true };
                    speculations.push((submission.ahead(prediction.extent), identity));
                }
                None => self.rule.was_there(s.file, prediction.extent),
            }
        }
        speculations
    }

    /// What memory has need not go along with a batch.
    pub fn leave_out_what_is_there(&self, work: &mut Work<Identity>) {
        let [_, .., last @ (_, Identity { speculative: true, .. })] = &*work.parts else { return };
        let ahead = Member::of(last, 0, 0);
        let extent = extent_of(&ahead);
        if self.has(&ahead, &extent) != Some(true) {
            return;
        }
        work.parts.pop();
        work.batch.extent.len = extent.start - work.batch.extent.lane_offset;
        self.rule.was_there(ahead.file, extent);
        self.give_up(ahead.token);
    }

    /// Whether memory has all of an extent, as far as the program can tell.
    fn has(&self, of: &Member, extent: &Range<u64>) -> Option<bool> {
        let in_memory = |at| self.ahead.in_memory(of, at);
        in_memory(extent.start).map(|_| is_there(extent, |at| in_memory(at) == Some(true)))
    }

    /// A batch is about to be delivered. False if it need not be: it is a speculation, and memory has it.
    pub fn deliver(&self, delivery: &Delivery) -> bool {
        let (asked, ahead) = delivery.apart();
        let is_delivered = self.is_wanted(delivery, asked, ahead);
        if let Some(ahead) = ahead.filter(|_| is_delivered) {
            self.delivered_bytes.fetch_add(ahead.len, Relaxed);
        }
        is_delivered
    }

    fn is_wanted(&self, delivery: &Delivery, asked: &[Member], ahead: Option<&Member>) -> bool {
        match (asked.first(), ahead) {
            (None, Some(ahead)) => {
                let extent = extent_of(ahead);
                if self.has(ahead, &extent) != Some(true) {
                    return true;
                }
                self.rule.was_there(ahead.file, extent);
                self.give_up(ahead.token);
                false
            }
            (Some(first), _) if delivery.batch().op == crate::op_code(Op::Read) && self.is_on() => {
                let end = asked.iter().map(|m| m.lane_offset + m.len).max().unwrap_or(first.lane_offset);
                let extent = first.lane_offset..end;
                if self.has(first, &extent) != Some(true) {
                    self.rule.waited((first.file, &Seen { ahead: &*self.ahead, of: Some(first) }), &extent);
                }
                true
            }
            _ => true,
        }
    }

    /// A speculation has ended, with an errno and the bytes that were read from its start on.
    pub fn ended(&self, of: &Member, was_alone: bool, (errno, bytes): (i32, u64), took_ns: u64) {
        let extent = extent_of(of);
        let end = extent.start.saturating_add(bytes).min(extent.end);
        if end > extent.start {
            self.rule.came(of.file, &(extent.start..end), end - extent.start);
            if was_alone {
                self.rule.fetched(of.file, extent.start..end, took_ns);
            }
        }
        match errno {
            _ if end == extent.end => {}
            0 => self.rule.ended(of.file, extent, end),
            // A request for these bytes will report the error itself.
            _ => self.rule.was_there(of.file, end..extent.end),
        }
    }

    /// A speculation will not be delivered. Its token is handed back later: the caller may hold locks.
    pub fn give_up(&self, token: u64) {
        self.given_up.lock().push(token);
        self.has_given_up.store(true, Relaxed);
    }

    /// Hands back the tokens of speculations that were given up.
    pub fn hand_back(&self) {
        if !self.has_given_up.load(Relaxed) {
            return;
        }
        let tokens = {
            let mut given_up = self.given_up.lock();
            self.has_given_up.store(false, Relaxed);
            std::mem::take(&mut *given_up)
        };
        tokens.into_iter().for_each(|token| self.ahead.dropped(token));
    }

    pub fn totals(&self) -> Totals {
        self.rule.totals()
    }

    pub fn delivered_bytes(&self) -> u64 {
        self.delivered_bytes.load(Relaxed)
    }

    pub fn describe(&self) -> Value {
        self.rule.describe()
    }
}

fn extent_of(member: &Member) -> Range<u64> {
    member.lane_offset..member.lane_offset.saturating_add(member.len)
}
