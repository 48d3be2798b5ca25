//! Measures a device for the cost model: which points, in what order, for how long, and whether the results are
//! plausible.
//!
//! Points are visited in several passes in random order, so that a disturbance does not affect a single point and a
//! drift shows as spread. A point is done when the 95 % interval of its median is narrow enough after at least two
//! passes; the time it saves goes to the others.

pub mod fit;
pub mod folder;
mod measure;
pub mod page;
pub mod sanity;
pub mod server;
pub mod show;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use impresario_base::machine::{host_name, random_number};
use impresario_base::units::show_utc;
use impresario_config::Calibration;
use impresario_config::calibration::{
    DEPTH_MAX, Described, FORMAT, Method, Pattern, Point, PointOp, Raw, Scope, VERSION,
};

use crate::stats::median;
use crate::stop::Stop;
use impresario_base::Random;
use measure::{Kind, Series};

/// Requests begin at multiples of this, and are multiples of it.
pub const BLOCK_BYTES: u64 = 4096;
/// Largest request that can be asked for.
pub const SIZE_MAX_BYTES: u64 = 64 << 20;
/// The region holds at least this many of the largest requests.
pub const REGION_MIN_REQUESTS: u64 = 4;
/// Sizes at most.
const SIZES_MAX: usize = 64;
/// Planned passes; points still unresolved are visited again while time remains, up to the second number.
const PASSES: (usize, usize) = (3, 20);
/// The part of the time limit that filling the region may take.
const PREPARE_SHARE: f64 = 0.25;
/// The sizes near which mixed points and points of two streams are measured.
const MIXED_SIZES: [u64; 3] = [4 << 10, 64 << 10, 1 << 20];
/// The numbers of streams, besides one and two, with which a device shows how many requests it profits from at once.
const DEPTHS: [u32; 5] = [4, 8, 16, 32, DEPTH_MAX];

/// What to measure, and for how long.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Sizes of requests, bytes: multiples of [`BLOCK_BYTES`] up to [`SIZE_MAX_BYTES`], ascending, two at least.
    pub sizes: Vec<u64>,
    /// Approximate time limit of the whole (1 s to a day); a request in progress is waited for.
    pub max: Duration,
    /// A point is done when its median is known to within this fraction (0.001 to 0.5).
    pub spread_goal: f64,
}

impl Default for Plan {
    /// 4 KiB to 16 MiB by powers of two, a minute, ±5 %.
    fn default() -> Plan {
        Plan { sizes: (12..=24).map(|log2| 1 << log2).collect(), max: Duration::from_secs(60), spread_goal: 0.05 }
    }
}

impl Plan {
    /// What is wrong with it, and the remedy.
    pub fn check(&self) -> Result<(), String> {
        let good = |size: &u64| (BLOCK_BYTES..=SIZE_MAX_BYTES).contains(size) && size.is_multiple_of(BLOCK_BYTES);
        if let Some(bad) = self.sizes.iter().find(|s| !good(s)) {
            return Err(format!("a size of {bad} bytes cannot be measured: give multiples of 4k from 4k to 64m"));
        }
        if !(2..=SIZES_MAX).contains(&self.sizes.len()) || !self.sizes.is_sorted_by(|a, b| a < b) {
            return Err(format!("give 2 to {SIZES_MAX} different sizes in ascending order, such as 4k,64k,1m"));
        }
        if self.max < Duration::from_secs(1) || self.max > Duration::from_secs(86_400) {
            return Err("the time allowed must be between a second and a day".into());
        }
        if !(0.001..=0.5).contains(&self.spread_goal) {
            return Err("the spread must be between 0.1 and 50 percent".into());
        }
        Ok(())
    }

    fn largest(&self) -> u64 {
        self.sizes.last().copied().unwrap_or(BLOCK_BYTES)
    }

    /// All kinds of requests that are measured, of a device itself with many at once, too.
    fn kinds(&self, scope: Scope) -> Vec<Kind> {
        use {Pattern::*, PointOp::*};
        let kind = |op, pattern, streams, size_bytes| Kind { op, pattern, streams, size_bytes };
        let alone = [(Read, Random), (Write, Random), (Read, Sequential), (Write, Sequential)];
        let mut kinds: Vec<Kind> = Vec::new();
        for (op, pattern) in alone {
            kinds.extend(self.sizes.iter().map(|size| kind(op, pattern, 1, *size)));
        }
        let nearest = |wanted: &u64| {
            let apart = |size: &&u64| size.ilog2().abs_diff(wanted.ilog2());
            self.sizes.iter().min_by_key(apart).copied()
        };
        let mut mixed: Vec<u64> = MIXED_SIZES.iter().filter_map(nearest).collect();
        mixed.dedup();
        for size in mixed {
            let several = [(Mixed, Random, 1), (Read, Random, 2), (Write, Random, 2), (Read, Sequential, 2)];
            kinds.extend(several.map(|(op, pattern, streams)| kind(op, pattern, streams, size)));
        }
        if let (Scope::Device, Some(size)) = (scope, nearest(&MIXED_SIZES[0])) {
            kinds.extend(DEPTHS.map(|streams| kind(Read, Random, streams, size)));
        }
        kinds
    }
}

/// A range of a scratch file or object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// First byte.
    pub start: u64,
    /// Length, bytes; at least [`REGION_MIN_REQUESTS`] of the largest requests.
    pub len: u64,
}

/// Where requests may be placed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region {
    /// Sequential ones.
    pub sequential: Span,
    /// For random ones: in any of these; never empty.
    pub random: Vec<Span>,
    /// Maximum storage used, bytes.
    pub bytes: u64,
}

/// A device to which requests can be sent.
pub trait Device: Sync {
    /// What it is.
    fn described(&self) -> Described;
    /// Prepares the region, in bounded time; reports progress to `share`.
    fn prepare(&mut self, until: Instant, stop: &Stop, share: &mut dyn FnMut(f64)) -> Result<()>;
    /// Where requests may be placed; known after [`Device::prepare`].
    fn region(&self) -> &Region;
    /// A sender of requests with its own buffers, for requests up to `size_max_bytes`.
    fn stream(&self, size_max_bytes: u64) -> Result<Box<dyn Stream + '_>>;
    /// Makes everything written durable.
    fn flush(&self) -> Result<()>;
    /// Every write is made durable before it ends.
    fn synchronous(&self) -> bool;
    /// Flushing shows whether a cache hid the device from writes; false where there is no such cache.
    fn flush_tells(&self) -> bool;
    /// Notes for readers.
    fn notes(&self) -> Vec<String>;
}

/// Sends requests, one at a time.
pub trait Stream: Send {
    /// Reads `len` bytes.
    fn read(&mut self, offset: u64, len: u64) -> Result<()>;
    /// Writes `len` bytes.
    fn write(&mut self, offset: u64, len: u64) -> Result<()>;
}

/// A point, and the time of its writes and the flushes after them.
#[derive(Clone, PartialEq, Debug)]
pub struct Measured {
    /// The point.
    pub point: Point,
    /// Sum of the times of all its writes, ns.
    pub written_ns: f64,
    /// Sum of the times of the flushes after them, beyond what flushing nothing takes, ns.
    pub flush_ns: f64,
}

/// Progress.
#[derive(Clone, PartialEq, Debug)]
pub struct Step {
    /// What is done now.
    pub what: String,
    /// The part of the whole that is done, 0 to 1.
    pub share: f64,
    /// Latest end.
    pub left: Duration,
}

/// Measures a device. Results that no device can produce are an error, a [`sanity::Refusal`].
pub fn calibrate(
    device: &mut dyn Device,
    plan: &Plan,
    stop: &Stop,
    progress: &mut dyn FnMut(&Step),
) -> Result<Calibration> {
    plan.check().map_err(anyhow::Error::msg)?;
    let started = Instant::now();
    let deadline = started + plan.max;
    let mut step = |what: String, share: f64| {
        progress(&Step { what, share, left: deadline.saturating_duration_since(Instant::now()) });
    };
    device.prepare(started + plan.max.mul_f64(PREPARE_SHARE), stop, &mut |share| {
        step(format!("filling the scratch space, {:.0} %", share * 100.0), share * PREPARE_SHARE);
    })?;
    let measured = measure_all(device, plan, stop, deadline, &mut |what| {
        let used = started.elapsed().as_secs_f64() / plan.max.as_secs_f64();
        step(what, used.min(1.0));
    })?;
    sanity::check(&measured, &copy_ns)?;
    let points: Vec<Point> = measured.into_iter().map(|m| m.point).collect();
    let curves = [PointOp::Read, PointOp::Write].map(|op| [Pattern::Random, Pattern::Sequential].map(|p| (op, p)));
    let fits = curves.into_iter().flatten().filter_map(|(op, pattern)| {
        let of = |p: &&Point| (p.op, p.pattern, p.streams) == (op, pattern, 1);
        fit::fit(op, pattern, &points.iter().filter(of).copied().collect::<Vec<_>>())
    });
    let mut notes = device.notes();
    notes.extend(unsteady(&points, plan.spread_goal * 100.0));
    let described = device.described();
    notes.extend(hardly_rotating(&described, &points));
    let method = Method {
        region_bytes: device.region().bytes,
        synchronous_writes: device.synchronous(),
        spread_goal_percent: plan.spread_goal * 100.0,
        max_s: plan.max.as_secs_f64(),
        took_s: (started.elapsed().as_secs_f64() * 100.0).round() / 100.0,
        notes,
    };
    let (format, version) = (FORMAT.to_string(), VERSION);
    Ok(Calibration { format, version, device: described, method, fit: fits.collect(), raw: Raw { points } })
}

/// How many points are known less well than required, and which is the worst.
fn unsteady(points: &[Point], goal_percent: f64) -> Option<String> {
    let wide = points.iter().filter(|p| p.spread_percent > goal_percent);
    let worst = wide.clone().max_by(|a, b| a.spread_percent.total_cmp(&b.spread_percent))?;
    Some(format!(
        "{} of {} points are known less well than ±{goal_percent} %, the worst to ±{:.0} %: {}",
        wide.count(),
        points.len(),
        worst.spread_percent,
        Kind::of(worst)
    ))
}

/// A note if the kernel calls a device rotating that is too fast for that. Not an error: virtual disks are often marked
/// so.
fn hardly_rotating(device: &Described, points: &[Point]) -> Option<String> {
    /// The fastest plausible average of arm and platter, ns.
    const RANDOM_READ_MIN_NS: u64 = 500_000;
    let random_read = |p: &&Point| (p.op, p.pattern, p.streams) == (PointOp::Read, Pattern::Random, 1);
    let fastest = points.iter().filter(random_read).map(|p| p.median_ns).min()?;
    let odd = device.rotational == Some(true) && fastest < RANDOM_READ_MIN_NS;
    odd.then(|| {
        "the kernel calls the device rotating, but no disk with platters is so fast: a virtual disk, or a cache".into()
    })
}

fn measure_all(
    device: &dyn Device,
    plan: &Plan,
    stop: &Stop,
    deadline: Instant,
    progress: &mut dyn FnMut(String),
) -> Result<Vec<Measured>> {
    let mut random = Random::new(random_number()?);
    let idle_flush_ns = idle_flush_ns(device)?;
    let mut series: Vec<Series> = plan.kinds(device.described().scope).into_iter().map(Series::new).collect();
    for pass in 0..PASSES.1 {
        let mut order: Vec<usize> = (0..series.len()).filter(|i| !series[*i].is_done(plan.spread_goal)).collect();
        random.shuffle(&mut order);
        for (visited, at) in order.iter().enumerate() {
            stop.check()?;
            let now = Instant::now();
            if now >= deadline {
                return Ok(series.iter().map(Series::measured).collect());
            }
            // The rest is divided evenly among all remaining visits.
            let visits = order.len() - visited + order.len() * (PASSES.0 - 1).saturating_sub(pass);
            let slice = (deadline - now) / visits as u32;
            let one = &mut series[*at];
            progress(format!("pass {}, {}", pass + 1, one.kind));
            one.visit(device, (now + slice, plan.spread_goal), stop, random.next_u64())?;
            if one.kind.op != PointOp::Read {
                let began = Instant::now();
                device.flush()?;
                let beyond = (began.elapsed().as_nanos() as f64 - idle_flush_ns).max(0.0);
                one.flush_ns += if device.flush_tells() { beyond } else { 0.0 };
            }
        }
    }
    Ok(series.iter().map(Series::measured).collect())
}

/// The cost of a flush by itself: making one small write durable, beyond the write.
fn idle_flush_ns(device: &dyn Device) -> Result<f64> {
    let mut stream = device.stream(BLOCK_BYTES)?;
    let mut times = Vec::new();
    for _ in 0..3 {
        stream.write(device.region().sequential.start, BLOCK_BYTES)?;
        let began = Instant::now();
        device.flush()?;
        times.push(began.elapsed().as_nanos() as f64);
    }
    Ok(median(&times))
}

/// How long this machine takes to copy a number of bytes in memory, at best, ns.
fn copy_ns(len_bytes: u64) -> f64 {
    let len = len_bytes.min(SIZE_MAX_BYTES) as usize;
    let (from, mut to) = (vec![1_u8; len], vec![0_u8; len]);
    let rounds = (4 << 20) / len.max(1) + 3;
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        let began = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        best = best.min(began.elapsed().as_nanos() as f64);
    }
    best
}

/// The spans of a region of `bytes` bytes that begins at 0; an error if it is too small for the largest requests.
fn region_of(bytes: u64, plan: &Plan) -> Result<Region> {
    let least = REGION_MIN_REQUESTS * plan.largest();
    if bytes < least {
        bail!(
            "a scratch space of {} is too small for requests of {}: allow {} with --size, or measure smaller --sizes",
            impresario_base::units::show_bytes(bytes as f64),
            impresario_base::units::show_bytes(plan.largest() as f64),
            impresario_base::units::show_bytes(least as f64),
        );
    }
    let whole = Span { start: 0, len: bytes };
    Ok(Region { sequential: whole, random: vec![whole], bytes })
}

/// Kernel and name of this machine.
fn host() -> String {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    format!("{} {} on {}", read("ostype").trim(), read("osrelease").trim(), host_name())
}

/// Now, as ISO 8601 in UTC.
fn utc_now() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    show_utc(since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_that_cannot_be_are_refused() {
        assert_eq!(Plan::default().check(), Ok(()));
        type Change = fn(&mut Plan);
        let cases: [(Change, &str); 7] = [
            (|p| p.sizes = vec![4096], "2 to 64"),
            (|p| p.sizes = vec![8192, 4096], "ascending"),
            (|p| p.sizes = vec![4096, 4097], "4097 bytes"),
            (|p| p.sizes = vec![4096, 128 << 20], "4k to 64m"),
            (|p| p.max = Duration::ZERO, "a second"),
            (|p| p.spread_goal = f64::NAN, "0.1 and 50"),
            (|p| p.spread_goal = 0.9, "0.1 and 50"),
        ];
        for (change, says) in cases {
            let mut plan = Plan::default();
            change(&mut plan);
            let why = plan.check().unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn every_curve_has_every_size_and_mixed_points_are_few() {
        let kinds = Plan::default().kinds(Scope::Server);
        assert_eq!(kinds.len(), 4 * 13 + 3 * 4);
        let few = Plan { sizes: vec![4096, 8192], ..Plan::default() };
        assert_eq!(few.kinds(Scope::Memory).len(), 4 * 2 + 2 * 4);
        assert_eq!(few.kinds(Scope::Device).len(), 4 * 2 + 2 * 4 + DEPTHS.len());
    }

    #[test]
    fn what_a_reader_should_know_is_told() {
        let mut disk = show::tests::disk();
        assert_eq!(unsteady(&disk.raw.points, 5.0), None);
        disk.raw.points[2].spread_percent = 31.0;
        let told = unsteady(&disk.raw.points, 5.0).unwrap();
        assert_eq!(told, "1 of 54 points are known less well than ±5 %, the worst to ±31 %: random reads of 16 KiB");
        assert_eq!(hardly_rotating(&disk.device, &disk.raw.points), None);
        disk.raw.points[0].median_ns = 60_000;
        assert!(hardly_rotating(&disk.device, &disk.raw.points).unwrap().contains("a virtual disk"));
    }

    #[test]
    fn copying_more_takes_longer() {
        assert!(copy_ns(4096) > 0.0 && copy_ns(16 << 20) > copy_ns(4096));
    }
}
