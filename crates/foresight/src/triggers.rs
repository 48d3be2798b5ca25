//! What the requests of a recorded run followed: a process sends a request after the reply to an earlier one, or right
//! after another request. A scheduler thus knows when a predicted request is due, however its own order differs from
//! that of the recorded run.
//!
//! The *trigger* of a request is the last event before its arrival, of the same file and source: that another request
//! arrived, or that one had completed.

use crate::predicted::{PredictedId, PredictedQueues};

/// What a predicted request follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trigger {
    /// The request that it follows.
    pub of: PredictedId,
    /// It follows that one's completion; else its arrival.
    pub completion: bool,
    /// How much later it arrived, ns.
    pub after_ns: u64,
}

/// The triggers of all requests of a recorded run, and which requests continue one another.
#[derive(Debug, Default)]
pub struct Triggers {
    triggers: Vec<Option<Trigger>>,
    /// By request: the next one begins where it ends.
    continued: Vec<bool>,
}

impl Triggers {
    /// The triggers of predicted queues.
    pub fn new(queues: &PredictedQueues) -> Triggers {
        let mut triggers = vec![None; queues.len()];
        for (_, events) in queues.events() {
            let mut last: Option<(u64, u32, bool)> = None;
            for (at_ns, id, completion) in events {
                if !completion {
                    triggers[id as usize] = last.map(|(before_ns, of, completion)| Trigger {
                        of: PredictedId(of),
                        completion,
                        after_ns: at_ns - before_ns,
                    });
                }
                last = Some((at_ns, id, completion));
            }
        }
        Triggers { triggers, continued: queues.continued() }
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.triggers.len()
    }

    /// Nothing is predicted.
    pub fn is_empty(&self) -> bool {
        self.triggers.is_empty()
    }

    /// What a request follows; `None`: it is the first of its source.
    pub fn of(&self, id: PredictedId) -> Option<Trigger> {
        self.triggers[id.index()]
    }

    /// The request that begins where this one ends.
    pub fn next(&self, id: PredictedId) -> Option<PredictedId> {
        self.continued[id.index()].then_some(PredictedId(id.0 + 1))
    }

    /// The request that ends where this one begins.
    pub fn before(&self, id: PredictedId) -> Option<PredictedId> {
        let before = id.0.checked_sub(1)?;
        self.continued[before as usize].then_some(PredictedId(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predicted::Recorded;

    const KIB: u64 = 1024;

    fn recorded(source: u32, offset_kib: u64, arrival_ns: u64, completed_ns: u64) -> Recorded {
        Recorded {
            file: 1,
            write: false,
            offset: offset_kib * KIB,
            len: 8 * KIB,
            arrival_ns,
            completed_ns: Some(completed_ns),
            source,
        }
    }

    /// Two processes read 16 KiB in two parts each, then the next 16 KiB.
    #[test]
    fn a_request_follows_the_last_event_of_its_source() {
        let run = [
            recorded(1, 0, 0, 50),
            recorded(1, 8, 2, 52),
            recorded(2, 16, 1, 90),
            recorded(2, 24, 4, 90),
            recorded(1, 32, 60, 100),
            recorded(2, 48, 99, 130),
        ];
        let queues = PredictedQueues::new(run);
        let triggers = Triggers::new(&queues);
        let id = |n: usize| {
            let place = (run[n].offset, run[n].len);
            queues.find((1, false), place, run[n].arrival_ns, (0, 0.0)).unwrap()
        };
        let of = |n: usize| triggers.of(id(n)).map(|t| (t.of, t.completion, t.after_ns));
        assert_eq!((of(0), of(2)), (None, None), "the first of its source");
        assert_eq!(of(1), Some((id(0), false, 2)), "sent right after");
        assert_eq!(of(4), Some((id(1), true, 8)), "after the reply to the second part");
        assert_eq!(of(5).map(|t| (t.1, t.2)), Some((true, 9)));
        assert_eq!((triggers.next(id(0)), triggers.next(id(4))), (Some(id(1)), None), "40 to 48 KiB is missing");
        assert_eq!((triggers.before(id(2)), triggers.before(id(0))), (Some(id(1)), None));
        assert_eq!(triggers.len(), run.len());
    }

    /// A request without a completion, and one of another file, trigger nothing.
    #[test]
    fn unknown_completions_trigger_nothing() {
        let first = Recorded { completed_ns: None, ..recorded(1, 0, 0, 0) };
        let other = Recorded { file: 2, ..recorded(1, 8, 500, 501) };
        let queues = PredictedQueues::new([first, other, recorded(1, 8, 700, 800)]);
        let triggers = Triggers::new(&queues);
        let id = queues.find((1, false), (8 * KIB, 8 * KIB), 700, (0, 0.0)).unwrap();
        assert_eq!(triggers.of(id).map(|t| (t.completion, t.after_ns)), Some((false, 700)));
        let id = queues.find((2, false), (8 * KIB, 8 * KIB), 0, (0, 0.0)).unwrap();
        assert_eq!((triggers.of(id), triggers.next(id)), (None, None));
    }
}
