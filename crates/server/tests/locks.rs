//! Locks of byte ranges at the metadata server: leases, the fencing of clients that are gone, and restarts.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::meta_support::*;
use impresario_server::meta::{Fate, MemoryObjects, MetaOptions, StepHook};
use impresario_testing::until;
use impresario_wire::message::*;
use impresario_wire::{FileLock, LockAnswer, LockCall, LockSaid, LockWish};

const LEASE: Duration = Duration::from_millis(1000);
const FILE: FileKey = FileKey(77);
const LOCK: FileLock = FileLock { owner: 1, pid: 2, start: 0, end: 9, exclusive: true };

fn start_leases(dir: &Path, objects: &Arc<MemoryObjects>) -> Server {
    start_with(MetaOptions { lock_lease: LEASE, ..options(dir) }, objects.clone())
}

fn who(client: u64, epoch: u32, sequence: u64) -> Who {
    Who { client: ClientKey(client), epoch, since: epoch, sequence, ..Who::default() }
}

fn ask(s: &Server, client: u64, lease: u64, wish: LockWish) -> LockAnswer {
    let call = |epoch| {
        let call = MetaCall::Lock(LockCall { lease, wish: wish.clone() });
        s.service.call_from(s.session, who(client, epoch, 1), call)
    };
    match call(3) {
        Answer::Lock(answer) => answer,
        // As a client does that was fenced.
        Answer::Fault(Fault { errno: Fault::FENCED, .. }) => match call(1 << 20) {
            Answer::Lock(answer) => answer,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

fn set(wait: bool) -> LockWish {
    LockWish::Set { file: FILE, lock: LOCK, wait }
}

fn renew() -> LockWish {
    LockWish::Renew { whole: false }
}

fn restore() -> LockWish {
    LockWish::Restore { file: FILE, owner: 1, locks: vec![LOCK] }
}

/// Takes the lock under a new lease; its number.
#[track_caller]
fn granted(s: &Server, client: u64) -> u64 {
    let answer = ask(s, client, 0, set(false));
    assert!(matches!(answer.said, LockSaid::Granted { .. }), "{answer:?}");
    assert!(answer.lease != 0 && u128::from(answer.lease_ms) == LEASE.as_millis());
    answer.lease
}

/// Asks, and renews the lease by it, until the lock is granted.
#[track_caller]
fn gets_it(s: &Server, client: u64, mut lease: u64) -> Duration {
    let began = Instant::now();
    loop {
        let answer = ask(s, client, lease, set(true));
        if matches!(answer.said, LockSaid::Granted { .. }) {
            return began.elapsed();
        }
        assert!(matches!(answer.said, LockSaid::Waiting | LockSaid::Later), "{answer:?}");
        assert!(began.elapsed() < Duration::from_secs(20), "{answer:?}");
        lease = answer.lease;
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn records(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("lockers")).unwrap().count()
}

#[test]
fn locks_of_a_client_that_is_gone_go_to_others_when_it_is_fenced() {
    let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
    let s = start_leases(dir.path(), &objects);
    let opened = s.file("f", 100);
    let lease = granted(&s, 7);
    let waiter = ask(&s, 8, 0, set(true));
    assert_eq!((waiter.said, records(dir.path())), (LockSaid::Waiting, 2));
    objects.set_away(true);
    let began = Instant::now();
    while began.elapsed() < 3 * LEASE {
        assert_eq!(ask(&s, 8, waiter.lease, set(true)).said, LockSaid::Waiting, "it may still write");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(ask(&s, 7, lease, renew()).said, LockSaid::Lost, "too late");
    objects.set_away(false);
    gets_it(&s, 8, waiter.lease);
    assert_eq!(ask(&s, 7, lease, restore()).said, LockSaid::Lost);
    assert_eq!(records(dir.path()), 1);
    // What it had sent before, and what it sends again without a newer epoch.
    let set_len = SetAttr { size: Some(0), ..SetAttr::default() };
    let cut = MetaCall::SetAttr { target: at("f"), set: set_len };
    let answer = s.service.call_from(s.session, who(7, 3, 9), cut);
    assert!(matches!(answer, Answer::Fault(Fault { errno: Fault::FENCED, .. })), "{answer:?}");
    assert_eq!((s.stat("f").size, s.stat("f").ino), (100, opened.attr.ino));
}

#[test]
fn a_client_that_renews_keeps_its_locks_and_one_without_locks_is_not_fenced() {
    let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
    let s = start_leases(dir.path(), &objects);
    let lease = granted(&s, 7);
    let began = Instant::now();
    while began.elapsed() < 3 * LEASE {
        assert_eq!(ask(&s, 7, lease, renew()).said, LockSaid::Done);
        std::thread::sleep(LEASE / 10);
    }
    assert!(matches!(ask(&s, 8, 0, set(false)).said, LockSaid::Held { own: false, lock: LOCK }));
    assert_eq!(ask(&s, 7, lease, LockWish::Unlock { file: FILE, owner: 1, start: 0, end: 9 }).said, LockSaid::Done);
    let calls = objects.calls();
    until("a lease without locks ends", || records(dir.path()) == 0);
    assert_eq!(objects.calls(), calls, "data servers were not asked");
    let lease = granted(&s, 7);
    assert_eq!(ask(&s, 7, lease, LockWish::End).lease, 0);
    assert_eq!(records(dir.path()), 0);
    let lease = granted(&s, 8);
    // A client that has forgotten its lease has no locks either.
    assert_ne!(granted(&s, 8), lease);
    let unknown = LockCall { lease: 0, wish: set(false) };
    let nobody = s.service.call_from(s.session, Who::default(), MetaCall::Lock(unknown));
    assert!(matches!(nobody, Answer::Fault(Fault { errno: libc::EINVAL, .. })), "{nobody:?}");
    let backwards = LockWish::Test { file: FILE, lock: FileLock { start: 5, end: 4, ..LOCK } };
    let backwards =
        s.service.call_from(s.session, who(9, 0, 1), MetaCall::Lock(LockCall { lease: 0, wish: backwards }));
    assert!(matches!(backwards, Answer::Fault(Fault { errno: libc::EINVAL, .. })), "{backwards:?}");
}

#[test]
fn after_a_restart_clients_restore_their_locks_before_others_get_any() {
    let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
    let s = start_leases(dir.path(), &objects);
    let lease = granted(&s, 7);
    drop(s);
    let s = start_leases(dir.path(), &objects);
    assert_eq!(ask(&s, 8, 0, set(true)).said, LockSaid::Later);
    assert_eq!(ask(&s, 7, lease, renew()).said, LockSaid::Restore);
    assert_eq!(ask(&s, 7, lease, restore()).said, LockSaid::Done);
    assert_eq!(ask(&s, 7, lease, LockWish::Renew { whole: true }).said, LockSaid::Done);
    assert!(matches!(ask(&s, 8, 0, set(false)).said, LockSaid::Held { .. }));
    drop(s);
    // It does not come back: it is fenced, and what it held is free.
    let s = start_leases(dir.path(), &objects);
    let before = objects.calls();
    let waited = gets_it(&s, 9, 0);
    assert!(waited >= LEASE / 2 && objects.calls() > before, "{waited:?}");
    assert_eq!(ask(&s, 7, lease, restore()).said, LockSaid::Lost);
    drop(s);
    // The next run knows that its lease is over.
    let s = start_leases(dir.path(), &objects);
    assert_eq!(ask(&s, 7, lease, restore()).said, LockSaid::Lost);
}

/// What it had asked the metadata server for before its lease ended, and what is still being done: whoever gets its lock next, to roll
/// back a journal for example, must not lose the journal to it.
#[test]
fn a_lock_goes_to_others_only_when_the_changes_of_its_holder_have_ended() {
    let given_early = [false, true].map(|is_begun_before| {
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::new(MemoryObjects::default()));
        let unlink = |s: &Server, epoch| {
            let who = Who { since: 0, ..who(7, epoch, 9) };
            s.service.call_from(s.session, who, unlink("journal"))
        };
        // One that this server has begun, or that it ends for an earlier run.
        start_with(options(dir.path()), objects.clone()).file("journal", 100);
        if is_begun_before {
            let notes = AtomicUsize::new(0);
            let hook: StepHook = Arc::new(move |step| {
                let note = usize::from(step == "append_change");
                if notes.fetch_add(note, Ordering::SeqCst) > 0 { Fate::Fails(libc::EIO) } else { Fate::Done }
            });
            let killed = start_with(MetaOptions { before_step: Some(hook), ..options(dir.path()) }, objects.clone());
            unlink(&killed, 0);
        }
        let (is_held, is_reached) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (held, reached) = (is_held.clone(), is_reached.clone());
        let hook: StepHook = Arc::new(move |step| {
            let (began, is_it) = (Instant::now(), step == "rename" && held.load(Ordering::SeqCst));
            reached.fetch_or(is_it, Ordering::SeqCst);
            while is_it && held.load(Ordering::SeqCst) && began.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Fate::Done
        });
        let slow = MetaOptions { lock_lease: LEASE, before_step: Some(hook), ..options(dir.path()) };
        let s = start_with(slow, objects);
        granted(&s, 7);
        let waiter = ask(&s, 8, 0, set(true));
        assert_eq!(waiter.said, LockSaid::Waiting);
        let early = std::thread::scope(|scope| {
            is_held.store(true, Ordering::SeqCst);
            scope.spawn(|| unlink(&s, 3));
            until("its change is being done", || is_reached.load(Ordering::SeqCst));
            let began = Instant::now();
            let mut early = None;
            while began.elapsed() < 3 * LEASE && early.is_none() {
                let said = ask(&s, 8, waiter.lease, set(true)).said;
                early = (said != LockSaid::Waiting).then_some(said);
                std::thread::sleep(Duration::from_millis(20));
            }
            is_held.store(false, Ordering::SeqCst);
            early
        });
        if early.is_none() {
            gets_it(&s, 8, waiter.lease);
            assert!(s.names("").is_empty());
        }
        early
    });
    assert_eq!(given_early, [None, None], "begun by this run, and by an earlier one");
}
