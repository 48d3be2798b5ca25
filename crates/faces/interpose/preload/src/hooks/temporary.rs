//! The temporary names that the C library makes.

use std::ffi::{c_char, c_int};

use impresario_interpose::served::{Room, Route};

use super::names::mkdir;
use crate::real;
use crate::real::missing;
use crate::served::{self, SERVED, fail};

const HERE: c_int = libc::AT_FDCWD;

/// Makes a name out of a template whose six `X` before a suffix are replaced, until `make` does not find it taken.
///
/// # Safety
/// As `mkstemps`.
unsafe fn temporary(template: *mut c_char, suffix: c_int, mut make: impl FnMut() -> c_int) -> c_int {
    // SAFETY: the caller's template.
    let len = unsafe { served::bytes(template) }.len();
    let Some(at) = usize::try_from(suffix).ok().and_then(|suffix| len.checked_sub(suffix + 6)) else {
        return fail(libc::EINVAL) as c_int;
    };
    // SAFETY: six bytes of the template, which the caller lets us change.
    let place = unsafe { std::slice::from_raw_parts_mut(template.cast::<u8>().add(at), 6) };
    if place != b"XXXXXX" {
        return fail(libc::EINVAL) as c_int;
    }
    const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    for _ in 0..1000 {
        let mut random = [0u8; 6];
        // SAFETY: asks the kernel to fill a place of ours.
        if unsafe { libc::syscall(libc::SYS_getrandom, random.as_mut_ptr(), random.len(), 0) } != 6 {
            break;
        }
        for (byte, random) in place.iter_mut().zip(random) {
            *byte = LETTERS[usize::from(random) % LETTERS.len()];
        }
        let made = make();
        if made >= 0 || crate::around::errno() != libc::EEXIST {
            return made;
        }
    }
    fail(libc::EEXIST) as c_int
}

/// Whether a path leads into the cluster.
///
/// # Safety
/// As [`served::bytes`].
pub unsafe fn is_inside(path: *const c_char) -> bool {
    // SAFETY: the caller's path.
    SERVED.is_active()
        && matches!(
            // SAFETY: as above.
            SERVED.place(HERE, unsafe { served::bytes(path) }, &mut Room::new()),
            Ok(Route::Inside)
        )
}

macro_rules! mkstemps {
    ($($name:ident($($arg:ident),*) $suffix:expr, $flags:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(template: *mut c_char $(, $arg: c_int)*) -> c_int {
            // SAFETY: the caller's template.
            unsafe {
                if is_inside(template) {
                    let flags = ($flags & !libc::O_ACCMODE) | libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
                    return temporary(template, $suffix, || super::opening::open64(template, flags, 0o600));
                }
            }
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let fd = unsafe { real(template $(, $arg)*) };
            SERVED.forget(fd);
            fd
        }
    )* };
}

mkstemps! {
    mkstemp() 0, 0;
    mkstemp64() 0, 0;
    mkostemp(flags) 0, flags;
    mkostemp64(flags) 0, flags;
    mkstemps(suffix) suffix, 0;
    mkstemps64(suffix) suffix, 0;
    mkostemps(suffix, flags) suffix, flags;
    mkostemps64(suffix, flags) suffix, flags;
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mkdtemp(template: *mut c_char) -> *mut c_char {
    // SAFETY: the caller's template.
    unsafe {
        if is_inside(template) {
            let made = temporary(template, 0, || mkdir(template, 0o700));
            return if made < 0 { std::ptr::null_mut() } else { template };
        }
    }
    let Some(real) = real::mkdtemp.get() else {
        missing();
        return std::ptr::null_mut();
    };
    // SAFETY: the caller's argument.
    unsafe { real(template) }
}
