//! The file of a calibration: what was measured of a device and how, the fits, their errors and every raw point.
//!
//! `impresario calibrate` writes it; the key `cost` of a server names it; people read it. Its keys are documented here
//! and in doc/CALIBRATION.md. A file of another version is refused, never guessed at.

use std::fmt::Write;
use std::path::Path;

use impresario_sched::{CostCurve, CostModel, Nanos};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::load::{Complaint, ConfigErrors, line_column};

/// What the key `format` says.
pub const FORMAT: &str = "impresario-calibration";
/// The version of the format that is written and read.
pub const VERSION: u32 = 1;

/// No calibration is longer.
const FILE_MAX_BYTES: u64 = 1 << 20;
const POINTS_MAX: usize = 1000;
const SIZE_MAX_BYTES: u64 = 1 << 40;
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
    /// How.
    pub method: Method,
    /// A line through the points of each operation and pattern.
    #[serde(default)]
    pub fit: Vec<Fit>,
    /// What the fits are made of.
    pub raw: Raw,
}

/// What was measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    /// The folder, or the name and address of the data server.
    pub what: String,
    /// What the times are times of.
    pub scope: Scope,
    /// The file system under the folder, as the kernel calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<String>,
    /// The block device under it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_device: Option<String>,
    /// What the block device says it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The kernel takes the block device for one with rotating platters. Virtual disks often say so wrongly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotational: Option<bool>,
    /// The kernel and the machine.
    pub host: String,
    /// When, UTC.
    pub measured_at: String,
}

/// What the times are times of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// The device: requests passed the page cache by (`O_DIRECT`).
    Device,
    /// The page cache: the file system does not do `O_DIRECT`.
    PageCache,
    /// Memory: the folder lies on tmpfs or ramfs.
    Memory,
    /// A data server as one client sees it: network, scheduler, its page cache, then its device.
    Server,
    /// A data server on a *modelled* disk: the times are the model's, plus network and server.
    Modelled,
}

impl Scope {
    /// For people.
    pub const fn explain(self) -> &'static str {
        match self {
            Scope::Device => "the device, past the page cache (O_DIRECT)",
            Scope::PageCache => "the PAGE CACHE: this file system does not do O_DIRECT, so the device was not seen",
            Scope::Memory => "MEMORY: there is no device under this folder",
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
    /// Time that was allowed, s.
    pub max_s: f64,
    /// Time that it took, s.
    pub took_s: f64,
    /// What a reader should know before he believes the figures.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// Which way a point or fit moves data.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PointOp {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes in turn by chance, half of each.
    Mixed,
}

/// Where its requests lie.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Each begins where the one before ended.
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
    /// Time of a request of no bytes, ns.
    pub fixed_ns: u64,
    /// Time of each byte, ps.
    pub ps_per_byte: u64,
    /// Half of the points are nearer to the line than this, percent of their time.
    pub error_median_percent: f64,
    /// All are, percent.
    pub error_max_percent: f64,
}

impl Fit {
    /// Time of `len` bytes by the line, ns.
    pub fn ns(&self, len_bytes: u64) -> f64 {
        self.fixed_ns as f64 + len_bytes as f64 * self.ps_per_byte as f64 / 1000.0
    }
}

/// The measured points.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Raw {
    /// All, in any order; one for each operation, pattern, size and number of streams.
    pub points: Vec<Point>,
}

/// Requests of one kind, one after the other in each stream.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Operation.
    pub op: PointOp,
    /// Pattern.
    pub pattern: Pattern,
    /// Streams that went on side by side, each with one request at a time.
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
    /// Reads and checks a file; a mistake is one complaint with its place.
    pub fn load(path: &Path) -> Result<Calibration, ConfigErrors> {
        let refuse =
            |message: String| ConfigErrors { file: path.into(), complaints: vec![Complaint { at: None, message }] };
        let meta = std::fs::metadata(path)
            .map_err(|e| refuse(format!("cannot be read: {e}; `impresario calibrate DIR` writes such a file")))?;
        if meta.len() > FILE_MAX_BYTES {
            return Err(refuse(format!("has {} bytes; a calibration has at most {FILE_MAX_BYTES}", meta.len())));
        }
        let text = std::fs::read_to_string(path).map_err(|e| refuse(format!("cannot be read: {e}")))?;
        Calibration::parse(&text, path)
    }

    /// Reads and checks the text of the file `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Calibration, ConfigErrors> {
        read(text).map_err(|(place, message)| {
            let at = place.map(|byte| line_column(text, byte));
            ConfigErrors { file: path.into(), complaints: vec![Complaint { at, message }] }
        })
    }

    /// The points of one curve, in order of size.
    pub fn curve(&self, op: PointOp, pattern: Pattern, streams: u32) -> Vec<Point> {
        curve(&self.raw.points, op, pattern, streams)
    }

    /// The cost model for policies, named `source`: TTP through the points of single random requests, since a
    /// request that is chosen among those of many clients begins with a movement of the device.
    pub fn cost_model(&self, source: &str) -> Result<CostModel, String> {
        let of = |op| {
            let points = self.curve(op, Pattern::Random, 1);
            let points: Vec<_> = points.iter().map(|p| (p.size_bytes, Nanos(p.median_ns))).collect();
            CostCurve::through(&points).map_err(|e| format!("its points of random {op}s make no curve: {e}"))
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
        writeln!(out, "# how far the points are from it. For reading; servers go through the points themselves.")?;
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

/// The byte of the text that a mistake is at, and what is wrong.
type Mistake = (Option<usize>, String);

/// As [`Calibration`], with places.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Placed {
    format: Spanned<String>,
    version: Spanned<u32>,
    device: Described,
    method: Method,
    #[serde(default)]
    fit: Vec<Spanned<Fit>>,
    raw: Spanned<PlacedRaw>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacedRaw {
    points: Vec<Spanned<Point>>,
}

/// Only what tells whether the rest can be understood.
#[derive(Deserialize)]
struct Head {
    format: Option<Spanned<String>>,
    version: Option<Spanned<u32>>,
}

fn read(text: &str) -> Result<Calibration, Mistake> {
    let syntax = |e: toml::de::Error| (e.span().map(|s| s.start), e.message().trim().replace('\n', "; "));
    let head: Head = toml::from_str(text).map_err(syntax)?;
    match head.format {
        Some(format) if format.get_ref() == FORMAT => {}
        format => {
            let place = format.map(|f| f.span().start);
            return Err((place.or(Some(0)), format!("is not a calibration: it does not say format = {FORMAT:?}")));
        }
    }
    if let Some(version) = head.version.filter(|v| *v.get_ref() != VERSION) {
        let message = format!(
            "version {} of the format is not known here, only {VERSION}; calibrate again with this program",
            version.get_ref()
        );
        return Err((Some(version.span().start), message));
    }
    let placed: Placed = toml::from_str(text).map_err(syntax)?;
    for fit in &placed.fit {
        let (f, place) = (fit.get_ref(), Some(fit.span().start));
        check_percent("error_median_percent", f.error_median_percent).map_err(|why| (place, why))?;
        check_percent("error_max_percent", f.error_max_percent).map_err(|why| (place, why))?;
    }
    let raw_at = Some(placed.raw.span().start);
    let raw = placed.raw.into_inner();
    if raw.points.len() > POINTS_MAX {
        return Err((raw_at, format!("there are {} points; at most {POINTS_MAX} are read", raw.points.len())));
    }
    let mut seen = std::collections::BTreeSet::new();
    for point in &raw.points {
        let (p, place) = (point.get_ref(), Some(point.span().start));
        check_point(p).map_err(|why| (place, why))?;
        if !seen.insert((p.op, p.pattern, p.streams, p.size_bytes)) {
            let (op, pattern, size) = (p.op, p.pattern, p.size_bytes);
            return Err((place, format!("there is a point of {pattern} {op}s of {size} bytes already; remove one")));
        }
    }
    let calibration = Calibration {
        format: placed.format.into_inner(),
        version: placed.version.into_inner(),
        device: placed.device,
        method: placed.method,
        fit: placed.fit.into_iter().map(Spanned::into_inner).collect(),
        raw: Raw { points: raw.points.into_iter().map(Spanned::into_inner).collect() },
    };
    calibration.cost_model("").map_err(|why| (raw_at, format!("{why}; calibrate again")))?;
    Ok(calibration)
}

fn check_point(p: &Point) -> Result<(), String> {
    let range = |key: &str, value: u64, most: u64| match value {
        0 => Err(format!("{key} is 0; it must be between 1 and {most}")),
        v if v > most => Err(format!("{key} is {v}; it must be between 1 and {most}")),
        _ => Ok(()),
    };
    range("size_bytes", p.size_bytes, SIZE_MAX_BYTES)?;
    range("median_ns", p.median_ns, TIME_MAX_NS)?;
    range("mean_ns", p.mean_ns, TIME_MAX_NS)?;
    range("streams", p.streams.into(), 1024)?;
    range("samples", p.samples, u64::MAX)?;
    check_percent("spread_percent", p.spread_percent)
}

fn check_percent(key: &str, value: f64) -> Result<(), String> {
    // Not-a-number and infinity are refused too.
    match value.is_finite() && value >= 0.0 {
        true => Ok(()),
        false => Err(format!("{key} is {value}; it must be a number of 0 or more")),
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

    /// Changes one place of a good file and expects one complaint at a line and column that says `what`.
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
        refused("version = 1", "version = 9", "4:11: ", "version 9 of the format is not known here, only 1");
        refused(FORMAT, "something", "3:10: ", "is not a calibration");
        refused("scope = \"device\"", "scope = \"disk\"", "8:9: ", "disk");
        refused("rotational = true", "rotation = true", "10:1: ", "rotation");
        refused("region_bytes = 1073741824", "region_bytes = \"1g\"", "15:16: ", "1g");
        refused("size_bytes =     4096", "size_bytes = 0", "44:3: ", "size_bytes is 0");
        refused(
            "size_bytes =     8192",
            "size_bytes = 4096",
            "45:3: ",
            "there is a point of random reads of 4096 bytes",
        );
        refused("spread_percent = 1.25", "spread_percent = nan", "44:3: ", "spread_percent is NaN");
        refused("op = \"read\",  pattern", "op = \"red\",  pattern", "44:10: ", "red");
        refused("points = [", "points = [\n[", "85:2: ", "unclosed array");
    }

    #[test]
    fn a_file_without_a_curve_is_refused() {
        let mut few = calibration();
        few.raw.points.retain(|p| p.op == PointOp::Read);
        let error = Calibration::parse(&few.to_toml(), Path::new("c.toml")).unwrap_err().to_string();
        assert!(error.contains("random writes make no curve: there are 0 points"), "{error}");
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
