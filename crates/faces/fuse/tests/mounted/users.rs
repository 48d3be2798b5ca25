//! Users of one mount of root's, each of whom proves itself to the metadata server.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use impresario_config::{Export, Security, Users};
use impresario_fuse::MountOptions;
use impresario_testing::munge::Munged;
use impresario_testing::{require, until};
use impresario_transport::{Keys, key_file_name};
use impresario_wire::KeyRole;

use crate::cluster::{Cluster, Node, errno};

/// A cluster whose users prove themselves to this daemon, and a mount for all users.
fn node(munged: &Munged, folder: &Path, io_nodes: usize) -> Option<Node> {
    let keys = Keys::draw().unwrap();
    let key_dir = folder.join(format!("keys.{io_nodes}"));
    for role in KeyRole::ALL {
        keys.for_role(role).store(&key_dir.join(key_file_name(role))).unwrap();
    }
    let cluster = Cluster::with(Duration::from_secs(20), io_nodes, |config| {
        (config.cluster.security, config.cluster.key_dir) = (Security::Key, key_dir);
        config.cluster.munge_socket = Some(munged.socket().into());
        config.export = vec![Export { users: Users::Munge, ..Export::default() }];
    })?;
    let node = cluster.mount(MountOptions { allow_other: true, ..MountOptions::default() });
    Some(node)
}

/// A script as a user, with what it says; one command without a shell, which would take the rights of another user off.
fn run(setpriv: &[&str], script: &str, folder: &Path) -> (bool, String) {
    let mut command = Command::new("setpriv");
    command.args(setpriv).current_dir(folder);
    match script.strip_prefix("exec ") {
        Some(program) => command.args(program.split(' ')),
        None => command.args(["sh", "-c", script]),
    };
    let output = command.output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[track_caller]
fn does(setpriv: &[&str], script: &str, folder: &Path) {
    let (done, said) = run(setpriv, script, folder);
    assert!(done, "{setpriv:?} {script}: {said}");
}

#[track_caller]
fn is_denied(setpriv: &[&str], script: &str, folder: &Path) {
    let (done, said) = run(setpriv, script, folder);
    assert!(!done && (said.contains("denied") || said.contains("not permitted")), "{setpriv:?} {script}: {said}");
}

const ALICE: &[&str] = &["--reuid=1000", "--regid=1000", "--clear-groups"];
const BOB: &[&str] = &["--reuid=1001", "--regid=1001", "--clear-groups"];

#[test]
fn users_of_a_mount_are_told_apart_by_the_metadata_server() {
    if !require("root") || !require("setpriv") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let Some(munged) = Munged::start(&dir.path().join("munge"), &[1; 32]) else { return };
    for io_nodes in [0, 1] {
        let Some(node) = node(&munged, dir.path(), io_nodes) else { return };
        // Root made the file system, and is the anonymous user in it: the folders were made before.
        let admin_folder = |name: &str, mode: u32| {
            let root = node.cluster().meta_folder().join("names");
            fs::create_dir(root.join(name)).unwrap();
            fs::set_permissions(root.join(name), PermissionsExt::from_mode(mode)).unwrap();
            fs::set_permissions(root, PermissionsExt::from_mode(0o755)).unwrap();
        };
        admin_folder("all", 0o1777);
        let all = node.at("all");
        does(ALICE, "umask 077; echo alice > alices; echo shown > shown; chmod 644 shown", &all);
        does(BOB, "umask 077; echo bob > bobs; cat shown", &all);
        for (file, owner) in [("alices", 1000), ("bobs", 1001)] {
            assert_eq!(fs::metadata(all.join(file)).unwrap().uid(), owner);
        }
        does(ALICE, "cat alices; mv alices a; ln a alices; rm a", &all);
        is_denied(BOB, "cat alices", &all);
        is_denied(BOB, "rm -f alices", &all);
        is_denied(ALICE, "echo more >> bobs", &all);
        // The kernel permits root everything; the metadata server knows who it is.
        assert_eq!(errno(fs::read(all.join("alices"))), libc::EACCES);
        assert_eq!(errno(fs::write(all.join("bobs"), b"root")), libc::EACCES);
        assert_eq!(errno(fs::set_permissions(all.join("alices"), PermissionsExt::from_mode(0o666))), libc::EPERM);
        assert_eq!(errno(fs::remove_file(all.join("alices"))), libc::EPERM);
        assert_eq!(fs::read(all.join("shown")).unwrap(), b"shown\n");
        fs::write(all.join("by-root"), b"root").unwrap();
        assert_eq!(fs::metadata(all.join("by-root")).unwrap().uid(), 65534);
        // A program of another user, as set-user-id programs are: what counts is as whom it acts.
        does(&["--ruid=1000", "--euid=1001", "--regid=1001", "--clear-groups"], "exec cat bobs", &all);
        is_denied(&["--ruid=1001", "--euid=1000", "--regid=1001", "--clear-groups"], "exec cat bobs", &all);
        // A group that its machine gives a user, and the metadata server's machine does not know: the kernel permits it alone.
        does(ALICE, "echo group > group; chmod 660 group", &all);
        std::os::unix::fs::chown(node.cluster().meta_folder().join("names/all/group"), None, Some(4242)).unwrap();
        until("the kernel has forgotten the group", || fs::metadata(all.join("group")).unwrap().gid() == 4242);
        let in_group = &["--reuid=1001", "--regid=1001", "--groups=4242"];
        does(in_group, "test -r group", &all);
        is_denied(in_group, "cat group", &all);
        // Many users at once, each with what is its own.
        std::thread::scope(|scope| {
            for uid in 2000..2040 {
                let all = &all;
                scope.spawn(move || {
                    let id = [format!("--reuid={uid}"), format!("--regid={uid}"), "--clear-groups".into()];
                    let id: Vec<&str> = id.iter().map(String::as_str).collect();
                    does(&id, &format!("umask 077; echo {uid} > own.{uid}; cat own.{uid}; rm own.{uid}"), all);
                });
            }
        });
    }
}
