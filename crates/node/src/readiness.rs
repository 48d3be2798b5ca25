//! When a connection can take data, for the policies over jobs (`stream`, `scan`, `wscan`, `sstf`).
//!
//! In server-side-scheduling-2002 (4) a connection is ready while its socket buffer takes data. Here it is ready until
//! more than a limit of answer bytes is in flight to it, and again once half of that has arrived: without the
//! hysteresis a connection at the limit would change with every packet.

/// Bytes of answers in flight up to which a connection is ready, where nothing else is said: two pieces of the default
/// `piece_bytes`. While one travels the next is read; with room for less than a piece, as in the paper's system (64 KiB), each
/// answer takes its own connection out of the choice for the moment that it takes to send it, and the head moves to another job.
pub const READY_MAX_BYTES: u64 = 256 << 10;

/// Whether one connection can take data. A data server updates it from its socket, the simulator from its network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Readiness {
    ready: bool,
}

impl Default for Readiness {
    fn default() -> Self {
        Readiness { ready: true }
    }
}

impl Readiness {
    /// True while the connection can take data.
    pub fn is_ready(self) -> bool {
        self.ready
    }

    /// Records that `under_way_bytes` of answers are in flight; more than `limit_bytes` make the connection unready.
    /// Returns the new state if it changed.
    pub fn observe(&mut self, under_way_bytes: u64, limit_bytes: u64) -> Option<bool> {
        let ready = match self.ready {
            true => under_way_bytes <= limit_bytes,
            false => under_way_bytes <= limit_bytes / 2,
        };
        let changed = ready != self.ready;
        self.ready = ready;
        changed.then_some(ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_up_to_the_limit_and_again_from_half_of_it() {
        let mut connection = Readiness::default();
        let states: Vec<_> = [0, 100, 101, 51, 101, 50, 100].iter().map(|n| connection.observe(*n, 100)).collect();
        assert_eq!(states, [None, None, Some(false), None, None, Some(true), None]);
        assert!(connection.is_ready());
    }

    #[test]
    fn without_a_limit_anything_that_waits_makes_it_busy() {
        let mut connection = Readiness::default();
        assert_eq!([connection.observe(1, 0), connection.observe(0, 0)], [Some(false), Some(true)]);
    }
}
