//! fio's I/O logs, versions 2 and 3.
//!
//! Version 3 starts each line with microseconds since the job's start; completions are not recorded. Version 2 has no
//! times but `wait` lines, which fio 3.33 reads as milliseconds since its own start. Names cannot contain spaces, so
//! paths are escaped (see `names`); lengths have 32 bits, so longer requests take several lines. A log covers one
//! process: origins are lost.

use std::io::{BufRead, Write};
use std::path::Path;

use impresario_sched::Nanos;

use super::lines::{Lines, show, whole};
use super::names::{escape, unescape};
use crate::{Builder, Header, Origin, Record, Trace, TraceError, TraceOp};

/// The largest length fio can write, rounded down to a multiple of a page.
const LEN_MAX: u64 = (u32::MAX as u64) / 4096 * 4096;

pub fn read(input: impl BufRead, path: &Path, notes: &mut Vec<String>) -> Result<Trace, TraceError> {
    let mut lines = Lines::new(input, path);
    let version = match lines.next_line()? {
        Some((_, b"fio version 2 iolog")) => 2,
        Some((_, b"fio version 3 iolog")) => 3,
        Some((number, other)) => {
            let other = show(&String::from_utf8_lossy(other));
            let reason = format!("{other} is not \"fio version 2 iolog\" or \"fio version 3 iolog\"");
            return Err(lines.refuse(number, reason));
        }
        None => return Err(TraceError::file(path, "it is empty; fio writes such a log with --write_iolog=FILE")),
    };
    let header = Header { source: format!("fio version {version} iolog"), ..Header::default() };
    let mut builder = Builder::new(header);
    let origin = builder.origin(Origin::default()).map_err(|e| lines.refuse(1, e))?;
    let (mut now, mut waits, mut trims) = (0u64, 0u64, 0u64);
    while let Some((number, line)) = lines.next_line()? {
        if line.is_empty() {
            continue;
        }
        let mut take = || -> Result<(), String> {
            let mut words = line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty());
            let text = |w: Option<&[u8]>| w.map(|w| String::from_utf8_lossy(w).into_owned());
            if version == 3 {
                let us = whole(text(words.next()).as_deref(), "time in microseconds")?;
                now = us.checked_mul(1000).ok_or_else(|| format!("{us} µs is too late"))?;
            }
            let name = words.next().ok_or("the name of the file is missing")?;
            let action = text(words.next()).ok_or("the action is missing: read, write, open, close, …")?;
            let numbers = [text(words.next()), text(words.next())];
            let numbers = || -> Result<(u64, u64), String> {
                Ok((whole(numbers[0].as_deref(), "offset")?, whole(numbers[1].as_deref(), "length")?))
            };
            let (op, (offset, len)) = match action.as_str() {
                "read" => (TraceOp::Read, numbers()?),
                "write" => (TraceOp::Write, numbers()?),
                "sync" | "datasync" => (TraceOp::Sync, (0, 0)),
                "open" => (TraceOp::Open, (0, 0)),
                "close" => (TraceOp::Close, (0, 0)),
                "add" => return builder.path(&unescape(name)).map(|_| ()),
                "trim" => {
                    trims += 1;
                    return Ok(());
                }
                "wait" if version == 2 => {
                    let ms = numbers()?.0;
                    now = now.max(ms.checked_mul(1_000_000).ok_or_else(|| format!("{ms} ms is too late"))?);
                    waits += 1;
                    return Ok(());
                }
                other => return Err(format!("{} is not a valid action of a version {version} log", show(other))),
            };
            let file = builder.path(&unescape(name))?;
            let mut record = Record::new(op, file, offset, len, Nanos(now));
            record.origin = origin;
            builder.push(record)
        };
        let told = take();
        told.map_err(|reason| TraceError::line(path, number, reason))?;
    }
    notes.push("the log does not record when requests ended".into());
    if version == 2 && waits == 0 {
        notes.push("a version 2 log has no times: everything seems to happen at once".into());
    }
    if trims > 0 {
        notes.push(format!("{trims} trims are left out"));
    }
    Ok(builder.build())
}

pub fn write(trace: &Trace, out: &mut dyn Write, version: u32) -> std::io::Result<Vec<String>> {
    writeln!(out, "fio version {version} iolog")?;
    let names: Vec<String> = trace
        .files
        .iter()
        .map(|f| if f.path.is_empty() { format!("/file-{:016x}", f.key) } else { escape(&f.path) })
        .collect();
    // fio opens only declared files, each once. The clock of a log must not start at 0, or fio ignores the first wait.
    let stamp = |ns: u64| if version == 3 { format!("{} ", 1 + ns / 1000) } else { String::new() };
    let mut used = vec![false; names.len()];
    let data = |r: &&Record| r.op.is_data() || r.op == TraceOp::Sync;
    let first = trace.records.iter().find(data).map_or(0, |r| r.arrival.0);
    for r in trace.records.iter().filter(data) {
        if let Some(used) = used.get_mut(r.file.0 as usize) {
            *used = true;
        }
    }
    let used = || names.iter().zip(&used).filter(|(_, used)| **used).map(|(name, _)| name);
    for name in used() {
        writeln!(out, "{}{name} add", stamp(0))?;
    }
    for name in used() {
        writeln!(out, "{}{name} open", stamp(0))?;
    }
    let (mut other, mut empty, mut last, mut waited_ms) = (0u64, 0u64, 0, 0);
    for r in &trace.records {
        let Some(name) = names.get(r.file.0 as usize) else { continue };
        let since = r.arrival.0.saturating_sub(first);
        let action = match r.op {
            TraceOp::Read => "read",
            TraceOp::Write => "write",
            TraceOp::Sync => "sync",
            _ => {
                other += 1;
                continue;
            }
        };
        if r.op.is_data() && r.len == 0 {
            empty += 1;
            continue;
        }
        last = since;
        if version == 2 && since / 1_000_000 > waited_ms {
            waited_ms = since / 1_000_000;
            writeln!(out, "{name} wait {waited_ms} 0")?;
        }
        if r.op == TraceOp::Sync {
            writeln!(out, "{}{name} {action} 0 0", stamp(since))?;
            continue;
        }
        let (mut offset, mut left) = (r.offset, r.len);
        while left > 0 {
            let len = left.min(LEN_MAX);
            writeln!(out, "{}{name} {action} {offset} {len}", stamp(since))?;
            (offset, left) = (offset.saturating_add(len), left - len);
        }
    }
    for name in used() {
        writeln!(out, "{}{name} close", stamp(last))?;
    }
    let mut notes = vec!["fio's logs record neither processes nor completions".to_string()];
    if other > 0 {
        notes.push(format!("{other} opens, closes, seeks, maps, truncations and removals are left out"));
    }
    if empty > 0 {
        notes.push(format!("{empty} requests of no bytes are left out"));
    }
    Ok(notes)
}
