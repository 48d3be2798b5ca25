//! A folder of this machine as something that loads run on: a mount of ours, or any other file system.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use anyhow::{Context, Result, ensure};

use crate::access::{FileIo, Identity, Moved, Process, Target};

/// A folder that exists.
pub struct Folder(PathBuf);

impl Folder {
    /// Refused unless it is a folder.
    pub fn new(path: &Path) -> Result<Folder> {
        ensure!(path.is_dir(), "{} is not a directory", path.display());
        Ok(Folder(path.into()))
    }
}

impl Target for Folder {
    fn connect(&self, _: Identity) -> Result<Box<dyn Process>> {
        Ok(Box::new(Client { folder: self.0.clone(), sent: Arc::default() }))
    }
}

struct Client {
    folder: PathBuf,
    sent: Arc<(AtomicU64, AtomicU64)>,
}

impl Client {
    fn handle(&self, path: &str, options: &OpenOptions) -> Result<Box<dyn FileIo>> {
        let path = self.folder.join(path);
        let file = options.open(&path).with_context(|| path.display().to_string())?;
        Ok(Box::new(Open { file, sent: self.sent.clone() }))
    }
}

impl Process for Client {
    fn make_dir(&self, path: &str) -> Result<bool> {
        let path = self.folder.join(path);
        match DirBuilder::new().mode(0o755).create(&path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(false),
            Err(e) => Err(e).with_context(|| path.display().to_string()),
        }
    }

    fn create(&self, path: &str) -> Result<Box<dyn FileIo>> {
        self.handle(path, OpenOptions::new().read(true).write(true).create(true).truncate(false))
    }

    fn open(&self, path: &str, write: bool) -> Result<Box<dyn FileIo>> {
        self.handle(path, OpenOptions::new().read(true).write(write))
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        match std::fs::metadata(self.folder.join(path)) {
            Ok(attributes) => Ok(Some(attributes.len())),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| path.to_string()),
        }
    }

    fn remove(&self, path: &str) -> Result<()> {
        Ok(std::fs::remove_file(self.folder.join(path))?)
    }

    fn remove_dir(&self, path: &str) -> Result<()> {
        Ok(std::fs::remove_dir(self.folder.join(path))?)
    }

    fn sent(&self) -> Moved {
        Moved { requests: self.sent.0.load(Relaxed), bytes: self.sent.1.load(Relaxed) }
    }
}

struct Open {
    file: File,
    sent: Arc<(AtomicU64, AtomicU64)>,
}

impl Open {
    fn count(&self, bytes: usize) {
        self.sent.0.fetch_add(1, Relaxed);
        self.sent.1.fetch_add(bytes as u64, Relaxed);
    }
}

impl FileIo for Open {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        self.count(done);
        Ok(done)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize> {
        self.file.write_all_at(data, offset)?;
        self.count(data.len());
        Ok(data.len())
    }

    fn sync(&self) -> Result<()> {
        Ok(self.file.sync_all()?)
    }

    fn forget(&self) {
        // SAFETY: posix_fadvise takes a descriptor that is open and numbers. It only advises: what comes of it does not matter.
        unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
}
