//! Trace events for Chrome's tracing page, Perfetto and speedscope: one bar per request, one row per thread.

use std::io::{self, Write};

use serde_json::json;

use crate::{Outcome, Trace};

pub fn write(trace: &Trace, out: &mut dyn Write) -> io::Result<()> {
    let start = trace.records.first().map_or(0, |r| r.arrival.0);
    out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut first = true;
    let mut event = |out: &mut dyn Write, value: serde_json::Value| -> io::Result<()> {
        out.write_all(if std::mem::take(&mut first) { b"\n" } else { b",\n" })?;
        serde_json::to_writer(out, &value).map_err(io::Error::from)
    };
    // Processes of different hosts may have the same number, so rows are numbered by origin, and labelled.
    for (row, origin) in trace.origins.iter().enumerate() {
        let host = if origin.host.is_empty() { &trace.header.host } else { &origin.host };
        let name = [host, &origin.job, &origin.label].into_iter().filter(|t| !t.is_empty()).cloned();
        let name: Vec<String> = name.chain([format!("process {}", origin.process)]).collect();
        let (pid, name) = (origin.process, name.join(" "));
        event(out, json!({ "name": "process_name", "ph": "M", "pid": pid, "args": { "name": name } }))?;
        let thread = format!("thread {}", origin.thread);
        event(out, json!({ "name": "thread_name", "ph": "M", "pid": pid, "tid": row, "args": { "name": thread } }))?;
    }
    let us = |ns: u64| ns as f64 / 1e3;
    for r in &trace.records {
        let file = trace.file(r.file);
        let mut args = json!({
            "file": String::from_utf8_lossy(&file.path), "offset": r.offset, "len": r.len,
        });
        match r.outcome {
            Outcome::Whole => {}
            Outcome::Short(bytes) => args["short_bytes"] = bytes.into(),
            Outcome::Failed(errno) => args["errno"] = errno.into(),
        }
        let mut value = json!({
            "name": r.op.name(), "cat": "io", "ph": if r.duration.is_some() { "X" } else { "i" },
            "ts": us(r.arrival.0.saturating_sub(start)),
            "pid": trace.origin(r.origin).process, "tid": r.origin.0, "args": args,
        });
        match r.duration {
            Some(duration) => value["dur"] = us(duration.0).into(),
            None => value["s"] = "t".into(),
        }
        event(out, value)?;
    }
    out.write_all(b"\n]}\n")
}
