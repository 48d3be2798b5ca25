//! Whatever step the metadata server is stopped before, the next start finds everything that was acknowledged, and
//! nothing that must not exist.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::meta_support::*;
use impresario_server::meta::{Fate, MemoryObjects, MetaOptions};
use impresario_wire::message::*;

type Step = fn(&Server);

/// Client operations; one call of a step changes the name space, so that a crash in it leaves the state before or
/// after.
const STEPS: &[(&str, Step)] = &[
    ("mkdir d", |s| s.mkdir("d")),
    ("mkdir d/e", |s| s.mkdir("d/e")),
    ("striping of d", |s| {
        let layout = Some(LayoutRequest { pcount: Some(2), ..LayoutRequest::default() });
        s.done(MetaCall::SetLayout { path: path("d"), layout });
    }),
    ("mkdir d/striped", |s| s.mkdir("d/striped")),
    ("create d/a", |s| {
        let _ = s.create("d/a");
    }),
    ("write d/a", |s| s.write(&s.open("d/a", true), 0, 300_000)),
    ("sync d/a", |s| s.done(MetaCall::Fsync { handle: s.open("d/a", false).handle })),
    ("write and close b", |s| {
        let _ = s.file("b", 70_000);
    }),
    ("set times of b", |s| {
        let _ = s.set(at("b"), mtime(1000));
    }),
    ("open and close b", |s| s.close(s.open("b", true))),
    ("open b and change nothing", |s| s.close_unwritten(s.open("b", true))),
    ("create q and write nothing", |s| s.close_unwritten(s.create("q"))),
    ("remove q", |s| s.done(unlink("q"))),
    ("chmod b", |s| {
        let _ = s.set(at("b"), SetAttr { mode: Some(0o4755), ..SetAttr::default() });
    }),
    ("set times of d/a while open", |s| {
        let _ = s.set(at("d/a"), mtime(2000));
    }),
    ("an extended attribute of b", |s| s.done(set_xattr("b", "user.one", Some("value")))),
    ("another value", |s| s.done(set_xattr("b", "user.one", Some("longer value")))),
    ("an extended attribute of d", |s| s.done(set_xattr("d", "user.two", Some("")))),
    ("a list of d for what is made there", |s| {
        let entries = [(1, 6, u32::MAX), (2, 6, 5), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
        let bytes =
            entries.into_iter().flat_map(|(tag, rights, id)| [[tag, 0, rights, 0], u32::to_le_bytes(id)].concat());
        let (name, value) = (ACL_DEFAULT.to_vec(), Some([2, 0, 0, 0].into_iter().chain(bytes).collect()));
        s.done(MetaCall::SetXattr { target: at("d"), name, value, mode: XattrMode::Any });
    }),
    ("create what inherits it", |s| {
        let _ = s.create("d/listed");
    }),
    ("make a directory that inherits it", |s| s.mkdir("d/listed.d")),
    ("remove what inherited it", |s| s.done(unlink("d/listed"))),
    ("remove the directory that did", |s| s.done(MetaCall::Rmdir { path: path("d/listed.d") })),
    ("no list of d any more", |s| {
        let target = at("d");
        s.done(MetaCall::SetXattr { target, name: ACL_DEFAULT.to_vec(), value: None, mode: XattrMode::Any });
    }),
    ("no attribute of d any more", |s| s.done(set_xattr("d", "user.two", None))),
    ("rename b to d/c", |s| s.done(rename("b", "d/c"))),
    ("write and close d/f", |s| {
        let _ = s.file("d/f", 10);
    }),
    ("rename d/f over d/c", |s| s.done(rename("d/f", "d/c"))),
    ("symlink", |s| {
        s.done(MetaCall::Symlink { path: path("d/l"), target: path("nowhere"), uid: 1, gid: 2 });
    }),
    ("make a pipe", |s| s.done(pipe("d/pipe"))),
    ("rename the pipe over the link", |s| s.done(rename("d/pipe", "d/l"))),
    ("make another pipe", |s| s.done(pipe("d/pipe"))),
    ("rename a file over the pipe", |s| s.done(rename("d/c", "d/pipe"))),
    ("rename it back", |s| s.done(rename("d/pipe", "d/c"))),
    ("cut d/c", |s| {
        let _ = s.set(at("d/c"), size(3));
    }),
    ("extend d/c", |s| {
        let _ = s.set(at("d/c"), size(1_000_000));
    }),
    ("cut d/a while open", |s| {
        let _ = s.set(at("d/a"), size(1));
    }),
    ("rename over the open d/a", |s| s.done(rename("d/c", "d/a"))),
    ("rename d", |s| s.done(rename("d", "g"))),
    ("remove the pipe that was renamed", |s| s.done(unlink("g/l"))),
    ("rmdir", |s| s.done(MetaCall::Rmdir { path: path("g/e") })),
    ("remove g/a", |s| s.done(unlink("g/a"))),
    ("create and remove h", |s| {
        let opened = s.create("h");
        s.write(&opened, 5, 5);
    }),
    ("remove h while open", |s| s.done(unlink("h"))),
    ("write and close i", |s| {
        let _ = s.file("i", 80_000);
    }),
    ("link i", |s| s.done(link("i", "g/j"))),
    ("write i and leave it open", |s| s.write(&s.open("i", true), 80_000, 5)),
    ("a range of i that is never written", |s| {
        let handle = s.open("i", true).handle;
        s.done(MetaCall::Append { handle, len_bytes: 1000 });
    }),
    ("link it again while open", |s| s.done(link("g/j", "k"))),
    ("remove the first name", |s| s.done(unlink("i"))),
    ("rename one name over another, which does nothing", |s| s.done(rename("k", "g/j"))),
    ("write and close l", |s| {
        let _ = s.file("l", 1);
    }),
    ("rename a file over one of two names", |s| s.done(rename("l", "k"))),
    ("rename the other name", |s| s.done(rename("g/j", "m"))),
    ("a pipe to be linked", |s| s.done(pipe("g/p"))),
    ("link the pipe", |s| s.done(link("g/p", "p"))),
    ("remove the pipe's first name", |s| s.done(unlink("g/p"))),
    ("exchange the open file and a directory", |s| s.done(exchange("m", "g"))),
    ("exchange them back", |s| s.done(exchange("m", "g"))),
    ("exchange a pipe and a file", |s| s.done(exchange("p", "k"))),
    ("write and close n", |s| {
        let _ = s.file("n", 4);
    }),
    ("leave a whiteout at n", |s| s.done(whiteout("n", "o"))),
    ("leave one of a directory", |s| s.done(whiteout("g", "h"))),
    ("rename over a whiteout", |s| s.done(rename("h", "h.2"))),
    ("replace a file and leave another", |s| s.done(whiteout("o", "k"))),
    ("remove one", |s| s.done(unlink("o"))),
    ("rename another away", |s| s.done(rename("n", "o"))),
    ("remove the last name of the open file", |s| s.done(unlink("m"))),
];

/// Waits for background work to end; panics when it was stopped.
fn idle_unless_stopped(server: &Server, count: &AtomicUsize, stop: usize) {
    let began = Instant::now();
    while !server.service.wait_idle(Duration::from_millis(20)) {
        assert!(count.load(Ordering::SeqCst) <= stop, "stopped before the end of background work");
        assert!(began.elapsed() < Duration::from_secs(20), "background work does not end");
    }
    assert!(count.load(Ordering::SeqCst) <= stop, "stopped before the end of background work");
}

/// Runs the steps until one is stopped; returns the state after each.
fn run(server: &Server, count: &AtomicUsize, stop: usize) -> Vec<BTreeMap<String, String>> {
    let mut states = vec![server.tree()];
    for (name, step) in STEPS {
        // Only acknowledged state counts; a step is over when its background work is.
        let alive = catch_unwind(AssertUnwindSafe(|| {
            step(server);
            idle_unless_stopped(server, count, stop);
        }));
        if alive.is_err() {
            return states;
        }
        let state = catch_unwind(AssertUnwindSafe(|| server.tree()));
        let Ok(state) = state else { return states };
        assert!(*name != "mkdir d" || state.len() == 1);
        states.push(state);
    }
    states
}

fn stopping(options: MetaOptions, at: usize) -> (MetaOptions, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let hook = move |step: &str| {
        if counted.fetch_add(1, Ordering::SeqCst) >= at {
            panic!("stopped before {step}");
        }
        Fate::Done
    };
    (MetaOptions { before_step: Some(Arc::new(hook)), ..options }, count)
}

/// Panics are the stops; their reports would hide the tests' own.
pub fn quiet() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = info.payload().downcast_ref::<String>().map(String::as_str);
            let text = text.or(info.payload().downcast_ref::<&str>().copied()).unwrap_or_default();
            if !["stopped before", "file system is full", "structure needs cleaning"]
                .iter()
                .any(|told| text.contains(told))
            {
                report(info);
            }
        }));
    });
}

#[test]
fn every_step_may_be_the_last() {
    quiet();
    let dir = tempfile::tempdir().unwrap();
    let (whole, count) = stopping(options(dir.path()), usize::MAX);
    let expected = {
        let server = start_with(whole, Arc::default());
        let states = run(&server, &count, usize::MAX);
        assert_eq!(states.len(), STEPS.len() + 1);
        server.hang_up();
        server.idle();
        check_directory(dir.path(), &server.objects);
        states
    };
    let total = count.load(Ordering::SeqCst);
    assert!(total > 80, "{total} steps only");
    let (mut before, mut after) = (0, 0);
    for stop in 0..total {
        let dir = tempfile::tempdir().unwrap();
        let objects = Arc::new(MemoryObjects::default());
        let (stopped, count) = stopping(options(dir.path()), stop);
        let reached = catch_unwind(AssertUnwindSafe(|| {
            let server = start_with(stopped, objects.clone());
            let states = run(&server, &count, stop);
            drop(server);
            states
        }));
        let reached = reached.unwrap_or_else(|_| vec![BTreeMap::new()]);
        let k = reached.len() - 1;
        assert_eq!(reached, expected[..=k], "until the stop before step {stop} all went as without");

        let server = start_with(options(dir.path()), objects.clone());
        let found = server.tree();
        let stopped_in = STEPS.get(k).map_or("the end", |step| step.0);
        let next = expected.get(k + 1).unwrap_or(&expected[k]);
        if found == expected[k] {
            before += 1;
        } else if found == *next {
            after += 1;
        } else {
            panic!(
                "stopped in {stopped_in} (step {stop}): found neither before nor after\nfound {found:#?}\nbefore {:#?}\nafter {next:#?}",
                expected[k]
            );
        }
        server.idle();
        assert_eq!(server.tree(), found, "recovery changes nothing that clients see");
        drop(server);
        check_directory(dir.path(), &objects);
    }
    println!("{total} stops: {before} found the state before, {after} after");
    assert!(before > 0 && after > 0);
}

/// A crash while the next start recovers from the last one.
#[test]
fn taking_up_may_be_cut_short_too() {
    quiet();
    for stop in 0..40 {
        let dir = tempfile::tempdir().unwrap();
        let objects = Arc::new(MemoryObjects::default());
        let left = {
            let server = start_with(options(dir.path()), objects.clone());
            for i in 0..3 {
                let opened = server.create(&format!("kept.{i}"));
                server.write(&opened, 0, 1000 + i);
                let opened = server.create(&format!("removed.{i}"));
                server.write(&opened, 0, 1000 + i);
                server.done(unlink(&format!("removed.{i}")));
            }
            server.tree()
        };
        let (stopped, _) = stopping(options(dir.path()), stop);
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let server = start_with(stopped, objects.clone());
            server.service.wait_idle(std::time::Duration::from_millis(200));
        }));
        let server = start_with(options(dir.path()), objects.clone());
        server.idle();
        assert_eq!(server.tree(), left, "stop {stop}");
        drop(server);
        check_directory(dir.path(), &objects);
    }
}

/// Otherwise a power failure could forget that a client had given something up, and keep what came after it.
#[test]
fn epochs_are_remembered_by_the_device_before_a_sync_is_answered() {
    let steps = Arc::new(std::sync::Mutex::new(Vec::new()));
    let noted = steps.clone();
    let dir = tempfile::tempdir().unwrap();
    impresario_server::meta::make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
    let before_step: impresario_server::meta::StepHook = Arc::new(move |step| {
        noted.lock().unwrap().push(step);
        Fate::Done
    });
    let options = MetaOptions { before_step: Some(before_step), ..MetaOptions::new(dir.path(), 1) };
    let service = impresario_server::meta::MetaService::open(options, Arc::new(MemoryObjects::default())).unwrap();
    let session = service.open_session(Who::default()).unwrap();
    let change = |epoch, sequence, name: &str| {
        let who = Who { client: ClientKey(7), epoch, since: epoch, sequence, ..Who::default() };
        service.call_from(session, who, MetaCall::Mkdir { path: path(name), mode: 0o755, uid: 0, gid: 0 });
    };
    let synced = || {
        steps.lock().unwrap().clear();
        service.call(session, MetaCall::FsyncDir { path: path("") });
        steps.lock().unwrap().clone()
    };
    assert_eq!(synced(), ["sync_changes", "sync_directory"], "what an earlier run may have left");
    change(0, 1, "d");
    assert_eq!(synced(), ["sync_directory"], "nothing was given up");
    change(1, 2, "e");
    assert_eq!(synced(), ["sync_changes", "sync_directory"]);
    change(1, 3, "f");
    assert_eq!(synced(), ["sync_directory"]);
}

/// A directory above which nothing was changed is not synced again with everything in it; whatever is changed in it is.
#[test]
fn directories_are_synced_when_they_were_changed() {
    let syncs = Arc::new(AtomicUsize::new(0));
    let counted = syncs.clone();
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        counted.fetch_add(usize::from(step == "sync_directory"), Ordering::Relaxed);
        Fate::Done
    });
    let dir = tempfile::tempdir().unwrap();
    let s = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, Arc::default());
    let synced = |call: MetaCall| {
        syncs.store(0, Ordering::Relaxed);
        s.done(call);
        syncs.load(Ordering::Relaxed)
    };
    let whole = |p: &str| synced(MetaCall::FsyncDir { path: path(p) });
    s.mkdir("d");
    s.mkdir("d/e");
    s.mkdir("d/e/f");
    assert_eq!((whole("d/e/f"), whole("d/e/f"), whole("d/e"), whole("")), (4, 0, 0, 0));
    let attributes = |p: &str, set| {
        let _ = s.set(at(p), set);
    };
    let acl = |value| MetaCall::SetXattr { target: at("d/e"), name: b"user.x".to_vec(), value, mode: XattrMode::Any };
    let made = || {
        let _ = s.create("d/e/file");
    };
    let changes: &[(&str, &dyn Fn())] = &[
        ("create", &made),
        ("mkdir", &|| s.mkdir("d/e/dir")),
        ("link", &|| s.done(link("d/e/file", "d/e/linked"))),
        ("pipe", &|| drop(s.call(pipe("d/e/pipe")))),
        ("symlink", &|| {
            let (path, target) = (path("d/e/symlink"), b"x".to_vec());
            drop(s.call(MetaCall::Symlink { path, target, uid: 0, gid: 0 }));
        }),
        ("rename", &|| s.done(rename("d/e/linked", "d/e/renamed"))),
        ("exchange", &|| s.done(exchange("d/e/renamed", "d/e/pipe"))),
        ("whiteout", &|| s.done(whiteout("d/e/renamed", "d/e/moved"))),
        ("unlink", &|| s.done(unlink("d/e/moved"))),
        ("rmdir", &|| s.done(MetaCall::Rmdir { path: path("d/e/dir") })),
        ("mode", &|| attributes("d/e", SetAttr { mode: Some(0o750), ..SetAttr::default() })),
        ("times", &|| attributes("d/e", mtime(1000))),
        ("attribute", &|| s.done(acl(Some(vec![1])))),
        ("no attribute", &|| s.done(acl(None))),
        ("striping", &|| {
            let layout = Some(LayoutRequest { pcount: Some(1), ..LayoutRequest::default() });
            s.done(MetaCall::SetLayout { path: path("d/e"), layout });
        }),
        ("no striping", &|| s.done(MetaCall::SetLayout { path: path("d/e"), layout: None })),
    ];
    for (what, change) in changes {
        change();
        assert_eq!((whole("d/e/f"), whole("d/e/f")), (1, 0), "{what}");
    }
    // Between two directories.
    s.done(rename("d/e/file", "d/file"));
    assert_eq!((whole("d/e/f"), whole("d/e/f")), (2, 0));
    // A new directory is not taken for one of the same inode number that is gone.
    for _ in 0..20 {
        s.mkdir("d/e/again");
        assert_eq!((whole("d/e/again"), whole("d/e/again")), (2, 0));
        s.done(MetaCall::Rmdir { path: path("d/e/again") });
    }
    // Syncing a file.
    let opened = s.create("d/e/f/g");
    let file = || synced(MetaCall::Fsync { handle: opened.handle });
    assert_eq!((file(), file()), (2, 0), "with what the removal above changed");
}

/// Options under which one step fails once, when `at` steps were made before it since `armed`.
fn failing(options: MetaOptions, at: usize, errno: i32) -> (MetaOptions, Arc<AtomicBool>, Arc<AtomicUsize>) {
    let (armed, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (is_armed, counted) = (armed.clone(), count.clone());
    let hook = move |_: &str| {
        let is_it = is_armed.load(Ordering::SeqCst) && counted.fetch_add(1, Ordering::SeqCst) == at;
        if is_it { Fate::Fails(errno) } else { Fate::Done }
    };
    (MetaOptions { before_step: Some(Arc::new(hook)), ..options }, armed, count)
}

/// The local file system fails one step, and works again: a call that then fails has changed nothing, and can be repeated; one
/// that is done stays done, also over a restart; and nothing is left over.
#[test]
fn every_step_may_fail() {
    quiet();
    let expected = {
        let dir = tempfile::tempdir().unwrap();
        let server = start(dir.path());
        run(&server, &AtomicUsize::new(0), usize::MAX)
    };
    let (mut stop, mut failed, mut unnoticed) = (0, 0, 0);
    loop {
        let dir = tempfile::tempdir().unwrap();
        let objects = Arc::new(MemoryObjects::default());
        let errno = if stop % 2 == 0 { libc::ENOSPC } else { libc::EUCLEAN };
        let (options_that_fail, armed, count) = failing(options(dir.path()), stop, errno);
        let server = start_with(options_that_fail, objects.clone());
        armed.store(true, Ordering::SeqCst);
        let mut fails_in = None;
        for (k, (name, step)) in STEPS.iter().enumerate() {
            let done = catch_unwind(AssertUnwindSafe(|| step(&server))).is_ok();
            server.idle();
            let now = server.tree();
            if done {
                assert_eq!(now, expected[k + 1], "after {name}, which was done, with step {stop} failing");
                continue;
            }
            assert!(fails_in.is_none(), "{name} fails, though nothing is wrong any more; step {stop} failed before");
            fails_in = Some(*name);
            assert_eq!(now, expected[k], "after {name}, which failed in step {stop}");
            step(&server);
            server.idle();
            assert_eq!(server.tree(), expected[k + 1], "{name}, repeated after step {stop} had failed");
        }
        if count.load(Ordering::SeqCst) <= stop {
            break;
        }
        match fails_in {
            Some(_) => failed += 1,
            None => unnoticed += 1,
        }
        let found = server.tree();
        server.hang_up();
        drop(server);
        let server = start_with(options(dir.path()), objects.clone());
        server.idle();
        assert_eq!(server.tree(), found, "after a restart; step {stop} had failed in {fails_in:?}");
        drop(server);
        check_directory(dir.path(), &objects);
        stop += 1;
    }
    println!("{stop} steps: {failed} failed a call, {unnoticed} did not");
    assert!(failed > 60 && unnoticed > 5, "{failed} and {unnoticed}");
}

/// Changes of a client that asks again, each once, whichever note of them fails.
#[test]
fn changes_are_done_once_whatever_note_fails() {
    quiet();
    let me = |sequence| Who { client: ClientKey(7), epoch: 1, since: 1, sequence, ..Who::default() };
    let mkdir = MetaCall::Mkdir { path: path("d"), mode: 0o755, uid: 0, gid: 0 };
    let calls = [create("x"), rename("x", "y"), unlink("y"), mkdir];
    for errno in [libc::ENOSPC, libc::EUCLEAN] {
        for stop in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let objects = Arc::new(MemoryObjects::default());
            let (options_that_fail, armed, count) = failing(options(dir.path()), stop, errno);
            let server = start_with(options_that_fail, objects.clone());
            armed.store(true, Ordering::SeqCst);
            let (mut done, mut number) = (Vec::new(), 0);
            for call in &calls {
                // Its client hears of a failure and asks again, as its next call.
                for is_again in [false, true] {
                    number += 1;
                    match server.service.call_from(server.session, me(number), call.clone()) {
                        Answer::Fault(fault) => assert!(!is_again, "{call:?} after step {stop} failed: {fault}"),
                        _ => break,
                    }
                }
                done.push((number, call));
                // What another client makes in the place of what is gone must stay.
                armed.store(false, Ordering::SeqCst);
                match call {
                    MetaCall::Rename { .. } => drop(server.file("x", 10)),
                    MetaCall::Unlink { .. } => drop(server.file("y", 10)),
                    _ => {}
                }
                armed.store(true, Ordering::SeqCst);
            }
            let is_over = count.load(Ordering::SeqCst) <= stop;
            let found = server.tree();
            assert_eq!(found.keys().collect::<Vec<_>>(), ["d", "x", "y"]);
            drop(server);
            let server = start_with(options(dir.path()), objects.clone());
            for (number, call) in done {
                // A copy that was delayed, or that comes because the answer was lost.
                server.service.call_from(server.session, me(number), call.clone());
                server.idle();
                assert_eq!(server.tree(), found, "{number} was done twice; step {stop} had failed with {errno}");
            }
            if is_over {
                assert!(stop > 10, "{stop} steps only");
                break;
            }
        }
    }
}

/// After a failed sync it is unknown what the device has: the next one must not be believed.
#[test]
fn epochs_are_written_anew_after_a_failed_sync() {
    let dir = tempfile::tempdir().unwrap();
    let steps = Arc::new(std::sync::Mutex::new((Vec::new(), "")));
    let noted = steps.clone();
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        let mut noted = noted.lock().unwrap();
        noted.0.push(step);
        if noted.1 == step { Fate::Fails(libc::EIO) } else { Fate::Done }
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, Arc::default());
    let who = |epoch| Who { client: ClientKey(7), epoch, since: epoch, sequence: u64::from(epoch), ..Who::default() };
    let begin = |epoch| {
        let call = MetaCall::Mkdir { path: path(&format!("d.{epoch}")), mode: 0o755, uid: 0, gid: 0 };
        server.service.call_from(server.session, who(epoch), call)
    };
    let sync = || {
        steps.lock().unwrap().0.clear();
        let answer = server.call(MetaCall::FsyncDir { path: path("") });
        (matches!(answer, Answer::Done), steps.lock().unwrap().0.clone())
    };
    let anew = ["prepare_changes", "sync_new_changes", "replace_changes", "sync_place_of_changes", "sync_directory"];
    for (epoch, fails) in (1..).zip(&anew[..4]) {
        begin(epoch);
        steps.lock().unwrap().1 = "sync_changes";
        assert_eq!(sync(), (false, vec!["sync_changes"]));
        steps.lock().unwrap().1 = *fails;
        let (is_done, tried) = sync();
        assert!(!is_done && anew.starts_with(&tried), "{tried:?}");
        steps.lock().unwrap().1 = "";
        assert_eq!(sync(), (true, anew.to_vec()), "after {fails} had failed");
        assert_eq!(sync(), (true, vec![]), "all of it is durable");
    }
}
