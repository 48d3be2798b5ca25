//! How a file is read: its regions and what goes on in each, strides, streams, jumps back, reuse, phases.

use std::ops::Range;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::detector::Detector;
use crate::pages;
use crate::run::Run;

/// Regions are found on a grid of this many cells.
const CELLS: u64 = 64;
/// Regions and phases in a description, at most.
const REGIONS_MAX: usize = 16;
/// Gaps up to here are jumped over within one stream, bytes.
const GAP_BYTES: u64 = 4 << 20;

/// What goes on in a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Each read begins where one before ended.
    Sequential,
    /// Reads go forward, with gaps.
    Forward,
    /// Reads go anywhere.
    Random,
}

impl Kind {
    /// As a sentence needs it.
    pub const fn words(self) -> &'static str {
        match self {
            Kind::Sequential => "in order",
            Kind::Forward => "forward with gaps",
            Kind::Random => "in no order",
        }
    }
}

/// A part of a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Part {
    /// Its bytes.
    pub bytes: Range<u64>,
    /// What goes on there.
    pub kind: Kind,
    /// Reads that begin there.
    pub reads: u64,
    /// Bytes that are read there, each counted once.
    pub unique_bytes: u64,
}

/// A time in which one region is read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Phase {
    /// Of which region, by its number.
    pub part: usize,
    /// From when, since the run's first read, ns.
    pub from_ns: u64,
    /// Reads.
    pub reads: u64,
}

/// How one file is read.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Pattern {
    /// Reads.
    pub reads: u64,
    /// Bytes they read.
    pub bytes: u64,
    /// Bytes they read, each counted once, in whole pages.
    pub unique_bytes: u64,
    /// The file's size as far as it is known, bytes.
    pub size_bytes: u64,
    /// Processes that read it.
    pub processes: u64,
    /// The middle read's length, bytes.
    pub read_bytes_median: u64,
    /// The most frequent distance between the beginnings of reads of one stream, and its share (0 to 1), when it is
    /// more than half.
    pub stride: Option<(i64, f64)>,
    /// The share of reads that begin where the stream's read before ended.
    pub sequential: f64,
    /// Reads that begin before the stream's read before.
    pub backward: u64,
    /// How far behind the foremost read of its stream 19 of 20 backward reads begin, bytes.
    pub back_bytes: u64,
    /// Places at which one thread reads in turn, at most.
    pub streams: u64,
    /// Times that a thread begins again at the front.
    pub passes: u64,
    /// Where what goes on, in order of the bytes.
    pub parts: Vec<Part>,
    /// Which part is read when.
    pub phases: Vec<Phase>,
}

/// Where one stream is.
#[derive(Clone, Copy, Default)]
struct Stream {
    begin: u64,
    end: u64,
    foremost: u64,
    known: bool,
}

#[derive(Clone, Copy, Default)]
struct Cell {
    reads: u64,
    steps: u64,
    sequential: u64,
    forward: u64,
    first: u64,
    end: u64,
}

impl Pattern {
    /// Of one file of a run.
    pub fn of(run: &Run, file: usize) -> Pattern {
        let size = run.sizes.get(file).copied().unwrap_or(0).max(1);
        let cell_bytes = size.div_ceil(CELLS).max(1);
        let mut cells = vec![Cell::default(); CELLS as usize];
        let mut pattern = Pattern { size_bytes: size, passes: 1, streams: 1, ..Pattern::default() };
        let mut lengths = Vec::new();
        let mut strides: FxHashMap<i64, u64> = FxHashMap::default();
        let mut backs = Vec::new();
        let (mut steps, mut sequential) = (0u64, 0u64);
        let mut processes = Vec::new();
        let mut order: Vec<(u64, u64)> = Vec::new();
        for thread in &run.threads {
            let mut detector = Detector::default();
            let mut streams: Vec<Stream> = Vec::new();
            let mut passes = 1;
            for access in thread.reads.iter().filter(|a| a.file == file) {
                if processes.last() != Some(&thread.reader.process) {
                    processes.push(thread.reader.process);
                }
                let bytes = &access.bytes;
                lengths.push(bytes.end - bytes.start);
                order.push((access.arrival_ns, bytes.start));
                let seen = detector.observe(bytes, GAP_BYTES);
                let (number, fresh) = (seen.stream, seen.fresh);
                if streams.len() <= number {
                    streams.resize(number + 1, Stream::default());
                }
                let first = streams.iter().all(|s| !s.known);
                let stream = &mut streams[number];
                if fresh {
                    *stream = Stream::default();
                }
                let cell = &mut cells[((bytes.start / cell_bytes) as usize).min(CELLS as usize - 1)];
                if cell.reads == 0 || bytes.start < cell.first {
                    cell.first = bytes.start;
                }
                cell.end = cell.end.max(bytes.end);
                cell.reads += 1;
                // A read that begins a stream, where others were, follows nothing: a step to anywhere.
                cell.steps += u64::from(!first);
                if stream.known {
                    steps += 1;
                    let goes_on = bytes.start == stream.end;
                    sequential += u64::from(goes_on);
                    cell.sequential += u64::from(goes_on);
                    if bytes.start < stream.begin {
                        backs.push(stream.foremost.saturating_sub(bytes.start));
                        if bytes.start < size / 10 && stream.begin > size / 10 * 9 {
                            passes += 1;
                            stream.foremost = 0;
                        }
                    } else {
                        cell.forward += 1;
                    }
                    if strides.len() < 1 << 16 {
                        *strides.entry(bytes.start.wrapping_sub(stream.begin) as i64).or_default() += 1;
                    }
                } else if fresh && bytes.start < size / 10 && streams.len() > 1 {
                    // A second stream at the front, after everything was read, is a second pass.
                    let done = streams.iter().any(|s| s.foremost > size / 10 * 9);
                    passes += u64::from(done);
                }
                let stream = &mut streams[number];
                *stream = Stream {
                    begin: bytes.start,
                    end: bytes.end,
                    foremost: stream.foremost.max(bytes.end),
                    known: true,
                };
            }
            let live = streams.iter().filter(|s| s.known).count() as u64;
            pattern.streams = pattern.streams.max(live);
            pattern.passes = pattern.passes.max(passes);
        }
        pattern.reads = lengths.len() as u64;
        pattern.bytes = lengths.iter().sum();
        processes.sort_unstable();
        processes.dedup();
        pattern.processes = processes.len() as u64;
        lengths.sort_unstable();
        pattern.read_bytes_median = lengths.get(lengths.len() / 2).copied().unwrap_or(0);
        pattern.sequential = if steps == 0 { 0.0 } else { sequential as f64 / steps as f64 };
        let common = strides.into_iter().max_by_key(|(stride, n)| (*n, *stride));
        pattern.stride =
            common.map(|(stride, n)| (stride, n as f64 / steps.max(1) as f64)).filter(|(_, share)| *share > 0.5);
        pattern.backward = backs.len() as u64;
        backs.sort_unstable();
        pattern.back_bytes = backs.get(backs.len() * 19 / 20).copied().unwrap_or(0);
        pattern.parts = parts(&cells, run, file);
        pattern.unique_bytes = pattern.parts.iter().map(|p| p.unique_bytes).sum();
        pattern.phases = phases(&pattern.parts, order);
        pattern
    }

    /// Bytes read for each byte that is read at all, at least 1.
    pub fn reuse(&self) -> f64 {
        (self.bytes as f64 / self.unique_bytes.max(1) as f64).max(1.0)
    }

    /// The kind that most reads are of.
    pub fn kind(&self) -> Kind {
        let mut by: FxHashMap<Kind, u64> = FxHashMap::default();
        self.parts.iter().for_each(|p| *by.entry(p.kind).or_default() += p.reads);
        let of = |k| by.get(&k).copied().unwrap_or(0);
        [Kind::Sequential, Kind::Forward, Kind::Random].into_iter().max_by_key(|k| of(*k)).unwrap_or(Kind::Random)
    }
}

/// Neighbouring cells of one kind together.
fn parts(cells: &[Cell], run: &Run, file: usize) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for cell in cells.iter().filter(|c| c.reads > 0) {
        let share = |n: u64| if cell.steps == 0 { 1.0 } else { n as f64 / cell.steps as f64 };
        let kind = match () {
            () if share(cell.sequential) >= 0.9 => Kind::Sequential,
            () if share(cell.forward) >= 0.8 => Kind::Forward,
            () => Kind::Random,
        };
        match parts.last_mut() {
            Some(last) if last.kind == kind && cell.first <= last.bytes.end.saturating_add(16 * GAP_BYTES) => {
                last.bytes.end = last.bytes.end.max(cell.end);
                last.reads += cell.reads;
            }
            last => {
                // A read that reaches into the next cell belongs to where it begins.
                let from = last.map_or(cell.first, |l| {
                    l.bytes.end = l.bytes.end.min(cell.first.max(l.bytes.start + 1));
                    cell.first.max(l.bytes.end)
                });
                parts.push(Part { bytes: from..cell.end.max(from + 1), kind, reads: cell.reads, unique_bytes: 0 });
            }
        }
    }
    // Few, by giving up the smallest.
    while parts.len() > REGIONS_MAX {
        let Some(small) = (1..parts.len()).min_by_key(|i| parts[*i].reads) else { break };
        let gone = parts.remove(small);
        let into = &mut parts[small - 1];
        into.bytes.end = gone.bytes.end;
        if gone.reads > into.reads {
            into.kind = gone.kind;
        }
        into.reads += gone.reads;
    }
    let mut ranges: Vec<Range<u64>> =
        run.threads.iter().flat_map(|t| &t.reads).filter(|a| a.file == file).map(|a| pages(&a.bytes)).collect();
    ranges.sort_by_key(|r| r.start);
    let mut at = 0;
    for range in ranges {
        let new = range.start.max(at)..range.end.max(at);
        at = at.max(range.end);
        let part = parts.partition_point(|p| p.bytes.end <= new.start).min(parts.len().saturating_sub(1));
        if let Some(part) = parts.get_mut(part) {
            part.unique_bytes += new.end - new.start;
        }
    }
    parts
}

/// Which part is read when: changes that last for 16 reads at least.
fn phases(parts: &[Part], mut order: Vec<(u64, u64)>) -> Vec<Phase> {
    const LASTS: u64 = 16;
    order.sort_unstable();
    let mut phases: Vec<Phase> = Vec::new();
    for (from_ns, at) in order {
        let part = parts.partition_point(|p| p.bytes.end <= at).min(parts.len().saturating_sub(1));
        match phases.last_mut() {
            Some(last) if last.part == part => last.reads += 1,
            _ => {
                // A short one was no phase.
                if phases.last().is_some_and(|l| l.reads < LASTS)
                    && let Some(short) = phases.pop()
                {
                    match phases.last_mut() {
                        Some(before) if before.part == part => {
                            before.reads += short.reads + 1;
                            continue;
                        }
                        Some(before) => before.reads += short.reads,
                        None => {}
                    }
                }
                phases.push(Phase { part, from_ns, reads: 1 });
            }
        }
    }
    phases.truncate(REGIONS_MAX);
    phases
}
