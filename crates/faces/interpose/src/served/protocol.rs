//! What a program under `impresario run` and its agent say to each other: a request of 64 bytes, two paths and data; a
//! reply of 32 bytes and data, with a descriptor for an opened file. Both sides are of one version, on one machine.

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Opens `path` with the flags `a` and the mode `b`, which has the umask too ([`UMASK_SHIFT`]). The reply carries the
    /// descriptor.
    Open = 1,
    /// Reads `b` bytes at `a`, or at the position when `a` is [`AT_POSITION`].
    Read,
    /// Writes the data at `a`, or at the position.
    Write,
    /// Moves the position by `a`, as `lseek` does with `b`.
    Seek,
    /// Attributes, as [`Meta`]. `a`: flags of `fstatat`.
    Stat,
    /// Sets the length `a`.
    Truncate,
    /// Makes data and attributes durable; `a` is [`DATA_ONLY`]: as `fdatasync` does.
    Sync,
    /// The program has closed a descriptor: if it was the last, the file is closed before the reply.
    Closed,
    /// Removes `path`; `a`: flags of `unlinkat`.
    Unlink,
    /// Renames `path` to `other`; `a`: flags of `renameat2`.
    Rename,
    /// Gives `path` the name `other` too; `a`: flags of `linkat`.
    Link,
    /// Makes the symbolic link `path` that says `other`.
    Symlink,
    /// What the symbolic link `path` says.
    Readlink,
    /// Makes the directory `path` with the mode `a`, which has the umask too.
    Mkdir,
    /// Sets the mode `a`; `b`: flags of `fchmodat`.
    Chmod,
    /// Sets owner `a` and group `b`, -1 for as it is; `c`: flags of `fchownat`.
    Chown,
    /// Sets the times in the data, two pairs of words; `a`: flags of `utimensat`.
    Times,
    /// Whether the user may access `path`; `a`: mode, `b`: flags of `faccessat`.
    Access,
    /// Names of an open directory after the name in the data; see [`Entries`].
    Readdir,
    /// The path of an open file, from the root of the cluster.
    PathOf,
    /// `path` without symbolic links and dots.
    Realpath,
    /// The folder that stands for a directory as a working directory.
    Enter,
    /// Status flags of an open file (`F_GETFL`).
    Flags,
    /// Sets them to `a`.
    SetFlags,
    /// An extended attribute of the name in `other`.
    GetXattr,
    /// Sets it to the data; `a`: flags of `setxattr`.
    SetXattr,
    /// Names of all of them.
    ListXattr,
    /// Removes one.
    RemoveXattr,
    /// Totals, as six words: block size, blocks, free, available, files, free files.
    Statfs,
    /// Makes a pipe or socket node `path` with the mode `a`, which has the umask too.
    Mknod,
    /// Changes the space of `b` bytes from `a` on, as `fallocate` does with the mode `c`.
    Space,
    /// Does with a lock what `fcntl` does with the command `c`: first byte `a`, bytes `b`, and in the data kind and whence, two
    /// words. What is in the way is said as four words: kind, first byte, bytes, process.
    Lock,
    /// Does what `flock` does with the operation `a`.
    Flock,
    /// What the program will do with `b` bytes from `a` on (0: to the end), as `posix_fadvise` says it with `c`; with
    /// [`READ_AHEAD`] as `readahead` does, where `b` is 0 for nothing.
    Advise,
}

/// All of them, for decoding.
const OPS: [Op; 34] = [
    Op::Open,
    Op::Read,
    Op::Write,
    Op::Seek,
    Op::Stat,
    Op::Truncate,
    Op::Sync,
    Op::Closed,
    Op::Unlink,
    Op::Rename,
    Op::Link,
    Op::Symlink,
    Op::Readlink,
    Op::Mkdir,
    Op::Chmod,
    Op::Chown,
    Op::Times,
    Op::Access,
    Op::Readdir,
    Op::PathOf,
    Op::Realpath,
    Op::Enter,
    Op::Flags,
    Op::SetFlags,
    Op::GetXattr,
    Op::SetXattr,
    Op::ListXattr,
    Op::RemoveXattr,
    Op::Statfs,
    Op::Mknod,
    Op::Space,
    Op::Lock,
    Op::Flock,
    Op::Advise,
];

/// Where the umask is in the mode of a node to be made, bits from the right.
pub const UMASK_SHIFT: u32 = 16;

/// Of [`Op::Sync`].
pub const DATA_ONLY: i64 = 1;
/// The advice that stands for `readahead`.
pub const READ_AHEAD: i64 = -1;
/// The offset that means the file's position.
pub const AT_POSITION: i64 = -1;
/// Data of one request or reply at most; longer reads and writes are several.
pub const DATA_MAX: usize = 4 << 20;
/// A path at most.
pub const PATH_MAX: usize = 4096;
/// With which the abstract name of a placeholder begins; the run's token, `/`, the file's number, `.`
/// and a random word follow.
pub const NAME: &[u8] = b"impresario-run/";
/// Bytes of a token, hexadecimal digits.
pub const TOKEN_BYTES: usize = 16;
/// Environment variable: the agent's folder, with its socket and what stands for working directories.
pub const FOLDER_VARIABLE: &str = "IMPRESARIO_RUN_FOLDER";
/// Environment variable: the prefix.
pub const AT_VARIABLE: &str = "IMPRESARIO_RUN_AT";
/// Environment variable: the token.
pub const TOKEN_VARIABLE: &str = "IMPRESARIO_RUN_TOKEN";
/// Environment variable: patterns of paths that are left alone, a line each.
pub const BYPASS_VARIABLE: &str = "IMPRESARIO_RUN_BYPASS";
/// The agent's socket in its folder.
pub const SOCKET: &str = "agent";
/// The folder of working directories there.
pub const DIRECTORIES: &str = "cwd";

/// A request's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is asked for.
    pub op: Op,
    /// Number of the open file; 0: `path` says what is meant.
    pub open: u64,
    /// See [`Op`].
    pub a: i64,
    /// See [`Op`].
    pub b: i64,
    /// See [`Op`].
    pub c: i64,
    /// Bytes of the first path.
    pub path_len: u32,
    /// Bytes of the second path or name.
    pub other_len: u32,
    /// Bytes of data.
    pub data_len: u32,
    /// Room for data in the reply.
    pub room: u32,
}

/// Bytes of a request without its paths and data.
pub const REQUEST_BYTES: usize = 64;
/// Bytes of a reply without its data.
pub const REPLY_BYTES: usize = 32;

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at * 8..at * 8 + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

fn put<const N: usize>(words: &[u64]) -> [u8; N] {
    let mut bytes = [0; N];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

impl Request {
    /// A request without paths and data.
    pub const fn new(op: Op) -> Request {
        Request { op, open: 0, a: 0, b: 0, c: 0, path_len: 0, other_len: 0, data_len: 0, room: 0 }
    }

    /// Whether the reply may be long in coming, until another program gives up a lock. Such a request has a connection of
    /// its own, and is given up when the program closes that for writing: the reply is then EINTR, or says that it was done.
    pub fn may_wait(&self) -> bool {
        match self.op {
            Op::Lock => matches!(self.c as i32, libc::F_SETLKW | libc::F_OFD_SETLKW),
            Op::Flock => self.a as i32 & libc::LOCK_NB == 0,
            _ => false,
        }
    }

    /// As bytes.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        put(&[
            u64::from(self.op as u32),
            self.open,
            self.a as u64,
            self.b as u64,
            self.c as u64,
            pair(self.path_len, self.other_len),
            pair(self.data_len, self.room),
        ])
    }

    /// From bytes; `None` when they are no request within the limits.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Request> {
        let op = OPS.into_iter().find(|op| u64::from(*op as u32) == word(bytes, 0))?;
        let (paths, lens) = (word(bytes, 5), word(bytes, 6));
        let request = Request {
            op,
            open: word(bytes, 1),
            a: word(bytes, 2) as i64,
            b: word(bytes, 3) as i64,
            c: word(bytes, 4) as i64,
            path_len: paths as u32,
            other_len: (paths >> 32) as u32,
            data_len: lens as u32,
            room: (lens >> 32) as u32,
        };
        let fits = request.path_len as usize <= PATH_MAX
            && request.other_len as usize <= PATH_MAX
            && request.data_len as usize <= DATA_MAX
            && request.room as usize <= DATA_MAX;
        fits.then_some(request)
    }
}

/// A reply's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The result, or an errno below zero.
    pub result: i64,
    /// Bytes of data.
    pub data_len: u32,
    /// The path leads out of the cluster, to that in the data.
    pub is_outside: bool,
}

impl Reply {
    /// As bytes.
    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        put(&[self.result as u64, u64::from(self.data_len), u64::from(self.is_outside)])
    }

    /// From bytes.
    pub fn decode(bytes: &[u8; REPLY_BYTES]) -> Reply {
        let [result, data_len, outside] = [0, 1, 2].map(|at| word(bytes, at));
        Reply { result: result as i64, data_len: data_len as u32, is_outside: outside != 0 }
    }
}

/// Attributes as `stat` has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Number of the node.
    pub ino: u64,
    /// Kind and permissions.
    pub mode: u32,
    /// Names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Storage used, bytes.
    pub used_bytes: u64,
    /// A device's number.
    pub rdev: u64,
    /// Access, modification and change: seconds and nanoseconds.
    pub times: [(i64, u32); 3],
}

/// Bytes of [`Meta`].
pub const META_BYTES: usize = 96;

impl Meta {
    /// As bytes.
    pub fn encode(&self) -> [u8; META_BYTES] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [a, m, c] = self.times;
        put(&[
            self.ino,
            pair(self.mode, self.nlink),
            pair(self.uid, self.gid),
            self.size,
            self.rdev,
            a.0 as u64,
            a.1.into(),
            m.0 as u64,
            m.1.into(),
            c.0 as u64,
            c.1.into(),
            self.used_bytes,
        ])
    }

    /// From bytes.
    pub fn decode(bytes: &[u8; META_BYTES]) -> Meta {
        let (low, high) = (|at| word(bytes, at) as u32, |at| (word(bytes, at) >> 32) as u32);
        let time = |at| (word(bytes, at) as i64, word(bytes, at + 1) as u32);
        Meta {
            ino: word(bytes, 0),
            mode: low(1),
            nlink: high(1),
            uid: low(2),
            gid: high(2),
            size: word(bytes, 3),
            rdev: word(bytes, 4),
            times: [time(5), time(7), time(9)],
            used_bytes: word(bytes, 11),
        }
    }
}

/// A directory's names in a reply: for each its node's number (8 bytes), `d_type` (1), length (1) and the name.
#[derive(Clone, Copy, Debug)]
pub struct Entries<'a>(pub &'a [u8]);

impl<'a> Iterator for Entries<'a> {
    type Item = (u64, u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (head, rest) = self.0.split_at_checked(10)?;
        let (name, rest) = rest.split_at_checked(usize::from(head[9]))?;
        self.0 = rest;
        Some((word(head, 0), head[8], name))
    }
}

impl Entries<'_> {
    /// Appends a name; false when it is longer than any file system's or there is no room.
    pub fn push(into: &mut Vec<u8>, room: usize, ino: u64, kind: u8, name: &[u8]) -> bool {
        let Ok(len) = u8::try_from(name.len()) else { return false };
        if into.len() + 10 + name.len() > room {
            return false;
        }
        into.extend_from_slice(&ino.to_ne_bytes());
        into.extend_from_slice(&[kind, len]);
        into.extend_from_slice(name);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        for op in OPS {
            let request = Request { a: -1, b: i64::MAX, c: i64::MIN, open: u64::MAX, room: 7, ..Request::new(op) };
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        let reply = Reply { result: -5, data_len: 9, is_outside: true };
        assert_eq!(Reply::decode(&reply.encode()), reply);
        let times = [(-1, 5), (7, 999_999_999), (i64::MAX, 0)];
        let meta = Meta { ino: 1, mode: 2, nlink: 3, uid: 4, gid: 5, size: u64::MAX, used_bytes: 7, rdev: 6, times };
        assert_eq!(Meta::decode(&meta.encode()), meta);
    }

    #[test]
    fn nonsense_is_no_request() {
        assert_eq!(Request::decode(&[0; REQUEST_BYTES]), None);
        assert_eq!(Request::decode(&[0xff; REQUEST_BYTES]), None);
        let long = Request { data_len: DATA_MAX as u32 + 1, ..Request::new(Op::Write) };
        assert_eq!(Request::decode(&long.encode()), None);
    }

    #[test]
    fn names_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        assert!(Entries::push(&mut bytes, 100, 5, 8, b"name"));
        assert!(Entries::push(&mut bytes, 100, 6, 4, b""));
        assert!(!Entries::push(&mut bytes, 30, 6, 4, b"too long"));
        assert_eq!(Entries(&bytes).collect::<Vec<_>>(), [(5, 8, &b"name"[..]), (6, 4, b"")]);
        assert_eq!(Entries(&bytes[..12]).count(), 0, "a cut name is none");
    }
}
