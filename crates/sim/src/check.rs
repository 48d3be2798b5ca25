//! Validates a scenario before it is simulated.

use impresario_config::{device_key, missing_device, policy_complaint};
use impresario_device::DeviceParams;
use impresario_layout::Layout;
use impresario_sched::policy;
use impresario_toml::KeyPath;

use crate::access;
use crate::model::{Device, FaultKind, Pattern, Scenario};

/// Problems: key paths, and what each value is and must be.
struct Complaints(Vec<(KeyPath, String)>);

impl Complaints {
    fn say(&mut self, key: &str, message: String) {
        self.0.push((KeyPath::of(key), message));
    }

    fn whole(&mut self, key: &str, value: u64, least: u64, most: u64) {
        if !(least..=most).contains(&value) {
            self.say(key, format!("{value} is not a number from {least} to {most}; give one of these"));
        }
    }

    /// Written so that NaN is refused too.
    fn real(&mut self, key: &str, value: f64, least: f64, most: f64) {
        if !(least..=most).contains(&value) {
            self.say(key, format!("{value} is not a number from {least} to {most}; give one of these"));
        }
    }

    /// A rate: 0, or at least one byte a second.
    fn rate(&mut self, key: &str, value: f64) {
        if value != 0.0 {
            self.real(key, value, 1.0, 1e15);
        }
    }
}

/// Maximum processes of a scenario.
const PROCESSES_MAX: u64 = 1 << 24;
/// Maximum size of anything in a file, bytes.
const BYTES_MAX: u64 = 1 << 48;

impl Scenario {
    /// The problems of a scenario: (key path, message with the value and the remedy); empty if it can be run.
    pub fn check(&self) -> Vec<(KeyPath, String)> {
        let mut c = Complaints(Vec::new());
        c.real("time_limit_s", self.time_limit_s, 0.001, 1e9);
        c.whole("request_timeout_ms", self.request_timeout_ms, 1, 600_000);
        self.check_network(&mut c);
        self.check_clients(&mut c);
        self.check_servers(&mut c);
        self.check_io_nodes(&mut c);
        self.check_applications(&mut c);
        self.check_faults(&mut c);
        c.0
    }

    fn check_network(&self, c: &mut Complaints) {
        let n = &self.network;
        c.real("network.latency_us", n.latency_us, 0.0, 1e6);
        c.real("network.jitter_us", n.jitter_us, 0.0, 1e6);
        c.rate("network.client_bytes_per_s", n.client_bytes_per_s);
        c.rate("network.io_node_bytes_per_s", n.io_node_bytes_per_s);
        c.rate("network.server_bytes_per_s", n.server_bytes_per_s);
        c.whole("network.quantum_bytes", n.quantum_bytes, 1 << 10, 16 << 20);
        c.whole("network.header_bytes", n.header_bytes, 0, 1 << 20);
        c.whole("network.socket_bytes", n.socket_bytes, 1, BYTES_MAX);
        if n.port_buffer_bytes != 0 {
            // One that takes no quantum would never let anything pass.
            c.whole("network.port_buffer_bytes", n.port_buffer_bytes, n.quantum_bytes, BYTES_MAX);
        }
        c.real("network.retransmit_ms", n.retransmit_ms, 0.01, 1e5);
    }

    fn check_clients(&self, c: &mut Complaints) {
        let n = &self.clients;
        c.whole("clients.processes_per_node", n.processes_per_node.into(), 1, PROCESSES_MAX);
        if n.request_bytes_max != 0 {
            c.whole("clients.request_bytes_max", n.request_bytes_max, 512, BYTES_MAX);
        }
        c.whole("clients.read_ahead_bytes", n.read_ahead_bytes, 0, 1 << 30);
        c.whole("clients.cache_bytes", n.cache_bytes, 0, BYTES_MAX);
        c.real("clients.cpu_us", n.cpu_us, 0.0, 1e6);
    }

    fn check_servers(&self, c: &mut Complaints) {
        let s = &self.servers;
        c.whole("servers.count", s.count.into(), 1, 10_000);
        let strip = (Layout::SSIZE_MIN_BYTES.into(), Layout::SSIZE_MAX_BYTES.into());
        c.whole("servers.stripe_bytes", s.stripe_bytes.into(), strip.0, strip.1);
        c.whole("servers.stripe_count", s.stripe_count.into(), 0, s.count.into());
        if let Err(refusal) = policy::check(&s.policy, 1) {
            c.say("servers.policy", policy_complaint(&refusal));
        }
        c.real("servers.cpu_us", s.cpu_us, 0.0, 1e6);
        c.real("servers.concurrency_us", s.concurrency_us, 0.0, 1e6);
        c.real("servers.timer_late_us", s.timer_late_us, 0.0, 1e6);
        c.rate("servers.copy_bytes_per_s", s.copy_bytes_per_s);
        c.whole("servers.cache_bytes", s.cache_bytes, 0, BYTES_MAX);
        c.whole("servers.read_ahead_bytes", s.read_ahead_bytes, 0, 1 << 30);
        if s.foresight_bytes != 0 {
            c.whole("servers.foresight_bytes", s.foresight_bytes, 4 << 20, 64 << 30);
            if s.cache_bytes == 0 {
                let message = "reading ahead needs a page cache; set servers.cache_bytes, or foresight_bytes = 0";
                c.say("servers.foresight_bytes", message.into());
            }
        }
        if s.payload_bytes != 0 {
            c.whole("servers.payload_bytes", s.payload_bytes, 4 << 10, BYTES_MAX);
        }
        c.real("servers.dirty_ratio", s.dirty_ratio, 0.0, 1.0);
        c.whole("servers.earlier_runs", s.earlier_runs.into(), 0, 16);
        if s.warm && s.cache_bytes == 0 {
            c.say("servers.warm", "true needs a page cache; set servers.cache_bytes, or warm = false".into());
        }
        for (name, device) in &self.device {
            let checked = match device {
                Device::Disk(params) => params.check(),
                Device::Flash(params) => params.check(),
            };
            if let Err(refusal) = checked {
                c.0.push((device_key(name, &refusal), refusal));
            }
        }
        if !s.device.is_empty() && !self.device.contains_key(&s.device) {
            let remedy = missing_device(&s.device, self.device.keys().map(String::as_str));
            c.say("servers.device", format!("there is no device {:?}; {remedy}", s.device));
        }
    }

    /// The servers' device.
    pub(crate) fn device_params(&self) -> Device {
        self.device.get(&self.servers.device).cloned().unwrap_or_else(|| Device::Disk(DeviceParams::default()))
    }

    /// The number of files of all applications.
    fn files(&self) -> u64 {
        self.application.iter().map(|a| u64::from(a.copies) * u64::from(access::files(a))).sum()
    }

    fn check_io_nodes(&self, c: &mut Complaints) {
        let Some(n) = &self.io_nodes else { return };
        c.whole("io_nodes.count", n.count.into(), 1, 10_000);
        c.whole("io_nodes.threads", n.threads.into(), 1, 1 << 20);
        c.real("io_nodes.handover_us", n.handover_us, 0.0, 1e6);
        c.real("io_nodes.timer_late_us", n.timer_late_us, 0.0, 1e6);
        if n.payload_bytes != 0 {
            c.whole("io_nodes.payload_bytes", n.payload_bytes, 4 << 10, BYTES_MAX);
        }
        c.whole("io_nodes.merge_requests", n.merge_requests.into(), 1, 1 << 20);
        c.whole("io_nodes.dispatch_requests", n.dispatch_requests.into(), 1, 1 << 20);
        c.real("io_nodes.cpu_us", n.cpu_us, 0.0, 1e6);
        c.real("io_nodes.clock_skew_us", n.clock_skew_us, 0.0, 1e9);
        c.real("io_nodes.started_within_us", n.started_within_us, 0.0, 1e9);
        if let Err(refusal) = policy::check(&n.policy, self.servers.count.max(1)) {
            c.say("io_nodes.policy", policy_complaint(&refusal));
        }
    }

    fn check_applications(&self, c: &mut Complaints) {
        if self.application.is_empty() {
            c.say("application", "there is none; add an [[application]]".into());
        }
        let mut processes = 0;
        for (i, a) in self.application.iter().enumerate() {
            let key = |k: &str| format!("application.{i}.{k}");
            c.whole(&key("copies"), a.copies.into(), 1, 1 << 20);
            c.whole(&key("processes"), a.processes.into(), 1, PROCESSES_MAX);
            processes += u64::from(a.copies) * u64::from(a.processes);
            c.real(&key("start_s"), a.start_s, 0.0, 1e9);
            c.whole(&key("request_bytes"), a.request_bytes, 1, 1 << 40);
            c.whole(&key("requests"), a.requests, 1, 1 << 40);
            c.whole(&key("run_requests"), a.run_requests, 1, 1 << 40);
            c.whole(&key("regions"), a.regions.into(), 1, 1 << 20);
            c.whole(&key("queue_depth"), a.queue_depth.into(), 1, 1 << 16);
            c.real(&key("think_us"), a.think_us, 0.0, 1e12);
            c.real(&key("jitter_us"), a.jitter_us, 0.0, 1e9);
            a.starts_us.iter().for_each(|us| c.real(&key("starts_us"), *us, 0.0, 1e12));
            c.whole(&key("barrier_requests"), a.barrier_requests, 0, 1 << 40);
            for (f, at) in a.files.iter().enumerate().filter(|(_, at)| at.server >= self.servers.count) {
                let last = self.servers.count.saturating_sub(1);
                c.say(
                    &key(&format!("files.{f}.server")),
                    format!("there is no data server {}; they are 0 to {last}", at.server),
                );
            }
            if a.sieve_bytes != 0 {
                c.whole(&key("sieve_bytes"), a.sieve_bytes, 512, 1 << 40);
            }
            let whole = a.request_bytes.checked_mul(u64::from(a.regions)).and_then(|b| b.checked_mul(a.requests));
            let size = whole.and_then(|b| b.checked_mul(u64::from(a.processes)));
            if size.is_none_or(|size| size > BYTES_MAX) {
                let message = "request_bytes × regions × requests × processes is more than 256 TiB; ask for less";
                c.say(&key("requests"), message.into());
            }
            if let Some(collective) = &a.collective {
                let most = a.processes.into();
                c.whole(&key("collective.aggregators"), collective.aggregators.into(), 0, most);
                c.whole(&key("collective.buffer_bytes"), collective.buffer_bytes, 512, 1 << 40);
                if a.queue_depth > 1 {
                    let message = format!("{} does not go with collective I/O; set it to 1", a.queue_depth);
                    c.say(&key("queue_depth"), message);
                }
                if a.pattern == Pattern::FilePerProcess || a.pattern == Pattern::Trace {
                    let message = "collective I/O is of one shared file; use contiguous, strided or random";
                    c.say(&key("pattern"), message.into());
                }
            }
            self.check_trace(i, c);
        }
        c.whole("application", processes, 0, PROCESSES_MAX);
    }

    fn check_trace(&self, i: usize, c: &mut Complaints) {
        let a = &self.application[i];
        let key = format!("application.{i}.trace_file");
        if a.pattern != Pattern::Trace {
            if a.trace_file.is_some() {
                c.say(&key, "a trace is only used with pattern = \"trace\"; set that, or leave trace_file out".into());
            }
            return;
        }
        if a.trace.is_empty() {
            c.say(&key, "the trace is empty; name a file with accesses".into());
        }
        for (n, t) in a.trace.iter().enumerate() {
            let problem = if t.process >= a.processes {
                format!("is of process {}, but the application has {}; raise processes", t.process, a.processes)
            } else if t.file >= 1 << 24 {
                format!("is of file {}; number files from 0 without gaps", t.file)
            } else if t.len == 0 || t.len > 1 << 40 || t.offset > BYTES_MAX {
                format!("is of {} bytes at {}; lengths go from 1 to 2^40, offsets to 2^48", t.len, t.offset)
            } else {
                continue;
            };
            c.say(&key, format!("access {n} {problem}"));
            break;
        }
    }

    fn check_faults(&self, c: &mut Complaints) {
        let io_nodes = self.io_nodes.as_ref().map_or(0, |n| n.count);
        for (i, f) in self.fault.iter().enumerate() {
            let key = |k: &str| format!("fault.{i}.{k}");
            c.real(&key("at_s"), f.at_s, 0.0, 1e9);
            c.real(&key("for_s"), f.for_s, 0.0, 1e9);
            c.real(&key("factor"), f.factor, 1.0, 1e6);
            let (there, what) = match f.what {
                FaultKind::LostIoNode | FaultKind::PartitionedIoNode => (io_nodes.into(), "I/O nodes"),
                FaultKind::TruncatedFile | FaultKind::ReplacedFile => (self.files(), "files"),
                _ => (self.servers.count.into(), "data servers"),
            };
            if u64::from(f.which) >= there {
                c.say(&key("which"), format!("{} is not there: the scenario has {there} {what}, from 0", f.which));
            }
        }
        if let Some(r) = &self.random_faults {
            c.real("random_faults.mean_interval_s", r.mean_interval_s, 1e-6, 1e9);
            c.real("random_faults.mean_duration_s", r.mean_duration_s, 0.0, 1e9);
            c.whole("random_faults.count_max", r.count_max.into(), 0, 1 << 20);
        }
    }
}

#[cfg(test)]
mod tests {
    use impresario_sched::PolicySpec;
    use impresario_toml::KeyPath;

    use crate::model::*;

    fn good() -> Scenario {
        Scenario { application: vec![Application::default()], ..Scenario::default() }
    }

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(good().check(), []);
    }

    #[test]
    fn each_error_names_key_value_and_remedy() {
        type Change = fn(&mut Scenario);
        let cases: &[(Change, &str, &str)] = &[
            (|s| s.application.clear(), "application", "there is none; add an [[application]]"),
            (|s| s.application[0].processes = 0, "application.0.processes", "0 is not a number from 1 to"),
            (|s| s.application[0].requests = 1 << 40, "application.0.requests", "more than 256 TiB"),
            (|s| s.application[0].pattern = Pattern::Trace, "application.0.trace_file", "the trace is empty"),
            (|s| s.network.latency_us = f64::NAN, "network.latency_us", "NaN is not a number from 0 to 1000000"),
            (|s| s.servers.policy = PolicySpec::named("twins"), "servers.policy", "one lane"),
            (|s| s.servers.policy = PolicySpec::named("best"), "servers.policy", "there is no policy \"best\""),
            (
                |s| s.servers.device = "tape".into(),
                "servers.device",
                "there is no device \"tape\"; add a section [device.tape]",
            ),
            (|s| s.servers.stripe_count = 5, "servers.stripe_count", "5 is not a number from 0 to 4"),
            (|s| s.servers.warm = true, "servers.warm", "set servers.cache_bytes"),
            (|s| s.servers.foresight_bytes = 4096, "servers.foresight_bytes", "4096 is not a number from 4194304 to"),
            (|s| s.servers.foresight_bytes = 64 << 20, "servers.foresight_bytes", "set servers.cache_bytes"),
            (
                |s| {
                    let what = FaultKind::TruncatedFile;
                    s.fault.push(Fault { at_s: 0.0, for_s: 1.0, what, which: 1, factor: 1.0 });
                },
                "fault.0.which",
                "1 is not there: the scenario has 1 files",
            ),
            (
                |s| {
                    let what = FaultKind::LostIoNode;
                    s.fault.push(Fault { at_s: 0.0, for_s: 1.0, what, which: 0, factor: 1.0 });
                },
                "fault.0.which",
                "0 is not there: the scenario has 0 I/O nodes",
            ),
            (
                |s| {
                    let flash = impresario_device::FlashParams { channels: 0, ..Default::default() };
                    s.device.insert("x".into(), Device::Flash(flash));
                },
                "device.x.channels",
                "channels is 0",
            ),
        ];
        for (change, key, says) in cases {
            let mut s = good();
            change(&mut s);
            let complaints = s.check();
            let found = complaints.iter().any(|(k, m)| *k == KeyPath::of(key) && m.contains(says));
            assert!(found, "{key}: {says}\n{complaints:?}");
        }
    }
}
