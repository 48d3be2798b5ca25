//! Which factor determines the sign: the papers' main effects under every combination of arrival jitter, rank
//! placement, hand-off depth and the order in which devices serve.
//!
//! For each factor: among all pairs of situations that differ only in it, how many have effects of opposite sign. Both
//! signs must be resolved; a pair with an unresolved one counts as unchanged.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::Result;
use impresario_device::Order;
use impresario_sim::model::{Device, Operation, Pattern, RankPlacement, Scenario};
use serde::{Deserialize, Serialize};

use super::agreement::percent;
use super::campaign::{Campaign, Effort, Run, run_cells};
use super::claim::Table;
use super::figure::{Cell, policy};
use super::papers;
use super::text::row;
use impresario_workload::stats::{Interval, mean, side};
use impresario_workload::stop::Stop;

/// The factors, by the index of their level in a situation.
pub const FACTORS: [&str; 4] = ["arrival jitter", "rank placement", "hand-off depth", "devices serve"];
const JITTER_US: [f64; 4] = [20.0, 100.0, 500.0, 2000.0];
const PLACEMENT: [(&str, RankPlacement); 2] = [("block", RankPlacement::Block), ("cyclic", RankPlacement::Cyclic)];
const DEPTH: [(&str, u32); 3] = [("1", 1), ("4", 4), ("unlimited", 0)];
const ORDER: [(&str, Order); 2] = [("arrival", Order::Arrival), ("elevator", Order::Elevator)];

/// An effect in a situation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Point {
    /// What over what, e.g. `twins 8 ms over fifo`.
    pub effect: String,
    /// Pattern and operation.
    pub case: String,
    /// Levels of [`FACTORS`]; `–` if one does not matter.
    pub levels: [String; 4],
    /// The gain, with its 95 % interval.
    pub gain: Interval,
}

/// How much a factor influences an effect.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Decider {
    /// The effect.
    pub effect: String,
    /// The factor.
    pub factor: String,
    /// Pairs of situations that differ in this factor alone.
    pub pairs: usize,
    /// Pairs whose signs are certainly opposite.
    pub flips: usize,
    /// Mean gain at each level.
    pub levels: Vec<(String, f64)>,
}

/// The result of the sweep.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sweep {
    /// The volume was divided by this.
    pub divide: u64,
    /// Repetitions of each situation and system.
    pub repetitions: u32,
    /// Distinct simulations.
    pub simulations: usize,
    /// All effects in all situations.
    pub points: Vec<Point>,
    /// The influences, strongest factor first within an effect.
    pub deciders: Vec<Decider>,
    /// Failed operations and violated laws.
    pub complaints: Vec<String>,
}

/// A paper's part of the sweep: its cases and systems, and which is compared with which.
struct Study {
    base: Scenario,
    /// With I/O nodes, so that the placement of ranks matters.
    placed: bool,
    cases: Vec<(String, Operation, Pattern, u64, u64)>,
    /// Name, policy of the I/O nodes (empty: none), policy of the servers.
    systems: Vec<(&'static str, &'static str, &'static str)>,
    /// New over base.
    effects: Vec<(&'static str, &'static str)>,
}

fn studies() -> Result<Vec<Study>> {
    let both = |name: &str, pattern, bytes, requests| {
        [("write", Operation::Write), ("read", Operation::Read)]
            .map(|(op_name, op)| (format!("{op_name} {name}"), op, pattern, bytes, requests))
    };
    let agios = [
        both("contiguous 16 KiB", Pattern::Contiguous, 16 << 10, 128),
        both("strided 16 KiB", Pattern::Strided, 16 << 10, 128),
        both("contiguous 256 KiB", Pattern::Contiguous, 256 << 10, 8),
        both("strided 256 KiB", Pattern::Strided, 256 << 10, 8),
    ];
    let twins = [
        both("contiguous", Pattern::Contiguous, 32 << 10, 1024),
        both("strided", Pattern::Strided, 32 << 10, 1024),
        both("file per process", Pattern::FilePerProcess, 32 << 10, 1024),
    ];
    Ok(vec![
        Study {
            base: papers::figure("agios-2013-fig5")?.base,
            placed: false,
            cases: agios.into_iter().flatten().collect(),
            systems: vec![
                ("none", "", "none"),
                ("mlf of the paper", "", "mlf window_us=0 guard_batches=0 pass_us=900"),
                ("mlf", "", "mlf"),
            ],
            effects: vec![("mlf of the paper", "none"), ("mlf", "none")],
        },
        Study {
            base: papers::figure("twins-2017-fig3")?.base,
            placed: true,
            cases: twins.into_iter().flatten().collect(),
            systems: vec![
                ("no I/O nodes", "", "fifo"),
                ("fifo", "fifo", "fifo"),
                ("twins 1 ms", "twins window_us=1000", "fifo"),
                ("twins 8 ms", "twins window_us=8000", "fifo"),
            ],
            effects: vec![("fifo", "no I/O nodes"), ("twins 1 ms", "fifo"), ("twins 8 ms", "fifo")],
        },
    ])
}

/// A situation: indices into the levels of the factors.
type Levels = [usize; 4];

fn situations(study: &Study) -> Vec<Levels> {
    let placements = if study.placed { PLACEMENT.len() } else { 1 };
    let mut all = Vec::new();
    for j in 0..JITTER_US.len() {
        for p in 0..placements {
            for d in 0..DEPTH.len() {
                all.extend((0..ORDER.len()).map(|o| [j, p, d, o]));
            }
        }
    }
    all
}

fn names(study: &Study, [j, p, d, o]: Levels) -> [String; 4] {
    let placement = if study.placed { PLACEMENT[p].0 } else { "–" };
    [format!("{} ms", JITTER_US[j] / 1000.0), placement.into(), DEPTH[d].0.into(), ORDER[o].0.into()]
}

fn scenario(
    study: &Study,
    case: &(String, Operation, Pattern, u64, u64),
    at: Levels,
    system: (&str, &str),
) -> Scenario {
    let mut s = study.base.clone();
    let [j, p, d, o] = at;
    for a in &mut s.application {
        (a.op, a.pattern, a.request_bytes, a.requests) = (case.1, case.2, case.3, case.4);
        a.jitter_us = JITTER_US[j];
    }
    s.clients.placement = PLACEMENT[p].1;
    s.servers.in_flight = DEPTH[d].1;
    s.servers.policy = policy(system.1);
    match (&mut s.io_nodes, system.0) {
        (nodes, "") => *nodes = None,
        (Some(nodes), line) => nodes.policy = policy(line),
        (None, _) => {}
    }
    for device in s.device.values_mut() {
        if let Device::Disk(disk) = device {
            disk.order = ORDER[o].1;
        }
    }
    s
}

/// Runs the sweep.
pub fn run(effort: &Effort, stop: &Stop, step: &mut dyn FnMut(super::Step)) -> Result<Sweep> {
    let repetitions = effort.repetitions.unwrap_or(4);
    let studies = studies()?;
    let mut cells = Vec::new();
    for study in &studies {
        for case in &study.cases {
            for at in situations(study) {
                for (name, io, data) in &study.systems {
                    let mut s = scenario(study, case, at, (io, data));
                    effort.thin(&mut s);
                    cells.push(("sweep", repetitions, Cell::new(key(case, study, at, name), s)));
                }
            }
        }
    }
    let campaign = run_cells(&cells, effort, stop, step)?;
    let points = points(&studies, &campaign);
    Ok(Sweep {
        divide: effort.divide.max(1),
        repetitions,
        simulations: campaign.simulations,
        deciders: deciders(&points),
        points,
        complaints: campaign.complaints,
    })
}

fn key(case: &(String, Operation, Pattern, u64, u64), study: &Study, at: Levels, system: &str) -> String {
    format!("{}/{}/{system}", case.0, names(study, at).join("/"))
}

fn points(studies: &[Study], campaign: &Campaign) -> Vec<Point> {
    let Some(runs) = campaign.figures.get("sweep") else { return Vec::new() };
    let table = Table { runs };
    let mut all = Vec::new();
    for study in studies {
        for (new, base) in &study.effects {
            for case in &study.cases {
                for at in situations(study) {
                    let keys = (key(case, study, at, base), key(case, study, at, new));
                    let Some(gain) = table.gain(&keys.0, &keys.1, Run::makespan_s) else { continue };
                    all.push(Point {
                        effect: format!("{new} over {base}"),
                        case: case.0.clone(),
                        levels: names(study, at),
                        gain: Interval::of(&gain),
                    });
                }
            }
        }
    }
    all
}

/// The influence of each factor on each effect.
fn deciders(points: &[Point]) -> Vec<Decider> {
    let mut effects: Vec<&str> = Vec::new();
    for p in points {
        if !effects.contains(&p.effect.as_str()) {
            effects.push(&p.effect);
        }
    }
    let mut all = Vec::new();
    for effect in effects {
        let of: Vec<&Point> = points.iter().filter(|p| p.effect == effect).collect();
        let mut here: Vec<Decider> = (0..FACTORS.len()).filter_map(|f| decider(effect, f, &of)).collect();
        here.sort_by(|a, b| (b.flips * a.pairs).cmp(&(a.flips * b.pairs)));
        all.extend(here);
    }
    all
}

fn decider(effect: &str, factor: usize, points: &[&Point]) -> Option<Decider> {
    // Groups situations that differ only in this factor.
    let mut groups: BTreeMap<(String, Vec<String>), Vec<&Point>> = BTreeMap::new();
    let mut levels: Vec<(String, Vec<f64>)> = Vec::new();
    for p in points {
        let others = p.levels.iter().enumerate().filter(|(f, _)| *f != factor).map(|(_, l)| l.clone()).collect();
        groups.entry((p.case.clone(), others)).or_default().push(p);
        let level = &p.levels[factor];
        match levels.iter_mut().find(|(name, _)| name == level) {
            Some((_, gains)) => gains.push(p.gain.mean),
            None => levels.push((level.clone(), vec![p.gain.mean])),
        }
    }
    if levels.len() < 2 {
        return None;
    }
    let (mut pairs, mut flips) = (0, 0);
    for group in groups.values() {
        for (i, a) in group.iter().enumerate() {
            for b in &group[i + 1..] {
                pairs += 1;
                flips += usize::from(matches!((side(a.gain, 0.0), side(b.gain, 0.0)), (Some(a), Some(b)) if a != b));
            }
        }
    }
    let levels = levels.into_iter().map(|(name, gains)| (name, mean(&gains))).collect();
    Some(Decider { effect: effect.into(), factor: FACTORS[factor].into(), pairs, flips, levels })
}

/// For the document: the influences, then the mean gains by case and level of the two strongest factors.
pub fn markdown(sweep: &Sweep) -> String {
    let mut out = format!(
        "{} simulations, {} repetitions; volumes divided by {}.\n\n",
        sweep.simulations, sweep.repetitions, sweep.divide
    );
    let head = ["effect", "factor", "signs that flip", "mean gain by level"];
    row(&mut out, head.map(String::from));
    row(&mut out, head.map(|_| "---".into()));
    for d in &sweep.deciders {
        let levels: Vec<String> = d.levels.iter().map(|(name, gain)| format!("{name}: {}", percent(*gain))).collect();
        let share = 100.0 * d.flips as f64 / d.pairs.max(1) as f64;
        row(
            &mut out,
            [
                d.effect.clone(),
                d.factor.clone(),
                format!("{share:.0} % ({} of {} pairs)", d.flips, d.pairs),
                levels.join(", "),
            ],
        );
    }
    let mut by_case: BTreeMap<(String, String), [usize; 3]> = BTreeMap::new();
    for p in &sweep.points {
        let counts = by_case.entry((p.effect.clone(), p.case.clone())).or_default();
        counts[match side(p.gain, 0.0) {
            Some(Ordering::Greater) => 0,
            Some(_) => 1,
            None => 2,
        }] += 1;
    }
    _ = write!(out, "\nIn how many of the situations each effect is a gain, a loss, or unresolved:\n\n");
    row(&mut out, ["effect", "case", "gain", "loss", "unresolved"].map(String::from));
    row(&mut out, ["---"; 5].map(String::from));
    for ((effect, case), n) in by_case {
        row(&mut out, [effect, case, n[0].to_string(), n[1].to_string(), n[2].to_string()]);
    }
    for complaint in &sweep.complaints {
        _ = write!(out, "\nNot well: {complaint}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(case: &str, jitter: &str, depth: &str, gain: f64) -> Point {
        Point {
            effect: "a over b".into(),
            case: case.into(),
            levels: [jitter.into(), "–".into(), depth.into(), "arrival".into()],
            gain: Interval { mean: gain, low: gain - 0.05, high: gain + 0.05, n: 3 },
        }
    }

    #[test]
    fn the_factor_whose_levels_change_the_sign_decides() {
        let points = [
            point("x", "0.1 ms", "1", 0.4),
            point("x", "2 ms", "1", 0.2),
            point("x", "0.1 ms", "4", -0.2),
            point("x", "2 ms", "4", -0.01),
        ];
        let deciders = deciders(&points);
        assert_eq!(deciders.len(), 2, "placement and order have one level");
        let depth = &deciders[0];
        assert_eq!((depth.factor.as_str(), depth.pairs, depth.flips), ("hand-off depth", 2, 1), "-0.01 is unresolved");
        assert!((depth.levels[0].1 - 0.3).abs() < 1e-12);
        assert_eq!((deciders[1].factor.as_str(), deciders[1].pairs, deciders[1].flips), ("arrival jitter", 2, 0));
    }

    #[test]
    fn every_situation_passes_the_checks() {
        for study in studies().unwrap() {
            for at in situations(&study) {
                for (_, io, data) in &study.systems {
                    let s = scenario(&study, &study.cases[0], at, (io, data));
                    assert_eq!(s.check(), [], "{at:?} {io} {data}");
                }
            }
        }
    }
}
