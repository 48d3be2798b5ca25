//! What a program has read from files that may be replaced while it runs.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;

use crate::KeyError;

/// Minimum interval between checks of the files.
const EXAMINE_EVERY: Duration = Duration::from_millis(200);

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
        let state = State { value: Arc::new(load()?), stamps, examined: Instant::now() };
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
            return false;
        }
        match (self.load)() {
            Ok(value) => {
                let file = self.files.first().map(|file| file.display().to_string()).unwrap_or_default();
                tracing::info!(file, "read the keys again");
                *state = State { value: Arc::new(value), stamps: found, examined: state.examined };
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the keys changed and cannot be read; those from before stay in use");
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
