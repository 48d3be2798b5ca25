//! Every procedure, through a real connection: what it gives, and what it gives when it fails.

use std::time::{Duration, UNIX_EPOCH};

use crate::support::{Served, export, open_rules, serve, with_access};
use impresario_backend::{Kind, SetAttr, SetTime};
use impresario_nfs::protocol::{MOUNT_PROGRAM, Status, procedure::*, read_attr, read_time, write_set, write_time};
use impresario_nfs::rpc::{Acceptance, Credential};
use impresario_nfs::testing::{Client, ClientError, MemoryTree, handle, name_in, skip_change};
use impresario_nfs::xdr::Writer;
use impresario_nfs::{ExportSettings, Rules, Squash};

fn status<T: std::fmt::Debug>(result: Result<T, ClientError>) -> Status {
    match result {
        Err(ClientError::Failed(status)) => status,
        other => panic!("no status: {other:?}"),
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> Acceptance {
    match result {
        Err(ClientError::Refused(why)) => why,
        other => panic!("not refused: {other:?}"),
    }
}

fn none() -> SetAttr {
    SetAttr::default()
}

#[test]
fn names_are_made_found_moved_and_removed() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let dir = client.make_dir(&root, "dir", 0o755).unwrap();
    let file = client.create(&dir, "file", &SetAttr { mode: Some(0o640), ..none() }).unwrap();
    let attr = client.attr(&file).unwrap();
    assert_eq!((attr.kind, attr.mode, attr.links, attr.size_bytes), (Kind::File, 0o640, 1, 0));
    assert_eq!(client.lookup(&dir, "file").unwrap(), file);
    assert_eq!(client.lookup(&dir, "..").unwrap(), root);
    // Nothing above the export is reached.
    assert_eq!(client.lookup(&root, "..").unwrap(), root);
    assert_eq!(status(client.lookup(&dir, "none")), Status::NOENT);
    assert_eq!(status(client.lookup(&file, "x")), Status::NOTDIR);
    assert_eq!(status(client.lookup(&dir, &"n".repeat(256))), Status::NAMETOOLONG);

    let mut args = handle(&file);
    args.opaque(&dir).opaque(b"second");
    let linked = client.call(LINK, args).unwrap();
    assert_eq!(linked.good().unwrap().optional(read_attr).unwrap().unwrap().links, 2);

    let mut args = name_in(&dir, "second");
    args.opaque(&root).opaque(b"moved");
    let renamed = client.call(RENAME, args).unwrap();
    let mut changes = renamed.good().unwrap();
    skip_change(&mut changes).unwrap();
    skip_change(&mut changes).unwrap();
    changes.end().unwrap();
    assert_eq!(client.lookup(&root, "moved").unwrap(), file);

    assert_eq!(status(client.call(RMDIR, name_in(&root, "dir")).unwrap().good().map(drop)), Status::NOTEMPTY);
    assert_eq!(status(client.call(REMOVE, name_in(&root, "dir")).unwrap().good().map(drop)), Status::ISDIR);
    client.remove(&dir, "file").unwrap();
    client.remove(&root, "moved").unwrap();
    assert_eq!(status(client.attr(&file)), Status::STALE);
    assert_eq!(status(client.read(&file, 0, 10)), Status::STALE);
    client.call(RMDIR, name_in(&root, "dir")).unwrap().good().unwrap();
    assert_eq!(status(client.remove(&root, "dir")), Status::NOENT);
    for name in [".", ".."] {
        assert_eq!(status(client.remove(&root, name)), Status::INVAL);
        assert_eq!(status(client.make_dir(&root, name, 0o755)), Status::EXIST);
    }
}

#[test]
fn the_three_ways_of_create() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let set = SetAttr { mode: Some(0o600), ..none() };
    let file = client.create(&root, "f", &set).unwrap();
    client.write(&file, 0, b"12345", impresario_nfs::protocol::Stability::File).unwrap();
    // Unchecked: it stays, and gets the size that is asked for.
    assert_eq!(client.create(&root, "f", &set).unwrap(), file);
    assert_eq!(client.attr(&file).unwrap().size_bytes, 5);
    client.create(&root, "f", &SetAttr { size_bytes: Some(2), ..none() }).unwrap();
    assert_eq!(client.attr(&file).unwrap().size_bytes, 2);
    // Guarded.
    let mut args = name_in(&root, "f");
    args.u32(1);
    write_set(&mut args, &set);
    assert_eq!(status(client.call(CREATE, args).unwrap().good().map(drop)), Status::EXIST);
    // Exclusive: the same verifier gives the same file, another one does not.
    let exclusive = |client: &mut Client, verifier: &[u8; 8]| {
        let mut args = name_in(&root, "once");
        args.u32(2).array(verifier);
        client.call(CREATE, args).unwrap()
    };
    let made = exclusive(&mut client, b"verifier");
    made.good().unwrap();
    assert_eq!(exclusive(&mut client, b"verifier").good().unwrap().rest()[..20], made.good().unwrap().rest()[..20]);
    assert_eq!(status(exclusive(&mut client, b"another!").good().map(drop)), Status::EXIST);
}

#[test]
fn links_devices_pipes_and_sockets() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let mut args = name_in(&root, "link");
    write_set(&mut args, &none());
    args.opaque(b"../some/where");
    client.call(SYMLINK, args).unwrap().good().unwrap();
    let link = client.lookup(&root, "link").unwrap();
    let read = client.call(READLINK, handle(&link)).unwrap();
    let mut reader = read.good().unwrap();
    assert_eq!(reader.optional(read_attr).unwrap().unwrap().kind, Kind::Symlink);
    assert_eq!(reader.opaque(100).unwrap(), b"../some/where");
    assert_eq!(status(client.call(READLINK, handle(&root)).unwrap().good().map(drop)), Status::INVAL);

    for (number, kind, device) in [(3, Kind::Block, (8, 1)), (4, Kind::Character, (5, 2))] {
        let mut args = name_in(&root, &format!("node{number}"));
        args.u32(number);
        write_set(&mut args, &none());
        args.u32(device.0).u32(device.1);
        client.call(MKNOD, args).unwrap().good().unwrap();
        let node = client.lookup(&root, &format!("node{number}")).unwrap();
        let attr = client.attr(&node).unwrap();
        assert_eq!((attr.kind, attr.device), (kind, device));
    }
    for (number, kind) in [(6, Kind::Socket), (7, Kind::Fifo)] {
        let mut args = name_in(&root, &format!("node{number}"));
        args.u32(number);
        write_set(&mut args, &none());
        client.call(MKNOD, args).unwrap().good().unwrap();
        let node = client.lookup(&root, &format!("node{number}")).unwrap();
        assert_eq!(client.attr(&node).unwrap().kind, kind);
    }
    let mut args = name_in(&root, "dir");
    args.u32(2);
    assert_eq!(status(client.call(MKNOD, args).unwrap().good().map(drop)), Status::BADTYPE);
}

#[test]
fn attributes_are_set_also_under_a_guard() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &none()).unwrap();
    let set = |client: &mut Client, set: &SetAttr, guard: Option<std::time::SystemTime>| {
        let mut args = handle(&file);
        write_set(&mut args, set);
        args.optional(guard, write_time);
        client.call(SETATTR, args).unwrap()
    };
    let then = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let wanted = SetAttr {
        takes: 0,
        mode: Some(0o4711),
        uid: Some(7),
        gid: Some(8),
        size_bytes: Some(1000),
        atime: Some(SetTime::Now),
        mtime: Some(SetTime::To(then)),
    };
    let done = set(&mut client, &wanted, None);
    // Alone on the file, the client hears what it was before.
    let before = done.good().unwrap().optional(|r| Ok((r.u64()?, read_time(r)?, read_time(r)?))).unwrap();
    assert_eq!(before.unwrap().0, 0);
    let attr = client.attr(&file).unwrap();
    assert_eq!((attr.mode, attr.uid, attr.gid, attr.size_bytes, attr.mtime), (0o4711, 7, 8, 1000, then));
    for wanted in [SetAttr { mode: Some(0o600), ..none() }, SetAttr { size_bytes: Some(3), ..none() }] {
        assert_eq!(status(set(&mut client, &wanted, Some(then)).good().map(drop)), Status::NOT_SYNC);
        let ctime = client.attr(&file).unwrap().ctime;
        set(&mut client, &wanted, Some(ctime)).good().unwrap();
    }
    let attr = client.attr(&file).unwrap();
    assert_eq!((attr.mode, attr.size_bytes), (0o600, 3));
}

#[test]
fn access_says_what_this_user_may() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let set = SetAttr { mode: Some(0o640), uid: Some(5), gid: Some(6), ..none() };
    let file = client.create(&root, "f", &set).unwrap();
    let access = |client: &mut Client, node: &[u8]| {
        let mut args = handle(node);
        args.u32(63);
        let reply = client.call(ACCESS, args).unwrap();
        let mut reader = reply.good().unwrap();
        reader.optional(read_attr).unwrap();
        reader.u32().unwrap()
    };
    client.be(5, 5, &[]);
    assert_eq!(access(&mut client, &file), 1 | 4 | 8);
    client.be(9, 9, &[6]);
    assert_eq!(access(&mut client, &file), 1);
    client.be(9, 9, &[]);
    assert_eq!(access(&mut client, &file), 0);
    assert_eq!(access(&mut client, &root), 1 | 2 | 4 | 8 | 16);
    assert_eq!(status(client.read(&file, 0, 1)), Status::ACCES);
}

#[test]
fn large_directories_are_listed_within_the_limits_of_answers() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let mut wanted: Vec<String> = (0..3000).map(|n| format!("file-{n:05}-{}", "x".repeat(n % 50))).collect();
    for name in &wanted {
        client.create(&root, name, &none()).unwrap();
    }
    wanted.extend([".".to_string(), "..".to_string()]);
    wanted.sort();
    for count in [512, 4096, 1 << 20] {
        let mut names = client.list(&root, count).unwrap();
        names.sort();
        assert_eq!(names, wanted, "{count}");
    }
    assert_eq!(status(client.list(&root, 100)), Status::TOOSMALL);

    // With attributes and handles; every answer within what was asked for.
    let (mut cookie, mut verifier, mut seen) = (0, [0; 8], Vec::new());
    for (dir_count, most) in std::iter::repeat_n((2000, 8192), 2000) {
        let mut args = handle(&root);
        args.u64(cookie).array(&verifier).u32(dir_count).u32(most);
        let reply = client.call(READDIRPLUS, args).unwrap();
        assert!(reply.0.len() <= most as usize);
        let mut reader = reply.good().unwrap();
        assert_eq!(reader.optional(read_attr).unwrap().unwrap().kind, Kind::Directory);
        verifier = reader.array().unwrap();
        while reader.bool().unwrap() {
            let fileid = reader.u64().unwrap();
            let name = String::from_utf8(reader.opaque(1024).unwrap().to_vec()).unwrap();
            cookie = reader.u64().unwrap();
            assert_eq!(reader.optional(read_attr).unwrap().unwrap().fileid, fileid);
            let node = reader.optional(|r| r.opaque(64)).unwrap().unwrap();
            if name == ".." {
                assert_eq!(node, root);
            }
            seen.push(name);
        }
        if reader.bool().unwrap() {
            break;
        }
    }
    seen.sort();
    assert_eq!(seen, wanted);

    // A cookie with a verifier that is not from here.
    let mut args = handle(&root);
    args.u64(cookie).array(b"another!").u32(4096);
    assert_eq!(status(client.call(READDIR, args).unwrap().good().map(drop)), Status::BAD_COOKIE);
    let file = client.lookup(&root, &wanted[5]).unwrap();
    assert_eq!(status(client.list(&file, 4096)), Status::NOTDIR);
}

#[test]
fn the_file_system_is_described_truly() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let reply = client.call(FSSTAT, handle(&root)).unwrap();
    let mut reader = reply.good().unwrap();
    reader.optional(read_attr).unwrap();
    assert_eq!(reader.u64().unwrap(), 1 << 30);
    let reply = client.call(FSINFO, handle(&root)).unwrap();
    let mut reader = reply.good().unwrap();
    reader.optional(read_attr).unwrap();
    assert_eq!((reader.u32().unwrap(), reader.u32().unwrap()), (1 << 20, 1 << 20));
    let reply = client.call(PATHCONF, handle(&root)).unwrap();
    let mut reader = reply.good().unwrap();
    reader.optional(read_attr).unwrap();
    assert_eq!((reader.u32().unwrap(), reader.u32().unwrap()), (1000, 255));
}

#[test]
fn handles_of_others_and_of_other_exports_are_worth_nothing() {
    let (one, two) = (MemoryTree::new(), MemoryTree::new());
    let read_only = with_access(|access| access.read_only = true);
    let elsewhere = with_access(|access| access.networks = vec!["10.9.9.0/24".parse().unwrap()]);
    let served = serve(&one, |settings| {
        settings.exports.push(export("/ro", &one, read_only));
        settings.exports.push(export("/two", &two, open_rules()));
        settings.exports.push(export("/elsewhere", &one, elsewhere));
    });
    let (mut client, root) = served.mounted();
    let file = client.create(&root, "f", &none()).unwrap();
    let read_only = client.mount("/ro").unwrap();
    let two = client.mount("/two").unwrap();
    // To clients elsewhere it is not there, nor in the list.
    assert_eq!(status(client.mount("/elsewhere")), Status::NOENT);
    let xid = client.send_to(MOUNT_PROGRAM, 3, 5, Writer::default()).unwrap();
    let listed = client.wait(xid).unwrap().0;
    assert!(contains(&listed, b"/two") && !contains(&listed, b"/elsewhere"));
    // A handle of one export with the number of another.
    let mut forged = root.clone();
    forged[1..5].copy_from_slice(&two[1..5]);
    assert_eq!(status(client.attr(&forged)), Status::BADHANDLE);
    for bad in [&b""[..], b"x", &[1; 64]] {
        assert_eq!(status(client.attr(bad)), Status::BADHANDLE);
    }
    // Another server's handle.
    let other = serve(&one, |_| ());
    assert_eq!(status(other.client().attr(&root)), Status::BADHANDLE);
    // What may only be read.
    let seen = client.lookup(&read_only, "f").unwrap();
    assert_ne!(seen, file);
    let file_there = |client: &mut Client| client.write(&seen, 0, b"x", impresario_nfs::protocol::Stability::File);
    assert_eq!(status(file_there(&mut client)), Status::ROFS);
    assert_eq!(status(client.create(&read_only, "g", &none())), Status::ROFS);
    assert_eq!(status(client.remove(&read_only, "f")), Status::ROFS);
    // Not from one export into another.
    let mut args = name_in(&root, "f");
    args.opaque(&two).opaque(b"f");
    assert_eq!(status(client.call(RENAME, args).unwrap().good().map(drop)), Status::XDEV);
    let mut args = handle(&file);
    args.opaque(&two).opaque(b"f");
    assert_eq!(status(client.call(LINK, args).unwrap().good().map(drop)), Status::XDEV);
}

fn contains(all: &[u8], part: &[u8]) -> bool {
    all.windows(part.len()).any(|window| window == part)
}

#[test]
fn root_is_squashed_unless_the_rules_say_otherwise() {
    let tree = MemoryTree::new();
    let rules = |squash| with_access(|access| access.squash = squash);
    let served = serve(&tree, |settings| {
        settings.exports.push(export("/root", &tree, rules(Squash::Root)));
        settings.exports.push(export("/all", &tree, rules(Squash::All)));
        settings.exports.push(export("/ports", &tree, Rules { privileged_ports: true, ..open_rules() }));
    });
    let (mut client, root) = served.mounted();
    let owner = |client: &mut Client, dir: &[u8], name: &str| {
        let file = client.create(dir, name, &none()).unwrap();
        let attr = client.attr(&file).unwrap();
        (attr.uid, attr.gid)
    };
    let (squashed, all) = (client.mount("/root").unwrap(), client.mount("/all").unwrap());
    assert_eq!(owner(&mut client, &root, "a"), (0, 0));
    assert_eq!(owner(&mut client, &squashed, "b"), (65534, 65534));
    client.be(12, 34, &[]);
    assert_eq!(owner(&mut client, &squashed, "c"), (12, 34));
    assert_eq!(owner(&mut client, &all, "d"), (65534, 65534));
    client.with(Credential::None);
    assert_eq!(owner(&mut client, &root, "e"), (65534, 65534));
    // This client's port is not one that only root gets.
    assert_eq!(status(client.mount("/ports")), Status::ACCES);
}

#[test]
fn a_folder_below_is_exported_and_mounted() {
    let tree = MemoryTree::new();
    let served = serve(&tree, |_| ());
    let (mut client, root) = served.mounted();
    let a = client.make_dir(&root, "a", 0o755).unwrap();
    let b = client.make_dir(&a, "b", 0o755).unwrap();
    client.create(&b, "f", &none()).unwrap();
    assert_eq!(client.mount("/data/a/b").unwrap(), b);
    assert_eq!(status(client.mount("/data/a/b/f")), Status::NOTDIR);
    assert_eq!(status(client.mount("/data/a/c")), Status::NOENT);
    assert_eq!(status(client.mount("/data/../x")), Status::NOENT);
    assert_eq!(status(client.mount("/nowhere")), Status::NOENT);
    let below = ExportSettings { folder: "a/b".into(), ..export("/b", &tree, open_rules()) };
    let served = serve(&tree, |settings| settings.exports.push(below));
    let mut client = served.client();
    let root = client.mount("/b").unwrap();
    client.lookup(&root, "f").unwrap();
    assert_eq!(client.lookup(&root, "..").unwrap(), root);
    // What is moved out of the folder leads nowhere.
    let kept = client.make_dir(&root, "kept", 0o755).unwrap();
    let moved = client.make_dir(&kept, "moved", 0o755).unwrap();
    assert_eq!(client.lookup(&moved, "..").unwrap(), kept);
    let whole = client.mount("/data").unwrap();
    let mut args = handle(&client.mount("/data/a/b/kept").unwrap());
    args.opaque(b"moved").opaque(&whole).opaque(b"away");
    client.call(RENAME, args).unwrap().good().unwrap();
    assert_eq!(status(client.lookup(&moved, "..")), Status::STALE);
}

#[test]
fn mounts_are_noted() {
    let served = Served::new();
    let (mut client, _) = served.mounted();
    let dump = |client: &mut Client| {
        let xid = client.send_to(MOUNT_PROGRAM, 3, 2, Writer::default()).unwrap();
        contains(&client.wait(xid).unwrap().0, b"/data")
    };
    assert!(dump(&mut client));
    let mut args = Writer::default();
    args.opaque(b"/data");
    let xid = client.send_to(MOUNT_PROGRAM, 3, 3, args).unwrap();
    client.wait(xid).unwrap();
    assert!(!dump(&mut client));
    client.mount("/data").unwrap();
    let xid = client.send_to(MOUNT_PROGRAM, 3, 4, Writer::default()).unwrap();
    client.wait(xid).unwrap();
    assert!(!dump(&mut client));
}

#[test]
fn what_is_not_offered_is_refused_by_name() {
    let served = Served::new();
    let (mut client, root) = served.mounted();
    let to = |client: &mut Client, program, version, number, args| {
        let xid = client.send_to(program, version, number, args).unwrap();
        client.wait(xid)
    };
    assert_eq!(to(&mut client, 100_003, 3, 0, Writer::default()).unwrap().0, [] as [u8; 0]);
    assert_eq!(to(&mut client, MOUNT_PROGRAM, 3, 0, Writer::default()).unwrap().0, [] as [u8; 0]);
    assert_eq!(refused(to(&mut client, 100_227, 3, 0, Writer::default())), Acceptance::NoProgram);
    assert_eq!(refused(to(&mut client, 100_003, 4, 0, Writer::default())), Acceptance::NoVersion(3, 3));
    assert_eq!(refused(to(&mut client, 100_003, 3, 22, Writer::default())), Acceptance::NoProcedure);
    for number in 1..22 {
        let garbage = to(&mut client, 100_003, 3, number, Writer::default());
        assert_eq!(refused(garbage), Acceptance::BadArguments, "{number}");
        let mut args = handle(&root);
        (0..40).for_each(|_| {
            args.u32(u32::MAX);
        });
        assert_eq!(refused(to(&mut client, 100_003, 3, number, args)), Acceptance::BadArguments, "{number}");
    }
    client.with(Credential::Sys { uid: 1, gid: 1, groups: (0..17).collect() });
    assert_eq!(refused(client.attr(&root)), Acceptance::BadCredential);
}
