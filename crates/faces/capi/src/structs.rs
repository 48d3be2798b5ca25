//! The structs that a C program fills in: layouts as in `impresario.h`, checks, and conversion to Rust.

use std::ffi::{c_char, c_void};
use std::mem::size_of;
use std::time::Duration;

use impresario_embed::{Dispatch, Options, Submit, guard, op_code, op_of, parse_policy};

use crate::{AheadFn, BatchFn, InMemoryFn, Refusal, RequestFn, TokenFn};

/// Copies a struct that starts with its size. Members that the program's version lacks become zero; members that ours
/// lacks must be zero.
///
/// # Safety
/// `from` is NULL or points to at least as many bytes as its first member says. All-zero bytes are a valid `T`.
pub(crate) unsafe fn copy_sized<T: Copy>(from: *const T, smallest: usize, what: &str) -> Result<T, Refusal> {
    if from.is_null() {
        return Err(Refusal::invalid(format!("{what} is NULL; give the address of a struct")));
    }
    // SAFETY: the first member is a size_t, by the layout of every struct of the header.
    let given = unsafe { from.cast::<usize>().read_unaligned() };
    let ours = size_of::<T>();
    if given < smallest || given > 4096 {
        return Err(Refusal::invalid(format!("{what}: size is {given}; initialise the struct with its INIT macro")));
    }
    if given > ours {
        // SAFETY: `given` bytes are there, as the caller promises.
        let more = unsafe { std::slice::from_raw_parts(from.cast::<u8>().add(ours), given - ours) };
        if more.iter().any(|b| *b != 0) {
            return Err(Refusal::invalid(format!(
                "{what}: has members that this library does not know; update the library"
            )));
        }
    }
    // SAFETY: all-zero bytes are a valid T; at most `given` and at most `ours` bytes are copied.
    unsafe {
        let mut copy: T = std::mem::zeroed();
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut copy).cast::<u8>(), given.min(ours));
        Ok(copy)
    }
}

/// `impresario_submission_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SubmissionC {
    pub(crate) size: usize,
    pub(crate) file: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) token: u64,
    pub(crate) client: u64,
    pub(crate) job: u64,
    pub(crate) lane_offset: u64,
    pub(crate) connection: u32,
    pub(crate) user: u32,
    pub(crate) op: u32,
    pub(crate) lane: u32,
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
}

const LANE_OFFSET: u32 = 1;

impl SubmissionC {
    /// # Safety
    /// As [`copy_sized`].
    pub(crate) unsafe fn read(from: *const SubmissionC) -> Result<SubmissionC, Refusal> {
        // SAFETY: as the caller promises; numbers may be zero.
        unsafe { copy_sized(from, size_of::<SubmissionC>(), "submission") }
    }

    /// What the program submitted.
    pub(crate) fn of(s: &Submit) -> SubmissionC {
        SubmissionC {
            size: size_of::<SubmissionC>(),
            file: s.file,
            offset: s.offset,
            len: s.len,
            token: s.token,
            client: s.client,
            job: s.job,
            lane_offset: s.lane_offset.unwrap_or(0),
            connection: s.connection,
            user: s.user,
            op: op_code(s.op),
            lane: s.lane.into(),
            flags: if s.lane_offset.is_some() { LANE_OFFSET } else { 0 },
            reserved: 0,
        }
    }

    pub(crate) fn submit(&self) -> Result<Submit, Refusal> {
        let Some(op) = op_of(self.op) else {
            return Err(Refusal::invalid(format!(
                "op {} does not exist; give IMPRESARIO_READ to IMPRESARIO_UNLINK",
                self.op
            )));
        };
        let Ok(lane) = u16::try_from(self.lane) else {
            return Err(Refusal::invalid(format!("lane {} does not exist", self.lane)));
        };
        if self.flags & !LANE_OFFSET != 0 || self.reserved != 0 {
            return Err(Refusal::invalid("flags or reserved is not known; initialise with IMPRESARIO_SUBMISSION_INIT"));
        }
        Ok(Submit {
            op,
            file: self.file,
            offset: self.offset,
            lane_offset: (self.flags & LANE_OFFSET != 0).then_some(self.lane_offset),
            len: self.len,
            token: self.token,
            client: self.client,
            job: self.job,
            connection: self.connection,
            user: self.user,
            lane,
        })
    }
}

/// `impresario_options_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OptionsC {
    pub(crate) size: usize,
    pub(crate) policy: *const c_char,
    pub(crate) on_request: Option<RequestFn>,
    pub(crate) on_batch: Option<BatchFn>,
    pub(crate) arg: *mut c_void,
    pub(crate) lanes: u32,
    pub(crate) lane_requests: u32,
    pub(crate) lane_bytes: u64,
    pub(crate) total_requests: u32,
    pub(crate) queue_requests: u32,
    pub(crate) node_rank: u32,
    pub(crate) shared_space: u32,
    pub(crate) submit_timeout_ms: u32,
    pub(crate) dispatch_threads: u32,
    pub(crate) read_ahead_bytes: u64,
    pub(crate) may_read_ahead: Option<AheadFn>,
    pub(crate) ahead_dropped: Option<TokenFn>,
    pub(crate) in_memory: Option<InMemoryFn>,
    pub(crate) lane_speculations: u32,
    pub(crate) sorted_below: u32,
}

impl OptionsC {
    /// # Safety
    /// As [`copy_sized`]; NULL gives the defaults.
    pub(crate) unsafe fn read(from: *const OptionsC) -> Result<OptionsC, Refusal> {
        if from.is_null() {
            // SAFETY: numbers, pointers and optional functions may be zero.
            return Ok(unsafe { std::mem::zeroed() });
        }
        // SAFETY: as the caller promises; as above.
        unsafe { copy_sized(from, size_of::<OptionsC>(), "options") }
    }

    pub(crate) fn options(&self) -> Result<Options, Refusal> {
        let mut o = Options::default();
        if !self.policy.is_null() {
            // SAFETY: not NULL, so a string, as the header requires.
            o.policy = parse_policy(unsafe { guard::text(self.policy, "policy") }?)?;
        }
        let or = |value: u32, default: u32| if value == 0 { default } else { value };
        o.lanes = u16::try_from(or(self.lanes, 1))
            .map_err(|_| format!("lanes = {}: give 1 to 65535, or 0 for the default", self.lanes))?;
        o.lane_requests = or(self.lane_requests, o.lane_requests);
        o.lane_bytes = if self.lane_bytes == 0 { o.lane_bytes } else { self.lane_bytes };
        o.total_requests = or(self.total_requests, o.total_requests);
        o.queue_requests = or(self.queue_requests, o.queue_requests);
        o.node_rank = self.node_rank;
        let yes = |name: &str, value: u32| match value {
            0 | 1 => Ok(value == 1),
            other => Err(Refusal::invalid(format!("{name} = {other}: give 0 or 1"))),
        };
        o.shared_space = yes("shared_space", self.shared_space)?;
        o.sorted_below = yes("sorted_below", self.sorted_below)?;
        o.read_ahead_bytes = self.read_ahead_bytes;
        o.lane_speculations = or(self.lane_speculations, o.lane_speculations);
        o.submit_timeout = match self.submit_timeout_ms {
            0 => o.submit_timeout,
            u32::MAX => Duration::ZERO,
            ms => Duration::from_millis(u64::from(ms)),
        };
        o.dispatch = match self.dispatch_threads {
            0 => Dispatch::Auto,
            u32::MAX => Dispatch::Inline,
            n => Dispatch::Threads(n),
        };
        Ok(o)
    }
}

/// `impresario_stats_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct StatsC {
    pub(crate) size: usize,
    pub(crate) accepted: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) cancelled: u64,
    pub(crate) blocked: u64,
    pub(crate) batches: u64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    pub(crate) queued: u64,
    pub(crate) in_flight: u64,
    pub(crate) file_switches: u64,
    pub(crate) queue_ns: [u64; 3],
    pub(crate) service_ns: [u64; 3],
    pub(crate) requests_per_batch: f64,
    pub(crate) bytes_per_batch: f64,
    pub(crate) offset_distance_bytes: f64,
    pub(crate) ahead_predicted_bytes: u64,
    pub(crate) ahead_read_bytes: u64,
    pub(crate) ahead_hit_bytes: u64,
    pub(crate) ahead_wasted_bytes: u64,
    pub(crate) ahead_outstanding_bytes: u64,
    pub(crate) ahead_withheld_bytes: u64,
    pub(crate) ahead_stops: u64,
    pub(crate) traced_requests: u64,
    pub(crate) untraced_requests: u64,
    pub(crate) predicted_requests: u64,
}
