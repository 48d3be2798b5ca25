//! The results as a page with plots, in one file that needs no network access.

use impresario_sim::outcome::Outcome;
use impresario_sim::sweep;

use super::plots::{axis, bandwidth, byte_axis, curve, means, name_of, served, short, time_axis, time_line, together};
use super::summary::{LAYERS, Summary};
use super::{DETAILED_POINTS, Results, table};
use crate::report::{Bar, Curve, Page};
use crate::stats::Interval;
use impresario_base::units::{show_bytes, show_seconds};

/// Points with bars; more are only in the table.
const BARS_MAX: usize = 60;

/// Data servers whose accesses are drawn.
const SERVERS_DRAWN: usize = 4;

/// A page of several studies.
pub fn page(title: &str, studies: &[Results]) -> String {
    let mut page = Page::new(title);
    page.note(
        "Simulated: virtual time on modelled clients, network, servers and devices, under the same scheduling code that \
         servers run. Lines at the ends of bars are 95 % intervals of the mean over the repetitions.",
    );
    for results in studies {
        add(&mut page, results);
    }
    page.html()
}

fn add(page: &mut Page, results: &Results) {
    page.heading(&results.title);
    let (points, complete) = (results.points.len(), results.complete());
    page.note(&format!(
        "{points} points, {} repetitions, {complete} of {} runs complete.",
        results.repetitions,
        results.asked()
    ));
    if !results.assumptions.is_empty() {
        page.text("Assumed:").list(&results.assumptions);
    }
    let violations = results.violations();
    if !violations.is_empty() {
        page.text("The laws did not hold; these results are not to be trusted:").list(&violations);
    }
    let (head, rows) = table::cells(results);
    page.table(&head, &rows);
    let run: Vec<(String, Summary)> = results
        .points
        .iter()
        .filter(|p| !p.runs.is_empty())
        .map(|p| (label(results, &p.values), Summary::of(&p.runs)))
        .collect();
    if run.len() > BARS_MAX {
        page.note(&format!("Plots are of the first {BARS_MAX} points."));
    }
    let run = &run[..run.len().min(BARS_MAX)];
    if run.is_empty() {
        return;
    }
    if run.len() > 1 {
        compared(page, results, run);
    }
    sizes(page, run);
    for point in results.points.iter().take(DETAILED_POINTS) {
        if let Some(run) = point.runs.first().filter(|r| r.repetition == 0) {
            let of = sweep::label(&results.keys, &point.values);
            let of = if of.is_empty() { String::new() } else { format!(", {of}") };
            over_time(page, &of, &run.outcome);
        }
    }
}

/// The points side by side.
fn compared(page: &mut Page, results: &Results, run: &[(String, Summary)]) {
    let seconds = |i: &Interval| show_seconds(i.mean);
    bars(page, "Makespan", run, |s| s.makespan_s, seconds);
    along(page, results);
    if run.iter().any(|(_, s)| s.interference.is_some()) {
        let factor = |s: &Summary| s.interference.unwrap_or(single(0.0));
        bars(page, "Interference: time together over time alone", run, factor, |i| format!("{:.2}", i.mean));
    }
    bars(page, "Bandwidth of all applications", run, |s| s.bandwidth, |i| format!("{}/s", show_bytes(i.mean)));
    bars(
        page,
        "Fairness over the applications: 1 when all got the same",
        run,
        |s| single(s.fairness),
        |i| format!("{:.3}", i.mean),
    );
    bars(
        page,
        "Distance between the offsets of consecutive requests to the servers",
        run,
        |s| single(s.offset_distance_bytes),
        |i| show_bytes(i.mean),
    );
    bars(
        page,
        "Requests outstanding at a data server",
        run,
        |s| single(s.server_concurrency),
        |i| format!("{:.2}", i.mean),
    );
}

/// A point's values, short enough to stand beside a bar.
fn label(results: &Results, values: &[String]) -> String {
    let text = if results.keys.is_empty() { "as written".to_string() } else { values.join(" ") };
    if text.chars().count() <= 30 { text } else { text.chars().take(29).chain(['…']).collect() }
}

/// A figure without an interval.
fn single(value: f64) -> Interval {
    Interval { mean: value, low: value, high: value, n: 1 }
}

fn bars(
    page: &mut Page,
    what: &str,
    run: &[(String, Summary)],
    value: impl Fn(&Summary) -> Interval,
    show: impl Fn(&Interval) -> String,
) {
    let bar = |(label, summary): &(String, Summary)| {
        let mean = value(summary);
        Bar::of(label, &mean, show(&mean))
    };
    page.text(what).bars(what, &run.iter().map(bar).collect::<Vec<_>>());
}

/// Mean request sizes at each layer, a group of bars per point.
fn sizes(page: &mut Page, run: &[(String, Summary)]) {
    let io_nodes = run.iter().any(|(_, s)| s.sizes[1] > 0.0);
    let layers: Vec<usize> = (0..LAYERS.len()).filter(|i| *i != 1 || io_nodes).collect();
    let most = run.iter().flat_map(|(_, s)| s.sizes).fold(0.0, f64::max);
    let (end, y_marks) = byte_axis(most, "");
    let last = (layers.len() - 1).max(1) as f64;
    let x_marks: Vec<_> = layers.iter().enumerate().map(|(i, l)| (i as f64 / last, LAYERS[*l].to_string())).collect();
    let line = |(label, s): &(String, Summary)| Curve {
        label: short(label),
        points: layers.iter().enumerate().map(|(i, l)| (i as f64 / last, s.sizes[*l] / end)).collect(),
        ..Curve::default()
    };
    let what = "Mean size of a request on its way from the clients to the devices";
    page.text(what).lines(what, &run.iter().take(8).map(line).collect::<Vec<_>>(), &x_marks, &y_marks);
}

/// If a key sweeps numbers: the makespan along it, with a curve for each combination of the other keys.
fn along(page: &mut Page, results: &Results) {
    let numbers = |k: usize| -> Option<Vec<f64>> {
        let values: Option<Vec<f64>> = results.points.iter().map(|p| p.values.get(k)?.parse::<f64>().ok()).collect();
        let values = values?;
        (values.iter().any(|v| *v != values[0]) && values.iter().all(|v| v.is_finite())).then_some(values)
    };
    let Some((key, x)) = (0..results.keys.len()).rev().find_map(|k| Some((k, numbers(k)?))) else { return };
    let mut curves: Vec<(String, Vec<(f64, Interval)>)> = Vec::new();
    for (point, x) in results.points.iter().zip(&x).filter(|(p, _)| !p.runs.is_empty()) {
        let others = point.values.iter().enumerate().filter(|(k, _)| *k != key).map(|(_, v)| v.as_str());
        let name = others.collect::<Vec<_>>().join(" ");
        let at = (*x, Summary::of(&point.runs).makespan_s);
        match curves.iter_mut().find(|(n, _)| *n == name) {
            Some((_, points)) => points.push(at),
            None => curves.push((name, vec![at])),
        }
    }
    let (low, high) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
    // Equal factors are evenly spread on an axis of powers.
    let log = low > 0.0 && high / low >= 16.0;
    let place = |v: f64| if log { (v / low).ln() / (high / low).ln() } else { (v - low) / (high - low) };
    let top =
        curves.iter().flat_map(|(_, p)| p).map(|(_, i)| if i.n > 1 { i.high } else { i.mean }).fold(0.0, f64::max);
    let (end, y_marks) = time_axis(top);
    let mut xs = x.clone();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let every = xs.len().div_ceil(10);
    let x_marks: Vec<_> = xs.iter().step_by(every).map(|v| (place(*v), format!("{v}"))).collect();
    let line = |(name, points): (String, Vec<(f64, Interval)>)| Curve {
        label: short(&name),
        points: points.iter().map(|(x, i)| (place(*x), i.mean / end)).collect(),
        whiskers: match points.iter().all(|(_, i)| i.n > 1) {
            true => points.iter().map(|(_, i)| (i.low.max(0.0) / end, i.high / end)).collect(),
            false => Vec::new(),
        },
        ..Curve::default()
    };
    let what = format!("Makespan along {}", results.keys[key]);
    let lines: Vec<Curve> = curves.into_iter().take(15).map(line).collect();
    page.text(&what).lines(&what, &lines, &x_marks, &y_marks);
}

/// One run over time.
fn over_time(page: &mut Page, of: &str, outcome: &Outcome) {
    let s = &outcome.series;
    if s.interval_s <= 0.0 {
        return;
    }
    if !of.is_empty() {
        page.heading(of.trim_start_matches(", "));
    }
    let (x_end, x_marks) = time_line(outcome.makespan_s);
    let many = together(s.server_queue.len());
    let interval_s = s.interval_s * many as f64;
    let curves: Vec<_> = bandwidth(outcome).into_iter().map(|(name, v)| (name, means(&v, many))).collect();
    let top = curves.iter().flat_map(|(_, v)| v).copied().fold(0.0, f64::max);
    let (y_end, y_marks) = byte_axis(top, "/s");
    let lines: Vec<Curve> = curves.into_iter().map(|(name, v)| curve(name, &v, interval_s, (x_end, y_end))).collect();
    page.text("Bandwidth over time");
    let what = format!("Bandwidth over time{of}");
    page.lines(&what, &lines, &x_marks, &y_marks);

    let mut plot = |what: &str, series: &[(&str, &Vec<f64>)]| {
        let series: Vec<_> = series.iter().map(|(name, v)| (*name, means(v, many))).collect();
        let top = series.iter().flat_map(|(_, v)| v.iter()).copied().fold(0.0, f64::max);
        if top == 0.0 {
            return;
        }
        let (y_end, y_marks) = axis(top, |n| if n.fract() == 0.0 { format!("{n}") } else { format!("{n:.2}") });
        let line = |(name, v): &(&str, Vec<f64>)| curve((*name).into(), v, interval_s, (x_end, y_end));
        page.text(what);
        let what = format!("{what}{of}");
        page.lines(&what, &series.iter().map(line).collect::<Vec<_>>(), &x_marks, &y_marks);
    };
    plot("Requests queued over time", &[("I/O nodes", &s.io_queue), ("data servers", &s.server_queue)]);
    plot("Clients served by a data server at once, over time", &[("clients", &s.server_concurrency)]);

    let mut servers: Vec<u16> = outcome.picture.iter().map(|p| p.server).collect();
    servers.sort_unstable();
    servers.dedup();
    for server in servers.iter().take(SERVERS_DRAWN) {
        let Some((groups, y_marks)) = served(outcome, *server, x_end) else { continue };
        let what = format!("Who was served when on data server {server}: place on the device over time");
        page.text(&what);
        let what = format!("{what}{of}");
        page.places(&what, &groups, &x_marks, &y_marks);
    }
    if servers.len() > SERVERS_DRAWN {
        page.note(&format!("{} more data servers are not drawn.", servers.len() - SERVERS_DRAWN));
    }
    if outcome.applications.len() > 1 {
        let rows = outcome.applications.iter().enumerate().take(BARS_MAX).map(|(i, a)| {
            let least = format!("{}/s", show_bytes(a.least_throughput));
            let latency = format!("{:.2} / {:.2} / {:.2} ms", a.latency_mean_ms, a.latency_p99_ms, a.latency_max_ms);
            let times = [show_seconds(a.time_s), show_seconds(a.task_mean_s)];
            let name = name_of(i, &outcome.applications);
            [vec![name], times.to_vec(), vec![show_bytes(a.bytes as f64), latency, least, a.failed.to_string()]]
                .concat()
        });
        let head = ["application", "time", "task time", "bytes", "latency: mean / 99 % / longest", "least", "failed"];
        page.table(&head, &rows.collect::<Vec<_>>());
    }
    if !outcome.faults.is_empty() {
        page.text("Faults as they happened:").list(&outcome.faults);
    }
}
