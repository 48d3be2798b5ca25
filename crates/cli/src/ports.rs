//! Free ports of this machine.

use std::net::{IpAddr, TcpListener};

use anyhow::Context;

/// `count` different TCP ports of `host` that were free a moment ago.
///
/// All are bound at once while the system assigns them, so they differ. Another program may take one before the server
/// does; the server then reports it, and the configuration can be changed.
pub fn free(host: IpAddr, count: usize) -> anyhow::Result<Vec<u16>> {
    let held = (0..count).map(|_| TcpListener::bind((host, 0))).collect::<Result<Vec<_>, _>>();
    let held = held.with_context(|| format!("cannot find {count} free ports on {host}"))?;
    held.iter().map(|socket| Ok(socket.local_addr()?.port())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_can_be_taken() {
        let host = IpAddr::from([127, 0, 0, 1]);
        let mut ports = free(host, 8).unwrap();
        TcpListener::bind((host, ports[0])).unwrap();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 8);
    }
}
