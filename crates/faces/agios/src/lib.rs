//! `libagios`: the three versions of AGIOS's interface (`agios.h`) over one [`Library`].
//!
//! The C functions check their arguments, find the running library, and report errors on stderr.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("identifiers and pointers of the oldest interface share 64-bit words");

mod config;
mod library;
mod metrics;
mod syntax;

use std::ffi::{CStr, c_char, c_int, c_long, c_short, c_void};
use std::sync::Arc;

use impresario_base::lock::RwLock;
use impresario_embed::guard;

use library::{Library, Many, Named, One, Sink};
pub use metrics::MetricsC;

type IdentifierFn = unsafe extern "C" fn(i64) -> *mut c_void;
type IdentifiersFn = unsafe extern "C" fn(*mut i64, i32) -> *mut c_void;
type OwnFn = unsafe extern "C" fn(i64, *mut c_void) -> *mut c_void;

/// `struct client` of the oldest interface. Its data are words that hold a number or a pointer.
#[repr(C)]
pub struct Client {
    process_request: Option<unsafe extern "C" fn(i64)>,
    process_requests: Option<unsafe extern "C" fn(*mut i64, i32)>,
    is_dev_idle: Option<unsafe extern "C" fn() -> c_int>,
}

/// Prints one line on stderr. A full or closed stderr is not an error.
macro_rules! say {
    ($($text:tt)*) => {
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("agios: {}\n", format_args!($($text)*)));
    };
}
pub(crate) use say;

/// The default path of the configuration.
const DEFAULT_CONFIG: &str = "/etc/agios.conf";

static LIBRARY: RwLock<Option<Arc<Library>>> = RwLock::new(None);

fn running() -> Option<Arc<Library>> {
    LIBRARY.read().clone()
}

/// Runs the body of a function that returns true or false.
fn run(name: &str, body: impl FnOnce(&Library) -> Result<(), String>) -> bool {
    guard::guarded(false, || {
        if guard::forked() {
            return false; // the error was printed if possible: a forked child must not touch anything here
        }
        let Some(library) = running() else {
            say!("{name}: the library is not running; call agios_init first");
            return false;
        };
        match body(&library) {
            Ok(()) => true,
            Err(what) => {
                library.complain(&format!("{name}: {what}"));
                false
            }
        }
    })
}

fn start(default: Sink, config_file: *const c_char, max_queue_id: i32) -> Result<(), String> {
    if guard::forked() {
        return Err(guard::FORKED_TEXT.into());
    }
    // SAFETY: the header requires NULL or a string.
    let named = if config_file.is_null() { "" } else { unsafe { guard::text(config_file, "config_file") }? };
    let path = if named.is_empty() { DEFAULT_CONFIG } else { named };
    let text = match guard::file_bytes(path)? {
        // Comments may be in any encoding.
        Some(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        None => {
            if !named.is_empty() {
                say!("{path} does not exist; the defaults apply");
            }
            String::new()
        }
    };
    let (config, warnings) = config::read(&text, path, max_queue_id)?;
    let mut library = LIBRARY.write();
    if library.is_some() {
        return Err("the library is already running; call agios_exit first".into());
    }
    for warning in warnings {
        say!("{warning}");
    }
    *library = Some(Arc::new(Library::start(&config, default)?));
    Ok(())
}

fn init(default: Sink, config_file: *const c_char, max_queue_id: i32) -> bool {
    guard::guarded(false, || match start(default, config_file, max_queue_id) {
        Ok(()) => true,
        Err(what) => {
            say!("agios_init: {what}");
            false
        }
    })
}

/// The checked identity of a request.
///
/// # Safety
/// `file_id` is NULL or a string.
unsafe fn named<'a>(file_id: *const c_char, kind: i32, offset: i64, len: i64) -> Result<Named<'a>, String> {
    if file_id.is_null() {
        return Err("file_id is NULL; give a string".into());
    }
    let write = match kind {
        0 => false,
        1 => true,
        other => return Err(format!("type = {other}: give RT_READ or RT_WRITE")),
    };
    if offset < 0 || len <= 0 || offset.checked_add(len).is_none() {
        return Err(format!("offset = {offset}, len = {len}: give an offset from 0 and a length from 1"));
    }
    // SAFETY: not NULL, so a string, as the header requires.
    let file = unsafe { CStr::from_ptr(file_id) }.to_bytes();
    Ok(Named { file, write, offset, len })
}

/// Version 2 of the public library.
///
/// # Safety
/// Callbacks are NULL or functions of their types, `config_file` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_init(
    process_request: Option<IdentifierFn>,
    process_requests: Option<IdentifiersFn>,
    config_file: *const c_char,
    max_queue_id: i32,
) -> bool {
    if process_request.is_none() {
        say!("agios_init: process_request is NULL; give a function (only AGIOS_API 3 allows none)");
        return false;
    }
    // SAFETY: as this function's caller promises.
    unsafe { agios_v3_init(process_request, process_requests, config_file, max_queue_id) }
}

/// The later version: callbacks may be NULL.
///
/// # Safety
/// As [`agios_init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v3_init(
    process_request: Option<IdentifierFn>,
    process_requests: Option<IdentifiersFn>,
    config_file: *const c_char,
    max_queue_id: i32,
) -> bool {
    let sink = Sink { one: process_request.map(One::Identifier), many: process_requests.map(Many::Identifiers) };
    init(sink, config_file, max_queue_id)
}

/// Stops the library.
#[unsafe(no_mangle)]
pub extern "C" fn agios_exit() {
    guard::guarded((), || {
        if guard::forked() {
            return;
        }
        let Some(library) = running() else { return };
        match library.stop() {
            Err(what) if what.contains("callback of this scheduler") => {
                say!("agios_exit: called from a callback; call it from another thread");
                return;
            }
            Err(what) => {
                say!("agios_exit: {what}");
            }
            Ok(()) => {}
        }
        LIBRARY.write().take_if(|l| Arc::ptr_eq(l, &library));
    });
}

/// Adds a request.
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
    unsafe { agios_v3_add_request(file_id, kind, offset, len, identifier, queue_id, None, std::ptr::null_mut()) }
}

/// Adds a request with its own callback.
///
/// # Safety
/// `file_id` is NULL or a string, `callback` NULL or a function of its type.
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
    run("agios_add_request", |library| {
        // SAFETY: as this function's caller promises.
        let named = unsafe { named(file_id, kind, offset, len) }?;
        let own = callback.map(|f| Sink { one: Some(One::Own(f, argument)), many: None });
        library.add(&named, identifier, queue_id, own)
    })
}

/// Releases a delivered request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_release_request(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    run("agios_release_request", |library| library.release(&unsafe { named(file_id, kind, offset, len) }?))
}

/// Cancels a queued request.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_cancel_request(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    run("agios_cancel_request", |library| library.cancel(&unsafe { named(file_id, kind, offset, len) }?))
}

/// Metrics since the start or the last call, in memory from malloc.
#[unsafe(no_mangle)]
pub extern "C" fn agios_get_metrics_and_reset() -> *mut MetricsC {
    let mut figures = None;
    run("agios_get_metrics_and_reset", |library| {
        figures = Some(library.take_metrics().figures());
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

/// # Safety
/// `client` is NULL or points to a `struct client`.
unsafe fn sink_of(client: *const Client) -> Option<Sink> {
    // SAFETY: as the caller promises.
    let client = unsafe { client.as_ref() }?;
    Some(Sink { one: client.process_request.map(One::Data), many: client.process_requests.map(Many::Data) })
}

/// The oldest version: 0, or -1.
///
/// # Safety
/// `client` is NULL or points to a `struct client`, `config_file` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_init(client: *const Client, config_file: *const c_char, max_app_id: c_int) -> c_int {
    // SAFETY: as this function's caller promises.
    match unsafe { sink_of(client) }.filter(Sink::is_there) {
        Some(sink) => init(sink, config_file, max_app_id) as c_int - 1,
        None => {
            say!("agios_init: the client has no callback; set process_request");
            -1
        }
    }
}

/// The oldest version: 0, or -1.
///
/// # Safety
/// `client` is NULL or points to a `struct client`, `file_id` is NULL or a string.
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
    run("agios_add_request", |library| {
        // SAFETY: as this function's caller promises.
        let (named, sink) = unsafe { (named(file_id, kind.into(), offset, len)?, sink_of(client)) };
        library.add(&named, data, app_id, sink)
    }) as c_int
        - 1
}

/// The oldest version: 1, or 0. The last two arguments are ignored.
///
/// # Safety
/// `file_id` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_release_request(
    file_id: *const c_char,
    kind: c_short,
    len: c_long,
    offset: c_long,
    _sub_request: c_int,
    _total_len: c_long,
) -> c_int {
    // SAFETY: as this function's caller promises.
    c_int::from(unsafe { agios_release_request(file_id, kind.into(), len, offset) })
}

/// The oldest version: 1, or 0.
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
    c_int::from(unsafe { agios_cancel_request(file_id, kind.into(), len, offset) })
}

/// Writes the statistics to a file.
///
/// # Safety
/// `filename` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn agios_v1_print_stats_file(filename: *const c_char) {
    run("agios_print_stats_file", |library| {
        // SAFETY: as this function's caller promises.
        let path = unsafe { guard::text(filename, "filename") }?;
        std::fs::write(path, library.metrics_text()).map_err(|e| format!("{path} cannot be written: {e}"))
    });
}

/// Resets the statistics.
#[unsafe(no_mangle)]
pub extern "C" fn agios_v1_reset_stats() {
    run("agios_reset_stats", |library| {
        library.take_metrics();
        Ok(())
    });
}
