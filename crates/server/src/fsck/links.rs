//! Compares the link count of each file with the number of its names.
//!
//! Only files with several names are kept in memory. The first walk finds those whose count differs. While servers run,
//! names are created and removed during the walk, so a second walk counts these files again. A file is reported only if
//! its link count and its time of change were the same at every visit of both walks, and still are after the second:
//! creating or removing a name changes a file.

use impresario_wire::{FileKey, FileRecord, Time};
use rustc_hash::{FxHashMap, FxHashSet};

/// The files with several names.
#[derive(Default)]
pub(super) struct Links {
    files: FxHashMap<FileKey, File>,
    walks: u32,
}

/// A file whose count is wrong, unless it has changed since.
pub(super) struct Miscount {
    pub(super) key: FileKey,
    /// One of its names.
    pub(super) path: Vec<u8>,
    /// What is wrong, and the remedy.
    pub(super) what: String,
    links: Option<u32>,
    changed: Time,
}

impl Miscount {
    /// Its file has not changed.
    pub(super) fn is_still(&self, record: &FileRecord) -> bool {
        (record.file, record.links, record.changed) == (self.key, self.links, self.changed)
    }
}

struct File {
    /// The link count, without names that the metadata server has for itself.
    links: Option<u32>,
    changed: Time,
    /// These were the same whenever it was met.
    is_steady: bool,
    /// Names of it that this walk has met.
    names: u32,
    /// One of them; not kept in the first walk.
    path: Vec<u8>,
}

impl File {
    fn is_wrong(&self) -> bool {
        self.is_steady && self.links.is_some_and(|links| links != self.names)
    }

    /// What is wrong, and the remedy.
    fn complaint(&self) -> String {
        let (names, links) = (self.names, self.links.unwrap_or(0));
        match names < links {
            true => format!(
                "its link count is {links}, but it has {names} names: something outside the name space links to it, such as a copy \
                 of the metadata folder made of hard links; while that is there, its objects stay when its last name is removed"
            ),
            false => format!(
                "it has {names} names, but its link count is {links}: a file was copied within the metadata folder, or its local \
                 file system is damaged; check that one, and restore the file from a copy"
            ),
        }
    }
}

impl Links {
    pub(super) fn begin_walk(&mut self) {
        self.walks += 1;
        self.files.values_mut().for_each(|file| file.names = 0);
    }

    /// A walk has met a name; true if it is the first of its file.
    pub(super) fn met(&mut self, path: &[u8], record: &FileRecord) -> bool {
        let FileRecord { file: key, links, changed, .. } = *record;
        if let Some(file) = self.files.get_mut(&key) {
            file.names = file.names.saturating_add(1);
            file.is_steady &= file.links == links && file.changed == changed;
            if self.walks > 1 {
                file.path = path.to_vec();
            }
            return file.names == 1;
        }
        if self.walks == 1 && links != Some(1) {
            self.files.insert(key, File { links, changed, is_steady: true, names: 1, path: Vec::new() });
        }
        true
    }

    /// A walk is over that missed at most the files that were `renamed`, if it is sure. What it found.
    pub(super) fn end_walk(&mut self, renamed: &[FileKey], is_sure: bool) -> Vec<Miscount> {
        let renamed: FxHashSet<FileKey> = renamed.iter().copied().collect();
        self.files.retain(|key, file| file.is_wrong() && !renamed.contains(key));
        if self.walks == 1 || !is_sure {
            return Vec::new();
        }
        let miscount = |(key, file): (FileKey, File)| Miscount {
            key,
            what: file.complaint(),
            path: file.path,
            links: file.links,
            changed: file.changed,
        };
        let mut found: Vec<_> = self.files.drain().map(miscount).collect();
        found.sort_unstable_by(|one, other| one.path.cmp(&other.path));
        found
    }

    /// Files that are suspected and not judged yet.
    pub(super) fn suspects(&self) -> usize {
        self.files.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_layout::Layout;

    fn record(key: u64, links: Option<u32>, changed: i64) -> FileRecord {
        let layout = Layout::new(0, 1, 4096, 1).unwrap();
        let changed = Time { secs: changed, nanos: 0 };
        FileRecord { file: FileKey(key), layout, made: 0, size: 0, is_marked: false, changed, links }
    }

    /// Two walks that meet the file with these records; what they find.
    fn walked(walks: [&[FileRecord]; 2], renamed: &[FileKey]) -> usize {
        let mut links = Links::default();
        let mut found = 0;
        for (i, records) in walks.into_iter().enumerate() {
            links.begin_walk();
            records.iter().for_each(|record| _ = links.met(b"path", record));
            found += links.end_walk(if i == 1 { renamed } else { &[] }, true).len();
        }
        assert_eq!(links.suspects(), 0);
        found
    }

    #[test]
    fn names_are_counted_twice_before_a_count_is_called_wrong() {
        let two = record(1, Some(2), 5);
        assert_eq!(walked([&[two, two], &[]], &[]), 0);
        assert_eq!(walked([&[two], &[two]], &[]), 1, "a name is missing");
        assert_eq!(walked([&[two, two, two], &[two, two, two]], &[]), 1, "one too many");
        assert_eq!(walked([&[two], &[two, two]], &[]), 0, "the first walk missed one");
        assert_eq!(walked([&[two], &[two]], &[FileKey(1)]), 0, "it was renamed meanwhile");
        assert_eq!(walked([&[two], &[record(1, Some(2), 6)]], &[]), 0, "it changed meanwhile");
        assert_eq!(walked([&[two], &[record(1, Some(1), 5)]], &[]), 0);
        assert_eq!(walked([&[record(1, None, 5)], &[]], &[]), 0, "it was changing");
        let one = record(2, Some(1), 5);
        assert_eq!(walked([&[one], &[one]], &[]), 0);
    }

    #[test]
    fn a_file_is_judged_by_its_first_name() {
        let mut links = Links::default();
        links.begin_walk();
        let two = record(1, Some(2), 5);
        assert!(links.met(b"a", &two));
        assert!(!links.met(b"b", &two));
        assert!(links.met(b"c", &record(2, Some(1), 5)));
    }

    #[test]
    fn what_changed_after_the_second_walk_is_not_wrong() {
        let (mut links, two) = (Links::default(), record(1, Some(2), 5));
        for walk in 0..2 {
            links.begin_walk();
            links.met(b"a", &two);
            let found = links.end_walk(&[], true);
            assert_eq!(found.len(), walk);
            for wrong in found {
                assert!(wrong.is_still(&two));
                assert!(!wrong.is_still(&record(1, Some(1), 6)));
            }
        }
    }

    #[test]
    fn an_unsure_walk_judges_nothing() {
        let mut links = Links::default();
        for _ in 0..3 {
            links.begin_walk();
            links.met(b"a", &record(1, Some(2), 5));
            assert_eq!((links.end_walk(&[], false).len(), links.suspects()), (0, 1));
        }
        links.begin_walk();
        links.met(b"a", &record(1, Some(2), 5));
        assert_eq!((links.end_walk(&[], true).len(), links.suspects()), (1, 0));
    }
}
