//! The current interface. The functions are exported by the libraries.

use std::ffi::c_char;

use crate::calls::{self, Points, named, points, run};
use crate::library::Starting;
use crate::say;
use crate::sink::{IdentifierFn, IdentifiersFn, Sink};

/// The callbacks of an init of version 2 or 3; `None` for those of a program of version 1.
pub(crate) fn sink(one: Option<IdentifierFn>, many: Option<IdentifiersFn>, this: &str) -> Option<Sink> {
    let wrong = |what: &str| {
        say!(
            "agios_init: {what}, not a function: this program was built for version 1 of AGIOS, and {this}; have it find \
             libagios.so.1"
        );
    };
    match one.map(|one| points(one as usize)) {
        Some(Points::Data) => wrong("the first argument points to data"),
        Some(Points::Nowhere) => wrong("the first argument points nowhere"),
        _ => return Some(Sink::Identifiers(one, many)),
    }
    None
}

/// Starts the library.
///
/// # Safety
/// Callbacks are NULL or functions of their types, `config_file` is NULL or a string; or all are arguments of version 1,
/// where this returns true, which is no success there.
pub unsafe fn init(
    process_request: Option<IdentifierFn>,
    process_requests: Option<IdentifiersFn>,
    config_file: *const c_char,
    max_queue_id: i32,
) -> bool {
    if process_request.is_none() {
        say!(
            "agios_init: process_request is NULL; give a function. Only version 3 of AGIOS allows none: a program built for \
             that needs AGIOS_API 3, or libagios.so.3"
        );
        return false;
    }
    match sink(process_request, process_requests, "libagios.so.2 is for version 2") {
        Some(default) => calls::init(Starting { default, counts: false }, config_file, max_queue_id),
        None => true,
    }
}

/// Adds a request.
///
/// # Safety
/// `file_id` is NULL or a string.
pub unsafe fn add_request(
    file_id: *const c_char,
    kind: i32,
    offset: i64,
    len: i64,
    identifier: i64,
    queue_id: i32,
) -> bool {
    run("agios_add_request", |library| {
        // SAFETY: as this function's caller promises.
        library.add(&unsafe { named(file_id, kind, offset, len) }?, identifier, queue_id, None)
    })
}
