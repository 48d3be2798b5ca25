//! How a policy and its parameters are given from outside: in a configuration file, on a command line, in a frame.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A policy by name with its parameters, e.g. `{ name = "twins", window_us = 1000 }`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PolicySpec {
    /// Name of the policy, as `impresario policy list` shows it.
    pub name: String,
    /// Its parameters as text; absent ones take their defaults.
    #[serde(flatten, with = "params_as_text")]
    pub params: BTreeMap<String, String>,
}

impl PolicySpec {
    /// A policy with its default parameters.
    pub fn named(name: &str) -> PolicySpec {
        PolicySpec { name: name.into(), params: BTreeMap::new() }
    }

    /// The same with another parameter.
    pub fn with(mut self, key: &str, value: impl ToString) -> PolicySpec {
        self.params.insert(key.into(), value.to_string());
        self
    }

    /// The same with a parameter written as `key=value`.
    pub fn with_word(self, word: &str) -> Result<PolicySpec, SpecError> {
        match word.split_once('=') {
            Some((key, value)) if !key.trim().is_empty() => Ok(self.with(key.trim(), value.trim())),
            _ => Err(SpecError::NoParameter(word.into())),
        }
    }
}

/// What is wrong with a policy's text.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpecError {
    /// The text is empty.
    #[error("the policy has no name: give one such as \"mlf\"")]
    NoName,
    /// A word after the name is not `key=value`.
    #[error("\"{0}\" is not a parameter: write key=value, such as window_us=1000")]
    NoParameter(String),
    /// A quotation mark is not closed.
    #[error("in \"{0}\" a quotation mark is not closed")]
    OpenQuote(String),
}

/// `mlf`, or `mlf quantum_bytes=65536 window_us=0`; a value with spaces is in double quotes.
impl std::str::FromStr for PolicySpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<PolicySpec, SpecError> {
        let mut words = vec![String::new()];
        let mut quoted = false;
        for c in text.chars() {
            match c {
                '"' => quoted = !quoted,
                c if c.is_whitespace() && !quoted => words.push(String::new()),
                c => words.iter_mut().last().into_iter().for_each(|word| word.push(c)),
            }
        }
        if quoted {
            return Err(SpecError::OpenQuote(text.into()));
        }
        let mut words = words.into_iter().filter(|word| !word.is_empty());
        let name = words.next().ok_or(SpecError::NoName)?;
        words.try_fold(PolicySpec::named(&name), |spec, word| spec.with_word(&word))
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

/// The file may have numbers, booleans or text: `window_us = 1000` and `window_us = "1000"`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_from_text() {
        let spec: PolicySpec = " mlf  quantum_bytes=65536 weights=\"a: job=1 {weight=4}\" ".parse().unwrap();
        assert_eq!(spec, PolicySpec::named("mlf").with("quantum_bytes", 65536).with("weights", "a: job=1 {weight=4}"));
        assert_eq!(" ".parse::<PolicySpec>(), Err(SpecError::NoName));
        assert_eq!("mlf fast".parse::<PolicySpec>(), Err(SpecError::NoParameter("fast".into())));
        assert_eq!("mlf a=\"b".parse::<PolicySpec>(), Err(SpecError::OpenQuote("mlf a=\"b".into())));
    }
}
