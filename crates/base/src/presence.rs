//! Whether a folder that is kept open is still there.

use std::os::fd::AsFd;

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
}
