//! The files that hints name and that are there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::paths::plain_part;
use super::{Hints, Lookup, Paths};
use crate::backend::FileId;

/// Entries of directories that are looked at, at most, in one search of a place.
const ENTRIES_MAX: usize = 100_000;

/// Looks for the files of some hints.
#[derive(Debug)]
pub struct Named {
    lookup: Lookup,
    /// Each once, with whether to look below it.
    places: BTreeMap<PathBuf, bool>,
}

impl Named {
    /// Of these hints, by what was said of their paths. Where nothing was answered, nothing is looked for.
    pub fn new(hints: &Hints, paths: &Paths) -> Named {
        let mut merged = BTreeMap::new();
        for (place, whole_tree) in places(hints) {
            *merged.entry(place).or_insert(false) |= whole_tree;
        }
        paths.silent().iter().for_each(|silent| _ = merged.remove(silent));
        Named { lookup: Lookup::new(hints, paths), places: merged }
    }

    /// Where the files can be. Each place may lie on a file system of its own, which may hang.
    pub fn places(&self) -> impl Iterator<Item = &Path> {
        self.places.keys().map(PathBuf::as_path)
    }

    /// The files that are at a place now, at most `files_max`, with their true paths; each once.
    pub fn files(&self, place: &Path, files_max: usize) -> impl Iterator<Item = (FileId, PathBuf)> + use<> {
        let mut found = BTreeMap::new();
        let whole_tree = self.places.get(place).copied().unwrap_or(false);
        find(place, whole_tree, &mut |path, id| {
            if found.len() < files_max && self.lookup.find(path).is_some() {
                found.insert(id, path.to_path_buf());
            }
        });
        found.into_iter()
    }
}

/// Where the files of the hints can be: a path, and whether to look below it.
fn places(hints: &Hints) -> Vec<(PathBuf, bool)> {
    let mut places: Vec<(PathBuf, bool)> = hints.file.iter().map(|e| (e.path.clone(), false)).collect();
    places.extend(hints.directory.iter().map(|e| (e.path.clone(), e.recursive)));
    for entry in &hints.glob {
        places.push((plain_part(&entry.path).unwrap_or_else(|| "/".into()), true));
    }
    places
}

/// Tells of the regular files at or in a place.
fn find(place: &Path, whole_tree: bool, tell: &mut dyn FnMut(&Path, FileId)) {
    let mut left = ENTRIES_MAX;
    let Ok(place) = place.canonicalize() else { return };
    let Ok(meta) = fs::metadata(&place) else { return };
    if meta.is_file() {
        return tell(&place, FileId { dev: meta.dev(), ino: meta.ino() });
    }
    let mut folders = vec![place];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            if left == 0 {
                tracing::warn!(entries = ENTRIES_MAX, "a folder of the hints holds more; the rest is not looked at");
                return;
            }
            left -= 1;
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_file() {
                tell(&entry.path(), FileId { dev: meta.dev(), ino: meta.ino() });
            } else if meta.is_dir() && whole_tree {
                folders.push(entry.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Entry;

    #[test]
    fn files_are_found_by_name_in_folders_and_by_patterns_each_once() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        for file in
            ["one", "flat/a", "flat/deep/no", "tree/a", "tree/deep/b", "glob/x1/hit", "glob/x2/hit", "glob/x2/miss"]
        {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        let entry = |path: &str| Entry::new(root.join(path));
        let hints = Hints {
            file: vec![entry("one"), entry("tree/a"), entry("missing")],
            directory: vec![entry("flat"), Entry { recursive: true, ..entry("tree") }],
            glob: vec![entry("glob/*/hit")],
            ..Hints::default()
        };
        let named = Named::new(&hints, &Paths::of(&hints));
        let in_place = |place| named.files(place, 100).map(|(_, path)| path);
        let mut found: Vec<PathBuf> = named.places().flat_map(in_place).collect();
        found.sort();
        found.dedup();
        let wanted = ["flat/a", "glob/x1/hit", "glob/x2/hit", "one", "tree/a", "tree/deep/b"];
        assert_eq!(found, wanted.map(|file| root.join(file)));
        assert_eq!(named.files(&root.join("tree"), 1).count(), 1);
    }
}
