//! One point: requests of one kind, timed one by one, until their median is known.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use anyhow::{Context, Result};
use impresario_config::calibration::{Pattern, Point, PointOp};

use super::{BLOCK_BYTES, Device, Measured, Region, Span, Stream};
use crate::stats::{mean, median};
use crate::stop::Stop;
use impresario_base::Random;
use impresario_base::units::show_bytes;

/// Warm-up requests of a visit: the first ones find the device in another state.
const WARM_UP: usize = 2;
/// Minimum requests of a visit and stream, unless the time is over; and of a point before it can be done.
const SAMPLES_MIN: usize = 11;
/// Maximum requests of a visit and stream: bounds memory and, on fast devices, time.
const SAMPLES_MAX: usize = 2000;
/// The same for writes: a cache that takes them all must be emptied before the next visit.
const WRITES_MAX: usize = 300;

/// Requests of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Kind {
    pub op: PointOp,
    pub pattern: Pattern,
    pub streams: u32,
    pub size_bytes: u64,
}

impl Kind {
    pub(super) fn of(p: &Point) -> Kind {
        Kind { op: p.op, pattern: p.pattern, streams: p.streams, size_bytes: p.size_bytes }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streams = if self.streams > 1 { format!(", {} streams", self.streams) } else { String::new() };
        write!(f, "{} {}s of {}{streams}", self.pattern, self.op, show_bytes(self.size_bytes as f64))
    }
}

/// All requests of one kind so far.
pub(super) struct Series {
    pub kind: Kind,
    times_ns: Vec<f64>,
    visits: u32,
    written_ns: f64,
    /// What making the writes durable took.
    pub flush_ns: f64,
}

impl Series {
    pub fn new(kind: Kind) -> Series {
        Series { kind, times_ns: Vec::new(), visits: 0, written_ns: 0.0, flush_ns: 0.0 }
    }

    /// Known well enough, after at least two visits.
    pub fn is_done(&self, spread_goal: f64) -> bool {
        self.visits >= 2 && self.times_ns.len() >= SAMPLES_MIN && spread(&self.times_ns) <= spread_goal
    }

    /// Measures until the median is known to within `goal.1`, or until about `goal.0`.
    pub fn visit(&mut self, device: &dyn Device, goal: (Instant, f64), stop: &Stop, seed: u64) -> Result<()> {
        let kind = self.kind;
        let ended = AtomicBool::new(false);
        let timed: Vec<Timed> = if kind.streams == 1 {
            vec![run(device, kind, 0, goal, (stop, &ended), seed)?]
        } else {
            std::thread::scope(|scope| {
                let ended = &ended;
                let start = |number| {
                    let seed = seed ^ (u64::from(number) << 32);
                    let body = move || run(device, kind, number, goal, (stop, ended), seed);
                    std::thread::Builder::new().spawn_scoped(scope, body).context("starting a stream's thread")
                };
                let threads = (0..kind.streams).map(start).collect::<Result<Vec<_>>>()?;
                let join = |t: std::thread::ScopedJoinHandle<'_, Result<Timed>>| {
                    t.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a stream's thread panicked")))
                };
                threads.into_iter().map(join).collect::<Result<Vec<_>>>()
            })?
        };
        for one in timed {
            self.times_ns.extend(one.times_ns);
            self.written_ns += one.written_ns;
        }
        self.visits += 1;
        Ok(())
    }

    pub fn measured(&self) -> Measured {
        let Kind { op, pattern, streams, size_bytes } = self.kind;
        let ns = |value: f64| value.round().max(1.0) as u64;
        let point = Point {
            op,
            pattern,
            streams,
            size_bytes,
            median_ns: ns(median(&self.times_ns)),
            mean_ns: ns(mean(&self.times_ns)),
            spread_percent: (spread(&self.times_ns) * 10_000.0).round() / 100.0,
            samples: self.times_ns.len() as u64,
        };
        Measured { point, written_ns: self.written_ns, flush_ns: self.flush_ns }
    }
}

struct Timed {
    times_ns: Vec<f64>,
    /// For all writes, including the warm-up.
    written_ns: f64,
}

/// One stream of a visit. All end with the first one: what the others measured alone would be of fewer streams.
fn run(
    device: &dyn Device,
    kind: Kind,
    number: u32,
    (until, spread_goal): (Instant, f64),
    (stop, ended): (&Stop, &AtomicBool),
    seed: u64,
) -> Result<Timed> {
    let mut stream = device.stream(kind.size_bytes)?;
    let mut places = Places::new(device.region(), kind, number, seed);
    let mut timed = Timed { times_ns: Vec::new(), written_ns: 0.0 };
    let mut look_at = SAMPLES_MIN;
    let samples_max = if kind.op == PointOp::Read { SAMPLES_MAX } else { WRITES_MAX };
    for nth in 0..WARM_UP + samples_max {
        stop.check()?;
        let (op, offset) = places.next();
        let began = Instant::now();
        one(stream.as_mut(), op, offset, kind.size_bytes).with_context(|| kind.to_string())?;
        let end = Instant::now();
        let ns = (end - began).as_nanos() as f64;
        if op == PointOp::Write {
            timed.written_ns += ns;
        }
        if nth >= WARM_UP {
            timed.times_ns.push(ns);
        }
        // At least one counts, however slow the device is.
        if (end >= until || ended.load(Relaxed)) && !timed.times_ns.is_empty() {
            break;
        }
        if timed.times_ns.len() >= look_at {
            if spread(&timed.times_ns) <= spread_goal {
                break;
            }
            look_at += look_at / 2;
        }
    }
    ended.store(true, Relaxed);
    Ok(timed)
}

fn one(stream: &mut dyn Stream, op: PointOp, offset: u64, len: u64) -> Result<()> {
    if op == PointOp::Write { stream.write(offset, len) } else { stream.read(offset, len) }
}

/// Where the requests of a stream are placed, and in what order.
struct Places<'a> {
    region: &'a Region,
    kind: Kind,
    random: Random,
    next: u64,
}

impl<'a> Places<'a> {
    fn new(region: &'a Region, kind: Kind, number: u32, seed: u64) -> Places<'a> {
        // Sequential streams begin at random positions in separate parts.
        let mut random = Random::new(seed);
        let Span { start, len } = region.sequential;
        let part = len / u64::from(kind.streams.max(1));
        let room = part.saturating_sub(kind.size_bytes) / BLOCK_BYTES + 1;
        let next = start + part / BLOCK_BYTES * BLOCK_BYTES * u64::from(number) + random.below(room) * BLOCK_BYTES;
        Places { region, kind, random, next }
    }

    fn next(&mut self) -> (PointOp, u64) {
        let size = self.kind.size_bytes;
        let op = match self.kind.op {
            PointOp::Mixed if self.random.below(2) == 0 => PointOp::Read,
            PointOp::Mixed => PointOp::Write,
            op => op,
        };
        let offset = match self.kind.pattern {
            Pattern::Sequential => {
                let span = self.region.sequential;
                let at = if self.next + size > span.start + span.len { span.start } else { self.next };
                self.next = at + size;
                at
            }
            Pattern::Random => {
                let spans = &self.region.random;
                let nth = self.random.below(spans.len() as u64) as usize;
                let span = spans.get(nth).copied().unwrap_or(self.region.sequential);
                span.start + self.random.below(span.len.saturating_sub(size) / BLOCK_BYTES + 1) * BLOCK_BYTES
            }
        };
        (op, offset)
    }
}

/// Half the width of the 95 % interval of the median, relative to it, for any distribution: between the values of ranks
/// n/2 ± 0.98·√n. For fewer than six values, half their range.
pub(super) fn spread(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (n, middle) = (sorted.len() as f64, median(&sorted));
    let reach = if n < 6.0 { n } else { 0.98 * n.sqrt() };
    let low = (n / 2.0 - reach).floor().max(1.0) as usize;
    let high = (1.0 + n / 2.0 + reach).ceil().min(n) as usize;
    match (sorted.get(low.wrapping_sub(1)), sorted.get(high.wrapping_sub(1))) {
        (Some(low), Some(high)) if middle > 0.0 => (high - low) / 2.0 / middle,
        _ => f64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_holds_the_median_in_95_of_100_cases() {
        let mut random = Random::new(5);
        for n in [8_u32, 25, 101] {
            let mut held = 0;
            for _ in 0..2000 {
                let mut sample: Vec<f64> = (0..n).map(|_| random.exponential(1.0)).collect();
                sample.sort_by(f64::total_cmp);
                let reach = 0.98 * f64::from(n).sqrt();
                let low = (f64::from(n) / 2.0 - reach).floor().max(1.0) as usize;
                let high = (1.0 + f64::from(n) / 2.0 + reach).ceil().min(f64::from(n)) as usize;
                let wanted = std::f64::consts::LN_2; // the median of the exponential distribution
                held += u32::from(sample[low - 1] <= wanted && wanted <= sample[high - 1]);
                assert!((spread(&sample) - (sample[high - 1] - sample[low - 1]) / 2.0 / median(&sample)).abs() < 1e-12);
            }
            assert!(held >= 1890, "n = {n}: {held} of 2000");
        }
    }

    #[test]
    fn spread_of_little_or_nothing() {
        assert_eq!(spread(&[]), f64::MAX);
        assert_eq!(spread(&[5.0]), 0.0);
        assert_eq!(spread(&[1.0, 2.0, 3.0]), 0.5);
        assert_eq!(spread(&[0.0; 9]), f64::MAX);
        assert_eq!(spread(&[7.0; 9]), 0.0);
    }

    fn places(op: PointOp, pattern: Pattern, streams: u32, number: u32) -> Vec<(PointOp, u64)> {
        let span = |start, len| Span { start, len };
        let region = Region {
            sequential: span(0, 1 << 20),
            random: vec![span(0, 1 << 20), span(1 << 30, 1 << 20)],
            bytes: 3 << 20,
        };
        let kind = Kind { op, pattern, streams, size_bytes: 65_536 };
        let mut places = Places::new(&region, kind, number, 7);
        (0..1000).map(|_| places.next()).collect()
    }

    #[test]
    fn requests_lie_where_they_should() {
        for (_, offset) in places(PointOp::Read, Pattern::Random, 1, 0) {
            assert!(offset % 4096 == 0 && offset % (1 << 30) + 65_536 <= 1 << 20, "{offset}");
        }
        let random = places(PointOp::Read, Pattern::Random, 1, 0);
        assert!(random.iter().any(|p| p.1 >= 1 << 30) && random.iter().any(|p| p.1 < 1 << 30));
        for number in 0..2 {
            let sequential = places(PointOp::Write, Pattern::Sequential, 2, number);
            assert!((sequential[0].1 >= 512 << 10) == (number == 1), "each stream begins in its own part");
            for pair in sequential.windows(2) {
                assert!(pair[1].1 == pair[0].1 + 65_536 || pair[1].1 == 0);
                assert!(pair[1].1 + 65_536 <= 1 << 20);
            }
        }
        let writes = places(PointOp::Mixed, Pattern::Random, 1, 0).iter().filter(|p| p.0 == PointOp::Write).count();
        assert!((400..600).contains(&writes), "{writes}");
    }
}
