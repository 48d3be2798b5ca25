//! A client of the NBD protocol (fixed newstyle; github.com/NetworkBlockDevice/nbd, doc/proto.md), with every wait
//! bounded. It checks what it receives: magic numbers, cookies, lengths.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use crate::target::Address;
use crate::{Checking, Shared, Stop, fault};

const GREETING: u64 = u64::from_be_bytes(*b"NBDMAGIC");
pub(super) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_GO: u32 = 7;
pub(super) const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
pub(super) const REP_ERR: u32 = 1 << 31;
pub(super) const REP_ERR_UNSUP: u32 = REP_ERR | 1;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;
/// Longest option reply that a server has reason to send, bytes.
const OPTION_REPLY_MAX: u32 = 64 << 10;

pub(super) const READ: u16 = 0;
pub(super) const WRITE: u16 = 1;
pub(super) const DISC: u16 = 2;
pub(super) const FLUSH: u16 = 3;
pub(super) const TRIM: u16 = 4;
pub(super) const WRITE_ZEROES: u16 = 6;
pub(super) const FUA: u16 = 1;

pub(super) const READ_ONLY: u16 = 1 << 1;
pub(super) const HAS_FLUSH: u16 = 1 << 2;
pub(super) const HAS_FUA: u16 = 1 << 3;
pub(super) const HAS_TRIM: u16 = 1 << 5;
pub(super) const HAS_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const MULTI_CONN: u16 = 1 << 8;

/// What the server says of an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Export {
    pub size: u64,
    pub flags: u16,
    /// Smallest block, bytes; 1 when the server does not say.
    pub block: u32,
}

impl Export {
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn connect(address: &Address, patience: Duration) -> io::Result<Stream> {
        Ok(match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(patience))?;
                stream.set_write_timeout(Some(patience))?;
                Stream::Unix(stream)
            }
            Address::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, patience)?;
                stream.set_read_timeout(Some(patience))?;
                stream.set_write_timeout(Some(patience))?;
                stream.set_nodelay(true)?;
                Stream::Tcp(stream)
            }
        })
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => stream.write_all(bytes),
            Stream::Tcp(stream) => stream.write_all(bytes),
        }
    }

    fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => stream.read_exact(bytes),
            Stream::Tcp(stream) => stream.read_exact(bytes),
        }
    }

    fn shutdown(&self, how: Shutdown) {
        // The other side may have closed already.
        let _ = match self {
            Stream::Unix(stream) => stream.shutdown(how),
            Stream::Tcp(stream) => stream.shutdown(how),
        };
    }
}

/// A request that waits for its reply.
#[derive(Clone, Debug)]
struct Waiting {
    command: u16,
    offset: u64,
    len: u32,
    sent: u64,
}

/// A reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Reply {
    pub cookie: u64,
    /// 0, or an NBD error, which is an errno of Linux.
    pub error: u32,
    /// What a read returned.
    pub data: Vec<u8>,
}

/// A connection.
pub(super) struct Link {
    stream: Stream,
    shared: Arc<Shared>,
    pub export: Export,
    no_zeroes: bool,
    waiting: HashMap<u64, Waiting>,
}

impl Link {
    /// Connects and exchanges flags; options come next.
    pub fn greet(address: &Address, shared: &Arc<Shared>) -> Checking<Link> {
        let stream = Stream::connect(address, shared.patience);
        let stream = stream.or_else(|error| fault(format!("connecting: {error}")))?;
        let (export, waiting) = (Export { block: 1, ..Export::default() }, HashMap::new());
        let mut link = Link { stream, shared: shared.clone(), export, no_zeroes: false, waiting };
        link.shared.count();
        let greeting = link.take(8, "the greeting")?;
        if word(&greeting, 0, 8) != GREETING {
            return fault(format!("the greeting begins with {greeting:02x?}: not an NBD server"));
        }
        let rest = link.take(10, "the greeting")?;
        if word(&rest, 0, 8) != OPTION_MAGIC {
            return fault("the server speaks the old handshake; fixed newstyle is required");
        }
        let flags = word(&rest, 8, 2) as u16;
        if flags & FIXED_NEWSTYLE == 0 {
            return fault("the server's handshake flags lack fixed newstyle");
        }
        link.no_zeroes = flags & NO_ZEROES != 0;
        link.put(&u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes(), "the client's flags")?;
        Ok(link)
    }

    /// A connection to an export, ready for requests.
    pub fn open(address: &Address, export: &str, shared: &Arc<Shared>) -> Checking<Link> {
        let mut link = Link::greet(address, shared)?;
        link.go(export)?;
        Ok(link)
    }

    /// Sends the head of an option, and data, whether they fit or not.
    pub fn send_option(&mut self, magic: u64, option: u32, len: u32, data: &[u8]) -> Checking {
        self.shared.count();
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(data);
        self.put(&bytes, &format!("option {option}"))
    }

    /// The next reply to an option: its type and data.
    pub fn option_reply(&mut self, option: u32) -> Checking<(u32, Vec<u8>)> {
        let what = format!("the reply to option {option}");
        let head = self.take(20, &what)?;
        let (magic, echoed, kind, len) =
            (word(&head, 0, 8), word(&head, 8, 4) as u32, word(&head, 12, 4) as u32, word(&head, 16, 4) as u32);
        if magic != OPTION_REPLY_MAGIC || echoed != option || len > OPTION_REPLY_MAX {
            return fault(format!("{what}: magic {magic:x}, option {echoed}, {len} bytes"));
        }
        Ok((kind, self.take(len as usize, &what)?))
    }

    /// The last reply to an option: acknowledgement or error; what came before it is dropped.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Checking<u32> {
        self.send_option(OPTION_MAGIC, option, data.len() as u32, data)?;
        loop {
            let (kind, _) = self.option_reply(option)?;
            if kind == REP_ACK || kind & REP_ERR != 0 {
                return Ok(kind);
            }
        }
    }

    fn go(&mut self, export: &str) -> Checking {
        let mut data = (export.len() as u32).to_be_bytes().to_vec();
        data.extend(export.as_bytes());
        data.extend(1u16.to_be_bytes());
        data.extend(INFO_BLOCK_SIZE.to_be_bytes());
        self.send_option(OPTION_MAGIC, OPT_GO, data.len() as u32, &data)?;
        let mut known = false;
        loop {
            let (kind, data) = self.option_reply(OPT_GO)?;
            match kind {
                REP_INFO if data.len() >= 12 && word(&data, 0, 2) as u16 == INFO_EXPORT => {
                    (self.export.size, self.export.flags) = (word(&data, 2, 8), word(&data, 10, 2) as u16);
                    known = true;
                }
                REP_INFO if data.len() >= 14 && word(&data, 0, 2) as u16 == INFO_BLOCK_SIZE => {
                    self.export.block = word(&data, 2, 4) as u32;
                }
                REP_INFO => {}
                REP_ACK if known => return Ok(()),
                REP_ACK => return fault("NBD_OPT_GO is acknowledged without NBD_INFO_EXPORT"),
                REP_ERR_UNSUP => return self.export_name(export),
                kind if kind & REP_ERR != 0 => {
                    let said = String::from_utf8_lossy(&data).into_owned();
                    return fault(format!("export {export:?} is refused: error {} {said}", kind & !REP_ERR));
                }
                kind => return fault(format!("the reply to NBD_OPT_GO has type {kind}")),
            }
        }
    }

    /// The way of servers that do not know NBD_OPT_GO.
    fn export_name(&mut self, export: &str) -> Checking {
        self.send_option(OPTION_MAGIC, OPT_EXPORT_NAME, export.len() as u32, export.as_bytes())?;
        let info = self.take(10, "the export's size")?;
        (self.export.size, self.export.flags) = (word(&info, 0, 8), word(&info, 8, 2) as u16);
        if !self.no_zeroes {
            self.take(124, "the zeros behind the export's size")?;
        }
        Ok(())
    }

    /// Sends a request; its cookie.
    pub fn send(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> Checking<u64> {
        self.shared.count();
        let sent = self.shared.tick();
        let cookie = impresario_base::random::mix(sent);
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(data);
        if command != DISC {
            self.waiting.insert(cookie, Waiting { command, offset, len, sent });
        }
        let what = describe(command, offset, len);
        self.put(&bytes, &what)?;
        Ok(cookie)
    }

    /// Sends bytes that are no request.
    pub fn send_raw(&mut self, bytes: &[u8]) -> Checking {
        self.put(bytes, "bytes")
    }

    /// The next reply, whichever request it is for.
    pub fn receive(&mut self) -> Checking<Reply> {
        let oldest = self.waiting.values().min_by_key(|waiting| waiting.sent);
        let what =
            oldest.map_or("a reply".into(), |w| format!("the reply to a {}", describe(w.command, w.offset, w.len)));
        let head = self.take(16, &what)?;
        let (magic, error, cookie) = (word(&head, 0, 4) as u32, word(&head, 4, 4) as u32, word(&head, 8, 8));
        if magic != REPLY_MAGIC {
            return fault(format!("a reply begins with {magic:08x}: not a simple reply"));
        }
        let Some(asked) = self.waiting.remove(&cookie) else {
            return fault(format!(
                "a reply with cookie {cookie:016x}, which no request waits for: twice, or another's"
            ));
        };
        let data = match (asked.command, error) {
            (READ, 0) => self.take(asked.len as usize, &what)?,
            _ => Vec::new(),
        };
        Ok(Reply { cookie, error, data })
    }

    /// A request and its reply, with nothing else in flight.
    pub fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> Checking<Reply> {
        self.send(command, flags, offset, len, data)?;
        self.receive()
    }

    /// The same for a request that must succeed.
    pub fn call(&mut self, command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> Checking<Vec<u8>> {
        let reply = self.ask(command, flags, offset, len, data)?;
        succeeded(&reply, &describe(command, offset, len))?;
        Ok(reply.data)
    }

    /// Requests without a reply yet.
    pub fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    /// Ends the sending side without a word: the server sees the end behind the requests that were sent.
    pub fn end(&mut self) {
        self.stream.shutdown(Shutdown::Write);
    }

    /// Whether the server closes the connection, at most within the patience; replies before that are dropped.
    pub fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        loop {
            match self.stream.read_exact(&mut byte) {
                Ok(()) => {}
                Err(error) => return !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
            }
        }
    }

    /// Ends the connection without a word.
    pub fn cut(self) {
        self.stream.shutdown(Shutdown::Both);
    }

    fn put(&mut self, bytes: &[u8], what: &str) -> Checking {
        self.stream.write_all(bytes).or_else(|error| self.broken(what, &error, "sending"))
    }

    fn take(&mut self, len: usize, what: &str) -> Checking<Vec<u8>> {
        let mut bytes = vec![0; len];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Ok(bytes),
            Err(error) => self.broken(what, &error, "waiting for"),
        }
    }

    fn broken<T>(&self, what: &str, error: &io::Error, doing: &str) -> Checking<T> {
        Err(Stop::Fail(match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("{doing} {what}: no answer within {:.0} s", self.shared.patience.as_secs_f64())
            }
            io::ErrorKind::UnexpectedEof => format!("{doing} {what}: the server closed the connection"),
            _ => format!("{doing} {what}: {error}"),
        }))
    }
}

/// A request as messages name it.
pub(super) fn describe(command: u16, offset: u64, len: u32) -> String {
    match command {
        READ => format!("read of {len} bytes at {offset}"),
        WRITE => format!("write of {len} bytes at {offset}"),
        TRIM => format!("trim of {len} bytes at {offset}"),
        WRITE_ZEROES => format!("write-zeroes of {len} bytes at {offset}"),
        FLUSH => "flush".into(),
        other => format!("command {other}"),
    }
}

/// Whether a reply is a success.
pub(super) fn succeeded(reply: &Reply, what: &str) -> Checking {
    match reply.error {
        0 => Ok(()),
        error => fault(format!("{what}: error {error} ({})", crate::errno_text(error as i32))),
    }
}

/// A number of `len` bytes, big endian; bytes that are not there count as 0.
fn word(bytes: &[u8], at: usize, len: usize) -> u64 {
    (at..at + len).fold(0, |number, n| number << 8 | u64::from(bytes.get(n).copied().unwrap_or(0)))
}
