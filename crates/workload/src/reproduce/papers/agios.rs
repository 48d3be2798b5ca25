//! agios-2013: MLF in the data servers of dNFSp, Figs. 3 and 5; Figs. 6 and 7 wait for prediction.

use impresario_sim::model::{Operation, Pattern, Scenario};

use super::{Series, file};
use crate::reproduce::campaign::{Effort, Run};
use crate::reproduce::claim::{Claim, Ours, Table, average, largest, smallest};
use crate::reproduce::figure::{Cell, Figure, Plot, policy};
use crate::reproduce::verdict::Says;

const PAPER: &str = "agios-2013";
/// The paper's base algorithm where the hand-off has no limit; the pass is the public library's waiting time.
const BASE: &str = "mlf window_us=0 guard_batches=0 pass_us=900";
const OPS: [(&str, Operation); 2] = [("write", Operation::Write), ("read", Operation::Read)];
/// Pattern, bytes of a request, requests of a process.
const PATTERNS: [(&str, Pattern, u64, u64); 4] = [
    ("contiguous small", Pattern::Contiguous, 16 << 10, 128),
    ("strided small", Pattern::Strided, 16 << 10, 128),
    ("contiguous large", Pattern::Contiguous, 256 << 10, 8),
    ("strided large", Pattern::Strided, 256 << 10, 8),
];
const PROCESSES: [u32; 3] = [8, 32, 64];
/// Compute nodes of each application in Fig. 5.
const NODES: u32 = 8;

/// The figures.
pub(super) fn figures() -> Vec<Figure> {
    let series = |repetitions| Series { paper: PAPER, repetitions, confidence: 0.95 };
    vec![
        series(5).figure(
            "agios-2013-fig3",
            "Fig. 3: the scheduler with and without aggregation",
            file!("agios-2013-fig3.toml"),
            fig3,
            fig3_claims,
            fig3_plots,
        ),
        series(5).figure(
            "agios-2013-fig5",
            "Fig. 5: the base algorithm over no scheduler",
            file!("agios-2013-fig5.toml"),
            fig5,
            fig5_claims,
            fig5_plots,
        ),
        series(2).figure(
            "agios-2013-fig6",
            "Fig. 6: prediction over the base algorithm",
            file!("agios-2013-fig6.toml"),
            base_only,
            fig6_claims,
            Vec::new,
        ),
        series(2).figure(
            "agios-2013-fig7",
            "Fig. 7: sizes of aggregations with prediction",
            file!("agios-2013-fig7.toml"),
            base_only,
            fig7_claims,
            Vec::new,
        ),
    ]
}

fn set(s: &mut Scenario, (_, op): (&str, Operation), (_, pattern, bytes, requests): (&str, Pattern, u64, u64)) {
    let a = &mut s.application[0];
    (a.op, a.pattern, a.request_bytes, a.requests) = (op, pattern, bytes, requests);
}

fn fig3(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    let mut all = Vec::new();
    for op in OPS {
        for pattern in PATTERNS {
            for (name, line) in
                [("aggregates", BASE.to_string()), ("only reorders", format!("{BASE} batch_requests=1"))]
            {
                let mut s = base.clone();
                set(&mut s, op, pattern);
                s.servers.policy = policy(&line);
                effort.thin(&mut s);
                all.push(Cell::new(format!("{}/{}/{name}", op.0, pattern.0), s));
            }
        }
    }
    all
}

fn fig3_claims() -> Vec<Claim> {
    let text = "reordering without aggregation takes up to 6.3 × the time of the regular scheduler";
    vec![Claim::new("agios.fig3", text, Says::Ratio(6.3, 6.3), |t| {
        largest(cases().into_iter().map(|(name, key)| {
            let ratio = t.ratio(&format!("{key}/only reorders"), &format!("{key}/aggregates"), Run::makespan_s);
            (name, ratio)
        }))
    })]
}

/// Name and key of operation and pattern.
fn cases() -> Vec<(String, String)> {
    let of = |op: (&str, Operation)| PATTERNS.map(|p| (format!("{}, {}", op.0, p.0), format!("{}/{}", op.0, p.0)));
    OPS.into_iter().flat_map(of).collect()
}

fn fig3_plots() -> Vec<Plot> {
    let bars = cases().into_iter().flat_map(|(name, key)| {
        ["aggregates", "only reorders"].map(|s| (format!("{name}, {s}"), format!("{key}/{s}"), s == "aggregates"))
    });
    vec![Plot::Bars { what: "execution time, s".into(), bars: bars.collect(), metric: Run::makespan_s }]
}

fn fig5_cells(base: &Scenario, effort: &Effort, systems: &[(&str, &str)]) -> Vec<Cell> {
    let mut all = Vec::new();
    for op in OPS {
        for pattern in PATTERNS {
            for processes in PROCESSES {
                for (name, line) in systems {
                    let mut s = base.clone();
                    set(&mut s, op, pattern);
                    s.application[0].processes = processes;
                    s.clients.processes_per_node = processes / NODES;
                    s.servers.policy = policy(line);
                    effort.thin(&mut s);
                    all.push(Cell::and_alone(format!("{}/{}/{processes}/{name}", op.0, pattern.0), s));
                }
            }
        }
    }
    all
}

fn fig5(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    fig5_cells(base, effort, &[("none", "none"), ("mlf", BASE)])
}

fn base_only(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    fig5_cells(base, effort, &[("mlf", BASE)])
}

/// Gains of all cases of an operation (or both), with their names.
fn gains(t: &Table<'_>, op: &str) -> Vec<(String, Option<Ours>)> {
    let of = |(name, key): (String, String)| {
        PROCESSES.map(|n| {
            let keys = (format!("{key}/{n}/none"), format!("{key}/{n}/mlf"));
            (format!("{name}, {n} processes"), t.gain(&keys.0, &keys.1, Run::makespan_s))
        })
    };
    cases().into_iter().filter(|(_, key)| key.starts_with(op)).flat_map(of).collect()
}

fn values(cases: Vec<(String, Option<Ours>)>) -> impl Iterator<Item = Option<Ours>> {
    cases.into_iter().map(|c| c.1)
}

fn fig5_claims() -> Vec<Claim> {
    let claim = |id: &str, text: &str, says, ours: fn(&Table<'_>) -> Option<Ours>| {
        Claim::new(format!("agios.fig5.{id}"), text, says, ours)
    };
    let mut all = vec![
        claim("average", "base algorithm over no scheduler: 27.44 % on average", Says::Gain(0.2744), |t| {
            average(values(gains(t, "")))
        }),
        claim("write.average", "writes: 27.81 % on average", Says::Gain(0.2781), |t| {
            average(values(gains(t, "write")))
        }),
        claim("read.average", "reads: 27.06 % on average", Says::Gain(0.2706), |t| average(values(gains(t, "read")))),
        claim("write.most", "writes: up to 42.05 %", Says::Gain(0.4205), |t| largest(gains(t, "write"))),
        claim("read.most", "reads: up to 46.95 %", Says::Gain(0.4695), |t| largest(gains(t, "read"))),
        claim("never-worse", "no significant decrease was observed: the worst case", Says::NotWorse(0.05), |t| {
            smallest(gains(t, ""))
        }),
        claim(
            "reads-faster",
            "reads take 83.8 % less time than writes on average (no scheduler)",
            Says::Gain(0.838),
            |t| {
                average(PATTERNS.iter().flat_map(|p| {
                    PROCESSES.map(|n| {
                        t.gain(&format!("write/{}/{n}/none", p.0), &format!("read/{}/{n}/none", p.0), Run::makespan_s)
                    })
                }))
            },
        ),
        claim(
            "batch-contiguous-small",
            "contiguous small: an aggregation has at most two requests of 8 KiB, and the scheduler reaches that",
            Says::Bytes(16384.0),
            |t| {
                let of = |op: (&str, Operation)| PROCESSES.map(|n| format!("{}/contiguous small/{n}/mlf", op.0));
                average(
                    OPS.into_iter()
                        .flat_map(of)
                        .map(|k| Some(Ours::of(t.values(&k, |r| r.outcome.layers.batches.mean_bytes())?))),
                )
            },
        ),
    ];
    for (name, key) in cases() {
        let id = format!("agios.fig5.{}", key.replace(['/', ' '], "-"));
        let text = format!("{name}: better with the scheduler (the bars' figures are not in the text)");
        all.push(Claim::new(id, text, Says::Better, move |t| {
            average(PROCESSES.map(|n| t.gain(&format!("{key}/{n}/none"), &format!("{key}/{n}/mlf"), Run::makespan_s)))
        }));
    }
    all
}

fn fig5_plots() -> Vec<Plot> {
    let one = |p: &(&str, Pattern, u64, u64)| {
        let bars = OPS.into_iter().flat_map(|op| {
            PROCESSES
                .into_iter()
                .flat_map(move |n| ["none", "mlf"].map(|s| (format!("{}, {n} processes, {s}", op.0), (op.0, n, s))))
        });
        let bars = bars.map(|(label, (op, n, s))| (label, format!("{op}/{}/{n}/{s}", p.0), s == "none"));
        Plot::Bars { what: format!("{}: makespan, s", p.0), bars: bars.collect(), metric: Run::makespan_s }
    };
    PATTERNS.iter().map(one).collect()
}

fn not_yet(id: &str, text: &str, paper: f64) -> Claim {
    Claim::new(id, text, Says::NeedsPrediction(paper), |_| None)
}

fn fig6_claims() -> Vec<Claim> {
    vec![
        not_yet("agios.fig6.average", "prediction over the base algorithm: 25.1 % on average", 0.251),
        not_yet("agios.fig6.write", "writes: 29.5 % on average, up to 35.4 %", 0.295),
        not_yet("agios.fig6.read", "reads: 20.7 % on average, up to 31.4 %", 0.207),
        not_yet("agios.fig6.total", "with prediction over no scheduler: 40.76 % on average (conclusion)", 0.4076),
        not_yet("agios.fig6.total-abstract", "the same in the abstract: 46.3 %", 0.463),
        not_yet("agios.fig6.total-write", "the same, writes: 42.33 % on average, up to 57.3 %", 0.4233),
        not_yet("agios.fig6.total-read", "the same, reads: 39.2 % on average, up to 58.9 %", 0.392),
    ]
}

fn fig7_claims() -> Vec<Claim> {
    vec![not_yet("agios.fig7.size", "aggregations are 25.1 % larger with prediction, on average", 0.251)]
}
