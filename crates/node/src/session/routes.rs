//! Routes to a service behind one or several equivalent servers: which to try next, and when.

use impresario_sched::Nanos;

/// First and longest pause between attempts.
const PAUSE: (Nanos, Nanos) = (Nanos(20_000_000), Nanos(500_000_000));

/// The pause after this many failures in a row: 20 ms, doubled each time, at most 500 ms.
pub fn pause(failures: u32) -> Nanos {
    Nanos((PAUSE.0.0 << failures.min(10)).min(PAUSE.1.0))
}

/// How to get a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Connect over this route and give up at `until`. Report the result with [`Routes::opened`] or
    /// [`Routes::refused`].
    Connect {
        /// Number of the route.
        route: usize,
        /// When the attempt has failed.
        until: Nanos,
    },
    /// Another thread is connecting, or a pause is running: ask again at `until`, or after a change.
    Wait {
        /// When to ask again at the latest.
        until: Nanos,
    },
    /// The caller has timed out.
    Late,
}

/// The routes to a service: equivalent servers, one of which is in use or being tried.
#[derive(Clone, Debug)]
pub struct Routes {
    count: u32,
    at: u32,
    /// Consecutive failed attempts.
    failures: u32,
    connecting: bool,
    retry_at: Nanos,
}

impl Routes {
    /// `count` routes, at least one; `first` is tried first.
    pub fn new(count: usize, first: usize) -> Routes {
        let count = count.max(1) as u32;
        Routes { count, at: first as u32 % count, failures: 0, connecting: false, retry_at: Nanos(0) }
    }

    /// The route in use, or the one to try next.
    pub fn at(&self) -> usize {
        self.at as usize
    }

    /// Whether a thread is connecting, and will report.
    pub fn is_connecting(&self) -> bool {
        self.connecting
    }

    /// Whether there is another route.
    pub fn are_several(&self) -> bool {
        self.count > 1
    }

    /// What a caller without a connection does, until `deadline`. If there is another route, an attempt takes at most a
    /// quarter of `timeout`.
    pub fn next(&mut self, now: Nanos, deadline: Nanos, timeout: Nanos) -> Next {
        if now >= deadline {
            return Next::Late;
        }
        if self.connecting {
            return Next::Wait { until: deadline };
        }
        if now < self.retry_at {
            return Next::Wait { until: self.retry_at.min(deadline) };
        }
        self.connecting = true;
        let share = if self.are_several() { Nanos(now.0.saturating_add(timeout.0 / 4)) } else { deadline };
        Next::Connect { route: self.at(), until: share.min(deadline) }
    }

    /// The attempt succeeded.
    pub fn opened(&mut self) {
        self.connecting = false;
        self.retry_at = Nanos(0);
    }

    /// The attempt failed: try the next route, after a pause if all have failed.
    pub fn refused(&mut self, now: Nanos) {
        self.connecting = false;
        self.at = (self.at + 1) % self.count;
        self.failures = self.failures.saturating_add(1);
        // A round over all routes counts as one failure.
        if self.failures.is_multiple_of(self.count) {
            self.retry_at = Nanos(now.0 + pause((self.failures / self.count).saturating_sub(1)).0);
        }
    }

    /// The connection was lost: try the next route. `answered`: an answer was received on it; a server that closes
    /// connections without one is not tried again at once.
    pub fn lost(&mut self, now: Nanos, answered: bool) {
        self.at = (self.at + 1) % self.count;
        self.failures = if answered { 0 } else { self.failures.saturating_add(1) };
        self.retry_at = match self.failures {
            0 => Nanos(0),
            failures => Nanos(now.0 + pause(failures - 1).0),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: Nanos = Nanos(10_000_000_000);

    fn connect(routes: &mut Routes, now: u64) -> usize {
        match routes.next(Nanos(now), LATER, LATER) {
            Next::Connect { route, .. } => route,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn routes_are_tried_in_turn_with_a_pause_after_each_round() {
        let mut routes = Routes::new(3, 1);
        for route in [1, 2, 0] {
            assert_eq!(connect(&mut routes, 0), route);
            assert_eq!(routes.next(Nanos(0), LATER, LATER), Next::Wait { until: LATER }, "one thread connects");
            routes.refused(Nanos(0));
        }
        assert_eq!(routes.next(Nanos(0), LATER, LATER), Next::Wait { until: Nanos(20_000_000) });
        for route in [1, 2, 0] {
            assert_eq!(connect(&mut routes, 20_000_000), route);
            routes.refused(Nanos(20_000_000));
        }
        assert_eq!(routes.next(Nanos(20_000_000), LATER, LATER), Next::Wait { until: Nanos(60_000_000) });
        assert_eq!(routes.next(LATER, LATER, LATER), Next::Late);
    }

    #[test]
    fn a_lost_connection_goes_on_at_once_if_it_ever_answered() {
        let mut routes = Routes::new(2, 0);
        assert_eq!(connect(&mut routes, 0), 0);
        routes.opened();
        routes.lost(Nanos(5), true);
        assert_eq!(connect(&mut routes, 5), 1);
        routes.opened();
        routes.lost(Nanos(6), false);
        assert_eq!(routes.next(Nanos(6), LATER, LATER), Next::Wait { until: Nanos(20_000_006) });
    }

    #[test]
    fn an_attempt_leaves_time_for_the_other_routes() {
        let until = |routes: usize| match Routes::new(routes, 0).next(Nanos(8), Nanos(88), Nanos(100)) {
            Next::Connect { until, .. } => until,
            other => panic!("{other:?}"),
        };
        assert_eq!((until(1), until(2)), (Nanos(88), Nanos(33)));
    }

    #[test]
    fn pauses_grow_to_their_limit() {
        let pauses: Vec<u64> = (0..7).map(|failures| pause(failures).0 / 1_000_000).collect();
        assert_eq!(pauses, [20, 40, 80, 160, 320, 500, 500]);
        assert_eq!(pause(u32::MAX), Nanos(500_000_000));
    }
}
