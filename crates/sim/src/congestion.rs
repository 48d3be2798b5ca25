//! A model of congestion: a switch's port toward a limited link has a buffer, what does not fit is lost, and who sent it backs
//! off as TCP does.
//!
//! Of TCP it has: a window that grows by one for each quantum that arrives, or after a loss by one in each round; retransmission
//! and half the window when three quanta have arrived behind a lost one; when nothing more can arrive, a probe, one quantum sent again
//! after a short while, whose arrival tells of all that is lost (RFC 8985); and when that is lost too, a timeout, after which
//! one quantum is sent and the next timeout is twice as long. A connection keeps its window from message to message
//! unless it rests for longer than a timeout. The sender hears at once of what has arrived.

use rustc_hash::FxHashMap;

/// The window that a connection begins with, bytes: ten segments (RFC 6928).
const FIRST_WINDOW_BYTES: u64 = 14_600;
/// Quanta that arrive behind a lost one before it is sent again (RFC 5681).
const LATER_MIN: u32 = 3;
/// A timeout is at most so many times the first.
const BACK_OFF_MAX: u64 = 64;
/// Senders back off a little longer than each other, by at most this part of the timeout: their timers tick apart.
const SPREAD_PART: u64 = 64;

/// What one connection may have in flight.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// Quanta.
    quanta: f64,
    /// Up to here it grows by one for each quantum that arrives.
    threshold: f64,
    used: u64,
}

/// The state of a message on its way through a port.
#[derive(Debug)]
pub(crate) struct Flow {
    window: Window,
    lost_bytes: u64,
    lost: u32,
    /// Quanta that have arrived since the last one was lost.
    later: u32,
    timeout_ns: u64,
    /// It waits for its timeout, or to send a probe.
    waits: bool,
    /// Since something arrived, a probe was sent, or a timeout has passed.
    probes: bool,
    /// More than one quantum has been in flight: of a single one a probe would come no sooner than the timeout.
    pub(crate) has_several: bool,
    /// What it waits for is the timeout.
    has_timed_out: bool,
}

impl Flow {
    /// It may have one more quantum in flight beside those.
    pub(crate) fn has_room(&self, under_way: u32) -> bool {
        !self.waits && f64::from(under_way + self.lost) + 1.0 <= self.window.quanta.max(1.0)
    }

    /// A quantum was lost.
    pub(crate) fn lost(&mut self, bytes: u64) {
        (self.lost_bytes, self.lost, self.later) = (self.lost_bytes + bytes, self.lost + 1, 0);
    }

    /// One has arrived. The bytes that are to be sent again.
    pub(crate) fn arrived(&mut self, timeout_ns: u64) -> u64 {
        self.timeout_ns = timeout_ns;
        if self.probes {
            (self.probes, self.later) = (false, LATER_MIN);
        }
        if self.lost == 0 {
            let more = if self.window.quanta < self.window.threshold { 1.0 } else { 1.0 / self.window.quanta.max(1.0) };
            self.window.quanta += more;
            return 0;
        }
        self.later = self.later.saturating_add(1);
        if self.later < LATER_MIN {
            return 0;
        }
        self.window.threshold = (self.window.quanta / 2.0).max(2.0);
        self.window.quanta = self.window.threshold;
        self.forget_lost()
    }

    /// Nothing of what was lost has been sent again.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Nothing more can arrive: it waits. How long, given the time after which a probe is sent.
    pub(crate) fn wait(&mut self, from: u32, probe_ns: u64, timeout_max_ns: u64) -> Option<u64> {
        if self.waits {
            return None;
        }
        self.waits = true;
        if self.has_several && !self.probes && probe_ns < self.timeout_ns {
            self.probes = true;
            return Some(probe_ns);
        }
        (self.probes, self.has_timed_out) = (true, true);
        let timeout_ns = self.timeout_ns;
        self.timeout_ns = timeout_ns.saturating_mul(2).min(timeout_max_ns);
        Some(timeout_ns + timeout_ns / SPREAD_PART * u64::from(from % 16) / 16)
    }

    /// It has waited. The bytes that are to be sent again.
    pub(crate) fn timed_out(&mut self) -> u64 {
        if !std::mem::take(&mut self.waits) {
            return 0;
        }
        if !std::mem::take(&mut self.has_timed_out) {
            // The probe.
            let one = self.lost_bytes.div_ceil(u64::from(self.lost.max(1)));
            (self.lost, self.lost_bytes) = (self.lost.saturating_sub(1), self.lost_bytes - one);
            return one;
        }
        self.window.threshold = (self.window.quanta / 2.0).max(2.0);
        self.window.quanta = 1.0;
        self.forget_lost()
    }

    fn forget_lost(&mut self) -> u64 {
        (self.lost, self.later) = (0, 0);
        std::mem::take(&mut self.lost_bytes)
    }
}

/// The ports of all limited links.
pub(crate) struct Ports {
    pub(crate) buffer_bytes: u64,
    pub(crate) timeout_ns: u64,
    quantum_bytes: u64,
    windows: FxHashMap<(u32, u32), Window>,
}

impl Ports {
    /// With so large a buffer each; `None` for one without limit.
    pub(crate) fn new(buffer_bytes: u64, retransmit_ms: f64, quantum_bytes: u64) -> Option<Ports> {
        let timeout_ns = ((retransmit_ms * 1e6) as u64).max(1);
        (buffer_bytes > 0).then(|| Ports { buffer_bytes, timeout_ns, quantum_bytes, windows: FxHashMap::default() })
    }

    /// A message begins.
    pub(crate) fn begin(&self, now: u64, from: u32, to: u32) -> Box<Flow> {
        let first = (FIRST_WINDOW_BYTES / self.quantum_bytes).max(1) as f64;
        let fresh = Window { quanta: first, threshold: f64::INFINITY, used: now };
        let known = self.windows.get(&(from, to)).filter(|window| now - window.used <= self.timeout_ns);
        let window = known.copied().unwrap_or(fresh);
        let timeout_ns = self.timeout_ns;
        let (waits, probes, has_several, has_timed_out) = Default::default();
        Box::new(Flow {
            window,
            lost_bytes: 0,
            lost: 0,
            later: 0,
            timeout_ns,
            waits,
            probes,
            has_several,
            has_timed_out,
        })
    }

    /// It has arrived.
    pub(crate) fn end(&mut self, now: u64, from: u32, to: u32, flow: &Flow) {
        self.windows.insert((from, to), Window { used: now, ..flow.window });
    }

    /// The longest timeout.
    pub(crate) fn timeout_max_ns(&self) -> u64 {
        self.timeout_ns.saturating_mul(BACK_OFF_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_grows_halves_and_starts_again() {
        let mut ports = Ports::new(64 << 10, 200.0, 1460).unwrap();
        let mut flow = ports.begin(0, 1, 2);
        assert!(flow.has_room(9) && !flow.has_room(10), "ten segments");
        (0..10).for_each(|_| assert_eq!(flow.arrived(ports.timeout_ns), 0));
        assert!(flow.has_room(19) && !flow.has_room(20), "twice as many after a round");
        flow.lost(1460);
        assert_eq!([0, 1, 2].map(|_| flow.arrived(ports.timeout_ns)), [0, 0, 1460], "sent again behind the third");
        assert!(flow.has_room(9) && !flow.has_room(10), "half");
        (0..10).for_each(|_| assert_eq!(flow.arrived(ports.timeout_ns), 0));
        assert!(flow.has_room(9) && !flow.has_room(11), "one more for a round");
        flow.lost(1000);
        flow.lost(500);
        assert_eq!(flow.wait(0, u64::MAX, ports.timeout_max_ns()), Some(200_000_000));
        assert_eq!((flow.wait(0, u64::MAX, ports.timeout_max_ns()), flow.has_room(0)), (None, false));
        assert_eq!((flow.timed_out(), flow.timed_out()), (1500, 0));
        assert!(flow.has_room(0) && !flow.has_room(1), "one");
        flow.lost(1000);
        assert_eq!(flow.wait(0, u64::MAX, ports.timeout_max_ns()), Some(400_000_000), "the next wait is twice as long");
        flow.timed_out();
        assert_eq!(flow.arrived(ports.timeout_ns), 0);
        flow.has_several = true;
        flow.lost(700);
        flow.lost(300);
        assert_eq!(flow.wait(0, 5, ports.timeout_max_ns()), Some(5), "a probe comes first");
        assert_eq!(flow.timed_out(), 500);
        assert_eq!(flow.arrived(ports.timeout_ns), 500, "its arrival tells of the rest");
        flow.lost(700);
        assert_eq!(flow.wait(0, 5, ports.timeout_max_ns()), Some(5));
        assert_eq!(flow.timed_out(), 700);
        flow.lost(700);
        assert_eq!(flow.wait(0, 5, ports.timeout_max_ns()), Some(200_000_000), "the probe is lost, too");
        assert_eq!(flow.timed_out(), 700);
        ports.end(7, 1, 2, &flow);
        assert!(!ports.begin(9, 1, 2).has_room(1) && ports.begin(9, 3, 2).has_room(9), "each connection has its own");
        assert!(ports.begin(300_000_000, 1, 2).has_room(9), "after a rest it begins anew");
        assert!(Ports::new(0, 200.0, 1460).is_none());
    }
}
