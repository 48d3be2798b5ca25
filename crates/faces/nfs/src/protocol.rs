//! NFS version 3 on the wire (RFC 1813): numbers of procedures, status, attributes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_backend::{Attr, Errno, Kind, SetAttr, SetTime};

use crate::xdr::{Garbage, Reader, Writer};

/// The program NFS.
pub const NFS_PROGRAM: u32 = 100_003;
/// The program MOUNT.
pub const MOUNT_PROGRAM: u32 = 100_005;
/// The version of both.
pub const VERSION: u32 = 3;

/// Longest handle, bytes (RFC 1813, 2.4).
pub const HANDLE_MAX_BYTES: usize = 64;
/// Longest name that is looked at, bytes; file systems have shorter limits of their own.
pub const NAME_MAX_BYTES: usize = 1024;
/// Longest path, of a symbolic link or to mount, bytes (RFC 1813, 5.1.4).
pub const PATH_MAX_BYTES: usize = 1024 * 4;

/// Names of the procedures, by number.
pub const PROCEDURES: [&str; 22] = [
    "null",
    "getattr",
    "setattr",
    "lookup",
    "access",
    "readlink",
    "read",
    "write",
    "create",
    "mkdir",
    "symlink",
    "mknod",
    "remove",
    "rmdir",
    "rename",
    "link",
    "readdir",
    "readdirplus",
    "fsstat",
    "fsinfo",
    "pathconf",
    "commit",
];

/// Numbers of the procedures.
pub mod procedure {
    #![allow(missing_docs)]
    pub const NULL: u32 = 0;
    pub const GETATTR: u32 = 1;
    pub const SETATTR: u32 = 2;
    pub const LOOKUP: u32 = 3;
    pub const ACCESS: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const CREATE: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const SYMLINK: u32 = 10;
    pub const MKNOD: u32 = 11;
    pub const REMOVE: u32 = 12;
    pub const RMDIR: u32 = 13;
    pub const RENAME: u32 = 14;
    pub const LINK: u32 = 15;
    pub const READDIR: u32 = 16;
    pub const READDIRPLUS: u32 = 17;
    pub const FSSTAT: u32 = 18;
    pub const FSINFO: u32 = 19;
    pub const PATHCONF: u32 = 20;
    pub const COMMIT: u32 = 21;
}

/// What became of a call (RFC 1813, 2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u32);

#[allow(missing_docs)]
impl Status {
    pub const OK: Status = Status(0);
    pub const PERM: Status = Status(1);
    pub const NOENT: Status = Status(2);
    pub const IO: Status = Status(5);
    pub const NXIO: Status = Status(6);
    pub const ACCES: Status = Status(13);
    pub const EXIST: Status = Status(17);
    pub const XDEV: Status = Status(18);
    pub const NODEV: Status = Status(19);
    pub const NOTDIR: Status = Status(20);
    pub const ISDIR: Status = Status(21);
    pub const INVAL: Status = Status(22);
    pub const FBIG: Status = Status(27);
    pub const NOSPC: Status = Status(28);
    pub const ROFS: Status = Status(30);
    pub const MLINK: Status = Status(31);
    pub const NAMETOOLONG: Status = Status(63);
    pub const NOTEMPTY: Status = Status(66);
    pub const DQUOT: Status = Status(69);
    pub const STALE: Status = Status(70);
    pub const BADHANDLE: Status = Status(10001);
    pub const NOT_SYNC: Status = Status(10002);
    pub const BAD_COOKIE: Status = Status(10003);
    pub const NOTSUPP: Status = Status(10004);
    pub const TOOSMALL: Status = Status(10005);
    pub const SERVERFAULT: Status = Status(10006);
    pub const BADTYPE: Status = Status(10007);
    pub const JUKEBOX: Status = Status(10008);
}

impl From<Errno> for Status {
    fn from(error: Errno) -> Status {
        match error.0 {
            libc::EPERM => Status::PERM,
            libc::ENOENT => Status::NOENT,
            libc::ENXIO => Status::NXIO,
            libc::EACCES => Status::ACCES,
            libc::EEXIST => Status::EXIST,
            libc::EXDEV => Status::XDEV,
            libc::ENODEV => Status::NODEV,
            libc::ENOTDIR => Status::NOTDIR,
            libc::EISDIR => Status::ISDIR,
            libc::EINVAL | libc::ELOOP => Status::INVAL,
            libc::EFBIG => Status::FBIG,
            libc::ENOSPC => Status::NOSPC,
            libc::EROFS => Status::ROFS,
            libc::EMLINK => Status::MLINK,
            libc::ENAMETOOLONG => Status::NAMETOOLONG,
            libc::ENOTEMPTY => Status::NOTEMPTY,
            libc::EDQUOT => Status::DQUOT,
            libc::ESTALE => Status::STALE,
            libc::EOPNOTSUPP | libc::ENOSYS => Status::NOTSUPP,
            // The server is short of something for now.
            libc::EAGAIN | libc::EBUSY | libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::ETXTBSY => Status::JUKEBOX,
            _ => Status::IO,
        }
    }
}

/// What a procedure gives, or the status to answer.
pub type Answer<T> = Result<T, Status>;

/// How soon written bytes are on stable storage (RFC 1813, 3.3.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Stability {
    /// After a COMMIT.
    Unstable = 0,
    /// Before the answer, with the metadata that reading them needs.
    Data = 1,
    /// Before the answer, with all metadata.
    File = 2,
}

impl Stability {
    /// Reads it.
    pub fn read(reader: &mut Reader<'_>) -> Result<Stability, Garbage> {
        match reader.u32()? {
            0 => Ok(Stability::Unstable),
            1 => Ok(Stability::Data),
            2 => Ok(Stability::File),
            _ => Err(Garbage),
        }
    }
}

fn kind_number(kind: Kind) -> u32 {
    match kind {
        Kind::File => 1,
        Kind::Directory => 2,
        Kind::Block => 3,
        Kind::Character => 4,
        Kind::Symlink => 5,
        Kind::Socket => 6,
        Kind::Fifo => 7,
    }
}

fn kind_of(number: u32) -> Result<Kind, Garbage> {
    Ok(match number {
        1 => Kind::File,
        2 => Kind::Directory,
        3 => Kind::Block,
        4 => Kind::Character,
        5 => Kind::Symlink,
        6 => Kind::Socket,
        7 => Kind::Fifo,
        _ => return Err(Garbage),
    })
}

/// A time: seconds and nanoseconds since 1970, in 32 bits each. One outside of that is the nearest inside.
pub fn write_time(out: &mut Writer, time: SystemTime) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    match u32::try_from(since.as_secs()) {
        Ok(seconds) => out.u32(seconds).u32(since.subsec_nanos()),
        Err(_) => out.u32(u32::MAX).u32(0),
    };
}

/// Reads a time.
pub fn read_time(reader: &mut Reader<'_>) -> Result<SystemTime, Garbage> {
    let (seconds, ns) = (reader.u32()?, reader.u32()?);
    if ns >= 1_000_000_000 {
        return Err(Garbage);
    }
    Ok(UNIX_EPOCH + Duration::new(seconds.into(), ns))
}

/// Writes attributes (`fattr3`).
pub fn write_attr(out: &mut Writer, attr: &Attr) {
    out.u32(kind_number(attr.kind)).u32(attr.mode & 0o7777).u32(attr.links).u32(attr.uid).u32(attr.gid);
    out.u64(attr.size_bytes).u64(attr.used_bytes).u32(attr.device.0).u32(attr.device.1);
    out.u64(attr.fsid).u64(attr.fileid);
    write_time(out, attr.atime);
    write_time(out, attr.mtime);
    write_time(out, attr.ctime);
}

/// Bytes of the attributes of a node.
pub const ATTR_BYTES: usize = 84;

/// Reads attributes.
pub fn read_attr(reader: &mut Reader<'_>) -> Result<Attr, Garbage> {
    Ok(Attr {
        kind: kind_of(reader.u32()?)?,
        mode: reader.u32()?,
        links: reader.u32()?,
        uid: reader.u32()?,
        gid: reader.u32()?,
        size_bytes: reader.u64()?,
        used_bytes: reader.u64()?,
        device: (reader.u32()?, reader.u32()?),
        fsid: reader.u64()?,
        fileid: reader.u64()?,
        atime: read_time(reader)?,
        mtime: read_time(reader)?,
        ctime: read_time(reader)?,
    })
}

/// Writes attributes after an operation (`post_op_attr`), where they are known.
pub fn write_after(out: &mut Writer, attr: Option<&Attr>) {
    out.optional(attr, write_attr);
}

/// What a directory or file was before and after an operation (`wcc_data`), as far as that is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Before; only where nobody else can have changed it in between.
    pub before: Option<Attr>,
    /// After.
    pub after: Option<Attr>,
}

/// Writes what became of a node.
pub fn write_change(out: &mut Writer, change: &Change) {
    out.optional(change.before.as_ref(), |out, attr| {
        out.u64(attr.size_bytes);
        write_time(out, attr.mtime);
        write_time(out, attr.ctime);
    });
    write_after(out, change.after.as_ref());
}

/// Reads the attributes to set (`sattr3`).
pub fn read_set(reader: &mut Reader<'_>) -> Result<SetAttr, Garbage> {
    let mode = reader.optional(Reader::u32)?.map(|mode| mode & 0o7777);
    let (uid, gid) = (reader.optional(Reader::u32)?, reader.optional(Reader::u32)?);
    let size_bytes = reader.optional(Reader::u64)?;
    let time = |reader: &mut Reader<'_>| {
        Ok(match reader.u32()? {
            0 => None,
            1 => Some(SetTime::Now),
            2 => Some(SetTime::To(read_time(reader)?)),
            _ => return Err(Garbage),
        })
    };
    Ok(SetAttr { mode, takes: 0, uid, gid, size_bytes, atime: time(reader)?, mtime: time(reader)? })
}

/// Writes the attributes to set.
pub fn write_set(out: &mut Writer, set: &SetAttr) {
    let number = |out: &mut Writer, value: u32| {
        out.u32(value);
    };
    out.optional(set.mode, number);
    out.optional(set.uid, number);
    out.optional(set.gid, number);
    out.optional(set.size_bytes, |out, size| {
        out.u64(size);
    });
    for time in [set.atime, set.mtime] {
        match time {
            None => {
                out.u32(0);
            }
            Some(SetTime::Now) => {
                out.u32(1);
            }
            Some(SetTime::To(time)) => {
                out.u32(2);
                write_time(out, time);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn times() -> impl Strategy<Value = SystemTime> {
        (any::<u32>(), 0u32..1_000_000_000).prop_map(|(s, ns)| UNIX_EPOCH + Duration::new(s.into(), ns))
    }

    fn set_times() -> impl Strategy<Value = Option<SetTime>> {
        prop_oneof![Just(None), Just(Some(SetTime::Now)), times().prop_map(|t| Some(SetTime::To(t)))]
    }

    proptest! {
        #[test]
        fn attributes_round_trip(
            (kind, mode, links, uid, gid) in (1u32..8, 0u32..0o10000, any::<u32>(), any::<u32>(), any::<u32>()),
            (size_bytes, used_bytes, device) in (any::<u64>(), any::<u64>(), any::<(u32, u32)>()),
            (fsid, fileid, atime, mtime, ctime) in (any::<u64>(), any::<u64>(), times(), times(), times()),
        ) {
            let kind = kind_of(kind).unwrap();
            let attr =
                Attr { kind, mode, links, uid, gid, size_bytes, used_bytes, device, fsid, fileid, atime, mtime, ctime };
            let mut out = Writer::default();
            write_attr(&mut out, &attr);
            prop_assert_eq!(out.len(), ATTR_BYTES);
            prop_assert_eq!(read_attr(&mut Reader::new(&out.into_bytes())), Ok(attr));
        }

        #[test]
        fn attributes_to_set_round_trip(
            mode in proptest::option::of(0u32..0o10000),
            uid in any::<Option<u32>>(),
            gid in any::<Option<u32>>(),
            size_bytes in any::<Option<u64>>(),
            (atime, mtime) in (set_times(), set_times()),
        ) {
            let set = SetAttr { mode, takes: 0, uid, gid, size_bytes, atime, mtime };
            let mut out = Writer::default();
            write_set(&mut out, &set);
            prop_assert_eq!(read_set(&mut Reader::new(&out.into_bytes())), Ok(set));
        }

        #[test]
        fn any_bytes_are_attributes_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = read_attr(&mut Reader::new(&bytes));
            let _ = read_set(&mut Reader::new(&bytes));
        }
    }

    #[test]
    fn times_outside_of_32_bits_are_the_nearest_inside() {
        let written = |time| {
            let mut out = Writer::default();
            write_time(&mut out, time);
            read_time(&mut Reader::new(&out.into_bytes())).unwrap()
        };
        assert_eq!(written(UNIX_EPOCH - Duration::from_secs(5)), UNIX_EPOCH);
        let late = UNIX_EPOCH + Duration::from_secs(1 << 40);
        assert_eq!(written(late), UNIX_EPOCH + Duration::from_secs(u32::MAX.into()));
    }
}
