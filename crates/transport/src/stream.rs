//! A connected socket whose every wait is bounded.

use std::collections::BTreeMap;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_base::unpaced;
use impresario_config::Address;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, Shutdown};

use crate::polling::{Poller, Side};
use crate::{Session, TransportError};

/// What is received into more room than this is a long payload under way: looking for its parts takes the socket and the
/// processor from who sends them (writes of 1 MiB of one client lost 13 %).
const POLLED_ROOM_BYTES: usize = 72 << 10;

/// Maximum pieces per system call.
pub const PIECES_MAX: usize = 64;
/// Maximum concurrent name look-ups in this process; more mean that the resolver hangs.
const LOOKUPS_MAX: usize = 16;
/// Names whose addresses are kept at most: more than a configuration has servers.
const NAMES_MAX: usize = 4096;

/// A connected stream socket.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    /// Limit of one blocking receive: the granularity of deadlines.
    tick: Duration,
    /// Its protection, once both ends have proved their keys.
    session: OnceLock<Arc<Session>>,
    /// Polls for bytes before a thread sleeps.
    poller: OnceLock<Poller>,
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

    /// Wraps an accepted connection.
    pub fn from_tcp(stream: TcpStream, tick: Duration) -> io::Result<Stream> {
        Stream::new(Socket::Tcp(stream), tick)
    }

    /// Wraps an accepted connection.
    pub fn from_unix(stream: UnixStream, tick: Duration) -> io::Result<Stream> {
        Stream::new(Socket::Unix(stream), tick)
    }

    fn new(socket: Socket, tick: Duration) -> io::Result<Stream> {
        if let Socket::Tcp(tcp) = &socket {
            tcp.set_nodelay(true)?;
            // Notices after about a minute that a machine has vanished while the connection was idle. A kernel that
            // refuses these settings is no reason to refuse a peer.
            let _ = sockopt::set_socket_keepalive(tcp, true);
            let _ = sockopt::set_tcp_keepidle(tcp, Duration::from_secs(30));
            let _ = sockopt::set_tcp_keepintvl(tcp, Duration::from_secs(10));
            let _ = sockopt::set_tcp_keepcnt(tcp, 3);
        }
        let stream = Stream {
            socket,
            tick: tick.max(Duration::from_millis(1)),
            session: OnceLock::new(),
            poller: OnceLock::new(),
        };
        sockopt::set_socket_timeout(&stream, Timeout::Recv, Some(stream.tick))?;
        Ok(stream)
    }

    /// The stream's protection, if both ends have proved keys.
    pub fn session(&self) -> Option<&Arc<Session>> {
        self.session.get()
    }

    pub(crate) fn protect(&self, session: Arc<Session>) {
        let _ = self.session.set(session);
    }

    /// From now on a thread that receives polls for at most `longest` before it sleeps, where that pays. Zero: never.
    pub fn poll_before_sleeping(&self, side: Side, longest: Duration) {
        if !longest.is_zero() {
            self.poll_with(Poller::new(side, longest));
        }
    }

    pub(crate) fn poll_with(&self, poller: Poller) {
        let _ = self.poller.set(poller);
    }

    /// The user of the process at the other end, if the kernel knows it: on Unix sockets.
    pub fn peer_user(&self) -> Option<u32> {
        match &self.socket {
            Socket::Tcp(_) => None,
            Socket::Unix(unix) => sockopt::socket_peercred(unix).ok().map(|peer| peer.uid.as_raw()),
        }
    }

    /// Whether bytes have come that were not received yet; does not wait.
    pub fn has_bytes(&self) -> bool {
        let mut byte = [0];
        let looked = rustix::net::recv(self, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        looked.is_ok_and(|(got, _)| got > 0)
    }

    /// Receives available bytes, at least one; `TimedOut` after a tick or at the deadline, whichever is first. The end
    /// of the stream is `Closed`.
    pub fn receive(&self, into: &mut [IoSliceMut<'_>], deadline: Instant) -> Result<usize, TransportError> {
        let now = Instant::now();
        let Some(poller) = self.poller.get() else { return self.receive_asleep(into, now, deadline) };
        let _waits = poller.waits();
        let room_bytes: usize = into.iter().map(|piece| piece.len()).sum();
        let polled = (room_bytes <= POLLED_ROOM_BYTES)
            .then(|| {
                poller.poll(now, deadline, || match self.take(into, RecvFlags::DONTWAIT) {
                    Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
                    taken => Some(taken),
                })
            })
            .flatten();
        let received = polled.map_or_else(|| self.receive_asleep(into, now, deadline), outcome);
        if received.is_ok() {
            poller.came();
        }
        received
    }

    /// Receives and sleeps meanwhile.
    fn receive_asleep(
        &self,
        into: &mut [IoSliceMut<'_>],
        now: Instant,
        deadline: Instant,
    ) -> Result<usize, TransportError> {
        if deadline.saturating_duration_since(now) < self.tick {
            self.wait(PollFlags::IN, deadline)?;
        }
        loop {
            match self.take(into, RecvFlags::empty()) {
                Err(rustix::io::Errno::INTR) => {}
                taken => return outcome(taken),
            }
        }
    }

    /// One system call.
    fn take(&self, into: &mut [IoSliceMut<'_>], flags: RecvFlags) -> rustix::io::Result<usize> {
        match into {
            // Cheaper than a list with one entry.
            [one] => rustix::net::recv(self, &mut **one, flags).map(|(got, _)| got),
            several => {
                let none = &mut RecvAncillaryBuffer::default();
                rustix::net::recvmsg(self, several, none, flags).map(|received| received.bytes)
            }
        }
    }

    /// Waits until the deadline for bytes, or for the end of the stream.
    pub(crate) fn await_bytes(&self, deadline: Instant) -> Result<(), TransportError> {
        let _waits = self.poller.get().map(Poller::waits);
        self.wait(PollFlags::IN, deadline).map(drop)
    }

    /// Waits until the deadline for the socket, and returns its readiness.
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

    /// True if the peer has closed or the connection is lost, as far as this machine knows. Never waits.
    pub fn has_hung_up(&self) -> bool {
        let signs = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        self.wait(PollFlags::RDHUP, Instant::now()).is_ok_and(|ready| ready.intersects(signs))
    }

    /// Closes both directions and wakes waiting threads.
    pub fn shut_down(&self) {
        let _ = rustix::net::shutdown(self, Shutdown::Both);
    }
}

/// What came of a system call that receives.
fn outcome(taken: rustix::io::Result<usize>) -> Result<usize, TransportError> {
    match taken {
        Ok(0) => Err(TransportError::Closed),
        Ok(got) => Ok(got),
        Err(rustix::io::Errno::AGAIN) => Err(TransportError::TimedOut),
        Err(rustix::io::Errno::CONNRESET) => Err(TransportError::Closed),
        Err(errno) => Err(errno.into()),
    }
}

fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let found = addresses_of(host, port, timeout)?;
    let none = || io::Error::new(io::ErrorKind::InvalidInput, format!("the host name {host:?} has no address"));
    connect_to_any(&found, deadline).unwrap_or_else(|| Err(none()))
}

/// Connects to the first of these addresses that takes the connection. Each gets its part of the time: one that is silent, as where
/// IPv6 leads nowhere, must not take that of the others.
fn connect_to_any(addresses: &[SocketAddr], deadline: Instant) -> Option<io::Result<TcpStream>> {
    let mut last = None;
    for (nth, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now()) / (addresses.len() - nth) as u32;
        if left.is_zero() {
            return Some(Err(io::ErrorKind::TimedOut.into()));
        }
        let connected = unpaced::connect(address, left).and_then(|stream| {
            // A connection to a free local port can connect to itself if our side was assigned that port.
            if stream.local_addr()? == *address { Err(io::ErrorKind::ConnectionRefused.into()) } else { Ok(stream) }
        });
        if connected.is_ok() {
            return Some(connected);
        }
        last = Some(connected);
    }
    last
}

/// The addresses of a host, whose name is looked up each time: a server may come back elsewhere.
fn addresses_of(host: &str, port: u16, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
    static LAST: LastFound = LastFound::new();
    match host.parse::<IpAddr>() {
        Ok(number) => Ok(vec![SocketAddr::new(number, port)]),
        Err(_) => LAST.or_find((host, port), timeout, |patience| look_up(host, port, patience)),
    }
}

/// What was found last for each name. A server that was there is not lost because a resolver is: who answers at an old address says
/// who it is.
struct LastFound(Mutex<BTreeMap<(String, u16), Vec<SocketAddr>>>);

impl LastFound {
    const fn new() -> LastFound {
        LastFound(Mutex::new(BTreeMap::new()))
    }

    /// What `find` finds, which gets half of the time where there is an earlier answer to fall back on.
    fn or_find(
        &self,
        (host, port): (&str, u16),
        timeout: Duration,
        find: impl FnOnce(Duration) -> io::Result<Vec<SocketAddr>>,
    ) -> io::Result<Vec<SocketAddr>> {
        let name = (host.to_string(), port);
        let last = self.0.lock().get(&name).cloned();
        let patience = if last.is_some() { timeout / 2 } else { timeout };
        match (find(patience), last) {
            (Ok(found), _) if !found.is_empty() => {
                let mut kept = self.0.lock();
                if kept.len() < NAMES_MAX || kept.contains_key(&name) {
                    kept.insert(name, found.clone());
                }
                Ok(found)
            }
            (failed, Some(last)) => {
                let why = failed.err().map_or_else(|| "it has no address".into(), |error| error.to_string());
                tracing::debug!(host, why, "a host name cannot be looked up; its last addresses are tried");
                Ok(last)
            }
            (failed, None) => failed,
        }
    }
}

/// The resolver has no deadline, so it runs on a thread that may be abandoned.
fn look_up(host: &str, port: u16, timeout: Duration) -> io::Result<Vec<SocketAddr>> {
    static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
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

/// Connecting to a Unix socket blocks while its server's queue is full; the send timeout limits that.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_address_does_not_take_the_time_of_the_next() {
        // Its queue is full, so the system answers nobody who connects to it.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let address = silent.local_addr().unwrap();
        let short = Duration::from_millis(100);
        let filling: Vec<_> = (0..4).map(|_| TcpStream::connect_timeout(&address, short)).collect();
        assert!(filling.last().unwrap().is_err(), "it answers");
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let there = server.local_addr().unwrap();
        let connected = connect_to_any(&[address, there], Instant::now() + Duration::from_secs(2));
        assert_eq!(connected.unwrap().unwrap().peer_addr().unwrap(), there);
        assert!(connect_to_any(&[address, address], Instant::now() + short).unwrap().is_err());
        assert!(connect_to_any(&[], Instant::now() + short).is_none());
    }

    #[test]
    fn a_name_that_cannot_be_looked_up_any_more_keeps_its_last_addresses() {
        let (last, timeout) = (LastFound::new(), Duration::from_secs(8));
        let here = |n: u8| vec![SocketAddr::from(([127, 0, 0, n], 1))];
        let fails = |_: Duration| Err(io::Error::other("no resolver"));
        let look = |find: &dyn Fn(Duration) -> io::Result<Vec<SocketAddr>>| last.or_find(("host", 1), timeout, find);
        assert_eq!(look(&fails).unwrap_err().to_string(), "no resolver");
        assert!(look(&|_| Ok(Vec::new())).unwrap().is_empty());
        assert_eq!(look(&|patience| if patience == timeout { Ok(here(1)) } else { fails(patience) }).unwrap(), here(1));
        // A resolver that hangs leaves time to connect.
        assert_eq!(look(&|patience| if patience < timeout { fails(patience) } else { Ok(here(9)) }).unwrap(), here(1));
        assert_eq!(look(&|_| Ok(Vec::new())).unwrap(), here(1));
        assert_eq!(look(&|_| Ok(here(2))).unwrap(), here(2), "the host has moved");
        assert_eq!(look(&fails).unwrap(), here(2));
        let other = last.or_find(("host", 2), timeout, fails);
        assert!(other.is_err(), "another port is another server");
    }
}
