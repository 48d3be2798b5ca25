//! A folder of a file system, mounted on nodes that reach it through I/O nodes.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use impresario_fuse::MountOptions;
use impresario_testing::ceph::CephCluster;
use impresario_testing::gluster::{GlusterBricks, GlusterVolume};

use crate::cluster::{Cluster, Node};
use crate::files::pattern;
use crate::tools;

fn nodes(cluster: &Arc<Cluster>) -> (Node, Node) {
    (cluster.mount_through(0, MountOptions::default()), cluster.mount_through(1, MountOptions::default()))
}

/// Real programs through both I/O nodes; what they wrote is then in the folder, where another client of the file system
/// shows it.
fn programs(folder: &Path, cluster: &Arc<Cluster>) {
    let (one, two) = nodes(cluster);
    programs_on(&one, &two, folder);
}

fn programs_on(one: &Node, two: &Node, folder: &Path) {
    tools::copies_are_the_same(one, two, tools::DIRECTORIES / 4);
    tools::archives_are_the_same(two, tools::DIRECTORIES / 4);
    tools::hard_links_are_the_same(two, one);
    tools::run(Command::new("diff").args(["-r", "--no-dereference"]).arg(two.at("tree")).arg(folder.join("tree")));
    if impresario_testing::require("fio") {
        tools::fio(one, "random", &["--rw=randwrite", "--bs=4k", "--size=2m", "--numjobs=4"]);
        tools::fio(two, "odd", &["--rw=randwrite", "--bsrange=512-70k", "--bs_unaligned=1", "--size=3m"]);
        tools::fio(one, "mapped", &["--rw=randwrite", "--ioengine=mmap", "--bs=4k", "--size=2m"]);
    }
}

#[test]
fn programs_use_a_folder_through_two_io_nodes() {
    for split in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let Some(cluster) = Cluster::over(folder.path(), 2, |io| io.split = split) else { return };
        programs(folder.path(), &cluster);
    }
}

#[test]
fn what_is_in_the_folder_is_on_the_nodes() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("dir")).unwrap();
    fs::write(folder.path().join("dir/file"), pattern(1, 300_000)).unwrap();
    let Some(cluster) = Cluster::over(folder.path(), 2, |_| {}) else { return };
    let (one, two) = nodes(&cluster);
    assert!(fs::read(one.at("dir/file")).unwrap() == pattern(1, 300_000));
    let there = fs::metadata(folder.path().join("dir/file")).unwrap();
    let here = fs::metadata(two.at("dir/file")).unwrap();
    assert_eq!((here.mode(), here.uid(), here.len()), (there.mode(), there.uid(), there.len()));
    assert_eq!(here.modified().unwrap(), there.modified().unwrap());
    crate::names::times_are_exact(&one, &two);
    // Written on one node, closed: seen on the other, and in the folder.
    for round in 0..5 {
        let bytes = pattern(round, 100_000 + round as usize);
        fs::write(one.at("next"), &bytes).unwrap();
        fs::rename(one.at("next"), one.at("dir/file")).unwrap();
        assert!(fs::read(two.at("dir/file")).unwrap() == bytes);
        assert!(fs::read(folder.path().join("dir/file")).unwrap() == bytes);
    }
    let mut log = OpenOptions::new().append(true).create(true).open(two.at("log")).unwrap();
    log.write_all(b"one\n").unwrap();
    log.write_all(b"two\n").unwrap();
    log.sync_all().unwrap();
    assert_eq!(fs::read(folder.path().join("log")).unwrap(), b"one\ntwo\n");
}

#[test]
fn a_lost_io_node_is_replaced_while_files_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let Some(cluster) = Cluster::over(folder.path(), 2, |_| {}) else { return };
    let node = cluster.mount_through(0, MountOptions { direct_io: true, ..MountOptions::default() });
    const WRITERS: u64 = 4;
    const PIECES: u64 = 200;
    let half = std::sync::Barrier::new(WRITERS as usize + 1);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (node, half) = (&node, &half);
            scope.spawn(move || {
                let file =
                    OpenOptions::new().write(true).create_new(true).open(node.at(&format!("f{writer}"))).unwrap();
                for piece in 0..PIECES {
                    if piece == PIECES / 2 {
                        half.wait();
                    }
                    file.write_all_at(&pattern(writer + piece, 10_000), piece * 10_000).unwrap();
                }
                file.sync_all().unwrap();
                fs::rename(node.at(&format!("f{writer}")), node.at(&format!("done{writer}"))).unwrap();
            });
        }
        half.wait();
        cluster.stop("io.0");
    });
    for writer in 0..WRITERS {
        let bytes = fs::read(folder.path().join(format!("done{writer}"))).unwrap();
        let want: Vec<u8> = (0..PIECES).flat_map(|piece| pattern(writer + piece, 10_000)).collect();
        assert!(bytes == want, "file {writer}");
    }
}

#[test]
fn programs_use_a_glusterfs_volume_through_two_io_nodes() {
    let Some(volume) = GlusterVolume::start() else { return };
    let Some(cluster) = Cluster::over(volume.mount(), 2, |_| {}) else { return };
    programs(volume.mount(), &cluster);
    // Files are on both bricks.
    let names = |brick: usize| fs::read_dir(volume.brick(brick).join("tree/directory 1/deeper")).unwrap().count();
    assert!(names(0) > 0 && names(1) > 0);
}

/// Whether libgfapi is there.
fn volumes_can_be_opened() -> bool {
    let folders = ["/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
    let there = folders.iter().any(|folder| Path::new(folder).join("libgfapi.so.0").exists());
    if !there {
        impresario_testing::skip("libgfapi", format!("no libgfapi.so.0 in {folders:?}"));
    }
    there
}

#[test]
fn programs_use_a_glusterfs_volume_without_a_mount() {
    if !volumes_can_be_opened() {
        return;
    }
    let Some(volume) = GlusterVolume::start() else { return };
    let Some(cluster) = Cluster::over_volume(&volume.volume_file(), 2) else { return };
    programs(volume.mount(), &cluster);
    let names = |brick: usize| fs::read_dir(volume.brick(brick).join("tree/directory 1/deeper")).unwrap().count();
    assert!(names(0) > 0 && names(1) > 0);
}

#[test]
fn programs_use_a_glusterfs_volume_with_shards() {
    if !volumes_can_be_opened() {
        return;
    }
    let Some(mut bricks) = GlusterBricks::start(4, Some("4MB")) else { return };
    let Some(cluster) = Cluster::over_volume(&bricks.volume_file(), 2) else { return };
    let (one, two) = nodes(&cluster);
    // Modification times are GlusterFS's own here: programs that set them are tested on the volume without shards.
    if impresario_testing::require("fio") {
        tools::fio(&one, "random", &["--rw=randwrite", "--bs=64k", "--size=12m"]);
        tools::fio(&two, "odd", &["--rw=randwrite", "--bsrange=512-70k", "--bs_unaligned=1", "--size=9m"]);
    }
    let bytes = pattern(5, 30_000_000);
    fs::write(one.at("large"), &bytes).unwrap();
    assert!(fs::read(two.at("large")).unwrap() == bytes);
    // Without bricks some of it cannot be read; when they are back, all can. Shards go where the hash of a random name says:
    // a single brick may have none.
    (1..4).for_each(|brick| bricks.kill(brick));
    assert!(fs::read(cluster.mount_through(1, MountOptions::default()).at("large")).is_err());
    (1..4).for_each(|brick| bricks.restart(brick));
    let fresh = cluster.mount_through(0, MountOptions::default());
    let reads_all = || fs::read(fresh.at("large")).is_ok_and(|back| back == bytes);
    impresario_testing::until("the bricks that came back are used", reads_all);
}

#[test]
fn programs_use_a_cephfs_file_system() {
    if !impresario_testing::require("fuse") {
        return;
    }
    let Some(mut ceph) = CephCluster::start(4) else { return };
    let Some(cluster) = Cluster::over_cephfs(&ceph.config(), 2) else { return };
    let (one, two) = nodes(&cluster);
    // This machine has no client of CephFS but the I/O nodes.
    programs_on(&one, &two, &one.at(""));
    let bytes = pattern(5, 30_000_000);
    fs::write(one.at("large"), &bytes).unwrap();
    assert!(fs::read(two.at("large")).unwrap() == bytes);
    // Programs go on writing while an OSD restarts.
    let file = OpenOptions::new().write(true).create_new(true).open(one.at("over a restart")).unwrap();
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for piece in 0..300 {
                file.write_all_at(&pattern(piece, 10_000), piece * 10_000).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            file.sync_all()
        });
        ceph.stop("osd", "1");
        ceph.restart("osd", "1");
        writer.join().unwrap()
    });
    written.unwrap();
    let want: Vec<u8> = (0..300).flat_map(|piece| pattern(piece, 10_000)).collect();
    assert!(fs::read(two.at("over a restart")).unwrap() == want);
}
