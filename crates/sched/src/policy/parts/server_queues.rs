//! The queues of each data server: in order of arrival, or in the order of a scan over files and offsets.

use super::anticipation::Stream;
use super::backlog::Backlog;
use super::ranked::Ranked;
use crate::policy::{Params, Setup, View};
use crate::table::Slot;
use crate::types::{FileId, LaneId, Op};

/// One queue per server.
pub(crate) enum ServerQueues {
    /// The oldest request goes next, alone or with the requests that touch it.
    Arrival(Backlog),
    /// A scan over files and offsets.
    Offset { queues: Ranked<FileKey, FileKey>, stands: Vec<Stand> },
}

/// Order of a server's files: stable key, operation; the interned identity for files without names.
pub(crate) type FileKey = (u64, Op, FileId);

/// The position of a server's scan.
#[derive(Clone, Copy)]
pub(crate) struct Stand {
    file_key: u64,
    op: Op,
    offset: u64,
}

impl Stand {
    fn ranks(self) -> (FileKey, FileKey) {
        ((self.file_key, self.op, FileId(0)), (self.file_key, self.op, FileId(u32::MAX)))
    }
}

impl ServerQueues {
    /// From the parameters `merge`, `batch_requests`, `batch_bytes` and `guard_batches`.
    pub fn new(by_offset: bool, params: &Params, setup: &Setup) -> ServerQueues {
        if !by_offset {
            return ServerQueues::Arrival(Backlog::new(setup.lanes.into(), params.on("merge"), params));
        }
        let queues = Ranked::new(params, setup, |key, _| key);
        let stands = vec![Stand { file_key: 0, op: Op::Read, offset: 0 }; setup.lanes.into()];
        ServerQueues::Offset { queues, stands }
    }

    /// Queues a request.
    pub fn insert(&mut self, view: &View<'_>, lane: LaneId, slot: Slot) {
        match self {
            ServerQueues::Arrival(backlog) => backlog.insert(view, lane.index(), slot),
            ServerQueues::Offset { queues, .. } => {
                let (file, op) = (view.table.file(slot), view.table.op(slot));
                queues.insert(view, lane.index(), (view.names.file(file), op, file), slot);
            }
        }
    }

    /// Forgets a cancelled request.
    pub fn remove(&mut self, view: &View<'_>, slot: Slot) {
        match self {
            ServerQueues::Arrival(backlog) => backlog.remove(view, view.table.lane(slot).index(), slot),
            ServerQueues::Offset { queues, .. } => queues.remove(view, slot),
        }
    }

    /// True if the server has nothing queued.
    pub fn is_empty(&self, lane: LaneId) -> bool {
        match self {
            ServerQueues::Arrival(backlog) => backlog.is_empty(lane.index()),
            ServerQueues::Offset { queues, .. } => queues.is_empty(lane.index()),
        }
    }

    /// A queued request continues the stream between `start` and `last`, or will be served before it anyway.
    pub fn continues(&self, view: &View<'_>, stream: Stream, start: u64, last: u64) -> bool {
        let ServerQueues::Offset { queues, .. } = self else { return !self.is_empty(stream.0) };
        let stand = Stand { file_key: stream.1, op: stream.2, offset: start };
        let next = queues.at_or_after(view, stream.0.index(), stand.ranks(), start);
        next.is_some_and(|slot| view.table.start(slot) <= last)
    }

    /// Moves a server's next batch into `batch`; false if there is none.
    pub fn take(&mut self, view: &View<'_>, lane: LaneId, batch: &mut Vec<Slot>) -> bool {
        match self {
            ServerQueues::Arrival(backlog) => {
                let Some(first) = backlog.first(view, lane.index()) else { return false };
                backlog.take(view, lane.index(), first, batch);
            }
            ServerQueues::Offset { queues, stands } => {
                let stand = &mut stands[lane.index()];
                let Some(first) = queues.first_from(view, lane.index(), stand.ranks(), stand.offset) else {
                    return false;
                };
                queues.take(view, first, batch);
                let end = batch.iter().map(|s| view.table.end(*s)).max().unwrap_or(0);
                let file_key = view.names.file(view.table.file(first));
                *stand = Stand { file_key, op: view.table.op(first), offset: end };
            }
        }
        true
    }

    /// Continues the scans of another instance.
    pub fn take_over(&mut self, others: ServerQueues) {
        if let (ServerQueues::Offset { stands, .. }, ServerQueues::Offset { stands: theirs, .. }) = (self, others)
            && stands.len() == theirs.len()
        {
            *stands = theirs;
        }
    }

    /// Maximum batches of its server before a request with `older` older ones.
    pub fn wait_bound(&self, older: u64) -> u64 {
        match self {
            ServerQueues::Arrival(_) => older,
            ServerQueues::Offset { queues, .. } => queues.wait_bound(older),
        }
    }
}
