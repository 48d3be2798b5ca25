//! From a recorded run to hints: what would have made it faster, and why.
//!
//! Each file that was read is looked at by itself: how it is read ([`Pattern`]), which hints may suit that, and how long
//! the reads would have taken with each of them, by replaying them on a model of the device ([`Device`]). The best is
//! chosen if it saves enough; at last the whole run is replayed with all that were chosen. A plan that saves nothing
//! says why. What a plan expects is never more than perfect overlap of computing and reading allows.

mod candidates;
mod device;
mod index;
mod probe;
mod recorded;
mod replay;
mod tell;
#[cfg(test)]
mod tests;

use std::path::Path;

use impresario_base::units::show_ns;
use impresario_foresight::Run;
use impresario_trace::{Trace, TraceOp, stats};
use rustc_hash::FxHashMap;
use serde::Serialize;

pub use device::Device;
pub use impresario_foresight::{Kind, Part, Pattern, Phase};
pub use probe::probe;

use crate::config::{Entry, Hints, StandDown};
use crate::formats::Index;
use crate::judge::PLAIN_GAIN_PERCENT;
use candidates::{Candidate, Way, candidates};
use index::Indexes;
use recorded::bound_ns;
pub(crate) use recorded::run_of;
pub(crate) use replay::{Entries, Hinted, replay_judged};
use replay::{Outcome, replay};

/// Reads of one file that are looked at, at most; the first ones stand for the rest.
const FILE_READS_MAX: usize = 200_000;
/// Of these, reads that each candidate is replayed with.
const TRY_READS_MAX: usize = 30_000;
/// Reads of the whole run that are replayed at last, at most.
const RUN_READS_MAX: usize = 2_000_000;
/// Files that are looked at, at most: those that were waited for longest.
const FILES_MAX: usize = 2_000;
/// Hints for this many files of one folder become one for the folder.
const FOLDER_FILES: usize = 8;

/// How to plan.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device that the next run reads from.
    pub device: Device,
    /// Memory for the page cache in the replay, bytes. Default: 1 GiB.
    pub memory_bytes: u64,
    /// What the hints may keep in memory for one program and file, bytes. Default: 64 MiB.
    pub window_bytes_max: u64,
    /// What hints must save, as a part of the run time. Default: 0.03.
    pub gain_min: f64,
    /// Plan for a cold cache even if the recorded run read from memory. Default: false.
    pub assume_cold: bool,
}

impl Options {
    /// The defaults for a device.
    pub fn new(device: Device) -> Options {
        Options { device, memory_bytes: 1 << 30, window_bytes_max: 64 << 20, gain_min: 0.03, assume_cold: false }
    }
}

/// What a replay says, without and with hints.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Expected {
    /// Run time without hints, s.
    pub without_s: f64,
    /// Run time with hints, s.
    pub with_s: f64,
    /// The least run time that any hints could give, s.
    pub bound_s: f64,
    /// Requests to the device without hints.
    pub requests_without: u64,
    /// Requests to the device with hints.
    pub requests_with: u64,
    /// Bytes read from the device with hints that no read wants.
    pub wasted_bytes: u64,
}

impl Expected {
    /// The part of the run time that is saved, 0 to 1.
    pub fn gain(&self) -> f64 {
        if self.without_s <= 0.0 { 0.0 } else { (1.0 - self.with_s / self.without_s).clamp(0.0, 1.0) }
    }
}

/// What the file is to the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Only read.
    Input,
    /// Only written.
    Output,
    /// Both.
    Scratch,
    /// A shared library that is mapped, or a file of the system.
    Program,
}

/// What was found out about a file.
#[derive(Clone, Debug, Serialize)]
pub struct FilePlan {
    /// Its path.
    pub path: String,
    /// What it is to the program.
    pub purpose: Purpose,
    /// How it is read.
    pub pattern: Pattern,
    /// Its reads alone, without and with hints.
    pub expected: Option<Expected>,
    /// The hints, or none.
    pub entry: Option<Entry>,
    /// Why these, or why none, in a sentence.
    pub why: String,
}

/// A plan.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The hints file, with no entry when nothing is to be gained.
    pub hints: Hints,
    /// Of each file that was read, those waited for longest first.
    pub files: Vec<FilePlan>,
    /// The whole run. `None` when no hint was found.
    pub expected: Option<Expected>,
    /// Why no hints are given at all, in a sentence.
    pub refused: Option<String>,
    /// The device that was assumed.
    pub device: String,
}

impl Plan {
    /// For people: what was seen, each hint with its reason and gain.
    pub fn text(&self) -> String {
        tell::text(self)
    }
}

/// Plans hints for the next run of what was recorded.
pub fn plan(trace: &Trace, options: &Options) -> Plan {
    let device = &options.device;
    let mut plan = Plan {
        hints: Hints { device: device.cost(), ..Hints::default() },
        files: Vec::new(),
        expected: None,
        refused: None,
        device: device.source.clone(),
    };
    let uses = uses(trace);
    let whole = run_of(trace, device, |file| uses[file].reads > 0, RUN_READS_MAX);
    let mapped = mapped_only(trace, &uses);
    if whole.reads == 0 {
        plan.refused = Some(match mapped.is_empty() {
            true => "The trace holds no reads, and hints are about reading.".into(),
            false => MAPPED.into(),
        });
        plan.files = mapped;
        return plan;
    }
    let mut order: Vec<usize> = (0..uses.len()).filter(|f| uses[*f].reads > 0).collect();
    order.sort_by_key(|f| std::cmp::Reverse((uses[*f].waited_ns, uses[*f].bytes)));
    order.truncate(FILES_MAX);
    if let Some(reason) = nothing_to_gain(&whole, options) {
        for file in order {
            plan.files.push(seen_only(trace, &whole, file, &uses[file], &reason));
        }
        plan.files.extend(mapped);
        plan.refused = Some(reason);
        return plan;
    }
    let (mut chosen, mut indexes) = (Vec::new(), Indexes::default());
    for file in order {
        let (told, index) = one_file(trace, file, &uses[file], options, &mut indexes);
        if let Some(entry) = &told.entry {
            chosen.push(Chosen { file, entry: entry.clone(), index });
        }
        plan.files.push(told);
    }
    decide(&mut plan, &whole, chosen, options);
    plan.files.extend(mapped);
    plan
}

/// Hints that suit a file.
struct Chosen {
    file: usize,
    entry: Entry,
    index: Option<Index>,
}

/// Replays the whole run with all hints and writes them down, if they pay together as well.
fn decide(plan: &mut Plan, whole: &Run, chosen: Vec<Chosen>, options: &Options) {
    if chosen.is_empty() {
        // Files come in the order of the time waited for them; the program's own files are left out.
        let data = plan.files.iter().find(|f| f.purpose != Purpose::Program).or(plan.files.first());
        let best = data.map(|f| f.why.as_str()).unwrap_or_default();
        plan.refused = Some(format!("No hint would save {:.0} % of the run time. {best}", 100.0 * options.gain_min));
        return;
    }
    let entries: Entries =
        chosen.iter().map(|c| (c.file, Hinted { entry: &c.entry, index: c.index.as_ref(), learnt: None })).collect();
    let expected = expect(whole, options, &entries);
    if expected.gain() < options.gain_min {
        plan.refused = Some(format!(
            "The hints that suit single files would save {:.1} % of the whole run time: less than {:.0} %.",
            100.0 * expected.gain(),
            100.0 * options.gain_min
        ));
        plan.files.iter_mut().for_each(|f| f.entry = None);
        return;
    }
    plan.expected = Some(expected);
    let entries: Vec<Entry> = chosen.into_iter().map(|chosen| chosen.entry).collect();
    (plan.hints.file, plan.hints.directory) = by_folder(entries);
    plan.hints.why = Some(tell::whole(&expected, &plan.device));
}

/// What a trace says of the use of each file.
#[derive(Clone, Copy, Default)]
pub(crate) struct Use {
    pub(crate) reads: u64,
    pub(crate) bytes: u64,
    writes: u64,
    maps: u64,
    waited_ns: u64,
}

pub(crate) fn uses(trace: &Trace) -> Vec<Use> {
    let mut uses = vec![Use::default(); trace.files.len()];
    for r in &trace.records {
        let Some(u) = uses.get_mut(r.file.0 as usize) else { continue };
        match r.op {
            TraceOp::Read if r.moved_bytes() > 0 => {
                u.reads += 1;
                u.bytes = u.bytes.saturating_add(r.moved_bytes());
                u.waited_ns = u.waited_ns.saturating_add(r.duration.map_or(0, |d| d.0));
            }
            TraceOp::Write => u.writes += 1,
            TraceOp::Map => u.maps += 1,
            _ => {}
        }
    }
    uses
}

/// Why a file that is only mapped gets no hints.
const MAPPED: &str = "The program maps it into memory. Which bytes it touches there is not recorded, so no hints are \
                      planned; a WillNeed region written by hand is brought in when the file is mapped.";

/// Files that are mapped and never read by a call: data of the program, largest first.
fn mapped_only(trace: &Trace, uses: &[Use]) -> Vec<FilePlan> {
    let is = |file: &usize| {
        let (u, path) = (&uses[*file], &trace.files[*file].path);
        u.maps > 0 && u.reads == 0 && purpose(path, u) != Purpose::Program
    };
    let size = |file: usize| trace.files[file].size_bytes.unwrap_or(0);
    let mut files: Vec<usize> = (0..uses.len()).filter(is).collect();
    files.sort_by_key(|file| std::cmp::Reverse(size(*file)));
    files.truncate(FILES_MAX);
    let plan = |file: usize| FilePlan {
        path: stats::name(&trace.files[file]),
        purpose: if uses[file].writes > 0 { Purpose::Scratch } else { Purpose::Input },
        pattern: Pattern { size_bytes: size(file), ..Pattern::default() },
        expected: None,
        entry: None,
        why: MAPPED.into(),
    };
    files.into_iter().map(plan).collect()
}

/// Whether a path names a shared library: `libc.so`, `libm.so.6`.
fn is_library(path: &[u8]) -> bool {
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    name.ends_with(b".so") || name.windows(4).any(|w| w == b".so.")
}

/// What a file is to the program, by its path and its use.
pub(crate) fn purpose(path: &[u8], u: &Use) -> Purpose {
    let under = |folders: &[&[u8]]| folders.iter().any(|folder| path.starts_with(folder));
    let system = under(&[b"/usr/", b"/lib", b"/etc/", b"/proc/", b"/sys/", b"/dev/", b"/run/"]);
    // Where users mount and keep data of their own.
    let users = under(&[b"/dev/shm/", b"/run/media/", b"/run/user/"]);
    match () {
        () if system && !users || u.maps > 0 && u.reads <= 4 && is_library(path) => Purpose::Program,
        () if u.reads > 0 && u.writes > 0 => Purpose::Scratch,
        () if u.reads > 0 => Purpose::Input,
        () => Purpose::Output,
    }
}

/// What is true of the whole run, whatever the hints.
fn nothing_to_gain(whole: &Run, options: &Options) -> Option<String> {
    let device = &options.device;
    let (waited, known) = whole.traced_wait_ns();
    let span = whole.traced_span_ns().max(1);
    let cold = replay(whole, device, options.memory_bytes, &Entries::default());
    let threads = whole.threads.len().max(1) as u64;
    if known == whole.reads && !options.assume_cold {
        let each = waited / known.max(1);
        // Threads wait side by side, so of the span at most the mean of their waits can go.
        let part = (waited as f64 / threads as f64) / span as f64;
        if waited < cold.wait_ns / 10 {
            return Some(format!(
                "In the recorded run reads took {} each, ten times less than this device would: they came from memory. \
                 Record a run with a cold cache, or plan with the cache assumed cold.",
                show_ns(each as f64)
            ));
        }
        if part < options.gain_min {
            return Some(format!(
                "The program waited for reads {:.1} % of its time: even perfect hints would save no more.",
                100.0 * part
            ));
        }
    }
    let bound = bound_ns(whole, device);
    if cold.run_ns.saturating_sub(bound) < (options.gain_min * cold.run_ns as f64) as u64 {
        return Some(format!(
            "On this device ({}) the run takes {}, and with everything overlapped perfectly {}: the device is fast enough \
             for this program, or busy all the time already.",
            device.source,
            show_ns(cold.run_ns as f64),
            show_ns(bound as f64)
        ));
    }
    None
}

fn seen_only(trace: &Trace, whole: &Run, file: usize, u: &Use, why: &str) -> FilePlan {
    let info = &trace.files[file];
    FilePlan {
        path: stats::name(info),
        purpose: purpose(&info.path, u),
        pattern: Pattern::of(whole, file),
        expected: None,
        entry: None,
        why: why.to_string(),
    }
}

/// The best hints for one file by its own reads, and its index, if they go by that.
fn one_file(
    trace: &Trace,
    file: usize,
    u: &Use,
    options: &Options,
    indexes: &mut Indexes,
) -> (FilePlan, Option<Index>) {
    let info = &trace.files[file];
    let run = run_of(trace, &options.device, |f| f == file, FILE_READS_MAX);
    let mut told = seen_only(trace, &run, file, u, "");
    let path = match usable(&info.path, told.purpose) {
        Ok(path) => path,
        Err(why) => {
            told.why = why;
            return (told, None);
        }
    };
    let tried = if run.reads > TRY_READS_MAX as u64 {
        run_of(trace, &options.device, |f| f == file, TRY_READS_MAX)
    } else {
        run_of(trace, &options.device, |f| f == file, FILE_READS_MAX)
    };
    let pattern = &told.pattern;
    // What is read straight on needs none.
    let is_sequential = pattern.kind() == Kind::Sequential;
    let index = if is_sequential { None } else { indexes.of(path, info.size_bytes.unwrap_or(0)) };
    let plain = replay(&tried, &options.device, options.memory_bytes, &Entries::default());
    let needed = tried.needed_bytes();
    let mut best: Option<(f64, Candidate)> = None;
    let format = index.as_ref().map(|index| index.format);
    for candidate in candidates(path, &tried, file, pattern, format, options) {
        let hinted = Hinted { entry: &candidate.entry, index: index.as_ref(), learnt: None };
        let entries: Entries = [(file, hinted)].into_iter().collect();
        let got = replay(&tried, &options.device, options.memory_bytes, &entries);
        // Time decides; among the nearly equal, what wastes less, keeps less and asks the device less often. An order of one run may not be the
        // next one's, so it must be better by far.
        let keeps = (candidate.entry.block_size * candidate.entry.cache_size) as f64 / options.window_bytes_max as f64;
        let waste = got.wasted_bytes as f64 / plain.device_bytes.max(1) as f64;
        if stands_down(&got, &plain, needed) {
            continue;
        }
        let requests = got.requests as f64 / plain.requests.max(1) as f64;
        let handicap = if candidate.way == Way::Order { 0.10 } else { 0.0 };
        let score =
            got.run_ns as f64 / plain.run_ns.max(1) as f64 + 0.02 * waste + 0.01 * keeps + 0.05 * requests + handicap;
        if best.as_ref().is_none_or(|(least, _)| score < *least) {
            best = Some((score, candidate));
        }
    }
    let Some((_, Candidate { way, mut entry })) = best else {
        told.why = tell::nothing_suits(pattern);
        return (told, None);
    };
    let index = index.filter(|_| matches!(way, Way::Index(_)));
    let entries: Entries =
        [(file, Hinted { entry: &entry, index: index.as_ref(), learnt: None })].into_iter().collect();
    let expected = expect(&run, options, &entries);
    told.expected = Some(expected);
    // Twenty milliseconds are nothing to write a configuration for.
    if expected.gain() < options.gain_min || expected.without_s - expected.with_s < 0.02 {
        told.why = tell::not_worth(pattern, &expected, &options.device);
        return (told, None);
    }
    told.why = tell::hint(way, &entry, pattern, &expected, &options.device);
    entry.why = Some(told.why.clone());
    told.entry = Some(entry);
    (told, index)
}

/// The manager would stop such hints: most of what they bring in goes unread, and reads do not become plainly faster.
fn stands_down(with: &Outcome, without: &Outcome, needed_bytes: u64) -> bool {
    let unread = with.device_bytes.saturating_sub(needed_bytes);
    let unread_percent = unread.saturating_mul(100) / with.device_bytes.max(1);
    let faster = with.run_ns as f64 <= without.run_ns as f64 * (1.0 - PLAIN_GAIN_PERCENT as f64 / 100.0);
    unread_percent > StandDown::default().waste_percent && !faster
}

/// Without and with, and never better than perfect overlap.
fn expect(run: &Run, options: &Options, entries: &Entries) -> Expected {
    let without = replay(run, &options.device, options.memory_bytes, &Entries::default());
    let with = replay(run, &options.device, options.memory_bytes, entries);
    let bound = bound_ns(run, &options.device).min(without.run_ns);
    let seconds = |ns: u64| ns as f64 / 1e9;
    Expected {
        without_s: seconds(without.run_ns),
        with_s: seconds(with.run_ns.max(bound)),
        bound_s: seconds(bound),
        requests_without: without.requests,
        requests_with: with.requests,
        wasted_bytes: with.device_bytes.saturating_sub(run.needed_bytes()),
    }
}

/// A path that the hints file can name.
fn usable(path: &[u8], purpose: Purpose) -> Result<&str, String> {
    if purpose == Purpose::Program {
        return Err("A part of the program or the system: it is read once, and stays in memory.".into());
    }
    let text = std::str::from_utf8(path)
        .map_err(|_| "Its name is not UTF-8, which the hints file cannot write down.".to_string())?;
    if !Path::new(text).is_absolute() || text.contains('\0') || text.len() > 4096 {
        return Err(
            "Its absolute path is not known; record with one that knows it (strace -y, or assist record).".into()
        );
    }
    Ok(text)
}

/// Entries of many files in one folder that are alike become one for the folder.
fn by_folder(entries: Vec<Entry>) -> (Vec<Entry>, Vec<Entry>) {
    type Alike = (std::path::PathBuf, u64, u64, u64);
    let alike = |e: &Entry| -> Option<Alike> {
        let whole = e.will_need == [crate::config::Region::WHOLE] && e.random.is_empty() && e.sequence.is_empty();
        whole.then(|| (e.path.parent().unwrap_or(Path::new("/")).into(), e.block_size, e.cache_size, e.read_ahead_size))
    };
    let mut count: FxHashMap<Alike, usize> = FxHashMap::default();
    entries.iter().filter_map(alike).for_each(|key| *count.entry(key).or_default() += 1);
    let (mut files, mut folders): (Vec<Entry>, Vec<Entry>) = (Vec::new(), Vec::new());
    for entry in entries {
        match alike(&entry).filter(|key| count[key] >= FOLDER_FILES) {
            // One folder has one entry; files of it that are read otherwise keep their own, which comes first.
            Some(key) if !folders.iter().any(|f| f.path == key.0) => {
                let why = format!(
                    "{} files of this folder, each like this one: {}",
                    count[&key],
                    entry.why.unwrap_or_default()
                );
                folders.push(Entry { path: key.0, why: Some(why), ..Entry { why: None, ..entry } });
            }
            Some(key) if folders.iter().any(|f| alike_folder(f, &key)) => {}
            _ => files.push(entry),
        }
    }
    (files, folders)
}

fn alike_folder(folder: &Entry, key: &(std::path::PathBuf, u64, u64, u64)) -> bool {
    (&folder.path, folder.block_size, folder.cache_size, folder.read_ahead_size) == (&key.0, key.1, key.2, key.3)
}
