//! What the FUSE file systems over a modelled disk share: how they are mounted and what they answer alike.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, KernelConfig,
    MountOption, ReplyEmpty, ReplyOpen, SessionACL,
};
use impresario_store::{Job, ModelledDevice};

/// Largest request of the kernel, bytes: 256 pages, the most that FUSE takes.
pub const REQUEST_MAX_BYTES: u32 = 1 << 20;
/// Maximum requests in flight from the kernel; more than the elevator considers, so that its queue fills.
const BACKGROUND_MAX: u16 = 128;
pub const ROOT_NODE: u64 = 1;
/// The kernel may keep names and attributes so long: only bytes cost the model anything.
pub const HOLD: Duration = Duration::from_secs(3600);

/// Unmounts what is mounted at `at`. What is still in use is detached: a process that has just been forked may have a file there
/// open until it executes its program, and another mount name space keeps what was mounted when it was made.
pub fn unmount(session: BackgroundSession, at: &Path) {
    if session.umount_and_join().is_err()
        && let Err(error) = rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH)
    {
        tracing::warn!(%error, at = %at.display(), "unmounting a modelled disk");
    }
}

/// Mounts a file system on the folder `at`. The caller needs root.
pub fn mount(disk: impl Filesystem, name: &str, acl: SessionACL, at: &Path) -> Result<BackgroundSession> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName(name.into()), MountOption::NoAtime];
    config.acl = acl;
    config.n_threads = Some(2);
    config.clone_fd = true;
    fuser::spawn_mount(disk, at, &config)
        .with_context(|| format!("mounting a modelled disk on {} (needs root and /dev/fuse)", at.display()))
}

/// Has the kernel send large requests, and many at once.
pub fn set_limits(config: &mut KernelConfig) {
    // An older kernel accepts less, and splits.
    let _ = config.set_max_write(REQUEST_MAX_BYTES);
    // Both fail for 0 only.
    let _ = config.set_max_background(BACKGROUND_MAX);
    let _ = config.set_congestion_threshold(BACKGROUND_MAX);
}

/// Opens without a page cache.
pub fn open(reply: ReplyOpen) {
    reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
}

/// Answers when the disk's write cache is empty.
pub fn sync(model: &ModelledDevice, reply: ReplyEmpty) {
    model.submit(Job { ios: Vec::new(), flush: true, run: Box::new(move |_| reply.ok()) });
}

pub fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

/// The attributes of a node whose times and owner nobody asks for.
pub fn attr(node: u64, kind: FileType, perm: u16, size: u64) -> FileAttr {
    let then = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(node),
        size,
        blocks: size.div_ceil(512),
        atime: then,
        mtime: then,
        ctime: then,
        crtime: then,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
