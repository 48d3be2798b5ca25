//! What programs do with kinds of files, learnt from recorded runs and kept for files that were never read before.
//!
//! A plan names files; this names kinds: what files have in common by suffix, first bytes, name, folder and size
//! ([`Files`]), and what a program reads of them whatever their size (foresight's `Shape`). Each file of a kind is
//! predicted from the others, and a kind that was wrong too often, or was seen in one file only, is kept and not used.

mod facts;
mod gain;
mod kinds;
mod lesson;
mod program;
mod store;

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use impresario_foresight::Sample;
use impresario_trace::{Record, Trace, TraceOp};
use rustc_hash::{FxHashMap, FxHashSet};

pub use facts::{Facts, Files, MAGIC_BYTES};
pub use gain::{Saving, savings};
pub use kinds::{KIND_FILES_MAX, Kind, Observation, PRECISION_MIN, find, kinds_of};
pub use lesson::Lesson;
pub(crate) use lesson::{file_time_ns, is_input};
pub use program::{program_of, program_of_process};
pub use store::{Learnt, SHARED, Store, StoreError};

use crate::plan::{Purpose, purpose, uses};
use crate::record::SOURCE;

/// Nothing is learnt of files that are no longer: the kernel reads them as a whole.
pub(crate) const SHORT_BYTES_MAX: u32 = (64 << 10) - 1;
/// Files of a run that are looked at, at most: those of which most was read.
const FILES_MAX: usize = 1000;
/// Reads of a file that are looked at, at most.
const READS_MAX: usize = 1 << 20;

/// The files of a run from which something can be learnt, and why nothing is of the others.
#[derive(Debug, Default)]
pub struct Observed {
    /// Those that were read.
    pub files: Vec<Observation>,
    /// Files that were written, too.
    pub written: u64,
    /// Files that were read in no order.
    pub in_no_order: u64,
    /// Files shorter than 64 KiB, or of unknown length.
    pub short: u64,
}

/// The programs that read in a recorded run, in the order of their first reads: each by its name, and with the label that its
/// accesses have. A trace that is not ours is of one program, the recorded command's; without one its name is `None`.
pub fn programs_in(trace: &Trace) -> Vec<(Option<String>, Option<&str>)> {
    let command = program_of(trace.header.command.split_whitespace());
    let mut labels: Vec<&str> = Vec::new();
    for r in trace.records.iter().filter(|r| r.op == TraceOp::Read) {
        let label = trace.origin(r.origin).label.as_str();
        // Most accesses have the one before's.
        if labels.last() != Some(&label) && !labels.contains(&label) {
            labels.push(label);
        }
    }
    if labels.is_empty() || !trace.header.source.ends_with(SOURCE) {
        return vec![(command, None)];
    }
    let name = |label: &str| if label.is_empty() { command.clone() } else { Some(label.into()) };
    labels.into_iter().map(|label| (name(label), Some(label))).collect()
}

/// Looks at a recorded run: at what one program of it read, whose accesses have this label, or at all. Of files that are
/// still there the first bytes are read.
pub fn observe(trace: &Trace, label: Option<&str>) -> Observed {
    let uses = uses(trace);
    let is_of = |r: &Record| r.op == TraceOp::Read && label.is_none_or(|label| trace.origin(r.origin).label == label);
    let read: FxHashSet<usize> = trace.records.iter().filter(|r| is_of(r)).map(|r| r.file.0 as usize).collect();
    let mut observed = Observed::default();
    let mut files: Vec<usize> = (0..uses.len()).filter(|file| uses[*file].reads > 0 && read.contains(file)).collect();
    files.sort_by_key(|file| std::cmp::Reverse(uses[*file].bytes));
    let mut reads: FxHashMap<usize, Vec<(u32, Range<u64>)>> = FxHashMap::default();
    for file in files.iter().take(FILES_MAX) {
        let (info, of) = (&trace.files[*file], &uses[*file]);
        match purpose(&info.path, of) {
            Purpose::Program | Purpose::Output => {}
            Purpose::Scratch => observed.written += 1,
            Purpose::Input if info.size_bytes.is_none_or(|size| size <= SHORT_BYTES_MAX.into()) => observed.short += 1,
            Purpose::Input => drop(reads.insert(*file, Vec::new())),
        }
    }
    for r in &trace.records {
        let (len, of) = (r.moved_bytes(), reads.get_mut(&(r.file.0 as usize)));
        if let Some(of) = of.filter(|of| is_of(r) && len > 0 && of.len() < READS_MAX) {
            of.push((r.origin.0, r.offset..r.offset.saturating_add(len)));
        }
    }
    let seen_unix_s = trace.header.clock_unix_ns.unwrap_or(0) / 1_000_000_000;
    for file in files {
        let Some(mut reads) = reads.remove(&file) else { continue };
        // What several threads read side by side has no order but the file's.
        if reads.iter().any(|(origin, _)| *origin != reads[0].0) {
            reads.sort_by_key(|(_, read)| read.start);
        }
        let info = &trace.files[file];
        let size_bytes = info.size_bytes.unwrap_or(0);
        let path = Path::new(std::ffi::OsStr::from_bytes(&info.path));
        match Sample::of(size_bytes, reads.into_iter().map(|(_, read)| read)) {
            Some(sample) => {
                let magic = first_bytes(path, size_bytes);
                observed.files.push(Observation::new(path, magic.as_deref(), seen_unix_s, sample));
            }
            None => observed.in_no_order += 1,
        }
    }
    observed
}

/// The first bytes of a file that is still the one that was read.
fn first_bytes(path: &Path, size_bytes: u64) -> Option<Vec<u8>> {
    // A pipe that has taken its place is not waited for.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let meta = file.metadata().ok()?;
    let mut magic = Vec::new();
    let is_it = meta.is_file() && meta.len() == size_bytes;
    is_it.then(|| file.take(MAGIC_BYTES as u64).read_to_end(&mut magic).ok())??;
    Some(magic)
}

#[cfg(test)]
mod tests {
    use impresario_sched::Nanos;
    use impresario_trace::{Builder, FileInfo, Header, Origin};

    use super::*;

    #[test]
    fn a_run_shows_the_files_that_it_read() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("there.dat");
        std::fs::write(&there, [7; 200_000]).unwrap();
        let mut builder = Builder::new(Header { clock_unix_ns: Some(5_000_000_000), ..Header::default() });
        let mut clock = 0;
        let mut access = |path: &str, size, thread, op, offset, len| {
            let file = builder.file(FileInfo { path: path.into(), key: 0, size_bytes: size }).unwrap();
            let origin = builder.origin(Origin { thread, ..Origin::default() }).unwrap();
            clock += 1;
            builder.push(Record { origin, ..Record::new(op, file, offset, len, Nanos(clock)) }).unwrap();
        };
        for i in 0..10 {
            access(there.to_str().unwrap(), Some(200_000), 1, TraceOp::Read, i * 20_000, 4096);
            access("/data/threads", Some(1 << 20), i as u32 % 2, TraceOp::Read, (10 - i) * 65_536, 65_536);
            access("/data/scratch", Some(1 << 20), 1, TraceOp::Read, i * 65_536, 65_536);
        }
        access("/data/scratch", Some(1 << 20), 1, TraceOp::Write, 0, 65_536);
        access("/data/short", Some(1000), 1, TraceOp::Read, 0, 1000);
        access("/data/unknown", None, 1, TraceOp::Read, 0, 1000);
        access("/usr/lib/x.dat", Some(1 << 20), 1, TraceOp::Read, 0, 65_536);
        access("/data/empty", Some(1 << 20), 1, TraceOp::Read, 2 << 20, 65_536);
        let trace = builder.build();
        let observed = observe(&trace, None);
        assert_eq!((observed.written, observed.short, observed.in_no_order), (1, 2, 1));
        assert_eq!(observed.files.len(), 2);
        let [threads, file] = observed.files.as_slice() else { panic!("{observed:?}") };
        assert_eq!((file.path.as_path(), file.magic.as_deref()), (there.as_path(), Some("0707070707070707")));
        assert_eq!((file.sample.series.len(), file.seen_unix_s), (1, 5));
        assert_eq!((threads.sample.series.len(), threads.magic.as_deref()), (1, None));
        assert_eq!(threads.sample.pieces().next(), Some(65_536..11 * 65_536));
        assert_eq!(programs_in(&trace), [(None, None)]);
    }

    /// A launcher, a shell and what they start are in one record.
    #[test]
    fn each_program_of_a_run_is_known_by_itself() {
        let (command, source) = ("mpirun -n 2 ./solver mesh".into(), format!("impresario {SOURCE}"));
        let mut builder = Builder::new(Header { command, source, ..Header::default() });
        for (at, label) in ["", "solver", "solver", "post.py"].into_iter().enumerate() {
            let path = format!("/data/{label}");
            let file = builder.file(FileInfo { path: path.into(), key: 0, size_bytes: Some(1 << 20) }).unwrap();
            let origin = Origin { process: at as u32, label: label.into(), ..Origin::default() };
            let origin = builder.origin(origin).unwrap();
            let read = |i: u64| Record::new(TraceOp::Read, file, i * 65_536, 4096, Nanos(at as u64 * 10 + i));
            (0..4).for_each(|i| builder.push(Record { origin, ..read(i) }).unwrap());
        }
        let trace = builder.build();
        let of = |name: &str, label| (Some(name.to_string()), label);
        let all = [of("mpirun", Some("")), of("solver", Some("solver")), of("post.py", Some("post.py"))];
        assert_eq!(programs_in(&trace), all);
        let other = Header { source: "another".into(), ..trace.header.clone() };
        assert_eq!(programs_in(&Trace { header: other, ..trace.clone() }), [of("mpirun", None)]);
        let paths = |label| observe(&trace, label).files.iter().map(|f| f.path.clone()).collect::<Vec<_>>();
        assert_eq!(paths(Some("solver")), [Path::new("/data/solver")]);
        assert_eq!((paths(Some("other")).len(), paths(None).len()), (0, 3));
    }
}
