//! A folder on a bare modelled disk: every read and write takes the time of the disk, in order of arrival, without a page
//! cache, read-ahead or scheduler of the kernel above it. For servers that export folders: the papers' world.
//!
//! It has the files that lie in its folder in memory; no names can be made, changed or removed through it.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result};
use fuser::{
    AccessFlags, BackgroundSession, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, ReplyXattr, Request, SessionACL, TimeOrNow, WriteFlags,
};
use impresario_base::lock::Mutex;
use impresario_device::{DeviceParams, Io, Op, Order};
use impresario_store::{Job, ModelledDevice};
use tempfile::TempDir;

use crate::access::{DeviceObservation, Moved, Observation};
use crate::disk_mount::{self, HOLD, REQUEST_MAX_BYTES, ROOT_NODE, errno};

/// A mounted folder; dropping it unmounts and removes everything.
pub struct BareDisk {
    // Dropped in this order.
    session: Option<BackgroundSession>,
    model: Arc<ModelledDevice>,
    folder: TempDir,
}

impl BareDisk {
    /// Makes one below `parent`, which should lie in memory. Needs root and `/dev/fuse`.
    pub fn new(parent: &Path, params: &DeviceParams) -> Result<BareDisk> {
        let folder = tempfile::Builder::new().prefix("impresario-bare-disk-").tempdir_in(parent)?;
        let (bytes, mount) = (folder.path().join("bytes"), folder.path().join("disk"));
        fs::create_dir(&bytes)?;
        fs::create_dir(&mount)?;
        let model = ModelledDevice::start(&DeviceParams { order: Order::Arrival, ..params.clone() })
            .context("starting the model of a disk")?;
        let disk = Disk { bytes, model: model.clone(), files: Mutex::default() };
        // The server acts as the users of its clients.
        let session = disk_mount::mount(disk, "impresario-bare-disk", SessionACL::All, &mount)?;
        Ok(BareDisk { session: Some(session), model, folder })
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// The folder of its files, where reads and writes take no modelled time.
    pub fn bytes(&self) -> PathBuf {
        self.folder.path().join("bytes")
    }

    /// Starts its counts anew.
    pub fn reset(&self) {
        self.model.reset();
    }

    /// What was at it since.
    pub fn observe(&self) -> Observation {
        let status = self.model.status();
        Observation {
            at_disk: Moved { requests: status.transfers, bytes: status.read_bytes + status.write_bytes },
            device: Some(DeviceObservation {
                requests: status.transfers,
                mean_service_us: status.service_mean_ms * 1e3,
                lateness_p99_us: status.lateness.p99_us,
            }),
            ..Observation::default()
        }
    }
}

impl Drop for BareDisk {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            disk_mount::unmount(session, &self.path());
        }
    }
}

struct Disk {
    bytes: PathBuf,
    model: Arc<ModelledDevice>,
    /// By inode number, which is that of the file in memory.
    files: Mutex<HashMap<u64, Arc<File>>>,
}

fn attr(node: u64, meta: &Metadata) -> FileAttr {
    match meta.is_dir() {
        true => disk_mount::attr(node, FileType::Directory, 0o755, 0),
        false => disk_mount::attr(node, FileType::RegularFile, 0o666, meta.len()),
    }
}

impl Disk {
    fn file(&self, node: u64) -> io::Result<Arc<File>> {
        let file = self.files.lock().get(&node).cloned();
        file.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }

    fn attr_of(&self, node: u64) -> io::Result<FileAttr> {
        let meta = if node == ROOT_NODE { fs::metadata(&self.bytes)? } else { self.file(node)?.metadata()? };
        Ok(attr(node, &meta))
    }

    fn find(&self, parent: u64, name: &OsStr) -> io::Result<FileAttr> {
        // The kernel asks for "." of a node that it has forgotten and a file handle names.
        if name == "." {
            return self.attr_of(parent);
        }
        if name == ".." {
            return self.attr_of(ROOT_NODE);
        }
        let file = File::options().read(true).write(true).open(self.bytes.join(name))?;
        let meta = file.metadata()?;
        self.files.lock().entry(meta.ino()).or_insert_with(|| Arc::new(file));
        Ok(attr(meta.ino(), &meta))
    }

    fn submit(&self, op: Op, node: u64, (offset, len): (u64, u64), run: impl FnOnce() + Send + 'static) {
        let ios: Vec<Io> = self.model.placement().place(op, node, offset, len).collect();
        self.model.submit(Job { ios, flush: false, run: Box::new(move |_| run()) });
    }
}

impl Filesystem for Disk {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Servers keep file handles (open_by_handle_at).
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_EXPORT_SUPPORT);
        disk_mount::set_limits(config);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.find(parent.0, name) {
            Ok(attr) => reply.entry(&HOLD, &attr, Generation(0)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr_of(ino.0) {
            Ok(attr) => reply.attr(&HOLD, &attr),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Times and modes are not kept.
    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let cut = size.map_or(Ok(()), |size| self.file(ino.0)?.set_len(size));
        match cut.and_then(|()| self.attr_of(ino.0)) {
            Ok(attr) => reply.attr(&HOLD, &attr),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.ok();
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn setxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        disk_mount::open(reply);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        len_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buffer = vec![0; len_bytes.min(REQUEST_MAX_BYTES) as usize];
        // Read in parallel with the modelled time, so the disk's thread only replies.
        match self.file(ino.0).and_then(|file| read_full(&file, &mut buffer, offset)) {
            Ok(0) => reply.data(&[]),
            Ok(got) => {
                buffer.truncate(got);
                self.submit(Op::Read, ino.0, (offset, got as u64), move || reply.data(&buffer));
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let len = bytes.len();
        match self.file(ino.0).and_then(|file| file.write_all_at(bytes, offset)) {
            Ok(()) => self.submit(Op::Write, ino.0, (offset, len as u64), move || reply.written(len as u32)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        disk_mount::sync(&self.model, reply);
    }

    /// A close need not wait for anything: the kernel then stops asking.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
}

/// Reads until the buffer is full or the file ends.
fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read_at(&mut buffer[got..], offset + got as u64)? {
            0 => break,
            more => got += more,
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_take_the_time_of_the_disk() {
        if !["root", "fuse"].into_iter().all(impresario_testing::require) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let disk = BareDisk::new(dir.path(), &DeviceParams::default()).unwrap();
        let content: Vec<u8> = (0..300_000u32).map(|i| (i ^ i >> 8) as u8).collect();
        fs::write(disk.bytes().join("file"), &content).unwrap();
        let path = disk.path().join("file");
        for _ in 0..2 {
            disk.reset();
            assert!(fs::read(&path).unwrap() == content);
            // Nothing is cached: every byte comes from the disk each time.
            assert_eq!(disk.observe().at_disk.bytes, 300_000);
            assert!(disk.observe().device.is_some_and(|device| device.mean_service_us > 100.0));
        }
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[9; 5000], 70_000).unwrap();
        file.sync_all().unwrap();
        assert_eq!(fs::read(disk.bytes().join("file")).unwrap()[70_000..75_000], [9; 5000]);
        assert!(fs::read(disk.path().join("another")).is_err());
        let mount = disk.path();
        drop((file, disk));
        assert!(!fs::read_to_string("/proc/mounts").unwrap().contains(mount.to_str().unwrap()));
    }
}
