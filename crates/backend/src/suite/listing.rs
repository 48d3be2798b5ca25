//! Listing directories, also while they change.

use std::collections::{BTreeMap, BTreeSet};

use super::Suite;
use crate::{Handle, Make};

/// Lists a folder in slices; `between` is called after each.
fn slices(suite: &Suite<'_>, dir: &Handle, most: usize, mut between: impl FnMut()) -> Vec<(Vec<u8>, u64)> {
    let (mut all, mut cookie) = (Vec::new(), 0);
    loop {
        let (entries, last) = suite.backend.read_dir(&suite.caller, dir, cookie, most).unwrap();
        assert!(entries.len() <= most);
        assert!(last || !entries.is_empty(), "a listing that neither ends nor goes on");
        for entry in entries {
            assert_ne!(entry.cookie, 0);
            cookie = entry.cookie;
            all.push((entry.name, entry.fileid));
        }
        if last {
            return all;
        }
        between();
    }
}

pub(super) fn listed(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let dots = slices(suite, dir, 1, || ());
    assert_eq!(dots.iter().map(|(name, _)| &name[..]).collect::<BTreeSet<_>>(), [&b"."[..], b".."].into());
    let mut made = BTreeMap::new();
    for n in 0..suite.entries {
        let name = format!("entry with a name of some length {n}");
        let (_, attr) = suite.make(dir, &name, Make::File).unwrap();
        made.insert(name.into_bytes(), attr.fileid);
    }
    made.insert(b".".to_vec(), backend.attr(dir).unwrap().fileid);
    made.insert(b"..".to_vec(), backend.attr(&backend.root().unwrap()).unwrap().fileid);
    for most in [7, 1000, usize::MAX >> 1] {
        let all = slices(suite, dir, most, || ());
        assert_eq!(all.len(), made.len(), "slices of {most}: a name twice or not at all");
        assert_eq!(all.into_iter().collect::<BTreeMap<_, _>>(), made);
    }
    // From a cookie in the middle, again and again, and after everything was closed.
    let (first, _) = backend.read_dir(caller, dir, 0, 20).unwrap();
    for entry in [&first[3], &first[15], &first[3]] {
        let (rest, _) = backend.read_dir(caller, dir, entry.cookie, 4).unwrap();
        let at = first.iter().position(|other| other == entry).unwrap();
        assert_eq!(rest[..4], first[at + 1..at + 5]);
    }
    // The root tells nothing of what is above it.
    let root = backend.root().unwrap();
    let (above, _) = backend.read_dir(caller, &root, 0, 1000).unwrap();
    let fileid = backend.attr(&root).unwrap().fileid;
    assert!(above.iter().filter(|entry| entry.name == b".." || entry.name == b".").all(|e| e.fileid == fileid));
}

pub(super) fn listed_while_it_changes(suite: &Suite<'_>, dir: &Handle) {
    let stays: BTreeSet<Vec<u8>> = (0..300).map(|n| format!("stays {n}").into_bytes()).collect();
    for (n, name) in stays.iter().enumerate() {
        suite.make(dir, std::str::from_utf8(name).unwrap(), Make::File).unwrap();
        suite.make(dir, &format!("goes {n}"), Make::File).unwrap();
    }
    let mut round = 0;
    let all = slices(suite, dir, 11, || {
        for n in 0..4 {
            let _ = suite.backend.remove(&suite.caller, dir, format!("goes {}", round * 4 + n).as_bytes());
            suite.make(dir, &format!("comes {round} {n}"), Make::File).unwrap();
        }
        round += 1;
        assert!(round < 5000, "the listing does not end");
    });
    let mut seen = BTreeSet::new();
    for (name, _) in all {
        assert!(seen.insert(name.clone()) || !stays.contains(&name), "{name:?} is told twice");
    }
    assert!(stays.is_subset(&seen), "what is there all the time is told");
}
