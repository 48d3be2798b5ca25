//! `libagios.so.1`: for programs linked against version 1 of the public library. They ask for its names, which have other
//! arguments than those of later versions.

use std::ffi::{c_char, c_int, c_long, c_short};

use agios_library::calls;
use agios_library::generation1::{self, Client};

/// Starts the library.
///
/// # Safety
/// As [`generation1::init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_init(client: *const Client, config_file: *const c_char, max_app_id: c_int) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::init(client, config_file, max_app_id) }
}

/// Stops the library.
#[unsafe(no_mangle)]
pub extern "C" fn agios_exit() {
    calls::exit();
}

/// Adds a request.
///
/// # Safety
/// As [`generation1::add_request`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_add_request(
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

/// Releases a delivered request. Some programs give two arguments more.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_release_request(
    file_id: *const c_char,
    kind: c_short,
    len: c_long,
    offset: c_long,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::release_request(file_id, kind, len, offset) }
}

/// Cancels a queued request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_cancel_request(
    file_id: *const c_char,
    kind: c_short,
    len: c_long,
    offset: c_long,
) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::cancel_request(file_id, kind, len, offset) }
}

/// Without effect.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_set_stripe_size(file_id: *const c_char, stripe_size: c_int) -> c_int {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::set_stripe_size(file_id, stripe_size) }
}

/// Writes the statistics to a file.
///
/// # Safety
/// `filename` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_print_stats_file(filename: *const c_char) {
    // SAFETY: as this function's caller promises.
    unsafe { generation1::print_stats_file(filename) }
}

/// Resets the statistics.
#[unsafe(no_mangle)]
pub extern "C" fn agios_reset_stats() {
    generation1::reset_stats();
}

/// Waits until recorded runs are loaded.
#[unsafe(no_mangle)]
pub extern "C" fn agios_wait_predict_init() {
    calls::wait_predict_init();
}
