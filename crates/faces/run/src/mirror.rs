//! The folders that stand for directories of the cluster as working directories. The kernel hands them on over fork and
//! exec, and their path says which directory is meant.
//!
//! Nobody may write there but the agent, for a moment, when it makes one of them: what passes the library (a static
//! program, a system call made directly, a socket bound to a relative path) fails instead of leaving files in them that
//! would be lost with the run. Root is not stopped by that.

use std::ffi::OsStr;
use std::fs::{DirBuilder, Permissions};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use impresario_base::lock::Mutex;
use rustix::fs::{CWD, RenameFlags};

const CLOSED: u32 = 0o555;
const OPEN: u32 = 0o755;

pub(crate) struct Mirror {
    root: PathBuf,
    /// Held while folders are made and moved.
    making: Mutex<()>,
}

impl Mirror {
    /// Makes the folder that stands for the root of the cluster.
    pub(crate) fn new(root: PathBuf) -> std::io::Result<Mirror> {
        DirBuilder::new().mode(CLOSED).create(&root)?;
        Ok(Mirror { root, making: Mutex::default() })
    }

    /// The path of the folder for a directory, from the root of the cluster. It is made if it is not there.
    pub(crate) fn folder(&self, inside: &[u8]) -> std::io::Result<Vec<u8>> {
        let _making = self.making.lock();
        Ok(self.made(&self.at(inside))?.into_os_string().into_vec())
    }

    /// A directory has another path now: programs that work in it, or below, go on there. Those that work in one that had this
    /// path before have none any more.
    pub(crate) fn renamed(&self, from: &[u8], to: &[u8]) -> std::io::Result<()> {
        let _making = self.making.lock();
        let (from, to) = (self.at(from), self.at(to));
        let Some(above) = to.parent().filter(|_| from.is_dir() || to.is_dir()) else { return Ok(()) };
        self.made(above)?;
        while_open(&[above, from.parent().unwrap_or(above), &from, &to], || {
            if to.is_dir() {
                set_all(&to, OPEN);
                std::fs::remove_dir_all(&to).inspect_err(|_| set_all(&to, CLOSED))?;
            }
            if from.is_dir() { std::fs::rename(&from, &to) } else { Ok(()) }
        })
    }

    /// Two directories have each other's path now: programs that work in them, or below, go on there.
    pub(crate) fn exchanged(&self, one: &[u8], other: &[u8]) -> std::io::Result<()> {
        let _making = self.making.lock();
        let (one, other) = (self.at(one), self.at(other));
        if !one.is_dir() && !other.is_dir() {
            return Ok(());
        }
        let (one, other) = (self.made(&one)?, self.made(&other)?);
        let above = |folder: &Path| folder.parent().map_or(self.root.clone(), Path::to_path_buf);
        // At once: a program that asks for its working directory meanwhile gets one of the two.
        let exchange = || Ok(rustix::fs::renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE)?);
        while_open(&[&above(&one), &above(&other), &one, &other], exchange)
    }

    fn at(&self, inside: &[u8]) -> PathBuf {
        let words = inside.split(|b| *b == b'/').filter(|word| !word.is_empty());
        words.fold(self.root.clone(), |folder, word| folder.join(OsStr::from_bytes(word)))
    }

    /// Makes a folder, and those above it, where they are not there.
    fn made(&self, folder: &Path) -> std::io::Result<PathBuf> {
        let mut made = self.root.clone();
        for word in folder.strip_prefix(&self.root).unwrap_or(Path::new("")) {
            let parent = made.clone();
            made.push(word);
            if !made.is_dir() {
                while_open(&[&parent], || DirBuilder::new().mode(CLOSED).create(&made))?;
            }
        }
        Ok(made)
    }

    /// Lets the folders be removed.
    pub(crate) fn open(&self) {
        let _making = self.making.lock();
        open_all(&self.root);
    }
}

/// Does `change` while those of the folders that are there can be written to.
fn while_open(folders: &[&Path], change: impl FnOnce() -> std::io::Result<()>) -> std::io::Result<()> {
    let set = |mode| {
        let there = folders.iter().filter(|folder| folder.is_dir());
        let set = |folder: &&Path| std::fs::set_permissions(folder, Permissions::from_mode(mode));
        // All of them, whatever becomes of one.
        there.map(set).fold(Ok(()), std::io::Result::and)
    };
    let changed = set(OPEN).and_then(|()| change());
    let closed = set(CLOSED);
    changed.and(closed)
}

/// Lets a folder and those below be removed.
pub(crate) fn open_all(root: &Path) {
    set_all(root, OPEN);
}

fn set_all(root: &Path, mode: u32) {
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let _ = std::fs::set_permissions(&folder, Permissions::from_mode(mode));
        let below = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(below.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()));
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    /// Runs as a user whom permissions stop, in a thread of its own when the test is root's.
    fn as_ordinary_user(test: impl FnOnce() + Send + 'static) {
        let thread = std::thread::spawn(|| {
            if rustix::process::geteuid().is_root() {
                // SAFETY: changes the user of this thread alone, as the C library's function would not.
                assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) }, 0);
            }
            test();
        });
        thread.join().unwrap();
    }

    #[test]
    fn folders_are_made_but_nothing_else_in_them() {
        as_ordinary_user(|| {
            let place = tempfile::Builder::new().prefix("impresario-mirror-").tempdir_in("/tmp").unwrap();
            let mirror = Mirror::new(place.path().join("cwd")).unwrap();
            let root = mirror.folder(b"").unwrap();
            assert_eq!(root, mirror.folder(b"/").unwrap());
            let deep = mirror.folder(b"/a/b/c").unwrap();
            assert_eq!(deep, [&root[..], b"/a/b/c"].concat());
            assert_eq!(mirror.folder(b"a//b/c/").unwrap(), deep, "made before");
            let [path, other] = [b"/a".as_slice(), b"/a/d"].map(|p| mirror.folder(p).unwrap());
            for folder in [root, deep, path, other].map(|bytes| PathBuf::from(std::ffi::OsString::from_vec(bytes))) {
                assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o222, 0, "{folder:?}");
                let lost = std::fs::write(folder.join("lost"), "x").map_err(|error| error.kind());
                assert_eq!(lost, Err(ErrorKind::PermissionDenied), "{folder:?}");
            }
            mirror.renamed(b"/a/b", b"/e/f").unwrap();
            assert!(!place.path().join("cwd/a/b").exists() && place.path().join("cwd/e/f/c").is_dir());
            mirror.renamed(b"/a", b"/e/f").unwrap();
            assert!(!place.path().join("cwd/e/f/c").exists() && place.path().join("cwd/e/f/d").is_dir(), "replaced");
            mirror.renamed(b"/unused", b"/other").unwrap();
            assert!(std::fs::write(place.path().join("cwd/e/lost"), "x").is_err());
            mirror.exchanged(b"/e/f", b"/g").unwrap();
            assert!(place.path().join("cwd/g/d").is_dir() && place.path().join("cwd/e/f").is_dir(), "exchanged");
            mirror.exchanged(b"/e/f/unused", b"/other").unwrap();
            mirror.renamed(b"/g", b"/g/d/itself").unwrap_err();
            mirror.exchanged(b"/g", b"/g/d").unwrap_err();
            for folder in ["", "e", "e/f", "g", "g/d"].map(|folder| place.path().join("cwd").join(folder)) {
                assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o222, 0, "{folder:?}");
            }
            assert!(!place.path().join("cwd/other").exists());
            mirror.open();
            let path = place.path().to_path_buf();
            place.close().unwrap();
            assert!(!path.exists());
        });
    }
}
