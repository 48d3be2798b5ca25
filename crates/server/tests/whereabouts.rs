//! A folder that is moved, replaced or hidden while its server runs: nothing is acknowledged any more that nobody would find.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::support::{Cluster, SmallDisk, fault, pattern, sync};
use impresario_client::{Client, ClientOptions, CreateOptions, File, Via};
use impresario_config::{Config, Io, Tree, TreeBackend};
use impresario_server::StartError;
use impresario_testing::{free_address, until};
use impresario_wire::Answer;

const NEW: CreateOptions = CreateOptions { mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };

fn client(config: &Config, via: Via) -> Arc<Client> {
    Client::connect(config, ClientOptions { via, ..ClientOptions::default() }).unwrap()
}

/// Everything in a folder, made anew, as a backup that is restored.
fn restore(from: &Path, to: &Path) {
    let copied = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

#[test]
fn a_data_server_whose_folder_was_replaced_acknowledges_nothing() {
    type Replace = fn(&Path, &Path);
    let ways: [(&str, Replace); 3] = [
        ("moved away", |folder, aside| fs::rename(folder, aside).unwrap()),
        ("replaced by a copy", |folder, aside| {
            fs::rename(folder, aside).unwrap();
            restore(aside, folder);
        }),
        ("emptied and restored", |folder, aside| {
            restore(folder, aside);
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
            }
            restore(&aside.join("."), folder);
        }),
    ];
    let mut cluster = Cluster::start(3, |_| {});
    for (index, (way, replace)) in ways.into_iter().enumerate() {
        let (mut peer, folder) = (cluster.peer(index, 1), cluster.config.data[index].dir.clone());
        assert_eq!(peer.write(1, 1, 0, &pattern(1, 1000)), Answer::Written(1000));
        assert_eq!(peer.call(&sync(1), &[]).0, Answer::Done);
        replace(&folder, &folder.with_extension("aside"));
        until(way, || peer.write(1, 1, 0, &pattern(2, 1000)) != Answer::Written(1000));
        let (errno, message) = fault(peer.call(&sync(1), &[]).0);
        assert_eq!(errno, libc::EIO, "{way}: {message}");
        for words in [folder.to_str().unwrap(), "is not where it was", "start the server"] {
            assert!(message.contains(words), "{way}: {message}");
        }
        // An administrator may still ask how it is.
        assert_eq!(peer.status()["name"], format!("data.{index}"));
        drop(peer);
        cluster.stop_data(index);
    }
}

#[test]
fn a_server_over_whose_folder_something_was_mounted_acknowledges_nothing() {
    // What is mounted below it goes with it.
    let Some(disk) = SmallDisk::mount(c"size=16m") else { return };
    let folder = disk.at("data");
    let cluster = Cluster::start(1, |config| config.data[0].dir = folder.clone());
    let mut peer = cluster.peer(0, 1);
    assert_eq!(peer.write(1, 1, 0, b"bytes"), Answer::Written(5));
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &folder, "tmpfs", flags, c"size=1m").unwrap();
    until("it is noticed", || peer.write(1, 1, 0, b"bytes") != Answer::Written(5));
}

#[test]
fn a_metadata_server_whose_folder_was_replaced_acknowledges_nothing() {
    let cluster = Cluster::start(1, |_| {});
    let meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let client = client(&cluster.config, Via::Direct);
    client.create("before", NEW).and_then(File::close).unwrap();
    let folder = cluster.config.meta.dir.clone();
    let aside = folder.with_extension("aside");
    fs::rename(&folder, &aside).unwrap();
    restore(&aside, &folder);
    let mut made = 0;
    until("it is noticed", || {
        made += 1;
        client.mkdir(format!("d{made}"), 0o755, 0, 0).is_err()
    });
    let error = client.mkdir("after", 0o755, 0, 0).unwrap_err();
    assert_eq!(error.errno(), libc::EIO, "{error}");
    assert!(error.to_string().contains("is not where it was"), "{error}");
    drop((client, meta));
}

#[test]
fn an_io_node_whose_folder_was_replaced_acknowledges_nothing() {
    let top = tempfile::tempdir().unwrap();
    let folder = top.path().join("tree");
    fs::create_dir(&folder).unwrap();
    let tree = Tree { backend: TreeBackend::Posix, folder: folder.clone(), data_servers: 1, ..Tree::default() };
    let config = Config { tree: Some(tree), io: vec![Io::new("io.0", free_address())], ..Config::default() };
    let node = impresario_server::start(&config, "io.0").unwrap();
    let client = client(&config, Via::IoNode(0));
    let file = client.create("file", NEW).unwrap();
    file.write_at(b"bytes", 0).unwrap();
    fs::rename(&folder, top.path().join("aside")).unwrap();
    fs::create_dir(&folder).unwrap();
    until("it is noticed", || file.write_at(b"bytes", 0).is_err());
    let error = file.sync().unwrap_err();
    assert_eq!(error.errno(), libc::EIO, "{error}");
    drop((file, client, node));
}

/// A service manager starts it again then.
#[test]
fn a_server_that_runs_ends_with_an_error_when_its_folder_is_taken_away() {
    let mut cluster = Cluster::start(1, |_| {});
    cluster.stop_data(0);
    let (config, folder) = (cluster.config.clone(), cluster.config.data[0].dir.clone());
    let (ready, is_ready) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || impresario_server::run(&config, "data.0", |_| ready.send(()).unwrap()));
    is_ready.recv().unwrap();
    fs::rename(&folder, folder.with_extension("aside")).unwrap();
    until("it ends", || server.is_finished());
    let error = server.join().unwrap().unwrap_err();
    assert!(matches!(&error, StartError::FolderLost(why) if why.contains("start the server")), "{error}");
    let again = impresario_server::start(&cluster.config, "data.0").map(drop).unwrap_err();
    assert!(again.to_string().contains("is empty"), "{again}");
}
