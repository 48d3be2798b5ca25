//! Darshan's extended tracing, as the text of `darshan-dxt-parser` (Darshan 3.1 and later).
//!
//! Lines are grouped by file and rank; times are seconds since the job's start, with four decimals in the known
//! versions, so requests of less than 0.1 ms last 0 or 0.1 ms. Files are identified only by name, processes by rank.

use std::io::BufRead;
use std::path::Path;

use impresario_sched::{FileId, Nanos};

use super::lines::{Lines, seconds_ns, show, whole};
use crate::{Builder, FileInfo, Header, Origin, OriginId, Record, Trace, TraceError, TraceOp};

/// The current group of lines.
struct Group {
    file: FileId,
    rank: u32,
    host: String,
    origin: Option<OriginId>,
}

pub fn read(input: impl BufRead, path: &Path, mpiio: bool, notes: &mut Vec<String>) -> Result<Trace, TraceError> {
    let header = Header { source: "darshan-dxt-parser".into(), ..Header::default() };
    let mut builder = Builder::new(header);
    let mut lines = Lines::new(input, path);
    let mut group: Option<Group> = None;
    let (mut wanted, mut other) = (0u64, 0u64);
    let mut job = String::new();
    while let Some((number, line)) = lines.next_line()? {
        let told = if let Some(comment) = line.strip_prefix(b"#") {
            comment_line(&mut builder, &mut group, &mut job, comment)
        } else if line.iter().all(u8::is_ascii_whitespace) {
            Ok(())
        } else {
            match request(&mut builder, group.as_mut(), &job, mpiio, line) {
                Ok(true) => {
                    wanted += 1;
                    Ok(())
                }
                Ok(false) => {
                    other += 1;
                    Ok(())
                }
                Err(reason) => Err(reason),
            }
        };
        told.map_err(|reason| lines.refuse(number, reason))?;
    }
    let (this, that, switch) = if mpiio { ("MPI-IO", "POSIX", "without") } else { ("POSIX", "MPI-IO", "with") };
    if wanted == 0 {
        let reason = if other == 0 {
            "it holds no request; was the job run with DXT_ENABLE_IO_TRACE=1?".to_string()
        } else {
            format!("it holds no request of {this}, but {other} of {that}; convert {switch} --mpiio")
        };
        return Err(TraceError::file(path, reason));
    }
    if other > 0 {
        notes.push(format!("{other} requests of {that} are left out: they are the same I/O as those of {this}"));
    }
    Ok(builder.build())
}

fn comment_line(
    builder: &mut Builder,
    group: &mut Option<Group>,
    job: &mut String,
    comment: &[u8],
) -> Result<(), String> {
    let text = String::from_utf8_lossy(comment);
    let text = text.trim();
    if let Some(rest) = text.strip_prefix("DXT, file_id:") {
        // The name may contain anything but the end of the line, so it is read as bytes.
        let name = find(comment, b", file_name: ").ok_or("the line names no file (file_name: …)")?;
        let key = whole(rest.split(',').next().map(str::trim), "file_id")?;
        let file = builder.file(FileInfo { path: name.to_vec(), key, size_bytes: None })?;
        *group = Some(Group { file, rank: 0, host: String::new(), origin: None });
    } else if let Some(rest) = text.strip_prefix("DXT, rank:") {
        let group = group.as_mut().ok_or("a rank before any file (# DXT, file_id: …)")?;
        let (rank, rest) = rest.split_once(',').unwrap_or((rest, ""));
        // Rank -1 stands for all ranks in other parts of the log.
        let rank: i64 = rank.trim().parse().map_err(|_| format!("{} is not a valid rank", show(rank)))?;
        group.rank = u32::try_from(rank).unwrap_or(u32::MAX);
        group.host = rest.trim().strip_prefix("hostname:").unwrap_or("").trim().to_string();
        group.origin = None;
    } else if let Some(exe) = text.strip_prefix("exe:") {
        builder.header.command = exe.trim().to_string();
    } else if let Some(id) = text.strip_prefix("jobid:") {
        *job = id.trim().to_string();
    } else if let Some(start) = text.strip_prefix("start_time:") {
        builder.header.clock_unix_ns = seconds_ns(start.trim());
    }
    Ok(())
}

/// True if the line belongs to the wanted layer.
fn request(
    builder: &mut Builder,
    group: Option<&mut Group>,
    job: &str,
    mpiio: bool,
    line: &[u8],
) -> Result<bool, String> {
    let text = std::str::from_utf8(line).map_err(|_| "the line is not valid UTF-8")?;
    let mut words = text.split_ascii_whitespace();
    let layer = words.next().unwrap_or_default();
    if !layer.starts_with("X_") {
        let what = "write X_POSIX or X_MPIIO, rank, read or write, segment, offset, length, start, end";
        return Err(format!("{} begins no line of darshan-dxt-parser: {what}", show(layer)));
    }
    if layer != if mpiio { "X_MPIIO" } else { "X_POSIX" } {
        return Ok(false);
    }
    let group = group.ok_or("a request before any file (# DXT, file_id: …)")?;
    let rank = words.next().ok_or("the rank is missing")?;
    let rank: i64 = rank.parse().map_err(|_| format!("{} is not a valid rank", show(rank)))?;
    let op = match words.next() {
        Some("read") => TraceOp::Read,
        Some("write") => TraceOp::Write,
        other => return Err(format!("{} is neither read nor write", show(other.unwrap_or_default()))),
    };
    whole(words.next(), "segment")?;
    let offset = whole(words.next(), "offset")?;
    let len = whole(words.next(), "length")?;
    let mut time = |what: &str| {
        let word = words.next().ok_or_else(|| format!("the {what} is missing"))?;
        seconds_ns(word).ok_or_else(|| format!("{} is not a valid {what} in seconds", show(word)))
    };
    let (start, end) = (time("start")?, time("end")?);
    if end < start {
        return Err(format!("it ends ({end} ns) before it starts ({start} ns)"));
    }
    let rank = u32::try_from(rank).unwrap_or(u32::MAX);
    if group.rank != rank {
        (group.rank, group.origin) = (rank, None);
    }
    let origin = match group.origin {
        Some(origin) => origin,
        None => {
            let host = group.host.clone();
            let new = Origin { host, process: rank, job: job.to_string(), ..Origin::default() };
            *group.origin.insert(builder.origin(new)?)
        }
    };
    let mut record = Record::new(op, group.file, offset, len, Nanos(start));
    (record.origin, record.duration) = (origin, Some(Nanos(end - start)));
    builder.push(record)?;
    Ok(true)
}

/// What follows `what`, if present.
fn find<'a>(bytes: &'a [u8], what: &[u8]) -> Option<&'a [u8]> {
    let at = bytes.windows(what.len()).position(|w| w == what)?;
    Some(&bytes[at + what.len()..])
}
