//! A lull: small files that are read fast need not be told of. A program that starts may open hundreds of them (modules of
//! Python), and telling of each would take it longer than reading it from memory.

use crate::access::{Op, flag};

/// Files of at most so many bytes are small.
pub const SMALL_FILE_BYTES: u32 = 256 << 10;

/// What a read from memory takes at most, beside a nanosecond for each byte.
const FAST_NS: u64 = 40_000;

/// Whether an access waited for nothing, as reads from memory do: nothing could have made it faster.
#[inline]
pub fn is_fast(op: Op, flags: u8, len_bytes: u64, duration_ns: u64) -> bool {
    let timed = op == Op::Read && flags & (flag::ASYNC | flag::IN_KERNEL) == 0;
    timed && duration_ns <= FAST_NS.saturating_add(len_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_whose_time_is_known_can_be_fast() {
        assert!(is_fast(Op::Read, flag::STREAM | flag::SHORT, 0, FAST_NS));
        assert!(!is_fast(Op::Read, 0, 0, FAST_NS + 1) && is_fast(Op::Read, 0, 100_000, 140_000));
        assert!(is_fast(Op::Read, 0, u64::MAX, u64::MAX));
        assert!(!is_fast(Op::Read, flag::ASYNC, 4096, 0) && !is_fast(Op::Read, flag::IN_KERNEL, 4096, 0));
        assert!(!is_fast(Op::Mmap, 0, 4096, 0));
    }
}
