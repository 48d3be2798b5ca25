//! `libimpresario`: the functions of `impresario.h`. Each checks its arguments, calls [`Scheduler`], and turns an error
//! into a negative errno with a line of text. No decisions are made here.

mod handles;
#[cfg(test)]
mod layout;
mod report;
mod structs;

use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use impresario_base::page_cache::has_byte;
use impresario_embed::{
    Ahead, Batch, Delivery, Dispatch, Identity, Member, Misuse, Options, Receiver, Scheduler, Submit, TraceError, guard,
};
use impresario_sched::Nanos;

pub use handles::Handle;
pub use report::{
    ParamInfoC, PolicyInfoC, impresario_policy, impresario_policy_param, impresario_reset_stats, impresario_stats,
    impresario_stats_json,
};
pub use structs::{OptionsC, StatsC, SubmissionC};

/// `impresario_request_fn`.
pub type RequestFn = unsafe extern "C" fn(*mut c_void, *mut Handle, *const Member);
/// `impresario_batch_fn`.
pub type BatchFn = unsafe extern "C" fn(*mut c_void, *mut Handle, *const Batch);
/// `impresario_token_fn`.
pub type TokenFn = unsafe extern "C" fn(*mut c_void, u64);

/// `impresario_ahead_fn`.
pub type AheadFn = unsafe extern "C" fn(*mut c_void, *const SubmissionC, u64, u64, *mut u64) -> c_int;
/// `impresario_in_memory_fn`.
pub type InMemoryFn = unsafe extern "C" fn(*mut c_void, *const Member, u64) -> c_int;

/// A refused call: the errno and the text.
pub(crate) struct Refusal(c_int, String);

impl Refusal {
    pub(crate) fn invalid(text: impl Into<String>) -> Refusal {
        Refusal(libc::EINVAL, text.into())
    }
}

impl From<String> for Refusal {
    fn from(text: String) -> Refusal {
        Refusal::invalid(text)
    }
}

impl From<Misuse> for Refusal {
    fn from(misuse: Misuse) -> Refusal {
        let errno = match &misuse {
            Misuse::Closed => libc::ESHUTDOWN,
            Misuse::Full(_) => libc::EAGAIN,
            Misuse::Request(_) | Misuse::NoMember { .. } | Misuse::NotPolled | Misuse::NoAhead => libc::EINVAL,
            Misuse::NoBatch { .. } => libc::ENOENT,
            Misuse::Twice { .. } | Misuse::Mixed { .. } => libc::EALREADY,
            Misuse::InCallback => libc::EDEADLK,
        };
        Refusal(errno, misuse.to_string())
    }
}

impl From<TraceError> for Refusal {
    fn from(error: TraceError) -> Refusal {
        let errno = match &error {
            TraceError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            _ => libc::EINVAL,
        };
        Refusal(errno, error.to_string())
    }
}

/// Runs the body of a function and returns its result, or the negative errno of its refusal.
pub(crate) fn run(body: impl FnOnce() -> Result<c_int, Refusal>) -> c_int {
    guard::guarded(-libc::ENOTRECOVERABLE, || {
        if guard::forked() {
            guard::set_last_error(guard::FORKED_TEXT);
            return -libc::EINVAL;
        }
        body().unwrap_or_else(|Refusal(errno, text)| {
            guard::set_last_error(&text);
            -errno
        })
    })
}

/// Runs `call` on a scheduler, or refuses the handle.
pub(crate) fn on(handle: *mut Handle, call: impl FnOnce(&Scheduler) -> Result<c_int, Refusal>) -> c_int {
    run(|| {
        if handle.is_null() {
            return Err(Refusal::invalid("the scheduler is NULL; create one with impresario_create()"));
        }
        handles::with(handle, call).unwrap_or_else(|| {
            let text = format!("{handle:p} is not a scheduler, or it was destroyed");
            Err(Refusal(libc::EBADF, text))
        })
    })
}

/// The program's callbacks with their argument.
struct Callbacks {
    request: Option<RequestFn>,
    batch: Option<BatchFn>,
    arg: *mut c_void,
    /// Set once the handle is known, before the first request can be submitted.
    handle: Arc<AtomicPtr<Handle>>,
}

// SAFETY: `arg` is only passed to the program's own functions, which the header says run on several threads.
unsafe impl Send for Callbacks {}
// SAFETY: as above; nothing here is changed.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    fn call(&self, delivery: &Delivery) {
        let handle = self.handle.load(Ordering::Acquire);
        if let Some(batch) = self.batch {
            // SAFETY: the header's contract of `on_batch`; the batch outlives the call.
            unsafe { batch(self.arg, handle, delivery.batch()) }
        } else if let Some(request) = self.request {
            for member in delivery.members() {
                // SAFETY: the header's contract of `on_request`; `delivery` is held while the program completes members.
                unsafe { request(self.arg, handle, member) }
            }
        }
    }
}

/// The program's functions for reading ahead, with their argument.
struct AheadCalls {
    accept: AheadFn,
    dropped: TokenFn,
    in_memory: Option<InMemoryFn>,
    arg: *mut c_void,
}

// SAFETY: `arg` is only passed to the program's own functions, which the header says run on several threads.
unsafe impl Send for AheadCalls {}
// SAFETY: as above; nothing here is changed.
unsafe impl Sync for AheadCalls {}

impl Ahead for AheadCalls {
    fn accept(&self, after: &Submit, extent: Range<u64>) -> Option<u64> {
        let (after, mut token) = (SubmissionC::of(after), 0);
        // SAFETY: the header's contract of `may_read_ahead`; both addresses are of this frame.
        let refused = unsafe { (self.accept)(self.arg, &after, extent.start, extent.end - extent.start, &mut token) };
        (refused == 0).then_some(token)
    }

    fn dropped(&self, token: u64) {
        // SAFETY: the header's contract of `ahead_dropped`.
        unsafe { (self.dropped)(self.arg, token) }
    }

    fn in_memory(&self, of: &Member, at: u64) -> Option<bool> {
        // SAFETY: the header's contract of `in_memory`; the request outlives the call.
        let answer = unsafe { self.in_memory?(self.arg, of, at) };
        (answer >= 0).then_some(answer > 0)
    }
}

/// What a program needs to read ahead: both functions or none.
fn ahead(given: &OptionsC) -> Result<Option<Box<dyn Ahead>>, Refusal> {
    let OptionsC { in_memory, arg, .. } = *given;
    match (given.may_read_ahead, given.ahead_dropped) {
        (Some(accept), Some(dropped)) => Ok(Some(Box::new(AheadCalls { accept, dropped, in_memory, arg }))),
        (None, None) => Ok(None),
        _ => Err(Refusal::invalid("reading ahead needs both may_read_ahead and ahead_dropped; one is NULL")),
    }
}

fn create(options: *const OptionsC, text: Option<&str>) -> Result<*mut Handle, Refusal> {
    // SAFETY: the header requires NULL or a struct of at least its own `size`.
    let given = unsafe { OptionsC::read(options) }?;
    let mut options: Options = given.options()?;
    if let Some(text) = text {
        options = options.read(text)?;
    }
    let handle = Arc::new(AtomicPtr::new(std::ptr::null_mut()));
    let callbacks =
        Callbacks { request: given.on_request, batch: given.on_batch, arg: given.arg, handle: Arc::clone(&handle) };
    let polled = callbacks.request.is_none() && callbacks.batch.is_none();
    if polled && options.dispatch != Dispatch::Auto {
        return Err(Refusal::invalid(
            "dispatch_threads needs callbacks: set on_request or on_batch, or leave it unset",
        ));
    }
    let receiver =
        if polled { Receiver::Poll } else { Receiver::Call(Box::new(move |delivery| callbacks.call(delivery))) };
    let scheduler = Arc::new(Scheduler::reading_ahead(options, receiver, ahead(&given)?)?);
    let entered = handles::enter(scheduler)?;
    handle.store(entered, Ordering::Release);
    Ok(entered)
}

fn creating(body: impl FnOnce() -> Result<*mut Handle, Refusal>) -> *mut Handle {
    guard::guarded(std::ptr::null_mut(), || {
        let made = if guard::forked() { Err(Refusal::invalid(guard::FORKED_TEXT)) } else { body() };
        made.unwrap_or_else(|Refusal(_, text)| {
            guard::set_last_error(&text);
            std::ptr::null_mut()
        })
    })
}

/// Creates a scheduler from options.
///
/// # Safety
/// `options` is NULL or points to a struct with a correct `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_create(options: *const OptionsC) -> *mut Handle {
    creating(|| create(options, None))
}

/// Creates a scheduler from TOML text on top of options.
///
/// # Safety
/// As [`impresario_create`]; `text` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_create_from_text(text: *const c_char, options: *const OptionsC) -> *mut Handle {
    creating(|| {
        // SAFETY: the header requires NULL or a string.
        let text = unsafe { guard::text(text, "text") }?;
        create(options, Some(text))
    })
}

/// Creates a scheduler from a TOML file on top of options.
///
/// # Safety
/// As [`impresario_create`]; `path` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_create_from_file(path: *const c_char, options: *const OptionsC) -> *mut Handle {
    creating(|| {
        // SAFETY: the header requires NULL or a string.
        let path = unsafe { guard::text(path, "path") }?;
        let bytes = guard::file_bytes(path)?.ok_or_else(|| format!("{path} cannot be read: it does not exist"))?;
        let text = String::from_utf8(bytes).map_err(|_| format!("{path} is not UTF-8 text"))?;
        create(options, Some(&text)).map_err(|Refusal(errno, what)| Refusal(errno, format!("{path}: {what}")))
    })
}

fn report_tokens(tokens: &[Identity], to: Option<TokenFn>, arg: *mut c_void) {
    if let Some(to) = to {
        for identity in tokens {
            // SAFETY: the header's contract of `impresario_token_fn`.
            unsafe { to(arg, identity.token) }
        }
    }
}

/// Ends a scheduler.
///
/// # Safety
/// `dropped` is NULL or a function of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_destroy(
    scheduler: *mut Handle,
    patience_ms: u32,
    dropped: Option<TokenFn>,
    arg: *mut c_void,
) -> c_int {
    let answer = on(scheduler, |s| {
        let left = s.shutdown(Duration::from_millis(u64::from(patience_ms)))?;
        report_tokens(&left.dropped, dropped, arg);
        if left.running > 0 {
            let text = format!(
                "{} callbacks have not returned; the scheduler is closed, destroy it again later",
                left.running
            );
            return Err(Refusal(libc::EBUSY, text));
        }
        Ok(0)
    });
    if answer == 0 {
        handles::remove(scheduler);
    }
    answer
}

/// Submits a request.
///
/// # Safety
/// `submission` points to a struct with a correct `size`; `id` is NULL or points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_submit(
    scheduler: *mut Handle,
    submission: *const SubmissionC,
    id: *mut u64,
) -> c_int {
    on(scheduler, |s| {
        // SAFETY: the header requires NULL or a struct of at least its own `size`.
        let given = unsafe { SubmissionC::read(submission) }?;
        let number = s.submit(&given.submit()?)?;
        if !id.is_null() {
            // SAFETY: not NULL, so it points to space for a number.
            unsafe { id.write_unaligned(number) };
        }
        Ok(0)
    })
}

/// Cancels a request.
///
/// # Safety
/// `token` is NULL or points to space for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_cancel(scheduler: *mut Handle, id: u64, token: *mut u64) -> c_int {
    on(scheduler, |s| {
        let Some(identity) = s.cancel(id) else {
            return Err(Refusal(libc::EINPROGRESS, format!("request {id:#x} is with the program, or gone")));
        };
        if !token.is_null() {
            // SAFETY: not NULL, so it points to space for a number.
            unsafe { token.write_unaligned(identity.token) };
        }
        Ok(0)
    })
}

/// Cancels all queued requests of a connection.
///
/// # Safety
/// `cancelled` is NULL or a function of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_cancel_connection(
    scheduler: *mut Handle,
    connection: u32,
    cancelled: Option<TokenFn>,
    arg: *mut c_void,
) -> c_int {
    on(scheduler, |s| {
        let gone = s.cancel_connection(connection);
        report_tokens(&gone, cancelled, arg);
        Ok(gone.len() as c_int)
    })
}

/// Waits for a batch.
///
/// # Safety
/// `batch` points to space for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_next(scheduler: *mut Handle, timeout_us: i64, batch: *mut *const Batch) -> c_int {
    on(scheduler, |s| {
        if batch.is_null() {
            return Err(Refusal::invalid("batch is NULL; give the address of a pointer"));
        }
        let patience = u64::try_from(timeout_us).map_or(Duration::MAX, Duration::from_micros);
        let Some(delivery) = s.next(patience)? else {
            return Err(Refusal(libc::ETIMEDOUT, format!("no batch within {timeout_us} us")));
        };
        // The scheduler holds the batch until it is completed.
        // SAFETY: not NULL, so it points to space for a pointer.
        unsafe { batch.write_unaligned(delivery.batch()) };
        Ok(0)
    })
}

fn errno(error: c_int) -> Result<c_int, Refusal> {
    if error < 0 {
        return Err(Refusal::invalid(format!("error is {error}; give 0 or an errno, which is positive")));
    }
    Ok(error)
}

/// Completes a batch.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_complete(scheduler: *mut Handle, batch: u64, error: c_int, bytes: u64) -> c_int {
    on(scheduler, |s| {
        s.complete(batch, errno(error)?, bytes)?;
        Ok(0)
    })
}

/// Completes a batch with the device's own times.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_complete_timed(
    scheduler: *mut Handle,
    batch: u64,
    error: c_int,
    bytes: u64,
    started_ns: u64,
    finished_ns: u64,
) -> c_int {
    on(scheduler, |s| {
        if finished_ns != 0 && started_ns > finished_ns {
            return Err(Refusal::invalid(format!("started_ns {started_ns} is later than finished_ns {finished_ns}")));
        }
        s.complete_timed(batch, errno(error)?, bytes, Nanos(started_ns), Nanos(finished_ns))?;
        Ok(0)
    })
}

/// Completes one request of a batch.
///
/// # Safety
/// `request` is NULL or points to a request, or a copy of one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_complete_request(
    scheduler: *mut Handle,
    request: *const Member,
    error: c_int,
    bytes: u64,
) -> c_int {
    on(scheduler, |s| {
        if request.is_null() {
            return Err(Refusal::invalid("request is NULL; give the delivered one, or a copy of it"));
        }
        // SAFETY: not NULL, so a request or a copy of one, which a packed struct of the program may hold.
        let request = unsafe { request.read_unaligned() };
        s.complete_member(request.batch, request.member, errno(error)?, bytes)?;
        Ok(0)
    })
}

/// Bytes of one request that are done when its batch transferred `bytes` from its start.
///
/// # Safety
/// `batch` is NULL or points to a batch that is not completed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_request_bytes(batch: *const Batch, member: u32, bytes: u64) -> u64 {
    if batch.is_null() {
        return 0;
    }
    // SAFETY: not NULL, so a batch or a copy of one, as the header requires.
    let batch = unsafe { batch.read_unaligned() };
    if batch.requests.is_null() || member >= batch.count {
        return 0;
    }
    // SAFETY: `requests` has `count` members, and `member` is below that.
    let request = unsafe { &*batch.requests.add(member as usize) };
    // In the lane's space: neighbours there may be far apart in the file.
    let before = request.lane_offset.saturating_sub(batch.lane_offset);
    bytes.saturating_sub(before).min(request.len)
}

/// Switches the policy.
///
/// # Safety
/// `policy` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_set_policy(scheduler: *mut Handle, policy: *const c_char) -> c_int {
    on(scheduler, |s| {
        // SAFETY: NULL or a string, as the header requires.
        let text = unsafe { guard::text(policy, "policy") }?;
        s.set_policy(&impresario_embed::parse_policy(text)?)?;
        Ok(0)
    })
}

/// Dispatches no batch to a lane for a while.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_hold(scheduler: *mut Handle, lane: u32, span_us: u64) -> c_int {
    on(scheduler, |s| {
        let Ok(lane) = u16::try_from(lane) else {
            return Err(Refusal::invalid(format!("lane {lane} does not exist")));
        };
        s.hold(lane, Duration::from_micros(span_us))?;
        Ok(0)
    })
}

/// Changes the hand-off depth.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_set_depth(scheduler: *mut Handle, lane_requests: u32, lane_bytes: u64) -> c_int {
    on(scheduler, |s| {
        s.set_depth(lane_requests, lane_bytes);
        Ok(0)
    })
}

/// Changes how much is read ahead.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_set_read_ahead(scheduler: *mut Handle, bytes: u64) -> c_int {
    on(scheduler, |s| {
        s.set_read_ahead(bytes)?;
        Ok(0)
    })
}

/// Whether a byte of a file is in the page cache.
///
/// # Safety
/// `fd` is open, or negative.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_in_page_cache(fd: c_int, offset: u64) -> c_int {
    if fd < 0 {
        return -libc::EBADF;
    }
    // SAFETY: open during the call, as the header requires.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    has_byte(fd, offset).map_or(-libc::ENODATA, c_int::from)
}

/// Records requests from now on.
///
/// # Safety
/// `folder` and `name` are NULL or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_start_trace(
    scheduler: *mut Handle,
    folder: *const c_char,
    name: *const c_char,
) -> c_int {
    on(scheduler, |s| {
        // SAFETY: NULL or strings, as the header requires.
        let (folder, name) = unsafe { (guard::text(folder, "folder")?, guard::text(name, "name")?) };
        s.start_trace_in(folder.as_ref(), name)?;
        Ok(0)
    })
}

/// Ends the trace.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_stop_trace(scheduler: *mut Handle) -> c_int {
    on(scheduler, |s| {
        let Some(trace) = s.stop_trace() else {
            return Err(Refusal(libc::ENOENT, "no trace is being written".into()));
        };
        match trace.failure {
            None => Ok(0),
            Some(why) => Err(Refusal(libc::EIO, format!("the trace ended early: {why}"))),
        }
    })
}

/// Predicts by recorded runs, or by none.
///
/// # Safety
/// `traces` and `name` are NULL or C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn impresario_set_prediction(
    scheduler: *mut Handle,
    traces: *const c_char,
    name: *const c_char,
) -> c_int {
    on(scheduler, |s| {
        if traces.is_null() {
            s.forget_runs();
            return Ok(0);
        }
        // SAFETY: strings, as the header requires.
        let (traces, name) = unsafe { (guard::text(traces, "traces")?, guard::text(name, "name")?) };
        let traces: Vec<PathBuf> = traces.split(':').filter(|path| !path.is_empty()).map(Into::into).collect();
        if traces.is_empty() {
            return Err(Refusal::invalid("traces is empty: give files or folders, separated by colons, or NULL"));
        }
        let foretold = s.foretell(name, &traces)?;
        Ok(c_int::try_from(foretold.requests).unwrap_or(c_int::MAX))
    })
}

/// Reports whether a connection can take data.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_ready(scheduler: *mut Handle, connection: u32, ready: c_int) -> c_int {
    on(scheduler, |s| {
        s.ready(connection, ready != 0);
        Ok(0)
    })
}

/// The text of this thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_last_error() -> *const c_char {
    guard::last_error()
}

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
