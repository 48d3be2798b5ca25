//! Decides whether a silent peer is slow or dead.

use std::time::Duration;

use impresario_sched::Nanos;

/// How long a silent peer is tolerated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// A peer that is silent for this long with calls outstanding is given up; after half of that it is pinged, which
    /// every server answers at once.
    pub silence: Nanos,
    /// There are other routes. Without one, a peer is given up only when a call times out.
    pub has_other_ways: bool,
}

/// With other routes, a silent peer is given up after this time at the latest: with what it takes to notice that and to go
/// on through another, callers wait for less than two seconds.
pub const SILENCE_MAX: Nanos = Nanos::from_millis(1_500);
/// A server whose thread of a connection waits, and so reads no ping, gives a sign of life so often: several times in
/// the shortest [`Patience`] of clients with the usual timeouts.
pub const SIGN_EVERY: Duration = Duration::from_millis(400);

impl Patience {
    /// With a peer whose calls may take `timeout`.
    pub fn new(timeout: Nanos, has_other_ways: bool) -> Patience {
        let half = Nanos(timeout.0 / 2);
        Patience { silence: if has_other_ways { half.min(SILENCE_MAX) } else { half }, has_other_ways }
    }
}

/// When a connection last heard from its peer.
#[derive(Clone, Copy, Debug)]
pub struct Silence {
    last_heard: Nanos,
    /// A ping was sent since.
    pinged: bool,
}

/// What to do about a silent peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sign {
    /// Nothing.
    Wait,
    /// Ping it.
    Ping,
    /// It is dead: leave it. It has been silent for this long.
    GiveUp(Nanos),
}

impl Silence {
    /// A peer that has just been heard.
    pub fn new(now: Nanos) -> Silence {
        Silence { last_heard: now, pinged: false }
    }

    /// When the peer was last heard.
    pub fn last_heard(&self) -> Nanos {
        self.last_heard
    }

    /// Something was received.
    pub fn heard(&mut self, now: Nanos) {
        *self = Silence::new(now);
    }

    /// Judges the silence during a call sent at `sent`; `is_late`: it has timed out.
    pub fn judge(&mut self, now: Nanos, sent: Nanos, is_late: bool, patience: &Patience) -> Sign {
        let silent = now.0.saturating_sub(self.last_heard.max(sent).0);
        if silent >= patience.silence.0 && (is_late || patience.has_other_ways) {
            return Sign::GiveUp(Nanos(silent));
        }
        if patience.has_other_ways && !is_late && !self.pinged && silent >= patience.silence.0 / 2 {
            self.pinged = true;
            return Sign::Ping;
        }
        Sign::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(silence: &mut Silence, now: u64, is_late: bool, has_other_ways: bool) -> Sign {
        silence.judge(Nanos(now), Nanos(0), is_late, &Patience { silence: Nanos(100), has_other_ways })
    }

    #[test]
    fn who_has_another_way_does_not_wait_long() {
        let patience = |timeout_s: u64, ways| Patience::new(Nanos::from_millis(timeout_s * 1000), ways).silence;
        assert_eq!([patience(10, true), patience(600, true)], [SILENCE_MAX; 2]);
        assert_eq!([patience(2, true), patience(2, false)], [Nanos::from_millis(1000); 2]);
        assert_eq!(patience(10, false), Nanos::from_millis(5000), "there is nothing to be gained by leaving it");
        assert!(SIGN_EVERY.as_nanos() * 3 < SILENCE_MAX.0.into(), "a sign that is late does no harm");
    }

    #[test]
    fn a_dead_peer_is_pinged_once_and_given_up() {
        let mut silence = Silence::new(Nanos(0));
        assert_eq!(judge(&mut silence, 49, false, true), Sign::Wait);
        assert_eq!(judge(&mut silence, 50, false, true), Sign::Ping);
        assert_eq!(judge(&mut silence, 99, false, true), Sign::Wait);
        assert_eq!(judge(&mut silence, 100, false, true), Sign::GiveUp(Nanos(100)));
    }

    #[test]
    fn a_slow_peer_that_answers_pings_is_kept() {
        let mut silence = Silence::new(Nanos(0));
        for round in 0..10 {
            assert_eq!(judge(&mut silence, round * 60 + 50, false, true), Sign::Ping);
            silence.heard(Nanos(round * 60 + 60));
        }
    }

    #[test]
    fn without_another_way_only_the_end_of_a_call_ends_the_wait() {
        let mut silence = Silence::new(Nanos(0));
        assert_eq!(judge(&mut silence, 1000, false, false), Sign::Wait);
        assert_eq!(judge(&mut silence, 1000, true, false), Sign::GiveUp(Nanos(1000)));
        silence.heard(Nanos(990));
        assert_eq!(judge(&mut silence, 1000, true, false), Sign::Wait, "late, but not dead");
    }
}
