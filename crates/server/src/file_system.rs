//! File systems of other makers, opened as a section `[tree]` says: for I/O nodes, and for exports over NFS.

use std::sync::Arc;
use std::time::Duration;

use impresario_backend::gluster::Source;
use impresario_backend::posix::Calls;
use impresario_backend::{Backend, CephTree, GlusterVolume, PosixTree, cephfs};
use impresario_config::{Tree, TreeBackend, TreeIo};
use impresario_layout::Layout;
use serde_json::{Value, json};

/// Why a file system cannot be opened: one line with the remedy.
pub type OpenError = Box<dyn std::error::Error + Send + Sync>;

/// What a server asks of a file system beside what the section says.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// How long a call may take that can be ended; `None`: as long as the backend lets it.
    pub patience: Option<Duration>,
    /// The server's name in a file system that tells its clients apart, the same after a restart; no other server of this
    /// machine has it. What an earlier run has left there is ended.
    pub identity: Option<String>,
}

/// A file system that is opened.
pub struct FileSystem {
    /// The file system.
    pub backend: Arc<dyn Backend>,
    /// What `status` says of it.
    pub describe: Box<dyn Fn() -> Value + Send + Sync>,
}

impl FileSystem {
    /// Opens one.
    pub fn open(tree: &Tree, settings: Settings) -> Result<FileSystem, OpenError> {
        match tree.backend {
            TreeBackend::Posix => folder(tree, settings),
            TreeBackend::Glusterfs => volume(tree),
            TreeBackend::Cephfs => cephfs(tree, settings),
        }
    }
}

fn folder(tree: &Tree, settings: Settings) -> Result<FileSystem, OpenError> {
    let striping = tree.stripe_bytes.map(|bytes| {
        let count = tree.stripe_count.unwrap_or(tree.data_servers);
        Layout::new(0, count, bytes, tree.data_servers)
    });
    let default = impresario_backend::posix::Options::default();
    let options = impresario_backend::posix::Options {
        striping: striping.transpose()?,
        data_servers: tree.data_servers,
        calls: match tree.io.unwrap_or_default() {
            TreeIo::Auto => Calls::Auto,
            TreeIo::Uring => Calls::Uring,
            TreeIo::Threads => Calls::Threads,
        },
        direct: tree.direct.unwrap_or(false),
        patience: settings.patience.unwrap_or(default.patience),
        ..default
    };
    let posix = Arc::new(PosixTree::open(&tree.folder, options)?);
    let (described, folder) = (posix.clone(), tree.folder.display().to_string());
    let describe = Box::new(move || {
        let io = described.io();
        json!({
            "backend": "posix",
            "folder": folder,
            "direct": io.direct,
            "ring": io.ring.map(|ring| json!({
                "pieces": ring.pieces,
                "free_pieces": ring.free_pieces,
                "piece_bytes": ring.piece_bytes,
                "transfers": ring.transfers,
                "unserved_calls": ring.unserved,
                "reads_left": ring.left,
            })),
            "no_ring": io.no_ring,
            "permanent_handles": described.has_permanent_handles(),
            "descriptors": described.descriptors(),
            "files_with_losses": described.losses(),
        })
    });
    Ok(FileSystem { backend: posix, describe })
}

fn volume(tree: &Tree) -> Result<FileSystem, OpenError> {
    let name = tree.volume.clone().unwrap_or_default();
    let source = match (tree.volume_server(), &tree.volfile) {
        (Some((host, port)), _) => Source::Server { host: host.into(), port },
        (None, Some(file)) => Source::File(file.clone()),
        (None, None) => return Err("the configuration names neither a server nor a volfile of the volume".into()),
    };
    let volume = Arc::new(GlusterVolume::open(&name, &source, Default::default())?);
    let described = volume.clone();
    let describe = Box::new(move || {
        json!({
            "backend": "glusterfs",
            "volume": name,
            "bricks": described.bricks(),
            "permanent_handles": true,
            "descriptors": described.descriptors(),
            "files_with_losses": described.losses(),
        })
    });
    Ok(FileSystem { backend: volume, describe })
}

fn cephfs(tree: &Tree, settings: Settings) -> Result<FileSystem, OpenError> {
    let source = cephfs::Source {
        config: tree.ceph_config.clone(),
        user: tree.user.clone(),
        filesystem: tree.filesystem.clone(),
        folder: tree.folder.clone(),
    };
    let striping = tree.stripe_bytes.map(|unit_bytes| cephfs::Striping {
        unit_bytes,
        count: tree.stripe_count.unwrap_or(tree.data_servers),
        object_bytes: tree.object_bytes.unwrap_or(Tree::OBJECT_DEFAULT_BYTES),
    });
    let host = rustix::system::uname();
    let default = cephfs::Options::default();
    let options = cephfs::Options {
        timeout: settings.patience.unwrap_or(default.timeout),
        striping,
        identity: settings.identity.map(|own| format!("impresario {} {own}", host.nodename().to_string_lossy())),
        ..default
    };
    let ceph = Arc::new(CephTree::open(&source, options)?);
    let (described, filesystem, folder) = (ceph.clone(), tree.filesystem.clone(), tree.folder.display().to_string());
    let describe = Box::new(move || {
        json!({
            "backend": "cephfs",
            "filesystem": filesystem,
            "folder": folder,
            "permanent_handles": true,
            "descriptors": described.descriptors(),
            "files_with_losses": described.losses(),
            "hung_calls": described.hung(),
            "mounts": described.mounts(),
        })
    });
    Ok(FileSystem { backend: ceph, describe })
}
