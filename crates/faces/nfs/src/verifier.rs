//! The write verifier (RFC 1813, 3.3.7): a number that tells clients whether bytes that they have not committed may be lost.
//!
//! It changes with every start, and when putting a file on stable storage failed. It changes once for a file: the backend
//! goes on refusing to call that file stable, and a client that tries again and again must not make all others write anew
//! each time.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use impresario_backend::Errno;
use impresario_base::lock::Mutex;

/// Files with lost bytes that are remembered; with more of them, every failure changes the verifier.
const LOST_MAX: usize = 4096;

/// The verifier.
pub struct Verifier {
    now: AtomicU64,
    lost: Mutex<HashSet<u64>>,
}

impl Verifier {
    /// One that no earlier server had.
    pub fn new() -> std::io::Result<Verifier> {
        Ok(Verifier { now: AtomicU64::new(random()?), lost: Mutex::default() })
    }

    /// The verifier in force.
    pub fn get(&self) -> [u8; 8] {
        self.now.load(Ordering::SeqCst).to_be_bytes()
    }

    /// Putting a file on stable storage failed: where that may mean lost bytes, the verifier changes.
    pub fn failed(&self, file: u64, error: Errno) {
        let harmless = [libc::ESTALE, libc::EACCES, libc::EPERM, libc::EINVAL, libc::EISDIR, libc::EROFS, libc::EFBIG];
        if !harmless.contains(&error.0) {
            self.lost(file, error);
        }
    }

    /// Whether bytes of a file may be lost, as far as is remembered.
    pub fn has_lost(&self, file: u64) -> bool {
        let lost = self.lost.lock();
        lost.len() >= LOST_MAX || lost.contains(&file)
    }

    /// Bytes of a file are lost that a client may not have committed: the verifier changes.
    pub fn lost(&self, file: u64, error: Errno) {
        let mut lost = self.lost.lock();
        let known = lost.contains(&file);
        if lost.len() < LOST_MAX {
            lost.insert(file);
        }
        if !known {
            let step = random().unwrap_or(1) | 1; // odd, so that it does change
            self.now.fetch_add(step, Ordering::SeqCst);
            tracing::error!(%error, "written bytes may be lost; clients are told to write again what they have not committed");
        }
    }
}

fn random() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_changes_with_every_start_and_once_for_a_file_that_lost_bytes() {
        let verifier = Verifier::new().unwrap();
        assert_ne!(verifier.get(), Verifier::new().unwrap().get());
        let mut seen = vec![verifier.get()];
        verifier.failed(1, Errno(libc::EIO));
        seen.push(verifier.get());
        verifier.failed(2, Errno(libc::ENOSPC));
        seen.push(verifier.get());
        seen.dedup();
        assert_eq!(seen.len(), 3);
        verifier.failed(1, Errno(libc::EIO));
        verifier.failed(3, Errno(libc::EACCES));
        assert_eq!(verifier.get(), seen[2]);
    }
}
