//! Requests and answers. Bodies are encoded with postcard; bulk data follows the body as the frame's payload.

use impresario_layout::Layout;
use serde::{Deserialize, Serialize};

pub use crate::hello::*;
use crate::list::Extents;
use crate::locks::LockAnswer;
use crate::moving::{MoveAnswer, MoveCall};
pub use crate::names::*;
use crate::relay::Relaid;
use crate::space::{SeekTo, Sought, SpaceChange};

/// A file's stable key: names its objects on the data servers for ever.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize)]
pub struct FileKey(pub u64);

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
        /// The other senders.
        others: Vec<Sender>,
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
    /// Any server: switch the policy. Answer: [`Answer::Done`] as soon as the change is certain, or a fault that
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
    /// Any server: what the policy does with such requests, in words. Answer: [`Answer::Text`].
    Explain {
        /// Application.
        job: u64,
        /// User.
        user: u32,
        /// Client.
        client: u64,
        /// File.
        file: u64,
        /// What they do, as rules call it: `read`, `write`, or what is done to names, such as `create`.
        op: String,
        /// The folders that lead to the file, as in [`Who::folders`].
        folders: [u32; 4],
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
    /// I/O node: which I/O nodes and data servers take turns, as far as it knows. Answer: [`Answer::Members`].
    Members,
    /// Data server: as [`Call::WriteMerged`], into several extents of an object, whose bytes are back to back in the payload.
    /// When it fails, some of them may have been written. Answer: [`Answer::Written`].
    WriteList {
        /// Sender of the first bytes.
        who: Who,
        /// The other senders.
        others: Vec<Sender>,
        /// File.
        file: FileKey,
        /// Where the bytes go; offsets are those of the object.
        extents: Extents,
    },
    /// All servers: calls of this connection that a limit withholds are not wanted any more. Those that were not begun are answered
    /// with [`Fault::GIVEN_UP`] and not done; nothing happens to others. Answer: [`Answer::Done`].
    GiveUp {
        /// Their numbers.
        calls: Vec<u64>,
    },
}

/// The field `who` of a call, shared or to be changed.
macro_rules! who_of {
    ($call:expr) => {
        match $call {
            Call::Read { who, .. } | Call::ReadList { who, .. } => Some(who),
            Call::Write { who, .. } | Call::WriteMerged { who, .. } | Call::Sync { who, .. } => Some(who),
            Call::WriteList { who, .. } => Some(who),
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
    };
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

    /// The file whose bytes, objects or locks the call names by its key, as clients do with files that they have open.
    pub fn file(&self) -> Option<FileKey> {
        match self {
            Call::Read { file, .. }
            | Call::ReadList { file, .. }
            | Call::Write { file, .. }
            | Call::WriteMerged { file, .. }
            | Call::WriteList { file, .. }
            | Call::Sync { file, .. }
            | Call::Truncate { file, .. }
            | Call::Unlink { file, .. }
            | Call::ObjectStat { file }
            | Call::FileRead { file, .. }
            | Call::FileWrite { file, .. }
            | Call::FileSync { file, .. }
            | Call::FileStat { file, .. }
            | Call::Prefetch { file, .. }
            | Call::FilePrefetch { file, .. }
            | Call::Scrub { file, .. }
            | Call::SetAside { file, .. }
            | Call::ChangeSpace { file, .. }
            | Call::FileChangeSpace { file, .. }
            | Call::ObjectSeek { file, .. }
            | Call::FileSeek { file, .. }
            | Call::Meta { call: MetaCall::Reopen { file, .. }, .. } => Some(*file),
            Call::Meta { call: MetaCall::Lock(lock), .. } => lock.wish.file(),
            Call::Meta { .. }
            | Call::Status
            | Call::SetPolicy { .. }
            | Call::Explain { .. }
            | Call::ResetStatistics
            | Call::SetDiskOrder { .. }
            | Call::Trace { .. }
            | Call::EarlierRuns { .. }
            | Call::ListObjects { .. }
            | Call::Grants
            | Call::Members
            | Call::GiveUp { .. }
            | Call::Move(_) => None,
        }
    }

    /// True for calls that a client may not send where it may only read. What only administrators and servers may send is not
    /// looked at.
    pub fn needs_write(&self) -> bool {
        match self {
            Call::Write { .. } | Call::WriteMerged { .. } | Call::WriteList { .. } | Call::FileWrite { .. } => true,
            Call::Truncate { .. } | Call::Unlink { .. } | Call::SetAside { .. } => true,
            Call::ChangeSpace { .. } | Call::FileChangeSpace { .. } => true,
            Call::Meta { call, .. } => call.needs_write(),
            Call::Read { .. } | Call::ReadList { .. } | Call::FileRead { .. } => false,
            Call::Sync { .. } | Call::FileSync { .. } | Call::ObjectStat { .. } | Call::FileStat { .. } => false,
            Call::Prefetch { .. } | Call::FilePrefetch { .. } | Call::ObjectSeek { .. } | Call::FileSeek { .. } => {
                false
            }
            Call::Members
            | Call::Status
            | Call::Explain { .. }
            | Call::Grants
            | Call::ListObjects { .. }
            | Call::Scrub { .. } => false,
            Call::SetPolicy { .. } | Call::ResetStatistics | Call::SetDiskOrder { .. } | Call::Trace { .. } => false,
            Call::EarlierRuns { .. } | Call::Move(_) | Call::GiveUp { .. } => false,
        }
    }

    /// Who the request is from, if the call says so.
    pub fn who(&self) -> Option<&Who> {
        who_of!(self)
    }

    /// The same, to be changed.
    pub fn who_mut(&mut self) -> Option<&mut Who> {
        who_of!(self)
    }
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

    /// Of a server of which it is not known what it has lost since: no state is the same.
    pub const fn unknown(server: u16) -> LaneState {
        LaneState { server, state: u64::MAX }
    }
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
    /// Of a file that is laid out anew.
    Relaid(Relaid),
    /// As [`Answer::Opened`], to a client that may not use every file.
    Admitted {
        /// The file.
        opened: Box<Opened>,
        /// It was opened for writing.
        write: bool,
        /// What the client shows whenever it names the file by its key.
        pass: Pass,
    },
    /// As [`Answer::Attr`], of a file whose length was set.
    Cut {
        /// Its attributes.
        attr: Attr,
        /// The file.
        file: FileKey,
        /// The data servers that have cut or extended their objects of it.
        lanes: Vec<LaneState>,
    },
    /// I/O node in front of a folder: all files were synced, but for those of which bytes are lost.
    AllSynced {
        /// What tells of a restart of its machine.
        lane: LaneState,
        /// Tells its run from all others.
        run: u64,
        /// The files of which bytes were lost during that run; `None`: too many to be named, so any.
        lost: Option<Vec<FileKey>>,
        /// How often during that run bytes of any file may have been lost, beside those.
        any_lost: u64,
    },
    /// Answers no call (its number is 0): the server lives, though what it does for the client's calls keeps it from
    /// reading others, such as those that ask for a sign of life.
    Alive,
    /// Which I/O nodes and data servers take turns.
    Members(MembersView),
    /// Answers no call (its number is 0): limits withhold these calls of the connection at present, by their numbers. The server
    /// will do them; whoever waits for an answer waits on.
    Withheld {
        /// Numbers of calls; one may have been answered meanwhile.
        calls: Vec<u64>,
        /// So many wait that the server reads no further calls of the connection: those from this number on, as far as they were
        /// sent.
        unread_from: Option<u64>,
    },
}

/// Proves to every server of a cluster that a client may use a file that it names by its key: the client was given it when it
/// opened the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pass(pub [u8; 32]);

/// Which I/O nodes and data servers take turns, as one I/O node knows them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MembersView {
    /// A greater number is newer.
    pub number: u64,
    /// From when on it counts, shared time, nanoseconds since 1970.
    pub from_shared_ns: u64,
    /// The I/O nodes that are there, by their place in the configuration, ascending.
    pub nodes: Vec<u16>,
    /// The lanes of data servers that are gone or hang, ascending.
    pub absent: Vec<u16>,
    /// The lanes of those that hang for the node that answers.
    pub hung: Vec<u16>,
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
    /// (EINTR) The call waited for a limit and was given up by its client ([`Call::GiveUp`]); it was not done.
    pub const GIVEN_UP: i32 = 4;
    /// (ENOKEY) The user of the call has not proved itself, or too long ago; the call was not done. Its client proves the user
    /// ([`MetaCall::Prove`]) and sends it again.
    pub const UNPROVEN: i32 = 126;
}
