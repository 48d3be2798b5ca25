//! File handles: which export a handle is of, and the check that keeps a forged handle out.
//!
//! A handle is a version byte, the export's number, a keyed hash, and the backend's handle. The hash (SipHash-2-4 under a
//! secret key, over all the rest) makes handles that the server has not given out useless: without the key, a guess is
//! right once in 2^64. The key is kept in a file, so that handles stay valid when the server restarts.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use impresario_backend::Handle;
use impresario_base::siphash::siphash;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, fsync, linkat, openat, unlinkat};
use rustix::io::Errno;
use smallvec::SmallVec;

use crate::protocol::Status;

/// First byte of every handle.
const FORM: u8 = 1;
/// What comes before the backend's handle: form, number of the export, hash.
const HEAD_BYTES: usize = 1 + 4 + 8;
const KEY_BYTES: usize = 16;

/// The secret key of handles.
#[derive(Clone)]
pub struct HandleKey([u8; KEY_BYTES]);

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
#[error("the key file {} {what}", .file.display())]
pub struct KeyError {
    file: PathBuf,
    what: String,
}

impl HandleKey {
    /// A new key; handles made with it are worth nothing to the next server.
    pub fn random() -> io::Result<HandleKey> {
        let mut key = [0; KEY_BYTES];
        getrandom::fill(&mut key).map_err(io::Error::other)?;
        Ok(HandleKey(key))
    }

    /// The key in a file of a folder, which is made where there is none. Only its owner may be able to read it. `folder` leads
    /// where `file` lies: whoever opened it knows that no other user can put something else in its place. A link in the file's
    /// own place is refused.
    pub fn load(folder: impl AsFd, file: &Path) -> Result<HandleKey, KeyError> {
        let fail = |what: String| KeyError { file: file.into(), what };
        let name = file.file_name().ok_or_else(|| fail("has no name".into()))?;
        match HandleKey::open_in(&folder, name) {
            Ok(open) => HandleKey::read(open).map_err(fail),
            Err(Errno::NOENT) => {
                let made = HandleKey::random().and_then(|key| key.make(folder, name));
                made.map_err(|e| fail(format!("cannot be made: {e}; name another one with --key-file")))
            }
            Err(Errno::LOOP) => Err(fail("is a symbolic link; name what it leads to with --key-file".into())),
            Err(error) => Err(fail(format!("cannot be opened: {error}"))),
        }
    }

    /// The key that an earlier release kept in `from`, in a folder that another user owns, moved to `file`; `None` where there is
    /// none that can only be the caller's own. What stands there in its place is neither followed nor waited for.
    pub fn take_over(from: &Path, folder: impl AsFd, file: &Path) -> Option<HandleKey> {
        let open = HandleKey::open_in(CWD, from.as_os_str()).ok()?;
        let state = open.metadata().ok()?;
        // A second name would be one that the folder's owner has given to another file of the caller's.
        let is_own = state.is_file() && state.nlink() == 1 && state.uid() == rustix::process::geteuid().as_raw();
        let key = HandleKey::read(open).ok().filter(|_| is_own)?;
        key.make(folder, file.file_name()?).ok()
    }

    fn open_in(folder: impl AsFd, name: &OsStr) -> rustix::io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        openat(folder, name, flags, Mode::empty()).map(File::from)
    }

    fn read(mut open: File) -> Result<HandleKey, String> {
        let state = open.metadata().map_err(|e| format!("cannot be looked at: {e}"))?;
        if !state.is_file() {
            return Err("is no file".into());
        }
        if state.mode() & 0o077 != 0 {
            return Err("may be read by others, who could forge handles with it; chmod 600".into());
        }
        let (mut key, mut more) = ([0; KEY_BYTES], [0]);
        let whole = open.read_exact(&mut key).and_then(|()| open.read(&mut more));
        match whole {
            Ok(0) => Ok(HandleKey(key)),
            _ => Err(format!("does not have {KEY_BYTES} bytes; remove it, and mount anew where it was used")),
        }
    }

    /// Makes the file whole or not at all: written beside, then given its name. Gives the key that it has then.
    fn make(self, folder: impl AsFd, name: &OsStr) -> io::Result<HandleKey> {
        let mut beside = name.to_owned();
        beside.push(format!(".new{}", std::process::id()));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut open = openat(&folder, &beside, flags, Mode::RUSR | Mode::WUSR).map(File::from)?;
        let written = open.write_all(&self.0).and_then(|()| open.sync_all());
        // A link, not a rename: of two servers that start at once one makes the key, and the other takes it.
        let linked =
            written.and_then(|()| linkat(&folder, &beside, &folder, name, AtFlags::empty()).map_err(io::Error::from));
        unlinkat(&folder, &beside, AtFlags::empty())?;
        if linked.is_ok() {
            // Another key after a power failure would make all handles worthless.
            fsync(&folder)?;
        }
        match linked {
            Ok(()) => Ok(self),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                HandleKey::read(HandleKey::open_in(folder, name)?).map_err(io::Error::other)
            }
            Err(error) => Err(error),
        }
    }

    fn hash(&self, export: u32, node: &[u8]) -> u64 {
        siphash(&self.0, &numbered(FORM, export, node))
    }

    /// The handle that clients get of a node of an export.
    pub fn seal(&self, export: u32, node: &Handle) -> Vec<u8> {
        let node = node.as_bytes();
        let mut sealed = Vec::with_capacity(HEAD_BYTES + node.len());
        sealed.push(FORM);
        sealed.extend_from_slice(&export.to_be_bytes());
        sealed.extend_from_slice(&self.hash(export, node).to_be_bytes());
        sealed.extend_from_slice(node);
        sealed
    }

    /// The export's number and the node of a handle that a client sent.
    pub fn open(&self, sealed: &[u8]) -> Result<(u32, Handle), Status> {
        let (head, node) = sealed.split_at_checked(HEAD_BYTES).ok_or(Status::BADHANDLE)?;
        let [FORM, e0, e1, e2, e3, hash @ ..] = head else { return Err(Status::BADHANDLE) };
        let export = u32::from_be_bytes([*e0, *e1, *e2, *e3]);
        // Not in constant time: a hash that is compared byte by byte over a network leaks nothing that can be measured in
        // 2^64 tries, but this costs as little.
        let differs = hash.iter().zip(self.hash(export, node).to_be_bytes()).fold(0, |all, (a, b)| all | (a ^ b));
        if differs != 0 {
            return Err(Status::BADHANDLE);
        }
        Ok((export, Handle::new(node).ok_or(Status::BADHANDLE)?))
    }
}

/// The number of an export: made from its name, so that it stays when others come or go.
pub fn export_number(name: &str) -> u32 {
    siphash(&[0; KEY_BYTES], name.as_bytes()) as u32
}

/// The stable key that the scheduler knows a file by.
pub fn file_key(export: u32, node: &Handle) -> u64 {
    siphash(&[0; KEY_BYTES], &numbered(FORM, export, node.as_bytes()))
}

fn numbered(form: u8, export: u32, node: &[u8]) -> SmallVec<[u8; 64]> {
    let mut all = SmallVec::new();
    all.push(form);
    all.extend_from_slice(&export.to_be_bytes());
    all.extend_from_slice(node);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::HANDLE_MAX_BYTES;
    use proptest::prelude::*;
    use std::os::unix::fs::PermissionsExt;

    proptest! {
        #[test]
        fn a_handle_opens_unless_any_bit_of_it_is_changed(
            export in any::<u32>(),
            node in proptest::collection::vec(any::<u8>(), 0..=impresario_backend::HANDLE_MAX_BYTES),
            bit in any::<proptest::sample::Index>(),
        ) {
            let key = HandleKey([7; KEY_BYTES]);
            let node = Handle::new(&node).unwrap();
            let mut sealed = key.seal(export, &node);
            prop_assert!(sealed.len() <= HANDLE_MAX_BYTES);
            prop_assert_eq!(key.open(&sealed), Ok((export, node)));
            prop_assert_eq!(HandleKey([8; KEY_BYTES]).open(&sealed), Err(Status::BADHANDLE));
            let bit = bit.index(sealed.len() * 8);
            sealed[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(key.open(&sealed), Err(Status::BADHANDLE));
        }

        #[test]
        fn any_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            prop_assert_eq!(HandleKey([7; KEY_BYTES]).open(&bytes), Err(Status::BADHANDLE));
        }
    }

    #[test]
    fn a_key_is_made_once_and_kept_from_others() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        let open = || File::open(folder.path()).unwrap();
        let load = || HandleKey::load(open(), &file);
        let refusal = || load().err().unwrap().to_string();
        let made = load().unwrap();
        assert_eq!(load().unwrap().0, made.0);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(refusal().contains("chmod 600"));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&file, b"short").unwrap();
        assert!(refusal().contains("16 bytes"));
        // What a link leads to is neither read nor made.
        let elsewhere = folder.path().join("elsewhere");
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &file).unwrap();
        assert!(refusal().contains("symbolic link") && !elsewhere.exists());
        std::fs::write(&elsewhere, [7; KEY_BYTES]).unwrap();
        std::fs::set_permissions(&elsewhere, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(refusal().contains("symbolic link"));
    }

    /// In the folder that the servers' user owns, that user can put anything in the place of the key.
    #[test]
    fn a_key_of_an_earlier_release_is_taken_over_if_it_can_only_be_our_own() {
        let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (from, file) = (old.path().join("nfs.key"), new.path().join("nfs.key"));
        let take = || HandleKey::take_over(&from, File::open(new.path()).unwrap(), &file).map(|key| key.0);
        assert!(take().is_none(), "there is none");
        let private = |path: &Path| {
            std::fs::write(path, [7; KEY_BYTES]).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
        };
        let secret = old.path().join("secret");
        private(&secret);
        std::os::unix::fs::symlink(&secret, &from).unwrap();
        assert!(take().is_none(), "a link");
        std::fs::remove_file(&from).unwrap();
        std::fs::hard_link(&secret, &from).unwrap();
        assert!(take().is_none(), "a second name of another file");
        std::fs::remove_file(&from).unwrap();
        rustix::fs::mknodat(CWD, &from, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(take().is_none(), "a pipe");
        std::fs::remove_file(&from).unwrap();
        private(&from);
        assert!(!file.exists());
        assert_eq!(take(), Some([7; KEY_BYTES]));
        assert_eq!(HandleKey::load(File::open(new.path()).unwrap(), &file).unwrap().0, [7; KEY_BYTES]);
    }
}
