//! Ports of this machine for the servers of tests: of one test alone, also while its server is down for a while.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::{Mutex, PoisonError};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};

/// Ports below are left to servers of the machine.
const FIRST: u16 = 10_000;
/// A process takes ports by the block, so that few descriptors hold all of its own.
const BLOCK: u16 = 256;

/// What this process holds.
struct Held {
    /// The ports of its last block that were not given yet.
    left: Range<u16>,
    /// One for each block, for as long as the process lives: a name that only one socket can have.
    blocks: Vec<UnixListener>,
}

static HELD: Mutex<Held> = Mutex::new(Held::NOTHING);

/// So many free ports. Each is given once in a process, and to no other process that asks here. While there are
/// such, they are ports that the kernel gives neither to outgoing connections nor to who asks for any port.
///
/// # Panics
/// When there is none left, or none can be had.
pub fn free_ports(count: usize) -> Vec<u16> {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    (0..count).map(|_| held.next()).collect()
}

/// An address of this machine with one of [`free_ports`].
pub fn free_address() -> String {
    SocketAddr::from((Ipv4Addr::LOCALHOST, free_ports(1)[0])).to_string()
}

impl Held {
    const NOTHING: Held = Held { left: 0..0, blocks: Vec::new() };

    fn next(&mut self) -> u16 {
        loop {
            let Some(port) = self.left.next() else {
                self.take_block();
                continue;
            };
            // A server of somebody else may have it.
            if unless_taken(bound(port)).is_some() {
                return port;
            }
        }
    }

    fn take_block(&mut self) {
        let (outer, inner) = blocks(kernels_range());
        for mut some in [outer, inner] {
            // Beginning anywhere: what is left over of an earlier process may still call its ports.
            let begin = std::process::id() as usize % some.len().max(1);
            some.rotate_left(begin);
            for first in some {
                let name =
                    UnixAddr::from_abstract_name(format!("impresario test ports {first}")).expect("a short name");
                if let Some(block) = unless_taken(UnixListener::bind_addr(&name)) {
                    self.blocks.push(block);
                    self.left = first..first + BLOCK;
                    return;
                }
            }
        }
        panic!("no ports are left from {FIRST} on");
    }
}

/// The first and the last port of those that the kernel gives.
fn kernels_range() -> (u16, u16) {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("the kernel's ports");
    let mut bounds = range.split_whitespace().map(|bound| bound.parse().expect("a port"));
    (bounds.next().expect("a range"), bounds.next().expect("a range"))
}

/// The first ports of all blocks: of those without a port of the kernel's, and of the others.
fn blocks((low, high): (u16, u16)) -> (Vec<u16>, Vec<u16>) {
    (FIRST..=u16::MAX - BLOCK).step_by(BLOCK.into()).partition(|&first| first + BLOCK <= low || first > high)
}

/// A socket with this port. It does not listen: a child that was forked meanwhile has it, too, until it has become another program, and
/// would keep the port from the server that is to have it.
fn bound(port: u16) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
    Ok(socket)
}

/// Nothing if it is somebody else's.
fn unless_taken<T>(bound: io::Result<T>) -> Option<T> {
    match bound {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
        bound => Some(bound.expect("a port of this machine")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::net::TcpListener;

    #[test]
    fn a_port_that_was_looked_at_can_be_had_and_one_with_a_server_is_not_free() {
        let port = free_ports(1)[0];
        let looked_at = bound(port).unwrap();
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        drop(looked_at);
        assert_eq!(unless_taken(bound(port)).map(drop), None);
        drop(server);
        assert!(unless_taken(bound(port)).is_some());
    }

    #[test]
    fn ports_are_given_once_and_are_free() {
        let ports = free_ports(3 * usize::from(BLOCK));
        assert_eq!(ports.iter().collect::<HashSet<_>>().len(), ports.len());
        let address = free_address();
        let server = TcpListener::bind(&address).unwrap();
        assert!(!ports.contains(&server.local_addr().unwrap().port()));
        let chosen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let is_scarce = blocks(kernels_range()).0.len() < 32;
        assert!(is_scarce || !ports.contains(&chosen));
    }

    #[test]
    fn blocks_outside_of_the_kernels_range_come_first() {
        let usual = [(32_768, 60_999), (32_768, 49_151), (1_024, 32_767), (49_152, 65_535)];
        for (low, high) in
            usual.into_iter().chain([(1_024, 65_535), (10_240, 65_000), (1_024, 5_000), (10_000, 10_000)])
        {
            let (outer, inner) = blocks((low, high));
            let is_kernels = |first: u16| (first..first + BLOCK).any(|port| (low..=high).contains(&port));
            assert!(!outer.iter().any(|&first| is_kernels(first)), "{low} to {high}: {outer:?}");
            assert!(inner.iter().all(|&first| is_kernels(first)), "{low} to {high}: {inner:?}");
            let mut all = [outer, inner].concat();
            all.sort();
            assert!(all[0] >= FIRST && all.windows(2).all(|two| two[1] - two[0] >= BLOCK), "{low} to {high}: {all:?}");
            assert!(all.len() > 200, "{low} to {high}: {all:?}");
        }
        assert!(usual.map(|range| blocks(range).0.len() > 60).iter().all(|&many| many));
    }

    #[test]
    #[should_panic(expected = "PermissionDenied")]
    fn a_port_that_cannot_be_had_is_not_taken_for_a_taken_one() {
        assert_eq!(unless_taken::<()>(Err(io::ErrorKind::AddrInUse.into())), None);
        unless_taken::<()>(Err(io::ErrorKind::PermissionDenied.into()));
    }

    /// Two processes are as two of these: the system keeps them apart.
    #[test]
    fn no_two_holders_have_a_port() {
        let some = |held: &mut Held| (0..=BLOCK).map(|_| held.next()).collect::<HashSet<_>>();
        let (mut one, mut other) = (Held::NOTHING, Held::NOTHING);
        let (ports, others) = (some(&mut one), some(&mut other));
        assert!(ports.is_disjoint(&others), "{:?}", ports.intersection(&others));
    }
}
