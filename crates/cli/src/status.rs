//! `impresario status`: the state of every server of a cluster, for people and for programs.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use impresario_base::at_once;
use impresario_base::units::{parse_duration, show_bytes, show_seconds};
use impresario_client::{Access, KeyRole};
use impresario_config::{Config, Server};
use impresario_sched::PolicySpec;
use impresario_wire::ClusterId;
use serde_json::{Value, json};

use crate::{load, nfs, print};

/// Show servers, policies, queues and statistics
///
/// One line for each server of the configuration: its policy with parameters that differ from the defaults, queued
/// requests, requests in flight to the device or to the servers below, completed requests, the mean arriving request
/// and the mean dispatched batch, and the mean times in the queue and below. A server that does not answer, or at
/// whose address another one does, is shown as such, and the exit status is 1. Further lines show the statistics of each modelled device and, for each scheduler,
/// its cost model and how far measured times correct it, how many requests came that earlier runs had foretold, and the
/// jobs and users whose requests took most time lately, and the limits that withhold requests at present.
///
/// Of an NFS server (`impresario nfs --status SOCKET`): connections, policy and queue, its calls with their times, and the
/// clients and users that load it most.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario status cluster/impresario.toml
  impresario status cluster/impresario.toml --watch 1s
  impresario status /run/impresario/nfs.sock
  impresario status cluster/impresario.toml --json | jq '.servers[].state.engine.queued'")]
pub struct Args {
    /// The configuration file of the cluster, or the status socket of an NFS server
    config: PathBuf,
    /// As JSON, with everything that the servers report
    #[arg(long)]
    json: bool,
    /// Repeat at this interval (1s by default) until Ctrl-C
    #[arg(long, value_name = "EVERY", num_args = 0..=1, default_missing_value = "1s", value_parser = parse_interval)]
    watch: Option<Duration>,
}

/// More often the servers would do nothing but tell.
const WATCH_MIN: Duration = Duration::from_millis(10);

fn parse_interval(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        every if every < WATCH_MIN => Err(format!("{text} is too often; give at least 10ms")),
        every => Ok(every),
    }
}

/// Time limit for a server's answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// A server's report, or the reason why there is none.
pub struct State {
    /// Its name in the configuration.
    pub name: String,
    /// `meta`, `data` or `io`.
    pub role: &'static str,
    address: String,
    device: Option<String>,
    report: Result<Value, String>,
}

impl State {
    /// The error, if there is no report.
    pub fn error(&self) -> Option<String> {
        self.report.as_ref().err().cloned()
    }

    /// The name of the server that answers instead.
    fn stranger(&self) -> Option<&str> {
        let name = self.report.as_ref().ok()?.get("name")?.as_str()?;
        (name != self.name).then_some(name)
    }

    /// A figure of its engine; `None` if the report has none.
    fn engine(&self, pointer: &str) -> Option<&Value> {
        self.report.as_ref().ok()?.get("engine")?.pointer(pointer)
    }

    fn number(&self, pointer: &str) -> Option<f64> {
        self.engine(pointer)?.as_f64()
    }

    /// The current policy as JSON.
    pub fn policy(&self) -> Option<&Value> {
        self.engine("/policy")
    }

    /// What a policy that chooses among others chose, as JSON.
    pub fn chosen(&self) -> Option<&Value> {
        self.engine("/chosen")
    }

    /// The current policy as typed on a command line.
    pub fn policy_text(&self) -> String {
        let spec = self.policy().and_then(|policy| serde_json::from_value(policy.clone()).ok());
        spec.map_or_else(|| "-".into(), |spec| differing(&spec))
    }
}

/// A policy with the parameters that differ from their defaults, as typed on a command line.
pub fn differing(policy: &PolicySpec) -> String {
    let info = impresario_sched::policy::info(&policy.name);
    let is_default = |key: &str, value: &str| {
        info.is_some_and(|info| info.params.iter().any(|i| i.name == key && i.default == value))
    };
    let mut shown = policy.clone();
    shown.params.retain(|key, value| !is_default(key, value));
    short(&shown)
}

/// A value of a parameter; texts of several lines, such as decision tables, by their size.
fn short_text(value: &str) -> String {
    if value.contains('\n') { format!("({} bytes)", value.len()) } else { value.into() }
}

/// A policy in one line.
pub fn short(policy: &PolicySpec) -> String {
    let params = policy.params.iter().map(|(key, value)| format!(" {key}={}", short_text(value)));
    std::iter::once(policy.name.clone()).chain(params).collect()
}

/// The process of the server that answers at an address.
pub fn answering(access: &Access, address: &str) -> Option<u64> {
    let told = impresario_client::admin::status(access, address, Duration::from_secs(1)).ok()?;
    serde_json::from_str::<Value>(&told).ok()?.get("pid")?.as_u64()
}

/// Queries all servers at once; takes as long as the slowest, at most [`PATIENCE`]; that for each where no thread can be started.
pub fn ask_all(config: &Config) -> Vec<State> {
    let access = Access::of(config, KeyRole::Client);
    let ask = |server: Server<'_>| {
        let (role, device) = match server {
            Server::Meta(_) => ("meta", None),
            Server::Data(_, data) => ("data", data.device.clone()),
            Server::Io(..) => ("io", None),
        };
        let report = impresario_client::admin::status(&access, server.address(), PATIENCE).map_err(|e| e.to_string());
        let report =
            report.and_then(|text| serde_json::from_str(&text).map_err(|e| format!("answered with invalid JSON: {e}")));
        State { name: server.name().into(), role, address: server.address().into(), device, report }
    };
    let mut states = at_once::each(config.servers(), ask);
    refuse_strangers(&mut states);
    states
}

/// Another server may answer at the address of one: of another name, or of another cluster than the metadata server's.
fn refuse_strangers(states: &mut [State]) {
    // Zeros while a server does not know its cluster.
    let cluster_of = |report: &Value| report.get("cluster")?.as_str()?.parse::<ClusterId>().ok();
    let meta = states.iter().find(|state| state.role == "meta" && state.stranger().is_none());
    let cluster = meta.and_then(|state| cluster_of(state.report.as_ref().ok()?));
    for state in states {
        let Ok(report) = &state.report else { continue };
        let other = cluster_of(report).filter(|other| cluster.is_some_and(|cluster| cluster != *other));
        let why = match (state.stranger(), other) {
            (Some(stranger), _) => stranger.to_string(),
            (None, Some(other)) => format!("a server of another cluster, {other},"),
            (None, None) => continue,
        };
        let name = &state.name;
        state.report =
            Err(format!("{why} answers there; correct the address of {name}, or stop that server and start {name}"));
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let ask: Box<dyn Fn() -> anyhow::Result<(String, bool)>> = if nfs::is_socket(&args.config) {
        Box::new(|| Ok((nfs::status(&args.config, args.json)?, true)))
    } else {
        let config = load(&args.config)?;
        Box::new(move || {
            let states = ask_all(&config);
            let text = if args.json { to_json(&config, &states)? } else { table(&config, &states) };
            Ok((text, states.iter().all(|state| state.report.is_ok())))
        })
    };
    loop {
        let started = Instant::now();
        let (text, well) = ask()?;
        // On a terminal, clears the screen as `watch` does.
        let clear = args.watch.is_some() && !args.json && std::io::IsTerminal::is_terminal(&std::io::stdout());
        print(format!("{}{text}", if clear { "\x1b[H\x1b[J" } else { "" }))?;
        match args.watch {
            None => return Ok(ExitCode::from(u8::from(!well))),
            Some(every) => std::thread::sleep(every.saturating_sub(started.elapsed())),
        }
    }
}

fn to_json(config: &Config, states: &[State]) -> anyhow::Result<String> {
    let servers = states.iter().map(|state| {
        json!({
            "name": state.name, "role": state.role, "address": state.address, "device": state.device,
            "answers": state.report.is_ok(), "error": state.error(), "state": state.report.as_ref().ok(),
        })
    });
    let all = json!({ "cluster": config.cluster.name, "servers": servers.collect::<Vec<Value>>() });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

const HEADER: [&str; 11] =
    ["server", "address", "policy", "queued", "flight", "done", "failed", "request", "batch", "queue", "service"];

fn table(config: &Config, states: &[State]) -> String {
    let count = |value: Option<f64>| value.map_or("-".into(), |n| format!("{n:.0}"));
    let size = |value: Option<f64>| value.filter(|n| *n > 0.0).map_or("-".into(), show_bytes);
    let time = |value: Option<f64>| value.filter(|n| *n > 0.0).map_or("-".into(), |ns| show_seconds(ns / 1e9));
    let rows = states.iter().map(|state| match &state.report {
        Err(why) => vec![state.name.clone(), state.address.clone(), format!("DOES NOT ANSWER: {why}")],
        Ok(_) => vec![
            state.name.clone(),
            state.address.clone(),
            state.policy_text(),
            count(state.number("/queued")),
            count(state.number("/in_flight_batches")),
            count(state.number("/statistics/completed")),
            count(state.number("/statistics/failed")),
            size(state.number("/statistics/request_bytes/mean")),
            size(state.number("/statistics/batch_bytes/mean")),
            time(state.number("/statistics/queue_ns/mean")),
            time(state.number("/statistics/service_ns/mean")),
        ],
    });
    let rows: Vec<Vec<String>> = std::iter::once(HEADER.map(String::from).to_vec()).chain(rows).collect();
    let width = |column: usize| {
        // The message of a server that does not answer extends over the columns to its right.
        let cells = rows.iter().filter(|row| row.len() > column && (column < 2 || row.len() == HEADER.len()));
        cells.map(|row| row[column].chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..HEADER.len()).map(width).collect();
    let mut out = format!("cluster {}\n", config.cluster.name);
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let w = widths[column];
            // Text left-aligned, numbers right-aligned. Writing to a String cannot fail.
            let _ = if column < 3 { write!(line, "{cell:<w$}  ") } else { write!(line, "{cell:>w$}  ") };
        }
        out += line.trim_end();
        out.push('\n');
    }
    states.iter().filter_map(failures).for_each(|line| out += &line);
    states.iter().filter_map(modelled).for_each(|line| out += &line);
    states.iter().filter_map(cost).for_each(|line| out += &line);
    states.iter().filter_map(earlier_runs).for_each(|line| out += &line);
    states.iter().filter_map(who_loads).for_each(|line| out += &line);
    states.iter().for_each(|state| out += &limits(state));
    states.iter().filter_map(locks).for_each(|line| out += &line);
    out
}

/// What the file system below a server has failed; `None` if nothing.
fn failures(state: &State) -> Option<String> {
    let failures = state.report.as_ref().ok()?.get("failures")?;
    let told = failures.get("kinds")?.as_object()?.iter().filter_map(|(kind, failed)| {
        let (count, last_s) = (failed.get("count")?.as_u64()?, failed.get("last_s")?.as_f64()?);
        Some(format!("{kind} {count} times, {} ago", show_seconds(last_s)))
    });
    let (place, told) = (failures.get("place")?.as_str()?, told.collect::<Vec<_>>().join("; "));
    Some(format!("{}: THE FILE SYSTEM OF {place} FAILED: {told}; see dmesg on its machine\n", state.name))
}

/// The file locks that the metadata server keeps; `None` where there are none.
fn locks(state: &State) -> Option<String> {
    let locks = state.report.as_ref().ok()?.pointer("/meta/locks")?;
    let figure = |key: &str| locks.get(key).and_then(Value::as_u64).unwrap_or_default();
    let (held, waiting, clients) = (figure("held"), figure("waiting"), figure("clients"));
    let s = |count: u64| if count == 1 { "" } else { "s" };
    let restoring = match locks.get("restoring").and_then(Value::as_bool) {
        Some(true) => "; none is given before the clients of an earlier run have restored theirs",
        _ => "",
    };
    let line = format!(
        "{}: {held} file lock{} held, {waiting} request{} waiting, {clients} client{}{restoring}\n",
        state.name,
        s(held),
        s(waiting),
        s(clients),
    );
    (held + waiting > 0 || !restoring.is_empty()).then_some(line)
}

/// Whether the server reads ahead, which goes by earlier runs under any policy.
fn runs_are_read_ahead(state: &State) -> bool {
    state.report.as_ref().is_ok_and(|report| report.get("read_ahead").is_some_and(|ahead| !ahead.is_null()))
}

/// What a scheduler knows of earlier runs, and how much of it came true; `None` if it was given none.
fn earlier_runs(state: &State) -> Option<String> {
    let runs = state.report.as_ref().ok()?.get("earlier_runs")?;
    if let Some(why) = runs.get("failure").and_then(Value::as_str) {
        return Some(format!("{}: earlier runs: {why}\n", state.name));
    }
    let traces: Vec<&str> = runs.get("traces")?.as_array()?.iter().filter_map(Value::as_str).collect();
    let more = if traces.len() > 1 { format!(" and {} more", traces.len() - 1) } else { String::new() };
    let figure = |key: &str| runs.get(key).and_then(Value::as_u64).unwrap_or_default();
    let used = match (state.number("/foretold/linked/arrived"), state.number("/foretold/linked/linked")) {
        (Some(arrived), Some(linked)) => format!("{linked:.0} of the {arrived:.0} that came since are among them"),
        _ if runs_are_read_ahead(state) => "reading ahead goes by them, the policy does not".into(),
        _ => "the policy does not go by them".into(),
    };
    let (requests, files) = (figure("requests"), figure("files"));
    let s = if files == 1 { "" } else { "s" };
    Some(format!(
        "{}: earlier runs: {requests} requests of {files} file{s} foretold by {}{more}; {used}\n",
        state.name,
        traces.first()?,
    ))
}

/// The limits that withhold requests, and the servers that do not say what they granted.
fn limits(state: &State) -> String {
    const NAMED_MAX: usize = 5;
    let mut out = String::new();
    let Some(limits) = state.report.as_ref().ok().and_then(|report| report.get("limits")) else { return out };
    let list = |of: &str| limits.get(of).and_then(Value::as_array).into_iter().flatten();
    let withheld = list("classes").filter_map(|class| {
        let (rule, unit) = (class.get("rule")?.as_str()?, class.get("unit")?.as_str()?);
        let waiting = class.get("waiting")?.as_u64().filter(|waiting| *waiting > 0)?;
        let key = class.get("key").and_then(Value::as_u64).map_or(String::new(), |key| format!(" of {key}"));
        let rate = class.get("rate")?.as_f64()?;
        let rate = match unit {
            "bytes" => format!("{}/s", show_bytes(rate)),
            "device_ns" => format!("{:.2} s of device time per second", rate / 1e9),
            _ => format!("{rate} requests/s"),
        };
        let over_all = class.get("over_all")?.as_bool()?;
        let here =
            over_all.then(|| Some(format!(" over all servers, {:.0} % here", 100.0 * class["fraction"].as_f64()?)));
        let (s, here) = (if waiting == 1 { "" } else { "s" }, here.flatten().unwrap_or_default());
        Some(format!("{}: limit {rule}{key} ({rate}{here}) withholds {waiting} request{s}\n", state.name))
    });
    withheld.take(NAMED_MAX).for_each(|line| out += &line);
    let silent = list("peers").filter(|peer| peer.get("answers") == Some(&Value::Bool(false)));
    let silent: Vec<&str> = silent.filter_map(|peer| peer.get("name")?.as_str()).collect();
    if !silent.is_empty() {
        let silent = silent.join(", ");
        out += &format!(
            "{}: limits over all servers: no answer from {silent}; an even part is kept for each\n",
            state.name
        );
    }
    out
}

/// The applications and users with the largest shares of the time that a scheduler's requests took lately; `None` if it
/// had no requests.
fn who_loads(state: &State) -> Option<String> {
    const NAMED_MAX: usize = 3;
    let loads = state.report.as_ref().ok()?.get("loads")?;
    let named = |of: &str| {
        let parties = loads.get(of).and_then(Value::as_array).into_iter().flatten();
        let told = parties.filter_map(|party| {
            let (key, share) = (party.get("key")?.as_str()?, party.get("recent_share")?.as_f64()?);
            (share >= 0.005).then(|| format!("{key} ({:.0} %)", 100.0 * share))
        });
        told.take(NAMED_MAX).collect::<Vec<_>>().join(", ")
    };
    let (jobs, users) = (named("jobs"), named("users"));
    (!jobs.is_empty()).then(|| format!("{}: loaded lately by jobs {jobs}; users {users}\n", state.name))
}

/// The cost model of a scheduler and its correction; `None` if there is no scheduler.
fn cost(state: &State) -> Option<String> {
    let source = state.engine("/cost/source")?.as_str()?;
    let correction = |op: &str| {
        let seen = state.number(&format!("/cost/{op}/observed")).filter(|n| *n > 0.0)?;
        let ratio = state.number(&format!("/cost/{op}/ratio"))?;
        Some(format!("{op}s × {ratio:.2} after {seen:.0} batches"))
    };
    let corrected = match state.engine("/cost/correct").and_then(Value::as_bool) {
        Some(true) => match (correction("read"), correction("write")) {
            (None, None) => "corrected in use, nothing measured yet".into(),
            (reads, writes) => reads.into_iter().chain(writes).collect::<Vec<_>>().join(", "),
        },
        _ => "not corrected".into(),
    };
    Some(format!("{}: cost model: {source}; {corrected}\n", state.name))
}

/// The statistics of a modelled device; `None` if there is none.
fn modelled(state: &State) -> Option<String> {
    let device = state.report.as_ref().ok()?.get("device")?;
    let number = |key: &str| device.get(key).and_then(Value::as_f64).unwrap_or_default();
    let order = device.get("order").and_then(Value::as_str).unwrap_or("?");
    Some(format!(
        "{}: modelled {}, {order} order, {:.0} transfers of {} on average, busy {:.0} % of the time\n",
        state.name,
        state.device.as_deref().unwrap_or("device"),
        number("transfers"),
        show_bytes(number("transfer_mean_bytes")),
        100.0 * number("busy_s") / number("measured_s").max(1e-9),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_answer_is_shown_and_the_table_is_aligned() {
        let config = Config {
            meta: impresario_config::Meta { address: "h:1".into(), dir: "m".into(), ..Default::default() },
            ..Config::default()
        };
        let engine = json!({"engine": {
            "policy": {"name": "twins", "window_us": "1000", "order": "rotation"}, "queued": 3, "in_flight_batches": 2,
            "cost": {"source": "calibration c.toml of /data", "correct": true, "read": {"ratio": 1.254, "observed": 40},
                     "write": {"ratio": 1.0, "observed": 0}},
            "foretold": {"requests": 70, "linked": {"arrived": 12, "linked": 9}},
            "statistics": {"completed": 12, "failed": 0, "request_bytes": {"mean": 8192.0}, "batch_bytes": {"mean": 65536.0},
                           "queue_ns": {"mean": 2.5e6}, "service_ns": {"mean": 0.0}}},
            "earlier_runs": {"traces": ["/t/io.0-5.imt", "/t/io.0-4.imt"], "requests": 70, "files": 2, "failure": null},
            "loads": {"jobs": [{"key": "17", "recent_share": 0.617}, {"key": "others", "recent_share": 0.38},
                               {"key": "4", "recent_share": 0.003}], "users": [{"key": "1000", "recent_share": 1.0}]},
            "limits": {"classes": [
                {"rule": "a", "key": 17, "unit": "bytes", "rate": 1048576.0, "over_all": true, "fraction": 0.25, "waiting": 9},
                {"rule": "b", "unit": "requests", "rate": 50.0, "over_all": false, "fraction": 1.0, "waiting": 1},
                {"rule": "c", "unit": "device_ns", "rate": 5e8, "over_all": false, "fraction": 1.0, "waiting": 0}],
                "peers": [{"name": "io.1", "answers": false}, {"name": "io.2", "answers": true}]},
            "device": {"order": "elevator", "transfers": 7, "transfer_mean_bytes": 16384.0, "busy_s": 1.0, "measured_s": 4.0}});
        let state = |name: &str, report| State {
            name: name.into(),
            role: "io",
            address: "127.0.0.1:7000".into(),
            device: None,
            report,
        };
        let mut strangers = [
            State { role: "meta", ..state("meta", Ok(json!({"name": "meta", "cluster": "00000000000000aa"}))) },
            state("io.0", Ok(json!({"name": "io.1", "cluster": "00000000000000aa"}))),
            state("io.2", Ok(json!({"name": "io.2", "cluster": "00000000000000bb"}))),
            state("io.3", Ok(json!({"name": "io.3", "cluster": "0000000000000000"}))),
        ];
        refuse_strangers(&mut strangers);
        let errors = strangers.map(|state| state.error().unwrap_or_default());
        assert!(errors[0].is_empty() && errors[3].is_empty(), "{errors:?}");
        assert!(errors[1].starts_with("io.1 answers there; correct the address of io.0"), "{errors:?}");
        assert!(errors[2].contains("another cluster, 00000000000000bb"), "{errors:?}");
        let meta = |held, restoring| {
            state(
                "meta",
                Ok(json!({"meta": {"locks": {"held": held, "waiting": 2, "clients": 1, "restoring": restoring}}})),
            )
        };
        assert_eq!(locks(&meta(1, false)).as_deref(), Some("meta: 1 file lock held, 2 requests waiting, 1 client\n"));
        assert!(locks(&meta(0, true)).is_some_and(|line| line.ends_with("have restored theirs\n")));
        let text = table(&config, &[state("io.0", Ok(engine)), state("io.1", Err("connection refused".into()))]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("server  address         policy"), "{text}");
        assert!(lines[2].contains("twins window_us=1000") && !lines[2].contains("rotation"), "{text}");
        assert!(lines[2].contains("8 KiB") && lines[2].contains("64 KiB") && lines[2].contains("2.5 ms"), "{text}");
        assert_eq!(lines[3], "io.1    127.0.0.1:7000  DOES NOT ANSWER: connection refused", "{text}");
        assert_eq!(
            lines[4],
            "io.0: modelled device, elevator order, 7 transfers of 16 KiB on average, busy 25 % of the time"
        );
        assert_eq!(lines[5], "io.0: cost model: calibration c.toml of /data; reads × 1.25 after 40 batches");
        assert_eq!(
            lines[6],
            "io.0: earlier runs: 70 requests of 2 files foretold by /t/io.0-5.imt and 1 more; \
             9 of the 12 that came since are among them"
        );
        assert_eq!(lines[7], "io.0: loaded lately by jobs 17 (62 %), others (38 %); users 1000 (100 %)");
        assert_eq!(lines[8], "io.0: limit a of 17 (1 MiB/s over all servers, 25 % here) withholds 9 requests");
        assert_eq!(lines[9], "io.0: limit b (50 requests/s) withholds 1 request");
        assert_eq!(lines[10], "io.0: limits over all servers: no answer from io.1; an even part is kept for each");
        assert_eq!(lines[1].find("queued").map(|p| p + 6), lines[2].find(" 3 ").map(|p| p + 2), "{text}");
    }

    #[test]
    fn who_goes_by_earlier_runs_is_told() {
        let mut report =
            json!({"earlier_runs": {"traces": ["/t/a.imt"], "requests": 9, "files": 1}, "read_ahead": null});
        let said = |report: &Value| {
            let (name, address) = ("data.0".into(), "127.0.0.1:7000".into());
            earlier_runs(&State { name, role: "data", address, device: None, report: Ok(report.clone()) }).unwrap()
        };
        assert!(said(&report).ends_with("; the policy does not go by them\n"), "{}", said(&report));
        report["read_ahead"] = json!({"predicted_bytes": 0});
        assert!(said(&report).ends_with("; reading ahead goes by them, the policy does not\n"), "{}", said(&report));
    }
}
