//! `libagios`: version 2 of AGIOS's interface under its own names, for programs linked against the public library, and
//! versions 1 and 3 under the names that `agios.h` gives them. `generation1` and `generation3` are the libraries for
//! programs that were linked against those.

use std::ffi::{c_char, c_int, c_long, c_short, c_void};

use agios_library::generation1::Client;
use agios_library::{IdentifierFn, IdentifiersFn, MetricsC, OwnFn, calls, generation1, generation2, generation3};

/// Version 2: starts the library.
///
/// # Safety
/// As [`generation2::init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_init(
    process_request: Option<IdentifierFn>,
    process_requests: Option<IdentifiersFn>,
    config_file: *const c_char,
    max_queue_id: i32,
) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { generation2::init(process_request, process_requests, config_file, max_queue_id) }
}

/// All versions: stops the library.
#[unsafe(no_mangle)]
pub extern "C" fn agios_exit() {
    calls::exit();
}

/// Version 2: adds a request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_add_request(
    file_id: *const c_char,
    kind: i32,
    offset: i64,
    len: i64,
    identifier: i64,
    queue_id: i32,
) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { generation2::add_request(file_id, kind, offset, len, identifier, queue_id) }
}

/// Versions 2 and 3: releases a delivered request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_release_request(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { calls::release(file_id, kind, len, offset) }
}

/// Versions 2 and 3: cancels a queued request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_cancel_request(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { calls::cancel(file_id, kind, len, offset) }
}

/// All versions: waits until recorded runs are loaded.
#[unsafe(no_mangle)]
pub extern "C" fn agios_wait_predict_init() {
    calls::wait_predict_init();
}

/// All versions, ours: loads traces of recorded runs.
///
/// # Safety
/// `traces` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_load_traces(traces: *const c_char) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { calls::load_traces(traces) }
}

/// Version 3: starts the library; callbacks may be NULL.
///
/// # Safety
/// As [`generation3::init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v3_init(
    process_request: Option<IdentifierFn>,
    process_requests: Option<IdentifiersFn>,
    config_file: *const c_char,
    max_queue_id: i32,
) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { generation3::init(process_request, process_requests, config_file, max_queue_id) }
}

/// Version 3: adds a request with its own callback.
///
/// # Safety
/// As [`generation3::add_request`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v3_add_request(
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

/// Version 3 before callbacks had an argument.
///
/// # Safety
/// As [`generation3::add_request_without_argument`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v3_add_request_without_argument(
    file_id: *const c_char,
    kind: i32,
    offset: i64,
    len: i64,
    identifier: i64,
    queue_id: i32,
    callback: Option<IdentifierFn>,
) -> bool {
    // SAFETY: as this function's caller promises.
    unsafe { generation3::add_request_without_argument(file_id, kind, offset, len, identifier, queue_id, callback) }
}

/// Version 3: metrics since the start or the last call, in memory from malloc.
#[unsafe(no_mangle)]
pub extern "C" fn agios_get_metrics_and_reset() -> *mut MetricsC {
    generation3::get_metrics_and_reset()
}

/// Version 1: starts the library.
///
/// # Safety
/// As [`generation1::init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_init(client: *const Client, config_file: *const c_char, max_app_id: c_int) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::init(client, config_file, max_app_id) }
}

/// Version 1: adds a request.
///
/// # Safety
/// As [`generation1::add_request`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_add_request(
    file_id: *const c_char,
    kind: c_short,
    offset: c_long,
    len: c_long,
    data: i64,
    client: *const Client,
    app_id: c_int,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::add_request(file_id, kind, offset, len, data, client, app_id) }
}

/// Version 1: releases a delivered request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_release_request(
    file_id: *const c_char,
    kind: c_short,
    len: c_long,
    offset: c_long,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::release_request(file_id, kind, len, offset) }
}

/// Version 1: cancels a queued request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_cancel_request(
    file_id: *const c_char,
    kind: c_short,
    len: c_long,
    offset: c_long,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::cancel_request(file_id, kind, len, offset) }
}

/// Version 1: without effect.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_set_stripe_size(file_id: *const c_char, stripe_size: c_int) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::set_stripe_size(file_id, stripe_size) }
}

/// Version 1: writes the statistics to a file.
///
/// # Safety
/// `filename` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_print_stats_file(filename: *const c_char) {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::print_stats_file(filename) }
}

/// Version 1: resets the statistics.
#[unsafe(no_mangle)]
pub extern "C" fn agios_v1_reset_stats() {
    generation1::reset_stats();
}
