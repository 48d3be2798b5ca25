//! What hints by kind are expected to save: each file of a recorded run is replayed, with the hints that its kind would have had if
//! that file had never been read.

use std::sync::Arc;

use impresario_foresight::{Sample, of_others};
use impresario_trace::Trace;
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::kinds::{Observation, find};
use super::{Learnt, observe};
use crate::config::{DeviceCost, Entry, StandDown};
use crate::plan::{Device, Entries, Hinted, replay_judged, run_of};

/// Files of one kind and run that are replayed, at most: those of which most was read.
const FILES_MAX: usize = 16;
/// Reads of each.
const READS_MAX: usize = 30_000;
/// Memory for the page cache in the replay, bytes.
const MEMORY_BYTES: u64 = 1 << 30;

/// What hints by a kind save of the time that programs wait for files of it.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Saving {
    /// Files that were held out, each run of them.
    pub files: u64,
    /// Time waited for them without hints, s.
    pub without_s: f64,
    /// Time waited for them with the hints that the other files of the kind give, s.
    pub with_s: f64,
}

impl Saving {
    /// The part of the time waited that is saved: 1 for all of it, below 0 where hints cost time.
    pub fn part(&self) -> f64 {
        if self.without_s <= 0.0 { 0.0 } else { 1.0 - self.with_s / self.without_s }
    }

    /// The sum of this and another one.
    pub fn and(self, other: Saving) -> Saving {
        Saving {
            files: self.files + other.files,
            without_s: self.without_s + other.without_s,
            with_s: self.with_s + other.with_s,
        }
    }
}

/// For each kind that is used: what it would have saved in a recorded run of a program, whose accesses have this label, of files that it
/// was not learnt from, and what a device of these costs takes. The file itself is left out of what its hints are made of.
pub fn savings(learnt: &Learnt, trace: &Trace, label: Option<&str>, device: &Device) -> Vec<Saving> {
    let mut savings = vec![Saving::default(); learnt.kinds.len()];
    let paths: FxHashMap<_, _> = trace.files.iter().map(|info| &*info.path).zip(0..).collect();
    for one in observe(trace, label).files {
        let Some(kind) = find(&learnt.kinds, &one.facts()) else { continue };
        let Some(at) = learnt.kinds.iter().position(|other| other == kind) else { continue };
        let is_other = |other: &&Observation| !other.is_same_file(&one) && kind.files.hold(&other.facts());
        let others: Vec<&Sample> = learnt.observed.iter().filter(is_other).map(|other| &other.sample).collect();
        let file = paths.get(one.path.as_os_str().as_encoded_bytes());
        let Some(file) = file.filter(|_| !others.is_empty() && savings[at].files < FILES_MAX as u64) else { continue };
        let run = run_of(trace, device, |other| other == *file, READS_MAX);
        let (entry, shape) = (Entry { online: true, ..Entry::new(&one.path) }, Arc::new(of_others(&others)));
        let hinted = Hinted { entry: &entry, index: None, learnt: Some(&shape) };
        // As the manager gives them, to which nothing is known of the device.
        let waited_s = |entries: &Entries| {
            let (judged, unknown) = (StandDown::default(), DeviceCost::default());
            replay_judged(&run, device, MEMORY_BYTES, entries, judged, &unknown).wait_ns as f64 / 1e9
        };
        let (without_s, with_s) = (waited_s(&Entries::default()), waited_s(&[(*file, hinted)].into_iter().collect()));
        savings[at] = savings[at].and(Saving { files: 1, without_s, with_s });
    }
    savings
}

#[cfg(test)]
mod tests {
    use impresario_sched::Nanos;
    use impresario_trace::{Builder, FileInfo, Header, Record, TraceOp};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A program that reads 20 KB of each 200 KB and computes for a millisecond after each.
    fn run(path: &str, size_bytes: u64, piece: u64) -> Trace {
        let mut builder = Builder::new(Header { clock_unix_ns: Some(size_bytes), ..Header::default() });
        let file = builder.file(FileInfo { path: path.into(), key: 0, size_bytes: Some(size_bytes) }).unwrap();
        for (i, at) in (0..size_bytes).step_by(200_000).enumerate() {
            let mut read = Record::new(TraceOp::Read, file, at, piece, Nanos(i as u64 * 7_000_000));
            read.duration = Some(Nanos(6_000_000));
            builder.push(read).unwrap();
        }
        builder.build()
    }

    #[test]
    fn a_file_that_was_not_learnt_from_tells_what_its_kind_saves() {
        let runs = [run("/d/a.tbl", 20 * MIB, 20_000), run("/d/b.tbl", 30 * MIB, 20_000)];
        let mut learnt = Learnt::new("table");
        learnt.add(observe(&runs[0], None).files);
        let device = Device::limited(200, 200);
        let alone = savings(&learnt, &runs[0], None, &device);
        assert_eq!(alone, [Saving::default()], "a file tells nothing of itself");
        learnt.add(observe(&runs[1], None).files);
        let [saving] = savings(&learnt, &runs[1], None, &device)[..] else { panic!("{learnt:?}") };
        assert_eq!(saving.files, 1);
        assert!(saving.without_s > 0.1 && saving.part() > 0.05 && saving.part() <= 1.0, "{saving:?}");
        // One that the kind knows and that is read otherwise gains less.
        let other = run("/d/c.tbl", 30 * MIB, 1000);
        let [worse] = savings(&learnt, &other, None, &device)[..] else { panic!() };
        assert_eq!(worse.files, 1);
        assert!(savings(&learnt, &run("/d/c.other", 30 * MIB, 1000), None, &device)[0].files == 0);
    }
}
