//! Sockets and frames: connecting with a bound, receiving frames through one buffer, sending without copies.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use impresario_config::Address;
use impresario_wire::{FrameHeader, HEADER_BYTES, Limits};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};

pub use crate::error::TransportError;

/// Size of a reader's buffer, bytes: header, body and payload of a small answer come with one system call.
const BUFFER_BYTES: usize = 64 << 10;
/// What is read ahead of a large payload, bytes: the rest of it goes straight to where it stays.
const GLANCE_BYTES: usize = 4 << 10;
/// Pieces given to one system call.
pub(crate) const PIECES_MAX: usize = 64;
/// Name look-ups under way at once in this process; more mean that the resolver hangs.
const LOOKUPS_MAX: usize = 16;

/// A connected stream socket.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    /// Bound of one blocking receive: the granularity at which deadlines are looked at.
    tick: Duration,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(s) => s.as_fd(),
            Socket::Unix(s) => s.as_fd(),
        }
    }
}

impl Stream {
    /// Connects within `timeout`. `tick` bounds a single blocking receive.
    pub fn connect(address: &Address, timeout: Duration, tick: Duration) -> io::Result<Stream> {
        let socket = match address {
            Address::Tcp { host, port } => Socket::Tcp(connect_tcp(host, *port, timeout)?),
            Address::Unix(path) => Socket::Unix(connect_unix(path, timeout)?),
        };
        Stream::new(socket, tick)
    }

    /// Takes over a connection that was accepted.
    pub fn from_tcp(stream: TcpStream, tick: Duration) -> io::Result<Stream> {
        Stream::new(Socket::Tcp(stream), tick)
    }

    /// Takes over a connection that was accepted.
    pub fn from_unix(stream: UnixStream, tick: Duration) -> io::Result<Stream> {
        Stream::new(Socket::Unix(stream), tick)
    }

    fn new(socket: Socket, tick: Duration) -> io::Result<Stream> {
        if let Socket::Tcp(tcp) = &socket {
            tcp.set_nodelay(true)?;
            // A machine that vanishes while nothing is under way is noticed after about a minute.
            sockopt::set_socket_keepalive(tcp, true)?;
            sockopt::set_tcp_keepidle(tcp, Duration::from_secs(30))?;
            sockopt::set_tcp_keepintvl(tcp, Duration::from_secs(10))?;
            sockopt::set_tcp_keepcnt(tcp, 3)?;
        }
        let stream = Stream { socket, tick: tick.max(Duration::from_millis(1)) };
        sockopt::set_socket_timeout(&stream, Timeout::Recv, Some(stream.tick))?;
        Ok(stream)
    }

    /// Receives what has come, at least a byte; `TimedOut` after a tick or at the deadline, whatever is first.
    /// An end of the stream is `Closed`.
    pub fn receive(&self, into: &mut [IoSliceMut<'_>], deadline: Instant) -> Result<usize, TransportError> {
        if deadline.saturating_duration_since(Instant::now()) < self.tick {
            self.wait(PollFlags::IN, deadline)?;
        }
        loop {
            let got = match &mut *into {
                // Cheaper than a list of one.
                [one] => rustix::net::recv(self, &mut **one, RecvFlags::empty()).map(|(got, _)| got),
                several => rustix::io::readv(self, several),
            };
            return match got {
                Ok(0) => Err(TransportError::Closed),
                Ok(got) => Ok(got),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => Err(TransportError::TimedOut),
                Err(rustix::io::Errno::CONNRESET) => Err(TransportError::Closed),
                Err(errno) => Err(errno.into()),
            };
        }
    }

    /// Waits for the socket until the deadline and tells what it is ready for.
    pub fn wait(&self, interest: PollFlags, deadline: Instant) -> Result<PollFlags, TransportError> {
        let mut fds = [PollFd::new(self, interest)];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return Err(TransportError::TimedOut),
                Ok(_) => return Ok(fds.iter().fold(PollFlags::empty(), |all, fd| all | fd.revents())),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// True when the peer has closed or the connection is lost, as far as this machine knows. Never waits.
    pub fn has_hung_up(&self) -> bool {
        let signs = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        self.wait(PollFlags::RDHUP, Instant::now()).is_ok_and(|ready| ready.intersects(signs))
    }

    /// Ends the connection in both directions; whoever waits on it is woken.
    pub fn shut_down(&self) {
        let _ = rustix::net::shutdown(self, Shutdown::Both);
    }
}

/// Sends a frame: `head` (header and body), then `payload`. Waits while the peer does not take it, until the deadline.
pub fn send_frame(
    stream: &Stream,
    head: &[u8],
    payload: &[IoSlice<'_>],
    deadline: Instant,
) -> Result<(), TransportError> {
    let mut unsent = Unsent::new(head, payload);
    while !unsent.push(stream)? {
        stream.wait(PollFlags::OUT, deadline)?;
    }
    Ok(())
}

/// What of a frame has not left yet.
pub struct Unsent<'a> {
    head: &'a [u8],
    payload: &'a [IoSlice<'a>],
    /// Bytes of the payload's first piece that have left.
    skip: usize,
}

impl<'a> Unsent<'a> {
    /// All of a frame.
    pub fn new(head: &'a [u8], payload: &'a [IoSlice<'a>]) -> Unsent<'a> {
        Unsent { head, payload, skip: 0 }
    }

    /// Sends what the socket takes without waiting; true when everything has left.
    pub fn push(&mut self, stream: &Stream) -> Result<bool, TransportError> {
        while !self.head.is_empty() || !self.payload.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = if self.payload.is_empty() {
                rustix::net::send(stream, self.head, flags)
            } else {
                let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
                let count = self.fill(&mut pieces);
                let none = &mut SendAncillaryBuffer::default();
                rustix::net::sendmsg(stream, pieces.get(..count).unwrap_or(&[]), none, flags)
            };
            match sent {
                Ok(sent) => self.advance(sent),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(TransportError::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    fn fill<'p>(&self, pieces: &mut [IoSlice<'p>; PIECES_MAX]) -> usize
    where
        'a: 'p,
    {
        let first = self.payload.first().and_then(|piece| piece.get(self.skip..)).unwrap_or(&[]);
        let rest = self.payload.iter().skip(1).map(|piece| &**piece);
        let unsent = [self.head, first].into_iter().chain(rest).filter(|piece| !piece.is_empty());
        let mut count = 0;
        for (slot, piece) in pieces.iter_mut().zip(unsent) {
            *slot = IoSlice::new(piece);
            count += 1;
        }
        count
    }

    fn advance(&mut self, sent: usize) {
        let of_head = sent.min(self.head.len());
        self.head = self.head.get(of_head..).unwrap_or(&[]);
        self.skip += sent - of_head;
        while let Some((first, rest)) = self.payload.split_first()
            && self.skip >= first.len()
        {
            self.skip -= first.len();
            self.payload = rest;
        }
    }
}

/// Cuts a stream into frames.
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// A header whose body has not come yet.
    header: Option<FrameHeader>,
}

impl Default for FrameReader {
    fn default() -> Self {
        FrameReader { buffer: vec![0; BUFFER_BYTES], start: 0, end: 0, header: None }
    }
}

impl FrameReader {
    /// The next frame's header and body, when both are here. Its payload is to be taken before the next frame.
    pub fn take_frame(&mut self, limits: &Limits) -> Result<Option<(FrameHeader, &[u8])>, TransportError> {
        if !self.is_complete(limits)? {
            return Ok(None);
        }
        let Some(header) = self.header.take() else { return Ok(None) };
        let from = self.start;
        self.start += header.body_len as usize;
        Ok(Some((header, self.buffer.get(from..self.start).unwrap_or(&[]))))
    }

    /// Takes at most `len` bytes of payload out of what was received with the frame.
    pub fn take_payload(&mut self, len: usize) -> &[u8] {
        let from = self.start;
        self.start += len.min(self.end - self.start);
        self.buffer.get(from..self.start).unwrap_or(&[])
    }

    /// Receives more bytes with one system call. `large` says that a large payload is due: then not much more than
    /// a header is read ahead of it.
    pub fn fill(&mut self, stream: &Stream, large: bool, deadline: Instant) -> Result<(), TransportError> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        // The checked length of a body bounds how far the buffer ever grows.
        let need = self.header.map_or(HEADER_BYTES, |header| header.body_len as usize);
        if self.start + need > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            self.buffer.resize(need.max(BUFFER_BYTES), 0);
        } else if self.buffer.len() > BUFFER_BYTES && self.end <= BUFFER_BYTES && self.start + need <= BUFFER_BYTES {
            self.buffer.truncate(BUFFER_BYTES);
            self.buffer.shrink_to_fit();
        }
        let to = if large { (self.start + need).max(self.end + 1).max(GLANCE_BYTES) } else { self.buffer.len() };
        let to = to.min(self.buffer.len());
        let room = self.buffer.get_mut(self.end..to).unwrap_or(&mut []);
        match stream.receive(&mut [IoSliceMut::new(room)], deadline) {
            Ok(got) => self.end += got,
            Err(TransportError::Closed) if self.start < self.end || self.header.is_some() => {
                return Err(TransportError::Truncated);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Waits for the next frame until the deadline.
    pub fn next_frame(
        &mut self,
        stream: &Stream,
        limits: &Limits,
        deadline: Instant,
    ) -> Result<(FrameHeader, &[u8]), TransportError> {
        while !self.is_complete(limits)? {
            self.fill_until(stream, deadline)?;
        }
        self.take_frame(limits)?.ok_or(TransportError::Truncated)
    }

    /// Receives a payload, or as much of it as `into` holds.
    pub fn read_payload(&mut self, stream: &Stream, into: &mut [u8], deadline: Instant) -> Result<(), TransportError> {
        let held = self.take_payload(into.len());
        let mut at = held.len();
        into.split_at_mut(at).0.copy_from_slice(held);
        while at < into.len() {
            let rest = into.get_mut(at..).unwrap_or(&mut []);
            match stream.receive(&mut [IoSliceMut::new(rest)], deadline) {
                Ok(got) => at += got,
                Err(TransportError::TimedOut) if Instant::now() < deadline => {}
                Err(TransportError::Closed) => return Err(TransportError::Truncated),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn fill_until(&mut self, stream: &Stream, deadline: Instant) -> Result<(), TransportError> {
        loop {
            match self.fill(stream, false, deadline) {
                Err(TransportError::TimedOut) if Instant::now() < deadline => {}
                other => return other,
            }
        }
    }

    fn is_complete(&mut self, limits: &Limits) -> Result<bool, TransportError> {
        if self.header.is_none() {
            impresario_wire::frame::check_start(self.held())?;
            if self.held().len() >= HEADER_BYTES {
                self.header = Some(FrameHeader::decode(self.held(), limits)?);
                self.start += HEADER_BYTES;
            }
        }
        Ok(self.header.is_some_and(|header| self.held().len() >= header.body_len as usize))
    }

    fn held(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or(&[])
    }
}

/// Identity of a server's start for its [`Welcome`](impresario_wire::Welcome): the boot of this machine in the upper
/// 32 bits, chance in the lower.
pub fn new_incarnation() -> io::Result<u64> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id")?;
    let boot = boot
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    let mut chance = [0; 4];
    getrandom::fill(&mut chance).map_err(io::Error::other)?;
    Ok((boot ^ boot << 32) & !0xffff_ffff | u64::from(u32::from_le_bytes(chance)))
}

fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let mut last = io::Error::new(io::ErrorKind::InvalidInput, format!("the host name {host:?} has no address"));
    for address in look_up(host, port, timeout)? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&address, left) {
            // A connection to a free port of this machine can meet itself when that port was picked for our side.
            Ok(stream) if stream.local_addr()? == address => last = io::ErrorKind::ConnectionRefused.into(),
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The resolver has no deadline of its own, so it is asked on a thread that may be left behind.
fn look_up(host: &str, port: u16, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
    static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
    if let Ok(number) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(number, port)]);
    }
    if UNDER_WAY.fetch_add(1, Ordering::AcqRel) >= LOOKUPS_MAX {
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
        return Err(io::Error::new(io::ErrorKind::TimedOut, "looking up host names hangs; check the resolver"));
    }
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let name = (host.to_string(), port);
    let spawned = std::thread::Builder::new().name("look-up".into()).spawn(move || {
        let found = name.to_socket_addrs().map(Iterator::collect);
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
        let _ = sender.send(found);
    });
    if let Err(error) = spawned {
        UNDER_WAY.fetch_sub(1, Ordering::AcqRel);
        return Err(error);
    }
    receiver.recv_timeout(timeout).unwrap_or_else(|_| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("looking up the host name {host:?} took too long")))
    })
}

/// Connecting to a Unix socket waits while its server's queue is full; the send timeout bounds that.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(path)?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(timeout.max(Duration::from_millis(1))))?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
    sockopt::set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket.into())
}
