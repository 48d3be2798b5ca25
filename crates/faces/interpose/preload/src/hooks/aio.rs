//! POSIX asynchronous I/O and libaio: told when submitted, with the length that was asked for. POSIX asynchronous I/O of files of
//! a cluster is done when it is submitted.

use std::ffi::{c_int, c_long, c_void};

use impresario_interpose::{Consumer, quietly};
use impresario_ring::{Op, flag, now_ns};
use libc::{aiocb, iovec, sigevent};

use crate::around::{set_errno, tell, wanted};
use crate::real::missing;
use crate::served::{self, SERVED};
use crate::{TABLE, real};

/// The C library's control block, with the fields that `aio_error` and `aio_return` look at.
#[repr(C)]
struct Block {
    fd: c_int,
    opcode: c_int,
    priority: c_int,
    buffer: *mut c_void,
    len: libc::size_t,
    event: sigevent,
    next: *mut Block,
    absolute: c_int,
    policy: c_int,
    error: c_int,
    result: libc::ssize_t,
    offset: libc::off_t,
    rest: [u8; 32],
}

const _: () = assert!(
    size_of::<Block>() == size_of::<aiocb>()
        && std::mem::offset_of!(Block, offset) == std::mem::offset_of!(aiocb, aio_offset)
        && std::mem::offset_of!(Block, event) == std::mem::offset_of!(aiocb, aio_sigevent)
);

/// Tells a program that something is done; false: in a way that is not known here.
fn notify(event: &sigevent, tell: bool) -> bool {
    match event.sigev_notify {
        libc::SIGEV_NONE => {}
        libc::SIGEV_SIGNAL if event.sigev_signo == 0 => {}
        libc::SIGEV_SIGNAL if tell => {
            // SAFETY: sends a signal to this process.
            unsafe { libc::sigqueue(libc::getpid(), event.sigev_signo, event.sigev_value) };
        }
        libc::SIGEV_SIGNAL => {}
        _ => return false,
    }
    true
}

/// Does at once what a block asks of a file of the cluster; `None`: its file is another one.
///
/// # Safety
/// As `aio_read`: null, or a block with a buffer of its length.
unsafe fn serve(block: *mut aiocb, op: Option<Op>) -> Option<c_int> {
    if block.is_null() || !SERVED.is_active() {
        return None;
    }
    // SAFETY: the caller's promise; the layout is the C library's.
    let block = unsafe { &mut *block.cast::<Block>() };
    SERVED.open_file(block.fd)?;
    if !notify(&block.event, false) {
        return Some(served::fail(libc::ENOSYS) as c_int);
    }
    let before = crate::around::errno();
    let done = match op.or(match block.opcode {
        libc::LIO_READ => Some(Op::Read),
        libc::LIO_WRITE => Some(Op::Write),
        _ => None,
    }) {
        // SAFETY: the caller's promise.
        Some(Op::Read) => unsafe { served::read(block.fd, block.buffer, block.len, Some(block.offset)) },
        // SAFETY: as above.
        Some(_) => unsafe { served::write(block.fd, block.buffer, block.len, Some(block.offset)) },
        None => Some(0),
    };
    block.result = done.unwrap_or(-1);
    block.error = if block.result < 0 { crate::around::errno() } else { 0 };
    set_errno(before);
    notify(&block.event, true);
    Some(0)
}

pub(super) fn submitted(fd: c_int, op: Op, offset: i64, len_bytes: u64, start_ns: u64, end_ns: u64) {
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
            // SAFETY: the caller's argument.
            if let Some(done) = unsafe { serve(block, Some($op)) } {
                return done;
            }
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
            // SAFETY: the caller's arguments.
            if let Some(done) = unsafe { serve_list(mode, list, count, signal, |list, count| real(mode, list, count, signal)) } {
                return done;
            }
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

/// Does those of a list at once that are of files of the cluster, and has the others done; `None`: none is.
///
/// # Safety
/// As `lio_listio`.
unsafe fn serve_list(
    mode: c_int,
    list: *const *mut aiocb,
    count: c_int,
    signal: *const sigevent,
    real: impl FnOnce(*const *mut aiocb, c_int) -> c_int,
) -> Option<c_int> {
    if list.is_null() || count <= 0 || !SERVED.is_active() {
        return None;
    }
    // SAFETY: the caller's promise.
    let blocks = unsafe { std::slice::from_raw_parts(list, count as usize) };
    // SAFETY: the same.
    let fd = |block: &*mut aiocb| unsafe { block.as_ref() }.map(|block| block.aio_fildes);
    let is_served = |block: &&*mut aiocb| fd(block).is_some_and(|fd| SERVED.open_file(fd).is_some());
    blocks.iter().find(is_served)?;
    let others: Vec<*mut aiocb> = blocks.iter().filter(|block| !is_served(block)).copied().collect();
    let mut failed = false;
    for block in blocks.iter().filter(is_served) {
        // SAFETY: the same.
        let done = unsafe { serve(*block, None) };
        // SAFETY: the same.
        failed |= done != Some(0) || unsafe { (*block.cast::<Block>()).error } != 0;
    }
    if !others.is_empty() {
        let result = real(others.as_ptr(), others.len() as c_int);
        if result != 0 {
            return Some(result);
        }
    // SAFETY: the same.
    } else if let (libc::LIO_NOWAIT, Some(event)) = (mode, unsafe { signal.as_ref() }) {
        notify(event, true);
    }
    Some(if failed && mode == libc::LIO_WAIT { served::fail(libc::EIO) as c_int } else { 0 })
}

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
