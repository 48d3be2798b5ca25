//! Traces that scenarios name (own traces, Darshan DXT and other formats of the trace crate) as accesses to simulate.

use std::collections::BTreeMap;
use std::path::Path;

use impresario_sched::Op;
use impresario_sim::model::{Operation, TracedAccess};
use impresario_trace::Trace;
use impresario_trace::convert::{ImportOptions, import};

/// The accesses of a trace. Every thread of the trace becomes a process, in order of first appearance; the time between
/// the end of an access and the start of the thread's next one counts as computing. If completions are unknown, their
/// time counts as computing too. Opening, closing and failed accesses are left out.
pub fn accesses(trace: &Trace) -> Vec<TracedAccess> {
    let start = trace.records.iter().map(|r| r.arrival).min().unwrap_or_default();
    let mut processes = BTreeMap::new();
    let mut files = BTreeMap::new();
    let mut ends = Vec::new();
    let mut found = Vec::new();
    for record in &trace.records {
        let op = match record.op.scheduled() {
            Some(Op::Read) => Operation::Read,
            Some(Op::Write) => Operation::Write,
            _ => continue,
        };
        let len = record.moved_bytes();
        if len == 0 {
            continue;
        }
        let next = processes.len() as u32;
        let process = *processes.entry(record.origin).or_insert(next);
        if process as usize == ends.len() {
            ends.push(start);
        }
        let next = files.len() as u32;
        let file = *files.entry(record.file).or_insert(next);
        let end = &mut ends[process as usize];
        let think_ns = record.arrival.0.saturating_sub(end.0);
        *end = record.completion().unwrap_or(record.arrival).max(*end);
        found.push(TracedAccess { process, file, op, offset: record.offset, len, think_ns });
    }
    found
}

/// Reads a trace file by the name that a scenario gives it, relative to the scenario's folder.
pub fn read(folder: &Path, name: &str) -> Result<Vec<TracedAccess>, String> {
    let path = folder.join(name);
    let imported = import(&path, &ImportOptions::default()).map_err(|e| e.to_string())?;
    let found = accesses(&imported.trace);
    if found.is_empty() {
        return Err(format!("{}: it holds no read and no write", path.display()));
    }
    Ok(found)
}
