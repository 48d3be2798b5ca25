//! The image of a disk as a FUSE file: every read and write of it takes the time of the modelled disk.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, SessionACL,
    WriteFlags,
};
use impresario_device::{Io, Op};
use impresario_store::{Job, ModelledDevice};

use crate::disk_mount::{self, HOLD, REQUEST_MAX_BYTES, ROOT_NODE, errno};

/// Name of the image in its file system.
pub const IMAGE: &str = "image";
const IMAGE_NODE: u64 = 2;
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
    disk_mount::mount(image, "impresario-kernel-disk", SessionACL::Owner, at)
}

impl Image {
    fn attr(&self, node: u64) -> FileAttr {
        let (kind, perm, size) = match node {
            ROOT_NODE => (FileType::Directory, 0o700, 0),
            _ => (FileType::RegularFile, 0o600, self.size_bytes),
        };
        disk_mount::attr(node, kind, perm, size)
    }

    fn ios(&self, op: Op, offset: u64, len: u64) -> Vec<Io> {
        self.model.placement().place(op, KEY, offset, len).collect()
    }
}

impl Filesystem for Image {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it the loop device's requests would be served one at a time.
        config.add_capabilities(InitFlags::FUSE_ASYNC_DIO).map_err(|_| {
            io::Error::new(io::ErrorKind::Unsupported, "this kernel's FUSE has no asynchronous direct I/O")
        })?;
        disk_mount::set_limits(config);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some(IMAGE) => reply.entry(&HOLD, &self.attr(IMAGE_NODE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&HOLD, &self.attr(ino.0));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // The only page cache is above the block device, as with a real disk.
        disk_mount::open(reply);
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
        disk_mount::sync(&self.model, reply);
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
