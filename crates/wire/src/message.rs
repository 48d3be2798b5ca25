//! The messages. Bodies are encoded with postcard; bulk data follows the body as the frame's payload.

use impresario_layout::Layout;
use serde::{Deserialize, Serialize};

use crate::list::Extents;
use crate::locks::{LockAnswer, LockCall};
use crate::moving::{MoveAnswer, MoveCall};
use crate::space::{SeekTo, Sought, SpaceChange};

/// Version of the protocol; both sides must speak the same.
pub const PROTOCOL_VERSION: u32 = 7;

/// A file's stable key: names its objects on the data servers for ever.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct FileKey(pub u64);

/// A cluster's identity, drawn at random when its metadata folder is made; every folder of the cluster bears it. 0: not
/// known yet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct ClusterId(pub u64);

impl std::fmt::Display for ClusterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl std::str::FromStr for ClusterId {
    type Err = String;

    fn from_str(text: &str) -> Result<ClusterId, String> {
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = digits.then(|| u64::from_str_radix(text, 16).ok()).flatten().filter(|id| *id != 0);
        id.map(ClusterId).ok_or_else(|| {
            format!("{text:?} is not the identity of a cluster, which has 16 hexadecimal digits: see `impresario store show`")
        })
    }
}

/// A client's identity, drawn at random when it starts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct ClientKey(pub u64);

/// Who a request is from; on every request, so that it survives forwarding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
pub struct Who {
    /// The client.
    pub client: ClientKey,
    /// Raised by the client whenever it gives up a path to a server; older epochs are fenced.
    pub epoch: u32,
    /// Number of the request within the client; a retry keeps it.
    pub sequence: u64,
    /// The oldest epoch under which a copy of the request was sent that may have been done; `epoch` when there is none.
    pub since: u32,
    /// The application (job of the batch system); 0 when unknown.
    pub job: u64,
    /// The user's number.
    pub user: u32,
}

/// What kind of server is spoken to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Role {
    /// The metadata server.
    Meta,
    /// A data server.
    Data,
    /// An I/O node.
    Io,
    /// Whatever listens there: for questions that every server answers, such as [`Call::Status`].
    Any,
}

impl Role {
    /// True when a server of this role may welcome a peer that wished to speak to `wished`.
    pub fn serves(self, wished: Role) -> bool {
        wished == self || wished == Role::Any
    }
}

/// What the holder of a key may do; see [`may_send`](crate::may_send).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum KeyRole {
    /// Uses files and reads the state of servers.
    Client,
    /// The same, and changes how servers behave.
    Admin,
    /// Is a server: speaks for clients.
    Server,
}

impl KeyRole {
    /// All roles.
    pub const ALL: [KeyRole; 3] = [KeyRole::Client, KeyRole::Admin, KeyRole::Server];

    /// Its name, in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            KeyRole::Client => "client",
            KeyRole::Admin => "admin",
            KeyRole::Server => "server",
        }
    }
}

impl std::fmt::Display for KeyRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Where keys are used: first frame on a connection, from the side that opened it. The hello follows once both sides have
/// proved their keys.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyOffer {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// The number of the key.
    pub key: u64,
    /// The role that it gives.
    pub role: KeyRole,
    /// First message of the Noise hand-shake.
    pub noise: Vec<u8>,
}

/// The server's reply to a [`KeyOffer`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyProof {
    /// Second message of the Noise hand-shake.
    pub noise: Vec<u8>,
}

/// First frame on a connection, from the side that opened it; after the keys, where these are used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// The sender.
    pub who: Who,
    /// The role that the sender believes it speaks to.
    pub role: Role,
    /// For logs: program and host of the sender, cut to 256 bytes.
    pub name: String,
    /// The cluster that the sender belongs to, as far as it knows.
    pub cluster: ClusterId,
}

/// The server's answer to [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// [`PROTOCOL_VERSION`] of the server.
    pub version: u32,
    /// The server's name in the configuration.
    pub name: String,
    /// Drawn anew at each start of the server: tells a restart from a broken connection. The upper 32 bits name the
    /// boot of its machine.
    pub incarnation: u64,
    /// Largest payload of one request or reply, bytes.
    pub max_payload_bytes: u32,
    /// The cluster that the server belongs to, as far as it knows.
    pub cluster: ClusterId,
    /// The identity of its folder, drawn at random when the folder was made; 0 where it has none.
    pub store: u64,
}

/// A request to a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Call {
    /// Data server: read `len` bytes of an object. Answer: [`Answer::Data`], short where the object ends, or
    /// [`Answer::Piece`]s.
    Read {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// Offset in the object, bytes.
        lane_offset: u64,
        /// Bytes wanted.
        len: u32,
    },
    /// Data server: read several extents of an object. Answer: [`Answer::Piece`]s of the extents back to back.
    ReadList {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// What is wanted; offsets are those of the object.
        extents: Extents,
    },
    /// Data server: write the payload into an object. Answer: [`Answer::Written`].
    Write {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// Offset in the object, bytes.
        lane_offset: u64,
    },
    /// Data server: as [`Call::Write`], of bytes from several clients whose writes touch. Refused as a whole when any
    /// of them has left its epoch. Answer: [`Answer::Written`].
    WriteMerged {
        /// Sender of the first bytes.
        who: Who,
        /// The other senders, and the epoch of each.
        others: Vec<(ClientKey, u32)>,
        /// File.
        file: FileKey,
        /// Offset in the object, bytes.
        lane_offset: u64,
    },
    /// Data server: make an object durable, and its existence. Answer: [`Answer::Done`].
    Sync {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
    },
    /// Data server: cut or extend an object; creates it when `len > 0`. Answer: [`Answer::Done`].
    Truncate {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// New length of the object, bytes.
        len: u64,
    },
    /// Data server: remove an object; no error when there is none. Answer: [`Answer::Done`].
    Unlink {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
    },
    /// Data server: size and times of an object, unscheduled. Answer: [`Answer::Object`].
    ObjectStat {
        /// File.
        file: FileKey,
    },
    /// I/O node: read a file range. Answer: [`Answer::Data`]; short only at the end of the file.
    FileRead {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// Its layout.
        layout: Layout,
        /// The objects that it is known to have, as in [`ObjectInfo::made`].
        made: u64,
        /// Offset in the file, bytes.
        offset: u64,
        /// Bytes wanted.
        len: u32,
    },
    /// I/O node: write the payload into a file. Answer: [`Answer::Written`].
    FileWrite {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// Its layout.
        layout: Layout,
        /// Offset in the file, bytes.
        offset: u64,
    },
    /// I/O node: make the objects of a file durable on all its data servers. Answer: [`Answer::Done`].
    FileSync {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// Its layout.
        layout: Layout,
    },
    /// I/O node: file length as its objects tell it. Answer: [`Answer::Object`].
    FileStat {
        /// File.
        file: FileKey,
        /// Its layout.
        layout: Layout,
    },
    /// Metadata server, or an I/O node that passes it on.
    Meta {
        /// Sender. A change of the name space is done once for each of its sequence numbers.
        who: Who,
        /// What it wants.
        call: MetaCall,
    },
    /// Any server: its state as JSON. Answer: [`Answer::Text`].
    Status,
    /// I/O node or data server: switch the policy. Answer: [`Answer::Done`] as soon as the change is certain, or a fault that
    /// says why not.
    SetPolicy {
        /// Name of the policy.
        name: String,
        /// Parameters as `key`, `value` pairs.
        params: Vec<(String, String)>,
        /// The instant of the change, nanoseconds since 1970 by the clock that machines share, for servers that change
        /// together; 0 or a past one: now.
        at_shared_ns: i64,
    },
    /// I/O node or data server: what the policy does with such requests, in words. Answer: [`Answer::Text`].
    Explain {
        /// Application.
        job: u64,
        /// User.
        user: u32,
        /// Client.
        client: u64,
        /// File.
        file: u64,
        /// Writes rather than reads.
        write: bool,
    },
    /// Data server and I/O node: zero the statistics; a modelled device also forgets what it read. Answer: [`Answer::Done`].
    ResetStatistics,
    /// Data server on a modelled device: serve in `arrival` or `elevator` order. Answer: [`Answer::Done`].
    SetDiskOrder {
        /// `arrival` or `elevator`.
        order: String,
    },
    /// I/O node or data server: begin or end a trace of the requests that it serves. Answer: [`Answer::Text`], which trace,
    /// or a fault that says why not.
    Trace {
        /// Begin; else end.
        on: bool,
    },
    /// Data server: these bytes of an object will probably be read. A hint: the server reads of them ahead what it has the
    /// means for, and never more than the object has. Answer: [`Answer::Accepted`], at once.
    Prefetch {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// What will be read; offsets are those of the object. Their lengths are not bounded by what an answer may carry.
        extents: Extents,
    },
    /// I/O node: as [`Call::Prefetch`], of a file, passed on to its data servers. Answer: [`Answer::Accepted`].
    FilePrefetch {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// Its layout.
        layout: Layout,
        /// Offset in the file, bytes.
        offset: u64,
        /// Bytes that will be read; what lies beyond the end of the file does not count.
        len: u64,
    },
    /// I/O node or data server: go by what earlier runs foretell, or by none. Answer: [`Answer::Text`], what was loaded, or a
    /// fault that says why not; then nothing has changed.
    EarlierRuns {
        /// Paths on the server's machine of traces or folders of traces; none: those of its configuration. `None`: forget the
        /// runs that are loaded.
        runs: Option<Vec<Vec<u8>>>,
    },
    /// Data server: which objects it has, for a check of the cluster. Answer: [`Answer::Objects`].
    ListObjects {
        /// Begin with this key; keys are ordered by their lowest byte, then by number. 0: from the start.
        from: FileKey,
        /// The maximum; the server may give fewer.
        max: u32,
    },
    /// Data server: read a piece of an object from the device, beside what clients ask for, and compare it with its
    /// checksums. One piece is read at a time; EBUSY while another is. Answer: [`Answer::Scrubbed`].
    Scrub {
        /// Key of the object.
        file: FileKey,
        /// Where to begin.
        offset: u64,
        /// At most so many bytes; the server may read fewer.
        max_bytes: u32,
    },
    /// Data server: move an object that belongs to no file out of the way. It counts as removed from then on. No error when
    /// there is none. Answer: [`Answer::Done`].
    SetAside {
        /// Sender.
        who: Who,
        /// Key of the object.
        file: FileKey,
    },
    /// I/O node or data server: what it granted under limits over all servers. Answer: [`Answer::Grants`].
    Grants,
    /// Data server: change the space that a range of an object takes. Answer: [`Answer::Written`] of no bytes.
    ChangeSpace {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// How.
        change: SpaceChange,
        /// Offset in the object, bytes.
        lane_offset: u64,
        /// Length of the range, bytes.
        len: u64,
    },
    /// I/O node: the same of a file. Answer: [`Answer::FileWritten`] of no bytes.
    FileChangeSpace {
        /// Sender.
        who: Who,
        /// File.
        file: FileKey,
        /// Its layout.
        layout: Layout,
        /// How.
        change: SpaceChange,
        /// Offset in the file, bytes.
        offset: u64,
        /// Length of the range, bytes.
        len: u64,
    },
    /// Data server: where an object has data or a hole, unscheduled. Answer: [`Answer::Sought`].
    ObjectSeek {
        /// File.
        file: FileKey,
        /// Where to begin.
        from: u64,
        /// What is looked for.
        to: SeekTo,
    },
    /// I/O node: the same of a file. Answer: [`Answer::Sought`].
    FileSeek {
        /// File.
        file: FileKey,
        /// Its layout.
        layout: Layout,
        /// The objects that it is known to have, as in [`ObjectInfo::made`].
        made: u64,
        /// Where to begin.
        from: u64,
        /// What is looked for.
        to: SeekTo,
    },
    /// Data server: a step of its move to another folder or machine. Answer: [`Answer::Move`].
    Move(MoveCall),
}

impl Call {
    /// Bytes of payload that the answer may have: what was asked for. `None` for a list that is refused.
    pub fn answer_bytes(&self) -> Option<u64> {
        match self {
            Call::Read { len, .. } | Call::FileRead { len, .. } => Some((*len).into()),
            Call::ReadList { extents, .. } => extents.check(u64::MAX).ok(),
            _ => Some(0),
        }
    }

    /// Who the request is from, if the call says so.
    pub fn who(&self) -> Option<&Who> {
        match self {
            Call::Read { who, .. } | Call::ReadList { who, .. } => Some(who),
            Call::Write { who, .. } | Call::WriteMerged { who, .. } | Call::Sync { who, .. } => Some(who),
            Call::Truncate { who, .. } | Call::Unlink { who, .. } | Call::SetAside { who, .. } => Some(who),
            Call::FileRead { who, .. }
            | Call::FileWrite { who, .. }
            | Call::FileSync { who, .. }
            | Call::Prefetch { who, .. }
            | Call::FilePrefetch { who, .. }
            | Call::ChangeSpace { who, .. }
            | Call::FileChangeSpace { who, .. }
            | Call::Meta { who, .. } => Some(who),
            _ => None,
        }
    }

    /// The same, to be changed.
    pub fn who_mut(&mut self) -> Option<&mut Who> {
        match self {
            Call::Read { who, .. } | Call::ReadList { who, .. } => Some(who),
            Call::Write { who, .. } | Call::WriteMerged { who, .. } | Call::Sync { who, .. } => Some(who),
            Call::Truncate { who, .. } | Call::Unlink { who, .. } | Call::SetAside { who, .. } => Some(who),
            Call::FileRead { who, .. }
            | Call::FileWrite { who, .. }
            | Call::FileSync { who, .. }
            | Call::Prefetch { who, .. }
            | Call::FilePrefetch { who, .. }
            | Call::ChangeSpace { who, .. }
            | Call::FileChangeSpace { who, .. }
            | Call::Meta { who, .. } => Some(who),
            _ => None,
        }
    }
}

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
    /// Changes attributes. Answer: [`Answer::Attr`].
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
        /// Permission bits.
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
        /// Permission bits.
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
        /// Permission bits.
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
        /// Its name, with its name space: `user.` and more.
        name: Vec<u8>,
    },
    /// The names of all extended attributes. Answer: [`Answer::Xattr`], each name with a NUL byte behind it.
    ListXattr {
        /// Of what.
        target: Target,
    },
    /// Sets or removes an extended attribute. ENOSPC: beyond [`XATTRS_MAX_BYTES`]. Answer: [`Answer::Done`].
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
}

/// Names of one node. File systems below take 65,000 at least, and a metadata server needs some for itself.
pub const LINKS_MAX: u32 = 64_000;

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
    /// What it names.
    pub attr: Attr,
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

/// An object of a data server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObjectEntry {
    /// Key of its file.
    pub file: FileKey,
    /// Length, bytes.
    pub size: u64,
    /// Time since its last modification by the clock of its server, seconds.
    pub age_s: u64,
}

/// What the scrub of a piece of an object found.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ScrubbedPiece {
    /// Bytes read.
    pub read_bytes: u64,
    /// Blocks that fit their checksums.
    pub good_blocks: u64,
    /// Blocks that have a checksum from now on.
    pub learnt_blocks: u64,
    /// Blocks without a checksum.
    pub unknown_blocks: u64,
    /// First bytes of the blocks that are damaged.
    pub corrupt: Vec<u64>,
    /// Where to go on; `None` at the end of the object.
    pub next: Option<u64>,
}

/// The state of an object, or of a file as its objects tell it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct ObjectInfo {
    /// Length, bytes; 0 when there is no object.
    pub size: u64,
    /// Last modification; zero when there is no object.
    pub mtime: Time,
    /// Bytes of storage used.
    pub used_bytes: u64,
    /// Which objects exist. Of an object: 1, or 0 when there is none. Of a file: bit n is set when there are the objects of
    /// all its data servers whose position modulo 64 is n.
    pub made: u64,
}

/// What tells whether a data server may have lost data of a file: between two different states it may.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LaneState {
    /// Number of the data server.
    pub server: u16,
    /// The boot of its machine in the upper 32 bits, its last loss of data of the file in the lower.
    pub state: u64,
}

impl LaneState {
    /// Of a server of this incarnation.
    pub fn new(server: u16, incarnation: u64, loss: u32) -> LaneState {
        LaneState { server, state: incarnation >> 32 << 32 | u64::from(loss) }
    }
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

/// A server's answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Done; nothing to say.
    Done,
    /// The payload holds the bytes read.
    Data,
    /// The payload holds a part of the bytes read. Pieces come in any order; the answer is complete when payloads and
    /// missing bytes together are as many as were asked for. A [`Answer::Fault`] may end it before that.
    Piece {
        /// Where the payload belongs, bytes from the start of the answer.
        at: u32,
        /// Bytes behind the payload that the object does not have.
        missing: u32,
    },
    /// Where the bytes of a [`MetaCall::Append`] go.
    Assigned {
        /// Offset in the file, bytes.
        offset: u64,
    },
    /// Bytes written.
    Written(u32),
    /// Data server: as [`Answer::Written`] or [`Answer::Done`], of an object of which unsynced data were lost before.
    AfterLoss {
        /// Bytes written.
        written: u32,
        /// Number of the last loss among those of the server; never 0.
        loss: u32,
        /// This very sync failed so; else 0.
        errno: i32,
    },
    /// I/O node: a file was written.
    FileWritten {
        /// Bytes.
        bytes: u32,
        /// The data servers that hold them.
        lanes: Vec<LaneState>,
    },
    /// I/O node: a file was synced, as far as its data servers could.
    FileSynced {
        /// All its data servers.
        lanes: Vec<LaneState>,
        /// One of them failed so; else 0.
        errno: i32,
    },
    /// Of an object.
    Object(ObjectInfo),
    /// Of a node.
    Attr(Attr),
    /// An open file.
    Opened(Opened),
    /// What a symbolic link says.
    Link(Vec<u8>),
    /// A slice of a directory; empty at its end.
    Entries(Vec<Entry>),
    /// An extended attribute, or the names of all.
    Xattr(Vec<u8>),
    /// A name was removed.
    Removed {
        /// Names that its node has left; 0: the node is gone as soon as it is not open any more.
        links: u32,
    },
    /// Totals.
    Statfs(Statfs),
    /// Text for people or programs (JSON).
    Text(String),
    /// It failed.
    Fault(Fault),
    /// Bytes of a hint that are, or are going to be, read ahead; 0 where nothing is read ahead or the sender's hints did
    /// not pay.
    Accepted(u64),
    /// A page of a data server's objects.
    Objects {
        /// The objects.
        objects: Vec<ObjectEntry>,
        /// Files in its folder that are not its own; some of many.
        foreign: Vec<String>,
        /// With which key the next page begins; `None` at the end.
        next: Option<FileKey>,
    },
    /// What the scrub of a piece of an object found; `None`: there is no such object.
    Scrubbed(Option<ScrubbedPiece>),
    /// What the metadata server knows.
    Examined {
        /// Of names.
        entries: Vec<Examined>,
        /// Of a walk: its number.
        walk: u64,
        /// Of a walk that ended: the files that were renamed meanwhile.
        renamed: Vec<FileKey>,
        /// Of a walk that ended: those are all that it may have missed.
        is_sure: bool,
    },
    /// What a server granted under limits over all servers.
    Grants {
        /// By limit.
        grants: Vec<Granted>,
        /// These are all its limits that are in use.
        is_whole: bool,
    },
    /// Of locks.
    Lock(LockAnswer),
    /// Where an object or file has data or a hole.
    Sought(Sought),
    /// Of a move.
    Move(MoveAnswer),
}

/// What a server granted of a limit over all servers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Granted {
    /// Name of the rule.
    pub rule: String,
    /// The job, user, client or file that the limit is for; `None`: the whole rule.
    pub key: Option<u64>,
    /// Granted so far: requests, bytes or nanoseconds of device time.
    pub granted: u64,
    /// Requests that the limit withholds.
    pub waiting: u32,
}

/// A failure that a server reports.
///
/// Two errnos tell the client to act rather than to fail; in both cases *nothing was applied or it is safe to apply
/// again under a newer epoch*: [`Fault::FENCED`] and [`Fault::PATH_LOST`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{message} (errno {errno})")]
pub struct Fault {
    /// A Linux errno.
    pub errno: i32,
    /// One line: what failed, on what, and the remedy where there is one.
    pub message: String,
}

impl Fault {
    /// (ESTALE) The request's epoch is older than one already seen of this client, and was not applied. Its client
    /// sends it again with its present epoch if it still wants it.
    pub const FENCED: i32 = 116;
    /// (EAGAIN) An I/O node lost its path to a data server with the request outstanding: it may or may not have been
    /// applied. Only the client may repeat it, under a new epoch, so that the first copy cannot arrive late.
    pub const PATH_LOST: i32 = 11;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_of_a_cluster_is_read_back_and_others_are_not() {
        let id = ClusterId(0xab);
        assert_eq!(id.to_string(), "00000000000000ab");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "ab", "00000000000000zz", "0000000000000000", "+0000000000000ab"] {
            assert!(bad.parse::<ClusterId>().unwrap_err().contains("16 hexadecimal digits"), "{bad}");
        }
    }
}
