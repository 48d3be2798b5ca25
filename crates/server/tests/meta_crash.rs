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
fn quiet() {
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
        assert_eq!(sync(), (true, vec!["sync_directory"]));
    }
}

/// A change is noted before it is done and afterwards, and one that fails before it changes anything is not noted.
#[test]
fn only_what_changes_something_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Arc::new(AtomicUsize::new(0));
    let noted = notes.clone();
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        noted.fetch_add(usize::from(step == "append_change"), Ordering::SeqCst);
        Fate::Done
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, Arc::default());
    let sequence = AtomicUsize::new(0);
    let does = |call: MetaCall| {
        let sequence = 1 + sequence.fetch_add(1, Ordering::SeqCst) as u64;
        let who = Who { client: ClientKey(7), sequence, ..Who::default() };
        let before = notes.load(Ordering::SeqCst);
        let is_done = !matches!(server.service.call_from(server.session, who, call), Answer::Fault(_));
        (is_done, notes.load(Ordering::SeqCst) - before)
    };
    let mkdir = |p: &str| MetaCall::Mkdir { path: path(p), mode: 0o755, uid: 0, gid: 0 };
    let rmdir = |p: &str| MetaCall::Rmdir { path: path(p) };
    let symlink = |p: &str| MetaCall::Symlink { path: path(p), target: b"t".to_vec(), uid: 0, gid: 0 };
    let keep =
        |from: &str, to: &str| MetaCall::Rename { from: path(from), to: path(to), no_replace: true, whiteout: false };
    let changes = || {
        let made = [mkdir("d"), create("d/f"), link("d/f", "g"), symlink("s"), pipe("p"), keep("d/f", "d/h")];
        let gone =
            [exchange("g", "s"), exchange("g", "g"), unlink("s"), unlink("g"), unlink("p"), unlink("d/h"), rmdir("d")];
        made.into_iter().chain(gone)
    };
    for call in changes() {
        assert_eq!(does(call.clone()), (true, 2), "{call:?}");
    }
    let there = || [mkdir("d"), create("f"), symlink("s"), pipe("p")].into_iter();
    for call in there() {
        assert_eq!(does(call.clone()), (true, 2), "{call:?}");
    }
    let absent = [unlink("x"), unlink("x/y"), rmdir("x"), rename("x", "z"), link("x", "z"), exchange("x", "d")];
    let wrong = [unlink("d"), link("f", "s"), exchange("d", "x"), mkdir("x/y"), create("f/y")];
    for call in there().chain(absent).chain(wrong) {
        assert_eq!(does(call.clone()), (false, 0), "{call:?}");
    }
    // What only the file system below refuses was noted.
    for call in [rmdir("f"), keep("f", "s"), link("d", "z")] {
        assert_eq!(does(call.clone()), (false, 2), "{call:?}");
    }
}

/// The file of changes is written anew while a change is served that is not noted yet: it is none that had begun.
#[test]
fn a_change_that_is_not_noted_yet_is_not_taken_for_one_that_had_begun() {
    let dir = tempfile::tempdir().unwrap();
    let (objects, fails) = (Arc::new(MemoryObjects::default()), Arc::new(AtomicBool::new(false)));
    let failing = fails.clone();
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| match step {
        "sync_changes" if failing.swap(false, Ordering::SeqCst) => Fate::Fails(libc::EIO),
        _ => Fate::Done,
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, objects.clone());
    let _written = server.create("f");
    server.file("taken", 1);
    let who = |client, epoch| Who { client: ClientKey(client), epoch, since: epoch, sequence: 1, ..Who::default() };
    let call = |server: &Server, who, call| server.service.call_from(server.session, who, call);
    let sync = || server.call(MetaCall::FsyncDir { path: path("") });
    let noted = dir.path().join("changes");
    let killed = std::thread::scope(|scope| {
        // It asks the data servers before it looks at the name that it is to make.
        objects.hold(true);
        let before = objects.calls();
        let first = scope.spawn(|| call(&server, who(7, 0), link("f", "taken")));
        impresario_testing::until("it asks the data servers", || objects.calls() > before);
        call(&server, who(8, 1), create("g"));
        fails.store(true, Ordering::SeqCst);
        assert!(matches!(sync(), Answer::Fault(_)));
        assert_eq!(sync(), Answer::Done, "the file was written anew");
        let killed = std::fs::read(&noted).unwrap();
        objects.hold(false);
        assert!(matches!(first.join().unwrap(), Answer::Fault(Fault { errno: libc::EEXIST, .. })));
        killed
    });
    drop(server);
    std::fs::write(&noted, killed).unwrap();
    let server = start_with(options(dir.path()), objects);
    let again = call(&server, Who { since: 0, ..who(7, 1) }, link("f", "taken"));
    assert!(matches!(again, Answer::Fault(Fault { errno: libc::EEXIST, .. })), "{again:?}");
}

/// A descriptor is told once that its file has lost something: a sync that began before another one has failed must not believe
/// that it has not.
#[test]
fn the_file_of_changes_is_synced_by_one_thread_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let (syncs, has_overlapped) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (is_watched, is_inside) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(false));
    let (begun, overlapped, watched) = (syncs.clone(), has_overlapped.clone(), is_watched.clone());
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        if step != "sync_changes" || !watched.load(Ordering::SeqCst) {
            return Fate::Done;
        }
        if begun.fetch_add(1, Ordering::SeqCst) > 0 {
            // The kernel has told the first one, and says nothing to this one.
            overlapped.fetch_or(is_inside.load(Ordering::SeqCst), Ordering::SeqCst);
            return Fate::Done;
        }
        is_inside.store(true, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(500));
        is_inside.store(false, Ordering::SeqCst);
        Fate::Fails(libc::EIO)
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, Arc::default());
    let who = |client, epoch| Who { client: ClientKey(client), epoch, since: epoch, sequence: 1, ..Who::default() };
    ["a", "b"].into_iter().for_each(|name| server.mkdir(name));
    // An epoch to be made durable.
    let mkdir = MetaCall::Mkdir { path: path("c"), mode: 0o755, uid: 0, gid: 0 };
    server.service.call_from(server.session, who(7, 4), mkdir);
    is_watched.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let exchange = MetaCall::Exchange { from: path("a"), to: path("b") };
        let first = scope.spawn(|| server.service.call_from(server.session, who(8, 0), exchange));
        impresario_testing::until("the first sync", || syncs.load(Ordering::SeqCst) > 0);
        server.done(MetaCall::FsyncDir { path: path("") });
        assert!(matches!(first.join().unwrap(), Answer::Fault(_)));
    });
    assert!(!has_overlapped.load(Ordering::SeqCst), "the second has believed a descriptor that had lost something");
}

/// The connection on which a create came ends while it is done: its client asks again on another, and gets the file.
#[test]
fn a_create_whose_connection_ends_meanwhile_is_done_once() {
    let dir = tempfile::tempdir().unwrap();
    let ending: Arc<
        std::sync::OnceLock<(Arc<impresario_server::meta::MetaService>, impresario_server::meta::SessionId)>,
    > = Arc::default();
    let here = ending.clone();
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        if step == "link"
            && let Some((service, session)) = here.get()
        {
            service.close_session(*session);
        }
        Fate::Done
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, Arc::default());
    let lost = server.again();
    assert!(ending.set((server.service.clone(), lost.session)).is_ok());
    let who = |epoch| Who { client: ClientKey(7), epoch, since: 0, sequence: 1, ..Who::default() };
    lost.service.call_from(lost.session, who(0), create("f"));
    match server.service.call_from(server.session, who(1), create("f")) {
        Answer::Opened(opened) => server.close(opened),
        other => panic!("{other:?}"),
    }
    server.idle();
    check_directory(dir.path(), &server.objects);
}

/// Serves a change of client 7 by a server that is killed before it is done, or before it has noted that it was.
fn interrupted(dir: &std::path::Path, objects: &Arc<MemoryObjects>, call: &MetaCall, is_done: bool) {
    interrupted_by(dir, objects, |_| call.clone(), is_done);
}

/// The same of a change of something that the server was asked for before.
fn interrupted_by(
    dir: &std::path::Path,
    objects: &Arc<MemoryObjects>,
    call: impl FnOnce(&Server) -> MetaCall,
    is_done: bool,
) {
    let (is_armed, notes, is_dead) = (Arc::new(AtomicBool::new(false)), AtomicUsize::new(0), AtomicBool::new(false));
    let armed = is_armed.clone();
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        if !armed.load(Ordering::SeqCst) {
            return Fate::Done;
        }
        // The first note says that it begins.
        let is_note = step == "append_change";
        let before = if is_note { notes.fetch_add(1, Ordering::SeqCst) } else { notes.load(Ordering::SeqCst) };
        let dies = if is_note { before > 0 } else { before > 0 && !is_done };
        is_dead.fetch_or(dies, Ordering::SeqCst);
        if is_dead.load(Ordering::SeqCst) { Fate::Fails(libc::EIO) } else { Fate::Done }
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir) }, objects.clone());
    let call = call(&server);
    is_armed.store(true, Ordering::SeqCst);
    server.service.call_from(server.session, asked(0), call);
}

fn asked(epoch: u32) -> Who {
    Who { client: ClientKey(7), epoch, since: 0, sequence: 1, ..Who::default() }
}

/// The name `a` is removed, and the name `n` made, by a client whose server is killed; its names are changed by others, or not,
/// before it asks again.
#[test]
fn a_change_that_was_interrupted_is_done_once_or_fails() {
    const ENOENT: i32 = 2;
    for (is_done, others) in [(false, false), (false, true), (true, false), (true, true)] {
        for call in [unlink("a"), create("n"), link("a", "n"), rename("a", "n"), whiteout("a", "n")] {
            let dir = tempfile::tempdir().unwrap();
            let objects = Arc::new(MemoryObjects::default());
            let case = format!("{call:?}, is_done {is_done}, others {others}");
            start_with(options(dir.path()), objects.clone()).file("a", 1);
            interrupted(dir.path(), &objects, &call, is_done);
            let server = start_with(options(dir.path()), objects.clone());
            let other = |name: &str, sequence: u64| {
                let who = |sequence| Who { client: ClientKey(8), sequence, ..Who::default() };
                server.service.call_from(server.session, who(sequence), unlink(name));
                match server.service.call_from(server.session, who(sequence + 1), create(name)) {
                    Answer::Opened(opened) => opened.file,
                    answer => panic!("{case}: {answer:?}"),
                }
            };
            let made = others.then(|| [other("a", 1), other("n", 3)]);
            let answer = server.service.call_from(server.session, asked(1), call.clone());
            let again = server.service.call_from(server.session, asked(2), call.clone());
            assert_eq!(std::mem::discriminant(&answer), std::mem::discriminant(&again), "{case}");
            match made {
                Some(made) => {
                    assert!(matches!(answer, Answer::Fault(Fault { errno: libc::EIO, .. })), "{case}: {answer:?}");
                    assert_eq!(["a", "n"].map(|name| server.open(name, false).file), made, "{case}");
                }
                None => {
                    assert!(!matches!(answer, Answer::Fault(_)), "{case}: {answer:?}");
                    let names: &[&str] = match call {
                        MetaCall::Unlink { .. } => &[],
                        MetaCall::Rename { whiteout: false, .. } => &["n"],
                        _ => &["a", "n"],
                    };
                    assert_eq!(server.names(""), names, "{case}");
                }
            }
        }
        // What could not be done fails as it would have.
        let untag = set_xattr("a", "user.x", None);
        let failing =
            [(unlink("x"), ENOENT), (rename("x", "n"), ENOENT), (create("a"), libc::EEXIST), (untag, libc::ENODATA)];
        for (call, errno) in failing {
            let dir = tempfile::tempdir().unwrap();
            let objects = Arc::new(MemoryObjects::default());
            start_with(options(dir.path()), objects.clone()).file("a", 1);
            interrupted(dir.path(), &objects, &call, is_done);
            let server = start_with(options(dir.path()), objects);
            match server.service.call_from(server.session, asked(1), call.clone()) {
                Answer::Fault(fault) => assert_eq!(fault.errno, errno, "{call:?}"),
                answer => panic!("{call:?}: {answer:?}"),
            }
        }
    }
}

/// Of a change that was begun two runs ago nobody knows what others have done to its names since.
#[test]
fn a_change_that_was_interrupted_is_not_judged_after_another_restart() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(MemoryObjects::default());
    start_with(options(dir.path()), objects.clone()).file("a", 1);
    interrupted(dir.path(), &objects, &unlink("a"), true);
    drop(start_with(options(dir.path()), objects.clone()));
    let server = start_with(options(dir.path()), objects);
    let answer = server.service.call_from(server.session, asked(1), unlink("a"));
    assert!(matches!(answer, Answer::Fault(Fault { errno: libc::EIO, .. })), "{answer:?}");
}

/// The end of a change that an earlier run had begun panics, which the server outlives: nothing waits for it for ever.
#[test]
fn a_change_whose_end_panics_holds_up_no_other() {
    quiet();
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(MemoryObjects::default());
    start_with(options(dir.path()), objects.clone()).file("a", 1);
    interrupted(dir.path(), &objects, &unlink("a"), false);
    let panics = Arc::new(AtomicBool::new(false));
    let armed = panics.clone();
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        assert!(!armed.swap(false, Ordering::SeqCst), "stopped before {step}");
        Fate::Done
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, objects);
    // The new epoch is noted, and no step before the end is made by then.
    let look = Who { sequence: 3, ..asked(1) };
    server.service.call_from(server.session, look, MetaCall::GetAttr { target: at("a") });
    panics.store(true, Ordering::SeqCst);
    let end = || server.service.call_from(server.session, asked(1), unlink("a"));
    assert!(catch_unwind(AssertUnwindSafe(end)).is_err());
    let next = Who { client: ClientKey(7), epoch: 2, since: 2, sequence: 2, ..Who::default() };
    let answer = server.service.call_from(server.session, next, pipe("p"));
    assert!(!matches!(answer, Answer::Fault(_)), "{answer:?}");
}

/// A change was done, its answer is lost, and what it made is gone: it does not fail as if it had not been done.
#[test]
fn a_change_that_was_done_does_not_fail_for_what_came_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let objects = Arc::new(MemoryObjects::default());
    let mkdir = MetaCall::Mkdir { path: path("d"), mode: 0o755, uid: 0, gid: 0 };
    let server = start_with(options(dir.path()), objects.clone());
    server.service.call_from(server.session, asked(0), mkdir.clone());
    drop(server);
    let server = start_with(options(dir.path()), objects);
    server.done(MetaCall::Rmdir { path: path("d") });
    let answer = server.service.call_from(server.session, asked(1), mkdir);
    assert!(matches!(answer, Answer::Fault(Fault { errno: libc::EIO, .. })), "{answer:?}");
}

/// What another call does at a step of a change, and what comes of both when the server is killed right after that.
struct Race {
    /// Of the change, after a restart.
    mine: Answer,
    other: Answer,
    left: Server,
}

/// Waits until a thread is served, which says so, and gives true; or until it waits for what does not come: each look finds it asleep.
fn is_served(thread: i32, served: &std::sync::mpsc::Receiver<()>) -> bool {
    let mut asleep = 0;
    impresario_testing::eventually("it is served or waits", || {
        if served.recv_timeout(Duration::from_millis(5)).is_ok() {
            return Some(true);
        }
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
        let is_asleep = stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'));
        asleep = if is_asleep { asleep + 1 } else { 0 };
        (asleep >= 20).then_some(false)
    })
}

/// Serves a change of client 7. When it makes `step` for the `nth` time, `other` is served on another thread; where that does not
/// have to wait for the change, the server is killed when it has been: nothing of it reaches the disk any more.
fn raced(dir: &std::path::Path, mine: &MetaCall, (step, nth): (&str, usize), other: MetaCall) -> Race {
    let objects = Arc::new(MemoryObjects::default());
    type Served = std::thread::JoinHandle<Answer>;
    let (at, served) = (step.to_string(), Arc::<std::sync::Mutex<Option<Served>>>::default());
    type Here = (std::sync::Weak<impresario_server::meta::MetaService>, std::thread::ThreadId);
    let here: Arc<std::sync::OnceLock<Here>> = Arc::default();
    let (is_dead, count) = (Arc::new(AtomicBool::new(false)), AtomicUsize::new(0));
    let (mine_is, dead, serving) = (here.clone(), is_dead.clone(), served.clone());
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        if dead.load(Ordering::SeqCst) {
            return Fate::Fails(libc::EIO);
        }
        let is_mine = |(_, thread): &&Here| *thread == std::thread::current().id();
        let Some(service) = mine_is.get().filter(is_mine).and_then(|(service, _)| service.upgrade()) else {
            return Fate::Done;
        };
        if step == at && count.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            let other = other.clone();
            let (tells, thread) = std::sync::mpsc::channel();
            let (says, served) = std::sync::mpsc::channel();
            *serving.lock().unwrap() = Some(std::thread::spawn(move || {
                let _ = tells.send(rustix::thread::gettid().as_raw_nonzero().get());
                let session = service.open_session(Who::default()).unwrap();
                let answer = service.call(session, other);
                let _ = says.send(()); // nobody waits for it any more
                answer
            }));
            dead.fetch_or(is_served(thread.recv().unwrap(), &served), Ordering::SeqCst);
        }
        if dead.load(Ordering::SeqCst) { Fate::Fails(libc::EIO) } else { Fate::Done }
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir) }, objects.clone());
    server.file("a", 1);
    ["d", "full", "full/e"].into_iter().for_each(|name| server.mkdir(name));
    assert!(here.set((Arc::downgrade(&server.service), std::thread::current().id())).is_ok());
    server.service.call_from(server.session, asked(0), mine.clone());
    let other = served.lock().unwrap().take().expect("the step was made").join().unwrap();
    is_dead.store(true, Ordering::SeqCst);
    drop(server);
    let left = start_with(options(dir), objects);
    let mine = left.service.call_from(left.session, asked(1), mine.clone());
    Race { mine, other, left }
}

/// A name is made by another client while one that makes it, too, has noted that it begins: after a restart it gets no file of the
/// other's for its own.
#[test]
fn only_one_of_two_makes_a_name_although_the_server_is_killed() {
    let mkdir = || MetaCall::Mkdir { path: path("n"), mode: 0o755, uid: 0, gid: 0 };
    let symlink = MetaCall::Symlink { path: path("n"), target: b"t".to_vec(), uid: 0, gid: 0 };
    let mut wrong = Vec::new();
    for (mine, step) in [
        (create("n"), "link"),
        (mkdir(), "rename"),
        (symlink, "rename"),
        (pipe("n"), "rename"),
        (link("a", "n"), "link"),
    ] {
        for other in [create("n"), mkdir()] {
            let dir = tempfile::tempdir().unwrap();
            let raced = raced(dir.path(), &mine, (step, 1), other.clone());
            let fails =
                |answer: &Answer| matches!(answer, Answer::Fault(Fault { errno: libc::EEXIST | libc::EIO, .. }));
            if fails(&raced.mine) == fails(&raced.other) {
                wrong.push(format!("{mine:?}: {:?}; {other:?}: {:?}", raced.mine, raced.other));
            }
            if let Answer::Opened(made) = raced.other {
                assert_eq!(raced.left.open("n", false).file, made.file, "{mine:?}");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A change is done, and what another client does to its name then is answered: a kill that comes before it is noted that the first
/// was done must not have it done again.
#[test]
fn no_change_that_others_have_built_on_is_done_again() {
    let mkdir = |p: &str| MetaCall::Mkdir { path: path(p), mode: 0o755, uid: 0, gid: 0 };
    let rmdir = |p: &str| MetaCall::Rmdir { path: path(p) };
    let symlink = || MetaCall::Symlink { path: path("n"), target: b"t".to_vec(), uid: 0, gid: 0 };
    let pairs = [
        (mkdir("n"), rmdir("n")),
        (create("n"), unlink("n")),
        (symlink(), unlink("n")),
        (pipe("n"), unlink("n")),
        (link("a", "n"), unlink("n")),
        (link("a", "n"), rename("n", "m")),
        // The file system may give what is made the number of what was removed.
        (rmdir("d"), mkdir("d")),
        (rmdir("d"), create("d")),
        (unlink("a"), create("a")),
        (rename("a", "n"), create("a")),
        (rename("a", "n"), unlink("n")),
    ];
    let mut wrong = Vec::new();
    for (mine, other) in pairs {
        let dir = tempfile::tempdir().unwrap();
        let raced = raced(dir.path(), &mine, ("append_change", 2), other.clone());
        assert!(!matches!(raced.other, Answer::Fault(_)), "{mine:?}, {other:?}: {:?}", raced.other);
        let names = raced.left.names("");
        let has = |name: &str| names.iter().any(|there| there == name);
        let is_kept = match &other {
            MetaCall::Rmdir { path } | MetaCall::Unlink { path } => !has(&String::from_utf8_lossy(path)),
            MetaCall::Mkdir { path, .. } | MetaCall::Create { path, .. } => has(&String::from_utf8_lossy(path)),
            _ => has("m") && !has("n"),
        };
        if !is_kept {
            wrong.push(format!("{mine:?} undid {other:?}: {names:?}, {:?}", raced.mine));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The same of what is taken away, and of what fails: others get no chance at the name before it is noted what became of it.
#[test]
fn a_change_is_over_and_noted_before_another_has_its_name() {
    let rmdir = || MetaCall::Rmdir { path: path("d") };
    let dir = tempfile::tempdir().unwrap();
    let both = raced(dir.path(), &rmdir(), ("remove_dir", 1), rmdir());
    let is_done = |answer: &Answer| matches!(answer, Answer::Done);
    assert!(is_done(&both.mine) != is_done(&both.other), "{:?}, {:?}", both.mine, both.other);
    // It is not empty, so the directory stays where it is, until the other takes it away.
    let dir = tempfile::tempdir().unwrap();
    let failed = raced(dir.path(), &rename("d", "full"), ("append_change", 2), rename("d", "elsewhere"));
    assert!(is_done(&failed.other), "{:?}", failed.other);
    assert!(matches!(failed.mine, Answer::Fault(_)), "{:?}", failed.mine);
}

/// The same of extended attributes: one waits for the other, and finds what that one has made.
#[test]
fn only_one_of_two_creates_an_attribute_although_the_server_is_killed() {
    let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
    let (sets, is_dead) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (setting, dead) = (sets.clone(), is_dead.clone());
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        if dead.load(Ordering::SeqCst) {
            return Fate::Fails(libc::EIO);
        }
        match (step == "set_xattr").then(|| setting.fetch_add(1, Ordering::SeqCst)) {
            // Time for the second to begin.
            Some(0) => std::thread::sleep(Duration::from_millis(500)),
            Some(1) => {
                dead.store(true, Ordering::SeqCst);
                return Fate::Fails(libc::EIO);
            }
            _ => {}
        }
        Fate::Done
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, objects.clone());
    server.file("a", 1);
    let set = |value: &str| {
        let (target, name, value) = (at("a"), path("user.x"), Some(path(value)));
        MetaCall::SetXattr { target, name, value, mode: XattrMode::Create }
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| server.call(set("first")));
        impresario_testing::until("the first is about to set it", || sets.load(Ordering::SeqCst) > 0);
        server.service.call_from(server.session, asked(0), set("second"));
        assert_eq!(first.join().unwrap(), Answer::Done);
    });
    is_dead.store(true, Ordering::SeqCst);
    drop(server);
    let server = start_with(options(dir.path()), objects);
    let second = server.service.call_from(server.session, asked(1), set("second"));
    assert!(matches!(second, Answer::Fault(Fault { errno: libc::EEXIST, .. })), "{second:?}");
    assert_eq!(server.xattr(at("a"), "user.x"), Ok(path("first")));
}

/// An attribute is made, replaced or removed, of an open file too, by a client whose server is killed in the middle or right after it: its
/// copy succeeds, unless others have touched the file's attributes since.
#[test]
fn a_change_of_an_attribute_that_was_interrupted_is_done_once_or_fails() {
    let changes = [("user.new", Some("v"), XattrMode::Create), ("user.old", Some("v"), XattrMode::Replace)];
    for (name, value, mode) in changes.into_iter().chain([("user.old", None, XattrMode::Any)]) {
        for (is_done, by_handle, others) in (0..8).map(|n| (n & 1 > 0, n & 2 > 0, n & 4 > 0)) {
            let case = format!("{name} {mode:?}, is_done {is_done}, by_handle {by_handle}, others {others}");
            let dir = tempfile::tempdir().unwrap();
            let objects = Arc::new(MemoryObjects::default());
            let call = |server: &Server| {
                let target = if by_handle { Target::Handle(server.open("a", false).handle) } else { at("a") };
                MetaCall::SetXattr { target, name: path(name), value: value.map(path), mode }
            };
            let server = start_with(options(dir.path()), objects.clone());
            server.file("a", 1);
            server.done(set_xattr("a", "user.old", Some("")));
            drop(server);
            interrupted_by(dir.path(), &objects, call, is_done);
            let server = start_with(options(dir.path()), objects);
            if others {
                let who = Who { client: ClientKey(8), sequence: 1, ..Who::default() };
                let target = Target::Handle(server.open("a", false).handle);
                let (name, value) = (path(name), value.map_or(Some(path("other")), |_| None));
                let set = MetaCall::SetXattr { target, name, value, mode: XattrMode::Any };
                server.service.call_from(server.session, who, set);
            }
            match server.service.call_from(server.session, asked(1), call(&server)) {
                Answer::Fault(fault) => assert!(others && fault.errno == libc::EIO, "{case}: {fault}"),
                answer => {
                    assert!(answer == Answer::Done && !others, "{case}: {answer:?}");
                    let now = server.xattr(at("a"), name);
                    assert_eq!(now, value.map(path).ok_or(libc::ENODATA), "{case}");
                }
            }
        }
    }
}

/// Two give the same file the same other name: one waits for the other, and looks again.
#[test]
fn only_one_of_two_links_a_file_although_the_server_is_killed() {
    let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
    let (links, is_dead) = (Arc::new(AtomicUsize::new(usize::MAX / 2)), Arc::new(AtomicBool::new(false)));
    let (linking, dead) = (links.clone(), is_dead.clone());
    let hook: impresario_server::meta::StepHook = Arc::new(move |step| {
        if dead.load(Ordering::SeqCst) {
            return Fate::Fails(libc::EIO);
        }
        match (step == "link").then(|| linking.fetch_add(1, Ordering::SeqCst)) {
            // Time for the second to look whether the name is there.
            Some(0) => std::thread::sleep(Duration::from_millis(500)),
            Some(1) => dead.store(true, Ordering::SeqCst),
            _ => {}
        }
        Fate::Done
    });
    let server = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, objects.clone());
    server.file("a", 1);
    links.store(0, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| server.call(link("a", "n")));
        impresario_testing::until("the first is about to link it", || links.load(Ordering::SeqCst) > 0);
        server.service.call_from(server.session, asked(0), link("a", "n"));
        assert!(!matches!(first.join().unwrap(), Answer::Fault(_)));
    });
    is_dead.store(true, Ordering::SeqCst);
    drop(server);
    let server = start_with(options(dir.path()), objects);
    let mine = server.service.call_from(server.session, asked(1), link("a", "n"));
    assert!(matches!(mine, Answer::Fault(Fault { errno: libc::EEXIST | libc::EIO, .. })), "{mine:?}");
}
