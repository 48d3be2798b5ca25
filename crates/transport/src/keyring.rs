//! The keys of a running program, read again when their file changes.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use impresario_wire::{KeyRole, Pass};

use crate::keys::{Generation, Keys, key_file_name};
use crate::secret_file::KeyError;
use crate::watched::Watched;

/// A key file that is watched: a rotation takes effect without a restart. While a changed file cannot be read, the
/// previous keys stay in use.
pub struct Keyring {
    file: PathBuf,
    loaded: Watched<Loaded>,
}

struct Loaded {
    keys: Arc<Keys>,
    /// What passes are signed with, one for each generation of a server's keys.
    pass_keys: Vec<ring::hmac::Key>,
}

impl Loaded {
    fn read(file: &Path) -> Result<Loaded, KeyError> {
        let keys = Keys::load(file)?;
        let pass_keys = keys.generations.iter().filter_map(pass_key).collect();
        Ok(Loaded { keys: Arc::new(keys), pass_keys })
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyring").field("file", &self.file).finish_non_exhaustive()
    }
}

/// The roles whose file does for a program, the best first: one that needs no more than a client's rights may use another's.
pub(crate) fn roles_that_do(role: KeyRole) -> &'static [KeyRole] {
    match role {
        KeyRole::Client => &[KeyRole::Client, KeyRole::Admin, KeyRole::Server],
        KeyRole::Admin => &[KeyRole::Admin, KeyRole::Server],
        KeyRole::Server => &[KeyRole::Server],
    }
}

/// Opens the first of the files that do for a role and are there; the error is about the best.
pub(crate) fn open_first<T>(
    role: KeyRole,
    mut open: impl FnMut(KeyRole) -> Result<T, KeyError>,
) -> Result<T, KeyError> {
    let mut first = None;
    for role in roles_that_do(role) {
        match open(*role) {
            Err(error) if error.is_missing => {
                first.get_or_insert(error);
            }
            other => return other,
        }
    }
    Err(first.unwrap_or_else(|| KeyError { file: PathBuf::new(), reason: "holds no keys".into(), is_missing: true }))
}

impl Keyring {
    /// Reads the file.
    pub fn open(file: &Path) -> Result<Keyring, KeyError> {
        let read = file.to_path_buf();
        Ok(Keyring { file: file.into(), loaded: Watched::open(vec![file.into()], move || Loaded::read(&read))? })
    }

    /// The keys of a role in a folder. A client may use another role's file if its own is missing; the error is about
    /// its own.
    pub fn find(folder: &Path, role: KeyRole) -> Result<Keyring, KeyError> {
        open_first(role, |role| Keyring::open(&folder.join(key_file_name(role))))
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The keys as the file had them at the last check.
    pub fn keys(&self) -> Arc<Keys> {
        self.loaded.get().keys.clone()
    }

    /// True if peers that proved the key with this number are served.
    pub fn accepts(&self, key: u64) -> bool {
        self.keys().generation(key).is_some_and(|generation| generation.is_accepted())
    }

    /// A pass for what `about` says, which every server of the cluster recognises; `None` without a server's keys.
    pub fn issue_pass(&self, about: &[u8]) -> Option<Pass> {
        let tag = ring::hmac::sign(self.loaded.get().pass_keys.first()?, about);
        tag.as_ref().try_into().ok().map(Pass)
    }

    /// True if a server of the cluster has issued the pass for this, under a key that is still in the file: after a rotation
    /// files that were opened before can be used until the next one.
    pub fn recognises_pass(&self, about: &[u8], pass: &Pass) -> bool {
        self.loaded.get().pass_keys.iter().any(|key| ring::hmac::verify(key, about, &pass.0).is_ok())
    }

    /// Checks the file now and reads it again if it changed. True if it was read.
    pub fn refresh(&self) -> bool {
        self.loaded.refresh()
    }
}

/// What passes of a generation are signed with: a key of its own, made of the secret that only servers have.
fn pass_key(generation: &Generation) -> Option<ring::hmac::Key> {
    let secret = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &generation.secret(KeyRole::Server)?.0);
    let own = ring::hmac::sign(&secret, b"impresario pass of a file");
    Some(ring::hmac::Key::new(ring::hmac::HMAC_SHA256, own.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
