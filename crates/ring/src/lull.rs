//! A lull: small files that are read fast are passed over. A program that starts may open hundreds of them (modules of
//! Python), and reporting each of them would take longer than reading it from memory.

use crate::access::{Op, flag};

/// Files of at most so many bytes are small.
pub const SMALL_FILE_BYTES: u32 = 256 << 10;

/// What a read from memory takes at most, beside a nanosecond for each byte.
const FAST_NS: u64 = 40_000;

/// How long a read waited, in nanoseconds: all of its time, or 0 where one from memory may take as long. `None` for other accesses,
/// and for reads whose time is unknown.
#[inline]
pub fn waited_ns(op: Op, flags: u8, len_bytes: u64, duration_ns: u64) -> Option<u64> {
    let timed = op == Op::Read && flags & (flag::ASYNC | flag::IN_KERNEL) == 0;
    timed.then(|| match duration_ns > FAST_NS.saturating_add(len_bytes) {
        true => duration_ns,
        false => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_waits_when_it_takes_longer_than_one_from_memory() {
        assert_eq!(waited_ns(Op::Read, flag::STREAM | flag::SHORT, 0, FAST_NS), Some(0));
        assert_eq!(waited_ns(Op::Read, 0, 0, FAST_NS + 1), Some(FAST_NS + 1));
        assert_eq!(waited_ns(Op::Read, 0, 100_000, 140_000), Some(0));
        assert_eq!(waited_ns(Op::Read, 0, u64::MAX, u64::MAX), Some(0));
        let unknown = [(Op::Read, flag::ASYNC), (Op::Read, flag::IN_KERNEL), (Op::Mmap, 0), (Op::Write, 0)];
        assert!(unknown.iter().all(|(op, flags)| waited_ns(*op, *flags, 4096, 0).is_none()));
    }
}
