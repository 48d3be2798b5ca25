//! The kernel's read-ahead (Linux 6, `mm/readahead.c`, in outline).
//!
//! The state belongs to an open file. A miss that continues the last read starts a *window* of a few times the
//! requested length; a page in it is marked, and when a read reaches the mark, the next window, twice as long up to the
//! limit, is read before it is needed. A miss elsewhere reads only what was requested, unless the contiguous pages
//! before it in the cache are more than that. A mark of another window (several streams through one open file) starts a
//! window from the cached pages behind it.

use std::ops::Range;

use crate::page_cache::{PAGE_BYTES, PageCache, State};

/// The kernel's limits for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadAheadLimits {
    /// The longest window (`read_ahead_kb`), bytes; 0 disables read-ahead.
    pub window_bytes: u64,
    /// The longest request to the device (`max_sectors_kb`), bytes; at least a page.
    pub request_bytes: u64,
}

/// The read-ahead state of one open file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReadAhead {
    /// The last window.
    start: u64,
    len: u64,
    /// Its bytes behind the mark.
    behind_mark: u64,
    /// Where the last read ended.
    last_end: u64,
}

impl ReadAhead {
    /// A read of a range of a file of `len_bytes`. Returns what the kernel requests from the device: ranges of whole
    /// pages, at most one request long, which the cache now counts as being read. Afterwards all pages of the read are
    /// cached or being read.
    pub fn read<W: Copy>(
        &mut self,
        cache: &mut PageCache<W>,
        file: u32,
        read: Range<u64>,
        len_bytes: u64,
        limits: ReadAheadLimits,
    ) -> Vec<Range<u64>> {
        let mut requests = Vec::new();
        let end = read.end.next_multiple_of(PAGE_BYTES);
        let mut reading = Reading { cache, file, end, file_end: len_bytes.next_multiple_of(PAGE_BYTES), limits };
        let mut at = read.start / PAGE_BYTES * PAGE_BYTES;
        while at < end {
            match reading.cache.look(file, at, end) {
                State::Present(to) | State::Coming(to) => {
                    while let Some(mark) = reading.cache.take_mark(file, at, to) {
                        self.reached(&mut reading, mark, &mut requests);
                    }
                    at = to;
                }
                State::Missing(_) if limits.window_bytes == 0 => {
                    reading.claim(at..end, &mut requests);
                    at = end;
                }
                // Then it is being read.
                State::Missing(_) => self.missed(&mut reading, at, &mut requests),
            }
            self.last_end = at.min(read.end);
        }
        self.last_end = read.end;
        requests
    }

    /// The page at `at` is missing.
    fn missed<W: Copy>(&mut self, reading: &mut Reading<'_, W>, at: u64, requests: &mut Vec<Range<u64>>) {
        let asked = reading.end - at;
        let mut limit = reading.limits.window_bytes;
        if asked > limit {
            limit = limit.max(asked.min(reading.limits.request_bytes));
        }
        let last_page = self.last_end / PAGE_BYTES * PAGE_BYTES;
        let goes_on = at == 0 || at == last_page || at == last_page + PAGE_BYTES || asked > limit;
        if goes_on {
            let len = first_window(asked, limit);
            let behind_mark = if len > asked { len - asked } else { len / 2 };
            return self.window(reading, at, len, behind_mark, requests);
        }
        let before = reading.cache.present_before(reading.file, at, limit);
        if before <= asked {
            return reading.claim(at..reading.end, requests);
        }
        let before = if before >= at { before * 2 } else { before };
        self.window(reading, at, (before + asked).min(limit), PAGE_BYTES, requests);
    }

    /// A read has reached a marked page.
    fn reached<W: Copy>(&mut self, reading: &mut Reading<'_, W>, mark: u64, requests: &mut Vec<Range<u64>>) {
        let limit = reading.limits.window_bytes;
        if self.len > 0 && mark == self.start + self.len - self.behind_mark {
            let len = next_window(self.len, limit);
            return self.window(reading, self.start + self.len, len, len, requests);
        }
        let until = mark.saturating_add(limit);
        let mut at = mark + PAGE_BYTES;
        while at < until
            && let State::Present(to) | State::Coming(to) = reading.cache.look(reading.file, at, until)
        {
            at = to;
        }
        if at < until {
            let len = next_window(at - mark + reading.end.saturating_sub(mark), limit);
            self.window(reading, at, len, len, requests);
        }
    }

    fn window<W: Copy>(
        &mut self,
        reading: &mut Reading<'_, W>,
        start: u64,
        len: u64,
        behind_mark: u64,
        requests: &mut Vec<Range<u64>>,
    ) {
        (self.start, self.len, self.behind_mark) = (start, len, behind_mark);
        // A requested page is read even if the file is shorter than assumed.
        let end = start.saturating_add(len).min(reading.file_end.max(reading.end));
        if start < end {
            reading.claim(start..end, requests);
            reading.cache.mark(reading.file, start + len - behind_mark);
        }
    }
}

/// One read.
struct Reading<'a, W> {
    cache: &'a mut PageCache<W>,
    file: u32,
    end: u64,
    file_end: u64,
    limits: ReadAheadLimits,
}

impl<W: Copy> Reading<'_, W> {
    fn claim(&mut self, range: Range<u64>, requests: &mut Vec<Range<u64>>) {
        let longest = (self.limits.request_bytes / PAGE_BYTES * PAGE_BYTES).max(PAGE_BYTES);
        for claimed in self.cache.claim(self.file, range.start, range.end, false) {
            let mut at = claimed.start;
            while at < claimed.end {
                let end = claimed.end.min(at.saturating_add(longest));
                requests.push(at..end);
                at = end;
            }
        }
    }
}

fn first_window(asked: u64, limit: u64) -> u64 {
    let len = match asked.next_power_of_two() {
        n if n <= limit / 32 => n * 4,
        n if n <= limit / 4 => n * 2,
        _ => limit,
    };
    len.max(PAGE_BYTES)
}

fn next_window(len: u64, limit: u64) -> u64 {
    let len = match len {
        n if n < limit / 16 => n * 4,
        n if n <= limit / 2 => n * 2,
        _ => limit,
    };
    (len / PAGE_BYTES * PAGE_BYTES).max(PAGE_BYTES)
}

#[cfg(test)]
// Lists of ranges are compared.
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const LIMITS: ReadAheadLimits = ReadAheadLimits { window_bytes: 128 * KIB, request_bytes: MIB };

    struct Bed {
        cache: PageCache<()>,
        state: ReadAhead,
    }

    impl Bed {
        fn new() -> Bed {
            Bed { cache: PageCache::new(1 << 30), state: ReadAhead::default() }
        }

        /// A read whose device requests complete at once.
        fn read(&mut self, at: u64, len: u64) -> Vec<Range<u64>> {
            let requests = self.state.read(&mut self.cache, 0, at..at + len, 1 << 30, LIMITS);
            requests.iter().for_each(|r| self.cache.arrive(0, r.start, r.end, &mut Vec::new()));
            requests
        }
    }

    #[test]
    fn sequential_reads_get_growing_windows() {
        let mut bed = Bed::new();
        assert_eq!(bed.read(0, 4 * KIB), [0..16 * KIB]);
        // The mark is behind the first page: reading on renews the window before it is used up.
        assert_eq!(bed.read(4 * KIB, 4 * KIB), [16 * KIB..48 * KIB]);
        assert_eq!(bed.read(8 * KIB, 8 * KIB), []);
        assert_eq!(bed.read(16 * KIB, 4 * KIB), [48 * KIB..112 * KIB]);
        assert_eq!(bed.read(20 * KIB, 32 * KIB), [112 * KIB..240 * KIB]);
        assert_eq!(bed.read(52 * KIB, 64 * KIB), [240 * KIB..368 * KIB], "128 KiB is the limit");
    }

    #[test]
    fn other_reads_get_only_what_they_request() {
        let mut bed = Bed::new();
        assert_eq!(bed.read(MIB, 8 * KIB), [MIB..MIB + 8 * KIB]);
        assert_eq!(bed.read(9 * MIB, 8 * KIB), [9 * MIB..9 * MIB + 8 * KIB]);
        let none = ReadAheadLimits { window_bytes: 0, ..LIMITS };
        assert_eq!(bed.state.read(&mut bed.cache, 0, 0..4096, MIB, none), [0..4096]);
    }

    #[test]
    fn large_reads_are_whole_and_windows_end_with_the_file() {
        let mut bed = Bed::new();
        // One request of a megabyte instead of eight windows; the read reaches its own mark, so the next window
        // follows.
        assert_eq!(bed.read(0, MIB), [0..MIB, MIB..MIB + 128 * KIB]);
        let mut bed = Bed::new();
        assert_eq!(bed.state.read(&mut bed.cache, 0, 0..8192, 9000, LIMITS), [0..12_288]);
    }

    #[test]
    fn interleaved_streams_lose_their_windows() {
        // Two streams of 64 KiB through one open file: after two reads the cached pages exceed one request; then marks
        // keep both going.
        let mut bed = Bed::new();
        for i in 0..2 {
            for base in [0, 512 * MIB] {
                let requests = bed.read(base + MIB + i * 64 * KIB, 64 * KIB);
                assert_eq!(requests, [base + MIB + i * 64 * KIB..base + MIB + (i + 1) * 64 * KIB]);
            }
        }
        let requests = bed.read(MIB + 128 * KIB, 64 * KIB);
        assert_eq!(requests, [MIB + 128 * KIB..MIB + 256 * KIB]);
    }

    proptest! {
        /// For any reads: all requested pages are cached or being read, nothing is requested twice, requests are whole
        /// pages within the device's limit, and at most two windows are ahead of a read.
        #[test]
        fn any_reads(
            reads in prop::collection::vec((prop_oneof![Just(None), (0u64..4 * MIB).prop_map(Some)], 1u64..400_000), 1..80),
            window in 0u64..10,
            request in 12u32..21,
        ) {
            let limits = ReadAheadLimits { window_bytes: window * 32 * KIB, request_bytes: 1 << request };
            let mut cache: PageCache<()> = PageCache::new(1 << 30);
            let (mut state, mut end, mut seen) = (ReadAhead::default(), 0, std::collections::BTreeSet::new());
            for (start, len) in reads {
                let start = start.unwrap_or(end);
                end = start + len;
                for r in state.read(&mut cache, 3, start..end, 8 * MIB, limits) {
                    prop_assert!(r.start < r.end && r.end - r.start <= limits.request_bytes);
                    prop_assert!(r.start % PAGE_BYTES == 0 && r.end % PAGE_BYTES == 0);
                    prop_assert!(r.end <= end.next_multiple_of(PAGE_BYTES) + 2 * limits.window_bytes.max(limits.request_bytes));
                    prop_assert!((r.start / PAGE_BYTES..r.end / PAGE_BYTES).all(|page| seen.insert(page)));
                }
                prop_assert!(cache.claim(3, start, end, false).is_empty());
            }
        }
    }
}
