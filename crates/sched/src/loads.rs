//! Who loads a server: requests, bytes and time by party, in bounded memory.
//!
//! A report has a line for each of the parties that load the server most, and one for all others. Lines are counters: none ever
//! falls, whoever joins or leaves the list. A party that is listed again begins at 0, since the others' line has what it did
//! meanwhile; what a party does after it left the list is added there. The lines of the parties that come first, as many as are
//! listed, begin with the first request.

use std::cmp::Reverse;
use std::hash::Hash;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::types::{Nanos, Op};

/// Parties that are counted apart; the others are counted together.
const APART_MAX: usize = 1024;
/// The recent time of a party halves in 2^`HALVING_LOG2` × 2^`TICK_LOG2` ns (69 s).
const HALVING_LOG2: u32 = 6;
/// Recent times decay in ticks of 2^`TICK_LOG2` ns (1.07 s), so that most requests cost one comparison.
const TICK_LOG2: u32 = 30;

/// What a party did.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Load {
    /// Requests that ended, failed ones included.
    pub requests: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Sum of the times from arrival to end.
    pub time: Nanos,
    /// The same in nanoseconds, recent requests above all.
    recent_ns: f64,
    tick: u64,
}

impl Load {
    /// A request that moved `bytes`.
    pub fn of(op: Op, bytes: u64, time: Nanos) -> Load {
        let (read_bytes, write_bytes) = match op {
            Op::Read => (bytes, 0),
            Op::Write => (0, bytes),
            Op::Sync | Op::Truncate | Op::Unlink => (0, 0),
        };
        Load { requests: 1, read_bytes, write_bytes, time, ..Load::default() }
    }

    /// Brings the recent time to the tick of `now`.
    fn decay(&mut self, now: Nanos) {
        let tick = now.0 >> TICK_LOG2;
        if tick > self.tick {
            let halvings = (tick - self.tick) as f64 / f64::from(1 << HALVING_LOG2);
            self.recent_ns *= (-halvings).exp2();
            self.tick = tick;
        }
    }

    fn add(&mut self, other: &Load) {
        self.requests = self.requests.saturating_add(other.requests);
        self.read_bytes = self.read_bytes.saturating_add(other.read_bytes);
        self.write_bytes = self.write_bytes.saturating_add(other.write_bytes);
        self.time.0 = self.time.0.saturating_add(other.time.0);
    }

    /// What was added since it was `before`.
    fn since(&self, before: &Load) -> Load {
        Load {
            requests: self.requests - before.requests,
            read_bytes: self.read_bytes - before.read_bytes,
            write_bytes: self.write_bytes - before.write_bytes,
            time: self.time.since(before.time),
            ..*self
        }
    }
}

/// A party that is counted apart.
#[derive(Clone, Copy, Default, Debug)]
struct Counted {
    load: Load,
    line: Option<Line>,
}

/// The line of a party in reports.
#[derive(Clone, Copy, Default, Debug)]
struct Line {
    /// Its load when it was listed.
    from: Load,
    /// Its load in the last report.
    told: Load,
}

/// The loads of parties by key.
#[derive(Clone, Debug)]
pub struct Loads<K> {
    apart: FxHashMap<K, Counted>,
    /// How many of them have a line.
    listed: usize,
    listed_max: usize,
    /// The line of all others. Its recent time is only that of parties that are not counted apart.
    others: Load,
}

impl<K> Default for Loads<K> {
    fn default() -> Self {
        Loads::listing(Party::LISTED_MAX)
    }
}

impl<K> Loads<K> {
    /// For reports of at most `listed_max` parties.
    fn listing(listed_max: usize) -> Loads<K> {
        Loads { apart: FxHashMap::default(), listed: 0, listed_max, others: Load::default() }
    }
}

impl<K: Hash + Eq + Copy + Ord> Loads<K> {
    /// Counts a request that ended. Of too many parties, the half with the least recent time is counted together with
    /// the others from then on.
    pub fn count(&mut self, of: K, now: Nanos, request: &Load) {
        if self.apart.len() >= APART_MAX && !self.apart.contains_key(&of) {
            self.make_room(now);
        }
        let (listed, listed_max) = (&mut self.listed, self.listed_max);
        let counted = self.apart.entry(of).or_insert_with(|| {
            let is_listed = *listed < listed_max;
            *listed += usize::from(is_listed);
            Counted { line: is_listed.then(Line::default), ..Counted::default() }
        });
        counted.load.decay(now);
        counted.load.add(request);
        counted.load.recent_ns += request.time.0 as f64;
        if counted.line.is_none() {
            self.others.add(request);
        }
    }

    #[cold]
    fn make_room(&mut self, now: Nanos) {
        let all = self.ranked(now);
        self.others.decay(now);
        for key in &all[APART_MAX / 2..] {
            if let Some(counted) = self.apart.remove(key) {
                self.others.recent_ns += counted.load.recent_ns;
                self.unlist(counted.line, &counted.load);
            }
        }
    }

    /// Ends a line: what the last report did not have goes to the others'.
    fn unlist(&mut self, line: Option<Line>, load: &Load) {
        if let Some(line) = line {
            self.listed -= 1;
            self.others.add(&load.since(&line.told));
        }
    }

    /// All that are counted apart, those with the most recent time first.
    fn ranked(&mut self, now: Nanos) -> Vec<K> {
        let each = self.apart.iter_mut().map(|(key, counted)| {
            counted.load.decay(now);
            (Reverse((counted.load.recent_ns as u64, counted.load.time)), *key)
        });
        let mut all: Vec<_> = each.collect();
        all.sort_unstable();
        all.into_iter().map(|(_, key)| key).collect()
    }

    /// The lines of those that load the server most now, and of all others together under the key `None`. Each comes with
    /// its share of the recent time.
    pub fn report(&mut self, now: Nanos) -> Vec<(Option<K>, Load, f64)> {
        let all = self.ranked(now);
        let (top, rest) = all.split_at(self.listed_max.min(all.len()));
        let mut rest_ns = 0.0;
        for key in rest {
            let Some(counted) = self.apart.get_mut(key) else { continue };
            rest_ns += counted.load.recent_ns;
            let (line, load) = (counted.line.take(), counted.load);
            self.unlist(line, &load);
        }
        let mut lines = Vec::with_capacity(top.len() + 1);
        for key in top {
            let Some(Counted { load, line }) = self.apart.get_mut(key) else { continue };
            self.listed += usize::from(line.is_none());
            let line = line.get_or_insert(Line { from: *load, told: *load });
            line.told = *load;
            lines.push((Some(*key), load.since(&line.from)));
        }
        self.others.decay(now);
        if self.others.requests > 0 || !rest.is_empty() {
            lines.push((None, Load { recent_ns: self.others.recent_ns + rest_ns, ..self.others }));
        }
        let recent_ns: f64 = lines.iter().map(|(_, load)| load.recent_ns).sum();
        let share = |load: &Load| if recent_ns > 0.0 { load.recent_ns / recent_ns } else { 0.0 };
        lines.into_iter().map(|(key, load)| (key, load, share(&load))).collect()
    }
}

/// The jobs and users that load a scheduler most.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct WhoLoads {
    /// Applications.
    pub jobs: Vec<Party>,
    /// Users.
    pub users: Vec<Party>,
}

/// An application or user among those that load a scheduler most.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Party {
    /// Its key, or "others": all that are not listed, together.
    pub key: String,
    /// Requests that ended since it was listed, failed ones included.
    pub requests: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Sum of its requests' times from arrival to end, seconds.
    pub time_s: f64,
    /// Its share of that sum over all parties, where a request counts half after 69 s (0 to 1).
    pub recent_share: f64,
}

impl Party {
    /// Maximum parties in a report.
    pub const LISTED_MAX: usize = 32;

    /// The parties that load the server most now, for a report.
    pub fn list<K: Hash + Eq + Copy + Ord + ToString>(loads: &mut Loads<K>, now: Nanos) -> Vec<Party> {
        let lines = loads.report(now).into_iter();
        lines
            .map(|(key, load, recent_share)| Party {
                key: key.map_or_else(|| "others".into(), |key| key.to_string()),
                requests: load.requests,
                read_bytes: load.read_bytes,
                write_bytes: load.write_bytes,
                time_s: load.time.0 as f64 / 1e9,
                recent_share,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn nothing_is_lost_in_bounded_memory() {
        let mut loads = Loads::listing(10);
        for n in 0..5000u64 {
            loads.count(n, Nanos(n), &Load::of(Op::Read, 3, Nanos(n + 1)));
            loads.count(7777, Nanos(n), &Load::of(Op::Write, 2, Nanos(1_000_000)));
        }
        assert!(loads.apart.len() <= APART_MAX);
        let top = loads.report(Nanos(5000));
        assert_eq!((top.len(), top[0].0, top[10].0), (11, Some(7777), None));
        // Of the small ones, the heaviest are listed.
        assert_eq!(top[1].0, Some(4999));
        let sum = |of: fn(&Load) -> u64| top.iter().map(|(_, load, _)| of(load)).sum::<u64>();
        assert_eq!((sum(|l| l.requests), sum(|l| l.read_bytes), sum(|l| l.write_bytes)), (10_000, 15_000, 10_000));
        assert_eq!(sum(|l| l.time.0), 5000 * 5001 / 2 + 5_000_000_000);
        assert!((top.iter().map(|(_, _, share)| share).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn who_loads_the_server_now_comes_first() {
        let mut loads = Loads::listing(1);
        for second in 0..600u64 {
            loads.count("yesterday", Nanos(second * S), &Load::of(Op::Read, 1, Nanos(S)));
        }
        let later = 600 * S + (10 << (HALVING_LOG2 + TICK_LOG2));
        loads.count("now", Nanos(later), &Load::of(Op::Read, 1, Nanos(S)));
        let top = loads.report(Nanos(later));
        // One request of it was among those of the others: its line begins now.
        assert_eq!((top[0].0, top[0].1.requests, top[1].0, top[1].1.requests), (Some("now"), 0, None, 601));
        // 600 seconds with a half-life of 69 s leave about 100; ten half-lives leave a thousandth of those.
        assert!((0.85..0.95).contains(&top[0].2), "{top:?}");
        // A time before the last one counts as the last one.
        loads.count("now", Nanos(0), &Load::of(Op::Sync, 9, Nanos(S)));
        let top = loads.report(Nanos(later));
        assert_eq!((top[0].1.requests, top[0].1.read_bytes, top[0].1.time), (1, 0, Nanos(S)));
        assert!(Loads::<u64>::default().report(Nanos(0)).is_empty());
    }

    /// 40 parties, of which others are busy every minute: a program that adds up what each line grew sees every request once.
    #[test]
    fn no_line_of_a_report_falls_and_their_growth_is_all_that_was_done() {
        let mut loads = Loads::default();
        let mut before: FxHashMap<Option<u64>, u64> = FxHashMap::default();
        let (mut counted, mut grown) = (0, 0);
        for minute in 0..200u64 {
            let now = Nanos(minute * 60 * S);
            for n in 0..20 {
                loads.count((minute * 7 + n) % 40, now, &Load::of(Op::Read, 1, Nanos(S)));
                counted += 1;
            }
            let lines = loads.report(now);
            assert!(lines.len() <= Party::LISTED_MAX + 1);
            let present: FxHashMap<_, _> = lines.iter().map(|(key, load, _)| (*key, load.requests)).collect();
            for (key, requests) in &present {
                let last = before.get(key).copied().unwrap_or(0);
                assert!(*requests >= last, "{key:?}: {requests} after {last}, minute {minute}");
                grown += requests - last;
            }
            before = present;
            assert_eq!(grown, counted, "minute {minute}");
        }
    }
}
