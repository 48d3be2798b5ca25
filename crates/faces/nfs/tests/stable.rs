//! Changes of names and attributes are on stable storage when they are answered.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{export, open_rules, serve};
use impresario_backend::posix::{Options, PosixTree};
use impresario_backend::{SetAttr, SetTime};
use impresario_nfs::protocol::{Status, procedure::*, write_set};
use impresario_nfs::testing::{Client, ClientError, Faults, MemoryTree, handle, name_in};
use impresario_nfs::xdr::Writer;
use impresario_nfs::{ExportSettings, Rules, Settings, start};
use impresario_testing::power::Disk;

/// What a client changes, and whether a folder shows it.
type Step = (&'static str, fn(&mut Client, &[u8]), fn(&Path) -> bool);

fn set(client: &mut Client, node: &[u8], set: SetAttr) {
    let mut args = handle(node);
    write_set(&mut args, &set);
    args.bool(false);
    client.call(SETATTR, args).unwrap().good().unwrap();
}

fn done(client: &mut Client, procedure: u32, args: Writer) {
    client.call(procedure, args).unwrap().good().unwrap();
}

const OWNED: SetAttr = SetAttr {
    mode: Some(0o640),
    takes: 0,
    uid: Some(1000),
    gid: Some(1001),
    size_bytes: None,
    atime: None,
    mtime: None,
};

const STEPS: &[Step] = &[
    (
        "CREATE",
        |client, root| drop(client.create(root, "made", &OWNED).unwrap()),
        |at| {
            at.join("made")
                .metadata()
                .is_ok_and(|made| (made.mode() & 0o777, made.uid(), made.gid()) == (0o640, 1000, 1001))
        },
    ),
    (
        "CREATE, exclusive",
        |client, root| {
            let mut args = name_in(root, "once");
            args.u32(2).array(b"verifier");
            done(client, CREATE, args);
        },
        |at| at.join("once").exists(),
    ),
    ("MKDIR", |client, root| drop(client.make_dir(root, "dir", 0o750).unwrap()), |at| at.join("dir").is_dir()),
    (
        "SYMLINK",
        |client, root| {
            let mut args = name_in(root, "link");
            write_set(&mut args, &SetAttr::default());
            args.opaque(b"to/there");
            done(client, SYMLINK, args);
        },
        |at| at.join("link").read_link().is_ok_and(|to| to == Path::new("to/there")),
    ),
    (
        "MKNOD",
        |client, root| {
            let mut args = name_in(root, "pipe");
            args.u32(7);
            write_set(&mut args, &OWNED);
            done(client, MKNOD, args);
        },
        |at| at.join("pipe").metadata().is_ok_and(|pipe| pipe.file_type().is_fifo() && pipe.uid() == 1000),
    ),
    (
        "LINK",
        |client, root| {
            let mut args = handle(&client.lookup(root, "kept").unwrap());
            args.opaque(root).opaque(b"second");
            done(client, LINK, args);
        },
        |at| at.join("second").exists(),
    ),
    (
        "RENAME",
        |client, root| {
            let (from, to) = (client.lookup(root, "from").unwrap(), client.lookup(root, "to").unwrap());
            let mut args = name_in(&from, "moving");
            args.opaque(&to).opaque(b"moved");
            done(client, RENAME, args);
        },
        |at| at.join("to/moved").exists() && !at.join("from/moving").exists(),
    ),
    (
        "RENAME in one directory",
        |client, root| {
            let mut args = name_in(root, "old");
            args.opaque(root).opaque(b"new");
            done(client, RENAME, args);
        },
        |at| at.join("new").exists() && !at.join("old").exists(),
    ),
    (
        "SETATTR of a mode",
        |client, root| {
            let kept = client.lookup(root, "kept").unwrap();
            set(client, &kept, SetAttr { mode: Some(0o604), mtime: Some(SetTime::Now), ..SetAttr::default() });
        },
        |at| at.join("kept").metadata().is_ok_and(|kept| kept.mode() & 0o777 == 0o604),
    ),
    (
        "SETATTR of a size",
        |client, root| {
            let kept = client.lookup(root, "kept").unwrap();
            set(client, &kept, SetAttr { size_bytes: Some(7), ..SetAttr::default() });
        },
        |at| at.join("kept").metadata().is_ok_and(|kept| kept.len() == 7),
    ),
    (
        "SETATTR of a symbolic link",
        |client, root| {
            let kept = client.lookup(root, "kept.link").unwrap();
            set(client, &kept, SetAttr { uid: Some(1000), ..SetAttr::default() });
        },
        |at| at.join("kept.link").symlink_metadata().is_ok_and(|kept| kept.uid() == 1000),
    ),
    ("REMOVE", |client, root| client.remove(root, "removed").unwrap(), |at| !at.join("removed").exists()),
    ("RMDIR", |client, root| done(client, RMDIR, name_in(root, "removed.dir")), |at| !at.join("removed.dir").exists()),
];

/// Each change alone: those before it are stable with one that is. Without the rule none is.
#[test]
fn what_was_answered_outlasts_a_power_failure() {
    for stable_names in [true, false] {
        let Some(disk) = Disk::new() else { return };
        let folder = disk.folder().join("exported");
        for dir in ["from", "to", "removed.dir"] {
            std::fs::create_dir_all(folder.join(dir)).unwrap();
        }
        for file in ["kept", "old", "removed", "from/moving"] {
            std::fs::write(folder.join(file), "twelve bytes").unwrap();
        }
        std::os::unix::fs::symlink("kept", folder.join("kept.link")).unwrap();
        // Closing a file that was cut would sync it.
        let tree = PosixTree::open(&folder, Options { idle: Duration::from_secs(600), ..Options::default() }).unwrap();
        rustix::fs::syncfs(std::fs::File::open(&folder).unwrap()).unwrap();
        let rules = Rules { stable_names, ..open_rules() };
        let backend = Arc::new(tree);
        let settings = ExportSettings { name: "/data".into(), backend, folder: String::new(), rules, reopen: None };
        let running = start(Settings::new(vec![settings]).unwrap()).unwrap();
        let mut client = Client::connect(running.addresses()[0]).unwrap();
        let root = client.mount("/data").unwrap();
        for (what, change, shows) in STEPS {
            change(&mut client, &root);
            assert!(shows(&folder), "{what} has no effect");
            let after = disk.after_power_failure();
            assert_eq!(shows(&after.folder().join("exported")), stable_names, "{what}, after the power failure");
        }
        drop((client, running));
    }
}

#[test]
fn a_change_that_cannot_be_made_stable_fails() {
    let tree = MemoryTree::new();
    let served = serve(&tree, |settings| {
        settings.exports.push(export("/fast", &tree, Rules { stable_names: false, ..open_rules() }));
    });
    let (mut client, root) = served.mounted();
    let fast = client.mount("/fast").unwrap();
    let file = client.create(&root, "file", &SetAttr::default()).unwrap();
    tree.set_faults(Faults { sync_errno: Some(libc::EIO), ..Faults::default() });
    let is_failed = |made: Result<Vec<u8>, ClientError>| matches!(made, Err(ClientError::Failed(Status::IO)));
    assert!(is_failed(client.create(&root, "made", &SetAttr::default())));
    assert!(is_failed(client.make_dir(&root, "dir", 0o755)));
    let mut args = handle(&file);
    write_set(&mut args, &SetAttr { mode: Some(0o600), ..SetAttr::default() });
    args.bool(false);
    assert_eq!(client.call(SETATTR, args).unwrap().open().unwrap().0, Status::IO);
    client.create(&fast, "fast", &SetAttr::default()).unwrap();
}

/// Creates a second in a folder on the disk of this machine, with and without the rule.
#[test]
#[ignore = "prints figures"]
fn what_stable_names_cost() {
    for clients in [1_u32, 8] {
        for stable_names in [true, false, true, false] {
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let backend = Arc::new(PosixTree::open(dir.path(), Options::default()).unwrap());
            let rules = Rules { stable_names, ..open_rules() };
            let settings = ExportSettings { name: "/data".into(), backend, folder: String::new(), rules, reopen: None };
            let running = start(Settings::new(vec![settings]).unwrap()).unwrap();
            let (address, each) = (running.addresses()[0], 1600 / clients);
            let began = std::time::Instant::now();
            std::thread::scope(|scope| {
                for number in 0..clients {
                    scope.spawn(move || {
                        let mut client = Client::connect(address).unwrap();
                        let root = client.mount("/data").unwrap();
                        for file in 0..each {
                            client.create(&root, &format!("{number}.{file}"), &SetAttr::default()).unwrap();
                        }
                    });
                }
            });
            let per_s = f64::from(clients * each) / began.elapsed().as_secs_f64();
            println!("{clients} clients, stable {stable_names}: {per_s:.0} creates/s");
        }
    }
}
