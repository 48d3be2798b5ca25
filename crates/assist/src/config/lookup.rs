//! Which entry governs a file, and which paths the interposed library is to tell of.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use impresario_foresight::Shape;
use impresario_ring::patterns::{Builder, Kind};
use rustc_hash::FxHashMap;

use super::entry::Entry;
use super::load::Hints;
use super::paths::{Paths, plain_part};
use crate::regions::RegionMap;

/// An entry, ready for use.
#[derive(Clone, Debug)]
pub struct Monitored {
    /// Where it stands in the file, such as `File[0]`.
    pub key: String,
    /// As it was written.
    pub entry: Entry,
    /// Its regions.
    pub regions: RegionMap,
    /// What is read of files of this kind, of a file without a plan whose kind is known.
    pub learnt: Option<Arc<Shape>>,
}

/// Finds the entry for a canonical path. The paths of entries have their symbolic links resolved when this is made.
#[derive(Clone, Debug, Default)]
pub struct Lookup {
    files: FxHashMap<PathBuf, Arc<Monitored>>,
    globs: Vec<(Vec<u8>, Arc<Monitored>)>,
    directories: FxHashMap<PathBuf, Arc<Monitored>>,
}

impl Lookup {
    /// Makes the tables of the hints, of which the file system was asked for the true paths.
    pub fn new(hints: &Hints, paths: &Paths) -> Lookup {
        let mut lookup = Lookup::default();
        let monitored = |list: &str, i: usize, entry: &Entry| {
            let regions = RegionMap::of(entry);
            Arc::new(Monitored { key: format!("{list}[{i}]"), entry: entry.clone(), regions, learnt: None })
        };
        for (i, entry) in hints.file.iter().enumerate() {
            lookup.files.entry(paths.true_path(&entry.path)).or_insert_with(|| monitored("File", i, entry));
        }
        for (i, entry) in hints.directory.iter().enumerate() {
            lookup.directories.entry(paths.true_path(&entry.path)).or_insert_with(|| monitored("Directory", i, entry));
        }
        let globs = hints.glob.iter().enumerate();
        lookup.globs = globs.map(|(i, e)| (true_glob(&e.path, paths), monitored("Glob", i, e))).collect();
        lookup
    }

    /// The entry that governs a file, by its canonical path.
    pub fn find(&self, path: &Path) -> Option<&Arc<Monitored>> {
        if let Some(found) = self.files.get(path) {
            return Some(found);
        }
        let bytes = path.as_os_str().as_bytes();
        if let Some((_, found)) = self.globs.iter().find(|(glob, _)| Kind::Glob.matches(glob, bytes)) {
            return Some(found);
        }
        let parent = path.parent();
        let mut above = path.ancestors().skip(1);
        above.find_map(|dir| self.directories.get(dir).filter(|found| found.entry.recursive || Some(dir) == parent))
    }

    /// The list for the interposed library: at least the paths for which [`Lookup::find`] finds an entry, of small files, too, where
    /// that is more than to follow them online. Entries beyond what a list can hold are left out, and counted.
    pub fn patterns(&self) -> (Vec<u8>, usize) {
        let of_directory = |found: &Monitored| if found.entry.recursive { Kind::Tree } else { Kind::Directory };
        let directories =
            self.directories.iter().map(|(path, found)| (of_directory(found), path.as_os_str().as_bytes(), found));
        let globs = self.globs.iter().map(|(glob, found)| (Kind::Glob, glob.as_slice(), found));
        let files = self.files.iter().map(|(path, found)| (Kind::File, path.as_os_str().as_bytes(), found));
        let all = directories.chain(globs).chain(files);
        let (planned, online): (Vec<_>, Vec<_>) = all.partition(|(_, _, found)| found.entry.is_plan());
        let mut builder = Builder::new();
        let mut left_out = 0;
        let mut add = |builder: &mut Builder, of: Vec<(Kind, &[u8], &Arc<Monitored>)>| {
            of.into_iter().for_each(|(kind, path, _)| left_out += usize::from(builder.add(kind, path).is_err()));
        };
        add(&mut builder, planned);
        builder.of_small_files();
        add(&mut builder, online);
        (builder.finish(), left_out)
    }
}

/// A pattern whose directories before the first special character have their links resolved.
fn true_glob(pattern: &Path, paths: &Paths) -> Vec<u8> {
    let bytes = pattern.as_os_str().as_bytes();
    let Some(plain) = plain_part(pattern) else { return bytes.into() };
    let mut out = Vec::with_capacity(bytes.len());
    for &byte in paths.true_path(&plain).as_os_str().as_bytes() {
        if b"*?[\\".contains(&byte) {
            out.push(b'\\');
        }
        out.push(byte);
    }
    out.extend(&bytes[plain.as_os_str().len()..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Region;
    use impresario_ring::patterns::Patterns;

    fn entry(path: &Path) -> Entry {
        Entry { will_need: vec![Region::WHOLE], ..Entry::new(path) }
    }

    #[test]
    fn the_most_particular_entry_governs() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap().join("re*l");
        std::fs::create_dir_all(real.join("deep/er")).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        std::fs::write(real.join("a.root"), "").unwrap();
        let deep = Entry { recursive: true, ..entry(&link.join("deep")) };
        let hints = Hints {
            file: vec![entry(&link.join("a.root")), entry(&real.join("a.root")), entry(&real.join("later"))],
            directory: vec![entry(&link), deep],
            glob: vec![entry(&link.join("*.h5")), entry(&link.join("**5"))],
            ..Hints::default()
        };
        let lookup = Lookup::new(&hints, &Paths::of(&hints));
        let (bytes, left_out) = lookup.patterns();
        let patterns = Patterns::parse(&bytes).unwrap();
        assert_eq!((left_out, patterns.of_small_files()), (0, 6));
        let also_online = hints.clone().and_online();
        let (bytes_online, _) = Lookup::new(&also_online, &Paths::of(&also_online)).patterns();
        let with_online = Patterns::parse(&bytes_online).unwrap();
        let first = |path: &str| with_online.first_match(real.join(path).as_os_str().as_bytes());
        assert!(with_online.match_everything() && with_online.of_small_files() == 6);
        assert!(first("a.root") < Some(6) && first("shallow/other") == Some(6));
        for (path, key) in [
            ("a.root", Some("File[0]")),
            ("later", Some("File[2]")),
            ("x.h5", Some("Glob[0]")),
            ("y5", Some("Glob[1]")),
            ("deep/x.h5", Some("Glob[1]")),
            ("other", Some("Directory[0]")),
            ("deep/other", Some("Directory[1]")),
            ("deep/er/other", Some("Directory[1]")),
            ("shallow/other", None),
        ] {
            let path = real.join(path);
            assert_eq!(lookup.find(&path).map(|f| f.key.as_str()), key, "{}", path.display());
            assert_eq!(patterns.matches(path.as_os_str().as_bytes()), key.is_some(), "{}", path.display());
        }
        assert!(lookup.find(Path::new("/")).is_none() && lookup.find(Path::new("(unreachable)/x")).is_none());
    }

    #[test]
    fn a_list_that_is_full_leaves_out_and_counts() {
        let long = "x".repeat(4000);
        let file = (0..400).map(|i| entry(Path::new(&format!("/nowhere/{i}{long}")))).collect();
        let hints = Hints { file, ..Hints::default() };
        let (bytes, left_out) = Lookup::new(&hints, &Paths::of(&hints)).patterns();
        assert!(left_out > 100 && Patterns::parse(&bytes).is_some());
    }
}
