//! Predictions from recorded runs: turns traces into predicted queues.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use impresario_foresight::{PredictedQueues, Recorded, part_key};

use crate::codec::EXTENSION;
use crate::combine::average_by_file;
use crate::live::key_of_name;
use crate::{Ending, FileInfo, Header, Reader, Space, Trace, TraceError, TraceOp};

/// Maximum runs averaged.
pub const RUNS_MAX: usize = 16;
/// Maximum traces of a folder looked at; those that cannot be used count.
const LOOKED_AT_MAX: usize = 256;
/// Maximum files of a run looked up on a server before the run counts as one with other files.
const FILES_LOOKED_FOR: usize = 1 << 16;

/// The predicted queues of a trace: its reads and writes, by the files' stable keys, or by name in a trace without
/// keys. If the offsets are those of servers, each server's part of a file is separate.
pub fn predicted_queues(trace: &Trace) -> PredictedQueues {
    predicted_queues_by(trace, |file| if file.key == 0 { key_of_name(&file.path) } else { file.key })
}

/// The same with the caller's keys.
pub fn predicted_queues_by(trace: &Trace, key: impl Fn(&FileInfo) -> u64) -> PredictedQueues {
    let apart = trace.header.space == Space::Lane;
    PredictedQueues::new(trace.records.iter().filter(|r| r.op.is_data()).map(|r| Recorded {
        file: part_key(key(trace.file(r.file)), if apart { r.lane.0 } else { 0 }),
        write: r.op == TraceOp::Write,
        offset: r.offset,
        len: r.len,
        arrival_ns: r.arrival.0,
        completed_ns: r.completion().map(|c| c.0),
        source: r.origin.0,
    }))
}

/// Combines several runs, perhaps of several programs: arrivals and completions are their means (agios-2013, IV.A). A single
/// run is returned unchanged.
pub fn mean_of(mut runs: Vec<Trace>) -> Result<Trace, String> {
    if runs.len() == 1
        && let Some(run) = runs.pop()
    {
        return Ok(run);
    }
    average_by_file(&runs).map(|mean| mean.trace)
}

/// A new file name for a server's next trace in a folder: one that [`RunsOf`] finds, with numbers that rise with time.
pub fn next_trace(folder: &Path, server: &str, unix_ms: u128) -> PathBuf {
    // Another one may have begun in the same millisecond.
    let mut number = unix_ms;
    loop {
        let path = folder.join(format!("{server}-{number}.{EXTENSION}"));
        match path.try_exists() {
            Ok(true) => number += 1,
            _ => return path,
        }
    }
}

/// The server whose earlier runs are loaded.
pub struct RunsOf<'a> {
    /// Its name, which its traces have as their command.
    pub server: &'a str,
    /// The address space of its offsets.
    pub space: Space,
    /// Whether it holds part of a file.
    pub holds: &'a dyn Fn(u64) -> bool,
}

/// Earlier runs of a server.
#[derive(Debug)]
pub struct EarlierRuns {
    /// The prediction.
    pub queues: PredictedQueues,
    /// The traces it came from.
    pub traces: Vec<PathBuf>,
    /// Traces in folders that were skipped, and why.
    pub passed_over: Vec<String>,
}

impl RunsOf<'_> {
    /// Loads traces of earlier runs: files, and folders, from which the newest traces of this server are taken.
    /// Of a folder at most 256 are looked at, of all together at most [`RUNS_MAX`] loaded, with at most
    /// [`PredictedQueues::REQUESTS_MAX`] reads and writes. A named trace must be complete and of this server; in a folder,
    /// others are skipped.
    pub fn load<P: AsRef<Path>>(&self, paths: &[P]) -> Result<EarlierRuns, TraceError> {
        let (mut runs, mut traces, mut passed_over) = (Vec::new(), Vec::new(), Vec::new());
        let mut room = PredictedQueues::REQUESTS_MAX;
        for path in paths.iter().map(AsRef::as_ref) {
            let folder = path.is_dir();
            let files = if folder { self.newest(path)? } else { vec![path.into()] };
            let (before, passed) = (runs.len(), passed_over.len());
            if before == RUNS_MAX {
                let reason =
                    format!("before it {RUNS_MAX} runs are named, the most; merge some (impresario trace merge)");
                return Err(TraceError::file(path, reason));
            }
            for file in files.into_iter().take(LOOKED_AT_MAX) {
                if runs.len() == RUNS_MAX {
                    break;
                }
                match self.run(&file, room) {
                    Ok(run) => {
                        room -= run.records.len();
                        runs.push(run);
                        traces.push(file);
                    }
                    Err(why) if folder => passed_over.push(why.to_string()),
                    Err(why) => return Err(why),
                }
            }
            if folder && runs.len() == before {
                let why = match passed_over.get(passed) {
                    Some(first) => format!("none of the traces of {} in it can be used: {first}", self.server),
                    None => format!(
                        "it holds no trace of {server}; record a run (impresario trace start, stop), whose file is named \
                         {server}-NUMBER.{EXTENSION}",
                        server = self.server
                    ),
                };
                return Err(TraceError::file(path, why));
            }
        }
        let first = paths.first().map_or(Path::new(""), AsRef::as_ref);
        let mean = mean_of(runs).map_err(|why| TraceError::file(first, why))?;
        let queues = predicted_queues(&mean);
        if queues.is_empty() {
            let why = "the runs have too little in common: no request is in more than half of those with its file";
            return Err(TraceError::file(first, why));
        }
        Ok(EarlierRuns { queues, traces, passed_over })
    }

    /// The traces of this server in a folder, by name, newest first.
    fn newest(&self, folder: &Path) -> Result<Vec<PathBuf>, TraceError> {
        let number = |path: &Path| -> Option<u64> {
            let name = path.file_name()?.to_str()?.strip_prefix(self.server)?.strip_prefix('-')?;
            name.strip_suffix(EXTENSION)?.strip_suffix('.')?.parse().ok()
        };
        let entries = std::fs::read_dir(folder).map_err(|e| TraceError::io(folder, e))?;
        let mut found: Vec<(u64, PathBuf)> =
            entries.flatten().filter_map(|entry| Some((number(&entry.path())?, entry.path()))).collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        Ok(found.into_iter().map(|(_, path)| path).collect())
    }

    /// Reads a whole trace of this server with at most `requests_max` reads and writes.
    fn run(&self, path: &Path, requests_max: usize) -> Result<Trace, TraceError> {
        let refuse = |why: String| Err(TraceError::file(path, why));
        let again = "record the run again (impresario trace start, stop)";
        let mut reader = Reader::new(open(path)?, path)?;
        let Header { command, space, .. } = reader.header();
        if command != self.server || *space != self.space {
            let by = if command.is_empty() { "another program" } else { command };
            let how = if *space == self.space { "" } else { " with other offsets" };
            let server = self.server;
            return refuse(format!("it was recorded by {by}{how}, not by {server}; name a trace that {server} wrote"));
        }
        let mut records = Vec::new();
        while let Some(record) = reader.next_record()? {
            if !record.op.is_data() || record.len == 0 {
                continue;
            }
            if records.len() == requests_max {
                return refuse(format!(
                    "the runs have more than {} reads and writes, the most that are kept in memory; record a shorter part",
                    PredictedQueues::REQUESTS_MAX
                ));
            }
            records.push(record);
        }
        match reader.ending() {
            Some(Ending::Closed) if records.is_empty() => return refuse(format!("it has no reads or writes; {again}")),
            Some(Ending::Closed) => {}
            _ => {
                return refuse(
                    "its end is missing: it is still being written, was cut short, or its writer was killed; stop that \
                     trace first, or keep what there is with `impresario trace convert`"
                        .into(),
                );
            }
        }
        let trace = Trace::of(reader, records);
        let known = trace.files.iter().take(FILES_LOOKED_FOR).any(|file| (self.holds)(file.key));
        if !known {
            let (files, server) = (trace.files.len(), self.server);
            return refuse(format!(
                "{server} holds none of its files ({files}); {again} with the files that are there now"
            ));
        }
        Ok(trace)
    }
}

/// Opens a regular file; anything else could block, or have no end.
fn open(path: &Path) -> Result<File, TraceError> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|e| TraceError::io(path, e))?;
    let is_file = file.metadata().map_err(|e| TraceError::io(path, e))?.is_file();
    if is_file { Ok(file) } else { Err(TraceError::file(path, "it is not a regular file; name a trace")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{read_at, varied};

    fn of(server: &str) -> RunsOf<'_> {
        RunsOf { server, space: Space::Lane, holds: &|key| key == 77 }
    }

    /// As written by data.0: reads of 4 KiB of file 77, each `later` ns later than in the run before.
    fn run(requests: u64, later: u64) -> Trace {
        let header = Header { command: "data.0".into(), space: Space::Lane, ..Header::default() };
        let mut builder = crate::Builder::new(header);
        let key = 77;
        let file = builder.file(FileInfo { key, ..FileInfo::default() }).unwrap();
        builder.origin(Default::default()).unwrap();
        (0..requests).for_each(|i| {
            builder.push(read_at(file.0, i * 4096, 4096, i * (1_000_000 + later), Some(1000))).unwrap();
        });
        builder.build()
    }

    #[test]
    fn runs_become_predicted_queues() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        run(100, 0).save(path("data.0-100.imt")).unwrap();
        run(100, 500).save(path("data.0-99.imt")).unwrap();
        run(100, 0).save(path("data.0-x.imt")).unwrap();
        run(100, 0).save(path("data.01-100.imt")).unwrap();
        let runs = of("data.0").load(&[path("data.0-100.imt")]).unwrap();
        assert_eq!((runs.queues.len(), runs.queues.files(), runs.traces.len()), (100, 1, 1));
        assert!(runs.queues.knows(77, false));
        // From a folder, the traces with this server's names, newest first; their mean.
        let runs = of("data.0").load(&[folder.path()]).unwrap();
        assert_eq!(runs.traces, [path("data.0-100.imt"), path("data.0-99.imt")]);
        let at = runs.queues.find((77, false), (99 * 4096, 4096), 99 * 1_000_250, (0, 0.0)).unwrap();
        assert_eq!(runs.queues.arrival_ns(at), 99 * 1_000_250);
        // An incomplete trace there is skipped and reported.
        let bytes = std::fs::read(path("data.0-100.imt")).unwrap();
        std::fs::write(path("data.0-101.imt"), &bytes[..bytes.len() - 3]).unwrap();
        let runs = of("data.0").load(&[folder.path()]).unwrap();
        assert_eq!((runs.traces.len(), runs.passed_over.len()), (2, 1));
        assert!(runs.passed_over[0].contains("data.0-101.imt: its end is missing"), "{:?}", runs.passed_over);
    }

    /// The same requests of another file.
    fn of_file(key: u64, run: Trace) -> Trace {
        let mut run = run;
        run.files[0].key = key;
        run
    }

    #[test]
    fn runs_of_several_programs_are_all_foretold() {
        let folder = tempfile::tempdir().unwrap();
        let load = || {
            let of = RunsOf { server: "data.0", space: Space::Lane, holds: &|_| true };
            let queues = of.load(&[folder.path()]).unwrap().queues;
            (queues.len(), queues.knows(77, false), queues.knows(78, false))
        };
        run(100, 0).save(folder.path().join("data.0-1.imt")).unwrap();
        of_file(78, run(50, 0)).save(folder.path().join("data.0-2.imt")).unwrap();
        assert_eq!(load(), (150, true, true));
        run(100, 500).save(folder.path().join("data.0-3.imt")).unwrap();
        assert_eq!(load(), (150, true, true));
        // What only one of three runs with the file has is left out.
        run(101, 0).save(folder.path().join("data.0-4.imt")).unwrap();
        assert_eq!(load(), (150, true, true));
    }

    #[test]
    fn traces_that_cannot_be_used_hide_none_that_can() {
        let folder = tempfile::tempdir().unwrap();
        let save = |number: usize, run: Trace| run.save(folder.path().join(format!("data.0-{number}.imt"))).unwrap();
        save(0, run(100, 0));
        (1..=RUNS_MAX + 1).for_each(|number| save(number, run(0, 0)));
        let runs = of("data.0").load(&[folder.path()]).unwrap();
        assert_eq!((runs.queues.len(), runs.traces.len(), runs.passed_over.len()), (100, 1, RUNS_MAX + 1));
        // Not without end.
        (RUNS_MAX + 2..=LOOKED_AT_MAX).for_each(|number| save(number, run(0, 0)));
        let told = of("data.0").load(&[folder.path()]).unwrap_err().to_string();
        assert!(told.contains("none of the traces of data.0"), "{told}");
        // The newest that can be used are taken.
        (0..RUNS_MAX).for_each(|number| save(1000 + number, run(100, 0)));
        let runs = of("data.0").load(&[folder.path()]).unwrap();
        assert_eq!((runs.traces.len(), runs.passed_over.len()), (RUNS_MAX, 0));
    }

    /// Each error names the file, the problem and the remedy.
    #[test]
    fn unusable_runs_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let whole = run(20_000, 0);
        whole.save(path("good.imt")).unwrap();
        assert_eq!(of("data.0").load(&[path("good.imt")]).unwrap().queues.len(), 20_000);
        let bytes = std::fs::read(path("good.imt")).unwrap();
        std::fs::write(path("cut.imt"), &bytes[..bytes.len() - 3]).unwrap();
        std::fs::write(path("half.imt"), &bytes[..bytes.len() / 2]).unwrap();
        std::fs::write(path("short.imt"), &bytes[..12]).unwrap();
        std::fs::write(path("none.imt"), "").unwrap();
        let mut wrong = bytes.clone();
        wrong[bytes.len() / 2] ^= 0x55;
        std::fs::write(path("wrong.imt"), &wrong).unwrap();
        wrong.clone_from(&bytes);
        wrong[7] = 9;
        std::fs::write(path("later.imt"), &wrong).unwrap();
        std::fs::write(path("text.imt"), "hello, this is no trace").unwrap();
        varied().save(path("program.imt")).unwrap();
        run(0, 0).save(path("empty.imt")).unwrap();
        let mut other = run(3, 0);
        other.files[0].key = 78;
        other.save(path("other.imt")).unwrap();
        let mut offsets = run(3, 0);
        offsets.header.space = Space::File;
        offsets.save(path("offsets.imt")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, path("fifo.imt"), rustix::fs::Mode::RWXU).unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        for (name, wanted) in [
            ("cut.imt", "its end is missing"),
            ("half.imt", "its end is missing"),
            ("short.imt", "not a whole trace"),
            ("none.imt", "not a whole trace"),
            ("wrong.imt", "at byte"),
            ("later.imt", "version 9"),
            ("text.imt", "it is not a trace"),
            ("missing.imt", "No such file"),
            ("program.imt", "recorded by analyse --all"),
            ("offsets.imt", "with other offsets"),
            ("empty.imt", "no reads or writes"),
            ("other.imt", "holds none of its files"),
            ("fifo.imt", "it is not a regular file"),
            ("folder", "holds no trace of data.0"),
        ] {
            let told = of("data.0").load(&[path("good.imt"), path(name)]).unwrap_err().to_string();
            assert!(told.contains(name) && told.contains(wanted), "{name}: {told}");
        }
        let told = of("data.1").load(&[path("good.imt")]).unwrap_err().to_string();
        assert!(told.contains("recorded by data.0, not by data.1; name a trace that data.1 wrote"), "{told}");
        let many = vec![path("good.imt"); RUNS_MAX + 1];
        assert!(of("data.0").load(&many).unwrap_err().to_string().contains("merge some"));
        // Each is read completely before use, and the limit is for all together.
        let most = run(PredictedQueues::REQUESTS_MAX as u64, 0);
        most.save(path("most.imt")).unwrap();
        assert_eq!(of("data.0").load(&[path("most.imt")]).unwrap().queues.len(), most.records.len());
        let told = of("data.0").load(&[path("most.imt"), path("good.imt")]).unwrap_err().to_string();
        assert!(told.contains("good.imt: the runs have more than 1048576 reads and writes"), "{told}");
    }

    /// Servers' parts of one file are separate if offsets are theirs.
    #[test]
    fn parts_of_a_file_are_separated_by_lane() {
        let mut trace = run(2, 0);
        trace.records[1].lane = impresario_sched::LaneId(3);
        trace.records[1].offset = 0;
        let queues = predicted_queues(&trace);
        assert_eq!((queues.len(), queues.files()), (2, 2));
        assert!(queues.knows(77, false) && queues.knows(part_key(77, 3), false));
        trace.header.space = Space::File;
        assert_eq!(predicted_queues(&trace).files(), 1);
    }
}
