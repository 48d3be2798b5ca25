//! The time shared by machines with synchronised clocks, as an offset to the engine's clock with an error bound.
//!
//! The offset is the wall clock minus CLOCK_MONOTONIC. The two cannot be read at the same instant: the wall clock is
//! read between two readings of the monotonic clock, so the matching instant lies within half their distance of the
//! middle. A thread that is preempted in between only makes this distance long; the tightest of several samples is
//! kept. The kernel slews both clocks alike, so the offset is constant until the clock is set, a leap second passes or
//! the machine is suspended. The engine therefore samples again while it works, and adopts a sample that contradicts
//! the current one.

use impresario_sched::{Event, Nanos};

/// The clocks from which an engine computes shared time. Tests inject their own.
pub trait Clocks: Send + Sync + 'static {
    /// The engine's clock, [`now`](crate::now).
    fn monotonic(&self) -> Nanos;
    /// The shared clock: nanoseconds since 1970.
    fn wall_ns(&self) -> i64;
}

/// CLOCK_MONOTONIC and CLOCK_REALTIME.
pub struct SystemClocks;

impl Clocks for SystemClocks {
    fn monotonic(&self) -> Nanos {
        crate::now()
    }

    fn wall_ns(&self) -> i64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        t.tv_sec * 1_000_000_000 + t.tv_nsec
    }
}

/// Shared time is the engine's clock plus `offset_ns`, within `error_ns`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedTime {
    /// Nanoseconds to add to the engine's clock.
    pub offset_ns: i64,
    /// Error bound of reading the two clocks, nanoseconds; excludes the disagreement of the machines' clocks.
    pub error_ns: u64,
}

/// Samples, of which the tightest is kept.
const READINGS: usize = 8;

/// An error that needs no improvement, nanoseconds.
const GOOD_ERROR_NS: u64 = 100;

impl SharedTime {
    /// Reads the clocks several times and keeps the tightest reading: about a microsecond.
    pub fn sample(clocks: &dyn Clocks) -> SharedTime {
        let mut best = SharedTime { offset_ns: 0, error_ns: u64::MAX };
        for _ in 0..READINGS {
            let before = clocks.monotonic();
            let wall_ns = clocks.wall_ns();
            let between = clocks.monotonic().since(before).0;
            // Half the distance, rounded up, plus one nanosecond for the clocks' rounding.
            let error_ns = between.div_ceil(2) + 1;
            if error_ns < best.error_ns {
                best = SharedTime { offset_ns: wall_ns - (before.0 + between / 2) as i64, error_ns };
            }
            if error_ns <= GOOD_ERROR_NS {
                break;
            }
        }
        best
    }

    /// The event that reports it to the core.
    pub(crate) fn event(self) -> Event {
        Event::SharedClock { offset_ns: self.offset_ns }
    }

    /// Shared time at an instant of the engine's clock, nanoseconds since 1970.
    pub fn at(self, instant: Nanos) -> i64 {
        (instant.0 as i64).saturating_add(self.offset_ns)
    }

    /// The instant of the engine's clock at which shared time is `shared_ns`.
    pub fn instant(self, shared_ns: i64) -> Nanos {
        Nanos(shared_ns.saturating_sub(self.offset_ns).max(0) as u64)
    }

    /// Adopts a newer sample and returns true if it is tighter, or if both cannot be true: then the clock was set, or
    /// the machine was suspended.
    pub fn refresh(&mut self, sample: SharedTime) -> bool {
        let adopt = sample.error_ns < self.error_ns || self.contradicts(sample);
        if adopt {
            *self = sample;
        }
        adopt
    }

    /// True if no offset agrees with both.
    pub fn contradicts(self, other: SharedTime) -> bool {
        self.offset_ns.abs_diff(other.offset_ns) > self.error_ns.saturating_add(other.error_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Clocks that advance by the next of some steps at every reading of the monotonic one, as if the thread had been
    /// preempted for that long.
    struct Scripted {
        monotonic: Mutex<u64>,
        steps: Mutex<Vec<u64>>,
        offset_ns: i64,
    }

    impl Scripted {
        fn new(offset_ns: i64, steps: &[u64]) -> Scripted {
            let steps = Mutex::new(steps.iter().rev().copied().collect());
            Scripted { monotonic: Mutex::new(1_000_000), steps, offset_ns }
        }
    }

    impl Clocks for Scripted {
        fn monotonic(&self) -> Nanos {
            let mut now = self.monotonic.lock().unwrap();
            *now += self.steps.lock().unwrap().pop().unwrap_or(5_000);
            Nanos(*now)
        }

        fn wall_ns(&self) -> i64 {
            // The reading falls right after the first of the pair: as far from the middle as possible.
            *self.monotonic.lock().unwrap() as i64 + self.offset_ns
        }
    }

    #[test]
    fn the_tightest_sample_is_kept_and_its_error_bound_holds() {
        // The second pair is 2 µs apart; between the others the thread was preempted for milliseconds.
        let steps = [10, 40_000_000, 10, 2_001, 10, 7_000_000];
        let sample = SharedTime::sample(&Scripted::new(123_456_789, &steps));
        assert_eq!(sample.error_ns, 1_002);
        assert!(sample.offset_ns.abs_diff(123_456_789) <= sample.error_ns, "{sample:?}");
        let good = SharedTime::sample(&Scripted::new(-5, &[10, 80, 1, 1]));
        assert_eq!(good, SharedTime { offset_ns: -45, error_ns: 41 }, "a good reading ends the search");
    }

    #[test]
    fn clock_steps_are_adopted_and_looser_samples_of_the_same_offset_are_not() {
        let first = SharedTime { offset_ns: 1_000, error_ns: 50 };
        let mut time = first;
        assert!(!time.refresh(SharedTime { offset_ns: 1_900, error_ns: 900 }) && time == first, "within both errors");
        assert!(time.refresh(SharedTime { offset_ns: 1_010, error_ns: 40 }) && time.offset_ns == 1_010, "tighter");
        let stepped = SharedTime { offset_ns: -3_000_000_000, error_ns: 700 };
        assert!(
            time.refresh(stepped) && time == stepped,
            "a clock that was set is followed although the reading is loose"
        );
    }

    #[test]
    fn instants_and_shared_time_convert_both_ways() {
        let time = SharedTime { offset_ns: -400, error_ns: 0 };
        assert_eq!((time.at(Nanos(1_000)), time.instant(600)), (600, Nanos(1_000)));
        assert_eq!(time.instant(-10_000), Nanos(0), "long past");
    }

    #[test]
    fn system_clocks_are_read_within_their_error() {
        let (one, two) = (SharedTime::sample(&SystemClocks), SharedTime::sample(&SystemClocks));
        assert!(!one.contradicts(two), "{one:?} {two:?}");
    }
}
