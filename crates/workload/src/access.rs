//! The storage interface of a benchmark process, so that every kind of storage is measured alike.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;

use crate::content::Source;
use impresario_base::lock::Mutex;
use impresario_base::units::show_bytes;

/// Identifies a connecting client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Number of the application, from 1; 0: none (preparing, verifying).
    pub job: u64,
    /// Index of the I/O node to use, of [`Target::nodes`]; `None`: any.
    pub node: Option<usize>,
    /// The client's largest request on the wire, bytes.
    pub wire_max_bytes: Option<u32>,
    /// For logs.
    pub name: String,
}

/// Storage that can be measured.
pub trait Target: Sync {
    /// A new client with its own connections, as a separate process would have.
    fn connect(&self, identity: Identity) -> Result<Box<dyn Process>>;

    /// Number of I/O nodes in front; 0: none.
    fn nodes(&self) -> usize {
        0
    }

    /// Process numbers of the servers, if known; none if they run in this process.
    fn pids(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Clears the disks' caches of data from an earlier run. Called before every timed part.
    fn cool(&self) -> Result<()> {
        Ok(())
    }

    /// Resets the servers' counters.
    fn reset(&self) -> Result<()> {
        Ok(())
    }

    /// The servers' counters since then.
    fn observe(&self) -> Result<Observation> {
        Ok(Observation::default())
    }
}

/// A client's view of the storage.
pub trait Process: Send + Sync {
    /// Makes a directory; false, and no error, when it exists.
    fn make_dir(&self, path: &str) -> Result<bool>;
    /// Makes a file, or opens it when it exists.
    fn create(&self, path: &str) -> Result<Box<dyn FileIo>>;
    /// Opens an existing file.
    fn open(&self, path: &str, write: bool) -> Result<Box<dyn FileIo>>;
    /// Size of a file by its attributes, bytes; `None`: there is no such file.
    fn size(&self, path: &str) -> Result<Option<u64>>;
    /// Removes a file.
    fn remove(&self, path: &str) -> Result<()>;
    /// Removes an empty directory.
    fn remove_dir(&self, path: &str) -> Result<()>;
    /// Data requests that have left this client, and their bytes.
    fn sent(&self) -> Moved;
}

/// An open file.
pub trait FileIo: Send + Sync {
    /// Reads; short only at the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize>;
    /// Writes all of it.
    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize>;
    /// Makes it durable.
    fn sync(&self) -> Result<()>;
    /// Advises this machine to drop its cached pages of the file, so that reads reach the storage.
    fn forget(&self) {}
    /// The placement of its data, if the storage reports it.
    fn place(&self) -> Option<FilePlace> {
        None
    }
}

/// Determines a file's placement on servers and disks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct FilePlace {
    /// Stable key of the file.
    pub key: u64,
    /// The data server that its first stripe lies on.
    pub base: u16,
}

/// Requests and their bytes at some point of the path.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize, serde::Deserialize)]
pub struct Moved {
    /// Requests.
    pub requests: u64,
    /// Bytes in them.
    pub bytes: u64,
}

impl Moved {
    /// Bytes per request; `None` without requests.
    pub fn mean_bytes(&self) -> Option<f64> {
        (self.requests > 0).then(|| self.bytes as f64 / self.requests as f64)
    }

    /// The sum.
    pub fn plus(self, other: Moved) -> Moved {
        Moved { requests: self.requests + other.requests, bytes: self.bytes + other.bytes }
    }

    /// The mean of runs.
    pub fn mean(runs: &[Moved]) -> Moved {
        let sum = runs.iter().fold(Moved::default(), |sum, run| sum.plus(*run));
        let n = runs.len().max(1) as u64;
        Moved { requests: sum.requests.div_ceil(n), bytes: sum.bytes.div_ceil(n) }
    }
}

/// How many, and how long they are on average.
impl std::fmt::Display for Moved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.mean_bytes() {
            Some(bytes) => f.pad(&format!("{} × {}", self.requests, show_bytes(bytes))),
            None => f.pad("–"),
        }
    }
}

/// What the servers of a cluster counted during a run.
#[derive(Clone, PartialEq, Default, Debug, serde::Serialize, serde::Deserialize)]
pub struct Observation {
    /// Requests forwarded by I/O nodes; zero without I/O nodes.
    pub leaving_io_nodes: Moved,
    /// Requests that reached the data servers' schedulers.
    pub arriving_at_servers: Moved,
    /// Batches that reached the disks (or the folders).
    pub at_disk: Moved,
    /// The modelled devices, if there are any.
    pub device: Option<DeviceObservation>,
    /// The data servers' memory, where it is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryObservation>,
    /// Each server's own report, by name.
    #[serde(skip)]
    pub status: Vec<(String, serde_json::Value)>,
}

/// How well the modelled devices kept to their clock.
#[derive(Clone, Copy, PartialEq, Default, Debug, serde::Serialize, serde::Deserialize)]
pub struct DeviceObservation {
    /// Requests served.
    pub requests: u64,
    /// Mean modelled service time, microseconds.
    pub mean_service_us: f64,
    /// The largest 99th percentile of the lateness over the devices, microseconds.
    pub lateness_p99_us: f64,
}

/// Data servers whose memory is limited.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize, serde::Deserialize)]
pub struct MemoryObservation {
    /// What each may use with its page cache, bytes.
    pub limit_bytes: u64,
    /// How often memory was reclaimed because one of them had as much.
    pub reclaims: u64,
}

/// A fault injected into the writer to show that verification finds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A write is acknowledged but not done.
    Drop,
    /// Two blocks are written in each other's place.
    Swap,
    /// A block is written with the previous generation's content.
    Stale,
}

impl std::str::FromStr for Fault {
    type Err = String;
    fn from_str(text: &str) -> Result<Fault, String> {
        match text {
            "drop" => Ok(Fault::Drop),
            "swap" => Ok(Fault::Swap),
            "stale" => Ok(Fault::Stale),
            _ => Err(format!("there is no fault {text:?}: drop, swap or stale")),
        }
    }
}

/// A file whose second write fails in the given way.
pub struct Faulty {
    file: Box<dyn FileIo>,
    fault: Fault,
    source: Source,
    writes: AtomicU64,
    held: Mutex<Option<(u64, Vec<u8>)>>,
}

impl Faulty {
    /// Wraps a file to which `source` is written.
    pub fn new(file: Box<dyn FileIo>, fault: Fault, source: Source) -> Faulty {
        Faulty { file, fault, source, writes: AtomicU64::new(0), held: Mutex::new(None) }
    }
}

impl FileIo for Faulty {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.file.read_at(buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize> {
        let nth = self.writes.fetch_add(1, Ordering::Relaxed);
        match (self.fault, nth) {
            (Fault::Drop, 1) => Ok(data.len()),
            (Fault::Stale, 1) => {
                let mut old = vec![0; data.len()];
                let generation = self.source.generation.wrapping_sub(1);
                Source { generation, ..self.source }.fill(offset, &mut old);
                self.file.write_at(&old, offset)
            }
            (Fault::Swap, 1) => {
                *self.held.lock() = Some((offset, data.to_vec()));
                Ok(data.len())
            }
            (Fault::Swap, 2) => {
                let held = self.held.lock().take();
                if let Some((other_offset, other)) = held {
                    self.file.write_at(&other, offset)?;
                    self.file.write_at(data, other_offset)?;
                }
                Ok(data.len())
            }
            _ => self.file.write_at(data, offset),
        }
    }

    fn sync(&self) -> Result<()> {
        self.file.sync()
    }
}
