//! What clients of the metadata server may rely on, sentence by sentence.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::meta_support::*;
use impresario_layout::{Layout, Skipped};
use impresario_server::meta::{Fate, MemoryObjects, MetaOptions, StepHook};
use impresario_testing::{require, until};
use impresario_wire::message::*;

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EBADF: i32 = 9;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const ENOTCONN: i32 = 107;
const EIDRM: i32 = 43;

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
    assert_eq!(s.objects.calls(), asked, "the data servers are not asked any more");
    let reader = s.open("f", false);
    assert_eq!(s.attr(handle(&reader)).size, 1_000_001);
    assert_eq!(s.objects.calls(), asked, "readers change nothing");
}

/// Nobody is told that a file system is empty whose folder was removed.
#[test]
fn a_metadata_folder_that_is_removed_is_an_error_and_not_an_empty_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let file = s.create("d/f");
    s.close_unwritten(file);
    assert_eq!(s.errno(getattr("none")), ENOENT);
    assert_eq!(s.list("d", "f", 9), []);
    std::fs::remove_dir_all(dir.path()).unwrap();
    let readdir = MetaCall::Readdir { path: path(""), after: path(""), max: 9 };
    let walk = MetaCall::Examine(Examine::Directory { path: path(""), after: path(""), max: 9 });
    let one = MetaCall::Examine(Examine::File { path: path("d/f") });
    let unnamed = MetaCall::Examine(Examine::Unnamed { removed: true, after: path(""), max: 9 });
    let [begin, end] = [Examine::BeginWalk, Examine::EndWalk { walk: 1 }].map(MetaCall::Examine);
    for call in [readdir, getattr("d/f"), getattr("none"), create("g"), unlink("d/f"), begin, walk, one, unnamed, end] {
        assert_eq!(s.errno(call.clone()), EIO, "{call:?}");
    }
}

#[test]
fn data_servers_that_stay_away_fail_no_close_and_are_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let opened = s.create("f");
    s.write(&opened, 0, 5000);
    // A reader does not keep it from being settled.
    s.open("f", false);
    s.objects.set_away(true);
    let fault = match s.call(getattr("f")) {
        Answer::Fault(fault) => fault,
        other => panic!("{other:?}"),
    };
    assert_eq!(fault.errno, EIO);
    assert!(fault.message.contains("cannot get the attributes of f") && fault.message.contains("data.0"), "{fault}");
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
    let settled = dir.path().join("names/d/g");
    until("it is settled", || std::fs::metadata(&settled).unwrap().len() == 5000);
    s.idle();
    assert_eq!(s.stat("d/g").size, 5000);
    check_directory(dir.path(), &s.objects);
}

#[test]
fn a_length_that_data_servers_refuse_holds_up_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 10);
    s.file("g", 10);
    assert_eq!(s.errno(MetaCall::SetAttr { target: at("f"), set: size(1 << 55) }), EFBIG);
    s.done(unlink("g"));
    s.idle();
    assert_eq!(s.objects.files().len(), 1, "removals go on");
}

/// Entries that cannot be opened: what is left of a broken disk.
#[test]
fn an_unreadable_mark_does_not_keep_the_server_from_starting() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let opened = s.create("f");
    s.write(&opened, 0, 100);
    let objects = s.objects.clone();
    drop(s);
    let mark = std::fs::read_dir(dir.path().join("writers")).unwrap().next().unwrap().unwrap().path();
    let broken = mark.with_file_name("00000000000000ff");
    std::os::unix::fs::symlink("nowhere", &broken).unwrap();
    assert_eq!(mark.file_name().unwrap().len(), broken.file_name().unwrap().len(), "it looks like a key");
    let s = start_with(options(dir.path()), objects);
    assert_eq!(s.stat("f").size, 100);
}

#[test]
fn who_queues_for_a_file_does_not_wait_for_dead_data_servers_again_and_again() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 10);
    let delay = Duration::from_millis(1500);
    s.objects.set_delay(delay);
    s.objects.set_away(true);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..6 {
            let client = s.again();
            scope.spawn(move || assert_eq!(client.errno(MetaCall::SetAttr { target: at("f"), set: size(1) }), EIO));
        }
    });
    // One after another would take six of them. Usually it is one or two.
    assert!(began.elapsed() < delay * 5, "{:?}", began.elapsed());
    s.objects.set_delay(Duration::ZERO);
    s.objects.set_away(false);
    s.quiet();
    assert_eq!(s.stat("f").size, 10);
}

#[test]
fn files_on_other_servers_are_removed_while_many_wait_for_one_that_is_silent() {
    others_are_removed(0);
}

/// As where files have so many objects that a batch of removals is sent in parts.
#[test]
fn removals_that_were_not_tried_are_tried_again() {
    others_are_removed(64);
}

fn others_are_removed(unlinks_at_once: usize) {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.objects.set_unlinks_at_once(unlinks_at_once);
    let on = |server: u16, name: &str| {
        let layout = LayoutRequest { base: Some(server), pcount: Some(1), ssize_bytes: None };
        let made =
            MetaCall::Create { path: path(name), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: Some(layout) };
        let opened = s.opened(made);
        s.write(&opened, 0, 10);
        let file = opened.file;
        s.close(opened);
        file
    };
    let silent: Vec<_> = (0..3000).map(|n| on(0, &format!("silent.{n}"))).collect();
    let other = on(1, "other");
    s.quiet();
    // None is removed before all are to be, however long that takes.
    s.objects.hold(true);
    s.objects.set_silent(Some(0));
    (0..silent.len()).for_each(|n| s.done(unlink(&format!("silent.{n}"))));
    s.done(unlink("other"));
    s.objects.hold(false);
    until("its object is removed", || !s.objects.files().contains(&other));
    // Those of the silent one need twelve batches.
    assert!(s.objects.silences() <= 6, "{}", s.objects.silences());
    s.objects.set_silent(None);
    s.quiet();
    assert!(s.objects.files().is_empty());
    check_directory(dir.path(), &s.objects);
}

#[test]
fn removing_does_not_wait_for_data_servers() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 10);
    s.objects.hold(true);
    s.done(unlink("f"));
    assert_eq!(s.errno(getattr("f")), ENOENT);
    assert_eq!(s.objects.files().len(), 1, "its object is still there");
    s.objects.hold(false);
    s.idle();
    check_directory(dir.path(), &s.objects);
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
    check_directory(dir.path(), &objects);
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
    // Also under a name that the server does not know.
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
    // By path while another client has it open for writing but writes nothing more.
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
    // Truncation counts, and a time set after that survives the next open.
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
    check_directory(dir.path(), &s.objects);
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
    check_directory(dir.path(), &s.objects);
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
        // Another client moves one before its owner is back, while its size is unknown.
        s.objects.set_away(true);
        s.done(if restart { rename("elsewhere", "moved.2") } else { rename("moved", "elsewhere") });
        s.objects.set_away(false);
        for (name, opened) in [("kept", &kept), ("removed", &removed)] {
            let again = s.opened(reopen(name, opened.file, true));
            assert_eq!((again.file, again.layout, again.attr.size), (opened.file, opened.layout, 10));
        }
        let other = FileKey(kept.file.0 + 1000);
        assert_eq!(s.errno(reopen("kept", other, false)), EIDRM, "another file has that name now");
        assert_eq!(s.errno(reopen("nothing", other, false)), EIDRM);
    }
    s.idle();
    assert!(s.objects.files().contains(&removed.file));
    let last = s.opened(reopen("removed", removed.file, false));
    s.hang_up();
    s = s.again();
    let back = s.opened(reopen("removed", removed.file, false));
    assert_eq!((back.attr.nlink, back.attr.size), (0, 10));
    assert_eq!(s.errno(MetaCall::Close { handle: last.handle, wrote: false }), EBADF);
    s.close(back);
    s.idle();
    assert!(s.objects.files().contains(&removed.file), "others may have it open, and come back");
    assert!(s.objects.files().contains(&moved.file));
    let objects = s.objects.clone();
    drop(s);
    let s = start_with(options(dir.path()), objects);
    s.idle();
    assert!(!s.objects.files().contains(&removed.file));
    assert_eq!(s.errno(reopen("removed", removed.file, false)), EIDRM);
}

/// Each loss of a connection gives the whole grace period.
#[test]
fn an_open_removed_file_is_kept_for_the_grace_period_after_each_loss() {
    let grace = Duration::from_secs(2);
    let dir = tempfile::tempdir().unwrap();
    let s = start_with(MetaOptions { grace, ..options(dir.path()) }, Arc::default());
    let file = s.create("f").file;
    let reopen = || MetaCall::Reopen { path: path("f"), file, write: false };
    s.done(unlink("f"));
    s.hang_up();
    let lost = Instant::now();
    let again = s.again();
    again.opened(reopen());
    std::thread::sleep((grace - Duration::from_millis(200)).saturating_sub(lost.elapsed()));
    let lost_again = Instant::now();
    again.hang_up();
    std::thread::sleep((grace + Duration::from_millis(300)).saturating_sub(lost.elapsed()));
    let again = s.again();
    again.idle();
    let answer = again.call(reopen());
    assert!(matches!(answer, Answer::Opened(_)) || lost_again.elapsed() > grace, "{answer:?}");
    let lost_again = Instant::now();
    again.hang_up();
    let is_there = || std::fs::read_dir(dir.path().join("orphans")).unwrap().count() > 0;
    until("it is removed in the end", || !is_there());
    assert!(lost_again.elapsed() >= grace, "{:?}", lost_again.elapsed());
}

#[test]
fn a_removed_file_is_kept_for_every_client_that_may_have_it_open() {
    let dir = tempfile::tempdir().unwrap();
    let patient = || MetaOptions { grace: Duration::from_secs(3600), ..options(dir.path()) };
    let s = start_with(patient(), Arc::default());
    let file = |s: &Server, name: &str| {
        let opened = s.create(name);
        s.write(&opened, 0, 10);
        opened
    };
    let reopen = |s: &Server, name: &str, file| s.opened(MetaCall::Reopen { path: path(name), file, write: false });
    // Two are lost, and one comes back and closes it.
    let (one, other) = (s.again(), s.again());
    let both = file(&one, "both").file;
    other.open("both", false);
    s.done(unlink("both"));
    one.hang_up();
    other.hang_up();
    let back = s.again();
    back.close(reopen(&back, "both", both));
    s.idle();
    reopen(&s, "both", both);
    // It is removed by another client after its own is lost.
    let owner = s.again();
    let late = file(&owner, "late").file;
    owner.hang_up();
    s.done(unlink("late"));
    s.idle();
    reopen(&s, "late", late);
    // It was open when the server was stopped, for reading only.
    s.close(file(&s, "read"));
    let read = s.open("read", false).file;
    let objects = s.objects.clone();
    drop((s, one, other, back, owner));
    let s = start_with(patient(), objects);
    s.done(unlink("read"));
    s.idle();
    for (name, file) in [("both", both), ("late", late), ("read", read)] {
        reopen(&s, name, file);
    }
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
    let layout = |s: &Server, p: &str, request| {
        let call = MetaCall::Create { path: path(p), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: request };
        s.opened(call).layout
    };
    let request = |base, pcount, ssize_bytes| Some(LayoutRequest { base, pcount, ssize_bytes });
    let mut bases = [0; SERVERS as usize];
    for i in 0..40 {
        let l = layout(&s, &format!("f.{i}"), None);
        assert_eq!((l.pcount, l.ssize_bytes, l.servers), (3, 8192, SERVERS));
        bases[usize::from(l.base)] += 1;
    }
    assert_eq!(bases, [10; SERVERS as usize], "first strips are dealt evenly");
    s.mkdir("d");
    s.done(MetaCall::SetLayout { path: path("d"), layout: request(Some(2), None, Some(4096)) });
    s.mkdir("d/e");
    for directory in ["d", "d/e"] {
        let l = layout(&s, &format!("{directory}/f"), None);
        assert_eq!((l.base, l.pcount, l.ssize_bytes), (2, 3, 4096), "{directory}");
    }
    let l = layout(&s, "d/e/g", request(None, Some(1), None));
    assert_eq!((l.base, l.pcount, l.ssize_bytes), (2, 1, 4096));
    s.done(MetaCall::SetLayout { path: path("d/e"), layout: None });
    assert_eq!(layout(&s, "d/e/h", None).ssize_bytes, 8192);
    s.done(MetaCall::SetLayout { path: path(""), layout: request(None, Some(1), None) });
    assert_eq!(layout(&s, "r", None).pcount, 1);
    for bad in [request(Some(SERVERS), None, None), request(None, Some(0), None), request(None, None, Some(1))] {
        assert_eq!(s.errno(MetaCall::SetLayout { path: path("d"), layout: bad }), EINVAL);
        let call = MetaCall::Create { path: path("bad"), mode: 0, uid: 0, gid: 0, exclusive: true, layout: bad };
        assert_eq!(s.errno(call), EINVAL);
    }
    assert_eq!(s.errno(getattr("bad")), ENOENT);
    assert_eq!(s.errno(MetaCall::SetLayout { path: path("f.0"), layout: None }), ENOTDIR);
    // A directory whose record cannot be understood fails what needs it; setting it again mends it.
    rustix::fs::setxattr(dir.path().join("names/d"), "user.impresario.layout", b"??", rustix::fs::XattrFlags::empty())
        .unwrap();
    assert_eq!(s.errno(create("d/x")), EIO);
    s.done(MetaCall::SetLayout { path: path("d"), layout: None });
    s.create("d/x");
}

#[test]
fn new_files_skip_servers_from_the_moment_they_are_drained_and_old_files_keep_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let drained = Arc::new(std::sync::Mutex::new(Skipped::NONE));
    let options = || {
        let drained = drained.clone();
        MetaOptions { skipped: Arc::new(move || *drained.lock().unwrap()), ..options(dir.path()) }
    };
    let s = start_with(options(), Arc::default());
    let create = |s: &Server, p: &str, base, pcount| {
        let layout = Some(LayoutRequest { base, pcount, ssize_bytes: None });
        let call = MetaCall::Create { path: path(p), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout };
        s.opened(call).layout
    };
    let servers_of = |l: &Layout| (0..l.pcount).map(|k| l.server_at(k)).collect::<Vec<_>>();
    let reopened = |s: &Server, p: &str| s.opened(MetaCall::Open { path: path(p), write: false }).layout;
    s.mkdir("d");
    let request = LayoutRequest { base: Some(1), pcount: Some(SERVERS), ssize_bytes: None };
    s.done(MetaCall::SetLayout { path: path("d"), layout: Some(request) });
    let old = create(&s, "old", None, None);
    assert_eq!((old.pcount, old.skipped), (SERVERS, Skipped::NONE));
    *drained.lock().unwrap() = Skipped::of([1]).unwrap();
    let new = create(&s, "new", None, None);
    assert_eq!((new.pcount, new.servers, new.position_of(1)), (SERVERS - 1, SERVERS, None));
    let mut bases = [0; SERVERS as usize];
    for i in 0..30 {
        bases[usize::from(create(&s, &format!("f.{i}"), None, Some(1)).base)] += 1;
    }
    assert_eq!(bases, [10, 0, 10, 10], "first strips are dealt evenly");
    // What a directory asked for before is done as far as it can be.
    assert_eq!(servers_of(&create(&s, "d/f", None, None)), [2, 3, 0]);
    assert_eq!(servers_of(&create(&s, "based", Some(3), Some(2))), [3, 0]);
    let call = |base, pcount| {
        let layout = Some(LayoutRequest { base, pcount, ssize_bytes: None });
        MetaCall::Create { path: path("bad"), mode: 0, uid: 0, gid: 0, exclusive: true, layout }
    };
    assert_eq!(s.errno(call(Some(SERVERS), None)), EINVAL);
    assert_eq!(s.errno(call(None, Some(SERVERS + 1))), EINVAL);
    assert_eq!(s.service.status()["data_servers_without_new_files"], serde_json::json!([1]));
    drop(s);

    // Layouts are the files' own: they outlast a restart, and that the server gets files again.
    *drained.lock().unwrap() = Skipped::NONE;
    let s = start_with(options(), Arc::default());
    assert_eq!((reopened(&s, "old"), reopened(&s, "new")), (old, new));
    assert_eq!(create(&s, "again", None, None).pcount, SERVERS);
    *drained.lock().unwrap() = Skipped::of(0..SERVERS).unwrap();
    assert_eq!(s.errno(call(None, None)), ENOSPC);
    assert_eq!(reopened(&s, "old"), old);
}

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

#[test]
fn a_lost_object_is_reported_and_the_length_kept() {
    let tmp = tempfile::tempdir().unwrap();
    let s = start(tmp.path());
    s.file("f", 200_000);
    let opened = s.open("f", true);
    assert_eq!(opened.made, 0b1111, "what closing had learnt");
    let layout = opened.layout;
    s.objects.lose(opened.file, layout.pcount - 1);
    let fault = |call| match s.call(call) {
        Answer::Fault(fault) => fault,
        other => panic!("{other:?}"),
    };
    let told = fault(MetaCall::GetAttr { target: at("f") });
    assert!(told.errno == libc::EIO && told.message.contains("lost its object"), "{told}");
    s.close(opened);
    assert_eq!(fault(MetaCall::GetAttr { target: at("f") }).errno, libc::EIO, "never taken for a shorter file");
    // Emptied, it misses nothing; removed, it is gone.
    let cut = SetAttr { size: Some(0), ..SetAttr::default() };
    s.done(MetaCall::SetAttr { target: at("f"), set: cut });
    assert_eq!(s.stat("f").size, 0);
    s.done(MetaCall::Unlink { path: path("f") });
}

#[test]
fn a_listing_has_the_lengths_of_other_files_than_a_lost_one() {
    let tmp = tempfile::tempdir().unwrap();
    let s = start(tmp.path());
    s.file("a", 200_000);
    let (lost, other) = (s.open("a", true), s.create("b"));
    s.write(&other, 0, 5000);
    s.objects.lose(lost.file, 0);
    let sizes: Vec<u64> = s.list("", "", 9).iter().map(|entry| entry.attr.size).collect();
    assert_eq!(sizes, [impresario_wire::Entry::UNKNOWN_SIZE, 5000]);
}

/// The length of a file that cannot be found again is not the last known one.
#[test]
fn a_listing_of_what_moves_meanwhile_has_no_older_length() {
    let tmp = tempfile::tempdir().unwrap();
    let s = start(tmp.path());
    s.mkdir("d");
    let opened = ["d/a", "d/b"].map(|p| s.create(p));
    opened.iter().for_each(|opened| s.write(opened, 0, 5000));
    let other = s.again();
    s.objects.before_next_answer(move || drop(other.call(rename("d", "e"))));
    let sizes: Vec<u64> = s.list("d", "", 9).iter().map(|entry| entry.attr.size).collect();
    assert_eq!(sizes, [5000, impresario_wire::Entry::UNKNOWN_SIZE]);
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
