//! What concurrent reads may return: a file as a multi-writer register per cell (Lamport, "On Interprocess
//! Communication", 1986; regular registers with several writers).
//!
//! A read may return a write that was invoked before the read ended, unless another write to that cell lies wholly
//! between the two in time. Contents from before all recorded writes count as a write at time 0. Reads that run beside
//! a write may also mix old and new bytes within a cell, where the file system promises no more; each byte must then be
//! of a write that the read may return.

use crate::stamp::{CELL_BYTES, Mark, Stamps, name};

/// A write of a round. Times are ticks of one counter that the run counts up at each start and end of a request.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub mark: Option<Mark>,
    pub offset: u64,
    pub len: usize,
    pub invoked: u64,
    /// `None`: no reply, or an error. Its bytes may appear at any time from then on, or never.
    pub acknowledged: Option<u64>,
}

/// A read of a round.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub reader: u32,
    pub offset: u64,
    pub bytes: Vec<u8>,
    pub invoked: u64,
    pub ended: u64,
}

/// The writes of a round over known contents.
pub(crate) struct History {
    pub stamps: Stamps,
    /// The write of each cell before the round.
    pub before: Vec<Option<Mark>>,
    pub writes: Vec<Written>,
}

impl History {
    /// Whether the read is one that some order of the writes allows; the error names offset, candidates and what was found.
    pub fn check(&self, seen: &Seen) -> Result<(), String> {
        let end = seen.offset + seen.bytes.len() as u64;
        let overlapping: Vec<&Written> = self
            .writes
            .iter()
            .filter(|w| w.offset < end && w.offset + w.len as u64 > seen.offset && w.invoked < seen.ended)
            .collect();
        for (n, cell) in seen.bytes.chunks(CELL_BYTES).enumerate() {
            let place = seen.offset + (n * CELL_BYTES) as u64;
            let candidates = self.candidates(&overlapping, seen, place);
            let cells: Vec<[u8; CELL_BYTES]> = candidates.iter().map(|&mark| self.stamps.cell(mark, place)).collect();
            let whole = cells.iter().any(|candidate| candidate == cell);
            let mixed = || (0..cell.len()).all(|i| cells.iter().any(|candidate| candidate[i] == cell[i]));
            if !whole && (cells.len() < 2 || !mixed()) {
                let allowed: Vec<String> = candidates.iter().map(|&mark| name(mark)).collect();
                let found = self.stamps.describe(cell, place);
                return Err(format!("offset {place}: expected {}, found {found}", allowed.join(" or ")));
            }
        }
        Ok(())
    }

    /// The writes that a read may return at a place.
    fn candidates(&self, overlapping: &[&Written], seen: &Seen, place: u64) -> Vec<Option<Mark>> {
        let covers = |w: &&&Written| w.offset <= place && place < w.offset + w.len as u64;
        let here: Vec<&&Written> = overlapping.iter().filter(covers).collect();
        // Of the writes acknowledged before the read began: the latest start. What ended before it is superseded.
        let acknowledged = here.iter().filter(|w| w.acknowledged.is_some_and(|at| at < seen.invoked));
        let newest = acknowledged.map(|w| w.invoked).max();
        let current = |ended: Option<u64>| match (ended, newest) {
            (Some(ended), Some(newest)) => ended > newest,
            _ => true,
        };
        let mut marks: Vec<Option<Mark>> = Vec::new();
        if newest.is_none() {
            marks.push(self.before.get(place as usize / CELL_BYTES).copied().flatten());
        }
        marks.extend(here.iter().filter(|w| current(w.acknowledged)).map(|w| w.mark));
        marks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FILE: Stamps = Stamps { run: 5, file: 1 };

    fn write(sequence: u64, invoked: u64, acknowledged: Option<u64>) -> Written {
        Written { mark: Some(Mark { writer: 1, sequence }), offset: 0, len: 64, invoked, acknowledged }
    }

    fn seen(cell: [u8; 32], invoked: u64, ended: u64) -> Seen {
        Seen { reader: 0, offset: 32, bytes: cell.to_vec(), invoked, ended }
    }

    fn of(sequence: u64) -> [u8; 32] {
        FILE.cell(Some(Mark { writer: 1, sequence }), 32)
    }

    #[test]
    fn a_read_may_return_what_some_order_allows() {
        let history = History {
            stamps: FILE,
            before: vec![None; 2],
            writes: vec![write(1, 1, Some(5)), write(2, 3, Some(8)), write(3, 10, Some(12)), write(4, 20, None)],
        };
        let ok = |cell, invoked, ended| history.check(&seen(cell, invoked, ended)).is_ok();
        assert!(ok([0; 32], 0, 2) && ok(of(1), 2, 4) && !ok(of(3), 2, 4), "beside write 1 only");
        assert!(ok(of(1), 9, 9) && ok(of(2), 9, 9) && !ok([0; 32], 9, 9), "writes 1 and 2 ran together");
        assert!(ok(of(3), 13, 14) && !ok(of(2), 13, 14) && !ok(of(1), 13, 14), "write 3 is over both");
        assert!(ok(of(3), 30, 31) && ok(of(4), 30, 31) && !ok(of(5), 30, 31), "write 4 may still come");
        let mut torn = of(3);
        torn[16..].copy_from_slice(&of(4)[16..]);
        assert!(ok(torn, 30, 31));
        torn[20] = 99;
        let said = history.check(&seen(torn, 30, 31)).unwrap_err();
        assert!(
            said.starts_with("offset 32: expected writer 1's write 3 or writer 1's write 4, found writer 1"),
            "{said}"
        );
    }

    proptest! {
        /// Against the definition: a register whose writes take effect at an instant between start and end.
        #[test]
        fn what_a_real_register_returns_is_allowed(
            spans in prop::collection::vec((0u64..100, 1u64..30, 0u64..30), 1..12),
            read in (0u64..120, 0u64..30, 0u64..30),
        ) {
            let mut effects: Vec<(u64, u64)> = Vec::new();
            let mut writes = Vec::new();
            for (n, &(start, span, at)) in spans.iter().enumerate() {
                let sequence = n as u64 + 1;
                // Distinct ticks: starts, effects and ends of different requests never fall together.
                let (invoked, ended) = (start * 1000 + sequence, (start + span) * 1000 + 500 + sequence);
                effects.push((invoked + (ended - invoked) * at.min(29) / 30, sequence));
                writes.push(write(sequence, invoked, Some(ended)));
            }
            let (invoked, ended) = (read.0 * 1000 + 900, (read.0 + read.1) * 1000 + 990);
            let instant = invoked + (ended - invoked) * read.2.min(29) / 30;
            effects.sort_unstable();
            let value = effects.iter().rev().find(|effect| effect.0 < instant);
            let cell = value.map_or([0; 32], |effect| of(effect.1));
            let history = History { stamps: FILE, before: vec![None; 2], writes };
            prop_assert!(history.check(&seen(cell, invoked, ended)).is_ok());
        }
    }
}
