//! The demonstration: four applications share modelled disks. First below this machine's own kernel, as on real
//! servers, without scheduling and with the default; then bare, as in the papers, without scheduling and with each
//! scheduler.

use impresario_sched::PolicySpec;
use serde::{Deserialize, Serialize};

use crate::compare::{Case, Experiment, Outcome, Trial};
use crate::pattern::{Pattern, Shape};
use crate::plan::{Operation, Placement, Workload};
use crate::report::{Bar, Page};
use crate::system::{DiskOrder, System};
use impresario_base::units::show_bytes;

/// Data servers in front of bare disks.
pub const DATA_SERVERS: usize = 4;
/// I/O nodes before these.
pub const IO_NODES: usize = 2;
/// Data servers on disks below the kernel; no I/O nodes are before them.
pub const KERNEL_DATA_SERVERS: usize = 2;

/// Its processes start within this time of each other, µs, in the same order for every system.
pub const START_SPREAD_US: u64 = 20_000;

/// The workloads on disks below the kernel; `quick` moves a fraction of the data, for tests.
pub fn kernel_experiment(quick: bool) -> Experiment {
    let process_bytes = if quick { 512 << 10 } else { 8 << 20 };
    let shapes = [
        ("small strided reads", Shape::Strided, 16 << 10),
        ("large contiguous reads", Shape::Contiguous, 256 << 10),
        ("reads of a file per process", Shape::FilePerProcess, 256 << 10),
    ];
    let cases = shapes.map(|(name, shape, request_bytes)| {
        let pattern = Pattern { shape, request_bytes, process_bytes, processes: if quick { 2 } else { 8 }, seed: 1 };
        Case { name: name.into(), workload: Workload::uniform(4, pattern, Operation::Read) }
    });
    let system = |name: &str, policy| System {
        name: name.into(),
        data_policy: Some(PolicySpec::named(policy)),
        io_policy: None,
        disk_order: None,
        recorded: false,
    };
    Experiment {
        title: "demonstration below the kernel".into(),
        systems: vec![system("none", "none"), system("auto (the default)", "auto")],
        baselines: vec!["none".into()],
        ..once(cases.into())
    }
}

/// One run of each case under each system, in the order of the list.
fn once(cases: Vec<Case>) -> Experiment {
    Experiment {
        title: String::new(),
        cases,
        systems: Vec::new(),
        baselines: Vec::new(),
        claims: Vec::new(),
        pairs: 1,
        pairs_max: 1,
        time_max_s: 600.0,
        tries: 1,
        shuffle: false,
        seed: 1,
    }
}

/// The workloads on bare disks; `quick` moves a fraction of the data, for tests.
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
        systems: systems(),
        baselines: vec!["none".into(), "none, disk with elevator".into()],
        ..once(cases)
    }
}

/// The systems shown: none, the elevator in the disk, the control, and each scheduler where its paper places it.
fn systems() -> Vec<System> {
    let none = || PolicySpec::named("none");
    let system = |name: &str, data_policy, io_policy, disk_order| System {
        name: name.into(),
        data_policy: Some(data_policy),
        io_policy: Some(io_policy),
        disk_order: Some(disk_order),
        recorded: false,
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

/// One run in the output of `--json`.
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
    /// `disk`: bare; `kernel-disk`: below the kernel's page cache, read-ahead and I/O scheduler.
    pub device: String,
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

/// Its runs below the kernel, if there are any, and those on bare disks.
#[derive(Debug)]
pub struct Shown {
    /// On disks below the kernel; absent where these cannot be made.
    pub kernel: Option<Outcome>,
    /// On bare disks.
    pub bare: Outcome,
}

impl Shown {
    fn outcomes(&self) -> impl Iterator<Item = &Outcome> {
        self.kernel.iter().chain([&self.bare])
    }
}

/// The runs of a demonstration.
pub fn runs(shown: &Shown) -> Runs {
    let kernel = shown.kernel.iter().flat_map(|outcome| runs_of(outcome, "kernel-disk"));
    Runs { runs: kernel.chain(runs_of(&shown.bare, "disk")).collect() }
}

fn runs_of(outcome: &Outcome, device: &str) -> Vec<Run> {
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
            device: device.into(),
            // Below the kernel the disk always has an elevator.
            disk_order: system.disk_order.unwrap_or(DiskOrder::Elevator),
            depth: t.depth,
            makespan_s: t.result.makespan_s,
            bandwidth_mib_s: t.result.bandwidth_mib_s,
            mean_batch_bytes: t.result.servers.at_disk.mean_bytes().unwrap_or(0.0),
            verified: t.result.verification.passed(),
        }
    };
    outcome.trials.iter().map(run).collect()
}

/// A row of the table: cells in the order of [`HEAD`].
type Row = [String; 6];

const HEAD: [&str; 6] = ["scheduling", "time", "bandwidth", "at the disk", "gain over none", "gain over elevator"];

/// How many cells of a row are shown: gains only over existing baselines.
fn columns(outcome: &Outcome) -> usize {
    HEAD.len() - 2 + outcome.experiment.baselines.len()
}

/// The rows of one case, and their trials.
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
            t.result.servers.at_disk.to_string(),
            gain(t, 0),
            gain(t, 1),
        ]
    };
    trials.iter().map(|t| (row(t), *t)).collect()
}

/// The table for the terminal.
pub fn table(shown: &Shown) -> String {
    let mut out = String::from("All times are on MODELLED disks (7200 rpm hard disks), one run each.\n");
    if let Some(outcome) = &shown.kernel {
        out += "\nDisks below this kernel's page cache, read-ahead and I/O scheduler, as servers have them:\n";
        out += &tables(outcome);
    }
    out += "\nBare disks that serve each request as it comes, as the papers have them:\n";
    out += &tables(&shown.bare);
    out += &doubts(shown).map(|d| format!("\n* {d}\n")).unwrap_or_default();
    out += &format!("\n{}\n", verified(shown));
    out
}

fn tables(outcome: &Outcome) -> String {
    let mut out = String::new();
    let columns = columns(outcome);
    for (c, case) in outcome.experiment.cases.iter().enumerate() {
        out += &format!("\n{} — {}\n", case.name, case.workload.describe());
        let line = |row: &[&str]| {
            let mut text = format!("  {:<26}", row[0]);
            row[1..columns].iter().for_each(|cell| text += &format!(" {cell:>18}"));
            text + "\n"
        };
        out += &line(&HEAD);
        for (row, _) in rows(outcome, c) {
            out += &line(&row.each_ref().map(String::as_str));
        }
    }
    out
}

fn verified(shown: &Shown) -> String {
    let trials = || shown.outcomes().flat_map(|outcome| &outcome.trials);
    let bytes: u64 = trials().map(|t| t.result.verification.checked_bytes).sum();
    format!("Every byte of all {} runs was verified ({}).", trials().count(), show_bytes(bytes as f64))
}

fn doubts(shown: &Shown) -> Option<String> {
    let trials = || shown.outcomes().flat_map(|outcome| &outcome.trials);
    let doubtful = trials().filter(|t| !t.result.counts()).count();
    (doubtful > 0).then(|| {
        format!(
            "{doubtful} of {} runs do not count: this machine was too busy for the modelled disk to keep its time.",
            trials().count()
        )
    })
}

/// The page.
pub fn page(shown: &Shown) -> String {
    let mut page = Page::new("Impresario: the same work, in a better order");
    page.text(
        "Four applications of several processes each share one storage system of some disks. Each asks for its own \
         data, one request after the other, and the requests of all of them mix on the way to the disks. A hard disk \
         is fast when it reads or writes in one place and slow when it must jump. A scheduler changes the order in \
         which requests are served, joins neighbours into one, and reads on where it knows what will be asked for next: \
         the same bytes are moved, with fewer jumps.",
    );
    page.text(
        "The bars show how long it took until the last process of the last application was done: shorter is better. \
         The grey bar is the system without any scheduling.",
    );
    page.note(
        "The disks are modelled: a program takes exactly the time that a 7200 rpm hard disk would take, so that the \
         demonstration shows the same on every machine. Each bar is one run, so small differences mean nothing; \
         “impresario bench” repeats runs and says how certain a difference is.",
    );
    if let Some(outcome) = &shown.kernel {
        page.heading("Disks below this kernel").text(
            "As servers have them: above the disk are the kernel's page cache, its read-ahead of 128 KiB, its I/O scheduler \
             and the drive's own queue, which already sort what they have. What is to be gained is knowing what comes next.",
        );
        bars_and_tables(&mut page, outcome);
    }
    page.heading("Bare disks").text("As the papers have them: each disk serves single requests as they come.");
    bars_and_tables(&mut page, &shown.bare);
    page.heading("What was compared");
    page.list(&[
        "none: every request goes to the disk at once, in the order in which it came",
        "auto: the default of data servers. Above a kernel it hands every request over at once and reads ahead what each \
         stream will ask for, in pieces of 1 to 4 MiB",
        "none, disk with elevator: the disk itself sorts up to 32 waiting requests, as kernels and drives do",
        "control: one request at a time and joined neighbours, but no other order: what a scheduler's order is worth shows \
         against this",
        "hbrr on I/O nodes: takes turns between files, eight requests each",
        "twins on I/O nodes: each I/O node speaks to one data server at a time, in turns",
        "mlf on data servers: sorts and joins the requests of each file, and small ones wait a little to be joined",
    ]);
    page.note(&doubts(shown).map_or_else(|| verified(shown), |d| format!("* {d} {}", verified(shown))));
    page.html()
}

fn bars_and_tables(page: &mut Page, outcome: &Outcome) {
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
        let columns = columns(outcome);
        let cells: Vec<Vec<String>> = rows.into_iter().map(|(row, _)| row[..columns].to_vec()).collect();
        page.table(&HEAD[..columns], &cells);
    }
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
        let kernel = kernel_experiment(true);
        let run = |e: &Experiment| compare(&Memory::default(), e, &Stop::new(), &mut |_| {}).unwrap();
        let shown = Shown { kernel: Some(run(&kernel)), bare: run(&e) };
        let told = runs(&shown);
        assert_eq!(told.runs.len(), 3 * 2 + 4 * 6);
        assert_eq!(told.runs.iter().filter(|r| r.device == "kernel-disk").count(), 6);
        assert!(told.runs.iter().all(|r| r.verified && r.makespan_s > 0.0 && r.bandwidth_mib_s > 0.0));
        let names: std::collections::BTreeSet<&str> = told.runs.iter().map(|r| r.policy.as_str()).collect();
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["auto", "control", "hbrr", "mlf", "none", "twins"]);
        let json = serde_json::to_value(&told).unwrap();
        let keys: Vec<&String> = json["runs"][0].as_object().unwrap().keys().collect();
        let mut wanted = [
            "pattern",
            "operation",
            "policy",
            "io_policy",
            "data_policy",
            "device",
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
        let (text, html) = (table(&shown), page(&shown));
        for system in e.systems.iter().chain(&kernel.systems) {
            let cases = match system.name.as_str() {
                "none" => 7,
                "auto (the default)" => 3,
                _ => 4,
            };
            assert_eq!(text.matches(&format!("  {:<26}", system.name)).count(), cases, "{text}");
            assert!(html.contains(&system.name));
        }
        assert_eq!(text.matches("gain over none").count(), 7);
        assert_eq!(text.matches("gain over elevator").count(), 4);
        assert!(text.contains("MODELLED") && html.contains("modelled"));
        assert_eq!(html.matches("<svg").count(), 7);
    }
}
