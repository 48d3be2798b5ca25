//! Which keys there are, or were, objects of: the file `keys`. And the number of the server: the file `number`.
//!
//! A metadata folder that was restored from an older copy knows nothing of the files that were made after the copy, and would
//! give their keys to new files. So a store remembers below which keys it has had objects, and the metadata server gives keys
//! above that. A key has a prefix, the number of its metadata folder, in its upper bits, and a count in the lower
//! [`COUNT_BITS`]. The file has a line `PREFIX BELOW` for each prefix, hexadecimal: no object has a count from `BELOW` on.
//!
//! **Order.** The line is durable before the first object is made that it does not cover. It goes ahead of the keys in steps of
//! [`STEP`], so one write serves that many files.
//!
//! **Bound.** [`PREFIXES_MAX`] prefixes have a line of their own. Further ones share the line `*`, which is the greatest of
//! their counts: too high for each of them is safe.
//!
//! A folder of an earlier version, or one whose file is damaged, gets the file from a list of its objects.

use std::collections::BTreeMap;
use std::io;

use crate::examine::key_of;
use crate::filesystem::FileSystem;
use crate::objects::{FOLDERS, OBJECTS, ObjectStore};
use crate::replace::{read_all, replace_file};

/// Bits of a key that are its count.
pub const COUNT_BITS: u32 = 40;
const STEP: u64 = 1 << 16;
const PREFIXES_MAX: usize = 16;
pub(crate) const KEYS: &str = "keys";
pub(crate) const KEYS_NEW: &str = "keys.new";
pub(crate) const NUMBER: &str = "number";
pub(crate) const NUMBER_NEW: &str = "number.new";

/// Below which counts a store has, or had, objects.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct KeyMarks {
    /// The count below which there may be objects, for each prefix that has one of its own.
    pub by_prefix: BTreeMap<u64, u64>,
    /// The same for all other prefixes.
    pub others: u64,
}

impl KeyMarks {
    /// True while there never was an object.
    pub fn is_empty(&self) -> bool {
        *self == KeyMarks::default()
    }

    fn below(&self, prefix: u64) -> u64 {
        self.by_prefix.get(&prefix).copied().unwrap_or(self.others)
    }

    fn cover(&self, key: u64) -> bool {
        count_of(key) < self.below(key >> COUNT_BITS)
    }

    fn raise(&mut self, key: u64) {
        let (prefix, below) = (key >> COUNT_BITS, (count_of(key) / STEP + 1) * STEP);
        let has_room = self.by_prefix.len() < PREFIXES_MAX;
        let mark = match self.by_prefix.contains_key(&prefix) || has_room {
            true => self.by_prefix.entry(prefix).or_default(),
            false => &mut self.others,
        };
        *mark = below.max(*mark);
    }

    fn text(&self) -> String {
        let lines = self.by_prefix.iter().map(|(prefix, below)| format!("{prefix:06x} {below:x}\n"));
        lines.chain([format!("* {:x}\n", self.others)]).collect()
    }

    /// The line `*` is the last one: without it the file is not complete.
    fn parse(text: &str) -> Option<KeyMarks> {
        let mut marks = KeyMarks::default();
        let mut lines = text.lines();
        for line in &mut lines {
            let (prefix, below) = line.split_once(' ')?;
            let below = u64::from_str_radix(below, 16).ok()?;
            if prefix == "*" {
                marks.others = below;
                return (marks.by_prefix.len() <= PREFIXES_MAX && lines.next().is_none()).then_some(marks);
            }
            marks.by_prefix.insert(u64::from_str_radix(prefix, 16).ok()?, below);
        }
        None
    }
}

fn count_of(key: u64) -> u64 {
    key & ((1 << COUNT_BITS) - 1)
}

/// What the file says; `None` where there is none that can be understood.
pub(crate) fn read<F: FileSystem>(fs: &F) -> io::Result<Option<KeyMarks>> {
    Ok(read_all(fs, KEYS)?.and_then(|bytes| KeyMarks::parse(&String::from_utf8_lossy(&bytes))))
}

/// What the objects of a folder say, and what it remembers as removed.
pub(crate) fn list<F: FileSystem>(fs: &F, removed: impl IntoIterator<Item = u64>) -> io::Result<KeyMarks> {
    let mut marks = KeyMarks::default();
    removed.into_iter().for_each(|key| marks.raise(key));
    for folder in 0..FOLDERS {
        let names = fs.names(&format!("{OBJECTS}/{folder:02x}"))?;
        names.iter().filter_map(|name| key_of(name)).for_each(|key| marks.raise(key));
    }
    Ok(marks)
}

impl<F: FileSystem> ObjectStore<F> {
    /// Below which keys the store has, or had, objects.
    pub fn key_marks(&self) -> KeyMarks {
        self.marks.lock().clone()
    }

    /// Remembers, durably, that there is an object of this key, before there is.
    pub(crate) fn mark_key(&self, key: u64) -> io::Result<()> {
        let mut marks = self.marks.lock();
        if marks.cover(key) {
            return Ok(());
        }
        let mut raised = marks.clone();
        raised.raise(key);
        self.write_marks(&raised)?;
        *marks = raised;
        Ok(())
    }

    pub(crate) fn write_marks(&self, marks: &KeyMarks) -> io::Result<()> {
        replace_file(&self.fs, KEYS, KEYS_NEW, marks.text().as_bytes()).map(drop)
    }

    /// The number that the server has among the data servers of its cluster, by which layouts of files name it; `None` where
    /// it is not noted.
    pub fn number(&self) -> io::Result<Option<u16>> {
        let Some(bytes) = read_all(&self.fs, NUMBER)? else { return Ok(None) };
        let number = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim_end().parse().ok());
        let unreadable =
            || io::Error::new(io::ErrorKind::InvalidData, format!("its file `{NUMBER}` is damaged; remove it"));
        number.map(Some).ok_or_else(unreadable)
    }

    /// Notes that number, durably.
    pub fn note_number(&self, number: u16) -> io::Result<()> {
        replace_file(&self.fs, NUMBER, NUMBER_NEW, format!("{number}\n").as_bytes()).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::folder::{FolderIdentity, make_over};
    use crate::objects::StoreOptions;
    use crate::testing::Forgetful;

    const PREFIX: u64 = 0xabc << COUNT_BITS;

    fn open(fs: &Forgetful) -> ObjectStore<Forgetful> {
        ObjectStore::over(fs.clone(), Path::new("forgetful"), "data.0", StoreOptions::default()).unwrap()
    }

    fn made() -> Forgetful {
        let fs = Forgetful::default();
        let identity = FolderIdentity { cluster: 1, store: 2, server: "data.0".into() };
        make_over(&fs, Path::new("forgetful"), &identity).unwrap();
        fs
    }

    #[test]
    fn marks_are_read_back_and_others_are_not() {
        let mut marks = KeyMarks::default();
        assert!(marks.is_empty());
        for key in [0, PREFIX | 7, PREFIX | STEP, u64::MAX] {
            assert!(!marks.cover(key), "{key:x}");
            marks.raise(key);
            assert!(marks.cover(key) && !marks.is_empty(), "{key:x}");
        }
        assert_eq!(marks.below(0xabc), 2 * STEP);
        assert_eq!(KeyMarks::parse(&marks.text()), Some(marks.clone()));
        let text = marks.text();
        for bad in
            ["", "abc 5\n", "x 5\n* 0\n", &text.replace('*', "+"), &format!("{text}{text}"), &text[..text.len() - 4]]
        {
            assert_eq!(KeyMarks::parse(bad), None, "{bad}");
        }
        // Of many prefixes the later ones share a mark.
        let mut many = KeyMarks::default();
        (0..2 * PREFIXES_MAX as u64).for_each(|prefix| many.raise((prefix << COUNT_BITS) | (prefix * STEP)));
        assert_eq!((many.by_prefix.len(), many.others), (PREFIXES_MAX, 2 * PREFIXES_MAX as u64 * STEP));
        assert!((0..2 * PREFIXES_MAX as u64).all(|prefix| many.cover((prefix << COUNT_BITS) | (prefix * STEP))));
        assert_eq!(KeyMarks::parse(&many.text()), Some(many));
    }

    #[test]
    fn keys_of_objects_are_remembered_over_power_failures_and_removals() {
        let fs = made();
        let store = open(&fs);
        assert!(store.key_marks().is_empty());
        store.truncate(PREFIX | 3, 10).unwrap();
        store.truncate(PREFIX | (STEP + 5), 10).unwrap();
        store.unlink(PREFIX | (STEP + 5)).unwrap();
        store.unlink(PREFIX | (4 * STEP)).unwrap();
        drop(store);
        fs.crash();
        assert_eq!(open(&fs).key_marks().by_prefix, [(0xabc, 5 * STEP)].into());
    }

    #[test]
    fn a_folder_of_an_earlier_version_is_listed_once() {
        let fs = made();
        let store = open(&fs);
        store.truncate(PREFIX | 3, 10).unwrap();
        store.unlink(PREFIX | (2 * STEP)).unwrap();
        drop(store);
        for damaged in [true, false] {
            match damaged {
                true => fs.set_len(&fs.open(KEYS, false).unwrap(), 3).unwrap(),
                false => fs.unlink(KEYS).unwrap(),
            }
            assert_eq!(open(&fs).key_marks().by_prefix, [(0xabc, 3 * STEP)].into());
            assert!(read(&fs).unwrap().is_some(), "it is written at once");
        }
    }

    #[test]
    fn the_number_of_the_server_is_read_back() {
        let fs = made();
        let store = open(&fs);
        assert_eq!(store.number().unwrap(), None);
        store.note_number(700).unwrap();
        assert_eq!(store.number().unwrap(), Some(700));
        store.note_number(1).unwrap();
        fs.crash();
        assert_eq!(open(&fs).number().unwrap(), Some(1));
        replace_file(&fs, NUMBER, NUMBER_NEW, b"x").unwrap();
        assert!(open(&fs).number().unwrap_err().to_string().contains("remove it"));
    }
}
