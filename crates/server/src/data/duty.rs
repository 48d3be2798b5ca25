//! The duty to answer a request: at once, or when the last of its pieces is there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use impresario_wire::{Answer, Fault};

use crate::connection::Reply;
use crate::outbox::Bulk;
use crate::payload::{Slice, lock};

/// The duty to answer a request or a piece of one. Dropped, it leaves the request to be answered with EIO.
pub(crate) enum Duty {
    Whole(Reply),
    Piece { gathered: Arc<Mutex<Gathered>>, from: u64, len: u64 },
}

/// What came of the pieces of a request so far.
pub(crate) struct Gathered {
    reply: Option<Reply>,
    read: BTreeMap<u64, (u64, Slice)>,
    written: u64,
    fault: Option<Fault>,
    pieces_left: u32,
    all_begun: bool,
}

/// What came of a request or piece.
pub(crate) enum Came {
    Read(Slice),
    Written(u64),
    Done,
    Failed(Fault),
}

impl Duty {
    /// The duty for a piece: bytes `from .. from + len` of the request; `last` when none follow.
    pub(crate) fn piece(&mut self, from: u64, len: u64, last: bool) -> Option<Duty> {
        if let Duty::Whole(_) = self {
            let gathered = Gathered {
                reply: None,
                read: BTreeMap::new(),
                written: 0,
                fault: None,
                pieces_left: 0,
                all_begun: false,
            };
            let gathered = Arc::new(Mutex::new(gathered));
            let piece = Duty::Piece { gathered: gathered.clone(), from: 0, len: 0 };
            if let Duty::Whole(reply) = std::mem::replace(self, piece) {
                lock(&gathered).reply = Some(reply);
            }
        }
        let Duty::Piece { gathered, .. } = self else { return None };
        let mut state = lock(gathered);
        state.pieces_left += 1;
        state.all_begun |= last;
        Some(Duty::Piece { gathered: gathered.clone(), from, len })
    }

    /// Answers, or adds to what the answer will be.
    pub(crate) fn fulfil(self, came: Came) {
        let (gathered, from, len) = match self {
            Duty::Whole(reply) => return answer(reply, came),
            Duty::Piece { gathered, from, len } => (gathered, from, len),
        };
        let mut state = lock(&gathered);
        match came {
            Came::Read(slice) => {
                state.read.insert(from, (len, slice));
            }
            Came::Written(bytes) => state.written += bytes,
            Came::Done => {}
            Came::Failed(fault) => state.fault = state.fault.take().or(Some(fault)),
        }
        state.pieces_left -= 1;
        if state.pieces_left > 0 || !state.all_begun {
            return;
        }
        let Some(reply) = state.reply.take() else { return };
        let (fault, written, read) = (state.fault.take(), state.written, std::mem::take(&mut state.read));
        drop(state);
        match fault {
            Some(fault) => answer(reply, Came::Failed(fault)),
            None if read.is_empty() => answer(reply, Came::Written(written)),
            None => {
                // The object ends in the first piece that came back short.
                let mut whole = true;
                let slices = read
                    .into_values()
                    .take_while(|(len, slice)| std::mem::replace(&mut whole, *len == slice.len() as u64));
                reply.send_data(Bulk::Many(slices.map(|(_, slice)| slice).collect()));
            }
        }
    }
}

fn answer(reply: Reply, came: Came) {
    match came {
        Came::Read(slice) => reply.send_data(Bulk::One(slice)),
        Came::Written(bytes) => reply.send(&Answer::Written(bytes as u32)),
        Came::Done => reply.send(&Answer::Done),
        Came::Failed(fault) => reply.send(&Answer::Fault(fault)),
    }
}
