//! Whose rights count: those of the caller alone.

use super::{Check, Suite, refuses};
use crate::{Caller, Handle, Make, SetAttr};

pub(super) fn checks() -> [(&'static str, Check); 7] {
    [
        ("owners", files_belong_to_their_makers),
        ("rights", rights_are_the_callers),
        ("groups", groups_count),
        ("overrides", owners_go_on),
        ("set-id", users_take_set_id_with_what_they_change),
        ("set-id beside chmod", what_the_owner_sets_while_set_id_goes_stays),
        ("threads", threads_keep_apart),
    ]
}

fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, groups: vec![] }
}

fn mode(mode: u32) -> SetAttr {
    SetAttr { mode: Some(mode), ..SetAttr::default() }
}

fn files_belong_to_their_makers(suite: &Suite<'_>, dir: &Handle) {
    let backend = suite.backend;
    let (ann, bob) = (user(7001), user(7002));
    for (name, what) in
        [("file", Make::File), ("folder", Make::Directory), ("link", Make::Symlink(b"x")), ("pipe", Make::Fifo)]
    {
        let (_, attr) = backend.make(&ann, dir, name.as_bytes(), what, &SetAttr::default()).unwrap();
        assert_eq!((attr.uid, attr.gid), (7001, 7001), "{name}");
    }
    let (file, _) = backend.lookup(&ann, dir, b"file").unwrap();
    // No user gives a file away, or takes one; its own owner and group are no change.
    let to = |uid, gid| SetAttr { uid, gid, ..SetAttr::default() };
    refuses(backend.set_attr(&ann, &file, &to(Some(7002), None)), libc::EPERM);
    refuses(backend.set_attr(&bob, &file, &to(Some(7002), None)), libc::EPERM);
    refuses(backend.set_attr(&ann, &file, &to(None, Some(7002))), libc::EPERM);
    refuses(backend.set_attr(&bob, &file, &mode(0o777)), libc::EPERM);
    let own = SetAttr { uid: Some(7001), gid: Some(7001), ..SetAttr::default() };
    assert!(backend.make(&ann, dir, b"own", Make::File, &own).is_ok());
    let foreign = SetAttr { uid: Some(7002), ..SetAttr::default() };
    refuses(backend.make(&ann, dir, b"foreign", Make::File, &foreign), libc::EPERM);
    refuses(backend.lookup(&ann, dir, b"foreign"), libc::ENOENT);
    assert!(backend.make(&ann, dir, b"disk", Make::Block(8, 0), &SetAttr::default()).is_err());
    // Root makes files for others, with every bit of their mode.
    let set = SetAttr { uid: Some(7001), gid: Some(7002), mode: Some(0o6711), ..SetAttr::default() };
    let (_, attr) = backend.make(&suite.caller, dir, b"given", Make::File, &set).unwrap();
    assert_eq!((attr.uid, attr.gid, attr.mode), (7001, 7002, 0o6711));
    // And gives them away.
    let attr = backend.set_attr(&suite.caller, &file, &to(Some(7002), Some(7003))).unwrap();
    assert_eq!((attr.uid, attr.gid), (7002, 7003));
}

fn rights_are_the_callers(suite: &Suite<'_>, dir: &Handle) {
    let backend = suite.backend;
    let (ann, bob) = (user(7001), user(7002));
    let (file, _) = backend.make(&ann, dir, b"file", Make::File, &mode(0o600)).unwrap();
    backend.write(&ann, &file, 0, b"secret", false).unwrap();
    let mut bytes = [0; 6];
    // The file is open for its owner, and for no other user because of that.
    refuses(backend.read(&bob, &file, 0, &mut bytes), libc::EACCES);
    refuses(backend.write(&bob, &file, 0, b"x", false), libc::EACCES);
    refuses(backend.set_attr(&bob, &file, &SetAttr { size_bytes: Some(0), ..SetAttr::default() }), libc::EACCES);
    assert_eq!((backend.access(&ann, &file, 7), backend.access(&bob, &file, 7)), (Ok(6), Ok(0)));
    assert_eq!(backend.read(&suite.caller, &file, 0, &mut bytes), Ok(6));
    backend.set_attr(&ann, &file, &mode(0o604)).unwrap();
    assert_eq!(backend.read(&bob, &file, 0, &mut bytes), Ok(6));
    assert_eq!((backend.access(&bob, &file, 7), backend.access(&bob, &file, 2)), (Ok(4), Ok(0)));
    refuses(backend.write(&bob, &file, 0, b"x", false), libc::EACCES);
    // Withdrawn through the backend, it is withdrawn at once.
    backend.set_attr(&ann, &file, &mode(0o600)).unwrap();
    refuses(backend.read(&bob, &file, 0, &mut bytes), libc::EACCES);
    let now = Some(crate::SetTime::Now);
    refuses(backend.set_attr(&bob, &file, &SetAttr { atime: now, mtime: now, ..SetAttr::default() }), libc::EACCES);

    let (private, _) = backend.make(&ann, dir, b"private", Make::Directory, &mode(0o700)).unwrap();
    backend.make(&ann, &private, b"inner", Make::File, &SetAttr::default()).unwrap();
    refuses(backend.lookup(&bob, &private, b"inner"), libc::EACCES);
    refuses(backend.lookup(&bob, &private, b".."), libc::EACCES);
    refuses(backend.read_dir(&bob, &private, 0, 10), libc::EACCES);
    refuses(backend.make(&bob, &private, b"mine", Make::File, &SetAttr::default()), libc::EACCES);
    refuses(backend.remove(&bob, &private, b"inner"), libc::EACCES);
    refuses(backend.rename(&bob, (&private, b"inner"), (dir, b"stolen")), libc::EACCES);
    refuses(backend.link(&bob, &file, &private, b"link"), libc::EACCES);
    backend.set_attr(&ann, &private, &mode(0o711)).unwrap();
    assert!(backend.lookup(&bob, &private, b"inner").is_ok());
    refuses(backend.read_dir(&bob, &private, 0, 10), libc::EACCES);

    // In a sticky folder everybody makes, and removes only what is their own.
    let (sticky, _) = backend.make(&suite.caller, dir, b"sticky", Make::Directory, &mode(0o1777)).unwrap();
    backend.make(&ann, &sticky, b"hers", Make::File, &mode(0o666)).unwrap();
    refuses(backend.remove(&bob, &sticky, b"hers"), libc::EPERM);
    refuses(backend.rename(&bob, (&sticky, b"hers"), (&sticky, b"his")), libc::EPERM);
    backend.remove(&ann, &sticky, b"hers").unwrap();
}

fn groups_count(suite: &Suite<'_>, dir: &Handle) {
    let backend = suite.backend;
    let ann = Caller { uid: 7001, gid: 7001, groups: vec![7100, 7200] };
    let (bob, carl) = (Caller { groups: vec![7200], ..user(7002) }, Caller { groups: vec![7300], ..user(7003) });
    let set = SetAttr { gid: Some(7200), mode: Some(0o640), ..SetAttr::default() };
    let (file, attr) = backend.make(&ann, dir, b"file", Make::File, &set).unwrap();
    assert_eq!((attr.uid, attr.gid, attr.mode), (7001, 7200, 0o640));
    let mut bytes = [0; 4];
    assert_eq!(backend.read(&bob, &file, 0, &mut bytes), Ok(0));
    refuses(backend.write(&bob, &file, 0, b"x", false), libc::EACCES);
    refuses(backend.read(&carl, &file, 0, &mut bytes), libc::EACCES);
    // The same user without the group is another caller.
    refuses(backend.read(&user(7002), &file, 0, &mut bytes), libc::EACCES);
    // What is made in a folder with this bit gets its group.
    let set = SetAttr { gid: Some(7200), mode: Some(0o2775), ..SetAttr::default() };
    let (shared, attr) = backend.make(&ann, dir, b"shared", Make::Directory, &set).unwrap();
    assert_eq!(attr.mode, 0o2775);
    let (_, attr) = backend.make(&bob, &shared, b"his", Make::File, &SetAttr::default()).unwrap();
    assert_eq!((attr.uid, attr.gid), (7002, 7200));
    // Root of another machine with another group is root all the same.
    let root = Caller { uid: 0, gid: 7001, groups: vec![7001] };
    let (_, attr) = backend.make(&root, dir, b"root's", Make::File, &mode(0o600)).unwrap();
    assert_eq!((attr.uid, attr.gid), (0, 7001));
    assert_eq!(backend.read(&root, &file, 0, &mut bytes), Ok(0));
}

/// What a server that sees no opens must allow.
fn owners_go_on(suite: &Suite<'_>, dir: &Handle) {
    let backend = suite.backend;
    let (ann, bob) = (user(7001), user(7002));
    let (file, _) = backend.make(&ann, dir, b"file", Make::File, &mode(0o600)).unwrap();
    backend.write(&ann, &file, 0, b"bytes", false).unwrap();
    backend.set_attr(&ann, &file, &mode(0)).unwrap();
    let mut bytes = [0; 5];
    assert_eq!(backend.read(&ann, &file, 0, &mut bytes), Ok(5));
    backend.write(&ann, &file, 5, b"!", false).unwrap();
    backend.set_attr(&ann, &file, &SetAttr { size_bytes: Some(1), ..SetAttr::default() }).unwrap();
    assert_eq!(backend.access(&ann, &file, 7), Ok(0));
    refuses(backend.read(&bob, &file, 0, &mut bytes), libc::EACCES);
    // A program is read to be run.
    backend.set_attr(&ann, &file, &mode(0o711)).unwrap();
    assert_eq!(backend.read(&bob, &file, 0, &mut bytes), Ok(1));
    refuses(backend.write(&bob, &file, 0, b"x", false), libc::EACCES);
}

/// Else who may write a program of another user has it run as that user with other bytes.
fn users_take_set_id_with_what_they_change(suite: &Suite<'_>, dir: &Handle) {
    let backend = suite.backend;
    let (ann, bob) = (user(7001), user(7002));
    let (file, _) = backend.make(&ann, dir, b"program", Make::File, &mode(0o6777)).unwrap();
    let has = |wanted| assert_eq!(backend.attr(&file).unwrap().mode, wanted);
    has(0o6777);
    backend.write(&suite.caller, &file, 0, b"root may", false).unwrap();
    assert_eq!(backend.read(&bob, &file, 0, &mut [0; 4]), Ok(4));
    has(0o6777);
    backend.write(&bob, &file, 0, b"bob", false).unwrap();
    has(0o777);
    // Also who has it open since, and its owner.
    backend.set_attr(&ann, &file, &mode(0o4777)).unwrap();
    backend.write(&bob, &file, 0, b"bob", false).unwrap();
    has(0o777);
    backend.set_attr(&ann, &file, &mode(0o4777)).unwrap();
    backend.set_attr(&bob, &file, &SetAttr { size_bytes: Some(1), ..SetAttr::default() }).unwrap();
    has(0o777);
    backend.set_attr(&ann, &file, &mode(0o4777)).unwrap();
    backend.write(&ann, &file, 0, b"ann", false).unwrap();
    has(0o777);
    // Without execution by the group it is no set-group-id, and stays for who is in the group.
    backend.set_attr(&ann, &file, &mode(0o6745)).unwrap();
    backend.write(&ann, &file, 0, b"ann", false).unwrap();
    has(0o2745);
    backend.set_attr(&ann, &file, &mode(0o6766)).unwrap();
    backend.write(&bob, &file, 0, b"bob", false).unwrap();
    has(0o766);
    // What takes bits takes no more, and is for the owner.
    let takes = SetAttr { takes: 0o6001, ..SetAttr::default() };
    backend.set_attr(&ann, &file, &mode(0o6777)).unwrap();
    refuses(backend.set_attr(&bob, &file, &takes), libc::EPERM);
    has(0o6777);
    backend.set_attr(&ann, &file, &takes).unwrap();
    has(0o776);
    // Nobody may execute it.
    backend.set_attr(&ann, &file, &mode(0o4666)).unwrap();
    backend.write(&bob, &file, 0, b"bob", false).unwrap();
    has(0o666);
    let (own, _) = backend.make(&ann, dir, b"own", Make::File, &mode(0o4755)).unwrap();
    backend.write(&ann, &own, 0, b"ann", false).unwrap();
    assert_eq!(backend.attr(&own).unwrap().mode, 0o755);
}

/// Rights that the owner has taken away would be back.
fn what_the_owner_sets_while_set_id_goes_stays(suite: &Suite<'_>, dir: &Handle) {
    let backend = suite.backend;
    let (ann, bob) = (user(7001), user(7002));
    let (file, _) = backend.make(&ann, dir, b"withdrawn", Make::File, &mode(0o777)).unwrap();
    for round in 0..200u64 {
        // The owner is earlier in some rounds, and later in others.
        let pause = |n: u64| std::thread::sleep(std::time::Duration::from_micros(n % 20 * 100));
        backend.set_attr(&ann, &file, &mode(0o6777)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pause(round * 7);
                // The owner may have been first.
                let _ = backend.write(&bob, &file, 0, b"bob", false);
            });
            scope.spawn(|| {
                pause(round * 13);
                backend.set_attr(&ann, &file, &mode(0o700)).unwrap();
            });
        });
        assert_eq!(backend.attr(&file).unwrap().mode, 0o700, "round {round}");
    }
}

/// Many threads that serve many users get nothing mixed up.
fn threads_keep_apart(suite: &Suite<'_>, dir: &Handle) {
    let backend = suite.backend;
    std::thread::scope(|scope| {
        for uid in 7001..7009 {
            scope.spawn(move || {
                let (own, other) = (user(uid), user(uid + 100));
                for round in 0..50 {
                    let name = format!("{uid} {round}").into_bytes();
                    let (file, attr) = backend.make(&own, dir, &name, Make::File, &mode(0o600)).unwrap();
                    assert_eq!((attr.uid, attr.gid), (uid, uid));
                    backend.write(&own, &file, 0, &name, false).unwrap();
                    refuses(backend.read(&other, &file, 0, &mut [0; 4]), libc::EACCES);
                    let (_, attr) = backend.lookup(&suite.caller, dir, &name).unwrap();
                    assert_eq!(attr.size_bytes, name.len() as u64);
                    backend.remove(&own, dir, &name).unwrap();
                }
            });
        }
    });
}
