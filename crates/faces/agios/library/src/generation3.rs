//! The interface of the development branch: a callback with every request, metrics. The functions are exported by the
//! libraries.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::calls::{self, Points, named, points, run};
use crate::generation2;
use crate::library::Starting;
use crate::metrics::MetricsC;
use crate::sink::{IdentifierFn, IdentifiersFn, OwnFn, Sink};

/// Starts the library; callbacks may be NULL.
///
/// # Safety
/// As [`generation2::init`].
pub unsafe fn init(
    process_request: Option<IdentifierFn>,
    process_requests: Option<IdentifiersFn>,
    config_file: *const c_char,
    max_queue_id: i32,
) -> bool {
    match generation2::sink(process_request, process_requests, "this library is for version 3") {
        Some(default) => calls::init(Starting { default, counts: true }, config_file, max_queue_id),
        None => true,
    }
}

/// Adds a request with its own callback.
///
/// # Safety
/// `file_id` is NULL or a string, `callback` NULL or a function of its type.
#[allow(clippy::too_many_arguments)] // AGIOS's
pub unsafe fn add_request(
    file_id: *const c_char,
    kind: i32,
    offset: i64,
    len: i64,
    identifier: i64,
    queue_id: i32,
    callback: Option<OwnFn>,
    argument: *mut c_void,
) -> bool {
    let own = callback.map(|f| Sink::Own(f, argument));
    // SAFETY: as this function's caller promises.
    unsafe { add(file_id, kind, (offset, len), identifier, queue_id, own) }
}

/// Adds a request with its own callback, which gets no argument: an earlier state of the development branch.
///
/// # Safety
/// `file_id` is NULL or a string, `callback` NULL or a function of its type.
pub unsafe fn add_request_without_argument(
    file_id: *const c_char,
    kind: i32,
    offset: i64,
    len: i64,
    identifier: i64,
    queue_id: i32,
    callback: Option<IdentifierFn>,
) -> bool {
    let own = callback.map(|f| Sink::Identifiers(Some(f), None));
    // SAFETY: as this function's caller promises.
    unsafe { add(file_id, kind, (offset, len), identifier, queue_id, own) }
}

/// # Safety
/// As [`add_request`].
unsafe fn add(
    file_id: *const c_char,
    kind: i32,
    (offset, len): (i64, i64),
    identifier: i64,
    queue_id: i32,
    own: Option<Sink>,
) -> bool {
    run("agios_add_request", |library| {
        if let Some(Sink::Own(f, _)) = own
            && !may_be_called(f as usize)
        {
            return Err(
                "callback is not a function: this program was built for version 2 of AGIOS, and this library is \
                        for version 3; have it find libagios.so.2"
                    .into(),
            );
        }
        // SAFETY: as this function's caller promises.
        let named = unsafe { named(file_id, kind, offset, len) }?;
        library.add(&named, identifier, queue_id, own)
    })
}

/// Programs of version 2 give no callback: what is found in its place is seldom code. Programs have few callbacks.
fn may_be_called(address: usize) -> bool {
    static LAST: AtomicUsize = AtomicUsize::new(0);
    if LAST.load(Ordering::Relaxed) == address {
        return true;
    }
    let may = matches!(points(address), Points::Code | Points::Unknown);
    if may {
        LAST.store(address, Ordering::Relaxed);
    }
    may
}

/// Metrics since the start or the last call, in memory from malloc; NULL if the library is not running.
pub fn get_metrics_and_reset() -> *mut MetricsC {
    let mut figures = None;
    run("agios_get_metrics_and_reset", |library| {
        figures = Some(library.metrics(true).figures());
        Ok(())
    });
    let Some(figures) = figures else { return std::ptr::null_mut() };
    // SAFETY: memory for one structure, written before it is given away.
    unsafe {
        let memory = libc::malloc(size_of::<MetricsC>()).cast::<MetricsC>();
        if !memory.is_null() {
            memory.write(figures);
        }
        memory
    }
}
