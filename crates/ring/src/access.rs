//! One access of a program, and its encoding in the four data words of a slot.

/// The operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Bytes were read.
    Read = 0,
    /// Bytes were written.
    Write = 1,
    /// A range was mapped into memory.
    Mmap = 2,
    /// The position was moved to [`Access::offset`].
    Seek = 3,
    /// The descriptor is about to be closed; no access of this file follows.
    Close = 4,
}

impl Op {
    fn from_byte(byte: u8) -> Option<Op> {
        [Op::Read, Op::Write, Op::Mmap, Op::Seek, Op::Close].into_iter().find(|op| *op as u8 == byte)
    }
}

/// Bits of [`Access::flags`]. Unknown bits are ignored.
pub mod flag {
    /// Through the C library's buffered streams; neighbouring calls may be reported as one access.
    pub const STREAM: u8 = 1;
    /// Submitted without waiting: the length is the requested one and the duration that of the submission.
    pub const ASYNC: u8 = 2;
    /// Shorter than requested: end of file.
    pub const SHORT: u8 = 4;
    /// Within the kernel from one descriptor to another (`sendfile`, `copy_file_range`, `splice`).
    pub const IN_KERNEL: u8 = 8;
}

/// One access. Lengths and durations beyond 32 bits saturate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The number under which the client registered the open file.
    pub file: u32,
    /// The operation.
    pub op: Op,
    /// Bits of [`flag`].
    pub flags: u8,
    /// The low 16 bits of the thread's id.
    pub thread: u16,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes read, written or mapped; 0 for the other operations.
    pub len_bytes: u32,
    /// How long the call took, in nanoseconds.
    pub duration_ns: u32,
    /// When the call began: `CLOCK_MONOTONIC` in the program's time name space, in nanoseconds. Only differences
    /// between accesses of the same ring, and to [`Consumer::started_ns`](crate::Consumer::started_ns), are valid
    /// across time name spaces.
    pub start_ns: u64,
}

/// What a client does and knows that it cannot tell of: counts that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unseen {
    /// Bytes of reads of files that are not known.
    pub bytes: u64,
    /// Rings of io_uring that cannot be looked into.
    pub rings: u64,
}

impl Unseen {
    /// Both together.
    pub fn and(self, other: Unseen) -> Unseen {
        let (bytes, rings) = (self.bytes.saturating_add(other.bytes), self.rings.saturating_add(other.rings));
        Unseen { bytes, rings }
    }
}

impl Access {
    /// The four words of a slot.
    #[inline]
    pub(crate) fn to_words(self) -> [u64; 4] {
        let first = u64::from(self.file)
            | u64::from(self.op as u8) << 32
            | u64::from(self.flags) << 40
            | u64::from(self.thread) << 48;
        [first, self.offset, u64::from(self.len_bytes) | u64::from(self.duration_ns) << 32, self.start_ns]
    }

    /// Decodes four untrusted words; `None` for an unknown operation or a range past 2^63 - 1.
    pub(crate) fn from_words(words: [u64; 4]) -> Option<Access> {
        let len_bytes = words[2] as u32;
        if words[1].checked_add(u64::from(len_bytes))? > i64::MAX as u64 {
            return None;
        }
        Some(Access {
            file: words[0] as u32,
            op: Op::from_byte((words[0] >> 32) as u8)?,
            flags: (words[0] >> 40) as u8,
            thread: (words[0] >> 48) as u16,
            offset: words[1],
            len_bytes,
            duration_ns: (words[2] >> 32) as u32,
            start_ns: words[3],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_carry_every_access(file: u32, op in 0u8..5, flags: u8, thread: u16, offset in 0..=i64::MAX as u64,
                                    len_bytes: u32, duration_ns: u32, start_ns: u64) {
            let offset = offset.min(i64::MAX as u64 - u64::from(len_bytes));
            let op = Op::from_byte(op).unwrap();
            let access = Access { file, op, flags, thread, offset, len_bytes, duration_ns, start_ns };
            prop_assert_eq!(Access::from_words(access.to_words()), Some(access));
        }

        #[test]
        fn any_words_are_a_valid_access_or_refused(words: [u64; 4]) {
            if let Some(access) = Access::from_words(words) {
                prop_assert_eq!(access.to_words(), words);
                prop_assert!(access.offset + u64::from(access.len_bytes) <= i64::MAX as u64);
            } else {
                prop_assert!((words[0] >> 32) as u8 > 4 || words[1].saturating_add(words[2] & 0xffff_ffff) >= 1 << 63);
            }
        }
    }
}
