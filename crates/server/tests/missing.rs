//! An object that a data server has lost: what the file had there is an error, never zeros and never a shorter file.

use std::sync::Arc;

use crate::support::{Cluster, pattern};
use impresario_client::{Client, ClientOptions, CreateOptions, File, Via};

const SERVERS: usize = 4;

fn client(cluster: &Cluster, via: Via) -> Arc<Client> {
    Client::connect(&cluster.config, ClientOptions { via, ..ClientOptions::default() }).unwrap()
}

fn create(client: &Arc<Client>, path: &str) -> File {
    let options = CreateOptions { mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
    client.create(path, options).unwrap()
}

/// Removes the object of a file behind the back of its data server.
fn lose(cluster: &mut Cluster, key: u64, index: usize) {
    cluster.stop_data(index);
    let object = cluster.config.data[index].dir.join(format!("objects/{:02x}/{key:016x}", key & 0xff));
    std::fs::remove_file(object).unwrap();
    cluster.start_data(index);
}

#[track_caller]
fn is_lost<T: std::fmt::Debug>(read: Result<T, impresario_client::ClientError>) {
    let error = read.unwrap_err();
    assert_eq!(error.errno(), libc::EIO, "{error}");
    assert!(error.to_string().contains("is missing"), "{error}");
}

#[test]
fn a_lost_object_is_an_error_and_a_hole_is_zeros() {
    let mut cluster = Cluster::start(SERVERS, |config| config.cluster.request_timeout_ms = 5000);
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let nodes = [cluster.start_io(|io| io.split = false), cluster.start_io(|io| io.split = true)];
    let writer = client(&cluster, Via::Direct);
    let (file, bytes) = (create(&writer, "whole"), pattern(1, 1 << 20));
    file.write_at(&bytes, 0).unwrap();
    // A byte in one strip only: the other servers never had an object.
    let sparse = create(&writer, "sparse");
    sparse.write_at(b"x", 1 << 20).unwrap();
    sparse.close().unwrap();
    let (key, lost) = (file.key().0, file.layout().server_at(1));
    file.close().unwrap();
    lose(&mut cluster, key, usize::from(lost));
    drop((writer, nodes));
    let nodes = std::mem::take(&mut cluster.config.io);
    let _again: Vec<_> = nodes.into_iter().map(|io| cluster.start_io(|new| *new = io)).collect();

    for via in [Via::Direct, Via::IoNode(0), Via::IoNode(1)] {
        let client = client(&cluster, via);
        let file = client.open("whole", false).unwrap();
        assert_eq!(file.attr().unwrap().size, 1 << 20, "the name space knows the length");
        let mut into = vec![0xee; 1 << 20];
        is_lost(file.read_at(&mut into, 0));
        // Where the lost object was, and at the end of the file, of which nobody can be sure.
        is_lost(file.read_at(&mut into[..100], 65536));
        is_lost(file.read_at(&mut into[..100], 1 << 20));
        // A list reports it too, where lists are.
        let list = [(65536, 100), (0, 100)];
        if via == Via::Direct {
            is_lost(file.read_list(&list, &mut into[..200]));
        }
        // What other servers have is there.
        assert_eq!(file.read_at(&mut into[..65536], 0).unwrap(), 65536);
        assert!(into[..65536] == bytes[..65536]);

        let sparse = client.open("sparse", false).unwrap();
        assert_eq!(sparse.read_at(&mut into, 1).unwrap(), 1 << 20);
        assert!(into[..(1 << 20) - 1].iter().all(|byte| *byte == 0) && into[(1 << 20) - 1] == b'x');
    }

    // Nobody takes it for shorter, whoever opens it for writing; and it can be removed.
    let client = client(&cluster, Via::Direct);
    let file = client.open("whole", true).map(|file| file.attr());
    let told = file.and_then(|attr| attr).map(|attr| attr.size);
    assert!(told.as_ref().is_err() || told.as_ref().is_ok_and(|size| *size == 1 << 20), "{told:?}");
    client.unlink("whole").unwrap();
    drop(create(&client, "whole"));
}
