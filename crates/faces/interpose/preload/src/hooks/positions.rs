//! lseek: where the next read begins. Told only when everything is recorded.

use std::ffi::c_int;

use impresario_ring::{Op, now_ns};
use libc::off_t;

use crate::around::tell;
use crate::real::missing;
use crate::{TABLE, real, served};
use impresario_interpose::Consumer;

#[inline(always)]
fn moved(fd: c_int, real: impl FnOnce() -> off_t) -> off_t {
    let Some(watched) = TABLE.watch(fd) else { return real() };
    let before = TABLE.position(watched);
    let start_ns = now_ns();
    let position = real();
    if position >= 0 {
        TABLE.set_position(watched, position as u64);
        if position as u64 != before && TABLE.consumer().wants(Op::Seek) {
            tell(watched, Op::Seek, 0, position, 0, start_ns, now_ns());
        }
    }
    position
}

macro_rules! lseeks {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, offset: off_t, whence: c_int) -> off_t {
            if let Some(position) = served::seek(fd, offset, whence) {
                return position;
            }
            let Some(real) = real::$name.get() else { return missing() as off_t };
            // SAFETY: the caller's arguments.
            moved(fd, || unsafe { real(fd, offset, whence) })
        }
    )* };
}

lseeks! { lseek lseek64 __lseek }
