//! Changes of names and bytes are applied once, though copies of them are delayed, repeated through another I/O node, or find a
//! restarted metadata server.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{self, Cluster, Peer, fault};
use impresario_base::lock::Mutex;
use impresario_client::{Client, ClientOptions, CreateOptions, Via};
use impresario_server::{StartError, Started};
use impresario_testing::{eventually, until};
use impresario_wire::{
    Answer, Call, ClientKey, Extents, Fault, FileKey, MetaCall, NodeKind, Role, Sender, SpaceChange, Who, XattrMode,
};

/// A link that can get stuck: what a client sends is then held back, and delivered when the link heals, whether or not
/// the client has gone meanwhile.
struct SlowLink {
    address: String,
    shared: Arc<Shared>,
}

struct Shared {
    stuck: AtomicBool,
    /// Only the connections before this number are stuck.
    stuck_before: AtomicUsize,
    /// Bytes held back, and bytes that the server has answered in all.
    held: AtomicUsize,
    answered: AtomicUsize,
    servers: Mutex<Vec<TcpStream>>,
}

impl SlowLink {
    fn to(server: &str) -> SlowLink {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            stuck: AtomicBool::new(false),
            stuck_before: AtomicUsize::new(usize::MAX),
            held: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
            servers: Mutex::default(),
        });
        let (here, server) = (shared.clone(), server.to_string());
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let number = here.servers.lock().len();
                if here.is_stuck(number) {
                    continue; // closed at once: the client goes elsewhere
                }
                let Ok(server) = TcpStream::connect(&server) else { continue };
                here.servers.lock().push(server.try_clone().unwrap());
                let (from, to, shared) = (client.try_clone().unwrap(), server.try_clone().unwrap(), here.clone());
                std::thread::spawn(move || shared.carry_there(number, from, to));
                let shared = here.clone();
                std::thread::spawn(move || shared.carry_back(server, client));
            }
        });
        SlowLink { address, shared }
    }

    fn stick(&self) {
        self.shared.stuck.store(true, Ordering::SeqCst);
    }

    /// Only what is connected now gets stuck.
    fn stick_what_is_connected(&self) {
        self.shared.stuck_before.store(self.shared.servers.lock().len(), Ordering::SeqCst);
        self.stick();
    }

    fn held(&self) -> usize {
        self.shared.held.load(Ordering::SeqCst)
    }

    /// Delivers what was held back and waits until the server has answered it.
    fn heal(&self) {
        assert!(self.held() > 0, "nothing is held back");
        let before = self.shared.answered.load(Ordering::SeqCst);
        self.shared.stuck.store(false, Ordering::SeqCst);
        until("the server answers what was held back", || self.shared.answered.load(Ordering::SeqCst) > before);
    }
}

impl Shared {
    fn is_stuck(&self, number: usize) -> bool {
        self.stuck.load(Ordering::SeqCst) && number < self.stuck_before.load(Ordering::SeqCst)
    }

    fn carry_there(&self, number: usize, mut client: TcpStream, mut server: TcpStream) {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let got = client.read(&mut buffer).unwrap_or(0);
            self.held.fetch_add(if self.is_stuck(number) { got } else { 0 }, Ordering::SeqCst);
            while self.is_stuck(number) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if got == 0 || server.write_all(&buffer[..got]).is_err() {
                return;
            }
        }
    }

    fn carry_back(&self, mut server: TcpStream, mut client: TcpStream) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(got @ 1..) = server.read(&mut buffer) {
            self.answered.fetch_add(got, Ordering::SeqCst);
            // The client may be gone: what the server says is of interest all the same.
            let _ = client.write_all(&buffer[..got]);
        }
        let _ = client.shutdown(Shutdown::Both);
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        self.shared.stuck.store(false, Ordering::SeqCst);
        self.shared.servers.lock().iter().for_each(|server| drop(server.shutdown(Shutdown::Both)));
    }
}

/// Two I/O nodes, of which the first is behind a link that can get stuck.
struct Bed {
    link: SlowLink,
    client: Arc<Client>,
    meta: Option<Started>,
    cluster: Cluster,
    _io: [Started; 2],
}

impl Bed {
    fn start() -> Bed {
        // Ample, for a silent node is left long before: the machine may be busy with other tests.
        let mut cluster = Cluster::start(2, |config| config.cluster.request_timeout_ms = 20_000);
        let meta = impresario_server::start(&cluster.config, "meta").unwrap();
        let io = [cluster.start_io(|_| {}), cluster.start_io(|_| {})];
        let link = SlowLink::to(io[0].address());
        let mut config = cluster.config.clone();
        config.io[0].address = link.address.clone();
        let client = Client::connect(&config, ClientOptions { via: Via::IoNode(0), ..Default::default() }).unwrap();
        Bed { link, client, meta: Some(meta), cluster, _io: io }
    }

    fn write_new(&self, path: &str, bytes: &[u8]) {
        let options = CreateOptions { exclusive: true, ..CreateOptions::default() };
        let file = self.client.create(path, options).unwrap();
        assert_eq!(file.write_at(bytes, 0).unwrap(), bytes.len());
        file.sync().unwrap();
        file.close().unwrap();
    }

    #[track_caller]
    fn assert_holds(&self, path: &str, bytes: &[u8]) {
        let file = self.client.open(path, false).unwrap_or_else(|error| panic!("{path} is gone: {error}"));
        let mut read = vec![0; bytes.len() + 1];
        let got = file.read_at(&mut read, 0).unwrap();
        assert_eq!(&read[..got], bytes, "{path}");
    }

    /// A client that goes to the metadata server directly.
    fn another_client(&self) -> Arc<Client> {
        Client::connect(&self.cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap()
    }

    fn restart_meta(&mut self) {
        drop(self.meta.take());
        // What accepted the last connections may have the port for a moment.
        let start = || match impresario_server::start(&self.cluster.config, "meta") {
            Err(StartError::Bind(_)) => None,
            started => Some(started.unwrap()),
        };
        self.meta = Some(eventually("the port is free", start));
    }
}

/// A copy of request `sequence` of a client, sent in its second epoch; the first was sent in its first.
fn copy(client: u64, sequence: u64) -> Who {
    Who { epoch: 2, ..first(client, sequence) }
}

fn first(client: u64, sequence: u64) -> Who {
    Who { sequence, ..support::who(client) }
}

#[test]
fn a_copy_of_a_write_that_was_done_does_not_undo_what_others_wrote_since() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let file = FileKey(1);
    let write = |who, lane_offset| Call::Write { who, file, lane_offset };
    assert_eq!(peer.call(&write(first(1, 5), 0), &[1; 100]).0, Answer::Written(100));
    assert_eq!(peer.call(&write(first(2, 5), 20), &[2; 10]).0, Answer::Written(10));
    // Cut otherwise than the first, and with bytes of the same request that never came.
    assert_eq!(peer.call(&write(copy(1, 5), 0), &[1; 60]).0, Answer::Written(60));
    assert_eq!(peer.call(&write(copy(1, 5), 60), &[1; 60]).0, Answer::Written(60));
    let expected = [&[1; 20][..], &[2; 10], &[1; 90]].concat();
    assert_eq!(peer.read(9, 1, 0, 200), expected);
    // Of a copy that comes again, also what only the copy before it has done.
    assert_eq!(peer.call(&write(first(2, 6), 100), &[3; 20]).0, Answer::Written(20));
    assert_eq!(peer.call(&write(Who { epoch: 3, ..copy(1, 5) }, 60), &[1; 60]).0, Answer::Written(60));
    let expected = [&expected[..100], &[3; 20]].concat();
    assert_eq!(peer.read(9, 1, 0, 200), expected);
    // Another request of the client is no copy of it, in whatever epoch.
    assert_eq!(peer.call(&write(Who { epoch: 3, ..copy(1, 6) }, 20), &[4; 10]).0, Answer::Written(10));
    assert_eq!(peer.read(9, 1, 20, 10), [4; 10]);
}

#[test]
fn a_copy_of_one_of_several_writes_that_were_merged_is_not_done_again() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let file = FileKey(1);
    let others = vec![Sender::from(&first(2, 8)), Sender::from(&first(1, 6))];
    let merged = Call::WriteMerged { who: first(1, 5), others: others.clone(), file, lane_offset: 0 };
    let bytes = [[1; 10], [2; 10], [3; 10]].concat();
    assert_eq!(peer.call(&merged, &bytes).0, Answer::Written(30));
    let list = Call::WriteList { who: first(1, 5), others, file, extents: Extents::of(&[(100, 10), (200, 20)]) };
    assert_eq!(peer.call(&list, &bytes).0, Answer::Written(30));
    let write = |who, lane_offset| Call::Write { who, file, lane_offset };
    for at in [0, 100, 200, 210, 220] {
        assert_eq!(peer.call(&write(first(3, 1 + at), at), &[9; 10]).0, Answer::Written(10));
    }
    for (who, at) in [(copy(1, 5), 0), (copy(1, 5), 100), (copy(2, 8), 200), (copy(1, 6), 210)] {
        assert_eq!(peer.call(&write(who, at), &[7; 10]).0, Answer::Written(10));
        assert_eq!(peer.read(9, 1, at, 10), [9; 10], "{at}");
    }
    assert_eq!(peer.read(9, 1, 10, 20), bytes[10..]);
}

#[test]
fn a_copy_of_a_cut_or_hole_that_was_made_does_not_take_what_others_wrote_since() {
    let cluster = Cluster::start(1, |_| {});
    let mut peer = cluster.peer(0, 1);
    let file = FileKey(1);
    let write = |who, lane_offset| Call::Write { who, file, lane_offset };
    let cut = |who| Call::Truncate { who, file, len: 40 };
    let punch = |who, at| Call::ChangeSpace { who, file, change: SpaceChange::Punch, lane_offset: at, len: 20 };
    assert_eq!(peer.call(&write(first(1, 5), 0), &[1; 100]).0, Answer::Written(100));
    assert_eq!(peer.call(&cut(first(1, 6)), &[]).0, Answer::Done);
    assert!(matches!(peer.call(&punch(first(1, 7), 0), &[]).0, Answer::Written(_) | Answer::Done));
    assert_eq!(peer.call(&write(first(2, 1), 0), &[2; 100]).0, Answer::Written(100));
    // The write is not done again for want of a memory of the cut, nor the cut, nor the hole.
    assert_eq!(peer.call(&write(copy(1, 5), 0), &[1; 100]).0, Answer::Written(100));
    assert_eq!(peer.call(&cut(copy(1, 6)), &[]).0, Answer::Done);
    peer.call(&punch(copy(1, 7), 0), &[]);
    assert_eq!(peer.read(9, 1, 0, 200), [2; 100]);
    // One that was not made is.
    assert_eq!(peer.call(&cut(copy(1, 8)), &[]).0, Answer::Done);
    peer.call(&punch(copy(1, 9), 10), &[]);
    assert_eq!(peer.read(9, 1, 0, 200), [&[2; 10][..], &[0; 20], &[2; 10]].concat());
}

#[test]
fn a_delayed_unlink_does_not_remove_a_file_made_since() {
    let bed = Bed::start();
    bed.write_new("f", b"old");
    bed.link.stick();
    bed.client.unlink("f").unwrap();
    bed.write_new("f", b"made since");
    bed.link.heal();
    bed.assert_holds("f", b"made since");
}

#[test]
fn a_delayed_punch_does_not_take_what_was_written_since() {
    let bed = Bed::start();
    let file = bed.client.create("f", CreateOptions::default()).unwrap();
    file.write_at(&[1; 200_000], 0).unwrap();
    bed.link.stick();
    file.change_space(SpaceChange::Punch, 50_000, 100_000).unwrap();
    file.write_at(&[2; 100_000], 50_000).unwrap();
    bed.link.heal();
    drop(file);
    bed.assert_holds("f", &[[1; 50_000].as_slice(), &[2; 100_000], &[1; 50_000]].concat());
}

#[test]
fn a_delayed_rename_does_not_move_a_file_made_since() {
    let bed = Bed::start();
    bed.write_new("a", b"old");
    bed.link.stick();
    bed.client.rename("a", "b", false).unwrap();
    bed.write_new("a", b"made since");
    bed.link.heal();
    bed.assert_holds("a", b"made since");
    bed.assert_holds("b", b"old");
}

#[test]
fn a_delayed_exchange_is_not_done_twice() {
    let bed = Bed::start();
    bed.write_new("a", b"one");
    bed.write_new("b", b"other");
    bed.link.stick();
    bed.client.exchange("a", "b").unwrap();
    bed.link.heal();
    bed.assert_holds("a", b"other");
    bed.assert_holds("b", b"one");
}

/// The metadata server stops in an exchange of names, before or after it is done. What it left is put there by hand.
#[test]
fn an_exchange_that_a_restart_interrupted_is_done_once() {
    for is_done in [false, true] {
        let mut bed = Bed::start();
        bed.write_new("a", b"one");
        bed.write_new("b", b"other");
        let node = bed.client.stat("a").unwrap().ino;
        drop(bed.meta.take());
        let dir = bed.cluster.config.meta.dir.clone();
        let note = |kind: u32, node: u64| {
            [&kind.to_le_bytes()[..], &[0; 4], &77u64.to_le_bytes(), &5u64.to_le_bytes(), &node.to_le_bytes()].concat()
        };
        let mut changes = std::fs::OpenOptions::new().append(true).open(dir.join("changes")).unwrap();
        std::io::Write::write_all(&mut changes, &[note(1, 0), note(8, node)].concat()).unwrap();
        if is_done {
            let (a, b) = (dir.join("names/a"), dir.join("names/b"));
            rustix::fs::renameat_with(rustix::fs::CWD, a, rustix::fs::CWD, b, rustix::fs::RenameFlags::EXCHANGE)
                .unwrap();
        }
        bed.meta = Some(impresario_server::start(&bed.cluster.config, "meta").unwrap());
        let address = bed.cluster.config.meta.address.clone();
        for epoch in 1..4 {
            let who = Who { client: ClientKey(77), epoch, sequence: 5, ..Who::default() };
            let call = MetaCall::Exchange { from: b"a".into(), to: b"b".into() };
            let answer = Peer::connect(&address, Role::Meta, 77).call(&Call::Meta { who, call }, &[]).0;
            assert_eq!(answer, Answer::Done, "{is_done} {epoch}");
            assert_eq!(bed.client.stat("b").unwrap().ino, node, "{is_done} {epoch}");
            if epoch == 2 {
                bed.restart_meta();
            }
        }
        bed.assert_holds("a", b"other");
        bed.assert_holds("b", b"one");
    }
}

#[test]
fn a_delayed_link_does_not_come_back() {
    let bed = Bed::start();
    bed.write_new("a", b"linked");
    bed.link.stick();
    assert_eq!(bed.client.link("a", "b").unwrap().nlink, 2);
    assert_eq!(bed.client.remove_name("b").unwrap(), Some(1));
    bed.link.heal();
    assert_eq!(bed.client.stat("b").unwrap_err().errno(), libc::ENOENT);
    assert_eq!(bed.client.stat("a").unwrap().nlink, 1);
    assert_eq!(bed.client.remove_name("a").unwrap(), Some(0));
}

#[test]
fn a_delayed_truncate_does_not_cut_what_was_written_since() {
    let bed = Bed::start();
    bed.write_new("f", b"old contents");
    bed.link.stick();
    let cut = impresario_wire::SetAttr { size: Some(0), ..Default::default() };
    bed.client.set_attr("f", cut).unwrap();
    let file = bed.client.open("f", true).unwrap();
    file.write_at(b"written since", 0).unwrap();
    file.sync().unwrap();
    bed.link.heal();
    bed.assert_holds("f", b"written since");
}

#[test]
fn a_delayed_exclusive_create_does_not_come_back() {
    let bed = Bed::start();
    bed.link.stick();
    bed.write_new("f", b"short-lived");
    bed.client.unlink("f").unwrap();
    bed.link.heal();
    let error = bed.client.stat("f").map(|attr| panic!("it is there: {attr:?}")).unwrap_err();
    assert_eq!(error.errno(), libc::ENOENT, "{error}");
}

#[test]
fn a_restarted_metadata_server_remembers_which_changes_were_given_up() {
    let mut bed = Bed::start();
    // Its first metadata call is the one that gets stuck: io.0 passes it on over a new connection.
    let other = bed.another_client();
    other.create("f", CreateOptions::default()).unwrap().close().unwrap();
    bed.link.stick();
    bed.client.unlink("f").unwrap();
    bed.write_new("f", b"made since");
    bed.restart_meta();
    bed.link.heal();
    bed.assert_holds("f", b"made since");
}

/// A metadata server whose connection to a data server gets stuck with a truncation on it.
struct Truncation {
    link: SlowLink,
    cluster: Cluster,
    client: Arc<Client>,
    _meta: Started,
}

impl Truncation {
    fn start() -> Truncation {
        let cluster = Cluster::start(1, |config| config.cluster.request_timeout_ms = 1_000);
        let link = SlowLink::to(cluster.address(0));
        let mut config = cluster.config.clone();
        config.data[0].address = link.address.clone();
        let meta = impresario_server::start(&config, "meta").unwrap();
        let client = connect(&cluster);
        Truncation { link, cluster, client, _meta: meta }
    }

    fn read(&self, path: &str) -> Vec<u8> {
        let file = connect(&self.cluster).open(path, false).unwrap();
        let mut read = vec![0; 100];
        let got = file.read_at(&mut read, 0).unwrap();
        read.truncate(got);
        read
    }
}

fn connect(cluster: &Cluster) -> Arc<Client> {
    Client::connect(&cluster.config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap()
}

#[test]
fn a_truncation_that_timed_out_does_not_cut_what_its_client_wrote_since() {
    let bed = Truncation::start();
    let file = bed.client.create("f", CreateOptions::default()).unwrap();
    file.write_at(b"old contents", 0).unwrap();
    // Until it was asked, the metadata server has no connection to the data server.
    assert_eq!(file.attr().unwrap().size, 12);
    bed.link.stick_what_is_connected();
    assert_eq!(file.set_len(0).unwrap_err().errno(), libc::EIO);
    file.write_at(b"written since", 0).unwrap();
    file.sync().unwrap();
    bed.link.heal();
    assert_eq!(bed.read("f"), b"written since");
}

#[test]
fn a_truncation_that_timed_out_does_not_cut_what_others_wrote_since() {
    let bed = Truncation::start();
    bed.client.create("f", CreateOptions::default()).unwrap().write_at(b"old contents", 0).unwrap();
    assert_eq!(bed.client.stat("f").unwrap().size, 12);
    bed.link.stick_what_is_connected();
    let cut = impresario_wire::SetAttr { size: Some(0), ..Default::default() };
    assert_eq!(bed.client.set_attr("f", cut).unwrap_err().errno(), libc::EIO);
    let file = connect(&bed.cluster).open("f", true).unwrap();
    file.write_at(b"written since", 0).unwrap();
    file.sync().unwrap();
    bed.link.heal();
    assert_eq!(bed.read("f"), b"written since");
}

/// That it has begun a new epoch, the client said with a call that changes nothing.
#[test]
fn what_a_client_gave_up_is_refused_after_a_restart() {
    let mut bed = Bed::start();
    bed.write_new("f", b"kept");
    let address = bed.cluster.config.meta.address.clone();
    let ask = |epoch, call: MetaCall| {
        let who = Who { client: ClientKey(77), epoch, since: epoch, sequence: 1, ..Who::default() };
        Peer::connect(&address, Role::Meta, 77).call(&Call::Meta { who, call }, &[]).0
    };
    assert!(matches!(ask(1, MetaCall::Open { path: b"f".into(), write: true }), Answer::Opened(_)));
    bed.restart_meta();
    assert_eq!(fault(ask(0, MetaCall::Unlink { path: b"f".into() })).0, Fault::FENCED);
    bed.assert_holds("f", b"kept");
}

/// The answer to a change is lost, and with it the metadata server's memory: asked again, it says what it said.
#[test]
fn a_restarted_metadata_server_does_no_change_twice() {
    let mut bed = Bed::start();
    let address = bed.cluster.config.meta.address.clone();
    let who = |sequence, epoch| Who { client: ClientKey(77), epoch, sequence, ..Who::default() };
    let ask = |sequence, epoch, call: &MetaCall| {
        let call = Call::Meta { who: who(sequence, epoch), call: call.clone() };
        Peer::connect(&address, Role::Meta, 77).call(&call, &[]).0
    };
    let path = |name: &str| name.as_bytes().to_vec();
    let create = MetaCall::Create { path: path("f"), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout: None };
    let mkdir = MetaCall::Mkdir { path: path("d"), mode: 0o755, uid: 0, gid: 0 };
    let rename = MetaCall::Rename { from: path("d"), to: path("e"), no_replace: true, whiteout: false };
    let unlink = MetaCall::Unlink { path: path("g") };
    let link = MetaCall::Link { from: path("p"), to: path("q") };
    let mknod = MetaCall::Mknod { path: path("p"), kind: NodeKind::Fifo, mode: 0o644, uid: 0, gid: 0 };
    let xattr = |value: Option<&str>| MetaCall::SetXattr {
        target: impresario_wire::Target::Path(path("")),
        name: path("user.a"),
        value: value.map(path),
        mode: XattrMode::Create,
    };
    assert_eq!(ask(6, 0, &xattr(Some("x"))), Answer::Done);
    assert_eq!(ask(7, 0, &xattr(None)), Answer::Done);
    assert_eq!(ask(8, 0, &xattr(Some("y"))), Answer::Done);
    let Answer::Attr(piped) = ask(5, 0, &mknod) else { panic!("not made") };
    let Answer::Attr(linked) = ask(20, 0, &link) else { panic!("not linked") };
    assert_eq!((linked.ino, linked.nlink), (piped.ino, 2));
    let Answer::Opened(created) = ask(1, 0, &create) else { panic!("not created") };
    let Answer::Attr(made) = ask(2, 0, &mkdir) else { panic!("not made") };
    assert_eq!(ask(4, 0, &unlink), ask(4, 0, &unlink), "a change that failed may be tried again");
    for round in 1..4 {
        match ask(1, round, &create) {
            Answer::Opened(again) => assert_eq!(again.file, created.file),
            other => panic!("{other:?}"),
        }
        match ask(2, round, &mkdir) {
            Answer::Attr(again) => assert_eq!(again.ino, made.ino),
            other => panic!("{other:?}"),
        }
        assert_eq!(ask(7, round, &xattr(None)), Answer::Done);
        assert_eq!(ask(8, round, &xattr(Some("y"))), Answer::Done);
        assert_eq!(fault(ask(9 + u64::from(round), round, &xattr(Some("z")))).0, libc::EEXIST, "not removed twice");
        match ask(5, round, &mknod) {
            Answer::Attr(again) => assert_eq!(again.ino, piped.ino),
            other => panic!("{other:?}"),
        }
        match ask(20, round, &link) {
            Answer::Attr(again) => assert_eq!((again.ino, again.nlink), (piped.ino, 2)),
            other => panic!("{other:?}"),
        }
        assert_eq!(fault(ask(20 + u64::from(round), round, &link)).0, libc::EEXIST, "not linked twice");
        bed.restart_meta();
    }
    assert_eq!(ask(3, 4, &rename), Answer::Done);
    bed.restart_meta();
    assert_eq!(ask(3, 5, &rename), Answer::Done);
    // Failed before the restarts, and given up since.
    assert_eq!(fault(ask(4, 0, &unlink)).0, Fault::FENCED);
}

/// Keys of the objects in a data server's folder.
fn objects_in(dir: &std::path::Path) -> Vec<String> {
    let list = |dir: &std::path::Path| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let folders = list(&dir.join("objects")).flat_map(|folder| list(&folder.path()));
    folders.map(|object| object.file_name().into_string().unwrap()).collect()
}

fn wait_until_removed(cluster: &Cluster) {
    until("the object is removed", || objects_in(&cluster.config.data[0].dir).is_empty());
}

#[test]
fn a_write_that_comes_after_the_removal_does_not_make_the_object_again() {
    let cluster = Cluster::start(1, |config| config.cluster.request_timeout_ms = 1_000);
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let link = SlowLink::to(cluster.address(0));
    let mut config = cluster.config.clone();
    config.data[0].address = link.address.clone();
    let client = Client::connect(&config, ClientOptions { via: Via::Direct, ..Default::default() }).unwrap();
    let file = client.create("f", CreateOptions::default()).unwrap();
    file.write_at(b"old", 0).unwrap();
    link.stick_what_is_connected();
    assert_eq!(file.write_at(b"late", 0).unwrap_err().errno(), libc::EIO);
    file.close().unwrap();
    client.unlink("f").unwrap();
    wait_until_removed(&cluster);
    link.heal();
    assert_eq!(objects_in(&cluster.config.data[0].dir), [""; 0]);
}

#[test]
fn a_truncation_that_comes_after_the_removal_does_not_make_the_object_again() {
    let bed = Truncation::start();
    let file = bed.client.create("f", CreateOptions::default()).unwrap();
    file.write_at(b"old", 0).unwrap();
    assert_eq!(file.attr().unwrap().size, 3);
    bed.link.stick_what_is_connected();
    assert_eq!(file.set_len(20).unwrap_err().errno(), libc::EIO);
    bed.client.unlink("f").unwrap();
    drop(file);
    wait_until_removed(&bed.cluster);
    bed.link.heal();
    assert_eq!(objects_in(&bed.cluster.config.data[0].dir), [""; 0]);
}

/// As after a power failure of the data server: the name of the removed object is there again.
#[test]
fn a_removed_object_stays_removed_over_a_restart() {
    let mut cluster = Cluster::start(1, |_| {});
    let peer = |cluster: &Cluster| Peer::connect(cluster.address(0), Role::Data, 1);
    let folder = cluster.config.data[0].dir.clone();
    assert_eq!(peer(&cluster).write(1, 0xab, 0, b"old"), Answer::Written(3));
    let unlink = Call::Unlink { who: support::who(1), file: impresario_wire::FileKey(0xab) };
    assert_eq!(peer(&cluster).call(&unlink, &[]).0, Answer::Done);
    cluster.stop_data(0);
    std::fs::write(folder.join("objects/ab/00000000000000ab"), "back again").unwrap();
    cluster.start_data(0);
    assert_eq!(objects_in(&folder), [""; 0]);
    assert_eq!(fault(peer(&cluster).write(1, 0xab, 0, b"late")).0, libc::EIDRM);
    // What is gone is no hole, to a client that was cut off meanwhile.
    let (who, file) = (support::who(1), impresario_wire::FileKey(0xab));
    let calls = [
        Call::Read { who, file, lane_offset: 0, len: 3 },
        Call::ReadList { who, file, extents: impresario_wire::Extents::of(&[(0, 1), (2, 1)]) },
        Call::ObjectStat { file },
        Call::ObjectSeek { file, from: 0, to: impresario_wire::SeekTo::Data },
    ];
    for call in &calls {
        assert_eq!(fault(peer(&cluster).call(call, &[]).0).0, libc::EIDRM, "{call:?}");
    }
    assert_eq!(peer(&cluster).call(&unlink, &[]).0, Answer::Done);
    assert_eq!(peer(&cluster).write(1, 0xac, 0, b"another"), Answer::Written(7));
}

/// Before a data server forgets a removal, no connection is left on which something older could come.
#[test]
fn connections_from_before_many_removals_are_ended() {
    const HALF_A_GENERATION: u64 = 1 << 17;
    let cluster = Cluster::start(1, |_| {});
    let mut idle = Peer::connect(cluster.address(0), Role::Data, 1);
    let mut removes = Peer::connect(cluster.address(0), Role::Data, 2);
    for window in 0..HALF_A_GENERATION / 1024 {
        let unlink = |n| Call::Unlink { who: support::who(2), file: impresario_wire::FileKey(window * 1024 + n) };
        for n in 0..1024 {
            removes.send(&unlink(n), &[]);
        }
        (0..1024).for_each(|_| assert_eq!(removes.answer().unwrap().1, Answer::Done));
    }
    assert_eq!(idle.write(1, 1 << 40, 0, b"x"), Answer::Written(1), "not yet");
    removes.send(&Call::Unlink { who: support::who(2), file: impresario_wire::FileKey(1 << 41) }, &[]);
    assert!(idle.is_closed());
    assert_eq!(Peer::connect(cluster.address(0), Role::Data, 1).write(1, 1 << 40, 0, b"x"), Answer::Written(1));
}
