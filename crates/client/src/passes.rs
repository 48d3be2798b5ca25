//! The passes of a client that may use none but the files that it has opened: it shows them where it names a file by its key.

use std::sync::atomic::{AtomicBool, Ordering};

use impresario_base::generations::Generations;
use impresario_base::lock::Mutex;
use impresario_wire::{FileKey, Pass};

/// Files whose passes are kept at least; with older ones there are at most twice as many.
const FILES_MAX: usize = 65_536;

/// The passes of a client.
#[derive(Debug)]
pub(crate) struct Passes {
    /// There are some: most clients have none, and look no further.
    is_used: AtomicBool,
    files: Mutex<Generations<FileKey, Rights>>,
}

/// What a client may do with a file.
#[derive(Clone, Copy, Default, Debug)]
struct Rights {
    read: Option<Pass>,
    write: Option<Pass>,
}

impl Default for Passes {
    fn default() -> Passes {
        Passes { is_used: AtomicBool::new(false), files: Mutex::new(Generations::new(FILES_MAX)) }
    }
}

impl Passes {
    /// Keeps the pass of a file that was opened.
    pub(crate) fn keep(&self, file: FileKey, write: bool, pass: Pass) {
        let mut files = self.files.lock();
        let mut rights = files.take(&file).unwrap_or_default();
        *(if write { &mut rights.write } else { &mut rights.read }) = Some(pass);
        files.put(file, rights);
        self.is_used.store(true, Ordering::Release);
    }

    /// The pass to show with a call about a file; `None`: there is none.
    pub(crate) fn of(&self, file: Option<FileKey>, write: bool) -> Option<Pass> {
        let file = file.filter(|_| self.is_used.load(Ordering::Acquire))?;
        let rights = *self.files.lock().get(&file)?;
        // A pass for writing is one for reading too.
        if write { rights.write } else { rights.write.or(rights.read) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pass_that_gives_the_right_is_shown_and_those_in_use_are_kept() {
        let passes = Passes::default();
        let (file, pass) = (FileKey(7), |n| Pass([n; 32]));
        assert_eq!(passes.of(Some(file), false), None);
        passes.keep(file, false, pass(1));
        assert_eq!((passes.of(Some(file), false), passes.of(Some(file), true)), (Some(pass(1)), None));
        passes.keep(file, true, pass(2));
        assert_eq!((passes.of(Some(file), false), passes.of(Some(file), true)), (Some(pass(2)), Some(pass(2))));
        assert_eq!(passes.of(None, false), None);
        for other in 0..3 * FILES_MAX as u64 {
            passes.keep(FileKey(100 + other), false, pass(3));
            assert!(passes.of(Some(file), true).is_some());
        }
        let mut kept = passes.files.lock();
        assert!(kept.len() <= 2 * FILES_MAX + 1);
        assert!(kept.get(&FileKey(100)).is_none());
    }
}
