//! What guided I/O could be worth to the programs of a site, told from their Darshan logs without running anything.
//!
//! A program gains the time that it waits for reads which can be foreseen, as far as it computes meanwhile. Both are in the
//! logs: times by file, and how the reads of a file follow one another. With extended tracing the reads themselves are given
//! to the same [`Detector`] that guided I/O uses; without, reads at a file's commonest strides count. What is told is
//! the most that overlap can save, not a promise: a device that is busy all the time saves nothing.

use std::collections::BTreeMap;
use std::path::Path;

use impresario_foresight::{Detector, Forecast, STREAMS_MAX};
use impresario_trace::darshan::{FileRecord, Log};
use serde::Serialize;

/// Reads of one log that are replayed at most.
const REPLAYED_MAX: usize = 1 << 20;
/// Gaps that are cheaper to read than to leave out.
const GAP_BYTES: u64 = 64 << 10;
/// A program that waits for less of its time cannot profit.
const WAITS_MIN: f64 = 0.01;
/// Reads faster than this come from memory, bytes a second.
const MEMORY_BYTES_PER_S: f64 = 3e9;
/// Programs that are told of, at most.
const PROGRAMS_MAX: usize = 100_000;

/// How reads follow one another, as shares of all.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Shares {
    /// Begin where the one before ended: the kernel reads ahead.
    pub straight_on: f64,
    /// At a stride, or otherwise foreseen.
    pub foreseen: f64,
    /// Neither.
    pub unforeseen: f64,
}

/// One program.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Surveyed {
    /// The name of its executable; of an interpreter, the script's.
    pub program: String,
    /// Logs of it.
    pub runs: u64,
    /// Time of all its processes, s.
    pub process_s: f64,
    /// Of this, in reads.
    pub reading_s: f64,
    /// In writes.
    pub writing_s: f64,
    /// In opens and other calls.
    pub other_io_s: f64,
    /// Read calls.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// A read call's mean, bytes.
    pub mean_read_bytes: u64,
    /// How its reads follow one another, by time.
    pub shares: Shares,
    /// Whether its reads themselves were recorded (extended tracing), at least in part.
    pub traced: bool,
    /// The most that can be saved of its time, percent.
    pub gain_percent: f64,
    /// The most that can be saved of all its runs, s of a process.
    pub gain_s: f64,
    /// Why so much, or so little.
    pub why: String,
    #[serde(skip)]
    mapped: u64,
    #[serde(skip)]
    times: Times,
}

/// Time in reads by how they follow one another, s.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Times {
    straight_on: f64,
    foreseen: f64,
    unforeseen: f64,
}

/// All logs of a site.
#[derive(Debug, Default)]
pub struct Survey {
    programs: BTreeMap<String, Surveyed>,
}

impl Survey {
    /// Takes one job's log.
    pub fn add(&mut self, log: &Log) {
        let words = log.command.split_whitespace();
        let program = crate::learn::program_of(words).unwrap_or_else(|| first_word(&log.command));
        if self.programs.len() >= PROGRAMS_MAX && !self.programs.contains_key(&program) {
            return;
        }
        let entry = self.programs.entry(program.clone()).or_insert_with(|| Surveyed { program, ..Surveyed::default() });
        entry.runs += 1;
        entry.process_s += log.seconds * log.processes as f64;
        let replayed = replay(log);
        for file in log.posix.iter().chain(&log.stdio) {
            entry.reading_s += file.read_s;
            entry.writing_s += file.write_s;
            entry.other_io_s += file.other_s;
            entry.reads = entry.reads.saturating_add(file.reads);
            entry.read_bytes = entry.read_bytes.saturating_add(file.read_bytes);
            entry.mapped = entry.mapped.saturating_add(file.maps);
        }
        for file in &log.posix {
            let seen = replayed.get(&*file.path).copied();
            entry.traced |= seen.is_some();
            let shares = seen.unwrap_or_else(|| shares_of(file));
            // What the kernel has in memory costs no wait, however it is read.
            let waits_s = if file.read_bytes as f64 > file.read_s * MEMORY_BYTES_PER_S { 0.0 } else { file.read_s };
            entry.times.straight_on += waits_s * shares.straight_on;
            entry.times.foreseen += waits_s * shares.foreseen;
            entry.times.unforeseen += waits_s * shares.unforeseen;
        }
        // Streams of the C library read whole buffers, one after the other or where the program seeks to; which is not told.
        entry.times.straight_on += log.stdio.iter().map(|file| file.read_s).sum::<f64>();
    }

    /// All programs, those first that can save most.
    pub fn ranked(self) -> Vec<Surveyed> {
        let mut programs: Vec<Surveyed> = self.programs.into_values().map(Surveyed::judged).collect();
        programs.sort_by(|a, b| b.gain_s.total_cmp(&a.gain_s).then_with(|| b.process_s.total_cmp(&a.process_s)));
        programs
    }
}

impl Surveyed {
    fn judged(mut self) -> Surveyed {
        let Times { straight_on, foreseen, unforeseen } = self.times;
        let all = straight_on + foreseen + unforeseen;
        let share = |part: f64| if all > 0.0 { part / all } else { 0.0 };
        self.shares =
            Shares { straight_on: share(straight_on), foreseen: share(foreseen), unforeseen: share(unforeseen) };
        self.mean_read_bytes = self.read_bytes.checked_div(self.reads).unwrap_or(0);
        let of_time = |s: f64| if self.process_s > 0.0 { s / self.process_s } else { 0.0 };
        let io_s = self.reading_s + self.writing_s + self.other_io_s;
        let computing_s = (self.process_s - io_s).max(0.0);
        // What is foreseen comes while the program computes, and not faster.
        self.gain_s = foreseen.min(computing_s);
        self.gain_percent = 100.0 * of_time(self.gain_s);
        let percent = |s: f64| 100.0 * of_time(s);
        self.why = if self.reads == 0 && self.mapped > 0 {
            "maps its files into memory, where Darshan counts nothing: record a run".into()
        } else if self.reads == 0 {
            "reads nothing".into()
        } else if of_time(self.reading_s) < WAITS_MIN {
            self.gain_s = 0.0;
            self.gain_percent = 0.0;
            format!("waits {:.1} % of its time for reads", percent(self.reading_s))
        } else if all < self.reading_s * 0.1 {
            "reads from memory".into()
        } else if self.gain_s * 2.0 < foreseen {
            format!("computes only {:.0} % of its time: reads cannot come meanwhile", percent(computing_s))
        } else if self.shares.foreseen >= 0.1 {
            let by = if self.traced { "as its traced reads show" } else { "by their strides" };
            format!(
                "waits {:.0} % of its time for reads, of which {:.0} % can be foreseen {by}",
                percent(self.reading_s),
                100.0 * self.shares.foreseen
            )
        } else if self.shares.straight_on >= self.shares.unforeseen {
            "reads straight on, which the kernel's read-ahead serves; worth a trial where a request takes long".into()
        } else {
            "reads in no order that the log shows: `assist learn` or a file's index may know it".into()
        };
        self
    }
}

fn first_word(command: &str) -> String {
    let word = command.split_whitespace().next().unwrap_or("unknown");
    Path::new(word).file_name().map_or_else(|| word.to_string(), |name| name.to_string_lossy().into_owned())
}

/// By counters: reads at the commonest strides are foreseen.
fn shares_of(file: &FileRecord) -> Shares {
    if file.reads == 0 {
        return Shares::default();
    }
    let reads = file.reads as f64;
    let straight_on = (file.consecutive_reads as f64 / reads).min(1.0);
    // A stride of a file that is read straight on is counted, too.
    let foreseen = (file.strided_reads as f64 / reads - straight_on).clamp(0.0, 1.0 - straight_on);
    Shares { straight_on, foreseen, unforeseen: 1.0 - straight_on - foreseen }
}

/// By the reads themselves, for each file that was traced.
fn replay(log: &Log) -> BTreeMap<&str, Shares> {
    let (mut counts, mut left): (BTreeMap<&str, [u64; 3]>, _) = (BTreeMap::new(), REPLAYED_MAX);
    for traced in &log.traced {
        let count = counts.entry(&*traced.path).or_default();
        let (mut detector, mut end) = (Detector::default(), u64::MAX);
        let mut forecasts: [Option<Forecast>; STREAMS_MAX] = Default::default();
        for read in traced.reads.iter().take(left) {
            let is_foreseen = || forecasts.iter().flatten().any(|forecast| forecast.touches(read));
            let which = if read.start == end { 0 } else { 2 - usize::from(is_foreseen()) };
            count[which] += 1;
            end = read.end;
            let seen = detector.observe(read, GAP_BYTES);
            forecasts[seen.stream] = seen.forecast.cloned();
        }
        left = left.saturating_sub(traced.reads.len());
    }
    let shares = |[straight_on, foreseen, unforeseen]: [u64; 3]| {
        let all = (straight_on + foreseen + unforeseen).max(1) as f64;
        Shares {
            straight_on: straight_on as f64 / all,
            foreseen: foreseen as f64 / all,
            unforeseen: unforeseen as f64 / all,
        }
    };
    counts.into_iter().filter(|(_, c)| c.iter().sum::<u64>() > 0).map(|(path, c)| (path, shares(c))).collect()
}

#[cfg(test)]
mod tests {
    use impresario_trace::darshan::TracedReads;

    use super::*;

    fn log(command: &str, file: FileRecord, traced: Vec<TracedReads>) -> Log {
        let file = FileRecord { path: "/in/a".into(), rank: -1, ..file };
        Log { command: command.into(), processes: 4, seconds: 100.0, posix: vec![file], traced, ..Log::default() }
    }

    fn reads(reads: u64, straight_on: u64, strided: u64, read_s: f64) -> FileRecord {
        FileRecord {
            reads,
            consecutive_reads: straight_on,
            strided_reads: strided,
            read_bytes: reads * 65_536,
            read_s,
            ..FileRecord::default()
        }
    }

    #[track_caller]
    fn surveyed(logs: &[Log]) -> Vec<Surveyed> {
        let mut survey = Survey::default();
        logs.iter().for_each(|log| survey.add(log));
        survey.ranked()
    }

    #[test]
    fn programs_are_ranked_by_what_overlap_can_save() {
        let ranked = surveyed(&[
            log("/opt/straight a", reads(10_000, 9_990, 0, 120.0), Vec::new()),
            log("/opt/strided a", reads(10_000, 0, 9_000, 120.0), Vec::new()),
            log("/opt/strided b", reads(10_000, 0, 9_000, 40.0), Vec::new()),
            log("python3 /home/u/scan.py", reads(10_000, 0, 8_000, 200.0), Vec::new()),
        ]);
        let told: Vec<_> = ranked.iter().map(|p| (p.program.as_str(), p.runs, p.gain_s.round())).collect();
        assert_eq!(told, [("scan.py", 1, 160.0), ("strided", 2, 144.0), ("straight", 1, 0.0)]);
        assert_eq!(ranked[1].gain_percent, 18.0);
        assert!(ranked[1].why.contains("90 % can be foreseen by their strides"), "{}", ranked[1].why);
        assert!(ranked[2].why.contains("read-ahead"), "{}", ranked[2].why);
    }

    #[test]
    fn what_cannot_profit_is_told_with_the_reason() {
        let why = |file: FileRecord| {
            let one = surveyed(&[log("x", file, Vec::new())]).remove(0);
            assert_eq!(one.gain_percent.round(), 0.0, "{one:?}");
            one.why
        };
        assert!(why(FileRecord::default()).contains("reads nothing"));
        assert!(why(FileRecord { maps: 3, ..FileRecord::default() }).contains("maps its files"));
        assert!(why(reads(1000, 0, 1000, 1.0)).contains("waits 0.2 %"));
        assert!(why(FileRecord { read_bytes: 1 << 40, ..reads(1000, 0, 900, 50.0) }).contains("from memory"));
        assert!(why(reads(1000, 0, 0, 50.0)).contains("no order"));
        assert!(why(FileRecord { other_s: 299.0, ..reads(1000, 0, 1000, 101.0) }).contains("computes only 0 %"));
    }

    #[test]
    fn traced_reads_are_foreseen_as_guided_io_would() {
        // Three pieces of a row, then the next row: no single stride.
        let at = (0..300u64).map(|i| i / 3 * 10_000_000 + [0, 900_000, 1_500_000][i as usize % 3]);
        let traced = TracedReads { path: "/in/a".into(), rank: 0, reads: at.map(|at| at..at + 4096).collect() };
        let ranked = surveyed(&[log("rows", reads(300, 0, 0, 60.0), vec![traced])]);
        assert!(ranked[0].traced && ranked[0].shares.foreseen > 0.85, "{ranked:?}");
    }

    #[test]
    fn each_process_of_a_traced_file_counts_by_its_traced_reads() {
        let at = (0..300u64).map(|i| i / 3 * 10_000_000 + [0, 900_000, 1_500_000][i as usize % 3]);
        let traced = TracedReads { path: "/in/a".into(), rank: 0, reads: at.map(|at| at..at + 4096).collect() };
        let mut log = log("rows", reads(300, 0, 0, 30.0), vec![traced]);
        log.posix.push(log.posix[0].clone());
        let ranked = surveyed(&[log]);
        assert!(ranked[0].traced && ranked[0].shares.foreseen > 0.85, "{ranked:?}");
    }
}
