//! What users of an engine pass in and receive: limits, submissions, batches with their contexts, and the executor that
//! serves batches.

use std::ops::Range;
use std::time::Duration;

use impresario_sched::{Batch, ConnId, CostModel, LaneId, Naming, Nanos, Op, PolicySpec, Request};

use crate::Ticket;

/// How a batch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// 0, or a Linux errno.
    pub errno: i32,
    /// Bytes moved, from the start of the batch.
    pub bytes_done: u64,
    /// When the device started it, on the engine's clock.
    pub started: Nanos,
    /// When the device finished it; may be slightly before "now" on a modelled device.
    pub finished: Nanos,
}

/// A dispatched batch with the submitters' contexts.
pub struct Work<T: Send + 'static> {
    /// The virtual request.
    pub batch: Batch,
    /// One per `batch.parts`, in the same order: the request and its context.
    pub parts: Vec<(Request, T)>,
    /// To be completed exactly once.
    pub ticket: Ticket<T>,
    /// When it was dispatched, on the engine's clock.
    pub dispatched: Nanos,
}

/// The result of starting a batch.
pub enum Started<T: Send + 'static> {
    /// The executor will complete it later.
    Pending,
    /// It has finished; the engine records it without recursion.
    Finished(Ticket<T>, Outcome),
}

/// Serves batches.
pub trait Executor<T: Send + 'static>: Send + Sync + 'static {
    /// Starts a batch. Called without any engine lock, on the thread of a submitter, of a completer or of the timer; it
    /// must not block for long: it either finishes at once or queues the batch elsewhere.
    fn start(&self, work: Work<T>) -> Started<T>;

    /// Called after one or more [`Executor::start`] calls, when no more batches can start for now: the group is
    /// complete. Called without any engine lock; other threads may start batches meanwhile.
    fn all_started(&self) {}

    /// Called on a submitter's thread before it waits for queue room, and again several times a second while it does: hand over
    /// work that only this thread would do. Called without any engine lock.
    fn before_waiting(&self) {}

    /// Takes back the context of a speculation that was refused or dropped before it started. Called with the engine's
    /// lock held.
    fn given_up(&self, _context: T) {}

    /// True if `start` only queues the batch elsewhere, within about a microsecond: the engine then reads the clock
    /// less often.
    fn only_hands_on(&self) -> bool {
        false
    }

    /// Splits a context: returns one for the bytes `from .. from + len` of its request, which are dispatched as a
    /// separate request; `last` if none follow. Called with the engine's lock held, and only with
    /// [`EngineConfig::pieces`].
    fn piece(&self, _context: &mut T, _from: u64, _len: u64, _last: bool) -> T {
        unreachable!("EngineConfig::pieces is for executors that divide contexts")
    }
}

/// A request as the server received it; the engine interns its keys.
#[derive(Clone, Copy, Debug)]
pub struct Submission {
    /// Operation.
    pub op: Op,
    /// Stable key of the file.
    pub file: u64,
    /// Lane.
    pub lane: LaneId,
    /// Offset in the file, bytes.
    pub file_offset: u64,
    /// Offset in the lane's space, bytes (equal to `file_offset` where requests are not split).
    pub lane_offset: u64,
    /// Length, bytes; `u64::MAX` on barriers means "to the end".
    pub len: u64,
    /// Stable key of the client.
    pub client: u64,
    /// Connection.
    pub conn: ConnId,
    /// Application.
    pub job: u64,
    /// User.
    pub user: u32,
    /// What else rules may match.
    pub naming: Naming,
    /// A read that has not been requested yet. It is accepted if [`EngineConfig::lane_speculations`] allows it; its
    /// context goes to [`Executor::given_up`] if it is refused or not started.
    pub speculative: bool,
}

impl Submission {
    /// The read of a predicted extent that follows this request or hint.
    pub fn ahead(&self, extent: Range<u64>) -> Submission {
        let (start, len) = (extent.start, extent.end.saturating_sub(extent.start));
        Submission { op: Op::Read, speculative: true, file_offset: start, lane_offset: start, len, ..*self }
    }
}

/// Why a submission was refused; the context is returned.
pub enum Refused<T> {
    /// The queue stayed full for the configured time.
    Busy(T),
    /// The engine is shutting down.
    Closed(T),
}

impl<T> Refused<T> {
    /// The context.
    pub fn context(self) -> T {
        match self {
            Refused::Busy(context) | Refused::Closed(context) => context,
        }
    }
}

/// Limits of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Number of lanes: 1 on a data server, the number of data servers on an I/O node.
    pub lanes: u16,
    /// Lanes address one space (an I/O node that does not split): conflicts are judged across lanes.
    pub shared_space: bool,
    /// The policy.
    pub policy: PolicySpec,
    /// In-flight limit of a lane in batches; 0: [`EngineConfig::LANE_REQUESTS`].
    pub lane_requests: u32,
    /// In-flight limit of a lane in bytes.
    pub lane_bytes: u64,
    /// In-flight limit over all lanes in batches.
    pub total_requests: u32,
    /// Syncs in flight per lane, see [`CoreConfig::lane_syncs`](impresario_sched::CoreConfig::lane_syncs).
    pub lane_syncs: u32,
    /// The layer below the lanes sorts; see [`CoreConfig::sorted_below`](impresario_sched::CoreConfig::sorted_below).
    pub sorted_below: bool,
    /// It has an order of its own; see [`CoreConfig::scheduled_below`](impresario_sched::CoreConfig::scheduled_below).
    pub scheduled_below: bool,
    /// Maximum speculations in flight on their own per lane; 0: no speculation.
    pub lane_speculations: u32,
    /// Rank of this node among nodes of its kind (selects the server rotation of `twins`).
    pub node_rank: u32,
    /// Maximum requests in the engine, queued and in flight.
    pub queue_requests: u32,
    /// How long `submit` waits for queue room.
    pub submit_timeout: Duration,
    /// Time to process, for policies that use it.
    pub cost: CostModel,
    /// The executor serves requests in pieces ([`Executor::piece`]).
    pub pieces: bool,
}

impl EngineConfig {
    /// Default batches in flight per lane: enough for a device that serves many at once.
    pub const LANE_REQUESTS: u32 = 32;

    /// One lane, defaults for everything else.
    pub fn new(policy: PolicySpec) -> EngineConfig {
        EngineConfig {
            lanes: 1,
            shared_space: false,
            policy,
            lane_requests: 0,
            lane_bytes: u64::MAX,
            total_requests: u32::MAX,
            lane_syncs: 0,
            sorted_below: false,
            scheduled_below: false,
            lane_speculations: 0,
            node_rank: 0,
            queue_requests: 10_000,
            submit_timeout: Duration::from_secs(10),
            cost: CostModel::default(),
            pieces: false,
        }
    }
}
