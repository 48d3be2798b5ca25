//! Whether hints for a file pay, and when to stop giving them.
//!
//! Three signs say that they do not: what is brought in is not read; it was in memory already; reads take as long
//! without hints. What goes unread is the price of reading far fewer, larger pieces, so above a part of it hints go on
//! only where reads have become plainly faster. For the last sign the durations of reads in blocks that were brought in
//! are compared with those of reads elsewhere; where there are too few of these, hints are withheld for a few reads, a
//! *probe*: soon when the gain is in doubt, seldom when it is plain, and not while reads are as fast as memory. Devices
//! that save up for bursts make the first reads of a probe look fast, so a probe that speaks against hints goes on for
//! longer before it counts.
//!
//! A file that was stood down is tried again, each time after twice as long; and at once when its reads become slow.
//!
//! Hints that bring in more than the program reads are [tried](trial) on one extent first, so that a plan that was made for
//! another device costs next to nothing.

mod sample;
#[cfg(test)]
mod tests;
mod trial;

use std::fmt;
use std::ops::Range;

use crate::advisor::{Read, Reader};
use crate::cache::Tally;
use crate::config::StandDown;
use sample::{Sample, clearly_less, gain_percent};
use trial::{Step, Trial};

/// Reads with hints before they are judged by time.
const READS_TO_JUDGE: u64 = 32;
/// Reads without hints that a probe collects of each program: at first, and when the first speak against hints.
const READS_OF_PROBE: (u64, u64) = (8, 48);
/// Reads of a probe that are as fast as memory and are passed over, of each program: a few were in memory by chance,
/// such as an index that the program comes back to; when there are more, the device is that fast.
const FAST_MISSES_MAX: u64 = 32;
/// Programs that count so; more would make probes too long.
const PROGRAMS_MAX: u64 = 16;
/// A probe ends after this many reads of each program, even if all were in blocks still held.
const PROBE_READS_MAX: u64 = 4096;
/// Reads with hints between probes of a file whose gain is plain: at first, and at most.
const PROBE_EVERY: (u64, u64) = (1024, 1 << 16);
/// A gain, in percent, that is plain without a probe.
pub(crate) const PLAIN_GAIN_PERCENT: i64 = 30;
/// How much seldomer waste is judged at most where reads are plainly faster in spite of it, as a power of two.
const TOLERATED_MAX: u32 = 6;
/// Reads of a stood-down file on which it is judged whether they became slow.
const RECENT_READS: u64 = 8;
/// How often a file comes back because its reads became slow; then it waits its time.
const COMEBACKS_MAX: u32 = 8;
/// Bytes asked for before hints are judged by what was in memory already.
const MEMORY_JUDGED_BYTES: u64 = 8 << 20;
/// Of the bytes asked for, the part in memory already, in percent, at which hints are pointless.
const MEMORY_PERCENT: u64 = 95;

/// Why a file gets no hints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// This percentage of what was prefetched was never read.
    Wasted(u64),
    /// This percentage of what was to be prefetched was in memory already.
    InMemory(u64),
    /// Reads took this many percent less time with hints; negative: more.
    NoGain(i64),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Wasted(percent) => write!(f, "{percent} % of what was brought in was never read"),
            Why::InMemory(percent) => write!(f, "{percent} % was in memory already"),
            Why::NoGain(percent @ ..0) => write!(f, "reads took {} % longer with hints", -percent),
            Why::NoGain(percent) => write!(f, "reads took only {percent} % less time with hints"),
        }
    }
}

/// Whether a read of `bytes` took longer than it takes from memory.
pub fn is_slow(bytes: u64, duration_ns: u64) -> bool {
    !Sample::one(bytes, duration_ns).as_fast_as_memory()
}

/// How much longer a read of `bytes` took than it takes from memory, ns.
pub fn waited_ns(bytes: u64, duration_ns: u64) -> u64 {
    Sample::one(bytes, duration_ns).waited_ns()
}

#[derive(Clone, Copy, Debug)]
enum State {
    Advising,
    Probing { misses_left: u64, reads_left: u64, long: bool },
    Down { until_ns: u64, why: Why },
}

/// The judge of one file.
#[derive(Debug)]
pub struct Judge {
    options: StandDown,
    /// Whether hints are tried on one extent before they are given.
    tries: bool,
    /// The trial that goes on: until it ends no hints are given.
    trial: Option<Trial>,
    state: State,
    with: Sample,
    without: Sample,
    /// Reads with hints since the last probe, and after how many the next one is due.
    since_probe: u64,
    probe_every: u64,
    /// Programs that read the file: they read the same data, one from the device and the others from memory, and only
    /// all of them together can be compared.
    programs: u64,
    /// Reads of a file that is stood down.
    recent: Sample,
    /// Of these, reads slower than memory.
    recent_slow: u64,
    comebacks: u32,
    judged: Tally,
    /// Reads of the present probe that were passed over.
    fast_misses: u64,
    /// The part of what was brought in that was not read, in percent, while a probe tells whether that pays.
    wasteful: Option<u64>,
    /// How often it did.
    tolerated: u32,
    asked_bytes: u64,
    found_bytes: u64,
    /// Times stood down without a good judgement between.
    downs: u32,
    stood_down: u64,
    judged_gain: Option<i64>,
}

impl Judge {
    /// A judge who has seen nothing. `tries`: the hints bring in more than the program reads, so that they are worth a
    /// trial.
    pub fn new(options: StandDown, tries: bool) -> Judge {
        let tries = tries && options.enabled && options.trial;
        Judge {
            options,
            tries,
            trial: tries.then(Trial::default),
            state: State::Advising,
            with: Sample::default(),
            without: Sample::default(),
            since_probe: 0,
            probe_every: READS_TO_JUDGE,
            programs: 1,
            recent: Sample::default(),
            recent_slow: 0,
            comebacks: 0,
            judged: Tally::default(),
            fast_misses: 0,
            wasteful: None,
            tolerated: 0,
            asked_bytes: 0,
            found_bytes: 0,
            downs: 0,
            stood_down: 0,
            judged_gain: None,
        }
    }

    /// Whether hints may be given now.
    pub fn may_hint(&mut self, now_ns: u64) -> bool {
        if let State::Down { until_ns, .. } = self.state
            && now_ns >= until_ns
        {
            self.come_back();
        }
        matches!(self.state, State::Advising) && self.trial.is_none()
    }

    /// Whether hints are being tried.
    pub fn is_trying(&self) -> bool {
        self.trial.is_some()
    }

    /// A read while hints are tried, of a file of `size_bytes`. What is to be brought in for the trial; how long that took
    /// is to be [told](Judge::tried).
    pub fn try_out(&mut self, reader: Reader, hit: bool, read: &Read, size_bytes: u64) -> Option<Range<u64>> {
        match self.trial.as_mut()?.read(reader, hit, read, size_bytes) {
            Step::Undecided => {}
            Step::Try(extent) => return Some(extent),
            Step::Pays => self.trial = None,
            Step::Against(gain, without) => {
                self.trial = None;
                // Worth another trial when reads become slower than these.
                self.with = without;
                self.stand_down(Why::NoGain(gain), read.now_ns);
            }
        }
        None
    }

    /// How long it took to bring in what a trial asked for.
    pub fn tried(&mut self, bytes: &Range<u64>, took_ns: u64) {
        if let Some(trial) = &mut self.trial {
            trial.took(bytes, took_ns);
        }
    }

    /// The number of programs that read the file from now on.
    pub fn set_programs(&mut self, programs: u64) {
        self.programs = programs.clamp(1, PROGRAMS_MAX);
    }

    /// Other hints are given from now on, and judged by what they bring; bytes let go until now are not.
    pub fn start_anew(&mut self, tally: Tally) {
        let before = std::mem::replace(self, Judge::new(self.options, false));
        (self.judged, self.programs, self.stood_down) = (tally, before.programs, before.stood_down);
    }

    /// Bytes let go until now are not judged.
    pub fn start_over(&mut self, tally: Tally) {
        self.judged = tally;
    }

    /// Why there are no hints now, if the file is stood down.
    pub fn why(&self) -> Option<Why> {
        match self.state {
            State::Down { why, .. } => Some(why),
            State::Advising | State::Probing { .. } => None,
        }
    }

    /// How often the file was stood down.
    pub fn stood_down(&self) -> u64 {
        self.stood_down
    }

    /// The time saved by hints in percent of that of reads without them, as judged last; `None` before a judgement.
    pub fn judged_gain_percent(&self) -> Option<i64> {
        self.judged_gain
    }

    fn gain_percent(&self) -> Option<i64> {
        gain_percent(&self.with, &self.without)
    }

    /// A read and how long it took; `hit` when it lay in blocks that were brought in. A duration of 0 is unknown.
    pub fn read(&mut self, hit: bool, bytes: u64, duration_ns: u64, now_ns: u64) {
        if !self.options.enabled || bytes == 0 || duration_ns == 0 || self.trial.is_some() {
            return;
        }
        match self.state {
            State::Down { why, .. } => self.watch(bytes, duration_ns, why),
            State::Advising if hit => {
                self.with.add(bytes, duration_ns);
                self.since_probe += 1;
                if self.since_probe >= self.probe_every.saturating_mul(self.programs) {
                    self.consider(now_ns);
                }
            }
            State::Advising if Sample::one(bytes, duration_ns).as_fast_as_memory() => {}
            State::Advising => self.without.add(bytes, duration_ns),
            State::Probing { misses_left, reads_left, long } => {
                let fast = !hit && Sample::one(bytes, duration_ns).as_fast_as_memory();
                self.fast_misses += u64::from(fast);
                let passed_over = fast && self.fast_misses <= FAST_MISSES_MAX * self.programs;
                let counts = !hit && !passed_over;
                let misses_left = misses_left - u64::from(counts);
                if counts {
                    self.without.add(bytes, duration_ns);
                }
                self.state = State::Probing { misses_left, reads_left: reads_left - 1, long };
                let doubtful = self.speaks_against() || self.wasteful.is_some() && !self.gain_is_plain();
                if misses_left == 0 && !long && doubtful {
                    // Each time that it came back the last probe was too short.
                    let misses_left = ((READS_OF_PROBE.1 << self.comebacks.min(4)) - READS_OF_PROBE.0) * self.programs;
                    let reads_left = PROBE_READS_MAX * self.programs;
                    self.state = State::Probing { misses_left, reads_left, long: true };
                } else if misses_left == 0 || reads_left == 1 {
                    self.decide(now_ns);
                }
            }
        }
    }

    fn speaks_against(&self) -> bool {
        clearly_less(self.options.gain_percent, &self.with, &self.without)
    }

    fn gain_is_plain(&self) -> bool {
        self.gain_percent().is_some_and(|gain| gain >= PLAIN_GAIN_PERCENT)
    }

    /// Finds out how reads are without hints.
    fn probe(&mut self) {
        let (misses_left, reads_left) = (READS_OF_PROBE.0 * self.programs, PROBE_READS_MAX * self.programs);
        self.state = State::Probing { misses_left, reads_left, long: false };
        self.fast_misses = 0;
    }

    /// Enough reads with hints: decide, or find out how reads are without.
    fn consider(&mut self, now_ns: u64) {
        self.since_probe = 0;
        if self.with.as_fast_as_memory() || (self.gain_is_plain() && self.probe_every < PROBE_EVERY.0) {
            self.probe_every = PROBE_EVERY.0;
        } else if self.without.reads >= READS_OF_PROBE.1 * self.programs {
            self.decide(now_ns);
        } else {
            self.probe();
        }
    }

    fn decide(&mut self, now_ns: u64) {
        self.state = State::Advising;
        self.since_probe = 0;
        self.probe_every = self.probe_every.max(PROBE_EVERY.0 / 4).saturating_mul(4).min(PROBE_EVERY.1);
        if let Some(percent) = self.wasteful.take()
            && !(self.without.reads >= READS_OF_PROBE.0 && self.gain_is_plain())
        {
            return self.stand_down(Why::Wasted(percent), now_ns);
        }
        if self.without.reads < READS_OF_PROBE.0 {
            return;
        }
        match self.gain_percent() {
            Some(gain) if self.speaks_against() => self.stand_down(Why::NoGain(gain), now_ns),
            _ => {
                self.downs = 0;
                // The next judgement rests on reads of its own time.
                self.judged_gain = self.gain_percent();
                self.without = Sample::default();
            }
        }
    }

    /// A read of a file that is stood down. When they become slow, hints are worth another try.
    fn watch(&mut self, bytes: u64, duration_ns: u64, why: Why) {
        if matches!(why, Why::Wasted(_)) || self.comebacks >= COMEBACKS_MAX {
            return;
        }
        self.recent.add(bytes, duration_ns);
        self.recent_slow += u64::from(!Sample::one(bytes, duration_ns).as_fast_as_memory());
        if self.recent.reads < RECENT_READS {
            return;
        }
        let slower = gain_percent(&self.with, &self.recent).is_none_or(|gain| gain >= PLAIN_GAIN_PERCENT);
        // One read may be slow because the program was put off its processor.
        if slower && self.recent_slow * 4 >= RECENT_READS * 3 {
            self.comebacks += 1;
            self.come_back();
        }
        (self.recent, self.recent_slow) = (Sample::default(), 0);
    }

    fn come_back(&mut self) {
        self.state = State::Advising;
        self.trial = self.tries.then(Trial::default);
        (self.with, self.without, self.recent) = (Sample::default(), Sample::default(), Sample::default());
        (self.since_probe, self.probe_every) = (0, READS_TO_JUDGE);
        (self.asked_bytes, self.found_bytes) = (0, 0);
        (self.wasteful, self.tolerated) = (None, 0);
    }

    /// What became of what was brought in, so far.
    pub fn tally(&mut self, now: Tally, now_ns: u64) {
        if !self.options.enabled || !matches!(self.state, State::Advising) {
            return;
        }
        let wasted = now.wasted_bytes.saturating_sub(self.judged.wasted_bytes);
        let gone = now.gone_bytes.saturating_sub(self.judged.gone_bytes);
        if gone < self.options.judge_after_bytes.max(1).saturating_mul(1 << self.tolerated) {
            return;
        }
        self.judged = now;
        let percent = wasted.saturating_mul(100) / gone;
        if percent <= self.options.waste_percent {
            return;
        }
        if self.with.reads == 0 {
            return self.stand_down(Why::Wasted(percent), now_ns); // how long reads take is not known
        }
        self.wasteful = Some(percent);
        self.tolerated = (self.tolerated + 1).min(TOLERATED_MAX);
        if self.without.reads >= READS_OF_PROBE.0 * self.programs && self.gain_is_plain() {
            self.decide(now_ns);
        } else {
            self.probe();
        }
    }

    /// A hint asked for some bytes, of which some were in memory already.
    pub fn hinted(&mut self, asked_bytes: u64, found_bytes: u64, now_ns: u64) {
        if !self.options.enabled || !matches!(self.state, State::Advising) {
            return;
        }
        self.asked_bytes = self.asked_bytes.saturating_add(asked_bytes);
        self.found_bytes = self.found_bytes.saturating_add(found_bytes.min(asked_bytes));
        if self.asked_bytes >= MEMORY_JUDGED_BYTES {
            let percent = self.found_bytes.saturating_mul(100) / self.asked_bytes;
            if percent >= MEMORY_PERCENT {
                self.stand_down(Why::InMemory(percent), now_ns);
            }
            (self.asked_bytes, self.found_bytes) = (0, 0);
        }
    }

    fn stand_down(&mut self, why: Why, now_ns: u64) {
        let doubled =
            self.options.retry_after_s.saturating_mul(1u64.checked_shl(self.downs.min(62)).unwrap_or(u64::MAX));
        let wait_s = doubled.min(self.options.retry_max_s.max(self.options.retry_after_s));
        if let Why::NoGain(gain) = why {
            self.judged_gain = Some(gain);
        }
        self.downs = self.downs.saturating_add(1);
        self.stood_down += 1;
        self.state = State::Down { until_ns: now_ns.saturating_add(wait_s.saturating_mul(1_000_000_000)), why };
    }
}
