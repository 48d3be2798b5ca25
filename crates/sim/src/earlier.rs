//! Earlier runs of a scenario: the data servers' policies get them as traces, as on a real server.
//!
//! An earlier run is the same scenario with other delays: the same files in the same places, the same policy without
//! predictions. The traces of several runs are averaged per server.

use std::sync::Arc;

use impresario_base::random::mix;
use impresario_foresight::PredictedQueues;
use impresario_sched::{Ended, Nanos};
use impresario_trace::predict::{mean_of, predicted_queues_by};
use impresario_trace::{Builder, FileInfo, Header, Origin, Outcome, Record, Trace};

use crate::model::{Scenario, Servers};
use crate::simulation::{Budget, SimError, Simulation};

/// The prediction from earlier runs for each data server; empty without earlier runs.
pub(crate) fn foretold(scenario: &Scenario) -> Result<Vec<Arc<PredictedQueues>>, SimError> {
    let runs = scenario.servers.earlier_runs;
    let mut traces: Vec<Vec<Trace>> = vec![Vec::new(); usize::from(scenario.servers.count)];
    let servers = Servers { earlier_runs: 0, ..scenario.servers.clone() };
    let alone = Scenario { servers, ..scenario.clone() };
    for run in 0..runs {
        let mut simulation = Simulation::new(&alone)?.recording(mix(scenario.seed ^ u64::from(run + 1)));
        while !simulation.step_until(Budget::Events(u64::MAX)).done {}
        for (traces, ended) in traces.iter_mut().zip(simulation.recorded()) {
            traces.push(trace(&ended));
        }
    }
    // Runs of one scenario can be averaged; without runs there is nothing to do.
    let of_server = |runs: Vec<Trace>| {
        mean_of(runs).map_or_else(|_| Arc::default(), |mean| Arc::new(predicted_queues_by(&mean, |file| file.key - 1)))
    };
    Ok(if runs == 0 { Vec::new() } else { traces.into_iter().map(of_server).collect() })
}

/// A trace as a server's recorder writes it. The simulator numbers files from 0, but key 0 means no file.
fn trace(ended: &[Ended]) -> Trace {
    let mut builder = Builder::new(Header::default());
    // A simulated run is within the limits of a trace; anything beyond is left out.
    for e in ended.iter().filter(|e| e.op.is_data()) {
        let Ok(file) = builder.file(FileInfo { key: e.file + 1, ..FileInfo::default() }) else { continue };
        let Ok(origin) = builder.origin(Origin { process: e.client as u32, ..Origin::default() }) else { continue };
        let _ = builder.push(Record {
            op: e.op.into(),
            file,
            origin,
            lane: e.lane,
            offset: e.offset,
            len: e.len,
            arrival: e.arrival,
            duration: Some(Nanos(e.finished.since(e.arrival).0)),
            outcome: Outcome::Whole,
        });
    }
    builder.build()
}
