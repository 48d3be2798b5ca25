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

agios_library::export! {
    /// Version 2: starts the library.
    agios_init(process_request: Option<IdentifierFn>, process_requests: Option<IdentifiersFn>, config_file: *const c_char,
               max_queue_id: i32) -> bool = generation2::init;
    /// Version 2: adds a request.
    agios_add_request(file_id: *const c_char, kind: i32, offset: i64, len: i64, identifier: i64, queue_id: i32) -> bool
        = generation2::add_request;
    /// All versions: waits until recorded runs are loaded.
    agios_wait_predict_init() = calls::wait_predict_init;
    /// All versions, ours: loads traces of recorded runs.
    agios_load_traces(traces: *const c_char) -> bool = calls::load_traces;
    /// Version 3 before callbacks had an argument.
    agios_v3_add_request_without_argument(file_id: *const c_char, kind: i32, offset: i64, len: i64, identifier: i64,
                                          queue_id: i32, callback: Option<IdentifierFn>) -> bool
        = generation3::add_request_without_argument;
}
