//! The results for programs: a line for each application of each run.

use anyhow::Result;

use super::Results;
use super::summary::interference;

/// Columns of a run; those of the swept keys come before them.
const COLUMNS: [&str; 33] = [
    "repetition",
    "seed",
    "makespan_s",
    "fairness",
    "operations",
    "failed",
    "violations",
    "client_requests",
    "client_bytes",
    "io_node_requests",
    "io_node_bytes",
    "server_requests",
    "server_bytes",
    "batches",
    "batch_bytes",
    "device_accesses",
    "device_bytes",
    "offset_distance_bytes",
    "device_distance_bytes",
    "server_concurrency",
    "device_busy",
    "cache_hit",
    "wait_max_ms",
    "interference",
    "application",
    "name",
    "time_s",
    "task_mean_s",
    "task_variance_s2",
    "bytes",
    "latency_mean_ms",
    "latency_p99_ms",
    "least_throughput",
];

/// The text of a CSV file: a head, then a line for each application of each run.
pub fn text(results: &Results) -> Result<String> {
    let mut out = csv::Writer::from_writer(Vec::new());
    out.write_record(results.keys.iter().map(String::as_str).chain(COLUMNS))?;
    for point in &results.points {
        for run in &point.runs {
            let (o, l) = (&run.outcome, &run.outcome.layers);
            let mut first = point.values.clone();
            first.extend([run.repetition.to_string(), o.seed.to_string(), o.makespan_s.to_string()]);
            first.extend([o.fairness.to_string(), o.operations.to_string(), o.failed.to_string()]);
            first.push(o.violations.len().to_string());
            for flow in [l.clients, l.io_nodes, l.servers, l.batches, l.device] {
                first.extend([flow.requests.to_string(), flow.bytes.to_string()]);
            }
            let layer = [
                l.offset_distance_bytes,
                l.device_distance_bytes,
                l.server_concurrency,
                l.device_busy,
                l.cache_hit,
                l.wait_max_ms,
            ];
            first.extend(layer.iter().map(f64::to_string));
            first.push(interference(run).map_or(String::new(), |f| f.to_string()));
            for (i, a) in o.applications.iter().enumerate() {
                let mut record = first.clone();
                record.extend([i.to_string(), a.name.clone(), a.time_s.to_string(), a.task_mean_s.to_string()]);
                record.extend([a.task_variance_s2.to_string(), a.bytes.to_string(), a.latency_mean_ms.to_string()]);
                record.extend([a.latency_p99_ms.to_string(), a.least_throughput.to_string()]);
                out.write_record(record)?;
            }
        }
    }
    Ok(String::from_utf8(out.into_inner()?)?)
}
