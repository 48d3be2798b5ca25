//! How a policy is named and parameterised from outside: a configuration file, a command line, a frame.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A policy by name with its parameters, e.g. `{ name = "twins", window_us = 1000 }`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PolicySpec {
    /// Name of the policy, as `impresario policy list` shows it.
    pub name: String,
    /// Its parameters, each as text; absent ones take their defaults.
    #[serde(flatten, with = "params_as_text")]
    pub params: BTreeMap<String, String>,
}

impl PolicySpec {
    /// A policy with its default parameters.
    pub fn named(name: &str) -> PolicySpec {
        PolicySpec { name: name.into(), params: BTreeMap::new() }
    }

    /// The same with one more parameter.
    pub fn with(mut self, key: &str, value: impl ToString) -> PolicySpec {
        self.params.insert(key.into(), value.to_string());
        self
    }
}

impl std::fmt::Display for PolicySpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.name)?;
        for (k, v) in &self.params {
            write!(f, " {k}={v}")?;
        }
        Ok(())
    }
}

/// Numbers, booleans and text are all welcome in the file: `window_us = 1000` and `window_us = "1000"`.
mod params_as_text {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Scalar {
        Bool(bool),
        Int(i64),
        Float(f64),
        Text(String),
    }

    pub fn serialize<S: Serializer>(params: &BTreeMap<String, String>, s: S) -> Result<S::Ok, S::Error> {
        params.serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<String, String>, D::Error> {
        let raw = BTreeMap::<String, Scalar>::deserialize(d)?;
        Ok(raw
            .into_iter()
            .map(|(k, v)| {
                let v = match v {
                    Scalar::Bool(b) => if b { "on" } else { "off" }.to_string(),
                    Scalar::Int(i) => i.to_string(),
                    Scalar::Float(x) => x.to_string(),
                    Scalar::Text(t) => t,
                };
                (k, v)
            })
            .collect())
    }
}
