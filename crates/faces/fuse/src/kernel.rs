//! What is agreed with the kernel when the file system is mounted.

use fuser::{InitFlags, KernelConfig};

use crate::MountOptions;

/// Requests that the kernel may have under way on its own account (read-ahead, asynchronous direct I/O).
const BACKGROUND_MAX: u16 = 64;

/// What we ask of the kernel; it grants what it knows.
const WISHES: [(InitFlags, &str); 9] = [
    (InitFlags::FUSE_ATOMIC_O_TRUNC, "an open that truncates is one request"),
    (InitFlags::FUSE_ASYNC_DIO, "asynchronous direct I/O runs in parallel"),
    (InitFlags::FUSE_AUTO_INVAL_DATA, "cached pages go when size or time changed on the server"),
    (InitFlags::FUSE_DO_READDIRPLUS, "names come with their attributes"),
    (InitFlags::FUSE_READDIRPLUS_AUTO, "but only where a program looks at them"),
    (InitFlags::FUSE_PARALLEL_DIROPS, "look-ups in one directory run in parallel"),
    (InitFlags::FUSE_CACHE_SYMLINKS, "what a symbolic link says is cached"),
    // Without it the kernel asks for an extended attribute before every single write.
    (InitFlags::FUSE_HANDLE_KILLPRIV_V2, "we clear set-id bits on write"),
    (InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP, "files open for direct I/O can be mapped"),
];

/// Settles the connection. The write-back cache is never asked for: a reply to a write means that the bytes
/// are with the data servers.
pub(crate) fn agree(options: &MountOptions, config: &mut KernelConfig) {
    for (wish, meaning) in WISHES {
        if config.add_capabilities(wish).is_err() {
            tracing::debug!(?wish, meaning, "not offered by this kernel");
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
}
