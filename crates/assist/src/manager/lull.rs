//! Whether a program need not tell of its small files: telling of them was of no use lately, and their reads wait for little.
//!
//! A program that starts, or copies, opens hundreds of small files. To tell of one takes the program and the manager some 50 µs of
//! processor time, which is as much as many disks take to read it, and gains something only where the next files can be predicted. So a
//! program is in a lull from its start on: it passes small files over and adds up how long their reads wait. Once that is more than a
//! stake, the lull ends, and it tells of a few files. It goes on as long as some of these were brought in before it opened them.
//! Else the next lull begins, with twice the stake. A program whose files are in memory tells of none, and one that waits is late by at
//! most as much as it has waited before, or by the end of [`STAKE_NS`].

use std::ops::RangeInclusive;

use super::siblings::Ahead;

/// What reads of small files wait in a lull: in the first, and at most, ns. The first is some times what it costs to tell of
/// [`TOLD_IN_VAIN`] files.
const STAKE_NS: RangeInclusive<u64> = 1_000_000..=16_000_000;
/// Small files told of in a row without use before a lull begins: an order is known after three of one folder.
const TOLD_IN_VAIN: u32 = 8;
/// And where reads of them wait for so long each, ns, which is some times what it costs to tell of one: on a slow device folders are
/// listed and files opened slowly, too, and it takes longer until what is brought in comes before the program.
const SLOW_READ_NS: u64 = 200_000;
const TOLD_IN_VAIN_SLOW: u32 = 64;
/// So often in a row files that were brought in are waited for, though none was opened: the program may have come too far meanwhile.
const HOPES: u32 = 4;

/// How near to one a program is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lull {
    /// What reads may wait in the next one.
    stake_ns: u64,
    /// It lasts until reads of files passed over have waited so long since the program connected.
    until_waited_ns: u64,
    in_vain: u32,
    /// What reads of these have waited.
    in_vain_waited_ns: u64,
    hopes: u32,
    ahead: Ahead,
}

impl Lull {
    /// That in which a program begins.
    pub(super) fn first() -> Lull {
        let (until_waited_ns, ahead) = (0, Ahead::default());
        let (in_vain, in_vain_waited_ns, hopes) = (0, 0, HOPES);
        let mut lull = Lull { stake_ns: *STAKE_NS.start(), until_waited_ns, in_vain, in_vain_waited_ns, hopes, ahead };
        lull.begin(0);
        lull
    }

    /// The last lull lasts, or lasted, until reads of files passed over have waited so long since the program connected.
    pub(super) fn until_waited_ns(&self) -> u64 {
        self.until_waited_ns
    }

    /// A read of a small file that was told of has waited.
    pub(super) fn told_read(&mut self, waited_ns: u64) {
        self.in_vain_waited_ns = self.in_vain_waited_ns.saturating_add(waited_ns);
    }

    /// The program tells of a small file. Reads of those passed over have waited `waited_ns` since it connected; `ahead` is what became
    /// of all files that it told of up to now. Whether a lull begins.
    pub(super) fn told(&mut self, waited_ns: u64, ahead: Ahead) -> bool {
        let before = std::mem::replace(&mut self.ahead, ahead);
        // Some were opened before the program knew of the lull.
        if waited_ns < self.until_waited_ns {
            self.in_vain_waited_ns = 0;
            return false;
        }
        // It has not read this one yet.
        let is_slow = self.in_vain_waited_ns >= u64::from(self.in_vain) * SLOW_READ_NS;
        self.in_vain += 1;
        if ahead.used > before.used {
            (self.in_vain, self.in_vain_waited_ns, self.hopes) = (0, 0, HOPES);
            self.stake_ns = (self.stake_ns / 2).max(*STAKE_NS.start());
        } else if ahead.brought_bytes > before.brought_bytes && self.hopes > 0 {
            (self.in_vain, self.in_vain_waited_ns, self.hopes) = (0, 0, self.hopes - 1);
        }
        let most = if is_slow { TOLD_IN_VAIN_SLOW } else { TOLD_IN_VAIN };
        let begins = self.in_vain >= most && !ahead.is_pending;
        if begins {
            self.begin(waited_ns);
        }
        begins
    }

    fn begin(&mut self, waited_ns: u64) {
        (self.in_vain, self.in_vain_waited_ns) = (0, 0);
        self.until_waited_ns = waited_ns.saturating_add(self.stake_ns);
        self.stake_ns = self.stake_ns.saturating_mul(2).min(*STAKE_NS.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Files of which a program tells whose next ones cannot be predicted, when the reads of so many take so long.
    fn told_of(files: u32, read_ns: u64) -> u32 {
        let mut lull = Lull::first();
        let (mut waited_ns, mut told) = (0, 0);
        for _ in 0..files {
            if waited_ns < lull.until_waited_ns() {
                waited_ns += read_ns;
                if waited_ns < lull.until_waited_ns() {
                    continue;
                }
            }
            told += 1;
            lull.told(waited_ns, Ahead::default());
        }
        told
    }

    #[test]
    fn telling_in_vain_becomes_rarer() {
        assert_eq!(told_of(10_000, 0), 0, "all are in memory");
        assert_eq!(told_of(9, MS / 10), 0, "a start that is soon over");
        // Modules on a fast disk.
        let told = told_of(700, MS / 10);
        assert!((1..100).contains(&told), "{told}");
        // On a slow device each costs much more to read than to tell of.
        assert!(told_of(100, 20 * MS) >= 80);
    }

    /// What is brought in comes before the program only after some files: so many are told of until then, and how many of `files`
    /// are opened in lulls.
    fn passed_over_beside(slow_follower: u32, files: u32, read_ns: u64) -> u32 {
        let mut lull = Lull::first();
        let (mut waited_ns, mut passed_over, mut told) = (0, 0, 0u32);
        for _ in 0..files {
            if waited_ns < lull.until_waited_ns() {
                (waited_ns, passed_over) = (waited_ns + read_ns, passed_over + 1);
                told = 0; // it has to begin again
                continue;
            }
            told += 1;
            let used = told.saturating_sub(slow_follower);
            lull.told(waited_ns, Ahead { used: used.into(), brought_bytes: 0, is_pending: false });
            lull.told_read(if used > 0 { 0 } else { read_ns });
        }
        passed_over
    }

    #[test]
    fn on_a_slow_device_it_is_told_until_what_is_brought_in_comes_first() {
        assert!(passed_over_beside(40, 1200, MS) <= 2);
        assert!(passed_over_beside(40, 1200, MS / 4) <= 5);
        assert!(passed_over_beside(4, 1200, MS / 10) <= 11, "a fast one");
        assert!(passed_over_beside(40, 1200, MS / 10) > 700, "where that takes too long, it costs more");
        // What cannot be predicted at all is told of for a while only.
        assert!((200..800).contains(&passed_over_beside(u32::MAX, 2400, MS / 2)));
    }

    #[test]
    fn telling_goes_on_as_long_as_it_is_of_use() {
        let mut lull = Lull::first();
        assert_eq!(lull.until_waited_ns(), *STAKE_NS.start());
        let ahead = |used: u64, brought_bytes: u64| Ahead { used, brought_bytes, is_pending: false };
        assert!((0..100).all(|_| !lull.told(*STAKE_NS.start() - 1, ahead(0, 0))), "it has told of these already");
        let begins = |lull: &mut Lull, waited_ns, ahead| {
            let told = (1..=1000).find(|_| lull.told(waited_ns, ahead))?;
            Some((told, lull.until_waited_ns() - waited_ns))
        };
        assert_eq!(begins(&mut lull, MS, ahead(0, 0)), Some((TOLD_IN_VAIN, 2 * MS)));
        assert_eq!(begins(&mut lull, 3 * MS, ahead(0, 0)), Some((TOLD_IN_VAIN, 4 * MS)));
        let pending = Ahead { is_pending: true, ..ahead(0, 0) };
        assert_eq!(begins(&mut lull, 7 * MS, pending), None, "who looks for the next files is slower than the program");
        // The files that come first may come too late.
        assert!((1..=u64::from(HOPES) * 8).all(|n| !lull.told(7 * MS, ahead(0, n.div_ceil(8)))));
        assert!(
            (0..1000).all(|n| !lull.told(7 * MS, ahead(1 + n / 8, 100 + n))),
            "the program opens what was brought in"
        );
        let after = begins(&mut lull, 7 * MS, ahead(125, 1099));
        assert!(after.is_some_and(|(told, stake_ns)| told <= TOLD_IN_VAIN && stake_ns == MS), "{after:?}");
        assert!(!lull.told(8 * MS, ahead(126, 1999)));
        let brought = (0..1000).find(|n| lull.told(8 * MS, ahead(126, 2000 + n)));
        assert_eq!(brought, Some(u64::from(HOPES + TOLD_IN_VAIN) - 1), "of which nothing is opened");
        let stakes = (1..20).map(|n| begins(&mut lull, 100 * n * MS, ahead(126, 9000)).unwrap().1);
        assert_eq!(stakes.max(), Some(*STAKE_NS.end()));
    }
}
