//! Whether waiting for requests pays, by measurement.
//!
//! Of each stream (server, file, operation) it is measured, for each kind of wait, what a request costs in device time
//! that the lane did not wait for, what one costs that it waited for, how many of those expected come, and how long the
//! waits last. Prices of not waiting come from ordinary service, so nobody has to go without to learn them. A wait is
//! worth it if it saves on average [`MARGIN`] times what it lasts; one for neighbours ([`Wait::Neighbour`]), which holds
//! up requests that could go, [`NEIGHBOUR_MARGIN`] times. A kind of wait that does not seem to pay is tried ever more
//! rarely. A new stream begins with what other streams of its server and operation have shown.
//!
//! Whether to stay with a stream that has nothing queued is decided by what is moved in a given device time, waits
//! included, on visits that follow a stay and on visits that follow a turn to the stream. Where a batch after a stay is
//! cheap (the head is there, the drive has read ahead), turning must be clearly better to be preferred; where it costs
//! much of what turning costs (a write waits for nearly a whole turn of the platter), staying must be: requests that
//! gather meanwhile go together.
//!
//! Whatever the averages say, waits may lose at most [`FREE_WAITS`] longest waits and one [`LOSS_PART`]th of the device
//! time, of each stream and of each server and operation: an account that is empty stops them.

use rustc_hash::FxHashMap;

use super::anticipation::Stream;
use super::remembered::Remembered;
use crate::types::{LaneId, Nanos, Op};

/// Maximum streams.
const STREAMS_MAX: usize = 4096;
/// Waits that an account may lose beyond its part of the device time, and its maximum credit, in longest waits.
const FREE_WAITS: i64 = 2;
const MOST_WAITS: i64 = 4;
/// The part of the device time that waits may lose.
const LOSS_PART: u64 = 50;
/// A wait must save this many times what it lasts: the replies that it delays are not measured.
const MARGIN: f64 = 4.0;
/// The same for neighbours: such a wait also holds up requests that could go at once.
const NEIGHBOUR_MARGIN: f64 = 12.0;
/// Prices known before the first wait, and visits of each kind before they are compared.
const PRICES_MIN: u32 = 4;
const VISITS_MIN: u32 = 3;
/// A stay is cheap if its batch costs at most one of so many parts of the price of turning.
const CHEAP_PART: f64 = 6.0;
/// How much more turning must move than staying to be preferred, where stays are cheap and where they are not.
const TURN_IF_CHEAP: f64 = 1.25;
const TURN_IF_DEAR: f64 = 0.8;
/// Requests that are due before one is waited for to learn its price, and before the next trial once that is known.
const FIRST_TRIAL: u32 = 64;
const RARELY: u32 = 1024;
/// A new value has at least this weight in an average: one of so many.
const MEMORY: u32 = 16;

/// What is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Wait {
    /// Any request of a stream that has none queued, before the lane turns elsewhere.
    Stay,
    /// The request that begins where the last batch ended, before others of its stream.
    Next,
    /// Requests that make a virtual request whole.
    Neighbour,
}

/// A moving average.
#[derive(Clone, Copy, Default)]
struct Average {
    value: f64,
    count: u32,
}

impl Average {
    fn add(&mut self, value: f64) {
        self.count = (self.count + 1).min(MEMORY);
        self.value += (value - self.value) / f64::from(self.count);
    }
}

/// Bytes for each device time, waits included.
#[derive(Clone, Copy, Default)]
struct Rate {
    bytes: f64,
    ns: f64,
    visits: u32,
}

impl Rate {
    fn add(&mut self, bytes: u64, spent: Nanos) {
        let keep = if self.visits < MEMORY { 1.0 } else { 1.0 - 1.0 / f64::from(MEMORY) };
        self.visits = (self.visits + 1).min(MEMORY);
        (self.bytes, self.ns) = (self.bytes * keep + bytes as f64, self.ns * keep + spent.0 as f64);
    }

    fn value(&self) -> f64 {
        self.bytes / self.ns.max(1.0)
    }
}

/// When to try what does not seem to pay: ever more rarely.
#[derive(Clone, Copy)]
struct Trials {
    turns: u32,
    next: u32,
    every: u32,
}

impl Trials {
    fn new() -> Trials {
        Trials { turns: 0, next: FIRST_TRIAL, every: FIRST_TRIAL }
    }

    /// The price is known.
    fn rarely(&mut self) {
        if self.every < RARELY {
            (self.every, self.next) = (RARELY, self.turns.saturating_add(RARELY));
        }
    }

    fn due(&mut self) -> bool {
        self.turns = self.turns.saturating_add(1);
        let due = self.turns >= self.next;
        if due {
            self.every = (self.every * 4).min(RARELY);
            self.next = self.turns.saturating_add(self.every);
        }
        due
    }
}

/// An account of waits.
#[derive(Clone, Copy)]
struct Worth {
    /// Device time of a request not waited for, and of one waited for, ns.
    late: Average,
    joined: Average,
    /// The part of the requests expected that came, and the length of a wait, ns.
    came: Average,
    lasted: Average,
    credit_ns: i64,
    trials: Trials,
    /// Of visits that turn to the stream, and of those that stay with it.
    turned: Rate,
    stayed: Rate,
}

impl Worth {
    fn new(longest: Nanos) -> Worth {
        let (none, rate) = (Average::default(), Rate::default());
        Worth {
            late: none,
            joined: none,
            came: none,
            lasted: none,
            credit_ns: longest.0 as i64 * FREE_WAITS,
            trials: Trials::new(),
            turned: rate,
            stayed: rate,
        }
    }

    /// What a request saves that is waited for, ns.
    fn saved_ns(&self) -> f64 {
        self.late.value - self.joined.value
    }

    /// Whether to wait for `expected` requests. `joined`: what others of the server have shown of the price of a request
    /// waited for.
    fn pays(&mut self, kind: Wait, expected: u64, wait: Nanos, joined: Average) -> bool {
        if self.credit_ns <= 0 || self.late.count < PRICES_MIN {
            return false;
        }
        if self.joined.count == 0 {
            self.joined = joined;
        }
        if self.joined.count > 0 {
            self.trials.rarely();
        }
        let (came, lasts) = match self.lasted.count {
            0 => (1.0, wait.0 as f64 / 2.0),
            _ => (self.came.value, self.lasted.value),
        };
        let margin = if kind == Wait::Neighbour { NEIGHBOUR_MARGIN } else { MARGIN };
        let worth = |saved_ns: f64| expected as f64 * saved_ns > lasts * margin;
        // What a neighbour costs that goes along is its transfer, which is paid either way.
        if (kind == Wait::Neighbour || self.joined.count > 0) && worth(came * self.saved_ns()) {
            return true;
        }
        worth(self.late.value) && self.trials.due()
    }

    fn stays(&mut self) -> Option<bool> {
        if self.turned.visits.min(self.stayed.visits) < VISITS_MIN {
            return None;
        }
        let cheap = self.joined.value * CHEAP_PART <= self.late.value;
        let (turned, stayed) = (self.turned.value(), self.stayed.value());
        if turned > stayed * if cheap { TURN_IF_CHEAP } else { TURN_IF_DEAR } {
            return if self.trials.due() { None } else { Some(false) };
        }
        (stayed > turned).then_some(true)
    }

    fn settle(&mut self, (gained, expected): (u64, u64), lasted: Nanos, longest: Nanos) {
        self.came.add((gained as f64 / expected.max(1) as f64).min(1.0));
        self.lasted.add(lasted.0 as f64);
        let most = longest.0 as i64 * MOST_WAITS;
        self.credit_ns = (self.credit_ns + (gained as f64 * self.saved_ns()) as i64 - lasted.0 as i64).min(most);
    }
}

/// The accounts of streams, and of servers and operations.
pub(super) struct Worths {
    longest: Nanos,
    streams: Remembered<(Stream, Wait), Worth>,
    servers: FxHashMap<(LaneId, Op, Wait), Worth>,
}

impl Worths {
    /// For waits of at most `longest`.
    pub fn new(longest: Nanos) -> Worths {
        Worths { longest, streams: Remembered::new(STREAMS_MAX), servers: FxHashMap::default() }
    }

    /// Waits last at most `longest` from now on.
    pub fn set_longest(&mut self, longest: Nanos) {
        self.longest = longest;
    }

    /// The accounts of a stream and of its server, created if missing.
    fn of(&mut self, stream: Stream, kind: Wait) -> [&mut Worth; 2] {
        let longest = self.longest;
        let server = self.servers.entry((stream.0, stream.2, kind)).or_insert_with(|| Worth::new(longest));
        let known = Worth { credit_ns: longest.0 as i64 * FREE_WAITS, trials: Trials::new(), ..*server };
        [self.streams.of((stream, kind), || known), server]
    }

    /// Whether to wait for at most `wait` for `expected` requests of a stream.
    pub fn pays(&mut self, stream: Stream, kind: Wait, expected: u64, wait: Nanos) -> bool {
        let [own, server] = self.of(stream, kind);
        if kind == Wait::Stay {
            return own.credit_ns > 0 && server.credit_ns > 0;
        }
        own.pays(kind, expected, wait, server.joined) && server.credit_ns > 0
    }

    /// Whether a lane stays with a stream that has nothing queued; `None`: that is not known.
    pub fn stays(&mut self, stream: Stream) -> Option<bool> {
        let [own, _] = self.of(stream, Wait::Stay);
        own.stays()
    }

    /// A visit moved so many bytes in so much device time, waits included.
    pub fn visited(&mut self, stream: Stream, stayed: bool, bytes: u64, spent: Nanos) {
        for worth in self.of(stream, Wait::Stay) {
            let rate = if stayed { &mut worth.stayed } else { &mut worth.turned };
            rate.add(bytes, spent);
        }
    }

    /// A wait lasted so long and gained so many of the requests that it expected.
    pub fn settle(&mut self, stream: Stream, kind: Wait, gained: (u64, u64), lasted: Nanos) {
        let longest = self.longest;
        self.of(stream, kind).into_iter().for_each(|worth| worth.settle(gained, lasted, longest));
    }

    /// The device time of a request that was not waited for.
    pub fn late(&mut self, stream: Stream, kind: Wait, service: Nanos) {
        self.of(stream, kind).into_iter().for_each(|worth| worth.late.add(service.0 as f64));
    }

    /// The device time of a request that was waited for.
    pub fn joined(&mut self, stream: Stream, kind: Wait, service: Nanos) {
        self.of(stream, kind).into_iter().for_each(|worth| worth.joined.add(service.0 as f64));
    }

    /// The device served a batch of a stream.
    pub fn busy(&mut self, stream: Stream, service: Nanos) {
        let (may_lose, most) = ((service.0 / LOSS_PART) as i64, self.longest.0 as i64 * FREE_WAITS);
        for kind in [Wait::Stay, Wait::Next, Wait::Neighbour] {
            // It fills an account only up to what it began with.
            let add = |worth: &mut Worth| worth.credit_ns += may_lose.min(most - worth.credit_ns).max(0);
            if let Some(own) = self.streams.get_mut(&(stream, kind)) {
                add(own);
                if let Some(server) = self.servers.get_mut(&(stream.0, stream.2, kind)) {
                    add(server);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Stream = (LaneId(0), 7, Op::Read);
    const LONGEST: Nanos = Nanos(1000);

    /// So many requests become due, each after a batch that takes `busy` ns; a wait lasts 100 ns if its request comes,
    /// else 500. Requests not waited for cost `late` ns, others 10. Returns the waits, and what they lasted.
    fn waits(worths: &mut Worths, due: u64, busy: u64, late: u64, comes: impl Fn(u64) -> bool) -> (u64, u64) {
        let (mut waits, mut lasted) = (0, 0);
        for i in 0..due {
            worths.busy(STREAM, Nanos(busy));
            if !worths.pays(STREAM, Wait::Next, 1, Nanos(500)) {
                worths.late(STREAM, Wait::Next, Nanos(late));
                continue;
            }
            let (gained, took) = if comes(i) { (1, 100) } else { (0, 500) };
            worths.settle(STREAM, Wait::Next, (gained, 1), Nanos(took));
            (waits, lasted) = (waits + 1, lasted + took);
            if gained > 0 {
                worths.joined(STREAM, Wait::Next, Nanos(10));
            }
        }
        (waits, lasted)
    }

    #[test]
    fn waits_go_on_only_where_they_pay() {
        let always = waits(&mut Worths::new(LONGEST), 1000, 300, 1200, |_| true).0;
        assert!(always > 900, "{always}: 1190 ns saved for 100");
        let cheap = waits(&mut Worths::new(LONGEST), 1000, 300, 300, |_| true).0;
        assert!(cheap < 10, "{cheap}: 290 ns saved for 100 is too little");
        let rare = waits(&mut Worths::new(LONGEST), 1000, 300, 1200, |i| i % 8 == 0).0;
        assert!(rare < 100, "{rare}: 1190 ns saved for 3600 by every eighth");
    }

    /// To wait for neighbours holds up a request that could go, so it must save more than to wait for the next one.
    #[test]
    fn a_wait_that_holds_up_a_request_must_save_more() {
        let waits = |kind, late| {
            let mut worths = Worths::new(LONGEST);
            worths.joined(STREAM, kind, Nanos(1));
            (0..PRICES_MIN).for_each(|_| worths.late(STREAM, kind, Nanos(late)));
            // It is expected to last half of what it may.
            worths.pays(STREAM, kind, 1, Nanos(200))
        };
        assert!(waits(Wait::Next, 800) && !waits(Wait::Neighbour, 800));
        assert!(waits(Wait::Neighbour, 1400));
    }

    /// Whatever happens, waits lose no more than two longest ones and a fiftieth of the device time.
    #[test]
    fn losses_are_bounded() {
        for late in [0, 400, 5000, 1 << 40] {
            let lasted = waits(&mut Worths::new(LONGEST), 10_000, 300, late, |_| false).1;
            assert!(lasted <= 2 * LONGEST.0 + 500 + 10_000 * 300 / LOSS_PART, "{lasted}");
        }
    }

    #[test]
    fn a_stream_that_changes_is_noticed() {
        let mut worths = Worths::new(LONGEST);
        waits(&mut worths, 1000, 300, 4000, |_| false);
        let again = waits(&mut worths, 20_000, 3000, 4000, |_| true).0;
        assert!(again > 1000, "{again}");
        let ended = waits(&mut worths, 1000, 300, 4000, |_| false).0;
        assert!(ended < 60, "{ended}");
    }

    /// What other streams have shown holds for a new one.
    #[test]
    fn a_new_stream_begins_with_what_its_server_knows() {
        let mut worths = Worths::new(LONGEST);
        waits(&mut worths, 100, 300, 2400, |_| true);
        assert!(worths.pays((LaneId(0), 8, Op::Read), Wait::Next, 1, Nanos(500)));
        assert!(!worths.pays((LaneId(1), 8, Op::Read), Wait::Next, 1, Nanos(500)), "another server");
        assert!(!worths.pays((LaneId(0), 8, Op::Write), Wait::Next, 1, Nanos(500)), "another operation");
    }

    /// Bytes for each device time decide whether to stay, in favour of staying where that is cheap.
    #[test]
    fn a_lane_stays_where_more_is_moved() {
        let decision = |stayed_bytes: u64, stay_ns: u64| {
            let mut worths = Worths::new(LONGEST);
            for _ in 0..10 {
                assert_eq!(worths.stays(STREAM), None);
                worths.late(STREAM, Wait::Stay, Nanos(1000));
                worths.joined(STREAM, Wait::Stay, Nanos(stay_ns));
            }
            for _ in 0..10 {
                worths.visited(STREAM, false, 1000, Nanos(1000));
                worths.visited(STREAM, true, stayed_bytes, Nanos(1000));
            }
            worths.stays(STREAM)
        };
        assert_eq!((decision(1100, 900), decision(1300, 900)), (Some(false), Some(true)), "dear");
        assert_eq!((decision(700, 100), decision(900, 100), decision(1100, 100)), (Some(false), None, Some(true)));
    }
}
