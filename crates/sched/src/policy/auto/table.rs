//! The decision table of `auto`, from observations to a policy: a file to read, edit and retrain.
//!
//! TOML: a list of `[[rule]]`; the first rule whose conditions all hold applies. The built-in table is `table.toml`
//! beside this file; its head documents every column. Errors name their line or the rule.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::observe::{DeviceClass, FEATURES, Feature, Observation};
use crate::policy::{self, Params};
use crate::spec::PolicySpec;

/// The version of the format.
const VERSION: u32 = 1;
/// Maximum rules.
const RULES_MAX: usize = 256;
/// Maximum alternatives of a rule.
const CHOICES_MAX: usize = 32;

/// The built-in table.
pub const BUILT_IN: &str = include_str!("table.toml");

/// What to optimise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// The time until the slowest process ends.
    Makespan,
    /// The mean run time of a process.
    MeanTime,
    /// The variance of the processes' times.
    Variance,
    /// The smallest share that an application gets.
    Share,
}

impl Objective {
    /// Their names as parameter values.
    pub const NAMES: [&str; 4] = ["makespan", "mean-time", "variance", "share"];

    /// The objective with this name; the first for any other.
    pub fn named(name: &str) -> Objective {
        match name {
            "mean-time" => Objective::MeanTime,
            "variance" => Objective::Variance,
            "share" => Objective::Share,
            _ => Objective::Makespan,
        }
    }
}

/// Which kind of node the scheduler runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeRole {
    /// In front of one device.
    Data,
    /// In front of several data servers.
    IoNode,
}

/// Bounds of an observed value: `from` ≤ value < `below`.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// The lower bound, inclusive; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<f64>,
    /// The upper bound, exclusive; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<f64>,
}

impl Bounds {
    fn hold(&self, value: f64) -> bool {
        self.from.is_none_or(|from| value >= from) && self.below.is_none_or(|below| value < below)
    }
}

/// A policy and its expected gain over `fifo`: 1 − T/T_fifo of the objective's metric; negative: a loss.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alternative {
    /// The policy with its parameters (waiting included), as on a command line.
    pub policy: String,
    /// Maximum batches in flight per lane; absent: as configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    /// Start speculative reads beside it.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub read_ahead: bool,
    /// Expected gain in makespan.
    #[serde(default)]
    pub makespan: f64,
    /// Expected gain in the mean time of a process.
    #[serde(default)]
    pub mean_time: f64,
    /// Expected gain in the variance of the processes' times.
    #[serde(default)]
    pub variance: f64,
    /// Expected gain in the smallest application throughput: 1 − least_fifo/least.
    #[serde(default)]
    pub share: f64,
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)] // required by serde
fn is_true(on: &bool) -> bool {
    *on
}

impl Alternative {
    /// Its expected gain.
    pub fn gain(&self, objective: Objective) -> f64 {
        match objective {
            Objective::Makespan => self.makespan,
            Objective::MeanTime => self.mean_time,
            Objective::Variance => self.variance,
            Objective::Share => self.share,
        }
    }

    /// Its policy; valid because the table was validated.
    pub(super) fn spec(&self) -> PolicySpec {
        self.policy.parse().unwrap_or_else(|_| PolicySpec::named("fifo"))
    }
}

/// Conditions, and the alternatives that apply when they hold.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Rule {
    /// The name.
    pub name: String,
    /// Only on this kind of node; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<NodeRole>,
    /// Only above a layer that sorts (true) or does not (false); absent: both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sorted_below: Option<bool>,
    /// Only above a layer with an order of its own (true) or one that keeps the order of arrival (false); absent: both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduled_below: Option<bool>,
    /// Only for these device classes; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Vec<DeviceClass>>,
    /// The alternatives.
    pub choice: Vec<Alternative>,
    /// Conditions on observations, by the names in [`FEATURES`]; all must hold.
    #[serde(flatten)]
    pub observed: BTreeMap<String, Bounds>,
}

/// What is fixed for the lifetime of a scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Situation {
    /// The kind of node.
    pub place: NodeRole,
    /// The layer below sorts.
    pub sorted_below: bool,
    /// The layer below has an order of its own.
    pub scheduled_below: bool,
    /// The device class; `None` while unknown.
    pub device: Option<DeviceClass>,
}

impl Rule {
    fn fits(&self, situation: Situation) -> bool {
        self.place.is_none_or(|place| place == situation.place)
            && self.sorted_below.is_none_or(|sorted| sorted == situation.sorted_below)
            && self.scheduled_below.is_none_or(|scheduled| scheduled == situation.scheduled_below)
            && self.device.as_ref().is_none_or(|all| situation.device.is_some_and(|d| all.contains(&d)))
    }

    fn holds(&self, seen: &Observation) -> bool {
        self.observed.iter().all(|(name, bounds)| feature(name).is_none_or(|(_, value)| bounds.hold(value(seen))))
    }
}

fn feature(name: &str) -> Option<&'static Feature> {
    FEATURES.iter().find(|f| f.0 == name)
}

/// A decision table.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionTable {
    /// Format version: 1.
    pub version: u32,
    /// In order of precedence. The last rule has no conditions.
    pub rule: Vec<Rule>,
}

impl DecisionTable {
    /// Parses and validates a table; the error is one line.
    pub fn parse(text: &str) -> Result<DecisionTable, String> {
        let table: DecisionTable = impresario_toml::parse_text(text)?;
        table.check()?;
        Ok(table)
    }

    fn check(&self) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("version {} is not supported; this program reads version {VERSION}", self.version));
        }
        if self.rule.len() > RULES_MAX {
            return Err(format!("there are {} rules; at most {RULES_MAX} are read", self.rule.len()));
        }
        self.rule.iter().try_for_each(check_rule)?;
        let last = self.rule.last().ok_or("there is no [[rule]]")?;
        let fixed = last.place.is_some() || last.device.is_some();
        if !last.observed.is_empty() || fixed || last.sorted_below.is_some() || last.scheduled_below.is_some() {
            return Err(format!("the last rule, {:?}, has conditions; one without any must end the table", last.name));
        }
        Ok(())
    }

    /// The rule that applies; without an observation (`seen` is `None`) rules that need one are skipped.
    pub(super) fn rule_for(&self, situation: Situation, seen: Option<&Observation>) -> usize {
        let fits = |rule: &Rule| rule.fits(situation) && seen.map_or(rule.observed.is_empty(), |seen| rule.holds(seen));
        self.rule.iter().position(fits).unwrap_or(self.rule.len() - 1)
    }

    /// True if no observation can change which rule applies.
    pub(super) fn needs_no_observation(&self, situation: Situation) -> bool {
        let first = self.rule.iter().find(|rule| {
            let device = situation.device.is_none() && rule.device.is_some();
            device || rule.fits(situation)
        });
        first.is_some_and(|rule| rule.observed.is_empty() && (rule.device.is_none() || situation.device.is_some()))
    }
}

fn check_rule(rule: &Rule) -> Result<(), String> {
    let refuse = |what: String| Err(format!("rule {:?}: {what}", rule.name));
    if rule.choice.is_empty() || rule.choice.len() > CHOICES_MAX {
        return refuse(format!("there are {} choices; a rule has 1 to {CHOICES_MAX}", rule.choice.len()));
    }
    if let Some(unknown) = rule.observed.keys().find(|name| feature(name).is_none()) {
        let known: Vec<_> = FEATURES.iter().map(|f| f.0).collect();
        return refuse(format!(
            "\"{unknown}\" is not observed; conditions are on place, sorted_below, scheduled_below, device, {}",
            known.join(", ")
        ));
    }
    let empty = |bounds: &Bounds| {
        let values = [bounds.from, bounds.below];
        values.iter().flatten().any(|v| !v.is_finite()) || bounds.from.zip(bounds.below).is_some_and(|(a, b)| a >= b)
    };
    if let Some((name, _)) = rule.observed.iter().find(|(_, bounds)| empty(bounds)) {
        return refuse(format!("{name}: nothing lies between these bounds"));
    }
    for choice in &rule.choice {
        let refuse = |what: String| refuse(format!("policy \"{}\": {what}", choice.policy));
        let spec: PolicySpec = match choice.policy.parse() {
            Ok(spec) => spec,
            Err(e) => return refuse(format!("{e}")),
        };
        if policy::info(&spec.name).is_some_and(|info| info.conduct.is_chosen_by_hand) {
            return refuse("it is not for a table: it follows an administrator's rules, not what is observed".into());
        }
        // Policies that need several lanes are for I/O nodes.
        let lanes = if rule.place == Some(NodeRole::IoNode) { 4 } else { 1 };
        if let Err(e) = policy::check(&spec, lanes) {
            return refuse(e.to_string());
        }
        if choice.depth.is_some_and(|depth| !(1..=4096).contains(&depth)) {
            return refuse("depth is not a whole number from 1 to 4096".into());
        }
        let gains = [choice.makespan, choice.mean_time, choice.variance, choice.share];
        if gains.iter().any(|gain| !gain.is_finite() || *gain > 1.0) {
            return refuse("a gain is 1 − T/T_fifo: at most 1".into());
        }
    }
    Ok(())
}

/// The table given by the parameters.
pub(super) fn of(params: &Params) -> Result<DecisionTable, String> {
    match params.text("table") {
        "" => DecisionTable::parse(BUILT_IN),
        text if !text.contains('\n') => Err(format!(
            "\"{text}\" is not the text of a table; a configuration file and `impresario policy set` read the file that they \
             are given as table=FILE"
        )),
        text => DecisionTable::parse(text),
    }
}
