//! What a program has read from files that may be replaced while it runs.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;

use crate::KeyError;

/// Minimum interval between checks of the files.
const EXAMINE_EVERY: Duration = Duration::from_millis(200);
/// Minimum interval between attempts to read files that could not be read and have not changed since.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// A value read from files, and read again when they change: a rotation takes effect without a restart. While changed files
/// cannot be read, or do not fit together, the value from before stays in use.
pub(crate) struct Watched<T> {
    files: Vec<PathBuf>,
    load: Box<dyn Fn() -> Result<T, KeyError> + Send + Sync>,
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Arc<T>,
    /// Of each file when the value was read.
    stamps: Vec<Stamp>,
    examined: Instant,
    /// The files as they could not be read, which was told, and when that was tried last.
    refused: Option<(Vec<Stamp>, Instant)>,
}

/// Device, inode, length and time of the last change: differs whenever the file is replaced; zeros if it is missing.
type Stamp = (u64, u64, u64, i64, i64);

impl<T> Watched<T> {
    /// Reads the files.
    pub(crate) fn open(
        files: Vec<PathBuf>,
        load: impl Fn() -> Result<T, KeyError> + Send + Sync + 'static,
    ) -> Result<Watched<T>, KeyError> {
        // Before reading: what changes meanwhile is read again.
        let stamps = stamps(&files);
        let state = State { value: Arc::new(load()?), stamps, examined: Instant::now(), refused: None };
        Ok(Watched { files, load: Box::new(load), state: Mutex::new(state) })
    }

    /// The value as the files had it at the last check.
    pub(crate) fn get(&self) -> Arc<T> {
        let mut state = self.state.lock();
        if state.examined.elapsed() >= EXAMINE_EVERY {
            self.examine(&mut state);
        }
        state.value.clone()
    }

    /// Checks the files now and reads them again if they changed. True if they were read.
    pub(crate) fn refresh(&self) -> bool {
        self.examine(&mut self.state.lock())
    }

    fn examine(&self, state: &mut State<T>) -> bool {
        state.examined = Instant::now();
        let found = stamps(&self.files);
        if found == state.stamps {
            state.refused = None;
            return false;
        }
        // Any peer may have this done as often as it connects.
        let refused = state.refused.as_ref().filter(|(as_found, _)| *as_found == found);
        let is_told = refused.is_some();
        if refused.is_some_and(|(_, tried)| tried.elapsed() < READ_AGAIN) {
            return false;
        }
        match (self.load)() {
            Ok(value) => {
                let file = self.files.first().map(|file| file.display().to_string()).unwrap_or_default();
                tracing::info!(file, "read the keys again");
                *state = State { value: Arc::new(value), stamps: found, examined: state.examined, refused: None };
                true
            }
            Err(error) => {
                if !is_told {
                    tracing::warn!(%error, "the keys changed and cannot be read; those from before stay in use");
                }
                state.refused = Some((found, Instant::now()));
                false
            }
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|file| stamp(file)).collect()
}

fn stamp(file: &Path) -> Stamp {
    std::fs::metadata(file).map(|m| (m.dev(), m.ino(), m.len(), m.ctime(), m.ctime_nsec())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    use impresario_testing::logged;

    use super::*;

    #[test]
    fn files_that_cannot_be_read_are_told_of_once_and_not_read_for_every_peer() {
        let dir = tempfile::tempdir().unwrap();
        let (file, reads) = (dir.path().join("a"), Arc::new(AtomicU32::new(0)));
        std::fs::write(&file, "good").unwrap();
        let (path, count) = (file.clone(), reads.clone());
        let load = move || {
            count.fetch_add(1, SeqCst);
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let reason = "is broken".into();
            if text.starts_with("good") {
                Ok(text)
            } else {
                Err(KeyError { file: path.clone(), reason, is_missing: false })
            }
        };
        let watched = Watched::open(vec![file.clone()], load).unwrap();
        let refresh = || (0..10).filter(|_| watched.refresh()).count();
        for (content, lines) in [("broken", 1), ("broken again", 1), ("good again", 0)] {
            std::fs::write(&file, content).unwrap();
            let before = reads.load(SeqCst);
            let warnings = logged(|| assert_eq!(refresh(), usize::from(lines == 0), "{content}"));
            assert_eq!(warnings.len(), lines, "{warnings:?}");
            assert!(reads.load(SeqCst) <= before + 3, "{content}");
        }
        assert_eq!(*watched.get(), "good again");
        // What is needed beside the files may come later: such as a clock that is set.
        std::fs::remove_file(&file).unwrap();
        assert_eq!(refresh(), 0);
        let before = reads.load(SeqCst);
        std::thread::sleep(READ_AGAIN);
        let warnings = logged(|| assert_eq!(refresh(), 0));
        assert!(reads.load(SeqCst) > before && warnings.is_empty(), "{warnings:?}");
    }
}
