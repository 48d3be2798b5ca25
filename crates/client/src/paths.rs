//! By which path an open file is found again: the one that it was opened by, kept up with what this client renames, links
//! and removes. A change of a name finds the files that it concerns in an index, however many are open.

use std::collections::BTreeSet;

use impresario_base::lock::Mutex;
use rustc_hash::FxHashMap;

/// Other names of an open file that are kept.
const OTHERS_MAX: usize = 8;

/// The paths of all open files of a client, which have numbers.
#[derive(Default)]
pub(crate) struct OpenPaths(Mutex<Index>);

#[derive(Default)]
struct Index {
    files: FxHashMap<u64, Paths>,
    by_path: BTreeSet<(Vec<u8>, u64)>,
    /// Names that this client gave.
    given: u64,
}

impl OpenPaths {
    /// A file was opened by this path.
    pub(crate) fn insert(&self, number: u64, path: Vec<u8>) {
        let mut index = self.0.lock();
        index.by_path.insert((path.clone(), number));
        index.files.insert(number, Paths::new(path));
    }

    /// A file is closed.
    pub(crate) fn remove(&self, number: u64) {
        let mut index = self.0.lock();
        if let Some(paths) = index.files.remove(&number) {
            index.delist(number, &paths);
        }
    }

    /// The path to open a file by.
    pub(crate) fn of(&self, number: u64) -> Vec<u8> {
        self.0.lock().files.get(&number).map(|paths| paths.path.clone()).unwrap_or_default()
    }

    /// How many names this client has given to what had one, open or not.
    pub(crate) fn given(&self) -> u64 {
        self.0.lock().given
    }

    /// This client renamed what files were opened by, a folder above it, or what replaced it.
    pub(crate) fn renamed(&self, from: &[u8], to: &[u8]) {
        let mut index = self.0.lock();
        index.given += 1;
        let concerned = [index.below(from), index.at(to)].concat();
        index.change(concerned, |paths| paths.renamed(from, to));
    }

    /// This client exchanged what two paths name.
    pub(crate) fn exchanged(&self, one: &[u8], other: &[u8]) {
        let mut index = self.0.lock();
        index.given += 1;
        let concerned = [index.below(one), index.below(other)].concat();
        index.change(concerned, |paths| paths.exchanged(one, other));
    }

    /// This client gave a file another name.
    pub(crate) fn linked(&self, from: &[u8], to: &[u8]) {
        let mut index = self.0.lock();
        index.given += 1;
        let concerned = index.at(from);
        index.change(concerned, |paths| paths.linked(from, to));
    }

    /// This client removed a name.
    pub(crate) fn removed(&self, path: &[u8]) {
        let mut index = self.0.lock();
        let concerned = index.at(path);
        index.change(concerned, |paths| paths.removed(path));
    }
}

impl Index {
    /// The files that have this path.
    fn at(&self, path: &[u8]) -> Vec<u64> {
        let files = self.by_path.range((path.to_vec(), 0)..=(path.to_vec(), u64::MAX));
        files.map(|(_, number)| *number).collect()
    }

    /// These, and those with a path below it.
    fn below(&self, path: &[u8]) -> Vec<u64> {
        let prefix = [path, b"/"].concat();
        let below = self.by_path.range((prefix.clone(), 0)..).take_while(|(path, _)| path.starts_with(&prefix));
        let mut files = self.at(path);
        files.extend(below.map(|(_, number)| *number));
        files
    }

    /// Changes the paths of files, once for each.
    fn change(&mut self, mut files: Vec<u64>, change: impl Fn(&mut Paths)) {
        files.sort_unstable();
        files.dedup();
        for number in files {
            let Some(mut paths) = self.files.remove(&number) else { continue };
            self.delist(number, &paths);
            change(&mut paths);
            self.by_path.extend(paths.all().map(|path| (path.clone(), number)));
            self.files.insert(number, paths);
        }
    }

    fn delist(&mut self, number: u64, paths: &Paths) {
        for path in paths.all() {
            self.by_path.remove(&(path.clone(), number));
        }
    }
}

/// The paths of an open file that this client knows.
struct Paths {
    path: Vec<u8>,
    /// Names that this client gave to the file while it was open.
    others: Vec<Vec<u8>>,
}

impl Paths {
    fn new(path: Vec<u8>) -> Paths {
        Paths { path, others: Vec::new() }
    }

    fn all(&self) -> impl Iterator<Item = &Vec<u8>> {
        std::iter::once(&self.path).chain(&self.others)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Vec<u8>> {
        std::iter::once(&mut self.path).chain(&mut self.others)
    }

    fn has(&self, path: &[u8]) -> bool {
        self.all().any(|known| known == path)
    }

    fn renamed(&mut self, from: &[u8], to: &[u8]) {
        if self.has(to) {
            // To another name of the same file: nothing was done.
            if self.has(from) {
                return;
            }
            self.removed(to);
        }
        for path in self.all_mut() {
            match path.strip_prefix(from) {
                Some(rest) if rest.is_empty() || rest.starts_with(b"/") => *path = [to, rest].concat(),
                _ => {}
            }
        }
    }

    fn exchanged(&mut self, one: &[u8], other: &[u8]) {
        // Two names of the same file: nothing was done.
        if self.has(one) && self.has(other) {
            return;
        }
        for path in self.all_mut() {
            let moved = [(one, other), (other, one)].into_iter().find_map(|(from, to)| {
                let rest = path.strip_prefix(from)?;
                (rest.is_empty() || rest.starts_with(b"/")).then(|| [to, rest].concat())
            });
            *path = moved.unwrap_or_else(|| std::mem::take(path));
        }
    }

    fn linked(&mut self, from: &[u8], to: &[u8]) {
        if self.has(from) && self.others.len() < OTHERS_MAX {
            self.others.push(to.to_vec());
        }
    }

    fn removed(&mut self, path: &[u8]) {
        self.others.retain(|other| other != path);
        // Without another one it is found by its key, among the removed files.
        if self.path == path
            && let Some(other) = self.others.pop()
        {
            self.path = other;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_by_a_name_that_is_left() {
        let mut paths = Paths::new(b"d/a".into());
        paths.linked(b"d/other", b"x");
        paths.linked(b"d/a", b"b");
        paths.linked(b"b", b"d/c");
        paths.removed(b"d/a");
        assert_eq!(&*paths.path, b"d/c");
        paths.renamed(b"d", b"e");
        assert_eq!(&*paths.path, b"e/c");
        paths.renamed(b"b", b"e/c");
        assert_eq!(&*paths.path, b"e/c", "a rename to another name of the file does nothing");
        paths.renamed(b"new", b"e/c");
        assert_eq!(&*paths.path, b"b", "another file has that name now");
        paths.removed(b"b");
        assert_eq!(&*paths.path, b"b", "the last is kept");
        paths.renamed(b"bb", b"x");
        paths.renamed(b"b", b"y");
        assert_eq!(&*paths.path, b"y");
    }

    #[test]
    fn an_exchange_moves_what_is_below_both_names() {
        let exchanged = |path: &[u8]| {
            let mut paths = Paths::new(path.into());
            paths.exchanged(b"d", b"e/f");
            paths.path
        };
        assert_eq!(exchanged(b"d/a"), b"e/f/a");
        assert_eq!(exchanged(b"e/f/a"), b"d/a");
        assert_eq!(exchanged(b"e/f"), b"d");
        assert_eq!(exchanged(b"e/ff"), b"e/ff");
        let mut paths = Paths::new(b"d".into());
        paths.linked(b"d", b"e/f");
        paths.exchanged(b"d", b"e/f");
        assert_eq!(&*paths.path, b"d", "two names of one file");
    }

    #[test]
    fn a_change_of_a_name_visits_the_files_that_it_concerns() {
        let paths = OpenPaths::default();
        let path = |n: u64| format!("d{}/f{n}", n / 10).into_bytes();
        (0..10_000).for_each(|n| paths.insert(n, path(n)));
        paths.insert(10_000, path(7));
        let at = |path: &[u8]| paths.0.lock().at(path);
        let below = |path: &[u8]| paths.0.lock().below(path);
        assert_eq!((at(b"d0/f7"), at(b"d0"), at(b"d0/f")), (vec![7, 10_000], vec![], vec![]));
        assert_eq!(below(b"d3"), (30..40).collect::<Vec<_>>(), "and not those below d30");
        paths.linked(b"d3/f31", b"other");
        paths.removed(b"d3/f31");
        paths.renamed(b"d3", b"e/d");
        paths.renamed(b"d4/f40", b"e/d/f32");
        paths.exchanged(b"d5", b"d6");
        let now = [30, 31, 32, 40, 50, 60, 300].map(|number| String::from_utf8(paths.of(number)).unwrap());
        assert_eq!(now, ["e/d/f30", "other", "e/d/f32", "e/d/f32", "d6/f50", "d5/f60", "d30/f300"]);
        (0..=10_000).for_each(|number| paths.remove(number));
        let index = paths.0.lock();
        assert!(index.files.is_empty() && index.by_path.is_empty(), "{:?}", index.by_path);
    }

    #[test]
    fn names_are_bounded() {
        let mut paths = Paths::new(b"a".into());
        (0..100u8).for_each(|i| paths.linked(b"a", &[b'b', i]));
        assert_eq!(paths.others.len(), OTHERS_MAX);
    }
}
