//! Watching files for changes, which is not served: the kernel would watch what stands for a directory of the cluster, in which
//! nothing ever happens.

use std::ffi::{c_char, c_int, c_long};

use impresario_interpose::served::protocol::{Op, Request};

use crate::real;
use crate::real::missing;
use crate::served::{fail, named};

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn inotify_add_watch(queue: c_int, path: *const c_char, events: u32) -> c_int {
    let Some(real) = real::inotify_add_watch.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |_, path| c_long::from(unsafe { real(queue, path, events) });
    let request = Request::new(Op::Stat);
    // SAFETY: the caller's path.
    unsafe { named((libc::AT_FDCWD, path), request, (b"", b""), real, |_, _| fail(libc::ENOENT)) as c_int }
}
