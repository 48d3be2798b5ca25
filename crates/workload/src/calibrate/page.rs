//! A calibration as a page: one HTML file with its plot inside.

use impresario_config::Calibration;
use impresario_config::calibration::Point;

use super::show::{CURVES, Scale};
use crate::report::{Curve, Page};
use impresario_base::units::{show_bytes, show_ns, show_seconds};

/// The page.
pub fn page(calibration: &Calibration) -> String {
    let Calibration { device, method, fit, raw, .. } = calibration;
    let mut page = Page::new(&format!("Calibration of {}", device.what));
    page.text(&format!("Times are of {}.", device.scope.explain()));
    let mut facts = vec![format!("Measured {} on {}", device.measured_at, device.host)];
    facts.extend(device.file_system.as_ref().map(|f| format!("File system: {f}")));
    facts.extend(device.block_device.as_ref().map(|b| format!("Block device: {b}")));
    facts.extend(device.model.as_ref().map(|m| format!("Model: {m}")));
    facts.extend(device.rotational.map(|r| format!("Rotating, as the kernel says: {}", if r { "yes" } else { "no" })));
    facts.push(format!(
        "Scratch space {}, {} of at most {}, points to ±{} %",
        show_bytes(method.region_bytes as f64),
        show_seconds(method.took_s),
        show_seconds(method.max_s),
        method.spread_goal_percent
    ));
    facts.extend(calibration.depth().map(|depth| format!("Requests that it profits from at once: {depth}")));
    page.list(&facts);
    method.notes.iter().for_each(|note| _ = page.note(note));

    page.heading("Time of a request by its size");
    let curves: Vec<Vec<Point>> = CURVES.iter().map(|(op, pattern, ..)| calibration.curve(*op, *pattern, 1)).collect();
    if let Some(scale) = Scale::of(curves.iter().flatten()) {
        const FIT_POINTS: u32 = 60;
        let place = |size: u64, ns: f64| (scale.x(size), scale.y(ns));
        let mut lines = Vec::new();
        for ((op, pattern, _, name), points) in CURVES.iter().zip(&curves) {
            let whiskers = points.iter().map(|p| {
                let (ns, part) = (p.median_ns as f64, p.spread_percent / 100.0);
                (scale.y(ns * (1.0 - part).max(0.01)), scale.y(ns * (1.0 + part)))
            });
            lines.push(Curve {
                label: (*name).into(),
                points: points.iter().map(|p| place(p.size_bytes, p.median_ns as f64)).collect(),
                whiskers: whiskers.collect(),
                fit: fit.iter().find(|f| (f.op, f.pattern) == (*op, *pattern)).map_or(Vec::new(), |f| {
                    let sizes = (0..=FIT_POINTS).map(|i| scale.size_at(f64::from(i) / f64::from(FIT_POINTS)));
                    sizes.map(|size| place(size, f.ns(size))).filter(|(_, y)| (0.0..=1.0).contains(y)).collect()
                }),
            });
        }
        let sizes = curves.first().map_or(&[][..], Vec::as_slice).iter().step_by(2);
        let x_marks: Vec<_> = sizes.map(|p| (scale.x(p.size_bytes), show_bytes(p.size_bytes as f64))).collect();
        let y_marks: Vec<_> = (0..=5).map(|i| f64::from(i) / 5.0).map(|y| (y, show_ns(scale.ns_at(y)))).collect();
        page.lines("Time of a request by its size, both in powers; dashed: the fits", &lines, &x_marks, &y_marks);
        page.note("Both axes are logarithmic. Whiskers are 95 % intervals of the median; dashed lines are the fits.");
    }

    page.heading("Fits");
    let rows: Vec<Vec<String>> = fit
        .iter()
        .map(|f| {
            vec![
                format!("{} {}", f.pattern, f.op),
                show_ns(f.fixed_ns as f64),
                format!("{} ps", f.ps_per_byte),
                format!("{:.1} %", f.error_median_percent),
                format!("{:.1} %", f.error_max_percent),
            ]
        })
        .collect();
    page.table(&["", "fixed", "a byte", "error, median", "error, most"], &rows);

    page.heading("All points");
    let rows: Vec<Vec<String>> = raw
        .points
        .iter()
        .map(|p| {
            vec![
                format!("{} {}", p.pattern, p.op),
                p.streams.to_string(),
                show_bytes(p.size_bytes as f64),
                show_ns(p.median_ns as f64),
                show_ns(p.mean_ns as f64),
                format!("±{:.1} %", p.spread_percent),
                p.samples.to_string(),
                format!("{:.1}", p.size_bytes as f64 * f64::from(p.streams) * 1e3 / p.mean_ns as f64),
            ]
        })
        .collect();
    page.table(&["", "streams", "size", "median", "mean", "spread", "requests", "MB/s"], &rows);
    page.html()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_holds_plot_fits_and_points_and_refers_to_nothing_outside() {
        let html = page(&super::super::show::tests::disk());
        for wanted in
            ["MODELLED disk", "modelled &lt;disk&gt;", "sequential write", "a note", "16 MiB", "<polyline", "±2.0 %"]
        {
            assert!(html.contains(wanted), "{wanted} is missing");
        }
        assert_eq!(html.matches("<polyline").count(), 8, "four curves and four fits");
        for foreign in ["http:", "https:", "src=", "href=", "<script", "url(", "NaN"] {
            assert!(!html.contains(foreign), "{foreign} is in the page");
        }
    }
}
