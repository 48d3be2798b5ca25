//! Files that hold secrets: they are read only if nobody but their owner can use them.

use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum length of a file of keys or certificates, bytes.
pub(crate) const FILE_MAX_BYTES: u64 = 64 << 10;
/// Permission bits that a file with a secret must not have.
const OTHERS: u32 = 0o077;

/// Why keys or certificates cannot be used, in one line with the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct KeyError {
    /// The file.
    pub file: PathBuf,
    /// The problem and the remedy.
    pub reason: String,
    /// The file does not exist.
    pub is_missing: bool,
}

/// Reads a file with a secret. Refused if others may use it, or if it belongs neither to this user nor to root. `missing`
/// says what to do if there is none, `replace` how to replace a secret that others may have read.
pub(crate) fn read_secret(file: &Path, missing: &str, replace: &str) -> Result<Vec<u8>, KeyError> {
    read(file, missing, FILE_MAX_BYTES, |about| {
        if about.mode() & OTHERS != 0 {
            let mode = about.mode() & 0o777;
            let shown = file.display();
            return Err(format!(
                "others than its owner may use it (mode {mode:04o}); run `chmod 0600 {shown}`, and \
                 {replace} if others may have read it"
            ));
        }
        let me = rustix::process::geteuid().as_raw();
        if about.uid() != me && about.uid() != 0 && me != 0 {
            return Err(format!("belongs to user {}; run `chown` on it, or use a file of your own", about.uid()));
        }
        Ok(())
    })
}

/// Reads a file that is no secret, of up to `max_bytes`.
pub(crate) fn read_public(file: &Path, missing: &str, max_bytes: u64) -> Result<Vec<u8>, KeyError> {
    read(file, missing, max_bytes, |_| Ok(()))
}

fn read(
    file: &Path,
    missing: &str,
    max_bytes: u64,
    check: impl FnOnce(&std::fs::Metadata) -> Result<(), String>,
) -> Result<Vec<u8>, KeyError> {
    let fail = |reason: String| KeyError { file: file.into(), reason, is_missing: false };
    let opened =
        std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(file).map_err(
            |error| match error.kind() {
                io::ErrorKind::NotFound => {
                    KeyError { is_missing: true, ..fail(format!("there is no such key file; {missing}")) }
                }
                io::ErrorKind::PermissionDenied => {
                    fail("it may not be read by this user; use the file of your role, or ask its owner".into())
                }
                _ => fail(format!("cannot be opened: {error}")),
            },
        )?;
    let about = opened.metadata().map_err(|error| fail(format!("cannot be examined: {error}")))?;
    if !about.is_file() {
        return Err(fail("is not a file; name the file of keys".into()));
    }
    check(&about).map_err(fail)?;
    if about.len() > max_bytes {
        return Err(fail(format!("has {} bytes, which no file of keys has", about.len())));
    }
    let mut bytes = Vec::new();
    opened.take(max_bytes).read_to_end(&mut bytes).map_err(|error| fail(format!("cannot be read: {error}")))?;
    Ok(bytes)
}
