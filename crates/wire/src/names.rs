//! What the metadata server is asked about the name space, and what it keeps.

use impresario_layout::Layout;
use serde::{Deserialize, Serialize};

use crate::locks::LockCall;
use crate::message::FileKey;
#[cfg(doc)]
use crate::message::{Answer, ObjectInfo};
use crate::relay::RelayCall;

/// What a metadata call acts on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Target {
    /// A path from the root of the name space: components separated by `/`, no leading `/`; the root is empty.
    /// The server follows no symbolic link; the client that resolves the path does.
    Path(Vec<u8>),
    /// An open file.
    Handle(u64),
}

/// Attributes to change; `None` leaves one as it is.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Permission bits that are taken off those that a regular file has, in one step; `EINVAL` beside `mode` and for other
    /// nodes. Who may write a file may take its set-user-id and set-group-id.
    pub takes: u32,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length, bytes; cuts or extends the objects too.
    pub size: Option<u64>,
    /// Access time.
    pub atime: Option<SetTime>,
    /// Modification time.
    pub mtime: Option<SetTime>,
}

/// A time to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SetTime {
    /// The server's present time.
    Now,
    /// A given time.
    At(Time),
}

/// A point of calendar time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug, Serialize, Deserialize)]
pub struct Time {
    /// Seconds since 1970-01-01 UTC.
    pub secs: i64,
    /// Nanoseconds, 0 to 999,999,999.
    pub nanos: u32,
}

/// A request to the metadata server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MetaCall {
    /// Attributes. Answer: [`Answer::Attr`].
    GetAttr {
        /// Of what.
        target: Target,
    },
    /// Changes attributes. Answer: [`Answer::Attr`], or [`Answer::Cut`] where data servers have changed the length.
    SetAttr {
        /// Of what.
        target: Target,
        /// The changes.
        set: SetAttr,
    },
    /// Makes a file and opens it for reading and writing. Answer: [`Answer::Opened`].
    Create {
        /// Path.
        path: Vec<u8>,
        /// Permission bits, and what is taken off them ([`with_umask`]).
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Fail when it exists; otherwise an existing file is opened.
        exclusive: bool,
        /// How to stripe it; `None`: as its directory says.
        layout: Option<LayoutRequest>,
    },
    /// Opens a file. Answer: [`Answer::Opened`].
    Open {
        /// Path.
        path: Vec<u8>,
        /// For writing too. The server tracks writers to know who holds the size.
        write: bool,
    },
    /// After a lost connection or a restarted server: registers a file that this client had open. Answer: [`Answer::Opened`].
    Reopen {
        /// The path it was opened by, or was last renamed to by this client.
        path: Vec<u8>,
        /// Its key; tells it from another file of that name.
        file: FileKey,
        /// It was open for writing.
        write: bool,
    },
    /// Ends an open. Answer: [`Answer::Done`].
    Close {
        /// The open file.
        handle: u64,
        /// Through this open, bytes or the length of the file were changed, or that was tried.
        wrote: bool,
    },
    /// Makes a file's size, attributes and name durable (its data are the data servers' matter). Answer: [`Answer::Done`].
    Fsync {
        /// The open file.
        handle: u64,
    },
    /// Makes the names in a directory durable. Answer: [`Answer::Done`].
    FsyncDir {
        /// Path.
        path: Vec<u8>,
    },
    /// Makes a directory. Answer: [`Answer::Attr`].
    Mkdir {
        /// Path.
        path: Vec<u8>,
        /// Permission bits, and what is taken off them ([`with_umask`]).
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// Removes an empty directory. Answer: [`Answer::Done`].
    Rmdir {
        /// Path.
        path: Vec<u8>,
    },
    /// Removes a name; the objects go with the last name and the last open. Answer: [`Answer::Removed`], or [`Answer::Done`]
    /// when the server cannot say how many names are left.
    Unlink {
        /// Path.
        path: Vec<u8>,
    },
    /// Renames, atomically replacing what was there. To another name of the same node: changes nothing. Answer:
    /// [`Answer::Removed`] of what was replaced, or [`Answer::Done`] when nothing was or the server cannot say.
    Rename {
        /// Old path.
        from: Vec<u8>,
        /// New path.
        to: Vec<u8>,
        /// Fail when the new name exists.
        no_replace: bool,
        /// Leave a character device 0/0 at the old path, in the same step. EINVAL: the server cannot.
        whiteout: bool,
    },
    /// Assigns the next `len_bytes` behind the end of a file that is open for writing to the caller, who writes them itself.
    /// Copies of the call get the same range. EOPNOTSUPP: the server cannot. Answer: [`Answer::Assigned`].
    Append {
        /// From [`Opened`].
        handle: u64,
        /// How many.
        len_bytes: u64,
    },
    /// Exchanges what two paths name, in one step; both exist. Two names of one node: changes nothing. Answer:
    /// [`Answer::Done`].
    Exchange {
        /// One path.
        from: Vec<u8>,
        /// The other path.
        to: Vec<u8>,
    },
    /// Makes a symbolic link. Answer: [`Answer::Attr`].
    Symlink {
        /// Path of the link.
        path: Vec<u8>,
        /// What it says.
        target: Vec<u8>,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// Makes a pipe, a socket or a device. Answer: [`Answer::Attr`].
    Mknod {
        /// Path.
        path: Vec<u8>,
        /// What to make: no file, directory or symbolic link.
        kind: NodeKind,
        /// Permission bits, and what is taken off them ([`with_umask`]).
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// Reads a symbolic link. Answer: [`Answer::Link`].
    Readlink {
        /// Path.
        path: Vec<u8>,
    },
    /// A slice of a directory, with attributes. Answer: [`Answer::Entries`].
    Readdir {
        /// Path.
        path: Vec<u8>,
        /// Resume after this name; empty: from the start. Names come in byte order.
        after: Vec<u8>,
        /// Maximum entries (the server may give fewer, but at least one).
        max: u32,
    },
    /// Totals over the data servers. Answer: [`Answer::Statfs`].
    Statfs,
    /// How files made in a directory will be striped. Answer: [`Answer::Done`].
    SetLayout {
        /// Path of the directory.
        path: Vec<u8>,
        /// `None`: as its parent says.
        layout: Option<LayoutRequest>,
    },
    /// An extended attribute (ENODATA: there is none). Answer: [`Answer::Xattr`].
    GetXattr {
        /// Of what.
        target: Target,
        /// Its name, with its name space: `user.` or `security.` and more, or [`ACL_ACCESS`] or [`ACL_DEFAULT`].
        name: Vec<u8>,
    },
    /// The names of all extended attributes. Answer: [`Answer::Xattr`], each name with a NUL byte behind it.
    ListXattr {
        /// Of what.
        target: Target,
    },
    /// Sets or removes an extended attribute. ENOSPC: beyond [`XATTRS_MAX_BYTES`]. An access control list changes the permission
    /// bits too. Answer: [`Answer::Done`].
    SetXattr {
        /// Of what.
        target: Target,
        /// Its name, with its name space.
        name: Vec<u8>,
        /// Its value; `None`: it is removed (ENODATA: there is none).
        value: Option<Vec<u8>>,
        /// Whether it may, or must, be there before; of no meaning for a removal.
        mode: XattrMode,
    },
    /// Gives a node another name (EPERM: it is a directory; EMLINK: beyond [`LINKS_MAX`], or what the file system below
    /// takes). Answer: [`Answer::Attr`].
    Link {
        /// Path of the node.
        from: Vec<u8>,
        /// The new path; what is there stays (EEXIST).
        to: Vec<u8>,
    },
    /// Looks at what the metadata server knows, for a check of the cluster; changes nothing. Answer: [`Answer::Examined`].
    Examine(Examine),
    /// Locks of byte ranges. EOPNOTSUPP: the server keeps none. Answer: [`Answer::Lock`].
    Lock(LockCall),
    /// A write up to `end` has failed: cuts the file to `len`, unless it ends elsewhere, or another open may have written it
    /// while this one did. EOPNOTSUPP: the server does not know. Answer: [`Answer::Done`], also when nothing was cut.
    CutBack {
        /// From [`Opened`].
        handle: u64,
        /// The length without what the write added.
        len: u64,
        /// Where the write ended.
        end: u64,
    },
    /// A step of laying a file out anew over other data servers. Answer: [`Answer::Relaid`].
    Relay(RelayCall),
    /// From an I/O node, before any other call of a client: as whom the client's users act from now on. Answer:
    /// [`Answer::Done`].
    Restrict(Restriction),
    /// A user of a client under [`Restriction::proves`] proves itself; calls under its number are then served for a while. EACCES:
    /// the credential is not accepted. Answer: [`Answer::Done`].
    Prove {
        /// A credential of MUNGE for connections of the client.
        credential: Vec<u8>,
    },
    /// To an I/O node in front of a folder: puts all that was written through it on stable storage, files that are closed by now
    /// too. EBUSY: it is doing so for another client, or has not done so within 5 s, or half of `request_timeout_ms` if that is less.
    /// EOPNOTSUPP: the server is no such node. Answer: [`Answer::AllSynced`].
    SyncAll,
}

/// What the users of a client are to the server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Restriction {
    /// As whom they act, or root alone if the others prove themselves; `None`: as themselves.
    pub squashed: Option<Squashed>,
    /// Each user other than root ([`Who::user`](crate::Who::user)) has to prove itself ([`MetaCall::Prove`]), and then acts as that.
    pub proves: bool,
    /// The users that may prove themselves, as ranges of numbers, first and last; empty: all.
    pub uids: Vec<(u32, u32)>,
}

impl Restriction {
    /// Whether this user may prove itself.
    pub fn admits(&self, uid: u32) -> bool {
        self.uids.is_empty() || self.uids.iter().any(|(first, last)| (*first..=*last).contains(&uid))
    }
}

/// As whom the users of a client act.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Squashed {
    /// All act as this user; otherwise root alone.
    pub all: bool,
    /// It is no anonymous user but one who has proved to be that: its further groups count.
    pub proven: bool,
    /// The user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// The paths of a call on names, shared or to be changed.
macro_rules! paths_of {
    ($call:expr) => {
        match $call {
            MetaCall::Examine(Examine::Directory { path, .. } | Examine::File { path })
            | MetaCall::Relay(RelayCall::Begin { path })
            | MetaCall::GetAttr { target: Target::Path(path) }
            | MetaCall::SetAttr { target: Target::Path(path), .. }
            | MetaCall::GetXattr { target: Target::Path(path), .. }
            | MetaCall::ListXattr { target: Target::Path(path) }
            | MetaCall::SetXattr { target: Target::Path(path), .. }
            | MetaCall::Create { path, .. }
            | MetaCall::Open { path, .. }
            | MetaCall::Reopen { path, .. }
            | MetaCall::FsyncDir { path }
            | MetaCall::Mkdir { path, .. }
            | MetaCall::Rmdir { path }
            | MetaCall::Unlink { path }
            | MetaCall::Symlink { path, .. }
            | MetaCall::Mknod { path, .. }
            | MetaCall::Readlink { path }
            | MetaCall::Readdir { path, .. }
            | MetaCall::SetLayout { path, .. } => [Some(path), None],
            MetaCall::Rename { from, to, .. } | MetaCall::Exchange { from, to } | MetaCall::Link { from, to } => {
                [Some(from), Some(to)]
            }
            MetaCall::Examine(Examine::Unnamed { .. } | Examine::BeginWalk | Examine::EndWalk { .. })
            | MetaCall::Relay(RelayCall::Commit { .. } | RelayCall::Emptied { .. })
            | MetaCall::GetAttr { target: Target::Handle(_) }
            | MetaCall::SetAttr { target: Target::Handle(_), .. }
            | MetaCall::GetXattr { target: Target::Handle(_), .. }
            | MetaCall::ListXattr { target: Target::Handle(_) }
            | MetaCall::SetXattr { target: Target::Handle(_), .. }
            | MetaCall::Close { .. }
            | MetaCall::Fsync { .. }
            | MetaCall::Append { .. }
            | MetaCall::CutBack { .. }
            | MetaCall::Lock(_)
            | MetaCall::Restrict(_)
            | MetaCall::Prove { .. }
            | MetaCall::SyncAll
            | MetaCall::Statfs => [None, None],
        }
    };
}

/// Names of one node. File systems below take 65,000 at least, and a metadata server needs some for itself.
pub const LINKS_MAX: u32 = 64_000;

/// The extended attribute that is a node's access control list, as the kernel writes it.
pub const ACL_ACCESS: &[u8] = b"system.posix_acl_access";
/// The extended attribute of a directory that is the access control list of what is made in it.
pub const ACL_DEFAULT: &[u8] = b"system.posix_acl_default";

/// Where the umask is in the permission bits of a new node.
const UMASK_SHIFT: u32 = 16;

/// Permission bits for a node to be made, with the umask that is taken off them unless the directory has a default access
/// control list: only the server knows that at the moment when it makes the node.
pub fn with_umask(mode: u32, umask: u32) -> u32 {
    mode & 0o7777 | (umask & 0o777) << UMASK_SHIFT
}

/// The permission bits of a new node from which the umask that came with them is taken off.
pub fn masked_mode(mode: u32) -> u32 {
    mode & 0o7777 & !(mode >> UMASK_SHIFT & 0o777)
}

/// Names and values of all extended attributes of one node, bytes, with [`XATTR_EACH_BYTES`] for each.
pub const XATTRS_MAX_BYTES: usize = 3584;
/// What an extended attribute counts besides its name and value, bytes.
pub const XATTR_EACH_BYTES: usize = 40;

/// How an extended attribute is set.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub enum XattrMode {
    /// Made or replaced.
    #[default]
    Any,
    /// Made; EEXIST when it is there.
    Create,
    /// Replaced; ENODATA when there is none.
    Replace,
}

/// What a check of the cluster looks at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Examine {
    /// A slice of a directory; empty at its end.
    Directory {
        /// Path.
        path: Vec<u8>,
        /// Resume after this name; empty: from the start.
        after: Vec<u8>,
        /// Maximum entries; the server may give fewer.
        max: u32,
    },
    /// One name; no entry when there is none.
    File {
        /// Path.
        path: Vec<u8>,
    },
    /// Files that lost their last name, or files whose size only the data servers know; the name of each is its key.
    Unnamed {
        /// Those that lost their last name.
        removed: bool,
        /// Resume after this name.
        after: Vec<u8>,
        /// Maximum entries; the server may give fewer.
        max: u32,
    },
    /// From now on it is noted which files are renamed, so that a walk through all directories that misses one is known.
    /// Ends an earlier walk.
    BeginWalk,
    /// Which files were renamed since that walk began.
    EndWalk {
        /// Number of the walk.
        walk: u64,
    },
}

impl MetaCall {
    /// The paths that it names.
    pub fn paths(&self) -> impl Iterator<Item = &Vec<u8>> {
        paths_of!(self).into_iter().flatten()
    }

    /// The same, to be changed.
    pub fn paths_mut(&mut self) -> impl Iterator<Item = &mut Vec<u8>> {
        paths_of!(self).into_iter().flatten()
    }

    /// True for calls that make, remove or move the names that they are about, rather than act on what the names are of.
    pub fn is_of_names(&self) -> bool {
        matches!(
            self,
            MetaCall::Create { .. }
                | MetaCall::Mkdir { .. }
                | MetaCall::Symlink { .. }
                | MetaCall::Mknod { .. }
                | MetaCall::Rmdir { .. }
                | MetaCall::Unlink { .. }
                | MetaCall::Link { .. }
                | MetaCall::Rename { .. }
                | MetaCall::Exchange { .. }
        )
    }

    /// True for calls that a client may not send where it may only read.
    pub fn needs_write(&self) -> bool {
        match self {
            MetaCall::Open { write, .. } | MetaCall::Reopen { write, .. } => *write,
            MetaCall::Append { .. } | MetaCall::Relay(_) => true,
            call => call.is_change(),
        }
    }

    /// True for calls that change something for others: they must not be done twice.
    pub fn is_change(&self) -> bool {
        match self {
            MetaCall::SetAttr { .. } | MetaCall::Create { .. } | MetaCall::SetLayout { .. } => true,
            MetaCall::Mkdir { .. } | MetaCall::Rmdir { .. } | MetaCall::Symlink { .. } => true,
            MetaCall::Unlink { .. } | MetaCall::Rename { .. } | MetaCall::Mknod { .. } => true,
            MetaCall::SetXattr { .. } | MetaCall::Link { .. } | MetaCall::Exchange { .. } => true,
            MetaCall::CutBack { .. } => true,
            MetaCall::GetXattr { .. } | MetaCall::ListXattr { .. } => false,
            MetaCall::Open { .. } | MetaCall::Reopen { .. } | MetaCall::Close { .. } => false,
            MetaCall::Fsync { .. } | MetaCall::FsyncDir { .. } | MetaCall::Append { .. } => false,
            MetaCall::GetAttr { .. } | MetaCall::Readlink { .. } => false,
            MetaCall::Readdir { .. } | MetaCall::Statfs | MetaCall::Examine(_) => false,
            // Done twice it is done once, see `locks`.
            MetaCall::Lock(_) => false,
            // A copy of it finds that there is no such handle, or begins anew.
            MetaCall::Relay(_) => false,
            MetaCall::Restrict(_) | MetaCall::Prove { .. } | MetaCall::SyncAll => false,
        }
    }
}

/// Striping wished for; what is `None` comes from the directory, then from the cluster.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct LayoutRequest {
    /// First data server; `None`: chosen by the server, spread evenly.
    pub base: Option<u16>,
    /// Number of data servers.
    pub pcount: Option<u16>,
    /// Strip size, bytes.
    pub ssize_bytes: Option<u32>,
}

/// What a name is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum NodeKind {
    /// A file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A named pipe. Pipes, sockets and devices work on the machine that opens them; servers only keep their names and
    /// attributes.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    Character(Device),
    /// A block device.
    Block(Device),
}

/// Number of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Number of its driver.
    pub major: u32,
    /// Number within its driver.
    pub minor: u32,
}

/// Attributes of a node of the name space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Attr {
    /// Number of the node, unique while it exists.
    pub ino: u64,
    /// What it is.
    pub kind: NodeKind,
    /// Permission bits (with set-id and sticky).
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length, bytes.
    pub size: u64,
    /// Storage used, bytes.
    pub used_bytes: u64,
    /// Last access.
    pub atime: Time,
    /// Last modification.
    pub mtime: Time,
    /// Last change of attributes.
    pub ctime: Time,
    /// It may have access control lists or extended attributes `security.*`. When false it has none.
    pub labelled: bool,
}

/// An open file, as its client needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Opened {
    /// Names the open until it is closed or the connection ends.
    pub handle: u64,
    /// The file's key.
    pub file: FileKey,
    /// Where its data lie.
    pub layout: Layout,
    /// The objects that it had when they were last asked for, as in [`ObjectInfo::made`]. One of them that is missing is
    /// lost, not a hole.
    pub made: u64,
    /// Its attributes.
    pub attr: Attr,
}

/// One name of a directory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// The name: bytes without `/` and NUL.
    pub name: Vec<u8>,
    /// What it names; its length may be [`Entry::UNKNOWN_SIZE`].
    pub attr: Attr,
}

impl Entry {
    /// The length, bytes, of a file that is being written while a data server does not answer: no file is so long.
    pub const UNKNOWN_SIZE: u64 = u64::MAX;
}

/// What the metadata server knows of one name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Examined {
    /// The name.
    pub name: Vec<u8>,
    /// What it names; `None`: nothing that belongs there.
    pub kind: Option<NodeKind>,
    /// Of a file: what is kept of it, or why that cannot be used.
    pub file: Option<Result<FileRecord, String>>,
}

/// What the metadata server keeps of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its key.
    pub file: FileKey,
    /// Where its data lie.
    pub layout: Layout,
    /// The objects that it had when they were last asked for, as in [`ObjectInfo::made`].
    pub made: u64,
    /// Length, bytes; not the truth while `is_marked`.
    pub size: u64,
    /// Only the data servers know the length.
    pub is_marked: bool,
    /// When anything of it changed last.
    pub changed: Time,
    /// Number of its names; `None`: it was changing.
    pub links: Option<u32>,
}

/// Totals of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Statfs {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// Nodes in all.
    pub files: u64,
    /// Nodes free.
    pub files_free: u64,
}
