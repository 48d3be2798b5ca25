//! Whether a folder that is kept open is still there, and whether its path still leads to it.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

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

/// A file or folder by the path at which it was found.
#[derive(Clone, Debug)]
pub struct Anchor {
    path: PathBuf,
    /// Device and inode.
    number: (u64, u64),
}

impl Anchor {
    /// Of what is at the path, behind symbolic links. While that is kept open, nothing else gets its number.
    pub fn at(path: &Path) -> io::Result<Anchor> {
        let path = std::path::absolute(path)?;
        let number = number_of(&path)?;
        Ok(Anchor { path, number })
    }

    /// What is at the path instead, once it leads there no more. What cannot be asked is taken to be there.
    pub fn instead(&self) -> Option<String> {
        match number_of(&self.path) {
            Ok(number) => (number != self.number).then(|| format!("another {} is there", self.path.display())),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE) => {
                    Some(format!("{}: {error}", self.path.display()))
                }
                _ => None,
            },
        }
    }
}

fn number_of(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|found| (found.dev(), found.ino()))
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
        let _held = File::open(path.join("lock")).unwrap();
        let anchor = Anchor::at(&path.join("lock")).unwrap();
        assert_eq!(anchor.instead(), None);
        std::fs::rename(&path, &elsewhere).unwrap();
        assert!(anchor.instead().is_some(), "moved away");
        make();
        assert!(anchor.instead().is_some(), "replaced");
        std::fs::remove_dir_all(&path).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert_eq!(anchor.instead(), None, "a link to it leads there too");
        std::fs::remove_file(elsewhere.join("lock")).unwrap();
        std::fs::write(elsewhere.join("lock"), "").unwrap();
        assert!(anchor.instead().is_some(), "what is in it was replaced");
    }
}
