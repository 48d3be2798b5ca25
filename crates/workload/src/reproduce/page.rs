//! The report as one page with the papers' plots.

use super::campaign::Campaign;
use super::claim::Table;
use super::figure::{Figure, Plot};
use super::report::Report;
use super::text;
use crate::report::{Bar, Line, Page};
use crate::stats::mean;

/// The page.
pub fn page(figures: &[&Figure], campaign: &Campaign, report: &Report) -> String {
    let mut page = Page::new("The papers' experiments, reproduced");
    page.text(&text::effort(report));
    page.note(
        "“agrees”: same sign and the whole interval within a third of the paper's figure (without a sign: within a third); \
         “same sign”, “opposite sign”: for certain, by the interval; “differs”: more than a third away; “unresolved”: the \
         interval lies on both sides. Machines and assumptions: scenarios/papers.",
    );
    page.list(&report.complaints);
    let none = Default::default();
    for (figure, f) in figures.iter().zip(&report.figures) {
        page.heading(&format!("{}, {}", f.paper, f.title));
        let claims = f.claims.iter().map(|c| vec![c.text.clone(), c.says.show(), text::ours(c), c.verdict.to_string()]);
        page.table(&text::CLAIMS_HEAD, &claims.collect::<Vec<_>>());
        let table = Table { runs: campaign.figures.get(figure.id).unwrap_or(&none) };
        for plot in (figure.plots)() {
            draw(&mut page, &plot, &table);
        }
        page.note("Assumed where the paper is silent:").list(&f.assumptions);
        page.table(&text::CELLS_HEAD, &f.cells.iter().map(text::measures).collect::<Vec<_>>());
    }
    page.html()
}

fn draw(page: &mut Page, plot: &Plot, table: &Table<'_>) {
    match plot {
        Plot::Bars { what, bars, metric } => {
            let bars: Vec<Bar> = bars
                .iter()
                .filter_map(|(label, key, baseline)| {
                    let values = table.values(key, *metric)?;
                    let i = super::verdict::interval(&values, 0.95);
                    Some(Bar {
                        label: label.clone(),
                        value: i.mean,
                        text: text::short(i.mean),
                        range: (i.n > 1).then_some((i.low, i.high)),
                        baseline: *baseline,
                    })
                })
                .collect();
            page.text(what).bars(what, &bars);
        }
        Plot::Lines { what, axis, curves, metric, log } => {
            let values: Vec<(&String, Vec<Option<f64>>)> = curves
                .iter()
                .map(|(name, keys)| (name, keys.iter().map(|k| table.values(k, *metric).map(|v| mean(&v))).collect()))
                .collect();
            let all = || values.iter().flat_map(|(_, v)| v.iter().flatten().copied());
            let high = all().fold(0.0, f64::max).max(1e-12);
            let low = if *log { all().filter(|v| *v > 0.0).fold(high, f64::min) / 1.5 } else { 0.0 };
            let place = |v: f64| if *log { (v / low).ln() / (high / low).ln() } else { v / high };
            let x = |i: usize| if axis.len() > 1 { i as f64 / (axis.len() - 1) as f64 } else { 0.5 };
            let lines: Vec<Line> = values
                .iter()
                .map(|(name, v)| Line {
                    label: (*name).clone(),
                    points: v.iter().enumerate().filter_map(|(i, v)| Some((x(i), place((*v)?)))).collect(),
                    whiskers: Vec::new(),
                    fit: Vec::new(),
                })
                .collect();
            let marks: Vec<(f64, String)> = axis.iter().enumerate().map(|(i, a)| (x(i), a.clone())).collect();
            let heights: Vec<(f64, String)> = (0..=4)
                .map(|q| {
                    let part = f64::from(q) / 4.0;
                    let v = if *log { low * (high / low).powf(part) } else { high * part };
                    (part, text::short(v))
                })
                .collect();
            page.text(what).lines(what, &lines, &marks, &heights);
        }
    }
}
