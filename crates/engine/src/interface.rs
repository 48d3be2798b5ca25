//! What an engine's user hands in and gets: limits, submissions, batches with their contexts, and the executor that serves them.

use std::ops::Range;
use std::time::Duration;

use impresario_sched::{Batch, ConnId, CostModel, LaneId, Nanos, Op, PolicySpec, Request};

use crate::Ticket;

/// How a batch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// 0, or a Linux errno.
    pub errno: i32,
    /// Bytes moved, from the start of the batch.
    pub bytes_done: u64,
    /// When the device took it up, on the engine's clock.
    pub started: Nanos,
    /// When the device was done with it; may lie a little before "now" on a modelled device.
    pub finished: Nanos,
}

/// A dispatched batch with the submitters' contexts.
pub struct Work<T: Send + 'static> {
    /// The virtual request.
    pub batch: Batch,
    /// One per `batch.parts`, in the same order: the request and what came with it.
    pub parts: Vec<(Request, T)>,
    /// To be completed exactly once.
    pub ticket: Ticket<T>,
    /// When it was dispatched, on the engine's clock.
    pub dispatched: Nanos,
}

/// What became of a started batch.
pub enum Started<T: Send + 'static> {
    /// The executor completes it later.
    Pending,
    /// It is done already; the engine records it without recursion.
    Finished(Ticket<T>, Outcome),
}

/// What serves batches.
pub trait Executor<T: Send + 'static>: Send + Sync + 'static {
    /// Begins a batch. Called without any lock of the engine held, on the thread of a submitter, of a
    /// completer or of the timer; it must not block for long: it finishes at once or queues the batch elsewhere.
    fn start(&self, work: Work<T>) -> Started<T>;

    /// Called after one or more [`Executor::start`] when nothing more can start at present: what was begun together is
    /// known to be complete. Without any lock of the engine held; others may start batches meanwhile.
    fn all_started(&self) {}

    /// Called on a submitter's thread before it waits for room in the queue: what only this thread would do is to be given
    /// to others.
    fn before_waiting(&self) {}

    /// True when `start` only queues the batch elsewhere, within a microsecond or so: the engine then looks at the clock less often.
    fn only_hands_on(&self) -> bool {
        false
    }

    /// Divides a context: gives one for the bytes `from .. from + len` of its request, which are dispatched as a request of
    /// their own; `last` when none follow. Called with the engine's lock held, and only with
    /// [`EngineConfig::pieces`].
    fn piece(&self, _context: &mut T, _from: u64, _len: u64, _last: bool) -> T {
        unreachable!("EngineConfig::pieces is for executors that divide contexts")
    }
}

/// A request as the server got it; keys are interned by the engine.
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
    /// A read that nobody asked for yet. It is taken where [`EngineConfig::lane_speculations`] allows it, and its context
    /// is dropped, without a word, where it is not taken or not started.
    pub speculative: bool,
}

impl Submission {
    /// The read of a predicted extent, on the heels of this request or hint.
    pub fn ahead(&self, extent: Range<u64>) -> Submission {
        let (start, len) = (extent.start, extent.end.saturating_sub(extent.start));
        Submission { op: Op::Read, speculative: true, file_offset: start, lane_offset: start, len, ..*self }
    }
}

/// Why a submission was refused; the context comes back.
pub enum Refused<T> {
    /// The queue stayed full for the configured time.
    Busy(T),
    /// The engine is shutting down.
    Closed(T),
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
    /// What is below the lanes sorts by itself; see [`CoreConfig::sorted_below`](impresario_sched::CoreConfig::sorted_below).
    pub sorted_below: bool,
    /// Speculations in flight alone at a lane at most; 0: none is taken.
    pub lane_speculations: u32,
    /// Position of this node among its like (which rotation of servers `twins` uses).
    pub node_rank: u32,
    /// Bound of the queue, requests (queued and in flight).
    pub queue_requests: u32,
    /// How long `submit` waits while the queue is full.
    pub submit_timeout: Duration,
    /// Time to process, for the policies that go by it.
    pub cost: CostModel,
    /// The executor takes requests piece by piece ([`Executor::piece`]).
    pub pieces: bool,
}

impl EngineConfig {
    /// Batches in flight per lane unless configured: enough for a device that serves many at once.
    pub const LANE_REQUESTS: u32 = 32;

    /// One lane, defaults everywhere.
    pub fn new(policy: PolicySpec) -> EngineConfig {
        EngineConfig {
            lanes: 1,
            shared_space: false,
            policy,
            lane_requests: 0,
            lane_bytes: u64::MAX,
            total_requests: u32::MAX,
            sorted_below: false,
            lane_speculations: 0,
            node_rank: 0,
            queue_requests: 10_000,
            submit_timeout: Duration::from_secs(10),
            cost: CostModel::default(),
            pieces: false,
        }
    }
}
