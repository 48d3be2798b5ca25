//! A CephFS file system as a backend, through libcephfs: a cluster on this machine.

use std::time::{Duration, Instant};

use impresario_backend::cephfs::{Options, Source, Striping};
use impresario_backend::suite::Suite;
use impresario_backend::{Backend, Caller, CephTree, Errno, Handle, Make, SetAttr};
use impresario_testing::ceph::CephCluster;

fn root() -> Caller {
    Caller { uid: 0, gid: 0, groups: vec![] }
}

fn source(cluster: &CephCluster) -> Source {
    Source { config: Some(cluster.config()), ..Source::default() }
}

/// Few large objects: a file that is cut from a great length has each of them removed by itself.
const LARGE: Striping = Striping { unit_bytes: 64 << 20, count: 1, object_bytes: 64 << 20 };

#[test]
fn a_cluster() {
    let started = Instant::now();
    let Some(mut cluster) = CephCluster::start(4) else { return };
    println!("{:?} started", started.elapsed());
    let options = Options { striping: Some(LARGE), ..Options::default() };
    let tree = CephTree::open(&source(&cluster), options).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while tree.space(&tree.root().unwrap()).unwrap().total_bytes == 0 {
        assert!(Instant::now() < deadline, "the manager reports no space");
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("{:?} space", started.elapsed());
    Suite { backend: &tree, caller: root(), others: true, earlier_times: true, entries: 100 }.run();
    println!("{:?} suite", started.elapsed());
    drop(tree);
    let _ = &mut cluster;
}
