//! Whether a program is in a lull: it reads many small files that are in memory, and need not tell of more of them.

use impresario_ring::{Access, Op, is_fast};

/// Small files in a row, all of whose reads were fast, after which more of them need not be told of.
const FAST_IN_A_ROW: u32 = 16;
/// For so many fast files counts a slow one: a program that is interrupted in a read now and then stays in its lull.
const OF_A_SLOW_ONE: u32 = 12;
/// So long after files were brought in that nobody had opened, those that are read fast may be these, ns. Several are brought in ahead,
/// and none while the one who does it waits for the file system.
const BY_US_NS: u64 = 1_000_000_000;

/// What a program did with one open file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reads {
    is_small: bool,
    any: bool,
    all_fast: bool,
}

impl Reads {
    /// Of a file of this size, where files of at most `small_bytes` are small.
    pub(super) fn of(size_bytes: u64, small_bytes: u32) -> Reads {
        Reads { is_small: size_bytes <= small_bytes.into(), any: false, all_fast: true }
    }

    /// Notes an access.
    pub(super) fn note(&mut self, access: &Access) {
        if matches!(access.op, Op::Read | Op::Mmap) {
            self.any = true;
            self.all_fast &= is_fast(access.op, access.flags, access.len_bytes.into(), access.duration_ns.into());
        }
    }
}

/// How near to one a program is.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Lull {
    /// Fast files less what slow ones count, from 0 to [`FAST_IN_A_ROW`].
    fast: u32,
    brought_bytes: u64,
    /// When these were last seen to have grown.
    brought_ns: Option<u64>,
}

impl Lull {
    /// Half as many fast files as make a lull: the next ones will be in memory, too, and looking for them among the names of folders
    /// would take a program that starts a tenth of its time, where there is no processor to spare.
    pub(super) fn is_near(&self) -> bool {
        self.fast >= FAST_IN_A_ROW / 2
    }

    /// The program accessed a file that it told of. Whether that ends a lull.
    pub(super) fn ended_by(reads: &Reads) -> bool {
        reads.is_small && reads.any && !reads.all_fast
    }

    /// The program closed a file; so many bytes of files that nobody had opened were brought in up to now. Whether a lull
    /// begins, or goes on.
    pub(super) fn closed(&mut self, reads: &Reads, brought_bytes: u64, now_ns: u64) -> bool {
        if std::mem::replace(&mut self.brought_bytes, brought_bytes) != brought_bytes {
            self.brought_ns = Some(now_ns);
        }
        if !reads.is_small || !reads.any {
            return self.fast == FAST_IN_A_ROW;
        }
        // What is fast by our doing has to be told of, so that it stays so.
        let by_us = self.brought_ns.is_some_and(|brought_ns| now_ns.saturating_sub(brought_ns) < BY_US_NS);
        self.fast = match (by_us, reads.all_fast) {
            (true, _) => 0,
            (false, true) => FAST_IN_A_ROW.min(self.fast + 1),
            (false, false) => self.fast.saturating_sub(OF_A_SLOW_ONE),
        };
        self.fast == FAST_IN_A_ROW
    }
}

#[cfg(test)]
mod tests {
    use impresario_ring::SMALL_FILE_BYTES;

    use super::*;

    fn read(size_bytes: u64, duration_ns: u32) -> Reads {
        let mut reads = Reads::of(size_bytes, SMALL_FILE_BYTES);
        let access = |op, duration_ns| Access {
            file: 2,
            op,
            flags: 0,
            thread: 1,
            offset: 0,
            len_bytes: 4096,
            duration_ns,
            start_ns: 1,
        };
        reads.note(&access(Op::Read, duration_ns));
        reads.note(&access(Op::Seek, u32::MAX));
        reads
    }

    fn in_a_lull() -> Lull {
        let mut lull = Lull::default();
        let begun: Vec<bool> = (0..FAST_IN_A_ROW).map(|_| lull.closed(&read(4096, 2000), 0, 5)).collect();
        assert_eq!(begun.iter().position(|begun| *begun), Some(FAST_IN_A_ROW as usize - 1));
        lull
    }

    #[test]
    fn it_begins_with_fast_files_in_a_row_and_ends_with_a_slow_one() {
        let mut lull = in_a_lull();
        assert!(lull.closed(&Reads::of(10, SMALL_FILE_BYTES), 0, 5), "what was not read says nothing");
        assert!(
            lull.closed(&read(u64::from(SMALL_FILE_BYTES) + 1, 5_000_000), 0, 5),
            "nor what is told of in any case"
        );
        assert!(!Lull::ended_by(&read(10, 2000)) && Lull::ended_by(&read(10, 5_000_000)));
        let mut near = Lull::default();
        let is_near = |lull: &mut Lull| (lull.closed(&read(10, 2000), 0, 5), lull.is_near()).1;
        assert_eq!((1..).find(|_| is_near(&mut near)), Some(FAST_IN_A_ROW / 2));
        assert!(!near.closed(&read(10, 5_000_000), 0, 5) && !near.is_near());
        let until_the_next = |lull: &mut Lull| (1..).find(|_| lull.closed(&read(10, 2000), 0, 5));
        assert!(!lull.closed(&read(10, 5_000_000), 0, 5));
        assert_eq!(until_the_next(&mut lull), Some(OF_A_SLOW_ONE));
        assert!((0..2).all(|_| !lull.closed(&read(10, 5_000_000), 0, 5)));
        assert_eq!(until_the_next(&mut lull), Some(FAST_IN_A_ROW));
    }

    /// Many may be brought in at once, and are read one after the other.
    #[test]
    fn files_that_were_brought_in_do_not_count() {
        let (mut lull, ms) = (in_a_lull(), |n: u64| n * 1_000_000);
        assert!((0..1000).all(|n| !lull.closed(&read(4096, 2000), 1 + n / 500, 5 + ms(n))));
        let begins = (1000..2000).find(|n| lull.closed(&read(4096, 2000), 2, 5 + ms(*n)));
        assert_eq!(begins, Some(500 + BY_US_NS / ms(1) + u64::from(FAST_IN_A_ROW) - 1));
    }
}
