//! Sorts records by arrival in a nearly sorted trace: writers write requests as they end.

use std::collections::BTreeMap;

use crate::codec::Record;

/// Returns an iterator's records in order of arrival if none is more than `window` records late; later ones are
/// returned as they come, and counted. Holds `window` records.
pub struct Ordered<I> {
    input: I,
    window: usize,
    /// By arrival, then by input position.
    waiting: BTreeMap<(u64, u64), Record>,
    seen: u64,
    last: u64,
    late: u64,
}

impl<E, I: Iterator<Item = Result<Record, E>>> Ordered<I> {
    /// Sorts `input`, with a window that suits servers with thousands of requests outstanding.
    pub fn new(input: I) -> Ordered<I> {
        Ordered::with_window(input, 1 << 16)
    }

    /// Sorts `input`.
    pub fn with_window(input: I, window: usize) -> Ordered<I> {
        Ordered { input, window: window.max(1), waiting: BTreeMap::new(), seen: 0, last: 0, late: 0 }
    }

    /// Records that came too late for their position.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// The input.
    pub fn input(&self) -> &I {
        &self.input
    }
}

impl<E, I: Iterator<Item = Result<Record, E>>> Iterator for Ordered<I> {
    type Item = Result<Record, E>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.waiting.len() < self.window {
            match self.input.next() {
                Some(Ok(record)) => {
                    self.waiting.insert((record.arrival.0, self.seen), record);
                    self.seen += 1;
                }
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        let ((arrival, _), record) = self.waiting.pop_first()?;
        if arrival < self.last {
            self.late += 1;
        }
        self.last = self.last.max(arrival);
        Some(Ok(record))
    }
}

#[cfg(test)]
mod tests {
    use crate::codec::TraceOp;
    use impresario_sched::{FileId, Nanos};

    use super::*;

    fn give(arrivals: &[u64], window: usize) -> (Vec<u64>, u64) {
        let record = |ns: &u64| Ok::<_, ()>(Record::new(TraceOp::Read, FileId(0), 0, 1, Nanos(*ns)));
        let mut ordered = Ordered::with_window(arrivals.iter().map(record), window);
        let got = ordered.by_ref().map(|r| r.unwrap().arrival.0).collect();
        (got, ordered.late())
    }

    #[test]
    fn a_window_sorts_slightly_late_records() {
        assert_eq!(give(&[3, 1, 2, 5, 4], 3), (vec![1, 2, 3, 4, 5], 0));
        assert_eq!(give(&[5, 6, 7, 1], 2), (vec![5, 6, 1, 7], 1));
        assert_eq!(give(&[], 2), (vec![], 0));
    }
}
