//! What the metadata server refuses, its limits, and its behaviour under shortage and with foreign files.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::meta_support::*;
use crate::support::SmallDisk;
use impresario_server::meta::{MemoryObjects, MetaOptions, MetaService};
use impresario_wire::message::*;
use impresario_wire::{Kind, encode_frame};

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EBADF: i32 = 9;
const EEXIST: i32 = 17;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const EMFILE: i32 = 24;
const ENOSPC: i32 = 28;
const ENAMETOOLONG: i32 = 36;
const ENOTEMPTY: i32 = 39;
const ELOOP: i32 = 40;
const EBUSY: i32 = 16;

fn getattr(p: &str) -> MetaCall {
    MetaCall::GetAttr { target: at(p) }
}

#[test]
fn calls_that_may_wait_are_told_beforehand() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 1);
    let open = |write| MetaCall::Open { path: path("f"), write };
    let create_if_none =
        |name| MetaCall::Create { path: path(name), mode: 0o644, uid: 0, gid: 0, exclusive: false, layout: None };
    let may_wait = |call: &MetaCall| s.service.may_wait(s.session, &Who::default(), call);
    for (call, written, idle) in [
        (getattr("f"), true, false),
        (open(false), true, false),
        (open(true), true, true),
        (MetaCall::SetAttr { target: at("f"), set: size(0) }, true, true),
        (unlink("f"), false, false),
        (link("f", "h"), true, false),
        (create("f"), false, false),
        (create_if_none("f"), true, true),
        (create_if_none("n"), false, false),
    ] {
        assert_eq!(may_wait(&call), idle, "{call:?} while no client writes");
        let opened = s.open("f", true);
        assert_eq!(may_wait(&call), written, "{call:?} while a client writes");
        s.close(opened);
        s.quiet();
    }
    // A copy may find what the first one made, and opens that.
    let again = Who { client: ClientKey(1), epoch: 2, since: 1, ..Who::default() };
    assert!(s.service.may_wait(s.session, &again, &create("n")));
    let (reader, writer) = (s.open("f", false), s.open("f", true));
    let close = |opened: &Opened, wrote| MetaCall::Close { handle: opened.handle, wrote };
    for (call, may) in [(close(&reader, false), false), (close(&writer, false), false), (close(&writer, true), true)] {
        assert_eq!(may_wait(&call), may, "{call:?}");
    }
    let other = s.open("f", true);
    s.close(other);
    assert!(may_wait(&close(&writer, false)), "another one has written");
    assert!(!may_wait(&close(&other, true)), "it is closed already");
}

/// What a look has found may be out of date when the file is made.
#[test]
fn a_name_that_was_absent_may_be_taken_or_moved_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let call =
        |name| MetaCall::Create { path: path(name), mode: 0o644, uid: 0, gid: 0, exclusive: false, layout: None };
    let who = |sequence| Who { client: ClientKey(9), epoch: 1, since: 1, sequence, ..Who::default() };
    let absent = |name| s.service.absent(&who(0), &call(name));
    let make = |sequence, name, absent| s.service.call_at(s.session, who(sequence), call(name), absent);
    for (n, name) in [(1, "f"), (2, "d/f")] {
        let absent_then = absent(name);
        assert!(absent_then.is_some(), "{name}");
        let other = s.create(name);
        let Answer::Opened(opened) = make(n, name, absent_then) else { panic!("{name} is not opened") };
        assert_eq!(opened.file, other.file);
        assert!(absent(name).is_none(), "{name} is there");
        s.close(other);
        s.close(opened);
    }
    let absent_then = absent("d/g");
    s.done(MetaCall::Rename { from: path("d"), to: path("e"), no_replace: false, whiteout: false });
    let Answer::Opened(opened) = make(3, "d/g", absent_then) else { panic!("not made") };
    assert_eq!(s.open("e/g", false).file, opened.file);
    let (absent_then, absent_alike) = (absent("e/h"), absent("e/h"));
    assert!(matches!(make(4, "e/h", absent_then), Answer::Opened(_)));
    // A copy of the call gets what the first one made.
    assert!(matches!(make(4, "e/h", absent_alike), Answer::Opened(_)));
    let absent_then = absent("e/i");
    assert!(absent_then.is_some());
    ["e/f", "e/g", "e/h"].into_iter().for_each(|name| s.done(unlink(name)));
    s.done(MetaCall::Rmdir { path: path("e") });
    assert!(matches!(make(5, "e/i", absent_then), Answer::Fault(Fault { errno: ENOENT, .. })));
    let copy = Who { epoch: 2, ..who(6) };
    for (who, call) in
        [(copy, call("n")), (who(6), create("n")), (who(6), call("")), (who(6), call("../n")), (who(6), getattr("n"))]
    {
        assert!(s.service.absent(&who, &call).is_none(), "{call:?}");
    }
}

#[test]
fn a_large_directory_is_listed_in_order_and_in_time() {
    const FILES: usize = 20_000;
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    // Directly on the local directory: the listing is what is tested.
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
    let began = Instant::now();
    let (all, slices) = list(u32::MAX);
    let reading = began.elapsed();
    assert_eq!(all.len(), FILES);
    assert!(all.windows(2).all(|pair| pair[0].name < pair[1].name), "in byte order, each once");
    assert!(slices > 1, "it takes more than one answer");
    let (small, slices) = list(100);
    assert_eq!((small.len(), slices), (FILES, FILES / 100));
    assert!(small == all);
    // One at a time costs a look-up each, not a reading of the directory each.
    let began = Instant::now();
    let mut after = Vec::new();
    for _ in 0..500 {
        let Answer::Entries(entries) = s.call(MetaCall::Readdir { path: path("d"), after, max: 1 }) else { panic!() };
        after = entries[0].name.clone();
    }
    assert!(began.elapsed() < 100 * reading, "{:?} for 500 names, {reading:?} for all", began.elapsed());
    // Names removed meanwhile are left out; a new listing sees the added ones.
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
    let takes = |name| MetaCall::SetAttr { target: at(name), set: SetAttr { takes: 0o2000, ..SetAttr::default() } };
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
        (MetaCall::Rename { from: path("f"), to: path("l"), no_replace: true, whiteout: false }, EEXIST),
        (symlink(b""), ENOENT),
        (symlink(b"a\0b"), EINVAL),
        (symlink(&[b'x'; 4096]), ENAMETOOLONG),
        (MetaCall::Readlink { path: path("f") }, EINVAL),
        (MetaCall::Readlink { path: path("") }, EINVAL),
        (MetaCall::Readdir { path: path("f"), after: vec![], max: 1 }, ENOTDIR),
        (MetaCall::Readdir { path: path("l"), after: vec![], max: 1 }, ELOOP),
        (attrs(SetAttr { uid: Some(u32::MAX), ..SetAttr::default() }), EINVAL),
        (attrs(SetAttr { gid: Some(u32::MAX), ..SetAttr::default() }), EINVAL),
        (attrs(SetAttr { mode: Some(0o600), takes: 0o6000, ..SetAttr::default() }), EINVAL),
        (takes("l"), EINVAL),
        (
            attrs(SetAttr { mtime: Some(SetTime::At(Time { secs: 0, nanos: 1_000_000_000 })), ..SetAttr::default() }),
            EINVAL,
        ),
        (MetaCall::Close { handle: file.handle, wrote: true }, EBADF),
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
    assert_eq!(
        other.errno(MetaCall::Close { handle: opened.handle, wrote: true }),
        EBADF,
        "handles are a session's own"
    );
    assert_eq!(s.stat("").kind, NodeKind::Dir);
    // A client names a deep path of 60 KiB.
    assert_eq!(s.errno(getattr(&vec!["deep"; 12_000].join("/"))), ENOENT);
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
    assert_eq!(s.errno(getattr("g")), ENOENT, "a file that cannot be opened is not created");
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
    assert_eq!(s.names(""), ["by-hand", "pipe"]);
    let Answer::Fault(fault) = s.call(MetaCall::Open { path: path("by-hand"), write: true }) else { panic!() };
    assert!(fault.errno == EIO && fault.message.contains("not created by this server"), "{fault}");
    assert!(
        fault.message.contains("restored without extended attributes"),
        "removing a user's file is no remedy: {fault}"
    );
    assert_eq!(s.errno(MetaCall::Open { path: path("pipe"), write: false }), 95);
    s.file("f", 10);
    s.done(rename("f", "by-hand"));
    s.done(unlink("pipe"));
    assert_eq!(s.stat("by-hand").size, 10);
    // A record of a later version is ignored.
    let mut bytes = [0; 48];
    rustix::fs::getxattr(names.join("by-hand"), "user.impresario.file", &mut bytes[..]).unwrap();
    bytes[0] = 4;
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(names.join("by-hand"), "user.impresario.file", &bytes, flags).unwrap();
    for call in [MetaCall::Open { path: path("by-hand"), write: false }, unlink("by-hand")] {
        let Answer::Fault(fault) = s.call(call) else { panic!() };
        assert!(
            fault.errno == EIO && fault.message.contains("by-hand: this program does not understand its record"),
            "{fault}"
        );
    }
}

#[test]
fn a_full_disk_fails_what_needs_space_and_breaks_nothing() {
    let Some(small) = SmallDisk::mount(c"nr_inodes=40,size=1m") else { return };
    let s = start(&small.at("meta"));
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
    check_directory(&small.at("meta"), &objects);
}

/// Neither a block nor an inode is left: names can still be removed, with a note of each, and the server starts.
#[test]
fn a_full_folder_gives_names_up_and_its_server_starts() {
    let Some(small) = SmallDisk::mount(c"nr_inodes=1200,size=16m") else { return };
    let filler = small.at("filler");
    std::fs::write(&filler, "").unwrap();
    let (objects, mut sequence) = (Arc::new(MemoryObjects::default()), 0);
    let mut call = |s: &Server, call: MetaCall| {
        sequence += 1;
        s.service.call_from(s.session, Who { client: ClientKey(7), sequence, ..Who::default() }, call)
    };
    let s = start_with(options(&small.at("meta")), objects.clone());
    let made = (0..2000).take_while(|n| match call(&s, create(&format!("f.{n}"))) {
        Answer::Opened(opened) => {
            s.close(opened);
            true
        }
        Answer::Fault(fault) => {
            assert_eq!(fault.errno, ENOSPC);
            false
        }
        other => panic!("{other:?}"),
    });
    let made = made.count();
    assert!(made > 600, "{made}");
    let full = std::fs::write(&filler, vec![1; 16 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(ENOSPC));
    let mut remove = |s: &Server, n: usize| match call(s, unlink(&format!("f.{n}"))) {
        Answer::Removed { .. } => {}
        other => panic!("{n}: {other:?}"),
    };
    (0..300).for_each(|n| remove(&s, n));
    drop(s);
    // The inodes that have become free are taken, too.
    let taken = (0..).take_while(|n| std::fs::write(small.at(&format!("taken.{n}")), "").is_ok()).count();
    let s = start_with(options(&small.at("meta")), objects.clone());
    assert_eq!(s.names("").len(), made - 300);
    (300..made).for_each(|n| remove(&s, n));
    s.idle();
    (0..taken).for_each(|n| std::fs::remove_file(small.at(&format!("taken.{n}"))).unwrap());
    std::fs::remove_file(&filler).unwrap();
    s.close(s.create("again"));
    s.hang_up();
    s.idle();
    drop(s);
    check_directory(&small.at("meta"), &objects);
}

#[test]
fn without_roots_rights_permission_bits_do_not_hold_up_the_server() {
    const NOBODY: u32 = 65_534;
    if !impresario_testing::require("root") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let directory = dir.path().to_owned();
    // Permissions are a thread's; the threads that it starts inherit them.
    std::thread::spawn(move || {
        let (uid, gid) = (rustix::thread::Uid::from_raw(NOBODY), rustix::thread::Gid::from_raw(NOBODY));
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        let objects = Arc::new(MemoryObjects::default());
        let mut s = start_with(options(&directory), objects.clone());
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
            // Left open when the server stops.
            drop(s);
            s = start_with(options(&directory), objects.clone());
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
