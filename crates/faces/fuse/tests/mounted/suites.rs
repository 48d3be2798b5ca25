//! Other people's suites, which take minutes: `make soak` runs them.

use std::collections::BTreeMap;
use std::time::Duration;

use impresario_fuse::MountOptions;
use impresario_testing::require;
use impresario_testing::suites::{Fsx, Outcome, pjdfstest};

use crate::cluster::{Cluster, Node};

/// Tests of pjdfstest that fail, and why that is so (doc/SEMANTICS.md).
const CHANGE_TIME: &str =
    "closing a file that was open for writing moves its change time, and comes after the reply to `close`";
const FAILING: [(&str, &str); 2] =
    [("link::unchanged_ctime_fails::regular", CHANGE_TIME), ("truncate::unchanged_ctime_failed", CHANGE_TIME)];

fn is_there(program: &str) -> bool {
    require("root") && require(program)
}

#[track_caller]
fn pjdfstest_on(node: &Node, failing: &[(&str, &str)]) {
    node.open_the_way();
    let outcomes = pjdfstest(node.mount_point());
    let count = |outcome| outcomes.values().filter(|found| **found == outcome).count();
    let (passed, failed, skipped) = (count(Outcome::Passed), count(Outcome::Failed), count(Outcome::Skipped));
    println!("pjdfstest: {passed} passed, {failed} failed, {skipped} skipped");
    let expected: BTreeMap<&str, &str> = failing.iter().copied().collect();
    let found = outcomes.iter().filter(|(_, outcome)| **outcome == Outcome::Failed).map(|(name, _)| name.as_str());
    let unexpected: Vec<&str> = found.filter(|name| !expected.contains_key(name)).collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
}

#[test]
#[ignore = "takes minutes: make soak"]
fn pjdfstest_passes_but_for_what_is_explained() {
    if !is_there("pjdfstest") {
        return;
    }
    for io_nodes in [0, 2] {
        let Some(cluster) = Cluster::with_io_nodes(Duration::from_secs(20), io_nodes) else { return };
        pjdfstest_on(&cluster.mount(MountOptions { allow_other: true, ..MountOptions::default() }), &FAILING);
    }
}

#[test]
#[ignore = "takes minutes: make soak"]
fn pjdfstest_passes_in_a_folder_behind_io_nodes() {
    if !is_there("pjdfstest") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(cluster) = Cluster::over(folder.path(), 2, |_| {}) else { return };
    pjdfstest_on(&cluster.mount(MountOptions { allow_other: true, ..MountOptions::default() }), &[]);
}

/// Two nodes at once, on different files.
#[test]
#[ignore = "takes minutes: make soak"]
fn fsx_finds_nothing() {
    if !require("fsx") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let clusters = [
        Cluster::with_io_nodes(Duration::from_secs(20), 0),
        Cluster::with_io_nodes(Duration::from_secs(20), 2),
        Cluster::over(folder.path(), 2, |_| {}),
    ];
    for cluster in clusters {
        let Some(cluster) = cluster else { return };
        for direct_io in [false, true] {
            let options = || MountOptions { direct_io, ..MountOptions::default() };
            let nodes = [cluster.mount_through(0, options()), cluster.mount_through(1, options())];
            std::thread::scope(|scope| {
                for seed in 1..=4 {
                    let file = nodes[seed as usize % 2].at(&format!("fsx{direct_io}{seed}"));
                    scope.spawn(move || Fsx { maps: true, space: true, copies: true }.run(&file, seed, 4000));
                }
            });
        }
    }
}
