//! What a server owes a client for a request: one answer, or the pieces of one as they come.

use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_node::pieces::{Answering, Send};
use impresario_wire::{Answer, Fault};

use crate::connection::Reply;
use crate::outbox::Bulk;
use crate::payload::Slice;

/// The answer owed for a request, or for a piece or extent of one. Dropped, it leaves the request to be answered with
/// EIO.
pub(crate) enum Owed {
    /// A request of `len` bytes, answered with one frame.
    Whole { reply: Reply, len: u64, reads: bool },
    /// Bytes `at .. at + len` of an answer that has several.
    Part { shared: Arc<Shared>, at: u64, len: u64 },
    /// No answer: a read that no client has requested yet.
    Nothing,
}

/// The answer that several parts share.
pub(crate) struct Shared {
    reply: Reply,
    state: Mutex<State>,
}

struct State {
    answering: Answering,
    len: u64,
    fault: Option<Fault>,
    loss: FirstLoss,
}

/// The loss that the answer to a write of several parts names: the first that any of them was done under. Of what was lost after
/// a part was written, its writer has to learn.
#[derive(Clone, Copy, Default)]
pub(crate) struct FirstLoss(Option<u32>);

impl FirstLoss {
    /// A part was done when this was the object's last loss; 0: it had none.
    pub(crate) fn note(&mut self, loss: u32) {
        self.0 = Some(self.0.map_or(loss, |first| first.min(loss)));
    }

    /// 0: none.
    pub(crate) fn number(self) -> u32 {
        self.0.unwrap_or(0)
    }
}

/// What became of a request or part.
pub(crate) enum Came {
    Read(Slice),
    /// The bytes; and the object's last loss, or 0.
    Written(u64, u32),
    Done,
    /// A sync or truncation of an object that has lost data: its last loss, and the errno of a sync that failed.
    AfterLoss(u32, i32),
    Failed(Fault),
}

impl Shared {
    /// The answer to a request of `len` bytes; `reads`: its parts leave as they come.
    pub(crate) fn new(reply: Reply, len: u64, reads: bool) -> Arc<Shared> {
        let state = State { answering: Answering::new(len, reads), len, fault: None, loss: FirstLoss::default() };
        Arc::new(Shared { reply, state: Mutex::new(state) })
    }

    /// Sends bytes `at .. at + len` of the answer, of which the object has what is in `slices`.
    fn read(&self, at: u64, len: u64, slices: Vec<Slice>) {
        let send = self.state.lock().answering.done(len, 0);
        if let Send::Piece { .. } = send {
            let bulk = Bulk::Many(slices);
            let missing = len - bulk.len_bytes() as u64;
            self.reply.send_frame(&Answer::Piece { at: at as u32, missing: missing as u32 }, bulk);
            // A failure of another piece waits for this one to have left.
            let send = self.state.lock().answering.sent();
            return self.end(send);
        }
        self.end(send);
    }

    fn ended(&self, len: u64, fault: Option<Fault>, loss: u32) {
        let send = {
            let mut state = self.state.lock();
            let errno = fault.as_ref().map_or(0, |fault| fault.errno.max(1));
            state.fault = state.fault.take().or(fault);
            state.loss.note(loss);
            state.answering.done(len, errno)
        };
        self.end(send);
    }

    fn end(&self, send: Send) {
        let Send::End { .. } = send else { return };
        let (fault, len, loss) = {
            let mut state = self.state.lock();
            (state.fault.take(), state.len, state.loss.number())
        };
        let answer = fault.map_or_else(|| written(len, loss), Answer::Fault);
        self.reply.send_frame(&answer, Bulk::None);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Otherwise some part was given up, and the reply says so when it is dropped.
        if self.state.get_mut().answering.is_over() {
            self.reply.settle();
        }
    }
}

impl Owed {
    /// For a read of `len` bytes.
    pub(crate) fn read(reply: Reply, len: u64) -> Owed {
        Owed::Whole { reply, len, reads: true }
    }

    /// What is owed for bytes `from .. from + len` of the request.
    pub(crate) fn piece(&mut self, from: u64, piece_len: u64) -> Owed {
        if let Owed::Whole { reply, len, reads } = self {
            let (shared, len) = (Shared::new(reply.take(), *len, *reads), *len);
            *self = Owed::Part { shared, at: 0, len };
        }
        match self {
            Owed::Part { shared, at, .. } => Owed::Part { shared: shared.clone(), at: *at + from, len: piece_len },
            Owed::Whole { .. } | Owed::Nothing => Owed::Nothing,
        }
    }

    /// The reply that it is, or a part of.
    pub(crate) fn reply(&self) -> Option<&Reply> {
        match self {
            Owed::Whole { reply, .. } => Some(reply),
            Owed::Part { shared, .. } => Some(&shared.reply),
            Owed::Nothing => None,
        }
    }

    /// The whole of it.
    pub(crate) fn take(&mut self) -> Owed {
        std::mem::replace(self, Owed::Nothing)
    }

    /// Answers, or adds to the answer.
    pub(crate) fn fulfil(self, came: Came) {
        match (self, came) {
            (Owed::Nothing, _) => {}
            (Owed::Whole { reply, .. }, came) => answer(reply, came),
            (Owed::Part { shared, at, len }, Came::Read(slice)) => shared.read(at, len, vec![slice]),
            (Owed::Part { shared, len, .. }, Came::Failed(fault)) => shared.ended(len, Some(fault), 0),
            (Owed::Part { shared, len, .. }, Came::Written(_, loss)) => shared.ended(len, None, loss),
            (Owed::Part { shared, len, .. }, _) => shared.ended(len, None, 0),
        }
    }
}

/// Parts of one answer that follow one another and were read together: one frame takes them, at the latest when this is
/// dropped.
#[derive(Default)]
pub(crate) struct Run(Option<Parts>);

struct Parts {
    shared: Arc<Shared>,
    at: u64,
    len: u64,
    have: u64,
    slices: Vec<Slice>,
}

impl Run {
    /// Answers what was read, now or with what follows.
    pub(crate) fn read(&mut self, owed: Owed, slice: Slice) {
        let Owed::Part { shared, at, len } = owed else { return owed.fulfil(Came::Read(slice)) };
        let have = slice.len() as u64;
        if let Some(parts) = &mut self.0
            && Arc::ptr_eq(&parts.shared, &shared)
            && parts.at + parts.len == at
            && parts.have == parts.len
        {
            parts.len += len;
            parts.have += have;
            parts.slices.push(slice);
            return;
        }
        self.send();
        self.0 = Some(Parts { shared, at, len, have, slices: vec![slice] });
    }

    /// Sends what is held back.
    pub(crate) fn send(&mut self) {
        if let Some(Parts { shared, at, len, slices, .. }) = self.0.take() {
            shared.read(at, len, slices);
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.send();
    }
}

/// What is read from memory, or passed on, leaves in parts of this size: so each is in the processor's cache when it is sent, and
/// its buffer free for the next.
pub(crate) const PART_MAX_BYTES: u64 = 256 << 10;

/// Reads a range in parts and answers with them as they come; `read` gives what there is of a part up to the end of the
/// object, or `None` where it would have to wait: there it ends, and the rest is a piece of what is owed. Gives how much of the range
/// is answered, and the bytes moved.
pub(crate) fn send_parts(
    (at, len): (u64, u64),
    owed: &mut Owed,
    run: &mut Run,
    mut read: impl FnMut((u64, u64)) -> Option<Slice>,
) -> (u64, u64) {
    let (mut answered, mut moved) = (0, 0);
    while answered < len {
        let part = PART_MAX_BYTES.min(len - answered);
        let Some(slice) = read((at + answered, part)) else { break };
        let got = slice.len() as u64;
        moved += got;
        // Where the object ends, so does the answer.
        let part = if got < part { len - answered } else { part };
        let to = if part == len { owed.take() } else { owed.piece(answered, part) };
        run.read(to, slice);
        if len > PART_MAX_BYTES {
            run.send();
        }
        answered += part;
    }
    (answered, moved)
}

fn written(bytes: u64, loss: u32) -> Answer {
    let written = bytes as u32;
    if loss == 0 { Answer::Written(written) } else { Answer::AfterLoss { written, loss, errno: 0 } }
}

fn answer(reply: Reply, came: Came) {
    match came {
        Came::Read(slice) => reply.send_data(Bulk::One(slice)),
        Came::Written(bytes, loss) => reply.send(&written(bytes, loss)),
        Came::AfterLoss(loss, errno) => reply.send(&Answer::AfterLoss { written: 0, loss, errno }),
        Came::Done => reply.send(&Answer::Done),
        Came::Failed(fault) => reply.send(&Answer::Fault(fault)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_in_parts_is_of_before_the_first_loss() {
        let answered = |parts: &[u32]| {
            let mut loss = FirstLoss::default();
            parts.iter().for_each(|part| loss.note(*part));
            loss.number()
        };
        assert_eq!(answered(&[0, 5, 5]), 0, "a sync failed after the first part was written");
        assert_eq!(answered(&[5, 0]), 0, "parts end in any order");
        assert_eq!(answered(&[5, 7, 6]), 5);
        assert_eq!(answered(&[]), 0);
    }
}
