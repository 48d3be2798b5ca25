//! Summarises the repetitions of a point: means with their 95 % intervals.

use impresario_sim::outcome::{Flow, Outcome};
use serde::Serialize;

use super::Run;
use crate::stats::{Interval, mean};

/// The repetitions of one point in figures.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    /// Time until the last process was done, s.
    pub makespan_s: Interval,
    /// Mean time of a process, s, over all applications.
    pub task_mean_s: Interval,
    /// Variance of the times of an application's processes, s², mean over the applications.
    pub task_variance_s2: Interval,
    /// Bytes of all applications over the makespan, a second.
    pub bandwidth: Interval,
    /// Mean sizes of requests, bytes: those that left the clients, those that left the I/O nodes (0 without any), those
    /// that arrived at data servers, batches of their policies, accesses of the devices.
    pub sizes: [f64; 5],
    /// Jain's index over the applications' bandwidths.
    pub fairness: f64,
    /// The least throughput of any application in any part of its time, bytes a second; mean over the repetitions.
    pub least_throughput: f64,
    /// Time together over time alone, mean over the applications, if requested.
    pub interference: Option<Interval>,
    /// Distance between the offsets of consecutive requests that left the I/O nodes (or clients), bytes.
    pub offset_distance_bytes: f64,
    /// Requests outstanding at a data server.
    pub server_concurrency: f64,
    /// Operations that failed, all repetitions.
    pub failed: u64,
    /// Violations of the laws, all repetitions.
    pub violations: usize,
}

/// Names of [`Summary::sizes`].
pub const LAYERS: [&str; 5] = ["client req", "I/O node req", "server req", "batch", "access"];

impl Summary {
    /// Of some runs; all zero when there are none.
    pub fn of(runs: &[Run]) -> Summary {
        let over = |f: &dyn Fn(&Outcome) -> f64| runs.iter().map(|r| f(&r.outcome)).collect::<Vec<f64>>();
        let applications = |f: fn(&impresario_sim::outcome::ApplicationOutcome) -> f64| {
            over(&|o| mean(&o.applications.iter().map(f).collect::<Vec<_>>()))
        };
        let size = |f: fn(&Outcome) -> Flow| mean(&over(&|o| f(o).mean_bytes()));
        let bytes = |o: &Outcome| o.applications.iter().map(|a| a.bytes).sum::<u64>() as f64;
        let least = |o: &Outcome| o.applications.iter().map(|a| a.least_throughput).fold(f64::INFINITY, f64::min);
        let factors: Vec<f64> = runs.iter().filter_map(interference).collect();
        Summary {
            makespan_s: Interval::of(&over(&|o| o.makespan_s)),
            task_mean_s: Interval::of(&applications(|a| a.task_mean_s)),
            task_variance_s2: Interval::of(&applications(|a| a.task_variance_s2)),
            bandwidth: Interval::of(&over(&|o| if o.makespan_s > 0.0 { bytes(o) / o.makespan_s } else { 0.0 })),
            sizes: [
                size(|o| o.layers.clients),
                size(|o| o.layers.io_nodes),
                size(|o| o.layers.servers),
                size(|o| o.layers.batches),
                size(|o| o.layers.device),
            ],
            fairness: mean(&over(&|o| o.fairness)),
            least_throughput: mean(&over(&|o| Some(least(o)).filter(|l| l.is_finite()).unwrap_or(0.0))),
            interference: (!factors.is_empty()).then(|| Interval::of(&factors)),
            offset_distance_bytes: mean(&over(&|o| o.layers.offset_distance_bytes)),
            server_concurrency: mean(&over(&|o| o.layers.server_concurrency)),
            failed: runs.iter().map(|r| r.outcome.failed).sum(),
            violations: runs.iter().map(|r| r.outcome.violations.len()).sum(),
        }
    }
}

/// The mean interference factor of a run: an application's time over its time alone.
pub fn interference(run: &Run) -> Option<f64> {
    let factors: Vec<f64> =
        run.outcome.applications.iter().zip(&run.alone_s).map(|(a, alone)| a.time_s / alone).collect();
    let good: Vec<f64> = factors.into_iter().filter(|f| f.is_finite()).collect();
    (!good.is_empty()).then(|| mean(&good))
}
