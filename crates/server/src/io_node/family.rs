//! A request that was cut at the boundaries of data servers: its parts come back in any order, it is answered once.

use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_layout::{Layout, Piece};
use impresario_node::Parent;
use impresario_wire::{Answer, Fault, LaneState};

use crate::connection::{Connection, Reply};
use crate::outbox::Bulk;
use crate::owed::Owed;
use crate::payload::{Buffer, Slice};
use crate::withheld::CallKey;

/// The request and what is known of its parts.
pub(super) struct Family {
    layout: Layout,
    offset: u64,
    len: u64,
    /// One per part; none of a barrier.
    ranges: Vec<Piece>,
    /// Of a change of space that may move the end, which is done last.
    extends: bool,
    call: Option<CallKey>,
    state: Mutex<State>,
}

struct State {
    parent: Parent,
    reply: Option<Reply>,
    fault: Option<Fault>,
    /// What was read, one per part; shorter than the part's range where the object ended.
    read: Vec<Option<Slice>>,
    /// The data servers that hold what was written.
    lanes: Vec<LaneState>,
}

/// All parts are done; what is to be done now.
pub(super) enum Complete {
    /// Nothing: it was answered.
    Answered,
    /// An object ended early: it has to be found out what the file is there.
    Short(Short),
    /// The last barrier was reached.
    Barrier(Reply),
    /// The space is changed on these data servers; the end is to be moved.
    Extend(Reply, Vec<LaneState>),
}

/// A read of `len` bytes of a file that met the end of an object.
pub(super) struct Short {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) owed: Owed,
}

impl Family {
    /// The client has closed the connection, as far as this machine knows.
    pub(super) fn client_is_gone(&self) -> bool {
        self.state.lock().reply.as_ref().is_some_and(Reply::client_is_gone)
    }

    /// The call that it is, by its connection and its number there.
    pub(super) fn call(&self) -> Option<(&Arc<Connection>, u64)> {
        self.call.as_ref().map(|(connection, number)| (connection, *number))
    }

    /// Of a read or write of `len` bytes at `offset`, cut into `ranges`.
    pub(super) fn of_data(layout: Layout, offset: u64, len: u64, ranges: Vec<Piece>, reply: Reply) -> Arc<Family> {
        let call = call_of(&reply);
        let state = State {
            parent: Parent::new(ranges.len() as u32),
            reply: Some(reply),
            fault: None,
            read: ranges.iter().map(|_| None).collect(),
            lanes: Vec::new(),
        };
        Arc::new(Family { layout, offset, len, ranges, extends: false, call, state: Mutex::new(state) })
    }

    /// Of a change of space, cut into `ranges`.
    pub(super) fn of_change(layout: Layout, ranges: Vec<Piece>, extends: bool, reply: Reply) -> Arc<Family> {
        let (parent, call) = (Parent::new(ranges.len() as u32), call_of(&reply));
        let state = State { parent, reply: Some(reply), fault: None, read: Vec::new(), lanes: Vec::new() };
        Arc::new(Family { layout, offset: 0, len: 0, ranges, extends, call, state: Mutex::new(state) })
    }

    /// Its parts are barriers, with nothing to do but for the last one.
    pub(super) fn is_barrier(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Of a barrier on `parts` data servers.
    pub(super) fn of_barriers(layout: Layout, reply: Reply) -> Arc<Family> {
        let call = call_of(&reply);
        let state = State {
            parent: Parent::new(u32::from(layout.pcount)),
            reply: Some(reply),
            fault: None,
            read: Vec::new(),
            lanes: Vec::new(),
        };
        Arc::new(Family {
            layout,
            offset: 0,
            len: 0,
            ranges: Vec::new(),
            extends: false,
            call,
            state: Mutex::new(state),
        })
    }

    /// The bytes of a write that go to the data server of `range`, in the order of its object.
    pub(super) fn payload_of(&self, range: &Piece, buffer: &Arc<Buffer>) -> Bulk {
        let of_range = self.layout.pieces(self.offset, self.len).filter(|piece| piece.server == range.server);
        Bulk::Many(of_range.map(|piece| self.slice(buffer, &piece)).collect())
    }

    fn slice(&self, buffer: &Arc<Buffer>, piece: &Piece) -> Slice {
        let from = (piece.file_offset - self.offset) as usize;
        Slice::new(buffer.clone(), from..from + piece.len as usize)
    }

    /// A part was read, as far as its object goes.
    pub(super) fn part_read(self: &Arc<Self>, index: usize, bytes: Slice) -> Complete {
        let len = bytes.len() as u64;
        let mut state = self.state.lock();
        if let Some(slot) = state.read.get_mut(index) {
            *slot = Some(bytes);
        }
        self.part_done(&mut state, 0, len)
    }

    /// A part was written, or its space changed, and these data servers hold it.
    pub(super) fn part_written(self: &Arc<Self>, bytes: u64, lanes: &[LaneState]) -> Complete {
        let mut state = self.state.lock();
        state.lanes.extend_from_slice(lanes);
        self.part_done(&mut state, 0, bytes)
    }

    /// A barrier was reached.
    pub(super) fn part_completed(self: &Arc<Self>, bytes: u64) -> Complete {
        self.part_done(&mut self.state.lock(), 0, bytes)
    }

    /// A part failed; the first failure is what the client hears.
    pub(super) fn part_failed(self: &Arc<Self>, fault: &Fault) {
        let mut state = self.state.lock();
        state.fault.get_or_insert_with(|| fault.clone());
        self.part_done(&mut state, fault.errno, 0);
    }

    fn part_done(self: &Arc<Self>, state: &mut State, errno: i32, bytes: u64) -> Complete {
        let Some((errno, bytes)) = state.parent.part_done(errno, bytes) else { return Complete::Answered };
        let Some(reply) = state.reply.take() else { return Complete::Answered };
        if let Some(fault) = state.fault.take().filter(|_| errno != 0) {
            reply.send(&Answer::Fault(fault));
            return Complete::Answered;
        }
        if self.is_barrier() {
            return Complete::Barrier(reply);
        }
        if self.extends {
            return Complete::Extend(reply, std::mem::take(&mut state.lanes));
        }
        if state.read.iter().all(Option::is_none) {
            reply.send(&Answer::FileWritten { bytes: bytes as u32, lanes: std::mem::take(&mut state.lanes) });
            return Complete::Answered;
        }
        let read = std::mem::take(&mut state.read);
        if bytes < self.len {
            return Complete::Short(Short { offset: self.offset, len: self.len, owed: Owed::read(reply, self.len) });
        }
        reply.send_data(Bulk::Many(self.in_file_order(&read).collect()));
        Complete::Answered
    }

    /// What was read, as pieces in the order of the file.
    fn in_file_order<'a>(&'a self, read: &'a [Option<Slice>]) -> impl Iterator<Item = Slice> + 'a {
        self.layout.pieces(self.offset, self.len).filter_map(move |piece| {
            let index = self.ranges.iter().position(|range| range.server == piece.server)?;
            let from = (piece.lane_offset - self.ranges.get(index)?.lane_offset) as usize;
            Some(read.get(index)?.as_ref()?.part(from..from + piece.len as usize))
        })
    }
}

fn call_of(reply: &Reply) -> Option<CallKey> {
    reply.call().map(|(connection, number)| (connection.clone(), number))
}
