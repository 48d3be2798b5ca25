//! Opens the folder in which one user, mostly root, writes for all others: none of them may lead the writer elsewhere.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fchmod, fstat, mkdirat, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// Links on the way are followed up to so many.
const LINKS_MAX: u32 = 40;
/// What others may not do to a folder on the way.
const WRITE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;
const ON_THE_WAY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const OPENED: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A folder that cannot be opened, or must not be.
#[derive(Debug)]
pub struct FolderError {
    /// The folder.
    pub path: PathBuf,
    /// What is wrong with it, and what helps.
    pub message: String,
}

impl fmt::Display for FolderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.message)
    }
}

impl std::error::Error for FolderError {}

fn failed(path: &Path, what: &str) -> impl Fn(io::Error) -> FolderError {
    move |error| FolderError { path: path.into(), message: format!("{what}: {error}") }
}

/// Opens the folder for reading, and where `makes`, makes it and what is missing above it, with mode 0755. It is an error where
/// another user than root and the caller could name what is opened: by owning a folder or link on the way, by writing to one
/// without the sticky bit, with which nobody replaces what others own, or by a link in the folder's own place. Who may write to the
/// folder itself is its owner's affair.
pub fn open(path: &Path, makes: bool) -> Result<OwnedFd, FolderError> {
    let opening = failed(path, "cannot be opened");
    let full = std::path::absolute(path).map_err(&opening)?;
    let refuse = |at: &Path, why: String| FolderError {
        path: path.into(),
        message: format!("another user could put something else in its place: {} {why}", at.display()),
    };
    let root = || openat(CWD, "/", ON_THE_WAY, Mode::empty()).map_err(|error| opening(error.into()));
    let (mut dir, mut at, mut links) = (root()?, PathBuf::from("/"), 0);
    // The next name is the last one.
    let mut way: Vec<OsString> = names(full.as_os_str());
    while let Some(name) = way.pop() {
        let is_above = way.is_empty();
        let state = fstat(&dir).map_err(|error| opening(error.into()))?;
        check_owner(&state).map_err(|why| refuse(&at, why))?;
        if state.st_mode & WRITE_BY_OTHERS != 0 && state.st_mode & STICKY == 0 {
            return Err(refuse(&at, format!("has mode {:o}; chmod go-w forbids it", state.st_mode & 0o7777)));
        }
        at.push(&name);
        let failed = |error: Errno| match makes {
            true => failed(path, "cannot be made")(error.into()),
            false => opening(error.into()),
        };
        let mut is_made = false;
        let next = match openat(&dir, &name, ON_THE_WAY, Mode::empty()) {
            Err(Errno::NOENT) if makes => {
                match mkdirat(&dir, &name, Mode::from_raw_mode(0o755)) {
                    // Another administrator's, of this moment.
                    Err(Errno::EXIST) => {}
                    made => is_made = made.map(|()| true).map_err(failed)?,
                }
                openat(&dir, &name, ON_THE_WAY, Mode::empty())
            }
            next => next,
        };
        let next = next.map_err(failed)?;
        let state = fstat(&next).map_err(failed)?;
        if FileType::from_raw_mode(state.st_mode) != FileType::Symlink {
            dir = next;
            if is_made {
                // Whatever the umask.
                let opened = openat(&dir, ".", OPENED, Mode::empty()).map_err(failed)?;
                fchmod(opened, Mode::from_raw_mode(0o755)).map_err(failed)?;
            }
            continue;
        }
        // Of a folder with the sticky bit, only its owner can replace it.
        check_owner(&state).map_err(|why| refuse(&at, why))?;
        if is_above {
            return Err(refuse(&at, "is a symbolic link; put a folder there, or mount one".into()));
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(failed(Errno::LOOP));
        }
        let target = OsString::from_vec(readlinkat(&next, "", Vec::new()).map_err(failed)?.into_bytes());
        at.pop();
        if Path::new(&target).is_absolute() {
            (dir, at) = (root()?, PathBuf::from("/"));
        }
        way.extend(names(&target));
    }
    check_owner(&fstat(&dir).map_err(|error| opening(error.into()))?).map_err(|why| refuse(&at, why))?;
    openat(&dir, ".", OPENED, Mode::empty()).map_err(|error| opening(error.into()))
}

/// The names of a path, the last one first. A dot is none; two dots lead up when they are opened, not before.
fn names(path: &OsStr) -> Vec<OsString> {
    let names = path.as_bytes().split(|byte| *byte == b'/').rev();
    names.filter(|name| !name.is_empty() && *name != b".").map(|name| OsStr::from_bytes(name).to_owned()).collect()
}

/// Root or the caller owns it.
fn check_owner(state: &Stat) -> Result<(), String> {
    match state.st_uid {
        0 => Ok(()),
        uid if uid == geteuid().as_raw() => Ok(()),
        uid => Err(format!("belongs to user {uid}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, create_dir_all, set_permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use super::*;

    fn set(path: &Path, mode: u32) {
        set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn refusal(path: &Path) -> String {
        open(path, true).unwrap_err().to_string()
    }

    #[test]
    fn no_link_stands_in_the_folders_place() {
        let dir = tempfile::tempdir().unwrap();
        let (link, elsewhere) = (dir.path().join("link"), dir.path().join("elsewhere"));
        create_dir(&elsewhere).unwrap();
        set(&elsewhere, 0o700);
        symlink(&elsewhere, &link).unwrap();
        let error = refusal(&link);
        assert!(error.contains("is a symbolic link") && error.contains("link"), "{error}");
        symlink(dir.path().join("missing"), dir.path().join("dangling")).unwrap();
        assert!(refusal(&dir.path().join("dangling")).contains("is a symbolic link"));
        assert_eq!((elsewhere.metadata().unwrap().mode() & 0o777, dir.path().join("missing").exists()), (0o700, false));
        // On the way, links of root's and the caller's own lead to where the folder is.
        let inside = dir.path().join("inside");
        symlink("link", &inside).unwrap();
        open(&inside.join("made/below"), true).unwrap();
        assert_eq!(elsewhere.join("made/below").metadata().unwrap().mode() & 0o777, 0o755);
        symlink("circle", dir.path().join("circle")).unwrap();
        assert!(refusal(&dir.path().join("circle/x")).contains("symbolic links"));
    }

    #[test]
    fn no_other_user_writes_to_the_folder_above() {
        let dir = tempfile::tempdir().unwrap();
        let (above, below) = (dir.path().join("above"), dir.path().join("above/below"));
        create_dir_all(&below).unwrap();
        for mode in [0o777, 0o775] {
            set(&above, mode);
            let error = refusal(&below);
            assert!(error.contains(&format!("above has mode {mode:o}")), "{error}");
        }
        // The sticky bit keeps what others do not own.
        create_dir(below.join("deep")).unwrap();
        set(&above, 0o1777);
        open(&below, false).unwrap();
        open(&below.join("deep"), false).unwrap();
        set(&above, 0o777);
        assert!(refusal(&below.join("deep")).contains("has mode 777"));
        // To the folder itself whoever its owner lets.
        set(&above, 0o755);
        set(&below, 0o777);
        open(&below, false).unwrap();
        assert!(open(&dir.path().join("none"), false).is_err() && !dir.path().join("none").exists());
    }

    #[test]
    fn the_folder_and_what_leads_there_belong_to_root_or_the_caller() {
        let dir = tempfile::tempdir().unwrap();
        let (above, below) = (dir.path().join("above"), dir.path().join("above/below"));
        create_dir_all(&below).unwrap();
        if chown(&below, Some(65534), None).is_err() {
            return impresario_testing::skip("root", "only root gives files away");
        }
        assert!(refusal(&below).contains("below belongs to user 65534"));
        chown(&below, Some(0), None).unwrap();
        open(&below, false).unwrap();
        chown(&above, Some(65534), None).unwrap();
        assert!(refusal(&below).contains("above belongs to user 65534"));
        assert!(refusal(&above.join("new")).contains("above belongs") && !above.join("new").exists());
        chown(&above, Some(0), None).unwrap();
        let link = dir.path().join("link");
        symlink(&above, &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        assert!(refusal(&link.join("below")).contains("link belongs to user 65534"));
    }
}
