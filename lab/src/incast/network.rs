//! A machine room of its own: clients, a switch and a server in network namespaces, with a slow port toward the server.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use impresario_workload::kernel_disk::tool;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// The address of the server.
pub const SERVER: &str = "10.77.0.1";
const CLIENTS: &str = "10.77.0.2";
/// The switch's port toward the server.
const PORT: &str = "server-port";
/// What the port sends at once, bytes: two packets.
const BURST_BYTES: u64 = 3_028;

/// A network namespace; gone when nobody has it.
pub struct Namespace(OwnedFd);

impl Namespace {
    fn new() -> Result<Namespace> {
        // Of a thread of its own, which ends: the program stays where it is.
        let made = std::thread::spawn(|| -> Result<OwnedFd> {
            // SAFETY: only the network of this thread becomes another one, which nothing depends on.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
                .context("making a network namespace: it needs root's rights")?;
            Ok(File::open("/proc/thread-self/ns/net")?.into())
        });
        Ok(Namespace(made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?))
    }

    /// That of the calling thread.
    pub fn own() -> Result<Namespace> {
        Ok(Namespace(File::open("/proc/thread-self/ns/net")?.into()))
    }

    /// Moves the calling thread, and what it starts, into it.
    pub fn enter(&self) -> Result<()> {
        move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
            .context("entering a network namespace")
    }

    /// Does something in it, on a thread of its own.
    pub fn within<T: Send>(&self, what: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| self.enter().and_then(|()| what()));
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// Clients and a server at a switch.
pub struct Room {
    pub clients: Namespace,
    pub server: Namespace,
    switch: Namespace,
}

impl Room {
    /// Links without limit but for the port toward the server, which [`Room::limit`] sets.
    pub fn new(congestion: &str) -> Result<Room> {
        let room = Room { clients: Namespace::new()?, server: Namespace::new()?, switch: Namespace::new()? };
        let (clients, server) = (room.clients.path(), room.server.path());
        room.switch.within(|| {
            ip("link add name switch type bridge")?;
            ip("link set switch up")?;
            for (port, other, namespace) in [("client-port", "clients", &clients), (PORT, "server", &server)] {
                ip(&format!("link add name {port} type veth peer name {other}"))?;
                ip(&format!("link set {other} netns {namespace}"))?;
                ip(&format!("link set {port} master switch up"))?;
            }
            Ok(())
        })?;
        for (namespace, link, address) in [(&room.clients, "clients", CLIENTS), (&room.server, "server", SERVER)] {
            namespace.within(|| {
                ip("link set lo up")?;
                // Each segment is a packet, as on a wire: a buffer counts packets of the size that a switch sees.
                ip(&format!("link set {link} gso_max_segs 1 up"))?;
                ip(&format!("address add {address}/24 dev {link}"))?;
                set("tcp_congestion_control", congestion)?;
                set("tcp_no_metrics_save", "1")
            })?;
        }
        Ok(room)
    }

    /// The rate of the port toward the server, and the bytes that it keeps waiting.
    pub fn limit(&self, bits_per_s: u64, buffer_bytes: u64) -> Result<()> {
        let limit = format!("rate {bits_per_s}bit burst {BURST_BYTES} limit {buffer_bytes}");
        self.switch.within(|| run("tc", &format!("qdisc replace dev {PORT} root tbf {limit}")).map(drop))
    }

    /// Packets that the port has dropped.
    pub fn dropped(&self) -> Result<u64> {
        let said = self.switch.within(|| run("tc", &format!("-s qdisc show dev {PORT}")))?;
        let after = said.split_once("dropped ").map(|(_, after)| after).unwrap_or_default();
        let number: String = after.chars().take_while(char::is_ascii_digit).collect();
        number.parse().with_context(|| format!("no number of dropped packets in what tc says: {said}"))
    }

    /// How often a client had to wait for a timeout, and segments that it sent again.
    pub fn waits(&self) -> Result<(u64, u64)> {
        self.clients.within(|| {
            let text =
                |file: &str| Ok::<_, anyhow::Error>(std::fs::read_to_string(format!("/proc/thread-self/net/{file}"))?);
            Ok((counter(&text("netstat")?, "TcpExt:", "TCPTimeouts")?, counter(&text("snmp")?, "Tcp:", "RetransSegs")?))
        })
    }
}

/// A counter of the kernel's tables of two lines, names and values.
fn counter(table: &str, of: &str, name: &str) -> Result<u64> {
    let mut lines = table.lines().filter(|line| line.starts_with(of)).map(str::split_whitespace);
    let (names, values) = (lines.next(), lines.next());
    let mut both = names.into_iter().flatten().zip(values.into_iter().flatten());
    let (_, value) = both.find(|(known, _)| *known == name).with_context(|| format!("the kernel counts no {name}"))?;
    Ok(value.parse()?)
}

fn set(key: &str, value: &str) -> Result<()> {
    let file = format!("/proc/sys/net/ipv4/{key}");
    std::fs::write(&file, value).with_context(|| format!("writing {value} to {file}"))
}

fn ip(words: &str) -> Result<()> {
    run("ip", words).map(drop)
}

/// Runs a command of iproute2; what it wrote.
fn run(program: &str, words: &str) -> Result<String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    tool(Command::new(program).env("PATH", path).args(words.split(' ')).stdin(Stdio::null()))
        .with_context(|| words.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_name() {
        let table = "TcpExt: A TCPTimeouts B\nTcpExt: 1 22 3\nIpExt: TCPTimeouts\nIpExt: 7\n";
        assert_eq!(counter(table, "TcpExt:", "TCPTimeouts").unwrap(), 22);
        assert!(counter(table, "TcpExt:", "C").is_err());
    }
}
