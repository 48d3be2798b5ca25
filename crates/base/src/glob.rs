//! Patterns of paths and names as shells have them: `*` and `?` do not match `/`, `**` matches anything, `[a-z]` and
//! `[!a-z]` match one byte except `/`, and `\` escapes the next byte. Matching neither allocates nor panics.

/// Matching steps after which a pattern counts as not matching: more than any reasonable one needs.
const STEPS_MAX: u32 = 100_000;

/// Whether a pattern matches a whole name. Takes a bounded number of steps; a pattern that
/// needs more does not match.
///
/// After a mismatch the last `*` takes one more byte; if that is a slash, the last `**` does. Earlier stars need no
/// retry, because a later star of the same kind can take whatever they could.
pub fn matches(pattern: &[u8], path: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to continue when a star takes one more byte: in the pattern after the star, in the path after that byte.
    type Again = Option<(usize, usize)>;
    let (mut star, mut deep): (Again, Again) = (None, None);
    for _ in 0..STEPS_MAX {
        match pattern.get(p) {
            Some(b'*') => {
                if pattern.get(p + 1) == Some(&b'*') {
                    p += 2;
                    (star, deep) = (None, Some((p, t)));
                } else {
                    p += 1;
                    star = Some((p, t));
                }
                continue;
            }
            None if t == path.len() => return true,
            Some(_) if t < path.len() => {
                if let Some(after) = one_byte(pattern, p, path[t]) {
                    (p, t) = (after, t + 1);
                    continue;
                }
            }
            _ => {}
        }
        match (star, deep) {
            (Some((after, from)), _) if from < path.len() && path[from] != b'/' => {
                star = Some((after, from + 1));
                (p, t) = (after, from + 1);
            }
            (_, Some((after, from))) if from < path.len() => {
                star = None;
                deep = Some((after, from + 1));
                (p, t) = (after, from + 1);
            }
            _ => return false,
        }
    }
    false
}

/// The position in the pattern after the element that matches `byte` at `p`.
fn one_byte(pattern: &[u8], p: usize, byte: u8) -> Option<usize> {
    match pattern[p] {
        b'?' => (byte != b'/').then_some(p + 1),
        b'\\' if p + 1 < pattern.len() => (pattern[p + 1] == byte).then_some(p + 2),
        b'[' => match class(pattern, p, byte) {
            Some((inside, after)) => (inside && byte != b'/').then_some(after),
            // Unclosed: an ordinary bracket.
            None => (byte == b'[').then_some(p + 1),
        },
        literal => (literal == byte).then_some(p + 1),
    }
}

/// Whether the byte is in the class that opens at `p`, and the position after the class; `None` if it is unclosed.
fn class(pattern: &[u8], p: usize, byte: u8) -> Option<(bool, usize)> {
    let mut at = p + 1;
    let not = matches!(pattern.get(at), Some(b'!' | b'^'));
    at += usize::from(not);
    let first = at;
    let mut inside = false;
    loop {
        let low = *pattern.get(at)?;
        if low == b']' && at > first {
            return Some((inside != not, at + 1));
        }
        match (pattern.get(at + 1), pattern.get(at + 2)) {
            (Some(b'-'), Some(&high)) if high != b']' => {
                inside |= (low..=high).contains(&byte);
                at += 3;
            }
            _ => {
                inside |= low == byte;
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn globs() {
        for (pattern, path, expected) in [
            ("**", "/any/thing", true),
            ("**.root", "/a/b/c.root", true),
            ("/a/**/z", "/a/b/c/z", true),
            ("/a/**/z", "/a/z", false),
            ("/a/**z", "/a/z", true),
            ("/a/*", "/a/b/c", false),
            ("/a/*/*.h5", "/a/b/c.h5", true),
            ("/a/*b*c", "/a/xbxbxc", true),
            ("/**/x*y/z", "/1/xay/xby/z", true),
            ("/a?c", "/abc", true),
            ("/a?c", "/a/c", false),
            ("/[!a]", "/b", true),
            ("/[^a]", "/a", false),
            ("/[]x]", "/]", true),
            ("/[a", "/[a", true),
            ("/[a-c-]", "/-", true),
            ("/x[/]y", "/x/y", false),
            (r"/\*", "/*", true),
            (r"/\*", "/a", false),
            (r"/a\", r"/a\", true),
            ("/*", "/", true),
            ("/a", "/ab", false),
            ("/ab", "/a", false),
            ("n1", "n1", true),
            ("n1", "n10", false),
            ("n*", "n10", true),
            ("*.cluster", "n1.cluster", true),
            ("n*0*1", "n10201", true),
            ("n*0*1", "n1021x", false),
            ("ab*ba", "aba", false),
            ("*", "", true),
            ("", "n1", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), path.as_bytes()), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn an_expensive_pattern_terminates() {
        let pattern = [b"/".to_vec(), b"**a*b".repeat(600)].concat();
        assert!(!matches(&pattern, &[b"/".to_vec(), b"ab/".repeat(1300)].concat()));
    }

    /// The rules of a glob without classes and escapes, by exhaustive search.
    fn naive(pattern: &[u8], path: &[u8]) -> bool {
        match pattern {
            [] => path.is_empty(),
            [b'*', b'*', rest @ ..] => (0..=path.len()).any(|n| naive(rest, &path[n..])),
            [b'*', rest @ ..] => {
                let end = path.iter().position(|b| *b == b'/').unwrap_or(path.len());
                (0..=end).any(|n| naive(rest, &path[n..]))
            }
            [b'?', rest @ ..] => path.first().is_some_and(|b| *b != b'/') && naive(rest, &path[1..]),
            [c, rest @ ..] => path.first() == Some(c) && naive(rest, &path[1..]),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]
        #[test]
        fn globs_match_as_the_plain_rules_say(pattern in "/[ab/*?]{0,9}", path in "/[ab/]{0,9}") {
            prop_assert_eq!(matches(pattern.as_bytes(), path.as_bytes()), naive(pattern.as_bytes(), path.as_bytes()));
        }

        #[test]
        fn any_glob_terminates(pattern in proptest::collection::vec(any::<u8>(), 0..60), path in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = matches(&pattern, &path);
        }
    }
}
