//! Parameters of policies: descriptions, and values given as text.

use std::collections::BTreeMap;

use crate::spec::PolicySpec;

/// What a parameter accepts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Range {
    /// A whole number in an inclusive range.
    Integer(u64, u64),
    /// A number in an inclusive range.
    Decimal(f64, f64),
    /// Text in the form that the string describes; the policy checks it.
    Text(&'static str),
    /// One of these words.
    Choice(&'static [&'static str]),
}

/// Maximum length of a parameter's text, bytes.
pub const TEXT_MAX_BYTES: usize = 64 << 10;

/// `on` or `off`.
pub const SWITCH: Range = Range::Choice(&["on", "off"]);

/// `merge` for policies whose original does not aggregate.
pub(crate) const MERGE_OFF: ParamInfo =
    ParamInfo { name: "merge", default: "off", range: SWITCH, doc: "Take queued neighbours along." };

/// `merge` for policies whose original aggregates, or is silent.
pub(crate) const MERGE_ON: ParamInfo = ParamInfo { default: "on", ..MERGE_OFF };

/// Limit of a batch.
pub(crate) const BATCH_REQUESTS: ParamInfo = ParamInfo {
    name: "batch_requests",
    default: "64",
    range: Range::Integer(1, 1024),
    doc: "Requests per batch at most, with merge=on.",
};

/// Limit of a batch.
pub(crate) const BATCH_BYTES: ParamInfo = ParamInfo {
    name: "batch_bytes",
    default: "1048576",
    range: Range::Integer(512, 1 << 30),
    doc: "Bytes per batch at most, with merge=on.",
};

/// The guard against starvation.
pub(crate) const GUARD_BATCHES: ParamInfo = ParamInfo {
    name: "guard_batches",
    default: "64",
    range: Range::Integer(0, 1_000_000),
    doc: "Batches of a lane that may pass over its oldest request; 0: any number.",
};

/// A parameter as documentation shows it.
#[derive(Clone, Copy, Debug)]
pub struct ParamInfo {
    /// Its name, with the unit last.
    pub name: &'static str,
    /// Default, as text.
    pub default: &'static str,
    /// What it accepts.
    pub range: Range,
    /// What it does.
    pub doc: &'static str,
}

/// Why a policy was refused; nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PolicyError {
    /// No policy has that name.
    #[error("there is no policy \"{name}\"; there are: {known}")]
    Unknown {
        /// The name given.
        name: String,
        /// The existing policies.
        known: String,
    },
    /// The policy has no such parameter.
    #[error("policy {policy} has no parameter \"{name}\"; it has: {known}")]
    UnknownParam {
        /// The policy.
        policy: &'static str,
        /// The name given.
        name: String,
        /// The existing parameters.
        known: String,
    },
    /// A value is out of range.
    #[error("policy {policy}: {name} = \"{value}\" is not {expected}")]
    BadValue {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        name: &'static str,
        /// The value given.
        value: String,
        /// What the parameter accepts.
        expected: String,
    },
    /// The policy cannot work on this server.
    #[error("policy {policy} cannot be used here: {why}")]
    Unsuitable {
        /// The policy.
        policy: &'static str,
        /// Why, and the remedy.
        why: String,
    },
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Range::Integer(low, high) => write!(f, "a whole number from {low} to {high}"),
            Range::Decimal(low, high) => write!(f, "a number from {low} to {high}"),
            Range::Text(form) => f.write_str(form),
            Range::Choice(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}

impl Range {
    fn accepts(&self, value: &str) -> bool {
        match self {
            Range::Integer(low, high) => value.parse::<u64>().is_ok_and(|v| (*low..=*high).contains(&v)),
            Range::Decimal(low, high) => value.parse::<f64>().is_ok_and(|v| (*low..=*high).contains(&v)),
            Range::Text(_) => value.len() <= TEXT_MAX_BYTES,
            Range::Choice(words) => words.contains(&value),
        }
    }
}

/// A policy's parameters after validation.
#[derive(Clone, Debug)]
pub struct Params {
    policy: &'static str,
    infos: &'static [ParamInfo],
    values: BTreeMap<&'static str, String>,
}

impl Params {
    /// Checks names and ranges; absent parameters take their defaults.
    pub fn new(
        policy: &'static str,
        infos: &'static [ParamInfo],
        given: &BTreeMap<String, String>,
    ) -> Result<Params, PolicyError> {
        for name in given.keys() {
            if !infos.iter().any(|i| i.name == name) {
                let known: Vec<_> = infos.iter().map(|i| i.name).collect();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                return Err(PolicyError::UnknownParam { policy, name: name.clone(), known });
            }
        }
        let mut values = BTreeMap::new();
        for info in infos {
            let value = given.get(info.name).map_or(info.default, String::as_str).trim();
            if !info.range.accepts(value) {
                return Err(PolicyError::BadValue {
                    policy,
                    name: info.name,
                    value: value.into(),
                    expected: info.range.to_string(),
                });
            }
            values.insert(info.name, value.to_string());
        }
        Ok(Params { policy, infos, values })
    }

    /// A number. `name` must be one of the policy's own integer parameters.
    pub fn integer(&self, name: &'static str) -> u64 {
        self.text(name).parse().unwrap_or_else(|_| unreachable!("{name} was checked"))
    }

    /// A number with a fraction. `name` must be one of the policy's own decimal parameters.
    pub fn decimal(&self, name: &'static str) -> f64 {
        self.text(name).parse().unwrap_or_else(|_| unreachable!("{name} was checked"))
    }

    /// The error for a text parameter in the wrong form.
    pub fn refuse(&self, name: &'static str, expected: impl Into<String>) -> PolicyError {
        let value = self.text(name).into();
        PolicyError::BadValue { policy: self.policy, name, value, expected: expected.into() }
    }

    /// A word. `name` must be one of the policy's own parameters.
    pub fn text(&self, name: &'static str) -> &str {
        debug_assert!(self.infos.iter().any(|i| i.name == name));
        self.values.get(name).map_or("", String::as_str)
    }

    /// A switch.
    pub fn on(&self, name: &'static str) -> bool {
        self.text(name) == "on"
    }

    /// The policy with all its parameters written out.
    pub fn spec(&self) -> PolicySpec {
        PolicySpec {
            name: self.policy.into(),
            params: self.values.iter().map(|(k, v)| (k.to_string(), v.clone())).collect(),
        }
    }
}
