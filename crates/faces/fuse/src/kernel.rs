//! What the mount negotiates with the kernel.

use fuser::{InitFlags, KernelConfig};

use crate::MountOptions;

/// Largest number of requests that the kernel may have in flight on its own account (read-ahead, asynchronous direct
/// I/O).
const BACKGROUND_MAX: u16 = 64;

/// Requested capabilities; the kernel grants those it knows.
const REQUESTED: [(InitFlags, &str); 10] = [
    (InitFlags::FUSE_ATOMIC_O_TRUNC, "an open that truncates is one request"),
    (InitFlags::FUSE_ASYNC_DIO, "asynchronous direct I/O runs in parallel"),
    (InitFlags::FUSE_AUTO_INVAL_DATA, "cached pages are dropped when size or time changed on the server"),
    (InitFlags::FUSE_DO_READDIRPLUS, "directory entries come with their attributes"),
    (InitFlags::FUSE_READDIRPLUS_AUTO, "but only where a program uses them"),
    (InitFlags::FUSE_PARALLEL_DIROPS, "look-ups in one directory run in parallel"),
    (InitFlags::FUSE_POSIX_ACL, "access control lists count when permissions are checked"),
    // A default access control list takes its place.
    (InitFlags::FUSE_DONT_MASK, "the servers take the umask off"),
    // Without it the kernel asks for an extended attribute before every single write.
    (InitFlags::FUSE_HANDLE_KILLPRIV_V2, "we clear set-id bits on write"),
    (InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP, "files open for direct I/O can be mapped"),
];

/// Configures the connection. Never asks for the write-back cache: a reply to a write means that the data servers hold
/// the bytes. Returns whether files open for direct I/O can be mapped.
pub(crate) fn agree(options: &MountOptions, locks: bool, config: &mut KernelConfig) -> bool {
    // Requests do not say which kind of lock is meant: `flock` locks the whole file, as on NFS.
    if locks && config.add_capabilities(InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS).is_err() {
        tracing::warn!("this kernel keeps file locks to itself: they hold among the programs of this mount only");
    }
    for (flag, meaning) in REQUESTED {
        if config.add_capabilities(flag).is_err() {
            tracing::debug!(?flag, meaning, "not supported by this kernel");
        }
    }
    let set = |name: &str, result: Result<u32, u32>| {
        if let Err(limit) = result {
            tracing::debug!(name, limit, "limited by this kernel");
        }
    };
    set("largest write", config.set_max_write(options.request_bytes()));
    if let Err(limit) = config.set_max_readahead(options.read_ahead_bytes.max(4096)) {
        set("read-ahead", config.set_max_readahead(limit));
    }
    // Both fail for 0 only.
    let _ = config.set_max_background(BACKGROUND_MAX);
    let _ = config.set_congestion_threshold(BACKGROUND_MAX * 3 / 4);
    config.capabilities().contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP)
}
