//! Hard links: what clients of the metadata server may rely on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::meta_support::*;
use crate::support::Cluster;
use impresario_client::{Client, ClientOptions, CreateOptions, Via};
use impresario_testing::until;
use impresario_wire::message::*;

const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EEXIST: i32 = 17;
const ENOTDIR: i32 = 20;
const EINVAL: i32 = 22;
const EMLINK: i32 = 31;

fn linked(s: &Server, from: &str, to: &str) -> Attr {
    match s.call(link(from, to)) {
        Answer::Attr(attr) => attr,
        other => panic!("{from} to {to}: {other:?}"),
    }
}

fn removed(s: &Server, call: MetaCall) -> Option<u32> {
    match s.call(call) {
        Answer::Removed { links } => Some(links),
        Answer::Done => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_names_are_of_one_file_until_the_last_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    let file = s.file("a", 100);
    let before = s.stat("a");
    // The clock of a file system ticks in milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let attr = linked(&s, "a", "d/b");
    assert_eq!((attr.ino, attr.nlink, attr.size, attr.mtime), (before.ino, 2, 100, before.mtime));
    assert!(attr.ctime > before.ctime, "{attr:?}");
    linked(&s, "d/b", "c");
    for name in ["a", "d/b", "c"] {
        assert_eq!(s.stat(name), Attr { nlink: 3, ctime: s.stat("c").ctime, ..attr });
    }
    assert_eq!(s.list("", "", 9).iter().map(|entry| entry.attr.nlink).collect::<Vec<_>>(), [3, 3, 2]);

    // What is done by one name is seen by the others.
    s.set(at("d/b"), SetAttr { mode: Some(0o4711), size: Some(7), ..SetAttr::default() });
    s.done(set_xattr("c", "user.one", Some("value")));
    assert_eq!((s.stat("a").mode, s.stat("a").size), (0o4711, 7));
    assert_eq!(s.xattr(at("a"), "user.one"), Ok(b"value".to_vec()));
    assert_eq!(s.open("c", false).file, file.file);

    assert_eq!(removed(&s, unlink("a")), Some(2));
    assert_eq!(removed(&s, rename("c", "e")), None);
    assert_eq!((s.stat("e").nlink, s.stat("d/b").nlink), (2, 2));
    s.idle();
    assert_eq!(s.objects.files(), [file.file]);
    assert_eq!(removed(&s, unlink("e")), Some(1));
    s.hang_up();
    let s = s.again();
    assert_eq!(removed(&s, unlink("d/b")), Some(0));
    s.idle();
    assert_eq!(s.objects.files(), []);
    check_directory(dir.path(), &s.objects);
}

#[test]
fn renames_over_names_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let file = s.file("a", 10);
    linked(&s, "a", "b");
    assert_eq!(removed(&s, rename("a", "b")), None, "two names of one file: nothing is done");
    assert_eq!(s.names(""), ["a", "b"]);
    let onto = MetaCall::Rename { from: path("a"), to: path("b"), no_replace: true, whiteout: false };
    assert_eq!(s.errno(onto), EEXIST);
    s.file("x", 1);
    assert_eq!(removed(&s, rename("x", "a")), Some(1), "one name of two");
    assert_eq!((s.stat("a").size, s.stat("b").size, s.stat("b").nlink), (1, 10, 1));
    s.idle();
    assert!(s.objects.files().contains(&file.file));
    assert_eq!(removed(&s, rename("a", "b")), Some(0));
    s.idle();
    assert!(!s.objects.files().contains(&file.file));
    check_directory(dir.path(), &s.objects);
}

#[test]
fn a_file_that_is_open_or_written_counts_its_names_right() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let opened = s.create("a");
    let by_handle = || s.attr(Target::Handle(opened.handle));
    s.write(&opened, 0, 5000);
    let attr = linked(&s, "a", "b");
    assert_eq!((attr.nlink, attr.size), (2, 5000));
    let counts = || s.list("", "", 9).iter().map(|entry| (entry.attr.nlink, entry.attr.size)).collect::<Vec<_>>();
    assert_eq!(counts(), [(2, 5000), (2, 5000)]);
    assert_eq!((by_handle().nlink, s.stat("b").nlink), (2, 2));
    // Without an answer of the data servers a listing has no size, which is not the last known one, and the true number of names.
    s.objects.set_away(true);
    assert_eq!(counts(), [(2, impresario_wire::Entry::UNKNOWN_SIZE); 2]);
    let Answer::Fault(fault) = s.call(link("a", "c")) else { panic!() };
    assert_eq!(fault.errno, 5, "its attributes cannot be told: {fault}");
    s.objects.set_away(false);
    until("the data servers are asked again", || matches!(s.call(unlink("a")), Answer::Removed { links: 1 }));
    assert_eq!((by_handle().nlink, s.stat("b").size), (1, 5000));
    assert_eq!(s.names(""), ["b"], "what failed was not done");
    assert_eq!(removed(&s, unlink("b")), Some(0));
    assert_eq!(by_handle().nlink, 0);
    s.write(&opened, 5000, 1);
    assert_eq!(by_handle().size, 5001);
    s.done(MetaCall::Fsync { handle: opened.handle });
    s.close(opened);
    s.idle();
    check_directory(dir.path(), &s.objects);
}

#[test]
fn what_cannot_be_linked() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    s.file("f", 1);
    s.file("g", 1);
    for (from, to, errno) in [
        ("d", "e", EPERM),
        ("", "e", EPERM),
        ("d", "f", EEXIST),
        ("f", "g", EEXIST),
        ("f", "f", EEXIST),
        ("f", "d", EEXIST),
        ("f", "", EEXIST),
        ("no", "e", ENOENT),
        ("no", "f", ENOENT),
        ("f", "no/e", ENOENT),
        ("f", "g/e", ENOTDIR),
        ("f/x", "e", ENOTDIR),
        ("f", "d/../e", EINVAL),
    ] {
        let Answer::Fault(fault) = s.call(link(from, to)) else { panic!("{from} to {to}") };
        assert!(fault.errno == errno && fault.message.contains(' '), "{from} to {to}: {fault}");
    }
    let Answer::Fault(fault) = s.call(link("d", "e")) else { panic!() };
    assert_eq!(fault.message, "cannot link d: directories have one name only");
    // A file that lost its last name has none to link, however it is open.
    let opened = s.open("f", true);
    s.done(unlink("f"));
    assert_eq!(s.errno(link("f", "e")), ENOENT);
    s.close(opened);
    s.idle();
    assert_eq!(s.names(""), ["d", "g"]);
    check_directory(dir.path(), &s.objects);
}

#[test]
fn links_pipes_and_sockets_have_several_names_too() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.done(MetaCall::Symlink { path: path("l"), target: path("nowhere"), uid: 0, gid: 0 });
    s.done(pipe("p"));
    for name in ["l", "p"] {
        let attr = linked(&s, name, &format!("{name}2"));
        assert_eq!((attr.ino, attr.nlink, attr.kind), (s.stat(name).ino, 2, s.stat(name).kind));
        assert_eq!(removed(&s, rename(name, &format!("{name}2"))), None);
        assert_eq!(removed(&s, unlink(name)), Some(1));
        s.file("over", 1);
        assert_eq!(removed(&s, rename("over", &format!("{name}2"))), Some(0));
    }
    check_directory(dir.path(), &s.objects);
}

#[test]
fn a_file_has_a_bounded_number_of_names() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.mkdir("d");
    s.file("f", 10);
    let names = dir.path().join("names");
    for i in 2..LINKS_MAX {
        std::fs::hard_link(names.join("f"), names.join(format!("d/{i}"))).unwrap();
    }
    assert_eq!(linked(&s, "f", "last").nlink, LINKS_MAX);
    let Answer::Fault(fault) = s.call(link("f", "more")) else { panic!() };
    assert!(fault.errno == EMLINK && fault.message.contains("64000 names"), "{fault}");
    assert_eq!(s.errno(link("f", "last")), EEXIST);
    // Its marks are names of the local file, too.
    let opened = s.open("f", true);
    s.write(&opened, 10, 10);
    s.file("g", 1);
    assert_eq!(removed(&s, rename("g", "last")), Some(LINKS_MAX - 1));
    assert_eq!(linked(&s, "d/2", "more").nlink, LINKS_MAX);
    assert_eq!(s.stat("d/3").size, 20);
    s.close(opened);
    s.idle();
    check_directory(dir.path(), &s.objects);
}

/// Names of few files come and go on many threads; the objects of a file are there as long as one of its names is.
#[test]
fn no_file_is_lost_while_it_has_a_name() {
    const THREADS: usize = 8;
    const ROUNDS: usize = 150;
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    let kept: Vec<Opened> = (0..3).map(|i| s.file(&format!("kept.{i}"), 100)).collect();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (s, done) = (s.again(), &done);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let (file, name) = (format!("kept.{}", (thread + round) % 3), format!("n.{}", round % 4));
                    match s.call(link(&file, &name)) {
                        Answer::Attr(attr) => assert!((2..=5).contains(&attr.nlink), "{attr:?}"),
                        Answer::Fault(fault) => assert_eq!(fault.errno, EEXIST, "{fault}"),
                        other => panic!("{other:?}"),
                    }
                    // A writer, so that the file has a mark, and its size is settled.
                    if round % 5 == thread % 5 {
                        s.close(s.open(&file, true));
                    }
                    let gone = if round % 2 == 0 {
                        s.call(unlink(&name))
                    } else {
                        let other = format!("over.{thread}");
                        s.file(&other, 1);
                        s.call(rename(&other, &name))
                    };
                    match gone {
                        Answer::Removed { .. } | Answer::Done => _ = done.fetch_add(1, Ordering::Relaxed),
                        Answer::Fault(fault) => assert_eq!(fault.errno, ENOENT, "{fault}"),
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
    assert!(done.load(Ordering::Relaxed) > ROUNDS);
    for name in 0..4 {
        s.call(unlink(&format!("n.{name}")));
    }
    s.quiet();
    for (i, file) in kept.iter().enumerate() {
        let attr = s.stat(&format!("kept.{i}"));
        assert_eq!((attr.nlink, attr.size), (1, 100));
        assert!(s.objects.files().contains(&file.file));
    }
    assert_eq!(s.objects.files().len(), 3);
    check_directory(dir.path(), &s.objects);
}

#[test]
fn a_file_open_for_reading_is_found_by_a_name_that_is_left() {
    let cluster = Cluster::start(1, |_| {});
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let client = Client::connect(&cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap();
    let file = client.create("tmp", CreateOptions::default()).unwrap();
    file.write_at(b"text", 0).unwrap();
    file.close().unwrap();
    let file = client.open("tmp", false).unwrap();
    assert_eq!(client.link("tmp", "new").unwrap().nlink, 2);
    assert_eq!(client.remove_name("tmp").unwrap(), Some(1));
    drop(meta);
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    until("the file is found again", || file.attr().is_ok_and(|attr| (attr.nlink, attr.size) == (1, 4)));
    let mut read = [0; 4];
    assert_eq!((file.read_at(&mut read, 0).unwrap(), &read), (4, b"text"));
}

/// A client that is told what became of a name knows whether the file is gone.
#[test]
fn the_answer_to_a_removal_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let s = start(dir.path());
    s.file("a", 1);
    linked(&s, "a", "b");
    let who = Who { client: ClientKey(9), sequence: 1, ..Who::default() };
    let ask = || s.service.call_from(s.session, who, unlink("a"));
    assert_eq!((ask(), ask()), (Answer::Removed { links: 1 }, Answer::Removed { links: 1 }));
    let objects: Arc<_> = s.objects.clone();
    drop(s);
    let s = start_with(options(dir.path()), objects);
    let again = s.service.call_from(s.session, who, unlink("a"));
    assert_eq!(again, Answer::Done, "it was done; how many names are left is not kept");
    assert_eq!(s.stat("b").nlink, 1);
}
