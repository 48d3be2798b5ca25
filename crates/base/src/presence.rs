//! Whether a folder that is kept open is still there, and whether its path still leads to it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Of one folder, on a file system that counts the names of folders; of another it is taken to be there.
#[derive(Clone, Copy, Debug)]
pub struct Presence {
    is_counted: bool,
}

impl Presence {
    /// Of a folder that is there.
    pub fn of(folder: impl AsFd) -> Presence {
        Presence { is_counted: names_of(folder) > 0 }
    }

    /// Whether it was removed since: it seems to be empty then, and what was open in it can be written still, for nobody.
    pub fn is_over(&self, folder: impl AsFd) -> bool {
        self.is_counted && names_of(folder) == 0
    }
}

fn names_of(folder: impl AsFd) -> u64 {
    // What cannot be asked is not taken for removed.
    #[allow(clippy::unnecessary_cast, reason = "its width differs between architectures")]
    rustix::fs::fstat(folder).map_or(1, |stat| stat.st_nlink as u64)
}

/// A file or folder by the path at which it was found. It is kept open: nothing else gets its number meanwhile.
#[derive(Debug)]
pub struct Anchor {
    path: PathBuf,
    held: OwnedFd,
}

/// What is at a path instead of what was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Instead {
    /// In words.
    pub what: String,
    /// It cannot be that the file system merely numbers its files anew: there is nothing, or something on another file system.
    pub is_certain: bool,
}

impl Anchor {
    /// Of what is at the path, behind symbolic links.
    pub fn at(path: &Path) -> io::Result<Anchor> {
        let path = std::path::absolute(path)?;
        // As a folder, where it is one: that has what is mounted at its first use mounted.
        let folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let held = match rustix::fs::open(&path, folder, Mode::empty()) {
            Err(Errno::NOTDIR) => rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
            opened => opened?,
        };
        Ok(Anchor { path, held })
    }

    /// What is at the path instead, if it leads there no more. What cannot be asked is taken to be there.
    pub fn instead(&self) -> Option<Instead> {
        let missing = |error: Errno| {
            let is_missing = matches!(error, Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE);
            is_missing.then(|| Instead { what: format!("{}: {error}", self.path.display()), is_certain: true })
        };
        // Both as they are now: some file systems number what is open anew.
        match (rustix::fs::stat(&self.path), rustix::fs::fstat(&self.held)) {
            (Err(error), _) | (Ok(_), Err(error)) => missing(error),
            (Ok(found), Ok(held)) if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino) => None,
            (Ok(found), Ok(held)) => Some(Instead {
                what: format!("another {} is there", self.path.display()),
                is_certain: found.st_dev != held.st_dev,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_folder_is_there_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("folder");
        std::fs::create_dir(&path).unwrap();
        let folder = File::open(&path).unwrap();
        let presence = Presence::of(&folder);
        std::fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        assert!(!presence.is_over(&folder));
        std::fs::remove_dir(dir.path().join("elsewhere")).unwrap();
        assert!(presence.is_over(&folder));
        assert!(!Presence::of(&folder).is_over(&folder), "names are not counted here");
    }

    #[test]
    fn an_anchor_knows_when_its_path_leads_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let [path, elsewhere] = ["folder", "elsewhere"].map(|name| dir.path().join(name));
        let make = || {
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("lock"), "").unwrap();
        };
        make();
        let [folder, anchor] = [path.clone(), path.join("lock")].map(|path| Anchor::at(&path).unwrap());
        assert_eq!(folder.instead(), None);
        assert_eq!(anchor.instead(), None);
        std::fs::rename(&path, &elsewhere).unwrap();
        assert!(anchor.instead().is_some_and(|instead| instead.is_certain), "moved away");
        assert!(folder.instead().is_some_and(|instead| instead.is_certain), "moved away");
        make();
        assert!(folder.instead().is_some_and(|instead| !instead.is_certain), "replaced");
        assert!(anchor.instead().is_some(), "replaced");
        std::fs::remove_dir_all(&path).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert_eq!(anchor.instead(), None, "a link to it leads there too");
        std::fs::remove_file(elsewhere.join("lock")).unwrap();
        std::fs::write(elsewhere.join("lock"), "").unwrap();
        assert!(anchor.instead().is_some(), "what is in it was replaced");
    }
}
