//! Changes of names are done once, wherever the server is killed while it notes or does them, and whoever has the name next.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::meta_crash::quiet;
use crate::meta_support::*;
use impresario_server::meta::{Fate, MemoryObjects, MetaOptions};
use impresario_wire::message::*;

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
