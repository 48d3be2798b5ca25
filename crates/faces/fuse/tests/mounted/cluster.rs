//! A cluster in this process and mounts of it.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use impresario_client::{Client, ClientOptions};
use impresario_config::{Cluster as Common, Config, Data, Io, Meta, Tree, TreeBackend};
use impresario_fuse::{MountOptions, Mounted, mount};
use impresario_server::Started;
use impresario_wire::Attr;
use tempfile::TempDir;

const DATA_SERVERS: usize = 4;

/// A metadata server, four data servers and perhaps I/O nodes, on Unix sockets in a temporary directory.
pub struct Cluster {
    config: Config,
    // Stopped in this order: I/O nodes first, data servers last.
    running: Mutex<Vec<Started>>,
    _dir: TempDir,
}

/// Warnings of mounts and servers go to the output of the tests: they say why a call failed that should not have.
fn show_warnings() {
    static SHOWN: Once = Once::new();
    let warnings = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false).with_test_writer();
    // Fails where a test has set another one.
    SHOWN.call_once(|| drop(warnings.try_init()));
}

impl Cluster {
    /// Starts one; `None` without `/dev/fuse`, the test is then skipped. Every call of its clients ends within `timeout`.
    pub fn start(timeout: Duration) -> Option<Arc<Cluster>> {
        Cluster::with_io_nodes(timeout, 0)
    }

    /// I/O nodes in front of a folder, nothing else.
    pub fn over(folder: &Path, io_nodes: usize, adjust: impl Fn(&mut Io)) -> Option<Arc<Cluster>> {
        let tree = Tree { folder: folder.into(), data_servers: 4, stripe_bytes: Some(64 << 10), ..Tree::default() };
        Cluster::over_tree(tree, io_nodes, adjust)
    }

    /// I/O nodes in front of a volume that a volume file describes, nothing else.
    pub fn over_volume(file: &Path, io_nodes: usize) -> Option<Arc<Cluster>> {
        let (volume, volfile) = (Some("test".into()), Some(file.into()));
        let backend = TreeBackend::Glusterfs;
        Cluster::over_tree(Tree { backend, volume, volfile, data_servers: 4, ..Tree::default() }, io_nodes, |_| {})
    }

    /// I/O nodes in front of a CephFS file system that a configuration file of Ceph's leads to, nothing else.
    pub fn over_cephfs(config: &Path, io_nodes: usize) -> Option<Arc<Cluster>> {
        let tree = Tree {
            backend: TreeBackend::Cephfs,
            ceph_config: Some(config.into()),
            data_servers: 4,
            stripe_bytes: Some(64 << 10),
            stripe_count: Some(4),
            object_bytes: Some(1 << 20),
            ..Tree::default()
        };
        Cluster::over_tree(tree, io_nodes, |_| {})
    }

    fn over_tree(tree: Tree, io_nodes: usize, adjust: impl Fn(&mut Io)) -> Option<Arc<Cluster>> {
        if !impresario_testing::require("fuse") {
            return None;
        }
        show_warnings();
        let dir = TempDir::new().unwrap();
        let socket = |name: &str| format!("unix:{}", dir.path().join(name).display());
        let mut io: Vec<Io> = (0..io_nodes).map(|i| Io::new(format!("io.{i}"), socket(&format!("io.{i}")))).collect();
        io.iter_mut().for_each(adjust);
        let config = Config { tree: Some(tree), io, ..Config::default() };
        let running =
            config.servers().map(|server| impresario_server::start(&config, server.name()).unwrap()).collect();
        Some(Arc::new(Cluster { config, running: Mutex::new(running), _dir: dir }))
    }

    pub fn with_io_nodes(timeout: Duration, io_nodes: usize) -> Option<Arc<Cluster>> {
        Cluster::with(timeout, io_nodes, |_| {})
    }

    /// One whose configuration, with sockets and folders in a folder of its own, is changed before it starts.
    pub fn with(timeout: Duration, io_nodes: usize, change: impl FnOnce(&mut Config)) -> Option<Arc<Cluster>> {
        if !impresario_testing::require("fuse") {
            return None;
        }
        show_warnings();
        let dir = match std::env::var_os("IMPRESARIO_TEST_DIR") {
            Some(parent) => TempDir::new_in(parent).unwrap(),
            None => TempDir::new().unwrap(),
        };
        let socket = |name: &str| format!("unix:{}", dir.path().join(name).display());
        let directory = |name: &str| dir.path().join(format!("{name}.dir"));
        let data = (0..DATA_SERVERS).map(|i| {
            let name = format!("data.{i}");
            Data::new(&name, socket(&name), directory(&name))
        });
        let io = (0..io_nodes).map(|i| Io::new(format!("io.{i}"), socket(&format!("io.{i}"))));
        let mut config = Config {
            cluster: Common { request_timeout_ms: timeout.as_millis() as u64, ..Common::default() },
            meta: Meta {
                address: socket("meta"),
                dir: directory("meta"),
                lock_lease_ms: Some(4000),
                ..Meta::default()
            },
            data: data.collect(),
            io: io.collect(),
            ..Config::default()
        };
        change(&mut config);
        impresario_server::folders::make_all(&config).unwrap();
        let mut running: Vec<Started> =
            config.servers().map(|server| impresario_server::start(&config, server.name()).unwrap()).collect();
        running.reverse();
        Some(Arc::new(Cluster { config, running: Mutex::new(running), _dir: dir }))
    }

    /// Its own client.
    pub fn client(&self) -> Arc<Client> {
        self.client_through(0)
    }

    /// A client through another I/O node.
    pub fn client_through(&self, node: u64) -> Arc<Client> {
        let options =
            ClientOptions { job: 1, user: 0, name: "test".into(), placement_seed: node, ..ClientOptions::default() };
        Client::connect(&self.config, options).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A node with its own client and mount.
    pub fn mount(self: &Arc<Cluster>, options: MountOptions) -> Node {
        self.mount_through(0, options)
    }

    /// The same through another I/O node.
    pub fn mount_through(self: &Arc<Cluster>, node: u64, options: MountOptions) -> Node {
        let directory = TempDir::new().unwrap();
        let mounted =
            mount(self.client_through(node), directory.path(), options).unwrap_or_else(|error| panic!("{error}"));
        Node { mounted, directory, cluster: self.clone() }
    }

    /// The files of all objects that have bytes, in the data servers' folders.
    pub fn objects(&self) -> Vec<PathBuf> {
        let inside = |folder: PathBuf| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let all = self.config.data.iter().flat_map(|data| inside(data.dir.join("objects"))).flat_map(inside);
        all.filter(|path| fs::metadata(path).unwrap().len() > 0).collect()
    }

    /// The folder of the metadata server.
    pub fn meta_folder(&self) -> PathBuf {
        self.config.meta.dir.clone()
    }

    /// The folder of a data server.
    pub fn data_folder(&self, index: usize) -> PathBuf {
        self.config.data[index].dir.clone()
    }

    pub fn stop_data_server(&self, index: usize) {
        self.stop(&format!("data.{index}"));
    }

    pub fn start_data_server(&self, index: usize) {
        self.start_again(&format!("data.{index}"));
    }

    pub fn start_again(&self, name: &str) {
        let started = impresario_server::start(&self.config, name).unwrap();
        self.running.lock().unwrap().push(started);
    }

    pub fn stop_meta_server(&self) {
        self.stop("meta");
    }

    pub fn stop(&self, name: &str) {
        let mut running = self.running.lock().unwrap();
        let place = running.iter().position(|server| server.name() == name).unwrap();
        running.remove(place).stop();
    }
}

/// What six threads get at once, three on each node.
pub fn six_at_once<T: Send>(nodes: [&Node; 2], work: impl Fn(&Node, usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|i| {
                scope.spawn({
                    let work = &work;
                    move || work(nodes[i % 2], i)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A mount. To the kernel and the cluster it is a machine of its own.
pub struct Node {
    // Unmounted before its directory and the cluster go.
    mounted: Mounted,
    directory: TempDir,
    cluster: Arc<Cluster>,
}

impl Node {
    /// The path of a name on this mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn mount_point(&self) -> &Path {
        self.directory.path()
    }

    pub fn mounted(&self) -> &Mounted {
        &self.mounted
    }

    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Another node on the same cluster.
    pub fn second(&self, options: MountOptions) -> Node {
        self.cluster.mount(options)
    }

    /// Drops the mount, keeps its directory.
    pub fn keep_directory(self) -> TempDir {
        drop(self.mounted);
        self.directory
    }

    /// Up to `len` bytes of a file as a client without a mount reads them.
    pub fn read_past_the_mount(&self, name: &str, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let file = self.cluster.client().open(name, false).unwrap();
        let got = file.read_at(&mut bytes, 0).unwrap();
        bytes.truncate(got);
        file.close().unwrap();
        bytes
    }

    /// Attributes as a client without a mount sees them.
    pub fn stat_past_the_mount(&self, name: &str) -> Attr {
        self.cluster.client().stat(name).unwrap()
    }

    /// Lets other users enter the root of the file system.
    pub fn open_the_way(&self) {
        fs::set_permissions(self.mount_point(), fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// A fresh cluster with one mount.
pub fn mounted() -> Option<Node> {
    mounted_with(MountOptions::default())
}

pub fn mounted_with(options: MountOptions) -> Option<Node> {
    Some(Cluster::start(Duration::from_secs(20))?.mount(options))
}

/// The errno of a call that must fail.
pub fn errno<T>(result: io::Result<T>) -> i32 {
    match result {
        Ok(_) => panic!("it succeeded"),
        Err(error) => error.raw_os_error().unwrap_or(0),
    }
}
