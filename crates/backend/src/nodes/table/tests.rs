//! Nodes with descriptors that sync slowly, fail or hang.

use super::*;
use crate::nodes::Use;

struct Nothing;

impl Descriptors for Nothing {
    type Name = ();
    type Open = ();

    fn sync((): &()) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_node_in_use_stays_in_the_table() {
    let nodes = Nodes::<Nothing>::new(16, Arc::default());
    let handle = |n: u64| Handle::new(&n.to_le_bytes()).unwrap();
    let used = nodes.insert(handle(0), (), 0, Kind::File);
    let is_there = || nodes.get(&handle(0)).is_some_and(|node| Arc::ptr_eq(&node, &used));
    for n in 1..2000 {
        drop(nodes.insert(handle(n), (), n, Kind::File));
    }
    assert!(nodes.count() < 100 && is_there(), "{}", nodes.count());
    std::thread::sleep(Duration::from_millis(5));
    nodes.close_idle(Duration::ZERO);
    impresario_testing::until("the others are closed", || nodes.count() == 1);
    assert!(is_there());
    nodes.close_all();
    assert!(is_there());
    drop(used);
    nodes.close_all();
    impresario_testing::until("all are closed", || nodes.count() == 0);
}

#[test]
fn of_two_who_find_a_node_gone_the_later_leaves_the_next_one() {
    let nodes = Nodes::<Nothing>::new(16, Arc::default());
    let handle = Handle::new(b"node").unwrap();
    let old = nodes.insert(handle, (), 7, Kind::File);
    nodes.set_node_gone(&old);
    let fresh = nodes.insert(handle, (), 7, Kind::File);
    assert!(old.is_gone() && !Arc::ptr_eq(&old, &fresh));
    nodes.set_node_gone(&old);
    assert!(!fresh.is_gone() && nodes.get(&handle).is_some_and(|node| Arc::ptr_eq(&node, &fresh)));
    nodes.set_gone(7);
    assert!(fresh.is_gone() && nodes.get(&handle).is_none());
}

/// Its syncs end when they may, and fail if they are to.
struct Slow;

#[derive(Default)]
struct SlowSync {
    begun: AtomicBool,
    ends: AtomicBool,
    fails: bool,
}

impl Descriptors for Slow {
    type Name = ();
    type Open = Arc<SlowSync>;

    fn sync(open: &Arc<SlowSync>) -> Result<()> {
        open.begun.store(true, Ordering::Release);
        impresario_testing::until("the sync may end", || open.ends.load(Ordering::Acquire));
        if open.fails { Err(Errno(libc::EIO)) } else { Ok(()) }
    }
}

/// The same where a removed file keeps a name until it is closed.
struct SlowNamed;

impl Descriptors for SlowNamed {
    type Name = ();
    type Open = Arc<SlowSync>;

    const KEEPS_NAMES: bool = true;

    fn sync(open: &Arc<SlowSync>) -> Result<()> {
        Slow::sync(open)
    }
}

/// A file that was written; its sync does not end before it may.
fn written<D>(nodes: &Nodes<D>, fails: bool) -> (Arc<Node<D>>, Arc<SlowSync>)
where
    D: Descriptors<Name = (), Open = Arc<SlowSync>>,
{
    written_file(nodes, 7, fails)
}

fn written_file<D>(nodes: &Nodes<D>, fileid: u64, fails: bool) -> (Arc<Node<D>>, Arc<SlowSync>)
where
    D: Descriptors<Name = (), Open = Arc<SlowSync>>,
{
    let node = nodes.insert(Handle::new(&fileid.to_le_bytes()).unwrap(), (), fileid, Kind::File);
    let sync = Arc::new(SlowSync { fails, ..SlowSync::default() });
    drop(nodes.add_open(&node, sync.clone(), 0, (true, true), 0).changing());
    (node, sync)
}

/// Gives every thread that closes files one that hangs until its sync may end.
fn hang_closers<D>(nodes: &Nodes<D>) -> Vec<Arc<SlowSync>>
where
    D: Descriptors<Name = (), Open = Arc<SlowSync>>,
{
    let hang = |n| {
        let (node, sync) = written_file(nodes, 100 + n, false);
        nodes.close_opens(&node);
        sync
    };
    let syncs: Vec<_> = (0..crate::idle::CLOSERS_MAX as u64).map(hang).collect();
    let begun = |sync: &Arc<SlowSync>| sync.begun.load(Ordering::Acquire);
    impresario_testing::until("all closers hang", || syncs.iter().all(begun));
    syncs
}

/// Whether the thread ends beside files that hang, which may end then.
fn ends_beside<T>(hanging: &[Arc<SlowSync>], thread: &std::thread::ScopedJoinHandle<'_, T>) -> bool {
    let ends = impresario_base::time::wait_while(&|| !thread.is_finished(), Duration::from_secs(10));
    hanging.iter().for_each(|sync| sync.ends.store(true, Ordering::Release));
    ends
}

#[test]
fn a_sync_closes_what_of_its_file_waits_behind_files_that_hang() {
    type TakeOut = fn(&Nodes<Slow>, Arc<Node<Slow>>);
    let ways: [(&str, TakeOut); 2] = [
        ("rights are checked anew", |nodes, node| nodes.close_opens(&node)),
        ("the node is idle", |nodes, node| {
            drop(node);
            std::thread::sleep(Duration::from_millis(2));
            nodes.close_idle(Duration::ZERO);
        }),
    ];
    for (way, take_out) in ways {
        for fails in [false, true] {
            let losses = Arc::<Losses>::default();
            let nodes = Nodes::<Slow>::new(1000, losses.clone());
            let hanging = hang_closers(&nodes);
            let (node, sync) = written(&nodes, fails);
            let handle = node.handle;
            sync.ends.store(true, Ordering::Release);
            take_out(&nodes, node);
            assert!(!sync.begun.load(Ordering::Acquire), "{way}: it does not wait for its turn");
            let node = nodes.insert(handle, (), 7, Kind::File);
            std::thread::scope(|scope| {
                let synced = scope.spawn(|| {
                    let _syncing = node.syncing.lock();
                    node.sync_written(&losses)
                });
                assert!(ends_beside(&hanging, &synced), "{way}: a sync waits for other files");
                assert_eq!(synced.join().unwrap().is_err(), fails, "{way}");
            });
        }
    }
}

#[test]
fn a_removal_ends_with_the_closes_of_a_file_that_keeps_a_name() {
    let nodes = Nodes::<SlowNamed>::new(1000, Arc::default());
    // One that another thread is closing.
    let (node, sync) = written(&nodes, false);
    nodes.close_opens(&node);
    drop(node);
    impresario_testing::until("it is being closed", || sync.begun.load(Ordering::Acquire));
    std::thread::scope(|scope| {
        let removed = scope.spawn(|| nodes.set_gone(7));
        std::thread::sleep(Duration::from_millis(20));
        let is_early = removed.is_finished();
        sync.ends.store(true, Ordering::Release);
        assert!(ends_beside(&[], &removed) && !is_early);
    });
    assert_eq!(Arc::strong_count(&sync), 1, "it is open");

    // One that waits for its turn.
    let hanging = hang_closers(&nodes);
    let (node, sync) = written(&nodes, false);
    sync.ends.store(true, Ordering::Release);
    nodes.close_opens(&node);
    drop(node);
    assert_eq!(Arc::strong_count(&sync), 2, "it does not wait for its turn");
    std::thread::scope(|scope| {
        let removed = scope.spawn(|| {
            nodes.set_gone(7);
            Arc::strong_count(&sync)
        });
        assert!(ends_beside(&hanging, &removed));
        assert_eq!(removed.join().unwrap(), 1, "it is open");
    });
}

#[test]
fn a_removal_does_not_wait_long_for_closes_that_hang() {
    let nodes = Nodes::<SlowNamed>::new(1000, Arc::default());
    let mut hanging = hang_closers(&nodes);
    // One that waits for its turn, and one that has not been closed before.
    let (queued, sync) = written_file(&nodes, 7, false);
    nodes.close_opens(&queued);
    drop(queued);
    hanging.push(sync);
    hanging.push(written_file(&nodes, 8, false).1);
    std::thread::scope(|scope| {
        let removals = [7, 8].map(|fileid| {
            let nodes = &nodes;
            scope.spawn(move || nodes.set_gone(fileid))
        });
        let last = || removals.iter().any(|removal| !removal.is_finished());
        let end = impresario_base::time::wait_while(&last, REMOVAL_WAIT + Duration::from_secs(4));
        let begun = hanging.iter().all(|sync| sync.begun.load(Ordering::Acquire));
        hanging.iter().for_each(|sync| sync.ends.store(true, Ordering::Release));
        assert!(end && begun, "{end} {begun}");
    });
    impresario_testing::until("all are closed", || nodes.count() == crate::idle::CLOSERS_MAX);
}

/// The file is opened anew while it waits to be closed.
#[test]
fn what_is_evicted_behind_a_file_that_hangs_is_being_closed() {
    for fails in [false, true] {
        let losses = Arc::<Losses>::default();
        let nodes = Nodes::<Slow>::new(1, losses.clone());
        let place = |fileid: &u64| {
            let _locked = nodes.shard(&Handle::new(&fileid.to_le_bytes()).unwrap());
            nodes.shards.iter().position(|shard| shard.try_lock().is_none())
        };
        let together: Vec<u64> = (0..).filter(|fileid| place(fileid) == place(&0)).take(3).collect();
        let (first, first_sync) = written_file(&nodes, together[0], false);
        std::thread::sleep(Duration::from_millis(2));
        let (second, sync) = written_file(&nodes, together[1], fails);
        let (handle, fileid, nodes) = (second.handle, second.fileid, &nodes);
        drop((first, second));
        std::thread::scope(|scope| {
            let number = together[2];
            let third = Handle::new(&number.to_le_bytes()).unwrap();
            let evicting = scope.spawn(move || drop(nodes.insert(third, (), number, Kind::File)));
            impresario_testing::until("the first is closed", || first_sync.begun.load(Ordering::Acquire));
            let node = nodes.insert(handle, (), fileid, Kind::File);
            let (again, losses) = (node.clone(), &losses);
            let synced = scope.spawn(move || {
                let _syncing = again.syncing.lock();
                again.sync_written(losses)
            });
            std::thread::sleep(Duration::from_millis(20));
            let is_early = synced.is_finished();
            sync.ends.store(true, Ordering::Release);
            // The first still hangs.
            assert!(ends_beside(&[first_sync], &synced), "a sync waits for another file");
            assert_eq!(synced.join().unwrap().is_err(), fails);
            assert!(!is_early, "a sync does not wait for what is evicted");
            evicting.join().unwrap();
            nodes.set_gone(fileid);
            assert!(node.is_gone(), "the number of a file that is in use again is forgotten");
        });
    }
}

#[test]
fn what_is_taken_out_counts_as_being_closed_at_once() {
    let losses = Arc::<Losses>::default();
    let nodes = Nodes::<Slow>::new(1000, losses.clone());
    let (node, sync) = written(&nodes, true);
    sync.ends.store(true, Ordering::Release);
    let taken = node.take_opens(&losses);
    std::thread::scope(|scope| {
        let synced = scope.spawn(|| {
            let _syncing = node.syncing.lock();
            node.sync_written(&losses)
        });
        std::thread::sleep(Duration::from_millis(20));
        let is_early = synced.is_finished();
        let hanging = hang_closers(&nodes);
        // The sync has begun to wait before it has a place among those that wait for their turn.
        nodes.retire(taken);
        assert!(ends_beside(&hanging, &synced) && !is_early);
        assert_eq!(synced.join().unwrap(), Err(Errno(libc::EIO)));
    });
}

#[test]
fn an_idle_file_whose_sync_hangs_holds_up_no_other() {
    let nodes = Nodes::<Slow>::new(1000, Arc::default());
    let hanging = |n: u64| {
        let node = nodes.insert(Handle::new(&n.to_le_bytes()).unwrap(), (), n, Kind::File);
        let sync = Arc::<SlowSync>::default();
        drop(nodes.add_open(&node, sync.clone(), 0, (true, true), 0).changing());
        sync
    };
    let held = nodes.insert(Handle::new(b"held").unwrap(), (), 100, Kind::File);
    nodes.hold(&held);
    let first = Arc::<SlowSync>::default();
    drop(nodes.add_open(&held, first.clone(), 0, (true, true), 0).changing());
    let syncs: Vec<_> = (0..8).map(hanging).chain([first]).collect();
    std::thread::sleep(Duration::from_millis(2));
    std::thread::scope(|scope| {
        let idle = scope.spawn(|| nodes.close_idle(Duration::ZERO));
        let mut ends = 0;
        impresario_testing::until("all are closed, of which one does not end", || {
            let begun = |sync: &&Arc<SlowSync>| sync.begun.load(Ordering::Acquire);
            let ended = |sync: &&Arc<SlowSync>| sync.ends.load(Ordering::Acquire);
            for sync in syncs.iter().filter(begun).filter(|sync| !ended(sync)).skip(1) {
                sync.ends.store(true, Ordering::Release);
                ends += 1;
            }
            ends == syncs.len() - 1
        });
        impresario_testing::until("the next files have their turn", || idle.is_finished());
        syncs.iter().for_each(|sync| sync.ends.store(true, Ordering::Release));
    });
    drop(held);
    impresario_testing::until("all are closed", || nodes.count() == 1);
}

const TIMED_OUT: Result<Lost> = Err(Errno(libc::ETIMEDOUT));

#[test]
fn a_sync_of_all_waits_for_one_that_is_running() {
    for fails in [false, true] {
        let losses = Arc::<Losses>::default();
        let nodes = Nodes::<Slow>::new(16, losses.clone());
        let (node, sync) = written(&nodes, fails);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _syncing = node.syncing.lock();
                let _ = node.sync_written(&losses); // told below
            });
            impresario_testing::until("it is running", || sync.begun.load(Ordering::Acquire));
            assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT, "it has not ended");
            sync.ends.store(true, Ordering::Release);
            let lost = fails.then_some(node.handle).into_iter().collect();
            assert_eq!(nodes.sync_all(), Ok(Lost { files: Some(lost), any: 0 }));
        });
    }
}

#[test]
fn what_a_call_takes_out_is_closed_by_others_and_syncs_wait_for_that() {
    // They give the node that is in use from then on.
    type TakeOut = fn(&Nodes<Slow>, Arc<Node<Slow>>) -> Arc<Node<Slow>>;
    let ways: [(&str, TakeOut); 3] = [
        ("rights are checked anew", |nodes, node| {
            nodes.close_opens(&node);
            node
        }),
        ("another caller needs its place", |nodes, node| {
            for caller in 1..=OPENS_MAX as u64 {
                nodes.add_open(&node, Arc::default(), caller, (true, true), 0);
            }
            node
        }),
        ("it is removed", |nodes, node| {
            let (handle, fileid) = (node.handle, node.fileid);
            drop(node);
            nodes.set_gone(fileid);
            nodes.insert(handle, (), fileid, Kind::File)
        }),
    ];
    for (way, take_out) in ways {
        for fails in [false, true] {
            let losses = Arc::<Losses>::default();
            let nodes = Nodes::<Slow>::new(1000, losses.clone());
            let (node, sync) = written(&nodes, fails);
            let node = take_out(&nodes, node);
            impresario_testing::until("it is being closed", || sync.begun.load(Ordering::Acquire));
            assert!(!sync.ends.load(Ordering::Acquire), "{way}: the call has waited");
            assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT, "{way}");
            std::thread::scope(|scope| {
                let synced = scope.spawn(|| {
                    let _syncing = node.syncing.lock();
                    node.sync_written(&losses)
                });
                std::thread::sleep(Duration::from_millis(20));
                assert!(!synced.is_finished(), "{way}: a sync of the file has not waited");
                sync.ends.store(true, Ordering::Release);
                assert_eq!(synced.join().unwrap().is_err(), fails, "{way}");
            });
            let lost = fails.then_some(node.handle).into_iter().collect();
            assert_eq!(nodes.sync_all(), Ok(Lost { files: Some(lost), any: 0 }), "{way}");
        }
    }
}

#[test]
fn where_more_is_open_than_may_be_who_closes_waits() {
    let nodes = Nodes::<Slow>::new(1, Arc::default());
    let (node, sync) = written(&nodes, false);
    sync.ends.store(true, Ordering::Release);
    nodes.close_opens(&node);
    assert!(sync.begun.load(Ordering::Acquire) && nodes.count() == 1);
}

#[test]
fn a_sync_of_all_waits_for_what_was_taken_out_and_is_not_closed() {
    type TakeOut = fn(&Nodes<Slow>, Arc<Node<Slow>>);
    let ways: [(&str, TakeOut); 6] = [
        ("rights are checked anew", |nodes, node| nodes.close_opens(&node)),
        ("another caller needs its place", |nodes, node| {
            for caller in 1..=OPENS_MAX as u64 {
                nodes.add_open(&node, Arc::default(), caller, (true, true), 0);
            }
        }),
        ("the node is idle", |nodes, node| {
            drop(node);
            std::thread::sleep(Duration::from_millis(2));
            nodes.close_idle(Duration::ZERO);
        }),
        ("all are closed", |nodes, node| {
            drop(node);
            nodes.close_all();
        }),
        ("others need its descriptors", |nodes, node| {
            drop(node);
            for n in 0..2000_u64 {
                nodes.insert(Handle::new(&n.to_le_bytes()).unwrap(), (), 100 + n, Kind::File);
            }
        }),
        ("it is removed", |nodes, node| {
            nodes.hold(&node);
            nodes.set_gone(node.fileid);
            nodes.release(&node.handle);
        }),
    ];
    for (way, take_out) in ways {
        let nodes = Nodes::<Slow>::new(1, Arc::default());
        let (node, sync) = written(&nodes, true);
        let handle = node.handle;
        sync.ends.store(true, Ordering::Release);
        // Whoever closes it has not come to that yet.
        let closing = node.any_open();
        take_out(&nodes, node);
        assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT, "{way}");
        assert!(!sync.begun.load(Ordering::Acquire), "{way}: it was not out");
        drop(closing);
        assert_eq!(nodes.sync_all(), Ok(Lost { files: Some(vec![handle]), any: 0 }), "{way}");
    }
}

#[test]
fn a_node_that_is_held_again_is_not_waited_for() {
    let nodes = Nodes::<Slow>::new(16, Arc::default());
    let (node, sync) = written(&nodes, false);
    nodes.set_gone(node.fileid);
    sync.ends.store(true, Ordering::Release);
    assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT);
    nodes.hold(&node);
    assert_eq!(nodes.sync_all_until(Instant::now()), Ok(Lost { files: Some(Vec::new()), any: 0 }));
    assert!(sync.begun.load(Ordering::Acquire));
}

#[test]
fn a_write_that_a_sync_overtakes_is_synced_by_the_next() {
    let losses = Arc::<Losses>::default();
    let nodes = Nodes::<Nothing>::new(16, losses.clone());
    let node = nodes.insert(Handle::new(b"node").unwrap(), (), 0, Kind::File);
    let open = nodes.add_open(&node, (), 0, (true, true), 0);
    let writing = open.changing();
    assert_eq!(node.sync_written(&losses), Ok(true));
    drop(writing);
    assert_eq!(node.sync_written(&losses), Ok(true));
    assert_eq!(node.sync_written(&losses), Ok(false));
}

#[test]
fn a_sync_tells_what_a_descriptor_that_left_before_it_was_told() {
    let losses = Arc::<Losses>::default();
    let nodes = Nodes::<Slow>::new(16, losses.clone());
    let node = nodes.insert(Handle::new(b"node").unwrap(), (), 7, Kind::File);
    let sync = Arc::new(SlowSync { ends: true.into(), fails: true, ..SlowSync::default() });
    let checked = node.rights();
    nodes.close_opens(&node);
    let closing = nodes.add_open(&node, sync, 0, (true, true), checked);
    drop(closing.changing());
    let _syncing = node.syncing.lock();
    assert_eq!(node.sync_written(&losses), Ok(false), "it is its caller's only");
    // The kernel tells the loss to that one, and not to one that is opened after it was told.
    let others = || {
        drop(closing);
        Ok(())
    };
    assert_eq!(node.sync_others(&losses, others), Err(Errno(libc::EIO)));
}

#[test]
fn a_sync_covers_what_was_taken_out_while_calls_use_it() {
    type TakeOut = fn(&Nodes<Slow>, &Node<Slow>);
    let ways: [(&str, TakeOut); 2] = [
        ("rights are checked anew", |nodes, node| nodes.close_opens(node)),
        ("another caller needs its place", |nodes, node| {
            for caller in 1..=OPENS_MAX as u64 {
                nodes.add_open(node, Arc::default(), caller, (true, true), 0);
            }
        }),
    ];
    for (way, take_out) in ways {
        for synced in [Ok(true), Err(Errno(libc::EIO))] {
            let losses = Arc::<Losses>::default();
            let nodes = Nodes::<Slow>::new(1000, losses.clone());
            let (node, sync) = written(&nodes, synced.is_err());
            sync.ends.store(true, Ordering::Release);
            let in_use = node.any_open();
            take_out(&nodes, &node);
            impresario_testing::until("nobody else closes it", || !losses.is_closing(&node.handle));
            let _syncing = node.syncing.lock();
            assert_eq!(node.sync_written(&losses), synced, "{way}");
            assert!(in_use.is_some());
        }
    }
}

#[test]
fn a_sync_covers_what_is_taken_out_while_it_looks() {
    let losses = Arc::<Losses>::default();
    let nodes = Nodes::<Slow>::new(1000, losses.clone());
    let (node, sync) = written(&nodes, false);
    sync.ends.store(true, Ordering::Release);
    let in_use = node.any_open();
    std::thread::scope(|scope| {
        let mut opens = node.opens.lock();
        let synced = scope.spawn(|| {
            let _syncing = node.syncing.lock();
            node.sync_written(&losses)
        });
        std::thread::sleep(Duration::from_millis(20));
        // As `take_opens`, before the sync has seen what is open.
        opens.iter().for_each(|open| node.take(open));
        let taken = losses.closing(node.handle, std::mem::take(&mut *opens));
        drop(opens);
        drop(taken);
        assert_eq!(synced.join().unwrap(), Ok(true));
    });
    assert!(in_use.is_some());
}

#[test]
fn a_descriptor_that_was_opened_before_rights_changed_serves_nobody_else() {
    let nodes = Nodes::<Nothing>::new(16, Arc::default());
    let node = nodes.insert(Handle::new(b"node").unwrap(), (), 0, Kind::File);
    let checked = node.rights();
    nodes.close_opens(&node);
    drop(nodes.add_open(&node, (), 3, (true, true), checked));
    assert!(node.open_for(3, Use::Read, 0).is_none());
    drop(nodes.add_open(&node, (), 3, (true, true), node.rights()));
    assert!(node.open_for(3, Use::Read, 0).is_some());
}

#[test]
fn stable_writes_of_one_descriptor_share_a_sync() {
    const WRITES: u64 = 8;
    let losses = Arc::<Losses>::default();
    let nodes = Nodes::<Nothing>::new(16, losses.clone());
    let node = nodes.insert(Handle::new(b"node").unwrap(), (), 0, Kind::File);
    let open = nodes.add_open(&node, (), 0, (true, true), 0);
    let (begun, syncs) = (open.stable.made(), AtomicUsize::new(0));
    let sync = || {
        impresario_testing::until("all have written", || open.stable.made() == begun + WRITES);
        syncs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    std::thread::scope(|scope| {
        (0..WRITES).for_each(|_| drop(scope.spawn(|| node.sync_stable(&open, &losses, sync).unwrap())));
    });
    // Those that wrote after the first sync had begun need another.
    assert!((1..=2).contains(&syncs.load(Ordering::Relaxed)), "{syncs:?}");
}

/// Whose files have no names.
struct Removed;

impl Descriptors for Removed {
    type Name = ();
    type Open = Arc<AtomicUsize>;

    fn sync(syncs: &Arc<AtomicUsize>) -> Result<()> {
        syncs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn is_removed((): &()) -> bool {
        true
    }
}

#[test]
fn what_nobody_can_read_any_more_is_not_synced() {
    let nodes = Nodes::<Removed>::new(16, Arc::default());
    let node = nodes.insert(Handle::new(b"node").unwrap(), (), 7, Kind::File);
    let syncs = Arc::<AtomicUsize>::default();
    drop(nodes.add_open(&node, syncs.clone(), 0, (true, true), 0).changing());
    nodes.hold(&node);
    nodes.set_gone(7);
    nodes.close_opens(&node);
    // It is held: somebody may ask what became of it.
    impresario_testing::until("it is synced", || syncs.load(Ordering::Relaxed) == 1);
    impresario_testing::until("it is closed", || nodes.count() == 1);
    drop(nodes.add_open(&node, syncs.clone(), 0, (true, true), node.rights()).changing());
    nodes.release(&node.handle);
    drop(node);
    assert_eq!((syncs.load(Ordering::Relaxed), nodes.count()), (1, 0));
}
