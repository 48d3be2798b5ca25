//! The keys of a running program, read again when their file changes.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_wire::{KeyRole, Pass};

use crate::keys::{Generation, KeyError, Keys, key_file_name};

/// Minimum interval between checks of a file.
const EXAMINE_EVERY: Duration = Duration::from_millis(200);

/// A key file that is watched: a rotation takes effect without a restart. While a changed file cannot be read, the
/// previous keys stay in use.
#[derive(Debug)]
pub struct Keyring {
    file: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    keys: Arc<Keys>,
    /// Device, inode, length and modification time of the file when read.
    stamp: Stamp,
    examined: Instant,
}

type Stamp = (u64, u64, u64, i64, i64);

impl Keyring {
    /// Reads the file.
    pub fn open(file: &Path) -> Result<Keyring, KeyError> {
        let stamp = stamp(file);
        let keys = Arc::new(Keys::load(file)?);
        let state = State { keys, stamp, examined: Instant::now() };
        Ok(Keyring { file: file.into(), state: Mutex::new(state) })
    }

    /// The keys of a role in a folder. A client may use another role's file if its own is missing; the error is about
    /// its own.
    pub fn find(folder: &Path, role: KeyRole) -> Result<Keyring, KeyError> {
        let others: &[KeyRole] = match role {
            KeyRole::Client => &[KeyRole::Client, KeyRole::Admin, KeyRole::Server],
            KeyRole::Admin => &[KeyRole::Admin, KeyRole::Server],
            KeyRole::Server => &[KeyRole::Server],
        };
        let mut first = None;
        for role in others {
            match Keyring::open(&folder.join(key_file_name(*role))) {
                Err(error) if error.is_missing => {
                    first.get_or_insert(error);
                }
                other => return other,
            }
        }
        Err(first.unwrap_or_else(|| KeyError { file: folder.into(), reason: "holds no keys".into(), is_missing: true }))
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The keys as the file had them at the last check.
    pub fn keys(&self) -> Arc<Keys> {
        let mut state = self.state.lock();
        if state.examined.elapsed() >= EXAMINE_EVERY {
            self.examine(&mut state);
        }
        state.keys.clone()
    }

    /// True if peers that proved the key with this number are served.
    pub fn accepts(&self, key: u64) -> bool {
        self.keys().generation(key).is_some_and(|generation| generation.is_accepted())
    }

    /// A pass for what `about` says, which every server of the cluster recognises; `None` without a server's keys.
    pub fn issue_pass(&self, about: &[u8]) -> Option<Pass> {
        let keys = self.keys();
        let tag = ring::hmac::sign(&pass_key(keys.generations.first()?)?, about);
        tag.as_ref().try_into().ok().map(Pass)
    }

    /// True if a server of the cluster has issued the pass for this, under a key that is still in the file: after a rotation
    /// files that were opened before can be used until the next one.
    pub fn recognises_pass(&self, about: &[u8], pass: &Pass) -> bool {
        let keys = self.keys();
        let mut known = keys.generations.iter().filter_map(pass_key);
        known.any(|key| ring::hmac::verify(&key, about, &pass.0).is_ok())
    }

    /// Checks the file now and reads it again if it changed. True if the keys differ.
    pub fn refresh(&self) -> bool {
        self.examine(&mut self.state.lock())
    }

    fn examine(&self, state: &mut State) -> bool {
        state.examined = Instant::now();
        let found = stamp(&self.file);
        if found == state.stamp {
            return false;
        }
        match Keys::load(&self.file) {
            Ok(keys) => {
                let number = keys.generations.first().map_or("", |generation| &generation.number);
                tracing::info!(file = %self.file.display(), key = number, "read the keys again");
                state.stamp = found;
                state.keys = Arc::new(keys);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the keys changed and cannot be read; those from before stay in use");
                false
            }
        }
    }
}

/// What passes of a generation are signed with: a key of its own, made of the secret that only servers have.
fn pass_key(generation: &Generation) -> Option<ring::hmac::Key> {
    let secret = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &generation.secret(KeyRole::Server)?.0);
    let own = ring::hmac::sign(&secret, b"impresario pass of a file");
    Some(ring::hmac::Key::new(ring::hmac::HMAC_SHA256, own.as_ref()))
}

/// Changes whenever the file is replaced; zeros if it is missing.
fn stamp(file: &Path) -> Stamp {
    std::fs::metadata(file).map(|m| (m.dev(), m.ino(), m.len(), m.ctime(), m.ctime_nsec())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_again_and_a_bad_one_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let first = Keys::draw().unwrap();
        let file = dir.path().join("server.key");
        first.store(&file).unwrap();
        let ring = Keyring::find(dir.path(), KeyRole::Admin).unwrap();
        assert!(!ring.refresh());
        let second = first.rotated(Duration::from_secs(60)).unwrap();
        second.store(&file).unwrap();
        assert!(ring.refresh());
        assert_eq!(*ring.keys(), second);
        std::fs::write(&file, "nonsense").unwrap();
        assert!(!ring.refresh());
        std::fs::remove_file(&file).unwrap();
        assert!(!ring.refresh());
        assert_eq!(*ring.keys(), second);
        assert!(Keyring::find(dir.path(), KeyRole::Client).unwrap_err().file.ends_with("client.key"));
    }

    #[test]
    fn passes_are_recognised_by_servers_of_the_cluster_until_their_key_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (keys, foreign) = (Keys::draw().unwrap(), Keys::draw().unwrap());
        let ring_of = |name: &str, keys: &Keys| {
            keys.store(&dir.path().join(name)).unwrap();
            Keyring::open(&dir.path().join(name)).unwrap()
        };
        let (ring, other) = (ring_of("a", &keys), ring_of("b", &foreign));
        let pass = ring.issue_pass(b"a file").unwrap();
        assert!(ring.recognises_pass(b"a file", &pass) && !ring.recognises_pass(b"another", &pass));
        assert!(!other.recognises_pass(b"a file", &pass));
        let rotated = keys.rotated(Duration::from_secs(60)).unwrap();
        assert!(ring_of("c", &rotated).recognises_pass(b"a file", &pass));
        assert!(!ring_of("d", &keys.rotated(Duration::ZERO).unwrap()).recognises_pass(b"a file", &pass));
        assert!(ring_of("e", &keys.for_role(KeyRole::Client)).issue_pass(b"a file").is_none());
    }
}
