//! The manager's side of the ring: checking what a client sent, and draining it.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use rustix::fs::SealFlags;
use rustix::mm::MapFlags;

use crate::access::Access;
use crate::layout::{MAGIC, Mapped, VERSION, slots_of};
use crate::producer::{map, unmap};

/// A position that was claimed and not completed for so long is given up: its thread died, or will be overwritten.
pub const STUCK_NS: u64 = 100_000_000;

const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Why a descriptor is not taken as a ring.
#[derive(Debug)]
pub enum Unusable {
    /// It is not an ordinary memory file: anything else could block or end whoever looks into it.
    NotMemory,
    /// It is not sealed against a change of size.
    NotSealed,
    /// Its size, in bytes, is that of no ring.
    Size(u64),
    /// The header is of no ring, or of another version.
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

/// The client wrote positions that cannot be: cut it off. Accesses handed out before stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

impl std::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the ring's positions are broken")
    }
}

impl std::error::Error for Corrupt {}

/// What one drain did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Accesses handed out.
    pub accesses: u32,
    /// Positions given up after [`STUCK_NS`].
    pub skipped: u32,
    /// Slots whose content was no access.
    pub invalid: u32,
    /// Whether positions remain: the limit was reached, or one is claimed and not complete. Drain again soon.
    pub more: bool,
}

/// Whether the manager may wait for the event descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Sleep {
    /// Nothing waits; the next push signals the event descriptor.
    Allowed,
    /// Something waits or is being written: drain again, after a millisecond at the latest.
    Pending,
}

/// The ring as the manager drains it.
///
/// A manager that sleeps after every drain makes busy programs pay a system call for every access. Rather keep draining
/// every millisecond or so while accesses come, and [`sleep`](Consumer::sleep) when a few drains found nothing.
#[derive(Debug)]
pub struct Consumer {
    ring: Mapped,
    /// Our own word on what was drained; the shared one is only told.
    tail: u64,
    /// When draining came to stand at `tail`, and what was claimed then.
    stuck: Option<Stuck>,
}

#[derive(Clone, Copy, Debug)]
struct Stuck {
    since_ns: u64,
    claimed: u64,
}

impl Consumer {
    /// Maps a ring that a client sent.
    ///
    /// # Errors
    /// [`Unusable`], with the reason for the log.
    pub fn map(memory: impl AsFd) -> Result<Consumer, Unusable> {
        let memory = memory.as_fd();
        // Seals first: the kernel answers for memory files itself, and only they have seals. `fstatfs` of anything else
        // asks its file system, which may not answer.
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
        // SAFETY: a new mapping at a place that the kernel chooses, of a file that can never be shorter.
        let ring = unsafe { map(std::ptr::null_mut(), slots, memory, MapFlags::SHARED) }.map_err(Unusable::Io)?;
        let tail = ring.tail().load(Acquire);
        let consumer = Consumer { ring, tail, stuck: None };
        let ring = &consumer.ring;
        if ring.magic() != MAGIC || ring.version() != VERSION || ring.slots_told() != slots {
            return Err(Unusable::Header);
        }
        Ok(consumer)
    }

    /// Slots of the ring.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// When the client made the ring, in nanoseconds of its `CLOCK_MONOTONIC`; any number, if it lies.
    pub fn started_ns(&self) -> u64 {
        self.ring.started_ns()
    }

    /// Accesses that found no place so far, as the client counts them.
    pub fn dropped(&self) -> u64 {
        self.ring.dropped().load(Relaxed)
    }

    /// Hands out at most `max` accesses in the order in which they were claimed. Bounded: looks at no more than `max`
    /// positions, whatever the client writes meanwhile.
    ///
    /// # Errors
    /// [`Corrupt`] when the client broke the ring.
    pub fn drain(&mut self, max: u32, take: impl FnMut(Access)) -> Result<Drained, Corrupt> {
        self.drain_at(crate::now_ns(), max, take)
    }

    /// [`drain`](Consumer::drain) at a given time of one monotonic clock, in nanoseconds.
    ///
    /// # Errors
    /// As [`drain`](Consumer::drain).
    pub fn drain_at(&mut self, now_ns: u64, max: u32, take: impl FnMut(Access)) -> Result<Drained, Corrupt> {
        self.walk(max, take, |stuck, at, claimed| match *stuck {
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

    /// Hands out everything that is complete, passing over what is not: for a client that has ended.
    ///
    /// # Errors
    /// As [`drain`](Consumer::drain).
    pub fn drain_ended(&mut self, take: impl FnMut(Access)) -> Result<Drained, Corrupt> {
        self.walk(self.ring.slots(), take, |_, _, _| true)
    }

    /// `give_up(stuck, position, claimed)` says whether an incomplete position is passed over.
    fn walk(
        &mut self,
        max: u32,
        mut take: impl FnMut(Access),
        mut give_up: impl FnMut(&mut Option<Stuck>, u64, u64) -> bool,
    ) -> Result<Drained, Corrupt> {
        let mut done = Drained::default();
        let head = self.ring.head().load(Acquire);
        let waiting = head.wrapping_sub(self.tail);
        if waiting > u64::from(self.ring.slots()) {
            return Err(Corrupt);
        }
        let limit = waiting.min(u64::from(max));
        for _ in 0..limit {
            let (seq, words) = self.ring.slot(self.tail);
            if seq.load(Acquire) == self.tail.wrapping_add(1) {
                match Access::from_words(words.map(|w| w.load(Relaxed))) {
                    Some(access) => {
                        take(access);
                        done.accesses += 1;
                    }
                    None => done.invalid += 1,
                }
            } else if give_up(&mut self.stuck, self.tail, head) {
                done.skipped += 1;
            } else {
                break;
            }
            self.tail = self.tail.wrapping_add(1);
        }
        if self.stuck.is_some_and(|s| self.tail.wrapping_sub(s.claimed) as i64 >= 0) {
            self.stuck = None;
        }
        self.ring.tail().store(self.tail, Release);
        done.more = self.tail != head;
        Ok(done)
    }

    /// Says that the manager is about to wait for the event descriptor. After waking, just drain; a push between this
    /// and the wait is not lost.
    pub fn sleep(&mut self) -> Sleep {
        self.ring.asleep().store(1, SeqCst);
        if self.ring.head().load(SeqCst) == self.tail {
            return Sleep::Allowed;
        }
        self.ring.asleep().store(0, SeqCst);
        Sleep::Pending
    }

    /// Says that the program is to give hints itself and which number to say, or that it need not (any more).
    pub fn want_helper(&mut self, client: Option<NonZeroU64>) {
        self.ring.helper().store(client.map_or(0, NonZeroU64::get), Relaxed);
    }

    /// Says that this ring is drained no more; the client reconnects when it wants advice.
    pub fn close(&mut self) {
        self.ring.closed().store(1, Release);
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.close();
        // SAFETY: nobody else has this mapping's address.
        unsafe { unmap(&self.ring) };
    }
}
