//! What the metadata server keeps of a node beside its name and bytes: mode, owner, device, extended attributes, access control
//! lists; and who may change them at the moment at which somebody else does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::meta_support::*;
use impresario_server::meta::{Fate, MetaOptions, StepHook};
use impresario_testing::require;
use impresario_wire::message::*;

#[test]
fn modes_and_owners_are_exactly_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let call = MetaCall::Create { path: path("f"), mode: 0o7777, uid: 12, gid: 34, exclusive: true, layout: None };
    let made = s.opened(call).attr;
    assert_eq!(made.mode, 0o7777, "no umask");
    let dirs = s.call(MetaCall::Mkdir { path: path("d"), mode: 0o2777, uid: 12, gid: 34 });
    let link = s.call(MetaCall::Symlink { path: path("l"), target: path("\u{1}"), uid: 12, gid: 34 });
    let (Answer::Attr(directory), Answer::Attr(link)) = (dirs, link) else { panic!() };
    assert_eq!((directory.mode, directory.kind, link.kind), (0o2777, NodeKind::Dir, NodeKind::Symlink));
    if impresario_testing::require("root") {
        for attr in [made, directory, link] {
            assert_eq!((attr.uid, attr.gid), (12, 34));
        }
        // A directory with set-group-id passes on its group, and to directories the bit.
        let call = MetaCall::Create { path: path("d/f"), mode: 0o600, uid: 1, gid: 2, exclusive: true, layout: None };
        let inside = s.opened(call).attr;
        s.mkdir("d/e");
        let deeper = s.stat("d/e");
        assert_eq!((inside.uid, inside.gid, inside.mode), (1, 34, 0o600));
        assert_eq!((deeper.gid, deeper.mode), (34, 0o2755));
        let owned = s.set(at("f"), SetAttr { uid: Some(5), mode: Some(0o4711), ..SetAttr::default() });
        assert_eq!((owned.uid, owned.gid, owned.mode), (5, 34, 0o4711), "owner first, then mode");
    }
    let Answer::Link(said) = s.call(MetaCall::Readlink { path: path("l") }) else { panic!() };
    assert_eq!(said, b"\x01");
    let renamed = MetaCall::Rename { from: path("l"), to: path("d/l"), no_replace: true, whiteout: false };
    s.done(renamed);
    assert_eq!(s.stat("d/l").size, 1);
}

#[test]
fn pipes_sockets_and_devices_have_names_and_attributes() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let make = |p: &str, kind| MetaCall::Mknod { path: path(p), kind, mode: 0o4640, uid: 12, gid: 34 };
    for (p, kind) in [("d/pipe", NodeKind::Fifo), ("d/socket", NodeKind::Socket)] {
        let Answer::Attr(made) = s.call(make(p, kind)) else { panic!() };
        assert_eq!((made.kind, made.mode, made.nlink, made.size), (kind, 0o4640, 1, 0));
        assert_eq!(s.stat(p), made);
        assert_eq!(s.errno(make(p, kind)), 17);
        assert_eq!(s.errno(MetaCall::SetAttr { target: at(p), set: size(1) }), 22);
    }
    assert_eq!(s.names("d"), ["pipe", "socket"]);
    assert_eq!(s.set(at("d/pipe"), mtime(5)).mtime, past(5));
    for kind in [NodeKind::File, NodeKind::Dir, NodeKind::Symlink] {
        assert_eq!(s.errno(make("d/other", kind)), 22);
    }
    s.file("f", 10);
    s.done(rename("f", "d/socket"));
    s.done(rename("d/pipe", "pipe"));
    assert_eq!((s.stat("d/socket").size, s.stat("pipe").kind), (10, NodeKind::Fifo));
    s.done(unlink("pipe"));
    assert!(std::fs::read_dir(dir.path().join("staging")).unwrap().next().is_none());
    // Devices take the right to make them.
    if impresario_testing::require("root") {
        let number = Device { major: 0xfff, minor: 0xf_ffff };
        for (p, kind) in [("c", NodeKind::Character(number)), ("b", NodeKind::Block(number))] {
            let Answer::Attr(made) = s.call(make(p, kind)) else { panic!() };
            assert_eq!((made.kind, made.uid, made.gid), (kind, 12, 34));
            assert_eq!(s.list("", p, 0), s.list("", p, 1), "at least one");
        }
        for number in [Device { major: 0x1000, ..number }, Device { minor: 1 << 20, ..number }] {
            assert_eq!(s.errno(make("more", NodeKind::Block(number))), 22, "the local file system would cut it");
        }
    }
}

/// Opened by the server, a device of the name space would be one of the server's machine.
#[test]
fn the_server_opens_no_pipe_socket_or_device() {
    use rustix::fs::inotify;
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.done(pipe("pipe"));
    s.done(pipe("other"));
    s.file("f", 10);
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
    for name in ["pipe", "other"] {
        inotify::add_watch(&watch, dir.path().join("names").join(name), inotify::WatchFlags::OPEN).unwrap();
    }
    for write in [false, true] {
        assert_eq!(s.errno(MetaCall::Open { path: path("pipe"), write }), 95);
    }
    let again = MetaCall::Create { path: path("pipe"), mode: 0o644, uid: 0, gid: 0, exclusive: false, layout: None };
    assert_eq!(s.errno(again), 95);
    s.set(at("pipe"), mtime(1));
    s.names("");
    s.done(MetaCall::Examine(Examine::BeginWalk));
    s.done(MetaCall::Examine(Examine::Directory { path: path(""), after: path(""), max: 9 }));
    s.done(rename("pipe", "moved"));
    s.done(rename("moved", "other"));
    s.done(rename("f", "other"));
    let opened = || {
        let mut room = [std::mem::MaybeUninit::uninit(); 1024];
        let mut events = inotify::Reader::new(&watch, &mut room);
        // That a node was removed is told too.
        std::iter::from_fn(|| events.next().ok().map(|event| event.events()))
            .any(|events| events.contains(inotify::ReadFlags::OPEN))
    };
    assert!(!opened());
    // The watch does tell.
    s.done(pipe("pipe"));
    inotify::add_watch(&watch, dir.path().join("names/pipe"), inotify::WatchFlags::OPEN).unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NONBLOCK;
    rustix::fs::open(dir.path().join("names/pipe"), flags, rustix::fs::Mode::empty()).unwrap();
    assert!(opened());
}

#[test]
fn extended_attributes_stay_with_their_node_and_apart_from_our_own() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let opened = s.file("f", 100);
    let set = |target: Target, name: &str, value: Option<&[u8]>, mode| {
        let (name, value) = (path(name), value.map(<[u8]>::to_vec));
        match s.call(MetaCall::SetXattr { target, name, value, mode }) {
            Answer::Done => 0,
            Answer::Fault(fault) => fault.errno,
            other => panic!("{other:?}"),
        }
    };
    let any = XattrMode::Any;
    assert_eq!(s.xattrs("f"), "", "none of ours");
    for name in ["user.a", "user.impresario.file", "user.impresario.layout", "user.\u{e9}"] {
        assert_eq!(set(at("f"), name, Some(b"\0\xff"), any), 0);
        assert_eq!(s.xattr(at("f"), name), Ok(vec![0, 0xff]));
        assert_eq!(set(at("f"), name, Some(b"x"), XattrMode::Create), 17);
    }
    assert_eq!(record(&dir.path().join("names/f")).0, opened.file);
    assert_eq!(set(at("f"), "user.b", Some(b"x"), XattrMode::Replace), 61);
    assert_eq!(set(at("f"), "user.b", None, any), 61);
    assert_eq!(s.xattr(at("f"), "user.b"), Err(61));
    assert_eq!(set(at("f"), "user.", Some(b"x"), any), 22);
    assert_eq!(set(at("f"), "user.a\0b", Some(b"x"), any), 22);
    assert_eq!(set(at("f"), "trusted.a", Some(b"x"), any), 95);
    assert_eq!(set(at("f"), "system.other", Some(b"x"), any), 95);
    assert_eq!(set(at("f"), &format!("user.{}", "x".repeat(233)), Some(b"x"), any), 34);
    assert_eq!(set(at("nothing"), "user.a", Some(b"x"), any), 2);
    s.done(MetaCall::Symlink { path: path("l"), target: path("f"), uid: 0, gid: 0 });
    s.done(pipe("p"));
    for p in ["l", "p"] {
        assert_eq!((set(at(p), "user.a", Some(b"x"), any), s.xattr(at(p), "user.a")), (1, Err(61)));
        assert_eq!(s.xattrs(p), "");
    }
    // Renamed and removed with the file; an open file has them without a name too.
    s.done(rename("f", "d/g"));
    assert_eq!(s.xattr(at("d/g"), "user.a"), Ok(vec![0, 0xff]));
    let open = s.open("d/g", true);
    s.done(unlink("d/g"));
    assert_eq!(s.xattr(handle(&open), "user.a"), Ok(vec![0, 0xff]));
    assert_eq!(set(handle(&open), "user.a", None, any), 0);
    s.close(open);
    s.file("d/g", 1);
    assert_eq!(s.xattrs("d/g"), "");
    assert_eq!(set(at("d"), "user.a", Some(b"of a directory"), any), 0);
    assert_eq!(s.xattrs("d"), " user.a:14");
}

/// A list that lets user 5 read and write, and the group read.
fn list() -> Vec<u8> {
    let entries = [(1, 6, u32::MAX), (2, 6, 5), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
    let bytes = entries.into_iter().flat_map(|(tag, rights, id)| [[tag, 0, rights, 0], u32::to_le_bytes(id)].concat());
    [2, 0, 0, 0].into_iter().chain(bytes).collect()
}

/// One that lets user 6 read and nobody else write.
fn other_list() -> Vec<u8> {
    let mut list = list();
    for (at, byte) in [(14, 4), (16, 6), (30, 4)] {
        list[at] = byte;
    }
    list
}

fn set_list(p: &str, name: &[u8], list: Option<Vec<u8>>) -> MetaCall {
    MetaCall::SetXattr { target: at(p), name: name.to_vec(), value: list, mode: XattrMode::Any }
}

#[test]
fn access_control_lists_go_with_permission_bits_and_are_inherited() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    s.file("f", 100);
    let access = "system.posix_acl_access";
    s.done(set_list("f", ACL_ACCESS, Some(list())));
    assert_eq!((s.stat("f").mode, s.xattr(at("f"), access)), (0o660, Ok(list())));
    s.set(at("f"), SetAttr { mode: Some(0o4740), ..SetAttr::default() });
    let changed = s.xattr(at("f"), access).unwrap();
    assert_eq!((changed[6], changed[14], changed[22], changed[30]), (7, 6, 4, 4), "owner and mask are the bits");
    s.done(set_list("d", ACL_DEFAULT, Some(list())));
    let made = |p: &str, mode| {
        let mode = with_umask(mode, 0o077);
        s.call(MetaCall::Create { path: path(p), mode, uid: 0, gid: 0, exclusive: true, layout: None })
    };
    let Answer::Opened(opened) = made("d/f", 0o666) else { panic!() };
    assert!(opened.attr.labelled && opened.attr.mode == 0o660, "{opened:?}");
    let Answer::Opened(opened) = made("g", 0o666) else { panic!() };
    assert!(!opened.attr.labelled && opened.attr.mode == 0o600, "{opened:?}");
    let mode = with_umask(0o2755, 0o077);
    let Answer::Attr(sub) = s.call(MetaCall::Mkdir { path: path("d/sub"), mode, uid: 0, gid: 0 }) else { panic!() };
    assert_eq!((sub.mode, sub.labelled), (0o2640, true));
    assert_eq!(s.xattr(at("d/sub"), "system.posix_acl_default"), Ok(list()));
    // They are there after a restart, and those who have none say so.
    let objects = s.objects.clone();
    drop(s);
    let s = start_with(options(dir.path()), objects);
    assert!(s.stat("f").labelled && s.stat("d").labelled && !s.stat("g").labelled && !s.stat("").labelled);
    assert_eq!(s.xattr(at("d/sub"), "system.posix_acl_default"), Ok(list()));
    let Answer::Entries(entries) = s.call(MetaCall::Readdir { path: path(""), after: path(""), max: 9 }) else {
        panic!()
    };
    assert_eq!(entries.iter().map(|entry| entry.attr.labelled).collect::<Vec<_>>(), [true, true, false]);
    // Without entries beyond the bits there is none.
    let plain = [&list()[..12], &list()[20..28], &list()[36..]].concat();
    s.done(set_list("f", ACL_ACCESS, Some(plain)));
    assert_eq!((s.stat("f").mode, s.xattr(at("f"), access), s.stat("f").labelled), (0o4640, Err(61), false));
    s.done(set_list("f", ACL_ACCESS, None));
    s.done(set_list("d", ACL_DEFAULT, Some(vec![2, 0, 0, 0])));
    assert_eq!(s.xattr(at("d"), "system.posix_acl_default"), Err(61));
    assert_eq!(s.errno(set_list("f", ACL_DEFAULT, Some(list()))), 13);
    s.done(pipe("p"));
    assert_eq!(s.errno(set_list("p", ACL_ACCESS, Some(list()))), 95);
    for bad in [vec![1, 0, 0, 0], list()[..30].to_vec(), [list(), vec![0; 8]].concat()] {
        assert_eq!(s.errno(set_list("f", ACL_ACCESS, Some(bad))), 22);
    }
}

#[test]
fn a_capability_goes_when_its_file_is_cut_or_given_away() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 100);
    let name = "security.capability";
    let open = s.open("f", true);
    for (target, set) in [
        (at("f"), size(7)),
        (handle(&open), size(6)),
        (at("f"), SetAttr { uid: Some(5), ..SetAttr::default() }),
        (handle(&open), SetAttr { gid: Some(5), ..SetAttr::default() }),
    ] {
        s.done(set_xattr("f", name, Some("x")));
        s.set(at("f"), SetAttr { mode: Some(0o755), ..SetAttr::default() });
        assert_eq!(s.xattr(at("f"), name), Ok(b"x".to_vec()));
        s.set(target, set);
        assert_eq!(s.xattr(at("f"), name), Err(61));
    }
}

#[test]
fn extended_attributes_are_bounded_and_leave_room_for_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let opened = s.create("f");
    let full = |value: usize| s.call(set_xattr("f", "user.large", Some(&"x".repeat(value))));
    let room = XATTRS_MAX_BYTES - XATTR_EACH_BYTES - "user.large".len();
    assert_eq!(full(room), Answer::Done);
    let Answer::Fault(fault) = full(room + 1) else { panic!() };
    assert!(fault.errno == 28 && fault.message.contains("3584 bytes"), "{fault}");
    assert_eq!(full(room), Answer::Done, "replaced by itself");
    assert_eq!(s.errno(set_xattr("f", "user.more", Some(""))), 28);
    assert_eq!(full(1000), Answer::Done);
    let mut many = 0;
    while let Answer::Done = s.call(set_xattr("f", &format!("user.{many}"), Some(""))) {
        many += 1;
    }
    assert!((30..80).contains(&many), "{many}");
    // The size is settled, which writes the record.
    s.write(&opened, 0, 1000);
    s.close(opened);
    s.quiet();
    assert_eq!(s.stat("f").size, 1000);
    s.done(MetaCall::SetLayout { path: path(""), layout: Some(LayoutRequest::default()) });
}

/// Directories are exchanged while a node in one of them is made, opened or changed: what was permitted in one is not done in the
/// other.
#[test]
fn nothing_is_made_opened_or_changed_through_a_directory_that_comes_between() {
    const HERS: [(&str, u32); 3] = [("closed", 0o644), ("open", 0o644), ("folder", 0o755)];
    if !require("root") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let root = start_with(MetaOptions { squashes: true, ..options(dir.path()) }, Arc::default());
    let owner = |p: &str, id, mode| {
        root.set(at(p), SetAttr { mode: Some(mode), uid: Some(id), gid: Some(id), ..SetAttr::default() });
    };
    root.mkdir("p");
    for (name, id, mode) in [("hers", 1000, 0o755), ("readable", 0, 0o755), ("hidden", 0, 0o700)] {
        root.mkdir(&format!("p/{name}"));
        let secret = format!("p/{name}/secret");
        root.file(&secret, 1);
        owner(&secret, id, 0o644);
        // These are hers everywhere, also where she may not go. One is open meanwhile.
        for (mine, mode) in HERS {
            let mine = format!("p/{name}/{mine}");
            if mode == 0o755 {
                root.mkdir(&mine);
            } else {
                root.file(&mine, 1);
            }
            owner(&mine, 1000, mode);
        }
        owner(&format!("p/{name}"), id, mode);
    }
    root.quiet();
    for name in ["hers", "readable", "hidden"] {
        root.open(&format!("p/{name}/open"), true);
    }
    let hidden = || {
        let attrs = HERS.map(|(mine, _)| root.stat(&format!("p/hidden/{mine}"))).map(|attr| (attr.mode, attr.mtime));
        (attrs, xattr::list(dir.path().join("names/p/hidden/folder")).unwrap().count())
    };
    let before = hidden();
    let secret = root.open("p/hidden/secret", false).file;
    let alice = root.again();
    let squashed = Some(Squashed { all: true, proven: false, uid: 1000, gid: 1000 });
    root.service.restrict(alice.session, Restriction { squashed, proves: false, uids: Vec::new() }).unwrap();
    let (is_over, exchanges) = (AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    let (mut made, mut opened, mut changed, mut has_read_hidden) = (0, 0, [0; 7], false);
    let stripe = LayoutRequest { base: None, pcount: None, ssize_bytes: Some(4096) };
    let times = |p: &str| (at(p), SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() });
    let mode = |p: &str, mode| (at(p), SetAttr { mode: Some(mode), ..SetAttr::default() });
    let sets = [
        mode("p/hers/closed", 0o600),
        times("p/hers/closed"),
        mode("p/hers/open", 0o600),
        times("p/hers/open"),
        mode("p/hers/folder", 0o700),
        times("p/hers/folder"),
    ];
    let sets = sets.map(|(target, set)| MetaCall::SetAttr { target, set });
    let changes = [&sets[..], &[MetaCall::SetLayout { path: path("p/hers/folder"), layout: Some(stripe) }]].concat();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                for other in ["p/readable", "p/hidden"] {
                    [(); 2].into_iter().for_each(|()| root.done(exchange("p/hers", other)));
                }
                exchanges.fetch_add(1, Ordering::SeqCst);
            }
        });
        // Long enough for the threads to meet, however slow the machine is.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(2) || exchanges.load(Ordering::SeqCst) < 200 {
            let name = format!("p/hers/{made}");
            if let Answer::Opened(file) = alice.call(create(&name)) {
                alice.close_unwritten(file);
                made += 1;
            }
            if let Answer::Opened(file) = alice.call(MetaCall::Open { path: path("p/hers/secret"), write: false }) {
                has_read_hidden |= file.file == secret;
                alice.close_unwritten(file);
                opened += 1;
            }
            for (change, count) in changes.iter().zip(&mut changed) {
                *count += u32::from(!matches!(alice.call(change.clone()), Answer::Fault(_)));
            }
        }
        is_over.store(true, Ordering::SeqCst);
    });
    let found = ["p/readable", "p/hidden"].map(|p| root.names(p).len());
    assert!(made > 0 && opened > 0 && found == [4, 4] && !has_read_hidden, "{found:?}, hidden: {has_read_hidden}");
    assert_eq!(root.names("p/hers").len(), 4 + made);
    assert!(!changed.contains(&0), "{changed:?}");
    assert_eq!(hidden(), before, "of {changed:?} changes some were made there");
}

/// While one call changes the mode, the owner or the lists of a node, another one waits: its user may have lost the node by then.
#[test]
fn who_loses_a_file_at_this_moment_does_not_change_its_mode_lists_attributes_or_striping() {
    if !require("root") {
        return;
    }
    let squashed = Some(Squashed { all: true, proven: false, uid: 1000, gid: 1000 });
    let alice = |s: &Server| {
        let alice = s.again();
        let restriction = Restriction { squashed, proves: false, uids: Vec::new() };
        s.service.restrict(alice.session, restriction).unwrap();
        alice
    };
    let change = |p: &str, set| MetaCall::SetAttr { target: at(p), set };
    let set_uid = |p: &str| change(p, SetAttr { mode: Some(0o4755), ..SetAttr::default() });
    let to_root = |p: &str| change(p, SetAttr { uid: Some(0), ..SetAttr::default() });
    // The step in whose middle the other call comes, the node, and what Alice asks for.
    type Hers<'a> = (&'static str, &'static str, &'a (dyn Fn(&str) -> MetaCall + Sync));
    let set_xattr = |p: &str, value: Option<&[u8]>| MetaCall::SetXattr {
        target: at(p),
        name: b"user.note".to_vec(),
        value: value.map(<[u8]>::to_vec),
        mode: XattrMode::Any,
    };
    let stripe = LayoutRequest { base: None, pcount: None, ssize_bytes: Some(4096) };
    let set_layout = |p: &str, layout| MetaCall::SetLayout { path: path(p), layout };
    let cases: [Hers<'_>; 14] = [
        ("set_mode", "f", &set_uid),
        ("set_owner", "f", &set_uid),
        ("set_owner", "f", &|p| set_list(p, ACL_ACCESS, Some(list()))),
        ("set_owner", "f", &|p| set_list(p, ACL_ACCESS, None)),
        ("set_owner", "d", &|p| set_list(p, ACL_ACCESS, Some(list()))),
        ("set_owner", "d", &|p| set_list(p, ACL_ACCESS, None)),
        ("set_owner", "d", &|p| set_list(p, ACL_DEFAULT, Some(list()))),
        ("set_owner", "d", &|p| set_list(p, ACL_DEFAULT, None)),
        ("set_owner", "f", &|p| set_xattr(p, Some(b"hers"))),
        ("set_owner", "f", &|p| set_xattr(p, None)),
        ("set_owner", "d", &|p| set_xattr(p, Some(b"hers"))),
        ("set_owner", "d", &|p| set_xattr(p, None)),
        ("set_owner", "d", &|p| set_layout(p, Some(stripe))),
        ("set_owner", "d", &|p| set_layout(p, None)),
    ];
    let mut wrong = Vec::new();
    for (n, (step, p, hers)) in cases.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let (asks, asked) = std::sync::mpsc::channel();
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let armed = Arc::new(AtomicBool::new(false));
        let (is_armed, done_too) = (armed.clone(), std::sync::Mutex::new(is_done));
        let hook: StepHook = Arc::new(move |at| {
            if at == step && is_armed.swap(false, Ordering::SeqCst) {
                asks.send(()).unwrap();
                let _ = done_too.lock().unwrap().recv_timeout(Duration::from_millis(300)); // it may have to wait for us
            }
            Fate::Done
        });
        let options = MetaOptions { squashes: true, before_step: Some(hook), ..options(dir.path()) };
        let root = start_with(options, Arc::default());
        root.close(root.create("f"));
        root.mkdir("d");
        for (p, name) in [("f", ACL_ACCESS), ("d", ACL_ACCESS), ("d", ACL_DEFAULT)] {
            root.done(set_list(p, name, Some(other_list())));
        }
        let first = LayoutRequest { ssize_bytes: Some(8192), ..stripe };
        root.done(set_layout("d", Some(first)));
        for p in ["f", "d"] {
            root.done(set_xattr(p, Some(b"first")));
        }
        root.set(at(p), SetAttr { uid: Some(1000), gid: Some(1000), ..SetAttr::default() });
        let alice = alice(&root);
        let on_disk = dir.path().join("names").join(p);
        let kept =
            || xattr::list(&on_disk).unwrap().map(|name| xattr::get(&on_disk, name).unwrap()).collect::<Vec<_>>();
        let lists = || {
            let lists = ["access", "default"].map(|kind| root.xattr(at(p), &format!("system.posix_acl_{kind}")));
            (lists, kept())
        };
        let (mode, before) = (root.stat(p).mode, lists());
        let is_hers_first = step == "set_mode";
        armed.store(true, Ordering::SeqCst);
        let (first, second) = if is_hers_first { (&alice, &root) } else { (&root, &alice) };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                asked.recv_timeout(Duration::from_secs(20)).unwrap();
                second.call(if is_hers_first { to_root(p) } else { hers(p) });
                let _ = done.send(()); // the other has not waited for it
            });
            first.done(if is_hers_first { hers(p) } else { to_root(p) });
        });
        let now = root.stat(p);
        let is_kept = is_hers_first || (now.mode, lists()) == (mode, before);
        if (now.uid, now.mode & 0o7000) != (0, 0) || !is_kept {
            wrong.push(n);
        }
    }
    assert!(wrong.is_empty(), "cases {wrong:?}: hers holds of what is root's");
}
