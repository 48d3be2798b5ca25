//! close, close_range, closefrom. A close is noted before it happens: afterwards the number may already be another file.

use std::ffi::{c_int, c_uint};

use super::uring;
use crate::around::set_errno;
use crate::real::missing;
use crate::served::{SERVED, settle};
use crate::{TABLE, real};

macro_rules! closes {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            if TABLE.consumer().owns(fd) || SERVED.owns(fd) {
                // Not the program's: to it the number is not open.
                set_errno(libc::EBADF);
                return -1;
            }
            let open = SERVED.open_file(fd);
            uring::closing(fd);
            TABLE.forget(fd);
            SERVED.forget(fd);
            // SAFETY: the caller's argument.
            let result = unsafe { real(fd) };
            match open {
                Some(open) if result == 0 => settle(open),
                _ => result,
            }
        }
    )* };
}

closes! { close __close }

/// The parts of a range between the library's own numbers.
fn around_own(first: c_uint, last: c_uint, mut each: impl FnMut(c_uint, c_uint) -> c_int) -> c_int {
    let mut from = first;
    let mut numbers = [i32::MAX; 64];
    let mut count = 0;
    for (place, own) in
        numbers.iter_mut().zip(TABLE.consumer().own_numbers().into_iter().flatten().chain(SERVED.own_numbers()))
    {
        *place = own;
        count += 1;
    }
    numbers[..count].sort_unstable();
    for own in numbers.into_iter().take(count) {
        let own = own as c_uint;
        if own < from || own > last {
            continue;
        }
        if own > from {
            let result = each(from, own - 1);
            if result != 0 {
                return result;
            }
        }
        if own == last {
            return 0;
        }
        from = own + 1;
    }
    each(from, last)
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let Some(real) = real::close_range.get() else { return missing() };
    // Anything that only the kernel can answer: an error, or a change that closes nothing.
    if first > last || flags & !(libc::CLOSE_RANGE_UNSHARE as c_int) != 0 {
        // SAFETY: the caller's arguments.
        return unsafe { real(first, last, flags) };
    }
    if flags != 0 {
        SERVED.part();
    }
    TABLE.forget_range(first, last);
    SERVED.forget_range(first, last);
    // SAFETY: parts of the range that the caller gave up.
    around_own(first, last, |from, to| unsafe { real(from, to, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    let first = first.max(0) as c_uint;
    TABLE.forget_range(first, c_uint::MAX);
    SERVED.forget_range(first, c_uint::MAX);
    if let Some(real) = real::close_range.get() {
        let before = crate::around::errno();
        // SAFETY: all that the caller gave up but our own.
        if around_own(first, c_uint::MAX, |from, to| unsafe { real(from, to, 0) }) == 0 {
            return;
        }
        set_errno(before);
    }
    if let Some(real) = real::closefrom.get() {
        // Ours are closed too; their next use notices.
        // SAFETY: the caller's argument.
        unsafe { real(first as c_int) }
    }
}
