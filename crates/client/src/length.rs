//! How long an open file is as far as its writes say, so that the growth by one that failed half way can be taken back.
//!
//! A write over several data servers may fail on one and grow the file on another. What it wrote behind its good part is
//! then cut off again, if nothing else can have put bytes there: the metadata server knows whether another open of the file
//! may write, this knows of the others.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use impresario_base::lock::RwLock;

/// See the module.
#[derive(Default)]
pub(crate) struct Length {
    /// Read-locked over a change of the bytes, write-locked while growth is taken back.
    changing: RwLock<()>,
    /// Changes that have begun.
    begun: AtomicU64,
    /// End of the file when it was opened or cut, and of what was written since, bytes.
    known: AtomicU64,
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
