//! How much of what a program read was seen: the kernel's account of a process beside what the manager was told.
//!
//! The account (`/proc/PID/io`, Linux's `taskstats` accounting) has two sums. What calls returned (`rchar`) holds reads of
//! pipes and sockets too, but neither memory maps nor asynchronous reads. What the process made the device read
//! (`read_bytes`) holds those, the kernel's read-ahead too, and nothing that was in memory already. A process that waits
//! for a child takes over its sums, so those of a program that has ended are of its children as well.

use std::fmt;
use std::io;

use impresario_base::units::show_bytes;
use serde::{Deserialize, Serialize};

/// Differences below this are not told: a program's start alone reads as much.
const SLIGHT_BYTES: u64 = 1 << 20;

/// What the kernel counted for a process and the children that it waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Account {
    /// Bytes that reading calls returned.
    pub called_bytes: u64,
    /// Bytes that were read from a device for it.
    pub device_bytes: u64,
}

impl Account {
    /// Of a process that runs, or has ended and was not waited for yet.
    ///
    /// # Errors
    /// What reading `/proc/PID/io` reports; a kernel that keeps no such account has no such file.
    pub fn of(pid: u32) -> io::Result<Account> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
        Account::parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no account of a process"))
    }

    fn parse(text: &str) -> Option<Account> {
        let number = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse::<u64>().ok())
        };
        Some(Account { called_bytes: number("rchar")?, device_bytes: number("read_bytes")? })
    }

    /// Both together.
    pub fn and(self, other: Account) -> Account {
        Account {
            called_bytes: self.called_bytes.saturating_add(other.called_bytes),
            device_bytes: self.device_bytes.saturating_add(other.device_bytes),
        }
    }
}

/// What was seen of a run, and what was not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Coverage {
    /// Bytes of the reads that the manager was told of.
    pub seen_bytes: u64,
    /// Bytes of the files that the program mapped into memory, as often as it did.
    pub mapped_bytes: u64,
    /// Bytes of reads by files in a table of a ring of io_uring.
    #[serde(default)]
    pub unseen_bytes: u64,
    /// Rings of io_uring that cannot be looked into.
    #[serde(default)]
    pub unseen_rings: u64,
    /// Bytes that the program's calls read.
    pub called_bytes: u64,
    /// Bytes that came from a device for it.
    pub device_bytes: u64,
    /// Accesses that were told and lost.
    pub lost_accesses: u64,
    /// Whether all files were watched, not only those with hints.
    pub all_files: bool,
}

impl Coverage {
    /// What was read in calls that were not seen. What was seen and is in no account, such as asynchronous reads, is not
    /// set off against it.
    pub fn unseen_calls_bytes(&self) -> u64 {
        self.called_bytes.saturating_sub(self.seen_bytes)
    }

    /// What came from a device and can be of no call: at least so much was read through memory maps or io_uring, or was
    /// read ahead by the kernel.
    pub fn beyond_calls_bytes(&self) -> u64 {
        self.device_bytes.saturating_sub(self.called_bytes.max(self.seen_bytes))
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |bytes: u64| show_bytes(bytes as f64);
        write!(f, "Saw {} of {} read", shown(self.seen_bytes), shown(self.called_bytes.max(self.seen_bytes)))?;
        if self.unseen_calls_bytes() >= SLIGHT_BYTES {
            let of = if self.all_files { "by calls that were not seen" } else { "of what has no hints, or unseen" };
            write!(f, "; {} {of}", shown(self.unseen_calls_bytes()))?;
        }
        if self.beyond_calls_bytes() >= SLIGHT_BYTES {
            let ways = "from the device by memory map, io_uring or read-ahead";
            write!(f, "; at least {} more {ways}", shown(self.beyond_calls_bytes()))?;
        }
        if self.mapped_bytes > 0 {
            write!(f, "; {} of files were mapped", shown(self.mapped_bytes))?;
        }
        if self.unseen_bytes > 0 {
            write!(f, "; {} by files in a table of io_uring were not seen", shown(self.unseen_bytes))?;
        }
        if self.unseen_rings > 0 {
            let s = if self.unseen_rings == 1 { "" } else { "s" };
            write!(f, "; {} ring{s} of io_uring cannot be looked into", self.unseen_rings)?;
        }
        if self.lost_accesses > 0 {
            write!(f, "; {} accesses came too fast to be told", self.lost_accesses)?;
        }
        write!(f, ".")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_account_is_read() {
        let text =
            "rchar: 323934931\nwchar: 323929600\nsyscr: 632687\nsyscw: 632675\nread_bytes: 4096\nwrite_bytes: 0\n";
        assert_eq!(Account::parse(text), Some(Account { called_bytes: 323_934_931, device_bytes: 4096 }));
        assert_eq!((Account::parse("rchar: 1\n"), Account::parse("rchar: x\nread_bytes: 1\n")), (None, None));
        match Account::of(std::process::id()) {
            Ok(ours) => assert!(ours.called_bytes > 0),
            // A kernel without the account.
            Err(e) => assert_eq!(e.kind(), io::ErrorKind::NotFound),
        }
    }

    #[test]
    fn what_was_not_seen_is_told() {
        let mib = |n: u64| n << 20;
        let all =
            Coverage { seen_bytes: mib(214), called_bytes: mib(214) + 1000, all_files: true, ..Coverage::default() };
        assert_eq!(all.to_string(), "Saw 214 MiB of 214 MiB read.");
        let some = Coverage { seen_bytes: mib(212), device_bytes: mib(300), mapped_bytes: mib(400), ..all };
        assert_eq!(
            some.to_string(),
            "Saw 212 MiB of 214 MiB read; 2 MiB by calls that were not seen; at least 86 MiB more from the device by \
             memory map, io_uring or read-ahead; 400 MiB of files were mapped."
        );
        let hinted = Coverage { seen_bytes: mib(200), all_files: false, ..all };
        assert_eq!(hinted.to_string(), "Saw 200 MiB of 214 MiB read; 14 MiB of what has no hints, or unseen.");
        let rings = Coverage { unseen_bytes: mib(12), unseen_rings: 1, ..all };
        assert_eq!(
            rings.to_string(),
            "Saw 214 MiB of 214 MiB read; 12 MiB by files in a table of io_uring were not seen; 1 ring of io_uring cannot \
             be looked into."
        );
        // libaio's reads are told and in no account of calls.
        let asynchronous = Coverage { called_bytes: mib(1), device_bytes: mib(214), lost_accesses: 3, ..all };
        assert_eq!(asynchronous.to_string(), "Saw 214 MiB of 214 MiB read; 3 accesses came too fast to be told.");
    }
}
