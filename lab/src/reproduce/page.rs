//! The report as one page with the papers' plots.

use super::campaign::Campaign;
use super::claim::{Table, cases};
use super::figure::{Figure, Metadata, Plot, Segment};
use super::report::Report;
use super::text;
use impresario_base::statistics::Interval;
use impresario_workload::report::{Bar, Curve, Page};

/// The page.
pub fn page(figures: &[&Figure], campaign: &Campaign, report: &Report) -> String {
    let mut page = Page::new("The papers' experiments, reproduced");
    page.text(&text::effort(report));
    page.note(
        "“agrees”: same sign and the whole interval within a third of the paper's figure (without a sign: within a third); \
         “same sign”, “opposite sign”: for certain, by the interval; “differs”: more than a third away; “unresolved”: the \
         interval lies on both sides; “not tested”: our runs are no evidence, with the reason. Machines and assumptions: lab/papers.",
    );
    page.list(&report.complaints);
    let none = Default::default();
    for (figure, f) in figures.iter().zip(&report.figures) {
        page.heading(&f.title);
        let claims = f
            .claims
            .iter()
            .map(|c| vec![c.text.clone(), c.says.show(), text::ours(c), format!("{}\u{a0}{}", c.verdict, c.reason)]);
        page.table(&text::CLAIMS_HEAD, &claims.collect::<Vec<_>>());
        let table = Table { runs: campaign.figures.get(figure.id).unwrap_or(&none) };
        for plot in &figure.metadata.plots {
            draw(&mut page, &figure.metadata, plot, &table);
        }
        page.note("Assumed where the paper is silent:").list(&f.assumptions);
        page.table(&text::CELLS_HEAD, &f.cells.iter().map(text::measures).collect::<Vec<_>>());
    }
    page.html()
}

/// A short label: what distinguishes a case from the others.
fn label(key: &str, cases: &[Vec<String>], at: usize) -> String {
    if cases.len() > 1 { cases[at].join(", ") } else { key.into() }
}

fn draw(page: &mut Page, metadata: &Metadata, plot: &Plot, table: &Table<'_>) {
    let metric = |r: &super::campaign::Run| plot.of.of(r);
    for (key, lines) in plot.bars.iter().map(|k| (k, false)).chain(plot.lines.iter().map(|k| (k, true))) {
        let Ok(segments) = metadata.segments(key) else { continue };
        let cases = cases(&segments);
        let filled: Vec<String> = cases.iter().map(|case| fill(&segments, case)).collect();
        if lines {
            let shown: Vec<(&[String], Option<f64>)> =
                cases.iter().zip(&filled).map(|(c, k)| (&c[..], table.mean(k, metric))).collect();
            draw_lines(page, plot, &shown);
            continue;
        }
        let bars = filled.iter().enumerate().filter_map(|(at, k)| {
            let mean = Interval::of(&table.values(k, metric)?);
            Some(Bar::of(label(k, &cases, at), &mean, text::short(mean.mean)))
        });
        page.text(&plot.what).bars(&plot.what, &bars.collect::<Vec<_>>());
    }
}

/// The key of a case.
fn fill(segments: &[Segment], case: &[String]) -> String {
    let mut case = case.iter();
    let level = |s: &Segment| match s {
        Segment::Level(level) => level.clone(),
        _ => case.next().cloned().unwrap_or_default(),
    };
    segments.iter().map(level).collect::<Vec<_>>().join("/")
}

/// Curves over the first level of each case.
fn draw_lines(page: &mut Page, plot: &Plot, cases: &[(&[String], Option<f64>)]) {
    let (mut axis, mut names): (Vec<&String>, Vec<String>) = (Vec::new(), Vec::new());
    for (case, _) in cases {
        let Some((first, rest)) = case.split_first() else { continue };
        if !axis.contains(&first) {
            axis.push(first);
        }
        if !names.contains(&rest.join(", ")) {
            names.push(rest.join(", "));
        }
    }
    let all = || cases.iter().filter_map(|c| c.1);
    let high = all().fold(0.0, f64::max).max(1e-12);
    let low = if plot.log { all().filter(|v| *v > 0.0).fold(high, f64::min) / 1.5 } else { 0.0 };
    let place = |v: f64| if plot.log { (v / low).ln() / (high / low).ln() } else { v / high };
    let x = |i: usize| if axis.len() > 1 { i as f64 / (axis.len() - 1) as f64 } else { 0.5 };
    let curve = |name: &String| {
        let of = cases.iter().filter(|(case, _)| case.get(1..).is_some_and(|rest| rest.join(", ") == *name));
        let point =
            |(case, v): &(&[String], Option<f64>)| Some((x(axis.iter().position(|a| **a == case[0])?), place((*v)?)));
        Curve { label: name.clone(), points: of.filter_map(point).collect(), ..Curve::default() }
    };
    let lines: Vec<Curve> = names.iter().map(curve).collect();
    let marks: Vec<(f64, String)> = axis.iter().enumerate().map(|(i, a)| (x(i), (*a).clone())).collect();
    let heights: Vec<(f64, String)> = (0..=4)
        .map(|q| {
            let part = f64::from(q) / 4.0;
            let v = if plot.log { low * (high / low).powf(part) } else { high * part };
            (part, text::short(v))
        })
        .collect();
    page.text(&plot.what).lines(&plot.what, &lines, &marks, &heights);
}
