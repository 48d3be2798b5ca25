//! `impresario nfs` from outside: a real process over a real folder, libnfs's programs, and what survives `kill -9`.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Process, run, run_command};
use impresario_backend::SetAttr;
use impresario_nfs::protocol::{Stability, Status};
use impresario_nfs::testing::{Client, ClientError};
use impresario_testing::ceph::CephCluster;
use impresario_testing::gluster::GlusterBricks;
use impresario_testing::{PATIENCE, eventually, free_address, free_ports, require, skip, until};

/// A folder and the server that exports it as `/data`.
struct Served {
    folder: PathBuf,
    port: u16,
    process: Process,
    _all: Arc<tempfile::TempDir>,
}

fn start(all: &Arc<tempfile::TempDir>, port: u16, more: &[&str]) -> Served {
    let folder = all.path().join("data");
    std::fs::create_dir_all(&folder).unwrap();
    let (export, listen) = (format!("{}:/data", folder.display()), format!("127.0.0.1:{port}"));
    let key = all.path().join("key").display().to_string();
    let mut args = vec!["nfs", "--export", &export, "--listen", &listen, "--any-port", "--key-file", &key];
    args.extend(more);
    let process = Process::start(&args, &all.path().join("log"));
    let served = Served { folder, port, process, _all: all.clone() };
    served.await_answer();
    served
}

fn served(more: &[&str]) -> Served {
    let all = Arc::new(tempfile::tempdir().unwrap());
    start(&all, free_ports(1)[0], more)
}

/// A server over a file system that is no folder of this machine, `tree` of the configuration, as `/data`; `more` are further
/// exports. `None` where the file system's library is missing: the test is then skipped.
#[track_caller]
fn start_over(all: &Arc<tempfile::TempDir>, port: u16, tree: &str, more: &str) -> Option<Served> {
    let (file, log) = (all.path().join("nfs.toml"), all.path().join("log"));
    let text = format!(
        "[nfs]\nlisten = [\"127.0.0.1:{port}\"]\nkey_file = \"key\"\nstatus = \"nfs.sock\"\n[[nfs.export]]\nname = \"/data\"\n\
         privileged_ports = false\nsquash = \"none\"\ntree = {tree}\n{more}"
    );
    std::fs::write(&file, text).unwrap();
    let process = Process::start(["nfs".as_ref(), file.as_os_str()], &log);
    let mut served = Served { folder: all.path().into(), port, process, _all: all.clone() };
    let ended = eventually("the server answers, or ends", || match served.process.child.try_wait().unwrap() {
        Some(_) => Some(true),
        None => served.mounted().map(|_| false),
    });
    if !ended {
        return Some(served);
    }
    let said = served.process.log();
    for library in ["libgfapi.so.0", "libcephfs.so.2"] {
        if said.contains(&format!("{library}: cannot open")) {
            skip(library, said);
            return None;
        }
    }
    panic!("{said}")
}

impl Served {
    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    fn await_answer(&self) {
        eventually("the server answers", || self.mounted());
    }

    /// A client as the user of the test, and the export's root.
    fn mounted(&self) -> Option<(Client, Vec<u8>)> {
        let mut client = Client::connect(self.address()).ok()?;
        client.be(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw(), &[]);
        let root = client.mount("/data").ok()?;
        Some((client, root))
    }

    fn url(&self, path: &str) -> String {
        format!("nfs://127.0.0.1/data{path}?version=3&nfsport={0}&mountport={0}", self.port)
    }
}

/// As root, root is to be root: the folder is the test's own.
const AS_WE_ARE: [&str; 2] = ["--squash", "none"];

#[track_caller]
fn tool(program: &str, args: &[&str]) -> String {
    let ran = run_command(Command::new(program).args(args));
    assert_eq!(ran.code, 0, "{program} {args:?}: {ran:?}");
    ran.out
}

#[test]
fn the_programs_of_libnfs_list_copy_and_show() {
    if !require("nfs-cp") {
        return;
    }
    let served = served(&AS_WE_ARE);
    let bytes: Vec<u8> = (0..5_000_001u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let local = served.folder.with_file_name("local");
    std::fs::write(&local, &bytes).unwrap();
    let copied = tool("nfs-cp", &[local.to_str().unwrap(), &served.url("/copy")]);
    assert!(copied.contains("5000001"), "{copied}");
    assert!(std::fs::read(served.folder.join("copy")).unwrap() == bytes);
    let back = served.folder.with_file_name("back");
    tool("nfs-cp", &[&served.url("/copy"), back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == bytes);
    std::fs::create_dir(served.folder.join("sub")).unwrap();
    std::fs::write(served.folder.join("sub/text"), "what it says").unwrap();
    for n in 0..500 {
        std::fs::write(served.folder.join(format!("sub/many-{n:03}")), "").unwrap();
    }
    let listed = tool("nfs-ls", &[&served.url("/sub")]);
    assert_eq!(listed.lines().filter(|line| line.contains("many-")).count(), 500, "{listed}");
    let recursive = tool("nfs-ls", &["-R", &served.url("")]);
    assert!(recursive.contains("many-499") && recursive.contains("copy"), "{recursive}");
    assert_eq!(tool("nfs-cat", &[&served.url("/sub/text")]), "what it says");
}

/// What clients had is stale, but mounting works again without a restart, unless a link took the folder's place.
#[test]
fn an_export_that_was_removed_and_made_again_is_mounted_again() {
    let served = served(&AS_WE_ARE);
    std::fs::write(served.folder.join("old"), "old").unwrap();
    let (mut client, root) = served.mounted().unwrap();
    client.lookup(&root, "old").unwrap();
    let elsewhere = served.folder.with_file_name("elsewhere");
    std::fs::rename(&served.folder, &elsewhere).unwrap();
    std::fs::remove_dir_all(&elsewhere).unwrap();
    assert_eq!(status(client.mount("/data").unwrap_err()), Status::NOENT);
    std::fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &served.folder).unwrap();
    // It is looked for once a second.
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(status(client.mount("/data").unwrap_err()), Status::NOENT);
    std::fs::remove_file(&served.folder).unwrap();
    std::fs::create_dir(&served.folder).unwrap();
    std::fs::write(served.folder.join("new"), "new").unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    let again = client.mount("/data").unwrap();
    client.lookup(&again, "new").unwrap();
    assert_eq!(status(client.lookup(&root, "new").unwrap_err()), Status::STALE);
    // And once more.
    std::fs::remove_dir_all(&served.folder).unwrap();
    std::fs::create_dir(&served.folder).unwrap();
    let again = client.mount("/data").unwrap();
    assert_eq!(status(client.lookup(&again, "new").unwrap_err()), Status::NOENT);
}

#[test]
fn random_calls_of_libnfs_give_what_memory_holds() {
    if !require("cc") {
        return;
    }
    if !std::path::Path::new("/usr/include/nfsc/libnfs.h").exists() {
        return skip("libnfs-dev", "/usr/include/nfsc/libnfs.h is missing");
    }
    exercise(&served(&AS_WE_ARE), 4);
}

/// Random calls of libnfs against what memory holds, of so many clients at once.
fn exercise(served: &Served, clients: usize) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("exercise");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../testing/c/exercise.c");
    tool("cc", &["-O1", "-w", "-DNFS", "-o", program.to_str().unwrap(), source, "-lnfs"]);
    std::thread::scope(|scope| {
        for seed in &["1", "2", "3", "4"][..clients] {
            let (program, url) = (program.to_str().unwrap(), served.url(""));
            scope.spawn(move || assert_eq!(tool(program, &[&url, "500", seed]), "good\n"));
        }
    });
}

/// Each of many clients writes its places of one file, unstable, and commits; the server is killed and started again
/// under way. What a client believes to be committed is there, byte by byte.
#[test]
fn nothing_committed_is_lost_when_the_server_is_killed_under_load() {
    let all = Arc::new(tempfile::tempdir().unwrap());
    let server = start(&all, free_ports(1)[0], &AS_WE_ARE);
    if !permanent(&server) {
        return skip("handles", "the kernel gives this process no permanent handles");
    }
    kill_under_load(server, |port| start(&all, port, &AS_WE_ARE));
}

fn kill_under_load(mut server: Served, restart: impl Fn(u16) -> Served) {
    const CLIENTS: usize = 32;
    const BLOCK: usize = 16 << 10;
    let address = server.address();
    let (mut client, root) = server.mounted().unwrap();
    let file = client.create(&root, "shared", &Default::default()).unwrap();
    let first = client.write(&file, 0, b"", Stability::Unstable).unwrap().1;
    let (stop, verifiers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let rounds: Arc<Vec<AtomicUsize>> = Arc::new((0..CLIENTS).map(|_| AtomicUsize::new(0)).collect());
    let threads: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let (file, stop, rounds, verifiers) = (file.clone(), stop.clone(), rounds.clone(), verifiers.clone());
            std::thread::spawn(move || {
                let mut committed = 0;
                while !stop.load(Ordering::Relaxed) {
                    // Four blocks, then a commit; all again while the verifier says that something may be lost.
                    let offsets: Vec<u64> =
                        (0..4).map(|k| (((committed * 4 + k) * CLIENTS + n) * BLOCK) as u64).collect();
                    let (changed, done) = write_and_commit(address, &file, &offsets, n as u64, &stop);
                    verifiers.fetch_add(changed, Ordering::Relaxed);
                    committed += usize::from(done);
                    rounds[n].store(committed, Ordering::Relaxed);
                }
                committed
            })
        })
        .collect();
    for _ in 0..3 {
        let at_least = rounds.iter().map(|n| n.load(Ordering::Relaxed)).sum::<usize>() + 2 * CLIENTS;
        until("clients commit", || rounds.iter().map(|n| n.load(Ordering::Relaxed)).sum::<usize>() >= at_least);
        server.process.kill();
        server = restart(server.port);
    }
    stop.store(true, Ordering::Relaxed);
    let committed: Vec<usize> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let (mut client, _) = server.mounted().unwrap();
    assert_ne!(client.write(&file, 0, b"", Stability::Unstable).unwrap().1, first);
    assert!(committed.iter().sum::<usize>() >= 6 * CLIENTS, "{committed:?}");
    for (n, rounds) in committed.into_iter().enumerate() {
        for k in 0..rounds * 4 {
            let offset = ((k * CLIENTS + n) * BLOCK) as u64;
            let read = client.read(&file, offset, BLOCK as u32).unwrap();
            assert!(read.bytes == content(n as u64, offset, BLOCK), "client {n}, block {k}");
        }
    }
    // The kill came under way of something: a client saw another verifier, or a broken connection at least.
    assert!(verifiers.load(Ordering::Relaxed) > 0);
}

fn content(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| (at.wrapping_mul(31) ^ at >> 8 ^ seed.wrapping_mul(97)) as u8).collect()
}

/// As a kernel's client does: what was written under another verifier than that of the commit is written again. How
/// often that or a broken connection was met, and whether all is committed.
fn write_and_commit(address: SocketAddr, file: &[u8], offsets: &[u64], seed: u64, stop: &AtomicBool) -> (usize, bool) {
    let deadline = Instant::now() + PATIENCE;
    for broken in 0.. {
        let attempt = || -> Result<bool, ClientError> {
            let mut client = Client::connect(address)?;
            client.be(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw(), &[]);
            let mut verifiers = Vec::new();
            for offset in offsets {
                verifiers.push(client.write(file, *offset, &content(seed, *offset, 16 << 10), Stability::Unstable)?.1);
            }
            let verifier = client.commit(file)?;
            Ok(verifiers.iter().all(|written| *written == verifier))
        };
        match attempt() {
            Ok(true) => return (broken, true),
            Ok(false) => {}
            Err(ClientError::Io(_)) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
        if stop.load(Ordering::Relaxed) && Instant::now() > deadline {
            return (broken, false);
        }
    }
    (0, false)
}

fn permanent(server: &Served) -> bool {
    !server.process.log().contains("no permanent handles")
}

#[test]
fn users_get_their_own_files_and_root_is_nobody() {
    if !require("root") {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let served = served(&[]);
    std::fs::set_permissions(&served.folder, std::fs::Permissions::from_mode(0o777)).unwrap();
    let mut client = Client::connect(served.address()).unwrap();
    let root = client.mount("/data").unwrap();
    for (uid, gid, owner) in [(1234, 567, (1234, 567)), (0, 0, (65534, 65534))] {
        client.be(uid, gid, &[]);
        let name = format!("of-{uid}");
        let file = client.create(&root, &name, &Default::default()).unwrap();
        client.write(&file, 0, b"mine", Stability::File).unwrap();
        let state = std::fs::metadata(served.folder.join(&name)).unwrap();
        assert_eq!((state.uid(), state.gid()), owner);
    }
    client.be(99, 99, &[]);
    let file = client.lookup(&root, "of-1234").unwrap();
    assert!(matches!(client.write(&file, 0, b"not", Stability::File), Err(ClientError::Failed(_))));
    std::fs::set_permissions(served.folder.join("of-1234"), std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(matches!(client.read(&file, 0, 4), Err(ClientError::Failed(_))));
}

#[test]
fn the_state_is_told_at_a_socket_and_a_stop_leaves_nothing() {
    let all = Arc::new(tempfile::tempdir().unwrap());
    let socket = all.path().join("nfs.sock");
    let told = ["--status", socket.to_str().unwrap(), "--policy", "mlf window_us=0"];
    let mut served = start(&all, free_ports(1)[0], &told);
    let ran = run(["status", socket.to_str().unwrap()]);
    assert!(ran.code == 0 && ran.out.contains("mlf window_us=0") && ran.out.contains("mount.mnt"), "{ran:?}");
    let ran = run(["status", socket.to_str().unwrap(), "--json"]);
    assert!(ran.code == 0 && ran.out.contains("\"role\": \"nfs\""), "{ran:?}");
    // A second server does not take the socket of the first.
    let other = all.path().join("other");
    let listen = free_address();
    let (key, path) = (other.display().to_string(), all.path().display().to_string());
    let ran = run(["nfs", "--export", &path, "--listen", &listen, "--key-file", &key, "--status", told[1]]);
    assert!(ran.code == 1 && ran.err.contains("another server answers there"), "{ran:?}");
    served.process.signal(rustix::process::Signal::TERM);
    assert!(served.process.wait().success());
    assert!(!socket.exists());
}

#[test]
fn metrics_are_served_beside_the_state() {
    let all = Arc::new(tempfile::tempdir().unwrap());
    let metrics = free_address();
    let served = start(&all, free_ports(1)[0], &[&AS_WE_ARE[..], &["--metrics", &metrics]].concat());
    let (mut client, root) = served.mounted().unwrap();
    let file = client.create(&root, "f", &Default::default()).unwrap();
    client.write(&file, 0, &[7; 4096], Stability::File).unwrap();
    let scrape = || {
        let mut stream = std::net::TcpStream::connect(&metrics).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let lines = [
        "impresario_nfs_seconds_count{server=\"nfs\",procedure=\"write\"} 1",
        "impresario_client_bytes_total{server=\"nfs\",client=\"127.0.0.1\",operation=\"write\"} 4096",
        "impresario_nfs_failed_total{server=\"nfs\",procedure=\"create\"} 0",
        "impresario_bytes_total{server=\"nfs\",operation=\"write\"} 4096",
    ];
    // An answer may come before its call is counted.
    until("all of it is counted", || {
        let text = scrape();
        lines.iter().all(|line| text.lines().any(|l| l == *line))
    });
}

#[test]
fn a_configuration_file_says_the_same_and_mistakes_are_named() {
    let all = tempfile::tempdir().unwrap();
    let file = all.path().join("nfs.toml");
    let port = free_ports(1)[0];
    std::fs::create_dir(all.path().join("d")).unwrap();
    let text = format!(
        "[nfs]\nlisten = [\"127.0.0.1:{port}\"]\nkey_file = \"key\"\npolicy = \"sjf\"\n\
         [[nfs.export]]\nname = \"/data\"\ndir = \"d\"\nprivileged_ports = false\n"
    );
    std::fs::write(&file, &text).unwrap();
    let path = file.to_str().unwrap();
    let ran = run(["config", "check", path]);
    assert!(ran.code == 0 && ran.out.contains("an NFS server, 1 exports"), "{ran:?}");
    assert!(run(["config", "show", path]).out.contains("memory_bytes"));
    let _server = Process::start(["nfs", path], &all.path().join("log"));
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    eventually("it answers", || Client::connect(address).ok()?.mount("/data").ok());

    std::fs::write(&file, text.replace("sjf", "sjff")).unwrap();
    let ran = run(["nfs", path]);
    assert!(ran.code == 2 && ran.err.contains("nfs.toml:4:") && ran.err.contains("sjf"), "{ran:?}");
    let none = run(["nfs"]);
    assert!(none.code == 2 && none.err.contains("--export"), "{none:?}");
    let nowhere = all.path().join("nowhere").display().to_string();
    let ran = run(["nfs", "--export", &nowhere, "--key-file", all.path().join("k").to_str().unwrap()]);
    assert!(ran.code == 1 && ran.err.contains("nowhere"), "{ran:?}");
    let ran = run(["nfs", "--export", &nowhere, "--allow", "10.1/8"]);
    assert!(ran.code == 2 && ran.err.contains("10.1/8"), "{ran:?}");
}

/// A tree that is opened is taken from the server that has it where the file system lets one identity have one session.
#[test]
fn a_second_start_hears_that_its_address_is_taken_before_it_opens_a_tree() {
    let served = served(&[]);
    let nowhere = served.folder.with_file_name("nowhere").display().to_string();
    let (listen, key) = (served.address().to_string(), served.folder.with_file_name("key").display().to_string());
    let ran = run(["nfs", "--export", &nowhere, "--listen", &listen, "--key-file", &key]);
    let told = ran.err.contains(&format!("cannot listen on {listen}"));
    assert!(ran.code == 1 && told && !ran.err.contains("nowhere"), "{ran:?}");
}

/// Ten lines a second would fill the disk of a log while nobody looks.
#[test]
fn a_server_without_descriptors_says_so_once_and_serves_again_with_some() {
    let all = tempfile::tempdir().unwrap();
    let (address, log) = (SocketAddr::from(([127, 0, 0, 1], free_ports(1)[0])), all.path().join("log"));
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -n 64; exec \"$0\" \"$@\"",
        crate::support::IMPRESARIO,
        "nfs",
        "--any-port",
        "--listen",
    ]);
    command.arg(address.to_string()).arg("--export").arg(all.path()).arg("--key-file").arg(all.path().join("key"));
    let process = Process::start_command(&mut command, &log);
    until("it serves", || process.log().contains("nfs serves on"));
    let silent: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    let says = || process.log().matches("Too many open files").count();
    until("it says so", || says() > 0);
    std::thread::sleep(Duration::from_millis(700));
    // Of accepting them, and of setting them up.
    assert!(says() <= 2, "{}", process.log());
    drop(silent);
    let path = all.path().to_str().unwrap();
    eventually("it serves again", || Client::connect(address).ok()?.mount(path).ok());
}

fn volume(bricks: &GlusterBricks) -> String {
    format!("{{ backend = \"glusterfs\", volume = \"test\", volfile = {:?} }}", bricks.volume_file())
}

fn status(error: ClientError) -> Status {
    match error {
        ClientError::Failed(status) => status,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_glusterfs_volume_is_exported_without_a_mount() {
    let Some(bricks) = GlusterBricks::start(2, None) else { return };
    if exported_without_a_mount(&volume(&bricks)) {
        assert!((0..2).any(|n| bricks.brick(n).join("sub/of-0").is_file()));
    }
}

#[test]
fn cephfs_is_exported_without_a_mount() {
    let Some(cluster) = CephCluster::start(2) else { return };
    exported_without_a_mount(&format!("{{ backend = \"cephfs\", ceph_config = {:?} }}", cluster.config()));
}

/// libnfs's programs; handles and committed bytes over `kill -9`; each caller's own rights; a second export of a folder. Whether
/// the library is there.
fn exported_without_a_mount(tree: &str) -> bool {
    let all = Arc::new(tempfile::tempdir().unwrap());
    let Some(mut served) = start_over(&all, free_ports(1)[0], tree, "") else { return false };
    if require("nfs-cp") {
        let bytes: Vec<u8> = (0..5_000_001u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let (local, back) = (all.path().join("local"), all.path().join("back"));
        std::fs::write(&local, &bytes).unwrap();
        tool("nfs-cp", &[local.to_str().unwrap(), &served.url("/copy")]);
        tool("nfs-cp", &[&served.url("/copy"), back.to_str().unwrap()]);
        assert!(std::fs::read(&back).unwrap() == bytes);
        assert!(tool("nfs-ls", &[&served.url("")]).contains("copy"));
    }
    let (mut client, root) = served.mounted().unwrap();
    let sub = client.make_dir(&root, "sub", 0o777).unwrap();
    client.be(1234, 567, &[]);
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let file = client.create(&sub, "of-1234", &set).unwrap();
    assert_eq!(client.write(&file, 0, b"mine", Stability::File).unwrap().0, Stability::File);
    let (how, verifier) = client.write(&file, 4, b" too", Stability::Unstable).unwrap();
    // A second start, by mistake, takes nothing from the server that runs.
    let ran = run(["nfs".as_ref(), all.path().join("nfs.toml").as_os_str()]);
    assert!(ran.code == 1 && ran.err.contains("cannot listen on"), "{ran:?}");
    assert_eq!((how, client.commit(&file).unwrap()), (Stability::Unstable, verifier));
    let attr = client.attr(&file).unwrap();
    assert_eq!((attr.uid, attr.gid, attr.size_bytes), (1234, 567, 8));

    let other = "[[nfs.export]]\nname = \"/sub\"\nfolder = \"sub\"\nprivileged_ports = false\n";
    served.process.kill();
    let mut served = start_over(&all, served.port, tree, &format!("{other}tree = {tree}\n")).unwrap();
    let (mut client, _) = served.mounted().unwrap();
    client.be(99, 99, &[]);
    assert_eq!(status(client.read(&file, 0, 4).unwrap_err()), Status::ACCES);
    assert_eq!(status(client.write(&file, 0, b"not", Stability::File).unwrap_err()), Status::ACCES);
    client.be(1234, 567, &[]);
    assert_eq!(client.read(&file, 0, 100).unwrap().bytes, b"mine too");
    assert_ne!(client.write(&file, 0, b"", Stability::Unstable).unwrap().1, verifier);
    // Root is nobody in the other export, which is the folder and no more.
    client.be(0, 0, &[]);
    let folder = client.mount("/sub").unwrap();
    let made = client.create(&folder, "of-0", &SetAttr::default()).unwrap();
    let attr = client.attr(&made).unwrap();
    assert_eq!((attr.uid, attr.gid), (65534, 65534));
    let inner = client.lookup(&folder, "of-1234").unwrap();
    assert_eq!(status(client.read(&inner, 0, 4).unwrap_err()), Status::ACCES);
    let above = client.lookup(&folder, "..").unwrap();
    assert_eq!(client.attr(&above).unwrap().fileid, client.attr(&folder).unwrap().fileid);
    // What is gone is stale.
    client.be(1234, 567, &[]);
    client.remove(&sub, "of-1234").unwrap();
    assert_eq!(status(client.read(&file, 0, 4).unwrap_err()), Status::STALE);

    let ran = run(["status".as_ref(), all.path().join("nfs.sock").as_os_str(), "--json".as_ref()]);
    assert!(ran.code == 0 && ran.out.contains("\"files_with_losses\": 0"), "{ran:?}");
    served.process.signal(rustix::process::Signal::TERM);
    assert!(served.process.wait().success(), "{}", served.process.log());
    true
}

#[test]
fn nothing_committed_to_a_glusterfs_volume_is_lost_when_the_server_is_killed_under_load() {
    let Some(bricks) = GlusterBricks::start(2, Some("4MB")) else { return };
    let all = Arc::new(tempfile::tempdir().unwrap());
    let start = |port| start_over(&all, port, &volume(&bricks), "");
    let Some(server) = start(free_ports(1)[0]) else { return };
    if require("cc") && std::path::Path::new("/usr/include/nfsc/libnfs.h").exists() {
        exercise(&server, 2);
    }
    kill_under_load(server, |port| start(port).unwrap());
}

/// Of a brick that went while it had bytes that are not committed, clients learn by the verifier.
#[test]
fn clients_write_again_what_a_brick_may_have_lost() {
    let Some(mut bricks) = GlusterBricks::start(1, None) else { return };
    let all = Arc::new(tempfile::tempdir().unwrap());
    let Some(served) = start_over(&all, free_ports(1)[0], &volume(&bricks), "") else { return };
    let (mut client, root) = served.mounted().unwrap();
    let [a, b] = ["a", "b"].map(|name| client.create(&root, name, &SetAttr::default()).unwrap());
    let (_, written) = client.write(&a, 0, b"bytes", Stability::Unstable).unwrap();
    assert_eq!(client.write(&b, 0, b"bytes", Stability::Unstable).unwrap().1, written);
    bricks.kill(0);
    assert_eq!(status(client.commit(&a).unwrap_err()), Status::IO);
    bricks.restart(0);
    until("the brick is used again", || client.read(&b, 0, 5).is_ok_and(|read| read.bytes == b"bytes"));
    // The other file's bytes were written under another verifier than they are committed under, or are not committed.
    assert!(!matches!(client.commit(&b), Ok(verifier) if verifier == written));
    let (_, again) = client.write(&b, 0, b"again", Stability::Unstable).unwrap();
    assert_ne!(again, written);
    // A file that nobody had open then commits.
    let c = client.create(&root, "c", &SetAttr::default()).unwrap();
    let (_, written) = client.write(&c, 0, b"bytes", Stability::Unstable).unwrap();
    assert_eq!(client.commit(&c).unwrap(), written);
}

/// A user who owns the folder of root's key, as the servers' user owned it, could have root write or read elsewhere.
#[test]
fn roots_key_lies_where_no_other_user_can_put_something_else() {
    if !require("root") {
        return;
    }
    let all = tempfile::tempdir().unwrap();
    let (data, theirs, secret) = (all.path().join("data"), all.path().join("theirs"), all.path().join("secret"));
    std::fs::create_dir(&data).unwrap();
    std::fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::symlink(&secret, theirs.join("key")).unwrap();
    std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).unwrap();
    let ran = std::process::Command::new(crate::support::IMPRESARIO)
        .args(["nfs", "--export", &format!("{}:/data", data.display()), "--any-port"])
        .args(["--listen", &format!("127.0.0.1:{}", free_ports(1)[0])])
        .args(["--key-file", theirs.join("key").to_str().unwrap()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success() && said.contains("theirs belongs to user 65534"), "{said}");
    assert!(!secret.exists());
}

/// Through a mount of the striped store: the way for clients that have nothing but NFS.
#[test]
fn a_mount_of_the_striped_store_is_exported() {
    if !(require("root") && require("fuse") && require("nfs-cp")) {
        return;
    }
    let cluster = crate::support::Cluster::start(2, 0, |_| {});
    let mounted = crate::mounting::Mount::detached(&cluster, &["--allow-other"]).unwrap();
    let mount = &mounted.dir;
    let all = Arc::new(tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink(mount, all.path().join("data")).unwrap();
    let served = start(&all, free_ports(1)[0], &AS_WE_ARE);
    let bytes: Vec<u8> = (0..5_000_001u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let (local, back) = (all.path().join("local"), all.path().join("back"));
    std::fs::write(&local, &bytes).unwrap();
    tool("nfs-cp", &[local.to_str().unwrap(), &served.url("/copy")]);
    tool("nfs-cp", &[&served.url("/copy"), back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == bytes && std::fs::read(mount.join("copy")).unwrap() == bytes);
    let (mut client, root) = served.mounted().unwrap();
    let sub = client.make_dir(&root, "sub", 0o777).unwrap();
    client.be(1234, 567, &[]);
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let file = client.create(&sub, "of-1234", &set).unwrap();
    let (_, verifier) = client.write(&file, 0, b"mine", Stability::Unstable).unwrap();
    assert_eq!(client.commit(&file).unwrap(), verifier);
    let state = std::fs::metadata(mount.join("sub/of-1234")).unwrap();
    assert_eq!((state.uid(), state.gid()), (1234, 567));
    client.be(99, 99, &[]);
    assert_eq!(status(client.read(&file, 0, 4).unwrap_err()), Status::ACCES);
    drop(served);
    mounted.umount();
}
