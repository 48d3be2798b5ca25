//! The keys of `agios.conf`: defaults, checks, and our policy for each algorithm.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use impresario_embed::guard;
use impresario_sched::policy::POLICIES;
use impresario_sched::{PolicySpec, policy};
use impresario_trace::predict::RUNS_MAX;

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
    /// Maximum requests given to a callback.
    pub aggregation_max: usize,
    /// Traces of recorded runs, and folders of them, for prediction.
    pub foretold_by: Vec<PathBuf>,
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
    // Of version 1, for prediction.
    ("predict_read_traces", Some(Default::Bool(false))),
    ("predict_request_aggregation", Some(Default::Bool(false))),
    ("prediction_time_error", Some(Default::Int(100, 0, 1_000_000))),
    // Ours.
    ("in_flight_requests", Some(Default::Int(0, 0, 65_536))),
    ("aggregation_max", Some(Default::Int(16, 1, 1024))),
    ("starvation_guards", Some(Default::Bool(false))),
    ("SW_order", Some(Default::Text("arrival"))),
    ("predict_traces", None),
    ("policy", None),
];

/// Keys of version 1 and its forks without effect here: what they set is measured, or does not exist.
const WITHOUT_EFFECT: &[&str] = &[
    "access_times_func_file",
    "dynamic_twins",
    "dynamic_twins_clients",
    "dynamic_twins_period",
    "dynamic_twins_processes",
    "min_ab_probability",
    "performance_window",
    "predict_write_simplified_traces",
    "prediction_recalculate_alpha_period",
    "proc_algs",
    "simple_trace_prefix",
    "stripe_size",
    "trace_full",
    "trace_predict",
    "validity_window",
    "write_simplified_traces",
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
    // Algorithms that choose by themselves.
    ("DYN_TREE", "auto"),
    ("ARMED_BANDIT", "auto"),
];

/// Keys of version 1 of the public library, and their later names.
const RENAMED: &[(&str, &str)] = &[
    ("time_window_size", "SW_window"),
    ("exclusive_tw_window_duration", "twins_window"),
    ("twins_window_duration", "twins_window"),
    ("enable_TW", "enable_SW"),
];

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

    /// The policy of an algorithm, and whether it was given by the public library's name.
    fn algorithm(&self, key: &str) -> Result<(&'static str, bool), String> {
        let given = self.text(key)?.unwrap_or_default();
        let original = ALGORITHMS.iter().find(|(name, _)| *name == given).map(|(_, here)| (*here, true));
        // Policies that the public library lacks are selected by their own names.
        let ours = || POLICIES.iter().map(|p| p.name).find(|name| *name == given).map(|name| (name, false));
        let here = original.or_else(ours);
        let known = ALGORITHMS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let line = self.given.get(key).map_or(0, |s| s.line);
        let Some(here) = here else {
            return Err(format!("{} line {line}: {key} = \"{given}\" is not one of {known}", self.name));
        };
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
    let known = |key: &str| KEYS.iter().any(|(known, _)| *known == key) || WITHOUT_EFFECT.contains(&key);
    let unknown: Vec<_> =
        given.iter().filter(|(key, _)| !known(key)).map(|(key, s)| format!("{key} (line {})", s.line)).collect();
    if !unknown.is_empty() {
        warnings.push(format!("{name}: without effect, because unknown: {}", unknown.join(", ")));
    }
    let keys = Keys { given, name: name.into() };
    // Meant for choosing algorithms at run time, which the public library does not do either: checked, but without
    // effect.
    keys.int("performance_values")?;
    keys.algorithm("starting_algorithm")?;
    keys.int("select_algorithm_period")?;
    keys.int("select_algorithm_min_reqnumber")?;
    keys.flag("enable_SW")?;

    let queues =
        u32::try_from(max_queue_id).map_err(|_| format!("max_queue_id = {max_queue_id}: give 0 or more"))?.max(1);
    let policy = keys.policy(queues)?;
    // Others do not look at queues.
    if matches!(&*policy.name, "twins" | "wfq") && queues > u32::from(u16::MAX) {
        return Err(format!("max_queue_id = {max_queue_id}: {} has at most {} queues", policy.name, u16::MAX));
    }
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
        aggregation_max: keys.int("aggregation_max")? as usize,
        foretold_by: keys.foretold_by()?,
    };
    Ok((config, warnings))
}

impl Keys {
    /// The policy with the parameters of its algorithm's keys.
    fn policy(&self, queues: u32) -> Result<PolicySpec, String> {
        let (algorithm, original) = self.algorithm("default_algorithm")?;
        let (aioli_quantum, mlf_quantum) = (self.int("aioli_quantum")?, self.int("mlf_quantum")?);
        let (sw_window, twins_window) = (self.int("SW_window")?, self.int("twins_window")?);
        let hold_us = (self.int("waiting_time")? / 1000).min(1_000_000);
        let (foreseeing, error_percent) =
            (self.flag("predict_request_aggregation")?, self.int("prediction_time_error")?);
        let (aggregation_max, guarded) = (self.int("aggregation_max")?, self.flag("starvation_guards")?);
        let sw_order = self.sw_order()?;
        if let Some(text) = self.text("policy")? {
            return text.parse().map_err(|e| format!("{}: policy = \"{text}\": {e}", self.name));
        }
        let mut policy = PolicySpec::named(algorithm);
        let has = |param| policy::info(algorithm).is_some_and(|info| info.params.iter().any(|p| p.name == param));
        // A callback's array may be as small as the public library's largest aggregation.
        if has("batch_requests") {
            policy = policy.with("batch_requests", aggregation_max);
        }
        // The original's rules starve requests.
        if original && !guarded && has("guard_batches") {
            policy = policy.with("guard_batches", 0);
        }
        let limit_bytes = |policy: PolicySpec| policy.with("batch_bytes", 1 << 30);
        // The original doubles quanta, has no dedicated windows, and delays a file only by its `waiting_time`.
        let multilevel = |policy: PolicySpec, quantum| {
            let policy = limit_bytes(policy).with("quantum_bytes", quantum).with("growth", "double");
            let mut policy = policy.with("window_us", 0).with("anticipation_us", 0).with("hold_us", hold_us);
            if foreseeing {
                policy = policy.with("adapt", if algorithm == "aioli" { "on" } else { "off" });
                policy.name = "agios".into();
                policy = policy.with("bound_percent", error_percent);
            }
            policy
        };
        Ok(match algorithm {
            // A single server has every window.
            "twins" if queues == 1 => PolicySpec::named("to"),
            _ if !original => policy,
            "mlf" => multilevel(policy, mlf_quantum),
            "aioli" => multilevel(policy, aioli_quantum),
            "sjf" | "srtf" | "to-agg" => limit_bytes(policy),
            "sw" => policy.with("window_ms", sw_window).with("merge", "off").with("order_within", sw_order),
            "twins" => policy.with("window_us", twins_window),
            "wfq" => policy.with("rules", weights(self.text("wfq_conf")?, queues)?),
            _ => policy,
        })
    }

    /// The order of an application's requests within a window of SW.
    fn sw_order(&self) -> Result<String, String> {
        let order = self.text("SW_order")?.unwrap_or_default();
        match (&*order, self.given.get("SW_order")) {
            ("arrival" | "offset", _) | (_, None) => Ok(order),
            (_, Some(setting)) => self.wrong(setting, "SW_order", "\"arrival\" or \"offset\""),
        }
    }

    /// Recorded runs: those named, and traces written by earlier runs with this configuration.
    fn foretold_by(&self) -> Result<Vec<PathBuf>, String> {
        let named = self.text("predict_traces")?.unwrap_or_default();
        let mut traces: Vec<PathBuf> = named.split(':').filter(|path| !path.is_empty()).map(PathBuf::from).collect();
        if self.flag("predict_read_traces")? {
            let prefix = self.text("trace_file_prefix")?.unwrap_or_default();
            let suffix = self.text("trace_file_sufix")?.unwrap_or_default();
            let of = |n: u32| format!("{prefix}.{n}.{suffix}");
            let count = (1..=OWN_TRACES_MAX).take_while(|n| Path::new(&of(*n)).exists()).count() as u32;
            let room = RUNS_MAX.saturating_sub(traces.len()) as u32;
            traces.extend((count - count.min(room) + 1..=count).map(|n| PathBuf::from(of(n))));
        }
        Ok(traces)
    }
}

/// Maximum own traces to look for.
const OWN_TRACES_MAX: u32 = 100_000;

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

    /// Aggregations are as large as the public library's.
    fn sjf() -> PolicySpec {
        PolicySpec::named("sjf").with("batch_requests", 16).with("batch_bytes", 1 << 30).with("guard_batches", 0)
    }

    #[test]
    fn nothing_given_means_the_defaults() {
        let (config, warnings) = read("", "agios.conf", 0).unwrap();
        assert_eq!(config.policy, sjf());
        assert_eq!((config.trace, config.queues, config.lane_per_queue), (None, 1, false));
        assert!(warnings.is_empty());
        assert_eq!((config.trace_buffer_bytes, config.in_flight_requests), (32 << 20, 0));
        assert_eq!(config.aggregation_max, 16);
    }

    #[test]
    fn every_algorithm_has_its_policy_with_its_keys() {
        for (name, here) in ALGORITHMS.iter().filter(|(name, _)| *name != "WFQ") {
            assert_eq!(policy(&format!("default_algorithm = \"{name}\";")).name, *here);
        }
        assert_eq!(policy("default_algorithm = \"mlf\"").name, "mlf", "our own names are welcome too");
        assert_eq!(policy("default_algorithm = \"SRTF\""), PolicySpec { name: "srtf".into(), ..sjf() });
        let mlf = policy("default_algorithm = \"MLF\" mlf_quantum = 65536; waiting_time = 500000");
        assert_eq!(mlf.params["quantum_bytes"], "65536");
        assert_eq!((&*mlf.params["growth"], &*mlf.params["hold_us"]), ("double", "500"));
        let of = |key: &str| mlf.params[key].as_str();
        assert_eq!((of("window_us"), of("anticipation_us"), of("batch_requests")), ("0", "0", "16"), "as the original");
        assert_eq!(policy("default_algorithm = \"aIOLi\" aioli_quantum = 4096").params["quantum_bytes"], "4096");
        let sw = policy("default_algorithm = \"SW\" SW_window = 250");
        assert_eq!((&*sw.params["window_ms"], &*sw.params["merge"]), ("250", "off"));
        assert_eq!(policy("default_algorithm = \"TWINS\" twins_window = 8000").params["window_us"], "8000");
        let (one, _) = read("library_options = { default_algorithm = \"TWINS\" }", "", 1).unwrap();
        assert_eq!((one.policy.name.as_str(), one.lane_per_queue), ("to", false), "one server has every window");
    }

    /// The original's rules starve, and its SW keeps the order of arrival; ours are behind keys.
    #[test]
    fn guards_and_order_are_the_originals_unless_asked_for() {
        for (name, here) in [("SJF", "sjf"), ("SRTF", "srtf"), ("SW", "sw"), ("MLF", "mlf"), ("aIOLi", "aioli")] {
            let keys = format!("default_algorithm = \"{name}\"");
            assert_eq!(policy(&keys).params["guard_batches"], "0", "{name}");
            assert_eq!(policy(&format!("{keys} starvation_guards = true")).params.get("guard_batches"), None, "{name}");
            assert!(!policy(&format!("default_algorithm = \"{here}\"")).params.contains_key("guard_batches"), "{here}");
        }
        let foreseeing = policy("default_algorithm = \"MLF\" predict_request_aggregation = true");
        assert_eq!((&*foreseeing.name, &*foreseeing.params["guard_batches"]), ("agios", "0"));
        let order = |keys: &str| policy(&format!("default_algorithm = \"SW\" {keys}")).params["order_within"].clone();
        assert_eq!((order(""), order("SW_order = \"offset\"")), ("arrival".into(), "offset".into()));
        let wrong = options("default_algorithm = \"SW\" SW_order = \"file\"").unwrap_err();
        assert!(wrong.contains("line 3") && wrong.contains("SW_order") && wrong.contains("arrival"), "{wrong}");
    }

    /// Queues beyond those that TWINS and WFQ can have are no matter to the others, which do not look at them.
    #[test]
    fn many_queues_are_refused_only_where_they_count() {
        let read = |algorithm: &str, queues| {
            read(&format!("library_options = {{ default_algorithm = \"{algorithm}\" }}"), "f", queues)
        };
        for algorithm in ["TO", "SJF", "MLF", "SW", "NOOP"] {
            assert_eq!(read(algorithm, i32::MAX).unwrap().0.queues, i32::MAX as u32, "{algorithm}");
        }
        assert!(read("TWINS", 65_535).is_ok());
        assert!(read("TWINS", 65_536).unwrap_err().contains("65535"));
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
        assert_eq!(config.policy.params["window_us"], "4000");
        assert_eq!(config.trace_buffer_bytes, 64 << 10);
        assert_eq!(warnings, Warnings::new(), "its keys are known");
        let (config, _) = read(&text("TW"), "agios.conf", 4).unwrap();
        assert_eq!((&*config.policy.name, &*config.policy.params["window_ms"]), ("sw", "250"));
        for name in ["DYN_TREE", "ARMED_BANDIT"] {
            assert_eq!(read(&text(name), "agios.conf", 4).unwrap().0.policy, PolicySpec::named("auto"));
        }
    }

    /// What FORGE and GekkoFS ship: keys of a fork of version 1.
    #[test]
    fn configurations_of_forge_are_read_without_a_word() {
        let text = "library_options:\n{ trace = false ; trace_predict = false ; trace_full = false ;\n\
                    predict_read_traces = false ; predict_request_aggregation = false ;\n\
                    predict_write_simplified_traces = false; prediction_time_error = 10\n\
                    prediction_recalculate_alpha_period = -1\n simple_trace_prefix = \"/tmp/s\"\n\
                    access_times_func_file = \"/tmp/access_times.func\"\n proc_algs = 1000\n\
                    default_algorithm = \"EXCLUSIVE_TIME_WINDOW\"; twins_window_duration = 1000;\n\
                    dynamic_twins = false; dynamic_twins_period = 1000; dynamic_twins_clients = 32;\n\
                    dynamic_twins_processes = 128; min_ab_probability = 3\n validity_window = 360000\n\
                    performance_window = 10 };\nuser_info: { stripe_size = 32768 ; max_trace_buffer_size = 32768 ; };";
        let (config, warnings) = read(text, "agios.conf", 4).unwrap();
        assert_eq!(warnings, Warnings::new());
        assert_eq!((&*config.policy.name, &*config.policy.params["window_us"]), ("twins", "1000"));
    }

    #[test]
    fn predictions_are_configured() {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("t").display().to_string();
        for n in (1..=20).chain([22]) {
            std::fs::write(format!("{prefix}.{n}.out"), "").unwrap();
        }
        let keys = "default_algorithm = \"MLF\" predict_request_aggregation = true prediction_time_error = 7\n\
                    predict_traces = \"/a:/b\"";
        let (config, _) = options(keys).unwrap();
        assert_eq!((&*config.policy.name, &*config.policy.params["bound_percent"]), ("agios", "7"));
        assert_eq!(config.policy.params["quantum_bytes"], "8192");
        assert_eq!(config.foretold_by, [PathBuf::from("/a"), PathBuf::from("/b")]);
        let keys = format!("predict_read_traces = true trace_file_prefix = \"{prefix}\"");
        let of = |n: u32| PathBuf::from(format!("{prefix}.{n}.out"));
        assert_eq!(options(&keys).unwrap().0.foretold_by, (5..=20).map(of).collect::<Vec<_>>(), "the newest 16");
    }

    #[test]
    fn improvements_are_options() {
        let (config, _) = options("aggregation_max = 64 policy = \"mlf window_us=60000\"").unwrap();
        assert_eq!(config.policy, PolicySpec::named("mlf").with("window_us", 60000));
        assert_eq!(config.aggregation_max, 64);
        assert!(options("policy = \"mlf window_us\"").unwrap_err().contains("window_us"));
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
        let (_, warnings) = options("nosuch = 1\nneither = 2").unwrap();
        assert_eq!(warnings, ["agios.conf: without effect, because unknown: neither (line 4), nosuch (line 3)"]);
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
    }
}
