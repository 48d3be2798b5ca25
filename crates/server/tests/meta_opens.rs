//! Files that are open on the metadata server while they are removed or moved, or their clients are cut off.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::meta_support::*;
use impresario_server::meta::MetaOptions;
use impresario_testing::until;
use impresario_wire::message::*;

const ENOENT: i32 = 2;
const EBADF: i32 = 9;
const ENOTCONN: i32 = 107;
const EIDRM: i32 = 43;

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
