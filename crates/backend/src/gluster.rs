//! A GlusterFS volume, reached through its own client library (libgfapi) without a mount.
//!
//! Every call carries its caller's user and groups to the bricks, whose `features/access-control` checks them, as for any
//! client; a brick where that translator is missing, or does not look, lets everyone do everything. Handles are GlusterFS's own permanent names of
//! nodes (GFIDs), so they outlive restarts of the server and mean the same to every I/O node. Directories of the volume
//! that its clients do not see (`.shard`) have well-known names of that kind, which are refused; all others are random.
//!
//! What is special here:
//! - The volume's caches (`performance/write-behind` and its kind) are switched off: what is written is with a brick when
//!   the call returns, and what other clients changed is seen.
//! - A file that a caller has opened stays open for that caller until it is idle for [`Options::idle`]; rights that are
//!   withdrawn through this backend count at once, others' changes by then.
//! - A name can be replaced but not given only where there is none: [`rename_new`](crate::Backend::rename_new) is `EINVAL`.
//! - Of a file in shards GlusterFS shows a client the latest modification time that this client has seen: one that is set to
//!   an earlier time is on the brick, and shown once the client has forgotten the file.
//! - Set-user-id and set-group-id of a file go when it is opened for a user to write; others' changes of them while it is open stay.
//! - The library has no call that makes the names of a directory durable; they are as durable as the bricks' file systems
//!   make them.
//! - A brick that is away is `EIO`, at the latest after the volume's `network.ping-timeout` or, where it hangs but answers
//!   the network, `network.frame-timeout`.

mod api;
mod calls;
mod data;
mod graph;
pub(crate) mod pathinfo;
mod placement;
mod volume;

use std::sync::Arc;
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_base::siphash::siphash;

use crate::callers::Callers;
use crate::idle::IdleThread;
use crate::losses::Losses;
use crate::nodes::{self, Descriptors};
use crate::{Attr, Caller, Errno, Handle, Kind, Result};
use placement::Bricks;
pub use volume::Source;
use volume::{Descriptor, Gfid, Object, Volume};

/// First byte of a handle, which no other backend uses.
const HANDLE: u8 = 3;
/// `/.shard` and what is being removed of it, whose names are the same in every volume.
const HIDDEN: [u128; 2] = [0xbe318638_e8a0_4c6d_977d_7a937aa84806, 0x77dd5a45_dbf5_4592_b31b_b440382302e9];
/// The last of the names that GlusterFS keeps for itself; the first of them is the root.
const RESERVED_MAX: u128 = 0xff;
const ROOT: u128 = 1;

/// How a volume is served.
#[derive(Debug, Clone)]
pub struct Options {
    /// Nodes and open files that are kept at a time, about.
    pub descriptors_max: usize,
    /// They are let go of when they were not used for that long.
    pub idle: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { descriptors_max: 65_536, idle: Duration::from_secs(10) }
    }
}

/// Why a volume cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The library, or the volume, cannot be had.
    #[error("cannot open the GlusterFS volume {volume} {}: {reason}", of(source_of_volume))]
    Volume {
        /// The volume.
        volume: String,
        /// Where it is described.
        source_of_volume: Source,
        /// Why, and the remedy.
        reason: String,
    },
    /// No thread that closes idle descriptors.
    #[error("cannot start a thread: {0}; raise the limit (ulimit -u)")]
    Thread(std::io::Error),
}

fn of(source: &Source) -> String {
    match source {
        Source::Server { host, .. } => format!("of {host}"),
        Source::File(file) => format!("of the volume file {}", file.display()),
    }
}

/// A volume as a backend.
pub struct GlusterVolume {
    /// Before the rest, which its thread uses.
    _idle: IdleThread,
    shared: Arc<Shared>,
}

/// The descriptors of the library.
struct Files;

type Node = nodes::Node<Files>;
type Open = nodes::Open<Files>;

/// What names a node.
struct Name {
    object: Object,
    gfid: Gfid,
    /// While the node is held: what keeps a file when its last name goes.
    kept: Mutex<Option<Arc<Descriptor>>>,
    /// Of a file in shards: held over each write. GlusterFS keeps the length of such a file by adding to it what each write
    /// adds, and counts wrong where writes of one client overtake one another.
    writing: Mutex<()>,
}

impl Descriptors for Files {
    type Name = Name;
    type Open = Arc<Descriptor>;

    fn sync(open: &Arc<Descriptor>) -> Result<()> {
        // What was written through a descriptor that is lost may be lost too.
        open.sync().map_err(|error| if error == Errno(libc::EBADF) { Errno(libc::EIO) } else { error })
    }
}

/// What the calls share.
struct Shared {
    volume: Arc<Volume>,
    bricks: Bricks,
    root: Handle,
    fsid: u64,
    nodes: nodes::Nodes<Files>,
    losses: Arc<Losses>,
    callers: Callers,
    options: Options,
}

impl GlusterVolume {
    /// Serves a volume; `name` is what `glusterd` calls it, and only a label where a volume file describes it.
    pub fn open(name: &str, source: &Source, options: Options) -> std::result::Result<GlusterVolume, OpenError> {
        let failed =
            |reason: String| OpenError::Volume { volume: name.into(), source_of_volume: source.clone(), reason };
        let caches = match source {
            Source::Server { .. } => graph::Caches::Usual,
            Source::File(file) => {
                let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
                graph::Caches::of(&text)
            }
        };
        let own = Caller {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: rustix::process::getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()).collect(),
        };
        let volume = Arc::new(Volume::open(name, source, &caches, own).map_err(failed)?);
        // The library says that it is there before every brick is.
        let (_, _) = volume.root().map_err(|error| failed(format!("its root cannot be read: {error}")))?;
        let losses = Arc::new(Losses::default());
        let shared = Arc::new(Shared {
            bricks: Bricks::of(&volume, volume.describe().as_deref()),
            volume,
            root: handle_of(ROOT.to_be_bytes()),
            fsid: siphash(&[0; 16], name.as_bytes()),
            nodes: nodes::Nodes::new(options.descriptors_max.max(16), losses.clone()),
            losses,
            callers: Callers::default(),
            options,
        });
        let idle = IdleThread::start("volume idle", shared.options.idle, {
            let shared = shared.clone();
            move || {
                shared.nodes.close_idle(shared.options.idle);
                shared.bricks.is_described(shared.volume.describe().as_deref());
            }
        });
        Ok(GlusterVolume { _idle: idle.map_err(OpenError::Thread)?, shared })
    }

    /// Bricks of the volume; of those that replicate one another each counts.
    pub fn bricks(&self) -> usize {
        self.shared.bricks.count()
    }

    /// Nodes and open files that are kept now.
    pub fn descriptors(&self) -> usize {
        self.shared.nodes.count()
    }

    /// Files of which written bytes may be lost, since the server started.
    pub fn losses(&self) -> usize {
        self.shared.losses.count()
    }

    /// Begins to let go of everything that is not in use or held, as idleness would.
    pub fn close_all(&self) {
        self.shared.nodes.close_all();
    }
}

fn handle_of(gfid: Gfid) -> Handle {
    let mut bytes = [HANDLE; 17];
    bytes[1..].copy_from_slice(&gfid);
    Handle::of(&bytes)
}

/// The permanent name that a handle carries; `ESTALE` where it is none, or that of something hidden.
fn gfid_of(handle: &Handle) -> Result<Gfid> {
    let gfid = match handle.as_bytes() {
        [HANDLE, gfid @ ..] => Gfid::try_from(gfid).ok(),
        _ => None,
    };
    let hidden = |gfid: &Gfid| {
        let number = u128::from_be_bytes(*gfid);
        HIDDEN.contains(&number) || (number <= RESERVED_MAX && number != ROOT)
    };
    gfid.filter(|gfid| !hidden(gfid)).ok_or(Errno(libc::ESTALE))
}

/// Why a call on a node that was found before failed: what is not there any more is gone.
fn stale(error: Errno) -> Errno {
    if error == Errno(libc::ENOENT) { Errno(libc::ESTALE) } else { error }
}

impl Shared {
    /// The node of a handle.
    fn node(&self, handle: &Handle) -> Result<Arc<Node>> {
        if let Some(node) = self.nodes.get(handle) {
            return if node.is_gone() { Err(Errno(libc::ESTALE)) } else { Ok(node) };
        }
        let found = self.volume.by_gfid(gfid_of(handle)?);
        let (object, stat) = found.map_err(|error| match error.0 {
            // What was never a name of a node in this volume is told as one of these.
            libc::ENOENT | libc::EINVAL => Errno(libc::ESTALE),
            _ => error,
        })?;
        Ok(self.enter(object, &stat)?.0)
    }

    fn directory(&self, handle: &Handle) -> Result<Arc<Node>> {
        let node = self.node(handle)?;
        if node.kind == Kind::Directory { Ok(node) } else { Err(Errno(libc::ENOTDIR)) }
    }

    /// Takes a node that was just found into use.
    fn enter(&self, object: Object, stat: &libc::stat) -> Result<(Arc<Node>, Attr)> {
        let (attr, gfid) = (self.attr_of(stat)?, object.gfid()?);
        let handle = handle_of(gfid);
        gfid_of(&handle)?;
        let name = Name { object, gfid, kept: Mutex::default(), writing: Mutex::default() };
        Ok((self.nodes.insert(handle, name, attr.fileid, attr.kind), attr))
    }

    /// A node's attributes now.
    fn see(&self, node: &Node) -> Result<Attr> {
        // What keeps a held file knows it also without a name.
        let kept = node.fd.kept.lock().clone();
        let stat = match kept.map(|kept| kept.stat()) {
            Some(Err(Errno(libc::EBADF))) | None => node.fd.object.stat(),
            Some(stat) => stat,
        };
        self.attr_of(&stat.map_err(stale)?)
    }

    fn attr_of(&self, stat: &libc::stat) -> Result<Attr> {
        let unsigned = |number: i64| u64::try_from(number).unwrap_or(0);
        Ok(Attr {
            kind: crate::rules::kind_of(stat.st_mode)?,
            mode: stat.st_mode & 0o7777,
            links: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
            uid: stat.st_uid,
            gid: stat.st_gid,
            size_bytes: unsigned(stat.st_size),
            used_bytes: unsigned(stat.st_blocks).saturating_mul(512),
            device: (libc::major(stat.st_rdev), libc::minor(stat.st_rdev)),
            fsid: self.fsid,
            fileid: stat.st_ino,
            atime: crate::rules::time_of(stat.st_atime, stat.st_atime_nsec),
            mtime: crate::rules::time_of(stat.st_mtime, stat.st_mtime_nsec),
            ctime: crate::rules::time_of(stat.st_ctime, stat.st_ctime_nsec),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_permanent_names_and_hidden_ones_are_refused() {
        let gfid: Gfid = std::array::from_fn(|n| n as u8 + 40);
        let handle = handle_of(gfid);
        assert_eq!(gfid_of(&handle), Ok(gfid));
        assert_eq!(gfid_of(&handle_of(ROOT.to_be_bytes())), Ok(ROOT.to_be_bytes()));
        let refused = |bytes: &[u8]| assert_eq!(gfid_of(&Handle::new(bytes).unwrap()), Err(Errno(libc::ESTALE)));
        for n in 0..17 {
            refused(&handle.as_bytes()[..n]);
        }
        refused(&[HANDLE; 18]);
        refused(&[1; 17]);
        for number in HIDDEN.into_iter().chain([0, 2, 5, 6, RESERVED_MAX]) {
            refused(handle_of(number.to_be_bytes()).as_bytes());
        }
    }
}
