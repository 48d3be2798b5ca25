//! A recorded run as a trace.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use impresario_base::machine::host_name;
use impresario_ring::{Op, flag};
use impresario_sched::{FileId, Nanos};
use impresario_trace::{FileInfo, Header, Origin, OriginId, Outcome, Record, TraceError, TraceOp, Writer};

use crate::manager::{RecordedAccess, RecordedFile, Sink};

/// How the source of our traces ends; each access has its program's name as a label.
pub const SOURCE: &str = "assist record";

/// Writes what programs do to a trace file. Whoever needs it to last syncs it.
pub struct TraceSink {
    writer: Option<Writer<File>>,
    zero_ns: u64,
    files: HashMap<u64, (FileId, u32, Arc<str>)>,
    /// By process, thread and program.
    origins: HashMap<(u32, u32, Arc<str>), OriginId>,
}

/// Of a trace that begins now.
fn header(command: &str) -> Header {
    let unix_ns = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok();
    Header {
        clock_unix_ns: unix_ns.and_then(|d| u64::try_from(d.as_nanos()).ok()),
        host: host_name(),
        source: format!("impresario {} {SOURCE}", env!("CARGO_PKG_VERSION")),
        command: command.into(),
        ..Header::default()
    }
}

impl TraceSink {
    /// A new trace at `path`; a file that is there is left alone, with an error. `command` is told to its readers.
    pub fn create(path: &Path, command: &str) -> Result<TraceSink, TraceError> {
        Ok(TraceSink::by(Writer::create(path, &header(command))?))
    }

    /// A new trace in an empty file, which errors call `name`. It ends with an error at about `limit_bytes`, one block more at most.
    pub fn into_file(file: File, name: &Path, command: &str, limit_bytes: u64) -> Result<TraceSink, TraceError> {
        Ok(TraceSink::by(Writer::new(file, name, &header(command))?.limited(limit_bytes)))
    }

    fn by(writer: Writer<File>) -> TraceSink {
        TraceSink {
            writer: Some(writer),
            zero_ns: impresario_ring::now_ns(),
            files: HashMap::new(),
            origins: HashMap::new(),
        }
    }

    /// Bytes that were written so far.
    pub fn written_bytes(&self) -> u64 {
        self.writer.as_ref().map_or(0, Writer::written_bytes)
    }

    fn push(&mut self, number: u64, thread: u32, record: impl FnOnce(FileId, OriginId) -> Record) -> io::Result<()> {
        let (Some(writer), Some((file, pid, program))) = (&mut self.writer, self.files.get(&number)) else {
            return Ok(());
        };
        let origin = match self.origins.entry((*pid, thread, program.clone())) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let origin = Origin { process: *pid, thread, label: program.to_string(), ..Origin::default() };
                *new.insert(writer.origin(&origin).map_err(io::Error::other)?)
            }
        };
        writer.push(&record(*file, origin)).map_err(io::Error::other)
    }
}

impl Sink for TraceSink {
    fn opened(&mut self, file: &RecordedFile) -> io::Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let info = FileInfo {
            path: file.path.as_os_str().as_bytes().to_vec(),
            key: file.id.ino,
            size_bytes: Some(file.size_bytes),
        };
        let id = writer.file(&info).map_err(io::Error::other)?;
        self.files.insert(file.number, (id, file.pid, file.program.clone()));
        Ok(())
    }

    fn access(&mut self, a: &RecordedAccess) -> io::Result<()> {
        let op = match a.op {
            Op::Read => TraceOp::Read,
            Op::Write => TraceOp::Write,
            Op::Mmap => TraceOp::Map,
            Op::Seek => TraceOp::Seek,
            Op::Close => TraceOp::Close,
        };
        let arrival = Nanos(a.start_ns.saturating_sub(self.zero_ns));
        // What was only submitted has ended at an unknown time.
        let duration = (a.flags & flag::ASYNC == 0).then_some(Nanos(u64::from(a.duration_ns)));
        let outcome = if a.flags & flag::SHORT != 0 { Outcome::Short(u64::from(a.len_bytes)) } else { Outcome::Whole };
        self.push(a.file, u32::from(a.thread), |file, origin| Record {
            origin,
            duration,
            outcome,
            ..Record::new(op, file, a.offset, u64::from(a.len_bytes), arrival)
        })?;
        if a.op == Op::Close {
            self.files.remove(&a.file);
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        writer.finish().map_err(io::Error::other).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use impresario_trace::Trace;

    use super::*;
    use crate::backend::FileId as Inode;

    #[test]
    fn what_is_recorded_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let mut sink = TraceSink::create(&path, "program x").unwrap();
        let zero = sink.zero_ns;
        let file = RecordedFile {
            number: 7,
            path: "/data/x".into(),
            id: Inode { dev: 1, ino: 42 },
            size_bytes: 1000,
            changed_unix_ns: 0,
            pid: 11,
            uid: 0,
            program: "x.py".into(),
        };
        sink.opened(&file).unwrap();
        let read = RecordedAccess {
            file: 7,
            pid: 11,
            thread: 3,
            op: Op::Read,
            flags: 0,
            offset: 100,
            len_bytes: 50,
            start_ns: zero + 5000,
            duration_ns: 900,
        };
        sink.access(&read).unwrap();
        sink.access(&RecordedAccess { flags: flag::ASYNC, offset: 150, ..read }).unwrap();
        sink.access(&RecordedAccess { op: Op::Close, ..read }).unwrap();
        sink.access(&RecordedAccess { offset: 999, ..read }).unwrap(); // after its close: of nothing
        sink.finish().unwrap();
        sink.finish().unwrap();
        let trace = Trace::load(&path).unwrap();
        assert_eq!((trace.files[0].path.as_slice(), trace.files[0].size_bytes), (&b"/data/x"[..], Some(1000)));
        let seen: Vec<_> = trace.records.iter().map(|r| (r.op, r.offset, r.duration)).collect();
        assert_eq!(
            seen,
            [
                (TraceOp::Read, 100, Some(Nanos(900))),
                (TraceOp::Read, 150, None),
                (TraceOp::Close, 100, Some(Nanos(900)))
            ]
        );
        let origin = trace.origin(trace.records[0].origin);
        assert_eq!((origin.process, origin.label.as_str(), trace.header.command.as_str()), (11, "x.py", "program x"));
        assert!(TraceSink::create(&path, "").is_err(), "an old trace is not overwritten");
    }
}
