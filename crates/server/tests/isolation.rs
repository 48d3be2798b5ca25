//! A data server that hangs delays what needs it, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::Cluster;
use impresario_client::{Client, ClientOptions, CreateOptions, Locked, Via};
use impresario_config::{Config, Export, Security};
use impresario_testing::link::Link;
use impresario_transport::{Keys, key_file_name};
use impresario_wire::message::SetAttr;
use impresario_wire::{FileLock, KeyRole, LayoutRequest, SetTime};

fn connect(cluster: &Cluster) -> Arc<Client> {
    Client::connect(&cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap()
}

/// Creates a file on one data server, writes it, closes and opens it, cuts it: all that asks data servers.
fn cycle(client: &Arc<Client>, name: &str) {
    let layout = LayoutRequest { base: Some(0), pcount: Some(1), ssize_bytes: None };
    let file = client.create(name, CreateOptions { layout: Some(layout), ..Default::default() }).unwrap();
    file.write_at(b"some bytes", 0).unwrap();
    assert_eq!(file.attr().unwrap().size, 10);
    file.close().unwrap();
    let file = client.open(name, true).unwrap();
    file.set_len(3).unwrap();
    file.close().unwrap();
    assert_eq!(client.stat(name).unwrap().size, 3);
}

/// How long locks are kept for a client that does not renew them: long for a busy machine, short for a test.
const LEASE: Duration = Duration::from_millis(1500);

/// Two data servers; the metadata server sees the second one through a link that can hang.
fn start() -> (Cluster, Link, impresario_server::Started) {
    start_with(|_| {})
}

fn start_with(change: impl FnOnce(&mut Config)) -> (Cluster, Link, impresario_server::Started) {
    let cluster = Cluster::start(2, |config| {
        config.cluster.request_timeout_ms = 40_000;
        config.meta.lock_lease_ms = Some(LEASE.as_millis() as u64);
        change(config);
    });
    let hung = Link::to(cluster.address(1)).unwrap();
    let mut seen_by_meta = cluster.config.clone();
    seen_by_meta.data[1].address = hung.address().into();
    let meta = impresario_server::start(&seen_by_meta, "meta").unwrap();
    (cluster, hung, meta)
}

/// A file on the second data server, written and open.
fn written(client: &Arc<Client>, name: &str) -> impresario_client::File {
    let layout = LayoutRequest { base: Some(1), pcount: Some(1), ssize_bytes: None };
    let file = client.create(name, CreateOptions { layout: Some(layout), ..Default::default() }).unwrap();
    file.write_at(b"x", 0).unwrap();
    file
}

/// The length of a file that is being written is asked from its data servers, by handle or by name.
#[test]
fn a_call_that_waits_for_a_hung_server_delays_no_other_of_its_connection() {
    let (cluster, hung, _meta) = start();
    let client = connect(&cluster);
    let file = written(&client, "waits");
    hung.hold();
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = client.stat("waits");
            ended.fetch_add(1, Ordering::SeqCst);
        });
        scope.spawn(|| {
            let _ = file.attr();
            ended.fetch_add(1, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(200));
        let made =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| client.mkdir("beside", 0o755, 0, 0).unwrap()));
        let had_ended = ended.load(Ordering::SeqCst);
        hung.heal();
        made.unwrap();
        assert_eq!(had_ended, 0, "both calls wait still");
    });
}

/// New files wait after a restart for data servers that have not answered yet.
#[test]
fn a_create_that_waits_for_data_servers_delays_no_other_call_of_its_connection() {
    let mut cluster = Cluster::start(2, |config| config.cluster.request_timeout_ms = 40_000);
    (0..2).for_each(|index| cluster.stop_data(index));
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let client = connect(&cluster);
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let made = client.create("waits", CreateOptions::default());
            ended.fetch_add(1, Ordering::SeqCst);
            made
        });
        std::thread::sleep(Duration::from_millis(200));
        let beside = client.mkdir("beside", 0o755, 0, 0);
        let had_ended = ended.load(Ordering::SeqCst);
        (0..2).for_each(|index| cluster.start_data(index));
        beside.unwrap();
        assert_eq!(had_ended, 0, "the create waits still");
        waits.join().unwrap().unwrap();
    });
}

/// The same through an I/O node, which passes the calls of a client on over one connection.
#[test]
fn a_call_that_waits_behind_an_io_node_delays_no_other_and_no_renewal_of_a_lease() {
    let (mut cluster, hung, _meta) = start();
    let _io = cluster.start_io(|_| {});
    let connect = || Client::connect(&cluster.config, ClientOptions { via: Via::IoNode(0), ..Default::default() });
    let (client, other) = (connect().unwrap(), connect().unwrap());
    let beside = LayoutRequest { base: Some(0), pcount: Some(1), ssize_bytes: None };
    let beside = CreateOptions { layout: Some(beside), ..CreateOptions::default() };
    let (_waits, locked) = (written(&client, "waits"), client.create("locked", beside).unwrap());
    let lock = FileLock { owner: 1, pid: 1, start: 0, end: 9, exclusive: true };
    let soon = || Instant::now() + Duration::from_secs(10);
    assert!(matches!(locked.lock(lock, false, soon()).unwrap(), Locked::Granted { .. }));
    hung.hold();
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = client.stat("waits");
            ended.fetch_add(1, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(200));
        let beside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let began = Instant::now();
            client.mkdir("beside", 0o755, 0, 0).unwrap();
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
            while began.elapsed() < 2 * LEASE {
                std::thread::sleep(LEASE / 10);
                locked.write_at(b"locked", 0).unwrap();
            }
            let seen = other.open("locked", true).unwrap();
            let lock = FileLock { owner: 2, ..lock };
            assert!(matches!(seen.lock(lock, false, soon()).unwrap(), Locked::Held(_)), "the lease was renewed");
            assert!(!locked.is_lost());
        }));
        let had_ended = ended.load(Ordering::SeqCst);
        hung.heal();
        beside.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert_eq!(had_ended, 0, "the first call waits still");
    });
}

#[test]
fn files_on_other_servers_are_served_while_64_callers_wait_for_a_hung_one() {
    const CALLERS: usize = 64;
    const CYCLES: usize = 500;
    let (cluster, hung, _meta) = start();
    let waiting: Vec<_> = (0..CALLERS).map(|n| written(&connect(&cluster), &format!("waits.{n}"))).collect();
    let client = connect(&cluster);
    let began = Instant::now();
    (0..CYCLES).for_each(|n| cycle(&client, &format!("before.{n}")));
    let before = began.elapsed();

    hung.hold();
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for file in &waiting {
            let ended = &ended;
            scope.spawn(move || {
                // Its length is asked from the data server, which says nothing until it goes on.
                let _ = file.attr();
                ended.fetch_add(1, Ordering::SeqCst);
            });
        }
        let began = Instant::now();
        let cycles = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..CYCLES).for_each(|n| cycle(&client, &format!("beside.{n}")));
        }));
        let (beside, had_ended) = (began.elapsed(), ended.load(Ordering::SeqCst));
        hung.heal();
        cycles.unwrap();
        println!("{CYCLES} cycles: {before:?} before, {beside:?} beside {CALLERS} callers of a hung server");
        assert_eq!(had_ended, 0, "all callers of the hung server wait still");
    });
    drop(waiting);
}

/// All but one of them wait for the call before theirs on the same file, not for the data server itself.
#[test]
fn files_on_other_servers_are_served_while_64_callers_wait_at_one_file_of_a_hung_one() {
    const CALLERS: usize = 64;
    const CYCLES: usize = 50;
    let (cluster, hung, _meta) = start();
    let first = written(&connect(&cluster), "waits");
    let callers: Vec<_> = (1..CALLERS).map(|_| connect(&cluster)).collect();
    let mut waiting: Vec<_> = callers.iter().map(|client| client.open("waits", true).unwrap()).collect();
    waiting.push(first);
    let (client, opener) = (connect(&cluster), connect(&cluster));
    cycle(&client, "before");

    hung.hold();
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (n, file) in waiting.iter().enumerate() {
            let (ended, opener) = (&ended, &opener);
            scope.spawn(move || {
                let _ = match n % 4 {
                    0 => file.append(b"record").map(drop),
                    1 => file.sync(),
                    2 => file.set_attr(&SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() }).map(drop),
                    _ => opener.open("waits", true).map(drop),
                };
                ended.fetch_add(1, Ordering::SeqCst);
            });
        }
        std::thread::sleep(Duration::from_millis(200));
        let cycles = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..CYCLES).for_each(|n| cycle(&client, &format!("beside.{n}")));
        }));
        let had_ended = ended.load(Ordering::SeqCst);
        hung.heal();
        cycles.unwrap();
        assert_eq!(had_ended, 0, "all callers of the hung server wait still");
    });
}

/// Names are kept from being moved while a client's users are checked, but not while data servers are asked.
#[test]
fn names_are_changed_and_leases_renewed_while_squashed_clients_wait_for_a_hung_server() {
    let keys = Keys::draw().unwrap();
    let store = |folder: &std::path::Path, roles: &[KeyRole]| {
        roles.iter().for_each(|role| keys.for_role(*role).store(&folder.join(key_file_name(*role))).unwrap());
    };
    let (cluster, hung, _meta) = start_with(|config| {
        config.cluster.security = Security::Key;
        config.cluster.key_dir = config.meta.dir.with_file_name("keys");
        config.export = vec![Export::default()];
        store(&config.cluster.key_dir, &KeyRole::ALL);
    });
    let mut admin = cluster.config.clone();
    admin.cluster.key_dir = cluster.dir.path().join("admin");
    store(&admin.cluster.key_dir, &[KeyRole::Admin]);
    let admin = Client::connect(&admin, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap();
    admin.mkdir("d", 0o777, 0, 0).unwrap();
    let [waits, moves, makes] = std::array::from_fn(|_| connect(&cluster));
    let file = written(&waits, "d/waits");
    moves.mkdir("d/old", 0o777, 7, 7).unwrap();
    let beside = LayoutRequest { base: Some(0), pcount: Some(1), ssize_bytes: None };
    let locked = makes.create("d/locked", CreateOptions { layout: Some(beside), ..CreateOptions::default() }).unwrap();
    let lock = FileLock { owner: 1, pid: 1, start: 0, end: 9, exclusive: true };
    let soon = || Instant::now() + Duration::from_secs(10);
    assert!(matches!(locked.lock(lock, false, soon()).unwrap(), Locked::Granted { .. }));
    let earlier = || SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };

    hung.hold();
    let ended = AtomicUsize::new(0);
    let waits_for = |call: &(dyn Fn() + Sync)| {
        call();
        ended.fetch_add(1, Ordering::SeqCst);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| waits_for(&|| drop(file.set_attr(&earlier()))));
        scope.spawn(|| waits_for(&|| drop(waits.set_attr("d/waits", earlier()))));
        scope.spawn(|| waits_for(&|| drop(waits.link("d/waits", "d/another"))));
        std::thread::sleep(Duration::from_millis(200));
        let beside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let began = Instant::now();
            moves.rename("d/old", "d/new", false).unwrap();
            makes.mkdir("d/beside", 0o755, 7, 7).unwrap();
            while began.elapsed() < 2 * LEASE {
                std::thread::sleep(LEASE / 10);
                locked.write_at(b"locked", 0).unwrap();
                makes.mkdir(format!("d/beside.{:?}", began.elapsed()), 0o755, 7, 7).unwrap();
            }
            assert!(!locked.is_lost());
        }));
        let had_ended = ended.load(Ordering::SeqCst);
        hung.heal();
        beside.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert_eq!(had_ended, 0, "all three wait still");
    });
    assert_eq!(waits.stat("d/waits").unwrap().nlink, 2, "the link was made in the end");
}
