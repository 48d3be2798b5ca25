//! `libagios.so.3`: for programs linked against the development branch of the public library. They ask for the names of
//! version 2, with a callback more.

use std::ffi::{c_char, c_void};

use agios_library::{IdentifierFn, IdentifiersFn, MetricsC, OwnFn, calls, generation3};

/// Starts the library; callbacks may be NULL.
///
/// # Safety
/// As [`generation3::init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_init(
    process_request: Option<IdentifierFn>,
    process_requests: Option<IdentifiersFn>,
    config_file: *const c_char,
    max_queue_id: i32,
) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { generation3::init(process_request, process_requests, config_file, max_queue_id) }
}

/// Stops the library.
#[unsafe(no_mangle)]
pub extern "C" fn agios_exit() {
    calls::exit();
}

/// Adds a request with its own callback. Programs older than its argument give none, and their callbacks expect none.
///
/// # Safety
/// As [`generation3::add_request`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_add_request(
    file_id: *const c_char,
    kind: i32,
    offset: i64,
    len: i64,
    identifier: i64,
    queue_id: i32,
    callback: Option<OwnFn>,
    argument: *mut c_void,
) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { generation3::add_request(file_id, kind, offset, len, identifier, queue_id, callback, argument) }
}

/// Releases a delivered request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_release_request(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { calls::release(file_id, kind, len, offset) }
}

/// Cancels a queued request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_cancel_request(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { calls::cancel(file_id, kind, len, offset) }
}

/// Metrics since the start or the last call, in memory from malloc.
#[unsafe(no_mangle)]
pub extern "C" fn agios_get_metrics_and_reset() -> *mut MetricsC {
    generation3::get_metrics_and_reset()
}
