//! A delivered batch and its requests, in the layout that C sees.

use impresario_engine::Work;
use impresario_sched::{Nanos, Op, Request};

/// The program's own values of a request, which the engine does not keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Identity {
    /// The program's token.
    pub token: u64,
    /// Key of the file.
    pub file: u64,
    /// Key of the client.
    pub client: u64,
    /// Application.
    pub job: u64,
    /// User.
    pub user: u32,
    /// Nobody has requested it yet.
    pub speculative: bool,
}

/// [`Member::flags`] and [`Batch::flags`]: the request is a speculation; the last request of the batch is one.
pub const SPECULATIVE: u32 = 1;

/// A request in a batch. `impresario_request_t` of `impresario.h`: the layout is fixed.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// The number that `submit` returned.
    pub id: u64,
    /// The number of its batch.
    pub batch: u64,
    /// The program's token.
    pub token: u64,
    /// Key of the file.
    pub file: u64,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
    /// Key of the client.
    pub client: u64,
    /// Application.
    pub job: u64,
    /// Offset in the lane's space, bytes, in which contiguity is judged.
    pub lane_offset: u64,
    /// When it was submitted, CLOCK_MONOTONIC in nanoseconds.
    pub arrival_ns: u64,
    /// Connection.
    pub connection: u32,
    /// User.
    pub user: u32,
    /// Its index in the batch, from 0.
    pub member: u32,
    /// Device or data server.
    pub lane: u32,
    /// Operation, see [`op_code`].
    pub op: u32,
    /// 0 or [`SPECULATIVE`].
    pub flags: u32,
}

/// A batch. `impresario_batch_t` of `impresario.h`: the layout is fixed.
#[repr(C)]
#[derive(Debug)]
pub struct Batch {
    /// Its number, for its completion.
    pub id: u64,
    /// Key of the file.
    pub file: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Bytes from the first to the last, in the lane's space.
    pub len: u64,
    /// Offset of the first byte in the lane's space.
    pub lane_offset: u64,
    /// When it was delivered, CLOCK_MONOTONIC in nanoseconds.
    pub handed_ns: u64,
    /// Its requests, in order of offset.
    pub requests: *const Member,
    /// Number of requests, at least 1.
    pub count: u32,
    /// Device or data server.
    pub lane: u32,
    /// Operation of all of them, see [`op_code`].
    pub op: u32,
    /// 0 or [`SPECULATIVE`].
    pub flags: u32,
}

impl Member {
    pub(crate) fn of((request, identity): &(Request, Identity), batch: u64, member: u32) -> Member {
        Member {
            id: request.id.0,
            batch,
            token: identity.token,
            file: identity.file,
            offset: request.extent.file_offset,
            len: request.extent.len,
            client: identity.client,
            job: identity.job,
            lane_offset: request.extent.lane_offset,
            arrival_ns: request.arrival.0,
            connection: request.conn.0,
            user: identity.user,
            member,
            lane: request.extent.lane.0.into(),
            op: op_code(request.op),
            flags: if identity.speculative { SPECULATIVE } else { 0 },
        }
    }
}

/// A batch with its requests; reference-counted by its holders.
#[derive(Debug)]
pub struct Delivery {
    batch: Batch,
    members: Box<[Member]>,
}

// SAFETY: the only pointer, `batch.requests`, points into `members`, which lives as long and is never changed.
unsafe impl Send for Delivery {}
// SAFETY: as above; nothing is changed after `new`.
unsafe impl Sync for Delivery {}

impl Delivery {
    pub(crate) fn new(id: u64, work: &Work<Identity>, at: Nanos) -> Delivery {
        let extent = work.batch.extent;
        let op = op_code(work.batch.op);
        let lane = u32::from(extent.lane.0);
        let members = work.parts.iter().enumerate().map(|(i, part)| Member::of(part, id, i as u32));
        let members: Box<[Member]> = members.collect();
        let batch = Batch {
            id,
            file: members.first().map_or(0, |m| m.file),
            offset: extent.file_offset,
            len: extent.len,
            lane_offset: extent.lane_offset,
            handed_ns: at.0,
            requests: members.as_ptr(),
            count: members.len() as u32,
            lane,
            op,
            flags: members.last().map_or(0, |m| m.flags),
        };
        Delivery { batch, members }
    }

    /// The batch.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Its requests, in order of offset; a speculation is the last.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Its requests that were requested, and the speculation, if there is one.
    pub(crate) fn apart(&self) -> (&[Member], Option<&Member>) {
        match self.members.split_last() {
            Some((last, rest)) if last.flags & SPECULATIVE != 0 => (rest, Some(last)),
            _ => (&self.members, None),
        }
    }
}

/// The C code of an operation.
pub const fn op_code(op: Op) -> u32 {
    match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Sync => 2,
        Op::Truncate => 3,
        Op::Unlink => 4,
    }
}

/// The operation of a code.
pub const fn op_of(code: u32) -> Option<Op> {
    Some(match code {
        0 => Op::Read,
        1 => Op::Write,
        2 => Op::Sync,
        3 => Op::Truncate,
        4 => Op::Unlink,
        _ => return None,
    })
}
