//! The image of a disk as a FUSE file: every read and write of it takes the time of the modelled disk.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use impresario_device::{Io, Op};
use impresario_store::{Job, ModelledDevice};

/// Name of the image in its file system.
pub const IMAGE: &str = "image";
/// Largest request of the kernel, bytes: 256 pages, the most that FUSE takes.
const REQUEST_MAX_BYTES: u32 = 1 << 20;
/// Maximum requests in flight from the kernel; more than the elevator considers, so that its queue fills.
const BACKGROUND_MAX: u16 = 128;
/// The root folder and the image.
const ROOT_NODE: u64 = 1;
const IMAGE_NODE: u64 = 2;
/// Only the image's bytes change, so the kernel may cache attributes.
const ATTRIBUTES_HOLD: Duration = Duration::from_secs(3600);
/// The model places files by key; there is one.
const KEY: u64 = 0;

struct Image {
    bytes: Arc<File>,
    size_bytes: u64,
    model: Arc<ModelledDevice>,
}

/// Mounts the image that `bytes` holds on the folder `at`; its requests take the time of `model`. The caller needs root.
pub fn mount(bytes: File, model: Arc<ModelledDevice>, at: &Path) -> Result<BackgroundSession> {
    let size_bytes = bytes.metadata().context("looking at the image of a disk")?.len();
    let image = Image { bytes: Arc::new(bytes), size_bytes, model };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("impresario-kernel-disk".into()), MountOption::NoAtime];
    config.n_threads = Some(2);
    config.clone_fd = true;
    fuser::spawn_mount(image, at, &config)
        .with_context(|| format!("mounting a modelled disk on {} (needs root and /dev/fuse)", at.display()))
}

impl Image {
    fn attr(&self, node: u64) -> FileAttr {
        let (kind, perm, size) = match node {
            ROOT_NODE => (FileType::Directory, 0o700, 0),
            _ => (FileType::RegularFile, 0o600, self.size_bytes),
        };
        attr(node, kind, perm, size)
    }

    fn ios(&self, op: Op, offset: u64, len: u64) -> Vec<Io> {
        self.model.placement().place(op, KEY, offset, len).collect()
    }
}

pub(crate) fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

/// The attributes of a node whose times and owner nobody asks for.
pub(crate) fn attr(node: u64, kind: FileType, perm: u16, size: u64) -> FileAttr {
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

impl Filesystem for Image {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it the loop device's requests would be served one at a time.
        config.add_capabilities(InitFlags::FUSE_ASYNC_DIO).map_err(|_| {
            io::Error::new(io::ErrorKind::Unsupported, "this kernel's FUSE has no asynchronous direct I/O")
        })?;
        // An older kernel accepts less; the loop device then splits its requests.
        let _ = config.set_max_write(REQUEST_MAX_BYTES);
        // Both fail for 0 only.
        let _ = config.set_max_background(BACKGROUND_MAX);
        let _ = config.set_congestion_threshold(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some(IMAGE) => reply.entry(&ATTRIBUTES_HOLD, &self.attr(IMAGE_NODE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&ATTRIBUTES_HOLD, &self.attr(ino.0));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // No page cache here: the only one is above the block device, as with a real disk.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        len_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = u64::from(len_bytes.min(REQUEST_MAX_BYTES)).min(self.size_bytes.saturating_sub(offset));
        // Read in parallel with the modelled time, so the disk's thread only replies.
        let mut buffer = vec![0; len as usize];
        if let Err(error) = self.bytes.read_exact_at(&mut buffer, offset) {
            return reply.error(errno(&error));
        }
        let run = Box::new(move |_| reply.data(&buffer));
        self.model.submit(Job { ios: self.ios(Op::Read, offset, len), flush: false, run });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let len = bytes.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > self.size_bytes) {
            return reply.error(Errno::ENOSPC);
        }
        if let Err(error) = self.bytes.write_all_at(bytes, offset) {
            return reply.error(errno(&error));
        }
        let run = Box::new(move |_| reply.written(len as u32));
        self.model.submit(Job { ios: self.ios(Op::Write, offset, len), flush: false, run });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.model.submit(Job { ios: Vec::new(), flush: true, run: Box::new(move |_| reply.ok()) });
    }

    /// A close need not wait for anything: the kernel then stops asking.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    /// A disk does not punch holes: without this the file system above would discard blocks, which costs no modelled time.
    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        reply.error(Errno::EOPNOTSUPP);
    }
}
