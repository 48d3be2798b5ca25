use proptest::prelude::*;

use super::*;

const BYTES: u64 = 24;

fn holder(client: u64, owner: u64) -> Holder {
    Holder { client, owner }
}

fn lock(client: u64, owner: u64, start: u64, end: u64, exclusive: bool) -> Lock {
    Lock { holder: holder(client, owner), pid: owner as u32, range: Range { start, end }, exclusive }
}

fn table() -> LockTable {
    LockTable::new(Limits::default(), 0)
}

fn exclusive(client: u64, start: u64, end: u64) -> Lock {
    lock(client, 1, start, end, true)
}

#[test]
fn exclusive_locks_exclude_and_shared_ones_do_not_exclude_each_other() {
    let mut t = table();
    assert_eq!(t.set(1, lock(1, 1, 0, 9, false), false), Taken::Granted);
    assert_eq!(t.set(1, lock(2, 1, 5, 20, false), false), Taken::Granted);
    assert_eq!(t.set(1, lock(3, 1, 9, 9, true), false), Taken::Held(lock(1, 1, 0, 9, false)));
    assert_eq!(t.set(1, lock(3, 1, 21, u64::MAX, true), false), Taken::Granted);
    assert_eq!(t.set(2, lock(3, 1, 0, u64::MAX, true), false), Taken::Granted, "another file");
    assert_eq!(t.counts(), (4, 0));
    t.remove_client(3);
    assert_eq!(t.counts(), (2, 0));
    assert_eq!(t.set(1, lock(1, 1, 0, 9, true), false), Taken::Held(lock(2, 1, 5, 20, false)), "an upgrade");
}

#[test]
fn waiters_are_served_in_order_and_shared_ones_do_not_starve_an_exclusive_one() {
    let mut t = table();
    assert_eq!(t.set(1, lock(1, 1, 0, 9, false), false), Taken::Granted);
    assert_eq!(t.set(1, exclusive(2, 0, 9), true), Taken::Waiting);
    assert_eq!(t.set(1, lock(3, 1, 0, 9, false), true), Taken::Waiting, "behind the exclusive one");
    assert_eq!(t.set(1, lock(4, 1, 20, 29, true), true), Taken::Granted, "in nobody's way");
    assert_eq!(t.set(1, exclusive(2, 0, 9), true), Taken::Waiting, "asked again");
    assert_eq!(t.counts(), (2, 2));
    assert!(t.unlock(1, holder(1, 1), Range::ALL));
    assert_eq!(t.set(1, exclusive(2, 0, 9), true), Taken::Granted);
    assert_eq!(t.set(1, lock(3, 1, 0, 9, false), true), Taken::Waiting);
    assert!(t.unlock(1, holder(2, 1), Range { start: 0, end: 4 }));
    assert_eq!(t.set(1, lock(3, 1, 0, 9, false), true), Taken::Waiting);
    assert_eq!(t.set(1, lock(2, 1, 5, 9, false), false), Taken::Granted, "a downgrade");
    assert_eq!(t.counts(), (3, 0), "which lets the shared one in");
}

#[test]
fn who_holds_a_lock_passes_those_who_wait_for_it() {
    let mut t = table();
    assert_eq!(t.set(1, lock(1, 1, 0, 9, false), false), Taken::Granted);
    assert_eq!(t.set(1, exclusive(2, 0, 9), true), Taken::Waiting);
    assert_eq!(t.set(1, exclusive(1, 0, 9), true), Taken::Granted, "an upgrade");
    assert_eq!(t.set(1, exclusive(2, 0, 9), true), Taken::Waiting);
    assert!(t.restore(1, holder(2, 1), &[]), "the waiter goes");
    assert_eq!(t.counts(), (1, 0));
}

#[test]
fn deadlocks_are_found_over_several_files_and_clients() {
    let mut t = table();
    for client in 1..=3 {
        assert_eq!(t.set(client, exclusive(client, 0, 9), false), Taken::Granted);
    }
    assert_eq!(t.set(2, exclusive(1, 5, 5), true), Taken::Waiting);
    assert_eq!(t.set(3, exclusive(2, 5, 5), true), Taken::Waiting);
    assert_eq!(t.set(1, exclusive(3, 20, 29), true), Taken::Granted, "no conflict");
    assert_eq!(t.set(1, exclusive(3, 5, 5), true), Taken::Deadlock);
    assert_eq!(t.counts(), (4, 2));
    t.remove_client(3);
    assert_eq!(t.set(3, exclusive(2, 5, 5), true), Taken::Granted);
    // Two that hold the same shared lock and want it exclusively.
    let mut t = table();
    assert_eq!(t.set(1, lock(1, 1, 0, 9, false), false), Taken::Granted);
    assert_eq!(t.set(1, lock(2, 1, 0, 9, false), false), Taken::Granted);
    assert_eq!(t.set(1, exclusive(1, 0, 9), true), Taken::Waiting);
    assert_eq!(t.set(1, exclusive(2, 0, 9), true), Taken::Deadlock);
    assert!(t.unlock(1, holder(2, 1), Range::ALL));
    assert_eq!(t.set(1, exclusive(1, 0, 9), true), Taken::Granted);
}

#[test]
fn limits_hold_for_splits_too() {
    let limits = Limits { of_client: 6, of_file: 8, in_all: 12, waiting_of_client: 1, idle_files: 2 };
    let mut t = LockTable::new(limits, 0);
    assert_eq!(t.set(1, exclusive(1, 0, 100), false), Taken::Granted);
    let splits = (0..50).filter(|n| t.unlock(1, holder(1, 1), Range { start: n * 2 + 1, end: n * 2 + 1 })).count();
    assert_eq!((splits, t.counts().0), (5, 6));
    assert!(t.unlock(1, holder(1, 1), Range { start: 50, end: 100 }), "it splits nothing");
    assert_eq!(t.set(2, exclusive(1, 0, 0), false), Taken::Full);
    assert_eq!(t.set(1, exclusive(2, 0, 0), true), Taken::Waiting);
    assert_eq!(t.set(1, exclusive(2, 2, 2), true), Taken::Full);
    for file in 100..200 {
        assert_eq!(t.set(file, exclusive(3, 0, 0), false), Taken::Granted);
        assert!(t.unlock(file, holder(3, 1), Range::ALL));
    }
    assert_eq!(t.counts(), (6, 1));
}

#[test]
fn a_version_changes_with_what_others_did_also_when_it_was_forgotten() {
    let limits = Limits { idle_files: 1, ..Limits::default() };
    let mut t = LockTable::new(limits, 1000);
    let first = t.version(1, 1);
    t.set(1, exclusive(1, 0, 9), false);
    t.unlock(1, holder(1, 1), Range::ALL);
    assert_eq!(t.version(1, 1), first, "its own");
    let of_other = t.version(1, 2);
    assert_ne!(of_other, first);
    t.set(1, lock(2, 1, 0, 9, false), false);
    t.unlock(1, holder(2, 1), Range::ALL);
    assert_eq!((t.version(1, 1), t.version(1, 2)), (first, of_other), "a shared one changes nothing");
    t.set(1, exclusive(2, 0, 9), false);
    t.set(1, lock(2, 1, 0, 4, false), false);
    let downgraded = t.version(1, 1);
    assert_ne!(downgraded, first);
    t.remove_client(2);
    let removed = t.version(1, 1);
    assert_ne!(removed, downgraded);
    for file in 2..5 {
        t.set(file, exclusive(1, 0, 9), false);
        t.unlock(file, holder(1, 1), Range::ALL);
    }
    assert!(t.version(1, 1) >= removed && t.version(1, 2) > of_other);
}

/// What each byte of a file is, for each holder: `None`, shared or exclusive.
type Model = std::collections::BTreeMap<(u64, u64), [Option<bool>; BYTES as usize]>;

fn model_of(held: &[Lock]) -> Model {
    let mut model = Model::new();
    for lock in held {
        let bytes = model.entry((lock.holder.client, lock.holder.owner)).or_default();
        for byte in lock.range.start..=lock.range.end.min(BYTES - 1) {
            assert!(bytes[byte as usize].replace(lock.exclusive).is_none(), "locks of a holder overlap");
        }
    }
    model
}

proptest! {
    /// Against a table of bytes: the same is granted and refused, and the same is held. Locks are joined as far as can be.
    #[test]
    fn as_a_table_of_bytes(
        steps in proptest::collection::vec((0u64..2, 0u64..2, 0u64..BYTES, 0u64..BYTES, 0u8..4), 1..80)
    ) {
        let mut t = table();
        let mut model = Model::new();
        for (client, owner, from, to, kind) in steps {
            let (start, end) = (from.min(to), from.max(to));
            let bytes = start as usize..=end as usize;
            if kind >= 2 {
                let done = t.unlock(1, holder(client, owner), Range { start, end });
                prop_assert!(done);
                model.entry((client, owner)).or_default()[bytes].fill(None);
            } else {
                let is_free = model.iter().filter(|(who, _)| **who != (client, owner)).all(|(_, theirs)| {
                    theirs[bytes.clone()].iter().all(|byte| byte.is_none_or(|exclusive| !exclusive && kind == 0))
                });
                let taken = t.set(1, lock(client, owner, start, end, kind == 1), false);
                prop_assert_eq!(matches!(taken, Taken::Granted), is_free, "{:?}", taken);
                if is_free {
                    model.entry((client, owner)).or_default()[bytes].fill(Some(kind == 1));
                }
            }
            let held = t.held(1);
            model.retain(|_, bytes| bytes.iter().any(Option::is_some));
            prop_assert_eq!(model_of(&held), model.clone());
            let runs: usize = model.values().map(|bytes| {
                (0..bytes.len()).filter(|at| bytes[*at].is_some() && (*at == 0 || bytes[*at] != bytes[at - 1])).count()
            }).sum();
            prop_assert_eq!((held.len(), t.counts().0), (runs, runs));
        }
        for client in 0..2 {
            t.remove_client(client);
            prop_assert!(!t.has_any(client));
        }
        prop_assert_eq!(t.counts(), (0, 0));
    }

    /// With waiting: no two holders ever have what excludes each other, and nothing waits that could be granted, unless it
    /// conflicts with what waits before it. When all holders go one after the other, everything that waits is granted.
    #[test]
    fn what_waits_is_granted(
        steps in proptest::collection::vec((0u64..4, 0u64..3, 0u64..BYTES, 0u64..BYTES, 0u8..8), 1..80)
    ) {
        let mut t = table();
        for (client, file, from, to, kind) in steps {
            let (start, end) = (from.min(to), from.max(to));
            match kind {
                0 => assert!(t.unlock(file, holder(client, 1), Range { start, end })),
                1 => assert!(t.restore(file, holder(client, 1), &[])),
                2 => t.remove_client(client),
                _ => { t.set(file, lock(client, 1, start, end, kind % 2 == 1), kind >= 5); }
            }
            for file in 0..3 {
                let (held, waiting) = (t.held(file), t.waiting(file));
                prop_assert!(held.iter().all(|one| held.iter().all(|other| !one.conflicts(other))));
                for (at, wanted) in waiting.iter().enumerate() {
                    let behind = waiting[..at].iter().any(|earlier| earlier.conflicts(wanted));
                    prop_assert!(behind || held.iter().any(|held| held.conflicts(wanted)));
                }
            }
        }
        for _ in 0..80 {
            for client in 0..4 {
                (0..3).for_each(|file| assert!(t.unlock(file, holder(client, 1), Range::ALL)));
            }
        }
        prop_assert_eq!(t.counts(), (0, 0), "someone waits for ever");
    }
}

const LEASE: Nanos = Nanos(8_000);

fn locks() -> Locks {
    Locks::new(Limits::default(), LEASE, 0)
}

fn set(client: u64, wait: bool) -> Request {
    Request::Set { file: 1, lock: exclusive(client, 0, 9), wait }
}

fn begin(l: &mut Locks, now: u64, client: u64, number: u64) {
    assert_eq!(l.call(Nanos(now), client, 3, 0, &set(client, false)), Reply::Begin);
    assert!(l.begin(Nanos(now), client, 3, number));
}

#[test]
fn a_lease_that_is_not_renewed_ends_and_its_locks_go_when_its_client_is_fenced() {
    let mut l = locks();
    begin(&mut l, 0, 7, 70);
    assert!(matches!(l.call(Nanos(0), 7, 3, 70, &set(7, false)), Reply::Granted(_)));
    begin(&mut l, 100, 8, 80);
    assert_eq!(l.call(Nanos(100), 8, 0, 80, &set(8, true)), Reply::Waiting);
    assert_eq!(l.call(Nanos(5_000), 7, 5, 70, &Request::Renew { whole: false }), Reply::Done);
    assert_eq!(l.call(Nanos(8_000), 8, 0, 80, &set(8, true)), Reply::Waiting);
    assert!(l.take_ended(Nanos(13_000)).is_empty(), "longer than the client counts");
    assert_eq!(l.next_end(), Some(Nanos(14_000)));
    let fence = Some(5 + EPOCHS_AHEAD);
    assert_eq!(l.take_ended(Nanos(14_000)), [Ended { client: 7, number: 70, fence }]);
    assert_eq!(l.call(Nanos(14_000), 7, 5, 70, &Request::Renew { whole: false }), Reply::Lost);
    assert_eq!(l.call(Nanos(14_000), 7, 5, 0, &set(7, false)), Reply::Later, "not before it is fenced");
    assert_eq!(l.call(Nanos(14_100), 8, 0, 80, &set(8, true)), Reply::Waiting, "not before it is fenced");
    assert_eq!(l.take_ended(Nanos(14_200)), [Ended { client: 7, number: 70, fence }], "tried again");
    l.fenced(7);
    assert!(matches!(l.call(Nanos(14_300), 8, 0, 80, &set(8, true)), Reply::Granted(_)));
    assert_eq!(
        l.call(Nanos(14_300), 7, 5, 70, &Request::Unlock { file: 1, holder: holder(7, 1), range: Range::ALL }),
        Reply::Lost
    );
    begin(&mut l, 14_400, 7, 71);
    assert!(matches!(l.call(Nanos(14_400), 7, 5, 71, &set(7, false)), Reply::Held(_)));
}

#[test]
fn a_lease_without_locks_ends_without_a_fence() {
    let mut l = locks();
    begin(&mut l, 0, 7, 70);
    assert_eq!(l.take_ended(Nanos(9_000)), [Ended { client: 7, number: 70, fence: None }]);
    assert_eq!((l.lease_of(7), l.next_end()), (0, None));
    assert_eq!(l.call(Nanos(9_000), 7, 0, 0, &Request::Renew { whole: false }), Reply::Done, "no lease is needed");
}

#[test]
fn after_a_restart_nothing_is_given_before_all_is_restored() {
    let mut l = locks();
    l.restore_lease(Nanos(0), 7, 70, 3);
    l.restore_lease(Nanos(0), 9, 90, 0);
    begin(&mut l, 0, 8, 80);
    assert_eq!(l.call(Nanos(0), 8, 0, 80, &set(8, true)), Reply::Later);
    assert_eq!(l.call(Nanos(0), 7, 3, 70, &Request::Renew { whole: false }), Reply::Restore);
    assert_eq!(l.call(Nanos(0), 7, 3, 70, &set(7, false)), Reply::Restore);
    let restore = Request::Restore { file: 1, holder: holder(7, 1), locks: vec![exclusive(7, 0, 9)] };
    assert_eq!(l.call(Nanos(0), 7, 3, 70, &restore), Reply::Done);
    assert_eq!(l.call(Nanos(0), 7, 3, 70, &restore), Reply::Done, "twice is once");
    assert_eq!(l.call(Nanos(0), 7, 3, 70, &Request::Renew { whole: true }), Reply::Done);
    assert_eq!(l.call(Nanos(8_000), 7, 3, 70, &Request::Renew { whole: false }), Reply::Done);
    assert_eq!(l.call(Nanos(8_000), 8, 0, 80, &set(8, true)), Reply::Later, "client 9 has not come");
    let ended = l.take_ended(Nanos(9_000));
    assert_eq!(ended, [Ended { client: 9, number: 90, fence: Some(EPOCHS_AHEAD) }]);
    assert!(l.is_restoring(), "what it holds is unknown");
    l.fenced(9);
    assert_eq!(l.call(Nanos(9_000), 8, 0, 80, &set(8, true)), Reply::Waiting);
    assert_eq!(l.counts(), (1, 1, 2));
    assert_eq!(l.call(Nanos(9_000), 9, 0, 90, &restore), Reply::Lost, "it comes too late");
}

/// Whoever waits asks again and again, under the lock of all files: a crowd of holders must not make each ask a search through all
/// pairs of them. That took half a minute here; the limit is for slow machines.
#[test]
fn a_waiter_behind_thousands_of_holders_asks_cheaply() {
    let mut t = table();
    let holders = Limits::default().of_file as u64 - 2;
    for owner in 0..holders {
        assert_eq!(t.set(1, lock(owner % 4, owner, 0, 9, false), true), Taken::Granted);
    }
    let began = std::time::Instant::now();
    for ask in 0..2000 {
        assert_eq!(t.set(1, exclusive(9, 0, 9), true), Taken::Waiting);
        assert!(began.elapsed() < std::time::Duration::from_secs(10), "{ask} asks took {:?}", began.elapsed());
    }
    // Not asked for in vain: a holder that comes to wait for the one that waits is told.
    assert_eq!(t.set(2, exclusive(9, 0, 9), false), Taken::Granted);
    assert_eq!(t.set(2, lock(3, 3, 0, 9, true), true), Taken::Deadlock);
}

/// A request that waits already may come to wait for itself by what another one is granted.
#[test]
fn a_deadlock_that_a_grant_completes_is_found_by_who_asks_again() {
    let mut t = table();
    assert_eq!(t.set(1, exclusive(1, 0, 9), false), Taken::Granted);
    assert_eq!(t.set(2, exclusive(3, 0, 4), false), Taken::Granted);
    assert_eq!(t.set(1, exclusive(2, 0, 9), true), Taken::Waiting);
    for _ in 0..3 {
        assert_eq!(t.set(2, exclusive(1, 0, 9), true), Taken::Waiting, "nothing has changed");
    }
    // Another thread of 2, which waits for 1, takes what 1 waits for.
    assert_eq!(t.set(2, exclusive(2, 5, 9), false), Taken::Granted);
    assert_eq!(t.set(2, exclusive(1, 0, 9), true), Taken::Deadlock);
}
