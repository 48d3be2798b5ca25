//! A GlusterFS volume as a backend, through libgfapi: bricks on this machine.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use impresario_backend::gluster::{Options, Source};
use impresario_backend::suite::Suite;
use impresario_backend::{Backend, Caller, Errno, GlusterVolume, Handle, Lost, Make, SetAttr};
use impresario_testing::gluster::GlusterBricks;
use impresario_testing::{eventually, free_ports, skip, until};

/// The bricks' volume; `None` where the library is not there: the test is then skipped.
#[track_caller]
fn open(bricks: &GlusterBricks) -> Option<GlusterVolume> {
    match GlusterVolume::open("test", &Source::File(bricks.volume_file()), Options::default()) {
        Ok(volume) => Some(volume),
        Err(error) if error.to_string().contains("libgfapi.so.0: cannot open") => {
            skip("libgfapi", error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn root() -> Caller {
    Caller { uid: 0, gid: 0, groups: vec![] }
}

#[test]
fn the_contract_holds() {
    let Some(bricks) = GlusterBricks::start(4, None) else { return };
    let Some(volume) = open(&bricks) else { return };
    Suite { backend: &volume, caller: root(), others: true, earlier_times: true, entries: 100 }.run();
}

#[test]
fn the_contract_holds_with_shards() {
    // Of a large file that is cut each shard is removed by itself: they must not be too many.
    let Some(bricks) = GlusterBricks::start(4, Some("128MB")) else { return };
    let Some(volume) = open(&bricks) else { return };
    Suite { backend: &volume, caller: root(), others: true, earlier_times: false, entries: 100 }.run();
}
#[test]
fn handles_outlive_a_restart_and_renames() {
    let Some(bricks) = GlusterBricks::start(2, None) else { return };
    let Some(volume) = open(&bricks) else { return };
    let (caller, root) = (root(), volume.root().unwrap());
    let make = |dir, name: &[u8], what| volume.make(&caller, dir, name, what, &SetAttr::default()).unwrap().0;
    let dir = make(&root, b"dir", Make::Directory);
    let (file, gone) = (make(&dir, b"file", Make::File), make(&dir, b"gone", Make::File));
    volume.write(&caller, &file, 0, b"bytes", false).unwrap();
    volume.rename(&caller, (&dir, b"file"), (&root, b"moved")).unwrap();
    volume.remove(&caller, &dir, b"gone").unwrap();
    let fsid = volume.attr(&file).unwrap().fsid;
    drop(volume);

    let volume = open(&bricks).unwrap();
    assert_eq!(volume.attr(&file).map(|attr| (attr.size_bytes, attr.fsid)), Ok((5, fsid)));
    assert_eq!(volume.lookup(&caller, &root, b"moved").unwrap().0, file);
    assert_eq!(volume.lookup(&caller, &dir, b"..").unwrap().0, root);
    assert_eq!(volume.attr(&gone), Err(Errno(libc::ESTALE)));
    // What others did on the volume is seen.
    let other = open(&bricks).unwrap();
    other.write(&caller, &file, 5, b" of another", false).unwrap();
    let mut bytes = [0; 32];
    assert_eq!(volume.read(&caller, &file, 0, &mut bytes), Ok(16));
    assert_eq!(&bytes[..16], b"bytes of another");
    other.remove(&caller, &root, b"moved").unwrap();
    volume.close_all();
    impresario_testing::until("it is closed", || volume.attr(&file) == Err(Errno(libc::ESTALE)));
}

#[test]
fn bricks_of_files_and_shards_are_told() {
    const SHARD: usize = 4 << 20;
    let Some(bricks) = GlusterBricks::start(4, Some("4MB")) else { return };
    let Some(volume) = open(&bricks) else { return };
    assert_eq!(volume.bricks(), 4);
    let (caller, root) = (root(), volume.root().unwrap());
    let holds = |name: &std::path::Path| {
        // Not the link that GlusterFS leaves where a name belongs when it puts the file elsewhere.
        let there = |n: &usize| {
            use std::os::unix::fs::MetadataExt;
            std::fs::metadata(bricks.brick(*n).join(name)).is_ok_and(|found| found.mode() & 0o1000 == 0)
        };
        (0..4).find(there).map(|n| n as u32)
    };
    let mut used = std::collections::BTreeSet::new();
    for n in 0..4 {
        let name = format!("file {n}");
        let (file, _) = volume.make(&caller, &root, name.as_bytes(), Make::File, &SetAttr::default()).unwrap();
        let one = volume.placement(&file).unwrap();
        assert_eq!((one.layout.pcount, Some(one.servers[0])), (1, holds(name.as_ref())));
        // Of eight shards the third is a hole.
        let bytes: Vec<u8> = (0..8 * SHARD).map(|at| (at ^ at >> 9) as u8).collect();
        volume.write(&caller, &file, 0, &bytes[..2 * SHARD], false).unwrap();
        volume.write(&caller, &file, 3 * SHARD as u64, &bytes[3 * SHARD..], false).unwrap();
        let mut back = vec![1; bytes.len() + 5];
        assert_eq!(volume.read(&caller, &file, 0, &mut back), Ok(bytes.len()));
        assert!(back[..2 * SHARD] == bytes[..2 * SHARD] && back[3 * SHARD..8 * SHARD] == bytes[3 * SHARD..]);
        assert!(back[2 * SHARD..3 * SHARD].iter().all(|byte| *byte == 0));

        let placement = volume.placement(&file).unwrap();
        assert_eq!((placement.layout.pcount, placement.layout.ssize_bytes as usize), (8, SHARD));
        let gfid = &file.as_bytes()[1..];
        let hex: String = gfid.iter().map(|byte| format!("{byte:02x}")).collect();
        let gfid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        for shard in [1, 3, 4, 5, 6, 7] {
            let brick = holds(format!(".shard/{gfid}.{shard}").as_ref());
            assert_eq!(Some(placement.servers[shard]), brick, "shard {shard}");
            used.insert(placement.servers[shard]);
        }
    }
    assert_eq!(used.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    // What holds shards is hidden, also from those who know its permanent name.
    let hidden = 0xbe31_8638_e8a0_4c6d_977d_7a93_7aa8_4806_u128.to_be_bytes();
    let handle = Handle::new(&[&[3][..], &hidden].concat()).unwrap();
    assert_eq!(volume.attr(&handle), Err(Errno(libc::ESTALE)));
    assert!(volume.lookup(&caller, &root, b".shard").is_err());
}

#[test]
fn caches_of_the_volume_are_switched_off() {
    let Some(bricks) = GlusterBricks::start(1, None) else { return };
    if open(&bricks).is_none() {
        return;
    }
    let cached = bricks.volume_file_with("cached", |below| {
        format!(
            "volume late\n type performance/write-behind\n option flush-behind on\n subvolumes {below}\nend-volume\n\
             volume attributes\n type performance/md-cache\n option md-cache-timeout 600\n \
             subvolumes late\nend-volume\n"
        )
    });
    let volume = GlusterVolume::open("test", &Source::File(cached), Options::default()).unwrap();
    let (caller, root) = (root(), volume.root().unwrap());
    let (file, _) = volume.make(&caller, &root, b"file", Make::File, &SetAttr::default()).unwrap();
    for n in 1..=300 {
        volume.write(&caller, &file, n * 100 - 100, &[n as u8; 100], false).unwrap();
        let there = std::fs::metadata(bricks.brick(0).join("file")).unwrap().len();
        assert_eq!(there, n * 100, "a write is answered that no brick has");
    }
    assert_eq!(volume.attr(&file).unwrap().size_bytes, 30_000);
    let other = open(&bricks).unwrap();
    other.set_attr(&caller, &file, &SetAttr { size_bytes: Some(7), ..SetAttr::default() }).unwrap();
    assert_eq!(volume.attr(&file).unwrap().size_bytes, 7, "an attribute is told that is no longer true");
}

#[test]
fn a_file_that_cannot_be_marked_as_made_once_is_not_left_behind() {
    let Some(bricks) = GlusterBricks::start(1, None) else { return };
    if open(&bricks).is_none() {
        return;
    }
    let failing = bricks.volume_file_with("failing", |below| {
        format!(
            "volume full\n type debug/error-gen\n option failure 100\n option enable setxattr\n \
             subvolumes {below}\nend-volume\n"
        )
    });
    let volume = GlusterVolume::open("test", &Source::File(failing), Options::default()).unwrap();
    let (caller, root) = (root(), volume.root().unwrap());
    let made = volume.make(&caller, &root, b"file", Make::FileOnce([7; 8]), &SetAttr::default());
    assert!(made.is_err(), "{made:?}");
    assert!(!bricks.brick(0).join("file").exists());
}

#[test]
fn a_brick_that_is_killed_and_comes_back_is_used_again() {
    let Some(mut bricks) = GlusterBricks::start(2, None) else { return };
    let Some(volume) = open(&bricks) else { return };
    let (caller, root) = (root(), volume.root().unwrap());
    let files: Vec<_> = (0..16)
        .map(|n| {
            let name = format!("file {n}").into_bytes();
            let (file, _) = volume.make(&caller, &root, &name, Make::File, &SetAttr::default()).unwrap();
            volume.write(&caller, &file, 0, &name, false).unwrap();
            (file, name, volume.placement(&file).unwrap().servers[0])
        })
        .collect();
    assert!((0..2).all(|brick| files.iter().any(|(_, _, on)| *on == brick)));
    // What was written until then is synced, and what half of the files get afterwards: of the others it may be lost with the brick.
    volume.sync_all().unwrap();
    let synced = |n: usize| n.is_multiple_of(2);
    for (n, (file, name, _)) in files.iter().enumerate() {
        volume.write(&caller, file, 0, &name[..1], false).unwrap();
        if synced(n) {
            volume.sync(file).unwrap();
        }
    }
    bricks.kill(0);
    let mut bytes = [0; 16];
    let started = Instant::now();
    for (file, name, on) in &files {
        match volume.read(&caller, file, 0, &mut bytes) {
            Ok(len) => assert!(*on == 1 && bytes[..len] == name[..]),
            Err(error) => assert_eq!((error, *on), (Errno(libc::EIO), 0)),
        }
    }
    for (n, (file, _, on)) in files.iter().enumerate() {
        let got = volume.sync(file);
        assert_eq!(got.is_ok(), *on == 1, "file {n}: {got:?}");
    }
    // One of all files names those that failed.
    let on_killed = || files.iter().filter(|(_, _, on)| *on == 0).map(|(file, _, _)| *file).collect::<HashSet<_>>();
    let lost = || {
        let Lost { files, any } = volume.sync_all().unwrap();
        assert_eq!(any, 0);
        files.unwrap().into_iter().collect::<HashSet<_>>()
    };
    assert_eq!(lost(), on_killed());
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    bricks.restart(0);
    for (n, (file, name, on)) in files.iter().enumerate() {
        until("the brick is used again", || volume.read(&caller, file, 0, &mut bytes) == Ok(name.len()));
        assert_eq!(bytes[..name.len()], name[..]);
        volume.write(&caller, file, 0, b"F", false).unwrap();
        // A sync that failed stays failed: what was written before the brick went may be lost.
        assert_eq!(volume.sync(file).is_ok(), *on == 1, "file {n}");
    }
    let (fresh, _) = volume.make(&caller, &root, b"fresh", Make::File, &SetAttr::default()).unwrap();
    volume.write(&caller, &fresh, 0, b"bytes", true).unwrap();
    assert_eq!(lost(), on_killed(), "what may be lost is told from then on");
}

#[test]
fn what_cannot_be_opened_is_named() {
    let Some(bricks) = GlusterBricks::start(1, None) else { return };
    if open(&bricks).is_none() {
        return;
    }
    let said = |source| GlusterVolume::open("vol", &source, Options::default()).err().unwrap().to_string();
    let nowhere = said(Source::File("/nonexistent/volume.vol".into()));
    assert!(nowhere.contains("/nonexistent/volume.vol") && nowhere.contains("No such file"), "{nowhere}");
    let nonsense = bricks.volume_file_with("nonsense", |_| "volume x\n type no/such\nend-volume\n".into());
    let nonsense = said(Source::File(nonsense));
    assert!(nonsense.contains("cannot open the GlusterFS volume vol of the volume file"), "{nonsense}");
    let alone = said(Source::Server { host: "127.0.0.1".into(), port: free_ports(1)[0] });
    assert!(alone.contains("volume vol of 127.0.0.1"), "{alone}");
}

#[test]
fn the_functions_are_those_of_the_headers() {
    if !impresario_testing::require("cc") {
        return;
    }
    if !std::path::Path::new("/usr/include/glusterfs/api/glfs-handles.h").exists() {
        return skip("libglusterfs-dev", "/usr/include/glusterfs/api/glfs-handles.h is missing");
    }
    let declared = include_str!("../src/gluster/api.rs").matches("c\"glfs_").count();
    assert_eq!(include_str!("gluster_api.c").matches(" = glfs_").count(), declared, "a function is not checked");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-fsyntax-only", "-Wall", "-Werror", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64"]);
    cc.arg(format!("-DSTAT_BYTES={}", size_of::<libc::stat>()));
    cc.arg(format!("-DSTATVFS_BYTES={}", size_of::<libc::statvfs>()));
    cc.arg(format!("-DDIRENT_BYTES={}", size_of::<libc::dirent>()));
    cc.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gluster_api.c"));
    let compiled = cc.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// A machine of its own, as far as `glusterd` sees it: namespaces in which its folders are private. Everything in it ends
/// with the shell.
const MANAGED: &str = r#"
ip link set lo up
ip address add 10.99.0.1/24 dev lo # glusterd refuses loopback addresses
for folder in /run /var/lib/glusterd /var/log/glusterfs "$1"; do mount -t tmpfs none "$folder"; done
mkdir -p /run/gluster "$1/b0" "$1/b1"
glusterd
for try in $(seq 300); do gluster --mode=script volume list >/dev/null 2>&1 && break; sleep 0.1; done
gluster --mode=script volume create managed 10.99.0.1:"$1/b0" 10.99.0.1:"$1/b1" force
gluster --mode=script volume set managed features.shard on
gluster --mode=script volume set managed features.shard-block-size 4MB
gluster --mode=script volume start managed
exec "$2" --ignored --exact gluster::inside_a_managed_volume --nocapture "#;

#[test]
fn a_volume_is_found_through_glusterd() {
    if !["root", "unshare", "setpriv", "ip", "glusterd", "gluster"].into_iter().all(impresario_testing::require) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]);
    command.args(["--mount-proc", "bash", "-euc", MANAGED, "bash"]).arg(folder.path());
    command.arg(std::env::current_exe().unwrap()).env("IMPRESARIO_FOLDER", folder.path());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{failed}");
}

/// Not a test by itself: the one above runs it.
#[test]
#[ignore = "run by another test as a process"]
fn inside_a_managed_volume() {
    let folder = std::path::PathBuf::from(std::env::var_os("IMPRESARIO_FOLDER").unwrap());
    let open = || {
        let source = Source::Server { host: "10.99.0.1".into(), port: 0 };
        GlusterVolume::open("managed", &source, Options::default())
    };
    // Bricks tell glusterd their ports some time after they are started.
    let volume = eventually("both bricks are known", || open().ok().filter(|volume| volume.bricks() == 2));
    // As in a container: bricks answer every question of process 1 for rights with yes.
    assert_eq!(std::process::id(), 1);
    Suite { backend: &volume, caller: root(), others: true, earlier_times: false, entries: 100 }.run();
    let (caller, root) = (root(), volume.root().unwrap());
    let (file, _) = volume.make(&caller, &root, b"file", Make::File, &SetAttr::default()).unwrap();
    let on = volume.placement(&file).unwrap().servers[0];
    let there = folder.join(format!("b{on}/file"));
    // glusterd puts caches into each volume; a write that is answered is with the brick all the same.
    for n in 1..=300 {
        volume.write(&caller, &file, n * 100 - 100, &[n as u8; 100], false).unwrap();
        assert_eq!(std::fs::metadata(&there).unwrap().len(), n * 100, "a write is answered that no brick has");
    }
    let other = open().unwrap();
    other.set_attr(&caller, &file, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    assert_eq!(volume.attr(&file).unwrap().mode, 0o600, "an attribute is told that is no longer true");
    volume.write(&caller, &file, 0, &vec![7; 20 << 20], true).unwrap();
    let placement = volume.placement(&file).unwrap();
    assert_eq!((placement.layout.pcount, placement.layout.ssize_bytes), (5, 4 << 20));
    let mut back = vec![0; 20 << 20];
    assert_eq!(other.read(&caller, &file, 0, &mut back), Ok(20 << 20));
    assert!(back.iter().all(|byte| *byte == 7));
    let nowhere = Source::Server { host: "10.99.0.1".into(), port: 0 };
    let missing = GlusterVolume::open("missing", &nowhere, Options::default()).err().unwrap().to_string();
    assert!(missing.contains("cannot open the GlusterFS volume missing of 10.99.0.1"), "{missing}");
}
