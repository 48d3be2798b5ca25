//! The result of a reproduction: claims with their verdicts, and a row of measurements for every cell.

use serde::{Deserialize, Serialize};

use super::agreement::{Agreement, Evidence, Says, judge};
use super::campaign::{Campaign, Effort, Run};
use super::claim::{Claim, Evaluator, Ours, Table};
use super::figure::Figure;
use impresario_base::statistics::{Interval, mean};

/// A judged claim.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ClaimRow {
    /// Its name.
    pub id: String,
    /// The paper's statement.
    pub text: String,
    /// The paper's figure.
    pub says: Says,
    /// Ours; `None` if there is nothing to compare.
    pub ours: Option<Interval>,
    /// The case, or absolute figures behind a ratio.
    pub note: String,
    /// The verdict.
    pub verdict: Agreement,
    /// The reason, if the interval alone does not give it.
    pub reason: String,
}

/// The measurements of a cell, means over the repetitions.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CellRow {
    /// The cell.
    pub key: String,
    /// Makespan, s.
    pub makespan_s: Interval,
    /// Mean time of a task, s.
    pub task_mean_s: f64,
    /// Variance of the tasks' times, s².
    pub task_variance_s2: f64,
    /// Mean interference factor; `None` for an application alone.
    pub interference: Option<f64>,
    /// Least instantaneous throughput of any application, bytes a second.
    pub least_throughput: f64,
    /// Jain's index over applications.
    pub fairness: f64,
    /// Inside the simulation.
    pub inside: Inside,
}

/// What the layers did, means over the repetitions: the basis of explanations.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Inside {
    /// Mean size of requests that left clients, bytes.
    pub client_bytes: f64,
    /// … that left I/O nodes.
    pub io_node_bytes: f64,
    /// … that arrived at servers.
    pub server_bytes: f64,
    /// … of the batches of servers' policies.
    pub batch_bytes: f64,
    /// … of accesses of devices.
    pub access_bytes: f64,
    /// Accesses of devices.
    pub accesses: f64,
    /// Mean time of one, ms.
    pub access_ms: f64,
    /// Fraction of the makespan in which devices were busy.
    pub busy: f64,
    /// Requests outstanding at data servers.
    pub concurrency: f64,
    /// Distance between consecutive accesses of a device, bytes.
    pub device_distance_bytes: f64,
    /// Distance between consecutive requests that left I/O nodes (or clients), bytes.
    pub offset_distance_bytes: f64,
    /// Fraction of the bytes read that were in the servers' caches.
    pub cache_hit: f64,
    /// Longest wait for dispatch at a server, ms.
    pub wait_max_ms: f64,
}

/// A figure with everything about it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FigureReport {
    /// Its name.
    pub id: String,
    /// The paper.
    pub paper: String,
    /// For people.
    pub title: String,
    /// Assumptions where the paper is silent.
    pub assumptions: Vec<String>,
    /// Runs of each cell.
    pub repetitions: u32,
    /// Of the intervals.
    pub confidence: f64,
    /// Judged claims.
    pub claims: Vec<ClaimRow>,
    /// Measures of all cells, by name.
    pub cells: Vec<CellRow>,
}

/// Everything that one command reproduced.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The volume was divided by this; 1: the papers'.
    pub divide: u64,
    /// Distinct simulations.
    pub simulations: usize,
    /// Requests of applications that they simulated.
    pub operations: u64,
    /// Figures in the order of the papers.
    pub figures: Vec<FigureReport>,
    /// Failed operations and violated laws; empty if there are none.
    pub complaints: Vec<String>,
}

impl Report {
    /// Judges what a campaign measured.
    pub fn of(figures: &[&Figure], campaign: &Campaign, effort: &Effort) -> Report {
        Report {
            divide: effort.divide.max(1),
            simulations: campaign.simulations,
            operations: campaign.operations,
            figures: figures.iter().map(|f| figure(f, campaign, effort)).collect(),
            complaints: campaign.complaints.clone(),
        }
    }

    /// How many claims have each verdict, omitting unused ones.
    pub fn counts(&self) -> Vec<(Agreement, usize)> {
        let claims = || self.figures.iter().flat_map(|f| &f.claims);
        Agreement::ALL
            .map(|v| (v, claims().filter(|c| c.verdict == v).count()))
            .into_iter()
            .filter(|(_, n)| *n > 0)
            .collect()
    }
}

fn figure(f: &Figure, campaign: &Campaign, effort: &Effort) -> FigureReport {
    let none = Default::default();
    let runs = campaign.figures.get(f.id).unwrap_or(&none);
    let evaluator = Evaluator { metadata: &f.metadata, table: Table { runs } };
    let confidence = f.metadata.confidence;
    FigureReport {
        id: f.id.into(),
        paper: f.paper.into(),
        title: f.base.title.clone(),
        assumptions: f.base.assumptions.clone(),
        repetitions: effort.repetitions.unwrap_or(f.metadata.repetitions),
        confidence,
        claims: f.metadata.claims.iter().map(|claim| judged(claim, &evaluator, confidence)).collect(),
        cells: runs.iter().map(|(key, runs)| cell(key, runs, confidence)).collect(),
    }
}

fn judged(claim: &Claim, evaluator: &Evaluator<'_>, confidence: f64) -> ClaimRow {
    let ours = evaluator.ours(&claim.ours);
    let finite = |o: &Ours| {
        Interval::with_confidence(&o.values.iter().copied().filter(|v| v.is_finite()).collect::<Vec<_>>(), confidence)
    };
    let evidence = Evidence {
        ours: ours.as_ref().map(finite),
        times: ours.as_ref().and_then(|o| o.times),
        paper_times: claim.times,
        identical: ours.as_ref().is_some_and(|o| o.identical),
        at_edge: ours.as_ref().is_some_and(|o| o.at_edge),
        inverted: evaluator.inverted(&claim.order, &claim.ours),
        untested: claim.untested.as_deref(),
    };
    let (verdict, reason) = judge(claim.paper, &evidence);
    ClaimRow {
        id: claim.id.clone(),
        text: claim.text.clone(),
        says: claim.paper,
        ours: evidence.ours,
        note: ours.map_or(String::new(), |o| o.note),
        verdict,
        reason,
    }
}

/// The row of a cell.
pub fn cell(key: &str, runs: &[Run], confidence: f64) -> CellRow {
    let of = |metric: &dyn Fn(&Run) -> f64| mean(&runs.iter().map(metric).collect::<Vec<_>>());
    let layers = |metric: fn(&impresario_sim::outcome::Layers) -> f64| of(&|r| metric(&r.outcome.layers));
    let alone: Vec<f64> = runs.iter().filter_map(Run::interference).collect();
    CellRow {
        key: key.into(),
        makespan_s: Interval::with_confidence(&runs.iter().map(Run::makespan_s).collect::<Vec<_>>(), confidence),
        task_mean_s: of(&Run::task_mean_s),
        task_variance_s2: of(&Run::task_variance_s2),
        interference: (!alone.is_empty()).then(|| mean(&alone)),
        least_throughput: of(&Run::least_throughput),
        fairness: of(&|r| r.outcome.fairness),
        inside: Inside {
            client_bytes: layers(|l| l.clients.mean_bytes()),
            io_node_bytes: layers(|l| l.io_nodes.mean_bytes()),
            server_bytes: layers(|l| l.servers.mean_bytes()),
            batch_bytes: layers(|l| l.batches.mean_bytes()),
            access_bytes: layers(|l| l.device.mean_bytes()),
            accesses: layers(|l| l.device.requests as f64),
            access_ms: layers(|l| l.access_mean_ms),
            busy: layers(|l| l.device_busy),
            concurrency: layers(|l| l.server_concurrency),
            device_distance_bytes: layers(|l| l.device_distance_bytes),
            offset_distance_bytes: layers(|l| l.offset_distance_bytes),
            cache_hit: layers(|l| l.cache_hit),
            wait_max_ms: layers(|l| l.wait_max_ms),
        },
    }
}
