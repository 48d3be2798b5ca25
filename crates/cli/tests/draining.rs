//! `impresario store drain`: a data server is emptied while a mount and programs work, the command and servers are killed, and
//! the server is taken away.

use std::fs;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::{self, Cluster, Process, Ran, client, client_via, new_file, pattern, read_file, run, write_file};
use impresario_base::Random;
use impresario_client::{Client, CreateOptions, Via};
use impresario_config::{DataState, Security};
use impresario_testing::eventually;
use impresario_wire::{LayoutRequest, SetAttr};

const NAME: &str = "data.1";
const NUMBER: u16 = 1;
/// For this long after its start, or after a client was lost, the metadata server moves no file: long enough for a client to come
/// back to a server that was restarted on a busy machine.
const GRACE_MS: u64 = 6000;
const PAST_GRACE: Duration = Duration::from_millis(GRACE_MS + 500);
const HELD_BYTES: usize = 200_000;

/// Three data servers; with I/O nodes also with keys.
fn start(io: usize) -> Cluster {
    let mut cluster = Cluster::describe(3, io, |config| {
        config.cluster.request_timeout_ms = 20_000;
        config.meta.grace_ms = Some(GRACE_MS);
        config.cluster.stripe_bytes = 16 << 10;
        config.cluster.security = if io > 0 { Security::Key } else { Security::Auto };
    });
    assert_eq!(run(["key", "new", cluster.path.to_str().unwrap()]).code, 0);
    cluster.begin();
    cluster
}

/// Writes the state of the server into the configuration file, as an administrator does while everything runs.
fn say(cluster: &mut Cluster, state: DataState) {
    cluster.config.data[usize::from(NUMBER)].state = state;
    cluster.rewrite();
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

/// Runs the command until it has emptied the server.
fn drain_to_the_end(cluster: &Cluster) {
    let ran = eventually("the server is emptied", || {
        let ran = drain(cluster, &["--wait", "2s", "--rate", "0"]);
        assert!([0, 1].contains(&ran.code), "{ran:?}");
        (ran.code == 0).then_some(ran)
    });
    assert!(ran.out.contains("data.1 holds nothing any more"), "{ran:?}");
    assert_eq!(objects_left(cluster), 0);
}

fn uses_it(client: &Arc<Client>, path: &str) -> bool {
    client.open(path.as_bytes(), false).unwrap().layout().position_of(NUMBER).is_some()
}

fn objects_left(cluster: &Cluster) -> usize {
    fn files(dir: &Path) -> usize {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
        entries.map(|entry| if entry.file_type().unwrap().is_dir() { files(&entry.path()) } else { 1 }).sum()
    }
    files(&cluster.config.data[usize::from(NUMBER)].dir.join("objects"))
}

type Files = Vec<(String, Vec<u8>)>;

/// A tree of files: small, long, sparse, empty, with two names.
fn fill(client: &Arc<Client>) -> Files {
    client.mkdir(b"d", 0o755, 0, 0).unwrap();
    client.mkdir(b"d/deep", 0o755, 0, 0).unwrap();
    let name = |i: u64| format!("{}f{i}", ["", "d/", "d/deep/"][i as usize % 3]);
    let mut files: Files = (0..40).map(|i| (name(i), pattern(i, 1, 0, (i as usize * 13_331) % 300_000))).collect();
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
    // More than a page of names, some of them on the server.
    client.mkdir(b"many", 0o755, 0, 0).unwrap();
    for i in 0..1100u16 {
        let base = if i % 100 == 99 { NUMBER } else { 2 * (i % 2) };
        let layout = Some(LayoutRequest { base: Some(base), pcount: Some(1), ssize_bytes: None });
        let name = format!("many/{i:04}");
        let file = client.create(name.as_bytes(), CreateOptions { layout, ..new_file(0o644) }).unwrap();
        if base == NUMBER {
            let data = pattern(u64::from(i), 2, 0, 5000);
            file.write_at(&data, 0).unwrap();
            files.push((name, data));
        }
        file.close().unwrap();
    }
    client.link(b"d/f1", b"other").unwrap();
    files.push(("other".into(), files[1].1.clone()));
    files
}

#[track_caller]
fn check_all(client: &Arc<Client>, files: &Files, when: &str) {
    for (path, data) in files {
        assert!(read_file(client, path) == *data, "{path} {when}");
    }
}

#[track_caller]
fn fsck_is_clean(cluster: &Cluster) {
    eventually("fsck finds nothing", || {
        let ran = run(["fsck", cluster.path.to_str().unwrap(), "--online", "--min-age", "0s"]);
        assert!(ran.code == 0 || ran.code == 1, "{ran:?}");
        (ran.code == 0).then_some(())
    });
}

/// How a program gets at files.
enum Way {
    Client(Arc<Client>),
    Mount(PathBuf),
}

enum Held {
    Client(impresario_client::File),
    Mount(fs::File),
}

type Outcome<T> = Result<T, String>;

impl Way {
    fn open(&self, name: &str, is_new: bool) -> Outcome<Held> {
        match self {
            Way::Client(client) if is_new => {
                client.create(name.as_bytes(), new_file(0o644)).map(Held::Client).map_err(text)
            }
            Way::Client(client) => client.open(name.as_bytes(), true).map(Held::Client).map_err(text),
            Way::Mount(dir) => {
                let options = fs::File::options().read(true).write(true).create_new(is_new).open(dir.join(name));
                options.map(Held::Mount).map_err(text)
            }
        }
    }

    fn read(&self, name: &str) -> Outcome<Vec<u8>> {
        match self {
            Way::Mount(dir) => fs::read(dir.join(name)).map_err(text),
            Way::Client(client) => {
                let file = client.open(name.as_bytes(), false).map_err(text)?;
                let mut data = vec![0; file.attr().map_err(text)?.size as usize];
                let got = file.read_at(&mut data, 0).map_err(text)?;
                data.truncate(got);
                file.close().map_err(text)?;
                Ok(data)
            }
        }
    }

    fn remove(&self, name: &str) {
        let _ = match self {
            Way::Mount(dir) => fs::remove_file(dir.join(name)).map_err(text),
            Way::Client(client) => client.unlink(name.as_bytes()).map_err(text),
        };
    }
}

impl Held {
    fn write(&self, bytes: &[u8], at: usize) -> Outcome<()> {
        match self {
            Held::Client(file) => file.write_at(bytes, at as u64).map(drop).map_err(text),
            Held::Mount(file) => file.write_all_at(bytes, at as u64).map_err(text),
        }
    }

    fn sync(&self) -> Outcome<()> {
        match self {
            Held::Client(file) => file.sync().map_err(text),
            Held::Mount(file) => file.sync_all().map_err(text),
        }
    }

    fn close(self) -> Outcome<()> {
        match self {
            Held::Client(file) => file.close().map_err(text),
            Held::Mount(_) => Ok(()),
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A program that writes and reads all the time. What fails while a server is away it does again, until it is done.
struct Worker {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u64, Files)>,
}

impl Worker {
    fn start(number: u64, way: Way, files: &Files) -> Worker {
        let stop = Arc::new(AtomicBool::new(false));
        let (until, files) = (stop.clone(), files.clone());
        Worker { stop, thread: std::thread::spawn(move || work(number, &way, &files, &until)) }
    }

    /// The rounds it has done, and the files that must be there.
    fn stop(self) -> (u64, Files) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Writes all of a file and syncs it, in a new open.
fn rewrite(way: &Way, name: &str, content: &[u8]) -> Held {
    eventually(name, || {
        let held = way.open(name, false).ok()?;
        held.write(content, 0).and_then(|()| held.sync()).ok()?;
        Some(held)
    })
}

fn work(number: u64, way: &Way, files: &Files, until: &AtomicBool) -> (u64, Files) {
    let mut random = Random::new(number);
    let held_name = format!("held{number}");
    let (mut content, mut rounds) = (pattern(number, 0, 0, HELD_BYTES), 0);
    eventually("a file is made", || way.open(&held_name, true).ok().and_then(|held| held.close().ok()));
    let mut held = Some(rewrite(way, &held_name, &content));
    let mut kept: Files = Vec::new();
    while !until.load(Ordering::Relaxed) {
        rounds += 1;
        // In place, in a file that is open most of the time.
        let file = held.take().unwrap_or_else(|| rewrite(way, &held_name, &content));
        let len = 1 + random.below(50_000) as usize;
        let at = random.below((HELD_BYTES - len) as u64) as usize;
        let bytes = pattern(number, rounds, at as u64, len);
        content[at..at + len].copy_from_slice(&bytes);
        if let (Ok(()), Ok(())) = (file.write(&bytes, at), file.sync()) {
            match rounds % 16 {
                // So that it can be moved.
                0 => {
                    drop(file.close());
                    std::thread::sleep(Duration::from_secs(1));
                }
                _ => held = Some(file),
            }
        }
        // New ones, and old ones that go.
        let (name, data) =
            (format!("w{number}.{rounds}"), pattern(rounds, number, 0, 1 + random.below(150_000) as usize));
        let made = way.open(&name, true).and_then(|file| {
            file.write(&data, 0)?;
            file.sync()?;
            file.close()
        });
        if made.is_ok() {
            kept.push((name, data));
        }
        if kept.len() > 8 {
            way.remove(&kept.remove(0).0);
        }
        let all = files.len() as u64;
        for (name, data) in kept.last().into_iter().chain([&files[random.below(all) as usize]]) {
            let read = eventually(name, || way.read(name).ok());
            assert!(read == *data, "{name}, {} bytes of {}, program {number}, round {rounds}", read.len(), data.len());
        }
    }
    rewrite(way, &held_name, &content).close().unwrap();
    kept.push((held_name, content));
    (rounds, kept)
}

/// A mount in a process of its own; gone when the test ends.
struct Mount {
    process: Process,
    dir: PathBuf,
}

impl Mount {
    fn start(cluster: &Cluster, via: &str) -> Option<Mount> {
        if !impresario_testing::require("fuse") {
            return None;
        }
        let dir = cluster.dir.path().join("mnt");
        fs::create_dir(&dir).unwrap();
        let words = ["mount".as_ref(), "--via".as_ref(), via.as_ref(), cluster.path.as_os_str(), dir.as_os_str()];
        let process = Process::start(words, &cluster.dir.path().join("mnt.log"));
        eventually("the mount is usable", || process.log().contains("mounted ").then_some(()));
        Some(Mount { process, dir })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.dir).status();
        self.process.kill();
    }
}

/// Programs: one behind an I/O node if there is one, one that needs none, and one on a mount.
fn workers(cluster: &Cluster, mount: Option<&Mount>, files: &Files) -> Vec<Worker> {
    let mut ways =
        vec![Way::Client(client(&cluster.config, 11)), Way::Client(client_via(&cluster.config, 12, Via::Direct))];
    ways.extend(mount.map(|mount| Way::Mount(mount.dir.clone())));
    ways.into_iter().zip(11..).map(|(way, number)| Worker::start(number, way, files)).collect()
}

fn stop(workers: Vec<Worker>, least: u64) -> Files {
    let stopped: Vec<_> = workers.into_iter().map(Worker::stop).collect();
    println!("rounds: {:?}", stopped.iter().map(|(rounds, _)| rounds).collect::<Vec<_>>());
    assert!(stopped.iter().all(|(rounds, _)| *rounds >= least));
    stopped.into_iter().flat_map(|(_, files)| files).collect()
}

fn restart_in_turn(cluster: &mut Cluster) {
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
    assert!(!names.iter().any(|name| name == NAME));
    for name in names {
        cluster.server(&name).signal(rustix::process::Signal::TERM);
        cluster.server(&name).wait();
        cluster.restart(&name);
    }
}

fn is_emptied_while_clients_work(io: usize) {
    let mut cluster = start(io);
    let before = client(&cluster.config, 1);
    let mut files = fill(&before);
    let attr = before.stat(b"d/deep/f2").unwrap();
    let refused = drain(&cluster, &[]);
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.err.contains("write state = \"draining\""), "{refused:?}");
    let f3 = files.iter().position(|(name, _)| name == "f3").unwrap();
    let others = files.iter().filter(|(name, _)| name != "f3").cloned().collect();
    let mount = Mount::start(&cluster, "direct");
    let working = workers(&cluster, mount.as_ref(), &others);
    std::thread::sleep(Duration::from_secs(2));
    say(&mut cluster, DataState::Draining);
    write_file(&before, "new", b"new");
    assert!(uses_it(&before, "big") && uses_it(&before, "held11") && !uses_it(&before, "new"));
    files.push(("new".into(), b"new".to_vec()));
    std::thread::sleep(PAST_GRACE);

    let held = before.open(b"f3", true).unwrap();
    let ran = drain(&cluster, &["--wait", "0s", "--rate", "0"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("f3: it is open for writing") && ran.out.contains("is still needed"), "{ran:?}");
    assert!(ran.err.contains("files in use: ") && ran.err.contains("objects left"), "{ran:?}");
    assert!(uses_it(&before, "f3"));
    held.write_at(b"changed", 7).unwrap();
    held.close().unwrap();
    files[f3].1[7..14].copy_from_slice(b"changed");
    drain_to_the_end(&cluster);
    check_all(&before, &files, "through a client from before");
    let again = drain(&cluster, &["--wait", "0s"]);
    assert!(again.code == 0 && again.out.contains("copied 0 files"), "{again:?}");

    // It is taken away, and everything restarted in turn, while programs work.
    cluster.kill(NAME);
    say(&mut cluster, DataState::Retired);
    restart_in_turn(&mut cluster);
    std::thread::sleep(Duration::from_secs(1));
    files.extend(stop(working, 5));
    drop(mount);
    let after = client(&cluster.config, 21);
    for (client, who) in [(&before, "from before"), (&after, "a new one")] {
        check_all(client, &files, who);
        let name = format!("after {who}");
        write_file(client, &name, &pattern(7, 7, 0, 100_000));
        assert!(read_file(client, &name) == pattern(7, 7, 0, 100_000));
        assert!(client.statfs().unwrap().total_bytes > 0);
        client.unlink(name.as_bytes()).unwrap();
    }
    let now = after.stat(b"d/deep/f2").unwrap();
    assert_eq!((now.ino, now.mode, now.size, now.mtime, now.nlink), (attr.ino, attr.mode, attr.size, attr.mtime, 1));
    assert_eq!(after.stat(b"d/f1").unwrap().nlink, 2);
    let status = run(["status", cluster.path.to_str().unwrap()]);
    assert!(status.code == 0 && !status.out.contains(NAME), "{status:?}");
    drop((before, after));
    fsck_is_clean(&cluster);
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
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
    let mut cluster = start(1);
    let client = client(&cluster.config, 1);
    let mut files = fill(&client);
    let mount = Mount::start(&cluster, "direct");
    let working = workers(&cluster, mount.as_ref(), &files);
    std::thread::sleep(Duration::from_secs(2));
    say(&mut cluster, DataState::Draining);
    let log = cluster.dir.path().join("drain.log");
    let mut random = Random::new(5);
    // Slow enough to be met in the middle of a file.
    let rate = ["--rate", "4m"];
    let rounds: &[&[Option<&str>]] = &[
        &[None, Some("data.2"), Some(NAME), None, Some("data.0"), Some(NAME), Some("meta")],
        &[Some("data.2"), None, Some("meta")],
    ];
    for victims in rounds {
        // No file is moved before.
        std::thread::sleep(PAST_GRACE);
        for victim in *victims {
            let mut command = Process::start(drain_words(&cluster, &rate), &log);
            std::thread::sleep(Duration::from_millis(200 + random.below(1200)));
            victim.iter().for_each(|victim| cluster.kill(victim));
            // Half of them go on by themselves.
            let goes_on = random.below(2) == 0;
            if !goes_on {
                command.kill();
            }
            victim.iter().for_each(|victim| cluster.restart(victim));
            if goes_on {
                std::thread::sleep(Duration::from_millis(500 + random.below(1000)));
                command.kill();
            }
        }
        check_all(&client, &files, "between");
    }
    println!("{}", fs::read_to_string(&log).unwrap().lines().rev().take(3).collect::<Vec<_>>().join("\n"));
    drain_to_the_end(&cluster);
    files.extend(stop(working, 5));
    drop(mount);
    check_all(&client, &files, "in the end");
    check_all(&support::client(&cluster.config, 2), &files, "in the end, for a new client");
    drop(client);
    // What interrupted copies left behind is removed, too.
    fsck_is_clean(&cluster);
    cluster.kill(NAME);
    say(&mut cluster, DataState::Retired);
    cluster.kill("meta");
    cluster.restart("meta");
    check_all(&support::client(&cluster.config, 3), &files, "without the server");
    let began = Instant::now();
    cluster.config.servers().map(|server| server.name().to_string()).collect::<Vec<_>>().iter().for_each(|name| {
        cluster.kill(name);
    });
    let ran = run(["fsck", cluster.path.to_str().unwrap(), "--min-age", "0s"]);
    assert_eq!(ran.code, 0, "{ran:?} after {:?}", began.elapsed());
}

/// A way to the metadata server that can be cut: the server sees its clients go, these see nothing.
struct Cuttable {
    address: String,
    is_cut: Arc<AtomicBool>,
    servers_ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cuttable {
    fn to(address: &str) -> Cuttable {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let cuttable = Cuttable {
            address: listener.local_addr().unwrap().to_string(),
            is_cut: Arc::default(),
            servers_ends: Arc::default(),
        };
        let (to, is_cut, ends) = (address.to_string(), cuttable.is_cut.clone(), cuttable.servers_ends.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if is_cut.load(Ordering::SeqCst) {
                    continue;
                }
                let server = TcpStream::connect(&to).unwrap();
                ends.lock().unwrap().push(server.try_clone().unwrap());
                for (mut from, mut to, is_for_client) in
                    [(client.try_clone().unwrap(), server.try_clone().unwrap(), false), (server, client, true)]
                {
                    let is_cut = is_cut.clone();
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        // Of a cut the client hears nothing.
                        while is_for_client && is_cut.load(Ordering::SeqCst) {
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        cuttable
    }

    fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        self.servers_ends.lock().unwrap().drain(..).for_each(|end| drop(end.shutdown(Shutdown::Both)));
    }

    fn heal(&self) {
        self.is_cut.store(false, Ordering::SeqCst);
    }
}

/// A client that is cut off from the metadata server for longer than that waits for it, but not from the data servers, never
/// takes what was moved for a hole, and what it writes there is not said to be written.
#[test]
fn a_client_that_was_cut_off_finds_its_open_files_stale_and_no_zeros() {
    let mut cluster = start(0);
    let way = Cuttable::to(&cluster.config.meta.address);
    let mut config = cluster.config.clone();
    config.meta.address = way.address.clone();
    config.cluster.file = Default::default();
    config.cluster.request_timeout_ms = 3_000;
    let data = pattern(1, 1, 0, 300_000);
    let here = client(&cluster.config, 1);
    for name in ["read", "written", "small"] {
        write_file(&here, name, if name == "small" { b"x" } else { &data });
    }
    let stale = client(&config, 2);
    let open = |name: &str, write| stale.open(name.as_bytes(), write).unwrap();
    let (read, written, small) = (open("read", false), open("written", true), open("small", false));
    written.write_at(b"before", 0).unwrap();
    written.sync().unwrap();
    say(&mut cluster, DataState::Draining);
    way.cut();
    drain_to_the_end(&cluster);
    let check = |when: &str| {
        let mut bytes = [7; 1000];
        for (file, at) in [(&read, 0), (&read, 20_000), (&read, 299_000), (&written, 0), (&small, 0)] {
            let error = file.read_at(&mut bytes, at).expect_err(when);
            assert_eq!(error.errno(), libc::ESTALE, "{when}: {error}");
        }
        let error = read.seek(0, impresario_wire::SeekTo::Data).expect_err(when);
        assert_eq!(error.errno(), libc::ESTALE, "{when}: {error}");
        let error = written.write_at(b"late", 0).expect_err(when);
        assert!([libc::ESTALE, libc::EIO].contains(&error.errno()), "{when}: {error}");
        written.sync().expect_err(when);
    };
    check("cut off");
    for name in ["data.0", NAME, "data.2"] {
        cluster.kill(name);
        cluster.restart(name);
    }
    check("cut off, after a restart of the data servers");
    way.heal();
    std::thread::sleep(Duration::from_secs(3));
    check("again connected");
    let mut now = data.clone();
    now[..6].copy_from_slice(b"before");
    for client in [&here, &stale] {
        assert!(read_file(client, "read") == data && read_file(client, "written") == now);
        assert!(read_file(client, "small") == b"x");
    }
    drop((read, written, small));
    fsck_is_clean(&cluster);
}

/// The command says what it waits for, also where nobody follows its progress, and ends when its server is to be kept after all.
#[test]
fn the_command_ends_when_the_state_is_taken_back() {
    let mut cluster = start(0);
    let client = client(&cluster.config, 1);
    write_file(&client, "held", &pattern(1, 1, 0, 300_000));
    let held = client.open(b"held", true).unwrap();
    say(&mut cluster, DataState::Draining);
    let words = ["store", "drain", cluster.path.to_str().unwrap(), "--name", NAME];
    let mut command = Process::start(words, &cluster.dir.path().join("drain.log"));
    let waits =
        eventually("it says what it waits for", || Some(command.log()).filter(|log| log.contains("waiting for")));
    assert!(waits.contains("files in use: held (") && waits.contains("objects left"), "{waits}");
    say(&mut cluster, DataState::Active);
    let ended = command.wait();
    let log = command.log();
    assert!(ended.code() == Some(1) && log.contains("data.1 is not draining any more in "), "{ended}: {log}");
    assert!(uses_it(&client, "held"));
    held.close().unwrap();
}
