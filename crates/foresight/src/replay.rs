//! Replays a recorded run against a model of storage.
//!
//! Each thread reads what it read, and computes between the end of a read and the beginning of the next as long as it
//! did. How long a read takes, and what is done with the knowledge of it, is the model's business.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use crate::run::{Access, Reader, Run};

/// When a read ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadEnd {
    /// The thread goes on at this instant.
    pub end_ns: u64,
    /// When [`Storage::learn`] is to be called for this read, if at all.
    pub learn_ns: Option<u64>,
}

/// A model of storage with whatever reads ahead in it.
pub trait Storage {
    /// A read begins.
    fn read(&mut self, now_ns: u64, reader: Reader, access: &Access) -> ReadEnd;

    /// The one who predicts learns of a read that has ended. `last`: the process will not read this file again.
    fn learn(&mut self, now_ns: u64, reader: Reader, access: &Access, last: bool);
}

/// How long a replay took.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Elapsed {
    /// From the beginning of the first read to the end of the last one.
    pub run_ns: u64,
    /// The time that threads waited for reads, summed.
    pub wait_ns: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Read { thread: usize, read: usize },
    Learn { thread: usize, read: usize },
}

struct Replay<'a, S> {
    run: &'a Run,
    storage: &'a mut S,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Events pushed so far: those of one instant keep their order.
    pushed: u64,
    /// Threads that begin at the end of a read.
    followers: FxHashMap<(usize, usize), Vec<usize>>,
    /// Reads of each process and file that have not been learnt of.
    left: FxHashMap<(u64, usize), u64>,
    elapsed: Elapsed,
}

/// Replays a run.
pub fn replay(run: &Run, storage: &mut impl Storage) -> Elapsed {
    let (followers, left) = (FxHashMap::default(), FxHashMap::default());
    let (events, elapsed) = (BinaryHeap::new(), Elapsed::default());
    let mut replay = Replay { run, storage, events, pushed: 0, followers, left, elapsed };
    for (at, thread) in run.threads.iter().enumerate() {
        for access in &thread.reads {
            *replay.left.entry((thread.reader.process, access.file)).or_default() += 1;
        }
        match thread.after {
            Some(read) => replay.followers.entry(read).or_default().push(at),
            None => replay.begin(0, at, 0),
        }
    }
    while let Some(Reverse((now_ns, _, event))) = replay.events.pop() {
        match event {
            Event::Read { thread, read } => replay.read(now_ns, thread, read),
            Event::Learn { thread, read } => replay.learn(now_ns, thread, read),
        }
    }
    replay.elapsed
}

impl<S: Storage> Replay<'_, S> {
    fn begin(&mut self, now_ns: u64, thread: usize, read: usize) {
        if let Some(access) = self.run.threads[thread].reads.get(read) {
            self.push(now_ns.saturating_add(access.compute_ns), Event::Read { thread, read });
        }
    }

    fn push(&mut self, at_ns: u64, event: Event) {
        self.pushed += 1;
        self.events.push(Reverse((at_ns, self.pushed, event)));
    }

    fn read(&mut self, now_ns: u64, thread: usize, read: usize) {
        let t = &self.run.threads[thread];
        let ReadEnd { end_ns, learn_ns } = self.storage.read(now_ns, t.reader, &t.reads[read]);
        self.elapsed.wait_ns += end_ns.saturating_sub(now_ns);
        self.elapsed.run_ns = self.elapsed.run_ns.max(end_ns);
        if let Some(at_ns) = learn_ns {
            self.push(at_ns, Event::Learn { thread, read });
        }
        self.begin(end_ns, thread, read + 1);
        for follower in self.followers.remove(&(thread, read)).unwrap_or_default() {
            self.begin(end_ns, follower, 0);
        }
    }

    fn learn(&mut self, now_ns: u64, thread: usize, read: usize) {
        let t = &self.run.threads[thread];
        let access = &t.reads[read];
        let left = self.left.entry((t.reader.process, access.file)).or_default();
        *left = left.saturating_sub(1);
        let last = *left == 0;
        self.storage.learn(now_ns, t.reader, access, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RecordedRead;

    /// Every read takes 10 ns; what was learnt is noted.
    #[derive(Default)]
    struct Tape(Vec<(u64, u64, bool)>);

    impl Storage for Tape {
        fn read(&mut self, now_ns: u64, _: Reader, _: &Access) -> ReadEnd {
            ReadEnd { end_ns: now_ns + 10, learn_ns: Some(now_ns + 12) }
        }

        fn learn(&mut self, now_ns: u64, reader: Reader, _: &Access, last: bool) {
            self.0.push((now_ns, reader.process, last));
        }
    }

    #[test]
    fn threads_compute_as_long_and_follow_one_another() {
        // Origin 1 reads at 0..5 and 8..13; origin 2 begins at 14, one after the end of origin 1.
        let read =
            |origin, arrival_ns, at| RecordedRead { origin, file: 0, bytes: at..at + 1, arrival_ns, took_ns: Some(5) };
        let reads = [read(1, 100, 0), read(1, 108, 1), read(2, 114, 2)];
        let name = |origin| Reader { process: u64::from(origin), thread: 0 };
        let run = Run::of(Vec::new(), reads.into_iter(), 9, name, |_| unreachable!());
        let mut tape = Tape::default();
        // 0..10, 3 ns of computing, 13..23, 1 ns, 24..34.
        assert_eq!(replay(&run, &mut tape), Elapsed { run_ns: 34, wait_ns: 30 });
        assert_eq!(tape.0, [(12, 1, false), (25, 1, true), (36, 2, true)]);
        assert_eq!((run.compute_ns(), run.sizes[0], run.needed_bytes()), (4, 3, 4096));
        assert_eq!((run.traced_wait_ns(), run.traced_span_ns()), ((15, 3), 19));
    }
}
