//! The folders that stand for directories of the cluster as working directories. The kernel hands them on over fork and
//! exec, and their path says which directory is meant.
//!
//! Nobody may write there but the agent, for a moment, when it makes one of them: what passes the library (a static
//! program, a system call made directly, a socket bound to a relative path) fails instead of leaving files in them that
//! would be lost with the run. Root is not stopped by that.

use std::fs::{DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use impresario_base::lock::Mutex;

const CLOSED: u32 = 0o555;
const OPEN: u32 = 0o755;

pub(crate) struct Mirror {
    root: PathBuf,
    /// Held while a folder is made.
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
        self.made(inside).map(|folder| folder.into_os_string().into_vec())
    }

    /// A directory has another path now: programs that work in it, or below, go on there. Those that work in one that had this
    /// path before have none any more.
    pub(crate) fn renamed(&self, from: &[u8], to: &[u8]) -> std::io::Result<()> {
        let _making = self.making.lock();
        let at = |inside: &[u8]| {
            let words = inside.split(|b| *b == b'/').filter(|word| !word.is_empty());
            words.fold(self.root.clone(), |folder, word| folder.join(std::ffi::OsStr::from_bytes(word)))
        };
        let (from, old) = (at(from), at(to));
        let set = |folder: &Path, mode| std::fs::set_permissions(folder, Permissions::from_mode(mode));
        let Some(above) = old.parent().filter(|_| from.is_dir() || old.is_dir()) else { return Ok(()) };
        self.made(above.strip_prefix(&self.root).unwrap_or(Path::new("")).as_os_str().as_bytes())?;
        let before = from.parent().filter(|folder| folder.is_dir());
        let all = || [Some(above), before].into_iter().flatten();
        all().try_for_each(|folder| set(folder, OPEN))?;
        if old.is_dir() {
            open_all(&old);
            std::fs::remove_dir_all(&old)?;
        }
        if from.is_dir() {
            set(&from, OPEN)?;
            std::fs::rename(&from, &old)?;
            set(&old, CLOSED)?;
        }
        all().try_for_each(|folder| set(folder, CLOSED))
    }

    fn made(&self, inside: &[u8]) -> std::io::Result<PathBuf> {
        let mut folder = self.root.clone();
        for word in inside.split(|b| *b == b'/').filter(|word| !word.is_empty()) {
            let parent = folder.clone();
            folder.push(std::ffi::OsStr::from_bytes(word));
            if !folder.is_dir() {
                make(&parent, &folder)?;
            }
        }
        Ok(folder)
    }

    /// Lets the folders be removed.
    pub(crate) fn open(&self) {
        let _making = self.making.lock();
        open_all(&self.root);
    }
}

/// Lets a folder and those below be removed.
pub(crate) fn open_all(root: &Path) {
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let _ = std::fs::set_permissions(&folder, Permissions::from_mode(OPEN));
        let below = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(below.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()));
    }
}

fn make(parent: &Path, folder: &Path) -> std::io::Result<()> {
    std::fs::set_permissions(parent, Permissions::from_mode(OPEN))?;
    let made = DirBuilder::new().mode(CLOSED).create(folder);
    std::fs::set_permissions(parent, Permissions::from_mode(CLOSED))?;
    made.or_else(|error| if error.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
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
            mirror.open();
            let path = place.path().to_path_buf();
            place.close().unwrap();
            assert!(!path.exists());
        });
    }
}
