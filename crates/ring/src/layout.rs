//! The layout of the shared memory.
//!
//! | bytes | what | written by |
//! |---|---|---|
//! | 0..8 | magic | client, once |
//! | 8..12 | version | client, once |
//! | 12..16 | slots, a power of two | client, once |
//! | 16..24 | `started_ns`, also the first position | client, once |
//! | 128..136 | `head`: positions claimed | producers |
//! | 256..264 | `tail`: positions drained | manager |
//! | 384..392 | `dropped`: accesses for which there was no place | producers |
//! | 512..516 | `asleep`: 1 while the manager waits for its event descriptor | both |
//! | 640..644 | `closed`: 1 when the manager drains no more | manager |
//! | 768..776 | `helper`: the client's number while the program is to give hints itself, else 0 | manager |
//! | 896..912 | `unseen`: bytes, and rings of io_uring, that cannot be told of | producers |
//! | 1024..1028 | reserved, 0: what earlier libraries take for "a lull is now" | nobody |
//! | 1152..1160 | `passed_over`: bytes read of files passed over | producers |
//! | 1280..1288 | `waited`: nanoseconds that reads of these files have waited | producers |
//! | 1408..1416 | `lull`: small files are passed over while `waited` is below this | manager |
//! | 1416..1420 | `small`: files of at most this many bytes may be passed over; 0: none | manager |
//! | 4096.. | slots of 40 bytes: `seq`, then the four words of an access | producers |
//!
//! Position `p` is in slot `p mod slots` and complete when that slot's `seq` is `p + 1`. Positions begin at the ring's
//! start time in nanoseconds: no thread pushes once per nanosecond, so a write begun in an earlier ring at the same
//! address never looks like one of this ring. Numbers are in native byte order: both sides run on the same machine.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::cells::Cells;

/// Bytes before the first slot.
pub const HEADER_BYTES: usize = 4096;
/// Bytes of a slot.
pub const SLOT_BYTES: usize = 40;
/// Default number of slots.
pub const SLOTS: u32 = 4096;
/// Minimum number of slots.
pub const SLOTS_MIN: u32 = 64;
/// Maximum number of slots: 640 KiB. The library creates [`SLOTS`]; the manager maps whatever programs send.
pub const SLOTS_MAX: u32 = 1 << 14;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"IMPRRING");
pub(crate) const VERSION: u32 = 1;

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const SLOTS_AT: usize = 12;
const STARTED_AT: usize = 16;
const HEAD_AT: usize = 128;
const TAIL_AT: usize = 256;
const DROPPED_AT: usize = 384;
const ASLEEP_AT: usize = 512;
const CLOSED_AT: usize = 640;
const HELPER_AT: usize = 768;
const UNSEEN_AT: usize = 896;
const UNSEEN_RINGS_AT: usize = 904;
const PASSED_OVER_AT: usize = 1152;
const WAITED_AT: usize = 1280;
const LULL_AT: usize = 1408;
const SMALL_AT: usize = 1416;

/// Bytes of a ring's shared memory; `slots` is at most [`SLOTS_MAX`].
pub const fn ring_bytes(slots: u32) -> usize {
    HEADER_BYTES + slots as usize * SLOT_BYTES
}

/// The number of slots of a ring of this many bytes, if allowed.
pub(crate) fn slots_of(bytes: u64) -> Option<u32> {
    let slots = u32::try_from(bytes.checked_sub(HEADER_BYTES as u64)? / SLOT_BYTES as u64).ok()?;
    let allowed = slots.is_power_of_two() && (SLOTS_MIN..=SLOTS_MAX).contains(&slots);
    (allowed && ring_bytes(slots) as u64 == bytes).then_some(slots)
}

/// A mapping of a ring. Accessed only through atomics: the other side may write at any time.
#[derive(Debug)]
pub(crate) struct Mapped {
    start: NonNull<u8>,
    slots: u32,
}

// SAFETY: the memory is shared with other processes anyway; it is accessed only through atomics.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// # Safety
    /// `start` is the page-aligned start of a readable and writable mapping of `ring_bytes(slots)` bytes that stays
    /// mapped as long as the result lives, and `slots` is a power of two.
    pub(crate) unsafe fn new(start: NonNull<u8>, slots: u32) -> Mapped {
        Mapped { start, slots }
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        ring_bytes(self.slots)
    }

    #[inline]
    fn u64_at(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at + 8 <= self.bytes());
        // SAFETY: inside the mapping (callers pass the constants above or a slot's place), aligned; see `new`.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    #[inline]
    fn u32_at(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at.is_multiple_of(4) && at + 4 <= HEADER_BYTES);
        // SAFETY: as in `u64_at`.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// Writes the client's constant fields.
    pub(crate) fn initialize(&self, started_ns: u64) {
        self.u32_at(VERSION_AT).store(VERSION, Ordering::Relaxed);
        self.u32_at(SLOTS_AT).store(self.slots, Ordering::Relaxed);
        self.u64_at(STARTED_AT).store(started_ns, Ordering::Relaxed);
        self.head().store(started_ns, Ordering::Relaxed);
        self.tail().store(started_ns, Ordering::Relaxed);
        self.asleep().store(1, Ordering::Relaxed);
        self.u64_at(MAGIC_AT).store(MAGIC, Ordering::Release);
    }

    pub(crate) fn magic(&self) -> u64 {
        self.u64_at(MAGIC_AT).load(Ordering::Acquire)
    }

    pub(crate) fn version(&self) -> u32 {
        self.u32_at(VERSION_AT).load(Ordering::Relaxed)
    }

    pub(crate) fn slots_told(&self) -> u32 {
        self.u32_at(SLOTS_AT).load(Ordering::Relaxed)
    }

    pub(crate) fn started_ns(&self) -> u64 {
        self.u64_at(STARTED_AT).load(Ordering::Relaxed)
    }

    /// Bytes, and rings, of [`Unseen`](crate::Unseen).
    pub(crate) fn unseen(&self) -> [&AtomicU64; 2] {
        [UNSEEN_AT, UNSEEN_RINGS_AT].map(|at| self.u64_at(at))
    }

    #[inline]
    pub(crate) fn small(&self) -> &AtomicU32 {
        self.u32_at(SMALL_AT)
    }

    pub(crate) fn passed_over(&self) -> &AtomicU64 {
        self.u64_at(PASSED_OVER_AT)
    }

    #[inline]
    pub(crate) fn waited(&self) -> &AtomicU64 {
        self.u64_at(WAITED_AT)
    }

    #[inline]
    pub(crate) fn lull(&self) -> &AtomicU64 {
        self.u64_at(LULL_AT)
    }

    #[inline]
    pub(crate) fn helper(&self) -> &AtomicU64 {
        self.u64_at(HELPER_AT)
    }
}

impl Cells for Mapped {
    type U64 = AtomicU64;
    type U32 = AtomicU32;

    fn slots(&self) -> u32 {
        self.slots
    }

    #[inline]
    fn head(&self) -> &AtomicU64 {
        self.u64_at(HEAD_AT)
    }

    #[inline]
    fn tail(&self) -> &AtomicU64 {
        self.u64_at(TAIL_AT)
    }

    fn dropped(&self) -> &AtomicU64 {
        self.u64_at(DROPPED_AT)
    }

    #[inline]
    fn asleep(&self) -> &AtomicU32 {
        self.u32_at(ASLEEP_AT)
    }

    #[inline]
    fn closed(&self) -> &AtomicU32 {
        self.u32_at(CLOSED_AT)
    }

    #[inline]
    fn slot(&self, p: u64) -> (&AtomicU64, [&AtomicU64; 4]) {
        let at = HEADER_BYTES + (p & u64::from(self.slots - 1)) as usize * SLOT_BYTES;
        (self.u64_at(at), [self.u64_at(at + 8), self.u64_at(at + 16), self.u64_at(at + 24), self.u64_at(at + 32)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library of the first release would pass small files over for ever.
    #[test]
    fn a_new_manager_tells_an_earlier_library_of_no_lull() {
        let mut memory = vec![0u64; ring_bytes(SLOTS_MIN) / 8 + 512];
        let start = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: still inside, since that much more was asked for.
        let start = unsafe { start.add(start.align_offset(4096)) };
        // SAFETY: so many bytes from a page's start on, which live until the end of this test.
        let mapped = unsafe { Mapped::new(NonNull::new(start).unwrap(), SLOTS_MIN) };
        mapped.initialize(1);
        mapped.small().store(u32::MAX, Ordering::Relaxed);
        mapped.lull().store(u64::MAX, Ordering::Relaxed);
        assert_eq!(mapped.u64_at(1024).load(Ordering::Relaxed), 0);
        let words = [mapped.small().load(Ordering::Relaxed).into(), mapped.lull().load(Ordering::Relaxed)];
        assert_eq!(words, [u64::from(u32::MAX), u64::MAX], "they stand apart");
    }

    #[test]
    fn only_allowed_sizes_are_rings() {
        assert_eq!(slots_of(ring_bytes(SLOTS) as u64), Some(SLOTS));
        assert_eq!(slots_of(ring_bytes(SLOTS_MIN) as u64), Some(SLOTS_MIN));
        assert_eq!(slots_of(ring_bytes(SLOTS_MAX) as u64), Some(SLOTS_MAX));
        let wrong = [0, 4095, 4096, 4136, ring_bytes(SLOTS) as u64 + 1, ring_bytes(SLOTS) as u64 - 1];
        for bytes in wrong.into_iter().chain([ring_bytes(32) as u64, ring_bytes(3000) as u64, u64::MAX, 1 << 40]) {
            assert_eq!(slots_of(bytes), None, "{bytes}");
        }
        assert_eq!(slots_of(ring_bytes(SLOTS_MAX) as u64 * 2 - HEADER_BYTES as u64), None);
    }
}
