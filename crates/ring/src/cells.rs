//! The protocol of the two ends over any atomic cells: those of shared memory, and those of a model that a test explores.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::access::Access;
use crate::consumer::{Corrupt, Drained, Sleep};
use crate::producer::Push;

/// An atomic number.
pub(crate) trait Cell<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    fn swap(&self, value: T, order: Ordering) -> T;
    fn fetch_add(&self, value: T, order: Ordering) -> T;
    fn compare_exchange_weak(&self, old: T, new: T, done: Ordering, failed: Ordering) -> Result<T, T>;
}

/// The cells of a ring; see [`crate::layout`].
pub(crate) trait Cells {
    type U64: Cell<u64>;
    type U32: Cell<u32>;

    fn slots(&self) -> u32;
    fn head(&self) -> &Self::U64;
    fn tail(&self) -> &Self::U64;
    fn dropped(&self) -> &Self::U64;
    fn asleep(&self) -> &Self::U32;
    fn closed(&self) -> &Self::U32;
    /// The commit marker and the data words of the slot for any position `p`.
    fn slot(&self, p: u64) -> (&Self::U64, [&Self::U64; 4]);
}

macro_rules! cell_of_std {
    ($atomic:ty, $number:ty) => {
        impl Cell<$number> for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> $number {
                <$atomic>::load(self, order)
            }
            #[inline]
            fn store(&self, value: $number, order: Ordering) {
                <$atomic>::store(self, value, order);
            }
            #[inline]
            fn swap(&self, value: $number, order: Ordering) -> $number {
                <$atomic>::swap(self, value, order)
            }
            #[inline]
            fn fetch_add(&self, value: $number, order: Ordering) -> $number {
                <$atomic>::fetch_add(self, value, order)
            }
            #[inline]
            fn compare_exchange_weak(
                &self,
                old: $number,
                new: $number,
                done: Ordering,
                failed: Ordering,
            ) -> Result<$number, $number> {
                <$atomic>::compare_exchange_weak(self, old, new, done, failed)
            }
        }
    };
}
cell_of_std!(AtomicU64, u64);
cell_of_std!(AtomicU32, u32);

/// Pushes one access, see [`crate::Producer::push`].
#[inline]
pub(crate) fn push(ring: &impl Cells, access: Access) -> Push {
    if ring.closed().load(Relaxed) != 0 {
        return Push::Closed;
    }
    let mut p = ring.head().load(Relaxed);
    loop {
        // The manager reads a slot before it advances the tail that frees it.
        let tail = ring.tail().load(Acquire);
        // A tail ahead of the loaded head means that the head is outdated; the exchange will detect that.
        let waiting = p.wrapping_sub(tail);
        if waiting >= u64::from(ring.slots()) && (waiting as i64) >= 0 {
            ring.dropped().fetch_add(1, Relaxed);
            return Push::Full;
        }
        // Sequentially consistent together with `asleep`: either the manager sees this claim before it sleeps, or
        // this thread sees below that it sleeps.
        match ring.head().compare_exchange_weak(p, p.wrapping_add(1), SeqCst, Relaxed) {
            Ok(_) => break,
            Err(now) => p = now,
        }
    }
    let (seq, words) = ring.slot(p);
    for (place, word) in words.into_iter().zip(access.to_words()) {
        place.store(word, Relaxed);
    }
    seq.store(p.wrapping_add(1), Release);
    if ring.asleep().load(SeqCst) == 1 && ring.asleep().swap(0, SeqCst) == 1 {
        return Push::Wake;
    }
    Push::Stored
}

/// How far a manager has drained a ring.
#[derive(Debug)]
pub(crate) struct Reading {
    /// The trusted drain position; the shared copy only informs the client.
    pub(crate) tail: u64,
    /// When draining stopped at `tail`, and what was claimed then.
    stuck: Option<Stuck>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Stuck {
    pub(crate) since_ns: u64,
    pub(crate) claimed: u64,
}

impl Reading {
    /// From a position on.
    pub(crate) fn new(tail: u64) -> Reading {
        Reading { tail, stuck: None }
    }

    /// `give_up(stuck, position, claimed)` decides whether an incomplete position is skipped.
    pub(crate) fn walk(
        &mut self,
        ring: &impl Cells,
        max: u32,
        mut take: impl FnMut(Access),
        mut give_up: impl FnMut(&mut Option<Stuck>, u64, u64) -> bool,
    ) -> Result<Drained, Corrupt> {
        let mut done = Drained::default();
        let head = ring.head().load(Acquire);
        let waiting = head.wrapping_sub(self.tail);
        if waiting > u64::from(ring.slots()) {
            return Err(Corrupt);
        }
        let limit = waiting.min(u64::from(max));
        for _ in 0..limit {
            let (seq, words) = ring.slot(self.tail);
            if seq.load(Acquire) == self.tail.wrapping_add(1) {
                match Access::from_words(words.map(|w| w.load(Relaxed))) {
                    Some(access) => {
                        take(access);
                        done.accesses += 1;
                    }
                    None => done.invalid += 1,
                }
            } else if give_up(&mut self.stuck, self.tail, head) {
                done.skipped += 1;
            } else {
                break;
            }
            self.tail = self.tail.wrapping_add(1);
        }
        if self.stuck.is_some_and(|s| self.tail.wrapping_sub(s.claimed) as i64 >= 0) {
            self.stuck = None;
        }
        ring.tail().store(self.tail, Release);
        done.more = self.tail != head;
        Ok(done)
    }

    /// See [`crate::Consumer::sleep`].
    pub(crate) fn sleep(&self, ring: &impl Cells) -> Sleep {
        ring.asleep().store(1, SeqCst);
        if ring.head().load(SeqCst) == self.tail {
            return Sleep::Allowed;
        }
        ring.asleep().store(0, SeqCst);
        Sleep::Pending
    }
}

#[cfg(test)]
mod model;
