//! What a client of a peer's protocol can do, as storage that the benchmark measures.

use std::sync::Arc;

use anyhow::Result;
use impresario_base::lock::Mutex;
use impresario_workload::access::{FileIo, Moved, Process};

use super::connection::unless_missing;

/// A connection to a server. Paths are relative to what it exports.
pub trait Session: Send + 'static {
    /// An open file.
    type File: Send + Sync + 'static;

    /// Makes a folder; false when it is there.
    fn make_dir(&mut self, path: &str) -> Result<bool>;
    /// Makes a file, or opens it.
    fn create(&mut self, path: &str) -> Result<Self::File>;
    /// Opens a file.
    fn open(&mut self, path: &str, write: bool) -> Result<Self::File>;
    /// Reads; short only at the end of the file.
    fn read(&mut self, file: &Self::File, buffer: &mut [u8], offset: u64) -> Result<usize>;
    /// Writes all of it.
    fn write(&mut self, file: &Self::File, data: &[u8], offset: u64) -> Result<()>;
    /// Makes a file durable.
    fn sync(&mut self, file: &Self::File) -> Result<()>;
    /// Closes a file.
    fn close(&mut self, file: &Self::File) -> Result<()>;
    /// The size of a file, bytes.
    fn size(&mut self, path: &str) -> Result<u64>;
    /// Removes a file.
    fn remove(&mut self, path: &str) -> Result<()>;
    /// Removes a folder.
    fn remove_dir(&mut self, path: &str) -> Result<()>;
}

/// A session as a process of the benchmark, which has one request outstanding.
pub fn process(session: impl Session) -> Box<dyn Process> {
    Box::new(Client(Arc::new(Shared { session: Mutex::new(session), sent: Mutex::default() })))
}

struct Shared<S> {
    session: Mutex<S>,
    sent: Mutex<Moved>,
}

struct Client<S>(Arc<Shared<S>>);

struct Open<S: Session> {
    shared: Arc<Shared<S>>,
    file: S::File,
}

impl<S: Session> Client<S> {
    fn opened(&self, file: S::File) -> Box<dyn FileIo> {
        Box::new(Open { shared: self.0.clone(), file })
    }
}

impl<S: Session> Process for Client<S> {
    fn make_dir(&self, path: &str) -> Result<bool> {
        self.0.session.lock().make_dir(path)
    }

    fn create(&self, path: &str) -> Result<Box<dyn FileIo>> {
        let file = self.0.session.lock().create(path)?;
        Ok(self.opened(file))
    }

    fn open(&self, path: &str, write: bool) -> Result<Box<dyn FileIo>> {
        let file = self.0.session.lock().open(path, write)?;
        Ok(self.opened(file))
    }

    fn size(&self, path: &str) -> Result<Option<u64>> {
        unless_missing(self.0.session.lock().size(path))
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.0.session.lock().remove(path)
    }

    fn remove_dir(&self, path: &str) -> Result<()> {
        self.0.session.lock().remove_dir(path)
    }

    fn sent(&self) -> Moved {
        *self.0.sent.lock()
    }
}

impl<S: Session> Open<S> {
    fn count(&self, bytes: usize) {
        let mut sent = self.shared.sent.lock();
        *sent = sent.plus(Moved { requests: 1, bytes: bytes as u64 });
    }
}

impl<S: Session> FileIo for Open<S> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.count(buffer.len());
        self.shared.session.lock().read(&self.file, buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize> {
        self.count(data.len());
        self.shared.session.lock().write(&self.file, data, offset)?;
        Ok(data.len())
    }

    fn sync(&self) -> Result<()> {
        self.shared.session.lock().sync(&self.file)
    }
}

impl<S: Session> Drop for Open<S> {
    fn drop(&mut self) {
        // Where this fails, the next call does, too.
        _ = self.shared.session.lock().close(&self.file);
    }
}
