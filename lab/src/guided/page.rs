//! What the experiments of guided I/O showed: a table for the terminal and a page with plots.

use super::suite::{EXPERIMENTS, PAPER, Row};
use impresario_base::units::show_bytes;
use impresario_workload::compare::show_gain;
use impresario_workload::report::{Bar, Marks, Page};
use impresario_workload::simulated::{byte_axis, time_line};

/// Time, device reads and bytes of every variant, gains and verdicts.
pub fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    for (name, what) in EXPERIMENTS {
        let own: Vec<&Row> = rows.iter().filter(|r| r.experiment == name).collect();
        if own.is_empty() {
            continue;
        }
        out += &format!("\n{name}: {what}\n");
        for row in own {
            out += &format!("  {} at a time: {}\n", row.instances, row.title);
            for (variant, label) in row.measured.variants.iter().enumerate() {
                let m = &row.measured;
                let (reads, bytes) = (m.median_reads(variant), show_bytes(m.median_bytes(variant)));
                out +=
                    &format!("    {label:<30} {:>8.2} s {reads:>8.0} device reads {bytes:>10}\n", m.median_s(variant));
            }
            row.measured.kills().iter().for_each(|line| out += &format!("    {line}\n"));
            saved(row).iter().for_each(|line| out += &format!("    {line}\n"));
            row.claims.iter().for_each(|(claim, verdict)| out += &format!("    {claim}: {verdict}\n"));
        }
    }
    out
}

/// What each variant saved beside the first, the last one first, and what the paper says of it.
fn saved(row: &Row) -> Vec<String> {
    let mut lines = vec![format!("time saved: {}", show_gain(&row.gain))];
    for variant in (1..row.measured.variants.len().saturating_sub(1)).rev() {
        let gain = show_gain(&row.measured.gain(variant, 0));
        lines.push(format!("time saved, {}: {gain}", row.measured.variants[variant]));
    }
    lines.extend(PAPER.iter().filter(|(of, _)| *of == row.experiment).map(|(_, told)| format!("paper: {told}")));
    lines
}

/// The page: for each experiment how the program reads (as Fig. 4 of mercury-2014), the times (as Figs. 5 and 6) and the
/// requests at the device (as Fig. 7).
pub fn page(rows: &[Row]) -> String {
    let mut page = Page::new("Guided I/O: unmodified programs, with and without hints");
    page.text(
        "Each program ran from a cold cache, with hints that were planned from one recorded run, and without. Bars are \
         medians; the line at the end spans all runs. Shorter is better.",
    );
    page.note(
        "“slow disk” is a loop device limited to 200 requests and 200 MiB a second for the program, the advice manager \
         and everything they start. The modelled disk is a model of a 7200 rpm drive.",
    );
    for (name, what) in EXPERIMENTS {
        let own: Vec<&Row> = rows.iter().filter(|r| r.experiment == name).collect();
        if own.is_empty() {
            continue;
        }
        page.heading(&format!("{name}: {what}"));
        type Of = fn(&impresario_workload::programs::Run) -> f64;
        let plots: [(&str, Of, &str); 2] =
            [("Time", |r| r.wall_s, "s"), ("Requests at the device", |r| r.device_reads as f64, "reads")];
        for (title, of, unit) in plots {
            let mut bars = Vec::new();
            for row in &own {
                for (variant, label) in row.measured.variants.iter().enumerate() {
                    let values = row.measured.values(variant, of);
                    let middle = impresario_workload::stats::median(&values);
                    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
                    let high = values.iter().copied().fold(0.0, f64::max);
                    let digits = if unit == "s" { 2 } else { 0 };
                    bars.push(Bar {
                        label: label_of(row, label, own.len()),
                        value: middle,
                        text: format!("{middle:.digits$} {unit}"),
                        range: (values.len() > 1).then_some((low, high)),
                        baseline: variant == 0,
                    });
                }
            }
            page.text(title).bars(&format!("{title}, {name}"), &bars);
        }
        for (at, row) in own.into_iter().enumerate() {
            page.note(&row.title);
            // Files of all sizes are read in one way.
            if row.instances == 1 && (at == 0 || name != "sizes") {
                profile(&mut page, row);
            }
            let mut lines = saved(row);
            lines.extend(row.measured.kills());
            lines.extend(row.claims.iter().map(|(claim, verdict)| format!("{claim}: {verdict}")));
            lines.extend(row.plan.lines().filter(|l| !l.trim().is_empty()).map(|l| format!("plan: {l}")));
            page.list(&lines);
        }
    }
    page.html()
}

/// Where the program read its file when, in the recorded run.
fn profile(page: &mut Page, row: &Row) {
    let p = &row.profile;
    let Some(end_s) = p.at.iter().map(|(at, took, _)| at + took).reduce(f64::max) else { return };
    let top = p.at.iter().map(|(_, _, offset)| *offset).max().unwrap_or(0);
    let ((x_end, x_marks), (y_end, y_marks)) = (time_line(end_s), byte_axis(top as f64, ""));
    let at = p.at.iter().map(|(at, took, offset)| (at / x_end, *offset as f64 / y_end, took / x_end)).collect();
    let label = format!("{} reads", p.reads);
    let mean = show_bytes(p.bytes as f64 / p.reads.max(1) as f64);
    page.text(&format!("How it reads without hints: place in the file over time; {label} of {mean} on average"));
    let what = format!("Place in the file over time, {}", row.title);
    page.places(&what, &[Marks { label, at }], &x_marks, &y_marks);
}

fn label_of(row: &Row, variant: &str, rows: usize) -> String {
    match (rows, row.experiment.as_str()) {
        (1, _) => variant.into(),
        (_, "instances") => format!("{variant}, {} at a time", row.instances),
        (_, "sizes") => format!("{variant}, {}", row.title.split(':').next().unwrap_or_default()),
        _ => {
            let program = row.title.split_whitespace().find(|word| !word.contains("python")).unwrap_or_default();
            let program = program.rsplit('/').next().unwrap_or_default();
            format!("{variant}, {program}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::suite::Profile;
    use super::*;
    use impresario_workload::programs::{Measured, Run};
    use impresario_workload::stats::Verdict;

    #[test]
    fn table_and_page_tell_every_row_and_verdict() {
        let run = |variant, pair, wall_s| Run { variant, pair, wall_s, device_reads: 1000, device_bytes: 1 << 20 };
        let measured = Measured {
            variants: vec!["without".into(), "guided".into()],
            runs: vec![run(0, 0, 4.0), run(1, 0, 2.0), run(0, 1, 4.2), run(1, 1, 2.2)],
            killed: vec![0, 3],
            stopped: false,
        };
        let rows: Vec<Row> = [1, 2]
            .map(|instances| Row {
                experiment: "instances".into(),
                title: "strided data".into(),
                instances,
                gain: measured.gain(1, 0),
                measured: measured.clone(),
                plan: "data: blocks of 1 MiB".into(),
                profile: Profile { reads: 2, bytes: 20, at: vec![(0.0, 0.1, 0), (0.2, 0.1, 1 << 20)] },
                claims: vec![("faster".into(), Verdict::Unresolved)],
            })
            .into();
        let (text, html) = (table(&rows), page(&rows));
        for wanted in [
            "4.10 s",
            "2.10 s",
            "1000 device reads",
            "faster: unresolved",
            "1 at a time",
            "2 at a time",
            "guided: 3 more runs",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
        assert_eq!(html.matches("<svg").count(), 3, "the way of reading is drawn once");
        assert!(html.contains("2 reads of 10 B on average"));
        assert_eq!(html.matches("<rect").count(), 8);
        assert!(html.contains("plan: data: blocks of 1 MiB") && !html.contains("http"));
    }

    #[test]
    fn files_of_all_sizes_stand_beside_what_the_paper_says() {
        let run = |variant, pair, wall_s| Run { variant, pair, wall_s, device_reads: 500, device_bytes: 1 << 20 };
        let measured = Measured {
            variants: ["without", "the paper's hints", "guided"].map(String::from).to_vec(),
            runs: (0..2).flat_map(|pair| [run(0, pair, 4.0), run(1, pair, 3.0), run(2, pair, 1.0)]).collect(),
            killed: vec![0; 3],
            stopped: false,
        };
        let rows: Vec<Row> = [5, 95]
            .map(|gb| Row {
                experiment: "sizes".into(),
                title: format!("{gb} GB of the paper's, disk: {gb} MB"),
                instances: 1,
                gain: measured.gain(2, 0),
                measured: measured.clone(),
                plan: String::new(),
                profile: Profile { reads: 1, bytes: 20, at: vec![(0.0, 0.1, 0)] },
                claims: Vec::new(),
            })
            .into();
        let (text, html) = (table(&rows), page(&rows));
        for (wanted, times) in
            [("time saved: +75.0 %", 2), ("the paper's hints: +25.0 %", 2), ("paper: up to about 50 %", 2)]
        {
            assert_eq!(text.matches(wanted).count(), times, "{wanted}: {text}");
        }
        assert_eq!(html.matches("<svg").count(), 3, "two plots and one way of reading");
        assert!(html.contains("guided, 95 GB of the paper") && html.contains("paper: up to about 50 %"));
    }
}
