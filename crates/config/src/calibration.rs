//! The file of a calibration: the measured device, the method, the fits with their errors, and every raw point.
//!
//! `impresario calibrate` writes it, the key `cost` of a server names it, and people read it. Its keys are documented
//! here and in doc/CALIBRATION.md. A file of another version is refused.

use std::fmt::Write;
use std::path::Path;

use impresario_sched::{CostCurve, CostModel, Nanos};
use impresario_toml::{FileErrors, KeyPath, Mistakes, Tree, text_of};
use serde::{Deserialize, Serialize};
use toml::Value;

/// Value of the key `format`.
pub const FORMAT: &str = "impresario-calibration";
/// The supported version of the format.
pub const VERSION: u32 = 1;

/// Size limit of a file, bytes.
const FILE_MAX_BYTES: u64 = 1 << 20;
const POINTS_MAX: usize = 1000;
const SIZE_MAX_BYTES: u64 = 1 << 40;
/// The largest depth that a calibration tells, requests.
pub const DEPTH_MAX: u32 = 64;
/// Points of fewer streams do not tell where a device's queue ends.
const DEPTH_SEEN_MIN: u32 = 8;
/// A depth is enough if the device then serves this share of the requests a second that it serves at its best.
const DEPTH_SHARE: f64 = 0.95;
/// An hour: no request takes longer.
const TIME_MAX_NS: u64 = 3_600_000_000_000;

/// A calibration.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// What was measured.
    pub device: Described,
    /// How it was measured.
    pub method: Method,
    /// A line through the points of each operation and pattern.
    #[serde(default)]
    pub fit: Vec<Fit>,
    /// The points behind the fits.
    pub raw: Raw,
}

/// What was measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    /// The directory, or the name and address of the data server.
    pub what: String,
    /// The scope of the times.
    pub scope: Scope,
    /// The file system under the directory, as the kernel calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<String>,
    /// The block device under it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_device: Option<String>,
    /// The block device's own model name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Whether the kernel calls the block device rotational. Virtual disks are often labelled so wrongly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotational: Option<bool>,
    /// The kernel and the machine.
    pub host: String,
    /// When, UTC.
    pub measured_at: String,
}

/// The scope of measured times.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// The device: requests bypassed the page cache (`O_DIRECT`).
    Device,
    /// The page cache: the file system does not support `O_DIRECT`.
    PageCache,
    /// Memory: the directory is on tmpfs or ramfs.
    Memory,
    /// A data server as one client sees it: network, scheduler, its page cache, then its device.
    Server,
    /// A data server on a *modelled* disk: the times are the model's, plus network and server.
    Modelled,
}

impl Scope {
    /// A description for people.
    pub const fn explain(self) -> &'static str {
        match self {
            Scope::Device => "the device, without the page cache (O_DIRECT)",
            Scope::PageCache => {
                "the PAGE CACHE: this file system does not support O_DIRECT, so the device was not measured"
            }
            Scope::Memory => "MEMORY: there is no device under this directory",
            Scope::Server => "a data server as one client sees it: network, scheduler and page cache included",
            Scope::Modelled => "a MODELLED disk behind a data server: computed times, plus network and server",
        }
    }
}

/// How it was measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Method {
    /// Bytes of the scratch file or object over which requests were spread.
    pub region_bytes: u64,
    /// Every write was made durable before the next one (`O_DSYNC`).
    pub synchronous_writes: bool,
    /// The spread at which a point was done, percent.
    pub spread_goal_percent: f64,
    /// Time limit, s.
    pub max_s: f64,
    /// Time taken, s.
    pub took_s: f64,
    /// Warnings for the reader of the figures.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// The operation of a point or fit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PointOp {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes in random order, half of each.
    Mixed,
}

/// The offsets of its requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Each starts where the previous one ended.
    Sequential,
    /// Anywhere in the region, at multiples of 4 KiB.
    Random,
}

impl std::fmt::Display for PointOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            PointOp::Read => "read",
            PointOp::Write => "write",
            PointOp::Mixed => "mixed",
        })
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
        })
    }
}

/// A line through points: TTP(size) = `fixed_ns` + size × `ps_per_byte` / 1000.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Of which operation.
    pub op: PointOp,
    /// Of which pattern.
    pub pattern: Pattern,
    /// Time of an empty request, ns.
    pub fixed_ns: u64,
    /// Time per byte, ps.
    pub ps_per_byte: u64,
    /// Half of the points are closer to the line than this, percent of their time.
    pub error_median_percent: f64,
    /// All points are closer to the line than this, percent.
    pub error_max_percent: f64,
}

impl Fit {
    /// Time of `len` bytes on the line, ns.
    pub fn ns(&self, len_bytes: u64) -> f64 {
        self.fixed_ns as f64 + len_bytes as f64 * self.ps_per_byte as f64 / 1000.0
    }
}

/// The measured points.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Raw {
    /// All points, in any order; one for each operation, pattern, size and number of streams.
    pub points: Vec<Point>,
}

/// Requests of one kind, in sequence within each stream.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Operation.
    pub op: PointOp,
    /// Pattern.
    pub pattern: Pattern,
    /// Number of concurrent streams, each with one request at a time.
    pub streams: u32,
    /// Size of a request, bytes.
    pub size_bytes: u64,
    /// Median time of a request, ns.
    pub median_ns: u64,
    /// Mean time, ns.
    pub mean_ns: u64,
    /// Half the width of the 95 % interval of the median, percent of the median.
    pub spread_percent: f64,
    /// Requests measured.
    pub samples: u64,
}

impl Calibration {
    /// Reads and checks a file; a mistake is reported with its position.
    pub fn load(path: &Path) -> Result<Calibration, FileErrors> {
        let text = text_of(path, FILE_MAX_BYTES, "a calibration", "`impresario calibrate DIR` writes such a file")?;
        Calibration::parse(&text, path)
    }

    /// Reads and checks the text of the file `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Calibration, FileErrors> {
        let (tree, mut mistakes) = (Tree::parse(text, path)?, Mistakes::default());
        let read = read(&tree, &mut mistakes);
        mistakes.settle(read, path, &tree)
    }

    /// The points of one curve, in order of size.
    pub fn curve(&self, op: PointOp, pattern: Pattern, streams: u32) -> Vec<Point> {
        curve(&self.raw.points, op, pattern, streams)
    }

    /// The cost model for policies, named `source`: TTP through the points of single random requests, since a request
    /// that is chosen among those of many clients starts with a seek.
    pub fn cost_model(&self, source: &str) -> Result<CostModel, String> {
        let of = |op| {
            let points = self.curve(op, Pattern::Random, 1);
            let points: Vec<_> = points.iter().map(|p| (p.size_bytes, Nanos(p.median_ns))).collect();
            CostCurve::through(&points).map_err(|e| format!("its points of random {op}s do not form a curve: {e}"))
        };
        let label = match self.device.scope {
            Scope::Device => "",
            Scope::PageCache => ", of the page cache",
            Scope::Memory => ", of memory",
            Scope::Server => ", of a server",
            Scope::Modelled => ", modelled",
        };
        let model = CostModel::new(of(PointOp::Read)?, of(PointOp::Write)?);
        Ok(model.from_source(format!("calibration {source} of {}{label}", self.device.what)).corrected(true))
    }

    /// How many requests the device profits from having at once (1 to [`DEPTH_MAX`]): the fewest streams of random reads
    /// at which it serves nearly as many a second as at its best. `None` if the device itself was not measured, or not with
    /// enough streams.
    pub fn depth(&self) -> Option<u32> {
        if self.device.scope != Scope::Device {
            return None;
        }
        let reads = self.raw.points.iter().filter(|p| (p.op, p.pattern) == (PointOp::Read, Pattern::Random));
        let deepest = reads.clone().max_by_key(|p| (p.streams, std::cmp::Reverse(p.size_bytes)))?;
        let curve = reads.filter(|p| p.size_bytes == deepest.size_bytes && p.streams <= DEPTH_MAX);
        // Each stream has one request at a time, so these are the requests in a nanosecond.
        let rate = |p: &Point| f64::from(p.streams) / p.mean_ns as f64;
        let enough = DEPTH_SHARE * curve.clone().map(rate).fold(0.0, f64::max);
        let depth = curve.filter(|p| rate(p) >= enough).map(|p| p.streams).min()?;
        (deepest.streams >= DEPTH_SEEN_MIN).then_some(depth)
    }

    /// The file: every table explained, one point a line.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let Calibration { format, version, device, method, fit, raw } = self;
        writeln!(out, "# What `impresario calibrate` measured; a server uses it by `cost = \"THIS FILE\"`.")?;
        writeln!(out, "# Every key: doc/CALIBRATION.md. Times are of: {}.", device.scope.explain())?;
        writeln!(out, "format = {}\nversion = {version}", text(format))?;
        writeln!(out, "\n[device]")?;
        out.push_str(&toml::to_string(device).map_err(|_| std::fmt::Error)?);
        writeln!(out, "\n[method]")?;
        out.push_str(&toml::to_string(method).map_err(|_| std::fmt::Error)?);
        writeln!(
            out,
            "\n# TTP(size) = fixed_ns + size * ps_per_byte / 1000, a robust line through the points below, and"
        )?;
        writeln!(out, "# its distance from the points. For people; servers interpolate between the points.")?;
        for f in fit {
            writeln!(out, "[[fit]]\nop = \"{}\"\npattern = \"{}\"", f.op, f.pattern)?;
            writeln!(out, "fixed_ns = {}\nps_per_byte = {}", f.fixed_ns, f.ps_per_byte)?;
            writeln!(out, "error_median_percent = {:?}", f.error_median_percent)?;
            writeln!(out, "error_max_percent = {:?}\n", f.error_max_percent)?;
        }
        writeln!(
            out,
            "# One line for each operation, pattern, number of streams and size. spread_percent is half the"
        )?;
        writeln!(out, "# width of the 95 % interval of the median. TTP: the random ones of one stream.")?;
        writeln!(out, "[raw]\npoints = [")?;
        for p in &raw.points {
            writeln!(
                out,
                "  {{ op = {:<8} pattern = {:<13} streams = {}, size_bytes = {:>8}, median_ns = {:>10}, \
                 mean_ns = {:>10}, spread_percent = {:?}, samples = {} }},",
                format!("\"{}\",", p.op),
                format!("\"{}\",", p.pattern),
                p.streams,
                p.size_bytes,
                p.median_ns,
                p.mean_ns,
                p.spread_percent,
                p.samples,
            )?;
        }
        writeln!(out, "]")
    }
}

fn text(text: &str) -> String {
    toml_edit::Value::from(text).to_string()
}

fn curve(points: &[Point], op: PointOp, pattern: Pattern, streams: u32) -> Vec<Point> {
    let of = |p: &&Point| (p.op, p.pattern, p.streams) == (op, pattern, streams);
    let mut points: Vec<Point> = points.iter().filter(of).copied().collect();
    points.sort_by_key(|p| p.size_bytes);
    points
}

fn read(tree: &Tree, mistakes: &mut Mistakes) -> Option<Calibration> {
    let root = KeyPath::default();
    match tree.values.get("format").and_then(Value::as_str) {
        Some(FORMAT) => {}
        _ => {
            mistakes.add(root.key("format"), format!("is not a calibration: it lacks format = {FORMAT:?}"));
            return None;
        }
    }
    if let Some(version) = tree.values.get("version").filter(|v| v.as_integer() != Some(VERSION.into())) {
        let message = format!(
            "version {version} of the format is not supported, only {VERSION}; calibrate again with this program"
        );
        mistakes.add(root.key("version"), message);
        return None;
    }
    let read: Calibration = impresario_toml::read(tree.values.clone(), &root, |_| None, mistakes)?;
    for (i, fit) in read.fit.iter().enumerate() {
        let at = root.key("fit").index(i);
        check_percent("error_median_percent", fit.error_median_percent, &at, mistakes);
        check_percent("error_max_percent", fit.error_max_percent, &at, mistakes);
    }
    let points = root.key("raw").key("points");
    if read.raw.points.len() > POINTS_MAX {
        let message = format!("there are {} points; the limit is {POINTS_MAX}", read.raw.points.len());
        mistakes.add(points.clone(), message);
    }
    let mut seen = std::collections::BTreeSet::new();
    for (i, p) in read.raw.points.iter().enumerate() {
        check_point(p, &points.index(i), mistakes);
        if !seen.insert((p.op, p.pattern, p.streams, p.size_bytes)) {
            let (op, pattern, size) = (p.op, p.pattern, p.size_bytes);
            mistakes.add(points.index(i), format!("a second point of {pattern} {op}s of {size} bytes; remove one"));
        }
    }
    if mistakes.0.is_empty()
        && let Err(why) = read.cost_model("")
    {
        mistakes.add(points, format!("{why}; calibrate again"));
    }
    Some(read)
}

fn check_point(p: &Point, at: &KeyPath, mistakes: &mut Mistakes) {
    let mut range = |key: &str, value: u64, most: u64| {
        if value == 0 || value > most {
            mistakes.add(at.key(key), format!("{key} is {value}; it must be between 1 and {most}"));
        }
    };
    range("size_bytes", p.size_bytes, SIZE_MAX_BYTES);
    range("median_ns", p.median_ns, TIME_MAX_NS);
    range("mean_ns", p.mean_ns, TIME_MAX_NS);
    range("streams", p.streams.into(), 1024);
    range("samples", p.samples, u64::MAX);
    check_percent("spread_percent", p.spread_percent, at, mistakes);
}

fn check_percent(key: &str, value: f64, at: &KeyPath, mistakes: &mut Mistakes) {
    // Refuses not-a-number and infinity too.
    if !value.is_finite() || value < 0.0 {
        mistakes.add(at.key(key), format!("{key} is {value}; it must be a number of 0 or more"));
    }
}

#[cfg(test)]
mod tests {
    use impresario_sched::Op;

    use super::*;

    fn calibration() -> Calibration {
        let curve = |op, pattern, fixed: u64| {
            (0..13).map(move |i| {
                let size_bytes = 4096_u64 << i;
                let median_ns = fixed + size_bytes * 8;
                Point {
                    op,
                    pattern,
                    streams: 1,
                    size_bytes,
                    median_ns,
                    mean_ns: median_ns + 1,
                    spread_percent: 1.25,
                    samples: 31,
                }
            })
        };
        let fit = |op, pattern, fixed_ns| Fit {
            op,
            pattern,
            fixed_ns,
            ps_per_byte: 8000,
            error_median_percent: 0.0,
            error_max_percent: 0.5,
        };
        use {Pattern::*, PointOp::*};
        let mut points: Vec<Point> = curve(Read, Random, 12_000_000).collect();
        points.extend(curve(Write, Random, 14_000_000).chain(curve(Read, Sequential, 100_000)));
        points.push(Point { op: Mixed, streams: 2, ..points[0] });
        Calibration {
            format: FORMAT.into(),
            version: VERSION,
            device: Described {
                what: "/data \"x\"".into(),
                scope: Scope::Device,
                file_system: Some("ext4".into()),
                block_device: None,
                model: None,
                rotational: Some(true),
                host: "Linux 6.18 on node-1".into(),
                measured_at: "2026-11-21T03:15:08Z".into(),
            },
            method: Method {
                region_bytes: 1 << 30,
                synchronous_writes: false,
                spread_goal_percent: 5.0,
                max_s: 60.0,
                took_s: 41.5,
                notes: vec!["one \"note\"".into()],
            },
            fit: vec![fit(Read, Random, 12_000_000), fit(Write, Random, 14_000_000)],
            raw: Raw { points },
        }
    }

    #[test]
    fn what_is_written_reads_back_the_same() {
        let written = calibration().to_toml();
        let read = Calibration::parse(&written, Path::new("c.toml")).unwrap_or_else(|e| panic!("{e}\n{written}"));
        assert_eq!(read, calibration(), "{written}");
        assert!(written.lines().all(|l| l.len() < 220), "{written}");
    }

    #[test]
    fn the_cost_model_goes_through_the_random_points() {
        let model = calibration().cost_model("c.toml").unwrap();
        assert_eq!(model.ttp(Op::Read, 65_536), Nanos(12_000_000 + 65_536 * 8));
        assert_eq!(model.ttp(Op::Write, 1 << 20), Nanos(14_000_000 + (8 << 20)));
        assert!(model.correct && model.source.contains("c.toml") && model.source.contains("/data"));
    }

    #[test]
    fn the_depth_is_where_more_at_once_gains_little() {
        let with = |rates: &[(u32, u64)]| {
            let mut c = calibration();
            let point = c.raw.points[0];
            c.raw.points.retain(|p| p.size_bytes != point.size_bytes || p.pattern != Pattern::Random);
            // `rate` requests in 12 s.
            let points = rates.iter().map(|(streams, rate)| {
                let mean_ns = u64::from(*streams) * 12_000_000_000 / rate;
                Point { streams: *streams, mean_ns, ..point }
            });
            c.raw.points.extend(points);
            c
        };
        let ncq = with(&[(1, 1000), (2, 1100), (4, 1400), (8, 1700), (16, 1960), (32, 2000), (64, 2020)]);
        assert_eq!(ncq.depth(), Some(16));
        assert_eq!(with(&[(1, 1000), (2, 1001), (8, 980), (64, 1010)]).depth(), Some(1), "it has no queue");
        assert_eq!(with(&[(1, 100), (8, 800), (64, 6400)]).depth(), Some(64), "no end of it was seen");
        assert_eq!(with(&[(1, 100), (64, 200), (256, 400)]).depth(), Some(64), "no more than the most");
        assert_eq!(with(&[(1, 1000), (2, 1900)]).depth(), None, "what earlier versions measured");
        let mut cached = ncq;
        cached.device.scope = Scope::PageCache;
        assert_eq!(cached.depth(), None, "of the device itself nothing is known");
        assert_eq!(calibration().depth(), None);
    }

    /// Changes one part of a valid file and expects one complaint at a line and column that says `what`.
    #[track_caller]
    fn refused(old: &str, new: &str, place: &str, what: &str) {
        let good = calibration().to_toml();
        assert!(good.contains(old), "{old} is not in\n{good}");
        let error = Calibration::parse(&good.replacen(old, new, 1), Path::new("/c.toml")).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.starts_with(&format!("/c.toml:{place}")), "{error} is not at {place}");
        assert!(error.contains(what), "{error} does not say {what}");
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        refused("version = 1", "version = 9", "4:11: ", "version 9 of the format is not supported, only 1");
        refused(FORMAT, "something", "3:10: ", "is not a calibration");
        refused("scope = \"device\"", "scope = \"disk\"", "8:9: ", "disk");
        refused("rotational = true", "rotation = true", "10:1: ", "rotation");
        refused("region_bytes = 1073741824", "region_bytes = \"1g\"", "15:16: ", "1g");
        refused("size_bytes =     4096", "size_bytes = 0", "44:69: ", "size_bytes is 0");
        refused("size_bytes =     8192", "size_bytes = 4096", "45:3: ", "a second point of random reads of 4096 bytes");
        refused("spread_percent = 1.25", "spread_percent = nan", "44:142: ", "spread_percent is NaN");
        refused("op = \"read\",  pattern", "op = \"red\",  pattern", "44:10: ", "red");
        refused("points = [", "points = [\n[", "85:2: ", "unclosed array");
    }

    #[test]
    fn a_file_without_a_curve_is_refused() {
        let mut few = calibration();
        few.raw.points.retain(|p| p.op == PointOp::Read);
        let error = Calibration::parse(&few.to_toml(), Path::new("c.toml")).unwrap_err().to_string();
        assert!(error.contains("random writes do not form a curve: there are 0 points"), "{error}");
        let error = Calibration::parse("", Path::new("c.toml")).unwrap_err().to_string();
        assert!(error.starts_with("c.toml:1:1: is not a calibration"), "{error}");
        let error = Calibration::load(Path::new("/nonexistent/c.toml")).unwrap_err().to_string();
        assert!(error.contains("cannot be read") && error.contains("impresario calibrate"), "{error}");
    }

    #[test]
    fn random_damage_never_panics() {
        let good = calibration().to_toml();
        for cut in (0..good.len()).step_by(7).filter(|c| good.is_char_boundary(*c)) {
            let _ = Calibration::parse(&good[..cut], Path::new("c"));
            for damage in ["]", "\"", "=", "-", "9e99"] {
                let _ = Calibration::parse(&format!("{}{damage}{}", &good[..cut], &good[cut..]), Path::new("c"));
            }
        }
    }
}
