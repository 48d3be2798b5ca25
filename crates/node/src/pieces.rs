//! The answer to a request served in pieces: what to send when a piece is done, and when the receiver has everything.
//!
//! The pieces of a read are sent as they complete, in any order; each carries its offset in the answer, and the
//! receiver is done when every byte is accounted for. Other requests are answered once, after the last piece. A failure
//! is always sent last, so that nothing follows the frame that ends a call.

/// The server's side of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answering {
    /// Pieces are sent as they complete.
    streams: bool,
    /// Bytes of the request not yet done.
    left_bytes: u64,
    /// The first error; 0: none.
    errno: i32,
    /// Pieces released for sending and not yet reported as sent.
    sending: u32,
    ended: bool,
}

/// What a server sends next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Send {
    /// Nothing.
    Nothing,
    /// The piece; [`Answering::sent`] must follow. `last`: no other piece will follow.
    Piece {
        /// Every byte of the request is done.
        last: bool,
    },
    /// The whole answer, or the failure with this errno. Nothing may be sent after it.
    End {
        /// 0, or the first error.
        errno: i32,
    },
}

impl Answering {
    /// The answer to a request of `len_bytes`; `streams` for a read whose pieces are sent as they complete.
    pub fn new(len_bytes: u64, streams: bool) -> Answering {
        Answering { streams, left_bytes: len_bytes, errno: 0, sending: 0, ended: false }
    }

    /// `len_bytes` of the request are done, or failed with `errno`.
    pub fn done(&mut self, len_bytes: u64, errno: i32) -> Send {
        self.left_bytes = self.left_bytes.saturating_sub(len_bytes);
        if self.errno == 0 {
            self.errno = errno;
        }
        if self.streams && self.errno == 0 && !self.ended {
            self.sending += 1;
            return Send::Piece { last: self.left_bytes == 0 };
        }
        self.end()
    }

    /// A piece released by [`Answering::done`] was handed to the connection.
    pub fn sent(&mut self) -> Send {
        self.sending = self.sending.saturating_sub(1);
        // Without a failure, the pieces are the whole answer.
        if self.errno == 0 { Send::Nothing } else { self.end() }
    }

    /// The request will not continue: the missing bytes have failed.
    pub fn give_up(&mut self, errno: i32) -> Send {
        self.done(self.left_bytes, errno)
    }

    /// True if the whole answer was sent.
    pub fn is_over(&self) -> bool {
        self.ended || (self.streams && self.errno == 0 && self.left_bytes == 0 && self.sending == 0)
    }

    /// The first error; 0: none.
    pub fn errno(&self) -> i32 {
        self.errno
    }

    fn end(&mut self) -> Send {
        if self.left_bytes > 0 || self.sending > 0 || self.ended {
            return Send::Nothing;
        }
        self.ended = true;
        Send::End { errno: self.errno }
    }
}

/// The receiver's side of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gathering {
    want_bytes: u64,
    got_bytes: u64,
    /// So many bytes from the start on have come without a gap: no piece begins before.
    front_bytes: u64,
    /// Position of the first missing byte; `want_bytes` if none is missing.
    short_at: u64,
}

/// A piece that no correct sender sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Misplaced;

impl Gathering {
    /// An answer of `want_bytes` before its first piece.
    pub fn new(want_bytes: u64) -> Gathering {
        Gathering { want_bytes, got_bytes: 0, front_bytes: 0, short_at: want_bytes }
    }

    /// Accepts a piece: `len_bytes` at `at` in the answer, then `missing_bytes` that do not exist. A piece that does
    /// not fit into the rest is refused before any of its bytes is used.
    pub fn piece(&mut self, at: u64, len_bytes: u64, missing_bytes: u64) -> Result<(), Misplaced> {
        let covered = len_bytes.checked_add(missing_bytes).ok_or(Misplaced)?;
        let end = at.checked_add(covered).ok_or(Misplaced)?;
        let is_taken = at < self.front_bytes;
        if covered == 0 || is_taken || end > self.want_bytes || self.got_bytes + covered > self.want_bytes {
            return Err(Misplaced);
        }
        if at == self.front_bytes {
            self.front_bytes += len_bytes;
        }
        self.got_bytes += covered;
        if missing_bytes > 0 {
            self.short_at = self.short_at.min(at + len_bytes);
        }
        Ok(())
    }

    /// True if every byte is accounted for.
    pub fn is_complete(&self) -> bool {
        self.got_bytes == self.want_bytes
    }

    /// Bytes accounted for so far.
    pub fn got_bytes(&self) -> u64 {
        self.got_bytes
    }

    /// Bytes before the first missing one.
    pub fn whole_bytes(&self) -> u64 {
        self.short_at
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pieces_of_a_read_leave_as_they_come() {
        let mut a = Answering::new(30, true);
        assert_eq!(a.done(10, 0), Send::Piece { last: false });
        assert_eq!(a.sent(), Send::Nothing);
        assert_eq!(a.done(20, 0), Send::Piece { last: true });
        assert_eq!(a.sent(), Send::Nothing);
    }

    #[test]
    fn a_write_is_answered_once() {
        let mut a = Answering::new(30, false);
        assert_eq!([a.done(10, 0), a.done(20, 0)], [Send::Nothing, Send::End { errno: 0 }]);
        assert_eq!(a.done(0, 0), Send::Nothing);
    }

    #[test]
    fn a_failure_leaves_last() {
        let mut a = Answering::new(30, true);
        assert_eq!(a.done(10, 0), Send::Piece { last: false });
        // Another thread's piece fails before the first one was sent.
        assert_eq!(a.done(20, 5), Send::Nothing);
        assert_eq!(a.sent(), Send::End { errno: 5 });
        let mut a = Answering::new(30, true);
        assert_eq!(a.done(10, 28), Send::Nothing);
        assert_eq!(a.give_up(5), Send::End { errno: 28 }, "the first error wins");
    }

    #[test]
    fn misplaced_pieces_are_refused_and_change_nothing() {
        let mut g = Gathering::new(100);
        g.piece(0, 60, 0).unwrap();
        let before = g;
        for (at, len, missing) in
            [(60, 41, 0), (60, 40, 1), (0, 50, 0), (59, 1, 0), (u64::MAX, 1, 0), (60, 0, 0), (1, 2, u64::MAX)]
        {
            assert_eq!(g.piece(at, len, missing), Err(Misplaced), "{at} {len} {missing}");
        }
        assert_eq!(g, before);
        g.piece(60, 10, 30).unwrap();
        assert!(g.is_complete());
        assert_eq!(g.whole_bytes(), 70);
    }

    proptest! {
        /// Pieces complete and are sent in any order: the receiver gets all bytes, or exactly one failure, which
        /// nothing follows.
        #[test]
        fn an_answer_ends_once(
            lens in proptest::collection::vec(1u64..50, 1..20),
            fails in proptest::collection::vec(any::<bool>(), 20),
            order in any::<prop::sample::Selector>(),
            late in proptest::collection::vec(any::<bool>(), 20),
            may_fail: bool,
        ) {
            let total: u64 = lens.iter().sum();
            let mut server = Answering::new(total, true);
            let mut client = Gathering::new(total);
            let starts: Vec<u64> = lens.iter().scan(0, |at, len| { *at += len; Some(*at - len) }).collect();
            let mut shuffled: Vec<usize> = (0..lens.len()).collect();
            for i in (1..shuffled.len()).rev() {
                let j = order.select(0..=i);
                shuffled.swap(i, j);
            }
            let (mut ends, mut sending) = (Vec::new(), Vec::new());
            for (n, i) in shuffled.into_iter().enumerate() {
                let errno = if may_fail && fails[n] { 5 } else { 0 };
                match server.done(lens[i], errno) {
                    Send::Piece { .. } if late[n] => sending.push(i),
                    Send::Piece { .. } => {
                        prop_assert!(ends.is_empty());
                        client.piece(starts[i], lens[i], 0).unwrap();
                        if let Send::End { errno } = server.sent() { ends.push(errno) }
                    }
                    Send::End { errno } => ends.push(errno),
                    Send::Nothing => {}
                }
            }
            for i in sending {
                prop_assert!(ends.is_empty());
                client.piece(starts[i], lens[i], 0).unwrap();
                if let Send::End { errno } = server.sent() { ends.push(errno) }
            }
            if server.errno() == 0 {
                prop_assert!(ends.is_empty() && client.is_complete());
            } else {
                prop_assert_eq!(ends, [5]);
                prop_assert!(!client.is_complete());
            }
        }
    }
}
