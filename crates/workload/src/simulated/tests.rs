//! Studies are run for real, and their results do not depend on the number of threads.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use impresario_sim::file::Overrides;
use impresario_sim::model::Operation;
use impresario_trace::{Builder, FileInfo, Header, Origin, Record, TraceOp};

use super::*;

const STUDY: &str = "title = \"A <study>\"\nassumptions = [\"none\"]\nrepetitions = 2\n\
    [servers]\ncount = 2\n\
    [[application]]\nname = \"a\"\nprocesses = 3\npattern = \"strided\"\nrequest_bytes = 4096\nrequests = 8\n\
    [[application]]\nname = \"b\"\nop = \"write\"\nprocesses = 2\nrequests = 4\n\
    [sweep]\n\"servers.policy\" = [\"fifo\", \"mlf\"]\n\"servers.in_flight\" = [1, 32]\n";

fn study(text: &str) -> Study {
    let no_trace = &mut |_: &str| Err("none".to_string());
    Study::read(text, Path::new("s.toml"), &Overrides::default(), no_trace).unwrap_or_else(|e| panic!("{e}"))
}

fn run_on(threads: usize, interference: bool) -> Results {
    let options = Options { threads, interference, checks: true };
    run("s", &study(STUDY), &options, &Stop::new(), &|_| {}).unwrap()
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let text = |results: &Results| {
        let (json, csv) = (serde_json::to_string(results).unwrap(), csv::text(results).unwrap());
        [json, csv, table::table(results), page::page("p", std::slice::from_ref(results))]
    };
    let one = run_on(1, false);
    assert_eq!(text(&one), text(&run_on(3, false)));
    assert_eq!((one.complete(), one.asked()), (8, 8));
    assert_eq!(one.violations(), [""; 0]);
    for point in &one.points {
        let seeds: Vec<u64> = point.runs.iter().map(|r| r.outcome.seed).collect();
        assert_eq!(seeds, [1, 2]);
        assert!(!point.runs[0].outcome.picture.is_empty() && point.runs[1].outcome.picture.is_empty());
        assert!(point.runs.iter().all(|r| r.outcome.operations == 3 * 8 + 2 * 4 && r.outcome.failed == 0));
    }
}

#[test]
fn interference_is_time_together_over_time_alone() {
    let results = run_on(2, true);
    for point in &results.points {
        let run = &point.runs[0];
        assert_eq!(run.alone_s.len(), 2);
        // With one disk access at a time no application is faster beside others.
        let factor = summary::interference(run).unwrap();
        assert!(factor > 1.0 && factor < 4.0, "{factor}");
        let by_hand =
            run.outcome.applications.iter().zip(&run.alone_s).map(|(a, alone)| a.time_s / alone).sum::<f64>() / 2.0;
        assert!((factor - by_hand).abs() < 1e-12);
    }
    assert!(table::table(&results).lines().nth(1).unwrap().contains("interference"));
}

#[test]
fn a_wish_to_stop_leaves_what_is_complete() {
    let stop = Stop::new();
    let seen = AtomicU32::new(0);
    let tick = |part: Progress| {
        seen.fetch_add(1, Ordering::Relaxed);
        assert!((0.0..=1.0).contains(&part.part) && part.runs == 8);
        if part.done >= 3 {
            stop.set();
        }
    };
    let options = Options { threads: 1, interference: false, checks: false };
    let results = run("s", &study(STUDY), &options, &stop, &tick).unwrap();
    assert_eq!(results.complete(), 3);
    assert!(seen.load(Ordering::Relaxed) >= 3);
    let text = table::table(&results);
    assert!(text.contains("3 of 8 runs are complete") && text.contains("–"), "{text}");
    // A page of it can be made as well.
    assert!(page::page("p", &[results]).contains("3 of 8 runs complete"));
}

#[test]
fn the_csv_has_a_line_for_each_application_of_each_run() {
    let results = run_on(2, false);
    let text = csv::text(&results).unwrap();
    let mut reader = ::csv::Reader::from_reader(text.as_bytes());
    let head = reader.headers().unwrap().clone();
    assert_eq!(head.iter().take(3).collect::<Vec<_>>(), ["servers.policy", "servers.in_flight", "repetition"]);
    let column = |name: &str| head.iter().position(|h| h == name).unwrap();
    let rows: Vec<_> = reader.records().map(Result::unwrap).collect();
    assert_eq!(rows.len(), 4 * 2 * 2);
    assert_eq!(rows.iter().filter(|r| &r[column("name")] == "b").count(), 8);
    let first = &results.points[0].runs[0].outcome;
    assert_eq!(rows[0][column("makespan_s")].parse::<f64>().unwrap(), first.makespan_s);
    assert_eq!(rows[0][column("bytes")].parse::<u64>().unwrap(), 3 * 8 * 4096);
    assert_eq!(rows[0][column("device_accesses")].parse::<u64>().unwrap(), first.layers.device.requests);
}

#[test]
fn the_page_has_every_plot_and_asks_nothing_of_the_net() {
    let results = run_on(2, true);
    let html = page::page("Simulations", std::slice::from_ref(&results));
    for wanted in [
        "A &lt;study&gt;",
        "Makespan</p>",
        "Makespan along servers.in_flight",
        "Interference",
        "Bandwidth of all applications",
        "Bandwidth over time, servers.policy=mlf servers.in_flight=32",
        "Requests queued over time",
        "Clients served by a data server at once",
        "Mean size of a request",
        "Distance between the offsets",
        "Fairness",
        "Who was served when on data server 1",
    ] {
        assert!(html.contains(wanted), "{wanted} is missing");
    }
    for foreign in ["http:", "https:", "src=", "href=", "@import", "<script", "url(", "NaN", "inf"] {
        assert!(!html.contains(foreign), "{foreign} in the page");
    }
}

#[test]
fn a_traced_job_keeps_its_order_and_its_computing() {
    let mut builder = Builder::new(Header::default());
    let file = |name: &str| FileInfo { path: name.into(), ..FileInfo::default() };
    let (x, y) = (builder.file(file("/x")).unwrap(), builder.file(file("/y")).unwrap());
    let rank = |process: u32| Origin { process, ..Origin::default() };
    let (p, q) = (builder.origin(rank(7)).unwrap(), builder.origin(rank(3)).unwrap());
    let at = |us: u64| impresario_sched::Nanos(us * 1000);
    let mut push = |op, file, origin, offset, len, arrival, took: Option<u64>| {
        let record = Record { origin, duration: took.map(at), ..Record::new(op, file, offset, len, at(arrival)) };
        builder.push(record).unwrap();
    };
    push(TraceOp::Write, x, p, 0, 100, 1000, Some(50));
    push(TraceOp::Open, y, q, 0, 0, 1010, Some(5));
    push(TraceOp::Read, y, q, 8, 10, 1020, None);
    push(TraceOp::Write, x, p, 100, 100, 1080, Some(50));
    push(TraceOp::Read, y, q, 18, 10, 1090, Some(5));
    // Sent before the one before it ended: no computing.
    push(TraceOp::Write, x, p, 200, 100, 1100, Some(50));
    let found = import::accesses(&builder.build());
    let shown: Vec<_> = found
        .iter()
        .map(|a| (a.process, a.file, a.op == Operation::Write, a.offset, a.len, a.think_ns / 1000))
        .collect();
    assert_eq!(
        shown,
        [
            (0, 0, true, 0, 100, 0),
            (1, 1, false, 8, 10, 20),
            (0, 0, true, 100, 100, 30),
            (1, 1, false, 18, 10, 70),
            (0, 0, true, 200, 100, 0)
        ]
    );
}

#[test]
fn a_trace_that_cannot_be_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let said = import::read(dir.path(), "none.csv").unwrap_err();
    assert!(said.contains("none.csv") && said.contains("No such file"), "{said}");
}
