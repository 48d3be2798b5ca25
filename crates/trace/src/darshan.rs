//! Darshan's binary logs, as its runtime library writes them: what a job did with each file.
//!
//! Read are format versions 3.10 to 3.41 as machines with little-endian processors write them: job, names, and the records of
//! the modules POSIX, STDIO and DXT of POSIX. Regions are compressed by zlib or bzip2, or not at all. Every byte is
//! somebody else's: regions are bounded when unpacked, and what is damaged is told in [`Log::notes`] or as an error.

use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a log file at most.
pub const LOG_BYTES_MAX: u64 = 256 << 20;
/// Bytes of one region, unpacked, at most.
const REGION_BYTES_MAX: usize = 256 << 20;
/// Of a longer name the rest is left out.
const NAME_BYTES_MAX: usize = 4096;
const RECORDS_MAX: usize = 1 << 20;
const MAGIC: u64 = 6_567_223;
const FLOATS: usize = 17;

/// Why a log cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DarshanError {
    /// It is something else.
    #[error("not a Darshan log")]
    NotDarshan,
    /// It has been written by a machine with the other order of bytes.
    #[error("a log of a big-endian machine; read it with darshan-dxt-parser")]
    BigEndian,
    /// Its format is older or newer.
    #[error("format version {0:?} is not known (3.10 to 3.41 are); convert it with darshan-convert")]
    Version(String),
    /// It ends early, or a part is damaged.
    #[error("the {0} is cut off or damaged")]
    Damaged(&'static str),
}

/// What was done with one file through one interface; of one process, or of all (`rank` −1).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct FileRecord {
    /// The file's name; all records of the file share it.
    pub path: Arc<str>,
    /// The process, −1 for all of them together.
    pub rank: i64,
    /// Read calls.
    pub reads: u64,
    /// Of these, those that began where the one before ended.
    pub consecutive_reads: u64,
    /// Of these, those that began behind the one before.
    pub forward_reads: u64,
    /// Reads at the four commonest strides.
    pub strided_reads: u64,
    /// Memory maps.
    pub maps: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Time in reads, s; of all processes together.
    pub read_s: f64,
    /// Time in writes, s.
    pub write_s: f64,
    /// Time in opens and other calls, s.
    pub other_s: f64,
}

/// The reads of one file by one process, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TracedReads {
    /// The file's name; all records of the file share it.
    pub path: Arc<str>,
    /// The process.
    pub rank: i64,
    /// What was read.
    pub reads: Vec<Range<u64>>,
}

/// One job's log.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Log {
    /// The job's command line.
    pub command: String,
    /// The batch system's number.
    pub job: i64,
    /// Processes.
    pub processes: u64,
    /// From start to end, s.
    pub seconds: f64,
    /// By file, read and written through POSIX calls.
    pub posix: Vec<FileRecord>,
    /// By file, read and written through the C library's streams.
    pub stdio: Vec<FileRecord>,
    /// Extended tracing of POSIX, where the job had it.
    pub traced: Vec<TracedReads>,
    /// What was left out.
    pub notes: Vec<String>,
}

/// Which module stands where.
struct Layout {
    name_map_at: usize,
    modules: usize,
    stdio: usize,
    traced: usize,
    job_has_parts_of_seconds: bool,
}

impl Layout {
    fn of(version: &str) -> Option<Layout> {
        let known = |name_map_at, modules, stdio, job_has_parts_of_seconds| {
            Some(Layout { name_map_at, modules, stdio, traced: stdio + 1, job_has_parts_of_seconds })
        };
        match version {
            "3.10" => known(24, 16, 7, false),
            "3.20" | "3.21" => known(24, 16, 8, false),
            "3.41" => known(32, 64, 9, true),
            _ => None,
        }
    }

    fn header_bytes(&self) -> usize {
        self.name_map_at + 16 * (1 + self.modules) + 4 * self.modules
    }
}

impl Log {
    /// Reads a log file's bytes.
    pub fn parse(bytes: &[u8]) -> Result<Log, DarshanError> {
        match word(bytes, 8) {
            Some(MAGIC) => {}
            Some(other) if other.swap_bytes() == MAGIC => return Err(DarshanError::BigEndian),
            _ => return Err(DarshanError::NotDarshan),
        }
        let version = text(&bytes[..8]);
        let layout = Layout::of(&version).ok_or(DarshanError::Version(version))?;
        let header = bytes.get(..layout.header_bytes()).ok_or(DarshanError::Damaged("header"))?;
        let map = |i: usize| -> Option<Range<usize>> {
            let at = layout.name_map_at + 16 * i;
            let (start, len) = word(header, at).zip(word(header, at + 8))?;
            let region = usize::try_from(start).ok()?..usize::try_from(start.checked_add(len)?).ok()?;
            Some(region).filter(|region| !region.is_empty())
        };
        let unpack = |region: Option<Range<usize>>| unpack(bytes.get(region?)?, bytes[16]);
        let names_at = map(0).map_or(bytes.len(), |names| names.start);
        let job = unpack(Some(layout.header_bytes()..names_at)).ok_or(DarshanError::Damaged("job record"))?;
        let mut log = Log::default();
        log.take_job(&job.0, &layout).ok_or(DarshanError::Damaged("job record"))?;
        let names = match unpack(map(0)) {
            Some((unpacked, _)) => names(&unpacked),
            None => HashMap::new(),
        };
        let version_of = |module: usize| {
            let at = layout.name_map_at + 16 * (1 + layout.modules) + 4 * module;
            header.get(at..at + 4).map_or(0, |v| u32::from_le_bytes(v.try_into().unwrap_or_default()))
        };
        for (module, name) in [(1, "POSIX"), (layout.stdio, "STDIO"), (layout.traced, "DXT")] {
            let Some(region) = map(1 + module) else { continue };
            let Some((records, is_whole)) = unpack(Some(region)) else {
                log.notes.push(format!("the records of {name} are damaged"));
                continue;
            };
            if !is_whole {
                log.notes.push(format!("only a part of the records of {name} can be read"));
            }
            let version = version_of(module);
            let is_known = match name {
                "POSIX" => files(&records, &names, version, posix).map(|records| log.posix = records),
                "STDIO" => files(&records, &names, version, stdio).map(|records| log.stdio = records),
                _ => (1..=2).contains(&version).then(|| log.traced = traced(&records, &names)),
            };
            if is_known.is_none() {
                log.notes.push(format!("version {version} of the records of {name} is not known"));
            }
        }
        Ok(log)
    }

    fn take_job(&mut self, job: &[u8], layout: &Layout) -> Option<()> {
        let number = |i: usize| word(job, 8 * i).map(|n| n as i64);
        let (start, end, next) = match layout.job_has_parts_of_seconds {
            true => (number(1)? as f64 + number(2)? as f64 / 1e9, number(3)? as f64 + number(4)? as f64 / 1e9, 5),
            // Whole seconds, and the last one counts.
            false => (number(1)? as f64, number(2)? as f64 + 1.0, 3),
        };
        self.seconds = (end - start).max(0.0);
        (self.processes, self.job) = (u64::try_from(number(next)?).ok()?, number(next + 1)?);
        let command = job.get(8 * (next + 2) + 1024..).unwrap_or_default();
        self.command = text(command.split(|b| *b == b'\n').next().unwrap_or_default());
        Some(())
    }
}

/// One or several compressed streams behind one another; and whether all could be unpacked. `None` where nothing could.
fn unpack(packed: &[u8], how: u8) -> Option<(Vec<u8>, bool)> {
    let (mut out, mut rest) = (Vec::new(), packed);
    let mut is_whole = true;
    while !rest.is_empty() && is_whole {
        let room = (REGION_BYTES_MAX - out.len()) as u64;
        let before = (rest.len(), out.len());
        let ended = match how {
            0 => flate2::bufread::ZlibDecoder::new(&mut rest).take(room).read_to_end(&mut out),
            1 => bzip2::bufread::BzDecoder::new(&mut rest).take(room).read_to_end(&mut out),
            2 => std::mem::take(&mut rest).take(room).read_to_end(&mut out),
            _ => return None,
        };
        is_whole = ended.is_ok() && out.len() < REGION_BYTES_MAX && rest.len() < before.0;
    }
    (is_whole || !out.is_empty()).then_some((out, is_whole))
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// Up to the first zero.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}

/// Names of files by their numbers.
fn names(records: &[u8]) -> HashMap<u64, Arc<str>> {
    let (mut names, mut rest) = (HashMap::new(), records);
    while let Some(id) = word(rest, 0).filter(|_| names.len() < RECORDS_MAX) {
        let name = rest[8..].split(|b| *b == 0).next().unwrap_or_default();
        let kept = &name[..name.len().min(NAME_BYTES_MAX)];
        names.insert(id, String::from_utf8_lossy(kept).into());
        rest = rest.get(8 + name.len() + 1..).unwrap_or_default();
    }
    names
}

/// A record's counters and its times.
struct Counted<'a> {
    counters: &'a [u8],
    times: &'a [u8],
}

impl Counted<'_> {
    /// Below zero stands for unknown.
    fn count(&self, i: usize) -> u64 {
        word(self.counters, 8 * i).filter(|n| *n <= i64::MAX as u64).unwrap_or(0)
    }

    fn seconds(&self, i: usize) -> f64 {
        word(self.times, 8 * i).map(f64::from_bits).filter(|s| s.is_finite() && *s > 0.0).unwrap_or(0.0)
    }
}

/// A module's records in one version: how many counters and times each has, and what they mean.
struct Meaning {
    counters: usize,
    times: usize,
    read: fn(&Counted<'_>, version: u32) -> FileRecord,
}

fn files(
    bytes: &[u8],
    names: &HashMap<u64, Arc<str>>,
    version: u32,
    meaning: fn(u32) -> Option<Meaning>,
) -> Option<Vec<FileRecord>> {
    let Meaning { counters, times, read } = meaning(version)?;
    let records = bytes.chunks_exact(16 + 8 * (counters + times)).take(RECORDS_MAX);
    Some(
        records
            .map(|record| {
                let (head, rest) = record.split_at(16);
                let (counters, times) = rest.split_at(8 * counters);
                FileRecord {
                    path: named(names, word(head, 0).unwrap_or(0)),
                    rank: word(head, 8).unwrap_or(0) as i64,
                    ..read(&Counted { counters, times }, version)
                }
            })
            .collect(),
    )
}

fn named(names: &HashMap<u64, Arc<str>>, id: u64) -> Arc<str> {
    names.get(&id).cloned().unwrap_or_else(|| format!("file {id}").into())
}

fn posix(version: u32) -> Option<Meaning> {
    let counters = match version {
        3 => 64,
        4 => 69,
        _ => return None,
    };
    let read = |record: &Counted<'_>, version| {
        // Version 4 counts numbers and copies of descriptors before the reads, and renames before the mode.
        let (early, late) = if version == 3 { (2, 5) } else { (0, 0) };
        FileRecord {
            reads: record.count(3 - early),
            maps: record.count(7 - early),
            read_bytes: record.count(14 - late),
            written_bytes: record.count(15 - late),
            consecutive_reads: record.count(18 - late),
            forward_reads: record.count(20 - late),
            strided_reads: (51..55).map(|i| record.count(i - late)).fold(0, u64::saturating_add),
            read_s: record.seconds(8),
            write_s: record.seconds(9),
            other_s: record.seconds(10),
            ..FileRecord::default()
        }
    };
    Some(Meaning { counters, times: FLOATS, read })
}

fn stdio(version: u32) -> Option<Meaning> {
    let counters = match version {
        1 => 13,
        2 => 14,
        _ => return None,
    };
    let read = |record: &Counted<'_>, version| {
        let early = if version == 1 { 1 } else { 0 };
        FileRecord {
            reads: record.count(2 - early),
            written_bytes: record.count(6 - early),
            read_bytes: record.count(7 - early),
            other_s: record.seconds(0),
            write_s: record.seconds(1),
            read_s: record.seconds(2),
            ..FileRecord::default()
        }
    };
    Some(Meaning { counters, times: 15, read })
}

/// Records of extended tracing: a head of 104 bytes, the writes, the reads.
fn traced(bytes: &[u8], names: &HashMap<u64, Arc<str>>) -> Vec<TracedReads> {
    let (mut all, mut rest) = (Vec::new(), bytes);
    while let Some(head) = rest.get(..104).filter(|_| all.len() < RECORDS_MAX) {
        let count = |at| word(head, at).and_then(|n| usize::try_from(n).ok()?.checked_mul(32));
        let Some((writes, reads)) = count(88).zip(count(96)) else { break };
        let Some(end) = 104usize.checked_add(writes).and_then(|at| at.checked_add(reads)) else { break };
        let Some(segments) = rest.get(104 + writes..end) else { break };
        let read = |segment: &[u8]| {
            let (at, len) = (word(segment, 0)?, word(segment, 8)?);
            Some(at..at.checked_add(len)?).filter(|read| !read.is_empty())
        };
        all.push(TracedReads {
            path: named(names, word(head, 0).unwrap_or(0)),
            rank: word(head, 8).unwrap_or(0) as i64,
            reads: segments.chunks_exact(32).filter_map(read).collect(),
        });
        rest = &rest[end..];
    }
    all
}

/// A writer of small logs, for tests.
#[cfg(any(test, feature = "testing"))]
pub mod writing {
    use std::io::Write;

    use super::{FileRecord, Layout, Log, MAGIC};

    fn words(words: impl IntoIterator<Item = u64>) -> Vec<u8> {
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn pack(bytes: &[u8], how: u8) -> Vec<u8> {
        match how {
            0 => {
                let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
                packed.write_all(bytes).and_then(|()| packed.finish()).expect("memory can be written to")
            }
            1 => {
                let mut packed = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
                packed.write_all(bytes).and_then(|()| packed.finish()).expect("memory can be written to")
            }
            _ => bytes.to_vec(),
        }
    }

    fn record(id: u64, file: &FileRecord, counters: usize, places: &[(usize, u64)], times: &[f64]) -> Vec<u8> {
        let mut counted = vec![0u64; counters];
        places.iter().for_each(|(i, n)| counted[*i] = *n);
        words([id, file.rank as u64].into_iter().chain(counted).chain(times.iter().map(|t| t.to_bits())))
    }

    fn posix(id: u64, file: &FileRecord, version: u32) -> Vec<u8> {
        let (counters, early, late) = if version == 3 { (64, 2, 5) } else { (69, 0, 0) };
        let places = [
            (3 - early, file.reads),
            (7 - early, file.maps),
            (14 - late, file.read_bytes),
            (15 - late, file.written_bytes),
            (18 - late, file.consecutive_reads),
            (20 - late, file.forward_reads),
            (51 - late, file.strided_reads),
        ];
        let mut times = [0.0; 17];
        (times[8], times[9], times[10]) = (file.read_s, file.write_s, file.other_s);
        record(id, file, counters, &places, &times)
    }

    fn stdio(id: u64, file: &FileRecord) -> Vec<u8> {
        let mut times = [0.0; 15];
        (times[0], times[1], times[2]) = (file.other_s, file.write_s, file.read_s);
        record(id, file, 14, &[(2, file.reads), (6, file.written_bytes), (7, file.read_bytes)], &times)
    }

    /// A log in this format version, packed in this way (0 zlib, 1 bzip2, 2 not).
    ///
    /// # Panics
    /// For a version that is not known.
    pub fn write(log: &Log, version: &str, how: u8) -> Vec<u8> {
        let layout = Layout::of(version).expect("a known version");
        let mut job = match layout.job_has_parts_of_seconds {
            true => words([1000, 100, 0, 100 + log.seconds as u64, (log.seconds.fract() * 1e9) as u64]),
            false => words([1000, 100, 99 + log.seconds as u64]),
        };
        job.extend(words([log.processes, log.job as u64]));
        job.resize(job.len() + 1024, 0);
        job.extend(log.command.as_bytes());
        job.extend(b"\next4\t/\n\0");
        let (mut names, mut all) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
        let posix_version = if version == "3.10" { 3 } else { 4 };
        let mut id = 0x1_0000;
        let mut number = |path: &str| {
            id += 1;
            names.extend(words([id]));
            names.extend(path.as_bytes());
            names.push(0);
            id
        };
        log.posix.iter().for_each(|file| all[0].extend(posix(number(&file.path), file, posix_version)));
        log.stdio.iter().for_each(|file| all[1].extend(stdio(number(&file.path), file)));
        for traced in &log.traced {
            all[2].extend(words([number(&traced.path), traced.rank as u64, 0]));
            all[2].extend([b'n'; 64]);
            all[2].extend(words([1, traced.reads.len() as u64, 5, 6, 0, 0]));
            traced.reads.iter().for_each(|r| all[2].extend(words([r.start, r.end - r.start, 0, 0])));
        }
        let mut file = vec![0; layout.header_bytes()];
        file[..version.len()].copy_from_slice(version.as_bytes());
        file[8..16].copy_from_slice(&MAGIC.to_le_bytes());
        file[16] = how;
        file.extend(pack(&job, how));
        let put = |file: &mut Vec<u8>, i: usize, packed: &[u8]| {
            let at = layout.name_map_at + 16 * i;
            let map = words([file.len() as u64, packed.len() as u64]);
            file[at..at + 16].copy_from_slice(&map);
            file.extend(packed);
        };
        put(&mut file, 0, &pack(&names, how));
        for (module, records) in [1, layout.stdio, layout.traced].into_iter().zip(&all) {
            if records.is_empty() {
                continue;
            }
            // Two streams behind one another, as each process of a job writes its own.
            let half = records.len() / 2;
            let packed = [pack(&records[..half], how), pack(&records[half..], how)].concat();
            put(&mut file, 1 + module, &packed);
            let at = layout.name_map_at + 16 * (1 + layout.modules) + 4 * module;
            let version = if module == 1 { posix_version } else { 2 };
            file[at..at + 4].copy_from_slice(&version.to_le_bytes());
        }
        file
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::writing::write;
    use super::*;

    fn log() -> Log {
        let file = |path: &str, rank| FileRecord {
            path: path.into(),
            rank,
            reads: 1000,
            consecutive_reads: 10,
            forward_reads: 990,
            strided_reads: 900,
            maps: 2,
            read_bytes: 65_536_000,
            written_bytes: 5,
            read_s: 12.5,
            write_s: 0.25,
            other_s: 1.5,
        };
        let stream =
            FileRecord { path: "/in/mesh".into(), reads: 7, read_bytes: 900, read_s: 0.5, ..FileRecord::default() };
        let traced = TracedReads { path: "/in/a.h5".into(), rank: 3, reads: vec![0..10, 100..110, 200..210] };
        Log {
            command: "/opt/solver --input a.h5".into(),
            job: 4711,
            processes: 64,
            seconds: 120.0,
            posix: vec![file("/in/a.h5", -1), file("/in/b.h5", 5)],
            stdio: vec![stream],
            traced: vec![traced],
            notes: Vec::new(),
        }
    }

    #[test]
    fn what_is_written_is_read_in_each_version_and_packing() {
        for version in ["3.10", "3.20", "3.21", "3.41"] {
            for how in 0..3 {
                assert_eq!(Log::parse(&write(&log(), version, how)), Ok(log()), "{version} {how}");
            }
        }
    }

    #[test]
    fn other_files_are_refused_by_name() {
        assert_eq!(Log::parse(b""), Err(DarshanError::NotDarshan));
        assert_eq!(Log::parse(&[b'3'; 4000]), Err(DarshanError::NotDarshan));
        let mut old = write(&log(), "3.21", 0);
        old[..4].copy_from_slice(b"2.06");
        assert_eq!(Log::parse(&old), Err(DarshanError::Version("2.06".into())));
        let mut other = write(&log(), "3.21", 0);
        other[8..16].reverse();
        assert_eq!(Log::parse(&other), Err(DarshanError::BigEndian));
        let whole = write(&log(), "3.21", 0);
        assert_eq!(Log::parse(&whole[..300]), Err(DarshanError::Damaged("header")));
        assert_eq!(Log::parse(&whole[..361]), Err(DarshanError::Damaged("job record")));
        let cut = Log::parse(&whole[..whole.len() - 20]).unwrap();
        assert_eq!(cut.notes.len(), 1, "the last module is told to be damaged: {:?}", cut.notes);
        assert_eq!(cut.posix, log().posix);
    }

    #[test]
    fn a_long_name_is_cut_and_kept_once() {
        let mut names_region = 7u64.to_le_bytes().to_vec();
        names_region.extend(vec![b'a'; 1 << 20]);
        names_region.push(0);
        names_region.extend(8u64.to_le_bytes());
        names_region.extend(b"/b\0");
        let names = names(&names_region);
        assert_eq!((names[&7].len(), &*names[&8]), (NAME_BYTES_MAX, "/b"));
        let record = [7u64.to_le_bytes().to_vec(), vec![0; 8 * (1 + 69 + FLOATS)]].concat();
        let records = files(&record.repeat(1000), &names, 4, posix).unwrap();
        assert_eq!((records.len(), Arc::strong_count(&names[&7])), (1000, 1001));
    }

    proptest! {
        #[test]
        fn damaged_logs_do_no_harm(
            version in prop::sample::select(vec!["3.10", "3.21", "3.41"]),
            how in 0u8..3,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..10),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = write(&log(), version, how);
            for (place, value) in changes {
                let i = place.index(bytes.len());
                bytes[i] = value;
            }
            bytes.truncate(cut.index(bytes.len()) + 1 + bytes.len() / 2);
            let _ = Log::parse(&bytes);
        }
    }
}
