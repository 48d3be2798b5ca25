//! What the requests of a recorded run followed: a process sends a request after the reply to an earlier one, or right
//! after another request. A scheduler thus knows when a predicted request is due, however its own order differs from
//! that of the recorded run.
//!
//! The *trigger* of a request is the last event before its arrival, of the same file and source: that another request
//! arrived, or that one had completed.

use crate::predicted::{PredictedId, PredictedQueues};

/// Sources go through a file together where one of so many requests at least is continued by another source's, which had
/// sent about as many.
const JOINED_PART: usize = 64;
const STEPS_APART: u32 = 4;
/// A source has a part of its own if so many bytes of it follow a request; most requests of the file must be such.
const OWN_MIN_BYTES: u64 = 64 << 10;

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
    /// By request: how many its source had sent to the file before.
    steps: Vec<u32>,
    /// By request: the one that follows its completion.
    followers: Vec<Option<PredictedId>>,
    /// By request: it is a read, and the sources that read the file go through it together.
    together: Vec<bool>,
    /// By request: how many bytes behind it its source reads or writes next, if each has a part of the file of its own.
    own_bytes: Vec<Option<u32>>,
}

impl Triggers {
    /// The triggers of predicted queues.
    pub fn new(queues: &PredictedQueues) -> Triggers {
        let mut triggers = vec![None; queues.len()];
        let (mut steps, mut followers) = (vec![0_u32; queues.len()], vec![None; queues.len()]);
        for (_, events) in queues.events() {
            let mut last: Option<(u64, u32, bool)> = None;
            let mut step = 0;
            for (at_ns, id, completion) in events {
                if !completion {
                    steps[id as usize] = step;
                    step += 1;
                    if let Some((_, of, true)) = last {
                        followers[of as usize] = Some(PredictedId(id));
                    }
                    triggers[id as usize] = last.map(|(before_ns, of, completion)| Trigger {
                        of: PredictedId(of),
                        completion,
                        after_ns: at_ns - before_ns,
                    });
                }
                last = Some((at_ns, id, completion));
            }
        }
        let continued = queues.continued();
        let mut together = vec![false; queues.len()];
        let mut own_bytes = vec![None; queues.len()];
        for (write, range) in queues.ranges() {
            let joins = |at: &usize| {
                let (of, next) = (*at, at + 1);
                let apart = steps[of].abs_diff(steps[next]);
                continued[of] && queues.source(of) != queues.source(next) && apart <= STEPS_APART
            };
            let joins = (range.start..range.end.saturating_sub(1)).filter(joins).count();
            let goes_together = !write && joins * JOINED_PART >= range.len();
            together[range.clone()].fill(goes_together);
            if goes_together {
                continue;
            }
            let mut parts = vec![0_u64; range.len()];
            let goes_on = |at: &usize| continued[*at] && queues.source(*at) == queues.source(at + 1);
            let mut first = range.start;
            while first < range.end {
                let last = (first..range.end - 1).find(|at| !goes_on(at)).unwrap_or(range.end - 1);
                // What is sent at once arrives in any order.
                if steps[first] < steps[last] {
                    for at in (first..last).rev() {
                        let behind = queues.len_bytes(at + 1);
                        parts[at - range.start] = parts[at + 1 - range.start].saturating_add(behind);
                    }
                }
                first = last + 1;
            }
            let several = range.clone().any(|at| queues.source(at) != queues.source(range.start));
            let long = parts.iter().filter(|bytes| **bytes >= OWN_MIN_BYTES).count();
            if several && long * 2 >= range.len() {
                let told = parts.into_iter().map(|bytes| Some(u32::try_from(bytes).unwrap_or(u32::MAX)));
                own_bytes[range].iter_mut().zip(told).for_each(|(own, bytes)| *own = bytes);
            }
        }
        Triggers { triggers, continued, steps, followers, together, own_bytes }
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

    /// How many requests its source had sent to the file before.
    pub fn step(&self, id: PredictedId) -> u32 {
        self.steps[id.index()]
    }

    /// The request that follows the completion of this one.
    pub fn follower(&self, id: PredictedId) -> Option<PredictedId> {
        self.followers[id.index()]
    }

    /// Its source reads the file together with others, as with strides, not a part of its own. Never of a write, which
    /// waits for the platter whatever lies before it.
    pub fn together(&self, id: PredictedId) -> bool {
        self.together[id.index()]
    }

    /// How many bytes behind a request its source reads or writes next, if several sources each read or write a part of the
    /// file of their own; else `None`.
    pub fn own_bytes(&self, id: PredictedId) -> Option<u64> {
        self.own_bytes[id.index()].map(u64::from)
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
        assert!(std::sync::Arc::ptr_eq(&queues.triggers(), &queues.triggers()), "found out once");
    }

    /// Two processes read a file in strides, and another one in halves.
    #[test]
    fn processes_go_through_a_file_together_or_apart() {
        let strided =
            (0..64).map(|i| recorded(1 + i % 2, u64::from(i) * 8, u64::from(i / 2) * 100, u64::from(i / 2) * 100 + 50));
        let halves = (0..64).map(|i| {
            let at_ns = u64::from(i % 32) * 100;
            Recorded { file: 2, ..recorded(1 + i / 32, u64::from(i) * 8, at_ns, at_ns + 50) }
        });
        let queues = PredictedQueues::new(strided.chain(halves));
        let triggers = Triggers::new(&queues);
        let id = |file, i: u64, at_ns| queues.find((file, false), (i * 8 * KIB, 8 * KIB), at_ns, (0, 0.0)).unwrap();
        assert_eq!(
            [id(1, 5, 200), id(2, 37, 500)].map(|id| (triggers.together(id), triggers.step(id))),
            [(true, 2), (false, 5)]
        );
        let own_bytes = |file, i, at_ns| triggers.own_bytes(id(file, i, at_ns));
        assert_eq!([own_bytes(1, 5, 200), own_bytes(2, 37, 500)], [None, Some(26 * 8 * KIB)]);
        assert_eq!([own_bytes(2, 31, 3100), own_bytes(2, 63, 3100)], [Some(0); 2], "the end of each half");
        assert_eq!(triggers.follower(id(1, 5, 200)), Some(id(1, 7, 300)));
        assert_eq!(triggers.follower(id(1, 63, 3100)), None);
    }

    /// Each writes the file in strides too, after its reads.
    #[test]
    fn writes_do_not_go_together() {
        let request = |i: u32| {
            let at_ns = u64::from(i / 4) * 100;
            let (place, write) = (u64::from(i / 4 * 2 + i % 2), i % 4 > 1);
            let at_ns = at_ns + if write { 50 } else { 0 };
            Recorded { write, ..recorded(1 + i % 2, place * 8, at_ns, at_ns + 20) }
        };
        let queues = PredictedQueues::new((0..64).map(request));
        let triggers = Triggers::new(&queues);
        let id = |write| queues.find((1, write), (8 * KIB, 8 * KIB), 0, (50, 0.0)).unwrap();
        assert_eq!(triggers.follower(id(false)), Some(id(true)));
        assert_eq!([false, true].map(|write| triggers.together(id(write))), [true, false]);
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
