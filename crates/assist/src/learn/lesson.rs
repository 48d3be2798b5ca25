//! What is kept of a run that is learnt from: the reads of its inputs, in a trace that does not grow without end.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use impresario_ring::{Op, SMALL_FILE_BYTES};

use crate::backend::FileId;
use crate::manager::{RecordedAccess, RecordedFile, Sink};
use crate::record::TraceSink;

/// Accesses of a run that is learnt from, and files that it opens; of a longer one nothing is learnt.
const ACCESSES_MAX: u64 = 1 << 22;

/// Now, on the clock from which the kernel takes the times of files, in nanoseconds since 1970.
pub(crate) fn file_time_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    let (s, ns) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    s.saturating_mul(1_000_000_000).saturating_add(ns)
}

/// Whether something may be learnt from a file that a run opens which began at this time: it is long, and what was changed since was
/// written by the run, most likely.
pub(crate) fn is_input(file: &RecordedFile, began_unix_ns: u64) -> bool {
    file.size_bytes > SMALL_FILE_BYTES.into() && file.changed_unix_ns <= began_unix_ns
}

/// A trace of what can be learnt from.
pub struct Lesson {
    trace: TraceSink,
    left: u64,
    /// Open files from which something can be learnt.
    long: HashSet<u64>,
    /// Open files, and those that were written to: the clock of a server, by which files were changed, may lag behind ours.
    open: HashMap<u64, FileId>,
    written: HashSet<FileId>,
    began_unix_ns: u64,
    is_worthwhile: Arc<AtomicBool>,
}

impl Lesson {
    /// Of a run that begins now.
    pub fn new(trace: TraceSink) -> Lesson {
        Lesson::since(trace, file_time_ns())
    }

    /// Of a run that began at this time.
    pub(crate) fn since(trace: TraceSink, began_unix_ns: u64) -> Lesson {
        Lesson {
            trace,
            left: ACCESSES_MAX,
            long: HashSet::new(),
            open: HashMap::new(),
            written: HashSet::new(),
            began_unix_ns,
            is_worthwhile: Arc::default(),
        }
    }

    /// Whether a file was read from which something can be learnt, and the trace is whole: true from the first such read on, and false
    /// again when it could not be written or became too long.
    pub fn worth(&self) -> Arc<AtomicBool> {
        self.is_worthwhile.clone()
    }

    /// A file that the run writes, as far as is known, is no input by any name. How many these are now.
    pub(crate) fn is_output(&mut self, file: FileId) -> usize {
        self.written.insert(file);
        self.written.len()
    }

    /// Bytes of the trace.
    pub(crate) fn bytes(&self) -> u64 {
        self.trace.written_bytes()
    }

    /// One more line of the trace. Nothing is learnt from a part of a run.
    fn add(&mut self, line: impl FnOnce(&mut TraceSink) -> io::Result<()>) -> io::Result<()> {
        let added = match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                line(&mut self.trace)
            }
            None => Err(io::Error::other("too long a run to learn from")),
        };
        added.inspect_err(|_| self.is_worthwhile.store(false, Relaxed))
    }
}

impl Sink for Lesson {
    fn opened(&mut self, file: &RecordedFile) -> io::Result<()> {
        if is_input(file, self.began_unix_ns) && !self.written.contains(&file.id) {
            self.long.insert(file.number);
        }
        self.open.insert(file.number, file.id);
        self.add(|trace| trace.opened(file))
    }

    fn access(&mut self, access: &RecordedAccess) -> io::Result<()> {
        match access.op {
            Op::Read if !self.long.contains(&access.file) => return Ok(()),
            Op::Read => self.is_worthwhile.store(true, Relaxed),
            // Once is enough to know.
            Op::Write if !self.open.get(&access.file).is_some_and(|id| self.written.insert(*id)) => return Ok(()),
            Op::Close => {
                self.long.remove(&access.file);
                self.open.remove(&access.file);
            }
            _ => {}
        }
        self.add(|trace| trace.access(access))
    }

    fn finish(&mut self) -> io::Result<()> {
        self.trace.finish().inspect_err(|_| self.is_worthwhile.store(false, Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_learnt_from_is_recorded_and_no_more() {
        use impresario_trace::Trace;
        let folder = tempfile::tempdir().unwrap();
        let lesson = |name: &str, left| {
            let trace = TraceSink::create(&folder.path().join(name), "program").unwrap();
            Lesson { left, ..Lesson::since(trace, 5000) }
        };
        let file = |number, size_bytes| RecordedFile {
            number,
            path: format!("/data/{number}").into(),
            id: FileId { dev: 1, ino: number },
            size_bytes,
            changed_unix_ns: 5000,
            pid: 1,
            uid: 0,
            program: "program".into(),
        };
        let access = |file, op| RecordedAccess {
            file,
            pid: 1,
            thread: 1,
            op,
            flags: 0,
            offset: 0,
            len_bytes: 4096,
            start_ns: impresario_ring::now_ns(),
            duration_ns: 1,
        };
        let (short, long) = (file(1, SMALL_FILE_BYTES.into()), file(2, u64::from(SMALL_FILE_BYTES) + 1));
        let mut sink = lesson("a.imt", 7);
        for file in [&short, &long] {
            sink.opened(file).unwrap();
        }
        // One that was short when it was opened may be read by another name when it is long.
        for op in [Op::Read, Op::Write] {
            sink.access(&access(short.number, op)).unwrap();
        }
        assert!(!sink.is_worthwhile.load(Relaxed));
        let made = RecordedFile { changed_unix_ns: 5001, ..file(3, long.size_bytes) };
        sink.opened(&made).unwrap();
        sink.access(&access(made.number, Op::Read)).unwrap();
        assert!(!sink.is_worthwhile.load(Relaxed), "the run has written it");
        // On a server whose clock lags.
        let output = RecordedFile { id: short.id, ..file(4, long.size_bytes) };
        sink.opened(&output).unwrap();
        sink.access(&access(output.number, Op::Read)).unwrap();
        assert!(!sink.is_worthwhile.load(Relaxed), "so it has this one");
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.is_worthwhile.load(Relaxed));
        sink.access(&access(long.number, Op::Close)).unwrap();
        sink.finish().unwrap();
        assert_eq!(Trace::load(folder.path().join("a.imt")).unwrap().records.len(), 3);
        let mut sink = lesson("b.imt", 2);
        sink.opened(&long).unwrap();
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.access(&access(long.number, Op::Read)).is_err(), "it is too long a run");
        assert!(!sink.is_worthwhile.load(Relaxed), "nothing is learnt from a part of it");
        let mut sink = lesson("c.imt", 2);
        sink.opened(&long).unwrap();
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.opened(&short).is_err() && !sink.is_worthwhile.load(Relaxed), "files count, too");
        let mut sink = lesson("d.imt", 9);
        sink.opened(&long).unwrap();
        sink.access(&access(long.number, Op::Read)).unwrap();
        assert!(sink.add(|_| Err(io::ErrorKind::StorageFull.into())).is_err());
        assert!(!sink.is_worthwhile.load(Relaxed), "nor from a trace that is cut");
    }
}
