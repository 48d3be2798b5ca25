//! Combines several traces: the mean of several runs of one program, or traces of several servers or nodes.

use impresario_base::statistics::{mean, median};
use impresario_sched::{FileId, LaneId, Nanos};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::{Builder, Header, Record, Space, Trace, TraceOp};

/// The mean of several traces, and how much they agree.
#[derive(Debug)]
pub struct Average {
    /// Requests of most of the traces, with mean arrivals and durations; times begin at 0.
    pub trace: Trace,
    /// Requests in a minority of the traces, which are left out.
    pub dropped: u64,
    /// The median over the requests of the standard deviation of their arrival, relative to the mean arrival.
    pub deviation_median: f64,
}

/// Identifies a request across runs: process numbers and times differ.
#[derive(PartialEq, Eq, Hash)]
struct Same {
    path: Vec<u8>,
    op: TraceOp,
    /// Where offsets are those in what a server holds of a file: they say nothing without the server.
    lane: Option<LaneId>,
    offset: u64,
    len: u64,
    /// Its index among requests with the same file, operation, server, offset and length.
    nth: u32,
}

/// One request over all traces.
struct Seen {
    /// From the first trace that has it.
    record: Record,
    trace: usize,
    arrivals_ns: Vec<f64>,
    durations_ns: Vec<f64>,
}

/// The mean of traces of several runs of one program (agios-2013, IV.A): each request's arrival, relative to the
/// trace's first, and duration are arithmetic means over the traces that have it. Requests in at most half of the
/// traces are left out. The origin comes from the first trace that has the request.
pub fn average(traces: &[Trace]) -> Result<Average, String> {
    average_among(traces, |_| traces.len())
}

/// The same of runs of several programs: requests in at most half of the traces with their file are left out.
pub fn average_by_file(traces: &[Trace]) -> Result<Average, String> {
    let mut holders: FxHashMap<Vec<u8>, usize> = FxHashMap::default();
    for trace in traces {
        let files: FxHashSet<FileId> = trace.records.iter().map(|r| r.file).collect();
        let names: FxHashSet<Vec<u8>> = files.into_iter().map(|file| name(trace, file)).collect();
        names.into_iter().for_each(|name| *holders.entry(name).or_default() += 1);
    }
    average_among(traces, |file| holders.get(file).copied().unwrap_or_default())
}

/// `among`: the traces that could have requests of a file of this name.
fn average_among(traces: &[Trace], among: impl Fn(&[u8]) -> usize) -> Result<Average, String> {
    let Some(first) = traces.first() else { return Err("there is no trace to take the mean of".into()) };
    have_common_offsets(traces)?;
    let mut seen: FxHashMap<Same, Seen> = FxHashMap::default();
    for (number, trace) in traces.iter().enumerate() {
        let start = trace.records.first().map_or(0, |r| r.arrival.0);
        let mut nth: FxHashMap<(FileId, TraceOp, Option<LaneId>, u64, u64), u32> = FxHashMap::default();
        for r in &trace.records {
            let lane = (trace.header.space == Space::Lane).then_some(r.lane);
            let count = nth.entry((r.file, r.op, lane, r.offset, r.len)).or_default();
            *count += 1;
            let path = name(trace, r.file);
            let same = Same { path, op: r.op, lane, offset: r.offset, len: r.len, nth: *count };
            let entry = seen.entry(same).or_insert_with(|| Seen {
                record: *r,
                trace: number,
                arrivals_ns: Vec::new(),
                durations_ns: Vec::new(),
            });
            entry.arrivals_ns.push(r.arrival.0.saturating_sub(start) as f64);
            entry.durations_ns.extend(r.duration.map(|d| d.0 as f64));
        }
    }
    let source = format!("mean of {} traces", traces.len());
    let mut builder = Builder::new(Header { clock_unix_ns: None, source, ..first.header.clone() });
    let (mut dropped, mut deviations) = (0, Vec::new());
    for (same, Seen { record, trace, arrivals_ns, durations_ns }) in seen {
        if arrivals_ns.len() * 2 <= among(&same.path) {
            dropped += 1;
            continue;
        }
        let arrival = mean(&arrivals_ns);
        if arrival > 0.0 {
            let variance = arrivals_ns.iter().map(|a| (a - arrival).powi(2)).sum::<f64>();
            deviations.push((variance / arrivals_ns.len() as f64).sqrt() / arrival);
        }
        let duration = (!durations_ns.is_empty()).then(|| Nanos(mean(&durations_ns) as u64));
        let record = Record { arrival: Nanos(arrival as u64), duration, ..record };
        add(&mut builder, &traces[trace], record)?;
    }
    Ok(Average { trace: builder.build(), dropped, deviation_median: median(&deviations) })
}

/// Joins traces that several servers or nodes recorded at the same time. Wall clocks relate their times, so each trace
/// must have its own.
pub fn join(traces: &[Trace]) -> Result<Trace, String> {
    let Some(first) = traces.first() else { return Err("there is no trace to join".into()) };
    have_common_offsets(traces)?;
    let clocks: Option<Vec<u64>> = traces.iter().map(|t| t.header.clock_unix_ns).collect();
    let Some(clocks) = clocks else {
        return Err(
            "a trace does not know its wall clock, so times do not belong together; take the mean instead".into()
        );
    };
    let zero = clocks.iter().min().copied().unwrap_or(0);
    let source = format!("{} traces joined", traces.len());
    let header = Header { clock_unix_ns: Some(zero), host: String::new(), source, ..first.header.clone() };
    let mut builder = Builder::new(header);
    for (trace, clock) in traces.iter().zip(clocks) {
        for r in &trace.records {
            let arrival = Nanos(r.arrival.0.saturating_add(clock - zero));
            add(&mut builder, trace, Record { arrival, ..*r })?;
        }
    }
    Ok(builder.build())
}

fn have_common_offsets(traces: &[Trace]) -> Result<(), String> {
    if traces.windows(2).any(|pair| pair[0].header.space != pair[1].header.space) {
        return Err("some traces tell offsets in files and others in what servers hold of them; they have no common \
                    offsets"
            .into());
    }
    Ok(())
}

/// Adds a record of a trace with its file and origin there.
fn add(builder: &mut Builder, trace: &Trace, record: Record) -> Result<(), String> {
    let file = builder.file(trace.file(record.file).clone())?;
    let mut origin = trace.origin(record.origin).clone();
    if origin.host.is_empty() {
        origin.host = trace.header.host.clone();
    }
    let origin = builder.origin(origin)?;
    builder.push(Record { file, origin, ..record })
}

/// The name of a file in every run.
fn name(trace: &Trace, id: FileId) -> Vec<u8> {
    let file = trace.file(id);
    if file.path.is_empty() { file.key.to_le_bytes().to_vec() } else { file.path.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{read_at, varied};
    use crate::{Origin, OriginId};

    fn run(arrivals: &[(u64, u64)], shift: u64, process: u32) -> Trace {
        let mut builder = Builder::new(Header { clock_unix_ns: Some(shift), ..Header::default() });
        builder.path(b"/f").unwrap();
        builder.origin(Origin { process, ..Origin::default() }).unwrap();
        for (offset, at) in arrivals {
            builder.push(read_at(0, *offset, 100, shift + at, Some(at + 10))).unwrap();
        }
        builder.build()
    }

    #[test]
    fn the_mean_of_runs() {
        let runs = [
            run(&[(0, 0), (100, 1000), (0, 2000), (7, 2500)], 5_000, 1),
            run(&[(0, 0), (100, 2000), (0, 3000)], 9_000, 2),
            run(&[(0, 0), (100, 3000), (0, 4000)], 1_000, 3),
        ];
        let mean = average(&runs).unwrap();
        let told: Vec<_> = mean.trace.records.iter().map(|r| (r.offset, r.arrival.0, r.duration.unwrap().0)).collect();
        assert_eq!(told, vec![(0, 0, 10), (100, 2000, 2010), (0, 3000, 3010)]);
        assert_eq!(mean.dropped, 1, "offset 7 is in one of three");
        // Two requests deviate, so the median is the mean of both.
        let deviation = (2.0f64 / 3.0).sqrt() * 1000.0;
        assert!((mean.deviation_median - (deviation / 2000.0 + deviation / 3000.0) / 2.0).abs() < 1e-9);
        assert_eq!(average(&[]).unwrap_err(), "there is no trace to take the mean of");
    }

    /// Two servers hold the same offset of their parts of a file, and answer in another order in the second run. Where offsets are
    /// those of the file, one request may go to another server in each run.
    #[test]
    fn the_mean_keeps_servers_apart_where_offsets_are_theirs() {
        let run = |space, order: &[u16]| {
            let mut builder = Builder::new(Header { space, ..Header::default() });
            builder.path(b"/f").unwrap();
            builder.origin(Origin::default()).unwrap();
            for (&lane, at) in order.iter().zip([0, 1000]) {
                builder.push(Record { lane: LaneId(lane), ..read_at(0, 0, 100, at, Some(10)) }).unwrap();
            }
            builder.build()
        };
        let mean = average(&[run(Space::Lane, &[0, 1]), run(Space::Lane, &[1, 0])]).unwrap();
        let mut told: Vec<_> = mean.trace.records.iter().map(|r| (r.lane.0, r.arrival.0)).collect();
        told.sort_unstable();
        assert_eq!(told, [(0, 500), (1, 500)]);
        let mean = average(&[run(Space::File, &[0]), run(Space::File, &[1])]).unwrap();
        assert_eq!((mean.trace.records.len(), mean.dropped), (1, 0));
        let of_each = [run(Space::Lane, &[0]), run(Space::File, &[0])];
        assert!(average(&of_each).unwrap_err().contains("no common offsets"));
    }

    #[test]
    fn the_mean_of_one_run_is_the_run() {
        let trace = varied();
        let mean = average(std::slice::from_ref(&trace)).unwrap();
        assert_eq!(mean.trace.records.len(), trace.records.len());
        for (a, b) in mean.trace.records.iter().zip(&trace.records) {
            assert_eq!((a.arrival, a.duration, a.offset, a.len), (b.arrival, b.duration, b.offset, b.len));
            assert_eq!(mean.trace.file(a.file), trace.file(b.file));
            assert_eq!(mean.trace.origin(a.origin), trace.origin(b.origin));
        }
    }

    #[test]
    fn traces_of_several_nodes_are_joined_by_their_clocks() {
        let joined = join(&[run(&[(0, 0), (1, 5_000)], 0, 1), run(&[(2, 0)], 1_000, 2)]).unwrap();
        // The second one's times begin at its shift, and its clock is 1 µs later.
        let told: Vec<_> = joined.records.iter().map(|r| (r.offset, r.arrival.0, r.origin)).collect();
        assert_eq!(told, vec![(0, 0, OriginId(0)), (2, 2_000, OriginId(1)), (1, 5_000, OriginId(0))]);
        let mut blind = run(&[(0, 0)], 0, 1);
        blind.header.clock_unix_ns = None;
        assert!(join(&[blind, run(&[(0, 0)], 0, 1)]).unwrap_err().contains("wall clock"));
    }
}
