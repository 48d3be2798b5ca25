//! Appends of several clients to one file: what the metadata server assigns them.

use std::sync::Arc;

use crate::meta_support::*;
use impresario_server::meta::MetaOptions;
use impresario_wire::message::*;

const EBADF: i32 = 9;
const EFBIG: i32 = 27;

fn append(s: &Server, opened: &Opened, len_bytes: u64) -> u64 {
    match s.call(MetaCall::Append { handle: opened.handle, len_bytes }) {
        Answer::Assigned { offset } => offset,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranges_lie_behind_all_bytes_and_do_not_overlap() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let other = s.again();
    let (a, b) = (s.create("f"), other.open("f", true));
    assert_eq!(append(&s, &a, 10), 0);
    // Neither has written yet.
    assert_eq!(append(&other, &b, 5), 10);
    assert_eq!(append(&s, &a, 1), 15);
    s.write(&a, 0, 16);
    assert_eq!(s.stat("f").size, 16);
    // Bytes that were written at an offset of the writer's own.
    s.write(&a, 100_000, 7);
    assert_eq!(append(&other, &b, 3), 100_007);
    s.set(at("f"), size(20));
    assert_eq!(append(&s, &a, 1), 20, "cut, with all that was assigned");
    s.set(at("f"), size(50_000));
    assert_eq!(append(&s, &a, 1), 50_000);
    s.done(MetaCall::Fsync { handle: a.handle });
    assert_eq!(append(&other, &b, 1), 50_001, "a sync forgets no range that is not written yet");
    assert_eq!(s.errno(MetaCall::Append { handle: s.open("f", false).handle, len_bytes: 1 }), EBADF);
    assert_eq!(s.errno(MetaCall::Append { handle: 12345, len_bytes: 1 }), EBADF);
    assert_eq!(s.errno(MetaCall::Append { handle: a.handle, len_bytes: u64::MAX }), EFBIG);
    s.hang_up();
    other.hang_up();
    let s = s.again();
    s.idle();
    assert_eq!(s.stat("f").size, 50_000, "what nobody wrote is no part of the file");
    s.quiet();
    check_directory(dir.path(), &s.objects);
}

#[test]
fn a_repeated_append_gets_the_same_range() {
    let dir = tempfile::tempdir().unwrap();
    // A file is settled when its writer had the time to come back.
    let s = start_with(MetaOptions::new(dir.path(), SERVERS), Arc::default());
    let opened = s.create("f");
    let ask = |session, epoch, sequence, handle| {
        let who = Who { client: ClientKey(7), epoch, sequence, ..Who::default() };
        s.service.call_from(session, who, MetaCall::Append { handle, len_bytes: 10 })
    };
    assert_eq!(ask(s.session, 0, 1, opened.handle), Answer::Assigned { offset: 0 });
    assert_eq!(ask(s.session, 0, 2, opened.handle), Answer::Assigned { offset: 10 });
    // Its connection was lost, and the only opener with it: it asks again over another one, in a newer epoch.
    let other = s.again();
    s.hang_up();
    let again = other.open("f", true);
    assert_eq!(ask(other.session, 1, 1, again.handle), Answer::Assigned { offset: 0 });
    assert_eq!(ask(other.session, 1, 2, again.handle), Answer::Assigned { offset: 10 });
    assert_eq!(ask(other.session, 1, 3, again.handle), Answer::Assigned { offset: 20 });
    match ask(s.session, 0, 4, opened.handle) {
        Answer::Fault(fault) => assert_eq!(fault.errno, Fault::FENCED, "a copy that was given up takes no range"),
        other => panic!("{other:?}"),
    }
}

/// An I/O node that hangs is left after seconds: enough for others to append thousands of records to a log.
#[test]
fn a_repeated_append_gets_the_same_range_however_much_others_have_appended() {
    let dir = tempfile::tempdir().unwrap();
    let s = start_with(MetaOptions::new(dir.path(), SERVERS), Arc::default());
    let opened = s.create("f");
    let ask = |client, epoch, sequence| {
        let who = Who { client: ClientKey(client), epoch, sequence, ..Who::default() };
        s.service.call_from(s.session, who, MetaCall::Append { handle: opened.handle, len_bytes: 10 })
    };
    assert_eq!(ask(7, 0, 1), Answer::Assigned { offset: 0 });
    for n in 1..=1000 {
        assert_eq!(ask(8, 0, n), Answer::Assigned { offset: 10 * n });
    }
    assert_eq!(ask(7, 1, 1), Answer::Assigned { offset: 0 }, "it has no other, which would leave zeros");
    match ask(8, 1, 5) {
        Answer::Fault(fault) => assert_eq!(fault.errno, libc::EIO, "its range is not known any more"),
        other => panic!("{other:?}"),
    }
    assert_eq!(ask(8, 1, 1001), Answer::Assigned { offset: 10_010 });
}

/// Its answer was lost with the server: another range would leave zeros in the place of this one.
#[test]
fn a_restarted_server_gives_a_repeated_append_the_same_range() {
    let dir = tempfile::tempdir().unwrap();
    let s = start_with(MetaOptions::new(dir.path(), SERVERS), Arc::default());
    s.file("f", 30);
    let ask = |s: &Server, epoch, sequence, handle, len_bytes| {
        let who = Who { client: ClientKey(7), epoch, sequence, ..Who::default() };
        s.service.call_from(s.session, who, MetaCall::Append { handle, len_bytes })
    };
    let opened = s.open("f", true);
    assert_eq!(ask(&s, 0, 1, opened.handle, 10), Answer::Assigned { offset: 30 });
    assert_eq!(ask(&s, 0, 2, opened.handle, 5), Answer::Assigned { offset: 40 });
    let (mut objects, file) = (s.objects.clone(), opened.file);
    drop(s);
    // The file of changes is written anew at each start.
    for epoch in 1..3 {
        let s = start_with(MetaOptions::new(dir.path(), SERVERS), objects);
        let handle = s.opened(MetaCall::Reopen { path: path("f"), file, write: true }).handle;
        let next = 45 + u64::from(epoch - 1);
        assert_eq!(ask(&s, epoch, 2, handle, 5), Answer::Assigned { offset: 40 });
        assert_eq!(ask(&s, epoch, 1, handle, 10), Answer::Assigned { offset: 30 });
        assert_eq!(ask(&s, epoch, 2 + u64::from(epoch), handle, 1), Answer::Assigned { offset: next });
        objects = s.objects.clone();
    }
}

/// A writer has a range and has not written it when the server is restarted.
#[test]
fn a_restarted_server_assigns_no_range_twice() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 30);
    let opened = s.open("f", true);
    s.set(at("f"), mtime(1000));
    assert_eq!(append(&s, &opened, 10), 30);
    let objects = s.objects.clone();
    drop(s);
    // Clients have this long to come back, and no file is settled before.
    let s = start_with(MetaOptions::new(dir.path(), SERVERS), objects);
    let opened = s.opened(MetaCall::Reopen { path: path("f"), file: opened.file, write: true });
    assert_eq!(append(&s, &opened, 5), 40);
    assert_eq!((s.stat("f").size, s.stat("f").mtime), (30, past(1000)), "nothing is written yet");
}
