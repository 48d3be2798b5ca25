//! `libagios`: version 2 of AGIOS's interface under its own names, for programs linked against the public library, and
//! versions 1 and 3 under the names that `agios.h` gives them. `generation1` and `generation3` are the libraries for
//! programs linked against those versions.

use std::ffi::c_char;

use agios_library::{IdentifierFn, IdentifiersFn, calls, generation2, generation3};

agios_library::export_all_versions!();
agios_library::export_versions_2_and_3!();
agios_library::export_version_1!(
    init = agios_v1_init,
    add_request = agios_v1_add_request,
    release_request = agios_v1_release_request,
    cancel_request = agios_v1_cancel_request,
    set_stripe_size = agios_v1_set_stripe_size,
    print_stats_file = agios_v1_print_stats_file,
    reset_stats = agios_v1_reset_stats,
);
agios_library::export_version_3!(init = agios_v3_init, add_request = agios_v3_add_request);

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
