//! How long an open file is as far as its writes say, so that the growth by one that failed half way can be taken back.
//!
//! A write over several data servers may fail on one and grow the file on another. What it wrote behind its good part is
//! then cut off again, if nothing else can have put bytes there: the metadata server knows whether another open of the file
//! may write, this knows of the others.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use impresario_base::lock::{Mutex, RwLock};

/// See the module.
#[derive(Default)]
pub(crate) struct Length {
    /// Read-locked over a change of the bytes, write-locked while growth is taken back.
    changing: RwLock<()>,
    /// Changes that have begun.
    begun: AtomicU64,
    /// End of the file when it was opened or cut, and of what was written since, bytes.
    known: AtomicU64,
    /// When the metadata server has last made the file durable, and what was known then.
    settled: Mutex<Option<(Since, u64)>>,
}

/// A time at a metadata server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Since {
    /// The session.
    pub(crate) session: u64,
    /// How many names this client had given.
    pub(crate) names: u64,
}

impl Length {
    /// Of a file that has `len` bytes.
    pub(crate) fn of(len: u64) -> Length {
        Length { known: AtomicU64::new(len), ..Length::default() }
    }

    /// Makes a change, which learns its number.
    pub(crate) fn change<T>(&self, change: impl FnOnce(u64) -> T) -> T {
        let _shared = self.changing.read();
        change(self.begun.fetch_add(1, SeqCst))
    }

    /// Whether a change has begun.
    pub(crate) fn was_changed(&self) -> bool {
        self.begun.load(SeqCst) > 0
    }

    /// A change ended, or the file was opened again: it is as long as this at least.
    pub(crate) fn reaches(&self, end: u64) {
        self.known.fetch_max(end, SeqCst);
    }

    /// The file was cut or extended to this length.
    pub(crate) fn is(&self, len: u64) {
        self.known.store(len, SeqCst);
        self.unsettle();
    }

    /// The end that is known.
    pub(crate) fn known(&self) -> u64 {
        self.known.load(SeqCst)
    }

    /// The metadata server has made the file durable since then, when it was known to be so long.
    pub(crate) fn settle(&self, since: Since, known: u64) {
        *self.settled.lock() = Some((since, known));
    }

    /// More than bytes within the length was changed.
    pub(crate) fn unsettle(&self) {
        *self.settled.lock() = None;
    }

    /// Whether it was settled since then, and nothing but bytes within the length was changed.
    pub(crate) fn is_settled(&self, since: Since) -> bool {
        let settled = *self.settled.lock();
        settled.is_some_and(|(of, len)| of == since && self.known() <= len)
    }

    /// Takes back what change `number` has done behind `good`, unless another has begun since: `cut` gets the length that the
    /// file has without it.
    pub(crate) fn take_back(&self, number: u64, good: u64, cut: impl FnOnce(u64)) {
        let _alone = self.changing.write();
        if self.begun.load(SeqCst) == number + 1 {
            cut(self.known.load(SeqCst).max(good));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_settled_until_it_grows_or_is_cut_or_its_session_ends() {
        let (length, since) = (Length::of(100), Since { session: 1, names: 0 });
        assert!(!length.is_settled(since));
        length.settle(since, length.known());
        length.reaches(100);
        assert!(length.is_settled(since));
        assert!(!length.is_settled(Since { session: 2, ..since }) && !length.is_settled(Since { names: 1, ..since }));
        length.reaches(101);
        assert!(!length.is_settled(since), "it has grown");
        length.settle(since, 100);
        assert!(!length.is_settled(since), "it grew while it was made durable");
        length.settle(since, 101);
        length.is(50);
        assert!(!length.is_settled(since), "it was cut");
        length.settle(since, 50);
        length.unsettle();
        assert!(!length.is_settled(since));
    }

    #[test]
    fn only_the_last_change_is_taken_back() {
        let length = Length::of(100);
        let cut_to = |number, good| {
            let mut to = None;
            length.take_back(number, good, |len| to = Some(len));
            to
        };
        assert!(!length.was_changed());
        let first = length.change(|number| number);
        assert!(length.was_changed());
        assert_eq!(cut_to(first, 50), Some(100), "the file was longer already");
        assert_eq!(cut_to(first, 150), Some(150));
        let second = length.change(|number| {
            length.reaches(300);
            number
        });
        assert_eq!(cut_to(first, 50), None);
        assert_eq!(cut_to(second, 50), Some(300));
        length.is(10);
        assert_eq!(cut_to(second, 20), Some(20));
    }
}
