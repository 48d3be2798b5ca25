//! The basic types: instants, identities, extents, requests and batches.

pub use impresario_base::Nanos;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::names::Naming;

macro_rules! interned {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
        pub struct $name(pub u32);
    )*};
}

interned! {
    /// A file, interned by the driver for as long as it has outstanding requests.
    FileId,
    /// A client: one process, or one mount, on a compute node.
    ClientId,
    /// A connection to this server.
    ConnId,
    /// An application (a job of the batch system).
    JobId,
    /// A user.
    UserId,
}

/// One device or data server below the scheduler.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct LaneId(pub u16);

impl LaneId {
    /// The lane as an index into per-lane tables.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The identity of a request, unique among those outstanding in one core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct RequestId(pub u64);

/// The core's name for a dispatched batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct BatchId(pub u64);

/// What a request does to its extent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Op {
    /// Reads the extent.
    Read,
    /// Writes the extent.
    Write,
    /// Makes everything acknowledged before in the extent durable; a barrier for it.
    Sync,
    /// Changes the extent without moving data: cuts or extends the file, which is a barrier for everything from `lane_offset`
    /// on, or punches, zeroes or allocates a range, which is one for that range.
    Truncate,
    /// Removes the file; a barrier for all of it.
    Unlink,
}

impl Op {
    /// True for the operations that a policy may reorder and aggregate.
    pub const fn is_data(self) -> bool {
        matches!(self, Op::Read | Op::Write)
    }
}

/// Where a request acts. Contiguity and order are judged in `lane_offset`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The file.
    pub file: FileId,
    /// The device or data server that serves it (its first byte, where requests are not split).
    pub lane: LaneId,
    /// Offset in the file, bytes.
    pub file_offset: u64,
    /// Offset in the lane's own space, bytes. Where requests are not split it equals `file_offset`.
    pub lane_offset: u64,
    /// Length in bytes; `u64::MAX` on a barrier means "to the end".
    pub len: u64,
}

impl Extent {
    /// First byte after the extent in the lane's space.
    pub const fn end(&self) -> u64 {
        self.lane_offset.saturating_add(self.len)
    }

    /// Leaves out the first `bytes`, of which there are at least so many.
    pub const fn advance(&mut self, bytes: u64) {
        self.file_offset += bytes;
        self.lane_offset += bytes;
        self.len -= bytes;
    }
}

/// A request's metadata. The payload stays with the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Its identity.
    pub id: RequestId,
    /// The extent it acts on.
    pub extent: Extent,
    /// When it first reached this scheduler; kept across policy switches.
    pub arrival: Nanos,
    /// Its client.
    pub client: ClientId,
    /// Its connection.
    pub conn: ConnId,
    /// Its application.
    pub job: JobId,
    /// Its user.
    pub user: UserId,
    /// Its operation.
    pub op: Op,
    /// What else rules may match.
    pub naming: Naming,
}

impl Request {
    /// A request with all identities 0 that arrives at time 0.
    pub fn new(op: Op, extent: Extent) -> Request {
        Request {
            id: RequestId(0),
            extent,
            arrival: Nanos::ZERO,
            client: Default::default(),
            conn: Default::default(),
            job: Default::default(),
            user: Default::default(),
            op,
            naming: Naming::default(),
        }
    }
}

/// One request's share of a batch: bytes `from .. from + len` of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// The request.
    pub id: RequestId,
    /// First byte within the request.
    pub from: u64,
    /// Bytes of the request in this batch.
    pub len: u64,
    /// Where the part starts in the lane's space.
    pub lane_offset: u64,
}

/// The parts of a batch: most have one, which needs no memory of its own.
pub type Parts = SmallVec<[Part; 1]>;

/// A *virtual request*: parts of one file, operation and lane whose ranges touch, in offset order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// The core's name for it; completions carry it back.
    pub id: BatchId,
    /// The hull of the parts. `file_offset` is that of the first part.
    pub extent: Extent,
    /// The operation of all parts.
    pub op: Op,
    /// In offset order; never empty.
    pub parts: Parts,
    /// The number of the time window of the policy in which it was released; 0: the policy has none. What is merged below
    /// the scheduler is of one window.
    pub window: u64,
}
