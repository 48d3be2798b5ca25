//! What a run found: one outcome for each check, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

/// How a check ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "outcome", content = "reason", rename_all = "lowercase")]
pub enum Outcome {
    /// Everything that it looked at was right.
    Pass,
    /// What was seen, and what was expected.
    Fail(String),
    /// Why it was not run.
    Skipped(String),
}

/// A check that was run or skipped.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Checked {
    /// Its name, as `--only` takes it.
    pub name: &'static str,
    /// What it checks, one sentence.
    pub summary: &'static str,
    /// How it ended.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Requests that it made.
    pub requests: u64,
    /// How long it took, seconds.
    pub seconds: f64,
}

/// A run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// The mount or the server, as given.
    pub target: String,
    /// The seed of its random choices.
    pub seed: u64,
    /// The checks in the order in which they ran.
    pub checks: Vec<Checked>,
    /// What a user should know besides: a folder that could not be removed, for example.
    pub notes: Vec<String>,
}

impl Report {
    /// Whether no check failed.
    pub fn passed(&self) -> bool {
        !self.checks.iter().any(|check| matches!(check.outcome, Outcome::Fail(_)))
    }

    /// For people: a line for each check, the reasons below, and a sum.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let (mut passed, mut failed, mut skipped) = (0, 0, 0);
        for check in &self.checks {
            let (word, reason) = match &check.outcome {
                Outcome::Pass => ("pass", None),
                Outcome::Fail(reason) => ("FAIL", Some(reason)),
                Outcome::Skipped(reason) => ("skipped", Some(reason)),
            };
            match check.outcome {
                Outcome::Pass => passed += 1,
                Outcome::Fail(_) => failed += 1,
                Outcome::Skipped(_) => skipped += 1,
            }
            let cost = match check.outcome {
                Outcome::Skipped(_) => String::new(),
                _ => format!("{} requests, {:.1} s", check.requests, check.seconds),
            };
            let _ = writeln!(text, "{word:<8} {:<19} {cost}", check.name);
            if let Some(reason) = reason {
                let _ = writeln!(text, "         {reason}");
            }
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        let _ =
            writeln!(text, "{}: {passed} passed, {failed} failed, {skipped} skipped; seed {}", self.target, self.seed);
        // Lines end where their text does.
        text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
    }

    /// For programs.
    pub fn json(&self) -> serde_json::Value {
        let checks = serde_json::to_value(&self.checks).unwrap_or_default();
        serde_json::json!({
            "target": self.target, "seed": self.seed, "passed": self.passed(), "checks": checks, "notes": self.notes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_reasons_and_sums() {
        let check = |name, outcome| Checked { name, summary: "s", outcome, requests: 3, seconds: 0.25 };
        let mut report = Report {
            target: "/mnt".into(),
            seed: 7,
            checks: vec![check("a", Outcome::Pass), check("b", Outcome::Skipped("needs root".into()))],
            notes: vec!["n".into()],
        };
        assert!(report.passed());
        report.checks.push(check("c", Outcome::Fail("offset 0".into())));
        assert!(!report.passed());
        let text = report.text();
        assert!(text.contains("\nFAIL     c                   3 requests, 0.2 s\n         offset 0\n"), "{text}");
        assert!(text.ends_with("note: n\n/mnt: 1 passed, 1 failed, 1 skipped; seed 7\n"), "{text}");
        let json = report.json();
        assert_eq!((&json["passed"], &json["checks"][1]["outcome"]), (&false.into(), &"skipped".into()));
        assert_eq!((&json["checks"][2]["reason"], &json["checks"][0]["name"]), (&"offset 0".into(), &"a".into()));
    }
}
