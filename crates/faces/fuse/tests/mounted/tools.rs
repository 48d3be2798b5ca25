//! Unmodified programs: cp, diff, tar, fio.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use impresario_fuse::MountOptions;

use crate::cluster::{Cluster, Node, mounted, mounted_with};

/// Runs a program that must succeed without any complaint.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.is_empty(),
        "{command:?} said {said} {}",
        String::from_utf8_lossy(&output.stdout)
    );
    output
}

/// Directories of a tree of a few hundred files. Where the same programs run on another file system, each of these costs as
/// much as on all others, and shows less that is new: there a quarter is enough.
pub const DIRECTORIES: usize = 20;

/// A tree of the sources of this crate and of generated files, twenty in each of the directories, with links and odd names.
fn some_tree(parent: &Path, directories: usize) -> PathBuf {
    let tree = parent.join("tree");
    run(Command::new("cp").arg("-r").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/.")).arg(&tree));
    for directory in 0..directories {
        let directory = tree.join(format!("directory {directory}/deeper"));
        fs::create_dir_all(&directory).unwrap();
        for file in 0..20usize {
            fs::write(directory.join(format!("file-{file}")), crate::files::pattern(file as u64, file * 7919)).unwrap();
        }
    }
    std::os::unix::fs::symlink("directory 1", tree.join("link")).unwrap();
    std::os::unix::fs::symlink("/nowhere", tree.join("broken link")).unwrap();
    fs::write(tree.join("-odd\n\u{fc}name"), "odd").unwrap();
    fs::set_permissions(tree.join("directory 3"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    tree
}

/// Names, kinds, modes, owners, link targets and modification times (except sizes of directories) below a directory.
fn listing(directory: &Path) -> String {
    let format = "%P %y %m %U %G %l %T@\\n";
    let output = run(Command::new("find").arg(directory).args(["-mindepth", "1", "-printf", format]));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort();
    lines.join("\n")
}

/// Compares the attributes of two trees; panics at the first difference.
fn same_listing(left: &Path, right: &Path) {
    let (left, right) = (listing(left), listing(right));
    for (left, right) in left.lines().zip(right.lines()) {
        assert_eq!(left, right);
    }
    assert_eq!(left.lines().count(), right.lines().count());
}

#[test]
fn cp_and_diff() {
    let Some(node) = mounted() else { return };
    let fresh = node.second(MountOptions::default());
    copies_are_the_same(&node, &fresh, DIRECTORIES);
    assert_eq!(fs::read_dir(node.mount_point()).unwrap().count(), 0);
}

/// Copies a tree to one node, and back and forth, and compares it on another, with `cp -a` and `diff -r`.
pub fn copies_are_the_same(node: &Node, fresh: &Node, directories: usize) {
    let scratch = tempfile::tempdir().unwrap();
    let tree = some_tree(scratch.path(), directories);
    run(Command::new("cp").arg("-a").arg(&tree).arg(node.at("copy")));
    run(Command::new("diff").arg("-r").arg("--no-dereference").arg(&tree).arg(node.at("copy")));
    same_listing(&tree, &node.at("copy"));
    // And on another node with cold caches; then back, and within.
    run(Command::new("diff").arg("-r").arg("--no-dereference").arg(&tree).arg(fresh.at("copy")));
    run(Command::new("cp").arg("-a").arg(node.at("copy")).arg(node.at("again")));
    run(Command::new("cp").arg("-a").arg(node.at("again")).arg(scratch.path().join("back")));
    same_listing(&tree, &scratch.path().join("back"));
    run(Command::new("rm").arg("-r").arg(node.at("copy")).arg(node.at("again")));
}

/// As [`listing`], with the number of names of each file, and the first of them.
fn linked_listing(directory: &Path) -> String {
    let output =
        run(Command::new("find").arg(directory).args(["-mindepth", "1", "-printf", "%P\\t%y %m %s %n %l\\t%i\\n"]));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines: Vec<(&str, &str, &str)> = text
        .lines()
        .filter_map(|line| line.split_once('\t').and_then(|(name, rest)| Some((name, rest.split_once('\t')?))))
        .map(|(name, (what, ino))| (name, what, ino))
        // The size and links of a directory are the file system's own affair.
        .filter(|(_, what, _)| !what.starts_with('d'))
        .collect();
    lines.sort();
    let mut first = std::collections::BTreeMap::new();
    let mut shown = String::new();
    for (name, what, ino) in lines {
        let first = first.entry(ino).or_insert(name);
        shown += &format!("{name} {what} as {first}\n");
    }
    shown
}

#[track_caller]
fn same_links(left: &Path, right: &Path) {
    let (left, right) = (linked_listing(left), linked_listing(right));
    for (left, right) in left.lines().zip(right.lines()) {
        assert_eq!(left, right);
    }
    assert_eq!(left.lines().count(), right.lines().count());
}

#[test]
fn programs_keep_hard_links() {
    let Some(node) = mounted() else { return };
    hard_links_are_the_same(&node, &node.second(MountOptions::default()));
}

/// Makes, copies and packs hard links with real programs, on a node and in a local folder, and compares the two.
pub fn hard_links_are_the_same(node: &Node, fresh: &Node) {
    let scratch = tempfile::tempdir().unwrap();
    let local = scratch.path();
    for folder in [local, node.mount_point()] {
        let tree = folder.join("linked");
        fs::create_dir_all(tree.join("deeper")).unwrap();
        for file in 0..12usize {
            fs::write(tree.join(format!("file-{file}")), crate::files::pattern(file as u64, file * 7919)).unwrap();
        }
        std::os::unix::fs::symlink("file-1", tree.join("symbolic")).unwrap();
        for (from, to) in [
            ("file-1", "file-1 too"),
            ("file-1", "deeper/third"),
            ("file-2", "deeper/file-2"),
            ("symbolic", "symbolic 2"),
        ] {
            run(Command::new("ln").arg("-P").arg(tree.join(from)).arg(tree.join(to)));
        }
        run(Command::new("cp").arg("-al").arg(&tree).arg(folder.join("cp-al")));
        run(Command::new("cp").arg("-a").arg(&tree).arg(folder.join("cp-a")));
        run(Command::new("tar").arg("-cf").arg(folder.join("a.tar")).arg("-C").arg(folder).arg("linked"));
        fs::create_dir(folder.join("tar")).unwrap();
        run(Command::new("tar").arg("-xf").arg(folder.join("a.tar")).arg("-C").arg(folder.join("tar")));
        if impresario_testing::require("rsync") {
            run(Command::new("rsync").arg("-aH").arg(&tree).arg(folder.join("rsync")));
            // As snapshots are made: what is unchanged is linked to the last one.
            let last = format!("--link-dest={}", folder.join("rsync").display());
            run(Command::new("rsync").arg("-aH").arg(last).arg(&tree).arg(folder.join("snapshot")));
        }
        if impresario_testing::require("git") {
            let git = |directory: &Path, args: &[&str]| {
                let mut command = Command::new("git");
                command.arg("-C").arg(directory).args(["-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0"]);
                run(command.args(args).env("GIT_CONFIG_NOSYSTEM", "1").env("HOME", local))
            };
            let origin = folder.join("origin");
            fs::create_dir(&origin).unwrap();
            git(&origin, &["init", "-q", "-b", "main"]);
            fs::write(origin.join("file"), "text").unwrap();
            git(&origin, &["add", "."]);
            git(&origin, &["commit", "-q", "-m", "one"]);
            git(folder, &["clone", "-q", "--local", "origin", "clone"]);
            let objects = |repository: &str| linked_listing(&folder.join(repository).join(".git/objects"));
            let linked = objects("clone").lines().filter(|line| line.split(' ').nth(4) == Some("2")).count();
            assert_eq!((linked, objects("origin")), (3, objects("clone")), "the commit, its tree and its file");
            git(&folder.join("clone"), &["fsck", "--strict", "--no-progress"]);
        }
    }
    for copy in ["linked", "cp-al", "cp-a", "tar", "rsync", "snapshot"] {
        if local.join(copy).exists() {
            same_links(&local.join(copy), &node.at(copy));
            same_links(&local.join(copy), &fresh.at(copy));
            run(Command::new("diff").arg("-r").arg("--no-dereference").arg(local.join(copy)).arg(fresh.at(copy)));
        }
    }
    for (copy, node) in [("cp-al", node), ("snapshot", fresh)] {
        // Without rsync there is no snapshot.
        if local.join(copy).exists() {
            run(Command::new("rm").arg("-r").arg(node.at(copy)));
            fs::remove_dir_all(local.join(copy)).unwrap();
        }
    }
    // Other nodes keep attributes for a second.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    same_links(&local.join("linked"), &fresh.at("linked"));
    same_links(&local.join("linked"), &node.at("linked"));
}

#[test]
fn tar_there_and_back() {
    let Some(node) = mounted() else { return };
    archives_are_the_same(&node, DIRECTORIES);
}

/// Packs and unpacks a tree on a node.
pub fn archives_are_the_same(node: &Node, directories: usize) {
    let scratch = tempfile::tempdir().unwrap();
    let tree = some_tree(scratch.path(), directories);
    run(Command::new("tar")
        .args(["--format=posix", "-cf"])
        .arg(node.at("a.tar"))
        .arg("-C")
        .arg(scratch.path())
        .arg("tree"));
    run(Command::new("tar").arg("-xpf").arg(node.at("a.tar")).arg("-C").arg(node.mount_point()));
    run(Command::new("diff").arg("-r").arg("--no-dereference").arg(&tree).arg(node.at("tree")));
    run(Command::new("tar")
        .args(["--format=posix", "-cf"])
        .arg(scratch.path().join("b.tar"))
        .arg("-C")
        .arg(node.mount_point())
        .arg("tree"));
    fs::create_dir(scratch.path().join("out")).unwrap();
    run(Command::new("tar").arg("-xpf").arg(scratch.path().join("b.tar")).arg("-C").arg(scratch.path().join("out")));
    same_listing(&tree, &scratch.path().join("out/tree"));
}

pub fn fio(node: &Node, name: &str, args: &[&str]) {
    let mut command = Command::new("fio");
    command
        .arg(format!("--name={name}"))
        .arg(format!("--directory={}", node.mount_point().display()))
        .args(["--verify=crc32c", "--verify_fatal=1", "--group_reporting", "--fallocate=none", "--end_fsync=1"])
        .args(args);
    // fio leaves files in its working directory when a verification fails.
    let scratch = tempfile::tempdir().unwrap();
    let output = command.current_dir(scratch.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {said}\n{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn fio_verifies() {
    if !impresario_testing::require("fio") {
        return;
    }
    let Some(node) = mounted() else { return };
    fio(&node, "sequential", &["--rw=write", "--bs=128k", "--size=24m", "--numjobs=3"]);
    fio(&node, "random", &["--rw=randwrite", "--bs=4k", "--size=4m", "--numjobs=4"]);
    fio(&node, "odd", &["--rw=randwrite", "--bsrange=512-70k", "--bs_unaligned=1", "--size=6m", "--numjobs=2"]);
    fio(&node, "mixed", &["--rw=randrw", "--bs=16k", "--size=6m", "--numjobs=2"]);
    fio(&node, "mapped", &["--rw=randwrite", "--ioengine=mmap", "--bs=4k", "--size=4m"]);
    fio(
        &node,
        "odirect",
        &["--rw=randwrite", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--bs=16k", "--size=8m"],
    );
    let direct = node.second(MountOptions { direct_io: true, ..Default::default() });
    fio(&direct, "direct", &["--rw=randwrite", "--bs=64k", "--size=8m", "--numjobs=2"]);
    fio(&direct, "large", &["--rw=write", "--bs=1m", "--size=32m"]);
}

/// Figures for the report: `cargo test --release -p impresario-fuse -- --ignored --nocapture figures`.
#[test]
#[ignore = "measures; run it in release mode"]
fn figures() {
    for direct_io in [false, true] {
        let Some(node) = mounted_with(MountOptions { direct_io, ..Default::default() }) else { return };
        let file = node.at("f");
        let dd = |name: &str, args: &[String]| {
            let output = Command::new("dd").args(args).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            println!("direct_io={direct_io} {name}: {}", said.lines().last().unwrap_or_default());
        };
        let path = |key: &str, path: &Path| format!("{key}={}", path.display());
        let write =
            ["if=/dev/zero".into(), path("of", &file), "bs=1M".into(), "count=1024".into(), "conv=notrunc".into()];
        let read = [path("if", &file), "of=/dev/null".into(), "bs=1M".into()];
        dd("write", &write);
        dd("rewrite", &write);
        for _ in 0..2 {
            let _cache = impresario_testing::page_cache::emptied();
            let _ = fs::write("/proc/sys/vm/drop_caches", "3");
            dd("read", &read);
        }
        for (name, jobs) in [("randread 4k, 1 job", "1"), ("randread 4k, 8 jobs", "8")] {
            let output = Command::new("fio")
                .args(["--name=r", "--rw=randread", "--bs=4k", "--size=1g", "--runtime=5", "--time_based"])
                .args(["--direct=1", "--ioengine=psync", "--group_reporting", "--minimal"])
                .arg(format!("--numjobs={jobs}"))
                .arg(path("--filename", &file))
                .output()
                .unwrap();
            let fields = String::from_utf8_lossy(&output.stdout).into_owned();
            println!("direct_io={direct_io} {name}: {} IOPS", fields.split(';').nth(7).unwrap_or("?"));
        }
    }
}

/// Random calls, checked against memory: files of one process each, and one that processes of two nodes change in turn, by
/// locks.
fn random_calls_on(one: &Node, two: &Node, what: &str, is_shared: bool) {
    let local = tempfile::tempdir().unwrap();
    let program = local.path().join("exercise");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testing/c/exercise.c");
    run(Command::new("cc").args(["-O1", "-w", "-o"]).arg(&program).arg(source));
    let exercise = |path: PathBuf, steps: &str, seed: &str, other: Option<PathBuf>| {
        let mut command = Command::new(&program);
        command.arg(path).args([steps, seed, what]).args(other);
        assert_eq!(run(&mut command).stdout, b"good\n");
    };
    std::thread::scope(|scope| {
        let exercise = &exercise;
        for (seed, node) in [("1", one), ("2", one), ("3", two)] {
            scope.spawn(move || exercise(node.at(seed), "600", seed, None));
        }
        if is_shared {
            scope.spawn(move || exercise(one.at("both"), "250", "4", Some(two.at("both"))));
        }
    });
}

#[test]
fn random_calls_give_what_memory_holds() {
    if !impresario_testing::require("cc") {
        return;
    }
    for (io_nodes, direct_io) in [(0, false), (2, true)] {
        let Some(cluster) = Cluster::with_io_nodes(Duration::from_secs(20), io_nodes) else { return };
        let options = || MountOptions { direct_io, ..MountOptions::default() };
        let (one, two) = (cluster.mount_through(0, options()), cluster.mount_through(1, options()));
        random_calls_on(&one, &two, "mha", true);
    }
}

#[test]
fn random_calls_give_what_memory_holds_in_a_folder_behind_io_nodes() {
    if !impresario_testing::require("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(cluster) = Cluster::over(folder.path(), 2, |_| {}) else { return };
    let (one, two) =
        (cluster.mount_through(0, MountOptions::default()), cluster.mount_through(1, MountOptions::default()));
    random_calls_on(&one, &two, "mha", false);
}
