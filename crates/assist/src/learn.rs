//! What programs do with kinds of files, learnt from recorded runs and kept for files that were never read before.
//!
//! A plan names files; this names kinds: what files have in common by suffix, first bytes, name, folder and size
//! ([`Files`]), and what a program reads of them whatever their size (foresight's `Shape`). Each file of a kind is
//! predicted from the others, and a kind that was wrong too often, or was seen in one file only, is kept and not used.

mod facts;
mod kinds;
mod program;
mod store;

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use impresario_foresight::Sample;
use impresario_trace::{Trace, TraceOp};
use rustc_hash::FxHashMap;

pub use facts::{Facts, Files, MAGIC_BYTES};
pub use kinds::{KIND_FILES_MAX, Kind, Observation, PRECISION_MIN, find, kinds_of};
pub use program::program_of;
pub use store::{Learnt, SHARED, Store, StoreError};

use crate::plan::{Purpose, purpose, uses};

/// Nothing is learnt of shorter files: the kernel reads them as a whole.
const FILE_BYTES_MIN: u64 = 64 << 10;
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

/// Looks at a recorded run. Of files that are still there the first bytes are read.
pub fn observe(trace: &Trace) -> Observed {
    let uses = uses(trace);
    let mut observed = Observed::default();
    let mut files: Vec<usize> = (0..uses.len()).filter(|file| uses[*file].reads > 0).collect();
    files.sort_by_key(|file| std::cmp::Reverse(uses[*file].bytes));
    let mut reads: FxHashMap<usize, Vec<(u32, Range<u64>)>> = FxHashMap::default();
    for file in files.iter().take(FILES_MAX) {
        let (info, of) = (&trace.files[*file], &uses[*file]);
        match purpose(&info.path, of) {
            Purpose::Program | Purpose::Output => {}
            Purpose::Scratch => observed.written += 1,
            Purpose::Input if info.size_bytes.is_none_or(|size| size < FILE_BYTES_MIN) => observed.short += 1,
            Purpose::Input => drop(reads.insert(*file, Vec::new())),
        }
    }
    for r in &trace.records {
        let (len, of) = (r.moved_bytes(), reads.get_mut(&(r.file.0 as usize)));
        if let Some(of) = of.filter(|of| r.op == TraceOp::Read && len > 0 && of.len() < READS_MAX) {
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
    use impresario_trace::{Builder, FileInfo, Header, Origin, Record};

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
        let observed = observe(&builder.build());
        assert_eq!((observed.written, observed.short, observed.in_no_order), (1, 2, 1));
        assert_eq!(observed.files.len(), 2);
        let [threads, file] = observed.files.as_slice() else { panic!("{observed:?}") };
        assert_eq!((file.path.as_path(), file.magic.as_deref()), (there.as_path(), Some("0707070707070707")));
        assert_eq!((file.sample.series.len(), file.seen_unix_s), (1, 5));
        assert_eq!((threads.sample.series.len(), threads.magic.as_deref()), (1, None));
        assert_eq!(threads.sample.pieces().next(), Some(65_536..11 * 65_536));
    }
}
