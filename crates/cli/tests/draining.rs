//! `impresario store drain`: a data server is emptied while clients work, programs and servers are killed, and the server is
//! taken away.

mod support;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use impresario_client::Client;
use impresario_config::{Config, DataState};
use impresario_wire::SetAttr;
use support::{Cluster, PATIENCE, Process, Ran, client, eventually, pattern, read_file, run, write_file};

const NAME: &str = "data.1";
const NUMBER: u16 = 1;

fn start(io: usize) -> Cluster {
    Cluster::start(3, io, |config| {
        config.cluster.request_timeout_ms = 20_000;
        config.cluster.stripe_bytes = 16 << 10;
    })
}

/// Writes the state of the server into the configuration file, as an administrator does while everything runs.
fn say(cluster: &mut Cluster, state: DataState) {
    cluster.config.data[usize::from(NUMBER)].state = state;
    fs::write(&cluster.path, cluster.config.to_toml()).unwrap();
    cluster.config = Config::load(&cluster.path).unwrap_or_else(|e| panic!("{e}"));
    // Programs look at the file five times a second.
    std::thread::sleep(Duration::from_millis(500));
}

fn drain_words(cluster: &Cluster, more: &[&str]) -> Vec<String> {
    let words = ["store", "drain", cluster.path.to_str().unwrap(), "--name", NAME, "--progress"];
    words.iter().chain(more).map(|word| word.to_string()).collect()
}

fn drain(cluster: &Cluster, more: &[&str]) -> Ran {
    run(drain_words(cluster, more))
}

/// The metadata server takes no file away within half a minute of its start: clients may have files open.
fn wait_for_grace() {
    std::thread::sleep(Duration::from_secs(31));
}

fn uses_it(client: &Arc<Client>, path: &str) -> bool {
    client.open(path.as_bytes(), false).unwrap().layout().position_of(NUMBER).is_some()
}

fn objects_left(cluster: &Cluster) -> usize {
    fn files(dir: &std::path::Path) -> usize {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
        entries.map(|entry| if entry.file_type().unwrap().is_dir() { files(&entry.path()) } else { 1 }).sum()
    }
    files(&cluster.config.data[usize::from(NUMBER)].dir.join("objects"))
}

/// A tree of files: small, long, sparse, empty, with two names.
fn fill(client: &Arc<Client>) -> Vec<(String, Vec<u8>)> {
    client.mkdir(b"d", 0o755, 0, 0).unwrap();
    let mut files: Vec<_> = (0..40)
        .map(|i| {
            (format!("{}f{i}", if i % 2 == 0 { "d/" } else { "" }), pattern(i, 1, 0, (i as usize * 13_331) % 300_000))
        })
        .collect();
    files.push(("big".into(), pattern(100, 1, 0, 20 << 20)));
    for (path, data) in &files {
        write_file(client, path, data);
    }
    write_file(client, "sparse", b"begin");
    client.set_attr(b"sparse", SetAttr { size: Some(5 << 20), ..SetAttr::default() }).unwrap();
    let file = client.open(b"sparse", true).unwrap();
    file.write_at(b"middle", 3 << 20).unwrap();
    file.close().unwrap();
    let mut sparse = vec![0; 5 << 20];
    sparse[..5].copy_from_slice(b"begin");
    sparse[3 << 20..(3 << 20) + 6].copy_from_slice(b"middle");
    files.push(("sparse".into(), sparse));
    client.link(b"f1", b"d/other").unwrap();
    files.push(("d/other".into(), files[1].1.clone()));
    files
}

fn check_all(client: &Arc<Client>, files: &[(String, Vec<u8>)], when: &str) {
    for (path, data) in files {
        assert!(read_file(client, path) == *data, "{path} {when}");
    }
}

fn fsck_is_clean(cluster: &Cluster) {
    let ran = run(["fsck", cluster.path.to_str().unwrap(), "--online", "--min-age", "0s"]);
    assert_eq!(ran.code, 0, "{ran:?}");
}

fn is_emptied_while_clients_work(io: usize) {
    let mut cluster = start(io);
    let before = client(&cluster.config, 1);
    let mut files = fill(&before);
    let attr = before.stat(b"d/f2").unwrap();
    let refused = drain(&cluster, &[]);
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("write state = \"draining\""), "{refused:?}");
    say(&mut cluster, DataState::Draining);
    write_file(&before, "new", b"new");
    assert!(uses_it(&before, "big") && !uses_it(&before, "new"));
    files.push(("new".into(), b"new".to_vec()));
    wait_for_grace();

    let stop = Arc::new(AtomicBool::new(false));
    let mut workers = Vec::new();
    for worker in 0..2u64 {
        let (until, client) = (stop.clone(), client(&cluster.config, 10 + worker));
        let (files, wanted) = (files.clone(), files.len());
        workers.push(std::thread::spawn(move || {
            let mut rounds = 0u64;
            while !until.load(Ordering::Relaxed) {
                // Rewritten in place and read back, new ones, and reading what others have.
                let (name, data) = (format!("w{worker}.{}", rounds % 5), pattern(rounds, worker, 0, 150_000));
                write_file(&client, &name, &data);
                assert!(read_file(&client, &name) == data, "{name} round {rounds}");
                let (path, data) = &files[(rounds as usize * 7) % wanted];
                assert!(read_file(&client, path) == *data, "{path} round {rounds}");
                rounds += 1;
            }
            rounds
        }));
    }
    let held = before.open(b"f3", true).unwrap();
    let ran = drain(&cluster, &["--once", "--rate", "0"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stdout.contains("f3: it is open for writing"), "{ran:?}");
    assert!(uses_it(&before, "f3"));
    held.write_at(b"changed", 7).unwrap();
    held.close().unwrap();
    files[3].1[7..14].copy_from_slice(b"changed");
    let ran = drain(&cluster, &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.stdout.contains("data.1 holds nothing any more"), "{ran:?}");
    stop.store(true, Ordering::Relaxed);
    for worker in workers {
        assert!(worker.join().unwrap() > 3);
    }
    assert_eq!(objects_left(&cluster), 0);
    check_all(&before, &files, "through a client from before");
    check_all(&client(&cluster.config, 20), &files, "through a new client");
    let now = before.stat(b"d/f2").unwrap();
    assert_eq!((now.ino, now.mode, now.size, now.mtime, now.nlink), (attr.ino, attr.mode, attr.size, attr.mtime, 1));
    assert_eq!(before.stat(b"f1").unwrap().nlink, 2);
    fsck_is_clean(&cluster);

    // It is taken away.
    cluster.kill(NAME);
    say(&mut cluster, DataState::Retired);
    let after = client(&cluster.config, 21);
    for (client, who) in [(&before, "from before"), (&after, "a new one")] {
        check_all(client, &files, who);
        let name = format!("after {who}");
        write_file(client, &name, &pattern(7, 7, 0, 100_000));
        assert!(read_file(client, &name) == pattern(7, 7, 0, 100_000));
        let file = client.open(name.as_bytes(), true).unwrap();
        file.sync().unwrap();
        file.close().unwrap();
        assert!(client.statfs().unwrap().total_bytes > 0);
        client.unlink(name.as_bytes()).unwrap();
    }
    fsck_is_clean(&cluster);
    let status = run(["status", cluster.path.to_str().unwrap()]);
    assert_eq!(status.code, 0, "{status:?}");
    assert!(!status.stdout.contains(NAME), "{status:?}");
    // Nor do servers need it that are started now.
    cluster.kill("meta");
    cluster.restart("meta");
    check_all(&client(&cluster.config, 22), &files, "after a restart");
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
    assert!(!names.iter().any(|name| name == NAME));
    names.iter().for_each(|name| cluster.kill(name));
    let ran = run(["fsck", cluster.path.to_str().unwrap(), "--min-age", "0s"]);
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn a_data_server_is_emptied_while_clients_work() {
    is_emptied_while_clients_work(0);
}

#[test]
fn a_data_server_is_emptied_while_clients_work_through_io_nodes() {
    is_emptied_while_clients_work(1);
}

/// The command, the metadata server and data servers are killed while files are copied; in the end all bytes are there, once.
#[test]
fn nothing_is_lost_or_doubled_when_any_of_them_is_killed() {
    let mut cluster = start(0);
    let client = client(&cluster.config, 1);
    let files = fill(&client);
    say(&mut cluster, DataState::Draining);
    wait_for_grace();
    let log = cluster.dir.path().join("drain.log");
    for (round, victim) in [None, None, Some("data.2"), Some(NAME), Some("meta")].into_iter().enumerate() {
        // Slow enough to be met in the middle of a file.
        let mut command = Process::start(drain_words(&cluster, &["--rate", "4m"]), &log);
        std::thread::sleep(Duration::from_millis(300 + 350 * round as u64));
        if let Some(victim) = victim {
            cluster.kill(victim);
        }
        command.kill();
        if let Some(victim) = victim {
            cluster.restart(victim);
        }
        check_all(&client, &files, &format!("after round {round}"));
    }
    // One last kill in the middle, and the metadata server with it, at the same instant.
    wait_for_grace();
    let mut command = Process::start(drain_words(&cluster, &["--rate", "4m"]), &log);
    std::thread::sleep(Duration::from_millis(900));
    cluster.kill("meta");
    command.kill();
    cluster.restart("meta");
    check_all(&client, &files, "after the last kill");
    let ran = eventually("the server is emptied", 3 * PATIENCE, || {
        let ran = drain(&cluster, &["--once", "--rate", "0"]);
        (ran.code == 0).then_some(ran)
    });
    assert!(ran.stdout.contains("holds nothing any more"), "{ran:?}");
    assert_eq!(objects_left(&cluster), 0);
    check_all(&client, &files, "in the end");
    check_all(&support::client(&cluster.config, 2), &files, "in the end, for a new client");
    // What interrupted copies left behind is removed, too.
    eventually("nothing is left over", PATIENCE, || {
        let ran = run(["fsck", cluster.path.to_str().unwrap(), "--online", "--min-age", "0s"]);
        (ran.code == 0).then_some(())
    });
}
