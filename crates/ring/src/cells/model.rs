//! Every interleaving of small programs at both ends of a ring, and every value that a weaker memory may show them.

use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::thread;

use super::*;
use crate::access::Op;

/// The model takes sequentially consistent operations for weaker ones, but not fences: around each it has one.
fn ordered<T>(order: Ordering, weaker: Ordering, act: impl FnOnce(Ordering) -> T) -> T {
    if order != SeqCst {
        return act(order);
    }
    fence(SeqCst);
    let result = act(weaker);
    fence(SeqCst);
    result
}

macro_rules! cell_of_model {
    ($atomic:ty, $number:ty) => {
        impl Cell<$number> for $atomic {
            fn load(&self, order: Ordering) -> $number {
                ordered(order, Acquire, |order| <$atomic>::load(self, order))
            }
            fn store(&self, value: $number, order: Ordering) {
                ordered(order, Release, |order| <$atomic>::store(self, value, order));
            }
            fn swap(&self, value: $number, order: Ordering) -> $number {
                ordered(order, Ordering::AcqRel, |order| <$atomic>::swap(self, value, order))
            }
            fn fetch_add(&self, value: $number, order: Ordering) -> $number {
                ordered(order, Ordering::AcqRel, |order| <$atomic>::fetch_add(self, value, order))
            }
            fn compare_exchange_weak(
                &self,
                old: $number,
                new: $number,
                done: Ordering,
                failed: Ordering,
            ) -> Result<$number, $number> {
                ordered(done, Ordering::AcqRel, |done| <$atomic>::compare_exchange(self, old, new, done, failed))
            }
        }
    };
}
cell_of_model!(AtomicU64, u64);
cell_of_model!(AtomicU32, u32);

/// A ring of two slots; positions begin at 0, and the manager is awake.
struct Ring {
    head: AtomicU64,
    tail: AtomicU64,
    dropped: AtomicU64,
    asleep: AtomicU32,
    closed: AtomicU32,
    slots: [[AtomicU64; 5]; 2],
}

impl Ring {
    fn new() -> Ring {
        let slot = || std::array::from_fn(|_| AtomicU64::new(0));
        Ring {
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            asleep: AtomicU32::new(0),
            closed: AtomicU32::new(0),
            slots: [slot(), slot()],
        }
    }
}

impl Cells for Ring {
    type U64 = AtomicU64;
    type U32 = AtomicU32;

    fn slots(&self) -> u32 {
        2
    }
    fn head(&self) -> &AtomicU64 {
        &self.head
    }
    fn tail(&self) -> &AtomicU64 {
        &self.tail
    }
    fn dropped(&self) -> &AtomicU64 {
        &self.dropped
    }
    fn asleep(&self) -> &AtomicU32 {
        &self.asleep
    }
    fn closed(&self) -> &AtomicU32 {
        &self.closed
    }
    fn slot(&self, p: u64) -> (&AtomicU64, [&AtomicU64; 4]) {
        let [seq, a, b, c, d] = &self.slots[(p & 1) as usize];
        (seq, [a, b, c, d])
    }
}

/// One whose words all tell which it is.
fn access(file: u32) -> Access {
    let number = u64::from(file);
    Access {
        file,
        op: Op::Read,
        flags: 0,
        thread: 1,
        offset: number,
        len_bytes: file,
        duration_ns: 9,
        start_ns: number,
    }
}

fn explore(preemptions: usize, program: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(program);
}

/// What is pushed comes out once, whole, in the order of its thread; what finds no room is counted.
#[test]
fn every_access_comes_out_once_and_whole() {
    explore(3, || {
        let ring = Arc::new(Ring::new());
        let pushing = |files: &'static [u32]| {
            let ring = ring.clone();
            thread::spawn(move || files.iter().filter(|file| push(&*ring, access(**file)) == Push::Full).count())
        };
        let threads = [pushing(&[1, 2]), pushing(&[11])];
        let (mut reading, mut seen) = (Reading::new(0), Vec::new());
        let mut drain = |reading: &mut Reading| {
            let drained = reading.walk(&*ring, 2, |access| seen.push(access), |_, _, _| false).unwrap();
            assert_eq!((drained.skipped, drained.invalid), (0, 0));
            drained.more
        };
        drain(&mut reading);
        let full: usize = threads.map(|thread| thread.join().unwrap()).into_iter().sum();
        while drain(&mut reading) {}
        assert_eq!((seen.len() + full, ring.dropped.load(Relaxed) as usize), (3, full));
        assert!(seen.iter().all(|seen| *seen == access(seen.file)), "{seen:?}");
        let mut files: Vec<u32> = seen.iter().map(|access| access.file).collect();
        let ordered: Vec<u32> = files.iter().copied().filter(|file| *file < 10).collect();
        assert!(ordered.is_sorted());
        files.sort_unstable();
        files.dedup();
        assert_eq!(files.len(), seen.len(), "one came out twice");
    });
}

/// A manager that sleeps with something in the ring has been woken.
#[test]
fn no_push_is_slept_over() {
    explore(4, || {
        let ring = Arc::new(Ring::new());
        let pushing = |file: u32| {
            let ring = ring.clone();
            thread::spawn(move || push(&*ring, access(file)))
        };
        let threads = [pushing(1), pushing(2)];
        let mut reading = Reading::new(0);
        let drain = |reading: &mut Reading| reading.walk(&*ring, 2, |_| {}, |_, _, _| false).unwrap().accesses;
        let before = drain(&mut reading);
        let sleeps = reading.sleep(&*ring) == Sleep::Allowed;
        let woken = threads.map(|thread| thread.join().unwrap()).into_iter().filter(|push| *push == Push::Wake).count();
        let behind = drain(&mut reading);
        assert_eq!(before + behind, 2);
        assert!(woken <= 1, "{woken} threads wake it");
        assert!(!sleeps || behind == 0 || woken == 1, "it sleeps, and there are {behind}");
    });
}
