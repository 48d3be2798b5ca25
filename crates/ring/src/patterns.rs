//! Which files the manager is interested in: a list of path patterns in a flat encoding, made by [`Builder`] and
//! matched by [`Patterns`] without allocating. Paths are canonical and absolute, as `/proc/self/fd/N` shows them.
//!
//! Layout: magic and number of patterns (four bytes each), then for each the kind (one byte), the length (two bytes) and
//! the pattern's bytes, and at the end how many of the first ones are of [small files, too](Builder::of_small_files) (four bytes, which
//! may be missing: none is). Numbers are little-endian.

use std::ops::ControlFlow;

use impresario_base::glob;

const MAGIC: u32 = u32::from_le_bytes(*b"IMPP");
const HEADER: usize = 8;
/// Bytes behind the last pattern.
const END: usize = 4;

/// Maximum bytes of a list.
pub const PATTERNS_BYTES_MAX: usize = 1 << 20;
/// Longest pattern or path, in bytes (`PATH_MAX`).
pub const PATH_BYTES_MAX: usize = 4096;

/// How a pattern is compared with a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// The path itself.
    File = 0,
    /// Everything below a directory, at any depth.
    Tree = 1,
    /// A [`glob`] over the whole path.
    Glob = 2,
    /// The direct entries of a directory.
    Directory = 3,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Kind> {
        [Kind::File, Kind::Tree, Kind::Glob, Kind::Directory].into_iter().find(|kind| *kind as u8 == byte)
    }

    /// Whether the pattern matches the path; directories may end with a slash.
    pub fn matches(self, pattern: &[u8], path: &[u8]) -> bool {
        let below = || {
            let directory = pattern.strip_suffix(b"/").unwrap_or(pattern);
            path.strip_prefix(directory)?.strip_prefix(b"/").filter(|rest| !rest.is_empty())
        };
        match self {
            Kind::File => pattern == path,
            Kind::Tree => below().is_some(),
            Kind::Directory => below().is_some_and(|rest| !rest.contains(&b'/')),
            Kind::Glob => glob::matches(pattern, path),
        }
    }
}

/// Why a pattern was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is empty, or longer than [`PATH_BYTES_MAX`].
    Length(usize),
    /// It does not begin with `/`, so no path could match.
    Relative,
    /// The list would be longer than [`PATTERNS_BYTES_MAX`].
    ListFull,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refused::Length(bytes) => write!(f, "a path of {bytes} bytes; 1 to {PATH_BYTES_MAX} are possible"),
            Refused::Relative => write!(f, "the path does not begin with /"),
            Refused::ListFull => write!(f, "the paths together are longer than {PATTERNS_BYTES_MAX} bytes"),
        }
    }
}

impl std::error::Error for Refused {}

/// Builds a list of patterns.
#[derive(Clone, Debug)]
pub struct Builder {
    bytes: Vec<u8>,
    count: u32,
    /// So many of the first ones are of small files, too.
    of_small: u32,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder::new()
    }
}

impl Builder {
    /// An empty list: nothing matches.
    pub fn new() -> Builder {
        Builder { bytes: [MAGIC.to_le_bytes(), [0; 4]].concat(), count: 0, of_small: 0 }
    }

    /// Adds a pattern.
    ///
    /// # Errors
    /// [`Refused`]; the list is unchanged.
    pub fn add(&mut self, kind: Kind, pattern: &[u8]) -> Result<(), Refused> {
        if pattern.is_empty() || pattern.len() > PATH_BYTES_MAX {
            return Err(Refused::Length(pattern.len()));
        }
        if pattern[0] != b'/' && !(kind == Kind::Glob && pattern.starts_with(b"**")) {
            return Err(Refused::Relative);
        }
        if self.bytes.len() + 3 + pattern.len() + END > PATTERNS_BYTES_MAX {
            return Err(Refused::ListFull);
        }
        self.bytes.push(kind as u8);
        self.bytes.extend((pattern.len() as u16).to_le_bytes());
        self.bytes.extend(pattern);
        self.count += 1;
        Ok(())
    }

    /// The patterns that were added up to now are of files that a program must not pass over, however small they are.
    pub fn of_small_files(&mut self) {
        self.of_small = self.count;
    }

    /// The list as bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes[4..HEADER].copy_from_slice(&self.count.to_le_bytes());
        self.bytes.extend(self.of_small.to_le_bytes());
        self.bytes
    }
}

/// A list of patterns in borrowed bytes.
#[derive(Clone, Copy, Debug)]
pub struct Patterns<'a> {
    records: &'a [u8],
    count: u32,
}

impl<'a> Patterns<'a> {
    /// Checks the header of a list; `None` if it is invalid. The patterns are checked when a path is matched: a
    /// truncated list matches as far as it goes.
    pub fn parse(bytes: &'a [u8]) -> Option<Patterns<'a>> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (count, records) = rest.split_first_chunk::<4>()?;
        let sound = u32::from_le_bytes(*magic) == MAGIC && bytes.len() <= PATTERNS_BYTES_MAX;
        sound.then_some(Patterns { records, count: u32::from_le_bytes(*count) })
    }

    /// The index of the first pattern that matches the path. Neither allocates nor panics.
    pub fn first_match(&self, path: &[u8]) -> Option<u32> {
        if path.len() > PATH_BYTES_MAX {
            return None;
        }
        let found = self.walk(|at, kind, pattern| match kind.is_some_and(|k| k.matches(pattern, path)) {
            true => ControlFlow::Break(at),
            false => ControlFlow::Continue(()),
        });
        found.break_value()
    }

    /// Whether a path matches.
    pub fn matches(&self, path: &[u8]) -> bool {
        self.first_match(path).is_some()
    }

    /// How many of the first patterns are of small files, too.
    pub fn of_small_files(&self) -> u32 {
        let (mut end, mut seen) = (self.records, 0);
        let _ = self.walk_with_rest(|at, _, _, rest| {
            (end, seen) = (rest, at + 1);
            ControlFlow::<()>::Continue(())
        });
        // Of a list that is cut, what would be the number is a part of a pattern.
        let number = end.first_chunk::<END>().filter(|_| seen == self.count);
        number.map_or(0, |number| u32::from_le_bytes(*number).min(self.count))
    }

    /// Whether every path matches, by one pattern.
    pub fn match_everything(&self) -> bool {
        let found = self.walk(|_, kind, pattern| match (kind, pattern) {
            (Some(Kind::Tree), b"/") => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        });
        found.is_break()
    }

    /// Visits the patterns, with `None` for an unknown kind.
    pub fn for_each(&self, mut see: impl FnMut(Option<Kind>, &[u8])) {
        let _: ControlFlow<()> = self.walk(|_, kind, pattern| {
            see(kind, pattern);
            ControlFlow::Continue(())
        });
    }

    fn walk<B>(&self, mut step: impl FnMut(u32, Option<Kind>, &[u8]) -> ControlFlow<B>) -> ControlFlow<B> {
        self.walk_with_rest(|at, kind, pattern, _| step(at, kind, pattern))
    }

    /// The same, with what lies behind each pattern.
    fn walk_with_rest<B>(
        &self,
        mut step: impl FnMut(u32, Option<Kind>, &[u8], &'a [u8]) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let mut rest = self.records;
        for at in 0..self.count {
            let Some((&[kind, low, high], after)) = rest.split_first_chunk::<3>() else { break };
            let Some((pattern, after)) = after.split_at_checked(usize::from(u16::from_le_bytes([low, high]))) else {
                break;
            };
            step(at, Kind::from_byte(kind), pattern, after)?;
            rest = after;
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(patterns: &[(Kind, &str)]) -> Vec<u8> {
        let mut builder = Builder::new();
        for (kind, pattern) in patterns {
            builder.add(*kind, pattern.as_bytes()).unwrap();
        }
        builder.finish()
    }

    #[test]
    fn one_pattern_may_match_everything() {
        let everything = |patterns: &[(Kind, &str)]| Patterns::parse(&list(patterns)).unwrap().match_everything();
        assert!(everything(&[(Kind::File, "/a"), (Kind::Tree, "/")]));
        assert!(!everything(&[]) && !everything(&[(Kind::Directory, "/"), (Kind::File, "/"), (Kind::Tree, "/a")]));
    }

    #[test]
    fn the_first_patterns_may_be_of_small_files() {
        let mut builder = Builder::new();
        builder.add(Kind::File, b"/planned").unwrap();
        builder.of_small_files();
        builder.add(Kind::Tree, b"/").unwrap();
        let bytes = builder.finish();
        let of = |bytes: &[u8]| Patterns::parse(bytes).unwrap().of_small_files();
        assert_eq!(of(&bytes), 1);
        // As an older manager sends it, or one that is cut.
        for len in HEADER..bytes.len() {
            assert_eq!(of(&bytes[..len]), 0, "{len}");
        }
        assert_eq!(of(&list(&[(Kind::Tree, "/")])), 0);
        assert_eq!(of(&Builder::new().finish()), 0);
    }

    #[test]
    fn each_kind_matches_what_it_says() {
        let bytes = list(&[
            (Kind::File, "/data/a"),
            (Kind::Directory, "/data/run"),
            (Kind::Tree, "/deep/"),
            (Kind::Glob, "/home/*/x[0-9].root"),
        ]);
        let patterns = Patterns::parse(&bytes).unwrap();
        for (path, first) in [
            ("/data/a", Some(0)),
            ("/data/ab", None),
            ("/data/run", None),
            ("/data/run/", None),
            ("/data/run/f", Some(1)),
            ("/data/run/sub/f", None),
            ("/data/runner/f", None),
            ("/deep/f", Some(2)),
            ("/deep/a/b/c", Some(2)),
            ("/deeper/f", None),
            ("/home/me/x7.root", Some(3)),
            ("/home/me/y/x7.root", None),
            ("", None),
        ] {
            assert_eq!(patterns.first_match(path.as_bytes()), first, "{path}");
        }
        let root = list(&[(Kind::Tree, "/")]);
        assert!(Patterns::parse(&root).unwrap().matches(b"/etc/passwd"));
        assert!(!Patterns::parse(&Builder::new().finish()).unwrap().matches(b"/etc/passwd"));
    }

    #[test]
    fn patterns_that_cannot_match_are_refused() {
        let mut builder = Builder::new();
        assert_eq!(builder.add(Kind::File, b"data"), Err(Refused::Relative));
        assert_eq!(builder.add(Kind::Glob, b"*.root"), Err(Refused::Relative));
        assert_eq!(builder.add(Kind::Tree, b""), Err(Refused::Length(0)));
        assert_eq!(builder.add(Kind::File, &[b'/'; 4097]), Err(Refused::Length(4097)));
        let mut added = 0;
        let full = loop {
            match builder.add(Kind::File, &[b'/'; 4096]) {
                Ok(()) => added += 1,
                Err(e) => break e,
            }
        };
        assert_eq!(full, Refused::ListFull);
        let bytes = builder.finish();
        assert!(bytes.len() <= PATTERNS_BYTES_MAX);
        let mut seen = 0;
        Patterns::parse(&bytes).unwrap().for_each(|kind, pattern| {
            assert_eq!((kind, pattern.len()), (Some(Kind::File), 4096));
            seen += 1;
        });
        assert_eq!(seen, added);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_list_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..80), count: u32,
                                        path in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = Patterns::parse(&bytes).map(|p| p.matches(&path));
            let list = [&MAGIC.to_le_bytes()[..], &count.to_le_bytes(), &bytes].concat();
            let patterns = Patterns::parse(&list).unwrap();
            let _ = patterns.matches(&path);
            let mut seen = 0;
            patterns.for_each(|_, _| seen += 1);
            prop_assert!(seen * 3 <= bytes.len());
        }
    }
}
