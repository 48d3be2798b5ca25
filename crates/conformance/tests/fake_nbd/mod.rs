//! An NBD server over memory, correct or with one defect: a thread for each connection.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// What a server may do wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Defect {
    None,
    /// A client in the middle of an option stops all others.
    StuckOption,
    /// Unknown options are acknowledged.
    AcceptedGarbage,
    LostWrite,
    StaleRead,
    /// A write lands over a later one that overlaps it.
    ReorderedWrites,
    /// Write-zeroes takes effect behind the next request.
    LateZeroes,
    /// Two replies have each other's cookie.
    SwappedReplies,
    /// A flush is acknowledged, and a broken connection's writes are forgotten.
    FlushDoesNotWait,
    /// FUA is acknowledged, and a broken connection's writes are forgotten.
    FuaIgnored,
    /// After a failed request the next one fails.
    WrongError,
    /// At the end of a connection its last writes are dropped.
    DropAtClose,
    /// A read is never answered.
    Hang,
    /// A restart loses what was flushed.
    LoseAtRestart,
    /// A request that is in flight when the server stops is never answered.
    HangAtRestart,
    /// Writes are refused, except those that clear the export.
    RefuseWrites,
    /// Writes of a connection that has broken land once more, over later ones.
    LateAfterBreak,
    /// A connection that breaks keeps its place for ever; there are few.
    LeakAtBreak,
}

const SIZE: usize = 2 << 20;
const REQUEST_MAX: u32 = 32 << 20;
/// HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, MULTI_CONN.
const FLAGS: u16 = 1 | 4 | 8 | 32 | 64 | 256;
/// Connections that may break before there is no place for another.
const PLACES: u64 = 2;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EIO: u32 = 5;

struct Shared {
    defect: Defect,
    store: Mutex<Store>,
    negotiating: Mutex<()>,
    restart_file: PathBuf,
    restarted: AtomicBool,
    requests: AtomicU64,
    ended: AtomicBool,
    leaked: AtomicU64,
}

struct Store {
    data: Vec<u8>,
    previous: Vec<u8>,
    last: Option<(usize, Vec<u8>)>,
    /// Writes of connections that have broken, to be made again.
    late: Vec<(usize, Vec<u8>)>,
}

pub struct Server {
    shared: Arc<Shared>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    pub fn start(defect: Defect) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("nbd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let store = Store { data: vec![0; SIZE], previous: vec![0; SIZE], last: None, late: Vec::new() };
        let shared = Arc::new(Shared {
            defect,
            store: Mutex::new(store),
            negotiating: Mutex::new(()),
            restart_file: dir.path().join("restart"),
            restarted: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            leaked: AtomicU64::new(0),
        });
        let serving = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if serving.ended.load(Ordering::Relaxed) {
                    return;
                }
                let (shared, Ok(stream)) = (serving.clone(), stream) else { return };
                std::thread::spawn(move || drop(Connection::new(stream, &shared).serve()));
            }
        });
        Server { shared, socket, _dir: dir }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn restart_file(&self) -> &Path {
        &self.shared.restart_file
    }

    /// Whether a restart leaves a request without an answer.
    pub fn loses_requests(&self) -> bool {
        self.shared.is(Defect::HangAtRestart)
    }

    /// Made when that has come to pass.
    pub fn lost_file(&self) -> PathBuf {
        self.shared.restart_file.with_extension("lost")
    }

    pub fn contents(&self) -> Vec<u8> {
        self.shared.store().data.clone()
    }

    pub fn fill(&self, bytes: &[u8], at: usize) {
        self.shared.store().data[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        let _ = UnixStream::connect(&self.socket);
    }
}

impl Shared {
    fn is(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

struct Connection<'a> {
    stream: UnixStream,
    shared: &'a Shared,
    /// Writes that are only the connection's own: with defects of durability, and of the end.
    pending: Vec<(usize, Vec<u8>)>,
    /// A reply that waits to be swapped with the next.
    held: Option<(u64, Vec<u8>)>,
    zeroes: Option<(usize, usize)>,
    /// Its writes, where they come again when it has broken.
    made: Vec<(usize, Vec<u8>)>,
    wrong: bool,
}

impl Connection<'_> {
    fn new(stream: UnixStream, shared: &Shared) -> Connection<'_> {
        Connection { stream, shared, pending: Vec::new(), held: None, zeroes: None, made: Vec::new(), wrong: false }
    }

    fn take(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn serve(&mut self) -> io::Result<()> {
        if self.shared.is(Defect::LeakAtBreak) && self.shared.leaked.load(Ordering::Relaxed) >= PLACES {
            // Until the client goes.
            return io::copy(&mut self.stream, &mut io::sink()).map(drop);
        }
        if self.negotiate()? {
            let served = loop {
                match self.request() {
                    Ok(true) => {}
                    ended => break ended,
                }
            };
            if served.is_err() {
                self.shared.leaked.fetch_add(1, Ordering::Relaxed);
                self.shared.store().late.append(&mut self.made);
            }
        }
        Ok(())
    }

    /// Whether requests follow.
    fn negotiate(&mut self) -> io::Result<bool> {
        self.stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
        self.take(4)?;
        loop {
            let magic = self.take(8)?;
            // Held from the first byte of an option to its last: nobody else gets through.
            let _stuck = self.shared.is(Defect::StuckOption).then(|| self.shared.negotiating.lock());
            let head = self.take(8)?;
            let (option, len) = (number(&head[..4]) as u32, number(&head[4..]) as usize);
            if magic != b"IHAVEOPT" || len > 64 << 10 {
                return Ok(false);
            }
            let data = self.take(len)?;
            let well = data.len() >= 8 && number(&data[..4]) as usize + 8 == data.len();
            match option {
                7 if well => {
                    let mut info = 0u16.to_be_bytes().to_vec();
                    info.extend((SIZE as u64).to_be_bytes());
                    info.extend(FLAGS.to_be_bytes());
                    self.option_reply(option, 3, &info)?;
                    self.option_reply(option, 1, &[])?;
                    return Ok(true);
                }
                7 => self.option_reply(option, 1 << 31 | 3, b"damaged")?,
                2 => {
                    self.option_reply(option, 1, &[])?;
                    return Ok(false);
                }
                _ if self.shared.is(Defect::AcceptedGarbage) => self.option_reply(option, 1, &[])?,
                _ => self.option_reply(option, 1 << 31 | 1, &[])?,
            }
        }
    }

    fn option_reply(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        [option, kind, data.len() as u32].iter().for_each(|word| bytes.extend(word.to_be_bytes()));
        bytes.extend(data);
        self.stream.write_all(&bytes)
    }

    /// Serves one request; whether another may follow.
    fn request(&mut self) -> io::Result<bool> {
        let head = self.take(28)?;
        let (flags, command, cookie) = (number(&head[4..6]), number(&head[6..8]), number(&head[8..16]));
        let (offset, len) = (number(&head[16..24]), number(&head[24..28]) as u32);
        if head[..4] != 0x2560_9513_u32.to_be_bytes() || (command <= 1 && len > REQUEST_MAX) {
            return Ok(false);
        }
        let count = self.shared.requests.fetch_add(1, Ordering::Relaxed);
        if self.shared.is(Defect::LoseAtRestart)
            && self.shared.restart_file.exists()
            && !self.shared.restarted.swap(true, Ordering::Relaxed)
        {
            self.shared.store().data.fill(0);
        }
        let payload = if command == 1 { self.take(len as usize)? } else { Vec::new() };
        if command == 2 {
            return Ok(false);
        }
        let inside = offset.checked_add(u64::from(len)).is_some_and(|end| end <= SIZE as u64);
        if !matches!(command, 0 | 1 | 3 | 4 | 6) || !inside {
            self.wrong = self.shared.is(Defect::WrongError);
            self.reply(cookie, EINVAL, Vec::new())?;
            return Ok(true);
        }
        if std::mem::take(&mut self.wrong) {
            self.reply(cookie, EIO, Vec::new())?;
            return Ok(true);
        }
        if self.shared.is(Defect::Hang) && command == 0 && count > 60 {
            return Ok(true);
        }
        if self.shared.is(Defect::HangAtRestart) && command == 1 && self.shared.restart_file.exists() {
            std::fs::write(self.shared.restart_file.with_extension("lost"), "")?;
            return Ok(true);
        }
        if self.shared.is(Defect::RefuseWrites) && payload.iter().any(|byte| *byte != 0) {
            self.reply(cookie, ENOSPC, Vec::new())?;
            return Ok(true);
        }
        let (at, len) = (offset as usize, len as usize);
        let late = self.zeroes.take();
        let data = match command {
            0 => self.read(at, len, count),
            1 => self.write(at, payload, flags & 1 != 0, count),
            3 => self.flush(),
            6 if self.shared.is(Defect::LateZeroes) => {
                self.zeroes = Some((at, len));
                Vec::new()
            }
            6 => self.write(at, vec![0; len], false, 0),
            _ => Vec::new(),
        };
        if let Some((at, len)) = late {
            self.shared.store().data[at..at + len].fill(0);
        }
        self.reply(cookie, 0, data)?;
        Ok(true)
    }

    fn read(&self, at: usize, len: usize, count: u64) -> Vec<u8> {
        let store = self.shared.store();
        let stale = self.shared.is(Defect::StaleRead) && count % 10 == 9;
        let mut data = if stale { &store.previous } else { &store.data }[at..at + len].to_vec();
        for (start, bytes) in &self.pending {
            let (from, to) = (at.max(*start), (at + len).min(start + bytes.len()));
            if from < to {
                data[from - at..to - at].copy_from_slice(&bytes[from - start..to - start]);
            }
        }
        data
    }

    fn write(&mut self, at: usize, bytes: Vec<u8>, fua: bool, count: u64) -> Vec<u8> {
        let own = match self.shared.defect {
            Defect::FlushDoesNotWait => !fua,
            Defect::FuaIgnored => true,
            // What is written longer than a page.
            Defect::DropAtClose => bytes.len() > 4096,
            _ => false,
        };
        if own {
            self.pending.push((at, bytes));
            return Vec::new();
        }
        if self.shared.is(Defect::LostWrite) && count % 10 == 9 {
            return Vec::new();
        }
        let mut store = self.shared.store();
        if self.shared.is(Defect::StaleRead) {
            store.previous = store.data.clone();
        }
        store.data[at..at + bytes.len()].copy_from_slice(&bytes);
        if self.shared.is(Defect::LateAfterBreak) {
            let overlaps = |late: &mut (usize, Vec<u8>)| late.0 < at + bytes.len() && at < late.0 + late.1.len();
            for (start, late) in store.late.extract_if(.., overlaps).collect::<Vec<_>>() {
                store.data[start..start + late.len()].copy_from_slice(&late);
            }
            self.made.push((at, bytes.clone()));
        }
        if self.shared.is(Defect::ReorderedWrites)
            && let Some((start, earlier)) = store.last.take()
            && start < at + bytes.len()
            && at < start + earlier.len()
        {
            store.data[start..start + earlier.len()].copy_from_slice(&earlier);
        }
        store.last = Some((at, bytes));
        Vec::new()
    }

    fn flush(&mut self) -> Vec<u8> {
        if !self.shared.is(Defect::FlushDoesNotWait) {
            let mut store = self.shared.store();
            for (at, bytes) in self.pending.drain(..) {
                store.data[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        Vec::new()
    }

    fn reply(&mut self, cookie: u64, error: u32, data: Vec<u8>) -> io::Result<()> {
        if self.shared.is(Defect::SwappedReplies) && error == 0 {
            // Two reads in a row: each gets the other's bytes.
            let fit = |bytes: &[u8], len: usize| -> Vec<u8> { bytes.iter().copied().cycle().take(len).collect() };
            match self.held.take() {
                Some((other, bytes)) if !data.is_empty() => {
                    self.put(cookie, 0, &fit(&bytes, data.len()))?;
                    return self.put(other, 0, &fit(&data, bytes.len()));
                }
                Some((other, bytes)) => self.put(other, 0, &bytes)?,
                None if (1..=4096).contains(&data.len()) && self.more() => {
                    self.held = Some((cookie, data));
                    return Ok(());
                }
                None => {}
            }
        }
        self.put(cookie, error, &data)
    }

    /// Whether the client sends more: a held reply will not be the last. Long enough for a client that does.
    fn more(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.stream, rustix::event::PollFlags::IN)];
        let patience = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&patience)).is_ok_and(|ready| ready > 0)
    }

    fn put(&mut self, cookie: u64, error: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = 0x6744_6698_u32.to_be_bytes().to_vec();
        bytes.extend(error.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes)
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
