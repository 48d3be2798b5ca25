//! Prefetching into the processor's caches.
//!
//! With a hundred thousand requests outstanding, a request's state is not cached when its turn comes, and each of its
//! cache lines costs a hundred nanoseconds or more. Code that knows the next request early prefetches it while working
//! on others. A prefetch is only a hint.

/// Prefetches a value.
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
