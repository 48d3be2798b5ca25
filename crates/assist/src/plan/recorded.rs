//! A trace as a recorded run.

use impresario_foresight::{Reader, RecordedRead, Run};
use impresario_trace::{Trace, TraceOp};

use super::device::Device;

/// The reads of the files that `wanted` accepts; at most `reads_max` of them, the first ones. A read whose end the trace
/// does not know is taken to cost what the device would take.
pub fn run_of(trace: &Trace, device: &Device, wanted: impl Fn(usize) -> bool, reads_max: usize) -> Run {
    let sizes: Vec<u64> = trace.files.iter().map(|f| f.size_bytes.unwrap_or(0)).collect();
    let reads = trace.records.iter().filter_map(|r| {
        let (file, len) = (r.file.0 as usize, r.moved_bytes());
        (r.op == TraceOp::Read && len > 0 && file < trace.files.len() && wanted(file)).then(|| RecordedRead {
            origin: r.origin.0,
            file,
            bytes: r.offset..r.offset.saturating_add(len),
            arrival_ns: r.arrival.0,
            took_ns: r.duration.map(|d| d.0),
        })
    });
    let reader = |origin| {
        let origin = trace.origin(impresario_trace::OriginId(origin));
        // Processes of several hosts may have the same number.
        let host = trace.origins.iter().position(|o| o.host == origin.host).unwrap_or(0) as u64;
        Reader { process: (host << 32 | u64::from(origin.process)) & ((1 << 47) - 1), thread: origin.thread as u16 }
    };
    Run::of(sizes, reads, reads_max, reader, |bytes| device.random.ttp(bytes).0)
}

/// The least time that any hints can bring a run to: all its computing, or all its bytes at the device's full speed. A
/// hint follows a read, so the first read waits in any case; that is left out to be safe.
pub fn bound_ns(run: &Run, device: &Device) -> u64 {
    run.compute_ns().max(device.streaming_ns(run.needed_bytes()))
}
