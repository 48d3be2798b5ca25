//! Unstable writes that are answered before they are done: which ones, what waits for them, and what clients learn when one fails.

use std::time::{Duration, Instant};

use crate::support::{Served, serve};
use impresario_backend::SetAttr;
use impresario_nfs::protocol::{Stability, Status, procedure, write_set};
use impresario_nfs::testing::{Client, ClientError, Faults, MemoryTree, handle, name_in, read_back};
use impresario_sched::PolicySpec;

const BLOCK: u64 = 4 << 10;
const BLOCKS: u64 = 32;
const PATIENCE: Duration = Duration::from_secs(20);

/// A server that gathers so much, one batch at a time.
fn gathering(gather_bytes: u64) -> Served {
    serve(&MemoryTree::new(), |settings| {
        settings.policy = PolicySpec::named("mlf");
        settings.in_flight_requests = 1;
        settings.gather_bytes = gather_bytes;
    })
}

/// A client, the export's root, and a file that the client has just written.
fn file(served: &Served) -> (Client, Vec<u8>, Vec<u8>) {
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &SetAttr { mode: Some(0o666), ..SetAttr::default() }).unwrap();
    client.write(&file, 0, &[1; (BLOCKS * BLOCK) as usize], Stability::File).unwrap();
    (client, root, file)
}

fn hang(served: &Served) {
    served.tree.set_faults(Faults { data_hung: true, ..Faults::default() });
}

fn go_on(served: &Served) {
    served.tree.set_faults(Faults::default());
}

fn status(served: &Served, of: &str, figure: &str) -> u64 {
    served.running.status()[of][figure].as_u64().unwrap()
}

/// Waits until so many calls are not answered, and for a moment that they stay so.
fn await_calls(served: &Served, calls: u64) {
    let deadline = Instant::now() + PATIENCE;
    while status(served, "connections", "calls_under_way") != calls {
        assert!(Instant::now() < deadline, "{}", served.running.status()["connections"]);
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(status(served, "connections", "calls_under_way"), calls);
}

/// Writes a block, which is answered before it is done; the verifier.
fn gathered(client: &mut Client, file: &[u8], nth: u64, byte: u8) -> [u8; 8] {
    let (stability, verifier) = client.write(file, nth * BLOCK, &[byte; BLOCK as usize], Stability::Unstable).unwrap();
    assert_eq!(stability, Stability::Unstable);
    verifier
}

#[test]
fn small_writes_become_few_and_reads_and_commits_wait_for_them() {
    let served = gathering(1 << 20);
    let (mut client, _, file) = file(&served);
    served.tree.take_calls();
    hang(&served);
    let verifiers: Vec<[u8; 8]> = (0..BLOCKS).map(|nth| gathered(&mut client, &file, nth, 2)).collect();
    assert_eq!(status(&served, "gathered_writes", "outstanding_bytes"), BLOCKS * BLOCK);
    let read = client.send_read(&file, 5 * BLOCK, 2 * BLOCK as u32).unwrap();
    let mut other = served.client();
    let mut args = handle(&file);
    args.u64(0).u32(0);
    let commit = other.send(procedure::COMMIT, args).unwrap();
    await_calls(&served, 2);
    go_on(&served);
    assert!(read_back(&client.wait(read).unwrap()).unwrap().bytes == [2; 2 * BLOCK as usize]);
    other.wait(commit).unwrap().good().unwrap();
    // The one that began at once, and the rest.
    let (_, writes) = served.tree.take_calls();
    assert!(writes.len() <= 3, "{writes:?}");
    assert!(verifiers.iter().all(|verifier| *verifier == verifiers[0]));
    assert_eq!(client.commit(&file).unwrap(), verifiers[0]);
    let counts = ["answered_early", "outstanding", "outstanding_bytes", "lost"];
    assert_eq!(counts.map(|count| status(&served, "gathered_writes", count)), [BLOCKS, 0, 0, 0]);
}

#[test]
fn of_a_gathered_write_that_fails_the_client_learns_at_its_commit() {
    let served = gathering(1 << 20);
    let (mut client, _, file) = file(&served);
    hang(&served);
    let verifier = gathered(&mut client, &file, 0, 2);
    served.tree.set_faults(Faults { write_errno: Some(libc::ENOSPC), ..Faults::default() });
    assert_ne!(client.commit(&file).unwrap(), verifier);
    assert_eq!(status(&served, "gathered_writes", "lost"), 1);
    // Written again, it gets its error.
    let failed = client.write(&file, 0, &[2; BLOCK as usize], Stability::Unstable);
    assert!(matches!(failed, Err(ClientError::Failed(Status::NOSPC))), "{failed:?}");
    go_on(&served);
    // From then on its writes wait.
    let (_, verifier) = client.write(&file, 0, &[3; BLOCK as usize], Stability::Unstable).unwrap();
    assert_eq!(client.commit(&file).unwrap(), verifier);
    hang(&served);
    let write = client.send_write(&file, 0, &[4; BLOCK as usize], Stability::Unstable).unwrap();
    await_calls(&served, 1);
    go_on(&served);
    client.wait(write).unwrap().good().unwrap();
    assert!(client.read(&file, 0, BLOCK as u32).unwrap().bytes == [4; BLOCK as usize]);
}

#[test]
fn what_may_fail_or_is_too_much_waits() {
    let served = gathering(2 * BLOCK);
    let (mut client, _, file) = file(&served);
    let mut user = served.client();
    user.be(1000, 1000, &[]);
    hang(&served);
    let block = [5; BLOCK as usize];
    let unstable = Stability::Unstable;
    let waiting = [
        (client.send_write(&file, BLOCKS * BLOCK - 1, &block, unstable).unwrap(), "beyond the end"),
        (client.send_write(&file, 0, &block, Stability::Data).unwrap(), "a stable one"),
        (client.send_write(&file, 8 * BLOCK, &[5; 3 * BLOCK as usize], unstable).unwrap(), "a long one"),
    ];
    let another = user.send_write(&file, 4 * BLOCK, &block, unstable).unwrap();
    await_calls(&served, 4);
    gathered(&mut client, &file, 16, 5);
    gathered(&mut client, &file, 17, 5);
    let too_much = client.send_write(&file, 18 * BLOCK, &block, unstable).unwrap();
    await_calls(&served, 5);
    go_on(&served);
    for (xid, what) in waiting.into_iter().chain([(too_much, "beyond the limit")]) {
        client.wait(xid).unwrap().good().map(drop).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    }
    user.wait(another).unwrap().good().unwrap();
    // What was written longer ago says nothing of the file.
    client.commit(&file).unwrap();
    std::thread::sleep(Duration::from_millis(3100));
    let before = status(&served, "gathered_writes", "answered_early");
    client.write(&file, 0, &block, unstable).unwrap();
    assert_eq!((before, status(&served, "gathered_writes", "answered_early")), (2, 2));
}

#[test]
fn changes_of_a_file_come_after_its_gathered_writes() {
    let served = gathering(1 << 20);
    let (mut client, root, file) = file(&served);
    let cut = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    let chmod = SetAttr { mode: Some(0o400), ..SetAttr::default() };
    for (nth, what) in ["CREATE", "SETATTR of the mode", "SETATTR of the length"].into_iter().enumerate() {
        hang(&served);
        gathered(&mut client, &file, 0, 7);
        let mut other = served.client();
        let set = if nth == 1 { &chmod } else { &cut };
        let (number, args) = match nth {
            0 => {
                let mut args = name_in(&root, "f");
                args.u32(0);
                write_set(&mut args, set);
                (procedure::CREATE, args)
            }
            _ => {
                let mut args = handle(&file);
                write_set(&mut args, set);
                args.bool(false);
                (procedure::SETATTR, args)
            }
        };
        let change = other.send(number, args).unwrap();
        await_calls(&served, 1);
        go_on(&served);
        other.wait(change).unwrap().good().map(drop).unwrap_or_else(|error| panic!("{what}: {error:?}"));
        assert_eq!(client.attr(&file).unwrap().size_bytes, if nth == 1 { BLOCKS * BLOCK } else { 0 }, "{what}");
        client.write(&file, 0, &[1; (BLOCKS * BLOCK) as usize], Stability::File).unwrap();
    }
}

#[test]
fn a_server_that_stops_has_done_what_it_has_answered() {
    let mut served = gathering(1 << 20);
    let (mut client, _, file) = file(&served);
    hang(&served);
    for nth in (0..BLOCKS).step_by(2) {
        gathered(&mut client, &file, nth, 9);
    }
    let tree = served.tree.clone();
    let heal = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        tree.set_faults(Faults::default());
    });
    served.running.stop();
    heal.join().unwrap();
    let again = serve(&served.tree, |_| ());
    let (mut client, root) = again.mounted();
    let file = client.lookup(&root, "f").unwrap();
    for nth in (0..BLOCKS).step_by(2) {
        assert!(client.read(&file, nth * BLOCK, BLOCK as u32).unwrap().bytes == [9; BLOCK as usize], "{nth}");
    }
}
