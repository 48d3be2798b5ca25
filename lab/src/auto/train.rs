//! Trains the decision table: runs every candidate in every training situation, grows a tree, and writes its leaves as
//! rules.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Result, anyhow};
use impresario_device::FlashParams;
use impresario_sched::PolicySpec;
use impresario_sched::policy::auto::FEATURES;
use impresario_sched::policy::auto::table::DecisionTable;
use impresario_sim::Scenario;
use impresario_sim::model::Device;
use impresario_sim::sweep::side_by_side;

use super::situation::{Situation, training, training_io};
use super::tree::{Growth, Leaf, Sample, grow};
use super::trial::{self, Costs, Trial};

/// The baseline of gains.
pub const BASELINE: &str = "fifo";

/// The candidates for a data server.
pub const DATA: [&str; 14] = [
    BASELINE,
    "none",
    "fifo merge=on",
    "hbrr",
    "mlf",
    "aioli",
    "sjf",
    "sw window_ms=10000",
    "orr",
    "deadline sweep_batches=1024",
    "set10",
    "wscan",
    "wscan window_bytes=0",
    "sstf",
];

/// The candidates for an I/O node. It keeps no queue in front of data servers that take what comes, so that policies which
/// only order differ in nothing from fifo (`impresario-lab study io-nodes`).
pub const IO_NODE: [&str; 8] = [
    BASELINE,
    "none",
    "twins window_us=1000",
    "twins window_us=2000",
    "twins window_us=4000",
    "twins window_us=8000",
    "twins window_us=16000",
    "twins window_us=32000",
];

/// The costs of the alternatives in a situation.
pub struct Measured {
    /// By candidate: the mean over the seeds.
    pub costs: Vec<Costs>,
    /// The observations under each of them.
    pub seen: Vec<impresario_sched::policy::auto::Observation>,
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
        let policy = trial::forced(candidates[rest / seeds.len()], situation.place());
        let mut scenario = situation.scenario(&policy, seeds[rest % seeds.len()]);
        change(&mut scenario);
        Some(trial::run(&scenario, Some(situation.place())))
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
    let sample = |(situation, m): (usize, &Measured)| {
        let weight = 1.0 / m.seen.len().max(1) as f64;
        m.seen.iter().map(move |seen| Sample { seen: *seen, situation, weight }).collect::<Vec<_>>()
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

/// Trains a table and returns its text.
pub fn table(count: usize, seeds: &[u64], growth: Growth, progress: &mut dyn FnMut(usize, usize)) -> Result<String> {
    let situations = training(count);
    let disk = measure(&situations, &DATA, seeds, &|_| (), progress)?;
    let few: Vec<Situation> = situations.iter().step_by(9).cloned().collect();
    let flash = measure(&few, &DATA, &seeds[..1], &on_flash, progress)?;
    let mut text = HEAD.to_string();
    let fixed = "place = \"data\"\nsorted_below = false\ndevice = [\"disk\"]";
    text += &rules(&leaves(&disk, growth), &disk, &DATA, ("disk", fixed));
    let fixed = "place = \"data\"\nsorted_below = false\ndevice = [\"flash\", \"memory\"]";
    let whole = Growth { depth_max: 0, ..growth };
    text += &rules(&leaves(&flash, whole), &flash, &DATA, ("flash or memory", fixed));
    text += &io_rules(count, seeds, growth, progress)?;
    text += LAST;
    DecisionTable::parse(&text).map_err(|why| anyhow!("the trained table is refused: {why}"))?;
    Ok(text)
}

/// Trains the rules for I/O nodes.
pub fn io_rules(count: usize, seeds: &[u64], growth: Growth, progress: &mut dyn FnMut(usize, usize)) -> Result<String> {
    let io = measure(&training_io(count), &IO_NODE, seeds, &|_| (), progress)?;
    let fixed = "place = \"io-node\"\nsorted_below = false";
    Ok(rules(&leaves(&io, growth), &io, &IO_NODE, ("I/O node", fixed)))
}
