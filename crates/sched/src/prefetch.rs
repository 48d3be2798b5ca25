//! What is needed soon is fetched into the processor's caches meanwhile.
//!
//! Where a hundred thousand requests are outstanding, what is known of one lies in no cache when its turn comes, and
//! each of its lines would be waited for, a hundred nanoseconds and more. Whoever knows early enough which one comes
//! next can have it fetched while others are dealt with. A hint only: nothing depends on it.

/// Fetches a thing.
#[inline]
pub fn fetch<T>(thing: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let place = std::ptr::from_ref(thing).cast::<i8>().wrapping_add(line);
        // SAFETY: a prefetch changes nothing that a program can see and never faults, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = thing;
}
