//! Assembles the measurements at the end of a run.

use crate::measure::INTERVALS_MAX;
use crate::outcome::{ApplicationOutcome, Layers, Outcome, Series};
use crate::simulation::Simulation;
use impresario_base::statistics::jain;

/// Maximum applications with their own bandwidth in the series.
const SERIES_MAX: usize = 16;

impl Simulation {
    pub(crate) fn into_outcome(mut self) -> Outcome {
        let end = self.makespan.max(1);
        let applications: Vec<ApplicationOutcome> = (0..self.applications.len()).map(|a| self.application(a)).collect();
        let mean_bandwidths: Vec<f64> = applications.iter().map(|a| a.bytes as f64 / a.time_s.max(1e-12)).collect();
        let violations = self.all_violations();
        let stations = self.io.iter().map(|n| &n.station).chain(self.servers.iter().map(|s| &s.station));
        let requests = stations.map(|s| s.books.requests).sum();
        Outcome {
            seed: self.scenario.seed,
            makespan_s: self.makespan as f64 / 1e9,
            fairness: jain(&mean_bandwidths),
            applications,
            layers: self.layers(end),
            operations: self.totals.operations,
            failed: self.totals.failed,
            requests,
            events: self.totals.events,
            series: self.series(end),
            picture: self.picture.into_kept(),
            faults: self.fault_log,
            violations,
        }
    }

    fn application(&self, number: usize) -> ApplicationOutcome {
        let a = &self.applications[number];
        let model = &self.scenario.application[a.index];
        let processes = &self.processes[a.first_process as usize..(a.first_process + a.processes) as usize];
        let times = || processes.iter().map(|p| p.finished.saturating_sub(a.start) as f64 / 1e9);
        let count = f64::from(a.processes);
        let mean = times().sum::<f64>() / count;
        let variance = times().map(|t| (t - mean) * (t - mean)).sum::<f64>() / count;
        let time_s = a.end.saturating_sub(a.start) as f64 / 1e9;
        let overall = a.bytes as f64 / time_s.max(1e-12);
        let name = if model.name.is_empty() { format!("application {}", a.index) } else { model.name.clone() };
        let copy = number - self.applications.partition_point(|other| other.index < a.index);
        ApplicationOutcome {
            name: if model.copies > 1 { format!("{name} {copy}") } else { name },
            time_s,
            task_mean_s: mean,
            task_variance_s2: variance,
            bytes: a.bytes,
            latency_mean_ms: a.latency_ns.mean() / 1e6,
            latency_p99_ms: a.latency_ns.quantile(0.99) as f64 / 1e6,
            latency_max_ms: a.latency_ns.max() as f64 / 1e6,
            least_throughput: self.recorder.least(number, a.start, a.end).unwrap_or(overall),
            failed: a.failed,
        }
    }

    fn layers(&mut self, end: u64) -> Layers {
        let t = &self.totals;
        let servers = self.servers.len() as f64;
        let over_time = |integral: f64| integral / (end as f64 * servers);
        self.first_gaps.sort_unstable();
        let median = match self.first_gaps.as_slice() {
            [] => 0,
            gaps => (gaps[(gaps.len() - 1) / 2] + gaps[gaps.len() / 2]) / 2,
        };
        let wait_max = self.servers.iter().map(|s| s.station.wait_max).max().unwrap_or(0);
        Layers {
            clients: t.clients,
            io_nodes: t.io_nodes,
            servers: t.servers,
            batches: t.batches,
            device: t.device,
            offset_distance_bytes: t.distance.mean(),
            device_distance_bytes: t.device_distance.mean(),
            first_arrival_gap_us: median as f64 / 1e3,
            server_concurrency: over_time(self.recorder.outstanding.total()),
            device_busy: over_time(t.busy_ns).min(1.0),
            access_mean_ms: t.device_ns / t.device.requests.max(1) as f64 / 1e6,
            cache_hit: t.hit_bytes as f64 / t.read_bytes.max(1) as f64,
            wait_max_ms: wait_max as f64 / 1e6,
        }
    }

    fn series(&self, end: u64) -> Series {
        let r = &self.recorder;
        let interval_ns = r.interval_ns();
        let count = (end.div_ceil(interval_ns) as usize).clamp(1, INTERVALS_MAX);
        let mean = |gauge: &crate::measure::Gauge, divisor: f64| {
            let at = |i: usize| gauge.integral.values.get(i).copied().unwrap_or(0.0);
            (0..count).map(|i| at(i) / (interval_ns as f64 * divisor)).collect()
        };
        let mut bandwidth: Vec<Vec<u64>> = Vec::new();
        for number in 0..self.applications.len() {
            if number < SERIES_MAX {
                bandwidth.push(vec![0; count]);
            }
            let Some(row) = bandwidth.last_mut() else { break };
            for (sum, bytes) in row.iter_mut().zip(r.bytes(number)) {
                *sum += bytes;
            }
        }
        Series {
            interval_s: interval_ns as f64 / 1e9,
            bandwidth,
            io_queue: mean(&r.io_queue, 1.0),
            server_queue: mean(&r.server_queue, 1.0),
            server_concurrency: mean(&r.peers, self.servers.len() as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::jain;

    #[test]
    fn fairness_goes_from_one_over_n_to_one() {
        assert_eq!(jain(&[3.0, 3.0]), 1.0);
        assert_eq!(jain(&[3.0, 0.0, 0.0, 0.0]), 0.25);
        assert_eq!(jain(&[0.0]), 1.0);
    }
}
