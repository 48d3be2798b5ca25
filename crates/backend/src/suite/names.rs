//! Making, finding, renaming, linking and removing nodes.

use super::{Suite, refuses};
use crate::{Errno, Handle, Kind, Make, SetAttr};

pub(super) fn made_and_found(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let set = SetAttr { mode: Some(0o640), ..SetAttr::default() };
    let (file, attr) = backend.make(caller, dir, b"file", Make::File, &set).unwrap();
    assert_eq!((attr.kind, attr.mode, attr.links, attr.size_bytes), (Kind::File, 0o640, 1, 0));
    assert_eq!((attr.uid, attr.gid), (caller.uid, caller.gid));
    assert_eq!(suite.find(dir, "file").unwrap(), (file, backend.attr(&file).unwrap()));

    let (inner, attr) = suite.make(dir, "inner", Make::Directory).unwrap();
    assert_eq!((attr.kind, attr.mode), (Kind::Directory, 0o755));
    let (link, attr) = suite.make(dir, "link", Make::Symlink(b"inner/../file")).unwrap();
    assert_eq!((attr.kind, attr.size_bytes), (Kind::Symlink, 13));
    assert_eq!(backend.read_link(caller, &link).unwrap(), b"inner/../file");
    let (_, attr) = suite.make(dir, "pipe", Make::Fifo).unwrap();
    assert_eq!(attr.kind, Kind::Fifo);
    let (_, attr) = suite.make(dir, "socket", Make::Socket).unwrap();
    assert_eq!(attr.kind, Kind::Socket);

    assert_eq!(suite.find(&inner, "..").unwrap().0, *dir);
    assert_eq!(suite.find(&inner, ".").unwrap().0, inner);
    let root = backend.root().unwrap();
    assert_eq!(suite.find(&root, "..").unwrap().0, root);
    assert_eq!(suite.find(dir, "..").unwrap().0, root);
    assert_eq!(backend.attr(&root).unwrap().kind, Kind::Directory);

    // What is there stays as it is where that is allowed.
    let file = suite.file(dir, "full", b"contents");
    let (same, attr) = suite.make(dir, "full", Make::FileIfNone).unwrap();
    assert_eq!((same, attr.size_bytes), (file, 8));
    let (_, attr) = suite.make(dir, "fresh", Make::FileIfNone).unwrap();
    assert_eq!(attr.size_bytes, 0);

    let set = SetAttr { size_bytes: Some(100), mode: Some(0o444), ..SetAttr::default() };
    let (read_only, attr) = backend.make(caller, dir, b"sized", Make::File, &set).unwrap();
    assert_eq!((attr.size_bytes, attr.mode), (100, 0o444));
    backend.write(caller, &read_only, 0, b"its maker writes", false).unwrap();
}

pub(super) fn refused(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let file = suite.file(dir, "file", b"");
    let inner = suite.folder(dir, "inner");
    let (link, _) = suite.make(dir, "link", Make::Symlink(b"inner")).unwrap();
    let set = SetAttr::default();

    refuses(suite.find(dir, "none"), libc::ENOENT);
    refuses(suite.find(&file, "name"), libc::ENOTDIR);
    // No name leads over a symbolic link.
    refuses(suite.find(&link, "name"), libc::ENOTDIR);
    refuses(suite.make(&link, "name", Make::File), libc::ENOTDIR);
    for bad in ["", "a/b", "/", "a\0b", "../file"] {
        refuses(suite.find(dir, bad), libc::EINVAL);
        refuses(suite.make(dir, bad, Make::File), libc::EINVAL);
        refuses(backend.remove(caller, dir, bad.as_bytes()), libc::EINVAL);
        refuses(backend.rename(caller, (dir, b"file"), (dir, bad.as_bytes())), libc::EINVAL);
    }
    for dots in [&b"."[..], b".."] {
        refuses(backend.make(caller, dir, dots, Make::Directory, &set), libc::EEXIST);
        refuses(backend.link(caller, &file, dir, dots), libc::EEXIST);
        refuses(backend.remove_dir(caller, &inner, dots), libc::EINVAL);
        refuses(backend.rename(caller, (&inner, dots), (dir, b"new")), libc::EINVAL);
    }
    for name in ["file", "inner", "link"] {
        refuses(suite.make(dir, name, Make::File), libc::EEXIST);
        refuses(suite.make(dir, name, Make::Directory), libc::EEXIST);
        refuses(suite.make(dir, name, Make::Symlink(b"x")), libc::EEXIST);
        refuses(suite.make(dir, name, Make::FileOnce([7; 8])), libc::EEXIST);
    }
    refuses(suite.make(dir, "inner", Make::FileIfNone), libc::EISDIR);
    refuses(suite.make(dir, "link", Make::FileIfNone), libc::EEXIST);
    refuses(backend.read_link(caller, &file), libc::EINVAL);
    refuses(backend.read_dir(caller, &file, 0, 10), libc::ENOTDIR);
    refuses(backend.read(caller, &inner, 0, &mut [0; 4]), libc::EISDIR);
    refuses(backend.write(caller, &inner, 0, b"x", false), libc::EISDIR);
    // Neither follows it.
    assert!(
        backend.read(caller, &link, 0, &mut [0; 4]).is_err() && backend.write(caller, &link, 0, b"x", false).is_err()
    );
    assert_eq!(backend.attr(&inner).unwrap().kind, Kind::Directory);
}

pub(super) fn renamed(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let rename = |from: (&Handle, &str), to: (&Handle, &str)| {
        backend.rename(caller, (from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()))
    };
    let (one, two) = (suite.file(dir, "one", b"1"), suite.file(dir, "two", b"22"));
    let (empty, full) = (suite.folder(dir, "empty"), suite.folder(dir, "full"));
    let inner = suite.folder(&full, "inner");

    // In place of another, in one step; the handle goes along.
    rename((dir, "one"), (dir, "two")).unwrap();
    assert_eq!(suite.find(dir, "two").unwrap().0, one);
    refuses(suite.find(dir, "one"), libc::ENOENT);
    refuses(backend.attr(&two), libc::ESTALE);
    assert_eq!(suite.contents(&one).unwrap(), b"1");
    rename((dir, "two"), (&inner, "deep")).unwrap();
    assert_eq!(suite.find(&inner, "deep").unwrap().0, one);
    assert_eq!(suite.contents(&one).unwrap(), b"1");

    refuses(rename((dir, "none"), (dir, "new")), libc::ENOENT);
    refuses(rename((&inner, "deep"), (dir, "empty")), libc::EISDIR);
    refuses(rename((dir, "empty"), (&inner, "deep")), libc::ENOTDIR);
    refuses(rename((dir, "empty"), (dir, "full")), libc::ENOTEMPTY);
    refuses(rename((dir, "full"), (&inner, "self")), libc::EINVAL);
    refuses(rename((dir, "full"), (&one, "x")), libc::ENOTDIR);

    // A folder over an empty one; what is below goes along, also under handles that were known before.
    rename((dir, "full"), (dir, "empty")).unwrap();
    refuses(backend.attr(&empty), libc::ESTALE);
    assert_eq!(suite.find(dir, "empty").unwrap().0, full);
    assert_eq!(suite.find(&full, "inner").unwrap().0, inner);
    assert_eq!(suite.find(&inner, "..").unwrap().0, full);
    assert_eq!(suite.contents(&one).unwrap(), b"1");

    // The same name, and two names of one file: nothing happens.
    rename((dir, "empty"), (dir, "empty")).unwrap();
    backend.link(caller, &one, dir, b"second").unwrap();
    rename((dir, "second"), (&inner, "deep")).unwrap();
    assert_eq!((suite.find(dir, "second").unwrap().0, suite.find(&inner, "deep").unwrap().0), (one, one));
    assert_eq!(backend.attr(&one).unwrap().links, 2);

    let other = suite.file(dir, "other", b"");
    match backend.rename_new(caller, (dir, b"other"), (dir, b"newer")) {
        // Some file systems cannot, and say so.
        Err(Errno(libc::EINVAL)) => return,
        renamed => renamed.unwrap(),
    }
    assert_eq!(suite.find(dir, "newer").unwrap().0, other);
    refuses(backend.rename_new(caller, (dir, b"newer"), (dir, b"second")), libc::EEXIST);
}

pub(super) fn removed(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let (file, inner) = (suite.file(dir, "file", b"bytes"), suite.folder(dir, "inner"));
    let deep = suite.file(&inner, "deep", b"");
    refuses(backend.remove(caller, dir, b"none"), libc::ENOENT);
    refuses(backend.remove(caller, dir, b"inner"), libc::EISDIR);
    refuses(backend.remove_dir(caller, dir, b"file"), libc::ENOTDIR);
    refuses(backend.remove_dir(caller, dir, b"inner"), libc::ENOTEMPTY);
    backend.remove(caller, &inner, b"deep").unwrap();
    refuses(backend.attr(&deep), libc::ESTALE);
    backend.remove_dir(caller, dir, b"inner").unwrap();
    refuses(backend.attr(&inner), libc::ESTALE);
    refuses(suite.make(&inner, "orphan", Make::File), libc::ESTALE);
    refuses(suite.find(&inner, "deep"), libc::ESTALE);
    // It was used through a descriptor that may still be open.
    backend.remove(caller, dir, b"file").unwrap();
    refuses(backend.attr(&file), libc::ESTALE);
    refuses(suite.contents(&file), libc::ESTALE);
    refuses(backend.write(caller, &file, 0, b"x", false), libc::ESTALE);
    // A new node of the old name is another one.
    let again = suite.file(dir, "file", b"new");
    assert_ne!(again, file);
    refuses(backend.attr(&file), libc::ESTALE);
    assert_eq!(suite.contents(&again).unwrap(), b"new");
}

pub(super) fn held(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let file = suite.file(dir, "file", b"bytes");
    backend.hold(&file).unwrap();
    backend.hold(&file).unwrap();
    backend.remove(caller, dir, b"file").unwrap();
    assert_eq!(suite.contents(&file).unwrap(), b"bytes");
    backend.release(&file);
    backend.write(caller, &file, 5, b" and more", false).unwrap();
    assert_eq!(suite.contents(&file).unwrap(), b"bytes and more");
    backend.sync(&file).unwrap();
    assert_eq!(backend.attr(&file).unwrap().links, 0);
    backend.release(&file);
    refuses(backend.attr(&file), libc::ESTALE);
    refuses(suite.contents(&file), libc::ESTALE);
    refuses(backend.hold(&file), libc::ESTALE);
    backend.release(&file); // of nothing: no harm
    // The same when another takes its name.
    let (old, _) = (suite.file(dir, "old", b"old"), suite.file(dir, "new", b"new"));
    backend.hold(&old).unwrap();
    backend.rename(caller, (dir, b"new"), (dir, b"old")).unwrap();
    assert_eq!(suite.contents(&old).unwrap(), b"old");
    backend.release(&old);
    refuses(suite.contents(&old), libc::ESTALE);
}

pub(super) fn linked(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let file = suite.file(dir, "file", b"bytes");
    let inner = suite.folder(dir, "inner");
    assert_eq!(backend.link(caller, &file, &inner, b"second").unwrap().links, 2);
    assert_eq!(suite.find(&inner, "second").unwrap().0, file);
    refuses(backend.link(caller, &file, dir, b"inner"), libc::EEXIST);
    refuses(backend.link(caller, &inner, dir, b"folder"), libc::EPERM);
    refuses(backend.link(caller, &file, &file, b"name"), libc::ENOTDIR);
    backend.remove(caller, dir, b"file").unwrap();
    assert_eq!(backend.attr(&file).unwrap().links, 1);
    assert_eq!(suite.contents(&file).unwrap(), b"bytes");
    backend.remove(caller, &inner, b"second").unwrap();
    refuses(backend.attr(&file), libc::ESTALE);
}

pub(super) fn made_once(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let (mine, other) = (Make::FileOnce([0xff, 2, 3, 4, 5, 6, 7, 8]), Make::FileOnce([1; 8]));
    let (file, attr) = suite.make(dir, "file", mine).unwrap();
    assert_eq!((attr.kind, attr.size_bytes), (Kind::File, 0));
    assert_eq!(suite.make(dir, "file", mine).unwrap().0, file, "a repeated call gives the same file");
    refuses(suite.make(dir, "file", other), libc::EEXIST);
    suite.file(dir, "there", b"");
    refuses(suite.make(dir, "there", mine), libc::EEXIST);
    // Once it is in use, the verifier is gone.
    backend.write(caller, &file, 0, b"x", false).unwrap();
    refuses(suite.make(dir, "file", mine), libc::EEXIST);
}

pub(super) fn long_and_odd(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let longest = backend.space(dir).unwrap().name_max_bytes as usize;
    assert!(longest >= 200, "{longest}");
    let (fits, too_long) = ("n".repeat(longest), "n".repeat(longest + 1));
    let file = suite.file(dir, &fits, b"");
    assert_eq!(suite.find(dir, &fits).unwrap().0, file);
    refuses(suite.find(dir, &too_long), libc::ENAMETOOLONG);
    refuses(suite.make(dir, &too_long, Make::File), libc::ENAMETOOLONG);
    refuses(suite.make(dir, &too_long, Make::Directory), libc::ENAMETOOLONG);
    for odd in [&b"\xff\xfe not text \x01"[..], b"-rf", b" ", b"new\nline", b"..."] {
        let (node, _) = backend.make(caller, dir, odd, Make::File, &SetAttr::default()).unwrap();
        assert_eq!(backend.lookup(caller, dir, odd).unwrap().0, node);
        backend.remove(caller, dir, odd).unwrap();
    }
    // Deeper than a path may be long, where the file system itself does not go by paths.
    let mut at = *dir;
    for _ in 0..40 {
        match suite.make(&at, &"d".repeat(120), Make::Directory) {
            Err(Errno(libc::ENAMETOOLONG)) => break,
            made => at = made.unwrap().0,
        }
    }
    let file = suite.file(&at, "bottom", b"deep");
    assert_eq!(suite.contents(&file).unwrap(), b"deep");
}

pub(super) fn strange_handles(suite: &Suite<'_>, dir: &Handle) {
    let Suite { backend, caller, .. } = suite;
    let file = suite.file(dir, "file", b"bytes");
    let mut strange = vec![vec![], vec![0], vec![255; crate::HANDLE_MAX_BYTES]];
    let good = file.as_bytes();
    for n in 0..good.len() {
        strange.push(good[..n].to_vec());
        let mut changed = good.to_vec();
        changed[n] ^= 1;
        strange.push(changed);
    }
    for bytes in strange.iter().filter(|bytes| **bytes != backend.root().unwrap().as_bytes()) {
        let handle = Handle::new(bytes).unwrap();
        refuses(backend.attr(&handle), libc::ESTALE);
        refuses(backend.read(caller, &handle, 0, &mut [0; 1]), libc::ESTALE);
        refuses(suite.find(&handle, "name"), libc::ESTALE);
        backend.release(&handle);
    }
    assert_eq!(suite.contents(&file).unwrap(), b"bytes");
}
