//! The contents of a data server as versions: what was last written, what is on the device, what is in its page cache.
//! Kept only while the laws are checked: a read of any version but the last written is stale.
//!
//! Device accesses take effect in the order in which they are issued, whatever the order of service: a kernel does not
//! read a page that is being written.

use std::collections::BTreeMap;
use std::ops::Range;

use impresario_base::slab::Key;
use impresario_device::PAGE_BYTES;

/// Versions of ranges by file and first byte, disjoint; elsewhere 0.
#[derive(Clone, Default)]
struct Versions(BTreeMap<(u32, u64), (u64, u64)>);

impl Versions {
    fn set(&mut self, file: u32, range: Range<u64>, version: u64) {
        if range.is_empty() {
            return;
        }
        let before = self
            .0
            .range(..(file, range.start))
            .next_back()
            .filter(|((f, _), (end, _))| *f == file && *end > range.start);
        if let Some((&key, &(end, old))) = before {
            self.0.insert(key, (range.start, old));
            if end > range.end {
                self.0.insert((file, range.end), (end, old));
            }
        }
        let within: Vec<(u32, u64)> =
            self.0.range((file, range.start)..(file, range.end)).map(|(key, _)| *key).collect();
        for key in within {
            if let Some((end, old)) = self.0.remove(&key).filter(|(end, _)| *end > range.end) {
                self.0.insert((file, range.end), (end, old));
            }
        }
        self.0.insert((file, range.start), (range.end, version));
    }

    /// The versions of a range in order; equal neighbours are merged.
    fn get(&self, file: u32, range: Range<u64>) -> Vec<(Range<u64>, u64)> {
        let mut found: Vec<(Range<u64>, u64)> = Vec::new();
        let mut add = |range: Range<u64>, version: u64| match found.last_mut() {
            _ if range.is_empty() => {}
            Some((last, of)) if *of == version && last.end == range.start => last.end = range.end,
            _ => found.push((range, version)),
        };
        let before = self.0.range(..(file, range.start)).next_back().filter(|((f, _), _)| *f == file);
        let mut at = range.start;
        for (&(_, start), &(end, version)) in
            before.into_iter().chain(self.0.range((file, range.start)..(file, range.end)))
        {
            let (start, end) = (start.max(at), end.min(range.end));
            if start < end {
                add(at..start, 0);
                add(start..end, version);
                at = end;
            }
        }
        add(at..range.end, 0);
        found
    }

    fn copy(&mut self, from: &Versions, file: u32, range: Range<u64>) {
        from.get(file, range).into_iter().for_each(|(range, version)| self.set(file, range, version));
    }
}

/// The contents of one server.
#[derive(Default)]
pub(crate) struct Contents {
    version: u64,
    written: Versions,
    device: Versions,
    cached: Versions,
    /// Device data for fetches in progress, by file.
    fetched: BTreeMap<Key, (u32, Versions)>,
}

impl Contents {
    /// A write goes into the cache and, if `through`, to the device. Partly written pages are read first, unless they
    /// are `present`.
    pub(crate) fn wrote(&mut self, file: u32, range: Range<u64>, through: bool, present: impl Fn(u64) -> bool) {
        let first = range.start / PAGE_BYTES * PAGE_BYTES;
        let last = (range.end - 1) / PAGE_BYTES * PAGE_BYTES;
        for page in [first, last].into_iter().filter(|page| !present(*page)) {
            self.cached.copy(&self.device, file, page..page + PAGE_BYTES);
        }
        self.version += 1;
        self.written.set(file, range.clone(), self.version);
        self.cached.set(file, range.clone(), self.version);
        if through {
            self.device.set(file, range, self.version);
        }
    }

    /// Dirty pages are being written to the device.
    pub(crate) fn flushed(&mut self, file: u32, range: Range<u64>) {
        self.device.copy(&self.cached, file, range);
    }

    /// A fetch of a range is issued to the device.
    pub(crate) fn asked(&mut self, fetch: Key, file: u32, range: Range<u64>) {
        let mut given = Versions::default();
        given.copy(&self.device, file, range);
        self.fetched.insert(fetch, (file, given));
    }

    /// A fetch has ended and filled these pages.
    pub(crate) fn filled(&mut self, fetch: Key, file: u32, filled: &[Range<u64>]) {
        let Some((_, given)) = self.fetched.remove(&fetch) else { return };
        filled.iter().for_each(|pages| self.cached.copy(&given, file, pages.clone()));
    }

    /// From `end` on there is nothing, or zeros. A kernel clears the rest of the last page once it has been read.
    pub(crate) fn cut(&mut self, file: u32, end: u64) {
        self.version += 1;
        for versions in [&mut self.written, &mut self.device, &mut self.cached] {
            versions.set(file, end..u64::MAX, self.version);
        }
        for (_, given) in self.fetched.values_mut().filter(|(of, _)| *of == file) {
            given.set(file, end..end.next_multiple_of(PAGE_BYTES), self.version);
        }
    }

    /// Checks a read of a range that is in the cache.
    pub(crate) fn read(&self, file: u32, range: Range<u64>) -> Option<String> {
        let (got, written) = (self.cached.get(file, range.clone()), self.written.get(file, range));
        (got != written)
            .then(|| format!("law 10: a read got stale bytes of file {file}: versions {got:?} of {written:?}"))
    }

    /// A restart loses what was only in memory.
    pub(crate) fn restarted(&mut self) {
        self.written = self.device.clone();
        self.fetched.clear();
    }
}

#[cfg(test)]
// Lists of ranges are compared.
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = PAGE_BYTES;

    #[test]
    fn a_fetch_that_overtakes_a_write_shadows_it() {
        let mut c = Contents::default();
        let fetch = Key { index: 0, generation: 0 };
        c.asked(fetch, 1, 0..4 * PAGE);
        c.wrote(1, PAGE..2 * PAGE, true, |_| false);
        assert_eq!(c.read(1, PAGE..2 * PAGE), None);
        // The way a cache must fill it, and the way it must not.
        c.filled(fetch, 1, &[0..PAGE, 2 * PAGE..4 * PAGE]);
        assert_eq!(c.read(1, 0..4 * PAGE), None);
        c.asked(fetch, 1, 0..4 * PAGE);
        c.wrote(1, PAGE..2 * PAGE, true, |_| true);
        c.filled(fetch, 1, &[0..4 * PAGE]);
        assert!(c.read(1, 0..4 * PAGE).is_some_and(|what| what.contains("stale")));
        assert_eq!(c.read(1, 0..PAGE), None);
    }

    #[test]
    fn what_a_truncation_cut_off_is_stale() {
        let mut c = Contents::default();
        let fetch = Key { index: 0, generation: 0 };
        c.asked(fetch, 1, 0..4 * PAGE);
        c.cut(1, PAGE + 1);
        c.filled(fetch, 1, &[0..4 * PAGE]);
        assert_eq!(c.read(1, 0..PAGE + 1), None);
        assert!(c.read(1, 2 * PAGE..3 * PAGE).is_some());
    }

    #[test]
    fn a_restart_loses_what_the_device_has_not() {
        let mut c = Contents::default();
        c.wrote(1, 10..20, false, |_| false);
        c.wrote(1, 2 * PAGE..3 * PAGE, false, |_| false);
        c.flushed(1, 0..PAGE);
        c.restarted();
        let fetch = Key { index: 0, generation: 0 };
        c.asked(fetch, 1, 0..4 * PAGE);
        c.filled(fetch, 1, &[0..4 * PAGE]);
        assert_eq!(c.read(1, 0..4 * PAGE), None);
    }

    proptest! {
        #[test]
        fn versions_are_those_of_a_table(sets in prop::collection::vec((0u32..2, 0u64..60, 0u64..30, 0u64..4), 0..40), from in 0u64..50, len in 0u64..60) {
            let mut versions = Versions::default();
            let mut table = [[0u64; 128]; 2];
            for (file, start, len, version) in sets {
                versions.set(file, start..start + len, version);
                table[file as usize][start as usize..(start + len) as usize].fill(version);
            }
            for file in 0..2 {
                let got = versions.get(file, from..from + len);
                let flat: Vec<u64> = got.iter().flat_map(|(r, v)| r.clone().map(move |_| *v)).collect();
                prop_assert_eq!(&flat[..], &table[file as usize][from as usize..(from + len) as usize]);
                prop_assert!(got.windows(2).all(|w| w[0].0.end == w[1].0.start && w[0].1 != w[1].1));
            }
        }
    }
}
