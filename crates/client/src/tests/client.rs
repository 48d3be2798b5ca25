//! Clients and files on a whole cluster in this process.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use impresario_config::AllocationRule;
use impresario_testing::until;
use impresario_wire::{Answer, Call, MetaCall, NodeKind, SetAttr, SpaceChange};

use super::cluster::FakeCluster;
use super::names::FakeNames;
use super::*;
use crate::testing::{FakeCall, FakeConnection, FakeGreeting, FakeServer, Flow, Serve};
use crate::{Access, Client, ClientOptions, CreateOptions, Via};

fn connect(cluster: &FakeCluster, via: Via) -> Arc<Client> {
    Client::connect(cluster.config(), ClientOptions { via, ..ClientOptions::default() }).unwrap()
}

#[test]
fn names_and_data_work_directly_and_through_an_io_node() {
    let cluster = FakeCluster::start(3, 2, 5000).unwrap();
    for via in [Via::Direct, Via::Auto, Via::IoNode(1)] {
        let client = connect(&cluster, via);
        assert_eq!(client.mkdir("/dir", 0o755, 1, 2).unwrap().kind, NodeKind::Dir);
        let file = client.create("dir/a", CreateOptions { exclusive: true, ..CreateOptions::default() }).unwrap();
        let bytes = content(0, 3 << 20);
        assert_eq!(file.write_at(&bytes, 10_000).unwrap(), 3 << 20);
        file.sync().unwrap();
        assert_eq!(file.attr().unwrap().size, 10_000 + (3 << 20));
        let mut back = vec![1; 4 << 20];
        assert_eq!(file.read_at(&mut back, 0).unwrap(), 10_000 + (3 << 20));
        assert!(back[..10_000].iter().all(|byte| *byte == 0) && back[10_000..10_000 + (3 << 20)] == bytes);
        assert_eq!(file.set_len(20_000).unwrap().size, 20_000);
        assert_eq!(file.read_at(&mut back, 19_990).unwrap(), 10);
        file.close().unwrap();

        let error = client.create("dir/a", CreateOptions { exclusive: true, ..CreateOptions::default() }).unwrap_err();
        assert_eq!(error.errno(), libc::EEXIST);
        client.rename("dir/a", "dir/b", false).unwrap();
        assert_eq!(client.stat("dir/a").unwrap_err().errno(), libc::ENOENT);
        assert_eq!(client.stat("dir/".repeat(20_000)).unwrap_err().errno(), libc::ENAMETOOLONG);
        let file = client.open("dir/b", false).unwrap();
        assert_eq!(file.write_at(b"x", 0).unwrap_err().errno(), libc::EBADF);
        drop(file);
        client.symlink("dir/link", "b", 1, 2).unwrap();
        assert_eq!(client.readlink("dir/link").unwrap(), b"b");
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        assert_eq!(client.set_attr("dir/b", set).unwrap().mode, 0o600);
        let names: Vec<_> = client.list("dir").unwrap().into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, [b"b".to_vec(), b"link".to_vec()]);
        assert_eq!(client.rmdir("dir").unwrap_err().errno(), libc::ENOTEMPTY);
        client.unlink("dir/b").unwrap();
        client.unlink("dir/link").unwrap();
        client.rmdir("dir").unwrap();
        assert!(client.statfs().unwrap().total_bytes > 0);
        client.sync_dir("").unwrap();
        assert_eq!(client.is_direct(), via == Via::Direct);
    }
    let error = Client::connect(cluster.config(), ClientOptions { via: Via::IoNode(2), ..ClientOptions::default() });
    assert!(error.unwrap_err().to_string().contains("which has 2"));
}

#[test]
fn hints_reach_the_data_servers_that_have_the_bytes() {
    let cluster = FakeCluster::start(3, 1, 5000).unwrap();
    // Hints, and the bytes in them.
    let hinted = |cluster: &FakeCluster| {
        let lists = cluster.objects.iter().flat_map(|server| server.log()).filter_map(|call| match call {
            Call::Prefetch { extents, .. } => Some(extents.iter().map(|extent| u64::from(extent.1)).sum::<u64>()),
            _ => None,
        });
        lists.fold((0, 0), |(hints, bytes), list| (hints + 1, bytes + list))
    };
    for (round, via) in [Via::Direct, Via::Auto].into_iter().enumerate() {
        let client = connect(&cluster, via);
        let file = client.create(format!("f{round}"), CreateOptions::default()).unwrap();
        file.write_at(&content(0, 100_000), 0).unwrap();
        let before = hinted(&cluster).1;
        assert_eq!(file.prefetch(5_000, 10_000).unwrap(), 10_000);
        assert_eq!(hinted(&cluster).1 - before, 10_000, "{via:?}: each byte once");
        assert_eq!(file.prefetch(90_000, u64::MAX).unwrap(), 10_000, "{via:?}: to the end");
        assert_eq!(file.prefetch(1 << 62, u64::MAX).unwrap(), 0);
        assert_eq!(file.prefetch(7, 0).unwrap(), 0);
        assert_eq!(file.prefetch(u64::MAX, 1).unwrap_err().errno(), libc::EFBIG);
        // What nobody waits for arrives too, and what is nonsense does no harm.
        let before = hinted(&cluster).0;
        file.will_need(u64::MAX, 1);
        file.will_need(0, 100);
        until(format!("the hint arrives by {via:?}"), || hinted(&cluster).0 > before);
    }
}

/// A program that hints more than can be passed on goes on, and ends, as if it had not.
#[test]
fn hints_for_a_dead_server_hold_nobody_up() {
    let mut cluster = FakeCluster::start(1, 0, 20_000).unwrap();
    let client = connect(&cluster, Via::Direct);
    let file = client.create("f", CreateOptions::default()).unwrap();
    cluster.data.clear();
    let started = std::time::Instant::now();
    (0..100_000).for_each(|at| file.will_need(at, 1));
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    file.close().unwrap();
}

#[test]
fn clients_are_spread_evenly_over_the_io_nodes() {
    let cluster = FakeCluster::start(1, 3, 5000).unwrap();
    for placement_seed in 0..9 {
        Client::connect(cluster.config(), ClientOptions { placement_seed, ..ClientOptions::default() }).unwrap();
    }
    assert_eq!(cluster.io.iter().map(|io| io.accepted()).collect::<Vec<_>>(), [3, 3, 3]);
}

#[test]
fn the_largest_request_on_the_wire_is_the_clients_choice() {
    let cluster = FakeCluster::start(2, 1, 5000).unwrap();
    for via in [Via::Direct, Via::Auto] {
        for (wire_max_bytes, requests) in [(Some(8192), 32), (None, if via == Via::Direct { 2 } else { 1 })] {
            let options = ClientOptions { via, wire_max_bytes, ..ClientOptions::default() };
            let client = Client::connect(cluster.config(), options).unwrap();
            let file = client.create("f", CreateOptions::default()).unwrap();
            file.write_at(&content(0, 256 << 10), 0).unwrap();
            let traffic = client.traffic();
            // Over strips of 4 KiB a piece of 8 KiB goes to two servers.
            let requests = if wire_max_bytes.is_some() && via == Via::Direct { 2 * requests } else { requests };
            assert_eq!((traffic.writes, traffic.written_bytes), (requests, 256 << 10), "{via:?} {wire_max_bytes:?}");
            let mut back = vec![0; 256 << 10];
            assert_eq!(file.read_at(&mut back, 0).unwrap(), 256 << 10);
            assert!(back == content(0, 256 << 10));
            assert_eq!(client.traffic().requests(), 2 * requests);
        }
    }
}

#[test]
fn open_files_survive_the_metadata_server() {
    let mut cluster = FakeCluster::start(2, 0, 4000).unwrap();
    let client = connect(&cluster, Via::Auto);
    let written = client.create("written", CreateOptions::default()).unwrap();
    let idle = client.create("idle", CreateOptions::default()).unwrap();
    written.write_at(b"before", 0).unwrap();
    client.rename("idle", "renamed", false).unwrap();
    cluster.meta.take().unwrap().kill();
    let started = Instant::now();
    std::thread::scope(|scope| {
        // A write is not acknowledged while nobody knows that the file is being written.
        let write = scope.spawn(|| written.write_at(b"during", 6).unwrap_err().errno());
        assert_eq!(client.stat("written").unwrap_err().errno(), libc::EIO);
        assert_eq!(write.join().unwrap(), libc::EIO);
    });
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    cluster.restart_meta().unwrap();
    written.write_at(b"during", 6).unwrap();
    written.sync().unwrap();
    // The idle one is registered by itself, under the name that it has now.
    let reopened = |path: &[u8]| {
        cluster
            .names
            .log()
            .iter()
            .any(|call| matches!(call, MetaCall::Reopen { path: p, write: true, .. } if p == path))
    };
    until("both are registered", || reopened(b"written") && reopened(b"renamed"));
    assert_eq!(idle.attr().unwrap().size, 0);
    let mut back = [0; 12];
    written.read_at(&mut back, 0).unwrap();
    assert_eq!(&back, b"beforeduring");
    cluster.meta.as_ref().unwrap().drop_connections();
    written.close().unwrap();
    idle.close().unwrap();
    let closes = cluster.names.log().iter().filter(|call| matches!(call, MetaCall::Close { .. })).count();
    assert_eq!(closes, 2, "the server is told of the end of a file that was written");
}

#[test]
fn changes_of_names_do_not_wait_for_the_registration_of_other_files() {
    let cluster = FakeCluster::start(1, 0, 4000).unwrap();
    let client = connect(&cluster, Via::Direct);
    let [file, gone] = ["f", "gone"].map(|name| client.create(name, CreateOptions::default()).unwrap());
    gone.close().unwrap();
    let (changed, are_changed) = std::sync::mpsc::channel();
    let change = move || {
        client.link("gone", "link").unwrap();
        client.rename("link", "renamed", false).unwrap();
        client.unlink("gone").unwrap();
        changed.send(()).unwrap();
    };
    file.while_registering(|| {
        std::thread::spawn(change);
        are_changed.recv_timeout(Duration::from_secs(60)).expect("the names are changed");
    });
}

/// As for a database that writes over its log again and again.
#[test]
fn data_within_a_file_that_was_synced_are_durable_without_the_metadata_server() {
    let cluster = FakeCluster::start(2, 1, 5000).unwrap();
    for via in [Via::Direct, Via::Auto] {
        let client = connect(&cluster, via);
        let file = client.create(format!("{via:?}"), CreateOptions::default()).unwrap();
        let asked = || {
            let syncs = cluster.names.log().iter().filter(|call| matches!(call, MetaCall::Fsync { .. })).count();
            let of_data = |call: &Call| matches!(call, Call::Sync { .. });
            let data =
                cluster.objects.iter().map(|server| server.log().iter().filter(|c| of_data(c)).count()).sum::<usize>();
            (syncs, data)
        };
        let mut before = asked();
        let mut sync = |file: &crate::File, metadata: usize, what: &str| {
            file.sync_data().unwrap();
            let now = asked();
            assert_eq!((now.0 - before.0, now.1 - before.1), (metadata, 2), "{via:?}: {what}");
            before = now;
        };
        file.write_at(&content(0, 100_000), 0).unwrap();
        sync(&file, 1, "its name is not durable yet");
        file.write_at(b"x", 99_999).unwrap();
        sync(&file, 0, "within its length");
        sync(&file, 0, "nothing was changed");
        file.write_at(b"xy", 99_999).unwrap();
        sync(&file, 1, "it has grown");
        sync(&file, 0, "it has not grown since");
        file.set_len(50_000).unwrap();
        sync(&file, 1, "it was cut");
        let _ = file.change_space(SpaceChange::Punch, 0, 10_000);
        sync(&file, 1, "its space was changed");
        client.rename(format!("{via:?}"), format!("{via:?}.new"), false).unwrap();
        sync(&file, 1, "it was renamed");
        sync(&file, 0, "its new name is durable");
        client.rename(format!("{via:?}.new"), format!("{via:?}"), false).unwrap();
        // Another open does not know of that.
        let other = client.open(format!("{via:?}"), true).unwrap();
        sync(&other, 1, "opened anew");
        sync(&other, 0, "written by another open within its length");
        let reader = client.open(format!("{via:?}"), false).unwrap();
        sync(&reader, 1, "a reader");
        sync(&reader, 1, "the server does not count it as a writer");
        // Another session: the server may have lost what it had not made durable.
        let meta = cluster.meta.as_ref().unwrap();
        meta.drop_connections();
        cluster.io.iter().for_each(|io| io.drop_connections());
        let is_over = || client.meta_link().session_now().is_none();
        until("the session is over", is_over);
        file.sync_data().unwrap();
        assert_eq!(asked().0 - before.0, 1, "{via:?}: another session");
    }
}

/// The metadata server spares itself the data servers when nothing was written, so this must not be said of anything else.
#[test]
fn a_close_says_whether_something_was_written_or_tried() {
    let cluster = FakeCluster::start(2, 0, 5000).unwrap();
    let client = connect(&cluster, Via::Direct);
    let file = |name: &str| client.create(name, CreateOptions::default()).unwrap();
    let last = || {
        // What is sent before a call has come before it.
        client.stat("").unwrap();
        let closes = |call: &MetaCall| if let MetaCall::Close { wrote, .. } = call { Some(*wrote) } else { None };
        cluster.names.log().iter().filter_map(closes).next_back()
    };
    let (untouched, read) = (file("untouched"), file("read"));
    untouched.close().unwrap();
    assert_eq!(last(), Some(false));
    assert_eq!(read.read_at(&mut [0; 10], 0).unwrap(), 0);
    read.set_attr(&SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    read.sync().unwrap();
    read.close().unwrap();
    assert_eq!(last(), Some(false));
    let (written, cut, allocated) = (file("written"), file("cut"), file("allocated"));
    written.write_at(b"x", 0).unwrap();
    written.close().unwrap();
    assert_eq!(last(), Some(true));
    cut.set_len(0).unwrap();
    cut.close().unwrap();
    assert_eq!(last(), Some(true));
    let _ = allocated.change_space(SpaceChange::Allocate { keep_size: false }, 0, 10);
    allocated.close().unwrap();
    assert_eq!(last(), Some(true));
    // It may have been done.
    let failed = file("failed");
    cluster.data.iter().for_each(|server| server.drop_connections());
    let _ = failed.write_at(b"x", 0);
    drop(failed);
    assert_eq!(last(), Some(true));
}

/// A metadata server in front of the cluster's names that treats closes as `treat` says: `None` passes one on, `Some` answers
/// it, with nothing if there is nothing in it.
fn with_closes(
    cluster: &FakeCluster,
    treat: impl Fn() -> Option<Option<Answer>> + Clone + Send + Sync + 'static,
) -> (FakeServer, Arc<Client>) {
    let names = cluster.names.clone();
    let meta = FakeServer::start(FakeGreeting::of("meta"), move || {
        let (mut serve, treat) = (names.serve(), treat.clone());
        Box::new(move |connection: &FakeConnection, call: FakeCall| {
            let is_close = matches!(&call.call, Call::Meta { call: MetaCall::Close { .. }, .. });
            match is_close.then(&treat).flatten() {
                None => serve(connection, call),
                Some(answer) => {
                    answer.iter().for_each(|answer| connection.answer(call.id, answer, &[]));
                    Flow::Continue
                }
            }
        })
    });
    let meta = meta.unwrap();
    let mut config = cluster.config().clone();
    config.meta.address = meta.address().into();
    let client = Client::connect(&config, ClientOptions { via: Via::Direct, ..ClientOptions::default() }).unwrap();
    (meta, client)
}

/// Handles that were closed, in order.
fn closed(cluster: &FakeCluster) -> Vec<u64> {
    let handle = |call: &MetaCall| if let MetaCall::Close { handle, .. } = call { Some(*handle) } else { None };
    cluster.names.log().iter().filter_map(handle).collect()
}

#[test]
fn a_close_of_a_file_that_was_not_written_waits_for_no_answer_and_few_are_under_way() {
    let cluster = FakeCluster::start(2, 0, 6000).unwrap();
    let came = Arc::new(AtomicUsize::new(0));
    let here = came.clone();
    // It never answers one.
    let (_meta, client) = with_closes(&cluster, move || {
        here.fetch_add(1, Ordering::SeqCst);
        Some(None)
    });
    let file = |number: u32| client.create(format!("f{number}"), CreateOptions::default()).unwrap();
    let files: Vec<_> = (0..17).map(file).collect();
    let written = file(99);
    written.write_at(b"x", 0).unwrap();
    let started = Instant::now();
    let mut closes = files.into_iter().map(|file| file.close());
    assert!(closes.by_ref().take(16).all(|closed| closed.is_ok()));
    assert!(started.elapsed() < Duration::from_millis(5500), "{:?}", started.elapsed());
    // They are there before what comes after them.
    client.stat("f0").unwrap();
    assert_eq!(came.load(Ordering::SeqCst), 16);
    assert!(closes.next().unwrap().is_err(), "one more is waited for");
    assert!(written.close().is_err(), "and so is one of a file that was written");
}

#[test]
fn a_close_that_the_server_refused_is_made_again() {
    let cluster = FakeCluster::start(2, 0, 5000).unwrap();
    let refusals = Arc::new(AtomicUsize::new(3));
    let here = refusals.clone();
    let (_meta, client) = with_closes(&cluster, move || {
        let refuses = here.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        let busy = impresario_wire::Fault { errno: libc::EBUSY, message: "no memory".into() };
        refuses.then_some(Some(Answer::Fault(busy)))
    });
    let files: Vec<_> = (0..3).map(|n| client.create(format!("f{n}"), CreateOptions::default()).unwrap()).collect();
    files.into_iter().for_each(|file| file.close().unwrap());
    // Though the client makes no call any more.
    until("all are closed", || closed(&cluster).len() == 3);
    let mut handles = closed(&cluster);
    handles.dedup();
    assert_eq!((handles.len(), refusals.load(Ordering::SeqCst)), (3, 0));
}

#[test]
fn a_client_that_is_dropped_waits_for_its_closes() {
    let cluster = FakeCluster::start(2, 0, 5000).unwrap();
    let done = Arc::new(AtomicUsize::new(0));
    let here = done.clone();
    let (_meta, client) = with_closes(&cluster, move || {
        std::thread::sleep(Duration::from_millis(30));
        here.fetch_add(1, Ordering::SeqCst);
        None
    });
    let files: Vec<_> = (0..8).map(|n| client.create(format!("f{n}"), CreateOptions::default()).unwrap()).collect();
    files.into_iter().for_each(|file| file.close().unwrap());
    drop(client);
    assert_eq!(done.load(Ordering::SeqCst), 8);
}

#[test]
fn thousands_of_closes_in_a_row_leave_nothing_behind() {
    let cluster = FakeCluster::start(2, 0, 5000).unwrap();
    let client = connect(&cluster, Via::Direct);
    client.create("f", CreateOptions::default()).unwrap().close().unwrap();
    for round in 0..3 {
        let files: Vec<_> = (0..1000).map(|_| client.open("f", round == 1).unwrap()).collect();
        files.into_iter().for_each(|file| file.close().unwrap());
    }
    until("all are answered", || client.opens.closes_under_way() == 0);
    assert_eq!(closed(&cluster).len(), 3001);
    // One whose connection is lost is over.
    let file = client.open("f", true).unwrap();
    let lost = client.open("f", true).unwrap();
    file.close().unwrap();
    cluster.meta.as_ref().unwrap().drop_connections();
    lost.close().unwrap();
    until("nothing is waited for", || client.opens.closes_under_way() == 0);
    assert_eq!(client.stat("f").unwrap().size, 0);
}

/// The connection is lost again while an open file is registered on it.
#[test]
fn a_registration_that_is_lost_with_its_connection_fails_no_write() {
    let mut cluster = FakeCluster::start(2, 0, 5000).unwrap();
    let client = connect(&cluster, Via::Direct);
    let file = client.create("written", CreateOptions::default()).unwrap();
    file.write_at(b"before", 0).unwrap();
    cluster.meta.take().unwrap().kill();
    let (names, lost) = (cluster.names.clone(), Arc::new(AtomicUsize::new(0)));
    let count = lost.clone();
    let serve = move || {
        let (mut serve, lost) = (names.serve(), lost.clone());
        Box::new(move |connection: &FakeConnection, call: FakeCall| {
            let registers = matches!(&call.call, Call::Meta { call: MetaCall::Reopen { .. }, .. });
            match registers && lost.fetch_add(1, Ordering::SeqCst) < 4 {
                true => Flow::Close,
                false => serve(connection, call),
            }
        }) as Serve
    };
    let greeting = FakeGreeting::of(impresario_config::META_NAME);
    cluster.meta = Some(FakeServer::start_at(&cluster.config().meta.address, greeting, serve).unwrap());
    file.write_at(b"during", 6).unwrap();
    assert!(count.load(Ordering::SeqCst) > 4);
    file.close().unwrap();
}

#[test]
fn a_lost_io_node_is_replaced_while_many_write() {
    let mut cluster = FakeCluster::start(3, 3, 6000).unwrap();
    let clients: Vec<_> = (0..3).map(|i| connect(&cluster, Via::IoNode(i))).collect();
    std::thread::scope(|scope| {
        for (number, client) in clients.iter().enumerate() {
            scope.spawn(move || {
                let file = client.create(format!("f{number}"), CreateOptions::default()).unwrap();
                for i in 0..150u64 {
                    file.write_at(&content(i * 10_000, 10_000), i * 10_000).unwrap();
                    std::thread::sleep(Duration::from_millis(4));
                }
                let mut back = vec![0; 1_500_000];
                assert_eq!(file.read_at(&mut back, 0).unwrap(), 1_500_000);
                assert!(back == content(0, 1_500_000));
                file.close().unwrap();
            });
        }
        std::thread::sleep(Duration::from_millis(150));
        cluster.io.remove(0).kill();
        std::thread::sleep(Duration::from_millis(200));
        cluster.data[1].drop_connections();
    });
}

#[test]
fn a_lost_answer_to_a_change_is_given_again() {
    // Every change is done, but its first answer is lost.
    let names = Arc::new(FakeNames::new(Vec::new()));
    let cluster = FakeCluster::start(1, 0, 4000).unwrap();
    let done = Arc::new(impresario_base::lock::Mutex::new(std::collections::HashSet::new()));
    let meta = FakeServer::start(FakeGreeting::of("meta"), move || {
        let (mut inner, done) = (names.serve(), done.clone());
        Box::new(move |connection, call| {
            let text = match &call.call {
                Call::Meta { call, .. } => format!("{call:?}"),
                other => format!("{other:?}"),
            };
            let is_change =
                ["Create", "Mkdir", "Unlink", "Rmdir", "Rename", "Symlink"].iter().any(|c| text.contains(c));
            if is_change && done.lock().insert(text) {
                connection.mute(true);
                inner(connection, call);
                connection.mute(false);
                return Flow::Close;
            }
            inner(connection, call)
        })
    })
    .unwrap();
    let mut config = cluster.config().clone();
    config.meta.address = meta.address().into();
    let client = Client::connect(&config, ClientOptions::default()).unwrap();
    client.mkdir("d", 0o755, 0, 0).unwrap();
    client.create("d/f", CreateOptions { exclusive: true, ..CreateOptions::default() }).unwrap();
    client.symlink("d/s", "f", 0, 0).unwrap();
    client.rename("d/f", "d/g", false).unwrap();
    client.unlink("d/g").unwrap();
    client.unlink("d/s").unwrap();
    client.rmdir("d").unwrap();
    assert_eq!(client.list("").unwrap(), []);
    assert_eq!(client.unlink("nothing").unwrap_err().errno(), libc::ENOENT, "its first answer was lost too");
    assert_eq!(client.unlink("nothing").unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn questions_to_one_server_need_only_its_address() {
    let cluster = FakeCluster::start(1, 0, 2000).unwrap();
    let timeout = Duration::from_secs(2);
    assert_eq!(crate::admin::status(&Access::default(), cluster.data[0].address(), timeout).unwrap(), "{}");
    assert_eq!(crate::admin::status(&Access::default(), &cluster.config().meta.address, timeout).unwrap(), "{}");
    let policy = impresario_sched::PolicySpec::named("twins").with("window_us", 1000);
    let error = crate::admin::set_policy(&Access::default(), cluster.data[0].address(), &policy, timeout).unwrap_err();
    assert_eq!(error.errno(), libc::ENOSYS);
    assert!(
        crate::admin::set_disk_order(&Access::default(), "nonsense", "arrival", timeout)
            .unwrap_err()
            .to_string()
            .contains("host:port")
    );
}

/// Via I/O nodes and without.
fn ways() -> [(usize, Via); 2] {
    [(2, Via::IoNode(0)), (0, Via::Direct)]
}

#[test]
fn data_lost_by_a_data_server_are_told_of_whichever_way_the_sync_goes() {
    for way in ["another I/O node", "straight", "an I/O node instead"] {
        let mut cluster = FakeCluster::start(1, 2, 3_000).unwrap();
        let straight = AllocationRule { jobs: vec![1], ..AllocationRule::default() };
        let job = u64::from(way == "an I/O node instead");
        let mut config = cluster.config().clone();
        config.allocation.rules.push(straight.clone());
        let client =
            Client::connect(&config, ClientOptions { job, placement_seed: 0, ..ClientOptions::default() }).unwrap();
        let file = client.create("f", CreateOptions::default()).unwrap();
        file.write_at(b"acknowledged", 0).unwrap();
        match way {
            "another I/O node" => drop(cluster.io.remove(0)),
            "straight" => {
                config.allocation.rules = vec![AllocationRule::default()];
                assert!(client.reallocate(&config).unwrap() && client.is_direct());
            }
            _ => {
                config.allocation.rules.clear();
                assert!(client.reallocate(&config).unwrap() && !client.is_direct());
            }
        }
        // The data server's machine restarts.
        reboot(&mut cluster, 9);
        let error = file.sync().unwrap_err();
        assert_eq!(error.errno(), libc::EIO, "{way}: {error}");
        assert!(error.to_string().contains("restarted before a sync"), "{way}: {error}");
        file.write_at(b"written again", 0).unwrap();
        file.sync().unwrap();
    }
}

/// The data server of a cluster that has one is started again, on another boot of its machine.
fn reboot(cluster: &mut FakeCluster, boot: u64) {
    let address = cluster.data[0].address().to_string();
    drop(cluster.data.remove(0));
    let objects = cluster.objects[0].clone();
    let greeting = FakeGreeting { incarnation: boot << 32, ..FakeGreeting::of("data.0") };
    cluster.data.push(FakeServer::start_at(&address, greeting, move || objects.serve()).unwrap());
}

/// What a client has cut, extended, allocated or punched is to be synced like what it has written.
#[test]
fn lost_truncations_and_changes_of_space_are_told_of_like_lost_writes() {
    for (io_nodes, via) in ways() {
        type Change = fn(&Arc<Client>, &crate::File);
        let changes: [(&str, Change); 5] = [
            ("a cut", |_, file| assert_eq!(file.set_len(100).unwrap().size, 100)),
            ("an extension", |_, file| assert_eq!(file.set_len(100_000).unwrap().size, 100_000)),
            ("a cut by name", |client, _| {
                let set = SetAttr { size: Some(7), ..SetAttr::default() };
                assert_eq!(client.set_attr("f", set).unwrap().size, 7);
            }),
            ("a hole", |_, file| file.change_space(SpaceChange::Punch, 0, 4096).unwrap()),
            ("storage", |_, file| {
                file.change_space(SpaceChange::Allocate { keep_size: false }, 0, 50_000).unwrap();
            }),
        ];
        let mut cluster = FakeCluster::start(1, io_nodes, 3_000).unwrap();
        let client = connect(&cluster, via);
        let file = client.create("f", CreateOptions::default()).unwrap();
        file.write_at(&[1; 20_000], 0).unwrap();
        file.sync().unwrap();
        for ((what, change), boot) in changes.into_iter().zip(2..) {
            // Of a data server as it was first: the metadata server names that.
            reboot(&mut cluster, 1);
            change(&client, &file);
            file.sync().unwrap_or_else(|error| panic!("{via:?}: {what}: {error}"));
            change(&client, &file);
            reboot(&mut cluster, boot);
            let error = file.sync().expect_err(what);
            assert_eq!(error.errno(), libc::EIO, "{via:?}: {what}: {error}");
            assert!(error.to_string().contains("restarted before a sync"), "{via:?}: {what}: {error}");
            file.sync().unwrap();
            reboot(&mut cluster, 1);
            // A sync by another client fails meanwhile.
            change(&client, &file);
            cluster.objects[0].fail_next_sync(file.key());
            let other = connect(&cluster, via).open("f", true).unwrap();
            other.write_at(b"x", 0).unwrap();
            assert_eq!(other.sync().unwrap_err().errno(), libc::EIO, "{via:?}: {what}");
            assert_eq!(file.sync().expect_err(what).errno(), libc::EIO, "{via:?}: {what}");
            change(&client, &file);
            file.sync().unwrap_or_else(|error| panic!("{via:?}: {what}, after a loss: {error}"));
        }
    }
}

/// The metadata server has asked the data servers, which have removed the objects of a file while its client was away.
#[test]
fn a_file_whose_objects_are_removed_is_stale() {
    let mut cluster = FakeCluster::start(1, 0, 4000).unwrap();
    let client = connect(&cluster, Via::Direct);
    let file = client.create("f", CreateOptions::default()).unwrap();
    let names = cluster.names.clone();
    let serve = move || {
        let mut serve = names.serve();
        Box::new(move |connection: &FakeConnection, call: FakeCall| match &call.call {
            Call::Meta { call: MetaCall::GetAttr { .. } | MetaCall::SetAttr { .. }, .. } => {
                connection.answer(call.id, &crate::testing::refuse(libc::EIDRM, "removed"), &[]);
                Flow::Continue
            }
            _ => serve(connection, call),
        }) as Serve
    };
    cluster.meta.take().unwrap().kill();
    let greeting = FakeGreeting::of(impresario_config::META_NAME);
    cluster.meta = Some(FakeServer::start_at(&cluster.config().meta.address, greeting, serve).unwrap());
    assert_eq!(file.attr().unwrap_err().errno(), libc::ESTALE);
    assert_eq!(file.set_len(3).unwrap_err().errno(), libc::ESTALE);
}

#[test]
fn every_open_file_is_told_of_a_failed_sync_once() {
    for (io_nodes, via) in ways() {
        let cluster = FakeCluster::start(2, io_nodes, 3_000).unwrap();
        let connect = || Client::connect(cluster.config(), ClientOptions { via, ..ClientOptions::default() }).unwrap();
        let (client, other) = (connect(), connect());
        let first = client.create("f", CreateOptions::default()).unwrap();
        let (second, elsewhere) = (client.open("f", true).unwrap(), other.open("f", true).unwrap());
        for file in [&first, &elsewhere] {
            file.write_at(&[1; 200_000], 0).unwrap();
        }
        cluster.objects[0].fail_next_sync(first.key());
        assert_eq!(first.sync().unwrap_err().errno(), libc::EIO, "{via:?}");
        first.sync().unwrap();
        assert_eq!(second.sync().unwrap_err().errno(), libc::EIO, "{via:?}: another open of the same client");
        second.sync().unwrap();
        assert_eq!(elsewhere.sync().unwrap_err().errno(), libc::EIO, "{via:?}: another client");
        elsewhere.sync().unwrap();
        let later = client.open("f", true).unwrap();
        later.write_at(b"new", 0).unwrap();
        later.sync().unwrap();
    }
}
