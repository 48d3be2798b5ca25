//! What a check of a store needs: its objects page by page, and a place for objects that belong to no file.

use std::io;

use crate::checks::SUMS;
use crate::filesystem::{FileState, FileSystem};
use crate::objects::{FOLDERS, OBJECTS, ObjectStore};

/// Where objects go that belong to no file, each by its key.
pub const SET_ASIDE: &str = "set-aside";
/// Names of other files that are told of one folder.
const FOREIGN_MAX: usize = 100;

/// A page of a store's objects, ordered by the lowest byte of the key, then by key.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ObjectPage {
    /// Key and state of each object.
    pub objects: Vec<(u64, FileState)>,
    /// Names below the folder of the store that no store has made; of some of many.
    pub foreign: Vec<String>,
    /// The least key that may follow; `None` at the end.
    pub next: Option<u64>,
}

impl<F: FileSystem> ObjectStore<F> {
    /// The objects from a key on (0: from the start), up to `max` of them (at least 1).
    pub fn page(&self, from: u64, max: usize) -> io::Result<ObjectPage> {
        let mut page = ObjectPage { next: Some(from), ..ObjectPage::default() };
        // Empty folders are passed over, up to a few: a call must not take long.
        while let Some(from) = page.next
            && page.objects.is_empty()
            && page.foreign.is_empty()
        {
            self.page_of_folder(from, max.max(1), &mut page)?;
        }
        Ok(page)
    }

    fn page_of_folder(&self, from: u64, max: usize, page: &mut ObjectPage) -> io::Result<()> {
        let folder = from as usize % FOLDERS;
        let path = format!("{OBJECTS}/{folder:02x}");
        let is_first = from < FOLDERS as u64;
        let mut keys = Vec::new();
        for name in self.fs.names(&path)? {
            match key_of(&name).filter(|key| *key as usize % FOLDERS == folder) {
                Some(key) if key >= from => keys.push(key),
                Some(_) => {}
                None if name.strip_suffix(SUMS).and_then(key_of).is_some() => {}
                None if is_first && page.foreign.len() < FOREIGN_MAX => page.foreign.push(format!("{path}/{name}")),
                None => {}
            }
        }
        keys.sort_unstable();
        let rest = keys.split_off(max.min(keys.len()));
        for key in keys {
            match self.fs.stat_name(&self.path(key)) {
                Ok(state) => page.objects.push((key, state)),
                // Removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => page.foreign.push(self.path(key)),
                Err(error) => return Err(error),
            }
        }
        let next_folder = (folder as u64 + 1 < FOLDERS as u64).then_some(folder as u64 + 1);
        page.next = rest.first().copied().or(next_folder);
        Ok(())
    }

    /// Names at the top of the store's folder that no store has made.
    pub fn foreign_at_top(&self) -> io::Result<Vec<String>> {
        let names = self.fs.names("")?;
        Ok(names.into_iter().filter(|name| !crate::folder::is_known(name)).take(FOREIGN_MAX).collect())
    }

    /// Moves an object out of the way, durably, to the folder [`SET_ASIDE`]; succeeds if there is none. From now on it counts
    /// as removed.
    pub fn set_aside(&self, key: u64) -> io::Result<()> {
        self.fs.make_dir(SET_ASIDE)?;
        self.fs.sync_dir("")?;
        let aside = format!("{SET_ASIDE}/{key:016x}");
        // Its content must be durable under its new name.
        self.sync(key)?;
        // Before it counts as removed: a removal that is done again must not find it.
        let moved = self.move_away(key, &aside);
        match moved {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            moved => {
                moved?;
                self.fs.sync_dir(SET_ASIDE)?;
            }
        }
        self.unlink(key)
    }
}

/// The key that the name of an object says.
pub(crate) fn key_of(name: &str) -> Option<u64> {
    let is_key = name.len() == 16 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    u64::from_str_radix(name, 16).ok().filter(|_| is_key)
}
