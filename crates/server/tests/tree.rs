//! I/O nodes in front of a folder: names and data of a file system that is there already, for the clients there are.

use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fuser::{FileHandle, FileType, Filesystem, Generation, INodeNo, ReplyAttr, ReplyEntry, Request};
use impresario_client::{Client, ClientError, ClientOptions, CreateOptions, Via};
use impresario_config::{Allocation, AllocationRule, Config, Io, Merge, Tree, TreeBackend};
use impresario_sched::PolicySpec;
use impresario_server::Started;
use impresario_testing::free_address;
use impresario_wire::{Call, Device, NodeKind, SetAttr, SetTime, Time, XattrMode};
use tempfile::TempDir;

use crate::support::{Peer, who};

/// I/O nodes over a folder of this machine.
struct Bed {
    config: Config,
    nodes: Vec<Option<Started>>,
    folder: TempDir,
}

impl Bed {
    /// A client that goes through the first of two nodes as long as that is there.
    fn client_of_the_first(&mut self) -> Arc<Client> {
        let rule = AllocationRule { jobs: vec![7], hosts: Vec::new(), nodes: vec!["io.0".into(), "io.1".into()] };
        self.config.allocation = Allocation { rules: vec![rule], ..Allocation::default() };
        let options = ClientOptions { job: 7, placement_seed: 0, ..ClientOptions::default() };
        Client::connect(&self.config, options).unwrap()
    }

    /// One that goes through the second, as the first was lost when it asked for this name, and is there again.
    fn client_that_is_away(&mut self, name: &str) -> Arc<Client> {
        let client = self.client_of_the_first();
        self.nodes[0] = None;
        client.stat(name).unwrap();
        assert!(client.is_away());
        self.nodes[0] = Some(impresario_server::start(&self.config, "io.0").unwrap());
        client
    }

    fn start(nodes: usize, adjust: impl Fn(&mut Tree, &mut Io)) -> Bed {
        Bed::start_with_timeout(Config::default().cluster.request_timeout_ms, nodes, adjust)
    }

    fn start_with_timeout(request_timeout_ms: u64, nodes: usize, adjust: impl Fn(&mut Tree, &mut Io)) -> Bed {
        let folder = TempDir::new().unwrap();
        let mut tree = Tree {
            backend: TreeBackend::Posix,
            folder: folder.path().into(),
            data_servers: 4,
            stripe_bytes: Some(64 << 10),
            ..Tree::default()
        };
        let mut io: Vec<Io> = (0..nodes).map(|i| Io::new(format!("io.{i}"), free_address())).collect();
        io.iter_mut().for_each(|io| {
            io.policy = PolicySpec::named("auto");
            adjust(&mut tree, io);
        });
        let mut config = Config { tree: Some(tree), io, ..Config::default() };
        config.cluster.request_timeout_ms = request_timeout_ms;
        let mut bed = Bed { config, nodes: Vec::new(), folder };
        for index in 0..nodes {
            let started = impresario_server::start(&bed.config, &format!("io.{index}")).unwrap();
            bed.nodes.push(Some(started));
        }
        bed
    }

    fn client(&self, node: usize) -> Arc<Client> {
        Client::connect(&self.config, ClientOptions { via: Via::IoNode(node), ..ClientOptions::default() }).unwrap()
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Mounts a file system on a new folder.
fn mounted(files: impl Filesystem) -> (TempDir, fuser::BackgroundSession) {
    let folder = TempDir::new().unwrap();
    let mut options = fuser::Config::default();
    options.mount_options = vec![fuser::MountOption::FSName("impresario-test".into())];
    let session = fuser::spawn_mount(files, folder.path(), &options).unwrap();
    (folder, session)
}

fn errno<T: std::fmt::Debug>(result: Result<T, ClientError>) -> i32 {
    result.unwrap_err().errno()
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed * 31 + i * 7 + (i >> 8) * 13) as u8).collect()
}

#[test]
fn names_are_those_of_the_folder() {
    let bed = Bed::start(2, |_, _| {});
    let (one, two) = (bed.client(0), bed.client(1));
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    one.mkdir("dir", 0o750, uid, gid).unwrap();
    let file = one.create("dir/file", CreateOptions { mode: 0o640, ..CreateOptions::default() }).unwrap();
    file.write_at(b"bytes", 0).unwrap();
    file.close().unwrap();
    one.symlink("link", "dir/file", uid, gid).unwrap();
    assert_eq!(std::fs::read(bed.path().join("dir/file")).unwrap(), b"bytes");
    assert_eq!(std::fs::metadata(bed.path().join("dir")).unwrap().mode() & 0o7777, 0o750);

    // Another node sees it at once, and what other programs make.
    let attr = two.stat("dir/file").unwrap();
    assert_eq!((attr.kind, attr.mode, attr.size, attr.nlink), (NodeKind::File, 0o640, 5, 1));
    assert_eq!(attr.ino, std::fs::metadata(bed.path().join("dir/file")).unwrap().ino());
    assert_eq!(two.readlink("link").unwrap(), b"dir/file");
    std::fs::write(bed.path().join("dir/another"), "x").unwrap();
    let names = |client: &Client, path: &str| -> Vec<_> {
        client.list(path).unwrap().into_iter().map(|entry| String::from_utf8(entry.name).unwrap()).collect()
    };
    assert_eq!(names(&two, ""), ["dir", "link"]);
    assert_eq!(names(&two, "dir"), ["another", "file"]);

    two.rename("dir/file", "dir/moved", false).unwrap();
    assert_eq!(errno(two.rename("dir/moved", "dir/another", true)), libc::EEXIST);
    assert_eq!(errno(one.stat("dir/file")), libc::ENOENT);
    assert_eq!(errno(one.rmdir("dir")), libc::ENOTEMPTY);
    assert_eq!(errno(one.stat("link/x")), libc::ELOOP);
    assert_eq!(errno(one.open("dir", false)), libc::EISDIR);
    assert_eq!(errno(one.unlink("dir")), libc::EISDIR);
    assert_eq!(errno(one.stat("dir/../dir")), libc::EINVAL);
    assert_eq!(errno(one.stat("x".repeat(300))), libc::ENAMETOOLONG);
    assert_eq!(errno(one.create("dir/moved", CreateOptions { exclusive: true, ..Default::default() })), libc::EEXIST);
    let set = SetAttr {
        mode: Some(0o600),
        size: Some(2),
        mtime: Some(SetTime::At(Time { secs: 1_000_000, nanos: 0 })),
        ..SetAttr::default()
    };
    // Hard links are the folder's own.
    let linked = one.link("dir/moved", "second").unwrap();
    assert_eq!((linked.ino, linked.nlink), (two.stat("dir/moved").unwrap().ino, 2));
    assert_eq!(std::fs::metadata(bed.path().join("second")).unwrap().nlink(), 2);
    assert_eq!(errno(two.link("dir/moved", "second")), libc::EEXIST);
    assert_eq!(errno(two.link("dir", "third")), libc::EPERM);
    assert_eq!(two.replace_name("second", "dir/moved", false, false).unwrap(), None, "two names of one file");
    assert_eq!(errno(two.replace_name("second", "third", false, true)), libc::EINVAL, "no whiteouts");
    assert_eq!(two.remove_name("second").unwrap(), Some(1));
    let attr = one.set_attr("dir/moved", set).unwrap();
    assert_eq!((attr.mode, attr.size, attr.mtime.secs), (0o600, 2, 1_000_000));
    assert_eq!(one.remove_name("dir/moved").unwrap(), Some(0));
    one.unlink("dir/another").unwrap();
    one.sync_dir("").unwrap();
    one.rmdir("dir").unwrap();
    let space = one.statfs().unwrap();
    assert!(space.total_bytes > 0 && space.free_bytes <= space.total_bytes);
    // How files are striped is the file system's matter; and nothing is reached past the nodes.
    assert_eq!(errno(one.set_layout("", None)), libc::EOPNOTSUPP);
    let direct = Client::connect(&bed.config, ClientOptions { via: Via::Direct, ..ClientOptions::default() });
    assert!(direct.unwrap_err().to_string().contains("served by I/O nodes only"));
}

#[test]
fn pipes_sockets_and_devices_are_those_of_the_folder() {
    let bed = Bed::start(2, |_, _| {});
    let (one, two) = (bed.client(0), bed.client(1));
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let mut kinds = vec![("pipe", NodeKind::Fifo), ("socket", NodeKind::Socket)];
    if impresario_testing::require("root") {
        let number = Device { major: 8, minor: 300 };
        kinds.extend([("block", NodeKind::Block(number)), ("character", NodeKind::Character(number))]);
    }
    for (name, kind) in &kinds {
        let made = one.mknod(name, *kind, 0o640, uid, gid).unwrap();
        assert_eq!((made.kind, made.mode, made.uid), (*kind, 0o640, uid));
        assert_eq!(two.stat(name).unwrap().ino, made.ino);
        assert_eq!(errno(two.mknod(name, *kind, 0o640, uid, gid)), libc::EEXIST);
        assert_eq!(errno(two.open(name, false)), libc::EOPNOTSUPP);
    }
    let pipe = std::fs::symlink_metadata(bed.path().join("pipe")).unwrap();
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&pipe.file_type()));
    assert_eq!(two.list("").unwrap().len(), kinds.len());
    for refused in [
        one.set_xattr("pipe", "user.a", Some(b"x"), XattrMode::Any).map(|()| Vec::new()),
        one.xattr("pipe", "user.a"),
        one.list_xattr("pipe"),
    ] {
        assert_eq!(errno(refused), libc::EOPNOTSUPP);
    }
    assert_eq!(errno(one.mknod("file", NodeKind::File, 0o640, uid, gid)), libc::EINVAL);
}

#[test]
fn large_folders_are_listed_in_order() {
    let bed = Bed::start(1, |_, _| {});
    let client = bed.client(0);
    let mut want = Vec::new();
    for n in 0..3000 {
        let name = format!("a name of some length {n:05}");
        std::fs::write(bed.path().join(&name), "").unwrap();
        want.push(name.into_bytes());
    }
    let listed: Vec<_> = client.list("").unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(listed, want);
    // Two listings of one client at a time.
    for n in [5, 2000, 6, 2001] {
        let slice = client.readdir("", &want[n], 3).unwrap();
        assert_eq!(
            slice.iter().map(|entry| &entry.name).collect::<Vec<_>>(),
            want[n + 1..n + 4].iter().collect::<Vec<_>>()
        );
    }
    assert_eq!(client.readdir("", want.last().unwrap(), 3).unwrap(), []);
}

/// Whatever the scheduler does with them, bytes are where they belong.
#[test]
fn data_are_those_of_the_folder() {
    let lists = [(false, "auto", Merge::List), (true, "twins", Merge::List)];
    let ranges = [(false, "auto"), (true, "auto"), (true, "twins"), (false, "hbrr")];
    for (split, policy, merge) in
        ranges.map(|(split, policy)| (split, policy, Merge::Contiguous)).into_iter().chain(lists)
    {
        let bed = Bed::start(1, |_, io| {
            (io.split, io.merge) = (split, merge);
            io.policy = PolicySpec::named(policy);
        });
        let (client, other) = (bed.client(0), bed.client(0));
        let bytes = pattern(1, 1_000_000);
        let file = client.create("file", CreateOptions::default()).unwrap();
        std::thread::scope(|scope| {
            for (n, part) in bytes.chunks(30_000).enumerate() {
                let file = &file;
                scope.spawn(move || file.write_at(part, n as u64 * 30_000).unwrap());
            }
        });
        assert!(std::fs::read(bed.path().join("file")).unwrap() == bytes, "{split} {policy}");
        let reader = other.open("file", false).unwrap();
        let mut back = vec![0; bytes.len() + 10_000];
        assert_eq!(reader.read_at(&mut back, 0).unwrap(), bytes.len());
        assert!(back[..bytes.len()] == bytes, "{split} {policy}");
        // The end of the file, and beyond.
        assert_eq!(reader.read_at(&mut back, 999_000).unwrap(), 1000);
        assert_eq!(reader.read_at(&mut back, 5_000_000).unwrap(), 0);
        // Written by another program meanwhile.
        use std::os::unix::fs::FileExt;
        let direct = std::fs::File::options().write(true).open(bed.path().join("file")).unwrap();
        direct.write_all_at(b"from outside", 500_000).unwrap();
        assert_eq!(reader.read_at(&mut back[..12], 500_000).unwrap(), 12);
        assert_eq!(&back[..12], b"from outside");
        assert_eq!(file.set_len(70_000).unwrap().size, 70_000);
        assert_eq!(reader.attr().unwrap().size, 70_000);
        assert_eq!(file.write_at(b"far", 300_000).unwrap(), 3);
        assert_eq!(reader.read_at(&mut back, 0).unwrap(), 300_003);
        assert!(back[70_000..300_000].iter().all(|byte| *byte == 0) && back[..70_000] == bytes[..70_000]);
        let got = reader.read_list(&[(300_000, 10), (5, 7), (69_990, 20)], &mut back[..37]).unwrap();
        assert_eq!(got, [3, 7, 20]);
        file.sync().unwrap();
        file.close().unwrap();
    }
}

#[test]
fn a_removed_file_stays_for_who_has_it_open() {
    let bed = Bed::start(1, |_, _| {});
    let (one, two) = (bed.client(0), bed.client(0));
    let file = one.create("file", CreateOptions::default()).unwrap();
    file.write_at(b"bytes", 0).unwrap();
    let second = two.open("file", true).unwrap();
    two.unlink("file").unwrap();
    let fresh = two.create("file", CreateOptions::default()).unwrap();
    fresh.write_at(b"other bytes", 0).unwrap();
    let mut back = [0; 20];
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 5);
    assert_eq!(second.write_at(b"!", 5).unwrap(), 1);
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 6);
    assert_eq!(file.attr().unwrap().nlink, 0);
    file.sync().unwrap();
    file.close().unwrap();
    assert_eq!(second.read_at(&mut back, 0).unwrap(), 6);
    second.close().unwrap();
    assert_eq!(fresh.read_at(&mut back, 0).unwrap(), 11);
}

#[test]
fn clients_go_on_through_another_node() {
    let mut bed = Bed::start(2, |_, _| {});
    let client = bed.client(0);
    let file = client.create("file", CreateOptions::default()).unwrap();
    let bytes = pattern(3, 400_000);
    file.write_at(&bytes[..200_000], 0).unwrap();
    bed.nodes[0] = None;
    // Open files are opened there again; both nodes use the memory of one machine, so that a sync is still true.
    file.write_at(&bytes[200_000..], 200_000).unwrap();
    let mut back = vec![0; 500_000];
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 400_000);
    assert!(back[..400_000] == bytes);
    file.sync().unwrap();
    client.rename("file", "moved", false).unwrap();
    assert_eq!(file.attr().unwrap().size, 400_000);
    file.close().unwrap();
    assert!(std::fs::read(bed.path().join("moved")).unwrap() == bytes);
    // A file that another one took the place of is not it.
    let file = client.open("moved", false).unwrap();
    let started = impresario_server::start(&bed.config, "io.0").unwrap();
    std::fs::write(bed.path().join("new"), "new").unwrap();
    std::fs::rename(bed.path().join("new"), bed.path().join("moved")).unwrap();
    bed.nodes = vec![Some(started), None];
    assert_eq!(errno(file.read_at(&mut back, 0)), libc::ENOENT);
}

/// Open files may have no name any more; what is not synced is in the other node's memory, and is synced before the client goes.
#[test]
fn a_client_goes_back_to_its_node_when_it_has_left_nothing_at_the_other() {
    let mut bed = Bed::start(2, |_, _| {});
    let client = bed.client_of_the_first();
    client.follow(&bed.config);
    let removed = client.create("removed", CreateOptions::default()).unwrap();
    bed.nodes[0] = None;
    removed.write_at(b"still here", 0).unwrap();
    assert!(client.is_away());
    client.unlink("removed").unwrap();
    bed.nodes[0] = Some(impresario_server::start(&bed.config, "io.0").unwrap());
    assert!(!client.return_home(&bed.config).unwrap(), "it has a file open");
    let mut back = [0; 10];
    assert_eq!(removed.read_at(&mut back, 0).unwrap(), 10);
    assert_eq!(&back, b"still here");
    removed.sync().unwrap();
    removed.close().unwrap();
    let file = client.create("file", CreateOptions::default()).unwrap();
    file.write_at(b"stable", 0).unwrap();
    file.close().unwrap();
    let file = client.create("gone", CreateOptions::default()).unwrap();
    file.write_at(b"removed", 0).unwrap();
    file.close().unwrap();
    client.unlink("gone").unwrap();
    impresario_testing::until("it goes back", || !client.is_away());
    bed.nodes[1] = None;
    let file = client.open("file", true).unwrap();
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 6);
    file.sync().unwrap();
}

/// The rule of its job changes while it runs. Open files may have no name any more, and what is not synced is with its node.
#[test]
fn a_client_follows_the_allocation_when_it_has_left_nothing_at_its_node() {
    let mut bed = Bed::start(2, |_, _| {});
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("impresario.toml");
    let allocate = |node: &str| {
        let rule = AllocationRule { jobs: vec![7], hosts: Vec::new(), nodes: vec![node.into()] };
        let allocation = Allocation { rules: vec![rule], ..Allocation::default() };
        let new = path.with_extension("new");
        std::fs::write(&new, Config { allocation, ..bed.config.clone() }.to_toml()).unwrap();
        std::fs::rename(&new, &path).unwrap();
        Config::load(&path).unwrap()
    };
    // Without the one that asks.
    let addresses: Vec<String> = bed.config.io.iter().map(|io| io.address.clone()).collect();
    let connections = || -> Vec<u64> {
        let open = |address: &String| {
            let mut peer = Peer::connect(address, impresario_wire::Role::Io, 99);
            peer.status()["connections"]["open"].as_u64().unwrap() - 1
        };
        addresses.iter().map(open).collect()
    };
    let config = allocate("io.0");
    let options = ClientOptions { job: 7, placement_seed: 0, ..ClientOptions::default() };
    let client = Client::connect(&config, options).unwrap();
    client.follow(&config);
    let removed = client.create("removed", CreateOptions::default()).unwrap();
    removed.write_at(b"still here", 0).unwrap();
    client.unlink("removed").unwrap();
    let changed = allocate("io.1");
    // It looks every two seconds, and is not done with it when it could not go.
    std::thread::sleep(Duration::from_millis(2500));
    assert!(!client.reallocate(&changed).unwrap(), "it has a file open");
    assert_eq!(connections(), [1, 0]);
    let mut back = [0; 10];
    assert_eq!(removed.read_at(&mut back, 0).unwrap(), 10);
    assert_eq!(&back, b"still here");
    removed.close().unwrap();
    let file = client.create("file", CreateOptions::default()).unwrap();
    file.write_at(b"stable", 0).unwrap();
    file.close().unwrap();
    impresario_testing::until("it goes through the second", || connections() == [0, 1]);
    bed.nodes[0] = None;
    let file = client.open("file", true).unwrap();
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 6);
    file.sync().unwrap();
}

/// Only one thread of the I/O node waits for a lease of a file, and not for long; the others' clients ask again.
#[test]
fn all_who_open_a_file_that_another_server_has_a_lease_of_get_it_when_that_is_given_up() {
    use std::os::fd::AsRawFd;
    // SAFETY: no handler is installed; nothing else in these tests goes by the signal.
    assert_ne!(unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) }, libc::SIG_ERR);
    let lease = |file: &std::fs::File, kind: libc::c_int| {
        // SAFETY: a descriptor that is open, and numbers.
        let set = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) };
        if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    let bed = Bed::start(1, |_, _| {});
    std::fs::write(bed.path().join("file"), "leased").unwrap();
    let holder = std::fs::File::open(bed.path().join("file")).unwrap();
    if let Err(error) = lease(&holder, libc::F_WRLCK) {
        return impresario_testing::skip("leases", error);
    }
    let clients: Vec<_> = (0..6).map(|_| bed.client(0)).collect();
    std::thread::scope(|scope| {
        let readers: Vec<_> = clients
            .iter()
            .map(|client| {
                scope.spawn(move || {
                    let file = client.open("file", false)?;
                    let mut bytes = [0; 6];
                    file.read_at(&mut bytes, 0).map(|_| bytes)
                })
            })
            .collect();
        // Longer than any thread waits for it.
        std::thread::sleep(Duration::from_secs(3));
        lease(&holder, libc::F_UNLCK).unwrap();
        for reader in readers {
            assert_eq!(&reader.join().unwrap().unwrap(), b"leased");
        }
    });
    drop(holder);
    let holder = std::fs::File::open(bed.path().join("file")).unwrap();
    lease(&holder, libc::F_RDLCK).unwrap();
    std::thread::scope(|scope| {
        let cut = scope.spawn(|| clients[0].set_attr("file", SetAttr { size: Some(3), ..SetAttr::default() }));
        std::thread::sleep(Duration::from_secs(3));
        lease(&holder, libc::F_UNLCK).unwrap();
        assert_eq!(cut.join().unwrap().unwrap().size, 3);
    });
}

#[test]
fn new_nodes_belong_to_their_makers() {
    if !impresario_testing::require("root") {
        return;
    }
    let bed = Bed::start(1, |_, _| {});
    let client = bed.client(0);
    let options = CreateOptions { uid: 7001, gid: 7002, mode: 0o4711, ..CreateOptions::default() };
    client.create("file", options).unwrap().close().unwrap();
    let attr = client.mkdir("dir", 0o2775, 7001, 7100).unwrap();
    assert_eq!((attr.uid, attr.gid, attr.mode), (7001, 7100, 0o2775));
    let attr = client.stat("file").unwrap();
    assert_eq!((attr.uid, attr.gid, attr.mode), (7001, 7002, 0o4711));
    // In such a directory nodes get its group.
    client.create("dir/file", options).unwrap().close().unwrap();
    assert_eq!(client.stat("dir/file").unwrap().gid, 7100);
    assert_eq!(client.symlink("dir/link", "x", 7001, 7002).unwrap().uid, 7001);
    // Without the right to look, too: permissions are checked where programs run.
    std::fs::set_permissions(bed.path().join("dir"), std::fs::Permissions::from_mode(0o000)).unwrap();
    assert_eq!(client.list("dir").unwrap().len(), 2);
}

#[test]
fn a_folder_that_is_not_there_is_named() {
    let mut bed = Bed::start(1, |_, _| {});
    bed.nodes.clear();
    bed.config.tree.as_mut().unwrap().folder = bed.path().join("nowhere");
    let refused = impresario_server::start(&bed.config, "io.0").err().unwrap().to_string();
    assert!(refused.contains("io.0: cannot open the folder") && refused.contains("nowhere"), "{refused}");
}

#[test]
fn names_of_the_folder_are_exchanged() {
    let bed = Bed::start(2, |_, _| {});
    let (client, other) = (bed.client(0), bed.client(1));
    std::fs::write(bed.path().join("a"), "one").unwrap();
    std::fs::create_dir(bed.path().join("d")).unwrap();
    std::fs::write(bed.path().join("d/b"), "two").unwrap();
    let (a, b) = (client.stat("a").unwrap(), client.stat("d/b").unwrap());
    client.exchange("a", "d/b").unwrap();
    assert_eq!(std::fs::read_to_string(bed.path().join("a")).unwrap(), "two");
    assert_eq!((client.stat("a").unwrap().ino, other.stat("d/b").unwrap().ino), (b.ino, a.ino));
    other.exchange("a", "d").unwrap();
    assert_eq!(std::fs::read_to_string(bed.path().join("a/b")).unwrap(), "one");
    assert_eq!(client.stat("d").unwrap().ino, b.ino);
    assert_eq!(errno(client.exchange("a", "nothing")), libc::ENOENT);
    assert_eq!(errno(client.exchange("a", "a/b")), libc::EINVAL);
}

#[test]
fn past_the_page_cache_the_bytes_are_the_same_and_the_status_says_how_they_go() {
    let bed = Bed::start(1, |tree, _| tree.direct = Some(true));
    let client = bed.client(0);
    let file = client.create("file", CreateOptions::default()).unwrap();
    // Whole pages, and what is not.
    let bytes = pattern(3, 700_001);
    file.write_at(&bytes, 0).unwrap();
    file.write_at(b"inside", 300_000).unwrap();
    file.sync().unwrap();
    let mut whole = bytes.clone();
    whole[300_000..300_006].copy_from_slice(b"inside");
    let mut back = vec![0; whole.len()];
    assert_eq!(file.read_at(&mut back, 0).unwrap(), whole.len());
    assert!(back == whole);
    assert!(std::fs::read(bed.path().join("file")).unwrap() == whole);
    let access = impresario_transport::Access::of(&bed.config, impresario_wire::KeyRole::Server);
    let status = impresario_client::admin::status(&access, &bed.config.io[0].address, impresario_testing::PATIENCE);
    let tree = &serde_json::from_str::<serde_json::Value>(&status.unwrap()).unwrap()["tree"];
    if tree["ring"].is_null() {
        impresario_testing::skip("io_uring", &tree["no_ring"]);
    } else if tree["direct"] == true {
        assert!(tree["ring"]["transfers"].as_u64() > Some(0), "{tree}");
        assert_eq!(tree["ring"]["free_pieces"], tree["ring"]["pieces"]);
    }
}

/// A file system with two files. Of one of them nobody learns the attributes until this is released.
#[derive(Default)]
struct Hanging {
    replies: Mutex<(Vec<ReplyAttr>, bool)>,
}

impl Hanging {
    const HANGS: u64 = 2;

    fn attr(node: u64) -> fuser::FileAttr {
        let (kind, perm) = if node == 1 { (FileType::Directory, 0o755) } else { (FileType::RegularFile, 0o644) };
        impresario_testing::fuse::attr(node, kind, perm, 0)
    }

    fn calls(&self) -> usize {
        self.replies.lock().unwrap().0.len()
    }

    fn release(&self) {
        let (replies, released) = &mut *self.replies.lock().unwrap();
        *released = true;
        replies.drain(..).for_each(|reply| reply.attr(&Duration::ZERO, &Hanging::attr(Hanging::HANGS)));
    }
}

struct HangsForOne(Arc<Hanging>);

impl Filesystem for HangsForOne {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("hangs") => reply.entry(&Duration::ZERO, &Hanging::attr(Hanging::HANGS), Generation(0)),
            Some("answers") => reply.entry(&Duration::ZERO, &Hanging::attr(3), Generation(0)),
            _ => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let mut replies = self.0.replies.lock().unwrap();
        match (node.0, replies.1) {
            (Hanging::HANGS, false) => replies.0.push(reply),
            (node, _) => reply.attr(&Duration::ZERO, &Hanging::attr(node)),
        }
    }
}

#[test]
fn a_file_whose_calls_hang_delays_no_other() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    // More than an I/O node has threads for names and attributes.
    const CALLS: usize = 40;
    let hanging = Arc::<Hanging>::default();
    let (mounted, session) = mounted(HangsForOne(hanging.clone()));
    let bed = Bed::start(1, |tree, _| tree.folder = mounted.path().into());
    let (client, other) = (bed.client(0), bed.client(0));
    std::thread::scope(|scope| {
        for _ in 0..CALLS {
            let client = &client;
            scope.spawn(move || client.stat("hangs").unwrap());
        }
        impresario_testing::until("they hang", || hanging.calls() >= CALLS);
        let found = (0..20).try_for_each(|_| other.stat("answers").map(drop));
        hanging.release();
        found.unwrap();
    });
    drop(bed);
    drop(session);
}

/// What goes on at the other node while the client looks for its own counts, too.
#[test]
fn a_client_stays_away_while_an_open_is_under_way() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    let hanging = Arc::<Hanging>::default();
    let (mounted, session) = mounted(HangsForOne(hanging.clone()));
    let mut bed = Bed::start(2, |tree, _| tree.folder = mounted.path().into());
    let client = bed.client_that_is_away("answers");
    // With a configuration that is a cluster's by now.
    let cluster = Config { tree: None, ..bed.config.clone() };
    let goes_elsewhere = client.return_home(&cluster).unwrap();
    let goes_meanwhile = std::thread::scope(|scope| {
        let opening = scope.spawn(|| client.open("hangs", false).unwrap());
        impresario_testing::until("it hangs", || hanging.calls() > 0);
        let goes = client.return_home(&bed.config).unwrap();
        hanging.release();
        opening.join().unwrap().close().unwrap();
        goes
    });
    assert!(!goes_elsewhere && !goes_meanwhile, "{goes_elsewhere} {goes_meanwhile}");
    impresario_testing::until("it goes back", || client.return_home(&bed.config).unwrap());
    drop(bed);
    drop(session);
}

#[derive(Default)]
struct SyncState {
    held: Vec<fuser::ReplyEmpty>,
    is_held: bool,
    /// The next one of the file `bad` fails.
    fails: bool,
    /// All that were asked for.
    syncs: usize,
}

/// A file system with the files `good` and `bad`, whose syncs are held or fail.
struct Syncs(Arc<Mutex<SyncState>>);

impl Filesystem for Syncs {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("bad") => reply.entry(&Duration::ZERO, &Full::attr(2), Generation(0)),
            Some("good") => reply.entry(&Duration::ZERO, &Full::attr(3), Generation(0)),
            _ => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &Full::attr(node.0));
    }

    fn setattr(
        &self,
        _: &Request,
        node: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u64>,
        _: Option<fuser::TimeOrNow>,
        _: Option<fuser::TimeOrNow>,
        _: Option<std::time::SystemTime>,
        _: Option<FileHandle>,
        _: Option<std::time::SystemTime>,
        _: Option<std::time::SystemTime>,
        _: Option<std::time::SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&Duration::ZERO, &Full::attr(node.0));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: fuser::WriteFlags,
        _: fuser::OpenFlags,
        _: Option<fuser::LockOwner>,
        reply: fuser::ReplyWrite,
    ) {
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, node: INodeNo, _: FileHandle, _: bool, reply: fuser::ReplyEmpty) {
        let mut state = self.0.lock().unwrap();
        state.syncs += 1;
        if state.is_held {
            state.held.push(reply);
        } else if node.0 == 2 && std::mem::take(&mut state.fails) {
            reply.error(fuser::Errno::EIO);
        } else {
            reply.ok();
        }
    }
}

/// Two I/O nodes over [`Syncs`], and a client of the first one, which is lost and there again: it goes through the second.
struct Away {
    client: Arc<Client>,
    bed: Bed,
    syncs: Arc<Mutex<SyncState>>,
    _session: fuser::BackgroundSession,
    _mounted: TempDir,
}

impl Away {
    fn begin(timeout_ms: u64) -> Away {
        let syncs = Arc::<Mutex<SyncState>>::default();
        let (mounted, session) = mounted(Syncs(syncs.clone()));
        let mut bed = Bed::start_with_timeout(timeout_ms, 2, |tree, _| tree.folder = mounted.path().into());
        let client = bed.client_that_is_away("good");
        Away { client, bed, syncs, _session: session, _mounted: mounted }
    }

    fn write(&self, name: &str) {
        let file = self.client.open(name, true).unwrap();
        file.write_at(b"bytes", 0).unwrap();
        file.close().unwrap();
    }

    fn sync(&self, name: &str) -> Result<(), ClientError> {
        self.client.open(name, true).unwrap().sync()
    }

    fn release(&self) {
        let mut state = self.syncs.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.is_held = false;
        state.held.drain(..).for_each(|reply| reply.ok());
    }
}

impl Drop for Away {
    /// A process with a thread that hangs in its own file system would not end.
    fn drop(&mut self) {
        self.release();
    }
}

#[test]
fn a_client_stays_away_while_syncs_hang_and_nobody_waits_for_them_without_bound() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    let away = Away::begin(4000);
    away.write("good");
    away.syncs.lock().unwrap().is_held = true;
    let mut peers =
        [1, 2].map(|number| Peer::connect(&away.bed.config.io[1].address, impresario_wire::Role::Io, number));
    let call = |number| Call::Meta { who: who(number), call: impresario_wire::MetaCall::SyncAll };
    let begun = std::time::Instant::now();
    peers[0].send(&call(1), &[]);
    impresario_testing::until("it hangs", || !away.syncs.lock().unwrap().held.is_empty());
    let mut ask = |peer: usize, is_sent: bool| {
        if !is_sent {
            peers[peer].send(&call(peer as u64 + 1), &[]);
        }
        match peers[peer].answer().unwrap().1 {
            impresario_wire::Answer::Fault(fault) => fault.errno,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ask(1, false), libc::EBUSY, "for another client");
    assert_eq!(ask(0, true), libc::EBUSY, "it takes too long");
    let waited = begun.elapsed();
    assert!(waited < Duration::from_millis(4000), "its client would not have heard it: {waited:?}");
    assert_eq!(ask(0, false), libc::EBUSY, "it still hangs");
    assert!(!away.client.return_home(&away.bed.config).unwrap_or(false) && away.client.is_away());
    assert_eq!(away.syncs.lock().unwrap().held.len(), 1, "one call hangs, however many ask");
    away.release();
    impresario_testing::until("it goes back", || away.client.return_home(&away.bed.config).unwrap_or(false));
    away.sync("good").unwrap();
}

#[test]
fn a_change_of_rights_does_not_wait_for_what_was_written() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    let away = Away::begin(4000);
    away.write("good");
    away.syncs.lock().unwrap().is_held = true;
    away.client.set_attr("good", SetAttr { mode: Some(0o640), ..SetAttr::default() }).unwrap();
    impresario_testing::until("the file is closed", || !away.syncs.lock().unwrap().held.is_empty());
    away.release();
    away.sync("good").unwrap();
}

/// A sync of a file asks for its bytes and then for the rest, which the first has made durable.
#[test]
fn a_sync_reaches_the_file_system_once() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    let syncs = Arc::<Mutex<SyncState>>::default();
    let (mounted, session) = mounted(Syncs(syncs.clone()));
    let bed = Bed::start(1, |tree, _| tree.folder = mounted.path().into());
    let file = bed.client(0).open("good", true).unwrap();
    let synced = || {
        file.sync().unwrap();
        std::mem::take(&mut syncs.lock().unwrap().syncs)
    };
    file.write_at(b"bytes", 0).unwrap();
    assert_eq!(synced(), 1);
    bed.client(0).set_attr("good", SetAttr { mode: Some(0o640), ..SetAttr::default() }).unwrap();
    assert!(synced() > 0, "attributes that others have changed");
    assert_eq!(synced(), 1);
    drop((file, bed));
    drop(session);
}

#[test]
fn a_client_goes_back_after_a_loss_and_learns_once_of_its_own() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    let away = Away::begin(10_000);
    ["good", "bad"].iter().for_each(|name| away.write(name));
    away.syncs.lock().unwrap().fails = true;
    impresario_testing::until("it goes back", || away.client.return_home(&away.bed.config).unwrap());
    assert_eq!(away.sync("good").map_err(|error| error.errno()), Ok(()));
    assert_eq!(away.sync("bad").map_err(|error| error.errno()), Err(libc::EIO), "its bytes are lost");
    assert_eq!(away.sync("bad").map_err(|error| error.errno()), Ok(()), "told once");
}

#[derive(Default)]
struct FullState {
    replies: Vec<fuser::ReplyWrite>,
    writes: Vec<(u64, usize)>,
    fails: bool,
}

/// A file system with one file. What is written there takes until it is released; then there is no space.
#[derive(Default)]
struct Full {
    state: Mutex<FullState>,
}

impl Full {
    fn attr(node: u64) -> fuser::FileAttr {
        let (kind, perm) = if node == 1 { (FileType::Directory, 0o755) } else { (FileType::RegularFile, 0o644) };
        impresario_testing::fuse::attr(node, kind, perm, if node == 1 { 0 } else { 1 << 20 })
    }

    /// Offset and length of what came.
    fn writes(&self) -> Vec<(u64, usize)> {
        self.state.lock().unwrap().writes.clone()
    }

    /// Answers what came. What comes later is held, or fails at once.
    fn release(&self, holds_later: bool) {
        let FullState { replies, fails, .. } = &mut *self.state.lock().unwrap();
        *fails = !holds_later;
        replies.drain(..).for_each(|reply| reply.error(fuser::Errno::ENOSPC));
    }
}

struct FillsUp(Arc<Full>);

impl Filesystem for FillsUp {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("file") => reply.entry(&Duration::ZERO, &Full::attr(2), Generation(0)),
            _ => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &Full::attr(node.0));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: fuser::WriteFlags,
        _: fuser::OpenFlags,
        _: Option<fuser::LockOwner>,
        reply: fuser::ReplyWrite,
    ) {
        let FullState { replies, writes, fails } = &mut *self.0.state.lock().unwrap();
        writes.push((offset, data.len()));
        match *fails {
            true => reply.error(fuser::Errno::ENOSPC),
            false => replies.push(reply),
        }
    }
}

/// A full disk fails the merged write of two clients late: what they have written through another node since must stay.
#[test]
fn what_a_full_disk_failed_late_is_not_written_again_for_clients_that_are_gone() {
    const BLOCK: usize = 4096;
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    for (takes, are_gone) in [(Duration::from_millis(200), true), (Duration::from_millis(1500), false)] {
        let full = Arc::<Full>::default();
        let (mounted, session) = mounted(FillsUp(full.clone()));
        let bed = Bed::start(1, |tree, io| {
            tree.folder = mounted.path().into();
            io.in_flight_requests = 1;
            io.policy = PolicySpec::named("none");
        });
        let client = bed.client(0);
        let file = client.open("file", true).unwrap();
        let (key, layout) = (file.key(), file.layout());
        let connect = |number| Peer::connect(&bed.config.io[0].address, impresario_wire::Role::Io, number);
        let send = |peer: &mut Peer, number, offset| {
            let call = Call::FileWrite { who: who(number), file: key, layout, offset };
            peer.send(&call, &[number as u8; BLOCK]);
        };
        let (mut first, mut one, mut two, looks) = (connect(1), connect(2), connect(3), &mut connect(4));
        let mut forward = |what: &str| looks.status()["forward"][what].as_u64().unwrap();
        send(&mut first, 1, 0);
        impresario_testing::until("it is written", || full.writes().len() == 1);
        send(&mut one, 2, 10 * BLOCK as u64);
        send(&mut two, 3, 11 * BLOCK as u64);
        impresario_testing::until("they wait", || forward("waiting") == 2);
        full.release(true);
        impresario_testing::until("they are written", || full.writes().len() == 2);
        let merged = [(0, BLOCK), (10 * BLOCK as u64, 2 * BLOCK)];
        assert_eq!(full.writes(), merged, "they are merged");
        std::thread::sleep(takes);
        if are_gone {
            drop((one, two));
            std::thread::sleep(Duration::from_millis(100));
        }
        full.release(false);
        impresario_testing::until("they are done", || forward("in_flight") == 0);
        assert_eq!(full.writes(), merged, "after {takes:?}, gone: {are_gone}");
        drop((file, client, bed));
        drop(session);
    }
}

/// A file system without times of birth, which gives the number of a removed file to the next one.
struct ReusesNumbers(std::sync::atomic::AtomicU64);

impl ReusesNumbers {
    fn attr(&self, node: u64) -> fuser::FileAttr {
        let kind = if node == 1 { FileType::Directory } else { FileType::RegularFile };
        impresario_testing::fuse::attr(node, kind, 0o755, 4)
    }

    fn generation(&self) -> u64 {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

impl Filesystem for &'static ReusesNumbers {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let generation = self.generation();
        match name.to_str() == Some(["first", "second"][generation as usize]) {
            true => reply.entry(&Duration::ZERO, &self.attr(2), Generation(generation)),
            false => reply.error(fuser::Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attr(node.0));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u32,
        _: fuser::OpenFlags,
        _: Option<fuser::LockOwner>,
        reply: fuser::ReplyData,
    ) {
        reply.data([b"old.", b"new."][self.generation() as usize]);
    }
}

#[test]
fn a_new_file_with_the_number_of_one_that_others_removed_is_the_new_one() {
    if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
        return;
    }
    static FILES: ReusesNumbers = ReusesNumbers(std::sync::atomic::AtomicU64::new(0));
    let (mounted, session) = mounted(&FILES);
    let bed = Bed::start(1, |tree, _| tree.folder = mounted.path().into());
    let client = bed.client(0);
    let read = |name: &str| {
        let mut bytes = [0; 4];
        let file = client.open(name, false)?;
        file.read_at(&mut bytes, 0).map(|_| bytes)
    };
    assert_eq!(&read("first").unwrap(), b"old.");
    // By another program.
    FILES.0.store(1, std::sync::atomic::Ordering::Relaxed);
    // The old one is closed without waiting.
    impresario_testing::until("the new file is read", || read("second").is_ok_and(|bytes| &bytes == b"new."));
    assert_eq!(errno(read("first")), libc::ENOENT);
    drop(bed);
    drop(session);
}
