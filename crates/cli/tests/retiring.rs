//! A draining server without `impresario store drain`: new files skip it, old ones stay where they are, and `impresario fsck` tells what is
//! left there, also when it is retired too early.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Cluster, Rounds, Worker, client, new_file, pattern, read_file, run, write_file};
use impresario_client::{Client, CreateOptions};
use impresario_config::DataState;
use impresario_layout::Layout;
use impresario_testing::eventually;
use impresario_wire::LayoutRequest;
use serde_json::{Value, json};

const NAME: &str = "data.1";
const NUMBER: u16 = 1;

/// What an administrator does while everything runs.
fn set_state(cluster: &mut Cluster, state: DataState) {
    cluster.config.data[usize::from(NUMBER)].state = state;
    cluster.rewrite();
    // Programs look at the file five times a second.
    std::thread::sleep(Duration::from_millis(500));
}

fn layout_of(client: &Arc<Client>, name: &str) -> Layout {
    client.open(name.as_bytes(), false).unwrap().layout()
}

fn is_there(client: &Arc<Client>, name: &str) -> bool {
    layout_of(client, name).position_of(NUMBER).is_some()
}

fn without_new_files(cluster: &Cluster) -> Value {
    let status = cluster.state("meta");
    let found = status.get("data_servers_without_new_files").or(status.pointer("/meta/data_servers_without_new_files"));
    found.unwrap_or_else(|| panic!("{status}")).clone()
}

/// What `impresario fsck` says of the draining server.
fn left_there(cluster: &Cluster) -> Value {
    let ran = run(["fsck", cluster.path.to_str().unwrap(), "--online", "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["draining"].as_array().unwrap().len(), 1, "{report}");
    report["draining"][0].clone()
}

/// The files `w0` to `w19`, made and removed all the time.
fn write_on(client: &Arc<Client>, rounds: &Rounds) {
    while let Some(round) = rounds.next() {
        let name = format!("w{}", round % 20);
        let _ = client.unlink(name.as_bytes());
        let data = pattern(round, 2, 0, 400_000);
        write_file(client, &name, &data);
        assert!(read_file(client, &name) == data, "round {round}");
    }
}

fn is_drained_while_clients_write(io: usize) {
    let mut cluster = Cluster::start(3, io, |config| config.cluster.request_timeout_ms = 20_000);
    let before = client(&cluster.config, 1);
    let mut old = pattern(1, 1, 0, 700_000);
    write_file(&before, "old", &old);
    // It is striped over all servers too, though it has bytes on one only.
    write_file(&before, "small", b"x");
    let kept_open = before.open(b"old", true).unwrap();
    let whole = before.statfs().unwrap();
    let writing = client(&cluster.config, 2);
    let writer = Worker::start(move |rounds| write_on(&writing, rounds));
    assert_eq!(without_new_files(&cluster), json!([]));

    // No server is restarted.
    set_state(&mut cluster, DataState::Draining);
    eventually("the metadata server has seen it", || (without_new_files(&cluster) == json!([NUMBER])).then_some(()));
    let new = pattern(3, 1, 0, 900_000);
    for i in 0..6 {
        let name = format!("new{i}");
        write_file(&before, &name, &new);
        let layout = layout_of(&before, &name);
        assert_eq!((layout.servers, layout.pcount, layout.position_of(NUMBER)), (3, 2, None));
    }
    assert!(is_there(&before, "old") && is_there(&before, "small"), "old files keep their servers");
    kept_open.write_at(b"changed", 100_000).unwrap();
    kept_open.sync().unwrap();
    old[100_000..100_007].copy_from_slice(b"changed");
    // All servers are on one file system here, which is counted once and which those that are left can fill.
    let space = before.statfs().unwrap();
    let part = space.free_bytes as f64 / whole.free_bytes as f64;
    assert!((0.9..1.1).contains(&part), "{space:?} of {whole:?}");
    writer.goes_on(1);
    writer.stop();

    let left = left_there(&cluster);
    assert!(left["server"] == NAME && left["files"].as_u64() >= Some(2) && left["files_is_all"] == true, "{left}");
    // At least three of the eleven strips of one file, wherever its first is.
    assert!(left["objects"].as_u64() >= Some(1) && left["object_bytes"].as_u64() >= Some(3 << 16), "{left}");
    // Every file is copied by hand, which lays it out anew.
    kept_open.close().unwrap();
    let names = before.list(b"").unwrap().into_iter().map(|entry| String::from_utf8(entry.name).unwrap());
    for name in names.filter(|name| is_there(&before, name)).collect::<Vec<_>>() {
        write_file(&before, "copy", &read_file(&before, &name));
        before.rename(b"copy", name.as_bytes(), false).unwrap();
    }
    eventually("nothing is left there", || {
        let left = left_there(&cluster);
        (left["files"] == 0 && left["objects"] == 0 && left["object_bytes"] == 0).then_some(())
    });
    let ran = run(["fsck", cluster.path.to_str().unwrap(), "--online"]);
    assert!(ran.out.contains("data.1 is draining and empty") && ran.out.contains("store drain"), "{ran:?}");
    // That is noted before it may be retired.
    let ran = run(["store", "drain", cluster.path.to_str().unwrap(), "--name", NAME, "--wait", "5s"]);
    assert!(ran.code == 0 && ran.out.contains("copied 0 files") && ran.out.contains("state = \"retired\""), "{ran:?}");

    cluster.kill(NAME);
    set_state(&mut cluster, DataState::Retired);
    let check = |client: &Arc<Client>, who: &str| {
        assert!(read_file(client, "old") == old && read_file(client, "small") == b"x", "{who}");
        assert!((0..6).all(|i| read_file(client, &format!("new{i}")) == new), "{who}");
    };
    check(&before, "from before");
    write_file(&before, "after", &new);
    before.statfs().expect("a retired server is not asked");
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
    assert!(!names.iter().any(|name| name == NAME));
    for name in &names {
        cluster.kill(name);
        cluster.restart(name);
    }
    check(&client(&cluster.config, 3), "after restarts");
    check(&before, "from before, after restarts");
    write_file(&before, "after2", &new);
    assert!(!is_there(&before, "after2"));
    let ran = run(["status", cluster.path.to_str().unwrap()]);
    assert!(ran.code == 0 && !ran.out.contains(NAME), "{ran:?}");
    let ran = run(["serve", cluster.path.to_str().unwrap(), "--name", NAME]);
    assert!(ran.code == 1 && ran.err.contains("it is retired in the configuration"), "{ran:?}");
    let ran = run(["fsck", cluster.path.to_str().unwrap(), "--online"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    names.iter().for_each(|name| cluster.kill(name));
    let ran = run(["fsck", cluster.path.to_str().unwrap()]);
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn new_files_skip_a_draining_server_while_clients_write() {
    is_drained_while_clients_write(0);
}

#[test]
fn new_files_skip_a_draining_server_while_clients_write_through_io_nodes() {
    is_drained_while_clients_write(2);
}

#[test]
fn a_server_that_is_retired_too_early_is_told_and_comes_back_with_everything() {
    let mut cluster = Cluster::start(2, 0, |_| {});
    let data = pattern(1, 1, 0, 300_000);
    write_file(&client(&cluster.config, 1), "early", &data);
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
    names.iter().for_each(|name| cluster.kill(name));
    set_state(&mut cluster, DataState::Retired);
    let ran = run(["fsck", cluster.path.to_str().unwrap(), "--repair"]);
    assert!(ran.code == 4 && ran.out.contains("early: it is striped over data.1, which is retired"), "{ran:?}");
    let ran = run(["store", "init", cluster.path.to_str().unwrap(), "--name", NAME]);
    assert!(ran.code == 1 && ran.err.contains("is retired"), "{ran:?}");
    let ran = run(["serve", cluster.path.to_str().unwrap(), "--name", "meta"]);
    assert!(ran.code == 1 && ran.err.contains("was not found empty") && ran.err.contains("store drain"), "{ran:?}");
    set_state(&mut cluster, DataState::Draining);
    let ran = run(["fsck", cluster.path.to_str().unwrap()]);
    let told = "data.1 is draining: 1 file is striped over it; objects there: 1, bytes: ";
    assert!(ran.code == 0 && ran.out.contains(told), "{ran:?}");
    names.iter().for_each(|name| cluster.restart(name));
    let client = client(&cluster.config, 2);
    assert!(read_file(&client, "early") == data);
    write_file(&client, "late", &data);
    assert!(is_there(&client, "early") && !is_there(&client, "late"));
    // It gets files again.
    set_state(&mut cluster, DataState::Active);
    eventually("the metadata server has seen it", || (without_new_files(&cluster) == json!([])).then_some(()));
    write_file(&client, "again", &data);
    assert!(is_there(&client, "again"));
}

/// A server without objects is not done with while files are striped over it: the next write would make one there.
#[test]
fn a_server_with_no_object_is_still_needed_by_files_that_are_striped_over_it() {
    let mut cluster = Cluster::start(2, 0, |_| {});
    let client = client(&cluster.config, 1);
    let layout = LayoutRequest { base: Some(0), pcount: Some(2), ssize_bytes: None };
    let file = client.create(b"small", CreateOptions { layout: Some(layout), ..new_file(0o644) }).unwrap();
    file.write_at(b"x", 0).unwrap();
    set_state(&mut cluster, DataState::Draining);
    eventually("the metadata server has seen it", || (without_new_files(&cluster) == json!([NUMBER])).then_some(()));
    let left = left_there(&cluster);
    assert!(left["files"] == 1 && left["objects"] == 0, "{left}");
    let ran = run(["store", "drain", cluster.path.to_str().unwrap(), "--name", NAME, "--wait", "0s"]);
    assert!(ran.code == 1 && ran.out.contains("small: ") && ran.out.contains("is still needed"), "{ran:?}");
    // Retired all the same, it is taken for draining, and the next start of the metadata server is refused.
    set_state(&mut cluster, DataState::Retired);
    assert_eq!(without_new_files(&cluster), json!([NUMBER]));
    assert!(file.write_at(&[1; 200_000], 0).is_ok(), "it is still there");
    file.close().unwrap();
    cluster.kill("meta");
    let ran = run(["serve", cluster.path.to_str().unwrap(), "--name", "meta"]);
    assert!(ran.code == 1 && ran.err.contains("was not found empty"), "{ran:?}");
}
