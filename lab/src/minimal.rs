//! The yardstick of the data path: a minimal thread-per-connection TCP server doing plain pread and pwrite.
//!
//! It has its own fixed binary protocol and no scheduler, metadata or retries: the minimum of a network file server.
//! Its client stripes over several such servers as ours does, and is measured by the same runner with the same
//! verification.
//!
//! Request: op u8, 3 bytes 0, file u32, offset u64, len u32, 4 bytes 0 (little-endian), then the bytes of a
//! write or the name of an open. Reply: errno u32, len u32, then the bytes of a read.

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use impresario_base::lock::{Mutex, MutexGuard, RwLock};
use impresario_base::unpaced;
use impresario_layout::Layout;

use impresario_workload::access::{FileIo, Identity, Moved, Process, Target};

const OPEN: u8 = 1;
const READ: u8 = 2;
const WRITE: u8 = 3;
const SYNC: u8 = 4;
const REMOVE: u8 = 5;
const REQUEST_BYTES: usize = 24;
const REPLY_BYTES: usize = 8;
/// Maximum size accepted from a peer.
const LEN_MAX: usize = 64 << 20;
/// Maximum files that a server opens in its lifetime.
const FILES_MAX: usize = 65_536;
const PATIENCE: Duration = Duration::from_secs(60);

fn request(op: u8, file: u32, offset: u64, len: u32) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[0] = op;
    bytes[4..8].copy_from_slice(&file.to_le_bytes());
    bytes[8..16].copy_from_slice(&offset.to_le_bytes());
    bytes[16..20].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |n, b| n << 8 | u32::from(*b))
}

/// State shared by the connections of a server.
struct Folder {
    dir: PathBuf,
    open: RwLock<Opened>,
}

/// Files by number, and their numbers by name.
#[derive(Default)]
struct Opened {
    numbers: HashMap<Vec<u8>, u32>,
    files: Vec<Arc<File>>,
}

impl Folder {
    /// The number of a file by its name; creates it if missing.
    fn open(&self, name: &[u8]) -> std::io::Result<u32> {
        let mut open = self.open.write();
        if let Some(number) = open.numbers.get(name) {
            return Ok(*number);
        }
        if open.files.len() >= FILES_MAX {
            return Err(std::io::Error::from_raw_os_error(libc::ENFILE));
        }
        let file = File::options().read(true).write(true).create(true).truncate(false).open(self.path(name))?;
        let number = open.files.len() as u32;
        open.files.push(Arc::new(file));
        open.numbers.insert(name.to_vec(), number);
        Ok(number)
    }

    fn file(&self, number: u32) -> std::io::Result<Arc<File>> {
        let open = self.open.read();
        open.files.get(number as usize).cloned().ok_or_else(|| std::io::Error::from_raw_os_error(libc::EBADF))
    }

    /// Removes a name and its file; open files stay usable.
    fn remove(&self, name: &[u8]) -> std::io::Result<()> {
        self.open.write().numbers.remove(name);
        std::fs::remove_file(self.path(name))
    }

    /// Any name is a file of this folder and of no other.
    fn path(&self, name: &[u8]) -> PathBuf {
        self.dir.join(name.iter().map(|b| format!("{b:02x}")).collect::<String>())
    }
}

/// Serves connections forever, each on its own thread.
pub fn serve(listener: &TcpListener, dir: &Path) -> Result<()> {
    let folder = Arc::new(Folder { dir: dir.to_owned(), open: RwLock::default() });
    for stream in listener.incoming() {
        let stream = stream.context("accepting a connection")?;
        let folder = folder.clone();
        std::thread::Builder::new()
            .name("connection".into())
            // An error on a connection is the client's problem: it sees the same error.
            .spawn(move || _ = serve_connection(stream, &folder))
            .context("starting a connection's thread")?;
    }
    Ok(())
}

fn serve_connection(mut stream: TcpStream, folder: &Folder) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::new();
    let mut head = [0; REQUEST_BYTES];
    // Looking up the file for every request would cost the yardstick a lock.
    let mut known: Vec<Option<Arc<File>>> = Vec::new();
    loop {
        stream.read_exact(&mut head)?;
        let (op, number, len) = (head[0], u32_at(&head, 4), u32_at(&head, 16) as usize);
        let offset = u64::from(u32_at(&head, 8)) | u64::from(u32_at(&head, 12)) << 32;
        if len > LEN_MAX {
            return stream.shutdown(Shutdown::Both);
        }
        if buffer.len() < REPLY_BYTES + len {
            buffer.resize(REPLY_BYTES + len, 0);
        }
        let body = &mut buffer[REPLY_BYTES..REPLY_BYTES + len];
        if matches!(op, OPEN | WRITE | REMOVE) {
            stream.read_exact(body)?;
        }
        let mut file = || -> std::io::Result<Arc<File>> {
            let index = number as usize;
            match known.get(index) {
                Some(Some(file)) => Ok(file.clone()),
                _ => {
                    let file = folder.file(number)?;
                    known.resize(known.len().max(index + 1), None);
                    known[index] = Some(file.clone());
                    Ok(file)
                }
            }
        };
        let outcome = match op {
            READ => file().and_then(|f| read_full(&f, body, offset)).map(|n| (n as u32, n)),
            WRITE => file().and_then(|f| f.write_all_at(body, offset)).map(|()| (len as u32, 0)),
            OPEN => folder.open(body).map(|n| (n, 0)),
            SYNC => file().and_then(|f| f.sync_all()).map(|()| (0, 0)),
            REMOVE => folder.remove(body).map(|()| (0, 0)),
            _ => Err(std::io::Error::from_raw_os_error(libc::EPROTO)),
        };
        let (errno, value, payload) = match outcome {
            Ok((value, payload)) => (0, value, payload),
            Err(e) => (e.raw_os_error().unwrap_or(libc::EIO) as u32, 0, 0),
        };
        buffer[..4].copy_from_slice(&errno.to_le_bytes());
        buffer[4..REPLY_BYTES].copy_from_slice(&value.to_le_bytes());
        stream.write_all(&buffer[..REPLY_BYTES + payload])?;
    }
}

fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64)? {
            0 => break,
            n => done += n,
        }
    }
    Ok(done)
}

/// One or several minimal servers.
pub struct Minimal {
    /// Addresses, in the order of striping.
    pub servers: Vec<SocketAddr>,
    /// Their processes, unless they are threads of this one.
    pub pids: Vec<u32>,
}

impl Target for Minimal {
    fn pids(&self) -> Vec<u32> {
        self.pids.clone()
    }

    fn connect(&self, _: Identity) -> Result<Box<dyn Process>> {
        let streams = self.servers.iter().map(|address| {
            let stream = unpaced::connect(address, PATIENCE)
                .with_context(|| format!("connecting to the minimal server at {address}"))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        });
        let streams = streams.collect::<Result<Vec<_>>>()?;
        let layout = Layout::over_all(streams.len() as u16)?;
        let sent = Default::default();
        Ok(Box::new(MinimalClient(Arc::new(Connections { streams: Mutex::new(streams), layout, sent }))))
    }
}

struct Connections {
    /// One per server. One lock for all: a process of the benchmark has one request outstanding.
    streams: Mutex<Vec<TcpStream>>,
    layout: Layout,
    sent: (AtomicU64, AtomicU64),
}

struct MinimalClient(Arc<Connections>);

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.streams.lock()
    }

    /// One small request to every server; their values.
    fn everywhere(&self, op: u8, files: Option<&[u32]>, name: &[u8]) -> Result<Vec<u32>> {
        let mut values = Vec::new();
        for (index, stream) in self.lock().iter_mut().enumerate() {
            let file = files.and_then(|f| f.get(index)).copied().unwrap_or(0);
            stream.write_all(&request(op, file, 0, name.len() as u32))?;
            stream.write_all(name)?;
            values.push(reply(stream)?);
        }
        Ok(values)
    }
}

/// Reads a reply's head: the value, or the server's error.
fn reply(stream: &mut TcpStream) -> Result<u32> {
    let mut head = [0; REPLY_BYTES];
    stream.read_exact(&mut head).context("the minimal server did not answer")?;
    match u32_at(&head, 0) {
        0 => Ok(u32_at(&head, 4)),
        errno => Err(std::io::Error::from_raw_os_error(errno as i32).into()),
    }
}

impl Process for MinimalClient {
    fn make_dir(&self, _: &str) -> Result<bool> {
        Ok(true)
    }

    fn create(&self, path: &str) -> Result<Box<dyn FileIo>> {
        let numbers = self.0.everywhere(OPEN, None, path.as_bytes())?;
        Ok(Box::new(MinimalFile { connections: self.0.clone(), numbers }))
    }

    fn open(&self, path: &str, _write: bool) -> Result<Box<dyn FileIo>> {
        self.create(path)
    }

    fn size(&self, _: &str) -> Result<Option<u64>> {
        bail!("the minimal server has no attributes")
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.0.everywhere(REMOVE, None, path.as_bytes()).map(|_| ())
    }

    fn remove_dir(&self, _: &str) -> Result<()> {
        Ok(())
    }

    fn sent(&self) -> Moved {
        let (requests, bytes) = &self.0.sent;
        Moved { requests: requests.load(Ordering::Relaxed), bytes: bytes.load(Ordering::Relaxed) }
    }
}

struct MinimalFile {
    connections: Arc<Connections>,
    numbers: Vec<u32>,
}

impl MinimalFile {
    fn count(&self, requests: usize, bytes: usize) {
        self.connections.sent.0.fetch_add(requests as u64, Ordering::Relaxed);
        self.connections.sent.1.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The connection to a server and the file's number there.
fn at<'a>(streams: &'a mut [TcpStream], numbers: &[u32], server: u16) -> Result<(&'a mut TcpStream, u32)> {
    let place = streams.get_mut(server as usize).zip(numbers.get(server as usize));
    place.map(|(stream, number)| (stream, *number)).context("the layout names a server that is not there")
}

impl FileIo for MinimalFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let ranges = self.connections.layout.lane_ranges(offset, buffer.len() as u64);
        self.count(ranges.len(), buffer.len());
        let mut streams = self.connections.lock();
        for range in &ranges {
            let (stream, number) = at(&mut streams, &self.numbers, range.server)?;
            stream.write_all(&request(READ, number, range.lane_offset, range.len as u32))?;
        }
        // Every server's share is scattered straight into its strips of the buffer.
        let total = buffer.len();
        let mut strips: Vec<Vec<IoSliceMut>> = ranges.iter().map(|_| Vec::new()).collect();
        let mut rest = buffer;
        for piece in self.connections.layout.pieces(offset, total as u64) {
            let (strip, others) = std::mem::take(&mut rest).split_at_mut(piece.len as usize);
            rest = others;
            if let Some(at) = ranges.iter().position(|r| r.server == piece.server) {
                strips[at].push(IoSliceMut::new(strip));
            }
        }
        for (range, strips) in ranges.iter().zip(&mut strips) {
            let (stream, _) = at(&mut streams, &self.numbers, range.server)?;
            let len = reply(stream)?;
            if u64::from(len) != range.len {
                bail!("the minimal server gave {len} of {} bytes", range.len);
            }
            let mut slices = &mut strips[..];
            while !slices.is_empty() {
                match stream.read_vectored(slices)? {
                    0 => bail!("the minimal server closed the connection"),
                    n => IoSliceMut::advance_slices(&mut slices, n),
                }
            }
        }
        Ok(total)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<usize> {
        let ranges = self.connections.layout.lane_ranges(offset, data.len() as u64);
        self.count(ranges.len(), data.len());
        let mut streams = self.connections.lock();
        for range in &ranges {
            let (stream, number) = at(&mut streams, &self.numbers, range.server)?;
            let head = request(WRITE, number, range.lane_offset, range.len as u32);
            let pieces = self.connections.layout.pieces(offset, data.len() as u64);
            let own = pieces.filter(|p| p.server == range.server).map(|p| {
                let from = (p.file_offset - offset) as usize;
                IoSlice::new(&data[from..from + p.len as usize])
            });
            let mut slices: Vec<IoSlice> = std::iter::once(IoSlice::new(&head)).chain(own).collect();
            let mut slices = &mut slices[..];
            while !slices.is_empty() {
                match stream.write_vectored(slices)? {
                    0 => bail!("the minimal server takes no more"),
                    n => IoSlice::advance_slices(&mut slices, n),
                }
            }
        }
        for range in &ranges {
            reply(at(&mut streams, &self.numbers, range.server)?.0)?;
        }
        Ok(data.len())
    }

    fn sync(&self) -> Result<()> {
        self.connections.everywhere(SYNC, Some(&self.numbers), &[]).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_workload::dataset::DataSet;
    use impresario_workload::pattern::{Pattern, Shape};
    use impresario_workload::plan::{Operation, Workload};
    use impresario_workload::runner::{RunOptions, run};
    use impresario_workload::stop::Stop;

    fn start(servers: usize) -> (Minimal, Vec<tempfile::TempDir>) {
        let dirs: Vec<_> = (0..servers).map(|_| tempfile::tempdir().unwrap()).collect();
        let servers = dirs.iter().map(|dir| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let dir = dir.path().to_owned();
            std::thread::spawn(move || serve(&listener, &dir));
            address
        });
        (Minimal { servers: servers.collect(), pids: Vec::new() }, dirs)
    }

    #[test]
    fn data_survive_one_and_four_servers() {
        for servers in [1, 4] {
            let (target, _dirs) = start(servers);
            for (shape, operation) in [(Shape::Contiguous, Operation::Write), (Shape::Random, Operation::Read)] {
                let pattern = Pattern { shape, request_bytes: 300_000, process_bytes: 700_000, processes: 3, seed: 1 };
                let workload = Workload::uniform(1, pattern, operation);
                let mut set = DataSet::new(&workload).unwrap();
                set.prepare(&target, &Stop::new()).unwrap();
                let options = RunOptions { verify: true, ..RunOptions::default() };
                let result = run(&target, &mut set, &workload, &options, &Stop::new()).unwrap();
                assert!(result.verification.passed(), "{servers} {shape}: {:?}", result.verification);
                set.remove(&target).unwrap();
            }
        }
    }

    #[test]
    fn nonsense_ends_its_connection_and_no_other() {
        let (target, dirs) = start(1);
        let mut peer = TcpStream::connect(target.servers[0]).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        peer.write_all(&request(READ, 77, 0, 10)).unwrap();
        assert!(reply(&mut peer).unwrap_err().to_string().contains("os error 9"));
        peer.write_all(&request(READ, 0, 0, u32::MAX)).unwrap();
        assert!(matches!(peer.read(&mut [0; 1]), Ok(0) | Err(_)));
        let client =
            target.connect(Identity { job: 0, node: None, wire_max_bytes: None, name: String::new() }).unwrap();
        client.create("../../out").unwrap().write_at(b"x", 0).unwrap();
        assert_eq!(std::fs::read_dir(dirs[0].path()).unwrap().count(), 1);
    }
}
