//! The answer that a call is owed: sent exactly once, whatever becomes of the call.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::budget::Reservation;
use crate::connection::{Connection, Frame};
use crate::protocol::Status;
use crate::replay::Key;
use crate::rpc::{self, Acceptance};
use crate::service::Service;
use crate::statistics::{Answered, Ended};
use crate::xdr::Writer;

/// Somebody who asked the same again while the call was under way.
pub struct Again {
    connection: Arc<Connection>,
    held: Reservation,
    begun_bytes: u64,
}

/// What is owed to a call. Dropped unsent, it answers that the server failed.
pub struct Reply {
    pub(crate) service: Arc<Service>,
    pub(crate) connection: Arc<Connection>,
    pub(crate) xid: u32,
    /// The row of the statistics.
    pub(crate) row: usize,
    pub(crate) user: Option<u32>,
    pub(crate) began: Instant,
    pub(crate) held: Reservation,
    /// What its connection counts as under way for it.
    pub(crate) begun_bytes: u64,
    /// Its answer is kept under this key.
    pub(crate) replay: Option<Key>,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) sent: bool,
}

/// Room for the record mark.
const MARK_BYTES: usize = 4;

impl Reply {
    /// The results' beginning: mark and head of a call that was carried out.
    pub fn writer(&self) -> Writer {
        let mut out = Writer::with_capacity(256);
        out.u32(0);
        rpc::reply(self.xid, Acceptance::Success, &mut out);
        out
    }

    /// Takes the answer out, to be sent while the call is still under way, with memory for `bytes` of it. What remains keeps
    /// the call's memory and owes nothing. `None`: there is no memory for the answer.
    pub(crate) fn take_answer(&mut self, bytes: u64) -> Option<Reply> {
        let mut held = Reservation::nothing(self.service.budget.clone());
        if !held.grow(bytes) {
            return None;
        }
        self.sent = true;
        Some(Reply {
            service: self.service.clone(),
            connection: self.connection.clone(),
            xid: self.xid,
            row: self.row,
            user: self.user,
            began: self.began,
            held,
            begun_bytes: self.begun_bytes,
            replay: self.replay.take(),
            read_bytes: 0,
            written_bytes: 0,
            sent: false,
        })
    }

    /// Sends results, with a part of a file behind them.
    pub fn send(mut self, out: Writer, payload: Option<(Arc<Vec<u8>>, Range<usize>)>, status: Status) {
        let ended = match status {
            Status::OK => Ended::Done,
            Status::JUKEBOX => Ended::Postponed,
            _ => Ended::Failed,
        };
        self.finish(out, payload, ended);
    }

    /// Says that the call was not carried out.
    pub fn refuse(mut self, why: Acceptance) {
        self.refusal(why);
    }

    fn refusal(&mut self, why: Acceptance) {
        let mut out = Writer::with_capacity(64);
        out.u32(0);
        rpc::reply(self.xid, why, &mut out);
        // What the server could not do may be tried again.
        self.finish(out, None, if why == Acceptance::SystemError { Ended::Postponed } else { Ended::Failed });
    }

    fn finish(&mut self, out: Writer, payload: Option<(Arc<Vec<u8>>, Range<usize>)>, ended: Ended) {
        self.sent = true;
        let head = marked(out.into_bytes(), payload.as_ref().map_or(0, |(_, range)| range.len()));
        let others = match self.replay.take() {
            Some(key) if ended == Ended::Postponed => self.service.replay.undone(key),
            Some(key) => self.service.replay.done(key, &head),
            None => Vec::new(),
        };
        for again in others {
            again.send(head.clone());
        }
        self.service.statistics.count(&Answered {
            row: self.row,
            took_ns: self.began.elapsed().as_nanos() as u64,
            ended,
            client: self.connection.peer.ip(),
            user: self.user,
            read_bytes: self.read_bytes,
            written_bytes: self.written_bytes,
        });
        let mut frame = Frame { head, payload, held: self.held.take() };
        frame.held.shrink_to(frame.len() as u64);
        self.connection.send(frame);
        self.connection.ended(self.begun_bytes);
    }

    /// The call is one that was seen before: whoever asked gets the answer when it is there.
    pub fn again(mut self) -> Again {
        self.sent = true;
        Again { connection: self.connection.clone(), held: self.held.take(), begun_bytes: self.begun_bytes }
    }
}

impl Again {
    /// Sends an answer as it was sent before.
    pub fn send(mut self, head: Vec<u8>) {
        self.held.shrink_to(head.len() as u64);
        self.connection.send(Frame { head, payload: None, held: self.held.take() });
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        self.connection.ended(self.begun_bytes);
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if self.sent {
            return;
        }
        if self.service.is_stopping() {
            // Not carried out and not answered: the client asks the next server.
            self.connection.close();
            self.connection.ended(self.begun_bytes);
            return;
        }
        self.refusal(Acceptance::SystemError);
    }
}

/// With the mark of a record of one fragment.
fn marked(mut head: Vec<u8>, payload_bytes: usize) -> Vec<u8> {
    let len = head.len() - MARK_BYTES + payload_bytes + crate::xdr::filling(payload_bytes).len();
    head[..MARK_BYTES].copy_from_slice(&(len as u32 | 1 << 31).to_be_bytes());
    head
}
