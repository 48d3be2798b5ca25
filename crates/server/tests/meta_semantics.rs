//! What clients of the metadata server may rely on, sentence by sentence.

mod meta_support;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_server::meta::{MemoryObjects, MetaOptions, MetaService};
use impresario_wire::message::*;
use impresario_wire::{Kind, encode_frame};
use meta_support::*;

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EBADF: i32 = 9;
const EEXIST: i32 = 17;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const EMFILE: i32 = 24;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const ENAMETOOLONG: i32 = 36;
const ENOTEMPTY: i32 = 39;
const ELOOP: i32 = 40;
const ENOTCONN: i32 = 107;
const ESTALE: i32 = 116;
const EBUSY: i32 = 16;

fn getattr(p: &str) -> MetaCall {
    MetaCall::GetAttr { target: at(p) }
}

fn handle(opened: &Opened) -> Target {
    Target::Handle(opened.handle)
}

#[test]
fn while_a_file_is_written_its_size_comes_from_the_data_servers_and_then_from_here() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let local = || std::fs::metadata(dir.path().join("names/f")).unwrap().len();
    let opened = s.create("f");
    assert_eq!(s.stat("f").size, 0);
    s.write(&opened, 0, 300_000);
    assert_eq!((s.stat("f").size, s.attr(handle(&opened)).size, local()), (300_000, 300_000, 0));
    assert_eq!(s.list("", "", 9)[0].attr.size, 300_000);
    s.write(&opened, 1_000_000, 1);
    let second = s.open("f", true);
    s.close(opened);
    assert_eq!((s.stat("f").size, local()), (1_000_001, 0), "the second writer is still there");
    s.close(second);
    let asked = s.objects.calls();
    assert_eq!((s.stat("f").size, local()), (1_000_001, 1_000_001));
    assert_eq!(s.stat("f").nlink, 1);
    assert_eq!(s.objects.calls(), asked, "nobody is asked any more");
    let reader = s.open("f", false);
    assert_eq!(s.attr(handle(&reader)).size, 1_000_001);
    assert_eq!(s.objects.calls(), asked, "readers change nothing");
}

#[test]
fn data_servers_that_stay_away_fail_no_close_and_are_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let opened = s.create("f");
    s.write(&opened, 0, 5000);
    // One who only reads does not keep it from being settled.
    s.open("f", false);
    s.objects.set_away(true);
    let fault = match s.call(getattr("f")) {
        Answer::Fault(fault) => fault,
        other => panic!("{other:?}"),
    };
    assert_eq!(fault.errno, EIO);
    assert!(fault.message.contains("cannot look at f") && fault.message.contains("data.0"), "{fault}");
    assert_eq!(
        s.errno(MetaCall::Fsync { handle: opened.handle }),
        EIO,
        "an fsync that cannot know the size must not succeed"
    );
    s.close(opened);
    assert_eq!(s.errno(getattr("f")), EIO);
    assert_eq!(s.names(""), ["f"], "listing goes on");
    s.mkdir("d");
    s.done(rename("f", "d/g"));
    assert_eq!(s.errno(MetaCall::Open { path: path("d/g"), write: false }), EIO, "an open tells the size");
    s.objects.set_away(false);
    let deadline = Instant::now() + Duration::from_secs(10);
    while std::fs::metadata(dir.path().join("names/d/g")).unwrap().len() != 5000 {
        assert!(Instant::now() < deadline, "nobody settles it");
        std::thread::sleep(Duration::from_millis(10));
    }
    s.idle();
    assert_eq!(s.stat("d/g").size, 5000);
    check_folder(dir.path(), &s.objects);
}

#[test]
fn calls_that_may_wait_are_told_beforehand() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 1);
    let open = |write| MetaCall::Open { path: path("f"), write };
    for (call, written, idle) in [
        (getattr("f"), true, false),
        (open(false), true, false),
        (open(true), true, true),
        (MetaCall::SetAttr { target: at("f"), set: size(0) }, true, true),
        (unlink("f"), false, false),
        (create("f"), false, false),
    ] {
        assert_eq!(s.service.may_wait(&call), idle, "{call:?} while nobody writes");
        let opened = s.create("g");
        assert_eq!(s.service.may_wait(&call), written, "{call:?} while somebody writes");
        s.close(opened);
        s.done(unlink("g"));
        s.quiet();
    }
}

#[test]
fn removing_does_not_wait_for_data_servers() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 10);
    s.objects.set_delay(Duration::from_millis(500));
    let began = Instant::now();
    s.done(unlink("f"));
    assert_eq!(s.errno(getattr("f")), ENOENT);
    assert!(began.elapsed() < Duration::from_millis(400), "{:?}", began.elapsed());
    s.idle();
    check_folder(dir.path(), &s.objects);
}

#[test]
fn after_a_crash_sizes_are_what_the_data_servers_say() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(MemoryObjects::default());
    let s = start_with(options(dir.path()), objects.clone());
    let opened = s.create("f");
    s.write(&opened, 0, 700);
    let old = s.file("old", 50);
    let opened = s.open("old", true);
    s.write(&opened, 50, 50);
    drop(s);
    objects.set_away(true);
    let s = start_with(options(dir.path()), objects.clone());
    assert_eq!(s.errno(getattr("old")), EIO, "neither the old size nor a guess");
    objects.set_away(false);
    assert_eq!((s.stat("f").size, s.stat("old").size), (700, 100));
    let reopened = s.opened(MetaCall::Reopen { path: path("old"), file: old.file, write: true });
    assert_eq!(reopened.attr.size, 100);
    s.write(&reopened, 100, 1);
    assert_eq!(s.stat("old").size, 101);
    s.close(reopened);
    s.quiet();
    check_folder(dir.path(), &objects);
}

#[test]
fn fsync_makes_size_and_time_local() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let opened = s.create("d/f");
    s.write(&opened, 0, 4097);
    s.done(MetaCall::Fsync { handle: opened.handle });
    let local = std::fs::metadata(dir.path().join("names/d/f")).unwrap();
    assert_eq!(local.len(), 4097);
    let told = s.stat("d/f");
    assert_eq!((told.size, told.mtime.secs), (4097, local.mtime()));
    // Also under a name that the server was not told of.
    s.done(rename("d", "e"));
    s.write(&opened, 4097, 1);
    s.done(MetaCall::Fsync { handle: opened.handle });
    assert_eq!(std::fs::metadata(dir.path().join("names/e/f")).unwrap().len(), 4098);
    s.done(MetaCall::FsyncDir { path: path("e") });
    s.done(MetaCall::FsyncDir { path: path("") });
    assert_eq!(s.errno(MetaCall::FsyncDir { path: path("e/f") }), ENOTDIR);
    s.done(unlink("e/f"));
    s.done(MetaCall::Fsync { handle: opened.handle });
}

#[test]
fn a_time_set_by_hand_holds_until_somebody_writes() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let opened = s.create("f");
    s.write(&opened, 0, 10);
    // As cp -p does it: before closing.
    assert_eq!(s.set(handle(&opened), mtime(1000)).mtime, past(1000));
    s.close(opened);
    assert_eq!((s.stat("f").mtime, s.stat("f").size), (past(1000), 10));
    // After closing, and through opens that write nothing.
    s.set(at("f"), mtime(2000));
    let opened = s.open("f", true);
    assert_eq!(s.stat("f").mtime, past(2000));
    s.close(opened);
    assert_eq!(s.stat("f").mtime, past(2000));
    // By path while another writes nothing more.
    let opened = s.open("f", true);
    s.write(&opened, 0, 1);
    s.set(at("f"), mtime(3000));
    assert_eq!(s.stat("f").mtime, past(3000));
    // A write after it counts.
    s.write(&opened, 0, 1);
    let written = s.stat("f");
    assert!(written.mtime.secs > 1_000_000_000 && written.ctime >= written.mtime);
    s.close(opened);
    assert_eq!(s.stat("f").mtime, written.mtime, "closing does not change it");
    // Cutting counts, and what is set after that holds through the next open.
    s.set(at("f"), size(3));
    assert!(s.stat("f").mtime > written.mtime);
    s.set(at("f"), mtime(4000));
    let opened = s.open("f", true);
    s.close(opened);
    assert_eq!((s.stat("f").mtime, s.stat("f").size), (past(4000), 3));
    let now =
        s.set(at("f"), SetAttr { mtime: Some(SetTime::Now), atime: Some(SetTime::At(past(5))), ..SetAttr::default() });
    assert!(now.mtime.secs > 1_000_000_000 && now.atime == past(5));
}

#[test]
fn lengths_are_cut_and_extended_with_and_without_writers() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    for held in [false, true] {
        let name = if held { "held" } else { "free" };
        s.file(name, 1_000_000);
        let writer = held.then(|| s.open(name, true));
        for len in [999_999, 65_536, 65_535, 3, 0, 0, 5_000_000, 131_073] {
            assert_eq!(s.set(at(name), size(len)).size, len);
            assert_eq!(s.stat(name).size, len);
        }
        if let Some(writer) = writer {
            assert_eq!(s.set(handle(&writer), size(77)).size, 77);
            s.close(writer);
            assert_eq!(s.stat(name).size, 77);
        }
    }
    s.mkdir("d");
    assert_eq!(s.errno(MetaCall::SetAttr { target: at("d"), set: size(0) }), EISDIR);
    assert_eq!(s.errno(MetaCall::SetAttr { target: at("free"), set: size(u64::MAX) }), EFBIG);
    s.objects.set_away(true);
    assert_eq!(s.errno(MetaCall::SetAttr { target: at("free"), set: size(1) }), EIO);
    s.objects.set_away(false);
    s.quiet();
    assert_eq!(s.stat("free").size, 131_073);
    check_folder(dir.path(), &s.objects);
}

#[test]
fn a_removed_file_lives_while_it_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    for replaced in [false, true] {
        let opened = s.create("f");
        s.write(&opened, 0, 100);
        if replaced {
            s.file("g", 5);
            s.done(rename("g", "f"));
            assert_eq!(s.stat("f").size, 5);
        } else {
            s.done(unlink("f"));
            assert_eq!(s.errno(getattr("f")), ENOENT);
        }
        s.write(&opened, 100, 23);
        let attr = s.attr(handle(&opened));
        assert_eq!((attr.size, attr.nlink), (123, 0));
        assert_eq!(s.set(handle(&opened), size(7)).size, 7);
        s.idle();
        assert!(s.objects.files().contains(&opened.file));
        s.close(opened);
        s.idle();
        assert!(!s.objects.files().contains(&opened.file), "its objects go with the last open");
    }
    check_folder(dir.path(), &s.objects);
}

#[test]
fn a_client_that_lost_its_connection_finds_its_files_again() {
    let dir = tempfile::tempdir().unwrap();
    let patient = || MetaOptions { grace: Duration::from_secs(3600), ..options(dir.path()) };
    let mut s = start_with(patient(), Arc::default());
    let [kept, removed, moved] = ["kept", "removed", "moved"].map(|name| {
        let opened = s.create(name);
        s.write(&opened, 0, 10);
        opened
    });
    s.done(unlink("removed"));
    let reopen = |p: &str, file, write| MetaCall::Reopen { path: path(p), file, write };
    for restart in [false, true] {
        s.hang_up();
        assert_eq!(s.errno(getattr("kept")), ENOTCONN);
        if restart {
            let objects = s.objects.clone();
            drop(s);
            s = start_with(patient(), objects);
        } else {
            s = s.again();
        }
        // Somebody else moves one before its client is back, while nobody can tell its size.
        s.objects.set_away(true);
        s.done(if restart { rename("elsewhere", "moved.2") } else { rename("moved", "elsewhere") });
        s.objects.set_away(false);
        for (name, opened) in [("kept", &kept), ("removed", &removed)] {
            let again = s.opened(reopen(name, opened.file, true));
            assert_eq!((again.file, again.layout, again.attr.size), (opened.file, opened.layout, 10));
        }
        let other = FileKey(kept.file.0 + 1000);
        assert_eq!(s.errno(reopen("kept", other, false)), ESTALE, "another file has that name now");
        assert_eq!(s.errno(reopen("nothing", other, false)), ESTALE);
    }
    s.idle();
    assert!(s.objects.files().contains(&removed.file));
    // The last one closes it: no grace for what was closed.
    let last = s.opened(reopen("removed", removed.file, false));
    s.hang_up();
    let s = s.again();
    let back = s.opened(reopen("removed", removed.file, false));
    assert_eq!((back.attr.nlink, back.attr.size), (0, 10));
    assert_eq!(s.errno(MetaCall::Close { handle: last.handle }), EBADF);
    s.close(back);
    s.idle();
    assert!(!s.objects.files().contains(&removed.file));
    assert!(s.objects.files().contains(&moved.file));
    assert_eq!(s.errno(reopen("removed", removed.file, false)), ESTALE);
}

#[test]
fn a_file_moved_by_others_is_found_by_its_key_while_it_is_marked() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let opened = s.create("f");
    let keeper = s.again();
    keeper.open("f", true);
    s.hang_up();
    keeper.done(rename("f", "g"));
    let s = s.again();
    let again = s.opened(MetaCall::Reopen { path: path("f"), file: opened.file, write: true });
    assert_eq!(again.attr.ino, s.stat("g").ino);
}

#[test]
fn striping_is_asked_for_or_inherited_or_the_clusters() {
    let dir = tempfile::tempdir().unwrap();
    let s = start_with(MetaOptions { stripe_count: 3, stripe_bytes: 8192, ..options(dir.path()) }, Arc::default());
    let layout = |s: &Server, p: &str, wish| {
        let call = MetaCall::Create { path: path(p), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: wish };
        s.opened(call).layout
    };
    let wish = |base, pcount, ssize_bytes| Some(LayoutRequest { base, pcount, ssize_bytes });
    let mut bases = [0; SERVERS as usize];
    for i in 0..40 {
        let l = layout(&s, &format!("f.{i}"), None);
        assert_eq!((l.pcount, l.ssize_bytes, l.servers), (3, 8192, SERVERS));
        bases[usize::from(l.base)] += 1;
    }
    assert_eq!(bases, [10; SERVERS as usize], "first strips are dealt evenly");
    s.mkdir("d");
    s.done(MetaCall::SetLayout { path: path("d"), layout: wish(Some(2), None, Some(4096)) });
    s.mkdir("d/e");
    for folder in ["d", "d/e"] {
        let l = layout(&s, &format!("{folder}/f"), None);
        assert_eq!((l.base, l.pcount, l.ssize_bytes), (2, 3, 4096), "{folder}");
    }
    let l = layout(&s, "d/e/g", wish(None, Some(1), None));
    assert_eq!((l.base, l.pcount, l.ssize_bytes), (2, 1, 4096));
    s.done(MetaCall::SetLayout { path: path("d/e"), layout: None });
    assert_eq!(layout(&s, "d/e/h", None).ssize_bytes, 8192);
    s.done(MetaCall::SetLayout { path: path(""), layout: wish(None, Some(1), None) });
    assert_eq!(layout(&s, "r", None).pcount, 1);
    for bad in [wish(Some(SERVERS), None, None), wish(None, Some(0), None), wish(None, None, Some(1))] {
        assert_eq!(s.errno(MetaCall::SetLayout { path: path("d"), layout: bad }), EINVAL);
        let call = MetaCall::Create { path: path("bad"), mode: 0, uid: 0, gid: 0, exclusive: true, layout: bad };
        assert_eq!(s.errno(call), EINVAL);
    }
    assert_eq!(s.errno(getattr("bad")), ENOENT);
    assert_eq!(s.errno(MetaCall::SetLayout { path: path("f.0"), layout: None }), ENOTDIR);
    // A folder's record that nobody understands fails what needs it, and is set anew.
    rustix::fs::setxattr(dir.path().join("names/d"), "user.impresario.layout", b"??", rustix::fs::XattrFlags::empty())
        .unwrap();
    assert_eq!(s.errno(create("d/x")), EIO);
    s.done(MetaCall::SetLayout { path: path("d"), layout: None });
    s.create("d/x");
}

#[test]
fn a_large_folder_is_listed_in_order_and_in_time() {
    const FILES: usize = 20_000;
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    // Straight into the folder: the listing is what is tested.
    for i in 0..FILES {
        std::fs::write(dir.path().join(format!("names/d/{:06}.{}", (i * 7919) % FILES, "x".repeat(i % 150))), "")
            .unwrap();
    }
    let list = |max: u32| {
        let (mut after, mut all, mut slices) = (Vec::new(), Vec::new(), 0);
        loop {
            let Answer::Entries(entries) = s.call(MetaCall::Readdir { path: path("d"), after: after.clone(), max })
            else {
                panic!()
            };
            let Some(last) = entries.last() else { return (all, slices) };
            after = last.name.clone();
            slices += 1;
            let mut frame = Vec::new();
            encode_frame(Kind::Answer, 0, &Answer::Entries(entries.clone()), 0, &mut frame).unwrap();
            assert!(frame.len() < 900 << 10, "{} bytes", frame.len());
            assert!(entries.len() <= max as usize);
            all.extend(entries);
        }
    };
    let (all, slices) = list(u32::MAX);
    assert_eq!(all.len(), FILES);
    assert!(all.windows(2).all(|pair| pair[0].name < pair[1].name), "in byte order, each once");
    assert!(slices > 1, "it takes more than one answer");
    let (small, slices) = list(100);
    assert_eq!((small.len(), slices), (FILES, FILES / 100));
    assert!(small == all);
    // One at a time costs a look-up each, not a reading of the folder each.
    let began = Instant::now();
    let mut after = Vec::new();
    for _ in 0..500 {
        let Answer::Entries(entries) = s.call(MetaCall::Readdir { path: path("d"), after, max: 1 }) else { panic!() };
        after = entries[0].name.clone();
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    // What goes meanwhile is left out; a listing begun anew sees what came.
    let next = String::from_utf8(all[500].name.clone()).unwrap();
    std::fs::remove_file(dir.path().join("names/d").join(&next)).unwrap();
    let listed = s.list("d", std::str::from_utf8(&after).unwrap(), 2);
    assert_eq!(listed[0].name, all[501].name);
    std::fs::write(dir.path().join("names/d/!"), "").unwrap();
    assert_eq!(s.list("d", "", 0)[0].name, b"!", "at least one is given");
}

#[test]
fn what_no_call_may_do_is_refused_with_its_error() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let file = s.file("f", 1);
    s.done(MetaCall::Symlink { path: path("l"), target: path("d"), uid: 0, gid: 0 });
    let mkdir = |p: &[u8]| MetaCall::Mkdir { path: p.to_vec(), mode: 0o755, uid: 0, gid: 0 };
    let rmdir = |p: &str| MetaCall::Rmdir { path: path(p) };
    let open = |p: &str| MetaCall::Open { path: path(p), write: false };
    let symlink = |target: &[u8]| MetaCall::Symlink { path: path("new"), target: target.to_vec(), uid: 0, gid: 0 };
    let attrs = |set| MetaCall::SetAttr { target: at("f"), set };
    let shared = |p: &str| MetaCall::Create { path: path(p), mode: 0, uid: 0, gid: 0, exclusive: false, layout: None };
    for (call, errno) in [
        (mkdir(b"../out"), EINVAL),
        (mkdir(b"d/../e"), EINVAL),
        (mkdir(b"/abs"), EINVAL),
        (mkdir(b"d/"), EINVAL),
        (mkdir(b"a\0b"), EINVAL),
        (mkdir(&[b'x'; 256]), ENAMETOOLONG),
        (mkdir(b"d"), EEXIST),
        (mkdir(b""), EEXIST),
        (mkdir(b"no/e"), ENOENT),
        (mkdir(b"f/e"), ENOTDIR),
        (mkdir(b"l/e"), ELOOP),
        (create("f"), EEXIST),
        (create("l"), EEXIST),
        (create(""), EEXIST),
        (shared(""), EISDIR),
        (shared("d"), EISDIR),
        (shared("l"), ELOOP),
        (open(""), EISDIR),
        (open("d"), EISDIR),
        (open("l"), ELOOP),
        (open("no"), ENOENT),
        (open("f/x"), ENOTDIR),
        (unlink("d"), EISDIR),
        (unlink(""), EISDIR),
        (unlink("no"), ENOENT),
        (rmdir("f"), ENOTDIR),
        (rmdir("l"), ENOTDIR),
        (rmdir(""), EBUSY),
        (rmdir("no"), ENOENT),
        (rename("no", "x"), ENOENT),
        (rename("f", "d"), EISDIR),
        (rename("d", "f"), ENOTDIR),
        (rename("d", "d/e"), EINVAL),
        (rename("", "x"), EBUSY),
        (rename("d", ""), EBUSY),
        (MetaCall::Rename { from: path("f"), to: path("l"), no_replace: true }, EEXIST),
        (symlink(b""), ENOENT),
        (symlink(b"a\0b"), EINVAL),
        (symlink(&[b'x'; 4096]), ENAMETOOLONG),
        (MetaCall::Readlink { path: path("f") }, EINVAL),
        (MetaCall::Readlink { path: path("") }, EINVAL),
        (MetaCall::Readdir { path: path("f"), after: vec![], max: 1 }, ENOTDIR),
        (MetaCall::Readdir { path: path("l"), after: vec![], max: 1 }, ELOOP),
        (attrs(SetAttr { uid: Some(u32::MAX), ..SetAttr::default() }), EINVAL),
        (attrs(SetAttr { gid: Some(u32::MAX), ..SetAttr::default() }), EINVAL),
        (
            attrs(SetAttr { mtime: Some(SetTime::At(Time { secs: 0, nanos: 1_000_000_000 })), ..SetAttr::default() }),
            EINVAL,
        ),
        (MetaCall::Close { handle: file.handle }, EBADF),
        (MetaCall::Fsync { handle: u64::MAX }, EBADF),
        (MetaCall::GetAttr { target: Target::Handle(0) }, EBADF),
    ] {
        let Answer::Fault(fault) = s.call(call.clone()) else { panic!("{call:?} is done") };
        assert_eq!(fault.errno, errno, "{call:?}: {fault}");
        assert!(!fault.message.contains('\n') && fault.message.len() < 600, "{fault}");
    }
    s.mkdir("d/e");
    assert_eq!(s.errno(rmdir("d")), ENOTEMPTY);
    let other = s.again();
    let opened = s.open("f", false);
    assert_eq!(other.errno(MetaCall::Close { handle: opened.handle }), EBADF, "handles are a session's own");
    assert_eq!(s.stat("").kind, NodeKind::Dir);
    // A client names a deep path of 60 KiB.
    assert_eq!(s.errno(getattr(&vec!["deep"; 12_000].join("/"))), ENOENT);
}

#[test]
fn modes_and_owners_are_exactly_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let root = rustix::process::geteuid().is_root();
    let call = MetaCall::Create { path: path("f"), mode: 0o7777, uid: 12, gid: 34, exclusive: true, layout: None };
    let made = s.opened(call).attr;
    assert_eq!(made.mode, 0o7777, "no umask");
    let dirs = s.call(MetaCall::Mkdir { path: path("d"), mode: 0o2777, uid: 12, gid: 34 });
    let link = s.call(MetaCall::Symlink { path: path("l"), target: path("\u{1}"), uid: 12, gid: 34 });
    let (Answer::Attr(folder), Answer::Attr(link)) = (dirs, link) else { panic!() };
    assert_eq!((folder.mode, folder.kind, link.kind), (0o2777, NodeKind::Dir, NodeKind::Symlink));
    if root {
        for attr in [made, folder, link] {
            assert_eq!((attr.uid, attr.gid), (12, 34));
        }
        // A folder with set-group-id hands on its group, and to folders the bit.
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
    let renamed = MetaCall::Rename { from: path("l"), to: path("d/l"), no_replace: true };
    s.done(renamed);
    assert_eq!(s.stat("d/l").size, 1);
}

#[test]
fn opens_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 1);
    for _ in 0..65_536 {
        s.open("f", false);
    }
    assert_eq!(s.errno(MetaCall::Open { path: path("f"), write: false }), EMFILE);
    assert_eq!(s.errno(create("g")), EMFILE);
    assert_eq!(s.errno(getattr("g")), ENOENT, "what cannot be opened is not made");
    let other = s.again();
    other.close(other.open("f", true));
    s.hang_up();
    assert_eq!(s.service.status()["opens_read"], 0);
    assert_eq!(s.service.status()["sessions"], 1);
}

#[test]
fn files_put_there_by_hand_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let names = dir.path().join("names");
    std::fs::write(names.join("by-hand"), "x").unwrap();
    assert!(std::process::Command::new("mkfifo").arg(names.join("pipe")).status().unwrap().success());
    assert_eq!(s.names(""), ["by-hand"]);
    let Answer::Fault(fault) = s.call(MetaCall::Open { path: path("by-hand"), write: true }) else { panic!() };
    assert!(fault.errno == EIO && fault.message.contains("not made by this server"), "{fault}");
    assert_eq!(s.errno(MetaCall::Open { path: path("pipe"), write: false }), 95);
    s.file("f", 10);
    s.done(rename("f", "by-hand"));
    s.done(unlink("pipe"));
    assert_eq!(s.stat("by-hand").size, 10);
    // A record of a later version is left alone.
    let mut bytes = [0; 32];
    rustix::fs::getxattr(names.join("by-hand"), "user.impresario.file", &mut bytes[..]).unwrap();
    bytes[0] = 2;
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(names.join("by-hand"), "user.impresario.file", &bytes, flags).unwrap();
    for call in [MetaCall::Open { path: path("by-hand"), write: false }, unlink("by-hand")] {
        let Answer::Fault(fault) = s.call(call) else { panic!() };
        assert!(fault.errno == EIO && fault.message.contains("by-hand: its record is none"), "{fault}");
    }
}

#[test]
fn a_full_disk_fails_what_needs_space_and_breaks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("small");
    std::fs::create_dir(&small).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "nr_inodes=40,size=1m", "tmpfs"])
        .arg(&small)
        .stderr(std::process::Stdio::null())
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        println!("skipped: nothing can be mounted here");
        return;
    }
    let s = start(&small.join("meta"));
    let mut made = 0;
    let fault = loop {
        match s.call(create(&format!("f.{made}"))) {
            Answer::Opened(opened) => s.close(opened),
            Answer::Fault(fault) => break fault,
            other => panic!("{other:?}"),
        }
        made += 1;
    };
    assert_eq!(fault.errno, ENOSPC);
    assert!(fault.message.contains("free space or inodes"), "{fault}");
    assert!(made > 10, "{made}");
    let mkdir = |i: u32| MetaCall::Mkdir { path: path(&format!("d.{i}")), mode: 0o755, uid: 0, gid: 0 };
    let full = (0..40).find_map(|i| match s.call(mkdir(i)) {
        Answer::Fault(fault) => Some(fault.errno),
        _ => None,
    });
    assert_eq!(full, Some(ENOSPC));
    let Answer::Statfs(space) = s.call(MetaCall::Statfs) else { panic!() };
    assert_eq!((space.files, space.files_free), (40, 0));
    assert_eq!(s.names("").iter().filter(|name| name.starts_with("f.")).count(), made);
    s.done(unlink("f.0"));
    s.done(unlink("f.1"));
    s.idle();
    s.close(s.create("again"));
    s.hang_up();
    s.idle();
    let objects = s.objects.clone();
    drop(s);
    check_folder(&small.join("meta"), &objects);
    assert!(std::process::Command::new("umount").arg(&small).status().unwrap().success());
}

#[test]
fn without_roots_rights_permission_bits_do_not_hold_up_the_server() {
    const NOBODY: u32 = 65_534;
    if !rustix::process::geteuid().is_root() {
        println!("already so: all tests run without root's rights");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let folder = dir.path().to_owned();
    // Rights are a thread's; the threads that it starts have its rights.
    std::thread::spawn(move || {
        let (uid, gid) = (rustix::thread::Uid::from_raw(NOBODY), rustix::thread::Gid::from_raw(NOBODY));
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        let objects = Arc::new(MemoryObjects::default());
        let mut s = start_with(options(&folder), objects.clone());
        for mode in [0, 0o444, 0o200, 0o644] {
            let name = format!("f.{mode:o}");
            let call = MetaCall::Create { path: path(&name), mode, uid: 7, gid: 8, exclusive: true, layout: None };
            let opened = s.opened(call);
            assert_eq!((opened.attr.mode, opened.attr.uid), (mode, NOBODY));
            s.write(&opened, 0, 100);
            s.close(opened);
            assert_eq!((s.stat(&name).size, s.stat(&name).mode), (100, mode));
            let opened = s.open(&name, true);
            s.write(&opened, 100, 100);
            assert_eq!(s.stat(&name).size, 200);
            // Left open by a server that stops.
            drop(s);
            s = start_with(options(&folder), objects.clone());
            s.idle();
            assert_eq!((s.stat(&name).size, s.stat(&name).mode), (200, mode));
            assert_eq!(s.set(at(&name), size(5)).size, 5);
            s.done(rename(&name, "moved"));
            s.done(unlink("moved"));
        }
        s.done(MetaCall::Mkdir { path: path("d"), mode: 0o300, uid: 0, gid: 0 });
        s.file("d/f", 3);
        assert_eq!(s.names("d"), ["f"]);
        s.idle();
        let Answer::Fault(fault) =
            s.call(MetaCall::SetAttr { target: at("d"), set: SetAttr { uid: Some(0), ..SetAttr::default() } })
        else {
            panic!()
        };
        assert!(fault.errno == 1 && fault.message.contains("run it as root"), "{fault}");
        assert!(MetaService::open(options(std::path::Path::new("/etc/impresario-test")), objects).is_err());
    })
    .join()
    .unwrap();
    assert_eq!(std::fs::metadata(dir.path().join("names/d")).unwrap().permissions().mode() & 0o777, 0o300);
}

#[test]
fn the_status_tells_what_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let s = start_with(MetaOptions { grace: Duration::from_secs(3600), ..options(dir.path()) }, Arc::default());
    let opened = s.create("f");
    s.open("f", false);
    s.done(unlink("f"));
    assert_eq!(s.errno(getattr("f")), ENOENT);
    let told = s.service.status();
    for (key, value) in [
        ("sessions", 1),
        ("open_files", 1),
        ("opens_read", 1),
        ("opens_write", 1),
        ("files_with_size_at_data_servers", 1),
        ("orphans_waiting", 1),
    ] {
        assert_eq!(told[key], value, "{key} of {told}");
    }
    assert_eq!(told["operations"]["create"]["count"], 1);
    assert_eq!(
        (&told["operations"]["getattr"]["count"], &told["operations"]["getattr"]["faults"]),
        (&1.into(), &1.into())
    );
    assert!(told["operations"]["create"]["mean_us"].as_f64().unwrap() > 0.0);
    s.close(opened);
}
