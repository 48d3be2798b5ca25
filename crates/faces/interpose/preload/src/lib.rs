//! `libimpresario_assist.so`: loaded into a program by `LD_PRELOAD`, it stands in front of the C library's input and
//! output functions, calls the real ones, and tells the advice manager what the program reads and writes.
//!
//! Every hook is the real call with a look at the table before or after it. The program gets the real call's result and
//! errno. `extern "C-unwind"` lets a cancelled thread unwind through a hook; hooks hold nothing that would need dropping
//! while the real function runs.
//!
//! [`real`] finds the real functions, [`hooks`] has one file for each family.

#![cfg(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64"))]

mod around;
mod hooks;
mod real;
mod served;

use std::ffi::{CStr, CString, c_int};
use std::os::unix::ffi::OsStringExt;

use hooks::{streams, uring};
use impresario_interpose::served::protocol::{AT_VARIABLE, BYPASS_VARIABLE, FOLDER_VARIABLE, TOKEN_VARIABLE};
use impresario_interpose::{Assist, Table};

/// The program's descriptors. The advice manager's channel is the one consumer so far.
static TABLE: Table<Assist> = Table::new(Assist);

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Runs when the library is loaded, before the program's own code and in its only thread.
extern "C" fn start() {
    impresario_interpose::quietly(|| {
        // A program must never see a word of ours, even of a mistake.
        std::panic::set_hook(Box::new(|_| {}));
        real::find_all();
        uring::find_syscall();
        // SAFETY: the auxiliary vector is always there.
        if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
            return;
        }
        let variable = |name: &CStr| {
            // SAFETY: `name` ends with a zero; no thread changes the environment yet.
            let value = unsafe { libc::getenv(name.as_ptr()) };
            // SAFETY: a string of the environment.
            (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
        };
        let socket = variable(c"IMPRESARIO_ASSIST_SOCKET").map(CStr::to_bytes);
        let runtime = variable(c"XDG_RUNTIME_DIR").map(CStr::to_bytes);
        let path = impresario_ring::socket_path(socket, runtime);
        let Ok(path) = CString::new(path.into_os_string().into_vec()) else { return };
        let (log, libgpfs) = (variable(c"IMPRESARIO_ASSIST_LOG"), variable(c"IMPRESARIO_ASSIST_LIBGPFS"));
        TABLE.consumer().start(&path, log, libgpfs);
        serve(variable);
        let wait = variable(c"IMPRESARIO_ASSIST_WAIT_MS").and_then(|w| w.to_str().ok()).and_then(|w| w.parse().ok());
        if let Some(wait_ms) = wait {
            TABLE.consumer().await_answer(wait_ms);
        }
        // SAFETY: `forked` may run in a child: it only makes system calls. So does `forking`.
        unsafe { libc::pthread_atfork(Some(forking), None, Some(forked)) };
    });
}

/// Begins to serve a cluster's files, when the program is under `impresario run`.
fn serve<'a>(variable: impl Fn(&CStr) -> Option<&'a CStr>) {
    let bytes = |name: &str| CString::new(name).ok().and_then(|name| variable(&name)).map_or(&b""[..], CStr::to_bytes);
    let folder = bytes(FOLDER_VARIABLE);
    if folder.is_empty() {
        return;
    }
    streams::begin_process();
    served::SERVED.start(folder, bytes(AT_VARIABLE), bytes(TOKEN_VARIABLE), bytes(BYPASS_VARIABLE));
    (0..3).for_each(streams::became);
}

unsafe extern "C" fn forking() {
    TABLE.consumer().forking();
}

unsafe extern "C" fn forked() {
    TABLE.consumer().forked();
    served::SERVED.forked();
    streams::begin_process();
}

/// How far the channel to the manager is: 0 there is none, 1 the manager was asked, 2 it has answered and files are
/// registered, 3 the library stands aside in this process. For tests and for programs that want to know.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_assist_state() -> c_int {
    TABLE.consumer().state() as c_int
}

/// How often this process, or one that it was forked from, has looked into rings of io_uring; it goes round. For tests.
#[unsafe(no_mangle)]
pub extern "C" fn impresario_assist_looks() -> u32 {
    uring::looks()
}
