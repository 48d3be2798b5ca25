//! Connections within one machine are not paced.
//!
//! Congestion controls such as BBR let bytes leave at a pace, with a timer for every few segments. Between two sockets of one
//! machine there is no queue that this could keep short: what it costs is processor time. On a virtual machine with BBR, reads of
//! 1 MiB of 16 clients through an I/O node came 1.7 times as fast without it.
//!
//! A socket that was paced once remains so, whatever it is told later. So sockets are not paced from the start
//! ([`unpace`], [`connect`]), and those whose other end turns out to be elsewhere are given the system's own congestion
//! control back ([`settle`]).

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// Every kernel has it, every process may choose it, and it does not pace.
const UNPACED: &str = "reno";

/// A socket that is not connected yet, or the connections that a listening one accepts: they are not paced until [`settle`] is told
/// of them.
pub fn unpace(socket: impl AsFd) {
    // A kernel that refuses leaves it as it was.
    let _ = sockopt::set_tcp_congestion(socket, UNPACED);
}

/// As [`TcpStream::connect_timeout`], and settled.
///
/// # Errors
///
/// Those of the system; `TimedOut` if the other end does not answer in time.
pub fn connect(address: &SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    unpace(&socket);
    match rustix::net::connect(&socket, address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS | Errno::INTR) => {
            wait_until_connected(&socket, Instant::now() + timeout)?;
            sockopt::socket_error(&socket)??;
        }
        Err(error) => return Err(error.into()),
    }
    rustix::io::ioctl_fionbio(&socket, false)?;
    let stream = TcpStream::from(socket);
    settle(&stream);
    Ok(stream)
}

fn wait_until_connected(socket: impl AsFd, deadline: Instant) -> io::Result<()> {
    let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut fds, Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A connection with another machine is paced as the system has it.
pub fn settle(connected: &TcpStream) {
    if let (Ok(ours), Ok(theirs)) = (connected.local_addr(), connected.peer_addr())
        && !is_within_one_machine(ours, theirs)
        && let Ok(usual) = usual(ours)
    {
        let _ = sockopt::set_tcp_congestion(connected, &usual);
    }
}

/// What a socket of this process has that was told nothing; an administrator may change it at any time.
fn usual(like: SocketAddr) -> rustix::io::Result<String> {
    let family = if like.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::tcp_congestion(&socket)
}

/// Whoever connects to an address of his own machine does so from that address, or from another one of the loopback network.
fn is_within_one_machine(ours: SocketAddr, theirs: SocketAddr) -> bool {
    let is_loopback = |ip: IpAddr| ip.to_canonical().is_loopback();
    ours.ip() == theirs.ip() || (is_loopback(ours.ip()) && is_loopback(theirs.ip()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn connections_within_the_machine_are_not_paced() {
        for address in ["127.0.0.1:0", "127.0.0.2:0"] {
            let listener = TcpListener::bind(address).unwrap();
            unpace(&listener);
            let ours = connect(&listener.local_addr().unwrap(), PATIENCE).unwrap();
            let (theirs, _) = listener.accept().unwrap();
            settle(&theirs);
            for socket in [ours, theirs] {
                assert_eq!(sockopt::tcp_congestion(&socket).unwrap(), UNPACED, "{address}");
            }
        }
    }

    #[test]
    fn a_connection_that_nobody_takes_is_refused_or_late() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!(connect(&free, PATIENCE).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        // What the kernel holds is full after the first ones, and the next is not answered.
        let all: Vec<_> = (0..4).map(|_| connect(&address, Duration::from_millis(100))).collect();
        assert!(all[0].is_ok());
        assert!(all.iter().any(|one| one.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)));
    }

    #[test]
    fn other_machines_are_told_from_this_one() {
        let is = |ours: &str, theirs: &str| is_within_one_machine(ours.parse().unwrap(), theirs.parse().unwrap());
        assert!(is("127.0.0.1:7", "127.0.0.3:9") && is("[::1]:7", "[::1]:9"));
        assert!(is("[::ffff:127.0.0.1]:7", "127.0.0.2:9"));
        assert!(is("10.0.0.1:7", "10.0.0.1:9") && is("[fe80::1]:7", "[fe80::1]:9"));
        assert!(!is("10.0.0.1:7", "10.0.0.2:9") && !is("[fe80::1]:7", "[fe80::2]:9"));
        assert!(!is("10.0.0.1:7", "127.0.0.1:9"));
    }
}
