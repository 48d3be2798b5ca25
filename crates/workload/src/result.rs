//! The result of one run, for programs (JSON) and for people.

use impresario_base::histogram::Summary;
use serde::{Deserialize, Serialize};

use crate::access::{Moved, Observation};
use crate::dataset::Verification;
use crate::stats;
use impresario_base::units::{show_bytes, show_seconds};

/// A run on a modelled device counts with at least this share of the machine's CPU idle.
pub const IDLE_CPU_MIN: f64 = 0.20;
/// … and with a 99th-percentile lateness of the device below this share of its mean service time.
pub const LATENESS_SHARE_MAX: f64 = 0.05;

/// One application's part of a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct AppResult {
    /// Its number, from 0.
    pub application: usize,
    /// When it started after the first one, s.
    pub start_s: f64,
    /// From its start to the end of its slowest process, s.
    pub time_s: f64,
    /// Time of each of its processes, by rank, s.
    pub process_s: Vec<f64>,
    /// When each of its processes started to run, by rank, s after the first application's start: a machine wakes one
    /// process after another. Empty if not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub came_s: Vec<f64>,
    /// Mean of the times of its processes, s.
    pub mean_s: f64,
    /// Their variance, s².
    pub variance_s2: f64,
    /// Jain's index of the bandwidths of its processes.
    pub jain: f64,
    /// Time among the others over time alone, if it was also run alone.
    pub interference: Option<f64>,
    /// Latency of its requests, if recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
}

impl AppResult {
    /// From the times of its processes.
    pub fn new(application: usize, start_s: f64, time_s: f64, process_s: Vec<f64>) -> AppResult {
        let speeds: Vec<f64> = process_s.iter().map(|t| 1.0 / t.max(1e-9)).collect();
        AppResult {
            application,
            start_s,
            time_s,
            mean_s: stats::mean(&process_s),
            variance_s2: stats::variance(&process_s),
            jain: stats::jain(&speeds),
            process_s,
            came_s: Vec::new(),
            interference: None,
            latency: None,
        }
    }
}

/// Latency of the application's requests.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Latency {
    /// Mean, µs.
    pub mean_us: f64,
    /// Median, µs.
    pub p50_us: f64,
    /// 99th percentile, µs.
    pub p99_us: f64,
    /// Longest, µs.
    pub max_us: f64,
}

impl From<Summary> for Latency {
    fn from(ns: Summary) -> Latency {
        Latency {
            mean_us: ns.mean / 1e3,
            p50_us: ns.p50 as f64 / 1e3,
            p99_us: ns.p99 as f64 / 1e3,
            max_us: ns.max as f64 / 1e3,
        }
    }
}

/// The runner's results besides the times.
pub(crate) struct Measured {
    pub began_ns: u64,
    pub bytes: u64,
    pub requests: u64,
    pub latency_ns: Summary,
    pub leaving_clients: Moved,
    pub servers: Observation,
    pub idle_cpu: Option<f64>,
    pub server_cpu_s: Option<f64>,
    pub client_cpu_s: f64,
    pub verification: Verification,
    pub checked_in_line: bool,
}

/// A run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RunResult {
    /// The first application's start on the kernel's monotonic clock, ns: modelled disks follow it.
    #[serde(default)]
    pub began_ns: u64,
    /// Slowest process of the slowest application, from the first start, s.
    pub makespan_s: f64,
    /// Bytes that the applications moved.
    pub bytes: u64,
    /// Requests that the applications made.
    pub requests: u64,
    /// Bytes over makespan, MiB/s.
    pub bandwidth_mib_s: f64,
    /// What the servers counted.
    pub requests_per_s: f64,
    /// The applications.
    pub applications: Vec<AppResult>,
    /// Jain's index of the bandwidths of the applications.
    pub jain_applications: f64,
    /// Of the applications' requests.
    pub latency: Latency,
    /// Data requests that left the clients.
    pub leaving_clients: Moved,
    /// What the servers saw.
    pub servers: Observation,
    /// Share of the machine's CPU that was idle during the timed part.
    pub idle_cpu: Option<f64>,
    /// CPU time of our cluster's servers in the timed part, s; absent for other clusters, whose processes are not known.
    pub server_cpu_s: Option<f64>,
    /// CPU time of all clients in the timed part, s (including servers in the same process).
    pub client_cpu_s: f64,
    /// The result of comparing the data.
    pub verification: Verification,
    /// Content was generated and compared within the timed part, because it did not fit into memory.
    pub checked_in_line: bool,
    /// Why the run does not count, if it does not.
    pub does_not_count: Vec<String>,
}

impl RunResult {
    /// Computes the result from the measurements.
    pub(crate) fn new(makespan_s: f64, applications: Vec<AppResult>, measured: Measured) -> RunResult {
        let seconds = makespan_s.max(1e-9);
        let speeds: Vec<f64> = applications.iter().map(|a| 1.0 / a.time_s.max(1e-9)).collect();
        RunResult {
            began_ns: measured.began_ns,
            makespan_s,
            bytes: measured.bytes,
            requests: measured.requests,
            bandwidth_mib_s: measured.bytes as f64 / f64::from(1 << 20) / seconds,
            requests_per_s: measured.requests as f64 / seconds,
            jain_applications: stats::jain(&speeds),
            applications,
            latency: measured.latency_ns.into(),
            leaving_clients: measured.leaving_clients,
            does_not_count: why_not(&measured.servers, measured.idle_cpu),
            servers: measured.servers,
            idle_cpu: measured.idle_cpu,
            server_cpu_s: measured.server_cpu_s,
            client_cpu_s: measured.client_cpu_s,
            verification: measured.verification,
            checked_in_line: measured.checked_in_line,
        }
    }

    /// Whether its time may be compared with others'.
    pub fn counts(&self) -> bool {
        self.does_not_count.is_empty()
    }

    /// The numbers were made on a modelled device.
    pub fn modelled(&self) -> bool {
        self.servers.device.is_some()
    }

    /// Several lines for people.
    pub fn show(&self) -> String {
        let disk = if self.modelled() { "modelled disk" } else { "folder" };
        let mut out = format!(
            "time {} · {:.1} MiB/s · {:.0} requests/s{}\n",
            show_seconds(self.makespan_s),
            self.bandwidth_mib_s,
            self.requests_per_s,
            if self.modelled() { " (on the modelled disk)" } else { "" },
        );
        out += &format!(
            "request latency: mean {:.0} µs, median {:.0} µs, 99 % {:.0} µs, longest {:.0} µs\n",
            self.latency.mean_us, self.latency.p50_us, self.latency.p99_us, self.latency.max_us
        );
        out += &format!(
            "requests: leaving clients {}, leaving I/O nodes {}, arriving at servers {}, at the {disk} {}\n",
            self.leaving_clients, self.servers.leaving_io_nodes, self.servers.arriving_at_servers, self.servers.at_disk,
        );
        for a in &self.applications {
            out += &format!(
                "application {}: start {}, time {}, processes {} ± {} (fairness {:.3}){}{}\n",
                a.application,
                show_seconds(a.start_s),
                show_seconds(a.time_s),
                show_seconds(a.mean_s),
                show_seconds(a.variance_s2.sqrt()),
                a.jain,
                a.latency.map_or(String::new(), |l| format!(", latency {:.0} µs, 99 % {:.0} µs", l.mean_us, l.p99_us)),
                a.interference.map_or(String::new(), |i| format!(", interference {i:.2} ×")),
            );
        }
        if self.applications.len() > 1 {
            out += &format!("fairness between applications {:.3}\n", self.jain_applications);
        }
        if let Some(device) = &self.servers.device {
            out += &format!(
                "modelled disk: mean service {:.0} µs, lateness of its clock (99 %) {:.0} µs = {:.1} % of it\n",
                device.mean_service_us,
                device.lateness_p99_us,
                100.0 * device.lateness_p99_us / device.mean_service_us.max(1e-9),
            );
        }
        if let Some(memory) = &self.servers.memory {
            let limit = show_bytes(memory.limit_bytes as f64);
            out += &format!("memory of each data server: {limit}; reclaimed {} times\n", memory.reclaims);
        }
        if let Some(idle) = self.idle_cpu {
            let (per_op, per_gib) = (1e6 / self.requests.max(1) as f64, f64::from(1 << 30) / self.bytes.max(1) as f64);
            let cpu = |whose: &str, s: f64| {
                format!(" · CPU of {whose} {:.1} µs a request, {:.2} s a GiB", s * per_op, s * per_gib)
            };
            out += &format!("idle CPU {:.0} %", idle * 100.0);
            out += &self.server_cpu_s.map_or(String::new(), |s| cpu("servers", s));
            out += &(cpu("clients", self.client_cpu_s) + "\n");
        }
        out += &match (&self.verification, self.verification.passed()) {
            (v, true) => format!("verified: {} as they must be\n", show_bytes(v.checked_bytes as f64)),
            (v, false) if v.checked_bytes == 0 => "not verified\n".into(),
            (v, false) => format!(
                "WRONG DATA in {} places; first: {}\n",
                v.mismatches,
                v.first.first().map_or("–".into(), ToString::to_string)
            ),
        };
        if self.checked_in_line {
            out += "data were made and compared between the requests, within the timed part: they did not fit into memory\n";
        }
        for why in &self.does_not_count {
            out += &format!("does not count: {why}\n");
        }
        out
    }
}

/// Why a run on a modelled device does not count; `None` if it does.
pub fn why_not(servers: &Observation, idle_cpu: Option<f64>) -> Vec<String> {
    let Some(device) = &servers.device else { return Vec::new() };
    let mut why = Vec::new();
    match idle_cpu {
        Some(idle) if idle < IDLE_CPU_MIN => why.push(format!(
            "only {:.0} % of the CPU was idle; the modelled disk's time holds with at least {:.0} %",
            idle * 100.0,
            IDLE_CPU_MIN * 100.0
        )),
        None => why.push("idle CPU could not be read from /proc/stat".into()),
        Some(_) => {}
    }
    if device.requests == 0 {
        why.push("the modelled disks served nothing".into());
    } else if device.lateness_p99_us >= LATENESS_SHARE_MAX * device.mean_service_us {
        why.push(format!(
            "the modelled disk ran late: 99 % lateness {:.0} µs is not below {:.0} % of the mean service time {:.0} µs",
            device.lateness_p99_us,
            LATENESS_SHARE_MAX * 100.0,
            device.mean_service_us
        ));
    }
    why
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{DeviceObservation, MemoryObservation};

    fn on_device(service: f64, late: f64) -> Observation {
        let device = DeviceObservation { requests: 10, mean_service_us: service, lateness_p99_us: late };
        Observation { device: Some(device), ..Observation::default() }
    }

    #[test]
    fn a_run_on_a_modelled_device_counts_only_when_its_clock_held() {
        assert!(why_not(&on_device(8000.0, 399.0), Some(0.2)).is_empty());
        assert!(why_not(&on_device(8000.0, 400.0), Some(0.2))[0].contains("late"));
        assert!(why_not(&on_device(8000.0, 100.0), Some(0.19))[0].contains("idle"));
        assert!(!why_not(&on_device(8000.0, 100.0), None).is_empty());
        assert!(why_not(&Observation::default(), Some(0.0)).is_empty());
    }

    #[test]
    fn requests_are_told_with_their_number_and_size() {
        let moved = |requests, bytes| Moved { requests, bytes };
        assert_eq!(moved(412, 412 << 18).to_string(), "412 × 256 KiB");
        assert_eq!(format!("{:>6}", moved(0, 0)), "     –");
        assert_eq!(Moved::mean(&[moved(100, 4000), moved(300, 4000)]), moved(200, 4000));
        assert_eq!(Moved::mean(&[]), moved(0, 0));
    }

    #[test]
    fn what_is_not_known_is_not_told_as_nothing() {
        let measured = |server_cpu_s, checked_in_line| Measured {
            began_ns: 0,
            bytes: 1 << 30,
            requests: 1000,
            latency_ns: impresario_base::Histogram::<5>::default().summary(),
            leaving_clients: Moved::default(),
            servers: Observation::default(),
            idle_cpu: Some(0.5),
            server_cpu_s,
            client_cpu_s: 0.25,
            verification: Verification::default(),
            checked_in_line,
        };
        let other = RunResult::new(1.0, Vec::new(), measured(None, true));
        let text = other.show();
        assert!(text.contains("idle CPU 50 % · CPU of clients 250.0 µs a request, 0.25 s a GiB\n"), "{text}");
        assert!(!text.contains("of servers") && text.contains("within the timed part"), "{text}");
        assert!(serde_json::to_value(&other).unwrap()["server_cpu_s"].is_null());
        let text = RunResult::new(1.0, Vec::new(), measured(Some(0.5), false)).show();
        assert!(
            text.contains("CPU of servers 500.0 µs a request") && !text.contains("within the timed part"),
            "{text}"
        );
        assert!(!text.contains("memory of"), "{text}");
        let memory = Some(MemoryObservation { limit_bytes: 96 << 20, reclaims: 7 });
        let limited = Measured { servers: Observation { memory, ..Observation::default() }, ..measured(None, false) };
        let text = RunResult::new(1.0, Vec::new(), limited).show();
        assert!(text.contains("memory of each data server: 96 MiB; reclaimed 7 times\n"), "{text}");
    }

    #[test]
    fn applications_tell_mean_variance_and_fairness() {
        let a = AppResult::new(0, 0.0, 4.0, vec![2.0, 4.0]);
        assert_eq!((a.mean_s, a.variance_s2), (3.0, 2.0));
        assert!((a.jain - 0.9).abs() < 1e-12, "{}", a.jain);
    }
}
