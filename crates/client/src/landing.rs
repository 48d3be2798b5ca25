//! Where an answer's payload lands: buffers of the thread that waits, filled by the thread that receives.
//!
//! A thread that waits for its answer lends its buffers to the connection; whichever thread happens to receive
//! writes into them. This file holds all that is unsafe about it. A call that no thread waits for brings a buffer of its own.

use std::io::IoSliceMut;
use std::ptr::NonNull;

use impresario_transport::PIECES_MAX;

use crate::unattended::Task;

/// The right to lend a caller's buffers, anew each time that a call is sent.
#[derive(Clone, Copy)]
pub(crate) struct Lender {
    pieces: NonNull<[IoSliceMut<'static>]>,
    len: usize,
}

impl Lender {
    /// Buffers to be lent.
    ///
    /// # Safety
    /// Until the last landing made from this value has been dropped, the caller keeps the list and the buffers
    /// borrowed and does not touch them; and it has no second landing made while one exists.
    pub(crate) unsafe fn new(pieces: &mut [IoSliceMut<'_>]) -> Lender {
        let len = pieces.iter().map(|piece| piece.len()).sum();
        // Forgets the buffers' lifetime: a raw pointer has none, and only the contract counts.
        let count = pieces.len();
        Lender { pieces: NonNull::slice_from_raw_parts(NonNull::from(pieces).cast(), count), len }
    }

    /// Bytes that the buffers hold.
    pub(crate) fn len_bytes(&self) -> usize {
        self.len
    }

    /// Lends the buffers.
    pub(crate) fn lend(&self) -> Landing {
        Landing::Lent(LentPieces(self.pieces))
    }
}

/// Buffers for a payload. The owner of this value may write into them; it moves between threads under the connection's lock.
pub(crate) enum Landing {
    /// Those of a thread that waits.
    Lent(LentPieces),
    /// That of a call that no thread waits for.
    Own(Box<dyn Task>),
}

/// Lent buffers.
pub(crate) struct LentPieces(NonNull<[IoSliceMut<'static>]>);

// SAFETY: this is the exclusive right to write into plain bytes (see `Lender::new`); which thread does so is of no
// importance to them.
unsafe impl Send for LentPieces {}

// SAFETY: a lender is only the address of buffers; what may be done with them, its contract says.
unsafe impl Send for Lender {}

impl Landing {
    /// The task whose buffer this is.
    pub(crate) fn into_task(self) -> Option<Box<dyn Task>> {
        match self {
            Landing::Lent(_) => None,
            Landing::Own(task) => Some(task),
        }
    }

    /// Copies `bytes` to offset `at` of the buffers taken back to back.
    pub(crate) fn put(&mut self, at: usize, mut bytes: &[u8]) {
        self.from(at, |piece| {
            let (now, later) = bytes.split_at(bytes.len().min(piece.len()));
            piece.split_at_mut(now.len()).0.copy_from_slice(now);
            bytes = later;
            !bytes.is_empty()
        });
    }

    /// Zeroes `len` bytes from offset `at` on.
    pub(crate) fn zero(&mut self, at: usize, mut len: usize) {
        self.from(at, |piece| {
            let piece = piece.split_at_mut(len.min(piece.len())).0;
            piece.fill(0);
            len -= piece.len();
            len > 0
        });
    }

    /// Calls `receive` with what lies from offset `at` on, in at most as many pieces as one system call takes.
    pub(crate) fn with_rest<R>(
        &mut self,
        at: usize,
        max: usize,
        receive: impl FnOnce(&mut [IoSliceMut<'_>]) -> R,
    ) -> R {
        // Of a task, which may give the same place twice, one piece.
        let most = if matches!(self, Landing::Own(_)) { 1 } else { PIECES_MAX };
        let mut rest = [const { None }; PIECES_MAX];
        let (mut count, mut left) = (0, max);
        self.from(at, |piece| {
            let piece = piece.split_at_mut(left.min(piece.len())).0;
            left -= piece.len();
            if let Some(slot) = rest.get_mut(count) {
                *slot = Some(NonNull::from(piece));
                count += 1;
            }
            count < most && left > 0
        });
        let mut slices = rest.map(|piece| match piece {
            // SAFETY: the pieces are disjoint parts of buffers that this landing alone may touch, and `&mut self` is
            // held for as long as these references live.
            Some(mut piece) => IoSliceMut::new(unsafe { piece.as_mut() }),
            None => IoSliceMut::new(&mut []),
        });
        receive(slices.split_at_mut(count).0)
    }

    /// Visits the non-empty parts from offset `at` on while `visit` says so.
    fn from(&mut self, at: usize, mut visit: impl FnMut(&mut [u8]) -> bool) {
        let pieces = match self {
            // SAFETY: by the contract of `Lender::new` the list is alive and ours alone while this value exists.
            Landing::Lent(LentPieces(pieces)) => unsafe { pieces.as_mut() },
            Landing::Own(task) => {
                let mut at = at;
                loop {
                    let part = task.place(at);
                    at += part.len();
                    if part.is_empty() || !visit(part) {
                        return;
                    }
                }
            }
        };
        let mut skip = at;
        for piece in pieces {
            match piece.get_mut(skip..) {
                Some([]) => skip = 0,
                Some(part) => {
                    skip = 0;
                    if !visit(part) {
                        return;
                    }
                }
                None => skip -= piece.len(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_land_in_order_across_pieces() {
        let (mut a, mut b, mut c) = ([0u8; 3], [0u8; 0], [0u8; 5]);
        let mut pieces = [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b), IoSliceMut::new(&mut c)];
        // SAFETY: `pieces` is not touched before the landing is dropped.
        let lender = unsafe { Lender::new(&mut pieces) };
        assert_eq!(lender.len_bytes(), 8);
        let mut landing = lender.lend();
        landing.put(1, &[1, 2, 3, 4]);
        let room = landing.with_rest(5, 2, |rest| {
            rest[0].copy_from_slice(&[8, 9]);
            rest.len()
        });
        assert_eq!(room, 1);
        assert_eq!(landing.with_rest(2, 100, |rest| rest.iter().map(|p| p.len()).collect::<Vec<_>>()), [1, 5]);
        assert_eq!(landing.with_rest(8, 100, |rest| rest.len()), 0);
        landing.put(8, &[]);
        landing.zero(2, 2);
        landing.zero(8, 0);
        assert_eq!((a, c), ([0, 1, 0], [0, 4, 8, 9, 0]));
    }

    #[test]
    fn more_pieces_than_one_call_takes() {
        let mut bytes = vec![0u8; 1000];
        let mut pieces: Vec<_> = bytes.chunks_mut(10).map(IoSliceMut::new).collect();
        // SAFETY: as above.
        let mut landing = unsafe { Lender::new(&mut pieces) }.lend();
        assert_eq!(landing.with_rest(5, 1000, |rest| (rest.len(), rest[0].len())), (PIECES_MAX, 5));
        landing.put(0, &[7; 1000]);
        assert!(bytes.iter().all(|b| *b == 7));
    }
}
