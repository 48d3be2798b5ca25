//! The report as text: a table for the terminal, Markdown for the document.

use std::fmt::Write;

use super::report::{CellRow, ClaimRow, FigureReport, Report};
use impresario_base::units::show_bytes;

/// Heading of the table of claims.
pub const CLAIMS_HEAD: [&str; 4] = ["claim", "paper", "ours (interval)", "verdict"];

/// Headings of the table of measures.
pub const CELLS_HEAD: [&str; 16] = [
    "case",
    "makespan, s",
    "mean task, s",
    "variance, s²",
    "interference",
    "least MB/s",
    "fairness",
    "device busy",
    "accesses",
    "access, ms",
    "access size",
    "at servers",
    "from I/O nodes",
    "batch",
    "outstanding",
    "cache hit",
];

/// Ours with its interval, in the unit of the claim, and the note.
pub fn ours(row: &ClaimRow) -> String {
    let Some(i) = &row.ours else { return "–".into() };
    let value = |v| row.says.value(v);
    let spread = match i.n {
        0 => return "–".into(),
        1 => "one run".to_string(),
        _ => format!("{} … {}", value(i.low), value(i.high)),
    };
    let note = if row.note.is_empty() { String::new() } else { format!("; {}", row.note) };
    format!("{} ({spread}{note})", value(i.mean))
}

/// The verdict with its reason, in Markdown.
fn verdict(row: &ClaimRow) -> String {
    if row.reason.is_empty() { format!("**{}**", row.verdict) } else { format!("**{}**: {}", row.verdict, row.reason) }
}

/// The cells of a row of measures.
pub fn measures(row: &CellRow) -> Vec<String> {
    let i = &row.inside;
    let bytes = |b: f64| if b > 0.0 { show_bytes(b) } else { "–".into() };
    let half = (row.makespan_s.high - row.makespan_s.low) / 2.0;
    let span = if half.is_finite() {
        format!("{} ± {}", short(row.makespan_s.mean), short(half))
    } else {
        short(row.makespan_s.mean)
    };
    vec![
        row.key.clone(),
        span,
        short(row.task_mean_s),
        short(row.task_variance_s2),
        row.interference.map_or("–".into(), |f| format!("{f:.2}")),
        short(row.least_throughput / 1e6),
        format!("{:.3}", row.fairness),
        format!("{:.0} %", i.busy * 100.0),
        format!("{:.0}", i.accesses),
        format!("{:.2}", i.access_ms),
        bytes(i.access_bytes),
        bytes(i.server_bytes),
        bytes(i.io_node_bytes),
        bytes(i.batch_bytes),
        format!("{:.1}", i.concurrency),
        format!("{:.0} %", i.cache_hit * 100.0),
    ]
}

/// Three significant digits.
pub fn short(v: f64) -> String {
    let size = v.abs();
    match size {
        _ if !v.is_finite() => "–".into(),
        _ if size >= 100.0 => format!("{v:.0}"),
        _ if size >= 10.0 => format!("{v:.1}"),
        _ if size >= 1.0 => format!("{v:.2}"),
        _ if size >= 0.001 => format!("{v:.3}"),
        _ if size == 0.0 => "0".into(),
        _ => format!("{v:.1e}"),
    }
}

/// One sentence on what was run.
pub fn effort(report: &Report) -> String {
    let scale = if report.divide > 1 {
        format!("Volumes and caches divided by {}: verdicts of a trial, not of the papers' parameters. ", report.divide)
    } else {
        String::new()
    };
    let counts: Vec<String> = report.counts().iter().map(|(v, n)| format!("{n} {v}")).collect();
    format!(
        "{scale}{} simulations, {:.1} million requests. {} claims: {}.",
        report.simulations,
        report.operations as f64 / 1e6,
        report.figures.iter().map(|f| f.claims.len()).sum::<usize>(),
        counts.join(", ")
    )
}

/// For the terminal.
pub fn terminal(report: &Report) -> String {
    let mut out = String::new();
    for f in &report.figures {
        _ = writeln!(out, "{}", f.title);
        for c in &f.claims {
            _ = writeln!(out, "  {:<26} {}", c.verdict, c.text);
            let reason = if c.reason.is_empty() { String::new() } else { format!(" ({})", c.reason) };
            _ = writeln!(out, "  {:<26} paper {}, ours {}{reason}", "", c.says.show(), ours(c));
        }
        out.push('\n');
    }
    _ = writeln!(out, "{}", effort(report));
    for complaint in &report.complaints {
        _ = writeln!(out, "NOT WELL: {complaint}");
    }
    out
}

/// The report: the claims of all figures, then the measures of all cells.
pub fn markdown(report: &Report) -> String {
    let mut out = format!("{}\n", effort(report));
    for f in &report.figures {
        _ = write!(
            out,
            "\n### {}\n\n`lab/papers/{}.toml`, {} repetitions, intervals of {} %.\n\n",
            f.title,
            f.id,
            f.repetitions,
            100.0 * f.confidence
        );
        row(&mut out, CLAIMS_HEAD.map(String::from));
        row(&mut out, CLAIMS_HEAD.map(|_| "---".to_string()));
        for c in &f.claims {
            row(&mut out, [format!("`{}`: {}", c.id, c.text), c.says.show(), ours(c), verdict(c)]);
        }
    }
    for complaint in &report.complaints {
        _ = write!(out, "\nNot well: {complaint}\n");
    }
    out
}

/// The measures of all cells as Markdown.
pub fn markdown_measures(report: &Report) -> String {
    let mut out = String::new();
    for f in &report.figures {
        _ = write!(out, "\n### {}\n\n", f.title);
        out += &measures_table(f);
    }
    out
}

fn measures_table(f: &FigureReport) -> String {
    let mut out = String::new();
    row(&mut out, CELLS_HEAD.map(String::from));
    row(&mut out, CELLS_HEAD.map(|_| "---".to_string()));
    for c in &f.cells {
        row(&mut out, measures(c));
    }
    out
}

/// A row of a Markdown table.
pub(super) fn row(out: &mut String, cells: impl IntoIterator<Item = String>) {
    out.push('|');
    for cell in cells {
        _ = write!(out, " {} |", cell.replace('|', "\\|"));
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::agreement::{Agreement, Says};
    use impresario_base::statistics::Interval;

    #[test]
    fn ours_is_told_with_its_interval_and_case() {
        let mut row = ClaimRow {
            id: "x".into(),
            text: "x".into(),
            says: Says::Gain(0.28),
            ours: Some(Interval { mean: 0.25, low: 0.2, high: 0.3, n: 8 }),
            note: "strided".into(),
            verdict: Agreement::Agrees,
            reason: String::new(),
        };
        assert_eq!(ours(&row), "+25.0 % (+20.0 % … +30.0 %; strided)");
        row.ours = Some(Interval { mean: 0.25, low: f64::NEG_INFINITY, high: f64::INFINITY, n: 1 });
        assert_eq!(ours(&row), "+25.0 % (one run; strided)");
        row.ours = None;
        assert_eq!(ours(&row), "–");
    }

    #[test]
    fn numbers_keep_three_digits() {
        let shown = [1234.5, 12.34, 1.234, 0.01234, 0.0001234, 0.0, f64::INFINITY].map(short);
        assert_eq!(shown, ["1234", "12.3", "1.23", "0.012", "1.2e-4", "0", "–"]);
    }
}
