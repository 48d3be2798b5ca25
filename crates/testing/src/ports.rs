//! Ports of this machine for the servers of tests: of one test alone, also while its server is down for a while.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::{Mutex, PoisonError};

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

/// So many free ports. Each is given once in a process, and to no other process that asks here. The kernel gives none of
/// them to outgoing connections or to who asks for any port.
///
/// # Panics
/// When there is none left.
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
            if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
                return port;
            }
        }
    }

    fn take_block(&mut self) {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").expect("the kernel's ports");
        let mut bounds = range.split_whitespace().map(|bound| bound.parse::<u16>().expect("a port"));
        let (low, high) = (bounds.next().expect("a range"), bounds.next().expect("a range"));
        // Blocks below and above the kernel's own.
        let below = (FIRST..low.max(FIRST)).step_by(BLOCK.into()).filter(|&first| low - first >= BLOCK);
        let above = (high..=u16::MAX - BLOCK).step_by(BLOCK.into()).map(|last| last + 1);
        let all: Vec<u16> = below.chain(above).collect();
        // Beginning anywhere: what is left over of an earlier process may still call its ports.
        let begin = std::process::id() as usize % all.len().max(1);
        for first in all[begin..].iter().chain(&all[..begin]) {
            let name = UnixAddr::from_abstract_name(format!("impresario test ports {first}")).expect("a short name");
            if let Ok(block) = UnixListener::bind_addr(&name) {
                self.blocks.push(block);
                self.left = *first..first + BLOCK;
                return;
            }
        }
        panic!("no ports are left outside of the kernel's, {low} to {high}, where {} blocks are", all.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ports_are_given_once_and_are_free() {
        let ports = free_ports(3 * usize::from(BLOCK));
        assert_eq!(ports.iter().collect::<HashSet<_>>().len(), ports.len());
        let address = free_address();
        let server = TcpListener::bind(&address).unwrap();
        assert!(!ports.contains(&server.local_addr().unwrap().port()));
        let chosen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        assert!(!ports.contains(&chosen));
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
