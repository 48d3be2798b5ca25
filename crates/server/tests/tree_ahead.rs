//! What an I/O node in front of a folder reads before it is asked for it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fuser::{FileHandle, FileType, Filesystem, Generation, INodeNo, KernelConfig, ReplyAttr, ReplyEntry, Request};
use impresario_backend::posix::Options;
use impresario_backend::{Backend, Caller, PosixTree};
use impresario_base::page_cache::mapped_pages;
use impresario_client::{Client, ClientOptions, Via};
use impresario_config::{Config, Io, Tree};
use impresario_sched::PolicySpec;
use impresario_server::Started;
use impresario_testing::{free_address, until};
use impresario_wire::Role;
use serde_json::Value;

use crate::support::Peer;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BLOCK: u64 = 64 * KIB;

/// An I/O node in front of a folder.
struct Node {
    config: Config,
    _node: Started,
}

impl Node {
    fn start(folder: &Path, adjust: impl FnOnce(&mut Tree, &mut Io)) -> Node {
        let mut tree = Tree { folder: folder.into(), ..Tree::default() };
        let mut io = Io::new("io.0", free_address());
        (io.policy, io.read_ahead_bytes) = (PolicySpec::named("auto"), Some(16 << 20));
        adjust(&mut tree, &mut io);
        let config = Config { tree: Some(tree), io: vec![io], ..Config::default() };
        let node = impresario_server::start(&config, "io.0").unwrap();
        Node { config, _node: node }
    }

    fn client(&self) -> Arc<Client> {
        Client::connect(&self.config, ClientOptions { via: Via::IoNode(0), ..ClientOptions::default() }).unwrap()
    }

    fn status(&self) -> Value {
        Peer::connect(&self.config.io[0].address, Role::Io, 99).status()
    }

    fn told(&self, pointer: &str) -> u64 {
        let status = self.status();
        status.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}: {status:#}"))
    }
}

/// A folder on a device with a file of 8 MiB, which is not in memory. `None` where the build's folder is in memory.
fn cold() -> Option<(tempfile::TempDir, Vec<u8>)> {
    const TMPFS: i64 = 0x0102_1994;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if rustix::fs::statfs(folder.path()).unwrap().f_type == TMPFS {
        impresario_testing::skip("disk", "the build's folder is in memory");
        return None;
    }
    let bytes: Vec<u8> = (0..8 * MIB).map(|at| ((at * 31) ^ (at >> 9)) as u8).collect();
    std::fs::write(folder.path().join("file"), &bytes).unwrap();
    cool(folder.path());
    Some((folder, bytes))
}

/// Takes it out of memory. The kernel leaves pages there that it is busy with, so this repeats.
fn cool(folder: &Path) {
    let file = File::open(folder.join("file")).unwrap();
    until("the file is out of memory", || {
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        mapped_pages(file.as_fd(), 0..8 * MIB).is_some_and(|pages| pages.cached == 0)
    });
}

fn read(file: &impresario_client::File, at: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    let got = file.read_at(&mut bytes, at).unwrap();
    bytes.truncate(got);
    bytes
}

/// Interleaved streams of a file are read ahead of their clients; what they get is theirs, also after a write.
#[test]
fn streams_are_read_ahead() {
    let _cache = impresario_testing::page_cache::watched();
    // Of a file on one lane, whether requests are cut or not.
    for (data_servers, split) in [(1, false), (4, false), (4, true)] {
        let Some((folder, bytes)) = cold() else { return };
        let node = Node::start(folder.path(), |tree, io| (tree.data_servers, io.split) = (data_servers, split));
        let (one, two) = (node.client(), node.client());
        let (one, two) = (one.open("file", false).unwrap(), two.open("file", true).unwrap());
        let block = |at: u64| &bytes[at as usize..(at + BLOCK) as usize];
        for i in 0..64 {
            let at = [i * BLOCK, 4 * MIB + i * BLOCK];
            assert!(read(&one, at[0], BLOCK) == block(at[0]), "{i}");
            assert!(read(&two, at[1], BLOCK) == block(at[1]), "{i}");
            if i == 20 {
                // What was predicted is written meanwhile.
                let new = vec![9; BLOCK as usize];
                two.write_at(&new, 21 * BLOCK).unwrap();
                assert!(read(&one, 21 * BLOCK, BLOCK) == new);
                two.write_at(block(21 * BLOCK), 21 * BLOCK).unwrap();
            }
        }
        assert!(read(&two, 8 * MIB, BLOCK).is_empty());
        let status = node.status();
        // What the kernel's own reading ahead has brought in before counts as neither.
        assert!(status["engine"]["speculated_bytes"].as_u64().unwrap() > 2 * MIB, "{status:#}");
        assert!(node.told("/read_ahead/hit_bytes") > 2 * MIB, "{status:#}");
        assert_eq!((node.told("/read_ahead/wasted_bytes"), node.told("/read_ahead/stopped")), (0, 0), "{status:#}");
        assert!(node.told("/read_ahead/outstanding_bytes") <= 16 * MIB, "{status:#}");
        assert_eq!(status["engine"]["statistics"]["failed"], 0, "{status:#}");
    }
}

#[test]
fn strides_are_read_ahead() {
    let _cache = impresario_testing::page_cache::watched();
    let Some((folder, bytes)) = cold() else { return };
    let node = Node::start(folder.path(), |_, _| {});
    let client = node.client();
    let file = client.open("file", false).unwrap();
    for at in (0..8 * MIB).step_by(128 << 10) {
        assert!(read(&file, at, 16 * KIB) == bytes[at as usize..][..16 << 10], "{at}");
    }
    let status = node.status();
    assert!(node.told("/read_ahead/hit_bytes") > 300 * KIB, "{status:#}");
    assert!(node.told("/read_ahead/predicted_bytes") < 2 * MIB, "not what is between them: {status:#}");
}

/// Clients ask for more than a file has, up to its end: that is no wait for the device.
#[test]
fn the_end_of_a_file_in_memory_is_not_waited_for() {
    let _cache = impresario_testing::page_cache::watched();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(folder.path().join("file"), vec![1; 10_000]).unwrap();
    let node = Node::start(folder.path(), |_, _| {});
    let client = node.client();
    let file = client.open("file", false).unwrap();
    // The first shows that reads go through the page cache.
    assert_eq!(read(&file, 0, BLOCK).len(), 10_000);
    let before = node.told("/read_ahead/waited_bytes");
    for _ in 0..10 {
        assert_eq!(read(&file, 0, BLOCK).len(), 10_000);
        assert_eq!(read(&file, 10_000, BLOCK).len(), 0);
    }
    assert_eq!(node.told("/read_ahead/waited_bytes"), before);
}

/// What is about to be changed is no longer expected, foreseen or hinted: by a write, and by calls that the scheduler does not see.
#[test]
fn changes_take_predictions_back() {
    let _cache = impresario_testing::page_cache::watched();
    for change in ["write", "cut", "cut by path", "remove", "replace"] {
        let Some((folder, bytes)) = cold() else { return };
        let node = Node::start(folder.path(), |_, _| {});
        let client = node.client();
        let file = client.open("file", true).unwrap();
        for at in (0..2 * MIB).step_by(BLOCK as usize) {
            assert!(read(&file, at, BLOCK) == bytes[at as usize..][..BLOCK as usize]);
        }
        // What is predicted may be in memory already, by the kernel's own reading ahead; what is hinted is outstanding all the same.
        assert_eq!(file.prefetch(2 * MIB, 6 * MIB).unwrap(), 6 * MIB);
        assert_eq!(node.told("/read_ahead/hints/outstanding_bytes"), 6 * MIB);
        let outstanding =
            || ["hints/outstanding_bytes", "outstanding_bytes"].map(|kind| node.told(&format!("/read_ahead/{kind}")));
        match change {
            "write" => {
                file.write_at(&bytes[2 << 20..5 << 20], 2 * MIB).unwrap();
                file.write_at(&bytes[5 << 20..], 5 * MIB).unwrap();
            }
            "cut" => drop(file.set_len(2 * MIB).unwrap()),
            "cut by path" => {
                let set = impresario_wire::SetAttr { size: Some(2 * MIB), ..Default::default() };
                client.set_attr("file", set).unwrap();
            }
            "remove" => client.unlink("file").unwrap(),
            _ => {
                std::fs::write(folder.path().join("other"), "x").unwrap();
                client.rename("other", "file", false).unwrap();
            }
        }
        assert_eq!(outstanding(), [0, 0], "{change}: {:#}", node.status());
        assert_eq!(node.told("/read_ahead/wasted_bytes"), 0, "{change}");
        assert!(read(&file, 0, BLOCK) == bytes[..BLOCK as usize], "{change}");
    }
}

/// Nothing is read ahead where it is off, where no policy lets it be, and of files on several lanes.
#[test]
fn nothing_is_read_ahead_elsewhere() {
    let _cache = impresario_testing::page_cache::watched();
    for case in ["off", "none", "striped"] {
        let Some((folder, bytes)) = cold() else { return };
        let node = Node::start(folder.path(), |tree, io| match case {
            "off" => io.read_ahead_bytes = Some(0),
            "none" => io.policy = PolicySpec::named("none"),
            _ => (tree.data_servers, tree.stripe_bytes) = (4, Some(64 << 10)),
        });
        let client = node.client();
        let file = client.open("file", false).unwrap();
        for at in (0..4 * MIB).step_by(BLOCK as usize) {
            assert!(read(&file, at, BLOCK) == bytes[at as usize..][..BLOCK as usize], "{case}");
        }
        let status = node.status();
        let told = &status["read_ahead"]["predicted_bytes"];
        assert!(if case == "off" { told.is_null() } else { *told == 0 }, "{case}: {status:#}");
        assert_eq!(status["engine"]["speculated_bytes"].as_u64().unwrap_or(0), 0, "{case}: {status:#}");
        let accepted = file.prefetch(0, MIB).unwrap();
        assert_eq!(accepted, if case == "striped" { MIB } else { 0 }, "{case}");
        if case == "striped" {
            // What is hinted is counted all the same.
            assert!(read(&file, 0, MIB) == bytes[..MIB as usize]);
            assert_eq!(node.told("/read_ahead/hints/hit_bytes"), MIB);
        }
    }
}

/// Two files of 8 MiB. Of one the first MiB comes at once, and the rest when it is let go.
#[derive(Default)]
struct Halves {
    held: Mutex<(bool, Vec<(fuser::ReplyData, usize)>)>,
    /// The kernel may trust no attributes that it was told.
    others_change: bool,
    attrs_asked: AtomicU64,
    attrs_hang: AtomicBool,
    held_attrs: Mutex<Vec<(ReplyAttr, u64)>>,
}

impl Halves {
    fn attr(node: u64) -> fuser::FileAttr {
        let (kind, perm) = if node == 1 { (FileType::Directory, 0o755) } else { (FileType::RegularFile, 0o644) };
        impresario_testing::fuse::attr(node, kind, perm, if node == 1 { 0 } else { 8 * MIB })
    }

    fn lifetime(&self) -> Duration {
        Duration::from_secs(if self.others_change { 0 } else { 60 })
    }

    fn is_held(&self) -> bool {
        !self.held.lock().unwrap().1.is_empty()
    }

    fn release(&self) {
        let (lets_go, held) = &mut *self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *lets_go = true;
        held.drain(..).for_each(|(reply, len)| reply.data(&vec![0; len]));
        self.attrs_hang.store(false, SeqCst);
        let held = &mut *self.held_attrs.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        held.drain(..).for_each(|(reply, node)| reply.attr(&self.lifetime(), &Halves::attr(node)));
    }
}

/// A process with a thread that hangs in its own file system would not end.
struct Release(Arc<Halves>);

impl Release {
    /// Nor would a test that waits for what hangs: it is let go after a while, and the test fails.
    fn of(halves: &Arc<Halves>) -> Release {
        let late = Arc::downgrade(halves);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(60));
            if let Some(halves) = late.upgrade() {
                halves.release();
            }
        });
        Release(halves.clone())
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        self.0.release();
    }
}

struct HalfHangs(Arc<Halves>);

impl Filesystem for HalfHangs {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Reads that are held must not keep others from being asked for.
        let _ = config.set_max_background(512); // the kernel may allow less
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("hangs") => reply.entry(&self.0.lifetime(), &Halves::attr(2), Generation(0)),
            Some("good") => reply.entry(&self.0.lifetime(), &Halves::attr(3), Generation(0)),
            _ => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.0.attrs_asked.fetch_add(1, SeqCst);
        let held = &mut *self.0.held_attrs.lock().unwrap();
        match self.0.attrs_hang.load(SeqCst) {
            true => held.push((reply, node.0)),
            false => reply.attr(&self.0.lifetime(), &Halves::attr(node.0)),
        }
    }

    fn read(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: fuser::OpenFlags,
        _: Option<fuser::LockOwner>,
        reply: fuser::ReplyData,
    ) {
        let len = (8 * MIB).saturating_sub(offset).min(size.into()) as usize;
        let (lets_go, held) = &mut *self.0.held.lock().unwrap();
        match node.0 == 2 && offset + len as u64 > MIB && !*lets_go {
            true => held.push((reply, len)),
            false => reply.data(&vec![0; len]),
        }
    }
}

fn mounted(halves: &Arc<Halves>) -> (tempfile::TempDir, fuser::BackgroundSession) {
    let folder = tempfile::tempdir().unwrap();
    let mut options = fuser::Config::default();
    options.mount_options = vec![fuser::MountOption::FSName("impresario-test".into())];
    let session = fuser::spawn_mount(HalfHangs(halves.clone()), folder.path(), &options).unwrap();
    (folder, session)
}

/// Whoever asks what memory has may hold a connection up for all: no file system is asked, however old what is known of a file is.
#[test]
fn looking_into_memory_asks_no_file_system() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    let halves = Arc::new(Halves { others_change: true, ..Halves::default() });
    let (folder, session) = mounted(&halves);
    let release = Release::of(&halves);
    let asked = || halves.attrs_asked.load(SeqCst);

    let node = Node::start(folder.path(), |_, _| {});
    let client = node.client();
    let good = client.open("good", false).unwrap();
    read(&good, 0, BLOCK);
    let before = asked();
    for at in (BLOCK..4 * MIB).step_by(BLOCK as usize) {
        assert_eq!(read(&good, at, BLOCK).len() as u64, BLOCK, "{at}");
    }
    assert_eq!(asked() - before, 0, "reads ask for attributes: {:#}", node.status());
    drop((good, client, node));

    let tree = PosixTree::open(folder.path(), Options::default()).unwrap();
    let caller = Caller { uid: 0, gid: 0, groups: Vec::new() };
    let (file, _) = tree.lookup(&caller, &tree.root().unwrap(), b"hangs").unwrap();
    let mut bytes = vec![0; BLOCK as usize];
    assert_eq!(tree.read(&caller, &file, 0, &mut bytes), Ok(BLOCK as usize));
    assert!(tree.has_page_cache() && tree.is_in_memory(&caller, &file, 0));
    halves.attrs_hang.store(true, SeqCst);
    let before = asked();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let looks = [7 * MIB, 8 * MIB - 1].map(|at| {
                let got = tree.read_cached(&caller, &file, at, &mut bytes);
                (got.is_some(), tree.is_in_memory(&caller, &file, at), tree.known_attr(&file).is_some())
            });
            tell.send(looks).unwrap();
        });
        let looks = told.recv_timeout(Duration::from_secs(10));
        let after = asked();
        halves.release();
        assert_eq!((looks, after - before), (Ok([(false, false, true); 2]), 0));
    });
    drop((release, tree));
    drop(session);
}

/// Reading ahead in a file that hangs keeps neither its own first part nor other files waiting, even where the node, or the policy for
/// each lane, has one request under way at a time.
#[test]
fn what_hangs_ahead_hangs_nothing_else() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    what_hangs_ahead_hangs_nothing_else_where(|_, io| io.dispatch_requests = 1);
    what_hangs_ahead_hangs_nothing_else_where(|tree, io| {
        tree.data_servers = 2;
        io.policy = PolicySpec::named("twins").with("in_flight_per_server", 1);
    });
}

fn what_hangs_ahead_hangs_nothing_else_where(adjust: impl FnOnce(&mut Tree, &mut Io)) {
    let halves = Arc::<Halves>::default();
    let (folder, session) = mounted(&halves);
    let release = Release::of(&halves);
    let node = Node::start(folder.path(), adjust);
    let client = node.client();
    let hangs = client.open("hangs", false).unwrap();
    // The kernel's own reading ahead stays before what hangs.
    for at in (0..512 * KIB).step_by(32 << 10) {
        assert_eq!(read(&hangs, at, 32 * KIB).len(), 32 << 10, "{at}");
    }
    until("reading ahead hangs", || halves.is_held());
    // With a request of a client, perhaps; what a client announces is read by itself.
    assert_eq!(hangs.prefetch(6 * MIB, MIB).unwrap(), MIB);
    until("it takes a place", || node.told("/engine/in_flight_batches") > 0);
    let good = client.open("good", false).unwrap();
    for at in (0..4 * MIB).step_by(BLOCK as usize) {
        assert_eq!(read(&good, at, BLOCK).len() as u64, BLOCK, "{at}");
    }
    assert_eq!(read(&hangs, 0, BLOCK).len() as u64, BLOCK);
    assert!(halves.is_held());
    let status = node.status();
    assert!(node.told("/read_ahead/predicted_bytes") > 0, "{status:#}");
    assert_eq!(status["engine"]["statistics"]["failed"], 0, "{status:#}");
    drop(release);
    until("it goes on", || node.told("/engine/in_flight_batches") == 0);
    drop((hangs, good, client, node));
    drop(session);
}

/// Reads of a file that hang hold a thread and a batch of their lane each, as many as the policy allows, and once more as many where
/// the node looks for what is stuck. However many come, the others wait as requests, without a thread.
#[test]
fn reads_that_hang_are_few_at_a_time() {
    const READERS: u64 = 100;
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    for also_ahead in [false, true] {
        let halves = Arc::<Halves>::default();
        let (folder, session) = mounted(&halves);
        let release = Release::of(&halves);
        let node = Node::start(folder.path(), |tree, io| {
            tree.data_servers = 2;
            io.policy = PolicySpec::named("twins").with("in_flight_per_server", 1);
        });
        let client = node.client();
        let hangs = client.open("hangs", false).unwrap();
        if also_ahead {
            assert_eq!(read(&hangs, 0, 32 * KIB).len(), 32 << 10);
            assert_eq!(hangs.prefetch(2 * MIB, MIB).unwrap(), MIB);
            until("reading ahead hangs", || node.told("/engine/in_flight_batches") > 0 && halves.is_held());
        }
        std::thread::scope(|scope| {
            // Apart, so that nothing merges them; what hangs may be given up as long as it does.
            let reader = |n: u64| drop(hangs.read_at(&mut [0; 1024], 3 * MIB + n * 32 * KIB));
            (0..READERS).for_each(|n| drop(scope.spawn(move || reader(n))));
            until("all have come", || node.told("/engine/queued") + node.told("/engine/in_flight_batches") >= READERS);
            // Longer than it takes to see that something hangs, and that what was started then does.
            for _ in 0..10 {
                let held =
                    ["/engine/in_flight_batches", "/forward/in_flight", "/forward/stuck"].map(|of| node.told(of));
                assert!(held.iter().all(|held| *held <= 2), "{held:?}");
                std::thread::sleep(Duration::from_millis(50));
            }
            drop(release);
        });
        until("it goes on", || node.told("/engine/in_flight_batches") == 0);
        drop((hangs, client, node));
        drop(session);
    }
}
