//! What clients of the metadata server may rely on, sentence by sentence: lengths, times, removals, striping, and data servers that are
//! away.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::meta_support::*;
use impresario_layout::{Layout, Skipped};
use impresario_server::meta::{MemoryObjects, MetaOptions};
use impresario_testing::until;
use impresario_wire::message::*;

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;

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
