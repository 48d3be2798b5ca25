//! Servers that run short of descriptors or of space: what they say then, whom they still serve, and that they recover.

use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Cluster, IMPRESARIO, SmallDisk, client, new_file, pattern, read_file, run_command, write_file};
use impresario_client::{Client, ClientError, File};
use impresario_testing::eventually;

/// Starts a server again with a limit, such as `-n 128`: so many descriptors.
fn restart_with_limit(cluster: &mut Cluster, name: &str, limit: &str) {
    cluster.kill(name);
    let limited = format!("ulimit {limit}; exec \"$0\" \"$@\"");
    cluster.launch_by(Command::new("sh").args(["-c", &limited, IMPRESARIO]), name);
    cluster.await_answer(name);
}

fn restart_with_descriptors(cluster: &mut Cluster, name: &str, most: u32) {
    restart_with_limit(cluster, name, &format!("-n {most}"));
}

/// The kernel ends a process that writes beyond its limit, unless it ignores the signal.
#[test]
fn a_write_beyond_the_limit_of_file_sizes_fails_and_ends_no_server() {
    let mut cluster = Cluster::start(1, 0, |_| {});
    let client = client(&cluster.config, 1);
    for name in ["data.0", "meta"] {
        restart_with_limit(&mut cluster, name, "-f 2048"); // 1 MiB in blocks of 512 bytes
    }
    let bytes = pattern(1, 1, 0, 3 << 20);
    let file = client.create("f", new_file(0o644)).unwrap();
    assert_eq!(file.write_at(&bytes[..1 << 20], 0).unwrap(), 1 << 20);
    assert_eq!(message(file.write_at(&bytes, 1 << 20)).0, libc::EFBIG);
    assert_eq!(message(file.set_len(2 << 20)).0, libc::EFBIG);
    file.sync().unwrap();
    file.close().unwrap();
    for name in ["data.0", "meta"] {
        cluster.await_answer(name);
    }
    assert!(read_file(&client, "f") == bytes[..1 << 20]);
    write_file(&client, "g", b"content");
}

/// As on a machine on which a user has as many processes as the administrator allows.
#[test]
fn servers_are_asked_by_a_user_who_may_start_no_thread() {
    if !["root", "setpriv"].into_iter().all(impresario_testing::require) {
        return;
    }
    let cluster = Cluster::start(2, 1, |_| {});
    std::fs::set_permissions(cluster.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let limited = "ulimit -u 1; exec \"$0\" status \"$1\"";
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "bash", "-c", limited]);
    let ran = run_command(command.arg(IMPRESARIO).arg(&cluster.path));
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(["meta", "data.1", "io.0"].iter().all(|name| ran.out.contains(name)), "{ran:?}");
}

fn descriptors(cluster: &mut Cluster, name: &str) -> usize {
    let pid = cluster.server(name).pid();
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Waits until a server has no more descriptors than before, but for some connections.
#[track_caller]
fn has_as_few_as(cluster: &mut Cluster, name: &str, before: usize) {
    eventually("no descriptor is left over", || (descriptors(cluster, name) <= before + 4).then_some(()));
}

fn message<T>(result: Result<T, ClientError>) -> (i32, String) {
    let error = result.map(drop).expect_err("it should fail");
    (error.errno(), error.to_string())
}

#[test]
fn a_metadata_server_without_descriptors_says_so_and_serves_what_needs_none() {
    let mut cluster = Cluster::start(1, 0, |_| {});
    let greedy = client(&cluster.config, 1);
    (0..60).for_each(|n| write_file(&greedy, &format!("f.{n}"), b"content"));
    restart_with_descriptors(&mut cluster, "meta", 128);
    let open = |n: usize| greedy.open(format!("f.{n}"), false);
    open(0).unwrap().close().unwrap();
    let before = descriptors(&mut cluster, "meta");
    let mut held: Vec<File> = Vec::new();
    let refused = loop {
        match open(held.len()) {
            Ok(file) => held.push(file),
            refused => break message(refused),
        }
    };
    assert!(held.len() >= 30, "{} files", held.len());
    assert!(refused.0 == libc::ENFILE && refused.1.contains("LimitNOFILE"), "{refused:?}");
    // It is still there, also for others.
    let other = client(&cluster.config, 2);
    assert_eq!(other.list(b"").unwrap().len(), 60);
    assert_eq!(message(other.open("f.59", false)), refused);
    assert_eq!(message(other.create("new", new_file(0o644))).0, libc::ENFILE);
    assert_eq!(message(other.stat("new")).0, libc::ENOENT, "what cannot be opened is not made");
    assert_eq!(read_file(&greedy, "f.0"), b"content", "a file that is open already");
    other.unlink("f.59").unwrap();
    other.mkdir("d", 0o755, 0, 0).unwrap();
    other.rename("f.58", "d/f", false).unwrap();
    other.sync_dir("d").unwrap();
    // What is closed leaves room. The server learns of it before the client's next call.
    held.pop().unwrap().close().unwrap();
    greedy.stat("f.0").unwrap();
    write_file(&other, "new", b"more");
    held.into_iter().for_each(|file| file.close().unwrap());
    assert_eq!(read_file(&other, "d/f"), b"content");
    has_as_few_as(&mut cluster, "meta", before);
}

/// Blocks of many files, written and read.
fn work(client: &Arc<Client>, name: &str, files: u64) {
    for n in 0..files {
        let (path, bytes) = (format!("{name}.{n}"), pattern(n, 1, 0, 5000));
        write_file(client, &path, &bytes);
        assert!(read_file(client, &path) == bytes, "{path}");
    }
}

/// Connections that say nothing take no more than their share of a server's descriptors.
fn silent_connections_leave_descriptors(name: &str) {
    let mut cluster = Cluster::start(1, 1, |config| config.cluster.max_connections = 1000);
    restart_with_descriptors(&mut cluster, name, 128);
    let client = client(&cluster.config, 1);
    work(&client, "before", 80);
    let before = descriptors(&mut cluster, name);
    let address = cluster.config.server(name).unwrap().address().to_string();
    let silent: Vec<TcpStream> = (0..300).filter_map(|_| TcpStream::connect(&address).ok()).collect();
    assert!(silent.len() > 100);
    let began = Instant::now();
    work(&client, "beside", 80);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let log = cluster.server(name).log();
    assert!(log.contains("raise the limit of open files") && !log.contains("cannot accept"), "{log}");
    drop(silent);
    cluster.await_answer(name);
    has_as_few_as(&mut cluster, name, before);
}

#[test]
fn silent_connections_leave_a_data_server_its_descriptors() {
    silent_connections_leave_descriptors("data.0");
}

#[test]
fn silent_connections_leave_an_io_node_its_descriptors() {
    silent_connections_leave_descriptors("io.0");
}

#[test]
fn silent_connections_leave_the_metadata_server_its_descriptors() {
    silent_connections_leave_descriptors("meta");
}

/// Makes files until there is no room for another; how many.
fn fill(client: &Arc<Client>, name: &str) -> usize {
    for n in 0.. {
        match client.create(format!("{name}.{n}"), new_file(0o644)).and_then(File::close) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                return n;
            }
        }
    }
    unreachable!()
}

/// Neither a block nor an inode is left: names can still be removed, each once, and the server starts.
#[test]
fn a_full_metadata_folder_gives_names_up_and_its_server_starts() {
    let mut cluster = Cluster::describe(1, 1, |_| {});
    let folder = cluster.config.meta.dir.clone();
    let Some(_small) = SmallDisk::mount(&folder, c"size=16m,nr_inodes=1200") else { return };
    impresario_server::folders::make_all(&cluster.config).unwrap();
    let filler = folder.join("filler");
    std::fs::write(&filler, "").unwrap();
    for name in ["data.0", "meta", "io.0"] {
        cluster.restart(name);
    }
    let client = client(&cluster.config, 1);
    let made = fill(&client, "f");
    assert!(made > 800, "{made}");
    let full = std::fs::write(&filler, vec![1; 16 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    for n in 0..300 {
        client.unlink(format!("f.{n}")).unwrap_or_else(|error| panic!("{n}: {error}"));
    }
    let again = eventually("inodes are free", || Some(fill(&client, "g")).filter(|made| *made > 0));
    cluster.kill("meta");
    cluster.restart("meta");
    let names = client.list(b"").unwrap();
    let count = |first: &str| names.iter().filter(|entry| entry.name.starts_with(first.as_bytes())).count();
    assert_eq!((count("f."), count("g.")), (made - 300, again), "what was told is so after a restart");
    for n in 300..made {
        client.unlink(format!("f.{n}")).unwrap_or_else(|error| panic!("{n}: {error}"));
    }
    std::fs::remove_file(&filler).unwrap();
    write_file(&client, "new", b"content");
    assert_eq!(read_file(&client, "new"), b"content");
    assert_eq!(client.list(b"").unwrap().len(), again + 1);
}

/// Not a byte is left for a data server: it reads, removes and starts, and takes back the space that removed files had.
#[test]
fn a_full_data_folder_is_read_and_emptied_and_its_server_starts() {
    let mut cluster = Cluster::describe(1, 1, |config| config.cluster.request_timeout_ms = 20_000);
    let folder = cluster.config.data[0].dir.clone();
    let Some(_small) = SmallDisk::mount(&folder, c"size=16m") else { return };
    impresario_server::folders::make_all(&cluster.config).unwrap();
    for name in ["data.0", "meta", "io.0"] {
        cluster.restart(name);
    }
    let client = client(&cluster.config, 1);
    let bytes = |n: u64| pattern(n, 1, 0, 500_000);
    (0..10).for_each(|n| write_file(&client, &format!("f.{n}"), &bytes(n)));
    let full = std::fs::write(folder.join("filler"), vec![1; 16 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let readers: Vec<_> = (0..10).map(|n| client.open(format!("f.{n}"), false).unwrap()).collect();
    for round in 0..4 {
        cluster.kill("data.0");
        std::thread::scope(|scope| {
            // Whoever waits for an answer then asks again in a new epoch, which the server has to note.
            for (n, file) in (0u64..).zip(&readers) {
                scope.spawn(move || {
                    let mut got = vec![0; 500_000];
                    let len = file.read_at(&mut got, 0).unwrap_or_else(|e| panic!("round {round}, file {n}: {e}"));
                    assert!(len == got.len() && got == pattern(n, 1, 0, 500_000), "round {round}, file {n}");
                });
            }
            cluster.restart("data.0");
        });
        let fresh = client_of(&cluster, 10 + round);
        assert!(read_file(&fresh, "f.0") == bytes(0));
        let refused = client.create(format!("new.{round}"), new_file(0o644)).unwrap();
        assert_eq!(message(refused.write_at(&[1; 200_000], 0)).0, libc::ENOSPC);
        refused.close().unwrap();
    }
    readers.into_iter().for_each(|file| file.close().unwrap());
    (0..10).for_each(|n| client.unlink(format!("f.{n}")).unwrap());
    eventually("the space of the removed files is there again", || {
        let file = client.open("new.0", true).unwrap();
        let written = file.write_at(&bytes(7), 0).and_then(|_| file.sync());
        written.and_then(|()| file.close()).ok()
    });
    assert!(read_file(&client, "new.0") == bytes(7));
}

fn client_of(cluster: &Cluster, seed: u64) -> Arc<Client> {
    client(&cluster.config, seed)
}
