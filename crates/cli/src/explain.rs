//! `impresario explain`: what was chosen on each server, from which observation, and what the alternatives were expected to
//! give.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use impresario_base::units::show_bytes;
use serde_json::{Value, json};

use crate::status::{State, ask_all};
use crate::{load, print, print_json};

/// Show what the policy auto chose on each server, from which observation, and what the alternatives were expected to give
///
/// For each data server and I/O node: the policy that decides at present, the rule of the decision table by which it was
/// chosen, what was observed last, the gain over fifo that the table expects of it and of the alternatives, the measured
/// rate, and choices that were undone because they measured worse. A server that does not answer is shown as such, and the
/// exit status is 1. `impresario policy explain` tells what a policy does with the requests of one application.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario explain cluster/impresario.toml
  impresario explain cluster/impresario.toml --json | jq '.[].chosen.policy.name'")]
pub struct Args {
    /// The configuration file of the cluster
    config: PathBuf,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let config = load(&args.config)?;
    let states = ask_all(&config);
    let schedulers: Vec<&State> = states.iter().filter(|s| s.role != "meta").collect();
    if args.json {
        let of = |s: &&State| json!({"name": s.name, "policy": s.policy(), "chosen": s.chosen(), "error": s.error()});
        let all: Vec<Value> = schedulers.iter().map(of).collect();
        print_json(&all)?;
    } else {
        for state in &schedulers {
            let told = match (state.error(), state.chosen()) {
                (Some(why), _) => format!("DOES NOT ANSWER: {why}\n"),
                (None, Some(chosen)) => text(chosen),
                (None, None) => format!("{}, as configured: nothing is chosen\n", state.policy_text()),
            };
            print(format!("{}: {told}", state.name))?;
        }
    }
    Ok(ExitCode::from(u8::from(schedulers.iter().any(|s| s.error().is_some()))))
}

/// A share as a percentage, with its sign where it is a gain.
fn percent(value: f64) -> String {
    format!("{:.0} %", value * 100.0)
}

/// One of something, or several.
fn count(n: f64, one: &str) -> String {
    format!("{n:.0} {one}{}", if n.round() == 1.0 { "" } else { "s" })
}

/// What a scheduler told of its choice, in words.
fn text(chosen: &Value) -> String {
    let of = |key: &str| chosen.get(key).and_then(Value::as_str).unwrap_or("?");
    let number = |key: &str| chosen.get(key).and_then(Value::as_f64);
    let policy = chosen.get("policy").and_then(|p| serde_json::from_value(p.clone()).ok());
    let policy =
        policy.map_or_else(|| "?".into(), |spec: impresario_sched::PolicySpec| crate::status::differing(&spec));
    let ahead = if chosen.get("read_ahead") == Some(&Value::Bool(false)) { ", without reading ahead" } else { "" };
    let mut out = format!("{policy}{ahead}\n");
    let mut line = |what: &str, told: String| {
        // Writing to a string cannot fail.
        _ = writeln!(out, "  {what:<13} {told}");
    };
    line("because", of("rule").into());
    let device = chosen.get("device").and_then(Value::as_str).map(|d| format!(", device by the cost model: {d}"));
    line("objective", format!("{}{}", of("objective"), device.unwrap_or_default()));
    line("observed", observed(chosen.get("observed")));
    if let Some(gain) = number("expected_gain") {
        let rate = number("rate_bytes_per_s").map(|rate| format!("; measured {}/s", show_bytes(rate)));
        line("expected", format!("gain over fifo {}{}", percent(gain), rate.unwrap_or_default()));
    }
    let others = chosen.get("alternatives").and_then(Value::as_array).into_iter().flatten();
    let others: Vec<String> = others
        .filter_map(|a| Some(format!("{} {}", a.get("policy")?.as_str()?, percent(a.get("gain")?.as_f64()?))))
        .collect();
    line("alternatives", if others.is_empty() { "none".into() } else { others.join(", ") });
    let undone = chosen.get("undone").and_then(Value::as_array).into_iter().flatten();
    let undone: Vec<&str> = undone.filter_map(Value::as_str).collect();
    let undone = if undone.is_empty() { String::new() } else { format!("; undone: {}", undone.join(", ")) };
    line("switches", format!("{:.0}{undone}", number("switches").unwrap_or_default()));
    out
}

/// What was observed, in words.
fn observed(seen: Option<&Value>) -> String {
    let Some(seen) = seen.filter(|seen| seen.is_object()) else {
        return "nothing: no observation would change the choice, or too little came yet".into();
    };
    let of = |key: &str| seen.get(key).and_then(Value::as_f64).unwrap_or_default();
    format!(
        "{} reads, {}, {}, {}; requests of {}, {} sequential, {} touching others, distance {}; {:.0} outstanding, {} \
         of the batches from the device",
        percent(of("reads")),
        count(of("jobs"), "application"),
        count(of("files"), "file"),
        count(of("clients"), "client"),
        show_bytes(of("request_bytes")),
        percent(of("sequential")),
        percent(of("touching")),
        show_bytes(of("distance_bytes")),
        of("outstanding"),
        percent(of("device_share")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_told_in_words() {
        let chosen = json!({
            "objective": "makespan", "place": "data", "sorted_below": false, "device": "disk", "rule": "few files, touching",
            "policy": {"name": "sw", "window_ms": "10000", "merge": "on"}, "read_ahead": true, "expected_gain": 0.62,
            "alternatives": [{"policy": "sjf", "gain": 0.5}, {"policy": "fifo", "gain": 0.0}], "switches": 3,
            "undone": ["wscan"], "rate_bytes_per_s": 1048576.0,
            "observed": {"requests": 64, "first": false, "reads": 1.0, "jobs": 1.0, "files": 2.0, "clients": 32.0,
                "request_bytes": 16384.0, "sequential": 0.25, "touching": 0.5, "distance_bytes": 65536.0, "outstanding": 31.4,
                "device_share": 1.0}});
        let told = text(&chosen);
        for wanted in [
            "sw window_ms=10000\n",
            "because       few files, touching\n",
            "100 % reads, 1 application, 2 files, 32 clients; requests of 16 KiB, 25 % sequential, 50 % touching others",
            "distance 64 KiB; 31 outstanding, 100 % of the batches from the device",
            "gain over fifo 62 %; measured 1 MiB/s",
            "alternatives  sjf 50 %, fifo 0 %\n",
            "switches      3; undone: wscan\n",
        ] {
            assert!(told.contains(wanted), "{wanted}: {told}");
        }
        let nothing = text(&json!({"rule": "the storage below sorts", "policy": {"name": "none"}, "observed": null}));
        assert!(nothing.starts_with("none\n") && nothing.contains("nothing: no observation"), "{nothing}");
    }
}
