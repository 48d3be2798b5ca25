//! Unmodified programs: cp, diff, tar, fio.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use impresario_fuse::MountOptions;

use crate::cluster::{Node, mounted, mounted_with};

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

/// A tree of a few hundred files: the sources of this crate and many generated ones, with links and odd names.
fn some_tree(parent: &Path) -> PathBuf {
    let tree = parent.join("tree");
    run(Command::new("cp").arg("-r").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/.")).arg(&tree));
    for directory in 0..20 {
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
    copies_are_the_same(&node, &fresh);
    assert_eq!(fs::read_dir(node.mount_point()).unwrap().count(), 0);
}

/// Copies a tree to one node, and back and forth, and compares it on another, with `cp -a` and `diff -r`.
pub fn copies_are_the_same(node: &Node, fresh: &Node) {
    let scratch = tempfile::tempdir().unwrap();
    let tree = some_tree(scratch.path());
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

#[test]
fn tar_there_and_back() {
    let Some(node) = mounted() else { return };
    archives_are_the_same(&node);
}

/// Packs and unpacks a tree on a node.
pub fn archives_are_the_same(node: &Node) {
    let scratch = tempfile::tempdir().unwrap();
    let tree = some_tree(scratch.path());
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
