//! Other programs' formats: detecting, importing and exporting them.

mod chrome;
mod dxt;
mod fio;
mod lines;
mod names;
mod strace;
mod table;

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use crate::{Reader, Trace, TraceError};

/// A format of traces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Our own, see doc/TRACES.md.
    Imt,
    /// The text that `darshan-dxt-parser` prints of a Darshan log.
    Dxt,
    /// What `strace -f -ttt -T` prints, best with `-y`.
    Strace,
    /// fio's I/O log, version 2.
    Fio2,
    /// fio's I/O log, version 3: with times.
    Fio3,
    /// Comma-separated values with column names.
    Csv,
    /// Trace events for Chrome, Perfetto and speedscope.
    Chrome,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 7] =
        [Format::Imt, Format::Dxt, Format::Strace, Format::Fio2, Format::Fio3, Format::Csv, Format::Chrome];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Imt => "imt",
            Format::Dxt => "dxt",
            Format::Strace => "strace",
            Format::Fio2 => "fio2",
            Format::Fio3 => "fio3",
            Format::Csv => "csv",
            Format::Chrome => "chrome",
        }
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|f| f.name() == name)
    }

    /// The format that the name of an output file suggests.
    pub fn of_name(path: &Path) -> Option<Format> {
        match path.extension()?.to_str()? {
            "imt" => Some(Format::Imt),
            "csv" => Some(Format::Csv),
            "json" => Some(Format::Chrome),
            "iolog" => Some(Format::Fio3),
            _ => None,
        }
    }

    /// Whether it can be read.
    pub const fn reads(self) -> bool {
        !matches!(self, Format::Chrome)
    }

    /// Whether it can be written.
    pub const fn writes(self) -> bool {
        !matches!(self, Format::Dxt | Format::Strace)
    }
}

/// How to import.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// The format; `None`: detect it from the content.
    pub format: Option<Format>,
    /// Take MPI-IO requests from a Darshan log instead of the POSIX requests below them.
    pub mpiio: bool,
}

/// An imported trace and what its reader should know.
#[derive(Debug)]
pub struct Imported {
    /// The requests.
    pub trace: Trace,
    /// Its original format.
    pub format: Format,
    /// What could not be imported, one line each.
    pub notes: Vec<String>,
}

/// Imports a trace of any format into memory. An error about a line has its number.
pub fn import(path: &Path, options: &ImportOptions) -> Result<Imported, TraceError> {
    let file = File::open(path).map_err(|e| TraceError::io(path, e))?;
    let mut input = BufReader::with_capacity(1 << 16, file);
    let head = input.fill_buf().map_err(|e| TraceError::io(path, e))?;
    if is_darshan(head, path) {
        let shown = path.display();
        let reason = format!(
            "it is a binary Darshan log; make a text of it first: darshan-dxt-parser {shown} > {shown}.txt \
             (the log needs Darshan's extended tracing, DXT_ENABLE_IO_TRACE=1 at run time)"
        );
        return Err(TraceError::file(path, reason));
    }
    let format = match options.format {
        Some(format) => format,
        None => guess(head).ok_or_else(|| TraceError::file(path, unknown()))?,
    };
    let mut notes = Vec::new();
    let trace = match format {
        Format::Imt => Trace::read(Reader::new(input, path)?)?,
        Format::Dxt => dxt::read(input, path, options.mpiio, &mut notes)?,
        Format::Strace => strace::read(input, path, &mut notes)?,
        Format::Fio2 | Format::Fio3 => fio::read(input, path, &mut notes)?,
        Format::Csv => table::read(input, path)?,
        Format::Chrome => return Err(TraceError::file(path, "trace events can be written, not read")),
    };
    Ok(Imported { trace, format, notes })
}

/// Exports a trace to a new file. Returns what the format cannot represent, one line each.
pub fn export(trace: &Trace, path: &Path, format: Format) -> Result<Vec<String>, TraceError> {
    let file = File::create_new(path).map_err(|e| TraceError::io(path, e))?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    let notes = export_to(trace, &mut out, path, format)?;
    out.flush().map_err(|e| TraceError::io(path, e))?;
    Ok(notes)
}

/// Exports a trace to any writer, which errors call `name`.
pub fn export_to(trace: &Trace, out: &mut dyn Write, name: &Path, format: Format) -> Result<Vec<String>, TraceError> {
    match format {
        Format::Imt => trace.write(out, name).map(|_| Vec::new()),
        Format::Fio2 => fio::write(trace, out, 2).map_err(|e| TraceError::io(name, e)),
        Format::Fio3 => fio::write(trace, out, 3).map_err(|e| TraceError::io(name, e)),
        Format::Csv => table::write(trace, out).map(|()| Vec::new()).map_err(|e| TraceError::io(name, e)),
        Format::Chrome => chrome::write(trace, out).map(|()| Vec::new()).map_err(|e| TraceError::io(name, e)),
        Format::Dxt | Format::Strace => {
            let reason = format!("{} can be read, not written; write imt, fio2, fio3, csv or chrome", format.name());
            Err(TraceError::file(name, reason))
        }
    }
}

fn unknown() -> String {
    "it is of no format that is known; name it: imt, dxt, strace, fio2, fio3 or csv".into()
}

/// A binary log begins with its version in eight bytes, and a magic number in its machine's byte order.
fn is_darshan(head: &[u8], path: &Path) -> bool {
    const MAGIC: i64 = 6_567_223;
    let number = head.get(8..16).and_then(|b| <[u8; 8]>::try_from(b).ok());
    number.is_some_and(|b| i64::from_le_bytes(b) == MAGIC || i64::from_be_bytes(b) == MAGIC)
        || path.extension().is_some_and(|e| e == "darshan") && head.contains(&0)
}

fn guess(head: &[u8]) -> Option<Format> {
    let first = head.split(|b| *b == b'\n').next()?;
    if head.starts_with(b"IMTRACE") {
        return Some(Format::Imt);
    }
    if first.starts_with(b"fio version 2 iolog") {
        return Some(Format::Fio2);
    }
    if first.starts_with(b"fio version 3 iolog") {
        return Some(Format::Fio3);
    }
    let text = String::from_utf8_lossy(head);
    if table::is_header(first) {
        return Some(Format::Csv);
    }
    if text.starts_with('#') && (text.contains("darshan") || text.contains("DXT")) || text.contains("\n# DXT,") {
        return Some(Format::Dxt);
    }
    text.lines().take(20).any(strace::is_line).then_some(Format::Strace)
}

#[cfg(test)]
mod tests;
