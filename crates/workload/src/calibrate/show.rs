//! A calibration for people: tables and a plot in plain text.

use std::fmt::Write;

use impresario_config::Calibration;
use impresario_config::calibration::{Pattern, Point, PointOp};

use impresario_base::units::{show_bytes, show_ns, show_seconds};

/// The curves, their marks in the plot, and their names.
pub(super) const CURVES: [(PointOp, Pattern, char, &str); 4] = [
    (PointOp::Read, Pattern::Random, 'R', "random read"),
    (PointOp::Write, Pattern::Random, 'W', "random write"),
    (PointOp::Read, Pattern::Sequential, 'r', "sequential read"),
    (PointOp::Write, Pattern::Sequential, 'w', "sequential write"),
];
/// Rows of the plot.
const ROWS: usize = 18;
/// Columns beside it: the labels of times.
const LABEL: usize = 10;
/// A narrower plot would show nothing.
const WIDTH_MIN: usize = 40;
const WIDTH_MAX: usize = 120;

/// Everything, in lines of at most `width` columns as far as possible.
pub fn text(calibration: &Calibration, width: usize) -> String {
    let Calibration { device, method, .. } = calibration;
    let mut out = format!("{}\nTimes are of {}.\n", device.what, device.scope.explain());
    let kind = device.rotational.map(|r| if r { "rotating as the kernel says" } else { "not rotating" });
    let below = [device.file_system.as_deref(), device.block_device.as_deref(), device.model.as_deref(), kind];
    let below: Vec<&str> = below.into_iter().flatten().collect();
    if !below.is_empty() {
        out += &format!("On {}.\n", below.join(", "));
    }
    out += &format!(
        "Measured {} on {}, in {} of {}{}.\n",
        device.measured_at,
        device.host,
        show_seconds(method.took_s),
        show_bytes(method.region_bytes as f64),
        if method.synchronous_writes { ", every write made durable" } else { "" }
    );
    method.notes.iter().for_each(|note| out += &format!("Note: {note}.\n"));
    out += "\n";
    out += &table(calibration);
    out += "\n";
    out += &several(calibration);
    if let Some(depth) = calibration.depth() {
        out += &format!("Requests that the device profits from at once: {depth}\n");
    }
    out += "\nFit: time = fixed + size / speed\n";
    for f in &calibration.fit {
        let mb_s = 1e6 / f.ps_per_byte.max(1) as f64;
        let speed = if f.ps_per_byte == 0 { "no time for bytes".into() } else { format!("{mb_s:.1} MB/s") };
        out += &format!(
            "  {:<10} {:<5} {:>9} + size / {:<12} off by {:.1} % (median), {:.1} % (most)\n",
            f.pattern.to_string(),
            f.op.to_string(),
            show_ns(f.fixed_ns as f64),
            speed,
            f.error_median_percent,
            f.error_max_percent
        );
    }
    out += "\n";
    out + &plot(calibration, width)
}

/// Sizes by curves: median and spread.
fn table(calibration: &Calibration) -> String {
    let mut sizes: Vec<u64> = calibration.raw.points.iter().map(|p| p.size_bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut out = format!("{:>8}", "size");
    CURVES.iter().for_each(|(.., name)| out += &format!("  {name:>17}"));
    out.push('\n');
    for size in sizes {
        out += &format!("{:>8}", show_bytes(size as f64));
        for (op, pattern, ..) in CURVES {
            let point = calibration.curve(op, pattern, 1).into_iter().find(|p| p.size_bytes == size);
            out += &format!("  {:>17}", point.map_or("-".into(), |p| cell(&p)));
        }
        out.push('\n');
    }
    out
}

fn cell(p: &Point) -> String {
    format!("{} ±{:.0} %", show_ns(p.median_ns as f64), p.spread_percent)
}

/// Mixed points and those of several streams, each beside its components.
fn several(calibration: &Calibration) -> String {
    let mut out = String::new();
    let alone = |p: &Point, op| {
        let curve = calibration.curve(op, p.pattern, 1);
        curve.into_iter().find(|a| a.size_bytes == p.size_bytes).map(|a| a.median_ns as f64)
    };
    for p in calibration.raw.points.iter().filter(|p| p.streams > 1 || p.op == PointOp::Mixed) {
        let streams = if p.streams > 1 { format!(", {} streams", p.streams) } else { String::new() };
        let beside = match p.op {
            PointOp::Mixed => alone(p, PointOp::Read).zip(alone(p, PointOp::Write)).map(|(r, w)| (r + w) / 2.0),
            op => alone(p, op),
        };
        let beside = beside.map_or(String::new(), |ns| format!("{:.2} × alone", p.median_ns as f64 / ns.max(1.0)));
        let what = format!("{} {}{streams}", p.pattern, p.op);
        // Writing to a string cannot fail.
        _ = writeln!(out, "{:>8}  {what:<29}  {:>17}  {beside}", show_bytes(p.size_bytes as f64), cell(p));
    }
    out
}

/// Time over size, both logarithmic; the curves as letters, their fits as dots.
fn plot(calibration: &Calibration, width: usize) -> String {
    let columns = width.clamp(WIDTH_MIN, WIDTH_MAX) - LABEL - 2;
    let curves: Vec<Vec<Point>> = CURVES.iter().map(|(op, pattern, ..)| calibration.curve(*op, *pattern, 1)).collect();
    let points = || curves.iter().flatten();
    let Some(scale) = Scale::of(points()) else { return String::new() };
    let row = |ns: f64| ((scale.y(ns) * (ROWS - 1) as f64).round() as usize).min(ROWS - 1);
    let column = |size: u64| ((scale.x(size) * (columns - 1) as f64).round() as usize).min(columns - 1);
    let mut grid = vec![vec![' '; columns]; ROWS];
    for fit in &calibration.fit {
        let times = (0..columns).map(|at| (at, fit.ns(scale.size_at(at as f64 / (columns - 1) as f64))));
        for (at, ns) in times.filter(|(_, ns)| (0.0..=1.0).contains(&scale.y(*ns))) {
            grid[row(ns)][at] = '·';
        }
    }
    for (curve, (.., mark, _)) in curves.iter().zip(CURVES) {
        for p in curve {
            let cell = &mut grid[row(p.median_ns as f64)][column(p.size_bytes)];
            // Where two curves meet, both stay visible.
            *cell = if matches!(*cell, ' ' | '·') { mark } else { '#' };
        }
    }
    let mut out = String::new();
    for (nth, cells) in grid.iter().enumerate().rev() {
        let label = if nth % 4 == 1 || nth == ROWS - 1 {
            show_ns(scale.ns_at(nth as f64 / (ROWS - 1) as f64))
        } else {
            String::new()
        };
        let line: String = cells.iter().collect();
        out += format!("{label:>LABEL$} |{line}").trim_end();
        out.push('\n');
    }
    out += &format!("{:>LABEL$} +{}\n", "", "-".repeat(columns));
    let mut below = vec![' '; columns + 10];
    let mut free_from = 0;
    for p in &curves[0] {
        let (at, text) = (column(p.size_bytes), show_bytes(p.size_bytes as f64));
        if at >= free_from && at + text.len() <= columns {
            text.chars().enumerate().for_each(|(i, c)| below[at + i] = c);
            free_from = at + text.len() + 2;
        }
    }
    let below: String = below.into_iter().collect();
    out += format!("{:>LABEL$}  {below}", "").trim_end();
    let legend: Vec<String> = CURVES.iter().map(|(.., mark, name)| format!("{mark} {name}")).collect();
    out += &format!("\n{:>LABEL$}  {}, # several, · fit\n", "", legend.join(", "));
    out
}

/// Logarithms of sizes and times as fractions of the plot.
pub(super) struct Scale {
    sizes: (f64, f64),
    times: (f64, f64),
}

impl Scale {
    /// Around all points; `None` when there are fewer than two sizes.
    pub(super) fn of<'a>(points: impl Iterator<Item = &'a Point> + Clone) -> Option<Scale> {
        let ends = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
        };
        let sizes = ends(&mut points.clone().map(|p| (p.size_bytes as f64).ln()));
        let times = ends(&mut points.map(|p| (p.median_ns as f64).ln()));
        // A flat curve is drawn in the middle.
        let times = if times.1 - times.0 < 0.1 { (times.0 - 0.7, times.1 + 0.7) } else { times };
        (sizes.0 < sizes.1).then_some(Scale { sizes, times })
    }

    /// 0 at the smallest size, 1 at the largest.
    pub(super) fn x(&self, size: u64) -> f64 {
        ((size as f64).ln() - self.sizes.0) / (self.sizes.1 - self.sizes.0)
    }

    /// 0 at the shortest time, 1 at the longest.
    pub(super) fn y(&self, ns: f64) -> f64 {
        (ns.max(1e-9).ln() - self.times.0) / (self.times.1 - self.times.0)
    }

    /// The size at a part of the width.
    pub(super) fn size_at(&self, x: f64) -> u64 {
        (self.sizes.0 + x * (self.sizes.1 - self.sizes.0)).exp().round() as u64
    }

    /// The time at a part of the height.
    pub(super) fn ns_at(&self, y: f64) -> f64 {
        (self.times.0 + y * (self.times.1 - self.times.0)).exp()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use impresario_config::calibration::{Described, FORMAT, Method, Raw, Scope, VERSION};

    use super::*;

    /// A modelled disk, with exact times.
    pub(in crate::calibrate) fn disk() -> Calibration {
        let mut points = Vec::new();
        for (op, pattern, ..) in CURVES {
            let fixed = if pattern == Pattern::Random { 12_000_000 } else { 150_000 };
            points.extend((0..13).map(|i| 4096_u64 << i).map(|size_bytes| {
                let median_ns = fixed + size_bytes * 8;
                Point {
                    op,
                    pattern,
                    streams: 1,
                    size_bytes,
                    median_ns,
                    mean_ns: median_ns,
                    spread_percent: 2.0,
                    samples: 20,
                }
            }));
        }
        points.push(Point { op: PointOp::Mixed, ..points[0] });
        points.push(Point { streams: 2, median_ns: 2 * points[0].median_ns, ..points[0] });
        let curves = CURVES.map(|(op, pattern, ..)| {
            let of = |p: &&Point| (p.op, p.pattern, p.streams) == (op, pattern, 1);
            crate::calibrate::fit::fit(op, pattern, &points.iter().filter(of).copied().collect::<Vec<_>>()).unwrap()
        });
        let what = "data server data.0 at 127.0.0.1:7100".into();
        let measured_at = "2026-11-21T03:15:08Z".into();
        Calibration {
            format: FORMAT.into(),
            version: VERSION,
            device: Described {
                what,
                scope: Scope::Modelled,
                file_system: None,
                block_device: None,
                model: Some("modelled <disk>".into()),
                rotational: Some(true),
                host: "Linux 6.18 on node-1".into(),
                measured_at,
            },
            method: Method {
                region_bytes: 1 << 28,
                synchronous_writes: false,
                spread_goal_percent: 5.0,
                max_s: 60.0,
                took_s: 12.3,
                notes: vec!["a note".into()],
            },
            fit: curves.into(),
            raw: Raw { points },
        }
    }

    #[test]
    fn it_says_what_was_measured_and_labels_models() {
        let text = text(&disk(), 80);
        for wanted in [
            "MODELLED disk",
            "Note: a note.",
            "On modelled <disk>, rotating as the kernel says.",
            "4 KiB",
            "16 MiB",
            "12.0 ms ±2 %",
            "random     read    12.0 ms + size / 125.0 MB/s",
            "random mixed",
            "random read, 2 streams",
            "2.00 × alone",
        ] {
            assert!(text.contains(wanted), "{wanted} is missing:\n{text}");
        }
    }

    #[test]
    fn of_a_device_it_says_how_many_requests_it_profits_from() {
        let mut disk = disk();
        let point = disk.raw.points[0];
        let deep = |streams: u32| Point { streams, mean_ns: point.mean_ns * u64::from(streams.max(16)) / 16, ..point };
        disk.raw.points.extend([4, 8, 16, 32, 64].map(deep));
        assert!(!text(&disk, 80).contains("profits from"), "the times are a model's");
        disk.device.scope = Scope::Device;
        assert!(text(&disk, 80).contains("profits from at once: 16\n"), "{}", text(&disk, 80));
    }

    #[test]
    fn the_plot_keeps_to_its_width_and_shows_all_curves() {
        for width in [0, 40, 80, 120, 1000] {
            let plot = plot(&disk(), width);
            let widest = plot.lines().take(ROWS + 2).map(|l| l.chars().count()).max().unwrap();
            assert!(widest <= width.clamp(WIDTH_MIN, WIDTH_MAX), "{widest} columns of {width}:\n{plot}");
            assert_eq!(plot.lines().count(), ROWS + 3, "{plot}");
            assert!(plot.contains('#') && plot.contains('·'), "{plot}");
        }
        // Larger requests are higher: the last column's marks are above the first's.
        let plot = plot(&disk(), 80);
        let row_of = |c: char| plot.lines().position(|l| l.contains(c));
        assert!(row_of('#') < Some(3), "{plot}");
    }

    #[test]
    fn nothing_to_plot_is_no_plot() {
        let mut none = disk();
        none.raw.points.clear();
        assert_eq!(plot(&none, 80), "");
        let mut flat = disk();
        flat.raw.points.iter_mut().for_each(|p| p.median_ns = 5000);
        assert!(plot(&flat, 80).contains('#'));
    }
}
