//! The keys of `agios.conf`: defaults, checks, and our policy for each algorithm.

use std::collections::BTreeMap;

use impresario_embed::guard;
use impresario_sched::policy::POLICIES;
use impresario_sched::{PolicySpec, policy};

use crate::syntax::{Setting, Value, parse};

/// A configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Prefix and suffix of the trace file's name, if a trace is written.
    pub trace: Option<(String, String)>,
    /// Buffer of the trace, bytes.
    pub trace_buffer_bytes: usize,
    /// The policy.
    pub policy: PolicySpec,
    /// Queues: servers for TWINS, else applications.
    pub queues: u32,
    /// Each queue is its own lane.
    pub lane_per_queue: bool,
    /// 0: a batch is complete when its callback returns; N: at most N batches per queue are delivered and not yet
    /// released.
    pub in_flight_requests: u32,
}

/// Warnings about unknown keys.
pub type Warnings = Vec<String>;

/// Every key with the default of the public library, `None` if it has none.
const KEYS: &[(&str, Option<Default>)] = &[
    ("trace", Some(Default::Bool(false))),
    ("trace_file_prefix", Some(Default::Text("/tmp/agios_tracefile"))),
    ("trace_file_sufix", Some(Default::Text("out"))),
    ("max_trace_buffer_size", Some(Default::Int(32_768, 1, 1 << 20))),
    ("waiting_time", Some(Default::Int(900_000, 0, 2_147_483_647))),
    ("aioli_quantum", Some(Default::Int(65_536, 1, 1 << 30))),
    ("mlf_quantum", Some(Default::Int(8192, 1, 1 << 30))),
    ("SW_window", Some(Default::Int(1000, 1, 3_600_000))),
    ("twins_window", Some(Default::Int(2000, 10, 2_000_000))),
    ("performance_values", Some(Default::Int(5, 0, i64::MAX))),
    ("default_algorithm", Some(Default::Text("SJF"))),
    ("starting_algorithm", Some(Default::Text("SJF"))),
    ("select_algorithm_period", Some(Default::Int(1000, -1, i64::MAX))),
    ("select_algorithm_min_reqnumber", Some(Default::Int(1, 0, i64::MAX))),
    ("enable_SW", Some(Default::Bool(false))),
    ("wfq_conf", None),
    ("in_flight_requests", Some(Default::Int(0, 0, 65_536))),
];

enum Default {
    Bool(bool),
    /// Default, minimum, maximum.
    Int(i64, i64, i64),
    Text(&'static str),
}

/// Algorithms of the public library, and the policies that implement them.
const ALGORITHMS: &[(&str, &str)] = &[
    ("MLF", "mlf"),
    ("aIOLi", "aioli"),
    ("SJF", "sjf"),
    ("TO", "to"),
    ("TO-agg", "to-agg"),
    ("SW", "sw"),
    ("WFQ", "wfq"),
    ("TWINS", "twins"),
    ("HBRR", "hbrr"),
    ("FIFO", "fifo"),
    ("NOOP", "none"),
    // Version 1 of the public library.
    ("TW", "sw"),
    ("EXCLUSIVE_TIME_WINDOW", "twins"),
    ("SRTF", "srtf"),
];

/// Keys of version 1 of the public library, and their later names.
const RENAMED: &[(&str, &str)] =
    &[("time_window_size", "SW_window"), ("exclusive_tw_window_duration", "twins_window"), ("enable_TW", "enable_SW")];

struct Keys {
    given: BTreeMap<String, Setting>,
    name: String,
}

impl Keys {
    fn wrong<T>(&self, setting: &Setting, key: &str, wanted: &str) -> Result<T, String> {
        Err(format!("{} line {}: {key} = {} is not {wanted}", self.name, setting.line, setting.value))
    }

    fn default(key: &str) -> Option<&'static Default> {
        KEYS.iter().find(|(name, _)| *name == key).and_then(|(_, default)| default.as_ref())
    }

    fn int(&self, key: &str) -> Result<i64, String> {
        let Some(Default::Int(default, low, high)) = Self::default(key) else { return Ok(0) };
        match self.given.get(key) {
            None => Ok(*default),
            Some(Setting { value: Value::Int(n), .. }) if (low..=high).contains(&n) => Ok(*n),
            Some(setting) => self.wrong(setting, key, &format!("a whole number from {low} to {high}")),
        }
    }

    fn flag(&self, key: &str) -> Result<bool, String> {
        let Some(Default::Bool(default)) = Self::default(key) else { return Ok(false) };
        match self.given.get(key) {
            None => Ok(*default),
            Some(Setting { value: Value::Bool(b), .. }) => Ok(*b),
            Some(Setting { value: Value::Int(n @ 0..=1), .. }) => Ok(*n == 1),
            Some(setting) => self.wrong(setting, key, "true or false"),
        }
    }

    fn text(&self, key: &str) -> Result<Option<String>, String> {
        match self.given.get(key) {
            None => Ok(match Self::default(key) {
                Some(Default::Text(text)) => Some((*text).to_string()),
                _ => None,
            }),
            Some(Setting { value: Value::Text(text), .. }) => Ok(Some(text.clone())),
            Some(setting) => self.wrong(setting, key, "text in double quotes"),
        }
    }

    fn algorithm(&self, key: &str) -> Result<&'static str, String> {
        let given = self.text(key)?.unwrap_or_default();
        let here = ALGORITHMS.iter().find(|(name, _)| *name == given).map(|(_, here)| *here);
        // Policies that the public library lacks are selected by their own names.
        let here = here.or_else(|| POLICIES.iter().map(|p| p.name).find(|name| *name == given));
        let known = ALGORITHMS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let line = self.given.get(key).map_or(0, |s| s.line);
        let Some(here) = here else {
            return Err(format!("{} line {line}: {key} = \"{given}\" is not one of {known}", self.name));
        };
        if !POLICIES.iter().any(|p| p.name == here) {
            return Err(format!(
                "{}: {key} = \"{given}\" needs the policy {here}, which this library does not have",
                self.name
            ));
        }
        Ok(here)
    }
}

/// Parses the text of a configuration; `name` is its name in messages.
pub fn read(text: &str, name: &str, max_queue_id: i32) -> Result<(Config, Warnings), String> {
    let mut warnings = Warnings::new();
    let mut given = BTreeMap::new();
    for (key, setting) in parse(text).map_err(|(line, what)| format!("{name} line {line}: {what}"))? {
        match setting.value {
            // Version 1 has some keys in a second group.
            Value::Group(keys) if key == "library_options" || key == "user_info" => given.extend(keys),
            _ => warnings.push(format!("{name} line {}: {key} is unknown; only library_options is read", setting.line)),
        }
    }
    for (old, new) in RENAMED {
        if let Some(setting) = given.remove(*old) {
            given.entry((*new).to_string()).or_insert(setting);
        }
    }
    for (key, setting) in given.iter().filter(|(key, _)| !KEYS.iter().any(|(known, _)| known == key)) {
        warnings.push(format!("{name} line {}: {key} is unknown and has no effect", setting.line));
    }
    let keys = Keys { given, name: name.into() };
    // Meant for choosing algorithms at run time, which the public library does not do either: checked, without effect.
    keys.int("performance_values")?;
    keys.algorithm("starting_algorithm")?;
    keys.int("select_algorithm_period")?;
    keys.int("select_algorithm_min_reqnumber")?;
    keys.flag("enable_SW")?;

    let queues =
        u32::try_from(max_queue_id).map_err(|_| format!("max_queue_id = {max_queue_id}: give 0 or more"))?.max(1);
    if queues > u32::from(u16::MAX) {
        return Err(format!("max_queue_id = {max_queue_id}: give at most {}", u16::MAX));
    }
    let algorithm = keys.algorithm("default_algorithm")?;
    let (aioli_quantum, mlf_quantum) = (keys.int("aioli_quantum")?, keys.int("mlf_quantum")?);
    let (sw_window, twins_window) = (keys.int("SW_window")?, keys.int("twins_window")?);
    let hold_us = keys.int("waiting_time")? / 1000;
    let named = PolicySpec::named(algorithm);
    // The original doubles quanta, and delays a file only by its `waiting_time`.
    let multilevel = |quantum| {
        let named = PolicySpec::named(algorithm).with("quantum_bytes", quantum).with("growth", "double");
        named.with("hold_us", hold_us.min(1_000_000)).with("anticipation_us", 0)
    };
    let policy = match algorithm {
        "mlf" => multilevel(mlf_quantum),
        "aioli" => multilevel(aioli_quantum),
        "sw" => named.with("window_ms", sw_window),
        // A single server has every window.
        "twins" if queues == 1 => PolicySpec::named("to"),
        "twins" => named.with("window_us", twins_window),
        "wfq" => named.with("rules", weights(keys.text("wfq_conf")?, queues)?),
        _ => named,
    };
    let lane_per_queue = policy.name == "twins";
    policy::check(&policy, if lane_per_queue { queues as u16 } else { 1 }).map_err(|e| format!("{name}: {e}"))?;
    let names =
        (keys.text("trace_file_prefix")?.unwrap_or_default(), keys.text("trace_file_sufix")?.unwrap_or_default());
    let config = Config {
        trace: keys.flag("trace")?.then_some(names),
        trace_buffer_bytes: keys.int("max_trace_buffer_size")? as usize * 1024,
        policy,
        queues,
        lane_per_queue,
        in_flight_requests: keys.int("in_flight_requests")? as u32,
    };
    Ok((config, warnings))
}

/// The file of weights: bytes per queue, separated by blanks.
fn weights(file: Option<String>, queues: u32) -> Result<String, String> {
    // The public library also reads the environment variable.
    let Some(file) = file.or_else(|| std::env::var("WFQ_CONF").ok()) else {
        return Err("WFQ needs wfq_conf in library_options: a file with a weight in bytes for each queue".into());
    };
    let bytes = guard::file_bytes(&file).map_err(|e| format!("wfq_conf: {e}"))?;
    let bytes = bytes.ok_or_else(|| format!("wfq_conf: {file} cannot be read: it does not exist"))?;
    let text = String::from_utf8_lossy(&bytes);
    let bytes = |word: &str| {
        let bytes = word.parse::<u64>().ok().filter(|b| (512..=1 << 30).contains(b));
        bytes.ok_or_else(|| format!("wfq_conf: {file}: \"{word}\" is not a weight: give 512 to 1073741824 bytes"))
    };
    let weights = text.split_whitespace().take(queues as usize).map(bytes).collect::<Result<Vec<_>, _>>()?;
    if weights.len() < queues as usize {
        return Err(format!("wfq_conf: {file} has {} weights; there are {queues} queues", weights.len()));
    }
    let rules =
        weights.iter().enumerate().map(|(queue, bytes)| format!("q{queue}: job={queue} {{quantum_bytes={bytes}}}"));
    Ok(rules.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(keys: &str) -> Result<(Config, Warnings), String> {
        read(&format!("library_options:\n{{\n{keys}\n}};"), "agios.conf", 4)
    }

    fn policy(keys: &str) -> PolicySpec {
        options(keys).unwrap().0.policy
    }

    #[test]
    fn nothing_given_means_the_defaults() {
        let (config, warnings) = read("", "agios.conf", 0).unwrap();
        assert_eq!(config.policy, PolicySpec::named("sjf"));
        assert_eq!((config.trace, config.queues, config.lane_per_queue), (None, 1, false));
        assert!(warnings.is_empty());
        assert_eq!((config.trace_buffer_bytes, config.in_flight_requests), (32 << 20, 0));
    }

    #[test]
    fn every_algorithm_has_its_policy_with_its_keys() {
        for (name, here) in ALGORITHMS.iter().filter(|(name, _)| *name != "WFQ") {
            assert_eq!(policy(&format!("default_algorithm = \"{name}\";")).name, *here);
        }
        assert_eq!(policy("default_algorithm = \"mlf\"").name, "mlf", "our own names are welcome too");
        assert_eq!(policy("default_algorithm = \"SRTF\""), PolicySpec::named("srtf"));
        let mlf = policy("default_algorithm = \"MLF\" mlf_quantum = 65536; waiting_time = 500000");
        assert_eq!(mlf.params["quantum_bytes"], "65536");
        assert_eq!((&*mlf.params["growth"], &*mlf.params["hold_us"]), ("double", "500"));
        assert_eq!(policy("default_algorithm = \"aIOLi\" aioli_quantum = 4096").params["quantum_bytes"], "4096");
        assert_eq!(policy("default_algorithm = \"SW\" SW_window = 250").params["window_ms"], "250");
        assert_eq!(policy("default_algorithm = \"TWINS\" twins_window = 8000").params["window_us"], "8000");
        let (one, _) = read("library_options = { default_algorithm = \"TWINS\" }", "", 1).unwrap();
        assert_eq!((one.policy.name.as_str(), one.lane_per_queue), ("to", false), "one server has every window");
    }

    #[test]
    fn weights_become_rules() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("wfq.conf");
        let wfq = format!("default_algorithm = \"WFQ\" wfq_conf = \"{}\"", file.display());
        assert!(options(&wfq).unwrap_err().contains("cannot be read"));
        std::fs::write(&file, "1024 2048\n4096 8192 99\n").unwrap();
        assert_eq!(
            policy(&wfq).params["rules"],
            "q0: job=0 {quantum_bytes=1024}; q1: job=1 {quantum_bytes=2048}; q2: job=2 {quantum_bytes=4096}; \
             q3: job=3 {quantum_bytes=8192}"
        );
        for (text, wants) in [("1024", "1 weights"), ("1024 x 1 1", "\"x\""), ("1 1 1 1", "\"1\"")] {
            std::fs::write(&file, text).unwrap();
            assert!(options(&wfq).unwrap_err().contains(wants), "{text}");
        }
        assert!(options("default_algorithm = \"WFQ\"").unwrap_err().contains("wfq_conf"));
    }

    /// The layout of the file in version 1 of the public library: two groups, some other names, settings without
    /// terminators.
    #[test]
    fn configurations_of_version_1_are_read() {
        let text = |algorithm: &str| {
            format!(
                "library_options:\n{{\n\t#\"quoted\" = {{ in a comment\n\ttrace_full = false ;\n\tprediction_time_error = 10\n\n\
                 \ttime_window_size = 250 #ms\n\texclusive_tw_window_duration = 4000 \n\tenable_TW = false ;\n\
                 \tselect_algorithm_period = -1\n\tselect_algorithm_min_reqnumber=1\n\tdefault_algorithm = \"{algorithm}\" ;\n}};\n\
                 user_info:\n{{\n\tstripe_size = 32768 ;\n\tmax_trace_buffer_size = 64 ;\n\n}};\n"
            )
        };
        let (config, warnings) = read(&text("EXCLUSIVE_TIME_WINDOW"), "agios.conf", 4).unwrap();
        assert_eq!(config.policy, PolicySpec::named("twins").with("window_us", 4000));
        assert_eq!(config.trace_buffer_bytes, 64 << 10);
        let ignored = ["prediction_time_error", "stripe_size", "trace_full"];
        assert!(warnings.len() == 3 && warnings.iter().zip(ignored).all(|(w, key)| w.contains(key)), "{warnings:?}");
        let (config, _) = read(&text("TW"), "agios.conf", 4).unwrap();
        assert_eq!(config.policy, PolicySpec::named("sw").with("window_ms", 250));
        let refused = read(&text("ARMED_BANDIT"), "agios.conf", 4).unwrap_err();
        assert!(refused.contains("line 12") && refused.contains("ARMED_BANDIT"), "{refused}");
    }

    #[test]
    fn trace_keys_are_read() {
        let (config, _) = options(
            "trace = true trace_file_prefix = \"/x/t\" trace_file_sufix = \"log\" \
                                   max_trace_buffer_size = 4 in_flight_requests = 8",
        )
        .unwrap();
        assert_eq!(config.trace, Some(("/x/t".into(), "log".into())));
        assert_eq!((config.trace_buffer_bytes, config.in_flight_requests), (4096, 8));
    }

    #[test]
    fn unknown_keys_warn_and_mistakes_are_one_line() {
        let (_, warnings) = options("nosuch = 1").unwrap();
        assert!(
            warnings.len() == 1 && warnings[0].contains("line 3") && warnings[0].contains("nosuch"),
            "{warnings:?}"
        );
        let (_, warnings) = read("other = { a = 1 }\nlibrary_options = { }", "f", 1).unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains("other"), "{warnings:?}");
        for (keys, wants) in [
            ("mlf_quantum = \"8k\"", &["line 3", "mlf_quantum", "\"8k\""][..]),
            ("mlf_quantum = 1;\ndefault_algorithm = \"MLF\"", &["quantum_bytes", "\"1\""]),
            ("twins_window = 9999999", &["twins_window", "2000000"]),
            ("default_algorithm = \"SRTX\"", &["line 3", "SRTX", "TWINS"]),
            ("default_algorithm = 5", &["default_algorithm", "quotes"]),
            ("trace = 2", &["trace", "true or false"]),
            ("select_algorithm_period = -2", &["select_algorithm_period", "-1"]),
            ("a = \"open", &["line 3", "not closed"]),
        ] {
            let message = options(keys).unwrap_err();
            assert!(wants.iter().all(|w| message.contains(w)), "{keys}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
        assert!(read("", "f", -1).unwrap_err().contains("max_queue_id"));
        assert!(read("", "f", 70_000).unwrap_err().contains("65535"));
    }
}
