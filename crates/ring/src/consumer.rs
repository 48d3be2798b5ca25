//! The manager's side of the ring: validating a client's ring, and draining it.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::fs::SealFlags;
use rustix::mm::MapFlags;

use crate::access::{Access, Unseen};
use crate::cells::{Cells, Reading, Stuck};
use crate::layout::{MAGIC, Mapped, VERSION, slots_of};
use crate::producer::{map, unmap};

/// A position claimed but not completed for this long is skipped: its thread died, or the slot will be overwritten.
pub const STUCK_NS: u64 = 100_000_000;

const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Why a descriptor is not accepted as a ring.
#[derive(Debug)]
pub enum Unusable {
    /// It is not an ordinary memory file; accessing anything else could block or kill the manager.
    NotMemory,
    /// It is not sealed against a change of size.
    NotSealed,
    /// No ring has this size, in bytes.
    Size(u64),
    /// The header is not that of a ring, or of another version.
    Header,
    /// A system call failed.
    Io(io::Error),
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unusable::NotMemory => write!(f, "the ring is not a memory file"),
            Unusable::NotSealed => write!(f, "the ring is not sealed against a change of size"),
            Unusable::Size(bytes) => write!(f, "{bytes} bytes are not the size of a ring"),
            Unusable::Header => write!(f, "the ring's header is of another version or broken"),
            Unusable::Io(e) => write!(f, "the ring cannot be mapped: {e}"),
        }
    }
}

impl std::error::Error for Unusable {}

impl From<rustix::io::Errno> for Unusable {
    fn from(e: rustix::io::Errno) -> Unusable {
        Unusable::Io(e.into())
    }
}

/// The client wrote impossible positions: disconnect it. Accesses already returned remain valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

impl std::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the ring's positions are broken")
    }
}

impl std::error::Error for Corrupt {}

/// The result of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Accesses returned.
    pub accesses: u32,
    /// Positions skipped after [`STUCK_NS`].
    pub skipped: u32,
    /// Slots with invalid content.
    pub invalid: u32,
    /// More positions remain: the limit was reached, or one is claimed and incomplete. Drain again soon.
    pub more: bool,
}

/// Whether the manager may wait for the event descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Sleep {
    /// The ring is empty; the next push signals the event descriptor.
    Allowed,
    /// An access is waiting or being written: drain again within a millisecond.
    Pending,
}

/// The manager's end of the ring.
///
/// A manager that sleeps after every drain makes busy programs pay a system call per access. Keep draining every
/// millisecond or so while accesses arrive, and [`sleep`](Consumer::sleep) after a few empty drains.
#[derive(Debug)]
pub struct Consumer {
    ring: Mapped,
    reading: Reading,
}

impl Consumer {
    /// Maps a client's ring.
    ///
    /// # Errors
    /// [`Unusable`], with the reason for the log.
    pub fn map(memory: impl AsFd) -> Result<Consumer, Unusable> {
        let memory = memory.as_fd();
        // Check seals first: the kernel itself answers for memory files, and only they have seals. `fstatfs` on
        // anything else asks its file system, which may not answer.
        let seals = match rustix::fs::fcntl_get_seals(memory) {
            Ok(seals) => seals,
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::BADF) => return Err(Unusable::NotMemory),
            Err(e) => return Err(e.into()),
        };
        if rustix::fs::fstatfs(memory)?.f_type as u64 != TMPFS_MAGIC {
            return Err(Unusable::NotMemory);
        }
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(Unusable::NotSealed);
        }
        let bytes = u64::try_from(rustix::fs::fstat(memory)?.st_size).unwrap_or(0);
        let slots = slots_of(bytes).ok_or(Unusable::Size(bytes))?;
        // SAFETY: a new mapping at an address chosen by the kernel, of a file that cannot shrink.
        let ring = unsafe { map(std::ptr::null_mut(), slots, memory, MapFlags::SHARED) }.map_err(Unusable::Io)?;
        let tail = ring.tail().load(Acquire);
        let consumer = Consumer { ring, reading: Reading::new(tail) };
        let ring = &consumer.ring;
        if ring.magic() != MAGIC || ring.version() != VERSION || ring.slots_told() != slots {
            return Err(Unusable::Header);
        }
        Ok(consumer)
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// When the client made the ring, in nanoseconds of its `CLOCK_MONOTONIC`; untrusted.
    pub fn started_ns(&self) -> u64 {
        self.ring.started_ns()
    }

    /// Accesses dropped so far because the ring was full, as counted by the client.
    pub fn dropped(&self) -> u64 {
        self.ring.dropped().load(Relaxed)
    }

    /// What the client knows that it cannot tell of.
    pub fn unseen(&self) -> Unseen {
        let [bytes, rings] = self.ring.unseen().map(|count| count.load(Relaxed));
        Unseen { bytes, rings }
    }

    /// Returns at most `max` accesses in the order in which they were claimed. Visits no more than `max` positions,
    /// whatever the client writes meanwhile.
    ///
    /// # Errors
    /// [`Corrupt`] if the client broke the ring.
    pub fn drain(&mut self, max: u32, take: impl FnMut(Access)) -> Result<Drained, Corrupt> {
        self.drain_at(crate::now_ns(), max, take)
    }

    /// [`drain`](Consumer::drain) at a given time of one monotonic clock, in nanoseconds.
    ///
    /// # Errors
    /// As [`drain`](Consumer::drain).
    pub fn drain_at(&mut self, now_ns: u64, max: u32, take: impl FnMut(Access)) -> Result<Drained, Corrupt> {
        self.reading.walk(&self.ring, max, take, |stuck, at, claimed| match *stuck {
            Some(s) if at.wrapping_sub(s.claimed) as i64 >= 0 => {
                *stuck = Some(Stuck { since_ns: now_ns, claimed });
                false
            }
            Some(s) => now_ns.saturating_sub(s.since_ns) > STUCK_NS,
            None => {
                *stuck = Some(Stuck { since_ns: now_ns, claimed });
                false
            }
        })
    }

    /// Returns everything that is complete, skipping the rest: for a client that has ended.
    ///
    /// # Errors
    /// As [`drain`](Consumer::drain).
    pub fn drain_ended(&mut self, take: impl FnMut(Access)) -> Result<Drained, Corrupt> {
        self.reading.walk(&self.ring, self.ring.slots(), take, |_, _, _| true)
    }

    /// Announces that the manager is about to wait for the event descriptor. After waking, just drain; a push between
    /// this call and the wait is not lost.
    pub fn sleep(&mut self) -> Sleep {
        self.reading.sleep(&self.ring)
    }

    /// Asks the program to give hints itself, under this client number, or withdraws the request.
    pub fn want_helper(&mut self, client: Option<NonZeroU64>) {
        self.ring.helper().store(client.map_or(0, NonZeroU64::get), Relaxed);
    }

    /// Says that the client may pass over files of at most this many bytes: those that were empty when it opened them, and in a
    /// [lull](Consumer::set_lull) all; 0: none.
    pub fn set_small(&mut self, bytes: u32) {
        self.ring.small().store(bytes, Relaxed);
    }

    /// Begins a lull: the client passes small files over until [their reads have waited](Consumer::waited_ns) this long in all, in
    /// nanoseconds since it connected.
    pub fn set_lull(&mut self, until_waited_ns: u64) {
        self.ring.lull().store(until_waited_ns, Relaxed);
    }

    /// How long reads of files passed over have waited, in nanoseconds, as counted by the client.
    pub fn waited_ns(&self) -> u64 {
        self.ring.waited().load(Relaxed)
    }

    /// Bytes that the client read of files passed over, as counted by it.
    pub fn passed_over_bytes(&self) -> u64 {
        self.ring.passed_over().load(Relaxed)
    }

    /// Marks the ring as closed; the client reconnects if it wants advice.
    pub fn close(&mut self) {
        self.ring.closed().store(1, Release);
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.close();
        // SAFETY: no other code has this mapping's address.
        unsafe { unmap(&self.ring) };
    }
}
