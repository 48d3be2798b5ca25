//! Shared by the functions of all generations: the one running library, argument checks, errors on stderr.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use impresario_base::lock::RwLock;
use impresario_embed::guard;

use crate::library::{Complaints, Library, Starting};
use crate::requests::Named;
use crate::{config, say};

/// The default path of the configuration.
const DEFAULT_CONFIG: &str = "/etc/agios.conf";

/// Longest request, bytes (8 TiB): the sum of all outstanding lengths stays below 2^63.
const LEN_MAX: i64 = 1 << 43;

static LIBRARY: RwLock<Option<Arc<Library>>> = RwLock::new(None);
/// What is said while the library is not running: programs that do not look whether it started call it for every request.
static IDLE: Complaints = Complaints::new();
/// Counts starts and ends.
static CHANGES: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The library as this thread last saw it, with the count of changes then: a call touches nothing that other
    /// threads write.
    static SEEN: RefCell<(u64, Option<Arc<Library>>)> = const { RefCell::new((0, None)) };
}

/// Runs a closure with the library, if it is running.
fn with_library<R>(body: impl FnOnce(Option<&Library>) -> R) -> R {
    let mut body = Some(body);
    let seen = SEEN.try_with(|seen| {
        let changes = CHANGES.load(Ordering::Acquire);
        let mut now = seen.try_borrow().ok()?;
        if now.0 != changes {
            drop(now);
            // In a callback within a call of this thread it stays borrowed.
            *seen.try_borrow_mut().ok()? = (changes, LIBRARY.read().clone());
            now = seen.try_borrow().ok()?;
        }
        body.take().map(|body| body(now.1.as_deref()))
    });
    match (seen, body) {
        (Ok(Some(answer)), _) => answer,
        // The thread is ending, or a callback changed the library.
        (_, Some(body)) => body(LIBRARY.read().clone().as_deref()),
        (_, None) => unreachable!("the body was run, so there is an answer"),
    }
}

/// Runs the body of a function that returns true or false.
pub fn run(name: &str, body: impl FnOnce(&Library) -> Result<(), String>) -> bool {
    guard::guarded(false, || {
        if guard::forked() {
            return false; // the error was printed if possible; a forked child must touch nothing
        }
        with_library(|library| {
            let Some(library) = library else {
                IDLE.say(&format!("{name}: the library is not running; call agios_init first"));
                return false;
            };
            match body(library) {
                Ok(()) => true,
                Err(what) => {
                    library.complain(&format!("{name}: {what}"));
                    false
                }
            }
        })
    })
}

/// False if it is running already, which is said.
fn start(starting: Starting, config_file: *const c_char, queues: i32) -> Result<bool, String> {
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
    let (config, warnings) = config::read(&text, path, queues)?;
    let mut library = LIBRARY.write();
    if let Some(running) = &*library {
        running.complain("agios_init: the library is already running; call agios_exit first");
        return Ok(false);
    }
    for warning in warnings {
        say!("{warning}");
    }
    *library = Some(Arc::new(Library::start(&config, starting)?));
    CHANGES.fetch_add(1, Ordering::Release);
    IDLE.forget();
    Ok(true)
}

/// Starts the library, or reports on stderr why it cannot.
pub fn init(starting: Starting, config_file: *const c_char, queues: i32) -> bool {
    guard::guarded(false, || match start(starting, config_file, queues) {
        Ok(started) => started,
        Err(what) => {
            say!("agios_init: {what}");
            false
        }
    })
}

/// Stops the library.
pub fn exit() {
    guard::guarded((), || {
        if guard::forked() {
            return;
        }
        let Some(library) = LIBRARY.read().clone() else { return };
        if library.in_callback() {
            library.complain("agios_exit: called from a callback; call it from another thread");
            return;
        }
        if let Err(what) = library.stop() {
            say!("agios_exit: {what}");
        }
        LIBRARY.write().take_if(|l| Arc::ptr_eq(l, &library));
        CHANGES.fetch_add(1, Ordering::Release);
    });
}

/// The checked identity of a request.
///
/// # Safety
/// `file_id` is NULL or a string.
pub unsafe fn named<'a>(file_id: *const c_char, kind: i32, offset: i64, len: i64) -> Result<Named<'a>, String> {
    if file_id.is_null() {
        return Err("file_id is NULL; give a string".into());
    }
    let write = match kind {
        0 => false,
        1 => true,
        other => return Err(format!("type = {other}: give RT_READ or RT_WRITE")),
    };
    if offset < 0 || !(0..=LEN_MAX).contains(&len) || offset.checked_add(len.max(1)).is_none() {
        return Err(format!("offset = {offset}, len = {len}: give an offset from 0 and a length from 0 to {LEN_MAX}"));
    }
    // SAFETY: not NULL, so a string, as the header requires.
    let file = unsafe { CStr::from_ptr(file_id) }.to_bytes();
    Ok(Named { file, write, offset: offset as u64, len: len as u64 })
}

/// Releases a delivered request.
///
/// # Safety
/// `file_id` is NULL or a string.
pub unsafe fn release(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    run("agios_release_request", |library| library.release(&unsafe { named(file_id, kind, offset, len) }?))
}

/// Cancels a queued request.
///
/// # Safety
/// `file_id` is NULL or a string.
pub unsafe fn cancel(file_id: *const c_char, kind: i32, len: i64, offset: i64) -> bool {
    // SAFETY: as this function's caller promises.
    run("agios_cancel_request", |library| library.cancel(&unsafe { named(file_id, kind, offset, len) }?))
}

/// Waits until recorded runs are loaded.
pub fn wait_predict_init() {
    // A failed load was reported when it failed.
    run("agios_wait_predict_init", |library| {
        let _ = library.wait_foretold();
        Ok(())
    });
}

/// Loads traces of recorded runs, which predict requests from then on.
///
/// # Safety
/// `traces` is NULL or a string.
pub unsafe fn load_traces(traces: *const c_char) -> bool {
    run("agios_load_traces", |library| {
        // SAFETY: as this function's caller promises.
        let traces = unsafe { guard::text(traces, "traces") }?;
        let traces: Vec<_> = traces.split(':').filter(|path| !path.is_empty()).map(Into::into).collect();
        if traces.is_empty() {
            return Err("traces is empty: give files or folders, separated by colons".into());
        }
        library.foretell(traces);
        library.wait_foretold()
    })
}

/// The target of an address in an argument, which identifies programs of another generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Points {
    /// Code, so it may be a function.
    Code,
    /// Memory that is not executable.
    Data,
    /// Nothing: a small number, or unmapped memory.
    Nowhere,
    /// It cannot be determined here.
    Unknown,
}

/// Determines the target of an address.
pub fn points(address: usize) -> Points {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return Points::Unknown };
    for line in maps.lines() {
        let mut words = line.split(' ');
        let range = words.next().and_then(|range| range.split_once('-'));
        let hex = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        if let Some((from, to)) = range
            && (hex(from)..hex(to)).contains(&address)
        {
            let runs = words.next().is_some_and(|rights| rights.contains('x'));
            return if runs { Points::Code } else { Points::Data };
        }
    }
    Points::Nowhere
}

/// True or false as in the oldest interface: 0, or -1.
pub fn zero_if(done: bool) -> c_int {
    c_int::from(done) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_data_are_told_apart() {
        static DATA: u8 = 7;
        assert_eq!(points(zero_if as *const () as usize), Points::Code);
        assert_eq!(points(&raw const DATA as usize), Points::Data);
        assert_eq!(points(&raw const LIBRARY as usize), Points::Data);
        assert_eq!((points(5), points(0)), (Points::Nowhere, Points::Nowhere));
    }
}
