//! Adding a data server to a cluster while clients write: old files keep their servers, new files are on all.

use std::fs;
use std::sync::Arc;

use crate::support::{self, Cluster, Worker, client, pattern, read_file, run, write_file};
use impresario_client::{Client, ClientError};
use impresario_config::{Config, Data};
use impresario_testing::{free_address, until};

const NEW: &str = "data.2";

fn servers_of(client: &Arc<Client>, name: &str) -> (u16, u16) {
    let layout = client.open(name.as_bytes(), false).unwrap().layout();
    (layout.servers, layout.pcount)
}

/// The procedure of doc/DEPLOYING.md, with clients that were there before and go on.
fn is_added_while_clients_write(io: usize) {
    let mut cluster = Cluster::start(2, io, |_| {});
    let old = pattern(1, 1, 0, 700_000);
    let before = client(&cluster.config, 1);
    write_file(&before, "old", &old);
    let kept_open = before.open(b"old", true).unwrap();
    let writing = client(&cluster.config, 2);
    let writer = Worker::start(move |rounds| {
        while let Some(round) = rounds.next() {
            let name = format!("w{}", round % 20);
            let _ = writing.unlink(name.as_bytes());
            let data = pattern(round, 2, 0, 400_000);
            write_file(&writing, &name, &data);
            assert!(read_file(&writing, &name) == data, "round {round}");
        }
    });

    let address = free_address();
    cluster.config.data.push(Data::new(NEW, address, cluster.dir.path().join(NEW)));
    cluster.rewrite();
    let ran = run(["store", "init", cluster.path.to_str().unwrap(), "--name", NEW]);
    assert_eq!(ran.code, 0, "{ran:?}");
    cluster.launch(NEW);
    cluster.await_answer(NEW);
    for i in 0..io {
        let name = format!("io.{i}");
        cluster.kill(&name);
        cluster.restart(&name);
    }
    assert_eq!(servers_of(&before, "old"), (2, 2));
    cluster.kill("meta");
    cluster.restart("meta");
    writer.goes_on(2);

    let new = pattern(3, 1, 0, 900_000);
    write_file(&before, "new", &new);
    assert_eq!((servers_of(&before, "new"), servers_of(&before, "old")), ((3, 3), (2, 2)));
    assert!(cluster.state("meta")["stores"][NEW].is_string(), "{}", cluster.state("meta")["stores"]);
    kept_open.write_at(b"changed", 100_000).unwrap();
    kept_open.sync().unwrap();
    kept_open.close().unwrap();
    let mut old = old;
    old[100_000..100_007].copy_from_slice(b"changed");
    writer.goes_on(2);
    writer.stop();
    for (client, who) in [(before, "from before"), (client(&cluster.config, 3), "a new one")] {
        assert!(read_file(&client, "old") == old && read_file(&client, "new") == new, "{who}");
    }
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
    names.iter().for_each(|name| cluster.kill(name));
    let ran = run(["fsck", cluster.path.to_str().unwrap()]);
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn a_data_server_is_added_while_clients_write() {
    is_added_while_clients_write(0);
}

#[test]
fn a_data_server_is_added_while_clients_write_through_io_nodes() {
    is_added_while_clients_write(2);
}

#[test]
fn a_client_whose_configuration_is_older_than_a_file_is_told_so() {
    let mut cluster = Cluster::start(1, 1, |_| {});
    let old = cluster.config.clone();
    let address = free_address();
    cluster.config.data.push(Data::new("data.1", address, cluster.dir.path().join("data.1")));
    cluster.rewrite();
    assert_eq!(run(["store", "init", cluster.path.to_str().unwrap(), "--name", "data.1"]).code, 0);
    cluster.launch("data.1");
    cluster.await_answer("data.1");
    cluster.kill("meta");
    cluster.restart("meta");
    let direct = support::client_via(&cluster.config, 1, impresario_client::Via::Direct);
    write_file(&direct, "a", b"x");
    // The I/O node was not restarted; and a client has a copy of the file from before.
    let file = client(&cluster.config, 2).open(b"a", false).unwrap();
    let error = file.read_at(&mut [0; 1], 0).unwrap_err();
    assert!(error.to_string().contains("restart it with the present configuration"), "{error}");
    let copy = cluster.dir.path().join("copy.toml");
    fs::write(&copy, old.to_toml()).unwrap();
    let behind = support::client_via(&Config::load(&copy).unwrap(), 3, impresario_client::Via::Direct);
    let file = behind.open(b"a", false).unwrap();
    let error = file.read_at(&mut [0; 1], 0).unwrap_err();
    assert!(error.to_string().contains("copy the present configuration to this machine"), "{error}");
    // A file in another order is not used.
    fs::write(&copy, cluster.config.to_toml().replace("\"data.0\"", "\"data.9\"")).unwrap();
    let said = |error: ClientError| error.to_string().contains("add new ones behind the others");
    until("the file is read", || file.read_at(&mut [0; 1], 0).is_err_and(said));
    fs::write(&copy, cluster.config.to_toml()).unwrap();
    until("the file is read again", || file.read_at(&mut [0; 1], 0).is_ok_and(|len| len == 1));
}
