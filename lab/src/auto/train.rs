//! Trains the decision table: runs every candidate in every training situation, grows a tree, and writes its leaves as
//! rules.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Result, anyhow};
use impresario_device::FlashParams;
use impresario_sched::PolicySpec;
use impresario_sched::policy::auto::table::{DecisionTable, NodeRole};
use impresario_sched::policy::auto::{FEATURES, Observation};
use impresario_sim::Scenario;
use impresario_sim::model::Device;
use impresario_sim::sweep::side_by_side;
use serde::{Deserialize, Serialize};

use super::situation::{Situation, training, training_io};
use super::tree::{Growth, Leaf, Sample, grow};
use super::trial::{self, Costs, Trial};

/// The baseline of gains.
pub const BASELINE: &str = "fifo";

/// The candidates for a data server.
pub const DATA: [&str; 31] = [
    BASELINE,
    "none",
    "fifo merge=on",
    "hbrr",
    "mlf",
    "aioli",
    "sjf",
    "sw",
    "sw window_ms=10000",
    "orr",
    "deadline sweep_batches=1024",
    "set10",
    "wscan",
    "wscan window_bytes=0",
    "sstf",
    "wscan guard_batches=4096 turn_bytes=16777216",
    "sw batch_requests=1024 batch_bytes=4194304",
    "sjf batch_requests=1024 batch_bytes=4194304 guard_batches=1024",
    "mlf window_us=250000",
    "mlf window_us=250000 batch_requests=1024 batch_bytes=4194304",
    "orr quantum_requests=65535 batch_requests=1024 batch_bytes=4194304",
    "agios",
    "agios hold_us=900",
    "scan",
    "mlf hold_us=900",
    "mlf hold_us=3000 window_us=250000",
    "aioli hold_us=3000",
    "sstf guard_batches=4096",
    "mlf dwell_us=2000",
    "mlf dwell_us=5000",
    "mlf dwell_us=2000 window_us=250000",
];

/// Those of them under which a data server's observations are learnt from: what acts before anything is observed, and what
/// tables choose most. Under the others, which hardly ever act, the same load may look otherwise.
const OBSERVED: [&str; 7] = [
    "sw window_ms=10000",
    "orr",
    "wscan",
    "mlf window_us=250000",
    "mlf dwell_us=2000",
    "mlf dwell_us=5000",
    "mlf dwell_us=2000 window_us=250000",
];

/// The candidates for an I/O node. It keeps no queue in front of data servers that take what comes, so that policies which
/// only order differ in nothing from fifo (`impresario-lab study io-nodes`).
pub const IO_NODE: [&str; 11] = [
    BASELINE,
    "none",
    "twins window_us=1000",
    "twins window_us=2000",
    "twins window_us=4000",
    "twins window_us=8000",
    "twins window_us=16000",
    "twins window_us=32000",
    "twins window_us=8000 work_conserving=on",
    "twins window_us=16000 work_conserving=on",
    "twins window_us=16000 in_flight_per_server=1 merge=on order_within=offset work_conserving=idle",
];

/// The costs of the alternatives in a situation.
#[derive(Serialize, Deserialize)]
pub struct Measured {
    /// By candidate: the mean over the seeds.
    pub costs: Vec<Costs>,
    /// The observations under some of them.
    pub seen: Vec<Observation>,
}

/// Runs every candidate in every situation with every seed.
pub fn measure(
    situations: &[Situation],
    candidates: &[&str],
    seeds: &[u64],
    change: &(dyn Fn(&mut Scenario) + Sync),
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Measured>> {
    let per = candidates.len() * seeds.len();
    let count = situations.len() * per;
    let run = |nth: usize| {
        let (situation, rest) = (&situations[nth / per], nth % per);
        let (candidate, place) = (candidates[rest / seeds.len()], situation.place());
        let policy = trial::forced(candidate, place);
        let mut scenario = situation.scenario(&policy, seeds[rest % seeds.len()]);
        change(&mut scenario);
        let is_observed = place == NodeRole::IoNode || OBSERVED.contains(&candidate);
        Some(trial::run(&scenario, is_observed.then_some(place)))
    };
    let mut trials: Vec<Option<Result<Trial>>> = (0..count).map(|_| None).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut done = 0;
    side_by_side(count, threads, run, |nth, trial| {
        trials[nth] = Some(trial);
        done += 1;
        progress(done, count);
    });
    let mut trials = trials.into_iter();
    let mut measured = Vec::new();
    for _ in situations {
        let (mut costs, mut seen) = (Vec::new(), Vec::new());
        for _ in candidates {
            let mut mean = [0.0; 4];
            for _ in seeds {
                let trial = trials.next().flatten().ok_or_else(|| anyhow!("a simulation was not run"))??;
                mean.iter_mut().zip(trial.costs).for_each(|(mean, cost)| *mean += cost / seeds.len() as f64);
                seen.extend(trial.seen);
            }
            costs.push(mean);
        }
        measured.push(Measured { costs, seen });
    }
    Ok(measured)
}

/// The candidates for an I/O node as fixed policies, to compare with.
pub fn fixed_on_io_nodes() -> Vec<PolicySpec> {
    IO_NODE.iter().filter_map(|text| text.parse().ok()).collect()
}

/// ln(makespan/best) of every candidate.
pub fn regrets(measured: &Measured) -> Vec<f64> {
    let best = measured.costs.iter().map(|c| c[0]).fold(f64::INFINITY, f64::min);
    measured.costs.iter().map(|c| (c[0] / best).ln()).collect()
}

/// The leaves of a tree over the measurements.
pub fn leaves(measured: &[Measured], growth: Growth) -> Vec<Leaf> {
    let regrets: Vec<Vec<f64>> = measured.iter().map(regrets).collect();
    // First windows decide by themselves, so they weigh as much as all the others together.
    let sample = |(situation, m): (usize, &Measured)| {
        let count = |first| m.seen.iter().filter(|seen| seen.first == first).count();
        let kinds = if count(true) > 0 && count(false) > 0 { 2.0 } else { 1.0 };
        let weight = |seen: &Observation| 1.0 / (kinds * count(seen.first) as f64);
        m.seen.iter().map(|seen| Sample { seen: *seen, situation, weight: weight(seen) }).collect::<Vec<_>>()
    };
    let samples: Vec<Sample> = measured.iter().enumerate().flat_map(sample).collect();
    grow(&samples, &regrets, growth)
}

/// Expected gains of a candidate in a leaf, by objective: 1 − the geometric mean of T/T_fifo.
fn gains(leaf: &Leaf, measured: &[Measured], candidate: usize) -> Costs {
    let total = leaf.situations.iter().map(|(_, weight)| weight).sum::<f64>();
    std::array::from_fn(|objective| {
        let log = |(situation, weight): &(usize, f64)| {
            let costs = &measured[*situation].costs;
            // Times without any variance do not differ.
            let (cost, base) = (costs[candidate][objective].max(1e-12), costs[0][objective].max(1e-12));
            (cost / base).ln().clamp(-10.0, 10.0) * weight
        };
        1.0 - (leaf.situations.iter().map(log).sum::<f64>() / total).exp()
    })
}

/// The alternatives listed in a rule: the choice, the best four by makespan, the best by each other objective, and the
/// one that does nothing.
fn listed(leaf: &Leaf, gains: &[Costs]) -> Vec<usize> {
    let mut all = vec![leaf.choice, 0, 1];
    for objective in 0..4 {
        let mut order: Vec<usize> = (0..gains.len()).collect();
        order.sort_by(|a, b| gains[*b][objective].total_cmp(&gains[*a][objective]));
        all.extend(&order[..if objective == 0 { 4 } else { 1 }]);
    }
    all.sort_unstable();
    all.dedup();
    all.sort_by(|a, b| gains[*b][0].total_cmp(&gains[*a][0]));
    all
}

/// A number as TOML has it.
fn number(value: f64) -> String {
    let text = if value.abs() >= 1000.0 { format!("{value:.1}") } else { format!("{value:?}") };
    if text.contains('.') { text } else { format!("{text}.0") }
}

/// A leaf in words.
fn name_of(leaf: &Leaf) -> String {
    let of = |(feature, bounds): &(usize, impresario_sched::policy::auto::table::Bounds)| {
        let name = FEATURES[*feature].0.replace('_', " ");
        match (bounds.from, bounds.below) {
            (Some(from), Some(below)) => format!("{name} {from} to {below}"),
            (Some(from), None) => format!("{name} from {from}"),
            (None, Some(below)) => format!("{name} below {below}"),
            (None, None) => name,
        }
    };
    leaf.conditions.iter().map(of).collect::<Vec<_>>().join(", ")
}

/// The rules of the leaves as text of the table; `fixed` are the conditions that all share.
pub fn rules(leaves: &[Leaf], measured: &[Measured], candidates: &[&str], (about, fixed): (&str, &str)) -> String {
    let mut out = String::new();
    for leaf in leaves {
        let name = match name_of(leaf).as_str() {
            "" => about.to_string(),
            conditions => format!("{about}: {conditions}"),
        };
        let n = leaf.situations.len();
        // Writing to a string cannot fail.
        _ = writeln!(out, "[[rule]] # {n} training situations; the choice is {:.1} % off the best on average", {
            100.0 * (leaf.loss.exp() - 1.0)
        });
        _ = writeln!(out, "name = \"{name}\"\n{fixed}");
        for (feature, bounds) in &leaf.conditions {
            let side = |name: &str, value: Option<f64>| value.map(|v| format!("{name} = {}", number(v)));
            let both: Vec<_> = [side("from", bounds.from), side("below", bounds.below)].into_iter().flatten().collect();
            _ = writeln!(out, "{} = {{ {} }}", FEATURES[*feature].0, both.join(", "));
        }
        _ = writeln!(out, "choice = [");
        let gains: Vec<Costs> = (0..candidates.len()).map(|c| gains(leaf, measured, c)).collect();
        for candidate in listed(leaf, &gains) {
            let [makespan, mean_time, variance, share] = gains[candidate].map(|g| format!("{:.2}", g.max(-99.0)));
            _ = writeln!(
                out,
                "  {{ policy = \"{}\", makespan = {makespan}, mean_time = {mean_time}, variance = {variance}, share = {share} }},",
                candidates[candidate]
            );
        }
        _ = writeln!(out, "]\n");
    }
    out
}

/// The head of the table.
const HEAD: &str = include_str!("head.toml");

/// Expectations where nothing was trained.
const LAST: &str = r#"[[rule]]
name = "I/O node, nothing observed yet"
place = "io-node"
choice = [{ policy = "none" }]

[[rule]]
name = "nothing observed yet, or nothing trained for it"
choice = [{ policy = "wscan" }]
"#;

/// Flash devices with no sorting layer in front.
fn on_flash(scenario: &mut Scenario) {
    let flash = Device::Flash(FlashParams::default());
    scenario.device = BTreeMap::from([("disk".into(), flash)]);
}

/// What was measured for a table: other trees can be grown from it.
#[derive(Serialize, Deserialize)]
pub struct Measurements {
    disk: Vec<Measured>,
    flash: Vec<Measured>,
    /// In front of data servers that keep the order of arrival, and of those with an order of their own.
    io_nodes: [Vec<Measured>; 2],
}

/// Measures every candidate in every training situation, or on I/O nodes only.
pub fn measure_all(
    count: usize,
    seeds: &[u64],
    io_nodes_only: bool,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Measurements> {
    let (mut disk, mut flash) = (Vec::new(), Vec::new());
    if !io_nodes_only {
        let situations = training(count);
        disk = measure(&situations, &DATA, seeds, &|_| (), progress)?;
        let few: Vec<Situation> = situations.iter().step_by(9).cloned().collect();
        flash = measure(&few, &DATA, &seeds[..1], &on_flash, progress)?;
    }
    let situations = training_io(count / 2);
    let (scheduled, arrival): (Vec<Situation>, Vec<Situation>) =
        situations.into_iter().partition(Situation::is_scheduled_below);
    let mut io = |situations: &[Situation]| measure(situations, &IO_NODE, seeds, &|_| (), progress);
    Ok(Measurements { disk, flash, io_nodes: [io(&arrival)?, io(&scheduled)?] })
}

/// The text of the table that follows from measurements.
pub fn table(measured: &Measurements, growth: Growth) -> Result<String> {
    let mut text = HEAD.to_string();
    let fixed = "place = \"data\"\nsorted_below = false\ndevice = [\"disk\"]";
    text += &rules(&leaves(&measured.disk, growth), &measured.disk, &DATA, ("disk", fixed));
    let fixed = "place = \"data\"\nsorted_below = false\ndevice = [\"flash\", \"memory\"]";
    let whole = Growth { depth_max: 0, ..growth };
    text += &rules(&leaves(&measured.flash, whole), &measured.flash, &DATA, ("flash or memory", fixed));
    text += &io_rules(measured, growth);
    text += LAST;
    DecisionTable::parse(&text).map_err(|why| anyhow!("the trained table is refused: {why}"))?;
    Ok(text)
}

/// The rules for I/O nodes alone.
pub fn io_rules(measured: &Measurements, growth: Growth) -> String {
    let below = [("order of arrival below", false), ("order of its own below", true)];
    let rules = |(measured, (below, scheduled)): (&Vec<Measured>, (&str, bool))| {
        let fixed = format!("place = \"io-node\"\nsorted_below = false\nscheduled_below = {scheduled}");
        rules(&leaves(measured, growth), measured, &IO_NODE, (&format!("I/O node, {below}"), &fixed))
    };
    measured.io_nodes.iter().zip(below).map(rules).collect()
}
