//! A CephFS file system as a backend, through libcephfs: a cluster on this machine, started once for all of its tests.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use impresario_backend::cephfs::{HUNG_MAX, Options, Source, Striping};
use impresario_backend::suite::Suite;
use impresario_backend::{Backend, Caller, CephTree, Errno, Handle, Lost, Make, SetAttr};
use impresario_testing::ceph::CephCluster;
use impresario_testing::{PATIENCE, free_ports, skip, until};

const MIB: u32 = 1 << 20;

fn root() -> Caller {
    Caller { uid: 0, gid: 0, groups: vec![] }
}

fn source(cluster: &CephCluster) -> Source {
    Source { config: Some(cluster.config()), ..Source::default() }
}

fn open(cluster: &CephCluster, options: Options) -> CephTree {
    CephTree::open(&source(cluster), options).unwrap()
}

fn striped(unit_bytes: u32, count: u16, object_bytes: u32) -> Options {
    Options { striping: Some(Striping { unit_bytes, count, object_bytes }), ..Options::default() }
}

fn quick(timeout: Duration) -> Options {
    Options { timeout, ..Options::default() }
}

fn file(tree: &CephTree, name: &str, bytes: &[u8]) -> Handle {
    let root = tree.root().unwrap();
    let (file, _) = tree.make(&self::root(), &root, name.as_bytes(), Make::File, &SetAttr::default()).unwrap();
    tree.write(&self::root(), &file, 0, bytes, false).unwrap();
    file
}

fn contents(tree: &CephTree, file: &Handle) -> Result<Vec<u8>, Errno> {
    contents_as(tree, &root(), file)
}

fn contents_as(tree: &CephTree, caller: &Caller, file: &Handle) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; 1 << 20];
    let len = tree.read(caller, file, 0, &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

type Check = fn(&mut CephCluster);

#[test]
fn a_file_system_is_served() {
    let Some(mut cluster) = CephCluster::start(4) else { return };
    let checks: [(&str, Check); 9] = [
        ("the contract holds", the_contract_holds),
        ("handles outlive a restart and renames", handles_outlive_a_restart_and_renames),
        ("OSDs of blocks are told", osds_of_blocks_are_told),
        ("a folder is served", a_folder_is_served),
        ("what cannot be opened is named", what_cannot_be_opened_is_named),
        ("a killed server's session is taken over", a_killed_servers_session_is_taken_over),
        ("an evicted client goes on and tells of losses", an_evicted_client_goes_on_and_tells_of_losses),
        ("a metadata server that hangs takes few threads", a_metadata_server_that_hangs_takes_few_threads),
        ("OSDs that hang or restart lose nothing", osds_that_hang_or_restart_lose_nothing),
    ];
    for (name, check) in checks {
        let started = Instant::now();
        println!("{name}");
        check(&mut cluster);
        println!("{name}: {:?}", started.elapsed());
    }
}

fn the_contract_holds(cluster: &mut CephCluster) {
    // Few large objects: of a file that is cut from a great length each is removed by itself.
    let tree = open(cluster, striped(64 << 10, 1, 64 * MIB));
    let root_dir = tree.root().unwrap();
    until("the manager tells the space", || tree.space(&root_dir).unwrap().total_bytes > 0);
    Suite { backend: &tree, caller: root(), others: true, earlier_times: true, entries: 100 }.run();
    assert_eq!((tree.losses(), tree.mounts(), tree.hung()), (0, 1, 0));
}

fn handles_outlive_a_restart_and_renames(cluster: &mut CephCluster) {
    let tree = open(cluster, Options::default());
    let (caller, root) = (root(), tree.root().unwrap());
    let make = |dir, name: &[u8], what| tree.make(&caller, dir, name, what, &SetAttr::default()).unwrap().0;
    let dir = make(&root, b"dir", Make::Directory);
    let (file, gone) = (make(&dir, b"file", Make::File), make(&dir, b"gone", Make::File));
    tree.write(&caller, &file, 0, b"bytes", false).unwrap();
    tree.rename(&caller, (&dir, b"file"), (&root, b"moved")).unwrap();
    tree.remove(&caller, &dir, b"gone").unwrap();
    let fsid = tree.attr(&file).unwrap().fsid;
    drop(tree);

    let tree = open(cluster, Options::default());
    assert_eq!(tree.attr(&file).map(|attr| (attr.size_bytes, attr.fsid)), Ok((5, fsid)));
    assert_eq!(tree.lookup(&caller, &root, b"moved").unwrap().0, file);
    assert_eq!(tree.lookup(&caller, &dir, b"..").unwrap().0, root);
    assert_eq!(tree.attr(&gone), Err(Errno(libc::ESTALE)));
    // What others did is seen, and the reverse.
    let other = open(cluster, Options::default());
    other.write(&caller, &file, 5, b" of another", false).unwrap();
    assert_eq!(contents(&tree, &file).unwrap(), b"bytes of another");
    tree.write(&caller, &file, 0, b"BYTES", false).unwrap();
    assert_eq!(contents(&other, &file).unwrap(), b"BYTES of another");
    assert_eq!(other.attr(&file).unwrap().size_bytes, 16);
    // A file that is held stays when another client removes its name.
    tree.hold(&file).unwrap();
    other.remove(&caller, &root, b"moved").unwrap();
    drop(other);
    assert_eq!(contents(&tree, &file).unwrap(), b"BYTES of another");
    tree.release(&file);
    tree.close_all();
    impresario_testing::until("it is closed", || tree.attr(&file) == Err(Errno(libc::ESTALE)));
    // Snapshots are not shown, and nothing can have their name.
    assert_eq!(tree.lookup(&caller, &dir, b".snap").unwrap_err(), Errno(libc::ENOENT));
    let made = tree.make(&caller, &dir, b".snap", Make::Directory, &SetAttr::default());
    assert_eq!(made.unwrap_err(), Errno(libc::EPERM));
}

/// The OSD that serves an object, as the monitor says.
fn osd_of(cluster: &CephCluster, file: u64, object: u64) -> u32 {
    let said = cluster.ceph(&["osd", "map", "data", &format!("{file:x}.{object:08x}"), "-f", "json"]);
    let (_, rest) = said.split_once("\"acting_primary\":").expect("a primary OSD");
    rest.split(|letter: char| !letter.is_ascii_digit()).find(|word| !word.is_empty()).unwrap().parse().unwrap()
}

fn osds_of_blocks_are_told(cluster: &mut CephCluster) {
    let caller = root();
    // Units of 64 KiB go round three objects of 128 KiB, then round the next three.
    let tree = open(cluster, striped(64 << 10, 3, 128 << 10));
    let root = tree.root().unwrap();
    let (dir, _) = tree.make(&caller, &root, b"placed", Make::Directory, &SetAttr::default()).unwrap();
    let (file, attr) = tree.make(&caller, &dir, b"a file", Make::File, &SetAttr::default()).unwrap();
    let objects: Vec<u32> = (0..6).map(|object| osd_of(cluster, attr.fileid, object)).collect();
    let told = tree.placement(&file).unwrap();
    assert_eq!((told.layout.pcount, told.layout.ssize_bytes, &told.servers[..]), (3, 64 << 10, &objects[..3]));
    tree.write(&caller, &file, 700_000, b"the end", false).unwrap();
    let told = tree.placement(&file).unwrap();
    let units = [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5].map(|object: usize| objects[object]);
    assert_eq!((told.layout.pcount, told.layout.ssize_bytes, &told.servers[..]), (12, 64 << 10, &units[..]));
    // Files that are striped as the file system does lie in whole objects.
    let plain = open(cluster, Options::default());
    let (file, attr) = plain.make(&caller, &dir, b"plain", Make::File, &SetAttr::default()).unwrap();
    plain.lookup(&caller, &root, b"placed").unwrap();
    let told = plain.placement(&file).unwrap();
    assert_eq!((told.layout.pcount, told.layout.ssize_bytes), (64, 4 * MIB));
    for object in [1, 63] {
        assert_eq!(told.servers[object as usize], osd_of(cluster, attr.fileid, object), "object {object}");
    }
    let used: std::collections::BTreeSet<u32> = told.servers.iter().copied().collect();
    assert_eq!(used.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    // Renamed by another client, it cannot be asked for where it was.
    tree.rename(&caller, (&dir, b"plain"), (&dir, b"elsewhere")).unwrap();
    assert_eq!(plain.placement(&file).unwrap().layout.pcount, 1);
    plain.lookup(&caller, &dir, b"elsewhere").unwrap();
    assert_eq!(plain.placement(&file).unwrap().servers, told.servers);
}

fn a_folder_is_served(cluster: &mut CephCluster) {
    let caller = root();
    let whole = open(cluster, Options::default());
    let top = whole.root().unwrap();
    let (folder, _) = whole.make(&caller, &top, b"a folder", Make::Directory, &SetAttr::default()).unwrap();
    let source = Source { folder: "/a folder".into(), filesystem: Some("fs".into()), ..source(cluster) };
    let tree = CephTree::open(&source, Options::default()).unwrap();
    let root = tree.root().unwrap();
    assert_eq!(root, folder, "I/O nodes over a folder and over the whole mean the same by a handle");
    assert_eq!(tree.lookup(&caller, &root, b"..").unwrap().0, root);
    assert_eq!(tree.attr(&top), Err(Errno(libc::ESTALE)));
    let inside = file(&tree, "inside", b"bytes");
    assert_eq!(whole.lookup(&caller, &folder, b"inside").unwrap().0, inside);
    assert_eq!(tree.placement(&inside).unwrap().layout.pcount, 64);
}

fn what_cannot_be_opened_is_named(cluster: &mut CephCluster) {
    let said = |change: &dyn Fn(&mut Source)| {
        let mut source = source(cluster);
        change(&mut source);
        CephTree::open(&source, quick(Duration::from_secs(2))).err().unwrap().to_string()
    };
    let nowhere = said(&|source| source.config = Some("/nonexistent/ceph.conf".into()));
    assert!(nowhere.contains("Ceph's configuration /nonexistent/ceph.conf cannot be read"), "{nowhere}");
    let missing = said(&|source| source.filesystem = Some("none".into()));
    assert!(missing.contains("cannot open CephFS none as client.admin"), "{missing}");
    let missing = said(&|source| source.folder = "/no/such/folder".into());
    assert!(missing.contains("folder /no/such/folder") && missing.contains("No such file"), "{missing}");
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("ceph.conf");
    let port = free_ports(1)[0];
    std::fs::write(&alone, format!("[global]\nmon host = v2:127.0.0.1:{port}/0\nauth client required = none\n"))
        .unwrap();
    let started = Instant::now();
    let alone = said(&|source| source.config = Some(alone.clone()));
    assert!(alone.contains("no metadata server answers") || alone.contains("no monitor answers"), "{alone}");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    let striping = CephTree::open(&source(cluster), striped(64 << 10, 1, 96 << 10)).err().unwrap().to_string();
    assert!(striping.contains("multiple of the stripe unit"), "{striping}");
}

fn a_killed_servers_session_is_taken_over(cluster: &mut CephCluster) {
    let named = || Options { identity: Some("io.0".into()), idle: Duration::from_secs(3600), ..Options::default() };
    let killed = open(cluster, named());
    let written = file(&killed, "taken over", b"bytes");
    // It ends without a word, and holds the right to write the file.
    std::mem::forget(killed);
    let started = Instant::now();
    let tree = open(cluster, named());
    tree.write(&root(), &written, 5, b" and more", true).unwrap();
    assert_eq!(contents(&tree, &written).unwrap(), b"bytes and more");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

fn an_evicted_client_goes_on_and_tells_of_losses(cluster: &mut CephCluster) {
    let named = Options { identity: Some("io.1".into()), idle: Duration::from_secs(3600), ..Options::default() };
    let tree = open(cluster, named);
    let (synced, unsynced) = (file(&tree, "synced", b"synced"), file(&tree, "unsynced", b"unsynced"));
    let removed = file(&tree, "removed", b"removed");
    tree.hold(&synced).unwrap();
    tree.hold(&removed).unwrap();
    tree.sync(&synced).unwrap();
    tree.sync(&tree.root().unwrap()).unwrap();
    let all = file(&tree, "all", b"all");
    let lost = |files| Ok(Lost { files: Some(files), any: 0 });
    assert_eq!(tree.sync_all(), lost(Vec::new()));
    tree.write(&root(), &unsynced, 0, b"unsynced", false).unwrap();
    tree.remove(&root(), &tree.root().unwrap(), b"removed").unwrap();
    let sessions = cluster.ceph(&["tell", "mds.a", "client", "ls"]);
    let ids = sessions.lines().filter_map(|line| line.trim().strip_prefix("\"id\": ")?.strip_suffix(','));
    let mut evicted = 0;
    for id in ids {
        cluster.ceph(&["tell", "mds.a", "client", "evict", &format!("id={id}")]);
        evicted += 1;
    }
    assert!(evicted > 0, "{sessions}");
    // Calls that only look go on as if nothing had happened.
    until("the client notices", || {
        assert_eq!(contents(&tree, &synced).as_deref(), Ok(&b"synced"[..]));
        tree.mounts() == 2
    });
    for _ in 0..2 {
        assert_eq!(tree.sync(&synced), Ok(()));
        assert_eq!(tree.sync(&unsynced), Err(Errno(libc::EIO)), "a loss is told of, each time");
        assert_eq!(tree.sync_all(), lost(vec![unsynced]), "to who asks for all files, too");
        assert_eq!(tree.sync(&all), Ok(()), "synced with all others before");
    }
    assert_eq!(tree.losses(), 1);
    // What is called lost is there, as it happens: no OSD was.
    assert_eq!(contents(&tree, &unsynced).unwrap(), b"unsynced");
    tree.write(&root(), &synced, 0, b"S", true).unwrap();
    assert_eq!(contents(&tree, &synced).unwrap(), b"Synced");
    // A file without a name went with the session that held it.
    until("a file that nothing holds goes", || tree.attr(&removed) == Err(Errno(libc::ESTALE)));
    tree.release(&removed);
    assert_eq!(tree.hung(), 0);
}

fn a_metadata_server_that_hangs_takes_few_threads(cluster: &mut CephCluster) {
    let tree = open(cluster, quick(Duration::from_secs(1)));
    let (caller, root) = (root(), tree.root().unwrap());
    let busy = file(&tree, "busy", b"bytes");
    tree.sync(&busy).unwrap();
    let unknown = file(&open(cluster, Options::default()), "unknown", b"bytes");
    let idle = open(cluster, Options { idle: Duration::from_millis(200), ..Options::default() });
    cluster.pause("mds", "a", true);
    let (ended, name) = (AtomicUsize::new(0), |n: usize| format!("asked for {n}").into_bytes());
    std::thread::scope(|scope| {
        for n in 0..HUNG_MAX {
            let (tree, caller, ended) = (&tree, &caller, &ended);
            scope.spawn(move || {
                let made = tree.make(caller, &root, &name(n), Make::File, &SetAttr::default());
                ended.fetch_add(1, Ordering::Relaxed);
                made.unwrap();
            });
        }
        until("they hang", || tree.hung() == HUNG_MAX);
        let started = Instant::now();
        for n in 0..100 {
            let refused = tree.make(&caller, &root, &name(100 + n), Make::File, &SetAttr::default());
            assert_eq!(refused.unwrap_err(), Errno(libc::EIO));
        }
        // So is what is synced, opened, or not known any more, and a write that makes a file longer.
        let refused = |answer: Result<(), Errno>| assert_eq!(answer, Err(Errno(libc::EIO)));
        refused(tree.sync(&busy));
        refused(tree.sync_all().map(drop));
        refused(tree.write(&caller, &busy, 0, b"BYTES", true));
        refused(tree.write(&caller, &busy, 5, b" and more", false));
        let other = Caller { uid: 1000, gid: 1000, groups: vec![] };
        refused(contents_as(&tree, &other, &busy).map(drop));
        refused(contents(&tree, &unknown).map(drop));
        // Each that waited would take a second.
        assert!(started.elapsed() < Duration::from_secs(50), "{:?}", started.elapsed());
        // OSDs serve what is open.
        assert_eq!(contents(&tree, &busy).unwrap(), b"BYTES");
        tree.write(&caller, &busy, 0, b"bytes", false).unwrap();
        assert_eq!(contents(&tree, &busy).unwrap(), b"bytes");
        assert_eq!(ended.load(Ordering::Relaxed), 0);
        // Nothing waits for it for ever: neither a start nor an end.
        let started = Instant::now();
        let named = Options { identity: Some("io.2".into()), ..quick(Duration::from_secs(1)) };
        let refused = CephTree::open(&source(cluster), named).err().unwrap().to_string();
        assert!(refused.contains("no metadata server answers"), "{refused}");
        drop(idle);
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        cluster.pause("mds", "a", false);
    });
    assert_eq!((tree.hung(), tree.sync(&busy)), (0, Ok(())));
    assert!(tree.lookup(&caller, &root, &name(0)).is_ok());
    assert_eq!(tree.lookup(&caller, &root, &name(100)).unwrap_err(), Errno(libc::ENOENT));
}

/// Bytes of a piece of a writer's file.
fn piece(writer: u64, round: u64) -> Vec<u8> {
    let seed = (writer << 32 | round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..8192u64).flat_map(|n| (seed ^ n.wrapping_mul(0xbf58_476d_1ce4_e5b9)).to_le_bytes()).collect()
}

fn osds_that_hang_or_restart_lose_nothing(cluster: &mut CephCluster) {
    const WRITERS: u64 = 4;
    const PIECES: u64 = 32;
    let options = Options { timeout: Duration::from_secs(2), ..striped(64 << 10, 4, MIB) };
    let tree = open(cluster, options);
    let osds = ["0", "1", "2", "3"];
    let still = file(&tree, "still", &[7; 300_000]);
    osds.iter().for_each(|osd| cluster.pause("osd", osd, true));
    let started = Instant::now();
    // Over several objects, and within one.
    assert_eq!(contents(&tree, &still), Err(Errno(libc::EIO)));
    assert_eq!(tree.read(&root(), &still, 0, &mut [0; 5]), Err(Errno(libc::EIO)));
    assert_eq!(tree.write(&root(), &still, 0, &[7; 300_000], false), Err(Errno(libc::EIO)));
    assert!(started.elapsed() < Duration::from_secs(12), "{:?}", started.elapsed());
    osds.iter().for_each(|osd| cluster.pause("osd", osd, false));
    until("OSDs that go on are used", || contents(&tree, &still).as_deref() == Ok(&[7; 300_000][..]));

    // Writers rewrite their files while an OSD goes and comes back; what fails is tried again.
    let files: Vec<Handle> = (0..WRITERS).map(|writer| file(&tree, &format!("load {writer}"), b"")).collect();
    let (stop, rounds, failed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let last: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (tree, file) = (&tree, &files[writer as usize]);
                let (stop, rounds, failed) = (&stop, &rounds, &failed);
                scope.spawn(move || {
                    let mut round = 0;
                    loop {
                        for n in 0..PIECES {
                            let (bytes, at, mut back) = (piece(writer, round), n * 65_536, vec![0; 65_536]);
                            let deadline = Instant::now() + PATIENCE;
                            while tree.write(&root(), file, at, &bytes, false).is_err() {
                                failed.fetch_add(1, Ordering::Relaxed);
                                assert!(Instant::now() < deadline, "an OSD that came back is not used");
                            }
                            while tree.read(&root(), file, at, &mut back).is_err() {
                                assert!(Instant::now() < deadline, "an OSD that came back is not used");
                            }
                            assert!(back == bytes, "writer {writer}, round {round}, piece {n}");
                        }
                        rounds.fetch_add(1, Ordering::Relaxed);
                        if stop.load(Ordering::Relaxed) {
                            return round;
                        }
                        round += 1;
                    }
                })
            })
            .collect();
        until("writers are at work", || rounds.load(Ordering::Relaxed) >= 8);
        cluster.stop("osd", "2");
        std::thread::sleep(Duration::from_secs(1));
        cluster.restart("osd", "2");
        let before = rounds.load(Ordering::Relaxed);
        until("writers go on", || rounds.load(Ordering::Relaxed) >= before + 8);
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    println!("{} rounds, {} writes tried again", rounds.into_inner(), failed.into_inner());
    // Another client reads the same.
    let other = open(cluster, Options::default());
    for (writer, last) in last.into_iter().enumerate() {
        assert_eq!(tree.sync(&files[writer]), Ok(()));
        let mut back = vec![0; (PIECES * 65_536) as usize];
        assert_eq!(other.read(&root(), &files[writer], 0, &mut back), Ok(back.len()));
        let want = piece(writer as u64, last);
        assert!(back.chunks(65_536).all(|part| part == want), "writer {writer}");
    }
    assert_eq!((tree.losses(), tree.mounts()), (0, 1));
}

#[test]
fn the_functions_are_those_of_the_headers() {
    if !impresario_testing::require("cc") {
        return;
    }
    if !std::path::Path::new("/usr/include/cephfs/libcephfs.h").exists() {
        return skip("libcephfs-dev", "/usr/include/cephfs/libcephfs.h is missing");
    }
    let declared = include_str!("../src/cephfs/api.rs").matches(", c\"ceph_").count();
    assert_eq!(include_str!("ceph_api.c").matches(" = ceph_").count(), declared, "a function is not checked");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-fsyntax-only", "-Wall", "-Werror", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64"]);
    cc.arg(format!("-DSTATVFS_BYTES={}", size_of::<libc::statvfs>()));
    cc.arg(format!("-DDIRENT_BYTES={}", size_of::<libc::dirent>()));
    cc.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ceph_api.c"));
    let compiled = cc.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}
