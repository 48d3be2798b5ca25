//! Storage in this process's memory, for testing measurements of storage.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::access::{FileIo, Identity, Moved, Observation, Process, Target};
use impresario_base::lock::{Mutex, RwLock};

type Files = Arc<Mutex<HashMap<String, Arc<RwLock<Vec<u8>>>>>>;

/// Files in memory; every request takes a set time.
#[derive(Clone, Default)]
pub struct Memory {
    pub(crate) files: Files,
    /// Time of one request.
    pub delay: Arc<Mutex<Duration>>,
    /// What the servers report.
    pub observation: Arc<Mutex<Observation>>,
    /// Connections made.
    pub connected: Arc<AtomicU64>,
    /// Recordings started, as `None`, and traces used.
    pub recordings: Arc<Mutex<Vec<Vec<std::path::PathBuf>>>>,
    /// One read transfers this many bytes at most.
    pub read_bytes_max: Option<usize>,
    /// One write transfers this many bytes at most.
    pub write_bytes_max: Option<usize>,
    /// No connection is made any more.
    pub is_away: Arc<AtomicBool>,
    /// Who wanted one then.
    pub refused: Arc<Mutex<Vec<String>>>,
    /// Number of files as the settings were set back.
    pub files_at_set_back: Arc<AtomicUsize>,
}

struct Client {
    memory: Memory,
    requests: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
}

struct Open {
    data: Arc<RwLock<Vec<u8>>>,
    delay: Duration,
    read_bytes_max: usize,
    write_bytes_max: usize,
    requests: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
}

impl Target for Memory {
    fn connect(&self, identity: Identity) -> Result<Box<dyn Process>> {
        if self.is_away.load(Ordering::Relaxed) {
            self.refused.lock().push(identity.name);
            bail!("it is away");
        }
        self.connected.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Client { memory: self.clone(), requests: Arc::default(), bytes: Arc::default() }))
    }
    fn observe(&self) -> Result<Observation> {
        Ok(self.observation.lock().clone())
    }
}

impl Client {
    fn handle(&self, data: Arc<RwLock<Vec<u8>>>) -> Box<dyn FileIo> {
        let delay = *self.memory.delay.lock();
        Box::new(Open {
            data,
            delay,
            read_bytes_max: self.memory.read_bytes_max.unwrap_or(usize::MAX),
            write_bytes_max: self.memory.write_bytes_max.unwrap_or(usize::MAX),
            requests: self.requests.clone(),
            bytes: self.bytes.clone(),
        })
    }
}

impl Process for Client {
    fn make_dir(&self, _: &str) -> Result<bool> {
        Ok(true)
    }
    fn create(&self, path: &str) -> Result<Box<dyn FileIo>> {
        let data = self.memory.files.lock().entry(path.into()).or_default().clone();
        Ok(self.handle(data))
    }
    fn open(&self, path: &str, _: bool) -> Result<Box<dyn FileIo>> {
        let data = self.memory.files.lock().get(path).cloned().context("no such file")?;
        Ok(self.handle(data))
    }
    fn size(&self, path: &str) -> Result<Option<u64>> {
        Ok(self.memory.files.lock().get(path).map(|data| data.read().len() as u64))
    }
    fn remove(&self, path: &str) -> Result<()> {
        self.memory.files.lock().remove(path).map(|_| ()).context("no such file")
    }
    fn remove_dir(&self, _: &str) -> Result<()> {
        Ok(())
    }
    fn sent(&self) -> Moved {
        Moved { requests: self.requests.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

impl Open {
    fn count(&self, len: usize) {
        std::thread::sleep(self.delay);
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
    }
}

impl FileIo for Open {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.count(buffer.len());
        let data = self.data.read();
        let from = data.len().min(offset as usize);
        let n = buffer.len().min(data.len() - from).min(self.read_bytes_max);
        buffer[..n].copy_from_slice(&data[from..from + n]);
        Ok(n)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize> {
        let bytes = &bytes[..bytes.len().min(self.write_bytes_max)];
        self.count(bytes.len());
        let mut data = self.data.write();
        let end = offset as usize + bytes.len();
        if data.len() < end {
            data.resize(end, 0);
        }
        data[offset as usize..end].copy_from_slice(bytes);
        Ok(bytes.len())
    }
    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
