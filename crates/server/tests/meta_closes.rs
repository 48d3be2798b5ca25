//! A client that closes a file says whether it has written anything through that open: what the metadata server spares itself then,
//! and that it is wrong about no file whose clients tell the truth.

use std::sync::Arc;
use std::time::Duration;

use crate::meta_support::*;
use impresario_server::meta::MetaOptions;
use impresario_wire::message::*;

/// Files whose size the server says only data servers know.
fn marked(s: &Server) -> u64 {
    s.service.status()["files_with_size_at_data_servers"].as_u64().unwrap()
}

/// The size that the server knows of by itself.
#[track_caller]
fn known_size(s: &Server, name: &str) -> u64 {
    s.quiet();
    s.objects.set_away(true);
    let size = s.stat(name).size;
    s.objects.set_away(false);
    size
}

#[test]
fn a_close_without_a_write_asks_no_data_server() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("old", 70_000);
    s.quiet();
    s.objects.set_away(true);
    let before = s.objects.calls();
    for name in ["old", "new"] {
        let opened = if name == "old" { s.open(name, true) } else { s.create(name) };
        assert_eq!(marked(&s), 1);
        s.close_unwritten(opened);
        assert_eq!(marked(&s), 0, "{name}");
    }
    assert_eq!(s.objects.calls(), before);
    assert_eq!((s.stat("old").size, s.stat("new").size), (70_000, 0));
    s.objects.set_away(false);
    check_directory(dir.path(), &s.objects);
}

/// Whoever closes last, what another one has written counts.
#[test]
fn a_close_without_a_write_after_another_client_wrote_learns_the_size() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let (one, other) = (s.again(), s.again());
    for (name, is_new) in [("new", true), ("old", false)] {
        if !is_new {
            s.file(name, 10);
        }
        let open = |s: &Server| s.open(name, true);
        for (round, size) in [1_000u64, 2_000, 3_000, 4_000].into_iter().enumerate() {
            let idle = if is_new && round == 0 { one.create(name) } else { open(&one) };
            let writer = open(&other);
            other.write(&writer, size - 1, 1);
            match round {
                0 => {
                    other.close(writer);
                    one.close_unwritten(idle);
                }
                1 => {
                    one.close_unwritten(idle);
                    other.close(writer);
                }
                // Its writer goes with its connection, and what it has written stays.
                2 => {
                    let lost = other.again();
                    let opened = open(&lost);
                    lost.write(&opened, size - 1, 1);
                    other.close_unwritten(writer);
                    lost.hang_up();
                    one.close_unwritten(idle);
                }
                // Between the two nothing is written, and the file is not forgotten.
                _ => {
                    other.close(writer);
                    other.close_unwritten(open(&other));
                    one.close_unwritten(idle);
                }
            }
            assert_eq!(known_size(&s, name), size, "{name}, round {round}");
        }
    }
    check_directory(dir.path(), &s.objects);
}

/// The length is changed by others than those who have the file open, and by ranges that are never written.
#[test]
fn a_close_without_a_write_learns_of_truncations_and_assigned_ranges() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("f", 100);
    let opened = s.open("f", true);
    s.set(at("f"), size(50_000));
    s.close_unwritten(opened);
    assert_eq!(known_size(&s, "f"), 50_000);
    let opened = s.open("f", true);
    s.done(MetaCall::Append { handle: opened.handle, len_bytes: 1_000 });
    s.close_unwritten(opened);
    assert_eq!(known_size(&s, "f"), 50_000, "nothing was written there");
    let opened = s.open("f", true);
    s.set(Target::Handle(opened.handle), size(7));
    s.done(MetaCall::Fsync { handle: opened.handle });
    s.close_unwritten(opened);
    assert_eq!(known_size(&s, "f"), 7);
    check_directory(dir.path(), &s.objects);
}

#[test]
fn what_was_written_before_a_crash_is_found_by_who_writes_nothing_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let patient = || MetaOptions { grace: Duration::from_millis(200), ..options(dir.path()) };
    let s = start_with(patient(), Arc::default());
    let writer = s.create("f");
    s.write(&writer, 0, 5_000);
    let objects = s.objects.clone();
    // The server is gone without having closed anything.
    drop(s);
    let s = start_with(patient(), objects);
    let idle = s.open("f", true);
    s.close_unwritten(idle);
    assert_eq!(s.stat("f").size, 5_000);
    assert_eq!(known_size(&s, "f"), 5_000);
    // The same of one whose writer only lost its connection.
    let lost = s.again();
    let writer = lost.open("f", true);
    lost.write(&writer, 5_000, 1_000);
    lost.hang_up();
    s.close_unwritten(s.open("f", true));
    assert_eq!(s.stat("f").size, 6_000);
    assert_eq!(known_size(&s, "f"), 6_000);
    check_directory(dir.path(), &s.objects);
}

/// A client that says so of what it did write hides its own bytes, until the next writer; and leaves nothing behind.
#[test]
fn an_untruthful_close_harms_only_its_own_writes() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let liar = s.create("f");
    s.write(&liar, 0, 3_000);
    s.close_unwritten(liar);
    assert_eq!(known_size(&s, "f"), 0);
    s.close(s.open("f", true));
    assert_eq!(known_size(&s, "f"), 3_000);
    let liar = s.create("g");
    s.write(&liar, 0, 3_000);
    s.close_unwritten(liar);
    s.done(unlink("g"));
    s.quiet();
    assert!(!s.objects.files().contains(&liar.file));
    check_directory(dir.path(), &s.objects);
}
