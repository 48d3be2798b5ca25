//! What the manager did, for each file: for people and for programs.

use std::fmt;

use impresario_base::units::show_bytes;
use serde::{Deserialize, Serialize};

use crate::config::ReadAhead;
use crate::coverage::{Account, Coverage};
use crate::jobs::Origin;

/// One file, over all programs that read it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct FileReport {
    /// As it was when the file was registered.
    pub path: String,
    /// The entry that governs it, such as `File[0]`.
    pub entry: String,
    /// How hints were given; empty while none was.
    pub backend: String,
    /// Programs that registered it, in all.
    pub programs: u64,
    /// Programs that have it open now.
    pub open: u64,
    /// Reads told of.
    pub reads: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Ranges that were to be brought in.
    pub hints: u64,
    /// System calls made for them.
    pub calls: u64,
    /// Bytes that were to be brought in.
    pub prefetched_bytes: u64,
    /// Of these, bytes that were in memory already.
    pub found_bytes: u64,
    /// Of these, bytes that were seen not to have come.
    pub missed_bytes: u64,
    /// Of the bytes to be brought in, those that were read.
    pub used_bytes: u64,
    /// Of the bytes to be brought in, those that were let go unread.
    pub wasted_bytes: u64,
    /// Bytes released.
    pub released_bytes: u64,
    /// Reads that lay wholly in what was brought in.
    pub hits: u64,
    /// Reads that did not.
    pub misses: u64,
    /// Time that reads took, in nanoseconds, as far as told.
    pub read_ns: u64,
    /// Hints not given for want of budget or of workers.
    pub refused: u64,
    /// Hints that the system refused.
    pub errors: u64,
    /// The kernel's read-ahead in force, as last set.
    pub read_ahead: ReadAhead,
    /// Time that hints save, in percent of reads without them, as last measured.
    pub gain_percent: Option<i64>,
    /// How often hints were stopped.
    pub stood_down: u64,
    /// Why they are stopped now.
    pub why_stood_down: Option<String>,
    /// Its kind was known, and it was read in another order.
    #[serde(default)]
    pub strayed: bool,
    /// The format of the file, where its own index says what comes next.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub index: String,
}

impl FileReport {
    /// The part of reads that lay in what was brought in, 0 to 1.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }

    /// Time of its reads that hints have saved, by what they were last seen to save; negative where they cost time.
    pub fn saved_ns(&self) -> i64 {
        let Some(gain) = self.gain_percent.filter(|gain| *gain < 100) else { return 0 };
        // What is left is the rest of what it would have been.
        let saved = i128::from(self.read_ns) * i128::from(gain) / i128::from(100 - gain);
        i64::try_from(saved).unwrap_or(if saved < 0 { i64::MIN } else { i64::MAX })
    }

    /// Adds another file's numbers to these, as for a total.
    pub fn add(&mut self, other: &FileReport) {
        let sums: [(&mut u64, u64); 18] = [
            (&mut self.programs, other.programs),
            (&mut self.open, other.open),
            (&mut self.reads, other.reads),
            (&mut self.read_bytes, other.read_bytes),
            (&mut self.hints, other.hints),
            (&mut self.calls, other.calls),
            (&mut self.prefetched_bytes, other.prefetched_bytes),
            (&mut self.found_bytes, other.found_bytes),
            (&mut self.missed_bytes, other.missed_bytes),
            (&mut self.used_bytes, other.used_bytes),
            (&mut self.wasted_bytes, other.wasted_bytes),
            (&mut self.released_bytes, other.released_bytes),
            (&mut self.hits, other.hits),
            (&mut self.misses, other.misses),
            (&mut self.read_ns, other.read_ns),
            (&mut self.refused, other.refused),
            (&mut self.errors, other.errors),
            (&mut self.stood_down, other.stood_down),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
    }
}

/// What became of runs that a manager recorded to learn from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Lessons {
    /// Handed over, to be learnt from.
    pub taken: u64,
    /// Not handed over: they were too long, or there was no room for them, or too many came in an hour.
    pub left_out: u64,
}

impl Lessons {
    fn is_none(&self) -> bool {
        *self == Lessons::default()
    }
}

/// What the manager did, in all.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Whose run this is.
    #[serde(default)]
    pub origin: Origin,
    /// Programs connected now.
    pub programs: u64,
    /// Programs that were connected, in all.
    pub programs_ever: u64,
    /// Connections cut off for breaking the rules, or refused for want of room.
    pub cut_off: u64,
    /// Accesses that found no place in a program's ring.
    pub dropped_accesses: u64,
    /// Bytes of all reads told of, of files with hints and others.
    #[serde(default)]
    pub seen_bytes: u64,
    /// Bytes of all memory maps told of.
    #[serde(default)]
    pub mapped_bytes: u64,
    /// Bytes of reads by files in a table of a ring of io_uring: the files, and so the places, are not known.
    #[serde(default)]
    pub unseen_bytes: u64,
    /// Rings of io_uring that were seen to be made and cannot be looked into.
    #[serde(default)]
    pub unseen_rings: u64,
    /// Of a manager that served one program alone: how much of what it read was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
    /// Bytes brought in of files that programs were about to open, as they went through folders.
    #[serde(default)]
    pub siblings_bytes: u64,
    /// Runs that something was to be learnt from.
    #[serde(default, skip_serializing_if = "Lessons::is_none")]
    pub lessons: Lessons,
    /// Bytes brought in and not yet released, now.
    pub held_bytes: u64,
    /// The budget of the node, in bytes.
    pub budget_bytes: u64,
    /// Files, those read most first; the numbers of files beyond what is kept are in `others`.
    pub files: Vec<FileReport>,
    /// Files that were closed so long ago that only their sum is kept.
    pub others: FileReport,
}

impl Report {
    /// For programs.
    pub fn to_json(&self) -> String {
        // Nothing in it can fail to be written.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Compares what was seen with the kernel's account of all programs that this manager served; `all_files` when it
    /// recorded them.
    pub fn cover(&mut self, account: Account, all_files: bool) -> Coverage {
        let coverage = Coverage {
            seen_bytes: self.seen_bytes,
            mapped_bytes: self.mapped_bytes,
            unseen_bytes: self.unseen_bytes,
            unseen_rings: self.unseen_rings,
            called_bytes: account.called_bytes,
            device_bytes: account.device_bytes,
            lost_accesses: self.dropped_accesses,
            all_files,
        };
        self.coverage = Some(coverage);
        coverage
    }

    /// The sum over all files.
    pub fn total(&self) -> FileReport {
        let mut total = FileReport { path: "all files".into(), ..FileReport::default() };
        self.files.iter().chain([&self.others]).for_each(|file| total.add(file));
        total
    }
}

/// Files without hints that people are shown, those read most: a program that starts reads hundreds.
const UNHINTED_SHOWN: u32 = 5;

impl FileReport {
    /// Nothing was done for it, and nothing hindered that.
    fn is_unhinted(&self) -> bool {
        self.hints == 0 && self.refused + self.errors == 0 && self.stood_down == 0 && self.why_stood_down.is_none()
    }
}

impl fmt::Display for FileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if !self.entry.is_empty() {
            write!(f, " ({})", self.entry)?;
        }
        writeln!(f)?;
        let mean_us = (self.read_ns / 1000).checked_div(self.reads).unwrap_or(0);
        writeln!(
            f,
            "  {} reads by {} programs, {}, mean {mean_us} µs",
            self.reads,
            self.programs,
            show_bytes(self.read_bytes as f64)
        )?;
        write!(f, "  {} hints", self.hints)?;
        if !self.backend.is_empty() {
            write!(f, " by {}", self.backend)?;
        }
        let (brought, used, wasted) = (
            show_bytes(self.prefetched_bytes as f64),
            show_bytes(self.used_bytes as f64),
            show_bytes(self.wasted_bytes as f64),
        );
        write!(f, ": {brought} prefetched, {used} used, {wasted} wasted")?;
        if self.found_bytes > 0 {
            write!(f, ", {} were in memory already", show_bytes(self.found_bytes as f64))?;
        }
        if let Some(rate) = self.hit_rate() {
            write!(f, "; {:.0} % of reads hit", rate * 100.0)?;
        }
        writeln!(f)?;
        if self.read_ahead != ReadAhead::Normal {
            writeln!(f, "  kernel read-ahead: {:?}", self.read_ahead)?;
        }
        if let Some(gain) = self.gain_percent {
            writeln!(f, "  time of a read saved: {gain} %")?;
        }
        if !self.index.is_empty() {
            writeln!(f, "  followed by its own index ({})", self.index)?;
        }
        if self.strayed {
            writeln!(f, "  read in another order than other files of its kind")?;
        }
        if self.refused + self.errors > 0 {
            writeln!(f, "  {} hints not given for want of room, {} refused by the system", self.refused, self.errors)?;
        }
        if let Some(why) = &self.why_stood_down {
            writeln!(f, "  stood down: {why}")?;
        } else if self.stood_down > 0 {
            writeln!(f, "  was stood down {} times", self.stood_down)?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} programs connected of {} ever, {} cut off; {} of {} in use; {} accesses lost",
            self.programs,
            self.programs_ever,
            self.cut_off,
            show_bytes(self.held_bytes as f64),
            show_bytes(self.budget_bytes as f64),
            self.dropped_accesses
        )?;
        if !self.lessons.is_none() {
            let Lessons { taken, left_out } = self.lessons;
            writeln!(f, "{taken} runs recorded to learn from, {left_out} left out")?;
        }
        let mut unhinted = FileReport::default();
        let (mut shown, mut left_out) = (0, 0);
        for file in &self.files {
            shown += u32::from(file.is_unhinted());
            if file.is_unhinted() && shown > UNHINTED_SHOWN {
                unhinted.add(file);
                left_out += 1;
            } else {
                write!(f, "{file}")?;
            }
        }
        if left_out > 0 {
            let (reads, bytes) = (unhinted.reads, show_bytes(unhinted.read_bytes as f64));
            writeln!(f, "{left_out} more files without hints: {reads} reads, {bytes} (in JSON each is there)")?;
        }
        if self.others.programs > 0 {
            write!(f, "{}", FileReport { path: "files closed before".into(), ..self.others.clone() })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileReport {
        FileReport {
            path: "/data/run7.root".into(),
            entry: "File[0]".into(),
            backend: "fadvise".into(),
            programs: 2,
            reads: 1000,
            read_bytes: 250 << 20,
            hints: 128,
            prefetched_bytes: 512 << 20,
            used_bytes: 250 << 20,
            wasted_bytes: 262 << 20,
            hits: 999,
            misses: 1,
            read_ns: 100_000_000,
            gain_percent: Some(96),
            why_stood_down: Some("81 % was never read".into()),
            ..FileReport::default()
        }
    }

    #[test]
    fn people_and_programs_read_the_same() {
        let report = Report { programs: 1, programs_ever: 3, files: vec![file(), file()], ..Report::default() };
        let back: Report = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(back, report);
        let text = report.to_string();
        let wanted = "/data/run7.root (File[0])\n  1000 reads by 2 programs, 250 MiB, mean 100 µs\n  128 hints by fadvise: \
             512 MiB prefetched, 250 MiB used, 262 MiB wasted; 100 % of reads hit\n  time of a read saved: 96 %\n  \
             stood down: 81 % was never read\n";
        assert!(text.contains(wanted), "{text}");
        assert_eq!(report.total().hits, 1998);
        let unhinted = FileReport { hints: 0, stood_down: 0, why_stood_down: None, reads: 2, ..file() };
        let many = Report { files: [vec![unhinted; 12], vec![file()]].concat(), ..Report::default() };
        let text = many.to_string();
        assert_eq!(text.matches("run7").count(), 6, "{text}");
        assert!(text.contains("7 more files without hints: 14 reads, 1.7 GiB"), "{text}");
        assert_eq!(FileReport::default().hit_rate(), None);
    }
}
