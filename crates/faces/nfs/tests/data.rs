//! Reading and writing through the scheduler: what is merged, what is stable, what is told when bytes are lost.

use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use crate::support::{Served, export, open_rules, serve};
use impresario_backend::SetAttr;
use impresario_nfs::protocol::{Stability, Status, procedure::*, write_set};
use impresario_nfs::testing::{Client, ClientError, Faults, MemoryTree, handle, name_in, read_back, skip_change};
use impresario_sched::PolicySpec;

const KIB: u64 = 1 << 10;
const PATIENCE: Duration = Duration::from_secs(20);

fn none() -> SetAttr {
    SetAttr::default()
}

/// The bytes of a place of a file.
fn content(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| (at.wrapping_mul(31) ^ at >> 8 ^ seed.wrapping_mul(97)) as u8).collect()
}

/// A file of that many bytes at the server.
fn filled(client: &mut Client, root: &[u8], name: &str, len: u64) -> Vec<u8> {
    let file = client.create(root, name, &none()).unwrap();
    for offset in (0..len).step_by(1 << 20) {
        let bytes = content(0, offset, (len - offset).min(1 << 20) as usize);
        client.write(&file, offset, &bytes, Stability::File).unwrap();
    }
    file
}

/// Has requests queue up behind one that hangs, then lets them go.
fn queued<T>(served: &Served, start: impl FnOnce() -> T, queued: u64) -> T {
    served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
    let started = start();
    served.tree.await_hung(1);
    while served.running.status()["connections"]["calls_under_way"].as_u64() < Some(queued) {
        std::thread::yield_now();
    }
    served.tree.set_faults(Faults::default());
    started
}

fn merging(settings: &mut impresario_nfs::Settings) {
    settings.policy = PolicySpec::named("mlf");
    settings.in_flight_requests = 1;
}

#[test]
fn reads_give_what_was_written_up_to_the_end() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let file = filled(&mut client, &root, "f", 100_001);
    let read = client.read(&file, 0, 1 << 20).unwrap();
    assert!(read.bytes == content(0, 0, 100_001) && read.eof);
    let read = client.read(&file, 3, 1000).unwrap();
    assert!(read.bytes == content(0, 3, 1000) && !read.eof);
    let read = client.read(&file, 100_000, 1).unwrap();
    assert!(read.bytes == content(0, 100_000, 1) && read.eof);
    for (offset, count) in [(100_001, 10), (1 << 40, 10), (u64::MAX, 10), (0, 0)] {
        let read = client.read(&file, offset, count).unwrap();
        assert!(read.bytes.is_empty(), "{offset} {count}");
        assert_eq!(read.eof, count > 0);
    }
    // More than the server gives at once.
    assert_eq!(client.read(&file, 0, u32::MAX).unwrap().bytes.len(), 100_001);
    let reply = client.send_write(&file, i64::MAX as u64, b"xx", Stability::File).unwrap();
    assert!(matches!(client.wait(reply).unwrap().open().unwrap(), (Status::FBIG, _)));
    assert_eq!(client.write(&file, 5, b"", Stability::Unstable).unwrap().0, Stability::File);
    let failed = client.read(&root, 0, 10);
    assert!(matches!(failed, Err(ClientError::Failed(Status::ISDIR))), "{failed:?}");
}

#[test]
fn neighbouring_reads_of_many_clients_become_one_and_an_error_meets_its_own() {
    let served = serve(&MemoryTree::new(), merging);
    let (mut client, root) = served.mounted();
    let file = filled(&mut client, &root, "f", 1 << 20);
    served.tree.take_calls();
    let mut clients: Vec<Client> = (0..8).map(|_| served.client()).collect();
    let sent = queued(
        &served,
        || -> Vec<(u64, u32)> {
            let send = |n: u64| {
                let offset = n * 8 * KIB;
                (offset, clients[n as usize % 8].send_read(&file, offset, 8 << 10).unwrap())
            };
            (0..33).map(send).collect()
        },
        33,
    );
    for (n, (offset, xid)) in sent.into_iter().enumerate() {
        let read = read_back(&clients[n % 8].wait(xid).unwrap()).unwrap();
        assert!(read.bytes == content(0, offset, 8 << 10), "{n}");
    }
    let (reads, _) = served.tree.take_calls();
    assert!(reads.len() <= 8, "{reads:?}");

    // One bad byte spoils one answer.
    let bad = 100 * KIB + 7;
    let sent = queued(
        &served,
        || (0..33).map(|n: u64| client.send_read(&file, n * 8 * KIB, 8 << 10).unwrap()).collect::<Vec<u32>>(),
        33,
    );
    // What hung was released without the fault; now with it.
    sent.into_iter().for_each(|xid| drop(client.wait(xid).unwrap()));
    served.tree.set_faults(Faults { data_hung: true, bad_byte: Some(bad), ..Faults::default() });
    let sent: Vec<u32> = (0..33).map(|n: u64| client.send_read(&file, n * 8 * KIB, 8 << 10).unwrap()).collect();
    while served.running.status()["connections"]["calls_under_way"].as_u64() < Some(33) {
        std::thread::yield_now();
    }
    served.tree.set_faults(Faults { bad_byte: Some(bad), ..Faults::default() });
    let failed: Vec<usize> = sent
        .into_iter()
        .enumerate()
        .filter_map(|(n, xid)| read_back(&client.wait(xid).unwrap()).is_err().then_some(n))
        .collect();
    assert_eq!(failed, [bad as usize / (8 << 10)]);
}

/// A server of `/data` and of `/other`, which gives each file system one batch at a time.
fn two_exports(policy: &str, other: &Arc<MemoryTree>) -> Served {
    serve(&MemoryTree::new(), |settings| {
        settings.policy = PolicySpec::named(policy);
        settings.in_flight_requests = 1;
        settings.exports.push(export("/other", other, open_rules()));
    })
}

/// Has reads of `/data` hang, and sends one to `/other`; what `check` finds then, while a thread waits for the answer.
fn beside_hung_reads<T>(served: &Served, check: impl FnOnce(&mpsc::Receiver<Vec<u8>>) -> T) -> T {
    let (mut client, root) = served.mounted();
    let slow = filled(&mut client, &root, "f", 100);
    let mut other = served.client();
    let root = other.mount("/other").unwrap();
    let file = filled(&mut other, &root, "f", 100);
    served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
    let hung: Vec<u32> = (0..8).map(|n| client.send_read(&slow, 10 * n, 5).unwrap()).collect();
    served.tree.await_hung(1);
    let (tell, told) = mpsc::channel();
    let reading = std::thread::spawn(move || tell.send(other.read(&file, 0, 100).unwrap().bytes));
    let found = check(&told);
    served.tree.set_faults(Faults::default());
    hung.into_iter().for_each(|xid| drop(client.wait(xid).unwrap()));
    reading.join().unwrap().unwrap();
    found
}

/// Whatever the policy hands over, a file system that hangs has no more than its own threads.
#[test]
fn an_export_does_not_wait_for_another_file_system() {
    for policy in ["fifo", "none"] {
        let served = two_exports(policy, &MemoryTree::on_another_device());
        let read = beside_hung_reads(&served, |told| told.recv_timeout(PATIENCE));
        assert!(read.is_ok_and(|bytes| bytes == content(0, 0, 100)), "{policy}");
        assert_eq!(served.running.status()["engine"]["lanes"].as_array().unwrap().len(), 2);
    }
}

/// A write to a page cache takes no time, and reads that wait for a device have all of their threads.
#[test]
fn writes_and_syncs_wait_for_no_thread_that_reads() {
    let served = serve(&MemoryTree::new(), |settings| {
        settings.policy = PolicySpec::named("none");
        settings.in_flight_requests = 1;
    });
    let (mut client, root) = served.mounted();
    let (slow, file) = (filled(&mut client, &root, "slow", 100), filled(&mut client, &root, "f", 100));
    let node = impresario_backend::Handle::new(&slow[13..]).unwrap();
    served.tree.set_faults(Faults { hung: Some(node), ..Faults::default() });
    let hung: Vec<u32> = (0..4).map(|n| client.send_read(&slow, 10 * n, 5).unwrap()).collect();
    served.tree.await_hung(1);
    let mut other = served.client();
    let (tell, told) = mpsc::channel();
    let writing = std::thread::spawn(move || {
        other.write(&file, 0, b"written", Stability::Unstable).unwrap();
        other.commit(&file).unwrap();
        tell.send(()).unwrap();
    });
    let done = told.recv_timeout(PATIENCE);
    served.tree.set_faults(Faults::default());
    hung.into_iter().for_each(|xid| drop(client.wait(xid).unwrap()));
    writing.join().unwrap();
    assert!(done.is_ok());
}

#[test]
fn exports_of_one_file_system_share_its_lane() {
    let served = two_exports("fifo", &MemoryTree::new());
    beside_hung_reads(&served, |told| {
        // Seven of those that hang, and the other one.
        let deadline = Instant::now() + PATIENCE;
        while served.running.status()["engine"]["queued"] != 8 {
            assert!(Instant::now() < deadline, "{}", served.running.status()["engine"]);
            std::thread::yield_now();
        }
        assert!(told.try_recv().is_err());
    });
    let status = served.running.status();
    assert_eq!(status["engine"]["lanes"].as_array().unwrap().len(), 1);
    assert!(status["exports"].as_array().unwrap().iter().all(|export| export["lane"] == 0));
}

#[test]
fn users_are_not_merged_with_those_who_may_read() {
    let served = serve(&MemoryTree::new(), merging);
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &SetAttr { mode: Some(0o600), uid: Some(5), ..none() }).unwrap();
    client.write(&file, 0, &content(0, 0, 64 << 10), Stability::File).unwrap();
    let (mut owner, mut other) = (served.client(), served.client());
    owner.be(5, 5, &[]);
    other.be(6, 6, &[]);
    let sent = queued(
        &served,
        || {
            let first = client.send_read(&file, 0, 1).unwrap();
            let theirs: Vec<(u32, u32)> = (0..8)
                .map(|n| {
                    let at = n * 8 * KIB;
                    (owner.send_read(&file, at, 4096).unwrap(), other.send_read(&file, at + 4096, 4096).unwrap())
                })
                .collect();
            (first, theirs)
        },
        17,
    );
    client.wait(sent.0).unwrap();
    for (mine, theirs) in sent.1 {
        assert_eq!(read_back(&owner.wait(mine).unwrap()).unwrap().bytes.len(), 4096);
        assert!(matches!(read_back(&other.wait(theirs).unwrap()), Err(ClientError::Failed(Status::ACCES))));
    }
}

#[test]
fn neighbouring_writes_become_one_that_is_as_stable_as_the_strictest() {
    let served = serve(&MemoryTree::new(), merging);
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &none()).unwrap();
    served.tree.take_calls();
    let sent = queued(
        &served,
        || -> Vec<u32> {
            let how = |n: u64| if n == 20 { Stability::Data } else { Stability::Unstable };
            let send = |n: u64| client.send_write(&file, n * 4096, &content(9, n * 4096, 4096), how(n)).unwrap();
            (0..32).map(send).collect()
        },
        32,
    );
    for (n, xid) in sent.into_iter().enumerate() {
        let reply = client.wait(xid).unwrap();
        let mut reader = reply.good().unwrap();
        skip_change(&mut reader).unwrap();
        assert_eq!(reader.u32().unwrap(), 4096);
        let committed = Stability::read(&mut reader).unwrap();
        assert!(committed >= if n == 20 { Stability::Data } else { Stability::Unstable });
    }
    let (_, writes) = served.tree.take_calls();
    assert!(writes.len() <= 8, "{writes:?}");
    assert!(client.read(&file, 0, 128 << 10).unwrap().bytes == content(9, 0, 128 << 10));
    // What was said to be stable is.
    served.tree.crash();
    assert!(client.read(&file, 20 * 4096, 4096).unwrap().bytes == content(9, 20 * 4096, 4096));
    // Of writes that fail together each is told of its own failure.
    served.tree.set_faults(Faults { write_errno: Some(libc::ENOSPC), ..Faults::default() });
    let failed = client.write(&file, 0, b"x", Stability::Unstable);
    assert!(matches!(failed, Err(ClientError::Failed(Status::NOSPC))), "{failed:?}");
}

#[test]
fn what_is_committed_survives_and_the_verifier_tells_of_what_does_not() {
    let tree = MemoryTree::new();
    let key = impresario_nfs::HandleKey::random().unwrap();
    let here = key.clone();
    let served = serve(&tree, |settings| settings.key = here);
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &none()).unwrap();
    let (how, first) = client.write(&file, 0, b"committed", Stability::Unstable).unwrap();
    assert_eq!(how, Stability::Unstable);
    assert_eq!(client.commit(&file).unwrap(), first);
    assert_eq!(client.write(&file, 9, b"/stable", Stability::File).unwrap(), (Stability::File, first));
    client.write(&file, 16, b"/unstable", Stability::Unstable).unwrap();
    drop(served);
    tree.crash();
    // The same handles at the next server; another verifier, so the client writes again what it has not committed.
    let served = serve(&tree, |settings| settings.key = key);
    let mut client = served.client();
    assert_eq!(client.read(&file, 0, 100).unwrap().bytes, b"committed/stable");
    let (_, second) = client.write(&file, 16, b"/unstable", Stability::Unstable).unwrap();
    assert_ne!(first, second);
    assert_eq!(client.commit(&file).unwrap(), second);
    // A sync that fails may have lost what others wrote, too.
    served.tree.set_faults(Faults { sync_errno: Some(libc::EIO), ..Faults::default() });
    assert!(matches!(client.commit(&file), Err(ClientError::Failed(Status::IO))));
    served.tree.set_faults(Faults::default());
    let (_, third) = client.write(&file, 0, b"x", Stability::Unstable).unwrap();
    assert_ne!(second, third);
}

#[test]
fn a_repeated_call_is_answered_and_not_carried_out_again() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    client.create(&root, "f", &none()).unwrap();
    client.set_xid(1000);
    let first = client.call(REMOVE, name_in(&root, "f")).unwrap();
    // The connection breaks; the client asks again on another one.
    let mut again = served.client();
    again.set_xid(1000);
    assert_eq!(again.call(REMOVE, name_in(&root, "f")).unwrap(), first);
    first.good().unwrap();
    // Another call under this number is another call.
    again.set_xid(1000);
    assert!(matches!(again.remove(&root, "g"), Err(ClientError::Failed(Status::NOENT))));

    // Repeated while it is under way, it is carried out once, and both are answered.
    let file = client.create(&root, "h", &none()).unwrap();
    served.tree.take_calls();
    served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
    client.set_xid(2000);
    again.set_xid(2000);
    let one = client.send_write(&file, 0, b"once", Stability::File).unwrap();
    served.tree.await_hung(1);
    let two = again.send_write(&file, 0, b"once", Stability::File).unwrap();
    while served.running.status()["repetitions"]["repeated"].as_u64() < Some(2) {
        std::thread::yield_now();
    }
    served.tree.set_faults(Faults::default());
    assert_eq!(client.wait(one).unwrap(), again.wait(two).unwrap());
    assert_eq!(served.tree.take_calls().1, [(0, 4)]);
}

/// More repetitions than wait for the answer are as if they were lost: a failure would end the call of a client for which it is
/// carried out later.
#[test]
fn a_call_under_way_is_never_answered_with_a_failure_however_often_it_is_repeated() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &none()).unwrap();
    served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
    let mut clients: Vec<Client> = (0..8).map(|_| served.client()).collect();
    let repeated = || served.running.status()["repetitions"]["repeated"].as_u64().unwrap();
    for (n, client) in clients.iter_mut().enumerate() {
        client.set_xid(2000);
        client.send_write(&file, 0, b"once", Stability::File).unwrap();
        served.tree.await_hung(1);
        impresario_testing::until("it has come", || repeated() == n as u64);
    }
    for client in &mut clients {
        client.socket().set_nonblocking(true).unwrap();
        let got = std::io::Read::read(client.socket(), &mut [0; 4]);
        assert_eq!(got.map_err(|error| error.kind()), Err(std::io::ErrorKind::WouldBlock));
        client.socket().set_nonblocking(false).unwrap();
    }
    served.tree.set_faults(Faults::default());
    clients[0].wait(2000).unwrap().good().unwrap();
    // Asked once more, whoever was not answered is.
    clients[7].set_xid(2000);
    let again = clients[7].send_write(&file, 0, b"once", Stability::File).unwrap();
    clients[7].wait(again).unwrap().good().unwrap();
}

#[test]
fn a_hung_file_delays_nobody_else() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let hung = client.make_dir(&root, "hung", 0o755).unwrap();
    let node = impresario_backend::Handle::new(&hung[13..]).unwrap();
    served.tree.set_faults(Faults { hung: Some(node), ..Faults::default() });
    // However many clients call it.
    let mut stuck: Vec<Client> = (0..3).map(|_| served.client()).collect();
    let all = stuck.iter_mut().map(|client| (0..100).map(|_| client.send(GETATTR, handle(&hung)).unwrap()).collect());
    let calls: Vec<Vec<u32>> = all.collect();
    served.tree.await_hung(16);
    for n in 0..50 {
        client.create(&root, &format!("f{n}"), &none()).unwrap();
    }
    served.tree.set_faults(Faults::default());
    for (client, calls) in stuck.iter_mut().zip(calls) {
        for xid in calls {
            client.wait(xid).unwrap().good().unwrap();
        }
    }
}

/// Others read and write the file whose data go to the device; what they write is not lost to the next COMMIT.
#[test]
fn a_commit_holds_up_nobody() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let file = filled(&mut client, &root, "f", 64 * KIB);
    client.write(&file, 0, &content(1, 0, 8192), Stability::Unstable).unwrap();
    served.tree.set_faults(Faults { syncs_hung: true, ..Faults::default() });
    let mut args = handle(&file);
    args.u64(0).u32(0);
    let commit = client.send(COMMIT, args).unwrap();
    served.tree.await_hung(1);
    let mut other = served.client();
    assert!(other.read(&file, 0, 4096).unwrap().bytes == content(1, 0, 4096));
    let (_, verifier) = other.write(&file, 4096, &content(2, 4096, 8192), Stability::Unstable).unwrap();
    assert!(other.read(&file, 4096, 8192).unwrap().bytes == content(2, 4096, 8192));
    served.tree.set_faults(Faults::default());
    client.wait(commit).unwrap().good().unwrap();
    assert_eq!(other.commit(&file).unwrap(), verifier);
    served.tree.crash();
    assert!(other.read(&file, 4096, 8192).unwrap().bytes == content(2, 4096, 8192));
}

/// Whatever the policy, reads do not share the room of those that wait for the device.
#[test]
fn commits_hold_up_no_read_however_many_they_are() {
    for policy in ["fifo", "auto"] {
        let served = serve(&MemoryTree::new(), |settings| {
            settings.policy = PolicySpec::named(policy);
            settings.in_flight_requests = 2;
        });
        let (mut client, root) = served.mounted();
        let files: Vec<_> = (0..3).map(|n| filled(&mut client, &root, &format!("f{n}"), 4096)).collect();
        for file in &files {
            client.write(file, 0, b"written", Stability::Unstable).unwrap();
        }
        served.tree.set_faults(Faults { syncs_hung: true, ..Faults::default() });
        let commit = |file: &Vec<u8>| {
            let mut args = handle(file);
            args.u64(0).u32(0);
            client.send(COMMIT, args).unwrap()
        };
        let commits: Vec<u32> = files.iter().map(commit).collect();
        served.tree.await_hung(2);
        let (mut other, (tell, told)) = (served.client(), mpsc::channel());
        let file = files[0].clone();
        let reading = std::thread::spawn(move || tell.send(other.read(&file, 0, 7).unwrap().bytes));
        let read = told.recv_timeout(PATIENCE);
        served.tree.set_faults(Faults::default());
        for xid in commits {
            client.wait(xid).unwrap().good().unwrap();
        }
        reading.join().unwrap().unwrap();
        assert_eq!(read.as_deref(), Ok(b"written".as_slice()), "{policy}");
    }
}

/// Nor do they share its threads with what takes a place that reads wait for.
#[test]
fn a_commit_holds_up_no_change_of_another_length_and_no_read_behind_it() {
    for policy in ["fifo", "mlf", "aioli"] {
        let served = serve(&MemoryTree::new(), |settings| {
            settings.policy = PolicySpec::named(policy);
            settings.in_flight_requests = 1;
        });
        let (mut client, root) = served.mounted();
        let [committed, cut] = ["committed", "cut"].map(|name| filled(&mut client, &root, name, 4096));
        let hung = impresario_backend::Handle::new(&committed[13..]).unwrap();
        served.tree.set_faults(Faults { sync_hung: Some(hung), ..Faults::default() });
        let mut args = handle(&committed);
        args.u64(0).u32(0);
        let commit = client.send(COMMIT, args).unwrap();
        served.tree.await_hung(1);
        let (mut other, (tell, told)) = (served.client(), mpsc::channel());
        let others = std::thread::spawn(move || {
            let mut args = handle(&cut);
            write_set(&mut args, &SetAttr { size_bytes: Some(7), ..none() });
            args.bool(false);
            other.call(SETATTR, args).unwrap().good().unwrap();
            tell.send(other.read(&cut, 0, 4096).unwrap().bytes)
        });
        let read = told.recv_timeout(PATIENCE);
        served.tree.set_faults(Faults::default());
        client.wait(commit).unwrap().good().unwrap();
        others.join().unwrap().unwrap();
        assert_eq!(read, Ok(content(0, 0, 7)), "{policy}");
    }
}

#[test]
fn a_stopping_server_answers_what_it_has_taken() {
    let mut served = Served::new();
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &none()).unwrap();
    let xid = queued(&served, || client.send_write(&file, 0, b"last", Stability::File).unwrap(), 1);
    let stopping = std::thread::spawn(move || served.running.stop());
    let reply = client.wait(xid).unwrap();
    reply.good().unwrap();
    stopping.join().unwrap();
    assert!(matches!(client.attr(&root), Err(ClientError::Io(_))));
}

#[test]
fn back_pressure_delays_and_loses_nothing() {
    // Memory for one large answer at a time.
    let served = serve(&MemoryTree::new(), |settings| settings.memory_bytes = 1 << 20);
    let (mut client, root) = served.mounted();
    let file = filled(&mut client, &root, "f", 4 << 20);
    let threads: Vec<_> = (0..8u64)
        .map(|n| {
            let (mut client, file) = (served.client(), file.clone());
            std::thread::spawn(move || {
                let sent: Vec<(u64, u32)> = (0..16)
                    .map(|k| (n + k) % 8 * 512 * KIB)
                    .map(|offset| (offset, client.send_read(&file, offset, 512 << 10).unwrap()))
                    .collect();
                for (offset, xid) in sent {
                    let mut reply = client.wait(xid).unwrap();
                    // Asked to come again later, it does.
                    while matches!(read_back(&reply), Err(ClientError::Failed(Status::JUKEBOX))) {
                        let xid = client.send_read(&file, offset, 512 << 10).unwrap();
                        reply = client.wait(xid).unwrap();
                    }
                    assert!(read_back(&reply).unwrap().bytes == content(0, offset, 512 << 10));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let memory = served.running.status()["memory"].clone();
    // One call beyond the limit, with its record and its answer.
    assert!(memory["peak_bytes"].as_u64().unwrap() <= 3 << 20, "{memory}");
}

#[test]
fn many_clients_write_and_read_back_one_file_under_every_kind_of_policy() {
    for policy in ["auto", "mlf", "sjf", "stream", "twins", "mclock"] {
        if impresario_sched::policy::check(&PolicySpec::named(policy), 1).is_err() {
            continue;
        }
        let served = serve(&MemoryTree::new(), |settings| settings.policy = PolicySpec::named(policy));
        let (mut client, root) = served.mounted();
        let file = client.create(&root, "shared", &none()).unwrap();
        const CLIENTS: u64 = 32;
        let together = Arc::new(Barrier::new(CLIENTS as usize));
        let threads: Vec<_> = (0..CLIENTS)
            .map(|n| {
                let (mut client, file, together) = (served.client(), file.clone(), together.clone());
                std::thread::spawn(move || {
                    together.wait();
                    let mine = |k: u64| (k * CLIENTS + n) * 8 * KIB;
                    let verifier = client.write(&file, mine(0), &content(1, mine(0), 8 << 10), Stability::Unstable);
                    let verifier = verifier.unwrap().1;
                    for k in 1..8 {
                        let bytes = content(1, mine(k), 8 << 10);
                        let sent = client.send_write(&file, mine(k), &bytes, Stability::Unstable).unwrap();
                        let read = client.send_read(&file, mine(k - 1), 8 << 10).unwrap();
                        client.wait(sent).unwrap().good().unwrap();
                        let read = read_back(&client.wait(read).unwrap()).unwrap();
                        assert!(read.bytes == content(1, mine(k - 1), 8 << 10));
                    }
                    assert_eq!(client.commit(&file).unwrap(), verifier);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        served.tree.crash();
        let len = 8 * CLIENTS * 8 * KIB;
        for offset in (0..len).step_by(1 << 20) {
            let read = client.read(&file, offset, 1 << 20).unwrap();
            assert!(read.bytes == content(1, offset, 1 << 20), "{policy} {offset}");
        }
    }
}

#[test]
fn the_state_tells_policy_calls_and_who_loads_it() {
    let served = serve(&MemoryTree::new(), |settings| settings.policy = PolicySpec::named("auto"));
    let (mut client, root) = served.mounted();
    let file = filled(&mut client, &root, "f", 1000);
    client.be(42, 42, &[]);
    client.read(&file, 0, 1000).unwrap();
    let status = served.running.status();
    assert_eq!(status["engine"]["policy"]["name"], "auto");
    assert_eq!(status["calls"]["procedures"]["read"]["calls"], 1);
    assert_eq!(status["calls"]["procedures"]["mount.mnt"]["calls"], 1);
    assert!(status["calls"]["procedures"]["read"]["p99_us"].as_f64() > Some(0.0));
    assert_eq!(status["calls"]["clients"][0]["written_bytes"], 1000);
    let users = status["calls"]["users"].as_array().unwrap();
    assert!(users.iter().any(|user| user["user"] == "42" && user["read_bytes"] == 1000));
    served.running.set_policy(&PolicySpec::named("mlf")).unwrap();
    assert!(served.running.set_policy(&PolicySpec::named("none-such")).is_err());
    assert_eq!(served.running.status()["engine"]["policy"]["name"], "mlf");
    assert_eq!(client.read(&file, 0, 1000).unwrap().bytes.len(), 1000);
}
