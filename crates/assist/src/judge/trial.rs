//! Whether long pieces pay on this device, tried on one of them before the hints of a plan are given.
//!
//! A plan was made for a device; the one that the program runs on may be slower by the byte or by the request, shared, or
//! limited. Blocks bring in what lies between the program's reads, too: that pays where few long requests cost less than
//! many short ones. So the first reads go without hints and tell what one costs. Then one extent ahead of the program is
//! brought in, and how long that took is compared with the reads that the program makes in it. Two extents that cost more
//! than the reads are enough to stand down, or one that costs much more; they have then cost a few milliseconds.

use std::ops::Range;

use super::sample::Sample;
use crate::advisor::{Read, Reader};

/// Reads slower than memory that tell what a read costs.
const SLOW_READS: u64 = 8;
/// Bytes of the extent that is tried.
const EXTENT_BYTES: (u64, u64) = (1 << 20, 4 << 20);
/// Extents that must speak against hints; one that costs twice as much as is bearable is enough.
const AGAINST: u32 = 2;
/// Reads until an extent is judged that the program has not passed, and until one is given up whose end was not
/// reported.
const READS_MAX: (u64, u64) = (64, 1024);

/// What came of a read.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Step {
    /// Nothing yet.
    Undecided,
    /// This is to be brought in, and how long it takes to be told.
    Try(Range<u64>),
    /// Hints pay, or cannot be tried.
    Pays,
    /// They save this percentage of the time of the reads (negative: they take longer); and how the reads are without.
    Against(i64, Sample),
}

/// A trial of one file.
#[derive(Debug, Default)]
pub(super) struct Trial {
    /// Reads without hints.
    without: Sample,
    slow: u64,
    /// Whose way through the file is followed.
    reader: Option<Reader>,
    /// Its reads: the beginning of the first and the last one, how many, and how many of them went forward.
    first: u64,
    last: u64,
    own: u64,
    forward: u64,
    /// When the first and the last one were seen.
    first_ns: u64,
    last_ns: u64,
    extent: Option<Extent>,
    against: u32,
}

#[derive(Debug)]
struct Extent {
    bytes: Range<u64>,
    took_ns: Option<u64>,
    /// Reads that began in it, and reads since it was asked for.
    inside: u64,
    since: u64,
}

impl Trial {
    /// A read; `hit` when it lay in what was brought in before.
    pub(super) fn read(&mut self, reader: Reader, hit: bool, read: &Read, size: u64) -> Step {
        let Read { bytes, duration_ns, now_ns } = read;
        let (duration_ns, now_ns) = (*duration_ns, *now_ns);
        if duration_ns == 0 {
            return Step::Pays; // the durations are not known, so nothing can be compared
        }
        self.reader.get_or_insert(reader);
        if self.extent.is_some() {
            return self.passed(reader, bytes, size);
        }
        if hit {
            return Step::Undecided;
        }
        let len = bytes.end - bytes.start;
        self.without.add(len, duration_ns);
        self.slow += u64::from(!Sample::one(len, duration_ns).as_fast_as_memory());
        if self.reader == Some(reader) {
            match self.own {
                0 => (self.first, self.first_ns) = (bytes.start, now_ns),
                _ => self.forward += u64::from(bytes.start >= self.last),
            }
            (self.last, self.last_ns) = (bytes.start, now_ns);
            self.own += 1;
        }
        if self.slow < SLOW_READS || self.own < SLOW_READS {
            return Step::Undecided;
        }
        self.next(bytes, size)
    }

    /// How long it took to bring the extent in.
    pub(super) fn took(&mut self, bytes: &Range<u64>, took_ns: u64) {
        if let Some(extent) = self.extent.as_mut().filter(|extent| extent.bytes == *bytes) {
            extent.took_ns = Some(took_ns);
        }
    }

    /// The next extent, ahead of the last read.
    fn next(&mut self, bytes: &Range<u64>, size: u64) -> Step {
        let steps = self.own - 1;
        let (forward, backward) = (self.forward * 4 >= steps * 3, self.forward * 4 <= steps);
        if !forward && !backward {
            return Step::Pays; // there is no way ahead to try
        }
        let advance = self.last.abs_diff(self.first) / steps.max(1);
        let len = advance.saturating_mul(2).clamp(EXTENT_BYTES.0, EXTENT_BYTES.1);
        let bytes = if forward {
            let start = bytes.end.max(bytes.start.saturating_add(advance));
            start..start.saturating_add(len).min(size)
        } else {
            let end = bytes.start.min(bytes.end.saturating_sub(advance));
            end.saturating_sub(len)..end
        };
        if bytes.end.saturating_sub(bytes.start) < len {
            return Step::Undecided; // near the end nothing can be won any more
        }
        self.extent = Some(Extent { bytes: bytes.clone(), took_ns: None, inside: 0, since: 0 });
        Step::Try(bytes)
    }

    /// What a read costs before its first byte, by that of the reads and of an extent of `len` bytes.
    fn start_ns(&self, len: u64, took_ns: u64) -> u64 {
        let reads = self.without.reads.max(1);
        let (each_ns, each_bytes) = (self.without.ns / reads, self.without.bytes / reads);
        let (more_ns, more_bytes) = (took_ns.saturating_sub(each_ns), len.saturating_sub(each_bytes).max(1));
        let transfer_ns = u128::from(more_ns) * u128::from(each_bytes) / u128::from(more_bytes);
        u128::from(each_ns).saturating_sub(transfer_ns) as u64
    }

    fn passed(&mut self, reader: Reader, bytes: &Range<u64>, size: u64) -> Step {
        let Some(extent) = &mut self.extent else { return Step::Undecided };
        extent.since += 1;
        extent.inside += u64::from(extent.bytes.contains(&bytes.start));
        let beyond = bytes.start >= extent.bytes.end || bytes.end <= extent.bytes.start;
        let (own, away) = (self.reader == Some(reader), extent.inside > 0 && beyond);
        if !(own && away) && extent.since < READS_MAX.0 {
            return Step::Undecided;
        }
        let took_ns = match extent.took_ns {
            Some(took_ns) => took_ns,
            None if extent.since < READS_MAX.1 => return Step::Undecided,
            None => return Step::Pays,
        };
        let each_ns = self.without.ns / self.without.reads.max(1);
        let (reads_ns, inside) = (each_ns.saturating_mul(extent.inside), extent.inside);
        let (ahead, len) = (extent.bytes.start >= self.last, extent.bytes.end - extent.bytes.start);
        self.extent = None;
        // Blocks ahead follow one another: a device that starts anew for each read goes on for them.
        let start_ns = if ahead { self.start_ns(len, took_ns) } else { 0 };
        let took_ns = took_ns.saturating_sub(start_ns);
        let bearable_ns = if ahead {
            // Brought in while the program computes, it may take as long as the program takes from read to read.
            let from_read_to_read_ns =
                (self.last_ns.saturating_sub(self.first_ns) / (self.own - 1).max(1)).max(each_ns);
            from_read_to_read_ns.saturating_mul(inside).saturating_mul(9) / 10
        } else {
            // Blocks are brought in where the program is and further on, so one that goes backward waits for each.
            reads_ns.saturating_add(each_ns / 2)
        };
        if took_ns <= bearable_ns {
            return Step::Pays;
        }
        self.against += 1;
        if self.against >= AGAINST || took_ns / 2 >= bearable_ns {
            let percent = took_ns.saturating_mul(100) / reads_ns.max(1);
            return Step::Against(100 - percent.min(100_000) as i64, self.without);
        }
        self.next(bytes, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const READER: Reader = Reader { program: 1, thread: 1 };

    fn at_ns(offset: u64, len: u64, duration_ns: u64, now_ns: u64) -> Read {
        Read { bytes: offset..offset + len, duration_ns, now_ns }
    }

    /// Reads of 100 KiB every 400 KiB, each `each_us`; extents take `took_us`. The steps that were taken.
    fn run(each_us: u64, took_us: u64, back: bool) -> (Vec<Step>, u64) {
        let (mut trial, mut steps) = (Trial::default(), Vec::new());
        for i in 0..2000u64 {
            let at = (if back { 1999 - i } else { i }) * (400 << 10);
            match trial.read(READER, false, &at_ns(at, 100 << 10, each_us * 1000, i * each_us * 1000), 1 << 40) {
                Step::Undecided => {}
                Step::Try(bytes) => {
                    trial.took(&bytes, took_us * 1000);
                    steps.push(Step::Try(bytes));
                }
                end => {
                    steps.push(end);
                    return (steps, i);
                }
            }
        }
        (steps, 2000)
    }

    #[test]
    fn a_long_piece_is_compared_with_the_reads_in_it() {
        for back in [false, true] {
            let (steps, reads) = run(5000, 6000, back);
            assert!(matches!(&steps[..], [Step::Try(extent), Step::Pays] if extent.end - extent.start == MIB));
            assert!(reads < 14, "{reads}");
            let (steps, reads) = run(5000, 26_000, back);
            assert!(matches!(&steps[..], [Step::Try(_), Step::Try(_), Step::Against(..0, _)]), "{steps:?}");
            assert!(reads < 20, "{reads}");
            let (steps, _) = run(5000, 60_000, back);
            assert!(matches!(&steps[..], [Step::Try(_), Step::Against(..0, _)]), "{steps:?}");
        }
    }

    #[test]
    fn what_cannot_be_tried_is_not_withheld() {
        assert_eq!(Trial::default().read(READER, false, &at_ns(0, 4096, 0, 0), MIB), Step::Pays, "no durations");
        let mut trial = Trial::default();
        let places = (0..100u64).map(|i| i * 37 % 100 * MIB);
        let steps: Vec<Step> =
            places.map(|at| trial.read(READER, false, &at_ns(at, 4096, 5_000_000, at), 1 << 40)).take(9).collect();
        assert!(steps.contains(&Step::Pays), "no way ahead: {steps:?}");
        let mut trial = Trial::default();
        let mut step = |i: u64| trial.read(READER, false, &at_ns(i * MIB, 4096, 5_000_000, i), 1 << 40);
        let tried = (0..8).map(&mut step).last();
        assert!(matches!(tried, Some(Step::Try(_))));
        assert_eq!(
            (8..3000).map(step).find(|s| *s != Step::Undecided),
            Some(Step::Pays),
            "nobody said how long it took"
        );
    }

    #[test]
    fn reads_from_memory_decide_nothing() {
        let mut trial = Trial::default();
        let steps = (0..100_000u64).map(|i| trial.read(READER, false, &at_ns(i * 4096, 4096, 900, i * 1000), 1 << 40));
        assert!(steps.into_iter().all(|s| s == Step::Undecided));
    }
}
