//! The oldest interface: int results, `struct client`, application ids. The functions are exported by the libraries.

use std::ffi::{c_char, c_int, c_long, c_short};

use impresario_embed::guard;

use crate::calls::{self, Points, named, points, run, zero_if};
use crate::library::Starting;
use crate::say;
use crate::sink::{AllDataFn, DataFn, Sink};

/// `struct client`. Its data are words that hold a number or a pointer.
#[repr(C)]
pub struct Client {
    process_request: Option<DataFn>,
    process_requests: Option<AllDataFn>,
    is_dev_idle: Option<unsafe extern "C" fn() -> c_int>,
}

/// # Safety
/// `client` is NULL or points to a `struct client`.
unsafe fn sink_of(client: *const Client) -> Option<Sink> {
    // SAFETY: as the caller promises.
    let client = unsafe { client.as_ref() }?;
    Some(Sink::Data(client.process_request, client.process_requests))
}

/// Starts the library: 0, or -1. `max_app_id` is an int, in a register whose other half is looked at where the call fails
/// anyway.
///
/// # Safety
/// `client` is NULL or points to a `struct client`, or is a function, as it is in later versions; `config_file` is NULL or
/// a string.
pub unsafe fn init(client: *const Client, config_file: *const c_char, max_app_id: usize) -> c_int {
    if !client.is_null() && matches!(points(client as usize), Points::Code | Points::Nowhere) {
        say!(
            "agios_init: the first argument is no struct client: this program was built for version 2 or 3 of AGIOS, and \
             libagios.so.1 is for version 1; have it find libagios.so.2 or libagios.so.3"
        );
        // Later versions take it for false.
        return 0;
    }
    if client.is_null() && is_version_3(config_file as usize, max_app_id) {
        say!(
            "agios_init: the arguments are those of a program without callbacks in agios_init: it was built for version 3 of \
             AGIOS, and libagios.so.1 is for version 1; have it find libagios.so.3"
        );
        return 0;
    }
    // SAFETY: as this function's caller promises.
    match unsafe { sink_of(client) }.filter(Sink::is_there) {
        // Ids go up to the largest.
        Some(default) => {
            let max_app_id = max_app_id as c_int;
            zero_if(calls::init(Starting { default, counts: true }, config_file, max_app_id.saturating_add(1)))
        }
        None => {
            say!(
                "agios_init: the client has no callback; set process_request. A program built for version 3 of AGIOS, where \
                 it may be NULL, needs libagios.so.3"
            );
            -1
        }
    }
}

/// Of a call without a first argument: in version 3 a function may follow, then the configuration's name. In version 1 that
/// is the name, then a small number.
fn is_version_3(second: usize, third: usize) -> bool {
    points(second) == Points::Code || matches!(points(third), Points::Code | Points::Data)
}

/// Adds a request: 0, or -1.
///
/// # Safety
/// `client` is NULL or points to a `struct client`, `file_id` is NULL or a string.
pub unsafe fn add_request(
    file_id: *const c_char,
    kind: c_short,
    offset: c_long,
    len: c_long,
    data: i64,
    client: *const Client,
    app_id: c_int,
) -> c_int {
    zero_if(run("agios_add_request", |library| {
        // SAFETY: as this function's caller promises.
        let (named, sink) = unsafe { (named(file_id, kind.into(), offset, len)?, sink_of(client)) };
        library.add(&named, data, app_id, sink)
    }))
}

/// Releases a delivered request: 1, or 0.
///
/// # Safety
/// `file_id` is NULL or a string.
pub unsafe fn release_request(file_id: *const c_char, kind: c_short, len: c_long, offset: c_long) -> c_int {
    // SAFETY: as this function's caller promises.
    c_int::from(unsafe { calls::release(file_id, kind.into(), len, offset) })
}

/// Cancels a queued request: 1, or 0.
///
/// # Safety
/// `file_id` is NULL or a string.
pub unsafe fn cancel_request(file_id: *const c_char, kind: c_short, len: c_long, offset: c_long) -> c_int {
    // SAFETY: as this function's caller promises.
    c_int::from(unsafe { calls::cancel(file_id, kind.into(), len, offset) })
}

/// Nothing here depends on stripes: 1 where the library runs, or 0.
///
/// # Safety
/// `file_id` is NULL or a string.
pub unsafe fn set_stripe_size(file_id: *const c_char, stripe_size: c_int) -> c_int {
    c_int::from(run("agios_set_stripe_size", |_| {
        if stripe_size <= 0 {
            return Err(format!("stripe_size = {stripe_size}: give at least 1"));
        }
        // SAFETY: as this function's caller promises.
        unsafe { named(file_id, 0, 0, 0) }.map(drop)
    }))
}

/// Writes the statistics to a file.
///
/// # Safety
/// `filename` is NULL or a string.
pub unsafe fn print_stats_file(filename: *const c_char) {
    run("agios_print_stats_file", |library| {
        // SAFETY: as this function's caller promises.
        let path = unsafe { guard::text(filename, "filename") }?;
        std::fs::write(path, library.metrics(false).to_string()).map_err(|e| format!("{path} cannot be written: {e}"))
    });
}

/// Resets the statistics.
pub fn reset_stats() {
    run("agios_reset_stats", |library| {
        library.metrics(true);
        Ok(())
    });
}
