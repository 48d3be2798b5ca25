//! Instants and spans of the monotonic clock, and waiting within bounds.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// An instant of the monotonic clock, or a span, in nanoseconds. Its zero is the driver's choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The earliest instant.
    pub const ZERO: Nanos = Nanos(0);
    /// Later than every instant that is reached.
    pub const MAX: Nanos = Nanos(u64::MAX);

    /// A span of `us` microseconds; saturates.
    #[inline]
    pub const fn from_micros(us: u64) -> Nanos {
        Nanos(us.saturating_mul(1_000))
    }

    /// A span of `ms` milliseconds; saturates.
    #[inline]
    pub const fn from_millis(ms: u64) -> Nanos {
        Nanos(ms.saturating_mul(1_000_000))
    }

    /// A span of `s` seconds; negative and not-a-number become zero, and it saturates.
    #[inline]
    pub fn from_secs_f64(s: f64) -> Nanos {
        Nanos((s * 1e9) as u64)
    }

    /// The span in seconds.
    #[inline]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// `self - earlier`, or zero when `earlier` is later.
    #[inline]
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Nanos {
    type Output = Nanos;
    #[inline]
    fn add(self, rhs: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(rhs.0))
    }
}

impl AddAssign for Nanos {
    #[inline]
    fn add_assign(&mut self, rhs: Nanos) {
        *self = *self + rhs;
    }
}

impl Sub for Nanos {
    type Output = Nanos;
    #[inline]
    fn sub(self, rhs: Nanos) -> Nanos {
        self.since(rhs)
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n >= 1_000_000_000 => write!(f, "{:.3} s", n as f64 / 1e9),
            n if n >= 1_000_000 => write!(f, "{:.3} ms", n as f64 / 1e6),
            n => write!(f, "{:.1} µs", n as f64 / 1e3),
        }
    }
}

/// Waits, at most so long, until what `lasts` says is over; whether it is. Threads do not announce their end: looks less and less
/// often.
pub fn wait_while(lasts: &dyn Fn() -> bool, most: Duration) -> bool {
    let end = Instant::now() + most;
    let mut pause = Duration::from_micros(20);
    while lasts() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
    true
}
