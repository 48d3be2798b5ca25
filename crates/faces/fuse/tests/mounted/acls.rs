//! Access control lists and `security.*`: the same script in a mount and in a local folder says and leaves the same.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use impresario_fuse::MountOptions;
use impresario_testing::{require, skip};

use crate::cluster::{Cluster, Node, errno, mounted_with};
use crate::names::{as_user, get_xattr, list_xattr, remove_xattr, set_xattr};

fn open_to_others() -> MountOptions {
    MountOptions { allow_other: true, ..MountOptions::default() }
}

/// What a script says and does below a folder, without the folder's name.
fn said(script: &str, folder: &Path) -> String {
    let output = Command::new("bash").args(["-uc", script]).current_dir(folder).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).replace(&*folder.to_string_lossy(), "FOLDER")
}

/// Runs a script in a local folder and on mounts, and compares what it says.
fn as_in_a_local_folder(script: &str, probe: &[&str]) {
    if !require("root") || !["setfacl", "getfacl", "setcap", "setpriv"].into_iter().all(require) {
        return;
    }
    let local = tempfile::tempdir().unwrap();
    fs::set_permissions(local.path(), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(local.path().join("probe"), "").unwrap();
    if !Command::new(probe[0]).args(&probe[1..]).arg(local.path().join("probe")).status().unwrap().success() {
        return skip(probe[0], "the local file system of temporary files does not take it");
    }
    fs::remove_file(local.path().join("probe")).unwrap();
    let expected = said(script, local.path());
    assert!(expected.lines().count() > 20, "{expected}");
    for io_nodes in [0, 2] {
        let Some(cluster) = Cluster::with_io_nodes(Duration::from_secs(20), io_nodes) else { return };
        let node = cluster.mount(open_to_others());
        node.open_the_way();
        let seen = said(script, node.mount_point());
        let differs = expected.lines().zip(seen.lines()).find(|(expected, seen)| expected != seen);
        assert!(seen == expected, "{io_nodes} I/O nodes: first {differs:?}\nexpected:\n{expected}\nseen:\n{seen}");
    }
}

const LISTS: &str = r#"
    show() { stat -c '%n %A %u %g' "$@"; getfacl -n -p "$@"; }
    as() { setpriv --reuid "$1" --regid "${2:-$1}" --clear-groups -- "${@:3}"; }
    try() { "$@" >/dev/null 2>&1; echo "$? from $*"; }
    umask 022
    echo text > f; chmod 640 f
    setfacl -m u:4321:rw,g:4400:r f; show f
    for user in 4321 4322; do try as $user $user cat f; try as $user $user sh -c 'echo more >> f'; done
    try as 4322 4400 cat f; try as 4322 4400 sh -c 'echo more >> f'
    # The mask and the group's bits are one thing.
    chmod 600 f; show f; try as 4321 4321 cat f
    chmod g+rx f; show f; try as 4321 4321 cat f; try as 4321 4321 sh -c 'echo more >> f'
    setfacl -m m::rw f; show f; setfacl -x u:4321 f; show f
    setfacl -m u::r,o::r f; show f; chown 4321:4400 f; show f
    try as 4321 4321 setfacl -m u:7:r f; try as 4322 4322 setfacl -m u:7:r f; show f
    setfacl -b f; show f
    setfacl -m u:1:r,u:2:r f; chmod 2770 f; as 4321 4321 setfacl -m u:3:rwx f; show f
    chmod 2770 f; as 4321 4400 setfacl -m u:3:rwx f; show f
    mkdir shared; chown 4321:4400 shared; chmod 2770 shared; as 4321 4321 setfacl -m u:3:rwx shared; show shared
    chmod 2770 shared; as 4321 4400 setfacl -d -m u:3:rwx shared; show shared; rmdir shared
    # What is made in a directory.
    mkdir d; setfacl -d -m u:4321:rwx,g:4400:rx,o::x d; show d
    umask 077; echo text > d/f; mkdir d/sub; ln -s f d/link; echo text > plain; mkdir plain.d
    mkdir -m 750 d/some; install -m 604 f d/installed
    stat -c '%n %A' plain plain.d d/link; show d/f d/sub d/some d/installed
    umask 022; echo deeper > d/sub/f; mkdir -p d/sub/a/b; show d/sub/f d/sub/a/b
    try as 4321 4321 sh -c 'echo x > d/sub/theirs'; try as 4322 4322 ls d/sub; try as 4322 4322 cat d/sub/f
    chmod 700 d/sub; try as 4321 4321 ls d/sub; show d/sub
    try as 4321 4321 sh -c 'cat d/f; mkdir d/mine'
    mkdir minimal; setfacl -d -m u::rwx,g::rx,o::- minimal; umask 0; echo text > minimal/f; mkdir minimal/d; show minimal minimal/f minimal/d
    setfacl -k d/some; show d/some; setfacl -d -b d/sub/a; show d/sub/a
    try setfacl -d -m u:1:r f
    umask 022
    # Moving and copying.
    mv d/f moved; show moved; ln moved d/linked; setfacl -m u:99:r d/linked; show moved
    cp -a d copy; getfacl -n -R copy | sort; cp d/installed copied; show copied; cp --preserve=mode d/installed kept; show kept
    tar --acls -cf archive.tar d; mkdir out; tar --acls -C out -xf archive.tar; getfacl -n -R out/d | sort
    getfacl -n -R d > lists; setfacl -R -b d; setfacl --restore=lists; getfacl -n -R d | sort
    # What is no list.
    for bytes in 0x 0x02000000 0x0200000001 0x03000000 0x0200000001000700ffffffff 0x020000000100ffffffffffff; do
        try setfattr -n system.posix_acl_access -v $bytes f; try setfattr -n system.posix_acl_default -v $bytes minimal
    done
    show f minimal; getfattr -n system.posix_acl_access -e hex --only-values moved | od -An -tx1; getfattr -m - moved minimal
    for i in $(seq 100 140); do setfacl -m u:$i:r moved || echo "no $i"; done; getfacl -n -p moved
    rm -r copy out d
"#;

#[test]
fn lists_are_those_of_a_local_folder() {
    as_in_a_local_folder(LISTS, &["setfacl", "-m", "u:4321:r"]);
}

const CAPABILITIES: &str = r#"
    as() { setpriv --reuid "$1" --regid "$1" --clear-groups -- "${@:2}"; }
    try() { "$@" >/dev/null 2>&1; echo "$? from $*"; }
    give() { setcap cap_net_raw,cap_net_bind_service+ep f; getcap f; getfattr -n security.capability -e hex f; }
    echo text > f; chmod 755 f; give
    setfattr -n security.other -v value f; getfattr -d -m security f; setfattr -x security.other f; getfattr -d -m security f
    try as 4321 setfattr -n security.other -v value f; try as 4321 setcap cap_net_raw+ep f; try as 4321 getcap f
    echo more >> f; getcap f; give
    truncate -s 2 f; getcap f; give; : > f; getcap f; give
    chown 4321 f; getcap f; give; chgrp 4321 f; getcap f; give; chown 4321 f; getcap f; give
    chmod 700 f; getcap f; touch f; getcap f; mv f g; mv g f; getcap f
    dd if=/dev/zero of=f bs=4096 count=1 conv=notrunc oflag=direct status=none; getcap f; give
    fallocate -l 100000 f; getcap f; give
    fallocate -p -o 0 -l 4096 f; getcap f; give
    cat f > /dev/null; getcap f
    cp f copied; getcap copied; cp -a f kept; getcap kept
    setfattr -x security.capability f; getcap f
    mkdir d; setfattr -n security.label -v of-a-directory d; getfattr -d -m security d; chown 1 d; getfattr -d -m security d
    try setfattr -n system.other -v x f; try getfattr -n security.none f
"#;

#[test]
fn capabilities_go_with_a_change_as_in_a_local_folder() {
    as_in_a_local_folder(CAPABILITIES, &["setcap", "cap_net_raw+ep"]);
}

fn first_node() -> Option<Node> {
    if !require("root") || !require("setfacl") {
        return None;
    }
    let node = mounted_with(open_to_others())?;
    node.open_the_way();
    Some(node)
}

fn setfacl(list: &str, path: &Path) {
    assert!(Command::new("setfacl").args(["-m", list]).arg(path).status().unwrap().success());
}

#[test]
fn lists_count_on_other_nodes() {
    let Some(node) = first_node() else { return };
    let other = node.second(MountOptions { cache_time: Duration::ZERO, ..open_to_others() });
    fs::write(node.at("f"), "text").unwrap();
    fs::set_permissions(node.at("f"), PermissionsExt::from_mode(0o600)).unwrap();
    let reads = |node: &Node| as_user(4321, "cat \"$1\" > /dev/null", &node.at("f"));
    assert!(!reads(&node) && !reads(&other));
    setfacl("u:4321:r", &node.at("f"));
    assert!(reads(&node) && reads(&other));
    assert_eq!(fs::metadata(other.at("f")).unwrap().mode() & 0o777, 0o640);
    // As little as the mask, whoever changes it.
    fs::set_permissions(other.at("f"), PermissionsExt::from_mode(0o600)).unwrap();
    assert!(!reads(&other));
    impresario_testing::until("the cache time", || !reads(&node));
    fs::create_dir(node.at("d")).unwrap();
    setfacl("d:u:4321:rwx", &node.at("d"));
    fs::create_dir(other.at("d/sub")).unwrap();
    assert!(as_user(4321, "touch \"$1/theirs\"", &other.at("d/sub")));
    // A pipe has no list: its group gets what the list says of the group, and not what it says of others that it names.
    assert!(Command::new("mkfifo").arg(node.at("d/pipe")).status().unwrap().success());
    assert_eq!(fs::metadata(node.at("d/pipe")).unwrap().mode() & 0o777, 0o644);
    let refused = Command::new("setfacl").args(["-m", "u:4321:r"]).arg(node.at("d/pipe")).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("not supported"), "{refused:?}");
}

#[test]
fn what_is_no_list_is_refused_and_only_owners_set_one() {
    let Some(node) = first_node() else { return };
    fs::write(node.at("f"), "text").unwrap();
    let access = "system.posix_acl_access";
    let past = |bad: &str| {
        let set = node.cluster().client().set_xattr("f", access, Some(bad.as_bytes()), Default::default());
        assert_eq!(set.unwrap_err().errno(), libc::EINVAL, "{bad:?}");
    };
    for bad in ["\u{1}", "\u{2}\0\0\0x", "\u{2}\0\0\0\u{1}\0\u{7}\0aaaa"] {
        assert_eq!(errno(set_xattr(&node.at("f"), access, bad)), libc::EINVAL, "{bad:?}");
        // The server, asked past a kernel that looks itself.
        past(bad);
    }
    // Of another version, which kernels call EOPNOTSUPP.
    past("\u{9}\0\0\0");
    assert!(!as_user(4321, "setfacl -m u:4321:rw \"$1\"", &node.at("f")));
    assert_eq!(errno(get_xattr(&node.at("f"), access)), libc::ENODATA);
    remove_xattr(&node.at("f"), access).unwrap();
    assert!(list_xattr(&node.at("f")).is_empty());
    setfacl("u:4321:rw", &node.at("f"));
    assert_eq!(list_xattr(&node.at("f")), [access]);
    // An open file has it without a name too.
    let open = fs::File::open(node.at("f")).unwrap();
    fs::remove_file(node.at("f")).unwrap();
    assert_eq!(open.metadata().unwrap().mode() & 0o777, 0o664);
}
