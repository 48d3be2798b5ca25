//! The words in which a driver and the core speak: configuration, answers, events, status.

use crate::correction::CostStatus;
use crate::cost::CostModel;
use crate::policy::{Chosen, WaitReason};
use crate::spec::PolicySpec;
use crate::stats::Report;
use crate::types::{Batch, BatchId, ConnId, Nanos};

/// What a core is made for.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Lanes below the scheduler: 1 to 65,535.
    pub lanes: u16,
    /// Lanes address one space: requests are not split at lane boundaries, `lane_offset` is the file offset, and
    /// conflicts are judged across lanes.
    pub shared_space: bool,
    /// Batches in flight per lane at most (the hand-off depth); `unlimited` policies ignore it.
    pub lane_requests: u32,
    /// Bytes in flight per lane at which no further batch goes there.
    pub lane_bytes: u64,
    /// Batches in flight in all at most.
    pub total_requests: u32,
    /// Position of this node among its like, from 0.
    pub node_rank: u32,
    /// Requests outstanding at most, 1 to [`Table::CAPACITY_MAX`](crate::Table::CAPACITY_MAX).
    pub capacity: u32,
    /// Time to process, by operation and size; corrected by completions where it says so.
    pub cost: CostModel,
    /// What is below the lanes sorts by itself and has a cache: a kernel above a disk, a file system. Policies that choose
    /// their rule go by it.
    pub sorted_below: bool,
    /// Speculations in flight alone at a lane at most ([`Core::speculate`](crate::Core::speculate)); 0: none is taken.
    pub lane_speculations: u32,
    /// The driver takes requests piece by piece ([`Part::from`](crate::Part::from) above 0, several batches with parts of one request).
    pub pieces: bool,
    /// Statistics are kept. Nothing is decided by them; a simulation of a thousand cores that asks none of them does
    /// without their time and memory.
    pub statistics: bool,
}

impl CoreConfig {
    /// One lane that takes one batch at a time.
    pub fn single_lane(capacity: u32) -> CoreConfig {
        CoreConfig {
            lanes: 1,
            shared_space: false,
            lane_requests: 1,
            lane_bytes: u64::MAX,
            total_requests: u32::MAX,
            node_rank: 0,
            capacity,
            cost: CostModel::default(),
            sorted_below: false,
            lane_speculations: 0,
            pieces: false,
            statistics: true,
        }
    }
}

/// The answer of [`Core::next`](crate::Core::next).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// To be started now, and reported by [`Event::Completed`].
    Dispatch(Batch),
    /// Nothing before `until`, unless a push or an event comes first.
    Wait {
        /// When to ask again; [`Nanos::MAX`]: only after a push or an event.
        until: Nanos,
        /// Why.
        reason: WaitReason,
    },
}

/// How a batch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The batch.
    pub batch: BatchId,
    /// 0, or a Linux errno.
    pub errno: i32,
    /// Bytes moved, from the start of the batch.
    pub bytes_done: u64,
    /// When the device took it up.
    pub started: Nanos,
    /// When the device was done.
    pub finished: Nanos,
}

impl Completion {
    /// The full success of a batch.
    pub fn of(batch: &Batch, started: Nanos, finished: Nanos) -> Completion {
        Completion { batch: batch.id, errno: 0, bytes_done: batch.extent.len, started, finished }
    }
}

/// What happens outside and matters to scheduling.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A batch ended.
    Completed(Completion),
    /// A connection can, or can no longer, take data.
    Ready {
        /// Which.
        connection: ConnId,
        /// Can it.
        ready: bool,
    },
    /// The clock that the nodes share is local time plus `offset_ns`, give or take `error_ns`.
    SharedClock {
        /// Nanoseconds to add.
        offset_ns: i64,
        /// Bound of the error, nanoseconds.
        error_ns: u64,
    },
}

/// What became of a cancellation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cancelled {
    /// It was queued and is gone.
    Removed,
    /// It is in flight: drop the reply; the slot frees at completion.
    InFlight,
    /// There is no such request any more.
    Unknown,
}

/// Why a push was refused: the queue is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the queue is full")]
pub struct Full;

/// What is told of a core.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct Status {
    /// The policy in force with all its parameters.
    pub policy: PolicySpec,
    /// What it chose and why, where it chooses among others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<Chosen>,
    /// Requests outstanding at most.
    pub capacity: u32,
    /// Requests that the policy has.
    pub queued: u32,
    /// Requests that wait for an older one that conflicts.
    pub blocked: u32,
    /// Batches in flight.
    pub in_flight_batches: u32,
    /// Bytes of speculations that were started.
    pub speculated_bytes: u64,
    /// The lanes.
    pub lanes: Vec<LaneStatus>,
    /// The cost model in force and its correction.
    pub cost: CostStatus,
    /// What a recorded run foretells; absent without one.
    pub foretold: Option<Foretold>,
    /// What was done since the start or the last reset.
    pub statistics: Report,
}

/// What is told of the requests that a recorded run foretells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct Foretold {
    /// How many there are.
    pub requests: u64,
    /// Reads and writes that arrived at the policy since, and how many of them are foretold ones; absent under a policy that
    /// does not go by recorded runs.
    pub linked: Option<Linked>,
}

/// How many requests are those that a recorded run foretold.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct Linked {
    /// Requests that were looked at.
    pub arrived: u64,
    /// Those that were foretold.
    pub linked: u64,
}

/// What is told of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct LaneStatus {
    /// Batches in flight.
    pub in_flight_batches: u32,
    /// Bytes in flight.
    pub in_flight_bytes: u64,
    /// The limit of batches; absent when the policy knows none.
    pub limit_batches: Option<u32>,
}
