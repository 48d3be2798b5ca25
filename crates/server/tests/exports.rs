//! The rules that clients are under: networks, reading only, a folder as the root, and users that act as others. They hold
//! at every server, whatever a client sends.

use std::path::Path;
use std::sync::Arc;

use crate::support::{Cluster, pattern};
use impresario_client::{Caller, Client, ClientError, ClientOptions, CreateOptions, Via};
use impresario_config::{Config, Export, Security, Squash, Tls, Users};
use impresario_server::Started;
use impresario_testing::certificates::Authority;
use impresario_testing::munge::Munged;
use impresario_testing::require;
use impresario_transport::{Keys, Munge, Proven, key_file_name};
use impresario_wire::message::{NodeKind, SetAttr};
use impresario_wire::{ACL_ACCESS, Device, KeyRole, MetaCall, SetTime, Time, XattrMode};

/// Servers with keys, one I/O node among them.
struct Cell {
    cluster: Cluster,
    /// A configuration whose folder of keys has no client's: its programs show the administrator's.
    admin: Config,
    meta: Option<Started>,
    io: Started,
}

fn cell(export: Export) -> Cell {
    cell_with(export, |_| {})
}

fn cell_with(export: Export, change: impl FnOnce(&mut Config)) -> Cell {
    let keys = Keys::draw().unwrap();
    let mut cluster = Cluster::start(2, |config| {
        config.cluster.security = Security::Key;
        config.cluster.key_dir = config.meta.dir.with_file_name("keys");
        config.export = vec![export];
        change(config);
        write_keys(&config.cluster.key_dir, &keys, &KeyRole::ALL);
    });
    let meta = start_meta(&mut cluster);
    let io = cluster.start_io(|_| {});
    let mut admin = cluster.config.clone();
    admin.cluster.key_dir = cluster.dir.path().join("admin");
    write_keys(&admin.cluster.key_dir, &keys, &[KeyRole::Admin]);
    Cell { cluster, admin, meta: Some(meta), io }
}

fn start_meta(cluster: &mut Cluster) -> Started {
    impresario_server::start(&cluster.config, "meta").unwrap()
}

fn write_keys(folder: &Path, keys: &Keys, roles: &[KeyRole]) {
    roles.iter().for_each(|role| keys.for_role(*role).store(&folder.join(key_file_name(*role))).unwrap());
}

fn connect(config: &Config, via: Via) -> Result<Arc<Client>, ClientError> {
    Client::connect(config, ClientOptions { via, ..ClientOptions::default() })
}

impl Cell {
    fn admin(&self) -> Arc<Client> {
        connect(&self.admin, Via::Direct).unwrap()
    }

    /// A client on each way.
    fn clients(&self) -> Vec<Arc<Client>> {
        let ways = [Via::Direct, Via::IoNode(0)];
        ways.into_iter().map(|via| connect(&self.cluster.config, via).unwrap()).collect()
    }
}

fn owned(mode: u32, uid: u32) -> CreateOptions {
    CreateOptions { mode, uid, gid: uid, exclusive: true, layout: None }
}

fn put(client: &Arc<Client>, path: &str, mode: u32, uid: u32, bytes: &[u8]) {
    let file = client.create(path, owned(mode, uid)).unwrap();
    file.write_at(bytes, 0).unwrap();
    file.close().unwrap();
}

fn get(client: &Arc<Client>, path: &str) -> Result<Vec<u8>, ClientError> {
    let file = client.open(path, false)?;
    let mut bytes = vec![0; file.attr()?.size as usize];
    let len = file.read_at(&mut bytes, 0)?;
    bytes.truncate(len);
    Ok(bytes)
}

#[track_caller]
fn refused<T>(result: Result<T, ClientError>, errno: i32) -> String {
    match result {
        Ok(_) => panic!("it was done"),
        Err(error) => {
            assert_eq!(error.errno(), errno, "{error}");
            error.to_string()
        }
    }
}

fn export(change: impl FnOnce(&mut Export)) -> Export {
    let mut export = Export { squash: Squash::None, ..Export::default() };
    change(&mut export);
    export
}

#[test]
fn clients_of_other_networks_are_refused_by_every_server_and_administrators_are_not() {
    let cell = cell(export(|export| export.networks = vec!["10.0.0.0/8".into(), "fd00::/8".into()]));
    for role in ["the metadata server", "a data server"] {
        let mut config = cell.cluster.config.clone();
        if role == "a data server" {
            // What it says of itself is a call like another.
            config.meta.address = config.data[0].address.clone();
        }
        let access = impresario_client::Access::of(&config, KeyRole::Client);
        let error = impresario_client::admin::status(&access, &config.meta.address, impresario_testing::PATIENCE);
        let message = error.unwrap_err().to_string();
        assert!(message.contains("[[export]]") && message.contains("127.0.0.1"), "{role}: {message}");
    }
    let admin = cell.admin();
    put(&admin, "f", 0o644, 0, b"bytes");
    assert_eq!(get(&admin, "f").unwrap(), b"bytes");
}

#[test]
fn clients_that_may_only_read_change_nothing_by_names_or_by_keys() {
    let cell = cell(export(|export| export.read_only = true));
    let (admin, bytes) = (cell.admin(), pattern(1, 300_000));
    put(&admin, "f", 0o666, 0, &bytes);
    admin.mkdir("d", 0o777, 0, 0).unwrap();
    for client in cell.clients() {
        assert!(get(&client, "f").unwrap() == bytes);
        let file = client.open("f", false).unwrap();
        let (key, layout) = (file.key(), file.layout());
        let message = refused(client.write(key, &layout, 0, b"x"), libc::EROFS);
        assert!(message.contains("read_only"), "{message}");
        refused(client.change_space(key, &layout, impresario_wire::SpaceChange::Punch, (0, 4096)), libc::EROFS);
        refused(client.open("f", true).map(drop), libc::EROFS);
        refused(client.create("g", owned(0o644, 7)).map(drop), libc::EROFS);
        refused(client.unlink("f"), libc::EROFS);
        refused(client.rename("f", "g", true), libc::EROFS);
        refused(client.mkdir("e", 0o755, 7, 7), libc::EROFS);
        refused(client.rmdir("d"), libc::EROFS);
        refused(client.link("f", "g"), libc::EROFS);
        refused(client.set_attr("f", SetAttr { mode: Some(0o600), ..SetAttr::default() }), libc::EROFS);
        refused(file.set_attr(&SetAttr { size: Some(0), ..SetAttr::default() }), libc::EROFS);
        refused(client.set_xattr("f", "user.x", Some(b"v"), XattrMode::Any), libc::EROFS);
        file.close().unwrap();
    }
    assert!(get(&admin, "f").unwrap() == bytes && admin.list("").unwrap().len() == 2);
}

#[test]
fn a_folder_is_a_clients_root_and_nothing_else_is_there_by_names_or_by_keys() {
    let mut cell = cell(export(|export| export.folder = "projects/a".into()));
    let admin = cell.admin();
    admin.mkdir("projects", 0o755, 0, 0).unwrap();
    admin.mkdir("projects/a", 0o755, 0, 0).unwrap();
    put(&admin, "projects/secret", 0o666, 0, b"secret");
    put(&admin, "projects/a/f", 0o666, 0, b"shared");
    let secret = admin.open("projects/secret", true).unwrap();
    for (n, client) in cell.clients().into_iter().enumerate() {
        let names = |path: &str| client.list(path).map(|all| all.into_iter().map(|e| e.name).collect::<Vec<_>>());
        assert_eq!(get(&client, "f").unwrap(), b"shared");
        for path in ["projects", "projects/secret", "secret", "projects/a/f"] {
            refused(client.stat(path), libc::ENOENT);
        }
        for path in ["../secret", "..", "/projects/secret", "x/../../secret"] {
            refused(client.meta(MetaCall::Open { path: path.into(), write: false }), libc::EINVAL);
        }
        // The root itself stays.
        client.rmdir("").unwrap_err();
        client.rename("", "x", false).unwrap_err();
        client.unlink("").unwrap_err();
        // A link leads where the client's own root has it.
        client.symlink(format!("link.{n}"), "projects/secret", 7, 7).unwrap();
        let own = format!("own.{n}");
        put(&client, &own, 0o644, 7, b"new");
        assert_eq!(get(&admin, &format!("projects/a/{own}")).unwrap(), b"new");
        client.rename(&own, format!("moved.{n}"), false).unwrap();
        assert!(names("").unwrap().contains(&format!("moved.{n}").into_bytes()));
        client.rename("f", "../f", false).unwrap_err();
        // By its key a file is there for those that have opened it.
        let (mut into, layout) = ([0; 6], secret.layout());
        let message = refused(client.read(secret.key(), &layout, 0, &mut into), libc::EACCES);
        assert!(message.contains("[[export]]"), "{message}");
        refused(client.write(secret.key(), &layout, 0, b"public"), libc::EACCES);
        refused(client.stat_data(secret.key(), &layout), libc::EACCES);
        let reopen = MetaCall::Reopen { path: b"x".into(), file: secret.key(), write: false };
        refused(client.meta(reopen), libc::EACCES);
        // Reading is no right to write.
        let file = client.open("f", false).unwrap();
        refused(client.write(file.key(), &file.layout(), 0, b"x"), libc::EACCES);
        file.close().unwrap();
    }
    assert_eq!(get(&admin, "projects/secret").unwrap(), b"secret");
    // What is open stays open over a restart of the metadata server, and a rotation of the keys.
    let clients = cell.clients();
    let files: Vec<_> = clients.iter().map(|client| client.open("f", true).unwrap()).collect();
    cell.meta = None;
    let key_dir = cell.cluster.config.cluster.key_dir.clone();
    let keys = Keys::load(&key_dir.join("server.key")).unwrap();
    write_keys(&key_dir, &keys.rotated(std::time::Duration::from_secs(3600)).unwrap(), &KeyRole::ALL);
    cell.meta = Some(impresario_server::start(&cell.cluster.config, "meta").unwrap());
    for file in files {
        assert_eq!(file.write_at(b"SHARED", 0).unwrap(), 6);
        assert_eq!(file.attr().unwrap().size, 6);
        file.close().unwrap();
    }
    drop((clients, cell.io));
}

/// A tree that root made, seen by clients whose root is not believed.
#[test]
fn what_only_root_may_do_a_client_with_root_squashed_cannot_do() {
    if !require("root") {
        return;
    }
    let cell = cell(Export::default());
    let admin = cell.admin();
    put(&admin, "private", 0o600, 0, b"private");
    put(&admin, "public", 0o644, 0, b"public");
    put(&admin, "open", 0o666, 0, b"open");
    put(&admin, "users", 0o600, 1000, b"users");
    for (path, mode) in [("closed", 0o755), ("hidden", 0o700), ("tmp", 0o1777), ("all", 0o777)] {
        admin.mkdir(path, mode, 0, 0).unwrap();
    }
    put(&admin, "hidden/f", 0o666, 0, b"hidden");
    put(&admin, "tmp/roots", 0o644, 0, b"roots");
    put(&admin, "all/roots", 0o600, 0, b"roots");
    let private = admin.open("private", true).unwrap();
    for (n, client) in cell.clients().into_iter().enumerate() {
        let message = refused(client.open("private", false).map(drop), libc::EACCES);
        assert!(message.contains("squash"), "{message}");
        let mut into = [0; 7];
        refused(client.read(private.key(), &private.layout(), 0, &mut into), libc::EACCES);
        refused(client.write(private.key(), &private.layout(), 0, b"x"), libc::EACCES);
        assert_eq!(get(&client, "public").unwrap(), b"public");
        refused(client.open("public", true).map(drop), libc::EACCES);
        let public = client.open("public", false).unwrap();
        refused(client.write(public.key(), &public.layout(), 0, b"x"), libc::EACCES);
        public.close().unwrap();
        assert_eq!((get(&client, "open").unwrap(), get(&client, "users").unwrap()), (b"open".into(), b"users".into()));
        client.open("open", true).unwrap().close().unwrap();
        // Directories.
        refused(client.create("closed/f", owned(0o644, 1000)).map(drop), libc::EACCES);
        refused(client.mkdir("closed/d", 0o755, 1000, 1000), libc::EACCES);
        refused(client.stat("hidden/f"), libc::EACCES);
        refused(client.list("hidden"), libc::EACCES);
        refused(client.unlink("tmp/roots"), libc::EPERM);
        refused(client.rename("tmp/roots", "tmp/x", false), libc::EPERM);
        refused(client.link("all/roots", "all/link"), libc::EPERM);
        // What is root's.
        let set = |set: SetAttr| set;
        for (path, change) in [
            ("public", set(SetAttr { mode: Some(0o4777), ..SetAttr::default() })),
            ("users", set(SetAttr { uid: Some(0), ..SetAttr::default() })),
            ("users", set(SetAttr { uid: Some(1001), ..SetAttr::default() })),
            ("users", set(SetAttr { gid: Some(0), ..SetAttr::default() })),
            ("public", set(SetAttr { mtime: Some(SetTime::At(Time { secs: 1, nanos: 0 })), ..SetAttr::default() })),
        ] {
            refused(client.set_attr(path, change), libc::EPERM);
        }
        refused(client.set_attr("public", SetAttr { size: Some(0), ..SetAttr::default() }), libc::EACCES);
        refused(client.set_xattr("public", "user.x", Some(b"v"), XattrMode::Any), libc::EACCES);
        let device = NodeKind::Block(Device { major: 8, minor: 0 });
        refused(client.mknod(format!("all/disk.{n}"), device, 0o666, 1000, 1000), libc::EPERM);
        // What they make is theirs; root's is the anonymous user's.
        let (own, roots) = (format!("all/own.{n}"), format!("all/by-root.{n}"));
        put(&client, &own, 0o600, 1000, b"own");
        put(&client, &roots, 0o4755, 0, b"by root");
        let owner = |path: &str| client.stat(path).map(|attr| (attr.uid, attr.gid)).unwrap();
        assert_eq!((owner(&own), owner(&roots)), ((1000, 1000), (65534, 65534)));
        client.set_attr(&own, SetAttr { mode: Some(0o640), size: Some(1), ..SetAttr::default() }).unwrap();
        assert_eq!(get(&client, &own).unwrap(), b"o");
        client.rename(&own, format!("tmp/own.{n}"), false).unwrap();
        client.unlink(format!("tmp/own.{n}")).unwrap();
    }
    assert_eq!(get(&admin, "private").unwrap(), b"private");
    assert_eq!(admin.stat("public").unwrap().mode, 0o644);
    // What access control lists say counts too.
    let entries = [(1, 6, u32::MAX), (2, 4, 1000), (4, 0, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)];
    let list = entries.into_iter().flat_map(|(tag, rights, id)| [[tag, 0, rights, 0], u32::to_le_bytes(id)].concat());
    let list: Vec<u8> = [2, 0, 0, 0].into_iter().chain(list).collect();
    admin.set_xattr("private", ACL_ACCESS, Some(&list), XattrMode::Any).unwrap();
    for client in cell.clients() {
        assert_eq!(get(&client, "private").unwrap(), b"private");
        refused(client.open("private", true).map(drop), libc::EACCES);
        assert_eq!(client.xattr("private", ACL_ACCESS).unwrap(), list);
        refused(client.set_xattr("private", ACL_ACCESS, Some(&list), XattrMode::Any), libc::EPERM);
        refused(client.set_xattr("private", ACL_ACCESS, None, XattrMode::Any), libc::EPERM);
        refused(client.set_xattr("users", "security.capability", Some(b"x"), XattrMode::Any), libc::EPERM);
        client.set_xattr("users", ACL_ACCESS, Some(&list), XattrMode::Any).unwrap();
        client.set_xattr("users", ACL_ACCESS, None, XattrMode::Any).unwrap();
        client.set_attr("users", SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    }
    admin.set_attr("private", SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    for client in cell.clients() {
        refused(client.open("private", false).map(drop), libc::EACCES);
    }
}

/// Two directories change places again and again: what is in the one that the users may not search they never see, though its path
/// led through the other a moment before.
#[test]
fn what_users_may_not_search_they_do_not_see_while_directories_move() {
    if !require("root") {
        return;
    }
    let cell = cell(Export::default());
    let admin = cell.admin();
    for (path, mode, bytes) in [("here", 0o755, &b"1"[..]), ("there", 0o700, b"22")] {
        admin.mkdir(path, mode, 0, 0).unwrap();
        put(&admin, &format!("{path}/f"), 0o644, 0, bytes);
        admin.symlink(format!("{path}/l"), path, 0, 0).unwrap();
        put(&admin, &format!("{path}/only-{path}"), 0o644, 0, b"");
        let set =
            |name: &str| admin.set_xattr(format!("{path}/{name}"), "user.x", Some(bytes), XattrMode::Any).unwrap();
        set("f");
    }
    let client = connect(&cell.cluster.config, Via::Direct).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let over = || is_over.load(std::sync::atomic::Ordering::Relaxed);
    let mut seen = [0; 4];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over() {
                admin.exchange("here", "there").unwrap();
            }
        });
        let began = std::time::Instant::now();
        let mut wrong = Vec::new();
        while began.elapsed() < std::time::Duration::from_secs(8) && wrong.is_empty() {
            let found = [
                client.stat("here/f").map(|attr| attr.size == 1),
                client.readlink("here/l").map(|target| target == b"here"),
                client.list("here").map(|all| all.iter().all(|entry| entry.name != b"only-there")),
                client.xattr("here/f", "user.x").map(|value| value == b"1"),
            ];
            for (n, found) in found.into_iter().enumerate() {
                match found {
                    Ok(true) => seen[n] += 1,
                    Ok(false) => wrong.push(n),
                    Err(error) if error.errno() == libc::EACCES => {}
                    Err(error) => wrong.push(100 * n + error.errno() as usize),
                }
            }
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(wrong, [0; 0], "after {seen:?}");
    });
    assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}");
}

#[test]
fn all_users_of_a_client_are_one_where_all_are_squashed() {
    if !require("root") {
        return;
    }
    let cell = cell(export(|export| {
        (export.squash, export.anonymous_uid, export.anonymous_gid) = (Squash::All, 99, 98);
    }));
    let admin = cell.admin();
    put(&admin, "users", 0o600, 1000, b"users");
    put(&admin, "shown", 0o644, 1000, b"shown");
    admin.mkdir("all", 0o777, 0, 0).unwrap();
    for (n, client) in cell.clients().into_iter().enumerate() {
        refused(client.open("users", false).map(drop), libc::EACCES);
        assert_eq!(get(&client, "shown").unwrap(), b"shown");
        refused(client.open("shown", true).map(drop), libc::EACCES);
        refused(client.set_attr("shown", SetAttr { mode: Some(0o666), ..SetAttr::default() }), libc::EPERM);
        let own = format!("all/own.{n}");
        put(&client, &own, 0o400, 1000, b"own");
        let attr = client.stat(&own).unwrap();
        assert_eq!((attr.uid, attr.gid), (99, 98));
        client.open(&own, true).unwrap().close().unwrap();
    }
}

#[test]
fn clients_with_certificates_are_under_the_same_rules() {
    let certificates = tempfile::tempdir().unwrap();
    Authority::draw("cluster").write_all(certificates.path());
    let file = |name: &str| certificates.path().join(name);
    let tls = |name: &str| Tls {
        ca: file("ca.pem"),
        certificate: file(&format!("{name}.pem")),
        private_key: file(&format!("{name}.key")),
        revoked: None,
    };
    let mut cell = cell_with(export(|export| export.folder = "theirs".into()), |config| {
        (config.cluster.security, config.tls) = (Security::Tls, Some(tls("{role}")));
    });
    cell.admin.tls = Some(tls("admin"));
    let admin = cell.admin();
    admin.mkdir("theirs", 0o777, 0, 0).unwrap();
    put(&admin, "theirs/f", 0o666, 0, b"theirs");
    put(&admin, "other", 0o666, 0, b"other");
    let other = admin.open("other", false).unwrap();
    for client in cell.clients() {
        // By a pass, which a server signs with the key that servers share.
        assert_eq!(get(&client, "f").unwrap(), b"theirs");
        refused(client.stat("other"), libc::ENOENT);
        refused(client.read(other.key(), &other.layout(), 0, &mut [0; 5]), libc::EACCES);
    }
    // Without that key servers say so.
    std::fs::remove_file(cell.cluster.config.cluster.key_dir.join("server.key")).unwrap();
    let why = impresario_server::start(&cell.cluster.config, "io.0").err().expect("no key").to_string();
    assert!(why.contains("server.key") && why.contains("impresario key new"), "{why}");
}

/// What a program of user 1000 is to find: run by the next test as a process of that user.
#[test]
#[ignore = "run by another test as a process of another user"]
fn a_program_of_user_1000() {
    let config = Config::load(Path::new(&std::env::var_os("IMPRESARIO_TEST_CONFIG").unwrap())).unwrap();
    for (n, via) in [Via::Direct, Via::IoNode(0)].into_iter().enumerate() {
        let client = connect(&config, via).unwrap();
        // Its own, what its group may read, and what all may read.
        assert_eq!(get(&client, "own").unwrap(), b"own");
        assert_eq!(get(&client, "group").unwrap(), b"group");
        assert_eq!(get(&client, "shown").unwrap(), b"shown");
        refused(client.open("group", true).map(drop), libc::EACCES);
        let why = refused(client.open("others", false).map(drop), libc::EACCES);
        assert!(why.contains("user 1000 has no permission"), "{why}");
        refused(client.open("roots", false).map(drop), libc::EACCES);
        refused(client.set_attr("others", SetAttr { mode: Some(0o666), ..SetAttr::default() }), libc::EPERM);
        refused(client.unlink("roots"), libc::EACCES);
        // Whoever it says that it is.
        let made = format!("all/made.{n}");
        put(&client, &made, 0o600, 1001, b"made");
        assert_eq!(client.stat(&made).map(|attr| (attr.uid, attr.gid)).unwrap(), (1000, 1000));
        assert_eq!(get(&client, &made).unwrap(), b"made");
    }
}

#[test]
fn a_client_acts_as_the_user_that_it_proves_to_be_and_without_proof_as_nobody() {
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;
    let dir = tempfile::tempdir().unwrap();
    let Some(munged) = Munged::start(&dir.path().join("munge"), &[1; 32]) else { return };
    let Some(foreign) = Munged::start(&dir.path().join("foreign"), &[2; 32]) else { return };
    let mut cell = cell_with(export(|export| export.users = Users::Munge), |config| {
        config.cluster.munge_socket = Some(munged.socket().into());
    });
    let admin = cell.admin();
    put(&admin, "own", 0o600, 1000, b"own");
    put(&admin, "others", 0o600, 1001, b"others");
    put(&admin, "roots", 0o600, 0, b"roots");
    put(&admin, "shown", 0o644, 0, b"shown");
    put(&admin, "group", 0o640, 1001, b"group");
    admin.set_attr("group", SetAttr { gid: Some(1000), ..SetAttr::default() }).unwrap();
    admin.mkdir("all", 0o777, 0, 0).unwrap();

    // Another user's program: this one's, which that user may run, with a client's key of its own.
    let open = |path: &Path, mode: u32| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    open(dir.path(), 0o755);
    let (program, file, keys) = (dir.path().join("program"), dir.path().join("c.toml"), dir.path().join("theirs"));
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    open(&program, 0o755);
    let mut theirs = cell.cluster.config.clone();
    std::fs::create_dir(&keys).unwrap();
    std::fs::copy(theirs.cluster.key_dir.join("client.key"), keys.join("client.key")).unwrap();
    chown(keys.join("client.key"), Some(1000), Some(1000)).unwrap();
    theirs.cluster.key_dir = keys;
    std::fs::write(&file, theirs.to_toml()).unwrap();
    let ran = std::process::Command::new(&program)
        .args(["--ignored", "--exact", "exports::a_program_of_user_1000"])
        .env("IMPRESARIO_TEST_CONFIG", &file)
        .current_dir("/")
        .gid(1000)
        .uid(1000)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");

    // Root's programs vouch for the users of their machine.
    for client in cell.clients() {
        assert_eq!(get(&client, "roots").unwrap(), b"roots");
        assert_eq!(get(&client, "others").unwrap(), b"others");
    }
    // A machine without the daemon, and one with another key.
    for (socket, what) in [(dir.path().join("nobody"), "start munged"), (foreign.socket().into(), "same munge.key")] {
        cell.cluster.config.cluster.munge_socket = Some(socket);
        for via in [Via::Direct, Via::IoNode(0)] {
            let why = refused(connect(&cell.cluster.config, via), libc::EACCES);
            assert!(why.contains("have to prove who they are") && why.contains(what), "{why}");
        }
    }
    // Administrators are not asked, and neither is who only wants to know how a server is.
    assert!(connect(&cell.admin, Via::Direct).is_ok());
    let access = impresario_client::Access::of(&cell.cluster.config, KeyRole::Client);
    let address = &cell.cluster.config.meta.address;
    impresario_client::admin::status(&access, address, std::time::Duration::from_secs(20)).unwrap();
}

/// What a thread asks for a user.
fn as_user<T>(uid: u32, ask: impl FnOnce() -> T) -> T {
    let _acting = Caller { uid, gid: uid }.enter();
    ask()
}

/// A cell whose users prove themselves to this daemon, with files of users 1000 and 1001 and of root.
fn cell_of_users(munged: &Munged, change: impl FnOnce(&mut Export)) -> Cell {
    let export = export(|export| {
        (export.users, export.squash) = (Users::Munge, Squash::Root);
        change(export);
    });
    let cell = cell_with(export, |config| config.cluster.munge_socket = Some(munged.socket().into()));
    let admin = cell.admin();
    for (name, owner) in [("alices", 1000), ("bobs", 1001), ("roots", 0)] {
        put(&admin, name, 0o600, owner, name.as_bytes());
    }
    put(&admin, "roots.shown", 0o644, 0, b"shown");
    admin.mkdir("all", 0o777, 0, 0).unwrap();
    admin.mkdir("tmp", 0o1777, 0, 0).unwrap();
    cell
}

#[test]
fn users_of_a_client_of_root_are_told_apart_by_credentials_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let Some(munged) = Munged::start(&dir.path().join("munge"), &[1; 32]) else { return };
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for squash in [Squash::Root, Squash::None] {
        let cell = cell_of_users(&munged, |export| export.squash = squash);
        for (n, client) in cell.clients().into_iter().enumerate() {
            for (uid, own, others) in [(1000, "alices", "bobs"), (1001, "bobs", "alices"), (1000, "alices", "bobs")] {
                as_user(uid, || {
                    assert_eq!(get(&client, own).unwrap(), own.as_bytes());
                    assert_eq!(get(&client, "roots.shown").unwrap(), b"shown");
                    let why = refused(client.open(others, false).map(drop), libc::EACCES);
                    assert!(why.contains(&format!("user {uid} has no permission")), "{why}");
                    refused(client.open("roots", false).map(drop), libc::EACCES);
                    refused(client.open("roots.shown", true).map(drop), libc::EACCES);
                    refused(client.unlink("roots.shown"), libc::EACCES);
                    refused(client.set_attr(others, SetAttr { mode: Some(0o666), ..SetAttr::default() }), libc::EPERM);
                    refused(client.set_attr(own, SetAttr { uid: Some(0), ..SetAttr::default() }), libc::EPERM);
                });
            }
            // What they make is theirs, whatever the machine says.
            let made = format!("tmp/made.{n}");
            as_user(1000, || put(&client, &made, 0o4720, 0, b"made"));
            assert_eq!(cell.admin().stat(&made).map(|attr| (attr.uid, attr.mode & 0o7777)).unwrap(), (1000, 0o4720));
            as_user(1001, || refused(client.unlink(&made), libc::EPERM));
            as_user(1001, || refused(client.rename(&made, "all/x", false), libc::EPERM));
            // Whoever writes takes the set-user-id bit away, and no more.
            for set in [
                SetAttr { gid: Some(1001), ..SetAttr::default() },
                SetAttr { mode: Some(0o4720), ..SetAttr::default() },
            ] {
                cell.admin().set_attr(&made, set).unwrap();
            }
            as_user(1001, || {
                refused(client.set_attr(&made, SetAttr { mode: Some(0o777), ..SetAttr::default() }), libc::EPERM);
                client.set_attr(&made, SetAttr { size: Some(1), takes: 0o4000, ..SetAttr::default() }).unwrap();
            });
            // Root's own requests.
            match squash {
                Squash::None => {
                    assert_eq!(get(&client, "roots").unwrap(), b"roots");
                    assert_eq!(get(&client, "alices").unwrap(), b"alices");
                }
                _ => {
                    for file in ["roots", "alices", "bobs"] {
                        refused(client.open(file, false).map(drop), libc::EACCES);
                    }
                    assert_eq!(get(&client, "roots.shown").unwrap(), b"shown");
                    let made = format!("all/by-root.{n}");
                    put(&client, &made, 0o600, 1000, b"by root");
                    assert_eq!(client.stat(&made).unwrap().uid, 65534);
                    refused(
                        client.set_attr("alices", SetAttr { mode: Some(0o666), ..SetAttr::default() }),
                        libc::EPERM,
                    );
                    as_user(0, || refused(client.open("alices", false).map(drop), libc::EACCES));
                }
            }
        }
    }
}

/// What the server has asked for is a credential for this client, of a user whom its rule names.
#[test]
fn a_credential_proves_one_user_to_one_client_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let Some(munged) = Munged::start(&dir.path().join("munge"), &[1; 32]) else { return };
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let munge = Munge::at(Some(munged.socket()));
    let cell = cell_of_users(&munged, |export| export.uids = vec!["1000".into(), "1002-1003".into()]);
    let clients = cell.clients();
    for (client, other) in clients.iter().zip(clients.iter().rev()) {
        let prove = |credential| client.meta(MetaCall::Prove { credential });
        let of = |uid, client: &Client| munge.prove_as(Proven { uid, gid: uid }, client.identity().client()).unwrap();
        refused(prove(b"MUNGE:nonsense:".to_vec()), libc::EACCES);
        let why = refused(prove(of(1000, other)), libc::EACCES);
        assert!(why.contains("another client"), "{why}");
        let shown = of(1002, client);
        prove(shown.clone()).unwrap();
        let why = refused(prove(shown), libc::EACCES);
        assert!(why.contains("used before"), "{why}");
        // Root's is not taken for that of a user, and neither is that of one whom the rule does not name.
        refused(prove(munge.prove(client.identity().client()).unwrap()), libc::EACCES);
        let why = refused(prove(of(1001, client)), libc::EACCES);
        assert!(why.contains("uids"), "{why}");
        as_user(1000, || assert_eq!(get(client, "alices").unwrap(), b"alices"));
        let why = as_user(1001, || refused(client.open("bobs", false).map(drop), libc::EACCES));
        assert!(why.contains("uids"), "{why}");
        as_user(1003, || assert_eq!(get(client, "roots.shown").unwrap(), b"shown"));
    }
    // An administrator's client has nothing to prove.
    let why = refused(cell.admin().meta(MetaCall::Prove { credential: vec![1] }), libc::EPERM);
    assert!(why.contains("nothing to prove"), "{why}");
}

#[test]
fn users_stay_known_while_munged_is_away_and_are_proved_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("munge");
    let Some(munged) = Munged::start(&folder, &[1; 32]) else { return };
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut cell = cell_of_users(&munged, |_| {});
    let clients = cell.clients();
    let files: Vec<_> = clients.iter().map(|client| as_user(1000, || client.open("alices", true).unwrap())).collect();
    drop(munged);
    for client in &clients {
        as_user(1000, || assert_eq!(get(client, "alices").unwrap(), b"alices"));
        let why = as_user(1001, || refused(client.open("bobs", false).map(drop), libc::EACCES));
        assert!(why.contains("user 1001 has to prove") && why.contains("start munged"), "{why}");
    }
    let _munged = Munged::start(&folder, &[1; 32]).unwrap();
    for client in &clients {
        as_user(1001, || assert_eq!(get(client, "bobs").unwrap(), b"bobs"));
    }
    cell.meta = None;
    cell.meta = Some(impresario_server::start(&cell.cluster.config, "meta").unwrap());
    // Files are registered anew for the user who opened them, whichever thread finds that it has to be done.
    for file in files {
        assert_eq!(file.write_at(b"ALICES", 0).unwrap(), 6);
        assert_eq!(file.attr().unwrap().size, 6);
        file.close().unwrap();
    }
    for client in &clients {
        as_user(1001, || assert_eq!(get(client, "bobs").unwrap(), b"bobs"));
        as_user(1001, || refused(client.open("alices", false).map(drop), libc::EACCES));
        refused(client.open("alices", false).map(drop), libc::EACCES);
    }
}
