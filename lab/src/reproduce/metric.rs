//! The metrics of a run that claims and plots use, by name.

use serde::Deserialize;

use super::campaign::Run;

/// A figure of one run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum Metric {
    /// `makespan`: time until the last process was done, s.
    #[default]
    Makespan,
    /// `task mean`: mean time of a task, s.
    TaskMean,
    /// `task variance`: variance of the tasks' times, s².
    TaskVariance,
    /// `time N`: time of application N, from 0, s.
    Time(usize),
    /// `interference N`: time of application N by its time alone.
    Interference(usize),
    /// `client bytes`: mean size of requests that leave clients.
    ClientBytes,
    /// `io node bytes`: mean size of requests that leave I/O nodes.
    IoNodeBytes,
    /// `server bytes`: mean size of requests that arrive at data servers.
    ServerBytes,
    /// `batch bytes`: mean size of the batches of data servers.
    BatchBytes,
    /// `offset distance`: mean distance between consecutive requests that leave an I/O node, bytes.
    OffsetDistance,
    /// `first arrival gap`: median time between the first requests of processes at an I/O node, µs.
    FirstArrivalGap,
}

impl Metric {
    /// Its value in a run.
    pub fn of(self, run: &Run) -> f64 {
        let layers = &run.outcome.layers;
        match self {
            Metric::Makespan => run.makespan_s(),
            Metric::TaskMean => run.task_mean_s(),
            Metric::TaskVariance => run.task_variance_s2(),
            Metric::Time(a) => run.time_s(a),
            Metric::Interference(a) => run.alone_s.get(a).map_or(f64::NAN, |alone| run.time_s(a) / alone),
            Metric::ClientBytes => layers.clients.mean_bytes(),
            Metric::IoNodeBytes => layers.io_nodes.mean_bytes(),
            Metric::ServerBytes => layers.servers.mean_bytes(),
            Metric::BatchBytes => layers.batches.mean_bytes(),
            Metric::OffsetDistance => layers.offset_distance_bytes,
            Metric::FirstArrivalGap => layers.first_arrival_gap_us,
        }
    }

    /// Whether it is a time, s.
    pub fn is_seconds(self) -> bool {
        matches!(self, Metric::Makespan | Metric::TaskMean | Metric::Time(_))
    }
}

impl TryFrom<String> for Metric {
    type Error = String;

    fn try_from(name: String) -> Result<Metric, String> {
        let numbered = |word: &str| name.strip_prefix(word)?.trim().parse().ok();
        Ok(match name.as_str() {
            "makespan" => Metric::Makespan,
            "task mean" => Metric::TaskMean,
            "task variance" => Metric::TaskVariance,
            "client bytes" => Metric::ClientBytes,
            "io node bytes" => Metric::IoNodeBytes,
            "server bytes" => Metric::ServerBytes,
            "batch bytes" => Metric::BatchBytes,
            "offset distance" => Metric::OffsetDistance,
            "first arrival gap" => Metric::FirstArrivalGap,
            _ => match (numbered("time "), numbered("interference ")) {
                (Some(application), _) => Metric::Time(application),
                (_, Some(application)) => Metric::Interference(application),
                _ => return Err(format!("there is no metric {name}")),
            },
        })
    }
}
