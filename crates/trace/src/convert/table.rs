//! Comma-separated values with a line of column names (RFC 4180), import and export. Paths are bytes and stay
//! unchanged.

use std::io::{BufRead, Write};
use std::path::Path;

use csv::{ByteRecord, ReaderBuilder, WriterBuilder};
use impresario_sched::{LaneId, Nanos};

use super::lines::{show, whole};
use crate::{Builder, FileInfo, Header, Origin, Outcome, Record, Trace, TraceError, TraceOp};

const COLUMNS: [&str; 16] = [
    "arrival_ns",
    "duration_ns",
    "op",
    "path",
    "offset",
    "len",
    "outcome",
    "host",
    "process",
    "thread",
    "user",
    "job",
    "label",
    "lane",
    "key",
    "size_bytes",
];
/// Required columns; others may be missing.
const NEEDED: [&str; 5] = ["arrival_ns", "op", "path", "offset", "len"];

/// Whether this is the first line of such a table.
pub fn is_header(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    let names: Vec<&str> = line.trim().split(',').map(|n| n.trim().trim_matches('"')).collect();
    NEEDED.iter().all(|n| names.contains(n))
}

pub fn read(input: impl BufRead, path: &Path) -> Result<Trace, TraceError> {
    let mut table = ReaderBuilder::new().has_headers(true).flexible(false).from_reader(input);
    let refuse = |e: csv::Error| {
        let line = e.position().map_or(1, csv::Position::line);
        match e.into_kind() {
            csv::ErrorKind::Io(e) => TraceError::io(path, e),
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                let reason = format!("there are {len} fields, and {expected_len} in the first line");
                TraceError::line(path, line, reason)
            }
            other => TraceError::line(path, line, format!("{other:?}")),
        }
    };
    let header = table.byte_headers().map_err(refuse)?.clone();
    let mut columns = [None; COLUMNS.len()];
    for (at, name) in header.iter().enumerate() {
        let name = String::from_utf8_lossy(name);
        let found = COLUMNS.iter().position(|c| *c == name.trim());
        let known = || format!("there is no column {}; there are {}", show(&name), COLUMNS.join(", "));
        columns[found.ok_or_else(|| TraceError::line(path, 1, known()))?] = Some(at);
    }
    for needed in NEEDED {
        if COLUMNS.iter().zip(&columns).any(|(name, at)| *name == needed && at.is_none()) {
            return Err(TraceError::line(path, 1, format!("the column {needed} is missing")));
        }
    }
    let mut builder = Builder::new(Header { source: "csv".into(), ..Header::default() });
    let mut row = ByteRecord::new();
    while table.read_byte_record(&mut row).map_err(refuse)? {
        let line = row.position().map_or(0, csv::Position::line);
        take(&mut builder, &row, &columns).map_err(|reason| TraceError::line(path, line, reason))?;
    }
    Ok(builder.build())
}

fn take(builder: &mut Builder, row: &ByteRecord, columns: &[Option<usize>; COLUMNS.len()]) -> Result<(), String> {
    let bytes = |name: &str| -> &[u8] {
        let column = COLUMNS.iter().position(|c| *c == name).and_then(|c| columns[c]);
        column.and_then(|c| row.get(c)).unwrap_or_default()
    };
    let text = |name| std::str::from_utf8(bytes(name)).map_err(|_| format!("the {name} is not valid UTF-8"));
    let number = |name| whole(Some(text(name)?.trim()), name);
    let optional = |name| if bytes(name).is_empty() { Ok(None) } else { number(name).map(Some) };
    let small = |name: &'static str| -> Result<u32, String> {
        let n = optional(name)?.unwrap_or(0);
        u32::try_from(n).map_err(|_| format!("{name} {n} is larger than 2^32-1"))
    };
    let op = text("op")?;
    let op = TraceOp::from_name(op.trim()).ok_or_else(|| {
        let known: Vec<_> = TraceOp::ALL.iter().map(|op| op.name()).collect();
        format!("{} is not a valid operation; there are {}", show(op), known.join(", "))
    })?;
    let path = bytes("path").to_vec();
    let file = FileInfo { path, key: optional("key")?.unwrap_or(0), size_bytes: optional("size_bytes")? };
    let string = |name| text(name).map(str::to_string);
    let origin = Origin {
        host: string("host")?,
        process: small("process")?,
        thread: small("thread")?,
        user: small("user")?,
        job: string("job")?,
        label: string("label")?,
    };
    let outcome = match text("outcome")?.trim().split_once(' ') {
        None if bytes("outcome").is_empty() => Outcome::Whole,
        Some(("short", n)) => Outcome::Short(whole(Some(n), "number of bytes")?),
        Some(("errno", n)) => {
            let n = whole(Some(n), "errno")?;
            Outcome::Failed(u32::try_from(n).map_err(|_| format!("{n} is not a valid errno"))?)
        }
        _ => {
            return Err(format!(
                "{} is not a valid outcome: leave it empty, or write short N or errno N",
                show(text("outcome")?)
            ));
        }
    };
    let lane = small("lane")?;
    let record = Record {
        op,
        file: builder.file(file)?,
        origin: builder.origin(origin)?,
        lane: LaneId(u16::try_from(lane).map_err(|_| format!("lane {lane} is larger than 65535"))?),
        offset: number("offset")?,
        len: number("len")?,
        arrival: Nanos(number("arrival_ns")?),
        duration: optional("duration_ns")?.map(Nanos),
        outcome,
    };
    builder.push(record)
}

pub fn write(trace: &Trace, out: &mut dyn Write) -> std::io::Result<()> {
    let mut table = WriterBuilder::new().from_writer(out);
    table.write_record(COLUMNS)?;
    let optional = |n: Option<u64>| n.map(|n| n.to_string()).unwrap_or_default();
    let unless_zero = |n: u64| if n == 0 { String::new() } else { n.to_string() };
    for r in &trace.records {
        let (file, origin) = (trace.file(r.file), trace.origin(r.origin));
        let outcome = match r.outcome {
            Outcome::Whole => String::new(),
            Outcome::Short(bytes) => format!("short {bytes}"),
            Outcome::Failed(errno) => format!("errno {errno}"),
        };
        let host = if origin.host.is_empty() { &trace.header.host } else { &origin.host };
        table.write_field(r.arrival.0.to_string())?;
        table.write_field(optional(r.duration.map(|d| d.0)))?;
        table.write_field(r.op.name())?;
        table.write_field(&file.path)?;
        table.write_field(r.offset.to_string())?;
        table.write_field(r.len.to_string())?;
        table.write_field(outcome)?;
        table.write_field(host)?;
        for n in [origin.process, origin.thread, origin.user] {
            table.write_field(unless_zero(n.into()))?;
        }
        table.write_field(&origin.job)?;
        table.write_field(&origin.label)?;
        table.write_field(unless_zero(r.lane.0.into()))?;
        table.write_field(unless_zero(file.key))?;
        table.write_field(optional(file.size_bytes))?;
        table.write_record(None::<&[u8]>)?;
    }
    table.flush()
}
