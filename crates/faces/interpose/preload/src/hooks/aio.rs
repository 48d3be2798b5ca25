//! POSIX asynchronous I/O and libaio: told when submitted, with the length that was asked for.

use std::ffi::{c_int, c_long, c_void};

use impresario_interpose::{Consumer, quietly};
use impresario_ring::{Op, flag, now_ns};
use libc::{aiocb, iovec, sigevent};

use crate::around::{set_errno, tell, wanted};
use crate::real::missing;
use crate::{TABLE, real};

fn submitted(fd: c_int, op: Op, offset: i64, len_bytes: u64, start_ns: u64, end_ns: u64) {
    if let Some(watched) = wanted(fd, op).filter(|_| len_bytes > 0) {
        tell(watched, op, flag::ASYNC, offset, len_bytes, start_ns, end_ns);
    }
}

/// What a control block asks for. Copied before it is submitted: afterwards it may be gone.
fn wish(block: *const aiocb, op: Option<Op>) -> Option<(c_int, Op, i64, u64)> {
    if block.is_null() || TABLE.consumer().generation() == 0 {
        return None;
    }
    // SAFETY: the C library reads the same fields of the same block.
    let block = unsafe { &*block };
    let op = op.or(match block.aio_lio_opcode {
        libc::LIO_READ => Some(Op::Read),
        libc::LIO_WRITE => Some(Op::Write),
        _ => None,
    })?;
    Some((block.aio_fildes, op, block.aio_offset, block.aio_nbytes as u64))
}

macro_rules! singles {
    ($($name:ident $op:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(block: *mut aiocb) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            let wish = wish(block, Some($op));
            let start_ns = if wish.is_some() { now_ns() } else { 0 };
            // SAFETY: the caller's argument.
            let result = unsafe { real(block) };
            if let (0, Some((fd, op, offset, len))) = (result, wish) {
                submitted(fd, op, offset, len, start_ns, now_ns());
            }
            result
        }
    )* };
}

singles! {
    aio_read Op::Read;
    aio_read64 Op::Read;
    aio_write Op::Write;
    aio_write64 Op::Write;
}

/// Lists longer than this are told up to here.
const LIST_MAX: c_int = 1024;

macro_rules! lists {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            mode: c_int,
            list: *const *mut aiocb,
            count: c_int,
            signal: *mut sigevent,
        ) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // Told before they are submitted: when the call returns, the blocks may be gone.
            if !list.is_null() && TABLE.consumer().generation() != 0 {
                quietly(|| {
                    let now = now_ns();
                    for i in 0..count.clamp(0, LIST_MAX) as usize {
                        // SAFETY: the C library reads the same list.
                        if let Some((fd, op, offset, len)) = wish(unsafe { *list.add(i) }, None) {
                            submitted(fd, op, offset, len, now, now);
                        }
                    }
                });
            }
            // SAFETY: the caller's arguments.
            unsafe { real(mode, list, count, signal) }
        }
    )* };
}

lists! { lio_listio lio_listio64 }

/// Of a list given to `io_submit`, at most this many blocks are reported; the stack has room for that many copies.
const COPIED_MAX: usize = 128;

/// The kernel's control block.
#[repr(C)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    len: u64,
    offset: i64,
    rest: [u64; 2],
}

fn kernel_wish(block: *const c_void) -> Option<(c_int, Op, i64, u64)> {
    if block.is_null() {
        return None;
    }
    // SAFETY: the kernel reads the same block.
    let block = unsafe { &*block.cast::<Iocb>() };
    let (op, vector) = match block.opcode {
        0 => (Op::Read, false),
        1 => (Op::Write, false),
        7 => (Op::Read, true),
        8 => (Op::Write, true),
        _ => return None,
    };
    let len = if vector {
        let parts = block.buffer as *const iovec;
        (0..block.len.min(1024) as usize)
            // SAFETY: the kernel reads the same vector.
            .map(|i| unsafe { (*parts.add(i)).iov_len as u64 })
            .fold(0, u64::saturating_add)
    } else {
        block.len
    };
    Some((block.fd as c_int, op, block.offset, len))
}

/// libaio's function, which returns negative error numbers. When libaio was loaded later and out of our sight, the call
/// is made directly, as it does.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn io_submit(context: *mut c_void, count: c_long, list: *mut *mut c_void) -> c_int {
    let watch = !list.is_null() && TABLE.consumer().generation() != 0;
    let start_ns = if watch { now_ns() } else { 0 };
    // Copied before they are submitted: afterwards another thread may have taken the completion and freed the block.
    let mut wishes = [None; COPIED_MAX];
    if watch {
        for (i, wish) in wishes.iter_mut().enumerate().take(count.clamp(0, COPIED_MAX as c_long) as usize) {
            // SAFETY: the kernel reads the same list.
            *wish = kernel_wish(unsafe { *list.add(i) });
        }
    }
    let taken = match real::io_submit.get() {
        // SAFETY: the caller's arguments.
        Some(real) => unsafe { real(context, count, list) },
        None => {
            let before = crate::around::errno();
            // SAFETY: the caller's arguments.
            let result = unsafe { libc::syscall(libc::SYS_io_submit, context, count, list) };
            let result = if result < 0 { -crate::around::errno() } else { result as c_int };
            set_errno(before);
            result
        }
    };
    if watch && taken > 0 {
        quietly(|| {
            let end_ns = now_ns();
            for (fd, op, offset, len) in wishes.iter().take(taken as usize).flatten() {
                submitted(*fd, *op, *offset, *len, start_ns, end_ns);
            }
        });
    }
    taken
}
