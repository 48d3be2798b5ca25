//! File systems that tests mount.

use std::time::SystemTime;

use fuser::{FileAttr, FileType, INodeNo};

/// The attributes of a node whose times and owner do not matter.
pub fn attr(node: u64, kind: FileType, perm: u16, size: u64) -> FileAttr {
    let then = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(node),
        size,
        blocks: size.div_ceil(512),
        atime: then,
        mtime: then,
        ctime: then,
        crtime: then,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
