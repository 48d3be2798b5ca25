//! twins-2017: the I/O nodes of IOFSL, Figs. 3 and 4.

use impresario_sim::model::{Operation, Pattern, Scenario};

use super::{Series, file};
use crate::reproduce::campaign::{Effort, Run};
use crate::reproduce::claim::{Claim, Ours, Table, largest};
use crate::reproduce::figure::{Cell, Figure, Plot, policy};
use crate::reproduce::verdict::Says;

pub(super) const PAPER: &str = "twins-2017";
pub(super) const PATTERNS: [(&str, Pattern); 3] =
    [("contiguous", Pattern::Contiguous), ("strided", Pattern::Strided), ("file per process", Pattern::FilePerProcess)];
/// Windows of Figs. 3 and 4, µs.
pub(super) const WINDOWS_US: [u32; 7] = [125, 250, 500, 1000, 2000, 4000, 8000];
/// A confidence of 99.7 %, as in the paper.
pub(super) const CONFIDENCE: f64 = 0.997;
pub(super) const BASELINES: [&str; 2] = ["fifo", "hbrr"];
/// Differences below this count as none: what the paper's bars of 99.7 % let one see.
pub(super) const NONE: f64 = 0.05;
const SPAN: fn(&Run) -> f64 = Run::makespan_s;

/// The figures.
pub(super) fn figures() -> Vec<Figure> {
    let series = Series { paper: PAPER, repetitions: 8, confidence: CONFIDENCE };
    vec![
        series.figure(
            "twins-2017-fig3",
            "Fig. 3: reads",
            file!("twins-2017-fig3.toml"),
            |base, effort| cells(base, effort, Operation::Read),
            fig3,
            plots,
        ),
        series.figure(
            "twins-2017-fig4",
            "Fig. 4: writes",
            file!("twins-2017-fig4.toml"),
            |base, effort| cells(base, effort, Operation::Write),
            fig4,
            plots,
        ),
    ]
}

/// A window's name in keys: `twins 0.125 ms`.
pub(super) fn window(us: u32) -> String {
    format!("twins {} ms", f64::from(us) / 1000.0)
}

/// The systems of the paper by name.
pub(super) fn systems() -> Vec<String> {
    let base = ["direct", "fifo", "hbrr"].map(String::from);
    base.into_iter().chain(WINDOWS_US.map(window)).collect()
}

/// Puts a system in place.
pub(super) fn system(s: &mut Scenario, name: &str) {
    match (name, &mut s.io_nodes) {
        ("direct", nodes) => *nodes = None,
        (_, Some(nodes)) => {
            let windows = WINDOWS_US.iter().find(|w| window(**w) == name);
            nodes.policy = windows.map_or(policy(name), |us| policy(&format!("twins window_us={us}")));
        }
        (_, None) => {}
    }
}

fn cells(base: &Scenario, effort: &Effort, op: Operation) -> Vec<Cell> {
    let mut all = Vec::new();
    for (name, pattern) in PATTERNS {
        for system_name in systems() {
            let mut s = base.clone();
            (s.application[0].op, s.application[0].pattern) = (op, pattern);
            system(&mut s, &system_name);
            effort.thin(&mut s);
            all.push(Cell::new(format!("{name}/{system_name}"), s));
        }
    }
    all
}

/// The better of FIFO and HBRR in a pattern.
pub(super) fn baseline(t: &Table<'_>, pattern: &str) -> Option<String> {
    let keys = BASELINES.map(|b| format!("{pattern}/{b}"));
    t.best(&keys.each_ref().map(String::as_str), SPAN).map(String::from)
}

/// The best window in a pattern.
fn best_window(t: &Table<'_>, pattern: &str) -> Option<String> {
    let keys = WINDOWS_US.map(|w| format!("{pattern}/{}", window(w)));
    t.best(&keys.each_ref().map(String::as_str), SPAN).map(String::from)
}

/// Gain of the better baseline over no I/O nodes.
fn forwarding(t: &Table<'_>, pattern: &str) -> Option<Ours> {
    let best = baseline(t, pattern)?;
    Some(t.gain(&format!("{pattern}/direct"), &best, SPAN)?.noted(format!("best is {best}")))
}

/// Gain of the best window over the better baseline.
fn windows(t: &Table<'_>, pattern: &str) -> Option<Ours> {
    let (best, base) = (best_window(t, pattern)?, baseline(t, pattern)?);
    Some(t.gain(&base, &best, SPAN)?.noted(format!("{best} over {base}")))
}

/// The two have no difference in a pattern.
fn alike(op: &'static str, pattern: &'static str) -> Claim {
    let id = format!("twins.{op}.hbrr.{}", pattern.replace(' ', "-"));
    Claim::new(
        id,
        format!("{op}, {pattern}: HBRR does not outperform FIFO, no significant difference"),
        Says::Same(NONE),
        move |t| t.gain(&format!("{pattern}/fifo"), &format!("{pattern}/hbrr"), SPAN),
    )
}

fn fig3() -> Vec<Claim> {
    let claim = |id: &str, text: &str, says, ours: fn(&Table<'_>) -> Option<Ours>| {
        Claim::new(format!("twins.read.{id}"), text, says, ours)
    };
    let names = || PATTERNS.map(|p| p.0);
    let mut all = vec![
        claim("forwarding.most", "I/O nodes with FIFO or HBRR: up to 36 % over none", Says::Gain(0.36), |t| {
            largest(PATTERNS.map(|(p, _)| (p.to_string(), forwarding(t, p))))
        }),
        claim(
            "forwarding.fpp-most",
            "the best gain of I/O nodes is with a file per process: its gain less the best other",
            Says::Better,
            |t| {
                let other = largest(["contiguous", "strided"].map(|p| (p.to_string(), forwarding(t, p))))?;
                let pairs = forwarding(t, "file per process")?.values.into_iter().zip(other.values);
                Some(Ours::of(pairs.map(|(f, o)| f - o).collect()))
            },
        ),
        claim("twins.most", "TWINS: up to 28 % over FIFO and HBRR, with strided reads", Says::Gain(0.28), |t| {
            windows(t, "strided")
        }),
        claim("twins.contiguous", "TWINS, contiguous: up to 20 % over FIFO and HBRR", Says::Gain(0.20), |t| {
            windows(t, "contiguous")
        }),
        claim("twins.direct", "TWINS: up to 50 % over no I/O nodes", Says::Gain(0.50), |t| {
            largest(PATTERNS.map(|(p, _)| {
                let best = best_window(t, p);
                (p.to_string(), best.and_then(|b| Some(t.gain(&format!("{p}/direct"), &b, SPAN)?.noted(b))))
            }))
        }),
        claim("twins.fpp", "file per process: TWINS does not pay", Says::Same(NONE), |t| {
            windows(t, "file per process")
        }),
        claim("twins.fpp-small", "file per process: a small window (0.125 ms) does no harm", Says::Same(NONE), |t| {
            t.gain(&baseline(t, "file per process")?, &format!("file per process/{}", window(125)), SPAN)
        }),
        claim("window.contiguous", "contiguous: the best window is 1 ms", Says::Micros(1000.0), |t| {
            best_window_us(t, "contiguous")
        }),
        claim("window.strided", "strided: the best window is 8 ms", Says::Micros(8000.0), |t| {
            best_window_us(t, "strided")
        }),
    ];
    for p in names() {
        let id = format!("twins.read.forwarding.{}", p.replace(' ', "-"));
        all.push(Claim::new(id, format!("{p}: reads gain by I/O nodes"), Says::Better, move |t| forwarding(t, p)));
        all.push(alike("read", p));
    }
    all
}

/// The best window of each repetition.
fn best_window_us(t: &Table<'_>, pattern: &str) -> Option<Ours> {
    let all: Vec<Vec<f64>> =
        WINDOWS_US.iter().map(|w| t.values(&format!("{pattern}/{}", window(*w)), SPAN)).collect::<Option<_>>()?;
    let best = |r: usize| (0..all.len()).min_by(|a, b| all[*a][r].total_cmp(&all[*b][r])).unwrap_or(0);
    Some(Ours::of((0..all[0].len()).map(|r| f64::from(WINDOWS_US[best(r)])).collect()))
}

fn fig4() -> Vec<Claim> {
    let claim = |id: &str, text: &str, says, ours: fn(&Table<'_>) -> Option<Ours>| {
        Claim::new(format!("twins.write.{id}"), text, says, ours)
    };
    let mut all = vec![claim(
        "forwarding.fpp-worst",
        "I/O nodes cost most with a file per process: its gain less the worst other",
        Says::Worse,
        |t| {
            let other = |p: &str| forwarding(t, p);
            let (c, s) = (other("contiguous")?, other("strided")?);
            let worst = if c.mean() < s.mean() { c } else { s };
            let pairs = forwarding(t, "file per process")?.values.into_iter().zip(worst.values);
            Some(Ours::of(pairs.map(|(f, o)| f - o).collect()))
        },
    )];
    for (p, _) in PATTERNS {
        let id = p.replace(' ', "-");
        all.push(Claim::new(
            format!("twins.write.forwarding.{id}"),
            format!("{p}: writes lose by I/O nodes"),
            Says::Worse,
            move |t| forwarding(t, p),
        ));
        all.push(alike("write", p));
        all.push(Claim::new(
            format!("twins.write.twins.{id}"),
            format!("{p}: writes do not profit from TWINS"),
            Says::Same(NONE),
            move |t| windows(t, p),
        ));
        let text = format!("{p}: a small window (0.125 ms) does writes no harm");
        all.push(Claim::new(format!("twins.write.small.{id}"), text, Says::Same(NONE), move |t| {
            t.gain(&baseline(t, p)?, &format!("{p}/{}", window(125)), SPAN)
        }));
    }
    all
}

fn plots() -> Vec<Plot> {
    let one = |(p, _): (&str, Pattern)| Plot::Bars {
        what: format!("{p}: execution time, s"),
        bars: systems().into_iter().map(|s| (s.clone(), format!("{p}/{s}"), !s.starts_with("twins"))).collect(),
        metric: SPAN,
    };
    PATTERNS.map(one).into_iter().collect()
}
