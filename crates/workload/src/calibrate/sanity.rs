//! Refuses results that no device can produce, with the reason and a remedy.

use std::fmt;

use impresario_config::calibration::{Pattern, Point, PointOp};

use super::Measured;
use impresario_base::units::{show_bytes, show_ns};

/// Why a calibration is refused.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("refused ({check}): {what}; {remedy}")]
pub struct Refusal {
    /// Which check.
    pub check: Check,
    /// What was seen.
    pub what: String,
    /// What to do.
    pub remedy: &'static str,
}

/// The checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    /// A point has too few requests to say anything.
    TooFewRequests,
    /// The median of a point of the TTP curve is too uncertain.
    Unsteady,
    /// Bytes came faster than this machine copies them in memory.
    FasterThanMemory,
    /// A larger request took much less time than a smaller one.
    LargerIsFaster,
    /// Random requests took much less time than sequential ones.
    RandomIsFaster,
    /// Writes ended before the device had them: making them durable took the missing time.
    WritesInCache,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Check::TooFewRequests => "too few requests",
            Check::Unsteady => "unsteady",
            Check::FasterThanMemory => "faster than memory",
            Check::LargerIsFaster => "larger is faster",
            Check::RandomIsFaster => "random is faster",
            Check::WritesInCache => "writes stayed in a cache",
        })
    }
}

/// Minimum requests of a point.
pub const SAMPLES_MIN: u64 = 5;
/// Maximum half-width of the median's interval, percent.
const SPREAD_MAX_PERCENT: f64 = 80.0;
/// Relative to a copy in memory: the kernel may copy better than we do, but not by this much.
const MEMORY_MARGIN: f64 = 0.5;
/// Below this fraction of the other time, and outside both intervals, a time is *much* less.
const MUCH_LESS: f64 = 0.6;
/// Smaller differences come from the processor (its clock, caches, neighbours), not from a device: copying 4 KiB in
/// memory takes 0.4 µs at one moment and 1 µs at the next, ns.
const DIFFERENCE_MIN_NS: u64 = 5_000;
/// Writes were in a cache if making them durable takes more than this fraction of their time…
const FLUSH_SHARE_MAX: f64 = 0.5;
/// …and more than this in total, so that jitter of fast devices does not count, ns.
const FLUSH_MIN_NS: f64 = 20e6;

/// Checks all measurements. `copy_ns` is the time this machine takes to copy a number of bytes in memory.
pub fn check(measured: &[Measured], copy_ns: &dyn Fn(u64) -> f64) -> Result<(), Refusal> {
    for m in measured {
        check_point(&m.point, copy_ns)?;
    }
    let curve = |op, pattern| {
        let of = |p: &&Measured| (p.point.op, p.point.pattern, p.point.streams) == (op, pattern, 1);
        let mut curve: Vec<&Measured> = measured.iter().filter(of).collect();
        curve.sort_by_key(|m| m.point.size_bytes);
        curve
    };
    for op in [PointOp::Read, PointOp::Write] {
        let (sequential, random) = (curve(op, Pattern::Sequential), curve(op, Pattern::Random));
        for curve in [&sequential, &random] {
            for pair in curve.windows(2) {
                check_sizes(&pair[0].point, &pair[1].point)?;
            }
            check_flush(curve)?;
        }
        for (s, r) in sequential.iter().zip(&random) {
            check_patterns(&s.point, &r.point)?;
        }
    }
    Ok(())
}

fn name(p: &Point) -> String {
    let streams = if p.streams > 1 { format!(" by {} streams", p.streams) } else { String::new() };
    format!("{} {}s of {}{streams}", p.pattern, p.op, show_bytes(p.size_bytes as f64))
}

fn check_point(p: &Point, copy_ns: &dyn Fn(u64) -> f64) -> Result<(), Refusal> {
    if p.samples < SAMPLES_MIN {
        return Err(Refusal {
            check: Check::TooFewRequests,
            what: format!("only {} {} could be measured in the time allowed", p.samples, name(p)),
            remedy: "allow more with --max-seconds, or measure fewer sizes with --sizes",
        });
    }
    let for_ttp = p.pattern == Pattern::Random && p.streams == 1 && p.op != PointOp::Mixed;
    if for_ttp && p.spread_percent > SPREAD_MAX_PERCENT {
        return Err(Refusal {
            check: Check::Unsteady,
            what: format!("the median of {} is known to ±{:.0} % only", name(p), p.spread_percent),
            remedy: "measure when no other program uses the device, or allow more time with --max-seconds",
        });
    }
    let copy = copy_ns(p.size_bytes);
    if (p.median_ns as f64) < MEMORY_MARGIN * copy {
        return Err(Refusal {
            check: Check::FasterThanMemory,
            what: format!(
                "{} take {}, but copying as many bytes within memory takes {} here",
                name(p),
                show_ns(p.median_ns as f64),
                show_ns(copy)
            ),
            remedy: "the file system moved no data (holes, compression or deduplication); measure another folder",
        });
    }
    Ok(())
}

/// `a` is much less than `b`, beyond noise.
fn much_less(a: &Point, b: &Point) -> bool {
    if b.median_ns.saturating_sub(a.median_ns) < DIFFERENCE_MIN_NS {
        return false;
    }
    let high = a.median_ns as f64 * (1.0 + a.spread_percent / 100.0);
    let low = b.median_ns as f64 * (1.0 - b.spread_percent / 100.0);
    (a.median_ns as f64) < MUCH_LESS * b.median_ns as f64 && high < low
}

fn check_sizes(small: &Point, large: &Point) -> Result<(), Refusal> {
    if !much_less(large, small) {
        return Ok(());
    }
    Err(Refusal {
        check: Check::LargerIsFaster,
        what: format!(
            "{} take {}, but {} take {}",
            name(large),
            show_ns(large.median_ns as f64),
            name(small),
            show_ns(small.median_ns as f64)
        ),
        remedy: "another program used the device, or its cache took part; measure when it is idle, with a larger --size",
    })
}

fn check_patterns(sequential: &Point, random: &Point) -> Result<(), Refusal> {
    if sequential.size_bytes != random.size_bytes || !much_less(random, sequential) {
        return Ok(());
    }
    Err(Refusal {
        check: Check::RandomIsFaster,
        what: format!(
            "{} take {}, but {} take {}",
            name(random),
            show_ns(random.median_ns as f64),
            name(sequential),
            show_ns(sequential.median_ns as f64)
        ),
        remedy: "a cache holds the whole region, or another program used the device; measure when it is idle, with a \
                 larger --size",
    })
}

fn check_flush(curve: &[&Measured]) -> Result<(), Refusal> {
    let (writes, flushes) = curve.iter().fold((0.0, 0.0), |(w, f), m| (w + m.written_ns, f + m.flush_ns));
    if flushes <= FLUSH_SHARE_MAX * writes || flushes <= FLUSH_MIN_NS {
        return Ok(());
    }
    Err(Refusal {
        check: Check::WritesInCache,
        what: format!(
            "{} writes took {} in all, and making them durable afterwards {}",
            curve.first().map_or(Pattern::Random, |m| m.point.pattern),
            show_ns(writes),
            show_ns(flushes)
        ),
        remedy: "a write cache took them; measure every write to its end with --sync, or switch the drive's cache off",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn measured(op: PointOp, pattern: Pattern, size_bytes: u64, median_ns: u64) -> Measured {
        let point = Point {
            op,
            pattern,
            streams: 1,
            size_bytes,
            median_ns,
            mean_ns: median_ns,
            spread_percent: 4.0,
            samples: 40,
        };
        Measured { point, written_ns: 0.0, flush_ns: 0.0 }
    }

    /// A plausible disk.
    fn disk() -> Vec<Measured> {
        let curve = |op, pattern, fixed: u64| {
            (0..9).map(move |i| 4096_u64 << i).map(move |size| measured(op, pattern, size, fixed + size * 8))
        };
        use {Pattern::*, PointOp::*};
        let all = curve(Read, Random, 12_000_000).chain(curve(Read, Sequential, 100_000));
        all.chain(curve(Write, Random, 14_000_000)).chain(curve(Write, Sequential, 8_000_000)).collect()
    }

    #[track_caller]
    fn refused(change: impl FnOnce(&mut Vec<Measured>), check_wanted: Check, says: &[&str]) {
        let mut all = disk();
        assert_eq!(check(&all, &|bytes| bytes as f64 / 10.0), Ok(()), "the unchanged disk is good");
        change(&mut all);
        let refusal = check(&all, &|bytes| bytes as f64 / 10.0).unwrap_err();
        assert_eq!(refusal.check, check_wanted, "{refusal}");
        let text = refusal.to_string();
        assert!(text.lines().count() == 1 && says.iter().all(|s| text.contains(s)), "{text}");
    }

    #[test]
    fn a_point_of_few_requests_is_refused() {
        refused(
            |all| all[3].point.samples = 4,
            Check::TooFewRequests,
            &["only 4 random reads of 32 KiB", "--max-seconds"],
        );
    }

    #[test]
    fn a_point_that_is_not_known_is_refused() {
        refused(|all| all[3].point.spread_percent = 90.0, Check::Unsteady, &["random reads of 32 KiB", "±90 %"]);
    }

    #[test]
    fn other_points_may_be_unsteady() {
        let mut all = disk();
        all[12].point.spread_percent = 300.0;
        assert_eq!(check(&all, &|_| 0.0), Ok(()));
    }

    #[test]
    fn faster_than_memory_is_refused() {
        let fast = |all: &mut Vec<Measured>| all[17].point.median_ns = 50_000;
        refused(fast, Check::FasterThanMemory, &["sequential reads of 1 MiB take 50 µs", "takes 105 µs", "holes"]);
    }

    #[test]
    fn larger_requests_that_take_less_time_are_refused_beyond_noise() {
        let fast = |all: &mut Vec<Measured>| all[8].point.median_ns = 5_000_000;
        refused(fast, Check::LargerIsFaster, &["random reads of 1 MiB take 5.0 ms", "512 KiB"]);
        // Within noise: slightly less, or much less but uncertain.
        let mut all = disk();
        all[26].point.median_ns = all[25].point.median_ns * 8 / 10;
        all[8].point.median_ns = all[7].point.median_ns / 2;
        (all[8].point.spread_percent, all[7].point.spread_percent) = (50.0, 50.0);
        assert_eq!(check(&all, &|_| 0.0), Ok(()));
    }

    #[test]
    fn random_that_is_faster_than_sequential_is_refused() {
        let slow = |all: &mut Vec<Measured>| all[9..18].iter_mut().for_each(|m| m.point.median_ns += 30_000_000);
        refused(
            slow,
            Check::RandomIsFaster,
            &["random reads of 4 KiB take 12.0 ms", "sequential reads of 4 KiB take 30.1 ms"],
        );
    }

    /// Random 4 KiB in 0.4 µs and sequential ones in 1 µs, in memory: a property of the processor, and accepted.
    #[test]
    fn what_only_the_processor_explains_is_not_refused() {
        let curve = |pattern, fixed: u64| {
            (0..3)
                .map(move |i| 4096_u64 << (4 * i))
                .map(move |size| measured(PointOp::Read, pattern, size, fixed + size / 10))
        };
        let mut all: Vec<Measured> = curve(Pattern::Random, 0).chain(curve(Pattern::Sequential, 0)).collect();
        all[3].point.median_ns = 1_000;
        assert!(all[0].point.median_ns * 2 < all[3].point.median_ns);
        assert_eq!(check(&all, &|bytes| bytes as f64 / 20.0), Ok(()));
        all[3].point.median_ns = 8_000;
        let refusal = check(&all, &|bytes| bytes as f64 / 20.0).unwrap_err();
        assert_eq!(refusal.check, Check::RandomIsFaster, "{refusal}");
        assert!(refusal.to_string().contains("take 409 ns, but"), "{refusal}");
    }

    #[test]
    fn writes_that_a_cache_took_are_refused() {
        let cached = |all: &mut Vec<Measured>| {
            for m in &mut all[18..27] {
                (m.written_ns, m.flush_ns) = (10e6, 40e6);
            }
        };
        refused(cached, Check::WritesInCache, &["random writes took 90.0 ms in all", "0.36 s", "--sync"]);
        // A fast device whose flush takes a few milliseconds is not cached.
        let mut all = disk();
        (all[20].written_ns, all[20].flush_ns) = (1e6, 10e6);
        assert_eq!(check(&all, &|_| 0.0), Ok(()));
    }

    #[test]
    fn mixed_points_are_judged_alone() {
        let mut all = disk();
        all.push(measured(PointOp::Mixed, Pattern::Random, MIB, 1_000_000));
        assert_eq!(check(&all, &|bytes| bytes as f64 / 10.0), Ok(()));
    }
}
