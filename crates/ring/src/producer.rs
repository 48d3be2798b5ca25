//! The program's side of the ring: creating it and pushing into it.

use std::ffi::c_void;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::access::{Access, Unseen};
use crate::cells::{Cells, push};
use crate::layout::{Mapped, SLOTS_MAX, SLOTS_MIN, ring_bytes};
use crate::now_ns;

/// The result of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Push {
    /// It is in the ring, and the manager is awake.
    Stored,
    /// It is in the ring, and the manager sleeps: write 1 to the event descriptor. At most one thread gets this result.
    Wake,
    /// The ring is full; the access is counted as dropped.
    Full,
    /// The manager has stopped draining this ring.
    Closed,
}

/// The program's end of the ring, for any thread and for signal handlers.
///
/// A forked child still has its parent's ring: call [`renew`](Producer::renew) before pushing there.
#[derive(Debug)]
pub struct Producer {
    ring: Mapped,
}

impl Producer {
    /// Creates a ring of `slots` slots (a power of two from [`SLOTS_MIN`] to [`SLOTS_MAX`]). The descriptor, closed on
    /// exec and sealed against resizing, is for the manager.
    ///
    /// # Errors
    /// `EINVAL` for an invalid number of slots, and the errors of `memfd_create`, `ftruncate`, `mmap` and `fcntl`.
    pub fn create(slots: u32) -> io::Result<(Producer, OwnedFd)> {
        if !slots.is_power_of_two() || !(SLOTS_MIN..=SLOTS_MAX).contains(&slots) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let memory = memory(slots)?;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let ring = unsafe { map(std::ptr::null_mut(), slots, &memory, MapFlags::SHARED)? };
        ring.initialize(now_ns());
        seal(&memory)?;
        Ok((Producer { ring }, memory))
    }

    /// Maps a new, empty ring at the same address, for a new manager or in a forked child. Other threads may push
    /// meanwhile: their accesses go to the old or new ring, or are lost.
    ///
    /// # Errors
    /// The errors of `memfd_create`, `ftruncate`, `mmap` and `fcntl`; the old ring then stays in place.
    pub fn renew(&self) -> io::Result<OwnedFd> {
        let slots = self.ring.slots();
        let memory = memory(slots)?;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let fresh = unsafe { map(std::ptr::null_mut(), slots, &memory, MapFlags::SHARED)? };
        // Initialise it before any thread can push into it.
        fresh.initialize(now_ns());
        seal(&memory)?;
        // SAFETY: only this function uses `fresh`, and not after this.
        unsafe { unmap(&fresh) };
        let place = self.ring.start().as_ptr().cast();
        // SAFETY: atomically replaces exactly this ring's mapping by another of the same length.
        unsafe { map(place, slots, &memory, MapFlags::SHARED | MapFlags::FIXED)? };
        Ok(memory)
    }

    /// Bytes of the shared memory.
    pub fn ring_bytes(&self) -> usize {
        self.ring.bytes()
    }

    /// Accesses dropped because this ring was full.
    pub fn dropped(&self) -> u64 {
        self.ring.dropped().load(Relaxed)
    }

    /// Counts accesses as dropped of which nothing is known but that they were made.
    pub fn add_dropped(&self, accesses: u64) {
        self.ring.dropped().fetch_add(accesses, Relaxed);
    }

    /// Adds what the program does and cannot be told of.
    pub fn add_unseen(&self, more: Unseen) {
        let [bytes, rings] = self.ring.unseen();
        bytes.fetch_add(more.bytes, Relaxed);
        rings.fetch_add(more.rings, Relaxed);
    }

    /// Files of at most this many bytes may be passed over: those that were empty when they were opened, and all while
    /// [there is a lull](Producer::is_lull); 0: none.
    #[inline]
    pub fn small_bytes(&self) -> u32 {
        self.ring.small().load(Relaxed)
    }

    /// Whether small files are passed over now.
    #[inline]
    pub fn is_lull(&self) -> bool {
        self.ring.waited().load(Relaxed) < self.ring.lull().load(Relaxed)
    }

    /// Adds how long a read of a file passed over waited, in nanoseconds. Whether it is passed over, too; else it ends the lull.
    #[inline]
    pub fn may_wait(&self, ns: u64) -> bool {
        ns == 0 || self.ring.waited().fetch_add(ns, Relaxed).saturating_add(ns) < self.ring.lull().load(Relaxed)
    }

    /// Adds what the program read of a file passed over.
    pub fn add_passed_over(&self, bytes: u64) {
        self.ring.passed_over().fetch_add(bytes, Relaxed);
    }

    /// Whether the ring has room now.
    pub fn has_room(&self) -> bool {
        let (tail, head) = (self.ring.tail().load(Acquire), self.ring.head().load(Relaxed));
        // A tail ahead of the loaded head means that the head is outdated: there is room.
        (head.wrapping_sub(tail) as i64) < i64::from(self.ring.slots())
    }

    /// Whether the manager has stopped draining.
    pub fn is_closed(&self) -> bool {
        self.ring.closed().load(Relaxed) != 0
    }

    /// The number for [`Helper`](crate::message::ToManager::Helper), if the manager asks this program to give hints
    /// itself.
    #[inline]
    pub fn helper_wanted(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.ring.helper().load(Relaxed))
    }

    /// Pushes one access. Never waits, allocates or fails; leaves errno unchanged.
    #[inline]
    pub fn push(&self, access: Access) -> Push {
        push(&self.ring, access)
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        // SAFETY: no other code has this mapping's address.
        unsafe { unmap(&self.ring) };
    }
}

fn memory(slots: u32) -> io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create(c"impresario-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, ring_bytes(slots) as u64)?;
    Ok(memory)
}

fn seal(memory: &OwnedFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?)
}

/// # Safety
/// With `MapFlags::FIXED`, `place` must be the start of a replaceable mapping of the same length.
pub(crate) unsafe fn map(place: *mut c_void, slots: u32, memory: impl AsFd, flags: MapFlags) -> io::Result<Mapped> {
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: guaranteed by the caller.
    let start = unsafe { rustix::mm::mmap(place, ring_bytes(slots), both, flags, memory, 0)? };
    let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: just mapped with this length; the owner of the result unmaps it last.
    Ok(unsafe { Mapped::new(start, slots) })
}

/// # Safety
/// The mapping must not be used afterwards.
pub(crate) unsafe fn unmap(ring: &Mapped) {
    // SAFETY: the whole mapping of `map`; the caller guarantees the rest. On failure the memory merely stays mapped.
    let _ = unsafe { rustix::mm::munmap(ring.start().as_ptr().cast(), ring.bytes()) };
}
