//! The interface between a driver and the core: configuration, decisions, events, status.

use crate::correction::CostStatus;
use crate::cost::CostModel;
use crate::members::Members;
use crate::policy::{Chosen, WaitReason};
use crate::spec::PolicySpec;
use crate::stats::{Histograms, Report};
use crate::types::{Batch, BatchId, ConnId, Nanos};

/// How a core is set up.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Lanes below the scheduler: 1 to 65,535.
    pub lanes: u16,
    /// Lanes address one space: requests are not split at lane boundaries, `lane_offset` is the file offset, and
    /// conflicts are judged across lanes.
    pub shared_space: bool,
    /// Maximum batches in flight per lane (the hand-off depth); `unlimited` policies ignore it.
    pub lane_requests: u32,
    /// No further batch goes to a lane with this many bytes in flight.
    pub lane_bytes: u64,
    /// Maximum batches in flight over all lanes.
    pub total_requests: u32,
    /// Maximum syncs in flight per lane, which count against none of the limits above: a sync may take long, and must not keep
    /// others from a lane. 0: they count as other batches do.
    pub lane_syncs: u32,
    /// Rank of this node among nodes of its kind, from 0.
    pub node_rank: u32,
    /// When the node started, on its own clock: where timers begin that follow no shared clock.
    pub started: Nanos,
    /// Maximum outstanding requests, 1 to [`Table::CAPACITY_MAX`](crate::Table::CAPACITY_MAX).
    pub capacity: u32,
    /// Cost model: the time to process a request, by operation and size; corrected by completions if it says so.
    pub cost: CostModel,
    /// The layer below sorts and caches (a kernel above a disk, a file system). Policies that choose their rule use
    /// this.
    pub sorted_below: bool,
    /// The layer below puts requests in an order of its own, without a page cache in front: data servers with a policy that
    /// does. `auto` uses this.
    pub scheduled_below: bool,
    /// Maximum speculations in flight on their own per lane ([`Core::speculate`](crate::Core::speculate)); 0: no
    /// speculation.
    pub lane_speculations: u32,
    /// The driver can serve a request in pieces ([`Part::from`](crate::Part::from) above 0, several batches with parts
    /// of one request).
    pub pieces: bool,
    /// Keep statistics. No decision depends on them; a simulation of a thousand cores saves their time and memory.
    pub statistics: bool,
}

impl CoreConfig {
    /// One lane that serves one batch at a time.
    pub fn single_lane(capacity: u32) -> CoreConfig {
        CoreConfig {
            lanes: 1,
            shared_space: false,
            lane_requests: 1,
            lane_bytes: u64::MAX,
            total_requests: u32::MAX,
            lane_syncs: 0,
            node_rank: 0,
            started: Nanos::ZERO,
            capacity,
            cost: CostModel::default(),
            sorted_below: false,
            scheduled_below: false,
            lane_speculations: 0,
            pieces: false,
            statistics: true,
        }
    }
}

/// The decision of [`Core::next`](crate::Core::next).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// Start this batch now, and report it with [`Event::Completed`].
    Dispatch(Batch),
    /// Dispatch nothing before `until`, unless a push or an event comes first.
    Wait {
        /// When to call again; [`Nanos::MAX`]: only after a push or an event.
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
    /// When the device started it.
    pub started: Nanos,
    /// When the device finished it.
    pub finished: Nanos,
}

impl Completion {
    /// A batch that completed in full.
    pub fn of(batch: &Batch, started: Nanos, finished: Nanos) -> Completion {
        Completion { batch: batch.id, errno: 0, bytes_done: batch.extent.len, started, finished }
    }
}

/// An external event that matters to scheduling.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A batch ended.
    Completed(Completion),
    /// A connection became able, or unable, to take data.
    Ready {
        /// The connection.
        connection: ConnId,
        /// Whether it can take data.
        ready: bool,
    },
    /// The clock that the nodes share is local time plus `offset_ns`. Who reads the clocks decides by the error of a reading whether
    /// it counts.
    SharedClock {
        /// Nanoseconds to add.
        offset_ns: i64,
    },
    /// Nodes of this one's kind or lanes have come or gone; who follows them (`node::members`) says from when on that counts.
    Members(Members),
}

/// The result of a cancellation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cancelled {
    /// It was queued and has been removed.
    Removed,
    /// It is in flight: drop the reply; the slot frees at completion.
    InFlight,
    /// No such request is outstanding.
    Unknown,
}

/// Why a push was refused: the queue is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the queue is full")]
pub struct Full;

/// Status of a core.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
pub struct Status {
    /// The policy in force with all its parameters.
    pub policy: PolicySpec,
    /// The policy's choice and its reason, if it chooses among others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<Chosen>,
    /// Maximum outstanding requests.
    pub capacity: u32,
    /// Requests queued at the policy.
    pub queued: u32,
    /// Requests that wait for an older conflicting one, or with the speculations of their file.
    pub blocked: u32,
    /// Batches in flight.
    pub in_flight_batches: u32,
    /// Bytes of speculations started so far.
    pub speculated_bytes: u64,
    /// The lanes.
    pub lanes: Vec<LaneStatus>,
    /// The cost model in force and its correction.
    pub cost: CostStatus,
    /// The prediction from a recorded run; absent without one.
    pub foretold: Option<PredictionStatus>,
    /// Statistics since the start or the last reset.
    pub statistics: Report,
    /// Their histograms.
    pub histograms: Histograms,
}

/// Status of the prediction from a recorded run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct PredictionStatus {
    /// Predicted requests.
    pub requests: u64,
    /// Reads and writes that arrived at the policy since, and how many of them matched a prediction; absent if the
    /// policy does not use recorded runs.
    pub linked: Option<Linked>,
}

/// How many arriving requests matched the recorded run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct Linked {
    /// Requests compared.
    pub arrived: u64,
    /// Requests that matched.
    pub linked: u64,
}

/// Status of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct LaneStatus {
    /// Batches in flight.
    pub in_flight_batches: u32,
    /// Bytes in flight.
    pub in_flight_bytes: u64,
    /// The batch limit; absent if the policy has none.
    pub limit_batches: Option<u32>,
}
