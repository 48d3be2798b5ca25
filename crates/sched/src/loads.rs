//! Who loads a server: requests, bytes and time by party, in bounded memory.

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

    fn add(&mut self, now: Nanos, other: &Load) {
        self.decay(now);
        self.requests += other.requests;
        self.read_bytes = self.read_bytes.saturating_add(other.read_bytes);
        self.write_bytes = self.write_bytes.saturating_add(other.write_bytes);
        self.time.0 = self.time.0.saturating_add(other.time.0);
    }
}

/// The loads of parties by key.
#[derive(Clone, Debug)]
pub struct Loads<K> {
    apart: FxHashMap<K, Load>,
    others: Load,
}

impl<K> Default for Loads<K> {
    fn default() -> Self {
        Loads { apart: FxHashMap::default(), others: Load::default() }
    }
}

impl<K: Hash + Eq + Copy + Ord> Loads<K> {
    /// Counts a request that ended. Of too many parties, the half with the least recent time is counted together with
    /// the others from then on.
    pub fn count(&mut self, of: K, now: Nanos, request: &Load) {
        if self.apart.len() >= APART_MAX && !self.apart.contains_key(&of) {
            self.make_room(now);
        }
        let load = self.apart.entry(of).or_default();
        load.add(now, request);
        load.recent_ns += request.time.0 as f64;
    }

    #[cold]
    fn make_room(&mut self, now: Nanos) {
        let mut all = self.ranked(now);
        for (key, load) in all.drain(APART_MAX / 2..) {
            self.apart.remove(&key);
            self.others.add(now, &load);
            self.others.recent_ns += load.recent_ns;
        }
    }

    /// All that are counted apart, those with the most recent time first.
    fn ranked(&self, now: Nanos) -> Vec<(K, Load)> {
        let mut all: Vec<(K, Load)> = self.apart.iter().map(|(key, load)| (*key, *load)).collect();
        all.iter_mut().for_each(|(_, load)| load.decay(now));
        all.sort_by_key(|(key, load)| (Reverse((load.recent_ns as u64, load.time)), *key));
        all
    }

    /// Those that load the server most now, at most `max`, and all others together under the key `None`. Each comes with
    /// its share of the recent time.
    pub fn top(&self, now: Nanos, max: usize) -> Vec<(Option<K>, Load, f64)> {
        let mut all = self.ranked(now);
        let mut others = self.others;
        others.decay(now);
        for (_, load) in all.drain(max.min(all.len())..) {
            others.add(now, &load);
            others.recent_ns += load.recent_ns;
        }
        let mut top: Vec<(Option<K>, Load)> = all.into_iter().map(|(key, load)| (Some(key), load)).collect();
        if others.requests > 0 {
            top.push((None, others));
        }
        let recent_ns: f64 = top.iter().map(|(_, load)| load.recent_ns).sum();
        let share = |load: &Load| if recent_ns > 0.0 { load.recent_ns / recent_ns } else { 0.0 };
        top.into_iter().map(|(key, load)| (key, load, share(&load))).collect()
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
    /// Requests that ended, failed ones included.
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
    pub fn list<K: Hash + Eq + Copy + Ord + ToString>(loads: &Loads<K>, now: Nanos) -> Vec<Party> {
        let top = loads.top(now, Party::LISTED_MAX).into_iter();
        top.map(|(key, load, recent_share)| Party {
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
        let mut loads = Loads::default();
        for n in 0..5000u64 {
            loads.count(n, Nanos(n), &Load::of(Op::Read, 3, Nanos(n + 1)));
            loads.count(7777, Nanos(n), &Load::of(Op::Write, 2, Nanos(1_000_000)));
        }
        assert!(loads.apart.len() <= APART_MAX);
        let top = loads.top(Nanos(5000), 10);
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
        let mut loads = Loads::default();
        for second in 0..600u64 {
            loads.count("yesterday", Nanos(second * S), &Load::of(Op::Read, 1, Nanos(S)));
        }
        let later = 600 * S + (10 << (HALVING_LOG2 + TICK_LOG2));
        loads.count("now", Nanos(later), &Load::of(Op::Read, 1, Nanos(S)));
        let top = loads.top(Nanos(later), 1);
        assert_eq!((top[0].0, top[0].1.requests, top[1].0, top[1].1.requests), (Some("now"), 1, None, 600));
        // 600 seconds with a half-life of 69 s leave about 100; ten half-lives leave a thousandth of those.
        assert!((0.85..0.95).contains(&top[0].2), "{top:?}");
        // A time before the last one counts as the last one.
        loads.count("now", Nanos(0), &Load::of(Op::Sync, 9, Nanos(S)));
        let top = loads.top(Nanos(later), 1);
        assert_eq!((top[0].1.requests, top[0].1.read_bytes, top[0].1.time), (2, 1, Nanos(2 * S)));
        assert!(Loads::<u64>::default().top(Nanos(0), 3).is_empty());
    }
}
