//! The results as a table of text: a line for each point of the sweep.

use std::fmt::Write;

use super::Results;
use super::summary::{LAYERS, Summary};
use crate::stats::Interval;
use impresario_base::units::{show_bytes, show_seconds};

/// The whole table, with its title.
pub fn table(results: &Results) -> String {
    let (head, rows) = cells(results);
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in &rows {
        row.iter().zip(&mut widths).for_each(|(cell, width)| *width = (*width).max(cell.chars().count()));
    }
    let line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(i, (cell, width))| {
            // Values are words more often than numbers: to the left; figures to the right.
            let left = i < results.keys.len().max(1);
            if left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    let mut out = format!("{}\n{}\n", results.title, line(&head));
    for row in &rows {
        // Writing to a string cannot fail.
        _ = writeln!(out, "{}", line(row));
    }
    if results.complete() < results.asked() {
        _ = writeln!(out, "{} of {} runs are complete", results.complete(), results.asked());
    }
    out
}

/// Head and rows.
pub fn cells(results: &Results) -> (Vec<String>, Vec<Vec<String>>) {
    let summaries: Vec<Summary> = results.points.iter().map(|p| Summary::of(&p.runs)).collect();
    let any = |f: &dyn Fn(&Summary) -> bool| summaries.iter().any(f);
    let (io_nodes, factors) = (any(&|s| s.sizes[1] > 0.0), any(&|s| s.interference.is_some()));
    let mut head = if results.keys.is_empty() { vec!["scenario".to_string()] } else { results.keys.clone() };
    head.extend(["makespan", "task time", "variance", "bandwidth"].map(String::from));
    let layers: Vec<usize> = (0..LAYERS.len()).filter(|i| *i != 1 || io_nodes).collect();
    head.extend(layers.iter().map(|i| LAYERS[*i].to_string()));
    head.extend(["fairness", "least"].map(String::from));
    if factors {
        head.push("interference".into());
    }
    head.extend(["failed", "violations"].map(String::from));
    let rows = results.points.iter().zip(&summaries).map(|(point, s)| {
        let mut row = if results.keys.is_empty() { vec!["as written".to_string()] } else { point.values.clone() };
        if point.runs.is_empty() {
            row.resize(head.len(), "–".into());
            return row;
        }
        row.push(spread(&s.makespan_s, show_seconds));
        row.push(show_seconds(s.task_mean_s.mean));
        row.push(show_variance(s.task_variance_s2.mean));
        row.push(format!("{}/s", show_bytes(s.bandwidth.mean)));
        row.extend(layers.iter().map(|i| show_bytes(s.sizes[*i])));
        row.extend([format!("{:.3}", s.fairness), format!("{}/s", show_bytes(s.least_throughput))]);
        if factors {
            row.push(s.interference.map_or("–".into(), |f| spread(&f, |x| format!("{x:.2}"))));
        }
        row.extend([s.failed.to_string(), s.violations.to_string()]);
        row
    });
    let rows = rows.collect();
    (head, rows)
}

/// A variance of times, with three digits that say something.
fn show_variance(s2: f64) -> String {
    if s2 == 0.0 || s2 >= 0.01 { format!("{s2:.3} s²") } else { format!("{s2:.1e} s²") }
}

/// A mean, and half of its 95 % interval where there is one.
pub fn spread(i: &Interval, show: impl Fn(f64) -> String) -> String {
    if i.n < 2 { show(i.mean) } else { format!("{} ± {}", show(i.mean), show(i.high - i.mean)) }
}
