//! Why our results differ: the same cells with one change at a time, and what the layers did.
//!
//! A probe never affects the tables of claims; it measures the origin of a difference.

use anyhow::{Context, Result};
use impresario_device::{FlashParams, Order};
use impresario_sim::model::{Device, RankPlacement, Scenario};
use serde::{Deserialize, Serialize};

use super::agreement::percent;
use super::campaign::{Effort, Step, run_cells};
use super::claim::Table;
use super::figure::Cell;
use super::metric::Metric;
use super::papers;
use super::report::{CellRow, cell};
use super::text::{row, short};
use impresario_base::statistics::{Interval, mean};
use impresario_workload::stop::Stop;

/// A change and its name.
type Change = (&'static str, fn(&mut Scenario));

/// A question to the simulation.
struct Probe {
    id: &'static str,
    /// The question.
    question: &'static str,
    /// Where the cells are from.
    figure: &'static str,
    /// Cells: gains are relative to the first.
    cells: &'static [&'static str],
    changes: &'static [Change],
    /// What is compared, and its name.
    metric: (&'static str, Metric),
}

/// The result of a probe under one change in one cell.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Finding {
    /// The change; `as in the table` for none.
    pub change: String,
    /// Gain over the first cell of the probe under the same change; `None` of the first itself.
    pub gain: Option<Interval>,
    /// The metric of the probe, mean over the repetitions.
    pub value: f64,
    /// The measures.
    pub row: CellRow,
}

/// A probe with its results.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Its name.
    pub id: String,
    /// What was asked.
    pub question: String,
    /// The figure whose cells were changed.
    pub figure: String,
    /// What is compared.
    pub metric: String,
    /// By change, then by cell.
    pub findings: Vec<Finding>,
}

/// All probes with their results.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Why {
    /// Runs of each cell.
    pub repetitions: u32,
    /// All answers.
    pub answers: Vec<Answer>,
    /// Failed operations and violated laws.
    pub complaints: Vec<String>,
}

const SPAN: (&str, Metric) = ("makespan, s", Metric::Makespan);
const TASK: (&str, Metric) = ("mean task, s", Metric::TaskMean);
const NOTHING: Change = ("as in the table", |_| {});

fn disks(s: &mut Scenario, change: fn(&mut impresario_device::DeviceParams)) {
    for device in s.device.values_mut() {
        if let Device::Disk(disk) = device {
            change(disk);
        }
    }
}

fn in_order(s: &mut Scenario) {
    disks(s, |d| d.order = Order::Arrival);
}

fn elevator(s: &mut Scenario) {
    disks(s, |d| d.order = Order::Elevator);
}

fn flash(s: &mut Scenario) {
    for device in s.device.values_mut() {
        *device = Device::Flash(FlashParams::default());
    }
}

/// The platter rate of the drive's data sheet (104 Mbit/s, of which nine tenths are data, without skews) behind the 4.2
/// MB/s delivered.
fn fast_platter(s: &mut Scenario) {
    disks(s, |d| {
        d.track_bytes = 135_168;
        d.interface_bytes_per_s = 4_200_000;
    });
}

fn no_server_read_ahead(s: &mut Scenario) {
    s.servers.read_ahead_bytes = 0;
}

const PROBES: &[Probe] = &[
    Probe {
        id: "2002-platter",
        question: "Is what interleaving costs a matter of where the 4.2 MB/s are lost: on the platter (as assumed) or after it?",
        figure: "server-side-scheduling-2002-fig8",
        cells: &["uncached/448/opt1", "uncached/448/opt2", "uncached/448/opt3", "uncached/448/opt4"],
        changes: &[
            NOTHING,
            ("platter of 8.7 MB/s behind an interface of 4.2", fast_platter),
            ("drive remembers 16 places", |s| disks(s, |d| d.read_ahead_segments = 16)),
            ("read-around of 128 KiB", |s| s.servers.read_ahead_bytes = 128 << 10),
        ],
        metric: SPAN,
    },
    Probe {
        id: "2002-strided",
        question: "Why is Opt 4 ahead of Opt 1 with strided reads?",
        figure: "server-side-scheduling-2002-fig9",
        cells: &["uncached/448/opt1", "uncached/448/opt2", "uncached/448/opt3", "uncached/448/opt4"],
        changes: &[
            NOTHING,
            ("platter of 8.7 MB/s behind an interface of 4.2", fast_platter),
            ("tasks start within 1 s", |s| s.application[0].jitter_us = 1e6),
            ("both", |s| {
                fast_platter(s);
                s.application[0].jitter_us = 1e6;
            }),
            ("no read-around", no_server_read_ahead),
        ],
        metric: TASK,
    },
    Probe {
        id: "aioli-baseline",
        question: "What makes plain NFS as slow as in the paper?",
        figure: "aioli-2006-decomposition",
        cells: &["32 KiB/nfs/posix", "32 KiB/aioli/posix"],
        changes: &[
            NOTHING,
            ("no read-ahead in the server", no_server_read_ahead),
            ("disk in order of arrival", in_order),
            ("one thread in the server", |s| s.servers.in_flight = 1),
            ("no read-ahead, disk in order of arrival", |s| {
                no_server_read_ahead(s);
                in_order(s);
            }),
            ("no read-ahead, order of arrival, 8 KiB on the wire", |s| {
                no_server_read_ahead(s);
                in_order(s);
                s.clients.request_bytes_max = 8192;
            }),
        ],
        metric: SPAN,
    },
    Probe {
        id: "aioli-cat",
        question: "What makes the cat of 16 MB wait?",
        figure: "aioli-2006-cat",
        cells: &["nfs/posix", "nfs/mpi-io", "aioli/posix"],
        changes: &[
            NOTHING,
            ("no read-ahead in the client", |s| s.clients.read_ahead_bytes = 0),
            ("no read-ahead in client and server, disk in order of arrival", |s| {
                s.clients.read_ahead_bytes = 0;
                no_server_read_ahead(s);
                in_order(s);
            }),
        ],
        metric: ("cat, s", Metric::Time(1)),
    },
    Probe {
        id: "aioli-ten",
        question: "How much of the ten applications' time is the disk's, and what of it the read-ahead saves",
        figure: "aioli-2006-ten",
        cells: &["nfs/posix", "aioli/posix", "nfs/mpi-io", "aioli/mpi-io"],
        changes: &[
            NOTHING,
            ("no read-ahead in the server, disk in order of arrival", |s| {
                no_server_read_ahead(s);
                in_order(s);
            }),
            ("network of collective calls at 10 MB/s", |s| s.network.client_bytes_per_s = 10e6),
        ],
        metric: SPAN,
    },
    Probe {
        id: "agios-hand-off",
        question: "What do hand-off, the disk's order, its cache and the read-ahead make of the gain?",
        figure: "agios-2013-fig5",
        cells: &["read/strided small/32/none", "read/strided small/32/mlf"],
        changes: AGIOS_CHANGES,
        metric: SPAN,
    },
    Probe {
        id: "agios-writes",
        question: "The same for writes",
        figure: "agios-2013-fig5",
        cells: &["write/strided small/32/none", "write/strided small/32/mlf"],
        changes: AGIOS_CHANGES,
        metric: SPAN,
    },
    Probe {
        id: "agios-passes",
        question: "Is the cost of not aggregating the time of the passes?",
        figure: "agios-2013-fig3",
        cells: &["read/strided small/only reorders", "read/strided small/aggregates"],
        changes: &[NOTHING, ("passes of 450 µs", |s| pass(s, "450")), ("passes of 100 µs", |s| pass(s, "100"))],
        metric: SPAN,
    },
    Probe {
        id: "twins-strided",
        question: "What decides about I/O nodes and windows with strided reads?",
        figure: "twins-2017-fig3",
        cells: &["strided/direct", "strided/fifo", "strided/twins 1 ms", "strided/twins 8 ms"],
        changes: TWINS_CHANGES,
        metric: SPAN,
    },
    Probe {
        id: "twins-contiguous",
        question: "The same with contiguous reads",
        figure: "twins-2017-fig3",
        cells: &["contiguous/direct", "contiguous/fifo", "contiguous/twins 1 ms"],
        changes: TWINS_CHANGES,
        metric: SPAN,
    },
    Probe {
        id: "twins-file-per-process",
        question: "The same with a file per process",
        figure: "twins-2017-fig3",
        cells: &["file per process/direct", "file per process/fifo", "file per process/twins 1 ms"],
        changes: TWINS_CHANGES,
        metric: SPAN,
    },
    Probe {
        id: "twins-writes",
        question: "The same with strided writes",
        figure: "twins-2017-fig4",
        cells: &["strided/direct", "strided/fifo", "strided/twins 1 ms", "strided/twins 8 ms"],
        changes: TWINS_CHANGES,
        metric: SPAN,
    },
    Probe {
        id: "twins-concurrency-strided",
        question: "What does it change that a request costs a server more the more are there, with strided reads?",
        figure: "twins-2017-fig3",
        cells: &["strided/direct", "strided/fifo", "strided/twins 1 ms", "strided/twins 8 ms"],
        changes: CONCURRENCY_CHANGES,
        metric: SPAN,
    },
    Probe {
        id: "twins-concurrency-contiguous",
        question: "The same with contiguous reads",
        figure: "twins-2017-fig3",
        cells: &["contiguous/direct", "contiguous/fifo", "contiguous/twins 1 ms", "contiguous/twins 8 ms"],
        changes: CONCURRENCY_CHANGES,
        metric: SPAN,
    },
];

/// Just above the largest measured costs (doc/SIMULATION.md) of reads of 16 KiB and of 256 KiB; those of the paper are 32 KiB.
const CONCURRENCY_CHANGES: &[Change] = &[
    NOTHING,
    ("0.1 µs for each further request at a server", |s| s.servers.concurrency_us = 0.1),
    ("3.3 µs for each", |s| s.servers.concurrency_us = 3.3),
    ("flash", flash),
    ("flash, 0.1 µs for each", |s| {
        flash(s);
        s.servers.concurrency_us = 0.1;
    }),
    ("flash, 3.3 µs for each", |s| {
        flash(s);
        s.servers.concurrency_us = 3.3;
    }),
];

const AGIOS_CHANGES: &[Change] = &[
    NOTHING,
    ("hand-off of 1", |s| s.servers.in_flight = 1),
    ("disk behind an elevator", elevator),
    ("disk with its write cache on", |s| disks(s, |d| d.write_cache = true)),
    ("no read-ahead in the server", no_server_read_ahead),
    ("flash", flash),
];

const TWINS_CHANGES: &[Change] = &[
    NOTHING,
    ("ranks dealt to I/O nodes round robin", |s| s.clients.placement = RankPlacement::Cyclic),
    ("disks in order of arrival", in_order),
    ("one request at a time below each server", |s| s.servers.in_flight = 1),
    ("I/O nodes with 4 threads", |s| {
        if let Some(nodes) = &mut s.io_nodes {
            nodes.threads = 4;
        }
    }),
    ("processes in step (a barrier after every request)", |s| s.application[0].barrier_requests = 1),
    ("flash", flash),
];

fn pass(s: &mut Scenario, us: &str) {
    s.servers.policy = s.servers.policy.clone().with("pass_us", us);
}

/// Runs all probes.
pub fn run(effort: &Effort, stop: &Stop, step: &mut dyn FnMut(Step)) -> Result<Why> {
    let repetitions = effort.repetitions.unwrap_or(4);
    let mut cells = Vec::new();
    for probe in PROBES {
        let figure = papers::figure(probe.figure)?;
        let known = figure.cells(effort)?;
        for (name, change) in probe.changes {
            for key in probe.cells {
                let at = known.iter().find(|c| c.key == *key);
                let mut scenario = at.with_context(|| format!("no cell {key} in {}", figure.id))?.scenario.clone();
                change(&mut scenario);
                cells.push((probe.id, repetitions, Cell::new(format!("{name}/{key}"), scenario)));
            }
        }
    }
    let campaign = run_cells(&cells, effort, stop, step)?;
    let answers = PROBES.iter().map(|probe| {
        let runs = campaign.figures.get(probe.id).with_context(|| format!("nothing was run for {}", probe.id))?;
        Ok(answer(probe, &Table { runs }))
    });
    Ok(Why { repetitions, answers: answers.collect::<Result<_>>()?, complaints: campaign.complaints })
}

fn answer(probe: &Probe, table: &Table<'_>) -> Answer {
    let mut findings = Vec::new();
    for (name, _) in probe.changes {
        let key = |cell: &str| format!("{name}/{cell}");
        for (nth, of) in probe.cells.iter().enumerate() {
            let Some(runs) = table.runs.get(&key(of)) else { continue };
            let gain = table.gain(&key(probe.cells[0]), &key(of), |r| probe.metric.1.of(r)).filter(|_| nth > 0);
            findings.push(Finding {
                change: (*name).into(),
                gain: gain.map(|g| Interval::of(&g)),
                value: mean(&runs.iter().map(|r| probe.metric.1.of(r)).collect::<Vec<_>>()),
                row: cell(of, runs, 0.95),
            });
        }
    }
    Answer {
        id: probe.id.into(),
        question: probe.question.into(),
        figure: probe.figure.into(),
        metric: probe.metric.0.into(),
        findings,
    }
}

/// For the document.
pub fn markdown(why: &Why) -> String {
    let mut out =
        format!("{} repetitions; gains with 95 % intervals over the first system of each group.\n", why.repetitions);
    for a in &why.answers {
        out += &format!("\n**{}** (cells of {}). {}\n\n", a.id, a.figure, a.question);
        let head = [
            "changed",
            "system",
            &a.metric,
            "gain",
            "busy",
            "accesses",
            "access, ms",
            "access size, KiB",
            "batch, KiB",
            "outstanding",
            "distance, MB",
        ];
        row(&mut out, head.map(String::from));
        row(&mut out, head.map(|_| "---".into()));
        let mut last = "";
        for f in &a.findings {
            let i = &f.row.inside;
            let change = if f.change == last { String::new() } else { f.change.clone() };
            last = &f.change;
            let gain = f
                .gain
                .map_or("–".into(), |g| format!("{} ({} … {})", percent(g.mean), percent(g.low), percent(g.high)));
            row(
                &mut out,
                [
                    change,
                    f.row.key.clone(),
                    short(f.value),
                    gain,
                    format!("{:.0} %", i.busy * 100.0),
                    format!("{:.0}", i.accesses),
                    short(i.access_ms),
                    format!("{:.0}", i.access_bytes / 1024.0),
                    format!("{:.0}", i.batch_bytes / 1024.0),
                    short(i.concurrency),
                    short(i.device_distance_bytes / 1e6),
                ],
            );
        }
    }
    for complaint in &why.complaints {
        out += &format!("\nNot well: {complaint}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_probe_has_its_cells_and_every_change_passes_the_checks() {
        for probe in PROBES {
            let cells = papers::figure(probe.figure).unwrap().cells(&Effort::default()).unwrap();
            assert_eq!(probe.changes[0].0, NOTHING.0, "{}: what it is compared with", probe.id);
            for key in probe.cells {
                let base =
                    &cells.iter().find(|c| c.key == *key).unwrap_or_else(|| panic!("{}: {key}", probe.id)).scenario;
                for (name, change) in probe.changes {
                    let mut changed = base.clone();
                    change(&mut changed);
                    assert_eq!(changed.check(), [], "{}: {name}", probe.id);
                }
            }
        }
    }
}
