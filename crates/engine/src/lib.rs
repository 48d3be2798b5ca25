//! Threads and a clock around the scheduling core: submission with back-pressure, dispatch, timers.

use std::sync::Arc;

use impresario_sched::{Batch, ConnId, LaneId, Nanos, Op, PolicySpec, Request, RequestId};

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
pub struct Work<T> {
    /// The virtual request.
    pub batch: Batch,
    /// One per `batch.parts`, in the same order: the request and what came with it.
    pub parts: Vec<(Request, T)>,
    /// To be completed exactly once.
    pub ticket: Ticket<T>,
}

/// The duty to report a batch's end. Dropping it unreported completes the batch as EIO.
pub struct Ticket<T> {
    _private: std::marker::PhantomData<T>,
}

impl<T> Ticket<T> {
    /// Reports the end; from any thread. May start further batches on this thread.
    pub fn complete(self, _outcome: Outcome) {
        todo!()
    }
}

/// What became of a started batch.
pub enum Started<T> {
    /// The executor completes it later.
    Pending,
    /// It is done already; the engine records it without recursion.
    Finished(Ticket<T>, Outcome),
}

/// What serves batches.
pub trait Executor<T: Send + 'static>: Send + Sync + 'static {
    /// Begins a batch. Called without any lock of the engine held, on the thread of a submitter, of a
    /// completer or of the timer; it must not block for long: it finishes at once or hands on.
    fn start(&self, work: Work<T>) -> Started<T>;
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
    /// In-flight limit of a lane in requests; 0: the policy's own default.
    pub lane_requests: u32,
    /// In-flight limit of a lane in bytes.
    pub lane_bytes: u64,
    /// Position of this node among its like (which rotation of servers `twins` uses).
    pub node_rank: u32,
    /// Bound of the queue, requests (queued and in flight).
    pub queue_requests: u32,
    /// How long `submit` waits while the queue is full.
    pub submit_timeout: std::time::Duration,
}

/// The engine. Threads: one timer; the rest is borrowed from submitters and completers.
pub struct Engine<T: Send + 'static> {
    _private: std::marker::PhantomData<T>,
}

impl<T: Send + 'static> Engine<T> {
    /// Starts an engine.
    pub fn new(_config: EngineConfig, _executor: Arc<dyn Executor<T>>) -> Result<Arc<Engine<T>>, String> {
        todo!()
    }
    /// The engine's clock.
    pub fn now(&self) -> Nanos {
        todo!()
    }
    /// Takes a request in; waits while the queue is full. May run `Executor::start` on this thread.
    pub fn submit(&self, _submission: Submission, _context: T) -> Result<RequestId, Refused<T>> {
        todo!()
    }
    /// Drops every queued request of a connection (its client is gone); returns their contexts.
    /// In-flight ones stay and complete.
    pub fn cancel_connection(&self, _conn: ConnId) -> Vec<T> {
        todo!()
    }
    /// Switches the policy, live. A refusal changes nothing.
    pub fn set_policy(&self, _spec: &PolicySpec) -> Result<(), String> {
        todo!()
    }
    /// Policy, queue lengths, statistics as JSON-ready text.
    pub fn status(&self) -> impresario_sched::Status {
        todo!()
    }
    /// Zeroes the statistics.
    pub fn reset_statistics(&self) {
        todo!()
    }
    /// Stops: refuses new requests, waits (bounded) for what is in flight, returns what was queued.
    pub fn shutdown(&self, _patience: std::time::Duration) -> Vec<T> {
        todo!()
    }
}
