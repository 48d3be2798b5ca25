//! The kernel's own read-ahead in a replay (Linux, `mm/readahead.c`, in outline): the first read of a file and reads that
//! go on where the last one ended get a window, which grows up to `read_ahead_kb` and is renewed when the program
//! reaches its mark; every other read gets what it asked for.

use std::ops::Range;

use crate::config::ReadAhead;

const PAGE: u64 = 4096;

/// Of one open file.
#[derive(Clone, Copy, Default)]
pub struct Window {
    last_end: u64,
    start: u64,
    len: u64,
    mark: Option<u64>,
}

/// What to fetch for a read.
#[derive(Debug, PartialEq)]
pub enum Fetch {
    /// The read needs it, or it belongs to the same request.
    Now(Range<u64>),
    /// Ahead of the read; nobody waits.
    Ahead(Range<u64>),
}

impl Window {
    /// The read of a range of whole pages, of which `missing` is not in memory; the file has `size` bytes.
    pub fn read(
        &mut self,
        range: &Range<u64>,
        missing: &[Range<u64>],
        mode: ReadAhead,
        read_ahead_bytes: u64,
        request_bytes_max: u64,
        size: u64,
    ) -> Vec<Fetch> {
        let end_of_file = size.div_ceil(PAGE) * PAGE;
        let asked = range.end - range.start;
        let goes_on = range.start == 0 || range.start.abs_diff(self.last_end) <= PAGE;
        self.last_end = range.end;
        let limit = match mode {
            ReadAhead::Sequential => read_ahead_bytes.saturating_mul(2),
            ReadAhead::Normal => read_ahead_bytes,
            ReadAhead::Random => 0,
        };
        if limit == 0 || !goes_on && !self.reached(range) {
            return missing.iter().cloned().map(Fetch::Now).collect();
        }
        let limit = limit.max(asked.min(request_bytes_max));
        let mut fetch = Vec::new();
        if let Some(first) = missing.first() {
            // The window begins with what is missing first; the rest of the read follows window by window.
            let mut at = first.start;
            let mut len =
                if self.len == 0 || at != self.start + self.len { initial(asked, limit) } else { self.next(limit) };
            loop {
                let window = at..(at + len).min(end_of_file).max(at + PAGE);
                (self.start, self.len) = (window.start, window.end - window.start);
                fetch.push(Fetch::Now(window.clone()));
                at = window.end;
                if at >= range.end || at >= end_of_file {
                    break;
                }
                len = self.next(limit);
            }
            let behind = range.end.max(self.start);
            self.mark = Some(if behind < at { behind } else { self.start });
        }
        if self.reached(range) {
            let start = self.start + self.len;
            let window = start..(start + self.next(limit)).min(end_of_file);
            self.mark = None;
            if window.start < window.end {
                (self.start, self.len, self.mark) = (window.start, window.end - window.start, Some(window.start));
                fetch.push(Fetch::Ahead(window));
            }
        }
        fetch
    }

    fn reached(&self, range: &Range<u64>) -> bool {
        self.mark.is_some_and(|mark| range.contains(&mark))
    }

    fn next(&self, limit: u64) -> u64 {
        let factor = if self.len < limit / 16 { 4 } else { 2 };
        (self.len * factor).clamp(PAGE, limit.max(PAGE))
    }
}

fn initial(asked: u64, limit: u64) -> u64 {
    let len = asked.next_power_of_two();
    let len = match len {
        n if n <= limit / 32 => n * 4,
        n if n <= limit / 4 => n * 2,
        _ => limit,
    };
    len.max(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(w: &mut Window, at: u64, len: u64) -> Vec<Fetch> {
        let range = at..at + len;
        w.read(&range, std::slice::from_ref(&range), ReadAhead::Normal, 128 << 10, 1 << 20, 1 << 30)
    }

    #[test]
    fn sequential_reads_get_growing_windows() {
        let mut w = Window::default();
        let first = read(&mut w, 0, 4096);
        assert_eq!(first, [Fetch::Now(0..16384)]);
        // The mark is behind the first page: reading on renews the window before it is used up.
        let second = w.read(&(4096..8192), &[], ReadAhead::Normal, 128 << 10, 1 << 20, 1 << 30);
        assert_eq!(second, [Fetch::Ahead(16384..16384 + 32768)]);
        let third = w.read(&(8192..16384), &[], ReadAhead::Normal, 128 << 10, 1 << 20, 1 << 30);
        assert_eq!(third, []);
    }

    #[test]
    fn other_reads_get_what_they_ask_for() {
        let mut w = Window::default();
        assert_eq!(read(&mut w, 1 << 20, 8192), [Fetch::Now(1 << 20..(1 << 20) + 8192)]);
        assert_eq!(read(&mut w, 9 << 20, 8192), [Fetch::Now(9 << 20..(9 << 20) + 8192)]);
        let range = 0..4096;
        let random = w.read(&range, std::slice::from_ref(&range), ReadAhead::Random, 128 << 10, 1 << 20, 1 << 30);
        assert_eq!(random, [Fetch::Now(0..4096)]);
    }

    #[test]
    fn windows_end_with_the_file_and_large_reads_are_whole() {
        let mut w = Window::default();
        let range = 0..8192;
        let all = w.read(&range, std::slice::from_ref(&range), ReadAhead::Normal, 128 << 10, 1 << 20, 9000);
        assert_eq!(all, [Fetch::Now(0..12288)]);
        let mut w = Window::default();
        let large = read(&mut w, 0, 1 << 20);
        assert_eq!(large[0], Fetch::Now(0..1 << 20), "one request of a megabyte, not eight windows");
    }
}
