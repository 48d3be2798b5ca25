//! By which path an open file is found again: the one that it was opened by, kept up with what this client renames, links
//! and removes.

/// Other names of an open file that are kept.
const OTHERS_MAX: usize = 8;

/// The paths of an open file that this client knows.
pub(crate) struct Paths {
    path: Vec<u8>,
    /// Names that this client gave to the file while it was open.
    others: Vec<Vec<u8>>,
}

impl Paths {
    pub(crate) fn new(path: Vec<u8>) -> Paths {
        Paths { path, others: Vec::new() }
    }

    /// The path to open it by.
    pub(crate) fn path(&self) -> &[u8] {
        &self.path
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Vec<u8>> {
        std::iter::once(&mut self.path).chain(&mut self.others)
    }

    fn has(&mut self, path: &[u8]) -> bool {
        self.all().any(|known| known == path)
    }

    pub(crate) fn renamed(&mut self, from: &[u8], to: &[u8]) {
        if self.has(to) {
            // To another name of the same file: nothing was done.
            if self.has(from) {
                return;
            }
            self.removed(to);
        }
        for path in self.all() {
            match path.strip_prefix(from) {
                Some(rest) if rest.is_empty() || rest.starts_with(b"/") => *path = [to, rest].concat(),
                _ => {}
            }
        }
    }

    pub(crate) fn exchanged(&mut self, one: &[u8], other: &[u8]) {
        // Two names of the same file: nothing was done.
        if self.has(one) && self.has(other) {
            return;
        }
        for path in self.all() {
            let moved = [(one, other), (other, one)].into_iter().find_map(|(from, to)| {
                let rest = path.strip_prefix(from)?;
                (rest.is_empty() || rest.starts_with(b"/")).then(|| [to, rest].concat())
            });
            *path = moved.unwrap_or_else(|| std::mem::take(path));
        }
    }

    pub(crate) fn linked(&mut self, from: &[u8], to: &[u8]) {
        if self.has(from) && self.others.len() < OTHERS_MAX {
            self.others.push(to.to_vec());
        }
    }

    pub(crate) fn removed(&mut self, path: &[u8]) {
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
        assert_eq!(paths.path(), b"d/c");
        paths.renamed(b"d", b"e");
        assert_eq!(paths.path(), b"e/c");
        paths.renamed(b"b", b"e/c");
        assert_eq!(paths.path(), b"e/c", "a rename to another name of the file does nothing");
        paths.renamed(b"new", b"e/c");
        assert_eq!(paths.path(), b"b", "another file has that name now");
        paths.removed(b"b");
        assert_eq!(paths.path(), b"b", "the last is kept");
        paths.renamed(b"bb", b"x");
        paths.renamed(b"b", b"y");
        assert_eq!(paths.path(), b"y");
    }

    #[test]
    fn an_exchange_moves_what_is_below_both_names() {
        let exchanged = |path: &[u8]| {
            let mut paths = Paths::new(path.into());
            paths.exchanged(b"d", b"e/f");
            paths.path().to_vec()
        };
        assert_eq!(exchanged(b"d/a"), b"e/f/a");
        assert_eq!(exchanged(b"e/f/a"), b"d/a");
        assert_eq!(exchanged(b"e/f"), b"d");
        assert_eq!(exchanged(b"e/ff"), b"e/ff");
        let mut paths = Paths::new(b"d".into());
        paths.linked(b"d", b"e/f");
        paths.exchanged(b"d", b"e/f");
        assert_eq!(paths.path(), b"d", "two names of one file");
    }

    #[test]
    fn names_are_bounded() {
        let mut paths = Paths::new(b"a".into());
        (0..100u8).for_each(|i| paths.linked(b"a", &[b'b', i]));
        assert_eq!(paths.others.len(), OTHERS_MAX);
    }
}
