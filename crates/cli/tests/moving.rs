//! `impresario store move`: a data server moves to another folder and address while clients write, and copiers and servers are
//! killed.

use std::fs;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Cluster, Process, Ran, Rounds, Worker, client, new_file, pattern, read_file, run, write_file};
use impresario_base::Random;
use impresario_client::{Client, ClientError, Identity, Link, LinkOptions};
use impresario_config::{Config, MovesTo, Security};
use impresario_server::moving::{MoveOptions, Step, Watcher, move_server};
use impresario_testing::content::first_difference;
use impresario_testing::{PATIENCE, eventually, free_address, until};
use impresario_wire::{Answer, Call, MoveAnswer, MoveCall, Role};

const NAME: &str = "data.1";
const FILE_BYTES: usize = 1 << 20;

/// Two data servers; clients are patient, as the machine may be busy. With I/O nodes also with keys.
fn start(io: usize, checksums: bool) -> Cluster {
    let mut cluster = Cluster::describe(2, io, |config| {
        config.cluster.security = if io > 0 { Security::Key } else { Security::Auto };
        config.data[1].checksums = checksums;
    });
    assert_eq!(run(["key", "new", cluster.path.to_str().unwrap()]).code, 0);
    cluster.begin();
    cluster
}

/// Writes where the server moves to into the configuration file, as an administrator does while everything runs.
fn announce(cluster: &mut Cluster) -> MovesTo {
    let address = free_address();
    let to = MovesTo { address, dir: cluster.dir.path().join("moved") };
    cluster.config.data[1].moves_to = Some(to.clone());
    cluster.rewrite();
    to
}

fn move_words(cluster: &Cluster) -> Vec<String> {
    ["store", "move", cluster.path.to_str().unwrap(), "--name", NAME, "--progress"].map(String::from).to_vec()
}

/// Runs the command to its end.
fn move_it(cluster: &Cluster, more: &[&str]) -> Ran {
    run(move_words(cluster).into_iter().chain(more.iter().map(ToString::to_string)))
}

/// Starts the server at its new place; there must have been an end of the old one.
fn start_at(cluster: &mut Cluster, to: &MovesTo) {
    let status = cluster.server(NAME).wait();
    assert!(status.success(), "{status}\n{}", cluster.server(NAME).log());
    // Files name it by its place.
    assert_eq!(std::fs::read_to_string(to.dir.join("number")).unwrap(), "1\n");
    cluster.launch(NAME);
    let access = cluster.access();
    eventually("the server answers at its new place", || {
        impresario_client::admin::status(&access, &to.address, Duration::from_secs(2)).ok()
    });
}

/// The configuration after the move, with a restart of everything that has it in memory; all must be well.
fn finish(cluster: &mut Cluster, to: &MovesTo) {
    let names: Vec<String> = cluster.config.servers().map(|server| server.name().to_string()).collect();
    let data = &mut cluster.config.data[1];
    (data.address, data.dir, data.moves_to) = (to.address.clone(), to.dir.clone(), None);
    cluster.rewrite();
    names.iter().for_each(|name| cluster.kill(name));
    let ran = run(["fsck", cluster.path.to_str().unwrap()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    names.iter().for_each(|name| cluster.restart(name));
}

/// A client that changes a file of its own, and other names, and knows what must be there.
fn writer(config: &Config, seed: u64) -> Worker<Vec<u8>> {
    let client = client(config, seed);
    Worker::start(move |rounds| change(&client, seed, rounds))
}

/// The content that its file must have.
fn change(client: &Arc<Client>, seed: u64, rounds: &Rounds) -> Vec<u8> {
    let mut random = Random::new(seed);
    let file = client.create(format!("w{seed}").as_bytes(), new_file(0o644)).unwrap();
    let mut content = vec![0; FILE_BYTES];
    file.write_at(&content, 0).unwrap();
    while let Some(round) = rounds.next() {
        let len = 1 + random.below(90_000) as usize;
        let at = random.below((FILE_BYTES - len) as u64) as usize;
        let bytes = pattern(seed, round, at as u64 & !7, len);
        content[at..at + len].copy_from_slice(&bytes);
        assert_eq!(file.write_at(&bytes, at as u64).unwrap(), len);
        match random.below(8) {
            0 => file.sync().unwrap(),
            1 => {
                let mut read = vec![0; len];
                assert_eq!(file.read_at(&mut read, at as u64).unwrap(), len);
                assert!(read == bytes, "round {round}");
            }
            2 => {
                let keep = random.below(FILE_BYTES as u64) as usize;
                file.set_len(keep as u64).unwrap();
                file.set_len(FILE_BYTES as u64).unwrap();
                content[keep..].fill(0);
            }
            3 => {
                let name = format!("t{seed}.{}", round % 5);
                match client.unlink(name.as_bytes()) {
                    Ok(()) => {}
                    Err(error) => assert_eq!(error.errno(), libc::ENOENT, "{error}"),
                }
                write_file(client, &name, &pattern(seed, round, 0, 200_000));
            }
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    file.sync().unwrap();
    file.close().unwrap();
    content
}

fn check(config: &Config, writers: Vec<(u64, Vec<u8>)>) {
    let reader = client(config, 99);
    for (seed, content) in writers {
        let read = read_file(&reader, &format!("w{seed}"));
        let first = first_difference(&read, &content);
        assert!(read == content, "file of {seed}: {} bytes, first wrong one at {first:?}", read.len());
    }
}

fn moves_while_clients_write(io: usize, checksums: bool) {
    let mut cluster = start(io, checksums);
    let before = pattern(1, 1, 0, 3_000_000);
    write_file(&client(&cluster.config, 1), "before", &before);
    client(&cluster.config, 1).create(b"empty", new_file(0o600)).unwrap().close().unwrap();
    // These know nothing of the move when they begin.
    let writers = [2, 3].map(|seed| (seed, writer(&cluster.config, seed)));
    let to = announce(&mut cluster);
    writers.iter().for_each(|(_, writer)| writer.goes_on(20));
    let began = Instant::now();
    let ran = move_it(&cluster, &[]);
    assert_eq!(ran.code, 0, "{ran:?}\n{}", cluster.server(NAME).log());
    assert!(ran.err.contains("clients of data.1 wait") && ran.out.contains("has moved to"), "{ran:?}");
    start_at(&mut cluster, &to);
    println!("moved in {:?}", began.elapsed());
    writers.iter().for_each(|(_, writer)| writer.goes_on(50));
    let written: Vec<_> = writers.into_iter().map(|(seed, writer)| (seed, writer.stop())).collect();
    check(&cluster.config, written.clone());
    assert!(read_file(&client(&cluster.config, 4), "before") == before);
    assert_eq!(move_it(&cluster, &[]).code, 0, "it has moved before");

    // The old folder is never served again, whatever a configuration says.
    let shown = run(["store", "show", cluster.path.to_str().unwrap()]);
    assert!(shown.code == 1 && shown.out.contains("its server has moved to"), "{shown:?}");
    let old = cluster.config.clone();
    cluster.config.data[1].moves_to = None;
    cluster.rewrite();
    let ran = run(["serve", cluster.path.to_str().unwrap(), "--name", NAME]);
    assert!(ran.code == 1 && ran.err.contains("must not serve from here again"), "{ran:?}");
    cluster.config = old;
    finish(&mut cluster, &to);
    check(&cluster.config, written);
    assert!(read_file(&client(&cluster.config, 5), "before") == before);
}

#[test]
fn a_data_server_moves_while_clients_write() {
    moves_while_clients_write(0, false);
}

#[test]
fn a_data_server_moves_while_clients_write_through_an_io_node() {
    moves_while_clients_write(1, true);
}

#[test]
fn a_move_goes_on_after_copier_and_server_were_killed() {
    let mut cluster = start(0, false);
    for i in 0..20 {
        write_file(&client(&cluster.config, 1), &format!("f{i}"), &pattern(i, 1, 0, 300_000));
    }
    let writer = writer(&cluster.config, 2);
    let to = announce(&mut cluster);
    let log = cluster.dir.path().join("move.log");
    for (round, delay_ms) in [20, 150, 400, 700, 1000].into_iter().enumerate() {
        let _ = fs::remove_file(&log);
        let words = move_words(&cluster).into_iter().chain(["--rate", "1m"].map(String::from));
        let mut copier = Process::start(words, &log);
        std::thread::sleep(Duration::from_millis(delay_ms));
        copier.kill();
        if round == 2 {
            cluster.kill(NAME);
            cluster.restart(NAME);
        }
        let ran = run(["serve", cluster.path.to_str().unwrap(), "--name", NAME]);
        assert!(ran.code == 1 && ran.err.contains("in use"), "{ran:?}");
    }
    let status = cluster.state(NAME);
    assert_eq!(status["move"], "serving", "{status}");
    // A move is given up, and another one begun.
    let ran = move_it(&cluster, &["--give-up"]);
    assert!(ran.code == 0 && ran.out.contains("is given up"), "{ran:?}");
    let ran = move_it(&cluster, &["--give-up"]);
    assert!(ran.code == 0 && ran.out.contains("no move of data.1"), "{ran:?}");
    assert!(objects_of(&to.dir).is_empty());
    let words = move_words(&cluster).into_iter().chain(["--rate", "1m"].map(String::from));
    let _ = fs::remove_file(&log);
    let mut copier = Process::start(words, &log);
    until("it copies", || copier.log().contains("copied "));
    copier.signal(rustix::process::Signal::INT);
    assert!(!copier.wait().success() && copier.log().contains("run the command again"), "{}", copier.log());
    let ran = move_it(&cluster, &["--rate", "0"]);
    assert!(ran.code == 0 && ran.err.contains("from where an earlier run was"), "{ran:?}");
    start_at(&mut cluster, &to);
    writer.goes_on(50);
    check(&cluster.config, vec![(2, writer.stop())]);
    for i in 0..20 {
        assert!(read_file(&client(&cluster.config, 3), &format!("f{i}")) == pattern(i, 1, 0, 300_000), "f{i}");
    }
    finish(&mut cluster, &to);
}

/// Panics at a step, as far as the folders are concerned like a copier that is killed there.
struct DiesAt(Step);

impl Watcher for DiesAt {
    fn tell(&mut self, step: Step) {
        assert_ne!(step, self.0, "dies here");
    }

    fn is_stopped(&self) -> bool {
        false
    }
}

#[test]
fn a_copier_that_dies_at_the_switch_loses_nothing() {
    let mut cluster = start(0, false);
    let data = pattern(1, 1, 0, 500_000);
    let writing = client(&cluster.config, 1);
    write_file(&writing, "a", &data);
    let unsynced = writing.create(b"b", new_file(0o644)).unwrap();
    unsynced.write_at(&data, 0).unwrap();
    let to = announce(&mut cluster);
    let options = MoveOptions { name: NAME.into(), rate_bytes: 0, left: None };
    for step in [Step::Begun { goes_on: false }, Step::Holding, Step::Complete, Step::Left] {
        let died = catch_unwind(AssertUnwindSafe(|| move_server(&cluster.config, &options, &mut DiesAt(step))));
        assert!(died.is_err(), "{step:?}: {died:?}");
        if step != Step::Left {
            unsynced.write_at(&data[..1000], 0).unwrap();
            assert!(cluster.server(NAME).child.try_wait().unwrap().is_none(), "{step:?}");
        }
    }
    assert!(cluster.server(NAME).wait().success());
    // Neither place is served.
    let ran = run(["serve", cluster.path.to_str().unwrap(), "--name", NAME]);
    assert!(ran.code == 1 && ran.err.contains("must not serve from here again"), "{ran:?}");
    // As on another machine: the old folder is not in sight.
    let (old, away) = (cluster.config.data[1].dir.clone(), cluster.dir.path().join("away"));
    fs::rename(&old, &away).unwrap();
    let ran = move_it(&cluster, &[]);
    assert!(ran.code == 1 && ran.err.contains("--left") && ran.err.contains("store show"), "{ran:?}");
    let ran = move_it(&cluster, &["--left", "1234"]);
    assert!(ran.code == 2 && ran.err.contains("no complete copy"), "{ran:?}");
    let left = impresario_store::departed(&away).unwrap().unwrap();
    assert_eq!(left.address, to.address);
    let ran =
        move_it(&cluster, &["--left", &format!("{:016x}", left.number), "--then", "touch \"$PWD/then\" && false"]);
    assert!(ran.code == 1 && ran.err.contains("start it now"), "{ran:?}");
    fs::rename(&away, &old).unwrap();
    let _ = fs::remove_file("then");
    start_at(&mut cluster, &to);
    unsynced.sync().expect("what was not synced before the move is durable since");
    for name in ["a", "b"] {
        assert!(read_file(&client(&cluster.config, 2), name) == data, "{name}");
    }

    // Of another machine's boot the server speaks as long as this one runs.
    cluster.kill(NAME);
    let mark = to.dir.join("arrived");
    let text = fs::read_to_string(&mark).unwrap();
    let told = text.lines().find_map(|line| line.strip_prefix("told ")).unwrap();
    fs::write(&mark, text.replace(&format!("told {told}"), "told 4d2")).unwrap();
    finish(&mut cluster, &to);
    assert!(cluster.state(NAME)["incarnation"].as_str().unwrap().starts_with("000004d2"));
}

/// Files of programs on a mount, with the kernel between.
#[test]
fn programs_on_a_mount_notice_only_the_wait() {
    if !impresario_testing::require("fuse") {
        return;
    }
    let mut cluster = start(0, false);
    let mnt = cluster.dir.path().join("mnt");
    fs::create_dir(&mnt).unwrap();
    let ran = run(["mount".as_ref(), "-d".as_ref(), cluster.path.as_os_str(), mnt.as_os_str()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let dir = mnt.clone();
    let program = Worker::start(move |rounds| {
        while let Some(round) = rounds.next() {
            let (name, data) = (dir.join(format!("f{}", round % 30)), pattern(round, 1, 0, 300_000));
            let mut file = fs::File::create(&name)?;
            file.write_all(&data)?;
            file.sync_all()?;
            drop(file);
            if fs::read(&name)? != data {
                return Err(std::io::Error::other(format!("other bytes in round {round}")));
            }
        }
        Ok(())
    });
    let to = announce(&mut cluster);
    let ran = move_it(&cluster, &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    start_at(&mut cluster, &to);
    program.goes_on(5);
    let written = program.stop();
    let ran = run(["umount".as_ref(), mnt.as_os_str()]);
    assert_eq!(ran.code, 0, "{ran:?}");
    written.unwrap();
    finish(&mut cluster, &to);
}

#[test]
fn what_cannot_be_read_is_named_and_stops_the_move() {
    let mut cluster = start(0, true);
    let writing = client(&cluster.config, 1);
    for name in ["good", "bad"] {
        write_file(&writing, name, &pattern(1, 1, 0, 500_000));
    }
    cluster.kill(NAME);
    let objects = objects_of(&cluster.config.data[1].dir);
    let bad = objects.iter().max().unwrap();
    let mut bytes = fs::read(bad).unwrap();
    bytes[100_000] ^= 1;
    fs::write(bad, bytes).unwrap();
    cluster.restart(NAME);
    let to = announce(&mut cluster);
    let ran = move_it(&cluster, &[]);
    let key = bad.file_name().unwrap().to_str().unwrap();
    assert!(ran.code == 1 && ran.err.contains(key) && ran.err.contains("impresario scrub"), "{ran:?}");
    let names = ["good", "bad"].into_iter().partition::<Vec<_>, _>(|name| {
        let file = writing.open(name.as_bytes(), false).unwrap();
        file.read_at(&mut vec![0; 500_000], 0).is_ok()
    });
    assert_eq!((names.0.len(), names.1.len()), (1, 1), "{names:?}");
    writing.unlink(names.1[0].as_bytes()).unwrap();
    until("the damaged object is removed", || !bad.exists());
    let ran = move_it(&cluster, &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    start_at(&mut cluster, &to);
    assert!(read_file(&client(&cluster.config, 2), names.0[0]) == pattern(1, 1, 0, 500_000));
}

fn objects_of(dir: &std::path::Path) -> Vec<PathBuf> {
    let list = |dir: PathBuf| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    if !dir.join("objects").exists() {
        return Vec::new();
    }
    let all = list(dir.join("objects")).flat_map(list);
    all.filter(|path| path.extension().is_none()).collect()
}

#[test]
fn clients_wait_for_a_copier_no_longer_than_is_promised() {
    let cluster = Cluster::start(2, 0, |config| config.cluster.request_timeout_ms = 12_000);
    let writing = client(&cluster.config, 1);
    write_file(&writing, "a", &pattern(1, 1, 0, 300_000));
    let identity = Arc::new(Identity::draw(0, 0).unwrap());
    let options = LinkOptions { who: identity.who(), ..LinkOptions::new(Role::Data, 1 << 20) };
    let link = Link::new(&[(NAME, &cluster.config.data[1].address)], identity, options).unwrap();
    let step = |step| link.call(Call::Move(step), &[], None, Instant::now() + PATIENCE).map(|reply| reply.answer);
    let errno = |answer: Result<Answer, ClientError>| answer.unwrap_err().errno();
    assert_eq!(errno(step(MoveCall::Hold { number: 7 })), libc::ESRCH);
    assert_eq!(step(MoveCall::Begin { number: 7 }).unwrap(), Answer::Move(MoveAnswer::Begun { batch: None }));
    let leave = || MoveCall::Leave { number: 7, address: "127.0.0.1:1".into() };
    assert_eq!(errno(step(leave())), libc::ETIME, "clients do not wait");
    let held = step(MoveCall::Hold { number: 7 }).unwrap();
    assert!(matches!(held, Answer::Move(MoveAnswer::Held { for_ms: 2000..=4000 })), "{held:?}");
    let began = Instant::now();
    write_file(&writing, "b", &pattern(2, 1, 0, 300_000));
    let waited = began.elapsed();
    assert!(waited > Duration::from_millis(1600) && waited < Duration::from_millis(11_600), "{waited:?}");
    assert_eq!(errno(step(leave())), libc::ETIME, "clients have gone on");
    assert_eq!(errno(step(MoveCall::State { number: 7, skip: 0 })), libc::ETIME);
    step(MoveCall::Hold { number: 7 }).unwrap();
    step(MoveCall::Release { number: 7 }).unwrap();
    // Another copier ends the hold of one that died, and with it what that had under way.
    let identity = Arc::new(Identity::draw(0, 0).unwrap());
    let options = LinkOptions { who: identity.who(), ..LinkOptions::new(Role::Data, 1 << 20) };
    let other = Link::new(&[(NAME, &cluster.config.data[1].address)], identity, options).unwrap();
    let reading = client(&cluster.config, 2);
    // A busy machine may take as long as the hold would last; not each time.
    let is_ended = (0..10).any(|_| {
        step(MoveCall::Hold { number: 7 }).unwrap();
        let begin = Call::Move(MoveCall::Begin { number: 7 });
        let begun = other.call(begin, &[], None, Instant::now() + PATIENCE).unwrap().answer;
        assert_eq!(begun, Answer::Move(MoveAnswer::Begun { batch: Some(0) }));
        assert_eq!(errno(step(leave())), libc::ETIME);
        let began = Instant::now();
        assert!(read_file(&reading, "b") == pattern(2, 1, 0, 300_000));
        began.elapsed() < Duration::from_millis(1900)
    });
    assert!(is_ended, "clients wait for the end of a hold that another copier has ended");
}

#[test]
fn a_move_that_cannot_be_is_refused_with_the_remedy() {
    let mut cluster = Cluster::start(2, 0, |_| {});
    let ran = move_it(&cluster, &[]);
    assert!(ran.code == 2 && ran.err.contains("moves_to = {"), "{ran:?}");
    let ran = run(["store", "move", cluster.path.to_str().unwrap(), "--name", "meta"]);
    assert!(ran.code == 2 && ran.err.contains("no data server"), "{ran:?}");
    let to = announce(&mut cluster);
    fs::create_dir(&to.dir).unwrap();
    fs::write(to.dir.join("thesis.tex"), "").unwrap();
    let ran = move_it(&cluster, &[]);
    assert!(ran.code == 1 && ran.err.contains("thesis.tex"), "{ran:?}");
    fs::remove_file(to.dir.join("thesis.tex")).unwrap();
    cluster.kill(NAME);
    let ran = move_it(&cluster, &[]);
    assert!(ran.code == 1 && ran.err.contains("is it running?") && ran.err.contains("nothing has changed"), "{ran:?}");
}
