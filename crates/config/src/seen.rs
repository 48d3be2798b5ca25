//! The file of a configuration as it was when it was read, so that a program notices when it changes.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A file that was read, or none for a configuration that a program has made.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct FileSeen {
    path: PathBuf,
    stamp: Option<Stamp>,
}

/// Changes whenever a file does: its time, length and number.
type Stamp = (SystemTime, u64, u64);

impl FileSeen {
    /// As it is now; to be called before it is read.
    pub fn now(path: &Path) -> FileSeen {
        FileSeen { path: path.into(), stamp: stamp(path) }
    }

    /// Where it is; empty where there is none.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file is there and another one than this.
    pub fn has_changed(&self) -> bool {
        !self.path.as_os_str().is_empty() && stamp(&self.path).is_some_and(|now| self.stamp != Some(now))
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.modified().ok()?, meta.len(), meta.ino()))
}
