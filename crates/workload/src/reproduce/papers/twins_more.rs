//! twins-2017: Tables I and II, arrivals, two applications (Fig. 5), collective I/O (Fig. 6).

use impresario_sim::model::{Collective, Operation, Pattern, Scenario};

use super::twins::{BASELINES, CONFIDENCE, NONE, PAPER, WINDOWS_US, baseline, system, window};
use super::{Series, file};
use crate::reproduce::campaign::{Effort, Run};
use crate::reproduce::claim::{Claim, Ours, Table, largest};
use crate::reproduce::figure::{Cell, Figure, Metric, Plot};
use crate::reproduce::verdict::Says;

const SPAN: fn(&Run) -> f64 = Run::makespan_s;
/// When application B starts after A, s.
const OFFSETS_S: [i32; 5] = [-10, -5, 0, 5, 10];

/// The figures.
pub(super) fn figures() -> Vec<Figure> {
    let series = Series { paper: PAPER, repetitions: 8, confidence: CONFIDENCE };
    vec![
        series.figure(
            "twins-2017-tables",
            "Tables I and II: request sizes and offset distances",
            file!("twins-2017-tables.toml"),
            tables,
            table_claims,
            Vec::new,
        ),
        series.figure(
            "twins-2017-arrivals",
            "Arrivals at one I/O node",
            file!("twins-2017-arrivals.toml"),
            arrivals,
            arrival_claims,
            Vec::new,
        ),
        Figure {
            // Times of A vary much with how its processes drift apart.
            repetitions: 16,
            ..series.figure(
                "twins-2017-fig5",
                "Fig. 5: two applications",
                file!("twins-2017-fig5.toml"),
                fig5,
                fig5_claims,
                fig5_plots,
            )
        },
        series.figure(
            "twins-2017-fig6",
            "Fig. 6: TWINS and collective I/O",
            file!("twins-2017-fig6.toml"),
            fig6,
            fig6_claims,
            fig6_plots,
        ),
    ]
}

const SHARED: [(&str, Pattern); 2] = [("contiguous", Pattern::Contiguous), ("strided", Pattern::Strided)];
const OPS: [(&str, Operation); 2] = [("read", Operation::Read), ("write", Operation::Write)];

fn tables(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    let mut all = Vec::new();
    for (pattern_name, pattern) in SHARED {
        for (op_name, op) in OPS {
            for name in BASELINES {
                let mut s = base.clone();
                (s.application[0].op, s.application[0].pattern) = (op, pattern);
                system(&mut s, name);
                effort.thin(&mut s);
                all.push(Cell::new(format!("{op_name}/{pattern_name}/{name}"), s));
            }
        }
    }
    all
}

fn table_claims() -> Vec<Claim> {
    let mut all = Vec::new();
    let sizes = [
        ("contiguous", "read", [32.0, 58.0, 43.0]),
        ("contiguous", "write", [32.0, 58.0, 44.0]),
        ("strided", "read", [32.0, 58.0, 50.0]),
        ("strided", "write", [32.0, 58.0, 49.0]),
    ];
    for (pattern, op, paper) in sizes {
        let layers: [(&str, Metric); 3] = [
            ("clients", |r| r.outcome.layers.clients.mean_bytes()),
            ("io-nodes", |r| r.outcome.layers.io_nodes.mean_bytes()),
            ("servers", |r| r.outcome.layers.servers.mean_bytes()),
        ];
        for ((layer, metric), kib) in layers.into_iter().zip(paper) {
            let text = match layer {
                "servers" => format!("{op}, {pattern}: mean size of requests that arrive at servers {kib} KB"),
                _ => format!("{op}, {pattern}: mean size of requests that leave {layer} {kib} KB"),
            };
            all.push(Claim::new(
                format!("twins.table1.{op}.{pattern}.{layer}"),
                text,
                Says::Bytes(kib * 1024.0),
                move |t| Some(Ours::of(t.values(&format!("{op}/{pattern}/fifo"), metric)?)),
            ));
        }
    }
    for (pattern, name, mb) in [
        ("contiguous", "fifo", 1341.0),
        ("contiguous", "hbrr", 1340.95),
        ("strided", "fifo", 45.22),
        ("strided", "hbrr", 44.74),
    ] {
        let text = format!("read, {pattern}, {name}: mean offset distance of what leaves the I/O nodes {mb} MB");
        all.push(Claim::new(format!("twins.table2.{pattern}.{name}"), text, Says::Bytes(mb * 1e6), move |t| {
            Some(Ours::of(t.values(&format!("read/{pattern}/{name}"), |r| r.outcome.layers.offset_distance_bytes)?))
        }));
    }
    all
}

fn arrivals(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    OPS.into_iter()
        .map(|(name, op)| {
            let mut s = base.clone();
            s.application[0].op = op;
            // Only first requests count; a sixteenth of the others is enough to have them undisturbed.
            effort.thin(&mut s);
            s.application[0].requests = (s.application[0].requests / 16).max(1);
            Cell::new(name, s)
        })
        .collect()
}

fn arrival_claims() -> Vec<Claim> {
    let of = |op: &'static str, us: f64| {
        let text = format!("{op}: median time between the first requests of 128 processes at an I/O node {us} µs");
        Claim::new(format!("twins.arrivals.{op}"), text, Says::Micros(us), move |t| {
            Some(Ours::of(t.values(op, |r| r.outcome.layers.first_arrival_gap_us)?))
        })
    };
    let slower = Claim::new("twins.arrivals.order", "reads arrive at a faster pace than writes", Says::Better, |t| {
        t.gain("write", "read", |r| r.outcome.layers.first_arrival_gap_us)
    });
    vec![of("read", 26.09), of("write", 50.92), slower]
}

/// Fig. 5 has FIFO, HBRR, no I/O nodes, and TWINS of the windows that were good with strided reads.
fn fig5_systems() -> Vec<String> {
    let base = ["direct", "fifo", "hbrr"].map(String::from);
    base.into_iter().chain([1000, 4000, 8000].map(window)).collect()
}

fn fig5(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    let mut all = Vec::new();
    for dt in OFFSETS_S {
        for name in fig5_systems() {
            let mut s = base.clone();
            system(&mut s, &name);
            // Starts are shortened with the volume, so that the overlap stays in proportion.
            effort.thin(&mut s);
            let dt = f64::from(dt) / effort.divide as f64;
            (s.application[0].start_s, s.application[1].start_s) = ((-dt).max(0.0), dt.max(0.0));
            all.push(Cell::and_alone(format!("{}/{name}", offset(dt * effort.divide as f64)), s));
        }
    }
    all
}

fn offset(dt: f64) -> String {
    format!("dt {dt:+.0} s")
}

fn keys(dt: i32, names: &[String]) -> Vec<String> {
    names.iter().map(|n| format!("{}/{n}", offset(f64::from(dt)))).collect()
}

/// Time of application A, s.
fn first(r: &Run) -> f64 {
    r.time_s(0)
}

/// Its interference factor.
fn factor(r: &Run) -> f64 {
    r.alone_s.first().map_or(f64::NAN, |alone| r.time_s(0) / alone)
}

/// The gain of the best of some systems over the best of others, where it is largest over the offsets.
fn best_over(t: &Table<'_>, new: &[String], base: &[String], metric: fn(&Run) -> f64) -> Option<Ours> {
    largest(OFFSETS_S.map(|dt| {
        let (new, base) = (keys(dt, new), keys(dt, base));
        let refs = |k: &[String]| t.best(&k.iter().map(String::as_str).collect::<Vec<_>>(), metric).map(String::from);
        let gain = refs(&base).zip(refs(&new)).and_then(|(b, n)| t.gain(&b, &n, metric));
        (offset(f64::from(dt)), gain)
    }))
}

fn fig5_claims() -> Vec<Claim> {
    let base = || BASELINES.map(String::from).to_vec();
    let windows = || [1000, 4000, 8000].map(window).to_vec();
    let direct = || vec!["direct".to_string()];
    let claim = |id: &str, text: &str, paper, new: Vec<String>, old: Vec<String>, metric: fn(&Run) -> f64| {
        Claim::new(format!("twins.two.{id}"), text, Says::Gain(paper), move |t| best_over(t, &new, &old, metric))
    };
    vec![
        claim("forwarding", "I/O nodes with FIFO or HBRR: up to 35 % over none", 0.35, base(), direct(), first),
        claim("twins", "TWINS: up to 16 % over FIFO and HBRR", 0.16, windows(), base(), first),
        claim("twins-direct", "TWINS: up to 45 % over no I/O nodes", 0.45, windows(), direct(), first),
        claim("interference", "FIFO and HBRR reduce interference by up to 25 %", 0.25, base(), direct(), factor),
        claim(
            "interference-twins",
            "TWINS reduces interference by up to 12 % over FIFO and HBRR",
            0.12,
            windows(),
            base(),
            factor,
        ),
        claim(
            "interference-direct",
            "TWINS reduces interference by up to 31 % over no I/O nodes",
            0.31,
            windows(),
            direct(),
            factor,
        ),
    ]
}

fn fig5_plots() -> Vec<Plot> {
    let curves = |names: Vec<String>, what: &str| Plot::Lines {
        what: what.into(),
        axis: OFFSETS_S.iter().map(|dt| format!("{dt:+}")).collect(),
        curves: names
            .iter()
            .map(|n| (n.clone(), OFFSETS_S.iter().map(|dt| keys(*dt, std::slice::from_ref(n))[0].clone()).collect()))
            .collect(),
        metric: first,
        log: false,
    };
    let names = ["direct", "fifo", "hbrr"].map(String::from).into_iter().chain([window(8000)]).collect();
    vec![curves(names, "execution time of A, s, over the start of B, s")]
}

fn fig6_systems() -> Vec<String> {
    let base = ["direct", "fifo", "hbrr", "collective", "collective through fifo"].map(String::from);
    base.into_iter().chain(WINDOWS_US.map(window)).collect()
}

fn fig6(base: &Scenario, effort: &Effort) -> Vec<Cell> {
    fig6_systems()
        .into_iter()
        .map(|name| {
            let mut s = base.clone();
            if name.starts_with("collective") {
                s.application[0].collective = Some(Collective { buffer_bytes: 16 << 20, ..Collective::default() });
            }
            let under = match name.as_str() {
                "collective" => "direct",
                "collective through fifo" => "fifo",
                other => other,
            };
            system(&mut s, under);
            effort.thin(&mut s);
            Cell::new(format!("strided/{name}"), s)
        })
        .collect()
}

fn fig6_claims() -> Vec<Claim> {
    let twins = |t: &Table<'_>| {
        let keys = WINDOWS_US.map(|w| format!("strided/{}", window(w)));
        t.best(&keys.each_ref().map(String::as_str), SPAN).map(String::from)
    };
    vec![
        Claim::new(
            "twins.collective",
            "TWINS brings as much as collective I/O: its gain over it",
            Says::Same(2.0 * NONE),
            move |t| {
                let best = twins(t)?;
                Some(t.gain("strided/collective", &best, SPAN)?.noted(best))
            },
        ),
        Claim::new(
            "twins.collective.pays",
            "collective I/O is faster than independent calls without I/O nodes",
            Says::Better,
            |t| t.gain("strided/direct", "strided/collective", SPAN),
        ),
        Claim::new("twins.collective.baseline", "TWINS is faster than FIFO and HBRR here", Says::Better, move |t| {
            let best = twins(t)?;
            Some(t.gain(&baseline(t, "strided")?, &best, SPAN)?.noted(best))
        }),
    ]
}

fn fig6_plots() -> Vec<Plot> {
    let bars = fig6_systems().into_iter().map(|s| (s.clone(), format!("strided/{s}"), !s.starts_with("twins")));
    vec![Plot::Bars { what: "strided reads: execution time, s".into(), bars: bars.collect(), metric: SPAN }]
}
