//! The demonstration: four applications share four modelled disks, with and without each scheduler.

use impresario_sched::PolicySpec;
use serde::{Deserialize, Serialize};

use crate::compare::{Case, Experiment, Outcome, Trial};
use crate::pattern::{Pattern, Shape};
use crate::plan::{Operation, Placement, Workload};
use crate::report::{Bar, Page};
use crate::size::show_bytes;
use crate::system::{DiskOrder, System};

/// Data servers of the demonstration's cluster.
pub const DATA_SERVERS: usize = 4;
/// Its I/O nodes.
pub const IO_NODES: usize = 2;

/// Its processes set out within this time of each other, µs, in an order that is the same for every system.
pub const START_SPREAD_US: u64 = 20_000;

/// What the demonstration runs; `quick` moves a fraction of the data, for tests.
pub fn experiment(quick: bool) -> Experiment {
    let volume = |full: u64, quick_share: u64| if quick { full / quick_share } else { full };
    let mut cases = Vec::new();
    for (shape, request_bytes, process_bytes) in
        [(Shape::Strided, 16 << 10, volume(1280 << 10, 20)), (Shape::Contiguous, 256 << 10, volume(2560 << 10, 10))]
    {
        for operation in [Operation::Write, Operation::Read] {
            let pattern =
                Pattern { shape, request_bytes, process_bytes, processes: if quick { 2 } else { 8 }, seed: 1 };
            let mut workload = Workload::uniform(4, pattern, operation);
            // Neighbouring ranks on one I/O node, as batch systems place them; `bench` compares placements.
            workload.placement = Placement::Block;
            workload.start_spread_us = START_SPREAD_US;
            let size = if shape == Shape::Strided { "small strided" } else { "large contiguous" };
            let verb = if operation == Operation::Write { "writes" } else { "reads" };
            cases.push(Case { name: format!("{size} {verb}"), workload });
        }
    }
    Experiment {
        title: "demonstration".into(),
        cases,
        systems: systems(),
        baselines: vec!["none".into(), "none, disk with elevator".into()],
        claims: Vec::new(),
        pairs: 1,
        pairs_max: 1,
        time_max_s: 600.0,
        tries: 1,
        shuffle: false,
        seed: 1,
    }
}

/// What is shown: nothing, the elevator in the disk, the control, and each scheduler where its paper puts it.
fn systems() -> Vec<System> {
    let none = || PolicySpec::named("none");
    let system = |name: &str, data_policy, io_policy, disk_order| System {
        name: name.into(),
        data_policy: Some(data_policy),
        io_policy: Some(io_policy),
        disk_order: Some(disk_order),
    };
    let fifo = || PolicySpec::named("fifo");
    vec![
        system("none", none(), none(), DiskOrder::Arrival),
        system("none, disk with elevator", none(), none(), DiskOrder::Elevator),
        system("control (limit, merge)", fifo().with("merge", "on"), fifo(), DiskOrder::Arrival),
        system("hbrr on I/O nodes", none(), PolicySpec::named("hbrr"), DiskOrder::Arrival),
        system("twins on I/O nodes", none(), PolicySpec::named("twins").with("window_us", 16_000), DiskOrder::Arrival),
        system("mlf on data servers", PolicySpec::named("mlf"), fifo(), DiskOrder::Arrival),
    ]
}

/// One run, as `--json` tells it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Access pattern.
    pub pattern: String,
    /// `read` or `write`.
    pub operation: Operation,
    /// What is compared: `none`, `control`, or the policy under test.
    pub policy: String,
    /// Policy of the I/O nodes, with its parameters.
    pub io_policy: String,
    /// Policy of the data servers, with its parameters.
    pub data_policy: String,
    /// `arrival` or `elevator`.
    pub disk_order: DiskOrder,
    /// Batches that a data server hands to its disk at once; `null`: no limit.
    pub depth: Option<u32>,
    /// Slowest process of the slowest application, s.
    pub makespan_s: f64,
    /// MiB/s.
    pub bandwidth_mib_s: f64,
    /// Mean request at the disk, bytes.
    pub mean_batch_bytes: f64,
    /// All data were as they must be.
    pub verified: bool,
}

/// The file that `--json` writes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Runs {
    /// Every run.
    pub runs: Vec<Run>,
}

/// The runs of a demonstration.
pub fn runs(outcome: &Outcome) -> Runs {
    let run = |t: &Trial| {
        let system = &outcome.experiment.systems[t.system];
        let application = &outcome.experiment.cases[t.case].workload.applications[0];
        let policy = |p: &Option<PolicySpec>| p.as_ref().map(ToString::to_string).unwrap_or_default();
        Run {
            pattern: application.pattern.shape.name().into(),
            operation: application.operation,
            policy: system.name.split([' ', ',']).next().unwrap_or_default().into(),
            io_policy: policy(&system.io_policy),
            data_policy: policy(&system.data_policy),
            disk_order: system.disk_order.unwrap_or_default(),
            depth: t.depth,
            makespan_s: t.result.makespan_s,
            bandwidth_mib_s: t.result.bandwidth_mib_s,
            mean_batch_bytes: t.result.servers.at_disk.mean_bytes().unwrap_or(0.0),
            verified: t.result.verification.passed(),
        }
    };
    Runs { runs: outcome.trials.iter().map(run).collect() }
}

/// A row of the table: cells in the order of [`HEAD`].
type Row = [String; 6];

const HEAD: [&str; 6] = ["scheduling", "time", "bandwidth", "request at disk", "gain over none", "gain over elevator"];

/// The rows of one case, and the trials they tell of.
fn rows(outcome: &Outcome, case: usize) -> Vec<(Row, &Trial)> {
    let trials: Vec<&Trial> = outcome.trials.iter().filter(|t| t.case == case).collect();
    let time = |system: usize| trials.iter().find(|t| t.system == system).map(|t| t.result.makespan_s);
    let gain = |t: &Trial, base: usize| match time(base) {
        Some(base_s) if t.system != base => format!("{:+.0} %", 100.0 * (1.0 - t.result.makespan_s / base_s)),
        _ => "–".into(),
    };
    let row = |t: &Trial| {
        let doubt = if t.result.counts() { "" } else { " *" };
        [
            outcome.experiment.systems[t.system].name.clone(),
            format!("{:.2} s{doubt}", t.result.makespan_s),
            format!("{:.1} MiB/s", t.result.bandwidth_mib_s),
            t.result.servers.at_disk.mean_bytes().map_or("–".into(), show_bytes),
            gain(t, 0),
            gain(t, 1),
        ]
    };
    trials.iter().map(|t| (row(t), *t)).collect()
}

/// The table for the terminal.
pub fn table(outcome: &Outcome) -> String {
    let mut out = String::from("All times are on the MODELLED disk (a 7200 rpm hard disk), one run each.\n");
    for (c, case) in outcome.experiment.cases.iter().enumerate() {
        out += &format!("\n{} — {}\n", case.name, case.workload.describe());
        let line = |row: &[&str]| {
            let mut text = format!("  {:<26}", row[0]);
            row[1..].iter().for_each(|cell| text += &format!(" {cell:>18}"));
            text + "\n"
        };
        out += &line(&HEAD);
        for (row, _) in rows(outcome, c) {
            out += &line(&row.each_ref().map(String::as_str));
        }
    }
    out += &doubts(outcome).map(|d| format!("\n* {d}\n")).unwrap_or_default();
    out += &format!("\n{}\n", verified(outcome));
    out
}

fn verified(outcome: &Outcome) -> String {
    let bytes: u64 = outcome.trials.iter().map(|t| t.result.verification.checked_bytes).sum();
    format!("Every byte of all {} runs was verified ({}).", outcome.trials.len(), show_bytes(bytes as f64))
}

fn doubts(outcome: &Outcome) -> Option<String> {
    let doubtful = outcome.trials.iter().filter(|t| !t.result.counts()).count();
    (doubtful > 0).then(|| {
        format!(
            "{doubtful} of {} runs do not count: this machine was too busy for the modelled disk to keep its time.",
            outcome.trials.len()
        )
    })
}

/// The page.
pub fn page(outcome: &Outcome) -> String {
    let mut page = Page::new("Impresario: the same work, in a better order");
    page.text(
        "Four applications of several processes each share one storage system of four disks. Each asks for its own \
         data, one request after the other, and the requests of all of them mix on the way to the disks. A hard disk \
         is fast when it reads or writes in one place and slow when it must jump. A scheduler changes the order in \
         which requests are served, and joins neighbours into one: the same bytes are moved, with fewer jumps.",
    );
    page.text(
        "The bars show how long it took until the last process of the last application was done: shorter is better. \
         The grey bar is the system without any scheduling.",
    );
    page.note(
        "The disks are modelled: a program takes exactly the time that a 7200 rpm hard disk would take, so that the \
         demonstration shows the same on every machine. Each bar is one run, so small differences mean nothing; \
         “impresario bench” repeats runs and tells how certain a difference is.",
    );
    for (c, case) in outcome.experiment.cases.iter().enumerate() {
        page.heading(&capital(&case.name)).note(&case.workload.describe());
        let rows = rows(outcome, c);
        let bars: Vec<Bar> = rows
            .iter()
            .map(|(row, t)| Bar {
                label: row[0].clone(),
                value: t.result.makespan_s,
                text: format!("{} ({})", row[1], row[2]),
                range: None,
                baseline: t.system == 0,
            })
            .collect();
        page.bars(&format!("Time on the modelled disk, {}", case.name), &bars);
        let cells: Vec<Vec<String>> = rows.into_iter().map(|(row, _)| row.into()).collect();
        page.table(&HEAD, &cells);
    }
    page.heading("What was compared");
    page.list(&[
        "none: every request goes to the disk at once, in the order in which it came",
        "none, disk with elevator: the disk itself sorts up to 32 waiting requests, as kernels and drives do",
        "control: one request at a time and joined neighbours, but no other order: what a scheduler's order is worth shows \
         against this",
        "hbrr on I/O nodes: takes turns between files, eight requests each",
        "twins on I/O nodes: each I/O node speaks to one data server at a time, in turns",
        "mlf on data servers: sorts and joins the requests of each file, and small ones wait a little to be joined",
    ]);
    page.note(&doubts(outcome).map_or_else(|| verified(outcome), |d| format!("* {d} {}", verified(outcome))));
    page.html()
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|c| c.to_uppercase().collect::<String>() + chars.as_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::compare;
    use crate::memory::Memory;
    use crate::stop::Stop;

    #[test]
    fn the_demonstration_tells_every_run_in_table_page_and_json() {
        let e = experiment(true);
        e.systems.iter().for_each(|s| s.check(DATA_SERVERS).unwrap());
        let outcome = compare(&Memory::default(), &e, &Stop::new(), &mut |_| {}).unwrap();
        let told = runs(&outcome);
        assert_eq!(told.runs.len(), 4 * 6);
        assert!(told.runs.iter().all(|r| r.verified && r.makespan_s > 0.0 && r.bandwidth_mib_s > 0.0));
        let names: std::collections::BTreeSet<&str> = told.runs.iter().map(|r| r.policy.as_str()).collect();
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["control", "hbrr", "mlf", "none", "twins"]);
        let json = serde_json::to_value(&told).unwrap();
        let keys: Vec<&String> = json["runs"][0].as_object().unwrap().keys().collect();
        let mut wanted = [
            "pattern",
            "operation",
            "policy",
            "io_policy",
            "data_policy",
            "disk_order",
            "depth",
            "makespan_s",
            "bandwidth_mib_s",
            "mean_batch_bytes",
            "verified",
        ];
        wanted.sort_unstable();
        let mut keys: Vec<&str> = keys.into_iter().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, wanted);
        let (text, html) = (table(&outcome), page(&outcome));
        for system in &e.systems {
            assert_eq!(text.matches(&format!("  {:<26}", system.name)).count(), 4, "{text}");
            assert!(html.contains(&system.name));
        }
        assert!(text.contains("MODELLED") && html.contains("modelled"));
        assert_eq!(html.matches("<svg").count(), 4);
    }
}
